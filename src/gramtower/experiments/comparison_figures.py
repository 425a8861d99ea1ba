"""Figures in the form of the paper's (fig:time-f, fig:time-map): relative difference and the metric, as PNG and SVG.

    time.png, .svg     against seconds of training
    passes.png, .svg   against data passes

The record that is L* itself has a relative difference of 0 and no place on a logarithmic axis; it is left out.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gramtower._util.files import replacing
from gramtower.experiments.comparison_levels import lowest_value, relative_difference
from gramtower.experiments.comparison_store import Comparison, MethodRun
from gramtower.experiments.comparison_style import line_of
from gramtower.experiments.figures import drawing, new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

AXES = {"time": ("seconds", "seconds of training"), "passes": ("data_passes", "data passes")}
FORMATS = ("png", "svg")
#: Smallest relative difference that is shown.
FLOOR = 1e-4


def draw(comparison: Comparison) -> list[Path]:
    """Write the figures; returns their paths.

    Raises:
        ImportError: without matplotlib.
    """
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
    """Limits of the axis of relative differences: down to FLOOR at most, up to twice the start."""
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
            _curve(left, method, points)
        left.set_ylim(*value_range(curves))
    left.set_yscale("log")
    left.set_ylabel("(L − L*) / L*")
    for axes in rest:
        for method in ran:
            _curve(axes, method, [(getattr(r, what), r.metric) for r in method.history if r.metric is not None])
        axes.set_ylabel(str(comparison.metric))
    for axes in (left, *rest):
        axes.set_xlabel(label)
        if any(x > 0 for line in axes.lines for x in line.get_xdata()):  # starts alone are no axis
            axes.set_xscale("log")
        axes.grid(True, which="major", alpha=0.35)
        axes.grid(True, which="minor", alpha=0.12)
    marks = "SYNTHETIC DATA: " if comparison.about.get("synthetic") else ""
    figure.suptitle(marks + comparison.title)
    handles, labels = left.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside right upper", fontsize=9)


def _curve(axes: Axes, method: MethodRun, points: list[tuple[float, float]]) -> None:
    line = line_of(method.name)
    style: Any = (0, line.dashes) if line.dashes else "-"
    status = method.outcome["status"]
    label = method.name if status == "finished" else f"{method.name} ({status})"
    marker = "o" if len(points) < 40 else None
    axes.plot(
        [x for x, _ in points], [y for _, y in points], color=line.colour, linestyle=style, linewidth=line.width * 0.8,
        marker=marker, markersize=2.5, label=label,
    )  # fmt: skip
