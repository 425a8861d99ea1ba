"""Folders of parts: what was written comes back, and the command line fits from them as from a file."""

from __future__ import annotations

import json
import zlib

import numpy as np
import pytest
import shared_fits
import torch

from gramtower._util import tensors as _tensors
from gramtower._util.tensors import TensorFile
from gramtower.data.splits import random_pairs
from gramtower.distributed.partition import read_part, write_partition


@pytest.mark.parametrize("user", [str, int])
def test_a_partition_gives_back_what_was_written(user, tmp_path):
    split = random_pairs(shared_fits.interactions(user), 0.2, seed=0)
    manifest = write_partition(split.train, tmp_path, 4, split.test)
    part = read_part(tmp_path)
    assert (part.matrix != split.train.matrix).nnz == 0
    assert (part.held_out != split.test.matrix).nnz == 0
    assert part.left_ids.tolist() == split.train.left_ids.tolist()
    assert part.left_ids.dtype == split.train.left_ids.dtype
    assert part.right_ids().tolist() == split.train.right_ids.tolist()
    np.testing.assert_array_equal(part.weights, split.train.weights)
    assert len(manifest.parts) == 4
    sizes = [p["pairs"] + 200 * (p["rows"][1] - p["rows"][0]) for p in manifest.parts]
    assert max(sizes) - min(sizes) <= 2 * (200 + split.train.matrix.getnnz(1).max())


def changed(**fields):
    """A change of the manifest by hand, with the checksum that belongs to it."""

    def change(folder):
        plain = json.loads((folder / "manifest.json").read_text())
        del plain["checksum"]
        plain |= {key: make(plain[key]) if callable(make) else make for key, make in fields.items()}
        plain["checksum"] = zlib.crc32(json.dumps(plain, sort_keys=True).encode())
        (folder / "manifest.json").write_text(json.dumps(plain))

    return change


def rewritten(**tensors):
    """A change of the second part by hand, with the checksums that belong to it."""

    def change(folder):
        path = sorted(folder.glob("part-*"))[1]
        file = TensorFile(path, "gramtower-part", 2)
        found = {name: file.read(name).clone() for name in file.shapes}
        found |= {name: make(found.get(name)) for name, make in tensors.items()}
        _tensors.write(path, "gramtower-part", 2, file.header, found)

    return change


def flip(folder, name):
    path = sorted(folder.glob(name))[-1]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def swap(folder):
    one, two = sorted(folder.glob("part-*"))[:2]
    other = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(other)


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (lambda folder: next(folder.glob("part-00001-*")).unlink(), "missing or damaged"),
        (lambda folder: (folder / "manifest.json").write_text("{}"), "gramtower-partition version 2"),
        (lambda folder: (folder / "manifest.json").write_text("[" * 9999), "is not a partition"),
        (lambda folder: (folder / "manifest.json").write_text("7"), "gramtower-partition version 2"),
        (lambda folder: (folder / "manifest.json").unlink(), "is not a partition"),
        (lambda folder: flip(folder, "part-*"), "does not match its checksum"),
        (lambda folder: flip(folder, "manifest.json"), "missing or damaged|not a partition"),
        (swap, "the header of another file"),
        (changed(pairs="many"), "pairs"),
        (changed(pairs=3), "pairs in the parts"),
        (changed(shape=[10**9, 12]), "parts"),
        (changed(shape=[2**40, 1]), "shape"),
        (changed(parts=[]), "parts"),
        (changed(parts=lambda parts: [{**parts[0], "file": "../secret.safetensors"}, *parts[1:]]), "a file"),
        (changed(parts=lambda parts: [{**parts[0], "file": "/etc/passwd"}, *parts[1:]]), "a file"),
        (changed(parts=lambda parts: [{**parts[0], "rows": [0, 10**6]}, *parts[1:]]), "rows"),
        (changed(parts=lambda parts: [5, *parts[1:]]), "parts"),
        (changed(weights=lambda there: not there), "tensors"),
        (rewritten(offsets=lambda t: t.flip(0)), "columns"),
        (rewritten(columns=lambda t: t + 10**6), "columns such as"),
        (rewritten(columns=lambda t: t.double()), "tensors"),
        (rewritten(labels=lambda t: t * float("nan")), "labels"),
        (rewritten(labels=lambda t: t[:-1]), "labels"),
        (rewritten(left_offsets=lambda t: t * 2), "left_offsets"),
        (rewritten(left_offsets=lambda t: t[:-1]), "left_offsets"),
        (rewritten(further=lambda _: torch.ones(2)), "further"),
    ],
)
def test_a_damaged_partition_is_refused(spoil, match, tmp_path):
    write_partition(shared_fits.interactions(), tmp_path, 3)
    spoil(tmp_path)
    with pytest.raises(ValueError, match=rf"folder.*{match}"):
        read_part(tmp_path)


