"""Exported networks and files give the embeddings of the model; every format is read back by its own package."""

from __future__ import annotations

import json

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch import nn

import gramtower as gt
from gramtower.data.tables import FeatureTable
from gramtower.model.exporting import as_columns, network_of

RNG = np.random.default_rng(0)
LEFT, RIGHT = [f"u{i}" for i in range(13)], [f"i{j}" for j in range(9)]
KNOWN = [(u, i) for u in LEFT for i in RIGHT if RNG.random() < 0.4 or u[1:] == i[1:]]
PAIRS = gt.Interactions.from_arrays(*zip(*KNOWN, strict=True))
OPTIONS = dict(dim=4, hidden=(6,), max_iterations=2, device="cpu")
AMOUNTS = sp.random(len(PAIRS.left_ids), 5, 0.5, format="csr", random_state=0) * 30
VECTORS = RNG.normal(3.0, 2.0, size=(len(PAIRS.right_ids), 3))


def table():
    pytest.importorskip("polars")
    ids = [str(key) for key in PAIRS.left_ids]
    ages = [None if i % 5 == 0 else 20.0 + i for i in range(len(ids))]
    kinds = [["a|b", "b", "c|a"][i % 3] for i in range(len(ids))]
    return FeatureTable({"user": ids, "age": ages, "kinds": kinds}, id="user", numeric=["age"], lists=["kinds"])


@pytest.fixture(scope="module")
def everything():
    """A left tower over ids, histories, a table and amounts; a right one over a dense matrix."""
    given = ["id", "history", table(), AMOUNTS]
    return gt.TwoTower(**OPTIONS).fit(PAIRS, left_features=given, right_features=VECTORS)


def raw_rows(model):
    """What the left tower sees of the entities of training, before scaling."""
    own = sp.identity(len(PAIRS.left_ids), format="csr")
    return sp.hstack([own, PAIRS.matrix, table().encode(PAIRS.left_ids), AMOUNTS], format="csr")


def test_a_network_takes_features_as_they_come(everything):
    network = network_of(everything.towers_.left, everything.left_.inputs)
    columns, values = as_columns(raw_rows(everything))
    found = network(torch.from_numpy(columns), torch.from_numpy(values))
    np.testing.assert_allclose(found, everything.embed(side="left"), rtol=1e-5, atol=1e-6)
    order = RNG.permutation(columns.shape[1])  # columns may come in any order
    again = network(torch.from_numpy(columns[:, order]), torch.from_numpy(values[:, order]))
    np.testing.assert_allclose(again, found, rtol=1e-5, atol=1e-6)
    right = network_of(everything.towers_.right, everything.right_.inputs)
    features = torch.from_numpy(np.concatenate([VECTORS, np.full((1, 3), 1e9)]).astype(np.float32))
    wanted = np.concatenate([everything.embed(side="right"), everything.embed(right_features=np.full((1, 3), 1e9))])
    np.testing.assert_allclose(right(features), wanted, rtol=1e-5, atol=1e-6)


def test_ids_with_a_smaller_entry_are_given_as_1_too():
    model = gt.TwoTower(**OPTIONS).fit(PAIRS, left_features=["id*0.25", AMOUNTS])
    network = network_of(model.towers_.left, model.left_.inputs)
    columns, values = as_columns(sp.hstack([sp.identity(len(PAIRS.left_ids)), AMOUNTS], format="csr"))
    found = network(torch.from_numpy(columns), torch.from_numpy(values))
    np.testing.assert_allclose(found, model.embed(side="left"), rtol=1e-5, atol=1e-6)


