"""Compiled code and where it is kept: the same answers with any cache or none, and one warning if it is unusable."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from gramtower._util import compiled as module
from gramtower._util.compiled import compiled

READ_ONLY = """
import warnings
from pathlib import Path
import numpy as np
import scipy.sparse as sp

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from gramtower._util import compiled
    compiled.__file__ = "/dev/null/compiled.py"  # as if site-packages could not be written, nor home, NUMBA_CACHE_DIR
    import gramtower as gt
    from gramtower.retrieval.topk import top_k

    problem = gt.Problem(sp.csr_matrix(np.eye(5)))
    print(problem.at(gt.mlp_towers(problem, (), 2)).value > 0)
    scores = np.random.default_rng(0).normal(size=(3000, 4)).astype(np.float32)
    found, _ = top_k(scores, scores[:500], 3)
    print((found[:, 0] == (scores @ scores[:500].T).argmax(1)).all())
print(sum("NUMBA_CACHE_DIR" in str(w.message) for w in caught))
"""

PROCESS = """
import sys
import importlib.util
from gramtower._util.compiled import compiled

spec = importlib.util.spec_from_file_location("twice", sys.argv[1])
twice = importlib.util.module_from_spec(spec)
sys.modules["twice"] = twice
spec.loader.exec_module(twice)
made = compiled()(twice.twice)
sys.stdin.readline()  # all processes compile at the same time
print(made(eval(sys.argv[2])), sum(made.stats.cache_hits.values()), flush=True)
"""


def twice(x):  # pragma: no cover
    return 2 * x


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(module, "_locks", [])
    yield tmp_path
    _end_process()


def _end_process():
    """Give up the folder, as a process does when it ends."""
    module._own_folder.cache_clear()
    module._content.cache_clear()
    for lock in module._locks:
        os.close(lock)
    module._locks.clear()


def kept(folder):
    return sorted(folder.rglob("*.nbc"))


def test_where_nothing_can_be_written_kernels_and_lists_work_and_say_so_once():
    unwritable = {"NUMBA_CACHE_DIR": "/dev/null/numba", "XDG_CACHE_HOME": "/dev/null/cache"}
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | unwritable
    done = subprocess.run([sys.executable, "-c", READ_ONLY], capture_output=True, text=True, env=environment)
    assert done.stdout.split() == ["True", "True", "1"], done.stderr


def test_a_full_disk_is_not_written_to(folder, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 20))
    with pytest.warns(RuntimeWarning, match="NUMBA_CACHE_DIR"):
        assert compiled()(twice)(3) == 6
    assert kept(folder) == []


def test_without_compilation_functions_stay_plain(monkeypatch):
    monkeypatch.setattr("numba.config.DISABLE_JIT", True)
    assert compiled(nogil=True)(twice)(np.int64(2)) == 4


def test_the_next_one_loads_what_was_compiled(folder):
    assert compiled()(twice)(3) == 6
    (file,) = kept(folder)
    content = file.read_bytes()
    _end_process()
    again = compiled()(twice)
    assert again(5) == 10
    assert sum(again.stats.cache_hits.values()) == 1
    assert again(1.5) == 3.0  # another signature
    assert len(kept(folder)) == 2
    assert file.read_bytes() == content


def test_files_that_a_power_failure_left_empty_are_written_anew(folder):
    compiled()(twice)(3)
    for file in folder.rglob("*.nb?"):
        file.write_bytes(b"")
    _end_process()
    assert compiled()(twice)(3) == 6
    _end_process()
    after = compiled()(twice)
    assert after(3) == 6
    assert sum(after.stats.cache_hits.values()) == 1


def test_processes_at_the_same_time_do_not_mix_their_files(tmp_path):
    """numba's numbered files allow it: code for floats where integers were asked."""
    source = tmp_path / "twice.py"
    source.write_text("def twice(x):\n    return 2 * x\n")
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}

    def answers(*values):
        running = [
            subprocess.Popen(
                [sys.executable, "-c", PROCESS, str(source), value],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
            )
            for value in values
        ]  # fmt: skip
        for one in running:
            one.stdin.write("\n")
            one.stdin.flush()
        return [one.communicate()[0].split() for one in running]

    assert answers("3", "1.5") == [["6", "0"], ["3.0", "0"]]
    places = {file.relative_to(tmp_path / "cache").parts[:2] for file in kept(tmp_path / "cache")}
    assert places == {("gramtower-compiled", "0"), ("gramtower-compiled", "1")}
    assert answers(str(2**62 - 1))[0][0] == str(2**63 - 2)  # a float would have lost the last place


def test_a_process_starts_with_the_code_of_the_others(folder):
    compiled()(twice)(3)
    held, module._locks = module._locks, []  # another process, while the first one runs
    module._own_folder.cache_clear()
    other = compiled()(twice)
    assert other(5) == 10
    assert sum(other.stats.cache_hits.values()) == 1
    assert {Path(file).relative_to(folder).parts[1] for file in kept(folder)} == {"0", "1"}
    module._locks += held


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


def test_code_is_compiled_anew_when_a_function_that_it_calls_was_changed_in_another_file(folder, defined):
    (folder / "outer.py").write_text("def outer(x):\n    return inner(x)\n")
    results = []
    for factor in (2, 3):
        _end_process()
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
