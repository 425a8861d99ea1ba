"""The program ``gramtower``: its commands, and one place where errors and signals become a line and an exit code.

A command's module is imported when it is asked for: the list of commands, ``--version`` and misspelt commands need
neither torch nor what commands are made of (tests/test_imports.py). cyclopts is imported after :func:`main` has found
that it is installed.

Exit codes: 0 success; 1 the run failed; 2 bad input, which means a ``ValueError`` or a file that is missing or
unusable; 130 interrupted by Ctrl-C; 143 by SIGTERM, which Kubernetes, Slurm and spot machines send. Any other exception
is an internal error, which the user is asked to report.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from gramtower._util import checks as check
from gramtower._util.checks import LeftOutWarning, need
from gramtower._util.files import as_path
from gramtower.cli.output import abandon_output, console_of, note, prepare_streams, show_warning, visible
from gramtower.distributed.rendezvous import started_among_several

if TYPE_CHECKING:
    from cyclopts import App

MOST_THREADS = 4096
LONGEST = 1000  # characters of an error
_received: list[int] = []  # signals


def main() -> None:
    """Run the command line on the arguments given; exits with 0, 1 (failed), 2 (bad input), 130 or 143 (signals)."""
    prepare_streams()
    interrupt_on_sigterm()
    try:
        need("cyclopts", "the command line")
        need("rich", "the command line")
        code = run(sys.argv[1:])
    except ImportError as error:
        code = _say(str(error), 1)
    except KeyboardInterrupt:  # before a command began, or once more while it ended
        word, code = interruption()
        _say(word, code)
    if started_among_several():
        # skips the interpreter's shutdown: gloo's threads, still freeing tensors, sometimes abort it (pytorch issue
        # 190489), and torchrun would count a run as failed whose model is written
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise SystemExit(code)


def interrupt_on_sigterm() -> None:
    """Raise KeyboardInterrupt in the main thread when SIGTERM comes, unless the caller had it ignored.

    Further ones are ignored, so that none of them cuts short what the first began; Ctrl-C still ends the process.
    """
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(number: int, frame: object) -> NoReturn:
    _received.append(number)
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def was_terminated() -> bool:
    """Whether SIGTERM has come."""
    return bool(_received)


def interruption() -> tuple[str, int]:
    """The word for the signal that interrupted the program, and its exit code: 128 and the signal's number."""
    return ("stopped by SIGTERM", 143) if _received else ("interrupted", 130)


COMMANDS = {
    "fit": ("fit_command", "Learn a model from observed pairs."),
    "update": ("fit_command", "Add pairs to a fitted model and continue training for a few iterations."),
    "calibrate": ("fit_command", "Fit probabilities of scores to held-out pairs, for recommend --scores probability."),
    "split": ("data_commands", "Split pairs into training and test files."),
    "partition": (
        "data_commands",
        "Write pairs as Parquet parts, each left entity in one part, for a fit by several processes.",
    ),
    "evaluate": ("query", "Measure the ranking of held-out pairs."),
    "off-policy": ("query", "Estimate the reward of lists from a log of entities shown with known probabilities."),
    "cross-validate": (
        "experiments",
        "Measure settings by cross-validation: as many fits as folds, each tested on pairs that it has not seen.",
    ),
    "recommend": ("query", "Recommend right entities for left entities."),
    "similar": ("query", "List the most similar entities of the same side, by the cosine of their embeddings."),
    "explain": ("query", "Explain the score of a pair: the contributions of everything known about its left entity."),
    "info": ("info", "Describe a model or a file of pairs: counts, pairs per entity, settings."),
    "compare": (
        "compare",
        "Run several optimizers from the same start, one after the other, and report their convergence over time.",
    ),
    "benchmark": (
        "experiments",
        "Compare models: popularity, item-knn, ease, als, linear and hidden towers of gramtower, and your own configs.",
    ),
    "report": ("experiments", "Build report.html of a fit, a search, a comparison or a benchmark from its folder."),
    "convert": ("data_commands", "Convert pairs of any format to a CSV or Parquet table, which is read faster."),
    "tune": ("experiments", "Choose a model's settings by how well they rank a validation part of the training data."),
    "index": ("serve", "Build an approximate index over the right entities, for models too large for exact lists."),
    "export": ("info", "Export a model: its towers as networks, or its embeddings with their ids."),
    "serve": ("serve", "Serve models over HTTP, with a page to look around in; SIGHUP reads their files again."),
    "demo": ("info", "Demo: recommend npm dependencies, including for packages not seen in training."),
}  # name: its module, and the first line of its help, so that the list of commands needs none of the modules


def make_app(*names: str) -> App:
    """Build the app; only the named commands are imported, the others have just a name and a line of help."""
    from cyclopts import App

    made = App(
        name="gramtower",
        help="Two-tower nonlinear embeddings learned from all pairs, observed and unobserved.",
        version=version("gramtower"),
        help_epilogue="Exit codes: 0 success, 1 the run failed, 2 bad input, 130 stopped by Ctrl-C, 143 by SIGTERM.",
    )
    for name, (module, line) in COMMANDS.items():
        if name in names:
            made.command(getattr(import_module(f"gramtower.cli.{module}"), name.replace("-", "_")), name=name)
        else:
            made.command(_named_only, name=name, help=line)
    return made


