"""Many processes take the same steps as one, send what docs/scale.md says, and fail with a name."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import shared_fits
import torch
from processes import run_group

import gramtower as gt
from gramtower.distributed.shards import Rows, balanced
from gramtower.engine.towers import id_tables
from gramtower.engine.towers.id_tables import draw_rows_


@pytest.fixture(scope="module")
def alone():
    return shared_fits.trajectories(None, "even", "more")


@pytest.mark.parametrize(("size", "cut", "more"), [(2, "even", ()), (3, "uneven", ("more",)), (4, "uneven", ())])
def test_many_processes_take_the_steps_of_one(size, cut, more, alone, tmp_path):
    many = run_group("shared_fits:trajectories", size, tmp_path, cut, *more)
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


@pytest.mark.parametrize("rows", [100, 128, 130, 7])
def test_large_tables_are_drawn_in_parallel_and_as_one_process_would(rows, monkeypatch):
    monkeypatch.setattr(id_tables, "_LARGE", 1)
    monkeypatch.setattr(id_tables, "_BLOCK", 16)
    features, found = gt.Problem(shared_fits.planted_pairs(40, 30, 100)).left, []
    for cuts, threads in (((0, rows), 1), ((0, rows), 3), ((0, rows // 3, rows // 3, rows), 1)):
        parts, later = [], []
        for first, stop in pairwise(cuts):
            features.rows = stop - first
            features.place(first, rows, 1.0)
            generator = torch.Generator().manual_seed(5)
            own = torch.empty(stop - first, 5)
            before = torch.get_num_threads()
            torch.set_num_threads(threads)
            try:
                draw_rows_(own, features, 0.3, generator)
            finally:
                torch.set_num_threads(before)
            parts.append(own)
            later.append(float(torch.randn(1, generator=generator)))
        found.append((torch.cat(parts), later[0]))
        assert len(set(later)) == 1
    assert all(torch.equal(table, found[0][0]) and next_one == found[0][1] for table, next_one in found)
    assert len(found[0][0].unique()) == rows * 5  # no block is another one
    assert found[0][0].std() == pytest.approx(0.3, rel=0.3)


def test_bytes_of_a_product_are_those_of_the_formula(tmp_path):
    size = 3
    for rank, found in enumerate(run_group("shared_fits:product_bytes", size, tmp_path)):
        for case in found:
            n, k, s = case["n"], case["k"], case["s"]
            expected = {
                "gather": (size - 1) * case["largest"] * k * s,
                "scatter": (n - case["own"]) * k * s,
                "reduce": sum(2 * (size - 1) * part // size for part in (k * k * 8, k * k * 8, case["shared"] * s)),
            }
            assert case["counted"] == {kind: count for kind, count in expected.items() if count}, rank
            assert case["said"] == sum(expected.values())
            assert case["shared"] == 2 * (6 + 6 * 4 + 4)  # bias, second layer and its bias of two towers
