"""A fitted model as a file, with its settings: :func:`write_model`, :func:`read_model`. No code runs when it is read.

    header                    :class:`Header`, as JSON
    parameters|NAME           the tensors of the towers
    left, right               embeddings, where they are not the tower's table itself
    seen_counts, seen_columns the training pairs: columns row after row, and how many each row has
    further_counts, …         pairs not learned from: those of validation, histories of added entities
    SIDE_text, SIDE_lengths   ids that are text, as one block of UTF-8 and the bytes of each; or
    SIDE_numbers              ids that are numbers; neither where rows are known by number
    left_weights, …           weights that were given as arrays
    imputed_left, …           P̃ and Q̃ of low-rank imputed labels
    scale|SIDE|PART|…         numbers by which features are scaled
    rows|SIDE|PART|…          rows of features, where the model keeps them

One process writes one file, several one each (distributed/shard_files.py); either is read by one process. Every tensor
has checksums. All of it is checked against :class:`Header` before anything is allocated: what is read is a valid model,
or an error names the file and the field.
"""

from __future__ import annotations

import itertools
import math
import typing
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor

from gramtower._util import checks as check
from gramtower._util.files import build, fits, tuples
from gramtower.data.ids import pack_ids, unpack_ids
from gramtower.data.matrices import pattern
from gramtower.distributed import shard_files as shards_file
from gramtower.distributed.shards import unsharded
from gramtower.engine.kernels.elementwise import make_activation
from gramtower.engine.objective.constants import as_imputed, degree_power
from gramtower.engine.objective.problem import Problem
from gramtower.engine.objective.regularizers import Regularizer
from gramtower.engine.towers.mlp import mlp_shapes, undrawn_towers
from gramtower.engine.towers.parameters import side_of
from gramtower.engine.towers.towers import Towers
from gramtower.model import defaults
from gramtower.model.calibration import Calibration
from gramtower.model.feature_spec import FLOATS, FeatureSpec, IdArray, TensorShape, TowerWidths
from gramtower.model.fit_data import Numbered
from gramtower.model.fitted import FittedModel, Selection, pattern_of
from gramtower.model.settings import REQUIRED, SETTINGS, ModelSettings
from gramtower.model.side import Side
from gramtower.training.result import Reason, Record

KIND = ("gramtower-model", 7)
_ARRAYS = ("left_weights", "right_weights")
_FACTORS = ("imputed_left", "imputed_right")
_PARAMS: dict[str, Any] = {
    name: str | None if name in _ARRAYS else kind  # arrays are tensors
    for name, kind in typing.get_type_hints(ModelSettings).items()
    if SETTINGS[name].saved
}
_LATER = {name: one.before for name, one in SETTINGS.items() if one.before is not REQUIRED}  # missing in older files
_LIMIT = 2**31
_Sizes = tuple[int, int]  # of the left and of the right side


@dataclass(kw_only=True)
class Header:
    """The description of a model in its file, without the tensors."""

    params: dict[str, Any]  # the constructor's arguments, without towers and arrays
    own_towers: bool  # whether the towers are the caller's own, whose architecture is not stored
    shape: _Sizes  # numbers of left and right entities
    added: _Sizes  # how many of them, the last ones, were added after training
    numbered: Numbered  # where ids are row numbers of a matrix without ids, how many it had, left and right
    inputs: dict[str, list[dict[str, Any]]]  # what each tower sees, by side
    reason: str  # name of the reason why training stopped
    # The others are fields of the model; those with a default are not in older files.
    dim: int
    hidden: tuple[tuple[int, ...], tuple[int, ...]]
    normalize: bool
    message: str
    omega: float
    best_metric: float | None
    history: list[Record]
    same_entities: bool = False
    plain_pairs: bool = True
    activation: str | None = None
    l2: float | None = None
    embedding_l2: float | None = None
    auto_weights: str | None = None
    refine: bool = False
    path: Selection | None = None
    names: tuple[str, str] = FittedModel.names
    calibration: Calibration | None = None


_SHARED = tuple(  # fields of the header that are those of the model
    {one.name for one in fields(Header)} & {one.name for one in fields(FittedModel)} - {"reason"}
)


