"""The commands ``gramtower benchmark``, ``cross-validate``, ``tune`` and ``report``.

Finished runs of a benchmark are in its folder as they come, so that the same command continues after a kill.
``report`` builds the page of a fit, a search, a comparison or a benchmark; the kind of folder says which.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import scipy.sparse as sp
from cyclopts import Parameter

from gramtower._util import checks as check
from gramtower._util.files import as_path, write_json, write_text
from gramtower.cli import reading
from gramtower.cli.compare import shown as shown_comparison
from gramtower.cli.fit_command import features_table
from gramtower.cli.formats import DataOptions, ReadOptions, guess_format, names_in
from gramtower.cli.options import (
    Common,
    FeatureOptions,
    FitFeatures,
    ModelOptions,
    Settings,
    Switch,
    Texts,
    TrainOptions,
    TuneTraining,
    read_config,
)
from gramtower.cli.output import Table, note
from gramtower.cli.reading import Say
from gramtower.data.entity_table import EntityTable
from gramtower.data.interactions import Interactions
from gramtower.data.readers import movielens_table
from gramtower.data.sources import read_toml
from gramtower.experiments.benchmark_report import Benchmark, notes_of, table_of
from gramtower.experiments.benchmark_report import build as build_benchmark
from gramtower.experiments.benchmark_runner import BUILT_IN, TOWERS
from gramtower.experiments.benchmark_runner import benchmark as run_benchmark
from gramtower.experiments.comparison import read_records
from gramtower.experiments.comparison_page import build as build_comparison
from gramtower.experiments.cross_validation import cross_validate as validate
from gramtower.experiments.figures import PAGE
from gramtower.experiments.fit_report import FitRun, Titles, fit_page, validation_pairs
from gramtower.experiments.run_store import RunStore
from gramtower.experiments.tuning.report import (
    OF_HISTORY,
    REPORT,
    TABLE,
    Search,
    read_search,
    trial_lines,
    tuning_page,
)
from gramtower.experiments.tuning.search import tune as search
from gramtower.experiments.tuning.space import read_space
from gramtower.metrics.definitions import DEFAULT, parse
from gramtower.model.fitting import validated_history
from gramtower.model.settings import ModelSettings
from gramtower.model.two_tower import TwoTower
from gramtower.training.result import Record


def benchmark(
    path: Annotated[Path | None, Parameter(name="DATA")] = None,
    /,
    *,
    out: Path,
    test: str = "0.1",
    models: str | None = None,
    config: Texts = None,
    metrics: str = ",".join(DEFAULT),
    seeds: int = 3,
    reference: str | None = None,
    fresh: Switch = False,
    data: ReadOptions | None = None,
    features: FeatureOptions | None = None,
    common: Common = Common(),
    tokens: Annotated[Sequence[str], Parameter(parse=False)] = (),
) -> int:
    """Compare models: popularity, item-knn, ease, als, linear and hidden towers of gramtower, and your own configs.

    All models learn from the same pairs, rank all right entities for the same left entities and leave out training
    pairs. Each metric has a mean over the seeds, a 95% interval by a bootstrap over left entities, and a paired
    difference from the best model. Models that cannot run here are left out, with the reason.

    The same command continues a benchmark that was killed; other models and more seeds are added to those in the
    folder. Run nothing else on the machine meanwhile; the page says how many cores other processes kept busy.

    Args:
        path: Pairs, as for fit.
        out: Folder for report.html, summary.json, benchmark.json and the finished runs.
        test: Share of the pairs to test on, drawn again with each seed, or a file like DATA, the same for all seeds.
        models: Names separated by commas, of popularity, item-knn, ease, als, gramtower-linear,
            gramtower-linear-features and gramtower-hidden-features [default: all, the last two if there are features];
            none for your own configs only.
        config: A model of your own: a TOML file as for fit, or NAME=FILE; may be repeated. The table [data] of the
            first says how DATA is read.
        metrics: Names separated by commas; the first decides which model is best.
        seeds: Number of seeds, starting from 0, of the splits and of the models.
        reference: The model that others are compared with [default: the best].
        fresh: Replace a benchmark that the folder holds.
    """
    reading.for_writing(check.local_path("out", out), "benchmark")
    configs = _configs(config or [])
    settings = Settings().with_flags(data, features)
    settings.data = _data_of(settings.data, configs)
    source = settings.source(path)
    names = None if models is None else names_in(models)
    names = [] if names == ["none"] else names
    if unknown := [name for name in names or () if name not in BUILT_IN]:
        check.fail("models", repr(unknown[0]), f"names of {', '.join(BUILT_IN)}, or none; --config adds your own")
    towers = names is None or any(name in TOWERS for name in names)
    pairs = reading.read_pairs(source, settings.data, loss=ModelSettings.loss if towers else None)
    held_out = reading.share_or_pairs("--test", test, settings.data)
    common.note(f"{reading.sizes_line(pairs)}, {seeds} seeds")
    given = _features(settings, pairs, common.note)
    own = {name: _model(each, settings.data, pairs, common.note) for name, each in configs.items()}
    try:
        found = run_benchmark(
            pairs, held_out, metrics=names_in(metrics), models=own, baselines=names, **given, seeds=seeds,
            reference=reference, out=out, fresh=fresh, title=source.name,
            command=shlex.join(["gramtower", *tokens]), progress=None if common.quiet else note, verbose=False,
        )  # fmt: skip
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"runs that ended are in {out}, and the same command continues after them") from None
    common.answer(found.to_dict(), *_shown(found, out))
    return 0 if all(one["status"] in ("finished", "left out") for one in found.summary["models"].values()) else 1


def _shown(found: Benchmark, out: Path) -> list[Table | str]:
    """Return the table, the models that are missing in it, and the best model."""
    return [Table(*table_of(found.summary)), *notes_of(found.summary), found.verdict, f"report: {out / PAGE}"]


def _configs(given: list[str]) -> dict[str, Settings]:
    """Return settings by the name of the model: the given one, or that of the file or of the run's folder."""
    found: dict[str, Settings] = {}
    for text in given:
        name, equals, rest = text.partition("=")
        named = bool(equals) and not Path(text).exists()
        path = as_path(rest if named else text)
        if not named:
            name = path.resolve().parent.name if path.name == reading.CONFIG else path.stem
        if name in found or name in BUILT_IN:
            check.fail("--config", text, f"NAME={path} with a name other than {name!r}, which is taken")
        found[name] = read_config(path)
    return found


