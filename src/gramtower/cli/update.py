"""``gramtower update``: more pairs for the model of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from gramtower._util import checks as check
from gramtower._util.files import write_json
from gramtower._util.toml import write_config
from gramtower.cli import folder
from gramtower.cli.config import merged
from gramtower.cli.features import tower_features
from gramtower.cli.fit import summary, used
from gramtower.cli.options import Common, DataOptions, FeatureOptions, refuse_candidates
from gramtower.cli.output import note, print_facts, print_json
from gramtower.cli.reading import read_pairs
from gramtower.experiments.machine import environment
from gramtower.model.update import ITERATIONS, grown_pairs
from gramtower.training.result import History, Reason


def update(
    run: Annotated[Path, Parameter(name="RUN")],
    path: Annotated[Path, Parameter(name="MORE")],
    /,
    *,
    iterations: int = ITERATIONS,
    out: Path | None = None,
    data: DataOptions | None = None,
    features: FeatureOptions | None = None,
    common: Common | None = None,
) -> int:
    """Add pairs to those that a model knows, and run a few iterations from its weights.

    Old pairs, entities and seen lists stay; new entities are added. MORE is read with the columns and the threshold of
    the run, unless told otherwise. Of the old pairs the model keeps which there are: all count with the label 1 and
    without weights, and a model fitted with other labels or with weights is refused.

    Tables of features are read again, from where the run has them or as told: they must have the rows of all entities,
    old and new, as a model does not keep them.

    Args:
        run: Folder of a fit, or a model file.
        path: Pairs to add, as for fit.
        iterations: How many.
        out: Folder for the new model; without it the one in RUN is replaced, in one step.
        data: Data.
        features: Features.
        common: Output.
    """
    common = common or Common()
    refuse_candidates(features)
    if data is not None and data.validation is not None:
        check.fail("--validation", data.validation, "nothing: an update runs --iterations")
    folder.model_file(run)  # which says if there is none
    out = out or (run if run.is_dir() else None)
    if out is None:
        check.fail("out", out, "a folder, as RUN is a file")
    with folder.held(folder.for_writing(out)):  # before the model is read: of two updates neither loses pairs
        facts = _update(run, path, out, iterations, data, features, common)
    if common.json:
        print_json(facts)
    else:
        named = ("objective", "iterations", "added_pairs", "new_left", "new_right", "pairs", "model")
        print_facts({name.replace("_", " "): facts[name] for name in named})
    return 0


def _update(
    run: Path,
    path: Path,
    out: Path,
    iterations: int,
    data: DataOptions | None,
    features: FeatureOptions | None,
    common: Common,
) -> dict[str, Any]:
    """From the model of one folder and more pairs to the folder of a new model; returns what summary.json has."""
    model, settings = folder.open_model(run)
    settings.data = merged(settings.data, data)
    settings.features = merged(settings.features, features)
    for side, inputs in (("left", model.left_.inputs), ("right", model.right_.inputs)):
        ids = any(part.kind == "id" for part in inputs.parts)  # also of a run whose config does not have the key
        setattr(settings.features, f"{side}_identity", ids or None)
    more = read_pairs(path, settings.data, name="MORE", loss=model.loss)
    pairs = grown_pairs(model.fitted_, more)
    before = len(model.left_), len(model.right_), model.fitted_.observed().nnz
    if not common.quiet:
        note(f"{len(more):,} pairs for {before[2]:,} known ones; {pairs.shape[0] - before[0]:,} new left entities and "
             f"{pairs.shape[1] - before[1]:,} right ones")  # fmt: skip
    seen, matched = tower_features(settings, pairs, common.quiet)
    model.set_params(verbose=not common.quiet).update(more, **seen, iterations=iterations)
    if model.reason_ is Reason.INTERRUPTED:
        raise KeyboardInterrupt
    model.save(out / folder.MODEL)
    write_config(out / folder.CONFIG, used(settings, model), "what this run used; gramtower fit --config reads it")
    History(out / folder.HISTORY).begin(model.history_)
    facts = summary(model, pairs, None)
    facts |= {"new_left": len(model.left_) - before[0], "new_right": len(model.right_) - before[1]}
    facts |= {"added_pairs": len(pairs) - before[2], "model": str(out / folder.MODEL)}
    facts |= {"features": matched} if matched else {}
    write_json(out / folder.SUMMARY, facts | {"environment": environment()})
    return facts
