"""Lists for batches of queries, exact or from an approximate index of the right embeddings.

Queries that choose among the same entities share one product with all right embeddings. With an index, only its
candidates are scored. A query that exclusions leave with fewer than k candidates is answered exactly, and so is a query
that chooses among some entities only. Cost of a group: rows × entities × dim; with an index, of the visited entities.

    faiss       inverted lists of k-means clusters (IVF), inner product
    faiss-hnsw  a graph of near neighbours, by faiss
    hnsw        the same by hnswlib

``build_index`` doubles the number of visited clusters or candidates until recall@k on a sample of left entities reaches
the target, and stores the measured recall. The file also has a digest of the right ids and embeddings, and is refused
for any other model. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from gramtower._util import checks as check
from gramtower._util.checks import need
from gramtower._util.files import build
from gramtower._util.tensors import TensorFile, write
from gramtower.data.ids import Ids
from gramtower.retrieval.list_rules import NO_RULES, Rules
from gramtower.retrieval.topk import best_of, checked_ranking, top_k

KINDS = ("faiss", "faiss-hnsw", "hnsw")
_FORMAT = ("gramtower-index", 1)
_QUERIES, _LINKS, _BUILD = 500, 32, 200  # left entities to measure recall on; edges and effort of graphs
_CLUSTER = 39  # fewest entities per cluster of k-means
_FARTHEST = 4096

Matrix = NDArray[np.float32]
Rows = NDArray[np.int64]


@dataclass
class Facts:
    """Facts about an index."""

    kind: str  # one of KINDS
    model: str  # digest of the right ids and embeddings
    entities: int  # number of entities
    dim: int  # dimension of the embeddings
    k: int  # length of the lists that recall was measured on
    recall: float  # measured recall against exact lists
    target: float  # recall that was asked for
    queries: int  # number of left entities that recall was measured on
    reach: int  # number of clusters or candidates that a search visits
    seconds: float  # time of building and measuring
    bytes: int  # size of the index
    built: float  # time of building, seconds since 1970


def index_path(model: Path) -> Path:
    """Path of the index of a model file."""
    return model.with_name(model.name + ".index")


def digest(ids: Ids | None, embeddings: Tensor) -> str:
    """Digest of the right ids and embeddings, in order."""
    array = embeddings.contiguous().numpy()
    made = hashlib.sha256(f"{array.dtype} {array.shape} ".encode())
    made.update(json.dumps(None if ids is None else ids.tolist()).encode())
    made.update(array.reshape(-1).view(np.uint8).data)
    return made.hexdigest()


def build_index(
    P: Tensor,
    Q: Tensor,
    ids: Ids | None,
    kind: str = "faiss",
    k: int = 20,
    recall: float = 0.95,
    seed: int = 0,
) -> tuple[Index, Facts]:
    """Build an index of Q that reaches a recall@k on a sample of the rows of P."""
    check.choice("kind", kind, KINDS)
    target = check.number("recall", recall, above=0.0)
    if target > 1:
        check.fail("recall", recall, "a share of at most 1")
    k, seed = min(check.count("k", k), len(Q)), check.seed(seed)
    start = time.perf_counter()
    right = np.ascontiguousarray(Q.float().numpy())
    made = _Faiss.built(right, kind, seed) if kind != "hnsw" else _Hnswlib.built(right, seed)
    sample = np.sort(np.random.default_rng(seed).permutation(len(P))[:_QUERIES])
    queries = P[torch.from_numpy(sample)].float()
    exact, _ = top_k(queries, Q.float(), k)
    while (found := recall_of(made.search(queries.numpy(), k), exact)) < target and made.reach < made.farthest:
        made.reach = min(2 * made.reach, made.farthest)
    if found < target:
        check.fail("recall", f"{target:g}, of which {kind} reaches {found:.4f} at its widest", "a lower recall")
    seconds = time.perf_counter() - start
    shape, size = (len(Q), Q.shape[1]), len(made.to_bytes())
    now = time.time()
    return made, Facts(kind, digest(ids, Q), *shape, k, found, target, len(sample), made.reach, seconds, size, now)


def recall_of(found: Rows, exact: Rows) -> float:
    """Mean share of the exact lists that was found."""
    shares = [
        len(np.intersect1d(a[a >= 0], b[b >= 0])) / max(1, (b >= 0).sum()) for a, b in zip(found, exact, strict=True)
    ]
    return float(np.mean(shares))


def write_index(path: Path, index: Index, facts: Facts) -> None:
    """Save an index, replacing the file atomically."""
    content = torch.from_numpy(np.frombuffer(index.to_bytes(), np.uint8).copy())
    write(path, *_FORMAT, vars(facts), {"index": content})


def read_index(path: Path, model: str) -> tuple[Index, Facts]:
    """Read the index of the model with a digest."""
    with contextlib.closing(TensorFile(path, *_FORMAT)) as file:
        facts = _facts(path, file)
        if facts.model != model:
            check.fail("index", f"{path}, which was built for another model", "one of this model: gramtower index RUN")
        content = file.read("index").numpy()
    read = _Hnswlib.read if facts.kind == "hnsw" else _Faiss.read
    try:
        made = read(content, facts.kind, facts.dim)
    except (RuntimeError, ValueError) as error:  # such as an index of a later version of the package
        why = " ".join(str(error).split())[:200]
        check.fail("index", f"{path}, which cannot be read here ({why})", "one built here: gramtower index RUN")
    if made.entities != facts.entities:
        check.fail("index", f"{path} of {made.entities} entities", f"{facts.entities}, as its header says")
    made.reach = facts.reach
    return made, facts


def _facts(path: Path, file: TensorFile) -> Facts:
    try:
        facts = build("index", Facts, file.header)
        check.choice("kind", facts.kind, KINDS)
        for name in ("entities", "dim", "k", "reach"):
            check.count(name, getattr(facts, name))
        if file.dtypes != {"index": torch.uint8}:
            check.fail("tensors", ", ".join(file.shapes)[:80], "one of bytes, called index")
    except ValueError as error:
        raise ValueError(f"index: {path} is damaged or no index ({error})") from error
    return facts


class _Faiss:
    def __init__(self, index: Any, kind: str) -> None:
        self._index, self._kind, self.entities, self.reach = index, kind, int(index.ntotal), 1
        self.farthest = int(index.nlist) if kind == "faiss" else min(_FARTHEST, max(1, self.entities))

    @classmethod
    def built(cls, Q: Matrix, kind: str, seed: int) -> _Faiss:
        faiss = _faiss()
        n, dim = Q.shape
        if kind == "faiss":
            clusters = max(1, min(int(4 * n**0.5), n // _CLUSTER))
            index = faiss.IndexIVFFlat(faiss.IndexFlatIP(dim), dim, clusters, faiss.METRIC_INNER_PRODUCT)
            index.own_fields = False
            index.cp.seed = seed % (2**31 - 1)
            index.cp.min_points_per_centroid = 1
            index.train(Q)
        else:
            index = faiss.IndexHNSWFlat(dim, _LINKS, faiss.METRIC_INNER_PRODUCT)
            index.hnsw.efConstruction = _BUILD
        index.add(Q)
        return cls.read(faiss.serialize_index(index), kind, dim)  # so that it owns all of its parts

    @classmethod
    def read(cls, content: NDArray[np.uint8], kind: str, dim: int) -> _Faiss:
        index = _faiss().deserialize_index(content)
        name = "IndexIVFFlat" if kind == "faiss" else "IndexHNSWFlat"
        if type(index).__name__ != name or index.d != dim:
            check.fail("index", f"a {type(index).__name__} of dimension {index.d}", f"a {name} of dimension {dim}")
        return cls(index, kind)

    def search(self, P: Matrix, k: int) -> Rows:
        """About the k columns with the highest inner products for each row, −1 if fewer were found."""
        if self._kind == "faiss":
            self._index.nprobe = self.reach
        else:
            self._index.hnsw.efSearch = self.reach
        found: Rows = self._index.search(np.ascontiguousarray(P, np.float32), k)[1]
        return found

    def to_bytes(self) -> bytes:
        content: NDArray[np.uint8] = _faiss().serialize_index(self._index)
        return content.tobytes()


class _Hnswlib:
    def __init__(self, index: Any) -> None:
        self._index, self.entities, self.reach = index, int(index.get_current_count()), 1
        self.farthest = min(_FARTHEST, max(1, self.entities))

    @classmethod
    def built(cls, Q: Matrix, seed: int) -> _Hnswlib:
        index = _hnswlib().Index(space="ip", dim=Q.shape[1])
        index.init_index(max_elements=len(Q), M=_LINKS // 2, ef_construction=_BUILD, random_seed=seed % (2**31 - 1))
        index.set_num_threads(1)  # the graph depends on the order of insertions
        index.add_items(Q)
        return cls(index)

    @classmethod
    def read(cls, content: NDArray[np.uint8], kind: str, dim: int) -> _Hnswlib:
        index = _hnswlib().Index(space="ip", dim=dim)
        with tempfile.TemporaryDirectory() as folder:  # hnswlib reads from files only
            path = Path(folder) / "index"
            path.write_bytes(content.tobytes())
            index.load_index(str(path))
        return cls(index)

    def search(self, P: Matrix, k: int) -> Rows:
        k = min(k, self.entities)
        self._index.set_ef(max(self.reach, k))
        try:
            return np.asarray(self._index.knn_query(P, k=k)[0], np.int64)
        except RuntimeError:  # the graph reaches fewer than k entities
            return np.full((len(P), k), -1, np.int64)

    def to_bytes(self) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "index"
            self._index.save_index(str(path))
            return path.read_bytes()


Index = _Faiss | _Hnswlib


def _faiss() -> ModuleType:
    return need("faiss", "an index")


def _hnswlib() -> ModuleType:
    return need("hnswlib", "an index of kind hnsw")


Found = tuple[Rows, NDArray[np.float32]]
_WIDEST = 2048  # most candidates of one query


@dataclass
class Query:
    """Embeddings to compute lists for, which must be finite."""

    embeddings: Tensor  # one row for each list
    excluded: list[Rows]  # excluded columns of each list, increasing
    k: int  # length of the lists
    among: Rows | None = None  # the only columns to choose from, increasing; None for all
    key: Hashable = field(default=None)  # equal for queries with the same ``among`` and ``rules``, and with ``own``
    own: list[Rows] | None = None  # the only columns of each list
    rules: Rules = NO_RULES
    notes: dict[str, int] = field(default_factory=dict)  # numbers for the answer, such as unknown ids, by name


def best_lists(queries: Sequence[Query], Q: Tensor, index: Index | None = None) -> list[Found]:
    """Columns (−1 for none) and scores of each query, rows × k."""
    groups: dict[Hashable, list[int]] = {}
    for place, query in enumerate(queries):
        groups.setdefault(query.key, []).append(place)
    answers: dict[int, Found] = {}
    for places in groups.values():
        members = [queries[place] for place in places]
        P = torch.cat([query.embeddings for query in members])
        excluded = [columns for query in members for columns in query.excluded]
        k, first = min(max(query.k for query in members), len(Q)), members[0]
        if index is None or first.among is not None or first.key is not None:
            own = None if first.own is None else [columns for query in members for columns in query.own or ()]
            found, scores = _exact(P, Q, excluded, k, first.among, own, first.rules)
        else:
            found, scores = _approximate(P, Q, excluded, k, index)
        start = 0
        for place, query in zip(places, members, strict=True):
            stop = start + len(query.embeddings)
            answers[place] = found[start:stop, : query.k], scores[start:stop, : query.k]
            start = stop
    return [answers[place] for place in range(len(queries))]


def _exact(
    P: Tensor, Q: Tensor, excluded: Sequence[Rows], k: int, among: Rows | None = None,
    own: Sequence[Rows] | None = None, rules: Rules = NO_RULES,
) -> Found:  # fmt: skip
    left_out = _pairs(excluded, len(Q)) if any(map(len, excluded)) else None
    only = None if own is None else _pairs(own, len(Q))
    return checked_ranking(P.float(), Q.float(), left_out, among, None, only, rules).top(k, loaded=True)


def _pairs(lists: Sequence[Rows], n: int) -> sp.csr_matrix:
    indices = np.concatenate([np.empty(0, np.int64), *lists])
    offsets = np.cumsum([0, *map(len, lists)])
    return sp.csr_matrix((np.ones(len(indices), np.float32), indices, offsets), (len(lists), n))


def _approximate(P: Tensor, Q: Tensor, excluded: Sequence[Rows], k: int, index: Index) -> Found:
    widest = max((len(columns) for columns in excluded), default=0)
    candidates = index.search(P.float().numpy(), min(len(Q), k + widest, max(_WIDEST, k)))
    for row, columns in enumerate(excluded):
        if len(columns):
            candidates[row][np.isin(candidates[row], columns)] = -1
    found, values = best_of(P, Q, candidates, k)
    wanted = np.minimum(k, len(Q) - np.array([len(columns) for columns in excluded]))
    short = np.flatnonzero((found >= 0).sum(1) < wanted)
    if len(short):
        again = _exact(P[torch.from_numpy(short)], Q, [excluded[row] for row in short.tolist()], k)
        found[short], values[short] = again
    return found, values
