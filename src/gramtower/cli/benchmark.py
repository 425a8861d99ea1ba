"""``gramtower benchmark``: models side by side on the same split, with intervals, times and memory.

Finished runs are in the folder as they come, so that the same command goes on after a kill. Checked by
tests/test_cli_benchmark.py.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from gramtower._util import checks as check
from gramtower.cli.options import (
    Common,
    DataOptions,
    FeatureOptions,
    Settings,
    merge_flags,
    read_config,
    refuse_candidates,
)
from gramtower.cli.output import note, print_json, print_table
from gramtower.cli.reading import read_pairs, share_or_pairs, tower_features, validation_of
from gramtower.cli.run_folder import CONFIG, HISTORY, for_writing
from gramtower.data.interactions import Interactions
from gramtower.experiments.benchmark_build import PAGE, Benchmark, build
from gramtower.experiments.benchmark_models import BUILT_IN, TOWERS
from gramtower.experiments.benchmark_runner import benchmark as run_benchmark
from gramtower.experiments.benchmark_text import notes_of, table_of
from gramtower.experiments.comparison_store import MANIFEST as COMPARISON
from gramtower.metrics.definitions import DEFAULT
from gramtower.model.settings import ModelSettings
from gramtower.model.two_tower import TwoTower

Switch = Annotated[bool, Parameter(negative=(), show_default=False)]


def benchmark(
    path: Annotated[Path | None, Parameter(name="DATA")] = None,
    /,
    *,
    out: Annotated[Path | None, Parameter(required=True)] = None,
    test: str = "0.1",
    models: str | None = None,
    config: Annotated[list[str] | None, Parameter(negative=())] = None,
    metrics: str = ",".join(DEFAULT),
    seeds: int = 3,
    reference: str | None = None,
    fresh: Switch = False,
    data: DataOptions | None = None,
    features: FeatureOptions | None = None,
    common: Common | None = None,
    tokens: Annotated[Sequence[str], Parameter(parse=False)] = (),
) -> int:
    """Compare models: popularity, item-knn, ease, als, linear and hidden towers of gramtower, and your own configs.

    All learn from the same pairs, rank all right entities for the same left ones and leave out what these have in the
    training pairs. Of each metric there are the mean over the seeds, its 95% interval by a bootstrap over left
    entities, and the paired difference from the best model. Models that cannot run here are left out, with the reason.

    The same command goes on where a killed one stopped; other models and more seeds are added to those in the folder.
    Nothing else should run on the machine meanwhile; the page says how many cores others kept busy.

    Args:
        path: Pairs, as for fit.
        out: Folder for report.html, summary.json, benchmark.json and the finished runs.
        test: Share of the pairs to test on, drawn anew with each seed, or a file like DATA, the same for all seeds.
        models: Names separated by commas, of popularity, item-knn, ease, als, gramtower-linear,
            gramtower-linear-features and gramtower-hidden-features [default: all, the last two where there are
            features]; none for your own configs only.
        config: A model of your own: a TOML file as for fit, or NAME=FILE; may be repeated. The table [data] of the
            first says how DATA is read.
        metrics: Names separated by commas; the first decides who is the best.
        seeds: How many, from 0 on: of the splits and of the models.
        reference: The model that differences are from [default: the best].
        fresh: Start anew even if the folder holds a benchmark.
        data: Data.
        features: Features that gramtower-linear-features and gramtower-hidden-features see.
        common: Output.
        tokens: The command line itself.
    """
    common = common or Common()
    out = for_writing(out)
    for name in (HISTORY, COMPARISON):
        if (out / name).exists():
            check.fail("out", f"{out}, which holds {name}", "a folder of its own for a benchmark")
    if data is not None and data.validation is not None:
        check.fail("--validation", data.validation, "nothing: --test says what is held out")
    refuse_candidates(features)
    configs = _configs(config or [])
    settings = merge_flags(None, data, features=features)
    settings.data = _data_of(settings.data, configs)
    source = settings.data.path if path is None else str(path)
    if source is None:
        check.fail("DATA", "nothing", "a file of pairs, as an argument or as path below [data] of a config")
    names = None if models is None else _split(models)
    if names == ["none"]:
        names = []
    if names is not None and (unknown := [name for name in names if name not in BUILT_IN]):
        check.fail("models", repr(unknown[0]), f"names of {', '.join(BUILT_IN)}, or none; --config adds your own")
    towers = names is None or any(name in TOWERS for name in names)
    pairs = read_pairs(Path(source), settings.data, loss=ModelSettings.loss if towers else None)
    held_out = share_or_pairs("--test", test, settings.data)
    if not common.quiet:
        note(f"{len(pairs):,} pairs of {pairs.shape[0]:,} left and {pairs.shape[1]:,} right entities, {seeds} seeds")
    given = _features(settings, pairs, common.quiet)
    own = {name: _model(each, settings.data, pairs, common.quiet) for name, each in configs.items()}
    try:
        found = run_benchmark(
            pairs, held_out, metrics=_split(metrics), models=own, baselines=names, **given, seeds=seeds,
            reference=reference, out=out, fresh=fresh, title=Path(source).name,
            command=shlex.join(["gramtower", *tokens]), progress=None if common.quiet else note, verbose=False,
        )  # fmt: skip
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"runs that ended are in {out}, and the same command goes on after them") from None
    if common.json:
        print_json(found.to_dict())
    else:
        show(found, out)
    return 0 if ended_well(found) else 1


def report_benchmark(run: Path, common: Common) -> int:
    """``gramtower report`` of a benchmark's folder: its page and summary anew, from its finished runs."""
    found = build(run)
    if common.json:
        print_json(found.to_dict())
    else:
        show(found, run)
    return 0


