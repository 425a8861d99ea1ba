"""The evidence of the documentation: rerun it, write it into the pages, and check every measured number.

    python benchmarks/evidence.py --list              what `make evidence` reruns, and how long each step may take
    python benchmarks/evidence.py --run [STEP …]      rerun these steps, all of the CPU without names (make evidence)
    python benchmarks/evidence.py --write             put values, tables and figures into README.md and docs/
    python benchmarks/evidence.py --check             fail if a number of the pages is not that of its result file

Measured numbers come from benchmarks/results/, whose sections say date, version, commit and machine. Marks, which are
HTML comments and do not show, tie the pages to them:

    <!-- = FILE PATH FORMAT -->0.325<!-- / -->   this value, or that of computed_PATH below if FILE is "computed"
    <!-- table NAME ARGUMENT … --> … <!-- / -->  a table, made by the function table_NAME below
    <!-- from FILE SECTION …, FILE … -->         every measured number of the block that follows (up to an empty line)
                                                 is a number of these sections, rounded as it is written; with ± 25%,
                                                 times may differ by so much, with "± 25% all" all numbers; with
                                                 "inverse", 1/x counts too
    <!-- given: REASON -->                       the numbers of the block are no measurements, or others' ones

A measured number has a decimal point, or a unit such as s, ms, GB, % or times. Code, links, and numbers after "=", "λ"
or a version's name are no measurements. Paths are keys separated by "/"; in a FORMAT "%" is a percentage, "," has
separators, ".3f" and the like are Python's; "ms", "min" and "GB" scale.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results"
FIGURES = ROOT / "docs/figures"


@dataclass(frozen=True)
class Step:
    """A command that rewrites result files, and the minutes after which it is stopped."""

    command: str
    minutes: float


DATA = os.environ.get("GRAMTOWER_DATA", str(ROOT.parent / "shared/data"))
_ML1M = f"{DATA}/ml-1m/ratings_no_timestamp.dat.xz"
CPU = {  # at most an hour together
    "compare-ml1m": Step(f"bench_compare.py ml1m --data {DATA} --seconds 60", 10),
    "compare-moby": Step("bench_compare.py moby --seconds 33", 7),
    "compare-wikispeedia": Step(f"bench_compare.py wikispeedia --data {DATA} --seconds 15", 3.5),
    "compare-npm-deps": Step(f"bench_compare.py npm-deps --data {DATA} --seconds 50 --users 1000", 11),
    "models": Step(f"bench_compare.py demo models-ml1m --data {DATA}", 4),
    "engine": Step("bench_engine.py all", 4),
    "als": Step(f"bench_als.py --sets ml1m --data {DATA}", 2),
    "defaults": Step(f"bench_defaults.py --ml1m {_ML1M} --seed 1", 2),
    "fit": Step(f"bench_fit.py --data {DATA}", 4),
    "startup": Step("bench_startup.py", 2),
    "updates": Step(f"bench_updates.py --ml1m {_ML1M} --iterations 2", 3),
    "lists": Step("bench_lists.py", 3),
    "evaluation": Step("bench_evaluation.py all", 2),
    "memory": Step("bench_memory.py", 2),
}
GPU = {  # at most ten minutes together
    "compare-gpu": Step("bench_compare.py moby --device cuda --seconds 5", 1.5),
    "compare-synthetic": Step("bench_compare.py ml10m wiki-simple --synthetic all --device cuda --seconds 7", 3.5),
    "compare-netflix": Step("bench_compare.py netflix --synthetic all --device cuda --seconds 8", 5),
}
LONGER = {  # by name only: beyond the hour, or for what changes rarely
    "complexity": Step("bench_complexity.py", 20),
    "iteration": Step("features/iteration.py", 10),
    "modules": Step("bench_modules.py --size small --device cpu", 10),
    "solvers": Step(f"bench_solvers.py --data {DATA}", 120),
    "loading": Step("bench_startup.py --load", 10),
    "serving": Step("bench_serving.py", 20),
    "indexes": Step("bench_indexes.py --docs", 60),
    "reading": Step("bench_reading.py csv", 10),
    "setup": Step("bench_setup.py --threads 1 2", 20),
    "scale": Step("bench_scale.py --size 2Mx200k --device cpu", 30),
    "scale-fits": Step("bench_scale.py --fit 40Mx10k 69Mx59M", 9),  # on a GPU
    "scale-selection": Step("bench_scale.py --selection", 5),  # on a GPU
    "distributed": Step("bench_distributed.py all", 30),
    "new-items": Step(f"bench_new_items.py {DATA}/ml-1m --known", 30),
    "labels": Step(f"features/labels.py --data {DATA}", 60),
    "lightfm": Step(f"bench_lightfm.py --data {DATA}", 5),
    "selection": Step(f"bench_selection.py --data {DATA} --peers --random 100", 600),
    "quality-ml1m": Step("quality/run.py ml1m", 10),
    "gpu-netflix": Step("bench_gpu.py --shape netflix --precision tf32", 5),
}


def run(names: list[str], results: Path | None = None) -> list[str]:
    """Rerun steps one after the other; return what failed or took too long."""
    steps, failed, start = CPU | GPU | LONGER, [], time.perf_counter()
    for name in names:
        if name not in steps:
            raise SystemExit(f"step: got {name!r}, expected one of {', '.join(steps)}")
    for name in names:
        step = steps[name]
        print(f"== {name}: python benchmarks/{step.command} (at most {step.minutes:g} min)", flush=True)
        out = [] if results is None else ["--out", str(results.resolve())]
        command = [sys.executable, *step.command.split(), *out]
        try:
            done = subprocess.run(command, cwd=ROOT / "benchmarks", timeout=60 * step.minutes, check=False)
            failed += [f"{name}: exit status {done.returncode}"] if done.returncode else []
        except subprocess.TimeoutExpired:
            failed.append(f"{name}: stopped after {step.minutes:g} minutes")
    print(f"{len(names) - len(failed)} of {len(names)} steps in {(time.perf_counter() - start) / 60:.1f} minutes")
    return failed


def load(name: str) -> dict[str, Any]:
    """The content of a result file."""
    path = RESULTS / f"{name.removesuffix('.json')}.json"
    if not path.exists():
        raise ValueError(f"there is no {path.relative_to(ROOT)}")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def at(name: str, path: str) -> Any:
    """The value at a path of a result file, or of a function above if the file is "computed"."""
    if name == "computed":
        return globals()[f"computed_{path}"]()
    found: Any = load(name)
    for key in path.split("/"):
        try:
            found = found[int(key)] if isinstance(found, list) else found[key]
        except (KeyError, IndexError, ValueError):
            raise ValueError(f"{name}: there is no {key!r} in {path}") from None
    return found


_SCALES = {"ms": 1e3, "min": 1 / 60, "GB": 1e-9, "MB": 1e-6, "%": 100.0}


def shown(value: float, form: str) -> str:
    """A number as a FORMAT says: ".3f", ".2f ms", ".0f %", ","."""
    form, _, unit = form.partition(" ")
    return f"{value * _SCALES.get(unit, 1.0):{form if form != ',' else ',.0f'}}"


# Tables


def _short(value: float | None, digits: int = 3) -> str:
    if value is None:
        return ""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def _titled(section: str) -> str:
    """The name of a comparison, with SYNTHETIC for generated pairs."""
    return re.sub(r"(.+)-synthetic", r"SYNTHETIC \1", section)


def table_compare(section: str) -> list[list[str]]:
    """The outcome of each method of a comparison, the lowest objective first."""
    found = load("compare").get(section)
    if found is None:
        return [["result"], [f"not run yet: `compare.json` has no section {section}"]]
    levels = ("1", "0.5", "0.1", "0.01")
    rows = [["method", "lowest L", "(L − L*)/L*", "paper MAP@5", "iterations", "data passes",
             *(f"seconds to {level}" for level in levels)]]  # fmt: skip
    methods = {name: one for name, one in found["methods"].items() if "lowest" in one}
    for name, one in sorted(methods.items(), key=lambda item: item[1]["lowest"]):
        rows.append([
            name, f"{one['lowest']:,.0f}", f"{one['relative_difference']:.2f}", f"{one['best_metric']:.3f}",
            f"{one['iterations']:,}", _short(one["data_passes"]),
            *(_short(one["seconds_to"].get(level)) for level in levels),
        ])  # fmt: skip
    return rows


def _claims(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Each finding of the paper, and whether it holds in a comparison, by the lowest objective of each method."""
    value = {name: one["lowest"] for name, one in found["methods"].items() if "lowest" in one}
    metric = {name: one["best_metric"] for name, one in found["methods"].items() if one.get("best_metric") is not None}

    def order(*names: str) -> str:
        known = [name for name in names if name in value]
        if len(known) < 2:
            return "not run"
        wrong = [f"{b} is ahead of {a}" for a, b in pairwise(known) if value[a] >= value[b]]
        return "holds" if not wrong else "does not: " + ", ".join(wrong)

    def both(*tests: str) -> str:
        known = [test for test in tests if test != "not run"]
        wrong = [test.removeprefix("does not: ") for test in known if test != "holds"]
        return "not run" if not known else "holds" if not wrong else "does not: " + ", ".join(wrong)

    by_value = sorted(value, key=lambda name: value[name])
    best = max(metric, key=lambda name: metric[name], default="")
    alike = "holds" if best == by_value[0] else f"does not: {best} has the best list"
    return [
        ("newton before gd-diag", order("newton", "gd-diag")),
        ("gd-diag before gd", order("gd-diag", "gd")),
        ("each -diag before its plain twin", both(*(order(f"{name}-diag", name) for name in ("sogram", "sampling")))),
        ("gd before sogram and sampling", both(order("gd", "sogram"), order("gd", "sampling"))),
        ("gd-diag before sogram-diag and sampling-diag",
         both(order("gd-diag", "sogram-diag"), order("gd-diag", "sampling-diag"))),
        ("the lowest objective has the best paper MAP@5", alike),
    ]  # fmt: skip


