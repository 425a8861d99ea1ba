"""The real process: it starts, answers over a socket, takes up a new model on SIGHUP, and ends when asked to."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from serving_cases import folder, listening

from gramtower.cli.output import note
from gramtower.cli.program import run
from gramtower.serving import server
from gramtower.serving.served_models import Models
from gramtower.serving.server import _watch, bound, is_loopback
from gramtower.serving.snapshot import Source

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals are those of POSIX")


def line(process, pattern, seconds=60.0):
    """The first line of standard error that matches, within a time."""
    end, seen = time.monotonic() + seconds, []
    while time.monotonic() < end:
        if select.select([process.stderr], [], [], 0.2)[0]:
            seen.append(process.stderr.readline().decode())
            if not seen[-1]:
                break
            if found := re.search(pattern, seen[-1]):
                return found
    raise AssertionError("".join(seen))


def ask(base, path, body=None, headers=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(base + path, data, headers or {})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.loads(answer.read())


@contextlib.contextmanager
def serving(path, *options):
    """A server of a model in a process of its own, and its address; it ends when it is asked to."""
    command = [sys.executable, "-m", "gramtower", "serve", str(path), "--port", "0", *map(str, options)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, bufsize=0, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        yield process, line(process, r"serving at (http://127\.0\.0\.1:\d+)/", 180)[1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_a_server_lives_through_damage_takes_up_a_new_model_and_ends(tmp_path):
    path = shutil.copy(folder() / "history.gramtower", tmp_path / "model.gramtower")
    (tmp_path / "token").write_text("s3cret\n")
    options = ["--token-file", tmp_path / "token", "--right-table", folder() / "items.csv", "--right-id", "item"]
    with serving(path, *options) as (process, base):
        token = {"authorization": "Bearer s3cret"}
        assert ask(base, "/ready")["status"] == "ready"
        with pytest.raises(urllib.error.HTTPError, match="401") as refused:
            ask(base, "/models")
        refused.value.close()
        assert len(ask(base, "/recommend", {"left": ["日本 😀"], "k": 3}, token)["answers"][0]["results"]) == 3
        path.write_bytes(b"damaged")
        process.send_signal(signal.SIGHUP)
        line(process, "refused, the old one serves on")
        assert len(ask(base, "/embed", {"ids": ["a/b"]}, token)["embeddings"][0]) == 6
        shutil.copy(folder() / "plain.gramtower", path)
        process.send_signal(signal.SIGHUP)
        line(process, "loaded in")
        assert len(ask(base, "/embed", {"ids": ["a/b"]}, token)["embeddings"][0]) == 5
        port = base.rpartition(":")[2]
        with socket.create_connection(("127.0.0.1", int(port)), 10) as raw:  # what is no HTTP
            raw.sendall(b"\x00\xff garbage\r\n\r\n")
            assert raw.recv(100).startswith(b"HTTP/1.1 400")
        assert ask(base, "/health")["status"] == "ok"


def test_a_hangup_while_models_are_loaded_does_not_end_the_server(monkeypatch):
    heard = []

    class Loading(Exception):
        pass

    def load(*_):
        os.kill(os.getpid(), signal.SIGHUP)
        raise Loading

    monkeypatch.setattr(server, "Models", load)
    before = signal.signal(signal.SIGHUP, lambda *_: heard.append("before"))
    try:
        with pytest.raises(Loading):
            server.serve([], server.Options(port=0), print)
        assert heard == []
        os.kill(os.getpid(), signal.SIGHUP)
        assert heard == ["before"]
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_server_takes_connections_and_the_newest_model_when_it_says_so(tmp_path, monkeypatch):
    path, lines = tmp_path / "model.gramtower", []
    shutil.copy(folder() / "history.gramtower", path)
    with bound("127.0.0.1", 0) as listening:

        class Slow(Models):
            def __init__(self, *given):
                super().__init__(*given)
                shutil.copy(folder() / "plain.gramtower", path)  # a SIGHUP that came with it was not heard

        def ready():
            socket.create_connection(listening.getsockname(), 5).close()
            lines.append("ready")
            os.kill(os.getpid(), signal.SIGTERM)

        monkeypatch.setattr(server, "Models", Slow)
        before = signal.signal(signal.SIGTERM, lambda *_: lines.append("ended"))
        try:
            server.serve_at(listening, [Source("default", path)], server.Options(port=0), lines.append, ready)
        finally:
            signal.signal(signal.SIGTERM, before)
            gc.unfreeze()
    assert [re.search("loaded|ready|ended", line)[0] for line in lines] == ["loaded", "loaded", "ready", "ended"]


def test_a_line_is_written_in_one_piece(monkeypatch):
    written = []

    class Unbuffered(io.StringIO):
        def write(self, text):
            written.append(text)

    monkeypatch.setattr(sys, "stderr", Unbuffered())
    note("worker 1: loaded")
    assert written == ["worker 1: loaded\n"]  # else lines of several processes run into one another


def test_a_port_in_use_is_said_before_anything_is_loaded(capsys):
    with bound("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        assert run(["serve", str(folder() / "plain.gramtower"), "--port", str(port)]) == 2
    assert f"port: got {port}, which is in use" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "run: got nowhere"),
        (["{model}", "--port", "99999"], "port: got 99999"),
        (["{model}", "--host", "256.1.1.1"], "host: got '256.1.1.1'"),
        (["{model}", "--index", "tree"], "index: got 'tree'"),
        (["{model}", "--model", "x"], "--model: got 'x', expected NAME=RUN"),
        (["{model}", "--right-table", "{items}", "--right-id", "itm"], "itm"),
        (["{model}", "--right-table", "{items}", "--right-id", "title"], "none of them with an id of the model"),
        (["{model}", "--token-file", "{model}"], "--token-file"),
        (["{model}", "--max-body", "much"], "--max-body: got 'much'"),
    ],
)
def test_what_cannot_be_served_is_one_line_and_code_2(capsys, arguments, message):
    names = {"model": folder() / "plain.gramtower", "items": folder() / "items.csv"}
    filled = [argument.format(**names) for argument in arguments]
    assert run(["serve", *filled, *([] if "--port" in filled else ["--port", "0"])]) == 2
    assert message in capsys.readouterr().err


def long_answer(address):
    """A connection with a small buffer on which an answer of many megabytes is asked for."""
    body = json.dumps({"left": ["a/b"] * 3000, "k": 33, "columns": True, "stream": True}).encode()
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    slow.settimeout(30)
    slow.connect(("127.0.0.1", int(address.split(":")[2].strip("/"))))
    slow.sendall(b"POST /recommend HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    return slow


def all_of(connection, pause=0.0):
    pieces = []
    with contextlib.suppress(ConnectionError):
        while not b"".join(pieces[-2:]).endswith(b"\r\n0\r\n\r\n") and (piece := connection.recv(1 << 20)):
            pieces.append(piece)
            time.sleep(pause)
    return b"".join(pieces)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="only Linux closes such connections")
def test_a_client_that_takes_nothing_of_its_answer_loses_its_connection(monkeypatch):
    monkeypatch.setattr(server, "_STALLED", 0.5)
    with listening() as address:
        with long_answer(address) as quick:
            whole = all_of(quick)
        assert whole.endswith(b"0\r\n\r\n")
        for pause in (2.5, 10, 40):  # a server on a busy machine takes longer to fill the buffers
            with long_answer(address) as slow:
                time.sleep(pause)
                taken = len(all_of(slow))
            if taken < len(whole) / 2:
                break
        assert taken < len(whole) / 2
        with long_answer(address) as steady:  # slowly, but all the time
            assert len(all_of(steady, pause=0.02)) == len(whole)


def test_files_that_are_watched_are_looked_at_again_and_again():
    looks = []

    class Looked:
        def reload(self, changed_only):
            looks.append(changed_only)

    async def watched():
        task = asyncio.create_task(_watch(Looked(), 0.01))
        while len(looks) < 3:
            await asyncio.sleep(0.01)
        task.cancel()

    asyncio.run(asyncio.wait_for(watched(), 20))
    assert set(looks) == {True}


def test_loopback_is_told_from_other_addresses():
    assert [is_loopback(host) for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost")] == [True] * 4
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "example.org")] == [False] * 4


def spawned(process):
    """The workers of a server."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            parent = re.search(r"^PPid:\s*(\d+)", (entry / "status").read_text(), re.MULTILINE)[1]
            if int(parent) == process.pid and b"spawn_main" in (entry / "cmdline").read_bytes():
                found.add(int(entry.name))
    return found


