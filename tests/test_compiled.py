"""Compiled code without a place to keep it: the same answers, and one warning."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import warnings

import numpy as np
import pytest

from gramtower.runtime import compiled as module
from gramtower.runtime.compiled import compiled

READ_ONLY = """
import warnings
import numpy as np
import scipy.sparse as sp
from numba.core.caching import CacheImpl

CacheImpl._locator_classes = []  # as if site-packages, home and NUMBA_CACHE_DIR could not be written
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import gramtower as gt
    from gramtower.retrieval.topk import top_k

    problem = gt.Problem(sp.csr_matrix(np.eye(5)))
    print(problem.at(gt.mlp_towers(problem, (), 2)).value > 0)
    scores = np.random.default_rng(0).normal(size=(3000, 4)).astype(np.float32)
    found, _ = top_k(scores, scores[:500], 3)
    print((found[:, 0] == (scores @ scores[:500].T).argmax(1)).all())
print(sum("NUMBA_CACHE_DIR" in str(w.message) for w in caught))
"""


@pytest.fixture(autouse=True)
def _anew(monkeypatch):
    monkeypatch.setattr(module, "_warned", False)


def test_where_nothing_can_be_written_kernels_and_lists_work_and_say_so_once():
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", READ_ONLY], capture_output=True, text=True, env=environment)
    assert done.stdout.split() == ["True", "True", "1"], done.stderr


def twice(x):  # pragma: no cover
    return 2 * x


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), EOFError()])
def test_a_cache_that_fails_later_is_done_without(error):
    made = compiled()(twice)

    def fail(*_):
        raise error

    made._cache._load_overload = made._cache._save_overload = fail
    with pytest.warns(RuntimeWarning, match="NUMBA_CACHE_DIR"):
        assert made(3) == 6
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert made(1.5) == 3.0


def test_without_compilation_functions_stay_plain(monkeypatch):
    monkeypatch.setattr("numba.config.DISABLE_JIT", True)
    assert compiled(nogil=True)(twice)(np.int64(2)) == 4
