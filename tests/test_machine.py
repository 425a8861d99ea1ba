"""What a timing depends on: other processes are noticed, and the commit is the package's own or none."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("cyclopts", reason="the command line needs cyclopts")

from gramtower.cli import machine

SPIN = "import time; end = time.monotonic() + {}\nwhile time.monotonic() < end: pass"


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="only Linux tells what other processes use")
def test_work_of_others_is_counted_and_our_own_is_not():
    end = time.monotonic() + 0.8
    alone = machine.OthersBusy()
    while time.monotonic() < end:
        pass
    before = alone.cores()
    beside = machine.OthersBusy()
    subprocess.run([sys.executable, "-c", SPIN.format(1.5)], check=True)
    # Whatever else runs here runs in both halves; our own spinning is no one else's, that of the child is.
    assert beside.cores() > 0.5
    assert before < beside.cores() + 0.5


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
