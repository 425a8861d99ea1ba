"""Embeddings of one length: when they are the default, what they are, and that files and warm starts keep them."""

import numpy as np
import pytest
import scipy.sparse as sp

import gramtower as gt


def links(rows=40, columns=30, seed=0):
    rng = np.random.default_rng(seed)
    left, right = rng.normal(size=(rows, 6)), rng.normal(size=(columns, 6))
    scores = left @ right.T
    pairs = sp.csr_matrix((scores > np.quantile(scores, 0.9)).astype(np.float32))
    return pairs, left.astype(np.float32), right.astype(np.float32)


def weighted_lengths(model, side):
    """Lengths of the rows before the learned scales of columns."""
    scales = getattr(model.towers_, side)[-1].weight.detach().cpu().numpy()
    return np.linalg.norm(model.embed(side=side) / scales, axis=1)


OPTIONS = {"dim": 8, "hidden": (12,), "max_iterations": 3, "device": "cpu", "select": False}


def test_normalised_embeddings_have_one_length_which_is_no_rule():
    pairs, left, right = links()
    model = gt.TwoTower(**OPTIONS, refine=False, normalize=True).fit(pairs, left_features=left, right_features=right)
    assert model.normalize_
    assert "one length" in str(model.fitted_)
    for side in ("left", "right"):
        assert np.allclose(weighted_lengths(model, side), np.sqrt(8), rtol=1e-2)
    for features in ({"left_features": left}, {}, {"left_features": left, "right_features": right}):
        assert not gt.TwoTower(**OPTIONS).fit(pairs, **features).normalize_


@pytest.mark.parametrize("hidden", [(), (12,)])
def test_ids_and_linear_towers_can_have_one_length_too(hidden, tmp_path):
    pairs, left, _ = links()
    model = gt.TwoTower(**OPTIONS | {"hidden": hidden}, normalize=True).fit(pairs, left_features=left)
    assert np.allclose(weighted_lengths(model, "right"), np.sqrt(8), rtol=1e-2)
    model.save(tmp_path / "model")
    read = gt.load(tmp_path / "model")
    assert read.normalize_
    assert read.normalize is True
    for side in ("left", "right"):
        assert np.array_equal(read.embed(side=side), model.embed(side=side))
    assert np.array_equal(read.embed(left_features=left[:3] * 2), model.embed(left_features=left[:3] * 2))


def test_a_warm_start_stays_of_one_length():
    pairs, left, right = links()
    model = gt.TwoTower(**OPTIONS, normalize=True).fit(pairs, left_features=left, right_features=right)
    model.normalize = None
    more = sp.csr_matrix(np.ones(pairs.shape, np.float32))
    before = gt.TwoTower(**OPTIONS).fit(more, left_features=left, right_features=right)
    assert not before.normalize_
    model.fit(more, left_features=left, right_features=right, warm_start=True)
    assert model.normalize_


def test_what_is_no_flag_is_refused():
    with pytest.raises(ValueError, match=r"normalize.*'yes'"):
        gt.TwoTower(**OPTIONS, normalize="yes").fit(links()[0])
