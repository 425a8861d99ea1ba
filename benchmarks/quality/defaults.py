"""How far the defaults are from the stored settings: `python benchmarks/quality/defaults.py [--data gowalla ml1m]`.

`gt.TwoTower()` with default settings and with those of settings.toml, both trained on nine tenths of every user's
training pairs and ranked on the rest (data.inner_split): nothing of a test part is read. Target: the default within 3%
of the tuned settings on all four sets, each by the metric it was tuned for, on a GPU; on a CPU default dimensions stop
at 256. Writes the section defaults of benchmarks/results/quality.json, on a CPU defaults-cpu.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from data import FILES, inner_split, load
from models import METRICS, stored, train

from gramtower.metrics import evaluate_embeddings
from gramtower.model import defaults

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import write_result

TUNED_FOR = {"gowalla": "recall@20", "yelp2018": "recall@20", "ml1m": "paper_map@5", "moby": "paper_map@5"}


def main(arguments: argparse.Namespace) -> None:
    results: dict[str, Any] = {}
    for name in arguments.data:
        pairs, held = inner_split(load(name, arguments.folder).train)
        results[name] = {"metric": TUNED_FOR[name]}
        for label, settings in (("default", {}), ("tuned", stored(name, "ours"))):
            P, Q, seconds = train("ours", pairs, settings, arguments.device)
            found = evaluate_embeddings(P, Q, held, train=pairs, metrics=METRICS)
            values = {metric: float(found[metric]) for metric in METRICS}
            results[name][label] = {**values, "dim": P.shape[1], "seconds": seconds}
        default, tuned = (results[name][label][TUNED_FOR[name]] for label in ("default", "tuned"))
        results[name]["ratio"] = default / tuned
        print(name, results[name], flush=True)
    for name, row in results.items():
        print(f"{name:10s} {row['metric']}: {row['ratio']:.4f} of the tuned settings (target 0.97)")
    on_gpu = defaults.pick_device(arguments.device).type == "cuda"
    print(write_result("quality/defaults" if on_gpu else "quality/defaults-cpu", results))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", choices=tuple(FILES), default=list(TUNED_FOR))
    parser.add_argument("--folder", type=Path, default=Path(".local-data"))
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
    main(parser.parse_args())
