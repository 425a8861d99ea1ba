"""The data of a fit as this process holds them: everything with one process, its local rows with several.

:func:`prepare_data` is the only place where they are put together. Over several processes pairs come as a
:class:`~gramtower.distributed.partition.Shard`, or whole and the same in every process; then each keeps its local rows.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeAlias, TypedDict, Unpack

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray

from gramtower._util import checks as check
from gramtower._util.checks import check_hidden
from gramtower.data.frames import Column
from gramtower.data.ids import Key, index_of, join
from gramtower.data.interactions import Interactions, PairsLike, pairs_of, union
from gramtower.data.matrices import SparseMatrix, checked, ones_at, resized, warn_of_pairs
from gramtower.data.splits import per_user, per_user_mask
from gramtower.data.tables import FeaturesLike
from gramtower.distributed.group import SINGLE, Digest, Group, agree, current_group
from gramtower.distributed.partition import Shard
from gramtower.distributed.shards import Shards, entity_costs, row_work, spread, unsharded
from gramtower.metrics.definitions import to_maximise
from gramtower.model import defaults
from gramtower.model.feature_spec import (
    FeatureSpec,
    GivenFeatures,
    IdArray,
    Ids,
    Matrix,
    Part,
    is_combination,
    is_frame,
    is_sparse,
    is_table,
    read_table,
    training_inputs,
    training_parts,
)
from gramtower.model.settings import ModelSettings

FitPairs: TypeAlias = Interactions | Shard | SparseMatrix
Validation: TypeAlias = PairsLike | float | None  # pairs, or a share of those to learn from
Numbered = tuple[int | None, int | None]  # see Interactions.numbered


class PairColumns(TypedDict, total=False):
    """The columns of a table of pairs, as keyword arguments; :meth:`gramtower.TwoTower.fit` describes them."""

    left: Column | None
    right: Column | None
    value: Column | None
    weight: Column | None
    time: Column | None
    threshold: float | None
    context: Sequence[str] | None


def read_frame(name: str, given: Validation, **columns: Unpack[PairColumns]) -> FitPairs:
    """A frame as Interactions; anything else as it is, for which no columns may be given.

    As in the shell, rows whose value is at least the threshold are pairs labelled 1; without a threshold the values
    are the labels; without a value every row is a pair labelled 1.
    """
    given, chosen = pairs_of(given), {column: value for column, value in columns.items() if value is not None}
    if not is_frame(given):
        if chosen:
            shown = ", ".join(f"{column}={value!r}" for column, value in chosen.items())
            check.fail(name, f"{type(given).__name__} with {shown}", "a polars, pandas or pyarrow table with them")
        return given
    if not {"left", "right"} <= chosen.keys():
        expected = 'left= and right= as well: its columns of ids, as in fit(frame, left="user", right="item")'
        check.fail(name, f"a {type(given).__name__}", expected)
    named: Any = chosen
    return Interactions.from_frame(given, labels="value" in chosen and "threshold" not in chosen, **named)


def read_pairs(name: str, given: PairsLike | str | os.PathLike[str], **columns: Unpack[PairColumns]) -> FitPairs:
    """The same, where of a frame or file without named columns the first two hold left and right ids."""
    if not is_table(given):
        return read_frame(name, given, **columns)
    frame = read_table(name, given)
    if columns.get("left") is None and columns.get("right") is None:
        if len(frame.columns) < 2:
            check.fail(name, f"a table of {len(frame.columns)} columns", "left and right ids in two of them")
        columns |= {"left": 0, "right": 1}
    return read_frame(name, frame, **columns)


def read_validation(name: str, given: Validation, **columns: Unpack[PairColumns]) -> Validation:
    """The same as :func:`read_frame` for a frame; a share or pairs as they are, whatever the columns of frames."""
    return read_frame(name, given, **columns) if is_frame(given) else pairs_of(given)


def weighed_by_age(pairs: FitPairs, half_life: str | timedelta | None) -> FitPairs:
    """Pairs to learn from, whose weights are halved for every half-life of their age; as they are without one."""
    if half_life is None:
        return pairs
    if not isinstance(pairs, Interactions):
        check.fail("half_life", f"{half_life!r} with {type(pairs).__name__}", "pairs with times: a table and time=")
    return pairs.decayed(half_life)


@dataclass(frozen=True, eq=False)
class FitData:
    """What a fit learns from, and the sizes of towers for so much data."""

    matrix: sp.csr_matrix  # the observed pairs, local left rows × all right columns
    weights: NDArray[np.floating] | None  # of the local pairs, or None
    ids: Ids  # of the local left rows, and of all right columns
    shards: Shards  # which process holds which rows
    observed: int  # number of pairs of all processes
    held_out: sp.csr_matrix | None  # local pairs to validate on, or None
    inputs: tuple[FeatureSpec, FeatureSpec]  # what each tower sees
    features: tuple[Matrix | None, Matrix | None]  # that of the local entities of both sides
    device: torch.device  # where it is trained
    hidden: tuple[tuple[int, ...], tuple[int, ...]]  # widths of the hidden layers of the left and of the right tower
    dim: int  # size of the embeddings
    normalize: bool = False  # whether embeddings of a side are brought to one length
    # where ids are row numbers of a matrix without ids, how many it had; see Interactions
    numbered: Numbered = (None, None)
    same_entities: bool = False  # whether both sides are one set
    activation: str = defaults.ACTIVATION  # of the hidden layers
    refine: bool = False  # whether the embeddings of known entities are moved by their own pairs after training
    entries: float = 0.0  # of sparse features, of an entity on average; of the side with fewer. 0 without such features

    @property
    def shape(self) -> tuple[int, int]:
        return self.shards.left.total, self.shards.right.total

    @property
    def described(self) -> tuple[bool, bool]:
        return self.inputs[0].described, self.inputs[1].described

    @property
    def features_alone(self) -> tuple[bool, bool]:
        return self.inputs[0].features_alone, self.inputs[1].features_alone

    @property
    def seen(self) -> str:
        return seen_by_towers(self.inputs)

    @property
    def ids_suffice(self) -> bool:
        """Whether linear towers see ids next to tables or matrices, so that training could leave these out."""
        sides = [inputs for inputs in self.inputs if inputs.described]
        with_ids = all(any(part.kind == "id" and part.factor == 1 for part in inputs.parts) for inputs in sides)
        linear = self.hidden == ((), ()) and not self.normalize and self.shards.single
        return bool(sides) and with_ids and linear and not any(inputs.has_history for inputs in sides)

    def by_ids(self) -> FitData:
        """Return the same data with towers that see only ids."""
        left, right = (FeatureSpec((Part("id", size),)) for size in self.shape)
        return replace(self, inputs=(left, right), features=(None, None), entries=0.0)


def seen_by_towers(both: tuple[FeatureSpec, FeatureSpec]) -> str:
    """What towers see, for defaults: ids on each side, next to which there may be features; features; or histories."""
    described = [inputs for inputs in both if inputs.described]
    ids = (any(part.kind == "id" or is_combination(part.table) for part in inputs.parts) for inputs in described)
    if all(ids):  # which can learn all there is
        return defaults.IDS
    return defaults.FEATURES if all(inputs.features_alone for inputs in described) else defaults.HISTORIES


def prepare_data(
    settings: ModelSettings,
    pairs: FitPairs,
    left_features: FeaturesLike = None,
    right_features: FeaturesLike = None,
    validation: FitPairs | None = None,
) -> FitData:
    """A fit's arguments, checked, as this process holds them; see TwoTower.fit for what they may be."""
    settings = settings.with_changes()
    group, part = current_group(), pairs if isinstance(pairs, Shard) else None
    with group.together():
        device = defaults.pick_device(settings.device)
        hidden = None if settings.hidden is None or settings.towers is not None else check_hidden(settings.hidden)
        scale = check.flag("scale_features", settings.scale_features)
        given_dim = None if settings.dim is None else check.count("dim", settings.dim)
        given_length = None if settings.normalize is None else check.flag("normalize", settings.normalize)
        refine = None if settings.refine is None else check.flag("refine", settings.refine)
        store = check.flag("store_features", settings.store_features)
        if store and group.size > 1:
            check.fail("store_features", f"True in {group.size} processes", "False, or a fit in one process")
    agree(
        group, {"dim": given_dim, "hidden": hidden, "scale_features": scale, "normalize": given_length,
                "refine": refine}
    )  # fmt: skip
    room = defaults.room_for_training(device, group, settings.memory_budget)
    with group.together():
        matrix, ids, weights = _read_pairs(pairs, group)
    shape = matrix.shape if part is None else part.shape
    both = GivenFeatures("left", left_features), GivenFeatures("right", right_features)
    if hidden is None:
        with group.together():
            widths = both[0].width(shape[1]), both[1].width(shape[1])
        agree(group, {"features": widths})
        hidden = defaults.default_hidden(shape, widths, device)
    dim = given_dim or defaults.default_dim(shape, hidden, device, room, group.size)
    if part is not None:
        shards, observed, held_out = part.shards, part.pairs, part.held_out
    else:
        _agree_on_pairs(group, matrix)
        shards, observed, held_out = spread_pairs(group, matrix, row_work(dim, max(hidden))), matrix.nnz, None
    times: NDArray[np.floating] | None = pairs.times if isinstance(pairs, Interactions) else None
    numbered = pairs.numbered if isinstance(pairs, Interactions) else shape if sp.issparse(pairs) else (None, None)
    with group.together():
        if held_out is not None or validation is not None:
            to_maximise(settings.metric)
        if part is None and validation is not None:
            rows_held = aligned("validation", validation, ids, shape, numbered)
            held_out = rows_held[shards.left.first : shards.left.stop]
        if part is None:
            times = local_pairs(matrix, times, shards)[1]
            matrix, weights = local_pairs(matrix, weights, shards)
            ids = shards.left.local_rows("left ids", ids[0]), ids[1]
        local = ids[0], shards.right.local_rows("right ids", ids[1])
        parts = [
            training_parts(one.side, one.local(rows, part is not None), own, seen, rows, times, store)
            for one, rows, own, seen in zip(both, (shards.left, shards.right), local, (matrix, matrix.T), strict=True)
        ]
    if part is not None and validation is not None:
        held_out = _held_out_of_part(validation, ids, matrix.shape, group)
    left, left_rows = training_inputs("left", parts[0], shards.left, group, scale)
    left = left.with_usual_history(matrix, group)
    right, right_rows = training_inputs("right", parts[1], shards.right, group, scale)
    normalize, described = bool(given_length), (left.features_alone, right.features_alone)
    if refine is None:
        # Where one side has ids, these have fitted themselves to the other's towers already, and new entities are to
        # be ranked against known ones on equal terms.
        refine = all(described) and settings.towers is None
    elif refine and not any(described):
        check.fail("refine", True, "a side with only features: ids and histories already fit each entity")
    activation = defaults.default_activation(normalize) if settings.activation is None else settings.activation
    return FitData(
        matrix, weights, ids, shards, observed, held_out, (left, right), (left_rows, right_rows), device, hidden, dim,
        normalize, numbered, isinstance(pairs, (Interactions, Shard)) and pairs.one_set, activation,
        refine, _entries(group, (left, right), (left_rows, right_rows), shape),
    )  # fmt: skip