def table_findings(*sections: str) -> list[list[str]]:
    """The findings of the paper by data set."""
    compared = load("compare")
    columns = {name: _claims(compared[name]) for name in sections if name in compared}
    rows = [["the paper says", *map(_titled, columns)]]
    first = next(iter(columns.values()))
    for place, (claim, _) in enumerate(first):
        rows.append([claim, *(found[place][1] for found in columns.values())])
    return rows


def table_lead(*sections: str) -> list[list[str]]:
    """Which method is first within a tenth of the lowest objective, and by how much, by data set."""
    rows = [["", "seconds each", "first within 0.1", "next", "best of the paper's seven at the end"]]
    for name in sections:
        found = load("compare").get(name)
        if found is None:
            continue
        first, methods = found["first"]["0.1"], found["methods"]
        others = {key: one for key, one in methods.items() if key != "newton-kron" and "lowest" in one}
        best = min(others, key=lambda key: others[key]["lowest"])
        lead = "no other" if first["next"] is None else f"{first['next']}, {_short(first['times'])} times later"
        if first["next"] is None and first["times"] is not None:
            lead += f"; at least {_short(first['times'])} times"
        limits = found["settings"].get("limits", found["settings"])
        rows.append([
            _titled(name), f"{limits['time_limit']:g}", f"{first['method']}, {_short(first['seconds'])} s", lead,
            f"{best}, {others[best]['relative_difference']:.2f} above",
        ])  # fmt: skip
    return rows


