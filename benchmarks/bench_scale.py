"""How far one machine goes: set-up, a Gauss-Newton product, iterations of newton-kron, and memory against its plan.

    python benchmarks/bench_scale.py --size 10Mx1M [--memory-budget 40GB]       one GPU
    python benchmarks/bench_scale.py --size 2Mx200k --device cpu --dim 64       two cores and 24 GB
    python benchmarks/bench_scale.py --size 2Mx200k --columns                   ways to pass over columns, on a GPU
    python benchmarks/bench_scale.py --fit 40Mx10k 69Mx59M                      two large fits, one GPU, 5 minutes
    python benchmarks/bench_scale.py --selection                                the price of selection, 3 minutes

Linear towers over ids. Pairs are random with skewed counts, made on the device. Printed are the seconds of every step
of the set-up (problem: the pairs' checks on the host; towers: first weights, and their copy to the device; orders: by
rows and by columns; the first value and gradient), then medians of a value, a gradient, a G·d and a preconditioner,
then the iterations of a training run by secant steps (with the pairs that the budget has room for; the first five
iterations remember none) and by conjugate gradient. After each, the peak of the memory since the one before: of a GPU
what torch allocated, of a CPU the growth of the resident set over what pairs and towers take, which is what a budget
bounds there. The last lines hold the peaks of training against the plan.

Bounds (one H200, 10Mx1M): set-up without the problem's checks <= 10 s, G·d <= 0.15 s, training <= 60 GB; with
--memory-budget 40GB at most twice the time. 2Mx200k: G·d <= 36 ms. Writes
the section <size>-<device> of benchmarks/results/scale.json.

--columns times one pass over columns (right_sum) in each of the orders of engine/kernels/layout.py, with the lines of
their partial results, and the pass over rows.

--fit makes pairs on the host with skewed counts and planted groups, and trains towers for some iterations by the
objective of TwoTower over ids; each size runs in a process of its own and writes the section fit-<size>-<device> when
it ends. Reported are seconds for each iteration (the median without the first two), the objective, the peaks of the
GPU's memory (by tensors, and with what the allocator holds) and of the host's (resident set). --shrink 1000 divides
entities and pairs, for a test of the script on a CPU. Of the GPU's memory, each pair takes 16 bytes for its place in
both orders and its weight, and 12 for slope, curvature and product; θ takes 4 dim (m + n), as do four more vectors
while conjugate gradient solves; a right entity takes 8 dim more; an entity takes 30 to 160.

    size                  pairs      θ         plan     fits the budget
    40 M x 10 k, dim 64   14 GB     10.2 GB    67 GB    all resident, and a secant pair (2θ) from 90 GB on
    69 M x 59 M, dim 32   13 GB     16.4 GB   115 GB    all resident, without a secant pair below 135 GB: then one
                                                        side moves at a time, with four vectors of θ's size at most

Nothing is streamed with the budgets of FITS; --memory-budget 60GB streams the left rows of the first one, and 110GB
those of the second one, which cannot do with less than 99 GB. Both have tables of more than 2³¹ numbers. On the host
there are 12 bytes for a pair, twice while they are checked, and θ: about 20 and 30 GB.

--selection fits 100 M pairs of 2 M x 200 k entities by `TwoTower()` and by `TwoTower(select=False)`, in turn, after
small fits that compile the kernels. Bound: 1.3 times the time.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from common import grouped_pairs, random_pairs, write_result

import gramtower as gt
from gramtower.data.pairs import Pairs
from gramtower.engine.kernels import layout, select

SIZES = {
    "tiny": (20_000, 2_000, 300_000),
    "200kx20k": (200_000, 20_000, 10_000_000),
    "2Mx200k": (2_000_000, 200_000, 100_000_000),
    "10Mx1M": (10_000_000, 1_000_000, 300_000_000),
}
# left and right entities, pairs, dimension, memory budget
FITS = {
    "tiny": (20_000, 2_000, 300_000, 16, None),
    "40Mx10k": (40_000_000, 10_000, 500_000_000, 64, "100GB"),
    "69Mx59M": (69_000_000, 59_000_000, 477_000_000, 32, "125GB"),
}
# what TwoTower minimises over ids before it selects, with ω = 2 |O| / (m n)
OBJECTIVE = {"imputed": -0.5, "l2": 2.0**-5, "embedding_l2": 0.01, "right_weights": "degree^0.1"}


class Meter:
    """Seconds and peaks of memory, step by step.

    Attributes:
        steps: by name, in order.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.steps = device, dict[str, dict[str, float]]()
        self.base = 0  # of the resident set of a CPU, before anything that a budget counts
        self.most = 0  # of the resident set, whatever is in it

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Time a step and watch the memory during it."""
        self._reset()
        start = time.perf_counter()
        yield
        self._wait()
        seconds, peak = time.perf_counter() - start, self._peak()
        self.steps[name] = {"seconds": seconds, "peak_bytes": peak}
        print(f"  {name:34s} {seconds:9.3f} s   peak {peak / 1e9:7.2f} GB", flush=True)

    def medians(self, name: str, function: Callable[[], Any], repeats: int) -> None:
        """The median of some calls after a first one, and the peak over all of them."""
        self._reset()
        times = []
        for _ in range(repeats + 1):
            start = time.perf_counter()
            function()
            self._wait()
            times.append(time.perf_counter() - start)
        seconds, peak = statistics.median(times[1:]), self._peak()
        self.steps[name] = {"seconds": seconds, "first_seconds": times[0], "peak_bytes": peak}
        print(f"  {name:34s} {1e3 * seconds:9.2f} ms  peak {peak / 1e9:7.2f} GB", flush=True)

    def rebase(self) -> None:
        """What is resident now does not count."""
        gc.collect()
        self.base = _status("VmRSS") if self.device.type == "cpu" else 0

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _reset(self) -> None:
        gc.collect()
        self._wait()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")

    def _peak(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated()
        resident = _status("VmHWM")
        self.most = max(self.most, resident)
        return max(0, resident - self.base)


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    m, n, count = SIZES[arguments.size]
    device = torch.device(arguments.device)
    meter = Meter(device)
    print(f"{arguments.size}: {m:,} x {n:,}, {count:,} pairs, dimension {arguments.dim}, on {device}", flush=True)
    with meter.step("kernels, compiled"):
        small = gt.Problem(random_pairs(3000, 2000, 60_000, device), precision=arguments.precision)
        small.graphs = False
        gt.minimize(small, gt.mlp_towers(small, (), arguments.dim).to(device), max_iterations=2)
        del small
    with meter.step("pairs"):
        pairs = random_pairs(m, n, count, device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    options = {"precision": arguments.precision, "pair_precision": arguments.pair_precision}
    with meter.step("problem"):
        problem = gt.Problem(pairs, omega=2.0**-8, l2=1.0, memory_budget=arguments.memory_budget, **options)
    del pairs
    with meter.step("towers, drawn"):
        towers = gt.mlp_towers(problem, (), arguments.dim)
    with meter.step("towers, to the device"):
        towers = towers.to(device)
    meter.rebase()
    with meter.step("plan"):
        plan = problem.plan(towers)
    print(f"  {plan!r}", flush=True)
    if plan.streamed is None:
        with meter.step("pairs, to the device"):
            resident = problem.resident_pairs(towers)
        for name, order in _orders(device).items():
            with meter.step(name):
                order(resident.pairs)
        del resident
    with meter.step("first value"):
        _ = problem.at(towers).value
    with meter.step("first gradient"):
        problem.at(towers).gradient()
    parts(problem, towers, meter, arguments.repeats)
    counted = ("towers, drawn", "towers, to the device", "plan", "pairs, to the device", "order by rows",
               "order by columns", "first value", "first gradient")  # fmt: skip
    setup = sum(meter.steps[name]["seconds"] for name in counted if name in meter.steps)
    print(f"  set-up {setup:.2f} s, and {meter.steps['problem']['seconds']:.2f} s for the problem's checks", flush=True)
    result = {
        "size": [m, n, count], "dim": arguments.dim, "device": str(device), "memory_budget": arguments.memory_budget,
        "plan": repr(plan), "planned_bytes": plan.bytes, "setup_seconds": setup, **options,
    }  # fmt: skip
    ways = {"both": (True, False), "secant": (True,), "cg": (False,)}[arguments.by]
    result["training"] = [train(problem, towers, meter, arguments.iterations, secant) for secant in ways]
    if device.type == "cpu":
        result["most_resident_bytes"] = meter.most
    return result | {"steps": meter.steps}


def _orders(device: torch.device) -> dict[str, Callable[[Any], Any]]:
    if device.type == "cuda":
        return {"order by rows": layout.left_order, "order by columns": layout.right_order}
    return {
        "order by rows": lambda pairs: pairs.segments,
        "order by columns": lambda pairs: pairs.by_column.segments,
    }


def parts(problem: gt.Problem, towers: gt.Towers, meter: Meter, repeats: int) -> None:
    """Medians of what an iteration is made of."""
    meter.medians("value", lambda: problem.at(towers).value, repeats)
    point = problem.at(towers)
    g = point.gradient()
    meter.medians("gradient", point.gradient, repeats)
    G, out = point.gauss_newton(), g.empty()
    meter.medians("G·d", lambda: G.product(g, out), repeats)
    meter.medians("preconditioner", point.preconditioner, repeats)
    M = point.preconditioner()
    meter.medians("preconditioner applied", lambda: M.product(g, out), repeats)


def train(problem: gt.Problem, towers: gt.Towers, meter: Meter, iterations: int, secant: bool) -> dict[str, Any]:
    """Some iterations of newton-kron from where the towers are; they move on."""
    name = "secant steps" if secant else "conjugate gradient"
    options = {} if secant else {"memory": 0}
    with meter.step(f"training by {name}"):
        ran = gt.minimize(problem, towers, max_iterations=iterations, **options)
    seconds = [b.seconds - a.seconds for a, b in pairwise(ran.history)]
    steps = [record.cg_steps for record in ran.history[1:]]
    peak, plan = meter.steps[f"training by {name}"]["peak_bytes"], problem.plan(towers)
    room = plan.spare_bytes // (2 * plan.needs.theta) if secant else 0
    held = max(0, min(room, gt.optim.NewtonKron().memory, iterations - gt.optim.NewtonKron().alternating - 1))
    del ran.parameters
    print(f"    iterations {[round(s, 3) for s in seconds]} s, {steps} conjugate gradient steps")
    print(f"    at most {held} pairs remembered at a time, room for {room}")
    print(
        f"    peak {peak / 1e9:.2f} GB, planned {plan.bytes / 1e9:.2f} GB ({peak / plan.bytes:.2f}), budget "
        f"{plan.budget / 1e9:.2f} GB ({peak / plan.budget:.2f})",
        flush=True,
    )
    return {
        "by": name, "seconds": seconds, "cg_steps": steps, "values": [record.value for record in ran.history],
        "peak_bytes": peak, "planned_bytes": plan.bytes, "budget_bytes": plan.budget, "room": room, "held": held,
    }  # fmt: skip


def fit(arguments: argparse.Namespace, size: str) -> dict[str, Any]:
    """Train towers over generated pairs of one size of FITS."""
    m, n, count, dim, budget = FITS[size]
    budget = arguments.memory_budget or budget
    if arguments.shrink > 1:
        m, count, n, budget = m // arguments.shrink, count // arguments.shrink, max(1000, n // arguments.shrink), None
    device = torch.device(arguments.device)
    meter, precision = Meter(device), {"precision": arguments.precision}
    start = time.perf_counter()
    print(f"{size}: {m:,} x {n:,}, {count:,} pairs, dimension {dim}, budget {budget}, on {device}", flush=True)
    with meter.step("kernels, compiled"):
        small = gt.Problem(grouped_pairs(3000, 2000, 60_000), **OBJECTIVE, omega=0.02, **precision)
        small.graphs = False
        gt.minimize(small, gt.mlp_towers(small, (), dim).to(device), max_iterations=6)
        del small
    with meter.step("pairs"):
        pairs = grouped_pairs(m, n, count)
    with meter.step("problem"):
        problem = gt.Problem(pairs, **OBJECTIVE, omega=2 * count / (m * n), memory_budget=budget, **precision)
    del pairs
    with meter.step("towers, drawn"):
        towers = gt.mlp_towers(problem, (), dim)
    with meter.step("towers, to the device"):
        towers = towers.to(device)
    with meter.step("plan"):
        plan = problem.plan(towers)
    print(f"  {plan!r}, room for {plan.spare_bytes // (2 * plan.needs.theta)} secant pairs", flush=True)

    def progress(record: gt.Record, point: object) -> None:
        at = time.perf_counter() - start
        print(
            f"  iteration {record.iteration}: {record.seconds:.2f} s, L = {record.value:.6e} (at {at:.0f} s)",
            flush=True,
        )

    with meter.step("training"):
        ran = gt.minimize(problem, towers, max_iterations=arguments.iterations, callbacks=[progress])
    seconds = [b.seconds - a.seconds for a, b in pairwise(ran.history)]
    timed = seconds[2:] or seconds
    result: dict[str, Any] = {
        "size": [m, n, count], "dim": dim, "device": str(device), "memory_budget": budget, "plan": repr(plan),
        "planned_bytes": plan.bytes, "streamed": plan.streamed is not None,
        "iteration_seconds": statistics.median(timed), "seconds": seconds,
        "values": [record.value for record in ran.history], "objective": ran.value, "reason": ran.reason.name,
        "host_peak_bytes": max(meter.most, _status("VmHWM")), "total_seconds": time.perf_counter() - start,
        **precision,
    }  # fmt: skip
    if device.type == "cuda":
        result["gpu_peak_bytes"] = max(step["peak_bytes"] for step in meter.steps.values())
        result["gpu_reserved_bytes"] = torch.cuda.max_memory_reserved()
    gpu = "".join(f", {key[4:-6]} {result[key] / 1e9:.1f} GB" for key in result if key.startswith("gpu_"))
    print(
        f"  {result['iteration_seconds']:.3f} s for an iteration, objective {ran.value:.6e}, host "
        f"{result['host_peak_bytes'] / 1e9:.1f} GB{gpu}; all took {result['total_seconds']:.0f} s",
        flush=True,
    )
    return result | {"steps": meter.steps}


def selection(arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds of fits with and without selection, in turn, for as long as there is time."""
    m, n, count = (size // arguments.shrink for size in (2_000_000, 200_000, 100_000_000))
    start = time.perf_counter()
    pairs, small = grouped_pairs(m, n, count), grouped_pairs(3000, 1000, 60_000)
    print(f"{m:,} x {n:,}, {count:,} pairs, made in {time.perf_counter() - start:.1f} s", flush=True)
    ways = {"rules": {"select": False}, "default": {}}
    times: dict[str, list[float]] = {name: [] for name in ways}
    found: dict[str, Any] = {"size": [m, n, count], "device": arguments.device, "bound": 1.3}
    while not times["default"] or time.perf_counter() - start < arguments.seconds:
        for name, options in ways.items():
            if not times[name]:
                gt.TwoTower(device=arguments.device, **options).fit(small)
            before = time.perf_counter()
            model = gt.TwoTower(device=arguments.device, **options).fit(pairs)
            times[name].append(time.perf_counter() - before)
            path = model.path_
            found[name] = {
                "dim": model.dim_, "embedding_l2": model.embedding_l2_, "iterations": len(model.history_) - 1,
                "tried": [] if path is None else [(one.settings, one.metric, one.standard_error) for one in path.tried],
                "held_out": None if path is None else path.held_out, "note": None if path is None else path.note,
            }  # fmt: skip
            print(f"  {name}: {times[name][-1]:.2f} s, {found[name]}", flush=True)
            del model
            gc.collect()
    ratio = statistics.median(times["default"]) / statistics.median(times["rules"])
    print(f"  {ratio:.3f} times the time (<= 1.3)", flush=True)
    return found | {"seconds": times, "ratio": ratio}


ORDERS: dict[str, dict[str, int]] = {
    "as chosen": {},
    "one launch a block": {"DENSE": 0, "LINES": 0},
    "one launch a block of 16,384 rows": {"DENSE": 0, "LINES": 0, "ROW_BLOCK": 1 << 14},
    "one launch a block of 65,536 rows": {"DENSE": 0, "LINES": 0, "ROW_BLOCK": 1 << 16},
    "no blocks": {"DENSE": 1 << 40},
    "no blocks, pieces of 512": {"DENSE": 1 << 40, "PLENTY": 1 << 40},
    "one launch, lines": {"DENSE": 0, "LINES": 1 << 40},
}


def columns(arguments: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of a pass over columns in each order."""
    m, n, count = SIZES[arguments.size]
    device, kernels = torch.device("cuda"), select(torch.device("cuda"))
    pattern = random_pairs(m, n, count, device)
    offsets, found = (torch.from_numpy(array).to(device) for array in (pattern.indptr, pattern.indices))
    offsets, found = offsets.long(), found.int()
    del pattern
    P, Q = (torch.randn(rows, arguments.dim, device=device) for rows in (m, n))
    x, V, U = torch.randn(count, device=device), torch.zeros_like(Q), torch.zeros_like(P)
    result: dict[str, Any] = {}
    for name, settings in ORDERS.items():
        usual = {key: getattr(layout, key) for key in settings}
        for key, value in settings.items():
            setattr(layout, key, value)
        pairs = Pairs((m, n), offsets, found)
        sizes = layout.column_order(torch.bincount(found, minlength=n), m)
        if sizes.lines * arguments.dim * 4 < 16e9:
            meter = Meter(device)
            with meter.step(f"{name}: order"):
                order = layout.right_order(pairs)
            meter.medians(name, lambda pairs=pairs: kernels.right_sum(pairs, x, P, V), arguments.repeats)
            result[name] = meter.steps | {"pieces": len(order), "lines": order.partial_lines}
            print(f"    {len(order):,} pieces, {order.partial_lines:,} lines, {len(order.launches) - 1} launches")
            del order
        for key, value in usual.items():
            setattr(layout, key, value)
    meter = Meter(device)
    pairs = Pairs((m, n), offsets, found)
    meter.medians("left_sum", lambda: kernels.left_sum(pairs, x, Q, U), arguments.repeats)
    c, H, W = torch.rand(count, device=device), torch.randn_like(Q), torch.randn_like(P)
    meter.medians("curvature_left", lambda: kernels.curvature_left(pairs, c, P, W, Q, H, U), arguments.repeats)
    return {"size": [m, n, count], "dim": arguments.dim, "orders": result, "rows": meter.steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="tiny", choices=list(SIZES))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--precision", default="tf32")
    parser.add_argument("--pair-precision", default="float32")
    parser.add_argument("--memory-budget")
    parser.add_argument("--iterations", type=int, help="3, of --fit 6")
    parser.add_argument("--by", choices=["both", "secant", "cg"], default="both", help="training runs")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--columns", action="store_true", help="time only the ways to pass over columns")
    parser.add_argument("--fit", nargs="+", choices=list(FITS), help="only train, towers of these sizes")
    parser.add_argument("--selection", action="store_true", help="only the price of selection")
    parser.add_argument("--shrink", type=int, default=1, help="divides the sizes of --fit and --selection")
    parser.add_argument("--seconds", type=float, default=60.0, help="of --selection, after which no round begins")
    parser.add_argument("--result", help="name of the result, as FILE/SECTION")
    arguments = parser.parse_args()
    arguments.iterations = arguments.iterations or (6 if arguments.fit else 3)
    kind = torch.device(arguments.device).type
    smaller = "" if arguments.shrink == 1 else f"-{arguments.shrink}"
    if arguments.fit is not None and len(arguments.fit) > 1:  # peaks of the resident set are those of a process
        given = [word for word in sys.argv[1:] if word not in ("--fit", *arguments.fit)]
        for size in arguments.fit:
            subprocess.run([sys.executable, __file__, *given, "--fit", size], check=True)
        return
    if arguments.fit is not None:
        (size,) = arguments.fit
        budget = "" if arguments.memory_budget is None else f"-{arguments.memory_budget}"
        print(write_result(arguments.result or f"scale/fit-{size}-{kind}{budget}{smaller}", fit(arguments, size)))
        return
    if arguments.selection:
        print(write_result(arguments.result or f"scale/selection-100M-{kind}{smaller}", selection(arguments)))
        return
    if arguments.columns:
        print(write_result(arguments.result or f"scale/{arguments.size}-columns", columns(arguments)))
        return
    budget = "" if arguments.memory_budget is None else f"-{arguments.memory_budget}"
    name = arguments.result or f"scale/{arguments.size}-{kind}{budget}"
    print(write_result(name, measure(arguments)))


if __name__ == "__main__":
    main()
