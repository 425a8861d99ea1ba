"""The command line on closed, broken, full and narrow outputs, and on terminals without all characters."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import warnings

import pytest

pytest.importorskip("cyclopts", reason="the command line needs cyclopts")
pytest.importorskip("polars", reason="the command line reads tables with polars")

import gramtower as gt
from gramtower._util import checks as check
from gramtower._util import compiled
from gramtower.cli.output import note, prepare_streams, print_json, print_table, showable
from gramtower.cli.program import run

NAMES = ["ann", "bo", "naïve → 😀", "日本"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model file whose ids an ASCII terminal cannot show."""
    path = tmp_path_factory.mktemp("model") / "small.gramtower"
    pairs = gt.Interactions.from_arrays(
        [a for a in NAMES for b in NAMES if a != b], [b for a in NAMES for b in NAMES if a != b]
    )
    gt.TwoTower(dim=2, hidden=(), max_iterations=1, device="cpu").fit(pairs).save(path)
    return str(path)


def output(monkeypatch, encoding, *tokens):
    """What a command writes to a terminal of an encoding."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    prepare_streams()
    assert run(tokens) == 0
    sys.stdout.flush()
    return written.getvalue().decode(encoding)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_json_is_the_same_on_every_terminal(model, monkeypatch, encoding):
    tokens = ("recommend", model, "--left", "ann", "--include-seen", "--json")
    found = json.loads(output(monkeypatch, encoding, *tokens))["answers"][0]["results"]
    assert sorted(hit["id"] for hit in found) == sorted(NAMES)


def test_tables_and_help_show_what_the_terminal_can_show(model, monkeypatch):
    table = output(monkeypatch, "ascii", "recommend", model, "--left", "ann", "--include-seen")
    assert "na\\xefve -> \\U0001f600" in table
    assert len({len(line) for line in table.splitlines()}) == 1
    assert "naïve ->" in output(monkeypatch, "latin-1", "recommend", model, "--left", "ann", "--include-seen")
    for command in ("fit", "demo", "compare"):
        assert "--seed" in output(monkeypatch, "ascii", command, "--help")


def test_control_characters_of_ids_do_not_reach_the_terminal(capsys):
    print_table(("id",), [("\x1b[31mred\n\udcff",)])
    assert "\\x1b[31mred\\n\\udcff" in capsys.readouterr().out


def test_nor_do_they_in_json_and_in_lines_about_progress(capsys):
    keys = ["\x1b[2J", "\x9b31mred", "\x7f", "a\rb", "ü"]
    print_json({"ids": keys})
    for key in keys:
        note(f"{key} is refused")
    shown = capsys.readouterr()
    assert json.loads(shown.out) == {"ids": keys}
    assert not [c for c in shown.out + shown.err if c != "\n" and (c < " " or "\x7f" <= c <= "\x9f")]
    assert "ü" in shown.out


def test_substitutes_are_plain():
    sys_stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", sys_stdout)
        assert showable("3 × 4 − 1 ✓ é") == "3 x 4 - 1 * \\xe9"


@pytest.mark.parametrize("columns", ["1", "0", "-7", "²", "9" * 30])
def test_help_ends_at_any_width(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("LINES", columns)
    assert run(["fit", "--help"]) == 0
    assert 30 < max(map(len, capsys.readouterr().out.splitlines())) <= 1000


def test_a_reader_that_has_gone_ends_a_command_quietly(model, monkeypatch, capfd):
    for tokens in (["info", model, "--json"], ["recommend", model, "--left", "ann"], ["--help"]):
        reading, writing = os.pipe()
        os.close(reading)
        monkeypatch.setattr(sys, "stdout", os.fdopen(writing, "w"))
        assert run(tokens) == 1
        sys.stdout.close()
    assert capfd.readouterr().err == ""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_full_disk_under_the_output_is_said(model, monkeypatch, capfd):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert run(["info", model, "--json"]) == 1
    assert capfd.readouterr().err == "error: standard output: no space left on the disk\n"


@pytest.mark.skipif(os.name != "posix", reason="closed by a shell")
def test_closed_streams_lead_nowhere(model, tmp_path):
    command = f"'{sys.executable}' -m gramtower recommend '{model}' --left"
    done = subprocess.run(["sh", "-c", f"{command} ann >&- <&-"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    done = subprocess.run(["sh", "-c", f"{command} nobody 2>&-"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")


def test_warnings_of_the_library_are_one_line_each_and_others_none(model, monkeypatch, capsys):
    def warned(*_, **__):
        warnings.warn_explicit("compiled\nanew", RuntimeWarning, compiled.__file__, 3)
        warnings.warn_explicit("internal", UserWarning, "/somewhere/torch/x.py", 3)
        check.fail("left", "nothing", "something")

    monkeypatch.setattr(gt.TwoTower, "recommend", warned)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert run(["recommend", model, "--left", "ann"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said == ["warning: compiled anew", "error: left: got nothing, expected something"]
