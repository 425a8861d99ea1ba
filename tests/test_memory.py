"""The memory budget: sizes as text, row blocks, and the same results whatever the blocks."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref

import numpy as np
import pytest
import torch
from cases import make_case
from test_engine import relative

import gramtower as gt
from gramtower._util import host
from gramtower._util.checks import memory_size
from gramtower._util.host import BlockPlan, ResidentPeak, default_budget, free_memory, threads_of_fit, total_memory
from gramtower.data.datasets import planted_pairs
from gramtower.engine.objective import planning as plan
from gramtower.engine.objective.planning import Footprint, Streamed, plan_blocks

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512MB", 512_000_000), ("1.5GB", 1_500_000_000), ("2GiB", 2**31), (" 3 kib ", 3072), (".5mb", 500_000),
        ("100", 100), ("7B", 7), ("1TB", 10**12), (4096, 4096), (2.5e9, 2_500_000_000), (np.int64(9), 9),
    ],
)  # fmt: skip
def test_sizes(text, size):
    assert memory_size("memory_budget", text) == size


@pytest.mark.parametrize(
    "value", ["", "MB", "12 parsecs", "-1GB", "1.2.3MB", "0", 0, -5, 0.5, float("nan"), float("inf"), True, None, [1]]
)
def test_bad_sizes_are_refused_by_name(value):
    with pytest.raises(ValueError, match=r"^memory_budget.*bytes"):
        memory_size("memory_budget", value)


def test_the_default_is_half_of_what_is_free(monkeypatch):
    for free, expected in ((8_000_000_000, 4_000_000_000), (1001, 500)):
        monkeypatch.setattr(host, "free_memory", lambda device, free=free: free)
        assert default_budget(CPU) == expected


def test_what_is_free_is_less_than_what_there_is():
    assert 2**20 < free_memory(CPU) <= total_memory(CPU)


@pytest.mark.parametrize(("line", "root"), [("0::/jobs/7/step", "v2"), ("4:cpu,memory:/jobs/7/step", "v1")])
def test_the_limit_of_a_batch_job_is_that_of_its_control_group_or_one_around_it(line, root, monkeypatch, tmp_path):
    (tmp_path / "own").write_text(f"9:pids:/elsewhere\n{line}\n")
    monkeypatch.setattr(host, "_OWN_GROUPS", str(tmp_path / "own"))
    monkeypatch.setattr(host, "_CONTAINER", (str(tmp_path / "v2" / "limit"), str(tmp_path / "v1" / "limit")))
    whole = host.memory_size()
    (tmp_path / root / "jobs" / "7" / "step").mkdir(parents=True)
    (tmp_path / root / "jobs" / "7" / "step" / "limit").write_text("max\n")
    assert host.memory_size() == whole
    (tmp_path / root / "jobs" / "limit").write_text("123456789\n")
    assert host.memory_size() == 123456789
    (tmp_path / root / "jobs" / "7" / "limit").write_text("23456789\n")
    assert host.memory_size() == 23456789


@pytest.mark.parametrize(
    ("line", "names", "cache"),
    [
        ("0::/job", ("memory.max", "memory.current"), "inactive_file"),
        ("4:memory:/job", ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_inactive_file"),
    ],
)
def test_what_a_container_has_used_is_not_free(line, names, cache, monkeypatch, tmp_path):
    (tmp_path / "own").write_text(f"{line}\n")
    monkeypatch.setattr(host, "_OWN_GROUPS", str(tmp_path / "own"))
    monkeypatch.setattr(host, "_CONTAINER", (str(tmp_path / "memory.max"), str(tmp_path / "memory.limit_in_bytes")))
    (tmp_path / "job").mkdir()
    limit, used = (tmp_path / "job" / name for name in names)
    limit.write_text("100000000\n")
    assert free_memory(CPU) == 100_000_000
    used.write_text("70000000\n")
    assert free_memory(CPU) == 30_000_000
    (tmp_path / "job" / "memory.stat").write_text(f"anon 3\n{cache} 50000000\n")  # files, which can be given up
    assert free_memory(CPU) == 80_000_000
    used.write_text("170000000\n")
    assert free_memory(CPU) == 0


def blocks(activations, rows, least_block=(1, 1)):
    needs = Footprint(
        parameters=10, rows=rows, columns=4, row_bytes=(100, 100), pairs=5, most_pairs=lambda rows: 5, per_pair=0,
        item=4, on_cpu=True, least_block=least_block,
    )  # fmt: skip
    return plan_blocks(activations, rows, needs)


def test_memory_that_torch_keeps_for_this_process_is_free(monkeypatch):
    numbers = {"mem_get_info": (10_000, 80_000), "memory_reserved": 50_000, "memory_allocated": 20_000}
    for name, value in numbers.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert free_memory(torch.device("cuda")) == 40_000


def test_what_fits_is_kept():
    plans = blocks(10_000, (50, 40))
    assert plans == (BlockPlan(50, True), BlockPlan(40, True))


def test_the_smaller_side_is_kept_first():
    left, right = blocks(6_000, (500, 40))
    assert right == BlockPlan(40, True)
    assert not left.keep
    assert 3 * left.rows * 100 <= 6_000 - 40 * 100 or left.rows == 16  # a block and its temporaries fit what is left


def test_blocks_are_never_larger_than_usual_nor_useless_small(monkeypatch):
    monkeypatch.setattr(plan, "_CPU_BLOCK", 64)
    assert blocks(10**9, (500, 40)) == (BlockPlan(64, True), BlockPlan(40, True))
    assert blocks(10**9, (500, 40), (200, 1))[0] == BlockPlan(200, True)
    assert blocks(1, (500, 10)) == (BlockPlan(16, False), BlockPlan(10, False))


def test_the_plan_says_what_it_does():
    case = make_case(memory_budget="1GB")
    assert repr(case.problem.plan(case.towers)) == "Plan(1MB of 1000MB: left activations kept; right activations kept)"
    case.problem.activations = 1
    assert "left activations recomputed in blocks of" in repr(case.problem.plan(case.towers))
    case.problem.streamed = Streamed(4, pinned=False)
    assert "left rows streamed in blocks of 4, their pairs on the device" in repr(case.problem.plan(case.towers))


def results(case):
    point = case.problem.at(case.towers)
    gradient = point.gradient().to_vector()
    product = point.gauss_newton() @ torch.linspace(-1, 1, len(gradient), dtype=torch.float64)
    return point, torch.cat([torch.tensor([point.value]), gradient, product])


@pytest.mark.parametrize("activations", [None, 1, 1200])
@pytest.mark.parametrize("kind", ["ids", "dense", "sparse"])
@pytest.mark.parametrize("tower", ["elu", "linear", "residual", "custom", "branching", "normalised", "gelu-relu"])
def test_blocks_and_recomputation_do_not_change_results(tower, kind, activations, monkeypatch):
    size = dict(m=45, n=38, tower=tower, kinds=(kind, kind), weights=True, embedding_l2=0.1, seed=30)
    whole, expected = results(make_case(**size, memory_budget="1GB"))
    assert whole.evaluation.left.plan == BlockPlan(45, True)
    monkeypatch.setattr(plan, "_CPU_BLOCK", 7)
    point, found = results(make_case(**size, activations=activations))
    assert relative(found, expected) < 1e-13
    table_by_autodiff = tower == "branching" and kind == "ids"  # which would be walked once for every block
    assert point.evaluation.left.plan.rows == (7 if not table_by_autodiff else 45 if activations is None else 16)
    assert activations is None or not (point.evaluation.left.plan.keep and point.evaluation.right.plan.keep)


def test_one_module_for_both_sides_in_blocks(monkeypatch):
    _, expected = results(make_case(m=45, shared=True, seed=31))
    monkeypatch.setattr(plan, "_CPU_BLOCK", 7)
    assert relative(results(make_case(m=45, shared=True, seed=31, activations=1))[1], expected) < 1e-13


def test_a_full_gpu_is_an_error_that_names_the_budget_to_set(monkeypatch):
    case = make_case(memory_budget="2GB")

    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(gt.Towers, "linearize", full)
    with pytest.raises(MemoryError, match=r"memory_budget.*2.0 GB.*memory_budget='1.0GB'"):
        case.problem.at(case.towers)
    with pytest.raises(MemoryError, match="memory_budget"):
        gt.minimize(case.problem, case.towers)


def test_a_budget_that_cannot_be_kept_is_refused_with_the_smallest_that_can():
    problem = gt.Problem(planted_pairs(3000, 2000, 20_000), memory_budget="1MB")
    towers = gt.mlp_towers(problem, (), 64)
    with pytest.raises(ValueError, match=r"^memory_budget.*1,000,000.*'(\d+)MB'") as refused:
        problem.at(towers)
    with pytest.raises(ValueError, match="memory_budget"):
        gt.minimize(problem, towers)
    problem.memory_budget = memory_size("memory_budget", str(refused.value).split("'")[1])
    assert problem.memory_budget >= problem.least_budget(towers) > 5 * 1_000_000
    assert gt.minimize(problem, towers, max_iterations=1).reason is gt.Reason.MAX_ITERATIONS


def test_towers_that_the_memory_cannot_train_are_refused_before_work(monkeypatch):
    case = make_case()
    monkeypatch.setattr("gramtower.engine.objective.problem.free_memory", lambda device: 100)
    with pytest.raises(ValueError, match=r"^towers.*\d+ parameters"):
        case.problem.at(case.towers)


PEAK = """
import sys
import numpy as np
import scipy.sparse as sp
import gramtower as gt
from gramtower.data.datasets import planted_pairs
from gramtower._util.host import ResidentPeak, threads_of_fit

