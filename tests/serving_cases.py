"""Small fitted models, saved once, and clients of servers over them."""

from __future__ import annotations

import asyncio
import atexit
import functools
import json
import shutil
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

pytest.importorskip("starlette", reason="the server needs starlette")
pytest.importorskip("uvicorn", reason="the server needs uvicorn")
pytest.importorskip("polars", reason="tables are read with polars")
pytest.importorskip("cyclopts", reason="the command line needs cyclopts")

import uvicorn

import gramtower as gt
from gramtower.data import frames
from gramtower.data.tables import FeatureTable
from gramtower.serving.http_app import make_app
from gramtower.serving.messages import encode
from gramtower.serving.served_models import Metrics, Models
from gramtower.serving.server import bound
from gramtower.serving.snapshot import Source, TableSource

ODD = ["日本 😀", "a/b", "..", 'say "hi"', "tab\there", "ünïcode", "007"]  # left ids of any Unicode
ITEMS = 40
GENRES = ["Comedy", "Drama|War", "War", "Noir|Comedy"]


def _pairs():
    rng = np.random.default_rng(0)
    users = [*ODD, *(f"user {i}" for i in range(23))]
    kinds = rng.integers(0, 4, ITEMS)
    found = [
        (user, f"i{j}")
        for i, user in enumerate(users)
        for j in range(ITEMS)
        if rng.random() < (0.5 if kinds[j] == i % 4 else 0.05) or j == i
    ]
    found += [("user 0", "i38"), ("user 0", "i39")]
    users, items = zip(*dict.fromkeys(found), strict=True)
    return gt.Interactions.from_arrays(users, items, left_name="user", right_name="item"), kinds


