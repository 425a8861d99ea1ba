"""Killed and resumed runs equal uninterrupted ones bit for bit; foreign and damaged files are refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest
import torch

import gramtower as gt
from gramtower.data.synthetic import planted_pairs
from gramtower.optim.methods import OPTIMIZERS
from gramtower.optim.parts import join_state, split_state


def planted(seed=1, **options):
    problem = gt.Problem(planted_pairs(50, 40, 300, groups=4, seed=seed), omega=2**-3, l2=0.5, **options)
    return problem, gt.mlp_towers(problem, hidden=(6,), dim=4)


def options_of(name):
    return {"ratio": 0.1, "steps": 5} if name.startswith(("sogram", "sampling")) else {}


def trajectory(result):
    return [(r.iteration, r.value, r.gradient_norm, r.step, r.damping, r.cg_steps, r.metric) for r in result.history]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_run_equals_an_uninterrupted_one(name, tmp_path):
    common = dict(optimizer=name, seed=3, validation=lambda point: -point.value, **options_of(name))
    problem, towers = planted()
    whole = gt.minimize(problem, towers, max_iterations=9, **common)
    path = tmp_path / "run.safetensors"
    problem, towers = planted()
    gt.minimize(problem, towers, max_iterations=4, checkpoint=path, checkpoint_every=2, **common)
    problem, other = planted()
    resumed = gt.minimize(problem, other, max_iterations=9, checkpoint=path, checkpoint_every=2, **common)
    assert trajectory(resumed) == trajectory(whole)
    assert torch.equal(resumed.parameters.vector, whole.parameters.vector)
    assert resumed.history[-1].data_passes == pytest.approx(whole.history[-1].data_passes)
    assert resumed.history[-1].seconds >= resumed.history[4].seconds  # time goes on where it stopped


SCRIPT = """
    import sys, gramtower as gt
    from gramtower.data.synthetic import planted_pairs
    problem = gt.Problem(planted_pairs(50, 40, 300, groups=4, seed=1), omega=2**-3, l2=0.5)
    towers = gt.mlp_towers(problem, hidden=(6,), dim=4)
    show = lambda record, point: print(record.iteration, record.value.hex(), flush=True)
    gt.minimize(problem, towers, sys.argv[1], max_iterations=int(sys.argv[3]), checkpoint=sys.argv[2],
                checkpoint_every=1, callbacks=[show], **eval(sys.argv[4]))
"""


@pytest.mark.parametrize("name", ["newton-kron", "sogram-diag"])
def test_a_run_killed_at_any_moment_resumes(name, tmp_path):
    problem, towers = planted()
    whole = gt.minimize(problem, towers, name, max_iterations=25, **options_of(name))
    path = tmp_path / "run.safetensors"
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), name, str(path), "25", repr(options_of(name))]
    seen: dict[int, float] = {}
    for stop_after in (3, 4, None):  # two kills, then to the end
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            for count, text in enumerate(process.stdout, 1):
                iteration, value = text.split()
                seen[int(iteration)] = float.fromhex(value)
                if count == stop_after:
                    os.kill(process.pid, signal.SIGKILL)
                    break
    expected = {record.iteration: record.value for record in whole.history[1:]}
    assert seen == expected


def test_checkpoints_keep_their_distance_in_training_time(tmp_path):
    problem, towers = planted()
    path, kept = tmp_path / "run.safetensors", []

    def watch(record, _):
        kept.append((record.seconds, path.exists()))
        return record.seconds > 0.3

    gt.minimize(problem, towers, "gd", 10**6, callbacks=[watch], tolerance=0.0, checkpoint=path, checkpoint_every=1,
                checkpoint_seconds=0.2)  # fmt: skip
    assert [there for seconds, there in kept if seconds < 0.2] == [False] * sum(seconds < 0.2 for seconds, _ in kept)
    assert kept[-1][1]


def test_a_finished_run_is_not_run_again(tmp_path):
    path = tmp_path / "run.safetensors"
    problem, towers = planted()
    first = gt.minimize(problem, towers, max_iterations=3, checkpoint=path)
    problem, towers = planted()
    again = gt.minimize(problem, towers, max_iterations=3, checkpoint=path)
    assert trajectory(again) == trajectory(first)
    assert problem.at(towers).value == first.value


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (dict(problem=dict(seed=2)), "pairs"),
        (dict(problem=dict(left=torch.eye(50))), "features"),
        (dict(problem=dict(embedding_l2=0.1)), "objective"),
        (dict(problem=dict(left_weights=torch.rand(50))), "objective"),
        (dict(towers=dict(dim=5)), "towers"),
        (dict(run=dict(optimizer="gd")), "optimizer"),
        (dict(run=dict(damping=2.0)), "options"),
        (dict(run=dict(seed=1)), "seed"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_by_what_differs(change, named, tmp_path):
    path = tmp_path / "run.safetensors"
    problem, towers = planted()
    gt.minimize(problem, towers, max_iterations=2, checkpoint=path)
    problem, towers = planted(**change.get("problem", {}))
    if "towers" in change:
        towers = gt.mlp_towers(problem, hidden=(6,), **change["towers"])
    with pytest.raises(ValueError, match=rf"belongs to another run, which differs in .*{named}"):
        gt.minimize(problem, towers, max_iterations=2, checkpoint=path, **change.get("run", {}))


@pytest.mark.parametrize("damage", ["cut", "noise", "empty", "header"])
def test_a_damaged_checkpoint_is_refused(damage, tmp_path):
    path = tmp_path / "run.safetensors"
    problem, towers = planted()
    gt.minimize(problem, towers, max_iterations=2, checkpoint=path)
    whole = path.read_bytes()
    spoilt = {"cut": whole[: len(whole) // 2], "noise": b"PK" + os.urandom(500), "empty": b"", "header": whole[:4]}
    path.write_bytes(spoilt[damage])
    with pytest.raises(ValueError, match=r"damaged or not a checkpoint.*delete it to start anew"):
        gt.minimize(problem, towers, max_iterations=2, checkpoint=path)


def test_a_failed_write_leaves_the_old_checkpoint_whole(tmp_path, monkeypatch):
    path = tmp_path / "run.safetensors"
    problem, towers = planted()
    gt.minimize(problem, towers, max_iterations=2, checkpoint=path)
    before = path.read_bytes()

    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    problem, towers = planted()
    with pytest.raises(OSError, match="No space left"):
        gt.minimize(problem, towers, max_iterations=5, checkpoint=path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_states_survive_being_taken_apart():
    state = {"a": {"x": torch.ones(2), "n": 3, "rng": {"state": {"state": 2**100}}}, "b": {}, "c": None}
    joined = join_state(*split_state(state))
    assert torch.equal(joined["a"]["x"], torch.ones(2))
    assert joined["a"]["n"] == 3
    assert joined["a"]["rng"] == {"state": {"state": 2**100}}
    assert joined["c"] is None
