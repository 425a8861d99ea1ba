"""The Triton kernels against the reference: on a GPU where there is one, under Triton's interpreter elsewhere."""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (it comes with CUDA builds of torch)")

import numpy as np
import scipy.sparse as sp
from cases import COSH, make_case
from test_kernels import TOLERANCE, assert_same, make_operands, make_pairs, run, run_dense

import gramtower as gt
from gramtower.data.datasets import planted_pairs
from gramtower.data.pairs import from_sparse
from gramtower.engine.kernels import gpu, layout, reference
from gramtower.engine.kernels.elementwise import LOSSES, LossTerms, activation_of
from gramtower.engine.objective.formulas import gram
from gramtower.engine.objective.planning import Streamed

GPU = torch.cuda.is_available()  # conftest.py asks for the interpreter where there is none
DEVICE = torch.device("cuda" if GPU else "cpu")
PATTERNS = ("holes", "none", "all", "one", "long column") if GPU else ("holes", "none", "one")


def there(*tensors):
    return [t.to(DEVICE) for t in tensors]


def pieces_of(monkeypatch, piece=4, block=8):
    """Pieces and row blocks so small that rows and columns of a small pattern fall into several."""
    monkeypatch.setattr(layout, "LONGEST", piece)
    monkeypatch.setattr(layout, "SHORTEST", piece)
    monkeypatch.setattr(layout, "ROW_BLOCK", block)
    monkeypatch.setattr(layout, "DENSE", 0)  # blocks however few entries a column has in each


# How columns are visited: all blocks in one launch, each in its own, no blocks; and sorted at once or in parts.
COLUMN_ORDERS = {
    "together": {}, "one launch a block": {"LINES": 0}, "no blocks": {"DENSE": 10**9},
    "sorted in parts": {"DENSE": 10**9, "SORTED": 7}, "blocks in parts": {"LINES": 0, "SORTED": 7},
}  # fmt: skip


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("k", [1, 7, 33, 130, 600, 2048] if GPU else [1, 7, 130])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_agrees_with_dense_products(pattern, k, dtype, monkeypatch):
    pieces_of(monkeypatch)
    pairs = make_pairs(pattern).to(DEVICE)
    operands = there(*make_operands(pairs, k, dtype))
    assert_same(run(gpu.KERNELS, pairs, operands), run_dense(pairs, operands), dtype)


def test_rows_in_one_piece_and_in_many_give_the_same(monkeypatch):
    pairs = make_pairs("holes")
    operands = make_operands(pairs, 5, torch.float64)
    results = []
    for piece, block in ((1, 1), (3, 4), (512, 1 << 15)):
        pieces_of(monkeypatch, piece, block)
        fresh = make_pairs("holes").to(DEVICE)
        results.append(run(gpu.KERNELS, fresh, there(*operands)))
    for other in results[1:]:
        assert_same(other, results[0], torch.float64)


@pytest.mark.parametrize("kind", COLUMN_ORDERS)
def test_every_order_of_columns_gives_the_same(kind, monkeypatch):
    pieces_of(monkeypatch, 3, 5)
    for name, value in COLUMN_ORDERS[kind].items():
        monkeypatch.setattr(layout, name, value)
    pairs = make_pairs("holes").to(DEVICE)
    operands = there(*make_operands(pairs, 5, torch.float64))
    assert_same(run(gpu.KERNELS, pairs, operands), run_dense(pairs, operands), torch.float64)
    order = layout.right_order(pairs)
    assert (len(order.launches) > 2) == ("LINES" in COLUMN_ORDERS[kind])
    assert order.launches[-1] == len(order)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("kind", COLUMN_ORDERS)
def test_the_sizes_of_orders_are_known_before_they_are_made(kind, pattern, monkeypatch):
    pieces_of(monkeypatch, 3, 5)
    for name, value in COLUMN_ORDERS[kind].items():
        monkeypatch.setattr(layout, name, value)
    pairs = make_pairs(pattern).to(DEVICE)
    known = layout.row_order(pairs.row_counts), layout.column_order(pairs.column_counts, pairs.shape[0])
    left, right = layout.left_order(pairs), layout.right_order(pairs)
    assert (known[0].pieces, known[0].lines) == (len(left), left.partial_lines)
    assert len(right) <= known[1].pieces
    assert right.partial_lines <= known[1].lines
    for order in (left, right):
        assert layout.PIECE_BYTES * len(order) >= sum(
            t.numel() * t.element_size() for t in (order.targets, order.starts[1:], order.lines)
        )


