"""The scripts of benchmarks/quality: their splits, lists and baselines."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

import gramtower as gt
from gramtower.data.datasets import planted_pairs
from gramtower.data.splits import per_user
from gramtower.metrics import evaluate_embeddings

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks" / "quality"


@pytest.fixture(scope="module")
def quality():
    """The scripts as modules; their names are taken out of the way again afterwards."""
    before, known = list(sys.path), set(sys.modules)
    sys.path.insert(0, str(FOLDER))
    import baselines
    import data
    import grid
    import rows
    import run
    import search

    yield {module.__name__: module for module in (baselines, data, grid, rows, run, search)}
    sys.path[:] = before
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(FOLDER.parent)):
            del sys.modules[name]


def test_the_inner_split_is_the_librarys(quality):
    pairs = planted_pairs(m=50, n=40, observed=600)
    train, held = quality["data"].inner_split(pairs, 0.1, 3)
    split = per_user(gt.Interactions.from_matrix(pairs), 0.1, minimum=1, seed=3)
    assert (train != split.train.matrix).nnz == 0
    assert (held != split.test.matrix).nnz == 0


def test_lists_come_back_as_they_were_written(quality, tmp_path):
    ids = dict(left=["a b", "c"], right=["x", "y z", "w"])
    data = quality["data"].Data("moby", sp.csr_matrix((2, 3)), None, **ids, separator=",")
    lists = np.full((2, 20), -1)
    lists[0, :2], lists[1, :3] = [2, 0], [1, 0, 2]
    quality["run"].write_lists(tmp_path / "lists.txt.xz", data, lists)
    assert np.array_equal(quality["run"].read_predictions(tmp_path / "lists.txt.xz", data), lists)


def test_lists_of_numbers_are_read(quality, tmp_path):
    (tmp_path / "t.txt").write_text("0 1 2\n2 0\n1\n")
    assert quality["data"].read_lists(tmp_path / "t.txt").toarray().tolist() == [[0, 1, 1], [0, 0, 0], [1, 0, 0]]


def test_the_sampled_softmax_learns_groups_that_popularity_cannot_see(quality):
    pairs = planted_pairs(m=120, n=60, observed=1200, groups=3, affinity=0.95, skew=0.3)
    train, held = quality["data"].inner_split(pairs, 0.2)
    baselines = quality["baselines"]
    softmax = baselines.softmax(train, dim=8, hidden=(16,), learning_rate=0.02, batch=256, epochs=12, device="cpu")
    scores = [
        evaluate_embeddings(*found, held, train=train, metrics="ndcg@10")["ndcg@10"]
        for found in (softmax, baselines.popularity(train))
    ]
    assert scores[0] > 2 * scores[1]


def test_a_grid_config_is_the_problem_it_says(quality):
    train = planted_pairs(m=30, n=20, observed=200)
    grid = quality["grid"]
    problem = grid.problem_of(train, {**grid.DEFAULTS, "share": 3.0, "left_power": 0.5, "frequency_power": 0.5})
    unobserved = 30 * 20 - train.nnz
    assert problem.omega * unobserved == pytest.approx(3.0 * train.nnz)
    assert problem.weight_arrays[0] is not None
    assert problem.weight_arrays[1] is None
    with pytest.raises(ValueError, match="configs: got dims"):
        grid.read_configs('[{"dims": 3}]')


@pytest.mark.parametrize("name", ["gowalla", "yelp2018", "ml1m", "moby"])
def test_stored_settings_are_those_of_a_model(quality, name):
    """Every stored config makes its model, on a small matrix and with one iteration."""
    train = planted_pairs(m=30, n=20, observed=200)
    for row in ("ours", "hidden"):
        settings = quality["rows"].stored(name, row)
        assert settings["max_iterations"] >= 1
        P, Q, _ = quality["rows"].train(row, train, {**settings, "dim": 4, "max_iterations": 1}, "cpu")
        assert (len(P), len(Q)) == train.shape
    P, Q, _ = quality["rows"].train("ours", train, {}, "cpu")  # without any, the library's defaults
    assert np.array_equal(P.numpy(), gt.TwoTower(device="cpu").fit(train).embed())
    assert quality["rows"].stored(name, "softmax")["epochs"] >= 1
    assert quality["rows"].stored(name, "als")["factors"] >= 1
