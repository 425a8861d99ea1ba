"""The command line: ``gramtower fit``, ``tune``, ``evaluate``, ``recommend``, ``similar``, ``compare`` and others."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line on the program's arguments; exits with 0 (fine), 1 (failed) or 2 (bad input)."""
    try:
        import cyclopts  # noqa: F401
        import rich  # noqa: F401
    except ImportError as error:
        print(f'error: the command line needs {error.name}: pip install "gramtower[cli]"', file=sys.stderr)
        raise SystemExit(1) from None
    from gramtower.cli.app import run
    from gramtower.cli.processes import leave

    leave(run(sys.argv[1:]))