def _data_of(flags: DataOptions, configs: dict[str, Settings]) -> DataOptions:
    """Return how DATA is read: as flags say, otherwise as the first config does; another config must not differ."""
    given = {name: value for name, value in asdict(flags).items() if value is not None}
    first = next(iter(configs.values()), Settings()).data
    base = {name: value for name, value in asdict(first).items() if value is not None} | given
    for name, settings in configs.items():
        for key, value in asdict(settings.data).items():
            if key not in ("validation", "path", *given) and value is not None and value != base.get(key):
                expected = f"{key} = {base.get(key)!r} as for the others, or a flag: all models read the same pairs"
                check.fail("--config", f"{key} = {value!r} in [data] of {name}", expected)
    return replace(DataOptions(), **base | {"validation": None})


def _features(settings: Settings, pairs: Interactions, say: Say) -> dict[str, Any]:
    """Return the input of towers other than ids."""
    given, _ = reading.tower_features(settings, pairs, say)
    return {name: parts for name, parts in given.items() if parts != ["id"]}


def _model(settings: Settings, data: DataOptions, pairs: Interactions, say: Say) -> tuple[TwoTower, dict[str, Any]]:
    """Return the model of a config and the arguments of its fit."""
    arguments = _features(replace(settings, data=data), pairs, say)
    validation = reading.validation_of(settings.data)
    if isinstance(validation, Interactions):
        check.fail("--config", "[data] validation, a file", "a share: pairs of a file may be among those tested")
    if validation is not None:
        arguments["validation"] = validation
    if settings.train.refit:
        arguments["refit"] = True
    if settings.train.validation_side is not None:
        arguments["validation_side"] = settings.train.validation_side
    return TwoTower(**settings.estimator_arguments()), arguments


