"""Kills runs at random moments, starts them again until they end, and compares that with an uninterrupted run.

    make crash KILLS=1000            or    python tests/crash.py --kills 1000 --seed 7 --jobs fit,tune

Fits by all methods, updates, a search, a comparison, a benchmark, a cross-validation, splits, partitions, tables, lists
of all entities, indexes, exports and a model written over an old one get SIGKILL, SIGTERM and SIGINT. Half of the kills
come at a random moment, the others just before a random change of a file. After each, what was there before must be
whole; at the end models, histories (without times), trials and files must be the same bit for bit, and nothing may be
left next to them. Processes are forked from one that has imported and compiled everything with one thread. Counts go to
runs/crash.json; the exit code is 1 if anything differed.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gramtower as gt
from gramtower._util.tensors import TensorFile
from gramtower.cli.program import run
from gramtower.data import list_files
from gramtower.distributed.partition import read_part
from gramtower.distributed.shard_files import Reader
from gramtower.experiments import comparison as runner
from gramtower.model.exporting import write_export
from gramtower.model.model_file import KIND
from gramtower.optim.solvers import SOLVERS
from gramtower.training.result import read_history

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
TIMES = ("seconds", "date", "environment", "others_busy", "resumed", "commands", "bytes")
EXPORTS = ("numpy", "parquet", "faiss")
CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate")  # what Python says of changed files
TIMES += ("fit_seconds", "fit_seconds_by_seed", "list_seconds", "peak_bytes", "added_bytes", "environments")


@dataclass(frozen=True)
class Job:
    """Something that runs in a process, in a folder of its own.

    Attributes:
        name: for the counts; what stands before a colon can be asked for by --jobs.
        work: does it; returns the exit code.
        result: what it has made, to be compared with an uninterrupted run's.
        whole: checks what a kill has left; raises if something is broken.
    """

    name: str
    work: Callable[[Path], int]
    result: Callable[[Path], Any]
    whole: Callable[[Path], Any] = lambda folder: None


def jobs(data: Path) -> list[Job]:
    pairs, learn = data / "pairs.csv", ["--dim", "4", "--device", "cpu"]

    def command(*tokens: object, out: str = "out") -> Callable[[Path], int]:
        columns = ["--left", "user", "--right", "item", "--quiet", "--out"]
        return lambda folder: run([*map(str, tokens), *columns, str(folder / out)])

    found = []
    for name in SOLVERS:
        tokens = [*learn, "--hidden", "6", "--optimizer", name, "--max-iterations", "23"]
        tokens += ["--validation", "0.1", "--patience", "99", "--seed", "1"]
        if name.startswith(("sogram", "sampling")):
            tokens += ["--option", "ratio=0.1", "--option", "steps=8"]
        found.append(Job(f"fit:{name}", command("fit", pairs, *tokens), fit_result, fit_whole))
    tokens = [*learn, "--hidden", "none", "--max-iterations", "3", "--trials", "7", "--metric", "ndcg@10"]
    found.append(Job("tune", command("tune", pairs, *tokens), tune_result))
    tokens = [*learn, "--hidden", "6", "--optimizers", "gd,lbfgs,newton", "--max-iterations", "12"]
    found.append(Job("compare", command("compare", pairs, *tokens), compare_result))
    tokens = ["--models", "popularity,ease,gramtower-linear", "--seeds", "2", "--metrics", "ndcg@10,coverage@10"]
    found.append(Job("benchmark", command("benchmark", pairs, *tokens), benchmark_result))
    found.append(Job("partition", command("partition", pairs, "--parts", "5"), partition_result, partition_whole))
    tokens = [*learn, "--hidden", "none", "--max-iterations", "3", "--folds", "3"]
    found.append(Job("cross-validate", command("cross-validate", pairs, *tokens, out="folds.json"), untimed_files))
    for by in ("folds", "cold-left"):
        made = command("split", pairs, "--by", by, "--file-format", "parquet" if by == "folds" else "csv.gz")
        earlier = command("split", pairs, "--by", "random", "--seed", "5")
        found.append(Job(f"split:{by}", over(earlier, made), digests, split_whole))
    found += model_jobs(data, command)
    for ending in ("csv.gz", "parquet"):
        found.append(Job(f"convert:{ending}", command("convert", pairs, out=f"table.{ending}"), digests))
    old = (data / "old.gramtower").read_bytes()

    def save(out: Path) -> int:
        model = gt.load(data / "new.gramtower")
        if not (out / "model").exists():
            (out / "model").write_bytes(old)
        for _ in range(20):
            model.save(out / "model")
        return 0

    def one_of_both(out: Path) -> None:
        if (out / "model").exists() and (out / "model").stat().st_size:
            gt.load(out / "model")

    found.append(Job("model", save, lambda folder: contents(folder / "model"), one_of_both))
    return found


def model_jobs(data: Path, command: Callable[..., Callable[[Path], int]]) -> list[Job]:
    """Commands that begin with the model of a run."""
    more = ["update", data / "run", data / "more.csv", "--iterations", "2"]

    def quietly(*tokens: object) -> int:
        return run([*map(str, tokens), "--quiet"])

    def in_place(folder: Path) -> int:
        if not (folder / "out/summary.json").exists():
            copy = folder / "copy"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(data / "run", copy)
            copy.replace(folder / "out")
        return run(["update", str(folder / "out"), *map(str, more[2:]), "--quiet"])

    def known_pairs(folder: Path) -> Any:
        """All that does not depend on how often the command ran: each time adds iterations."""
        model = gt.load(folder / "out/model.gramtower")
        return model.seen_.toarray().tolist(), model.left_.ids.tolist(), model.right_.ids.tolist()

    def listed(name: str) -> Callable[[Path], int]:
        return lambda folder: quietly("recommend", data / "run", "--all", "--k", "7", "--out", folder / name)

    def indexed(kind: str) -> Callable[[Path], int]:
        def work(folder: Path) -> int:
            shutil.copyfile(data / "run/model.gramtower", folder / "model")
            return quietly("index", folder / "model", "--kind", kind, "--recall", "0.5")

        return work

    def index_result(folder: Path) -> Any:
        file = TensorFile(folder / "model.index", "gramtower-index", 1)
        header = {name: value for name, value in file.header.items() if name not in (*TIMES, "built")}
        return header, file.read("index").tolist()

    def exported(to: str) -> Callable[[Path], int]:
        def work(folder: Path) -> int:
            if not (folder / "out").exists() and to in EXPORTS:
                shutil.rmtree(folder / "copy", ignore_errors=True)
                shutil.copytree(data / f"{to}-old", folder / "copy")
                (folder / "copy").replace(folder / "out")
            return quietly("export", data / "run", "--to", to, "--out", folder / "out")

        return work

    found = [
        Job("update", command(*more), fit_result, fit_whole),
        Job("update:in-place", in_place, known_pairs, fit_whole),
    ]
    for ending in ("csv", "parquet"):
        found.append(Job(f"recommend:{ending}", listed(f"lists.{ending}"), digests))
    for kind in ("faiss", "faiss-hnsw"):
        found.append(Job(f"index:{kind}", indexed(kind), index_result))
    for to in EXPORTS:
        found.append(Job(f"export:{to}", exported(to), digests, export_whole(data, to)))
    networks = exported("torchscript")  # whose files hold more than the model, such as where it was traced
    found.append(Job("export:torchscript", networks, lambda folder: sorted(digests(folder))))
    return found


def prepare_files(data: Path) -> int:
    """A run, more pairs for it, and exports of it and of another model; in a process of its own, as polars is used."""
    (data / "more.csv").write_text("user,item\nu1,i39\nu1,new\nlate,i3\nlate,new\n")
    tokens = ["--left", "user", "--right", "item", "--dim", "4", "--hidden", "none", "--max-iterations", "3"]
    code = run(["fit", str(data / "pairs.csv"), *tokens, "--device", "cpu", "--quiet", "--out", str(data / "run")])
    for to in EXPORTS:
        write_export(data / f"{to}-old", gt.load(data / "old.gramtower").fitted_, to)
        write_export(data / f"{to}-new", gt.load(data / "run/model.gramtower").fitted_, to)
    return code


def over(earlier: Callable[[Path], int], made: Callable[[Path], int]) -> Callable[[Path], int]:
    """A command that replaces what another one wrote to the same place."""

    def work(folder: Path) -> int:
        if not (folder / "begun").exists():
            code = earlier(folder)
            if code:
                return code
            (folder / "begun").touch()
        return made(folder)

    return work


def split_whole(folder: Path) -> None:
    """A split that says that it is finished must have its files, with as many pairs as it says."""
    path = folder / "out/split.json"
    facts = json.loads(path.read_text()) if path.exists() else {"finished": False}
    for one in facts["splits"] if facts["finished"] else []:
        for part in (part for part in one.values() if isinstance(part, dict)):
            data = (folder / "out" / part["file"]).read_bytes()
            if not part["file"].endswith("parquet"):
                data = gzip.decompress(data) if part["file"].endswith(".gz") else data
                assert data.count(b"\n") == part["pairs"] + 1, f"{part['file']} is of another split"


def partition_whole(folder: Path) -> None:
    if (folder / "out").exists():
        assert len(list((folder / "out").iterdir())) == 5, "a part is missing"
        read_part(folder / "out")


def export_whole(data: Path, to: str) -> Callable[[Path], None]:
    """An export that says what it holds must hold both sides of one model."""

    def whole(folder: Path) -> None:
        if (folder / "out/export.json").exists():
            files = [side["file"] for side in json.loads((folder / "out/export.json").read_text())["sides"].values()]
            found, old, new = (
                [hashlib.sha256((one / name).read_bytes()).hexdigest() for name in files]
                for one in (folder / "out", data / f"{to}-old", data / f"{to}-new")
            )
            assert found in (old, new), f"{files} are of two models"

    return whole


def untimed_files(folder: Path) -> Any:
    """The JSON of all files."""
    return {path.name: untimed(json.loads(path.read_text())) for path in folder.iterdir()}


def untimed(value: Any) -> Any:
    """Without what differs from run to run."""
    if isinstance(value, dict):
        return {k: untimed(v) for k, v in value.items() if k not in TIMES}
    return [untimed(item) for item in value] if isinstance(value, list) else value


def contents(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The header of a model and digests of its tensors; their order in the file is none of its content."""
    file = Reader(path, KIND)
    tensors = {name: hashlib.sha256(file.read(name).numpy().tobytes()).hexdigest() for name in file.shapes}
    file.close()
    return file.header, tensors


