"""``gramtower evaluate``, ``recommend`` and ``similar``: what a fitted model answers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from cyclopts import Parameter
from numpy.typing import NDArray

from gramtower import _checks as check
from gramtower.cli.config import Settings, merged
from gramtower.cli.features import NO_ID, described_rows, new_rows, right_rows
from gramtower.cli.folder import open_model
from gramtower.cli.options import Common, DataOptions
from gramtower.cli.output import note, print_facts, print_json, print_table
from gramtower.cli.reading import read_pairs
from gramtower.data.lookup import as_known
from gramtower.metrics.definitions import DEFAULT
from gramtower.two_tower import TwoTower

Ids = Annotated[list[str] | None, Parameter(negative=())]
Switch = Annotated[bool, Parameter(negative=(), show_default=False)]
_EVERY = 2.0  # seconds between lines of progress


def evaluate(
    run: Path,
    /,
    *,
    test: Path,
    metrics: str = ",".join(DEFAULT),
    exclude_seen: bool = True,
    exclude: Path | None = None,
    by: str | None = None,
    candidates: str = "all",
    allow: Ids = None,
    left_features: Path | None = None,
    right_features: Path | None = None,
    histories: Path | None = None,
    data: DataOptions | None = None,
    common: Common | None = None,
) -> int:
    """Measure the ranking of held-out pairs.

    Column names, value threshold and format are those of the run unless given here. Pairs of entities that the model
    does not know and that no table describes cannot be ranked; they are left out and counted.

    Args:
        run: Folder of a run, or a model file.
        test: Held-out pairs, a file like the one the run read.
        metrics: Names with a cut-off, separated by commas: recall@20, ndcg@20, map@5, precision@5, psp@5, hr@10, mrr,
            auc, coverage@20, gini@20, novelty@20, diversity@20.
        exclude_seen: Leave out of the ranking what a left entity has: its pairs of training, and those of validation
            that are not tested.
        exclude: Further pairs to leave out of the ranking, a file like the test.
        by: A break-down: popularity (of right entities) or activity (of left ones).
        candidates: all that are ranked, with those of --right-features, or trained: those of the training data.
        allow: Id of a right entity; only those given are ranked; may be repeated. Pairs of others are left out.
        left_features: Take the left entities of this table as new ones, described by it.
        right_features: Table of right entities, of which new ones are ranked among the others.
        histories: Take the left entities of these pairs as new ones, described by them, a file like the test.
        data: Data.
        common: Output.
    """
    common = common or Common()
    names = tuple(name.strip() for name in metrics.split(",") if name.strip())
    model, settings = open_model(run)
    pairs = read_pairs(test, options_of_test(settings, test, data), name="--test")
    new: dict[str, Any] = {}
    if left_features is not None:
        new["left_features"] = described_rows(model, left_features, pairs.left_ids, common.quiet)
    if right_features is not None:
        new["right_features"] = right_rows(model, right_features, common.quiet)
    for name, path in (("histories", histories), ("exclude", exclude)):
        if path is not None:
            new[name] = read_pairs(path, options_of_test(settings, path, data), name=f"--{name}")
    new["allow"] = keys_of(model, "right", allow)
    found = model.evaluate(pairs, names, exclude_seen=exclude_seen, by=by, candidates=candidates, **new)
    counts: dict[str, Any] = {"pairs": len(pairs), "pairs_left_out": found.pairs_left_out}
    counts |= {"left_out": found.left_out, "exclude_seen": exclude_seen}
    if common.json:
        print_json({"metrics": found, **counts})
        return 0
    print_facts(dict(found))
    return 0


def recommend(
    run: Path,
    /,
    *,
    left: Ids = None,
    k: Annotated[int, Parameter(name=["--k", "-k"])] = 10,
    include_seen: Switch = False,
    exclude: Path | None = None,
    allow: Ids = None,
    deny: Ids = None,
    candidates: str = "all",
    left_features: Path | None = None,
    right_features: Path | None = None,
    history: Ids = None,
    every: Annotated[bool, Parameter(name="--all", negative=(), show_default=False)] = False,
    out: Path | None = None,
    device: str | None = None,
    fresh: Switch = False,
    common: Common | None = None,
) -> int:
    """List the best right entities for left ones.

    With --all the lists of all left entities go to a file, in bounded memory: one row for each answer, with left id,
    rank, right id and score. Until it is done its parts are in OUT.parts, and the same command goes on where it was
    killed.

    Args:
        run: Folder of a run, or a model file.
        left: Id of a left entity; may be repeated. With --left-features, of its rows.
        k: How many.
        include_seen: Also those that it has: of its pairs of training and of validation, or of its history.
        exclude: Pairs of which none is to be shown, a file like the one the run read.
        allow: Id of a right entity; only those given; may be repeated. Unknown ids are ignored and counted.
        deny: Id of a right entity never to show; may be repeated. Unknown ids are ignored and counted.
        candidates: all that there are, with those of --right-features, or trained: those of the training data.
        left_features: Table of new left entities, for models fitted with --left-features: all its rows, or --left.
        right_features: Table of right entities, for models fitted with --right-features: new ones are ranked too.
        history: Right id of a new left entity, for models fitted with --history; may be repeated.
        every: For all left entities of the model; needs --out.
        out: With --all, the file to write: .parquet, .csv or .tsv.
        device: With --all, where scores are made: auto, cpu or cuda. [default: auto]
        fresh: With --all, begin again where an earlier run left parts.
        common: Output.
    """
    common = common or Common()
    if every:
        _check_all(left, left_features, history, out)
    elif out is not None or device is not None or fresh:
        check.fail("--out, --device, --fresh", "given", "nothing: only with --all")
    elif left_features is None and (left is None) == (history is None):
        given = "both" if left else "none"
        check.fail(
            "--left, --left-features, --history", given, "--left alone, or what describes a new entity; or --all"
        )
    model, settings = open_model(run)
    options: dict[str, Any] = {"exclude_seen": not include_seen, "candidates": candidates}
    options |= {"deny": keys_of(model, "right", deny), "allow": keys_of(model, "right", allow)}
    if exclude is not None:
        options["exclude"] = read_pairs(exclude, options_of_test(settings, exclude, None), name="--exclude")
    if right_features is not None:
        options["right_features"] = right_rows(model, right_features, common.quiet)
    if every and out is not None:
        return _write_all(model, out, k, {**options, "device": device or "auto", "fresh": fresh}, common)
    if left_features is not None:
        options["left_features"], asked = new_rows(model, left_features, left, common.quiet)
    else:
        asked = left or ["(new)"]
    if history is not None:
        options["histories"] = [keys_of(model, "right", history)]
    known = None if left_features is not None or history is not None else keys_of(model, "left", asked)
    found, scores = model.recommend(known, k, **options)
    _show("left", asked if known is None else known, "right", found, scores, common)
    return 0


def _check_all(left: Ids, left_features: Path | None, history: Ids, out: Path | None) -> None:
    """Refuse --all with what chooses left entities, and without a file."""
    for name, value in (("--left", left), ("--left-features", left_features), ("--history", history)):
        if value is not None:
            check.fail(name, "given with --all", "one of them")
    if out is None:
        check.fail("--out", "none", "with --all, the file to write: .parquet, .csv or .tsv")


def _write_all(model: TwoTower, out: Path, k: int, options: dict[str, Any], common: Common) -> int:
    """Lists of all left entities to a file, with a line of progress every few seconds."""
    start = said = time.monotonic()
    first: int | None = None

    def progress(done: int, total: int) -> None:
        nonlocal said, first
        now = time.monotonic()
        first = done if first is None else first
        if common.quiet or (now - said < _EVERY and done < total):
            return
        rate = (done - first) / max(now - said, 1e-9) if done > first else 0.0
        rest = f", {(total - done) / rate:,.0f} s left" if rate > 0 and done < total else ""
        note(f"{done:,} of {total:,} lists{rest}")
        said, first = now, done

    answers = model.recommend_all(out, k, progress=progress, **options)
    facts = {"lists": len(model.left_), "answers": answers, "seconds": time.monotonic() - start, "out": str(out)}
    if common.json:
        print_json(facts)
    else:
        print_facts(facts)
    return 0


def similar(
    run: Path,
    /,
    *,
    right: Ids = None,
    left: Ids = None,
    k: Annotated[int, Parameter(name=["--k", "-k"])] = 10,
    left_features: Path | None = None,
    right_features: Path | None = None,
    common: Common | None = None,
) -> int:
    """List the entities of the same side whose embeddings point most alike (cosine).

    Args:
        run: Folder of a run, or a model file.
        right: Id of a right entity; may be repeated.
        left: Id of a left entity, instead of --right; may be repeated.
        k: How many.
        left_features: Table of left entities: new ones are compared too. With it alone, all its rows are asked about.
        right_features: The same for right entities.
        common: Output.
    """
    common = common or Common()
    tables = {"left": left_features, "right": right_features}
    sides = [side for side, ids in (("left", left), ("right", right)) if ids is not None or tables[side] is not None]
    if len(sides) != 1:
        check.fail("--left, --right", "both" if sides else "neither", "one of them, or its table")
    model, _ = open_model(run)
    side, asked, options = sides[0], left if sides[0] == "left" else right, {}
    path = tables[side]
    if path is not None:
        options[f"{side}_features"], names = new_rows(model, path, None, True, side)
        names = [name for name in names if name != NO_ID]
    keys = keys_of(model, side, asked)
    found, scores = model.similar(keys, side, k, **options)
    _show(side, names if keys is None else keys, "similar", found, scores, common)
    return 0


def options_of_test(settings: Settings, test: Path, given: DataOptions | None) -> DataOptions:
    """The run's columns for a test file, and its format if the two files are of a kind; flags win."""
    options = settings.data
    if options.path is not None and Path(options.path).suffixes != test.suffixes:
        options.format = None
    return merged(options, given)


def keys_of(model: TwoTower, side: str, ids: list[str] | None) -> Any:
    """Ids as the model knows them: text, whole numbers, or row numbers for a model that was fitted on a matrix."""
    return None if ids is None else as_known(ids, model.left_.ids if side == "left" else model.right_.ids)


def _show(
    asked_name: str, asked: list[Any], found_name: str, found: NDArray[Any], scores: NDArray[np.float32], common: Common
) -> None:
    """One list for each entity asked about; places without an answer are left out."""
    lists = [
        [(key, float(score)) for key, score in zip(row, values, strict=True) if np.isfinite(score)]
        for row, values in zip(found.tolist(), scores.tolist(), strict=True)
    ]
    if common.json:
        answers = [
            {asked_name: key, "results": [{"id": name, "score": score} for name, score in answer]}
            for key, answer in zip(asked, lists, strict=True)
        ]
        print_json({"answers": answers})
        return
    rows = [
        (str(key) if rank == 0 else "", rank + 1, str(name), score)
        for key, answer in zip(asked, lists, strict=True)
        for rank, (name, score) in enumerate(answer)
    ]
    print_table((asked_name, "rank", found_name, "score"), rows)