def table_fits(*sizes: str) -> list[list[str]]:
    """Large fits on one GPU: how long an iteration takes, how much memory, and the objective."""
    names = {
        "seconds for an iteration": lambda one: f"{one['iteration_seconds']:.2f} s",
        "peak GPU memory, tensors": lambda one: f"{one['gpu_peak_bytes'] / 1e9:.1f} GB",
        "peak GPU memory, with the allocator's": lambda one: f"{one['gpu_reserved_bytes'] / 1e9:.1f} GB",
        "memory budget; planned": lambda one: f"{one['memory_budget']}; {one['planned_bytes'] / 1e9:.1f} GB",
        "peak host memory": lambda one: f"{one['host_peak_bytes'] / 1e9:.1f} GB",
        "objective, at the start and at the end": lambda one: f"{one['values'][0]:.4g}, {one['objective']:.4g}",
        "whole run: pairs, set-up, iterations": lambda one: f"{one['total_seconds']:.0f} s",
    }
    found = [load("scale").get(f"fit-{size}-cuda") for size in sizes]
    rows = [["", *(size.replace("x", " × ").replace("k", " k").replace("M", " M") for size in sizes)]]
    for name, cell in names.items():
        rows.append([name, *("not run yet" if one is None else cell(one) for one in found)])
    return rows


def table_selection_price() -> list[list[str]]:
    """Seconds of a fit with and without selection at 100 M pairs on one GPU."""
    found = load("scale").get("selection-100M-cuda")
    if found is None:
        return [["fit of 100 M pairs", "seconds"], ["with selection, without", "not run yet"]]
    seconds = {name: statistics.median(times) for name, times in found["seconds"].items()}
    return [["fit of 100 M pairs", "seconds", "embedding penalty", "points tried"]] + [
        [title, f"{seconds[name]:.1f}", f"{found[name]['embedding_l2']:.3g}", str(len(found[name]["tried"]))]
        for title, name in (("`TwoTower(select=False)`", "rules"), ("`TwoTower()`", "default"))
    ]


def table_demo() -> list[list[str]]:
    """The table that `gramtower demo` prints."""
    rows = [["needs of new packages", "MAP@5", "Recall@20"]]
    for name, found in load("compare")["demo"]["methods"].items():
        rows.append([name, f"{found['map@5']:.3f}", f"{found['recall@20']:.3f}"])
    return rows


