"""Build the page, the figures and summary.json of a comparison from its saved histories.

report.html needs no other file: tables are plain HTML, and comparison_page.js draws the curves. It stays under 3 MB,
because at most POINTS records of a history are put into it. Figures have the form of the paper's (fig:time-f,
fig:time-map): time.png and .svg against seconds of training, passes.png and .svg against data passes. The record that
is L* itself has a relative difference of 0 and no place on a logarithmic axis; it is left out.
"""

from __future__ import annotations

import math
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gramtower._util.files import plain, replacing, write_json, write_text
from gramtower._util.html import number
from gramtower.experiments.comparison import (
    LEVELS,
    STATUSES,
    Comparison,
    MethodRun,
    lowest_value,
    read_comparison,
    relative_difference,
    summarise,
)
from gramtower.experiments.figures import BUSY, PAGE, SUMMARY, Page, drawing, line, panels, save, table
from gramtower.training.result import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POINTS = 2000


class Line(NamedTuple):
    """The line of an optimizer, the same in all figures. Colours are of the Okabe-Ito palette."""

    colour: str  # its colour
    dashes: tuple[int, ...] = ()  # lengths on and off; none for a solid line
    width: float = 2.0  # its width


_DASHED = (5, 3)
LINES = {
    "newton-kron": Line("#000000", width=2.8),
    "newton": Line("#D55E00"),
    "gd-diag": Line("#0072B2"),
    "gd": Line("#0072B2", _DASHED),
    "sogram-diag": Line("#CC79A7"),
    "sogram": Line("#CC79A7", _DASHED),
    "sampling-diag": Line("#009E73"),
    "sampling": Line("#009E73", _DASHED),
    "lbfgs": Line("#8A6D00", (2, 2)),
}
_OTHER = Line("#777777", (1, 2))


def line_of(name: str) -> Line:
    """Return the line of an optimizer; grey for an unknown one."""
    return LINES.get(name, _OTHER)


AXES = {"time": ("seconds", "seconds of training"), "passes": ("data_passes", "data passes")}
FORMATS = ("png", "svg")
#: Smallest relative difference that is shown.
FLOOR = 1e-4


def page(comparison: Comparison, summary: dict[str, Any]) -> str:
    """Build the page of a comparison from the numbers of :func:`gramtower.experiments.comparison.summarise`."""
    made = Page(f"Comparison of methods: {comparison.title}")
    script = files("gramtower.experiments").joinpath("comparison_page.js").read_text(encoding="utf-8")
    _add_opening(made, comparison, summary)
    _add_charts(made, comparison)
    _add_outcomes(made, comparison, summary)
    _add_levels(made, summary, "seconds_to", "Seconds to a relative difference", "training time in seconds")
    _add_levels(made, summary, "passes_to", "Data passes to a relative difference", "passes over all m·n pairs")
    _add_speed_ups(made, summary)
    _add_settings(made, comparison)
    return made.html(page_data(comparison, summary["lowest"]), script)


def page_data(comparison: Comparison, lowest: float | None) -> dict[str, Any]:
    """Return the data that comparison_page.js draws: for each optimizer its line and the columns of its history."""
    methods = {}
    for method in comparison.methods:
        records = thinned(method.history, POINTS)
        methods[method.name] = {
            "line": line_of(method.name)._asdict(),
            "seconds": [record.seconds for record in records],
            "passes": [record.data_passes for record in records],
            "value": [record.value for record in records],
            "metric": [record.metric for record in records],
        }
    return {"lowest": lowest, "floor": FLOOR, "methods": plain(methods)}


def thinned(history: list[Record], most: int) -> list[Record]:
    """Return at most ``most`` records: the first, the last, and an even choice of the others."""
    if len(history) <= most:
        return history
    return [history[round(place * (len(history) - 1) / (most - 1))] for place in range(most)]


def _add_opening(page: Page, comparison: Comparison, summary: dict[str, Any]) -> None:
    about, parts = comparison.about.data, []
    if {"left", "right", "pairs"} <= set(about):
        sizes = f"{about['left']:,} × {about['right']:,} entities, {about['pairs']:,} pairs to learn from"
        held = about.get("validation_pairs")
        parts.append(sizes + (f", {held:,} held out for {comparison.metric}." if held else "."))
    parts.append("All methods start from the same point and run one after the other; only their own work is timed.")
    if comparison.about.synthetic:
        page.text(f"Synthetic data: {comparison.about.synthetic}", "mark")
    page.text(" ".join(parts))
    page.text(summary["verdict"], strong=True)
    troubled = [f"{m.name} ({m.outcome.status})" for m in comparison.methods if m.outcome.status != "finished"]
    if troubled:
        page.text(f"Not all methods ran to their limit: {', '.join(troubled)}. Reasons are below.", "warn")


