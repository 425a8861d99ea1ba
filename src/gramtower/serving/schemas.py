"""The bodies of requests, checked by pydantic: types exactly as written here, no further fields, finite numbers.

Lengths are bounded by :class:`~gramtower.serving.limits.Limits` when a body is taken up, so that messages name the
bound.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gramtower.serving.errors import Refused, shown

_LONGEST = 10_000  # characters of an id
Id = int | Annotated[str, Field(max_length=_LONGEST)]
Text = Annotated[str, Field(max_length=1_000)]
Cell = str | int | float | bool | list[str] | list[int | float] | None
Features = list[dict[str, Cell]] | dict[str, list[Cell]] | list[list[float]]
Value = str | int | float | bool
Wanted = Value | list[Value] | dict[str, float]
Side = Literal["left", "right"]


class Body(BaseModel):
    """What all have."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    model: Text | None = Field(None, description="Name of a model; the first one served without it.")


class Recommend(Body):
    """The k best right entities for left ones, known by id, or new ones known by features, history or both."""

    left: list[Id] | None = Field(None, description="Ids of left entities; not with left_features or histories.")
    k: int = Field(10, ge=1, description="Length of each list.")
    exclude_seen: bool = Field(True, description="Leave out what was observed in training, or is in the history.")
    allow: list[Id] | None = Field(
        None, description="Only these right ids. Unknown ones are ignored; the answer counts them as unknown_allowed."
    )
    deny: list[Id] | None = Field(
        None, description="Never these right ids. Unknown ones are ignored; the answer counts them as unknown_denied."
    )
    filter: dict[str, Wanted] | None = Field(
        None,
        description="Columns of the right table: a value, several of which any, or min and max. All must match.",
        examples=[{"genre": "Comedy", "year": {"min": 1990}}],
    )
    left_features: Features | None = Field(
        None, description="Features of new left entities: rows as objects, columns as lists, or rows of numbers."
    )
    histories: list[list[Id]] | None = Field(None, description="Right ids of each new left entity.")
    columns: bool | list[str] = Field(False, description="Columns of the right table to answer with; true for all.")
    stream: bool = Field(False, description="Answer with one line of JSON for each entity, as they are computed.")


class Similar(Body):
    """The k entities of the same side whose embeddings point most alike (cosine)."""

    ids: list[Id]
    side: Side = "right"
    k: int = Field(10, ge=1)
    together: bool = Field(False, description="One list, of what is most like all of them (their mean direction).")
    columns: bool | list[str] = False
    stream: bool = False


class Score(Body):
    """p_iᵀq_j of pairs, element by element."""

    left: list[Id]
    right: list[Id]


class Embed(Body):
    """Embeddings of known ids, or of new entities."""

    ids: list[Id] | None = None
    side: Side = "left"
    left_features: Features | None = None
    right_features: Features | None = None
    histories: list[list[Id]] | None = None


class Explain(Body):
    """What carried the score of a pair: parts of what is known of its left entity, whose sum is the score."""

    left: Id | None = Field(None, description="Id of a left entity; not needed with left_features or histories.")
    right: Id = Field(description="Id of a right entity.")
    left_features: Features | None = Field(
        None, description="The row that describes the left entity, where the model sees features."
    )
    histories: list[list[Id]] | None = Field(None, description="One list: the right ids of a new left entity.")
    most: int = Field(20, ge=1, le=1000, description="Parts to answer with, the largest in size; others are summed.")


class Search(Body):
    """Entities whose id or title holds a text; those that begin with it come first."""

    text: Text = ""
    side: Side = "right"
    most: int = Field(20, ge=1, le=100)


class Entity(Body):
    """What is known of one entity: columns of its table, and the pairs it was observed in."""

    id: Id
    side: Side = "right"


Kind = TypeVar("Kind", bound=Body)
_DEEPEST = 3  # parts of a place: an argument, a row and a column
_CELLS = "text, a number, true, false, null, a list of numbers or a list of text"
_FEATURES = f"rows as objects, columns as lists, or rows of numbers; a cell is {_CELLS}"
_EXPECTED = {
    "left_features": _FEATURES,
    "right_features": _FEATURES,
    "filter": "for each column a value, a list of values, or numbers min and max",
}


def parse(kind: type[Kind], body: bytes) -> Kind:
    """A body.

    Raises:
        Refused: 422 with the first fault, and how many there are.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False)
        if faults[0]["type"] == "json_invalid":
            raise Refused(422, f"body: {_lower(faults[0]['msg'])}") from error
        places = [_place(json.loads(body), fault) for fault in faults]
        place, given = max(places, key=lambda one: len(one[0]))  # of the types a value may have, what fits furthest
        texts = [_lower(fault["msg"]) for fault, one in zip(faults, places, strict=True) if one[0] == place]
        expected = " or ".join(dict.fromkeys(texts))
        if place[0] in _EXPECTED:
            cell = place[0] != "filter" and any(isinstance(part, str) for part in place[1:])
            expected = f"expected {_CELLS if cell else _EXPECTED[place[0]]}"
        others = len({one[0][0] for one in places}) - 1
        more = f" (and {others} more)" if others else ""
        name = ".".join(str(part)[:60] for part in place)
        raise Refused(422, f"{name}: got {shown(given)}, {expected}{more}") from error


def _place(given: Any, fault: Any) -> tuple[tuple[Any, ...], Any]:
    """Where in a body a fault is, without the names of types that pydantic puts between, and what is there."""
    place: list[Any] = []
    for part in fault["loc"]:
        inside = part in given if isinstance(given, dict) else isinstance(given, list) and isinstance(part, int)
        if inside and len(place) < _DEEPEST:
            given = given[part]
            place.append(part)
        elif not place:
            place.append(part)
    return tuple(place) or ("body",), given


def schema(kind: type[Body]) -> dict[str, Any]:
    """The body of an operation, for OpenAPI."""
    described = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": described}}}}


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
