"""What a server logs: each event is one line, as text or JSON, and clients cannot write lines of their own."""

from __future__ import annotations

import http.client
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
from serving_cases import client, folder

from gramtower.cli.program import run
from gramtower.serving import messages

HOSTILE = '/x\r\n2030-01-01 fake line\x1b[2J\u202e\u2028"\\\x85é'


def asked(form, path="/recommend", **more):
    scope = {"type": "http", "method": "POST", "path": path, "client": ("10.0.0.7", 4711), **more}
    messages.log_request(form, scope, 200, 0.0123)


def test_a_request_is_one_line_of_text(capsys):
    asked("text", raw_path=b"/map", query_string=b"column=year")
    line = capsys.readouterr().err
    assert re.fullmatch(r'\d{4}-\S+\+00:00 10\.0\.0\.7 "POST /map\?column=year" 200 12\.3 ms\n', line)


def test_a_request_is_one_json_object(capsys):
    messages.log_request("json", {"method": "GET", "path": "/health", "client": None}, 503, 2.0, "3")
    found = json.loads(capsys.readouterr().err)
    assert found.pop("time").endswith("+00:00")
    expected = {"level": "info", "message": "request", "client": "-", "method": "GET", "target": "/health"}
    assert found == expected | {"status": 503, "seconds": 2.0, "worker": "3"}


@pytest.mark.parametrize("form", messages.LOG_FORMATS)
@pytest.mark.parametrize("raw", [True, False])
def test_hostile_targets_and_methods_stay_within_their_line(form, raw, capsys):
    more = {"raw_path": HOSTILE.encode() + b"\xff\n"} if raw else {}
    asked(form, HOSTILE + "\ud800", method="GET\nX", **more)
    written = capsys.readouterr().err
    assert written.count("\n") == 1
    assert written[:-1].isprintable()
    if form == "json":
        assert json.loads(written)["target"].startswith("/x\r\n2030")
    else:
        assert written.count('"') - written.count('\\"') == 2


def test_long_targets_are_cut(capsys):
    asked("text", "/" + "x" * 100_000)
    assert len(capsys.readouterr().err) < 3000


@pytest.mark.parametrize("form", messages.LOG_FORMATS)
def test_tracebacks_cannot_forge_lines(form, capsys):
    logger = logging.getLogger("gramtower.test-logs")
    logger.handlers, logger.propagate = [messages.LogHandler(form)], False
    try:
        raise ValueError("evil\n2030-01-01 fake line\rmore")
    except ValueError:
        logger.exception("a fault\nof the server")
    written = capsys.readouterr().err
    if form == "json":
        found = json.loads(written)
        assert (found["level"], found["message"]) == ("error", "a fault\nof the server")
        assert "evil" in found["traceback"]
    else:
        first, *rest = written.splitlines()
        assert first == "a fault\\nof the server"
        assert all(line.startswith("    ") for line in rest)


def test_each_request_is_handed_to_the_log_with_its_status(tmp_path):
    seen = []
    with client(log=lambda scope, status, seconds: seen.append((scope["path"], status, seconds >= 0))) as api:
        api.get("/health")
        api.get("/no\nsuch")
        api.post("/recommend", json={"left": ["unknown"]})
    assert seen == [("/health", 200, True), ("/no\nsuch", 404, True), ("/recommend", 404, True)]


@pytest.mark.skipif(os.name != "posix", reason="signals are those of POSIX")
def test_a_server_logs_as_it_is_told(tmp_path):
    path = shutil.copy(folder() / "plain.gramtower", tmp_path / "model.gramtower")
    command = [sys.executable, "-m", "gramtower", "serve", str(path), "--port", "0", "--access-log"]
    command += ["--log-format", "json"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        lines = []
        while not lines or "serving at" not in lines[-1]["message"]:
            lines.append(json.loads(process.stderr.readline()))
        port = int(re.search(r":(\d+)/", lines[-1]["message"])[1])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request("GET", "/health%0d%0afake?x=%1b")
        assert connection.getresponse().status == 404
        connection.close()
        found = json.loads(process.stderr.readline())
        assert (found["method"], found["status"], found["client"]) == ("GET", 404, "127.0.0.1")
        assert found["target"] == "/health%0d%0afake?x=%1b"
        process.send_signal(signal.SIGTERM)
        rest = process.communicate(timeout=30)[1].decode()
        assert all(json.loads(line) for line in rest.splitlines())
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_an_unknown_format_is_refused(capsys):
    assert run(["serve", str(folder() / "plain.gramtower"), "--port", "0", "--log-format", "xml"]) == 2
    assert "--log-format" in capsys.readouterr().err
