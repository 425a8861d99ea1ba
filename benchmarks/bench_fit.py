"""`gt.TwoTower().fit` with default settings, warm: `python benchmarks/bench_fit.py [--device cuda] [--data FOLDER]`.

    gowalla   29,858 x 40,981 with 810,128 pairs; generated ones of that shape where DATA has no gowalla/train.txt.xz
    small     1,000 x 1,000 with 10,000 generated pairs        <= 0.3 s on two cores, <= 0.2 s on a GPU

Wall seconds of `fit` from pairs in memory to a model that answers, every setting left out but the device. The first fit
of a process compiles, or finds compiled code, and is counted by itself; `warm` is the median of the fits after it, and
`training` what the iterations take of it. All must end at the same objective. What the lists are worth is Recall@20 of
one more fit, of nine tenths of each left entity's pairs, on the last tenth (not with ``--no-lists``).

Needs torch, scipy and numba only. Writes the section DEVICE of benchmarks/results/fit.json; sets can be measured one at
a time.
`--tiny` is for a try.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import scipy.sparse as sp
import torch
from bench_solvers import SOURCES
from common import RESULTS, read_result, write_result

import gramtower as gt
from gramtower.data.datasets import planted_pairs
from gramtower.data.splits import per_user

SETS = ("small", "gowalla")
_SAME = 1e-4  # relative difference of objectives: sums of a GPU are not always in the same order


def load(name: str, folder: Path, tiny: bool) -> tuple[sp.csr_matrix, bool]:
    """Pairs of a set, and whether they are made up."""
    if name == "small":
        return planted_pairs(*((60, 40, 400) if tiny else (1000, 1000, 10_000))), True
    data = SOURCES[name].load(folder, tiny)
    return data.pairs, data.generated


def fit(pairs: gt.Interactions, device: str) -> tuple[float, gt.TwoTower]:
    """Wall seconds of a fit, and its model."""
    start = time.perf_counter()
    model = gt.TwoTower(device=device).fit(pairs)
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, model


def measure(pairs: gt.Interactions, device: str, repeats: int, lists: bool) -> dict[str, Any]:
    """First fit, warm fits, and what the lists are worth."""
    fits = []
    for _ in range(1 + repeats):
        seconds, model = fit(pairs, device)
        last = model.history_[-1]
        fits.append({"seconds": seconds, "training": last.seconds, "objective": last.value})
    values = [found["objective"] for found in fits]
    found: dict[str, Any] = {
        "shape": [*pairs.shape, len(pairs)], "dim": model.dim_, "hidden": model.hidden_, "iterations": last.iteration,
        "first": fits[0]["seconds"], "fits": fits[1:],
        "warm": statistics.median(found["seconds"] for found in fits[1:]),
        "training": statistics.median(found["training"] for found in fits[1:]),
        "same_objective": max(values) - min(values) <= _SAME * abs(min(values)),
    }  # fmt: skip
    if lists:
        split = per_user(pairs, test=0.1, seed=0)
        found["recall@20"] = fit(split.train, device)[1].evaluate(split.test)["recall@20"]
    return found


def main(options: argparse.Namespace) -> Path:
    """Measure what is asked for and add it to the result file."""
    name = f"fit/{options.device}" + ("-tiny" if options.tiny else "")
    sets = read_result(name, options.out).get("sets", {})
    for which in options.sets:
        matrix, generated = load(which, options.data, options.tiny)
        pairs = gt.Interactions.from_matrix(matrix)
        found = {"generated": generated, **measure(pairs, options.device, options.repeats, options.lists)}
        sets[which] = found
        worth = f"{found['recall@20']:.4f}" if "recall@20" in found else "not asked for"
        print(
            f"{which} ({'generated' if generated else 'real'}), dimension {found['dim']}, "
            f"{found['iterations']} iterations: "
            f"first {found['first']:.2f} s, warm {found['warm']:.2f} s, of them training {found['training']:.2f} s; "
            f"the same objective in all: {found['same_objective']}; recall@20 {worth}",
            flush=True,
        )
    return write_result(name, {"sets": sets}, options.out)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    here = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--sets", default=",".join(SETS), help="names separated by commas")
    parser.add_argument("--repeats", type=int, default=3, help="warm fits")
    parser.add_argument("--no-lists", dest="lists", action="store_false", help="leave out the fit that is evaluated")
    parser.add_argument("--data", type=Path, default=here.parents[1] / "shared" / "data", help="folder of data sets")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result")
    parser.add_argument("--tiny", action="store_true", help="generated pairs of no number: does it run?")
    options = parser.parse_args(arguments)
    options.sets = options.sets.split(",")
    if unknown := [name for name in options.sets if name not in SETS]:
        parser.error(f"got {', '.join(unknown)}, expected names among {', '.join(SETS)}")
    if options.repeats < 1:
        parser.error(f"--repeats: got {options.repeats}, expected at least 1")
    return options


if __name__ == "__main__":
    print(main(parse()))
