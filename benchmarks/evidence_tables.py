"""The tables, verdicts and figures of the documentation, made of the result files by benchmarks/evidence.py.

Pages name them in marks: `table NAME ARGUMENT …` is table_NAME(ARGUMENT, …), and `computed NAME/ARGUMENT/…` is
computed_NAME(ARGUMENT, …), a number or the words of a sentence. Where a section has no result yet, they say "not run".
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterator
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results"

#: Sections of compare.json: real data on two cores, then those of a GPU.
REAL = ("ml1m", "moby", "wikispeedia", "npm-deps")
ON_GPU = ("moby-gpu", "ml10m-synthetic", "wiki-simple-synthetic", "netflix-synthetic")
PAPER = ("ml1m", "ml10m", "netflix", "wiki-simple")  # the paper's data sets


def load(name: str) -> dict[str, Any]:
    """The content of a result file."""
    path = RESULTS / f"{name.removesuffix('.json')}.json"
    if not path.exists():
        raise ValueError(f"there is no result file {path.name}")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def at(name: str, path: str) -> Any:
    """The value at a path of a result file, or of a function computed_… if the file is "computed"."""
    if name == "computed":
        function, *arguments = path.split("/")
        return globals()[f"computed_{function}"](*arguments)
    found: Any = load(name)
    for key in path.split("/"):
        try:
            found = found[int(key)] if isinstance(found, list) else found[key]
        except (KeyError, IndexError, ValueError):
            raise ValueError(f"{name}: there is no {key!r} in {path}") from None
    if found is None:
        raise ValueError(f"{name}: {path} has no value")
    return found


_SCALES = {"ms": 1e3, "min": 1 / 60, "GB": 1e-9, "MB": 1e-6, "%": 100.0}


def shown(value: float | str, form: str) -> str:
    """A number as a FORMAT says: ".3f", ".2f ms", ".0f %", ","; words as they are."""
    if isinstance(value, str):
        return value
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
    return re.sub(r"(.+)-gpu", r"\1 on a GPU", re.sub(r"(.+)-synthetic", r"SYNTHETIC \1", section))


def _metric(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def table_compare(section: str) -> list[list[str]]:
    """The outcome of each method of a comparison, the lowest objective first."""
    found = load("compare").get(section)
    if found is None:
        return [["result"], [f"not run: `compare.json` has no section {section}"]]
    levels = ("1", "0.5", "0.1", "0.01")
    rows = [["method", "lowest L", "(L − L*)/L*", "paper MAP@5", "iterations", "data passes",
             *(f"seconds to {level}" for level in levels)]]  # fmt: skip
    methods = {name: one for name, one in found["methods"].items() if "lowest" in one}
    for name, one in sorted(methods.items(), key=lambda item: item[1]["lowest"]):
        rows.append([
            name + ("" if one["status"] == "finished" else f" ({one['status']})"), f"{one['lowest']:,.0f}",
            f"{one['relative_difference']:.2f}", _metric(one["best_metric"]),
            f"{one['iterations']:,}", _short(one["data_passes"]),
            *(_short(one["seconds_to"].get(level)) for level in levels),
        ])  # fmt: skip
    others = (f"{name}: {one['status']}" for name, one in found["methods"].items() if name not in methods)
    return rows + [[text, *[""] * (len(rows[0]) - 1)] for text in others]


def _lowest(found: dict[str, Any]) -> dict[str, float]:
    """The lowest objective of each method that ran, the best first."""
    ran = {name: one["lowest"] for name, one in found["methods"].items() if "lowest" in one}
    return dict(sorted(ran.items(), key=lambda item: item[1]))


def _best_lists(found: dict[str, Any]) -> dict[str, float]:
    """The best paper MAP@5 of each method, the best first."""
    metric = {name: one["best_metric"] for name, one in found["methods"].items() if one.get("best_metric") is not None}
    return dict(sorted(metric.items(), key=lambda item: -item[1]))


def _swapped(found: dict[str, Any]) -> tuple[int, int]:
    """How many pairs of methods are in another order by paper MAP@5 than by objective, of how many."""
    value, metric = _lowest(found), _best_lists(found)
    pairs = list(combinations([name for name in value if name in metric], 2))
    return sum(metric[a] < metric[b] for a, b in pairs), len(pairs)


def _claims(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Each finding of the paper, and whether it holds in a comparison, by the lowest objective of each method."""
    value, metric = _lowest(found), _best_lists(found)

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

    best, first = next(iter(metric), ""), next(iter(value), "")
    swapped, pairs = _swapped(found)
    return [
        ("newton before gd-diag", order("newton", "gd-diag")),
        ("newton and the -diag methods before gd, sogram and sampling",
         both(*(order(a, b) for a in ("newton", "gd-diag", "sogram-diag", "sampling-diag")
                for b in ("gd", "sogram", "sampling")))),
        ("gd-diag before gd", order("gd-diag", "gd")),
        ("each -diag before its plain twin", both(*(order(f"{name}-diag", name) for name in ("sogram", "sampling")))),
        ("gd before sogram and sampling", both(order("gd", "sogram"), order("gd", "sampling"))),
        ("gd-diag before sogram-diag and sampling-diag",
         both(order("gd-diag", "sogram-diag"), order("gd-diag", "sampling-diag"))),
        ("the lowest objective has the best paper MAP@5",
         "holds" if best == first else f"does not: {best} has the best list"),
        ("methods are ordered by paper MAP@5 as by objective",
         "holds" if not swapped else f"does not, for {swapped} of {pairs} pairs"),
    ]  # fmt: skip


