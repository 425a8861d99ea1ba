"""Parts of HTML for notebooks and pages: tables, names with values, curves, cards and whole documents.

All text is escaped, and nothing is loaded from elsewhere. Cards use the colours of the notebook (``currentColor``), so
that they can be read in light and dark themes; a document brings its own style sheet, page.css, and a
Content-Security-Policy that keeps the browser from loading anything.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files

_CARD = "border:1px solid rgba(128,128,128,.45);border-radius:4px;padding:.5em .8em;display:inline-block;max-width:100%"
_CELL = "padding:.1em .8em .1em 0;text-align:left;background:none;border:none"
_STYLES = {
    "table": "border-collapse:collapse;color:inherit;font-size:.92em;margin:.3em 0",
    "tr": "background:none",
    "th": f"{_CELL};opacity:.7;font-weight:normal;white-space:nowrap",
    "td": _CELL,
}
_LONGEST = 60  # letters of a cell in a notebook
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def text(value: object, longest: int | None = _LONGEST) -> str:
    """Format a value for a cell: counts with separators, other numbers to about four digits, long text cut."""
    if isinstance(value, bool):
        shown = "yes" if value else "no"
    elif isinstance(value, int):
        shown = f"{value:,}"
    elif isinstance(value, float):
        shown = "–" if math.isnan(value) else f"{value:.4f}" if 1e-3 <= abs(value) < 10 else f"{value:,.4g}"
    else:
        shown = "–" if value is None else str(value)
    return escape(shown if longest is None or len(shown) <= longest else shown[: longest - 1] + "…")


def number(value: float | None, digits: int = 3) -> str:
    """Format a number: counts with separators, others to a few digits, – for none."""
    if value is None or value != value:
        return "–"
    if isinstance(value, int) or abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[object]],
    marked: Sequence[Sequence[bool]] | None = None,
    sentences: Sequence[int] = (),
    longest: int | None = _LONGEST,
) -> str:
    """Return a table whose first column names the rows; ``sentences`` are columns that are broken into lines."""
    tops = [f"<th scope=col{' class=text' if n in sentences else ''}>{text(c)}</th>" for n, c in enumerate(heads)]
    body = []
    for place, (name, *cells) in enumerate(rows):
        parts = [f"<th scope=row>{text(name, longest)}</th>"]
        for column, cell in enumerate(cells):
            kinds = ["best"] if marked is not None and marked[place][column] else []
            kinds += ["text"] if column + 1 in sentences else []
            kinds += ["none"] if cell == "–" else []
            parts.append(f'<td class="{" ".join(kinds)}">' if kinds else "<td>")
            parts.append(f"{text(cell, longest)}</td>")
        body.append(f"<tr>{''.join(parts)}</tr>")
    head = f"<thead><tr>{''.join(tops)}</tr></thead>" if tops else ""
    return f'<div class="scroll"><table>{head}<tbody>{"".join(body)}</tbody></table></div>'


def facts(named: Mapping[str, object]) -> str:
    """Return names and values as a table."""
    return table((), named.items())


def note(words: str) -> str:
    """Return a line of text of any length."""
    return f'<div style="font-size:.92em;opacity:.8">{escape(words)}</div>'


def curve(values: Sequence[float], label: str) -> str:
    """Return a small picture of a line through values; nothing for fewer than two finite ones."""
    finite = [(place, value) for place, value in enumerate(values) if math.isfinite(value)]
    if len(finite) < 2:
        return ""
    low, high = min(v for _, v in finite), max(v for _, v in finite)
    width, height, last = 180.0, 36.0, len(values) - 1
    points = " ".join(
        f"{2 + (width - 4) * place / last:.1f},{2 + (height - 4) * (1 - (value - low) / ((high - low) or 1)):.1f}"
        for place, value in finite
    )
    return (
        f'<svg role="img" aria-label="{escape(label)}" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}"><title>{escape(label)}</title>'
        f'<polyline points="{points}" fill="none" stroke="currentColor" stroke-width="1.5"/></svg>'
    )


def progress(done: int, total: int, words: str) -> str:
    """Return a bar followed by words."""
    return (
        f'<div style="font-size:.92em"><progress value="{done}" max="{max(1, total)}" style="vertical-align:middle;'
        f'width:12em;accent-color:currentColor"></progress> {escape(words)}</div>'
    )


def card(title: str, *parts: str) -> str:
    """Return a title over parts for a notebook, which has no style sheet: styles are put into the tags."""
    styled = re.sub(r"<(table|tr|th|td)\b", lambda tag: f'{tag[0]} style="{_STYLES[tag[1]]}"', "".join(parts))
    return f'<div style="{_CARD}"><strong>{escape(title)}</strong>{styled}</div>'


def document(title: str, body: Iterable[str], data: Mapping[str, object] | None = None, script: str = "") -> str:
    """Return a page that needs no other file."""
    style = files("gramtower._util").joinpath("page.css").read_text(encoding="utf-8")
    scripts = []
    if data is not None:
        content = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
        scripts = [f'<script type="application/json" id="data">{content}</script>', f"<script>\n{script}</script>"]
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