def partition_result(folder: Path) -> Any:
    """What one process reads of a partition, and how many files there are: none of an earlier try."""
    part = read_part(folder / "out")
    matrix = part.matrix
    return (
        matrix.shape,
        matrix.indptr.tolist(),
        matrix.indices.tolist(),
        list(map(str, part.left_ids)),
        list(map(str, part.right_ids)),
        len(list((folder / "out").iterdir())),
    )


def fit_result(folder: Path) -> Any:
    out = folder / "out"
    header, tensors = contents(out / "model.gramtower")
    kept = {key: header[key] for key in ("reason", "best_metric", "omega", "dim") if key in header}
    history = [untimed(vars(record)) for record in read_history(out / "history.jsonl")]
    summary = untimed(json.loads((out / "summary.json").read_text()))
    parameters = {k: v for k, v in tensors.items() if "history" not in k}
    return kept, parameters, history, {k: v for k, v in summary.items() if k != "model"}


def fit_whole(folder: Path) -> None:
    out = folder / "out"
    if (out / "model.gramtower").exists():
        gt.load(out / "model.gramtower")
    if (out / "summary.json").exists():
        json.loads((out / "summary.json").read_text())


def tune_result(folder: Path) -> Any:
    report = json.loads((folder / "out/report.json").read_text())
    return untimed({key: report[key] for key in ("trials", "winner", "arguments", "importance", "interrupted")})


