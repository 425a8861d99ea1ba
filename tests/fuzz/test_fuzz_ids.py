"""Columns of ids of many types, chunkings and missing values, against plain dictionaries."""

from __future__ import annotations

import itertools
import random
import uuid
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from harness import Fuzz, mutated

from gramtower.data.ids import as_objects, index_of, join, pack_ids, rows_of, unpack_ids
from gramtower.data.interactions import Interactions

pl = pytest.importorskip("polars", reason="reading tables needs polars")

WORDS = ["", "a", "A", "007", "7", "-7", " 7", "7.0", "é", "日本", "\0", "nan", "None", "x" * 300, '"', "a,b", "\n"]
CELLS = {
    "text": lambda rng: rng.choice([*WORDS, str(rng.randrange(40))]),
    "small": lambda rng: rng.randrange(-5, 20),
    "large": lambda rng: rng.choice([-(2**63), 2**63 - 1, 0, rng.getrandbits(62), -rng.getrandbits(50)]),
    "huge": lambda rng: rng.choice([2**63, 2**64 - 1, 1]),
    "whole floats": lambda rng: float(rng.randrange(-5, 20)),
    "floats": lambda rng: rng.choice([1.5, 2.0**60, float("inf"), 3.0]),
    "truth": lambda rng: rng.random() < 0.5,
    "uuid": lambda rng: uuid.UUID(int=rng.randrange(9)),
    "bytes": lambda rng: rng.choice([b"a", b""]),
    "lists": lambda rng: [rng.randrange(3)],
    "surrogates": lambda rng: rng.choice(["\ud800", "a"]),
}


def cells_of(rng: random.Random, count: int) -> list[Any]:
    kinds = rng.choices(list(CELLS), [5, 5, 4, 1, 3, 1, 1, 2, 1, 1, 1], k=rng.choice([1, 1, 1, 1, 2]))
    gaps = rng.choice([0, 0, 0.1, 0.9])
    gone = [None, float("nan")] if not set(kinds) <= {"small", "large"} or rng.random() < 0.3 else [None]
    return [rng.choice(gone) if rng.random() < gaps else CELLS[rng.choice(kinds)](rng) for _ in range(count)]


def missing(cell: Any) -> bool:
    return cell is None or cell != cell


def expected(cells: list[Any]) -> list[Any] | None:
    """The ids by the rules, None where one is missing; None if the column is refused."""
    there = [cell for cell in cells if not missing(cell)]
    for cell in there:
        if isinstance(cell, (bool, bytes, list)) or (isinstance(cell, str) and "\ud800" in cell):
            return None
        if isinstance(cell, float) and not (cell.is_integer() and abs(cell) <= 2**53):
            return None
    text = any(isinstance(cell, (str, uuid.UUID)) for cell in there)
    whole = [int(cell) if isinstance(cell, float) else cell for cell in there]
    if not text and not all(-(2**63) <= cell < 2**63 for cell in whole):
        return None
    found = iter([str(cell) if text else cell for cell in whole])
    return [None if missing(cell) else next(found) for cell in cells]


def as_frame(rng: random.Random, left: list[Any], right: list[Any]) -> Any:
    """The cells as a mapping, or as a polars frame of several chunks where polars has a type for them."""
    given = {"u": left, "i": right}
    if rng.random() < 0.5 or any(len({type(x) for x in cells if x is not None}) > 1 for cells in (left, right)):
        return given
    try:
        whole = pl.DataFrame(given, strict=False)
    except (TypeError, ValueError, OverflowError, pl.exceptions.PolarsError):
        return given
    if not len(whole) or any(kind == pl.Object for kind in whole.dtypes):
        return whole
    cuts = sorted({0, len(whole), *(rng.randrange(len(whole) + 1) for _ in range(rng.randrange(4)))})
    return pl.concat([whole[a:b] for a, b in itertools.pairwise(cuts)], rechunk=False)


def test_ids_of_any_column_follow_the_rules():
    fuzz = Fuzz("ids", small=300)
    for rng in fuzz:
        count = rng.choice([1, 2, 5, 30, 200])
        left, right = cells_of(rng, count), cells_of(rng, count)
        wanted = expected(left), expected(right)
        frame = as_frame(rng, left, right)
        arrays = [
            np.array(x) if rng.random() < 0.2 and {*map(type, x)} in ({int}, {float}) else x for x in (left, right)
        ]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = [
                fuzz.attempt((left, right), lambda f=frame: Interactions.from_frame(f, "u", "i"), (ValueError,)),
                fuzz.attempt((left, right), lambda a=arrays: Interactions.from_arrays(*a), (ValueError,)),
            ]
        rows = [] if None in wanted else [p for p in zip(*wanted, strict=True) if None not in p]
        for pairs in found:
            assert (pairs is None) == (not rows), (left, right, wanted, pairs)
            if pairs is None:
                continue
            assert pairs.left_ids.tolist() == list(dict.fromkeys(a for a, _ in rows)), (left, right)
            assert pairs.right_ids.tolist() == list(dict.fromkeys(b for _, b in rows)), (left, right)
            coo = pairs.matrix.tocoo()
            seen = zip(pairs.left_ids[coo.row].tolist(), pairs.right_ids[coo.col].tolist(), strict=True)
            assert sorted(seen, key=repr) == sorted(set(rows), key=repr)
            for ids in (pairs.left_ids, pairs.right_ids):
                again = unpack_ids(pack_ids(ids))
                assert (again.tolist(), again.dtype) == (ids.tolist(), ids.dtype)
                assert rows_of("ids", ids, index_of(again)).tolist() == list(range(len(ids)))
                assert join(as_objects([str(x) for x in ids.tolist()]), index_of(ids)).tolist() == list(range(len(ids)))


def test_broken_packings_are_refused_or_are_ids():
    fuzz = Fuzz("packing", small=300)
    for rng in fuzz:
        count = rng.randrange(6)
        ids = np.arange(count) if rng.random() < 0.2 else as_objects(rng.sample(WORDS, count))
        packed = pack_ids(ids)
        name = rng.choice(list(packed))
        data = mutated(packed[name].numpy().tobytes(), rng, 2)
        kind = packed[name].numpy().dtype
        packed[name] = torch.from_numpy(np.frombuffer(data[: len(data) // kind.itemsize * kind.itemsize], kind).copy())
        found = fuzz.attempt(data, lambda p=packed: unpack_ids(p), (ValueError,))
        if found is not None:
            assert len(set(found.tolist())) == len(found)
            assert {k: v.tolist() for k, v in pack_ids(found).items()} == {k: v.tolist() for k, v in packed.items()}
