"""Metrics added up block by block: one value for each user and metric is kept, and the means in the end.

A break-down has three more groups: users of a tercile, or all users with only the relevant items of a tercile counted.
Cost: O(users · K · log pairs).

How much of a difference between two models' metrics is due to the entities they happened to be measured on.

The entities are dealt to at most 20 parts at random, with a seed. With θ₍₋g₎ a model's metric without part g, and
d_g = θ₍₋g₎ of one model − θ₍₋g₎ of another, the standard error of the difference is the delete-a-group jackknife's,

    s² = (G − 1)/G · Σ_g (d_g − mean d)².

It is paired: what makes an entity hard for both models cancels. G numbers for each model are all that is kept, whatever
the number of entities. For a mean over entities, with parts of one entity each, it is the usual standard error of the
mean difference; for other metrics it is rather too large than too small (Efron and Stein, 1981). Cost: O(entities).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from gramtower._util import html as html
from gramtower.distributed.group import SINGLE
from gramtower.distributed.group import Group as Processes
from gramtower.metrics.definitions import (
    AT_K,
    OF_ITEMS,
    OF_LISTS,
    Floats,
    Hits,
    Lists,
    Metric,
    best_gains,
    diversity,
    novelty,
)
from gramtower.retrieval.ranks import first_places

GROUPS = ("low", "mid", "high")


class Scores(dict[str, float]):
    """Metrics by name, and what they are means of.

    Attributes:
        users: left entities that the metrics are means over.
        users_left_out: left entities without a relevant item.
        pairs: relevant pairs that count.
        pairs_left_out: test pairs that do not count: training pairs too, so that they cannot be recommended, or left
            out by request; in what a model's ``evaluate`` returns, also those of unknown entities.
        left_out: the same by reason, where a model's ``evaluate`` returned it: ``unknown_left`` and ``unknown_right``
            (an id that the model does not know and that nothing describes) and ``seen``.
        groups: for a break-down, the users that each group's metrics are means over.
        rows: the rows of this process's users, in the order of ``per_user``.
        per_user: for each metric that is a mean, the values of these users; NaN where a user has none, who is left out
            of the mean. Those of psp are divided by what the best lists would gain on average.
    """

    users: int = 0
    users_left_out: int = 0
    pairs: int = 0
    pairs_left_out: int = 0
    left_out: dict[str, int]
    groups: dict[str, int]
    rows: NDArray[np.int64]
    per_user: dict[str, Floats]

    def _repr_html_(self) -> str:
        """A card for notebooks: the metrics, group by group where there are any, and what they are means of."""
        groups = getattr(self, "groups", {})
        plain = [name for name in self if not any(name.endswith(f" {group}") for group in groups)]
        rows = [(name, self[name], *(self.get(f"{name} {group}") for group in groups)) for name in plain]
        means = f"Means over {self.users:,} left entities with {self.pairs:,} pairs."
        left_out = {reason: count for reason, count in getattr(self, "left_out", {}).items() if count}
        if self.pairs_left_out:
            why = ", ".join(f"{count:,} {reason.replace('_', ' ')}" for reason, count in left_out.items())
            means += f" {self.pairs_left_out:,} pairs do not count{': ' + why if why else ''}."
        return html.card("Metrics", html.table(("metric", "value", *groups), rows), html.note(means))


@dataclass(frozen=True)
class ItemFacts:
    """What some metrics know of each item; None for what no metric asked for."""

    inverse_propensities: Floats | None = None
    information: Floats | None = None
    directions: NDArray[np.float32] | None = None  # embeddings of length one


@dataclass
class _Group:
    """Users and items that metrics are taken over."""

    label: str  # what it adds to a metric's name
    items: NDArray[np.bool_] | None  # relevant items that count; None for all
    members: NDArray[np.bool_]  # users that have such items and belong to the group
    relevant: Floats  # how many of them each user has, at least 1
    values: dict[str, Floats]  # metric → one value for each user
    best: dict[str, Floats]  # psp → the largest value that each user could have


class Tally:
    """Values of the metrics for each user, block by block, and their means in the end."""

    def __init__(
        self,
        wanted: list[Metric],
        truth: sp.csr_matrix,
        processes: Processes = SINGLE,
        facts: ItemFacts | None = None,
    ) -> None:
        self.wanted, self.truth, self.processes = wanted, truth, processes
        self.facts = ItemFacts() if facts is None else facts
        self.rows = np.repeat(np.arange(truth.shape[0]), np.diff(truth.indptr))
        self.shown = {m.k: np.zeros(truth.shape[1], dtype=np.int64) for m in wanted if m.kind in OF_ITEMS}
        self.of_lists = {m.name: np.full(truth.shape[0], np.nan) for m in wanted if m.kind in OF_LISTS}
        self.beaten = np.zeros(truth.nnz)  # for the AUC: what part of the other items each relevant one is above
        self.groups: list[_Group] = []
        self._add_group("", None, None)

    def break_down(self, by: str, degrees: NDArray[np.int64]) -> None:
        """Add three groups of items or of users, by how many training pairs they have.

        Args:
            by: "popularity" or "activity".
            degrees: pairs of all items, or of this process's users.
        """
        if by == "popularity":
            parts = terciles(degrees)
        else:
            counts = torch.from_numpy(degrees)
            rows = [int(x) for x in self.processes.gather_json(len(counts))]
            parts = terciles(degrees, self.processes.gather_rows(counts, rows).wait().numpy())
        for name, part in zip(GROUPS, parts, strict=True):
            items, members = (part, None) if by == "popularity" else (None, part)
            self._add_group(f" {by}={name}", items, members)

    def _add_group(self, label: str, items: NDArray[np.bool_] | None, members: NDArray[np.bool_] | None) -> None:
        users = self.truth.shape[0]
        counts = slice(None) if items is None else items[self.truth.indices]
        counted, columns = self.rows[counts], self.truth.indices[counts]
        relevant = np.bincount(counted, minlength=users)
        members = relevant > 0 if members is None else members & (relevant > 0)
        if self.processes.totals(float(members.sum()))[0]:
            values = {m.name: np.zeros(users) for m in self.wanted if m.kind in (*AT_K, "psp")}
            worth = self.facts.inverse_propensities
            gains = np.empty(0) if worth is None else worth[columns]
            best = {m.name: best_gains(gains, counted, users, m.k) for m in self.wanted if m.kind == "psp"}
            self.groups.append(_Group(label, items, members, np.maximum(relevant, 1.0), values, best))

    def add_lists(self, start: int, lists: Lists) -> None:
        """Take in the recommendations of the next users."""
        n, stop = self.truth.shape[1], start + len(lists)
        first, last = self.truth.indptr[[start, stop]]
        known = self.rows[first:last] * n + self.truth.indices[first:last]  # increasing
        asked = np.arange(start, stop)[:, None] * n + lists
        place = np.searchsorted(known, asked).clip(max=max(0, len(known) - 1))
        hits = (known[place] == asked) & (lists >= 0)
        worth = self.facts.inverse_propensities
        gains = None if worth is None else worth[lists]  # of the last item where there is none, which is no hit
        for group in self.groups:
            counted = hits if group.items is None else hits & group.items[lists]
            relevant = group.relevant[start:stop]
            for metric in self.wanted:
                if metric.kind == "psp" and gains is not None:
                    found = (counted[:, : metric.k] * gains[:, : metric.k]).sum(1)
                elif metric.kind in AT_K and metric.k:
                    found = AT_K[metric.kind](_first(counted, metric.k), relevant)
                else:
                    continue
                group.values[metric.name][start:stop] = found
        for k, shown in self.shown.items():
            top = lists[:, :k]
            shown += np.bincount(top[top >= 0], minlength=n)
        self._add_of_lists(start, stop, lists)

    def _add_of_lists(self, start: int, stop: int, lists: Lists) -> None:
        """Novelty and diversity of the next users' lists."""
        information, directions = self.facts.information, self.facts.directions
        lengths = [metric.k for metric in self.wanted if metric.kind == "diversity"]
        spread = diversity(lists, directions, lengths) if lengths and directions is not None else {}
        for metric in self.wanted:
            if metric.kind == "diversity":
                self.of_lists[metric.name][start:stop] = spread[metric.k]
            elif metric.kind == "novelty" and information is not None:
                self.of_lists[metric.name][start:stop] = novelty(lists[:, : metric.k], information)

    def add_ranks(self, start: int, stop: int, above: Floats, exclude: sp.csr_matrix | None) -> None:
        """Take in, for each relevant pair of the next users, how many of the other ranked items are above it."""
        first, last = self.truth.indptr[[start, stop]]
        others = self.truth.shape[1] - np.diff(self.truth.indptr[start : stop + 1]).astype(np.float64)
        if exclude is not None:
            others -= np.diff(exclude.indptr[start : stop + 1])
        others[others == 0] = np.nan  # nothing to be above: the user has no AUC
        self.beaten[first:last] = 1 - above / others[self.rows[first:last] - start]

    def add_first(self, start: int, stop: int, scores: Tensor) -> None:
        """Take in the next users' scores of all items, for the place of the first relevant one."""
        first, last = self.truth.indptr[[start, stop]]
        rows, columns = self.rows[first:last] - start, self.truth.indices[first:last]
        for group in self.groups:
            counts = slice(None) if group.items is None else group.items[columns]
            group.values["mrr"][start:stop] = 1 / first_places(scores, rows[counts], columns[counts])

    def result(self, rows: NDArray[np.int64], users_left_out: int, pairs_left_out: int) -> Scores:
        """The means; ``rows`` are those of the users."""
        scores = Scores()
        scores.rows, scores.per_user = rows, {}
        scores.left_out = {}
        for group in self.groups:
            for metric in self.wanted:
                if metric.kind in OF_ITEMS:
                    if not group.label:
                        shown = self.processes.sum_(torch.from_numpy(self.shown[metric.k].copy()))
                        scores[metric.name] = OF_ITEMS[metric.kind](shown.numpy())
                elif metric.kind not in OF_LISTS or group.items is None:  # lists are the same for all groups of items
                    values = self._values(metric, group)
                    defined = group.members & np.isfinite(values)
                    scores[metric.name + group.label] = self._mean(values[defined])
                    if not group.label:
                        scores.per_user[metric.name] = values
        counts = (self.truth.shape[0], self.truth.nnz, users_left_out, pairs_left_out)
        scores.users, scores.pairs, scores.users_left_out, scores.pairs_left_out = self._counts(*counts)
        labelled = [group for group in self.groups if group.label]
        members = self._counts(*(int(group.members.sum()) for group in labelled)) if labelled else ()
        scores.groups = {g.label.strip(): count for g, count in zip(labelled, members, strict=True)}
        return scores

    def _values(self, metric: Metric, group: _Group) -> Floats:
        """One value for each user, of which the metric is the mean; NaN for a user without one."""
        if metric.kind == "auc":
            weights = self.beaten if group.items is None else self.beaten * group.items[self.truth.indices]
            return np.bincount(self.rows, weights, minlength=len(group.relevant)) / group.relevant
        if metric.kind in OF_LISTS:
            return self.of_lists[metric.name]
        if metric.kind == "psp":
            return group.values[metric.name] / self._mean(group.best[metric.name][group.members])
        return group.values[metric.name]

    def _mean(self, values: Floats) -> float:
        total, count = self.processes.totals(float(values.sum()), float(len(values)))
        return total / count if count else float("nan")

    def _counts(self, *numbers: int) -> tuple[int, ...]:
        return tuple(int(number) for number in self.processes.totals(*numbers))