def test_workers_share_a_port_a_new_model_and_an_end(tmp_path):
    path = tmp_path / "model.gramtower"
    shutil.copy(folder() / "history.gramtower", path)
    with serving(path, "--workers", "2") as (process, base):

        def worker():
            with urllib.request.urlopen(base + "/metrics", timeout=20) as answer:
                return re.search(r'gramtower_waiting_requests\{worker="(\d+)"\}', answer.read().decode())[1]

        assert len(ask(base, "/recommend", {"left": ["日本 😀"], "k": 3})["answers"][0]["results"]) == 3
        assert worker() in ("1", "2")
        shutil.copy(folder() / "plain.gramtower", tmp_path / "new")
        (tmp_path / "new").replace(path)  # mapped files are replaced by renaming
        process.send_signal(signal.SIGHUP)
        swapped = {line(process, r"worker (\d): model .* loaded in")[1] for _ in range(2)}
        assert swapped == {"1", "2"}
        assert {len(ask(base, "/embed", {"ids": ["a/b"]})["embeddings"][0]) for _ in range(8)} == {5}
        if Path("/proc/self/status").exists():
            before = spawned(process)
            assert len(before) == 2
            os.kill(before.pop(), signal.SIGKILL)
            number = line(process, r"worker (\d) ended with exit code -9")[1]
            end = time.monotonic() + 60
            while spawned(process) == before and time.monotonic() < end:
                time.sleep(0.01)
            process.send_signal(signal.SIGHUP)  # while the new one starts: it reads its model, then again
            loaded = [line(process, r"worker (\d): model .* loaded in", 180)[1] for _ in range(3)]
            assert loaded.count(number) == 2
        assert ask(base, "/ready")["status"] == "ready"


