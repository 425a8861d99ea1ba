"""The optimizers, as classes whose options are checked, and the parts of each.

`gd`, `gd-diag`, `newton`, `sogram`, `sogram-diag`, `sampling` and `sampling-diag` are those of the paper (Section
"Compared Optimization Methods"), with its constants as defaults, except for the step sizes of the four that sample,
which are searched. `newton-kron`, `lbfgs` and `torch` are not in the paper. ``gt.minimize(problem, towers,
gt.optim.NewtonKron(damping=0.1))`` and ``gt.minimize(problem, towers, "newton-kron", damping=0.1)`` are the same run.

A custom solver is a dataclass with a ``name`` and a ``method``; docs/choosing.md has an example.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from gramtower._util import checks as check
from gramtower.engine.objective.problem import Problem
from gramtower.engine.towers.towers import Towers
from gramtower.optim.descent import Backtracking, Damping, Descent, Diagonal, FirstOrder, Method, Steepest
from gramtower.optim.second_order import KroneckerDirection, KroneckerNewton, KroneckerSecant, LimitedMemory, NewtonCG
from gramtower.optim.stochastic import Blocks, Sampled, Source, Subsets
from gramtower.optim.sweeps import Sweeps, SweepsFirst
from gramtower.optim.torch_optimizers import OptimizerClass, TorchSteps

_ENOUGH_SWEEPS = 12
Value = TypeVar("Value")


def _option(default: Value, test: Callable[[str, Value], object]) -> Value:
    return field(default=default, metadata={"check": test})


def _positive(default: float) -> float:
    return _option(default, lambda name, value: check.number(name, value, above=0.0))


def _not_negative(default: float) -> float:
    return _option(default, lambda name, value: check.number(name, value, minimum=0.0))


def _share(default: float, most: float = 1.0) -> float:
    def test(name: str, value: float) -> None:
        if not 0.0 < check.number(name, value) <= most:
            check.fail(name, value, f"a number above 0 and at most {most:g}")

    return _option(default, test)


def _count(default: int, least: int = 1) -> int:
    return _option(default, lambda name, value: check.count(name, value, minimum=least))


@dataclass(frozen=True, kw_only=True)
class Solver:
    """Base class of the optimizers that ``minimize`` accepts; subclass it for a custom one."""

    name: ClassVar[str] = "custom"  # in logs and checkpoints
    #: Whether it was measured to get as far with tf32 products as with float32; estimators use tf32 only then.
    tf32: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for option in fields(self):
            if (test := option.metadata.get("check")) is not None:
                test(option.name, getattr(self, option.name))

    def method(self, seed: int) -> Method:
        """The method for one run, in its initial state; ``seed`` is for methods that sample."""
        raise NotImplementedError

    def default_iterations(self, problem: Problem, towers: Towers) -> int | None:
        """The default number of iterations of an estimator with this solver, or None for the general default."""
        return None


@dataclass(frozen=True, kw_only=True)
class _Searched(Solver):
    """Solvers whose line search starts from the last step size, which is doubled every few iterations."""

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
        initial_step: initial step size.
        double_every: iterations after which the initial step size is doubled; with 0 every search starts with
            ``initial_step``.
    """

    name: ClassVar[str] = "gd"
    tf32: ClassVar[bool] = True

    def method(self, seed: int) -> Method:
        return Descent(Steepest(), self._search())


@dataclass(frozen=True, kw_only=True)
class DiagonalDescent(_Searched):
    """The optimizer "gd-diag": gradient descent scaled by AdaGrad's diagonal, with line search.

    Args:
        mu: μ, added to the sums of squares.
    """

    name: ClassVar[str] = "gd-diag"
    tf32: ClassVar[bool] = True
    mu: float = _positive(1e-8)

    def method(self, seed: int) -> Method:
        return Descent(Diagonal(self.mu), self._search())


@dataclass(frozen=True, kw_only=True)
class Newton(_Searched):
    """The optimizer "newton", the paper's Gauss-Newton method.

    Conjugate gradient without damping and preconditioner needs float32 products: with tf32 it stalls.

    Args:
        cg_tolerance: ξ, the relative residual at which conjugate gradient stops.
        cg_max_steps: largest number of conjugate gradient steps.
    """

    name: ClassVar[str] = "newton"
    cg_tolerance: float = _not_negative(0.1)
    cg_max_steps: int = _count(30)

    def method(self, seed: int) -> Method:
        return Descent(NewtonCG(self.cg_tolerance, self.cg_max_steps), self._search())


