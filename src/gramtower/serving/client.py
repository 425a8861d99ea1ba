"""A client of the server in Python, for programs without torch; docs/serving.md describes the fields of requests.

    client = Client("http://127.0.0.1:8000", token="…")
    for one in client.recommend(["ann"], k=3)[0]:
        print(one["id"], one["score"])

Each request has a connection of its own, so that threads may share a client. The cost is that of one request.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from gramtower._util import checks as check
from gramtower._util.files import plain

_PAUSE = 1.0  # seconds before a refused request is sent again, unless the server names a time
_BUSY = 503

Id = str | int
Content = dict[str, Any]  # a JSON object
Result = Content  # id, score and, if they were asked for, columns


class ServerError(Exception):
    """An answer with an error.

    Attributes:
        status: the HTTP status; docs/serving.md lists the reasons.
        content: the JSON of the answer: ``error`` and, for unknown ids, ``near``.
    """

    def __init__(self, status: int, content: Content) -> None:
        super().__init__(str(content.get("error", f"status {status}")))
        self.status, self.content = status, content


class Client:
    """Requests to a server that ``gramtower serve`` has started.

    A request that cannot be answered raises :class:`ServerError` with the message of the server, and a server that
    cannot be reached an ``OSError``.

    Args:
        url: address of the server; a path is kept, for servers behind a proxy.
        token: its bearer token, if it has one.
        model: name of the model to ask; None for the first one of the server.
        timeout: seconds to wait for a connection and for each part of an answer.
        retries: how often a request is sent again while the server has too much to do (status 503).
    """

    def __init__(
        self, url: str = "http://127.0.0.1:8000", *, token: str | None = None, model: str | None = None,
        timeout: float = 30.0, retries: int = 3,
    ) -> None:  # fmt: skip
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            check.fail("url", repr(url), "the address of a server, such as http://127.0.0.1:8000")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection, self._address, self._path = kind, (parts.hostname, parts.port), parts.path.rstrip("/")
        self._headers = {} if token is None else {"authorization": f"Bearer {token}"}
        self.model, self.timeout = model, check.number("timeout", timeout, above=0.0)
        self.retries = check.count("retries", retries, minimum=0)

    def recommend(self, left: Id | Sequence[Id] | None = None, k: int = 10, **fields: object) -> list[list[Result]]:
        """The best right entities for each left one, best first.

        Args:
            left: an id or several; None with ``left_features`` or ``histories`` for new entities.
            k: how many for each.
            fields: further fields of ``/recommend``, such as ``where``, ``allow`` or ``columns``.
        """
        asked = {} if left is None else {"left": _listed(left)}
        return _results(self.post("/recommend", {**asked, "k": k, **fields}))

    def similar(self, ids: Id | Sequence[Id], side: str = "right", k: int = 10, **fields: object) -> list[list[Result]]:
        """The most similar entities of the same side for each id, best first."""
        return _results(self.post("/similar", {"ids": _listed(ids), "side": side, "k": k, **fields}))

    def score(self, left: Sequence[Id], right: Sequence[Id], **fields: object) -> list[float]:
        """The scores of pairs, element by element."""
        found: list[float] = self.post("/score", {"left": left, "right": right, **fields})["scores"]
        return found

    def health(self) -> Content:
        """What ``/ready`` says: the status and the number of models; an error if the server cannot answer."""
        return self.get("/ready")

    def get(self, path: str) -> Content:
        """The JSON of another page, such as ``/models``."""
        return self._ask("GET", path, None)

    def post(self, path: str, fields: Mapping[str, object]) -> Content:
        """The JSON of another request, such as ``/explain``; lines of a stream are ``answers``."""
        named = {} if self.model is None else {"model": self.model}
        return self._ask("POST", path, json.dumps(plain({**named, **fields})).encode())

    def _ask(self, method: str, path: str, body: bytes | None) -> Content:
        for left in range(self.retries, -1, -1):
            connection = self._connection(*self._address, timeout=self.timeout)
            try:
                connection.request(method, self._path + path, body, self._headers)
                answer = connection.getresponse()
                status, pause, text = answer.status, answer.headers.get("retry-after"), answer.read()
            finally:
                connection.close()
            if status != _BUSY or not left:
                break
            time.sleep(min(float(pause), self.timeout) if pause and pause.isdigit() else _PAUSE)
        try:
            if answer.headers.get_content_type() == "application/x-ndjson":
                lines = [json.loads(line) for line in text.splitlines()]
                failed = [line for line in lines if "error" in line]  # in the middle of a stream
                found: Content = failed[0] if failed else {"answers": lines}
            else:
                found = json.loads(text)
        except ValueError:  # of something else, such as a proxy
            found = {"error": f"{text[:200].decode(errors='replace')!r}, which is no JSON"}
        if status != http.client.OK or "error" in found:
            raise ServerError(status, found)
        return found


def _listed(ids: Id | Sequence[Id]) -> Sequence[Id]:
    return [ids] if isinstance(ids, (str, int)) else ids


def _results(found: Content) -> list[list[Result]]:
    return [answer["results"] for answer in found["answers"]]
