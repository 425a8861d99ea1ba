"""Lists and metrics of random small models against sorted dense scores, also while a model is updated or served.

Embeddings of half of the models are small whole numbers, so that many scores are equal and all are exact. What an
entity has seen is what the test knows of the pairs it made, not what the model says.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import warnings
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from harness import Fuzz

import gramtower as gt
from gramtower.data import list_files
from gramtower.data.tables import FeatureTable
from gramtower.serving.ann_index import KINDS, best_lists, build_index, index_path, read_index, write_index
from gramtower.serving.snapshot import Snapshot, Source

pl = pytest.importorskip("polars", reason="tables are read with polars")

WAYS = ("matrix", "text", "numbers", "one set", "tables", "history")
ASKED = 12  # questions to a model
METRICS = ["recall@3", "precision@4", "ndcg@5", "map@2", "hit@1", "mrr@4", "paper_map@3", "coverage@2", "auc", "mrr"]


@dataclasses.dataclass
class World:
    """A model, and all that is known of it from elsewhere."""

    model: gt.TwoTower
    way: str
    train: dict[Any, set[Any]]
    further: dict[Any, set[Any]]
    added: set[Any]  # right entities that were not there in training
    late: set[Any]  # left ones
    exact: bool = False

    @property
    def left(self):
        return list(range(len(self.model.left_))) if self.model.left_.ids is None else self.model.left_.ids.tolist()

    @property
    def right(self):
        return list(range(len(self.model.right_))) if self.model.right_.ids is None else self.model.right_.ids.tolist()

    def seen(self, key):
        return self.train.get(key, set()) | self.further.get(key, set())

    def pairs(self, found):
        """Pairs of ids as the model takes them."""
        if self.model.left_.ids is None:
            rows, columns = zip(*found, strict=True) if found else ((), ())
            return sp.csr_matrix((np.ones(len(found)), (rows, columns)), shape=self.model.fitted_.shape)
        return gt.Interactions.from_arrays(*zip(*found, strict=True)) if found else None

    def scores(self, P=None):
        P = self.model.left_.embeddings.numpy() if P is None else P
        return P.astype(np.float64) @ self.model.right_.embeddings.numpy().astype(np.float64).T


def table(side, ids, numbers):
    kinds = ["abc"[int(10 * x) % 3] for x in numbers]
    return FeatureTable({side: list(ids), "x": list(numbers), "kind": kinds}, side, numeric=["x"], categorical=["kind"])


def make_world(rng):
    way, random = rng.choice(WAYS), np.random.default_rng(rng.getrandbits(32))
    m, n = rng.randint(1, 9), rng.randint(1, 12)
    n = m if way == "one set" else n
    left = [f"u{i}" for i in range(m)] if way != "numbers" else [10 * i - 7 for i in range(m)]
    right = left if way == "one set" else [f"i{j}" for j in range(n)] if way != "numbers" else list(range(5, 5 + n))
    dense = random.random((m, n)) < rng.choice([0.15, 0.4, 0.8])
    if way == "one set":
        np.fill_diagonal(dense, False)
    if not dense.any():
        dense[0, -1] = True
    held = dense & (random.random((m, n)) < 0.3) if rng.random() < 0.5 else np.zeros_like(dense)
    if not (dense & ~held).any() or (m, n) == (1, 1):
        held[:] = False
    matrix = sp.csr_matrix((dense & ~held).astype(np.float32))
    if way == "matrix":
        left, right = list(range(m)), list(range(n))
        pairs, validation = matrix, sp.csr_matrix(held.astype(np.float32))
    else:
        same = {"same_entities": True} if way == "one set" else {}
        pairs = gt.Interactions(matrix, np.array(left), np.array(right), **same)
        validation = gt.Interactions(sp.csr_matrix(held.astype(np.float32)), np.array(left), np.array(right), **same)
    settings = dict(dim=rng.randint(1, 3), max_iterations=1, device="cpu", seed=rng.randrange(9))
    features = {}
    if way == "tables":
        settings |= {"hidden": (2,), "normalize": rng.random() < 0.5, "refine": rng.random() < 0.5}
        features = {side: table(side.split("_")[0], ids, random.random(len(ids)).round(3))
                    for side, ids in (("left_features", left), ("right_features", right))}  # fmt: skip
    elif way == "history":
        settings |= {"hidden": (2,)}
        features = {"left_features": ["id", "history"], "right_features": table("right", right, random.random(n))}
    else:
        settings |= {"hidden": ()}
    model = gt.TwoTower(**settings).fit(pairs, **features, validation=validation if held.any() else None)
    where = {"train": dense & ~held, "further": held}
    known = {name: defaultdict(set) for name in where}
    for name, mask in where.items():
        for i, j in np.argwhere(mask).tolist():
            known[name][left[i]].add(right[j])
    if way == "one set":
        for key in left:
            known["further"][key].add(key)
    world = World(model, way, known["train"], known["further"], set(), set())
    if way in ("tables", "history") and rng.random() < 0.6:
        new = [f"new{j}" for j in range(rng.randint(1, 3))]
        given = {"right_features": table("right", [*right[:1], *new], random.random(1 + len(new)))}
        late = [f"late{i}" for i in range(rng.randint(1, 2))]
        if way == "tables":
            given["left_features"] = table("left", late, random.random(len(late)))
        else:
            shown = [rng.sample([*right, *new], rng.randint(0, n)) for _ in late]
            given |= {"histories": shown, "left_ids": late}
            for key, history in zip(late, shown, strict=True):
                world.further[key] |= set(history)
        model.add(**given)
        world.added, world.late = set(new), set(late)
    if rng.random() < 0.5:
        draw = lambda rows: torch.from_numpy(random.integers(-1, 2, (rows, model.dim_)).astype(np.float32))  # noqa: E731
        sides = {name: dataclasses.replace(side, embeddings=draw(len(side)))
                 for name, side in (("left", model.left_), ("right", model.right_))}  # fmt: skip
        model.fitted_, world.exact = dataclasses.replace(model.fitted_, **sides), True
    return world


def compare(world, scores, allowed, k, ids, values, exact):
    """One list with the dense scores of a row; ``allowed`` are the columns that may be in it."""
    right, n = world.right, len(world.right)
    columns = sorted(allowed, key=lambda j: (-scores[j], j))[: min(k, n)]
    places = [j for j, value in zip(ids, values, strict=True) if value > -np.inf]
    assert len(places) == len(columns), (places, columns)
    assert all(value == -np.inf for value in values[len(places) :])
    found = [right.index(key) for key in places]
    assert len(set(found)) == len(found)
    assert set(found) <= set(allowed)
    if exact:
        assert found == columns, (found, columns)
    np.testing.assert_allclose(values[: len(found)], scores[columns], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(scores[found], scores[columns], rtol=1e-4, atol=1e-5)


def choices(world, rng):
    """Options of a call, and for a left entity and what it has seen, the columns that are left to choose from."""
    right, options, rules = world.right, {}, []
    if rng.random() < 0.4:
        options["allow"] = [rng.choice(right) for _ in range(rng.randint(0, 6))]
        rules.append(lambda left, key, allow=set(options["allow"]): key in allow)
    if rng.random() < 0.4:
        options["deny"] = [rng.choice(right) for _ in range(rng.randint(0, 4))]
        rules.append(lambda left, key, deny=set(options["deny"]): key not in deny)
    if rng.random() < 0.2:
        options["candidates"] = "trained"
        rules.append(lambda left, key: key not in world.added)
    if rng.random() < 0.3:
        options["exclude_seen"] = False
    if rng.random() < 0.3:
        out = [(rng.choice(world.left), rng.choice(right)) for _ in range(rng.randint(1, 12))]
        options["exclude"] = world.pairs(list(dict.fromkeys(out)))
        rules.append(lambda left, key, out=set(out): (left, key) not in out)

    def allowed(left, seen):
        seen = seen if options.get("exclude_seen", True) else set()
        return [j for j, key in enumerate(right) if key not in seen and all(rule(left, key) for rule in rules)]

    return options, allowed


def ask_known(world, rng):
    options, allowed = choices(world, rng)
    asked = [rng.choice(world.left) for _ in range(rng.randint(1, 4))]
    k, scores = rng.randint(1, len(world.right) + 4), world.scores()
    ids, values = world.model.recommend(asked, k, **options)
    for key, row, numbers in zip(asked, ids.tolist(), values, strict=True):
        compare(world, scores[world.left.index(key)], allowed(key, world.seen(key)), k, row, numbers, world.exact)


def ask_new(world, rng):
    """New left entities, some with the id of a known one."""
    if world.way not in ("tables", "history"):
        return ask_known(world, rng)
    options, _ = choices(world, rng)
    options.pop("exclude", None)
    count, k = rng.randint(1, 3), rng.randint(1, len(world.right) + 2)
    if world.way == "tables":
        called = rng.sample([*world.left, "x", "y", "z"], count)
        given = {"left_features": {"left": called, "x": [rng.random() for _ in called], "kind": ["a"] * count}}
        histories = [world.seen(key) for key in called]
    else:
        histories = [set(rng.sample(world.right, rng.randint(0, len(world.right)))) for _ in range(count)]
        given = {"histories": [sorted(history) for history in histories]}
    P = world.model.embed(**given)
    ids, values = world.model.recommend(k=k, **given, **options)
    allow, deny = set(options.get("allow", world.right)), set(options.get("deny", ()))
    deny |= world.added if options.get("candidates") else set()
    for row, history in enumerate(histories):
        left_out = deny | (history if options.get("exclude_seen", True) else set())
        allowed = [j for j, key in enumerate(world.right) if key in allow and key not in left_out]
        compare(world, world.scores(P)[row], allowed, k, ids[row].tolist(), values[row], exact=False)
    return None


def ask_similar(world, rng):
    side = rng.choice(["left", "right"])
    keys = world.left if side == "left" else world.right
    directed = world.model.has_direction(side)
    if not directed.any():
        return
    asked, k = rng.choice([key for key, there in zip(keys, directed, strict=True) if there]), rng.randint(1, len(keys))
    Q = world.model.embed(side=side).astype(np.float64)
    unit = Q / np.maximum(np.linalg.norm(Q, axis=1, keepdims=True), 1e-12)
    place = keys.index(asked)
    ids, values = world.model.similar([asked], side, k)
    allowed = [j for j in range(len(keys)) if j != place and directed[j]]
    swapped = World(world.model, world.way, {}, {}, set(), set())
    shown = swapped if side == "right" else dataclasses.replace(swapped, model=_Turned(world.model))
    compare(shown, unit @ unit[place], allowed, k, ids[0].tolist(), values[0], exact=False)


class _Turned:
    """The left side of a model in the place of the right one."""

    def __init__(self, model):
        self.left_, self.right_ = model.right_, model.left_


def ask_score(world, rng):
    pairs = [(rng.randrange(len(world.left)), rng.randrange(len(world.right))) for _ in range(rng.randint(1, 5))]
    rows, columns = map(list, zip(*pairs, strict=True))
    found = world.model.score([world.left[i] for i in rows], [world.right[j] for j in columns])
    np.testing.assert_allclose(found, world.scores()[rows, columns], rtol=1e-4, atol=1e-5)


def metrics_of(order, relevant, allowed):
    """The metrics of one user by loops; ``order`` are all columns that are ranked, best first."""
    hits = [column in relevant for column in order]
    at = lambda k: sum(hits[:k])  # noqa: E731
    gain = lambda places: sum(1 / np.log2(place + 2) for place in places)  # noqa: E731
    places = [place for place, hit in enumerate(hits) if hit]
    found = {"recall@3": at(3) / len(relevant), "precision@4": at(4) / 4, "hit@1": float(at(1) > 0)}
    found["ndcg@5"] = gain(p for p in places if p < 5) / gain(range(min(5, len(relevant))))
    found["map@2"] = sum(at(p + 1) / (p + 1) for p in places if p < 2) / min(2, len(relevant))
    found["paper_map@3"] = sum(at(p) / p for p in (1, 2, 3)) / 3
    found["mrr@4"] = 1 / (places[0] + 1) if places and places[0] < 4 else 0.0
    found["mrr"] = 1 / (places[0] + 1)
    return found


def ask_evaluate(world, rng):
    """Metrics of random test pairs, some of them seen, excluded or of entities that nobody knows."""
    options, _ = choices(world, rng)
    for name in ("allow", "deny"):
        options.pop(name, None)
    trained = options.get("candidates") == "trained"
    left, described = list(world.left), {}
    if world.way == "history" and rng.random() < 0.5:
        left.append("x")
        items = [item for item in world.right if item not in world.added]
        described = {key: set(rng.choices(items, k=3)) for key in rng.sample(left, rng.randint(1, len(left)))}
        shown = [(key, item) for key, history in described.items() for item in sorted(history)]
        options["histories"] = gt.Interactions.from_arrays(*zip(*shown, strict=True))
    test = {(rng.choice(left), rng.choice(world.right)) for _ in range(rng.randint(1, 15))}
    test = {pair for pair in test if pair[0] != "x" or "x" in described}
    test = sorted((pair for pair in test if pair[0] != pair[1] or world.way != "one set"), key=str)
    if not test:
        return
    if described and not set(described) & {key for key, _ in test}:
        del options["histories"]  # of nobody who is tested
        described = {}
    strange = world.model.left_.ids is not None and world.way != "numbers" and rng.random() < 0.3
    given = world.pairs([*test, ("stranger", test[0][1]), (test[0][0], "strange")] if strange else test)
    left_out = set()
    if options.get("exclude") is not None:
        left_out = _ids(world, options["exclude"])
    use_seen, scores, right, tested = options.get("exclude_seen", True), world.scores(), world.right, set(test)
    scores = np.vstack([scores, np.zeros(len(right))])  # of "x", where it is tested
    values, aucs, shown, pairs = defaultdict(list), [], set(), 0
    for row, key in enumerate(left):
        out = {item for item in right if (key, item) in left_out}
        if use_seen:
            out |= world.train.get(key, set()) | described.get(key, set())
            spared = {item for item in world.further.get(key, set()) if (key, item) in tested and key not in world.late}
            out |= world.further.get(key, set()) - spared
        allowed = [j for j, item in enumerate(right) if item not in out and not (trained and item in world.added)]
        relevant = {j for j in allowed if (key, right[j]) in tested}
        if not relevant:
            continue
        pairs += len(relevant)
        order = sorted(allowed, key=lambda j, row=row: (-scores[row, j], j))
        shown |= set(order[:2])
        for name, value in metrics_of(order, relevant, allowed).items():
            values[name].append(value)
        others = [j for j in allowed if j not in relevant]
        if others:
            beaten = [np.mean([(scores[row, r] > scores[row, j]) + 0.5 * (scores[row, r] == scores[row, j])
                               for j in others]) for r in relevant]  # fmt: skip
            aucs.append(np.mean(beaten))
    if not values:
        with pytest.raises(ValueError, match="test"):
            world.model.evaluate(given, METRICS, **options)
        return
    found = world.model.evaluate(given, METRICS, **options)
    assert found.users == len(values["mrr"])
    assert found.pairs == pairs
    if world.exact and not described:
        for name, numbers in values.items():
            assert found[name] == pytest.approx(np.mean(numbers), abs=1e-9), name
        assert found["auc"] == pytest.approx(np.mean(aucs) if aucs else np.nan, abs=1e-9, nan_ok=True)
        candidates = len(right) - (len(world.added) if trained else 0)
        assert found["coverage@2"] == pytest.approx(len(shown) / candidates)


def _ids(world, pairs):
    matrix = (pairs if sp.issparse(pairs) else pairs.matrix).tocoo()
    left = world.left if sp.issparse(pairs) else pairs.left_ids.tolist()
    right = world.right if sp.issparse(pairs) else pairs.right_ids.tolist()
    return {(left[i], right[j]) for i, j in zip(matrix.row.tolist(), matrix.col.tolist(), strict=True)}


QUESTIONS = (ask_known, ask_known, ask_new, ask_similar, ask_score, ask_evaluate, ask_evaluate)


def test_answers_are_those_of_sorted_dense_scores():
    fuzz, world = Fuzz("lists", small=120), None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, rng in enumerate(fuzz):
            world = make_world(rng) if number % ASKED == 0 else world
            question = rng.choice(QUESTIONS)
            fuzz.attempt((question.__name__, world.way), lambda ask=question, world=world, rng=rng: ask(world, rng), ())
            fuzz.outcomes[f"{question.__name__}, {world.way}"] += 1


class Stop(Exception):
    pass


def test_lists_of_all_that_stop_and_go_on(tmp_path, monkeypatch):
    """`recommend_all` stopped after a random part, sometimes twice, ends in the bytes of a run that was not stopped."""
    fuzz, world = Fuzz("lists of all", small=12), None
    for number, rng in enumerate(fuzz):
        world = make_world(rng) if number % ASKED == 0 else world
        options, allowed = choices(world, rng)
        k = rng.randint(1, len(world.right) + 3)
        monkeypatch.setattr(list_files, "_ANSWERS", min(k, len(world.right)) * rng.randint(1, 4))
        ending = rng.choice(["csv", "parquet", "tsv"])
        out, whole = tmp_path / f"lists.{ending}", tmp_path / f"whole.{ending}"

        def stop(after):
            def progress(done, total):
                if done >= after:
                    raise Stop

            return progress

        def work(world=world, out=out, whole=whole, k=k, options=options, rng=rng, stop=stop):
            world.model.recommend_all(whole, k, device="cpu", **options)
            for _ in range(rng.randint(0, 2)):
                try:
                    after = stop(rng.randint(1, len(world.left)))
                    world.model.recommend_all(out, k, device="cpu", progress=after, **options)
                except Stop:
                    continue
            return world.model.recommend_all(out, k, device="cpu", **options)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fuzz.attempt((world.way, ending, k), work, ())
        assert out.read_bytes() == whole.read_bytes(), fuzz.number
        assert not out.with_name(out.name + ".parts").exists()
        if ending == "parquet":
            scores, rows = world.scores(), defaultdict(list)
            for left, _, right, score in pl.read_parquet(out).rows():
                rows[left].append((right, score))
            for row, key in enumerate(world.left):
                ids, values = zip(*rows[key], strict=True) if rows[key] else ((), ())
                seen = allowed(key, world.seen(key))
                compare(world, scores[row], seen, k, ids, np.array(values), world.exact)


def test_served_answers_and_indexes(tmp_path):
    """Snapshots answer as models do, alone and together, with exact lists and with an index, whole or damaged."""
    pytest.importorskip("faiss")
    fuzz, world = Fuzz("snapshots", small=24), None
    for number, rng in enumerate(fuzz):
        if number % ASKED == 0:
            world, path = make_world(rng), tmp_path / f"{number // ASKED}"
            world.model.save(path)
            loaded = gt.load(path)  # its towers embed the entities of training anew
            same = torch.equal(loaded.right_.embeddings, world.model.right_.embeddings)
            world = dataclasses.replace(world, model=loaded, exact=world.exact and same)
            index_path(path).unlink(missing_ok=True)
            kind = rng.choice([None, *(kind for kind in KINDS if kind != "hnsw")])
            if kind is not None:
                left, right = world.model.left_, world.model.right_
                made, facts = build_index(left.embeddings, right.embeddings, right.ids, kind, 3, 0.01, number)
                write_index(index_path(path), made, facts)
            snapshot = Snapshot(Source("m", path))
            assert (snapshot.index is None) == (kind is None)
        queries, asked = [], []
        for _ in range(rng.randint(1, 4)):
            options, _ = choices(world, rng)
            for name in ("exclude", "candidates"):
                options.pop(name, None)
            keys, k = [rng.choice(world.left) for _ in range(rng.randint(1, 3))], rng.randint(1, len(world.right) + 2)
            queries.append(snapshot.query(k, left=keys, **options))
            asked.append((keys, k, options))
        answers, near = (
            fuzz.attempt(
                (world.way, asked), lambda q=queries, s=snapshot, i=index: best_lists(q, s.right.embeddings, i), ()
            )
            for index in (None, snapshot.index)
        )
        for (keys, k, options), (found, values), (close, numbers) in zip(asked, answers, near, strict=True):
            ids, scores = world.model.recommend(keys, k, **options)
            width = found.shape[1]
            names = np.array([[world.right[j] if j >= 0 else None for j in row] for row in found.tolist()], object)
            filled = scores[:, :width] > -np.inf
            np.testing.assert_allclose(values, scores[:, :width], rtol=1e-4, atol=1e-5)
            if world.exact:
                assert (names[filled] == ids[:, :width][filled].astype(object)).all(), (names, ids)
            assert ((close >= 0).sum(1) == filled.sum(1)).all(), "an index gave fewer answers than there are"
            assert (numbers <= values + 1e-4).all()


def test_damaged_indexes_are_refused_by_name(tmp_path):
    pytest.importorskip("faiss")
    from test_fuzz_models import refused_by_name, spoilt

    fuzz, path = Fuzz("indexes", small=40), tmp_path / "index"
    random = np.random.default_rng(0)
    P, Q = (torch.from_numpy(random.normal(size=(size, 3)).astype(np.float32)) for size in (9, 30))
    files = []
    for kind in ("faiss", "faiss-hnsw"):
        made, facts = build_index(P, Q, None, kind, 3, 0.5)
        write_index(path, made, facts)
        files.append((path.read_bytes(), facts, made.search(P.numpy(), 3)))
    for rng in fuzz:
        whole, facts, expected = rng.choice(files)
        sealed = spoilt(path, ("gramtower-index", 1), rng, whole, contents=False)
        found = refused_by_name(fuzz, path, lambda facts=facts: read_index(path, facts.model))
        if found is not None:
            close = found[0].search(P.numpy(), 3)
            assert not sealed or (close == expected).all()


def test_threads_that_ask_while_a_model_is_updated():
    """Every answer is that of the model before or after one of the updates, never of half of one."""
    fuzz = Fuzz("threads", small=4)
    for rng in fuzz:
        world = make_world(rng)
        while world.way not in ("text", "one set", "numbers") or world.exact:
            world = make_world(rng)
        model, left, faults, answers = world.model, world.left, [], []
        known, stop = [answers_of(model, left)], threading.Event()

        def ask(model=model, left=left, answers=answers, faults=faults, stop=stop):
            while not stop.is_set():
                try:
                    answers.append(answers_of(model, left))
                except Exception as error:
                    faults.append(error)
                    return

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for number in range(3):
                new = f"late{number}" if world.way != "numbers" else 10**6 + number
                same = {"same_entities": True} if world.way == "one set" else {}
                more = gt.Interactions.from_arrays([left[0], new], [world.right[0], world.right[-1]], **same)
                fuzz.attempt(world.way, lambda model=model, more=more: model.update(more, iterations=1), ())
                known.append(answers_of(model, left))
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert not faults, faults[0]
        possible = [json.dumps(one) for one in known]
        for one in answers:
            assert json.dumps(one) in possible, fuzz.number
        fuzz.outcomes["answers during updates"] += len(answers)


def answers_of(model, left):
    ids, scores = model.recommend(left, 3)
    return [ids.tolist(), [[float(f"{x:.4g}") for x in row] for row in scores.tolist()]]
