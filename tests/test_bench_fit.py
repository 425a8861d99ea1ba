"""benchmarks/bench_fit.py: it runs set by set, and times what it says it times."""

from __future__ import annotations

import json
import sys

import pytest
from benchmark_scripts import benchmark


@pytest.fixture(scope="module")
def bench():
    with benchmark("bench_fit") as script:
        yield script


def test_sets_add_up_and_polars_is_not_needed(bench, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "polars", None)
    common = ["--tiny", "--out", str(tmp_path), "--repeats", "2", "--sets"]
    bench.main(bench.parse([*common, "small"]))
    path = bench.main(bench.parse([*common, "gowalla", "--no-lists"]))
    sets = json.loads(path.read_text())["sets"]
    assert set(sets) == {"small", "gowalla"}
    small = sets["small"]
    assert small["same_objective"]
    assert small["generated"]
    assert small["shape"] == [60, 40, 400]
    assert len(small["fits"]) == 2
    assert all(0 < one["training"] < one["seconds"] for one in small["fits"])
    assert min(one["seconds"] for one in small["fits"]) <= small["warm"] <= max(one["seconds"] for one in small["fits"])
    assert 0 < small["recall@20"] <= 1
    assert "recall@20" not in sets["gowalla"]


def test_unknown_sets_and_no_fits_are_refused(bench, capsys):
    for arguments in (["--sets", "small,larger"], ["--repeats", "0"]):
        with pytest.raises(SystemExit):
            bench.parse(arguments)
    assert "larger" in capsys.readouterr().err