def test_lines_stay_few_where_there_are_many_columns_and_blocks(monkeypatch):
    pieces_of(monkeypatch, 64, 8)
    pairs = from_sparse("pairs", planted_pairs(400, 300, 9000, seed=1))[0].to(DEVICE)
    assert layout.right_order(pairs).partial_lines > 20 * 300  # a line for each piece of a column in each block
    monkeypatch.setattr(layout, "LINES", 1000)
    blocks = type(pairs)(pairs.shape, pairs.offsets, pairs.columns)
    assert len(layout.right_order(blocks).launches) == 51
    assert layout.right_order(blocks).partial_lines == 0
    monkeypatch.setattr(layout, "DENSE", 3)
    sparse = type(pairs)(pairs.shape, pairs.offsets, pairs.columns)
    assert layout.right_order(sparse).launches == (0, len(layout.right_order(sparse)))
    assert layout.right_order(sparse).partial_lines < 300


def test_rows_longer_than_a_program_holds(monkeypatch):
    monkeypatch.setattr(gpu, "LONGEST", 4)
    pairs = make_pairs("holes").to(DEVICE)
    operands = there(*make_operands(pairs, 9, torch.float64))
    assert_same(run(gpu.KERNELS, pairs, operands), run_dense(pairs, operands), torch.float64)


@pytest.mark.parametrize("kind", COLUMN_ORDERS)
def test_every_entry_is_in_exactly_one_piece_of_its_row_and_column(kind, monkeypatch):
    pieces_of(monkeypatch, 3, 5)
    for name, value in COLUMN_ORDERS[kind].items():
        monkeypatch.setattr(layout, name, value)
    pairs = make_pairs("holes")
    i, j = pairs.rows.long(), pairs.columns.long()
    for order, own, other in ((layout.left_order(pairs), i, j), (layout.right_order(pairs), j, i)):
        entries = torch.arange(len(pairs)) if order.entries is None else order.entries.long()
        assert torch.equal(entries.sort().values, torch.arange(len(pairs)))
        sizes = order.starts.diff()
        assert int(sizes.max()) <= 3
        assert int(sizes.min()) > 0
        assert torch.equal(torch.repeat_interleave(order.targets.long(), sizes), own[entries])
        assert torch.equal(order.gathered.long(), other[entries])
    blocks = layout.right_order(pairs).gathered // 5
    if "DENSE" not in COLUMN_ORDERS[kind]:
        assert torch.equal(blocks, blocks.sort().values)  # block of rows by block of rows


def test_bfloat16_rows_are_summed_in_float32():
    pairs = make_pairs("holes").to(DEVICE)
    P, W, Q, H, x, left, right = there(*make_operands(pairs, 33, torch.float32))
    half = [t.bfloat16() for t in (P, Q, H)]
    exact = [t.float() for t in half]
    results = run(gpu.KERNELS, pairs, (P, W, half[1], half[2], x, left, right))
    expected = run_dense(pairs, (P, W, exact[1], exact[2], x, left, right))
    results.pop("right_sum"), expected.pop("right_sum")
    assert_same(results, expected, torch.float32)
    out, wanted = right.clone(), right.clone()
    gpu.KERNELS.right_sum(pairs, x, half[0], out)
    reference.KERNELS.right_sum(pairs, x, exact[0], wanted)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("loss", LOSSES)
