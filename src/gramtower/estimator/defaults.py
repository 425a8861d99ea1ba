"""Defaults that scale with the data: ω, the embedding penalty μ, and the device.

    ω = 2 |O| / (mn − |O|)               unobserved pairs weigh twice as much in all as observed ones
    μ = 2⁻⁸ · clamp(d / 0.012, 1, 2)     with d = |O| / mn: dense data can bear, and need, a stronger penalty

The figures behind them are in docs/choosing.md. Checked by tests/test_estimator.py.
"""

from __future__ import annotations

import torch

from gramtower import _checks as check

HIDDEN = (256, 256)
UNOBSERVED_SHARE = 2.0
L2 = 2.0**-4
_PENALTY, _DENSE = 2.0**-8, 0.012


def default_dim(shape: tuple[int, int], observed: int) -> int:
    """k from the size of the data."""
    return max(1, min(256, *shape))


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
    return _PENALTY * min(2.0, max(1.0, density / _DENSE))


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
