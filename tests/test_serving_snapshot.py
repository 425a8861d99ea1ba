"""Queries of several clients at a time are each answered as alone; searches, tables and the map say what is there."""

from __future__ import annotations

import math
import mmap
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from serving_cases import ITEMS, folder, genres, model, source

import gramtower as gt
from gramtower._util.checks import shown
from gramtower._util.host import release
from gramtower.data import frames
from gramtower.data.entity_table import EntityTable
from gramtower.serving.ann_index import Query, best_lists
from gramtower.serving.messages import Refused
from gramtower.serving.served_entities import Entities, RowIndex, project
from gramtower.serving.snapshot import Snapshot


@pytest.fixture(scope="module")
def snapshot():
    return Snapshot(source())


def test_a_batch_of_unlike_queries_is_answered_as_one_by_one(snapshot):
    asked = [
        (dict(k=3, left=["a/b", "007"]), dict()),
        (dict(k=9, left=["user 2"]), dict()),
        (dict(k=5, left=["user 2"], exclude_seen=False), dict(exclude_seen=False)),
        (dict(k=4, left=["a/b"], deny=["i1", "i7"]), dict(deny=["i1", "i7"])),
        (dict(k=4, left=["a/b"], allow=["i1", "i7", "i9", "i20"]), dict(allow=["i1", "i7", "i9", "i20"])),
        (dict(k=2, left=["007"], allow=["i1", "i7", "i9", "i20"]), dict(allow=["i1", "i7", "i9", "i20"])),
        (dict(k=2, left=["007"], allow=["i2"]), dict(allow=["i2"])),
        (dict(k=1000, left=["007"]), dict()),
        (dict(k=6, histories=[["i1", "i3"]], deny=["i4"]), dict(deny=["i4"])),
    ]
    answers = snapshot.recommend([snapshot.query(**query) for query, _ in asked])
    for (query, options), (found, scores) in zip(asked, answers, strict=True):
        new = {"histories": query["histories"]} if "histories" in query else {"left": query["left"]}
        ids, values = model().recommend(k=query["k"], **new, **options)
        k = min(query["k"], ITEMS)
        np.testing.assert_array_equal(np.where(found >= 0, snapshot.right.ids[found], None), ids[:, :k])
        np.testing.assert_allclose(scores, values[:, :k], rtol=1e-5)


def test_what_described_entities_with_known_ids_have_seen_is_left_out():
    snapshot = Snapshot(source("table", table=False))
    features = {"user": ["a/b", "nobody", None], "age": [21.0, 30.0, 40.0], "city": ["Lima", None, "Oslo"]}
    for options in ({}, {"histories": [["i1"], ["i2"], []]}, {"exclude_seen": False}):
        found, _ = snapshot.recommend([snapshot.query(ITEMS, left_features=features, **options)])[0]
        ids, _ = model("table").recommend(k=ITEMS, left_features=features, **options)
        np.testing.assert_array_equal(np.where(found >= 0, snapshot.right.ids[found], None), ids)
    with pytest.raises(Refused, match="whole numbers"):
        snapshot.query(3, left_features={"user": [1.5], "age": [21.0], "city": ["Lima"]})


def test_lists_leave_out_what_each_row_excludes_as_the_sorted_scores_do():
    generator = torch.Generator().manual_seed(0)
    P, Q = torch.randn(7, 5, generator=generator), torch.randn(31, 5, generator=generator)
    excluded = [np.flatnonzero(np.arange(31) % (row + 2) == 0) for row in range(7)]
    (found, values), = best_lists([Query(P, excluded, 31)], Q)  # fmt: skip
    for row in range(7):
        scores = (Q.double() @ P[row].double()).numpy()
        scores[excluded[row]] = -np.inf
        count = 31 - len(excluded[row])
        assert found[row, :count].tolist() == np.argsort(-scores)[:count].tolist()
        assert (found[row, count:] == -1).all()
        np.testing.assert_allclose(values[row, :count], np.sort(scores)[::-1][:count], atol=1e-6)


