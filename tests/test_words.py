"""Words and phrases that this project's texts avoid, with what to write instead."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

INSTEAD = {
    r"alone": "only, by itself",
    r"anew": "again; rebuild, rewrite",
    r"as it comes": "with default settings",
    r"beside": "next to, concatenated with, in addition to",
    r"files? of before|of before (?:it|they)": "older files",
    r"(?:expected|got) nothing": "is missing, is not available for",
    r"in the place of": "instead of",
    r"(?:is|are|was|were|be|been) told": "is passed, is given, is identified by",
    r"newcomers?": "new entities",
    r"nobody|whoever": "no one; the person, the process that",
    r"one's own": "your own, custom",
    r"(?:say|says|said) so": "report it, raise an error",
    r"strangers?": "unknown ids",
}
PATTERN = re.compile(rf"\b(?:{'|'.join(INSTEAD)})\b", re.IGNORECASE)

#: How many are left in each part of the tree. Numbers may only fall; a part without any has no line.
LEFT: dict[str, int] = {
    "_util": 1,
    "data": 9,
    "distributed": 1,
    "docs/choosing.md": 2,
    "docs/explaining.md": 2,
    "docs/how-to/features.md": 2,
    "docs/metrics.md": 2,
    "docs/sklearn.md": 2,
    "engine": 10,
    "experiments": 4,
    "model": 15,
}


def texts():
    """Each part of the tree with the texts of its files: packages, pages, and the changes that are not released."""
    for path in sorted((ROOT / "src/gramtower").rglob("*.*")):
        if path.suffix in (".py", ".html", ".js"):
            inside = path.relative_to(ROOT / "src/gramtower").parts
            yield inside[0] if len(inside) > 1 else "gramtower", path, path.read_text()
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        if "_build" not in path.parts:
            yield str(path.relative_to(ROOT)), path, path.read_text()
    path = ROOT / "CHANGELOG.md"
    yield "CHANGELOG.md", path, path.read_text().split("\n## [")[1]


def test_texts_avoid_the_words_of_the_list():
    found, places = Counter(), {}
    for part, path, text in texts():
        for match in PATTERN.finditer(text):
            found[part] += 1
            line = text.count("\n", 0, match.start()) + 1
            places.setdefault(part, []).append(f"{path.relative_to(ROOT)}:{line}: {match[0]}")
    over = {part: places[part] for part, count in found.items() if count > LEFT.get(part, 0)}
    assert not over, "\n".join(place for part in over.values() for place in part)
