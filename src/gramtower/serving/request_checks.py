"""Checks between the network and the handlers: host, token, size, time and content of requests.

``Guard`` is an ASGI layer around the application. Before a body is read it refuses requests without the bearer token
and, on a loopback address, requests for other host names, so that a web page cannot reach the server by a name that
resolves to 127.0.0.1; starlette's middleware for this does not accept the host ``[::1]``. It adds headers against
content sniffing, framing and caching, and counts requests. CORS preflights, which browsers send without a token, pass
the same check of the host and are counted and logged; starlette's middleware answers them.

Bodies are checked by pydantic with strict types, no further fields and finite numbers. The handlers check lengths
against :class:`~gramtower.serving.messages.Limits`, so that messages name the limit.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import Callable, Collection
from typing import Annotated, Literal, TypeVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gramtower._util import checks as check
from gramtower.serving.messages import Limits, Refused, encode
from gramtower.serving.served_models import Metrics

OPEN = ("/", "/docs", "/openapi.json", "/health", "/ready")  # paths without a token: they show nothing of a model
HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
}
_HEADERS_OF_STATUS = {
    401: {"www-authenticate": "Bearer"},
    408: {"connection": "close"},
    413: {"connection": "close"},
    503: {"retry-after": "1"},
}
LOOPBACK = ("localhost", "127.0.0.1", "::1")

Id = int | Annotated[str, Field(max_length=10_000)]
Text = Annotated[str, Field(max_length=1_000)]
Cell = str | int | float | bool | list[str] | list[int | float] | None
Features = list[dict[str, Cell]] | dict[str, list[Cell]] | list[list[float]]
Value = str | int | float | bool
Wanted = Value | list[Value] | dict[str, float]
Side = Literal["left", "right"]
Context = dict[str, Value | list[Value | None] | None] | None
IN_CONTEXT = Field(
    None,
    description="For models with context: the context of left, by column, for all ids or a list with one for each. "
    "Columns that are missing and values that training did not have count as unknown.",
    examples=[{"device": "tv"}],
)


class Body(BaseModel):
    """Fields of all requests."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    model: Text | None = Field(None, description="Name of a model; without it, the first model that is served.")


class Recommend(Body):
    """The k best right entities for left entities: known ones by id, new ones by features, history or both."""

    left: list[Id] | None = Field(None, description="Ids of left entities; not with left_features or histories.")
    k: int = Field(10, ge=1, description="Length of each list.")
    exclude_seen: bool = Field(True, description="Leave out pairs that were observed in training or are in histories.")
    allow: list[Id] | list[list[Id]] | None = Field(
        None,
        description="List only these right ids, or for each left entity its own list. Unknown ids are ignored; "
        "unknown_allowed counts them.",
    )
    deny: list[Id] | None = Field(
        None, description="Never list these right ids. Unknown ids are ignored; unknown_denied counts them."
    )
    exclude: list[list[Id]] | None = Field(
        None,
        description="Right ids to leave out for each left entity, such as those since training. Unknown ids are "
        "ignored; unknown_excluded counts them.",
    )
    where: Text | dict[str, Wanted] | None = Field(
        None,
        validation_alias=AliasChoices("where", "filter"),
        description="Filter by columns of the right table: an expression, or columns that must all match: a value, a "
        "list of values of which one must match, or an object with min and max. Called filter before.",
        examples=["genre == 'Comedy' and year >= 1990", {"genre": "Comedy", "year": {"min": 1990}}],
    )
    boost: dict[str, float] | None = Field(
        None, description="Weights of columns of the right table, of numbers or of true and false, added to scores."
    )
    popularity: float = Field(0.0, description="Exponent γ: γ log(1 + training pairs) is added to scores.")
    diversity: float = Field(0.0, ge=0, le=1, description="How much entities lose for being like those above them.")
    at_most: dict[str, int] | None = Field(
        None, description="For columns of the right table: how many of a list may share a value."
    )
    min_score: float | None = Field(None, description="Leave out lower scores.")
    scores: Literal["raw", "probability", "percentile"] = Field(
        "raw", description="What is returned as scores; probability needs a calibrated model."
    )
    left_features: Features | None = Field(
        None, description="Features of new left entities: rows as objects, columns as lists, or rows of numbers."
    )
    histories: list[list[Id]] | None = Field(None, description="Right ids of each new left entity, the newest last.")
    context: Context = IN_CONTEXT
    columns: bool | list[str] = Field(False, description="Columns of the right table to return; true for all.")
    stream: bool = Field(False, description="Return one line of JSON for each entity, as soon as it is computed.")


