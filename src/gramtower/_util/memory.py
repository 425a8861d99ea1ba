"""How much memory there is, and the row blocks of a tower; engine/objective/plan.py decides what is kept of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from gramtower._util import host

_SHARE = 0.5


@dataclass(frozen=True)
class BlockPlan:
    """Rows per block, whether activations are kept between forward, jvp and vjp, and whether outputs are."""

    rows: int
    keep: bool
    outputs: bool = True


def default_budget(device: torch.device) -> int:
    """Half of the memory that is free now."""
    return int(free_memory(device) * _SHARE)


def free_memory(device: torch.device) -> int:
    """Bytes that can be had now; of a host at most what a container may still have of it.

    What torch keeps of a GPU's memory for this process while nothing uses it can be had as well.
    """
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + int(kept)
    try:
        with open("/proc/meminfo") as lines:
            free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return total_memory(device) // 2
    left = host.memory_left()
    return free if left is None else min(free, left)


def readable(size: int) -> str:
    """A size as the argument memory_budget takes it, rounded up."""
    unit, name = (10**9, "GB") if size >= 10**11 else (10**6, "MB")
    return f"{-(-size // unit)}{name}"


def total_memory(device: torch.device) -> int:
    """Bytes that a device has, whoever uses them now; of a host what a container may have of it."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return host.memory_size()


@contextmanager
def explained(budget: int | None) -> Iterator[None]:
    """Turns a GPU's "out of memory" into an error that names the budget to set."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        now = "half of what was free" if budget is None else f"{budget / 1e9:.1f} GB"
        smaller = "4GB" if budget is None else f"{max(0.1, budget / 2e9):.1f}GB"
        raise MemoryError(
            f"the GPU ran out of memory: memory_budget is {now}; give a smaller one, such as memory_budget={smaller!r}"
            ", so that towers run in row blocks and recompute, or a smaller dim"
        ) from error