def half_of_all_pairs(m, n):
    return sp.csr_matrix((np.random.default_rng(0).random((m, n)) < 0.5).astype(np.float32))

def run(pairs, hidden, dim, share=1.0, iterations=2, **options):
    problem = gt.Problem(pairs, embedding_l2=0.01, right_weights="degree^0.1")
    towers = gt.mlp_towers(problem, hidden, dim)
    problem.memory_budget = int(problem.least_budget(towers) * share)
    resident = ResidentPeak()
    gt.minimize(problem, towers, max_iterations=iterations, **options)
    return resident.bytes() - resident.start, problem.memory_budget

for hidden in ((8,), ()):  # compiles, and fills the libraries' own caches
    for share in (1.0, 4.0):
        run(planted_pairs(300, 200, 3000), hidden, 4, share, 9)
print(*eval(sys.argv[1]))
"""


BUDGETS = [
    "planted_pairs(12_000, 8_000, 80_000), (96,), 64",
    "planted_pairs(12_000, 8_000, 80_000), (), 64, 1.0, 6, memory=0",  # by conjugate gradient
    "planted_pairs(12_000, 8_000, 80_000), (), 64, 1.5, 9",  # with room for pairs of secant steps
    "half_of_all_pairs(2400, 1000), (), 8, 1.0, 6",  # what is kept of pairs is most of it
]


@pytest.fixture(scope="module")
def compiled():
    """What a process compiles stays in its memory; those that are measured find it in the cache."""
    command = [sys.executable, "-c", PEAK, f"[run({'), run('.join(BUDGETS)})]"]
    subprocess.run(command, capture_output=True, check=True)


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="no peak of the resident memory to be had")
@pytest.mark.parametrize("given", BUDGETS)
@pytest.mark.usefixtures("compiled")
def test_training_stays_within_the_smallest_budget(given):
    command = [sys.executable, "-c", PEAK, f"run({given})"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    peak, budget = (int(x) for x in done.stdout.split())
    assert 0.55 * budget < peak < 1.05 * budget


FITS = """
import gc
import gramtower as gt
from gramtower.data.datasets import planted_pairs

