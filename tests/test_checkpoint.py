"""Killed and resumed runs equal uninterrupted ones bit for bit; foreign and damaged files are refused."""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace

import pytest
import torch

import gramtower as gt
from gramtower.data.datasets import planted_pairs
from gramtower.distributed import shard_files
from gramtower.optim.descent import join_state, split_state
from gramtower.optim.solvers import SOLVERS
from gramtower.training import checkpoint, loop


def planted(seed=1, **options):
    problem = gt.Problem(planted_pairs(50, 40, 300, groups=4, seed=seed), omega=2**-3, l2=0.5, **options)
    return problem, gt.mlp_towers(problem, hidden=(6,), dim=4)


def options_of(name):
    return {"ratio": 0.1, "steps": 5} if name.startswith(("sogram", "sampling")) else {}


def trajectory(result):
    return [(r.iteration, r.value, r.gradient_norm, r.step, r.damping, r.cg_steps, r.metric) for r in result.history]


@pytest.mark.parametrize("name", SOLVERS)
def test_a_resumed_run_equals_an_uninterrupted_one(name, tmp_path):
    common = dict(optimizer=name, seed=3, validation=lambda point: -point.value, **options_of(name))
    problem, towers = planted()
    whole = gt.minimize(problem, towers, max_iterations=9, **common)
    path = tmp_path / "run.safetensors"
    problem, towers = planted()
    first = gt.minimize(problem, towers, max_iterations=4, checkpoint=path, checkpoint_every=2, **common)
    problem, other = planted()
    resumed = gt.minimize(problem, other, max_iterations=9, checkpoint=path, checkpoint_every=2, **common)
    assert trajectory(resumed) == trajectory(whole)
    assert torch.equal(resumed.parameters.vector, whole.parameters.vector)
    assert resumed.history[-1].data_passes == pytest.approx(whole.history[-1].data_passes)
    assert resumed.history[-1].seconds >= first.history[-1].seconds  # time goes on where it stopped


SCRIPT = """
    import sys, gramtower as gt
    from gramtower.data.datasets import planted_pairs
    for name, path, options in eval(sys.argv[1]):
        problem = gt.Problem(planted_pairs(50, 40, 300, groups=4, seed=1), omega=2**-3, l2=0.5)
        towers = gt.mlp_towers(problem, hidden=(6,), dim=4)
        show = lambda record, point: print(name, record.iteration, record.value.hex(), flush=True)
        gt.minimize(problem, towers, name, max_iterations=25, checkpoint=path, checkpoint_every=1, callbacks=[show],
                    **options)
"""


def test_runs_killed_at_any_moment_resume(tmp_path):
    names = ["newton-kron", "sogram-diag"]
    expected = {}
    for name in names:
        problem, towers = planted()
        whole = gt.minimize(problem, towers, name, max_iterations=25, **options_of(name))
        expected |= {(name, record.iteration): record.value for record in whole.history[1:]}
    runs = [(name, str(tmp_path / f"{name}.safetensors"), options_of(name)) for name in names]
    seen: dict[tuple[str, int], float] = {}
    kills = [("newton-kron", 3), ("sogram-diag", 5), None]  # the first, the next, then to the end; more in `make crash`
    for kill in kills:
        iterations = dict.fromkeys(names, 0)
        command = [sys.executable, "-c", textwrap.dedent(SCRIPT), repr(runs)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            for text in process.stdout:
                name, iteration, value = text.split()
                seen[name, int(iteration)] = float.fromhex(value)
                iterations[name] += 1
                if (name, iterations[name]) == kill:
                    os.kill(process.pid, signal.SIGKILL)
                    break
        assert process.returncode == (0 if kill is None else -signal.SIGKILL)
    assert seen == expected


def test_checkpoints_keep_their_distance_in_training_time(tmp_path, monkeypatch):
    looks = count()
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: 0.0625 * next(looks)))
    problem, towers = planted()
    path, kept = tmp_path / "run.safetensors", []

    def watch(record, _):
        kept.append((record.seconds, path.exists()))
        return record.seconds > 0.3

    gt.minimize(problem, towers, "gd", 10**6, callbacks=[watch], tolerance=0.0, checkpoint=path, checkpoint_every=1,
                checkpoint_seconds=0.2)  # fmt: skip
    assert kept == [(0.125, False), (0.1875, False), (0.25, False), (0.3125, True)]


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
        (dict(towers=dict(activation="relu")), "architecture"),
        (dict(problem=dict(loss="squared")), "loss"),
        (dict(problem=dict(precision="tf32")), "precision"),
        (dict(problem=dict(pair_precision="bfloat16")), "pair_precision"),
        (dict(dtype=torch.float64), "dtype"),
        (dict(run=dict(validation=lambda point: 0.0)), "metric"),
        (dict(run=dict(validation=lambda point: 0.0, patience=2)), "patience"),
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
        towers = gt.mlp_towers(problem, **{"hidden": (6,), "dim": 4, **change["towers"]})
    if "dtype" in change:
        towers = gt.Towers(towers.left.to(change["dtype"]), towers.right.to(change["dtype"]))
    with pytest.raises(ValueError, match=rf"another run.*{named}"):
        gt.minimize(problem, towers, max_iterations=2, checkpoint=path, **change.get("run", {}))


