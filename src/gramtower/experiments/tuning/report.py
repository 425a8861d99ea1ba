"""The result of a search: its trials, the importance of each choice, and the settings found.

:class:`Search` writes itself as JSON, Markdown and TOML; ``tuning_page`` builds a page from report.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gramtower._util import html as html
from gramtower._util.checks import config_hidden
from gramtower._util.files import plain, write_text
from gramtower._util.schema import build
from gramtower._util.toml import config_text
from gramtower.experiments.figures import search_figure
from gramtower.experiments.page import circumstances, drawn, table
from gramtower.experiments.tuning.space import Value
from gramtower.experiments.tuning.study import Tried, pick
from gramtower.model.settings import SETTINGS

if TYPE_CHECKING:
    from matplotlib.figure import Figure


CONFIG, REPORT, TABLE = "config.toml", "report.json", "report.md"
#: Arguments of a search, which a fit of all pairs has no use for.
SKIPPED = ("time_limit", "patience", "metric", "optimizer_options", "select")
_LISTED = 5  # trials in a notebook
WEIGHTS = ("left_weights", "right_weights")


@dataclass
class Search:
    """What a search for settings found: its trials, and the one that won.

    Attributes:
        metric: what was maximised.
        trials: all of them, in order.
        winner: number of the trial that won: the best that is better than the defaults beyond noise, or theirs.
        importance: share of the metric's variation that each choice explains (PED-ANOVA), largest first.
        arguments: what was found, as arguments of :class:`gramtower.TwoTower`: those that differ from the defaults,
            which go by the size of the data.
        features: what the towers see: "ids", "history", "ids+history" or "given".
        space: what was searched.
        data: sizes.
        seconds: wall time of this call.
        base: the model's own arguments.
        interrupted: whether Ctrl-C ended it.
        verdict: whether a trial replaces the defaults, and by how much it is better, in a sentence.
        confirmations: trials that were trained once more before one of them won: those that had started warm, from a
            cold start, which is then also their record among ``trials``; where entities were held out, the defaults
            and what was to replace them, with other ones held out.
    """

    metric: str
    trials: list[Tried]
    winner: int
    importance: dict[str, float]
    arguments: dict[str, Any]
    features: str
    space: dict[str, str]
    data: dict[str, int]
    seconds: float
    base: dict[str, Any] = field(default_factory=dict)
    interrupted: bool = False
    verdict: str = ""
    confirmations: list[Tried] = field(default_factory=list)

    @property
    def best(self) -> Tried:
        """The trial that won."""
        return next(t for t in self.trials if t.number == self.winner)

    def metrics_table(self) -> tuple[list[str], list[list[str]]]:
        """Heads and rows of a table: several metrics of the model's own settings, of the winner, and their difference.

        There are no rows where the log, of an earlier version, has only the metric that was maximised.
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

    @property
    def caution(self) -> str:
        """A sentence on how far the numbers of the validation part can be trusted."""
        if self.winner == self.trials[0].number:
            return "All numbers are measured on the validation part, not on a test part."
        return (
            "All numbers are measured on the validation part that chose these settings, so the gain is likely to be "
            "smaller on other pairs. Measure both settings on a test part that the search has not seen."
        )

    def __repr__(self) -> str:
        return f"Search({len(self.trials)} trials, {self.metric} {self.best.value:.4f} by trial {self.best.number})"

    def plot(self) -> Figure:
        """A figure of the trials: the metric of each, their curves, and what each choice explains.

        Raises:
            ImportError: without matplotlib, with the line that installs it.
        """
        return search_figure(
            self.metric, [t.value for t in self.trials], [t.pruned for t in self.trials],
            [t.curve for t in self.trials], self.importance, self.trials.index(self.best),
        )  # fmt: skip

    def tables(self) -> dict[str, dict[str, Any]]:
        """The settings as tables of a config file, which holds no arrays and no functions."""
        plain = (str, int, float, tuple, list, dict)
        settings = self.base | self.arguments
        settings |= {name: _weights_text(settings[name]) for name in WEIGHTS if name in settings}
        known = {k: v for k, v in settings.items() if k in SETTINGS and isinstance(v, plain)}
        if settings.get("hidden") is not None:
            known["hidden"] = config_hidden(settings["hidden"])
        tables: dict[str, dict[str, Any]] = {
            table: {
                k: known[k] for k, one in SETTINGS.items() if one.table == table and k in known and k not in SKIPPED
            }
            for table in ("model", "train")
        }
        model = tables["model"]
        tables["train"]["option"] = known.get("optimizer_options")
        if "history" in self.features:
            model["history"] = True
            tables["features"] = {"left_identity": "ids" in self.features}
        return tables

    def config(self, given: dict[str, dict[str, Any]] | None = None) -> str:
        """The settings as TOML that ``gramtower fit --config`` takes.

        Args:
            given: tables [data] and [features] of the command line; the latter go in where features were found useful.
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
            found["model"] |= {"history": features.pop("history", None)}
            tables["features"] = features
        return config_text({k: v for k, v in (tables | found).items() if v}, comment)

    def to_json(self) -> dict[str, Any]:
        """Everything, as plain values."""
        content = asdict(self)
        content["base"] = {
            k: v if isinstance(v, (int, float, str, tuple, dict, type(None))) else str(v) for k, v in self.base.items()
        }
        return content

    def markdown(self) -> str:
        """The report for people."""
        best = self.best
        names = list(best.settings)
        held = "".join(
            f"; {self.data[f'held_out_{side}']:,} {side} entities were held out with all their pairs"
            for side in ("left", "right")
            if f"held_out_{side}" in self.data
        )
        lines = [
            "# Tuning",
            "",
            f"{len(self.trials)} trials in {self.seconds:.0f} s; {self.metric} of {self.data['ranked_users']:,} users "
            f"on a validation part of the {self.data['left']:,} × {self.data['right']:,} training data{held}. Found: "
            f"{best.value:.4f} (trial {best.number}, iteration {best.iteration}); at the defaults: "
            f"{self.trials[0].value:.4f} (trial 0).",
            *(["", f"{self.verdict[0].upper()}{self.verdict[1:]}."] if self.verdict else []),
            "",
            self.caution,
            *_markdown_table(*self.metrics_table()),
            "",
            "| choice | searched | found | importance |",
            "| --- | --- | --- | --- |",
        ]
        for name in sorted(names, key=lambda name: -self.importance.get(name, 0.0)):
            share = f"{self.importance[name]:.2f}" if name in self.importance else ""
            searched = self.space.get(name, "").replace("|", "or")
            lines.append(f"| {name} | {searched} | {shown(best.settings[name])} | {share} |")
        lines += [
            "",
            f"| trial | {self.metric} | {' | '.join(names)} | iterations | seconds | note |",
            "| --- | --- |" + " --- |" * (len(names) + 3),
        ]
        for t in sorted(self.trials, key=lambda t: (t.pruned, -t.value)):
            cells = [str(t.number), f"{t.value:.4f}", *(shown(t.settings[name]) for name in names)]
            cells += [str(len(t.curve) - 1), f"{t.seconds:.1f}", t.note]
            lines.append("| " + " | ".join(cells) + " |")
        if self.confirmations:
            lines += ["", f"| trained again | {self.metric} | how | iterations | seconds |", "| --- |" + " --- |" * 4]
        for t in self.confirmations:
            lines.append(f"| {t.number} | {t.value:.4f} | {t.repeated} | {len(t.curve) - 1} | {t.seconds:.1f} |")
        return "\n".join(lines) + "\n"

    def _repr_html_(self) -> str:
        """A card for notebooks: the best settings and the best trials."""
        best, names = self.best, list(self.best.settings)
        title = f"Search: {self.metric} {best.value:.4f}, {self.trials[0].value:.4f} at the first settings"
        found = [(name, self.space.get(name, ""), shown(best.settings[name]), self.importance.get(name))
                 for name in sorted(names, key=lambda name: -self.importance.get(name, 0.0))]  # fmt: skip
        first = sorted(self.trials, key=lambda trial: (trial.pruned, -trial.value))[:_LISTED]
        rows = [(t.number, t.value, *(shown(t.settings[name]) for name in names), t.iteration) for t in first]
        ended = f"{len(self.trials)} trials in {self.seconds:.0f} s" + (", interrupted" if self.interrupted else "")
        heads, measured = self.metrics_table()
        return html.card(
            title,
            html.table(heads, measured) if measured else "",
            html.table(("choice", "searched", "found", "importance"), found),
            html.table(("trial", self.metric, *names, "iteration"), rows),
            html.note(f"{ended}; {self.verdict}. {self.caution}" if self.verdict else f"{ended}. {self.caution}"),
        )

    def write(self, folder: str | Path, given: dict[str, dict[str, Any]] | None = None) -> None:
        """report.json, report.md and config.toml in a folder, each replaced in one step."""
        folder = Path(folder)
        texts = {
            REPORT: json.dumps(self.to_json(), indent=1, ensure_ascii=False) + "\n",
            TABLE: self.markdown(),
            CONFIG: self.config(given),
        }
        for name, text in texts.items():
            write_text(folder / name, text)


def read_search(folder: Path) -> Search:
    """A search from the report.json in a folder.

    Raises:
        ValueError: if the file is damaged or of something else.
    """
    path = folder / REPORT
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        trials = [build("trials", Tried, trial) for trial in plain.pop("trials")]
        again = [build("confirmations", Tried, trial) for trial in plain.pop("confirmations", [])]
        search = build("search", Search, plain | {"trials": []})
        search.trials, search.confirmations = trials, again
        for settings in (search.base, search.arguments):
            if settings.get("hidden") is not None:
                settings["hidden"] = _tuples(settings["hidden"])
        if search.winner not in [trial.number for trial in trials]:
            raise ValueError(f"no trial {search.winner}, which won")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"folder: {path} is damaged or of something else ({error})") from error
    return search


def _tuples(value: Any) -> Any:
    """Widths of hidden layers as they were before JSON."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _difference(found: float, own: float) -> str:
    """By how much a metric differs from that of the model's own settings: as a share where that is above zero."""
    return f"{100 * (found / own - 1):+.1f} %" if own > 0 else f"{found - own:+.4f}"


