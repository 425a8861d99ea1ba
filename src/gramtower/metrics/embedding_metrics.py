"""Ranking metrics of given lists, and of embeddings against held-out pairs in bounded memory.

Users are processed in blocks: the product for their scores, one pass for the top K, and one count for each test pair
for the AUC. There is no array of users × items. :class:`Tally` collects the metrics of all users, block by block. A
breakdown adds three groups: the users of each tercile, or all users with only the relevant items of each tercile.

For the standard error of a difference of two models' metrics, entities are divided into at most 20 random parts. With
θ₍₋g₎ a model's metric without part g, and d_g = θ₍₋g₎ of one model − θ₍₋g₎ of another, the delete-a-group jackknife
gives

    s² = (G − 1)/G · Σ_g (d_g − mean d)².

It is paired, so that the difficulty of an entity for both models cancels. For a mean over entities, with parts of one
entity each, it is the usual standard error; for other metrics it tends to be too large (Efron and Stein, 1981).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from gramtower._util import checks as check
from gramtower._util import html as html
from gramtower.data.matrices import SparseMatrix, canonical, selected, union, without
from gramtower.distributed.group import SINGLE, Group
from gramtower.metrics.definitions import (
    AT_K,
    DEFAULT,
    OF_ITEMS,
    OF_LISTS,
    PROPENSITY,
    Floats,
    Hits,
    Lists,
    Metric,
    above,
    best_gains,
    diversity,
    first_places,
    inverse_propensities,
    novelty,
    parse,
    self_information,
)
from gramtower.retrieval.topk import EmbeddingsLike, Ranking, as_embeddings, best, embeddings

GROUPS = ("low", "mid", "high")


class Scores(dict[str, float]):
    """Metrics by name, with the numbers of users and pairs.

    Attributes:
        users: number of left entities that the metrics are means over.
        users_left_out: number of left entities without a relevant item.
        pairs: number of relevant pairs that count.
        pairs_left_out: number of test pairs that do not count, because they are also training pairs, which cannot be
            recommended, or were excluded; in the result of a model's ``evaluate`` also pairs of unknown entities.
        left_out: ``pairs_left_out`` by reason, in the result of a model's ``evaluate``: ``unknown_left`` and
            ``unknown_right`` (an id that is not in the model and has no features) and ``seen``.
        groups: for a breakdown, the number of users of each group.
        rows: the rows of this process's users, in the order of ``per_user``.
        per_user: for each metric that is a mean, the values of these users; NaN for users without a value, who are left
            out of the mean. Values of psp are divided by the mean gain of the best possible lists.
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
        """A card for notebooks: the metrics, by group if there are groups, and the numbers of users and pairs."""
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
    """Properties of items that some metrics need; None if no metric needs them."""

    inverse_propensities: Floats | None = None
    information: Floats | None = None
    directions: NDArray[np.float32] | None = None  # embeddings of length one


@dataclass
class _Group:
    """Users and items that metrics are computed over."""

    label: str  # suffix of a metric's name
    items: NDArray[np.bool_] | None  # relevant items that count; None for all
    members: NDArray[np.bool_]  # users that have such items and belong to the group
    relevant: Floats  # number of relevant items of each user, at least 1
    values: dict[str, Floats]  # metric → one value for each user
    best: dict[str, Floats]  # psp → the largest possible value of each user


