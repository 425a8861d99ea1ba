"""Hostile requests to a server: each is answered with a status below 500 and JSON, and the worker is still there.

`make fuzz` tries at least FUZZ_REQUESTS of them (10,000 unless told), besides as many as its time allows.
"""

from __future__ import annotations

import json
import os
import random
import string
import sys
from pathlib import Path

from harness import MINUTES, Fuzz

sys.path.insert(0, str(Path(__file__).parent.parent))

from serving_cases import ODD, client, source

from gramtower.serving.limits import Limits

LEAST = int(os.environ.get("FUZZ_REQUESTS", "10000")) if MINUTES else 400
POSTS = ("/recommend", "/similar", "/score", "/embed", "/explain", "/search", "/entity")
GETS = ("/map", "/run", "/models", "/health", "/ready", "/metrics", "/docs", "/openapi.json", "/")
FIELDS = (
    "left", "right", "ids", "id", "k", "model", "side", "allow", "deny", "filter", "left_features", "right_features",
    "histories", "columns", "stream", "together", "exclude_seen", "text", "most",
)  # fmt: skip
STATUSES = {200, 400, 401, 404, 405, 408, 413, 421, 422, 503}


NUMBERS = [0, 1, -1, 2**31, 2**63, 2**64, -(2**70), 10**300, 5, 11, 39]
NUMBERS += [0.0, -0.0, 1.5, 1e308, 5e-324, 1e39, float("nan"), float("inf")]
WORDS = ["", "i1", "i7", "user 1", *ODD, "left", "right", "up", "history", "table", "matrix", "genre", "year", "title"]
WORDS += ["age", "city", "War", "Comedy", "Oslo", "min", "max", "1987", "x" * 5000, "../../etc/passwd", "\0", "a\nb"]
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
