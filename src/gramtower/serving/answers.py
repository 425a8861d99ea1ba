"""Answers of the routes that the page uses: search, entity, explanation, map, models and run."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gramtower._util.files import plain
from gramtower.data.ids import Key
from gramtower.serving.batching import places
from gramtower.serving.messages import Refused, shown
from gramtower.serving.request_checks import Features
from gramtower.serving.served_entities import Entities, project
from gramtower.serving.snapshot import Histories, NewFeatures, Snapshot

_HISTORY = 200  # pairs of an entity that are shown
_RECORDS = 400  # points of a curve
_GROUPS = 11  # values of a column with a colour
_LABELS = 40  # entities with a label on the map


def search(snapshot: Snapshot, side: str, text: str, most: int) -> dict[str, object]:
    """Entities whose id or title contains a text."""
    this = snapshot.side(side)
    return {"model": snapshot.name, "results": titled(this, np.array(this.search(text, most), np.int64))}


def titled(this: Entities, rows: NDArray[np.int64]) -> list[dict[str, object]]:
    """Entities with their titles and numbers of pairs."""
    shown = places(this, rows)
    titles = None if this.table is None else this.table.titles
    for one, row in zip(shown, rows.tolist(), strict=True):
        one["title"] = None if titles is None else titles[row]
        one["pairs"] = int(this.degrees[row])
    return shown


def entity(snapshot: Snapshot, side: str, key: Key) -> dict[str, object]:
    """One entity with its columns and its observed pairs."""
    this, other = snapshot.side(side), snapshot.side("right" if side == "left" else "left")
    rows = this.rows([key])
    row = int(rows[0])
    return {
        "model": snapshot.name,
        **titled(this, rows)[0],
        "side": side,
        "columns": {} if this.table is None else this.table.cells(rows)[0],
        "history": titled(other, snapshot.observed_with(side, row, _HISTORY)),
    }


def explain(
    snapshot: Snapshot, left: Key | None, right: Key, features: NewFeatures, histories: Histories, most: int
) -> dict[str, object]:
    """The explanation of a score, with the titles of history entries."""
    found = snapshot.explain(left, right, features, histories)
    answer = found.to_plain(most)
    titles = None if snapshot.right.table is None else snapshot.right.table.titles
    for one in answer["contributions"]:
        if titles is not None and one["kind"] == "history":
            one["title"] = titles[snapshot.right.row(one["name"])]
    return {"model": snapshot.name, "left": left, "right": right, **answer}


def map_of(snapshot: Snapshot, side: str, column: str | None) -> dict[str, object]:
    """Positions of entities, and for a column its most frequent values, for colours."""
    this = snapshot.side(side)
    drawn = snapshot.maps.get(side) or snapshot.maps.setdefault(side, project(this))
    answer: dict[str, Any] = {
        "model": snapshot.name,
        "side": side,
        "shares": drawn.shares,
        "entities": len(this),
        "labels": min(_LABELS, len(drawn.rows)),
        "ids": this.names(drawn.rows),
        "x": _rounded(drawn.places[:, 0]),
        "y": _rounded(drawn.places[:, 1]),
        "columns": [] if this.table is None else [c for c in this.table.columns if this.table.kinds[c] != "skip"],
    }
    titles = None if this.table is None else this.table.titles
    answer["titles"] = None if titles is None else [titles[row] for row in drawn.rows.tolist()]
    if column is not None:
        if this.table is None:
            raise Refused(422, f"column: got {shown(column)}, but this side has no table")
        cells = this.table.groups(column, drawn.rows)
        counts: dict[str, int] = {}
        for cell in cells:
            if cell is not None:
                counts[cell] = counts.get(cell, 0) + 1
        names = sorted(counts, key=lambda name: (-counts[name], name))[:_GROUPS]
        places_of = {name: place for place, name in enumerate(names)}
        answer |= {"groups": names, "group": [places_of.get(cell, -1) if cell is not None else -1 for cell in cells]}
    return answer


def summary(snapshot: Snapshot) -> dict[str, object]:
    """Sizes and names of a model."""
    facts = snapshot.index_facts
    return {
        "name": snapshot.name,
        "left": len(snapshot.left),
        "right": len(snapshot.right),
        "names": dict(zip(("left", "right"), snapshot.model.fitted_.names, strict=True)),
        "pairs": int(snapshot.model.trained_.nnz),
        "dim": int(snapshot.left.embeddings.shape[1]),
        "histories": snapshot.takes_histories,
        "index": None
        if facts is None
        else {"kind": facts.kind, "k": facts.k, "recall": facts.recall, "bytes": facts.bytes},
        "tables": {
            side: None
            if (table := snapshot.side(side).table) is None
            else {"columns": table.kinds, "title": table.title, "entities": table.joined}
            for side in ("left", "right")
        },
        "notes": snapshot.notes,
    }


def run(snapshot: Snapshot) -> dict[str, object]:
    """Counts, settings and training history."""
    model = snapshot.model
    records = model.history_
    step = max(1, -(-len(records) // _RECORDS))
    kept = [*records[:-1:step], records[-1]] if records else []
    settings = {
        name: value
        for name, value in model.with_changes().get_params().items()
        if name not in ("towers", "verbose") and value is not None and not isinstance(value, np.ndarray)
    }
    degrees = {
        side: [float(np.quantile(snapshot.side(side).degrees, at)) for at in (0.0, 0.25, 0.5, 0.75, 1.0)]
        for side in ("left", "right")
    }
    return plain(  # type: ignore[no-any-return]
        {
            **summary(snapshot),
            "model": str(model),
            "settings": settings,
            "stopped": getattr(model, "message_", None),
            "degrees": degrees,
            "history": {
                name: [getattr(record, name, None) for record in kept]
                for name in ("iteration", "seconds", "value", "gradient_norm", "metric")
            },
            "metric": settings.get("metric"),
            "evaluation": snapshot.evaluation,
        }
    )


def features(name: str, given: Features | None) -> NewFeatures:
    """Features of a request in the form that the model takes: columns, or an array of numbers."""
    if given is None:
        return None
    if isinstance(given, dict):
        lengths = {len(cells) for cells in given.values()}
        if len(lengths) != 1:
            raise Refused(422, f"{name}: got columns of {sorted(lengths)[:5]} cells, expected equal numbers")
        return given
    rows = [row for row in given if isinstance(row, dict)]
    if len(rows) == len(given):
        columns = dict.fromkeys(column for row in rows for column in row)
        return {column: [row.get(column) for row in rows] for column in columns}
    widths = {len(row) for row in given}
    if len(widths) != 1:
        raise Refused(422, f"{name}: got rows of {sorted(widths)[:5]} numbers, expected equal numbers")
    with np.errstate(over="ignore"):
        array = np.array(given, np.float64).astype(np.float32)
    if not np.isfinite(array).all():
        raise Refused(422, f"{name}: got numbers that overflow float32, expected smaller ones")
    return array


def _rounded(values: NDArray[np.float32]) -> list[float]:
    return [float(f"{value:.5g}") for value in values.tolist()]