@dataclass(frozen=True, kw_only=True)
class NewtonKron(Solver):
    """The optimizer "newton-kron", the default: second-order steps with a Kronecker preconditioner.

    Damped Gauss-Newton by conjugate gradient, or secant steps with the same preconditioner if both towers are linear in
    their parameters, and when the Gauss-Newton model becomes inaccurate (second_order.py). Two embedding tables on a
    CPU are solved row by row (sweeps.py).

    Args:
        damping: initial damping of conjugate gradient; secant steps start without damping.
        damping_up: factor after a decrease of less than a quarter of the model's prediction.
        damping_down: factor after a decrease of more than three quarters.
        cg_steps: initial limit of conjugate gradient steps.
        cg_max_steps: largest limit.
        cg_tolerance: relative residual, in the preconditioner's norm, at which conjugate gradient stops.
        cg_progress: conjugate gradient also stops when five steps lower the model by less than this fraction.
        memory: number of secant pairs for linear towers, two vectors of θ's size each. A memory budget can reduce it;
            if not even one pair fits, all iterations move one side at a time. 0 uses conjugate gradient instead.
        alternating: number of first iterations of linear towers that move one side at a time.
        network_memory: number of secant pairs for other towers, once damping shows that the model fails. A memory
            budget can reduce it; 0 uses only conjugate gradient.
        sweeps: number of earlier sweeps kept for two embedding tables on a CPU, two vectors of θ's size each. With 0,
            or if they do not fit the memory budget, secant steps are used.
        sufficient_decrease: η of the line search.
    """

    name: ClassVar[str] = "newton-kron"
    tf32: ClassVar[bool] = True
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
        newton = KroneckerNewton(
            self._damping(self.damping), min(self.cg_steps, self.cg_max_steps), self.cg_max_steps, self.cg_tolerance,
            self.cg_progress,
        )  # fmt: skip
        secant = KroneckerSecant(self._damping(0.0), self.memory, self.alternating)
        direction = KroneckerDirection(newton, secant, self.network_memory)
        descent = Descent(direction, Backtracking(self.sufficient_decrease, double_every=0))
        return SweepsFirst(Sweeps(self.sweeps), descent)

    def default_iterations(self, problem: Problem, towers: Towers) -> int | None:
        """12 for sweeps over two tables, which achieve as much as 20 other iterations."""
        return _ENOUGH_SWEEPS if Sweeps(self.sweeps).suit(problem, towers) else None

    def _damping(self, start: float) -> Damping:
        return Damping(start, self.damping_up, self.damping_down)


@dataclass(frozen=True, kw_only=True)
class LBFGS(Solver):
    """The optimizer "lbfgs": limited-memory BFGS with backtracking line search from a full step.

    Args:
        memory: number of secant pairs.
        sufficient_decrease: η of the line search.
    """

    name: ClassVar[str] = "lbfgs"
    tf32: ClassVar[bool] = True
    memory: int = _count(10)
    sufficient_decrease: float = _share(1e-4, 0.999)

    def method(self, seed: int) -> Method:
        return Descent(LimitedMemory(self.memory), Backtracking(self.sufficient_decrease, double_every=0))


@dataclass(frozen=True, kw_only=True)
class _Stochastic(Solver):
    """Solvers with estimated gradients; an iteration has enough steps for about one pass over the data."""

    tf32: ClassVar[bool] = True
    ratio: float = _share(0.01)
    step_size: float | None = _option(
        None, lambda name, value: None if value is None else check.number(name, value, above=0.0)
    )
    steps: int | None = _option(None, lambda name, value: None if value is None else check.count(name, value))

    def _sampled(self, source: Source, direction: FirstOrder) -> Method:
        return Sampled(source, direction, self.step_size, self.steps)


@dataclass(frozen=True, kw_only=True)
class Sogram(_Stochastic):
    """The optimizer "sogram": gradients from two subsets of the observed pairs, and running Gramians.

    Args:
        ratio: ρ, the fraction of the pairs sampled in a step.
        alpha: α, the rate of the Gramians' running averages.
        swap: whether the two subsets also exchange their parts, and the two gradients are averaged (the paper's variant
            below eq:gramian2). The variance is lower, and a step costs about half as much again.
        step_size: δ, a fixed step size; None searches for one by the exact objective, and halves it if the run
            diverges.
        steps: steps in one iteration; None for 8, 16, … up to 1/ρ or about a second of work (optim/stochastic.py).
    """

    name: ClassVar[str] = "sogram"
    alpha: float = _share(0.1)
    swap: bool = _option(False, check.flag)

    def method(self, seed: int) -> Method:
        return self._sampled(self._subsets(seed), Steepest())

    def _subsets(self, seed: int) -> Subsets:
        return Subsets(seed, self.ratio, self.alpha, self.swap)