def test_loss_pass_agrees_with_the_loss_functions(loss, dtype, weighted, monkeypatch):
    pieces_of(monkeypatch)
    pairs = make_pairs("holes").to(DEVICE)
    P, _, Q, _, _, _, _ = there(*make_operands(pairs, 6, dtype))
    scores = reference.KERNELS.dots(pairs, P, Q)
    labels = torch.where(torch.rand(len(pairs), device=DEVICE) < 0.5, -1.0, 1.0).to(dtype)
    imputed, a, w = (torch.rand(len(pairs), dtype=dtype, device=DEVICE) if weighted else None for _ in range(3))
    imputed = -0.7 if imputed is None else imputed
    constants = torch.tensor([0.3, -0.7], dtype=dtype, device=DEVICE)
    observed = gpu.KERNELS.losses(pairs, P, Q, LossTerms(LOSSES[loss], labels, 0.3, imputed, a, w, constants))
    value, first, second = observed.value, observed.slopes, observed.curvatures
    f, ab, lw = LOSSES[loss], 1.0 if a is None else a, 1.0 if w is None else w
    tolerance = {"rtol": 0, "atol": 1e-5 if dtype == torch.float32 else 1e-13}
    torch.testing.assert_close(first, lw * f.first(labels, scores) - 0.3 * ab * (scores - imputed), **tolerance)
    torch.testing.assert_close(second, lw * f.second(labels, scores) - 0.3 * ab * torch.ones_like(scores), **tolerance)
    exact = (lw * f.value(labels, scores) - 0.15 * ab * (scores - imputed).square()).double().sum()
    assert value.dtype == torch.float64
    torch.testing.assert_close(value, exact, rtol=1e-6 if dtype == torch.float32 else 1e-13, atol=0)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("k", [1, 7, 130])