def _first(hits: Hits, k: int) -> Hits:
    """The first k places; places beyond the end of the list are misses."""
    return hits[:, :k] if hits.shape[1] >= k else np.pad(hits, ((0, 0), (0, k - hits.shape[1])))


def terciles(counts: NDArray[Any], gathered: NDArray[Any] | None = None) -> list[NDArray[np.bool_]]:
    """Three groups by the terciles of counts, or of those of all processes.

    Equal counts are in the same group, which may leave one empty.
    """
    low, high = np.quantile(counts if gathered is None else gathered, [1 / 3, 2 / 3])
    return [counts <= low, (counts > low) & (counts <= high), counts > high]


PARTS = 20


def deal(count: int, seed: int, parts: int = PARTS) -> NDArray[np.int64]:
    """The part of each entity, 0 to G − 1; parts differ by one entity in size at most."""
    return np.random.default_rng(seed).permutation(np.arange(count, dtype=np.int64) % max(1, min(parts, count)))


def means_without(values: NDArray[np.float64], parts: NDArray[np.int64]) -> list[float]:
    """The mean of the values without those of each part in turn, 0 where none is left; NaN is no value."""
    known = np.isfinite(values)
    values, of, count = values[known], parts[known], int(parts.max(initial=-1)) + 1
    sums, sizes = np.bincount(of, values, minlength=count), np.bincount(of, minlength=count)
    left = len(values) - sizes
    found = np.divide(values.sum() - sums, left, out=np.zeros(count), where=left > 0)
    return [float(value) for value in found]


def standard_error(one: Sequence[float], other: Sequence[float]) -> float:
    """Of the difference of two metrics, from what each is without each part; infinite for fewer than two parts."""
    if len(one) != len(other):
        raise ValueError(f"other: got {len(other)} parts, expected {len(one)}")
    differences, count = np.subtract(one, other), len(one)
    if count < 2:
        return math.inf
    return float(np.sqrt((count - 1) / count * np.square(differences - differences.mean()).sum()))