class Scaled(torch.nn.Module):
    """A tower with a number and a buffer that are no parameters."""

    def __init__(self, rows, power=1, scale=1.0):
        super().__init__()
        self.table, self.power = torch.nn.Embedding(rows, 3), power
        self.register_buffer("scale", torch.tensor(scale))

    def forward(self, ids):
        return self.table(ids) ** self.power * self.scale


@pytest.mark.parametrize("change", [dict(power=3), dict(scale=2.0)])
def test_what_a_module_holds_besides_parameters_belongs_to_its_run(change, tmp_path):
    def run(**options):
        problem = gt.Problem(planted_pairs(50, 40, 300, groups=4, seed=1))
        torch.manual_seed(0)
        return gt.minimize(
            problem, gt.Towers(Scaled(50, **options), Scaled(40)), max_iterations=1, checkpoint=tmp_path / "run"
        )

    run()
    with pytest.raises(ValueError, match="architecture"):
        run(**change)
    run()


def test_towers_that_compute_something_else_in_the_same_words_are_refused(tmp_path):
    path = tmp_path / "run.safetensors"
    problem, towers = planted()
    gt.minimize(problem, towers, max_iterations=2, checkpoint=path)
    problem, towers = planted()
    loss = problem.loss
    functions = [lambda y, s, own=own: 2 * own(y, s) for own in (loss.value, loss.first, loss.second)]
    for doubled, own in zip(functions, (loss.value, loss.first, loss.second), strict=True):
        doubled.__module__, doubled.__qualname__ = own.__module__, own.__qualname__
    twice = gt.Loss(*functions, loss.labels, loss.name)
    problem = gt.Problem(planted_pairs(50, 40, 300, groups=4, seed=1), omega=2**-3, l2=0.5, loss=twice)
    with pytest.raises(ValueError, match=r"another run.*objective"):
        gt.minimize(problem, towers, max_iterations=2, checkpoint=path)


def test_another_metric_or_other_held_out_pairs_are_refused(tmp_path):
    pairs, held_out, other = (planted_pairs(50, 40, 300, groups=4, seed=seed) for seed in (1, 2, 3))

    def fit(metric, validation):
        model = gt.TwoTower(dim=4, hidden=(), max_iterations=2, metric=metric, device="cpu", seed=0)
        return model.fit(pairs, validation=validation, checkpoint=tmp_path / "run")

    fit("recall@20", held_out)
    with pytest.raises(ValueError, match="metric"):
        fit("map@5", held_out)
    with pytest.raises(ValueError, match="validation"):
        fit("recall@20", other)
    assert fit("recall@20", held_out).history_[-1].iteration == 2


def test_a_memory_budget_that_is_given_counts_in_a_resumed_run(tmp_path):
    problem, towers = planted(memory_budget=200_000)
    gt.minimize(problem, towers, max_iterations=2, checkpoint=tmp_path / "run")
    seen = []
    for given, expected in (("300kB", 300_000), (None, 300_000)):
        problem, towers = planted(memory_budget=given)
        before = problem.memory_budget
        gt.minimize(problem, towers, max_iterations=3 + len(seen), checkpoint=tmp_path / "run",
                    callbacks=[lambda *_, problem=problem: seen.append(*problem.planned_budgets.values())])  # fmt: skip
        assert seen[-1] == expected
        assert problem.memory_budget == before


