"""Random command lines over all commands: each ends with a documented exit code and one clear line, JSON parses."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import re

import pytest
from harness import Fuzz

pytest.importorskip("cyclopts", reason="the command line needs cyclopts")
pytest.importorskip("polars", reason="the command line reads tables with polars")
pytest.importorskip("starlette", reason="serve needs starlette")
pytest.importorskip("faiss", reason="index needs faiss")

from gramtower import demo
from gramtower.cli import options
from gramtower.cli.program import run
from gramtower.data.interactions import Interactions
from gramtower.serving import server

PAIRS = ["--left", "user", "--right", "item"]
SMALL = ["--dim", "2", "--hidden", "none", "--device", "cpu", "--quiet", "--max-iterations", "1"]
FILES = [
    "t.csv", "t.tsv", "t.parquet", "lists.txt", "run", "run/model.gramtower", "described", "histories", "parts",
    "config.toml", "bad.toml", "nested.toml", "features.csv", "empty.csv", "bytes.csv", "ragged.csv", "folder.csv",
    "nowhere", "", ".", "t.csv/x", "x" * 300, "\0", "na\udcffme", "naïve 😀.csv", "run/config.toml",
]  # fmt: skip
NUMBERS = [
    "0",
    "-1",
    "1",
    "2",
    "3.5",
    "1e-30",
    "1e400",
    "nan",
    "-inf",
    "9" * 30,
    "9" * 5000,
    "0x10",
    "１２",
    "",
    "x",
    "1e3",
]
WORDS = [
    "",
    "user",
    "item",
    "rating",
    "u1",
    "i2",
    "nobody",
    "é",
    "日本 😀",
    "\0",
    "\ud800",
    "x" * 3000,
    "-",
    "--",
    "=",
    "a=b",
]
WORDS += [
    "x=[",
    "x={",
    "%s",
    "../..",
    "*",
    "t[12].csv",
    "map@5",
    "recall@0",
    "map@x",
    "ndcg@5,recall@20",
    "gd",
    "newton-kron",
]
WORDS += [
    "gd,newton",
    "csv",
    "edges",
    "lists",
    "movielens",
    "netflix",
    "mediawiki",
    "citeulike",
    "musae",
    "wikispeedia",
    "all",
    "trained",
    "tab",
    ",",
    "degree^0.5",
    "degree^x",
    "cpu",
]
SIZES = [
    "0",
    "-1",
    "1",
    "2",
    "4",
    "x",
    "",
    "1e3",
    "9" * 30,
    "9" * 5000,
    "2,2",
    "none",
    "3.5",
]  # nothing that takes memory
FIELDS = {
    name: ["--" + f.name.replace("_", "-") for f in dataclasses.fields(getattr(options, name)) if f.name != "path"]
    for name in ("DataOptions", "FitFeatures", "ModelOptions", "FitTraining", "Common")
}
TRAINED = FIELDS["DataOptions"] + FIELDS["FitFeatures"] + FIELDS["ModelOptions"] + FIELDS["FitTraining"]
COMMANDS = {  # a line that works, flags it may have, and how often it is tried
    "recommend": (
        ["run", "--left", "u1"],
        ["--left", "-k", "--k", "--include-seen", "--allow", "--deny", "--left-features", "--history", "--candidates"],
        8,
    ),
    "similar": (["run", "--right", "i2"], ["--left", "--right", "-k"], 8),
    "evaluate": (
        ["run", "--test", "t.csv"],
        [
            "--test",
            "--metrics",
            "--by",
            "--candidates",
            "--exclude-seen",
            "--no-exclude-seen",
            "--left-features",
            "--histories",
            *FIELDS["DataOptions"],
        ],
        6,
    ),
    "info": (["run"], ["--config", *FIELDS["DataOptions"]], 8),
    "convert": (["t.csv", *PAIRS, "--out", "made.csv"], ["--out", "--config", *FIELDS["DataOptions"]], 6),
    "partition": (
        ["t.csv", *PAIRS, "--parts", "2", "--out", "cut"],
        ["--parts", "--config", *FIELDS["DataOptions"]],
        3,
    ),
    "split": (
        ["t.csv", *PAIRS, "--by", "random", "--out", "halves"],
        ["--by", "--share", "--count", "--minimum", "--cut", "--history", "--folds-of", "--file-format", "--seed"]
        + FIELDS["DataOptions"],
        4,
    ),
    "cross-validate": (
        ["t.csv", *PAIRS, *SMALL, "--folds", "2"],
        ["--folds", "--metrics", "--config", *TRAINED],
        1,
    ),
    "report": (["run"], ["--test", "--left-table", "--right-table"], 3),
    "update": (
        ["run", "t.csv", *PAIRS, "--iterations", "0", "--quiet", "--out", "updated"],
        ["--iterations", "--out", *FIELDS["DataOptions"], *FIELDS["FitFeatures"]],
        3,
    ),
    "fit": (["t.csv", *PAIRS, *SMALL, "--out", "fitted", "--fresh"], ["--config", "--out", *TRAINED], 6),
    "compare": (
        ["t.csv", *PAIRS, *SMALL, "--optimizers", "nothing", "--out", "other"],
        ["--config", "--optimizers", "--synthetic", *TRAINED],
        2,
    ),
    "benchmark": (
        ["t.csv", *PAIRS, "--models", "popularity", "--seeds", "1", "--quiet", "--out", "models"],
        ["--models", "--test", "--metrics", "--seeds", "--reference", "--config", "--fresh", "--out"]
        + FIELDS["DataOptions"]
        + FIELDS["FitFeatures"],
        2,
    ),
    "tune": (
        ["t.csv", *PAIRS, *SMALL, "--trials", "0", "--out", "tuned"],
        ["--trials", "--metric", "--config", *TRAINED],
        1,
    ),
    "index": (["run", "--recall", "0.5", "-k", "3"], ["--kind", "--recall", "-k", "--seed"], 4),
    "serve": (
        ["run", "--port", "0"],
        [
            "--index",
            "--model",
            "--left-table",
            "--right-table",
            "--left-id",
            "--right-title",
            "--token-file",
            "--watch",
            "--mapped",
            "--test",
            "--batch-wait",
            "--max-k",
            "--max-ids",
            "--max-body",
        ],
        4,
    ),
    "demo": (["--seconds", "0.01", "--seed", "-1", "--out", "shown"], ["--seed", "--seconds", "--out", "--uses"], 1),
}
FOREIGN = re.compile(
    r"\b\w+(Error|Exception|Warning)\b|Traceback|Errno|NoneType|has no attribute|PlRefPath|codec can't encode|"
    r"enforce fail|torch\.|numpy\.|polars|unexpected keyword|site-packages|internal error in gramtower"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files and models to name."""
    home = tmp_path_factory.mktemp("fuzz")
    with contextlib.chdir(home):
        rows = [f"u{u},i{i},{1 + (u + i) % 5}" for u in range(8) for i in range(6) if (u * i) % 3 < 2]
        (home / "t.csv").write_text("user,item,rating\n" + "\n".join(rows) + "\n")
        (home / "t.tsv").write_text("user\titem\trating\n" + "\n".join(rows).replace(",", "\t") + "\n")
        (home / "lists.txt").write_text("u1 i1 i2\nu2 i2\n")
        (home / "features.csv").write_text("user,age,kind\n" + "\n".join(f"u{u},{20 + u},k{u % 2}" for u in range(9)))
        (home / "config.toml").write_text('[data]\nleft = "user"\nright = "item"\n[model]\ndim = 2\n')
        (home / "bad.toml").write_text('[data]\nleft = 3\nhidden = "x"\n')
        (home / "nested.toml").write_text("[data]\nx = " + "[" * 3000)
        (home / "empty.csv").write_text("")
        (home / "bytes.csv").write_bytes(bytes(range(256)) * 3)
        (home / "ragged.csv").write_text('user,item,rating\nu1,i1\nu1,"i2\n')
        (home / "naïve 😀.csv").write_text("user,item\né,😀\nb,c\n", encoding="utf-8")
        (home / "folder.csv").mkdir()
        for line in (
            ["convert", "t.csv", *PAIRS, "--out", "t.parquet"],
            ["fit", "t.csv", *PAIRS, *SMALL, "--out", "run"],
            ["fit", "t.csv", *PAIRS, *SMALL, "--left-features", "features.csv", "--out", "described"],
            ["fit", "t.csv", *PAIRS, *SMALL, "--history", "--out", "histories"],
            ["partition", "t.csv", *PAIRS, "--parts", "2", "--out", "parts"],
        ):
            assert call(line)[0] == 0, line
    with contextlib.suppress(ImportError):
        import matplotlib.figure  # noqa: F401  its first import may take longer than one input should
    return home