def cross_validate(
    path: Annotated[Path | None, Parameter(name="DATA")] = None,
    /,
    *,
    folds: int = 5,
    metrics: str = ",".join(DEFAULT),
    out: Path | None = None,
    config: Path | None = None,
    data: ReadOptions | None = None,
    features: FeatureOptions | None = None,
    model: ModelOptions | None = None,
    train: TrainOptions | None = None,
    common: Common = Common(),
) -> int:
    """Measure settings by cross-validation: as many fits as folds, each tested on pairs that it has not seen.

    Every pair is tested once. Each metric has a mean over the folds, a 95% interval by Student's t over the folds, and
    one by a bootstrap over left entities.

    Args:
        path: Pairs, as for fit.
        folds: Number of folds, drawn with --seed.
        metrics: Names, separated by commas, as for evaluate.
        out: File for the numbers, as JSON.
        config: TOML file, as for fit.
    """
    settings = read_config(config).with_flags(data, model, train, features)
    source = settings.source(path)
    if out is not None and out.is_dir():
        check.fail("--out", f"{out}, which is a folder", "a file for JSON")
    names = [metric.name for metric in parse(names_in(metrics))]
    estimator = TwoTower(**settings.estimator_arguments(), verbose=not common.quiet)
    pairs = reading.read_pairs(source, settings.data, loss=estimator.loss)
    if settings.data.validation is not None:
        unused = f"[data] validation {settings.data.validation} of the config is not used"
        common.note(f"{unused}: the folds are held out instead")
    common.note(f"{reading.sizes_line(pairs)}, {folds} folds")
    seen, _ = reading.tower_features(settings, pairs, common.note)
    found = validate(estimator, pairs, folds, names, **seen, seed=estimator.seed)
    content = {"pairs": len(pairs), "folds": folds, "seed": estimator.seed, "metrics": found.to_dict()}
    if out is not None:
        write_json(out, content)
    return common.answer(content, Table(*found.table()))


_STORAGE, _OLD_STORAGE = "search", "search.journal"
_HELD_OUT = 0.1  # share to validate trials on


