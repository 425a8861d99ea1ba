"""A share held out to stop early on, and all pairs fitted afterwards: `fit(pairs, validation=0.1, refit=True)`."""

from __future__ import annotations

import json

import numpy as np
import pytest

import gramtower as gt
from gramtower.cli.program import run
from gramtower.data.datasets import planted_pairs
from gramtower.data.splits import per_user


def small(**options):
    given = dict(dim=4, hidden=(), max_iterations=40, patience=3, metric="recall@20", device="cpu", omega=0.1, seed=2)
    return gt.TwoTower(**given | {"select": False} | options)


def planted(weights=None):
    matrix = planted_pairs(60, 50, 700, groups=4, seed=1)
    ids = [f"u{i}" for i in range(60)], [f"i{j}" for j in range(50)]
    pairs = gt.Interactions.from_matrix(matrix, *ids)
    if weights is None:
        return pairs
    return gt.Interactions(pairs.matrix, pairs.left_ids, pairs.right_ids, weights=weights(len(pairs)))


def same(a, b):
    return all(np.array_equal(a.embed(side=side), b.embed(side=side)) for side in ("left", "right"))


@pytest.mark.parametrize("kind", ["interactions", "matrix"])
def test_a_share_is_that_of_each_left_entity_drawn_with_the_models_seed(kind):
    pairs = planted()
    split = per_user(pairs, 0.2, seed=2)
    parts = (pairs, split.train, split.test)
    whole, train, test = parts if kind == "interactions" else (part.matrix for part in parts)
    found, expected = small().fit(whole, validation=np.float64(0.2)), small().fit(train, validation=test)
    assert found.best_metric_ == expected.best_metric_
    assert same(found, expected)
    assert not same(found, small(seed=3).fit(whole, validation=0.2))


def test_refit_fits_all_pairs_for_as_many_iterations_as_were_best():
    pairs = planted()
    validated = small().fit(pairs, validation=0.2)
    best = next(r.iteration for r in validated.history_ if r.metric == validated.best_metric_)
    assert 0 < best < validated.history_[-1].iteration
    found = small().fit(pairs, validation=0.2, refit=True)
    assert same(found, small(max_iterations=best).fit(pairs))
    assert found.best_metric_ == validated.best_metric_
    assert found.history_[-1].iteration == best
    assert found.reason_ is validated.reason_ is gt.Reason.EARLY_STOP
    assert found.message_.endswith(f"then all pairs were fitted for {best} iterations")
    assert found.max_iterations == 40
    assert (found.seen_ != pairs.matrix).nnz == 0
    ids, scores = found.recommend(pairs.left_ids, k=50)
    for row, (names, numbers) in enumerate(zip(ids, scores, strict=True)):
        listed = set(names[np.isfinite(numbers)])
        assert not listed & set(pairs.right_ids[pairs.matrix[row].indices])


def test_a_start_that_ranks_best_is_not_what_a_refit_ends_with(monkeypatch):
    monkeypatch.setattr("gramtower.model.fitting.best_iteration", lambda fitted: 0)
    pairs = planted_pairs(40, 30, 300, seed=0)
    with pytest.warns(UserWarning, match="validation"):
        model = gt.TwoTower(dim=4, max_iterations=3, device="cpu").fit(pairs, validation=0.2, refit=True)
    assert [record.iteration for record in model.history_] == [0, 1]


def test_pairs_that_were_given_are_joined_with_their_weights():
    pairs = planted(lambda count: np.linspace(0.5, 2, count, dtype=np.float32))
    split = per_user(pairs, 0.2, seed=2)
    shuffled = gt.Interactions.from_arrays(
        *(np.array([ids[k] for k in places]) for ids, places in zip(
            (pairs.left_ids, pairs.right_ids), reversed_places(split.test.matrix), strict=True)),
        weight=split.test.weights[::-1],
    )  # fmt: skip
    assert same(
        small().fit(split.train, validation=shuffled, refit=True), small().fit(pairs, validation=0.2, refit=True)
    )


