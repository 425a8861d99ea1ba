"""``gramtower report``: tables, figures and page of a comparison, a benchmark or a fit anew, from its folder alone."""

from __future__ import annotations

from pathlib import Path

from gramtower import _checks as check
from gramtower.benchmarking.store import MANIFEST as BENCHMARK
from gramtower.cli.benchmark import report_benchmark
from gramtower.cli.compare import show
from gramtower.cli.options import Common
from gramtower.cli.output import note, print_json
from gramtower.compare.build import build


def report(run: Path, /, *, common: Common | None = None) -> int:
    """Make report.html, figures and summary.json of a comparison anew, from its saved histories alone.

    Of a benchmark's folder too, from its finished runs; and of a fit's, whose own summary.json stays as it is.

    Args:
        run: Folder that compare, benchmark or fit wrote, finished or not.
        common: Output.
    """
    common = common or Common()
    if not run.is_dir():
        check.fail("DIR", run, "the folder of a comparison, a benchmark or a fit")
    if (run / BENCHMARK).exists():
        return report_benchmark(run, common)
    content, problems = build(run)
    for problem in problems:
        note(problem)
    if common.json:
        print_json(content)
    else:
        show(content, run)
    return 0
