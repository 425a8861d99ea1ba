"""Fits that tests run in one process and in several: called by tests/processes.py in each process."""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp
import torch
from torch import nn

import gramtower as gt
from gramtower.data.synthetic import planted_pairs
from gramtower.distributed.group import SINGLE, ProcessGroup
from gramtower.distributed.shards import Rows, Shards
from gramtower.objective.sharded import sharded_problem

SAMPLED = dict(ratio=0.1, steps=4, step_size=2**-13)
METHODS = {"gd-diag": {}, "newton": {}, "newton-kron": {}, "sogram": SAMPLED}
#: name → (method, options, features, dtype)
FITS = {
    **{name: (name, options, "ids", torch.float64) for name, options in METHODS.items()},
    **{f"{name} float32": (name, options, "ids", torch.float32) for name, options in METHODS.items()},
}
#: more of the library, on three processes only
MORE = {
    "sampling": ("sampling", SAMPLED, "mixed", torch.float64),
    "sogram, searched step": ("sogram", {"ratio": 0.2, "steps": 2}, "mixed", torch.float64),
    "lbfgs": ("lbfgs", {}, "mixed", torch.float64),
    "newton-kron, features": ("newton-kron", {}, "mixed", torch.float64),
    "lbfgs, own modules": ("lbfgs", {}, "custom", torch.float64),
}


def group():
    return ProcessGroup() if torch.distributed.is_initialized() else SINGLE


def uneven(processes, shape):
    """The first process holds no left row, the last no right row (with one process, everything)."""
    size, rank = processes.size, processes.rank
    if size == 1:
        return None
    left = [0, *np.linspace(0, shape[0], size).astype(int).tolist()]
    right = [*np.linspace(0, shape[1], size).astype(int).tolist(), shape[1]]
    right[1] = min(right[1], 3) if size > 2 else right[1]
    return Shards(processes, Rows(tuple(left), rank), Rows(tuple(right), rank))


class Custom(nn.Module):
    """No written-out form: differentiated by autodiff."""

    def __init__(self, rows, dim):
        super().__init__()
        self.table, self.norm, self.last = nn.Embedding(rows, 5), nn.LayerNorm(5), nn.Linear(5, dim)

    def forward(self, ids):
        return self.last(torch.tanh(self.norm(self.table(ids))))


def custom_towers(problem, dtype):
    """Towers of a user's own; tables filled so that a row depends on its entity alone."""
    torch.manual_seed(0)
    modules = [Custom(side.rows, 4) for side in (problem.left, problem.right)]
    shared = torch.Generator().manual_seed(1)
    for module, side in zip(modules, (problem.left, problem.right), strict=True):
        with torch.no_grad():
            module.last.weight.normal_(std=0.3, generator=shared)
            module.last.bias.zero_()
            whole = torch.randn(side.total, 5, generator=torch.Generator().manual_seed(side.total))
            module.table.weight.copy_(whole[side.first : side.first + side.rows])
        module.to(dtype)
    return gt.Towers(*modules)


def problem_of(processes, features="ids", cut="even", m=61, n=47, observed=500):
    rng = np.random.default_rng(0)
    pairs = planted_pairs(m, n, observed, groups=4, seed=1)
    left = right = None
    options = dict(omega=2**-3, l2=0.5, embedding_l2=0.01)
    if features == "mixed":
        left = sp.random(m, 30, 0.2, random_state=1, format="csr")
        right = rng.normal(size=(n, 6))
        options |= dict(
            left_weights=rng.random(m) + 0.5, right_weights=rng.random(n) + 0.5, pair_weights=rng.random(observed),
            imputed=(rng.normal(size=(m, 2)), rng.normal(size=(n, 2))),
        )  # fmt: skip
    if processes.size == 1:
        return gt.Problem(pairs, left, right, **options)
    shards = uneven(processes, pairs.shape) if cut == "uneven" else None
    return sharded_problem(processes, pairs, left, right, row_work=3.0, shards=shards, **options)


def towers_of(problem, features, dtype):
    if features == "custom":
        return custom_towers(problem, dtype)
    return gt.mlp_towers(problem, hidden=(6,), dim=4, dtype=dtype)


def trajectory(name, cut):
    method, options, features, dtype = (FITS | MORE)[name]
    problem = problem_of(group(), features, cut)
    towers = towers_of(problem, features, dtype)
    result = gt.minimize(problem, towers, method, max_iterations=4, seed=3, **options)
    return [record.value for record in result.history]


def trajectories(folder, cut, *more):
    return {name: trajectory(name, cut) for name in (FITS | MORE if more else FITS)}
