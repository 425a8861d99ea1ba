"""The server under load, on loopback, clients on the same machine: `python benchmarks/bench_serving.py`.

    exact         100,000 right entities, dimension 128, k = 20, seen excluded, one id a request, 32 clients: requests
                  a second (bound: 400), p99 (150 ms), and the time of a request over that of only the matrix
                  products, at the mean size of its batches (1.5)
    approximate   the same by a faiss index of recall@20 >= 0.95 (bound: 1,500 requests a second)
    cold          1,000,000 × 100,000 entities, --mapped: seconds from the start of the process to ready (bound: 5),
                  and its resident memory over the embeddings (1.5); the same with the file copied, without a bound
    soak          load with swaps of the model and clients that break off: no failed request but theirs, and memory
                  that is flat within 5% after the first fifth; --soak 600 --swaps 50 is what the bound is for

bench_indexes.py has the table of indexes. Counts and times are bounded: --seconds of load each, and --limit seconds for
any start. `--small` is for a try in a minute; its figures mean nothing. Writes the section load of
benchmarks/results/serving.json (small with --small). Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import median_seconds, write_result

import gramtower as gt
from gramtower.data.datasets import planted_pairs
from gramtower.serving.ann_index import build_index, index_path, write_index

CLIENTS, K = 32, 20


def make_model(path: Path, m: int, n: int, dim: int, pairs: int, iterations: int, **options: Any) -> None:
    """A model with text ids and embeddings that have learned the planted groups."""
    found = planted_pairs(m, n, pairs, groups=64).tocoo()
    most = np.arange(max(m, n))  # every entity has a pair
    rows, columns = np.concatenate([found.row, most % m]), np.concatenate([found.col, most % n])
    data = gt.Interactions.from_arrays([f"u{i}" for i in rows], [f"i{j}" for j in columns])
    gt.TwoTower(dim=dim, hidden=(), max_iterations=iterations, device="cpu", **options).fit(data).save(path)


class Server:
    """`gramtower serve` as a process of its own.

    Attributes:
        port: that it listens at.
        seconds: from its start to ready.
    """

    def __init__(self, path: Path, index: str, limit: float, *options: str) -> None:
        start = time.perf_counter()
        command = [sys.executable, "-m", "gramtower", "serve", str(path), "--port", "0", "--index", index, *options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        found = threading.Event()

        def read() -> None:
            assert self.process.stderr is not None
            for line in self.process.stderr:
                self.lines.append(line)
                if "serving at" in line:
                    found.set()

        self._reader = threading.Thread(target=read, daemon=True)
        self._reader.start()
        if not found.wait(limit):
            self.close()
            raise SystemExit(f"no server within {limit} s: {''.join(self.lines)}")
        self.port = int(re.search(r":(\d+)/", "".join(self.lines))[1])  # type: ignore[index]
        while asyncio.run(_status(self.port)) != 200:
            if time.perf_counter() - start > limit:
                self.close()
                raise SystemExit(f"not ready within {limit} s")
            time.sleep(0.01)
        self.seconds = time.perf_counter() - start

    def resident(self) -> int:
        """Bytes of resident memory."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def processor_seconds(self) -> float:
        """Time on processors so far, of all threads."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def metric(self, name: str) -> float:
        """A number of /metrics."""
        text = asyncio.run(_get(self.port, "/metrics"))
        found = re.search(rf"^{re.escape(name)} ([-+.e\d]+)$", text, re.MULTILINE)
        return float(found[1]) if found else float("nan")

    def close(self) -> None:
        """End it."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


