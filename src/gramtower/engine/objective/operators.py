"""Linear operators on parameters: products with G, M, multiples of the identity, and what is composed of them.

An operator is known by its products. ``A @ d`` takes Parameters, a flat torch or numpy vector, or a matrix of columns,
and gives the same kind back; ``A @ B``, ``A + B``, ``A + 0.1`` (a multiple of the identity), ``2.0 * A`` and ``A.T``
are operators again; ``A.to_scipy()`` hands any of them to scipy's solvers. After curvlinops' PyTorchLinearOperator:
vectors are converted in one place, operators compute on Parameters alone.

An :class:`Executor` runs the work of a point: kernel by kernel here, replayed from CUDA graphs in cuda_graphs.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gramtower._util import checks as check
from gramtower.engine.towers.parameters import Parameters, as_parameters

Operand = TypeVar("Operand", Parameters, Tensor, NDArray[Any], "LinearOperator")


class LinearOperator:
    """A square matrix over parameters. Subclasses compute ``product``.

    Args:
        like: parameters of the layout, dtype and device that it works on.
    """

    def __init__(self, like: Parameters) -> None:
        self.like = like

    @property
    def shape(self) -> tuple[int, int]:
        """(D, D)."""
        return len(self.like), len(self.like)

    @property
    def T(self) -> LinearOperator:
        """The transpose; operators here are symmetric unless they say otherwise."""
        return self

    def product(self, d: Parameters, out: Parameters | None = None) -> Parameters:
        """The operator times d, written over ``out`` if given (never d itself)."""
        raise NotImplementedError

    def __matmul__(self, d: Operand) -> Operand:
        """The product with Parameters, a flat vector or a matrix of columns, of the same kind; or a composition."""
        if isinstance(d, LinearOperator):
            return Composed(self, _as_operator(d, self.like))  # type: ignore[return-value]  # d is no array as well
        if isinstance(d, Parameters):
            return self.product(as_parameters("d", d, self.like))
        if not isinstance(d, (np.ndarray, torch.Tensor)):
            check.fail("d", type(d).__name__, "Parameters, a vector or a matrix of columns (torch or numpy)")
        if d.ndim == 2:
            columns = [self @ d[:, j] for j in range(d.shape[1])]
            return np.stack(columns, 1) if isinstance(d, np.ndarray) else torch.stack(columns, 1)
        product = self.product(as_parameters("d", d, self.like)).vector
        return product.cpu().numpy() if isinstance(d, np.ndarray) else product

    def __add__(self, other: LinearOperator | float) -> LinearOperator:
        return Sum(self, _as_operator(other, self.like))

    __radd__ = __add__

    def __mul__(self, scale: float) -> LinearOperator:
        return Scaled(self, check.number("scale", scale))

    __rmul__ = __mul__

    def __neg__(self) -> LinearOperator:
        return Scaled(self, -1.0)

    def __sub__(self, other: LinearOperator | float) -> LinearOperator:
        return self + -_as_operator(other, self.like)

    def to_scipy(self) -> Any:
        """The same as a scipy.sparse.linalg.LinearOperator, over numpy vectors."""
        from scipy.sparse.linalg import LinearOperator as ScipyOperator

        dtype = np.dtype(str(self.like.vector.dtype).removeprefix("torch."))

        one, other = ((lambda v, A=A: A @ np.asarray(v, dtype=dtype).reshape(-1)) for A in (self, self.T))
        return ScipyOperator(self.shape, matvec=one, rmatvec=other, dtype=dtype)


class Identity(LinearOperator):
    """I."""

    def product(self, d: Parameters, out: Parameters | None = None) -> Parameters:
        """A copy of d."""
        out = d.empty() if out is None else out
        out.vector.copy_(d.vector)
        return out


class Scaled(LinearOperator):
    """scale · A."""

    def __init__(self, operator: LinearOperator, scale: float) -> None:
        super().__init__(operator.like)
        self.operator, self.scale = operator, scale

    @property
    def T(self) -> LinearOperator:
        """scale · Aᵀ."""
        return Scaled(self.operator.T, self.scale)

    def product(self, d: Parameters, out: Parameters | None = None) -> Parameters:
        """scale · (A d)."""
        return self.operator.product(d, out).scale_(self.scale)


class Sum(LinearOperator):
    """A + B."""

    def __init__(self, one: LinearOperator, other: LinearOperator) -> None:
        super().__init__(one.like)
        self.one, self.other = one, other

    @property
    def T(self) -> LinearOperator:
        """Aᵀ + Bᵀ."""
        return Sum(self.one.T, self.other.T)

    def product(self, d: Parameters, out: Parameters | None = None) -> Parameters:
        """A d + B d."""
        return self.one.product(d, out).axpy_(1.0, self.other.product(d))


class Composed(LinearOperator):
    """A B."""

    def __init__(self, outer: LinearOperator, inner: LinearOperator) -> None:
        super().__init__(inner.like)
        self.outer, self.inner = outer, inner

    @property
    def T(self) -> LinearOperator:
        """Bᵀ Aᵀ."""
        return Composed(self.inner.T, self.outer.T)

    def product(self, d: Parameters, out: Parameters | None = None) -> Parameters:
        """A (B d)."""
        return self.outer.product(self.inner.product(d), out)


def _as_operator(value: LinearOperator | float, like: Parameters) -> LinearOperator:
    if isinstance(value, LinearOperator):
        if value.like.layout.shapes != like.layout.shapes:
            check.fail("operator", "one over other parameters", f"one over the tensors {list(like)[:4]}…")
        return value
    return Scaled(Identity(like), check.number("operator", value))


class Damped(Protocol):
    """G + damping·I as an executor sees it."""

    damping: float

    def compute(self, d: Parameters, out: Parameters) -> Parameters:
        """The product, kernel by kernel."""


class Factored(Protocol):
    """A preconditioner as an executor sees it."""

    def compute(self, d: Parameters, out: Parameters) -> Parameters:
        """The product, kernel by kernel."""

    def tensors(self) -> list[Tensor]:
        """What it is made of, always in the same order."""

    def copy(self) -> Factored:
        """A deep copy."""


class Executor:
    """Runs everything kernel by kernel."""

    def gradient(self, compute: Callable[[], Parameters]) -> Parameters:
        """∇L."""
        return compute()

    def product(self, G: Damped, d: Parameters, out: Parameters) -> Parameters:
        """G d, written over ``out``."""
        return G.compute(d, out)

    @property
    def unbound(self) -> Executor:
        """What runs operators that do not belong to one evaluation, such as preconditioners."""
        return self

    def apply(self, M: Factored, r: Parameters, out: Parameters) -> Parameters:
        """M r, written over ``out``."""
        return M.compute(r, out)


EAGER = Executor()