def benchmark_result(folder: Path) -> Any:
    """The numbers of a benchmark."""
    return untimed(json.loads((folder / "out/summary.json").read_text()))


def compare_result(folder: Path) -> Any:
    out = folder / "out"
    names = json.loads((out / "comparison.json").read_text())["methods"]
    ends = {name: json.loads((out / f"runs/{name}.json").read_text()) for name in names}
    histories = {name: [untimed(vars(r)) for r in read_history(out / f"{name}.jsonl")] for name in ends}
    return {name: end["status"] for name, end in ends.items()}, histories, sorted(p.name for p in out.iterdir())


def digests(folder: Path) -> dict[str, str]:
    """All files by their content; gzip's header holds the time."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            found[str(path.relative_to(folder))] = hashlib.sha256(data).hexdigest()
    return found


def differences(one: Any, other: Any, place: str = "") -> list[str]:
    """Where two results differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        both = [(f"{place}.{key}", one.get(key), other.get(key)) for key in {**one, **other}]
    elif isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
        both = [(f"{place}[{i}]", a, b) for i, (a, b) in enumerate(zip(one, other, strict=True))]
    else:
        return [] if one == other else [f"{place}: {one!r} instead of {other!r}"[:300]]
    return [text for name, a, b in both for text in differences(a, b, name)]


