"""The paper's comparison of optimizers on one or more experiments: what `gramtower compare` does, as a result file.

    python benchmarks/bench_compare.py ml1m moby wikispeedia npm-deps --data DATA --seconds 60
    python benchmarks/bench_compare.py moby ml10m --synthetic ml10m --seconds 8 --device cuda
    python benchmarks/bench_compare.py precision --seconds 5 --device cuda

Each name is a file of experiments/, whose settings are used; DATA holds the folders of the data sets, and "moby" is the
bundled core of the thesaurus, with an ω that gives unobserved pairs the total weight of the whole one. A set that is
not there is left out, with a line that says so. With --synthetic, which takes names or "all", pairs of the shape of the
experiment are generated, and the result says SYNTHETIC. All methods start from the same towers, have --seconds of
training each, and run in float32. The metric is measured on the held-out pairs of at most --users left entities.

Needs torch, numba and scipy only where pairs are generated or bundled. Writes a section of
benchmarks/results/compare.json for each experiment (with "-gpu" or "-synthetic" in its name): the summary of the
comparison, and for each method a curve of (seconds, objective, metric) of at most 60 points, which
benchmarks/evidence.py draws. A comparison in which a method failed, or was left out by --methods, does not replace a
whole one. Other names stand for other comparisons: models-ml1m for models with default settings by `gt.benchmark` on
ml1m, three splits (needs implicit), demo for the table that `gramtower demo` prints, and precision for newton and
newton-kron with float32 and tf32 products on moby, two starts each.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
import tomllib
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import environment, random_pairs, read_result, write_result

from gramtower.data import splits
from gramtower.data.datasets import planted_pairs, thesaurus
from gramtower.data.interactions import Interactions
from gramtower.experiments.comparison import RAN, Comparison, MethodRun, Request, Runner, history_path, summarise
from gramtower.model.fit_data import prepare_data
from gramtower.model.fit_parts import make_problem, make_towers, make_validation
from gramtower.model.settings import ModelSettings
from gramtower.training.loop import minimize
from gramtower.training.result import read_history

ROOT = Path(__file__).resolve().parent.parent
#: Where a data set is below DATA, and the share of weight that a smaller version of it needs.
PLACES = {
    "ml1m": "ml-1m",
    "ml10m": "ml-10m",
    "wikispeedia": "wikispeedia/links.tsv.xz",
    "npm-deps": "npm-deps-2016/pairs.tsv.xz",
    "netflix": "netflix",
    "wiki-simple": "wiki-simple/links.tsv",
}
BUNDLED_OMEGA = {"moby": 2.0**-7}
POINTS = 60


def pairs_of(
    name: str, content: dict[str, Any], data: Path, synthetic: bool = False, scale: float = 1.0
) -> Interactions | None:
    """All pairs of an experiment, or None if the data are not there; generated ones of scaled sides."""
    about = content["data"]
    if synthetic:
        m, n, observed = about["shape"]
        m, n, total = round(m * scale), round(n * scale), round(observed * scale**2 / (1 - about["validation"]))
        where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return Interactions.from_matrix(random_pairs(m, n, total, where, groups=16))
    if name in BUNDLED_OMEGA:
        return thesaurus()
    path = data / PLACES[name]
    if not path.exists():
        return None
    from gramtower.data import readers

    if about["format"] == "movielens":
        return readers.movielens(path, threshold=about["threshold"])
    return readers.edge_list(path, separator="\t")


def some_users(held_out: Interactions, most: int) -> Interactions:
    """The held-out pairs of at most so many left entities, drawn with a seed."""
    rows = np.unique(held_out.matrix.nonzero()[0])
    if len(rows) <= most:
        return held_out
    keep = np.zeros(held_out.shape[0], dtype=bool)
    keep[np.random.default_rng(0).choice(rows, most, replace=False)] = True
    matrix = held_out.matrix.tocsr(copy=True)
    matrix.data[:] = np.repeat(keep, np.diff(matrix.indptr))
    matrix.eliminate_zeros()
    return Interactions.from_matrix(matrix, held_out.left_ids, held_out.right_ids)


def thinned(history: list[Any]) -> list[list[float | None]]:
    """At most POINTS records, evenly in the logarithm of time, the last and the best by metric among them."""
    if len(history) > POINTS:
        times = np.log(np.maximum([record.seconds for record in history], 1e-3))
        places = {int(np.argmin(abs(times - t))) for t in np.linspace(times[0], times[-1], POINTS - 2)}
        best = max(range(len(history)), key=lambda i: history[i].metric or 0.0)
        history = [history[i] for i in sorted(places | {best, len(history) - 1})]
    short = lambda x: None if x is None else float(f"{x:.6g}")  # noqa: E731
    return [[short(r.seconds), short(r.value), short(r.metric)] for r in history]


def experiment(name: str) -> dict[str, Any]:
    """The content of a file of experiments/."""
    return tomllib.loads((ROOT / "experiments" / f"{name}.toml").read_text())


def constants(content: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The options of each method of an experiment."""
    methods = content["optimizers"].items()
    return {name: {key.replace("-", "_"): value for key, value in options.items()} for name, options in methods}


