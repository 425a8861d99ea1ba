"""The paper's table of cost per data pass (tab:comp) as a measurement.

    python benchmarks/bench_complexity.py [--quick]

A data pass takes all m·n pairs into account. Measured are single steps, times the number of steps in a pass:

    naive        pairs drawn one by one, both towers run for each of them        mnF(f) + mnF(g)
    gradient     the whole gradient over all pairs (Alg. gradient)               |O|k + (m+n)k² + mF(f) + nF(g)
    blocks       all pairs of ρm left and ρn right entities (`sampling`)         |O|k + (m+n)/ρ k² + (mF(f) + nF(g))/ρ
    subsets      two subsets of ρ|O| pairs, eq:trans (`sogram` adds O(k²))       |O|/ρ (k + k² + F(f) + F(g))

against m, n, |O| and ρ, each with the others at a base. F is a forward and a backward pass of the paper's network for
one entity, which is known by its id. The unit costs of the formulas (a tower row, a row of k² work, an observed pair)
are timed by themselves at the base; nothing is fitted to the points. Points and unit costs are taken in several rounds,
one after the other, and the least of each counts: what a slow moment of the machine adds is not cost of a method. A
second curve counts what the code really
does: an embedding is computed once for each *distinct* entity of a step, not once for each pair, and every step of a
sampled method passes over θ for the regulariser, which the table leaves out.

The naive step is written here and is checked against the gradient of the engine: taken over every pair once, it is the
same vector. Writes benchmarks/results/complexity.json and docs/figures/complexity.png.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from common import best_seconds, write_result

import gramtower as gt
from gramtower.data.datasets import planted_pairs
from gramtower.engine.kernels import select
from gramtower.engine.objective.formulas import gram
from gramtower.engine.towers.linearization import Work
from gramtower.optim.stochastic import Blocks, Subsets

FIGURE = Path(__file__).resolve().parents[1] / "docs" / "figures" / "complexity.png"
METHODS = ("naive", "gradient", "blocks", "subsets")
ENDS = ("", "_predicted", "_counted")  # measured, by the table, by what is done
BATCH = 4096  # pairs in a naive step
LABELS = {
    "naive": "naive SG",
    "gradient": "gradient",
    "blocks": "Û × V̂ (sampling)",
    "subsets": "eq:trans (SOGram)",
}
COLOURS = {"naive": "#D55E00", "gradient": "#0072B2", "blocks": "#009E73", "subsets": "#CC79A7"}


@dataclass(frozen=True)
class Size:
    """A problem and a batch ratio."""

    m: int = 4000
    n: int = 4000
    observed: int = 400_000
    ratio: float = 0.05


@dataclass(frozen=True)
class Units:
    """Seconds of one unit of work."""

    row: float  # forward and backward of a tower for one entity
    forward: float  # forward only
    square: float  # the k² work of one entity: its part of a Gramian and its row of P Q_c
    pair: float  # the k work of one observed pair: score and both sums
    parameter: float  # one number of θ in a pass of the regulariser


class Case:
    """A problem with the paper's network, its points and steps."""

    def __init__(self, size: Size) -> None:
        self.size = size
        self.problem = gt.Problem(planted_pairs(size.m, size.n, size.observed, groups=16), omega=2.0**-4, l2=4.0)
        self.towers = gt.mlp_towers(self.problem)
        self.theta = self.towers.parameters()
        pairs = self.problem.pairs
        self.keys = pairs.rows.long() * size.n + pairs.columns.long()  # increasing: pairs are in row order
        self.rng = np.random.default_rng(0)

    def naive(self, rows: torch.Tensor, columns: torch.Tensor) -> gt.Parameters:
        """An estimate of ∇L from some of the m·n pairs, whether observed or not: one tower row for each pair."""
        problem, towers = self.problem, self.towers
        s = problem.resident_pairs(towers).terms
        sides = [f.take(e, towers.dtype, towers.device) for f, e in ((problem.left, rows), (problem.right, columns))]
        kernels = select(towers.device, problem.kernels)
        plans = problem.plan(towers).blocks_for((sides[0].rows, sides[1].rows))
        left, right = towers.linearize(self.theta, *sides, kernels, plans, Work())
        P, Q = left.outputs, right.outputs
        scores = (P * Q).sum(1)
        keys = rows * self.size.n + columns
        place = torch.searchsorted(self.keys, keys).clamp(max=len(self.keys) - 1)
        observed = self.keys[place] == keys
        slope = torch.where(observed, s.loss.first(s.labels[place], scores), s.omega * (scores - s.imputed))
        slope *= self.size.m * self.size.n / len(rows)
        out = self.theta * problem.l2
        left.vjp(slope[:, None] * Q, towers.local_tensors("left", out))
        right.vjp(slope[:, None] * P, towers.local_tensors("right", out))
        return out

    def step(self, method: str) -> tuple[Callable[[], object], float]:
        """One step of a method, and how many make a data pass."""
        size = self.size
        if method == "naive":
            draw = lambda top: torch.from_numpy(self.rng.integers(top, size=BATCH))  # noqa: E731
            return lambda: self.naive(draw(size.m), draw(size.n)), size.m * size.n / BATCH
        if method == "gradient":
            return lambda: self.problem.at(self.towers).gradient(), 1.0
        source = Blocks(0, size.ratio) if method == "blocks" else Subsets(0, size.ratio, alpha=1.0)
        if method == "blocks":
            steps = size.m * size.n / (round(size.ratio * size.m) * round(size.ratio * size.n))
        else:
            steps = (size.observed / round(size.ratio * size.observed)) ** 2
        return lambda: source.gradient(self.problem, self.towers, self.theta), steps

    def units(self, repeats: int) -> Units:
        """Unit costs, each timed by itself."""
        problem, towers = self.problem, self.towers
        point, entities = problem.at(towers), self.size.m + self.size.n
        P, Q, out = point.P, point.Q, self.theta.empty()
        both = torch.cat([P, Q])
        square = gram(Q, Q).to(Q.dtype)
        kernels, resident = point.evaluation.kernels, problem.resident_pairs(towers)
        pairs, left, right = resident.pairs, point.evaluation.left, point.evaluation.right

        def backward() -> None:
            left.vjp(P, towers.local_tensors("left", out))
            right.vjp(Q, towers.local_tensors("right", out))

        def pair_work() -> None:
            slopes = kernels.losses(pairs, P, Q, resident.terms).slopes
            kernels.left_sum(pairs, slopes, Q, torch.zeros_like(P))
            kernels.right_sum(pairs, slopes, P, torch.zeros_like(Q))

        forward = best_seconds(lambda: problem.at(towers), repeats) / entities
        return Units(
            row=forward + best_seconds(backward, repeats) / entities,
            forward=forward,
            square=best_seconds(lambda: (gram(both, both), both @ square), repeats) / entities,
            pair=best_seconds(pair_work, repeats) / self.size.observed,
            parameter=best_seconds(lambda: torch.mul(self.theta.vector, 4.0, out=out.vector), repeats) / len(out),
        )

    def distinct(self) -> float:
        """Expected number of different entities, left and right, among ρ|O| observed pairs."""
        pairs, ratio = self.problem.pairs, self.size.ratio
        counts = torch.cat([pairs.row_counts, pairs.column_counts]).double()
        return float((1 - (1 - ratio) ** counts).sum())