def test_damaged_right_ids_are_refused(tmp_path):
    write_partition(shared_fits.interactions(), tmp_path, 3)
    part = read_part(tmp_path)
    flip(tmp_path, "right-*")
    with pytest.raises(ValueError, match=rf"folder.*{tmp_path}.*damaged"):
        part.right_ids()


@pytest.mark.parametrize("name", ["thesis.tex", "manifest.json"])
def test_a_partition_is_not_written_over_other_files(name, tmp_path):
    (tmp_path / name).write_text('{"name": "web"}')
    with pytest.raises(ValueError, match="other files"):
        write_partition(shared_fits.interactions(), tmp_path, 3)
    assert (tmp_path / name).read_text() == '{"name": "web"}'


@pytest.mark.parametrize("earlier", [True, False])
def test_a_partition_that_was_killed_can_be_written_again(earlier, tmp_path, monkeypatch):
    pairs = shared_fits.interactions()
    if earlier:
        write_partition(pairs, tmp_path, 2)

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("gramtower.distributed.partition.write_text", killed)
    with pytest.raises(KeyboardInterrupt):
        write_partition(pairs, tmp_path, 3)
    monkeypatch.undo()
    if earlier:
        assert (read_part(tmp_path).matrix != pairs.matrix).nnz == 0  # the old one is whole
    write_partition(pairs, tmp_path, 4)
    assert (read_part(tmp_path).matrix != pairs.matrix).nnz == 0
    assert len(list(tmp_path.iterdir())) == 6  # four parts, right ids and the manifest: nothing of the others


def test_fit_learns_from_a_partition_what_it_learns_from_the_file(tmp_path, capsys):
    pytest.importorskip("cyclopts", reason="the command line needs cyclopts")
    pytest.importorskip("polars", reason="the command line reads tables with polars")
    from gramtower.cli.program import run

    pairs = shared_fits.interactions()
    coo = pairs.matrix.tocoo()
    lines = [f"{pairs.left_ids[i]},{pairs.right_ids[j]}" for i, j in zip(coo.row, coo.col, strict=True)]
    file, parts = tmp_path / "pairs.csv", str(tmp_path / "parts")
    file.write_text("\n".join(["user,item", *lines]) + "\n")
    read = [str(file), "--left", "user", "--right", "item", "--validation", "0.2"]
    small = ["--dim", "4", "--hidden", "8", "--device", "cpu", "--quiet", "--max-iterations", "3", "--out"]
    assert run(["partition", *read, "--parts", "3", "--out", parts, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["parts"] == 3
    assert facts["pairs"] + facts["validation_pairs"] == len(pairs)
    assert run(["fit", *read, *small, str(tmp_path / "one")]) == 0
    assert run(["fit", parts, *small, str(tmp_path / "two")]) == 0
    one, two = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("one", "two"))
    for key in ("objective", "metric_value", "pairs", "validation_pairs", "left", "right"):
        assert one[key] == two[key], key
    capsys.readouterr()
    assert run(["info", parts, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "partition"
    assert run(["fit", parts, "--validation", "0.1", *small, str(tmp_path / "three")]) == 2
    assert "gramtower partition chooses held-out pairs" in capsys.readouterr().err
    assert run(["compare", parts, "--out", str(tmp_path / "four")]) == 2
    assert "only fit and info read such a folder" in capsys.readouterr().err
