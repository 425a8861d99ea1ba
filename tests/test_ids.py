"""Ids keep their type: coding, look-up, joins of numbers with text, near ids, and what is refused."""

from __future__ import annotations

import time
import uuid

import numpy as np
import pytest
import scipy.sparse as sp

import gramtower as gt
from gramtower._util import checks as check
from gramtower._util.checks import LeftOutWarning
from gramtower.data.ids import as_ids, as_known, as_objects, id_array, index_of, join, rows_of
from gramtower.data.interactions import Interactions
from gramtower.data.tables import FeatureTable

pl = pytest.importorskip("polars", reason="reading tables needs polars")


def pairs_of(pairs):
    coo = pairs.matrix.tocoo()
    return list(zip(pairs.left_ids[coo.row].tolist(), pairs.right_ids[coo.col].tolist(), strict=True))


def chunked(name, cells, size, **options):
    parts = [pl.Series(name, cells[k : k + size], **options) for k in range(0, len(cells), size)]
    return pl.concat(parts, rechunk=False)


@pytest.mark.parametrize("kind", [str, int])
def test_codes_do_not_depend_on_chunks(kind):
    rng = np.random.default_rng(0)
    left, right = ([kind(x) for x in rng.integers(-9, 40, 500).tolist()] for _ in range(2))
    frame = pl.DataFrame([chunked("u", left, 7), chunked("i", right, 7)])
    assert max(frame.n_chunks("all")) > 1
    assert sorted(pairs_of(Interactions.from_frame(frame, "u", "i"))) == sorted(set(zip(left, right, strict=True)))


def test_a_file_that_is_read_in_chunks_keeps_its_pairs(tmp_path):
    rng = np.random.default_rng(1)
    rows = [(f"u{a}", f"i{b}") for a, b in rng.integers(0, 3000, (40_000, 2))]
    (tmp_path / "p.csv").write_text("u,i\n" + "".join(f"{a},{b}\n" for a, b in rows))
    found = Interactions.from_csv(tmp_path / "p.csv", "u", "i")
    assert set(pairs_of(found)) == set(rows)
    assert found.left_ids.tolist() == list(dict.fromkeys(a for a, _ in rows))


def test_integer_ids_stay_integers_in_frames_parquet_and_arrays(tmp_path):
    frame = pl.DataFrame({"u": [3, -1, 3], "i": [2**40, 5, 5]}, schema={"u": pl.Int16, "i": pl.UInt64})
    frame.write_parquet(tmp_path / "p.parquet")
    frame.write_csv(tmp_path / "p.csv")
    for pairs in (
        Interactions.from_frame(frame, "u", "i"),
        Interactions.from_frame({"u": [3, -1, 3], "i": [2**40, 5, 5]}, "u", "i"),
        Interactions.from_parquet(tmp_path / "p.parquet", "u", "i"),
        Interactions.from_arrays([3, -1, 3], np.array([2**40, 5, 5])),
    ):
        assert pairs_of(pairs) == [(3, 2**40), (3, 5), (-1, 5)]
        assert pairs.left_ids.dtype == pairs.right_ids.dtype == np.int64
    assert pairs_of(Interactions.from_csv(tmp_path / "p.csv", "u", "i"))[0] == ("3", str(2**40))


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ([7.0, 8.0, 7.0], [7, 8]),
        ([7, "a", 7], ["7", "a"]),
        ([7.0, "a", "7"], ["7", "a"]),
        ([uuid.UUID(int=7), uuid.UUID(int=8), uuid.UUID(int=7)], [str(uuid.UUID(int=7)), str(uuid.UUID(int=8))]),
        ([uuid.UUID(int=7), "a", "a"], [str(uuid.UUID(int=7)), "a"]),
        ([np.int32(4), 5, np.uint8(4)], [4, 5]),
    ],
)
def test_one_type_is_found_for_a_column(cells, expected):
    for pairs in (
        Interactions.from_arrays(cells, [1, 2, 3]),
        Interactions.from_frame({"u": cells, "i": [1, 2, 3]}, "u", "i"),
    ):
        assert pairs.left_ids.tolist() == expected
        assert pairs.left_ids.dtype == (np.int64 if isinstance(expected[0], int) else object)


