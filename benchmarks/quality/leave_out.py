"""Does it help to leave a pair out of the history that predicts it? `python benchmarks/quality/leave_out.py`.

A left tower that sees an entity's history sees, for an observed pair, that very pair. To leave each pair out by itself
would take a pass of the tower for each, and embeddings would no longer factorise. Cut into folds they do: every left
entity stands F times in the problem, each time without one part of its history, and learns that part; the pairs it is
shown count neither as observed nor as unobserved (an observed pair of weight 0 cancels its all-pairs term exactly), and
its left weight is 1/F. F = 1 is the plain history.

One user in ten gives no training pair; four fifths of its pairs are its history and the rest is to be found ("new").
The other users' validation pairs are ranked as well ("known"). Each number of folds is tried with a few penalties on
parameters and on embeddings. Nothing of a test part is read. Writes benchmarks/results/leave_out_NAME.json.
"""

from __future__ import annotations

import argparse
import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from data import FILES, inner_split, load, omega_of_share, write_result

import gramtower as gt
from gramtower.metrics import evaluate_embeddings
from gramtower.model.feature_spec import history_features

METRICS = ("recall@20", "ndcg@20", "paper_map@5")


def folded(train: sp.csr_matrix, folds: int, seed: int = 0) -> tuple[sp.csr_matrix, sp.csr_matrix, np.ndarray]:
    """Histories without a fold, the pairs of all copies, and the weights of those pairs: 1 in the fold left out."""
    if folds == 1:
        return history_features(train), train, np.ones(train.nnz, np.float32)
    rows = np.repeat(np.arange(train.shape[0]), np.diff(train.indptr))
    order = np.lexsort((np.random.default_rng(seed).random(train.nnz), rows))
    fold = np.empty(train.nnz, dtype=np.int64)
    fold[order] = (np.arange(train.nnz) - train.indptr[rows]) % folds  # each row's pairs in turns
    histories, weights = [], []
    for f in range(folds):
        kept = fold != f
        offsets = np.concatenate([[0], np.cumsum(np.bincount(rows[kept], minlength=train.shape[0]))])
        shown = sp.csr_matrix((np.ones(kept.sum(), np.float32), train.indices[kept], offsets), shape=train.shape)
        histories.append(history_features(shown))
        weights.append((~kept).astype(np.float32))
    return sp.vstack(histories, format="csr"), sp.vstack([train] * folds, format="csr"), np.concatenate(weights)


def quality(
    parts: dict[str, Any], folds: int, hidden: tuple[int, ...], l2: float, mu: float, arguments: Any
) -> dict[str, Any]:
    """The best figures along one training."""
    train: sp.csr_matrix = parts["train"]
    features, pairs, weights = folded(train, folds)
    problem = gt.Problem(
        pairs, features, omega=omega_of_share(train, 3), l2=l2, imputed=-0.5,
        embedding_l2=mu,
        left_weights=None if folds == 1 else np.full(pairs.shape[0], 1 / folds),
        pair_weights=None if folds == 1 else weights,
    )  # fmt: skip
    towers = gt.mlp_towers(problem, hidden, arguments.dim)
    known, new = (gt.Problem(h, history_features(h)).left for h in (train, parts["history"]))
    seen: list[dict[str, Any]] = []

    def look(record: gt.Record, point: Any) -> None:
        if record.iteration % 4 or not record.iteration:
            return
        towers.load(point.parameters)
        row: dict[str, Any] = {"iteration": record.iteration, "seconds": round(record.seconds, 1)}
        for who, entities, shown, held in (
            ("known", known, train, parts["held"]),
            ("new", new, parts["history"], parts["wanted"]),
        ):
            found = evaluate_embeddings(towers.embed("left", entities), point.Q, held, train=shown, metrics=METRICS)
            row |= {f"{who} {metric}": float(found[metric]) for metric in METRICS}
        seen.append(row)

    gt.minimize(problem, towers, max_iterations=arguments.iterations, callbacks=[look])
    return max(seen, key=lambda row: row["new recall@20"])


def split(train: sp.csr_matrix) -> dict[str, sp.csr_matrix]:
    """Training and validation pairs of nine users in ten, history and wanted pairs of the rest."""
    out = np.random.default_rng(1).random(train.shape[0]) < 0.1
    keep = [sp.diags(mask.astype(np.float32)) for mask in (~out, out)]
    known, new = (sp.csr_matrix(mask @ train) for mask in keep)
    for part in (known, new):
        part.eliminate_zeros()
    (inner, held), (history, wanted) = inner_split(known), inner_split(new, 0.2)
    return {"train": inner, "held": held, "history": history, "wanted": wanted}


def main(arguments: argparse.Namespace) -> None:
    for name in arguments.data:
        parts = split(load(name, arguments.folder).train)
        rows: list[dict[str, Any]] = []
        for hidden, folds, l2, power in product(((), (256,)), arguments.folds, arguments.l2, arguments.powers):
            start = time.perf_counter()
            mu = 2.0**-power / folds  # each entity stands that many times in the penalty
            best = quality(parts, folds, hidden, l2, mu, arguments)
            rows.append({"hidden": hidden, "folds": folds, "l2": l2, "mu": mu, **best})
            print(name, rows[-1], f"{time.perf_counter() - start:.0f} s", flush=True)
        write_result(f"leave_out_{name}", {"dim": arguments.dim, "iterations": arguments.iterations, "rows": rows})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", choices=tuple(FILES), default=["ml1m"])
    parser.add_argument("--folds", type=int, nargs="+", default=[1, 2, 5])
    parser.add_argument("--l2", type=float, nargs="+", default=[2.0**-5, 1.0, 32.0])
    parser.add_argument("--powers", type=int, nargs="+", default=[9, 7, 6], help="penalties are two to minus these")
    parser.add_argument("--folder", type=Path, default=Path(".local-data"))
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--iterations", type=int, default=16)
    main(parser.parse_args())
