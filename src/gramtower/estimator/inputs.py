"""What a tower sees of its entities: parts side by side, remembered so that new entities are described alike.

    "id"            a column for each entity of the training data; a new entity has none of them
    "history"       the observed right entities of a left one, equal values, length one
    a FeatureTable  its columns, joined by id; the encoding is kept, the rows are not
    a matrix        one row for each entity, in the order of the ids; columns of numbers beyond 10¹² are divided by a
                    power of two, the same for new entities

One part is handed to the tower as it is, ids as row numbers and dense rows dense; several become one sparse matrix.
Cost: O(entries). Checked by tests/test_inputs.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from gramtower import _checks as check
from gramtower._schema import build
from gramtower.data.lookup import index_of, join
from gramtower.data.matrices import checked
from gramtower.data.tables import FeatureTable
from gramtower.distributed.shards import Rows

Ids = tuple[NDArray[Any] | None, NDArray[Any] | None]  # of a side, and of the other one
_NAMES = ("id", "history")
_GIVEN = ("table", "sparse", "dense")  # parts that the caller describes new entities by
_LARGE = 1e12  # columns with larger numbers are divided: their squares would not add up in float32


@dataclass(frozen=True)
class Part:
    """Some columns: their kind (``id``, ``history``, ``table``, ``sparse``, ``dense``) and number.

    Attributes:
        table: how a table is encoded.
        exponents: columns of a matrix that are divided by a power of two → which.
    """

    kind: str
    width: int
    table: FeatureTable | None = None
    exponents: tuple[tuple[int, int], ...] = ()

    def scaled(self, matrix: Any) -> Any:
        """A matrix with its large columns divided; itself where there are none."""
        if not self.exponents:
            return matrix
        factors = np.ones(self.width)
        for column, exponent in self.exponents:
            factors[column] = 2.0**-exponent
        if sp.issparse(matrix):
            return sp.csr_matrix(sp.csr_matrix(matrix, dtype=np.float64) @ sp.diags(factors))
        return check.as_float_array("features", matrix).astype(np.float64) * factors


@dataclass(frozen=True)
class _Form:
    """A part as it is stored."""

    kind: str
    width: int
    table: dict[str, Any] | None = None
    exponents: list[list[int]] | None = None


@dataclass(frozen=True)
class Inputs:
    """The parts of one side's features, in the order of their columns."""

    parts: tuple[Part, ...]

    @property
    def kind(self) -> str:
        """The kinds of the parts, such as ``"id + history"``."""
        return " + ".join(part.kind for part in self.parts)

    @property
    def width(self) -> int:
        """Number of features."""
        return sum(part.width for part in self.parts)

    @property
    def has_history(self) -> bool:
        """Whether entities are described by their history."""
        return any(part.kind == "history" for part in self.parts)

    def placeholder(self, rows: int) -> Any:
        """Features without entries, to build towers with; None for ids."""
        if self.kind == "id":
            return None
        return np.zeros((rows, self.width), np.float32) if self.kind == "dense" else sp.csr_matrix((rows, self.width))

    def new(self, side: str, features: Any, history: sp.csr_matrix | None) -> Any:
        """Features of entities that were not there in training, one row for each.

        Args:
            side: "left" or "right", for errors.
            features: rows for the part that is a table or a matrix; a sequence if there are several. Without them a
                table's columns count as missing.
            history: their observed right entities; without it nothing was observed.
        """
        wanted = [part for part in self.parts if part.kind in _GIVEN]
        if history is not None and not self.has_history:
            check.fail("histories", "lists of ids", 'a model fitted with left_features="history"')
        if features is not None and not wanted:
            known = "histories" if self.has_history else "ids"
            expected = f"a model fitted with {side}_features; this one knows {side} {known} only"
            check.fail(f"{side}_features", "features", expected)
        several = len(wanted) > 1 and features is not None
        if several and (not isinstance(features, (list, tuple)) or len(features) != len(wanted)):
            kinds = ", ".join(part.kind for part in wanted)
            check.fail(f"{side}_features", type(features).__name__, f"a list of {len(wanted)}: {kinds}")
        given = list(features) if several else [features] * len(wanted)
        encoded = [_new_part(side, part, rows) for part, rows in zip(wanted, given, strict=True)]
        counts = {matrix.shape[0] for matrix in (*encoded, history) if matrix is not None}
        if len(counts) != 1:
            given_rows = " and ".join(map(str, sorted(counts)))
            check.fail(f"{side}_features, histories", f"{given_rows} rows", "as many rows in each")
        rows = counts.pop()
        made: list[Any] = []
        rest = iter(encoded)
        for part in self.parts:
            if part.kind in _GIVEN:
                matrix = next(rest)
                made.append(_missing(side, part, rows) if matrix is None else matrix)
            elif part.kind == "history" and history is not None:
                made.append(history_features(history))
            else:
                made.append(sp.csr_matrix((rows, part.width), dtype=np.float32))
        return _beside(made)

    def columns_in(self, old: Inputs, ids: Ids, old_ids: Ids) -> list[tuple[slice, slice, NDArray[np.int64]]]:
        """For each part its columns here and in ``old``, and for each column its place in the old part, or −1.

        Ids and history are matched by id, tables by the names of their features, matrices by place.
        """
        if [part.kind for part in self.parts] != [part.kind for part in old.parts]:
            check.fail("warm_start", f"features {self.kind!r}", f"{old.kind!r} as before")
        found, start, old_start = [], 0, 0
        for part, before in zip(self.parts, old.parts, strict=True):
            keys: tuple[Any, Any] = (None, None)
            if part.kind in _NAMES:
                place = _NAMES.index(part.kind)
                keys = (old_ids[place], ids[place])
            elif part.table is not None and before.table is not None:
                keys = (np.array(before.table.feature_names), np.array(part.table.feature_names))
            elif part.width != before.width:
                check.fail("warm_start", f"{part.width} features", f"{before.width}, as before")
            here, there = slice(start, start + part.width), slice(old_start, old_start + before.width)
            if keys[0] is None or keys[1] is None:
                numbers = np.arange(part.width)
                places = np.where(numbers < before.width, numbers, -1)
            else:
                places = join(keys[1], index_of(keys[0]))
            found.append((here, there, places))
            start, old_start = here.stop, there.stop
        return found

    def to_plain(self) -> list[dict[str, Any]]:
        """The parts without their rows, as JSON has them."""
        return [
            {"kind": p.kind, "width": p.width}
            | ({} if p.table is None else {"table": json.loads(p.table.to_json())})
            | ({"exponents": [list(pair) for pair in p.exponents]} if p.exponents else {})
            for p in self.parts
        ]

    @classmethod
    def from_plain(cls, plain: Sequence[object]) -> Inputs:
        """What :meth:`to_plain` gave.

        Raises:
            ValueError: if it is anything else.
        """
        parts = []
        for one in plain:
            form = build("inputs", _Form, one)
            kind = check.choice("inputs.kind", form.kind, (*_NAMES, *_GIVEN))
            if (kind == "table") != (form.table is not None):
                check.fail("inputs", f"{kind} with {type(form.table).__name__}", "a table for the kind table alone")
            table = None if form.table is None else FeatureTable.encoder_from_json(json.dumps(form.table))
            if not 0 < form.width < 2**31 or (table is not None and table.width != form.width):
                check.fail("inputs.width", form.width, "a positive number" if table is None else f"{table.width}")
            exponents = tuple((pair[0], pair[1]) for pair in form.exponents or () if len(pair) == 2)
            if any(not 0 <= c < form.width or not abs(e) < 1024 for c, e in exponents) or (
                len(exponents) < len(form.exponents or ())
            ):
                check.fail("inputs.exponents", str(form.exponents)[:60], "pairs of a column and a power of two")
            parts.append(Part(kind, form.width, table, exponents))
        kinds = [part.kind for part in parts if part.kind in _NAMES]
        if not parts or len(set(kinds)) < len(kinds):
            check.fail("inputs", " + ".join(kinds) or "nothing", "parts, id and history once each")
        return cls(tuple(parts))

    def check_sizes(self, side: str, rows: int, right: int) -> None:
        """Refuse an id for each of other than ``rows`` entities, and a history over other than all right ones."""
        for part in self.parts:
            wanted = {"id": rows, "history": right}.get(part.kind, part.width)
            if part.width != wanted or (part.kind == "history" and side == "right"):
                check.fail(f"inputs.{side}", f"{part.width} columns of {part.kind}", f"{wanted}")