@functools.cache
def folder():
    """Where the models are; removed when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="gramtower-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    pairs, kinds = _pairs()
    small = dict(dim=6, hidden=(8,), max_iterations=2, device="cpu")
    gt.TwoTower(**small).fit(pairs, left_features=["id", "history"]).save(folder / "history.gramtower")
    ages = {"user": list(pairs.left_ids), "age": [20.0 + i for i in range(len(pairs.left_ids))]}
    ages["city"] = [["Oslo", "Lima", None][i % 3] for i in range(len(pairs.left_ids))]
    table = FeatureTable(ages, id="user", numeric=["age"], categorical=["city"])
    gt.TwoTower(**small).fit(pairs, left_features=["history", table]).save(folder / "table.gramtower")
    matrix = (sp.random(12, 9, 0.4, random_state=0, format="csr") > 0).astype(np.float32)
    rows = np.random.default_rng(1).normal(size=(12, 3))
    gt.TwoTower(**small).fit(matrix, left_features=rows).save(folder / "matrix.gramtower")
    count, numbers = len(pairs.left_ids), np.random.default_rng(2)
    every = {"user": list(pairs.left_ids), "age": ages["age"], "zip": [i % 3 for i in range(count)]}
    every |= {"vip": [i % 2 == 0 for i in range(count)], "tags": [["a", "b"] if i % 2 else ["c"] for i in range(count)]}
    every |= {"about": ["red wine" if i % 2 else "tea" for i in range(count)]}
    every["vec"] = [numbers.normal(size=3).tolist() for _ in range(count)]
    kinds_of = dict(numeric=["age"], categorical=["zip", "vip"], lists=["tags"], text=["about"], vectors=["vec"])
    table = FeatureTable(every, id="user", **kinds_of)
    gt.TwoTower(**small).fit(pairs, left_features=table).save(folder / "kinds.gramtower")
    gt.TwoTower(dim=5, hidden=(), max_iterations=1, device="cpu").fit(pairs).save(folder / "plain.gramtower")
    cells = [f'i{j},"Thing {j}, naïve",{GENRES[kinds[j]]},{1980 + j}' for j in range(ITEMS) if j != 5]
    (folder / "items.csv").write_text("item,title,genre,year\n" + "\n".join(cells))
    return folder


@functools.cache
def model(name="history"):
    return gt.load(folder() / f"{name}.gramtower")


def genres():
    """The genres of each item of the table."""
    lines = (folder() / "items.csv").read_text().splitlines()[1:]
    return {line.split(",")[0]: line.split(",")[-2].split("|") for line in lines}


def source(name="history", table=True, path=None, **options):
    read = functools.partial(frames.read_frame, "--right-table", folder() / "items.csv")
    tables = {"right": TableSource("--right-table", read, "item")} if table else {}
    return Source(name, path or folder() / f"{name}.gramtower", tables=tables, **options)


def held_out():
    """Pairs that the models did not see."""
    users, items = model().left_.ids, model().right_.ids
    unseen = np.argwhere(model().seen_.toarray() == 0)[::7]
    return gt.Interactions.from_arrays(users[unseen[:, 0]], items[unseen[:, 1]])


def service(*sources, limits=None, say=lambda line: None, **options):
    """An application over models, and its parts."""
    metrics = Metrics()
    return make_app(Models(sources or [source()], metrics, say), metrics, limits, **options)


def client(*sources, **options):
    """A client in the same process; use it in a with statement."""
    return Client(service(*sources, **options)[0])


@contextmanager
def listening(*sources, **options):
    """A server at a port of this machine, in a thread."""
    app, _ = service(*sources, **options)
    with bound("127.0.0.1", 0) as socket:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, ws="none"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]})
        thread.start()
        try:
            while not server.started:
                time.sleep(0.01)
            yield f"http://127.0.0.1:{socket.getsockname()[1]}/"
        finally:
            server.should_exit = True
            thread.join()


class Answer:
    """What came back."""

    def __init__(self, messages):
        self.status_code = messages[0]["status"]
        self.headers = {name.decode(): value.decode() for name, value in messages[0]["headers"]}
        self.content = b"".join(message.get("body", b"") for message in messages[1:])
        self.text = self.content.decode()

    def json(self):
        return json.loads(self.content)


class Client:
    """Requests to an ASGI application without a network: an event loop in a thread, with the lifespan around it."""

    def __init__(self, app):
        self.app = app

    def __enter__(self):
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.ending, self.lifespan = threading.Event(), None
        started = threading.Event()

        async def lifespan():
            async def receive():
                if not started.is_set():
                    return {"type": "lifespan.startup"}
                await asyncio.to_thread(self.ending.wait)
                return {"type": "lifespan.shutdown"}

            async def send(message):
                assert message["type"] in ("lifespan.startup.complete", "lifespan.shutdown.complete")
                started.set()

            await self.app({"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}, receive, send)

        self.lifespan = asyncio.run_coroutine_threadsafe(lifespan(), self.loop)
        assert started.wait(30)
        return self

    def __exit__(self, *_):
        self.ending.set()
        self.lifespan.result(30)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    def get(self, path, **options):
        return self.request("GET", path, **options)

    def post(self, path, **options):
        return self.request("POST", path, **options)

    def request(self, method, path, **options):
        return self.begin(method, path, **options).result(60)

    def begin(self, method, path, json=None, content=b"", headers=None):
        """A request under way: a future of its answer. Content in pieces comes without a length."""
        if json is not None:
            content = encode(json)
        pieces = [content] if isinstance(content, bytes) else list(content)
        given = {"host": "testserver", **(headers or {})}
        if isinstance(content, bytes):
            given.setdefault("content-length", str(len(content)))
        path, _, query = path.partition("?")
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
            "path": path, "raw_path": path.encode("utf-8", "surrogatepass"), "query_string": query.encode(),
            "root_path": "", "headers": [(k.lower().encode("latin-1"), v.encode("latin-1")) for k, v in given.items()],
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "state": {},
        }  # fmt: skip
        return asyncio.run_coroutine_threadsafe(self._answer(scope, pieces), self.loop)

    async def _answer(self, scope, pieces):
        waiting, messages = list(pieces), []

        async def receive():
            if waiting:
                piece = waiting.pop(0)
                if isinstance(piece, Exception):  # the client breaks off here
                    return {"type": "http.disconnect"}
                return {"type": "http.request", "body": piece, "more_body": bool(waiting)}
            await asyncio.sleep(3600)

        async def send(message):
            messages.append(message)

        await self.app(scope, receive, send)
        return Answer(messages)
