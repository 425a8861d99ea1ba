"""The builder of the pages of all runs, and their figures, which matplotlib draws if it is installed.

The same numbers give the same SVG, byte for byte.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from html import escape
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gramtower._util import html
from gramtower._util.checks import need
from gramtower.training.result import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAGE, SUMMARY = "report.html", "summary.json"
BUSY = 0.1  # cores of other processes that are worth a warning next to measured times
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")  # Okabe-Ito: colour-blind readers can tell them apart
Tried = tuple[Mapping[str, Any], float, float]  # settings, metric and standard error of a point of a path
_GREY = "#999999"
_MOST_CURVES, _MOST_BARS = 60, 12
_LONGEST = 30  # letters of a model's name

table = partial(html.table, longest=None)


@contextmanager
def drawing() -> Iterator[None]:
    """Set matplotlib up for figures that are the same each time: fixed ids, text as text."""
    mpl = need("matplotlib", "drawing")
    with mpl.rc_context({"svg.hashsalt": "gramtower", "svg.fonttype": "none", "font.size": 10}):
        yield


def panels(width: float, height: float, count: int) -> tuple[Figure, list[Axes]]:
    """Return a figure of a size in inches that belongs to no window, and its axes, side by side."""
    figure: Figure = need("matplotlib.figure", "drawing").Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def line(axes: Axes, points: Sequence[tuple[float, float]], name: str, **style: Any) -> None:
    """Draw a line, with markers if there are few points."""
    marker = "o" if len(points) < 40 else None
    axes.plot([x for x, _ in points], [y for _, y in points], marker=marker, label=name, **style)


def save(figure: Figure, file: Path | io.BytesIO, kind: str) -> None:
    """Write a figure as "png" or "svg", without a date."""
    metadata: dict[str, Any] = {"Date": None} if kind == "svg" else {"Software": None}
    figure.savefig(file, format=kind, dpi=150, metadata=metadata)


@drawing()
def as_svg(figure: Figure) -> bytes:
    """Return a figure as the bytes of an SVG file."""
    file = io.BytesIO()
    save(figure, file, "svg")
    return file.getvalue()


class Page:
    """The page of a run, built part by part. It needs no other file.

    Attributes:
        problems: what could not be made, and why.
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self.problems: list[str] = []
        self._parts: list[str] = []

    def add(self, *parts: str) -> None:
        """Add parts that are HTML already, such as tables."""
        self._parts += parts

    def heading(self, text: str) -> None:
        """Add a heading."""
        self.add(f"<h2>{escape(text)}</h2>")

    def text(self, text: str, kind: str = "", strong: bool = False) -> None:
        """Add a paragraph; ``kind`` is a class of page.css: "warn", "soft" or "mark"."""
        shown = f"<strong>{escape(text)}</strong>" if strong else escape(text)
        self.add(f'<p class="{kind}">{shown}</p>' if kind else f"<p>{shown}</p>")

    def figure(self, make: Callable[[], Figure], caption: str) -> None:
        """Add a figure; without matplotlib a line that says how to get it, once for all figures of a page."""
        try:
            source = base64.b64encode(as_svg(make())).decode("ascii")
        except ImportError as error:
            if (problem := f"no figures: {error}") not in self.problems:
                self.problems.append(problem)
                self.text(str(error))
            return
        words = escape(caption)
        image = f'<img alt="{words}" src="data:image/svg+xml;base64,{source}">'
        self.add(f"<figure><figcaption>{words}</figcaption>{image}</figure>")

    def circumstances(
        self,
        commands: Sequence[str],
        settings: Mapping[str, Mapping[str, object]],
        machines: Mapping[str, Mapping[str, object]],
    ) -> None:
        """Add the end of a page: command lines, settings in groups, and the machines that runs ran on."""
        if commands:
            self.heading("Command")
            self.add(*(f"<pre>{escape(command)}</pre>" for command in commands))
        groups = {name: {k: v for k, v in part.items() if v is not None} for name, part in settings.items()}
        if any(groups.values()):
            self.heading("Settings")
        for name, part in groups.items():
            self._listing(name, part)
        places: dict[str, list[str]] = {}
        for name, environment in machines.items():
            places.setdefault(json.dumps({k: v for k, v in environment.items() if k != "date"}), []).append(name)
        if places:
            self.heading("Machine")
        if len(places) > 1:
            self.text("Runs were on different machines or versions; their times do not compare.", "warn")
        for names in places.values():
            self._listing(", ".join(names), machines[names[0]])

    def _listing(self, name: str, values: Mapping[str, object]) -> None:
        """Add names and values of any length as preformatted lines below a name."""
        if values:
            lines = [f"{key}: {one if isinstance(one, str) else json.dumps(one)}" for key, one in values.items()]
            self.add((f"<p>{escape(name)}</p>" if name else "") + f"<pre>{escape(chr(10).join(lines))}</pre>")

    def html(self, data: Mapping[str, object] | None = None, script: str = "") -> str:
        """Return the page, with the data that a script draws."""
        return html.document(self.title, self._parts, data, script)