def history_features(matrix: sp.csr_matrix) -> sp.csr_matrix:
    """Each row's observed columns with equal values and length one."""
    counts = np.diff(matrix.indptr)
    values = np.repeat(1 / np.sqrt(np.maximum(counts, 1)), counts).astype(np.float32)
    return sp.csr_matrix((values, matrix.indices, matrix.indptr), shape=matrix.shape)


def ids_alone(given: Any) -> bool:
    """Whether features are none but the ids."""
    parts = given if isinstance(given, (list, tuple)) else [given]
    return all(part is None or (isinstance(part, str) and part == "id") for part in parts)


def training_inputs(
    side: str, given: Any, ids: NDArray[Any] | None, matrix: sp.csr_matrix, place: Rows | None = None
) -> tuple[Inputs, Any]:
    """The inputs of one side, and the features of the training data as :class:`~gramtower.Problem` takes them.

    Args:
        side: "left" or "right".
        given: what the caller said: None for ids, one part, or a sequence of parts.
        ids: ids of the side's entities, None for row numbers.
        matrix: the training pairs, one row for each entity of the side.
        place: over several processes, which of all entities of the side are this process's; ids, rows of features and,
            on the left, of the matrix are theirs.
    """
    place = place or Rows((0, matrix.shape[0]))
    wanted = list(given) if isinstance(given, (list, tuple)) else ["id" if given is None else given]
    if not wanted:
        check.fail(f"{side}_features", repr(given), "at least one part; None for ids alone")
    read = [_training_part(side, one, ids, matrix, place) for one in wanted]
    named = [part.kind for part, _ in read if part.kind in _NAMES]
    if len(set(named)) < len(named):
        check.fail(f"{side}_features", " + ".join(named), "id and history once each")
    return Inputs(tuple(part for part, _ in read)), _beside([features for _, features in read], place)


