"""Indexes reach the recall they state, are read back as they were, and belong to one model."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from allocations import Allocations
from serving_cases import folder, model, source

pytest.importorskip("faiss", reason="indexes need faiss")

from gramtower._util.tensors import TensorFile, write
from gramtower.cli.program import run
from gramtower.retrieval.list_rules import Rules
from gramtower.retrieval.topk import top_k
from gramtower.serving.ann_index import (
    KINDS,
    Query,
    best_lists,
    build_index,
    digest,
    index_path,
    read_index,
    recall_of,
    write_index,
)
from gramtower.serving.served_models import Metrics, Models
from gramtower.serving.snapshot import Snapshot

NONE = np.empty(0, np.int64)


def available(kind):
    if kind == "hnsw":
        pytest.importorskip("hnswlib", reason="kind hnsw needs hnswlib")
    return kind


def embeddings(rows, seed, dim=8):
    return torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", KINDS)
def test_an_index_reaches_its_recall_and_survives_its_file(kind, tmp_path):
    P, Q = embeddings(300, 1), embeddings(2000, 2)
    made, facts = build_index(P, Q, None, available(kind), k=10, recall=0.9)
    exact = top_k(P, Q, 10)[0]
    assert facts.recall >= 0.9
    assert facts.recall == pytest.approx(recall_of(made.search(P.numpy(), 10), exact), abs=1e-6)
    write_index(tmp_path / "x.index", made, facts)
    again, read = read_index(tmp_path / "x.index", digest(None, Q))
    assert read == facts
    np.testing.assert_array_equal(again.search(P.numpy(), 10), made.search(P.numpy(), 10))


def test_recall_is_the_mean_share_of_the_exact_lists():
    assert recall_of(np.array([[1, 2, -1], [4, 5, 6]]), np.array([[2, 3, 4], [6, 5, 4]])) == pytest.approx(
        (1 / 3 + 1) / 2
    )


def test_a_recall_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match=r"recall.*1\.5"):
        build_index(embeddings(5, 1), embeddings(50, 2), None, recall=1.5)
    with pytest.raises(ValueError, match=r"kind:.*'tree'"):
        build_index(embeddings(5, 1), embeddings(50, 2), None, "tree")


@pytest.mark.parametrize("kind", ["faiss", "hnsw"])
def test_lists_by_an_index_have_exact_scores_and_leave_out_what_is_excluded(kind):
    P, Q = embeddings(40, 1), embeddings(1500, 2)
    index, _ = build_index(P, Q, None, available(kind), k=10, recall=0.99)
    exact = top_k(P, Q, 30)[0]
    excluded = [np.sort(exact[row, : row % 20]) for row in range(40)]
    queries = [Query(P[row : row + 1], [excluded[row]], 1 + row % 10) for row in range(40)]
    recalls = []
    for row, (found, scores) in enumerate(best_lists(queries, Q, index)):
        assert not set(found[0]) & set(excluded[row])
        np.testing.assert_allclose(scores[0], (Q[found[0]] @ P[row]).numpy(), rtol=1e-5)
        assert (np.diff(scores[0]) <= 0).all()
        recalls.append(recall_of(found, best_lists([queries[row]], Q)[0][0]))
    assert np.mean(recalls) > 0.9


def test_queries_of_several_rules_and_own_lists_are_answered_together_and_exactly():
    P, Q = embeddings(6, 1), embeddings(300, 2)
    added = torch.arange(300).float().numpy() / 100
    rules = [Rules(), Rules(added=added), Rules(min_score=2.0), Rules(diversity=0.5)]
    queries = [Query(P, [NONE] * 6, 4, key=name, rules=one) for name, one in zip("abcd", rules, strict=True)]
    queries.append(Query(P[:2], [NONE] * 2, 4, key="own", own=[np.array([3, 5]), NONE]))
    queries.append(Query(P[2:3], [np.array([8])], 1, key="own", own=[np.array([8, 9])]))
    together = best_lists(queries, Q, index=None)
    for query, (found, scores) in zip(queries, together, strict=True):
        ((own, values),) = best_lists([query], Q, index=object())  # which cannot be searched
        np.testing.assert_array_equal(found, own)
        np.testing.assert_allclose(scores, values, rtol=1e-5)
    assert [sorted(row) for row in together[4][0].tolist()] == [[-1, -1, 3, 5], [-1] * 4]
    assert together[5][0].tolist() == [[9]]


def test_a_list_that_exclusions_leave_short_is_made_exactly():
    class Blind:
        """Finds nothing but the first entities."""

        def search(self, P, k):
            return np.tile(np.arange(k), (len(P), 1))

    P, Q = embeddings(3, 1), embeddings(5000, 2)
    excluded = [np.arange(4000), NONE, np.arange(4999)]
    ((found, scores),) = best_lists([Query(P, excluded, 5)], Q, Blind())
    exact = best_lists([Query(P, excluded, 5)], Q)[0]
    np.testing.assert_array_equal(found[[0, 2]], exact[0][[0, 2]])
    assert found[2].tolist() == [4999, -1, -1, -1, -1]
    assert scores[2, 1] == -np.inf


def test_many_rows_with_many_candidates_are_scored_in_bounded_memory():
    class All:
        """Finds the first entities for all."""

        def search(self, P, k):
            return np.tile(np.arange(k), (len(P), 1))

    P, Q = embeddings(300, 1, dim=64), embeddings(3000, 2, dim=64)
    excluded = [np.arange(1000), *[NONE] * 299]
    with Allocations() as made:
        ((found, scores),) = best_lists([Query(P, excluded, 1000)], Q, All())
    whole = 4 * 300 * 2000 * Q.shape[1]  # bytes of all candidates' embeddings
    assert made.peak < whole / 2
    products = (P @ Q[:2000].T).numpy()
    np.testing.assert_allclose(scores, np.take_along_axis(products, found, 1), rtol=1e-4, atol=1e-5)
    assert (found[0] >= 1000).all()
    np.testing.assert_allclose(scores[1:], -np.sort(-products[1:], 1)[:, :1000], rtol=1e-4, atol=1e-5)


def test_queries_among_some_entities_are_exact_also_with_an_index():
    class Never:
        def search(self, P, k):
            raise AssertionError("asked")

    P, Q, among = embeddings(1, 1), embeddings(100, 2), np.arange(0, 100, 3)
    found, _ = best_lists([Query(P, [NONE], 4, among, "key")], Q, Never())[0]
    assert found.tolist() == top_k(P, Q, 4, allow=among)[0].tolist()


def test_the_command_builds_measures_and_the_server_takes_it(tmp_path, capsys):
    path = tmp_path / "m.gramtower"
    shutil.copy(folder() / "history.gramtower", path)
    assert run(["index", str(path), "--recall", "0.9", "-k", "5", "--json", "--quiet"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["recall"] >= 0.9
    assert found["index"] == str(index_path(path))
    snapshot = Snapshot(source(path=path, index="faiss"))
    assert snapshot.index_facts.recall == found["recall"]
    everything = snapshot.recommend([snapshot.query(40, left=["a/b"])])[0][0]  # more than it visits: exact
    assert snapshot.right.names(everything[0][everything[0] >= 0]) == [
        key for key in model().recommend(["a/b"], k=40)[0][0].tolist() if key is not None
    ]


def test_an_index_of_another_model_is_refused(tmp_path):
    path = tmp_path / "m.gramtower"
    shutil.copy(folder() / "plain.gramtower", path)
    assert run(["index", str(path), "-k", "3", "--recall", "0.5", "--quiet"]) == 0
    shutil.copy(folder() / "history.gramtower", path)
    with pytest.raises(ValueError, match="another model"):
        Snapshot(source(path=path, index="faiss"))
    said = []
    models = Models([source(path=path, index="auto")], Metrics(), said.append)
    assert models.get().index is None
    assert "built for another model" in said[-1]
    with pytest.raises(ValueError, match=r"faiss.*hnsw|another model"):
        Snapshot(source(path=path, index="hnsw"))


def test_a_damaged_or_missing_index_is_refused(tmp_path):
    path = tmp_path / "m.gramtower"
    shutil.copy(folder() / "plain.gramtower", path)
    with pytest.raises(ValueError, match="gramtower index --kind faiss"):
        Snapshot(source(path=path, index="faiss"))
    index_path(path).write_bytes(b"x" * 100)
    with pytest.raises(ValueError, match="safetensors"):
        Snapshot(source(path=path, index="faiss"))


def changed_index(path, header=None, content=None):
    """The index of a model with other facts or other bytes, under checksums that belong to them."""
    assert run(["index", str(path), "-k", "3", "--recall", "0.5", "--quiet"]) == 0
    file = TensorFile(index_path(path), "gramtower-index", 1)
    facts, bytes_ = file.header | (header or {}), file.read("index").clone()
    file.close()
    if content is not None:
        bytes_ = torch.tensor(list(content), dtype=torch.uint8)
    write(index_path(path), "gramtower-index", 1, facts, {"index": bytes_})


@pytest.mark.parametrize(
    "change", [{"content": b"IxXX of a later version"}, {"header": {"reach": 0}}, {"header": {"kind": "trees"}}]
)
def test_an_index_that_cannot_be_used_is_refused_by_its_name_and_served_without(change, tmp_path):
    path, said = tmp_path / "m.gramtower", []
    shutil.copy(folder() / "plain.gramtower", path)
    changed_index(path, **change)
    with pytest.raises(ValueError, match=r"m\.gramtower\.index"):
        Snapshot(source(path=path, index="faiss"))
    models = Models([source(path=path, index="auto")], Metrics(), said.append)
    assert models.get().index is None
    assert "answers exactly, without the index" in said[-1]
