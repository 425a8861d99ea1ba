"""θ as named views of one flat vector."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from cases import make_case

import gramtower as gt
from gramtower.engine.towers.parameters import Layout, as_parameters, side_of

LAYOUT = Layout.of({"left.weight": (2, 3), "left.bias": (3,), "right.scale": ()})


def make(*numbers, dtype=torch.float64):
    return gt.Parameters(LAYOUT, torch.tensor(numbers or range(10), dtype=dtype))


def test_the_tower_of_a_tensor_is_told_from_its_name():
    towers = make_case(tower="branching").towers
    counts = {side: sum(p.numel() for p in getattr(towers, side).parameters()) for side in ("left", "right")}
    found = dict.fromkeys(counts, 0)
    for name, tensor in towers.parameters().items():
        found[side_of(name)] += tensor.numel()
    assert found == counts
    assert side_of("leftover.weight") == "right"


def test_tensors_are_views_in_the_order_given():
    p = make()
    assert p["left.weight"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert p["left.bias"].tolist() == [6, 7, 8]
    assert p["right.scale"].item() == 9
    p["left.bias"].zero_()
    assert p.vector.tolist() == [0, 1, 2, 3, 4, 5, 0, 0, 0, 9]
    assert list(p) == [name for name, _ in p.items()] == ["left.weight", "left.bias", "right.scale"]


def test_arithmetic_makes_new_objects():
    p, q = make(), make(*[1.0] * 10)
    expected = torch.arange(10.0, dtype=torch.float64)
    assert torch.equal((p + q).vector, expected + 1)
    assert torch.equal((p - q).vector, expected - 1)
    assert torch.equal((2 * p).vector, (p * 2).vector)
    assert torch.equal((-p).vector, -expected)
    assert torch.equal(p.vector, expected)


def test_methods_that_end_in_an_underscore_work_in_place():
    p, q = make(), make(*[1.0] * 10)
    vector = p.vector
    assert p.axpy_(-2.0, q) is p
    assert p.scale_(3.0) is p
    assert vector.tolist() == [3 * (i - 2) for i in range(10)]


def test_copies_do_not_share_memory():
    p = make()
    copies = [p.clone().vector, p.to_vector(), p.from_vector(p.vector).vector, p.zeros().vector, p.empty().vector]
    p.vector.fill_(-1)
    assert all((copy != -1).all() for copy in copies[:4])
    assert copies[4].data_ptr() != p.vector.data_ptr()


def test_dot_and_norm_are_accumulated_in_float64():
    # 2²⁴ + 1 is not a float32: adding ones to it one by one in float32 would change nothing.
    p = make(2.0**12, *[1.0] * 9, dtype=torch.float32)
    assert p.dot(p) == 2.0**24 + 9
    assert p.norm() == math.sqrt(2.0**24 + 9)


def test_dot_covers_vectors_longer_than_a_chunk():
    size = 2**20 + 5
    p = gt.Parameters(Layout.of({"x": (size,)}), torch.ones(size))
    assert p.dot(p) == size


def test_non_finite_entries_are_noticed():
    assert make().is_finite()
    assert not make(*[0.0] * 9, math.nan).is_finite()
    assert not make(*[0.0] * 9, -math.inf).is_finite()


def test_a_vector_of_the_wrong_length_is_refused():
    with pytest.raises(ValueError, match=r"vector.*\(9,\)"):
        gt.Parameters(LAYOUT, torch.zeros(9))
    with pytest.raises(ValueError, match=r"d:.*\(2, 5\)"):
        as_parameters("d", np.zeros((2, 5)), make())
    with pytest.raises(ValueError, match=r"d.*other tensors.*'left.weight'"):
        as_parameters("d", gt.Parameters(Layout.of({"x": (10,)}), torch.zeros(10)), make())


@pytest.mark.parametrize(
    "convert",
    [
        lambda d: d,
        lambda d: d.vector,
        lambda d: d.vector.numpy(),
        lambda d: gt.Parameters(d.layout, d.vector.double()),
        lambda d: torch.stack([d.vector, d.vector], 1)[:, 0],
    ],
    ids=["Parameters", "torch", "numpy", "other dtype", "strided"],
)
def test_a_direction_may_come_in_any_form(convert):
    case = make_case(dtype=torch.float32)
    point = case.problem.at(case.towers)
    d = point.gradient()
    product = point.gauss_newton() @ convert(d)
    product = product.vector if isinstance(product, gt.Parameters) else torch.as_tensor(product)
    assert product.dtype == torch.float32
    assert torch.allclose(product, point.gauss_newton().product(d).vector, rtol=1e-5, atol=1e-5)
    assert math.isfinite(point.along(convert(d))(0.1).value)


def test_a_product_leaves_its_direction_alone():
    for tower in ("elu", "linear", "custom", "normalised"):
        case = make_case(tower=tower)
        point = case.problem.at(case.towers)
        d = point.gradient()
        before = d.to_vector()
        point.gauss_newton() @ d
        assert torch.equal(d.vector, before), tower


def test_large_vectors_on_a_cpu_are_like_small_ones():
    from gramtower._util.host import _LARGE, empty_like

    for dtype in (torch.float32, torch.float64, torch.float16):
        vector = torch.arange(_LARGE // 4 + 1).to(dtype)
        made = empty_like(vector)
        assert (made.shape, made.dtype, made.device) == (vector.shape, vector.dtype, vector.device)
        assert made.data_ptr() != vector.data_ptr()
        assert torch.equal(made.copy_(vector), vector)


def test_vectors_are_used_again_once_nobody_refers_to_them_or_to_a_part():
    from gramtower._util.host import Vectors

    vectors, like = Vectors(), torch.zeros(100)
    first = vectors.empty_like(like)
    second = vectors.empty_like(like)
    assert first.data_ptr() != second.data_ptr()
    place, part = first.data_ptr(), first[3:7].view(2, 2)
    del first
    third = vectors.empty_like(like)
    assert third.data_ptr() not in (place, second.data_ptr())
    del part
    assert vectors.empty_like(like).data_ptr() == place
    assert vectors.empty_like(like.double()).dtype == torch.float64
    assert len(vectors.empty_like(torch.zeros(7))) == 7
    kept = vectors.empty_like(like).fill_(2.0)
    del vectors
    assert torch.equal(kept, torch.full((100,), 2.0))
