"""``gramtower cross-validate``: the metrics of a model's settings, fold by fold, with intervals."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from gramtower._util import checks as check
from gramtower._util.files import write_json
from gramtower.cli.options import (
    Common,
    DataOptions,
    FeatureOptions,
    ModelOptions,
    TrainOptions,
    merge_flags,
    refuse_candidates,
    refuse_refit,
    refuse_validation_side,
)
from gramtower.cli.output import note, print_json, print_table, shown
from gramtower.cli.reading import read_pairs, tower_features
from gramtower.experiments.cross_validation import cross_validate as validate
from gramtower.experiments.intervals import Interval
from gramtower.metrics.definitions import DEFAULT, parse
from gramtower.model.two_tower import TwoTower


def cross_validate(
    path: Annotated[Path | None, Parameter(name="DATA")] = None,
    /,
    *,
    folds: int = 5,
    metrics: str = ",".join(DEFAULT),
    out: Path | None = None,
    config: Path | None = None,
    data: DataOptions | None = None,
    features: FeatureOptions | None = None,
    model: ModelOptions | None = None,
    train: TrainOptions | None = None,
    common: Common | None = None,
) -> int:
    """Measure settings by cross-validation: as many fits as folds, each tested on pairs that it has not seen.

    Every pair is tested once. Of each metric there are the mean over the folds, its 95% interval by Student's t over
    the folds, and one by a bootstrap over left entities.

    Args:
        path: Pairs, as for fit.
        folds: How many, drawn with --seed.
        metrics: Names, separated by commas, as for evaluate.
        out: File for the numbers, as JSON.
        config: TOML file, as for fit.
        data: Data.
        features: Features.
        model: Model.
        train: Training of each fit.
        common: Output.
    """
    common = common or Common()
    refuse_refit(train)
    refuse_validation_side(train)
    refuse_candidates(features)
    settings = merge_flags(config, data, model, train, features)
    source = settings.data.path if path is None else str(path)
    if source is None:
        check.fail("DATA", "nothing", "a file of pairs, as an argument or as path below [data] of the config")
    if data is not None and data.validation is not None:
        check.fail("--validation", data.validation, "nothing: the folds are what is held out")
    if out is not None and out.is_dir():
        check.fail("--out", f"{out}, which is a folder", "a file for JSON")
    names = [metric.name for metric in parse([name.strip() for name in metrics.split(",") if name.strip()])]
    estimator = TwoTower(**settings.estimator_arguments(), verbose=not common.quiet)
    pairs = read_pairs(Path(source), settings.data, loss=estimator.loss)
    if not common.quiet:
        if settings.data.validation is not None:
            unused = f"[data] validation {settings.data.validation} of the config is not used"
            note(f"{unused}: the folds are what is held out")
        note(f"{len(pairs):,} pairs of {pairs.shape[0]:,} left and {pairs.shape[1]:,} right entities, {folds} folds")
    seen, _ = tower_features(settings, pairs, common.quiet)
    found = validate(estimator, pairs, folds, names, **seen, seed=estimator.seed)
    content = {"pairs": len(pairs), "folds": folds, "seed": estimator.seed, "metrics": found.to_dict()}
    if out is not None:
        write_json(out, content)
    if common.json:
        print_json(content)
        return 0
    print_table(
        ("metric", "mean", "95% over folds", "95% over left entities", "folds"),
        [
            (
                name,
                found.mean[name],
                _span(found.interval[name]),
                _span(found.user_interval.get(name)),
                " ".join(shown(float(f"{value:.4g}")) for value in found.values(name).tolist()),
            )
            for name in names
        ],
    )
    return 0


def _span(interval: Interval | None) -> str | None:
    return None if interval is None else f"{interval[0]:.4f} to {interval[1]:.4f}"
