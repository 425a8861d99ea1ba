"""The page of a fit: curves, settings, data, metrics by popularity and activity, and examples of lists with titles.

Made from what the run's folder holds; a fit that has not ended has curves alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any

import scipy.sparse as sp

from gramtower._util.files import plain
from gramtower.experiments.figures import as_svg, degree_figure, run_figure
from gramtower.experiments.fit_measures import QUANTILES, Group, degree_quantiles, degrees, examples, groups_of
from gramtower.experiments.page import document, facts, number, picture, table
from gramtower.metrics.definitions import DEFAULT
from gramtower.model.fitted import FittedModel
from gramtower.model.side import Side
from gramtower.training.result import Record

_ENDS = {"INTERRUPTED": "unfinished", "NON_FINITE": "diverged"}  # reasons that are no proper end
Titles = Sequence[str | None] | None  # of the entities of a side


@dataclass(frozen=True)
class FitRun:
    """What is known of a fit.

    Attributes:
        title: of the page.
        runs: records by what to call them: one fit, or with ``refit`` that with validation and that on all pairs.
        summary: what the run wrote when it ended; empty if it did not.
        settings: tables of its config file.
        model: the fitted model; None while there is none.
        held_out: pairs to measure, in the model's rows, and what to call them; None if there are none.
        titles: by side.
        left_out: held-out pairs of entities that the model does not know.
        tested: whether the held-out pairs are those of a test, not those of the validation.
    """

    title: str
    runs: Mapping[str, Sequence[Record]]
    summary: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    model: FittedModel | None = None
    held_out: tuple[sp.csr_matrix, str] | None = None
    titles: Mapping[str, Titles] = field(default_factory=dict)
    left_out: int = 0
    tested: bool = False

    @property
    def last(self) -> list[Record]:
        """The records of the run that the model is of."""
        return list(list(self.runs.values())[-1])

    @property
    def end(self) -> tuple[str, str]:
        """What became of it, and why it stopped; a summary of an earlier, shorter run is no end of this one."""
        records = self.last
        if not records or self.summary.get("iterations") != records[-1].iteration:
            return "unfinished", "no end was recorded"
        reason = str(self.summary.get("reason"))
        return _ENDS.get(reason, "finished"), str(self.summary.get("stopped", reason))


def fit_page(run: FitRun) -> tuple[str, dict[str, Any], list[str]]:
    """The page of a fit.

    Returns:
        HTML, the numbers in it, and what could not be made and why.
    """
    status, message = run.end
    metric = _metric(run)
    content: dict[str, Any] = {"kind": "fit", "title": run.title, "status": status, "message": message}
    if run.last:
        content |= {name: getattr(run.last[-1], name) for name in ("iteration", "seconds", "data_passes")}
        content["iterations"] = content.pop("iteration")
        content["objective"] = run.summary.get("objective", run.last[-1].value)
    content |= {"metric": metric, "metric_value": run.summary.get("metric_value")} if metric else {}
    problems: list[str] = []
    body = _opening(content)
    body += _curves(run, metric, problems)
    if run.model is not None:
        data, numbers = _data(run.model)
        body += data
        content["data"] = numbers
        measured, groups = _measured(run.model, run, metric)
        body += measured
        content["measured"] = {"pairs": None if run.held_out is None else run.held_out[1], "groups": groups}
        body += _examples(run)
    body += _settings(run)
    return document(f"Fit: {run.title}", body), plain(content), problems


def _metric(run: FitRun) -> str | None:
    measured = any(record.metric is not None for records in run.runs.values() for record in records)
    named = run.summary.get("metric") or run.settings.get("train", {}).get("metric")
    return str(named or "metric") if measured else None


def _opening(content: Mapping[str, Any]) -> list[str]:
    parts = [f'<p{"" if content["status"] == "finished" else " class=warn"}><strong>'
             f"{escape(content['status'].capitalize())}</strong>: {escape(content['message'])}.</p>"]  # fmt: skip
    if "iterations" in content:
        text = f"{content['iterations']:,} iterations in {number(content['seconds'])} s of training, "
        text += f"objective {number(content['objective'], 6)}"
        if content.get("metric_value") is not None:
            text += f", best {content['metric']} {number(content['metric_value'], 4)} on the validation pairs"
        parts.append(f"<p>{escape(text)}.</p>")
    return parts


def _curves(run: FitRun, metric: str | None, problems: list[str]) -> list[str]:
    if not run.last:
        return ["<h2>Curves</h2><p>There is no record of an iteration yet.</p>"]
    try:
        drawn = [picture(as_svg(run_figure(run.runs, metric)), _caption(metric))]
    except ImportError as error:
        drawn = [f"<p>{escape(str(error))}</p>"]
        problems.append(f"no figures: {error}")
    head = [
        "",
        "iterations",
        "objective at the start",
        "at the end",
        *([f"best {metric}, validation"] if metric else []),
        "seconds",
    ]
    rows = []
    for name, records in run.runs.items():
        if records:
            best = max((r.metric for r in records if r.metric is not None), default=None)
            cells = [number(records[-1].iteration), number(records[0].value, 6), number(records[-1].value, 6)]
            rows.append([name, *cells, *([number(best, 4)] if metric else []), number(records[-1].seconds)])
    return ["<h2>Curves</h2>", *drawn, table(head, rows)]


def _caption(metric: str | None) -> str:
    return f"Objective, and {metric} on the validation pairs, by iteration" if metric else "Objective by iteration"


def _data(model: FittedModel) -> tuple[list[str], dict[str, Any]]:
    m, n = model.trained.shape
    counts = degrees(model.trained)
    numbers: dict[str, Any] = {"left": m, "right": n, "pairs": int(model.trained.nnz)}
    numbers["density"] = model.trained.nnz / max(1, m * n)
    left, right = _called(model)
    text = f"{m:,} {left} × {n:,} {right} entities, {model.trained.nnz:,} pairs: {numbers['density']:.3%} of all"
    added = [(name, side.added) for name, side in ((left, model.left), (right, model.right)) if side.added]
    text += "".join(f"; of the {name} entities {count:,} were added after training" for name, count in added)
    found = ["<h2>Data</h2>", f"<p>{escape(text)}.</p>"]
    with suppress(ImportError):  # said of the curves
        named = dict(zip((left, right), counts.values(), strict=True))
        found.append(picture(as_svg(degree_figure(named)), "Entities by their number of training pairs"))
    quantiles = degree_quantiles(model.trained)
    rows = [
        [name, *(number(value) for value in values.values())]
        for name, values in zip((left, right), quantiles.values(), strict=True)
    ]
    numbers |= {f"pairs_per_{side}": values for side, values in quantiles.items()}
    return [*found, table(["pairs per entity", *QUANTILES, "without any"], rows)], numbers


def _measured(
    model: FittedModel, run: FitRun, metric: str | None
) -> tuple[list[str], list[dict[str, Any]]]:  # fmt: skip
    heading = "<h2>Metrics by popularity and activity</h2>"
    if run.held_out is None:
        text = "The model keeps no validation pairs to measure it on. gramtower report RUN --test FILE measures others."
        return [heading, f"<p>{escape(text)}</p>"], []
    truth, called = run.held_out
    left, right = _called(model)
    names = tuple(dict.fromkeys([*([metric] if metric and "@" in metric else []), *DEFAULT]))
    groups = groups_of(model, truth, names)
    head = ["group", "training pairs each", "entities", "held-out pairs", "users", *names]
    rows = [_row(group, names) for group in groups]
    note = (
        f"Popularity low, mid and high are thirds of the {right} entities by their training pairs: only held-out pairs "
        f"with these count. Activity low, mid and high are thirds of the {left} entities by theirs. Users are those "
        "that the metrics are means over. The training pairs of a user are left out of its ranking."
    )
    left_out = f" {run.left_out:,} pairs of entities that the model does not know are left out." if run.left_out else ""
    other = ""
    if run.tested and metric:
        other = (
            " These are test pairs, which training has not seen. Their numbers do not compare with those of the curve "
            "and of the summary above, which are measured on other pairs, those of the validation."
        )
    return [
        heading,
        f"<p>On {escape(called)}.{escape(left_out)}{other}</p>",
        table(head, rows),
        f'<p class="soft">{note}</p>',
    ], [asdict(group) for group in groups]


def _row(group: Group, names: Sequence[str]) -> list[str]:
    span = f"{group.least:,}–{group.most:,}" if group.least != group.most else f"{group.least:,}"
    counts = [number(count) for count in (group.entities, group.pairs, group.users)]
    return [group.name, span, *counts, *(number(group.metrics.get(name), 4) for name in names)]


def _examples(run: FitRun) -> list[str]:
    model = run.model
    assert model is not None
    found = examples(model, None if run.held_out is None else run.held_out[0])
    if not found:
        return []
    left, right = _called(model)
    cards = []
    for one in found:
        known, listed = (
            [escape(_name(model.right, run.titles.get("right"), column)) for column in columns]
            for columns in (one.known, one.listed)
        )
        places = "".join(
            f"<li{' class=best' if hit else ''}>{name}</li>" for name, hit in zip(listed, one.hits, strict=True)
        )
        title = f"{left} {_name(model.left, run.titles.get('left'), one.row)}"
        has = f"{one.pairs:,} training pairs, such as " if known else "no training pairs"
        cards.append(
            f'<section><h3>{escape(title)}</h3><p class="soft">{has}{"; ".join(known)}</p><ol>{places}</ol></section>'
        )
    bold = " Held-out pairs are bold." if any(any(one.hits) for one in found) else ""
    text = f"The best {right} entities for {left} entities with few to many pairs.{bold}"
    return ["<h2>Examples of lists</h2>", f"<p>{escape(text)}</p>", f'<div class="lists">{"".join(cards)}</div>']


def _called(model: FittedModel) -> tuple[str, str]:
    """What to call the entities of both sides: as the data does, or left and right where that is the same name."""
    return model.names if model.names[0] != model.names[1] else ("left", "right")


def _name(side: Side, titles: Titles, row: int) -> str:
    key = row if side.ids is None else side.ids[row]
    title = None if titles is None else titles[row]
    return str(key) if title is None else f"{title} ({key})"


def _settings(run: FitRun) -> list[str]:
    found = ["<h2>Settings</h2>"] if run.settings else []
    tables = {name: {k: v for k, v in part.items() if v not in (None, {}, [])} for name, part in run.settings.items()}
    found += [facts(f"[{name}]", part) for name, part in tables.items() if part]
    environment = run.summary.get("environment")
    return [*found, "<h2>Machine</h2>", facts("", environment)] if isinstance(environment, dict) else found
