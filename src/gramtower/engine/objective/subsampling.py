"""Gradients from a part of the data: the stochastic estimates of Section "(Stochastic) Gradient Descent Method".

    block     all pairs of Û × V̂, scaled by mn / (m̂ n̂)                        (Û × V̂ selection)
    subsets   two subsets of O: one for gradients, one for Gramians            (eq:grad_sogram_naive, eq:gramian2)
    swapped   the mean of that and of the same with the two subsets exchanged  (below eq:gramian2)

All are the same evaluation as the full gradient on smaller constants: fewer rows, other weights. The others replace
a_i by ā_i = a_i/|O_i,:| times how often i was drawn (eq:trans); an entity without observed pairs is never drawn.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from gramtower._util import checks as check
from gramtower.data.pairs import Pairs
from gramtower.distributed.shards import Shards
from gramtower.engine.kernels import select
from gramtower.engine.objective.blocks import PairBlocks
from gramtower.engine.objective.problem import Problem
from gramtower.engine.objective.value_and_gradient import Evaluation
from gramtower.engine.towers.parameters import Parameters
from gramtower.engine.towers.towers import Towers


class Gramians(NamedTuple):
    """Estimates of P_c, Q_c, P̂_c and Q̂_c."""

    P: Tensor
    Q: Tensor
    hP: Tensor
    hQ: Tensor

    def toward(self, other: Gramians, alpha: float) -> Gramians:
        """(1 − α) self + α other: the running average of eq:gramian_sogram."""
        return Gramians(*(torch.lerp(a, b, alpha) for a, b in zip(self, other, strict=True)))

    def zeros(self) -> Gramians:
        """Zeros of the same shapes, where the running average starts."""
        return Gramians(*map(torch.zeros_like, self))


def block_gradient(
    problem: Problem, towers: Towers, parameters: Parameters, rows: Tensor, columns: Tensor
) -> Parameters:
    """Estimate of ∇L from the pairs of rows × columns (columns increasing), observed and not."""
    m, n = problem.shape
    left_share, right_share = len(rows) / m, len(columns) / n
    s = problem.shards
    shards = replace(s, left=s.left.take(rows), right=s.right.take(columns))
    rows, local_columns = s.left.local(rows), s.right.local(columns)
    pairs, entries = problem.resident_pairs(towers).pairs.take_block(rows, columns)
    scale = 1 / (left_share * right_share)
    # Penalties are sums over one side: divided here by what the common scale multiplies too much.
    ones = (torch.full_like(rows, 1, dtype=towers.dtype), torch.full_like(local_columns, 1, dtype=towers.dtype))
    sample = _restrict(
        problem, towers, parameters, shards, pairs, entries, (rows, local_columns), ones, (right_share, left_share),
        (len(entries) / max(1, len(problem.pairs)), left_share * right_share),
    )  # fmt: skip
    return sample.gradient(sample.side_gramians(), scale)


def subset_gramians(problem: Problem, towers: Towers, parameters: Parameters, entries: Tensor) -> Gramians:
    """eq:gramian2 from the pairs numbered ``entries`` (increasing)."""
    sample, scale = _subset(problem, towers, parameters, entries, 0.0)
    own, cross = sample.side_gramians()
    return Gramians(*(matrix * scale for matrix in (*own, *cross)))


def subset_gradient(
    problem: Problem, towers: Towers, parameters: Parameters, entries: Tensor, gramians: Gramians, covered: float
) -> Parameters:
    """eq:grad_sogram from the pairs numbered ``entries`` (increasing) with the given Gramians.

    ``covered`` is the share of O × O that this step stands for; it is counted as data passes.
    """
    sample, scale = _subset(problem, towers, parameters, entries, covered)
    return sample.gradient((gramians[:2], gramians[2:]), scale)


def swapped_gradient(
    problem: Problem, towers: Towers, parameters: Parameters, subsets: tuple[Tensor, Tensor],
    running: Gramians | None, alpha: float, covered: float,
) -> tuple[Parameters, Gramians]:  # fmt: skip
    """The mean of eq:grad_sogram for two subsets and for the same two exchanged, and the running Gramians after it.

    Each estimate moves the running Gramians toward those of its own second subset; what is kept is the mean of both.
    Towers run once on each subset, so that the second estimate costs a vjp and two passes over a subset's pairs.
    """
    samples, fresh = [], []
    for entries in subsets:
        sample, scale = _subset(problem, towers, parameters, entries, covered)
        own, cross = sample.side_gramians()
        samples.append((sample, scale))
        fresh.append(Gramians(*(matrix * scale for matrix in (*own, *cross))))
    before = fresh[0].zeros() if running is None else running
    moved = [before.toward(one, alpha) for one in fresh]
    (first, scale), (second, other_scale) = samples
    gradient = first.gradient((moved[1][:2], moved[1][2:]), scale).scale_(0.5)
    gradient.axpy_(0.5, second.gradient((moved[0][:2], moved[0][2:]), other_scale))
    return gradient, moved[0].toward(moved[1], 0.5)


def _subset(
    problem: Problem, towers: Towers, parameters: Parameters, entries: Tensor, covered: float
) -> tuple[Evaluation, float]:
    full = problem.resident_pairs(towers).pairs
    share = len(entries) / problem.observed
    entries = _local_entries(problem, entries)
    pairs, left, right = full.take_entries(entries)
    counts, shards = pairs.column_counts, problem.shards
    full_counts = full.column_counts if shards.single else problem.column_counts.to(entries.device)
    if not shards.single:  # the right entities that any process has drawn, and how often all have
        drawn_counts = shards.group.sum_(torch.bincount(full.columns[entries], minlength=full.shape[1]))
        touched = drawn_counts.nonzero()[:, 0]
        columns = torch.searchsorted(touched, right)[pairs.columns.long()].to(torch.int32)
        pairs = Pairs((len(left), len(touched)), pairs.offsets, columns)
        shards = replace(shards, right=shards.right.take(touched))
        right = problem.shards.right.local(touched)
        counts = drawn_counts[right + problem.shards.right.first]
    drawn = (pairs.row_counts.to(towers.dtype) / full.row_counts[left], counts.to(towers.dtype) / full_counts[right])
    sample = _restrict(
        problem, towers, parameters, shards, pairs, entries, (left, right), drawn, drawn, (share, covered)
    )  # fmt: skip
    return sample, 1 / share


def _local_entries(problem: Problem, entries: Tensor) -> Tensor:
    """Of global pair numbers, those held here, as local ones."""
    if problem.shards.single:
        return entries
    here = entries - problem.first_entry
    return here[(here >= 0) & (here < len(problem.pairs))]


def _restrict(
    problem: Problem,
    towers: Towers,
    parameters: Parameters,
    shards: Shards,
    pairs: Pairs,
    entries: Tensor,
    entities: tuple[Tensor, Tensor],
    factors: tuple[Tensor, Tensor],
    penalty_factors: tuple[Tensor | float, Tensor | float],
    share: tuple[float, float],
) -> Evaluation:
    """The objective on some entities and pairs, with weights and penalties multiplied by factors."""
    if problem.imputed.fitted:
        check.fail("imputed", "'fitted'", "a number or (P̃, Q̃): samples do not know the mean of all scores")
    full = problem.constants(towers)
    sampled = problem.resident_pairs(towers).sampled(pairs, entries)
    constants = replace(
        full,
        left=full.left.sampled(entities[0], factors[0], penalty_factors[0]),
        right=full.right.sampled(entities[1], factors[1], penalty_factors[1]),
        shards=shards,
    )
    left, right = (
        f.take(e, towers.dtype, towers.device) for f, e in zip((problem.left, problem.right), entities, strict=True)
    )
    kernels = select(towers.device, problem.kernels)
    plans = problem.plan(towers).blocks_for((left.rows, right.rows))
    towers_at = towers.linearize(parameters, left, right, kernels, plans, problem.work)
    blocks = PairBlocks(lambda _: sampled, left.rows, None, False, kernels)
    return Evaluation(constants, towers, parameters, blocks, *towers_at, kernels, problem.work, share)
