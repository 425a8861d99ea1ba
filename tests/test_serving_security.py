"""Who may ask, what every answer carries, and what no request can do."""

from __future__ import annotations

import asyncio
import hmac
from concurrent.futures import wait

import pytest
from serving_cases import client, model

from gramtower.serving import request_checks as http
from gramtower.serving.messages import Limits

PATHS = ("/recommend", "/similar", "/score", "/embed", "/search", "/entity")


def bearer(text):
    return {"authorization": f"Bearer {text}"}


@pytest.fixture(scope="module")
def api():
    with client() as made:
        yield made


def test_without_the_token_nothing_of_a_model_is_told(monkeypatch):
    compared, compare = [], hmac.compare_digest
    monkeypatch.setattr(http.hmac, "compare_digest", lambda a, b: compared.append(a) or compare(a, b))
    with client(token="s3cret") as api:
        for headers in ({}, bearer("s3cre"), bearer("s3cret "[::-1]), {"authorization": "Basic s3cret"}, bearer("é")):
            for path in (*PATHS, "/models", "/map", "/run", "/metrics", "/nothing"):
                answer = api.request("POST" if path in PATHS else "GET", path, content=b"{", headers=headers)
                assert answer.status_code == 401
                assert answer.headers["www-authenticate"] == "Bearer"
        assert compared  # in constant time
        assert {api.get(path).status_code for path in http.OPEN} == {200}
        assert api.post("/recommend", json={"left": ["a/b"]}, headers=bearer("s3cret")).status_code == 200
        assert api.get("/metrics", headers={"authorization": "bearer s3cret"}).status_code == 200


def test_every_answer_has_the_headers_also_refusals(api):
    for answer in (
        api.get("/"),
        api.get("/docs"),
        api.get("/nothing"),
        api.post("/score", content=b"{"),
        api.get("/map"),
    ):
        for name, value in http.HEADERS.items():
            assert name in answer.headers
            if name != "content-security-policy":
                assert answer.headers[name] == value
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
        assert not any(name.startswith("access-control") for name in answer.headers)


def test_cors_is_off_unless_an_origin_was_given(api):
    origin = {"origin": "https://a.example", "access-control-request-method": "POST"}
    assert api.request("OPTIONS", "/score", headers=origin).status_code == 405
    with client(origins=["https://a.example"], token="t") as open_to_one:
        before = open_to_one.request("OPTIONS", "/score", headers=origin)
        assert before.status_code == 200
        assert before.headers["access-control-allow-origin"] == "https://a.example"
        assert "POST" in before.headers["access-control-allow-methods"]
        own = open_to_one.get("/health", headers=origin)
        assert own.headers["access-control-allow-origin"] == "https://a.example"
        assert own.headers["vary"] == "Origin"
        other = open_to_one.get("/health", headers={"origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers
        refused = open_to_one.get("/models", headers=origin)
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://a.example"  # the page may read why


def test_preflights_pass_the_check_of_the_host_and_are_logged():
    origin = {"origin": "https://a.example", "access-control-request-method": "POST"}
    logged = []
    options = dict(origins=["https://a.example"], hosts=http.LOOPBACK, token="t")
    with client(**options, log=lambda scope, status, _: logged.append((scope["method"], status))) as api:
        own, other = (
            api.request("OPTIONS", "/score", headers={**origin, "host": host}) for host in ("localhost", "evil.example")
        )
        counted = api.get("/metrics", headers={**bearer("t"), "host": "localhost"}).text
    assert (own.status_code, other.status_code) == (200, 421)
    assert "access-control-allow-origin" not in other.headers
    assert own.headers["x-content-type-options"] == "nosniff"
    assert logged[:2] == [("OPTIONS", 200), ("OPTIONS", 421)]
    assert 'path="/score"' in counted


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost", "LOCALHOST:9", "[::1]:8000", "[::1]"])
def test_a_server_for_this_machine_answers_to_its_names(host):
    with client(hosts=http.LOOPBACK) as api:
        assert api.get("/models", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "", "127.0.0.1.evil.example", "[::2]"])
def test_and_to_no_other(host):
    with client(hosts=http.LOOPBACK) as api:
        assert api.get("/models", headers={"host": host}).status_code == 421


def test_slow_and_broken_bodies_end():
    with client(limits=Limits(body_seconds=0.05)) as api:

        async def receive():
            await asyncio.sleep(60)

        sent = []

        async def ask():
            scope = {
                "type": "http", "method": "POST", "path": "/score", "raw_path": b"/score", "query_string": b"",
                "headers": [(b"content-length", b"10")], "http_version": "1.1", "scheme": "http", "root_path": "",
                "client": None, "server": None, "asgi": {"version": "3.0"}, "state": {},
            }  # fmt: skip

            async def send(message):
                sent.append(message)

            await api.app(scope, receive, send)

        asyncio.run_coroutine_threadsafe(ask(), api.loop).result(20)
        assert sent[0]["status"] == 408
        gone = api.post("/score", content=[b"{", ConnectionError()])
        assert gone.status_code == 400
        assert api.post("/score", json={"left": [], "right": []}).status_code == 200


def test_requests_of_many_clients_are_each_their_own(api):
    users = model().left_.ids.tolist()
    asked = [users[i % len(users)] for i in range(200)]
    futures = [api.begin("POST", "/recommend", json={"left": [user], "k": 1 + i % 7}) for i, user in enumerate(asked)]
    wait(futures)
    for i, (user, future) in enumerate(zip(asked, futures, strict=True)):
        found = [place["id"] for place in future.result().json()["answers"][0]["results"]]
        assert found == model().recommend([user], k=1 + i % 7)[0][0].tolist()
