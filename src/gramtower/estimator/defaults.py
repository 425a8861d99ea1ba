"""Defaults that scale with the data: ω, the embedding penalty μ, the dimension k, and the device.

    ω = 4 min(1, |O| / (mn − |O|))            unobserved pairs weigh four times as much in all as observed ones, and
                                              where they are the fewer, four times as much each
    b = degree^0.1                            among them those of frequent right entities a little more
    k = the power of two nearest min(m, n)/10, at least 64, at most 256 on a CPU and 2048 on a GPU;
        halved while training would take more than half of the memory that is there: ten vectors of (m + n) k numbers
    μ = 0.0065 · clamp(d / 0.011, 1, 2) · max(1, √(k/1024)), d = |O| / mn: dense data and many dimensions need a
        stronger penalty

The figures behind them are in docs/choosing.md. Checked by tests/test_estimator.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from gramtower import _checks as check
from gramtower.distributed.group import Group
from gramtower.runtime.memory import total_memory

HIDDEN = (256, 256)
UNOBSERVED_SHARE = 4.0
L2 = 2.0**-5
IMPUTED = -0.5
RIGHT_WEIGHTS = "degree^0.1"
_PENALTY, _DENSE, _MOST, _LARGE = 0.0065, 0.011, 2.0, 1024
_LEAST_DIM, _MOST_DIM = 64, {"cpu": 256, "cuda": 2048}
_VECTORS, _ALL_RIGHT = 10, 5  # vectors of the size of P and Q in training (on a CPU 8.5 were measured), and of Q alone


def default_dim(
    shape: tuple[int, int], hidden: Sequence[int], device: torch.device, room: int, processes: int = 1
) -> int:
    """k from the size of the data and what the device can bear.

    Never more than there are entities on a side, or than the last hidden layer is wide: outputs have no more rank.

    Args:
        shape: m and n.
        hidden: widths of hidden layers.
        device: where it is trained.
        room: bytes that training may take in each process, :func:`room_for_training`.
        processes: how many share the entities; each also holds outputs of all right ones.
    """
    nearest = 1 << round(math.log2(max(1.0, min(shape) / 10)))
    dim = min(max(_LEAST_DIM, nearest), _MOST_DIM.get(device.type, 256))
    numbers = _VECTORS * sum(shape) / processes + (_ALL_RIGHT * shape[1] if processes > 1 else 0)
    while dim > 1 and 4 * numbers * dim > room:
        dim //= 2
    return max(1, min(*shape, *hidden[-1:], dim))


def room_for_training(device: torch.device, group: Group, budget: int | str | None) -> int:
    """Bytes that training may take in each process: half of what the poorest has, or the memory budget.

    Processes on a host's CPU share its memory. All processes must call it, and get the same number.
    """
    own = total_memory(device) // 2
    if device.type != "cuda":
        own //= group.local_size
    if budget is not None:
        own = min(own, check.memory_size("memory_budget", budget))
    return int(min(group.gather_json(own)))


def default_hidden(with_features: bool) -> tuple[int, ...]:
    """Hidden layers where there are features to combine; ids alone are served as well by linear factors."""
    return HIDDEN if with_features else ()


def default_omega(shape: tuple[int, int], observed: int) -> float:
    """ω that gives unobserved pairs a fixed total weight relative to observed ones, as long as they are the more.

    Few of them never outweigh all that was observed: their total weight vanishes with their number.
    """
    unobserved = shape[0] * shape[1] - observed
    return UNOBSERVED_SHARE * max(1, observed) / max(1, observed, unobserved)


def default_embedding_l2(shape: tuple[int, int], observed: int, dim: int) -> float:
    """μ from the share of pairs that were observed, and from the size of the embeddings."""
    density = observed / max(1, shape[0] * shape[1])
    return _PENALTY * min(_MOST, max(1.0, density / _DENSE)) * max(1.0, math.sqrt(dim / _LARGE))


def pick_device(device: str) -> torch.device:
    """The device for "auto", "cpu" or "cuda".

    Raises:
        ValueError: if "cuda" is asked for and no GPU can be used.
    """
    check.choice("device", device, ("auto", "cpu", "cuda"))
    if device == "cuda" and not torch.cuda.is_available():
        check.fail(
            "device", "'cuda'", "a machine with a GPU that torch can use; here there is none: take 'cpu' or 'auto'"
        )
    return torch.device("cuda" if device == "cuda" or (device == "auto" and torch.cuda.is_available()) else "cpu")
