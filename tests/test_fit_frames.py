"""Frames in: `fit(frame, left="user", right="item")`; and lists as frames."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import gramtower as gt
from gramtower.data.interactions import Interactions
from gramtower.data.lists import lists_frame

pl = pytest.importorskip("polars")
rng = np.random.default_rng(0)
COLUMNS = {
    "user": rng.integers(1000, 1030, size=500), "item": [f"i{x}" for x in rng.integers(25, size=500)],
    "stars": rng.integers(1, 6, size=500).astype(float), "when": rng.permutation(500).astype(float),
}  # fmt: skip
NAMES = dict(left="user", right="item")


def small(**options):
    return gt.TwoTower(**dict(dim=3, hidden=(), max_iterations=3, device="cpu", omega=0.1) | options)


def frame(kind):
    if kind == "pandas":
        return pytest.importorskip("pandas").DataFrame(COLUMNS)
    if kind == "pyarrow":
        return pytest.importorskip("pyarrow").table(COLUMNS)
    made = pl.DataFrame(COLUMNS)
    return {"polars": made, "lazy": made.lazy(), "mapping": COLUMNS}[kind]


@pytest.mark.parametrize("kind", ["polars", "lazy", "pandas", "pyarrow", "mapping"])
def test_a_frame_is_fitted_as_the_pairs_in_it(kind):
    model = small().fit(frame(kind), **NAMES, value="stars", threshold=4, time="when")
    expected = small().fit(Interactions.from_frame(frame("polars"), **NAMES, value="stars", threshold=4, time="when"))
    assert np.array_equal(model.embed(), expected.embed())
    assert model.left_.ids.dtype == np.int64
    assert isinstance(model.right_.ids[0], str)
    assert model.recommend([int(model.left_.ids[0])], k=2)[0].shape == (1, 2)


def test_values_without_a_threshold_are_labels_and_validation_has_the_same_columns():
    made = frame("polars")
    model = small(loss="squared").fit(made, **NAMES, value="stars")
    pairs = Interactions.from_frame(made, **NAMES, value="stars", labels=True)
    assert np.array_equal(model.embed(), small(loss="squared").fit(pairs).embed())
    halves = made[:400], made[400:]
    found = small().fit(halves[0], **NAMES, validation=halves[1], refit=True)
    parts = [Interactions.from_frame(half, **NAMES) for half in halves]
    expected = small().fit(parts[0], validation=parts[1], refit=True)
    assert found.best_metric_ == expected.best_metric_ is not None
    assert np.array_equal(found.embed(), expected.embed())
    assert found.update(halves[1], **NAMES).history_[-1].iteration == 2


@pytest.mark.parametrize(
    ("given", "arguments", "message"),
    [
        ("polars", {}, "pairs: got a DataFrame, expected left= and right= as well"),
        ("pandas", dict(left="user"), "pairs: got a DataFrame, expected left= and right= as well"),
        (
            "polars",
            dict(left="user", right="film"),
            "right: got 'film', expected one of the columns present: user, item",
        ),
        (
            "pairs",
            NAMES,
            "pairs: got Interactions with left='user', right='item', expected a polars, pandas or pyarrow",
        ),
        ("polars", NAMES | dict(threshold=3), "threshold"),
    ],
)
def test_columns_without_a_frame_and_frames_without_columns_are_refused(given, arguments, message):
    pairs = Interactions.from_frame(frame("polars"), **NAMES) if given == "pairs" else frame(given)
    with pytest.raises(ValueError, match=message):
        small().fit(pairs, **arguments)


@pytest.mark.parametrize("package", ["polars", "pandas"])
def test_lists_become_a_table_without_empty_places(package, monkeypatch):
    pytest.importorskip(package)
    if package == "pandas":
        monkeypatch.setitem(sys.modules, "polars", None)
    scores = np.array([[0.9, 0.5], [0.7, -np.inf]], dtype=np.float32)
    table = lists_frame([7, 8], np.array([["a", "b"], ["c", None]], dtype=object), scores, ("user", "item"))
    assert type(table).__module__.split(".")[0] == package
    assert list(table.columns) == ["user", "rank", "item", "score"]
    assert [list(table[name]) for name in ("user", "rank", "item")] == [[7, 7, 8], [1, 2, 1], ["a", "b", "c"]]
    assert list(table["score"]) == pytest.approx([0.9, 0.5, 0.7])


def test_lists_that_do_not_fit_are_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"asked, ids, scores: got 1 ids asked for, answers of shape \(2, 1\)"):
        lists_frame([1], np.zeros((2, 1)), np.zeros((2, 1)))
    for package in ("polars", "pandas"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=r'pip install "gramtower\[io\]"'):
        lists_frame([1], np.zeros((1, 1)), np.zeros((1, 1)))
