"""``gramtower fit``, ``update`` and ``calibrate``: from files of pairs to a folder with a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from gramtower._util import checks as check
from gramtower._util.checks import config_hidden
from gramtower._util.files import config_text, replacing, write_json, write_text
from gramtower.cli import reading
from gramtower.cli.formats import DataOptions, ReadOptions
from gramtower.cli.options import (
    Common,
    FeatureOptions,
    FitFeatures,
    FitTraining,
    ModelOptions,
    Settings,
    Switch,
    parse_option,
    read_config,
)
from gramtower.cli.output import Table, note, silent
from gramtower.data.interactions import Interactions
from gramtower.data.matrices import rows_left_out
from gramtower.distributed.group import Group
from gramtower.distributed.partition import Shard
from gramtower.distributed.rendezvous import joined
from gramtower.experiments.figures import reliability_figure, save
from gramtower.experiments.run_store import environment
from gramtower.model.defaults import pick_device
from gramtower.model.fit_data import hold_out, known_pairs
from gramtower.model.fit_parts import grown_pairs
from gramtower.model.fitting import ITERATIONS, refit_checkpoint, selection_file
from gramtower.model.settings import SETTINGS
from gramtower.model.two_tower import TwoTower
from gramtower.model.unseen import unseen_pairs
from gramtower.training.checkpoint import locked, remove_checkpoint
from gramtower.training.result import Reason, Record, write_history


def fit(
    path: Annotated[Path | None, Parameter(name="DATA")] = None,
    /,
    *,
    out: Path,
    config: Path | None = None,
    fresh: Switch = False,
    data: DataOptions | None = None,
    features: FitFeatures | None = None,
    model: ModelOptions | None = None,
    train: FitTraining | None = None,
    common: Common = Common(),
) -> int:
    """Learn a model from observed pairs.

    A run ends at the first of these:

    - --max-iterations iterations, or --time-limit seconds of training (reading, validation and checkpoints are not
      counted; the iteration that passes the limit is finished);
    - the gradient norm falls to 1e-6 of its first value (methods with exact gradients);
    - no step lowers the objective measurably in float32, near a relative decrease of 1e-7;
    - with --validation, --patience iterations without a better --metric; the best point is saved, or with --refit the
      model is trained again on all pairs for as many iterations;
    - Ctrl-C, SIGTERM, or a value that is not finite.

    An interrupted fit continues when the same command is run again. So does a fit that reached --max-iterations or
    --time-limit, when that limit is raised.

    Started by torchrun, the processes train one model together. Of a folder of .parquet parts in which no left id is in
    two parts, such as gramtower partition makes, each of them reads only its own share.

    Args:
        path: Pairs: .csv, .tsv, .parquet (also .gz, .xz, .zst), a folder of .parquet parts such as Spark, DuckDB and
            polars write (also key=value folders; read in a stream), a MovieLens or Netflix folder or zip, lists, edges.
            This and all other paths can be URLs such as s3://bucket/key.
        out: Folder of the run: model.gramtower, config.toml, history.jsonl and summary.json.
        config: TOML file with tables [data], [features], [model], [train]; keys are names of flags. Flags win.
        fresh: Start again even if the folder holds an unfinished run.
    """
    settings = read_config(config).with_flags(data, model, train, features)
    source = settings.source(path)
    reading.for_writing(out, "fit")
    with joined(pick_device(settings.train.device or "auto").type == "cuda") as group:
        return _fit(group, settings, source, out, fresh, common)


def _fit(group: Group, settings: Settings, source: Path, out: Path, fresh: bool, common: Common) -> int:
    """Fit in this process, which may be one of several: the first one writes and prints."""
    say = common.note if group.rank == 0 else silent
    estimator = TwoTower(**settings.estimator_arguments(), verbose=not common.quiet)
    side = settings.train.validation_side
    observed: Interactions | Shard
    held_out: float | Interactions | None = None
    left_out: dict[str, int] = {}
    share = reading.read_share(source, settings.data, say is not silent, estimator.loss, group)
    if share is not None:
        with group.together():
            observed, held_out = share, reading.validation_of(settings.data)
        left_out, validation_pairs = {"rows_left_out": rows_left_out(share.report)}, None
        if isinstance(held_out, float):
            train, _ = hold_out(share, held_out, check.seed(estimator.seed))
            observed, validation_pairs = train, train.held_out_pairs
        elif isinstance(held_out, Interactions):
            local = known_pairs((share.left_ids, share.right_ids), held_out)
            validation_pairs = int(group.totals(float(local))[0])
            left_out["validation_pairs_left_out"] = len(held_out) - validation_pairs
    else:
        with group.together():
            pairs = reading.read_pairs(source, settings.data, say is not silent, loss=estimator.loss)
            if side is None:
                observed, held_out = reading.held_out_of(pairs, settings.data, estimator.seed)
            else:
                observed, held_out = pairs, reading.validation_of(settings.data)
        left_out, validation_pairs = {"rows_left_out": rows_left_out(pairs.report)}, None
        if side is not None and isinstance(held_out, float):
            validation_pairs = unseen_pairs(pairs, held_out, side, estimator.seed)
        elif isinstance(held_out, Interactions):
            validation_pairs = known_pairs((pairs.left_ids, pairs.right_ids), held_out)
            left_out["validation_pairs_left_out"] = len(held_out) - validation_pairs
        if group.size > 1:
            say(f"each of {group.size} processes reads all of {source}; gramtower partition makes a folder to share")
    say(reading.sizes_line(observed))
    if observed.one_set:
        say("both sides are one set of entities: none is recommended to itself (--no-same-entities: they are two)")
    with group.together():
        estimator.imputed = reading.read_imputed(estimator.imputed, observed)
    seen, matched = reading.tower_features(settings, observed, say, group)
    say(reading.seen_line(seen, observed.entity_names))

    checkpoint = out / reading.CHECKPOINT
    with reading.held(out, group):
        if fresh:
            with locked(checkpoint, group), group.together():
                if group.rank == 0:
                    _forget(checkpoint)
        resumed = bool(group.from_first(checkpoint.exists()))
        if resumed:
            say(f"continuing from {checkpoint}")
        try:
            estimator.fit(
                observed if share is None else share, **seen, validation=held_out, refit=bool(settings.train.refit),
                checkpoint=checkpoint, history=out / reading.HISTORY,
                candidates=settings.features.candidates or "trained", validation_side=side,
            )  # fmt: skip
        except KeyboardInterrupt:
            kept = f"{checkpoint} is complete; run the same command to continue from it" if checkpoint.exists() else ""
            raise KeyboardInterrupt(kept or "nothing was learned yet; run the same command to start again") from None
        estimator.save(out / reading.MODEL)
        if group.rank > 0:
            return 0
        facts = summary(estimator, observed, validation_pairs)
        facts |= left_out | ({"features": matched} if matched else {})
        facts |= {"resumed": resumed, "model": str(out / reading.MODEL)}
        _describe(out, estimator, settings, facts)
        if estimator.reason_ not in (Reason.MAX_ITERATIONS, Reason.TIME_LIMIT, Reason.INTERRUPTED):
            _forget(checkpoint)  # until then a kill leaves something to go on from
    return _report(facts, common)


def _forget(checkpoint: Path) -> None:
    remove_checkpoint(refit_checkpoint(checkpoint))
    remove_checkpoint(checkpoint)
    selection_file(checkpoint).unlink(missing_ok=True)


def _describe(out: Path, model: TwoTower, settings: Settings, facts: dict[str, Any]) -> None:
    """Write what a run used and how it ended."""
    config = config_text(used(settings, model), "what this run used; gramtower fit --config reads it")
    write_text(out / reading.CONFIG, config)
    write_json(out / reading.SUMMARY, facts | {"environment": environment()})


def used(settings: Settings, estimator: TwoTower) -> dict[str, dict[str, Any]]:
    """The tables of the config file with every value that was in force, defaults included."""
    tables: dict[str, dict[str, Any]] = {"model": asdict(settings.model), "train": asdict(settings.train)}
    chosen, params = {} if estimator.path_ is None else estimator.path_.chosen, estimator.with_changes()
    for name, setting in SETTINGS.items():
        if setting.table is not None:
            value = chosen.get(name, getattr(params, name))
            value = getattr(estimator, f"{name}_") if setting.fitted else value
            value = settings.model.imputed if name == "imputed" and estimator.factors is not None else value  # the file
            tables[setting.table][setting.flag or name] = _AS_TEXT[name](value) if name in _AS_TEXT else value
    return {"data": asdict(settings.data), "features": features_table(settings.features), **tables}


def features_table(options: FitFeatures) -> dict[str, Any]:
    """The table [features] of the config file."""
    table = asdict(options) | {name: getattr(options, name) or None for name in ("left_identity", "right_identity")}
    for name in ("left_column", "right_column", "left_encoder", "right_encoder"):
        table[name] = None if table[name] is None else dict(map(parse_option, table[name]))
    return table


def summary(estimator: TwoTower, observed: Interactions | Shard, held_out: int | None) -> dict[str, Any]:
    """The end of a run in numbers, at the point that was kept."""
    history, best = estimator.history_, estimator.best_metric_
    kept = next((r for r in history if best is not None and r.metric == best), history[-1])  # the first of equals
    return {
        "optimizer": estimator.optimizer,
        "objective": kept.value,
        "metric": None if held_out is None else estimator.metric,
        "metric_value": best,
        "iteration": kept.iteration,
        "iterations": history[-1].iteration,
        "seconds": history[-1].seconds,
        "data_passes": history[-1].data_passes,
        "reason": estimator.reason_.name,
        "stopped": estimator.message_,
        "omega": estimator.omega_,
        "left": observed.shape[0],
        "right": observed.shape[1],
        "pairs": len(observed),
        "validation_pairs": held_out,
        **traffic_facts(history[-1]),
    }


def traffic_facts(last: Record) -> dict[str, object]:
    """Processes and bytes sent between them, as counted by the first one; empty for one process."""
    if last.processes == 1:
        return {}
    return {"processes": last.processes, "bytes": last.bytes, "bytes_per_product": last.product_bytes}


def _report(facts: dict[str, Any], common: Common) -> int:
    interrupted, failed = (facts["reason"] == r.name for r in (Reason.INTERRUPTED, Reason.NON_FINITE))
    metric = {} if facts["metric"] is None else {facts["metric"]: facts["metric_value"]}
    shown = {"objective": facts["objective"], **metric, "iterations": facts["iterations"]}
    shown |= {"training time": f"{facts['seconds']:.2f} s", "stopped": facts["stopped"], "model": facts["model"]}
    common.answer(facts, shown)
    if interrupted:
        raise KeyboardInterrupt(f"iteration {facts['iterations']} was kept; run the same command to continue from it")
    if failed:
        note(f"error: {facts['stopped']}")
    return int(failed)


def update(
    run: Annotated[Path, Parameter(name="RUN")],
    path: Annotated[Path, Parameter(name="MORE")],
    /,
    *,
    iterations: int = ITERATIONS,
    out: Path | None = None,
    data: ReadOptions | None = None,
    features: FeatureOptions | None = None,
    common: Common = Common(),
) -> int:
    """Add pairs to a fitted model and continue training for a few iterations.

    Old pairs, entities and seen lists stay; new entities are added. MORE is read with the columns and the threshold of
    the run, unless flags say otherwise. A model keeps its pairs without labels and weights: all old pairs have the
    label 1 and no weight, and a model fitted with other labels or with weights is refused.

    Feature tables are read again, from the paths of the run or from those given here, and must have the rows of all
    entities, old and new. So does the file of --imputed. A model that was fitted with --store-features has the rows of
    its entities: the tables given here then need only those of new and changed ones.

    Args:
        run: Folder of a fit, or a model file.
        path: Pairs to add, as for fit.
        iterations: Number of iterations.
        out: Folder for the new model; without it, the model in RUN is replaced atomically.
    """
    reading.model_file(run)  # which says if there is none
    out = out or (run if run.is_dir() else None)
    if out is None:
        check.fail("out", out, "a folder, as RUN is a file")
    with reading.held(reading.for_writing(out)):  # before the model is read: of two updates neither loses pairs
        model, settings = reading.open_model(run)
        paths, settings = settings.features, settings.with_flags(data, features)
        stored = [side.name for side in model.fitted_.sides if side.inputs.stores_rows]
        given = {side: None if features is None else getattr(features, f"{side}_features") for side in stored}
        for side, inputs in (("left", model.left_.inputs), ("right", model.right_.inputs)):
            ids = any(part.kind == "id" for part in inputs.parts)  # also of a run whose config does not have the key
            setattr(settings.features, f"{side}_identity", ids or None)
        more = reading.read_pairs(path, settings.data, name="MORE", loss=model.loss)
        pairs = grown_pairs(model.fitted_, more)
        m, n, observed = len(model.left_), len(model.right_), model.fitted_.observed().nnz
        left, right = (side.called for side in model.fitted_.sides)
        new = f"{pairs.shape[0] - m:,} new {left} and {pairs.shape[1] - n:,} new {right} entities"
        common.note(f"{len(more):,} pairs for {observed:,} known ones; {new}")
        if model.factors is not None and settings.model.imputed is not None:
            model.imputed = reading.read_imputed(settings.model.imputed, pairs)
        others = replace(settings.features, **dict.fromkeys(f"{side}_features" for side in stored))
        seen, matched = reading.tower_features(replace(settings, features=others), pairs, common.note)
        for side, table in given.items():
            seen[f"{side}_features"] = None if table is None else reading.rows_to_add(model, table, settings, side)
            setattr(settings.features, f"{side}_features", getattr(paths, f"{side}_features"))
        model.set_params(verbose=not common.quiet).update(more, **seen, iterations=iterations)
        if model.reason_ is Reason.INTERRUPTED:
            raise KeyboardInterrupt
        model.save(out / reading.MODEL)
        write_history(out / reading.HISTORY, model.history_)
        facts = summary(model, pairs, None)
        facts |= {"new_left": len(model.left_) - m, "new_right": len(model.right_) - n}
        facts |= {"added_pairs": len(pairs) - observed, "model": str(out / reading.MODEL)}
        facts |= {"features": matched} if matched else {}
        _describe(out, model, settings, facts)
    named = ("objective", "iterations", "added_pairs", "new_left", "new_right", "pairs", "model")
    return common.answer(facts, {name.replace("_", " "): facts[name] for name in named})


def calibrate(
    run: Annotated[Path, Parameter(name="RUN")],
    /,
    *,
    validation: Path | None = None,
    method: str = "auto",
    population: str = "all",
    seed: int = 0,
    test: Path | None = None,
    bins: int = 10,
    plot: Path | None = None,
    data: ReadOptions | None = None,
    common: Common = Common(),
) -> int:
    """Fit probabilities of scores to held-out pairs, for recommend --scores probability.

    A probability is that of a pair which the model has not seen to be among the held-out pairs. The model in RUN is
    replaced atomically by the same with its calibration.

    Args:
        run: Folder of a fit, or a model file.
        validation: Held-out pairs, a file like the one the run read [default: the validation pairs of the fit].
        method: platt (logistic), isotonic (any increasing function), which needs more pairs, or auto.
        population: Left entities whose pairs are counted: all, or those with held-out pairs.
        seed: Of a sample of left entities, which stands for all where there are more than a hundred million pairs.
        test: Other held-out pairs, to compare probabilities with [default: --validation].
        bins: Number of bins of this comparison.
        plot: File for a figure of it: .svg or .png.
    """
    kind = "" if plot is None else check.choice("--plot", plot.suffix.lower(), (".svg", ".png"))
    path = reading.model_file(run)
    with reading.held(reading.for_writing(path.parent)):
        model, settings = reading.open_model(run)
        pairs, others = (
            None if file is None else reading.read_like(settings, file, name, data)
            for file, name in ((validation, "--validation"), (test, "--test"))
        )
        model.calibrate(pairs, method, population=population, seed=seed)
        others = pairs if others is None else others
        found = model.reliability(others, bins)
        if plot is not None:
            figure = reliability_figure(found.probability, found.positives, found.pairs)
            with replacing(plot) as partial:
                save(figure, partial, kind[1:])
        model.save(path)
    facts = {"calibration": str(model.calibration_), "held_out": int(found.positives.sum())}
    facts |= {"expected": found.expected, "model": str(path)}
    columns, rows = ("probability", "observed", "pairs", "held_out"), found.rows()
    reliability = [dict(zip(columns, row, strict=True)) for row in rows]
    return common.answer(facts | {"reliability": reliability}, facts, Table(columns, rows))


#: From the value of a setting to that of its key in a config file, where that is not the value itself.
_AS_TEXT: dict[str, Callable[[Any], Any]] = {
    "hidden": config_hidden,
    "select": lambda value: value if isinstance(value, str) else "auto" if value else "off",
}
