"""Looking at a run: ``gramtower report`` of fits and tunings, ``model.plot()`` and ``search.plot()``."""

from __future__ import annotations

import itertools
import json
import re
import sys
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser

import numpy as np
import pytest

import gramtower as gt
from gramtower._util.checks import LeftOutWarning
from gramtower.data.interactions import Interactions
from gramtower.experiments.figures import binned
from gramtower.experiments.fit_report import FitRun, examples, fit_page, groups_of, validation_pairs
from gramtower.experiments.tuning.report import read_search

pytest.importorskip("cyclopts", reason="the command line needs cyclopts")
pytest.importorskip("polars", reason="the command line reads tables with polars")
pytest.importorskip("matplotlib", reason="figures need matplotlib")

from gramtower.cli.program import run

COLUMNS = ["--left", "user", "--right", "item"]
SMALL = ["--dim", "4", "--hidden", "none", "--device", "cpu", "--quiet", "--max-iterations", "4"]


def call(capsys, *tokens):
    code = run([str(token) for token in tokens])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Pairs, titles, a fit with validation, one that was fitted again on all pairs, and a tuning."""
    home, rng = tmp_path_factory.mktemp("pages"), np.random.default_rng(0)
    pairs = sorted({(u, min(39, int(rng.exponential(9)))) for u in range(60) for _ in range(rng.integers(2, 20))})
    rows = [f"u{u},i{i}" for u, i in rng.permutation(pairs)]
    (home / "train.csv").write_text("user,item\n" + "\n".join(rows[:-40]) + "\n")
    (home / "test.csv").write_text("user,item\n" + "\n".join([*rows[-40:], "u1,stranger"]) + "\n")
    (home / "items.csv").write_text("item,title,kind\n" + "\n".join(f"i{i},Film <{i}>,k{i % 3}" for i in range(40)))
    fit = ["fit", home / "train.csv", *COLUMNS, *SMALL, "--validation", "0.2"]
    for tokens in (
        [*fit, "--right-features", home / "items.csv", "--out", home / "run"],
        [*fit, "--refit", "--out", home / "again"],
        ["tune", home / "train.csv", *COLUMNS, *SMALL, "--trials", "5", "--out", home / "tuned"],
    ):
        assert run([str(token) for token in tokens]) == 0
    return home


class Loading(HTMLParser):
    """What a page asks the browser to load."""

    def __init__(self, text):
        super().__init__()
        self.asked = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        named = ("src", "href", "data", "poster", "srcset", "action")
        self.asked += [(tag, value) for name, value in attributes if name in named]


def test_the_page_of_a_fit_is_whole_and_loads_nothing(folder, capsys):
    code, out, err = call(capsys, "report", folder / "run", "--json")
    assert (code, err) == (0, "")
    found, text = json.loads(out), (folder / "run/report.html").read_text()
    assert (found["kind"], found["status"]) == ("fit", "finished")
    for heading in ("Curves", "Data", "Metrics by popularity and activity", "Examples of lists", "Settings"):
        assert f"<h2>{heading}</h2>" in text
    asked = Loading(text).asked
    assert len(asked) == 2
    assert all(tag == "img" and value.startswith("data:image/svg+xml;base64,") for tag, value in asked)
    assert "default-src 'none'" in text
    assert not re.findall(r"https?://|url\(|@import", text)
    assert "Film &lt;" in text  # a title, as text
    assert "Film <" not in text
    assert "dim: 4" in text
    model = gt.load(folder / "run/model.gramtower")
    assert found["data"]["pairs"] == model.trained_.nnz
    assert found["data"]["density"] == pytest.approx(model.trained_.nnz / (60 * model.trained_.shape[1]))


def test_no_page_of_a_run_scrolls_sideways(folder, tmp_path, too_wide):
    assert run(["report", str(folder / "run"), "--test", str(folder / "test.csv"), "--quiet"]) == 0
    assert run(["report", str(folder / "tuned"), "--quiet"]) == 0
    fitted = gt.load(folder / "run/model.gramtower").fitted_
    titles = {"left": ["ManyLettersWithoutASpace" * 20] * 60, "right": ["Many words of a title " * 20] * 40}
    long = FitRun("a title " * 40, {"fit": fitted.history}, model=fitted, titles=titles)
    (tmp_path / "long.html").write_text(fit_page(long)[0])
    assert too_wide(folder / "run/report.html", folder / "tuned/report.html", tmp_path / "long.html") == []


def test_lists_are_whole_and_the_data_names_the_entities(folder, capsys):
    model = gt.load(folder / "run/model.gramtower")
    text = unescape(fit_page(FitRun("run", {"fit": model.history_}, model=model.fitted_))[0])
    for one in examples(model.fitted_, None):
        assert f"<h3>user {model.left_.ids[one.row]}</h3>" in text
        assert "".join(f"<li>{model.right_.ids[column]}</li>" for column in one.listed) in text
    m, n = model.trained_.shape
    assert f"{m} user × {n} item entities" in text


def test_test_pairs_and_validation_pairs_are_told_apart(folder):
    model = gt.load(folder / "run/model.gramtower")
    held_out = (validation_pairs(model.fitted_), "some pairs")
    made = FitRun("run", {"fit": model.history_}, {"metric": "map@5"}, model=model.fitted_, held_out=held_out)
    apart = "Their numbers do not compare"
    assert apart in fit_page(replace(made, tested=True))[0]
    assert apart not in fit_page(made)[0]


def test_metrics_by_group_are_those_of_evaluate_and_counts_add_up(folder):
    model = gt.load(folder / "run/model.gramtower")
    held_out = validation_pairs(model.fitted_)
    groups = {group.name: group for group in groups_of(model.fitted_, held_out, ("recall@20",))}
    test = Interactions(held_out, model.left_.ids, model.right_.ids)
    for by in ("popularity", "activity"):
        expected = model.evaluate(test, ("recall@20",), by=by)
        parts = [groups[f"{by} {name}"] for name in ("low", "mid", "high")]
        assert [part.metrics["recall@20"] for part in parts] == [
            expected[f"recall@20 {by}={name}"] for name in ("low", "mid", "high")
        ]
        assert [part.users for part in parts] == list(expected.groups.values())
        assert sum(part.pairs for part in parts) == held_out.nnz == groups["all"].pairs
        assert all(one.most < next_.least for one, next_ in itertools.pairwise(parts))
    degrees = np.bincount(model.trained_.indices, minlength=len(model.right_))
    low = groups["popularity low"]
    assert low.entities == (degrees <= low.most).sum()
    assert low.pairs == (degrees[held_out.indices] <= low.most).sum()


def test_examples_leave_out_training_pairs_and_mark_held_out_ones(folder):
    fitted = gt.load(folder / "run/model.gramtower").fitted_
    held_out = validation_pairs(fitted)
    found = examples(fitted, held_out)
    assert len(found) == 5
    assert [one.pairs for one in found] == sorted(one.pairs for one in found)
    assert any(any(one.hits) for one in found)
    for one in found:
        trained, relevant = set(fitted.trained[one.row].indices), set(held_out[one.row].indices)
        assert len(one.listed) == 10
        assert not trained & set(one.listed)
        assert set(one.known) <= trained
        assert one.hits == [column in relevant for column in one.listed]


def test_a_fit_on_all_pairs_is_measured_on_the_test_that_is_given(folder, capsys):
    _, out, _ = call(capsys, "report", folder / "again", "--json")
    assert json.loads(out)["measured"]["groups"] == []
    page = (folder / "again/report.html").read_text()
    assert "--test FILE" in page
    assert "with validation" in page  # both halves are drawn
    assert "on all pairs" in page
    tokens = [
        "report",
        folder / "again",
        "--test",
        folder / "test.csv",
        "--right-table",
        folder / "items.csv",
        "--json",
    ]
    _, out, _ = call(capsys, *tokens)
    every = json.loads(out)["measured"]["groups"][0]
    model = gt.load(folder / "again/model.gramtower")
    with pytest.warns(LeftOutWarning):
        expected = model.evaluate(Interactions.from_csv(folder / "test.csv", "user", "item"))
    assert every["metrics"] == {name: pytest.approx(value) for name, value in expected.items()}
    assert (every["users"], every["pairs"]) == (expected.users, 40)
    page = (folder / "again/report.html").read_text()
    assert "Film &lt;" in page
    assert "1 pairs of entities that the model does not know are left out" in page


def test_a_fit_without_a_model_yet_has_curves_and_says_so(folder, tmp_path, capsys):
    lines = (folder / "run/history.jsonl").read_text()
    (tmp_path / "history.jsonl").write_text(lines)
    code, out, _ = call(capsys, "report", tmp_path, "--json")
    assert (code, json.loads(out)["status"]) == (0, "unfinished")
    assert "<h2>Curves</h2>" in (tmp_path / "report.html").read_text()
    assert call(capsys, "report", tmp_path, "--test", folder / "test.csv")[0] == 2
    (tmp_path / "history.jsonl").write_text('{"something": "else"}\n')
    assert "is not a history" in call(capsys, "report", tmp_path)[2]


def test_the_page_of_a_tuning_shows_all_trials(folder, capsys):
    code, out, err = call(capsys, "report", folder / "tuned", "--json")
    assert (code, err) == (0, "")
    found, search = json.loads(out), read_search(folder / "tuned")
    assert (found["kind"], found["trials"], found["value"]) == ("tuning", 5, search.best.value)
    assert json.loads(json.dumps(search.to_json())) == json.loads((folder / "tuned/report.json").read_text())
    text = unescape((folder / "tuned/report.html").read_text())
    for trial in search.trials:
        assert re.search(rf"<th scope=row>{trial.number}</th><td[^>]*>{trial.value:.4f}</td>", text)
    assert [tag for tag, _ in Loading(text).asked] == ["img"]
    assert call(capsys, "report", folder / "tuned", "--test", folder / "test.csv")[0] == 2


@pytest.mark.parametrize("text", ["{}", "[1]", "{", '{"trials": [{"number": 1}]}'])
def test_a_damaged_report_of_a_tuning_is_refused(text, tmp_path, capsys):
    (tmp_path / "report.json").write_text(text)
    code, _, err = call(capsys, "report", tmp_path)
    assert code == 2
    assert "report.json is damaged" in err


def test_plots_draw_the_records_and_the_trials(folder):
    model = gt.load(folder / "run/model.gramtower")
    objective, metric, *_ = model.plot().axes
    assert objective.lines[0].get_ydata().tolist() == [record.value for record in model.history_]
    assert metric.lines[0].get_ydata().tolist() == [record.metric for record in model.history_]
    assert metric.get_ylabel() == "validation ndcg@20"
    search = read_search(folder / "tuned")
    trials, curves, importance = search.plot().axes
    values = [trial.value for trial in search.trials if not trial.pruned]
    assert trials.lines[0].get_ydata().tolist() == values
    assert curves.lines[-1].get_ydata().tolist() == search.best.curve
    assert [bar.get_width() for bar in importance.patches][::-1] == list(search.importance.values())[:12]


def test_without_matplotlib_plots_say_what_to_install_and_pages_have_the_rest(folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for plot in (gt.load(folder / "run/model.gramtower").plot, read_search(folder / "tuned").plot):
        with pytest.raises(ImportError, match=re.escape('pip install "gramtower[plots]"')):
            plot()
    for name in ("run", "tuned"):
        code, _, err = call(capsys, "report", folder / name)
        assert code == 0
        assert 'pip install "gramtower[plots]"' in err
        assert "<h2>Settings</h2>" in (folder / name / "report.html").read_text()


def test_validation_pairs_are_told_from_histories_own_pairs_and_labels():
    rng = np.random.default_rng(0)
    ids = [f"n{x}" for x in range(30)]
    links = Interactions.from_arrays(rng.choice(ids, 200), rng.choice(ids, 200), same_entities=True)
    model = gt.TwoTower(dim=2, max_iterations=2, device="cpu").fit(links, "history", validation=0.2)
    kept = validation_pairs(model.fitted_)
    assert kept.nnz == model.fitted_.further.nnz - sum(x in set(model.right_.ids) for x in model.left_.ids)
    model.add(histories=[[ids[0], ids[1]]], left_ids=["added"])
    assert (validation_pairs(model.fitted_) != sp_resized(kept, model.seen_.shape)).nnz == 0
    signs = dict(value=rng.choice([-1.0, 1.0], 200), labels=True)
    labels = Interactions.from_arrays(rng.choice(ids, 200), rng.integers(20, size=200), **signs)
    model = gt.TwoTower(dim=2, max_iterations=2, device="cpu").fit(labels, validation=0.2)
    assert validation_pairs(model.fitted_) is None


def sp_resized(matrix, shape):
    made = matrix.copy()
    made.resize(shape)
    return made


def test_bins_double_and_hold_every_entity():
    labels, counts = binned(np.array([0, 0, 1, 2, 3, 4, 7, 8, 100]))
    assert labels == ["0", "1", "2–3", "4–7", "8–15", "16–31", "32–63", "64–127"]
    assert counts == [2, 1, 2, 2, 1, 0, 0, 1]
    assert binned(np.zeros(3, dtype=np.int64)) == (["0"], [3])
