"""What measured constants predict for one G·d on 1 to 64 GPUs: `python benchmarks/predict_scale.py`.

Nothing is timed here. One G·d takes a process

    T = c_pair · pairs / N + c_row · entities / N + bytes / bandwidth + 3 · latency

c_pair and c_row are those two numbers that the measured G·d of the ml10m and the netflix shape on one H200 give
(benchmarks/results/gpu-ml10m-tf32.json, gpu-netflix-tf32.json: towers 256-256 → 128, tf32). The bytes are those of
docs/scale.md, counted and asserted in tests/test_distributed.py. Bandwidth and latency of collectives are assumed, and
so are even shares, and that nothing overlaps. Prints the tables of docs/scale.md.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
SHAPES = {
    "480 k x 18 k, 51 M pairs (netflix)": (478_251, 17_768, 51_228_351),
    "10 M x 1 M, 300 M pairs": (10_000_000, 1_000_000, 300_000_000),
    "100 M x 10 M, 10 G pairs": (100_000_000, 10_000_000, 10_000_000_000),
}
DIM, SHARED = 128, 200_000  # numbers of an embedding, and of shared layers
PROCESSES = (1, 2, 4, 8, 16, 32, 64)


def constants() -> tuple[float, float]:
    """Seconds for a pair and for an entity of one G·d, from two shapes."""
    rows = []
    for name in ("ml10m", "netflix"):
        found = json.loads((RESULTS / f"gpu-{name}-tf32.json").read_text())[name]
        m, n, pairs = found["shape"]
        rows.append((pairs, m + n, found["product"] / 1e3))
    (p, e, t), (q, f, u) = rows
    determinant = p * f - q * e
    return (t * f - u * e) / determinant, (p * u - q * t) / determinant


def sent(n: int, processes: int) -> float:
    """Bytes that a process sends or receives for one G·d."""
    share = (processes - 1) / processes
    return 2 * n * share * DIM * 4 + 2 * share * (16 * DIM**2 + SHARED * 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inside", type=float, default=200.0, help="GB/s of a GPU within a host of eight; default 200")
    parser.add_argument("--between", type=float, default=40.0, help="GB/s of a GPU between hosts; default 40")
    parser.add_argument("--latency", type=float, default=50.0, help="microseconds of a collective; default 50")
    options = parser.parse_args()
    pair, row = constants()
    print(f"c_pair {pair * 1e9:.3f} ns, c_row {row * 1e9:.1f} ns")
    for name, (m, n, pairs) in SHAPES.items():
        print(f"\n{name}\n\n| GPUs | compute | bytes, one GPU | collectives | one G·d | times faster |")
        print("| --- | --- | --- | --- | --- | --- |")
        alone = pair * pairs + row * (m + n)
        for processes in PROCESSES:
            compute = alone / processes
            rate = options.inside if processes <= 8 else options.between
            travel = sent(n, processes) / (rate * 1e9) + 3e-6 * options.latency if processes > 1 else 0.0
            total = compute + travel
            print(
                f"| {processes} | {compute * 1e3:,.1f} ms | {sent(n, processes) / 1e9:.2f} GB | {travel * 1e3:,.1f} ms "
                f"| {total * 1e3:,.1f} ms | {alone / total:.1f} |"
            )


if __name__ == "__main__":
    main()
