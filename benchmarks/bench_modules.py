"""Custom modules compared with the library's network at the same sizes: `python benchmarks/bench_modules.py`.

    --size link     57,034 × 63,436 entities, 269,000 pairs, sparse word features on both sides, (1024,) → 512, relu
    --size quarter  a quarter of these entities and pairs, all widths the same
    --size small    4,000 × 3,000 entities, 40,000 pairs, sparse features, (128,) → 64 (two cores)
    --size tiny     a try of the script, no measurement

The rows: mlp_towers, which is an nn.Sequential; a custom class with the same layers; with a linear skip from the
features; with LayerNorm; with a gate; and one that cannot be traced and is left to autodiff. Of each, medians by turns
within one run of: G·d, gradient, the preconditioner, its product, and an outer iteration as newton-kron makes it with
ten steps of conjugate gradients; and their ratio to mlp_towers (bound: 3 for the outer iteration). ``--iterations`` of
newton-kron from the same first numbers say whether the preconditioner is as good. Writes
the section modules-<size>-<device> of benchmarks/results/engine.json.

    --derivatives   instead: how modules that are left to autodiff should get J d, over dense rows of the left side

Each product is J d, by (a) double backward through a graph that is kept, as the library has it, (b) forward mode or
(c) torch.func.linearize, and then Jᵀ of the result by back-propagation: a tower's part of G·d. Multiply-adds,
operations of torch and elements that they return are counted and do not depend on the load of the machine. Times are
medians of the processor's time on one thread, by turns. The first product at a point includes the second graph of (a)
and the tracing of (c). Writes the section derivatives-<size>-cpu.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from common import side_by_side, write_result
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

import gramtower as gt
from gramtower.data.datasets import planted_pairs

SIZES: dict[str, dict[str, Any]] = {
    "link": {"m": 57_034, "n": 63_436, "pairs": 269_000, "words": 40_000, "per_row": 60, "hidden": 1024, "dim": 512},
    "quarter": {"m": 14_258, "n": 15_859, "pairs": 67_250, "words": 40_000, "per_row": 60, "hidden": 1024, "dim": 512},
    "small": {"m": 4_000, "n": 3_000, "pairs": 40_000, "words": 2_000, "per_row": 20, "hidden": 128, "dim": 64},
    "tiny": {"m": 300, "n": 200, "pairs": 1_500, "words": 100, "per_row": 5, "hidden": 16, "dim": 8},
}
BOUND = 3.0
STEPS = 10  # of conjugate gradients in an outer iteration


class Own(nn.Module):
    """The layers of mlp_towers with one hidden layer, and variants of it."""

    def __init__(self, network: nn.Sequential, variant: str) -> None:
        super().__init__()
        self.first, self.out, self.variant = network[0], network[2], variant
        hidden, dim, features = self.out.in_features, self.out.out_features, self.first.in_features
        self.skip = gt.InputLinear(features, dim, bias=False) if variant == "linear skip" else None
        self.norm = nn.LayerNorm(hidden) if variant == "LayerNorm" else None
        self.gate = nn.Linear(hidden, hidden) if variant == "gated" else None
        if self.skip is not None:
            nn.init.normal_(self.skip.weight, std=0.01)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of features to rows of embeddings."""
        h = torch.relu(self.first(x))
        if self.norm is not None:
            h = self.norm(h)
        if self.gate is not None:
            h = h * torch.sigmoid(self.gate(h))
        y = self.out(h)
        return y if self.skip is None else y + self.skip(x)


class Untraced(Own):
    """The same layers in a forward that branches on what it is given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same by a branch that cannot be traced."""
        h = self.first(x)
        return self.out(torch.relu(h)) if h.shape[0] >= 0 else h


VARIANTS = ("mlp_towers", "same layers", "linear skip", "LayerNorm", "gated", "by autodiff")


def words(rows: int, columns: int, per_row: int, seed: int) -> sp.csr_matrix:
    """Rows of length one with words drawn by Zipf's law."""
    rng = np.random.default_rng(seed)
    share = 1 / np.arange(1, columns + 1)
    drawn = rng.choice(columns, size=rows * per_row, p=share / share.sum())
    X = sp.csr_matrix((np.ones(len(drawn), np.float32), (np.repeat(np.arange(rows), per_row), drawn)), (rows, columns))
    X.sum_duplicates()
    X.data = np.log1p(X.data)
    return sp.diags(1 / np.sqrt(np.asarray(X.multiply(X).sum(1)).ravel())) @ X