def table_findings(*names: str) -> list[list[str]]:
    """The findings of the paper by data set."""
    compared = load("compare")
    columns = {name: dict(_claims(compared[name])) for name in names if name in compared}
    claims = next(iter(columns.values()), {"the paper's findings": ""})
    rows = [["the paper says", *map(_titled, names)]]
    return rows + [[claim, *(columns.get(name, {}).get(claim, "not run") for name in names)] for claim in claims]


def table_lead(*names: str) -> list[list[str]]:
    """Which method is first within a tenth of the lowest objective, and by how much, by data set."""
    rows = [["", "seconds each", "first within 0.1", "next", "best of the paper's seven at the end"]]
    for name in names:
        found = load("compare").get(name)
        if found is None:
            rows.append([_titled(name), "not run", "", "", ""])
            continue
        first, methods = found["first"]["0.1"], found["methods"]
        others = {key: one for key, one in methods.items() if key != "newton-kron" and "lowest" in one}
        best = min(others, key=lambda key: others[key]["lowest"])
        lead = "no other" if first["next"] is None else f"{first['next']}, {_short(first['times'])} times later"
        if first["next"] is None and (first["times"] or 0) > 1:
            lead += f"; at least {_short(first['times'])} times"
        limits = found["settings"].get("limits", found["settings"])
        rows.append([
            _titled(name), f"{limits['time_limit']:g}", f"{first['method']}, {_short(first['seconds'])} s", lead,
            f"{best}, {others[best]['relative_difference']:.2f} above",
        ])  # fmt: skip
    return rows


def table_precision() -> list[list[str]]:
    """Where newton and newton-kron end with each precision of products on a GPU."""
    found = load("compare").get("precision-gpu")
    rows = [["method, start", "objective at the start", "float32", "tf32", "tf32 over float32"]]
    if found is None:
        return [*rows, ["newton, newton-kron", "not run", "", "", ""]]
    for (method, seed), runs in _precisions(found).items():
        ends = [f"{one['value']:,.0f}, {_stopped(one)} {one['iterations']:,} iterations" for one in runs]
        ratio = f"{runs[1]['value'] / runs[0]['value']:.3f}"
        rows.append([f"{method}, {seed}", f"{runs[0]['start']:,.0f}", *ends, ratio])
    return rows


