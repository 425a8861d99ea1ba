"""All figures, drawn with matplotlib, which is optional.

Curves of a run, numbers of pairs per entity, trials of a search, intervals of a benchmark, curves of a comparison. The
same numbers give the same SVG, byte for byte.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gramtower._util.checks import need
from gramtower._util.files import replacing
from gramtower.experiments.comparison import Comparison, MethodRun, lowest_value, relative_difference
from gramtower.training.result import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")  # Okabe-Ito: colour-blind readers can tell them apart
Tried = tuple[Mapping[str, Any], float, float]  # settings, metric and standard error of a point of a path
_GREY = "#999999"
_MOST_CURVES, _MOST_BARS = 60, 12
_LONGEST = 30  # letters of a model's name


@contextmanager
def drawing() -> Iterator[None]:
    """Set matplotlib up for figures that are the same each time: fixed ids, text as text."""
    mpl = need("matplotlib", "drawing")
    with mpl.rc_context({"svg.hashsalt": "gramtower", "svg.fonttype": "none", "font.size": 10}):
        yield


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of a size in inches that belongs to no window."""
    made: Figure = need("matplotlib.figure", "drawing").Figure(figsize=(width, height), layout="constrained")
    return made


def save(figure: Figure, file: Path | io.BytesIO, kind: str) -> None:
    """Write a figure as "png" or "svg", without a date."""
    metadata: dict[str, Any] = {"Date": None} if kind == "svg" else {"Software": None}
    figure.savefig(file, format=kind, dpi=150, metadata=metadata)


def as_svg(figure: Figure) -> bytes:
    """Return a figure as the bytes of an SVG file."""
    with drawing():
        file = io.BytesIO()
        save(figure, file, "svg")
    return file.getvalue()


def run_figure(
    runs: Mapping[str, Sequence[Record]],
    metric: str | None,
    tried: Sequence[Tried] = (),
) -> Figure:
    """Draw the objective and the validation metric, if one was recorded, by iteration; then the path of penalties."""
    measured = any(record.metric is not None for records in runs.values() for record in records)
    panels = 1 + measured + bool(tried)
    with drawing():
        figure = new_figure(5.5 if panels == 1 else 5.0 * panels, 3.8)
        axes: list[Axes] = list(figure.subplots(1, panels, squeeze=False)[0])
        if tried:
            _path(axes[-1], tried, metric or "metric")
        for colour, (name, records) in zip(COLOURS, runs.items(), strict=False):
            _line(axes[0], [(r.iteration, r.value) for r in records], colour, name)
            if measured:
                _line(axes[1], [(r.iteration, r.metric) for r in records if r.metric is not None], colour, name)
        _label(axes[0], "iteration", "objective L")
        if measured:
            _label(axes[1], "iteration", f"validation {metric or 'metric'}")
        if len(runs) > 1:
            axes[0].legend(fontsize=9)
    return figure


def _path(axis: Axes, tried: Sequence[Tried], metric: str) -> None:
    """Draw the metric of held-out data by penalty, with a line for each shape of towers."""
    penalty = next(name for name in ("embedding_l2", "l2") if name in tried[0][0])
    shapes: dict[str, list[tuple[float, float, float]]] = {}
    for settings, value, error in tried:
        shape = ", ".join(f"{k}={v}" for k, v in settings.items() if k not in ("embedding_l2", "l2"))
        shapes.setdefault(shape, []).append((settings[penalty], value, error))
    for colour, (shape, points) in zip(COLOURS, shapes.items(), strict=False):
        x, y, errors = zip(*sorted(points), strict=True)
        axis.errorbar(x, y, yerr=errors, color=colour, marker="o", markersize=4, capsize=2, label=shape or "default")
    axis.set_xscale("log")
    _label(axis, penalty, f"held-out {metric}")
    if len(shapes) > 1:
        axis.legend(fontsize=8)


def degree_figure(degrees: Mapping[str, NDArray[np.int64]]) -> Figure:
    """Draw, for each side, how many entities have how many pairs, in bins of doubling width."""
    with drawing():
        figure = new_figure(10.0, 3.4)
        axes: list[Axes] = list(figure.subplots(1, len(degrees), squeeze=False)[0])
        for axis, colour, (side, counts) in zip(axes, COLOURS, degrees.items(), strict=False):
            labels, entities = binned(counts)
            axis.bar(range(len(labels)), entities, color=colour, width=0.9)
            axis.set_xticks(range(len(labels)), labels, rotation=45, ha="right", fontsize=8)
            _label(axis, f"pairs of a {side} entity", "entities")
            axis.grid(visible=False, axis="x")
    return figure


def binned(counts: NDArray[np.int64]) -> tuple[list[str], list[int]]:
    """Return the bins 0, 1, 2–3, 4–7, … up to the largest count, and the number of counts in each."""
    last = int(counts.max(initial=0)).bit_length()
    found = np.bincount(np.array([int(count).bit_length() for count in counts], dtype=np.int64), minlength=last + 1)
    labels = ["0", "1", *(f"{1 << power}–{(2 << power) - 1}" for power in range(1, last))][: last + 1]
    return labels, found.tolist()


