"""A new model takes the old one's place without a lost request; a damaged one does not."""

from __future__ import annotations

import functools
import gc
import shutil
import weakref

import pytest
from serving_cases import Client, client, folder, model, service, source

from gramtower._util.tensors import write
from gramtower.cli.program import run
from gramtower.data import frames
from gramtower.serving import server
from gramtower.serving.served_models import Metrics, Models
from gramtower.serving.snapshot import Source, TableSource


@pytest.fixture
def path(tmp_path):
    return shutil.copy(folder() / "history.gramtower", tmp_path / "served.gramtower")


def served(path, **options):
    said = []
    return Models([source("one", path=path, **options)], Metrics(), said.append), said


def test_a_new_file_is_taken_up_and_the_old_model_goes(path):
    models, _ = served(path)
    before = models.get("one")
    assert models.reload(changed_only=True) == []
    shutil.copy(folder() / "plain.gramtower", path)
    assert models.reload(changed_only=True) == ["one"]
    assert models.get().left.embeddings.shape[1] == 5
    assert before.left.embeddings.shape[1] == 6  # whoever began with it ends with it
    old = weakref.ref(before)
    del before
    gc.collect()
    assert old() is None


def test_a_table_that_changes_is_taken_up(path, tmp_path):
    table = shutil.copy(folder() / "items.csv", tmp_path / "items.csv")
    read = functools.partial(frames.read_frame, "--right-table", table)
    tables = {"right": TableSource("--right-table", read, "item")}
    models = Models([Source("one", path, tables=tables, files=(table,))], Metrics())
    assert models.reload(changed_only=True) == []
    table.write_text(table.read_text().replace("Thing 1,", "Another thing,"))
    assert models.reload(changed_only=True) == ["one"]
    right = models.get().right
    assert right.table.titles[right.rows(["i1"])[0]] == "Another thing, naïve"


def test_the_files_of_a_command_are_those_that_are_watched(path, tmp_path, monkeypatch):
    taken = []
    monkeypatch.setattr(server, "serve", lambda sources, *_: taken.extend(sources))
    items = folder() / "items.csv"
    assert run(["serve", str(path), "--right-table", str(items), "--watch"]) == 0
    assert taken[0].files == (items,)
    assert taken[0].tables["right"].id == "item"  # as the model says


@pytest.mark.parametrize("damage", ["garbage", "empty", "cut", "flipped", "gone", "folder"])
def test_a_damaged_file_is_refused_and_the_old_one_serves_on(path, damage):
    models, said = served(path)
    whole = path.read_bytes()
    if damage in ("gone", "folder"):
        path.unlink()
        if damage == "folder":
            path.mkdir()
    else:  # in place, under the feet of the server
        flipped = bytearray(whole)
        flipped[len(whole) // 2] ^= 1
        path.write_bytes({"garbage": b"x" * 10, "empty": b"", "cut": whole[:-7], "flipped": bytes(flipped)}[damage])
    before = models.get()
    for _ in range(2):
        assert models.reload(changed_only=True) == []
    assert models.get() is before
    assert len([line for line in said if "refused" in line]) == 1  # not tried again until it changes
    assert "/proc/" not in said[-1]
    query = before.query(3, left=["a/b"])
    found = before.recommend([query])[0][0]
    assert before.right.names(found[0]) == model().recommend(["a/b"], k=3)[0][0].tolist()
    if damage != "folder":
        path.write_bytes(whole)
        assert models.reload(changed_only=True) == ["one"]
        assert models.refused == {}


def test_a_file_that_is_damaged_at_the_start_is_an_error_that_names_it(path):
    path.write_bytes(b"nonsense")
    with pytest.raises(ValueError, match=r"served\.gramtower.*safetensors"):
        served(path)


def test_a_model_of_a_later_version_is_refused_and_says_what_to_do(path):
    models, said = served(path)
    write(path, "gramtower-model", 10_000, {}, {})
    assert models.reload() == []
    assert "upgrade gramtower" in said[-1]


def test_requests_go_on_while_models_are_swapped(path):
    app, parts = service(source("one", path=path))
    plain = (folder() / "plain.gramtower").read_bytes()
    whole = path.read_bytes()
    with Client(app) as api:
        dims = set()
        for swap in range(6):
            futures = [api.begin("POST", "/embed", json={"ids": ["a/b"]}) for _ in range(10)]
            path.write_bytes([plain, whole, b"broken"][swap % 3])
            parts.models.reload()
            answers = [future.result(30) for future in futures]
            assert {answer.status_code for answer in answers} == {200}
            dims |= {len(answer.json()["embeddings"][0]) for answer in answers}
            dims.add(len(api.post("/embed", json={"ids": ["a/b"]}).json()["embeddings"][0]))
        assert dims == {5, 6}
        text = api.get("/metrics").text
        assert 'gramtower_model_swaps_total{outcome="loaded"} 4' in text
        assert 'gramtower_model_swaps_total{outcome="refused"} 2' in text
        assert api.get("/ready").json()["refused_models"] == 1


def test_two_models_of_one_name_are_refused():
    with pytest.raises(ValueError, match="name"), client(source("plain", False), source("plain", False)):
        pass


def test_no_memory_for_a_second_model_is_no_end_of_the_watch(path, monkeypatch):
    models, said = served(path)
    before = models.get()
    shutil.copy(folder() / "plain.gramtower", path)

    def fails(source):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    with monkeypatch.context() as patched:
        patched.setattr("gramtower.serving.served_models.Snapshot", fails)
        assert models.reload(changed_only=True) == []
    assert models.get() is before
    assert "RuntimeError: DefaultCPUAllocator" in models.refused["one"]
    assert "the old one serves on" in said[-1]
    assert models.reload() == ["one"]
    assert not models.refused
