"""Digests of rows and of sparse entries: the same for any number of threads, and however rows are cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gramtower.distributed import group
from gramtower.distributed.group import SINGLE, Digest
from gramtower.training import checkpoint
from gramtower.training.checkpoint import sparse_digest

WIDTH = 50


def entries(rows=300, seed=0):
    rng = np.random.default_rng(seed)
    keys = np.unique(rng.integers(rows * WIDTH, size=4000))
    row, column = np.divmod(keys, WIDTH)
    offsets = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=rows))])
    return offsets, column.astype(np.int32), rng.standard_normal(len(keys)).astype(np.float32), keys


def by_hand(keys, values):
    """Python's integers, one entry after the other."""
    most, sums = 2**64, [0, 0]

    def mix(x):
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % most
        x = (x ^ x >> 27) * 0x94D049BB133111EB % most
        return ((x ^ x >> 31) + 0x9E3779B97F4A7C15) % most

    for key, bits in zip(keys.tolist(), values.astype(np.float64).view(np.uint64).tolist(), strict=True):
        mixed = mix((key + mix(bits)) % most)
        sums = [(sums[0] + mixed) % most, (sums[1] + mix(mixed)) % most]
    return "".join(f"{x:016x}" for x in sums)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("many", [1, 1 << 30], ids=["compiled", "numpy"])
def test_sparse_rows_have_the_digest_of_their_entries(many, threads, monkeypatch):
    monkeypatch.setattr(checkpoint, "_MANY", many)
    monkeypatch.setattr(group, "_CHUNK", 700)
    offsets, columns, values, keys = entries()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = sparse_digest(offsets, columns, values, 7, WIDTH).text(SINGLE)
        assert found == by_hand(keys + 7 * WIDTH, values)
        assert found == Digest().add(keys + 7 * WIDTH, values).text(SINGLE)
        cut = 111
        parts = [
            sparse_digest(offsets[:cut], columns[: offsets[cut - 1]], values[: offsets[cut - 1]], 7, WIDTH),
            sparse_digest(
                offsets[cut - 1 :] - offsets[cut - 1], columns[offsets[cut - 1] :], values[offsets[cut - 1] :],
                7 + cut - 1, WIDTH,
            ),
        ]  # fmt: skip
        assert parts[0].add_sums(parts[1]._sums).text(SINGLE) == found
    finally:
        torch.set_num_threads(before)


def test_arrays_are_entries_numbered_from_their_first_row():
    values = np.random.default_rng(1).standard_normal((30, 4)).astype(np.float32)
    expected = by_hand(np.arange(120) + 20, values.reshape(-1))
    assert Digest().add_rows(values, 5).text(SINGLE) == expected
    assert Digest().add_rows(values[:11], 5).add_rows(values[11:], 16).text(SINGLE) == expected
    assert Digest().add_rows(np.asfortranarray(values), 5).text(SINGLE) == expected
    assert Digest().add_rows(None, 5).text(SINGLE) == "0" * 32


def test_an_entry_that_changes_changes_the_digest(monkeypatch):
    monkeypatch.setattr(checkpoint, "_MANY", 1)
    offsets, columns, values, _ = entries()
    found = {sparse_digest(offsets, columns, values, 0, WIDTH).text(SINGLE)}
    for change in range(20):
        other = values.copy()
        other[change * 100] += 1e-6
        found.add(sparse_digest(offsets, columns, other, 0, WIDTH).text(SINGLE))
    assert len(found) == 21
