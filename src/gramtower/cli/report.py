"""``gramtower report``: the page of a fit, a tuning, a comparison or a benchmark, from what its folder holds.

The kind of folder says which function makes the page (KINDS).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gramtower._util import checks as check
from gramtower._util.files import write_text
from gramtower.cli import run_folder
from gramtower.cli.benchmark import report_benchmark
from gramtower.cli.compare import show
from gramtower.cli.options import Common, Settings
from gramtower.cli.output import note, print_facts, print_json
from gramtower.cli.query import options_of_test
from gramtower.cli.reading import guess_format, id_column, read_frame, read_pairs
from gramtower.data.readers import movielens_table
from gramtower.data.sources import read_toml
from gramtower.experiments.benchmark_store import MANIFEST as BENCHMARK
from gramtower.experiments.comparison_build import PAGE, build
from gramtower.experiments.comparison_store import MANIFEST
from gramtower.experiments.fit_measures import validation_pairs
from gramtower.experiments.fit_report import FitRun, Titles, fit_page
from gramtower.experiments.tuning.report import REPORT, read_search
from gramtower.experiments.tuning_page import tuning_page
from gramtower.model.fitting import validated_history
from gramtower.model.two_tower import TwoTower
from gramtower.serving.table import EntityTable
from gramtower.training.result import Record, read_history


@dataclass(frozen=True)
class Asked:
    """What the command was given beside the folder; only a fit has a use for it."""

    test: Path | None = None
    left_table: Path | None = None
    right_table: Path | None = None


def report(
    run: Path,
    /,
    *,
    test: Path | None = None,
    left_table: Path | None = None,
    right_table: Path | None = None,
    common: Common | None = None,
) -> int:
    """Make report.html of a fit, a tuning, a comparison or a benchmark, from what its folder holds.

    Of a fit: curves, settings, data, metrics by popularity and by activity, and examples of lists. Metrics are those of
    --test, or of the validation pairs that the model keeps. Titles are those of a column title, name or label of a
    table: the one given, the run's own table of features, or the films of a MovieLens folder. Of a tuning: trials,
    importance of choices, settings. Of a comparison: all that compare makes, anew from its saved histories alone. Of a
    benchmark: from its finished runs.

    Args:
        run: Folder that fit, tune, compare or benchmark wrote, finished or not.
        test: Of a fit, held-out pairs to measure, a file like the one the run read.
        left_table: Of a fit, table with titles of left entities: .csv, .tsv, .parquet.
        right_table: The same for right entities.
        common: Output.
    """
    common = common or Common()
    if not run.is_dir():
        check.fail("DIR", run, "the folder of a fit, a tuning, a comparison or a benchmark")
    benchmark = (run / BENCHMARK).exists()
    make = next(maker for is_one, maker in KINDS if is_one(run))
    asked = Asked(test, left_table, right_table)
    if asked != Asked() and (benchmark or make is not _fit):
        check.fail("--test, --left-table, --right-table", "a folder of something else", "the folder of a fit")
    if benchmark:
        return report_benchmark(run, common)
    content, problems = make(run, asked)
    for problem in problems:
        note(problem)
    if common.json:
        print_json(content)
    elif make is _comparison:
        show(content, run)
    else:
        kinds = (str, int, float)
        shown = {name: value for name, value in content.items() if isinstance(value, kinds) and name != "kind"}
        print_facts(shown | {"report": str(run / PAGE)})
    return 0


def _comparison(run: Path, asked: Asked) -> tuple[dict[str, Any], list[str]]:
    return build(run)


def _tuning(run: Path, asked: Asked) -> tuple[dict[str, Any], list[str]]:
    page, content, problems = tuning_page(read_search(run), run.resolve().name)
    write_text(run / PAGE, page)
    return content, problems


def _fit(run: Path, asked: Asked) -> tuple[dict[str, Any], list[str]]:
    found, notes = read_fit(run, asked)
    page, content, problems = fit_page(found)
    write_text(run / PAGE, page)
    return content, notes + problems


#: Kinds of folders in the order in which they are told, and what makes their pages; the last is any other.
KINDS: tuple[tuple[Callable[[Path], bool], Callable[[Path, Asked], tuple[dict[str, Any], list[str]]]], ...] = (
    (lambda run: (run / MANIFEST).exists(), _comparison),
    (lambda run: (run / run_folder.HISTORY).exists() or (run / run_folder.MODEL).exists(), _fit),
    (lambda run: (run / REPORT).exists(), _tuning),
    (lambda run: True, _comparison),
)


def read_fit(run: Path, asked: Asked) -> tuple[FitRun, list[str]]:
    """What the folder of a fit holds, and what of it could not be read."""
    history = _records(run / run_folder.HISTORY)
    config, notes = run / run_folder.CONFIG, list[str]()
    tables = read_toml("config", config) if config.exists() else {}
    refitted = not tables or bool(tables.get("train", {}).get("refit"))  # otherwise a file of an earlier fit
    first = _records(validated_history(run / run_folder.HISTORY)) if refitted else []
    title = run.resolve().name
    if not (run / run_folder.MODEL).exists():
        if asked != Asked():
            run_folder.model_file(run)  # which says that there is none
        return FitRun(title, _named(history, first)), notes
    model, settings = run_folder.open_model(run)
    truth, left_out = _held_out(model, settings, asked)
    titles: dict[str, Titles] = {}
    for side, given in (("left", asked.left_table), ("right", asked.right_table)):
        try:
            titles[side] = _titles(model, settings, side, given)
        except (OSError, ValueError) as error:
            if given is not None:
                raise
            notes.append(f"no titles of {side} entities: {error}")
    return FitRun(
        title, _named(history or model.history_, first), _summary(run / run_folder.SUMMARY),
        tables, model.fitted_, truth, titles, left_out, tested=asked.test is not None,
    ), notes  # fmt: skip


def _named(history: list[Record], first: list[Record]) -> dict[str, list[Record]]:
    """The records of a fit, and of a fit with refit those of both halves."""
    return {"with validation": first, "on all pairs": history} if first and history else {"fit": history or first}


def _records(path: Path) -> list[Record]:
    try:
        return read_history(path) if path.exists() else []
    except ValueError as error:
        raise ValueError(f"folder: {path} is not a history: {error}") from error


def _summary(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _held_out(model: TwoTower, settings: Settings, asked: Asked) -> tuple[tuple[Any, str] | None, int]:
    """Pairs to measure in the model's rows and what to call them, and how many were left out."""
    fitted = model.fitted_
    if asked.test is not None:
        pairs = read_pairs(asked.test, options_of_test(settings, asked.test, None), name="--test")
        found = fitted.aligned("test", pairs)
        if not found.pairs.nnz:
            check.fail("test", f"{found.total:,} pairs, none of them with two known ids", "pairs of the model's ids")
        return (found.pairs, f"{found.pairs.nnz:,} pairs of {asked.test.name}"), found.total - found.pairs.nnz
    kept = validation_pairs(fitted)
    if kept is None:
        return None, 0
    called = f"the {kept.nnz:,} validation pairs, by which the iteration that was kept was chosen"
    return (kept, called), 0


def _titles(model: TwoTower, settings: Settings, side: str, given: Path | None) -> Titles:
    """Titles from a table, from the run's own features, or from the films of a MovieLens folder."""
    named = given if given is not None else getattr(settings.features, f"{side}_features")
    this = model.left_ if side == "left" else model.right_
    if named is not None:
        frame = read_frame(f"--{side}-table", Path(named))
    else:
        path = None if settings.data.path is None else Path(settings.data.path)
        if side == "left" or path is None or not path.exists():
            return None
        if (settings.data.format or guess_format(path)) != "movielens":
            return None
        frame = movielens_table(path, "movies")
    id = id_column(side, frame, getattr(settings.features, f"{side}_id"), getattr(settings.data, side))
    return EntityTable(f"--{side}-table", frame, id, this.ids, len(this)).titles()