async def _status(port: int) -> int:
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return 0
    writer.write(b"GET /ready HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    status = int((await reader.read()).split(b" ", 2)[1])
    writer.close()
    return status


async def _get(port: int, path: str) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
    text = (await reader.read()).partition(b"\r\n\r\n")[2]
    writer.close()
    return text.decode()


async def _client(port: int, users: int, end: float, seed: int, breaking: bool, told: dict[str, Any]) -> None:
    """One client: one request after the other until ``end``; one that is breaking goes away after every third."""
    rng = np.random.default_rng(seed)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    count = 0
    while time.perf_counter() < end:
        body = json.dumps({"left": [f"u{rng.integers(users)}"], "k": K}).encode()
        head = f"POST /recommend HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        start = time.perf_counter()
        writer.write(head + body)
        count += 1
        if breaking and count % 3 == 0:
            writer.close()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            continue
        try:
            header = await reader.readuntil(b"\r\n\r\n")
            length = int(re.search(rb"content-length: (\d+)", header)[1])  # type: ignore[index]
            await reader.readexactly(length)
        except (OSError, asyncio.IncompleteReadError):
            told["failed"] += 1
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            continue
        status = int(header.split(b" ", 2)[1])
        if status == 404:  # drawn users may be without a pair, and then without an id
            told["unknown"] += 1
        elif status != 200:
            told["failed"] += 1
        else:
            told["seconds"].append(time.perf_counter() - start)
    writer.close()


def _load(port: int, users: int, seconds: float, clients: int, breaking: int, seed: int, queue: Any) -> None:
    """All clients, in a process of their own, whose garbage collections must not be taken for the server's."""
    gc.collect()
    gc.freeze()

    async def run() -> dict[str, Any]:
        told: dict[str, Any] = {"seconds": [], "failed": 0, "unknown": 0}
        end = time.perf_counter() + seconds
        every = [_client(port, users, end, seed + i, i < breaking, told) for i in range(clients)]
        await asyncio.gather(*every)
        return told

    queue.put(asyncio.run(run()))


def load(
    port: int, users: int, seconds: float, clients: int = CLIENTS, breaking: int = 0, seed: int = 0
) -> dict[str, Any]:
    """Requests a second, quantiles of their times, and how many failed."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_load, args=(port, users, seconds, clients, breaking, seed, queue))
    process.start()
    told = queue.get(timeout=seconds + 120)
    process.join()
    times = np.array(told["seconds"]) if told["seconds"] else np.array([np.nan])
    return {
        "clients": clients,
        "requests": len(told["seconds"]),
        "requests_per_second": len(told["seconds"]) / seconds,
        "p50_ms": 1000 * float(np.quantile(times, 0.5)),
        "p99_ms": 1000 * float(np.quantile(times, 0.99)),
        "failed": told["failed"],
        "unknown": told["unknown"],
    }


def served(path: Path, users: int, index: str, seconds: float, limit: float) -> dict[str, Any]:
    """Load on a server with an index, or without."""
    server = Server(path, index, limit)
    try:
        load(server.port, users, min(2.0, seconds))  # warms up
        before = [server.metric(f"gramtower_batch_requests_{name}") for name in ("sum", "count")]
        used = server.processor_seconds()
        found = load(server.port, users, seconds, seed=1000)
        found["processor_ms"] = 1000 * (server.processor_seconds() - used) / max(1, found["requests"])
        after = [server.metric(f"gramtower_batch_requests_{name}") for name in ("sum", "count")]
        found["mean_batch"] = (after[0] - before[0]) / max(1.0, after[1] - before[1])
        return found
    finally:
        server.close()


def products_alone(model: gt.TwoTower, rows: int) -> float:
    """Seconds of the product of a batch with all right embeddings, for each of its rows."""
    P, Q = model.left_.embeddings[:rows], model.right_.embeddings
    out = torch.empty(len(P), len(Q))
    return median_seconds(lambda: torch.mm(P, Q.t(), out=out)) / max(1, len(P))


def cold(path: Path, arrays: int, limit: float, *options: str) -> dict[str, Any]:
    """Seconds to ready, and memory over the arrays of the model."""
    server = Server(path, "exact", limit, *options)
    try:
        resident = server.resident()
        return {"seconds": server.seconds, "resident": resident, "arrays": arrays, "ratio": resident / arrays}
    finally:
        server.close()


def soak(path: Path, users: int, seconds: float, swaps: int, limit: float) -> dict[str, Any]:
    """Load, swaps and clients that break off, all at once."""
    server = Server(path, "exact", limit)
    copy = path.with_name("copy.gramtower")
    shutil.copy(path, copy)
    memory: list[int] = []
    ended = threading.Event()

    def swap() -> None:
        for _ in range(swaps):
            if ended.wait(seconds / (swaps + 1)):
                return
            new = path.with_name("new.gramtower")
            shutil.copy(copy, new)
            new.replace(path)
            server.process.send_signal(signal.SIGHUP)

    def watch() -> None:
        while not ended.wait(max(0.2, seconds / 100)):
            memory.append(server.resident())

    threads = [threading.Thread(target=work) for work in (swap, watch)]
    for thread in threads:
        thread.start()
    try:
        found = load(server.port, users, seconds, breaking=4)
    finally:
        ended.set()
        for thread in threads:
            thread.join()
        found_swaps = server.metric('gramtower_model_swaps_total{outcome="loaded"}')
        server.close()
    early = memory[len(memory) // 5 : 2 * len(memory) // 5] or memory
    late = memory[-max(1, len(memory) // 5) :]
    growth = statistics.median(late) / statistics.median(early) if memory else float("nan")
    return {**found, "swaps": found_swaps, "memory_growth": growth}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--soak", type=float, default=60.0)
    parser.add_argument("--swaps", type=int, default=10)
    parser.add_argument("--limit", type=float, default=120.0)
    parser.add_argument("--parts", default="exact,approximate,cold,soak")
    options = parser.parse_args()
    parts = set(options.parts.split(","))
    seconds = min(options.seconds, 2.0) if options.small else options.seconds
    users, items, dim, pairs = (200, 500, 16, 4000) if options.small else (20_000, 100_000, 128, 2_000_000)
    result: dict[str, Any] = {"small": options.small, "entities": [users, items], "dim": dim}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gramtower"
        if parts & {"exact", "approximate", "soak"}:
            make_model(path, users, items, dim, pairs, 2 if options.small else 5)
            model = gt.load(path)
        if "exact" in parts:
            found = served(path, users, "exact", seconds, options.limit)
            found["products_seconds"] = products_alone(model, max(1, round(found["mean_batch"])))
            found["over_products"] = 1 / max(found["requests_per_second"], 1e-9) / found["products_seconds"]
            result["exact"] = found
            print(
                f"exact: {found['requests_per_second']:.0f} requests/s (>= 400), p99 {found['p99_ms']:.0f} ms (<= 150)"
            )
            over, batch, busy = found["over_products"], found["mean_batch"], found["processor_ms"]
            print(f"exact: {over:.2f} times the products (<= 1.5), in batches of {batch:.1f}")
            print(f"exact: {busy:.2f} ms of the server's processor time a request")
        if "approximate" in parts:
            P, Q = model.left_.embeddings, model.right_.embeddings
            made, facts = build_index(P, Q, model.right_.ids, "faiss", K, 0.95)
            write_index(index_path(path), made, facts)
            found = served(path, users, "faiss", seconds, options.limit) | {"recall": facts.recall}
            result["approximate"] = found
            print(f"approximate: {found['requests_per_second']:.0f} requests/s (>= 1500) at recall {facts.recall:.3f}")
        if "soak" in parts:
            found = soak(
                path, users, min(options.soak, 4.0) if options.small else options.soak, options.swaps, options.limit
            )
            result["soak"] = found
            growth = found["memory_growth"]
            print(
                f"soak: {found['failed']} failed (0), {found['swaps']:.0f} swaps, memory {growth:.3f} times (<= 1.05)"
            )
        if "cold" in parts:
            m, n, d, few = (300, 200, 16, 2000) if options.small else (1_000_000, 100_000, 128, 2_000_000)
            large = Path(folder) / "large.gramtower"
            make_model(large, m, n, d, few, 1, optimizer="gd")
            for name, options_of in (("cold", ("--mapped",)), ("cold_copied", ())):
                found = cold(large, 4 * (m + n) * d, options.limit, *options_of)
                result[name] = found
                print(
                    f"{name}: ready in {found['seconds']:.1f} s (<= 5), memory {found['ratio']:.2f} times the arrays"
                    f"{' (<= 1.5)' if options_of else ''}"
                )
    print(write_result("serving/small" if options.small else "serving/load", result))


if __name__ == "__main__":
    main()
