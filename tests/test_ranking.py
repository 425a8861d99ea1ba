"""The rules of lists against a plain double loop in float64: filters, allow lists, boosts, quotas and diversity."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from test_new_entities import ITEMS, USERS, fitted, user_table, users

import gramtower as gt
from gramtower.data.entity_table import EntityTable
from gramtower.retrieval.list_rules import Rules, make_rules
from gramtower.retrieval.topk import ranking

pl = pytest.importorskip("polars", reason="tables are read with polars")

M, N = 12, 60
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="lists of a GPU need one")
on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])


def ranked(device, P, Q, **given):
    """The ranking of arrays on a device."""
    return ranking(*(torch.from_numpy(one).to(device) for one in (P, Q)), **given)


def embeddings(whole, rows=M, n=N, dim=4):
    """Left and right embeddings; whole numbers have exact scores, many of them equal."""
    rng = np.random.default_rng(3)
    P, Q = ((rng.integers(-2, 3, (size, dim)) if whole else rng.normal(size=(size, dim))) for size in (rows, n))
    return P.astype(np.float32), Q.astype(np.float32)


def brute(P, Q, k, *, banned=None, added=None, groups=(), diversity=0.0, min_score=-math.inf):
    """One list after the other, one place after the other."""
    lists, (P, Q) = [], (P.astype(float), Q.astype(float))
    for i in range(len(P)):
        scores = {}
        for j in range(len(Q)):
            s = sum(P[i, d] * Q[j, d] for d in range(Q.shape[1])) + (0.0 if added is None else added[j])
            if s >= min_score and (banned is None or not banned[i, j]):
                scores[j] = s
        ranked = sorted(scores, key=lambda j: (-scores[j], j))
        size = 10 * k if diversity else len(ranked)
        while True:
            chosen = _chosen(ranked[:size], scores, Q, k, groups, diversity)
            if len(chosen) == k or size >= len(ranked):
                break
            size *= 2
        lists.append([(j, scores[j]) for j in chosen])
    return lists


def _chosen(pool, scores, Q, k, groups, diversity):
    chosen, norms = [], np.maximum(np.linalg.norm(Q, axis=1), 1e-12)
    low, high = min((scores[j] for j in pool), default=0), max((scores[j] for j in pool), default=0)
    while len(chosen) < k:
        best, most = None, -math.inf
        for j in pool:
            full = any(sum(bool(cells[j] & cells[l]) and v in cells[l] for l in chosen) >= limit
                       for cells, limit in groups for v in cells[j])  # fmt: skip
            if j in chosen or full:
                continue
            near = max((Q[j] @ Q[l] / norms[j] / norms[l] for l in chosen), default=0.0)
            worth = (1 - diversity) * (scores[j] - low) / ((high - low) or 1) - diversity * near
            worth = scores[j] if not diversity else worth
            if worth > most + 1e-9:
                best, most = j, worth
        if best is None:
            return chosen
        chosen.append(best)
    return chosen


def same(found, expected, k, exact=True):
    columns, values = found
    assert columns.shape == values.shape == (len(expected), k)
    for row, scores, wanted in zip(columns.tolist(), values.tolist(), expected, strict=True):
        assert row == [j for j, _ in wanted] + [-1] * (k - len(wanted))
        padded = [s for _, s in wanted] + [-math.inf] * (k - len(wanted))
        np.testing.assert_allclose(scores, padded, rtol=0, atol=0 if exact else 1e-5)


@on_devices
@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("whole", [True, False])
def test_added_numbers_and_a_least_score_are_exact(whole, loaded, device):
    P, Q = embeddings(whole, n=N if not loaded else 6000)
    added = np.random.default_rng(0).integers(-4, 5, len(Q)).astype(np.float32) / 2
    allow, rules = np.arange(0, len(Q), 2), Rules(added=added, min_score=2.0)
    found = ranked(device, P, Q, allow=allow, rules=rules).top(9, loaded=loaded)
    banned = np.ones((M, len(Q)), bool)
    banned[:, allow] = False
    same(found, brute(P, Q, 9, banned=banned, added=added, min_score=2.0), 9, whole)
    banned[:, :9] = True
    few = ranked(device, P[:2], Q, allow=allow, deny=np.arange(9), rules=rules)  # whose candidates are not copied
    assert len(few.Q) == len(Q)
    same(few.top(9, loaded=loaded), brute(P[:2], Q, 9, banned=banned, added=added, min_score=2.0), 9, whole)


@on_devices
@pytest.mark.parametrize("whole", [True, False])
def test_each_row_chooses_among_its_own_columns_only(whole, device):
    P, Q = embeddings(whole)
    rng = np.random.default_rng(1)
    own, exclude = rng.random((M, N)) < 0.2, rng.random((M, N)) < 0.3
    own[4] = False
    deny, among, added = np.arange(5), np.arange(0, N, 3), np.arange(N, dtype=np.float32)
    banned = ~own | exclude
    banned[:, deny] = True
    for rules, more in ((Rules(), {}), (Rules(among=among, added=added), {"added": added})):
        if rules.among is not None:
            banned |= ~np.isin(np.arange(N), among)
        pairs = {"own": sp.csr_matrix(own.astype(float)), "exclude": sp.csr_matrix(exclude)}
        made = ranked(device, P, Q, **pairs, deny=deny, rules=rules)
        same(made.top(6), brute(P, Q, 6, banned=banned, **more), 6, whole)
        same(made.rows(slice(3, 7)).top(6), brute(P[3:7], Q, 6, banned=banned[3:7], **more), 6, whole)


def codes(cells):
    values, widest = sorted(set().union(*cells)), max(map(len, cells))
    return np.array([[values.index(v) for v in sorted(c)] + [-1] * (widest - len(c)) for c in cells])


@on_devices
@pytest.mark.parametrize("chosen", [None, np.arange(1, N, 2)])
@pytest.mark.parametrize("diversity", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("quotas", [0, 1, 2])
def test_quotas_and_diversity_are_those_of_one_choice_after_the_other(quotas, diversity, chosen, device):
    P, Q = embeddings(whole=diversity == 0)
    rng = np.random.default_rng(2)
    genre = [set(rng.choice(5, rng.integers(0, 3), replace=False).tolist()) for _ in range(N)]
    brand = [{int(b)} for b in rng.integers(0, 3, N)]
    groups = [(genre, 2), (brand, 3)][:quotas]
    rules = Rules(groups=tuple((codes(cells), most) for cells, most in groups), diversity=diversity, min_score=-3.0)
    banned = np.zeros((M, N), bool) if chosen is None else np.tile(~np.isin(np.arange(N), chosen), (M, 1))
    for k in (3, 8, N):
        made = ranked(device, P, Q, allow=chosen, rules=rules).top(k)
        wanted = brute(P, Q, k, banned=banned, groups=groups, diversity=diversity, min_score=-3.0)
        same(made, wanted, k, exact=diversity == 0)


FRAME = {
    "id": [f"i{j}" for j in range(8)],
    "category": ["books", "books", "films", "films", "music", None, "books|films", "music"],
    "year": [1990, 1995, 2000, None, 2005, 2010, 2015, 2020],
    "in_stock": [True, False, True, True, None, True, False, True],
    "flag": ["True", "false", "TRUE", "", None, "true", "False", "true"],
}


@pytest.fixture
def table():
    ids = np.array([*FRAME["id"], "not in the table"], object)
    return EntityTable.of(pl.DataFrame(FRAME), ids, len(ids))


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("category == 'books'", [0, 1, 6]),
        ("'books' in category", [0, 1, 6]),
        ("category == 'books' and in_stock", [0]),
        ("category in ['music', 'films'] and not in_stock", [4, 6]),
        ("category not in ('music', 'films')", [0, 1, 5, 8]),
        ("category != 'books'", [2, 3, 4, 5, 7, 8]),
        ("1995 <= year < 2010 or year == 2020", [1, 2, 4, 7]),
        ("not (year > -1e3)", [3, 8]),
        ("year", [0, 1, 2, 4, 5, 6, 7]),
        ("flag", [0, 2, 5, 7]),
        ("in_stock == True", [0, 2, 3, 5, 7]),
        ("category == 'opera'", []),
        ("year > 2000 and year < 1990", []),
        ({"category": ["music", "books"], "year": {"min": 1995}}, [1, 4, 6, 7]),
        ({}, list(range(9))),
    ],
)
def test_filters_select_what_they_say(table, where, expected):
    assert table.matching(where).tolist() == expected


@pytest.mark.parametrize(
    "where",
    [
        "categry == 'books'", "category = 'books'", "", "category", "category > 'a'", "year > 'a'", "3", "year is 3",
        "__import__('os').system('true')", "year.__class__", "[x for x in year]", "year + 1 > 3", "lambda: 1",
        "category == year", "year in 3", "year == [3]", "year == None", "f'{year}'", "year\0", "(" * 5000,
        "not " * 2400, "a" * 10_001, "{[]} == year", {"categry": 3}, {"category": {"min": 3}}, 7,
        "year == 'a'", "year != 'a'", "year in [1990, 'a']", {"year": "a"},
    ],
)  # fmt: skip
def test_expressions_that_are_none_are_refused_and_never_executed(table, where):
    with pytest.raises(ValueError, match=r"^where: "):
        table.matching(where)


def rules(table, counts=None, **given):
    return make_rules(lambda: table, lambda: np.arange(9) if counts is None else counts, 9, **given)


def test_boosts_add_cells_arrays_and_popularity(table):
    year = np.array([1990, 1995, 2000, 0, 2005, 2010, 2015, 2020, 0])
    stock = np.array([1, 0, 1, 1, 0, 1, 0, 1, 0])
    expected = 0.001 * year - 2 * stock + 0.5 * np.log(1 + np.arange(9))
    np.testing.assert_allclose(
        rules(table, boost={"year": 0.001, "in_stock": -2}, popularity=0.5).added, expected, 1e-6
    )
    np.testing.assert_array_equal(rules(table, boost=list(range(9))).added, np.arange(9))
    assert rules(table, boost=np.zeros(9)).added is None


@pytest.mark.parametrize(
    "given",
    [
        {"boost": {"yeer": 1}}, {"boost": {"category": 1}}, {"boost": {"year": math.nan}}, {"boost": {"year": "1"}},
        {"boost": {"year": 1e300}}, {"boost": [1.0] * 8}, {"boost": [1.0] * 8 + [math.inf]}, {"boost": "year"},
        {"boost": [["a"] * 9]}, {"popularity": math.inf}, {"popularity": None}, {"diversity": 1.5}, {"diversity": -1},
        {"at_most": {"categry": 1}}, {"at_most": {"category": 0}}, {"at_most": 3}, {"at_most": {"category": 1.5}},
        {"min_score": math.nan}, {"min_score": "3"},
    ],
)  # fmt: skip
def test_bad_rules_are_refused_by_name(table, given):
    with pytest.raises(ValueError, match=f"^{next(iter(given))}"):
        rules(table, **given)


@pytest.fixture(scope="module")
def model():
    pairs = sp.random(M, 9, 0.4, "coo", random_state=1)
    items = [*FRAME["id"], "not in the table"]
    given = gt.Interactions.from_arrays([f"u{i}" for i in pairs.row], [items[j] for j in pairs.col])
    return gt.TwoTower(dim=3, hidden=(), max_iterations=3, device="cpu").fit(given)


@on_devices
def test_lists_of_a_model_are_those_of_brute_force(model, tmp_path, device):
    fitted = model.fitted_
    own = gt.Interactions.from_arrays(["u0", "u0", "u1", "u2", "u1"], ["i1", "i7", "i2", "i0", "never seen"])
    options = dict(table=FRAME, where="year >= 1990", boost={"in_stock": 0.2}, popularity=-0.1, at_most={"category": 1})
    order = {key: row for row, key in enumerate(model.right_.ids)}
    cells = {
        key: set() if c is None else set(c.split("|")) for key, c in zip(FRAME["id"], FRAME["category"], strict=True)
    }
    stock = dict(zip(FRAME["id"], FRAME["in_stock"], strict=True))
    added = [0.2 * bool(stock.get(key)) - 0.1 * np.log1p(fitted.popularity[row]) for key, row in order.items()]
    groups = [([cells.get(key, set()) for key in order], 1)]
    dated = [key in stock and FRAME["year"][FRAME["id"].index(key)] is not None for key in order]
    P, Q = model.embed(side="left"), model.embed(side="right")
    for allow in (None, ["i0", "i1", "i2", "i4"], own):
        banned = (fitted.seen.toarray() > 0) | ~np.array(dated)
        if allow is own:
            for i, user in enumerate(model.left_.ids):
                mine = [b for a, b in zip(["u0", "u0", "u1", "u2"], ["i1", "i7", "i2", "i0"], strict=True) if a == user]
                banned[i] |= [key not in mine for key in order]
        elif allow:
            banned |= [key not in allow for key in order]
        expected = brute(P, Q, 5, banned=banned, added=added, groups=groups)
        ids, scores = model.recommend(model.left_.ids, 5, allow=allow, **options)
        same((np.array([[order.get(key, -1) for key in row] for row in ids]), scores), expected, 5, exact=False)
        path = tmp_path / "lists.csv"
        model.recommend_all(path, 5, allow=allow, device=device, **options)
        written = pl.read_csv(path)
        assert written["right"].to_list() == [model.right_.ids[j] for row in expected for j, _ in row]


def test_new_entities_have_allowed_pairs_by_their_ids_or_rows():
    model = fitted(left=user_table(range(USERS)))
    new = users([USERS, USERS + 1])
    own = {f"u{USERS}": ["i3", "i1"], f"u{USERS + 1}": ["i2"]}
    columns = {key: row for row, key in enumerate(model.right_.ids)}
    matrix = sp.lil_matrix((2, ITEMS))
    for row, keys in enumerate(own.values()):
        matrix[row, [columns[key] for key in keys]] = 1
    by_id = gt.Interactions.from_arrays(*zip(*((a, b) for a, keys in own.items() for b in keys), strict=True))
    for allow in (by_id, matrix.tocsr()):
        found = model.recommend(left_features=new, k=3, allow=allow)[0]
        assert [{key for key in row if key is not None} for row in found.tolist()] == [
            set(keys) for keys in own.values()
        ]


@pytest.mark.parametrize("package", ["polars", "pandas"])
def test_a_column_of_ids_is_a_list_of_ids(model, package):
    column = pytest.importorskip(package).Series(["i0", "i7"])
    found, _ = model.recommend(["u1"], 3, allow=column, exclude_seen=False)
    assert sorted(found[0][:2]) == ["i0", "i7"]
    assert found[0][2] is None
    assert not set(model.recommend(["u1"], 9, deny=column)[0][0]) & {"i0", "i7"}


def test_tables_and_allowed_pairs_that_say_nothing(model):
    with pytest.raises(ValueError, match="table"):
        model.recommend(["u1"], where="year > 3")
    with pytest.raises(ValueError, match="as_frame"):
        model.recommend(["u1"], table=FRAME)
    with pytest.warns(Warning, match="allow"):
        ids, scores = model.recommend(["u1"], 3, allow=gt.Interactions.from_arrays(["nobody"], ["i1"]))
    assert ids.tolist() == [[None] * 3]
    assert np.isneginf(scores).all()


def test_ids_of_a_table_are_in_a_column_called_as_in_the_data(model):
    pairs = gt.Interactions.from_arrays([1, 1, 2, 3], [7, 8, 9, 8], left_name="user", right_name="film")
    small = gt.TwoTower(dim=2, max_iterations=1, select=False, device="cpu").fit(pairs)
    table = pl.DataFrame({"title": ["a", "b"], "film": [8, 9], "new": [True, False]})
    found = small.recommend([1, 2], 3, table=table, where="new", exclude_seen=False, as_frame=True)
    assert found.select("user", "film", "title").rows() == [(1, 8, "a"), (2, 8, "a")]
    assert set(small.similar([9], k=2, table=table, as_frame=True)["title"]) == {"a", None}
    with pytest.raises(ValueError, match=r"ids such as 7$"):
        small.recommend([1], table=table.drop("film"), where="new")


def test_lists_on_parts_of_a_file_do_not_mix_rules(model):
    from gramtower.model.fitted import _marks

    made = {str(_marks(model.fitted_.ids, ranking(*map(torch.from_numpy, embeddings(True)), rules=one))) for one in (
        Rules(), Rules(min_score=1.0), Rules(diversity=0.5), Rules(added=np.ones(N, np.float32)),
        Rules(groups=((np.zeros((N, 1), int), 1),)), Rules(groups=((np.zeros((N, 1), int), 2),)),
    )}  # fmt: skip
    assert len(made) == 6
