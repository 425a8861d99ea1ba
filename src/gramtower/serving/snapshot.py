"""A loaded model that answers requests. It never changes, so that replacing it is one assignment.

The model file is copied into private memory before it is read, so that later changes to the file have no effect. With
``mapped`` the file itself is mapped and several processes share its pages; then it may only be replaced by renaming
another file, as ``save`` and ``fit`` do. Lists equal those of model.recommend and model.similar.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from gramtower._util import checks as check
from gramtower._util.files import as_path, is_remote
from gramtower._util.host import release
from gramtower.data.entity_table import EntityTable
from gramtower.data.ids import Key, UnknownIds
from gramtower.data.interactions import Interactions
from gramtower.distributed.shard_files import others
from gramtower.model.context import Context
from gramtower.model.explanation import Explainer, Explanation
from gramtower.model.side import Side, described, listed_histories
from gramtower.model.two_tower import TwoTower, load
from gramtower.retrieval.list_rules import Rules, make_rules
from gramtower.serving.ann_index import Facts, Found, Index, Query, best_lists, digest, index_path, read_index
from gramtower.serving.messages import Refused
from gramtower.serving.served_entities import Entities

if TYPE_CHECKING:
    from polars import DataFrame

Rows = NDArray[np.int64]
NewFeatures: TypeAlias = dict[str, list[Any]] | NDArray[np.float32] | None  # columns, or rows of numbers
Histories: TypeAlias = Sequence[Sequence[Key]] | None  # right ids of each new left entity
Stamp: TypeAlias = tuple[tuple[int, int, int] | None, ...]  # inode, size and time of each file
INDEXES = ("auto", "exact", "faiss", "faiss-hnsw", "hnsw")
_OF_TABLE = ("where", "boost", "at_most")
_COPIED, _WARM = 1 << 24, 64  # bytes at a time; rows of a first batch


@dataclass(frozen=True)
class TableSource:
    """A table of entities: a function that reads it, and its columns of ids and titles."""

    name: str
    read: Callable[[], DataFrame]
    id: str
    title: str | None = None


@dataclass(frozen=True)
class Source:
    """Where to read a model."""

    name: str  # name of the model in requests
    path: Path  # model file
    # "auto" uses the index next to the file if it belongs to it, "exact" uses none, a kind requires one
    index: str = "auto"
    mapped: bool = False  # whether to map the file instead of copying it
    tables: Mapping[str, TableSource] | None = None  # tables of entities by side
    test: Callable[[], Interactions] | None = None  # reads held-out pairs to compute metrics on
    files: Sequence[Path] = ()  # files of tables and held-out pairs, which are watched as well
    # another path of the file that other workers serve, for a worker that starts later; None for ``path``
    kept: Path | None = None

    def stamp(self) -> Stamp:
        """A value that changes when the model, its index, or one of its files is replaced."""
        found: list[tuple[int, int, int] | None] = []
        model = self.kept or self.path
        for path in (model, index_path(model), *self.files):
            try:
                state = as_path(path).stat()
                found.append((state.st_ino, state.st_size, state.st_mtime_ns))
            except OSError:
                found.append(None)
        return tuple(found)


class Snapshot:
    """A loaded model.

    Attributes:
        notes: messages for the operator, such as an index that cannot be used.
        seen: pairs that lists leave out.
        observed: the same without pairs of an entity with itself, if both sides are the same entities.
        evaluation: metrics on held-out pairs, also by popularity; None without such pairs.
    """

    def __init__(self, source: Source) -> None:
        self.source, self.name, self.notes = source, source.name, list[str]()
        check.choice("index", source.index, INDEXES)
        self._path = source.kept or source.path
        self.stamp, self.loaded = source.stamp(), time.time()
        self.model = load(self._path, mapped=True) if source.mapped else _private(self._path)
        if source.mapped:  # pages that only the checksums needed: few left rows are used at a time
            release(self._path, self.model.left_.embeddings)
        self.written = self._path.stat().st_mtime
        self.seen: sp.csr_matrix = self.model.seen_
        P, Q = self.model.left_.embeddings, self.model.right_.embeddings
        self.observed = self.model.fitted_.observed()
        counts = {"left": np.diff(self.observed.indptr), "right": np.bincount(self.observed.indices, minlength=len(Q))}
        self.left, self.right = (
            Entities(side, one.ids, one.embeddings, counts[side].astype(np.int64), self._table(side, one), one.called)
            for side, one in (("left", self.model.left_), ("right", self.model.right_))
        )
        self.index, self.index_facts = self._open_index()
        self.evaluation: dict[str, float] | None = None
        if source.test is not None:
            self.evaluation = dict(self.model.evaluate(source.test(), by="popularity"))
        first = P[:_WARM]  # loads and compiles code before the first request
        best_lists([Query(first, [np.empty(0, np.int64)] * len(first), 1)], Q, self.index)

    def side(self, name: str) -> Entities:
        return self.left if name == "left" else self.right

    @cached_property
    def takes_histories(self) -> bool:
        """Whether new left entities can be embedded by their history only."""
        try:
            self.model.embed(histories=sp.csr_matrix((1, len(self.right)), dtype=np.float32))
        except ValueError:
            return False
        return True

    def query(
        self,
        k: int,
        *,
        left: Sequence[Key] | None = None,
        left_features: NewFeatures = None,
        histories: Histories = None,
        context: Context | None = None,
        exclude_seen: bool = True,
        exclude: Sequence[Sequence[Key]] = (),
        allow: Sequence[Key] | Sequence[Sequence[Key]] | None = None,
        deny: Sequence[Key] | None = None,
        **rules: Any,
    ) -> Query:
        """The query of model.recommend, which can be batched with others.

        ``exclude`` has a list for each row, or none; ``allow`` may have one for each.
        """
        seen: sp.csr_matrix | None = self.seen
        if left is not None and (found := self._in_context(left, context)) is not None:
            (rows, embeddings), seen = found, self.model.fitted_.seen_by_users
        elif left is not None:
            rows = self.left.rows(left)
            embeddings = self.left.embeddings[torch.from_numpy(rows)]
        else:
            matrix = None if histories is None else self._histories(histories)
            embeddings = self.embed_new("left", left_features, matrix)
            rows = np.arange(len(embeddings))
            seen = self._seen_by_described(left_features, matrix) if exclude_seen else None
        excluded = [np.empty(0, np.int64)] * len(rows)
        if exclude_seen and seen is not None:
            excluded = [seen.indices[seen.indptr[row] : seen.indptr[row + 1]] for row in rows]
        made, among, own = self._rules(rules), None, None
        key: Hashable = json.dumps([rules, k if made.diversity else None], sort_keys=True) if rules else None
        unknown_allowed = 0
        if allow and isinstance(allow[0], list):
            own, unknown = zip(*map(self.right.known_rows, cast("Sequence[Sequence[Key]]", allow)), strict=True)
            unknown_allowed, key = sum(unknown), ("own", key)
        elif allow is not None:
            among, unknown_allowed = self.right.known_rows(cast("Sequence[Key]", allow))
            key = tuple(allow), key
        denied, unknown_denied = self.right.known_rows(deny or ())
        if len(denied):
            excluded = [np.union1d(columns, denied) if len(columns) else denied for columns in excluded]
        left_out = [self.right.known_rows(ids) for ids in exclude]
        if left_out:
            excluded = [np.union1d(columns, more) for columns, (more, _) in zip(excluded, left_out, strict=True)]
        counts = {
            "unknown_allowed": unknown_allowed, "unknown_denied": unknown_denied,
            "unknown_excluded": sum(count for _, count in left_out),
        }  # fmt: skip
        notes = {name: count for name, count in counts.items() if count}
        return Query(embeddings, excluded, k, among, key, None if own is None else list(own), made, notes)

    def check_left(self, left: Sequence[Key], context: Context | None) -> None:
        """Refuse unknown left ids and contexts, before an answer begins."""
        if self._in_context(left, context) is None:
            self.left.rows(left)

    def _in_context(self, left: Sequence[Key], context: Context | None) -> tuple[Rows, Tensor] | None:
        """Users of a model with context and their embeddings; None for ids of left entities."""
        if context is None and self.model.fitted_.combinations is None:
            return None
        with _refusing():
            return self.model.fitted_.in_context(list(left), context)

    def recommend(self, queries: Sequence[Query]) -> list[Found]:
        """The lists of several queries."""
        return best_lists(queries, self.right.embeddings, self.index)

    def likeness(self, side: str, ids: Sequence[Key], k: int, together: bool = False) -> Query:
        """The query of model.similar; ``together`` asks for one list, for the mean direction of all ids."""
        this = self.side(side)
        rows = this.rows(ids)
        directed = self._directed[side]
        if directed is not None and not np.isin(rows, directed).all():
            bad = this.names(rows[~np.isin(rows, directed)][:1])[0]
            given = f"{bad!r}, which has no pair and no features"
            raise Refused(422, f"{this.name} ids: got {given}, expected entities with one")
        embeddings, excluded = this.unit[torch.from_numpy(rows)], [np.array([row]) for row in rows.tolist()]
        if together:
            embeddings = torch.nn.functional.normalize(embeddings.mean(0, keepdim=True), dim=1)
            excluded = [np.unique(rows)]
        return Query(embeddings, excluded, k, directed, None)

    def similar(self, side: str, queries: Sequence[Query]) -> list[Found]:
        """The neighbours of several queries of one side."""
        return best_lists(queries, self.side(side).unit)

    def score(
        self, left: Sequence[Key], right: Sequence[Key], scores: str = "raw", context: Context | None = None
    ) -> list[float]:
        """Scores p_iᵀq_j or their probabilities, element by element."""
        probability = self._rules({"scores": scores}).probability
        found_in = self._in_context(left, context)
        P = self.left.embeddings[torch.from_numpy(self.left.rows(left))] if found_in is None else found_in[1]
        Q = self.right.embeddings[torch.from_numpy(self.right.rows(right))]
        found = (P * Q).sum(1).numpy()
        return (found if probability is None else probability(found)).tolist()  # type: ignore[no-any-return]

    def embed(self, side: str, ids: Sequence[Key] | None, features: NewFeatures, histories: Histories) -> Tensor:
        """Embeddings of known ids or of new entities."""
        if ids is not None:
            this = self.side(side)
            return this.embeddings[torch.from_numpy(this.rows(ids))]
        return self.embed_new(side, features, None if histories is None else self._histories(histories))

    def embed_new(self, side: str, features: NewFeatures, histories: sp.csr_matrix | None) -> Tensor:
        """Embeddings of new entities."""
        given: dict[str, Any] = {f"{side}_features": features}
        if histories is not None:
            given["histories"] = histories
        with _refusing(f"{side}_features"):
            embeddings = torch.from_numpy(self.model.embed(**given))
        if not bool(torch.isfinite(embeddings).all()):
            raise Refused(422, f"{side}_features: got numbers so large that embeddings overflow, expected smaller ones")
        return embeddings

    def explain(self, left: Key | None, right: Key, features: NewFeatures, histories: Histories) -> Explanation:
        """The explanation of a score; see model.explain."""
        own = None if left is None else int(self.left.rows([left])[0])
        other = int(self.right.rows([right])[0])
        matrix = None if histories is None else self._histories(histories)
        with _refusing("left_features"):
            found = self._explainer.explain(own, other, "left", features, matrix)
        if not np.isfinite([found.score, found.base, found.remainder]).all():
            raise Refused(422, "left_features: got numbers so large that scores overflow, expected smaller ones")
        return found

    @cached_property
    def _explainer(self) -> Explainer:
        return Explainer(self.model, self.model.fitted_)

    def observed_with(self, side: str, row: int, most: int) -> Rows:
        """Up to ``most`` entities of the other side that an entity was observed with, increasing."""
        pairs = self.observed
        if side == "left":
            first: Rows = pairs.indices[pairs.indptr[row] : pairs.indptr[row + 1]][:most].astype(np.int64)
            return first
        places = np.flatnonzero(pairs.indices == row)[:most]
        return np.searchsorted(pairs.indptr, places, side="right").astype(np.int64) - 1

    @cached_property
    def _directed(self) -> dict[str, Rows | None]:
        """The entities of each side whose embedding has a direction; None if all have one."""
        known = {side: self.model.has_direction(side) for side in ("left", "right")}
        return {side: None if directed.all() else np.flatnonzero(directed) for side, directed in known.items()}

    def _rules(self, given: Mapping[str, Any]) -> Rules:
        def columns() -> EntityTable:
            if self.right.table is None:
                missing = "the server has no table; start it with gramtower serve --right-table"
                raise Refused(422, f"{', '.join(name for name in given if name in _OF_TABLE)}: {missing}")
            return self.right.table

        fitted = self.model.fitted_
        with _refusing():
            return make_rules(
                columns, lambda: fitted.popularity, len(self.right), probability=fitted.calibration, **given
            )

    def _seen_by_described(self, features: NewFeatures, histories: sp.csr_matrix | None) -> sp.csr_matrix | None:
        """Pairs of entities given by features: their histories, and their pairs in training if their ids are known."""
        with _refusing():
            what = None if features is None else described(self.model.left_, features)
            seen = self.model.fitted_.seen_by_described(what, histories, self.left.index)
        return None if seen is None else seen.sorted_indices()

    def _histories(self, histories: Sequence[Sequence[Key]]) -> sp.csr_matrix:
        return listed_histories([self.right.rows(history) for history in histories], len(self.right))

    def _table(self, side: str, one: Side) -> EntityTable | None:
        source = (self.source.tables or {}).get(side)
        if source is None:
            return None
        return EntityTable(source.name, source.read(), source.id, one.ids, len(one.embeddings), source.title)

    def _open_index(self) -> tuple[Index | None, Facts | None]:
        wanted, path = self.source.index, index_path(self._path)
        if wanted == "exact" or (wanted == "auto" and not path.exists()):
            return None, None
        if not path.exists():
            check.fail("index", f"{wanted!r}, and there is no {path}", f"one made by: gramtower index --kind {wanted}")
        try:
            index, facts = read_index(path, digest(self.right.ids, self.right.embeddings))
            if wanted not in ("auto", facts.kind):
                check.fail("index", f"{path} of kind {facts.kind}", f"kind {wanted}")
        except ValueError as error:
            if wanted != "auto":
                raise
            self.notes.append(f"answers exactly, without the index: {error}")
            return None, None
        return index, facts


@contextmanager
def _refusing(field: str | None = None) -> Iterator[None]:
    """Turn errors of the model into refusals; those about columns of features get the name of their ``field``."""
    try:
        yield
    except ValueError as error:
        text = " ".join(str(error).split())[:500]
        kinds = ("numeric", "categorical", "list", "text", "vector", "column")  # first words of errors about columns
        named = f"{field}: {text}" if field is not None and text.startswith(kinds) else text
        raise Refused(404 if isinstance(error, UnknownIds) else 422, named) from error
    except ImportError as error:  # the encoder of a column of text is not installed
        raise Refused(503, f"{field}: {error}") from error


def _private(path: Path) -> TwoTower:
    if is_remote(path) or not path.is_file():
        return load(path, mapped=is_remote(path))  # of a URL, from a copy that nothing changes; or raises the error
    shards = others(path)
    try:
        if shards or not hasattr(os, "memfd_create"):
            with tempfile.TemporaryDirectory(prefix="gramtower-serve-") as folder:
                for file in (path, *shards):
                    shutil.copyfile(file, Path(folder) / file.name)
                return load(Path(folder) / path.name)  # copied, as the folder is deleted
        copy = os.memfd_create(path.name[:100])
        try:
            with path.open("rb") as source, os.fdopen(os.dup(copy), "wb") as target:
                shutil.copyfileobj(source, target, _COPIED)
            return load(Path(f"/proc/self/fd/{copy}"), mapped=True)
        finally:
            os.close(copy)
    except ValueError as error:
        raise ValueError(f"model: {path} cannot be served: {_without_copy(str(error))}") from error


def _without_copy(text: str) -> str:
    """A message without the path of the private copy."""
    words = [word for word in text.split() if not word.startswith(("/proc/self/fd/", "(/proc/self/fd/"))]
    return " ".join(words).removeprefix("model: ")