def write_model(path: Path, settings: ModelSettings, fitted: FittedModel) -> None:
    """Save a fitted model; the file at ``path`` is replaced in one step and stays whole if anything fails."""
    shards = fitted.shards
    with shards.group.together():
        parameters = fitted.known_towers("save it again").parameters()
        header, arrays = _header(settings, fitted)
        tensors = _tensors_of(header, fitted) | {f"parameters|{name}": part for name, part in parameters.items()}
        if (bad := _non_finite(tensors)) is not None:
            check.fail("model", f"{bad} with NaN or infinity", "a model of finite numbers")
    rows: dict[str, str] = {}
    if not shards.single:
        counted = ("left", "left_lengths", "left_numbers", "seen_counts", "further_counts")
        rows |= {name: "left" for name in counted if name in tensors}
        rows |= {name: "left ragged" for name in ("left_text", "seen_columns", "further_columns") if name in tensors}
        for name in parameters.layout.owned:
            rows[f"parameters|{name}"] = side_of(name)
        if "right" in tensors:
            rows["right"] = "right"
            tensors["right"] = tensors["right"][shards.right.first : shards.right.stop]
    shards_file.write(path, KIND, asdict(header), tensors | arrays, rows, shards)


def read_model(
    path: Path, towers: Callable[[Problem], Towers] | None, mapped: bool = False
) -> tuple[ModelSettings, FittedModel]:
    """The settings and the model of a file, its towers made by ``towers`` if they are the caller's own; see load."""
    if towers is not None and not callable(towers):
        check.fail("towers", type(towers).__name__, "a function from a Problem to Towers, or None")
    check.flag("mapped", mapped)
    if not path.exists():
        raise FileNotFoundError(f"model: {path} does not exist")
    try:
        file = shards_file.Reader(path, KIND)
        header = _checked_header(file)
        inputs = {side: FeatureSpec.from_plain(header.inputs[side]) for side in ("left", "right")}
        _check_tensors(file, header, inputs)
        with file.reading() as read:
            pairs = [_pairs(header, name, read) for name in ("seen", "further")]
            tensors = {name: read(name) for name in file.shapes}
            if not mapped:  # what is read is mapped until it is copied; towers copy their parameters themselves
                tensors |= {name: one.clone() for name, one in tensors.items() if not name.startswith("parameters|")}
            ids = {side: _ids(side, tensors) for side in ("left", "right")}
            sizes = zip(inputs.items(), header.shape, strict=True)
            inputs = {side: one.with_tensors(side, tensors, count) for (side, one), count in sizes}
            inputs["left"] = inputs["left"].with_usual_history(pairs[0])
        file.close()
        if (bad := _non_finite(tensors)) is not None:
            check.fail(bad, "NaN or infinity", "finite numbers")
    except ConnectionError:  # which says nothing about the file
        raise
    except (ValueError, OSError) as error:
        raise ValueError(f"model: {path} is damaged or not a gramtower model ({error})") from error
    params: dict[str, Any] = {k: tuples(v) for k, v in header.params.items()}
    params |= {name: tensors[name].numpy() for name in _ARRAYS if name in tensors}
    if _FACTORS[0] in tensors:
        params["imputed"] = tuple(tensors[name].numpy() for name in _FACTORS)
    settings = ModelSettings(**params, towers=towers)
    made = _towers(settings, header, inputs, tensors, mapped)
    left, right = (
        Side(side, ids[side], tensors[side] if side in tensors else _table(made, side), inputs[side], numbered, added)
        for side, numbered, added in zip(("left", "right"), header.numbered, header.added, strict=True)
    )
    return settings, FittedModel(
        left=left, right=right, trained=pairs[0], further=pairs[1], towers=made,
        shards=unsharded((left.trained, right.trained)), reason=Reason[header.reason],
        **{name: getattr(header, name) for name in _SHARED} | {"activation": _activation(header)},
    )  # fmt: skip


def _header(settings: ModelSettings, fitted: FittedModel) -> tuple[Header, dict[str, Tensor]]:
    params: dict[str, Any] = {}
    arrays: dict[str, Tensor] = {}
    settings = settings.by_name()
    for name, kind in _PARAMS.items():
        value = getattr(settings, name)
        if name in _ARRAYS and value is not None and not isinstance(value, str):
            arrays[name] = torch.from_numpy(check.as_float_array(name, value))
        elif name == "imputed" and settings.factors is not None:
            m, n = fitted.shards.left.total, fitted.shards.right.total
            arrays |= zip(_FACTORS, as_imputed(settings.factors, (m, n)).factors or (), strict=True)
        else:
            value = value.name if name == "loss" and not isinstance(value, str) else value
            value = repr(value) if name == "regularizer" and isinstance(value, Regularizer) else value
            params[name] = _plain(value)
            if not fits(kind, params[name]):
                check.fail(name, f"a {type(value).__name__}", "a value that a file can hold")
    left, right = fitted.sides
    header = Header(
        params=params, own_towers=settings.towers is not None, added=(left.added, right.added),
        shape=(fitted.shards.left.total + left.added, fitted.shards.right.total + right.added),
        numbered=fitted.numbered, inputs={side.name: side.inputs.to_plain() for side in fitted.sides},
        reason=fitted.reason.name, **{name: getattr(fitted, name) for name in _SHARED},
    )  # fmt: skip
    return header, arrays


