"""Metrics of a fitted model on held-out pairs, joined by id, with counts of the pairs that are left out and why.

The rule of what is left out of a ranking is in model/fitted.py, the definitions in docs/metrics.md. Cost: that of
metrics/evaluation.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from gramtower._util import checks as check
from gramtower.data.interactions import Interactions
from gramtower.data.left_out import warn_of_pairs
from gramtower.data.lookup import index_of, join
from gramtower.data.matrices import union, without
from gramtower.distributed.group import SINGLE
from gramtower.metrics import evaluate_embeddings
from gramtower.metrics.definitions import parse
from gramtower.metrics.tally import Scores
from gramtower.model.entities import Entities, selection
from gramtower.model.fit_data import Aligned, Numbered, align, given_pairs, matrix_and_ids, refuse_strangers
from gramtower.model.newcomers import described, embedded
from gramtower.model.side import history_matrix


@dataclass(frozen=True)
class Ranking:
    """What is measured, and what is left out of the rankings; see FittedModel.evaluate."""

    metrics: Any
    exclude_seen: bool
    exclude: Any
    by: str | None
    trained_only: bool = False  # whether right entities that were not there in training are left out as asked
    allowed: NDArray[np.int64] | None = None  # columns to rank, increasing; None for all


def of_known(known: Entities, test: Any, ranking: Ranking) -> Scores:
    """Metrics of pairs of entities that the model knows; rows of the result are those of its left entities."""
    found, group = known.aligned("test", test), known.shards.group
    if known.shards.single:
        refuse_strangers("test", found, known.ids, _hint(known, found, 0, ranking))
    also = [] if ranking.exclude is None else [known.excluded(ranking.exclude)]
    if ranking.exclude_seen:
        of_training = np.arange(len(known.left)) < known.left.trained
        also.append(without(known.further, _masked(found.pairs, of_training)))
    scores = _measured(
        known.left.embeddings, known.right.embeddings, found.pairs, ranking, train=known.trained,
        exclude=union(*also) if also else None, processes=group,
    )  # fmt: skip
    return _counted(scores, known, found, int(group.totals(float(found.pairs.nnz))[0]), ranking)


def of_described(known: Entities, test: Any, ranking: Ranking, features: Any, histories: Any) -> Scores:
    """Metrics where left entities are described in the call; rows of the result are those of the test.

    Those that are in neither the features nor the histories are taken as the model knows them, if it does.
    """
    if ranking.by == "activity":
        check.fail("by", repr(ranking.by), "popularity, or None: of new entities there are no training pairs")
    if not known.shards.single and (ranking.by or {m.kind for m in parse(ranking.metrics)} & {"psp", "novelty"}):
        check.fail("metrics", "popularity, in several processes", "a loaded model, in one process")
    matrix, (given, _) = matrix_and_ids(test, "test")
    shape, trained = (matrix.shape[0], len(known.right)), (matrix.shape[0], known.right.trained)
    ids = (given, known.right.ids)
    numbered = (test.numbered[0] if isinstance(test, Interactions) else None, known.right.numbered)
    names = np.arange(shape[0]) if given is None else given
    what = None if features is None else described(known.left, features)
    rows = np.full(shape[0], -1, dtype=np.int64)  # of the features
    if what is not None and what.ids is None:
        rows = _by_place("left_features", what.count, shape[0])
    elif what is not None:
        rows = join(names, what.places("left_features"))
    history, new = None, rows >= 0
    if histories is not None:
        history, shown = _histories(known, histories, names, numbered)
        new |= shown
    own = np.full(shape[0], -1, dtype=np.int64) if given is None else _known_rows(known, given, numbered[0])
    old = np.where(new, -1, own)
    P = torch.zeros(shape[0], known.left.embeddings.shape[1], dtype=known.left.embeddings.dtype)
    P[torch.from_numpy(old >= 0)] = known.left.embeddings[torch.from_numpy(old[old >= 0])]
    if new.any():
        taken = None if what is None else what.take("left_features", rows[new])
        of_new = None if history is None else sp.csr_matrix(history[new])
        P[torch.from_numpy(new)] = embedded(known.left, known.known_towers("embed new entities"), taken, of_new).to(P)
    found = align("test", test, ids, shape, numbered, trained)
    there = new | (old >= 0)
    if found.example is None and (strange := ~there & (np.diff(found.pairs.indptr) > 0)).any():
        found = replace(found, example=(names.tolist()[int(np.argmax(strange))], 0))
    found = replace(found, pairs=_masked(found.pairs, there))
    refuse_strangers("test", found, known.ids, _hint(known, found, 0, ranking))
    picked = selection(own, len(known.left))
    seen = sp.csr_matrix(picked @ known.trained)
    seen = seen if history is None else union(seen, _masked(history, new))
    of_training = _masked(found.pairs, (own >= 0) & (own < known.left.trained))
    also = [without(sp.csr_matrix(picked @ known.further), of_training)] if ranking.exclude_seen else []
    if ranking.exclude is not None:
        also.append(align("exclude", given_pairs("exclude", ranking.exclude), ids, shape, numbered, trained).pairs)
    scores = _measured(
        P, known.right.embeddings, found.pairs, ranking, train=seen,
        exclude=union(*also) if also else None, popularity=known.trained,
    )  # fmt: skip
    return _counted(scores, known, found, found.pairs.nnz, ranking)


def _measured(P: Tensor, Q: Tensor, truth: sp.csr_matrix, ranking: Ranking, **given: Any) -> Scores:
    """Metrics of rankings of the columns that are allowed; pairs of others count as left out."""
    lost = 0
    if (columns := ranking.allowed) is not None:
        cut = {name: sp.csr_matrix(one[:, columns]) if sp.issparse(one) else one for name, one in given.items()}
        all_pairs, truth, Q, given = truth.nnz, sp.csr_matrix(truth[:, columns]), Q[torch.from_numpy(columns)], cut
        lost, group = all_pairs - truth.nnz, given.get("processes", SINGLE)
        if not group.totals(float(truth.nnz))[0]:
            check.fail("allow", f"{len(columns):,} known ids, none of them in a test pair", "some that are tested")
    scores = evaluate_embeddings(
        P, Q, truth, metrics=ranking.metrics, exclude_train=ranking.exclude_seen, by=ranking.by, **given
    )
    scores.left_out = {} if ranking.allowed is None else {"not_allowed": lost}
    return scores


def _histories(
    known: Entities, histories: Any, names: NDArray[Any], numbered: Numbered
) -> tuple[sp.csr_matrix, NDArray[np.bool_]]:
    """What the left entities of a test have seen, in its rows, and which of them have a history."""
    if isinstance(histories, Interactions):
        ids = (names, known.right.ids)
        found = align("histories", histories, ids, (len(names), len(known.right)), numbered)
        refuse_strangers("histories", found, ids)
        return found.pairs, join(names, index_of(histories.left_ids)) >= 0
    matrix = history_matrix(known.right, histories)
    return matrix, _by_place("histories", matrix.shape[0], len(names)) >= 0


def _by_place(name: str, given: int, count: int) -> NDArray[np.int64]:
    """Row numbers of what has no ids and must have a row for each left entity of a test."""
    if given != count:
        expected = f"{count}, one for each left entity of test, or a table with a column of ids"
        check.fail(name, f"{given} rows without ids", expected)
    return np.arange(count)


def _known_rows(known: Entities, ids: NDArray[Any], numbered: int | None) -> NDArray[np.int64]:
    """The model's rows of left ids, −1 where there is none; row numbers of another matrix mean other entities."""
    if not known.shards.single or numbered not in (None, known.left.numbered):
        return np.full(len(ids), -1, dtype=np.int64)
    return join(ids, known.left_index())


