"""Problems and towers to try everything on, each with its dense twin."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp
import torch
from dense import Dense
from torch import nn

import gramtower as gt

COSH = gt.Loss(
    value=lambda y, s: torch.cosh(s - y) - 1,
    first=lambda y, s: torch.sinh(s - y),
    second=lambda y, s: torch.cosh(s - y),
    name="cosh",
)
LOSSES = ("logistic", "squared", "squared_hinge", "cosh")
FEATURES = ("ids", "dense", "sparse")
TOWERS = (
    "elu",
    "linear",
    "deep-tanh",
    "residual",
    "layernorm",
    "rmsnorm",
    "normalised",
    "custom",
    "silu",
    "gelu-relu",
    "tied",
    "skip",
    "gated",
    "joined",
    "branching",
)


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width + 1), nn.SiLU(), nn.Linear(width + 1, width))

    def forward(self, x):
        return x + self.inner(x)


class Normalised(nn.Module):
    def forward(self, x):
        return nn.functional.normalize(x, dim=-1)


class Custom(nn.Module):
    """Not a Sequential: its first layer is found by what it calls."""

    def __init__(self, width: int, dim: int, kind: str) -> None:
        super().__init__()
        self.first = nn.Embedding(width, 5) if kind == "ids" else nn.Linear(width, 5)
        self.gate = nn.Parameter(torch.randn(5))
        self.last = nn.Linear(5, dim)
        self.unused = nn.Parameter(torch.randn(2))

    def forward(self, x):
        h = self.first(x)
        return self.last(torch.tanh(h) * torch.sigmoid(self.gate * h))


class Skip(nn.Module):
    """A linear way around the hidden layers, from the features to the result."""

    def __init__(self, first, dim: int) -> None:
        super().__init__()
        self.first, self.skip, self.out = first(4), first(dim), nn.Linear(4, dim)
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        h = self.norm(torch.relu(self.first(x)))
        return self.out(h) + 0.5 * self.skip(x)


class Gated(nn.Module):
    """Halves of one layer multiplied, with functions in the place of modules and a learned scale."""

    def __init__(self, first, dim: int) -> None:
        super().__init__()
        self.first, self.out, self.scale = first(6), nn.Linear(3, dim), nn.Parameter(torch.randn(3))
        self.strength = nn.Parameter(torch.randn(()))

    def forward(self, x):
        value, gate = self.first(x).chunk(2, dim=1)
        h = nn.functional.gelu(value) * torch.sigmoid(gate)
        h += self.scale * value
        return self.out(h * self.strength - gate.tanh() / 2)


class Joined(nn.Module):
    """Several tables side by side, one of them through a part without a step (a softmax over columns)."""

    def __init__(self, first, dim: int) -> None:
        super().__init__()
        self.one, self.two, self.out = first(3), first(2), nn.Sequential(nn.Linear(5, 4), nn.ReLU(inplace=True))
        self.last = nn.Linear(4 + 2, dim)

    def forward(self, x):
        a, b = torch.softmax(self.one(x), dim=-1), self.two(x)
        h = torch.cat([a, b], dim=1)
        return self.last(torch.cat((self.out(h), b * b), -1))


class Branching(nn.Module):
    """A forward that cannot be traced: it is called as it is."""

    def __init__(self, first, dim: int) -> None:
        super().__init__()
        self.first, self.out = first(4), nn.Linear(4, dim)

    def forward(self, x):
        h = self.first(x)
        return self.out(torch.tanh(h)) if h.shape[1] > 2 else h


def first_layer(kind: str, width: int, out: int, variant: int) -> nn.Module:
    if kind == "ids":
        return nn.Embedding(width, out) if variant else gt.InputLinear(width, out)
    if kind == "dense":
        return nn.Linear(width, out) if variant else gt.InputLinear(width, out)
    return (gt.InputLinear(width, out), nn.Linear(width, out), nn.EmbeddingBag(width, out, mode="sum"))[variant % 3]


def make_tower(name: str, kind: str, width: int, dim: int, variant: int = 0) -> nn.Module:
    first = lambda out: first_layer(kind, width, out, variant)  # noqa: E731
    square = nn.Linear(4, 4)
    return {
        "elu": lambda: nn.Sequential(first(5), nn.ELU(), nn.Linear(5, 4), nn.ELU(), nn.Linear(4, dim)),
        "linear": lambda: first(dim),
        "deep-tanh": lambda: nn.Sequential(
            first(4), nn.Tanh(), nn.Sequential(nn.Linear(4, 6, bias=False), nn.Identity(), nn.Tanh()), nn.Linear(6, dim)
        ),
        "residual": lambda: nn.Sequential(first(4), Residual(4), nn.Linear(4, dim)),
        "layernorm": lambda: nn.Sequential(first(5), nn.LayerNorm(5), nn.ELU(), nn.Linear(5, dim)),
        "rmsnorm": lambda: nn.Sequential(first(5), nn.Tanh(), nn.Linear(5, dim), nn.RMSNorm(dim, eps=1e-5)),
        "normalised": lambda: nn.Sequential(first(5), nn.Tanh(), nn.Linear(5, dim), Normalised()),
        "custom": lambda: Custom(width, dim, kind),
        "silu": lambda: nn.Sequential(first(4), nn.SiLU(), nn.Dropout(0.5).eval(), nn.Linear(4, dim)),
        "gelu-relu": lambda: nn.Sequential(
            first(4), nn.GELU(), nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, dim)
        ),
        "skip": lambda: Skip(first, dim),
        "gated": lambda: Gated(first, dim),
        "joined": lambda: Joined(first, dim),
        "branching": lambda: Branching(first, dim),
        "tied": lambda: nn.Sequential(first(4), nn.Tanh(), square, nn.Tanh(), square, nn.Linear(4, dim)),
    }[name]()


@dataclass
class Case:
    problem: gt.Problem
    towers: gt.Towers
    dense: Dense
    left: nn.Module  # float64 modules for the dense twin
    right: nn.Module


def dense_module(module: nn.Module, kind: str) -> nn.Module:
    """The module in float64 in a form that takes dense rows (EmbeddingBag cannot)."""
    module = copy.deepcopy(module).double()
    if kind == "sparse":
        for name, part in list(module.named_modules()):
            if isinstance(part, nn.EmbeddingBag):
                table = gt.InputLinear(part.num_embeddings, part.embedding_dim, bias=False).double()
                table.weight = part.weight
                if not name:
                    return table
                parent = module.get_submodule(name.rpartition(".")[0]) if "." in name else module
                setattr(parent, name.rpartition(".")[2], table)
    return module


def make_case(
    m=5, n=4, density=0.4, loss="logistic", tower="elu", kinds=("ids", "ids"), dim=3, weights=False, imputed=-1.0,
    omega=0.3, l2=0.1, embedding_l2=0.0, frequency_power=1.0, shared=False, seed=0, variant=0, dtype=torch.float64,
    scale=0.7, pair_weights=False, activations=None, psi=None, **options,
) -> Case:  # fmt: skip
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    seen = rng.random((m, n)) < density
    R = (
        np.where(rng.random((m, n)) < 0.7, 1.0, -1.0)
        if loss in ("logistic", "squared_hinge")
        else rng.normal(size=(m, n))
    )
    labels = np.where(seen, R, np.nan)
    rows, columns = np.nonzero(seen)
    pairs = sp.coo_matrix((R[seen], (rows, columns)), shape=(m, n))

    def side(kind, rows):
        if kind == "ids":
            return None, torch.arange(rows), rows
        width = 3
        X = rng.normal(size=(rows, width))
        if kind == "dense":
            return X, torch.tensor(X), width
        X = X * (rng.random((rows, width)) < 0.5)
        return sp.csr_matrix(X), torch.tensor(X), width

    if shared:
        kinds = (kinds[0], kinds[0])
        if kinds[0] == "ids":
            n = m
            labels, pairs = labels[:, :1].repeat(m, 1), None
            rows, columns = np.nonzero(~np.isnan(labels))
            pairs = sp.coo_matrix((labels[rows, columns], (rows, columns)), shape=(m, m))
    (lf, X, lw), (rf, Y, rw) = side(kinds[0], m), side(kinds[1], n)
    left = make_tower(tower, kinds[0], lw, dim, variant)
    right = left if shared else make_tower(tower, kinds[1], rw, dim, variant)
    with torch.no_grad():
        for p in {id(p): p for mod in (left, right) for p in mod.parameters()}.values():
            p.normal_(std=scale)
    left_dense = dense_module(left, kinds[0])
    right_dense = left_dense if shared else dense_module(right, kinds[1])
    left.to(dtype), right.to(dtype)
    a = rng.random(m) * 2 if weights else None
    b = rng.random(n) * 2 if weights else None
    if pair_weights:
        w = rng.random((m, n)) * 2
        options["pair_weights"] = w[~np.isnan(labels)]
    if imputed == "low-rank":
        imputed = (rng.normal(size=(m, 2)), rng.normal(size=(n, 2)))
    common = dict(omega=omega, l2=l2, imputed=imputed, embedding_l2=embedding_l2, frequency_power=frequency_power)
    problem = gt.Problem(
        pairs, lf, rf, loss=COSH if loss == "cosh" else loss, left_weights=a, right_weights=b, **common, **options
    )
    if activations is not None:  # bytes for them, whatever the memory budget leaves
        problem.activations = activations
    dense = Dense(labels, X, Y, loss=loss, a=a, b=b, w=w if pair_weights else None, psi=psi, **common)
    return Case(problem, gt.Towers(left, right), dense, left_dense, right_dense)


def zstandard(data):
    """A Zstandard file of one block stored as it is; neither Python 3.11 nor older polars writes any."""
    assert len(data) < 1 << 17
    size, block = len(data).to_bytes(8, "little"), (len(data) << 3 | 1).to_bytes(3, "little")
    return b"\x28\xb5\x2f\xfd\xe0" + size + block + data