def _entries(
    group: Group,
    inputs: tuple[FeatureSpec, FeatureSpec],
    rows: tuple[Matrix | None, Matrix | None],
    shape: tuple[int, int],
) -> float:
    """Entries of sparse features of an entity on average, of the side that has fewer; 0 without such features."""
    local = [float(part.nnz) if is_sparse(part) else 0.0 for part in rows]
    totals = zip(inputs, group.totals(*local), shape, strict=True)
    return min((total / count for seen, total, count in totals if seen.described and total), default=0.0)


def spread_pairs(group: Group, matrix: sp.csr_matrix, work: float) -> Shards:
    """Which process holds which rows of pairs that all know; ``work`` is that of a tower row in units of a pair's."""
    if group.size == 1:
        return unsharded(matrix.shape)
    return spread(group, entity_costs(np.diff(matrix.indptr), work), np.ones(matrix.shape[1]))


def local_pairs(
    matrix: sp.csr_matrix, weights: NDArray[np.floating] | None, shards: Shards
) -> tuple[sp.csr_matrix, NDArray[np.floating] | None]:
    """The local left rows of all pairs, and the weights (or times) of these pairs, in the order of sorted rows."""
    if shards.single:
        return matrix, weights
    if not matrix.has_sorted_indices:
        matrix = matrix.sorted_indices()
    rows = shards.left
    span = slice(int(matrix.indptr[rows.first]), int(matrix.indptr[rows.stop]))
    return matrix[rows.first : rows.stop], None if weights is None else weights[span]


