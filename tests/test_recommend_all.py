"""Lists of all left entities in a file: those of `recommend`, resumed after a kill, refused where they must be."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import namedtuple

import numpy as np
import pytest
import scipy.sparse as sp

import gramtower as gt
from gramtower.data import list_files
from gramtower.data.list_files import ListFile
from gramtower.data.tables import FeatureTable
from gramtower.retrieval.topk import Ranking

pl = pytest.importorskip("polars", reason="files of lists are written with polars")

M, N, K = 50, 40, 7


def fit(pairs):
    return gt.TwoTower(dim=4, hidden=(), max_iterations=3, device="cpu", select=False).fit(pairs)


def matrix(seed=0):
    return sp.random(M, N, 0.15, "csr", random_state=seed, data_rvs=lambda size: np.ones(size))


def named(left, right):
    found = matrix().tocoo()
    return gt.Interactions.from_arrays([left(i) for i in found.row], [right(j) for j in found.col])


MODELS = {
    "rows": matrix,
    "numbers": lambda: named(lambda i: 10**12 + 7 * int(i), lambda j: -3 * int(j)),
    "text": lambda: named(lambda i: f'läft "{i}", x', lambda j: f"{j}\t;ü"),
    "mixed": lambda: named(lambda i: f"{i:03d}", lambda j: int(j)),
}


@pytest.fixture(scope="module")
def models():
    return {name: fit(made()) for name, made in MODELS.items()}


@pytest.fixture
def model(models):
    return models["text"]


@pytest.fixture
def small_parts(monkeypatch):
    """Eight lists of seven in a part."""
    monkeypatch.setattr(list_files, "_ANSWERS", 8 * K)


def read(path):
    if path.suffix == ".parquet":
        return pl.read_parquet(path)
    return pl.read_csv(path, separator="\t" if path.suffix == ".tsv" else ",", infer_schema=False)


def expected(model, k=K, **options):
    """Rows of a table, from `recommend`."""
    ids = range(len(model.left_)) if model.left_.ids is None else model.left_.ids.tolist()
    found, scores = model.recommend(ids, k, **options)
    return [
        (key, rank + 1, answer, score)
        for key, answers, values in zip(ids, found.tolist(), scores.tolist(), strict=True)
        for rank, (answer, score) in enumerate(zip(answers, values, strict=True))
        if score > -np.inf
    ]


def assert_same(table, rows):
    assert table.columns == ["left", "rank", "right", "score"]
    for column, ours in enumerate(zip(*rows, strict=True)):
        theirs = table.to_series(column).to_list()
        if column == 3:
            np.testing.assert_allclose(np.array(theirs, np.float32), ours, rtol=1e-6, atol=1e-7)
        elif table.dtypes[column] == pl.String:
            assert theirs == list(map(str, ours))
        else:
            assert theirs == list(ours)


@pytest.mark.parametrize("ending", [".parquet", ".csv", ".tsv"])
@pytest.mark.parametrize("kind", MODELS)
def test_the_lists_are_those_of_recommend_for_ids_of_any_type(models, kind, ending, tmp_path, small_parts):
    out, model = tmp_path / f"lists{ending}", models[kind]
    rows = expected(model)
    assert model.recommend_all(out, K) == len(rows)
    assert_same(read(out), rows)
    assert sorted(x.name for x in tmp_path.iterdir()) == [out.name]
    if ending == ".parquet":
        sides = [pl.String if side.ids is not None and side.ids.dtype == object else pl.Int64
                 for side in (model.left_, model.right_)]  # fmt: skip
        assert pl.read_parquet(out).dtypes == [sides[0], pl.Int32, sides[1], pl.Float32]


@pytest.mark.parametrize(
    "options",
    [
        {"exclude_seen": False},
        {"exclude": matrix(seed=1)},
        {"allow": [3, 1, 17, 30]},
        {"allow": [3, 1], "deny": [3]},
        {"deny": [0, 39], "exclude": matrix(seed=2)},
        {"candidates": "trained"},
        {"allow": []},
    ],
)
def test_what_is_left_out_is_what_recommend_leaves_out(models, options, tmp_path, small_parts):
    out = tmp_path / "lists.parquet"
    models["rows"].recommend_all(out, K, **options)
    assert_same(read(out), expected(models["rows"], **options))


def test_new_right_entities_are_ranked_and_those_without_a_name_refused(tmp_path):
    found = matrix().tocoo()
    pairs = gt.Interactions.from_arrays([f"u{i}" for i in found.row], [f"i{j}" for j in found.col])
    items = {"id": [str(x) for x in pairs.right_ids], "size": [float(x[1:]) for x in pairs.right_ids]}
    table = FeatureTable(items, id="id", numeric=["size"])
    model = gt.TwoTower(dim=4, max_iterations=3, device="cpu").fit(pairs, right_features=table)
    new = {"id": ["n1", "n2"], "size": [3.0, 5.0]}
    model.recommend_all(tmp_path / "lists.csv", 60, right_features=new)
    assert_same(read(tmp_path / "lists.csv"), expected(model, 60, right_features=new))
    with pytest.raises(ValueError, match=r"right_features.*entity"):
        model.recommend_all(tmp_path / "other.csv", 5, right_features={"size": [3.0, 5.0]})
    assert [x.name for x in tmp_path.iterdir()] == ["lists.csv"]


class Killed(Exception):
    pass


def stop_after(lists):
    def progress(done, total):
        if done >= lists:
            raise Killed

    return progress


@pytest.mark.parametrize("ending", [".parquet", ".csv"])
def test_a_run_that_stopped_goes_on_after_its_last_part(model, ending, tmp_path, small_parts):
    out, steps = tmp_path / f"lists{ending}", []
    out.write_text("an older file")
    with pytest.raises(Killed):
        model.recommend_all(out, K, progress=stop_after(24))
    assert out.read_text() == "an older file"
    parts = sorted((tmp_path / f"lists{ending}.parts").glob("part-*"))
    before = {part: part.stat().st_mtime_ns for part in parts[:3]}
    written = model.recommend_all(out, K, progress=lambda done, total: steps.append((done, total)))
    assert len(before) == 3
    assert steps[0][0] >= 24
    assert steps[-1] == (M, M)
    assert written < len(expected(model))
    assert_same(read(out), expected(model))
    assert [x.name for x in tmp_path.iterdir()] == [out.name]


@pytest.mark.parametrize("lists", [8, 40, 48])
def test_a_run_that_goes_on_ends_in_the_same_bytes(model, lists, tmp_path, small_parts):
    whole, out = tmp_path / "whole.parquet", tmp_path / "lists.parquet"
    model.recommend_all(whole, K)
    with pytest.raises(Killed):
        model.recommend_all(out, K, progress=stop_after(lists))
    model.recommend_all(out, K)
    assert out.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("left", [(), (".gramtower-abc.partial",), ("part-000001.csv", "part-000004.csv")])
def test_a_run_killed_as_it_made_or_removed_its_folder_is_repeated(model, left, fresh, tmp_path, small_parts):
    folder = tmp_path / "lists.csv.parts"
    folder.mkdir()
    for name in left:
        (folder / name).write_text("left,rank,right,score\nwrong,1,wrong,0\n")
    model.recommend_all(tmp_path / "lists.csv", K, fresh=fresh)
    assert_same(read(tmp_path / "lists.csv"), expected(model))
    assert not folder.exists()


def test_parts_that_are_there_are_not_made_again(model, tmp_path, small_parts):
    out = tmp_path / "lists.csv"
    with pytest.raises(Killed):
        model.recommend_all(out, K, progress=stop_after(24))
    first = tmp_path / "lists.csv.parts" / "part-000000.csv"
    first.write_text(first.read_text().replace("läft", "LEFT"))
    model.recommend_all(out, K)
    assert read(out)["left"].to_list()[0].startswith("LEFT")


def test_parts_of_other_lists_are_refused_by_what_differs(models, tmp_path, small_parts):
    out, model = tmp_path / "lists.csv", models["text"]
    with pytest.raises(Killed):
        model.recommend_all(out, K, progress=stop_after(8))
    for arguments, what in (
        ({"k": 5}, r"other k \(7, now 5\)"),
        ({"exclude_seen": False}, "other pairs left out"),
        ({"deny": model.right_.ids[:1]}, "other right entities denied"),
        ({"allow": model.right_.ids[:9]}, "other right embeddings"),
    ):
        with pytest.raises(ValueError, match=what):
            model.recommend_all(out, **{"k": K, **arguments})
    with pytest.raises(ValueError, match="left ids"):
        models["numbers"].recommend_all(out, K)
    model.recommend_all(out, 5, fresh=True)
    assert_same(read(out), expected(model, 5))


def test_a_foreign_folder_is_neither_used_nor_removed(model, tmp_path):
    folder = tmp_path / "lists.csv.parts"
    folder.mkdir()
    (folder / "mine.txt").write_text("mine")
    for fresh in (False, True):
        with pytest.raises(ValueError, match=r"lists\.csv\.parts"):
            model.recommend_all(tmp_path / "lists.csv", K, fresh=fresh)
    assert (folder / "mine.txt").read_text() == "mine"


def test_too_little_disk_is_refused_before_anything_is_written(model, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 1000, 1000))
    with pytest.raises(ValueError, match=r"path.*lists.csv.*0 MB free"):
        model.recommend_all(tmp_path / "lists.csv", K)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ending", [".parquet", ".csv"])
def test_the_estimate_of_the_room_is_about_what_is_taken(ending, tmp_path):
    rows, n, k = 3000, 5000, 50
    rng = np.random.default_rng(0)
    ids = np.array([f"entity-{i:06d}" for i in range(n)], dtype=object)
    file = ListFile(tmp_path / f"lists{ending}", (ids[:rows], ids), (rows, n), k, {})
    assert file.begin() == 0
    for part in range(file.parts):
        count = min(file.rows, rows - part * file.rows)
        scores = -np.sort(-rng.standard_normal((count, k)).astype(np.float32), axis=1)
        file.write(part, rng.integers(0, n, (count, k)), scores)
    file.finish()
    taken = 2 * (tmp_path / f"lists{ending}").stat().st_size
    assert taken <= file.room() <= 2 * taken


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"path": "lists.xlsx"}, r"path.*lists.xlsx"),
        ({"path": "."}, "path:"),
        ({"k": 0}, r"k:.*0"),
        ({"device": "tpu"}, r"device.*'tpu'"),
        ({"candidates": "some"}, r"candidates.*'some'"),
        ({"progress": 1}, r"progress.*1"),
        ({"fresh": "yes"}, "fresh"),
        ({"deny": [1.5]}, r"deny.*1.5"),
    ],
)
def test_bad_arguments_are_refused_by_name(model, arguments, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=text):
        model.recommend_all(**{"path": "lists.csv", "k": 3, **arguments})
    assert list(tmp_path.iterdir()) == []


SCRIPT = """
import sys, time
import gramtower as gt
from gramtower.data import list_files
list_files._ANSWERS = 56
def slowly(done, total):
    print(done, flush=True)
    time.sleep(0.2)