def predicted(method: str, size: Size, units: Units) -> float:
    """Seconds of a data pass by the paper's table."""
    entities, rho = size.m + size.n, size.ratio
    per_entity = units.square + units.row
    return {
        "naive": size.m * size.n * 2 * units.row,
        "gradient": size.observed * units.pair + entities * per_entity,
        "blocks": size.observed * units.pair + entities / rho * per_entity,
        "subsets": size.observed / rho * (units.pair + 2 * per_entity),
    }[method]


def counted(method: str, case: Case, units: Units) -> float:
    """Seconds of a data pass by what a step really does."""
    size, theta = case.size, len(case.theta) * units.parameter
    entities, rho, steps = size.m + size.n, size.ratio, case.step(method)[1]
    per_entity = units.square + units.row
    if method == "subsets":  # Gramians of one subset, gradient on the other
        return steps * (rho * size.observed * units.pair + case.distinct() * (per_entity + units.forward) + theta)
    if method == "blocks":
        return steps * (rho**2 * size.observed * units.pair + rho * entities * per_entity + theta)
    return predicted(method, size, units) + steps * theta


def check_naive() -> float:
    """Relative error of the naive step over every pair once, against the engine's gradient."""
    case = Case(Size(m=23, n=17, observed=90))
    rows, columns = torch.meshgrid(torch.arange(23), torch.arange(17), indexing="ij")
    exact = case.problem.at(case.towers).gradient()
    found = case.naive(rows.reshape(-1), columns.reshape(-1))
    error = (found - exact).norm() / exact.norm()
    if not error < 1e-5:
        raise RuntimeError(f"the naive step is wrong: relative error {error:.1e}")
    return error


