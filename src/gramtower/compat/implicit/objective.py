"""implicit's objective as a :class:`gramtower.Problem`.

    Σ_O c_ij (t_ij − x_i·y_j)² + Σ_∉O (x_i·y_j)² + λ (‖X‖² + ‖Y‖²)  =  2 L(θ),    c = |α r|,  t = 1 if r > 0 else 0

with the squared loss ½(t − ŷ)², pair weights c, ω = 1, imputed labels 0, no entity weights, and linear towers whose
parameters θ = (X, Y) are the factors. A stored entry of 0 has c = 0, so its pair has no weight.

Cost of a value: O(|O| k + (m + n) k²); a Gauss-Newton product takes about twice that.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import ArrayLike

from gramtower._util import checks as check
from gramtower.compat.implicit.base import Factors, check_csr
from gramtower.data.matrices import SparseMatrix
from gramtower.engine.objective.problem import Point, Problem
from gramtower.engine.towers.mlp import mlp_towers
from gramtower.engine.towers.towers import Towers
from gramtower.optim.solvers import NewtonKron
from gramtower.training.loop import minimize
from gramtower.training.result import Reason, Record

_NEWTON = NewtonKron(memory=0)  # an iteration costs about one of alternating least squares
_EXACTLY = NewtonKron(memory=0, damping=0.0, cg_steps=40, cg_tolerance=1e-6, cg_progress=1e-9)
_WENT_WELL = (Reason.MAX_ITERATIONS, Reason.NO_DECREASE, Reason.TOLERANCE)


def confidences(name: str, matrix: sp.csr_matrix, alpha: float = 1.0) -> sp.csr_matrix:
    """The entries times α, in float64."""
    scaled = alpha * matrix.data.astype(np.float64)
    check.finite(f"alpha · {name}", scaled)
    return sp.csr_matrix((scaled, matrix.indices, matrix.indptr), shape=matrix.shape)


def make_problem(confident: sp.csr_matrix, regularization: float) -> Problem:
    """The problem with half of implicit's objective."""
    if 0 in confident.shape:
        check.fail("user_items", f"shape {confident.shape}", "at least one user and one item")
    labels = (confident.data > 0).astype(np.float64)
    pairs = sp.csr_matrix((labels, confident.indices, confident.indptr), shape=confident.shape)
    return Problem(
        pairs, loss="squared", omega=1.0, l2=regularization, imputed=0.0, pair_weights=np.abs(confident.data)
    )


def total_weight(confident: sp.csr_matrix) -> float:
    """The sum of the weights of all m·n pairs, by which implicit divides its loss."""
    m, n = confident.shape
    return float(np.abs(confident.data).sum() + m * n - confident.nnz)


def factor_towers(
    problem: Problem, X: Factors | None, Y: Factors | None, factors: int, seed: int, dtype: torch.dtype
) -> Towers:
    """Linear towers whose parameters are the factors; factors that are None are random."""
    towers = mlp_towers(problem, hidden=(), dim=factors, seed=seed, dtype=dtype)
    with torch.no_grad():
        for tower, given in ((towers.left, X), (towers.right, Y)):
            (table,) = tower.parameters()
            if given is not None:
                if given.shape != tuple(table.shape):
                    expected = f"shape {tuple(table.shape)}, from the matrix and factors"
                    check.fail("factors", f"shape {given.shape}", f"{expected}; use a new model for other data")
                table.copy_(torch.from_numpy(np.ascontiguousarray(given)))
    return towers


def minimize_factors(
    problem: Problem, towers: Towers, iterations: int, report: Callable[[Record, Point], None], verbose: bool
) -> None:
    """Minimise over both sides together, then over the users with the items fixed.

    The second problem is quadratic and its rows are independent: one Newton step without damping solves it.

    Raises:
        ValueError: if the objective is not finite.
    """
    result = minimize(
        problem, towers, _NEWTON, iterations, callbacks=[report], tolerance=0.0, verbose=verbose,
    )  # fmt: skip
    if iterations and result.reason in _WENT_WELL:
        towers.right.requires_grad_(False)
        try:
            result = minimize(problem, Towers(towers.left, towers.right), _EXACTLY, max_iterations=1, tolerance=0.0)
        finally:
            towers.right.requires_grad_(True)
    if result.reason is Reason.NON_FINITE:
        check.fail(
            "fit",
            f"NaN or infinite numbers: {', '.join(result.non_finite)}",
            "confidences whose objective is finite: a smaller alpha",
        )


def calculate_loss(Cui: SparseMatrix, X: ArrayLike, Y: ArrayLike, regularization: float, num_threads: int = 0) -> float:
    """implicit's training loss: the objective divided by the sum of the weights of all pairs.

    implicit's own function adds the weights of dislikes to the objective, a constant that is left out here.

    Args:
        Cui: confidences, users × items.
        X: factors of the users.
        Y: factors of the items.
        regularization: λ.
        num_threads: has no effect.
    """
    confident = confidences("Cui", check_csr("Cui", Cui))
    tables = [check.as_float_array(name, value) for name, value in (("X", X), ("Y", Y))]
    for name, table in zip(("X", "Y"), tables, strict=True):
        if table.ndim != 2 or 0 in table.shape:
            check.fail(name, f"shape {table.shape}", "a matrix with one row of factors for each entity")
        check.finite(name, table)
    dtype = torch.float64 if any(table.dtype == np.float64 for table in tables) else torch.float32
    problem = make_problem(confident, check.number("regularization", regularization, minimum=0.0))
    towers = factor_towers(problem, tables[0], tables[1], tables[0].shape[1], 0, dtype)
    return 2.0 * problem.at(towers).value / total_weight(confident)
