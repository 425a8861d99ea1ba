"""Extreme sizes and settings of any type: each call ends in a finite model or in an error of the library's own.

See harness.py for how many are tried.
"""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp
import torch
from harness import Fuzz

import gramtower as gt

EXTREME = (0.0, 1e-300, 1e-38, 1e-20, 1.0, 1e10, 1e15, 1e20, 1e30, 1e38, 1e39, 1e300)
STRANGE = (
    None,
    True,
    "",
    "many",
    b"x",
    -1,
    0,
    10**9,
    10**30,
    1e400,
    float("nan"),
    [],
    [1.0],
    (),
    {},
    object(),
    np.ones(3),
)
METHODS = ("newton-kron", "gd", "gd-diag", "newton", "sogram", "sogram-diag", "sampling", "sampling-diag", "lbfgs")


def drawn_pairs(rng):
    m, n = rng.randint(1, 8), rng.randint(1, 8)
    numbers = np.random.default_rng(rng.randrange(2**32))
    seen = (numbers.random((m, n)) < rng.choice([0.1, 0.5, 1.0])).astype(float)
    seen[0, 0] = 1.0
    return sp.csr_matrix(seen), numbers


def drawn_features(rng, numbers, rows):
    x = numbers.normal(size=(rows, 3)) * rng.choice(EXTREME)
    if rng.random() < 0.3:
        x[rng.randrange(rows)] = rng.choice(EXTREME)
    return rng.choice([None, None, None, x, sp.csr_matrix(x), np.nan_to_num(x.clip(-1e38, 1e38)).astype(np.float32)])


def test_extreme_sizes_end_in_a_finite_model_or_in_a_refusal():
    fuzz = Fuzz("engine_extremes", small=25)
    for rng in fuzz:
        pairs, numbers = drawn_pairs(rng)
        m, n = pairs.shape
        settings = dict(dim=rng.randint(1, 12), hidden=rng.choice([(), (4,)]), optimizer=rng.choice(METHODS))
        for name in rng.sample(("omega", "l2", "embedding_l2", "imputed"), rng.randint(0, 2)):
            settings[name] = rng.choice(EXTREME)
        if rng.random() < 0.2:
            settings |= dict(loss="squared")
            pairs = pairs * rng.choice(EXTREME)
        if rng.random() < 0.2:
            settings["left_weights"] = np.full(m, rng.choice(EXTREME))
        if settings["optimizer"].startswith("s"):
            settings["optimizer_options"] = dict(steps=2)
        features = dict(left_features=drawn_features(rng, numbers, m), right_features=drawn_features(rng, numbers, n))
        model = gt.TwoTower(**settings, max_iterations=2, device="cpu")
        with np.errstate(over="ignore"):
            fitted = fuzz.attempt((settings, features), lambda: model.fit(pairs, **features))  # noqa: B023
        if fitted is not None:
            for side in ("left", "right"):
                assert np.isfinite(fitted.embed(side=side)).all(), (settings, features)


def test_settings_of_any_type_are_refused_by_name_before_work():
    fuzz = Fuzz("engine_settings", small=150)
    problem_names = (
        "pairs", "left", "right", "loss", "omega", "l2", "imputed", "left_weights", "right_weights", "embedding_l2",
        "frequency_power", "pair_weights", "memory_budget", "kernels", "precision", "pair_precision",
    )  # fmt: skip
    tower_names = ("problem", "hidden", "dim", "activation", "seed", "dtype")
    run_names = (
        "problem", "towers", "optimizer", "max_iterations", "time_limit", "seed", "callbacks", "tolerance",
        "validation", "patience", "checkpoint_every", "checkpoint_seconds", "damping", "cg_steps",
    )  # fmt: skip
    for rng in fuzz:
        pairs, _ = drawn_pairs(rng)
        given = {name: rng.choice(STRANGE) for name in rng.sample(problem_names, rng.randint(0, 2))}
        problem = fuzz.attempt(given, lambda: gt.Problem(**{"pairs": pairs, **given}))  # noqa: B023
        if problem is None:
            continue
        given = {name: rng.choice(STRANGE) for name in rng.sample(tower_names, rng.randint(0, 1))}
        made = {"problem": problem, "hidden": (), "dim": 2, **given}
        towers = fuzz.attempt(given, lambda: gt.mlp_towers(**made))  # noqa: B023
        if towers is None:
            fuzz.attempt("towers", lambda: gt.Towers(rng.choice(STRANGE), rng.choice(STRANGE)))  # noqa: B023
            continue
        given = {name: rng.choice(STRANGE) for name in rng.sample(run_names, rng.randint(0, 2))}
        run = {"problem": problem, "towers": towers, "max_iterations": 1, **given}
        if type(run["max_iterations"]) is int:
            run["max_iterations"] = min(run["max_iterations"], 2)  # a large number is meant so, and takes its time
        if fuzz.attempt(given, lambda: gt.minimize(**run)) is not None:  # noqa: B023
            assert bool(torch.isfinite(towers.parameters().vector).all()), given
