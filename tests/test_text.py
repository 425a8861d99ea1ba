"""Columns of text through encoders: functions and pretrained models, the cache, saved models, shell and server."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

import gramtower as gt
from gramtower.data.tables import FeatureTable

pl = pytest.importorskip("polars", reason="tables need polars")
WORDS = ["[UNK]", "red", "green", "blue", "fish", "bird", "car", "fast", "slow"]
SMALL = dict(dim=4, hidden=(), max_iterations=2, select=False, device="cpu")


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def letters(texts):
    """Counts of five letters: an encoder that anyone can check."""
    return np.array([[text.count(letter) for letter in "aeird"] for text in texts], dtype=float)


def titles(count=40):
    drawn = np.random.default_rng(0).choice(WORDS[1:], size=(count, 2))
    return [" ".join(pair) for pair in drawn]


def table_of(encoder, **options):
    return FeatureTable(
        {"item": [f"i{j}" for j in range(40)], "title": titles()}, "item", encoders={"title": encoder}, **options
    )


def pairs(count=40):
    rng = np.random.default_rng(1)
    users, items = rng.integers(20, size=300), np.concatenate([np.arange(count), rng.integers(count, size=300 - count)])
    return gt.Interactions.from_arrays([f"u{i}" for i in users], [f"i{j}" for j in items])


def tokenizer():
    tokenizers = pytest.importorskip("tokenizers", reason="pretrained models need tokenizers")
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return made


def model2vec(path, seed=0, width=6):
    package = pytest.importorskip("model2vec", reason="needs model2vec, which is not installed")
    vectors = np.random.default_rng(seed).normal(size=(len(WORDS), width)).astype(np.float32)
    package.StaticModel(vectors, tokenizer()).save_pretrained(path)
    return {word: vectors[i] for i, word in enumerate(WORDS)}


def sentence_transformers(path):
    pytest.importorskip("sentence_transformers", reason="needs sentence-transformers, which is not installed")
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    vectors = np.random.default_rng(0).normal(size=(len(WORDS), 6)).astype(np.float32)
    SentenceTransformer(
        modules=[StaticEmbedding(tokenizer(), embedding_weights=vectors)], device="cpu"
    ).save_pretrained(str(path))
    return {word: vectors[i] for i, word in enumerate(WORDS)}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("made", "other"), [(model2vec, "sentence_transformers"), (sentence_transformers, "model2vec")]
)
def test_a_pretrained_model_is_loaded_from_its_folder_by_its_own_package(made, other, tmp_path, monkeypatch):
    vectors = made(tmp_path / "model")
    monkeypatch.setitem(sys.modules, other, None)
    found = gt.text.Encoder(tmp_path / "model").encode(["red fish", "slow", "red fish"])
    expected = [(vectors["red"] + vectors["fish"]) / 2, vectors["slow"], (vectors["red"] + vectors["fish"]) / 2]
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_model_is_found_by_its_name_among_those_downloaded(tmp_path):
    folder = tmp_path / "hub" / "models--me--tiny"
    vectors = model2vec(folder / "snapshots" / ("0" * 40))
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0" * 40)
    script = "import sys; sys.modules['sentence_transformers'] = None; import gramtower as gt; "
    script += (
        "print(gt.text.Encoder('me/tiny').encode(['red'])[0].tolist()); gt.text.Encoder('me/absent').encode(['red'])"
    )
    environment = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert json.loads(done.stdout) == vectors["red"].tolist(), done.stderr
    assert "ValueError: encoder: me/absent cannot be loaded" in done.stderr


def test_a_column_is_the_standardised_vectors_of_its_texts():
    frame = {"item": list("abcd"), "title": ["red bird", "", "a fast deer", None], "year": [1.0, 2, 3, 4]}
    table = FeatureTable(frame, "item", numeric=["year"], encoders={"title": letters})
    assert table.kinds == {"year": "numeric", "title": "encoded"}
    assert table.feature_names[1:] == [*(f"title[{place}]" for place in range(5)), "title (missing)"]
    counts = letters(["red bird", "a fast deer"])
    spread = np.where(counts.std(0) > 0, counts.std(0), 1)
    rows = table.encode(list("abcd")).toarray()[:, 1:]
    np.testing.assert_allclose(rows[[0, 2], :5], (counts - counts.mean(0)) / spread, atol=1e-6)
    assert rows[1].tolist() == rows[3].tolist() == [0, 0, 0, 0, 0, 1]
    assert table.columns_apart == list(range(7))
    new = table.encode_frame({"title": ["red bird"], "year": [1.0]})
    assert (new != table.encode(["a"])).nnz == 0


def test_kinds_of_other_columns_are_inferred_and_a_column_may_also_be_hashed():
    frame = {"item": [f"i{j}" for j in range(40)], "title": titles(), "year": list(range(40))}
    table = FeatureTable.inferred(frame, "item", encoders={"title": letters})
    assert table.kinds == {"year": "numeric", "title": "encoded"}
    both = FeatureTable.inferred(frame, "item", {"title": "text"}, encoders={"title": letters}, hash_bits=4)
    assert both.width == 1 + 16 + 5
    np.testing.assert_array_equal(both.encode(["i3"]).toarray()[0, -5:], table.encode(["i3"]).toarray()[0, -5:])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda texts: np.ones((len(texts), 3 if len(texts) == 1 else 2)), r"'title'.*\(40, 2\).*\(40, 3\)"),
        (lambda texts: np.ones((len(texts) + (len(texts) > 1), 3)), r"'title'.*\(41, 3\).*\(40, 3\)"),
        (lambda texts: np.ones(len(texts)), r"shape \(1,\)"),
        (lambda texts: np.ones((len(texts), 0)), r"shape \(1, 0\)"),
        (lambda texts: np.full((len(texts), 3), np.nan if len(texts) > 1 else 1.0), r"'title'.*nan"),
        (lambda texts: np.full((len(texts), 3), 1e60 if len(texts) > 1 else 1.0), r"'title'.*inf"),
        (lambda texts: [["a"]] * len(texts), "real numbers"),
    ],
)
def test_an_encoder_that_gives_anything_but_a_vector_for_each_text_is_refused(function, message):
    distinct = [f"text {number}" for number in range(40)]
    with pytest.raises(ValueError, match=message):
        FeatureTable({"item": range(40), "title": distinct}, "item", encoders={"title": function})


def test_arguments_are_checked(tmp_path):
    for given, message in [
        (lambda: gt.text.Encoder(tmp_path / "absent"), "model: got .*absent.*folder"),
        (lambda: gt.text.Encoder(tmp_path).encode(["a"]), "encoder: got .*without config.json"),
        (lambda: gt.text.Encoder("owner/model", name="other"), "name: got 'other'"),
        (lambda: gt.text.Encoder(letters, batch_size=0), "batch_size"),
        (lambda: gt.text.Encoder(letters).encode("text"), "texts: got str"),
        (lambda: gt.text.Encoder(letters).encode(["a", 1]), "texts: got other values"),
        (lambda: FeatureTable({"item": [1], "title": ["a"]}, "item", encoders=[letters]), "encoders: got list"),
        (lambda: FeatureTable({"item": [1], "title": [None]}, "item", encoders={"title": letters}), "'title'.*text"),
        (lambda: FeatureTable.inferred({"item": [1], "a": ["b"]}, "item", encoders={"b": letters}), "encoders.*'b'"),
    ]:
        with pytest.raises(ValueError, match=message):
            given()


def test_texts_are_encoded_once_in_batches_and_kept_on_disk(tmp_path):
    calls = []

    def counted(texts):
        calls.append(len(texts))
        return torch.from_numpy(letters(texts))

    texts = [f"text {number % 50}" for number in range(100)]
    options = dict(batch_size=20, cache=tmp_path / "vectors")
    first = gt.text.Encoder(counted, **options).encode(texts)
    assert calls == [1, 20, 20, 10]
    np.testing.assert_array_equal(first, letters(texts))
    calls.clear()
    assert (gt.text.Encoder(counted, **options).encode([*texts, "a new one"])[:100] == first).all()
    assert calls == [1, 1]
    calls.clear()
    gt.text.Encoder(counted, **options, name="another").encode(texts)
    assert calls == [1, 20, 20, 10]
    assert not (tmp_path / "cache").exists()


def test_a_damaged_file_of_the_cache_is_written_again(tmp_path):
    texts = [f"text {number}" for number in range(9)]
    options = dict(batch_size=2, cache=tmp_path / "vectors")
    first = gt.text.Encoder(letters, **options).encode(texts)
    (file,) = (tmp_path / "vectors").rglob("*.safetensors")
    whole = file.read_bytes()
    for content in (whole[:-1], b"", whole[:50] + b"x" * 50):
        file.write_bytes(content)
        assert (gt.text.Encoder(letters, **options).encode(texts) == first).all()
        assert file.read_bytes() == whole


def test_vectors_of_other_weights_are_not_taken_from_the_cache(tmp_path):
    found = []
    for seed in range(2):
        model2vec(tmp_path / "model", seed)
        found.append(gt.text.Encoder(tmp_path / "model", batch_size=2).encode(WORDS))
    assert np.abs(found[0] - found[1]).min(1).max() > 0
    assert len(list((tmp_path / "cache" / "gramtower" / "text").iterdir())) == 2


def test_a_loaded_model_encodes_new_rows_by_the_same_model(tmp_path):
    model2vec(tmp_path / "model")
    model = gt.TwoTower(**SMALL).fit(pairs(), right_features=table_of(tmp_path / "model"))
    model.save(tmp_path / "one.gramtower")
    new = {"item": ["x", "y"], "title": ["red fish", None]}
    expected = model.embed(right_features=new)
    np.testing.assert_array_equal(gt.load(tmp_path / "one.gramtower").embed(right_features=new), expected)
    assert "x" in gt.load(tmp_path / "one.gramtower").add(right_features=new).right_.ids
    (tmp_path / "model").rename(tmp_path / "moved")
    lost = gt.load(tmp_path / "one.gramtower")
    assert len(lost.recommend(["u1"], k=3)[0][0]) == 3
    with pytest.raises(ValueError, match=r"column 'title': .*model'.*gt.load"):
        lost.embed(right_features=new)
    name = str((tmp_path / "model").resolve())
    gt.load(tmp_path / "one.gramtower", encoders={name: tmp_path / "moved"}).save(tmp_path / "two.gramtower")
    np.testing.assert_array_equal(gt.load(tmp_path / "two.gramtower").embed(right_features=new), expected)


@pytest.mark.parametrize(("seed", "width", "message"), [(1, 6, "other vectors"), (0, 7, "length 7.*length 6")])
def test_a_model_that_changed_in_its_folder_is_refused(seed, width, message, tmp_path):
    model2vec(tmp_path / "model")
    gt.TwoTower(**SMALL).fit(pairs(), right_features=table_of(tmp_path / "model")).save(tmp_path / "one.gramtower")
    model2vec(tmp_path / "model", seed, width)
    with pytest.raises(ValueError, match=rf"'title'.*{message}"):
        gt.load(tmp_path / "one.gramtower").embed(right_features={"title": ["red"]})


def test_a_function_is_given_by_its_name_when_a_model_is_loaded(tmp_path):
    model = gt.TwoTower(**SMALL).fit(pairs(), right_features=table_of(letters))
    model.save(tmp_path / "one.gramtower")
    new, path = {"title": ["red fish"]}, tmp_path / "one.gramtower"
    assert b"__main__" not in path.read_bytes()
    again = gt.load(path, encoders={"letters": letters})
    np.testing.assert_array_equal(again.embed(right_features=new), model.embed(right_features=new))
    assert len(gt.load(path).recommend(["u1"], k=3)[0][0]) == 3
    with pytest.raises(ValueError, match=r"'title'.*'letters'.*no function.*gt.load"):
        gt.load(path).embed(right_features=new)
    for given, message in [
        ({"title": letters}, "encoders: got 'title'.*letters"),
        ({"letters": lambda texts: letters(texts)[:, :3]}, "'letters'.*length 3.*length 5"),
        ({"letters": lambda texts: letters(texts)[:, ::-1]}, "'letters'.*other vectors"),
        ([letters], "encoders: got list"),
    ]:
        with pytest.raises(ValueError, match=message):
            gt.load(path, encoders=given)


def test_update_reads_a_frame_like_the_table_with_encoders():
    model = gt.TwoTower(**SMALL).fit(pairs(), right_features=table_of(letters, text=["title"]))
    frame = pl.DataFrame({"item": [f"i{j}" for j in range(40)], "title": titles()})
    updated = model.update(pairs(), right_features=frame)
    table = next(part.table for part in updated.right_.inputs.parts if part.table is not None)
    assert [encoder.kind for encoder in table.encoders] == ["text", "encoded"]
    alike = table_of(letters, text=["title"]).read_alike(frame)
    assert (alike.encode(["i3"]) != table_of(letters, text=["title"]).encode(["i3"])).nnz == 0
    with pytest.raises(ValueError, match="title"):
        model.update(pairs(), right_features=frame.drop("title"))


def test_update_refuses_another_encoder():
    model = gt.TwoTower(**SMALL).fit(pairs(), right_features=table_of(letters))
    more = gt.Interactions.from_arrays(["u1", "new"], ["i1", "i2"])
    others = gt.text.Encoder(lambda texts: letters(texts)[:, ::-1], name="others")
    with pytest.raises(ValueError, match=r"right_features.*'title'.*'others'.*'letters'"):
        model.update(more, right_features=table_of(others))
    model.update(more, right_features=table_of(letters))


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    for kind, package, line in [
        ("model2vec", "model2vec", r"gramtower\[text\]"),
        ("bert", "sentence_transformers", "pip install sentence-transformers"),
    ]:
        (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": kind}))
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ImportError, match=line):
            gt.text.Encoder(tmp_path / "model").encode(["a"])


def test_the_shell_fits_updates_and_recommends_with_encoders(tmp_path, capsys):
    pytest.importorskip("cyclopts", reason="the command line needs cyclopts")
    from gramtower.cli.program import run

    model2vec(tmp_path / "model")
    given = pairs()
    coo = given.matrix.tocoo()
    rows = [f"{given.left_ids[i]},{given.right_ids[j]}" for i, j in zip(coo.row, coo.col, strict=True)]
    (tmp_path / "pairs.csv").write_text("\n".join(["user,item", *rows]))
    (tmp_path / "items.csv").write_text("\n".join(["item,title", *(f"i{j},{t}" for j, t in enumerate(titles()))]))
    (tmp_path / "new.csv").write_text("item,title\nx,red fish\n")
    run_folder = str(tmp_path / "run")
    fit = ["fit", str(tmp_path / "pairs.csv"), "--left", "user", "--right", "item", "--out", run_folder, "--quiet"]
    fit += ["--right-features", str(tmp_path / "items.csv"), "--right-encoder", f"title={tmp_path / 'model'}"]
    assert run([*fit, "--dim", "4", "--hidden", "none", "--max-iterations", "2", "--device", "cpu"]) == 0
    model = gt.load(tmp_path / "run" / "model.gramtower")
    assert model.right_.inputs.parts[0].table.kinds == {"title": "encoded"}
    capsys.readouterr()
    new = ["--right-features", str(tmp_path / "new.csv")]
    assert run(["recommend", run_folder, "--left", "u1", "-k", "41", *new, "--json", "--quiet"]) == 0
    expected = model.recommend(["u1"], k=41, right_features={"item": ["x"], "title": ["red fish"]})[0]
    found = [one["id"] for one in json.loads(capsys.readouterr().out)["answers"][0]["results"]]
    assert "x" in found
    assert found == expected[0].tolist()[: len(found)]
    assert run(["update", run_folder, str(tmp_path / "pairs.csv"), "--quiet"]) == 0
    bad = [*fit[:-1], "titel=somewhere", "--fresh"]
    capsys.readouterr()
    assert run(bad) == 2
    assert "'titel'" in capsys.readouterr().err
    assert run([*fit[:-1], "title", "--fresh"]) == 2
    assert "--right-encoder: got 'title', expected COLUMN=MODEL" in capsys.readouterr().err


def test_the_server_encodes_new_rows(tmp_path, monkeypatch):
    pytest.importorskip("starlette", reason="the server needs starlette")
    from serving_cases import client, source

    model2vec(tmp_path / "model")
    users = {"user": [f"u{i}" for i in range(20)], "about": titles(20)}
    for name, encoder in (("model", tmp_path / "model"), ("function", letters)):
        table = FeatureTable(users, "user", encoders={"about": encoder})
        model = gt.TwoTower(**SMALL).fit(pairs(), left_features=table)
        model.save(tmp_path / f"{name}.gramtower")
        with client(source(name, table=False, path=tmp_path / f"{name}.gramtower")) as api:
            known = api.post("/recommend", json={"left": ["u1"], "k": 3})
            answer = api.post("/recommend", json={"left_features": {"about": ["red fish"]}, "k": 3})
        assert known.status_code == 200
        if name == "function":
            assert answer.status_code == 422
            assert "left_features: column 'about'" in answer.text
        else:
            ids = model.recommend(left_features={"about": ["red fish"]}, k=3)[0]
            assert [one["id"] for one in answer.json()["answers"][0]["results"]] == ids[0].tolist()
    monkeypatch.setitem(sys.modules, "model2vec", None)
    with client(source("model", table=False, path=tmp_path / "model.gramtower")) as api:
        answer = api.post("/recommend", json={"left_features": {"about": ["red fish"]}, "k": 3})
    assert answer.status_code == 503, answer.text
    assert "gramtower[text]" in answer.json()["error"]


@pytest.mark.parametrize("text", [True, False])
def test_labels_add_a_row_with_the_text_of_each_right_entity(text):
    users = [f"u{i}" for i in range(3)] if text else [4, 5, 9]
    observed = gt.Interactions.from_arrays([users[i] for i in (0, 1, 2, 2)], ["a", "b", "a", "c"])
    left = FeatureTable({"user": users, "query": ["red", "green", None], "age": [1.0, 2, 3]}, "user",
                        numeric=["age"], encoders={"query": letters})  # fmt: skip
    right = FeatureTable({"item": ["c", "a", "x", "b"], "title": ["a red deer", "bird", "car", None]}, "item",
                         text=["title"], hash_bits=4)  # fmt: skip
    pairs, table = left.with_labels(observed, right, {"query": "title"})
    new = ["label: c", "label: a"] if text else [10, 11]
    assert pairs.left_ids.tolist() == [*users, *new]
    assert pairs.matrix.toarray()[3:].tolist() == [[0, 0, 1], [1, 0, 0]]
    assert (pairs.matrix[:3] != observed.matrix).nnz == 0
    expected = left.encode_frame({"query": ["a red deer", "bird"], "age": [None, None]})
    assert (table.encode(new) != expected).nnz == (table.encode(users) != left.encode(users)).nnz == 0
    model = gt.TwoTower(**SMALL).fit(pairs, left_features=table)
    assert len(model.recommend([new[0]], k=2)[0][0]) == 2
    with pytest.raises(ValueError, match=r"columns.*'title'"):
        left.with_labels(observed, right, {"title": "query"})
    with pytest.raises(ValueError, match="columns"):
        left.with_labels(observed, right, {})
    with pytest.raises(ValueError, match=r"pairs.*one set"):
        left.with_labels(gt.Interactions.from_arrays(["a"], ["b"], same_entities=True), right, {"query": "title"})


@pytest.mark.parametrize("stored", [False, True])
def test_an_update_reads_the_texts_of_a_frame_with_the_encoder_of_the_model(stored, tmp_path):
    gt.TwoTower(**SMALL, store_features=stored).fit(pairs(), right_features=[table_of(letters)]).save(tmp_path / "m")
    more = gt.Interactions.from_arrays(["u1", "u2"], ["i3", "i40"])
    new = {"item": ["i40"], "title": ["a red deer"]}
    rows = {"item": [f"i{j}" for j in range(40)] + new["item"], "title": titles() + new["title"]}
    model = gt.load(tmp_path / "m", encoders={"letters": letters})
    model.update(more, right_features=[new if stored else rows])
    assert model.right_.inputs.parts[0].table.kinds == {"title": "encoded"}
    expected = model.embed(right_features=new)
    assert np.allclose(model.embed(["i40"], side="right"), expected, atol=1e-6)
    assert not np.allclose(expected, model.embed(right_features={"title": ["blue"]}), atol=1e-3)
