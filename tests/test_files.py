"""Writing in one step: whatever goes wrong, the old file stays whole and nothing is left beside it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from gramtower._files import replacing, write_text

SAVE = {
    "model": (
        "import gramtower as gt, scipy.sparse as sp\n"
        "model = gt.TwoTower(dim=4, hidden=(), max_iterations=0, device='cpu')\n"
        "model.fit(sp.eye(900, format='csr', dtype='float32'))\n"
        "save = lambda: model.save(path)\n"
    ),
    "checkpoint": (
        "import gramtower as gt, scipy.sparse as sp\n"
        "problem = gt.Problem(sp.eye(900, format='csr', dtype='float32'))\n"
        "towers = gt.mlp_towers(problem, hidden=(), dim=4)\n"
        "save = lambda: gt.minimize(problem, towers, 'gd', max_iterations=0, checkpoint=path)\n"
    ),
    "text": "from gramtower._files import write_text\nsave = lambda: write_text(path, 'x' * 20_000)\n",
}
LIMITED = """
import resource, sys
from pathlib import Path
path = Path(sys.argv[1])
{prepare}
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))  # what a write beyond gets is what a full disk gives it
try:
    save()
except Exception as error:
    print(type(error).__name__, error)
"""


def test_what_was_written_takes_the_place_of_the_old_file(tmp_path):
    path = tmp_path / "new" / "folder" / "a.txt"
    write_text(path, "one")
    write_text(path, "zwei é")
    assert path.read_text(encoding="utf-8") == "zwei é"
    assert os.listdir(path.parent) == ["a.txt"]


def test_until_the_end_the_old_file_is_there(tmp_path):
    path = tmp_path / "a"
    path.write_text("old")
    with replacing(path) as partial:
        partial.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"


def test_an_error_in_the_block_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "a"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as partial:  # noqa: PT012
        partial.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


def test_a_disk_that_fails_at_the_last_moment_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a"
    path.write_text("old")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


KILLED = """
import os, sys
from pathlib import Path
from gramtower._files import replacing
with replacing(Path(sys.argv[1])) as partial:
    partial.write_text("half")
    print("writing", flush=True)
    sys.stdin.readline()
    os.kill(os.getpid(), 9)
"""


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_writes_is_not(tmp_path):
    path = tmp_path / "a"
    command = [sys.executable, "-c", KILLED, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        write_text(path, "one")
        assert len(os.listdir(tmp_path)) == 2  # the other process is still at work
        process.communicate("die\n")
    assert len(os.listdir(tmp_path)) == 2
    write_text(tmp_path / "b", "two")
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


@pytest.mark.skipif(sys.platform == "win32", reason="limits on file sizes are set with the resource module")
@pytest.mark.parametrize("kind", SAVE)
def test_a_write_that_the_system_cuts_short_leaves_the_old_file(kind, tmp_path):
    path = tmp_path / "a"
    if kind != "checkpoint":  # which would be read first
        path.write_text("old")
    script = LIMITED.format(prepare=SAVE[kind])
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
    assert "File too large" in done.stdout, done.stdout + done.stderr
    if kind == "checkpoint":
        assert "a" not in os.listdir(tmp_path)
    else:
        assert path.read_text() == "old"
        assert os.listdir(tmp_path) == ["a"]


def test_a_saved_model_can_be_read_by_whoever_can_read_other_files(tmp_path):
    import scipy.sparse as sp

    import gramtower as gt

    model = gt.TwoTower(dim=2, hidden=(), max_iterations=0, device="cpu").fit(sp.eye(3, format="csr", dtype="float32"))
    model.save(tmp_path / "model")
    (tmp_path / "other").touch()
    assert (tmp_path / "model").stat().st_mode == (tmp_path / "other").stat().st_mode