def matrix_and_ids(pairs: FitPairs, name: str = "pairs") -> tuple[sp.csr_matrix, Ids]:
    """The matrix of Interactions or of a sparse matrix, and the ids of its rows and columns if it has any."""
    if isinstance(pairs, Interactions):
        return pairs.matrix, (pairs.left_ids, pairs.right_ids)
    if sp.issparse(pairs):
        return sp.csr_matrix(checked(name, pairs)), (None, None)
    expected = "gramtower.Interactions, such as those of Interactions.from_csv, a table, or a scipy.sparse matrix"
    check.fail(name, type(pairs).__name__, expected)


def as_interactions(pairs: FitPairs, name: str = "pairs") -> Interactions:
    """Pairs with ids; those of a matrix are the numbers of its rows and columns, which are not one set."""
    matrix, _ = matrix_and_ids(pairs, name)
    return pairs if isinstance(pairs, Interactions) else Interactions.from_matrix(matrix, same_entities=False)


def hold_out(pairs: FitPairs, share: object, seed: int) -> tuple[Any, Any]:
    """Split off a share of each left entity's pairs, drawn with the seed; every left entity keeps a pair.

    A shard keeps its held-out pairs itself, and the second result is None. They do not depend on the number of
    processes.
    """
    group = pairs.shards.group if isinstance(pairs, Shard) else SINGLE
    matrix = pairs.matrix if isinstance(pairs, Shard) else matrix_and_ids(pairs)[0]
    taken = check.number("validation", share, above=0.0)
    if taken >= 1:
        check.fail("validation", share, "a share of each user's pairs, above 0 and below 1, or pairs")
    counts = np.diff(matrix.indptr)
    some = (np.minimum(np.floor(taken * counts + 0.5), counts - 1) > 0).any()  # what per_user holds out
    state = group.gather_json([bool(some), int(counts.max(initial=0)), int(matrix.nnz)])
    if not any(one[0] for one in state):
        given = (
            f"{share}, which leaves no user both a pair to learn from and one to be ranked on "
            f"(pairs of the most active user: {max(one[1] for one in state)})"
        )
        check.fail("validation", given, "a larger share, or users with more pairs")
    if isinstance(pairs, Shard):
        draws = np.random.PCG64(seed).advance(sum(one[2] for one in state[: group.rank]))
        return pairs.holding_out(per_user_mask(matrix, taken, 1, np.random.Generator(draws))), None
    split = per_user(as_interactions(pairs), taken, minimum=1, seed=seed)
    return (split.train, split.test) if isinstance(pairs, Interactions) else (split.train.matrix, split.test.matrix)


