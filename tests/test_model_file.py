"""A model file gives the model that was saved, or an error that names the file and what is wrong with it."""

from __future__ import annotations

import inspect
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import gramtower as gt
from gramtower._util import tensors as _tensors
from gramtower._util.tensors import TensorFile
from gramtower.data.tables import FeatureTable
from gramtower.distributed.partition import read_part, write_partition
from gramtower.engine.towers.mlp import mlp_shapes
from gramtower.model import model_file
from gramtower.model.model_file import KIND


def fitted(**options):
    rng = np.random.default_rng(0)
    matrix = sp.csr_matrix((rng.random((9, 7)) < 0.4).astype(np.float32))
    pairs = gt.Interactions.from_matrix(matrix, [f"u{i}" for i in range(9)], [f"i{j}" for j in range(7)])
    features = options.pop("features", {})
    model = gt.TwoTower(**{"dim": 3, "hidden": (4,), "max_iterations": 2, "device": "cpu", **options})
    return model.fit(pairs, **features)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A saved model with a table, a history and weights as an array."""
    frame = {"user": [f"u{i}" for i in range(9)], "age": [float(i) for i in range(9)], "town": list("aabbccdda")}
    table = FeatureTable(frame, "user", numeric=["age"], categorical=["town"])
    model = fitted(features={"left_features": ["id", "history", table]}, left_weights=np.arange(1.0, 10))
    path = tmp_path_factory.mktemp("saved") / "m"
    model.save(path)
    return path


def rewritten(path, to, change):
    """A copy whose content was changed by hand, its checksums those of the change."""
    file = TensorFile(path, *KIND)
    header, tensors = json.loads(json.dumps(file.header)), {name: file.read(name) for name in file.shapes}
    change(header["content"], tensors)
    _tensors.write(to, *KIND, header, tensors)
    return to


def test_a_copy_written_anew_is_the_same_model(saved, tmp_path):
    one, two = gt.load(saved), gt.load(rewritten(saved, tmp_path / "m", lambda header, tensors: None))
    asked = [f"u{i}" for i in range(9)]
    assert all(np.array_equal(a, b) for a, b in zip(one.recommend(asked), two.recommend(asked), strict=True))
    assert repr(one) == repr(two)


def test_a_loaded_model_does_not_depend_on_its_file(saved, tmp_path):
    path = tmp_path / "m"
    path.write_bytes(saved.read_bytes())
    model, before = gt.load(path), gt.load(saved)
    path.write_bytes(b"\0" * path.stat().st_size)  # in place
    for side in ("left_", "right_"):
        np.testing.assert_array_equal(getattr(model, side).embeddings, getattr(before, side).embeddings)
    np.testing.assert_array_equal(model.left_weights, before.left_weights)
    assert (model.seen_ != before.seen_).nnz == 0


def test_a_model_keeps_what_the_data_calls_its_entities(tmp_path):
    pairs = [("ann", "tea"), ("ann", "jam"), ("bob", "tea"), ("bob", "rye")]
    bought = gt.Interactions.from_arrays(*zip(*pairs, strict=True), left_name="buyer", right_name="good")
    model = gt.TwoTower(dim=2, max_iterations=1, device="cpu").fit(bought, validation=0.4)
    assert model.fitted_.names == ("buyer", "good")
    model.save(tmp_path / "m")
    again = gt.load(tmp_path / "m")
    assert again.fitted_.names == ("buyer", "good")
    again.update(gt.Interactions.from_arrays(["cay"], ["jam"]))  # columns without names
    assert again.fitted_.names == ("buyer", "good")
    write_partition(bought, tmp_path / "parts", 1)
    assert model.fit(read_part(tmp_path / "parts")).fitted_.names == ("buyer", "good")
    assert model.fit(bought.matrix).fitted_.names == ("left", "right")
    older = rewritten(tmp_path / "m", tmp_path / "older", lambda header, tensors: header.pop("names"))
    assert gt.load(older).fitted_.names == ("left", "right")


def test_low_rank_labels_are_kept_and_fitted_again(tmp_path):
    rng = np.random.default_rng(1)
    model = fitted(imputed=(rng.normal(size=(9, 2)), rng.normal(size=(7, 2)).astype(np.float32)))
    model.save(tmp_path / "m")
    loaded = gt.load(tmp_path / "m")
    assert all(np.array_equal(a, b) for a, b in zip(loaded.imputed, model.imputed, strict=True))
    assert [r.value for r in fitted(imputed=loaded.imputed).history_] == [r.value for r in model.history_]
    more = gt.Interactions.from_arrays(["u0", "u1"], ["i1", "i2"])
    again = [one.update(more).history_ for one in (model, loaded)]
    assert [r.value for r in again[0]] == [r.value for r in again[1]]
    with pytest.raises(ValueError, match=r"^imputed: got 9 and 7 rows, expected 10 and 7 rows.*set_params"):
        loaded.update(gt.Interactions.from_arrays(["u9"], ["i1"]))
    loaded.set_params(imputed=(rng.normal(size=(10, 2)), loaded.imputed[1]))
    loaded.update(gt.Interactions.from_arrays(["u9"], ["i1"])).save(tmp_path / "m")
    assert gt.load(tmp_path / "m").recommend(["u9"], k=2)[0].shape == (1, 2)
    for what, change in {
        "imputed_left": tensor("imputed_left", lambda t: t[:-1].clone()),
        "imputed_right": tensor("imputed_right", lambda t: t[:, :1].clone()),
        "no 'imputed_right'": lambda header, tensors: tensors.pop("imputed_right"),
        "no 'imputed_left'": lambda header, tensors: (tensors.pop("imputed_left"), param("imputed", 0.0)(header, {})),
        "'imputed'": param("imputed", 0.0),
        "NaN": tensor("imputed_left", lambda t: t * math.nan),
        r"imputed.*shape \((10|7),\)": lambda header, tensors: tensors.update(
            {name: tensors[name][:, 0].clone() for name in ("imputed_left", "imputed_right")}
        ),
    }.items():
        with pytest.raises(ValueError, match=f"damaged.*{what}"):
            gt.load(rewritten(tmp_path / "m", tmp_path / "bad", change))


def test_a_model_with_a_loss_of_its_own_is_fitted_again_after_loading_with_it(tmp_path):
    cosh = gt.Loss(value=lambda y, s: torch.log(torch.cosh(s - y)), name="log-cosh")
    model = fitted(loss=cosh, hidden=(), max_iterations=5)
    model.save(tmp_path / "m")
    more = gt.Interactions.from_arrays(["u0", "u1"], ["i1", "i2"])
    without, loaded = gt.load(tmp_path / "m"), gt.load(tmp_path / "m", loss=cosh)
    assert np.array_equal(without.recommend(["u0"])[0], model.recommend(["u0"])[0])
    with pytest.raises(ValueError, match=r"^loss: got 'log-cosh'.*gt.load\(path, loss="):
        without.update(more)
    assert loaded.explain("u0", "i1").score == pytest.approx(model.explain("u0", "i1").score)
    assert [r.value for r in loaded.update(more).history_] == [r.value for r in model.update(more).history_]
    loaded.save(tmp_path / "again")
    assert gt.load(tmp_path / "again").loss == "log-cosh"
    with pytest.raises(ValueError, match=r"^loss: got 'custom', expected 'log-cosh'"):
        gt.load(tmp_path / "m", loss=gt.Loss(value=cosh.value))
    with pytest.raises(ValueError, match=r"^loss: got 3"):
        gt.load(tmp_path / "m", loss=3)


class Own(gt.optim.GradientDescent):
    """A method of the user's own."""


