"""The HTTP interface: each route checks a body, gives a task to the computing thread, and sends its answer.

The event loop only parses, waits and sends. Every error is answered with ``{"error": …}``. The functions at the end
make the answers of the routes that the page uses.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prometheus_client.metrics_core import GaugeMetricFamily
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Scope

from gramtower._util import checks as check
from gramtower._util.files import plain
from gramtower.data.entity_table import TableError
from gramtower.serving import request_checks as bodies
from gramtower.serving.batching import Batcher, CallTask, ListTask, places, work
from gramtower.serving.messages import Limits, Refused, encode, within
from gramtower.serving.request_checks import Guard, answer, parse, read_body, refusal
from gramtower.serving.served_entities import Entities
from gramtower.serving.served_models import Metrics, Models
from gramtower.serving.snapshot import Histories, NewFeatures, Snapshot
from gramtower.serving.web_page import PAGE_POLICY, api_page, describe, page

_RULES = {"where", "boost", "popularity", "diversity", "at_most", "min_score", "scores"}
_CHUNK = 64  # lists in one piece of a streamed answer
_HISTORY = 200  # pairs of an entity that are shown
_RECORDS = 400  # points of a curve
_GROUPS = 11  # values of a column with a colour
_LABELS = 40  # entities with a label on the map
_LOG = logging.getLogger("gramtower.serving")
Asked = Callable[[Any, Snapshot], Any]


class Service:
    """The handlers of all routes; those of POST take a checked body and the model that it names."""

    def __init__(self, models: Models, metrics: Metrics, limits: Limits, wait: float = 0.002) -> None:
        self.models, self.metrics, self.limits = models, metrics, limits
        self.batcher = Batcher(work, wait, most=limits.waiting, observe=metrics.batch)
        self.posts: dict[str, tuple[Asked, type[bodies.Body]]] = {
            "/recommend": (self._recommend, bodies.Recommend), "/similar": (self._similar, bodies.Similar),
            "/score": (self._score, bodies.Score), "/embed": (self._embed, bodies.Embed),
            "/explain": (self._explain, bodies.Explain), "/search": (self._search, bodies.Search),
            "/entity": (self._entity, bodies.Entity),
        }  # fmt: skip
        self.gets: dict[str, Callable[[Request], Any]] = {
            "/map": self._map, "/run": self._run, "/models": self._served, "/health": self._health,
            "/ready": self._ready, "/metrics": self._prometheus,
        }  # fmt: skip

    def post(self, path: str) -> Callable[[Request], Awaitable[Response]]:
        """The endpoint of a route with a body."""
        handler, kind = self.posts[path]

        async def endpoint(request: Request) -> Response:
            asked = parse(kind, await read_body(request, self.limits))
            found: Response = await handler(asked, self.models.get(asked.model))
            return found

        return endpoint

    async def _recommend(self, asked: bodies.Recommend, snapshot: Snapshot) -> Response:
        new = asked.left_features is not None or asked.histories is not None
        if (asked.left is None) != new:
            given = "none of them" if asked.left is None else "left together with left_features or histories"
            raise Refused(422, f"left: got {given}, expected left or, for new entities, left_features or histories")
        if new and asked.context is not None:
            raise Refused(422, "context: got values with left_features or histories, expected left ids with them")
        own = [one for one in asked.allow or () if isinstance(one, list)]
        exclude, listed = asked.exclude or [], self.limits.listed
        within("allow", max(map(len, own), default=len(asked.allow or ())), listed, "ids")
        within("deny", len(asked.deny or ()), listed, "ids")
        within("exclude", max(map(len, exclude), default=0), listed, "ids")
        features = self._features("left_features", asked.left_features)
        self._histories(asked.histories)
        if features is not None and asked.histories is not None and (count := _rows(features)) != len(asked.histories):
            given = f"{count} rows and {len(asked.histories)} lists"
            raise Refused(422, f"left_features, histories: got {given}, expected equal numbers")
        rows = len(asked.left) if asked.left is not None else _rows(features, asked.histories)
        self._lists(rows, asked.k, asked.stream)
        for name, one in (("allow", own), ("exclude", exclude)):
            if one and len(one) != rows:
                expected = f"{rows}, one for each {snapshot.left.name} entity"
                raise Refused(422, f"{name}: got {len(one)} lists, expected {expected}")
        rules = {
            name: one for name, one in asked.model_dump(include=_RULES, exclude_defaults=True).items() if one != {}
        }

        def task(a: int, b: int, lines: bool) -> ListTask:
            left = None if asked.left is None else asked.left[a:b]
            part = _cut(features, a, b) if lines else features
            histories = asked.histories if asked.histories is None or not lines else asked.histories[a:b]
            context = asked.context
            if context is not None and lines:
                context = {name: one[a:b] if isinstance(one, list) else one for name, one in context.items()}
            return ListTask(
                snapshot, "recommend",
                lambda: snapshot.query(
                    asked.k, left=left, left_features=part, histories=histories, context=context,
                    exclude_seen=asked.exclude_seen, exclude=exclude[a:b],
                    allow=own[a:b] or asked.allow, deny=asked.deny, **rules,
                ),
                left, "left", b - a, _columns(asked.columns), lines,
            )  # fmt: skip

        known = CallTask(lambda: snapshot.check_left(asked.left or (), asked.context))
        return await self._answer(task, rows, asked.stream, known)

    async def _similar(self, asked: bodies.Similar, snapshot: Snapshot) -> Response:
        rows, stream = len(asked.ids), asked.stream and not asked.together
        self._lists(rows, asked.k, stream)
        if asked.together and not rows:
            raise Refused(422, "ids: got none, expected at least one")

        def task(a: int, b: int, lines: bool) -> ListTask:
            ids = asked.ids[a:b]
            return ListTask(
                snapshot, asked.side, lambda: snapshot.likeness(asked.side, ids, asked.k, asked.together),
                None if asked.together else ids, "id", b - a, _columns(asked.columns), lines,
            )  # fmt: skip

        known = CallTask(lambda: snapshot.side(asked.side).rows(asked.ids))
        return await self._answer(task, rows, stream, known)

    async def _score(self, asked: bodies.Score, snapshot: Snapshot) -> Response:
        if len(asked.left) != len(asked.right):
            given = f"{len(asked.left)} and {len(asked.right)} ids"
            raise Refused(422, f"left, right: got {given}, expected equal numbers")
        within("left", len(asked.left), self.limits.ids, "pairs")

        def call() -> dict[str, object]:
            return {
                "model": snapshot.name,
                "scores": snapshot.score(asked.left, asked.right, asked.scores, asked.context),
            }

        return await self._call(call, len(asked.left))

    async def _embed(self, asked: bodies.Embed, snapshot: Snapshot) -> Response:
        ways = {
            "ids": asked.ids is not None,
            "left_features or histories": asked.left_features is not None or asked.histories is not None,
            "right_features": asked.right_features is not None,
        }
        if sum(ways.values()) != 1:
            raise Refused(422, f"body: got {sum(ways.values())} of {', '.join(ways)}, expected one of them")
        left = self._features("left_features", asked.left_features)
        right = self._features("right_features", asked.right_features)
        self._histories(asked.histories)
        features = left if right is None else right
        rows = len(asked.ids) if asked.ids is not None else _rows(features, asked.histories)
        within("ids", rows, self.limits.ids, "entities")
        dim = int(snapshot.left.embeddings.shape[1])
        within("answer", rows * dim, self.limits.answers, f"numbers; send fewer than {rows} at a time")
        side = asked.side if asked.ids is not None else "left" if right is None else "right"

        def call() -> dict[str, object]:
            found = snapshot.embed(side, asked.ids, features, asked.histories)
            return {"model": snapshot.name, "embeddings": found.float().tolist()}

        return await self._call(call, rows)

    async def _explain(self, asked: bodies.Explain, snapshot: Snapshot) -> Response:
        features = self._features("left_features", asked.left_features)
        self._histories(asked.histories)

        def call() -> dict[str, object]:
            found = snapshot.explain(asked.left, asked.right, features, asked.histories).to_plain(asked.most)
            for one in found["contributions"]:
                if snapshot.right.titles is not None and one["kind"] == "history":
                    one["title"] = snapshot.right.titles[snapshot.right.row(one["name"])]
            return {"model": snapshot.name, "left": asked.left, "right": asked.right, **found}

        return await self._call(call)

    async def _search(self, asked: bodies.Search, snapshot: Snapshot) -> Response:
        def call() -> dict[str, object]:
            this = snapshot.side(asked.side)
            found = np.array(this.search(asked.text, asked.most), np.int64)
            return {"model": snapshot.name, "results": titled(this, found)}

        return await self._call(call)

    async def _entity(self, asked: bodies.Entity, snapshot: Snapshot) -> Response:
        def call() -> dict[str, object]:
            this, other = snapshot.side(asked.side), snapshot.side("right" if asked.side == "left" else "left")
            rows = this.rows([asked.id])
            return {
                "model": snapshot.name,
                **titled(this, rows)[0],
                "side": asked.side,
                "columns": {} if this.table is None else this.table.cells(rows)[0],
                "history": titled(other, snapshot.observed_with(asked.side, int(rows[0]), _HISTORY)),
            }

        return await self._call(call)

    async def _map(self, request: Request) -> Response:
        """Two-dimensional positions (PCA) of the entities with the most pairs."""
        given = request.query_params
        snapshot, side, column = self.models.get(given.get("model")), given.get("side", "right"), given.get("column")
        if side not in ("left", "right"):
            raise Refused(422, f"side: got {check.shown(side)}, expected 'left' or 'right'")
        return await self._call(lambda: map_of(snapshot, side, column))

    async def _run(self, request: Request) -> Response:
        """Counts, settings and training history of a model."""
        snapshot = self.models.get(request.query_params.get("model"))
        return await self._call(lambda: run(snapshot))

    async def _served(self, request: Request) -> Response:
        """The models being served."""
        return await self._call(lambda: {"models": [summary(one) for one in self.models.all()]})

    async def _health(self, request: Request) -> Response:
        """Whether the process is running."""
        return answer({"status": "ok"})

    async def _ready(self, request: Request) -> Response:
        """Whether the server can answer, and how many new models were refused."""
        if not self.batcher.alive:
            raise Refused(503, "server: the computing thread is not running, or the server is shutting down")
        refused = len(self.models.refused)
        return answer({"status": "ready", "models": len(self.models.all()), "refused_models": refused})

    async def _prometheus(self, request: Request) -> Response:
        """Metrics in the text format of Prometheus."""
        waiting = GaugeMetricFamily("gramtower_waiting_requests", "Requests not computed yet.", self.batcher.waiting)
        text = self.metrics.text([*self.models.gauges(), waiting])
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _call(self, call: Callable[[], Any], size: int = 1) -> Response:
        return answer(await self.batcher.submit(CallTask(lambda: encode(call()), max(1, size))))

    async def _answer(
        self, task: Callable[[int, int, bool], ListTask], rows: int, stream: bool, known: CallTask
    ) -> Response:
        """One JSON object, or lines as they are computed; unknown ids are refused before the first line."""
        if not stream:
            return answer(await self.batcher.submit(task(0, rows, False)))
        await self.batcher.submit(known)
        first = await self.batcher.submit(task(0, min(_CHUNK, rows), True))  # even without rows: it may be refused

        async def lines() -> AsyncIterator[bytes]:
            yield first
            try:
                for start in range(_CHUNK, rows, _CHUNK):
                    yield await self.batcher.submit(task(start, min(start + _CHUNK, rows), True))
            except Refused as refused:
                yield encode(refused.content) + b"\n"

        return StreamingResponse(lines(), media_type="application/x-ndjson")

    def _lists(self, rows: int, k: int, stream: bool) -> None:
        if k > self.limits.k:
            raise Refused(422, f"k: got {check.shown(k)}, expected an integer from 1 to {self.limits.k}")
        hint = "" if stream else '; with "stream": true more'
        within("ids", rows, self.limits.stream_ids if stream else self.limits.ids, "entities", hint)
        if not stream:
            within("ids × k", rows * k, self.limits.answers, "places in one answer", hint)

    def _features(self, name: str, given: bodies.Features | None) -> NewFeatures:
        features = make_features(name, given)
        if features is not None:
            within(name, _rows(features), self.limits.ids, "rows")
        return features

    def _histories(self, histories: Histories) -> None:
        if histories is not None:
            within("histories", len(histories), self.limits.ids, "lists")
            longest = max(map(len, histories), default=0)
            within("histories", longest, self.limits.history, "ids of one entity")


def make_app(
    models: Models, metrics: Metrics | None = None, limits: Limits | None = None, *, wait: float = 0.002,
    token: str | None = None, hosts: Collection[str] | None = None, origins: Collection[str] = (),
    log: Callable[[Scope, int, float], None] | None = None,
) -> tuple[ASGIApp, Service]:  # fmt: skip
    """Build the ASGI application and its handlers; ``log`` is called after each request."""
    metrics, limits = metrics or Metrics(), limits or Limits()
    service = Service(models, metrics, limits, wait)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        service.batcher.close()

    described = describe(
        {path: body for path, (_, body) in service.posts.items()},
        {path: handler.__doc__ or "" for path, handler in service.gets.items()},
    )
    fixed = {
        "/": (page(), "text/html"),
        "/docs": (api_page(described), "text/html"),
        "/openapi.json": (encode(described), "application/json"),
    }

    async def document(request: Request) -> Response:
        content, kind = fixed[request.url.path]
        headers = {"content-security-policy": PAGE_POLICY} if kind == "text/html" else None
        return Response(content, headers=headers, media_type=kind)

    routes = [Route(path, service.post(path), methods=["POST"]) for path in service.posts]
    for path, handler in {**service.gets, **dict.fromkeys(fixed, document)}.items():
        routes.append(Route(path, handler, methods=["GET"]))
    kinds = (Refused, TableError, HTTPException, Exception)
    app = Starlette(routes=routes, exception_handlers=dict.fromkeys(kinds, _on_error), lifespan=lifespan)
    app.router.redirect_slashes = False
    return Guard(app, metrics, {route.path for route in routes}, token, hosts, origins, log), service


async def _on_error(request: Request, error: Exception) -> Response:
    if isinstance(error, Refused):
        return refusal(error)
    if isinstance(error, TableError):
        return refusal(Refused(422, str(error)))
    if isinstance(error, HTTPException):
        return answer({"error": str(error.detail)}, error.status_code, dict(error.headers or {}))
    _LOG.error("internal error", exc_info=error)
    return answer({"error": "internal error of the server; see its log"}, 500)


def _columns(wanted: bool | list[str]) -> list[str] | None:
    """Columns to return: None for none, an empty list for all."""
    if isinstance(wanted, bool):
        return [] if wanted else None
    return wanted or None


def _rows(features: NewFeatures, histories: Histories = None) -> int:
    if features is None:
        return len(histories or ())
    return max(map(len, features.values()), default=0) if isinstance(features, dict) else len(features)


def _cut(features: NewFeatures, a: int, b: int) -> NewFeatures:
    if isinstance(features, dict):
        return {name: cells[a:b] for name, cells in features.items()}
    return None if features is None else features[a:b]


def make_features(name: str, given: bodies.Features | None) -> NewFeatures:
    """Features of a request in the form that the model takes: columns, or an array of numbers."""
    if given is None:
        return None
    if isinstance(given, dict):
        lengths = {len(cells) for cells in given.values()}
        if len(lengths) != 1:
            raise Refused(422, f"{name}: got columns of {sorted(lengths)[:5]} cells, expected equal numbers")
        return given
    rows = [row for row in given if isinstance(row, dict)]
    if len(rows) == len(given):
        columns = dict.fromkeys(column for row in rows for column in row)
        return {column: [row.get(column) for row in rows] for column in columns}
    widths = {len(row) for row in given}
    if len(widths) != 1:
        raise Refused(422, f"{name}: got rows of {sorted(widths)[:5]} numbers, expected equal numbers")
    with np.errstate(over="ignore"):
        array = np.array(given, np.float64).astype(np.float32)
    if not np.isfinite(array).all():
        raise Refused(422, f"{name}: got numbers that overflow float32, expected smaller ones")
    return array


def titled(this: Entities, rows: NDArray[np.int64]) -> list[dict[str, object]]:
    """Entities with their titles and numbers of pairs."""
    found = places(this, rows)
    for one, row in zip(found, rows.tolist(), strict=True):
        one["title"] = None if this.titles is None else this.titles[row]
        one["pairs"] = int(this.degrees[row])
    return found


def map_of(snapshot: Snapshot, side: str, column: str | None) -> dict[str, object]:
    """Positions of entities, and for a column its most frequent values, for colours."""
    this = snapshot.side(side)
    drawn = this.map
    answer: dict[str, Any] = {
        "model": snapshot.name,
        "side": side,
        "shares": drawn.shares,
        "entities": len(this),
        "labels": min(_LABELS, len(drawn.rows)),
        "ids": this.names(drawn.rows),
        "x": _rounded(drawn.places[:, 0]),
        "y": _rounded(drawn.places[:, 1]),
        "columns": [] if this.table is None else [c for c in this.table.columns if this.table.kinds[c] != "skip"],
        "titles": None if this.titles is None else [this.titles[row] for row in drawn.rows.tolist()],
    }
    if column is not None:
        if this.table is None:
            raise Refused(422, f"column: got {check.shown(column)}, but this side has no table")
        cells = this.table.groups(column, drawn.rows)
        counts = Counter(cell for cell in cells if cell is not None)
        names = sorted(counts, key=lambda name: (-counts[name], name))[:_GROUPS]
        numbers: dict[str | None, int] = {name: number for number, name in enumerate(names)}
        answer |= {"groups": names, "group": [numbers.get(cell, -1) for cell in cells]}
    return answer


def summary(snapshot: Snapshot) -> dict[str, object]:
    """Sizes and names of a model."""
    facts, tables = snapshot.index_facts, {"left": snapshot.left.table, "right": snapshot.right.table}
    return {
        "name": snapshot.name,
        "left": len(snapshot.left),
        "right": len(snapshot.right),
        "names": dict(zip(("left", "right"), snapshot.model.fitted_.names, strict=True)),
        "pairs": int(snapshot.model.trained_.nnz),
        "dim": int(snapshot.left.embeddings.shape[1]),
        "calibrated": snapshot.model.calibration_ is not None,
        "histories": snapshot.takes_histories,
        "index": facts and {name: getattr(facts, name) for name in ("kind", "k", "recall", "bytes")},
        "tables": {
            side: table and {"columns": table.kinds, "title": table.title, "entities": table.joined}
            for side, table in tables.items()
        },
        "notes": snapshot.notes,
    }


def run(snapshot: Snapshot) -> dict[str, object]:
    """Counts, settings and training history."""
    model = snapshot.model
    records = model.history_
    step = max(1, -(-len(records) // _RECORDS))
    kept = [*records[:-1:step], records[-1]] if records else []
    settings = {
        name: value
        for name, value in model.with_changes().get_params().items()
        if name not in ("towers", "verbose") and value is not None and not isinstance(value, np.ndarray)
    }
    if model.factors is not None:
        settings["imputed"] = f"low rank, {model.factors[0].shape[1]}"
    degrees = {
        side: [float(np.quantile(snapshot.side(side).degrees, at)) for at in (0.0, 0.25, 0.5, 0.75, 1.0)]
        for side in ("left", "right")
    }
    curves = ("iteration", "seconds", "value", "gradient_norm", "metric")
    answer = {
        **summary(snapshot),
        "model": str(model),
        "settings": settings,
        "stopped": getattr(model, "message_", None),
        "degrees": degrees,
        "history": {name: [getattr(record, name, None) for record in kept] for name in curves},
        "metric": settings.get("metric"),
        "evaluation": snapshot.evaluation,
    }
    return plain(answer)  # type: ignore[no-any-return]


def _rounded(values: NDArray[np.float32]) -> list[float]:
    return [float(f"{value:.5g}") for value in values.tolist()]
