"""Do embeddings of a fixed length help? `python benchmarks/quality/normalized.py [--data moby ml1m] [--dim 128]`.

Each tower's output p becomes s p/‖p‖ with one learned s for each side: a module at the end of the towers,
differentiated by autodiff. Compared on the inner validation split with the same linear towers without it, over a few
penalties each: λ for both and μ where lengths are free (a fixed length leaves nothing for it to shrink but s).
Writes benchmarks/results/normalized_NAME.json.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import scipy.sparse as sp
import torch
from data import FILES, inner_split, load, omega_of_share, write_result
from torch import Tensor, nn

import gramtower as gt
from gramtower.metrics import evaluate_embeddings

METRICS = ("recall@20", "ndcg@20", "paper_map@5")
TRIED = [
    *({"sides": "", "l2": 2.0**-4, "mu": 2.0**-power} for power in (8, 7, 6)),
    *({"sides": "both", "l2": l2, "mu": 0.0} for l2 in (2.0**-8, 2.0**-4, 1.0, 8.0)),
    *({"sides": "left", "l2": 2.0**-4, "mu": 2.0**-power} for power in (7, 6)),
]


class Normalized(nn.Module):
    """Rows of length s, which is learned."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([scale]))

    def forward(self, x: Tensor) -> Tensor:
        """s x / ‖x‖."""
        return self.scale * x / x.norm(dim=1, keepdim=True).clamp_min(1e-12)


def quality(train: sp.csr_matrix, held: sp.csr_matrix, tried: dict[str, Any], dim: int, iterations: int) -> Any:
    """The best validation figures along one training."""
    problem = gt.Problem(train, omega=omega_of_share(train, 2), l2=tried["l2"], embedding_l2=tried["mu"])
    towers = gt.mlp_towers(problem, (), dim)
    left, right = (
        nn.Sequential(module, Normalized(2.0)) if tried["sides"] in ("both", side) else module
        for side, module in (("left", towers.left), ("right", towers.right))
    )
    seen: list[dict[str, float]] = []

    def look(record: gt.Record, point: Any) -> None:
        if record.iteration % 4 == 0:
            found = evaluate_embeddings(point.P, point.Q, held, train=train, metrics=METRICS)
            seen.append({metric: float(found[metric]) for metric in METRICS} | {"iteration": record.iteration})

    gt.minimize(problem, gt.Towers(left, right), max_iterations=iterations, callbacks=[look])
    return max(seen, key=lambda row: row[METRICS[0]])


def main(arguments: argparse.Namespace) -> None:
    for name in arguments.data:
        train, held = inner_split(load(name, arguments.folder).train)
        rows: list[dict[str, Any]] = []
        for tried in TRIED:
            rows.append({**tried, **quality(train, held, tried, arguments.dim, arguments.iterations)})
            print(name, rows[-1], flush=True)
        write_result(f"normalized_{name}", {"dim": arguments.dim, "iterations": arguments.iterations, "rows": rows})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", choices=tuple(FILES), default=["moby"])
    parser.add_argument("--folder", type=Path, default=Path(".local-data"))
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--iterations", type=int, default=20)
    main(parser.parse_args())
