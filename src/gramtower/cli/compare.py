"""``gramtower compare``: several methods on the same problem, from the same start, one after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from gramtower import _checks as check
from gramtower.cli import folder
from gramtower.cli.config import nearest, settle, write_config
from gramtower.cli.fit import summary, used
from gramtower.cli.options import Common, DataOptions, ModelOptions, TrainOptions
from gramtower.cli.output import note, print_json, print_table
from gramtower.cli.reading import read_pairs, split_validation
from gramtower.data.synthetic import planted_pairs
from gramtower.estimator.two_tower import TwoTower
from gramtower.optim.methods import OPTIMIZERS
from gramtower.training.result import Reason, Record

#: Shares of the way from the common start to the lowest objective that any method reached.
LEVELS = (0.5, 0.9, 0.99)


def compare(
    path: Annotated[Path | None, Parameter(name="DATA")] = None,
    /,
    *,
    optimizers: str = "gd,newton,newton-kron",
    out: Annotated[Path | None, Parameter(required=True)] = None,
    config: Path | None = None,
    data: DataOptions | None = None,
    model: ModelOptions | None = None,
    train: TrainOptions | None = None,
    common: Common | None = None,
) -> int:
    """Run several methods from the same start, one after the other, and time them.

    Each stops as in fit; without --time-limit after 60 seconds of training, and without --max-iterations nowhere else
    first. A method that fails is reported and the rest runs. The table gives the seconds until a method has gone
    50 %, 90 % and 99 % of the way from the start to the lowest objective that any of them reached.

    Args:
        path: Pairs, as for fit.
        optimizers: Names separated by commas.
        out: Folder for NAME.jsonl (history), config.toml and summary.json.
        config: TOML file, as for fit.
        data: Data.
        model: Model.
        train: Training; --optimizer and --option do not apply.
        common: Output.
    """
    common = common or Common()
    settings = settle(config, data, model, train)
    source = path or (Path(settings.data.path) if settings.data.path is not None else None)
    if source is None:
        check.fail("DATA", "nothing", "a file of pairs, as an argument or as path below [data] of the config")
    if out is None or out.is_file():
        check.fail("out", out, "a folder")
    names = _names(optimizers)
    settings.data.path, settings.train.option, settings.train.optimizer = str(source), None, None
    arguments = {"max_iterations": 10**9, "time_limit": 60.0} | settings.estimator_arguments()
    pairs, held_out = split_validation(read_pairs(source, settings.data), settings.data, arguments.get("seed", 0))
    out.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, Any]] = {}
    histories: dict[str, list[Record]] = {}
    errors: list[Exception] = []
    for name in names:
        if not common.quiet:
            note(f"-- {name}")
        estimator = TwoTower(**{**arguments, "optimizer": name}, verbose=not common.quiet)
        try:
            _warm_up({**arguments, "optimizer": name})
            features = "history" if settings.model.history else None
            estimator.fit(pairs, features, validation=held_out, history=out / f"{name}.jsonl")
        except (ValueError, RuntimeError, ArithmeticError, MemoryError) as error:
            errors.append(error)
            results[name] = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())}"}
            continue
        held = None if held_out is None else len(held_out)
        results[name], histories[name] = summary(estimator, pairs, held), estimator.history_
        if folder.stopped_by(estimator.reason_, Reason.NON_FINITE):
            results[name]["failed"] = estimator.reason_
        write_config(out / folder.CONFIG, used(settings, estimator), f"what {', '.join(names)} used")
        if folder.stopped_by(estimator.reason_, Reason.INTERRUPTED):
            results[name]["failed"] = "interrupted"
            break
    if len(errors) == len(names) and all(isinstance(error, ValueError) for error in errors):
        raise errors[0]  # bad input, the same for all
    levels = add_levels(results, histories)
    content = {"levels": levels, "methods": results}
    folder.write_json(out / folder.SUMMARY, content | {"environment": folder.environment()})
    if common.json:
        print_json(content)
    else:
        _print(results, levels, str(out))
    return 1 if any("failed" in result for result in results.values()) or len(results) < len(names) else 0


def add_levels(results: dict[str, dict[str, Any]], histories: dict[str, list[Record]]) -> dict[str, float]:
    """Objective levels common to all methods; each result gets the seconds and data passes until it was there."""
    if not histories:
        return {}
    start = max(history[0].value for history in histories.values())
    lowest = min(record.value for history in histories.values() for record in history)
    levels = {f"{share:.0%}": start - share * (start - lowest) for share in LEVELS}
    for name, history in histories.items():
        reached = {key: next((r for r in history if r.value <= level), None) for key, level in levels.items()}
        results[name]["lowest"] = min(record.value for record in history)
        results[name]["seconds_to"] = {key: None if r is None else r.seconds for key, r in reached.items()}
        results[name]["passes_to"] = {key: None if r is None else r.data_passes for key, r in reached.items()}
    return levels


def _warm_up(arguments: dict[str, Any]) -> None:
    """One iteration on a tiny problem, so that no method is charged for compiling and loading."""
    tiny = planted_pairs(m=48, n=32, observed=200)
    TwoTower(**{**arguments, "max_iterations": 1, "time_limit": None}).fit(tiny)


def _names(text: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        check.fail("optimizers", repr(text), "names separated by commas, of " + ", ".join(OPTIMIZERS))
    for name in names:
        if name not in OPTIMIZERS:
            check.fail(
                "optimizers", repr(name), f"{nearest(name, OPTIMIZERS)!r}, or another of " + ", ".join(OPTIMIZERS)
            )
    return names


def _print(results: dict[str, dict[str, Any]], levels: dict[str, float], out: str) -> None:
    measured = any(result.get("metric_value") is not None for result in results.values())
    columns = ["method", "objective", *(["metric"] if measured else []), "iter", "seconds"]
    columns += [f"s to {key}" for key in levels]
    rows = []
    for name, result in results.items():
        metric = [result.get("metric_value")] if measured else []
        times = [result.get("seconds"), *(result.get("seconds_to", {}).get(key) for key in levels)]
        rounded = [None if time is None else round(time, 3) for time in times]
        rows.append((name, result.get("lowest"), *metric, result.get("iterations"), *rounded))
    print_table(columns, rows)
    for name, result in results.items():
        if "failed" in result:
            print(f"{name} failed: {result['failed']}")
    print(f"histories and summary.json are in {out}")