def settings(name: str, pairs: Interactions, content: dict[str, Any], device: str, **changes: Any) -> ModelSettings:
    """Problem and towers of an experiment."""
    table = {key.replace("-", "_"): value for key, value in {**content["problem"], **content["towers"]}.items()}
    if name in BUNDLED_OMEGA and pairs.shape[0] < content["data"]["shape"][0]:
        table["omega"] = BUNDLED_OMEGA[name]
    table |= {"seed": content["run"]["seed"], "precision": "float32"} | changes
    table["hidden"] = tuple(table["hidden"])
    return ModelSettings(**table, metric=content["run"]["metric"], device=device, select=False)


def warm_up(model: ModelSettings, train: Interactions, methods: dict[str, dict[str, Any]], folder: Path) -> None:
    """Two iterations of each method, so that none is charged for what it compiles; on a CPU those of a small problem.

    On a GPU what is compiled depends on the sizes, and two iterations are short.
    """
    pairs = Interactions.from_matrix(planted_pairs(300, 200, 4000)) if model.device == "cpu" else train
    data = prepare_data(model, pairs)
    problem = make_problem(model, data)
    runner = Runner(
        problem, lambda: make_towers(model, data, problem), None, 60.0, 2, 0, folder, methods, checkpoints=False
    )  # fmt: skip
    runner.prepare()
    for method in methods:
        runner.run(method)


