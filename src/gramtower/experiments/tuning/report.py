"""The result of a search: its trials, the importance of each choice, and the settings found.

:class:`Search` writes itself as JSON, Markdown and TOML; ``tuning_page`` builds a page from report.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gramtower._util import html
from gramtower._util.checks import config_hidden
from gramtower._util.files import as_path, build, config_text, plain, tuples, write_text
from gramtower.experiments.figures import Page, search_figure, table
from gramtower.experiments.tuning.space import Value
from gramtower.experiments.tuning.study import pick
from gramtower.experiments.tuning.trial import Tried
from gramtower.model.settings import SETTINGS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CONFIG, REPORT, TABLE = "config.toml", "report.json", "report.md"
#: Arguments of a search, which a fit of all pairs does not use.
SKIPPED = ("time_limit", "patience", "metric", "optimizer_options", "select")
OF_HISTORY = ("history", "history_last", "history_decay")  # keys of [model] that say what the left tower sees
_LISTED = 5  # trials in a notebook
WEIGHTS = ("left_weights", "right_weights")

Table = tuple[list[str], list[list[str]]]  # heads and rows


@dataclass
class Search:
    """The result of a search for settings.

    Attributes:
        metric: the metric that was maximised.
        trials: all trials, in order.
        winner: number of the trial that won: the best that is better than the defaults beyond noise, or the defaults.
        importance: share of the metric's variation that each choice explains (PED-ANOVA), largest first.
        arguments: the settings found, as arguments of :class:`gramtower.TwoTower`: those that differ from the defaults,
            which depend on the size of the data.
        features: the input of the towers: "ids", "history", "ids+history" or "given".
        space: what was searched.
        data: sizes, and the names of the entities.
        seconds: wall time of this call.
        base: the model's own arguments.
        interrupted: whether Ctrl-C ended it.
        verdict: a sentence: whether a trial replaces the defaults, and by how much it is better.
        confirmations: the defaults and the trials that were trained once more, with other pairs or entities held out,
            before one of them won; none if the user gave the validation pairs.
    """

    metric: str
    trials: list[Tried]
    winner: int
    importance: dict[str, float]
    arguments: dict[str, Any]
    features: str
    space: dict[str, str]
    data: dict[str, Any]
    seconds: float
    base: dict[str, Any] = field(default_factory=dict)
    interrupted: bool = False
    verdict: str = ""
    confirmations: list[Tried] = field(default_factory=list)

    @property
    def best(self) -> Tried:
        """The trial that won."""
        return next(t for t in self.trials if t.number == self.winner)

    @property
    def density(self) -> float:
        """The share of all pairs that are there to learn from."""
        left, right, pairs = (int(self.data.get(name, 0)) for name in ("left", "right", "pairs"))
        return pairs / max(1, left * right)

    @property
    def caution(self) -> str:
        """A sentence on how far the numbers of the validation part can be trusted."""
        if self.winner == self.trials[0].number:
            return "All numbers are measured on the validation part, not on a test part."
        return (
            "All numbers are measured on the validation part that chose these settings, so the gain is likely to be "
            "smaller on other pairs. Measure both settings on a test part that the search has not seen."
        )

    def metrics_table(self) -> Table:
        """Return heads and rows: several metrics of the model's own settings, of the winner, and their difference.

        There are no rows if the log, of an earlier version, has only the metric that was maximised.
        """
        own, best = self.trials[0], self.best
        names = [name for name in best.metrics if name in own.metrics]
        if not names:
            return [], []
        rows = [[f"the model's own settings (trial {own.number})", *(f"{own.metrics[name]:.4f}" for name in names)]]
        if best is not own:
            rows.append([f"found (trial {best.number})", *(f"{best.metrics[name]:.4f}" for name in names)])
            rows.append(["difference", *(_difference(best.metrics[name], own.metrics[name]) for name in names)])
        return ["on the validation part", *names], rows

    def _choices(self) -> Table:
        best, start = self.best.settings, self.trials[0].settings
        rows = [
            [name, self.space.get(name, "–"), shown(start.get(name)), shown(best[name]),
             html.number(self.importance.get(name))]
            for name in sorted(best, key=lambda name: -self.importance.get(name, 0.0))
        ]  # fmt: skip
        return ["choice", "searched", "at the start", "found", "importance"], rows

    def _ordered(self) -> list[Tried]:
        return sorted(self.trials, key=lambda t: (t.pruned, -t.value))

    def _trials(self) -> Table:
        names = list(self.best.settings)
        rows = [
            [str(t.number), f"{t.value:.4f}", *(shown(t.settings.get(name)) for name in names),
             str(len(t.curve) - 1), f"{t.seconds:.1f}", t.note]
            for t in self._ordered()
        ]  # fmt: skip
        return ["trial", self.metric, *names, "iterations", "seconds", "note"], rows

    def _confirmations(self) -> Table:
        rows = [
            [str(t.number), f"{t.value:.4f}", "on other held-out data" if t.confirmed is None else "cold start",
             str(len(t.curve) - 1), f"{t.seconds:.1f}"]
            for t in self.confirmations
        ]  # fmt: skip
        return ["trained again", self.metric, "how", "iterations", "seconds"], rows

    def __repr__(self) -> str:
        return f"Search({len(self.trials)} trials, {self.metric} {self.best.value:.4f} by trial {self.best.number})"

    def plot(self) -> Figure:
        """Draw the trials: the metric of each, their curves, and the share that each choice explains.

        Raises:
            ImportError: without matplotlib, with the line that installs it.
        """
        return search_figure(
            self.metric, [t.value for t in self.trials], [t.pruned for t in self.trials],
            [t.curve for t in self.trials], self.importance, self.trials.index(self.best),
        )  # fmt: skip

    def tables(self) -> dict[str, dict[str, Any]]:
        """Return the settings as tables of a config file, which holds no arrays and no functions."""
        kinds = (str, int, float, tuple, list, dict)
        settings = self.base | self.arguments
        for name in WEIGHTS:  # weights that are left out of the file would be the default, not none
            if name in settings and not isinstance(settings[name], str):
                settings[name] = "degree^0"
        known = {k: v for k, v in settings.items() if k in SETTINGS and isinstance(v, kinds)}
        if settings.get("hidden") is not None:
            known["hidden"] = config_hidden(settings["hidden"])
        tables: dict[str, dict[str, Any]] = {
            name: {k: known[k] for k, one in SETTINGS.items() if one.table == name and k in known and k not in SKIPPED}
            for name in ("model", "train")
        }
        tables["train"]["option"] = known.get("optimizer_options")
        if "history" in self.features:
            tables["model"]["history"] = True
            tables["features"] = {"left_identity": "ids" in self.features}
        return tables

    def config(self, given: dict[str, dict[str, Any]] | None = None) -> str:
        """Return the settings as TOML for ``gramtower fit --config``.

        Args:
            given: tables [data] and [features] of the command line; the latter go in if features were found useful.
        """
        comment = (
            f"found by tuning: {self.metric} {self.best.value:.4f} on the validation part, trial {self.best.number}"
        )
        comment += f"; {self.verdict}" if self.verdict else ""
        settings = self.base | self.arguments
        arrays = [name for name in WEIGHTS if not isinstance(settings.get(name), (str, type(None)))]
        if arrays:
            comment += f"; {' and '.join(arrays)} were arrays, which this file cannot hold"
        own = [name for name in ("optimizer", "loss") if not isinstance(settings.get(name, ""), str)]
        if own:
            comment += f"; {' and '.join(own)} of your own, which this file cannot hold"
        tables = dict(given or {})
        features = tables.pop("features", {})
        found = self.tables()
        if self.features == "given":
            found["model"] |= {name: features.pop(name, None) for name in OF_HISTORY}
            tables["features"] = features
        return config_text({k: v for k, v in (tables | found).items() if v}, comment)

    def to_json(self) -> dict[str, object]:
        """Return everything as plain values."""
        content = asdict(self)
        content["base"] = {
            k: v if isinstance(v, (int, float, str, tuple, dict, type(None))) else str(v) for k, v in self.base.items()
        }
        return content

    def _sentences(self) -> list[str]:
        """Return the data, the result, and how far the numbers can be trusted, as sentences."""
        best, data = self.best, self.data
        left, right, pairs = (data.get(name, 0) for name in ("left", "right", "pairs"))
        sizes = f"{left:,} × {right:,} entities, {pairs:,} pairs to learn from: {self.density:.3%} of all. "
        sizes += f"{data.get('ranked_users', 0):,} users were ranked in each trial"
        for side, name in zip(("left", "right"), data.get("names", ("left", "right")), strict=True):
            if count := data.get(f"held_out_{side}"):
                sizes += f"; {count:,} {name} entities were held out with all their pairs"
        result = (
            f"{self.metric} on the validation part: {best.value:.4f} by trial {best.number}, iteration "
            f"{best.iteration}; {self.trials[0].value:.4f} with the model's own settings (trial 0). "
            f"{len(self.trials):,} trials in {self.seconds:.0f} s."
        )
        result += f" {self.verdict[0].upper()}{self.verdict[1:]}." if self.verdict else ""
        return [result, f"{sizes}.", self.caution]

    def markdown(self) -> str:
        """Return the report as Markdown."""
        lines = ["# Tuning", *(line for text in self._sentences() for line in ("", text))]
        for heads, rows in (self.metrics_table(), self._choices(), self._trials(), self._confirmations()):
            if rows:
                cells = [heads, ["---"] * len(heads), *rows]
                lines += ["", *(f"| {' | '.join(c.replace('|', 'or') for c in line)} |" for line in cells)]
        return "\n".join(lines) + "\n"

    def _repr_html_(self) -> str:
        """A card for notebooks: the best settings and the best trials."""
        title = f"Search: {self.metric} {self.best.value:.4f}, {self.trials[0].value:.4f} at the first settings"
        heads, rows = self._trials()
        ended = f"{len(self.trials)} trials in {self.seconds:.0f} s" + (", interrupted" if self.interrupted else "")
        return html.card(
            title,
            html.table(*self.metrics_table()),
            html.table(*self._choices()),
            html.table(heads, rows[:_LISTED]),
            html.note(f"{ended}; {self.verdict}. {self.caution}" if self.verdict else f"{ended}. {self.caution}"),
        )

    def write(self, folder: str | Path, given: dict[str, dict[str, Any]] | None = None) -> None:
        """Write report.json, report.md and config.toml into a folder, each in one step."""
        folder = as_path(folder)
        texts = {
            REPORT: json.dumps(self.to_json(), indent=1, ensure_ascii=False) + "\n",
            TABLE: self.markdown(),
            CONFIG: self.config(given),
        }
        for name, text in texts.items():
            write_text(folder / name, text)


def read_search(folder: Path) -> Search:
    """Return the search in the report.json of a folder."""
    path = folder / REPORT
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        search = build("search", Search, content)
        for settings in (search.base, search.arguments):
            if settings.get("hidden") is not None:
                settings["hidden"] = tuples(settings["hidden"])
        if search.winner not in [trial.number for trial in search.trials]:
            raise ValueError(f"no trial {search.winner}, which won")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"folder: {path} is damaged or not of a search ({error})") from error
    return search


def _difference(found: float, own: float) -> str:
    """Return the difference from the metric of the model's own settings, as a share if that is above zero."""
    return f"{100 * (found / own - 1):+.1f} %" if own > 0 else f"{found - own:+.4f}"


