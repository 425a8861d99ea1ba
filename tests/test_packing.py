"""Ids as tensors: round trips, and what is not a packing of ids."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gramtower.data.ids import as_objects, pack_ids, unpack_ids


@pytest.mark.parametrize(
    "ids",
    [
        np.array([3, -1, 2**62]),
        np.empty(0, np.int64),
        as_objects(["a", "", "žluťoučký"]),
        as_objects([""]),
        as_objects([]),
    ],
)
def test_ids_come_back_as_they_were(ids):
    packed = {f"left_{name}": tensor for name, tensor in pack_ids(ids).items()}
    found = unpack_ids(packed, "left_")
    assert found.tolist() == ids.tolist()
    assert found.dtype == ids.dtype
    assert unpack_ids(packed) is None


def packed(text, offsets):
    return {"text": torch.tensor(list(text), dtype=torch.uint8), "offsets": torch.tensor(offsets)}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (packed(b"ab", [1, 2]), "offsets that rise from 0 to 2"),
        (packed(b"ab", [0, 2, 1, 2]), "rise"),
        (packed(b"ab", [0, 1]), "rise"),
        (packed(b"ab", [0, 2**62, -(2**62), 2]), "rise"),
        (packed(b"ab", [0, 1, 5692549928996306948, -6485183463413514234, 2]), "rise"),  # whose difference overflows
        (packed(b"ab", [0, 3]), "rise"),
        (packed(b"", np.empty(0, np.int64)), "rise"),
        (packed(b"\xff", [0, 1]), "not UTF-8"),
        (packed(b"aa", [0, 1, 2]), "1 repeated ids"),
        (packed(b"a", [[0, 1]]), "one dimension"),
        (packed(b"a", [0.0, 1.0]), "torch.int64"),
        ({"numbers": torch.tensor([1, 1])}, "1 repeated ids"),
        ({"numbers": torch.tensor([1.0])}, "torch.int64"),
        ({"text": torch.tensor([1], dtype=torch.uint8)}, "text and offsets"),
        ({"numbers": torch.tensor([1])} | packed(b"a", [0, 1]), "numbers, or text"),
    ],
)
def test_what_is_no_packing_of_ids_is_refused(tensors, message):
    with pytest.raises(ValueError, match=message):
        unpack_ids(tensors)