@dataclass(frozen=True, kw_only=True)
class DiagonalSogram(Sogram):
    """The optimizer "sogram-diag": `sogram` scaled by AdaGrad's diagonal.

    Args:
        mu: μ, added to the sums of squares.
    """

    name: ClassVar[str] = "sogram-diag"
    mu: float = _positive(1e-8)

    def method(self, seed: int) -> Method:
        return self._sampled(self._subsets(seed), Diagonal(self.mu))


@dataclass(frozen=True, kw_only=True)
class Sampling(_Stochastic):
    """The optimizer "sampling": gradients from all pairs between a few left and a few right entities.

    Args:
        ratio: ρ, the fraction of the entities of each side sampled in a step.
        step_size: δ, a fixed step size; None searches for one by the exact objective, and halves it if the run
            diverges.
        steps: steps in one iteration; None for 8, 16, … up to 1/ρ or about a second of work (optim/stochastic.py).
    """

    name: ClassVar[str] = "sampling"

    def method(self, seed: int) -> Method:
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
        return self._sampled(Blocks(seed, self.ratio), Diagonal(self.mu))


@dataclass(frozen=True, init=False)
class TorchOptimizer(Solver):
    """An optimizer of torch with exact gradients, such as ``TorchOptimizer(torch.optim.AdamW, lr=0.01)``.

    The gradient is a sum over all pairs, not a mean: SGD needs a small learning rate, while Adam and its relatives
    adapt to the scale. λ and μ are part of the objective, so weight decay is a further penalty. Runs in one process.

    Args:
        kind: a class of ``torch.optim`` or its name, or a subclass of ``torch.optim.Optimizer``, which a model file
            cannot hold. LBFGS makes several evaluations in a step; use the optimizer "lbfgs" instead.
        steps: steps in one iteration. Records, validation and checkpoints come after each iteration.
        options: arguments of ``kind``, such as ``lr``.
    """

    name: ClassVar[str] = "torch"
    kind: OptimizerClass
    steps: int
    options: Mapping[str, Any]

    def __init__(self, kind: OptimizerClass | str, *, steps: int = 1, **options: Any) -> None:
        kind = getattr(torch.optim, kind, kind) if isinstance(kind, str) else kind
        if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
            check.fail("kind", repr(kind), "a class of torch.optim, such as torch.optim.AdamW")
        if issubclass(kind, torch.optim.LBFGS):
            check.fail("kind", "torch.optim.LBFGS", 'another class, or the optimizer "lbfgs"')
        for name, value in (("kind", kind), ("steps", check.count("steps", steps)), ("options", dict(options))):
            object.__setattr__(self, name, value)
        probe = torch.zeros(2, 2, requires_grad=True)
        probe.grad = torch.ones(2, 2)
        try:
            made = kind([probe], **options)
            made.step()
        except (TypeError, ValueError, RuntimeError) as error:
            check.fail("options", f"{options} ({error})", f"arguments of {kind.__name__} for dense gradients")
        for name, value in made.state[probe].items():
            if value is not None and not (isinstance(value, Tensor) and value.dtype in (torch.float32, torch.float64)):
                given = f"{kind.__name__}, whose state has the {type(value).__name__} {name!r}"
                check.fail("kind", given, "an optimizer whose state has tensors of float32 or float64")

    @property
    def plain_options(self) -> dict[str, Any] | None:
        """The arguments, with the name of the class; None if torch.optim does not have the class."""
        name = self.kind.__name__
        known = getattr(torch.optim, name, None) is self.kind
        return {"kind": name, "steps": self.steps, **self.options} if known else None

    def method(self, seed: int) -> Method:
        return TorchSteps(self.kind, dict(self.options), self.steps)


SOLVERS: dict[str, type[Solver]] = {
    solver.name: solver
    for solver in (
        NewtonKron, GradientDescent, DiagonalDescent, Newton, Sogram, DiagonalSogram, Sampling, DiagonalSampling, LBFGS,
    )
}  # fmt: skip


def as_solver(optimizer: str | Solver, options: dict[str, Any]) -> Solver:
    """The solver of a name with its options, or a given solver; refuses unknown names and options."""
    if isinstance(optimizer, Solver):
        if options:
            check.fail("options", ", ".join(options), f"no options with a solver object: set them in {optimizer!r}")
        return optimizer
    if check.choice("optimizer", optimizer, (*SOLVERS, TorchOptimizer.name)) == TorchOptimizer.name:
        if "kind" not in options:
            check.fail("options", ", ".join(options) or "none", "kind, the name of a class of torch.optim, as well")
        return TorchOptimizer(**options)
    kind = SOLVERS[optimizer]
    known = [option.name for option in fields(kind)]
    for option in options:
        if option not in known:
            near = check.near(option, known, 1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            check.fail(f"option of {kind.name}", f"{option!r}{hint}", "one of " + ", ".join(known))
    return kind(**options)