def _named_only() -> None:
    """Stand in for a command that is not imported."""


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
        console = console_of(folded=True)
        command, bound, ignored = make_app(*tokens[:1]).parse_args(
            list(tokens), exit_on_error=False, print_error=False, console=console, error_console=console
        )
        for name, value in bound.arguments.items():
            if isinstance(value, Path):
                bound.arguments[name] = as_path(value)  # URLs are paths as well
        if "tokens" in ignored:
            bound.arguments["tokens"] = tuple(tokens)
        with warnings.catch_warnings():
            warnings.simplefilter("always", LeftOutWarning)
            warnings.showwarning = show_warning  # type: ignore[assignment]
            threads = getattr(bound.arguments.get("common"), "threads", None)
            if threads is not None:
                import torch  # loaded by the command already

                torch.set_num_threads(check.count("threads", threads, most=MOST_THREADS))
            return int(command(*bound.args, **bound.kwargs) or 0)
    except KeyboardInterrupt as interrupt:
        word, code = interruption()
        return _say(f"{word}; {str(interrupt) or 'existing files are unchanged'}", code)
    except BrokenPipeError:  # the reader of our output has gone
        abandon_output()
        return 1
    except SystemExit as end:  # rich's answer to a broken pipe
        return end.code if isinstance(end.code, int) else 1
    except Exception as error:
        return _error(error, debug)


def _is_text(token: str) -> bool:
    """Whether an argument is UTF-8 text; in other locales Python passes its bytes on as surrogates."""
    try:
        token.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError:
        return False
    return "\0" not in token


def _error(error: Exception, debug: bool = False, name: str = "") -> int:
    if debug:
        traceback.print_exception(error)
    text, code = error_text(error)
    return _say(name + text, code)


def _say(text: str, code: int) -> int:
    line = visible(" ".join(text.split()))
    if len(line) > LONGEST:
        line = f"{line[: LONGEST // 2]} ... {line[-LONGEST // 2 :]}"
    with contextlib.suppress(OSError):  # standard error is closed
        note(f"error: {line}")
    return code


_ROOT = Path(__file__).parents[1]
_FAILURES = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EPIPE}
_WORDS = {
    errno.ENOENT: "no such file or folder",
    errno.EEXIST: "exists already, and is not a folder",
    errno.ENOTDIR: "a part of this path is a file, not a folder",
    errno.EISDIR: "is a folder, expected a file",
    errno.EACCES: "no permission to read or write it",
    errno.EPERM: "no permission to read or write it",
    errno.EROFS: "the file system is read-only",
    errno.ENAMETOOLONG: "the name is too long",
    errno.ENOSPC: "no space left on the disk",
    errno.EDQUOT: "the disk quota is used up",
}
_MEMORY = re.compile(r"out of memory|can.t allocate memory|not enough memory|unable to allocate", re.IGNORECASE)


def error_text(error: BaseException) -> tuple[str, int]:
    """The line and the exit status for an exception."""
    from cyclopts import CycloptsError, MissingArgumentError

    if isinstance(error, MissingArgumentError) and error.argument is not None and error.command_chain:
        name, command = error.keyword or error.argument.name, " ".join(error.command_chain)
        return f"{name}: missing value; see gramtower {command} --help", 2
    if isinstance(error, CycloptsError):
        return str(error), 2
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _MEMORY.search(str(error))):
        detail = f": {error}" if str(error) and _ours(error) else "; try a smaller --dim, --hidden or --memory-budget"
        return f"not enough memory{detail}", 1
    if isinstance(error, RecursionError):
        return "the input is nested too deeply", 2
    if isinstance(error, UnicodeEncodeError):
        return f"got {error.object!r}, expected text that UTF-8 can hold", 2
    if isinstance(error, OSError):
        return _about_file(error)
    if isinstance(error, ImportError):
        return str(error), 1
    if isinstance(error, ValueError) and _ours(error):
        return str(error), 2
    return f"internal error in gramtower{_place(error)}; please report it with the command and the output of --debug", 1


def _about_file(error: OSError) -> tuple[str, int]:
    if error.errno is None:  # raised with its own message
        return str(error), 2
    words = _WORDS.get(error.errno) or (error.strerror or "cannot be read or written").lower()
    name = error.filename2 if error.filename2 is not None else error.filename
    if isinstance(name, bytes):
        name = name.decode(errors="backslashreplace")
    return words if name is None else f"{name}: {words}", 1 if error.errno in _FAILURES else 2


def _ours(error: BaseException) -> bool:
    """Whether an exception was raised by this library rather than by one that it calls."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(frames[-1].filename).is_relative_to(_ROOT)


def _place(error: BaseException) -> str:
    """The last place of the library that an exception came through."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).is_relative_to(_ROOT)]
    return f" ({Path(frames[-1].filename).relative_to(_ROOT).as_posix()}, line {frames[-1].lineno})" if frames else ""
