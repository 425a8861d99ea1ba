"""θ, the trainable tensors of both towers as named views of one flat vector, and linear operators on it.

One flat vector makes the vector operations of an optimizer (dot, axpy, norm) single passes. Sums are
accumulated in float64.

An operator, such as G or its preconditioner M, is known by its products. ``A @ d`` takes Parameters, a flat torch or
numpy vector, or a matrix of columns, and gives the same kind back; ``A @ B``, ``A + B``, ``A + 0.1`` (a multiple of the
identity), ``2.0 * A`` and ``A.T`` are operators again; ``A.to_scipy()`` hands any of them to scipy's solvers. After
curvlinops' PyTorchLinearOperator: vectors are converted in one place, operators compute only on Parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gramtower._util import checks as check
from gramtower._util.host import empty_like
from gramtower.distributed.group import SINGLE, Group
from gramtower.engine.kernels import select


def side_of(name: str) -> str:
    """The side, "left" or "right", of a tensor of θ; a tensor shared by both towers is named after the left."""
    return "left" if name.startswith("left.") else "right"


@dataclass(frozen=True)
class Layout:
    """Names, shapes and positions of the tensors within the flat vector.

    Over several processes, ``owned`` tensors are local rows of sharded tables; all others are replicated.
    """

    shapes: Mapping[str, tuple[int, ...]]
    places: Mapping[str, slice]
    size: int
    owned: frozenset[str] = frozenset()
    group: Group = field(default=SINGLE, compare=False)

    @staticmethod
    def of(shapes: Mapping[str, tuple[int, ...]], owned: frozenset[str] = frozenset(), group: Group = SINGLE) -> Layout:
        """The layout that stores tensors one after the other, in the given order."""
        places, start = {}, 0
        for name, shape in shapes.items():
            places[name] = slice(start, start + math.prod(shape))
            start += math.prod(shape)
        return Layout(dict(shapes), places, start, owned, group)

    def replicated(self, vector: Tensor) -> list[Tensor]:
        """Views of the replicated tensors."""
        return [vector[place] for name, place in self.places.items() if name not in self.owned]

    def counted(self) -> list[slice]:
        """The parts that this process adds to sums over θ: local rows, and in the first process replicated tensors."""
        if self.group.rank == 0:
            return [slice(0, self.size)]
        return [place for name, place in self.places.items() if name in self.owned]

    def without(self, names: set[str]) -> list[slice]:
        """The places of the vector without some tensors, in as few pieces as possible."""
        pieces, start = [], 0
        for name in sorted(names, key=lambda name: self.places[name].start):
            pieces.append(slice(start, self.places[name].start))
            start = self.places[name].stop
        pieces.append(slice(start, self.size))
        return [piece for piece in pieces if piece.start < piece.stop]


class Parameters:
    """All trainable weights of two towers as one vector with names, or a direction among them.

    ``p["left.0.weight"]`` is a view of the flat vector. Arithmetic returns new objects; methods ending in
    ``_`` work in place.
    """

    __slots__ = ("layout", "vector")

    def __init__(self, layout: Layout, vector: Tensor) -> None:
        if vector.shape != (layout.size,):
            check.fail("vector", f"shape {tuple(vector.shape)}", f"shape ({layout.size},)")
        self.layout, self.vector = layout, vector

    def __getitem__(self, name: str) -> Tensor:
        return self.vector[self.layout.places[name]].view(self.layout.shapes[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout.shapes)

    def __len__(self) -> int:
        return self.layout.size

    def __repr__(self) -> str:
        return f"Parameters({len(self.layout.shapes)} tensors, {len(self):,} numbers, {self.vector.dtype})"

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Names with views."""
        return ((name, self[name]) for name in self)

    def to_vector(self) -> Tensor:
        """A copy of the flat vector."""
        return self.vector.clone()

    def from_vector(self, vector: Tensor) -> Parameters:
        """Parameters of this layout and dtype holding a copy of ``vector``."""
        return Parameters(self.layout, torch.as_tensor(vector).to(self.vector, copy=True))

    def clone(self) -> Parameters:
        """A copy."""
        return Parameters(self.layout, empty_like(self.vector).copy_(self.vector))

    def empty(self) -> Parameters:
        """Uninitialised parameters of this layout."""
        return Parameters(self.layout, empty_like(self.vector))

    def blank(self) -> Parameters:
        """Parameters of the same layout, dtype and device without values, which take no memory."""
        return Parameters(self.layout, self.vector.new_zeros(1).expand(len(self)))

    def zeros(self) -> Parameters:
        """Zeros of this layout."""
        return Parameters(self.layout, torch.zeros_like(self.vector))

    def inner(self, other: Parameters) -> Tensor:
        """⟨self, other⟩ over all processes, accumulated in float64, as a scalar tensor on the device."""
        kernels, layout = select(self.vector.device), self.layout
        if layout.group.size == 1:
            return kernels.inner(self.vector, other.vector)
        parts = [kernels.inner(self.vector[p], other.vector[p]) for p in layout.counted()]
        zero = torch.zeros((), dtype=torch.float64, device=self.vector.device)
        return layout.group.sum_(sum(parts, zero))

    def dot(self, other: Parameters) -> float:
        """⟨self, other⟩ accumulated in float64."""
        return float(self.inner(other))

    def norm(self) -> float:
        """Euclidean norm, accumulated in float64."""
        return math.sqrt(self.dot(self))

    def axpy_(self, a: float | Tensor, other: Parameters) -> Parameters:
        """self += a · other, in place; ``a`` may be a scalar on the device."""
        if isinstance(a, Tensor) and a.is_cuda:
            self.vector.addcmul_(other.vector, a.to(self.vector.dtype))
        else:
            self.vector.add_(other.vector, alpha=float(a))
        return self

    def scale_(self, a: float) -> Parameters:
        """``self *= a``, in place."""
        self.vector.mul_(a)
        return self

    def begin_sum_(self) -> Parameters:
        """Zero the replicated tensors in all processes but the first, before a sum over processes."""
        if self.layout.group.rank > 0:
            for part in self.layout.replicated(self.vector):
                part.zero_()
        return self

    def end_sum_(self) -> Parameters:
        """All-reduce the replicated tensors."""
        if self.layout.group.size > 1:
            parts = self.layout.replicated(self.vector)
            for part, total in zip(parts, self.layout.group.sum_all(*parts), strict=True):
                part.copy_(total)
        return self

    def is_finite(self) -> bool:
        """Whether every entry is finite."""
        return bool(torch.isfinite(self.vector).all())

    def __add__(self, other: Parameters) -> Parameters:
        return Parameters(self.layout, torch.add(self.vector, other.vector, out=empty_like(self.vector)))

    def __sub__(self, other: Parameters) -> Parameters:
        return Parameters(self.layout, torch.sub(self.vector, other.vector, out=empty_like(self.vector)))

    def __mul__(self, a: float) -> Parameters:
        return Parameters(self.layout, self.vector * a)

    __rmul__ = __mul__

    def __neg__(self) -> Parameters:
        return Parameters(self.layout, -self.vector)