@pytest.mark.filterwarnings("ignore::gramtower._util.checks.LeftOutWarning")
def test_missing_ids_leave_numbers_numbers():
    for cells in ([7, None, 8], [7.0, float("nan"), 8.0], np.ma.masked_array([7, 1, 8], [False, True, False])):
        assert Interactions.from_arrays(cells, [1, 2, 3]).left_ids.tolist() == [7, 8]
    for cells in ([7, None, 8], [7, float("nan"), 8], [7.0, None, 8.0]):
        assert Interactions.from_frame({"u": cells, "i": [1, 2, 3]}, "u", "i").left_ids.tolist() == [7, 8]


@pytest.mark.parametrize(
    "cell", [True, 1.5, 2**63, 2.0**60, b"a", [1], (1,), np.datetime64("2020-01-01"), object(), "\ud800", float("inf")]
)
def test_what_is_no_id_is_refused_by_name(cell):
    with pytest.raises(ValueError, match="left:"):
        Interactions.from_arrays([cell], [1])
    with pytest.raises(ValueError, match="left:"):
        Interactions.from_frame({"u": [cell], "i": [1]}, "u", "i")


def test_columns_that_hold_no_ids_are_refused_by_name():
    for column in (pl.Series([True]), pl.Series([[1]]), pl.Series([1.5]), pl.Series([2**63], dtype=pl.UInt64)):
        with pytest.raises(ValueError, match=r"left:.*'u'"):
            Interactions.from_frame(pl.DataFrame({"u": column, "i": [1]}), "u", "i")


def test_arrays_that_hold_no_ids_are_refused_by_name():
    for array in (np.array([True]), np.array(["2020"], "datetime64[ns]"), np.array([b"a"]), np.ones(1, complex)):
        with pytest.raises(ValueError, match=r"left.*array"):
            Interactions.from_arrays(array, [1])


def test_asking_for_a_number_among_text_says_why_not():
    index = index_of(as_objects(["7", "b"]))
    with pytest.raises(ValueError, match=r"unknown.* 7.*text.*'7'"):
        rows_of("ids", [7], index)
    with pytest.raises(ValueError, match=r"unknown.*'8'.*whole numbers.* 8"):
        rows_of("ids", ["8"], index_of(np.array([7, 8])))
    with pytest.raises(ValueError, match=r"unknown.*'07'.*whole numbers"):
        rows_of("ids", ["07"], index_of(np.array([7, 8])))
    with pytest.raises(ValueError, match=r"ids.*True"):
        rows_of("ids", [True], index_of(np.array([0, 1])))


def test_joins_match_a_number_with_the_text_that_writes_it():
    texts, numbers = as_objects(["7", "007", "-3", "x", "+7", " 7"]), np.array([-3, 7])
    assert join(texts, index_of(numbers)).tolist() == [1, -1, 0, -1, -1, -1]
    assert join(numbers, index_of(texts)).tolist() == [2, 0]
    assert as_known(["7", "007", "x"], numbers) == [7, "007", "x"]
    assert as_known(["7"], texts) == ["7"]