def _precisions(found: dict[str, Any]) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """The runs with float32 and with tf32 by method and start."""
    pairs: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for one in sorted(found["runs"], key=lambda run: run["precision"]):
        pairs.setdefault((one["method"], one["seed"]), []).append(one)
    return pairs


def _stopped(run: dict[str, Any]) -> str:
    return "still falling after" if run["stopped"] == "TIME_LIMIT" else "stopped by itself after"


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
    """Seconds of a fit with and without selection at 100 M pairs, on each device that it was run on."""
    rows = [["fit of 100 M pairs", "seconds", "embedding penalty", "points tried"]]
    for device, text in (("cpu", "two cores"), ("cuda", "one H200")):
        if found := load("scale").get(f"selection-100M-{device}"):
            for title, name in (("`TwoTower(select=False)`", "rules"), ("`TwoTower()`", "default")):
                seconds, one = statistics.median(found["seconds"][name]), found[name]
                cells = (f"{seconds:.1f}", f"{one['embedding_l2']:.3g}", str(len(one["tried"])))
                rows.append([f"{title}, {text}", *cells])
    return rows


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


def _bounded(
    claim: str, bound: float, values: list[float], form: str, seconds: float | None = None, least: bool = False
) -> list[str]:
    """A row of a claim, its bound and what was measured, in how many seconds; bold where it misses the bound."""
    missed = [value < bound if least else value > bound for value in values]
    cells = [f"**{value:{form}}**" if bad else f"{value:{form}}" for value, bad in zip(values, missed, strict=True)]
    return [
        claim,
        f"{'≥' if least else '≤'} {bound:g}",
        ", ".join(cells) + ("" if seconds is None else f" ({seconds:.1f} s)"),
    ]


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


def table_modules() -> list[list[str]]:
    """Times of custom modules over those of mlp_towers."""
    found = load("engine")["modules-small-cpu"]["variants"]
    names = [name for name in found if name != "mlp_towers"]
    rows = ("outer iteration", "G·d", "gradient", "preconditioner", "M·r")
    return [["", *names], *([row, *(f"{found[name][row]['ratio']:.2f}" for name in names)] for row in rows)]


def table_derivatives() -> list[list[str]]:
    """Forward mode and linearize over double backward: counts and times of products."""
    found = load("engine")["derivatives-small-cpu"]["variants"]
    titles = {"multiply-adds": "multiply-adds", "operations": "operations", "elements": "elements",
              "seconds": "time of a product", "seconds of the first": "time of a point's first product"}  # fmt: skip
    return [
        ["over double backward", *found],
        *(
            [f"{way}: {title}", *(f"{one[way]['ratios'][what]:.2f}" for one in found.values())]
            for way in ("forward mode", "linearize")
            for what, title in titles.items()
        ),
    ]


def table_complexity() -> list[list[str]]:
    """Exponents of growth: measured and, in brackets, those of the paper's table and of the operations of the code."""
    found = load("complexity")
    methods = {"naive": "naive", "gradient": "gradient", "blocks": "Û × V̂", "subsets": "eq:trans"}
    axes = {"m": "m (table, operations of the code)", "n": "n", "observed": r"\|O\|", "ratio": "ρ"}

    def power(value: float) -> str:
        return f"{value:.2f}".replace("-0.00", "0.00").replace("-", "−")

    rows = [["growth with", *methods.values()]]
    for axis, title in axes.items():
        powers = [list(map(power, found["growth"][axis][method])) for method in methods]
        rows.append([title, *(f"{own} ({table}, {code})" for own, table, code in powers)])
    spans = [found["over_counted"][method] for method in methods]
    return [*rows, ["measured time over operations of the code", *(f"{low:.1f} to {high:.1f}" for low, high in spans)]]


#: Predictions of one G·d: entities and pairs, widths of the measured shapes, numbers of shared layers.
_PREDICTED = {
    "netflix, 480 k × 18 k, 51 M pairs": (478_251, 17_768, 51_228_351),
    "10 M × 1 M, 300 M pairs": (10_000_000, 1_000_000, 300_000_000),
    "100 M × 10 M, 10 G pairs": (100_000_000, 10_000_000, 10_000_000_000),
}
_DIM, _SHARED = 128, 200_000


