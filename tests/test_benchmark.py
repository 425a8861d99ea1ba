"""Benchmarks of models: one split and one rule for all, intervals that mean something, a stop that costs nothing."""

from __future__ import annotations

import importlib.util
import json
import logging
import re
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
import scipy.sparse as sp

import gramtower as gt
from gramtower.data.splits import random_pairs
from gramtower.experiments import benchmark_runner as entries
from gramtower.experiments.baselines import EASE, Popularity
from gramtower.experiments.benchmark_report import (
    Manifest,
    Run,
    about,
    build,
    page,
    read_run,
    summarise,
)
from gramtower.experiments.benchmark_runner import make_cut
from gramtower.experiments.run_store import RunStore

METRICS = ("recall@5", "ndcg@5", "coverage@5")
implicit = pytest.mark.skipif(importlib.util.find_spec("implicit") is None, reason="implicit is not installed")


def sample(seed=0, users=60, items=40):
    """Users who like items of their own group."""
    rng = np.random.default_rng(seed)
    left = rng.integers(0, users, 900)
    right = (rng.integers(0, items // 4, 900) * 4 + left % 4) % items
    return gt.Interactions.from_arrays([f"u{i}" for i in left], right)


def small(**options):
    return gt.TwoTower(**{"dim": 4, "hidden": (), "max_iterations": 2, "device": "cpu", "select": False} | options)


class First:
    """A model of few lines: everyone gets the first items that they do not have."""

    fits = 0

    def __init__(self, shift=0, seed=None):
        self.shift, self.seed = shift, seed

    def get_params(self):
        return {"shift": self.shift, "seed": self.seed}

    def fit(self, pairs):
        type(self).fits += 1
        self.pairs = pairs

    def recommend(self, ids, k):
        rows = self.pairs.matrix[self.pairs.left_rows(ids)].toarray() != 0
        scores = np.where(rows, -np.inf, -((np.arange(rows.shape[1]) - self.shift) % rows.shape[1]).astype(float))
        order = np.argsort(-scores, axis=1)[:, :k]
        return self.pairs.right_ids[order], np.take_along_axis(scores, order, 1)


class Stopped(First):
    """One that is interrupted, or fails, at a seed."""

    at: int | None = 1
    error: BaseException = KeyboardInterrupt()

    def fit(self, pairs):
        if self.seed == type(self).at:
            raise type(self).error
        super().fit(pairs)


@pytest.fixture(autouse=True)
def _anew():
    First.fits = Stopped.fits = 0
    Stopped.at, Stopped.error = 1, KeyboardInterrupt()


def test_values_are_those_of_the_models_own_evaluation_on_the_same_splits():
    pairs = sample()
    found = gt.benchmark(pairs, 0.2, metrics=METRICS, models={"mine": small()}, baselines=["popularity"], seeds=[3, 5])
    for seed in (3, 5):
        split = random_pairs(pairs, 0.2, seed=seed)
        expected = small(seed=seed).fit(split.train).evaluate(split.test, METRICS)
        for metric in METRICS:
            value = found.summary["models"]["mine"]["metrics"][metric]["by_seed"][str(seed)]
            assert value == pytest.approx(expected[metric], abs=1e-12)
    (run, _) = [run for run in found.runs if run.name == "mine"]
    assert len(run.users) == len(run.per_user["recall@5"])
    assert set(run.per_user) == {"recall@5", "ndcg@5"}
    facts = found.summary["models"]["popularity"]
    mean = np.mean(list(facts["metrics"]["recall@5"]["by_seed"].values()))
    assert facts["metrics"]["recall@5"]["mean"] == pytest.approx(mean)
    assert facts["metrics"]["coverage@5"]["interval"] is None


def test_all_that_comes_with_it_runs_and_who_won_is_said():
    pairs = sample()
    groups = sp.csr_matrix(np.eye(4)[pairs.right_ids % 4])
    found = gt.benchmark(pairs, 0.2, metrics="recall@5", right_features=["id", groups], seeds=1)
    named = ["popularity", "item-knn", "ease", "als", "gramtower-linear"]
    named += ["gramtower-linear-features", "gramtower-hidden-features"]
    assert list(found.summary["models"]) == named
    for name, facts in found.summary["models"].items():
        missing = name in ("item-knn", "als") and importlib.util.find_spec("implicit") is None
        assert facts["status"] == ("left out" if missing else "finished")
    assert found.best != "popularity"
    assert found.verdict.startswith(f"{found.best} has the best recall@5, ")
    lines = repr(found).splitlines()
    assert lines[0].split()[:2] == ["model", "recall@5"]
    assert lines[1].startswith(found.best)
    assert lines[-1] == found.verdict
    json.dumps(found.to_dict(), allow_nan=False)


def test_without_implicit_its_models_are_left_out_and_said(monkeypatch):
    monkeypatch.setattr(entries, "needs_implicit", lambda model: "not here" if type(model).__name__ == "ALS" else None)
    found = gt.benchmark(sample(), baselines=["popularity", "als"], seeds=1)
    assert found.summary["models"]["als"]["status"] == "left out"
    assert "als left out: not here" in repr(found)
    assert "no other model ran" in found.verdict
    with pytest.raises(ValueError, match=r"models.*als"):
        gt.benchmark(sample(), baselines=["als"])
    with pytest.raises(ValueError, match=r"reference.*'als'"):
        gt.benchmark(sample(), baselines=["popularity", "als"], reference="als")


def test_ease_beyond_its_size_is_left_out_and_said():
    found = gt.benchmark(sample(), baselines=["popularity"], models={"EASE": EASE(most_items=39)}, seeds=1)
    assert "40 items are more than 39" in found.summary["models"]["EASE"]["message"]


@implicit
def test_models_of_implicit_and_baselines_with_other_settings_take_part():
    bpr = importlib.import_module("implicit.cpu.bpr").BayesianPersonalizedRanking(factors=4, iterations=3)
    knn = importlib.import_module("implicit.nearest_neighbours").CosineRecommender(5)
    own = {
        "bpr": bpr,
        "cosine": knn,
        "popular": Popularity(),
        "refitted": (small(), {"validation": 0.2, "refit": True}),
    }
    found = gt.benchmark(sample(), 0.2, metrics="recall@5", baselines=[], models=own, seeds=2)
    assert {facts["status"] for facts in found.summary["models"].values()} == {"finished"}
    assert bpr.user_factors is None  # the one given stays as it is
    values = found.summary["models"]["bpr"]["metrics"]["recall@5"]["by_seed"].values()
    assert len(set(values)) == 2


def test_given_pairs_are_tested_under_every_seed_and_what_needs_no_seed_runs_once():
    split = random_pairs(sample(), 0.2, seed=9)
    found = gt.benchmark(
        split.train, split.test, metrics="recall@5", baselines=["popularity"], models={"mine": First()}, seeds=3
    )
    assert First.fits == 3
    facts = found.summary["models"]
    assert facts["popularity"]["runs"] == 1
    assert len(facts["popularity"]["metrics"]["recall@5"]["by_seed"]) == 3
    assert facts["mine"]["metrics"]["recall@5"]["difference"] is None or found.best == "popularity"


def test_no_list_holds_what_is_seen_and_no_entity_is_its_own_item():
    rng = np.random.default_rng(0)
    links = rng.integers(0, 30, (400, 2))
    links = links[links[:, 0] != links[:, 1]]
    pairs = gt.Interactions.from_arrays(links[:, 0], links[:, 1], same_entities=True)
    cut = make_cut(pairs, 0.2, 0)
    for entry in entries.make_entries(pairs, None, None, {}):
        if entry.facts.left_out is None:
            candidate = entry.make()
            candidate.fit(cut.train, 0)
            lists = candidate.lists(cut.users, 30, cut.seen)
            shown = np.zeros((len(cut.users), pairs.shape[1]), dtype=bool)
            shown[np.nonzero(lists >= 0)[0], lists[lists >= 0]] = True
            seen = cut.train.matrix[cut.users].toarray() != 0
            own = np.equal.outer(pairs.left_ids[cut.users], pairs.right_ids)
            np.testing.assert_array_equal(shown, ~(seen | own), err_msg=entry.name)  # all others, each once


class Forgetful(First):
    """One that recommends what users have."""

    def recommend(self, ids, k):
        return np.tile(self.pairs.right_ids[:k], (len(ids), 1)), np.zeros((len(ids), k))


def test_a_model_that_recommends_what_is_seen_fails_and_the_rest_runs():
    found = gt.benchmark(
        sample(), metrics="recall@5", baselines=["popularity"], models={"forgetful": Forgetful(), "f": First()}, seeds=1
    )
    facts = found.summary["models"]["forgetful"]
    assert facts["status"] == "failed"
    assert re.search(r"lists: got \d+ items that are seen, expected none", facts["message"])
    assert found.summary["models"]["f"]["status"] == "finished"
    assert "forgetful failed: seed 0: lists: got" in repr(found)


def manifest(names, seeds, **options):
    facts = {"kind": "own", "settings": {}, "random": True, "left_out": None}
    data = {"left": 1, "right": 1, "pairs": 1, "test": "a given test"}
    given = {"title": "t", "data": data, "fixed_test": True, "metrics": ["recall@5"], "reference": None}
    return Manifest(**given | {"seeds": seeds, "models": {name: dict(facts) for name in names}} | options)


def run_of(name, seed, values):
    values = np.asarray(values, dtype=np.float64)
    means = {"recall@5": float(np.mean(values))}
    return Run(name, seed, means, np.arange(len(values)), {"recall@5": values}, 1.0, 0.5, 3_000_000, 1_000_000)


def test_intervals_cover_means_and_differences_as_often_as_they_say():
    rng = np.random.default_rng(1)
    covered = np.zeros(3)
    for _ in range(150):
        user = rng.normal(0.0, 0.3, 200)  # what makes a user hard for both
        one, two = (0.5 + user + rng.normal(shift, 0.05, (2, 200)) for shift in (0.0, -0.02))
        runs = [run_of("one", s, one[s]) for s in (0, 1)] + [run_of("two", s, two[s]) for s in (0, 1)]
        found = summarise(manifest(["one", "two"], [0, 1], reference="one"), runs, replicates=200)["models"]
        spans = [found["one"]["metrics"]["recall@5"]["interval"], found["two"]["metrics"]["recall@5"]["interval"]]
        spans.append(found["two"]["metrics"]["recall@5"]["difference"]["interval"])
        covered += [low <= truth <= high for (low, high), truth in zip(spans, (0.5, 0.48, -0.02), strict=True)]
        assert spans[2][1] - spans[2][0] < 0.3 * (spans[0][1] - spans[0][0])  # pairs: what users share cancels
    assert (covered / 150 >= 0.89).all()
    assert (covered / 150 <= 0.99).all()


def test_the_verdict_says_whether_zero_is_in_the_interval():
    rng = np.random.default_rng(0)
    base = rng.random(300)
    noise = 0.05 * rng.normal(size=300)
    noise -= noise.mean()
    runs = [run_of("a", 0, base), run_of("b", 0, base + noise - 0.001), run_of("c", 0, base + noise - 0.05)]
    names = ["c", "b", "a"]
    close = summarise(manifest(names, [0]), runs)
    assert close["ranking"] == ["a", "b", "c"]
    assert re.match(
        r"a has the best recall@5, 0\.\d{4} \(95% .*\): \+0\.0010 \(95% -.* against b, the next", close["verdict"]
    )
    assert close["verdict"].endswith("The interval includes zero: these users cannot tell the two apart.")
    clear = summarise(manifest(["a", "c"], [0]), [runs[0], runs[2]])
    assert clear["verdict"].endswith("against c, the next. The interval excludes zero.")
    assert clear["models"]["c"]["metrics"]["recall@5"]["difference"]["excludes_zero"]
    assert clear["models"]["c"]["metrics"]["recall@5"]["difference"]["mean"] == pytest.approx(-0.05)
    assert clear["models"]["a"]["peak_bytes"] == 3_000_000
    assert clear["models"]["a"]["added_bytes"] == 2_000_000


def test_a_model_without_all_its_seeds_does_not_win():
    runs = [run_of("a", 0, np.ones(5)), run_of("b", 0, np.zeros(5)), run_of("b", 1, np.zeros(5))]
    found = summarise(manifest(["a", "b"], [0, 1]), runs)
    assert found["best"] == "b"
    assert found["models"]["a"]["status"] == "unfinished"
    assert found["verdict"].startswith("Of the models whose runs have all ended, b has the best recall@5, 0.0000")
    assert summarise(manifest(["a"], [0]), [])["verdict"] == "No model has ended yet, so none won."


def test_what_a_kill_left_next_to_finished_runs_goes(tmp_path):
    given = {"metrics": "recall@5", "baselines": ["popularity"], "seeds": 1, "out": tmp_path}
    gt.benchmark(sample(), 0.2, **given)
    (tmp_path / "runs/.gramtower-abc.partial").mkdir()
    gt.benchmark(sample(), 0.2, **given)
    assert not list((tmp_path / "runs").glob(".gramtower*"))


def test_an_interrupted_benchmark_goes_on_and_ends_as_an_uninterrupted_one(tmp_path):
    given = {"metrics": "recall@5", "baselines": ["popularity"], "models": {"mine": Stopped()}, "seeds": 2}
    lines = []
    with pytest.raises(KeyboardInterrupt):
        gt.benchmark(sample(), 0.2, **given, out=tmp_path / "a", progress=lines.append)
    assert [line.split(":")[0] for line in lines] == [
        "4 runs to do; first",
        "1/4  popularity, seed 0",
        "2/4  mine, seed 0",
        "3/4  popularity, seed 1",
    ]
    assert lines[1].endswith("; next: mine, seed 0")
    assert Stopped.fits == 1
    half = build(tmp_path / "a")  # what report makes of it meanwhile
    assert half.summary["models"]["mine"]["status"] == "unfinished"
    assert half.best == "popularity"
    Stopped.at = None
    lines.clear()
    again = gt.benchmark(sample(), 0.2, **given, out=tmp_path / "a", progress=lines.append)
    assert Stopped.fits == 2  # only what was missing
    assert lines[0] == "3 of 4 runs are there already"
    whole = gt.benchmark(sample(), 0.2, **given, out=tmp_path / "b")
    for name in ("popularity", "mine"):
        assert again.summary["models"][name]["metrics"] == whole.summary["models"][name]["metrics"]
    assert json.loads((tmp_path / "a/summary.json").read_text())["verdict"] == whole.verdict


def test_a_failed_run_is_said_and_tried_again(tmp_path):
    Stopped.error = ArithmeticError("no\nluck")
    given = {"metrics": "recall@5", "baselines": ["popularity"], "models": {"mine": Stopped()}, "seeds": 2}
    first = gt.benchmark(sample(), **given, out=tmp_path)
    assert first.summary["models"]["mine"]["message"] == "seed 1: ArithmeticError: no luck"
    Stopped.at = None
    second = gt.benchmark(sample(), **given, out=tmp_path)
    assert second.summary["models"]["mine"]["status"] == "finished"
    assert RunStore(tmp_path, "benchmark").read_manifest(Manifest).failures == {}


def test_models_and_seeds_are_added_and_another_benchmark_is_refused(tmp_path):
    pairs, given = sample(), {"metrics": "recall@5", "baselines": ["popularity"], "out": tmp_path}
    gt.benchmark(pairs, models={"a": First()}, seeds=1, **given)
    found = gt.benchmark(pairs, models={"b": First(3)}, seeds=2, **given)
    assert {name: facts["status"] for name, facts in found.summary["models"].items()} == {
        "popularity": "finished", "a": "unfinished", "b": "finished"
    }  # fmt: skip
    for change in (
        lambda: gt.benchmark(sample(seed=1), seeds=1, **given),
        lambda: gt.benchmark(pairs, 0.3, seeds=1, **given),
        lambda: gt.benchmark(pairs, seeds=1, **given | {"metrics": "recall@6"}),
        lambda: gt.benchmark(pairs, seeds=1, models={"a": First(7)}, **given),
    ):
        with pytest.raises(ValueError, match=r"^out: .*benchmark\.json .*(data|metrics|a),"):
            change()
    later = gt.benchmark(pairs, seeds=[7], **given)  # seeds may be any
    assert later.summary["seeds"] == [0, 1, 7]
    assert set(later.summary["users"]) == {"0", "1", "7"}
    anew = gt.benchmark(pairs, 0.3, models={"a": First(7)}, seeds=1, fresh=True, **given)
    assert list(anew.summary["models"]) == ["popularity", "a"]


def test_a_damaged_run_is_refused(tmp_path):
    gt.benchmark(sample(), metrics="recall@5", baselines=["popularity"], seeds=1, out=tmp_path)
    path = RunStore(tmp_path, "benchmark").run_path("popularity-0")
    content = path.read_text()
    for text in (content.replace('"seconds": 0.', '"seconds": 1.', 1), content[:-9], "[]", "{}", "[" * 10**5):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"popularity-0\.json is damaged"):
            build(tmp_path)
    for text in ('{"kind": "gramtower benchmark"}', '{"kind": "gramtower search", "version": 2}'):
        (tmp_path / "benchmark.json").write_text(text)
        with pytest.raises(ValueError, match=r"benchmark\.json is damaged"):
            build(tmp_path)
    (tmp_path / "benchmark.json").write_text('{"kind": "gramtower benchmark", "version": 1}')  # of version 0.2
    with pytest.raises(ValueError, match=r"benchmark\.json.*format 1"):
        build(tmp_path)
    with pytest.raises(ValueError, match=r"benchmark\.json"):
        build(tmp_path / "nothing")


def test_runs_are_stored_as_they_are(tmp_path):
    run = run_of("ein/name ..", 2**40, [0.25, np.nan])
    store = RunStore(tmp_path, "benchmark")
    store.write_run(f"{run.name}-{run.seed}", run)
    again = read_run(store, "ein/name ..", 2**40)
    assert np.isnan(again.metrics["recall@5"])
    np.testing.assert_array_equal(again.per_user["recall@5"], run.per_user["recall@5"])
    assert (again.seconds, again.peak_bytes, again.start_bytes) == (1.0, 3_000_000, 1_000_000)
    assert read_run(store, "ein/name", 2**40) is None


class _Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.links, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.links += [value for name, value in attributes if name in ("src", "href", "srcset", "data", "action")]

    def handle_data(self, data):
        self.text += data


def test_the_page_asks_for_nothing_and_says_everything():
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    found = gt.benchmark(
        sample(),
        metrics=METRICS,
        baselines=["popularity"],
        models={"<b>mine & $yours</b>": First()},
        seeds=2,
        title="a <i>",
    )
    text = found.to_html()
    made = _Page(text)
    assert all(link.startswith("data:image/svg+xml;base64,") for link in made.links)
    assert not {"script", "link", "iframe", "b", "i"} & set(made.tags)
    assert "url(" not in text
    assert "@import" not in text
    assert "default-src 'none'" in text
    for expected in ("Benchmark of models: a <i>", "<b>mine & $yours</b>", found.verdict, *METRICS, "Time and memory"):
        assert expected in made.text
    assert made.tags.count("figure") == len(METRICS)
    assert text == page(found.summary)


def test_the_page_counts_users_and_fits_every_screen(tmp_path, too_wide):
    names = {"a" * 60: First(), "a" * 59: First(), "a model of my own with many words in its name": First()}
    found = gt.benchmark(sample(), metrics=METRICS, baselines=[], models=names, title="x" * 90, seeds=1)
    (count,) = found.summary["users"].values()
    assert f"; {count:,} users have test pairs." in about(found.summary)
    two = found.summary | {"seeds": [0, 5], "users": {"0": 1200, "5": 1201}}
    assert "users with test pairs: 1,200 with seed 0, 1,201 with seed 5." in about(two)
    (tmp_path / "bench.html").write_text(found.to_html())
    assert too_wide(tmp_path / "bench.html") == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pairs": [[1, 0]]}, r"pairs.*list"),
        ({"test": 1.0}, r"test.*1.0"),
        ({"test": "file"}, r"test.*'file'"),
        ({"metrics": "auc"}, r"metrics.*'auc'"),
        ({"metrics": "mrr"}, r"metrics.*'mrr'"),
        ({"metrics": ["diversity@5"]}, r"metrics.*'diversity@5'"),
        ({"metrics": ["map@5", "map@5"]}, r"metrics.*map@5, map@5"),
        ({"seeds": 0}, r"seeds.*0"),
        ({"seeds": [1, 1]}, r"seeds.*\[1, 1\]"),
        ({"seeds": []}, r"seeds.*\[\]"),
        ({"baselines": ["eas"]}, r"baselines.*'eas'.*'ease'"),
        ({"baselines": ["ease", "ease"]}, r"baselines.*ease, ease"),
        (
            {"baselines": ["gramtower-hidden-features"]},
            r"baselines.*'gramtower-hidden-features'.*left_features.*right_features",
        ),
        ({"baselines": []}, r"models.*none"),
        ({"models": [gt.TwoTower()]}, r"models.*list"),
        ({"models": {"ease": small()}}, r"models.*'ease'"),
        ({"models": {"": small()}}, r"models.*''"),
        ({"models": {"x": gt.TwoTower}}, r"models\['x'\]: got the class TwoTower, expected a model with get_params"),
        ({"models": {"x": 3}}, r"models\['x'\]: got int"),
        ({"models": {"x": small(dim=0)}}, r"models\['x'\]: dim: got 0"),
        ({"models": {"x": small(optimizer="newtn")}}, r"models\['x'\]: optimizer: got 'newtn'"),
        ({"models": {"x": small(loss="hinge")}}, r"models\['x'\]: loss: got 'hinge'"),
        ({"models": {"x": small(max_iterations=-1)}}, r"models\['x'\]: max_iterations: got -1"),
        ({"left_features": np.ones((3, 2))}, r"left_features.*3"),
        ({"reference": "best"}, r"reference.*'best'"),
    ],
)
def test_bad_input_is_refused_before_anything_is_fitted(options, message, tmp_path):
    given = {"pairs": sample(), "baselines": ["popularity"], "models": {"first": First()}, "out": tmp_path / "new"}
    if "left_features" in options:
        given["baselines"] = None
    if options.get("baselines") == []:
        given["models"] = None
    with pytest.raises(ValueError, match=message):
        gt.benchmark(**given | options)
    assert First.fits == 0
    assert not (tmp_path / "new").exists()


def test_a_test_without_anything_new_is_refused():
    pairs = sample()
    with pytest.raises(ValueError, match=r"test:.*\d+"):
        gt.benchmark(pairs, pairs, baselines=["popularity"])


def test_lines_about_runs_are_logged_and_shown_in_a_terminal(capsys, caplog, monkeypatch):
    def lines(**options):
        gt.benchmark(sample(), metrics="recall@5", baselines=["popularity"], seeds=1, **options)
        return capsys.readouterr().err.splitlines()

    assert lines() == []
    assert len(lines(verbose=True)) == 2
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert len(lines()) == 2
    assert lines(verbose=False) == []
    with caplog.at_level(logging.INFO, logger="gramtower.benchmark"):
        assert lines(verbose=False) == []
    assert [record.name for record in caplog.records] == ["gramtower.benchmark"] * 2
