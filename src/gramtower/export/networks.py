"""A tower as one network from features, as they come, to embeddings: scaling included, any number of rows.

    what the tower sees           inputs
    ids                           rows (batch), the row number of each entity
    a dense matrix                features (batch × width)
    anything else                 columns and values (batch × length): of each entity the columns with a value and these
                                  values, in any order; −1 fills up shorter rows. The columns of the parts follow one
                                  another: ids have the value 1 in their own, histories 1 in those of their entities,
                                  tables and matrices what they are encoded as; a dense matrix among them has all. An
                                  entity without a history gets the mean one of training.

Scaling (model/scaling.py) is in float64 as in the model, the rest in float32. Cost of sparse rows: batch × length ×
width of the first layer.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gramtower.engine.towers.layers import InputLinear
from gramtower.model.inputs import Inputs, Part
from gramtower.model.scaling import MOST_DEVIATIONS


class IdNetwork(nn.Module):
    """Row numbers → embeddings."""

    names = ("rows",)

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, rows: Tensor) -> Tensor:
        """Embeddings of entities by their row numbers."""
        return self.tower(rows)  # type: ignore[no-any-return]


class DenseNetwork(nn.Module):
    """Rows of a dense matrix, as the caller has them → embeddings."""

    names = ("features",)

    def __init__(self, tower: nn.Module, part: Part) -> None:
        super().__init__()
        self.tower = tower
        scale = _Columns([part])
        self.shift, self.factor, self.limit = scale.shift, scale.factor, scale.limit

    def forward(self, features: Tensor) -> Tensor:
        """Embeddings of rows of features."""
        scaled = (features.double() - self.shift) * self.factor
        scaled = torch.minimum(torch.maximum(scaled, -self.limit), self.limit)
        return self.tower(scaled.float())  # type: ignore[no-any-return]


class SparseNetwork(nn.Module):
    """Columns and values of several parts side by side → embeddings."""

    names = ("columns", "values")

    def __init__(self, tower: nn.Module, inputs: Inputs) -> None:
        super().__init__()
        self.scale, self.width = _Columns(list(inputs.parts)), inputs.width
        layers = list(tower) if isinstance(tower, nn.Sequential) else []
        first = layers[0] if layers else None
        self.table: nn.Parameter | None = None
        self.bias: Tensor | None = None
        if isinstance(first, (InputLinear, nn.Linear)):
            weight = first.weight if isinstance(first, InputLinear) else first.weight.t().contiguous()
            self.table, self.bias = _constant(weight.detach()), None if first.bias is None else _constant(first.bias)
            tower = nn.Sequential(*layers[1:])
        self.rest = tower
        self.usual: nn.Parameter | None = None  # of entities without a history, before the bias
        self.first, self.stop, start = 0, 0, 0
        for part in inputs.parts:
            if part.usual is not None:
                self.first, self.stop, row = start, start + part.width, torch.zeros(1, self.width)
                row[0, self.first : self.stop] = torch.from_numpy(part.usual.toarray()[0])
                self.usual = _constant(row if self.table is None else row @ self.table)
            start += part.width

    def forward(self, columns: Tensor, values: Tensor) -> Tensor:
        """Embeddings of sparse rows."""
        there = columns >= 0
        at = torch.where(there, columns, torch.zeros_like(columns))
        scaled = self.scale(at, there, values)
        if self.table is None:
            rows = torch.zeros(columns.shape[0], self.width).scatter_add(1, at, scaled)
        else:
            rows = torch.matmul(scaled.unsqueeze(1), self.table[at]).squeeze(1)
            rows = rows if self.bias is None else rows + self.bias
        if self.usual is not None:
            seen = there & (columns >= self.first) & (columns < self.stop)
            rows = rows + (seen.float().sum(1, keepdim=True) == 0).float() * self.usual
        return self.rest(rows)  # type: ignore[no-any-return]


class _Columns(nn.Module):
    """What becomes of the value of each column, as arrays over all columns."""

    def __init__(self, parts: list[Part]) -> None:
        super().__init__()
        factor, shift, limit, unit, group = [], [], [], [], []
        self.groups = 0
        for part in parts:
            scaling, one = part.scaling, np.ones(part.width)
            factor.append(part.factor * one if scaling is None else scaling.factor)
            dense = scaling is not None and scaling.shift is not None
            shift.append(0 * one if scaling is None or scaling.shift is None else scaling.shift)
            limit.append(one * (MOST_DEVIATIONS / math.sqrt(part.width) if dense else np.inf))
            unit.append(one * (0.0 if scaling is None or scaling.unit is None else scaling.unit))
            member = np.full(part.width, -1, np.int64)  # of the columns whose values are together of length one
            if part.kind == "history" or (scaling is not None and not dense):
                member[:] = self.groups
                member[list(scaling.apart) if scaling is not None else []] = -1
                self.groups += 1
            group.append(member)
        self.factor, self.shift, self.limit, self.unit = (
            _constant(torch.from_numpy(np.concatenate(arrays).astype(np.float64)))
            for arrays in (factor, shift, limit, unit)
        )
        self.group = _constant(torch.from_numpy(np.concatenate(group)))
        self.logs = bool((self.unit > 0).any())

    def forward(self, at: Tensor, there: Tensor, values: Tensor) -> Tensor:
        """The scaled values, zero where nothing is."""
        made = values.double()
        if self.logs:
            unit = self.unit[at]
            log = torch.sign(made) * torch.log1p(made.abs() / torch.where(unit > 0, unit, torch.ones_like(unit)))
            made = torch.where(unit > 0, log, made)
        limit, group = self.limit[at], self.group[at]
        made = (made - self.shift[at]) * self.factor[at]
        made = torch.minimum(torch.maximum(made, -limit), limit)
        made = torch.where(there, made, torch.zeros_like(made))
        for number in range(self.groups):
            own = group == number
            length = torch.where(own, made * made, torch.zeros_like(made)).sum(1, keepdim=True).sqrt()
            made = torch.where(own, made / torch.where(length > 0, length, torch.ones_like(length)), made)
        return made.float()


def network_of(tower: nn.Module, inputs: Inputs) -> IdNetwork | DenseNetwork | SparseNetwork:
    """The tower of a side with the scaling of what it sees, as a module on the CPU that nothing else shares."""
    tower = copy.deepcopy(tower).cpu().float().eval().requires_grad_(False)
    if inputs.kind == "id":
        return IdNetwork(tower)
    if inputs.kind == "dense":
        return DenseNetwork(tower, inputs.parts[0])
    return SparseNetwork(tower, inputs)


def example(network: nn.Module, width: int) -> tuple[Tensor, ...]:
    """Inputs of two rows, to trace a network with."""
    if isinstance(network, IdNetwork):
        return (torch.zeros(2, dtype=torch.int64),)
    if isinstance(network, DenseNetwork):
        return (torch.zeros(2, width),)
    last = width - 1
    return torch.tensor([[0, last, -1], [last, -1, -1]]), torch.tensor([[1.0, 2.0, 0.0], [1.0, 0.0, 0.0]])


def as_columns(rows: Any) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Sparse rows as ``columns`` and ``values``, filled up with −1 and 0."""
    matrix = sp.csr_matrix(rows)
    counts = np.diff(matrix.indptr)
    there = np.arange(max(1, counts.max(initial=0))) < counts[:, None]
    columns, values = np.full(there.shape, -1, np.int64), np.zeros(there.shape, np.float32)
    columns[there], values[there] = matrix.indices, matrix.data
    return columns, values


def _constant(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.detach().clone(), requires_grad=False)
