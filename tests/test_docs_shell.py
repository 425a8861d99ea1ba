"""The documentation tells the truth in the shell and over HTTP: commands and requests of how-to pages are executed.

Lines of indented blocks that begin with `gramtower` run one after the other, in a folder with generated files of the
names that the page uses, and each `curl` asks a server over the run of the page and the table shop.csv.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

pl = pytest.importorskip("polars", reason="the files are tables of polars")
run = pytest.importorskip("gramtower.cli.program", reason="the command line needs cyclopts", exc_type=ImportError).run

DOCS = Path(__file__).parent.parent / "docs"
USERS, ITEMS = 60, 40
COLUMNS = ["--left", "user", "--right", "item"]
SMALL = ["--dim", "4", "--hidden", "none", "--max-iterations", "3", "--select", "off", "--device", "cpu", "--quiet"]


def log(seed=0):
    """Events of users who choose by taste, and on a TV only even items."""
    rng = np.random.default_rng(seed)
    user, item = rng.integers(USERS, size=9000), rng.integers(ITEMS, size=9000)
    kept = rng.random(9000) < 0.9 / (1 + np.exp(2 - 2 * np.cos(user - item)))
    day = rng.integers(1, 29, size=9000)
    columns = {
        "user": user, "item": item, "device": np.where(item % 2, "phone", "tv"),
        "when": [f"2024-01-{d:02d}" for d in day], "type": rng.choice(["view", "cart", "buy"], size=9000),
        "click": rng.integers(2, size=9000), "p": np.full(9000, 1 / ITEMS),
    }  # fmt: skip
    return pl.DataFrame(columns).filter(pl.Series(kept)).unique(["user", "item"], maintain_order=True)


def parts(events):
    """Most events to learn from, and two parts to hold out."""
    size = len(events) // 4
    return events[: 2 * size], events[2 * size : 3 * size], events[3 * size :]


def shop():
    return pl.DataFrame({
        "id": range(ITEMS), "category": [("books", "films")[j % 2] for j in range(ITEMS)],
        "year": [1990 + j for j in range(ITEMS)], "in_stock": [j % 7 > 0 for j in range(ITEMS)],
    })  # fmt: skip


def prepare(page):
    """The files of a page, and its run where the page does not fit one."""
    events = log()
    train, held_out, test = parts(events)
    shop().write_csv("shop.csv")
    fitted = lambda path, *more: run(["fit", path, *COLUMNS, *more, *SMALL, "--out", "run"])  # noqa: E731
    if page in ("context.md", "explaining.md"):
        named = [pl.format(f"{letter}{{}}", name).alias(name) for letter, name in (("u", "user"), ("i", "item"))]
        train, test = train.with_columns(named), test.with_columns(named)
    if page == "ranking.md":
        train.write_parquet("pairs.parquet")
        events.select("user", "item").write_csv("visible.csv")
        assert fitted("pairs.parquet") == 0
    elif page == "explaining.md":
        train.write_csv("pairs.csv")
        assert run(["fit", "pairs.csv", *COLUMNS, "--history", *SMALL, "--out", "RUN"]) == 0
    elif page == "off-policy.md":
        train.write_csv("pairs.csv")
        assert fitted("pairs.csv") == 0
        events.write_csv("log.csv")
    elif page == "new-items.md":
        train.filter(pl.col("item") < 30).write_csv("pairs.csv")
        shop().rename({"id": "item"}).write_csv("items.csv")
        assert fitted("pairs.csv", "--right-features", "items.csv") == 0
        shop().rename({"id": "item"})[30:].write_csv("new.csv")
        test.write_csv("test.csv")
    else:
        for name, frame in {
            "ratings": train, "events": events, "log": train, "held-out": held_out, "test": test,
            "users": pl.DataFrame({"user": range(USERS), "age": [20 + i % 9 for i in range(USERS)]}),
            "new-users": pl.DataFrame({"user": [100, 101], "age": [21, 27]}),
        }.items():  # fmt: skip
            frame.write_csv(f"{name}.csv")


def commands(page):
    """Words of each command of the indented blocks of a page."""
    blocks = re.findall(r"\n\n((?:    .*\n|(?<=\n)\n)+)", page.read_text())
    lines = "".join(blocks).replace("\\\n", " ")
    starts = [found.start() for found in re.finditer(r"^    (?=gramtower |curl )", lines, re.MULTILINE)]
    return [
        shlex.split(lines[start:stop], comments=True) for start, stop in zip(starts, [*starts[1:], None], strict=True)
    ]


PAGES = ("how-to/context", "explaining", "how-to/features", "how-to/new-items", "how-to/off-policy", "how-to/ranking",
         "how-to/scores", "how-to/time")  # fmt: skip


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_requests_of_pages_run(page, tmp_path, monkeypatch, capsys):
    path = DOCS / f"{page}.md"
    monkeypatch.chdir(tmp_path)
    prepare(path.name)
    found = commands(path)
    assert found
    folder = next((word for words in found for word in words if word in ("run", "RUN")), "run")
    for words in found:
        if words[0] == "gramtower":
            assert run([*words[1:], *(SMALL if words[1] == "fit" else [])]) == 0, capsys.readouterr().err
        else:
            answer = ask(words, Path(folder))
            assert answer.status_code == 200, answer.text


def ask(words, folder):
    """The answer of a server to a request by curl."""
    cases = pytest.importorskip("serving_cases", reason="the server needs starlette")
    from gramtower.data import frames
    from gramtower.serving.snapshot import Source, TableSource

    table = TableSource("--right-table", lambda: frames.read_frame("--right-table", "shop.csv"), "id")
    numbered = folder.name == "run"  # ids of other pages are i1, i2, …
    source = Source("m", folder / "model.gramtower", tables={"right": table} if numbered else {})
    (address,), body = [word for word in words if word.startswith("localhost:8000")], words[words.index("-d") + 1]
    with cases.client(source) as api:
        return api.post(address.removeprefix("localhost:8000"), json=json.loads(body))
