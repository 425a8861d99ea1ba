"""Sweeps of `newton-kron` over two embedding tables on a CPU: rows are solved independently, and sweeps extrapolated.

A sweep moves each row of the left table to the minimum of its quadratic model while the right table is fixed, and then
each row of the right table, as alternating least squares does for the squared loss. Row i's block of the Gauss-Newton
matrix (eq:general_G) is

    A_i = ω a_i Q_c + Σ_j∈O_i ∂²ℓ⁺_ij q_j q_jᵀ + (λ + μ c_i) I

and likewise on the right. In the eigenbasis of Q_c everything except the observed pairs is diagonal, so that a row
needs no k × k matrix, only two steps of conjugate gradient over its pairs (kernels/reference.py). If labels are
fitted, the right rows are centred and their steps keep their mean: b_j times the mean gradient is subtracted from each
gradient.

A sweep is a map θ → S(θ) whose fixed points are the stationary points of L. Anderson acceleration (1965) combines the
last few θ_i and their sweeps to

    Σ α_i S(θ_i),   Σ α_i = 1,   ‖Σ α_i (S(θ_i) − θ_i)‖ least, over the table that moves last

The combination is accepted if its value is below that after the first half of the sweep; otherwise the sweep itself is
used, with its steps halved if they are too long for a loss that is not quadratic, and the earlier sweeps are discarded.
If no step of the sweep decreases L, the method falls back to secant steps.

Over several processes the sweeps are the same up to rounding. A process holds all pairs of its left rows, and solves
them by itself. The pairs of a right row are spread, so that all processes take each of its steps together: they gather
the directions of all right rows, and reduce-scatter the products.

Cost of an iteration: two values, two more passes over O for the rows' systems, and a pass over the earlier sweeps. Over
several processes there are five more passes, and each sends 2 gathers and 4 reduce-scatters of n × k more.
Memory: two vectors of θ's size for each earlier sweep, and four during a sweep.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from gramtower._util.host import Vectors, parallel_for
from gramtower.engine.kernels import select
from gramtower.engine.kernels.reference import RowSystems
from gramtower.engine.objective.blocks import LeftBlock
from gramtower.engine.objective.formulas import column_sums
from gramtower.engine.objective.problem import Point, Problem
from gramtower.engine.objective.value_and_gradient import Evaluation
from gramtower.engine.towers.parameters import Parameters
from gramtower.engine.towers.towers import Towers
from gramtower.optim.descent import Descent, IterationResult, Method, State, Stateful, vectors

_STEPS, _TOLERANCE = 2, 0.1  # of each row's conjugate gradient
_HALVINGS = 6
_CHUNK = 1 << 17  # numbers of a vector that fit in the cache
_RIDGE = 1e-7  # times the mean square of the residuals
_LEAST, _TINY = 1e-7, 1e-12  # least shift of a row, of the largest eigenvalue, and at all


def solves_rows(problem: Problem, towers: Towers) -> bool:
    """Whether two embedding tables, one for each side, are all that is trained and can be solved by rows here."""
    plan, kernels = problem.plan(towers), select(towers.device, problem.kernels)
    if not kernels.SOLVES_ROWS or plan.streamed is not None:
        return False
    names, psi = [*towers.local_names("left").values(), *towers.local_names("right").values()], problem.regularizer
    tables = all(plan.needs.viewed) and all(len(towers.local_names(side)) == 1 for side in ("left", "right"))
    return tables and (psi is None or all(psi.ridge(name) is not None for name in names))


@torch.no_grad()
def row_step(
    at: Evaluation, side: int, steps: int, tolerance: float, out: Tensor, scratch: tuple[Tensor, Tensor]
) -> float:
    """Write one side's rows after their step to ``out``; return the square of the norm of their gradient.

    Each row takes at most ``steps`` steps of conjugate gradient, and ends at a relative residual of ``tolerance``. Both
    matrices of ``scratch``, of the sizes of the left and the right table, are overwritten.
    """
    c, group = at.constants, at.constants.shards.group
    own, E, F = (c.left, at.P, at.right_rows) if side == 0 else (c.right, at.Q, at.P)
    gramian, cross = at.gramians[0][1 - side], at.gramians[1][1 - side]
    values, vectors = torch.linalg.eigh(gramian)
    group.broadcast_(values), group.broadcast_(vectors.t())  # one basis for all processes; columns are contiguous
    V = vectors.to(E.dtype)
    y = torch.mm(E, V, out=scratch[side])
    B = torch.mm(F, V, out=scratch[1 - side] if len(F) == len(scratch[1 - side]) else None)
    spectrum = at.scaled(values.clamp_min(0))
    l2 = at.table_ridge(side)
    shift = E.new_full((len(E),), l2) if own.penalty is None else own.penalty + l2
    shift.clamp_min_(max(_LEAST * float(spectrum[-1]), _TINY))
    weight = E.new_ones(len(E)) if own.weight is None else own.weight
    pull = own.imputed_product(at.scaled(cross) @ V)
    if side == 1 and c.fitted_total is not None:
        pull = (_mean_gradient(at) @ V)[None, :]
    systems = RowSystems(y, pull, weight, spectrum, shift, steps, tolerance)
    norms: list[Tensor] = []
    at.visit(lambda block: norms.append(block.solve(side, B, systems, c.shards)))
    torch.addmm(E, y, V.t(), out=out)
    return group.totals(float(norms[0]))[0]


def _mean_gradient(at: Evaluation) -> Tensor:
    """Σ_j ∂L/∂q_j / Σ_j b_j of centred right rows, without λ; their all-pairs part sums to zero."""
    c, total = at.constants, at.Q.new_zeros(at.Q.shape[1], dtype=torch.float64)

    def add(block: LeftBlock) -> None:
        slopes = block.P.new_zeros(len(block.P), 1)
        block.left_sum(block.observed.slopes, slopes.new_ones(len(at.right_rows), 1), slopes)
        total.add_(column_sums(block.P, slopes[:, 0]))

    at.visit(add, by_columns=False)
    if c.right.penalty is not None:
        total.add_(column_sums(at.Q, c.right.penalty))
    assert c.fitted_total is not None
    return (c.shards.group.sum_(total) / c.fitted_total).to(at.Q.dtype)


class Sweeps(Stateful):
    """Sweeps over two tables with Anderson acceleration over ``memory`` earlier sweeps."""

    def __init__(self, memory: int) -> None:
        self.memory = memory
        self.starts: list[Parameters] = []  # θ_i, oldest first
        self.ends: list[Parameters] = []  # S(θ_i)
        self.square = torch.zeros(0, 0, dtype=torch.float64)  # products of the residuals S(θ_i) − θ_i
        self._rotated: Parameters | None = None  # θ in the basis of half a sweep
        self._vectors = Vectors()

    def suit(self, problem: Problem, towers: Towers) -> bool:
        """Whether both towers are embedding tables whose rows can be solved, and the memory suffices."""
        plan, group = problem.plan(towers), problem.shards.group
        numbers = (2 * self.memory + 1) * towers.size + 2 * len(problem.pairs)  # slopes and curvatures of pairs
        if group.size > 1:  # squares of left rows, and systems of right rows all at once
            numbers += plan.needs.columns * (plan.needs.rows[0] + 8 * plan.needs.rows[1])
        fits = plan.spare_bytes >= towers.dtype.itemsize * numbers
        fits = fits and self.memory > 0 and solves_rows(problem, towers)
        return group.totals(fits)[0] == group.size  # all processes, or none

    def forget(self) -> None:
        """Discard the earlier sweeps."""
        self.starts, self.ends = [], []
        self.square = torch.zeros(0, 0, dtype=torch.float64)

    def iterate(self, point: Point) -> tuple[Point | None, float, int]:
        """The next point or None, the norm of the tables' gradients (see Record), and the number of values computed."""
        names, theta = _tables(point), point.parameters
        if self._rotated is None:
            self._rotated = theta.empty()
        scratch = self._rotated[names[0]], self._rotated[names[1]]
        # If the other table is zero, the one that moves first would shrink to zero as well.
        first = 0 if bool(point.evaluation.gramians[0][1].any()) else 1
        one, other = names[first], names[1 - first]
        half = self._empty(theta)
        half[other].copy_(theta[other])
        squares = row_step(point.evaluation, first, _STEPS, _TOLERANCE, half[one], scratch)
        middle, trials = _down(point.at, point.evaluation, point.value, half, theta, names, first)
        if middle is None:
            return None, math.sqrt(squares), trials
        at, value, end = middle.evaluation, middle.value, middle.parameters
        del middle  # its parameters are overwritten next; only sums of its evaluation are used after that
        squares += row_step(at, 1 - first, _STEPS, _TOLERANCE, end[other], scratch)
        following = self._combined(theta, end, other)
        if following is not None:
            trials, tried = trials + 1, point.at(following)
            if tried.value < value:
                return tried, math.sqrt(squares), trials
            self.forget()
            del tried, following
        found, more = _down(point.at, at, value, end, theta, names, 1 - first)
        return found, math.sqrt(squares), trials + more

    def _empty(self, like: Parameters) -> Parameters:
        return Parameters(like.layout, self._vectors.empty_like(like.vector))

    def _combined(self, start: Parameters, end: Parameters, name: str) -> Parameters | None:
        """Σ α_i S(θ_i) over this and the earlier sweeps; None if there are no earlier ones."""
        starts, ends = [*self.starts, start], [*self.ends, end]
        count = len(ends)
        square = torch.empty(count, count, dtype=torch.float64)
        square[:-1, :-1] = self.square
        products = _last_products(starts, ends, name).tolist()
        square[-1] = square[:, -1] = torch.tensor(end.layout.group.totals(*products), dtype=torch.float64)
        self.starts, self.ends = starts[-self.memory :], ends[-self.memory :]
        self.square = square[-self.memory :, -self.memory :]
        if count == 1:
            return None
        ridge = _RIDGE * square.diagonal().mean() * torch.eye(count, dtype=torch.float64)
        alpha = torch.linalg.solve(square + ridge, torch.ones(count, dtype=torch.float64))
        weights = (alpha / alpha.sum()).tolist()
        result = self._empty(end)
        torch.mul(ends[0].vector, weights[0], out=result.vector)
        for one, weight in zip(ends[1:], weights[1:], strict=True):
            result.vector.add_(one.vector, alpha=weight)
        return result

    def state(self) -> State:
        found: State = {f"start{i}": one for i, one in enumerate(self.starts)}
        return found | {f"end{i}": one for i, one in enumerate(self.ends)} | {"square": self.square}

    def restore(self, state: State) -> None:
        self.starts, self.ends = vectors(state, "start"), vectors(state, "end")
        self.square = state.get("square", torch.zeros(0, 0, dtype=torch.float64))


