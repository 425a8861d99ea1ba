"""``gramtower evaluate``, ``off-policy``, ``recommend``, ``similar`` and ``explain``: what a fitted model answers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from cyclopts import Parameter
from numpy.typing import NDArray

from gramtower._util import checks as check
from gramtower._util.files import as_path
from gramtower.cli import reading
from gramtower.cli.formats import ReadOptions, names_in
from gramtower.cli.options import Common, Settings, Switch, Texts, parse_option
from gramtower.cli.output import Table, silent
from gramtower.data.entity_table import EntityTable
from gramtower.data.frames import numbers, pick
from gramtower.data.ids import Key, as_known, as_objects, id_series, join
from gramtower.metrics import linear_rewards, list_targets
from gramtower.metrics import off_policy as estimates
from gramtower.metrics.definitions import DEFAULT
from gramtower.model.two_tower import TwoTower

Many = Annotated[list[str] | None, Parameter(negative=(), consume_multiple=True)]
if TYPE_CHECKING:
    from polars import DataFrame

_Titled = tuple[EntityTable, list[Key], "DataFrame"]  # a table of right entities, its ids and its frame
NEW = "(new)"  # the name of an entity that is only described
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
    allow: Many = None,
    left_features: Path | None = None,
    right_features: Path | None = None,
    histories: Path | None = None,
    data: ReadOptions | None = None,
    common: Common = Common(),
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
        allow: Ids of right entities, one or several, or @FILE with one in each line: only these are ranked; may be
            repeated. Pairs of others are left out.
        left_features: Take the left entities of this table as new ones, described by it.
        right_features: Table of right entities, of which new ones are ranked among the others.
        histories: Take the left entities of these pairs as new ones, described by them, a file like the test.
    """
    model, settings = reading.open_model(run)
    pairs = reading.read_like(settings, test, "--test", data)
    new: dict[str, Any] = {}
    if left_features is not None:
        new["left_features"] = reading.rows_with_ids(model, left_features, "left", common.note, pairs.left_ids)
    if right_features is not None:
        new["right_features"] = reading.rows_with_ids(model, right_features, "right", common.note)
    for name, path in (("histories", histories), ("exclude", exclude)):
        if path is not None:
            without = ["context"] if name == "exclude" else []
            new[name] = reading.read_like(settings, path, f"--{name}", data, without)
    new["allow"] = keys_of(model, "right", listed("--allow", allow))
    found = model.evaluate(pairs, names_in(metrics), exclude_seen=exclude_seen, by=by, candidates=candidates, **new)
    counts = {"pairs": len(pairs), "pairs_left_out": found.pairs_left_out, "left_out": found.left_out}
    counts |= {"exclude_seen": exclude_seen}
    return common.answer({"metrics": found, **counts}, found)


