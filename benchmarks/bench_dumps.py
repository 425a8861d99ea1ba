"""Reading the Netflix Prize layout and MediaWiki dumps: time against a floor, and memory as the files double.

    python benchmarks/bench_dumps.py [--ratings 8000000] [--links 4000000] [--rounds 3]

Files are generated: ratings in the layout of combined_data, links in the layout of pagelinks before 2023, both with
ids drawn at random. The floors are polars reading the same ratings as plain text columns, and Python decompressing the
dump of links and finding its rows by one regular expression. Each run is a fresh process; peak memory is that of the
process less what it held before. Memory of a streaming reader grows with what is kept and not with the text: the
growth from half the file to the whole, in bytes for each pair, is held against the bytes of text for each row.
Writes benchmarks/results/dumps.json.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from common import write_result

MEASURE = """
import gzip, json, re, sys, time
from pathlib import Path
import polars as pl
import scipy.sparse
from gramtower.data.readers.mediawiki import mediawiki_links
from gramtower.data.readers.ratings import netflix

def peak(reset=False):
    if reset:
        with open("/proc/self/clear_refs", "w") as control:
            control.write("5")
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

def text_alone(folder):
    path = next(Path(folder).glob("combined_data_1.txt"))
    columns = dict.fromkeys(["user", "rating", "date"], pl.String)
    return pl.read_csv(path, has_header=False, schema=columns, missing_columns="insert", quote_char=None)

def rows_alone(folder):
    row, count = re.compile(rb"\\((\\d+),(\\d+),'([^'\\\\\\\\]*(?:\\\\\\\\.[^'\\\\\\\\]*)*)',(\\d+)\\)"), 0
    with gzip.open(next(Path(folder).glob("*-pagelinks.sql.gz"))) as lines:
        for line in lines:
            count += len(row.findall(line))
    return count

work = {"netflix": netflix, "mediawiki": mediawiki_links, "polars": text_alone, "regex": rows_alone}[sys.argv[1]]
before = peak(reset=True)
start = time.perf_counter()
made = work(sys.argv[2])
seconds = time.perf_counter() - start
pairs = len(made) if hasattr(made, "left_ids") else 0
print(json.dumps({"seconds": seconds, "bytes": peak() - before, "pairs": pairs}))
"""


def write_ratings(folder: Path, ratings: int, seed: int = 0) -> int:
    """combined_data_1.txt with about 5,600 ratings a movie and 210 a user, as in the real set; returns its size."""
    rng = np.random.default_rng(seed)
    path = folder / "combined_data_1.txt"
    with path.open("w") as file:
        for movie in range(1, max(2, ratings // 5600) + 1):
            count = ratings // max(2, ratings // 5600)
            users = 5 * rng.integers(1, max(2, ratings // 210), count)
            stars = rng.choice([1, 2, 3, 4, 5], count, p=[0.05, 0.1, 0.28, 0.34, 0.23])
            file.write(f"{movie}:\n")
            file.write("".join(f"{u},{s},2005-09-06\n" for u, s in zip(users.tolist(), stars.tolist(), strict=True)))
    return path.stat().st_size


def write_wiki(folder: Path, links: int, seed: int = 0) -> int:
    """Dumps of a wiki with about 50 links a page and a third of the pages redirects; returns the text of its links."""
    rng = np.random.default_rng(seed)
    pages = max(10, links // 50)
    titles = [f"Article_{number * 7919 % pages}_of_the_wiki" for number in range(pages)]
    redirect = rng.random(pages) < 1 / 3

    def dump(name: str, columns: list[str], rows: list[str]) -> int:
        lines = [
            f"CREATE TABLE `{name}` (",
            *(f"  `{column}` int(10)," for column in columns),
            "  KEY (x)",
            ") ENGINE=x;",
        ]
        lines += [
            f"INSERT INTO `{name}` VALUES {','.join(rows[at : at + 20_000])};" for at in range(0, len(rows), 20_000)
        ]
        data = ("\n".join(lines) + "\n").encode()
        (folder / f"simplewiki-1-{name}.sql.gz").write_bytes(gzip.compress(data, 1))
        return len(data)

    page = ["page_id", "page_namespace", "page_title", "page_is_redirect"]
    dump("page", page, [f"({i + 1},0,'{title}',{int(redirect[i])})" for i, title in enumerate(titles)])
    sources = np.flatnonzero(redirect)
    ends = rng.integers(pages, size=len(sources))
    wanted = ["rd_from", "rd_namespace", "rd_title", "rd_interwiki"]
    dump("redirect", wanted, [f"({a + 1},0,'{titles[b]}','')" for a, b in zip(sources, ends, strict=True)])
    pairs = zip(rng.integers(pages, size=links).tolist(), rng.integers(pages, size=links).tolist(), strict=True)
    wanted = ["pl_from", "pl_namespace", "pl_title", "pl_from_namespace"]
    return dump("pagelinks", wanted, [f"({a + 1},0,'{titles[b]}',0)" for a, b in pairs])


def run(name: str, folder: Path) -> dict[str, float]:
    command = [sys.executable, "-c", MEASURE, name, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    result: dict[str, float] = json.loads(done.stdout)
    return result


def measure(name: str, floor: str, rows: int, rounds: int, write) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        half, whole = Path(one), Path(other)
        write(half, rows // 2)
        size = write(whole, rows)
        runs = [(run(name, whole), run(floor, whole)) for _ in range(rounds)]
        small = run(name, half)
    ours, peer = (
        {key: statistics.median(r[side][key] for r in runs) for key in ("seconds", "bytes")} for side in (0, 1)
    )
    pairs = runs[0][0]["pairs"]
    growth = (ours["bytes"] - small["bytes"]) / (pairs - small["pairs"])
    print(f"{name}: {rows:,} rows, {size / 1e6:.0f} MB of text, {pairs:,.0f} pairs")
    seconds, least = ours["seconds"], peer["seconds"]
    print(f"  {seconds:.2f} s, {seconds / least:.2f} x {floor} alone ({least:.2f} s)")
    peaks = [f"{one['bytes'] / 1e6:.0f} MB" for one in (ours, peer, small)]
    print(f"  peak {peaks[0]} ({floor} {peaks[1]}); {peaks[2]} for half the file")
    print(f"  memory grows by {growth:.0f} bytes a pair; a row is {size / rows:.0f} bytes of text")
    return {
        "rows": rows, "text_bytes": size, "runs": runs, "half": small, "ratio": ours["seconds"] / peer["seconds"],
        "bytes_per_pair": growth, "text_bytes_per_row": size / rows,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ratings", type=int, default=8_000_000)
    parser.add_argument("--links", type=int, default=4_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    result = {
        "netflix": measure("netflix", "polars", options.ratings, options.rounds, write_ratings),
        "mediawiki": measure("mediawiki", "regex", options.links, options.rounds, write_wiki),
    }
    print(write_result("dumps", result))


if __name__ == "__main__":
    main()
