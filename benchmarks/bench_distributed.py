"""Several processes against one. `python benchmarks/bench_distributed.py [time|memory|same|shares|engines|…]`.

time     ml10m shape: one gradient and one G·d in two processes on two cores against one process on one core, one thread
         for each process, by turns
memory   netflix shape: peak memory of reading, evaluating, one gradient and one G·d, per process, four against one
model    the cost model of docs/scale.md, in CPU seconds of a process for one G·d: constants from one process on two
         shapes, predictions for two processes and for a third shape against measurements
same     objective and metrics of a fit of the bundled npm packages by 1, 2 and 4 processes: differences from the fit of
         one table in one process. Nothing is timed
shares   peak memory of each of two processes that read a folder of --pairs generated pairs, over the bytes of its share
engines  total time of a fit of --pairs pairs in two local processes that Spark and Ray start, against torchrun plus the
         start of the session or the cluster and of its processes, by turns, one thread for each; needs pyspark and ray
predict  what measured constants say of one G·d on 1 to 64 GPUs; nothing is timed. One G·d takes a process
         T = c_pair · pairs / N + c_row · entities / N + bytes / bandwidth + 3 · latency. c_pair and c_row follow from
         the measured G·d of the ml10m and netflix shapes on one H200 (results/gpu.json: towers 256-256 → 128, tf32).
         The bytes are those of docs/scale.md, asserted in tests/test_distributed.py. Bandwidth and latency of
         collectives are assumed, and so are even shares, and that nothing overlaps. Prints the tables of docs/scale.md.

All but predict print the ratio and the bound they are held to, and write the section distributed-<name> of
benchmarks/results/scale.json.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import evidence_tables
import numpy as np
import scipy.sparse as sp
import torch
from common import write_result

import gramtower as gt
from gramtower._util.files import replacing_folder
from gramtower.data.datasets import PAPER_SHAPES, packages, planted_pairs
from gramtower.data.splits import per_user
from gramtower.distributed.group import current_group
from gramtower.distributed.partition import read_part, write_partition
from gramtower.launch import ray as on_ray
from gramtower.launch import spark as on_spark

HIDDEN, DIM = (256, 256), 128
SHAPES = PAPER_SHAPES | {"many rows": (20_000, 15_000, 300_000), "many pairs": (12_000, 4_000, 1_500_000)}
FITS = {
    "linear": {"hidden": (), "select": False, "optimizer_options": {"sweeps": 0}},
    "hidden layer of 256": {"hidden": (256,), "select": False},
    "defaults": {},  # the penalty is chosen by held-out pairs
}
METRICS = ("recall@20", "ndcg@20", "map@5")


def make_folder(shape: str, place: Path, parts: int = 16, planted: bool = True) -> Path:
    """The pairs of a shape as a folder of parts, made once; ``planted=False`` is faster and has no structure."""
    folder = place / (shape if planted else f"{shape}-random")
    if not folder.exists():
        pairs = planted_pairs(*SHAPES[shape], groups=64) if planted else random_pairs(*SHAPES[shape])
        write_partition(gt.Interactions.from_matrix(pairs), folder, parts)
    return folder


def random_pairs(m: int, n: int, observed: int) -> sp.csr_matrix:
    """About ``observed`` pairs: skewed numbers for the rows, columns drawn evenly."""
    rng = np.random.default_rng(0)
    activity = np.exp(rng.normal(size=m))
    counts = np.minimum(activity / activity.sum() * observed, n / 4).astype(np.int64) + 1
    offsets, columns = [np.zeros(1, np.int64)], []
    for start in range(0, m, 1 << 14):
        part = counts[start : start + (1 << 14)]
        rows = np.repeat(np.arange(len(part)), part)
        keys = np.unique(rows * n + rng.integers(n, size=len(rows)))
        columns.append((keys % n).astype(np.int32))
        offsets.append(np.bincount(keys // n, minlength=len(part)))
    indices = np.concatenate(columns)
    return sp.csr_matrix((np.ones(len(indices), np.float32), indices, np.cumsum(np.concatenate(offsets))), (m, n))


def run_processes(size: int, folder: Path, what: str, repeats: int) -> list[dict]:
    """Start processes with one thread each, pinned to a core each when there are enough, and collect their answers."""
    with tempfile.TemporaryDirectory() as store:
        command = [
            sys.executable,
            __file__,
            "child",
            "--folder",
            str(folder),
            "--work",
            what,
            "--repeats",
            str(repeats),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD": str(size), "STORE": f"file://{store}/store"}
        started = [
            subprocess.Popen(command, env={**environment, "MEMBER": str(rank)}, stdout=subprocess.PIPE, text=True)
            for rank in range(size)
        ]
        outputs = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit("a process failed")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def child(folder: Path, what: str, repeats: int) -> None:
    rank, size = int(os.environ["MEMBER"]), int(os.environ["WORLD"])
    cores = sorted(os.sched_getaffinity(0))
    if what == "time" and size <= len(cores):
        os.sched_setaffinity(0, {cores[rank]})
    torch.set_num_threads(1)
    if size > 1:
        torch.distributed.init_process_group("gloo", init_method=os.environ["STORE"], rank=rank, world_size=size)
    group = current_group()
    if what in ("same", "shares"):
        print(json.dumps((_fit_share if what == "same" else _read_share)(folder)))
        if size > 1:
            torch.distributed.destroy_process_group()
        return
    before = _status("VmRSS")
    part = read_part(folder, group=group)
    shards = None if group.size == 1 else part.shards
    problem = gt.Problem(part.matrix, omega=2.0**-8, l2=1.0, shards=shards, memory_budget="10GB")
    towers = gt.mlp_towers(problem, HIDDEN, DIM)
    point = problem.at(towers)
    value = point.value
    gradient = point.gradient()
    G, out = point.gauss_newton(), gradient.empty()
    G.product(gradient, out)
    times: dict[str, list[float]] = {"gradient": [], "product": []}
    busy: dict[str, list[float]] = {"gradient": [], "product": []}  # the same in CPU seconds of this process
    for _ in range(repeats):
        for name, run in (("gradient", point.gradient), ("product", lambda: G.product(gradient, out))):
            group.totals(0.0)  # waits for all
            start, cpu = time.perf_counter(), time.process_time()
            run()
            busy[name].append(time.process_time() - cpu)
            group.totals(0.0)  # waits for all
            times[name].append(time.perf_counter() - start)
    answer = {
        "value": value, "norm": out.norm(), "rows": problem.left.rows + problem.right.rows, "pairs": len(problem.pairs),
        "times": times, "busy": busy, "bytes": group.product_bytes, "peak": _status("VmHWM"), "start": before,
        "gather_s": _gather_seconds(problem, point),
    }  # fmt: skip
    print(json.dumps(answer))
    if size > 1:
        torch.distributed.destroy_process_group()


def _fit_share(folder: Path) -> dict:
    """Fit and evaluate the share of this process; "whole" instead of "parts" fits one table."""
    test = gt.Interactions.from_parquet(folder.parent / "test.parquet", 0, 1)
    found = {}
    for name, settings in FITS.items():
        whole = folder.name == "whole"
        pairs = gt.Interactions.from_parquet(folder.parent / "parts", 0, 1) if whole else read_part(folder)
        model = gt.TwoTower(dim=64, device="cpu", max_iterations=15, seed=1, verbose=False, **settings)
        model.fit(pairs, validation=0.1)
        kept = next(record for record in model.history_ if record.metric == model.best_metric_)
        scores = {key: float(value) for key, value in model.evaluate(test, METRICS).items()}
        found[name] = {
            "objective": kept.value, "validation": model.best_metric_, "iterations": model.history_[-1].iteration,
            "l2": model.embedding_l2_, **scores,
        }  # fmt: skip
    return found


def measure_same(place: Path) -> None:
    """Fit the same pairs as one table and in 1, 2 and 4 processes."""
    split = per_user(packages(), 0.2, seed=0)
    write_partition(split.train, place / "parts", 8)
    write_partition(split.test, place / "test", 1)
    (place / "test/part-00000.parquet").replace(place / "test.parquet")
    found = {"one table": run_processes(1, place / "whole", "same", 0)[0]}
    for size in (1, 2, 4):
        answers = run_processes(size, place / "parts", "same", 0)
        if any(answer != answers[0] for answer in answers):
            raise SystemExit("processes differ")
        found[f"{size}"] = answers[0]
    worst = {}
    for name in found["one table"]:
        print(name)
        for size, answer in found.items():
            numbers = answer[name]
            print(f"  {size:>9}: " + ", ".join(f"{key} {value:.8g}" for key, value in numbers.items()))
        whole = found["one table"][name]
        keys = ("objective", *METRICS)
        worst[name] = {key: max(abs(one[name][key] / whole[key] - 1) for one in found.values()) for key in keys}
        print(f"  largest relative difference: objective {worst[name]['objective']:.1e} (<= 1e-6), ", end="")
        print(", ".join(f"{key} {worst[name][key]:.1e}" for key in METRICS))
    write_result("scale/distributed-same", {"data": "npm packages", "found": found, "differences": worst})


def make_shares(place: Path, pairs: int) -> Path:
    """A folder of generated pairs in parts of about a million, made part by part: whole-number ids, 30 pairs each."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder, parts = place / f"shares-{pairs}", max(4, pairs // 1_000_000)
    users, items = pairs // 30 // parts, max(1000, pairs // 300)
    if folder.exists():
        return folder
    with replacing_folder(folder) as partial:
        for part in range(parts):
            rng = np.random.default_rng([0, part])
            rows = {
                "user": rng.integers(part * users, (part + 1) * users, size=pairs // parts),
                "item": (items * rng.random(pairs // parts) ** 2).astype(np.int64),
            }
            pq.write_table(pa.table(rows), partial / f"part-{part:05d}.parquet")
    return folder


def _read_share(folder: Path) -> dict:
    """Peak memory of reading, after a folder of a few pairs was read: libraries are loaded, and code is compiled."""
    read_part(folder.parent / "few")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = _status("VmRSS")
    part = read_part(folder)
    peak, matrix = _status("VmHWM"), part.matrix
    ids = part.left_ids.nbytes + part.right_ids.nbytes
    share = matrix.data.nbytes + matrix.indices.nbytes + matrix.indptr.nbytes + ids
    return {"before": before, "peak": peak, "after": _status("VmRSS"), "share": share, "pairs": int(matrix.nnz)}


def measure_shares(place: Path, pairs: int) -> None:
    """Peak memory of two processes that read a folder."""
    folder = make_shares(place, pairs)
    write_partition(gt.Interactions.from_matrix(random_pairs(200, 100, 1000)), place / "few", 4)
    answers = run_processes(2, folder, "shares", 0)
    ratio = max((answer["peak"] - answer["before"]) / answer["share"] for answer in answers)
    for rank, answer in enumerate(answers):
        print(
            f"process {rank}: {answer['pairs']:,} pairs, a share of {answer['share'] / 1e9:.3f} GB; peak "
            f"{answer['peak'] / 1e9:.3f} GB, of which {answer['before'] / 1e9:.3f} GB before reading"
        )
    print(f"largest growth over the share: {ratio:.2f} (<= 1.3 from 300 M pairs on)")
    write_result(
        f"scale/distributed-shares-{pairs // 1_000_000}M", {"pairs": pairs, "processes": answers, "ratio": ratio}
    )


def _gather_seconds(problem: gt.Problem, point) -> float:
    """Shortest time of gathering all right rows: what one byte costs between processes."""
    if problem.shards.single:
        return 0.0
    found = []
    for _ in range(7):
        start = time.perf_counter()
        problem.shards.gather(point.Q).wait()
        found.append(time.perf_counter() - start)
    return min(found)


def measure_time(place: Path) -> None:
    folder = make_folder("ml10m", place)
    found: dict[int, list[dict]] = {1: [], 2: []}
    for _ in range(2):
        for size in found:
            found[size] += run_processes(size, folder, "time", 3)

    def medians(clock: str) -> dict[str, dict[int, float]]:
        return {
            name: {size: statistics.median(t for run in runs for t in run[clock][name]) for size, runs in found.items()}
            for name in ("gradient", "product")
        }

    seconds, busy = medians("times"), medians("busy")
    ratios = {name: both[2] / both[1] for name, both in seconds.items()}
    busy_ratios = {name: both[2] / both[1] for name, both in busy.items()}
    for name, both in seconds.items():
        print(
            f"{name}: one process {both[1]:.3f} s, two {both[2]:.3f} s: ratio {ratios[name]:.3f} (<= 0.62); "
            f"CPU seconds of a process: ratio {busy_ratios[name]:.3f}"
        )
    worst = max(abs(run["value"] / found[1][0]["value"] - 1) for run in found[2])
    print(f"largest relative difference of the objective {worst:.1e}, {found[2][0]['bytes'] / 1e6:.1f} MB per G·d")
    write_result(
        "scale/distributed-time",
        {
            "shape": "ml10m",
            "seconds": seconds,
            "ratios": ratios,
            "cpu_seconds": busy,
            "cpu_ratios": busy_ratios,
            "value_difference": worst,
        },
    )


def measure_memory(place: Path, shape: str) -> None:
    folder = make_folder(shape, place, planted=False)
    found = {size: run_processes(size, folder, "memory", 0) for size in (4, 1)}
    peaks = {size: max(answer["peak"] for answer in answers) for size, answers in found.items()}
    ratio = peaks[4] / peaks[1]
    start = found[1][0]["start"]
    print(
        f"{shape}: peak of one process {peaks[1] / 1e9:.2f} GB, largest of four {peaks[4] / 1e9:.2f} GB: "
        f"ratio {ratio:.3f} (<= 0.35); {start / 1e9:.2f} GB of each are libraries"
    )
    pairs = found[1][0]["pairs"]
    write_result(
        "scale/distributed-memory", {"shape": shape, "pairs": pairs, "peaks": peaks, "ratio": ratio, "libraries": start}
    )


def measure_model(place: Path) -> None:
    runs = {}
    for shape in ("ml1m", "many rows", "many pairs"):
        folder = make_folder(shape, place)
        for size in (1, 2):
            answers = run_processes(size, folder, "time", 3)
            runs[shape, size] = {
                "seconds": max(statistics.median(answer["busy"]["product"]) for answer in answers),
                "wall_s": statistics.median(answers[0]["times"]["product"]),
                "pairs": max(answer["pairs"] for answer in answers),
                "rows": max(answer["rows"] for answer in answers),
                "bytes": max(answer["bytes"] for answer in answers),
                "gather_s": answers[0]["gather_s"],
            }
    known = [runs["many pairs", 1], runs["many rows", 1]]
    table = np.array([[run["pairs"], run["rows"]] for run in known], dtype=float)
    pair_s, row_s = np.linalg.solve(table, [run["seconds"] for run in known])
    byte_s = runs["many rows", 2]["gather_s"] / (SHAPES["many rows"][1] / 2 * DIM * 4)
    print(f"a pair {1e9 * pair_s:.1f} ns, a row {1e6 * row_s:.2f} µs, a byte {1e9 * byte_s:.3f} ns of waiting")
    rows = []
    for (shape, size), run in runs.items():
        predicted = pair_s * run["pairs"] + row_s * run["rows"]
        rows.append({"shape": shape, "processes": size, "predicted_s": predicted, **run})
        print(
            f"{shape}, {size}: predicted {predicted:.3f} CPU seconds, measured {run['seconds']:.3f}, "
            f"ratio {predicted / run['seconds']:.2f}; {run['bytes'] / 1e6:.1f} MB"
        )
    write_result("scale/distributed-model", {"pair_s": pair_s, "row_s": row_s, "byte_s": byte_s, "rows": rows})


def engine_child(name: str, folder: Path, out: Path) -> None:
    """Start Spark or Ray, fit, and print the seconds of both; the library is imported already, as in a notebook."""
    settings = gt.TwoTower(dim=32, hidden=(), max_iterations=10, device="cpu", select=False)
    start = time.perf_counter()
    if name == "spark":
        from pyspark.sql import SparkSession

        SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    else:
        import ray

        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    started = time.perf_counter()
    if name == "spark":
        fitted = on_spark.fit(folder, settings, out=out, num_processes=2)
    else:
        from ray.train import ScalingConfig

        fitted = on_ray.fit(folder, settings, out=out, scaling_config=ScalingConfig(num_workers=2))
    ended = time.perf_counter()
    print(json.dumps({"start": started - start, "fit": ended - started, "value": fitted.history[-1].value}))


def run_engine(name: str, folder: Path, out: Path) -> dict[str, float]:
    """Seconds of the start of an engine and of the fit, and the objective; torchrun has no start of its own."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    environment["RAY_AUTH_TOKEN"] = secrets.token_hex(32)  # of this cluster only; otherwise Ray keeps one in the home
    if name == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
        command += [
            "gramtower",
            "fit",
            str(folder),
            "--left",
            "left",
            "--right",
            "right",
            "--out",
            str(out),
            "--dim",
            "32",
            "--hidden",
            "none",
        ]
        command += ["--max-iterations", "10", "--device", "cpu", "--select", "off", "--quiet"]
        before = time.perf_counter()
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - before
        return {"start": 0.0, "fit": seconds, "value": gt.read_history(out / "history.jsonl")[-1].value}
    command = [sys.executable, __file__, "child", "--work", name, "--folder", str(folder), "--out", str(out)]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"start"')]
    found: dict[str, float] = json.loads(lines[-1])
    return found


def measure_engines(place: Path, pairs: int, repeats: int) -> None:
    """Compare engines with torchrun; a fit of few pairs shows how long each takes to start processes."""
    sizes = {"all": pairs, "few": 2_000}
    shapes = {name: (max(200, count // 50), max(100, count // 250), count) for name, count in sizes.items()}
    for name, shape in shapes.items():
        write_partition(gt.Interactions.from_matrix(random_pairs(*shape)), place / f"engines-{name}", 8)
    found: dict[str, dict[str, list[dict[str, float]]]] = {
        engine: {name: [] for name in sizes} for engine in ("torchrun", "spark", "ray")
    }
    for _ in range(repeats):
        for engine, runs in found.items():
            for name in sizes:
                with tempfile.TemporaryDirectory() as out:
                    runs[name].append(run_engine(engine, place / f"engines-{name}", Path(out) / "run"))
    seconds = {
        engine: {
            "session": statistics.median(run["start"] for run in runs["all"] + runs["few"]),
            **{name: statistics.median(run["fit"] for run in runs[name]) for name in sizes},
        }
        for engine, runs in found.items()
    }
    alone, ratios = seconds["torchrun"], {}
    for engine in ("spark", "ray"):
        own = seconds[engine]
        start = own["session"] + max(0.0, own["few"] - alone["few"])
        ratios[engine] = (own["session"] + own["all"]) / (alone["all"] + start)
        print(
            f"{engine}: session {own['session']:.1f} s, fit {own['all']:.1f} s (few pairs {own['few']:.1f} s); "
            f"torchrun {alone['all']:.1f} s ({alone['few']:.1f} s): total over torchrun and start "
            f"{ratios[engine]:.2f} (<= 1.3), fit over torchrun {own['all'] / alone['all']:.2f}"
        )
    first = found["torchrun"]["all"][0]["value"]
    worst = max(abs(run["value"] / first - 1) for runs in found.values() for run in runs["all"])
    print(f"largest relative difference of the objective {worst:.1e}")
    content = {"shape": shapes["all"], "seconds": seconds, "ratios": ratios, "value_difference": worst}
    write_result("scale/distributed-engines", content | {"repeats": repeats})


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "what",
        nargs="?",
        default="all",
        choices=["time", "memory", "model", "all", "same", "shares", "predict", "engines", "child"],
    )
    parser.add_argument("--place", type=Path, help="folder to keep the generated data in; otherwise a temporary one")
    parser.add_argument("--shape", default="netflix", choices=list(PAPER_SHAPES), help="for memory")
    parser.add_argument("--pairs", type=int, help="for shares, 300 million by default, and engines, 5 million")
    parser.add_argument("--inside", default="200", help="GB/s of a GPU within a host of eight, for predict")
    parser.add_argument("--between", default="40", help="GB/s of a GPU between hosts, for predict")
    parser.add_argument("--latency", default="50", help="microseconds of a collective, for predict")
    for hidden in ("--folder", "--work", "--out"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--repeats", type=int, default=3, help="for engines: fits with each")
    arguments = parser.parse_args()
    if arguments.what == "child" and arguments.out:
        engine_child(arguments.work, Path(arguments.folder), Path(arguments.out))
    elif arguments.what == "child":
        child(Path(arguments.folder), arguments.work, arguments.repeats)
    elif arguments.what == "predict":
        print(
            evidence_tables.markdown(
                evidence_tables.table_predicted(arguments.inside, arguments.between, arguments.latency)
            )
        )
    else:
        with tempfile.TemporaryDirectory() as temporary:
            place = arguments.place or Path(temporary)
            if arguments.what == "engines":
                measure_engines(place, arguments.pairs or 5_000_000, arguments.repeats)
            if arguments.what in ("time", "all"):
                measure_time(place)
            if arguments.what in ("memory", "all"):
                measure_memory(place, arguments.shape)
            if arguments.what in ("model", "all"):
                measure_model(place)
            if arguments.what == "same":
                measure_same(place)
            if arguments.what == "shares":
                measure_shares(place, arguments.pairs or 300_000_000)