gt.load(sys.argv[1]).recommend_all(sys.argv[2], 7, progress=slowly)
"""


def test_a_killed_process_leaves_what_the_next_goes_on_from(model, tmp_path, small_parts):
    model.save(tmp_path / "model.gramtower")
    out = tmp_path / "lists.parquet"
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "model.gramtower"), str(out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    while int(process.stdout.readline()) < 16:
        pass
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not out.exists()
    assert len(list((tmp_path / "lists.parquet.parts").glob("part-*"))) >= 2
    assert model.recommend_all(out, K) < len(expected(model))
    assert_same(read(out), expected(model))
    assert not (tmp_path / "lists.parquet.parts").exists()


def test_one_part_at_a_time_is_held(models, tmp_path, small_parts, monkeypatch):
    """Parts in memory: one that is filled, one that is being written."""
    held, most, top, write = [0], [0], Ranking.top, ListFile.write

    def counted(*arguments):
        held[0] += 1
        most[0] = max(most[0], held[0])
        columns, values = top(*arguments)
        assert columns.size <= 8 * K
        return columns, values

    def written(self, *arguments):
        answers = write(self, *arguments)
        held[0] -= 1
        return answers

    monkeypatch.setattr(Ranking, "top", counted)
    monkeypatch.setattr(ListFile, "write", written)
    models["rows"].recommend_all(tmp_path / "lists.csv", K)
    assert most[0] <= 3


def test_the_command_writes_them(model, tmp_path, capsys):
    pytest.importorskip("cyclopts")
    from gramtower.cli.program import run

    model.save(tmp_path / "model.gramtower")
    out = tmp_path / "lists.parquet"
    tokens = ["recommend", str(tmp_path / "model.gramtower"), "-k", str(K), "--all"]
    assert run([*tokens, "--out", str(out), "--json"]) == 0
    printed = capsys.readouterr()
    facts = json.loads(printed.out)
    assert facts["lists"] == M
    assert facts["answers"] == len(expected(model))
    assert "50 of 50 lists" in printed.err
    assert_same(read(out), expected(model))
    for more, text in (
        ([], "--out: got none"),
        (["--left", "x", "--out", str(out)], "--left: got given with --all"),
        (["--out", "lists.txt"], "path: got lists.txt"),
    ):
        assert run([*tokens, *more]) == 2
        assert text in capsys.readouterr().err
    assert run([*tokens[:-1], "--left", "x", "--out", str(out)]) == 2
    assert "only with --all" in capsys.readouterr().err
