"""Ψ(θ), the twice-differentiable and strongly convex regulariser of the objective (eq:prob), whose weight is λ.

The default, ½‖θ‖², is no object: its terms are fused with the gradients of tables. Any other Ψ gives three results,

    Ψ(θ),   ∇Ψ(θ),   ∇²Ψ(θ) d

which the value (eq:obj), the gradient (eq:final_grad) and G·d (eq:final_Gd) multiply by λ and add. Optimizers need no
more. The Kronecker preconditioner replaces λ by λ times the mean diagonal of ∇²Ψ over each tensor
(:func:`mean_curvatures`). Cost: what Ψ takes, and two vectors of θ's size for each gradient or product.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from gramtower._util import checks as check
from gramtower.engine.towers.parameters import Parameters


class Regularizer:
    """A regulariser of your own: derive a class with ``value``, ``gradient`` and ``product``.

    Ψ must be twice differentiable and strongly convex. Over several processes θ is divided among them: sum with
    ``theta.inner``, which adds up all processes, and treat each number of θ by itself in ``gradient`` and ``product``.
    """

    def value(self, theta: Parameters) -> Tensor | float:
        """Ψ(θ), over all processes."""
        raise NotImplementedError

    def gradient(self, theta: Parameters) -> Parameters:
        """∇Ψ(θ)."""
        raise NotImplementedError

    def product(self, theta: Parameters, d: Parameters) -> Parameters:
        """∇²Ψ(θ) d."""
        raise NotImplementedError

    def ridge(self, name: str) -> float | None:
        """w if the tensor of this name enters Ψ only by ½w‖·‖², and None otherwise.

        Embedding tables are solved row by row where w is known for both, which is faster.
        """
        return None

    def check_names(self, names: list[str]) -> None:
        """Raise ValueError if Ψ does not suit towers with tensors of these names."""

    def __repr__(self) -> str:
        return f"{type(self).__qualname__}()"


class BlockRidge(Regularizer):
    """Squared norm of the parameters with a weight for each tensor of the towers.

    Ψ = ½ Σ_t w_t ‖θ_t‖² with w_t > 0.

    Args:
        weights: weights by name or pattern of tensors, such as ``{"left.*": 4.0, "*.bias": 0.1}``. The first pattern
            that matches a name counts, and each must match one; tensors that none matches have weight 1.

    Example:
        >>> problem = gt.Problem(sp.eye(4, 3, format="csr"), l2=0.1, regularizer=gt.BlockRidge({"left.*": 4.0}))
        >>> problem.at(gt.mlp_towers(problem, hidden=(), dim=2)).terms.l2 > 0
        True
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        if not isinstance(weights, Mapping) or not all(isinstance(name, str) for name in weights):
            check.fail("weights", repr(weights), 'weights by name of tensors, such as {"left.*": 4.0}')
        self.weights = {name: check.number(f"weights[{name!r}]", w, above=0.0) for name, w in weights.items()}

    def __repr__(self) -> str:
        return f"BlockRidge({self.weights})"

    def ridge(self, name: str) -> float:
        return next((w for pattern, w in self.weights.items() if fnmatchcase(name, pattern)), 1.0)

    def value(self, theta: Parameters) -> Tensor:
        return 0.5 * theta.inner(self.gradient(theta))

    def gradient(self, theta: Parameters) -> Parameters:
        return self.product(theta, theta)

    def product(self, theta: Parameters, d: Parameters) -> Parameters:
        found = d.empty()
        for name in d:
            torch.mul(d[name], self.ridge(name), out=found[name])
        return found

    def check_names(self, names: list[str]) -> None:
        for pattern in self.weights:
            if not any(fnmatchcase(name, pattern) for name in names):
                check.fail("regularizer", f"the pattern {pattern!r}", f"one for a tensor of {', '.join(names)}")


def as_regularizer(value: object) -> Regularizer | None:
    """Ψ from a Regularizer or from the weights of a BlockRidge; None for ½‖θ‖²."""
    if isinstance(value, Mapping):
        return BlockRidge(value)
    if value is not None and not isinstance(value, Regularizer):
        hint = " (a model file has the name of a regulariser, not its code)" if isinstance(value, str) else ""
        check.fail("regularizer", f"{value!r}{hint}", "a gramtower.Regularizer, weights by name of tensors, or None")
    return value


@torch.no_grad()
def mean_curvatures(psi: Regularizer | None, theta: Parameters) -> dict[str, float]:
    """The mean diagonal of ∇²Ψ(θ) over each tensor, over all processes.

    Where Ψ does not state it, it is the mean of v ∘ ∇²Ψ(θ) v for a vector v of random signs: exact for a diagonal
    Hessian, unbiased for any other.
    """
    known = {name: 1.0 if psi is None else psi.ridge(name) for name in theta}
    found = {name: w for name, w in known.items() if w is not None}
    if psi is None or len(found) == len(known):
        return found
    generator = torch.Generator(theta.vector.device).manual_seed(0)
    signs = theta.zeros()
    for name in sorted(theta, key=lambda name: name in theta.layout.owned):  # replicated first: the same everywhere
        signs[name].random_(2, generator=generator).mul_(2).sub_(1)
    product = psi.product(theta, signs)
    owned, group = theta.layout.owned, theta.layout.group
    for name in theta:  # in the same order in all processes
        if name in found:
            continue
        total, count = float((signs[name] * product[name]).sum(dtype=torch.float64)), float(signs[name].numel())
        if name in owned:
            total, count = group.totals(total, count)
        found[name] = max(0.0, total / max(1.0, count))
    return found
