"""Many processes take the same steps as one, send what docs/scale.md says, and fail with a name."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import shared_fits
import torch
from processes import run_group

import gramtower as gt
from gramtower.distributed.shards import Rows, balanced
from gramtower.engine.towers import mlp
from gramtower.engine.towers.mlp import draw_rows_


@pytest.fixture(scope="module")
def alone():
    return shared_fits.trajectories(None, "even")


@pytest.mark.parametrize(("size", "cut", "which"), [(2, "even", "methods"), (4, "uneven", "float64")])
def test_many_processes_take_the_steps_of_one(size, cut, which, alone, tmp_path):
    assert_alike(run_group("shared_fits:trajectories", size, tmp_path, cut, which), alone)


def test_three_processes_do_so_in_all_of_the_library_and_send_the_bytes_of_the_formula(alone, tmp_path):
    many = run_group("shared_fits:trajectories_and_bytes", 3, tmp_path, "uneven")
    assert_alike([one["trajectories"] for one in many], alone)
    assert set(many[0]["trajectories"]) == set(shared_fits.MORE)
    for one in many:
        assert_bytes(one["bytes"], 3)


def assert_alike(many, alone):
    assert all(one == many[0] for one in many)  # the same numbers, to the bit, in every process
    for name, values in many[0].items():
        tolerance = 1e-3 if "float32" in name else 1e-9  # iterations amplify rounding
        assert values == pytest.approx(alone[name], rel=tolerance), name
        assert len(set(values)) == len(values)  # it moved in every iteration


def test_ranges_are_even_in_cost_and_may_be_empty():
    costs = np.random.default_rng(0).pareto(1.5, 5000)
    bounds = balanced(costs, 7)
    shares = np.add.reduceat(costs, bounds[:-1])
    assert np.ptp(shares) <= 2 * costs.max()
    assert balanced([1.0] * 12, 4) == (0, 3, 6, 9, 12)
    few = balanced([1.0, 1.0], 4)
    assert len(few) == 5
    assert sorted(np.diff(few)) == [0, 0, 1, 1]
    assert balanced([], 2) == (0, 0, 0)


def test_rows_chosen_over_all_processes_are_found_in_each():
    chosen = torch.tensor([0, 3, 4, 8, 9])
    parts = [Rows((0, 4, 4, 10), rank) for rank in range(3)]
    assert [part.local(chosen).tolist() for part in parts] == [[0, 3], [], [0, 4, 5]]
    assert [part.take(chosen).counts for part in parts] == [[2, 0, 3]] * 3


@pytest.mark.parametrize("rows", [(70_000, 3), (65_536, 5), (32_769, 1), (40, 3), (5, 1)])
def test_tables_are_drawn_as_one_process_would(rows):
    total, width = rows
    problem = gt.Problem(shared_fits.planted_pairs(40, 30, 100))
    whole = torch.empty(rows).normal_(std=0.3, generator=torch.Generator().manual_seed(5))
    later = []
    for first, stop in ((0, total // 3), (total // 3, total // 3), (total // 3, total)):
        features = problem.left
        features.rows = stop - first
        features.place(first, total, 1.0)
        generator = torch.Generator().manual_seed(5)
        own = torch.empty(stop - first, width)
        draw_rows_(own, features, 0.3, generator)
        assert torch.equal(own, whole[first:stop])
        later.append(float(torch.randn(1, generator=generator)))
    assert len(set(later)) == 1  # what is drawn next is the same in every process


def test_large_tables_are_the_same_for_any_number_of_processes_and_threads(monkeypatch):
    monkeypatch.setattr(mlp, "_MANY", 1000)
    monkeypatch.setattr(mlp, "_SHARE", 64 * 5)
    total, width, before = 1000, 5, torch.get_num_threads()
    features = gt.Problem(shared_fits.planted_pairs(40, 30, 100)).left
    drawn, later = [], []
    try:
        for threads, cuts in ((1, (0, 1000)), (3, (0, 1000)), (2, (0, 64, 64, 65, 300, 1000, 1000))):
            torch.set_num_threads(threads)
            parts = []
            for first, stop in itertools.pairwise(cuts):
                features.rows = stop - first
                features.place(first, total, 1.0)
                generator = torch.Generator().manual_seed(5)
                table = torch.nn.Parameter(torch.full((stop - first, width), torch.nan))
                draw_rows_(table, features, 0.3, generator)
                parts.append(table.detach())
                later.append(float(torch.randn(1, generator=generator)))
            drawn.append(torch.cat(parts))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[0], drawn[2])
    assert len(set(later)) == 1
    assert abs(drawn[0].std() - 0.3) < 0.02
    assert len(drawn[0].unique()) > 0.99 * drawn[0].numel()  # no block is drawn twice


def assert_bytes(found, size):
    """Those of a product are as docs/scale.md says."""
    for case in found:
        n, k, s = case["n"], case["k"], case["s"]
        expected = {
            "gather": (size - 1) * case["largest"] * k * s,
            "scatter": (n - case["own"]) * k * s,
            "reduce": sum(2 * (size - 1) * part // size for part in (k * k * 8, k * k * 8, case["shared"] * s)),
        }
        assert case["counted"] == {kind: count for kind, count in expected.items() if count}
        assert case["said"] == sum(expected.values())
        assert case["shared"] == 2 * (6 + 6 * 4 + 4)  # bias, second layer and its bias of two towers
    assert len(found) == 2
