"""Arguments in the forms that implicit takes: matrices of any format, row numbers, seeds, ignored options."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray

from gramtower._util import checks as check
from gramtower.data.matrices import canonical

_FAR = 2**62


class ParameterWarning(Warning):
    """An argument was accepted in a form that had to be converted."""


def warn_of_conversion(message: str) -> None:
    """Warn with :class:`ParameterWarning`, or with implicit's own where a script has loaded it, for its filters."""
    theirs = getattr(sys.modules.get("implicit.utils"), "ParameterWarning", ParameterWarning)
    warnings.warn(message, theirs, stacklevel=4)


def warn_of_ignored(given: dict[str, tuple[Any, Any]]) -> None:
    """Name the arguments, each with its usual value, that were given another one and have no meaning here."""
    ignored = [f"{name}={value!r}" for name, (value, usual) in given.items() if value != usual]
    if ignored:
        warnings.warn(f"no meaning here, and ignored: {', '.join(ignored)}", UserWarning, stacklevel=3)


def check_csr(name: str, matrix: Any, columns: int | None = None) -> sp.csr_matrix:
    """A sparse matrix as CSR in canonical form, with a warning if it is of another format.

    Args:
        name: of the argument.
        matrix: the matrix, which is left as it is.
        columns: how many it shall have; fewer are filled up, as a model may have grown since the matrix was made.
    """
    if not sp.issparse(matrix):
        check.fail(name, type(matrix).__name__, "a scipy.sparse matrix")
    made = canonical(name, matrix)
    if matrix.format != "csr":
        warn_of_conversion(f"{name} is converted from {type(matrix).__name__} to CSR")
    if columns is None or made.shape[1] == columns:
        return made
    if made.shape[1] > columns:
        check.fail(name, f"{made.shape[1]} columns", f"at most {columns}, as the model knows")
    return sp.csr_matrix((made.data, made.indices, made.indptr), shape=(made.shape[0], columns))


def row_numbers(name: str, value: Any) -> NDArray[np.int64]:
    """Row numbers, of one or of several."""
    return np.array(
        [check.count(name, row, minimum=-_FAR, most=_FAR) for row in check.ids(name, value)], dtype=np.int64
    )


def known_rows(name: str, rows: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """The row numbers, if the model has them all.

    Raises:
        IndexError: otherwise, as in implicit.
    """
    if len(rows) and (rows.max() >= count or rows.min() < 0):
        raise IndexError(f"{name} is out of bounds of the model: it knows 0 to {count - 1}")
    return rows


def as_seed(random_state: Any) -> int:
    """A seed from what implicit takes: None, a number, or a generator of numpy, old or new."""
    if random_state is None:
        return 0
    if isinstance(random_state, np.random.RandomState):
        return int(random_state.randint(2**31))
    if isinstance(random_state, np.random.Generator):
        return int(random_state.integers(2**31))
    return check.seed(random_state)


def as_device(use_gpu: bool | None) -> torch.device:
    """The device that is asked for; None takes a GPU where there is one."""
    there = torch.cuda.is_available()
    if use_gpu and not there:
        check.fail("use_gpu", "True", "False or None on a machine without a GPU")
    return torch.device("cuda" if (there if use_gpu is None else use_gpu) else "cpu")