def compare(name: str, pairs: Interactions, content: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """The summary of a comparison of all methods of an experiment."""
    run, start = content["run"], time.perf_counter()
    split = splits.random_pairs(pairs, content["data"]["validation"], seed=run["seed"])
    held_out = some_users(split.test, options.users)
    model = settings(name, pairs, content, options.device)
    data = prepare_data(model, split.train, validation=held_out)
    problem = make_problem(model, data)
    methods = {
        method: given
        for method, given in constants(content).items()
        if not options.methods or method in options.methods
    }
    with tempfile.TemporaryDirectory() as folder:
        warm_up(model, split.train, methods, Path(folder))
        runner = Runner(
            problem, lambda: make_towers(model, data, problem), make_validation(model, data), options.seconds, None,
            run["seed"], Path(folder), methods, False, lambda text: None, checkpoints=False,
        )  # fmt: skip
        runner.prepare()
        print(f"  set-up in {time.perf_counter() - start:.0f} s", flush=True)
        runs = []
        for method in methods:
            start = time.perf_counter()
            outcome = runner.run(method)
            path = history_path(Path(folder), method)
            runs.append(MethodRun(method, read_history(path) if path.exists() else [], outcome))
            last = runs[-1].history[-1] if runs[-1].history else None
            reached = outcome.message if last is None else f"L {last.value:,.0f}, {last.seconds:.0f} s of training"
            print(f"  {method:14s} {outcome.status} {reached} in {time.perf_counter() - start:.0f} s", flush=True)
        limits = {"time_limit": options.seconds, "max_iterations": None}
        request = Request(list(methods), name, metric=run["metric"], settings={"limits": limits})
        found = summarise(Comparison(Path(folder), runs, request))
    found.pop("speed_up")
    for one in runs:
        found["methods"][one.name]["curve"] = thinned(one.history)
    counts = {"left": pairs.shape[0], "right": pairs.shape[1], "pairs": len(split.train),
              "validation_pairs": len(held_out)}  # fmt: skip
    used = {"omega": problem.omega, "l2": problem.l2, "precision": problem.precision, **limits}
    return {"environment": environment(), "title": name, **found, "data": counts, "settings": used}


def is_whole(found: dict[str, Any], methods: Iterable[str]) -> bool:
    """Whether every method of an experiment ran."""
    ran = {name for name, one in found.get("methods", {}).items() if one["status"] in RAN}
    return ran.issuperset(methods)


def compare_precisions(options: argparse.Namespace) -> None:
    """Train newton and newton-kron on moby with both precisions of products from two starts, 64-64 → 32."""
    content, pairs = experiment("moby"), thesaurus()
    train = splits.random_pairs(pairs, content["data"]["validation"], seed=0).train
    methods, runs = constants(content), []
    for method, seed in itertools.product(("newton", "newton-kron"), (0, 1)):
        for precision in ("float32", "tf32"):
            change: dict[str, Any] = {"hidden": [64, 64], "dim": 32, "seed": seed, "precision": precision}
            model = settings("moby", pairs, content, options.device, **change)
            data = prepare_data(model, train)
            problem = make_problem(model, data)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that tf32 is not safe with newton
                for most in (2, 10**9):  # the first compiles
                    towers = make_towers(model, data, problem)
                    ran = minimize(problem, towers, method, most, options.seconds, seed, **methods[method])
            last = ran.history[-1]
            runs.append({
                "method": method, "seed": seed, "precision": precision, "start": ran.history[0].value,
                "value": ran.value, "iterations": last.iteration, "seconds": last.seconds, "stopped": ran.reason.name,
            })  # fmt: skip
            print(f"  {runs[-1]}", flush=True)
    found = {"runs": runs, "seconds": options.seconds, "device": options.device}
    print(write_result(f"compare/{options.section or 'precision-gpu'}", found))


def compare_models(options: argparse.Namespace) -> None:
    """Compare models on ml1m as docs/benchmark.md says."""
    import gramtower as gt
    from gramtower.data import readers

    found = gt.benchmark(
        readers.movielens(options.data / PLACES["ml1m"]), 0.1, metrics=("paper_map@5", "map@5", "recall@20", "ndcg@20"),
        baselines=["popularity", "item-knn", "ease", "als", "gramtower-linear"], seeds=options.seeds, title="ml-1m",
    )  # fmt: skip
    print(found, write_result("compare/models-ml1m", found.summary), sep="\n")


def run_demo(options: argparse.Namespace) -> None:
    """Keep the metrics that `gramtower demo` prints."""
    from gramtower import demo

    methods = demo.run(verbose=False)["methods"]
    kept = {name: {key: one[key] for key in ("map@5", "recall@20")} for name, one in methods.items()}
    print(write_result("compare/demo", {"methods": kept}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared/data")
    parser.add_argument("--synthetic", default="", help="names separated by commas, or all")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--users", type=int, default=10_000)
    parser.add_argument("--methods", default="", help="names separated by commas [default: those of the experiment]")
    parser.add_argument("--seeds", type=int, default=3, help="of models-ml1m")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--section", help="name of the section, for one experiment [default: by name and device]")
    parser.add_argument("--scale", type=float, default=1.0, help="of both sides of generated pairs, for a try")
    options = parser.parse_args()
    options.methods = [method for method in options.methods.split(",") if method]
    others = {"models-ml1m": compare_models, "demo": run_demo, "precision": compare_precisions}
    partial = []
    for name in options.names:
        if name in others:
            others[name](options)
            continue
        content = experiment(name)
        synthetic = options.synthetic == "all" or name in options.synthetic.split(",")
        pairs = pairs_of(name, content, options.data, synthetic, options.scale)
        if pairs is None:
            print(f"{name} is left out: there is no {options.data / PLACES[name]}")
            continue
        print(f"{'SYNTHETIC ' * synthetic}{name}: {pairs}", flush=True)
        found = compare(name, pairs, content, options)
        found["synthetic"] = f"generated pairs of the shape of {name}, not the data itself" if synthetic else None
        default = f"{name}-synthetic" if synthetic else f"{name}-gpu" if options.device == "cuda" else name
        section = f"compare/{options.section or default}"
        print(found["verdict"])
        whole = is_whole(found, content["optimizers"])
        if whole or not is_whole(read_result(section), content["optimizers"]):
            print(write_result(section, found), flush=True)
        if not whole:
            ran = [f"{method} {one['status']}: {one['message']}" for method, one in found["methods"].items()]
            partial.append(f"{name} is not whole, and replaces no whole result: {'; '.join(ran)}")
    if partial:
        raise SystemExit("\n".join(partial))


if __name__ == "__main__":
    main()
