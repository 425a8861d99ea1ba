"""How close `gt.TwoTower()` comes to the best settings, on sets whose settings nobody tuned.

    python benchmarks/bench_selection.py --data DATA --out FOLDER            # all sets, three splits
    python benchmarks/bench_selection.py --sets ml1m,amazon-beauty --device cpu
    python benchmarks/bench_selection.py --peers --random 100 --splits 0     # other methods and random settings
    python benchmarks/bench_selection.py --without --splits 0,1              # one choice left out at a time
    python benchmarks/bench_selection.py --simpler --splits 0,1              # simpler rules for where it starts
    python benchmarks/bench_selection.py --objectives --splits 0         # labels, weights of pairs and entities
    python benchmarks/bench_selection.py --losses --trials 30 --splits 0     # losses over all pairs by one optimizer
    python benchmarks/bench_selection.py --known --sets ml1m,citeulike --splits 0,1

Each set is split three times. Sets of ids: a fifth of each left entity's pairs is the test part, Recall@20 / NDCG@20.
Sets with features: a fifth of the entities of one side is new, MAP@5 / Recall@20 (P@1 / P@3 / P@5 of documents).
Rows are the default, the same by rules (`select=False`), the same with twice the iterations and popularity. Seconds are
the medians of --repeats fits. DATA holds the folders of public sets that benchmarks/features/sets.py reads; sets that
are not there are left out. Each mode writes its section of FOLDER/selection.json.

With --peers, rows are EASE, the objective of ALS, a softmax over all right entities by AdamW (--trials) and
random settings (--random). They have the best of so many trials on the test part, so they are upper bounds, not
choices. One row of random settings is a choice: the best on one half of the test entities, measured on the other half,
both ways. --seconds ends the draws of a split early.

With --without, the default is compared with itself less one choice at a time, and with the strongest penalty within one
standard error of the best (of ids; with features, with a λ that moves by one standard error instead of two). With
--simpler it is compared with simpler rules for where it starts. Aim: a choice that gains on all other sets on average
does not lose on this one.

With --losses, linear towers are fitted by AdamW to a softmax, to the square of this library with a constant and with a
fitted label, to the variance form and to the listwise form (docs/evidence/defaults.md), each with the best of the same
draws on the test part.

With --known, sets with features are split like those of ids and known entities are ranked: by ids, and by ids next to
features, both with default settings. Aim: ids next to features rank them no worse than ids do.
"""

from __future__ import annotations

import argparse
import json
import lzma
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import scipy.sparse as sp
import torch
from common import RESULTS, write_result
from torch.nn import functional

import gramtower as gt
from gramtower.data.splits import per_user
from gramtower.metrics import evaluate_embeddings, ranking_metrics
from gramtower.model import defaults, penalty_path

sys.path.insert(0, str(Path(__file__).resolve().parent / "features"))
from sets import DATA, FeatureSet, _csr, _cut, load

IDS = dict.fromkeys(("amazon-electronic", "amazon-beauty", "douban-music"), "tsv")
IDS |= dict.fromkeys(("gowalla", "yelp2018"), "lists")
ALSO_IDS = ("ml1m", "moby", "wikispeedia", "citeulike", "delicious", "eurlex", "facebook", "npm")  # without features
WITH_FEATURES = ("eurlex", "delicious", "citeulike", "ml1m", "facebook", "moby", "wikispeedia", "npm")
GRAPHS = {
    "musae-chameleon": True,
    "musae-chameleon-undirected": False,
    "musae-twitch-engb": False,
    "musae-twitch-ptbr": False,
}  # whether links have a direction
DOCUMENTS = ("eurlex", "delicious")
_EASE = (50.0, 150.0, 500.0, 1500.0)
_BATCH = 2048  # left entities of a step of the softmax
SIMPLER = {  # constants of simpler rules, with features
    "right weights degree^0.3": {"_FEATURE_POWERS": (0.3, 0.3)},
    "l2 without regard to long rows": {"_LEAST_OF_LONG_ROWS": 1.0},
    "all pairs alike": {"_ENTITY_POWER": 0.0},
}
SIMPLER["all of these"] = {name: value for constants in SIMPLER.values() for name, value in constants.items()}