def _tables(point: Point) -> tuple[str, str]:
    """The names of both tables in Parameters."""
    towers = point.evaluation.towers
    (left,), (right,) = (towers.local_names(side).values() for side in ("left", "right"))
    return left, right


def _down(
    at: Callable[[Parameters], Point],
    before: Evaluation,
    value: float,
    theta: Parameters,
    origin: Parameters,
    names: tuple[str, str],
    side: int,
) -> tuple[Point | None, int]:
    """The point at θ, with one side's distance from its origin halved until L is below ``value``, and the trials.

    The point is None if L never is. The other side's table is the same as in the evaluation ``before``.
    """
    for trial in range(1, _HALVINGS + 1):
        tried = at(theta)
        tried.evaluation.take_sums(1 - side, before)
        if tried.value < value:
            return tried, trial
        theta = theta.clone()
        theta[names[side]].add_(origin[names[side]]).mul_(0.5)
    return None, _HALVINGS


def _last_products(starts: list[Parameters], ends: list[Parameters], name: str) -> Tensor:
    """Products of a table's last residual with all residuals, which are computed chunk by chunk."""
    before, after = ([x[name].view(-1) for x in each] for each in (starts, ends))
    size = len(after[-1])
    chunks = [*range(0, size, _CHUNK), size]
    found = torch.zeros(len(chunks) - 1, len(after), dtype=torch.float64)

    def add(low: int, high: int) -> None:
        residuals = [end[low:high] - start[low:high] for start, end in zip(before, after, strict=True)]
        for i, residual in enumerate(residuals):
            found[low // _CHUNK, i] = residuals[-1].dot(residual)

    parallel_for(add, chunks)
    return found.sum(0)


class SweepsFirst(Method):
    """Sweeps if they suit the problem and as long as they decrease L, and otherwise ``descent``."""

    def __init__(self, sweeps: Sweeps, descent: Descent) -> None:
        self.sweeps, self.descent = sweeps, descent
        self.chosen = ""  # until the first iteration
        self._checked = False  # whether the choice suits the problem; a run may be resumed elsewhere

    def iterate(self, problem: Problem, towers: Towers, point: Point) -> IterationResult:
        if not self._checked and self.chosen != "descent":
            self.chosen = "sweeps"
            if not self.sweeps.suit(problem, towers):
                self._leave_sweeps()
        self._checked = True
        if self.chosen == "sweeps":
            found, norm, trials = self.sweeps.iterate(point)
            if found is not None:
                return IterationResult(found, norm, step=1.0, trials=trials)
            self._leave_sweeps()
        return self.descent.iterate(problem, towers, point)

    def _leave_sweeps(self) -> None:
        self.chosen = "descent"
        self.sweeps = Sweeps(self.sweeps.memory)  # frees its memory

    def state(self) -> State:
        return {"chosen": self.chosen, "sweeps": self.sweeps.state(), "descent": self.descent.state()}

    def restore(self, state: State) -> None:
        self.chosen, self._checked = state["chosen"], False
        self.sweeps.restore(state.get("sweeps", {}))
        self.descent.restore(state["descent"])