def ended_well(found: Benchmark) -> bool:
    """Whether every model ran, or was left out for a reason that was said."""
    return all(facts["status"] in ("finished", "left out") for facts in found.summary["models"].values())


def show(found: Benchmark, out: Path) -> None:
    """The table, what is missing in it and why, and who won."""
    print_table(*table_of(found.summary))
    for line in notes_of(found.summary):
        print(line)
    print(found.verdict)
    print(f"report: {out / PAGE}")


def _split(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _configs(given: list[str]) -> dict[str, Settings]:
    """Settings by the name of the model: the one given, the file's, or that of the folder of a run."""
    found: dict[str, Settings] = {}
    for text in given:
        name, equals, rest = text.partition("=")
        named = bool(equals) and not Path(text).exists()
        path = Path(rest if named else text)
        if not named:
            name = path.resolve().parent.name if path.name == CONFIG else path.stem
        if name in found or name in BUILT_IN:
            check.fail("--config", text, f"NAME={path} with a name other than {name!r}, which is taken")
        found[name] = read_config(path)
    return found


def _data_of(flags: DataOptions, configs: dict[str, Settings]) -> DataOptions:
    """How DATA is read: as flags say, otherwise as the first config does; another config must not differ."""
    told = {name: value for name, value in asdict(flags).items() if value is not None}
    first = next(iter(configs.values()), Settings()).data
    base = {name: value for name, value in asdict(first).items() if value is not None} | told
    for name, settings in configs.items():
        for key, value in asdict(settings.data).items():
            if key not in ("validation", "path", *told) and value is not None and value != base.get(key):
                expected = f"{key} = {base.get(key)!r} as for the others, or a flag: all models read the same pairs"
                check.fail("--config", f"{key} = {value!r} in [data] of {name}", expected)
    return replace(DataOptions(), **base | {"validation": None})


def _features(settings: Settings, pairs: Interactions, quiet: bool) -> dict[str, Any]:
    """What towers see beside ids."""
    given, _ = tower_features(settings, pairs, quiet)
    return {name: parts for name, parts in given.items() if parts != ["id"]}


def _model(settings: Settings, data: DataOptions, pairs: Interactions, quiet: bool) -> Any:
    """A config as the model and what its fit is given."""
    arguments = _features(replace(settings, data=data), pairs, quiet)
    validation = validation_of(settings.data)
    if isinstance(validation, Interactions):
        check.fail("--config", "[data] validation, a file", "a share: pairs of a file may be among those tested")
    if validation is not None:
        arguments["validation"] = validation
    if settings.train.refit:
        arguments["refit"] = True
    if settings.train.validation_side is not None:
        arguments["validation_side"] = settings.train.validation_side
    return TwoTower(**settings.estimator_arguments()), arguments
