"""What notebooks show: small cards without markup from data, without requests and without colours of their own."""

from __future__ import annotations

import pydoc
import re
import sys
from html.parser import HTMLParser
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

import gramtower as gt
from gramtower._util import html as html
from gramtower.data.splits import held_out_users, random_pairs
from gramtower.experiments.tuning.report import Search
from gramtower.experiments.tuning.trial import Tried
from gramtower.training.callbacks import in_notebook

NASTY = "<script>alert('x')</script>&\"'<img src=http://a.b/c>"
VOID = {"img", "br"}


class Reader(HTMLParser):
    """Text and tags of a card; the tags must be closed in order."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.words, self.attributes = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def read(card):
    """The text of a card that is sound."""
    reader = Reader()
    reader.feed(card)
    reader.close()
    assert not reader.open
    assert len(card) < 8000
    assert not {"script", "img", "link", "iframe", "style"} & set(reader.tags)
    assert not {name for name, _ in reader.attributes} & {"src", "href", "onclick", "onerror"}
    styles = " ".join(value for name, value in reader.attributes if name == "style")
    colours = re.findall(r"#[0-9a-f]{3,6}\b|rgb\(|(?<!-)\bcolor:(?!inherit)|background:(?!none)", styles)
    assert not colours, "of its own: unreadable in one of light and dark"
    return " ".join(reader.words)


def pairs(**more):
    rng = np.random.default_rng(0)
    left = [NASTY + str(i) for i in rng.integers(12, size=150)]
    right = [f"i{j}" for j in rng.integers(10, size=150)]
    return gt.Interactions.from_arrays(left, right, left_name="<b>who</b>", **more)


def small(**changes):
    return gt.TwoTower(**{"dim": 2, "hidden": (), "max_iterations": 2, "device": "cpu", "select": False} | changes)


def test_pairs_show_sizes_and_the_first_of_them():
    data = pairs(time=np.arange(150.0))
    text = read(data._repr_html_())
    for expected in (f"{len(data):,}", "<b>who</b>", "12", "times", NASTY[:20], f"and {len(data) - 5:,} more"):
        assert expected in text
    row = data.left_ids[0], data.right_ids[data.matrix.indices[0]]
    assert row[1] in text


def test_pairs_after_empty_rows_are_shown_under_their_own_ids():
    matrix = np.zeros((4, 3))
    matrix[2, 1] = matrix[3, 0] = 2.0
    text = read(
        gt.Interactions.from_matrix(__import__("scipy.sparse").sparse.csr_matrix(matrix), list("abcd"))._repr_html_()
    )
    assert re.search(r"c\s+1\s+2\s+d\s+0\s+2\b", text)
    assert "labels" in text


def test_no_pairs_are_shown_too():
    data = pairs()
    read(data.subset(np.zeros(len(data), dtype=bool))._repr_html_())


def test_splits_show_their_parts():
    text = read(held_out_users(pairs(), 0.3)._repr_html_())
    assert "train" in text
    assert "history" in text


def test_models_show_settings_before_and_what_was_learned_after_a_fit():
    assert "not fitted yet" in read(small()._repr_html_())
    split = random_pairs(pairs(), 0.2)
    model = small().fit(split.train, validation=split.test)
    for card in (model._repr_html_(), model.fitted_._repr_html_()):
        text = read(card)
        for expected in ("entities", "12", "id", "objective", "best validation metric", "Stopped: finished"):
            assert expected in text
        assert "<polyline" in card
    assert "dim=2" in read(model._repr_html_())


def test_metrics_show_values_groups_and_what_is_left_out():
    split = random_pairs(pairs(), 0.3)
    model = small().fit(split.train)
    scores = model.evaluate(split.test, ("recall@3", "ndcg@3"), by="popularity")
    text = read(scores._repr_html_())
    assert f"{scores['recall@3']:.4f}" in text
    assert f"{scores['ndcg@3 popularity=high']:.4f}" in text
    assert f"over {scores.users:,} left entities" in text
    assert "pairs do not count" not in text
    assert "pairs do not count: " in read(model.evaluate(pairs(), ("recall@3",))._repr_html_())


def test_cross_validation_and_runs_show_theirs():
    found = gt.cross_validate(small(), pairs(), 3, ("recall@3",))
    text = read(found._repr_html_())
    assert all(f"{value:.4f}" in text for value in (found.mean["recall@3"], *found.values("recall@3")))
    problem = gt.Problem(pairs().matrix)
    result = gt.minimize(problem, gt.mlp_towers(problem, hidden=(), dim=2), max_iterations=2)
    assert "Stopped: finished the planned iterations (2)" in read(result._repr_html_())


def test_searches_show_the_best_settings_and_trials():
    trials = [
        Tried(i, {"omega": 0.1 * (i + 1), "hidden": NASTY}, value, 3, [0.1, value], 1.0, False, "TOLERANCE")
        for i, value in enumerate([0.2, 0.4, 0.3])
    ]
    search = Search("map@5", trials, 1, {"omega": 0.75}, {}, "ids", {"omega": "0.1 to 1"}, {}, 12.0)
    text = read(search._repr_html_())
    assert text.startswith("Search: map@5 0.4000, 0.2000 at the first settings")
    for expected in ("0.1 to 1", "0.75", "3 trials in 12 s", "<script>"):
        assert expected in text


@pytest.mark.parametrize(
    ("value", "shown"),
    [(12345, "12,345"), (0.12345, "0.1235"), (1e-9, "1e-09"), (123456.7, "1.235e+05"), (float("nan"), "–"), (None, "–"),
     (True, "yes"), ("x" * 99, "x" * 59 + "…"), ("a<b", "a&lt;b")],
)  # fmt: skip
def test_cells_are_short_and_escaped(value, shown):
    assert html.text(value) == shown


def test_a_curve_needs_two_finite_points():
    assert html.curve([1.0], "x") == html.curve([1.0, float("nan")], "x") == ""
    assert html.curve([2.0, 2.0, float("inf"), 1.0], NASTY).count(",") == 3
    read(html.curve([1.0, 2.0], NASTY))


@pytest.fixture
def notebook(monkeypatch):
    """Stands for IPython in a kernel: keeps what is displayed."""
    kept = []

    def display(content, raw, display_id):
        kept.append(content)
        return SimpleNamespace(update=lambda content, raw: kept.append(content))

    package, shown = ModuleType("IPython"), ModuleType("IPython.display")
    package.get_ipython = lambda: SimpleNamespace(kernel=object())
    shown.display = display
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", shown)
    return kept


def test_the_bar_of_a_notebook_is_one_output_that_moves(notebook, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.progress", None)  # which it does without
    model = small(max_iterations=3).fit(pairs(), callbacks=[gt.ProgressBar()])
    texts = [read(one["text/html"]) for one in notebook]
    assert [re.search(r"iteration (\d) of 3", text)[1] for text in texts] == ["0", "1", "2", "3", "3"]
    assert [re.search('value="(.)" max="3"', one["text/html"])[1] for one in notebook] == list("01233")
    assert "s left" in texts[1]
    assert "s left" not in texts[-1]
    assert f"objective {model.history_[-1].value:.6g}" in notebook[-1]["text/plain"]


def test_a_terminal_is_no_notebook(monkeypatch):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert not in_notebook()
    for shell in (None, SimpleNamespace()):  # not in IPython, and in its terminal
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda shell=shell: shell))
        assert not in_notebook()


def public():
    """Public names and the methods of public classes that newcomers meet first."""
    for name in gt.__all__:
        yield name, getattr(gt, name)
    for owner in (gt.Interactions, gt.TwoTower, gt.CrossValidation):
        for name in vars(owner):
            if not name.startswith("_") and callable(getattr(owner, name)):
                yield f"{owner.__name__}.{name}", getattr(owner, name)


def test_help_of_the_estimator_can_be_shown():
    assert "Two networks whose dot product" in pydoc.render_doc(gt.TwoTower)


@pytest.mark.parametrize(("name", "one"), list(public()), ids=lambda one: one if isinstance(one, str) else "")
def test_help_opens_with_a_sentence_in_plain_words(name, one):
    first = one.__doc__.splitlines()[0]
    assert first.endswith((".", "…."))
    assert len(first.split()) >= 4
    assert not re.search(r"[α-ωΑ-Ω∇ᵀŷ]|eq:", first)


def test_models_are_described_in_the_words_of_the_data():
    users, items = ["ann", "ann", "bob"], ["tea", "milk", "tea"]
    named = small().fit(gt.Interactions.from_arrays(users, items, left_name="user", right_name="item"))
    assert ": 2 user entities by id and 2 item entities by id" in str(named)
    assert "user" in read(named._repr_html_())
    unnamed = small().fit(gt.Interactions.from_arrays(users, items))
    assert ": 2 left entities by id and 2 right entities by id" in str(unnamed)
