"""Scores p_iᵀq_j of many left entities against all right ones, a block of rows at a time.

All blocks share one buffer of at most ``block_bytes`` (or one row), or several in turn, so that there is no array of
m·n elements. Pairs that must not be ranked are −inf. Cost: the product, 2·rows·n·k operations, and one write for each
excluded pair.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from gramtower._util import checks as check

_DEFAULT_BYTES = {"cpu": 64_000_000, "cuda": 1_000_000_000}


EmbeddingsLike: TypeAlias = NDArray[np.generic] | Tensor  # floating-point rows, one for each entity


def embeddings(P: EmbeddingsLike, Q: EmbeddingsLike) -> tuple[Tensor, Tensor]:
    """Both matrices of embeddings as float32 tensors, checked."""
    left, right = as_embeddings("P", P), as_embeddings("Q", Q)
    if left.shape[1] != right.shape[1] or left.device != right.device:
        given = f"shapes {tuple(left.shape)} on {left.device} and {tuple(right.shape)} on {right.device}"
        check.fail("P, Q", given, "the same number of columns and the same device")
    return left, right


def as_embeddings(name: str, value: EmbeddingsLike) -> Tensor:
    """A matrix of embeddings as a float32 tensor, checked; ``name`` is the name of the argument."""
    if not isinstance(value, (Tensor, np.ndarray)) or value.ndim != 2 or 0 in value.shape[1:]:
        given = f"shape {tuple(value.shape)}" if hasattr(value, "shape") else type(value).__name__
        check.fail(name, given, "a tensor of shape (entities, k)")
    if value.dtype.kind not in "biufc" if isinstance(value, np.ndarray) else value.layout != torch.strided:
        check.fail(name, f"{type(value).__name__} of {value.dtype}", "a dense tensor of floating-point embeddings")
    tensor = torch.as_tensor(value).detach()
    if not tensor.is_floating_point():
        check.fail(name, f"dtype {tensor.dtype}", "floating-point embeddings")
    tensor = tensor.to(torch.float32).contiguous()
    if not torch.isfinite(tensor.sum()):  # the sum of finite numbers may overflow, so check each row
        bad = int((~torch.isfinite(tensor)).any(1).sum())
        if bad:
            check.fail(name, f"{bad} rows with NaN or infinity", "finite embeddings")
    return tensor


def score_blocks(
    P: Tensor,
    Q: Tensor,
    exclude: sp.csr_matrix | None = None,
    deny: Tensor | None = None,
    rows: NDArray[np.int64] | None = None,
    block_bytes: int | str | None = None,
    buffers: int = 1,
) -> Iterator[tuple[int, int, Tensor]]:
    """Blocks of scores, in order of rows.

    Args:
        P: left embeddings, rows × k, float32.
        Q: right embeddings, n × k, float32, on the same device.
        exclude: rows × n (the rows that are scored); its stored entries become −inf.
        deny: columns that become −inf for everyone.
        rows: rows of P to score; None for all.
        block_bytes: largest memory for scores; None for 64 MB on a CPU and 1 GB on a GPU.
        buffers: number of buffers, which are used in turn.

    Yields:
        First row, row after the last, and their scores, which are overwritten after ``buffers - 1`` more blocks.
    """
    count, n = len(P) if rows is None else len(rows), len(Q)
    size = rows_in_block(n, count, P.device, block_bytes, buffers)
    held = [
        torch.empty((size, n), dtype=torch.float32, device=P.device) for _ in range(min(buffers, -(-count // size)))
    ]
    across = Q.t()
    for number, start in enumerate(range(0, count, size)):
        stop = min(start + size, count)
        scores = held[number % buffers][: stop - start]
        part = P[start:stop] if rows is None else P[torch.from_numpy(rows[start:stop]).to(P.device)]
        places = None if exclude is None else _places(exclude, start, stop, P.device)
        torch.mm(part, across, out=scores)
        if places is not None:
            scores.view(-1).index_fill_(0, places, -torch.inf)
        if deny is not None:
            scores.index_fill_(1, deny, -torch.inf)
        yield start, stop, scores


def rows_in_block(
    n: int, rows: int, device: torch.device, block_bytes: int | str | None = None, buffers: int = 1
) -> int:
    """The number of rows of n scores in a block, if there are ``buffers`` blocks at a time."""
    given = _DEFAULT_BYTES.get(device.type, _DEFAULT_BYTES["cpu"]) if block_bytes is None else block_bytes
    return max(1, min(rows, check.memory_size("block_bytes", given) // (4 * buffers * max(1, n))))


def _places(exclude: sp.csr_matrix, start: int, stop: int, device: torch.device) -> Tensor:
    """The positions of the stored entries of rows start:stop in a block of scores; it does not wait for a GPU."""
    bounds = exclude.indptr[start : stop + 1]
    columns = exclude.indices[bounds[0] : bounds[-1]].astype(np.int64)
    places = torch.from_numpy(columns + np.repeat(np.arange(stop - start) * exclude.shape[1], np.diff(bounds)))
    return places if device.type == "cpu" else places.pin_memory().to(device, non_blocking=True)
