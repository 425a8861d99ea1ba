"""All nine methods on a dozen problems: seconds to relative differences of 0.1, 0.01 and 0.001, and the default's lead.

    python benchmarks/bench_solvers.py [--device cuda] [--problems gowalla-128,ml1m-paper] [--methods newton-kron,lbfgs]
                                       [--seconds 20] [--reference-seconds 60] [--data ../shared/data] [--list]

Problems are linear and nonlinear, over ids and over features, with the estimator's default penalty and without one.
Each method starts from the same towers and has ``--seconds`` of training. The best value L* is the lowest that any run
of the problem found, one of them a long reference run of the default; (L − L*) / L* is the relative difference. Runs
are kept in the result file by problem and method: the script can be called in pieces, and a piece again replaces what
it measures. Where the data are not found, pairs and features of the same shape are generated, and the result has a
note.

The table ends with the lead of the default over the best of the others at each level and who that is, or, where none of
them came there, with what the lead is at least. It also says by how much the run that found L* still fell in the last
quarter of its time: unless that is well below 0.001, L* is not known well enough for that level.

Writes the section DEVICE of benchmarks/results/solvers.json; curves go to --curves. Times mean something on a machine
that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import lzma
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from common import RESULTS, environment, movielens_pairs, read_result, write_result

import gramtower as gt
from gramtower.data.datasets import planted_pairs
from gramtower.data.readers.item_lists import edge_list, extreme_classification, item_lists, thesaurus
from gramtower.engine.towers.towers import clone
from gramtower.model.fit_data import prepare_data
from gramtower.model.fit_parts import make_problem, make_towers
from gramtower.model.settings import ModelSettings
from gramtower.optim.solvers import SOLVERS

DEFAULT = "newton-kron"
LEVELS = (0.1, 0.01, 0.001)
_KEPT, _KEPT_FAR = 2e-4, 0.02  # relative decrease after which a record is kept, and how it grows with the distance
_TINY = (60, 40, 400)


@dataclass(frozen=True)
class Data:
    """Pairs and features.

    Attributes:
        pairs: m × n, labels 1.
        left: features of the left entities, or None for ids.
        right: those of the right ones.
        generated: whether they are made up.
    """

    pairs: sp.csr_matrix
    left: sp.csr_matrix | None = None
    right: sp.csr_matrix | None = None
    generated: bool = False


@dataclass(frozen=True)
class Source:
    """Where data come from.

    Attributes:
        file: in the data folder.
        read: makes them from it.
        shape: m, n and |O| of generated ones.
        widths: features of each side with how many a row has, (0, 0) for ids.
    """

    file: str
    read: Callable[[Path], Data]
    shape: tuple[int, int, int]
    widths: tuple[tuple[int, int], tuple[int, int]] = ((0, 0), (0, 0))

    def load(self, folder: Path, tiny: bool) -> Data:
        """The data, or generated ones of their shape."""
        if (folder / self.file).exists() and not tiny:
            return self.read(folder / self.file)
        shape = _TINY if tiny else self.shape
        features = []
        for rows, (width, filled) in zip(shape[:2], self.widths, strict=True):
            width, filled = (min(width, 30), min(filled, 5)) if tiny else (width, filled)
            density = filled / width if width else 0.0
            made = sp.random(rows, width, density, format="csr", dtype=np.float32, random_state=0) if width else None
            features.append(made)
        return Data(planted_pairs(*shape, groups=4 if tiny else 64, seed=0), *features, generated=True)


def ones(matrix: sp.csr_matrix) -> sp.csr_matrix:
    """The pattern of a matrix, labelled 1."""
    pattern = sp.csr_matrix(matrix, dtype=np.float32)
    pattern.data[:] = 1.0
    return pattern


def read_pages(path: Path) -> Data:
    """Pages that link to each other, both ways, with what they say of themselves on both sides."""
    with lzma.open(path, "rt") as lines:
        next(lines)
        edges = np.array([[int(x) for x in line.split(",")] for line in lines])
    with lzma.open(path.with_name("features.json.xz"), "rt") as file:
        listed: dict[str, list[int]] = json.load(file)
    pages = 1 + max(int(edges.max()), *map(int, listed))
    rows = np.concatenate([edges[:, 0], edges[:, 1]])
    columns = np.concatenate([edges[:, 1], edges[:, 0]])
    pairs = ones(sp.csr_matrix((np.ones(len(rows), np.float32), (rows, columns)), shape=(pages, pages)))
    owner = np.repeat([int(page) for page in listed], [len(x) for x in listed.values()])
    feature = np.concatenate([np.asarray(x, dtype=np.int64) for x in listed.values()])
    words = ones(sp.csr_matrix((np.ones(len(owner), np.float32), (owner, feature)), shape=(pages, feature.max() + 1)))
    return Data(pairs, words, words)


def read_labels(path: Path) -> Data:
    """Documents by their words, and their labels."""
    documents = extreme_classification(path)
    return Data(ones(documents.pairs.matrix), documents.features)


def read_lists(path: Path) -> Data:
    """Users with their items."""
    return Data(ones(item_lists(path).matrix))


SOURCES = {
    "gowalla": Source("gowalla/train.txt.xz", read_lists, (29_858, 40_981, 810_128)),
    "yelp2018": Source("yelp2018/train.txt.xz", read_lists, (31_668, 38_048, 1_237_259)),
    "ml1m": Source("ml-1m/ratings_no_timestamp.dat.xz", lambda p: Data(movielens_pairs(p)[0]), (6_037, 3_513, 517_770)),
    "moby": Source(
        "moby-thesaurus/words.txt.xz", lambda p: Data(ones(thesaurus(p).matrix)), (30_259, 102_428, 2_520_214)
    ),
    "wikispeedia": Source(
        "wikispeedia/links.tsv.xz", lambda p: Data(ones(edge_list(p).matrix)), (4_604, 4_604, 119_882)
    ),
    "eurlex": Source("eurlex-4k/train.txt.xz", read_labels, (15_511, 3_993, 82_530), ((5_000, 236), (0, 0))),
    "pages": Source("facebook-pages/edges.csv.xz", read_pages, (22_470, 22_470, 342_004), ((4_714, 14), (4_714, 14))),
}


@dataclass(frozen=True)
class Case:
    """A problem.

    Attributes:
        source: its data.
        dim: k.
        hidden: widths of hidden layers.
        settings: of the problem; None for what `gt.TwoTower` minimises of such data, features scaled.
        activation: of hidden layers.
    """

    source: str
    dim: int
    hidden: tuple[int, ...] = ()
    settings: dict[str, Any] | None = None
    activation: str = "elu"

    def make(self, data: Data, device: str, tiny: bool) -> tuple[gt.Problem, gt.Towers]:
        """The problem and where all methods start."""
        dim, hidden = (4, tuple(min(8, width) for width in self.hidden)) if tiny else (self.dim, self.hidden)
        if self.settings is None:
            settings = ModelSettings(dim=dim, hidden=hidden, activation=self.activation, device=device)
            prepared = prepare_data(settings, data.pairs, data.left, data.right)
            problem = make_problem(settings, prepared)
            return problem, make_towers(settings, prepared, problem)
        problem = gt.Problem(data.pairs, data.left, data.right, **self.settings)
        return problem, gt.mlp_towers(problem, hidden, dim, self.activation).to(torch.device(device))


_PAPER = {"omega": 2.0**-4, "l2": 4.0}  # the paper's ml1m
_ALS = {"loss": "squared", "imputed": 0.0, "omega": 2.0**-4, "l2": 1.0}  # implicit's objective
CASES = {
    "gowalla-128": Case("gowalla", 128),
    "gowalla-1024": Case("gowalla", 1024),
    "yelp2018-128": Case("yelp2018", 128),
    "yelp2018-1024": Case("yelp2018", 1024),
    "ml1m-128": Case("ml1m", 128),
    "ml1m-1024": Case("ml1m", 1024),
    "moby-128": Case("moby", 128),
    "moby-1024": Case("moby", 1024),
    "wikispeedia-32": Case("wikispeedia", 32),
    "gowalla-als": Case("gowalla", 128, settings=_ALS),
    "ml1m-als": Case("ml1m", 128, settings=_ALS),
    "ml1m-linear-paper": Case("ml1m", 128, settings=_PAPER),
    "eurlex-linear": Case("eurlex", 128),
    "ml1m-paper": Case("ml1m", 128, (256, 256), _PAPER),
    "moby-paper": Case("moby", 128, (256, 256), {"omega": 2.0**-10, "l2": 4.0}),
    "eurlex-hidden": Case("eurlex", 128, (256, 256)),
    "pages-hidden": Case("pages", 512, (1024,), activation="relu"),
    "pages-narrow": Case("pages", 32, (64,), activation="relu"),  # two cores can bear it with all nine methods
}


def run(problem: gt.Problem, towers: gt.Towers, method: str, seconds: float, iterations: int) -> dict[str, Any]:
    """One method from the common start: when it was how low, and how it ended."""
    try:
        result = gt.minimize(problem, clone(towers), method, iterations, seconds, tolerance=0.0)
    except (ValueError, RuntimeError, ArithmeticError, MemoryError) as error:
        return {"status": f"{type(error).__name__}: {error}", "curve": [], "seconds": 0.0, "iterations": 0}
    first, last = result.history[0], result.history[-1]
    curve = thinned([
        (round(record.seconds, 4), record.value, round(record.work["pair_passes"] - first.work["pair_passes"], 2))
        for record in result.history
    ])  # fmt: skip
    return {
        "status": result.reason.name, "curve": curve, "seconds": last.seconds, "iterations": last.iteration,
        "date": environment()["date"],
    }  # fmt: skip


def thinned(curve: list[tuple[float, float, float]]) -> list[tuple[float, float, float]]:
    """The records that a result keeps: fewer of them the farther they are from the end."""
    end, kept = curve[-1][1], [curve[0]]
    for record in curve[1:-1]:
        before = kept[-1][1]
        share = max(_KEPT, _KEPT_FAR * (before - end) / abs(end)) if end else _KEPT
        if record[1] < before - share * abs(before):
            kept.append(record)
    return kept + curve[-1:] if len(curve) > 1 else kept


def reached(curve: list[tuple[float, float, float]], best: float, level: float) -> tuple[float | None, float | None]:
    """Seconds and passes over O until a run was at or below a relative difference; None if it never was."""
    cells = ((seconds, passes) for seconds, value, passes in curve if value <= best + level * abs(best))
    return next(cells, (None, None))


def summary(runs: dict[str, Any]) -> dict[str, Any]:
    """Of one problem: L*, each method's seconds and passes over O to each level, default over best of the others.

    Where none of the others came to a level the ratio is at most the default's seconds over the longest they had.
    ``falling`` is the relative decrease of the run that found L* in the last quarter of its time.
    """
    lowest = [value for run in runs.values() for _, value, _ in run["curve"] if np.isfinite(value)]
    if not lowest:
        return {"best": None, "falling": None, "seconds_to": {}, "passes_to": {}, "ratio": {}}
    best = min(lowest)
    curve = min((run["curve"] for run in runs.values() if run["curve"]), key=lambda curve: min(x[1] for x in curve))
    earlier = min(value for seconds, value, _ in curve if seconds <= max(0.75 * curve[-1][0], curve[0][0]))
    methods = {name: run for name, run in runs.items() if name != "reference"}
    table, passes = (
        {
            name: {f"{level:g}": reached(run["curve"], best, level)[what] for level in LEVELS}
            for name, run in methods.items()
        }
        for what in (0, 1)
    )
    ratio: dict[str, Any] = {}
    for level in (f"{level:g}" for level in LEVELS):
        own = table.get(DEFAULT, {}).get(level)
        others = {name: found[level] for name, found in table.items() if name != DEFAULT and found[level] is not None}
        spent = max((run["seconds"] for name, run in methods.items() if name != DEFAULT), default=0.0)
        if own is not None and others:
            rival = min(others, key=lambda name: others[name])
            ratio[level] = {"ratio": own / max(others[rival], 1e-9), "rival": rival}
        elif own is not None and spent:
            ratio[level] = {"ratio": own / spent, "rival": None}  # at most
        else:
            ratio[level] = None
    falling = (earlier - best) / abs(best) if best else 0.0
    return {"best": best, "falling": falling, "seconds_to": table, "passes_to": passes, "ratio": ratio}


def without_curves(entry: dict[str, Any]) -> dict[str, Any]:
    """A problem's entry with the lowest value of each run instead of its curve."""
    runs = {
        name: {key: value for key, value in run.items() if key != "curve"}
        | {"lowest": min((value for _, value, _ in run["curve"]), default=None)}
        for name, run in entry["runs"].items()
    }
    return {**entry, "runs": runs}


