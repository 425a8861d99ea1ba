"""Words and phrases that this project's texts avoid, with what to write instead; and no sentences in ``match=``."""

from __future__ import annotations

import ast
import re
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


def texts():
    """Each file and its text: sources, pages, and the changes that are not released."""
    for path in sorted((ROOT / "src/gramtower").rglob("*.*")):
        if path.suffix in (".py", ".html", ".js"):
            yield path, path.read_text()
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        if "_build" not in path.parts:
            yield path, path.read_text()
    path = ROOT / "CHANGELOG.md"
    yield path, path.read_text().split("\n## [")[1]


def test_texts_avoid_the_words_of_the_list():
    found = [
        f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]}"
        for path, text in texts()
        for match in PATTERN.finditer(text)
    ]
    assert not found, "\n".join(found)


def test_errors_are_matched_by_names_and_key_words():
    """A message may be reworded without changing a test, unless the system or another package wrote it."""
    found = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            patterns = [one for one in call.keywords if one.arg == "match"] if isinstance(call, ast.Call) else []
            texts = [part.value for one in patterns for part in ast.walk(one.value) if isinstance(part, ast.Constant)]
            sentences = [text for text in texts if re.search(r"(?:\b[A-Za-z]+ ){3}[a-z]+", str(text))]
            found += [f"{path.relative_to(ROOT)}:{call.lineno}: {text}" for text in sentences]
    assert not found, "\n".join(found)
