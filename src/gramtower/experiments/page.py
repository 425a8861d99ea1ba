"""Parts that the pages of all runs share: figures, commands, settings and machines."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from html import escape
from typing import TYPE_CHECKING

from gramtower._util import html
from gramtower.experiments.figures import as_svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE, SUMMARY = "report.html", "summary.json"
#: Cores of other processes that are worth a warning next to measured times.
BUSY = 0.1

table = partial(html.table, longest=None)


def drawn(make: Callable[[], Figure], caption: str, problems: list[str]) -> str:
    """Return a figure as HTML; without matplotlib a line that says how to get it, once for all figures of a page."""
    try:
        return html.picture(as_svg(make()), caption)
    except ImportError as error:
        problem = f"no figures: {error}"
        if problem in problems:
            return ""
        problems.append(problem)
        return f"<p>{escape(str(error))}</p>"


def circumstances(
    commands: Sequence[str], settings: Mapping[str, Mapping[str, object]], machines: Mapping[str, Mapping[str, object]]
) -> list[str]:
    """Return the end of a page: command lines, settings in groups, and the machines that runs ran on."""
    found = ["<h2>Command</h2>", *(f"<pre>{escape(command)}</pre>" for command in commands)] if commands else []
    groups = {name: {k: v for k, v in part.items() if v is not None} for name, part in settings.items()}
    if any(groups.values()):
        found += ["<h2>Settings</h2>", *(html.listing(name, part) for name, part in groups.items() if part)]
    places: dict[str, list[str]] = {}
    for name, environment in machines.items():
        places.setdefault(json.dumps({k: v for k, v in environment.items() if k != "date"}), []).append(name)
    if places:
        found.append("<h2>Machine</h2>")
    if len(places) > 1:
        found.append('<p class="warn">Runs were on different machines or versions; their times do not compare.</p>')
    return [*found, *(html.listing(", ".join(names), machines[names[0]]) for names in places.values())]