def _unit_costs() -> tuple[float, float]:
    """Seconds for a pair and for an entity of one G·d on one GPU, from two shapes."""
    rows = []
    for name in ("ml10m", "netflix"):
        found = load("gpu")[f"{name}-tf32"][name]
        m, n, pairs = found["shape"]
        rows.append((pairs, m + n, found["product"] / 1e3))
    (p, e, t), (q, f, u) = rows
    determinant = p * f - q * e
    return (t * f - u * e) / determinant, (p * u - q * t) / determinant


def computed_pair() -> float:
    """Nanoseconds for a pair of one G·d on one GPU."""
    return _unit_costs()[0] * 1e9


def computed_row() -> float:
    """Nanoseconds for an entity of one G·d on one GPU."""
    return _unit_costs()[1] * 1e9


def _sent(n: int, processes: int) -> float:
    """Bytes that a process sends or receives for one G·d."""
    share = (processes - 1) / processes
    return 2 * n * share * _DIM * 4 + 2 * share * (16 * _DIM**2 + _SHARED * 4)


def table_predicted(inside: str = "200", between: str = "40", latency: str = "50") -> list[list[str]]:
    """Predicted G·d and its collectives: GB/s of a GPU within a host of eight and between hosts, µs of a collective."""
    pair, row = _unit_costs()
    rows = [["GPUs", *(f"{name}: {what}" for name in _PREDICTED for what in ("one G·d", "collectives"))]]
    for processes in (1, 2, 4, 8, 16, 32, 64):
        cells = [str(processes)]
        for m, n, pairs in _PREDICTED.values():
            rate = float(inside if processes <= 8 else between) * 1e9
            travel = _sent(n, processes) / rate + 3e-6 * float(latency) if processes > 1 else 0.0
            total = (pair * pairs + row * (m + n)) / processes + travel
            cells += [f"{1e3 * total:,.1f} ms", f"{1e3 * travel:,.1f} ms" if processes > 1 else ""]
        rows.append(cells)
    return rows


def table_lists() -> list[list[str]]:
    """Lists, updates, start-up and fits on two cores."""
    lists, updates, fits = load("lists")["cpu"], load("fit")["updates"], load("fit")["cpu"]["sets"]
    startup, sizes = load("fit")["startup"]["fit"], lists["sizes"]
    wall, ratio = lists["seconds"]["wall"], lists["ratios"]["wall"]
    updated = [one["2 iterations"] for name, one in updates.items() if name != "environment"]
    gowalla, small = fits["gowalla"], fits["small"]
    made = f"{sizes['left']:,} lists of {sizes['k']} among {sizes['right']:,} entities, dimension {sizes['dim']}"
    after = "MAP@5 after ten updates of two iterations over that of a full fit: generated pairs, ml1m in two orders"
    fitted = f"{gowalla['warm']:.1f} s, training {gowalla['training']:.1f} s, Recall@20 {gowalla['recall@20']:.3f}"
    return [
        ["claim", "bound", "measured"],
        _bounded(f"`bench_lists.py`: {made}, over only the products", 1.3, [ratio["lists"]], ".2f", wall["lists"]),
        _bounded("the same, written to a Parquet file", 1.3, [ratio["file"]], ".2f", wall["file"]),
        ["the same, memory beyond the model", "", f"{lists['extra_bytes'] / 1e6:.0f} MB"],
        _bounded(f"`bench_updates.py`: {after}", 0.99, [one["map@5 ratio"] for one in updated], ".3f", least=True),
        _bounded("the same, time of an update over a full fit", 0.1, [one["time ratio"] for one in updated], ".3f"),
        _bounded("`bench_startup.py`: seconds of a fit of 10,000 pairs", 0.3, [startup["warm"]["wall"]], ".2f"),
        ["the same, the first fit of a new process", "", f"{startup['next processes']['wall']:.2f} s"],
        _bounded("`bench_fit.py`: seconds of a warm fit of 10,000 pairs by default", 0.3, [small["warm"]], ".2f"),
        [f"the same, gowalla: dimension {gowalla['dim']}, {gowalla['iterations']} iterations", "", fitted],
    ]