def table_models() -> list[list[str]]:
    """Models with default settings on ml1m, means over splits, the best first."""
    found = load("compare")["models-ml1m"]
    first, *others = found["metrics"]
    rows = [["model", first, "95%", f"difference from {found['reference']}", *others]]
    for name in found["ranking"]:
        metrics = found["models"][name]["metrics"]
        low, high = metrics[first]["interval"]
        gap = metrics[first].get("difference")
        against = ""
        if gap is not None and name != found["reference"]:
            against = f"{gap['mean']:+.4f} ({gap['interval'][0]:+.4f} to {gap['interval'][1]:+.4f})".replace("-", "−")
        means = [f"{metrics[other]['mean']:.4f}" for other in others]
        rows.append([name, f"{metrics[first]['mean']:.4f}", f"{low:.4f} to {high:.4f}", against, *means])
    return rows


def _bounded(claim: str, bound: float, values: list[float], form: str, least: bool = False) -> list[str]:
    """A row of a claim, its bound and what was measured; bold where it misses the bound."""
    missed = [value < bound if least else value > bound for value in values]
    cells = [f"**{value:{form}}**" if bad else f"{value:{form}}" for value, bad in zip(values, missed, strict=True)]
    return [claim, f"{'≥' if least else '≤'} {bound:g}", ", ".join(cells)]


def table_engine() -> list[list[str]]:
    """The claims about the engine with their bounds."""
    found = load("engine")
    errors, product = found["accuracy"]["worst_relative_error"], found["product"]
    ratios = [row["ratios"] for row in found["growth"]["rows"] if "ratios" in row]
    memory = max(run["extra_bytes"] for run in found["memory"]["runs"].values())
    against = "worst relative error against the dense double sum"
    return [
        ["claim", "bound", "measured"],
        _bounded(f"{against}, float64: value, gradient, G·d", 1e-10, list(errors["float64"].values()), ".1e"),
        _bounded("the same, float32", 2e-4, list(errors["float32"].values()), ".1e"),
        _bounded("time when m, n and the pairs double (three times): gradient", 2.3, [r[0] for r in ratios], ".2f"),
        _bounded("the same: G·d", 2.3, [r[1] for r in ratios], ".2f"),
        _bounded("G·d over only its tower matrix products, ml1m shape", 1.8, [product["ratio"]], ".2f"),
        _bounded("torch's `sampled_addmm` twice and a CSR product over the fused pair pass, ml1m shape", 1.5,
                 [product["pair_ratio"]], ".2f", least=True),
        _bounded("memory of an evaluation and a G·d beyond inputs, ml10m shape, GB", 1.2, [memory / 1e9], ".2f"),
    ]  # fmt: skip


def table_als() -> list[list[str]]:
    """newton-kron against implicit's ALS."""
    rows = [["", "ALS", "newton-kron", "ratio"]]
    for name, one in load("als")["sets"].items():
        rounds = one["rounds"]
        spans = {key: [found[key] for found in rounds] for key in ("als_s", "newton_kron_s", "iterations", "ratio")}
        ends = {key: f"{_short(min(values))} to {_short(max(values))}" for key, values in spans.items()}
        rows.append([
            f"{name}, {one['shape'][2]:,} pairs", f"{ends['als_s']} s",
            f"{ends['newton_kron_s']} s, {max(spans['iterations'])} iterations",
            f"{ends['ratio']} in {len(rounds)} rounds, median {_short(one['median_ratio'])}",
        ])  # fmt: skip
    return rows


def table_defaults() -> list[list[str]]:
    """The default estimator against ALS and popularity, on split 1; the best of each column is bold."""
    rows = [["data", "model", "paper MAP@5", "Recall@20", "NDCG@20", "fit"]]
    metrics = ("paper_map@5", "recall@20", "ndcg@20")
    names = {"gramtower.TwoTower()": "`gt.TwoTower()`", "implicit ALS": "implicit ALS, 128 factors",
             "implicit ALS alpha=40": "implicit ALS, alpha=40"}  # fmt: skip
    for data in ("ml1m", "moby"):
        models = load("defaults")["split1"][data]
        for model, found in sorted(models.items(), key=lambda item: -item[1]["recall@20"]):
            best = [found[key] == max(one[key] for one in models.values()) for key in metrics]
            cells = [f"**{found[k]:.3f}**" if top else f"{found[k]:.3f}" for k, top in zip(metrics, best, strict=True)]
            seconds = f"{found['seconds']:.1f} s" if found["seconds"] else ""
            rows.append([data, names.get(model, model), *cells, seconds])
    return rows


