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
    matmul, wanted = torch.backends.cuda.matmul, precision == "tf32"
    named = getattr(matmul, "fp32_precision", None)  # since torch 2.9: "tf32", "ieee", or "none", which is "ieee"
    try:
        allowed = matmul.allow_tf32
    except RuntimeError:  # the caller has set fp32_precision; torch refuses to mix the two
        allowed = None
    if wanted == (named == "tf32" if allowed is None else allowed):
        yield
        return
    if allowed is None:
        matmul.fp32_precision = "tf32" if wanted else "ieee"
    else:
        matmul.allow_tf32 = wanted
    try:
        yield
    finally:
        if allowed is not None:
            matmul.allow_tf32 = allowed
        if named is not None:  # setting allow_tf32 makes "none" into "ieee"
            matmul.fp32_precision = named
