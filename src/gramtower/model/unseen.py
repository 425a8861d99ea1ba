"""Entities without pairs: validation on entities held out of a fit, and the id vectors expected of new ones.

Held-out entities are no rows of the part to learn from: an empty row would be learned as an entity that goes with
nothing. Scalings of features are learned from only that part (a FeatureTable keeps the encoding it was made with).
Where both sides are one set, held-out entities are on neither side of it.

    side="left"     the known right entities are ranked for each held-out left one
    side="right"    the held-out right entities are ranked among themselves for each known left one
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from numbers import Real

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from gramtower._util import checks as check
from gramtower.data.ids import index_of, join
from gramtower.data.interactions import Interactions
from gramtower.data.pairs import Features, MatrixLike, SparseBlock, as_features
from gramtower.data.splits import held_out
from gramtower.data.tables import FeaturesLike
from gramtower.distributed.group import Group, current_group
from gramtower.distributed.partition import Shard
from gramtower.distributed.shards import Rows, Shards
from gramtower.engine.kernels import select
from gramtower.engine.objective.problem import Point
from gramtower.engine.towers.layers import InputLinear, split_first
from gramtower.engine.towers.mlp import undrawn_towers
from gramtower.engine.towers.parameters import Parameters
from gramtower.engine.towers.towers import Towers
from gramtower.metrics import Scores, evaluate_embeddings
from gramtower.metrics.embedding_metrics import deal, means_without
from gramtower.model.feature_spec import NAMES, Both, GivenFeatures, IdArray, TowerWidths
from gramtower.model.fit_data import FitData, FitPairs, align, as_interactions
from gramtower.model.settings import ModelSettings
from gramtower.training.checkpoint import features_text, sparse_digest

SIDES = ("left", "right")


@dataclass(frozen=True, eq=False)
class Unseen:
    """Held-out entities of one side, with their pairs and features."""

    side: str  # theirs, "left" or "right"
    train: Interactions  # the pairs to learn from, with no entity that has none
    features: Both  # what describes the entities of ``train``, left and right, as ``TwoTower.fit`` takes it
    # rows of the held-out entities for each table or matrix among the features of their side, not scaled
    described: list[MatrixLike]
    truth: sp.csr_matrix  # their pairs: held-out left × known right entities, or known left × held-out right ones

    @property
    def count(self) -> int:
        return int(self.truth.shape[SIDES.index(self.side)])

    def validator(self, metric: str, data: FitData) -> UnseenValidator:
        """The metric of a point of a fit on :attr:`train`, whose scalings the held-out entities get."""
        rows = data.inputs[SIDES.index(self.side)].encoded(self.side, self.described, self.count)
        described = as_features(self.side, rows, self.count)
        return UnseenValidator(metric, self.side, described, self.truth, data.matrix, ExpectedIds.of(self.side, data))


@dataclass(frozen=True, eq=False)
class Validator:
    """The metric of rankings at a point of a fit."""

    metric: str  # its name

    def __call__(self, point: Point) -> float:
        return float(self.scores(point, (self.metric,))[self.metric])

    def scores(self, point: Point, metrics: Sequence[str], known: tuple[Tensor, Tensor] | None = None) -> Scores:
        """Some metrics, of the embeddings of known entities if they are given."""
        raise NotImplementedError

    def without(self, point: Point, seed: int) -> list[float]:
        """The metric without each part of the users, drawn with a seed; empty for one that is not a mean over users."""
        values = self.scores(point, (self.metric,)).per_user.get(self.metric)
        return [] if values is None else means_without(values, deal(len(values), seed))


@dataclass(frozen=True, eq=False)
class UnseenValidator(Validator):
    """The metric of rankings for, or of, entities that were held out; computed where the towers are."""

    side: str  # of the held-out entities
    rows: Features  # their features as the tower of that side takes them
    truth: sp.csr_matrix  # their pairs; see :class:`Unseen`
    # the training pairs, from which the popularity of right entities is counted. Held-out ones have none
    train: sp.csr_matrix
    # predicts id vectors of held-out entities; None where the tower sees no ids next to their features
    expected: ExpectedIds | None = None

    def scores(self, point: Point, metrics: Sequence[str], known: tuple[Tensor, Tensor] | None = None) -> Scores:
        return self._scores(*self._embeddings(point, known), self.truth, metrics)

    def without(self, point: Point, seed: int) -> list[float]:
        """The metric without each part of the held-out entities, dealt with a seed.

        Those of the right side are left out of the rankings, so that users are ranked once for each part; users
        whose only pairs are with them do not count then, and the metric is 0 where none is left. Empty for a metric of
        held-out left entities together, not of single ones.
        """
        if self.side == "left":
            return super().without(point, seed)
        P, Q = self._embeddings(point)
        parts, columns = deal(self.truth.shape[1], seed), sp.csc_matrix(self.truth)
        found = []
        for part in range(int(parts.max()) + 1):
            kept = np.flatnonzero(parts != part)
            rows, truth = Q[torch.from_numpy(kept).to(Q.device)], sp.csr_matrix(columns[:, kept])
            measured = (truth.data > 0).any()
            found.append(float(self._scores(P, rows, truth, (self.metric,))[self.metric]) if measured else 0.0)
        return found

    def _embeddings(self, point: Point, known: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        (P, Q), towers, parameters = known or (point.P, point.right_rows), point.evaluation.towers, point.parameters
        if self.expected is not None:
            parameters = self.expected.in_parameters(towers, parameters, self.expected.weights(0.5))
        new = towers.embed(self.side, self.rows, parameters)
        return (new, Q) if self.side == "left" else (P, new)

    def _scores(self, P: Tensor, Q: Tensor, truth: sp.csr_matrix, metrics: Sequence[str]) -> Scores:
        known = self.train if self.side == "left" else sp.csr_matrix(truth.shape, dtype=np.float32)
        return evaluate_embeddings(P, Q, truth, metrics=metrics, popularity=known)

    def fingerprint(self, shards: Shards) -> dict[str, str]:
        x = self.truth
        digest = sparse_digest(x.indptr, x.indices, x.data, 0, x.shape[1]).text(shards.group)
        text = f"held-out {self.side} entities {features_text(self.rows, shards.group)}with pairs {digest}"
        return {"metric": self.metric, "validation": text}


def hold_out_entities(
    settings: ModelSettings, pairs: FitPairs, features: Both, share: object, side: object, seed: int
) -> Unseen:
    """A share of the entities of a side held out with all their pairs, drawn with the seed."""
    name = check.choice("validation_side", side, SIDES)
    axis = SIDES.index(name)
    _refuse_others(settings, pairs, features[axis], share, name)
    both = [GivenFeatures(side, given) for side, given in zip(SIDES, features, strict=True)]
    whole = as_interactions(pairs)
    train, test = split_entities(whole, share, name, seed)
    kept = [join(new, index_of(old)) for new, old in zip(_ids(train), _ids(whole), strict=True)]
    new = join(_ids(test)[axis], index_of(_ids(whole)[axis]))
    inner = [one.take(own, rows) for one, own, rows in zip(both, _ids(whole), kept, strict=True)]
    described = both[axis].encode(_ids(whole)[axis], new)
    truth = _known(test, train, axis)
    if not (truth.data > 0).any():
        given = f"{share} of the {name} entities, all of whose pairs are with entities that no others have"
        check.fail("validation", given, "another share")
    return Unseen(name, train, (inner[0], inner[1]), described, truth)


def split_entities(pairs: Interactions, share: object, side: str, seed: int) -> tuple[Interactions, Interactions]:
    """Pairs of the other entities, and of those held out.

    Where both sides are one set, the latter are on no side of the former, and pairs of two of them are in neither.
    """
    axis = SIDES.index(side)
    split = held_out(pairs, side, check.number("validation", share), seed=seed)
    if not pairs.one_set:
        return split.train, split.test
    gone = _ids(pairs)[axis][(split.held_out_users, split.held_out_items)[axis]]
    train, test = (_without_others(part, 1 - axis, gone) for part in (split.train, split.test))
    for part, what in ((train, "to learn from"), (test, "to find")):
        if not len(part):
            check.fail("validation", f"{share} of the entities, which leaves no pair {what}", "another share")
    return train, test


def unseen_pairs(pairs: Interactions, share: float, side: str, seed: int) -> int:
    """How many pairs :func:`hold_out_entities` asks about: those with known entities of the other side."""
    axis = SIDES.index(check.choice("validation_side", side, SIDES))
    train, test = split_entities(pairs, share, side, seed)
    return int(_known(test, train, axis).nnz)


def _without_others(pairs: Interactions, axis: int, gone: IdArray) -> Interactions:
    strange = join(_ids(pairs)[axis], index_of(gone)) < 0
    matrix = pairs.matrix
    kept = strange[matrix.indices] if axis == 1 else np.repeat(strange, np.diff(matrix.indptr))
    return pairs.subset(kept).without_empty()


def _refuse_others(settings: ModelSettings, pairs: FitPairs, features: FeaturesLike, share: object, side: str) -> None:
    if (processes := current_group().size) > 1:
        check.fail("validation_side", f"{side!r} in {processes} processes", "None, or one process")
    if isinstance(pairs, Shard):
        check.fail("validation_side", repr(side), "None, or Interactions: read_part reads for several processes")
    if not isinstance(share, Real) or isinstance(share, bool):
        expected = f"a share of the {side} entities, such as 0.1, with validation_side={side!r}"
        check.fail("validation", "None" if share is None else type(share).__name__, expected)
    if check.number("validation", share, above=0.0) >= 1:
        check.fail("validation", share, f"a share of the {side} entities, above 0 and below 1")
    parts = GivenFeatures(side, features).parts
    if all(part is None or isinstance(part, str) for part in parts):
        seen = " + ".join("id" if part is None else str(part) for part in parts) or "nothing"
        given = f"{side!r} with {side}_features of {seen}"
        check.fail("validation_side", given, f"{side}_features with a table or a matrix, which describes new entities")
    for name in ("left_weights", "right_weights"):
        if not isinstance(getattr(settings, name), (str, type(None))):
            check.fail("validation_side", f"{side!r} with {name} as an array", "weights by name, such as 'degree^0.5'")
    if settings.factors is not None:
        check.fail("validation_side", f"{side!r} with imputed as two arrays", "a number or 'fitted'")


def _ids(pairs: Interactions) -> tuple[IdArray, IdArray]:
    return pairs.left_ids, pairs.right_ids


def _known(test: Interactions, train: Interactions, axis: int) -> sp.csr_matrix:
    """Pairs of held-out entities with those entities of the other side that are in ``train``, in the rows of both."""
    ids = (test.left_ids, train.right_ids) if axis == 0 else (train.left_ids, test.right_ids)
    return align("validation", test, ids, (len(ids[0]), len(ids[1]))).pairs


RIDGE = 5.0  # penalty on B; feature rows have about length one, weights have mean one
_STEPS, _TOLERANCE = 50, 1e-3  # of the conjugate gradient
_HALVINGS = 4  # of the range of powers
_BLOCK = 1 << 16  # rows of a product that are in memory at a time
_ASKED, _PLACES, _SHARE = 256, 20, 0.2  # left entities and places of their lists, and the entities taken for new ones


@dataclass(frozen=True, eq=False)
class ExpectedIds:
    """The regression of one side's id vectors on its features, which gives new entities the id vector expected of them.

    Zero is a poor guess of a new entity's id vector z_j: what the features of popular entities say ends up in their own
    vectors. A ridge regression over the trained entities with weights d_j predicts it,

        z_j ≈ μ + Bᵀx_j        d_j = (number of pairs of entity j)^power for right entities, 1 for left ones

    and the prediction moves within the first layer from the columns of ids to those of features and to the bias:

        W_features += B,    bias += μ,    W_id[j] −= (μ + Bᵀx_j) / factor

    The output for trained entities stays the same. The power is the largest from 0 to 1 with which new right entities
    take no more than their share of lists; see :func:`_power`. Histories are no regressors, and μ = 0 without a bias.
    Towers that begin with another layer than :class:`~gramtower.InputLinear` or share parameters stay as they are.
    """

    side: str  # "left" or "right"
    first: int  # the number of the first column of ids
    factor: float  # the entry of an id in its own column
    columns: Tensor  # the columns of tables and matrices
    rows: sp.csr_matrix  # these columns of the local entities
    counts: NDArray[np.float64]  # the pairs of the local entities on the right, ones on the left
    place: Rows  # the range of the local entities
    group: Group  # the processes

    @classmethod
    def of(cls, side: str, data: FitData) -> ExpectedIds | None:
        """The regression for a fit, or None without ids next to features; all processes must call it together."""
        index = ("left", "right").index(side)
        inputs, place, group = data.inputs[index], getattr(data.shards, side), data.shards.group
        own = next(((part, span.start) for part, span in inputs.spans if part.kind == "id"), None)
        if own is None or len(inputs.parts) == 1:
            return None
        widths = [part.width for part in inputs.parts]
        columns = np.flatnonzero(np.repeat([part.kind not in NAMES for part in inputs.parts], widths))
        counts = np.ones(place.count)
        if side == "right":
            pairs = np.bincount(data.matrix.indices, minlength=place.total).astype(np.float64)
            counts = place.local_rows("pairs", group.sum_(torch.from_numpy(pairs)).numpy())
        rows = sp.csr_matrix(data.features[index])[:, columns]
        return cls(side, own[1], own[0].factor, torch.from_numpy(columns), rows, counts, place, group)

    def weights(self, power: float, kept: NDArray[np.bool_] | None = None) -> Tensor:
        """Weights of the local entities, zero where not ``kept``; their mean over all entities is one."""
        d = np.where(self.counts > 0, self.counts, 0.0) ** power * (self.counts > 0)
        d = d if kept is None else d * kept
        (total,) = self.group.totals(float(d.sum()))
        return torch.from_numpy(d * (self.place.total / max(total, 1e-30))).float()

    def predict(self, weight: Tensor, d: Tensor, centred: bool) -> tuple[Tensor, Tensor]:
        """μ and B for a first layer; μ is zero unless ``centred``. All processes must call it together."""
        own = weight[self.first + self.place.first : self.first + self.place.stop]
        diagonal = self.group.sum_(torch.from_numpy(self._squares @ d.numpy()).float()) + RIDGE
        d, scale = d.to(own), diagonal.to(own)[:, None]
        mean = self.factor * self.group.sum_(d @ own) / self.place.total if centred else torch.zeros_like(own[0])
        R = own.new_zeros(len(self.columns), own.shape[1])
        for rows, block in self._blocks(own):
            target = d[rows, None] * (self.factor * own[rows] - mean)
            select(own.device).right_sum(block.pattern, block.values, target, R)
        B, R = torch.zeros_like(R), self.group.sum_(R)
        wanted, tiny = _TOLERANCE * float(R.norm()), torch.finfo(R.dtype).tiny
        P, rho = R / scale, (R * R / scale).sum(0)
        for _ in range(_STEPS):  # conjugate gradient, each column of B by itself
            if float(R.norm()) <= wanted:
                break
            AP = self._product(P, own, d)
            step = rho / (P * AP).sum(0).clamp(min=tiny)
            B += step * P
            R -= step * AP
            Z = R / scale
            rho, before = (R * Z).sum(0), rho
            P = Z + (rho / before.clamp(min=tiny)) * P
        return self.group.broadcast_(mean), self.group.broadcast_(B)

    def in_parameters(self, towers: Towers, parameters: Parameters, d: Tensor) -> Parameters:
        """Parameters that embed entities without an id with the expected vector; trained ones they embed wrongly."""
        if _first_layer(towers, self.side) is None:
            return parameters
        named, changed = towers.local_names(self.side), parameters.clone()
        bias = changed[named["0.bias"]] if "0.bias" in named else None
        self._add(changed[named["0.weight"]], bias, d)
        return changed

    def move_(self, layer: InputLinear, d: Tensor) -> None:
        """Move the prediction within a first layer; its output for trained entities stays the same."""
        mean, B = self._add(layer.weight, layer.bias, d)
        own = mean.repeat(self.place.count, 1)
        for rows, block in self._blocks(own):
            select(own.device).left_sum(block.pattern, block.values, B, own[rows])
        everyone = self.group.gather_rows(own, self.place.counts).wait()
        layer.weight[self.first : self.first + self.place.total] -= everyone / self.factor

    def _add(self, weight: Tensor, bias: Tensor | None, d: Tensor) -> tuple[Tensor, Tensor]:
        """Add the prediction to the columns of features and to the bias, in place; return μ and B."""
        mean, B = self.predict(weight, d, bias is not None)
        weight[self.columns.to(weight.device)] += B
        if bias is not None:
            bias += mean
        return mean, B

    def _product(self, P: Tensor, own: Tensor, d: Tensor) -> Tensor:
        """(FᵀDF + RIDGE·I) P over the features F of all processes."""
        found = torch.zeros_like(P)
        for rows, block in self._blocks(own):
            image = own.new_zeros(block.shape[0], P.shape[1])
            select(own.device).left_sum(block.pattern, block.values, P, image)
            select(own.device).right_sum(block.pattern, block.values, image.mul_(d[rows, None]), found)
        return self.group.sum_(found).add_(P, alpha=RIDGE)

    def _blocks(self, like: Tensor) -> Iterator[tuple[slice, SparseBlock]]:
        """Ranges of local entities with their features; none where there are only ids and histories."""
        for start in range(0, self.place.count if len(self.columns) else 0, _BLOCK):
            rows = slice(start, min(start + _BLOCK, self.place.count))
            block = self._features.block(rows.start, rows.stop, like.dtype, like.device)
            assert isinstance(block, SparseBlock)
            yield rows, block

    @cached_property
    def _features(self) -> Features:
        return as_features(f"{self.side}_features", self.rows, self.place.count)

    @cached_property
    def _squares(self) -> sp.csr_matrix:
        return sp.csr_matrix(self.rows.multiply(self.rows).T)


@torch.no_grad()
def move_expected_ids(towers: Towers, data: FitData, left: Tensor, right: Tensor) -> None:
    """Let towers embed entities without an id with the vector expected of them; all processes must call it together."""
    towers.unbind()
    for side in ("left", "right"):
        layer = _first_layer(towers, side)
        expected = None if layer is None else ExpectedIds.of(side, data)
        if expected is not None and layer is not None:
            power = 0.0 if side == "left" else _power(expected, towers, data, left, right)
            expected.move_(layer, expected.weights(power))


def with_feature_columns(towers: Towers, data: FitData) -> Towers:
    """Return linear towers over ids with further columns, all zero, for the features next to the ids of ``data``."""
    found = undrawn_towers(TowerWidths.of(*data.inputs), ((), ()), data.dim, data.activation).to(towers.device)
    for side, inputs in zip(("left", "right"), data.inputs, strict=True):
        table, wide = getattr(towers, side)[0].weight, getattr(found, side)[0].weight
        first = next(span.start for part, span in inputs.spans if part.kind == "id")
        wide.data.zero_()[first : first + len(table)] = table.detach()
    return found


def _power(expected: ExpectedIds, towers: Towers, data: FitData, left: Tensor, right: Tensor) -> float:
    """The largest power with which right entities taken for new ones fill no more than their share of lists."""
    rng, place, group = np.random.default_rng(0), expected.place, expected.group
    new = rng.random(place.total) < _SHARE
    here, parameters = new[place.first : place.stop], towers.parameters()
    known = sp.csr_matrix(data.features[1])[here]
    ids = np.ones(known.shape[1], dtype=np.float32)
    ids[expected.first : expected.first + place.total] = 0
    unnamed = as_features("right_features", sp.csr_matrix(known @ sp.diags(ids)), known.shape[0])
    counts = [int(new[a:b].sum()) for a, b in pairwise(place.bounds)]
    asked = np.sort(rng.permutation(data.shards.left.total)[:_ASKED])
    asked = data.shards.left.local(torch.from_numpy(asked)).numpy()
    seen = sp.csr_matrix(data.matrix[asked])
    k, mask, Q = min(_PLACES, -(-place.total // 10)), torch.from_numpy(new), right.clone()
    seen_rows, seen_columns = seen.nonzero()
    old = ~new[seen_columns]  # a new entity is in no training pair

    def fits(power: float) -> bool:
        changed = expected.in_parameters(towers, parameters, expected.weights(power, ~here))
        Q[mask] = group.gather_rows(towers.embed("right", unnamed, changed).to(Q), counts).wait()
        scores = left[torch.from_numpy(asked)] @ Q.T
        scores[seen_rows[old], seen_columns[old]] = -torch.inf
        taken = mask[scores.topk(k, 1).indices]
        places, those = group.totals(float(taken.numel()), float(taken.sum()))
        return bool(those <= new.mean() * places)

    if not new.any() or fits(1.0):
        return 1.0
    least, most = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (least + most) / 2
        least, most = (middle, most) if fits(middle) else (least, middle)
    return least


def _first_layer(towers: Towers, side: str) -> InputLinear | None:
    """The first layer of a tower if it is a trained :class:`InputLinear` of that tower only; otherwise None."""
    layer, _ = split_first(getattr(towers, side))
    if not isinstance(layer, InputLinear) or towers.share_parameters:
        return None
    return layer if all(parameter.requires_grad for parameter in layer.parameters()) else None
