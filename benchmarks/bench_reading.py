"""Reading pairs: a CSV against polars, and a folder of Parquet parts against the arrays that it becomes.

    python benchmarks/bench_reading.py [csv] [--rows 10000000] [--rounds 3]
    python benchmarks/bench_reading.py parts [--rows 10000000] [--ids text] [--part-rows 1000000] [--folder FOLDER]
    python benchmarks/bench_reading.py s3 [--rows 10000000] [--ids text] [--part-rows 1000000] [--rounds 3]

Each run is a fresh process that times the work after its imports; peak memory is that of the process less what it
held before the work (Linux).

csv: time and peak memory of reading string ids, against polars reading and dictionary-encoding the same file. Rounds
alternate between the two; ratios are those of the medians. Bounds: time ≤ 1.5, memory ≤ 2.5. Writes the
section csv of benchmarks/results/reading.json.

parts: rows a second, and peak memory over the bytes of the result (matrix and ids): of the process that reads, and of
it with its workers, whose memory (an interpreter, polars and a piece each) does not grow with the rows; sampled every
10 ms. Bound: ≤ 1.5 from 100 million rows on, and less than 12 GB in all for 300 million. Writes the section parts-IDS
of that file (with the number of rows in its name unless these are 300 million). Parts are made in FOLDER unless it
holds some; 300 million rows of text take about 2 GB there.

s3: time of reading the same parts from the disk and from a server with the interface of S3 (moto, in a process of its
own on this machine). Rounds alternate between the two; the ratio of speeds is that of the medians. Bound: ≥ 0.5. Writes
the section s3-IDS of that file, with the number of rows in its name unless these are 100 million.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.request import Request, urlopen

from common import write_result

TIME_BOUND, MEMORY_BOUND, PARTS_BOUND, S3_BOUND = 1.5, 2.5, 1.5, 0.5

MEASURE = """
import json, re, sys, time
import polars as pl
import scipy.sparse
from gramtower.data.interactions import Interactions

def peak(reset=False):
    if reset:
        with open("/proc/self/clear_refs", "w") as control:
            control.write("5")
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

def with_polars(path):
    ids = dict.fromkeys(["user", "item"], pl.String)
    return pl.read_csv(path, schema_overrides=ids).with_columns(pl.col("user", "item").cast(pl.Categorical))

def with_gramtower(path):
    return Interactions.from_csv(path, "user", "item")

before = peak(reset=True)
start = time.perf_counter()
made = {"polars": with_polars, "gramtower": with_gramtower}[sys.argv[1]](sys.argv[2])
seconds = time.perf_counter() - start
print(json.dumps({"seconds": seconds, "bytes": peak() - before, "made": str(getattr(made, "shape", ""))}))
"""


MEASURE_PARTS = """
import json, re, sys, threading, time
import numba, polars as pl
import scipy.sparse
from gramtower.data import grouping, interning
from gramtower.data.interactions import Interactions

def resident(pid, name="VmRSS"):
    try:
        with open(f"/proc/{pid}/status") as status:
            return int(re.search(name + r":\\s+(\\d+)", status.read())[1]) * 1024
    except (OSError, TypeError):
        return 0

def children():
    found = []
    for task in __import__("os").listdir("/proc/self/task"):
        try:
            found += open(f"/proc/self/task/{task}/children").read().split()
        except OSError:
            pass
    return found

Interactions.from_parquet(sys.argv[2], "user", "item")  # compiles, or loads compiled code
with open("/proc/self/clear_refs", "w") as control:
    control.write("5")
before, together, done = resident("self"), [0], threading.Event()

def watch():
    while not done.wait(0.01):
        together[0] = max(together[0], resident("self") + sum(map(resident, children())))

watcher = threading.Thread(target=watch)
watcher.start()
start = time.perf_counter()
last = [start]
def progress(state):
    if time.perf_counter() > last[0] + 10:
        last[0] = time.perf_counter()
        print(state, file=sys.stderr, flush=True)
made = Interactions.from_parquet(sys.argv[1], "user", "item", progress=progress)
seconds = time.perf_counter() - start
peak = resident("self", "VmHWM")
done.set()
watcher.join()
matrix = made.matrix
size = matrix.data.nbytes + matrix.indices.nbytes + matrix.indptr.nbytes
ids = sum(x.nbytes + (sum(map(sys.getsizeof, x)) if x.dtype == object else 0) for x in (made.left_ids, made.right_ids))
print(json.dumps({"seconds": seconds, "bytes": peak - before, "with_workers": together[0] - before, "peak": together[0],
    "result": size + ids, "ids": ids, "pairs": len(made), "left": made.shape[0], "right": made.shape[1]}))