def _selected(kind: str) -> dict[str, dict[int, dict[str, list[float]]]]:
    """The rows of section cuda of selection.json by set of ids or features, and by split."""
    found: dict[str, dict[int, dict[str, list[float]]]] = {}
    for name, one in load("selection")["cuda"]["sets"].items():
        data, _, split = name.rpartition(" split ")
        if data.endswith("+features") == (kind == "features"):
            rows = {row: result["metrics"] for row, result in one["rows"].items()}
            found.setdefault(data.removesuffix("+features"), {})[int(split)] = rows
    return found


def _joined(scores: list[float] | None) -> str:
    return "–" if scores is None else " / ".join(f"{score:.3f}" for score in scores)


_METRICS = {
    "ids": "ids: Recall@20 / NDCG@20",
    "features": "new entities by features: MAP@5 / Recall@20, or P@1 / 3 / 5",
}


def table_selection(kind: str) -> list[list[str]]:
    """The default, the rules and twice the iterations, means over the splits that have a row."""
    models = ("by rules", "default", "twice the iterations")
    rows = [[_METRICS[kind], "splits", *models]]
    for data, splits in _selected(kind).items():
        cells = []
        for model in models:
            runs = [split[model] for split in splits.values() if model in split]
            cells.append(_joined([sum(of) / len(of) for of in zip(*runs, strict=True)]))
        rows.append([data, str(len(splits)), *cells])
    return rows


def table_peers(kind: str) -> list[list[str]]:
    """The default on the first split against the best of each other method on its test part."""
    peers = ("popularity", "EASE", "ALS", "softmax") if kind == "ids" else ("popularity", "softmax")
    rows = [[_METRICS[kind], "default", *peers, "random settings", "share"]]
    for data, splits in _selected(kind).items():
        first = splits.get(0, {})
        drawn = next((row for row in first if "random settings" in row), None)
        if drawn is None or "default" not in first:
            continue
        found = [next((first[row] for row in first if row.startswith(peer)), None) for peer in peers]
        best, count = first[drawn], drawn.split()[2]
        share = f"{first['default'][-1] / best[-1]:.3f}"
        rows.append([data, *map(_joined, (first["default"], *found)), f"{_joined(best)} ({count})", share])
    return rows


def table_lightfm() -> list[list[str]]:
    """compat.lightfm and LightFM by set, size and number of epochs."""
    rows = [["set", "model", "seconds", "precision@5", "recall@10", "AUC"]]
    for data, one in load("quality")["lightfm"]["sets"].items():
        for model, row in one["models"].items():
            scores = (f"{row[metric]:.3f}" for metric in ("precision@5", "recall@10", "auc"))
            rows.append([data, model, _short(row["seconds"]), *scores])
    return rows