def test_a_model_of_integers_answers_with_integers(tmp_path):
    frame = pl.DataFrame(
        {"u": [u for u in range(6) for _ in range(2)], "i": [10 + (u + d) % 4 for u in range(6) for d in (0, 1)]}
    )
    table = FeatureTable({"i": ["10", "11", "12", "13"], "x": [1.0, 2.0, 3.0, 4.0]}, id="i", numeric=["x"], strict=True)
    model = gt.TwoTower(dim=2, hidden=(), max_iterations=1, device="cpu")
    model.fit(Interactions.from_frame(frame, "u", "i"), right_features=["id", table])
    model.save(tmp_path / "m.gramtower")
    for one in (model, gt.load(tmp_path / "m.gramtower")):
        ids, scores = one.recommend([1, 5], 3, allow=[10, 13], deny=[13])
        assert ids.dtype == np.int64
        assert ids[np.isfinite(scores)].tolist() == [10, 10]
        assert (ids[~np.isfinite(scores)] == -1).all()
        assert set(one.similar(10, k=3)[0][0].tolist()) == {11, 12, 13}
        with pytest.raises(ValueError, match=r"whole numbers.*1"):
            one.recommend(["1"])
    test = Interactions.from_arrays(["0", "1"], ["12", "13"])  # as a CSV file would give them
    assert model.evaluate(test, ["recall@2"]) == model.evaluate(
        Interactions.from_arrays([0, 1], [12, 13]), ["recall@2"]
    )
    more = Interactions.from_arrays(["0", "6"], ["12", "99"])
    before = model.right_.ids.tolist()
    columns = {"i": [99, *map(int, before)], "x": [float(x) for x in range(len(before) + 1)]}
    model.update(more, right_features=["id", FeatureTable(columns, id="i", numeric=["x"])])
    assert model.right_.ids.tolist() == [*before, 99]


def test_pairs_of_unknown_ids_are_warned_of_and_all_of_them_refused():
    pairs = Interactions.from_arrays([1, 2, 3], [1, 2, 3])
    model = gt.TwoTower(dim=2, hidden=(), max_iterations=1, device="cpu")
    some = Interactions.from_arrays([1, 2, 9], [2, 7, 2])
    with pytest.warns(LeftOutWarning, match=r"2 of 3 pairs.*validation.*7"):
        model.fit(pairs, validation=some)
    with pytest.raises(ValueError, match=r"test.*'01'"):
        model.evaluate(Interactions.from_arrays(["01"], ["1"]))


def test_near_ids_are_found_quickly_among_many():
    ids = {f"user-{k}": k for k in range(300_000)}
    start = time.perf_counter()
    assert check.near("user_299999", ids)[0] == "user-299999"
    assert check.near("USER-5", ids) == ["user-5"]
    assert check.near("x" * 5000, ids) == []
    assert time.perf_counter() - start < 5  # all ids compared letter by letter take longer


def test_ids_that_are_given_are_distinct_and_all_there():
    assert as_ids("ids", range(3)).tolist() == [0, 1, 2]
    assert id_array("ids", pl.Series([1, None]))[1].tolist() == [False, True]
    for wrong, message in (([1, 1], "1 twice"), (["a", None], "no id at place 1"), ("ab", "a sequence of ids")):
        with pytest.raises(ValueError, match=message):
            as_ids("ids", wrong)
    assert (
        Interactions(sp.eye(2, format="csr"), np.array(["a", "b"]), np.array([1, 2], np.int8)).right_ids.dtype
        == np.int64
    )


def test_pandas_columns_keep_their_type_with_and_without_pyarrow(monkeypatch):
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    frame = pandas.DataFrame(
        {"u": pandas.array([7, None, 8], dtype="Int64"), "i": ["a", pandas.NA, "b"], "v": [uuid.UUID(int=1)] * 3}
    )

    def without_pyarrow(*_):
        raise ModuleNotFoundError("pyarrow")

    for there in (True, False):
        if not there:
            monkeypatch.setattr(pl, "from_pandas", without_pyarrow)
        with pytest.warns(LeftOutWarning):
            pairs = Interactions.from_frame(frame, "u", "i")
        assert pairs_of(pairs) == [(7, "a"), (8, "b")]
        assert Interactions.from_frame(frame, "v", "v").left_ids.tolist() == [str(uuid.UUID(int=1))]
