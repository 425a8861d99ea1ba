"""`make dist`, after the build: the wheel in an empty environment, before and after each extra is installed.

    python tests/wheel.py dist [--constraints constraints.txt] [--only io,plots]

Checked are what a user meets: the package imports, learns, answers and is typed; without an extra, what needs it fails
with the line that installs it; with that very extra it works. Extras are installed one after the other, so that each is
first missing; the demo is run once those of the README are there. hnsw comes as source and is left out where there is
no C++ compiler; gpu brings triton alone.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

CORE = """
import importlib.metadata, importlib.resources, sys
import numpy as np, gramtower as gt
assert "site-packages" in gt.__file__, gt.__file__
assert gt.__version__ == importlib.metadata.version("gramtower"), "two versions"
assert importlib.resources.files("gramtower").joinpath("py.typed").is_file(), "no py.typed"
pairs = gt.Interactions.from_arrays(np.arange(60) % 10, np.arange(60) % 7)
model = gt.TwoTower(dim=4, max_iterations=2, device="cpu").fit(pairs)
model.save("model.gramtower")
assert gt.load("model.gramtower").recommend([3], k=2)[0].shape == (1, 2)
print(gt.__version__)
"""
PAIRS = (
    "import numpy as np, gramtower as gt\npairs = gt.Interactions.from_arrays(np.arange(60) % 10, np.arange(60) % 7)\n"
)
TUNE = "gt.TwoTower(dim=4, max_iterations=2, device='cpu').tune(pairs, trials=1, validation=0.2, metric='recall@3')"
DRAW = "from gramtower.experiments import figures; figures.panels(4, 3, 1)"
CLOUD = "from gramtower._util.files import as_path; as_path('http://127.0.0.1:9/x').place"
MAIN = "import sys; sys.argv[1:] = {!r}; from gramtower.cli import main; main()"
NOWHERE = "256.256.256.256"  # a host that no server can listen on
#: extra → the program that needs it, and what it says without; in an order in which each is missing at first.
EXTRAS = {
    "io": (PAIRS + "gt.Interactions.from_frame({'u': [1, 2], 'i': [2, 3]}, 'u', 'i')", "reading tables needs polars"),
    "plots": (DRAW, "drawing needs matplotlib"),
    "tune": (PAIRS + TUNE, "tuning needs optuna"),
    "ann": ("from gramtower.serving import ann_index; ann_index._faiss().IndexFlatIP(4)", "an index needs faiss"),
    "hnsw": ("from gramtower.serving import ann_index; ann_index._hnswlib().Index(space='ip', dim=4)", "needs hnswlib"),
    "cloud": (CLOUD, "reading and writing URLs needs obstore"),
    "text": ("from gramtower._util.checks import need; need('model2vec', 'an encoder').StaticModel", "needs model2vec"),
    "cli": (MAIN.format(["info", "model.gramtower"]), "the command line needs cyclopts"),
    "serve": (MAIN.format(["serve", "model.gramtower", "--host", NOWHERE]), "serve needs"),
}


def run(python: Path, folder: Path, program: str) -> tuple[int, str]:
    """Exit status and all output of a program, in an environment without this source tree."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        [python, "-c", program], cwd=folder, env=clean | {"COLUMNS": "400"}, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    return done.returncode, done.stdout


def install(python: Path, what: str, constraints: Path) -> None:
    """Install a wheel, perhaps with an extra."""
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "-c", constraints, what], check=True, stderr=subprocess.DEVNULL)


def check(found: bool, what: str, output: str) -> None:
    """Say what holds; end with what does not."""
    print(f"{'ok  ' if found else 'FAIL'}  {what}", flush=True)
    if not found:
        sys.exit(output)


def main() -> None:
    """All of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dist", type=Path)
    parser.add_argument("--constraints", type=Path, default=Path("constraints.txt"))
    parser.add_argument("--only", help="extras to try, with commas; all unless given")
    given = parser.parse_args()
    (wheel,) = given.dist.resolve().glob("*.whl")
    wanted = given.only.split(",") if given.only else list(EXTRAS)
    with tempfile.TemporaryDirectory() as scratch:
        folder, python = Path(scratch), Path(scratch) / "env" / "bin" / "python"
        venv.create(folder / "env", with_pip=True)
        install(python, str(wheel), given.constraints)
        status, output = run(python, folder, CORE)
        check(status == 0 and wheel.name.split("-")[1] in output, f"{wheel.name} learns and answers", output)
        for extra in wanted:
            if extra == "hnsw" and not (shutil.which("g++") or shutil.which("clang++")):
                print("left out: hnsw, which needs a C++ compiler")
                continue
            program, message = EXTRAS[extra]
            line = f'pip install "gramtower[{extra}]"'
            status, output = run(python, folder, program)
            check(status != 0 and message in output and line in output, f"without {extra}: {message} … {line}", output)
            install(python, f"{wheel}[{extra}]", given.constraints)
            status, output = run(python, folder, program)
            expected = line not in output and (NOWHERE in output if extra == "serve" else status == 0)
            check(expected, f"with {extra}: it works", output)
        if {"io", "plots", "cli"} <= set(wanted):
            status, output = run(python, folder, MAIN.format(["demo"]))
            check(status == 0 and "two towers" in output, "the demo runs", output)


if __name__ == "__main__":
    main()
