"""The page at ``/``, and the description of the interface at ``/docs`` and ``/openapi.json``.

/docs is plain HTML, because the usual pages for OpenAPI need scripts from another server. page.html is served as it is.
The content security policy allows its script and style, by their digests, and requests to this server only.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib import metadata, resources
from typing import Any

from gramtower.serving.request_checks import Body

Content = dict[str, Any]  # for JSON
_QUERIES = {"/map": ("model", "side", "column"), "/run": ("model",)}
_STATUSES = {
    400: "The client has disconnected.",
    401: "The token is missing or wrong.",
    404: "An id or a model is unknown; near lists similar ones.",
    408: "The body arrived too slowly.",
    413: "The body is too long.",
    422: "The request cannot be answered; error says why.",
    503: "Too many requests are waiting.",
}
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code, pre { font-family: ui-monospace, monospace; font-size: 0.9em; }
.across { overflow-x: auto; } h2 { overflow-wrap: anywhere; }
table { border-collapse: collapse; } td, th { text-align: left; vertical-align: top; padding: 0.2rem 0.8rem 0.2rem 0; }
pre { overflow-x: auto; } :root { color-scheme: light dark; }
"""
_HEAD = (
    "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
    f"<title>gramtower: interface</title><style>{_STYLE}</style><h1>gramtower: interface</h1>"
    "<p>Requests and answers are JSON in UTF-8. An answer with a status of 400 or more is "
    "<code>{&quot;error&quot;: …}</code>. For programs: <code>/openapi.json</code>.</p>"
)


def describe(bodies: Mapping[str, type[Body]], texts: Mapping[str, str]) -> Content:
    """The OpenAPI description."""
    paths: Content = {}
    for path, body in bodies.items():
        content = {"application/json": {"schema": body.model_json_schema(ref_template="#/components/schemas/{model}")}}
        operation = _operation(path, body.__doc__ or "", _STATUSES)
        paths[path] = {"post": {**operation, "requestBody": {"required": True, "content": content}}}
    for path, text in texts.items():
        query = [{"name": name, "in": "query", "required": False, "schema": {"type": "string"}}
                 for name in _QUERIES.get(path, ())]  # fmt: skip
        paths[path] = {"get": {**_operation(path, text, (401, 404, 422, 503)), "parameters": query}}
    version = metadata.version("gramtower")
    return {"openapi": "3.1.0", "info": {"title": "gramtower", "version": version}, "paths": paths}


def _operation(path: str, text: str, statuses: Iterable[int]) -> Content:
    name = path.strip("/")
    answer = {"description": "Successful Response", "content": {"application/json": {"schema": {}}}}
    refusals = {str(status): {"description": _STATUSES[status]} for status in statuses}
    description = {"summary": name.title(), "description": " ".join(text.split()), "operationId": name}
    return {**description, "responses": {"200": answer, **refusals}}


def api_page(described: Mapping[str, Any]) -> bytes:
    """An OpenAPI description as HTML."""
    parts = [_HEAD]
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            parts.append(f"<h2 id={html.escape(operation['operationId'])}><code>{method.upper()} {path}</code></h2>")
            parts.append(f"<p>{html.escape(operation.get('description', ''))}</p>")
            parts.append(_fields(operation))
    return "".join(parts).encode()


def _fields(operation: Mapping[str, Any]) -> str:
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    required = body.get("required", ())
    rows = [
        (name, _type(field), "required" if name in required else json.dumps(field.get("default")), field)
        for name, field in body.get("properties", {}).items()
    ]
    rows += [(one["name"], "string", "null", {}) for one in operation.get("parameters", ())]
    cells = [
        f"<tr><td><code>{html.escape(name)}</code><td><code>{html.escape(kind)}</code><td>{html.escape(default)}"
        f"<td>{html.escape(field.get('description', ''))}"
        for name, kind, default, field in rows
    ]
    head = "<div class=across><table><tr><th>field<th>type<th>default<th>meaning"
    return f"{head}{''.join(cells)}</table></div>" if rows else ""


def _type(field: Mapping[str, Any]) -> str:
    if "enum" in field:
        return " | ".join(map(json.dumps, field["enum"]))
    if "anyOf" in field:
        return " | ".join(dict.fromkeys(_type(one) for one in field["anyOf"]))
    if field.get("type") == "array":
        return f"[{_type(field.get('items', {}))}]"
    if field.get("type") == "object":
        inner = field.get("additionalProperties", {})
        return f"{{name: {_type(inner if isinstance(inner, dict) else {})}}}"
    return str(field.get("type", "any"))


@lru_cache(maxsize=1)
def page() -> bytes:
    """The page at ``/``."""
    return resources.files("gramtower.serving").joinpath("page.html").read_bytes()


def _digests(text: str, tag: str) -> str:
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in found)
    return " ".join(f"'sha256-{one}'" for one in digests) or "'none'"


PAGE_POLICY = (
    f"default-src 'none'; script-src {_digests(page().decode(), 'script')}; "
    f"style-src {_digests(page().decode() + _HEAD, 'style')}; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