class Similar(Body):
    """The k entities of the same side with the most similar embeddings (cosine)."""

    ids: list[Id]
    side: Side = "right"
    k: int = Field(10, ge=1)
    together: bool = Field(False, description="Return one list for the mean direction of all ids.")
    columns: bool | list[str] = False
    stream: bool = False


class Score(Body):
    """Scores p_iᵀq_j of pairs, element by element."""

    left: list[Id]
    right: list[Id]
    scores: Literal["raw", "probability"] = Field("raw", description="Probability needs a calibrated model.")
    context: Context = IN_CONTEXT


class Embed(Body):
    """Embeddings of known ids or of new entities."""

    ids: list[Id] | None = None
    side: Side = "left"
    left_features: Features | None = None
    right_features: Features | None = None
    histories: list[list[Id]] | None = None


class Explain(Body):
    """Explanation of a score as a sum of parts, one for each feature or history entry of the left entity."""

    left: Id | None = Field(None, description="Id of a left entity; not needed with left_features or histories.")
    right: Id = Field(description="Id of a right entity.")
    left_features: Features | None = Field(
        None, description="One row with the features of the left entity, if the model uses features."
    )
    histories: list[list[Id]] | None = Field(None, description="One list with the right ids of a new left entity.")
    most: int = Field(20, ge=1, le=1000, description="Number of parts to return, largest first; others are summed.")


class Search(Body):
    """Entities whose id or title contains a text; those that start with it come first."""

    text: Text = ""
    side: Side = "right"
    most: int = Field(20, ge=1, le=100)


class Entity(Body):
    """One entity with the columns of its table and its observed pairs."""

    id: Id
    side: Side = "right"


Kind = TypeVar("Kind", bound=Body)
_DEEPEST = 3  # parts of a path in a message: field, row and column
_CELLS = "text, a number, true, false, null, a list of numbers or a list of text"
_FEATURES = f"rows as objects, columns as lists, or rows of numbers; a cell is {_CELLS}"
_EXPECTED = {
    "left_features": _FEATURES,
    "right_features": _FEATURES,
    "where": (_FILTER := "an expression, or for each column a value, a list of values, or numbers min and max"),
    "filter": _FILTER,
}


