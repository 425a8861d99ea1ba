"""What stands between the network and the answers: sizes, times, token, host names, headers, and what is counted.

A pure ASGI layer around the app. Refuses, before anything of a body is read: a missing or wrong bearer token
(compared in constant time), and names of other hosts where the server is for this machine alone (which stops web
pages that point a name of theirs at 127.0.0.1). Adds headers against sniffing, framing and caching; CORS is off:
there are no headers for it unless origins were given.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Callable, Collection
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gramtower.serving.errors import Refused
from gramtower.serving.limits import Limits
from gramtower.serving.metrics import Metrics
from gramtower.serving.tasks import encode

OPEN = (
    "/",
    "/docs",
    "/openapi.json",
    "/health",
    "/ready",
)  # no token is asked for: nothing of a model is in their answers
HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
}
LOOPBACK = ("localhost", "127.0.0.1", "::1")


def answer(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """JSON, from bytes or from what becomes them."""
    body = content if isinstance(content, bytes) else encode(content)
    return Response(body, status, headers, "application/json")


def refusal(refused: Refused) -> Response:
    """The answer to a request that is refused."""
    headers = {"connection": "close"} if refused.status in (408, 413) else {}
    headers |= {"retry-after": "1"} if refused.status == 503 else {}
    headers |= {"www-authenticate": "Bearer"} if refused.status == 401 else {}
    return answer(refused.to_plain(), refused.status, headers)


async def read_body(request: Request, limits: Limits) -> bytes:
    """The whole body.

    Raises:
        Refused: 413 if it is too long, 408 if it takes too long, 400 if its client has gone.
    """
    too_long = f"body: got more than {limits.body} bytes, expected at most as many"
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and (len(length) > 15 or int(length) > limits.body):
        raise Refused(413, too_long)
    pieces, total = [], 0
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for piece in request.stream():
                total += len(piece)
                if total > limits.body:
                    raise Refused(413, too_long)
                pieces.append(piece)
    except TimeoutError as error:
        raise Refused(408, f"body: not all of it came within {limits.body_seconds:g} s") from error
    except ClientDisconnect as error:
        raise Refused(400, "body: the client has gone") from error
    return b"".join(pieces)


class Guard:
    """The layer.

    Args:
        app: what is inside.
        metrics: where requests are counted.
        paths: of the app, for the labels of metrics.
        token: that requests must bear; None for none.
        hosts: names that requests may be for; None for any.
        origins: whose pages may read answers (CORS).
        log: called with the scope, the status and the seconds of each request; None for no access log.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        paths: Collection[str] = (),
        token: str | None = None,
        hosts: Collection[str] | None = None,
        origins: Collection[str] = (),
        log: Callable[[Scope, int, float], None] | None = None,
    ) -> None:
        self._log = log
        self._app, self._metrics, self._paths, self._origins = app, metrics, frozenset(paths), frozenset(origins)
        self._token = None if token is None else token.encode()
        self._hosts = None if hosts is None else frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status = time.perf_counter(), 500
        headers = Headers(scope=scope)
        origin = headers.get("origin")

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                given = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    given.setdefault(name, value)
                if origin in self._origins:
                    given["access-control-allow-origin"] = str(origin)
                    given["vary"] = "Origin"
            await send(message)

        path = scope["path"] if scope["path"] in self._paths else "other"
        try:
            refused = self._refused(scope, headers)
            if refused is not None:
                await refusal(refused)(scope, receive, sending)
            elif scope["method"] == "OPTIONS" and origin in self._origins:
                allowed = {
                    "access-control-allow-methods": "GET, POST",
                    "access-control-allow-headers": "authorization, content-type",
                    "access-control-max-age": "600",
                }
                await Response(None, 204, allowed)(scope, receive, sending)
            else:
                await self._app(scope, receive, sending)
        finally:
            seconds = time.perf_counter() - start
            self._metrics.request(path, status, seconds)
            if self._log is not None:
                self._log(scope, status, seconds)

    def _refused(self, scope: Scope, headers: Headers) -> Refused | None:
        if self._hosts is not None and _host(headers.get("host", "")) not in self._hosts:
            return Refused(421, "host: got another name than this server's; name it with --allow-host")
        preflight = scope["method"] == "OPTIONS" and headers.get("origin") in self._origins
        if self._token is None or scope["path"] in OPEN or preflight:
            return None
        kind, _, given = headers.get("authorization", "").partition(" ")
        right = hmac.compare_digest(given.strip().encode("latin-1", "replace"), self._token)
        if right and kind.lower() == "bearer":
            return None
        return Refused(401, "authorization: got no or another bearer token, expected the server's")


def _host(header: str) -> str:
    """The name in a Host header, without its port."""
    name = header.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.rpartition(":")[0] if ":" in name else name
