"""Pairs from files, frames and arrays: ids, labels, duplicates, order of entries, and bad input."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import warnings

import numpy as np
import pytest
import scipy.sparse as sp
from cases import zstandard

from gramtower._util.checks import LeftOutWarning
from gramtower.data.ids import by_appearance
from gramtower.data.interactions import Interactions
from gramtower.data.matrices import ordered

pl = pytest.importorskip("polars", reason="reading tables needs polars")

TABLE = "user,item,rating,when\n007,a,5,30\n7,b,2,10\n007,b,4,20\n7,a,4,40\n"


def written(folder, text=TABLE, name="pairs.csv"):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def as_dict(pairs):
    entries = pairs.matrix.tocoo()
    return {
        (pairs.left_ids[i], pairs.right_ids[j]): x
        for i, j, x in zip(entries.row, entries.col, entries.data, strict=True)
    }


def test_ids_stay_text_and_are_numbered_by_first_appearance(tmp_path):
    pairs = Interactions.from_csv(written(tmp_path), "user", "item")
    assert pairs.left_ids.tolist() == ["007", "7"]
    assert pairs.right_ids.tolist() == ["a", "b"]
    assert (pairs.left_name, pairs.right_name, pairs.shape, len(pairs)) == ("user", "item", (2, 2), 4)
    assert pairs.matrix.dtype == np.float32
    assert pairs.times is None
    assert pairs.weights is None


@pytest.mark.parametrize("total", [0, 1, 1000, 200_001])
def test_codes_are_renumbered_by_first_appearance(total):
    codes = np.random.default_rng(0).geometric(0.001, total).astype(np.uint32)  # some numbers do not occur
    known = {}
    expected = [known.setdefault(code, len(known)) for code in codes.tolist()]
    found, places = by_appearance(codes)
    assert found.tolist() == expected
    assert places.tolist() == [expected.index(code) for code in range(len(known))]


def test_a_threshold_keeps_high_values_and_counts_the_others(tmp_path):
    pairs = Interactions.from_csv(written(tmp_path), "user", "item", value="rating", time="when", threshold=4)
    assert as_dict(pairs) == {("007", "a"): 1, ("007", "b"): 1, ("7", "a"): 1}
    assert pairs.times.tolist() == [30, 20, 40]
    assert pairs.report["rows_below_threshold"] == 1


def test_values_are_labels_only_when_asked(tmp_path):
    path = written(tmp_path)
    labelled = Interactions.from_csv(path, "user", "item", value="rating", labels=True)
    assert as_dict(labelled)["7", "b"] == 2
    assert set(as_dict(Interactions.from_csv(path, "user", "item", value="rating")).values()) == {1}


def test_a_label_of_zero_is_still_an_observed_pair():
    pairs = Interactions.from_arrays(["a"], ["b"], value=[0.0], labels=True)
    assert (len(pairs), pairs.matrix.data.tolist()) == (1, [0.0])


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress, bz2.compress], ids=["gz", "xz", "bz2"])
def test_compressed_files_read_alike(tmp_path, pack):
    ending = {gzip.compress: "gz", lzma.compress: "xz", bz2.compress: "bz2"}[pack]
    pairs = Interactions.from_csv(written(tmp_path, pack(TABLE.encode()), f"p.csv.{ending}"), "user", "item")
    assert as_dict(pairs) == as_dict(Interactions.from_csv(written(tmp_path), "user", "item"))


def test_zstandard_parquet_frames_and_arrays_agree_with_csv(tmp_path):
    options = dict(value="rating", time="when", labels=True)
    whole = Interactions.from_csv(written(tmp_path), "user", "item", **options)
    frame = pl.read_csv(io.StringIO(TABLE), schema_overrides={"user": pl.String})
    frame.write_parquet(tmp_path / "p.parquet")
    (tmp_path / "p.csv.zst").write_bytes(zstandard(frame.write_csv().encode()))
    columns = {name: frame[name].to_list() for name in frame.columns}
    given = {"value": columns["rating"], "time": columns["when"], "labels": True}
    others = [
        Interactions.from_csv(tmp_path / "p.csv.zst", "user", "item", **options),
        Interactions.from_csv(TABLE.encode(), 0, 1, value=2, time=3, labels=True),
        Interactions.from_parquet(tmp_path / "p.parquet", "user", "item", **options),
        Interactions.from_frame(frame, "user", "item", **options),
        Interactions.from_frame(frame.lazy(), "user", "item", **options),
        Interactions.from_frame(columns, "user", "item", **options),
        Interactions.from_arrays(columns["user"], columns["item"], **given),
        Interactions.from_arrays(np.array(columns["user"]), np.array(columns["item"]), **given),
    ]
    for other in others:
        assert (other.left_ids.tolist(), other.right_ids.tolist()) == (
            whole.left_ids.tolist(),
            whole.right_ids.tolist(),
        )
        assert (other.matrix != whole.matrix).nnz == 0
        assert other.times.tolist() == whole.times.tolist()
        assert other.report == whole.report


def test_pandas_and_pyarrow_tables_are_taken():
    columns = {"u": ["007", None, "7"], "i": [1, 2, 3], "w": [0.5, 1.0, 2.0]}
    for name in ("pandas", "pyarrow"):
        library = pytest.importorskip(name, reason=f"{name} is not installed")
        frame = library.DataFrame(columns) if name == "pandas" else library.table(columns)
        with pytest.warns(LeftOutWarning, match=r"^1 of 3 rows"):
            pairs = Interactions.from_frame(frame, "u", "i", weight="w")
        assert as_dict(pairs) == {("007", 1): 1, ("7", 3): 1}
        assert pairs.weights.tolist() == [0.5, 2.0]


REPEATED = dict(left=["u", "v", "u", "u"], right=["x", "x", "x", "y"], value=[3, 9, 2, 7], weight=[1, 1, 5, 1])


@pytest.mark.parametrize(
    ("rule", "times", "label", "weight", "time"),
    [
        ("max", [9, 1, 4, 1], 3, 5, 9),
        ("sum", [9, 1, 4, 1], 5, 6, 9),
        ("first", None, 3, 1, None),
        ("last", None, 2, 5, None),
        ("first", [9, 1, 4, 1], 2, 5, 4),
        ("last", [9, 1, 4, 1], 3, 1, 9),
        ("last", [4, 1, 4, 1], 2, 5, 4),
    ],
)
def test_rows_of_one_pair_are_merged_by_the_rule(rule, times, label, weight, time):
    pairs = Interactions.from_arrays(**REPEATED, time=times, labels=True, duplicates=rule)
    assert as_dict(pairs) == {("u", "x"): label, ("v", "x"): 9, ("u", "y"): 7}
    assert pairs.weights.tolist() == [weight, 1, 1]
    assert (pairs.times is None) if times is None else (pairs.times[0] == time)
    assert pairs.report["rows_merged"] == 1


def test_repeated_pairs_can_be_an_error():
    with pytest.raises(ValueError, match=r"duplicates.*1"):
        Interactions.from_arrays(**REPEATED, labels=True, duplicates="error")


@pytest.mark.parametrize("rule", ["max", "sum", "first", "last"])
def test_merging_agrees_with_a_dictionary(rule):
    rng = np.random.default_rng(3)
    left, right = rng.integers(0, 23, 700), rng.integers(5, 36, 700)
    value, weight = rng.normal(size=700).astype(np.float32), rng.random(700).astype(np.float32)
    pairs = Interactions.from_arrays(left, right, value=value, weight=weight, labels=True, duplicates=rule)
    rows = {}
    for i, j, x, w in zip(left, right, value, weight, strict=True):
        rows.setdefault((i, j), []).append((x, w))
    pick = {"max": lambda x: max(x), "sum": lambda x: sum(x), "first": lambda x: x[0], "last": lambda x: x[-1]}[rule]
    found = as_dict(pairs)
    assert found.keys() == rows.keys()
    np.testing.assert_allclose([found[k] for k in rows], [pick([x for x, _ in rows[k]]) for k in rows], rtol=1e-5)
    weights = as_dict(Interactions(pairs.matrix.copy(), pairs.left_ids, pairs.right_ids))
    weights = dict(zip(weights, pairs.weights, strict=True))
    np.testing.assert_allclose([weights[k] for k in rows], [pick([w for _, w in rows[k]]) for k in rows], rtol=1e-5)
    assert pairs.left_ids.tolist() == list(dict.fromkeys(left.tolist()))
    columns = np.split(pairs.matrix.indices, pairs.matrix.indptr[1:-1])
    assert all((np.diff(row) > 0).all() for row in columns)


@pytest.mark.parametrize("largest", [1, 50, 2**22])
def test_entries_are_in_order_of_row_column_and_place(largest):
    rng = np.random.default_rng(4)
    rows, columns = rng.integers(0, largest, 999) // 7, rng.integers(0, 9, 999)  # 2^22: no bits left for the place
    expected = np.lexsort((np.arange(999), columns, rows))
    keys, places = ordered(rows.astype(np.int32), columns.astype(np.int32), bits=43, places=True)
    assert places.tolist() == expected.tolist()
    assert [divmod(key, 2**43) for key in keys.tolist()] == [(rows[e], columns[e]) for e in expected]
    alone, nothing = ordered(rows, columns, bits=43, places=False)
    assert alone.tolist() == keys.tolist()
    assert nothing is None


def test_rows_without_id_or_number_are_left_out_and_counted(tmp_path):
    text = "u,i,r\na,x,1\n,x,1\nb,,1\nc,y,\n"
    loss = r"more than half: 3 of 4 rows are left out \(2 without an id, 1 without a value, weight or time\)"
    with pytest.warns(LeftOutWarning, match=loss):
        pairs = Interactions.from_csv(written(tmp_path, text), "u", "i", value="r", labels=True)
    assert as_dict(pairs) == {("a", "x"): 1}
    assert (pairs.report["rows"], pairs.report["rows_without_id"], pairs.report["rows_without_number"]) == (4, 2, 1)
    with pytest.warns(LeftOutWarning, match=loss):
        same = Interactions.from_arrays(
            ["a", None, "b", "c"], ["x", "x", None, "y"], value=[1, 1, 1, np.nan], labels=True
        )
    assert same.report == pairs.report


def test_a_hundredth_of_the_rows_may_be_left_out_without_a_warning():
    pairs = Interactions.from_arrays([None, *range(99)], [0] * 100)
    assert (pairs.report["rows_without_id"], len(pairs)) == (1, 99)


def test_dates_become_seconds(tmp_path):
    text = "u,i,t\na,x,1970-01-02\nb,x,1970-01-03\n"
    pairs = Interactions.from_csv(written(tmp_path, text), "u", "i", time="t")
    assert pairs.times.tolist() == [86400, 172800]
    late = "u,i,t\n" + "a,x,1\n" * 200 + "b,x,2.5\n"  # whole numbers at first
    assert Interactions.from_csv(written(tmp_path, late), "u", "i", time="t").times.tolist() == [1, 2.5]
    zones = pl.DataFrame({"u": ["a"], "i": ["x"], "t": ["1970-01-01T02:00:00+0100"]}).with_columns(
        pl.col("t").str.to_datetime(format="%Y-%m-%dT%H:%M:%S%z")
    )
    assert Interactions.from_frame(zones, "u", "i", time="t").times.tolist() == [3600]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("", {}, "is empty"),
        ("user,item\n", {}, "no rows"),
        ("usr,item\na,b\n", {}, r"left.*'user'"),
        (b"user,item\n\xff\xfe,a\n", {}, "utf8"),
        ("user,item,r\na,b,high\n", {"value": "r", "threshold": 1}, r"value.*'high'.*'r'"),
        ("user,item,t\na,b,soon\n", {"time": "t"}, r"time.*'soon'"),
        ("user,item\na,b,c,d\n", {}, "cannot be read"),
        (TABLE, {"threshold": 4}, r"value.*None"),
        (TABLE, {"value": "rating", "threshold": 4, "labels": True}, r"labels.*threshold"),
        (TABLE, {"value": "rating", "threshold": 9}, "rows_below_threshold 4"),
        (TABLE, {"duplicates": "mean"}, r"duplicates.*'mean'.*'max'"),
        (TABLE, {"separator": "::"}, "separator"),
        (TABLE, {"value": 9}, r"value.*9"),
    ],
)
def test_bad_files_and_options_are_named(tmp_path, text, options, message):
    with pytest.raises(ValueError, match=message):
        Interactions.from_csv(written(tmp_path, text), "user", "item", **options)


def test_bad_arrays_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"right.*\(1,\)"):
        Interactions.from_arrays(["a", "b"], ["x"])
    with pytest.raises(ValueError, match=r"left.*b'a'"):
        Interactions.from_arrays([b"a"], ["x"])
    with pytest.raises(ValueError, match=r"weight.*infinite"):
        Interactions.from_arrays(["a"], ["x"], weight=[np.inf])
    with pytest.raises(FileNotFoundError, match=r"nothing\.csv"):
        Interactions.from_csv(tmp_path / "nothing.csv", "user", "item")
    with pytest.raises(ValueError, match=r"pairs\.csv.*Parquet"):
        Interactions.from_parquet(written(tmp_path), "user", "item")
    with pytest.raises(ValueError, match=r"frame.*int"):
        Interactions.from_frame(3, "user", "item")


def test_other_encodings_can_be_named(tmp_path):
    path = written(tmp_path, "user,item\ncafé,a\n".encode("latin-1"))
    assert Interactions.from_csv(path, "user", "item", encoding="latin-1").left_ids.tolist() == ["café"]


def test_rows_of_ids_and_unknown_ids_with_the_nearest_known():
    pairs = Interactions.from_arrays(["ann", "bob", 7], ["Heat (1995)", "Speed", "Alien"], left_name="user")
    assert pairs.left_rows(["bob", "7", "ann"]).tolist() == [1, 2, 0]
    assert pairs.right_rows("Speed").tolist() == [1]
    with pytest.raises(ValueError, match=r"user:.*'anne'.*'ann'.*'zzz'.*3"):
        pairs.left_rows(["anne", "bob", "zzz"])
    many = Interactions.from_arrays([f"user-{k}" for k in range(5000)], ["x"] * 5000)
    with pytest.raises(ValueError, match=r"nearest.*'user-4999'"):
        many.left_rows(["user_4999"])


def test_a_subset_keeps_ids_times_and_weights():
    pairs = Interactions.from_arrays(list("aabc"), list("xyxy"), time=[1, 2, 3, 4], weight=[5, 6, 7, 8])
    by_mask, by_place = pairs.subset(pairs.times > 1.5), pairs.subset([3, 1, 2])
    for part in (by_mask, by_place):
        assert as_dict(part) == {("a", "y"): 1, ("b", "x"): 1, ("c", "y"): 1}
        assert part.times.tolist() == [2, 3, 4]
        assert part.weights.tolist() == [6, 7, 8]
        assert part.left_ids is pairs.left_ids
    assert len(pairs.subset([])) == 0
    for wrong in ([4], [1, 1], [True], [0.5]):
        with pytest.raises(ValueError, match="entries"):
            pairs.subset(wrong)


def test_other_pairs_of_the_same_entities():
    pairs = Interactions.from_arrays(list("ab"), list("xy"), time=[1, 2])
    other = pairs.with_matrix(sp.coo_matrix(([1.0, 2.0], ([1, 1], [0, 0])), shape=(2, 2)))
    assert as_dict(other) == {("b", "x"): 3}
    assert other.times is None
    with pytest.raises(ValueError, match=r"matrix.*\(3, 2\)"):
        pairs.with_matrix(sp.eye(3, 2))
    assert Interactions.from_matrix(sp.eye(2, 3)).right_ids.tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match=r"left_ids.*'a'"):
        Interactions.from_matrix(sp.eye(2), ["a", "a"])


def test_entities_without_pairs_are_dropped_with_the_pairs_as_they_were():
    whole = Interactions.from_arrays(
        list("aabcd"), list("xyzxw"), value=[5, 4, 3, 2, 1], labels=True, weight=[1, 2, 3, 4, 5], time=[9, 8, 7, 6, 5]
    )
    few = whole.subset(whole.times > 6.5)
    kept = few.without_empty()
    assert (kept.left_ids.tolist(), kept.right_ids.tolist()) == (["a", "b"], ["x", "y", "z"])
    assert kept.matrix.toarray().tolist() == [[5, 4, 0], [0, 0, 3]]
    assert (kept.times.tolist(), kept.weights.tolist()) == ([9, 8, 7], [1, 2, 3])
    assert kept.report == {"pairs": 3, "left": 2, "right": 3}
    assert kept.left_rows("b").tolist() == [1]
    assert kept.without_empty() is kept
    assert whole.subset([]).without_empty().shape == (0, 0)
    middle = whole.subset([0, 3]).without_empty()  # rows and columns between others go
    assert (middle.left_ids.tolist(), middle.matrix.toarray().tolist()) == (["a", "c"], [[5], [2]])


def test_ids_of_the_constructor_may_be_lists_and_must_be_distinct():
    pairs = Interactions(sp.csr_matrix(np.eye(2, dtype=np.float32)), ["a", "b"], (3, 4))
    assert pairs.left_ids.tolist() == ["a", "b"]
    assert pairs.right_ids.dtype == np.int64
    with pytest.raises(ValueError, match=r"left_ids.*'a'"):
        Interactions(sp.csr_matrix(np.eye(2, dtype=np.float32)), ["a", "a"], [1, 2])


def test_a_text_that_is_no_date_is_named():
    text = b"user,item,when\n1,2,2020-01-01\n3,4,yesterday\n"
    with pytest.raises(ValueError, match=r"time:.*'yesterday'.*'when'"):
        Interactions.from_csv(text, "user", "item", time="when")


@pytest.mark.parametrize("lines", ["a,x\nb,y\na,y\nb,x\n", "1,7\n2,8\n1,8\n2,7\n"])
def test_a_first_line_of_ids_that_is_taken_for_names_is_told(tmp_path, lines):
    path = tmp_path / "pairs.csv"
    path.write_text(lines)
    with pytest.warns(LeftOutWarning, match=r"first line.*header=False"):
        assert len(Interactions.from_csv(path, 0, 1)) == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(Interactions.from_csv(path, 0, 1, header=False)) == 4
        path.write_text("user,item\n" + lines)
        assert len(Interactions.from_csv(path, 0, 1)) == 4
