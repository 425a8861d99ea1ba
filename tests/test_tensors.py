"""The files of tensors under models, checkpoints and partitions: what was written comes back, or an error says why."""

from __future__ import annotations

import json
import os
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from gramtower._util.files import build
from gramtower._util.tensors import CHUNK, Damaged, TensorFile, checksum, write

TENSORS = {
    "large": torch.arange(3 * CHUNK // 4 + 77, dtype=torch.int32).reshape(-1, 1)[: 3 * CHUNK // 4 + 76].reshape(-1, 4),
    "empty": torch.zeros(0, 3),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "bytes": torch.arange(5, dtype=torch.uint8),
    "view": torch.arange(12, dtype=torch.int64)[4:8],
}


def written(path, header=None):
    write(path, "test", 1, {"name": "Zoë", "n": [1, None]} if header is None else header, TENSORS)
    return path


def test_what_was_written_comes_back(tmp_path):
    file = TensorFile(written(tmp_path / "a"), "test", 1)
    assert file.header == {"name": "Zoë", "n": [1, None]}
    assert file.shapes == {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}
    for name, tensor in TENSORS.items():
        assert torch.equal(file.read(name), tensor)
    assert torch.equal(file.read("large", 1000, 70_000), TENSORS["large"][1000:70_000])
    assert file.read("large", 5, 5).shape == (0, 4)


def test_names_may_share_memory(tmp_path):
    whole = torch.arange(6.0)
    given = {"parameters": whole, "best": whole, "half": whole[:3], "table": whole.view(2, 3), "none": whole[:0]}
    write(tmp_path / "a", "test", 1, {}, given)
    file = TensorFile(tmp_path / "a", "test", 1)
    for name, tensor in given.items():
        assert torch.equal(file.read(name), tensor)


def test_a_flipped_bit_anywhere_is_noticed(tmp_path):
    whole = written(tmp_path / "a").read_bytes()
    rng = random.Random(0)
    places = [*range(0, 1200, 17), *(rng.randrange(len(whole)) for _ in range(30)), len(whole) - 1]
    for place in places:
        broken = bytearray(whole)
        broken[place] ^= 1 << rng.randrange(8)
        (tmp_path / "a").write_bytes(broken)
        with pytest.raises(Damaged, match=str(tmp_path / "a")):  # noqa: PT012
            file = TensorFile(tmp_path / "a", "test", 1)
            for name in file.shapes:
                file.read(name)


def test_rows_are_read_without_a_look_at_the_others(tmp_path):
    path = written(tmp_path / "a")
    broken = bytearray(path.read_bytes())
    at = broken.index(TENSORS["large"][-40:].numpy().tobytes())
    broken[at] ^= 1
    path.write_bytes(broken)
    file = TensorFile(path, "test", 1)
    assert torch.equal(file.read("large", 0, 10), TENSORS["large"][:10])
    with pytest.raises(Damaged, match=r"'large'.*checksum"):
        file.read("large")


def test_a_checksum_finds_changes_of_up_to_three_words():
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**63, CHUNK // 8)
    before = checksum(words.view(np.uint8))
    for _ in range(200):
        i, j, k = rng.choice(len(words), 3, replace=False)
        swapped, turned, moved = words.copy(), words.copy(), words.copy()
        swapped[[i, j]] = swapped[[j, i]]
        turned[[i, j, k]] = turned[[j, k, i]]
        moved[[i, j]] += [1, -1]
        assert before not in [checksum(changed.view(np.uint8)) for changed in (swapped, turned, moved)]


def test_the_json_may_be_longer_than_the_header_of_a_safetensors_file(tmp_path):
    path = written(tmp_path / "a", {"long": "x" * 2_000_000})
    assert TensorFile(path, "test", 1).header == {"long": "x" * 2_000_000}
    assert int.from_bytes(path.read_bytes()[:8], "little") < 2000  # where at most 100 MB may stand


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.write_bytes(b""), "is no safetensors file"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "is no safetensors file"),
        (lambda path: path.write_bytes(path.read_bytes() + b"\0"), "is no safetensors file"),
        (lambda path: path.write_bytes(b"\xff" * 8 + b"{}"), "is no safetensors file"),
        (lambda path: save_file({"a": torch.ones(2)}, path), "is no test"),
        (lambda path: write(path, "other", 1, {}, {}), "is no test"),
        (lambda path: write(path, "test", 2, {}, {}), "later version .format 2, this reads 1.; upgrade"),
        (lambda path: write(path, "test", 0, {}, {}), "another version"),
        (lambda path: (path.unlink(), path.mkdir()), "is no file"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "is no file"),
    ],
)
def test_other_files_are_refused_by_name(spoil, message, tmp_path):
    path = written(tmp_path / "a")
    spoil(path)
    with pytest.raises(Damaged, match=rf"^{path}.*{message}"):
        TensorFile(path, "test", 1)