"""


MEASURE_S3 = """
import sys, time
import numba, polars, scipy.sparse
from gramtower.data.interactions import Interactions

Interactions.from_parquet(sys.argv[2], "user", "item")  # compiles, or loads compiled code
start = time.perf_counter()
made = Interactions.from_parquet(sys.argv[1], "user", "item")
print(time.perf_counter() - start, len(made), *made.shape)
"""

SERVE_S3 = """
import logging, sys
from moto.server import ThreadedMotoServer

logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print("http://{}:{}".format(*server.get_host_and_port()), flush=True)
sys.stdin.read()
"""


def generate_parts(folder: Path, rows: int, part_rows: int, text: bool) -> None:
    """Parts of pairs like those of generate."""
    import numpy as np
    import polars as pl

    folder.mkdir(parents=True, exist_ok=True)
    users, items = max(rows // 20, 1), max(rows // 100, 1)
    for number, start in enumerate(range(0, rows, part_rows)):
        rng, count = np.random.default_rng([0, number]), min(part_rows, rows - start)
        user = (users * rng.random(count) ** 1.5).astype(np.int64) * 7919 % users
        item = (items * rng.random(count) ** 2.5).astype(np.int64) * 104729 % items
        frame = pl.DataFrame({"user": user, "item": item})
        if text:
            frame = frame.select(pl.format("user-{}", "user").alias("user"), pl.format("item_{}", "item").alias("item"))
        frame.write_parquet(folder / f"part-{number:05d}.parquet")


def measure_parts(options: argparse.Namespace) -> None:
    text = options.ids == "text"
    with tempfile.TemporaryDirectory() as own:
        folder, small = options.folder or Path(own) / "parts", Path(own) / "small"
        if not folder.exists():
            generate_parts(folder, options.rows, options.part_rows, text)
        generate_parts(small, 10_000, 5000, text)
        size = sum(path.stat().st_size for path in folder.iterdir())
        done = subprocess.run(
            [sys.executable, "-c", MEASURE_PARTS, str(folder), str(small)],
            stdout=subprocess.PIPE,
            check=True,
            text=True,
        )
    found = json.loads(done.stdout)
    ratios = {name: found[name] / found["result"] for name in ("bytes", "with_workers")}
    print(f"{options.rows:,} rows with {options.ids} ids, {size / 1e6:,.0f} MB in parts of {options.part_rows:,} rows")
    print(f"  {found['seconds']:.1f} s, {options.rows / found['seconds'] / 1e6:.2f} M rows/s")
    print(f"  result {found['result'] / 1e6:,.0f} MB, of which ids {found['ids'] / 1e6:,.0f} MB")
    print(f"  all processes together, with what they hold before: {found['peak'] / 1e6:,.0f} MB")
    for name, ratio in ratios.items():
        met = "met" if ratio <= PARTS_BOUND else "MISSED"
        print(f"  {name:12} {found[name] / 1e6:8,.0f} MB, ratio {ratio:.2f}, bound {PARTS_BOUND}: {met}")
    result = {"rows": options.rows, "file_bytes": size, "found": found, "ratios": ratios, "bound": PARTS_BOUND}
    name = f"reading/parts-{options.ids}" + ("" if options.rows == 300_000_000 else f"-{options.rows}")
    print(write_result(name, result))


@contextlib.contextmanager
def s3_server() -> Iterator[None]:
    """Serve a bucket s3://lake for this process and those that it starts."""
    command = [sys.executable, "-c", SERVE_S3]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        os.environ |= {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_ENDPOINT_URL": address}
        urlopen(Request(f"{address}/lake", method="PUT")).close()
        yield
        server.terminate()


def measure_s3(options: argparse.Namespace) -> None:
    from gramtower._util.files import as_path, replacing

    runs: dict[str, list[float]] = {"disk": [], "s3": []}
    made = set()
    with tempfile.TemporaryDirectory() as own, s3_server():
        folder, small = options.folder or Path(own) / "parts", Path(own) / "small"
        if not folder.exists():
            generate_parts(folder, options.rows, options.part_rows, options.ids == "text")
        generate_parts(small, 10_000, 5000, options.ids == "text")
        for path in (*folder.iterdir(), *small.iterdir()):
            with replacing(as_path(f"s3://lake/{path.parent.name}/{path.name}")) as partial:
                shutil.copyfile(path, partial)
        size = sum(path.stat().st_size for path in folder.iterdir())
        for _ in range(options.rounds):
            for name, place in (("disk", own), ("s3", "s3://lake")):
                source = str(folder) if name == "disk" else f"{place}/{folder.name}"
                command = [sys.executable, "-c", MEASURE_S3, source, f"{place}/small"]
                done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
                seconds, *shape = done.stdout.split()
                runs[name].append(float(seconds))
                made.add(tuple(shape))
    if len(made) > 1:
        sys.exit(f"the pairs differ: {made}")
    medians = {name: statistics.median(found) for name, found in runs.items()}
    ratio = medians["disk"] / medians["s3"]
    print(f"{options.rows:,} rows with {options.ids} ids, {size / 1e6:,.0f} MB in parts of {options.part_rows:,} rows")
    for name, seconds in medians.items():
        print(f"  {name:5} {seconds:7.2f} s, {options.rows / seconds / 1e6:.2f} M rows/s")
    print(f"  ratio of speeds {ratio:.2f}, bound {S3_BOUND}: {'met' if ratio >= S3_BOUND else 'MISSED'}")
    result = {"rows": options.rows, "file_bytes": size, "runs": runs, "ratio": ratio, "bound": S3_BOUND}
    name = f"reading/s3-{options.ids}" + ("" if options.rows == 100_000_000 else f"-{options.rows}")
    print(write_result(name, result))


def generate(path: Path, rows: int, seed: int = 0) -> None:
    """Pairs of skewed popularity, in no order, with ids of 9 to 14 letters."""
    import numpy as np
    import polars as pl

    rng = np.random.default_rng(seed)
    users, items = max(rows // 20, 1), max(rows // 100, 1)
    user = (users * rng.random(rows) ** 1.5).astype(np.int64) * 7919 % users
    item = (items * rng.random(rows) ** 2.5).astype(np.int64) * 104729 % items
    frame = pl.DataFrame({"user": user, "item": item})
    text = [pl.format("user-{}", "user").alias("user"), pl.format("item_{}", "item").alias("item")]
    frame.select(text).write_csv(path)


def run(name: str, path: Path) -> dict[str, float]:
    done = subprocess.run([sys.executable, "-c", MEASURE, name, str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    result: dict[str, float] = json.loads(done.stdout)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["csv", "parts", "s3"], default="csv")
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ids", choices=["text", "numbers"], default="text")
    parser.add_argument("--part-rows", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if options.what != "csv":
        (measure_parts if options.what == "parts" else measure_s3)(options)
        return
    runs: dict[str, list[dict[str, float]]] = {"polars": [], "gramtower": []}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pairs.csv"
        generate(path, options.rows)
        size = path.stat().st_size
        for _ in range(options.rounds):
            for name, found in runs.items():
                found.append(run(name, path))
    medians = {
        name: {key: statistics.median(one[key] for one in found) for key in ("seconds", "bytes")}
        for name, found in runs.items()
    }
    ratios = {key: medians["gramtower"][key] / medians["polars"][key] for key in ("seconds", "bytes")}
    print(f"{options.rows:,} rows, {size / 1e6:.0f} MB, medians of {options.rounds} rounds")
    for name, found in medians.items():
        print(f"  {name:10} {found['seconds']:7.2f} s {found['bytes'] / 1e6:8.0f} MB")
    for key, bound in (("seconds", TIME_BOUND), ("bytes", MEMORY_BOUND)):
        print(f"  {key:8} ratio {ratios[key]:.2f}, bound {bound}: {'met' if ratios[key] <= bound else 'MISSED'}")
    bounds = {"seconds": TIME_BOUND, "bytes": MEMORY_BOUND}
    name = "reading/csv" if options.rows == 10_000_000 else f"reading/csv-{options.rows}"
    result = {"rows": options.rows, "file_bytes": size, "runs": runs, "ratios": ratios, "bounds": bounds}
    print(write_result(name, result))


if __name__ == "__main__":
    main()
