"""The evidence of the documentation: rerun it, write it into the pages, and check every measured number.

    python benchmarks/evidence.py --list              what `make evidence` reruns, and how long each step may take
    python benchmarks/evidence.py --run [STEP …]      rerun these steps, all of the CPU without names (make evidence)
    python benchmarks/evidence.py --take FOLDER       add the newer sections of result files of another machine
    python benchmarks/evidence.py --write             put values, tables and figures into README.md and docs/
    python benchmarks/evidence.py --check             fail if a number of the pages is not that of its result file
    python benchmarks/evidence.py --marks             what --check trusts: given numbers, and marks that any number fits

With --dry, steps have the smallest sizes, and everything happens in a copy of README.md, docs/ and the results, which
then shows whether `--run --write --check` would end well. A step that fails or is stopped leaves the results of others,
and its own earlier ones.

Measured numbers come from benchmarks/results/, whose sections say date, version, commit and machine. Marks, which are
HTML comments and do not show, tie the pages to them:

    <!-- = FILE PATH FORMAT -->0.325<!-- / -->   this value; if FILE is "computed", that of a function of
                                                 evidence_tables.py
    <!-- table NAME ARGUMENT … --> … <!-- / -->  a table of evidence_tables.py
    <!-- from FILE SECTION …, FILE … -->         every measured number of the block that follows (up to an empty line)
                                                 is a number of these sections, rounded as it is written; with ± 25%,
                                                 times may differ by so much, with "± 25% all" all numbers; with
                                                 "inverse", 1/x counts too
    <!-- given: REASON -->                       the numbers of the block are no measurements, or others' ones

A measured number has a decimal point, or a unit such as s, ms, GB, % or times. Code, links, and numbers after "=", "λ"
or a version's name are no measurements. Paths are keys separated by "/"; in a FORMAT "%" is a percentage, "," has
separators, ".3f" and the like are Python's; "ms", "min" and "GB" scale.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import evidence_tables as tables

ROOT = tables.ROOT  # of README.md, docs/ and the results; that of a copy with --dry
SCRIPTS = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Step:
    """A command that rewrites result files, the minutes after which it is stopped, and what it has more with --dry."""

    command: str
    minutes: float
    dry: str = ""


DATA = os.environ.get("GRAMTOWER_DATA", str(ROOT.parent / "shared/data"))
_ML1M = f"{DATA}/ml-1m/ratings_no_timestamp.dat.xz"
_SHORT = "--seconds 0.5 --users 100"  # of a comparison
_SMALL = f"{_SHORT} --device cpu --scale 0.01"  # the same without a GPU
CPU = {  # at most 55 minutes together
    "compare-ml1m": Step(f"bench_compare.py ml1m --data {DATA} --seconds 55", 10, _SHORT),
    "compare-moby": Step("bench_compare.py moby --seconds 30 --users 2000", 6.2, _SHORT),
    "compare-wikispeedia": Step(f"bench_compare.py wikispeedia --data {DATA} --seconds 15", 3.5, _SHORT),
    "compare-npm-deps": Step(f"bench_compare.py npm-deps --data {DATA} --seconds 25 --users 1000", 10, _SHORT),
    "demo": Step("bench_compare.py demo", 1),
    "models": Step(f"bench_compare.py models-ml1m --data {DATA}", 1.5, "--seeds 1"),
    "engine": Step("bench_engine.py all", 2.5, "--tiny"),
    "als": Step(f"bench_als.py --sets ml1m --data {DATA}", 1, "--repeats 1"),
    "defaults": Step(f"bench_defaults.py --ml1m {_ML1M} --seed 1", 1.5),
    "fit": Step(f"bench_fit.py --data {DATA} --repeats 2", 3.5, "--repeats 1 --sets small"),
    "startup": Step("bench_startup.py", 2, "--small --repeats 1"),
    "updates": Step(f"bench_updates.py --ml1m {_ML1M} --iterations 2", 2, "--shape 2000 500 20000 --days 2"),
    "lists": Step("bench_lists.py --repeats 1", 4, "--left 2000"),
    "evaluation": Step("bench_evaluation.py all", 2, "--scale 0.05 --repeats 1"),
    "memory": Step("bench_memory.py", 4, "--scale 0.1"),
}
_CUDA = "--device cuda --users 2000"
GPU = {  # at most nine minutes together; the first one compiles
    "compare-gpu": Step(f"bench_compare.py moby {_CUDA} --seconds 4 --section moby-gpu", 1.8, _SMALL),
    "precision": Step("bench_compare.py precision --device cuda --seconds 3", 1, _SMALL),
    "compare-ml10m": Step(f"bench_compare.py ml10m --synthetic all {_CUDA} --seconds 4", 1.6, _SMALL),
    "compare-wiki-simple": Step(f"bench_compare.py wiki-simple --synthetic all {_CUDA} --seconds 4", 1.6, _SMALL),
    "compare-netflix": Step(f"bench_compare.py netflix --synthetic all {_CUDA} --seconds 4", 3, _SMALL),
}
LONGER = {  # by name only: beyond the hour, or for what changes rarely
    "complexity": Step("bench_complexity.py", 20),
    "iteration": Step("features/iteration.py", 10),
    "modules": Step("bench_modules.py --size small --device cpu", 10),
    "derivatives": Step("bench_modules.py --derivatives --size small", 3, "--size tiny --repeats 1"),
    "solvers": Step(f"bench_solvers.py --data {DATA}", 120),
    "loading": Step("bench_startup.py --load", 10),
    "serving": Step("bench_serving.py", 20),
    "indexes": Step("bench_indexes.py --docs", 60),
    "reading": Step("bench_reading.py csv", 10),
    "setup": Step("bench_setup.py --threads 1 2", 20),
    "scale": Step("bench_scale.py --size 2Mx200k --device cpu", 30),
    "scale-fits": Step("bench_scale.py --fit 40Mx10k 69Mx59M", 9),  # on a GPU
    "scale-selection": Step("bench_scale.py --selection", 5),  # on a GPU
    "distributed": Step("bench_distributed.py all", 30),
    "new-items": Step(f"bench_new_items.py {DATA}/ml-1m --known", 30),
    "labels": Step(f"features/labels.py --data {DATA}", 60),
    "lightfm": Step(f"bench_lightfm.py --data {DATA}", 5),
    "selection": Step(f"bench_selection.py --data {DATA} --peers --random 100", 600),
    "quality-ml1m": Step("quality/run.py ml1m", 10),
    "gpu-netflix": Step("bench_gpu.py --shape netflix --precision tf32", 5),
}


def run(names: list[str], dry: bool = False) -> list[str]:
    """Rerun steps one after the other; return what failed or took too long."""
    steps, failed, start = CPU | GPU | LONGER, [], time.perf_counter()
    for name in names:
        if name not in steps:
            raise SystemExit(f"step: got {name!r}, expected one of {', '.join(steps)}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a step ends with this process
    source = os.pathsep.join([str(SCRIPTS.parent / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = os.environ | {"GRAMTOWER_RESULTS": str(tables.RESULTS.resolve()), "PYTHONPATH": source}
    for name in names:
        step, since = steps[name], time.perf_counter()
        command = f"{step.command} {step.dry}".strip() if dry else step.command
        minutes = step.minutes * (5 if dry else 1)  # a try may share its machine
        print(f"== {name}: python benchmarks/{command} (at most {minutes:g} min)", flush=True)
        child = subprocess.Popen([sys.executable, *command.split()], cwd=SCRIPTS, env=variables, start_new_session=True)
        try:
            status = child.wait(60 * minutes)
            failed += [f"{name}: exit status {status}"] if status else []
        except BaseException as error:
            os.killpg(child.pid, signal.SIGKILL)  # with the processes that it started
            child.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            failed.append(f"{name}: stopped after {minutes:g} minutes")
        print(f"== {name}: {(time.perf_counter() - since) / 60:.1f} minutes", flush=True)
    print(f"{len(names) - len(failed)} of {len(names)} steps in {(time.perf_counter() - start) / 60:.1f} minutes")
    return failed


def take(folder: Path) -> None:
    """Add sections of the result files in a folder that are newer than those here and have as many methods."""
    for path in sorted(folder.glob("*.json")):
        here = tables.RESULTS / path.name
        mine = json.loads(here.read_text()) if here.exists() else {}
        newer = {
            name: section
            for name, section in json.loads(path.read_text()).items()
            if isinstance(section, dict) and _date(section) > _date(mine.get(name, {}))
            and _ran(section) >= _ran(mine.get(name, {}))
        }  # fmt: skip
        if newer:
            here.write_text(json.dumps({**mine, **newer}, indent=1, ensure_ascii=False) + "\n")
            print(f"{path.name}: {', '.join(newer)}")


def _date(section: dict[str, Any]) -> str:
    return str(section.get("environment", {}).get("date", ""))


def _ran(section: dict[str, Any]) -> int:
    """How many methods of a comparison have a result."""
    return sum("lowest" in one for one in section.get("methods", {}).values())


def copy_to(folder: Path) -> None:
    """Continue with a copy of README.md, docs/ and the results."""
    global ROOT
    ROOT, source = folder, ROOT
    shutil.copy(source / "README.md", folder)
    shutil.copytree(source / "docs", folder / "docs", ignore=shutil.ignore_patterns("_build"))
    shutil.copytree(tables.RESULTS, folder / "results")
    tables.RESULTS = folder / "results"


# Pages

VALUE = re.compile(r"(<!-- = (\S+) (\S+)((?: [^ ]+)*?) -->)(.*?)(<!-- / -->)", re.DOTALL)
TABLE = re.compile(r"(<!-- table ([\w ./-]+?) -->\n)(.*?)(<!-- / -->)", re.DOTALL)
FROM = re.compile(r"<!-- from (.+?) -->")
GIVEN = re.compile(r"<!-- given: .+? -->", re.DOTALL)
_UNITS = {  # what numbers of result files are multiplied by
    "": (1.0, 100.0), "s": (1.0, 1e-3), "ms": (1.0, 1e3), "µs": (1.0, 1e6, 1e3), "min": (1 / 60,), "minutes": (1 / 60,),
    "GB": (1.0, 1e-9), "MB": (1.0, 1e-6, 1e3), "kB": (1.0, 1e-3), "%": (100.0,), "times": (1.0,), "requests": (1.0,),
    "per second": (1.0,),
}  # fmt: skip
NUMBER = re.compile(
    r"(?<![\w.^²⁻/-])(?P<sign>[+−-]?)(?P<number>\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d*\.?\d+(?:e-?\d+)?)"
    r"(?:%|\s?(?P<unit>ms|µs|s|GB|MB|kB|min|minutes|times|seconds|requests|per second)\b)?(?P<percent>%)?"
)
_TIMED = ("s", "ms", "µs", "min", "minutes", "times", "requests", "per second")
_SETTING = re.compile(
    r"(?:[=≤≥<>×^~]|\b(?:torch|triton|Python|python|version|numpy|scipy|numba|CUDA|implicit|LightFM|polars|"
    r"to the power of|label of|labels of|share of|power of|ω of|λ of|μ of|bound of|bound is|at most|at least|goal of|"
    r"goal was|recall|levels?|differences? of|weights? of|threshold of|budget of|dimensions?|seed|splits?|"
    r"Section|width|factors?|alpha|limit of|within|[Tt]ensor))\]? ?$"
)


def pages() -> list[Path]:
    """The pages whose numbers are checked."""
    docs = [page for page in sorted((ROOT / "docs").rglob("*.md")) if "_build" not in page.parts]
    return [ROOT / "README.md", *docs]


def blocks(text: str) -> Iterator[tuple[int, str, str]]:
    """Line, mark and prose of each block that is no code: lines up to an empty one, with the mark before them."""
    fence, mark, lines, first = False, "", [], 0
    for number, line in enumerate([*text.splitlines(), ""], 1):
        if line.lstrip().startswith("```") or (line.startswith("---") and number < 12):
            fence = not fence
            continue
        if fence or (line.startswith("    ") and not lines):  # with lines it continues the item of a list
            continue
        if (found := FROM.fullmatch(line.strip()) or GIVEN.fullmatch(line.strip())) and not lines:
            mark = found[0]
        elif line.strip():
            first = first or number
            lines.append(line)
        else:
            if lines:
                yield first, mark, "\n".join(lines)
                mark = ""
            lines, first = [], 0


def prose(block: str) -> str:
    """A block without what is no measurement: checked values and tables, code, links, comments."""
    for pattern in (VALUE, TABLE):
        block = pattern.sub(" ", block)
    block = re.sub(r"<!--.*?-->", " ", block, flags=re.DOTALL)
    block = re.sub(r"`[^`]*`", "``", block)
    block = re.sub(r"\]\([^)]*\)", "]", block)
    return re.sub(r"\*\*|__", "", block)


@dataclass(frozen=True)
class Measured:
    """A measured number of a page."""

    text: str
    value: float
    step: float  # one unit of the last digit that is written
    unit: str


def measured(text: str) -> list[Measured]:
    """The measured numbers of prose: those with a decimal point or a unit."""
    found = []
    for match in NUMBER.finditer(text):
        digits, unit = match["number"], match["unit"] or ("%" if "%" in match[0] else "")
        unit = "s" if unit == "seconds" else unit
        after = text[match.end() : match.end() + 2]
        if _SETTING.search(text[max(0, match.start() - 24) : match.start()]) or after[:1] in ("·", "^", "⁻"):
            continue
        if re.match(r"\.\d|[\w²³×/]", after) and not re.match(r"/ ", after):
            continue  # a version, or part of a name
        if digits == "95" or re.match(r" (?:M|G|k|million|billion)\b", text[match.end() : match.end() + 9]):
            continue  # an interval, or a size
        if "." not in digits and "e" not in digits and unit == "":
            continue
        plain = digits.replace(",", "")
        places = len(plain.partition(".")[2].partition("e")[0])
        step = 10.0**-places * (10.0 ** int(plain.partition("e")[2]) if "e" in plain else 1.0)
        found.append(Measured(match[0].strip(), float(plain), step, unit))
    return found


def leaves(found: Any) -> Iterator[float]:
    """All numbers of a result, those in texts too."""
    if isinstance(found, dict):
        for key, value in found.items():
            if key not in ("environment", "environments"):
                yield from leaves(value)
    elif isinstance(found, list):
        for value in found:
            yield from leaves(value)
    elif isinstance(found, (int, float)) and not isinstance(found, bool):
        yield float(found)
    elif isinstance(found, str):
        for text in re.findall(r"\d+\.\d+|\d{2,}", found):
            yield float(text)


def sections(mark: str) -> tuple[list[float], float, bool]:
    """The numbers of the sections that a mark names, the share by which times may differ, and whether others may."""
    names, _, share = mark.partition("±")
    inverse, names = " inverse" in names, names.replace(" inverse", "")
    numbers: list[float] = []
    for one in names.split(","):
        file, *parts = one.split()
        for part in parts or [""]:
            numbers += leaves(tables.at(file, part) if part else tables.load(file))
    numbers += [1 / number for number in numbers if number] if inverse else []
    amount, _, every = share.strip().partition(" ")
    return numbers, float(amount.rstrip("%")) / 100 if amount else 0.0, every == "all"


def matches(one: Measured, numbers: list[float], share: float, every: bool = False) -> bool:
    """Whether a number is among those of result files, rounded as it is written."""
    slack = 0.51 * one.step + (share * one.value if every or one.unit in _TIMED else 0.0)
    for number in numbers:
        candidates = [number * scale for scale in _UNITS[one.unit]]
        if one.unit == "%":
            candidates += [100 * (number - 1), 100 * (1 - number)]
        if one.unit == "times" and number:
            candidates.append(1 / number)
        if any(abs(abs(candidate) - one.value) <= slack for candidate in candidates):
            return True
    return False


def written(text: str) -> str:
    """A page with its values and tables as the result files have them."""

    def value(match: re.Match[str]) -> str:
        return match[1] + tables.shown(tables.at(match[2], match[3]), match[4].strip() or ".3f") + match[6]

    def table(match: re.Match[str]) -> str:
        name, *arguments = match[2].split()
        make: Callable[..., list[list[str]]] = getattr(tables, f"table_{name}")
        return match[1] + tables.markdown(make(*arguments)) + "\n\n" + match[4]

    return TABLE.sub(table, VALUE.sub(value, text))


def problems(page: Path) -> list[str]:
    """What is wrong with the numbers of a page, one line each."""
    text, name = page.read_text(), page.relative_to(ROOT)
    found = []
    try:
        if written(text) != text:
            found.append(f"{name}: a value or a table is not that of its result file; run evidence.py --write")
    except ValueError as error:
        found.append(f"{name}: {error}")
    found += [
        f"{name}: a line begins with a mark of a value, which ends its paragraph: {line.strip()[:60]}"
        for line in text.splitlines()
        if line.lstrip().startswith("<!-- = ")
    ]
    for line, mark, block in blocks(TABLE.sub(" ", text)):
        numbers = measured(prose(block))
        if not numbers or mark.startswith("<!-- given"):
            continue
        if not mark:
            found.append(f"{name}:{line}: no mark says where {', '.join(one.text for one in numbers[:8])} come from")
            continue
        try:
            known, *slack = sections(FROM.fullmatch(mark)[1])  # type: ignore[index]
        except ValueError as error:
            found.append(f"{name}:{line}: {error}")
            continue
        missing = [one.text for one in numbers if not matches(one, known, *slack)]
        if missing:
            found.append(f"{name}:{line}: {', '.join(missing)} not in {FROM.fullmatch(mark)[1]}")  # type: ignore[index]
    return found


@dataclass(frozen=True)
class Trusted:
    """The measured numbers of a block that its mark does not prove."""

    where: str
    mark: str
    loose: list[str]
    count: int  # of all measured numbers of the block


def trusted(page: Path) -> Iterator[Trusted]:
    """Blocks with their numbers that are given, or that could be others: most of eight changes would match as well."""
    name = page.relative_to(ROOT)
    for line, mark, block in blocks(TABLE.sub(" ", page.read_text())):
        numbers = measured(prose(block))
        if numbers and mark.startswith("<!-- given"):
            yield Trusted(f"{name}:{line}", mark, [one.text for one in numbers], len(numbers))
        elif numbers and (found := FROM.fullmatch(mark)):
            known, *slack = sections(found[1])
            loose = []
            for one in numbers:
                shares = (0.5, 0.6, 0.7, 0.8, 1.3, 1.4, 1.7, 1.9)
                changed = (replace(one, value=round(one.value * by / one.step) * one.step) for by in shares)
                fits = sum(matches(other, known, *slack) for other in changed)
                loose += [one.text] if fits > 4 else []
            yield Trusted(f"{name}:{line}", mark, loose, len(numbers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--run", nargs="*", metavar="STEP")
    parser.add_argument("--gpu", action="store_true", help="with --run: the steps of the GPU")
    parser.add_argument("--dry", action="store_true", help="with --run: smallest sizes, in a copy of pages and results")
    parser.add_argument("--results", type=Path, help="with --run: the folder of the result files, not of this machine")
    parser.add_argument("--take", type=Path, metavar="FOLDER")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--marks", action="store_true")
    options = parser.parse_args()
    if options.results is not None and (options.write or options.check):
        parser.error("--results: a folder of a part of the results cannot be written or checked; use --take")
    wrong: list[str] = []
    if options.list:
        for title, steps in (("make evidence", CPU), ("make evidence-gpu", GPU), ("by name", LONGER)):
            print(f"{title}: at most {sum(step.minutes for step in steps.values()):g} minutes")
            for name, step in steps.items():
                print(f"  {name:22s} {step.minutes:4g} min  python benchmarks/{step.command}")
    if options.marks:
        found = [one for page in pages() for one in trusted(page)]
        for kind in ("given", "from"):
            those = [one for one in found if one.mark.startswith(f"<!-- {kind}")]
            loose, count = sum(len(one.loose) for one in those), sum(one.count for one in those)
            print(f"{kind}: {count} numbers in {len(those)} blocks, {loose} of them trusted")
            print("".join(f"  {one.where} {one.mark} {', '.join(one.loose)}\n" for one in those if one.loose), end="")
    if options.dry:
        copy_to(Path(tempfile.mkdtemp(prefix="evidence-")))
        print(f"a try in {ROOT}")
    if options.results is not None:
        options.results.mkdir(parents=True, exist_ok=True)
        tables.RESULTS = options.results
    if options.run is not None:
        wrong += run(options.run or list(GPU if options.gpu else CPU), options.dry)
    if options.take is not None:
        take(options.take)
    if options.write:
        for page in pages():
            text = page.read_text()
            try:
                new = written(text)
            except ValueError as error:
                wrong.append(f"{page.relative_to(ROOT)}: {error}; the page stays as it is")
                continue
            if new != text:
                page.write_text(new)
                print(page.relative_to(ROOT))
        tables.draw(ROOT / "docs/figures")
    if options.check:
        bad = [line for page in pages() for line in problems(page)]
        print("\n".join(bad) or "every measured number is that of its result file")
        wrong += bad
    if wrong:
        raise SystemExit("\n".join(wrong) if options.run is not None else 1)


if __name__ == "__main__":
    main()
