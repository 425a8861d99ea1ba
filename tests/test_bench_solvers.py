"""benchmarks/bench_solvers.py: it runs in pieces, and its numbers are what it says they are."""

from __future__ import annotations

import json

import pytest
from benchmark_scripts import benchmark


@pytest.fixture(scope="module")
def bench():
    with benchmark("bench_solvers") as script:
        yield script


def test_it_runs_in_pieces_that_add_up(bench, tmp_path):
    common = ["--tiny", "--out", str(tmp_path), "--problems"]
    path = bench.main(bench.parse([*common, "wikispeedia-32,pages-hidden", "--methods", "newton-kron"]))
    first = json.loads(path.read_text())
    assert {"processor", "torch", "date"} <= set(first["environment"])
    assert set(first["problems"]) == {"wikispeedia-32", "pages-hidden"}
    assert first["problems"]["pages-hidden"]["data"] == "generated, same shape"
    path = bench.main(bench.parse([*common, "pages-hidden", "--methods", "lbfgs,gd", "--keep-reference"]))
    problems = json.loads(path.read_text())["problems"]
    runs = problems["pages-hidden"]["runs"]
    assert set(runs) == {"reference", "newton-kron", "lbfgs", "gd"}
    assert runs["reference"] == first["problems"]["pages-hidden"]["runs"]["reference"]
    assert all(run["curve"][-1][1] < run["curve"][0][1] for run in runs.values())
    assert problems["wikispeedia-32"] == first["problems"]["wikispeedia-32"]


def test_there_are_problems_of_every_kind_and_each_can_be_made(bench, tmp_path):
    assert list(bench.parse(["--device", "cuda"]).problems) == list(bench.CASES)
    assert not any(name.endswith("-1024") for name in bench.parse([]).problems)
    assert set(bench.parse([]).methods) == set(bench.SOLVERS)
    kinds = set()
    for case in bench.CASES.values():
        problem, towers = case.make(bench.SOURCES[case.source].load(tmp_path, True), "cpu", True)
        assert problem.at(towers).value > 0
        kinds.add((bool(case.hidden), problem.left.kind, problem.embedding_l2 > 0))
    assert {(False, "ids", True), (False, "ids", False), (True, "ids", False), (True, "sparse", True)} <= kinds


def test_ratios_are_default_over_the_best_of_the_others(bench, capsys):
    def made(*curve):
        return {"curve": [(*point, 10 * point[0]) for point in curve], "seconds": curve[-1][0]}

    runs = {
        "reference": made((0.0, 300.0), (90.0, 100.0)),
        "newton-kron": made((0.0, 300.0), (1.0, 109.0), (2.0, 100.9), (3.0, 100.05)),
        "lbfgs": made((0.0, 300.0), (0.5, 200.0), (4.0, 100.5)),
        "gd": made((0.0, 300.0), (2.0, 110.0)),
    }
    found = bench.summary(runs)
    assert found["best"] == 100.0
    assert found["seconds_to"]["gd"] == {"0.1": 2.0, "0.01": None, "0.001": None}
    assert found["passes_to"]["lbfgs"] == {"0.1": 40.0, "0.01": 40.0, "0.001": None}
    assert found["ratio"]["0.1"] == {"ratio": 0.5, "rival": "gd"}
    assert found["ratio"]["0.01"] == {"ratio": 0.5, "rival": "lbfgs"}
    assert found["ratio"]["0.001"] == {"ratio": 0.75, "rival": None}  # at most: nobody else came there in 4 s
    assert found["falling"] == 2.0  # the reference had 300 until the last quarter of its run, in which it found 100
    bench.show("a", found, "b")
    assert "2.00 times, gd" in capsys.readouterr().out.splitlines()[-1]
    assert [bench.lead(found["ratio"][level]) for level in ("0.1", "0.001")] == [
        "2.00 times, gd",
        "at least 1.33 times",
    ]
    assert bench.lead(None) == "–"


def test_unknown_problems_and_methods_are_refused(bench, capsys):
    for option in ("--problems", "--methods"):
        with pytest.raises(SystemExit):
            bench.parse([option, "gowala"])
        assert "got gowala, expected names among" in capsys.readouterr().err
