"""What happens between files and the first iteration, step by step: seconds for each hundred million pairs.

    python benchmarks/bench_setup.py [--pairs 10000000] [--dim 128] [--threads N …]

Pairs of skewed popularity, one left entity for 30 pairs and one right entity for 300 (10 M × 1 M at 300 million), are
taken through every step that visits all pairs, or every number of the towers: rows in any order to a matrix (merging),
its checks and copies, counts and order by columns, first weights, digests for checkpoints, and ids from several threads
as numbers. With several --threads, the results of each step are compared with those of the first number: they must be
equal to the bit. The aim is 3 s in all for a hundred million pairs on 16 cores; the reading of files is timed by
bench_reading.py. Writes the section setup of benchmarks/results/reading.json (with the number of pairs in its name
unless these are 100 million).
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from common import write_result

import gramtower as gt
from gramtower._util.host import parallel_for
from gramtower.data.interning import Table
from gramtower.data.matrices import merge
from gramtower.data.pairs import bin_count, from_sparse
from gramtower.distributed.group import SINGLE
from gramtower.training.checkpoint import sparse_digest

AIM = 3.0  # seconds for 100 million pairs
PIECE = 1 << 19


def rows_of(pairs: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, tuple[int, int]]:
    """Left and right entities of rows in no order."""
    rng = np.random.default_rng(seed)
    shape = max(pairs // 30, 1), max(pairs // 300, 1)
    left = (shape[0] * rng.random(pairs, np.float32) ** 1.5).astype(np.int32)
    right = (shape[1] * rng.random(pairs, np.float32) ** 2).astype(np.int32)
    return np.minimum(left, shape[0] - 1), np.minimum(right, shape[1] - 1), shape


def numbered(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Whole-number ids as row numbers, piece by piece in all threads; and the ids."""
    table, marks = Table(text=False), np.empty(len(ids), np.int32)

    def work(start: int, stop: int) -> None:
        values = ids[start:stop].astype(np.int64) * 7919
        marks[start:stop] = table.add_numbers(values, np.arange(start, stop), turn=start // PIECE)

    parallel_for(work, [*range(0, len(ids), PIECE), len(ids)])
    numbers = table.finish()
    parallel_for(lambda a, b: np.take(numbers, marks[a:b], out=marks[a:b]), [*range(0, len(ids), PIECE), len(ids)])
    return marks, table.names(numbers)


def mark_of(result: Any) -> str:
    """A digest of arrays, to compare the results of different numbers of threads."""
    found = hashlib.blake2b(digest_size=8)
    for array in result:
        found.update(np.ascontiguousarray(array).view(np.uint8) if not isinstance(array, str) else array.encode())
    return found.hexdigest()


def steps(pairs: int, dim: int, marks: dict[str, str] | None) -> dict[str, float]:
    """Seconds of each step; the second call of what is compiled. Compares with marks, or fills them."""
    left, right, shape = rows_of(pairs)
    times: dict[str, float] = {}

    def take(name: str, work: Callable[[], Any], arrays: Callable[[Any], Any]) -> Any:
        start = time.perf_counter()
        made = work()
        times[name] = time.perf_counter() - start
        if marks is not None:
            mark = mark_of(arrays(made))
            if marks.setdefault(name, mark) != mark:
                raise SystemExit(f"{name}: another result with {torch.get_num_threads()} threads")
        return made

    take("ids as numbers", lambda: numbered(left), lambda made: made)
    matrix = take(
        "order by rows",
        lambda: merge(left, right, shape, None, None, None, "max")[0],
        lambda made: (made.indptr, made.indices, made.data),
    )
    found, _ = take("checks and copies", lambda: from_sparse("pairs", matrix), lambda made: [made[0].columns.numpy()])
    take("counts by column", lambda: bin_count(found.columns, shape[1]), lambda made: [made.numpy()])
    take("order by columns", lambda: found.by_column, lambda made: [made.rows.numpy(), made.position.numpy()])
    offsets, columns = found.offsets.numpy(), found.columns.numpy()
    take(
        "digest of the pairs",
        lambda: sparse_digest(offsets, columns, matrix.data, 0, shape[1]).text(SINGLE),
        lambda made: [made],
    )
    problem = gt.Problem(matrix)
    take(
        "first weights",
        lambda: gt.mlp_towers(problem, hidden=(), dim=dim),
        lambda made: [made.parameters().to_vector().numpy()],
    )
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10_000_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--threads", type=int, nargs="+", default=[torch.get_num_threads()])
    options = parser.parse_args()
    steps(5_000_000, 8, None)  # compiles
    runs: dict[int, dict[str, float]] = {}
    marks: dict[str, str] = {}
    for threads in options.threads:
        torch.set_num_threads(threads)
        runs[threads] = steps(options.pairs, options.dim, marks)
    print(f"{options.pairs:,} pairs; seconds for each 100 million, by threads")
    print(f"{'':22}" + "".join(f"{threads:>9}" for threads in runs))
    for name in [*next(iter(runs.values())), "all"]:
        found = [sum(run.values()) if name == "all" else run[name] for run in runs.values()]
        print(f"{name:22}" + "".join(f"{seconds * 1e8 / options.pairs:9.2f}" for seconds in found))
    print(f"aim: {AIM:g} s in all on 16 cores")
    name = "reading/setup" if options.pairs == 100_000_000 else f"reading/setup-{options.pairs}"
    print(write_result(name, {"pairs": options.pairs, "dim": options.dim, "aim": AIM, "runs": runs}))


if __name__ == "__main__":
    main()
