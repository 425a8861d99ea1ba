"""Kronecker factors of one tower's layers: A (moments of a layer's inputs) and S (curvature at its outputs).

Given H, the k × k curvature at the tower's output averaged over entities, and a weight r_i for each entity, a layer
with inputs x_i has the Gauss-Newton block A ⊗ S with A = Σ_i r_i x_i x_iᵀ (the bias is an input of 1). S is H at the
last layer and is propagated down as

    S ← WᵀSW              through a linear layer
    S ← S ∘ mean(φ′φ′ᵀ)   through an elementwise activation
    S ← mean(g gᵀ)        through any other step, where g are random vectors with covariance S, back-propagated

all means weighted by r_i. Each step computes its own part (``moment`` and ``pull_curvature`` in steps.py). For ids and
sparse features A is reduced to its diagonal, so that tables are preconditioned row by row. Parameters of steps without
a formula get the diagonal Σ_i r_i J_iᵀ S J_i, from the same random vectors. Moments use about two thousand rows.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property, partial

import torch
from torch import Tensor

from gramtower.distributed.group import SINGLE, Group
from gramtower.engine.towers.layer_factors import Factors, Noise
from gramtower.engine.towers.linearization import Linearization
from gramtower.engine.towers.steps import CurvatureContext, Moment, Sample

_ROWS = 2048  # rows for estimating the moments of a layer's inputs and slopes


@torch.no_grad()
def tower_factors(
    tower: Linearization,
    H: Tensor,
    weight: Tensor,
    trainable: Collection[str],
    draws: int,
    seed: int,
    group: Group = SINGLE,
    owned: Collection[str] = (),
) -> Factors:
    """The factors of one tower from its output curvature H and entity weights (mean 1).

    Args:
        tower: the tower at θ.
        H: k × k, positive semidefinite, float64.
        weight: r, one number for each entity.
        trainable: local names of the parameters to precondition.
        draws: random vectors for each entity, for steps without a formula.
        seed: seed of the random vectors.
        group: the processes that divide the entities.
        owned: local names of tables that hold only this process's rows.
    """
    steps, features = tower.steps, tower.features
    stride = max(1, features.total // _ROWS)
    moments = _moments(tower, weight, stride)
    held = set(owned)
    if features.kind == "ids" and group.size > 1:
        held.update(steps[0].id_tables(tower.side, features))  # also those that are not trained
    for step, moment in zip(steps, moments, strict=True):
        step.reduce_moment(moment, group, held)
    total_weight = group.sum_(weight.sum(dtype=torch.float64))
    factors, S = Factors(trainable), H
    sample = _Sampled(tower, weight, stride)
    for index in range(len(steps) - 1, -1, -1):
        context = CurvatureContext(
            values=tower.values,
            factors=factors,
            weight=weight,
            total_weight=total_weight,
            rows=features.total,
            group=group,
            owned=owned,
            noise=Noise(seed, index, draws),
            sample=partial(sample.of, index),
            is_first=index == 0,
        )
        S = steps[index].pull_curvature(S, moments[index], context)
    for factor in factors.layers:
        if factor.weight in owned:
            factor.mean = group.sum_(factor.A.sum()) / features.total
    return factors


class _Sampled:
    """Every ``stride``-th row of all processes, run forward when a step first needs them."""

    def __init__(self, tower: Linearization, weight: Tensor, stride: int) -> None:
        self._tower, self._weight, self._stride = tower, weight, stride

    def of(self, index: int) -> Sample:
        """The rows, with the values that a step kept of them."""
        weight, numbers, saved = self._run
        return Sample(weight, numbers, saved[index])

    @cached_property
    def _run(self) -> tuple[Tensor, Tensor, list[object]]:
        tower, features = self._tower, self._tower.features
        rows = slice(-features.first % self._stride, None, self._stride)
        numbers = features.first + torch.arange(features.rows, device=self._weight.device)[rows]
        saved = tower.forward_some(rows) if len(numbers) else tower.forward_block(0, 0)[1]
        return self._stride * self._weight[rows], numbers, saved


def _moments(tower: Linearization, weight: Tensor, stride: int) -> list[Moment]:
    """The moments of all steps over this process's rows.

    Matrices are estimated from every ``stride``-th row of all processes, independent of blocks and processes. If
    activations were not kept, only those rows are recomputed, and diagonals are computed from the features of all rows.
    A first step differentiated by autodiff may have tables anywhere, so all its rows are recomputed.
    """
    features, steps = tower.features, tower.steps
    skipped = -features.first % stride
    moments: list[Moment] = [None] * len(steps)

    def add(rows: slice, saved: list[object], some: slice) -> None:
        for index, (step, kept) in enumerate(zip(steps, saved, strict=True)):
            moments[index] = _sum(moments[index], step.moment(kept, weight[rows], some, stride))

    by_autodiff = features.kind != "dense" and not steps[0].analytic
    if tower.plan.keep or by_autodiff or skipped >= features.rows:
        for start, stop, saved in tower.saved_blocks():
            add(slice(start, stop), saved, slice(-(features.first + start) % stride, None, stride))
        return moments
    step = stride * tower.plan.rows
    for start in range(skipped, features.rows, step):
        some = slice(start, start + step, stride)
        add(some, tower.forward_some(some), slice(None))
    if features.kind != "dense":
        full: Moment = None
        for start, stop in tower.blocks():
            full = _sum(full, steps[0].input_moment(tower.inputs(start, stop), weight[start:stop]))
        moments[0] = _preferred(full, moments[0])
    return moments


def _sum(a: Moment, b: Moment) -> Moment:
    """The sum of moments, part by part; None counts as zero."""
    if a is None or b is None:
        return b if a is None else a
    if isinstance(a, list) or isinstance(b, list):
        return [_sum(x, y) for x, y in zip(a, b, strict=True)]
    return a + b


def _preferred(a: Moment, b: Moment) -> Moment:
    """The parts of ``a``, or those of ``b`` where ``a`` has None."""
    if isinstance(a, list) and isinstance(b, list):
        return [_preferred(x, y) for x, y in zip(a, b, strict=True)]
    return b if a is None else a