def test_a_solver_is_saved_by_its_name_and_options(tmp_path):
    model = fitted(optimizer=gt.optim.Newton(cg_max_steps=7))
    model.save(tmp_path / "m")
    loaded = gt.load(tmp_path / "m")
    assert (loaded.optimizer, loaded.optimizer_options["cg_max_steps"]) == ("newton", 7)
    again = fitted(optimizer=loaded.optimizer, optimizer_options=loaded.optimizer_options)
    assert [r.value for r in again.history_] == [r.value for r in model.history_]
    with pytest.raises(ValueError, match=r"^optimizer.*Own"):
        fitted(optimizer=Own()).save(tmp_path / "own")
    assert not (tmp_path / "own").exists()


HUGE = 10**9


def of(key, value):
    """A change of a field of the header."""
    return lambda header, tensors: header.update({key: value})


def param(key, value):
    return lambda header, tensors: header["params"].update({key: value})


def tensor(name, make):
    return lambda header, tensors: tensors.update({name: make(tensors.get(name))})


def without(name):
    return lambda header, tensors: tensors.pop(name)


def part(key, value, number=0):
    return lambda header, tensors: header["inputs"]["left"][number].update({key: value})


TRIED = {"settings": {"l2": 1.0}, "metric": 0.1, "standard_error": 0.0}
PATH = {"metric": "ndcg@20", "held_out": "pairs", "tried": [TRIED], "chosen": {"l2": 1.0}}


