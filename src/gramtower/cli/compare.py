"""``gramtower compare``: several methods on the same problem, from the same start, one after the other.

What was asked for is in comparison.json before the first method runs; each method's end is added when it comes. The
same command therefore goes on after a kill: methods with an end are left alone, an interrupted one continues from its
checkpoint. Tables, figures and page are made by report/ from the folder alone. Checked by tests/test_compare.py.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from gramtower import _checks as check
from gramtower.cli import folder
from gramtower.cli.config import Settings, nearest, settle
from gramtower.cli.contest import Contest
from gramtower.cli.options import Common, DataOptions, ModelOptions, TrainOptions
from gramtower.cli.output import note, print_json, print_table
from gramtower.cli.reading import read_pairs, split_validation
from gramtower.data.interactions import Interactions
from gramtower.estimator.defaults import pick_device
from gramtower.estimator.matrices import history_features
from gramtower.estimator.two_tower import TwoTower
from gramtower.model.towers import Towers
from gramtower.optim.methods import OPTIMIZERS
from gramtower.report.build import PAGE, build
from gramtower.report.levels import LEVELS
from gramtower.report.store import MANIFEST, checkpoint_path, plain, read_manifest, write_manifest
from gramtower.training.checkpoint import fingerprint

_SECONDS = 60.0
_SHOWN = [f"{level:g}" for level in LEVELS if level in (0.5, 0.1, 0.01)]


def compare(
    path: Annotated[Path | None, Parameter(name="DATA")] = None,
    /,
    *,
    optimizers: str = "gd,newton,newton-kron",
    out: Annotated[Path | None, Parameter(required=True)] = None,
    config: Path | None = None,
    fresh: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    data: DataOptions | None = None,
    model: ModelOptions | None = None,
    train: TrainOptions | None = None,
    common: Common | None = None,
    tokens: Annotated[Sequence[str], Parameter(parse=False)] = (),
) -> int:
    """Run several methods from the same start, one after the other, and report when each was how far.

    Each stops as in fit, but only after 60 seconds of training without --time-limit, at no number of iterations without
    --max-iterations, and not for a metric that no longer improves. A tenth of the pairs is held out for the metric
    without --validation. Only the methods' own work is timed: not the metric, not checkpoints.

    A method that fails, diverges, is unknown or needs longer than the time limit for one iteration is reported, and the
    rest runs. The same command goes on where a killed one stopped, and other --optimizers are added to those there.
    Nothing else should run on the machine meanwhile; the report says how many cores others kept busy.

    Args:
        path: Pairs, as for fit.
        optimizers: Names separated by commas.
        out: Folder for report.html, time and passes .png and .svg, summary.json, comparison.json and NAME.jsonl.
        config: TOML file, as for fit.
        fresh: Start anew even if the folder holds a comparison.
        data: Data.
        model: Model.
        train: Training; --optimizer and --patience do not apply, --option is METHOD.NAME=VALUE.
        common: Output.
        tokens: The command line itself.
    """
    common = common or Common()
    settings = settle(config, data, model, train)
    if path is not None:
        settings.data.path = str(path)
    if settings.data.path is None:
        check.fail("DATA", "nothing", "a file of pairs, as an argument or as path below [data] of the config")
    if out is None or out.is_file():
        check.fail("out", out, "a folder")
    names = _names(optimizers)
    settings.data.validation = settings.data.validation or "0.1"
    arguments = settings.estimator_arguments()
    options = _method_options(arguments.pop("optimizer_options", {}))
    estimator = TwoTower(**arguments)
    everything = read_pairs(Path(settings.data.path), settings.data)
    pairs, held_out = split_validation(everything, settings.data, estimator.seed)
    contest = _contest(estimator, settings, pairs, held_out, options, out, not common.quiet)
    about = _about(contest, estimator, settings, pairs, held_out)
    about["commands"] = [shlex.join(["gramtower", *tokens])]
    outcomes = _continue(contest, about, names, fresh)
    interrupted = _run_all(contest, about, outcomes, names, common.quiet)
    content, problems = build(out)
    for problem in problems:
        note(problem)
    if common.json:
        print_json(content)
    else:
        show(content, out)
    return 1 if interrupted or any(m["status"] != "finished" for m in content["methods"].values()) else 0


def show(content: dict[str, Any], out: Path) -> None:
    """The summary for people."""
    metric = content["metric"]
    columns = ["method", "lowest", "(L-L*)/L*", *([metric] if metric else []), "iter", "seconds", "passes"]
    columns += [f"s to {level}" for level in _SHOWN]
    rows = []
    for name, found in content["methods"].items():
        metrics = [_rounded(found.get("best_metric"))] if metric else []
        ends = [found.get("iterations"), *(_rounded(found.get(key)) for key in ("seconds", "data_passes"))]
        times = [_rounded(found.get("seconds_to", {}).get(level)) for level in _SHOWN]
        rows.append((name, found.get("lowest"), _rounded(found.get("relative_difference")), *metrics, *ends, *times))
    title = f"SYNTHETIC DATA: {content['synthetic']}" if content.get("synthetic") else None
    print_table(columns, rows, title)
    for name, found in content["methods"].items():
        if found["status"] != "finished":
            print(f"{name} {found['status']}: {found['message']}")
    print(f"report: {out / PAGE}")


def _contest(
    estimator: TwoTower,
    settings: Settings,
    pairs: Interactions,
    held_out: Interactions | None,
    options: dict[str, dict[str, Any]],
    out: Path,
    verbose: bool,
) -> Contest:
    device = pick_device(estimator.device)
    features = history_features(pairs.matrix) if settings.model.history else None
    problem = estimator.make_problem(pairs, features)

    def start() -> Towers:
        towers = estimator.make_towers(problem)
        return Towers(towers.left.to(device), towers.right.to(device))

    limit = _SECONDS if estimator.time_limit is None else check.number("time_limit", estimator.time_limit, above=0.0)
    iterations = settings.train.max_iterations
    if iterations is not None:
        check.count("max_iterations", iterations)
    ids = (pairs.left_ids, pairs.right_ids)
    validation = estimator.make_validation(held_out, ids, pairs.matrix)
    seed = check.count("seed", estimator.seed, minimum=0)
    start()  # refuses what cannot be a tower before anything is written
    return Contest(problem, start, validation, limit, iterations, seed, out, options, verbose)


def _about(
    contest: Contest, estimator: TwoTower, settings: Settings, pairs: Interactions, held_out: Interactions | None
) -> dict[str, Any]:
    """What comparison.json says of everything but the methods."""
    problem = contest.problem
    marks = fingerprint(problem, contest.start(), "", {}, contest.seed)
    source = Path(str(settings.data.path))
    return {
        "title": source.stem if source.is_file() else source.resolve().name,
        "synthetic": None,
        "metric": estimator.metric,
        "data": {
            "path": str(source),
            "left": pairs.shape[0],
            "right": pairs.shape[1],
            "pairs": len(pairs),
            "validation": settings.data.validation,
            "validation_pairs": None if held_out is None else len(held_out),
            "fingerprint": marks["pairs"],
        },
        "settings": {
            "problem": {
                "loss": problem.loss.name,
                "omega": problem.omega,
                "l2": problem.l2,
                "imputed": estimator.imputed,
                "embedding_l2": problem.embedding_l2,
                "frequency_power": problem.frequency_power,
            },
            "towers": {
                "hidden": list(estimator.hidden),
                "dim": estimator.dim,
                "activation": estimator.activation,
                "history": bool(settings.model.history),
                "seed": contest.seed,
                "device": estimator.device,
            },
            "limits": {"time_limit": contest.time_limit, "max_iterations": contest.max_iterations},
        },
        "environment": folder.environment(),
    }


def _continue(contest: Contest, about: dict[str, Any], names: list[str], fresh: bool) -> dict[str, dict[str, Any]]:
    """The ends of methods that the folder already holds; refuses a folder of another comparison."""
    out = contest.folder
    out.mkdir(parents=True, exist_ok=True)
    before = None if fresh else read_manifest(out)
    if before is None:
        for name in OPTIMIZERS:
            contest.forget(name)
        return {}
    outcomes: dict[str, dict[str, Any]] = before["methods"]
    now = plain(about)
    differing = [key for key in ("data", "settings", "metric", "synthetic") if before.get(key) != now[key]]
    differing += [n for n in names if n in outcomes and outcomes[n].get("options", {}) != contest.options.get(n, {})]
    if differing:
        given = f"{out}, whose {MANIFEST} differs in {', '.join(differing)}"
        check.fail("out", given, "a folder of its own for another comparison, or --fresh to replace it")
    about["environment"] = before["environment"]
    about["commands"] = list(dict.fromkeys([*before["commands"], *about["commands"]]))
    return {name: outcome for name, outcome in outcomes.items() if outcome["status"] != "unfinished"}


def _run_all(
    contest: Contest, about: dict[str, Any], outcomes: dict[str, dict[str, Any]], names: list[str], quiet: bool
) -> bool:
    """Run what has no end yet; returns whether that was interrupted."""
    order = list(dict.fromkeys([*outcomes, *names]))
    for name in names:
        if name not in OPTIMIZERS:
            message = f"got {name!r}, expected {nearest(name, OPTIMIZERS)!r}, or another of {', '.join(OPTIMIZERS)}"
            outcomes[name] = {"status": "unknown", "message": message}
            note(f"{name}: no such method; {message}")
    waiting = [name for name in names if name not in outcomes]

    def save() -> None:
        open_ends = {"status": "unfinished", "message": "not started yet"}
        methods = {name: outcomes.get(name, open_ends | {"options": contest.options.get(name, {})}) for name in order}
        write_manifest(contest.folder, about | {"methods": methods})

    save()
    if waiting:
        contest.prepare()
    for name in waiting:
        if not quiet:
            going_on = checkpoint_path(contest.folder, name).exists()
            note(f"-- {name}" + (" goes on from its checkpoint" if going_on else ""))
        outcomes[name] = contest.run(name)
        save()
        if outcomes[name]["status"] == "unfinished":
            return True
        checkpoint_path(contest.folder, name).unlink(missing_ok=True)
    return False


def _method_options(given: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Constants by method, from METHOD.NAME=VALUE."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in given.items():
        method, dot, name = key.partition(".")
        if not dot or method not in OPTIMIZERS:
            check.fail("option", repr(key), "METHOD.NAME=VALUE with a METHOD of " + ", ".join(OPTIMIZERS))
        found.setdefault(method, {})[name] = value
    return found


def _names(text: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not any(name in OPTIMIZERS for name in names):
        near = f"{nearest(names[0], OPTIMIZERS)!r}, or another of " if names else "names separated by commas, of "
        check.fail("optimizers", repr(names[0] if names else text), near + ", ".join(OPTIMIZERS))
    return names


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
