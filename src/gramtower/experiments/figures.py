"""Figures by matplotlib, which is optional: curves of a run, numbers of pairs per entity, trials of a search.

They know records and plain numbers, nothing of models; `TwoTower.plot`, `Search.plot` and the pages of runs hand them
theirs. The same numbers give the same SVG, byte for byte.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gramtower._util.optional import need
from gramtower.training.result import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")  # Okabe-Ito: colour-blind readers can tell them apart
_GREY = "#999999"
_MOST_CURVES, _MOST_BARS = 60, 12


@contextmanager
def drawing() -> Iterator[None]:
    """Settings of matplotlib that figures are made and saved with: fixed ids, text as text.

    Raises:
        ImportError: without matplotlib, with the line that installs it.
    """
    mpl = need("matplotlib", "drawing")
    with mpl.rc_context({"svg.hashsalt": "gramtower", "svg.fonttype": "none", "font.size": 10}):
        yield


def new_figure(width: float, height: float) -> Figure:
    """An empty figure that belongs to no window, in inches."""
    made: Figure = need("matplotlib.figure", "drawing").Figure(figsize=(width, height), layout="constrained")
    return made


def save(figure: Figure, file: Path | io.BytesIO, kind: str) -> None:
    """Write a figure as "png" or "svg", without a date."""
    metadata: dict[str, Any] = {"Date": None} if kind == "svg" else {"Software": None}
    figure.savefig(file, format=kind, dpi=150, metadata=metadata)


def as_svg(figure: Figure) -> bytes:
    """A figure as the bytes of an SVG file."""
    with drawing():
        file = io.BytesIO()
        save(figure, file, "svg")
    return file.getvalue()


def run_figure(
    runs: Mapping[str, Sequence[Record]],
    metric: str | None,
    tried: Sequence[tuple[Mapping[str, Any], float, float]] = (),
) -> Figure:
    """Objective and, where one was recorded, the validation metric by iteration; then the path of penalties.

    Args:
        runs: records by what to call them; several are drawn together.
        metric: name of the validation metric.
        tried: settings, metric and standard error of the points of a path, if there is one.
    """
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


def _path(axis: Axes, tried: Sequence[tuple[Mapping[str, Any], float, float]], metric: str) -> None:
    """The metric of held-out data by penalty, a line for each shape of towers."""
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
    """For each side how many entities have how many pairs, in bins of doubling width."""
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
    """Bins 0, 1, 2–3, 4–7, … up to the largest count, and how many counts are in each."""
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
    """Trials of a search: the metric of each and the best so far, their curves, and what each choice explains.

    Args:
        metric: what was maximised.
        values: of the trials, in order.
        given_up: which trials were ended on the way.
        curves: the metric of each trial by iteration.
        importance: by choice, the largest first; may be empty.
        winner: place of the trial that won.
    """
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


def _line(axes: Axes, points: Sequence[tuple[float, float]], colour: str, name: str) -> None:
    marker = "o" if len(points) < 40 else None
    axes.plot([x for x, _ in points], [y for _, y in points], color=colour, marker=marker, markersize=3, label=name)


def _label(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(True, alpha=0.3)
