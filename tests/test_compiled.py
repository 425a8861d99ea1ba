"""Compiled code and where it is kept: the same answers with any cache or none, and one warning if it is unusable."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import warnings
from types import ModuleType

import numpy as np
import pytest
from numba.core.dispatcher import Dispatcher

from gramtower._util import compiled as module
from gramtower._util.compiled import CodeFiles, compiled

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

    made._cache._cache_file.load = made._cache._cache_file.save = fail
    with pytest.warns(RuntimeWarning, match="NUMBA_CACHE_DIR"):
        assert made(3) == 6
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert made(1.5) == 3.0


def test_a_numba_that_keeps_code_in_another_way_compiles_in_every_process(monkeypatch):
    monkeypatch.setattr(Dispatcher, "enable_caching", lambda made: setattr(made, "_cache", object()))
    monkeypatch.setattr(module, "_warned", False)
    with pytest.warns(RuntimeWarning, match="numba"):
        twice = compiled()(lambda x: 2 * x)
    assert twice(3) == 6


def test_without_compilation_functions_stay_plain(monkeypatch):
    monkeypatch.setattr("numba.config.DISABLE_JIT", True)
    assert compiled(nogil=True)(twice)(np.int64(2)) == 4


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path))
    return tmp_path


def kept(folder):
    return sorted(folder.rglob("*.gtc"))


def test_the_next_one_loads_what_was_compiled(folder):
    assert compiled()(twice)(3) == 6
    (file,) = kept(folder)
    content = file.read_bytes()
    again = compiled()(twice)
    assert again(5) == 10
    assert sum(again.stats.cache_hits.values()) == 1
    assert again(1.5) == 3.0  # another signature
    assert len(kept(folder)) == 2
    assert file.read_bytes() == content


@pytest.mark.parametrize("damage", ["cut", "empty", "changed", "digest"])
def test_a_damaged_file_is_not_used_and_is_written_anew(folder, damage):
    compiled()(twice)(3)
    (file,) = kept(folder)
    whole = file.read_bytes()
    place = 5 if damage == "digest" else len(whole) // 2
    flipped = whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
    file.write_bytes({"cut": whole[:place], "empty": b""}.get(damage, flipped))
    with pytest.warns(RuntimeWarning, match="damaged"):
        assert compiled()(twice)(3) == 6
    after = compiled()(twice)
    assert after(3) == 6
    assert sum(after.stats.cache_hits.values()) == 1


def test_a_file_under_another_ones_name_is_not_used(folder):
    """What numba's numbered files allow when two processes save at once: code for floats where integers were asked."""
    made = compiled()(twice)
    made(3)
    (integers,) = kept(folder)
    made(1.5)
    (floats,) = set(kept(folder)) - {integers}
    integers.write_bytes(floats.read_bytes())
    with pytest.warns(RuntimeWarning, match="another function"):
        assert compiled()(twice)(2**62 - 1) == 2**63 - 2  # a float would have lost the last place


@pytest.fixture
def defined(monkeypatch):
    """The function in a file of its name, in a module: of others numba keeps all globals, not all of them as bytes."""

    def define(path, **names):
        made = ModuleType(f"of_test_{path.stem}")
        monkeypatch.setitem(sys.modules, made.__name__, made)
        vars(made).update(names)
        exec(compile(path.read_text(), str(path), "exec"), vars(made))
        return getattr(made, path.stem)

    return define


def test_processes_that_save_at_once_do_not_mix_their_files(folder, defined):
    (folder / "f.py").write_text("def f():\n    return 1\n")
    one, other = (CodeFiles(str(folder), "f", defined(folder / "f.py")) for _ in range(2))
    assert one.load("integers") is None
    assert other.load("floats") is None
    one.save("integers", 1)
    other.save("floats", 2)
    assert (other.load("integers"), one.load("floats")) == (1, 2)
    (folder / "changed").mkdir()
    (folder / "changed" / "f.py").write_text("def f():\n    return 2\n")  # the same size, other content
    assert CodeFiles(str(folder), "f", defined(folder / "changed" / "f.py")).load("integers") is None


def test_code_is_compiled_anew_when_a_function_that_it_calls_was_changed_in_another_file(folder, defined):
    (folder / "outer.py").write_text("def outer(x):\n    return inner(x)\n")
    results = []
    for factor in (2, 3):
        module._content.cache_clear()  # as in another process
        (folder / "inner.py").write_text(f"def inner(x):\n    return {factor} * x\n")
        inner = compiled(inline="always")(defined(folder / "inner.py"))
        results.append(compiled()(defined(folder / "outer.py", inner=inner))(5))
    assert results == [10, 15]
    assert len(kept(folder)) == 2


def test_the_cache_can_be_turned_off(folder, monkeypatch):
    monkeypatch.setenv("GRAMTOWER_CACHE", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compiled()(twice)(3) == 6
    assert kept(folder) == []
