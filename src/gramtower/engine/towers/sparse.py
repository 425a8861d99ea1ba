"""Sparse feature rows as the input of an arbitrary module, differentiable twice.

A module that begins with ``nn.Linear``, ``nn.EmbeddingBag(mode="sum")`` or ``x @ weight`` receives a
:class:`SparseRows`; its first product X W then runs on the pair kernels and nothing becomes dense. The two
products below are each other's derivative, so double backward (see opaque.py) works.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gramtower.data.features import SparseBlock
from gramtower.engine.kernels import Kernels

FIRST_LAYER = (
    'a tower over sparse features must begin with nn.Linear, nn.EmbeddingBag(mode="sum"), gramtower.InputLinear or '
    "x @ weight, of all columns or of some, x[:, start:stop]"
)


class SparseRows:
    """A block of sparse rows that answers the few torch functions a first layer calls."""

    def __init__(self, block: SparseBlock, kernels: Kernels) -> None:
        self.block, self.kernels = block, kernels

    @property
    def shape(self) -> torch.Size:
        """(rows, features)."""
        return torch.Size(self.block.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the values."""
        return self.block.values.dtype

    @property
    def device(self) -> torch.device:
        """Device of the values."""
        return self.block.values.device

    def size(self, dim: int | None = None) -> Any:
        """As torch.Tensor.size."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """Two."""
        return 2

    def __getitem__(self, index: Any) -> SparseRows:
        """Some columns of all rows, ``x[:, start:stop]``."""
        match index:
            case (rows, slice() as columns) if rows == slice(None) and columns.step in (None, 1):
                start, stop, _ = columns.indices(self.shape[1])
                return SparseRows(self.block.columns(start, max(start, stop)), self.kernels)
        raise ValueError(f"sparse features were indexed by {index!r}; only columns can be taken: x[:, start:stop]")

    def __matmul__(self, weight: Tensor) -> Tensor:
        if weight.dim() != 2 or len(weight) != self.shape[1]:
            raise ValueError(f"{self.shape[1]} columns of sparse features met a layer for {len(weight)}")
        return _product(weight, self.block, self.kernels)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is nn.functional.linear:
            x, weight = args[0], args[1] if len(args) > 1 else kwargs["weight"]
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            y = x @ weight.t()
            return y if bias is None else y + bias
        if func is nn.functional.embedding_bag:
            if kwargs.get("mode", "mean") != "sum":
                raise ValueError('EmbeddingBag on sparse features: mode must be "sum", so that values are weights')
            return args[0] @ args[1]
        if func in (torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__):
            return args[0] @ args[1]
        raise ValueError(f"sparse features reached {getattr(func, '__name__', func)}; {FIRST_LAYER}")


class _Product(torch.autograd.Function):
    """W ↦ X W."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, block: SparseBlock, kernels: Kernels) -> Tensor:
        ctx.block, ctx.kernels = block, kernels
        out = weight.new_zeros(block.shape[0], weight.shape[1])
        kernels.left_sum(block.pattern, block.values, weight.contiguous(), out)
        return out

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> tuple[Tensor, None, None]:
        return _transposed_product(g[0], ctx.block, ctx.kernels), None, None


class _TransposedProduct(torch.autograd.Function):
    """G ↦ Xᵀ G."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, block: SparseBlock, kernels: Kernels) -> Tensor:
        ctx.block, ctx.kernels = block, kernels
        out = g.new_zeros(block.shape[1], g.shape[1])
        kernels.right_sum(block.pattern, block.values, g.contiguous(), out)
        return out

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> tuple[Tensor, None, None]:
        return _product(g[0], ctx.block, ctx.kernels), None, None


_product: Callable[[Tensor, SparseBlock, Kernels], Tensor] = _Product.apply
_transposed_product: Callable[[Tensor, SparseBlock, Kernels], Tensor] = _TransposedProduct.apply