def test_embeddings_that_overflow_are_refused(monkeypatch):
    other = Snapshot(source("matrix", table=False))
    monkeypatch.setattr(other, "model", SimpleNamespace(embed=lambda **_: np.full((1, 6), np.inf, np.float32)))
    with pytest.raises(Refused, match="overflow"):
        other.query(3, left_features=[[1.0, 2.0, 3.0]])


def test_a_mapped_model_answers_alike(snapshot):
    mapped = Snapshot(source(mapped=True))
    query = dict(k=5, left=["a/b"])
    np.testing.assert_array_equal(
        mapped.recommend([mapped.query(**query)])[0][0], snapshot.recommend([snapshot.query(**query)])[0][0]
    )


def test_a_search_finds_ids_and_titles_beginnings_first(snapshot):
    found = snapshot.right.names(np.array(snapshot.right.search("i1", 100)))
    assert found[:11] == sorted((name for name in genres() if name.startswith("i1")), key=lambda x: found.index(x))
    assert set(found) == {name for name in genres() if name.startswith("i1")}
    assert snapshot.right.names(np.array(snapshot.right.search("THING 12,", 5))) == ["i12"]
    assert snapshot.right.names(np.array(snapshot.right.search("aïve", 3)))
    assert snapshot.left.names(np.array(snapshot.left.search("日本", 5))) == ["日本 😀"]
    assert snapshot.right.search("nothing like it", 5) == []
    popular = snapshot.right.search("", 3)
    assert snapshot.right.degrees[popular].tolist() == sorted(snapshot.right.degrees, reverse=True)[:3]


@pytest.mark.parametrize("odd", ["a\nb", "", "ß", "İ", "x" * 500])
def test_a_search_is_not_led_astray_by_odd_ids(odd):
    ids = np.array(["first", odd, "last"], dtype=object)
    this = Entities("left", ids, torch.zeros(3, 2), np.zeros(3, np.int64))
    assert this.search("last", 5) == [2]
    assert this.search("first", 5) == [0]
    assert not odd or 1 in this.search(odd, 5)


@pytest.mark.parametrize("kind", ["text", "numbers", "alike"])
def test_ids_are_found_as_in_a_dictionary(kind):
    class Alike(str):
        """Text whose hashes are few."""

        __slots__ = ()

        def __hash__(self):
            return len(self)

        def __eq__(self, other):
            return str.__eq__(self, other)

    rng = np.random.default_rng(0)
    if kind == "numbers":
        keys = [*range(-5, 5), 2**61 - 1, 2**62, *rng.permutation(1000)[:50].tolist(), -(2**61)]
        keys = list(dict.fromkeys(keys))
        ids = np.array(keys, np.int64)
    else:
        made = [f"{'x' * int(n)}{i}" for i, n in enumerate(rng.integers(0, 9, 300))]
        keys = [Alike(one) for one in made] if kind == "alike" else made
        ids = np.empty(len(keys), dtype=object)
        ids[:] = keys
    index = RowIndex(ids)
    assert [index.row(key) for key in keys] == list(range(len(keys)))
    assert list(index) == keys
    assert dict(index) == {key: row for row, key in enumerate(keys)}
    assert [stranger for stranger in ("zz", 10**9, -1.5, None, "", 10**400) if stranger in index] == []


def test_a_table_shows_filters_and_knows_who_has_no_row(snapshot):
    table = snapshot.right.table
    assert (table.title, table.joined) == ("title", ITEMS - 1)
    assert table.kinds == {"title": "text", "genre": "list", "year": "numeric"}
    five = snapshot.right.row("i5")
    assert table.cells(np.array([five])) == [{}]
    war = {name for name, found in genres().items() if "War" in found}
    assert set(snapshot.right.names(table.matching({"genre": "War"}))) == war
    assert set(snapshot.right.names(table.matching({"genre": ["War", "Opera"]}))) == war
    assert snapshot.right.names(table.matching({"year": 1987})) == ["i7"]
    assert snapshot.right.names(table.matching({"year": "1987"})) == ["i7"]
    assert five not in table.matching({"year": {"min": 0}})
    assert table.matching({}).tolist() == list(range(ITEMS))
    assert table.matching({"genre": True}).size == 0
    with pytest.raises(ValueError, match="'genre'"):
        table.matching({"genres": "War"})


