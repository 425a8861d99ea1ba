"""One outer iteration of newton-kron on the eurlex shape, compared with the matrix products that it needs.

    python benchmarks/features/iteration.py [--repeats 5]                    results/features.json

15,511 documents by 5,000 sparse features (237 each) × 3,993 labels by ids, 82,530 pairs: eurlex-4k where it is found,
generated pairs and words of the same shape otherwise. Problem and towers are those of ``gt.TwoTower()``, which are
(1024,) → 512 with relu for documents and a table of 512 columns for labels; and, as a second run, those of
``gt.TwoTower(hidden=(1024,), dim=512)``, with a hidden layer on both sides. The iteration is the third of a run: its
point is evaluated (forward, value), then the method takes its step: gradient, preconditioner, conjugate gradient,
line search.

The floor is made of as many passes as ``problem.work`` counted in that very iteration, in turns with it, on memory that
is there already. Each pass has only these products, X the features, x and W the inputs and weight of a layer:

    forward         XW of the first layer (nothing for ids), x Wᵀ of the others
    jvp             X dW, dx Wᵀ + x dWᵀ
    vjp             XᵀG, GᵀX and G W
    value           PᵀAP, QᵀBQ
    gradient        P Q_c, Q P_c
    G·d             WᵀAP, HᵀBQ, W Q_c + P H_c, H P_c + Q W_c
    preconditioner  PᵀCP, QᵀCQ; of the hidden layer's sampled rows xᵀx and φ′ᵀφ′; WᵀSW in float64; the inverses of all
                    damped A and S by Cholesky in float64
    M·r             S R of each layer and table, R A where A is a matrix

and nothing else: no passes over observed pairs, no biases, activations, slopes, weights, penalties, sums of vectors,
memory. Sparse products are the fastest of torch, scipy and the library's kernel on this machine, found first. Prints
the ratio and the bound it is held to.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from sets import DATA
from torch import Tensor

import gramtower as gt
from gramtower.data import readers
from gramtower.data.datasets import planted_pairs
from gramtower.data.pairs import SparseBlock
from gramtower.engine.kernels import select
from gramtower.engine.objective.kronecker import _ROWS as SAMPLED
from gramtower.engine.objective.problem import Problem
from gramtower.engine.towers.linearization import Work
from gramtower.engine.towers.towers import Towers
from gramtower.model.fit_data import prepare_data
from gramtower.model.fit_parts import make_problem, make_towers
from gramtower.model.settings import ModelSettings

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import best_seconds, median_ratio, side_by_side, write_result

BOUND = 1.3
DOCUMENTS, WORDS, PER_ROW, LABELS, PAIRS = 15_511, 5_000, 237, 3_993, 82_530
BEFORE = 2  # iterations before the one that is measured
MODELS: dict[str, dict[str, Any]] = {"as it comes": {}, "hidden on both sides": {"hidden": (1024,), "dim": 512}}
Call = Callable[[], Any]
SPARSE: dict[str, dict[str, float]] = {}  # seconds of each way to make a sparse product, found once


def eurlex(data: Path) -> tuple[sp.csr_matrix, sp.csr_matrix, str]:
    """Pairs, features of the documents that have any pair, and where they are from."""
    path = data / "eurlex-4k" / "train.txt.xz"
    if path.exists():
        read = readers.extreme_classification(path)
        pairs, words = sp.csr_matrix(read.pairs.matrix), sp.csr_matrix(read.features)
        known = np.flatnonzero(np.diff(pairs.indptr))
        return pairs[known], words[known], "eurlex-4k"
    rng = np.random.default_rng(0)
    share = 1 / np.arange(20, 20 + WORDS)  # so that the commonest words are in most documents
    order = rng.random((DOCUMENTS, WORDS)) / share
    columns = np.argpartition(order, PER_ROW)[:, :PER_ROW].ravel()
    entries = rng.random(len(columns), dtype=np.float32), columns, np.arange(DOCUMENTS + 1) * PER_ROW
    return planted_pairs(DOCUMENTS, LABELS, PAIRS, seed=0), sp.csr_matrix(entries, (DOCUMENTS, WORDS)), "generated"


def fastest(product: str, ways: dict[str, Call]) -> str:
    """The way that takes the least time, by name."""
    if product not in SPARSE:
        SPARSE[product] = {name: best_seconds(way, repeats=3) for name, way in ways.items()}
        print(
            f"sparse {product}:", ", ".join(f"{way} {1e3 * s:.0f} ms" for way, s in SPARSE[product].items()), flush=True
        )
    return min(ways, key=lambda way: SPARSE[product][way])


class TowerFloor:
    """The matrix products of one tower over sparse features or ids, with one hidden layer or none.

    Attributes:
        rows: entities.
        inputs: rows of the first layer's weight.
        widths: columns of each layer's result.
    """

    def __init__(self, rows: int, inputs: int, widths: list[int], block: SparseBlock | None) -> None:
        self.rows, self.inputs, self.widths = rows, inputs, widths
        self._first: dict[str, Call] = {"XW": lambda: None, "XᵀG": lambda: None}
        if block is not None:
            self._find_sparse(block, torch.randn(inputs, widths[0]), torch.randn(rows, widths[0]))
        self._layers = [
            (torch.randn(rows, a), torch.randn(b, a), torch.randn(rows, b), torch.empty(b, a), torch.empty(rows, a))
            for a, b in pairwise(widths)
        ]

    def _find_sparse(self, block: SparseBlock, W: Tensor, G: Tensor) -> None:
        pattern, values = block.pattern, block.values
        X = sp.csr_matrix((values.numpy(), pattern.columns.numpy(), pattern.offsets.numpy()), block.shape)
        kernels = select(values.device)
        for name, matrix, operand in (("XW", X, W), ("XᵀG", X.T.tocsr(), G)):
            out = torch.zeros(matrix.shape[0], operand.shape[1])
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's sparse tensors are in beta
                indices = torch.from_numpy(matrix.indptr), torch.from_numpy(matrix.indices)
                csr = torch.sparse_csr_tensor(*indices, torch.from_numpy(matrix.data), matrix.shape)
            own = kernels.left_sum if name == "XW" else kernels.right_sum
            ways: dict[str, Call] = {
                "gramtower": lambda own=own, operand=operand, out=out: own(pattern, values, operand, out),
                "torch": lambda csr=csr, operand=operand: csr @ operand,
                "scipy": lambda matrix=matrix, operand=operand: matrix @ operand.numpy(),
            }
            self._first[name] = ways[fastest(name, ways)]

    def forward(self) -> None:
        """XW and x Wᵀ."""
        self._first["XW"]()
        for x, weight, y, _, _ in self._layers:
            torch.mm(x, weight.t(), out=y)

    def jvp(self) -> None:
        """X dW and dx Wᵀ + x dWᵀ."""
        self._first["XW"]()
        for x, weight, y, _, _ in self._layers:
            torch.mm(x, weight.t(), out=y).addmm_(x, weight.t())

    def vjp(self) -> None:
        """XᵀG, Gᵀx and G W."""
        for x, weight, g, change, below in self._layers:
            torch.mm(g.t(), x, out=change)
            torch.mm(g, weight, out=below)
        self._first["XᵀG"]()


class Floor:
    """The matrix products of a whole iteration."""

    def __init__(self, problem: Problem, towers: Towers) -> None:
        self.towers = {side: self._tower(problem, towers, side) for side in ("left", "right")}
        k = self.towers["left"].widths[-1]
        self._sides = [
            (torch.randn(tower.rows, k), torch.empty(tower.rows, k), torch.randn(k, k), torch.empty(k, k))
            for tower in self.towers.values()
        ]
        self._factors = [part for tower in self.towers.values() for part in self._made_of(tower)]
        self._applied = [part for tower in self.towers.values() for part in self._used_by(tower)]

    @staticmethod
    def _tower(problem: Problem, towers: Towers, side: str) -> TowerFloor:
        features, module = getattr(problem, side), getattr(towers, side)
        widths = [layer.out_features for layer in module if hasattr(layer, "out_features")]
        block = features.block(0, features.rows, torch.float32, torch.device("cpu"))
        return TowerFloor(features.rows, features.width, widths, block if isinstance(block, SparseBlock) else None)

    @staticmethod
    def _made_of(tower: TowerFloor) -> list[Call]:
        """Products and inverses of the preconditioner's factors."""
        k = tower.widths[-1]

        def inverse(size: int) -> Call:
            matrix = torch.eye(size, dtype=torch.float64) + torch.rand(size, size, dtype=torch.float64) / size**2
            return lambda: torch.cholesky_inverse(torch.linalg.cholesky(matrix))

        if len(tower.widths) == 1:  # a table: only S
            return [inverse(k)]
        width, some = tower.widths[0], min(tower.rows, tower.rows // max(1, tower.rows // SAMPLED))
        x, W = torch.randn(some, width), torch.randn(width, k, dtype=torch.float64)
        S = torch.randn(k, k, dtype=torch.float64)
        return [
            lambda: x.t() @ x,  # A of the second layer
            lambda: x.t() @ x,  # φ′ᵀφ′
            lambda: W @ S @ W.t(),
            *(inverse(size) for size in (k, width + 1)),  # S and A of the second layer
            *(inverse(width) for _ in range(2)),  # S of the first layer, and of its bias
        ]

    @staticmethod
    def _used_by(tower: TowerFloor) -> list[Call]:
        """Products of one M·r."""
        first, k = tower.widths[0], tower.widths[-1]
        R, S, out = torch.randn(tower.inputs, first), torch.randn(first, first), torch.empty(tower.inputs, first)
        table: list[Call] = [lambda: torch.mm(R, S, out=out)]
        if len(tower.widths) == 1:
            return table
        S2, R2, A = torch.randn(k, k), torch.randn(k, first + 1), torch.randn(first + 1, first + 1)
        return [*table, lambda: S2 @ R2 @ A]

    def run(self, counts: dict[str, int]) -> None:
        """All products of so many passes."""
        for side, tower in self.towers.items():
            for what in ("forward", "jvp", "vjp"):
                for _ in range(counts[f"{side}_{what}s"]):
                    getattr(tower, what)()
        for name in ("value", "gradient", "product", "preconditioner", "application"):
            for _ in range(counts[f"{name}s"]):
                getattr(self, name)()

    def value(self) -> None:
        """PᵀAP and QᵀBQ."""
        for E, _, _, out in self._sides:
            torch.mm(E.t(), E, out=out)

    def gradient(self) -> None:
        """P Q_c and Q P_c."""
        for E, U, gramian, _ in self._sides:
            torch.mm(E, gramian, out=U)

    def product(self) -> None:
        """WᵀAP and W Q_c + P H_c, and the same on the right."""
        for E, U, gramian, out in self._sides:
            torch.mm(E.t(), E, out=out)
            torch.mm(E, gramian, out=U).addmm_(E, gramian)

    def preconditioner(self) -> None:
        """PᵀCP and QᵀCQ, the factors and their inverses."""
        self.value()
        for part in self._factors:
            part()

    def application(self) -> None:
        """M·r."""
        for part in self._applied:
            part()


def passes(work: Work, cg_steps: int) -> dict[str, int]:
    """How often the floor has each pass, from the counts of one iteration."""
    counts = {name: round(getattr(work, name)) for name in vars(work) if name.startswith(("left", "right"))}
    counts["values"] = counts["left_forwards"]
    counts["products"], counts["preconditioners"] = counts["left_jvps"], 1
    counts["gradients"] = counts["left_vjps"] - counts["left_jvps"]
    counts["applications"] = cg_steps + 1
    return counts


def measure(settings: ModelSettings, pairs: sp.csr_matrix, words: sp.csr_matrix, repeats: int) -> dict[str, Any]:
    """The iteration and its floor, in turns."""
    data = prepare_data(settings, pairs, words)
    problem = make_problem(settings, data)
    towers = make_towers(settings, data, problem)
    method = gt.optim.NewtonKron().method(settings.seed)
    point = problem.at(towers)
    for _ in range(BEFORE):
        point = method.iterate(problem, towers, point).point
        assert point is not None
    theta, state = point.parameters, method.state()
    floor, seen = Floor(problem, towers), {}

    def iteration() -> None:
        method.restore(state)
        before = problem.work.copy()
        start = problem.at(towers, theta)
        _ = start.value
        result = method.iterate(problem, towers, start)
        assert result.point is not None
        counts = passes(problem.work.since(before), result.cg_steps)
        assert seen.setdefault("counts", counts) == counts  # the same iteration each time

    iteration()
    counts = seen["counts"]
    print(f"{data.hidden} → {data.dim}:", ", ".join(f"{count} {name}" for name, count in counts.items() if count))
    times = side_by_side({"iteration": iteration, "floor": lambda: floor.run(counts)}, repeats, warmup=1)
    whole, least = (statistics.median(times[name]) for name in ("iteration", "floor"))
    ratio = median_ratio(times, "iteration", "floor")
    print(f"iteration {whole:.2f} s, its matrix products {least:.2f} s: ratio {ratio:.2f} (<= {BOUND:g})", flush=True)
    parts = _parts(problem.at(towers, theta), floor)
    return {
        "hidden": data.hidden, "dim": data.dim, "passes": counts, "iteration_s": whole, "products_s": least,
        "ratio": ratio, "repeats": repeats, "parts": parts,
    }  # fmt: skip


def _parts(point: Any, floor: Floor) -> dict[str, dict[str, float]]:
    """Gradient, preconditioner, G·d and M·r by themselves, each with its products."""
    _ = point.value
    d, damping = point.gradient(), 1.0
    G, M, out = point.gauss_newton(damping), point.preconditioner("kronecker", damping), d.empty()
    towers = list(floor.towers.values())
    calls: dict[str, tuple[Call, Call]] = {
        "gradient": (point.gradient, lambda: ([tower.vjp() for tower in towers], floor.gradient())),
        "preconditioner": (lambda: point.preconditioner("kronecker", damping), floor.preconditioner),
        "G·d": (
            lambda: G.product(d, out),
            lambda: ([(tower.jvp(), tower.vjp()) for tower in towers], floor.product()),
        ),
        "M·r": (lambda: M.product(d, out), floor.application),
    }
    found = {}
    for name, (call, products) in calls.items():
        times = side_by_side({"whole": call, "floor": products}, repeats=4, warmup=1)
        whole, least = (statistics.median(times[part]) for part in ("whole", "floor"))
        found[name] = {"whole_s": whole, "products_s": least, "ratio": median_ratio(times, "whole", "floor")}
        print(f"    {name:16} {1e3 * whole:7.0f} ms, products {1e3 * least:7.0f} ms: {found[name]['ratio']:.2f}")
    return found


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--model", choices=MODELS, help="only one of the two runs; nothing is written then")
    given = parser.parse_args()
    pairs, words, source = eurlex(given.data)
    print(f"{source}: {pairs.shape[0]:,} × {pairs.shape[1]:,}, {pairs.nnz:,} pairs, {words.nnz:,} entries of features")
    runs = {}
    for name, options in MODELS.items():
        if given.model in (None, name):
            settings = ModelSettings(device="cpu", **options)
            runs[name] = measure(settings, pairs, words, given.repeats)
    if given.model is None:
        shape = {"documents": pairs.shape[0], "labels": pairs.shape[1], "pairs": pairs.nnz, "features": words.shape[1]}
        shape["entries"] = words.nnz
        write_result("features/iteration", {"data": source, **shape, "bound": BOUND, "sparse_s": SPARSE, "runs": runs})


if __name__ == "__main__":
    main()