def answering(base):
    """The workers that some requests reach."""
    found = set()
    for _ in range(20):
        with urllib.request.urlopen(base + "/metrics", timeout=20) as answer:
            found.add(re.search(r'gramtower_waiting_requests\{worker="(\d+)"\}', answer.read().decode())[1])
    return found


def assert_both_serve(process, base, dim):
    """Wait until requests reach two workers, whose models have embeddings of this size."""
    end = time.monotonic() + 60
    while len(answering(base)) < 2 and time.monotonic() < end:
        time.sleep(0.05)
    assert process.poll() is None
    assert {len(ask(base, "/embed", {"ids": ["a/b"]})["embeddings"][0]) for _ in range(30)} == {dim}


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="files are kept by their descriptors")
def test_workers_that_are_started_again_serve_the_model_that_was_read_first(tmp_path):
    path = tmp_path / "model.gramtower"
    shutil.copy(folder() / "history.gramtower", path)
    with serving(path, "--workers", "2", "--watch") as (process, base):
        (tmp_path / "new").write_bytes(b"garbage")
        (tmp_path / "new").replace(path)
        assert {line(process, r"worker (\d): .* refused")[1] for _ in range(2)} == {"1", "2"}
        os.kill(min(spawned(process)), signal.SIGKILL)
        number = line(process, r"worker (\d) ended with exit code -9")[1]
        assert line(process, r"worker (\d): model .* loaded in", 180)[1] == number
        assert_both_serve(process, base, 6)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="files are kept by their descriptors")
def test_a_worker_that_cannot_start_again_is_tried_again_while_another_one_serves(tmp_path):
    path, table = tmp_path / "model.gramtower", tmp_path / "items.csv"
    shutil.copy(folder() / "history.gramtower", path)
    shutil.copy(folder() / "items.csv", table)
    with serving(path, "--workers", "2", "--right-table", table, "--right-id", "item") as (process, base):
        shutil.copy(folder() / "plain.gramtower", tmp_path / "new")
        (tmp_path / "new").replace(path)  # a model that no one asked to be taken up
        good = table.read_bytes()
        table.write_text("no,such\ntable,here\n")
        os.kill(min(spawned(process)), signal.SIGKILL)
        line(process, r"worker \d ended with exit code -9")
        line(process, r"worker \d ended with exit code 2", 180)
        assert ask(base, "/ready")["status"] == "ready"
        table.write_bytes(good)
        line(process, r"worker \d: model .* loaded in", 180)
        assert_both_serve(process, base, 6)


def test_workers_that_cannot_start_end_all(tmp_path, capfd):
    (tmp_path / "model.gramtower").write_bytes(b"damaged")
    assert run(["serve", str(tmp_path / "model.gramtower"), "--port", "0", "--workers", "2"]) == 2
    said = capfd.readouterr().err
    assert "damaged or not a gramtower model" in said  # by a worker
    assert "models that can be served" in said


def test_what_stays_for_ever_is_left_out_of_garbage_collections():
    try:
        server.settle()
        assert "gramtower.retrieval.scan" in sys.modules
        assert gc.get_freeze_count() > 10_000
        assert len(gc.get_objects()) < 10_000  # what a collection goes through
    finally:
        gc.unfreeze()