def test_an_index_in_the_map_is_the_projection_on_the_first_two_singular_vectors(snapshot):
    drawn = project(snapshot.right)
    X = model().embed(side="right").astype(np.float64)
    centred = X - X.mean(0)
    U, S, _ = np.linalg.svd(centred, full_matrices=False)
    dense = (U[:, :2] * S[:2])[drawn.rows]
    signs = np.sign((dense * drawn.places).sum(0))
    np.testing.assert_allclose(drawn.places, dense * signs, atol=1e-4)
    assert drawn.shares == pytest.approx(tuple(S[:2] ** 2 / (S**2).sum()), rel=1e-6)
    assert (np.diff(snapshot.right.degrees[drawn.rows]) <= 0).all()
    assert len(project(snapshot.right, most=7).rows) == 7


def test_a_map_of_one_dimension_has_two():
    this = Entities("left", None, torch.tensor([[1.0], [3.0]]), np.ones(2, np.int64))
    assert project(this).places.tolist() == [[-1.0, 0.0], [1.0, 0.0]]


def test_long_values_are_cut_in_messages():
    assert len(shown("x" * 10**6)) < 70
    assert len(shown([1] * 10**5)) < 70
    assert shown("a") == "'a'"


def test_the_files_of_a_model_that_is_none_are_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        Snapshot(source(path=tmp_path / "none.gramtower"))
    with pytest.raises(ValueError, match=r"items\.csv"):
        Snapshot(source(path=folder() / "items.csv"))


@pytest.mark.skipif(sys.platform != "linux", reason="pages are given up on Linux alone")
def test_pages_of_a_mapped_file_are_given_up_and_come_back(tmp_path):
    pairs = gt.Interactions.from_arrays(list(range(2000)), [i % 50 for i in range(2000)])
    path = tmp_path / "model"
    gt.TwoTower(dim=32, hidden=(), max_iterations=1, device="cpu").fit(pairs).save(path)
    copied, mapped = gt.load(path), gt.load(path, mapped=True)
    before = copied.embed(side="left")
    assert release(path, copied.left_.embeddings) == 0  # memory of its own: giving it up would lose it
    given = release(path, mapped.left_.embeddings)
    assert 2000 * 32 * 4 - 2 * mmap.PAGESIZE <= given <= 2000 * 32 * 4
    np.testing.assert_array_equal(mapped.embed(side="left"), before)
    np.testing.assert_array_equal(copied.embed(side="left"), before)
    mapped.left_.embeddings[1000] += 1.0
    assert release(path, mapped.left_.embeddings) == 0  # what was written would be lost
    np.testing.assert_array_equal(mapped.embed(side="left")[1000], before[1000] + 1.0)
    np.testing.assert_array_equal(gt.load(path).embed(side="left"), before)


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (["1995.0", "", "2001.0"], [1995, None, 2001]),
        (["1995", " 7 ", "2001"], [1995, 7, 2001]),
        (["0.5", "2", "3e2"], [0.5, 2.0, 300.0]),
        ([1995.0, None, math.nan], [1995, None, None]),
        ([2**60 + 1, 2, 3], [2**60 + 1, 2, 3]),
    ],
)
def test_numeric_columns_are_answered_as_numbers(cells, expected):
    frame = frames.polars().DataFrame({"id": ["a", "b", "c"], "year": cells}, strict=False)
    table = EntityTable("--right-table", frame, "id", np.array(["a", "b", "c"], object), 3)
    found = [one["year"] for one in table.cells(np.arange(3))]
    assert found == expected
    assert [type(one) for one in found] == [type(one) for one in expected]