def as_parameters(name: str, value: object, like: Parameters) -> Parameters:
    """Parameters from Parameters or from a flat vector (torch or numpy) of the right length."""
    if isinstance(value, Parameters):
        if value.layout.shapes != like.layout.shapes:
            check.fail(name, "Parameters of other tensors", f"the tensors {list(like)[:4]}…")
        return Parameters(like.layout, value.vector.to(like.vector))
    vector = value if isinstance(value, Tensor) else torch.from_numpy(check.as_float_array(name, value))
    if vector.shape != (len(like),):
        check.fail(name, f"shape {tuple(vector.shape)}", f"Parameters or a vector of shape ({len(like)},)")
    return Parameters(like.layout, vector.to(like.vector))


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
            return _composed(self, _as_operator(d, self.like))  # type: ignore[return-value]  # d is no array as well
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
        return _sum(self, _as_operator(other, self.like))

    __radd__ = __add__

    def __mul__(self, scale: float) -> LinearOperator:
        return _scaled(self, check.number("scale", scale))

    __rmul__ = __mul__

    def __neg__(self) -> LinearOperator:
        return _scaled(self, -1.0)

    def __sub__(self, other: LinearOperator | float) -> LinearOperator:
        return self + -_as_operator(other, self.like)

    def to_scipy(self) -> Any:
        """The same as a scipy.sparse.linalg.LinearOperator, over numpy vectors."""
        from scipy.sparse.linalg import LinearOperator as ScipyOperator

        dtype = np.dtype(str(self.like.vector.dtype).removeprefix("torch."))

        one, other = ((lambda v, A=A: A @ np.asarray(v, dtype=dtype).reshape(-1)) for A in (self, self.T))
        return ScipyOperator(self.shape, matvec=one, rmatvec=other, dtype=dtype)


class _Combined(LinearOperator):
    """An operator made of others, by its product with d, written over ``out`` if given, and its transpose."""

    def __init__(
        self,
        like: Parameters,
        product: Callable[[Parameters, Parameters | None], Parameters],
        transpose: Callable[[], LinearOperator],
    ) -> None:
        super().__init__(like)
        self._product, self._transpose = product, transpose

    @property
    def T(self) -> LinearOperator:
        return self._transpose()

    def product(self, d: Parameters, out: Parameters | None = None) -> Parameters:
        return self._product(d, out)


def _scaled(A: LinearOperator, scale: float) -> LinearOperator:
    return _Combined(A.like, lambda d, out: A.product(d, out).scale_(scale), lambda: _scaled(A.T, scale))


def _sum(A: LinearOperator, B: LinearOperator) -> LinearOperator:
    return _Combined(A.like, lambda d, out: A.product(d, out).axpy_(1.0, B.product(d)), lambda: _sum(A.T, B.T))


def _composed(A: LinearOperator, B: LinearOperator) -> LinearOperator:
    return _Combined(B.like, lambda d, out: A.product(B.product(d), out), lambda: _composed(B.T, A.T))


def _as_operator(value: LinearOperator | float, like: Parameters) -> LinearOperator:
    if isinstance(value, LinearOperator):
        if value.like.layout.shapes != like.layout.shapes:
            check.fail("operator", "one over other parameters", f"one over the tensors {list(like)[:4]}…")
        return value
    scale = check.number("operator", value)

    def multiple(d: Parameters, out: Parameters | None) -> Parameters:
        out = d.empty() if out is None else out
        torch.mul(d.vector, scale, out=out.vector)
        return out

    return _Combined(like, multiple, lambda: _as_operator(scale, like))