def table_reading() -> list[list[str]]:
    """Reading, evaluation, loading and memory."""
    read, fits, lists = load("reading")["csv"], load("fit"), load("lists")
    times, memory = lists["evaluation-time"], fits["memory"]
    spent = sorted(one["seconds"] for one in read["runs"]["gramtower"])[1]
    rows = f"{read['rows'] / 1e6:.0f} million rows with string ids"
    scored = "recall@20 and ndcg@20 at the gowalla shape over the score products, in rows or in tiles"
    extra, peaks = lists["evaluation-memory"]["extra_bytes"] / 1e6, [one["ratio"] for one in memory["runs"]]
    loaded = "seconds of `gramtower.load`, a model with 100,000 entities, the same lists after it"
    given = "linear towers with the smallest one accepted and half as much again, then hidden ones"
    return [
        ["claim", "bound", "measured"],
        _bounded(f"`bench_reading.py`: {rows}, time over polars", 1.5, [read["ratios"]["seconds"]], ".2f", spent),
        _bounded("the same, memory", 2.5, [read["ratios"]["bytes"]], ".2f"),
        _bounded(
            f"`bench_evaluation.py`: {scored}", 1.3, [times["ratios"]["floor"]], ".2f", times["seconds"]["evaluation"]
        ),
        _bounded("the same, MB beyond embeddings and pairs", 500, [extra], ".0f"),
        _bounded(f"`bench_startup.py --load`: {loaded}", 0.5, [fits["loading"]["tables"]["seconds"]], ".2f"),
        _bounded(f"`bench_memory.py`: peak of training over the memory budget; {given}", 1.0, peaks, ".2f"),
        _bounded("the same, resident memory after ten fits over that after three", 1.05,
                 [memory["fits"]["growth"]], ".2f"),
    ]  # fmt: skip


def table_als() -> list[list[str]]:
    """newton-kron against implicit's ALS."""
    rows = [["", "ALS", "newton-kron", "ratio"]]
    found = {name.removeprefix("als-"): one for name, one in load("solvers").items() if name.startswith("als-")}
    for name, one in found.items():
        rounds = one["rounds"]
        spans = {key: [found[key] for found in rounds] for key in ("als_s", "newton_kron_s", "iterations", "ratio")}
        ends = {key: f"{_short(min(values))} to {_short(max(values))}" for key, values in spans.items()}
        rows.append([
            f"{name}, {one['shape'][2]:,} pairs", f"{ends['als_s']} s",
            f"{ends['newton_kron_s']} s, {max(spans['iterations'])} iterations",
            f"{ends['ratio']} in {len(rounds)} rounds, median {_short(one['median_ratio'])}",
        ])  # fmt: skip
    return rows


def table_solvers(device: str, *methods: str) -> list[list[str]]:
    """Seconds of methods on linear towers over ids to each relative difference, and the lead of the default."""
    rows = [["", *methods, "lead of the default"]]
    for name, one in load("solvers")[device]["problems"].items():
        data, _, dim = name.partition("-")
        if not dim.isdigit():  # a problem with features
            continue
        spent, ratio = one["summary"]["seconds_to"], one["summary"]["ratio"].values()
        cells = [
            " / ".join(_short(s) or "–" for s in spent[method].values()) if method in spent else ""
            for method in methods
        ]
        leads = (f"{'' if lead['rival'] else '≥ '}{1 / lead['ratio']:.3g}" for lead in ratio)
        rows.append([f"{data}, {dim}", *cells, " / ".join(leads)])
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
    """The rows of sections cuda and peers-cuda of selection.json by set of ids or features, and by split."""
    found: dict[str, dict[int, dict[str, list[float]]]] = {}
    for section in ("cuda", "peers-cuda"):
        for name, one in load("selection").get(section, {}).get("sets", {}).items():
            data, _, split = name.rpartition(" split ")
            if data.endswith("+features") == (kind == "features"):
                rows = found.setdefault(data.removesuffix("+features"), {}).setdefault(int(split), {})
                rows |= {row: result["metrics"] for row, result in one["rows"].items()}
    return dict(sorted(found.items()))


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


