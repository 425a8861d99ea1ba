"""Weighted Gramians with float64 accumulation."""

from __future__ import annotations

import pytest
import torch
from test_engine import relative

from gramtower.engine.objective import formulas
from gramtower.engine.objective.formulas import _ROWS, column_sums, gram, square_norms


@pytest.mark.parametrize("rows", [1, 7, _ROWS, _ROWS + 1, 2 * _ROWS + 13])
@pytest.mark.parametrize("weighted", [False, True])
def test_sums_over_any_number_of_rows(rows, weighted):
    A, B = torch.randn(rows, 3, dtype=torch.float64), torch.randn(rows, 5, dtype=torch.float64)
    weight = torch.rand(rows, dtype=torch.float64) if weighted else None
    w = torch.ones(rows, dtype=torch.float64) if weight is None else weight
    assert relative(gram(A, B, weight), torch.einsum("i,ia,ib->ab", w, A, B)) < 1e-13
    assert relative(column_sums(A, weight), torch.einsum("i,ia->a", w, A)) < 1e-12
    assert relative(square_norms(A), (A**2).sum(1)) < 1e-14


@pytest.mark.parametrize("weighted", [False, True])
def test_blocks_of_float32_rows_are_added_in_float64(weighted):
    # One large row, then a one in each of eight blocks: added to 2²⁴ in float32, each one would be lost.
    A = torch.zeros(9 * _ROWS, 1)
    A[0], A[_ROWS::_ROWS] = 2.0**12, 1.0
    weight = torch.full((len(A),), 0.5) if weighted else None
    scale = 0.5 if weighted else 1.0
    assert gram(A, A, weight).item() == scale * (2.0**24 + 8)
    assert column_sums(A * A, weight).item() == scale * (2.0**24 + 8)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("rows", [512, 1500, _ROWS, 2 * _ROWS + 13])
@pytest.mark.parametrize("columns", [1, 2, 10, 50])
def test_float32_rows_keep_six_digits_however_many_there_are(rows, columns, seed):
    # Few columns are the hard case: a BLAS may then add the rows of a product one after the other.
    torch.manual_seed(seed)
    A, B, weight = torch.rand(rows, columns) + 1, torch.rand(rows, 3) + 1, torch.rand(rows) + 1
    weighted = A.double() * weight.double()[:, None]
    assert relative(gram(A, B), A.double().T @ B.double()) < 1e-6
    assert relative(gram(A, B, weight), weighted.T @ B.double()) < 1e-6
    assert relative(column_sums(A), A.double().sum(0)) < 1e-6
    assert relative(column_sums(A, weight), weighted.sum(0)) < 1e-6


@pytest.mark.parametrize("seed", range(5))
def test_errors_of_many_blocks_do_not_add_up(seed):
    torch.manual_seed(seed)
    A = torch.rand(300_000, 2) + 1
    assert relative(gram(A, A), A.double().T @ A.double()) < 2e-7
    assert relative(column_sums(A), A.double().sum(0)) < 2e-7


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: blocks are made at once on one")
@pytest.mark.parametrize("room", [1 << 24, 4096, 1])
def test_on_a_gpu_whatever_room_there_is(room, monkeypatch):
    monkeypatch.setattr(formulas, "_GPU_BUFFER", room)  # 1: so many columns that not one block has room
    A, B = (torch.randn(3 * _ROWS + 5, columns, dtype=torch.float64, device="cuda") for columns in (3, 5))
    assert relative(gram(A, B), A.t() @ B) < 1e-13