def _plain(value: object) -> object:
    """Numbers of numpy as Python's, tuples as lists, as JSON has them."""
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return value.tolist() if isinstance(value, (np.generic, np.ndarray)) else value


def _tensors_of(header: Header, fitted: FittedModel) -> dict[str, Tensor]:
    tensors = {}
    for name, pairs in (("seen", fitted.trained), ("further", fitted.further)):
        tensors[f"{name}_counts"] = torch.from_numpy(np.diff(pairs.indptr).astype(np.int64))
        tensors[f"{name}_columns"] = torch.from_numpy(pairs.indices.astype(np.int32))
    for side in fitted.sides:
        if not _is_table(header, side.name, side.inputs):
            tensors[side.name] = side.embeddings
        packed = pack_ids(side.ids)
        if "offsets" in packed:
            packed["lengths"] = packed.pop("offsets").diff()
        tensors |= {f"{side.name}_{key}": tensor for key, tensor in packed.items()}
        tensors |= side.inputs.tensors(side.name)
    return tensors


def _is_table(header: Header, side: str, inputs: FeatureSpec) -> bool:
    """Whether a side's embeddings are its tower's table, so that they are not stored twice."""
    layers = header.hidden[("left", "right").index(side)]
    return not (header.own_towers or header.normalize or layers) and inputs.kind == "id"


def _checked_header(file: shards_file.Reader) -> Header:
    """The header, every field of its type and in its range."""
    header = build("header", Header, file.header)
    header.params = _LATER | header.params
    given = {name for name in _ARRAYS if name in file.shapes} | ({"imputed"} if _FACTORS[0] in file.shapes else set())
    for name in (*header.params, *_PARAMS):
        if (name in header.params) == (name in given) or name not in _PARAMS:
            check.fail("params", f"{'no ' * (name in _PARAMS)}{name[:40]!r}", "the arguments of TwoTower")
        if name not in given and not fits(_PARAMS[name], header.params[name]):
            check.fail(f"params.{name}", f"{header.params[name]!r}"[:60], f"{_PARAMS[name]}")
    for name, value in (("params.activation", header.params["activation"]), ("activation", header.activation)):
        if value is not None:
            make_activation(name, value)
    if not all(1 <= size < _LIMIT for size in header.shape):
        check.fail("shape", header.shape, "two numbers of entities")
    if not all(0 <= more < n for more, n in zip(header.added, header.shape, strict=True)):
        check.fail("added", header.added, "two numbers of entities, fewer than there are")
    if not all(n is None or 0 <= n < _LIMIT for n in header.numbered):
        check.fail("numbered", header.numbered, "two numbers of rows, or null")
    if not all(1 <= x < _LIMIT for x in (header.dim, *itertools.chain(*header.hidden))):
        check.fail("dim, hidden", f"{header.dim}, {header.hidden[:8]}", "positive sizes")
    if set(header.inputs) != {"left", "right"}:
        check.fail("inputs", ", ".join(header.inputs)[:60], "left and right")
    check.choice("reason", header.reason, tuple(Reason.__members__))
    for name in ("omega", "best_metric", "l2", "embedding_l2"):
        if not math.isfinite(getattr(header, name) or 0.0):
            check.fail(name, getattr(header, name), "a finite number")
    if header.auto_weights is not None:
        degree_power("auto_weights", header.auto_weights)
    if not header.history:
        check.fail("history", "no record", "at least that of the start")
    if header.calibration is not None:
        header.calibration.check()
    return header