def table_selection_cost() -> list[list[str]]:
    """Seconds of a fit by rules and of the default with its search, on a machine with no other work."""
    rows = [["set", "machine", "by rules", "default", "ratio"]]
    for section, text in (("cpu", "two cores"), ("price-cuda", "one H200")):
        for name, one in load("selection").get(section, {}).get("sets", {}).items():
            rules, default = (one["rows"][row]["seconds"] for row in ("by rules", "default"))
            seconds = (f"{_short(rules)} s", f"{_short(default)} s")
            rows.append([name.rpartition(" split ")[0].replace("+", " + "), text, *seconds, f"{default / rules:.1f}"])
    return rows


def table_peers(kind: str) -> list[list[str]]:
    """The default on the first split against the best of each other method on its test part.

    Of random settings also the best on one half of the test entities, measured on the other half. Shares are the
    default over random settings, by each metric.
    """
    peers = ("popularity", "EASE", "ALS", "softmax") if kind == "ids" else ("popularity", "softmax")
    rows = [[_METRICS[kind], "default", *peers, "random settings", "share", "chosen on one half", "share"]]
    for data, splits in _selected(kind).items():
        first = splits.get(0, {})
        drawn = next((row for row in first if row.endswith("random settings on the test part")), None)
        if drawn is None or "default" not in first:
            continue
        found = [next((first[row] for row in first if row.startswith(peer)), None) for peer in peers]
        best, count = first[drawn], drawn.split()[2]
        halves = next((first[row] for row in first if row.endswith("measured on the other")), None)
        shares = [
            "–" if of is None else _joined([a / b for a, b in zip(first["default"], of, strict=True)])
            for of in (best, halves)
        ]
        cells = [f"{_joined(best)} ({count})", shares[0], _joined(halves), shares[1]]
        rows.append([data, *map(_joined, (first["default"], *found)), *cells])
    return rows


def table_softmax_trials() -> list[list[str]]:
    """The default against the best of 30 trials of a softmax on the test part, on each split that has these."""
    rows = [["split", "default: MAP@5 / Recall@20", "softmax, best of 30 trials on the test part"]]
    for data, splits in _selected("features").items():
        for split, found in sorted(splits.items()):
            if best := found.get("softmax, best of 30 on the test part"):
                rows.append([f"{data} {split}", *(_joined(one) for one in (found["default"], best))])
    return rows


def _relative(section: str, kind: str) -> dict[str, dict[str, list[float]]]:
    """By set and row: the default's metrics, and those of each other row relative to them, means over the splits."""
    parts: dict[str, list[dict[str, list[float]]]] = {}
    for name, one in load("selection")[section]["sets"].items():
        data = name.rpartition(" split ")[0]
        if data.endswith("+features") == (kind == "features"):
            found = {row: result["metrics"] for row, result in one["rows"].items()}
            default = found.pop("default")
            ratios = {row: [a / b for a, b in zip(of, default, strict=True)] for row, of in found.items()}
            parts.setdefault(data.removesuffix("+features"), []).append({"default": default} | ratios)
    return {
        data: {
            row: [statistics.fmean(column) for column in zip(*(one[row] for one in splits if row in one), strict=True)]
            for row in dict.fromkeys(row for one in splits for row in one)
        }
        for data, splits in sorted(parts.items())
    }


def table_relative(section: str, kind: str) -> list[list[str]]:
    """The default, and relative to it what --without or --simpler changes, by set."""
    sets = _relative(section, kind)
    names = list(dict.fromkeys(row for rows in sets.values() for row in rows))
    return [
        [_METRICS[kind], *names],
        *([data, *(_joined(rows.get(name)) for name in names)] for data, rows in sets.items()),
    ]


