"""Ids that come in pieces, from several threads and in any order, as numbers 0, 1, … in order of first appearance.

A table of ids is cut into shards by their hash. Each is an open-addressing hash table with a lock of its own, so that
threads seldom meet, and its ids get the numbers 0, 1, … of the shard: local · SHARDS + shard is an id's *mark*, which
depends on who came first. Every id also keeps the smallest *place* it was seen at, and a place says which row of the
whole input it was. :meth:`Table.finish` ranks ids by place: the order of first appearance.

Whole numbers are compared as they are and need no text. Memory for each id: 12 bytes for each slot of tables between a
third and two thirds full, 8 for its place, and 8 for a whole number, or its UTF-8 and 8. Cost: O(ids given).
"""

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Iterator
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from gramtower._util import host
from gramtower._util.compiled import compiled
from gramtower.data.ids import Ids, Key, as_objects

Kind = TypeVar("Kind", bound=np.generic)
SHARDS = 16
_BITS = 4  # of a hash say which shard
_LEAST = 1 << 10  # slots
_AHEAD = 32  # texts whose places are looked up at a time
_NEVER = np.iinfo(np.int64).max


class _Shard:
    """One hash table: ids, the smallest place of each, and their text if they are text."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0
        self.hashes = np.zeros(_LEAST, np.uint64)
        self.slots = np.full(_LEAST, -1, np.int32)
        self.places = np.empty(0, np.int64)
        self.keys = np.empty(0, np.int64)  # whole numbers, or where each text ends
        self.text = np.empty(0, np.uint8)
        self.used = 0  # bytes of text

    def reserve(self, more: int, size: int) -> None:
        """Room for more ids, and so many more bytes of text."""
        wanted = self.count + more
        if 3 * wanted > 2 * len(self.slots):
            slots = len(self.slots)
            while 3 * wanted > 2 * slots:
                slots *= 2
            hashes, found = host.own_pages(slots, np.uint64), host.own_pages(slots, np.int32)
            found[:] = -1
            _rehash(self.hashes, self.slots, hashes, found)
            self.hashes, self.slots = hashes, found
        if wanted > len(self.places):
            self.places, self.keys = _grown(self.places, wanted), _grown(self.keys, wanted)
        if self.used + size > len(self.text):
            self.text = _grown(self.text, self.used + size)

    def texts(self) -> list[str]:
        """The ids of the shard as text, by number."""
        data, ends = self.text[: self.used].tobytes(), [0, *self.keys[: self.count].tolist()]
        return [data[a:b].decode() for a, b in itertools.pairwise(ends)]


class Table:
    """The ids of one side; text, or whole numbers."""

    def __init__(self, text: bool, seed: int | None = None) -> None:
        self.text = text
        # a random one, so that no input can be made to share a slot; numbers do not depend on it
        self._seed = np.uint64(secrets.randbits(64) if seed is None else seed)
        self._shards = [_Shard() for _ in range(SHARDS)]

    def __len__(self) -> int:
        return sum(shard.count for shard in self._shards)

    def add_texts(
        self, data: NDArray[np.uint8], lengths: NDArray[np.int64], places: NDArray[np.int64], turn: int = 0
    ) -> NDArray[np.int32]:
        """The marks of texts, new ones included."""
        bounds = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        hashes = np.empty(len(lengths), np.uint64)
        _hash_texts(data, bounds, self._seed, hashes)
        marks: NDArray[np.int32] = np.full(len(lengths), -1, np.int32)
        for number, shard, mine in self._turns(hashes, places, turn):
            with shard.lock:
                shard.reserve(len(mine), int((bounds[mine + 1] - bounds[mine]).sum()))
                shard.count, shard.used = _add_texts(
                    mine, hashes, data, bounds, places, shard.hashes, shard.slots, shard.places, shard.keys,
                    shard.text, shard.count, shard.used, number, marks,
                )  # fmt: skip
        return marks

    def add_numbers(self, values: NDArray[np.int64], places: NDArray[np.int64], turn: int = 0) -> NDArray[np.int32]:
        """The marks of whole numbers; the arguments are those of :meth:`add_texts`."""
        hashes = np.empty(len(values), np.uint64)
        _hash_numbers(values, self._seed, hashes)
        marks: NDArray[np.int32] = np.full(len(values), -1, np.int32)
        for number, shard, mine in self._turns(hashes, places, turn):
            with shard.lock:
                at = 0
                while at < len(mine):  # few of the rows of a piece are new ids, so that no room is made for all
                    shard.reserve(min(len(mine) - at, max(_LEAST, shard.count // 8)), 0)
                    shard.count, at = _add_numbers(
                        mine, at, hashes, values, places, shard.hashes, shard.slots, shard.places, shard.keys,
                        shard.count, number, marks,
                    )  # fmt: skip
        return marks

    def _turns(
        self, hashes: NDArray[np.uint64], places: NDArray[np.int64], turn: int
    ) -> Iterator[tuple[int, _Shard, NDArray[np.int64]]]:
        """Yield each shard with the positions of its ids; threads begin with different ones."""
        order, starts = np.empty(len(hashes), np.int64), np.zeros(SHARDS + 1, np.int64)
        _sort_by_shard(hashes, places, order, starts)
        for step in range(turn, turn + SHARDS):
            number = step % SHARDS
            yield number, self._shards[number], order[starts[number] : starts[number + 1]]

    def counts(self) -> NDArray[np.int64]:
        """The number of ids in each shard."""
        return np.array([shard.count for shard in self._shards])

    def places(self) -> NDArray[np.int64]:
        """The smallest place of each mark's id; 0 for marks of no id."""
        places = np.zeros(int(self.counts().max()) * SHARDS, np.int64)
        for number, shard in enumerate(self._shards):
            places[number : shard.count * SHARDS : SHARDS] = shard.places[: shard.count]
        return places

    def hashes(self) -> Iterator[tuple[NDArray[np.uint64], NDArray[np.int32]]]:
        """Yield the hashes and marks of the ids of each shard; equal ids of tables with one seed have one hash."""
        for number, shard in enumerate(self._shards):
            used = np.flatnonzero(shard.slots >= 0)
            yield shard.hashes[used], shard.slots[used] * np.int32(SHARDS) + np.int32(number)

    def key(self, mark: int) -> Key:
        """The id of a mark."""
        shard, local = self._shards[mark % SHARDS], mark // SHARDS
        start, end = int(shard.keys[local - 1]) if local else 0, int(shard.keys[local])
        return shard.text[start:end].tobytes().decode() if self.text else end

    def finish(self) -> NDArray[np.int32]:
        """For each mark the number of its id in order of first appearance; frees the slots."""
        longest = max(shard.count for shard in self._shards)
        places: NDArray[np.int64] = np.full(longest * SHARDS, _NEVER)
        for number, shard in enumerate(self._shards):
            shard.hashes, shard.slots = np.empty(0, np.uint64), np.empty(0, np.int32)
            places[number : shard.count * SHARDS : SHARDS] = shard.places[: shard.count]
            shard.places = np.empty(0, np.int64)
        marks = np.argsort(places)[: len(self)]  # no two ids have one place
        numbers: NDArray[np.int32] = np.full(len(places), -1, np.int32)
        numbers[marks] = np.arange(len(marks), dtype=np.int32)
        return numbers

    def names(self, numbers: NDArray[np.int32]) -> Ids:
        """The ids in order of first appearance, given what :meth:`finish` returned; empties the table."""
        names: Ids = np.empty(len(self), object if self.text else np.int64)
        for number, shard in enumerate(self._shards):
            rows = numbers[number : shard.count * SHARDS : SHARDS]
            names[rows] = as_objects(shard.texts()) if self.text else shard.keys[: shard.count]
            self._shards[number] = _Shard()
        return names


