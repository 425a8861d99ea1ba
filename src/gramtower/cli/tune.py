"""``gramtower tune``: from a file of pairs to a config file for ``gramtower fit``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from gramtower._util import checks as check
from gramtower.cli.fit_command import features_table
from gramtower.cli.formats import DataOptions
from gramtower.cli.options import COMMON, Common, FitFeatures, ModelOptions, TuneTraining, read_config
from gramtower.cli.output import print_facts, print_json, print_table
from gramtower.cli.reading import for_writing, held, read_pairs, tower_features, validation_of
from gramtower.experiments.tuning.report import CONFIG, TABLE, Search, trial_lines
from gramtower.experiments.tuning.search import tune as search
from gramtower.experiments.tuning.space import read_space
from gramtower.model.settings import ModelSettings

STORAGE, _OLD = "search", "search.journal"
_HELD_OUT = 0.1


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
    common: Common = COMMON,
) -> int:
    """Choose a model's settings by how well they rank a validation part of the training data.

    The search covers everything that no flag or config sets: weight of unobserved pairs, penalties, weights by degree,
    imputed label, dimension, hidden layers, loss and features; or the names in --space. The first trial uses the
    defaults, which stay unless another trial is better by more than one standard error. The same command continues a
    search that was stopped, and with more --trials one that ended.

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
    if (for_writing(out) / _OLD).exists():
        check.fail("out", f"{out} with {_OLD}, a search of an earlier version", "a new folder")
    wanted = None if space is None else read_space(space)
    limit, settings.train.time_limit = settings.train.time_limit, None
    estimator = ModelSettings(**settings.estimator_arguments())
    metric = settings.train.metric or estimator.metric
    pairs = read_pairs(source, settings.data, loss=estimator.loss)
    validation = validation_of(settings.data)
    common.note(f"{len(pairs):,} pairs of {pairs.shape[0]:,} left and {pairs.shape[1]:,} right entities")
    towers, _ = tower_features(settings, pairs, common.note)
    left, right = (None if parts == ["id"] else parts for parts in towers.values())
    tables = {
        "data": {name: value for name, value in asdict(settings.data).items() if name != "validation"},
        "features": features_table(settings.features) | {"history": settings.model.history},
    }
    say = trial_lines(common.note)

    def progress(found: Search) -> None:
        found.write(out, tables)
        say(found)

    storage = storage or out / STORAGE
    with held(out):
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
        "config": str(out / CONFIG), "report": str(out / TABLE),
    }  # fmt: skip
    if common.json:
        metrics = {"own settings": found.trials[0].metrics, "found": found.best.metrics}
        chosen = {"arguments": found.arguments, "features": found.features, "importance": found.importance}
        print_json(facts | {"metrics": metrics} | chosen)
    else:
        print_facts(facts)
        heads, rows = found.metrics_table()
        if rows:
            print_table(heads, rows)
        print(found.caution)
    if found.interrupted:
        kept = f"{len(found.trials)} trials were kept in {storage}, and the same command continues after them"
        raise KeyboardInterrupt(kept)
    return 0