def call(tokens):
    """Exit code, standard output and standard error of a command line."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(tokens)
    return code, out.getvalue(), err.getvalue()


def value_of(flag, rng):
    if flag in (
        "--dim",
        "--hidden",
        "--hash-bits",
        "--trials",
        "--max-iterations",
        "--iterations",
        "--threads",
        "--seeds",
    ):
        return rng.choice([*SIZES[:6], "9" * 30, "x"])
    if flag in ("--seconds", "--time-limit", "--memory-budget"):
        return rng.choice(["0.01", "0", "-1", "nan", "x", "1MB", "100MB"])
    if flag == "--seed":  # a demo that works takes its time
        return rng.choice(["-1", "x", "0", "9" * 30])
    if any(word in flag for word in ("config", "features", "test", "out", "histories", "path", "validation", "table")):
        return rng.choice([*FILES, "0.1", "0.999"])
    return rng.choice(rng.choice([NUMBERS, WORDS, FILES, SIZES]))


def line(rng):
    """A command line: one that works with some tokens changed, added, moved or left out, or one of chance."""
    name = rng.choices(list(COMMANDS), [weight for *_, weight in COMMANDS.values()])[0]
    good, flags, _ = COMMANDS[name]
    tokens = [name, *good]
    for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
        kind, place = rng.randrange(6), rng.randrange(len(tokens))
        if kind <= 2:
            flag = rng.choice([*flags, *FIELDS["Common"], "--nothing"])
            if flag in tokens[:-1]:
                tokens[tokens.index(flag) + 1] = value_of(flag, rng)
            else:
                tokens += [flag] if rng.random() < 0.2 or flag in FIELDS["Common"] else [flag, value_of(flag, rng)]
        elif kind == 3 and len(tokens) > 1 and not tokens[1].startswith("-"):
            tokens[1] = rng.choice(FILES)
        elif kind == 4 and tokens[place] not in ("--max-iterations", "--iterations", "--trials", "1", "0"):
            del tokens[place]
        elif kind == 5 and name not in ("fit", "compare", "tune", "demo"):
            tokens[place] = rng.choice([*COMMANDS, *FILES, *WORDS, "--help", "--version", "-h", "--debug"])
        if not tokens:
            break
    if rng.random() < 0.3:
        tokens.append("--json")
    if rng.random() < 0.03:
        tokens.append(rng.choice(["--help", "--version"]))
    return [token for token in tokens if token != "--debug"]


def judge(folder, tokens):
    with contextlib.chdir(folder):
        code, out, err = call(tokens)
    assert code in (0, 1, 2), code
    wrong = FOREIGN.search(err) or (code and FOREIGN.search(out))
    assert not wrong, f"{wrong[0]}: {err}"
    if code == 2:
        assert out == "", out
        assert err.splitlines()[-1].startswith("error: "), err
        assert err.count("error: ") == 1, err
    if code == 0 and "--json" in tokens and not {"--help", "--version", "-h"} & set(tokens):
        json.loads(out, parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))
    return code


def test_command_lines(folder, monkeypatch):
    words = [f"w{i}" for i in range(80)]
    links = [(a, b) for i, a in enumerate(words) for j, b in enumerate(words) if (i + j) % 4 == 0]
    small = Interactions.from_arrays(*zip(*links, strict=True))

    async def ended(*_):  # a server that is told to end at once
        pass

    monkeypatch.setattr(server, "_main", ended)
    monkeypatch.setattr(demo, "packages", lambda: small)
    fuzz = Fuzz("cli", small=40)
    for rng in fuzz:
        tokens = line(rng)
        code = fuzz.attempt(tokens, lambda tokens=tokens: judge(folder, tokens), accepted=())
        fuzz.outcomes[f"exit code {code}"] += 1
