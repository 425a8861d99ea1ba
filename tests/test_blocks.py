"""Left rows block by block, and pairs sent from host memory: the same results, with less in memory."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch
from cases import FEATURES, LOSSES, TOWERS, make_case
from test_engine import compare, relative

import gramtower as gt
from gramtower.data.datasets import planted_pairs
from gramtower.engine.kernels import select
from gramtower.engine.objective import kronecker
from gramtower.engine.objective.planning import Footprint, Streamed, plan_streaming

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: pairs are sent to one")


def streamed(rows=3, **options):
    case = make_case(**options)
    case.problem.streamed = Streamed(rows, pinned=False)
    return case


@pytest.mark.parametrize("kernels", ["numba", "reference"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("imputed", [-1.0, "low-rank", "fitted"])
@pytest.mark.parametrize("weights", [False, True])
def test_agrees_with_the_dense_twin(loss, imputed, weights, kernels):
    case = streamed(
        loss=loss, imputed=imputed, weights=weights, kernels=kernels, embedding_l2=0.2, pair_weights=weights
    )
    assert not compare(case).evaluation.pairs.resident


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")
@pytest.mark.parametrize(("loss", "weights"), [(loss, place % 2 > 0) for place, loss in enumerate(LOSSES)])
def test_losses_worked_out_on_the_way_agree_with_the_dense_twin(loss, weights):
    pytest.importorskip("triton", reason="triton is not installed")
    case = streamed(loss=loss, weights=weights, kernels="triton", embedding_l2=0.2, pair_weights=weights)
    point = compare(case)
    before = point.work.copy()
    point.gauss_newton() @ point.gradient()
    assert point.work.since(before).pair_passes == (6 if loss == "cosh" else 4)  # one of a user is worked out by itself


@pytest.mark.parametrize("kind", FEATURES)
@pytest.mark.parametrize("tower", TOWERS)
@pytest.mark.parametrize("shared", [False, True])
def test_towers_and_features(tower, kind, shared):
    compare(streamed(tower=tower, kinds=(kind, kind), shared=shared, weights=True, seed=2))


@pytest.mark.parametrize("rows", [1, 4, 100])
def test_blocks_of_any_size(rows):
    compare(streamed(rows, weights=True, embedding_l2=0.1, seed=3))


@pytest.mark.parametrize("tower", ["elu", "linear", "residual"])
def test_the_preconditioner_is_the_same(tower):
    products = []
    for sweep in (None, Streamed(4, pinned=False)):
        case = make_case(tower=tower, weights=True, embedding_l2=0.1, seed=4)
        case.problem.streamed = sweep
        point = case.problem.at(case.towers)
        products.append((point.preconditioner("kronecker", 0.1) @ point.gradient()).vector)
    assert relative(products[1], products[0]) < 1e-7  # an opaque step takes roots: of rounding 1e-16 they are 1e-8


@pytest.mark.parametrize("kind", FEATURES)
@pytest.mark.parametrize("tower", ["elu", "linear", "gelu-relu"])
def test_the_preconditioner_runs_again_what_it_is_estimated_from(tower, kind, monkeypatch):
    monkeypatch.setattr(kronecker, "_ROWS", 5)
    products, forwards = [], []
    for sweep in (None, Streamed(7, pinned=False)):
        case = make_case(m=30, n=11, tower=tower, kinds=(kind, kind), weights=True, seed=4)
        case.problem.streamed = sweep
        point = case.problem.at(case.towers)
        g, _ = point.gradient(), point.evaluation.curvature_moments()
        before = point.work.copy()
        products.append((point.preconditioner("kronecker", 0.1) @ g).vector)
        forwards.append(point.work.since(before).left_forwards)
    assert relative(products[1], products[0]) < 1e-10
    assert forwards == pytest.approx([0, 1 + 5 / 30])  # of which 1 for the moments of the pairs


def test_training_takes_the_same_path():
    ends = []
    for sweep in (None, Streamed(5, pinned=False)):
        case = make_case(weights=True, embedding_l2=0.1, seed=5)
        case.problem.streamed = sweep
        ends.append([r.value for r in gt.minimize(case.problem, case.towers, max_iterations=6).history])
    assert ends[1] == pytest.approx(ends[0], rel=1e-9)


def test_work_is_counted():
    case = streamed(tower="elu")
    point = case.problem.at(case.towers)
    assert point.value
    g, before = point.gradient(), point.work.copy()
    point.gauss_newton() @ g
    once = point.work.since(before)
    assert (once.left_forwards, once.left_jvps, once.left_vjps) == pytest.approx((1, 1, 1))
    assert (once.right_jvps, once.right_vjps) == (1, 1)
    assert once.pair_passes == 3
    assert once.data_passes == 1


def test_nothing_of_the_left_side_is_kept():
    case = streamed(tower="elu", m=30)
    point = case.problem.at(case.towers)
    assert point.value
    point.gauss_newton() @ point.gradient()
    tower = point.evaluation.left
    assert not [t for t in vars(tower).values() if isinstance(t, torch.Tensor)]
    assert not tower._kept
    assert point.P.shape[0] == 30  # on demand


NETFLIX = Footprint(
    parameters=127_235_072, rows=(478_251, 17_768), columns=128, row_bytes=(4608, 4608), pairs=51_228_351,
    most_pairs=lambda rows: 51_228_351 * rows // 478_251, per_pair=0, item=4,
)  # fmt: skip


def test_what_fits_is_done_at_once():
    assert plan_streaming(8_000_000_000, NETFLIX) is None


def test_a_smaller_budget_goes_block_by_block_and_a_still_smaller_one_sends_the_pairs():
    kept, sent = plan_streaming(4_000_000_000, NETFLIX), plan_streaming(3_000_000_000, NETFLIX)
    assert kept is not None
    assert sent is not None
    assert not kept.pinned
    assert sent.pinned
    for sweep, budget in ((kept, 4_000_000_000), (sent, 3_000_000_000)):
        assert NETFLIX.streamed(sweep.rows, sweep.pinned) <= budget
        larger = NETFLIX.streamed(sweep.rows * 8 // 7, sweep.pinned)
        assert sweep.rows * 8 > 7 << 16 or larger > budget
        last = 478_251 % sweep.rows  # blocks of about one size: the last is not a remnant
        assert last == 0 or last > sweep.rows // 2


def test_a_busy_block_of_rows_counts():
    busy = replace(NETFLIX, most_pairs=lambda rows: 51_228_351)  # all pairs in one block
    assert plan_streaming(3_000_000_000, busy).rows < plan_streaming(3_000_000_000, NETFLIX).rows


@pytest.mark.parametrize("m", [1, 700, 1025, 66_000, 478_251])
def test_the_smallest_blocks_are_tried_too(m):
    small = replace(NETFLIX, rows=(m, 17_768), most_pairs=lambda rows: 100 * rows)
    assert plan_streaming(small.streamed(1024, pinned=True), small) == Streamed(1024, pinned=True)


def test_slopes_that_do_not_follow_from_outputs_count():
    problem = gt.Problem(planted_pairs(20, 10, 60))
    sizes = [
        made.sizes(problem.left, problem.right, select(made.device)).row_bytes
        for made in (gt.mlp_towers(problem, hidden=(8,), dim=4, activation=name) for name in ("elu", "gelu"))
    ]
    assert sizes[1] > sizes[0]


def test_a_budget_below_the_vectors_still_runs_in_the_smallest_blocks():
    assert plan_streaming(1, NETFLIX) == Streamed(1 << 10, pinned=True)


def test_streaming_that_cannot_be_is_refused():
    case = make_case()
    case.problem.streamed = Streamed(4, pinned=True)
    with pytest.raises(ValueError, match=r"^streamed.*pinned=False"):
        case.problem.at(case.towers)


def test_blocks_see_views_of_the_left_rows_constants():
    case = streamed(weights=True, imputed="low-rank", embedding_l2=0.1)
    evaluation = case.problem.at(case.towers).evaluation
    whole = evaluation.constants.left

    def look(block):
        for own, every in ((block.side.weight, whole.weight), (block.side.imputed, whole.imputed)):
            assert own.data_ptr() == every[block.start :].data_ptr()

    evaluation.visit(look)


@pytest.mark.parametrize("kernels", ["numba", "triton"])
def test_a_problem_is_gone_when_nobody_holds_it(kernels):
    if kernels == "triton":
        pytest.importorskip("triton", reason="triton is not installed")
        if torch.cuda.is_available():
            pytest.skip("the interpreter runs where there is no GPU")
    case = streamed(kernels=kernels)
    case.problem.at(case.towers).gradient()
    gone = weakref.ref(case.problem)
    del case
    assert gone() is None


@needs_gpu
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_on_a_gpu_results_agree_with_the_cpu(streamed, weighted):
    pairs = planted_pairs(700, 300, 9000)
    options = {"embedding_l2": 0.01}
    if weighted:
        options |= {
            "left_weights": "degree^0.5",
            "right_weights": "degree^0.3",
            "pair_weights": torch.linspace(0.5, 2, pairs.nnz).numpy(),
        }
    results = []
    for device, sweep in (("cpu", None), ("cuda", Streamed(128, streamed))):
        problem = gt.Problem(pairs, **options)
        problem.streamed = sweep
        made = gt.mlp_towers(problem, hidden=(24,), dim=12)
        point = problem.at(gt.Towers(made.left.to(device), made.right.to(device)))
        g = point.gradient()
        product = (point.gauss_newton() @ g).vector
        preconditioned = (point.preconditioner() @ g).vector
        results.append((torch.tensor(point.value), g.vector.cpu(), product.cpu(), preconditioned.cpu()))
    for cpu, cuda in zip(*results, strict=True):
        assert relative(cuda, cpu) < 2e-4


@needs_gpu
def test_pairs_with_numbers_of_more_than_sixteen_bits_are_sent_whole():
    pairs = planted_pairs(500, 70_000, 200_000)  # right entities beyond 65,536
    results = []
    for sweep in (None, Streamed(128, pinned=True)):
        problem = gt.Problem(pairs)
        problem.streamed = sweep
        made = gt.mlp_towers(problem, hidden=(), dim=8, dtype=torch.float64)
        point = problem.at(gt.Towers(made.left.cuda(), made.right.cuda()))
        g = point.gradient()
        results.append((torch.tensor(point.value), g.vector, (point.gauss_newton() @ g).vector))
    for whole, sent in zip(*results, strict=True):
        assert relative(sent, whole) < 1e-10


@needs_gpu
def test_a_small_budget_is_kept_on_a_gpu():
    pairs = planted_pairs(60_000, 2000, 2_000_000)
    peaks = {}
    for budget in ("4GB", "200MB", "180MB"):
        problem = gt.Problem(pairs, memory_budget=budget)
        made = gt.mlp_towers(problem, hidden=(128,), dim=64)
        towers = gt.Towers(made.left.cuda(), made.right.cuda())
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        theta = 4 * len(towers.parameters())
        torch.cuda.reset_peak_memory_stats()
        point = problem.at(towers)
        assert point.value
        g = point.gradient()
        out = g.empty()
        point.gauss_newton().product(g, out)
        peaks[budget] = torch.cuda.max_memory_allocated() - before + theta
        del point, g, out, towers, made, problem
    assert peaks["200MB"] < 200e6
    assert peaks["180MB"] < peaks["200MB"] < peaks["4GB"]


def test_a_point_is_gone_when_nobody_holds_it():
    case = streamed(tower="elu")
    point = case.problem.at(case.towers)
    assert point.value
    gone = weakref.ref(point)
    del point
    assert gone() is None  # by counting references, not when the collector comes along: a point holds a copy of θ