@drawing()
def run_figure(runs: Mapping[str, Sequence[Record]], metric: str | None, tried: Sequence[Tried] = ()) -> Figure:
    """Draw the objective and the validation metric, if one was recorded, by iteration; then the path of penalties."""
    measured = any(record.metric is not None for records in runs.values() for record in records)
    count = 1 + measured + bool(tried)
    figure, axes = panels(5.5 if count == 1 else 5.0 * count, 3.8, count)
    if tried:
        _path(axes[-1], tried, metric or "metric")
    for colour, (name, records) in zip(COLOURS, runs.items(), strict=False):
        line(axes[0], [(r.iteration, r.value) for r in records], name, color=colour, markersize=3)
        if measured:
            points = [(r.iteration, r.metric) for r in records if r.metric is not None]
            line(axes[1], points, name, color=colour, markersize=3)
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
        same_line = ("embedding_l2", "l2", "max_iterations")
        shape = ", ".join(f"{k}={v}" for k, v in settings.items() if k not in same_line)
        shapes.setdefault(shape, []).append((settings[penalty], value, error))
    for colour, (shape, points) in zip(cycle(COLOURS), shapes.items(), strict=False):
        x, y, errors = zip(*sorted(points), strict=True)
        axis.errorbar(x, y, yerr=errors, color=colour, marker="o", markersize=4, capsize=2, label=shape or "default")
    axis.set_xscale("log")
    _label(axis, penalty, f"held-out {metric}")
    if len(shapes) > 1:
        axis.legend(fontsize=8)


@drawing()
def degree_figure(degrees: Mapping[str, NDArray[np.int64]]) -> Figure:
    """Draw, for each side, how many entities have how many pairs, in bins of doubling width."""
    figure, axes = panels(10.0, 3.4, len(degrees))
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


@drawing()
def search_figure(
    metric: str,
    values: Sequence[float],
    given_up: Sequence[bool],
    curves: Sequence[Sequence[float]],
    importance: Mapping[str, float],
    winner: int,
) -> Figure:
    """Draw the trials of a search: metrics and the best so far, curves, and the importance of choices."""
    figure, (trials, ways, *rest) = panels(13.0 if importance else 9.5, 3.8, 3 if importance else 2)
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


@drawing()
def interval_figure(metric: str, models: Sequence[tuple[str, float, tuple[float, float] | None]]) -> Figure:
    """Draw the mean of each model as a dot with its 95% interval, over a common axis from zero."""
    figure, (axis,) = panels(6.6, 0.9 + 0.3 * len(models), 1)
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


@drawing()
def reliability_figure(
    probability: NDArray[np.float64], positives: NDArray[np.float64], pairs: NDArray[np.float64]
) -> Figure:
    """Draw the share of positive pairs by probability, with its 95% interval (Wilson), next to the diagonal."""
    figure, (axis,) = panels(5.0, 4.4, 1)
    share, z = positives / pairs, 1.96
    middle = (positives + z * z / 2) / (pairs + z * z)
    reach = z * np.sqrt(positives * (1 - share) + z * z / 4) / (pairs + z * z)
    ends = np.array([share - np.maximum(middle - reach, 0), middle + reach - share])
    axis.errorbar(probability, share, yerr=np.maximum(ends, 0), color=COLOURS[0], marker="o", markersize=4, capsize=2)
    line = [float(probability[probability > 0].min(initial=1)) / 2, min(1.0, 2 * float(probability.max(initial=0.5)))]
    axis.plot(line, line, color=_GREY, linewidth=1)
    axis.set_xscale("log")
    axis.set_yscale("log")
    _label(axis, "probability", "share of held-out pairs")
    return figure


def _label(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(True, alpha=0.3)
