"""The numbers of a benchmark for people: the plain table, and how intervals, differences and bytes are written."""

from __future__ import annotations

from typing import Any


def ordered(summary: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Models with what is known of them, the best first, those that have not ended last."""
    models, ranked = summary["models"], summary["ranking"]
    return [(name, models[name]) for name in (*ranked, *(name for name in models if name not in ranked))]


def table_of(summary: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of the plain table: models with a run, the best first."""
    first, *others = summary["metrics"]
    apart = [f"difference from {summary['reference']}"] if len(summary["ranking"]) > 1 else []
    heads = ["model", first, "95%", *apart, *others, "fit s", "peak MB", "added MB"]
    rows = []
    for name, facts in ordered(summary):
        if facts["runs"]:
            found = facts["metrics"][first]
            cells = [name, f"{found['mean']:.4f}", span(found["interval"])]
            cells += [difference(found["difference"]) for _ in apart]
            cells += [f"{facts['metrics'][metric]['mean']:.4f}" for metric in others]
            cells += [f"{facts['fit_seconds']:.2f}", megabytes(facts["peak_bytes"]), megabytes(facts["added_bytes"])]
            rows.append(cells)
    return heads, rows


def notes_of(summary: dict[str, Any]) -> list[str]:
    """A line for each model that did not end."""
    return [
        f"{name} {facts['status']}: {facts['message']}"
        for name, facts in summary["models"].items()
        if facts["status"] != "finished"
    ]


def span(interval: Any) -> str:
    """An interval for people."""
    return "-" if interval is None else f"{interval[0]:.4f} to {interval[1]:.4f}"


def difference(found: Any) -> str:
    """A difference for people, with its interval."""
    if found is None:
        return "-"
    low, high = found["interval"]
    return f"{found['mean']:+.4f} ({low:+.4f} to {high:+.4f})"


def megabytes(value: int | None) -> str:
    """Bytes for people; - where they are not known."""
    return "-" if value is None else f"{value / 1e6:,.0f}"
