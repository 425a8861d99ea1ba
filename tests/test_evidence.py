"""Measured numbers of README.md and docs/ are those of their result files, and the check notices any that is not."""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def scripts():
    """A function that imports a script of benchmarks/."""
    before, known = list(sys.path), set(sys.modules)
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module
    sys.path[:] = before
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCHMARKS)):
            del sys.modules[name]


@pytest.fixture
def evidence(scripts):
    return scripts("evidence")


@pytest.fixture
def tables(scripts):
    return scripts("evidence_tables")


@pytest.fixture
def page(evidence, tables, tmp_path, monkeypatch):
    """A function that checks a page with a text, next to one result file."""
    results = tmp_path / "results"
    results.mkdir()
    about = {"date": "2026-11-18T10:00:00", "gramtower": "0.2.0", "processor": "Some CPU", "cores": 2, "gpu": None}
    section = {"environment": about, "recall": 0.32451, "seconds": 3.6, "bytes": 869_000_000}
    (results / "one.json").write_text(json.dumps({"cpu": section}))
    monkeypatch.setattr(evidence, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "RESULTS", results)

    def check(text):
        path = tmp_path / "page.md"
        path.write_text(text)
        return evidence.problems(path)

    return check


def test_every_number_of_the_pages_is_that_of_its_result_file(evidence):
    assert [line for page in evidence.pages() for line in evidence.problems(page)] == []


def test_few_numbers_are_only_trusted(evidence):
    found = [one for page in evidence.pages() for one in evidence.trusted(page)]
    given = [one for one in found if one.mark.startswith("<!-- given")]
    assert sum(len(one.loose) for one in given) <= 100  # settings, bounds, versions
    assert sum(len(one.loose) for one in found if one not in given) <= 70  # short numbers of large sections


def test_a_number_that_any_number_could_replace_is_only_trusted(evidence, page, tmp_path):
    page("<!-- from one cpu -->\nRecall@20 is 0.325, a fit takes 3.6 s.\n\n<!-- given: a bound -->\nBelow 0.4 here.")
    first, second = evidence.trusted(tmp_path / "page.md")
    assert (first.loose, first.count, second.loose) == ([], 2, ["0.4"])
    page("<!-- from one cpu ± 200% all -->\nRecall@20 is 0.325.")
    assert [one.loose for one in evidence.trusted(tmp_path / "page.md")] == [["0.325"]]


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


def test_findings_are_read_off_the_objectives(tables):
    names = ("newton", "gd-diag", "gd", "sogram", "sogram-diag", "sampling", "sampling-diag")
    methods = {name: {"lowest": float(place), "best_metric": 0.1} for place, name in enumerate(names)}
    methods["gd"]["best_metric"] = 0.2
    found = dict(tables._claims({"methods": methods}))
    assert found["newton before gd-diag"] == found["gd-diag before gd"] == "holds"
    mixed = found["newton and the -diag methods before gd, sogram and sampling"]
    assert mixed.startswith("does not: gd is ahead of sogram-diag, sogram is ahead of sogram-diag, gd is ahead of")
    assert found["each -diag before its plain twin"] == (
        "does not: sogram is ahead of sogram-diag, sampling is ahead of sampling-diag"
    )
    assert found["the lowest objective has the best paper MAP@5"] == "does not: gd has the best list"
    assert found["methods are ordered by paper MAP@5 as by objective"] == "does not, for 2 of 21 pairs"


def test_a_lead_is_said_only_where_no_other_had_the_time(tables, tmp_path, monkeypatch):
    methods = {name: {"lowest": 1.0, "relative_difference": 0.0} for name in ("newton-kron", "gd")}
    found = {"methods": methods, "settings": {"time_limit": 25.0}}
    for name, times in (("early", 4.0), ("late", 0.9)):
        found[name] = {**found, "first": {"0.1": {"method": "gd", "seconds": 5.0, "next": None, "times": times}}}
    (tmp_path / "compare.json").write_text(json.dumps(found))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert [row[3] for row in tables.table_lead("early", "late")[1:]] == ["no other; at least 4 times", "no other"]


def test_predictions_for_one_gpu_repeat_the_measurement_that_they_come_from(tables):
    one, two = tables.table_predicted()[1:3]
    measured = tables.load("gpu")["netflix-tf32"]["netflix"]["product"]
    assert one[1:3] == [f"{measured:.1f} ms", ""]
    assert measured / 2 < float(two[1].removesuffix(" ms")) < measured


def test_steps_exist_and_fit_into_the_stated_time(evidence):
    assert sum(step.minutes for step in evidence.CPU.values()) <= 55  # of the hour, and of ten minutes
    assert sum(step.minutes for step in evidence.GPU.values()) <= 9
    for step in (evidence.CPU | evidence.GPU | evidence.LONGER).values():
        assert (BENCHMARKS / step.command.split()[0]).exists(), step