def put(place, value):
    def change(values):
        changed = values.clone()
        changed[place] = value
        return changed

    return change


BAD = {
    "parameters are a list": (of("params", []), "params"),
    "an unknown parameter": (param("depth", 3), "depth"),
    "a parameter of another type": (param("l2", "much"), "params.l2"),
    "a missing parameter": (lambda header, tensors: header["params"].pop("omega"), "omega"),
    "an array that is also a parameter": (param("left_weights", "degree"), "left_weights"),
    "an unknown activation": (param("activation", "step"), "activation"),
    "no version of a field": (of("message", None), "message"),
    "a field more": (of("pickle", "x"), "pickle"),
    "a field less": (lambda header, tensors: header.pop("history"), "history"),
    "huge hidden layers": (of("hidden", [[HUGE], [HUGE]]), "parameters"),
    "hidden layers beyond all bounds": (of("hidden", [[2**62], []]), "hidden"),
    "no hidden layers": (of("hidden", [[], []]), "parameters"),
    "hidden layers of one side": (of("hidden", [[4]]), "hidden"),
    "a negative size": (of("dim", -3), "dim"),
    "another size": (of("dim", 4), "shape"),
    "another shape": (of("shape", [8, 7]), "inputs"),
    "a shape of one": (of("shape", [9]), "shape"),
    "a huge shape": (of("shape", [HUGE, HUGE]), "inputs"),
    "three names of columns": (of("names", ["a", "b", "c"]), "names"),
    "an unknown reason": (of("reason", "BORED"), "reason"),
    "an infinite omega": (of("omega", math.inf), "omega"),
    "a metric that is no number": (of("best_metric", math.nan), "best_metric"),
    "no history": (of("history", []), "history"),
    "a metric of the path as text": (of("path", PATH | {"tried": [TRIED | {"metric": "0.1"}]}), "path.*metric"),
    "a history of numbers": (of("history", [1, 2]), "history"),
    "a record without a value": (lambda header, tensors: header["history"][0].pop("value"), "value"),
    "inputs of one side": (lambda header, tensors: header["inputs"].pop("left"), "inputs"),
    "an unknown input": (part("kind", "image"), "kind"),
    "an input twice": (part("kind", "history"), "inputs"),
    "a huge input": (part("width", HUGE), "inputs"),
    "an input of no width": (part("width", 0), "width"),
    "a table that is a number": (part("table", 5, 2), "table"),
    "a table where there is none": (part("table", {}), "table"),
    "a table of another width": (part("width", 3, 2), "width"),
    "a huge text column": (
        lambda header, tensors: header["inputs"]["left"][2]["table"]["columns"].append(
            {"kind": "text", "column": "x", "bits": 60, "ngrams": "word"}
        ),
        "bits",
    ),
    "another tensor": (tensor("pickle", lambda _: torch.ones(2)), "pickle"),
    "no embeddings": (without("right"), "right"),
    "no ids of one kind": (without("left_lengths"), "left_lengths"),
    "ids of both kinds": (tensor("left_numbers", lambda _: torch.arange(9)), "left_"),
    "numbers as ids for some": (
        lambda header, tensors: (
            tensors.pop("left_text"), tensors.pop("left_lengths"), tensors.update(left_numbers=torch.arange(8))
        ),
        "left_numbers",
    ),
    "embeddings of another type": (tensor("right", lambda t: t.to(torch.int32)), "right"),
    "embeddings of another shape": (tensor("right", lambda t: t.T.contiguous()), "right"),
    "embeddings that are not finite": (tensor("right", put((0, 0), math.nan)), "right"),
    "parameters that are not finite": (tensor("parameters|left.0.weight", put((0, 0), math.inf)), "parameters"),
    "parameters of another shape": (tensor("parameters|left.0.weight", lambda t: t[:-1].clone()), "parameters"),
    "weights of another length": (tensor("left_weights", lambda t: t[:-1].clone()), "left_weights"),
    "added entities beyond all": (of("added", [9, 0]), "added"),
    "a negative number of added entities": (of("added", [0, -1]), "added"),
    "added entities that are known by id alone": (of("added", [0, 1]), "inputs"),
    "added entities of one side": (of("added", [0]), "added"),
    "numbers of no rows": (of("numbered", [None, -2]), "numbered"),
    "numbers as text": (of("numbered", ["9", None]), "numbered"),
    "no pairs of validation": (without("further_counts"), "further_counts"),
    "a validation pair out of range": (
        lambda header, tensors: tensors.update(
            further_counts=put(0, 1)(tensors["further_counts"]), further_columns=torch.tensor([7], dtype=torch.int32)
        ),
        "further",
    ),
    "a negative count": (tensor("seen_counts", put(0, -1)), "counts"),
    "counts beyond the columns": (tensor("seen_counts", put(0, 2**62)), "seen"),
    "a column out of range": (tensor("seen_columns", put(0, 7)), "columns"),
    "a negative column": (tensor("seen_columns", put(0, -1)), "columns"),
    "columns out of order": (tensor("seen_columns", lambda t: t.flip(0).contiguous()), "columns"),
    "counts of fractions": (tensor("seen_counts", lambda t: t.double()), "seen_counts"),
    "ids beyond the text": (tensor("left_lengths", put(0, 99)), "left_offsets"),
    "more text than ids": (tensor("left_text", lambda t: torch.cat([t, t])), "left_offsets"),
    "ids that are no text": (tensor("left_text", put(0, 0xFF)), "UTF-8"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_a_file_that_does_not_hold_together_is_refused_by_file_and_field(what, saved, tmp_path):
    change, field = BAD[what]
    path = rewritten(saved, tmp_path / "m", change)
    with pytest.raises(ValueError, match=rf"model.*{path}.*damaged.*{field}"):
        gt.load(path)


def test_a_flipped_byte_anywhere_is_noticed(saved, tmp_path):
    whole = saved.read_bytes()
    for place in range(0, len(whole), 61):
        broken = bytearray(whole)
        broken[place] ^= 0x10
        (tmp_path / "m").write_bytes(broken)
        with pytest.raises(ValueError, match=rf"model.*{tmp_path / 'm'}.*damaged"):
            gt.load(tmp_path / "m")


@pytest.mark.parametrize("damage", ["cut", "foreign", "empty"])
def test_damaged_and_foreign_files_are_refused(damage, saved, tmp_path):
    path, whole = tmp_path / "m", saved.read_bytes()
    path.write_bytes({"cut": whole[:200], "foreign": b"PK\x03\x04" + bytes(100), "empty": b""}[damage])
    with pytest.raises(ValueError, match="damaged"):
        gt.load(path)
    with pytest.raises(FileNotFoundError, match="nothing"):
        gt.load(tmp_path / "nothing")


def test_a_file_of_a_later_version_says_so(saved, tmp_path):
    file = TensorFile(saved, *KIND)
    tensors = {name: file.read(name) for name in file.shapes}
    _tensors.write(tmp_path / "m", KIND[0], KIND[1] + 1, file.header, tensors)
    with pytest.raises(ValueError, match=rf"later version.*{KIND[1] + 1}.*{KIND[1]}.*upgrade"):
        gt.load(tmp_path / "m")


def test_ids_that_are_numbers_are_read(saved, tmp_path):
    def numbered(_, tensors):
        del tensors["left_text"], tensors["left_lengths"]
        tensors["left_numbers"] = torch.arange(100, 109)

    model = gt.load(rewritten(saved, tmp_path / "m", numbered))
    assert np.array_equal(model.embed([100, 108]), gt.load(saved).embed(["u0", "u8"]))


@pytest.mark.parametrize("hidden", [(), (4,), (4, 5)])
def test_the_shapes_of_the_parameters_are_those_of_the_towers(hidden):
    model = fitted(hidden=hidden)
    shapes = mlp_shapes("left", 9, hidden, 3) | mlp_shapes("right", 7, hidden, 3)
    assert shapes == dict(model.towers_.parameters().layout.shapes)


def test_settings_of_numpy_are_saved_and_others_are_named(tmp_path):
    model = fitted(dim=np.int64(3), l2=np.float32(0.5), hidden=np.array([4]))
    model.save(tmp_path / "m")
    assert (gt.load(tmp_path / "m").dim, gt.load(tmp_path / "m").hidden) == (3, (4,))
    model.metric = object()
    with pytest.raises(ValueError, match=r"metric.*object"):
        model.save(tmp_path / "m")


def test_a_model_that_is_not_finite_is_not_saved(tmp_path):
    model = fitted()
    right = replace(model.right_, embeddings=model.right_.embeddings * torch.inf)
    model.fitted_ = replace(model.fitted_, right=right)
    with pytest.raises(ValueError, match=r"model.*right.*(NaN|infinity)"):
        model.save(tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_fields_of_the_header_are_given_by_name():
    kinds = {parameter.kind for parameter in inspect.signature(model_file.Header).parameters.values()}
    assert kinds == {inspect.Parameter.KEYWORD_ONLY}  # several of them have the same type