def _grown(array: NDArray[Kind], size: int) -> NDArray[Kind]:
    """The same numbers in an array of at least ``size``."""
    larger = host.own_pages(max(size, len(array) + len(array) // 4), array.dtype)
    larger[: len(array)] = array
    return larger


@compiled(nogil=True)
def first_rows(codes, kept, distinct, base):  # type: ignore[no-untyped-def]  # pragma: no cover
    """base + the first kept row of each code below ``distinct``; -1 for those without one."""
    rows = np.full(distinct, -1, np.int64)
    for row in range(len(codes)):
        if kept[row] and rows[codes[row]] < 0:
            rows[codes[row]] = base + row
    return rows


@compiled(nogil=True)
def _hash_texts(data, bounds, seed, hashes):  # type: ignore[no-untyped-def]  # pragma: no cover
    """FNV-1a, and the finishing steps of splitmix64."""
    for k in range(len(hashes)):
        h = np.uint64(0xCBF29CE484222325) ^ seed
        for b in range(bounds[k], bounds[k + 1]):
            h = (h ^ np.uint64(data[b])) * np.uint64(0x100000001B3)
        h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        hashes[k] = h ^ (h >> np.uint64(27))


@compiled(nogil=True)
def _hash_numbers(values, seed, hashes):  # type: ignore[no-untyped-def]  # pragma: no cover
    for k in range(len(hashes)):
        h = np.uint64(values[k]) ^ seed
        h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        hashes[k] = h ^ (h >> np.uint64(31))


@compiled(nogil=True)
def _sort_by_shard(hashes, places, order, starts):  # type: ignore[no-untyped-def]  # pragma: no cover
    """A counting sort of what has a place: order[starts[s] : starts[s + 1]] are those of shard s, in order."""
    mask = np.uint64(SHARDS - 1)
    for k in range(len(hashes)):
        if places[k] >= 0:
            starts[np.int64(hashes[k] & mask) + 1] += 1
    for s in range(SHARDS):
        starts[s + 1] += starts[s]
    at = starts.copy()
    for k in range(len(hashes)):
        if places[k] >= 0:
            shard = np.int64(hashes[k] & mask)
            order[at[shard]] = k
            at[shard] += 1


@compiled(nogil=True)
def _rehash(hashes, slots, new_hashes, new_slots):  # type: ignore[no-untyped-def]  # pragma: no cover
    mask = np.uint64(len(new_slots) - 1)
    for old in range(len(slots)):
        if slots[old] >= 0:
            s = np.int64((hashes[old] >> np.uint64(_BITS)) & mask)
            while new_slots[s] >= 0:
                s = np.int64(np.uint64(s + 1) & mask)
            new_hashes[s], new_slots[s] = hashes[old], slots[old]


@compiled(nogil=True)
def _touch(mine, given, hashes, slots, mask, found, first, ends, text, touched):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Read what the search for some texts will read, in loops whose reads do not wait for each other.

    The search itself waits for memory at every step, as it goes on from what it reads.
    """
    for q in range(len(mine)):
        s = np.int64((given[mine[q]] >> np.uint64(_BITS)) & mask)
        found[q] = slots[s] if hashes[s] == given[mine[q]] else -1
    total = 0
    for q in range(len(mine)):
        if found[q] >= 0:
            end = ends[found[q]]
            total += first[found[q]] + (text[end - 1] if end > 0 else 0)
    touched[0] = total  # without a result the reads would be left out


@compiled(nogil=True)
def _add_texts(mine, given, data, bounds, places, hashes, slots, first, ends, text, count, used, shard, marks):  # type: ignore[no-untyped-def]  # pragma: no cover
    """Find or enter texts; returns how many ids and bytes the shard has then."""
    mask, known_before, touched = np.uint64(len(slots) - 1), np.empty(_AHEAD, np.int32), np.zeros(1, np.int64)
    for p in range(len(mine)):
        if p % _AHEAD == 0:
            _touch(mine[p : p + _AHEAD], given, hashes, slots, mask, known_before, first, ends, text, touched)
        k = mine[p]
        h, begin, size = given[k], bounds[k], bounds[k + 1] - bounds[k]
        s = np.int64((h >> np.uint64(_BITS)) & mask)
        while True:
            known = slots[s]
            if known < 0:
                known = count
                slots[s], hashes[s], first[count] = count, h, places[k]
                for b in range(size):
                    text[used + b] = data[begin + b]
                used += size
                ends[count] = used
                count += 1
                break
            if hashes[s] == h:
                start = ends[known - 1] if known > 0 else 0
                if ends[known] - start == size:
                    same = True
                    for b in range(size):
                        if text[start + b] != data[begin + b]:
                            same = False
                            break
                    if same:
                        first[known] = min(first[known], places[k])
                        break
            s = np.int64(np.uint64(s + 1) & mask)
        marks[k] = known * SHARDS + shard
    return count, used


@compiled(nogil=True)
def _add_numbers(mine, at, given, values, places, hashes, slots, first, keys, count, shard, marks):  # type: ignore[no-untyped-def]  # pragma: no cover
    """The same for whole numbers, until there is no room for a new one; returns how many, and where it stopped."""
    mask = np.uint64(len(slots) - 1)
    for p in range(at, len(mine)):
        k = mine[p]
        h, value = given[k], values[k]
        s = np.int64((h >> np.uint64(_BITS)) & mask)
        while True:
            known = slots[s]
            if known < 0:
                if count == len(keys) or 3 * (count + 1) > 2 * len(slots):
                    return count, p
                known = count
                slots[s], hashes[s], first[count], keys[count] = count, h, places[k], value
                count += 1
                break
            if keys[known] == value:
                first[known] = min(first[known], places[k])
                break
            s = np.int64(np.uint64(s + 1) & mask)
        marks[k] = known * SHARDS + shard
    return count, len(mine)