def off_policy(
    run: Path,
    log: Path,
    /,
    *,
    reward: str = "reward",
    propensity: str = "propensity",
    left: str | None = None,
    right: str | None = None,
    k: Annotated[int, Parameter(name=["--k", "-k"])] = 10,
    include_seen: Switch = False,
    clip: float | None = None,
    confidence: float = 0.95,
    interval: str = "normal",
    samples: int = 1000,
    seed: int = 0,
    common: Common = Common(),
) -> int:
    """Estimate the reward of lists from a log of entities shown with known probabilities.

    The value is the mean reward of a shown entity, if each place of the model's lists is shown equally often. Events of
    left entities that the model does not know are left out. The doubly robust estimate predicts rewards by a line
    through the model's scores, fitted on the other half of the log.

    Args:
        run: Folder of a run, or a model file.
        log: Table with a row for each event: left id, id of the shown right entity, reward, propensity.
        reward: Column of rewards, such as 1 for a click and 0 for none.
        propensity: Column of the probabilities with which the logging system showed the entity, above 0.
        left: Column of left ids [default: that of the run].
        right: Column of right ids [default: that of the run].
        k: Length of the lists.
        include_seen: Lists also have what a left entity has seen.
        clip: Largest weight, the ratio of the two probabilities [default: none].
        confidence: Of the intervals.
        interval: normal or bootstrap.
        samples: Of the bootstrap.
        seed: Of the bootstrap.
    """
    model, settings = reading.open_model(run)
    if model.fitted_.combinations is not None:
        instead = "one without; gramtower.metrics.off_policy takes lists of recommend(users, context=...)"
        check.fail("RUN", "a model with context columns", instead)
    frame = reading.read_frame("LOG", log)
    r, p = (
        numbers(name, frame[pick(name, column, frame.columns)]).to_numpy()
        for name, column in (("--reward", reward), ("--propensity", propensity))
    )
    rows, shown = (
        join(as_objects(id_series(name, frame[pick(name, column, frame.columns)]).to_list()), side.index)
        for name, column, side in (
            ("--left", left or settings.data.left or "left", model.left_),
            ("--right", right or settings.data.right or "right", model.right_),
        )
    )
    known = rows >= 0
    if not known.any():
        check.fail("LOG", f"{len(frame):,} events of others", f"some of {model.left_.called} entities of the model")
    if not known.all():
        common.note(f"{(~known).sum():,} of {len(frame):,} events are of unknown {model.left_.called} entities")
    r, p, shown, (users, place) = r[known], p[known], shown[known], np.unique(rows[known], return_inverse=True)
    found, scores = model.recommend(model.left_.names(users).tolist(), k, exclude_seen=not include_seen)
    ids, there = model.right_.names(shown), shown >= 0
    x = np.zeros(len(r))  # 0 for unknown right entities, which no list has
    x[there] = model.predict(model.left_.names(users[place][there]).tolist(), ids[there].tolist())
    targets = np.where(there, list_targets(found[place], ids), 0.0)
    predicted, expected = linear_rewards(r, x, scores[place])
    answer = estimates(
        r, p, targets, predicted=predicted, expected=expected, clip=clip, confidence=confidence, interval=interval,
        samples=samples, seed=seed,
    )  # fmt: skip
    facts = {name: value for name, value in vars(answer).items() if not isinstance(value, tuple)}
    columns, lines = ("estimate", "value", "standard_error", "low", "high"), answer.rows()
    estimated = [dict(zip(columns, line, strict=True)) for line in lines]
    return common.answer({"estimates": estimated, **facts}, Table(columns, lines), facts)


