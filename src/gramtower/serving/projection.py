"""A map of one side's entities in two dimensions: the two directions in which embeddings vary most (PCA).

Computed once for a model: the covariance of all embeddings (float64, blocks of rows) and its first two eigenvectors,
each with the sign that makes its largest part positive. Shown are the entities with the most pairs. Cost: O(entities
dim² + dim³).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gramtower.serving.entities import Entities

_BLOCK = 1 << 16


@dataclass(frozen=True)
class Map:
    """Places of entities.

    Attributes:
        rows: the entities, those with the most pairs first.
        places: one row of two coordinates for each.
        shares: of the variance, by dimension.
    """

    rows: NDArray[np.int64]
    places: NDArray[np.float32]
    shares: tuple[float, float]


def project(this: Entities, most: int = 5000) -> Map:
    """The map of a side."""
    axes, mean, shares = _axes(this.embeddings)
    rows = np.argsort(-this.degrees, kind="stable")[:most].astype(np.int64)
    shown = this.embeddings[torch.from_numpy(rows)].double()
    return Map(rows, ((shown - mean) @ axes).float().numpy(), shares)


def _axes(X: Tensor) -> tuple[Tensor, Tensor, tuple[float, float]]:
    """The first two principal axes (dim × 2), the mean, and the shares of the variance."""
    n, dim = X.shape
    mean = sum((X[a : a + _BLOCK].double().sum(0) for a in range(0, n, _BLOCK)), torch.zeros(dim).double()) / max(1, n)
    covariance = torch.zeros(dim, dim, dtype=torch.float64)
    for start in range(0, n, _BLOCK):
        centred = X[start : start + _BLOCK].double() - mean
        covariance += centred.t() @ centred
    values, vectors = torch.linalg.eigh(covariance)
    axes = vectors[:, [-1, -2]] if dim > 1 else torch.cat([vectors, torch.zeros(1, 1).double()], 1)
    signs = torch.sign(axes.gather(0, axes.abs().argmax(0, keepdim=True)))
    total = max(float(values.clamp(min=0).sum()), 1e-300)
    second = float(values[-2]) if dim > 1 else 0.0
    return axes * torch.where(signs == 0, 1.0, signs), mean, (float(values[-1]) / total, max(0.0, second) / total)
