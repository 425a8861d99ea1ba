"""The peer: two towers of the same kind in plain PyTorch, in-batch softmax with logQ correction and cosine scores.

    python benchmarks/features/softmax.py eurlex --seconds 60 --out log.jsonl        random settings, one line a trial

What is drawn: width, depth, dimension, learning rate, temperature, dropout, weight decay, batch size, epochs. Features
are scaled as ours are (search.py).
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from search import dense, metrics, scaled
from sets import DATA, NAMES, FeatureSet, load
from torch import Tensor, nn


class Rows:
    """Sparse rows on a device, handed out as what nn.EmbeddingBag takes."""

    def __init__(self, rows: sp.csr_matrix, device: torch.device) -> None:
        self.offsets = torch.from_numpy(rows.indptr.astype(np.int64)).to(device)
        self.columns = torch.from_numpy(rows.indices.astype(np.int64)).to(device)
        self.values = torch.from_numpy(rows.data.astype(np.float32)).to(device)
        self.shape = rows.shape

    def take(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Columns, offsets and values of some rows."""
        first, counts = self.offsets[rows], self.offsets[rows + 1] - self.offsets[rows]
        starts = counts.cumsum(0) - counts
        place = torch.arange(int(counts.sum()), device=rows.device) + torch.repeat_interleave(first - starts, counts)
        return self.columns[place], starts, self.values[place]


class Tower(nn.Module):
    """Embedding bag, hidden layers, unit rows."""

    def __init__(self, inputs: int, widths: list[int], dropout: float) -> None:
        super().__init__()
        self.first = nn.EmbeddingBag(inputs, widths[0], mode="sum")
        nn.init.normal_(self.first.weight, std=0.1)
        layers: list[nn.Module] = []
        for a, b in pairwise(widths):
            layers += [nn.ReLU(), nn.Dropout(dropout), nn.Linear(a, b)]
        self.rest = nn.Sequential(*layers)

    def forward(self, columns: Tensor, offsets: Tensor, values: Tensor) -> Tensor:
        """Embeddings of length one."""
        return nn.functional.normalize(self.rest(self.first(columns, offsets, per_sample_weights=values)), dim=1)


def draw(rng: np.random.Generator) -> dict[str, Any]:
    """One random setting."""
    return {
        "width": int(rng.choice([512, 1024, 2048])), "depth": int(rng.choice([0, 1, 1])),
        "dim": int(rng.choice([256, 512])), "rate": float(10 ** rng.uniform(-3.7, -2.3)),
        "temperature": float(10 ** rng.uniform(-1.5, -0.6)), "dropout": float(rng.choice([0.0, 0.2, 0.5])),
        "decay": float(rng.choice([0.0, 1e-5, 1e-4, 1e-3])), "batch": int(rng.choice([1024, 4096])),
        "epochs": int(rng.choice([5, 10, 20])), "scale": str(rng.choice(["logidf", "unit"])),
    }  # fmt: skip


def train(one: FeatureSet, s: dict[str, Any], device: torch.device, seed: int) -> dict[str, float]:
    """Metrics of one setting at its end."""
    torch.manual_seed(seed)
    sides = {}
    for side, given, count in (("left", one.left, one.train.shape[0]), ("right", one.right, one.train.shape[1])):
        rows = sp.identity(count, format="csr") if given is None else scaled(s["scale"], given, given)
        sides[side] = Rows(sp.csr_matrix(rows), device)
    widths = [s["width"]] * s["depth"] + [s["dim"]]
    towers = {side: Tower(rows.shape[1], widths, s["dropout"]).to(device) for side, rows in sides.items()}
    pairs = one.train.tocoo()
    left, right = (torch.from_numpy(x.astype(np.int64)).to(device) for x in (pairs.row, pairs.col))
    frequency = torch.bincount(right, minlength=one.train.shape[1]).float().clamp(min=1).log()
    parameters = [p for tower in towers.values() for p in tower.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=s["rate"], weight_decay=s["decay"], fused=device.type == "cuda")
    for _ in range(s["epochs"]):
        order = torch.randperm(len(left), device=device)
        for batch in order.split(s["batch"]):
            p = towers["left"](*sides["left"].take(left[batch]))
            q = towers["right"](*sides["right"].take(right[batch]))
            scores = p @ q.T / s["temperature"] - frequency[right[batch]]
            same = right[batch][:, None] == right[batch][None, :]
            same.fill_diagonal_(False)
            loss = nn.functional.cross_entropy(
                scores.masked_fill(same, -torch.inf), torch.arange(len(batch), device=device)
            )
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
    new = Rows(scaled(s["scale"], one.left if one.side == "left" else one.right, one.new), device)
    with torch.no_grad():
        made = {side: _embed(towers[side].eval(), rows) for side, rows in (*sides.items(),)}
        made[one.side] = _embed(towers[one.side], new)
    return metrics(made["left"], made["right"], dense(one.truth).to(device))


def _embed(tower: Tower, rows: Rows) -> Tensor:
    numbers = torch.arange(rows.shape[0], device=rows.values.device)
    return torch.cat([tower(*rows.take(block)) for block in numbers.split(4096)])


def main() -> None:
    """Train settings until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sets", help="names, separated by commas: " + ", ".join(NAMES))
    parser.add_argument("--seconds", type=float, default=60.0, help="for each set")
    parser.add_argument("--trials", type=int, default=30, help="for each set, at most")
    parser.add_argument("--first", type=int, default=0, help="leave out so many of them, which are in the log already")
    parser.add_argument("--out", type=Path, default=Path("softmax.jsonl"))
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--split", type=int, default=2)
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for name in given.sets.split(","):
        one, rng = load(name, given.split, data=given.data), np.random.default_rng(0)
        end, trials = time.perf_counter() + given.seconds, 0
        while time.perf_counter() < end and trials < given.trials:
            s, began = draw(rng), time.perf_counter()
            trials += 1
            if trials <= given.first:
                continue
            done = train(one, s, device, trials - 1)
            with given.out.open("a") as log:
                seconds = round(time.perf_counter() - began, 2)
                line = {"set": name, "split": given.split, "setting": s, "seconds": seconds, "metrics": done}
                log.write(json.dumps(line) + "\n")
        print(name, trials, "trials", flush=True)


if __name__ == "__main__":
    main()