@pytest.mark.parametrize("loss", LOSSES)
def test_loss_and_sum_in_one_pass_agree_with_two(loss, k, weighted, monkeypatch):
    pieces_of(monkeypatch)
    pairs = make_pairs("holes").to(DEVICE)
    P, W, Q, H, _, out, _ = there(*make_operands(pairs, k, torch.float64))
    labels = torch.where(torch.rand(len(pairs), device=DEVICE) < 0.5, -1.0, 1.0).double()
    imputed, a, w = (torch.rand(len(pairs), dtype=torch.float64, device=DEVICE) if weighted else None for _ in range(3))
    constants = torch.tensor([0.3, -0.7], dtype=torch.float64, device=DEVICE)
    terms = LossTerms(LOSSES[loss], labels, 0.3, -0.7 if imputed is None else imputed, a, w, constants)
    for tangents in (None, (W, H)):
        wanted, mine = out.clone(), out.clone()
        x = in_two_passes(pairs, P, Q, terms, wanted, tangents)
        y = gpu.KERNELS.loss_left(pairs, P, Q, terms, mine, tangents)
        torch.testing.assert_close(y, x, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(mine, wanted, rtol=1e-11, atol=1e-11)


def in_two_passes(pairs, P, Q, terms, out, tangents):
    observed = reference.KERNELS.losses(pairs, P, Q, terms)
    if tangents is not None:
        return reference.KERNELS.curvature_left(pairs, observed.curvatures, P, tangents[0], Q, tangents[1], out)
    reference.KERNELS.left_sum(pairs, observed.slopes, Q, out)
    return observed.slopes


def test_what_cannot_be_done_in_one_pass_is_left_to_two(monkeypatch):
    pairs = make_pairs("holes").to(DEVICE)
    P, W, Q, H, _, out, _ = there(*make_operands(pairs, 9, torch.float32))
    labels, constants = torch.ones(len(pairs), device=DEVICE), torch.tensor([0.3, -0.7], device=DEVICE)
    terms = [LossTerms(loss, labels, 0.3, -0.7, None, None, constants) for loss in (LOSSES["logistic"], COSH)]
    assert gpu.KERNELS.loss_left(pairs, P, Q, terms[0], out.clone()) is not None
    for tangents in (None, (W, H)):
        assert gpu.KERNELS.loss_left(pairs, P, Q, terms[1], out, tangents) is None
    monkeypatch.setattr(gpu, "LONGEST", 8)
    assert gpu.KERNELS.loss_left(pairs, P, Q, terms[0], out) is None


def test_an_imported_order_is_the_exported_one(monkeypatch):
    pieces_of(monkeypatch, 3, 5)
    pairs = make_pairs("holes").to(DEVICE)
    wanted = layout.left_order(pairs), layout.right_order(pairs)
    short, long = gpu.KERNELS.export_order(pairs)
    assert all(len(order.gathered) == 0 for order in short)
    copy = type(pairs)(pairs.shape, pairs.offsets, pairs.columns.clone())
    gpu.KERNELS.import_order(copy, short, long)
    for mine, order in zip((layout.left_order(copy), layout.right_order(copy)), wanted, strict=True):
        assert torch.equal(mine.gathered, order.gathered)
        assert mine.entries is order.entries is None or torch.equal(mine.entries, order.entries)
        assert torch.equal(mine.starts, order.starts)


def test_columns_and_rows_of_sixteen_bits():
    pairs = make_pairs("holes").to(DEVICE)
    (m, n), k = pairs.shape, 7
    generator = torch.Generator().manual_seed(0)
    P, Q = (torch.randn(rows, k, dtype=torch.float64, generator=generator).to(DEVICE) for rows in (m, n))
    x = torch.randn(len(pairs), dtype=torch.float64, generator=generator).to(DEVICE)
    short, long = gpu.KERNELS.export_order(pairs)
    few = type(pairs)(pairs.shape, pairs.offsets, pairs.columns.cpu().to(torch.uint16).to(DEVICE))
    gpu.KERNELS.import_order(few, short, {**long, "rows": long["rows"].cpu().to(torch.uint16).to(DEVICE)})
    results = []
    for which in (pairs, few):
        left, right = torch.zeros_like(P), torch.zeros_like(Q)
        gpu.KERNELS.left_sum(which, x, Q, left)
        gpu.KERNELS.right_sum(which, x, P, right)
        bent = gpu.KERNELS.curvature_left(which, x, P, P, Q, Q, left.clone())
        results.append((gpu.KERNELS.dots(which, P, Q), bent, left, right))
    for wide, narrow in zip(*results, strict=True):
        assert torch.equal(wide, narrow)


def test_logistic_loss_far_out():
    pairs = make_pairs("one").to(DEVICE)
    for score in (-200.0, -90.0, 90.0, 200.0):
        P, Q = (torch.full((1, 1), x, dtype=torch.float32, device=DEVICE) for x in (score, 1.0))
        one, zeros = torch.ones(1, device=DEVICE), torch.zeros(2, device=DEVICE)
        observed = gpu.KERNELS.losses(pairs, P, Q, LossTerms(LOSSES["logistic"], one, 0.0, 0.0, None, None, zeros))
        assert float(observed.value) == pytest.approx(max(0.0, -score), abs=1e-30)
        assert float(observed.slopes) == (-1.0 if score < 0 else pytest.approx(0.0, abs=1e-30))
        assert 0 <= float(observed.curvatures) < 1e-30


def test_inner_product_of_long_vectors(monkeypatch):
    monkeypatch.setattr(gpu, "_RUN", 2048)
    a, b = torch.randn(2, 5001, device=DEVICE)
    assert float(gpu.KERNELS.inner(a, b)) == pytest.approx(float(a.double() @ b.double()), rel=1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("loss", LOSSES)
def test_whole_engine_agrees_with_the_reference(loss, dtype, monkeypatch):
    pieces_of(monkeypatch)
    results = []
    for kernels in ("triton", "reference"):
        case = make_case(m=13, n=11, loss=loss, kernels=kernels, dtype=dtype)
        towers = case.towers
        for module in (towers.left, towers.right):
            module.to(DEVICE)
        towers = gt.Towers(towers.left, towers.right)
        point = case.problem.at(towers)
        g = point.gradient()
        results.append((point.value, g.vector, (point.gauss_newton() @ g).vector, (point.preconditioner() @ g).vector))
    for mine, wanted in zip(*results, strict=True):
        mine, wanted = torch.as_tensor(mine), torch.as_tensor(wanted)
        near = 1e-10 if dtype == torch.float64 else 2e-4
        assert float((mine - wanted).norm()) <= near * float(wanted.norm())


FAR, WIDE = 2**31 // 256 + 10, 256  # rows and columns of a matrix with more than 2³¹ numbers


def far_rows(path, last):
    """A matrix whose last rows are given; on a CPU in a file that takes no room for the zeros before them."""
    if GPU:
        matrix = torch.zeros(FAR, WIDE, device=DEVICE)
    else:
        matrix = torch.from_numpy(np.memmap(path, np.float32, "w+", shape=(FAR, WIDE)))
    matrix[-len(last) :] = last
    return matrix


def all_passes(pairs, P, W, Q, H, zeros):
    """The results of every pass over pairs; ``zeros(matrix)`` is a place for a sum."""
    x = torch.tensor([1.0, 2.0, 3.0], device=DEVICE)
    one, none = torch.ones(len(pairs), device=DEVICE), torch.zeros(2, device=DEVICE)
    terms = LossTerms(LOSSES["logistic"], one, 0.0, 0.0, None, None, none)
    sums = [zeros(matrix) for matrix in (P, P, P, P, Q)]
    gpu.KERNELS.left_sum(pairs, x, Q, sums[0])
    bent = gpu.KERNELS.curvature_left(pairs, x, P, W, Q, H, sums[1])
    slopes = gpu.KERNELS.loss_left(pairs, P, Q, terms, sums[2])
    curved = gpu.KERNELS.loss_left(pairs, P, Q, terms, sums[3], (W, H))
    gpu.KERNELS.right_sum(pairs, x, P, sums[4])
    return [gpu.KERNELS.dots(pairs, P, Q), bent, slopes, curved, *(matrix[-2:] for matrix in sums)]


@pytest.mark.parametrize("pieces", [512, 1], ids=["one piece a row", "a piece for each pair"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_offsets_past_two_to_the_thirty_one(side, pieces, monkeypatch, tmp_path):
    """The last rows of a long matrix, against the same pairs of few rows."""
    monkeypatch.setattr(layout, "LONGEST", pieces)
    monkeypatch.setattr(layout, "SHORTEST", pieces)
    drawn = torch.Generator().manual_seed(0)
    near = [torch.randn(2, WIDE, generator=drawn).to(DEVICE) for _ in range(4)]  # P, W, Q, H
    files = (tmp_path / str(number) for number in itertools.count())
    far = [far_rows(next(files), M) if (number < 2) == (side == "left") else M for number, M in enumerate(near)]
    rows, columns = np.array([0, 1, 1]), np.array([1, 0, 1])
    found = []
    for P, W, Q, H in (near, far):
        places = rows + len(P) - 2, columns + len(Q) - 2
        pairs = from_sparse("pairs", sp.csr_matrix((np.ones(3), places), (len(P), len(Q))))[0].to(DEVICE)
        found.append(
            all_passes(
                pairs, P, W, Q, H, lambda M: far_rows(next(files), 0 * M[-2:]) if len(M) == FAR else torch.zeros_like(M)
            )
        )
    assert all(float(result.abs().max()) > 0 for result in found[0])
    for expected, result in zip(*found, strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not GPU, reason="no GPU: these visit every number of a matrix with more than 2³¹ of them")
def test_sums_and_products_of_matrices_with_more_than_two_to_the_thirty_one_numbers():
    rows, k = 2**31 // 32 + 10, 32
    P = torch.zeros(rows, k, device=DEVICE)
    P[-2:] = 1.0
    flat = P.view(-1)
    assert float(gpu.KERNELS.inner(flat, flat)) == 2 * k
    assert gpu.KERNELS.column_sums(P, dtype=torch.float64).tolist() == [2.0] * k
    assert torch.equal(gram(P, P), torch.full((k, k), 2.0, dtype=torch.float64, device=DEVICE))
    assert torch.equal(torch.mm(P, torch.eye(k, device=DEVICE))[-2:], P[-2:])
    assert float(torch.cat([flat, flat[-k:]])[-1]) == float(torch.add(flat, flat, alpha=-0.5)[-1]) + 0.5 == 1.0


@pytest.mark.parametrize("rows", [0, 1, 5, 300])
def test_column_sums(rows):
    x, weight = torch.randn(rows, 7, device=DEVICE), torch.rand(rows, device=DEVICE)
    torch.testing.assert_close(gpu.KERNELS.column_sums(x), x.sum(0), rtol=1e-5, atol=1e-5)
    exact = (weight[:, None].double() * x.double()).sum(0)
    torch.testing.assert_close(gpu.KERNELS.column_sums(x, weight, torch.float64), exact, rtol=1e-6, atol=1e-6)


ACTIVATIONS = [torch.nn.ELU(), torch.nn.ELU(0.7), torch.nn.ReLU(), torch.nn.LeakyReLU(0.125), torch.nn.Tanh()]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("module", [*ACTIVATIONS, torch.nn.Sigmoid()], ids=str)
@pytest.mark.parametrize("kernels", [gpu.KERNELS, reference.KERNELS], ids=["triton", "reference"])
def test_slopes_from_outputs_are_those_of_autograd(kernels, module, dtype):
    z = torch.randn(37, 9, dtype=dtype, device=DEVICE, requires_grad=True)
    g, bias, base = (torch.randn(*shape, dtype=dtype, device=DEVICE) for shape in ((37, 9), (9,), (37, 9)))
    y = module(z)
    (wanted,) = torch.autograd.grad(y, z, g + bias)
    activation, tolerance = activation_of(module), dict(rtol=0, atol=10 * TOLERANCE[dtype])
    out = torch.empty_like(g)
    assert kernels.slope_product(g, bias, y.detach(), activation, out) is None
    torch.testing.assert_close(out, wanted, **tolerance)
    sums = kernels.slope_product(g + bias, None, y.detach(), activation, out, (base, 0.5), sums=True).sum(0)
    torch.testing.assert_close(sums, wanted.sum(0), **tolerance)
    torch.testing.assert_close(out, 0.5 * base + wanted, **tolerance)


def test_elu_of_a_sum_keeps_its_digits():
    z = torch.cat([torch.linspace(-1e-3, 1e-3, 64), torch.linspace(-90, 90, 257), torch.linspace(-1, 0.5, 191)])
    x, bias = z.view(-1, 2).to(DEVICE), torch.zeros(2, device=DEVICE)
    exact = torch.nn.functional.elu(x.double())
    torch.testing.assert_close(
        gpu.KERNELS.activate(x, bias, activation_of(torch.nn.ELU())).double(), exact, rtol=4e-7, atol=1e-12
    )


def test_a_table_of_both_towers_gets_both_parts():
    """With fewer left than right entities one tower's table is whole and the other's is not."""
    pairs = planted_pairs(5, 9, 12)
    results = []
    for kernels in ("triton", "reference"):
        torch.manual_seed(0)
        module = torch.nn.Sequential(gt.InputLinear(9, 4), torch.nn.ELU(), torch.nn.Linear(4, 3)).to(DEVICE)
        problem = gt.Problem(pairs, kernels=kernels)
        problem.graphs = False
        point = problem.at(gt.Towers(module, module))
        g = point.gradient()
        results.append((g.vector, (point.gauss_newton() @ g).vector))
    for mine, wanted in zip(*results, strict=True):
        assert float((mine - wanted).norm()) <= 2e-4 * float(wanted.norm())


@pytest.mark.parametrize("sweep", [None, 5])
def test_a_loss_added_to_the_library_by_name_works_with_the_kernels_that_do_not_know_it(sweep, monkeypatch):
    pseudo_huber = gt.Loss(
        value=lambda y, s: torch.sqrt(1 + (s - y) ** 2) - 1,
        first=lambda y, s: (s - y) / torch.sqrt(1 + (s - y) ** 2),
        second=lambda y, s: (1 + (s - y) ** 2) ** -1.5,
        name="pseudo_huber",
    )
    monkeypatch.setitem(LOSSES, "pseudo_huber", pseudo_huber)
    results = []
    for kernels in ("triton", "reference"):
        case = make_case(m=9, n=8, loss="squared", seed=3, kernels=kernels)
        case.problem.loss = gt.Problem(sp.eye(2), loss="pseudo_huber").loss
        case.problem.streamed = None if sweep is None else Streamed(sweep, pinned=False)
        towers = gt.Towers(case.towers.left.to(DEVICE), case.towers.right.to(DEVICE))
        point = case.problem.at(towers)
        gradient = point.gradient()
        results.append(torch.cat([gradient.to_vector(), (point.gauss_newton() @ gradient).to_vector()]))
    assert torch.allclose(*results, rtol=1e-9)


def test_a_process_without_rows_adds_nothing():
    pairs = from_sparse("pairs", sp.csr_matrix((0, 3)), least_rows=0)[0].to(DEVICE)
    x, A, out = there(torch.empty(0), torch.empty(0, 5), torch.ones(3, 5))
    gpu.KERNELS.right_sum(pairs, x, A, out)
    assert bool((out == 1).all())