class Tally:
    """Collects the values of the metrics for each user, block by block, and computes their means."""

    def __init__(
        self, wanted: list[Metric], truth: sp.csr_matrix, processes: Group = SINGLE, facts: ItemFacts | None = None
    ) -> None:
        self.wanted, self.truth, self.processes = wanted, truth, processes
        self.facts = ItemFacts() if facts is None else facts
        self.rows = np.repeat(np.arange(truth.shape[0]), np.diff(truth.indptr))
        self.shown = {m.k: np.zeros(truth.shape[1], dtype=np.int64) for m in wanted if m.kind in OF_ITEMS}
        self.of_lists = {m.name: np.full(truth.shape[0], np.nan) for m in wanted if m.kind in OF_LISTS}
        self.beaten = np.zeros(truth.nnz)  # for the AUC: the fraction of the other items below each relevant one
        self.groups: list[_Group] = []
        self._add_group("", None, None)

    def break_down(self, by: str, degrees: NDArray[np.int64]) -> None:
        """Add three groups of items ("popularity") or of users ("activity"), by their number of training pairs."""
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
        """Add the recommendations of the next users."""
        n, stop = self.truth.shape[1], start + len(lists)
        first, last = self.truth.indptr[[start, stop]]
        known = self.rows[first:last] * n + self.truth.indices[first:last]  # increasing
        asked = np.arange(start, stop)[:, None] * n + lists
        place = np.searchsorted(known, asked).clip(max=max(0, len(known) - 1))
        hits = (known[place] == asked) & (lists >= 0)
        worth = self.facts.inverse_propensities
        gains = None if worth is None else worth[lists]  # not used at empty places, -1, which are no hits
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
        information, directions = self.facts.information, self.facts.directions
        lengths = [metric.k for metric in self.wanted if metric.kind == "diversity"]
        spread = diversity(lists, directions, lengths) if lengths and directions is not None else {}
        for metric in self.wanted:
            if metric.kind == "diversity":
                self.of_lists[metric.name][start:stop] = spread[metric.k]
            elif metric.kind == "novelty" and information is not None:
                self.of_lists[metric.name][start:stop] = novelty(lists[:, : metric.k], information)

    def add_ranks(self, start: int, stop: int, above: Floats, exclude: sp.csr_matrix | None) -> None:
        """Add, for each relevant pair of the next users, the number of other ranked items above it."""
        first, last = self.truth.indptr[[start, stop]]
        others = self.truth.shape[1] - np.diff(self.truth.indptr[start : stop + 1]).astype(np.float64)
        if exclude is not None:
            others -= np.diff(exclude.indptr[start : stop + 1])
        others[others == 0] = np.nan  # without other items a user has no AUC
        self.beaten[first:last] = 1 - above / others[self.rows[first:last] - start]

    def add_first(self, start: int, stop: int, scores: Tensor) -> None:
        """Add the next users' scores of all items, for the rank of the first relevant one."""
        first, last = self.truth.indptr[[start, stop]]
        rows, columns = self.rows[first:last] - start, self.truth.indices[first:last]
        for group in self.groups:
            counts = slice(None) if group.items is None else group.items[columns]
            group.values["mrr"][start:stop] = 1 / first_places(scores, rows[counts], columns[counts])

    def result(self, rows: NDArray[np.int64], users_left_out: int, pairs_left_out: int) -> Scores:
        """The means; ``rows`` are the rows of the users."""
        scores = Scores()
        scores.rows, scores.per_user, scores.left_out = rows, {}, {}
        for group in self.groups:
            for metric in self.wanted:
                if metric.kind in OF_ITEMS:
                    if not group.label:
                        shown = self.processes.sum_(torch.from_numpy(self.shown[metric.k].copy()))
                        scores[metric.name] = OF_ITEMS[metric.kind](shown.numpy())
                elif metric.kind not in OF_LISTS or group.items is None:  # all groups of items have the same lists
                    values = self._values(metric, group)
                    defined = group.members & np.isfinite(values)
                    scores[metric.name + group.label] = self._mean(values[defined])
                    if not group.label:
                        scores.per_user[metric.name] = values
        labelled = [group for group in self.groups if group.label]
        counts = (self.truth.shape[0], self.truth.nnz, users_left_out, pairs_left_out)
        totals = self.processes.totals(*counts, *(int(group.members.sum()) for group in labelled))
        scores.users, scores.pairs, scores.users_left_out, scores.pairs_left_out, *members = map(int, totals)
        scores.groups = {group.label.strip(): count for group, count in zip(labelled, members, strict=True)}
        return scores

    def _values(self, metric: Metric, group: _Group) -> Floats:
        """The values of each user, whose mean is the metric; NaN for a user without a value."""
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