def pairs_of(name: str, data: Path) -> sp.csr_matrix:
    """All pairs of a set of ids, as ones."""
    if name not in IDS:
        found = sp.csr_matrix(load(name, 0, 0.0, data).train)
        found.data[:] = 1
        return found
    path = data / name / ("train.tsv.xz" if IDS[name] == "tsv" else "train.txt.xz")
    with lzma.open(path, "rt") as lines:
        rows = [line.split() for line in lines if line.strip()]
    left = np.repeat([row[0] for row in rows], [len(row) - 1 for row in rows])
    right = np.concatenate([row[1:] for row in rows])
    places = [np.unique(side, return_inverse=True)[1] for side in (left, right)]
    found = sp.csr_matrix((np.ones(len(left), np.float32), (places[0], places[1])))
    found.data[:] = 1
    return found


def graph(name: str, seed: int, data: Path) -> FeatureSet:
    """A MUSAE graph with a fifth of its nodes new on the left, and on neither side of what is learned from."""
    folder = data / name.removesuffix("-undirected")
    with lzma.open(folder / "features.json.xz", "rt") as text:
        read = {int(node): sorted(map(int, set(of))) for node, of in json.load(text).items()}
    place = {node: row for row, node in enumerate(sorted(read))}
    flat = np.array([x for node in sorted(read) for x in read[node]])
    words = _csr(np.ones(len(flat)), flat, [len(read[node]) for node in sorted(read)])
    with lzma.open(folder / "edges.csv.xz", "rt") as lines:
        next(lines)
        links = np.array([[place[int(x)] for x in line.split(",")] for line in lines])
    links = links[links[:, 0] != links[:, 1]]
    if not GRAPHS[name]:
        links = np.concatenate([links, links[:, ::-1]])
    pairs = sp.csr_matrix((np.ones(len(links), np.float32), (links[:, 0], links[:, 1])), shape=(len(place),) * 2)
    pairs.data[:] = 1
    known, new = _cut(len(place), seed, 0.2)
    train = sp.csr_matrix(pairs[known][:, known])
    return FeatureSet(train, words[known], words[known], "left", words[new], sp.csr_matrix(pairs[new][:, known]))


def split(pairs: sp.csr_matrix, seed: int) -> tuple[sp.csr_matrix, sp.csr_matrix]:
    """A fifth of each left entity's pairs as the test part."""
    found = per_user(gt.Interactions.from_matrix(pairs), 0.2, seed=100 + seed)
    return found.train.matrix, found.test.matrix


def on(device: str, model: gt.TwoTower, side: str, rows: Any = None) -> torch.Tensor:
    """Embeddings of a side, or of new entities of it, on a device."""
    found = model.embed(side=side) if rows is None else model.embed(**{f"{side}_features": rows})
    return torch.from_numpy(np.asarray(found)).to(device)


