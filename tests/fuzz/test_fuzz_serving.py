"""Hostile requests to a server: each is answered with a status below 500 and JSON, and the worker is still there.

`make fuzz` tries at least FUZZ_REQUESTS of them (10,000 unless given) and as many more as its time allows. Further
tests send hostile bytes to a port of this machine, and replace models and kill workers while others ask.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import random
import re
import signal
import socket
import string
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from urllib.parse import quote

import pytest
from harness import MINUTES, Fuzz, mutated

sys.path.insert(0, str(Path(__file__).parent.parent))

from serving_cases import ODD, Client, client, folder, listening, service, source

import gramtower as gt
from gramtower._util.files import replacing
from gramtower.serving.messages import Limits

LEAST = int(os.environ.get("FUZZ_REQUESTS", "10000")) if MINUTES else 400
POSTS = ("/recommend", "/similar", "/score", "/embed", "/explain", "/search", "/entity")
GETS = ("/map", "/run", "/models", "/health", "/ready", "/metrics", "/docs", "/openapi.json", "/")
FIELDS = (
    "left", "right", "ids", "id", "k", "model", "side", "allow", "deny", "filter", "left_features", "right_features",
    "histories", "columns", "stream", "together", "exclude_seen", "text", "most", "where", "boost", "popularity",
    "diversity", "at_most", "min_score", "scores",
)  # fmt: skip
STATUSES = {200, 400, 401, 404, 405, 408, 413, 421, 422, 503}


NUMBERS = [0, 1, -1, 2**31, 2**63, 2**64, -(2**70), 10**300, 5, 11, 39]
NUMBERS += [0.0, -0.0, 1.5, 1e308, 5e-324, 1e39, float("nan"), float("inf")]
WORDS = ["", "i1", "i7", "user 1", *ODD, "left", "right", "up", "history", "table", "matrix", "genre", "year", "title"]
WORDS += ["age", "city", "War", "Comedy", "Oslo", "min", "max", "1987", "x" * 5000, "../../etc/passwd", "\0", "a\nb"]
WORDS += ["year >= 1990", "genre in ['War'] and not year", "year < genre", "not " * 200, "(" * 200, "[" * 90 + "]" * 90]
WORDS += ["%00", "<script>", "${x}", "'; drop", "\\", "\ud800"]


def leaf(rng):
    kind = rng.randrange(4)
    if kind < 3:
        return rng.choice([NUMBERS, [True, False, None], WORDS][kind])
    ranges = [(32, 127), (0, 0xD7FF), (0x1F600, 0x1F650)]
    return "".join(chr(rng.randrange(*rng.choice(ranges))) for _ in range(rng.randrange(12)))


def value(rng, depth=0):
    """Anything that JSON can hold, and a little more."""
    kind = rng.random()
    if depth > 3 or kind < 0.5:
        return leaf(rng)
    if kind < 0.8:
        return [value(rng, depth + 1) for _ in range(rng.choice([0, 1, 1, 2, 3, 8]))]
    names = rng.sample([*FIELDS, "min", "max", "genre", "year", "age", "city", ""], rng.randrange(4))
    return {name: value(rng, depth + 1) for name in names}


def plausible(rng, path):
    """A body that is right but for what is changed in it."""
    some = lambda prefix, n: [f"{prefix}{rng.randrange(42)}" for _ in range(rng.randrange(1, n))]  # noqa: E731
    users = lambda n: [rng.choice([*ODD, "user 1", "user 2"]) for _ in range(rng.randrange(1, n))]  # noqa: E731
    body = {
        "/recommend": lambda: rng.choice(
            [
                {
                    "left": users(4),
                    "k": rng.randrange(1, 50),
                    "filter": {"genre": rng.choice(["War", ["War", "Noir"]])},
                },
                {"histories": [some("i", 5), []], "columns": True},
                {
                    "model": "table",
                    "left_features": [{"age": rng.random() * 90, "city": "Oslo"}],
                    "histories": [["i1"]],
                },
                {"model": "table", "left_features": {"age": [1.0, None], "city": [None, "Lima"]}},
                {"model": "matrix", "left_features": [[rng.gauss(0, 10.0 ** rng.randrange(30)) for _ in range(3)]]},
                {"model": "matrix", "left": [rng.randrange(-2, 14)], "stream": True},
                {"left": users(3), "allow": [some("i", 9), some("i", 3)], "popularity": rng.gauss(0, 1)},
                {
                    "left": users(4),
                    "where": rng.choice(["genre == 'War' or year > 1990", "year"]),
                    "boost": {"year": rng.choice(NUMBERS)},
                    "diversity": rng.random(),
                    "at_most": {"genre": rng.randrange(4)},
                    "min_score": rng.gauss(0, 1),
                    "scores": rng.choice(["raw", "percentile", "probability"]),
                },
                {"left": users(3), "allow": some("i", 9), "deny": some("i", 9), "exclude_seen": False},
            ]
        ),
        "/similar": lambda: {"ids": some("i", 4), "k": rng.randrange(1, 60), "together": rng.random() < 0.5},
        "/score": lambda: {"left": ["a/b"], "right": some("i", 2)},
        "/embed": lambda: rng.choice([{"ids": users(3)}, {"side": "right", "ids": some("i", 3)}, {"histories": [[]]}]),
        "/explain": lambda: rng.choice(
            [
                {"left": users(2)[0], "right": some("i", 2)[0], "most": rng.randrange(1, 9)},
                {"right": some("i", 2)[0], "histories": [some("i", 4)]},
                {"model": "plain", "left": users(2)[0], "right": some("i", 2)[0]},
                {"model": "matrix", "right": 3, "left_features": [[rng.gauss(0, 10.0 ** rng.randrange(30))] * 3]},
            ]
        ),
        "/search": lambda: {"text": leaf(rng), "side": rng.choice(["left", "right"])},
        "/entity": lambda: {"id": rng.choice(users(2) + some("i", 2)), "side": rng.choice(["left", "right"])},
    }[path]()
    for _ in range(rng.choice([0, 1, 1, 2])):
        body[rng.choice([*body, *FIELDS]) if body else rng.choice(FIELDS)] = value(rng)
    return body


def request(rng):
    """A method, a path, a body and headers."""
    path = rng.choice(POSTS)
    headers = {}
    kind = rng.random()
    if kind < 0.6:
        content = json.dumps(plausible(rng, path), ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    elif kind < 0.75:
        content = json.dumps(value(rng)).encode("utf-8", "surrogatepass")
    elif kind < 0.9:  # broken JSON
        text = bytearray(json.dumps(plausible(rng, path)).encode("utf-8", "surrogatepass"))
        for _ in range(rng.randrange(1, 4)):
            place = rng.randrange(len(text))
            text[place : place + rng.randrange(3)] = bytes(rng.randrange(256) for _ in range(rng.randrange(3))) or b"}"
        content = bytes(text)
    else:
        content = rng.choice(
            [b"[" * 9000, b"x" * 30_000, b"\xff" * 40, b'{"left":["a/b"]' + b" " * 25_000 + b"}", b"", b"null"]
        )
    method = rng.choices(["POST", "GET", "PUT", "OPTIONS", "HEAD", "DELETE"], [90, 4, 2, 2, 1, 1])[0]
    if rng.random() < 0.15:
        path = rng.choice([*GETS, "//", "/recommend/", "/../x", "/%2e%2e", "/é", "/page.html"])
        query = "".join(rng.choice(string.printable[:94].replace("#", "")) for _ in range(rng.randrange(20)))
        path += rng.choice(["", f"?{query}", "?side=left", "?column=genre", "?model=plain&side=up", "?column=%00"])
        method = rng.choice(["GET", "GET", "POST"])
    if rng.random() < 0.1:
        headers["content-length"] = rng.choice(["-1", "x", "9" * 40, "1e9", "0", ""])
    if rng.random() < 0.05:
        headers["origin"], headers["authorization"] = "https://evil.example", "Bearer " + "x" * rng.randrange(3000)
    return method, path, content, headers


def test_hostile_requests_are_answered_and_the_worker_lives():
    fuzz = Fuzz("serving", LEAST)
    plain = [source(name, table=False) for name in ("table", "matrix", "plain")]
    tried = 0
    with client(source(), *plain, limits=Limits(body=20_000, body_seconds=5.0)) as api:

        def attempt(rng):
            method, path, content, headers = request(rng)
            answer = fuzz.attempt(
                (method, path, content[:300], headers),
                lambda: api.request(method, path, content=content, headers=headers),
                (),
            )
            assert answer.status_code in STATUSES, (fuzz.number, method, path, content[:2000], answer.text)
            fuzz.outcomes[str(answer.status_code)] += 1
            if answer.headers.get("content-type") == "application/json" and method != "HEAD":
                found = answer.json()
                assert answer.status_code == 200 or found["error"].strip(), (path, content[:2000])

        for rng in fuzz:
            attempt(rng)
            tried += 1
        for number in range(tried, LEAST):
            fuzz.number = number
            attempt(random.Random(f"serving {number}"))
        assert fuzz.outcomes["200"] > 0.05 * max(tried, LEAST)
        assert api.get("/ready").json()["status"] == "ready"
        assert len(api.post("/recommend", json={"left": ["a/b"], "k": 3}).json()["answers"][0]["results"]) == 3


def parsed(data):
    """Statuses of the answers on a connection; no body of an answer holds such a line."""
    found = [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", data)]
    assert not data or data.startswith(b"HTTP/1.1 "), data[:200]
    return found


SMUGGLED = b"GET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n"
FRAMES = [
    b"Content-Length: 5\r\nTransfer-Encoding: chunked", b"Transfer-Encoding: chunked\r\nContent-Length: 5",
    b"Content-Length: 5\r\nContent-Length: 0", b"Content-Length: 0\r\nContent-Length: 5", b"Content-Length: +0",
    b"Content-Length: 0x0", b"Content-Length: 0, 0", b"Content-Length: -1", b"Content-Length: 0\x00",
    b"Content-Length:",
    b"Transfer-Encoding: xchunked", b"Transfer-Encoding: chunked, identity", b"Transfer-Encoding : chunked",
    b"Transfer-Encoding:\r\n chunked", b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
    b"Transfer-Encoding: \x0bchunked", b"X: y\nTransfer-Encoding: chunked", b" Transfer-Encoding: chunked",
    b"Content-Length: 99999999999999999999", b"Content-Length: 1\r\n5", b"Foo: \r\r\nContent-Length: 5",
]  # fmt: skip


def raw_request(rng):
    """Bytes for a connection, how many requests they may be taken for, and whether they have to be refused."""
    kind = rng.randrange(6)
    method, path, content, headers = request(rng)
    if kind == 0:  # two ways to say where a body ends: nothing of it may be taken for another request
        frame = rng.choice(FRAMES)
        head = b"POST /score HTTP/1.1\r\nhost: 127.0.0.1\r\n" + frame + b"\r\n\r\n"
        return head + rng.choice([b"0\r\n\r\n", b"5\r\nabcde\r\n0\r\n\r\n", b"abcde", b""]) + SMUGGLED, None
    lines = [f"{method} {quote(path)} HTTP/{rng.choice(['1.1', '1.1', '1.1', '1.0'])}".encode(), b"host: 127.0.0.1"]
    lines += [f"{name}: {text}".encode("latin-1") for name, text in headers.items() if name != "content-length"]
    if rng.random() < 0.3:
        lines.append(rng.choice([b"Expect: 100-continue", b"Connection: close", b"Upgrade: websocket", b"Host: evil"]))
    if rng.random() < 0.3:
        pieces = [content[i : i + 700] for i in range(0, len(content), 700)]
        body = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
        lines.append(b"Transfer-Encoding: chunked")
    else:
        body = content
        lines.append(b"Content-Length: %d" % len(content))
    whole = b"\r\n".join(lines) + b"\r\n\r\n" + body
    if kind == 1:
        return whole * rng.randint(2, 5), 5
    if kind == 2:
        return mutated(whole[:4000], rng), None
    if kind == 3:
        return whole[: rng.randrange(len(whole))], 1
    return whole, 1


def test_hostile_bytes_on_connections_are_answered_or_end():
    """Connections that are broken, cut off, in pieces, reset or that smuggle; the server answers the next one."""
    fuzz = Fuzz("connections", 60)

    with listening(source(), limits=Limits(body=20_000, body_seconds=0.4)) as address:
        port = int(address.split(":")[2].strip("/"))

        def exchange(rng):
            data, most = raw_request(rng)
            with socket.create_connection(("127.0.0.1", port), 8) as connection:
                found = b""
                try:
                    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.choice([0, 0, 0, 1, 3])))
                    for a, b in itertools.pairwise([0, *cuts, len(data)]):
                        connection.sendall(data[a:b])
                    if rng.random() < 0.1:  # gone without a word
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        return []
                    if rng.random() < 0.9:  # half open: nothing more is sent, answers are read
                        connection.shutdown(socket.SHUT_WR)
                    else:
                        connection.settimeout(0.7)
                    while piece := connection.recv(1 << 16):
                        found += piece
                except OSError:  # the server has closed it
                    pass
            if SMUGGLED in data:
                assert b"HTTP/1.1 404" not in found, (data, found)
            statuses = parsed(found)
            assert set(statuses) <= STATUSES | {100, 204}, (data[:500], found[:500])
            assert most is None or len([s for s in statuses if s != 100]) <= most, (data[:500], found[:500])
            return statuses

        for rng in fuzz:
            statuses = fuzz.attempt("bytes", lambda rng=rng: exchange(rng), ())
            for status in statuses or ["none"]:
                fuzz.outcomes[str(status)] += 1
            if fuzz.number % 20 == 0:
                with urllib.request.urlopen(address + "ready", timeout=8) as answer:
                    assert answer.status == 200


def rounded(answer):
    """An answer with five digits of its scores: the others depend on how many requests are answered together."""
    return re.sub(r'"score":(-?[0-9.e-]+)', lambda found: f"{float(found[1]):.4e}", answer.text)


def test_answers_while_files_are_replaced(tmp_path):
    """Every answer is that of one of the models that were whole, whatever is put in the place of their files."""
    fuzz, path, beside = Fuzz("swaps", 12), tmp_path / "m.gramtower", tmp_path / "m.gramtower.index"
    whole = {name: (folder() / f"{name}.gramtower").read_bytes() for name in ("history", "plain")}
    path.write_bytes(whole["plain"])
    body = {"left": ["a/b", "007"], "k": 4, "columns": True}
    app, service_ = service(source("m", path=path))
    expected, faults, stop, answered = [], [], threading.Event(), [0]
    with Client(app) as api:
        for name in whole:
            path.write_bytes(whole[name])
            service_.models.reload()
            expected.append(rounded(api.post("/recommend", json=body)))
        assert expected[0] != expected[1]

        def ask():
            while not stop.is_set():
                answer = api.post("/recommend", json=body)
                if answer.status_code != 200 or rounded(answer) not in expected:
                    faults.append(answer.text)
                    return
                answered[0] += 1

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            for rng in fuzz:
                content = whole[rng.choice(sorted(whole))]
                content = mutated(content, rng) if rng.random() < 0.5 else content
                target = beside if rng.random() < 0.2 else path
                if rng.random() < 0.5:
                    with replacing(target) as partial:
                        partial.write_bytes(content)
                else:
                    target.write_bytes(content)
                if rng.random() < 0.1:
                    target.unlink()
                fuzz.attempt("reload", lambda rng=rng: service_.models.reload(rng.random() < 0.5), ())
                fuzz.outcomes["refused" if service_.models.refused else "loaded"] += 1
                fuzz.outcomes["answers"] = answered[0]
                assert not faults, faults[0]
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert not faults


def all_serve(text):
    """Whether each of two workers has loaded a model since it ended last, as a log says."""
    return all(text.rfind(f"worker {number}: model") > text.rfind(f"worker {number} ended") for number in (1, 2))


@pytest.mark.skipif(not MINUTES, reason="starts a server with two workers, which takes long: make fuzz")
def test_workers_killed_under_load(tmp_path):
    """Workers get SIGKILL and models are replaced while clients ask; all answers are right, and the server lives."""
    fuzz, path = Fuzz("workers", 3), tmp_path / "m.gramtower"
    files = [folder() / f"{name}.gramtower" for name in ("history", "plain")]
    path.write_bytes(files[0].read_bytes())
    command = [sys.executable, "-m", "gramtower", "serve", str(path), "--port", "0", "--workers", "2", "--watch"]
    log = tmp_path / "log"
    with log.open("wb") as errors:
        server = subprocess.Popen(command, stderr=errors, env={**os.environ, "OMP_NUM_THREADS": "1"})
    expected = set()
    for file in files:
        ids, _ = gt.load(file).recommend(["a/b"], 4)
        expected.add(tuple(ids[0].tolist()))
    counts, faults, stop = Counter(), [], threading.Event()

    def waited(pattern, seconds=120):
        end = time.monotonic() + seconds
        while time.monotonic() < end and server.poll() is None:
            if found := re.search(pattern, log.read_text()):
                return found
            time.sleep(0.05)
        raise AssertionError(log.read_text())

    try:
        base = waited(r"serving at (http://127\.0\.0\.1:\d+)/")[1]

        def ask():
            content = json.dumps({"left": ["a/b"], "k": 4}).encode()
            while not stop.is_set():
                try:
                    with urllib.request.urlopen(base + "/recommend", content, timeout=30) as answer:
                        found = tuple(hit["id"] for hit in json.load(answer)["answers"][0]["results"])
                    counts["right" if found in expected else "wrong"] += 1
                except urllib.error.HTTPError as error:
                    faults.append(error.code)
                except (OSError, http.client.HTTPException):
                    counts["connection lost"] += 1  # that of a worker that was killed
                time.sleep(0.002)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for rng in fuzz:
            children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
            workers = [pid for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
            if len(workers) == 2 and rng.random() < 0.7 and all_serve(log.read_text()):
                os.kill(int(rng.choice(workers)), signal.SIGKILL)
                fuzz.outcomes["killed"] += 1
            fuzz.outcomes.update({name: count - fuzz.outcomes[name] for name, count in counts.items()})
            with replacing(path) as partial:
                partial.write_bytes(rng.choice(files).read_bytes())
            if rng.random() < 0.3:
                server.send_signal(signal.SIGHUP)
            time.sleep(rng.uniform(0.5, 3.0))
            assert server.poll() is None, log.read_text()
        stop.set()
        for thread in threads:
            thread.join()
        assert not faults
        assert not counts["wrong"]
        time.sleep(10)
        with urllib.request.urlopen(base + "/ready", timeout=30) as answer:
            assert json.load(answer)["status"] == "ready"
    finally:
        stop.set()
        server.terminate()
        server.wait(60)
