"""Ids as tensors: whole numbers as they are, text as one block of UTF-8 with offsets. Nothing is pickled.

A hundred thousand ids load in milliseconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gramtower._util import checks as check
from gramtower.data.ids import as_objects, id_array


def pack_ids(ids: NDArray[Any] | None) -> dict[str, Tensor]:
    """Ids as ``numbers``, or as ``text`` and ``offsets``; nothing for entities known by row number."""
    if ids is None:
        return {}
    ids, _ = id_array("ids", ids)
    if ids.dtype != object:
        return {"numbers": torch.from_numpy(ids.copy())}
    encoded = [key.encode() for key in ids.tolist()]
    offsets = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
    text = np.frombuffer(bytearray(b"".join(encoded)), dtype=np.uint8)
    return {"text": torch.from_numpy(text), "offsets": torch.from_numpy(offsets)}


def unpack_ids(tensors: Mapping[str, Tensor], prefix: str = "") -> NDArray[Any] | None:
    """Ids from tensors under the names of pack_ids with a prefix; None if there are none.

    Raises:
        ValueError: if the tensors are not what pack_ids makes of distinct ids.
    """
    found = {name: tensors[prefix + name] for name in ("numbers", "text", "offsets") if prefix + name in tensors}
    if not found:
        return None
    if set(found) not in ({"numbers"}, {"text", "offsets"}):
        check.fail("ids", f"tensors {', '.join(prefix + name for name in found)}", "numbers, or text and offsets")
    kinds = {"numbers": torch.int64, "text": torch.uint8, "offsets": torch.int64}
    for name, tensor in found.items():
        if tensor.dtype != kinds[name] or tensor.dim() != 1:
            given = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
            check.fail(f"ids: {prefix}{name}", given, f"{kinds[name]} of one dimension")
    ids = found["numbers"].numpy() if "numbers" in found else _texts(prefix, found["text"], found["offsets"])
    distinct = len(np.unique(ids)) if ids.dtype != object else len(set(ids.tolist()))
    if distinct < len(ids):
        check.fail("ids", f"{len(ids) - distinct} repeated ids", "distinct ids")
    return ids


def _texts(prefix: str, text: Tensor, offsets: Tensor) -> NDArray[Any]:
    bounds = offsets.numpy()
    if not len(bounds) or bounds[0] != 0 or bounds[-1] != len(text) or (bounds[1:] < bounds[:-1]).any():
        check.fail(f"ids: {prefix}offsets", f"{len(bounds)} offsets", f"offsets that rise from 0 to {len(text)}")
    data = text.numpy().tobytes()
    if data.isascii():  # one decoding for all: every byte is a character
        letters = data.decode()
        return as_objects([letters[a:b] for a, b in itertools.pairwise(bounds.tolist())])
    try:
        return as_objects([data[a:b].decode() for a, b in itertools.pairwise(bounds.tolist())])
    except UnicodeDecodeError as error:
        check.fail(f"ids: {prefix}text", f"bytes that are not UTF-8 ({error.reason})", "ids in UTF-8")
