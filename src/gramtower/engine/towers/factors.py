"""Kronecker factors of one tower's layers: A (moments of a layer's inputs) and S (curvature at its outputs).

Given H, the k × k curvature at the tower's output averaged over entities, and a weight r_i for each entity, a layer
with inputs x_i has the Gauss-Newton block A ⊗ S with A = Σ_i r_i x_i x_iᵀ (the bias is an input of 1). S is H at the
last layer and moves down as

    S ← WᵀSW              through a linear layer
    S ← S ∘ mean(φ′φ′ᵀ)   through an elementwise activation
    S ← mean(g gᵀ)        through any other step, g the back-propagation of vectors drawn with covariance S

Each step adds its own factors (``moment`` and ``pull_curvature`` in steps.py). For ids and sparse features A is kept to
its diagonal, so that tables are preconditioned row by row. Parameters of other steps that belong to no Linear or
Embedding get the diagonal Σ_i (J_iᵀ S J_i), from the same drawn vectors.

Cost: about one matrix product of rows × width² for each layer, over some two thousand rows; a forward and ``draws``
backward passes for modules without a formula. Checked by tests/test_kronecker.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from gramtower.distributed.group import SINGLE, Group
from gramtower.engine.towers.layer_factors import Factors, Noise
from gramtower.engine.towers.linearization import Linearization
from gramtower.engine.towers.steps import CurvatureContext

_ROWS = 2048  # enough rows to know the moments of a layer's inputs and slopes


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
        weight: r, one for each entity.
        trainable: local names of the parameters to precondition.
        draws: vectors drawn for each entity where a step has no formula.
        seed: for the draws.
        group: the processes whose entities count together.
        owned: local names of tables that hold this process's rows alone.
    """
    steps, features = tower.steps, tower.features
    moments: list[Tensor | None] = [None] * len(steps)
    stride = max(1, features.total // _ROWS)
    for rows, saved, some in _sampled_blocks(tower, stride):
        for index, (step, kept) in enumerate(zip(steps, saved, strict=True)):
            part = None if kept is None else step.moment(kept, weight[rows], some, stride)
            if part is not None:
                total = moments[index]
                moments[index] = part if total is None else total + part
    for step, moment in zip(steps, moments, strict=True):
        if moment is not None and not any(name in owned for name in step.parameters):
            group.sum_(moment)
    total_weight = group.sum_(weight.sum(dtype=torch.float64))
    factors, S = Factors(trainable), H
    for index in range(len(steps) - 1, -1, -1):
        context = CurvatureContext(
            values=tower.values,
            factors=factors,
            weight=weight,
            total_weight=total_weight,
            rows=features.total,
            group=group,
            owned=owned,
            noise=Noise(seed, index, draws, features.first),
            saved_blocks=_saved_by(tower, index),
            count_forward=lambda: tower.work.add(tower.side, "forwards"),
            is_first=index == 0,
        )
        S = steps[index].pull_curvature(S, moments[index], context)
    for factor in factors.layers:
        if factor.weight in owned:
            factor.mean = group.sum_(factor.A.sum()) / features.total
    return factors


def _saved_by(tower: Linearization, index: int) -> Callable[[], Iterator[tuple[int, int, Any]]]:
    return lambda: ((start, stop, saved[index]) for start, stop, saved in tower.saved_blocks())


def _sampled_blocks(tower: Linearization, stride: int) -> Iterator[tuple[slice, list[Any], slice]]:
    """Ranges of rows, what each step kept of them, and which of them matrices are estimated from.

    Those are every ``stride``-th row of all processes, independent of blocks and processes. If activations were not
    kept, only those rows are recomputed; a first pass then yields the inputs of all rows, which diagonals need, with
    None for what later steps would have kept. With autodiff steps all rows run forward in any case.
    """
    features, steps = tower.features, tower.steps
    skipped = -features.first % stride
    if tower.plan.keep or not all(step.analytic for step in steps) or skipped >= features.rows:
        for start, stop, saved in tower.saved_blocks():
            yield slice(start, stop), saved, slice(-(features.first + start) % stride, None, stride)
        return
    by_diagonal = features.kind != "dense" and steps[0].moment_from_inputs
    if by_diagonal:
        later = [None] * (len(steps) - 1)
        for start, stop in tower.blocks():
            yield slice(start, stop), [tower.inputs(start, stop), *later], slice(0)
    step = stride * tower.plan.rows
    for start in range(skipped, features.rows, step):
        some = slice(start, start + step, stride)
        saved = tower.forward_some(some)
        yield some, [None if by_diagonal else saved[0], *saved[1:]], slice(None)
