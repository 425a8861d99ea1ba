"""The interface in the words of OpenAPI, made by fastapi from the handlers and the schemas of their bodies."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from typing import Any

from fastapi import APIRouter
from fastapi.openapi.utils import get_openapi

from gramtower.serving import answers as about
from gramtower.serving import request_checks as schemas

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


_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code, pre { font-family: ui-monospace, monospace; font-size: 0.9em; }
.across { overflow-x: auto; } h2 { overflow-wrap: anywhere; }
table { border-collapse: collapse; } td, th { text-align: left; vertical-align: top; padding: 0.2rem 0.8rem 0.2rem 0; }
pre { overflow-x: auto; } :root { color-scheme: light dark; }
"""


@lru_cache(maxsize=1)
def page() -> bytes:
    """The page."""
    return resources.files("gramtower.serving").joinpath("page.html").read_bytes()


def api_page(described: Mapping[str, Any]) -> bytes:
    """An OpenAPI description as HTML."""
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        "<meta name=viewport content='width=device-width'><title>gramtower: interface</title>",
        f"<style>{_STYLE}</style><h1>gramtower: interface</h1>",
        "<p>Bodies and answers are JSON in UTF-8. An answer with a status from 400 on is "
        "<code>{&quot;error&quot;: …}</code>. For programs: <code>/openapi.json</code>.</p>",
    ]
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            parts.append(f"<h2 id={html.escape(operation['operationId'])}><code>{method.upper()} {path}</code></h2>")
            parts.append(f"<p>{html.escape(operation.get('description', ''))}</p>")
            parts += _fields(operation)
    return "".join(parts).encode()


def _fields(operation: Mapping[str, Any]) -> list[str]:
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    rows = [
        (name, _type(field), "needed" if name in body.get("required", ()) else json.dumps(field.get("default")), field)
        for name, field in body.get("properties", {}).items()
    ]
    rows += [(one["name"], "string", "null", {}) for one in operation.get("parameters", ())]
    if not rows:
        return []
    cells = [
        f"<tr><td><code>{html.escape(name)}</code><td><code>{html.escape(kind)}</code><td>{html.escape(default)}"
        f"<td>{html.escape(field.get('description', ''))}"
        for name, kind, default, field in rows
    ]
    return ["<div class=across><table><tr><th>field<th>type<th>default<th>meaning", *cells, "</table></div>"]


def _type(field: Mapping[str, Any]) -> str:
    """The type of a field in a few words."""
    if "enum" in field:
        return " | ".join(map(json.dumps, field["enum"]))
    if "anyOf" in field:
        return " | ".join(dict.fromkeys(_type(one) for one in field["anyOf"]))
    if field.get("type") == "array":
        inner = _type(field.get("items", {}))
        return f"[{inner}]"
    if field.get("type") == "object":
        inner = field.get("additionalProperties", {})
        return f"{{name: {_type(inner if isinstance(inner, dict) else {})}}}"
    return str(field.get("type", "any"))


def _digests(text: str, tag: str) -> str:
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    made = (base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in found)
    return " ".join(f"'sha256-{one}'" for one in made) or "'none'"


def _policy() -> str:
    text = page().decode()
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src {_digests(text, 'script')}",
            f"style-src {_digests(text, 'style')} {_digests(f'<style>{_STYLE}</style>', 'style')}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    )


PAGE_POLICY = _policy()
