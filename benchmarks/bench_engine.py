"""The engine's claims as numbers. `python benchmarks/bench_engine.py [accuracy|growth|product|memory|all]`.

accuracy  largest relative error of value, gradient and G·d against the dense twin (tests/dense.py), float64 and float32
growth    time of a gradient and of G·d while m, n and |O| double three times
product   ml1m shape: G·d against its tower matrix products and with the fitted label against a constant one, and the
          fused pair pass against torch's sparse operations
memory    ml10m shape: peak memory of one evaluation with one G·d beyond its inputs

Each prints the ratio and the bound it is held to, and writes a section of benchmarks/results/engine.json. `--tiny` is
for a try: growth is a tenth, and memory has the ml1m shape.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import subprocess
import sys
from pathlib import Path

import torch
from common import median_ratio, median_seconds, side_by_side, write_result

import gramtower as gt
from gramtower.data.datasets import PAPER_SHAPES, paper_shape, planted_pairs
from gramtower.engine.kernels import select

TESTS = Path(__file__).parent.parent / "tests"


def accuracy() -> None:
    sys.path.insert(0, str(TESTS))
    from cases import FEATURES, LOSSES, TOWERS, make_case
    from dense import evaluate

    worst = {}
    for dtype, bound in ((torch.float64, 1e-10), (torch.float32, 2e-4)):
        errors = {"value": 0.0, "gradient": 0.0, "product": 0.0}
        for tower in TOWERS:
            for index, kind in enumerate(FEATURES):
                loss = LOSSES[(index + len(tower)) % len(LOSSES)]
                case = make_case(
                    m=9, n=7, tower=tower, kinds=(kind, kind), loss=loss, weights=True, dtype=dtype, embedding_l2=0.1
                )
                value, gradient, G = evaluate(case.dense, case.left, case.right)
                point = case.problem.at(case.towers)
                d = torch.randn(len(gradient), dtype=torch.float64)
                found = {
                    "value": abs(point.value - value) / abs(value),
                    "gradient": _relative(point.gradient().vector, gradient),
                    "product": _relative(point.gauss_newton() @ d.to(dtype), G @ d),
                }
                errors = {key: max(errors[key], float(found[key])) for key in errors}
        name = str(dtype).removeprefix("torch.")
        worst[name] = errors
        print(
            f"{name}: worst relative error " + ", ".join(f"{k} {v:.1e}" for k, v in errors.items()) + f" (<= {bound:g})"
        )
    write_result("engine/accuracy", {"worst_relative_error": worst})


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b).norm() / b.norm())


def growth(tiny: bool) -> None:
    size = 0.1 if tiny else 1.0
    factors = (1, 2, 4, 8)
    calls = {}
    for factor in factors:
        sizes = (round(size * factor * one) for one in (4000, 3000, 250_000))
        problem = gt.Problem(planted_pairs(*sizes, seed=1))
        point = problem.at(gt.mlp_towers(problem))
        _ = point.value
        G, d = point.gauss_newton(), point.parameters
        calls[f"gradient {factor}"] = point.gradient
        calls[f"product {factor}"] = functools.partial(G.product, d, d.empty())
    times = side_by_side(calls, repeats=15)
    rows = []
    for factor in factors:
        gradient, product = (statistics.median(times[f"{what} {factor}"]) for what in ("gradient", "product"))
        row = {"factor": factor, "gradient_s": gradient, "product_s": product}
        line = f"x{factor}: gradient {1e3 * gradient:7.1f} ms, G·d {1e3 * product:7.1f} ms"
        if factor > 1:
            row["ratios"] = [
                median_ratio(times, f"{what} {factor}", f"{what} {factor // 2}") for what in ("gradient", "product")
            ]
            line += "   ratios " + ", ".join(f"{ratio:.2f}" for ratio in row["ratios"]) + " (<= 2.3)"
        rows.append(row)
        print(line)
    write_result("engine/growth", {"rows": rows})


def product() -> None:
    m, n, _ = PAPER_SHAPES["ml1m"]
    problem = gt.Problem(paper_shape("ml1m"))
    towers = gt.mlp_towers(problem)
    point = problem.at(towers)
    G, d = point.gauss_newton(), towers.parameters()
    out = d.empty()
    gemms = [_tower_products(rows, (256, 256, 128)) for rows in (m, n)]
    fitted = gt.Problem(paper_shape("ml1m"), imputed="fitted")
    centred = fitted.at(towers).gauss_newton()
    times = side_by_side(
        {
            "product": lambda: G.product(d, out),
            "fitted": lambda: centred.product(d, out),
            "floor": lambda: [run() for run in gemms],
        }
    )
    whole, floor = (statistics.median(times[name]) for name in ("product", "floor"))
    ratio = median_ratio(times, "product", "floor")
    print(f"G·d {1e3 * whole:.1f} ms, its tower matrix products {1e3 * floor:.1f} ms: ratio {ratio:.2f} (<= 1.8)")
    fitted_ratio = median_ratio(times, "fitted", "product")
    print(f"G·d with the fitted label over that with a constant one: ratio {fitted_ratio:.3f} (<= 1.05)")

    kernels, resident = select(torch.device("cpu")), problem.resident_pairs(towers)
    pairs, P, Q = resident.pairs, point.P, point.Q
    W, H = torch.randn_like(P), torch.randn_like(Q)
    c, total = kernels.losses(pairs, P, Q, resident.terms).curvatures, torch.zeros_like(P)
    pattern = torch.sparse_csr_tensor(pairs.offsets.int(), pairs.columns, torch.ones_like(c), pairs.shape)

    def torch_way() -> torch.Tensor:
        z = c * (
            torch.sparse.sampled_addmm(pattern, W, Q.t(), beta=0.0).values()
            + torch.sparse.sampled_addmm(pattern, P, H.t(), beta=0.0).values()
        )
        return torch.sparse_csr_tensor(pattern.crow_indices(), pattern.col_indices(), z, pairs.shape) @ Q

    times = side_by_side(
        {"ours": lambda: kernels.curvature_left(pairs, c, P, W, Q, H, total), "torch": torch_way}, warmup=5
    )
    ours, theirs = (statistics.median(times[name]) for name in ("ours", "torch"))
    pair_ratio = median_ratio(times, "torch", "ours")
    print(f"pair pass {1e3 * ours:.1f} ms, torch's sparse {1e3 * theirs:.1f} ms: ratio {pair_ratio:.2f} (>= 1.5)")
    write_result(
        "engine/product",
        {"product_s": whole, "tower_products_s": floor, "ratio": ratio, "fitted_label_ratio": fitted_ratio,
         "pair_pass_s": ours, "torch_sparse_s": theirs, "pair_ratio": pair_ratio},
    )  # fmt: skip


def _tower_products(rows: int, widths: tuple[int, ...]):
    """The matrix products that jvp and vjp of a tower over one-hot ids cannot avoid: four for each inner layer."""
    layers = [
        (torch.randn(rows, a), torch.randn(rows, a), torch.randn(b, a), torch.randn(b, a), torch.randn(rows, b))
        for a, b in itertools.pairwise(widths)
    ]

    def run() -> None:
        for x, dx, weight, direction, g in layers:
            (dx @ weight.t()).addmm_(x, direction.t())  # jvp
            g.t() @ x, g @ weight  # vjp

    return run


def memory(tiny: bool) -> None:
    child = [sys.executable, __file__, "memory-child", *["--tiny"] * tiny]
    found = json.loads(subprocess.run(child, check=True, capture_output=True, text=True).stdout)
    milliseconds = 1e3 * found["product_s"]
    print(f"peak {found['extra_bytes'] / 1e9:.2f} GB beyond inputs (<= 1.2), G·d {milliseconds:.0f} ms")
    write_result("engine/memory", {"runs": {"default": found}})


def memory_child(tiny: bool) -> None:
    """Peak resident memory of an evaluation and G·d beyond the problem, the towers and d; run in a fresh process."""
    warm = gt.Problem(planted_pairs(300, 200, 4000))  # compiles kernels, fills library caches
    point = warm.at(gt.mlp_towers(warm))
    _ = point.value, point.gauss_newton() @ point.gradient()
    problem = gt.Problem(paper_shape("ml1m" if tiny else "ml10m"))
    towers = gt.mlp_towers(problem)
    d = towers.parameters()
    problem.resident_pairs(towers).pairs.by_column  # noqa: B018  # inputs in the form kernels read
    before = _resident()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    point = problem.at(towers)
    _ = point.value
    G = point.gauss_newton()
    _ = G @ d
    peak = _status("VmHWM")
    print(json.dumps({"extra_bytes": peak - before, "product_s": median_seconds(lambda: G @ d, repeats=3, warmup=0)}))


def _status(key: str) -> int:
    return next(
        int(x.split()[1]) * 1024 for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(key)
    )


def _resident() -> int:
    import ctypes
    import gc

    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return _status("VmRSS")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "what", nargs="?", default="all", choices=["accuracy", "growth", "product", "memory", "memory-child", "all"]
    )
    parser.add_argument("--tiny", action="store_true", help="small sizes: does it run?")
    given = parser.parse_args()
    parts = {
        "accuracy": accuracy,
        "growth": lambda: growth(given.tiny),
        "product": product,
        "memory": lambda: memory(given.tiny),
    }
    if given.what == "memory-child":
        memory_child(given.tiny)
    for name, run in parts.items():
        if given.what in (name, "all"):
            run()
