"""Measured numbers of README.md and docs/ are those of their result files, and the check notices any that is not."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def evidence():
    spec = importlib.util.spec_from_file_location("evidence", BENCHMARKS / "evidence.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["evidence"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["evidence"]


@pytest.fixture
def page(evidence, tmp_path, monkeypatch):
    """A function that checks a page with a text, next to one result file."""
    results = tmp_path / "results"
    results.mkdir()
    about = {"date": "2026-11-18T10:00:00", "gramtower": "0.2.0", "processor": "Some CPU", "cores": 2, "gpu": None}
    section = {"environment": about, "recall": 0.32451, "seconds": 3.6, "bytes": 869_000_000}
    (results / "one.json").write_text(json.dumps({"cpu": section}))
    monkeypatch.setattr(evidence, "ROOT", tmp_path)
    monkeypatch.setattr(evidence, "RESULTS", results)

    def check(text):
        path = tmp_path / "page.md"
        path.write_text(text)
        return evidence.problems(path)

    return check


def test_every_number_of_the_pages_is_that_of_its_result_file(evidence):
    assert [line for page in evidence.pages() for line in evidence.problems(page)] == []


def test_a_number_without_a_mark_is_found(page):
    assert "no mark" in page("Recall@20 is 0.325, and a fit takes 4 s.")[0]
    assert page("No number, `0.5` in code, torch 2.13, λ = 0.5, 1.2 million pairs.\n\n    0.7 in a listing\n") == []
    assert page("```python\nx = 0.25\n```\n\n[a link](0.5)") == []


def test_a_number_must_be_in_the_section_as_it_is_written(page):
    assert page("<!-- from one cpu -->\n- 0.325 and 0.3245, 3.6 s, 0.87 GB, 3600 ms") == []
    assert "0.326" in page("<!-- from one cpu -->\nRecall@20 is 0.326.")[0]
    assert "there is no 'gpu'" in page("<!-- from one gpu -->\nRecall@20 is 0.325.")[0]
    assert page("<!-- given: chosen -->\nA share of 0.9, at 0.95.") == []
    assert "no mark" in page("<!-- given: chosen -->\nA share of 0.9.\n\nThe next block has 0.8.")[0]


def test_times_may_differ_by_a_stated_share_and_metrics_may_not(page):
    assert page("<!-- from one cpu ± 25% -->\nA fit takes 4.2 s.") == []
    assert page("<!-- from one cpu ± 25% -->\nA fit takes 4.9 s.") != []
    assert page("<!-- from one cpu ± 25% -->\nRecall@20 is 0.35.") != []


def test_values_and_tables_are_written_from_the_results(evidence, page):
    text = "It is <!-- = one cpu/recall .3f -->0.9<!-- / --> here.\n\n<!-- table machines -->\nold\n<!-- / -->\n"
    assert "run evidence.py --write" in page(text)[0]
    new = evidence.written(text)
    assert "-->0.325<!-- / -->" in new
    assert "| `one.json` cpu | 2026-11-18 | 0.2.0 | not recorded | 2 cores of Some CPU |" in new
    assert page(new) == []
    assert "begins with a mark" in page("<!-- = one cpu/recall .3f -->0.325<!-- / --> at the start")[0]


def test_findings_are_read_off_the_objectives(evidence):
    names = ("newton", "gd-diag", "gd", "sogram", "sogram-diag", "sampling", "sampling-diag")
    methods = {name: {"lowest": float(place), "best_metric": 0.1} for place, name in enumerate(names)}
    methods["gd"]["best_metric"] = 0.2
    found = dict(evidence._claims({"methods": methods}))
    assert found["newton before gd-diag"] == found["gd-diag before gd"] == "holds"
    assert found["each -diag before its plain twin"] == (
        "does not: sogram is ahead of sogram-diag, sampling is ahead of sampling-diag"
    )
    assert found["the lowest objective has the best paper MAP@5"] == "does not: gd has the best list"


def test_steps_exist_and_fit_into_the_stated_time(evidence):
    assert sum(step.minutes for step in evidence.CPU.values()) <= 60
    assert sum(step.minutes for step in evidence.GPU.values()) <= 10
    for step in (evidence.CPU | evidence.GPU | evidence.LONGER).values():
        assert (BENCHMARKS / step.command.split()[0]).exists(), step


def test_every_section_says_when_and_where_it_was_measured(evidence):
    for path in evidence.RESULTS.glob("*.json"):
        content = json.loads(path.read_text())
        known = dict(evidence.environments(content))
        missing = [] if "" in known else [name for name in content if not any(k.startswith(name) for k in known)]
        assert missing == [], path.name
        assert all({"date", "gramtower", "processor"} <= set(about) for about in known.values()), path.name


def test_the_picture_compares_models_on_the_same_splits(evidence, tmp_path, monkeypatch):
    def split(**rows):
        rows = {name: {"metrics": [0.5, score]} for name, score in rows.items()}
        return {"metrics": ["recall@20", "ndcg@20"], "rows": rows}

    sets = {"a split 0": split(default=0.2, EASE=0.1, popularity=0.05), "a split 1": split(default=0.4, EASE=0.4)}
    more = {"a split 0": {"rows": {"best of 9 random settings": {"metrics": [0.5, 0.22]}}}}
    (tmp_path / "selection.json").write_text(json.dumps({"cuda": {"sets": sets}, "random-cuda": {"sets": more}}))
    monkeypatch.setattr(evidence, "RESULTS", tmp_path)
    found = evidence.list_scores()["a"]
    assert found["best of random settings"] == pytest.approx(1.1)
    assert found["EASE"] == pytest.approx((0.5 + 1) / 2)
