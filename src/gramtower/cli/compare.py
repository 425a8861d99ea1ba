"""``gramtower compare``: several optimizers on the same problem, from the same start, one after the other.

The same command continues after a kill: optimizers that have ended are skipped, an interrupted one is resumed.

An experiment is a TOML file with everything that decides a comparison, so that others can rerun it:

    [data]       how pairs are read: format, threshold, left, right, ..., validation; and shape = [m, n, pairs]
    [problem]    loss, omega, l2, imputed, embedding-l2, ...
    [towers]     hidden, dim, activation
    [optimizers.NAME]   the options of one optimizer; a table for each optimizer to run, in this order
    [run]        time-limit, max-iterations, seed, metric, ...

Keys are the names of the flags of ``gramtower fit`` and of the options of :func:`gramtower.minimize`; an unknown key is
an error that names the nearest one. Without the data, pairs of the same shape are generated. The files of the paper's
four data sets are in ``experiments/``.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from cyclopts import Parameter

from gramtower._util import checks as check
from gramtower._util.checks import config_hidden
from gramtower._util.files import plain
from gramtower.cli.formats import DataOptions, names_in
from gramtower.cli.options import (
    Common,
    FeatureOptions,
    FitTraining,
    ModelOptions,
    Settings,
    Switch,
    TrainOptions,
    nearest,
    number_or_text,
    read_config,
    read_tables,
)
from gramtower.cli.output import Table, note
from gramtower.cli.reading import for_writing, held, held_out_of, read_imputed, read_pairs, tower_features
from gramtower.data.datasets import planted_pairs
from gramtower.data.interactions import Interactions
from gramtower.data.sources import read_toml, reading
from gramtower.experiments.comparison import RAN, Outcome, Request, Runner, checkpoint_path, read_outcomes
from gramtower.experiments.comparison_page import build
from gramtower.experiments.figures import PAGE
from gramtower.experiments.run_store import RunStore, environment
from gramtower.model.fit_data import FitData, prepare_data
from gramtower.model.fit_parts import (
    imputed_label,
    left_weights,
    make_problem,
    make_towers,
    make_validation,
    right_weights,
)
from gramtower.model.settings import ModelSettings
from gramtower.optim.solvers import SOLVERS, as_solver
from gramtower.training.checkpoint import fingerprint, remove_checkpoint

_TABLES = ("problem", "towers", "optimizers", "run")  # tables that a config of fit does not have
_TOWERS = ("hidden", "dim", "activation")
_METHODS = ("gd", "newton", "newton-kron")  # without an experiment
_SECONDS, _HELD_OUT = 60.0, "0.1"
_BY_METHOD = ("optimizer", "option", "patience")  # of fit, where one method runs


@dataclass(frozen=True)
class Experiment:
    """A comparison as described by a file: an experiment, or a config as for fit."""

    settings: Settings  # data, model and training as the flags of ``fit`` would have set them
    name: str | None = None  # of the experiment
    optimizers: dict[str, dict[str, Any]] = field(default_factory=lambda: {name: {} for name in _METHODS})  # options
    shape: tuple[int, int, int] | None = None  # (m, n, training pairs) of its data, or None

    @property
    def synthetic_note(self) -> str:
        """The notice that accompanies every result on generated pairs."""
        size = "{:,} x {:,}, {:,} pairs".format(*self.shape or ())
        return f"generated pairs of the shape of {self.name} ({size}), not the data itself"

    def synthetic_pairs(self) -> Interactions:
        """Generate pairs with planted groups; holding out the share ``validation`` leaves as many as ``shape`` says.

        The same seed of ``[run]`` gives the same pairs.
        """
        if self.shape is None:
            given = f"{self.name or 'a config'} without a shape"
            check.fail("synthetic", given, "an experiment with shape = [m, n, pairs] below [data]")
        m, n, observed = self.shape
        share = number_or_text(self.settings.data.validation or "0")  # or a file of its own
        total = round(observed / (1 - share)) if isinstance(share, float) and 0 < share < 1 else observed
        groups = max(1, min(64, m // 8, n // 8))
        return Interactions.from_matrix(planted_pairs(m, n, total, groups=groups, seed=self.settings.train.seed or 0))


def load_experiment(path: Path | None) -> Experiment:
    """Read an experiment, or a config, which has none of the tables that only experiments have."""
    content = {} if path is None else read_toml("config", path)
    if path is None or not any(name in _TABLES for name in content):
        return Experiment(read_config(path))
    model, train = get_type_hints(ModelOptions), get_type_hints(FitTraining)
    known = {
        "data": get_type_hints(DataOptions) | {"shape": list[int] | None},
        "problem": {key: kind for key, kind in model.items() if key not in _TOWERS},
        "towers": {key: model[key] for key in _TOWERS},
        "optimizers": dict.fromkeys(SOLVERS),
        "run": {key: kind for key, kind in train.items() if key not in _BY_METHOD},
    }
    with reading(path, "config"):
        methods = content.pop("optimizers", {})
        tables = read_tables(path, content, known)
        data = tables.get("data", {})
        shape = data.pop("shape", None)
        if shape is not None and (len(shape) != 3 or not 0 < shape[2] <= 0.8 * shape[0] * shape[1]):
            check.fail("config: [data] shape", shape, "[m, n, pairs], with at most 80% of the m·n pairs")
        settings = Settings(
            DataOptions(**data),
            ModelOptions(**tables.get("problem", {}), **tables.get("towers", {})),
            FitTraining(**tables.get("run", {})),
        )
        return Experiment(settings, path.stem, _methods(path, methods), None if shape is None else tuple(shape))


def _methods(path: Path, given: object) -> dict[str, dict[str, Any]]:
    """Return options by optimizer, checked by the optimizer itself."""
    if not isinstance(given, dict) or not given:
        check.fail("config", f"{path} with optimizers = {given!r}", "a table [optimizers.NAME] for each method to run")
    found: dict[str, dict[str, Any]] = {}
    for name, constants in given.items():
        if name not in SOLVERS:
            expected = f"[optimizers.{nearest(name, SOLVERS)}]"
            check.fail("config", f"unknown method [optimizers.{name}] in {path}", expected)
        if not isinstance(constants, dict):
            check.fail("config", f"optimizers.{name} = {constants!r}", f"a table [optimizers.{name}]")
        found[name] = {key.replace("-", "_"): value for key, value in constants.items()}
        try:
            as_solver(name, found[name])
        except ValueError as error:
            raise ValueError(f"config: [optimizers.{name}] of {path}: {error}") from error
    return found


def make_runner(
    path: Path | None, config: Path | None, synthetic: bool, out: Path, common: Common, *flags: Any
) -> tuple[Runner, Request]:
    """Return the runner of a comparison, and its comparison.json without the optimizers; flags override the file."""
    experiment = load_experiment(config)
    settings = experiment.settings.with_flags(*flags)
    settings.data.validation = settings.data.validation or _HELD_OUT
    methods = _constants(settings, experiment)
    if synthetic:
        if path is not None:
            check.fail("synthetic", f"DATA {path} as well", "--config with an experiment that has a shape, and no DATA")
        everything = replace(experiment, settings=settings).synthetic_pairs()
        title, remark = f"{experiment.name} shape", experiment.synthetic_note
    else:
        source = settings.source(path, "" if experiment.shape is None else "; or --synthetic for pairs of its shape")
        title = experiment.name or (source.stem if source.is_file() else source.resolve().name)
        remark, everything = None, read_pairs(source, settings.data, loss=settings.model.loss or ModelSettings.loss)
    pairs, held_out = held_out_of(everything, settings.data, settings.train.seed or 0, of_all=True)

    arguments = {"precision": "float32"} | settings.estimator_arguments()  # with tf32 some optimizers stall
    model = ModelSettings(**{k: v for k, v in arguments.items() if k not in ("optimizer_options", "optimizer")})
    model.imputed = read_imputed(model.imputed, pairs)
    features, _ = tower_features(settings, pairs, common.note)
    data = prepare_data(model, pairs, **features, validation=held_out)
    problem = make_problem(model, data)
    limit = _SECONDS if model.time_limit is None else model.time_limit
    iterations = settings.train.max_iterations
    if iterations is not None:
        check.count("max_iterations", iterations)
    runner = Runner(
        problem, lambda: make_towers(model, data, problem), make_validation(model, data),
        check.number("time_limit", limit, above=0.0), iterations, check.seed(model.seed),
        out, methods, not common.quiet, note,
    )  # fmt: skip
    marks = fingerprint(problem, runner.start(), "", {}, runner.seed, runner.validation)
    about = {
        "path": None if remark else settings.data.path,
        "left": pairs.shape[0],
        "right": pairs.shape[1],
        "pairs": len(pairs),
        "validation": settings.data.validation,
        "validation_pairs": None if held_out is None else len(held_out),
        "fingerprint": {name: marks[name] for name in ("pairs", "features", "validation")},
    }
    used = _settings_used(runner, model, data)
    if model.factors is not None:
        used["problem"]["imputed"] = settings.model.imputed  # the file
    return runner, Request(title=title, synthetic=remark, metric=model.metric, data=about, settings=used)


def _settings_used(runner: Runner, model: ModelSettings, data: FitData) -> dict[str, dict[str, Any]]:
    """Return what comparison.json says about problem, towers and limits."""
    problem = runner.problem
    return {
        "problem": {
            "loss": problem.loss.name,
            **{name: getattr(problem, name) for name in ("precision", "pair_precision", "omega", "l2")},
            "imputed": imputed_label(model),
            **{name: getattr(problem, name) for name in ("embedding_l2", "frequency_power")},
            **({} if problem.regularizer is None else {"regularizer": repr(problem.regularizer)}),
            "left_weights": left_weights(model, data),
            "right_weights": right_weights(model, data),
        },
        "towers": {
            "features": {"left": data.inputs[0].kind, "right": data.inputs[1].kind},
            "hidden": config_hidden(data.hidden),
            **{name: getattr(data, name) for name in ("dim", "normalize", "activation")},
            "seed": runner.seed,
            "device": model.device,
        },
        "limits": {"time_limit": runner.time_limit, "max_iterations": runner.max_iterations},
    }


def _constants(settings: Settings, experiment: Experiment) -> dict[str, dict[str, Any]]:
    """Return options by optimizer: the experiment's, overridden by --option METHOD.NAME=VALUE."""
    found = {name: dict(given) for name, given in experiment.optimizers.items()}
    for key, value in settings.estimator_arguments().get("optimizer_options", {}).items():
        method, dot, name = key.partition(".")
        if not dot or method not in SOLVERS:
            check.fail("option", repr(key), "METHOD.NAME=VALUE with a METHOD of " + ", ".join(SOLVERS))
        found.setdefault(method, {})[name] = value
    return found


