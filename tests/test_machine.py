"""What a timing depends on: other processes are noticed, and the commit is the package's own or none."""

from __future__ import annotations

import os
import subprocess
from types import SimpleNamespace

import pytest

pytest.importorskip("cyclopts", reason="the command line needs cyclopts")

from gramtower.experiments import run_store as machine


def test_work_of_others_is_counted_and_our_own_is_not(tmp_path, monkeypatch):
    # The readings are made up: what really runs beside the tests is not ours to say.
    ticks = os.sysconf("SC_CLK_TCK")

    def set_clocks(wall, own, user, nice=0, system=0, idle=0, waiting=0):
        fields = " ".join(str(int(seconds * ticks)) for seconds in (user, nice, system, idle, waiting, 0, 0, 0, 0, 0))
        (tmp_path / "stat").write_text(f"cpu  {fields}\ncpu0 {fields}\n")
        monkeypatch.setattr(machine, "time", SimpleNamespace(monotonic=lambda: wall))
        monkeypatch.setattr(machine.os, "times", lambda: SimpleNamespace(user=own, system=1.0, children_user=50.0))

    monkeypatch.setattr(machine, "_STAT", tmp_path / "stat")
    set_clocks(wall=100.0, own=5.0, user=20, system=10)
    busy = machine.OthersBusy()
    set_clocks(wall=110.0, own=13.0, user=28, system=10, idle=7, waiting=5)
    assert busy.cores() == 0.0  # eight seconds, all ours; the rest was idle
    set_clocks(wall=120.0, own=13.0, user=38, nice=1, system=13, idle=7, waiting=5)
    assert busy.cores() == pytest.approx(14 / 20)  # of 22 seconds eight were ours
    (tmp_path / "stat").unlink()
    assert busy.cores() is None


@pytest.mark.skipif(not machine._STAT.exists(), reason="only Linux tells what other processes use")
def test_the_system_is_read():
    first, second = machine._reading(), machine._reading()
    assert all(0 <= a <= b for a, b in zip(first, second, strict=True))


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


@pytest.mark.skipif(machine._git("--version") is None, reason="needs git")
def test_the_commit_is_that_of_the_package_and_marks_changes(tmp_path, monkeypatch):
    package = tmp_path / "package"
    package.mkdir()
    monkeypatch.setattr(machine, "_PACKAGE", package)
    assert machine.commit() is None  # no repository
    git(tmp_path, "init")
    (package / "__init__.py").write_text("")
    assert machine.commit() is None  # another project's repository, in which this package only lies
    git(tmp_path, "add", "package")
    git(tmp_path, "commit", "-m", "first")
    clean = machine.commit()
    assert clean
    assert len(clean) == 12
    (package / "__init__.py").write_text("x = 1\n")
    assert machine.commit() == clean + "+"