def _masked(matrix: sp.csr_matrix, rows: NDArray[np.bool_]) -> sp.csr_matrix:
    """A matrix with only some rows filled."""
    kept = np.repeat(rows, np.diff(matrix.indptr))
    offsets = np.concatenate([[0], np.cumsum(np.where(rows, np.diff(matrix.indptr), 0))])
    return sp.csr_matrix((matrix.data[kept], matrix.indices[kept], offsets), shape=matrix.shape)


def _hint(known: Entities, found: Aligned, kept: int, ranking: Ranking) -> str:
    """How entities that are not known could be ranked, side by side; ``kept`` are the pairs with two known ids."""
    strange = found.total - found.unknown_right > kept or (found.example is not None and found.example[1] == 0)
    hints = []
    for side, asked in ((known.left, strange), (known.right, found.unknown_right > 0 and not ranking.trained_only)):
        ways = [f"{side.name}_features"] if side.inputs.given else []
        ways += ["histories"] if side.inputs.has_history else []
        if asked and ways:
            hints.append(f"{' and '.join(ways)} of evaluate describe{'s' * (len(ways) == 1)} new {side.name} entities")
        elif asked:
            hints.append(f"the model knows {side.name} entities by id alone: {side.name}_features of fit, for new ones")
    return ", ".join(hints)


def _counted(scores: Scores, known: Entities, found: Aligned, kept: int, ranking: Ranking) -> Scores:
    """Metrics with the counts of what they leave out; ``kept`` are the pairs with two known ids."""
    unknown_left = found.total - found.unknown_right - kept
    scores.left_out |= {
        "unknown_left": unknown_left, "unknown_right": found.unknown_right, "seen": scores.pairs_left_out
    }  # fmt: skip
    scores.pairs_left_out = sum(scores.left_out.values())
    if known.shards.single:
        example = None if found.example is None else found.example[0]
        warn_of_pairs("test", found.total - kept, found.total, example, _hint(known, found, kept, ranking))
    return scores