def _first(hits: Hits, k: int) -> Hits:
    """The first k places; missing places count as misses."""
    return hits[:, :k] if hits.shape[1] >= k else np.pad(hits, ((0, 0), (0, k - hits.shape[1])))


def terciles(counts: NDArray[np.int64], gathered: NDArray[np.int64] | None = None) -> list[NDArray[np.bool_]]:
    """Three groups by the terciles of counts, or of the counts ``gathered`` from all processes.

    Equal counts are in the same group, so that a group may be empty.
    """
    low, high = np.quantile(counts if gathered is None else gathered, [1 / 3, 2 / 3])
    return [counts <= low, (counts > low) & (counts <= high), counts > high]


def ranking_metrics(
    recommended: NDArray[np.generic] | Tensor | Sequence[Sequence[int]],
    relevant: SparseMatrix,
    metrics: str | Sequence[str] = DEFAULT,
    *,
    popularity: SparseMatrix | None = None,
    propensity: tuple[float, float] = PROPENSITY,
    embeddings: EmbeddingsLike | None = None,
) -> Scores:
    """Metrics of given recommendations.

    Args:
        recommended: users × K item columns, best first, −1 for empty places; a row has no item twice.
        relevant: scipy.sparse, users × items; stored entries with a value above 0 are the relevant items.
        metrics: names of metrics. The AUC is not available, because it needs scores of all items; the MRR without a K
            uses the whole lists.
        popularity: scipy.sparse, any number of users × items: the training pairs, for psp and novelty.
        propensity: A and B of psp.
        embeddings: embeddings of the items, one row each, for diversity.

    Returns:
        Metrics by name: means over the users that have relevant items, whose number is ``.users``.
    """
    wanted = parse(metrics)
    if any(metric.kind == "auc" for metric in wanted):
        check.fail("metrics", "'auc'", "metrics of lists; evaluate_embeddings computes the AUC")
    lists = check.as_array("recommended", recommended, "integers, users × K")
    if lists.ndim != 2 or lists.dtype.kind not in "iu":
        check.fail("recommended", f"shape {lists.shape} of {lists.dtype}", "integers, users × K")
    truth = _relevant("relevant", relevant)
    n = truth.shape[1]
    if truth.shape[0] != len(lists):
        check.fail("relevant", f"shape {truth.shape}", f"{len(lists)} rows, one for each list")
    wanted = [replace(m, k=max(1, lists.shape[1])) if m.k == 0 else m for m in wanted]
    _check_lists(lists, n, max(metric.k for metric in wanted))
    users = np.flatnonzero(np.diff(truth.indptr))
    if not len(users):
        check.fail("relevant", "no pair with a value above 0", "at least one")
    known = None if popularity is None else _of_items("popularity", popularity, n)
    Q = None if embeddings is None else as_embeddings("embeddings", embeddings)
    if Q is not None and len(Q) != n:
        check.fail("embeddings", f"{len(Q)} rows", f"{n}, one for each item")
    facts = _facts(wanted, _degrees(known, SINGLE), propensity, Q, "popularity")
    tally = Tally(wanted, truth[users], facts=facts)
    tally.add_lists(0, lists[users].astype(np.int64))
    return tally.result(users, len(lists) - len(users), 0)


