"""An HTML document that needs nothing but itself, and the parts that pages of runs share: tables, facts, pictures.

A Content-Security-Policy keeps the browser from loading anything; pictures are part of the file. Checked by
tests/test_report.py and tests/test_run_pages.py.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def document(title: str, body: Iterable[str], data: Mapping[str, Any] | None = None, script: str = "") -> str:
    """A page with a heading.

    Args:
        title: plain text.
        body: HTML after the heading.
        data: what the script finds as JSON in the element ``data``.
        script: JavaScript at the end.
    """
    style = files("gramtower.experiments").joinpath("page.css").read_text(encoding="utf-8")
    scripts = []
    if data is not None:
        text = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
        scripts = [f'<script type="application/json" id="data">{text}</script>', f"<script>\n{script}</script>"]
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            f"<title>{escape(title)}</title>",
            f"<style>\n{style}</style></head><body>",
            f"<h1>{escape(title)}</h1>",
            *body,
            *scripts,
            "</body></html>\n",
        ]
    )


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], marked: list[list[bool]] | None = None, text: Sequence[int] = ()
) -> str:
    """An HTML table whose first column names the rows; ``marked`` cells are bold, ``text`` columns hold sentences."""
    tops = [f"<th scope=col{' class=text' if n in text else ''}>{escape(cell)}</th>" for n, cell in enumerate(head)]
    body = []
    for place, (name, *cells) in enumerate(rows):
        parts = [f"<th scope=row>{escape(name)}</th>"]
        for column, cell in enumerate(cells):
            kinds = ["best"] if marked is not None and marked[place][column] else []
            kinds += ["text"] if column + 1 in text else []
            kinds += ["none"] if cell == "–" else []
            parts.append(f'<td class="{" ".join(kinds)}">{escape(cell)}</td>' if kinds else f"<td>{escape(cell)}</td>")
        body.append(f"<tr>{''.join(parts)}</tr>")
    content = f"<table><thead><tr>{''.join(tops)}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    return f'<div class="scroll">{content}</div>'


def facts(name: str, values: Mapping[str, Any]) -> str:
    """Names and values, one a line."""
    lines = [f"{key}: {value if isinstance(value, str) else json.dumps(value)}" for key, value in values.items()]
    return (f"<p>{escape(name)}</p>" if name else "") + f"<pre>{escape(chr(10).join(lines))}</pre>"


def picture(svg: bytes, caption: str) -> str:
    """An SVG figure as a part of the page."""
    source = base64.b64encode(svg).decode("ascii")
    return (
        f'<figure><figcaption>{escape(caption)}</figcaption><img alt="{escape(caption)}" '
        f'src="data:image/svg+xml;base64,{source}"></figure>'
    )


def number(value: float | None, digits: int = 3) -> str:
    """A number for people: counts with separators, others to a few digits, – for none."""
    if value is None or value != value:
        return "–"
    if isinstance(value, int) or abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"