def rejoined(pairs: FitPairs, held_out: FitPairs) -> FitPairs:
    """Pairs with those that were held out of them; held-out pairs of unknown entities are left out."""
    found = union(as_interactions(pairs), as_interactions(held_out, "validation"), "validation", add_new=False)
    return found if isinstance(pairs, Interactions) else found.matrix


@dataclass(frozen=True, eq=False)
class Aligned:
    """Pairs in the row numbers of a model."""

    pairs: sp.csr_matrix  # those with two known ids
    total: int  # how many were given
    unknown_right: int  # pairs whose right id is not known; the others that are missing have an unknown left one
    example: tuple[Key, int] | None  # an unknown id, and the side it is of (0 or 1); None if there is none

    def known_pairs(self, name: str, ids: Ids) -> sp.csr_matrix:
        """The pairs; a warning counts those of unknown entities, and if there are no others they are refused."""
        refuse_strangers(name, self, ids)
        if self.example is not None:
            warn_of_pairs(name, self.total - self.pairs.nnz, self.total, self.example[0])
        return self.pairs


def align(
    name: str, given: FitPairs, ids: Ids, shape: tuple[int, int], numbered: Numbered | None = None,
    trained: tuple[int, int] | None = None,
) -> Aligned:  # fmt: skip
    """Pairs joined by id, or refused; a matrix without ids by place, if it has all the rows and columns there are."""
    matrix, its = matrix_and_ids(given, name)
    if not isinstance(given, Interactions) or its[0] is None or its[1] is None:
        sizes, place = numbered or (None, None), trained or shape
        if any(own is not None and size != n for own, size, n in zip(ids, sizes, place, strict=True)):
            expected = "gramtower.Interactions, as in training: Interactions.from_matrix(matrix, left_ids, right_ids)"
            check.fail(name, "a matrix without ids", expected)
        if matrix.shape != place:
            check.fail(name, f"shape {matrix.shape}", f"shape {place}, as in training; other entities need features")
        return Aligned(resized(matrix, shape), matrix.nnz, 0, None)
    for name_of_side, size, own in zip(("left", "right"), given.numbered, numbered or given.numbered, strict=True):
        if size is not None and size != own:
            there = "ids of its own" if own is None else f"the numbers of {own:,}"
            expected = f"those of training, which has {there}: Interactions.from_matrix(matrix, left_ids, right_ids), "
            given_text = f"the numbers of {size:,} rows of a matrix without ids as {name_of_side} ids"
            check.fail(name, given_text, expected + f"or {name_of_side}_features of other entities")
    known = [np.arange(size) if own is None else own for own, size in zip(ids, shape, strict=True)]
    rows, columns = join(its[0], index_of(known[0])), join(its[1], index_of(known[1]))
    coo = matrix.tocoo()
    i, j = rows[coo.row], columns[coo.col]
    keep = (i >= 0) & (j >= 0)
    example = None
    if not keep.all():
        entry = int(np.argmin(keep))
        side, place = (0, coo.row[entry]) if i[entry] < 0 else (1, coo.col[entry])
        example = ((its[0], its[1])[side].tolist()[place], side)
    pairs = sp.csr_matrix((coo.data[keep], (i[keep], j[keep])), shape=shape)
    pairs.sum_duplicates()  # which scipy 1.13.0 leaves, and the columns of a row out of order
    return Aligned(pairs, len(keep), int((j < 0).sum()), example)


