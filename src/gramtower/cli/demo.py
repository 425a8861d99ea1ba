"""``gramtower demo``: what comes with the library, learned and shown."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from gramtower import demo as packages
from gramtower.cli.options import Common
from gramtower.cli.output import print_json


def demo(
    *,
    uses: Annotated[list[str] | None, Parameter(negative=())] = None,
    seconds: float | None = None,
    seed: int = 0,
    out: Path | None = None,
    common: Common | None = None,
) -> int:
    """Learn from npm packages what a package will need by the tools that it uses, and say it for new ones.

    Args:
        uses: Tools of a package to ask about, such as "gulp, browserify"; may be repeated.
        seconds: Training time of each of the two models.
        seed: For initial weights and the split.
        out: Folder for pictures and the model.
        common: Output.
    """
    common = common or Common()
    asked = None if uses is None else [[tool for tool in re.split(r"[,\s]+", text) if tool] for text in uses]
    found = packages.run(seconds=seconds, seed=seed, out=out, verbose=not common.quiet, uses=asked)
    if common.json:
        print_json(found)
    else:
        packages.show(found)
    return 0
