"""How long newton-kron takes on 27 billion pairs until the validation MAP@5 is flat: packages and their dependencies.

    python benchmarks/bench_npm.py PAIRS [--dim 128] [--hidden 256 256] [--device cuda]

PAIRS is a file of lines `package<TAB>dependency` (.xz as well), or an .npz with integer arrays `left` and `right`. One
pair in ten is held out; MAP@5 is taken over 20,000 packages drawn from those with a held-out pair, every second
iteration, outside of the training clock. Flat means: the last three values are within half a percent of the best.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from common import write_result

import gramtower as gt
from gramtower.metrics import evaluate_embeddings
from gramtower.model.defaults import pick_device


def read(path: Path) -> sp.csr_matrix:
    """The pairs as a matrix of ones."""
    if path.suffix == ".npz":
        with np.load(path) as arrays:
            left, right = arrays["left"], arrays["right"]
        shape = (int(left.max()) + 1, int(right.max()) + 1)
        return sp.csr_matrix((np.ones(len(left), np.float32), (left, right)), shape=shape)
    from gramtower.data import readers

    return sp.csr_matrix(readers.edge_list(path).matrix)


def split(pairs: sp.csr_matrix, users: int, seed: int = 0) -> tuple[sp.csr_matrix, sp.csr_matrix]:
    """Nine pairs in ten, and the others of some left entities."""
    rng = np.random.default_rng(seed)
    coo = pairs.tocoo()
    held = rng.random(pairs.nnz) < 0.1
    chosen = np.zeros(pairs.shape[0], dtype=bool)
    some = np.unique(coo.row[held])
    chosen[rng.choice(some, min(users, len(some)), replace=False)] = True
    look = held & chosen[coo.row]

    def part(keep: np.ndarray) -> sp.csr_matrix:
        ones = np.ones(int(keep.sum()), np.float32)
        return sp.csr_matrix((ones, (coo.row[keep], coo.col[keep])), shape=pairs.shape)

    return part(~held), part(look)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", type=Path)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--hidden", type=int, nargs="*", default=[256, 256])
    parser.add_argument("--max-iterations", type=int, default=40)
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    device = pick_device(arguments.device)
    train, held = split(read(arguments.pairs), 20_000)
    omega = 2 * train.nnz / (train.shape[0] * train.shape[1] - train.nnz)
    problem = gt.Problem(train, omega=omega, l2=2.0**-4, embedding_l2=2.0**-8, precision="tf32")
    made = gt.mlp_towers(problem, hidden=arguments.hidden, dim=arguments.dim)
    curve: list[dict[str, Any]] = []

    def look(record: gt.Record, point: Any) -> bool:
        if record.iteration % 2:
            return False
        found = evaluate_embeddings(point.P, point.Q, held, train=train, metrics=("paper_map@5", "recall@20"))
        curve.append({"iteration": record.iteration, "seconds": record.seconds, "value": record.value, **found})
        print(curve[-1], flush=True)
        best = max(row["paper_map@5"] for row in curve)
        return len(curve) > 3 and all(row["paper_map@5"] > 0.995 * best for row in curve[-3:])

    towers = gt.Towers(made.left.to(device), made.right.to(device))
    start = time.perf_counter()
    result = gt.minimize(problem, towers, max_iterations=arguments.max_iterations, callbacks=[look])
    seconds = result.history[-1].seconds
    flat = result.reason.name == "CALLBACK"
    print(f"{problem}: {'flat' if flat else 'not flat'} after {seconds:.1f} s of training", end=" ")
    print(f"({time.perf_counter() - start:.1f} s with validation)")
    if device.type == "cuda":
        print(f"peak memory {torch.cuda.max_memory_allocated() / 1e9:.2f} GB")
    size = train.shape, train.nnz
    print(write_result("gpu/npm", {"shape": size, "dim": arguments.dim, "hidden": arguments.hidden, "flat": flat,
                               "seconds": seconds, "curve": curve}))  # fmt: skip


if __name__ == "__main__":
    main()