def _check_tensors(file: shards_file.Reader, header: Header, inputs: dict[str, FeatureSpec]) -> None:
    """Refuse missing and further tensors, and those of another shape or type than the header asks for."""
    m, n = header.shape
    expected: dict[str, TensorShape] = {
        f"{name}_{what}": ((length,), (kind,))
        for name in ("seen", "further")
        for what, length, kind in (("counts", m, torch.int64), ("columns", None, torch.int32))
    }
    for side, rows, added in zip(("left", "right"), header.shape, header.added, strict=True):
        inputs[side].check_sizes(side, rows - added, n - header.added[1])
        if added and inputs[side].kind == "id":
            check.fail("added", f"{added} {side} entities known only by id", "entities with features")
        if not _is_table(header, side, inputs[side]):
            expected[side] = ((rows, header.dim), FLOATS)
        if not header.own_towers:
            hidden = header.hidden[int(side == "right")]
            shapes = mlp_shapes(side, inputs[side].width, hidden, header.dim, header.normalize)
            expected |= {f"parameters|{name}": (shape, (torch.float32,)) for name, shape in shapes.items()}
        if f"{side}_numbers" in file.shapes:
            expected[f"{side}_numbers"] = ((rows,), (torch.int64,))
        elif f"{side}_text" in file.shapes:
            expected |= {f"{side}_text": ((None,), (torch.uint8,)), f"{side}_lengths": ((rows,), (torch.int64,))}
        expected |= inputs[side].tensor_shapes(side)
        if f"{side}_weights" in file.shapes:
            expected[f"{side}_weights"] = ((rows - added,), FLOATS)
        if stored := [file.shapes[name] for name in _FACTORS if name in file.shapes]:
            rank = (stored[0][1] or 1) if len(stored[0]) == 2 else None
            expected[f"imputed_{side}"] = ((rows - added, rank), FLOATS)
    for name, shape in file.shapes.items():
        if header.own_towers and name.startswith("parameters|"):
            expected[name] = (shape, FLOATS)
    for name in expected.keys() | file.shapes.keys():
        if name not in expected or name not in file.shapes:
            check.fail("tensors", f"{'no ' if name in expected else ''}{name[:60]!r}", f"{', '.join(expected)[:200]}")
        shape, dtypes = expected[name]
        found = file.shapes[name]
        if len(found) != len(shape) or any(a not in (b, None) for b, a in zip(found, shape, strict=True)):
            check.fail(name, f"shape {found}", f"shape {shape}")
        if file.dtypes[name] not in dtypes:
            check.fail(name, file.dtypes[name], " or ".join(map(str, dtypes)))


def _pairs(header: Header, name: str, read: Callable[[str], Tensor]) -> sp.csr_matrix:
    columns, offsets = read(f"{name}_columns").numpy(), _offsets(read(f"{name}_counts"))
    shape = (header.shape[0], header.shape[1])
    pattern(name, columns, offsets, shape)
    return pattern_of(sp.csr_matrix((columns, columns, offsets), shape=shape))


def _ids(side: str, tensors: dict[str, Tensor]) -> IdArray | None:
    """The ids of a side in memory of their own; None where rows are known by number."""
    found = {name: tensor for name, tensor in tensors.items() if name.startswith(f"{side}_")}
    if f"{side}_lengths" in found:
        found[f"{side}_offsets"] = torch.from_numpy(_offsets(found[f"{side}_lengths"]))
    ids = unpack_ids(found, f"{side}_")
    return None if ids is None else ids.copy()


def _offsets(counts: Tensor) -> NDArray[np.int64]:
    if len(counts) and int(counts.min()) < 0:
        check.fail("counts", int(counts.min()), "numbers >= 0")
    return np.concatenate([[0], np.cumsum(counts.numpy())])


def _non_finite(tensors: dict[str, Tensor]) -> str | None:
    """The name of a tensor with NaN or infinity; a sum may overflow where nothing is wrong, so look closer then."""
    floats = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    doubtful = (name for name, tensor in floats.items() if not torch.isfinite(tensor.sum()))
    return next((name for name in doubtful if not torch.isfinite(floats[name]).all()), None)


def _table(towers: Towers | None, side: str) -> Tensor:
    table: Tensor = getattr(towers, side)[0].weight.detach()
    return table


def _activation(header: Header) -> str:
    return header.activation or header.params["activation"] or defaults.ACTIVATION


def _towers(
    settings: ModelSettings, header: Header, inputs: dict[str, FeatureSpec], tensors: dict[str, Tensor], mapped: bool
) -> Towers | None:
    """The towers from the stored architecture and parameters, or None if they are the caller's and were not given."""
    if header.own_towers and settings.towers is None:
        return None
    if settings.towers is None:
        sides = TowerWidths.of(inputs["left"], inputs["right"])
        hidden = header.hidden[0], header.hidden[1]
        towers = undrawn_towers(sides, hidden, header.dim, _activation(header), header.normalize)
    else:
        m, n = (size - added for size, added in zip(header.shape, header.added, strict=True))
        empty = sp.csr_matrix((m, n), dtype=np.float32)
        towers = settings.towers(Problem(empty, inputs["left"].placeholder(m), inputs["right"].placeholder(n)))
    stored = {key.partition("|")[2]: value for key, value in tensors.items() if key.startswith("parameters|")}
    (towers.adopt if mapped else towers.load)(stored)
    return towers