def interrupted_at(name, moment, path, calls):
    """Three iterations; Ctrl-C comes at the ``moment``-th call of a function of the library in the last two."""
    problem, towers = planted()
    count = 0
    calls.append(count)

    def trace(frame, event, argument):
        nonlocal count
        code = frame.f_code
        if event == "call" and "gramtower" in code.co_filename and not code.co_flags & inspect.CO_GENERATOR:
            count += 1
            if count == moment:
                sys.setprofile(None)
                raise KeyboardInterrupt

    def begin(record, point):
        calls[-1] = count
        sys.setprofile(trace if record.iteration < 3 else None)

    try:
        return gt.minimize(problem, towers, name, max_iterations=3, callbacks=[begin], checkpoint=path,
                           validation=lambda point: -point.value, **options_of(name))  # fmt: skip
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("name", SOLVERS)
def test_a_run_interrupted_anywhere_in_an_iteration_goes_on_as_if_it_had_not_been(name, tmp_path):
    calls: list[int] = []
    whole = interrupted_at(name, -1, tmp_path / "whole", calls)
    for turn, moment in enumerate(range(1, calls[0], max(1, calls[0] // 8))):
        path = tmp_path / str(turn)
        cut = interrupted_at(name, moment, path, calls)
        assert cut.reason is gt.Reason.INTERRUPTED
        resumed = interrupted_at(name, -1, path, calls)
        assert trajectory(resumed) == trajectory(whole)
        assert torch.equal(resumed.parameters.vector, whole.parameters.vector)


def test_records_are_appended_to_a_file_and_not_limited_by_the_header(tmp_path):
    from dataclasses import replace

    from gramtower.training.checkpoint import StoredHistory, read_stored

    problem, towers = planted()
    record = gt.minimize(problem, towers, max_iterations=0).history[0]
    path = tmp_path / "run.safetensors"
    stored = StoredHistory(path)
    many = [replace(record, iteration=i) for i in range(2000)]
    stored.append(many)
    with stored.path.open("ab") as file:
        file.write(b'{"half of a li')  # what a kill leaves
    again, records = read_stored(path, stored.mark)
    assert records == many
    size = stored.path.stat().st_size
    again.append([*many, record])
    assert stored.path.stat().st_size < size + 1000  # nothing but the new record was written
    assert read_stored(path, again.mark)[1] == [*many, record]
    assert read_stored(path, stored.mark)[1] == many  # a checkpoint that was not replaced still has its own


def test_a_checkpoint_without_its_records_is_refused(tmp_path):
    path = tmp_path / "run.safetensors"
    problem, towers = planted()
    gt.minimize(problem, towers, max_iterations=2, checkpoint=path)
    beside = tmp_path / "run.safetensors.history"
    for spoilt in (beside.read_bytes()[:-10], beside.read_bytes().replace(b"value", b"valve"), None):
        beside.unlink() if spoilt is None else beside.write_bytes(spoilt)
        with pytest.raises(ValueError, match="damaged"):
            gt.minimize(problem, towers, max_iterations=2, checkpoint=path)


@pytest.mark.parametrize("damage", ["cut", "noise", "empty", "header"])
def test_a_damaged_checkpoint_is_refused(damage, tmp_path):
    path = tmp_path / "run.safetensors"
    problem, towers = planted()
    gt.minimize(problem, towers, max_iterations=2, checkpoint=path)
    whole = path.read_bytes()
    spoilt = {"cut": whole[: len(whole) // 2], "noise": b"PK" + os.urandom(500), "empty": b"", "header": whole[:4]}
    path.write_bytes(spoilt[damage])
    with pytest.raises(ValueError, match=r"damaged.*checkpoint"):
        gt.minimize(problem, towers, max_iterations=2, checkpoint=path)


def test_a_checkpoint_of_another_version_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "run.safetensors"
    with monkeypatch.context() as earlier:
        earlier.setattr(checkpoint, "_KIND", ("gramtower-checkpoint", 4))
        gt.minimize(*planted(), max_iterations=2, checkpoint=path)
    with pytest.raises(ValueError, match=r"^checkpoint.*version"):
        gt.minimize(*planted(), max_iterations=4, checkpoint=path)


class Remembering(gt.optim.Direction):
    """Goes downhill, and remembers numbers of its own that happen to be as many as the parameters."""

    numbers = None

    def find(self, gradient, point):
        self.numbers = torch.arange(float(len(gradient))) if self.numbers is None else self.numbers + 1
        return gt.optim.DirectionResult(-gradient)

    def state(self):
        return {} if self.numbers is None else {"numbers": self.numbers}

    def restore(self, state):
        self.numbers = state.get("numbers")


@dataclass(frozen=True, kw_only=True)
class Remembers(gt.optim.Solver):
    name = "remembers"

    def method(self, seed):
        return gt.optim.Descent(Remembering(), gt.optim.Backtracking(initial_step=0.01))


def test_a_tensor_as_long_as_the_parameters_is_not_taken_for_them(tmp_path):
    path = tmp_path / "run.safetensors"
    problem, towers = planted()
    gt.minimize(problem, towers, Remembers(), max_iterations=3, checkpoint=path)
    file = shard_files.Reader(path, checkpoint._KIND)
    assert torch.equal(file.read("method/direction/numbers"), torch.arange(float(towers.size)) + 2)
    file.close()
    again = gt.minimize(*planted(), Remembers(), max_iterations=5, checkpoint=path)
    assert again.history[-1].iteration == 5


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
    assert sorted(p.name for p in tmp_path.iterdir()) == [path.name, f"{path.name}.history"]


def test_states_survive_being_taken_apart():
    state = {"a": {"x": torch.ones(2), "n": 3, "rng": {"state": {"state": 2**100}}}, "b": {}, "c": None}
    joined = join_state(*split_state(state))
    assert torch.equal(joined["a"]["x"], torch.ones(2))
    assert joined["a"]["n"] == 3
    assert joined["a"]["rng"] == {"state": {"state": 2**100}}
    assert joined["c"] is None