def _training_part(
    side: str, one: Any, ids: NDArray[Any] | None, matrix: sp.csr_matrix, place: Rows
) -> tuple[Part, Any]:
    rows = place.count
    if isinstance(one, str):
        names = _NAMES if side == "left" else _NAMES[:1]
        if check.choice(f"{side}_features", one, names) == "id":
            return Part("id", place.total), None
        return Part("history", matrix.shape[1]), history_features(matrix)
    if isinstance(one, FeatureTable):
        encoded = one.encode(range(place.first, place.stop) if ids is None else ids)
        return Part("table", encoded.shape[1], FeatureTable.encoder_from_json(one.to_json())), encoded
    if not hasattr(one, "shape") or len(one.shape) != 2 or one.shape[0] != rows:
        shape = f" of shape {tuple(one.shape)}" if hasattr(one, "shape") else ""
        expected = f'scipy.sparse, numpy or torch with {rows} rows, a FeatureTable, "id", "history", or a list of these'
        check.fail(f"{side}_features", type(one).__name__ + shape, expected)
    one = checked(f"{side}_features", one) if sp.issparse(one) else one
    kind = "sparse" if sp.issparse(one) else "dense"
    whole = rows == place.total  # one of several processes does not know all rows of a column
    part = Part(kind, int(one.shape[1]), exponents=_exponents(one) if whole else ())
    return part, part.scaled(one)


def _exponents(matrix: Any) -> tuple[tuple[int, int], ...]:
    """Columns of numbers that are finite and large, and the powers of two that bring them to about one."""
    if "float" not in str(matrix.dtype):  # counts and codes are small, and other kinds are refused elsewhere
        return ()
    if sp.issparse(matrix):
        most = abs(sp.csr_matrix(matrix)).max(axis=0).toarray().reshape(-1)
    else:
        most = np.abs(check.as_float_array("features", matrix)).max(axis=0, initial=0.0)
    large = np.flatnonzero((most > _LARGE) & np.isfinite(most))
    return tuple((int(column), int(np.frexp(float(most[column]))[1])) for column in large)


def _new_part(side: str, part: Part, rows: Any) -> Any:
    """The rows of one part, None if they were not given."""
    if rows is None:
        return None
    if part.table is not None:
        return part.table.encode_frame(rows.source if isinstance(rows, FeatureTable) else rows)
    if not hasattr(rows, "shape") or len(rows.shape) != 2 or rows.shape[1] != part.width:
        shape = f" of shape {tuple(rows.shape)}" if hasattr(rows, "shape") else ""
        check.fail(f"{side}_features", type(rows).__name__ + shape, f"{part.width} columns, as in training")
    return part.scaled(checked(f"{side}_features", rows) if sp.issparse(rows) else rows)


def _missing(side: str, part: Part, rows: int) -> sp.csr_matrix:
    if part.table is None:
        check.fail(f"{side}_features", "None", f"a matrix of {part.width} columns, as in training")
    return sp.vstack([part.table.missing_row()] * rows, format="csr")


def _beside(features: Sequence[Any], place: Rows | None = None) -> Any:
    """One part as it is; several as one sparse matrix, in which None stands for the columns of the ids of ``place``."""
    if len(features) == 1:
        return features[0]
    parts = [_own_columns(place) if one is None else one if sp.issparse(one) else _as_sparse(one) for one in features]
    return sp.csr_matrix(sp.hstack(parts, format="csr"), dtype=np.float32)


def _own_columns(place: Rows | None) -> sp.csr_matrix:
    """A column for each entity of the side, with a one in each own row."""
    assert place is not None
    entries = np.ones(place.count, np.float32), np.arange(place.first, place.stop), np.arange(place.count + 1)
    return sp.csr_matrix(entries, shape=(place.count, place.total))


def _as_sparse(dense: Any) -> sp.csr_matrix:
    return sp.csr_matrix(check.as_float_array("features", dense), dtype=np.float32)
