"""The bodies of requests, checked by pydantic: types exactly as written here, no further fields, finite numbers.

Lengths are bounded by :class:`~gramtower.serving.refusals.Limits` when a body is taken up, so that messages name the
bound.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import Callable, Collection
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gramtower.serving.batching import encode
from gramtower.serving.refusals import Limits, Refused, shown
from gramtower.serving.served_models import Metrics

_LONGEST = 10_000  # characters of an id
Id = int | Annotated[str, Field(max_length=_LONGEST)]
Text = Annotated[str, Field(max_length=1_000)]
Cell = str | int | float | bool | list[str] | list[int | float] | None
Features = list[dict[str, Cell]] | dict[str, list[Cell]] | list[list[float]]
Value = str | int | float | bool
Wanted = Value | list[Value] | dict[str, float]
Side = Literal["left", "right"]


class Body(BaseModel):
    """What all have."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    model: Text | None = Field(None, description="Name of a model; the first one served without it.")


class Recommend(Body):
    """The k best right entities for left ones, known by id, or new ones known by features, history or both."""

    left: list[Id] | None = Field(None, description="Ids of left entities; not with left_features or histories.")
    k: int = Field(10, ge=1, description="Length of each list.")
    exclude_seen: bool = Field(True, description="Leave out what was observed in training, or is in the history.")
    allow: list[Id] | None = Field(
        None, description="Only these right ids. Unknown ones are ignored; the answer counts them as unknown_allowed."
    )
    deny: list[Id] | None = Field(
        None, description="Never these right ids. Unknown ones are ignored; the answer counts them as unknown_denied."
    )
    filter: dict[str, Wanted] | None = Field(
        None,
        description="Columns of the right table: a value, several of which any, or min and max. All must match.",
        examples=[{"genre": "Comedy", "year": {"min": 1990}}],
    )
    left_features: Features | None = Field(
        None, description="Features of new left entities: rows as objects, columns as lists, or rows of numbers."
    )
    histories: list[list[Id]] | None = Field(None, description="Right ids of each new left entity.")
    columns: bool | list[str] = Field(False, description="Columns of the right table to answer with; true for all.")
    stream: bool = Field(False, description="Answer with one line of JSON for each entity, as they are computed.")


class Similar(Body):
    """The k entities of the same side whose embeddings point most alike (cosine)."""

    ids: list[Id]
    side: Side = "right"
    k: int = Field(10, ge=1)
    together: bool = Field(False, description="One list, of what is most like all of them (their mean direction).")
    columns: bool | list[str] = False
    stream: bool = False


class Score(Body):
    """p_iᵀq_j of pairs, element by element."""

    left: list[Id]
    right: list[Id]


class Embed(Body):
    """Embeddings of known ids, or of new entities."""

    ids: list[Id] | None = None
    side: Side = "left"
    left_features: Features | None = None
    right_features: Features | None = None
    histories: list[list[Id]] | None = None


class Explain(Body):
    """What carried the score of a pair: parts of what is known of its left entity, whose sum is the score."""

    left: Id | None = Field(None, description="Id of a left entity; not needed with left_features or histories.")
    right: Id = Field(description="Id of a right entity.")
    left_features: Features | None = Field(
        None, description="The row that describes the left entity, where the model sees features."
    )
    histories: list[list[Id]] | None = Field(None, description="One list: the right ids of a new left entity.")
    most: int = Field(20, ge=1, le=1000, description="Parts to answer with, the largest in size; others are summed.")


class Search(Body):
    """Entities whose id or title holds a text; those that begin with it come first."""

    text: Text = ""
    side: Side = "right"
    most: int = Field(20, ge=1, le=100)


class Entity(Body):
    """What is known of one entity: columns of its table, and the pairs it was observed in."""

    id: Id
    side: Side = "right"


Kind = TypeVar("Kind", bound=Body)
_DEEPEST = 3  # parts of a place: an argument, a row and a column
_CELLS = "text, a number, true, false, null, a list of numbers or a list of text"
_FEATURES = f"rows as objects, columns as lists, or rows of numbers; a cell is {_CELLS}"
_EXPECTED = {
    "left_features": _FEATURES,
    "right_features": _FEATURES,
    "filter": "for each column a value, a list of values, or numbers min and max",
}


def parse(kind: type[Kind], body: bytes) -> Kind:
    """A body.

    Raises:
        Refused: 422 with the first fault, and how many there are.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False)
        if faults[0]["type"] == "json_invalid":
            raise Refused(422, f"body: {_lower(faults[0]['msg'])}") from error
        places = [_place(json.loads(body), fault) for fault in faults]
        place, given = max(places, key=lambda one: len(one[0]))  # of the types a value may have, what fits furthest
        texts = [_lower(fault["msg"]) for fault, one in zip(faults, places, strict=True) if one[0] == place]
        expected = " or ".join(dict.fromkeys(texts))
        if place[0] in _EXPECTED:
            cell = place[0] != "filter" and any(isinstance(part, str) for part in place[1:])
            expected = f"expected {_CELLS if cell else _EXPECTED[place[0]]}"
        others = len({one[0][0] for one in places}) - 1
        more = f" (and {others} more)" if others else ""
        name = ".".join(str(part)[:60] for part in place)
        raise Refused(422, f"{name}: got {shown(given)}, {expected}{more}") from error


def _place(given: Any, fault: Any) -> tuple[tuple[Any, ...], Any]:
    """Where in a body a fault is, without the names of types that pydantic puts between, and what is there."""
    place: list[Any] = []
    for part in fault["loc"]:
        inside = part in given if isinstance(given, dict) else isinstance(given, list) and isinstance(part, int)
        if inside and len(place) < _DEEPEST:
            given = given[part]
            place.append(part)
        elif not place:
            place.append(part)
    return tuple(place) or ("body",), given


def schema(kind: type[Body]) -> dict[str, Any]:
    """The body of an operation, for OpenAPI."""
    described = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": described}}}}


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


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
