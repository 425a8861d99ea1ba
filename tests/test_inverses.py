"""Inverses of small symmetric matrices: of every size at once, semidefinite ones, and none where there is none."""

from __future__ import annotations

import pytest
import torch

from gramtower.engine.objective.kronecker import Inverses

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def matrix(size, rank, seed, device="cpu"):
    """Positive semidefinite, of this rank."""
    X = torch.randn(size, rank, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(device)
    return X @ X.T


@pytest.mark.parametrize("device", DEVICES)
def test_every_matrix_gets_its_own_inverse_whatever_the_sizes(device):
    inverses, asked = Inverses(), {}
    for seed, size in enumerate([3, 200, 3, 17, 200, 1]):
        A = matrix(size, 2 * size, seed, device)
        asked[inverses.ask(A, 0.1 * seed + 0.1)] = A + (0.1 * seed + 0.1) * torch.eye(size, device=device)
    inverses.solve(torch.float64)
    for number, A in asked.items():
        torch.testing.assert_close(inverses[number] @ A, torch.eye(len(A), dtype=A.dtype, device=device))


def test_a_singular_matrix_among_others_is_inverted_by_its_eigenvalues():
    inverses = Inverses()
    for diagonal in ([1.0, 2.0, 4.0], [1.0, 2.0, 0.0], [1e300, 1.0, -1e-3]):
        inverses.ask(torch.diag(torch.tensor(diagonal, dtype=torch.float64)), 0.0)
    inverses.solve(torch.float64)
    assert torch.allclose(inverses[0].diagonal(), torch.tensor([1.0, 0.5, 0.25], dtype=torch.float64))
    assert torch.allclose(inverses[1].diagonal()[:2], torch.tensor([1.0, 0.5], dtype=torch.float64))
    assert all(bool((inverses[i].isfinite()).all()) and float(inverses[i].diagonal().min()) > 0 for i in range(3))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_has_no_inverse_and_spoils_no_other(bad):
    broken, fine = matrix(5, 9, 0), matrix(5, 9, 1)
    broken[2, 3] = broken[3, 2] = bad
    inverses = Inverses()
    numbers = [inverses.ask(broken, 1.0), inverses.ask(fine, 1.0), inverses.ask(fine, 1.0, torch.tensor([1.0, bad]))]
    inverses.solve(torch.float32)
    assert inverses[numbers[0]] is None
    assert inverses[numbers[2]] is None
    expected = torch.linalg.inv(fine + torch.eye(5)).float()
    torch.testing.assert_close(inverses[numbers[1]], expected)


def test_the_inverse_of_a_matrix_without_a_positive_eigenvalue_fits_float32():
    inverses = Inverses()
    numbers = [inverses.ask(-torch.eye(3, dtype=torch.float64) * scale, 0.0) for scale in (0.0, 1.0)]
    inverses.solve(torch.float32)
    for number in numbers:
        assert bool(inverses[number].isfinite().all())
        assert float(inverses[number].diagonal().min()) > 0


def test_nothing_asked_is_nothing_found():
    Inverses().solve(torch.float32)