_SHOWN = ("0.5", "0.1", "0.01")


def compare(
    path: Annotated[Path | None, Parameter(name="DATA")] = None,
    /,
    *,
    optimizers: str | None = None,
    out: Path,
    config: Path | None = None,
    synthetic: Switch = False,
    fresh: Switch = False,
    data: DataOptions | None = None,
    features: FeatureOptions | None = None,
    model: ModelOptions | None = None,
    train: TrainOptions | None = None,
    common: Common = Common(),
    tokens: Annotated[Sequence[str], Parameter(parse=False)] = (),
) -> int:
    """Run several optimizers from the same start, one after the other, and report their convergence over time.

    Each optimizer stops as in fit, with three differences: without --time-limit it stops after 60 seconds of training,
    without --max-iterations there is no limit on iterations, and it does not stop when the metric no longer improves.
    Matrix products on a GPU are float32 unless --precision says tf32, with which newton stalls.
    Without --validation a tenth of the pairs is held out for the metric. Only the optimizers' own work is timed, not
    the metric and not checkpoints.

    An optimizer that fails, diverges, is unknown or needs longer than the time limit for one iteration is reported, and
    the others run. The same command continues a comparison that was killed, and adds other --optimizers to it. Run
    nothing else on the machine meanwhile; the report says how many cores other processes kept busy.

    Args:
        path: Pairs, as for fit.
        optimizers: Names separated by commas [default: those of the experiment, or gd,newton,newton-kron].
        out: Folder for report.html, time and passes .png and .svg, summary.json, comparison.json, NAME.jsonl and runs.
        config: TOML file: an experiment such as experiments/ml1m.toml, or a config as for fit.
        synthetic: Use generated pairs of the shape of the experiment instead of DATA; all output is marked as such.
        fresh: Replace a comparison that the folder holds.
    """
    for_writing(check.local_path("out", out), "comparison")
    asked = None if optimizers is None else _names(optimizers)
    runner, request = make_runner(path, config, synthetic, out, common, data, model, train, features)
    names = list(runner.options) if asked is None else asked
    command = shlex.join(["gramtower", *tokens])
    request = replace(request, methods=names, commands=[command], environment=environment())
    store = RunStore(out, "comparison", "out")
    with held(out):
        if fresh or not store.manifest.exists():
            runner.forget(SOLVERS)
        store.write_manifest(_joined(store, request, runner.options, fresh))
        kept = f"the runs so far are in {out}, and the same command continues them"
        try:
            interrupted = _run_all(runner, store, names)
            content, problems = build(out)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(kept) from None
    for problem in problems:
        note(problem)
    common.answer(content, *shown(content, out))
    if interrupted:
        raise KeyboardInterrupt(kept)
    return 0 if all(found["status"] in RAN for found in content["methods"].values()) else 1


