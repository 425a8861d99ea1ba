"""report.html of a benchmark: one self-contained file without scripts, with tables and a chart of intervals."""

from __future__ import annotations

from html import escape
from typing import Any

from gramtower.experiments.benchmark_text import difference, megabytes, ordered, span
from gramtower.experiments.page import document, facts, table

_WIDTH, _LEFT, _RIGHT, _ROW, _TOP = 560, 165, 20, 26, 12  # of a drawing, in its units: a phone must show its text
_WIDEST = 660  # pixels of a drawing
_DIGITS = 4
_BUSY = 0.1  # cores of other processes that are worth a warning
_EXPLAINED = (
    "All models learn from the same pairs, rank all items for the same users, and leave out what a user has in the "
    "training pairs. Means are over seeds of means over users. Intervals: percentiles of {replicates:,} bootstrap "
    "replicates, in which users are drawn with replacement, the same draws for all models. A difference is that of the "
    "same users under the same seeds. Each is a statement about one pair of models: with many of them, some exclude "
    "zero by chance."
)


def page(summary: dict[str, Any]) -> str:
    """The page of what :func:`gramtower.experiments.benchmark_summary.summarise` found."""
    body = [
        f"<p>{escape(about(summary))}</p>",
        f"<p><strong>{escape(summary['verdict'])}</strong></p>",
        *_troubles(summary),
        *(part for metric in summary["metrics"] for part in _metric(summary, metric)),
        *_costs(summary),
        *_seeds(summary),
        *_settings(summary),
    ]
    return document(f"Benchmark of models: {summary['title']}", body)


def about(summary: dict[str, Any]) -> str:
    """A sentence about the data."""
    data, users = summary["data"], summary["users"]
    counts = {seed: users[str(seed)] for seed in summary["seeds"] if str(seed) in users}
    if len(set(counts.values())) == 1:
        tested = f"{next(iter(counts.values())):,} users have test pairs"
    else:
        each = ", ".join(f"{count:,} with seed {seed}" for seed, count in counts.items())
        tested = f"users with test pairs: {each}" if each else "no run has ended yet"
    return (
        f"{data['left']:,} left × {data['right']:,} right entities, {data['pairs']:,} pairs; {data['test']}; {tested}."
    )


def _troubles(summary: dict[str, Any]) -> list[str]:
    found = [(name, one) for name, one in summary["models"].items() if one["status"] != "finished"]
    if not found:
        return []
    lines = [f"<li>{escape(name)} {one['status']}: {escape(one['message'])}</li>" for name, one in found]
    return [f'<div class="warn"><p>Not all models are compared:</p><ul>{"".join(lines)}</ul></div>']


def _metric(summary: dict[str, Any], metric: str) -> list[str]:
    """Means, intervals and differences of a metric, as a drawing and as a table."""
    found = {name: one["metrics"][metric] for name, one in ordered(summary) if one["runs"]}
    if not found:
        return []
    reference = summary["reference"]
    rows = [[name, f"{one['mean']:.{_DIGITS}f}", span(one["interval"]), difference(one["difference"]),
             "" if one["difference"] is None else "yes" if one["difference"]["excludes_zero"] else "no"]
            for name, one in found.items()]  # fmt: skip
    heads = ["model", metric, "95% interval", f"difference from {reference}", "interval excludes zero"]
    return [f"<h2>{escape(metric)}</h2>", _drawing(metric, found), table(heads, rows)]


