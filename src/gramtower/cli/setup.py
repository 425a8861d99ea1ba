"""What methods are compared on: data, objective, start and constants, from flags, a config or an experiment."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gramtower._util import checks as check
from gramtower._util.widths import config_hidden
from gramtower.cli.experiment import Experiment, is_experiment, load_experiment
from gramtower.cli.options import DataOptions, FeatureOptions, ModelOptions, Settings, TrainOptions, merge_flags, merged
from gramtower.cli.output import note
from gramtower.cli.reading import read_pairs, split_validation, tower_features
from gramtower.data.interactions import Interactions
from gramtower.experiments.comparison_runner import Runner
from gramtower.model.fit_data import FitData, prepare_data
from gramtower.model.fit_parts import make_problem, make_towers, make_validation, right_weights
from gramtower.model.settings import ModelSettings
from gramtower.optim.solvers import SOLVERS
from gramtower.training.fingerprint import fingerprint

_SECONDS, _HELD_OUT = 60.0, "0.1"
_METHODS = ("gd", "newton", "newton-kron")


@dataclass
class Setup:
    """What methods are compared on.

    Attributes:
        settings: the options in force.
        title: a name for people.
        synthetic: a notice for generated pairs, None for real ones.
        methods: constants by method; without --optimizers these are the methods to run.
        pairs: to learn from.
        held_out: for the metric.
    """

    settings: Settings
    title: str
    synthetic: str | None
    methods: dict[str, dict[str, Any]]
    pairs: Interactions
    held_out: Interactions | None

    @property
    def model(self) -> ModelSettings:
        """The settings of the model whose objective and towers these are."""
        arguments = self.settings.estimator_arguments()
        return ModelSettings(**{k: v for k, v in arguments.items() if k not in ("optimizer_options", "optimizer")})

    def runner(self, out: Path, verbose: bool) -> tuple[Runner, dict[str, Any]]:
        """The methods' runner in a folder, and what comparison.json says of everything but the methods."""
        model = self.model
        features, _ = tower_features(self.settings, self.pairs, not verbose)
        data = prepare_data(model, self.pairs, **features, validation=self.held_out)
        problem = make_problem(model, data)
        limit = _SECONDS if model.time_limit is None else model.time_limit
        iterations = self.settings.train.max_iterations
        if iterations is not None:
            check.count("max_iterations", iterations)
        runner = Runner(
            problem, lambda: make_towers(model, data, problem), make_validation(model, data),
            check.number("time_limit", limit, above=0.0), iterations, check.seed(model.seed),
            out, self.methods, verbose, note,
        )  # fmt: skip
        return runner, self._about(runner, model, data)

    def _about(self, runner: Runner, model: ModelSettings, fit_data: FitData) -> dict[str, Any]:
        problem, data = runner.problem, self.settings.data
        marks = fingerprint(problem, runner.start(), "", {}, runner.seed, runner.validation)
        return {
            "title": self.title,
            "synthetic": self.synthetic,
            "metric": model.metric,
            "data": {
                "path": None if self.synthetic else data.path,
                "left": self.pairs.shape[0],
                "right": self.pairs.shape[1],
                "pairs": len(self.pairs),
                "validation": data.validation,
                "validation_pairs": None if self.held_out is None else len(self.held_out),
                "fingerprint": {name: marks[name] for name in ("pairs", "features", "validation")},
            },
            "settings": {
                "problem": {
                    "loss": problem.loss.name,
                    "precision": problem.precision,
                    "pair_precision": problem.pair_precision,
                    "omega": problem.omega,
                    "l2": problem.l2,
                    "imputed": model.imputed,
                    "embedding_l2": problem.embedding_l2,
                    "frequency_power": problem.frequency_power,
                    "left_weights": model.left_weights,
                    "right_weights": right_weights(model, fit_data),
                },
                "towers": {
                    "features": {"left": fit_data.inputs[0].kind, "right": fit_data.inputs[1].kind},
                    "hidden": config_hidden(fit_data.hidden),
                    "dim": fit_data.dim,
                    "normalize": fit_data.normalize,
                    "activation": fit_data.activation,
                    "seed": runner.seed,
                    "device": model.device,
                },
                "limits": {"time_limit": runner.time_limit, "max_iterations": runner.max_iterations},
            },
        }


def make_setup(
    path: Path | None,
    config: Path | None,
    synthetic: bool,
    flags: tuple[DataOptions | None, ModelOptions | None, TrainOptions | None, FeatureOptions | None],
) -> Setup:
    """Read everything that was asked for; flags win over the file.

    Raises:
        ValueError: if something is missing or wrong; FileNotFoundError if a file is not there.
    """
    experiment = load_experiment(config) if config is not None and is_experiment(config) else None
    if experiment is None:
        settings = merge_flags(config, *flags)
    else:
        file = experiment.settings
        parts = zip((file.data, file.model, file.train, file.features), flags, strict=True)
        settings = Settings(*(merged(defaults, flags) for defaults, flags in parts))  # type: ignore[type-var, arg-type]
    if path is not None:
        settings.data.path = str(path)
    settings.data.validation = settings.data.validation or _HELD_OUT
    methods = _constants(settings, experiment)
    seed = settings.train.seed or 0
    if synthetic:
        if experiment is None or path is not None:
            given = "a config without a shape" if experiment is None else f"DATA {path} as well"
            check.fail("synthetic", given, "--config with an experiment that has a shape, and no DATA")
        experiment = replace(experiment, settings=settings)
        title, remark, everything = f"{experiment.name} shape", experiment.synthetic_note, experiment.synthetic_pairs()
    else:
        source = _source(settings, experiment)
        title = experiment.name if experiment else source.stem if source.is_file() else source.resolve().name
        remark, everything = None, read_pairs(source, settings.data, loss=settings.model.loss or ModelSettings.loss)
    pairs, held_out = split_validation(everything, settings.data, seed)
    return Setup(settings, title, remark, methods, pairs, held_out)


def _source(settings: Settings, experiment: Experiment | None) -> Path:
    if settings.data.path is None:
        or_else = "" if experiment is None or experiment.shape is None else "; or --synthetic for pairs of its shape"
        expected = f"a file of pairs, as an argument or as path below [data] of the config{or_else}"
        check.fail("DATA", "nothing", expected)
    return Path(settings.data.path)


def _constants(settings: Settings, experiment: Experiment | None) -> dict[str, dict[str, Any]]:
    """Constants by method: the experiment's, overridden by --option METHOD.NAME=VALUE."""
    optimizers = experiment.optimizers if experiment else {name: {} for name in _METHODS}
    found: dict[str, dict[str, Any]] = {name: dict(options) for name, options in optimizers.items()}
    for key, value in settings.estimator_arguments().get("optimizer_options", {}).items():
        method, dot, name = key.partition(".")
        if not dot or method not in SOLVERS:
            check.fail("option", repr(key), "METHOD.NAME=VALUE with a METHOD of " + ", ".join(SOLVERS))
        found.setdefault(method, {})[name] = value
    return found
