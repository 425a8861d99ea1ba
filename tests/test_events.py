"""Weights by age, logs of events, and histories that know which entries are newer."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
import scipy.sparse as sp

import gramtower as gt
from gramtower.data.ids import decays, duration
from gramtower.model.feature_spec import history_features
from gramtower.model.side import listed_histories

DAY = 86_400
LOG = {
    "user": ["ann", "ann", "ann", "bob", "bob"],
    "item": ["tea", "tea", "milk", "tea", "milk"],
    "type": ["view", "buy", "view", "cart", "skip"],
    "day": ["2024-01-01", "2024-01-31", "2024-01-31", "2024-01-21", "2024-02-10"],
}
WEIGHTS = {"view": 1, "cart": 3, "buy": 10, "skip": 0}


def small(**settings):
    return gt.TwoTower(dim=4, hidden=(8,), max_iterations=2, select=False, device="cpu", **settings)


def by_pair(pairs):
    found = pairs.matrix.tocoo()
    names = zip(pairs.left_ids[found.row], pairs.right_ids[found.col], strict=True)
    return dict(zip(names, pairs.weights.tolist(), strict=True))


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ("90d", 90 * DAY),
        (" 1.5 h ", 5400),
        ("4w", 28 * DAY),
        ("20min", 1200),
        (".5s", 0.5),
        ("30 days", 30 * DAY),
        ("1 week", 7 * DAY),
        ("90 seconds", 90),
        ("2 hours", 7200),
        ("5 mins", 300),
        (timedelta(days=2), 2 * DAY),
        (np.timedelta64(3, "D"), 3 * DAY),
    ],
)
def test_a_duration_is_text_with_a_unit_or_a_timedelta(given, seconds):
    assert duration("half_life", given) == seconds


def test_pandas_timedeltas_are_durations():
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    assert duration("half_life", pandas.Timedelta("90D")) == 90 * DAY
    with pytest.raises(ValueError, match="half_life"):
        duration("half_life", pandas.NaT)


@pytest.mark.parametrize(
    "wrong",
    [
        "90",
        "d",
        "-3d",
        "0d",
        "3m",
        "3 months",
        "2 ss",
        "days",
        "1e400d",
        90,
        0.5,
        None,
        True,
        timedelta(0),
        timedelta(-1),
    ],
)
def test_what_is_not_a_positive_duration_is_refused(wrong):
    with pytest.raises(ValueError, match="half_life"):
        duration("half_life", wrong)


def test_the_weight_halves_with_every_half_life_of_age():
    times = np.array([0.0, 10.0, 20.0, np.nan]) * DAY
    assert decays(times, "10d")[:3].tolist() == [0.25, 0.5, 1.0]
    assert np.isnan(decays(times, "10d")[3])
    assert decays(times, "10d", 40 * DAY)[:3].tolist() == [1 / 16, 1 / 8, 1 / 4]
    assert decays(times, "10d", datetime(1970, 1, 31, tzinfo=UTC))[2] == 0.5
    assert decays(times, "10d", "1970-01-31")[2] == 0.5


def test_times_after_now_and_milliseconds_are_refused():
    times = np.array([0.0, 20.0]) * DAY
    with pytest.raises(ValueError, match=r"now: .*1 later"):
        decays(times, "10d", 19 * DAY)
    future = np.append(times, 32_503_680_000.0)  # one wrong row in the year 3000
    with pytest.raises(ValueError, match=r"^time: .*3000-01-01"):
        decays(future, "10d")
    assert decays(future, "10d", now="3000-01-01")[2] == 1
    with pytest.raises(ValueError, match="milliseconds"):
        decays(np.array([1.7e12]), "10d")
    with pytest.raises(ValueError, match="half_life"):
        decays(times, "1s", 1e9)  # nothing would count


def test_decayed_pairs_keep_the_weights_that_they_have():
    pairs = gt.Interactions.from_arrays(list("aab"), list("xyx"), weight=[2.0, 3.0, 4.0], time=[0, DAY, DAY])
    assert pairs.decayed("1d").weights.tolist() == [1.0, 3.0, 4.0]
    assert pairs.weights.tolist() == [2.0, 3.0, 4.0]
    with pytest.raises(ValueError, match=r"half_life: .*times"):
        gt.Interactions.from_arrays(list("ab"), list("xy")).decayed("1d")


def test_fit_weighs_pairs_by_age_as_weights_would():
    times = np.random.default_rng(0).integers(0, 100, 300) * DAY
    left, right = np.arange(300) % 30, np.arange(300) * 7 % 23
    pairs = gt.Interactions.from_arrays(left, right, time=times, duplicates="last")
    weights = 0.5 ** ((pairs.times.max() - pairs.times) / (20 * DAY))
    by_hand = gt.Interactions(pairs.matrix, pairs.left_ids, pairs.right_ids, weights=weights.astype(np.float32))
    found, wanted = small().fit(pairs, half_life="20d"), small().fit(by_hand)
    assert np.allclose(found.embed(), wanted.embed(), atol=1e-6)
    assert not np.allclose(found.embed(), small().fit(pairs).embed(), atol=1e-3)
    assert not found.fitted_.plain_pairs  # update refuses it
    with pytest.raises(ValueError, match="half_life"):
        small().fit(pairs.matrix, half_life="20d")


def test_a_frame_with_a_column_of_times_is_weighed_by_age():
    pytest.importorskip("polars", reason="tables are read by polars")
    frame = {
        "u": ["a", "b", "c", "a"],
        "i": ["x", "y", "x", "y"],
        "t": ["2024-01-01", "2024-01-11", "2024-01-21", None],
    }
    with pytest.warns(UserWarning, match="1 without"):
        model = small().fit(frame, left="u", right="i", time="t", half_life="10d")
    assert model.trained_.nnz == 3
    with pytest.raises(ValueError, match="half_life"):
        small().fit(frame, left="u", right="i", half_life="10d")


def test_events_of_a_pair_are_added_and_a_weight_of_zero_leaves_them_out():
    pytest.importorskip("polars", reason="tables are read by polars")
    named = {"event": "type", "weights": WEIGHTS}
    pairs = gt.Interactions.from_events(LOG, "user", "item", **named)
    assert by_pair(pairs) == {("ann", "tea"): 11, ("ann", "milk"): 1, ("bob", "tea"): 3}
    assert (pairs.matrix.data == 1).all()
    largest = gt.Interactions.from_events(LOG, "user", "item", duplicates="max", **named)
    assert by_pair(largest)["ann", "tea"] == 10


def test_each_event_is_as_old_as_it_is():
    pytest.importorskip("polars", reason="tables are read by polars")
    named = {"event": "type", "weights": WEIGHTS, "time": "day", "half_life": "10d"}
    pairs = gt.Interactions.from_events(LOG, "user", "item", **named)  # the event without weight is not the newest
    assert by_pair(pairs) == {("ann", "tea"): 10 + 1 / 8, ("ann", "milk"): 1, ("bob", "tea"): 1.5}
    later = gt.Interactions.from_events(LOG, "user", "item", now="2024-02-10", **named)
    assert by_pair(later)["ann", "milk"] == 0.5
    assert pairs.times.max() == datetime(2024, 1, 31, tzinfo=UTC).timestamp()


def test_bad_events_are_refused_by_argument():
    pytest.importorskip("polars", reason="tables are read by polars")

    def read(log=LOG, **changes):
        return gt.Interactions.from_events(log, "user", "item", **{"event": "type", "weights": WEIGHTS} | changes)

    for wrong in ({"view": 1}, {}, None, {"view": -1}, {"view": "x"}, {"view": float("nan")}):
        with pytest.raises(ValueError, match="weights"):
            read(weights=wrong)
    with pytest.raises(ValueError, match=r"half_life: .*time"):
        read(half_life="3d")
    with pytest.raises(ValueError, match="event: "):
        read(event="kind")
    with pytest.raises(ValueError, match="time: "):
        read(LOG | {"day": ["soon"] * 5}, time="day", half_life="3d")
    with pytest.raises(ValueError, match=r"^weights: .*zeros"):
        read(weights=dict.fromkeys(WEIGHTS, 0))
    with pytest.raises(ValueError, match=r"now: .*half_life"):
        read(now="2024-02-10")
    with pytest.warns(UserWarning, match="1 without"):
        assert len(read(LOG | {"type": ["view", None, "view", "cart", "skip"]})) == 3


def test_events_and_half_lives_on_the_command_line(tmp_path, capsys):
    pytest.importorskip("polars", reason="tables are read by polars")
    pytest.importorskip("cyclopts", reason="the command line needs cyclopts")
    from gramtower.cli.formats import DataOptions
    from gramtower.cli.program import run
    from gramtower.cli.reading import read_pairs

    rows = [",".join(row) for row in zip(*LOG.values(), strict=True)]
    (tmp_path / "log.csv").write_text("\n".join([",".join(LOG), *rows]) + "\n")
    options = {"left": "user", "right": "item", "time": "day", "event": "type", "half_life": "10d"}
    given = DataOptions(**options, event_weights="view=1,cart=3,buy=10,skip=0")
    assert by_pair(read_pairs(tmp_path / "log.csv", given))["bob", "tea"] == 1.5
    assert by_pair(read_pairs(tmp_path / "log.csv", given, name="--validation"))["bob", "tea"] == 3  # not by age
    plain = DataOptions(**options | {"event": None}, now="2024-02-20")
    assert by_pair(read_pairs(tmp_path / "log.csv", plain))["bob", "milk"] == 0.5
    command = ["fit", tmp_path / "log.csv", "--left", "user", "--right", "item", "--event", "type", "--dim", "2"]
    command = [*map(str, command), "--max-iterations", "1", "--quiet", "--out", str(tmp_path / "run")]
    weights = ["--event-weights", "view=1,cart=3,buy=10,skip=0", "--time", "day", "--half-life", "10d"]
    assert run([*command, *weights, "--history", "--history-last", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pairs"] == 3
    assert gt.load(tmp_path / "run" / "model.gramtower").left_.inputs.text == "history:last=2"
    refused = {
        "--event-weights": [],
        "--event-weights:": ["--event-weights", "view"],
        "weights:": ["--event-weights", "view=1"],
        "half_life": [*weights[:-1], "soon"],
        "--value": [*weights, "--value", "day"],
        "--now": [*weights[:-2], "--now", "2024-03-01"],
        "--history-last": [*weights, "--history-last", "2"],
        "--event": ["--format", "edges", *weights],
    }
    for name, more in refused.items():
        assert run([*command, *more]) == 2
        assert name in capsys.readouterr().err


def slow_history(times, last=0, decay=0):
    """Histories row by row; ``times`` has NaN where there is no pair."""
    rows = np.zeros(times.shape)
    for row, own in zip(rows, times, strict=True):
        newest_first = sorted(np.flatnonzero(~np.isnan(own)), key=lambda j: -own[j])
        for place, j in enumerate(newest_first):
            row[j] = 0.5 ** (place / decay) if decay else float(place < last)
        row /= np.linalg.norm(row) or 1.0
    return rows


@pytest.mark.parametrize("rule", [{"last": 3}, {"decay": 2}, {"last": 1}])
def test_histories_of_the_last_entries_or_with_decay_equal_a_loop(rule):
    rng = np.random.default_rng(0)
    times = np.where(rng.random((20, 9)) < 0.5, rng.permutation(180).reshape(20, 9), np.nan)
    times[3] = np.nan
    rows, columns = np.nonzero(~np.isnan(times))
    matrix = sp.csr_matrix((times[rows, columns], (rows, columns)), shape=times.shape)
    assert np.allclose(history_features(matrix, **rule).toarray(), slow_history(times, **rule), atol=1e-6)


def test_listed_histories_have_the_last_place_of_an_id():
    found = listed_histories([np.array([4, 1, 4]), np.array([], np.int64), np.array([0])], 5)
    assert found.toarray().tolist() == [[0, 2, 0, 0, 3], [0] * 5, [1, 0, 0, 0, 0]]


def timed(seed=0):
    rng = np.random.default_rng(seed)
    return gt.Interactions.from_arrays(rng.integers(20, size=200), rng.integers(12, size=200), time=rng.random(200))


@pytest.mark.parametrize("history", ["history:last=2", "history:decay=2"])
def test_a_model_of_recent_histories_looks_at_the_order_and_is_saved(history, tmp_path):
    model = small().fit(timed(), left_features=history)
    first = model.embed(histories=[[1, 2, 3]])
    assert not np.allclose(first, model.embed(histories=[[3, 2, 1]]))
    assert np.allclose(model.embed(histories=[[0, 1, 2, 3]]), first) == (history == "history:last=2")
    model.save(tmp_path / "model")
    loaded = gt.load(tmp_path / "model")
    assert loaded.left_.inputs.text == history
    assert np.allclose(loaded.embed(histories=[[1, 2, 3]]), first)
    times = 1.7e9 + np.arange(3.0)  # seconds since 1970, which float32 does not tell apart
    order = sp.csr_matrix((times, ([0, 0, 0], [*loaded.right_.rows([1, 2, 3])])), shape=(1, 12))
    assert np.allclose(loaded.embed(histories=order), first)


def test_known_entities_are_embedded_by_their_last_pairs():
    pairs = timed()
    model = small().fit(pairs, left_features="history:last=2")
    for row in (0, 7):
        span = slice(pairs.matrix.indptr[row], pairs.matrix.indptr[row + 1])
        newest = pairs.matrix.indices[span][np.argsort(pairs.times[span])]
        own = pairs.right_ids[newest].tolist()
        assert np.allclose(model.embed([pairs.left_ids[row]]), model.embed(histories=[own]), atol=1e-5)
    scores = model.evaluate(pairs, histories=pairs, exclude_seen=False)
    known = model.evaluate(pairs, exclude_seen=False)
    assert np.isclose(scores["ndcg@20"], known["ndcg@20"])


def test_recent_histories_need_an_order():
    pairs = timed()
    bare = gt.Interactions(pairs.matrix, pairs.left_ids, pairs.right_ids)
    for wrong in ("history:last=0", "history:first=3", "history:last", "history:decay=0.5", "history:"):
        with pytest.raises(ValueError, match="left_features"):
            small().fit(pairs, left_features=wrong)
    with pytest.raises(ValueError, match=r"left_features: .*times"):
        small().fit(bare, left_features="history:last=2")
    with pytest.raises(ValueError, match="right_features"):
        small().fit(pairs, right_features="history:last=2")
    model = small().fit(pairs, left_features="history:last=2")
    with pytest.raises(ValueError, match="histories"):
        model.evaluate(bare, histories=bare)
    with pytest.raises(ValueError, match="histories"):
        model.explain(int(pairs.left_ids[0]), 1)
    assert np.isfinite(model.explain(None, 1, histories=[[2, 3]]).score)
    with pytest.raises(ValueError, match=r"model: .*recent histories.*warm_start"):
        model.update(pairs)