def tune(
    path: Annotated[Path | None, Parameter(name="DATA")] = None,
    /,
    *,
    out: Path,
    trials: int = 50,
    space: Path | None = None,
    storage: Path | None = None,
    config: Path | None = None,
    data: DataOptions | None = None,
    features: FitFeatures | None = None,
    model: ModelOptions | None = None,
    train: TuneTraining | None = None,
    common: Common = Common(),
) -> int:
    """Choose a model's settings by how well they rank a validation part of the training data.

    The search covers everything that no flag or config sets: weight of unobserved pairs, penalties, weights by degree,
    imputed label, dimension, hidden layers, loss and features; or the names in --space. The first trial uses the
    defaults, which stay unless another trial is better by more than two standard errors, also on other held-out data.
    The same command continues a search that was stopped, and with more --trials one that ended.

    Here --time-limit limits the whole search, --metric is the metric to maximise, --validation is the share of each
    user's pairs to rank [default: 0.1] or a file, and --max-iterations and --patience apply to each trial. With
    --validation-side left (or right), --validation is the share of that side's entities that trials do not see, so that
    they are ranked by their features only.

    Args:
        path: Pairs, as for fit.
        out: Folder for config.toml (for fit --config), report.md, report.json and the log of the search.
        trials: Number of settings to try, including those of an earlier run of the same search.
        space: TOML file with a table [space]: names and ranges or values to search; see docs/tuning.md.
        storage: Folder for the log of the search, instead of search in --out.
        config: TOML file, as for fit; settings in it are not searched.
    """
    settings = read_config(config).with_flags(data, model, train, features)
    source = settings.source(path)
    if (reading.for_writing(check.local_path("out", out)) / _OLD_STORAGE).exists():
        check.fail("out", f"{out} with {_OLD_STORAGE}, a search of an earlier version", "a new folder")
    wanted = None if space is None else read_space(space)
    limit, settings.train.time_limit = settings.train.time_limit, None
    estimator = ModelSettings(**settings.estimator_arguments())
    metric = settings.train.metric or estimator.metric
    pairs = reading.read_pairs(source, settings.data, loss=estimator.loss)
    validation = reading.validation_of(settings.data)
    common.note(reading.sizes_line(pairs))
    towers, _ = reading.tower_features(settings, pairs, common.note)
    left, right = (None if parts == ["id"] else parts for parts in towers.values())
    tables = {
        "data": {name: value for name, value in asdict(settings.data).items() if name != "validation"},
        "features": features_table(settings.features) | {name: getattr(settings.model, name) for name in OF_HISTORY},
    }
    say = trial_lines(common.note)

    def progress(found: Search) -> None:
        found.write(out, tables)
        say(found)

    storage = storage or out / _STORAGE
    with reading.held(out):
        try:
            found = search(
                estimator, pairs, trials=trials, time_limit=limit, metric=metric,
                validation=_HELD_OUT if validation is None else validation, space=wanted,
                storage=storage, seed=estimator.seed, features=(left, right), progress=progress,
                validation_side=settings.train.validation_side,
            )  # fmt: skip
        except KeyboardInterrupt:
            text = f"trials that ended are in {storage}, and the same command continues after them"
            raise KeyboardInterrupt(text) from None
    facts: dict[str, Any] = {
        "metric": metric, "value": found.best.value, "trial": found.best.number, "trials": len(found.trials),
        "at the defaults": found.trials[0].value, "verdict": found.verdict, "seconds": found.seconds,
        "config": str(out / reading.CONFIG), "report": str(out / TABLE),
    }  # fmt: skip
    metrics = {"own settings": found.trials[0].metrics, "found": found.best.metrics}
    chosen = {"arguments": found.arguments, "features": found.features, "importance": found.importance}
    measured = Table(*found.metrics_table())
    common.answer(facts | {"metrics": metrics} | chosen, facts, *([measured] if measured.rows else []), found.caution)
    if found.interrupted:
        kept = f"{len(found.trials)} trials were kept in {storage}, and the same command continues after them"
        raise KeyboardInterrupt(kept)
    return 0


def report(
    run: Path,
    /,
    *,
    test: Path | None = None,
    left_table: Path | None = None,
    right_table: Path | None = None,
    common: Common = Common(),
) -> int:
    """Build report.html of a fit, a search, a comparison or a benchmark from its folder.

    The page of a fit has curves, settings, data, metrics by popularity and by activity, and examples of lists. Metrics
    are those of --test, or of the validation pairs that the model keeps. Titles come from a column title, name or label
    of a table: the given one, the run's own table of features, or the films of a MovieLens folder. The page of a search
    has trials, importance of choices and settings. A comparison is rebuilt from its saved histories, a benchmark from
    its finished runs.

    Args:
        run: Folder that fit, tune, compare or benchmark wrote, finished or not.
        test: For a fit, held-out pairs to measure, a file like the one the run read.
        left_table: For a fit, table with titles of left entities: .csv, .tsv, .parquet.
        right_table: The same for right entities.
    """
    if not run.is_dir():
        check.fail("DIR", run, "the folder of a fit, a tuning, a comparison or a benchmark")
    benchmark, comparison = RunStore(run, "benchmark").manifest.exists(), (run / reading.COMPARISON).exists()
    written = any((run / name).exists() for name in (reading.HISTORY, reading.MODEL))
    fitted = written and not benchmark and not comparison
    tables = {"left": left_table, "right": right_table}
    if (test or left_table or right_table) and not fitted:
        check.fail("--test, --left-table, --right-table", "a folder of something else", "the folder of a fit")
    if benchmark:
        found = build_benchmark(run)
        return common.answer(found.to_dict(), *_shown(found, run))
    page, notes = "", list[str]()
    if fitted:
        run_of_fit, notes = read_fit(run, test, tables)
        page, content, problems = fit_page(run_of_fit)
    elif not comparison and (run / REPORT).exists():
        page, content, problems = tuning_page(read_search(run), run.resolve().name)
    else:
        content, problems = build_comparison(run)
    for problem in notes + problems:
        note(problem)
    if not page:
        return common.answer(content, *shown_comparison(content, run))
    write_text(run / PAGE, page)
    facts = {name: value for name, value in content.items() if isinstance(value, (str, int, float)) and name != "kind"}
    return common.answer(content, facts | {"report": str(run / PAGE)})


