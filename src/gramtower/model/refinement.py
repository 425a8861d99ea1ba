"""Known entities after training: what their tower says of them, moved by their own pairs.

A tower sees only features. An entity's own pairs show what features do not, such as how popular it is. With the
embeddings q_j of the other side as training left them, that of left entity i becomes

    p_i = f(u_i) + d_i,    min over d of  Σ_(i,j)∈O ℓ(R_ij, p_iᵀq_j) + ½ω Σ_∉O a_i b_j (ỹ − p_iᵀq_j)² + ½κ Σ_i ‖d_i‖²

and likewise on the right. κ = 2 mean_O(ℓ″ at ŷ = 0) mean_j ‖q_j‖² is the curvature that two pairs have on average: what
features say counts as much as two pairs, so that an entity with few of them stays where its tower puts it. New entities
have no d. The towers are trained without d: ids trained next to features would explain what features should learn.

It is a problem over ids (eq:prob), convex, whose towers are rows that stay as they are and, on one side, a table added
to them. Cost: some ten Gauss-Newton products a side, O(|O|k + (m+n)k²) each, and no pass through a tower. Memory: the
embeddings, and training of a table as large as one side's.

The id vector that a new entity is expected to have, predicted from its features.

A tower that sees ids next to features learns a vector z_j for the id of each trained entity. A new entity has no such
vector, and zero is a poor guess: what the features of popular entities say ends up in their own vectors. This module
predicts the vector by a ridge regression over the trained entities with weights d_j,

    z_j ≈ μ + Bᵀx_j        d_j = (number of pairs of entity j)^power for right entities, 1 for left ones

and moves the prediction within the first layer from the columns of ids to those of features and to the bias:

    W_features += B,    bias += μ,    W_id[j] −= (μ + Bᵀx_j) / factor

The output for a trained entity stays the same, and an entity without an id gets the predicted vector wherever the tower
is used: in answers, after ``add``, in the file, in an export.

The power sets how popular a new right entity is expected to be. It is the largest from 0 to 1 with which new entities
take no more than their share of lists: a fifth of the trained right entities is embedded without ids, by a regression
over the others, and may fill up to a fifth of the places in the lists of a sample of left entities.

Histories are no regressors. A tower without a bias (no hidden layer) has no place for μ, so that μ = 0. Towers of other
kinds, which begin with another layer than :class:`~gramtower.InputLinear` or share parameters with the other side, stay
as they are. Cost: products with the feature rows, about that of an iteration of training. Checked by
tests/test_new_entities.py; benchmarks/bench_new_items.py measures what it does to rankings.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gramtower.data.features import Features, SparseBlock, as_features
from gramtower.distributed.group import Group
from gramtower.distributed.shards import Rows
from gramtower.engine.kernels import select
from gramtower.engine.objective.problem import Problem
from gramtower.engine.towers.layers import InputLinear
from gramtower.engine.towers.mlp import undrawn_towers
from gramtower.engine.towers.parameters import Parameters
from gramtower.engine.towers.towers import Towers
from gramtower.model.feature_spec import TowerWidths
from gramtower.model.fit_data import FitData
from gramtower.optim.solvers import NewtonKron
from gramtower.training.loop import minimize

_WORTH = 2.0  # pairs that what features say of an entity counts as
_ITERATIONS, _DAMPING = 3, 1e-3  # convex: the model is right from the start
_PAIRS = 1 << 22  # pairs whose curvature is computed at a time
Sides = tuple[Tensor, Tensor]


class _Moved(nn.Module):
    """Rows that stay as they are, and a multiple of those of a trained table that starts at ``start``."""

    def __init__(self, rows: Tensor, start: Tensor, scale: float) -> None:
        super().__init__()
        self.fixed, self.scale = _table(rows, trained=False), scale
        self.own = _table(start, trained=True)

    def forward(self, ids: Tensor) -> Tensor:
        """Both together."""
        rows: Tensor = self.fixed(ids) + self.scale * self.own(ids)
        return rows


def _table(rows: Tensor, trained: bool) -> nn.Embedding:
    return nn.Embedding(rows.shape[0], rows.shape[1], _weight=rows, _freeze=not trained)


def refine(problem: Problem, embeddings: Sides, sides: tuple[bool, bool]) -> Sides:
    """The embeddings of local left and right entities, those of some sides moved.

    Args:
        problem: the pairs, ids on both sides, λ = 1 and μ = 0.
        embeddings: P and Q as training left them, on the device to compute on.
        sides: for left and right, whether they are moved; each while the other one is as it was.
    """
    moved, curvature = list(embeddings), _mean_curvature(problem)
    for side in (0, 1):
        if sides[side] and (kappa := _WORTH * curvature * _mean_square(problem, embeddings[1 - side])) > 0:
            start = torch.zeros_like(embeddings[side])
            towers = _towers(embeddings, side, start, 1 / math.sqrt(kappa))  # λ = 1 on the table is κ on its multiple
            minimize(problem, towers, NewtonKron(damping=_DAMPING), _ITERATIONS)
            point = problem.at(towers)
            moved[side] = (point.P, point.Q)[side].clone()
    return moved[0], moved[1]


def least_budget(problem: Problem, dim: int, device: torch.device, sides: tuple[bool, bool]) -> int:
    """The smallest memory budget that :func:`refine` keeps to in one process with embeddings of a size, in bytes."""
    rows, zero = (problem.shards.left, problem.shards.right), torch.zeros((), device=device)
    shapes = zero.expand(rows[0].count, dim), zero.expand(rows[1].count, dim)  # tables that take no memory
    return max(problem.least_budget(_towers(shapes, side, shapes[side], 1.0)) for side in (0, 1) if sides[side])


def _towers(embeddings: Sides, side: int, start: Tensor, scale: float) -> Towers:
    moved, other = _Moved(embeddings[side], start, scale), _table(embeddings[1 - side], trained=False)
    return Towers(moved, other) if side == 0 else Towers(other, moved)


def _mean_square(problem: Problem, rows: Tensor) -> float:
    """‖q_j‖² of the rows of all processes on average."""
    square, count = problem.shards.group.totals(float(rows.square().sum(dtype=torch.float64)), float(len(rows)))
    return square / max(1.0, count)


def _mean_curvature(problem: Problem) -> float:
    """w ℓ″(R, 0) of the pairs of all processes on average; 0 where no pair says anything."""
    total = 0.0
    for start in range(0, len(problem.labels), _PAIRS):
        part = slice(start, start + _PAIRS)
        labels = torch.from_numpy(problem.labels[part]).double()
        second = problem.loss.second(labels, torch.zeros_like(labels))
        if problem.pair_weights is not None:
            second = second * torch.from_numpy(problem.pair_weights[part])
        total += float(second.sum())
    return problem.shards.group.totals(total)[0] / max(1, problem.observed)


RIDGE = 5.0  # penalty on B; feature rows have about length one, weights have mean one
_STEPS, _TOLERANCE = 50, 1e-3  # of the conjugate gradient
_HALVINGS = 4  # of the range of powers
_BLOCK = 1 << 16  # rows of a product that are in memory at a time
_ASKED, _PLACES, _SHARE = 256, 20, 0.2  # left entities and places of their lists, and the entities taken for new ones


@dataclass(frozen=True, eq=False)
class ExpectedIds:
    """The regression of one side's id vectors on its features.

    Attributes:
        side: "left" or "right".
        first: the number of the first column of ids.
        factor: the entry of an id in its own column.
        columns: the columns of tables and matrices.
        rows: these columns of the local entities.
        counts: the pairs of the local entities on the right, ones on the left.
        place: the range of the local entities.
        group: the processes.
    """

    side: str
    first: int
    factor: float
    columns: Tensor
    rows: sp.csr_matrix
    counts: NDArray[np.float64]
    place: Rows
    group: Group

    @classmethod
    def of(cls, side: str, data: FitData) -> ExpectedIds | None:
        """The regression for the data of a fit; None where the tower does not see ids next to something else.

        All processes must call it together.
        """
        index = ("left", "right").index(side)
        parts, place, group = data.inputs[index].parts, getattr(data.shards, side), data.shards.group
        ends = np.cumsum([part.width for part in parts])
        spans = [(part, np.arange(end - part.width, end)) for part, end in zip(parts, ends, strict=True)]
        own = next(((part, span) for part, span in spans if part.kind == "id"), None)
        if own is None or len(parts) == 1:
            return None
        columns = np.concatenate([span for part, span in spans if part.kind not in ("id", "history")] or [ends[:0]])
        counts = np.ones(place.count)
        if side == "right":
            pairs = np.bincount(data.matrix.indices, minlength=place.total).astype(np.float64)
            counts = place.local_rows("pairs", group.sum_(torch.from_numpy(pairs)).numpy())
        rows = sp.csr_matrix(data.features[index])[:, columns]
        return cls(side, int(own[1][0]), own[0].factor, torch.from_numpy(columns), rows, counts, place, group)

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
        return self.group.copy_from_first_(mean), self.group.copy_from_first_(B)

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
    """Let fitted towers embed entities without an id with the vector that is expected of them.

    All processes must call it together.

    Args:
        towers: of both sides, changed in place.
        data: that they were fitted on.
        left: the embeddings of the local left entities.
        right: the embeddings of all right entities.
    """
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
        first = sum(part.width for part in itertools.takewhile(lambda part: part.kind != "id", inputs.parts))
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
    old = ~new[seen_columns]  # nobody has seen a new entity

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
    module = towers.left if side == "left" else towers.right
    layer = module[0] if isinstance(module, nn.Sequential) and len(module) else None
    if not isinstance(layer, InputLinear) or towers.share_parameters:
        return None
    return layer if all(parameter.requires_grad for parameter in layer.parameters()) else None