def start(job: Job, folder: Path, log: Path, last: int | None = None) -> int:
    """The job in a process of its own; its output goes to the log.

    Args:
        job: what is done.
        folder: where.
        log: takes its output, and at its end the number of changes of files.
        last: the change before which it kills itself.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pid = os.fork()
    if pid:
        return pid
    code, changes = 70, 0

    def note(event: str, given: tuple[Any, ...]) -> None:
        nonlocal changes
        written = event == "open" and isinstance(given[2], int) and given[2] & (os.O_WRONLY | os.O_RDWR)
        if event in CHANGES or (written and str(given[0]).startswith(str(folder))):
            changes += 1
            if changes == last:
                os.kill(os.getpid(), signal.SIGKILL)

    try:
        sys.addaudithook(note)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(file, stream)
        code = job.work(folder)
        os.write(file, f"\nchanges {changes}\n".encode())
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def ended(pid: int, patience: float = 120.0) -> int:
    """The exit code of a process, negative for a signal."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError(f"hung for {patience:.0f} s")


def trial(
    job: Job, expected: Any, seconds: float, changes: int, folder: Path, rng: random.Random, most: int
) -> Counter[str]:
    """Kill a job a few times, let it end, and compare."""
    counts: Counter[str] = Counter()
    log = folder.with_suffix(".log")
    for _ in range(most):
        if rng.random() < 0.5:
            code = ended(start(job, folder, log, last=rng.randint(1, max(1, changes))))
            if code == 0:
                break  # what an earlier one had done was not done again
            assert code == -signal.SIGKILL, f"ended with {code}"
            counts["SIGKILL"] += 1
            job.whole(folder)
            continue
        pid, sent = start(job, folder, log), rng.choice(SIGNALS)
        time.sleep(rng.uniform(0.0, seconds))
        if os.waitpid(pid, os.WNOHANG)[0]:
            break  # it was quicker: run once more, below, as a user might
        os.kill(pid, sent)
        code = ended(pid)
        counts[sent.name] += 1
        own = {signal.SIGINT: 130, signal.SIGTERM: 143}.get(sent, -sent)  # after the command's own clean-up
        assert code in (-sent, 0, own), f"{sent.name} ended it with {code}"
        job.whole(folder)
    code = ended(start(job, folder, log))
    assert code == 0, f"the last run ended with {code}"
    found = job.result(folder)
    assert found == expected, "another end: " + "; ".join(differences(found, expected))[:2000]
    left = [str(p) for p in folder.rglob("*") if p.name.endswith((".partial", ".lock"))]
    assert not left, f"left behind: {left}"
    return counts