def test_a_missing_file_is_the_systems_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing"):
        TensorFile(tmp_path / "nothing", "test", 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "a": 2}', "a key of its JSON occurs twice"),
        ("[" * 100_000, "cannot be read"),
        ('{"a": ' * 100_000 + "1" + "}" * 100_000, "cannot be read"),
        ("[1]", "is no object"),
        ("{", "cannot be read"),
        ('{"a": ' + "9" * 5000 + "}", "cannot be read"),
    ],
)
def test_json_that_is_no_plain_object_is_refused(text, message, tmp_path, monkeypatch):
    monkeypatch.setattr(json, "dumps", lambda value, _dumps=json.dumps, **kw: value if value is text else _dumps(value))
    write(tmp_path / "a", "test", 1, text, {})
    monkeypatch.undo()
    with pytest.raises(Damaged, match=message):
        TensorFile(tmp_path / "a", "test", 1)


@dataclass
class Form:
    count: int
    size: float
    name: str | None
    rows: list[int]
    facts: dict[str, Any]
    flag: bool = False
    made: list[int] = field(init=False, default_factory=list)


GOOD: dict[str, Any] = {"count": 3, "size": 1, "name": None, "rows": [1, 2], "facts": {"a": [1]}}


def test_a_dataclass_is_built_from_what_it_declares():
    assert build("header", Form, GOOD) == Form(3, 1, None, [1, 2], {"a": [1]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": "3"}, r"header.*'3'"),
        ({"count": True}, "got count True"),
        ({"count": 2**63}, "got count 9223372036854775808"),
        ({"size": 10**400}, "got size 1000"),
        ({"size": None}, "got size None, expected float"),
        ({"name": 5}, r"got name 5, expected str \| None"),
        ({"rows": [1, "2"]}, r"got rows a list, expected list\[int\]"),
        ({"rows": {}}, "got rows a dict"),
        ({"facts": []}, "got facts a list"),
        ({"flag": 1}, "got flag 1, expected bool"),
        ({"made": []}, "got a field 'made'"),
        ({"further": 1}, "got a field 'further', expected count, size"),
    ],
)
def test_a_field_of_another_type_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        build("header", Form, GOOD | change)


@dataclass
class Outer:
    sizes: tuple[int, int]
    widths: tuple[tuple[int, ...], ...]
    forms: list[Form]
    best: Form | None = None


def test_objects_become_dataclasses_and_lists_tuples_where_the_annotations_say_so():
    made, form = build("header", Outer, {"sizes": [1, 2], "widths": [[3], []], "forms": [GOOD]}), Form(**GOOD)
    assert made == Outer((1, 2), ((3,), ()), [form])
    assert build("header", Outer, vars(made) | {"sizes": [1, 2], "widths": [], "forms": [], "best": GOOD}).best == form


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sizes": [1]}, "got sizes"),
        ({"sizes": [1, 2, 3]}, "got sizes"),
        ({"widths": [3]}, "got widths"),
        ({"forms": [GOOD, 3]}, "got forms"),
        ({"forms": [GOOD | {"count": "3"}]}, r"header\.forms.*got count"),
        ({"best": {}}, r"header\.best.*got no count"),
    ],
)
def test_a_field_of_another_type_inside_is_named_with_its_place(change, message):
    with pytest.raises(ValueError, match=message):
        build("header", Outer, {"sizes": [1, 2], "widths": [], "forms": []} | change)


def test_a_missing_field_is_named():
    with pytest.raises(ValueError, match=r"header.*rows"):
        build("header", Form, {k: v for k, v in GOOD.items() if k != "rows"})
    with pytest.raises(ValueError, match=r"header.*list"):
        build("header", Form, [])
