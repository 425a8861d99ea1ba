"""Quality of given settings on an inner validation split, one JSON line each as it goes; made for long runs on a GPU.

    python benchmarks/quality/grid.py --data gowalla yelp2018 --configs grid.json --seconds 600 [--out lines.jsonl]
    python benchmarks/quality/grid.py --data gowalla --configs '[{"dim": 1024, "hidden": [], "left_power": 0.5}]'

A config is an object with any of these keys (defaults in brackets):

    dim [256], hidden [[]: linear towers], loss ["logistic"], imputed [-1], l2 [0.0625]
    share [2]             ω such that unobserved pairs weigh this much in all, observed ones 1 (or omega itself)
    penalty [2^-8]        μ at ν = 1; for another ν it is rescaled to the same total penalty Σc (or embedding_l2 itself)
    frequency_power [1]   ν
    features ["ids"]      "history" or "ids+history" for the left tower
    left_power, right_power [0]   weights a and b by degree to this power, mean 1
    iterations [20], every [5]    outer iterations, and how often the validation part is ranked
    optimizer_options [{}]        such as {"cg_steps": 10}
    precision ["tf32"], pair_precision ["float32"]   on a GPU
    data [all]            names of the sets to try it on
    seed [0]

Each line holds the config, the metrics at the best of the ranked iterations by the first metric, and the whole curve
with training seconds. `--seconds` caps the time on each set: once it is spent, that set's remaining configs are left
out (and said so). `--skip FILE` leaves out what a former run's lines hold, `--shard 0/4` takes every fourth config.
Needs torch, numpy, scipy, numba and safetensors alone. The validation part is one tenth of each user's training pairs;
nothing of a test part is read.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import scipy.sparse as sp
import torch
from data import FILES, inner_split, load, omega_of_share

import gramtower as gt
from gramtower.distributed.group import SINGLE
from gramtower.distributed.shards import Rows
from gramtower.experiments.tuning.space import rescaled_penalty
from gramtower.experiments.tuning.trial import chosen_features
from gramtower.metrics import evaluate_embeddings
from gramtower.model.feature_spec import training_inputs, training_parts

METRICS = ("recall@20", "ndcg@20", "paper_map@5")
DEFAULTS: dict[str, Any] = {
    "dim": 256, "hidden": [], "loss": "logistic", "imputed": -1.0, "l2": 2.0**-4, "share": 2.0, "omega": None,
    "penalty": 2.0**-8, "embedding_l2": None, "frequency_power": 1.0, "left_power": 0.0, "right_power": 0.0,
    "features": "ids", "iterations": 20, "every": 5, "optimizer_options": {}, "data": list(FILES), "seed": 0,
    "precision": "tf32", "pair_precision": "float32",
}  # fmt: skip


def problem_of(train: sp.csr_matrix, config: dict[str, Any]) -> gt.Problem:
    """The objective that a config asks for."""
    omega = omega_of_share(train, config["share"]) if config["omega"] is None else config["omega"]
    weights = [f"degree^{config[f'{side}_power']}" for side in ("left", "right")]
    mu = config["embedding_l2"]
    if mu is None:
        mu = rescaled_penalty(config["penalty"], config["frequency_power"], train, omega)
    seen, _ = chosen_features({"features": config["features"]}, (None, None))
    parts = training_parts("left", seen, None, train)
    features = training_inputs("left", parts, Rows((0, train.shape[0])), SINGLE, scale=False)[1]
    return gt.Problem(
        train, features, loss=config["loss"], imputed=config["imputed"], omega=omega, l2=config["l2"], embedding_l2=mu,
        frequency_power=config["frequency_power"], left_weights=weights[0], right_weights=weights[1],
        precision=config["precision"], pair_precision=config["pair_precision"],
    )  # fmt: skip


def run(config: dict[str, Any], train: sp.csr_matrix, held: sp.csr_matrix, device: torch.device) -> dict[str, Any]:
    """Train by a config and rank the validation part on the way."""
    problem = problem_of(train, config)
    made = gt.mlp_towers(problem, hidden=config["hidden"], dim=config["dim"], seed=config["seed"])
    towers = gt.Towers(made.left.to(device), made.right.to(device))
    curve: list[dict[str, Any]] = []

    def look(record: gt.Record, point: Any) -> None:
        if record.iteration % config["every"] == 0 or record.iteration == config["iterations"]:
            found = evaluate_embeddings(point.P, point.Q, held, train=train, metrics=METRICS)
            values = {metric: round(float(found[metric]), 5) for metric in METRICS}
            curve.append({"iteration": record.iteration, "seconds": round(record.seconds, 2), **values})

    result = gt.minimize(
        problem, towers, max_iterations=config["iterations"], seed=config["seed"], callbacks=[look],
        **config["optimizer_options"],
    )  # fmt: skip
    best = max(curve, key=lambda row: row[METRICS[0]]) if curve else {}
    return {**best, "omega": problem.omega, "embedding_l2": problem.embedding_l2, "reason": result.reason.name,
            "objective": result.value, "curve": curve}  # fmt: skip


def read_configs(text: str) -> list[dict[str, Any]]:
    """Configs from JSON given as text or as a file; unknown keys are refused."""
    given = json.loads(text if text.lstrip().startswith("[") else Path(text).read_text())
    for config in given:
        unknown = set(config) - set(DEFAULTS)
        if unknown:
            raise ValueError(f"configs: got {', '.join(sorted(unknown))}, expected keys of {', '.join(DEFAULTS)}")
    return given


def main(arguments: argparse.Namespace) -> None:
    device = torch.device("cuda" if arguments.device != "cpu" and torch.cuda.is_available() else "cpu")
    number, shards = map(int, arguments.shard.split("/"))
    configs = read_configs(arguments.configs)[number::shards]
    done = [json.loads(line) for line in Path(arguments.skip).read_text().splitlines()] if arguments.skip else []
    known = {(line["data"], json.dumps(line["config"], sort_keys=True)) for line in done if "config" in line}
    sets: dict[str, tuple[sp.csr_matrix, sp.csr_matrix]] = {}
    spent = dict.fromkeys(arguments.data, 0.0)
    for config in configs:  # configs outermost: every set gets a look at the first ones
        for name in arguments.data:
            key = (name, json.dumps(config, sort_keys=True))
            if name not in config.get("data", DEFAULTS["data"]) or key in known:
                continue
            line: dict[str, Any] = {"data": name, "config": config}
            start = time.perf_counter()
            if spent[name] >= arguments.seconds:
                line = {"data": name, "left_out": config}
            else:
                if name not in sets:
                    sets[name] = inner_split(load(name, arguments.folder).train, 0.1, arguments.split)
                try:
                    line |= run({**DEFAULTS, **config}, *sets[name], device)
                except (RuntimeError, ValueError) as error:  # memory of the GPU, a setting that cannot be: go on
                    line["error"] = f"{type(error).__name__}: {error}"[:300]
                    if device.type == "cuda":
                        torch.cuda.empty_cache()
            line["wall"] = round(time.perf_counter() - start, 1)
            spent[name] += line["wall"]
            text = json.dumps(line)
            print(text, flush=True)
            if arguments.out:
                with open(arguments.out, "a") as file:
                    file.write(text + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", choices=tuple(FILES), default=["moby"])
    parser.add_argument("--configs", required=True, help="a JSON list, or a file of one")
    parser.add_argument("--folder", type=Path, default=Path(".local-data"), help="where the data files are")
    parser.add_argument("--seconds", type=float, default=600.0, help="most seconds on each set")
    parser.add_argument("--split", type=int, default=0, help="seed of the inner validation split")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
    parser.add_argument("--shard", default="0/1", help="I/N: configs I, I+N, I+2N, …")
    parser.add_argument("--skip", help="JSON lines of a former run, not to repeat")
    parser.add_argument("--out", help="append the lines to this file too")
    main(parser.parse_args())