def refuse_strangers(name: str, found: Aligned, ids: Ids, hint: str = "") -> None:
    """Refuse pairs of which not one has two known ids; a hint says what can be done about it."""
    if found.example is not None and not found.pairs.nnz:
        example, side = found.example
        known = ids[side]
        shown = f"{found.total:,} pairs, none of them with two known ids ({example!r} is not known)"
        such = f", with ids such as {known.tolist()[0]!r}" if known is not None and len(known) else ""
        check.fail(name, shown, f"pairs of entities of the model{such}{'; ' if hint else ''}{hint}")


def aligned(
    name: str, test: FitPairs, ids: Ids, shape: tuple[int, int], numbered: Numbered | None = None
) -> sp.csr_matrix:
    """Held-out pairs in the model's row numbers; those of unknown entities are left out, with a warning."""
    return align(name, test, ids, shape, numbered).known_pairs(name, ids)


def own_pairs(ids: Ids, shape: tuple[int, int]) -> sp.csr_matrix:
    """Every entity that is on both sides with itself, as ones; by number where there are no ids."""
    rows = np.arange(min(shape)) if ids[0] is None or ids[1] is None else join(ids[1], index_of(ids[0]))
    columns = np.flatnonzero(rows >= 0)
    return ones_at(rows[columns], columns, shape)


def known_pairs(ids: tuple[IdArray, IdArray], pairs: Interactions) -> int:
    """How many pairs have both ids among those known."""
    return int(align("pairs", pairs, ids, (len(ids[0]), len(ids[1]))).pairs.nnz)


def _read_pairs(pairs: FitPairs, group: Group) -> tuple[sp.csr_matrix, Ids, NDArray[np.floating] | None]:
    """Matrix, ids and weights of pairs: of all of them, or of the part that this process read."""
    if not isinstance(pairs, Shard):
        return *matrix_and_ids(pairs), pairs.weights if isinstance(pairs, Interactions) else None
    if pairs.shards.group.size != group.size:
        given = f"a part read for {pairs.shards.group.size} processes"
        check.fail("pairs", given, f"one read for {group.size}: read_part inside the process group")
    return pairs.matrix, (pairs.left_ids, pairs.right_ids), pairs.weights


def _agree_on_pairs(group: Group, matrix: sp.csr_matrix) -> None:
    if group.size > 1:
        keys = np.arange(matrix.nnz) * np.int64(matrix.shape[1]) + matrix.indices
        digest = Digest().add(keys, matrix.data).text(SINGLE)
        agree(group, {"pairs": f"{matrix.shape[0]} × {matrix.shape[1]}, {matrix.nnz} pairs, digest {digest}"})


def _held_out_of_part(validation: FitPairs, ids: Ids, shape: tuple[int, int], group: Group) -> sp.csr_matrix:
    """Held-out pairs of the local left rows; each process has all of them."""
    with group.together():
        found = align("validation", validation, ids, shape)
    known = int(group.totals(float(found.pairs.nnz))[0])
    if known == 0:
        refuse_strangers("validation", found, ids)
    if group.rank == 0:
        warn_of_pairs("validation", found.total - known, found.total, None)
    return found.pairs