def table_one_set_out(section: str, kind: str) -> list[list[str]]:
    """What the default gains over each change of --without or --simpler, and whether one set decides that.

    The gain on a set is the mean over its metrics. A choice that all sets but one support must not lose on that one.
    """
    sets = _relative(section, kind)
    gains: dict[str, dict[str, float]] = {}
    for data, rows in sets.items():
        for row, ratios in rows.items():
            if row != "default":
                gains.setdefault(row, {})[data] = 1 / statistics.fmean(ratios) - 1
    shown = [["the default over", "sets", "it differs on", "mean gain", "least mean without one set", "largest loss"]]
    for row, found in gains.items():
        values, worst = list(found.values()), min(found, key=lambda data: found[data])
        parts = [[gain for name, gain in found.items() if name != data] for data in found]
        others = [statistics.fmean(part) for part in parts if part]
        loss = f"{_signed(found[worst])} on {worst}" if found[worst] < -5e-4 else "none"
        differs = sum(abs(gain) > 1e-9 for gain in values)
        means = (_signed(statistics.fmean(values)), _signed(min(others, default=math.nan)))
        shown.append([row, str(len(values)), str(differs), *means, loss])
    return shown


def _signed(share: float) -> str:
    return "–" if math.isnan(share) else f"{share:+.1%}".replace("-", "−")


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
    for section in ("cuda", "peers-cuda"):
        for name, one in load("selection").get(section, {}).get("sets", {}).items():
            if one.get("metrics", ["recall@20", "ndcg@20"])[-1] != "ndcg@20" or "+features" in name:
                continue
            for row, result in one["rows"].items():
                if not row.endswith("measured on the other"):
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


def computed_level(model: str, metric: str) -> str:
    """Whether the default is level with a model of models-ml1m by a metric, within 1%, or ahead of it, or behind."""
    models = load("compare")["models-ml1m"]["models"]
    ours, theirs = (models[name]["metrics"][metric]["mean"] for name in ("gramtower-linear", model))
    return "level with" if abs(ours / theirs - 1) < 0.01 else "ahead of" if ours > theirs else "behind"


def computed_accuracy() -> float:
    """The largest relative error of value, gradient and product in float64."""
    return max(load("engine")["accuracy"]["worst_relative_error"]["float64"].values())


def computed_forward(what: str) -> str:
    """How much more of something forward mode needs than double backward, over the modules that were tried."""
    found = load("engine")["derivatives-small-cpu"]["variants"].values()
    ratios = [one["forward mode"]["ratios"][what] for one in found]
    return f"{min(ratios):.2f} to {max(ratios):.2f} times"


def computed_apart(towers: str, what: str) -> float:
    """How far runs in 1, 2 and 4 processes differ in an objective, as a share of it, or in a metric."""
    found = load("scale")["distributed-same"]["found"]
    name = next(name for name in found["1"] if name.startswith(towers))
    values = [found[processes][name][what] for processes in ("1", "2", "4")]
    return (max(values) - min(values)) / (values[0] if what == "objective" else 1.0)


def computed_lead(section: str) -> str:
    """When newton-kron is within a tenth of the lowest objective, and how much sooner than the paper's methods."""
    first = load("compare")[section]["first"]["0.1"]
    seconds = f"{first['seconds']:.0f} s"
    if first["method"] != "newton-kron":
        return f"{first['method']} is within a tenth of the lowest objective first, after {seconds}"
    text = f"it is within a tenth of the lowest objective after {seconds}"
    if first["next"] is not None:
        return f"{text}, {first['times']:.0f} times sooner than the next, {first['next']}"
    if first["times"] is None:
        return f"{text}, where none of the paper's seven methods comes in its time"
    return f"{text}, at least {first['times']:.0f} times sooner than any of the paper's seven methods"