def recommend(
    run: Path,
    /,
    *,
    left: Texts = None,
    k: Annotated[int, Parameter(name=["--k", "-k"])] = 10,
    include_seen: Switch = False,
    exclude: Path | None = None,
    allow: Many = None,
    allow_pairs: Path | None = None,
    deny: Many = None,
    candidates: str = "all",
    where: str | None = None,
    boost: Texts = None,
    popularity: float = 0.0,
    diversity: float = 0.0,
    at_most: Texts = None,
    min_score: float | None = None,
    scores: str = "raw",
    left_features: Path | None = None,
    right_features: Path | None = None,
    right_table: Path | None = None,
    right_id: str | None = None,
    right_title: str | None = None,
    history: Texts = None,
    context: Texts = None,
    every: Annotated[bool, Parameter(name="--all", negative=(), show_default=False)] = False,
    out: Path | None = None,
    device: str | None = None,
    fresh: Switch = False,
    common: Common = Common(),
) -> int:
    """Recommend right entities for left entities.

    With --all the lists of all left entities go to a file, in bounded memory: one row for each answer, with left id,
    rank, right id and score. Until it is done its parts are in OUT.parts, and the same command goes on where it was
    killed.

    Args:
        run: Folder of a run, or a model file.
        left: Id of a left entity; may be repeated. With --left-features, an id in that table.
        k: Length of a list.
        include_seen: Recommend also right entities of the pairs of training and validation, or of the history.
        exclude: File of pairs that are not recommended, in the format of the run's data.
        allow: Recommend only these right entities: an id, several ids, or @FILE with one id in each line; may be
            repeated. Unknown ids are ignored and counted.
        allow_pairs: File of pairs, with the run's columns of ids: recommend only from the pairs of a left entity.
        deny: Never recommend these right entities; ids as in --allow. Write an id that begins with @ as @@.
        candidates: all: right entities of the model and of --right-features; trained: those of the training data.
        where: Only right entities whose columns of the right table match, such as "genre == 'Comedy' and year >= 1990".
        boost: COLUMN=WEIGHT: add weight times this column of the right table to scores; may be repeated.
        popularity: Exponent γ: add γ log(1 + n) to scores of right entities with n training pairs.
        diversity: From 0 to 1: by how much the score of an entity falls if it is similar to entities above it.
        at_most: COLUMN=COUNT: at most so many entities of a list share a value of this column of the right table; may
            be repeated.
        min_score: Leave out entities with lower scores.
        scores: raw, probability (of a model that gramtower calibrate has calibrated) or percentile (100 is the best).
        left_features: Table of new left entities, for models fitted with --left-features: all its rows, or --left.
        right_features: Table of right entities, for models fitted with --right-features: new ones are ranked too.
        right_table: Table of right entities, joined by id, for titles, --where, --boost and --at-most [default:
            --right-features, or the table that the model was fitted with].
        right_id: Its column of ids [default: called as in the run, or id].
        right_title: Its column that names an entity [default: title, name or label].
        history: Right id of a new left entity, for models fitted with --history; may be repeated, the newest last.
        context: COLUMN=VALUE: the context of --left, for models fitted with --context; may be repeated. Columns that
            are not given, and values that training did not have, count as missing.
        every: For all left entities of the model; needs --out.
        out: With --all, the file to write: .parquet, .csv or .tsv.
        device: With --all, where scores are made: auto, cpu or cuda. [default: auto]
        fresh: With --all, begin again where an earlier run left parts.
    """
    if every:
        described = (("--left-features", left_features), ("--history", history), ("--context", context))
        for name, value in (("--left", left), *described):
            if value is not None:
                check.fail(name, "given with --all", "one of them")
        if out is None:
            check.fail("--out", "none", "with --all, the file to write: .parquet, .csv or .tsv")
    elif out is not None or device is not None or fresh:
        check.fail("--out, --device, --fresh", "given", "nothing: only with --all")
    elif left_features is None and (left is None) == (history is None):
        expected = "only --left, only the description of a new entity, or --all"
        check.fail("--left, --left-features, --history", "both" if left else "none", expected)
    model, settings = reading.open_model(run)
    options: dict[str, Any] = {"exclude_seen": not include_seen, "candidates": candidates}
    for name, ids in (("deny", deny), ("allow", allow)):
        options[name] = keys_of(model, "right", listed(f"--{name}", ids))
    if exclude is not None:
        options["exclude"] = reading.read_like(settings, exclude, "--exclude", without=["context"])
    if allow_pairs is not None:
        if allow is not None:
            check.fail("--allow, --allow-pairs", "both", "one of them")
        without = ("context", "event", "event_weights", "value", "weight", "time", "threshold")
        options["allow"] = reading.read_like(settings, allow_pairs, "--allow-pairs", without=without)
    new = None if right_features is None else reading.rows_with_ids(model, right_features, "right", common.note)
    options |= {} if new is None else {"right_features": new}
    table = _right_table(model, settings, right_table or right_features, right_id, right_title, new, common)
    options |= {"popularity": popularity, "diversity": diversity, "min_score": min_score, "where": where}
    options["scores"] = scores
    for name, flag, given in (("boost", "--boost", boost), ("at_most", "--at-most", at_most)):
        if given:
            options[name] = dict(parse_option(text, flag, "COLUMN=NUMBER") for text in given)
    if where is not None or boost or at_most:
        if table is None:
            check.fail("--where, --boost, --at-most", "no table", "--right-table as well, which has the columns")
        options["table"] = table[2]
    if every and out is not None:
        return _write_all(model, out, k, {**options, "device": device or "auto", "fresh": fresh}, common)
    if left_features is not None:
        options["left_features"], asked = reading.new_rows(model, left_features, left, common.note)
    else:
        asked = left or [NEW]
    if history is not None:
        options["histories"] = [keys_of(model, "right", history)]
    if context is not None:
        for text in context:
            if "=" not in text:
                check.fail("--context", repr(text), "COLUMN=VALUE")
        options["context"] = {name: value for name, _, value in (text.partition("=") for text in context)}
    known = None if left_features is not None or history is not None else keys_of(model, "left", asked)
    found, values = model.recommend(known, k, **options)
    heads = model.fitted_.list_columns
    return _show("left", asked if known is None else known, heads, found, values, common, table)


