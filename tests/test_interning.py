"""Ids in pieces, from several threads: numbered in order of first appearance, whoever comes first."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest

from gramtower.data import interning
from gramtower.data.interning import Table, first_rows


def add(table, ids, place=0, turn=0):
    places = np.arange(place, place + len(ids))
    if not table.text:
        return table.add_numbers(np.array(ids, np.int64), places, turn)
    encoded = [text.encode() for text in ids]
    data = np.frombuffer(b"".join(encoded), np.uint8)
    return table.add_texts(data, np.array([len(text) for text in encoded], np.uint32), places, turn)


IDS = {
    True: ["", "a", "a\0", "ab", "é", "日本", *(f"user-{k}" for k in range(20_000))],
    False: [0, -1, 2**63 - 1, -(2**63), *(k * 2**40 for k in range(1, 20_000))],
}


@pytest.mark.parametrize("text", [True, False])
def test_ids_are_numbered_in_order_of_appearance_whatever_the_order_of_pieces(text):
    ids, rng = IDS[text], np.random.default_rng(0)
    rows = [ids[k] for k in rng.integers(len(ids), size=50_000)]
    expected = list(dict.fromkeys(rows))
    cuts = [0, 10, 20_000, 35_000, 50_000]
    for order in ([0, 1, 2, 3], [3, 1, 2, 0]):
        table, marks = Table(text), np.empty(50_000, np.int32)
        for piece in order:
            a, b = cuts[piece], cuts[piece + 1]
            marks[a:b] = add(table, rows[a:b], a, turn=piece)
        numbers = table.finish()
        names = table.names(numbers)
        assert names.dtype == (object if text else np.int64)
        assert names.tolist() == expected
        assert [expected[k] for k in numbers[marks]] == rows


def test_threads_that_add_at_once_lose_nothing():
    table, parts = Table(True), [[f"{k % 3000}:{k % 7}" for k in range(t, 30_000, 2)] for t in range(6)]
    found = [None] * len(parts)

    def work(t):
        found[t] = add(table, parts[t], t << 40, turn=3 * t)

    threads = [threading.Thread(target=work, args=(t,)) for t in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    numbers = table.finish()
    names = table.names(numbers)
    assert names.tolist() == list(dict.fromkeys(itertools.chain(*parts)))
    for marks, part in zip(found, parts, strict=True):
        assert names[numbers[marks]].tolist() == part


@pytest.mark.parametrize("text", [True, False])
def test_ids_with_one_hash_stay_apart(text, monkeypatch):
    def constant(*arguments):
        arguments[-1][:] = 5

    monkeypatch.setattr(interning, "_hash_texts", constant)
    monkeypatch.setattr(interning, "_hash_numbers", constant)
    ids, table = IDS[text][:400], Table(text)
    marks = add(table, ids + ids[::-1])
    numbers = table.finish()
    assert table.names(numbers).tolist() == ids
    assert numbers[marks].tolist() == [*range(400), *reversed(range(400))]


def test_what_has_no_place_is_passed_over():
    codes, kept = np.array([2, 0, 1, 0, 2]), np.array([False, False, True, True, False])
    places = first_rows(codes, kept, 4, base=100)
    assert places.tolist() == [103, 102, -1, -1]
    table = Table(True)
    marks = table.add_texts(np.frombuffer(b"abcd", np.uint8), np.ones(4, np.uint32), places)
    assert (marks >= 0).tolist() == [True, True, False, False]
    assert table.names(table.finish()).tolist() == ["b", "a"]
