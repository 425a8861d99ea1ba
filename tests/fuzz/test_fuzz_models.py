"""Mutated models, checkpoints, partitions and folders of commands: refused by name, or the same as what was written.

Bytes are changed as they are; JSON and tensors are also changed and written with the checksums that belong to them, so
that the schema behind the checksums is tried too. What such a changed file holds may differ, but it must be valid.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import os
import random
import shutil

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from harness import MINUTES, Fuzz, mutated

import gramtower as gt
from gramtower._util import tensors as _tensors
from gramtower._util.tensors import TensorFile
from gramtower.data.tables import FeatureTable
from gramtower.distributed.partition import read_part, write_partition
from gramtower.model.model_file import KIND
from gramtower.training import checkpoint

pytestmark = pytest.mark.usefixtures("without_waiting_for_the_disk")
USERS, ITEMS = [f"u{i}" for i in range(12)], [f"i{j}" for j in range(9)]
ODD = [
    None, True, False, 0, 1, -1, 2, 7, 9, 10**9, 2**31, 2**63, 10**400, 0.5, -0.0, 1e308, math.nan, math.inf, "", "x",
    "nan", "left", "\ud800", [], [1], [[]], {}, {"a": 1}, ["id"], [2**40], {"kind": "id"}, "../x", "9" * 99,
]  # fmt: skip


@pytest.fixture
def without_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda file: None)


def interactions():
    matrix = sp.csr_matrix((np.random.default_rng(0).random((12, 9)) < 0.4).astype(np.float32))
    return gt.Interactions.from_matrix(matrix, USERS, ITEMS)


def models():
    frame = {"user": USERS, "age": [float(i) for i in range(12)], "town": list("abcabcabcabc"), "tags": ["x|y"] * 12}
    table = FeatureTable(frame, "user", numeric=["age"], categorical=["town"], lists=["tags"])
    small = {"dim": 3, "max_iterations": 2, "device": "cpu"}
    weights = np.arange(1.0, 13)
    return [
        gt.TwoTower(hidden=(), left_weights=weights, **small).fit(interactions()),
        gt.TwoTower(hidden=(4, 3), **small).fit(interactions(), left_features=["id", "history", table]),
        gt.TwoTower(hidden=(4,), **small).fit(interactions().matrix, right_features=np.eye(9, 5)),
        gt.TwoTower(hidden=(4,), **small)
        .fit(gt.Interactions.from_matrix(interactions().matrix[:, :7], USERS, ITEMS[:7]), "history", np.eye(7, 5))
        .add(right_features=np.eye(2, 5), right_ids=ITEMS[7:]),
    ]


def answers(model):
    """What a model is asked for; nothing of it may fail once the model was read."""
    if len(model.left_) != 12 or len(model.right_) != 9:
        return ()
    asked = USERS[:5] if model.left_.ids is not None else range(5)
    one = model.left_.names(np.array([0]))[0] if model.left_.ids is not None else 0
    known = [key for key in asked if model.left_.ids is None or key in set(model.left_.ids.tolist())]
    found = [*model.recommend(known or [one], k=4), *model.recommend([one], k=99, exclude_seen=False)]
    histories = model.left_.inputs.has_history and model.towers_ is not None
    if histories:
        found += model.recommend(histories=sp.csr_matrix(np.eye(2, 9)), k=2)
    repr(model)
    return [*found, *model.similar(model.right_.names(np.array([0, 3])), k=3), model.embed(side="right"), model.embed()]


def same(one, other):
    return len(one) == len(other) and all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def odd(value, rng):
    """Another JSON value in the place of one."""
    if rng.random() < 0.4 and type(value) in (int, float):
        return value + rng.choice([-1, 1, 3, 1000])
    return copy.deepcopy(rng.choice(ODD))


def change_json(plain, rng):
    """A JSON value with one to three places changed, removed or added."""
    plain = copy.deepcopy(plain)
    for _ in range(rng.randint(1, 3)):
        place = plain
        while True:
            keys = list(place) if isinstance(place, dict) else range(len(place)) if isinstance(place, list) else []
            if not keys:
                break
            key = rng.choice(keys)
            if isinstance(place[key], (dict, list)) and place[key] and rng.random() < 0.8:
                place = place[key]
                continue
            action = rng.randrange(5)
            if action == 0:
                del place[key]
            elif action == 1 and isinstance(place, dict):
                place[rng.choice(["", "x", "kind", "dim", "rows"])] = odd(None, rng)
            elif action == 1:
                place.insert(key, odd(place[key], rng))
            else:
                place[key] = odd(place[key], rng)
            break
    return plain


def change_tensors(tensors, rng):
    """Tensors of which one or two are changed in content, shape, type or name."""
    tensors = dict(tensors)
    for _ in range(rng.randint(1, 2)):
        name = rng.choice(sorted(tensors))
        tensor = tensors[name].clone()
        action = rng.randrange(8)
        if action < 3 and tensor.numel():
            wild = [0, 1, -1, 3, 2**31 - 1] if not tensor.is_floating_point() else [0.0, math.nan, math.inf, -1e38]
            wild = [0, 1, 255] if tensor.dtype == torch.uint8 else wild
            tensor.view(-1)[rng.randrange(tensor.numel())] = rng.choice(wild)
        elif action == 3 and tensor.dim():
            tensor = tensor[: rng.randrange(len(tensor) + 1)].clone()
        elif action == 4:
            tensor = torch.cat([tensor, tensor]) if tensor.dim() else tensor.reshape(1, 1)
        elif action == 5:
            kinds = [torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8]
            tensor = tensor.to(rng.choice(kinds))
        elif action == 6:
            tensor = tensor.reshape(-1, 1) if rng.random() < 0.5 else tensor.reshape(-1)
        else:
            del tensors[name]
            name = rng.choice([name + "x", "left_numbers", "left", "header2", "../x", "weights", "left_text"])
        tensors[name] = tensor
    return tensors


def spoilt(path, kind, rng, whole, contents=True):
    """Write a damaged file; says whether its checksums still tell what was written.

    Without ``contents``, tensors whose checksums match are those that were written.
    """
    if rng.random() < 0.4:
        path.write_bytes(mutated(whole, rng))
        return True
    path.write_bytes(whole)
    file = TensorFile(path, *kind)
    header, tensors = file.header, {name: file.read(name).clone() for name in file.shapes}
    file.close()
    if rng.random() < 0.6 or not contents:
        header = change_json(header, rng)
    else:
        tensors = change_tensors(tensors, rng)
    try:
        _tensors.write(path, *kind, header if isinstance(header, dict) else {}, tensors)
    except (UnicodeEncodeError, RecursionError):  # text that no file can hold
        path.write_bytes(b"")
    return False


def refused_by_name(fuzz, name, call):
    """The answer of a call, None if it was refused; an error must name the file."""

    def named():
        try:
            return call()
        except (ValueError, OSError) as error:
            if str(name) not in str(error):
                raise AssertionError(f"input {fuzz.number}: no name of the file in {error}") from error
            raise

    return fuzz.attempt(name, named)


def test_mutated_models(tmp_path):
    fuzz, path = Fuzz("models", small=120), tmp_path / "m"
    files = []
    for model in models():
        model.save(path)
        files.append((path.read_bytes(), answers(gt.load(path))))
    for rng in fuzz:
        whole, expected = rng.choice(files)
        sealed = spoilt(path, KIND, rng, whole)
        model = refused_by_name(fuzz, path, lambda: gt.load(path))
        if model is not None:
            found = fuzz.attempt("answers", lambda model=model: answers(model), accepted=())
            assert not sealed or same(found, expected), f"input {fuzz.number}: a silent change"
            fuzz.outcomes["the same" if same(found, expected) else "another valid model"] += 1


def run(path, optimizer, iterations):
    problem = gt.Problem(interactions().matrix, omega=0.1)
    towers = gt.mlp_towers(problem, hidden=(3,), dim=2)
    options = {"ratio": 0.5, "steps": 2} if "sogram" in optimizer else {}
    result = gt.minimize(problem, towers, optimizer, iterations, checkpoint=path, seed=1, **options)
    return [record.value for record in result.history]


def test_mutated_checkpoints(tmp_path):
    fuzz, path = Fuzz("checkpoints", small=30), tmp_path / "run.safetensors"
    files = []
    for optimizer in ("newton-kron", "lbfgs", "sogram-diag", "gd-diag"):
        folder = tmp_path / optimizer
        folder.mkdir()
        run(folder / path.name, optimizer, 3)
        whole = {file.name: file.read_bytes() for file in folder.iterdir()}
        files.append((optimizer, whole, run(folder / path.name, optimizer, 4)))
    for rng in fuzz:
        optimizer, whole, expected = rng.choice(files)
        for name, content in whole.items():
            (tmp_path / name).write_bytes(content)
        sealed = spoilt(path, checkpoint._KIND, rng, whole[path.name])
        values = refused_by_name(fuzz, path, lambda optimizer=optimizer: run(path, optimizer, 4))
        if values is not None:
            assert not sealed or values == expected, f"input {fuzz.number}: a silent change"
            fuzz.outcomes["the same" if values == expected else "another valid run"] += 1


def test_mutated_partitions(tmp_path):
    pytest.importorskip("polars", reason="partitions are tables")
    fuzz, original, folder = Fuzz("partitions", small=60), tmp_path / "original", tmp_path / "parts"
    pairs = interactions()
    write_partition(pairs, original, 3)
    for rng in fuzz:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(original, folder)
        path = rng.choice(sorted(folder.iterdir()))
        path.write_bytes(mutated(path.read_bytes(), rng))
        part = refused_by_name(fuzz, folder, lambda: read_part(folder))
        if part is not None:  # Parquet files have no checksums of their content
            fuzz.outcomes["the same" if part.left_ids.tolist() == USERS else "another valid partition"] += 1
            part.matrix.tocsc().sum(0)  # its indices can be followed


COMMANDS = {  # those that go on from what is in their folder, or replace it; quick ones first
    "split": ["--by", "random"],
    "partition": ["--parts", "3"],
    "benchmark": ["--models", "popularity,ease", "--seeds", "1", "--metrics", "ndcg@5"],
    "tune": ["--hidden", "none", "--dim", "2", "--max-iterations", "1", "--trials", "3", "--device", "cpu"],
    "compare": ["--hidden", "2", "--dim", "2", "--optimizers", "gd,lbfgs", "--max-iterations", "2", "--device", "cpu"],
    "fit": ["--hidden", "2", "--dim", "2", "--max-iterations", "2", "--device", "cpu"],
}


def test_mutated_folders_of_commands(tmp_path, capsys):
    """The same command and ``report`` in a folder of which one file was changed, cut, emptied, removed or moved."""
    pytest.importorskip("optuna")
    rows = [f"u{i % 12},i{i * 7 // 5 % 11}" for i in range(90)]
    (tmp_path / "pairs.csv").write_text("user,item\n" + "\n".join(dict.fromkeys(rows)) + "\n")
    folder, wholes = tmp_path / "out", {}
    shared = [str(tmp_path / "pairs.csv"), "--left", "user", "--right", "item", "--quiet", "--out", str(folder)]
    commands = {name: [name, *shared, *more] for name, more in COMMANDS.items()}
    for name, tokens in commands.items() if MINUTES else itertools.islice(commands.items(), 3):
        assert cli(tokens) == 0, capsys.readouterr().err
        wholes[name] = tmp_path / f"{name} whole"
        folder.replace(wholes[name])
    fuzz = Fuzz("folders", small=8)
    for rng in fuzz:
        name = rng.choice(sorted(wholes))
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(wholes[name], folder)
        path = rng.choice(sorted(p for p in folder.rglob("*") if p.is_file() and p.suffix != ".html"))
        damage(path, rng)
        report = name not in ("partition", "split") and rng.random() < 0.4
        tokens = ["report", str(folder), "--quiet"] if report else commands[name]
        what = (tokens[0], name, path.relative_to(folder))
        code = fuzz.attempt(what, lambda tokens=tokens: cli(tokens), ())
        said = capsys.readouterr().err
        assert "internal error in" not in said, (fuzz.number, what, said)
        assert code in (0, 1, 2), (fuzz.number, what, said)
        assert code == 0 or said.startswith("error: "), (fuzz.number, what, said)
        fuzz.outcomes[f"{name}: {code}"] += 1


def cli(tokens):
    from gramtower.cli.program import run

    return run(tokens)


def damage(path, rng):
    """Change a file; JSON also as JSON."""
    kind = rng.randrange(6)
    if kind == 0:
        path.unlink()
    elif kind == 1:
        path.unlink()
        path.mkdir()
    elif kind < 4 and path.suffix == ".json":
        try:
            path.write_text(json.dumps(change_json(json.loads(path.read_text()), rng)))
        except (RecursionError, UnicodeEncodeError):
            path.write_text("")
    else:
        path.write_bytes(mutated(path.read_bytes(), rng))


@pytest.mark.parametrize("make", [mutated, change_json])
def test_the_changes_are_changes(make):
    given = b"0123456789" if make is mutated else {"a": [1, 2, {"b": "x"}], "c": None}
    changed = [make(given, random.Random(seed)) for seed in range(50)]
    assert sum(one != given for one in changed) > 40
