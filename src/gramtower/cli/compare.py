"""``gramtower compare``: several methods on the same problem, from the same start, one after the other.

What was asked for is in comparison.json before the first method runs; each method's end is added when it comes. The
same command therefore goes on after a kill: methods with an end are left alone, an interrupted one continues from its
checkpoint. Tables, figures and page are made by report/ from the folder alone.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from gramtower._util import checks as check
from gramtower._util.files import plain
from gramtower.cli.options import (
    Common,
    DataOptions,
    FeatureOptions,
    ModelOptions,
    TrainOptions,
    nearest,
    refuse_candidates,
    refuse_refit,
    refuse_validation_side,
)
from gramtower.cli.output import note, print_json, print_table
from gramtower.cli.run_folder import HISTORY, for_writing, held
from gramtower.cli.setup import make_setup
from gramtower.experiments.comparison_build import PAGE, build
from gramtower.experiments.comparison_runner import Runner
from gramtower.experiments.comparison_store import MANIFEST, RAN, checkpoint_path, read_manifest, write_manifest
from gramtower.experiments.machine import environment
from gramtower.optim.solvers import SOLVERS
from gramtower.training.checkpoint import remove_checkpoint

_SHOWN = ("0.5", "0.1", "0.01")
Switch = Annotated[bool, Parameter(negative=(), show_default=False)]


def compare(
    path: Annotated[Path | None, Parameter(name="DATA")] = None,
    /,
    *,
    optimizers: str | None = None,
    out: Annotated[Path | None, Parameter(required=True)] = None,
    config: Path | None = None,
    synthetic: Switch = False,
    fresh: Switch = False,
    data: DataOptions | None = None,
    features: FeatureOptions | None = None,
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
        optimizers: Names separated by commas [default: those of the experiment, or gd,newton,newton-kron].
        out: Folder for report.html, time and passes .png and .svg, summary.json, comparison.json and NAME.jsonl.
        config: TOML file: an experiment such as experiments/ml1m.toml, or a config as for fit.
        synthetic: Instead of DATA, generated pairs of the shape that the experiment states; all output says so.
        fresh: Start anew even if the folder holds a comparison.
        data: Data.
        features: Features.
        model: Model.
        train: Training; --optimizer and --patience do not apply, --option is METHOD.NAME=VALUE.
        common: Output.
        tokens: The command line itself.
    """
    common = common or Common()
    refuse_refit(train)
    refuse_validation_side(train)
    refuse_candidates(features)
    out = for_writing(out)
    asked = None if optimizers is None else _names(optimizers)
    setup = make_setup(path, config, synthetic, (data, model, train, features))
    names = list(setup.methods) if asked is None else asked
    runner, about = setup.runner(out, not common.quiet)
    about |= {"commands": [shlex.join(["gramtower", *tokens])], "environment": environment()}
    if (out / HISTORY).exists() and not (out / MANIFEST).exists():
        check.fail("out", f"{out}, which holds a fit", "a folder of its own for a comparison")
    with held(out):
        outcomes = _ends_before(runner, about, names, fresh)
        kept = f"what was learned so far is in {out}, and the same command goes on"
        try:
            interrupted = _run_all(runner, about, outcomes, names)
            content, problems = build(out)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(kept) from None
    for problem in problems:
        note(problem)
    if common.json:
        print_json(content)
    else:
        show(content, out)
    if interrupted:
        raise KeyboardInterrupt(kept)
    return 0 if all(found["status"] in RAN for found in content["methods"].values()) else 1


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
    print(content["verdict"])
    print(f"report: {out / PAGE}")


def _ends_before(runner: Runner, about: dict[str, Any], names: list[str], fresh: bool) -> dict[str, dict[str, Any]]:
    """The ends of methods that the folder already holds; refuses a folder of another comparison."""
    before = None if fresh else read_manifest(runner.folder)
    if before is None:
        runner.forget(SOLVERS)
        return {}
    outcomes: dict[str, dict[str, Any]] = before["methods"]
    now = plain(about)
    differing = [key for key in ("data", "settings", "metric", "synthetic") if before.get(key) != now[key]]
    differing += [n for n in names if n in outcomes and outcomes[n].get("options", {}) != runner.options.get(n, {})]
    if differing:
        given = f"{runner.folder}, whose {MANIFEST} differs in {', '.join(differing)}"
        check.fail("out", given, "a folder of its own for another comparison, or --fresh to replace it")
    about["environment"] = before["environment"]
    about["commands"] = list(dict.fromkeys([*before["commands"], *about["commands"]]))
    return outcomes


def _run_all(runner: Runner, about: dict[str, Any], outcomes: dict[str, dict[str, Any]], names: list[str]) -> bool:
    """Run what has no end yet, keeping comparison.json up to date; whether one was interrupted, which ends it."""
    for name in names:
        if name not in SOLVERS:
            message = f"got {name!r}, expected {nearest(name, SOLVERS)!r}, or another of {', '.join(SOLVERS)}"
            outcomes[name] = {"status": "unknown", "message": message}
            note(f"{name}: no such method; {message}")
        elif name not in outcomes:
            waits = {"status": "unfinished", "message": "not started yet", "options": runner.options.get(name, {})}
            outcomes[name] = waits
    write_manifest(runner.folder, about | {"methods": outcomes})
    waiting = [name for name in names if outcomes[name]["status"] == "unfinished"]
    for name in set(names) - set(waiting):  # a kill may have come between its end and this
        remove_checkpoint(checkpoint_path(runner.folder, name))
    if waiting:
        runner.prepare()
    for name in waiting:
        outcomes[name] = runner.run(name)
        write_manifest(runner.folder, about | {"methods": outcomes})
        if outcomes[name]["status"] == "unfinished":
            return True
        remove_checkpoint(checkpoint_path(runner.folder, name))
    return False


def _names(text: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not any(name in SOLVERS for name in names):
        near = f"{nearest(names[0], SOLVERS)!r}, or another of " if names else "names separated by commas, of "
        check.fail("optimizers", repr(names[0] if names else text), near + ", ".join(SOLVERS))
    return names


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
