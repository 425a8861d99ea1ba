"""Defaults that scale with the data: ω, the embedding penalty μ, the dimension k, and the device.

    ω = 3 |O| / (mn − |O|)                    unobserved pairs weigh three times as much in all as observed ones
    μ = 0.0065 · clamp(d / 0.014, 1, 1.7)     with d = |O| / mn: dense data can bear, and need, a stronger penalty
    k = the power of two nearest min(m, n)/20, at least 64, at most 256 on a CPU and 1024 on a GPU

The figures behind them are in docs/choosing.md. Checked by tests/test_estimator.py.
"""

from __future__ import annotations

import math

import torch

from gramtower import _checks as check

HIDDEN = (256, 256)
UNOBSERVED_SHARE = 3.0
L2 = 2.0**-5
IMPUTED = -0.5
_PENALTY, _DENSE, _MOST = 0.0065, 0.014, 1.7
_LEAST_DIM, _MOST_DIM = 64, {"cpu": 256, "cuda": 1024}


def default_dim(shape: tuple[int, int], device: torch.device) -> int:
    """k from the size of the data and what the device can bear; never more than there are entities on a side."""
    nearest = 1 << round(math.log2(max(1.0, min(shape) / 20)))
    return max(1, min(*shape, max(_LEAST_DIM, nearest), _MOST_DIM.get(device.type, 256)))


def default_hidden(with_features: bool) -> tuple[int, ...]:
    """Hidden layers where there are features to combine; ids alone are served as well by linear factors."""
    return HIDDEN if with_features else ()


def default_omega(shape: tuple[int, int], observed: int) -> float:
    """ω that gives unobserved pairs a fixed total weight relative to observed ones."""
    m, n = shape
    return UNOBSERVED_SHARE * max(1, observed) / max(1, m * n - observed)


def default_embedding_l2(shape: tuple[int, int], observed: int) -> float:
    """μ from the share of pairs that were observed."""
    density = observed / (shape[0] * shape[1])
    return _PENALTY * min(_MOST, max(1.0, density / _DENSE))


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
