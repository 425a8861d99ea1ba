"""A small run on generated data: evaluate the all-pairs objective, take Gauss-Newton steps, watch it fall.

Two thousand users and fifteen hundred items with planted groups: three million pairs, of which forty thousand were
observed. Every step sees all of them, at the cost of a few passes over 3,500 entities.
"""

from __future__ import annotations

import time

import torch

import gramtower as gt
from gramtower.data.synthetic import planted_pairs


def main() -> None:
    problem = gt.Problem(planted_pairs(2000, 1500, 40_000, seed=0), omega=2**-4, l2=1.0)
    towers = gt.mlp_towers(problem, hidden=(64, 64), dim=32, seed=0)
    print(problem)
    start = time.perf_counter()
    point = problem.at(towers)
    for iteration in range(10):
        gradient = point.gradient()
        print(
            f"iter {iteration:2d}  L {point.value:12.2f}  |g| {gradient.norm():9.3e}  {time.perf_counter() - start:5.1f} s"
        )
        direction = conjugate_gradient(point.gauss_newton(damping=1.0), gradient, steps=20)
        step, line = 1.0, point.along(direction)
        while (trial := line(step)).value > point.value + 1e-4 * step * gradient.dot(direction):
            step /= 2
        point = trial
    towers.load(point.parameters)
    seen = problem.pairs.columns[problem.pairs.offsets[0] : problem.pairs.offsets[1]].long()
    scores = point.P[0] @ point.Q.t()
    scores[seen] = -torch.inf
    print("five new items for user 0:", scores.topk(5).indices.tolist())


def conjugate_gradient(G: object, gradient: gt.Parameters, steps: int) -> gt.Parameters:
    """A few conjugate gradient steps on G s = -gradient."""
    s, r = gradient.zeros(), -gradient
    d, gamma = r.clone(), r.dot(r)
    for _ in range(steps):
        Gd = G @ d
        t = gamma / d.dot(Gd)
        s.axpy_(t, d)
        r.axpy_(-t, Gd)
        gamma, before = r.dot(r), gamma
        d = r + d * (gamma / before)
    return s


if __name__ == "__main__":
    main()
