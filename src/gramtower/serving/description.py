"""The interface in the words of OpenAPI, made by fastapi from the handlers and the schemas of their bodies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter
from fastapi.openapi.utils import get_openapi

from gramtower.serving import about, schemas

_QUERIES = {"/map": ("model", "side", "column"), "/run": ("model",)}
_STATUSES = {
    400: "The client has gone.",
    401: "No token, or another.",
    404: "Unknown id or model; near ones.",
    408: "The body came too slowly.",
    413: "The body is too long.",
    422: "The body says what cannot be.",
    503: "Too many requests wait.",
}


def describe(bodies: Mapping[str, tuple[Any, type[schemas.Body]]], plain: Mapping[str, Any]) -> dict[str, Any]:
    """The description.

    Args:
        bodies: by path, handlers of POST and the bodies they take.
        plain: by path, handlers of GET.
    """
    router = APIRouter()
    for path, (handler, body) in bodies.items():
        _add(router, path, handler, "POST", body)
    for path, handler in plain.items():
        _add(router, path, handler, "GET")
    return get_openapi(title="gramtower", version=about.version(), routes=router.routes)


def _add(router: APIRouter, path: str, handler: Any, method: str, body: type[schemas.Body] | None = None) -> None:
    queries = [
        {"name": name, "in": "query", "required": False, "schema": {"type": "string"}}
        for name in _QUERIES.get(path, ())
    ]
    text = (body or handler).__doc__ or ""
    met = {status: text for status, text in _STATUSES.items() if method == "POST" or status in (401, 404, 422, 503)}
    router.add_api_route(
        path, handler, methods=[method], name=path.strip("/"), operation_id=path.strip("/"),
        description=" ".join(text.split()),
        openapi_extra={"parameters": queries} if body is None else schemas.schema(body),
        responses={status: {"description": text} for status, text in met.items()},
    )  # fmt: skip