def environments(found: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """The environment of each section of a result file."""
    if "environment" in found:
        yield path, found["environment"]
    for key, value in found.items():
        if isinstance(value, dict) and key != "environment":
            yield from environments(value, f"{path}/{key}".lstrip("/"))
    for one in found.get("environments", [])[:1]:
        yield path, one


def machine(about: dict[str, Any]) -> str:
    """The machine of a section in a few words."""
    name = re.sub(r"\(R\)| Processor.*| @.*", "", str(about["processor"])).strip()
    return f"{about['gpu']}, {about['cores']} cores" if about.get("gpu") else f"{about['cores']} cores of {name}"


def table_machines() -> list[list[str]]:
    """Date, version, commit and machine of every section of every result file."""
    rows = [["result", "date", "version", "commit", "machine"]]
    for path in sorted(RESULTS.glob("*.json")):
        seen: dict[tuple[str, ...], list[str]] = {}
        for section, about in environments(json.loads(path.read_text())):
            commit = about.get("commit") or "not recorded"
            key = about["date"][:10], about["gramtower"], str(commit), machine(about)
            seen.setdefault(key, []).append(section or "all")
        rows += [[f"`{path.name}` {', '.join(sections)}", *key] for key, sections in sorted(seen.items())]
    return rows


# Figures, and numbers that are computed from several results


OWN = {"default", "by rules", "twice the iterations"}  # rows of selection.json that are the library's own


def list_scores() -> dict[str, dict[str, float]]:
    """NDCG@20 of the default on each set of ids in selection.json, and of every other model relative to it.

    Both are means over splits; a model is compared on the splits that it was run on.
    """
    splits: dict[str, dict[str, float]] = {}
    for section in ("cuda", "random-cuda"):
        for name, one in load("selection").get(section, {}).get("sets", {}).items():
            if one.get("metrics", ["recall@20", "ndcg@20"])[-1] == "ndcg@20" and "+features" not in name:
                for row, result in one["rows"].items():
                    model = "best of random settings" if row.startswith("best of") else row.partition(" on the test")[0]
                    splits.setdefault(name, {})[model] = result["metrics"][1]
    found: dict[str, dict[str, list[float]]] = {}
    for name, scores in splits.items():
        if "default" in scores and set(scores) - OWN:
            models = found.setdefault(name.partition(" split")[0], {})
            for model, score in scores.items():
                models.setdefault(model, []).append(score if model == "default" else score / scores["default"])
    return {data: {model: sum(v) / len(v) for model, v in models.items()} for data, models in found.items()}


def _against(model: str) -> list[float]:
    """The NDCG@20 of models whose name begins so, relative to the default."""
    return [ratio for one in list_scores().values() for name, ratio in one.items() if name.startswith(model)]


def computed_lead() -> float:
    """How many times sooner than any other newton-kron is within a tenth of the lowest objective on ml1m, at least."""
    first = load("compare")["ml1m"]["first"]["0.1"]
    if first["method"] != "newton-kron":
        raise ValueError(f"compare.json: {first['method']} is first on ml1m, and the pages say that newton-kron is")
    return float(first["times"])


def computed_compared() -> float:
    """The number of sets on which the default and EASE were run."""
    return len(_against("EASE"))


def computed_ahead() -> float:
    """The number of them on which the default is ahead of EASE with its best penalty, or behind by 0.5% at most."""
    return sum(ratio <= 1.005 for ratio in _against("EASE"))


def draw_lists(path: Path) -> None:
    """All sets of ids in one chart: NDCG@20 of each model relative to that of the default settings."""
    from gramtower.experiments.figures import COLOURS, drawing, panels, save

    scores = list_scores()
    models = list(dict.fromkeys(model for one in scores.values() for model in one if model not in OWN))
    with drawing():
        figure, (axis,) = panels(7.2, 1.2 + 0.32 * len(scores), 1)
        axis.axvline(1.0, color="black", linewidth=2, label="gt.TwoTower(), default settings")
        for place, model in enumerate(models):
            points = [(one[model], y) for y, one in enumerate(scores.values()) if model in one]
            marker, colour = "osD^vP"[place % 6], [*COLOURS, "#999999", "#56B4E9"][place % 6]
            axis.plot(*zip(*points, strict=True), marker, color=colour, markersize=6, label=model)
        labels = [f"{name} ({one['default']:.3f})" for name, one in scores.items()]
        axis.set_yticks(range(len(scores)), labels)
        axis.invert_yaxis()
        axis.set_xlim(left=0.0)
        axis.set_xlabel("NDCG@20 relative to the default settings, whose own is in brackets")
        axis.grid(True, axis="x", alpha=0.3)
        figure.legend(loc="outside upper center", ncols=2, fontsize=9)
        save(figure, path, "png")


def draw_comparison(section: str, path: Path) -> None:
    """A comparison of optimizers, from its curves; without curves the figure stays as it is."""
    import tempfile

    from gramtower.experiments import comparison_page
    from gramtower.experiments.comparison import Comparison, MethodRun, Outcome, Request
    from gramtower.training.result import Record

    found = load("compare").get(section, {})
    if not any("curve" in one for one in found.get("methods", {}).values()):
        return
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            MethodRun(name, [
                Record(i, seconds, value, 0.0, None, 0, 0.0, None, 0, 0.0, {}, {}, metric)
                for i, (seconds, value, metric) in enumerate(one["curve"])
            ], Outcome(one["status"]))
            for name, one in found["methods"].items()
        ]  # fmt: skip
        request = Request(list(found["methods"]), found["title"], found.get("synthetic"), found["metric"])
        comparison_page.draw_comparison(Comparison(Path(folder), runs, request))
        path.write_bytes((Path(folder) / "time.png").read_bytes())


def draw() -> None:
    """All figures that are made of result files."""
    draw_lists(FIGURES / "lists.png")
    for section in ("ml1m", "ml10m-synthetic"):
        draw_comparison(section, FIGURES / f"{section}.png")


def markdown(rows: list[list[str]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])


# Pages