def prepare(data: Path) -> None:
    """Pairs, two models, and everything imported and compiled; polars is not used, whose threads a fork would lose."""
    rng = np.random.default_rng(0)
    pairs = sorted({(int(u), int(i)) for u, i in zip(rng.integers(0, 60, 700), rng.integers(0, 40, 700), strict=True)})
    lines = [f"u{u},i{i}" for u, i in pairs if u % 4 == i % 4 or rng.random() < 0.3]
    (data / "pairs.csv").write_text("\n".join(["user,item", *lines]) + "\n")
    from gramtower.data.datasets import planted_pairs

    matrix, held_out = (planted_pairs(60, 40, 400, groups=4, seed=seed) for seed in (1, 2))
    for name in SOLVERS:
        options = {"ratio": 0.1, "steps": 3} if name.startswith(("sogram", "sampling")) else {}
        model = gt.TwoTower(
            dim=4, hidden=(6,), optimizer=name, optimizer_options=options, max_iterations=3, device="cpu"
        )
        model.fit(matrix, validation=held_out)
        model.save(data / ("old.gramtower" if name == "gd" else "new.gramtower"))
    import matplotlib.figure  # noqa: F401
    import optuna  # noqa: F401
    import polars  # noqa: F401


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", default="", help="names separated by commas, such as fit,tune; all without it")
    parser.add_argument("--out", type=Path, default=Path("runs/crash.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    runner._CHECKPOINT_SECONDS, list_files._ANSWERS = 0.0, 8 * 7  # checkpoints and parts of lists, many of both
    rng, counts, failures = random.Random(arguments.seed), Counter[str](), []
    with tempfile.TemporaryDirectory(prefix="gramtower-crash-") as scratch:
        base = Path(scratch)
        prepare(base)
        made = ended(start(Job("files", prepare_files, lambda data: None), base, base / "files.log"))
        assert made == 0, (base / "files.log").read_text()
        wanted = [name for name in arguments.jobs.split(",") if name]
        chosen = [job for job in jobs(base) if not wanted or job.name.split(":")[0] in wanted or job.name in wanted]
        expected, seconds, changes = {}, {}, {}
        for job in chosen:
            folder = base / f"whole-{job.name.replace(':', '-')}"
            begun = time.monotonic()
            assert ended(start(job, folder, folder.with_suffix(".log"))) == 0, folder.with_suffix(".log").read_text()
            seconds[job.name], expected[job.name] = time.monotonic() - begun, job.result(folder)
            changes[job.name] = int(folder.with_suffix(".log").read_text().split()[-1])
        number = 0
        while sum(counts[s.name] for s in SIGNALS) < arguments.kills:
            job, folder = chosen[number % len(chosen)], base / str(number)
            number += 1
            try:
                known = expected[job.name], seconds[job.name], changes[job.name]
                done = trial(job, *known, folder, rng, rng.randint(1, 6))
                counts += done + Counter({job.name: sum(done.values()), "runs compared": 1})
            except Exception as error:
                log = folder.with_suffix(".log")
                text = log.read_text()[-1500:] if log.exists() else ""
                failures.append({"job": job.name, "number": number - 1, "error": str(error)[:3000], "log": text})
                print(f"{job.name}: {type(error).__name__}: {str(error)[:1500]}\n{text}", file=sys.stderr, flush=True)
                counts["failed"] += 1
                if counts["failed"] >= 20:
                    break
            if number % 20 == 0:
                print(f"{sum(counts[s.name] for s in SIGNALS)} kills, {counts['failed']} failed", flush=True)
    result = {"seed": arguments.seed, "counts": dict(sorted(counts.items())), "failures": failures}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["counts"], indent=1))
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
