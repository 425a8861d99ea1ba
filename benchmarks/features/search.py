"""Random settings of two-tower models over features, ranked by how well new entities are served.

    python benchmarks/features/search.py eurlex --seconds 60 --out log.jsonl      one line a fit, metrics by iteration

What is drawn: widths and depth of hidden layers, dimension, λ, μ, ω, weights by degree, how features are scaled, and
whether ids stand beside them. ``--fixed '{"l2": 0.5}'`` fixes some. Nothing of a public test part is read.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from sets import DATA, NAMES, FeatureSet, load, warm
from torch import Tensor, nn

import gramtower as gt
from gramtower.data.features import as_features
from gramtower.engine.kernels.activations import ACTIVATIONS
from gramtower.engine.towers.mlp import draw_rows_

MEASURED = (3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30)
BASE: dict[str, Any] = {
    "width": 1024, "depth": 1, "dim": 512, "id_hidden": True, "activation": "relu", "l2": 0.3, "mu": 1e-4, "power": 0.4,
    "left_power": 0.0, "share": 4.0, "imputed": -0.5, "scale": "idf", "ids": "none", "iterations": 20, "seed": 0,
    "loss": "logistic", "drop": 0.0, "normalize": False,
}  # fmt: skip


def draw(rng: np.random.Generator, pairs_per_entity: float) -> dict[str, Any]:
    """One random setting; λ is drawn relative to the pairs of an entity of the smaller side."""
    return {
        "width": int(rng.choice([1024, 2048])), "dim": int(rng.choice([256, 512, 1024])),
        "id_hidden": bool(rng.integers(2)), "l2": float(pairs_per_entity * 2 ** rng.uniform(-8, -3.5)),
        "mu": float(10 ** rng.uniform(-4.5, -2.5)), "power": float(rng.uniform(0.2, 0.6)),
        "share": float(2 ** rng.uniform(-0.5, 3.5)), "scale": str(rng.choice(["unit", "idf", "logidf"])),
        "ids": str(rng.choice(["none", "none", "new", "known"])),
        "drop": float(rng.choice([0.0, 0.0, 0.0, 0.2, 0.4])),
    }  # fmt: skip


def scaled(kind: str, train: sp.csr_matrix, rows: sp.csr_matrix) -> sp.csr_matrix:
    """Features weighted and normalised as the training part says."""
    rows = sp.csr_matrix(rows, dtype=np.float64, copy=True)
    if kind in ("idf", "logidf"):
        if kind == "logidf":
            rows.data = np.sign(rows.data) * np.log1p(np.abs(rows.data))
        df = np.bincount(train.indices, minlength=train.shape[1])
        rows = sp.csr_matrix(rows @ sp.diags(np.log((1 + train.shape[0]) / (1 + df)) + 1))
    if kind != "raw":
        norm = np.sqrt(np.asarray(rows.multiply(rows).sum(1))).reshape(-1)
        rows = sp.csr_matrix(sp.diags(1 / np.maximum(norm, 1e-12)) @ rows)
    return sp.csr_matrix(rows, dtype=np.float32)


def tower(width: int, hidden: list[int], dim: int, activation: str, normalize: bool) -> nn.Sequential:
    """Fully connected layers over ``width`` features."""
    widths = [*hidden, dim]
    layers: list[nn.Module] = [gt.InputLinear(width, widths[0], bias=len(widths) > 1, draw=False)]
    for a, b in pairwise(widths):
        layers += [ACTIVATIONS[activation](), nn.Linear(a, b)]
    if normalize:
        layers.append(nn.RMSNorm(dim, eps=1e-5))
        nn.init.constant_(layers[-1].weight, math.sqrt(10 / dim))
    return nn.Sequential(*layers)


def fit(one: FeatureSet, s: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Metrics by iteration of one setting."""
    began = time.perf_counter()
    given = {"left": one.left, "right": one.right}
    features, new = {}, None
    for side, rows in given.items():
        known = one.train.shape[0 if side == "left" else 1]
        if rows is None:
            features[side] = None
            continue
        features[side] = scaled(s["scale"], rows, rows)
        beside = s["ids"] == "both" or s["ids"] == ("new" if side == one.side else "known")
        if side == one.side:
            new = None if one.new is None else scaled(s["scale"], rows, one.new)
            if beside and new is not None:
                new = sp.csr_matrix(sp.hstack([new, sp.csr_matrix((new.shape[0], known), dtype=np.float32)]))
        if beside:
            features[side] = sp.csr_matrix(sp.hstack([features[side], sp.identity(known, np.float32)]))
    m, n, observed = *one.train.shape, one.train.nnz
    arguments: dict[str, Any] = {
        "loss": s["loss"], "omega": s["share"] * observed / (m * n - observed), "l2": s["l2"], "imputed": s["imputed"],
        "left_weights": f"degree^{s['left_power']:g}", "right_weights": f"degree^{s['power']:g}",
        "embedding_l2": s["mu"], "precision": "tf32",
    }  # fmt: skip
    problem = gt.Problem(one.train, features["left"], features["right"], **arguments)
    hidden = [s["width"]] * (s["depth"] if s["width"] else 0)
    generator = torch.Generator().manual_seed(s["seed"])
    made = {}
    for side, part in (("left", problem.left), ("right", problem.right)):
        made[side] = tower(
            part.width,
            hidden if part.kind != "ids" or s["id_hidden"] else [],
            s["dim"],
            s["activation"],
            s["normalize"],
        )
        for layer in made[side]:
            if isinstance(layer, gt.InputLinear):
                draw_rows_(layer.weight, part, 0.1 / math.sqrt(max(part.mean_square_norm(), 1e-12)), generator)
            elif isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=math.sqrt(2.0 / layer.in_features), generator=generator)
            if getattr(layer, "bias", None) is not None:
                nn.init.zeros_(layer.bias)
    towers = gt.Towers(made["left"], made["right"]).to(device)
    described = None if one.new is None else as_features(one.side, new, new.shape[0])
    seen = None if one.new is not None else dense(one.train).to(device)
    truth = dense(one.truth).to(device)
    found: dict[int | str, dict[str, float]] = {}
    last: list[Tensor] = []
    iteration = 0

    def ranked(P: Tensor, Q: Tensor) -> dict[str, float]:
        if described is None:
            return metrics(P, Q, truth, seen)
        rows = towers.embed(one.side, described).to(device)
        return metrics(*((rows, Q) if one.side == "left" else (P, rows)), truth)

    def measure(point: gt.Point) -> float:
        nonlocal iteration
        if iteration in MEASURED:
            found[iteration] = ranked(point.P, point.Q)
        last.append(point.parameters.vector.clone())
        del last[:-5]
        iteration += 1
        return 0.0

    if not s["drop"]:
        gt.minimize(problem, towers, "newton-kron", s["iterations"], validation=measure, patience=None)
    else:  # other features of each entity are left out in each iteration
        rng, iteration = np.random.default_rng(s["seed"]), 1
        for _ in range(s["iterations"]):
            parts = {side: None if rows is None else dropped(rows, s["drop"], rng) for side, rows in features.items()}
            gt.minimize(gt.Problem(one.train, parts["left"], parts["right"], **arguments), towers, "newton-kron", 1)
            measure(problem.at(towers))
    towers.load(torch.stack(last).mean(0))
    point = problem.at(towers)
    found["mean of 5"] = ranked(point.P, point.Q)
    return {"seconds": time.perf_counter() - began, "metrics": found}


