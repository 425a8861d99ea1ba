"""`gramtower split`: files that hold every pair once, cut as the Python functions cut, that the other commands read."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("cyclopts", reason="the command line needs cyclopts")
pytest.importorskip("polars", reason="the command line reads tables with polars")

from gramtower.cli.program import run
from gramtower.data import splits
from gramtower.data.frames import separator_of
from gramtower.data.interactions import Interactions

COLUMNS = ("--left", "user", "--right", "item", "--time", "when")


@pytest.fixture
def table(tmp_path):
    rng = np.random.default_rng(0)
    rows = {
        (f"u{int(i)}", f"{int(j):03d}")
        for i, j in zip(rng.integers(0, 20, 200), 30 * rng.random(200) ** 2, strict=True)
    }
    path = tmp_path / "pairs.csv"
    lines = [f"{u},{i},{rng.integers(1, 6)},{rng.integers(0, 40)}" for u, i in sorted(rows)]
    path.write_text("user,item,rating,when\n" + "\n".join(lines) + "\n")
    return path


def pairs_of(path):
    if path.suffix == ".parquet":
        return by_id(Interactions.from_parquet(path, "user", "item", time="time"))
    return by_id(Interactions.from_csv(path, "user", "item", time="time", separator=separator_of(path)))


def by_id(pairs):
    entries = pairs.matrix.tocoo()
    left, right = pairs.left_ids[entries.row].tolist(), pairs.right_ids[entries.col].tolist()
    return set(zip(left, right, pairs.times.tolist(), strict=True))


def answer(capsys, *tokens):
    assert run([*map(str, tokens), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refusal(capsys, *tokens):
    assert run([*map(str, tokens)]) == 2
    return capsys.readouterr().err


WAYS = {
    "random": (["--share", "0.3"], lambda p: splits.random_pairs(p, 0.3, seed=3)),
    "per-user": (["--minimum", "2"], lambda p: splits.per_user(p, 0.2, minimum=2, seed=3)),
    "last": (["--count", "2"], lambda p: splits.leave_last(p, 2, seed=3)),
    "time": (["--cut", "30"], lambda p: splits.by_time(p, cut=30, seed=3)),
    "cold-left": ([], lambda p: splits.held_out(p, "left", 0.2, seed=3)),
    "cold-right": (["--share", "0.1"], lambda p: splits.held_out(p, "right", 0.1, seed=3)),
}


@pytest.mark.parametrize("by", WAYS)
def test_the_files_hold_the_parts_of_the_python_split(by, table, tmp_path, capsys):
    flags, cut = WAYS[by]
    found = answer(capsys, "split", table, *COLUMNS, "--by", by, *flags, "--seed", 3, "--out", tmp_path / "parts")
    expected = cut(Interactions.from_csv(table, "user", "item", time="when"))
    for name in ("train", "test"):
        part = getattr(expected, name)
        assert pairs_of(tmp_path / "parts" / f"{name}.csv") == by_id(part)
        facts = found["splits"][0][name]
        assert (facts["pairs"], facts["left"], facts["right"]) == (len(part), *part.without_empty().shape)
    trained = expected.train.without_empty()
    trained = (set(trained.left_ids), set(trained.right_ids))
    new = [1 for u, i, _ in by_id(expected.test) if u not in trained[0] or i not in trained[1]]
    assert found["splits"][0]["test_pairs_of_new_entities"] == len(new)
    assert (by.startswith("cold")) <= (len(new) == len(expected.test))
    assert json.loads((tmp_path / "parts/split.json").read_text()) == {k: v for k, v in found.items() if k != "out"}


@pytest.mark.parametrize(("of", "ending"), [("pairs", "tsv.gz"), ("left", "parquet"), ("right", "csv.gz")])
def test_folds_test_every_pair_once(of, ending, table, tmp_path, capsys):
    out = tmp_path / "folds"
    tokens = ("split", table, *COLUMNS, "--by", "folds", "--count", 2, "--folds-of", of, "--out", out)
    found = answer(capsys, *tokens, "--file-format", ending)
    whole = by_id(Interactions.from_csv(table, "user", "item", time="when"))
    tests = [pairs_of(out / f"test-{fold}.{ending}") for fold in (1, 2)]
    assert tests[0] | tests[1] == whole
    assert sum(map(len, tests)) == len(whole) == found["pairs"]
    assert pairs_of(out / f"train-1.{ending}") == tests[1]
    assert pairs_of(out / f"train-2.{ending}") == tests[0]
    assert run([*map(str, tokens)]) == 0
    assert "test-2.csv" in capsys.readouterr().out
    assert {path.suffix for path in out.iterdir()} == {".csv", ".json"}  # those of the earlier split are gone


def test_the_parts_are_read_by_fit_and_evaluate(table, tmp_path, capsys):
    parts, columns = tmp_path / "parts", ("--left", "user", "--right", "item")
    found = answer(
        capsys, "split", table, *columns, "--by", "cold-left", "--history", 0.5, "--out", parts
    )  # times were not read
    assert found["columns"] == ["user", "item"]
    assert set(found["splits"][0]) == {"train", "test", "history", "test_pairs_of_new_entities"}
    small = ("--history", "--dim", 2, "--hidden", "none", "--max-iterations", 1, "--device", "cpu", "--quiet")
    assert answer(capsys, "fit", parts / "train.csv", *columns, *small, "--out", tmp_path / "run")
    shown = answer(
        capsys, "evaluate", tmp_path / "run", "--test", parts / "test.csv", "--histories", parts / "history.csv"
    )
    assert 0 <= shown["metrics"]["recall@20"] <= 1


def test_all_parts_have_the_same_columns(table, tmp_path, capsys):
    """A part whose values are all 1 has the column of values too, if any part has."""
    table.write_text("user,item,rating,when\n" + "".join(f"u,i{n},{5 if n == 3 else 1},{n}\n" for n in range(10)))
    parts = tmp_path / "parts"
    answer(
        capsys,
        "split",
        table,
        *COLUMNS,
        "--value",
        "rating",
        "--by",
        "time",
        "--cut",
        "1970-01-01T00:00:08",
        "--out",
        parts,
    )
    heads = {(parts / f"{name}.csv").read_text().splitlines()[0] for name in ("train", "test")}
    assert heads == {"user,item,value,time"}
    assert len((parts / "test.csv").read_text().splitlines()) == 3


def test_a_table_says_what_was_written(table, tmp_path, capsys):
    assert run(["split", str(table), *COLUMNS, "--by", "last", "--out", str(tmp_path / "parts")]) == 0
    shown = capsys.readouterr().out
    assert "train.csv" in shown
    assert "pairs" in shown


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--by", "sideways"], "by: got 'sideways', expected one of 'random', 'per-user', 'last', 'time'"),
        (["--by", "random", "--share", "0"], "--share: got 0.0, expected a share above 0 and below 1"),
        (["--by", "random", "--share", "1"], "--share: got 1.0"),
        (["--by", "cold-left", "--share", "nan"], "--share: got nan"),
        (["--by", "cold-left", "--share", "0.99"], "share: got 0.99 of 20 left entities with pairs, expected a share"),
        (["--by", "cold-left", "--history", "1"], "--history: got 1.0"),
        (["--by", "random", "--cut", "3"], "--cut: got '3', expected nothing with --by random: it goes with --by time"),
        (["--by", "time", "--cut", "3", "--share", "0.1"], "--cut: got 3 and --share 0.1, expected one of them"),
        (["--by", "time", "--cut", "soon"], "cut: got 'soon', expected a number, a date"),
        (["--by", "time", "--cut", "99"], "none would be in test"),
        (["--by", "folds", "--count", "21", "--folds-of", "left"], "21 folds of 20 left entities with pairs"),
        (["--by", "folds", "--count", "1"], "--count: got 1, expected an integer >= 2"),
        (["--by", "folds", "--folds-of", "users"], "--folds-of: got 'users', expected one of 'pairs'"),
        (["--by", "random", "--validation", "0.1"], "--validation"),
        (["--by", "last", "--count", "0"], "--count: got 0"),
        (["--by", "random", "--file-format", "xlsx"], "file-format: got 'xlsx'"),
        (["--by", "random", "--seed", "-1"], "seed: got -1"),
    ],
)
def test_bad_flags_are_refused_and_nothing_is_written(flags, text, table, tmp_path, capsys):
    assert text in refusal(capsys, "split", table, *COLUMNS, *flags, "--out", tmp_path / "parts")
    assert not (tmp_path / "parts").exists()


@pytest.mark.parametrize("by", ["time", "last"])
def test_times_are_needed_where_they_decide(by, table, tmp_path, capsys):
    said = refusal(capsys, "split", table, *COLUMNS[:4], "--by", by, "--out", tmp_path / "parts")
    assert f"--by: got {by} with pairs that have no times, expected --time, the column of times" in said


@pytest.mark.parametrize("earlier", [False, True])
def test_a_split_that_was_killed_is_repeated(earlier, table, tmp_path, capsys):
    tokens = ("split", table, *COLUMNS, "--by", "random", "--out", tmp_path / "parts")
    if earlier:
        answer(capsys, *tokens)
    left = tmp_path / "parts/.gramtower-abc.partial"  # what a killed process leaves
    left.mkdir(parents=True)
    (left / "content").write_text("user,it")
    answer(capsys, *tokens)
    assert sorted(path.name for path in (tmp_path / "parts").iterdir()) == ["split.json", "test.csv", "train.csv"]


def test_a_folder_of_others_is_left_alone(table, tmp_path, capsys):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "train.csv").write_text("user,item\na,b\n")
    tokens = ("split", table, *COLUMNS, "--by", "random", "--out", mine)
    assert "which holds other files such as train.csv" in refusal(capsys, *tokens)
    (mine / "split.json").write_text("[]")
    assert "which holds other files such as split.json" in refusal(capsys, *tokens)
    assert (mine / "train.csv").read_text() == "user,item\na,b\n"
    assert "which is a file" in refusal(capsys, *tokens[:-1], table)