def test_every_section_says_when_and_where_it_was_measured(tables):
    for path in tables.RESULTS.glob("*.json"):
        content = json.loads(path.read_text())
        known = dict(tables.environments(content))
        missing = [] if "" in known else [name for name in content if not any(k.startswith(name) for k in known)]
        assert missing == [], path.name
        assert all({"date", "gramtower", "processor"} <= set(about) for about in known.values()), path.name


def test_the_picture_compares_models_on_the_same_splits(tables, tmp_path, monkeypatch):
    def split(**rows):
        rows = {name: {"metrics": [0.5, score]} for name, score in rows.items()}
        return {"metrics": ["recall@20", "ndcg@20"], "rows": rows}

    sets = {"a split 0": split(default=0.2, EASE=0.1, popularity=0.05), "a split 1": split(default=0.4, EASE=0.4)}
    drawn = {"best of 9 random settings on the test part": 0.22, "best of 9 on one half, measured on the other": 0.21}
    sets["a split 0"]["rows"] |= {name: {"metrics": [0.5, score]} for name, score in drawn.items()}
    (tmp_path / "selection.json").write_text(json.dumps({"cuda": {"sets": sets}}))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    found = tables.list_scores()["a"]
    assert found["best of random settings"] == pytest.approx(1.1)
    assert found["EASE"] == pytest.approx((0.5 + 1) / 2)


WRITES = """
import json, os, pathlib, subprocess, sys, time
path = pathlib.Path(os.environ["GRAMTOWER_RESULTS"], "one.json")
known = json.loads(path.read_text()) if path.exists() else {}
what, *sizes = sys.argv[1:]
if what == "hang":
    late = f"import time, pathlib; time.sleep(3); pathlib.Path({str(path)!r}).write_text('late')"
    subprocess.run([sys.executable, "-c", late])
if what == "fail":
    sys.exit(3)
about = {"date": "2026-11-18T12:00:00", "gramtower": "0.2.0", "processor": "Some CPU", "cores": 2, "gpu": None}
path.write_text(json.dumps(known | {what: {"environment": about, "recall": 0.5, "sizes": sizes}}))
"""


@pytest.fixture
def steps(evidence, page, tmp_path, monkeypatch):
    """Steps that write a section, fail, or start a process and hang, next to a page and a result file."""
    (tmp_path / "step.py").write_text(WRITES)
    names = {"first": ("first", 1), "fails": ("fail", 1), "hangs": ("hang", 1 / 60), "cpu": ("cpu", 1)}
    made = {name: evidence.Step(f"step.py {what}", minutes, "--tiny") for name, (what, minutes) in names.items()}
    monkeypatch.setattr(evidence, "CPU", made)
    monkeypatch.setattr(evidence, "SCRIPTS", tmp_path)
    monkeypatch.setattr(evidence.signal, "signal", lambda *_: None)
    (tmp_path / "docs" / "figures").mkdir(parents=True)
    (tmp_path / "README.md").write_text("It is <!-- = one cpu/recall .3f -->0.325<!-- / --> here.\n")
    return lambda: json.loads((tmp_path / "results/one.json").read_text())


def test_a_step_that_fails_or_is_stopped_leaves_the_results_of_others(evidence, steps):
    before = steps()["cpu"]
    failed = evidence.run(["first", "fails", "hangs"])
    assert failed == ["fails: exit status 3", f"hangs: stopped after {1 / 60:g} minutes"]
    assert steps()["first"]["recall"] == 0.5
    assert steps()["cpu"] == before
    time.sleep(3)  # the process that the stopped step had started would write now
    assert set(steps()) == {"first", "cpu"}


def test_a_dry_run_ends_with_pages_of_a_copy_and_changes_nothing_here(evidence, tables, steps, tmp_path, monkeypatch):
    here, before, drawn = tmp_path / "README.md", steps(), []
    text = here.read_text()
    monkeypatch.setattr(tables, "draw", drawn.append)
    monkeypatch.setattr(sys, "argv", ["evidence.py", "--run", "first", "cpu", "--dry", "--write", "--check"])
    monkeypatch.setattr(evidence.tempfile, "mkdtemp", lambda prefix: str(tmp_path / "copy"))
    (tmp_path / "copy").mkdir()
    evidence.main()
    assert here.read_text() == text
    assert steps() == before
    copied = json.loads((tmp_path / "copy/results/one.json").read_text())
    assert copied["first"]["sizes"] == copied["cpu"]["sizes"] == ["--tiny"]
    assert "-->0.500<!-- / -->" in (tmp_path / "copy/README.md").read_text()
    assert drawn == [tmp_path / "copy/docs/figures"]


def section(date, **methods):
    return {"environment": {"date": date}, "methods": {name: {"lowest": low} for name, low in methods.items()}}


