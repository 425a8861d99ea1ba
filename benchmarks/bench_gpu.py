"""What the GPU needs for a value, a gradient, a Gauss-Newton product, the preconditioner and twenty outer iterations.

    python benchmarks/bench_gpu.py [--shape netflix] [--precision tf32] [--pair-precision bfloat16]

Pairs are random with skewed counts, made on the device, in the shapes of the paper's sets; the towers are the paper's
(256, 256 → 128). Each time is printed with two floors measured in the same run: the tower's and the Gramians' flops
over the rate of a large matrix product in that precision, and the bytes that pairs gather over the rate at which a
program that does nothing else reads random rows of a cached matrix. Times are medians after warm-up, the device waited
for.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from common import random_pairs, write_result

import gramtower as gt
from gramtower._util.host import products_in
from gramtower.data.datasets import PAPER_SHAPES
from gramtower.engine.towers.towers import clone


def median_ms(function: Callable[[], Any], repeats: int = 15, warmup: int = 3) -> float:
    """Median time of a call, the device waited for before and after."""
    times = []
    for repeat in range(warmup + repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        torch.cuda.synchronize()
        if repeat >= warmup:
            times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def gemm_rate(precision: str, width: int = 256) -> float:
    """Flops a second of a tall product of that width."""
    A, B = torch.randn(1 << 19, width, device="cuda"), torch.randn(width, width, device="cuda")
    out = torch.empty_like(A)
    with products_in(precision):
        return 2 * A.numel() * width / (1e-3 * median_ms(lambda: torch.mm(A, B, out=out)))


@triton.jit
def read_rows(matrix, index, out, k: tl.constexpr, ROWS: tl.constexpr):
    """The sum of some rows picked at random: reading, and as little else as possible."""
    program = tl.program_id(0)
    f = tl.arange(0, k)
    total = tl.zeros((k,), dtype=tl.float32)
    for r in range(0, ROWS, 8):
        i = tl.load(index + program * ROWS + r + tl.arange(0, 8)).to(tl.int64)
        total += tl.sum(tl.load(matrix + i[:, None] * k + f[None, :]).to(tl.float32), 0)
    tl.store(out + program * k + f, total)


def gather_rate(rows: int, k: int, dtype: torch.dtype) -> float:
    """Bytes a second at which random rows of a matrix are read, in blocks of 32,768 rows of it at a time."""
    A = torch.randn(min(rows, 1 << 15), k, device="cuda").to(dtype)
    index = torch.randint(len(A), (1 << 22,), device="cuda", dtype=torch.int32)
    out = torch.empty(len(index) // 128, k, device="cuda")
    seconds = 1e-3 * median_ms(lambda: read_rows[(len(out),)](A, index, out, k=k, ROWS=128, num_warps=1))
    return A.element_size() * k * len(index) / seconds


def floors(shape: tuple[int, int, int], problem: gt.Problem) -> dict[str, dict[str, float]]:
    """Milliseconds that tower and Gramian products, and that gathered bytes, need at least."""
    m, n, count = shape
    rate = gemm_rate(problem.precision)
    dtype = torch.bfloat16 if problem.pair_precision == "bfloat16" else torch.float32
    width = 2 if dtype == torch.bfloat16 else 4
    right, left = gather_rate(n, 128, dtype), gather_rate(m, 128, dtype)
    layers = 256 * 256 + 256 * 128
    forward, square = 2 * (m + n) * layers / rate, 2 * (m + n) * 128 * 128 / rate
    row = 128 * width * count
    plain = 128 * 4 * count
    return {
        "value": {"flops": 1e3 * (forward + square), "bytes": 1e3 * plain / right},
        "gradient": {"flops": 1e3 * (2 * forward + square), "bytes": 1e3 * plain * (1 / right + 1 / left)},
        "product": {"flops": 1e3 * (4 * forward + 3 * square), "bytes": 1e3 * row * (2 / right + 1 / left)},
    }


def measure_parts(problem: gt.Problem, towers: gt.Towers) -> dict[str, Any]:
    """Milliseconds of each part at one point, and the memory they need together."""
    torch.cuda.reset_peak_memory_stats()
    value = median_ms(lambda: problem.at(towers).value)
    point = problem.at(towers)
    assert np.isfinite(point.value)
    g = point.gradient()
    gradient = median_ms(point.gradient)
    G, M, out = point.gauss_newton(), point.preconditioner(), g.empty()
    return {
        "product": median_ms(lambda: G.product(g, out)),
        "gradient": gradient,
        "value": value,
        "preconditioner": median_ms(point.preconditioner, 7),
        "preconditioner apply": median_ms(lambda: M.product(g, out)),
        "memory of the parts, GB": torch.cuda.max_memory_allocated() / 1e9,
    }


def measure(
    name: str, precision: str, pair_precision: str, budget: str | None, outer: int, profile: bool
) -> dict[str, Any]:
    shape = m, n, count = PAPER_SHAPES[name]
    device = torch.device("cuda")
    start = time.perf_counter()
    pairs = random_pairs(m, n, count, device)
    torch.cuda.empty_cache()
    problem = gt.Problem(
        pairs, omega=2.0**-8, l2=1.0, precision=precision, pair_precision=pair_precision, memory_budget=budget
    )
    towers = gt.mlp_towers(problem, hidden=(256, 256), dim=128)
    for module in (towers.left, towers.right):
        module.to(device)
    towers = gt.Towers(towers.left, towers.right)
    print(f"{name}: {m:,} × {n:,}, {count:,} pairs, made in {time.perf_counter() - start:.1f} s", flush=True)
    least = floors(shape, problem)
    torch.cuda.empty_cache()
    result = measure_parts(problem, towers)
    if profile:
        with torch.profiler.profile() as seen:
            point = problem.at(towers)
            _, g = point.value, point.gradient()
            G = point.gauss_newton()
            for _ in range(3):
                G.product(g)
        print(seen.key_averages().table(sort_by="cuda_time_total", row_limit=24, max_name_column_width=60))
        del point, g, G
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    if outer:
        options = {"cg_steps": 10, "cg_max_steps": 10, "cg_tolerance": 0.0, "cg_progress": 0.0}
        result["started at"] = gt.minimize(problem, clone(towers), max_iterations=2, **options).history[0].value
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        ran = gt.minimize(problem, towers, max_iterations=outer, tolerance=0.0, **options)
        torch.cuda.synchronize()
        result["iterations, s"] = time.perf_counter() - start
        result["outer"], result["cg steps"] = len(ran.history) - 1, sum(r.cg_steps for r in ran.history)
        result["final value"] = ran.history[-1].value
        result["memory of the run, GB"] = torch.cuda.max_memory_allocated() / 1e9
    result["floors, ms"] = least
    for key, value in result.items():
        floor = least.get(key)
        extra = f"   floors: flops {floor['flops']:.2f}, bytes {floor['bytes']:.2f}" if floor else ""
        print(f"  {key:26s} {value if isinstance(value, (dict, int)) else round(value, 3)}{extra}", flush=True)
    return {"shape": shape, "precision": precision, "pair_precision": pair_precision, "memory_budget": budget, **result}


def same_objective(name: str, optimizer: str, iterations: int = 60) -> dict[str, Any]:
    """Where an optimizer ends in each precision, from the same start: what the defaults were chosen by."""
    m, n, count = PAPER_SHAPES[name]
    pairs = random_pairs(m, n, count, torch.device("cuda"))
    result = {}
    for precision, pair_precision in (("float32", "float32"), ("tf32", "float32"), ("tf32", "bfloat16")):
        problem = gt.Problem(
            pairs, l2=2.0**-4, embedding_l2=2.0**-7, precision=precision, pair_precision=pair_precision
        )
        made = gt.mlp_towers(problem)
        towers = gt.Towers(made.left.cuda(), made.right.cuda())
        ran = gt.minimize(problem, towers, optimizer, max_iterations=iterations)
        last = ran.history[-1]
        result[f"{precision}, {pair_precision}"] = {
            "value": last.value, "iterations": last.iteration, "seconds": last.seconds, "reason": ran.reason.name,
        }  # fmt: skip
        print(
            f"{name} in {precision}, gathered {pair_precision}: {result[f'{precision}, {pair_precision}']}", flush=True
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", choices=list(PAPER_SHAPES))
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--pair-precision", default="float32")
    parser.add_argument("--memory-budget")
    parser.add_argument("--outer", type=int, default=20)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--same-objective", action="store_true", help="compare precisions by where training ends")
    parser.add_argument("--optimizer", default="newton-kron", help="with --same-objective")
    parser.add_argument("--result", default="gpu/all", help="name of the result, as gpu/SECTION")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no GPU here: this benchmark needs one")
    if arguments.same_objective:
        shapes = arguments.shape or ["ml1m", "ml10m"]
        print(write_result(arguments.result, {shape: same_objective(shape, arguments.optimizer) for shape in shapes}))
        return
    results = {
        shape: measure(
            shape,
            arguments.precision,
            arguments.pair_precision,
            arguments.memory_budget,
            arguments.outer,
            arguments.profile,
        )
        for shape in arguments.shape or ["ml1m", "ml10m", "netflix"]
    }
    print(write_result(arguments.result, results))


if __name__ == "__main__":
    main()
