"""What goes wrong between processes ends the run in all of them, with a message that names the process."""

from __future__ import annotations

import pytest
import shared_fits
from processes import run_group, start_group

import gramtower as gt
from gramtower.distributed.group import SINGLE
from gramtower.training.checkpoint import locked


def test_processes_that_were_given_different_things_are_named(tmp_path):
    both = run_group("shared_fits:disagreements", 2, tmp_path)
    expected = {
        "omega": "omega: got 0.25 in process 1 of 2, expected 0.125 as in process 0",
        "seed": "seed: got 1 in process 1 of 2, expected 0 as in process 0",
        "options": "option damping: got '2.0' in process 1 of 2, expected '1.0' as in process 0",
        "version": "version of numpy: got '9.9' in process 1 of 2",
        "pairs": "pairs: got '30 × 20, 90 pairs, digest",
        "table": "tower: got a table of",
        "dim": "dim: got 8 in process 1 of 2, expected None as in process 0",
        "embedding_l2": "embedding_l2: got 0.004 in process 1 of 2, expected None as in process 0",
    }
    for said in both:
        assert {name: text in said[name] for name, text in expected.items()} == dict.fromkeys(expected, True)
    assert both[0]["broken"] == f"process 1 of 2: {both[1]['broken']}"
    assert both[1]["broken"].startswith("pairs: got str, expected")
    assert both[1]["hidden"].startswith("hidden: got '8', expected a sequence")
    assert both[0]["hidden"] == f"process 1 of 2: {both[1]['hidden']}"
    assert [said["dim of the poorest"] for said in both] == [8, 8]  # 16 would need 1.8 times the memory of process 1


@pytest.mark.parametrize(("how", "what"), [("die", "is gone"), ("hang", "is hung: it lives but has begun")])
def test_a_process_that_dies_or_hangs_is_named_by_the_others(how, what, tmp_path):
    started = start_group("shared_fits:misbehave", 2, tmp_path, how, env={"TEST_TIMEOUT": "4"})
    try:
        errors = started[0].communicate(timeout=300)[1]
    finally:
        started[1].kill()
        started[1].communicate()
    assert started[0].returncode == 1
    last = errors.strip().splitlines()
    message = next(line for line in last if "PeerError" in line)
    assert f"process 1 of 2 (pid {started[1].pid} on " in message
    assert what in message
    assert "The last checkpoint is whole" in message


def test_two_runs_do_not_write_one_checkpoint(tmp_path):
    path = tmp_path / "run.safetensors"

    def fit():
        problem = shared_fits.problem_of(SINGLE)
        towers = gt.mlp_towers(problem, hidden=(4,), dim=3)
        return gt.minimize(problem, towers, max_iterations=1, checkpoint=path)

    with locked(path, SINGLE), pytest.raises(ValueError, match=r"another run.*\d+"):
        fit()
    fit()
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names == [path.name, f"{path.name}.history"]  # nothing is left of the lock
