"""Metrics added up block by block: one value for each user and metric is kept, and the means in the end.

A break-down has three more groups: users of a tercile, or all users with only the relevant items of a tercile counted.
Cost: O(users · K · log pairs). Checked by tests/test_metrics.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray

from gramtower.distributed.group import SINGLE
from gramtower.distributed.group import Group as Processes
from gramtower.metrics.definitions import AT_K, Floats, Hits, Metric

GROUPS = ("low", "mid", "high")


class Scores(dict[str, float]):
    """Metrics by name, and what they are means of.

    Attributes:
        users: left entities that the metrics are means over.
        users_left_out: left entities without a relevant item.
        pairs: relevant pairs that count.
        pairs_left_out: test pairs that are training pairs too, so that they cannot be recommended.
        groups: for a break-down, the users that each group's metrics are means over.
    """

    users: int = 0
    users_left_out: int = 0
    pairs: int = 0
    pairs_left_out: int = 0
    groups: dict[str, int]


@dataclass
class _Group:
    """Users and items that metrics are taken over."""

    label: str  # what it adds to a metric's name
    items: NDArray[np.bool_] | None  # relevant items that count; None for all
    members: NDArray[np.bool_]  # users that have such items and belong to the group
    relevant: Floats  # how many of them each user has, at least 1
    values: dict[str, Floats]  # metric at K → one value for each user


class Tally:
    """Values of the metrics for each user, block by block, and their means in the end."""

    def __init__(self, wanted: list[Metric], truth: sp.csr_matrix, processes: Processes = SINGLE) -> None:
        self.wanted, self.truth, self.processes = wanted, truth, processes
        self.rows = np.repeat(np.arange(truth.shape[0]), np.diff(truth.indptr))
        self.shown = {m.k: np.zeros(truth.shape[1], dtype=bool) for m in wanted if m.kind == "coverage"}
        self.beaten = np.zeros(truth.nnz)  # for the AUC: what part of the other items each relevant one is above
        self.groups: list[_Group] = []
        self._add_group("", None, None)

    def break_down(self, by: str, train: sp.csr_matrix, users: NDArray[np.int64]) -> None:
        """Add three groups of items or of users."""
        if by == "popularity":
            counts = torch.from_numpy(np.bincount(train.indices, minlength=train.shape[1]))
            parts = _terciles(self.processes.sum_(counts).numpy())
        else:
            counts = torch.from_numpy(np.diff(train.indptr)[users].astype(np.int64))
            rows = [int(x) for x in self.processes.gather_json(len(counts))]
            parts = _terciles(counts.numpy(), self.processes.gather_rows(counts, rows).wait().numpy())
        for name, part in zip(GROUPS, parts, strict=True):
            items, members = (part, None) if by == "popularity" else (None, part)
            self._add_group(f" {by}={name}", items, members)

    def _add_group(self, label: str, items: NDArray[np.bool_] | None, members: NDArray[np.bool_] | None) -> None:
        counted = self.rows if items is None else self.rows[items[self.truth.indices]]
        relevant = np.bincount(counted, minlength=self.truth.shape[0])
        members = relevant > 0 if members is None else members & (relevant > 0)
        if self.processes.totals(float(members.sum()))[0]:
            values = {m.name: np.zeros(len(relevant)) for m in self.wanted if m.kind in AT_K}
            self.groups.append(_Group(label, items, members, np.maximum(relevant, 1.0), values))

    def add_lists(self, start: int, lists: NDArray[np.int64]) -> None:
        """Take in the recommendations of the next users."""
        n, stop = self.truth.shape[1], start + len(lists)
        first, last = self.truth.indptr[[start, stop]]
        known = self.rows[first:last] * n + self.truth.indices[first:last]  # increasing
        asked = np.arange(start, stop)[:, None] * n + lists
        place = np.searchsorted(known, asked).clip(max=max(0, len(known) - 1))
        hits = (known[place] == asked) & (lists >= 0)
        for group in self.groups:
            counted = hits if group.items is None else hits & group.items[lists]
            relevant = group.relevant[start:stop]
            for metric in self.wanted:
                if metric.kind in AT_K:
                    padded = _first(counted, metric.k)
                    group.values[metric.name][start:stop] = AT_K[metric.kind](padded, relevant)
        for k, shown in self.shown.items():
            top = lists[:, :k]
            shown[top[top >= 0]] = True

    def add_ranks(self, start: int, stop: int, above: Floats, exclude: sp.csr_matrix | None) -> None:
        """Take in, for each relevant pair of the next users, how many of the other ranked items are above it."""
        first, last = self.truth.indptr[[start, stop]]
        others = self.truth.shape[1] - np.diff(self.truth.indptr[start : stop + 1]).astype(np.float64)
        if exclude is not None:
            others -= np.diff(exclude.indptr[start : stop + 1])
        others[others == 0] = np.nan  # nothing to be above: the user has no AUC
        self.beaten[first:last] = 1 - above / others[self.rows[first:last] - start]

    def result(self, users_left_out: int, pairs_left_out: int) -> Scores:
        """The means."""
        scores = Scores()
        for group in self.groups:
            for metric in self.wanted:
                if metric.kind in AT_K:
                    scores[metric.name + group.label] = self._mean(group.values[metric.name][group.members])
                elif metric.kind == "auc":
                    scores[metric.name + group.label] = self._auc(group)
                elif not group.label:
                    shown = self.processes.sum_(torch.from_numpy(self.shown[metric.k].astype(np.int64)))
                    scores[metric.name] = float((shown.numpy() > 0).mean())
        counts = (self.truth.shape[0], self.truth.nnz, users_left_out, pairs_left_out)
        scores.users, scores.pairs, scores.users_left_out, scores.pairs_left_out = self._counts(*counts)
        labelled = [group for group in self.groups if group.label]
        members = self._counts(*(int(group.members.sum()) for group in labelled)) if labelled else ()
        scores.groups = {g.label.strip(): count for g, count in zip(labelled, members, strict=True)}
        return scores

    def _mean(self, values: Floats) -> float:
        total, count = self.processes.totals(float(values.sum()), float(len(values)))
        return total / count if count else float("nan")

    def _counts(self, *numbers: int) -> tuple[int, ...]:
        return tuple(int(number) for number in self.processes.totals(*numbers))

    def _auc(self, group: _Group) -> float:
        weights = self.beaten if group.items is None else self.beaten * group.items[self.truth.indices]
        mean = np.bincount(self.rows, weights, minlength=len(group.relevant)) / group.relevant
        defined = group.members & np.isfinite(mean)
        return self._mean(mean[defined])


def _first(hits: Hits, k: int) -> Hits:
    """The first k places; places beyond the end of the list are misses."""
    return hits[:, :k] if hits.shape[1] >= k else np.pad(hits, ((0, 0), (0, k - hits.shape[1])))


def _terciles(counts: NDArray[Any], gathered: NDArray[Any] | None = None) -> list[NDArray[np.bool_]]:
    """Three groups by the terciles of counts, or of those of all processes.

    Equal counts are in the same group, which may leave one empty.
    """
    low, high = np.quantile(counts if gathered is None else gathered, [1 / 3, 2 / 3])
    return [counts <= low, (counts > low) & (counts <= high), counts > high]
