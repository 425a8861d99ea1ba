"""How exactly a GPU multiplies float32 matrices, as a choice of the problem and not of the process.

    "float32"   as IEEE float32
    "tf32"      inputs rounded to 10 bits of mantissa, sums in float32: several times faster on tensor cores

In torch this is a process-wide setting; it is set during a computation and restored after it. Threads that want the
same precision compute at once; a thread that wants the other one waits until they are done. CPUs and float64 are not
affected.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

PRECISIONS = ("float32", "tf32")
PAIR_PRECISIONS = ("float32", "bfloat16")


class _Inside(threading.local):
    """The blocks that a thread is in."""

    depth = 0


_inside = _Inside()
_turn = threading.Condition()
_stack = ExitStack()  # restores the setting
_users, _shared = 0, ""  # threads inside blocks, and the precision that they use


@contextmanager
def products_in(precision: str) -> Iterator[None]:
    """Matrix products inside the block use that precision; a block within a block sets it for itself."""
    if _inside.depth:
        with _set_to(precision):
            yield
        return
    _enter(precision)
    _inside.depth += 1
    try:
        yield
    finally:
        _inside.depth -= 1
        _leave()


def _enter(precision: str) -> None:
    """Wait until no thread uses the other precision, and set this one."""
    global _users, _shared
    with _turn:
        _turn.wait_for(lambda: not _users or _shared == precision)
        if not _users:
            _stack.enter_context(_set_to(precision))
        _users, _shared = _users + 1, precision


def _leave() -> None:
    """Restore the setting if no other thread needs it."""
    global _users
    with _turn:
        _users -= 1
        if not _users:
            _stack.close()
            _turn.notify_all()


@contextmanager
def _set_to(precision: str) -> Iterator[None]:
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
