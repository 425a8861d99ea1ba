"""Indexes against exact lists, by number of entities: `python benchmarks/bench_indexes.py`.

Recall, time of a query, memory and time to build. Right embeddings are drawn around 256 centres, dimension 128 (--dim),
left ones alike; lists of 20. Exact lists are those that the server makes. Queries come one by one, and 32 at a time as
batches of a busy server do. Memory is that of the index itself, in the file; the embeddings, which exact scores of
candidates need as well, are in no row but that of "exact". Each index reaches recall 0.95 (--recall) on 500 queries
before it is timed, or says that it cannot.

Writes the section indexes of benchmarks/results/serving.json, and with --docs the table between the marks "indexes" of
docs/serving.md. `--small` is for a try in seconds; its figures mean nothing, and go to the section indexes-small. Run
it on a quiet machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import median_seconds, write_result
from torch import Tensor

from gramtower._util.files import write_text
from gramtower.serving.ann_index import KINDS, Index, Query, best_lists, build_index

K, BATCH, CENTRES = 20, 32, 256
PAGE = Path(__file__).parent.parent / "docs" / "serving.md"
MARKS = "<!-- indexes: benchmarks/bench_indexes.py -->\n", "<!-- /indexes -->\n"


def clustered(count: int, dim: int, centres: Tensor, seed: int) -> Tensor:
    """Embeddings around centres."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.randint(len(centres), (count,), generator=generator)
    return centres[places] + 0.7 * torch.randn(count, dim, generator=generator)


def timed(P: Tensor, Q: Tensor, index: Index | None) -> dict[str, float]:
    """Milliseconds of a single query, and of each in a batch, as the server answers them."""

    def ask(rows: int) -> Callable[[], Any]:
        queries = [Query(P[row : row + 1], [np.empty(0, np.int64)], K) for row in range(rows)]
        return lambda: best_lists(queries, Q, index)

    return {
        "query_ms": 1000 * median_seconds(ask(1)),
        "batched_ms": 1000 * median_seconds(ask(BATCH)) / BATCH,
    }


def rows_of(n: int, dim: int, kinds: list[str], recall: float) -> list[dict[str, Any]]:
    """Exact lists, then each kind of index."""
    centres = torch.randn(CENTRES, dim, generator=torch.Generator().manual_seed(0))
    P, Q = clustered(1000, dim, centres, 1), clustered(n, dim, centres, n)
    rows = [{"entities": n, "kind": "exact", "recall": 1.0, **timed(P, Q, None), "megabytes": 4e-6 * n * dim}]
    for kind in kinds:
        try:
            made, facts = build_index(P, Q, None, kind, K, recall)
        except ValueError as error:
            rows.append({"entities": n, "kind": kind, "error": str(error)})
            continue
        row = {"entities": n, "kind": kind, "recall": facts.recall, **timed(P, Q, made)}
        rows.append(row | {"megabytes": facts.bytes / 1e6, "build_seconds": facts.seconds, "reach": facts.reach})
    return rows


def as_table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| entities | index | recall@20 | one query | each of 32 | memory | built in |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        if "error" in row:
            lines.append(f"| {row['entities']:,} | {row['kind']} | not reached | | | | |")
            continue
        built = f"{row['build_seconds']:.1f} s" if "build_seconds" in row else ""
        lines.append(
            f"| {row['entities']:,} | {row['kind']} | {row['recall']:.3f} | {row['query_ms']:.2f} ms "
            f"| {row['batched_ms']:.2f} ms | {row['megabytes']:,.0f} MB | {built} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--sizes", default="10000,100000,1000000")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--recall", type=float, default=0.95)
    parser.add_argument("--docs", action="store_true")
    options = parser.parse_args()
    sizes = [2000] if options.small else [int(size) for size in options.sizes.split(",")]
    kinds = [kind for kind in KINDS if kind != "hnsw" or find_spec("hnswlib") is not None]
    rows: list[dict[str, Any]] = []
    for n in sizes:
        rows += rows_of(n, 16 if options.small else options.dim, kinds, options.recall)
    table = as_table(rows)
    print(table)
    print(
        write_result(
            "serving/indexes-small" if options.small else "serving/indexes", {"dim": options.dim, "rows": rows}
        )
    )
    if options.docs and not options.small:
        text = PAGE.read_text()
        start, end = text.index(MARKS[0]) + len(MARKS[0]), text.index(MARKS[1])
        write_text(PAGE, text[:start] + table + text[end:])


if __name__ == "__main__":
    main()
