"""The optimization methods as objects: typed options that check themselves, and the parts each is made of.

`gd`, `gd-diag`, `newton`, `sogram`, `sogram-diag`, `sampling`, `sampling-diag` are the paper's seven (Section "Compared
Optimization Methods"), with its constants as defaults but for the step sizes of the four that draw, which are searched;
`newton-kron` and `lbfgs` go beyond it. ``gt.minimize(problem, towers, gt.NewtonKron(damping=0.1))`` and
``gt.minimize(problem, towers, "newton-kron", damping=0.1)`` are the same run.

A solver of one's own is a dataclass with a ``name`` and a ``method``; docs/choosing.md has one. Checked by
tests/test_optim.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from gramtower._util import checks as check
from gramtower.engine.objective.problem import Problem
from gramtower.engine.towers.towers import Towers
from gramtower.optim.descent import Backtracking, Damping, Descent, Diagonal, Direction, Method, NewtonCG, Steepest
from gramtower.optim.newton_kron import KroneckerDirection, KroneckerNewton
from gramtower.optim.secant import LBFGS as LimitedMemory
from gramtower.optim.secant import KroneckerSecant
from gramtower.optim.stochastic import Blocks, Sampled, Source, Subsets
from gramtower.optim.sweeps import Sweeps, SweepsFirst

_ENOUGH_SWEEPS = 12


def _option(default: Any, test: Callable[[str, Any], object]) -> Any:
    return field(default=default, metadata={"check": test})


def _positive(default: float) -> Any:
    return _option(default, lambda name, value: check.number(name, value, above=0.0))


def _not_negative(default: float) -> Any:
    return _option(default, lambda name, value: check.number(name, value, minimum=0.0))


def _share(default: float, most: float = 1.0) -> Any:
    def test(name: str, value: Any) -> None:
        if not 0.0 < check.number(name, value) <= most:
            check.fail(name, value, f"a number above 0 and at most {most:g}")

    return _option(default, test)


def _count(default: int, least: int = 1) -> Any:
    return _option(default, lambda name, value: check.count(name, value, minimum=least))


def _step_size() -> Any:
    return _option(None, lambda name, value: None if value is None else check.number(name, value, above=0.0))


@dataclass(frozen=True, kw_only=True)
class Solver:
    """An optimizer with its options, to hand to ``minimize``; the subclasses are those there are."""

    name: ClassVar[str] = "custom"  # in logs and checkpoints

    def __post_init__(self) -> None:
        for option in fields(self):
            if (test := option.metadata.get("check")) is not None:
                test(option.name, getattr(self, option.name))

    def method(self, seed: int) -> Method:
        """The parts of one run, with their memory at its start; ``seed`` is for those that draw."""
        raise NotImplementedError

    def default_iterations(self, problem: Problem, towers: Towers) -> int | None:
        """The number of iterations that an estimator makes by default, or None for its own default."""
        return None


@dataclass(frozen=True, kw_only=True)
class _Searched(Solver):
    """Backtracking from the last step, which is doubled every few iterations."""

    sufficient_decrease: float = _share(1e-4, 0.999)
    initial_step: float = _positive(1.0)
    double_every: int = _count(5, 0)

    def _search(self) -> Backtracking:
        return Backtracking(self.sufficient_decrease, self.initial_step, self.double_every)


@dataclass(frozen=True, kw_only=True)
class GradientDescent(_Searched):
    """The optimizer "gd": gradient descent with backtracking line search.

    Args:
        sufficient_decrease: η of the line search.
        initial_step: the first step it tries.
        double_every: iterations after which the step it begins with is doubled; 0 begins with ``initial_step``.
    """

    name: ClassVar[str] = "gd"

    def method(self, seed: int) -> Method:
        """Steepest descent."""
        return Descent(Steepest(), self._search())


@dataclass(frozen=True, kw_only=True)
class DiagonalDescent(_Searched):
    """The optimizer "gd-diag": gradient descent scaled by AdaGrad's diagonal, with line search.

    Args:
        mu: μ, added to the sums of squares.
    """

    name: ClassVar[str] = "gd-diag"
    mu: float = _positive(1e-8)

    def method(self, seed: int) -> Method:
        """The diagonally scaled gradient."""
        return Descent(Diagonal(self.mu), self._search())


@dataclass(frozen=True, kw_only=True)
class Newton(_Searched):
    """The optimizer "newton", the paper's Gauss-Newton method.

    Args:
        cg_tolerance: ξ, the relative residual at which conjugate gradient stops.
        cg_max_steps: its most steps.
    """

    name: ClassVar[str] = "newton"
    cg_tolerance: float = _not_negative(0.1)
    cg_max_steps: int = _count(30)

    def method(self, seed: int) -> Method:
        """Newton by conjugate gradient."""
        return Descent(NewtonCG(self.cg_tolerance, self.cg_max_steps), self._search())


@dataclass(frozen=True, kw_only=True)
class NewtonKron(Solver):
    """The optimizer "newton-kron", the default: second-order steps with a Kronecker preconditioner.

    Damped Gauss-Newton by conjugate gradient (newton_kron.py); where both towers are linear in their parameters, and
    where the Gauss-Newton model is no longer right, secant steps over the same preconditioner (secant.py).

    Args:
        damping: at the start of conjugate gradient; secant steps start with none.
        damping_up: factor when the decrease was under a quarter of what the model promised.
        damping_down: factor when it was over three quarters.
        cg_steps: conjugate gradient steps allowed at the start.
        cg_max_steps: most steps ever allowed.
        cg_tolerance: relative residual, in the preconditioner's norm, at which conjugate gradient stops.
        cg_progress: it also stops when five steps lowered the model by less than this share.
        memory: pairs of steps and changes of the gradient that linear towers remember, two vectors of θ's size each;
            fewer where the memory budget leaves no room, and where it leaves room for none all iterations move one side
            at a time. 0 for conjugate gradient with them too, from the first iteration on.
        alternating: first iterations of linear towers that move one side at a time; with 0 none does.
        network_memory: pairs that other towers remember once damping has outgrown its start; fewer where the memory
            budget leaves no room. 0 for conjugate gradient throughout.
        sweeps: earlier sweeps over all rows that two embedding tables on a CPU remember, two vectors of θ's size each;
            0, and a memory budget without room for them, for secant steps.
        sufficient_decrease: η of the line search.
    """

    name: ClassVar[str] = "newton-kron"
    damping: float = _not_negative(1.0)
    damping_up: float = _positive(2.5)
    damping_down: float = _share(0.5)
    cg_steps: int = _count(3)
    cg_max_steps: int = _count(40)
    cg_tolerance: float = _not_negative(1e-4)
    cg_progress: float = _not_negative(5e-3)
    memory: int = _count(3, 0)
    alternating: int = _count(4, 0)
    network_memory: int = _count(10, 0)
    sweeps: int = _count(2, 0)
    sufficient_decrease: float = _share(1e-4, 0.999)

    def method(self, seed: int) -> Method:
        """Preconditioned Newton, from a full step on."""
        newton = KroneckerNewton(
            self._damping(self.damping),
            min(self.cg_steps, self.cg_max_steps),
            self.cg_max_steps,
            self.cg_tolerance,
            self.cg_progress,
        )
        secant = KroneckerSecant(self._damping(0.0), self.memory, self.alternating)
        direction = KroneckerDirection(newton, secant, self.network_memory)
        descent = Descent(direction, Backtracking(self.sufficient_decrease, double_every=0))
        return SweepsFirst(Sweeps(self.sweeps), descent)

    def default_iterations(self, problem: Problem, towers: Towers) -> int | None:
        """12 where it sweeps over the rows of two tables, which comes as far as 20 other iterations do."""
        return _ENOUGH_SWEEPS if Sweeps(self.sweeps).suit(problem, towers) else None

    def _damping(self, start: float) -> Damping:
        return Damping(start, self.damping_up, self.damping_down)


@dataclass(frozen=True, kw_only=True)
class LBFGS(Solver):
    """The optimizer "lbfgs": limited-memory BFGS with backtracking line search from a full step.

    Args:
        memory: pairs of steps and changes of the gradient that are remembered.
        sufficient_decrease: η of the line search.
    """

    name: ClassVar[str] = "lbfgs"
    memory: int = _count(10)
    sufficient_decrease: float = _share(1e-4, 0.999)

    def method(self, seed: int) -> Method:
        """Limited-memory BFGS."""
        return Descent(LimitedMemory(self.memory), Backtracking(self.sufficient_decrease, double_every=0))


@dataclass(frozen=True, kw_only=True)
class _Stochastic(Solver):
    """Steps of one size along estimated gradients, as many in an iteration as see about all the data."""

    ratio: float = _share(0.01)
    step_size: float | None = _step_size()
    steps: int | None = _option(None, lambda name, value: None if value is None else check.count(name, value))

    def _sampled(self, source: Source, direction: Direction) -> Method:
        return Sampled(source, direction, self.step_size, self.steps)


@dataclass(frozen=True, kw_only=True)
class Sogram(_Stochastic):
    """The optimizer "sogram": gradients from two subsets of the observed pairs, and running Gramians.

    Args:
        ratio: ρ, the share of the pairs drawn in a step.
        alpha: α, the rate of the Gramians' running averages.
        step_size: δ, kept as it is; None searches for one on the exact value, and halves it when the run diverges.
        steps: steps in one iteration; None for 8, 16, … up to 1/ρ or about a second of work (optim/stochastic.py).
    """

    name: ClassVar[str] = "sogram"
    alpha: float = _share(0.1)

    def method(self, seed: int) -> Method:
        """Steepest descent on what the subsets say."""
        return self._sampled(Subsets(seed, self.ratio, self.alpha), Steepest())


@dataclass(frozen=True, kw_only=True)
class DiagonalSogram(Sogram):
    """The optimizer "sogram-diag": `sogram` scaled by AdaGrad's diagonal.

    Args:
        mu: μ, added to the sums of squares.
    """

    name: ClassVar[str] = "sogram-diag"
    mu: float = _positive(1e-8)

    def method(self, seed: int) -> Method:
        """The diagonally scaled estimate."""
        return self._sampled(Subsets(seed, self.ratio, self.alpha), Diagonal(self.mu))


@dataclass(frozen=True, kw_only=True)
class Sampling(_Stochastic):
    """The optimizer "sampling": gradients from all pairs between a few left and a few right entities.

    Args:
        ratio: ρ, the share of the entities of each side drawn in a step.
        step_size: δ, kept as it is; None searches for one on the exact value, and halves it when the run diverges.
        steps: steps in one iteration; None for 8, 16, … up to 1/ρ or about a second of work (optim/stochastic.py).
    """

    name: ClassVar[str] = "sampling"

    def method(self, seed: int) -> Method:
        """Steepest descent on what the block says."""
        return self._sampled(Blocks(seed, self.ratio), Steepest())


@dataclass(frozen=True, kw_only=True)
class DiagonalSampling(Sampling):
    """The optimizer "sampling-diag": `sampling` scaled by AdaGrad's diagonal.

    Args:
        mu: μ, added to the sums of squares.
    """

    name: ClassVar[str] = "sampling-diag"
    mu: float = _positive(1e-8)

    def method(self, seed: int) -> Method:
        """The diagonally scaled estimate."""
        return self._sampled(Blocks(seed, self.ratio), Diagonal(self.mu))


SOLVERS: dict[str, type[Solver]] = {
    solver.name: solver
    for solver in (
        NewtonKron, GradientDescent, DiagonalDescent, Newton, Sogram, DiagonalSogram, Sampling, DiagonalSampling, LBFGS,
    )
}  # fmt: skip


def as_solver(optimizer: Any, options: dict[str, Any]) -> Solver:
    """A solver as it is, or by name with its options; refuses names and options that do not exist."""
    if isinstance(optimizer, Solver):
        if options:
            check.fail("options", ", ".join(options), f"none beside a solver: they belong to {optimizer!r}")
        return optimizer
    kind = SOLVERS[check.choice("optimizer", optimizer, tuple(SOLVERS))]
    known = [option.name for option in fields(kind)]
    for option in options:
        if option not in known:
            near = check.near(option, known, 1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            check.fail(f"option of {kind.name}", f"{option!r}{hint}", "one of " + ", ".join(known))
    return kind(**options)