def dropped(rows: sp.csr_matrix, share: float, rng: np.random.Generator) -> sp.csr_matrix:
    """Features with a share of the entries left out at random, the others larger."""
    kept = rng.random(rows.nnz) >= share
    made = sp.csr_matrix((rows.data * kept / (1 - share), rows.indices, rows.indptr), shape=rows.shape)
    return sp.csr_matrix(made, dtype=np.float32)


def dense(pairs: sp.csr_matrix) -> Tensor:
    """Ones where there are pairs."""
    return torch.from_numpy((pairs > 0).toarray()).float()


def metrics(P: Tensor, Q: Tensor, truth: Tensor, seen: Tensor | None = None) -> dict[str, float]:
    """P@1/3/5, paper and usual MAP@5, Recall@20 over the left entities that have something to find."""
    some = truth.sum(1) > 0
    P, truth = P[some], truth[some]
    out = torch.zeros_like(truth) if seen is None else seen[some] * -1e9
    total = truth.sum(1)
    blocks = zip(P.split(2048), truth.split(2048), out.split(2048), strict=True)
    hits = torch.cat([t.gather(1, (p @ Q.T + o).topk(20).indices) for p, t, o in blocks])
    precision = hits.cumsum(1)[:, :5] / torch.arange(1, 6, device=hits.device)
    average = (precision * hits[:, :5]).sum(1)
    made = {
        "p@1": hits[:, 0].mean(), "p@3": hits[:, :3].mean(), "p@5": hits[:, :5].mean(), "paper_map@5": precision.mean(),
        "map@5": (average / total.clamp(max=5)).mean(), "recall@20": (hits.sum(1) / total).mean(),
    }  # fmt: skip
    return {name: round(float(value), 5) for name, value in made.items()}


def main() -> None:
    """Fit settings until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sets", help="names, separated by commas: " + ", ".join(NAMES))
    parser.add_argument("--seconds", type=float, default=60.0, help="for each set")
    parser.add_argument("--fits", type=int, default=10**9, help="for each set, at most")
    parser.add_argument("--out", type=Path, default=Path("features.jsonl"))
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--seed", type=int, default=0, help="of the settings")
    parser.add_argument("--split", type=int, default=0, help="seed of the entities held out")
    parser.add_argument("--fixed", type=json.loads, default={}, help="settings that are not drawn, as JSON")
    parser.add_argument("--warm", action="store_true", help="rank a tenth of the pairs of known entities instead")
    parser.add_argument("--grid", type=json.loads, help="a list of settings over the base, instead of draws")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for name in given.sets.split(","):
        one, rng = load(name, given.split, data=given.data), np.random.default_rng(given.seed)
        one = warm(one, given.split) if given.warm else one
        end, fits = time.perf_counter() + given.seconds, 0
        while time.perf_counter() < end and fits < (given.fits if given.grid is None else len(given.grid)):
            drawn = draw(rng, one.train.nnz / min(one.train.shape)) if given.grid is None else given.grid[fits]
            s = BASE | drawn | given.fixed
            if "c" in s:  # λ relative to the pairs of an entity of the smaller side
                s["l2"] = s["c"] * one.train.nnz / min(one.train.shape)
            try:
                done = fit(one, s, device)
            except (ValueError, RuntimeError) as error:
                done = {"error": str(error)[:200]}
            fits += 1
            with given.out.open("a") as log:
                log.write(json.dumps({"set": name, "split": given.split, "setting": s, **done}) + "\n")
        print(name, fits, "fits", flush=True)


if __name__ == "__main__":
    main()