def read_fit(run: Path, test: Path | None, tables: Mapping[str, Path | None]) -> tuple[FitRun, list[str]]:
    """Return the content of the folder of a fit, and a list of what could not be read."""
    history = read_records(run / reading.HISTORY)
    config, notes = run / reading.CONFIG, list[str]()
    options = read_toml("config", config) if config.exists() else {}
    refitted = not options or bool(options.get("train", {}).get("refit"))  # otherwise a file of an earlier fit
    first = read_records(validated_history(run / reading.HISTORY)) if refitted else []
    title = run.resolve().name
    if not (run / reading.MODEL).exists():
        if test or any(tables.values()):
            reading.model_file(run)  # which says that there is none
        return FitRun(title, _named(history, first)), notes
    model, settings = reading.open_model(run)
    truth, left_out = _held_out(model, settings, test)
    titles: dict[str, Titles] = {}
    for side, given in tables.items():
        try:
            titles[side] = _titles(model, settings, side, given)
        except (OSError, ValueError) as error:
            if given is not None:
                raise
            notes.append(f"no titles of {side} entities: {error}")
    return FitRun(
        title, _named(history or model.history_, first), _summary(run / reading.SUMMARY),
        options, model.fitted_, truth, titles, left_out, tested=test is not None,
    ), notes  # fmt: skip


def _named(history: list[Record], first: list[Record]) -> dict[str, list[Record]]:
    """Return the records of a fit by name, with refit those of both halves."""
    return {"with validation": first, "on all pairs": history} if first and history else {"fit": history or first}


def _summary(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _held_out(model: TwoTower, settings: Settings, test: Path | None) -> tuple[tuple[sp.csr_matrix, str] | None, int]:
    """Return the pairs to measure in the model's rows and a name for them, and how many were left out."""
    fitted = model.fitted_
    if test is not None:
        found = fitted.aligned("test", reading.read_like(settings, test, "--test"))
        if not found.pairs.nnz:
            check.fail("test", f"{found.total:,} pairs, none of them with two known ids", "pairs of the model's ids")
        return (found.pairs, f"{found.pairs.nnz:,} pairs of {test.name}"), found.total - found.pairs.nnz
    kept = validation_pairs(fitted)
    if kept is None:
        return None, 0
    called = f"the {kept.nnz:,} validation pairs, by which the iteration that was kept was chosen"
    return (kept, called), 0


def _titles(model: TwoTower, settings: Settings, side: str, given: Path | None) -> Titles:
    """Return titles from a table, from the run's own features, or from the films of a MovieLens folder."""
    named = given if given is not None else getattr(settings.features, f"{side}_features")
    this = model.left_ if side == "left" else model.right_
    if named is not None:
        frame = reading.read_frame(f"--{side}-table", as_path(named))
    else:
        path = None if settings.data.path is None else as_path(settings.data.path)
        if side == "left" or path is None or not path.exists():
            return None
        if (settings.data.format or guess_format(path)) != "movielens":
            return None
        frame = movielens_table(path, "movies")
    id = reading.id_column(side, frame, getattr(settings.features, f"{side}_id"), getattr(settings.data, side))
    return EntityTable(f"--{side}-table", frame, id, this.ids, len(this)).titles
