"""The search logs as a Markdown table: `python benchmarks/quality/table.py logs/second.jsonl [--data gowalla]`.

One row for each setting, with the validation figures of each set it was tried on; columns are the keys that differ.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

METRICS = ("recall@20", "ndcg@20", "paper_map@5")
SKIPPED = ("iterations", "every", "data", "optimizer_options")


def read(paths: list[Path]) -> list[dict[str, Any]]:
    """The lines of logs that hold figures."""
    lines = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    return [line for line in lines if METRICS[0] in line]


def table(lines: list[dict[str, Any]], metric: str) -> str:
    """A row for each setting, a column for each set."""
    sets = list(dict.fromkeys(line["data"] for line in lines))
    rows: dict[str, dict[str, Any]] = {}
    for line in lines:
        config = {k: v for k, v in line["config"].items() if k not in SKIPPED}
        row = rows.setdefault(json.dumps(config, sort_keys=True), {"config": config})
        row[line["data"]] = " / ".join(f"{line[name]:.4f}" for name in METRICS)
        row["rank"] = max(row.get("rank", 0.0), line[metric])
    names = sorted({name for row in rows.values() for name in row["config"]})
    names = [name for name in names if len({json.dumps(row["config"].get(name)) for row in rows.values()}) > 1]
    text = ["| " + " | ".join([*names, *sets]) + " |", "|" + " --- |" * (len(names) + len(sets))]
    for row in sorted(rows.values(), key=lambda row: -row["rank"]):
        cells = [_shown(row["config"].get(name)) for name in names] + [row.get(name, "") for name in sets]
        text.append("| " + " | ".join(cells) + " |")
    return "\n".join(text)


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs="+", type=Path)
    parser.add_argument("--data", nargs="+", help="only these sets")
    parser.add_argument("--metric", choices=METRICS, default=METRICS[0], help="what rows are ordered by")
    parser.add_argument("--top", type=int, help="only so many lines of each set")
    arguments = parser.parse_args()
    found = [line for line in read(arguments.logs) if arguments.data is None or line["data"] in arguments.data]
    if arguments.top:
        ranked = sorted(found, key=lambda line: -line[arguments.metric])
        found = [line for name in dict.fromkeys(x["data"] for x in ranked)
                 for line in [x for x in ranked if x["data"] == name][: arguments.top]]  # fmt: skip
    print(f"figures: {' / '.join(METRICS)}\n")
    print(table(found, arguments.metric))