def evaluate_embeddings(
    P: EmbeddingsLike,
    Q: EmbeddingsLike,
    test: SparseMatrix,
    *,
    train: SparseMatrix | None = None,
    metrics: str | Sequence[str] = DEFAULT,
    exclude_train: bool = True,
    exclude: SparseMatrix | None = None,
    by: str | None = None,
    popularity: SparseMatrix | None = None,
    propensity: tuple[float, float] = PROPENSITY,
    block_bytes: int | str | None = None,
    processes: Group = SINGLE,
) -> Scores:
    """Metrics of the ranking of all items by p_iᵀq_j for each user with test pairs.

    Args:
        P: embeddings of users, m × k.
        Q: embeddings of items, n × k.
        test: scipy.sparse, m × n; stored entries with a value above 0 are the relevant pairs.
        train: scipy.sparse, m × n; every stored entry is a training pair.
        metrics: names of metrics, see docs/metrics.md.
        exclude_train: whether to leave training pairs out of the ranking; test pairs that are training pairs then do
            not count.
        exclude: scipy.sparse, m × n; additional pairs to leave out in the same way.
        by: "popularity" adds each metric for the test items of each tercile of training popularity, "activity" for the
            users of each tercile of training activity, as in ``"recall@20 popularity=low"``.
        popularity: scipy.sparse, any number of rows × n: the training pairs from which the popularity of items is
            counted, for psp, novelty and by="popularity"; by default ``train``. It is needed for users who were not in
            the training data, whose ``train`` has their histories or nothing.
        propensity: A and B of psp.
        block_bytes: largest memory for scores.
        processes: the processes that divide the users; P, test, train, exclude and popularity are then those of this
            process's users, and Q is that of all items.

    Returns:
        Metrics by name; attributes of the result have the numbers of users and pairs, and of those left out.
    """
    wanted = parse(metrics)
    P, Q = embeddings(P, Q)
    shape = (len(P), len(Q))
    truth = _relevant("test", test, shape)
    seen = None if train is None else canonical("train", train, shape)
    known = seen if popularity is None else _of_items("popularity", popularity, shape[1])
    if by is not None:
        check.choice("by", by, ("popularity", "activity"))
        if (known if by == "popularity" else seen) is None:
            check.fail("train", "None", f"the training pairs, for by={by!r}")
    left_out = [seen] if check.flag("exclude_train", exclude_train) and seen is not None else []
    left_out += [] if exclude is None else [canonical("exclude", exclude, shape)]
    given = truth.nnz
    exclude = union(*left_out) if len(left_out) > 1 else left_out[0] if left_out else None
    if exclude is not None:
        truth = without(truth, exclude)
    users = np.flatnonzero(np.diff(truth.indptr))
    if not processes.totals(float(len(users)))[0]:
        check.fail("test", f"{given} pairs, {given - truth.nnz} of them in train", "at least one pair that is not")
    truth = truth[users]
    exclude = None if exclude is None else exclude[users]
    counted = by == "popularity" or any(metric.kind in ("psp", "novelty") for metric in wanted)
    degrees = _degrees(known if counted else None, processes)
    tally = Tally(wanted, truth, processes, _facts(wanted, degrees, propensity, Q, "train"))
    if by == "popularity" and degrees is not None:
        tally.break_down(by, degrees[0])
    elif by is not None and seen is not None:
        tally.break_down(by, np.diff(seen.indptr)[users].astype(np.int64))
    k = min(max(metric.k for metric in wanted), shape[1])
    kinds = {metric.kind for metric in wanted if not metric.k}
    ranking = Ranking(P, Q, exclude, ranked=users)
    if kinds:  # needs whole rows of scores
        for start, stop, scores in ranking.scores(block_bytes):
            if k:
                tally.add_lists(start, best(scores, k)[0].cpu().numpy())
            if "auc" in kinds:
                tally.add_ranks(start, stop, above(scores, truth, start, stop), exclude)
            if "mrr" in kinds:
                tally.add_first(start, stop, scores)
    else:
        for start, _, columns, _ in ranking.lists(k, block_bytes):
            tally.add_lists(start, columns)
    return tally.result(users, shape[0] - len(users), given - truth.nnz)


