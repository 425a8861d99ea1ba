"""Flip signs in the engine's formulas one at a time, and show that a test fails for each: `make mutants`.

    python tests/mutants.py ["penalty of H" …]

Each mutant is one replacement in a copy of the source, against which the tests of TESTS run. A mutant that passes all
tests, and a text that is no longer in the source, are errors. Takes some minutes on two cores.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ["tests/test_kronecker.py", "tests/test_cost.py", "tests/test_engine.py", "tests/test_blocks.py",
         "tests/test_regularizers.py"]  # fmt: skip
MUTANTS = [  # what it breaks, the text in the source, the text in its place
    ("P_c over blocks", "self.gramian + other.gramian", "self.gramian - other.gramian"),
    ("P̂_c over blocks", "self.cross + other.cross", "self.cross - other.cross"),
    ("embedding penalty of the value", "left.penalty + right.penalty", "left.penalty - right.penalty"),
    ("embedding penalty of a side", "penalty = 0.5 * (side.penalty", "penalty = -0.5 * (side.penalty"),
    ("penalty of gradient and G·d", "addcmul_(E, side.penalty[:, None])", "addcmul_(E, -side.penalty[:, None])"),
    ("P H_c of G·d", ".addmm_(E, d_gramian)", ".addmm_(E, d_gramian, alpha=-1)"),
    ("imputed part of U", "out.addmm_(self.imputed, matrix, alpha=-1.0)", "out.addmm_(self.imputed, matrix)"),
    ("damping of a table's factor", "1 / (f.A + pi * root)", "1 / (f.A - pi * root)"),
    ("all-pairs curvature of H", "gramian, alpha=c.omega)", "gramian, alpha=-c.omega)"),
    ("penalty of H", "H.diagonal().add_(", "H.diagonal().sub_("),
    ("diagonal blocks of M", "1 / (shift[name] + squares", "1 / (shift[name] - squares"),
    ("sums over the pairs of a row", "left_sum(self._pairs, x, B, out)", "left_sum(self._pairs, -x, B, out)"),
    ("passes over pairs", "passes = block.passes - before", "passes = block.passes + before"),
    ("Hessian of the regulariser", "psi.product(theta, d), theta) * l2", "psi.product(theta, d), theta) * -l2"),
    ("slopes of observed pairs", "x = self.observed.slopes", "x = -self.observed.slopes"),
]  # fmt: skip


def place(old: str) -> Path:
    """The one file of the engine that has a text, once."""
    found = [path for path in (ROOT / "src/gramtower/engine").rglob("*.py") if old in path.read_text()]
    if len(found) != 1 or found[0].read_text().count(old) != 1:
        raise SystemExit(f"expected this text once in the engine, update MUTANTS: {old}")
    return found[0]


def survives(old: str, new: str) -> bool:
    """Whether all tests pass with a replacement."""
    path = place(old)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "src", Path(folder) / "src", ignore=shutil.ignore_patterns("__pycache__"))
        copy = Path(folder) / path.relative_to(ROOT)
        copy.write_text(path.read_text().replace(old, new))
        environment = {**os.environ, "PYTHONPATH": f"{folder}/src", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", *TESTS]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    failed = next((line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))), "")
    print(failed.split(" - ")[0] or f"NOT CAUGHT, exit code {done.returncode}", flush=True)
    return done.returncode == 0


def main() -> None:
    for _, old, _ in MUTANTS:
        place(old)
    left = []
    asked = [mutant for mutant in MUTANTS if not sys.argv[1:] or mutant[0] in sys.argv[1:]]
    for about, old, new in asked:
        print(f"{about}: {old} -> {new}\n    ", end="", flush=True)
        if survives(old, new):
            left.append(about)
    print(
        f"{len(asked) - len(left)} of {len(asked)} mutants caught" + "".join(f"; not caught: {name}" for name in left)
    )
    raise SystemExit(bool(left))


if __name__ == "__main__":
    main()