def parse(kind: type[Kind], body: bytes) -> Kind:
    """Parse and check a body."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False)
        if found[0]["type"] == "json_invalid":
            raise Refused(422, f"body: {_lower(found[0]['msg'])}") from error
        content = json.loads(body)
        paths = [_path(content, one) for one in found]
        path, given = max(paths, key=lambda one: len(one[0]))  # the type of a union that matches deepest
        texts = [_lower(one["msg"]) for one, place in zip(found, paths, strict=True) if place[0] == path]
        expected = " or ".join(dict.fromkeys(texts))
        if any(one["type"] == "extra_forbidden" and place[0] == path for one, place in zip(found, paths, strict=True)):
            expected = f"expected one of the fields {', '.join(kind.model_fields)}"
        if path[0] in _EXPECTED:
            cell = path[0] not in ("where", "filter") and any(isinstance(part, str) for part in path[1:])
            expected = f"expected {_CELLS if cell else _EXPECTED[path[0]]}"
        others = len({one[0][0] for one in paths}) - 1
        more = f" (and {others} more)" if others else ""
        name = ".".join(str(part)[:60] for part in path)
        raise Refused(422, f"{name}: got {check.shown(given)}, {expected}{more}") from error


def _path(given: object, error: ErrorDetails) -> tuple[tuple[int | str, ...], object]:
    """The path of an error in a body, without the names of types that pydantic inserts, and the value there."""
    path: list[int | str] = []
    for part in error["loc"]:
        inside = part in given if isinstance(given, dict) else isinstance(given, list) and isinstance(part, int)
        if inside and len(path) < _DEEPEST:
            given = given[part]  # type: ignore[index]
            path.append(part)
        elif not path:
            path.append(part)
    return tuple(path) or ("body",), given


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


async def read_body(request: Request, limits: Limits) -> bytes:
    """Read the whole body; one that is too long (413) or too slow (408) is refused."""
    too_long = Refused(413, f"body: got more than {limits.body} bytes, expected at most {limits.body}")
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and (len(length) > 15 or int(length) > limits.body):
        raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for piece in request.stream():
                body += piece
                if len(body) > limits.body:
                    raise too_long
    except TimeoutError as error:
        raise Refused(408, f"body: did not arrive within {limits.body_seconds:g} s") from error
    except ClientDisconnect as error:
        raise Refused(400, "body: the client has disconnected") from error
    return bytes(body)


def answer(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON response, from bytes or from content to encode."""
    body = content if isinstance(content, bytes) else encode(content)
    return Response(body, status, headers, "application/json")


def refusal(refused: Refused) -> Response:
    """The response to a request that is refused."""
    return answer(refused.content, refused.status, _HEADERS_OF_STATUS.get(refused.status))


class Guard:
    """ASGI layer that checks, counts and logs requests, and adds headers."""

    def __init__(
        self, app: ASGIApp, metrics: Metrics, paths: Collection[str] = (), token: str | None = None,
        hosts: Collection[str] | None = None, origins: Collection[str] = (),
        log: Callable[[Scope, int, float], None] | None = None,
    ) -> None:  # fmt: skip
        self._origins, self._metrics, self._log = list(origins), metrics, log
        self._app = self._readable(app)
        self._paths = frozenset(paths)
        self._token = None if token is None else token.encode()
        self._hosts = None if hosts is None else frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status = time.perf_counter(), 500

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                given = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    given.setdefault(name, value)
            await send(message)

        path = scope["path"] if scope["path"] in self._paths else "other"
        try:
            await self._app_for(scope["path"], Headers(scope=scope))(scope, receive, sending)
        finally:
            seconds = time.perf_counter() - start
            self._metrics.request(path, status, seconds)
            if self._log is not None:
                self._log(scope, status, seconds)

    def _app_for(self, path: str, headers: Headers) -> ASGIApp:
        if self._hosts is not None and _host(headers.get("host", "")) not in self._hosts:
            return refusal(Refused(421, "host: this server does not answer to this name; add it with --allow-host"))
        kind, _, given = headers.get("authorization", "").partition(" ")
        encoded = given.strip().encode("latin-1", "replace")
        right = self._token is None or (hmac.compare_digest(encoded, self._token) and kind.lower() == "bearer")
        if right or path in OPEN:
            return self._app
        wrong = Refused(401, "authorization: the bearer token of the server is missing or wrong")
        return self._readable(refusal(wrong))

    def _readable(self, app: ASGIApp) -> ASGIApp:
        """The app with the headers of CORS, and with answers to preflights, for pages of the allowed origins."""
        headers = ["authorization", "content-type"]
        return CORSMiddleware(app, self._origins, ["GET", "POST"], headers) if self._origins else app


def _host(header: str) -> str:
    """The name in a Host header, without its port."""
    name = header.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.rpartition(":")[0] if ":" in name else name