def towers(problem: gt.Problem, size: dict[str, Any], variant: str, device: torch.device) -> gt.Towers:
    made = gt.mlp_towers(problem, hidden=(size["hidden"],), dim=size["dim"], activation="relu", seed=0)
    if variant == "mlp_towers":
        return made.to(device)
    torch.manual_seed(0)
    kind = Untraced if variant == "by autodiff" else Own
    return gt.Towers(kind(made.left, variant), kind(made.right, variant)).to(device)


class Counting(TorchDispatchMode):
    """Counts multiply-adds, operations and elements of results, in backward passes too."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = {"multiply-adds": 0, "operations": 0, "elements": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._overloadpacket in flop_registry:
            self.counts["multiply-adds"] += flop_registry[func._overloadpacket](*args, out_val=result) // 2
        if not func.is_view:
            self.counts["operations"] += 1
            self.counts["elements"] += sum(t.numel() for t in tree_leaves(result) if isinstance(t, Tensor))
        return result


def products(module: nn.Module, rows: Tensor) -> dict[str, Callable[[], Callable[[], Tensor]]]:
    """Of each derivative, a function that prepares a point and returns one that computes JᵀJ d for a fixed d."""
    torch.manual_seed(1)
    leaves = dict(module.named_parameters())
    d = {name: torch.randn_like(leaf) for name, leaf in leaves.items()}
    y = module(rows)

    def call(tensors: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(module, tensors, rows)

    def pulled(dy: Tensor) -> Tensor:
        back = torch.autograd.grad(y, list(leaves.values()), dy, retain_graph=True)
        return torch.cat([part.flatten() for part in back])

    def double_backward() -> Callable[[], Tensor]:
        v = torch.zeros_like(y, requires_grad=True)
        back = torch.autograd.grad(y, list(leaves.values()), v, create_graph=True)
        return lambda: pulled(torch.autograd.grad(back, v, list(d.values()), retain_graph=True)[0])

    def forward_mode() -> Callable[[], Tensor]:
        theta = {name: leaf.detach() for name, leaf in leaves.items()}

        def product() -> Tensor:
            with torch.no_grad():
                dy = torch.func.jvp(call, (theta,), (d,))[1]
            return pulled(dy)

        return product

    def linearize() -> Callable[[], Tensor]:
        with torch.no_grad(), warnings.catch_warnings(action="ignore"):
            push = torch.func.linearize(call, {name: leaf.detach() for name, leaf in leaves.items()})[1]

        def product() -> Tensor:
            with torch.no_grad():
                dy = push(d)
            return pulled(dy)

        return product

    return {"double backward": double_backward, "forward mode": forward_mode, "linearize": linearize}


def processor_seconds(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Medians of the processor's time, by turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 2):
        for name, call in calls.items():
            start = time.process_time()
            call()
            times[name] += [time.process_time() - start] if repeat > 1 else []
    return {name: statistics.median(found) for name, found in times.items()}


def compare_derivatives(size: dict[str, Any], repeats: int) -> dict[str, Any]:
    """Counts and times of each variant but mlp_towers, by each derivative, and their ratios to double backward."""
    torch.set_num_threads(1)
    width, rows = 256, torch.randn(size["m"], 256, generator=torch.Generator().manual_seed(0))
    result: dict[str, Any] = {}
    for variant in VARIANTS[1:5]:
        torch.manual_seed(0)
        hidden, dim = size["hidden"], size["dim"]
        network = nn.Sequential(gt.InputLinear(width, hidden), nn.ReLU(), nn.Linear(hidden, dim))
        ways = products(Own(network, variant), rows)
        ready = {name: prepare() for name, prepare in ways.items()}
        expected = ready["double backward"]()
        found: dict[str, dict[str, float]] = {}
        for name, product in ready.items():
            difference = float((product() - expected).norm() / expected.norm())
            assert difference < 1e-5, (variant, name, difference)
            with Counting() as counting:
                product()
            found[name] = dict(counting.counts)
        for name, seconds in processor_seconds(dict(ready), repeats).items():
            found[name]["seconds"] = seconds
        firsts = {name: (lambda prepare=prepare: prepare()()) for name, prepare in ways.items()}
        for name, seconds in processor_seconds(firsts, repeats).items():
            found[name]["seconds of the first"] = seconds
        result[variant] = {}
        for name, one in found.items():
            ratios = {what: value / found["double backward"][what] for what, value in one.items()}
            result[variant][name] = {**one, "ratios": ratios}
            print(f"{variant:12} {name:16}", ", ".join(f"{what} {ratio:.2f}" for what, ratio in ratios.items()))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--variants", default=",".join(VARIANTS), help="all points are in memory at once")
    parser.add_argument("--derivatives", action="store_true")
    options = parser.parse_args()
    if options.derivatives:
        section = {"size": SIZES[options.size], "width": 256, "repeats": options.repeats, "threads": 1}
        section["variants"] = compare_derivatives(SIZES[options.size], options.repeats)
        write_result(f"engine/derivatives-{options.size}-cpu", section)
        return
    size, device, variants = SIZES[options.size], torch.device(options.device), options.variants.split(",")
    wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    pairs = planted_pairs(size["m"], size["n"], size["pairs"], seed=0)
    features = [words(rows, size["words"], size["per_row"], seed) for seed, rows in enumerate(pairs.shape)]

    def problem() -> gt.Problem:
        return gt.Problem(pairs, *features, omega=1e-3, imputed=-0.5, l2=0.5, embedding_l2=1e-4)

    calls: dict[str, Callable[[], Any]] = {}

    def timed(function: Callable[[], Any]) -> Callable[[], None]:
        def call() -> None:
            function()
            wait()

        return call

    runs: dict[str, dict[str, Any]] = {}
    for variant in variants:
        task = problem()
        result = gt.minimize(task, towers(task, size, variant, device), max_iterations=options.iterations)
        records = result.history
        runs[variant] = {
            "objective": [record.value for record in records],
            "seconds": [record.seconds for record in records],
        }
        task = problem()
        start = towers(task, size, variant, device)
        point = task.at(start)
        d, G, M = point.gradient(), point.gauss_newton(), point.preconditioner()
        calls[f"G·d: {variant}"] = timed(lambda G=G, d=d: G @ d)
        calls[f"gradient: {variant}"] = timed(point.gradient)
        calls[f"preconditioner: {variant}"] = timed(lambda point=point: point.preconditioner())
        calls[f"M·r: {variant}"] = timed(lambda M=M, d=d: M @ d)

        def iteration(task: gt.Problem = task, start: gt.Towers = start) -> None:
            """What newton-kron does: a point, its gradient and preconditioner, some steps, and a point to go to."""
            point = task.at(start)
            d, G, M = point.gradient(), point.gauss_newton(0.1), point.preconditioner("kronecker", 0.1)
            for _ in range(STEPS):
                d = M @ (G @ d)
                d.scale_(1 / d.norm())  # ten products would overflow
            _ = point.along(d)(1e-6).value

        calls[f"outer iteration: {variant}"] = timed(iteration)
    times = side_by_side(calls, options.repeats, warmup=min(2, options.repeats))
    rows: dict[str, dict[str, Any]] = {}
    for variant in variants:
        rows[variant] = dict(runs[variant])
        for what in ("G·d", "gradient", "preconditioner", "M·r", "outer iteration"):
            seconds = statistics.median(times[f"{what}: {variant}"])
            ratio = seconds / statistics.median(times[f"{what}: mlp_towers"])
            rows[variant][what] = {"milliseconds": 1e3 * seconds, "ratio": ratio}
            print(f"{variant:12} {what:16} {1e3 * seconds:9.2f} ms   {ratio:5.2f} times mlp_towers")
        print(f"{variant:12} objective after {options.iterations} iterations {runs[variant]['objective'][-1]:.6g}")
    worst = max(rows[variant]["outer iteration"]["ratio"] for variant in variants)
    print(f"outer iteration, worst ratio {worst:.2f} (<= {BOUND:g})")
    write_result(
        f"engine/modules-{options.size}-{device.type}",
        {"size": size, "repeats": options.repeats, "bound": BOUND, "worst_ratio": worst, "variants": rows},
    )


if __name__ == "__main__":
    main()
