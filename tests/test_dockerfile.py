"""What the Dockerfile names is there, where no Docker is too: files, extras, flags, the path of its health check."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from serving_cases import client

from gramtower.cli.program import COMMANDS, make_app

app = make_app(*COMMANDS)
ROOT = Path(__file__).parent.parent
TEXT = re.sub(r"\\\n\s*", " ", (ROOT / "Dockerfile").read_text())
STEPS = [line.split(maxsplit=1) for line in TEXT.splitlines() if line and not line.startswith("#")]


def steps(name):
    return [rest for kind, rest in STEPS if kind == name]


def test_what_is_copied_is_there_and_not_ignored():
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [name for rest in steps("COPY") if "--from" not in rest for name in rest.split()[:-1]]
    assert copied
    for name in copied:
        assert (ROOT / name).exists(), name
        assert name in kept, name


def test_what_is_installed_is_offered():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = re.search(r'"\.\[([\w,]+)\]"', TEXT)[1].split(",")
    assert set(wanted) <= set(project["optional-dependencies"])
    pinned = re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert {"torch", "starlette", "uvicorn", "faiss-cpu"} <= set(pinned)
    images = {rest.split()[0] for rest in steps("FROM")}
    versions = [tuple(map(int, re.match(r"python:(\d+)\.(\d+)-slim", image).groups())) for image in images]
    assert all(version >= (3, 11) for version in versions)


def test_the_command_is_one_that_is_understood():
    words = json.loads(steps("ENTRYPOINT")[0]) + json.loads(steps("CMD")[0])
    assert words[0] == "gramtower"
    _, bound, _ = app.parse_args(words[1:], exit_on_error=False, print_error=False)
    assert (bound.arguments["run"], bound.arguments["host"]) == (Path("/model"), "0.0.0.0")
    assert bound.arguments["port"] == int(steps("EXPOSE")[0])


def test_it_does_not_run_as_root_and_asks_for_its_health_where_it_listens():
    assert re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", steps("USER")[-1])
    address = urlsplit(re.search(r"http://[^']+", steps("HEALTHCHECK")[0])[0])
    assert address.port == int(steps("EXPOSE")[0])
    with client(token="s3cret") as api:  # and without a token
        assert api.get(address.path).status_code == 200


def test_commands_and_paths_in_the_page_on_serving_are_real():
    text = (ROOT / "docs/serving.md").read_text()
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", re.sub(r"(?s)<!--.*?-->", "", text)))
    known = {
        name for command in ("serve", "index") for a in app[command].assemble_argument_collection() for name in a.names
    }
    known |= {"--help", "--docs"}  # of all commands, and of the benchmark
    assert flags <= known, flags - known
    with client() as api:
        described = set(api.get("/openapi.json").json()["paths"])
    for path in re.findall(r"`(?:GET|POST) (/[\w.]*)", text):
        assert path in described | {"/", "/docs", "/openapi.json"}, path
    assert described <= set(re.findall(r"`(?:GET|POST) (/[\w.]*)", text))


@pytest.mark.parametrize("name", ["systemd", "kubernetes"])
def test_there_is_a_snippet_for(name):
    assert f"## {name}" in (ROOT / "docs/serving.md").read_text().lower()
