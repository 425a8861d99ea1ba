"""The app: its commands, and one place where errors become a line and an exit code.

0: fine. 1: the run failed. 2: bad input. 130: interrupted by Ctrl-C. Checked by tests/test_cli.py.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import torch
from cyclopts import App, CycloptsError

from gramtower import _checks as check
from gramtower.cli.compare import compare
from gramtower.cli.convert import convert
from gramtower.cli.fit import fit
from gramtower.cli.info import info
from gramtower.cli.options import Common
from gramtower.cli.output import note
from gramtower.cli.partition import partition
from gramtower.cli.query import evaluate, recommend, similar
from gramtower.cli.report import report
from gramtower.cli.tune import tune
from gramtower.data.left_out import LeftOutWarning

INTERRUPTED = 130  # 128 + SIGINT, as shells have it
BAD_INPUT = (ValueError, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)


def demo(*, seconds: float | None = None, seed: int = 0, out: Path | None = None, common: Common | None = None) -> int:
    """Train on a small set that comes with the library and show what the model found.

    Args:
        seconds: Training time.
        seed: For initial weights and the split.
        out: Folder for pictures and the model.
        common: Output; --json and --quiet do not apply.
    """
    try:
        from gramtower.demo import run as run_demo
    except ModuleNotFoundError as error:
        raise ImportError(f"the demo is not part of this installation ({error.name} is missing)") from error
    run_demo(seconds=seconds, seed=seed, out=out)
    return 0


app = App(
    name="gramtower",
    help="Two-tower nonlinear embeddings learned from all pairs, observed and unobserved.",
    version=version("gramtower"),
    help_epilogue="Exit codes: 0 fine, 1 the run failed, 2 bad input, 130 interrupted.",
)
for command in (fit, partition, evaluate, recommend, similar, info, compare, report, convert, tune, demo):
    app.command(command)


def run(tokens: Sequence[str]) -> int:
    """Run a command line; returns the exit code, and prints errors as one line on standard error."""
    try:
        command, bound, ignored = app.parse_args(list(tokens), exit_on_error=False, print_error=False)
    except CycloptsError as error:
        return _error(error, 2)
    common = bound.arguments.get("common") or Common()
    if "tokens" in ignored:
        bound.arguments["tokens"] = tuple(tokens)
    try:
        if common.threads is not None:
            torch.set_num_threads(check.count("threads", common.threads))
        with warnings.catch_warnings():
            warnings.simplefilter("always", LeftOutWarning)
            warnings.showwarning = lambda message, *_, **__: _warn(message)
            return int(command(*bound.args, **bound.kwargs) or 0)
    except KeyboardInterrupt as interrupt:
        kept = str(interrupt) or "files that were there are as they were"
        print(f"error: interrupted; {kept}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except BAD_INPUT as error:
        return _error(error, 2, common.debug)
    except (ImportError, OSError, MemoryError) as error:
        return _error(error, 1, common.debug)
    except Exception as error:
        return _error(error, 1, common.debug, f"{type(error).__name__}: ")


def _warn(message: Warning | str) -> None:
    """One line on standard error, of the first process only where there are several."""
    if os.environ.get("RANK", "0") == "0":
        note(f"warning: {' '.join(str(message).split())}")


def _error(error: Exception, code: int, debug: bool = False, kind: str = "") -> int:
    if debug:
        traceback.print_exception(error)
    print(f"error: {kind}{' '.join(str(error).split())}", file=sys.stderr)
    return code
