"""The arguments of `gramtower.TwoTower` as one object, which everything between pairs and a fitted model is handed.

scikit-learn conventions: arguments are kept as they are given, and checked where they are used;
`get_params`/`set_params` and `sklearn.base.clone` work. A name that is no argument is refused with the one that was
meant: the most alike, or what other libraries' name stands for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, fields
from functools import wraps
from typing import Any, Self, TypeVar

from gramtower._util import checks as check
from gramtower._util.checks import Hidden
from gramtower.engine.kernels.losses import LOSSES, Loss
from gramtower.engine.objective.problem import Problem
from gramtower.engine.towers.towers import Towers
from gramtower.model import defaults
from gramtower.optim.solvers import SOLVERS, Solver

_LINE = 79  # letters of a line of a repr
#: What arguments are called elsewhere, by what they are called here.
_ELSEWHERE = {
    "dim": ("factors", "n_factors", "num_factors", "no_components", "n_components", "embedding_dim", "latent_dim"),
    "hidden": ("layers", "hidden_layers", "hidden_layer_sizes", "hidden_units"),
    "l2": ("regularization", "reg", "weight_decay"),
    "max_iterations": ("iterations", "epochs", "n_iter", "max_iter", "num_iterations"),
    "optimizer": ("solver",),
    "seed": ("random_state", "random_seed"),
    "device": ("use_gpu",),
}
_Kind = TypeVar("_Kind", bound=type)


def _meant(name: str, known: Collection[str]) -> str:
    """What an unknown argument may stand for, as a question; empty if nothing is like it."""
    near = [here for here, there in _ELSEWHERE.items() if name.lower() in there and here in known]
    near = near or check.near(name, known, 1)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else ""


def _telling_names(kind: _Kind) -> _Kind:
    """The class with a constructor that refuses unknown arguments in its own name, and says what may be meant."""
    made = kind.__init__  # type: ignore[misc]

    @wraps(made)
    def init(self: object, *arguments: Any, **named: Any) -> None:
        for name in named:
            if name not in known:
                hint = _meant(name, known) or f"known are {', '.join(known)}"
                raise TypeError(f"{type(self).__name__}() got an unexpected keyword argument {name!r}; {hint}")
        made(self, *arguments, **named)

    known = list(inspect.signature(kind).parameters)
    kind.__init__ = init  # type: ignore[misc]
    return kind


@_telling_names
@dataclass(eq=False, repr=False)
class ModelSettings:
    """What is learned and how; :class:`gramtower.TwoTower` says what each argument means."""

    dim: int | None = None
    hidden: Hidden | None = None
    activation: str | None = None
    normalize: bool | None = None
    refine: bool | None = None
    loss: str | Loss = "logistic"
    omega: float | None = None
    l2: float | None = None
    embedding_l2: float | None = None
    frequency_power: float = 1.0
    imputed: float = defaults.IMPUTED
    left_weights: Any = None
    right_weights: Any = "auto"
    optimizer: str | Solver = "newton-kron"
    optimizer_options: dict[str, Any] | None = None
    max_iterations: int | None = None
    time_limit: float | None = None
    patience: int = 10
    metric: str = "ndcg@20"
    select: bool | str = True
    device: str = "auto"
    seed: int = 0
    towers: Callable[[Problem], Towers] | None = None
    memory_budget: int | str | None = None
    precision: str = "tf32"
    pair_precision: str = "float32"
    scale_features: bool = True
    verbose: bool = False

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The constructor's arguments."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def set_params(self, **params: Any) -> Self:
        """Change constructor arguments by name."""
        known = self.get_params()
        for name, value in params.items():
            if name not in known:
                hint = _meant(name, known)
                check.fail("parameter", f"{name!r} ({hint})" if hint else repr(name), "one of " + ", ".join(known))
            setattr(self, name, value)
        return self

    def __repr__(self) -> str:
        """The arguments that are not the defaults, by name, in lines of 79 letters, as scikit-learn has it."""
        given = inspect.signature(type(self)).parameters
        changed = [
            f"{k}={v!r}"
            for k, v in sorted(self.get_params().items())
            if v is not given[k].default and (type(v) is not type(given[k].default) or v != given[k].default)
        ]
        head = f"{type(self).__name__}("
        lines = [head]
        for place, one in enumerate(changed):
            text = one + (", " if place < len(changed) - 1 else ")")
            if len(lines[-1]) + len(text.rstrip()) > _LINE and lines[-1].strip() != head:
                lines.append(" " * len(head))
            lines[-1] += text
        return "\n".join(line.rstrip() for line in lines) + ("" if changed else ")")

    def with_changes(self, **changes: Any) -> ModelSettings:
        """A copy, as settings alone, with some of them changed."""
        return ModelSettings(**{field.name: getattr(self, field.name) for field in fields(ModelSettings)} | changes)

    def by_name(self) -> ModelSettings:
        """A copy, as settings alone, with a solver and a loss of the library by name; one's own have none."""
        solver: Any = self.optimizer
        changes: dict[str, Any] = {}
        if isinstance(solver, Solver) and SOLVERS.get(solver.name) is type(solver):
            changes |= {"optimizer": solver.name, "optimizer_options": asdict(solver)}
        if isinstance(self.loss, Loss) and LOSSES.get(self.loss.name) is self.loss:
            changes["loss"] = self.loss.name
        return self.with_changes(**changes)

    def solver_options(self) -> Mapping[str, Any]:
        """The constants of the optimizer."""
        options = {} if self.optimizer_options is None else self.optimizer_options
        if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
            check.fail("optimizer_options", repr(options), "names and values")
        return options
