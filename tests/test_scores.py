"""Scores as probabilities and percentiles: against plain loops and scikit-learn, in lists, files, shell and server."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from test_ranking import M, N, brute, codes, embeddings, on_devices, ranked, same

import gramtower as gt
from gramtower.model.calibration import Calibration, calibrate, count_scores, reliability
from gramtower.retrieval.list_rules import Rules

PLATT = Calibration(method="platt", population="all", pairs=100, positives=20, slope=1.5, intercept=-2.0)


def percentile(P, Q, i, j, banned, added=None):
    """100 · the share of the candidates of row i whose score is not above that of j."""
    scores = [float(P[i] @ Q[l]) + (0 if added is None else float(added[l])) for l in range(len(Q)) if not banned[i, l]]
    own = float(P[i] @ Q[j]) + (0 if added is None else float(added[j]))
    return 100 * sum(s <= own for s in scores) / len(scores)


@on_devices
@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("way", ["all", "deny", "allow", "own", "quotas", "diversity", "least"])
def test_percentiles_are_shares_of_the_candidates_of_each_row(way, loaded, device):
    P, Q = embeddings(whole=True, n=N if not loaded else 6000)  # exact scores, many of them equal
    rng = np.random.default_rng(5)
    n = len(Q)
    added, banned = rng.integers(-2, 3, n).astype(np.float32), rng.random((M, n)) < 0.3
    given, rules, groups, more = {"exclude": sp.csr_matrix(banned)}, {}, [], {}
    if way == "deny":
        given["deny"] = np.arange(0, n, 4)
        banned[:, ::4] = True
    if way == "allow":
        given |= {"allow": np.arange(0, n, 2), "deny": np.arange(3)}
        banned[:, 1::2], banned[:, :3] = True, True
    if way == "own":
        own = rng.random((M, n)) < 0.2
        given["own"], banned = sp.csr_matrix(own.astype(float)), banned | ~own
    if way == "quotas":
        groups = [([{int(b)} for b in rng.integers(0, 3, n)], 2)]
        rules = {"groups": tuple((codes(cells), most) for cells, most in groups)}
    if way == "diversity":
        rules = more = {"diversity": 0.5}
    if way == "least":
        rules = {"min_score": 90.0}

    def top(scores, **rules):
        made = Rules(added=added, scores=scores, **rules)
        return ranked(device, P, Q, **given, rules=made).top(7, loaded=loaded)

    (found, values), (raw, _) = top("percentile", **rules), top("raw", **{**rules, "min_score": None})
    if way != "diversity":
        wanted = [[j for j, _ in row] for row in brute(P, Q, 7, banned=banned, added=added, groups=groups, **more)]
        assert [[j for j in row if j >= 0] for row in raw.tolist()] == wanted
    for i in range(M):
        shown = [percentile(P, Q, i, j, banned, added) for j in raw[i] if j >= 0]
        shown = [p for p in shown if p >= rules.get("min_score", 0)]
        assert found[i, : len(shown)].tolist() == raw[i, : len(shown)].tolist()
        assert (found[i, len(shown) :] == -1).all()
        np.testing.assert_allclose(values[i], shown + [-math.inf] * (7 - len(shown)), rtol=1e-6)


@on_devices
def test_probabilities_are_those_of_scores_without_what_is_added(device):
    P, Q = embeddings(whole=True)
    added = np.random.default_rng(0).normal(size=N).astype(np.float32) * 1000
    for rules in (Rules(), Rules(added=added), Rules(diversity=0.4)):
        columns, plain = ranked(device, P, Q, rules=rules).top(5)
        calibrated = Rules(**vars(rules) | {"scores": "probability", "probability": PLATT})
        found, values = ranked(device, P, Q, rules=calibrated).top(5)
        assert np.array_equal(found, columns)
        raw = np.array([[float(P[i] @ Q[j]) for j in row] for i, row in enumerate(columns)])
        np.testing.assert_allclose(values, 1 / (1 + np.exp(2.0 - 1.5 * raw)), rtol=1e-6)
        assert rules.added is not None or np.array_equal(
            np.argsort(-values, 1, "stable"), np.argsort(-plain, 1, "stable")
        )
    least = Rules(scores="probability", probability=PLATT, min_score=0.9)
    kept = brute(P, Q, 5, min_score=(math.log(0.9 / 0.1) + 2) / 1.5)
    raw = ranked(device, P, Q, rules=Rules(min_score=2.8))
    same((ranked(device, P, Q, rules=least).top(5)[0], raw.top(5)[1]), kept, 5)


def population(seed=0, m=60, n=45, dim=3):
    """Embeddings, held-out pairs that are likely where scores are high, and pairs that were seen."""
    rng = np.random.default_rng(seed)
    P, Q = rng.normal(size=(m, dim)).astype(np.float32), rng.normal(size=(n, dim)).astype(np.float32)
    seen = rng.random((m, n)) < 0.1
    held = (rng.random((m, n)) < 1 / (1 + np.exp(2.5 - 1.2 * P @ Q.T))) & ~seen
    return P, Q, held, seen


def counted(P, Q, held, seen, population="all", **options):
    matrices = (sp.csr_matrix(one.astype(np.float32)) for one in (held, seen))
    return count_scores(torch.from_numpy(P), torch.from_numpy(Q), *matrices, population, 0, **options)


@pytest.mark.parametrize("who", ["all", "held-out"])
def test_a_population_has_every_pair_that_was_not_seen(who):
    P, Q, held, seen = population()
    held[7:20] = False
    rows = np.arange(len(P)) if who == "all" else np.flatnonzero(held.any(1))
    found = counted(P, Q, held, seen, who)
    assert found.pairs.sum() == (~seen[rows]).sum()
    assert found.positives.sum() == held.sum()
    scores = (P @ Q.T)[rows]
    np.testing.assert_allclose(found.pairs @ found.scores, scores[~seen[rows]].sum(), rtol=1e-5)
    np.testing.assert_allclose(found.positives @ found.scores, scores[held[rows]].sum(), rtol=1e-3)
    assert (np.diff(found.scores) > 0).all()


def test_a_sample_of_left_entities_stands_for_all():
    P, Q, held, seen = population(m=2000)
    every, some = counted(P, Q, held, seen), counted(P, Q, held, seen, most=400 * 45)
    assert some.pairs.sum() == pytest.approx(every.pairs.sum())
    assert some.positives.sum() == every.positives.sum()
    assert some.pairs @ some.scores / some.pairs.sum() == pytest.approx(
        every.pairs @ every.scores / every.pairs.sum(), abs=0.1
    )
    whole, part = calibrate(every, "platt", "all"), calibrate(some, "platt", "all")
    assert part.slope == pytest.approx(whole.slope, rel=0.1)
    assert part.intercept == pytest.approx(whole.intercept, abs=0.15)
    assert (whole.slope, whole.intercept) == (pytest.approx(1.2, rel=0.1), pytest.approx(-2.5, abs=0.1))  # the truth


def test_platt_agrees_with_plain_gradient_steps_and_scikit_learn():
    P, Q, held, seen = population()
    found = calibrate(counted(P, Q, held, seen), "platt", "all")
    s, y = (P @ Q.T)[~seen].astype(float), held[~seen].astype(float)
    t = np.where(y > 0, (y.sum() + 1) / (y.sum() + 2), 1 / ((1 - y).sum() + 2))
    a, b = found.slope, found.intercept
    residual = 1 / (1 + np.exp(-a * s - b)) - t  # of the whole population, without bins
    assert abs(residual.sum()) < 0.01 * y.sum() ** 0.5
    assert abs(residual @ s) < 0.01 * y.sum() ** 0.5
    sigmoid = pytest.importorskip("sklearn.calibration")._SigmoidCalibration().fit(s, y)
    np.testing.assert_allclose([a, b], [-sigmoid.a_, -sigmoid.b_], rtol=1e-3)


def test_many_held_out_pairs_are_calibrated_by_isotonic_regression():
    few, many = (calibrate(counted(*population(m=m)), "auto", "all") for m in (60, 300))
    assert (few.method, many.method) == ("platt", "isotonic")
    assert few.positives < 1000 <= many.positives


def test_isotonic_is_that_of_scikit_learn_and_sums_to_the_held_out_pairs():
    P, Q, held, seen = population()
    found = calibrate(counted(P, Q, held, seen), "isotonic", "all")
    s, y = (P @ Q.T)[~seen].astype(float), held[~seen].astype(float)
    assert found(s).sum() == pytest.approx(y.sum(), rel=0.01)
    assert (np.diff(found(np.sort(s))) >= 0).all()
    isotonic = pytest.importorskip("sklearn.isotonic").IsotonicRegression(out_of_bounds="clip").fit(s, y)
    assert np.abs(found(s) - isotonic.predict(s)).mean() < 1e-3
    assert found(-1e9) == found.probabilities[0]
    assert found(1e9) == found.probabilities[-1]


def fitted(seed=0, **options):
    """A model, half of its held-out pairs and the other half."""
    rng = np.random.default_rng(seed)
    P, Q = rng.normal(size=(150, 3)), rng.normal(size=(80, 3))
    rows, columns = np.nonzero(rng.random((150, 80)) < 1 / (1 + np.exp(3 - 1.3 * P @ Q.T)))
    pairs = gt.Interactions.from_arrays([f"u{i}" for i in rows], [f"i{j}" for j in columns])
    split = gt.splits.per_user(pairs, 0.4, seed=1)
    halves = gt.splits.random_pairs(split.test, 0.5, seed=2)
    model = gt.TwoTower(dim=3, hidden=(), max_iterations=4, select=False, device="cpu")
    return model.fit(split.train, **options), halves.train, halves.test


@pytest.fixture(scope="module")
def trained():
    return fitted()


@pytest.mark.parametrize("method", ["platt", "isotonic"])
def test_probabilities_of_a_model_sum_to_the_pairs_of_another_hold_out(trained, method):
    model, held_out, test = trained
    model.calibrate(held_out, method)
    found = model.reliability(test)
    assert found.expected == pytest.approx(len(held_out), rel=0.01)  # fitted to as many
    assert found.positives.sum() == pytest.approx(found.expected, abs=4 * len(test) ** 0.5)
    assert (np.diff(found.probability) > 0).all()
    error = np.sqrt(found.pairs * found.probability)
    assert (np.abs(found.positives - found.pairs * found.probability) < 6 * error).all()
    left, right = model.left_.ids, model.right_.ids
    each = np.stack([model.predict([i] * len(right), right, scores="probability") for i in left])
    unseen = model.seen_.toarray() == 0
    assert each[unseen].sum() == pytest.approx(len(held_out), rel=0.01)
    assert len(str(found).splitlines()) == len(found.rows()) + 1
    ids, values = model.recommend(left[:4], k=5, scores="probability")
    assert np.array_equal(ids, model.recommend(left[:4], k=5)[0])
    for i, row in enumerate(ids):
        wanted = [each[i, right.tolist().index(j)] for j in row]
        np.testing.assert_allclose(values[i], wanted, rtol=1e-5)
    frame = model.recommend(left[:1], k=3, scores="percentile", as_frame=True)
    count = len(right) - model.seen_[:1].nnz
    assert frame["score"].to_list() == pytest.approx([100.0, 100 - 100 / count, 100 - 200 / count])


def test_the_validation_pairs_of_a_fit_calibrate_it():
    model, held_out, _ = fitted(validation=0.2)
    every = len(model.left_) * len(model.right_)
    assert model.calibrate(held_out).calibration_.pairs == every - model.seen_.nnz  # without those of validation
    model.calibrate()
    assert model.calibration_.pairs == every - model.trained_.nnz
    assert model.calibration_.positives == model.fitted_.further.nnz > 100
    assert model.reliability().expected == pytest.approx(model.calibration_.positives, rel=0.01)
    model.update(gt.Interactions.from_arrays(["u1"], ["i1"]))
    assert model.calibration_ is None  # of other scores


def test_a_file_keeps_the_calibration_and_older_files_have_none(trained, tmp_path):
    from test_model_file import rewritten

    model, held_out, _ = trained
    model.calibrate(held_out, "isotonic").save(tmp_path / "m")
    again = gt.load(tmp_path / "m")
    assert again.calibration_ == model.calibration_
    assert np.array_equal(
        again.predict("u1", "i1", scores="probability"), model.predict("u1", "i1", scores="probability")
    )
    older = rewritten(tmp_path / "m", tmp_path / "older", lambda header, tensors: header.pop("calibration"))
    assert gt.load(older).calibration_ is None
    for name, value in {
        "method": "magic", "slope": -1.0, "intercept": math.inf, "scores": [3.0, 1.0], "probabilities": [2.0],
        "pairs": "many", "positives": None,
    }.items():  # fmt: skip
        bad = rewritten(
            tmp_path / "m", tmp_path / "bad", lambda header, _, n=name, v=value: header["calibration"].update({n: v})
        )
        with pytest.raises(ValueError, match=r"damaged.*calibration"):
            gt.load(bad)


def test_bad_input_is_refused_by_name(trained):
    model, held_out, test = trained
    plain = fitted(seed=1)[0]
    for call, name in (
        (lambda: plain.recommend("u1", scores="probability"), "scores.*calibrate"),
        (lambda: plain.predict("u1", "i1", scores="probability"), "scores.*calibrate"),
        (lambda: plain.predict("u1", "i1", scores="percentile"), "scores"),
        (lambda: plain.recommend("u1", scores="odds"), "scores"),
        (lambda: plain.reliability(test), "model.*calibrate"),
        (lambda: plain.calibrate(), "validation.*None"),
        (lambda: plain.calibrate(held_out, "logit"), "method"),
        (lambda: plain.calibrate(held_out, population="none"), "population"),
        (lambda: plain.calibrate(held_out, seed=-1), "seed"),
        (lambda: plain.calibrate(gt.Interactions.from_arrays(["x"], ["y"])), "validation.*known ids"),
        (lambda: plain.calibrate(gt.Interactions.from_arrays(["u1", "u2"], ["i1", "i2"])), "validation.*at least 20"),
        (lambda: model.calibrate(held_out).reliability(test, bins=0), "bins"),
        (lambda: model.recommend("u1", scores="probability", min_score=0.1, popularity=1.0), "min_score"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"^{name}"):
            call()
    P, Q, held, seen = population()
    for other in (-P, 0 * P):
        with pytest.raises(ValueError, match=r"^validation.*no higher"):
            calibrate(counted(other, Q, held, seen), "platt", "all")
    known = model.trained_.tocoo()
    known = gt.Interactions.from_arrays(model.left_.ids[known.row], model.right_.ids[known.col])
    with pytest.raises(ValueError, match=r"^validation.*learned from"):
        model.calibrate(known)


@on_devices
def test_lists_of_everyone_have_the_same_scores_and_go_on_only_with_them(trained, tmp_path, device):
    pl = pytest.importorskip("polars", reason="files of lists are written with polars")
    model, held_out, _ = trained
    model.calibrate(held_out)
    for scores in ("probability", "percentile"):
        model.recommend_all(tmp_path / "l.parquet", k=4, scores=scores, device=device)
        table = pl.read_parquet(tmp_path / "l.parquet")
        _, values = model.recommend(model.left_.ids, k=4, scores=scores)
        np.testing.assert_allclose(table["score"].to_numpy(), values[np.isfinite(values)], rtol=1e-5)

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.recommend_all(tmp_path / "l.parquet", k=4, scores="probability", progress=stop)
    with pytest.raises(ValueError, match=r"path.*scores"):
        model.recommend_all(tmp_path / "l.parquet", k=4)
    with pytest.raises(ValueError, match=r"path.*calibration"):
        model.calibrate(held_out, "isotonic").recommend_all(tmp_path / "l.parquet", k=4, scores="probability")


def test_the_figure_has_a_point_for_each_bin(trained):
    pytest.importorskip("matplotlib", reason="figures are drawn with matplotlib")
    model, held_out, test = trained
    figure = model.calibrate(held_out).plot_reliability(test, bins=6)
    (axis,) = figure.axes
    assert len(axis.lines[0].get_xdata()) == len(model.reliability(test, bins=6).rows())
    assert axis.get_xlabel() == "probability"


def test_a_reliability_table_has_the_pairs_of_the_population():
    P, Q, held, seen = population()
    counts = counted(P, Q, held, seen)
    found = reliability(counts, calibrate(counts, "platt", "all"), 5)
    assert found.pairs.sum() == (~seen).sum()
    np.testing.assert_allclose(found.observed, found.positives / found.pairs)
    expected = found.pairs * found.probability
    assert expected.max() < 1.5 * expected.min()


def test_the_shell_calibrates_and_shows_probabilities(tmp_path, capsys):
    pytest.importorskip("cyclopts", reason="the command line needs cyclopts")
    pytest.importorskip("polars", reason="the command line reads tables with polars")
    from gramtower.cli.program import run

    model, held_out, test = fitted()
    model.save(tmp_path / "m.gramtower")
    for name, pairs in (("held.csv", held_out), ("test.csv", test)):
        found = pairs.matrix.tocoo()
        rows = [f"{pairs.left_ids[i]},{pairs.right_ids[j]}" for i, j in zip(found.row, found.col, strict=True)]
        (tmp_path / name).write_text("left,right\n" + "\n".join(rows))

    def shell(*tokens, code=0):
        assert run([*map(str, tokens)]) == code
        return capsys.readouterr()

    lists = ["recommend", tmp_path / "m.gramtower", "--left", "u3", "-k", 3, "--json"]
    assert "calibrate" in shell(*lists, "--scores", "probability", code=2).err
    columns = ["--left", "left", "--right", "right"]
    files = ["--validation", tmp_path / "held.csv", "--test", tmp_path / "test.csv"]
    calibration = ["calibrate", tmp_path / "m.gramtower", *files, *columns, "--method", "isotonic"]
    found = json.loads(shell(*calibration, "--json", "--plot", tmp_path / "r.svg").out)
    wanted = model.calibrate(held_out, "isotonic").reliability(test)
    assert [[*row.values()] for row in found["reliability"]] == [[*row] for row in wanted.rows()]
    assert (tmp_path / "r.svg").read_bytes().startswith(b"<?xml")
    assert "held_out" in shell(*calibration).out
    assert gt.load(tmp_path / "m.gramtower").calibration_ == model.calibration_
    for scores in ("probability", "percentile"):
        results = json.loads(shell(*lists, "--scores", scores).out)["answers"][0]["results"]
        ids, values = model.recommend("u3", k=3, scores=scores)
        assert [one["id"] for one in results] == ids[0].tolist()
        assert [one["score"] for one in results] == pytest.approx(values[0].tolist())
    shell(
        "recommend", tmp_path / "m.gramtower", "--all", "--out", tmp_path / "l.csv", "-k", 3, "--scores", "percentile"
    )
    assert (tmp_path / "l.csv").read_text().splitlines()[1].startswith("u0,1,")
    assert "isotonic" in shell("info", tmp_path / "m.gramtower").out
    assert "--plot" in shell(*calibration, "--plot", tmp_path / "r.txt", code=2).err


def test_the_server_answers_with_probabilities_and_percentiles(tmp_path):
    cases = pytest.importorskip("serving_cases", reason="the server needs starlette")
    model, held_out, _ = fitted()
    model.calibrate(held_out).save(tmp_path / "m.gramtower")
    left = ["u3", "u5"]
    with cases.client(cases.source("m", table=False, path=tmp_path / "m.gramtower"), cases.source("plain")) as api:
        for scores in ("raw", "probability", "percentile"):
            found = api.post("/recommend", json={"left": left, "k": 4, "scores": scores}).json()["answers"]
            ids, values = model.recommend(left, k=4, scores=scores)
            assert [[one["id"] for one in row["results"]] for row in found] == ids.tolist()
            shown = [[one["score"] for one in row["results"]] for row in found]
            np.testing.assert_allclose(shown, values, rtol=1e-5)
        pair = {"left": ["u3"], "right": ["i1"], "scores": "probability"}
        assert api.post("/score", json=pair).json()["scores"] == pytest.approx(
            model.predict(["u3"], ["i1"], scores="probability").tolist()
        )
        for path, body in (
            ("/recommend", {"left": ["user 2"], "scores": "probability", "model": "plain"}),
            ("/recommend", {"left": ["u3"], "scores": "odds"}),
            ("/score", {**pair, "left": ["user 2"], "model": "plain"}),
            ("/score", {**pair, "scores": "percentile"}),
        ):
            refused = api.post(path, json=body)
            assert refused.status_code == 422
            assert "scores" in refused.json()["error"]
        assert [one["calibrated"] for one in api.get("/models").json()["models"]] == [True, False]