def listed(flag: str, given: list[str] | None) -> list[str] | None:
    """The ids of a flag, of which ``@FILE`` stands for the lines of a file, and ``@@x`` for the id ``@x``."""
    found: list[str] = []
    for text in given or []:
        if not text.startswith("@") or text.startswith("@@"):
            found.append(text.removeprefix("@") if text.startswith("@@") else text)
            continue
        try:
            lines = as_path(text[1:]).read_text(encoding="utf-8-sig").splitlines()
        except UnicodeError:
            check.fail(flag, text, "a file of text in UTF-8 with one id in each line")
        found += [line for line in lines if line]
    return None if given is None else found


def _right_table(
    model: TwoTower, settings: Settings, path: Path | None, id: str | None, title: str | None, new: DataFrame | None,
    common: Common,
) -> _Titled | None:  # fmt: skip
    """The table with titles of right entities, its ids, those of the model and of the ``new`` rows, and its frame.

    Without a table of its own it is the one that the model was fitted with, if its file is still there.
    """
    given, fitted_with = path, settings.features.right_features
    if path is None and fitted_with is not None and as_path(fitted_with).exists():
        path, id = as_path(fitted_with), id or settings.features.right_id
    if path is None:
        return None
    try:
        frame = reading.read_frame("--right-table", path)
        column = reading.id_column("right", frame, id, settings.data.right)
        known = list(range(len(model.right_))) if model.right_.ids is None else model.right_.ids.tolist()
        name = next((part.table.id for part in model.right_.inputs.parts if part.table is not None), None)
        if new is not None and name in new.columns:
            keys = map(str, id_series("id", new[name]).drop_nulls().to_list())
            known = list(dict.fromkeys([*known, *as_known(keys, model.right_.ids)]))
        frame = frame.select(column, *(name for name in frame.columns if name not in (column, "id")))  # its ids first
        return EntityTable("--right-table", frame, column, as_objects(known), len(known), title), known, frame
    except ValueError as error:
        if given is not None:
            raise
        common.note(f"no titles: {error}")
        return None


def _write_all(model: TwoTower, out: Path, k: int, options: Mapping[str, Any], common: Common) -> int:
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
        common.note(f"{done:,} of {total:,} lists{rest}")
        said, first = now, done

    answers = model.recommend_all(out, k, progress=progress, **options)
    facts = {"lists": len(model.left_), "answers": answers, "seconds": time.monotonic() - start, "out": str(out)}
    return common.answer(facts)


def similar(
    run: Path,
    /,
    *,
    right: Texts = None,
    left: Texts = None,
    k: Annotated[int, Parameter(name=["--k", "-k"])] = 10,
    left_features: Path | None = None,
    right_features: Path | None = None,
    right_table: Path | None = None,
    right_id: str | None = None,
    right_title: str | None = None,
    common: Common = Common(),
) -> int:
    """List the most similar entities of the same side, by the cosine of their embeddings.

    Args:
        run: Folder of a run, or a model file.
        right: Id of a right entity; may be repeated.
        left: Id of a left entity, instead of --right; may be repeated.
        k: Length of a list.
        left_features: Table of left entities; new ones are compared too. Without --left, all its rows are queried.
        right_features: The same for right entities.
        right_table: Table of right entities, joined by id, for titles [default: the table that the model was fitted
            with].
        right_id: Its column of ids [default: called as in the run, or id].
        right_title: Its column that names an entity [default: title, name or label].
    """
    tables = {"left": left_features, "right": right_features}
    sides = [side for side, ids in (("left", left), ("right", right)) if ids is not None or tables[side] is not None]
    if len(sides) != 1:
        check.fail("--left, --right", "both" if sides else "neither", "one of them, or its table")
    model, settings = reading.open_model(run)
    side, asked = sides[0], left if sides[0] == "left" else right
    options: dict[str, Any] = {}
    path = tables[side]
    if path is not None:
        options[f"{side}_features"], names = reading.new_rows(model, path, None, silent, side)
        names = [name for name in names if name != reading.NO_ID]
    keys = keys_of(model, side, asked)
    found, scores = model.similar(keys, side, k, **options)
    new, titled = options.get("right_features"), None
    if side == "right":
        titled = _right_table(model, settings, right_table, right_id, right_title, new, common)
    heads = model.fitted_.list_columns[side == "right"], "similar"
    return _show(side, names if keys is None else keys, heads, found, scores, common, titled)