def resident():
    gc.collect()
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))

pairs, sizes = planted_pairs(900, 700, 8000), []
for _ in range(10):
    gt.TwoTower(dim=32, hidden=(32,), max_iterations=1, device="cpu").fit(pairs)
    sizes.append(resident())
print(sizes[2], max(sizes))
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="the resident memory cannot be read")
def test_fit_after_fit_leaves_the_resident_memory_flat():
    done = subprocess.run([sys.executable, "-c", FITS], capture_output=True, text=True, check=True)
    third, largest = (int(x) for x in done.stdout.split())
    assert largest < 1.05 * third


def test_a_problem_is_gone_when_nobody_holds_it():
    problem = gt.Problem(planted_pairs(60, 40, 300))
    towers = gt.mlp_towers(problem, (4,), 3)
    gt.minimize(problem, towers, max_iterations=2)
    gone = [weakref.ref(problem), weakref.ref(problem.pairs)]
    del problem
    assert [ref() for ref in gone] == [None, None]  # by counting references, not when the collector comes along


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="no peak of the resident memory to be had")
def test_the_peak_of_the_resident_set_is_that_since_a_moment():
    first = ResidentPeak()
    block = np.ones(40_000_000, dtype=np.uint8)
    del block
    assert first.bytes() - first.start > 35e6
    second = ResidentPeak()
    assert second.bytes() - second.start < 20e6  # what was there before does not count