def sweeps(quick: bool) -> dict[str, list[Size]]:
    base = Size(m=600, n=500, observed=20_000, ratio=0.1) if quick else Size()
    factors = (1, 2) if quick else (0.25, 0.5, 1, 2, 4)
    ratios = (0.1, 0.2) if quick else (0.02, 0.05, 0.1, 0.2, 0.5)
    return {
        "m": [replace(base, m=round(base.m * f)) for f in factors],
        "n": [replace(base, n=round(base.n * f)) for f in factors],
        "observed": [replace(base, observed=round(base.observed * f)) for f in factors],
        "ratio": [replace(base, ratio=ratio) for ratio in ratios],
    }


def slope(xs: list[float], ys: list[float]) -> float:
    """The power with which y grows with x, by least squares in logarithms."""
    return float(np.polyfit(np.log(xs), np.log(ys), 1)[0])


def draw(rows: dict[str, list[dict[str, float]]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.6), layout="constrained")
    names = {"m": "m", "n": "n", "observed": "|O|", "ratio": "batch ratio ρ"}
    for axes, (axis, points) in zip(figure.subplots(1, 4, sharey=True), rows.items(), strict=True):
        x = [p[axis] for p in points]
        for method in METHODS:
            style = {"color": COLOURS[method]}
            axes.plot(x, [p[f"{method}_predicted"] for p in points], "-", linewidth=1.4, **style)
            axes.plot(x, [p[f"{method}_counted"] for p in points], ":", linewidth=1.4, **style)
            axes.plot(x, [p[method] for p in points], "o", markersize=5, label=LABELS[method], **style)
        axes.set(xscale="log", yscale="log", xlabel=names[axis])
        if axis == "ratio":
            axes.set_xticks(x, [f"{value:g}" for value in x])
            axes.minorticks_off()
        axes.grid(True, which="major", alpha=0.35)
    figure.axes[0].set_ylabel("seconds of a data pass")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper")
    figure.suptitle("measured (points), the paper's table (lines), what the code does (dotted); unit costs timed apart")
    figure.savefig(path, dpi=120)


def main(quick: bool) -> None:
    print(f"naive step over all pairs against the engine's gradient: relative error {check_naive():.1e} (< 1e-5)")
    all_sizes = sweeps(quick)
    base = Case(all_sizes["m"][0 if quick else 2])
    rounds, repeats = (1, 3) if quick else (3, 5)
    costs, least = [], dict[tuple[Size, str], float]()
    for _ in range(rounds):
        costs.append(vars(base.units(repeats)))
        for size in {size: None for sizes in all_sizes.values() for size in sizes}:
            case = Case(size)
            for method in METHODS:
                step, steps = case.step(method)
                seconds = steps * best_seconds(step, repeats)
                least[size, method] = min(seconds, least.get((size, method), seconds))
        print("a round is done", flush=True)
    units = Units(**{name: min(cost[name] for cost in costs) for name in costs[0]})
    print("unit costs in microseconds:", {k: float(f"{1e6 * v:.3g}") for k, v in vars(units).items()})
    rows: dict[str, list[dict[str, float]]] = {}
    for axis, sizes in all_sizes.items():
        rows[axis] = []
        for size in sizes:
            case, point = Case(size), {}
            shown = [f"{axis:9s}{vars(size)[axis]:>10g}"]
            for m in METHODS:
                seconds, table, done = least[size, m], predicted(m, size, units), counted(m, case, units)
                point |= {m: seconds, f"{m}_predicted": table, f"{m}_counted": done}
                shown.append(
                    f"{m} {seconds:9.3g} s ({seconds / table:.2f} of the table, {seconds / done:.2f} of the work)"
                )
            rows[axis].append({**vars(size), **point})
            print("  ".join(shown), flush=True)
    print("\npower of growth: measured, by the table, by what is done")
    growth: dict[str, dict[str, list[float]]] = {}
    for axis, points in rows.items():
        x = [p[axis] for p in points]
        growth[axis] = {m: [slope(x, [p[m + end] for p in points]) for end in ENDS] for m in METHODS}
        print(f"{axis:9s}" + "".join(f"  {m} {g[0]:5.2f} {g[1]:5.2f} {g[2]:5.2f}" for m, g in growth[axis].items()))
    ratios = {m: [p[m] / p[f"{m}_counted"] for points in rows.values() for p in points] for m in METHODS}
    worst = {m: (min(r), max(r)) for m, r in ratios.items()}
    print("measured over what is done, least and most:", {m: f"{a:.2f} to {b:.2f}" for m, (a, b) in worst.items()})
    if quick:
        return
    path = write_result("complexity", {"units": vars(units), "rows": rows, "growth": growth, "over_counted": worst})
    draw(rows, FIGURE)
    print(f"written: {path}, {FIGURE}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two small sizes a sweep, nothing written")
    main(parser.parse_args().quick)
