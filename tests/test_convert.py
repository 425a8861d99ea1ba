"""`gramtower convert`: the table it writes holds the pairs that were read."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("cyclopts", reason="the command line needs cyclopts")
pytest.importorskip("polars", reason="the command line reads tables with polars")

import test_mediawiki as wiki

from gramtower.cli import data_commands as module
from gramtower.cli.program import run
from gramtower.data.interactions import Interactions


@pytest.mark.parametrize("ending", [".csv", ".tsv", ".tsv.gz", ".parquet"])
def test_the_links_of_a_wiki_become_a_table_that_fit_reads(ending, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(module, "_ROWS", 3)
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    wiki.write(dumps)
    out = tmp_path / f"links{ending}"
    assert run(["convert", str(dumps), "--out", str(out), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["rows_merged"], facts["columns"], facts["pairs"]) == (1, ["from", "to"], len(wiki.EXPECTED))
    read = (
        Interactions.from_parquet(out, "from", "to")
        if ending == ".parquet"
        else Interactions.from_csv(out, "from", "to", separator="," if ending == ".csv" else "\t")
    )
    assert wiki.pairs_of(read) == wiki.EXPECTED
    fit = ["fit", str(out), "--left", "from", "--right", "to", "--dim", "2", "--hidden", "none", "--device", "cpu"]
    assert run([*fit, "--max-iterations", "1", "--quiet", "--out", str(tmp_path / "run")]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dumps", out.name, "run"]


def test_values_weights_and_times_are_kept(tmp_path):
    given = Interactions.from_arrays(
        ["a", "a", "b"],
        ["x", "y", "x"],
        value=[5.0, 1.0, 2.5],
        weight=[1.0, 2.0, 3.0],
        time=[7.0, 8.0, 9.0],
        labels=True,
    )
    module.write_pairs(given, tmp_path / "t.csv")
    options = {"value": "value", "weight": "weight", "time": "time", "labels": True}
    again = Interactions.from_csv(tmp_path / "t.csv", "left", "right", **options)
    assert np.array_equal(again.matrix.toarray(), given.matrix.toarray())
    assert (again.weights.tolist(), again.times.tolist()) == (given.weights.tolist(), given.times.tolist())


def test_an_ending_that_is_no_table_is_refused_before_reading(tmp_path, capsys):
    for name in ("links", "links.txt", "links.xz", "links.tsv.xz"):
        assert run(["convert", str(tmp_path / "nothing"), "--out", str(tmp_path / name)]) == 2
        assert "expected .csv, .tsv" in capsys.readouterr().err
    assert run(["convert", str(tmp_path / "nothing.csv"), "--out", str(tmp_path / "a.csv")]) == 2
    assert list(tmp_path.iterdir()) == []


def test_ids_in_columns_called_value_weight_or_time_are_kept(tmp_path):
    given = Interactions.from_arrays(
        [7, 7, 8], ["x", "y", "x"], value=[5, 1, 2], weight=[1, 2, 3], labels=True, left_name="value", right_name="time"
    )
    assert module.column_names(given) == ["value", "time", "pair_value", "weight"]
    module.write_pairs(given, tmp_path / "t.parquet")
    options = {"value": "pair_value", "weight": "weight", "labels": True}
    again = Interactions.from_parquet(tmp_path / "t.parquet", "value", "time", **options)
    assert (again.left_ids.tolist(), again.right_ids.tolist()) == ([7, 8], ["x", "y"])
    assert np.array_equal(again.matrix.toarray(), given.matrix.toarray())