@pytest.mark.parametrize(("quota", "cpus"), [("150000 100000", 2), ("50000 100000", 1), ("max 100000", 64), ("", 64)])
def test_a_process_may_use_the_cpus_of_its_affinity_and_its_containers_quota(quota, cpus, tmp_path, monkeypatch):
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(host, "_CONTAINER", (str(tmp_path / "memory.max"), str(tmp_path / "v1" / "limit")))
    monkeypatch.setattr(host, "_OWN_GROUPS", str(tmp_path / "none"))
    monkeypatch.setattr(host, "_CPU_V1", tmp_path / "none")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)), raising=False)
    assert host.cpu_count() == cpus


def test_an_older_control_group_has_a_quota_too(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "_CONTAINER", (str(tmp_path / "memory.max"), str(tmp_path / "limit")))
    monkeypatch.setattr(host, "_OWN_GROUPS", str(tmp_path / "none"))
    monkeypatch.setattr(host, "_CPU_V1", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)), raising=False)
    for quota, cpus in ((-1, 64), (250_000, 3)):
        (tmp_path / "cpu.cfs_quota_us").write_text(str(quota))
        (tmp_path / "cpu.cfs_period_us").write_text("100000")
        assert host.cpu_count() == cpus


@pytest.mark.parametrize(
    ("cpus", "waits", "running", "threads"), [(2, False, 9, 2), (1, False, 1, 1), (4, True, 4, 1), (4, True, 1, 3)]
)
def test_a_fit_takes_no_more_threads_than_cpus_that_it_may_use(cpus, waits, running, threads, monkeypatch):
    monkeypatch.setattr(host, "cpu_count", lambda: cpus)
    monkeypatch.setattr(host, "running_tasks", lambda: running)
    monkeypatch.setattr(gt, "_long_waits", waits)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(min(cpus + 1, 3))
        with threads_of_fit(False):
            assert torch.get_num_threads() == threads
        assert torch.get_num_threads() == min(cpus + 1, 3)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("first", "variables", "expected"),
    [
        ("", {}, "1000 False"),
        ("import torch", {}, "1000 True"),
        ("import torch", {"GOMP_SPINCOUNT": "7"}, "7 False"),
        ("", {"OMP_WAIT_POLICY": "passive"}, "None False"),
    ],
)
def test_threads_of_torch_wait_shortly_unless_the_user_says_how(first, variables, expected):
    code = f"{first}\nimport os, gramtower\nprint(os.environ.get('GOMP_SPINCOUNT'), gramtower._long_waits)"
    env = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")} | variables
    found = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == expected
