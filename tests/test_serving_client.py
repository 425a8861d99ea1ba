"""The Python client against real servers."""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import threading

import numpy as np
import pytest
from serving_cases import listening, model, source

from gramtower.serving import client as module
from gramtower.serving.client import Client, ServerError


def test_answers_are_those_of_the_model():
    asked = ["user 1", "a/b"]
    with listening() as url:
        client = Client(url)
        found = client.recommend(asked, k=4)
        ids, scores = model().recommend(asked, k=4)
        assert [[one["id"] for one in row] for row in found] == ids.tolist()
        assert [[one["score"] for one in row] for row in found] == [pytest.approx(row) for row in scores.tolist()]
        lines = client.recommend(asked, k=4, stream=True)
        assert [[one["id"] for one in row] for row in lines] == ids.tolist()
        assert [one["id"] for one in client.recommend("user 1", k=4)[0]] == ids[0].tolist()
        assert [one["id"] for one in client.similar("i3", k=3)[0]] == model().similar("i3", k=3)[0][0].tolist()
        assert client.score(asked, ["i1", "i2"]) == pytest.approx(model().predict(asked, ["i1", "i2"]))
        new = client.recommend(histories=[["i1", "i2"]], k=2, where="year >= 1990", columns=["year"])[0]
        assert all(one["columns"]["year"] >= 1990 for one in new)
        assert client.health()["status"] == "ready"
        assert client.get("/models")["models"][0]["name"] == "history"
        assert client.post("/explain", {"left": "user 1", "right": "i3"})["score"]


def test_numbers_of_numpy_and_another_model_can_be_asked():
    with listening(source(), source("matrix", table=False)) as url:
        found = Client(url, model="matrix").recommend(np.array([2, 3]), k=2)
    assert [[one["id"] for one in row] for row in found] == model("matrix").recommend([2, 3], k=2)[0].tolist()


def test_errors_have_the_message_and_status_of_the_server():
    with listening(token="s3cret") as url:
        with pytest.raises(ServerError, match="token") as caught:
            Client(url).get("/models")
        assert caught.value.status == 401
        client = Client(url, token="s3cret")
        with pytest.raises(ServerError, match="user 100") as caught:
            client.recommend("user 100")
        assert caught.value.status == 404
        assert "user 10" in caught.value.content["near"]["user 100"]
        with pytest.raises(ServerError, match="k: got 100000") as caught:
            client.recommend("user 1", k=100_000)
        assert caught.value.status == 422
    with pytest.raises(OSError, match="refused"):
        client.health()


class Busy(http.server.BaseHTTPRequestHandler):
    """A server that refuses some requests before it answers, and one that is no gramtower."""

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.server.asked.append(self.path)
        busy = len(self.server.asked) <= self.server.busy
        text = b"<html>" if self.path == "/else/score" else json.dumps({"error": "busy"} if busy else {"scores": [1]})
        text = text if isinstance(text, bytes) else text.encode()
        self.send_response(503 if busy else 200)
        self.send_header("retry-after", "7")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


@pytest.fixture
def busy(monkeypatch):
    slept = []
    monkeypatch.setattr(module.time, "sleep", slept.append)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Busy)
    server.asked, server.slept = [], slept
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_busy_server_is_asked_again(busy):
    busy.busy, url = 2, f"http://127.0.0.1:{busy.server_port}"
    assert Client(url).score(["a"], ["b"]) == [1]
    assert (len(busy.asked), busy.slept) == (3, [7.0, 7.0])
    busy.busy = 100
    with pytest.raises(ServerError, match="busy") as caught:
        Client(url, retries=1).score(["a"], ["b"])
    assert (caught.value.status, len(busy.asked)) == (503, 5)


def test_the_path_of_a_proxy_is_kept_and_what_is_no_json_is_shown(busy):
    busy.busy = 0
    with pytest.raises(ServerError, match="<html>"):
        Client(f"http://127.0.0.1:{busy.server_port}/else/").score(["a"], ["b"])
    assert busy.asked == ["/else/score"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(url="localhost:8000"), "url.*'localhost:8000'"),
        (dict(url="ftp://localhost"), "url"),
        (dict(timeout=0), "timeout"),
        (dict(retries=-1), "retries"),
    ],
)
def test_bad_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Client(**options)


def test_the_client_needs_neither_torch_nor_a_server():
    script = "import sys; from gramtower.serving.client import Client"
    script += "; print([name for name in ('torch', 'starlette', 'uvicorn', 'polars') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
