"""The command line: ``gramtower fit``, ``tune``, ``evaluate``, ``recommend``, ``similar``, ``compare`` and others."""

from __future__ import annotations

import sys

from gramtower._util.checks import need
from gramtower.cli.process import interrupt_on_sigterm, interruption, leave, prepare_streams


def main() -> None:
    """Run the command line on the arguments given; exits with 0, 1 (failed), 2 (bad input), 130 or 143 (signals)."""
    prepare_streams()
    interrupt_on_sigterm()
    try:
        need("cyclopts", "the command line")
        need("rich", "the command line")
    except ImportError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    try:
        from gramtower.cli.program import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # before a command began, or once more while it ended
        word, code = interruption()
        print(f"error: {word}", file=sys.stderr)
        raise SystemExit(code) from None
    leave(code)
