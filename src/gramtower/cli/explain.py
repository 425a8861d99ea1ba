"""``gramtower explain``: what carried the score of a pair."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from gramtower._util import checks as check
from gramtower.cli.features import new_rows
from gramtower.cli.folder import open_model
from gramtower.cli.options import Common
from gramtower.cli.output import print_facts, print_json, print_table
from gramtower.cli.query import Ids, keys_of

NEW = "(new)"


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
    history: Ids = None,
    common: Common | None = None,
) -> int:
    """Show what carried the score of a pair: the parts of what is known of its left entity, whose sum is the score.

    Args:
        run: Folder of a run, or a model file.
        left: Id of a left entity; (new) for one that --left-features or --history describe.
        right: Id of a right entity.
        side: left, or right to explain by what is known of the right entity.
        k: How many parts, the largest in size; the others are summed.
        left_features: Table with the row of LEFT, for models fitted with --left-features.
        right_features: The same for RIGHT, with --side right.
        history: Right id of a new left entity, for models fitted with --history; may be repeated.
        common: Output.
    """
    common, k = common or Common(), check.count("-k", k)
    model, _ = open_model(run)
    new = left == NEW
    keys = None if new else keys_of(model, "left", [left])[0], keys_of(model, "right", [right])[0]
    given: dict[str, Any] = {}
    for name, path, key in (("left", left_features, left), ("right", right_features, right)):
        if path is not None:
            chosen = None if new and name == "left" else [key]
            given[f"{name}_features"], _ = new_rows(model, path, chosen, True, name)
    if history is not None:
        given["histories"] = [keys_of(model, "right", history)]
    found = model.explain(*keys, side=side, **given).to_plain(k)
    if common.json:
        print_json({"left": keys[0], "right": keys[1], **found})
        return 0
    print_facts({"score": found["score"], "method": found["method"]})
    rows = [(one["kind"], str(one["name"]), one["value"]) for one in found["contributions"]]
    if found["others"]["count"]:
        rows.append((f"{found['others']['count']} others", "", found["others"]["value"]))
    rows += [("base", "", found["base"]), ("remainder", "", found["remainder"])]
    print_table(("part", "name", "adds"), rows)
    return 0
