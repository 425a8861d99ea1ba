"""From a folder with histories to summary.json, figures and report.html."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gramtower._util.files import plain, write_json, write_text
from gramtower.experiments.comparison_figures import draw
from gramtower.experiments.comparison_levels import summarise
from gramtower.experiments.comparison_page import page
from gramtower.experiments.comparison_store import read_comparison

SUMMARY, PAGE = "summary.json", "report.html"


def build(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Rebuild everything that is derived from histories.

    Returns:
        What summary.json holds, and what could not be made and why.

    Raises:
        ValueError: if the folder holds no comparison, or a file of it is damaged.
    """
    comparison = read_comparison(folder)
    numbers = summarise(comparison)
    problems = []
    write_text(folder / PAGE, page(comparison, numbers))
    try:
        draw(comparison)
    except ImportError as error:
        problems.append(f"no PNG and SVG figures: {error}")
    content = plain({"title": comparison.title, **numbers, **_about(comparison.about)})
    write_json(folder / SUMMARY, content)
    return content, problems


def _about(about: dict[str, Any]) -> dict[str, Any]:
    kept = ("synthetic", "data", "settings", "commands", "environment")
    return {key: about[key] for key in kept if key in about}