def _facts(
    wanted: list[Metric],
    degrees: tuple[NDArray[np.int64], int] | None,
    propensity: tuple[float, float],
    Q: Tensor | None,
    argument: str,
) -> ItemFacts:
    """The properties of items that the metrics need."""
    names = {metric.kind: metric.name for metric in wanted}
    for kind in ("psp", "novelty"):
        if kind in names and degrees is None:
            check.fail(argument, "None", f"the training pairs, for {names[kind]!r}")
    if not isinstance(propensity, Sequence) or isinstance(propensity, str) or len(propensity) != 2:
        check.fail("propensity", repr(propensity), "two numbers, A and B")
    a = check.number("propensity A", propensity[0], minimum=0.0)
    b = check.number("propensity B", propensity[1], above=0.0)
    worth = information = directions = None
    if degrees is not None and "psp" in names:
        worth = inverse_propensities(*degrees, a, b)
    if degrees is not None and "novelty" in names:
        information = self_information(*degrees)
    if "diversity" in names:
        if Q is None:
            check.fail("embeddings", "None", f"embeddings of the items, for {names['diversity']!r}")
        lengths = torch.linalg.vector_norm(Q, dim=1, keepdim=True)
        directions = torch.where(lengths > 0, Q / lengths, torch.zeros_like(Q)).cpu().numpy()
    return ItemFacts(worth, information, directions)


def _degrees(known: sp.csr_matrix | None, processes: Group) -> tuple[NDArray[np.int64], int] | None:
    """Numbers of training pairs of each item and of training users, over all processes."""
    if known is None:
        return None
    counts = torch.from_numpy(np.bincount(known.indices, minlength=known.shape[1]))
    return processes.sum_(counts).numpy(), int(processes.totals(float(known.shape[0]))[0])


def _of_items(name: str, pairs: SparseMatrix, n: int) -> sp.csr_matrix:
    """Pairs of any users with n items."""
    found = canonical(name, pairs)
    if found.shape[1] != n:
        check.fail(name, f"shape {found.shape}", f"{n} columns, one for each item")
    return found


def _relevant(name: str, pairs: SparseMatrix, shape: tuple[int, int] | None = None) -> sp.csr_matrix:
    """The entries with a value above 0."""
    found = canonical(name, pairs, shape)
    return selected(found, found.data > 0)


def _check_lists(lists: NDArray[np.int64], n: int, k: int) -> None:
    if lists.shape[1] < min(k, n):
        check.fail("recommended", f"{lists.shape[1]} columns", f"at least {min(k, n)} for these metrics")
    if lists.size and (lists.min() < -1 or lists.max() >= n):
        check.fail("recommended", f"columns from {lists.min()} to {lists.max()}", f"item columns below {n}, or -1")
    ordered = np.sort(lists, axis=1)
    twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(1)
    if twice.any():
        check.fail("recommended", f"an item twice in row {int(twice.argmax())}", "each item once in a row")


PARTS = 20


def deal(count: int, seed: int) -> NDArray[np.int64]:
    """The part of each entity, 0 to G − 1; the sizes of parts differ by at most one."""
    return np.random.default_rng(seed).permutation(np.arange(count, dtype=np.int64) % max(1, min(PARTS, count)))


def means_without(values: NDArray[np.float64], parts: NDArray[np.int64]) -> list[float]:
    """The mean of the values without each part in turn, ignoring NaN; 0 if no value is left."""
    known = np.isfinite(values)
    values, of, count = values[known], parts[known], int(parts.max(initial=-1)) + 1
    sums, sizes = np.bincount(of, values, minlength=count), np.bincount(of, minlength=count)
    left = len(values) - sizes
    found = np.divide(values.sum() - sums, left, out=np.zeros(count), where=left > 0)
    return [float(value) for value in found]


def standard_error(one: Sequence[float], other: Sequence[float]) -> float:
    """The standard error of the difference of two metrics, from their values without each part; inf for one part."""
    if len(one) != len(other):
        raise ValueError(f"other: got {len(other)} parts, expected {len(one)}")
    differences, count = np.subtract(one, other), len(one)
    if count < 2:
        return math.inf
    return float(np.sqrt((count - 1) / count * np.square(differences - differences.mean()).sum()))