def reversed_places(matrix):
    coo = matrix.tocoo()
    return coo.row[::-1], coo.col[::-1]


@pytest.mark.parametrize("half", ["first", "second"])
def test_an_interrupted_fit_goes_on_in_the_half_that_it_was_in(half, tmp_path):
    pairs, calls = planted(), []
    stop = 2 if half == "first" else len(small().fit(pairs, validation=0.2).history_) + 1  # its second iteration
    paths = dict(checkpoint=tmp_path / "run", history=tmp_path / "history.jsonl")
    whole = small().fit(pairs, validation=0.2, refit=True)

    def fail(record, point):
        calls.append(record.iteration)
        if len(calls) == stop:
            raise RuntimeError("killed")

    model = small()
    with pytest.raises(RuntimeError, match="killed"):
        model.fit(pairs, validation=0.2, refit=True, callbacks=[fail], **paths)
    assert not hasattr(model, "fitted_")
    assert (tmp_path / "history.jsonl").exists() == (half == "second")
    model.fit(pairs, validation=0.2, refit=True, **paths)
    assert same(model, whole)
    assert [r.value for r in gt.read_history(tmp_path / "history.jsonl")] == [r.value for r in whole.history_]
    assert gt.read_history(tmp_path / "history-validation.jsonl")[-1].metric is not None


def test_ctrl_c_keeps_what_was_validated():
    def interrupt(record, point):
        if record.iteration == 2:
            raise KeyboardInterrupt

    model = small().fit(planted(), validation=0.2, refit=True, callbacks=[interrupt])
    assert model.reason_ is gt.Reason.INTERRUPTED
    assert model.history_[-1].metric is not None
    assert len(model.history_) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(refit=True), r"refit.*validation"),
        (dict(validation=0.0), r"validation.*0.0"),
        (
            dict(validation=1),
            r"validation.*1",
        ),
        (dict(validation=0.1, refit="yes"), r"refit.*'yes'"),
        (dict(validation=0.001), r"validation.*0.001"),
        (dict(callbacks=3), r"callbacks.*3"),
    ],
)
def test_what_cannot_be_done_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        small().fit(planted(), **arguments)


def test_the_shell_does_the_same(tmp_path, capsys):
    pairs = planted()
    coo = pairs.matrix.tocoo()
    lines = [f"{pairs.left_ids[i]},{pairs.right_ids[j]}" for i, j in zip(coo.row, coo.col, strict=True)]
    (tmp_path / "pairs.csv").write_text("user,item\n" + "\n".join(lines) + "\n")
    given = dict(dim=4, hidden="none", max_iterations=40, patience=3, metric="recall@20", omega=0.1, seed=2)
    settings = [text for name, value in given.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    command = ["fit", str(tmp_path / "pairs.csv"), "--left", "user", "--right", "item", *settings, "--device", "cpu"]
    out = tmp_path / "run"
    assert run([*command, "--validation", "0.2", "--refit", "--out", str(out), "--quiet", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    read = gt.Interactions.from_csv(tmp_path / "pairs.csv", "user", "item")
    expected = small(select=True).fit(read, validation=0.2, refit=True)
    assert same(gt.load(out / "model.gramtower"), expected)
    assert facts["metric_value"] == expected.best_metric_
    assert facts["iterations"] == expected.history_[-1].iteration
    assert facts["validation_pairs"] == len(per_user(read, 0.2, seed=2).test)
    assert not list(out.glob("checkpoint*"))
    assert run(["fit", "--config", str(out / "config.toml"), "--out", str(tmp_path / "again"), "--quiet"]) == 0
    assert same(gt.load(tmp_path / "again" / "model.gramtower"), expected)
    assert run([*command, "--refit", "--out", str(tmp_path / "no"), "--quiet"]) == 2
    assert "refit: got True, expected validation as well" in capsys.readouterr().err
    assert run(["tune", str(tmp_path / "pairs.csv"), "--left", "user", "--right", "item", "--refit", "--out", "x"]) == 2
