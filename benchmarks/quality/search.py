"""Settings of a row by random search on the inner validation split: the same number of trials for every row.

    python benchmarks/quality/search.py gowalla --row softmax --trials 40 --seconds 1200

Settings are drawn from the space below with a seed; each is trained on nine tenths of every user's training pairs and
ranked on the rest, ours at several iterations, so that their number is part of what is chosen; the peers' numbers of
iterations and epochs are drawn. One JSON line a trial goes to LOGS/NAME-ROW.jsonl, which a repeated command continues,
and the best so far is printed with it.
Plain random search because it runs wherever the library does, without further packages, and treats all rows alike;
`gramtower tune` is the better tool for one's own data.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from data import FILES, inner_split, load, omega_of_share
from rows import HERE, METRICS, train
from torch import Tensor

from gramtower.experiments.tuning.space import rescaled_penalty
from gramtower.metrics import evaluate_embeddings

Draw = Callable[[np.random.Generator], Any]


def log_uniform(low: float, high: float) -> Draw:
    return lambda rng: float(np.exp(rng.uniform(np.log(low), np.log(high))))


def among(*values: Any) -> Draw:
    return lambda rng: values[int(rng.integers(len(values)))]


def space(row: str, dims: list[int]) -> dict[str, Draw]:
    """What is drawn for a row; ``share`` and ``penalty`` of ours become ω and μ by the size of the data."""
    if row == "als":
        return {
            "factors": among(*dims), "regularization": log_uniform(1e-3, 100.0), "alpha": log_uniform(1.0, 100.0),
            "iterations": among(5, 10, 15, 30),
        }  # fmt: skip
    if row == "softmax":
        return {
            "dim": among(*dims), "hidden": among([], [], [], [256]), "learning_rate": log_uniform(1e-3, 3e-2),
            "temperature": log_uniform(0.05, 0.3), "weight_decay": log_uniform(1e-6, 1e-1),
            "batch": among(2048, 8192), "epochs": among(5, 10, 20),
        }  # fmt: skip
    common = {
        "dim": among(*dims), "share": log_uniform(0.25, 8.0), "l2": log_uniform(2.0**-10, 1.0),
        "penalty": log_uniform(2.0**-10, 2.0**-4), "frequency_power": among(0.5, 0.75, 1.0),
        "left_power": among(0.0, 0.25, 0.5, 0.75), "right_power": among(-0.25, 0.0, 0.25, 0.5),
        "imputed": among(-1.0, 0.0), "loss": among("logistic", "logistic", "squared"),
    }  # fmt: skip
    return {**common, "hidden": among([256], [256, 256], [512], [512, 512]) if row == "hidden" else among([])}


def settings_of(row: str, drawn: dict[str, Any], pairs: Any, iterations: int) -> dict[str, Any]:
    """Arguments of the row from what was drawn."""
    if row in ("als", "softmax"):
        return drawn
    omega = omega_of_share(pairs, drawn["share"])
    mu = rescaled_penalty(drawn["penalty"], drawn["frequency_power"], pairs, omega)
    weights = {f"{side}_weights": f"degree^{drawn[f'{side}_power']}" for side in ("left", "right")}
    kept = {k: drawn[k] for k in ("dim", "hidden", "l2", "frequency_power", "imputed", "loss")}
    return {**kept, **weights, "omega": omega, "embedding_l2": mu, "max_iterations": iterations}


def main(arguments: argparse.Namespace) -> None:
    pairs, held = inner_split(load(arguments.data, arguments.folder).train)
    log = arguments.logs / f"{arguments.data}-{arguments.row}.jsonl"
    log.parent.mkdir(parents=True, exist_ok=True)
    done = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    rng = np.random.default_rng(arguments.seed)
    drawn = space(arguments.row, arguments.dims)
    draws = [{name: draw(rng) for name, draw in drawn.items()} for _ in range(arguments.trials)]
    began = time.perf_counter()
    for number in range(len(done), arguments.trials):
        if time.perf_counter() - began > arguments.seconds:
            print(f"time is up after {number} trials")
            break
        settings = settings_of(arguments.row, draws[number], pairs, arguments.iterations)
        curve: list[dict[str, Any]] = []

        def rank(step: int, seconds: float, P: Tensor, Q: Tensor, curve: list[dict[str, Any]] = curve) -> None:
            found = evaluate_embeddings(P, Q, held, train=pairs, metrics=METRICS)
            values = {metric: round(float(found[metric]), 5) for metric in METRICS}
            curve.append({"step": step, "seconds": round(seconds, 2), **values})

        def look(step: int, seconds: float, P: Tensor, Q: Tensor, rank: Callable[..., None] = rank) -> None:
            if step % arguments.every == 0 or step == arguments.iterations:
                rank(step, seconds, P, Q)

        line: dict[str, Any] = {"trial": number, "drawn": draws[number], "settings": settings}
        try:
            watch = None if arguments.row in ("als", "softmax") else look  # the peers' schedules count to their end
            P, Q, seconds = train(arguments.row, pairs, settings, arguments.device, watch)
            if not curve:
                rank(settings.get("iterations", settings.get("epochs", 0)), seconds, P, Q)
            best = max(curve, key=lambda row: row[arguments.metric])
            line |= {"best": best, "seconds": round(seconds, 1), "curve": curve}
        except (RuntimeError, ValueError) as error:
            line["error"] = f"{type(error).__name__}: {error}"[:300]
        with log.open("a") as file:
            file.write(json.dumps(line) + "\n")
        done.append(line)
        ranked = [d for d in done if "best" in d]
        top = max(ranked, key=lambda d: d["best"][arguments.metric]) if ranked else line
        print(json.dumps({k: line.get(k) for k in ("trial", "best", "error", "settings")}), flush=True)
        print(f"   best so far: trial {top['trial']} {top.get('best')}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", choices=tuple(FILES))
    parser.add_argument("--row", required=True, choices=("als", "softmax", "hidden", "ours"))
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=1200.0, help="no new trial after this long")
    parser.add_argument("--dims", type=int, nargs="+", default=[128, 256, 512])
    parser.add_argument("--iterations", type=int, default=20, help="outer iterations, or epochs")
    parser.add_argument("--every", type=int, default=2, help="iterations between looks at the validation part")
    parser.add_argument("--metric", choices=METRICS, default="recall@20")
    parser.add_argument("--logs", type=Path, default=HERE / "logs")
    parser.add_argument("--folder", type=Path, default=Path(".local-data"))
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
