"""The command line: ``gramtower fit``, ``tune``, ``evaluate``, ``recommend``, ``similar``, ``compare`` and others."""

from __future__ import annotations

import sys

from gramtower._optional import need
from gramtower.cli.streams import prepare_streams


def main() -> None:
    """Run the command line on the program's arguments; exits with 0, 1 (failed), 2 (bad input) or 130 (Ctrl-C)."""
    prepare_streams()
    try:
        need("cyclopts", "the command line")
        need("rich", "the command line")
    except ImportError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    try:
        from gramtower.cli.app import run
        from gramtower.cli.leaving import leave

        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # before a command began, or once more while it ended
        print("error: interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    leave(code)