def _add_charts(page: Page, comparison: Comparison) -> None:
    metric = comparison.metric
    charts = [("objective", "Relative difference of the objective, (L − L*) / L*")]
    charts += [("metric", f"{metric} on the held-out pairs")] if metric else []
    keys = []
    for method in comparison.methods:
        if not method.history:
            continue
        line, name = line_of(method.name), escape(method.name)
        dashes = " ".join(map(str, line.dashes))
        stroke = f'stroke="{line.colour}" stroke-width="{line.width}" stroke-dasharray="{dashes}"'
        swatch = f'<svg viewBox="0 0 28 10" aria-hidden="true"><path d="M0 5H28" {stroke}/></svg>'
        keys.append(
            f'<li><button type="button" aria-pressed="true" data-method="{name}">{swatch}{name} '
            f'<output data-method="{name}"></output></button></li>'
        )
    figures = [
        f'<figure><figcaption>{escape(label)}</figcaption><div class="chart" data-chart="{kind}" '
        f'data-label="{escape(label)}"></div></figure>'
        for kind, label in charts
    ]
    page.heading("Curves")
    page.add(
        '<div class="controls"><span>Horizontal axis:</span>'
        '<label><input type="radio" name="x" value="seconds" checked> seconds</label>'
        '<label><input type="radio" name="x" value="passes"> data passes</label>'
        '<label><input type="checkbox" id="log" checked> logarithmic</label></div>',
        f'<div id="readout"></div><ul class="keys">{"".join(keys)}</ul>',
        f'<div class="charts{" two" if len(charts) > 1 else ""}">{"".join(figures)}</div>',
        "<noscript><p>The curves need JavaScript; the tables and the figures next to this file do not.</p></noscript>",
    )
    cut = [method.name for method in comparison.methods if len(method.history) > POINTS]
    if cut:
        page.text(f"Of {', '.join(cut)}, {POINTS:,} records are drawn.", "soft")
    page.text(
        "L* is the lowest value that any method reached; the record that reached it has no place on the logarithmic "
        f"axis. Differences below {FLOOR:g} are not shown. Buttons hide and show methods.",
        "soft",
    )


def _add_outcomes(page: Page, comparison: Comparison, summary: dict[str, Any]) -> None:
    metric = comparison.metric
    head = ["method", "lowest L", "(L − L*) / L*", *([f"best {metric}"] if metric else [])]
    head += ["iterations", "seconds", "data passes", "status", "why it stopped"]
    rows = []
    for method in comparison.methods:
        found = summary["methods"][method.name]
        metrics = [number(found.get("best_metric"))] if metric else []
        cells = [number(found.get("lowest"), 6), number(found.get("relative_difference")), *metrics]
        cells += [number(found.get(key)) for key in ("iterations", "seconds", "data_passes")]
        rows.append([method.name, *cells, found["status"], found["message"]])
    page.heading("What became of each method")
    page.add(table(head, rows, sentences=[len(head) - 1]))
    met = {found["status"] for found in summary["methods"].values()}
    legend = "".join(f" {name}: {text}." for name, text in STATUSES.items() if name in met)
    page.text(
        "Seconds are training time: validation, checkpoints and, for methods that sample, the value of the record are "
        f"left out. Data passes are counted alike.{legend}",
        "soft",
    )


def _add_levels(page: Page, summary: dict[str, Any], key: str, heading: str, unit: str) -> None:
    ran = {name: found[key] for name, found in summary["methods"].items() if key in found}
    if not ran:
        return
    levels = [f"{level:g}" for level in LEVELS]
    best = {level: min((t[level] for t in ran.values() if t[level] is not None), default=None) for level in levels}
    rows = [[name, *(number(times[level]) for level in levels)] for name, times in ran.items()]
    marked = [[times[level] is not None and times[level] == best[level] for level in levels] for times in ran.values()]
    page.heading(heading)
    page.add(table(["method", *levels], rows, marked))
    page.text(f"In {unit}, at the first record at or below; – is never.", "soft")


def _add_speed_ups(page: Page, summary: dict[str, Any]) -> None:
    tables = summary["speed_up"]
    if not tables or len(next(iter(tables.values()))) < 2:
        return
    options = "".join(f"<option{' selected' if level == '0.1' else ''}>{level}</option>" for level in tables)
    page.heading("How many times sooner")
    page.add(
        f'<p><label>To a relative difference of <select id="level">{options}</select></label>: '
        "the seconds of the column's method over those of the row's.</p>"
    )
    for level, times in tables.items():
        page.add(f'<div data-level="{level}"><p class="soft">Relative difference {level}:</p>')
        rows = [[a, *(_times(times[a].get(b)) if a != b else "" for b in times)] for a in times]
        page.add(table(["sooner ↓ than →", *times], rows))
        page.add("</div>")
    page.text(
        ">: the column never got there in its time, so at least so many times; <: the row never did, so at most; "
        "–: neither did.",
        "soft",
    )


