"""How exactly a GPU multiplies float32 matrices, as a choice of the problem and not of the process.

    "float32"   as IEEE float32
    "tf32"      inputs rounded to 10 bits of mantissa, sums in float32: several times faster on tensor cores

In torch this is a process-wide setting; it is set during a computation and restored after it. CPUs and float64 are not
affected. Checked by tests/test_precision.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

PRECISIONS = ("float32", "tf32")
PAIR_PRECISIONS = ("float32", "bfloat16")


@contextmanager
def products_in(precision: str) -> Iterator[None]:
    """Matrix products inside the block use that precision."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    matmul.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        matmul.allow_tf32 = before
