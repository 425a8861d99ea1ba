"""`make types`: the Python in README.md and docs/ against the library's types, as a user's type checker sees them.

Each page is one program, its blocks one after the other at their own lines, so that errors name the page's line. Not
strict: examples have no annotations, but what they call must take what they give.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from test_docs import PAGES, ROOT, python_blocks

OPTIONS = ("--check-untyped-defs", "--ignore-missing-imports", "--config-file=")
CACHE = "--cache-dir=.mypy_cache/docs"  # its options differ from the library's, whose cache it would write over
ALLOWED = (
    "misc", "import-untyped", "no-redef", "assignment",  # a page reuses names, and takes lambdas for functions
    "union-attr", "index",  # and knows what may be None to be there
)  # fmt: skip


def main() -> int:
    """Exit status of mypy."""
    with tempfile.TemporaryDirectory() as scratch:
        programs = []
        for page in PAGES:
            lines: list[str] = []
            for line, source in python_blocks(page.read_text()):
                lines += [""] * (line - len(lines)) + source.splitlines()
            if lines:
                programs.append(Path(scratch) / f"{page.stem.lower().replace('-', '_')}_md.py")
                programs[-1].write_text("\n".join(lines) + "\n")
        allowed = [f"--disable-error-code={code}" for code in ALLOWED]
        command = [sys.executable, "-m", "mypy", *OPTIONS, CACHE, *allowed, *map(str, programs)]
        return subprocess.run(command, cwd=ROOT, env=os.environ | {"MYPYPATH": "src"}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
