"""Small pieces of HTML for notebooks: a title, tables, a curve.

All text is escaped. Colours are those of the page (``currentColor``), so that light and dark themes both read; nothing
is loaded from elsewhere and nothing runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape

_CARD = "border:1px solid rgba(128,128,128,.45);border-radius:4px;padding:.5em .8em;display:inline-block;max-width:100%"
_TABLE = "border-collapse:collapse;color:inherit;font-size:.92em;margin:.3em 0"
_CELL = "padding:.1em .8em .1em 0;text-align:left;background:none;border:none;white-space:nowrap"
_LONGEST = 60  # letters of a cell


def text(value: object) -> str:
    """A value for a cell: counts with separators, other numbers to four digits or so, long text cut, all escaped."""
    if isinstance(value, bool):
        shown = "yes" if value else "no"
    elif isinstance(value, int):
        shown = f"{value:,}"
    elif isinstance(value, float):
        shown = "–" if math.isnan(value) else f"{value:.4f}" if 1e-3 <= abs(value) < 10 else f"{value:,.4g}"
    else:
        shown = "–" if value is None else str(value)
    return escape(shown if len(shown) <= _LONGEST else shown[: _LONGEST - 1] + "…")


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Rows under heads."""
    line = "".join(f'<th style="{_CELL};opacity:.7;font-weight:normal">{text(head)}</th>' for head in heads)
    body = "".join(
        "<tr style='background:none'>" + "".join(f'<td style="{_CELL}">{text(cell)}</td>' for cell in row) + "</tr>"
        for row in rows
    )
    return (
        f"<table style=\"{_TABLE}\"><thead><tr style='background:none'>{line}</tr></thead><tbody>{body}</tbody></table>"
    )


def facts(named: Mapping[str, object]) -> str:
    """Names and values, one in a line."""
    rows = "".join(
        f'<tr style="background:none"><td style="{_CELL};opacity:.7">{text(name)}</td>'
        f'<td style="{_CELL};white-space:normal">{text(value)}</td></tr>'
        for name, value in named.items()
    )
    return f'<table style="{_TABLE}"><tbody>{rows}</tbody></table>'


def note(words: str) -> str:
    """A line of text, escaped, of any length."""
    return f'<div style="font-size:.92em;opacity:.8">{escape(words)}</div>'


def curve(values: Sequence[float], label: str) -> str:
    """A line through values from left to right, as a picture of its own."""
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


def card(title: str, *parts: str) -> str:
    """A title over parts, which are HTML already."""
    return f'<div style="{_CARD}"><strong>{escape(title)}</strong>{"".join(parts)}</div>'


def progress(done: int, total: int, words: str) -> str:
    """A bar with words beside it."""
    return (
        f'<div style="font-size:.92em"><progress value="{done}" max="{max(1, total)}" style="vertical-align:middle;'
        f'width:12em;accent-color:currentColor"></progress> {escape(words)}</div>'
    )
