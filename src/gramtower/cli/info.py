"""``gramtower info``, ``export`` and ``demo``: what a model or a file holds, a model in other formats, an example."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import scipy.sparse as sp

from gramtower import demo as packages
from gramtower.cli.fit_command import traffic_facts
from gramtower.cli.formats import ReadOptions
from gramtower.cli.options import Common, Texts, read_config
from gramtower.cli.output import Table, print_json
from gramtower.cli.reading import is_model, open_model, read_pairs
from gramtower.data.ids import Ids, date_text
from gramtower.data.interactions import Interactions
from gramtower.experiments.fit_report import QUANTILES, degree_quantiles
from gramtower.model.two_tower import TwoTower


def info(
    path: Path, /, *, config: Path | None = None, data: ReadOptions | None = None, common: Common = Common()
) -> int:
    """Describe a model or a file of pairs: counts, pairs per entity, settings.

    Args:
        path: Folder of a run, a model file, or a file of pairs as for fit.
        config: TOML file whose table [data] says how a file of pairs is read.
    """
    if is_model(path):
        found = describe_model(open_model(path)[0])
    else:
        found = describe_pairs(read_pairs(path, read_config(config).with_flags(data).data))
    tables = {name: part for name, part in found.items() if isinstance(part, dict)}
    degrees, names = tables.pop("pairs_per_entity"), tables.pop("names")
    rows = [(names[side], *(numbers[name] for name in QUANTILES), numbers["none"]) for side, numbers in degrees.items()]
    facts = {name: value for name, value in found.items() if not isinstance(value, dict)}
    facts |= {name: date_text(facts[name]) for name in ("first_time", "last_time") if name in facts}
    return common.answer(
        found,
        {_named(name, names): value for name, value in facts.items()},
        Table(("", *QUANTILES, "without any"), rows, "pairs per entity"),
        *(
            line
            for name, part in tables.items()
            for line in (f"{name}:", part if name == "settings" else {_named(key, names): part[key] for key in part})
        ),
    )


def _named(key: str, names: dict[str, str]) -> str:
    """The name of a fact for people: entities are called as in the data."""
    side, _, what = key.partition("_")
    return f"{names[side]} {what or 'entities'}" if side in names else key


def describe_model(model: TwoTower) -> dict[str, Any]:
    """A fitted model in numbers."""
    last = model.history_[-1]
    left_out = ("towers", "verbose")
    return {
        "kind": "model",
        "names": {side.name: side.called for side in model.fitted_.sides},
        **_counts(model.trained_),
        "left_id": _example(model.left_.ids),
        "right_id": _example(model.right_.ids),
        "left_kind": model.left_.inputs.kind,
        "right_kind": model.right_.inputs.kind,
        "dim": int(model.left_.embeddings.shape[1]),
        "iterations": last.iteration,
        "seconds": last.seconds,
        "objective": last.value,
        **traffic_facts(last),
        "stopped": model.message_,
        **({} if model.calibration_ is None else {"calibration": str(model.calibration_)}),
        "pairs_per_entity": degree_quantiles(model.trained_),
        "settings": {k: v for k, v in model.with_changes().get_params().items() if k not in left_out and v is not None},
    }


def describe_pairs(pairs: Interactions) -> dict[str, Any]:
    """Pairs in numbers."""
    times = {}
    if pairs.times is not None and len(pairs):
        times = {"first_time": float(pairs.times.min()), "last_time": float(pairs.times.max())}
    labels = pairs.matrix.data
    return {
        "kind": "pairs",
        "names": dict(zip(("left", "right"), pairs.entity_names, strict=True)),
        **_counts(pairs.matrix),
        "left_id": _example(pairs.left_ids),
        "right_id": _example(pairs.right_ids),
        "least_label": float(labels.min()) if len(labels) else None,
        "largest_label": float(labels.max()) if len(labels) else None,
        **times,
        "pairs_per_entity": degree_quantiles(pairs.matrix),
        "report": dict(pairs.report),
    }


def _counts(matrix: sp.csr_matrix) -> dict[str, object]:
    m, n = matrix.shape
    return {"left": m, "right": n, "pairs": int(matrix.nnz), "density": matrix.nnz / max(1, m * n)}


def _example(ids: Ids | None) -> object:
    return None if ids is None or not len(ids) else ids[:1].tolist()[0]


def export(run: Path, /, *, to: str, out: Path, common: Common = Common()) -> int:
    """Export a model: its towers as networks, or its embeddings with their ids.

    Args:
        run: Folder of a run, or a model file.
        to: onnx or torchscript (towers), numpy, parquet or faiss (embeddings).
        out: Folder to write into.
    """
    model, _ = open_model(run)
    files = model.export(out, to)
    written = Table(("file", "bytes"), [(str(path), path.stat().st_size) for path in files])
    return 0 if common.quiet and not common.json else common.answer({"to": to, "files": files}, written)


def demo(
    *,
    uses: Texts = None,
    seconds: float | None = None,
    seed: int = 0,
    out: Path | None = None,
    common: Common = Common(),
) -> int:
    """Demo: recommend npm dependencies, including for packages not seen in training.

    Args:
        uses: Tools of a package to ask about, such as "gulp, browserify"; may be repeated.
        seconds: Training time of each of the two models.
        seed: For initial weights and the split.
        out: Folder for pictures and the model.
    """
    asked = None if uses is None else [[tool for tool in re.split(r"[,\s]+", text) if tool] for text in uses]
    found = packages.run(seconds=seconds, seed=seed, out=out, verbose=not common.quiet, uses=asked)
    if common.json:
        print_json(found)
    else:
        packages.show(found)
    return 0