def search_figure(
    metric: str,
    values: Sequence[float],
    given_up: Sequence[bool],
    curves: Sequence[Sequence[float]],
    importance: Mapping[str, float],
    winner: int,
) -> Figure:
    """Draw the trials of a search: metrics and the best so far, curves, and the importance of choices."""
    with drawing():
        figure = new_figure(13.0 if importance else 9.5, 3.8)
        trials, ways, *rest = figure.subplots(1, 3 if importance else 2, squeeze=False)[0]
        numbers, reached = np.arange(len(values)), np.asarray(values, dtype=float)
        dropped = np.asarray(given_up, dtype=bool)
        trials.plot(numbers[~dropped], reached[~dropped], "o", color=COLOURS[0], markersize=4, label="trial")
        if dropped.any():
            trials.plot(numbers[dropped], reached[dropped], "x", color=_GREY, markersize=4, label="given up")
        kept = np.where(dropped & ~dropped.all(), -np.inf, reached)
        best = np.maximum.accumulate(kept)
        trials.plot(numbers[np.isfinite(best)], best[np.isfinite(best)], color=COLOURS[1], label="best so far")
        trials.legend(fontsize=9)
        _label(trials, "trial", metric)
        for place in [*range(max(0, len(curves) - _MOST_CURVES), len(curves)), winner]:
            strong = place == winner
            colour = COLOURS[1] if strong else _GREY
            ways.plot(curves[place], color=colour, linewidth=2 if strong else 0.7, alpha=1 if strong else 0.6)
        _label(ways, "iteration of a trial", metric)
        for axis in rest:
            shares = list(importance.items())[:_MOST_BARS][::-1]
            axis.barh([name for name, _ in shares], [share for _, share in shares], color=COLOURS[2])
            _label(axis, "importance", "")
            axis.grid(visible=False, axis="y")
    return figure


def interval_figure(metric: str, models: Sequence[tuple[str, float, tuple[float, float] | None]]) -> Figure:
    """Draw the mean of each model as a dot with its 95% interval, over a common axis from zero."""
    with drawing():
        figure = new_figure(6.6, 0.9 + 0.3 * len(models))
        axis: Axes = figure.subplots()
        for place, (_, mean, interval) in enumerate(models):
            if interval is not None:
                axis.plot(interval, (place, place), color=COLOURS[0], linewidth=3)
            axis.plot(mean, place, "o", color="black", markersize=5)
        names = [name if len(name) <= _LONGEST else name[: _LONGEST - 1] + "…" for name, _, _ in models]
        axis.set_yticks(range(len(models)), [name.replace("$", r"\$") for name in names])
        axis.set_ylim(len(models) - 0.5, -0.5)
        axis.set_xlim(left=min(0.0, axis.get_xlim()[0]) if any(mean < 0 for _, mean, _ in models) else 0.0)
        _label(axis, metric, "")
        axis.grid(visible=False, axis="y")
    return figure


def _line(axes: Axes, points: Sequence[tuple[float, float]], colour: str, name: str) -> None:
    marker = "o" if len(points) < 40 else None
    axes.plot([x for x, _ in points], [y for _, y in points], color=colour, marker=marker, markersize=3, label=name)


def _label(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(True, alpha=0.3)


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


def draw_comparison(comparison: Comparison) -> list[Path]:
    """Write the figures of a comparison; return their paths."""
    paths: list[Path] = []
    with drawing():
        for name in AXES:
            figure = new_figure(10.5 if comparison.metric else 6.0, 4.6)
            _fill(figure, comparison, name)
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


def _fill(figure: Figure, comparison: Comparison, axis: str) -> None:
    what, label = AXES[axis]
    ran = [method for method in comparison.methods if method.history]
    left, *rest = figure.subplots(1, 2 if comparison.metric else 1, squeeze=False)[0]
    lowest = lowest_value(ran)
    if lowest is not None:
        curves = [[relative_difference(record.value, lowest) for record in m.history] for m in ran]
        for method, curve in zip(ran, curves, strict=True):
            points = [(getattr(r, what), y) for r, y in zip(method.history, curve, strict=True) if y > 0]
            _method_curve(left, method, points)
        left.set_ylim(*value_range(curves))
    left.set_yscale("log")
    left.set_ylabel("(L − L*) / L*")
    for axes in rest:
        for method in ran:
            _method_curve(axes, method, [(getattr(r, what), r.metric) for r in method.history if r.metric is not None])
        axes.set_ylabel(str(comparison.metric))
    for axes in (left, *rest):
        axes.set_xlabel(label)
        if any(x > 0 for line in axes.lines for x in line.get_xdata()):  # there is more than the starts
            axes.set_xscale("log")
        axes.grid(True, which="major", alpha=0.35)
        axes.grid(True, which="minor", alpha=0.12)
    marks = "SYNTHETIC DATA: " if comparison.about.synthetic else ""
    figure.suptitle(marks + comparison.title)
    handles, labels = left.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside right upper", fontsize=9)


def _method_curve(axes: Axes, method: MethodRun, points: list[tuple[float, float]]) -> None:
    line = line_of(method.name)
    style: Any = (0, line.dashes) if line.dashes else "-"
    status = method.outcome.status
    label = method.name if status == "finished" else f"{method.name} ({status})"
    marker = "o" if len(points) < 40 else None
    axes.plot(
        [x for x, _ in points], [y for _, y in points], color=line.colour, linestyle=style, linewidth=line.width * 0.8,
        marker=marker, markersize=2.5, label=label,
    )  # fmt: skip