class Ids:
    """A split of a set of ids."""

    metrics = ("recall@20", "ndcg@20")

    def __init__(self, name: str, seed: int, data: Path) -> None:
        self.train, self.test = split(pairs_of(name, data), seed)
        self.seen: sp.csr_matrix | None = self.train  # pairs that are not ranked

    def fit(self, **options: Any) -> gt.TwoTower:
        """A model of the training part."""
        return gt.TwoTower(**options).fit(self.train)

    def scores(self, model: gt.TwoTower, device: str) -> list[float]:
        """Metrics of the test part."""
        return self.ranked(*self.embeddings(model, device))

    def embeddings(self, model: gt.TwoTower, device: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings of the left entities that are asked about, and of the right ones."""
        return on(device, model, "left"), on(device, model, "right")

    def ranked(self, P: torch.Tensor, Q: torch.Tensor) -> list[float]:
        """Metrics of embeddings."""
        return np.nanmean(self.values(P, Q), axis=0).round(6).tolist()

    def values(self, P: torch.Tensor, Q: torch.Tensor) -> np.ndarray:
        """Metrics of each entity that is asked about, in rows."""
        found = evaluate_embeddings(P, Q, self.test, train=self.seen, metrics=self.metrics)
        return np.stack([found.per_user[name] for name in self.metrics], axis=1)

    def popularity(self) -> dict[str, Any]:
        """Metrics of one list for all, in the order of degrees; nothing where new right entities are ranked."""
        if self.test.shape[1] != self.train.shape[1]:
            return {}
        counts = np.bincount(self.train.indices, minlength=self.train.shape[1]).astype(np.float32)
        ranked = self.ranked(torch.ones(self.test.shape[0], 1), torch.from_numpy(counts)[:, None])
        return {"popularity": {"metrics": ranked}}

    def peers(self, given: argparse.Namespace, base: gt.TwoTower) -> dict[str, list[float]]:
        """Metrics of other methods, each with the best of a few settings on the test part."""
        found, device = {}, given.device
        if self.train.shape[1] <= (45_000 if device == "cuda" else 5_000):
            found["EASE, best of 4 on the test part"] = self._ease(device)
        found["ALS, best of 6 on the test part"] = self._als(device, base)
        return found | (by_adamw(self, given) if given.trials else {})

    def inputs(self) -> list[sp.csr_matrix | None]:
        """Features of the left, the right and the new left entities that a softmax sees; None for ids."""
        return [None, None, None]

    def _als(self, device: str, base: gt.TwoTower) -> list[float]:
        """Metrics of the minimum of the objective of ALS: squared loss, label 0, one penalty for all entities."""
        mean = float(np.mean(np.concatenate([np.diff(self.train.indptr), np.bincount(self.train.indices)])))
        plain = {"loss": "squared", "imputed": 0.0, "frequency_power": 0.0, "right_weights": None, "select": False}
        found = []
        for omega in (0.25, 1.0, 4.0):
            for penalty in (0.02, 0.1):
                options = {"omega": base.omega_ * omega, "embedding_l2": penalty * mean, "device": device}
                found.append(self.scores(self.fit(**plain, **options), device))
        return max(found, key=lambda row: row[-1])

    def _ease(self, device: str) -> list[float]:
        """Metrics of EASE (Steck, 2019), the closed form of a linear model from items to items."""
        n, blocks = self.train.shape[1], range(0, self.train.shape[0], 2048)
        rows = {start: self.train[start : start + 2048] for start in blocks}
        gram = torch.zeros(n, n, device=device)
        for part in rows.values():
            dense = torch.from_numpy(part.toarray()).to(device)
            gram.addmm_(dense.T, dense)
        found = []
        for penalty in _EASE:
            weights = torch.linalg.inv(gram + penalty * torch.eye(n, device=device))
            weights /= -weights.diagonal().clone()
            weights.fill_diagonal_(0.0)
            lists = np.full((self.train.shape[0], 20), -1, dtype=np.int64)
            for start, part in rows.items():
                scores = torch.from_numpy(part.toarray()).to(device) @ weights
                scores[part.nonzero()] = -torch.inf
                lists[start : start + 2048] = scores.topk(20).indices.cpu().numpy()
            scored = ranking_metrics(lists, self.test, metrics=self.metrics)
            found.append([float(scored[name]) for name in self.metrics])
        return max(found, key=lambda row: row[1])

    def random(self, rng: np.random.Generator, base: gt.TwoTower) -> dict[str, Any]:
        """Settings drawn around those of a model by rules."""
        power, dim = float(rng.choice([0.7, 0.85, 1.0])), int(base.dim_ * rng.choice([0.5, 1, 1, 2]))
        counts = np.concatenate([np.diff(self.train.indptr), np.bincount(self.train.indices)])
        return {
            "embedding_l2": base.embedding_l2_ * 2 ** rng.uniform(-2, 4) * float(np.median(counts)) ** (0.8 - power),
            "frequency_power": power,
            "omega": base.omega_ * 2 ** rng.uniform(-2, 2),
            "right_weights": f"degree^{rng.choice([0, 0.1, 0.2, 0.3])}",
            "left_weights": f"degree^{rng.choice([0, 0, 0.3])}",
            "imputed": (-1.0, -0.5, 0.0, "fitted")[rng.integers(4)],
            "dim": min(*self.train.shape, dim),
        }


class Features(Ids):
    """A split of a set with features, one side of whose entities is new in part."""

    metrics = ("map@5", "recall@20")

    def __init__(self, name: str, seed: int, data: Path) -> None:
        self.set = graph(name, seed, data) if name in GRAPHS else load(name, seed, data=data)
        self.train, self.test, self.seen = sp.csr_matrix(self.set.train), sp.csr_matrix(self.set.truth), None
        if name in DOCUMENTS:
            self.metrics = ("precision@1", "precision@3", "precision@5")

    def fit(self, **options: Any) -> gt.TwoTower:
        """A model of the known entities."""
        return gt.TwoTower(**options).fit(self.set.train, self.set.left, self.set.right)

    def embeddings(self, model: gt.TwoTower, device: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings of the new entities and those of the other side."""
        new = on(device, model, self.set.side, self.set.new)
        return (new, on(device, model, "right")) if self.set.side == "left" else (on(device, model, "left"), new)

    def peers(self, given: argparse.Namespace, base: gt.TwoTower) -> dict[str, list[float]]:
        """Metrics of a softmax, where new left entities are ranked for."""
        return by_adamw(self, given) if given.trials and self.set.side == "left" else {}

    def inputs(self) -> list[sp.csr_matrix | None]:
        """Features of the left, the right and the new left entities."""
        return [self.set.left, self.set.right, self.set.new]

    def random(self, rng: np.random.Generator, base: gt.TwoTower) -> dict[str, Any]:
        """Settings drawn around those of a model by rules."""
        normalize = bool(rng.random() < 0.4)
        return {
            "l2": base.l2_ * 2 ** rng.uniform(-3, 5), "embedding_l2": base.embedding_l2_ * 2 ** rng.uniform(-2, 2),
            "normalize": normalize, "activation": str(rng.choice(["relu", "gelu"])),
            "omega": base.omega_ * 2 ** rng.uniform(-2, 2), "left_weights": f"degree^{rng.choice([0, 0.5, 1])}",
            "right_weights": f"degree^{rng.choice([0, 0.2, 0.4, 0.6])}", "imputed": (-1.0, -0.5, 0.0)[rng.integers(3)],
            **({"hidden": ()} if rng.random() < 0.4 else {}), "max_iterations": int(rng.choice([6, 12, 20])),
        }  # fmt: skip


class NextToIds(Ids):
    """A split of the pairs of known entities that have features."""

    def __init__(self, name: str, seed: int, data: Path) -> None:
        whole = load(name, 0, 0.0, data)
        self.left, self.right, pairs = whole.left, whole.right, sp.csr_matrix(whole.train)
        pairs.data[:] = 1
        self.train, self.test = split(pairs, seed)
        self.seen = self.train

    def rows(self, device: str) -> dict[str, Any]:
        """Metrics and seconds of a model that sees ids, or ids next to features."""
        both = tuple(None if x is None else ["id", x] for x in (self.left, self.right))
        seen = {"ids": (None, None), "ids next to features": both}
        found = {}
        for name, features in seen.items():
            start = time.perf_counter()
            model = gt.TwoTower(device=device).fit(self.train, *features)
            row = {"seconds": time.perf_counter() - start, "selection": str(model.path_)}
            found[name] = {"metrics": self.scores(model, device), **row}
        return found


def known(given: argparse.Namespace) -> None:
    """Measure how known entities are ranked with and without features next to ids."""
    found: dict[str, Any] = {}
    for name in given.sets.split(",") if given.sets else WITH_FEATURES:
        for number in map(int, given.splits.split(",")):
            part = NextToIds(name, number, given.data)
            rows = part.rows(given.device)
            found[f"{name} split {number}"] = {"metrics": list(part.metrics), "rows": rows}
            for row, of in rows.items():
                scores = "/".join(f"{x:.4f}" for x in of["metrics"])
                print(f"{name} {number} {row:22s} {scores} {of['seconds']:.1f} s {of['selection']}", flush=True)
            write_result(f"selection/known-{given.device}", {"sets": found}, given.out)


def _log_softmax(S: torch.Tensor, i: torch.Tensor, j: torch.Tensor, degrees: torch.Tensor, c: float) -> torch.Tensor:
    return degrees * (c * S).logsumexp(1) - _sums(c * S[i, j], i, S)


def _square(S: torch.Tensor, i: torch.Tensor, j: torch.Tensor, degrees: torch.Tensor, c: float) -> torch.Tensor:
    """Logistic loss of observed pairs, squared one of the others with a label of -½ and equal weights."""
    return _logistic_and_square(S, i, j, c * degrees.mean())


def _square_by_degree(
    S: torch.Tensor, i: torch.Tensor, j: torch.Tensor, degrees: torch.Tensor, c: float
) -> torch.Tensor:
    return _logistic_and_square(S, i, j, c * degrees)


def _logistic_and_square(S: torch.Tensor, i: torch.Tensor, j: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    s = S[i, j]
    return _sums(functional.softplus(-s), i, S) + weight / 2 * (
        ((S + 0.5) ** 2).mean(1) - _sums((s + 0.5) ** 2, i, S) / S.shape[1]
    )


def _fitted(S: torch.Tensor, i: torch.Tensor, j: torch.Tensor, degrees: torch.Tensor, c: float) -> torch.Tensor:
    """Logistic loss of margins s_ij - mean_l s_il, and the variance of scores weighted by degree."""
    M = S - S.mean(1, keepdim=True)
    return _sums(functional.softplus(-M[i, j]), i, S) + c * degrees / 2 * (M**2).mean(1)


def _variance(S: torch.Tensor, i: torch.Tensor, j: torch.Tensor, degrees: torch.Tensor, c: float) -> torch.Tensor:
    """The second-order expansion of the softmax: margins, and the variance of scores weighted by degree."""
    M = S - S.mean(1, keepdim=True)
    return -_sums(M[i, j], i, S) + c * degrees / 2 * (M**2).mean(1)


def _listwise(S: torch.Tensor, i: torch.Tensor, j: torch.Tensor, degrees: torch.Tensor, c: float) -> torch.Tensor:
    """Σ_ij log mean_l (c + s_il - s_ij)²."""
    gap, mean, square = c - S[i, j], S.mean(1), (S**2).mean(1)
    return _sums(torch.log(gap**2 + 2 * gap * mean[i] + square[i]), i, S)


def _sums(x: torch.Tensor, i: torch.Tensor, S: torch.Tensor) -> torch.Tensor:
    """Sums of numbers of pairs for each left entity."""
    return torch.zeros(len(S), device=S.device).index_add(0, i, x)


LOSSES = {
    "softmax": _log_softmax,
    "square": _square,
    "square by degree": _square_by_degree,
    "fitted label by degree": _fitted,
    "variance by degree": _variance,
    "listwise": _listwise,
}


def losses(part: Ids, given: argparse.Namespace) -> dict[str, Any]:
    """Metrics of linear towers by AdamW for each loss, with the best of the same number of draws."""
    return {row: {"metrics": found} for name in LOSSES for row, found in by_adamw(part, given, name).items()}


def by_adamw(part: Ids, given: argparse.Namespace, loss: str = "softmax") -> dict[str, list[float]]:
    """Metrics of linear towers and right biases that AdamW fits to a loss over all pairs.

    The best of random rates, decays, constants of the loss, sizes and weights of left entities on the test part, each
    of which is looked at four times along its way. All losses have the same draws, of which --seconds may allow fewer.
    """
    rng, rows, device = np.random.default_rng(0), part.train.shape[0], given.device
    ends, trial = time.perf_counter() + given.seconds, 0

    def scaled(X: sp.csr_matrix | None, like: sp.csr_matrix | None) -> sp.csr_matrix | None:
        if X is None or like is None:
            return None
        seen = np.bincount(sp.csr_matrix(like).indices, minlength=like.shape[1])
        X = sp.csr_matrix(
            sp.csr_matrix(X, dtype=np.float32) @ sp.diags(np.sqrt(np.log(like.shape[0] / (1.0 + seen)) + 1))
        )
        lengths = np.sqrt(np.asarray(X.multiply(X).sum(1)).ravel())
        return sp.csr_matrix(sp.diags(1 / np.where(lengths > 0, lengths, 1)) @ X, dtype=np.float32)

    def placed(X: sp.csr_matrix) -> torch.Tensor:
        places = (torch.from_numpy(x.astype(np.int64)) for x in (X.indptr, X.indices))
        return torch.sparse_csr_tensor(*places, torch.from_numpy(X.data), size=X.shape).to(device)

    inputs = part.inputs()
    left, right, new = (scaled(X, like) for X, like in zip(inputs, (inputs[0], inputs[1], inputs[0]), strict=True))
    order, batches = rng.permutation(rows), []
    for chosen in np.array_split(order, max(1, round(rows / _BATCH))):
        pairs = part.train[chosen].tocoo()
        seen = torch.from_numpy(chosen).to(device) if left is None else placed(left[chosen])
        batches.append((seen, *(torch.from_numpy(x.astype(np.int64)).to(device) for x in (pairs.row, pairs.col))))
    every = [None if X is None else placed(X) for X in (right, new)]
    best: list[float] | None = None
    while trial < given.trials and (trial == 0 or time.perf_counter() < ends):
        trial += 1
        rate, decay, drawn = 10 ** rng.uniform(-3, -1), 10 ** rng.uniform(-3, 1), rng.uniform(0, 1)
        constant = 2 ** (4 * drawn if loss == "softmax" else 8 * drawn - 4)  # of the softmax an inverse temperature
        dim, power, steps = int(rng.choice([64, 128, 256])), float(rng.choice([0.5, 1.0])), int(rng.choice([120, 400]))
        generator = torch.Generator(device).manual_seed(0)
        sizes = [
            (rows if left is None else left.shape[1], dim),
            (part.train.shape[1] if right is None else right.shape[1], dim),
        ]
        W, V = ((0.1 * torch.randn(*size, generator=generator, device=device)).requires_grad_() for size in sizes)
        bias = torch.zeros(part.train.shape[1], device=device, requires_grad=True)
        optimizer = torch.optim.AdamW([W, V, bias], lr=rate, weight_decay=decay)
        for step in range(steps):
            seen, i, j = batches[step % len(batches)]
            P, Q = W[seen] if left is None else seen @ W, V if every[0] is None else every[0] @ V
            degrees = torch.bincount(i, minlength=len(P)).float()
            own = degrees.clamp(min=1) ** (power - 1)
            value = (own * LOSSES[loss](P @ Q.T + bias, i, j, degrees, constant)).sum() / len(i)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            if 4 * (step + 1) % steps == 0:
                with torch.no_grad():
                    P, Q = W if every[1] is None else every[1] @ W, V if every[0] is None else every[0] @ V
                    ones = torch.ones(len(P), 1, device=device)
                    found = part.ranked(torch.cat([P, ones], 1), torch.cat([Q, bias[:, None]], 1))
                best = found if best is None or found[-1] > best[-1] else best
    assert best is not None
    return {f"{loss}, best of {trial} on the test part": best}


def measured(part: Ids, given: argparse.Namespace) -> dict[str, Any]:
    """The rows of one split: metrics, and seconds of fits."""
    device, rows = given.device, part.popularity()
    part.fit(device=device, max_iterations=1)  # compiles, also what ranks held-out data
    models, seconds = {}, {"by rules": [], "default": []}
    for _ in range(given.repeats):
        for row, select in (("by rules", False), ("default", True)):
            start = time.perf_counter()
            models[row] = part.fit(device=device, select=select)
            seconds[row].append(time.perf_counter() - start)
    for row, model in models.items():
        rows[row] = {"metrics": part.scores(model, device), "seconds": float(np.median(seconds[row]))}
    rows["default"] |= {"selection": str(models["default"].path_)}
    start = time.perf_counter()
    chosen, plain = models["default"].path_.chosen, models["by rules"].history_[-1].iteration
    twice = {**chosen, "max_iterations": 2 * chosen.get("max_iterations", plain)}
    longer = part.fit(device=device, select=False, **twice)
    rows["twice the iterations"] = {"metrics": part.scores(longer, device), "seconds": time.perf_counter() - start}
    if given.tune:
        model = gt.TwoTower(device=device)
        model.tune(part.train, time_limit=given.tune, trials=10_000)
        rows[f"tuned for {given.tune:.0f} s"] = {"metrics": part.scores(model, device)}
    return rows


def compared(part: Ids, given: argparse.Namespace) -> dict[str, Any]:
    """Metrics of other methods and of random settings around those of a model by rules."""
    base = part.fit(device=given.device, select=False, max_iterations=1)
    rows = {peer: {"metrics": row} for peer, row in part.peers(given, base).items()}
    rng, tried, ends = np.random.default_rng(given.seed), [], time.perf_counter() + given.seconds
    while len(tried) < given.random and time.perf_counter() < ends:
        options = part.random(rng, base)
        model = part.fit(device=given.device, select=False, **options)
        tried.append((part.values(*part.embeddings(model, given.device)).astype(np.float32), str(options)))
    return rows | _best(tried)


def _best(tried: list[tuple[np.ndarray, str]]) -> dict[str, Any]:
    """The best of settings on the test part, and the best on one half of its entities as the other half ranks it."""
    if not tried:
        return {}
    values = np.stack([one for one, _ in tried])  # settings × entities × metrics
    means, side = np.nanmean(values, axis=1), np.random.default_rng(0).permutation(values.shape[1]) % 2
    best = int(np.argmax(means[:, -1]))
    halves = [np.nanmean(values[:, side == half], axis=1) for half in (0, 1)]
    crossed = [halves[1 - half][np.argmax(halves[half][:, -1])] for half in (0, 1)]
    found = f"best of {len(tried)} random settings"
    return {
        f"{found} on the test part": {"metrics": means[best].round(6).tolist(), "settings": tried[best][1]},
        f"{found} on one half, measured on the other": {"metrics": np.mean(crossed, axis=0).round(6).tolist()},
    }


def objectives(part: Ids, given: argparse.Namespace) -> dict[str, Any]:
    """Objectives, each with the penalty that is best on the test part: labels, and weights of pairs and entities."""
    device = given.device
    if isinstance(part, Features):
        name, powers, shape = "l2", (-4, -2, 0, 2, 4), {"hidden": ()}
        tried = [{"imputed": label, "left_weights": f"degree^{p}"} for label in (-0.5, "fitted") for p in (0, 0.5)]
    else:
        name, powers, shape = "embedding_l2", (-1, 0, 1, 2), {}
        shares = [(share, power, -0.5) for share in (4, 2, 1) for power in (1.0, 0.8)]
        shares += [(2, 0.8, label) for label in (-1.0, 0.0, "fitted")]
        omega = part.fit(device=device, select=False, max_iterations=1).omega_ / 2  # of a share of 1
        tried = [{"omega": omega * share, "frequency_power": power, "imputed": y} for share, power, y in shares]
    rows = {}
    for options in tried:
        options = {**options, **shape, "device": device, "select": False}
        base, found = part.fit(**options, max_iterations=1), []
        for power in powers:
            model = part.fit(**options, **{name: getattr(base, f"{name}_") * 2.0**power})
            found.append((part.scores(model, device), f"{name} times 2^{power}"))
        scores, setting = max(found, key=lambda one: one[0][-1])
        text = ", ".join(f"{key} {value}" for key, value in options.items() if key not in ("device", "select", *shape))
        rows[text] = {"metrics": scores, "settings": setting}
    return rows


def without(part: Ids, given: argparse.Namespace) -> dict[str, Any]:
    """The default, the same where one of its settings is given as the rule has it, and the same from a random start."""
    device = given.device
    rule = part.fit(device=device, select=False)
    fixed: dict[str, Any] = {"omega": rule.omega_}
    if isinstance(part, Features):
        fixed |= {"hidden": rule.hidden_, "normalize": rule.normalize_}
        fixed |= {"max_iterations": rule.history_[-1].iteration}
    default = part.fit(device=device)
    rows = {"default": {"metrics": part.scores(default, device), "selection": str(default.path_)}}
    for name, value in fixed.items():
        same = default.path_.chosen.get(name, value) == value  # the choice was the rule's
        model = default if same else part.fit(device=device, **{name: value})
        rows[f"{name} by rule"] = {"metrics": part.scores(model, device)}
    if default.path_.continued:
        scratch = part.fit(device=device, select=False, **default.path_.chosen)
        rows["from a random start"] = {"metrics": part.scores(scratch, device)}
    wary = {"_SURE": 1.0} if isinstance(part, Features) else {"_top": strongest}
    with patch.multiple(penalty_path, **wary):
        model = part.fit(device=device)
    rows["l2 by one error" if isinstance(part, Features) else "strongest within one error"] = {
        "metrics": part.scores(model, device)
    }
    return rows


def strongest(points: list[Any], best: Any) -> float:
    """The exponent of the strongest penalty of a path whose metric is within one standard error of the best."""

    def error(point: Any) -> float:
        gaps = best.values - point.values
        gaps = gaps[np.isfinite(gaps)]
        return float(np.std(gaps) / np.sqrt(max(1, len(gaps) - 1)))

    return max(point.exponent for point in points if best.metric - point.metric <= error(point))


def simpler(part: Ids, given: argparse.Namespace) -> dict[str, Any]:
    """The default, and the same by simpler rules where they differ from those in use."""
    device = given.device
    known: list[float] = []  # values of the objective where fits by the rules start

    def scores() -> list[float] | None:
        """Metrics of the default with the rules in use now; None if these are rules that were measured before."""
        start = part.fit(device=device, select=False, max_iterations=1).history_[0].value
        if any(abs(start / other - 1) < 1e-5 for other in known):
            return None
        known.append(start)
        return part.scores(part.fit(device=device), device)

    rows = {"default": {"metrics": scores()}}
    for name, constants in SIMPLER.items():
        with patch.multiple(defaults, **constants):
            if (found := scores()) is not None:
                rows[name] = {"metrics": found}
    return rows


VARIANTS = {"objectives": objectives, "without": without, "simpler": simpler, "losses": losses}


def section(given: argparse.Namespace) -> str:
    """The file and section of a result."""
    mode = next((f"{mode}-" for mode in (*VARIANTS, "peers") if getattr(given, mode)), "")
    return f"selection/{mode}{given.device}"


def in_parallel(given: argparse.Namespace, names: list[str]) -> None:
    """Run the splits of all sets in several processes, which share a GPU, and join their results as they come."""
    out, arguments, joined = given.out or RESULTS, sys.argv[1:], threading.Lock()
    tasks, sets = [(name, split) for split in given.splits.split(",") for name in names], {}

    def run(number: int) -> int:
        name, split = tasks[number]
        own = ["--jobs", "1", "--sets", name, "--splits", split, f"--name=part{number}"]
        code = subprocess.run([sys.executable, __file__, *arguments, *own]).returncode
        path = out / f"part{number}.json"
        if path.exists():
            with joined:
                sets.update(json.loads(path.read_text())["sets"])
                write_result(section(given), {"sets": sets, "processes": given.jobs}, given.out)
            path.unlink()
        return code

    with ThreadPoolExecutor(given.jobs) as pool:
        failed = [task for task, code in zip(tasks, pool.map(run, range(len(tasks))), strict=True) if code]
    if failed:
        raise SystemExit(f"failed: {failed}")


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sets", default="", help="such as ml1m,ml1m+features; all by default")
    parser.add_argument("--splits", default="0,1,2")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--random", type=int, default=0, help="random settings to try, with --peers")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of random settings and AdamW, a split")
    parser.add_argument("--seed", type=int, default=0, help="of the random settings")
    parser.add_argument("--peers", action="store_true", help="other methods and random settings instead")
    parser.add_argument("--trials", type=int, help="of AdamW: --losses, and a softmax with --peers; 8, but 0 on a CPU")
    parser.add_argument("--repeats", type=int, default=1, help="of the fits by rules and by default, which alternate")
    parser.add_argument("--tune", type=float, default=0.0, help="seconds to tune the default for, on sets of ids")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--name", default="", help="name of the result, instead of its section of selection.json")
    parser.add_argument("--known", action="store_true", help="rank known entities by ids next to features")
    parser.add_argument("--objectives", action="store_true", help="compare labels and weights instead")
    parser.add_argument("--without", action="store_true", help="leave out one choice of the default at a time instead")
    parser.add_argument("--losses", action="store_true", help="compare losses over all pairs by one optimizer instead")
    parser.add_argument("--simpler", action="store_true", help="compare simpler rules for where the default starts")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side, which share the device")
    given = parser.parse_args()
    if given.trials is None:
        given.trials = 8 if given.device == "cuda" or given.losses else 0
    warnings.simplefilter("ignore")
    if given.known:
        return known(given)
    every = [*IDS, *ALSO_IDS, *(f"{name}+features" for name in (*WITH_FEATURES, *GRAPHS))]
    found: dict[str, Any] = {}
    names = given.sets.split(",") if given.sets else every
    if given.jobs > 1:
        return in_parallel(given, names)
    for name in names:
        kind, plain = (Features, name[:-9]) if name.endswith("+features") else (Ids, name)
        for split_number in map(int, given.splits.split(",")):
            try:
                part = kind(plain, split_number, given.data)
            except FileNotFoundError:
                print(f"{name}: left out, it is not in {given.data}")
                break
            if variant := next((VARIANTS[mode] for mode in VARIANTS if getattr(given, mode)), None):
                rows, end = variant(part, given), ""
            elif given.peers:
                rows, end = compared(part, given), ""
            else:
                rows = measured(part, given)
                ratio = rows["default"]["seconds"] / rows["by rules"]["seconds"]
                end = f"| {ratio:.1f} fits {rows['default']['selection']}"
            found[f"{name} split {split_number}"] = {"metrics": list(part.metrics), "rows": rows}
            texts = (f"{row} " + "/".join(f"{x:.4f}" for x in of["metrics"]) for row, of in rows.items())
            print(name, split_number, " | ".join(texts), end, flush=True)
            write_result(given.name or section(given), {"sets": found}, given.out)


if __name__ == "__main__":
    main()