def _drawing(metric: str, found: dict[str, dict[str, Any]]) -> str:
    """Dots with intervals, one line a model, over a common axis from zero."""
    ends = [value for one in found.values() for value in (one["mean"], *(one["interval"] or ()))]
    low, high = min(0.0, *ends), max(1e-12, *ends)
    step, first = ticks(low, high)

    def at(value: float) -> float:
        return float(_LEFT + (_WIDTH - _LEFT - _RIGHT) * (value - low) / (high - low))

    bottom = _TOP + _ROW * len(found)
    parts = []
    for number in range(first, int(high / step + 1e-9) + 1):
        x = at(number * step)
        parts.append(f'<path d="M{x:.1f} {_TOP}V{bottom}" stroke="#d8d8d8"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{number * step:.6g}</text>')
    for row, (name, one) in enumerate(found.items()):
        y = _TOP + _ROW * (row + 0.5)
        parts.append(f'<text x="{_LEFT - 10}" y="{y + 4:.1f}" text-anchor="end">{escape(_short(name))}</text>')
        if one["interval"] is not None:
            a, b = (at(value) for value in one["interval"])
            parts.append(f'<path d="M{a:.1f} {y:.1f}H{b:.1f}" stroke="#0072B2" stroke-width="3"/>')
        parts.append(f'<circle cx="{at(one["mean"]):.1f}" cy="{y:.1f}" r="4.5" fill="#000"/>')
    label = escape(f"{metric} of each model with its 95% interval")
    return (
        f'<figure><figcaption>{label}</figcaption><svg viewBox="0 0 {_WIDTH} {bottom + 24}" role="img" '
        f'aria-label="{label}" style="max-width:{_WIDEST}px">{"".join(parts)}</svg></figure>'
    )


def ticks(low: float, high: float) -> tuple[float, int]:
    """A round distance between about five marks of an axis, and the number of the first one."""
    rough = (high - low) / 5
    power = 10.0 ** int(f"{rough:e}".split("e")[1])
    step = next(power * times for times in (1, 2, 5, 10) if power * times >= rough * (1 - 1e-9))
    return step, -int(-low / step + 1e-9)


def _costs(summary: dict[str, Any]) -> list[str]:
    rows = [
        [name, f"{one['fit_seconds']:.2f}", f"{one['list_seconds']:.2f}", megabytes(one["peak_bytes"]),
         megabytes(one["added_bytes"])]
        for name, one in ordered(summary) if one["runs"]
    ]  # fmt: skip
    heads = ["model", "fit, seconds", "lists, seconds", "peak, MB", "added, MB"]
    note = (
        "Seconds are medians over seeds, of the fit alone and of the lists of all users. Memory is the resident set of "
        "the process: its largest size during fit and lists, and by how much that is above the size before, the "
        "largest over seeds. Memory of a GPU is not in it. Models run one after the other; nothing else should."
    )
    busy = max((one["others_busy"] or 0.0 for one in summary["models"].values()), default=0.0)
    warned = (
        [f'<p class="warn">Other processes kept up to {busy:.2f} cores busy meanwhile; times are no measurement.</p>']
        if busy > _BUSY
        else []
    )
    return ["<h2>Time and memory</h2>", table(heads, rows), f'<p class="soft">{note}</p>', *warned] if rows else []


def _seeds(summary: dict[str, Any]) -> list[str]:
    metric = summary["metrics"][0]
    rows = []
    for name, one in ordered(summary):
        if one["runs"]:
            values = one["metrics"][metric]["by_seed"]
            cells = (values.get(str(seed)) for seed in summary["seeds"])
            rows.append([name, *("–" if value is None else f"{value:.{_DIGITS}f}" for value in cells)])
    heads = ["model", *(f"seed {seed}" for seed in summary["seeds"])]
    explained = _EXPLAINED.format(replicates=summary["intervals"]["replicates"])
    tables = [f"<h2>{escape(metric)} of each seed</h2>", table(heads, rows)] if rows else []
    return [*tables, "<h2>How it was measured</h2>", f"<p>{escape(explained)}</p>"]


def _settings(summary: dict[str, Any]) -> list[str]:
    found = ["<h2>Models</h2>"]
    found += [_facts(name, one["settings"]) for name, one in summary["models"].items()]
    found += ["<h2>Data</h2>", _facts("", summary["data"])]
    if summary["commands"]:
        found += ["<h2>Command</h2>", *(f"<pre>{escape(command)}</pre>" for command in summary["commands"])]
    found.append("<h2>Machine</h2>")
    if len(summary["environments"]) > 1:
        found.append('<p class="warn">Runs were on different machines or versions; their times do not compare.</p>')
    return [*found, *(_facts("", one) for one in summary["environments"])]


def _facts(name: str, values: dict[str, Any]) -> str:
    return facts(name, {key: value for key, value in values.items() if value is not None})


def _short(name: str, most: int = 22) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"
