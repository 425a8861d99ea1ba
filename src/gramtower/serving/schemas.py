"""The bodies of requests, checked by pydantic: types exactly as written here, no further fields, finite numbers.

Lengths are bounded by :class:`~gramtower.serving.limits.Limits` when a body is taken up, so that messages name the
bound. Checked by tests/test_serving.py.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gramtower.serving.errors import Refused, shown

_LONGEST = 10_000  # characters of an id
Id = int | Annotated[str, Field(max_length=_LONGEST)]
Text = Annotated[str, Field(max_length=1_000)]
Cell = str | int | float | bool | list[str] | None
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


def parse(kind: type[Kind], body: bytes) -> Kind:
    """A body.

    Raises:
        Refused: 422 with the first fault, and how many there are.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False)
        first = faults[0]
        where = ".".join(str(part)[:60] for part in first["loc"]) or "body"
        given = "" if first["type"] == "json_invalid" else f"got {shown(first.get('input'))}, "
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise Refused(422, f"{where}: {given}{_lower(first['msg'])}{more}") from error


def schema(kind: type[Body]) -> dict[str, Any]:
    """The body of an operation, for OpenAPI."""
    described = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": described}}}}


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