def show(name: str, found: dict[str, Any], about: str) -> None:
    """The table of a problem: seconds and passes over the observed pairs to each level."""
    if found["best"] is None:
        print(f"\n{name} ({about}): no run has a value", flush=True)
        return
    print(f"\n{name} ({about}): L* = {found['best']}, falling by {found['falling']:.1e} in the last quarter of its run")
    for method, cells in found["seconds_to"].items():
        passes = found["passes_to"][method]
        texts = ("–" if s is None else f"{s:.3f} s, {passes[level]:.0f}" for level, s in cells.items())
        print(f"  {method:14}" + "".join(f"{text:>24}" for text in texts))
    print(f"  {'default leads':14}" + "".join(f"{lead(cell):>24}" for cell in found["ratio"].values()), flush=True)


def lead(cell: dict[str, Any] | None) -> str:
    """How many times sooner the default is at a level, and before whom; below 1 it is later."""
    if cell is None:
        return "–"
    times = 1 / max(cell["ratio"], 1e-9)
    return f"at least {times:.2f} times" if cell["rival"] is None else f"{times:.2f} times, {cell['rival']}"


def main(options: argparse.Namespace) -> Path:
    """Measure what is asked for and add it to the result file."""
    name = f"solvers/{options.device}" + ("-tiny" if options.tiny else "")
    path, kept = options.out / "solvers.json", read_result(name, options.curves).get("problems", {})
    iterations, seconds = (3, 5.0) if options.tiny else (10**6, options.seconds)
    for problem_name in options.problems:
        case = CASES[problem_name]
        data = SOURCES[case.source].load(options.data, options.tiny)
        problem, towers = case.make(data, options.device, options.tiny)
        for method in [name for name in (DEFAULT, "lbfgs") if name in options.methods] or [DEFAULT]:
            gt.minimize(problem, clone(towers), method, 2)  # compiles what is compiled once
        entry = kept.setdefault(problem_name, {"runs": {}})
        entry["data"] = "generated, same shape" if data.generated else case.source
        entry["shape"], entry["dim"], entry["hidden"] = [*data.pairs.shape, data.pairs.nnz], case.dim, case.hidden
        if options.reference_seconds and ("reference" not in entry["runs"] or not options.keep_reference):
            limit = 5.0 if options.tiny else options.reference_seconds
            entry["runs"]["reference"] = run(problem, towers, DEFAULT, limit, 6 if options.tiny else iterations)
        for method in options.methods:
            entry["runs"][method] = run(problem, towers, method, seconds, iterations)
            entry["summary"] = summary(entry["runs"])
            write_result(name, {"problems": kept}, options.curves)
            path = write_result(
                name, {"problems": {key: without_curves(entry) for key, entry in kept.items()}}, options.out
            )
        show(problem_name, entry["summary"], entry["data"])
        del problem, towers
    return path


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    here = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--problems", help="names separated by commas; all but those of dimension 1024 on a CPU")
    parser.add_argument("--methods", default=",".join(SOLVERS), help="names separated by commas")
    parser.add_argument("--seconds", type=float, default=20.0, help="of training for each method")
    parser.add_argument("--reference-seconds", type=float, default=60.0, help="of the reference run; 0 for none")
    parser.add_argument("--keep-reference", action="store_true", help="use the reference of an earlier call")
    parser.add_argument("--data", type=Path, default=here.parents[1] / "shared" / "data", help="folder of data sets")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result")
    parser.add_argument(
        "--curves", type=Path, default=Path("runs/solvers"), help="folder of the curves, to add to later"
    )
    parser.add_argument("--tiny", action="store_true", help="generated problems of no size: does it run?")
    parser.add_argument("--list", action="store_true", help="say which problems there are, and end")
    options = parser.parse_args(arguments)
    usual = [name for name in CASES if options.device == "cuda" or options.tiny or not name.endswith("-1024")]
    options.problems = options.problems.split(",") if options.problems else usual
    options.methods = options.methods.split(",")
    for given, known in ((options.problems, CASES), (options.methods, SOLVERS)):
        if unknown := [name for name in given if name not in known]:
            parser.error(f"got {', '.join(unknown)}, expected names among {', '.join(known)}")
    return options


if __name__ == "__main__":
    asked = parse()
    if asked.list:
        print("\n".join(CASES))
    else:
        print(main(asked))
