"""Fits that tests run in one process and in several: called by tests/processes.py in each process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import own_step
import scipy.sparse as sp
import torch
from torch import nn

import gramtower as gt
from gramtower.data.datasets import planted_pairs
from gramtower.distributed import group as processes_module
from gramtower.distributed.group import SINGLE, current_group
from gramtower.distributed.shards import Rows, Shards
from gramtower.engine.towers import stack
from gramtower.model.fit_data import local_pairs, spread_pairs

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
    "sogram, exchanged": ("sogram", {"ratio": 0.2, "steps": 2, "swap": True}, "mixed", torch.float64),
    "lbfgs": ("lbfgs", {}, "mixed", torch.float64),
    "newton-kron, weights by degree": ("newton-kron", {}, "degrees", torch.float64),
    "newton-kron, fitted labels": ("newton-kron", {}, "fitted", torch.float64),
    "newton-kron, features": ("newton-kron", {}, "mixed", torch.float64),
    "newton-kron, linear": ("newton-kron", {"sweeps": 0}, "linear", torch.float64),  # tables: none held by all
    "newton-kron, sweeps": ("newton-kron", {}, "linear", torch.float64),
    "newton-kron, sweeps, fitted labels": ("newton-kron", {}, "fitted linear", torch.float64),
    "newton-kron, sweeps, imputed": ("newton-kron", {}, "imputed linear", torch.float64),
    "lbfgs, own modules": ("lbfgs", {}, "custom", torch.float64),
    "newton-kron, weights of tensors": ("newton-kron", {}, "blocks", torch.float64),
    "newton-kron, own regularizer": ("newton-kron", {}, "curved", torch.float64),
    "newton-kron, own modules": ("newton-kron", {}, "custom", torch.float64),
    "newton-kron, own step": ("newton-kron", {}, "own step", torch.float64),
}


def group():
    return current_group()


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
    """Branches that meet again, one of them left to autodiff."""

    def __init__(self, rows, dim):
        super().__init__()
        self.table, self.norm, self.last = nn.Embedding(rows, 5), nn.LayerNorm(5), nn.Linear(5, dim)

    def forward(self, ids):
        h = self.norm(self.table(ids))
        return self.last(torch.tanh(h) + h * torch.softmax(h, 1))


class Curved(gt.Regularizer):
    """Σ (½θ² + ¼θ⁴)."""

    def value(self, theta):
        squares = theta.from_vector(theta.vector**2)
        return 0.5 * theta.inner(theta) + 0.25 * squares.inner(squares)

    def gradient(self, theta):
        return theta.from_vector(theta.vector + theta.vector**3)

    def product(self, theta, d):
        return d.from_vector((1 + 3 * theta.vector**2) * d.vector)


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
    if features == "imputed linear":
        factors = rng.normal(size=(m, 2)), rng.normal(size=(n, 2))
        options |= dict(pair_weights=rng.random(observed), imputed=factors, loss="squared")
    if features.startswith(("degrees", "fitted")):
        options |= dict(left_weights="degree^0.5", right_weights="degree^-0.5", pair_weights="degree^-0.5")
    if features.startswith("fitted"):
        options["imputed"] = "fitted"
    if features in ("blocks", "curved"):
        options["regularizer"] = {"left.0.*": 4.0, "*.bias": 0.5} if features == "blocks" else Curved()
    if processes.size == 1:
        return gt.Problem(pairs, left, right, **options)
    shards = uneven(processes, pairs.shape) if cut == "uneven" else spread_pairs(processes, pairs, 3.0)
    of_pairs = options.get("pair_weights")
    pairs, local = local_pairs(pairs, None if isinstance(of_pairs, str) else of_pairs, shards)
    options["pair_weights"] = of_pairs if isinstance(of_pairs, str) else local
    sides = {"left": shards.left, "right": shards.right}
    for side, rows in sides.items():
        options[f"{side}_weights"] = rows.local_rows(side, options.get(f"{side}_weights"))
    if isinstance(options.get("imputed"), tuple):
        options["imputed"] = tuple(
            r.local_rows("imputed", f) for r, f in zip(sides.values(), options["imputed"], strict=True)
        )
    return gt.Problem(
        pairs, shards.left.local_rows("left", left), shards.right.local_rows("right", right), shards=shards, **options
    )  # fmt: skip


def towers_of(problem, features, dtype):
    if features == "custom":
        return custom_towers(problem, dtype)
    if features == "own step":
        stack.STEPS.update(own_step.LINE)
        drawn = gt.mlp_towers(problem, hidden=(6,), dim=4, dtype=dtype)
        for tower in (drawn.left, drawn.right):
            tower[1] = own_step.Squash(6).to(dtype)
        return gt.Towers(drawn.left, drawn.right)
    return gt.mlp_towers(problem, hidden=() if features.endswith("linear") else (6,), dim=4, dtype=dtype)


def trajectory(name, cut):
    method, options, features, dtype = (FITS | MORE)[name]
    problem = problem_of(group(), features, cut)
    towers = towers_of(problem, features, dtype)
    result = gt.minimize(problem, towers, method, max_iterations=4, seed=3, **options)
    return [record.value for record in result.history]


def trajectories(folder, cut, which="all"):
    fits = {"all": FITS | MORE, "methods": FITS, "float64": METHODS, "more": MORE}[which]
    return {name: trajectory(name, cut) for name in fits}


def trajectories_and_bytes(folder, cut):
    return {"trajectories": trajectories(folder, cut, "more"), "bytes": product_bytes()}


def product_bytes():
    """Bytes of one G·d as counted, and the sizes in the formula of docs/scale.md."""
    found = []
    for cut in ("even", "uneven"):
        problem = problem_of(group(), "ids", cut)
        towers = towers_of(problem, "ids", torch.float32)
        point = problem.at(towers)
        G, d = point.gauss_newton(), point.gradient()
        before = problem.shards.group.bytes.copy()
        G.product(d)
        counted = problem.shards.group.bytes - before
        layout, rows = point.parameters.layout, problem.shards.right
        shared = sum(part.numel() for part in layout.replicated(point.parameters.vector))
        sizes = dict(n=rows.total, own=rows.count, largest=max(rows.counts), k=4, s=4, shared=shared)
        found.append(dict(counted=dict(counted), said=problem.shards.group.product_bytes, **sizes))
    return found


#: name → (features, options)
HALVES = {
    "gd-diag": ("ids", {}),
    "newton-kron": ("ids", {}),
    "newton-kron-secant": ("ids", dict(sweeps=0)),
    "newton-kron-sweeps": ("ids", {}),
    "sogram-diag": ("mixed", dict(ratio=0.1, steps=4)),
}


def half(folder, iterations, path, cut="even"):
    """Continue, or begin, checkpointed runs up to an iteration."""
    values = {}
    for name, (features, options) in HALVES.items():
        problem = problem_of(group(), features, cut)
        linear = name.endswith(("-secant", "-sweeps"))
        if linear:
            towers = gt.mlp_towers(problem, hidden=(), dim=4, dtype=torch.float64)
        else:
            towers = towers_of(problem, features, torch.float64)
        more = {"newton-kron-secant": 5, "newton-kron-sweeps": 2}  # until a preconditioner is kept, sweeps are combined
        most = int(iterations) * more.get(name, 1)
        checkpoint = f"{path}/{name}.safetensors"
        common = dict(seed=3, checkpoint=checkpoint, checkpoint_every=2, validation=lambda point: -point.value)
        method = name.removesuffix("-secant").removesuffix("-sweeps")
        result = gt.minimize(problem, towers, method, max_iterations=most, **common, **options)
        values[name] = [record.value for record in result.history]
    return values


def halves(folder, iterations, *runs):
    """The same of several folders: path, cut, path, cut and so on."""
    return [half(folder, iterations, path, cut) for path, cut in zip(runs[::2], runs[1::2], strict=True)]


def interactions(user="u{:02d}".format):
    rng = np.random.default_rng(0)
    rows = [(user(u), f"i{i}") for u in range(40) for i in range(30) if rng.random() < (0.5 if u % 3 == i % 3 else 0.1)]
    return gt.Interactions.from_arrays(*zip(*rows, strict=True), weight=rng.random(len(rows)) + 0.5)


def estimator_fit(folder, partition):
    """Fit, evaluate and save by the estimator: from whole data and from a folder of parts."""
    from gramtower.data.splits import random_pairs
    from gramtower.distributed.partition import read_part

    split = random_pairs(interactions(int), 0.2, seed=0)
    found = {}
    seen = {"whole": (None,), "history": ("history",), "beside": (["id", "history"], [np.eye(30, 5), "id"])}
    draw = np.random.default_rng(1)
    seen["refined"] = (draw.normal(size=(40, 6)), draw.normal(size=(30, 5)))
    for kind in ("whole", "history", "beside", "refined", "parts"):
        weights = dict(left_weights="degree^0.5", right_weights=np.linspace(0.5, 1.5, 30)) if kind == "beside" else {}
        if kind == "history":
            weights["imputed"] = np.linspace(-1, 0, 80).reshape(40, 2), np.linspace(0, 1, 60).reshape(30, 2)
        model = gt.TwoTower(dim=4, hidden=(8,), max_iterations=4, device="cpu", metric="recall@5", **weights)
        if kind == "parts":
            model.fit(read_part(partition, weight="weight"), validation=split.test)
        else:
            model.fit(split.train, *seen[kind], validation=split.test)
        metrics = ("map@5", "recall@5", "ndcg@5", "auc", "coverage@5")
        scores = model.evaluate(split.test, metrics, by="popularity")
        again = model.evaluate(split.test, metrics, by="activity")
        model.save(folder / f"{kind}.gramtower")
        found[kind] = dict(
            values=[r.value for r in model.history_], best=model.best_metric_, scores={**scores, **again},
            users=scores.users, pairs=scores.pairs, groups=again.groups,
        )  # fmt: skip
    return found


def disagreements(folder):
    """What is said when process 1 was given something else; the same in every process."""
    processes = group()
    odd = processes.rank == 1
    said = {}

    def attempt(name, run):
        try:
            run()
        except ValueError as error:
            said[name] = str(error)

    def fit(**changes):
        problem = problem_of(processes)
        problem.omega = changes.pop("omega", problem.omega)
        gt.minimize(problem, towers_of(problem, "ids", torch.float64), max_iterations=1, **changes)

    attempt("omega", lambda: fit(omega=0.25 if odd else 0.125))
    attempt("seed", lambda: fit(seed=int(odd)))
    attempt("options", lambda: fit(damping=2.0 if odd else 1.0))
    attempt("pairs", lambda: gt.TwoTower(dim=3, device="cpu").fit(planted_pairs(30, 20, 90, seed=int(odd))))
    attempt("broken", lambda: gt.TwoTower(dim=3, device="cpu").fit("pairs" if odd else planted_pairs(30, 20, 90)))
    pairs, options = planted_pairs(30, 20, 90), {"device": "cpu", "max_iterations": 1}
    attempt("dim", lambda: gt.TwoTower(dim=8 if odd else None, **options).fit(pairs))
    attempt("embedding_l2", lambda: gt.TwoTower(embedding_l2=0.004 if odd else None, **options).fit(pairs))
    attempt("hidden", lambda: gt.TwoTower(hidden="8" if odd else (8,), **options).fit(pairs))
    from gramtower.model import defaults

    real_memory = defaults.total_memory
    defaults.total_memory = lambda device: 2 * 2 * 4 * (10 * 50 // 2 + 5 * 20) * 9 if odd else 10**12
    said["dim of the poorest"] = gt.TwoTower(**options).fit(pairs).dim_
    defaults.total_memory = real_memory
    real = np.__version__
    np.__version__ = "9.9" if odd else real
    attempt("version", fit)
    np.__version__ = real
    attempt("table", lambda: problem_of(processes).at(gt.Towers(nn.Embedding(61, 3), nn.Embedding(47, 3))))
    return said


def misbehave(folder, how):
    """Process 1 dies or hangs in the third iteration."""
    import os
    import signal
    import time

    def callback(record, point):
        if record.iteration == 3 and group().rank == 1:
            if how == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(600)

    def fit(processes, **options):
        problem = problem_of(processes)
        gt.minimize(problem, towers_of(problem, "ids", torch.float64), "gd", **options)

    fit(SINGLE, max_iterations=1)  # compiles, for which nobody has to wait
    torch.distributed.barrier()
    processes_module._BEAT = 1.0
    fit(group(), max_iterations=50, callbacks=[callback])


def selected_fit(folder, partition):
    """Fits by default settings: whole data, and a folder of parts; the penalty that held-out pairs choose, and more."""
    from gramtower.distributed.partition import read_part

    folder.mkdir(exist_ok=True)
    found = {}
    for name, data in {
        "whole": gt.Interactions.from_parquet(partition, 0, 1),
        "parts": read_part(partition),
    }.items():
        model = gt.TwoTower(dim=16, device="cpu").fit(data)
        model.save(folder / f"{name}.gramtower")
        found[name] = {"embedding_l2": model.embedding_l2_, "values": [record.value for record in model.history_]}
    return found


def default_tables(folder):
    """θ after a run by default settings over two tables in float64, rows of all processes, and the passes over O."""
    problem = problem_of(group(), "linear", m=240, n=180, observed=3000)
    towers = gt.mlp_towers(problem, hidden=(), dim=8, dtype=torch.float64)
    result = gt.minimize(problem, towers, max_iterations=gt.optim.NewtonKron().default_iterations(problem, towers) or 1)
    shards = problem.shards
    left, right = (tower[0].weight.detach() for tower in (towers.left, towers.right))
    whole = shards.group.gather_rows(left, shards.left.counts).wait(), shards.gather(right).wait()
    return {"tables": [table.tolist() for table in whole], "iterations": len(result.history) - 1}


def shares_of(folder, *partitions):
    """What this process reads of folders of parts, or why it cannot."""
    return [share_of(folder, partition, "user", "item") for partition in partitions]


def share_of(folder, partition, *columns):
    """What this process reads of a folder of parts, or why it cannot."""
    from gramtower.distributed.partition import read_part

    try:
        part = read_part(partition, *columns)
    except (ValueError, OSError) as error:
        return {"error": str(error)}
    return {
        "pairs": {str(key): part.right_ids[part.matrix[row].indices].tolist() for row, key in enumerate(part.left_ids)},
        "left": part.left_ids.tolist(),
        "right": part.right_ids.tolist(),
        "shape": part.shape,
        "report": part.report,
        "one_set": part.one_set,
    }


def fits_of_shares(folder, *partitions):
    """Fit folders of parts, of which each process reads a share; in one process, as one table."""
    return [fit_of_shares(folder, partition, "user", "item") for partition in partitions]


def fit_of_shares(folder, partition, *columns):
    """Fit one of them."""
    from gramtower.distributed.partition import read_part

    pairs = (gt.Interactions.from_parquet if group().size == 1 else read_part)(partition, *columns)
    model = gt.TwoTower(dim=4, hidden=(6,), max_iterations=6, device="cpu", metric="recall@5", select=False)
    model.fit(pairs, validation=0.2)
    model.save(folder / f"{Path(partition).name}.gramtower")
    return {"values": [record.value for record in model.history_], "best": model.best_metric_}


def part_fit(folder, partition, iterations):
    """The model of the parts, in the folder, by gradient descent."""
    from gramtower.distributed.partition import read_part

    settings = dict(dim=3, hidden=(4,), device="cpu", optimizer="gd", max_iterations=int(iterations), select=False)
    gt.TwoTower(**settings).fit(read_part(partition, group=group())).save(folder / "model.gramtower")


def continued(folder):
    """Values of the objective in default fits, whose processes hold other rows than in the search for the penalty."""
    pairs = planted_pairs(300, 120, 2400, groups=3, affinity=0.6, skew=0.9)
    left, right = (sp.random(size, 30, 0.2, format="csr", random_state=0) for size in pairs.shape)
    inputs = {"ids": (None, None), "ids and features": (["id", left], ["id", right])}
    model, found = gt.TwoTower(dim=16, device="cpu"), {}
    for name, features in inputs.items():
        model.fit(pairs, *features)
        assert model.path_.continued
        found[name] = [record.value for record in model.history_]
    return found
