"""Both sides one set of entities: told from the data or given, and no entity is recommended to itself."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp

import gramtower as gt
from gramtower.cli.program import run
from gramtower.data.interactions import Interactions


def graph(size=60, seed=0, self_links=0):
    """Nodes of two groups linked within them, never to themselves."""
    rng = np.random.default_rng(seed)
    linked = (np.add.outer(np.arange(size), np.arange(size)) % 2 == 0) & (rng.random((size, size)) < 0.7)
    linked &= ~np.eye(size, dtype=bool)
    linked[np.arange(self_links), np.arange(self_links)] = True
    return sp.csr_matrix(linked, dtype=np.float32)


def ratings(size=60, seed=0):
    """Users and films, both numbered from 0; a user sees a film of its number as any other."""
    return sp.random(size, size, 0.4, "csr", random_state=seed, data_rvs=np.ones)


def small(**options):
    return gt.TwoTower(**dict(dim=6, hidden=(), max_iterations=8, device="cpu", select=False, omega=0.05) | options)


@pytest.mark.parametrize("name", ["n{}".format, int, str], ids=["names", "numbers", "written numbers"])
def test_links_between_nodes_are_told_from_users_and_films(name):
    ids = [name(i) for i in range(60)]
    nodes = Interactions.from_matrix(graph(), ids, ids)
    films = Interactions.from_matrix(ratings(), ids, ids)
    assert nodes.one_set
    assert "one set of entities" in repr(nodes)
    assert not films.one_set
    assert "one set" not in repr(films)
    assert Interactions.from_matrix(graph(self_links=1), ids, ids).one_set
    assert not Interactions.from_matrix(graph(), ids, [f"other {i}" for i in ids]).one_set
    assert not Interactions.from_matrix(graph(), ids, ids, same_entities=False).one_set
    assert Interactions.from_matrix(ratings(), ids, ids, same_entities=True).one_set
    assert nodes.subset(np.arange(len(nodes)) % 2 == 0).one_set


def test_sides_of_different_sizes_are_told_alike_and_no_index_is_kept():
    for right in (range(120), range(90)):  # some nodes are linked to by no other
        matrix, both = graph(120)[:, list(right)], ([f"n{i}" for i in range(120)], [f"n{i}" for i in right])
        wide, tall = Interactions.from_matrix(matrix.T, *both[::-1]), Interactions.from_matrix(matrix, *both)
        assert wide.one_set
        assert tall.one_set
        assert not {name for name in vars(tall) if "index" in name}
    assert not Interactions.from_matrix(ratings(120)[:, :90], range(120), range(90)).one_set


def test_few_pairs_say_nothing():
    few = Interactions.from_arrays(["a", "b", "c"], ["b", "c", "a"])
    assert not few.one_set
    assert Interactions.from_arrays(["a", "b"], ["b", "a"], same_entities=True).one_set
    with pytest.raises(ValueError, match=r"same_entities.*'yes'"):
        Interactions.from_arrays(["a"], ["b"], same_entities="yes")


def test_no_entity_is_recommended_to_itself(tmp_path):
    ids = np.array([f"n{i}" for i in range(60)], dtype=object)
    order = np.random.default_rng(1).permutation(60)  # the sides in different orders
    pairs = Interactions.from_matrix(graph()[:, order], ids, ids[order])
    model = small().fit(pairs)
    model.save(tmp_path / "m")
    for one in (model, gt.load(tmp_path / "m")):
        found, scores = one.recommend(ids, k=60)
        assert not any(name in row[np.isfinite(s)] for name, row, s in zip(ids, found, scores, strict=True))
        assert one.fitted_.same_entities
    two = small().fit(Interactions.from_matrix(graph()[:, order], ids, ids[order], same_entities=False))
    found, scores = two.recommend(ids, k=10)
    assert np.mean([name in row for name, row in zip(ids, found, strict=True)]) > 0.5  # which is what is wrong
    assert np.array_equal(model.embed(), two.embed())


def test_entities_without_pairs_still_have_no_direction():
    matrix = graph().tolil()
    matrix[7], matrix[:, 9] = 0, 0
    ids = [f"n{i}" for i in range(60)]
    model = small().fit(Interactions.from_matrix(matrix.tocsr(), ids, ids, same_entities=True))
    assert np.flatnonzero(~model.has_direction("left")).tolist() == [7]
    assert np.flatnonzero(~model.has_direction("right")).tolist() == [9]


def test_an_update_does_not_learn_self_pairs():
    ids = [f"n{i}" for i in range(60)]
    model = small().fit(Interactions.from_matrix(graph(), ids, ids))
    before = model.fitted_.observed()
    assert (before != graph()).nnz == 0
    more = Interactions.from_arrays(["n0", "n60"], ["n60", "n0"])
    model.update(more)
    assert model.fitted_.same_entities
    assert model.fitted_.observed().nnz == before.nnz + 2
    found, scores = model.recommend(["n0", "n60"], k=61)
    assert all(name not in row[np.isfinite(s)] for name, row, s in zip(["n0", "n60"], found, scores, strict=True))


def test_a_graph_of_mostly_sinks_is_updated():
    ids = [f"n{i}" for i in range(60)]
    star = sp.csr_matrix((np.ones(59), (np.zeros(59, int), np.arange(1, 60))), shape=(60, 60))  # one node has links
    model = small().fit(Interactions.from_matrix(star, ids, ids, same_entities=True))
    model.update(Interactions.from_arrays(["n1"], ["n0"], same_entities=True))
    assert model.fitted_.observed().nnz == 60


def test_the_shell_says_so_and_takes_a_word(tmp_path, capsys):
    coo = graph().tocoo()
    lines = "".join(f"n{i},n{j}\n" for i, j in zip(coo.row, coo.col, strict=True))
    (tmp_path / "links.csv").write_text("from,to\n" + lines)
    command = ["fit", str(tmp_path / "links.csv"), "--left", "from", "--right", "to", "--dim", "4", "--device", "cpu"]
    command += ["--max-iterations", "2", "--out"]
    assert run([*command, str(tmp_path / "one")]) == 0
    assert "one set of entities: none is recommended to itself" in capsys.readouterr().err
    assert run([*command, str(tmp_path / "two"), "--no-same-entities"]) == 0
    assert "one set" not in capsys.readouterr().err
    assert gt.load(tmp_path / "one" / "model.gramtower").fitted_.same_entities
    assert not gt.load(tmp_path / "two" / "model.gramtower").fitted_.same_entities
