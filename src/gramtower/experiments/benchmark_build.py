"""From the runs of a benchmark to what is shown of them: the result object, summary.json and report.html."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gramtower._util import checks as check
from gramtower._util.files import plain, write_json, write_text
from gramtower.experiments.benchmark_page import page
from gramtower.experiments.benchmark_store import MANIFEST, Manifest, Run, read_manifest, read_runs
from gramtower.experiments.benchmark_summary import summarise
from gramtower.experiments.benchmark_text import notes_of, table_of

SUMMARY, PAGE = "summary.json", "report.html"


@dataclass(frozen=True, repr=False, eq=False)
class Benchmark:
    """What a benchmark found.

    Attributes:
        summary: all numbers: for each model its status, settings, seconds, bytes, and for each metric the mean, the 95%
            interval, the value of each seed and the difference from the reference.
        runs: the finished runs, with the values of each user.
    """

    summary: dict[str, Any]
    runs: list[Run]

    @property
    def best(self) -> str | None:
        """The model with the best mean of the first metric; None if none has ended."""
        name: str | None = self.summary["best"]
        return name

    @property
    def verdict(self) -> str:
        """A sentence: who won, by how much, and whether the interval excludes zero."""
        return str(self.summary["verdict"])

    def to_dict(self) -> dict[str, Any]:
        """All numbers, for JSON."""
        content: dict[str, Any] = plain(self.summary)
        return content

    def to_html(self) -> str:
        """The page, which needs no other file."""
        return page(self.summary)

    def __repr__(self) -> str:
        heads, rows = table_of(self.summary)
        lines = [heads, *rows]
        widths = [max(len(line[place]) for line in lines) for place in range(len(heads))]
        text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
        return "\n".join([*(line.rstrip() for line in text), *notes_of(self.summary), self.verdict])


def build(folder: Path) -> Benchmark:
    """Make summary.json and report.html of a folder anew, from benchmark.json and the runs in it.

    Raises:
        ValueError: if the folder holds no benchmark, or a file of it is damaged.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        check.fail("folder", folder, f"a folder with {MANIFEST}, as gramtower benchmark writes")
    found = result_of(manifest, read_runs(folder, manifest))
    write_json(folder / SUMMARY, found.to_dict())
    write_text(folder / PAGE, found.to_html())
    return found


def result_of(manifest: Manifest, runs: list[Run]) -> Benchmark:
    """The result of runs."""
    return Benchmark(summarise(manifest, runs), runs)
