"""Pieces of rows become the matrix that merging.merge makes of all of them, whatever the pieces and threads."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from gramtower.data import grouping
from gramtower.data.grouping import Piece, group
from gramtower.data.matrices import RULES, ordered_merge


def rows_of(total, shape, seed=0):
    rng = np.random.default_rng(seed)
    left = (shape[0] * rng.random(total) ** 2).astype(np.int32)
    right = (shape[1] * rng.random(total) ** 3).astype(np.int32)
    numbers = {
        "value": rng.integers(-4, 5, total).astype(np.float64),
        "weight": rng.integers(1, 9, total) / 4,
        "time": rng.integers(0, 20, total).astype(np.float64),
    }
    return left, right, numbers


def in_pieces(left, right, numbers, cuts):
    bounds = [0, *cuts, len(left)]
    spans = [slice(a, b) for a, b in itertools.pairwise(bounds)]
    return [Piece(left[s].copy(), right[s].copy(), {k: v[s] for k, v in numbers.items()}) for s in spans]


def same(one, other):
    (a, *rest), (b, *others) = one, other
    assert a.shape == b.shape
    for name in ("indptr", "indices", "data"):
        x, y = getattr(a, name), getattr(b, name)
        assert x.dtype == y.dtype
        assert np.array_equal(x, y)
    for x, y in zip(rest, others, strict=True):
        assert (x is None) == (y is None)
        assert x is None or (np.array_equal(x, y) and np.asarray(x).dtype == np.asarray(y).dtype)


@pytest.mark.parametrize("names", [(), ("value",), ("value", "weight", "time"), ("weight",)])
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "error"])
def test_pieces_become_what_one_sort_of_all_rows_makes(rule, names):
    shape = (900, 40)
    left, right, numbers = rows_of(20_000, shape)
    given = [numbers.get(name) if name in names else None for name in ("value", "weight", "time")]
    expected = ordered_merge(left, right, shape, *given, rule)
    assert expected[3] > 1000  # there is something to merge
    chosen = {name: numbers[name] for name in names}
    same(group(in_pieces(left, right, chosen, [1, 1, 7000, 13_001]), shape, rule), expected)


@pytest.mark.parametrize("threads", [1, 3])
def test_the_number_of_threads_changes_nothing(threads):
    shape, before = (5000, 300), torch.get_num_threads()
    left, right, numbers = rows_of(50_000, shape, seed=1)
    expected = ordered_merge(left, right, shape, *numbers.values(), "sum")
    torch.set_num_threads(threads)
    try:
        same(group(in_pieces(left, right, numbers, range(5000, 50_000, 5000)), shape, "sum"), expected)
    finally:
        torch.set_num_threads(before)


def test_marks_are_renumbered_on_the_way():
    shape = (60, 50)
    left, right, _ = rows_of(3000, shape, seed=2)
    rng = np.random.default_rng(3)
    marks = rng.permutation(100)[:60].astype(np.int32), rng.permutation(70)[:50].astype(np.int32)
    numbers = np.full(100, -1, np.int32), np.full(70, -1, np.int32)
    for mark, number in zip(marks, numbers, strict=True):
        number[mark] = np.arange(len(mark))
    pieces = in_pieces(marks[0][left], marks[1][right], {}, [1000])
    same(group(pieces, shape, "max", numbers), ordered_merge(left, right, shape, None, None, None, "max"))
    assert pieces == []


def test_repeated_pairs_are_refused_with_the_first_of_them():
    left, right = np.array([2, 0, 2, 1], np.int32), np.array([1, 0, 1, 1], np.int32)
    for numbers in ({}, {"value": np.ones(4)}):
        with pytest.raises(ValueError, match=r"duplicates.*1.*\(2, 1\)"):
            group([Piece(left, right, numbers)], (3, 2), "error")


def test_rows_without_entries_and_one_bucket_or_many_are_the_same(monkeypatch):
    left, right = np.array([7, 7, 0], np.int32), np.array([3, 1, 2], np.int32)
    expected = ordered_merge(left, right, (9, 5), None, None, None, "max")
    for buckets in (1, 2, 256):
        monkeypatch.setattr(grouping, "_BUCKETS", buckets)
        same(group([Piece(left, right, {})], (9, 5), "max"), expected)


MEASURE = """
import re
import numpy as np
import torch
from gramtower.data.grouping import Piece, group
from gramtower._util import host

torch.set_num_threads(2)

def resident(name):
    return int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

def piece(rng, rows):
    made = Piece(host.own_pages(rows, np.int32), host.own_pages(rows, np.int32), {})
    made.left[:], made.right[:] = rng.integers(200_000, size=rows), rng.integers(50_000, size=rows)
    return made

rng = np.random.default_rng(0)
group([piece(rng, 1000)], (200_000, 50_000), "max")
host.return_memory()
before = resident("VmRSS")
pieces = [piece(rng, 1 << 17) for _ in range(32)]
host.return_memory()
open("/proc/self/clear_refs", "w").write("5")
matrix = group(pieces, (200_000, 50_000), "max")[0]
print((resident("VmHWM") - before) / (matrix.data.nbytes + matrix.indices.nbytes + matrix.indptr.nbytes))
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="peaks of memory are measured on Linux")
def test_pieces_become_the_result_nearly_in_place():
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True)
    assert 1 <= float(done.stdout) < 1.5  # pieces and result side by side would be 2