def keys_of(model: TwoTower, side: str, ids: list[str] | None) -> list[Key] | None:
    """Ids as the model knows them: text, whole numbers, or row numbers for a model that was fitted on a matrix."""
    if ids is None:
        return None
    combined = model.fitted_.combinations if side == "left" else None
    if combined is not None and not all(key in model.left_.index for key in ids):
        return as_known(ids, combined.users)
    return as_known(ids, model.left_.ids if side == "left" else model.right_.ids)


def _show(
    asked_name: str, asked: Sequence[Key], heads: tuple[str, str], found: NDArray[np.generic],
    scores: NDArray[np.float32], common: Common, table: _Titled | None = None,
) -> int:  # fmt: skip
    """One list for each entity asked about, with titles where there are some; places without an answer are left out.

    ``asked_name`` is the key of an entity in JSON; ``heads`` are the heads of the columns of ids.
    """
    titles = None if table is None else table[0].titles
    named = {} if table is None or titles is None else dict(zip(table[1], titles, strict=True))
    answers = [
        [
            {"id": key, **({"title": named.get(key)} if named else {}), "score": float(score)}
            for key, score in zip(row, values, strict=True)
            if np.isfinite(score)
        ]
        for row, values in zip(found.tolist(), scores.tolist(), strict=True)
    ]
    lists = [*zip(asked, answers, strict=True)]
    shown = [*(["title"] if named else []), "score"]
    rows: list[tuple[object, ...]] = []
    for key, answer in lists:
        rows += [
            (str(key) if rank == 1 else "", rank, str(one["id"]), *(one[name] for name in shown))
            for rank, one in enumerate(answer, start=1)
        ]
        if not answer:
            rows.append((str(key), None, None, *[None] * len(shown)))
    content = {"answers": [{asked_name: key, "results": answer} for key, answer in lists]}
    return common.answer(content, Table((heads[0], "rank", heads[1], *shown), rows))


def explain(
    run: Path,
    left: str,
    right: str,
    /,
    *,
    side: str = "left",
    k: Annotated[int, Parameter(name=["--k", "-k"])] = 10,
    left_features: Path | None = None,
    right_features: Path | None = None,
    history: Texts = None,
    common: Common = Common(),
) -> int:
    """Explain the score of a pair: the contributions of everything known about its left entity.

    Args:
        run: Folder of a run, or a model file.
        left: Id of a left entity; (new) for one that --left-features or --history describe.
        right: Id of a right entity.
        side: left, or right to explain by the features or pairs of the right entity.
        k: Number of parts to list, the largest first; the others are summed.
        left_features: Table with the row of LEFT, for models fitted with --left-features.
        right_features: The same for RIGHT, with --side right.
        history: Right id of a new left entity, for models fitted with --history; may be repeated.
    """
    k = check.count("-k", k)
    model, _ = reading.open_model(run)
    new = left == NEW
    keys = None if new else as_known([left], model.left_.ids)[0], as_known([right], model.right_.ids)[0]
    given: dict[str, Any] = {}
    for name, path, key in (("left", left_features, left), ("right", right_features, right)):
        if path is not None:
            chosen = None if new and name == "left" else [key]
            given[f"{name}_features"], _ = reading.new_rows(model, path, chosen, silent, name)
    if history is not None:
        given["histories"] = [keys_of(model, "right", history)]
    found = model.explain(*keys, side=side, **given).to_plain(k)
    rows = [(one["kind"], str(one["name"]), one["value"]) for one in found["contributions"]]
    if found["others"]["count"]:
        rows.append((f"{found['others']['count']} others", "", found["others"]["value"]))
    rows += [("base", "", found["base"]), ("remainder", "", found["remainder"])]
    facts = {"score": found["score"], "method": found["method"]}
    return common.answer({"left": keys[0], "right": keys[1], **found}, facts, Table(("part", "name", "adds"), rows))
