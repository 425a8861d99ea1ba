"""The app: its commands, and one place where errors become a line and an exit code (cli/errors.py).

0: fine. 1: the run failed. 2: bad input. 130: interrupted by Ctrl-C. Checked by tests/test_cli.py.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import traceback
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import torch
from cyclopts import App, CycloptsError, Parameter

from gramtower import _checks as check
from gramtower.cli.benchmark import benchmark
from gramtower.cli.compare import compare
from gramtower.cli.convert import convert
from gramtower.cli.cross_validate import cross_validate
from gramtower.cli.errors import explain
from gramtower.cli.fit import fit
from gramtower.cli.index import index
from gramtower.cli.info import info
from gramtower.cli.options import Common
from gramtower.cli.output import help_console, note, print_json, show_warning
from gramtower.cli.partition import partition
from gramtower.cli.query import evaluate, recommend, similar
from gramtower.cli.report import report
from gramtower.cli.serve import serve
from gramtower.cli.split import split
from gramtower.cli.streams import abandon_output, visible
from gramtower.cli.tune import tune
from gramtower.cli.update import update
from gramtower.data.left_out import LeftOutWarning

INTERRUPTED = 130  # 128 + SIGINT, as shells have it
MOST_THREADS = 4096
LONGEST = 1000  # characters of an error


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
    from gramtower import demo as packages

    asked = None if uses is None else [[tool for tool in re.split(r"[,\s]+", text) if tool] for text in uses]
    found = packages.run(seconds=seconds, seed=seed, out=out, verbose=not common.quiet, uses=asked)
    if common.json:
        print_json(found)
    else:
        packages.show(found)
    return 0


app = App(
    name="gramtower",
    help="Two-tower nonlinear embeddings learned from all pairs, observed and unobserved.",
    version=version("gramtower"),
    help_epilogue="Exit codes: 0 fine, 1 the run failed, 2 bad input, 130 interrupted.",
)
for command in (
    fit, update, split, partition, evaluate, cross_validate, recommend, similar, info, compare, benchmark, report,
    convert, tune, index, serve, demo,
):  # fmt: skip
    app.command(command)


def run(tokens: Sequence[str]) -> int:
    """Run a command line; returns the exit code, and prints errors as one line on standard error."""
    code = _run(tokens)
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output has gone
        abandon_output()
        return code or 1
    except OSError as error:
        abandon_output()
        return code or _error(error, name="standard output: ")
    return code


def _run(tokens: Sequence[str]) -> int:
    debug = "--debug" in tokens or os.environ.get("GRAMTOWER_DEBUG", "0") not in ("", "0")
    try:
        for token in tokens:
            if not _is_text(token):
                check.fail("argument", repr(token), "text in UTF-8 without NUL characters")
        console = help_console()
        command, bound, ignored = app.parse_args(
            list(tokens), exit_on_error=False, print_error=False, console=console, error_console=console
        )
    except CycloptsError as error:
        if debug:
            traceback.print_exception(error)
        return _say(str(error), 2)
    except Exception as error:
        return _error(error, debug)
    common = bound.arguments.get("common") or Common()
    if "tokens" in ignored:
        bound.arguments["tokens"] = tuple(tokens)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", LeftOutWarning)
            warnings.showwarning = show_warning  # type: ignore[assignment]
            if common.threads is not None:
                torch.set_num_threads(check.count("threads", common.threads, most=MOST_THREADS))
            return int(command(*bound.args, **bound.kwargs) or 0)
    except KeyboardInterrupt as interrupt:
        return _say(f"interrupted; {str(interrupt) or 'files that were there are as they were'}", INTERRUPTED)
    except BrokenPipeError:  # the reader of our output has gone
        abandon_output()
        return 1
    except SystemExit as end:  # rich's answer to a broken pipe
        return end.code if isinstance(end.code, int) else 1
    except Exception as error:
        return _error(error, debug)


def _is_text(token: str) -> bool:
    """Whether an argument is text, in a locale without UTF-8 too, where Python hands its bytes on as surrogates."""
    try:
        token.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError:
        return False
    return "\0" not in token


def _error(error: Exception, debug: bool = False, name: str = "") -> int:
    if debug:
        traceback.print_exception(error)
    text, code = explain(error)
    return _say(name + text, code)


def _say(text: str, code: int) -> int:
    line = visible(" ".join(text.split()))
    if len(line) > LONGEST:
        line = f"{line[: LONGEST // 2]} ... {line[-LONGEST // 2 :]}"
    with contextlib.suppress(OSError):  # nobody reads standard error
        note(f"error: {line}")
    return code