def shown(content: dict[str, Any], out: Path) -> list[Table | str]:
    """Return what people are shown of a summary."""
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
    ended = [(name, one["status"], one["message"]) for name, one in content["methods"].items()]
    troubled = [f"{name} {status}: {message}" for name, status, message in ended if status != "finished"]
    return [Table(columns, rows, title), *troubled, content["verdict"], f"report: {out / PAGE}"]


def _joined(store: RunStore, now: Request, options: Mapping[str, dict[str, Any]], fresh: bool) -> Request:
    """Return the request together with the one in the folder; refuse a folder of another comparison."""
    before: Request | None = store.continued(now, fresh, ("data", "settings", "metric", "synthetic"))
    if before is None:
        return now
    ends = {name: end for name, end in read_outcomes(store, before).items() if end.status}
    store.refuse(name for name in now.methods if name in ends and ends[name].options != plain(options.get(name, {})))
    if isinstance(before.methods, dict):  # an earlier version kept the ends there
        for name, end in ends.items():
            store.write_run(name, end)
    methods = list(dict.fromkeys([*before.methods, *now.methods]))
    commands = list(dict.fromkeys([*before.commands, *now.commands]))
    return replace(now, methods=methods, commands=commands, environment=before.environment)


def _run_all(runner: Runner, store: RunStore, names: list[str]) -> bool:
    """Run the methods that have not ended; return whether one was interrupted, which stops the others."""
    waiting = []
    for name in names:
        if name not in SOLVERS:
            message = f"got {name!r}, expected {nearest(name, SOLVERS)!r}, or another of {', '.join(SOLVERS)}"
            store.write_run(name, Outcome("unknown", message))
            note(f"{name}: no such method; {message}")
        elif (ended := store.read_run(name, Outcome)) is None or ended.status == "unfinished":
            waiting.append(name)
        else:  # a kill may have come between the end of the method and this
            remove_checkpoint(checkpoint_path(runner.folder, name))
    if waiting:
        runner.prepare()
    for name in waiting:
        outcome = runner.run(name)
        store.write_run(name, outcome)
        if outcome.status == "unfinished":
            return True
        remove_checkpoint(checkpoint_path(runner.folder, name))
    return False


def _names(text: str) -> list[str]:
    names = list(dict.fromkeys(names_in(text)))
    if not any(name in SOLVERS for name in names):
        near = f"{nearest(names[0], SOLVERS)!r}, or another of " if names else "names separated by commas, of "
        check.fail("optimizers", repr(names[0] if names else text), near + ", ".join(SOLVERS))
    return names


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