def _times(found: dict[str, Any] | None) -> str:
    return "–" if found is None else f"{found['bound']} {number(found['times'])}".strip()


def _add_settings(page: Page, comparison: Comparison) -> None:
    about, ends = comparison.request, {method.name: method.outcome for method in comparison.methods}
    if about is None:
        page.heading("Settings")
        page.text("comparison.json, which holds them, is not in the folder.")
        return
    options = {name: end.options for name, end in ends.items() if end.options}
    machines = {name: end.environment for name, end in ends.items() if end.environment}
    page.circumstances(about.commands, {"data": about.data, **about.settings, "method options": options}, machines)
    known = {name: end.others_busy for name, end in ends.items() if end.others_busy is not None}
    if known:
        text = ", ".join(f"{name} {value:.2f}" for name, value in known.items())
        kind = "warn" if max(known.values()) > BUSY else ""
        page.text(f"Cores kept busy by other processes during the runs: {text}.", kind)


@drawing()
def draw_comparison(comparison: Comparison) -> list[Path]:
    """Write the figures of a comparison; return their paths."""
    paths = []
    for name in AXES:
        figure = _comparison_figure(comparison, name)
        for kind in FORMATS:
            path = comparison.folder / f"{name}.{kind}"
            with replacing(path) as partial:
                save(figure, partial, kind)
            paths.append(path)
    return paths


def value_range(curves: list[list[float]]) -> tuple[float, float]:
    """Return limits of the axis of relative differences: not below FLOOR, up to twice the start."""
    shown = [y for curve in curves for y in curve if y > 0 and math.isfinite(y)]
    top = 2.0 * max((curve[0] for curve in curves if curve and curve[0] > 0), default=1.0)
    return max(FLOOR, 0.8 * min(shown, default=FLOOR)), top


def _comparison_figure(comparison: Comparison, axis: str) -> Figure:
    what, label = AXES[axis]
    ran = [method for method in comparison.methods if method.history]
    metric = comparison.metric
    figure, (left, *rest) = panels(10.5 if metric else 6.0, 4.6, 2 if metric else 1)
    lowest = lowest_value(ran)
    if lowest is not None:
        curves = [[relative_difference(record.value, lowest) for record in m.history] for m in ran]
        for method, curve in zip(ran, curves, strict=True):
            _curve(left, method, [(getattr(r, what), y) for r, y in zip(method.history, curve, strict=True) if y > 0])
        left.set_ylim(*value_range(curves))
    left.set_yscale("log")
    left.set_ylabel("(L − L*) / L*")
    for axes in rest:
        for method in ran:
            _curve(axes, method, [(getattr(r, what), r.metric) for r in method.history if r.metric is not None])
        axes.set_ylabel(str(metric))
    for axes in (left, *rest):
        axes.set_xlabel(label)
        if any(x > 0 for drawn in axes.lines for x in np.asarray(drawn.get_xdata())):  # there is more than the starts
            axes.set_xscale("log")
        axes.grid(True, which="major", alpha=0.35)
        axes.grid(True, which="minor", alpha=0.12)
    marks = "SYNTHETIC DATA: " if comparison.about.synthetic else ""
    figure.suptitle(marks + comparison.title)
    handles, labels = left.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside right upper", fontsize=9)
    return figure


def _curve(axes: Axes, method: MethodRun, points: list[tuple[float, float]]) -> None:
    look, status = line_of(method.name), method.outcome.status
    style: Any = (0, look.dashes) if look.dashes else "-"
    label = method.name if status == "finished" else f"{method.name} ({status})"
    line(axes, points, label, color=look.colour, linestyle=style, linewidth=look.width * 0.8, markersize=2.5)


def build(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Rebuild summary.json, the figures and report.html of a folder from its histories.

    Returns:
        The content of summary.json, and a list of what could not be made and why.
    """
    comparison = read_comparison(folder)
    numbers = summarise(comparison)
    problems = []
    write_text(folder / PAGE, page(comparison, numbers))
    try:
        draw_comparison(comparison)
    except ImportError as error:
        problems.append(f"no PNG and SVG figures: {error}")
    about = comparison.about
    kept = {name: getattr(about, name) for name in ("synthetic", "data", "settings", "commands", "environment")}
    content = plain({"title": comparison.title, **numbers, **(kept if comparison.request else {})})
    write_json(folder / SUMMARY, content)
    return content, problems