def _listed(names: list[str]) -> str:
    """Names in a sentence."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def computed_order(one: str, other: str, where: str = "all") -> str:
    """Where (real, gpu or all sections) a method is ahead of another by the lowest objective, and where behind."""
    compared, groups = load("compare"), dict[str, list[str]]()
    for name in {"real": REAL, "gpu": ON_GPU, "all": REAL + ON_GPU}[where]:
        value = _lowest(compared[name]) if name in compared else {}
        known = one in value and other in value
        place = ("ahead" if value[one] < value[other] else "behind") if known else "not run"
        groups.setdefault(place, []).append(_titled(name))
    said = [f"ahead of {other} on {_listed(groups['ahead'])}"] if "ahead" in groups else []
    if "behind" in groups:
        said.append(f"behind {'it' if said else other} on {_listed(groups['behind'])}")
    text = " and ".join(said) or f"not compared with {other}"
    return text + (f" (not run: {_listed(groups['not run'])})" if "not run" in groups else "")


def computed_lists(section: str) -> str:
    """Whether the lowest objective has the best lists, as a sentence without its end."""
    found = load("compare")[section]
    value, metric = _lowest(found), _best_lists(found)
    first, best = next(iter(value)), next(iter(metric))
    swapped, pairs = _swapped(found)
    if best == first:
        text = f"{first} has the lowest objective and the best paper MAP@5, {metric[best]:.3f}"
    else:
        above = found["methods"][best]["relative_difference"]
        text = (
            f"{best} has the best paper MAP@5, {metric[best]:.3f}, at an objective {above:.2f} above the lowest, "
            f"where {first} has {metric[first]:.3f}"
        )
    return f"{text}; by both, the order differs for {swapped or 'none'} of {pairs} pairs of methods"


def computed_falls(section: str, method: str = "newton-kron") -> str:
    """Whether the paper's MAP@5 of a method is best at its end."""
    one = load("compare")[section]["methods"][method]
    best, last = one["best_metric"], one["last_metric"]
    fell = last < 0.99 * best
    return f"falls again, from {best:.3f} to {last:.3f}" if fell else f"is best at the end, {last:.3f}"


def computed_real() -> str:
    """Which of the paper's data sets were run on their real data."""
    compared = load("compare")
    groups = dict[str, list[str]]()
    for name in PAPER:
        real = name in compared and not compared[name].get("synthetic")
        kind = "real" if real else "generated" if f"{name}-synthetic" in compared else "missing"
        groups.setdefault(kind, []).append(name)
    said = [f"{_listed(groups.get('real', ['none']))} ran on real data"]
    if "generated" in groups:
        said.append(f"{_listed(groups['generated'])} only on generated pairs of the same shape")
    if "missing" in groups:
        said.append(f"{_listed(groups['missing'])} not at all")
    return ", ".join(said)


def computed_stalls() -> str:
    """Whether newton gets less far with tf32 than with float32 on a GPU, and newton-kron, as a sentence."""
    found = load("compare").get("precision-gpu")
    if found is None:
        return "This was not run on a GPU yet."
    said = []
    for method in ("newton", "newton-kron"):
        runs = [pair for (name, _), pair in _precisions(found).items() if name == method]
        ratios = [tf32["value"] / float32["value"] for float32, tf32 in runs]
        alone = sum(tf32["stopped"] != "TIME_LIMIT" for _, tf32 in runs)
        verdict = "stalls" if min(ratios) > 1.02 else "does not stall" if max(ratios) < 1.02 else "stalls in some runs"
        said.append(
            f"{method} {verdict} with tf32: it ends {min(ratios):.3f} to {max(ratios):.3f} times as high as with "
            f"float32, and {alone} of {len(runs)} runs stopped by themselves"
        )
    return "; ".join(said) + "."


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


def draw(folder: Path) -> None:
    """All figures that are made of result files."""
    draw_lists(folder / "lists.png")
    for section in ("ml1m", "ml10m-synthetic"):
        draw_comparison(section, folder / f"{section}.png")


def markdown(rows: list[list[str]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])