VALUE = re.compile(r"(<!-- = (\S+) (\S+)((?: [^ ]+)*?) -->)(.*?)(<!-- / -->)", re.DOTALL)
TABLE = re.compile(r"(<!-- table ([\w ./-]+?) -->\n)(.*?)(<!-- / -->)", re.DOTALL)
FROM = re.compile(r"<!-- from (.+?) -->")
GIVEN = re.compile(r"<!-- given: .+? -->", re.DOTALL)
_UNITS = {  # what numbers of result files are multiplied by
    "": (1.0, 100.0), "s": (1.0, 1e-3), "ms": (1.0, 1e3), "µs": (1.0, 1e6, 1e3), "min": (1 / 60,), "minutes": (1 / 60,),
    "GB": (1.0, 1e-9), "MB": (1.0, 1e-6, 1e3), "kB": (1.0, 1e-3), "%": (100.0,), "times": (1.0,), "requests": (1.0,),
    "per second": (1.0,),
}  # fmt: skip
NUMBER = re.compile(
    r"(?<![\w.^²⁻/-])(?P<sign>[+−-]?)(?P<number>\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d*\.?\d+(?:e-?\d+)?)"
    r"(?:%|\s?(?P<unit>ms|µs|s|GB|MB|kB|min|minutes|times|seconds|requests|per second)\b)?(?P<percent>%)?"
)
_TIMED = ("s", "ms", "µs", "min", "minutes", "times", "requests", "per second")
_SETTING = re.compile(
    r"(?:[=≤≥<>×^~]|\b(?:torch|triton|Python|python|version|numpy|scipy|numba|CUDA|implicit|polars|to the power of|"
    r"label of|labels of|share of|power of|ω of|λ of|μ of|bound of|bound is|at most|at least|goal of|goal was|"
    r"recall|levels?|differences? of|weights? of|threshold of|budget of|dimension|dimensions|seed|split|splits|"
    r"Section|width|factors?|alpha|limit of|within|[Tt]ensor)) ?$"
)


def pages() -> list[Path]:
    """The pages whose numbers are checked."""
    docs = [page for page in sorted((ROOT / "docs").rglob("*.md")) if "_build" not in page.parts]
    return [ROOT / "README.md", *docs]


def blocks(text: str) -> Iterator[tuple[int, str, str]]:
    """Line, mark and prose of each block that is no code: lines up to an empty one, with the mark before them."""
    fence, mark, lines, first = False, "", [], 0
    for number, line in enumerate([*text.splitlines(), ""], 1):
        if line.lstrip().startswith("```") or (line.startswith("---") and number < 12):
            fence = not fence
            continue
        if fence or (line.startswith("    ") and not lines):  # with lines it continues the item of a list
            continue
        if (found := FROM.fullmatch(line.strip()) or GIVEN.fullmatch(line.strip())) and not lines:
            mark = found[0]
        elif line.strip():
            first = first or number
            lines.append(line)
        else:
            if lines:
                yield first, mark, "\n".join(lines)
                mark = ""
            lines, first = [], 0


def prose(block: str) -> str:
    """A block without what is no measurement: checked values and tables, code, links, comments."""
    for pattern in (VALUE, TABLE):
        block = pattern.sub(" ", block)
    block = re.sub(r"<!--.*?-->", " ", block, flags=re.DOTALL)
    block = re.sub(r"`[^`]*`", "``", block)
    block = re.sub(r"\]\([^)]*\)", "]", block)
    return re.sub(r"\*\*|__", "", block)


@dataclass(frozen=True)
class Measured:
    """A measured number of a page."""

    text: str
    value: float
    step: float  # one unit of the last digit that is written
    unit: str


def measured(text: str) -> list[Measured]:
    """The measured numbers of prose: those with a decimal point or a unit."""
    found = []
    for match in NUMBER.finditer(text):
        digits, unit = match["number"], match["unit"] or ("%" if "%" in match[0] else "")
        unit = "s" if unit == "seconds" else unit
        after = text[match.end() : match.end() + 2]
        if _SETTING.search(text[max(0, match.start() - 24) : match.start()]) or after[:1] in ("·", "^", "⁻"):
            continue
        if re.match(r"\.\d|[\w²³×/]", after) and not re.match(r"/ ", after):
            continue  # a version, or part of a name
        if digits == "95" or re.match(r" (?:M|G|k|million|billion)\b", text[match.end() : match.end() + 9]):
            continue  # an interval, or a size
        if "." not in digits and "e" not in digits and unit == "":
            continue
        plain = digits.replace(",", "")
        places = len(plain.partition(".")[2].partition("e")[0])
        step = 10.0**-places * (10.0 ** int(plain.partition("e")[2]) if "e" in plain else 1.0)
        found.append(Measured(match[0].strip(), float(plain), step, unit))
    return found


