"""Build the page of a fit: curves, settings, data, metrics by popularity and activity, and examples of lists.

The page is built from the folder of the run; a fit that has not ended has curves only. Held-out pairs are those of a
test, or the validation pairs that a model keeps. Cost: that of two evaluations and of a few lists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from gramtower._util.files import plain
from gramtower._util.html import number
from gramtower.data.interactions import Interactions
from gramtower.data.matrices import without
from gramtower.experiments.figures import Page, degree_figure, run_figure, table
from gramtower.metrics.definitions import DEFAULT
from gramtower.metrics.embedding_metrics import GROUPS, terciles
from gramtower.model.fit_data import own_pairs
from gramtower.model.fitted import FittedModel
from gramtower.model.side import Side
from gramtower.training.result import Record

QUANTILES = {"least": 0.0, "quarter": 0.25, "median": 0.5, "three quarters": 0.75, "most": 1.0}
EXAMPLES, LENGTH, SHOWN = 5, 10, 3  # left entities, right ones of a list, pairs that a left entity has


@dataclass(frozen=True)
class Group:
    """Metrics of a third of the right entities by popularity, or of the left ones by activity."""

    name: str  # such as "popularity low"; "all" for all of them
    entities: int  # number of entities: right ones, or left ones with held-out pairs
    least: int  # smallest number of training pairs of an entity
    most: int  # largest number of training pairs of an entity
    users: int  # left entities that the metrics are means over
    pairs: int  # held-out pairs that count
    metrics: dict[str, float]  # by name


@dataclass(frozen=True)
class Example:
    """A left entity, some of its right entities, and its list, as rows of the model."""

    row: int  # row of the left entity
    pairs: int  # number of its training pairs
    known: list[int]  # some of them
    listed: list[int]  # the best right entities, without those of training
    hits: list[bool]  # which of these are held-out pairs


def degrees(matrix: sp.csr_matrix) -> dict[str, NDArray[np.int64]]:
    """Return the number of pairs of each entity, by side."""
    right = np.bincount(matrix.indices, minlength=matrix.shape[1])
    return {"left": np.diff(matrix.indptr).astype(np.int64), "right": right.astype(np.int64)}


def degree_quantiles(matrix: sp.csr_matrix) -> dict[str, dict[str, float]]:
    """Return quantiles of the number of pairs of an entity, and the number of entities without pairs, by side."""
    return {
        side: {name: float(np.quantile(counts, at)) if len(counts) else 0.0 for name, at in QUANTILES.items()}
        | {"none": int((counts == 0).sum())}
        for side, counts in degrees(matrix).items()
    }


def validation_pairs(fitted: FittedModel) -> sp.csr_matrix | None:
    """Return the validation pairs that a model keeps, None if there are none that can be recognised.

    A model keeps pairs without their labels: if labels were not all 1, it is unknown which of them are relevant.
    """
    if not fitted.plain_pairs or not fitted.shards.single:
        return None
    found = sp.csr_matrix(fitted.further)
    found = found if not fitted.same_entities else without(found, own_pairs(fitted.ids, found.shape))
    kept = np.arange(found.shape[0]) < fitted.left.trained  # of those added, histories
    found = sp.csr_matrix(sp.diags(kept.astype(np.float32)) @ found)
    found.eliminate_zeros()
    return found if found.nnz else None


def groups_of(fitted: FittedModel, truth: sp.csr_matrix, metrics: Sequence[str]) -> list[Group]:
    """Return metrics of held-out pairs: of all, by popularity of right entities, and by activity of left ones."""
    truth = without(truth, fitted.trained)
    test, trained, held = as_pairs(fitted, truth), degrees(fitted.trained), degrees(truth)
    users = np.flatnonzero(held["left"])
    counted = {"popularity": trained["right"], "activity": trained["left"][users]}
    held_out = {"popularity": held["right"], "activity": held["left"][users]}
    scores = {by: fitted.evaluate(test, metrics, by=by) for by in counted}
    parts = [("activity", "", np.ones(len(users), dtype=bool))]
    parts += [(by, name, mask) for by in counted for name, mask in zip(GROUPS, terciles(counted[by]), strict=True)]
    found = []
    for by, name, mask in parts:
        measured, counts, inside = scores[by], counted[by], counted[by][mask]
        label = f" {by}={name}" if name else ""
        values = {metric: float(measured[metric + label]) for metric in metrics if metric + label in measured}
        least, most = inside.min(initial=int(counts.max(initial=0))), inside.max(initial=0)
        ranked = measured.groups.get(f"{by}={name}", 0) if name else measured.users
        pairs = int(held_out[by][mask].sum())
        found.append(
            Group(f"{by} {name}" if name else "all", len(inside), int(least), int(most), ranked, pairs, values)
        )
    return [group for group in found if group.users]


def as_pairs(fitted: FittedModel, matrix: sp.csr_matrix) -> Interactions | sp.csr_matrix:
    """Return a matrix in a model's rows as pairs with the model's ids, if it has ids."""
    if fitted.left.ids is None or fitted.right.ids is None:
        return matrix
    return Interactions(matrix, fitted.left.ids, fitted.right.ids, numbered=fitted.numbered)


def examples(fitted: FittedModel, truth: sp.csr_matrix | None, count: int = EXAMPLES) -> list[Example]:
    """Return lists of left entities with few to many pairs, of those with held-out pairs if there are any."""
    active = degrees(fitted.trained)["left"]
    held_out = sp.csr_matrix(fitted.trained.shape) if truth is None else without(truth, fitted.trained)
    asked = np.flatnonzero(np.diff(held_out.indptr) if held_out.nnz else active)
    if not len(asked):
        return []
    order = asked[np.argsort(active[asked], kind="stable")]
    places = np.unique(np.linspace(0, len(order) - 1, count + 2).round().astype(int)[1:-1])
    rows = order[places]
    names = rows.tolist() if fitted.left.ids is None else fitted.left.ids[rows].tolist()
    seen = as_pairs(fitted, without(fitted.seen, held_out))
    found, scores = fitted.recommend(names, LENGTH, exclude_seen=False, exclude=seen)
    lists = []
    for place, row in enumerate(rows.tolist()):
        columns = fitted.right.rows(found[place][np.isfinite(scores[place])].tolist())
        own = fitted.trained.indices[fitted.trained.indptr[row] : fitted.trained.indptr[row + 1]]
        relevant = set(held_out.indices[held_out.indptr[row] : held_out.indptr[row + 1]].tolist())
        known = own[np.unique(np.linspace(0, len(own) - 1, SHOWN).round().astype(int))] if len(own) else own
        hits = [column in relevant for column in columns.tolist()]
        lists.append(Example(row, int(active[row]), known.tolist(), columns.tolist(), hits))
    return lists


_ENDS = {"INTERRUPTED": "unfinished", "NON_FINITE": "diverged"}  # reasons that are no proper end
Titles = Sequence[str | None] | None  # of the entities of a side


@dataclass(frozen=True)
class FitRun:
    """The content of the folder of a fit."""

    title: str
    runs: Mapping[str, Sequence[Record]]  # records by name; with ``refit`` of the fit with validation and of the last
    summary: Mapping[str, Any] = field(default_factory=dict)  # summary.json; empty if the fit has not ended
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # tables of its config file
    model: FittedModel | None = None  # the fitted model; None while there is none
    held_out: tuple[sp.csr_matrix, str] | None = None  # pairs to measure, in the model's rows, and a name for them
    titles: Mapping[str, Titles] = field(default_factory=dict)  # titles of entities, by side
    left_out: int = 0  # number of held-out pairs of entities that the model does not know
    tested: bool = False  # whether the held-out pairs are those of a test, not of the validation

    @property
    def last(self) -> list[Record]:
        """The records of the run that the model comes from."""
        return list(list(self.runs.values())[-1])

    @property
    def end(self) -> tuple[str, str]:
        """The status and why the fit stopped; a summary of an earlier, shorter run does not count."""
        records = self.last
        if not records or self.summary.get("iterations") != records[-1].iteration:
            return "unfinished", "no end was recorded"
        reason = str(self.summary.get("reason"))
        return _ENDS.get(reason, "finished"), str(self.summary.get("stopped", reason))


def fit_page(run: FitRun) -> tuple[str, dict[str, Any], list[str]]:
    """Build the page of a fit.

    Returns:
        HTML, the numbers in it, and a list of what could not be made and why.
    """
    status, message = run.end
    named = run.summary.get("metric") or run.settings.get("train", {}).get("metric")
    measured = any(record.metric is not None for records in run.runs.values() for record in records)
    metric = str(named or "metric") if measured else None
    content: dict[str, Any] = {"kind": "fit", "title": run.title, "status": status, "message": message}
    if run.last:
        content |= {name: getattr(run.last[-1], name) for name in ("iteration", "seconds", "data_passes")}
        content["iterations"] = content.pop("iteration")
        content["objective"] = run.summary.get("objective", run.last[-1].value)
    content |= {"metric": metric, "metric_value": run.summary.get("metric_value")} if metric else {}
    page = Page(f"Fit: {run.title}")
    _add_opening(page, content)
    _add_curves(page, run, metric)
    if run.model is not None:
        content["data"] = _add_data(page, run.model)
        groups = _add_groups(page, run.model, run, metric)
        content["measured"] = {"pairs": None if run.held_out is None else run.held_out[1], "groups": groups}
        _add_examples(page, run.model, run)
    tables = {f"[{name}]": {k: v for k, v in part.items() if v not in ({}, [])} for name, part in run.settings.items()}
    environment = run.summary.get("environment")
    page.circumstances((), tables, {"": environment} if isinstance(environment, dict) else {})
    return page.html(), plain(content), page.problems


def _add_opening(page: Page, content: Mapping[str, Any]) -> None:
    kind = "" if content["status"] == "finished" else " class=warn"
    status, message = escape(content["status"].capitalize()), escape(content["message"])
    page.add(f"<p{kind}><strong>{status}</strong>: {message}.</p>")
    if "iterations" in content:
        text = f"{content['iterations']:,} iterations in {number(content['seconds'])} s of training, "
        text += f"objective {number(content['objective'], 6)}"
        if content.get("metric_value") is not None:
            text += f", best {content['metric']} {number(content['metric_value'], 4)} on the validation pairs"
        page.text(f"{text}.")


def _add_curves(page: Page, run: FitRun, metric: str | None) -> None:
    page.heading("Curves")
    if not run.last:
        page.text("There is no record of an iteration yet.")
        return
    caption = f"Objective, and {metric} on the validation pairs, by iteration" if metric else "Objective by iteration"
    page.figure(lambda: run_figure(run.runs, metric), caption)
    best = [f"best {metric}, validation"] if metric else []
    rows = []
    for name, records in run.runs.items():
        if records:
            largest = max((r.metric for r in records if r.metric is not None), default=None)
            cells = [number(records[-1].iteration), number(records[0].value, 6), number(records[-1].value, 6)]
            rows.append([name, *cells, *(number(largest, 4) for _ in best), number(records[-1].seconds)])
    page.add(table(["", "iterations", "objective at the start", "at the end", *best, "seconds"], rows))


def _add_data(page: Page, model: FittedModel) -> dict[str, object]:
    """Add the sizes of the data; return them."""
    (m, n), pairs, called = model.trained.shape, int(model.trained.nnz), [side.called for side in model.sides]
    density = pairs / max(1, m * n)
    text = f"{m:,} {called[0]} × {n:,} {called[1]} entities, {pairs:,} pairs: {density:.3%} of all"
    for name, side in zip(called, (model.left, model.right), strict=True):
        text += f"; of the {name} entities {side.added:,} were added after training" if side.added else ""
    page.heading("Data")
    page.text(f"{text}.")
    named = dict(zip(called, degrees(model.trained).values(), strict=True))
    page.figure(lambda: degree_figure(named), "Entities by their number of training pairs")
    quantiles = degree_quantiles(model.trained)
    rows = [[name, *map(number, values.values())] for name, values in zip(called, quantiles.values(), strict=True)]
    page.add(table(["pairs per entity", *QUANTILES, "without any"], rows))
    sizes = {"left": m, "right": n, "pairs": pairs, "density": density}
    return sizes | {f"pairs_per_{side}": values for side, values in quantiles.items()}


def _add_groups(page: Page, model: FittedModel, run: FitRun, metric: str | None) -> list[dict[str, object]]:
    """Add metrics by popularity and activity; return them."""
    page.heading("Metrics by popularity and activity")
    if run.held_out is None:
        page.text(
            "The model keeps no validation pairs to measure it on. gramtower report RUN --test FILE measures others."
        )
        return []
    (truth, name_of_pairs), (left, right) = run.held_out, [side.called for side in model.sides]
    names = tuple(dict.fromkeys([*([metric] if metric and "@" in metric else []), *DEFAULT]))
    groups = groups_of(model, truth, names)
    text = f"On {name_of_pairs}."
    text += f" {run.left_out:,} pairs of entities that the model does not know are left out." if run.left_out else ""
    if run.tested and metric:
        text += (
            " These are test pairs, which training has not seen. Their numbers do not compare with those of the curve "
            "and of the summary above, which are measured on other pairs, those of the validation."
        )
    page.text(text)
    rows = []
    for one in groups:
        span = f"{one.least:,}–{one.most:,}" if one.least != one.most else f"{one.least:,}"
        counts = map(number, (one.entities, one.pairs, one.users))
        rows.append([one.name, span, *counts, *(number(one.metrics.get(name), 4) for name in names)])
    page.add(table(["group", "training pairs each", "entities", "held-out pairs", "users", *names], rows))
    page.text(
        f"Popularity low, mid and high are thirds of the {right} entities by their training pairs: only held-out pairs "
        f"with these count. Activity low, mid and high are thirds of the {left} entities by theirs. Users are those "
        "that the metrics are means over. The training pairs of a user are left out of its ranking.",
        "soft",
    )
    return [asdict(group) for group in groups]


def _add_examples(page: Page, model: FittedModel, run: FitRun) -> None:
    found = examples(model, None if run.held_out is None else run.held_out[0])
    if not found:
        return
    left, right = [side.called for side in model.sides]
    bold = " Held-out pairs are bold." if any(any(one.hits) for one in found) else ""
    page.heading("Examples of lists")
    page.text(f"The best {right} entities for {left} entities with few to many pairs.{bold}")
    page.add('<div class="lists">')
    for one in found:
        known, listed = (
            [escape(_name(model.right, run.titles.get("right"), column)) for column in columns]
            for columns in (one.known, one.listed)
        )
        title = escape(f"{left} {_name(model.left, run.titles.get('left'), one.row)}")
        has = f"{one.pairs:,} training pairs, such as {'; '.join(known)}" if known else "no training pairs"
        marks = (" class=best" if hit else "" for hit in one.hits)
        places = "".join(f"<li{mark}>{name}</li>" for name, mark in zip(listed, marks, strict=True))
        page.add(f'<section><h3>{title}</h3><p class="soft">{has}</p><ol>{places}</ol></section>')
    page.add("</div>")


def _name(side: Side, titles: Titles, row: int) -> str:
    key = row if side.ids is None else side.ids[row]
    title = None if titles is None else titles[row]
    return str(key) if title is None else f"{title} ({key})"