def shown(value: Value | None) -> str:
    """Format a setting."""
    return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def trial_lines(say: Callable[[str], None]) -> Callable[[Search], None]:
    """Return a function that takes the state of a search and passes on a line for each trial that ended meanwhile."""
    count = 0

    def report(found: Search) -> None:
        nonlocal count
        if len(found.trials) > count:  # not again for the last one when the search ends
            last, best = found.trials[-1], pick(found.trials)
            end = last.note or f"{len(last.curve) - 1} iterations"
            say(
                f"trial {last.number:3d}  {found.metric} {last.value:.4f}  {end}, {last.seconds:.1f} s"
                f"   best {best.value:.4f} (trial {best.number})"
            )
        count = len(found.trials)
        for again in found.confirmations:  # when the search ends
            value = f"{found.metric} {again.value:.4f}"
            say(f"trial {again.number:3d}  {value}  again, on other held-out data, {again.seconds:.1f} s")

    return report


def tuning_page(search: Search, title: str) -> tuple[str, dict[str, Any], list[str]]:
    """Build the page of a search.

    Returns:
        HTML, the numbers in it, and a list of what could not be made and why.
    """
    best, own, metric = search.best, search.trials[0], search.metric
    page = Page(f"Tuning: {title}")
    result, sizes, caution = search._sentences()
    page.text(result, strong=True)
    page.text(sizes)
    heads, measured = search.metrics_table()
    if measured:
        page.add(table(heads, measured))
    page.text(caution)
    if search.interrupted:
        page.text("The search was interrupted; the same command continues it.", "warn")
    page.heading("Trials")
    page.figure(search.plot, f"{metric} of each trial, their curves, and importance of choices")
    page.heading("Settings found")
    page.add(table(*search._choices()))
    page.heading("All trials")
    heads, rows = search._trials()
    page.add(table(heads, rows, [[t.number == search.winner] * (len(heads) - 1) for t in search._ordered()]))
    if search.confirmations:
        page.heading("Trained again")
        page.add(table(*search._confirmations()))
    page.circumstances((), {f"[{name}]": plain(part) for name, part in search.tables().items()}, {})
    content = {
        "kind": "tuning", "title": title, "metric": metric, "value": best.value, "trial": best.number,
        "trials": len(search.trials), "confirmations": len(search.confirmations), "at_defaults": own.value,
        "seconds": search.seconds, "importance": search.importance, "arguments": search.arguments,
        "data": {**search.data, "density": search.density}, "interrupted": search.interrupted,
        "verdict": search.verdict, "metrics": {"own settings": own.metrics, "found": best.metrics},
    }  # fmt: skip
    return page.html(), plain(content), page.problems
