"""Folders of parts: what was written comes back, and the command line fits from them as from a file."""

from __future__ import annotations

import json

import numpy as np
import pytest
import shared_fits

from gramtower.data.partition import read_part, write_partition
from gramtower.data.splits import random_pairs


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
    assert len(manifest["parts"]) == 4
    sizes = [p["pairs"] + 200 * (p["rows"][1] - p["rows"][0]) for p in manifest["parts"]]
    assert max(sizes) - min(sizes) <= 2 * (200 + split.train.matrix.getnnz(1).max())


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (lambda folder: (folder / "part-00001.safetensors").unlink(), "missing or damaged"),
        (lambda folder: (folder / "manifest.json").write_text("{}"), "gramtower-partition version 1"),
        (lambda folder: (folder / "manifest.json").unlink(), "is not a partition"),
    ],
)
def test_a_damaged_partition_is_refused(spoil, match, tmp_path):
    write_partition(shared_fits.interactions(), tmp_path, 3)
    spoil(tmp_path)
    with pytest.raises(ValueError, match=match):
        read_part(tmp_path)


def test_a_partition_is_not_written_over_other_files(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match="which holds other files"):
        write_partition(shared_fits.interactions(), tmp_path, 3)


def test_fit_learns_from_a_partition_what_it_learns_from_the_file(tmp_path, capsys):
    pytest.importorskip("cyclopts", reason="the command line needs cyclopts")
    pytest.importorskip("polars", reason="the command line reads tables with polars")
    from gramtower.cli.app import run

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