def _markdown_table(heads: list[str], rows: list[list[str]]) -> list[str]:
    """Lines of a table after an empty one; none for no rows."""
    if not rows:
        return []
    return ["", *(f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows))]


def shown(value: Value) -> str:
    """A setting for people."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _weights_text(weights: Any) -> str:
    """Weights as a config file has them: what is left out there would be the default, not none."""
    return weights if isinstance(weights, str) else "degree^0"


def trial_lines(say: Callable[[str], None]) -> Callable[[Search], None]:
    """A function that takes the state of a search and hands on a line for each trial that has ended since the last."""
    told = 0

    def tell(found: Search) -> None:
        nonlocal told
        if len(found.trials) > told:  # not again of the last one when the search ends
            last, best = found.trials[-1], pick(found.trials)
            how = f"warm from {last.warm_from}" if last.warm_from is not None else "cold"
            how = how if last.same_as is None else f"same as {last.same_as}"
            end = "given up" if last.pruned else f"{len(last.curve) - 1} iterations"
            say(
                f"trial {last.number:3d}  {found.metric} {last.value:.4f}  {how}, {end}, {last.seconds:.1f} s"
                f"   best {best.value:.4f} (trial {best.number})"
            )
        told = len(found.trials)
        for again in found.confirmations:  # when the search ends
            value = f"{found.metric} {again.value:.4f}"
            say(f"trial {again.number:3d}  {value}  again, {again.repeated}, {again.seconds:.1f} s")

    return tell


def tuning_page(search: Search, title: str) -> tuple[str, dict[str, Any], list[str]]:
    """The page of a search.

    Returns:
        HTML, the numbers in it, and what could not be made and why.
    """
    best, metric, data = search.best, search.metric, search.data
    problems: list[str] = []
    at_defaults = search.trials[0]
    left, right, pairs = (data.get(name, 0) for name in ("left", "right", "pairs"))
    density = pairs / max(1, left * right)
    sizes = (
        f"{left:,} left × {right:,} right entities, {pairs:,} pairs to learn from: {density:.3%} of all. "
        f"{data.get('ranked_users', 0):,} users were ranked in each trial."
    )
    result = (
        f"{metric} on the validation part: {best.value:.4f} by trial {best.number}, iteration {best.iteration}; "
        f"{at_defaults.value:.4f} with the model's own settings (trial 0). {len(search.trials):,} trials in "
        f"{search.seconds:.0f} s"
    )
    result += f"; {search.verdict}." if search.verdict else "."
    body = [f"<p><strong>{escape(result)}</strong></p>", f"<p>{escape(sizes)}</p>"]
    heads, measured = search.metrics_table()
    body += [table(heads, measured)] if measured else []
    body.append(f"<p>{escape(search.caution)}</p>")
    if search.interrupted:
        body.append('<p class="warn">The search was interrupted; the same command goes on.</p>')
    body.append("<h2>Trials</h2>")
    body.append(drawn(search.plot, f"{metric} of each trial, their curves, and importance of choices", problems))
    body += ["<h2>What was found</h2>", _choices(search), "<h2>All trials</h2>", _trials(search)]
    body += ["<h2>Trained again</h2>", _confirmations(search)] if search.confirmations else []
    body += circumstances((), {f"[{name}]": plain(part) for name, part in search.tables().items()}, {})
    content = {
        "kind": "tuning", "title": title, "metric": metric, "value": best.value, "trial": best.number,
        "trials": len(search.trials), "confirmations": len(search.confirmations), "at_defaults": at_defaults.value,
        "seconds": search.seconds,
        "importance": search.importance, "arguments": search.arguments, "data": {**data, "density": density},
        "interrupted": search.interrupted, "verdict": search.verdict,
        "metrics": {"own settings": at_defaults.metrics, "found": best.metrics},
    }  # fmt: skip
    return html.document(f"Tuning: {title}", body), plain(content), problems


def _choices(search: Search) -> str:
    best, start = search.best.settings, search.trials[0].settings
    names = sorted(best, key=lambda name: -search.importance.get(name, 0.0))
    rows = [
        [
            name,
            search.space.get(name, "–"),
            _text(start.get(name)),
            _text(best[name]),
            html.number(search.importance.get(name)),
        ]
        for name in names
    ]
    return table(["choice", "searched", "at the start", "found", "importance"], rows)


def _trials(search: Search) -> str:
    names = list(search.best.settings)
    ordered = sorted(search.trials, key=lambda t: (t.pruned, -t.value))
    rows = [
        [str(t.number), f"{t.value:.4f}", *(_text(t.settings.get(name)) for name in names),
         str(len(t.curve) - 1), f"{t.seconds:.1f}", t.note]
        for t in ordered
    ]  # fmt: skip
    marked = [[t.number == search.winner] * (len(names) + 4) for t in ordered]
    return table(["trial", search.metric, *names, "iterations", "seconds", "note"], rows, marked)


def _confirmations(search: Search) -> str:
    rows = [
        [str(t.number), f"{t.value:.4f}", t.repeated, str(len(t.curve) - 1), f"{t.seconds:.1f}"]
        for t in search.confirmations
    ]
    return table(["trial", search.metric, "how", "iterations", "seconds"], rows)


def _text(value: Value | None) -> str:
    return "–" if value is None else shown(value)