def test_new_entities_go_through_a_network_as_through_the_model(everything):
    model = gt.TwoTower(**OPTIONS).fit(PAIRS, left_features="history")
    network = network_of(model.towers_.left, model.left_.inputs)
    histories = [["i1", "i4", "i2"], ["i0"], []]
    columns = np.full((3, 3), -1)
    for row, history in enumerate(histories):
        columns[row, : len(history)] = model.right_.rows(history) if history else []
    found = network(torch.from_numpy(columns), torch.ones(3, 3))
    np.testing.assert_allclose(found, model.embed(histories=histories), rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_torchscript_answers_any_number_of_rows(everything, tmp_path):
    files = everything.export(tmp_path / "out", "torchscript")
    assert [path.name for path in files] == ["left_ids.json", "left.pt", "right_ids.json", "right.pt", "export.json"]
    left, right = (torch.jit.load(str(tmp_path / "out" / f"{side}.pt")) for side in ("left", "right"))
    rows = raw_rows(everything)
    for count in (1, len(PAIRS.left_ids)):
        columns, values = (torch.from_numpy(array) for array in as_columns(rows[:count]))
        np.testing.assert_allclose(left(columns, values), everything.embed(side="left")[:count], rtol=1e-5, atol=1e-6)
    found = right(torch.from_numpy(VECTORS.astype(np.float32)))
    np.testing.assert_allclose(found, everything.embed(side="right"), rtol=1e-5, atol=1e-6)
    said = json.loads((tmp_path / "out" / "export.json").read_text())
    parts = said["sides"]["left"]["parts"]
    assert [part["kind"] for part in parts] == ["id", "history", "table", "sparse"]
    assert parts[-1]["first_column"] + parts[-1]["columns"] == rows.shape[1]
    assert [column["column"] for column in parts[2]["table"]] == ["age", "kinds"]
    assert json.loads((tmp_path / "out" / "left_ids.json").read_text()) == everything.left_.ids.tolist()


@pytest.mark.filterwarnings("ignore")
def test_onnx_agrees_with_the_model_to_five_digits(everything, tmp_path):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    everything.export(tmp_path, "onnx")
    left, right = (runtime.InferenceSession(str(tmp_path / f"{side}.onnx")) for side in ("left", "right"))
    assert [one.shape for one in left.get_inputs()] == [["batch", "length"]] * 2
    for count in (1, 5, len(PAIRS.left_ids)):
        columns, values = as_columns(raw_rows(everything)[:count])
        (found,) = left.run(None, {"columns": columns, "values": values})
        np.testing.assert_allclose(found, everything.embed(side="left")[:count], rtol=1e-5, atol=1e-5)
    for count in (1, len(VECTORS)):
        (found,) = right.run(None, {"features": VECTORS[:count].astype(np.float32)})
        np.testing.assert_allclose(found, everything.embed(side="right")[:count], rtol=1e-5, atol=1e-5)


class Own(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, 4) / width)

    def forward(self, x):
        return torch.tanh(x @ self.weight)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_ids_and_towers_of_ones_own_are_exported_too(tmp_path):
    ids = gt.TwoTower(dim=4, hidden=(), max_iterations=1, device="cpu").fit(PAIRS)
    ids.export(tmp_path / "ids", "torchscript")
    rows = torch.tensor([3, 0, 3])
    np.testing.assert_allclose(
        torch.jit.load(str(tmp_path / "ids" / "left.pt"))(rows), ids.embed(side="left")[rows], atol=1e-6
    )
    towers = lambda problem: gt.Towers(Own(problem.left.width), Own(problem.right.width))  # noqa: E731
    own = gt.TwoTower(towers=towers, max_iterations=1, device="cpu").fit(PAIRS.matrix, AMOUNTS, VECTORS)
    own.export(tmp_path / "own", "torchscript")
    columns, values = (torch.from_numpy(array) for array in as_columns(AMOUNTS))
    found = torch.jit.load(str(tmp_path / "own" / "left.pt"))(columns, values)
    np.testing.assert_allclose(found, own.embed(side="left"), rtol=1e-5, atol=1e-6)
    assert not (tmp_path / "own" / "left_ids.json").exists()


def test_embeddings_and_ids_come_back_from_every_format(everything, tmp_path):
    P, Q = everything.embed(side="left"), everything.embed(side="right")
    everything.export(tmp_path / "numpy", "numpy")
    np.testing.assert_array_equal(np.load(tmp_path / "numpy" / "right.npy", allow_pickle=False), Q)
    pl = pytest.importorskip("polars")
    everything.export(tmp_path / "parquet", "parquet")
    frame = pl.read_parquet(tmp_path / "parquet" / "left.parquet")
    assert frame["id"].to_list() == everything.left_.ids.tolist()
    np.testing.assert_array_equal(frame["embedding"].to_numpy(), P)
    faiss = pytest.importorskip("faiss")
    everything.export(tmp_path / "faiss", "faiss")
    index = faiss.read_index(str(tmp_path / "faiss" / "right.faiss"))
    _, found = index.search(np.load(tmp_path / "faiss" / "left.npy"), 3)
    ids = np.array(json.loads((tmp_path / "faiss" / "right_ids.json").read_text()), object)
    wanted, _ = everything.recommend(everything.left_.ids.tolist(), k=3, exclude_seen=False)
    np.testing.assert_array_equal(ids[found], wanted)


def test_an_export_that_breaks_off_does_not_pass_for_a_whole_one(everything, tmp_path):
    everything.export(tmp_path, "numpy")
    (tmp_path / "right.npy").unlink()
    (tmp_path / "right.npy").mkdir()
    with pytest.raises(ValueError, match=r"right\.npy"):
        everything.export(tmp_path, "numpy")
    assert not (tmp_path / "export.json").exists()


def test_whole_numbers_stay_whole_numbers_in_parquet(tmp_path):
    pl = pytest.importorskip("polars")
    pairs = gt.Interactions.from_arrays([7, 8, 9, 7], [1, 2, 3, 2])
    gt.TwoTower(dim=2, hidden=(), max_iterations=1, device="cpu").fit(pairs).export(tmp_path, "parquet")
    frame = pl.read_parquet(tmp_path / "left.parquet")
    assert frame.schema["id"] == pl.Int64
    assert frame["id"].to_list() == [7, 8, 9]


def test_the_shell_exports_and_bad_input_is_refused(everything, tmp_path, capsys):
    pytest.importorskip("cyclopts")
    from gramtower.cli.program import run

    everything.save(tmp_path / "model.gramtower")
    assert (
        run(["export", str(tmp_path / "model.gramtower"), "--to", "numpy", "--out", str(tmp_path / "o"), "--json"]) == 0
    )
    assert len(json.loads(capsys.readouterr().out)["files"]) == 5
    assert run(["export", str(tmp_path / "model.gramtower"), "--to", "csv", "--out", str(tmp_path / "o")]) == 2
    assert "onnx" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="folder"):
        everything.export(tmp_path / "file", "numpy")