def leaves(found: Any) -> Iterator[float]:
    """All numbers of a result, those in texts too."""
    if isinstance(found, dict):
        for key, value in found.items():
            if key not in ("environment", "environments"):
                yield from leaves(value)
    elif isinstance(found, list):
        for value in found:
            yield from leaves(value)
    elif isinstance(found, (int, float)) and not isinstance(found, bool):
        yield float(found)
    elif isinstance(found, str):
        for text in re.findall(r"\d+\.\d+|\d{2,}", found):
            yield float(text)


def sections(mark: str) -> tuple[list[float], float, bool]:
    """The numbers of the sections that a mark names, the share by which times may differ, and whether others may."""
    names, _, share = mark.partition("±")
    inverse, names = " inverse" in names, names.replace(" inverse", "")
    numbers: list[float] = []
    for one in names.split(","):
        file, *parts = one.split()
        for part in parts or [""]:
            numbers += leaves(at(file, part) if part else load(file))
    numbers += [1 / number for number in numbers if number] if inverse else []
    amount, _, every = share.strip().partition(" ")
    return numbers, float(amount.rstrip("%")) / 100 if amount else 0.0, every == "all"


def matches(one: Measured, numbers: list[float], share: float, every: bool = False) -> bool:
    """Whether a number is among those of result files, rounded as it is written."""
    slack = 0.51 * one.step + (share * one.value if every or one.unit in _TIMED else 0.0)
    for number in numbers:
        candidates = [number * scale for scale in _UNITS[one.unit]]
        if one.unit == "%":
            candidates += [100 * (number - 1), 100 * (1 - number)]
        if one.unit == "times" and number:
            candidates.append(1 / number)
        if any(abs(abs(candidate) - one.value) <= slack for candidate in candidates):
            return True
    return False


def written(text: str) -> str:
    """A page with its values and tables as the result files have them."""

    def value(match: re.Match[str]) -> str:
        return match[1] + shown(at(match[2], match[3]), match[4].strip() or ".3f") + match[6]

    def table(match: re.Match[str]) -> str:
        name, *arguments = match[2].split()
        make: Callable[..., list[list[str]]] = globals()[f"table_{name}"]
        return match[1] + markdown(make(*arguments)) + "\n\n" + match[4]

    return TABLE.sub(table, VALUE.sub(value, text))


def problems(page: Path) -> list[str]:
    """What is wrong with the numbers of a page, one line each."""
    text, name = page.read_text(), page.relative_to(ROOT)
    found = []
    try:
        if written(text) != text:
            found.append(f"{name}: a value or a table is not that of its result file; run evidence.py --write")
    except ValueError as error:
        found.append(f"{name}: {error}")
    found += [
        f"{name}: a line begins with a mark of a value, which ends its paragraph: {line.strip()[:60]}"
        for line in text.splitlines()
        if line.lstrip().startswith("<!-- = ")
    ]
    for line, mark, block in blocks(TABLE.sub(" ", text)):
        numbers = measured(prose(block))
        if not numbers or mark.startswith("<!-- given"):
            continue
        if not mark:
            found.append(f"{name}:{line}: no mark says where {', '.join(one.text for one in numbers[:8])} come from")
            continue
        try:
            known, *slack = sections(FROM.fullmatch(mark)[1])  # type: ignore[index]
        except ValueError as error:
            found.append(f"{name}:{line}: {error}")
            continue
        missing = [one.text for one in numbers if not matches(one, known, *slack)]
        if missing:
            found.append(f"{name}:{line}: {', '.join(missing)} not in {FROM.fullmatch(mark)[1]}")  # type: ignore[index]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--run", nargs="*", metavar="STEP")
    parser.add_argument("--gpu", action="store_true", help="with --run: the steps of the GPU")
    parser.add_argument("--out", type=Path, help="with --run: the folder of the result files, for steps that take one")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    wrong: list[str] = []
    if options.list:
        for title, steps in (("make evidence", CPU), ("make evidence-gpu", GPU), ("by name", LONGER)):
            print(f"{title}: at most {sum(step.minutes for step in steps.values()):g} minutes")
            for name, step in steps.items():
                print(f"  {name:22s} {step.minutes:4g} min  python benchmarks/{step.command}")
    if options.run is not None:
        wrong += run(options.run or list(GPU if options.gpu else CPU), options.out)
    if options.write:
        for page in pages():
            text = page.read_text()
            if (new := written(text)) != text:
                page.write_text(new)
                print(page.relative_to(ROOT))
        draw()
    if options.check:
        found = [line for page in pages() for line in problems(page)]
        print("\n".join(found) or "every measured number is that of its result file")
        wrong += found
    if wrong:
        raise SystemExit("\n".join(wrong) if options.run is not None else 1)


if __name__ == "__main__":
    main()
