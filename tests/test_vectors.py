"""Columns of vectors in feature tables: pretrained embeddings beside other columns."""

from __future__ import annotations

import json

import numpy as np
import pytest
import scipy.sparse as sp

import gramtower as gt
from gramtower.data.tables import FeatureTable

pl = pytest.importorskip("polars")
VECTORS = np.random.default_rng(0).normal(3.0, [1.0, 5.0, 0.1], size=(6, 3))
IDS = list("abcdef")


def frames():
    pd, pa = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    lists = VECTORS.tolist()
    return {
        "lists": pl.DataFrame({"item": IDS, "v": lists}),
        "arrays": pl.DataFrame({"item": IDS, "v": pl.Series(lists, dtype=pl.Array(pl.Float32, 3))}),
        "pandas lists": pd.DataFrame({"item": IDS, "v": lists}),
        "pandas arrays": pd.DataFrame({"item": IDS, "v": list(VECTORS)}),
        "pyarrow": pa.table({"item": IDS, "v": lists}),
        "mapping": {"item": IDS, "v": lists},
    }


@pytest.mark.parametrize("kind", ["lists", "arrays", "pandas lists", "pandas arrays", "pyarrow", "mapping"])
def test_vectors_are_inferred_and_standardised_place_by_place(kind):
    table = FeatureTable.inferred(frames()[kind], "item")
    assert table.kinds == {"v": "vector"}
    assert table.feature_names == ["v[0]", "v[1]", "v[2]"]
    expected = (VECTORS - VECTORS.mean(0)) / VECTORS.std(0)
    assert np.allclose(table.encode(IDS).toarray(), expected, atol=1e-5)
    assert table.columns_apart == [0, 1, 2]


def test_beside_other_columns_missing_and_from_json():
    vectors = [*VECTORS[:5].tolist(), None]
    frame = {"item": IDS, "v": vectors, "year": [1.0, 2, 3, 4, 5, 6], "genre": ["x", "y", "x", "y", "x", "y"]}
    table = FeatureTable(frame, "item", numeric=["year"], categorical=["genre"], vectors=["v"])
    assert table.feature_names == ["year", "genre=x", "genre=y", "v[0]", "v[1]", "v[2]", "v (missing)"]
    encoded = table.encode([*IDS, "new"]).toarray()
    present = VECTORS[:5]
    assert np.allclose(encoded[:5, 3:6], (present - present.mean(0)) / present.std(0), atol=1e-5)
    assert encoded[5, 3:].tolist() == encoded[6, 3:].tolist() == [0, 0, 0, 1]
    assert encoded[0, 1:3].tolist() == [1, 0]
    again = FeatureTable.encoder_from_json(table.to_json())
    assert (again.encode_frame(frame) != table.encode(IDS)).nnz == 0
    with pytest.raises(ValueError, match=r"vectors.*'v'.*2.*2"):
        again.encode_frame({"year": [1.0], "genre": ["x"], "v": [[1.0, 2.0]]})


def test_text_is_a_vector_if_told_so(tmp_path):
    texts = ["[1.0, 2.0]", "3 4", "", "5;6", "7\t8", "(9, 10)"]
    table = FeatureTable({"item": IDS, "v": texts}, "item", vectors=["v"])
    assert table.feature_names == ["v[0]", "v[1]", "v (missing)"]
    values = np.array([[1, 2], [3, 4], [5, 6], [7, 8], [9, 10]], dtype=float)
    assert np.allclose(table.encode(list("abdef")).toarray()[:, :2], (values - values.mean(0)) / values.std(0))
    (tmp_path / "v.csv").write_text('item,v\na,"1, 2"\nb,"3, 5"\n')
    assert FeatureTable(tmp_path / "v.csv", "item", vectors=["v"]).width == 2


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (
            [[1.0, 2.0], [1.0]],
            r"vectors.*'v'.*1.*2",
        ),
        ([[1.0, None], [1.0, 2.0]], r"vectors.*0.*'v'"),
        ([["a"], ["b"]], r"vectors.*'a'.*'v'"),
        ([1.0, 2.0], r"vectors.*'v'.*Float64"),
        ([None, None], r"vectors.*'v'"),
        ([[], []], r"vectors.*'v'.*List\(Null\)"),
        ([[1.0, float("inf")], [1.0, 2.0]], r"vectors.*inf.*'v'"),
    ],
)
def test_what_is_no_vector_is_refused(cells, message):
    with pytest.raises(ValueError, match=message):
        FeatureTable({"item": ["a", "b"], "v": cells}, "item", vectors=["v"])


def test_lists_of_whole_numbers_and_of_several_lengths_are_not_taken_for_vectors():
    frame = {"item": ["a", "b"], "codes": [[1, 2], [3, 4]], "ragged": [[1.0], [1.0, 2.0]], "x": [1.0, 2.0]}
    table = FeatureTable.inferred(frame, "item")
    assert table.kinds == {"x": "numeric"}
    assert table.report["skipped"] == ["codes", "ragged"]


@pytest.mark.parametrize("change", [dict(mean=[1.0]), dict(deviation=[1.0, 0.0, 1.0]), dict(mean=[]), dict(mean="x")])
def test_a_damaged_encoding_is_refused(change):
    plain = json.loads(FeatureTable({"item": IDS, "v": VECTORS.tolist()}, "item", vectors=["v"]).to_json())
    plain["columns"][0] |= change
    with pytest.raises(ValueError, match="mean"):
        FeatureTable.encoder_from_json(json.dumps(plain))


def test_a_model_learns_from_vectors_and_ranks_by_those_of_new_entities(tmp_path):
    groups = np.arange(30) % 3
    matrix = sp.csr_matrix((groups[:, None] == groups).astype(np.float32))
    noise = np.random.default_rng(1).normal(0, 0.1, (30, 4))
    vectors = np.eye(4)[groups] * 100 + noise
    pairs = gt.Interactions.from_matrix(matrix, [f"u{i}" for i in range(30)], [f"i{j}" for j in range(30)])
    table = FeatureTable.inferred({"user": list(pairs.left_ids), "v": vectors.tolist()}, "user")
    model = gt.TwoTower(dim=4, hidden=(8,), max_iterations=15, device="cpu").fit(pairs, left_features=table)
    model.save(tmp_path / "m")
    new = {"v": (np.eye(4)[[0, 1, 2]] * 100).tolist()}
    ids, _ = gt.load(tmp_path / "m").recommend(left_features=new, k=10)
    assert [{int(name[1:]) % 3 for name in row} for row in ids] == [{0}, {1}, {2}]