def test_sections_of_another_machine_are_taken_if_newer_and_as_whole(evidence, tables, tmp_path, monkeypatch):
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    old, new = "2026-11-15T08:00:00", "2026-11-18T08:00:00"
    mine = {"a": section(old, gd=3.0), "b": section(new, gd=3.0), "c": section(old, gd=3.0, newton=2.0)}
    theirs = {
        "a": section(new, gd=1.0),
        "b": section(old, gd=1.0),
        "c": section(new, gd=1.0),
        "d": section(new, gd=1.0),
    }
    (here / "compare.json").write_text(json.dumps(mine))
    (there / "compare.json").write_text(json.dumps(theirs))
    monkeypatch.setattr(tables, "RESULTS", here)
    evidence.take(there)
    found = json.loads((here / "compare.json").read_text())
    assert found == {"a": theirs["a"], "b": mine["b"], "c": mine["c"], "d": theirs["d"]}


def test_verdicts_are_computed(tables, tmp_path, monkeypatch):
    def run(low, best, last, status="finished"):
        return {
            "lowest": low,
            "best_metric": best,
            "last_metric": last,
            "status": status,
            "relative_difference": low - 1,
        }

    first = {"0.1": {"method": "newton-kron", "seconds": 4.0, "next": None, "times": 12.7}}
    methods = {"newton-kron": run(1.0, 0.2, 0.15), "gd-diag": run(1.5, 0.25, 0.25), "newton": run(2.0, 0.1, 0.1)}
    behind = {"gd-diag": run(2.0, 0.1, 0.1), "newton": run(1.5, 0.2, 0.2)}
    compared = {"ml1m": {"methods": methods, "first": first}, "moby": {"methods": behind}, "netflix-synthetic": {}}
    compared["netflix-synthetic"] = {"methods": behind, "synthetic": "generated"}
    path = tmp_path / "compare.json"
    path.write_text(json.dumps(compared))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert tables.computed_order("newton", "gd-diag", "real") == (
        "ahead of gd-diag on moby and behind it on ml1m (not run: wikispeedia and npm-deps)"
    )
    assert tables.computed_falls("ml1m") == "falls again, from 0.200 to 0.150"
    assert tables.computed_lists("ml1m") == (
        "gd-diag has the best paper MAP@5, 0.250, at an objective 0.50 above the lowest, where newton-kron has 0.200; "
        "by both, the order differs for 1 of 3 pairs of methods"
    )
    assert tables.computed_real() == (
        "ml1m ran on real data, netflix only on generated pairs of the same shape, ml10m and wiki-simple not at all"
    )
    assert tables.computed_lead("ml1m").endswith(
        "after 4 s, at least 13 times sooner than any of the paper's seven methods"
    )
    assert tables.table_compare("npm-deps")[1] == ["not run: `compare.json` has no section npm-deps"]
    assert [row[-1] for row in tables.table_findings("ml1m", "npm-deps")[1:]] == ["not run"] * 8
    assert tables.computed_stalls() == "This was not run on a GPU yet."
    runs = [
        {"method": method, "seed": seed, "precision": precision, "start": 9.0, "value": value, "iterations": 5,
         "stopped": "NO_DECREASE" if value == 8.0 else "TIME_LIMIT"}
        for method, values in (("newton", (5.0, 8.0)), ("newton-kron", (4.0, 4.0))) for seed in (0, 1)
        for precision, value in zip(("float32", "tf32"), values, strict=True)
    ]  # fmt: skip
    path.write_text(json.dumps({"precision-gpu": {"runs": runs}}))
    assert tables.computed_stalls().startswith("newton stalls with tf32: it ends 1.600 to 1.600 times as high")
    assert "newton-kron does not stall with tf32" in tables.computed_stalls()
    assert tables.table_precision()[1] == [
        "newton, 0", "9", "5, still falling after 5 iterations", "8, stopped by itself after 5 iterations", "1.600",
    ]  # fmt: skip


def test_a_comparison_in_which_a_method_failed_replaces_no_whole_one(scripts, tmp_path, monkeypatch):
    bench, common = scripts("bench_compare"), scripts("common")
    names = list(bench.experiment("moby")["optimizers"])

    def compared(bad=()):
        methods = {name: {"status": "failed" if name in bad else "finished", "message": "no"} for name in names}
        return lambda *_: {"methods": methods, "verdict": ""}

    def main(function):
        monkeypatch.setattr(bench, "compare", function)
        bench.main()

    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["bench_compare.py", "moby"])
    statuses = lambda: {one["status"] for one in common.read_result("compare/moby")["methods"].values()}  # noqa: E731
    with pytest.raises(SystemExit, match="gd failed: no"):
        main(compared(["gd"]))
    assert statuses() == {"failed", "finished"}  # better than nothing
    main(compared())
    assert statuses() == {"finished"}
    with pytest.raises(SystemExit, match="newton"):
        main(compared(["newton"]))
    assert statuses() == {"finished"}


def test_generated_pairs_have_the_count_asked_for_and_groups(scripts):
    pairs = scripts("common").random_pairs(400, 320, 5000, torch.device("cpu"), groups=16)
    assert pairs.shape == (400, 320)
    assert pairs.nnz == 5000
    assert pairs.has_canonical_format
    rows, columns = pairs.nonzero()
    assert 0.4 < (rows % 16 == columns // 20).mean() < 0.9  # a sixteenth without groups
