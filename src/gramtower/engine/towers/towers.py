"""The two towers f and g: any two torch modules (mlp.py makes the paper's network).

A :class:`Towers` holds the modules, knows which parameters are trainable and shared, and linearises both sides at
given parameters. Over several processes a tower sees local entities numbered from 0: a table over ids holds only their
rows, and all other tensors are replicated.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from gramtower._util import checks as check
from gramtower._util.host import BlockPlan
from gramtower.data.pairs import Features, SparseBlock
from gramtower.distributed.shards import Shards
from gramtower.engine.kernels import Kernels, select
from gramtower.engine.towers import stack
from gramtower.engine.towers.linearization import Linearization, Work, check_shape, viewed_table
from gramtower.engine.towers.opaque import FIRST_LAYER
from gramtower.engine.towers.parameters import Layout, Parameters, as_parameters
from gramtower.engine.towers.stack import Sizes
from gramtower.engine.towers.steps import Named, Op, Scratch, Values, materialise
from gramtower.engine.towers.trace import Inputs

_PROBE = 3  # rows probed before the first evaluation
_Probes = WeakKeyDictionary[Features, dict[tuple[str, str], tuple[int, int]]]  # by side and steps: columns, row_bytes


@dataclass(frozen=True)
class _Prepared:
    """A tower with its tensors, probed on a few rows."""

    side: str
    features: Features
    steps: list[Op]
    values: Values
    columns: int
    row_bytes: int  # of its activations
    trained: frozenset[str]

    @property
    def viewed(self) -> bool:
        """Whether the outputs are the rows of a trained table."""
        return viewed_table(self.steps, self.features) in self.trained

    def linearize(self, plan: BlockPlan, work: Work) -> Linearization:
        return Linearization(self.side, self.steps, self.features, self.values, plan, work, self.columns)


class Towers:
    """The two networks of a model, one for each side: any two torch modules.

    Each maps feature rows to k columns; both may be the same module.

    Dense rows are passed as a tensor, ids as a LongTensor of row numbers, and sparse rows through the module's first
    layer (``nn.Linear``, ``nn.EmbeddingBag(mode="sum")`` or :class:`~gramtower.InputLinear`). Parameters with
    ``requires_grad=False`` are not trained. Modules whose rows influence each other, or that are random in their
    current mode, are refused.

    Args:
        left: f, for the left entities.
        right: g, for the right entities.

    Example:
        >>> towers = gt.Towers(torch.nn.Embedding(4, 2), torch.nn.Embedding(3, 2))
        >>> towers.size
        14
        >>> gt.Problem(sp.eye(4, 3, format="csr")).at(towers).P.shape
        torch.Size([4, 2])
    """

    def __init__(self, left: nn.Module, right: nn.Module) -> None:
        for side, module in (("left", left), ("right", right)):
            if not isinstance(module, nn.Module):
                check.fail(side, type(module).__name__, "a torch.nn.Module that maps feature rows to k columns")
        self.left, self.right = left, right
        self._names: dict[str, dict[str, str]] = {"left": {}, "right": {}}
        self._trainable: dict[str, nn.Parameter] = {}
        known: dict[int, str] = {}
        for side, module in (("left", left), ("right", right)):
            for local, parameter in module.named_parameters():
                if parameter.requires_grad:
                    name = known.setdefault(id(parameter), f"{side}.{local}")
                    self._names[side][local] = name
                    self._trainable[name] = parameter
        if not self._trainable:
            check.fail("towers", "no trainable parameter", "at least one parameter with requires_grad=True")
        kinds = {(p.dtype, p.device) for p in self._trainable.values()}
        if len(kinds) > 1 or next(iter(kinds))[0] not in (torch.float32, torch.float64):
            given = sorted(f"{dtype} on {device}" for dtype, device in kinds)
            check.fail("towers", ", ".join(given), "all parameters float32, or all float64, on one device")
        ((self.dtype, self.device),) = kinds
        self._layout = Layout.of({name: tuple(p.shape) for name, p in self._trainable.items()})
        self._probes: _Probes = WeakKeyDictionary()
        self._traced: dict[str, tuple[Any, list[Op]]] = {}
        self._tried: dict[str, list[Op]] = {}
        shared: Scratch = {}
        self._scratch = {"left": shared, "right": shared}  # the towers take turns
        self._bound = False  # whether the modules' tensors are views of a point's parameters

    def __getstate__(self) -> dict[str, object]:
        """The state without the steps, which a copy or another process rebuilds."""
        return {name: value for name, value in vars(self).items() if name != "_probes"} | {"_traced": {}, "_tried": {}}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state, _probes=WeakKeyDictionary())

    def to(self, target: torch.device | torch.dtype | str) -> Towers:
        """Move the modules to a device or cast them to a dtype, in place as nn.Module.to does; return new Towers."""
        return Towers(self.left.to(target), self.right.to(target))

    def parameters(self) -> Parameters:
        """A copy of the current trainable parameters."""
        with torch.no_grad():
            return Parameters(self._layout, torch.cat([p.reshape(-1) for p in self._trainable.values()]))

    @property
    def size(self) -> int:
        """The number of trainable parameters, which is the length of θ."""
        return self._layout.size

    @torch.no_grad()
    def load(self, parameters: Parameters | Tensor | Mapping[str, Tensor]) -> None:
        """Write parameters into the modules; they may also be a flat vector, or tensors by name."""
        written: Mapping[str, Tensor] | Parameters
        if isinstance(parameters, Mapping):
            self._check_named(parameters)
            written = parameters
        else:
            one = next(iter(self._trainable.values())).new_empty(1)
            like = Parameters(self._layout, one.expand(self.size))  # dtype, device and size, without the memory
            written = as_parameters("parameters", parameters, like)
        self.unbind()
        for name, tensor in self._trainable.items():
            tensor.copy_(written[name])

    @torch.no_grad()
    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """Use these tensors, by name, as the modules' parameters without a copy, for example those of a mapped file."""
        self._check_named(tensors)
        for name, tensor in tensors.items():
            parameter = self._trainable[name]
            if (tensor.dtype, tensor.device) != (parameter.dtype, parameter.device):
                check.fail("towers", f"{name} of {tensor.dtype}", f"{parameter.dtype} on {parameter.device}")
        self._bound = False
        for name, tensor in tensors.items():
            self._trainable[name].data = tensor

    def _check_named(self, tensors: Mapping[str, Tensor]) -> None:
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if shapes != dict(self._layout.shapes):
            differing = sorted(name for name, _ in shapes.items() ^ self._layout.shapes.items())
            given = f"other parameters, such as {differing[0]}; {self.size} numbers"
            expected = f"those that were saved; {sum(map(math.prod, shapes.values()))} numbers"
            check.fail("towers", given, expected)

    def bind(self, parameters: Parameters) -> None:
        """Make the modules' tensors views of ``parameters``, so that training keeps only one copy of θ."""
        self._bound = True
        for name, tensor in self._trainable.items():
            tensor.data = parameters[name]

    def unbind(self) -> None:
        """Replace the modules' views by copies."""
        if self._bound:
            for tensor in self._trainable.values():
                tensor.data = tensor.data.clone()
        self._bound = False

    def join(self, shards: Shards, left: Features, right: Features) -> None:
        """Find the sharded id tables; called before the first evaluation over several processes."""
        if self._layout.group is not shards.group:
            sides = (self.left, left), (self.right, right)
            owned = frozenset[str]() if shards.single else _join(shards, self._trainable, self._names, sides)
            self._layout = Layout.of(self._layout.shapes, owned, shards.group)

    def local_tensors(self, side: str, parameters: Parameters) -> Named:
        """Views of one tower's tensors in ``parameters``, by local name."""
        return {local: parameters[name] for local, name in self._names[side].items()}

    def local_names(self, side: str) -> dict[str, str]:
        """Names of one tower's trainable parameters: name in the module → name in Parameters."""
        return dict(self._names[side])

    @property
    def share_parameters(self) -> bool:
        """Whether the towers share a parameter."""
        return not set(self._names["left"].values()).isdisjoint(self._names["right"].values())

    def signature(self) -> tuple[object, ...]:
        """A key of everything else that an evaluation depends on; unchanged while no module is replaced."""
        modules = [part for side in (self.left, self.right) for part in side.modules()]
        tensors = (p for part in modules for p in part._parameters.values())
        frozen = tuple(p.data_ptr() for p in tensors if p is not None and not p.requires_grad)
        return tuple(map(_mode, modules)), frozen

    def layer_widths(self) -> tuple[list[int], list[int]] | None:
        """Output widths of both towers' layers over ids, 0 for other steps; None if some step is not analytic."""
        result: list[list[int]] = []
        for side, module in (("left", self.left), ("right", self.right)):
            ops = self._steps(side, Inputs("ids"))
            if not all(op.analytic for op in ops):
                return None
            tensors: Named = dict(module.named_parameters())
            result.append([op.layer_width(tensors) for op in ops])
        return result[0], result[1]

    def linearize(
        self,
        parameters: Parameters,
        left: Features,
        right: Features,
        kernels: Kernels,
        plans: tuple[BlockPlan, BlockPlan],
        work: Work,
        scratch: dict[str, Scratch] | None = None,
    ) -> tuple[Linearization, Linearization]:
        """Evaluate both towers at ``parameters`` over all their entities, in row blocks.

        All evaluations of these towers share buffers for the steps' results, unless ``scratch`` is given, with buffers
        for each side, so that both can run concurrently.
        """
        f, g = self._prepare(parameters, left, right, kernels, self._scratch if scratch is None else scratch)
        return f.linearize(plans[0], work), g.linearize(plans[1], work)

    def sizes(self, left: Features, right: Features, kernels: Kernels) -> Sizes:
        """The number of columns, the bytes of an entity's activations and other sizes of both towers."""
        f, g = self._prepare(None, left, right, kernels, self._scratch)
        kept = [0 if side.viewed else side.row_bytes for side in (f, g)]
        peaks = [round(kept[i] * max(op.workspace_factor for op in side.steps)) for i, side in enumerate((f, g))]
        autodiff = not all(op.analytic for side in (f, g) for op in side.steps)
        factors = sum(stack.factor_bytes(side.steps, side.features.kind, side.values) for side in (f, g))
        by_side = [stack.feature_bytes(side.features, side.steps, side.values, side.columns) for side in (f, g)]
        return Sizes(
            columns=f.columns,
            row_bytes=(peaks[0], peaks[1]),
            kept_bytes=(kept[0], kept[1]),
            least_block=(f.steps[0].least_block(f.features), g.steps[0].least_block(g.features)),
            extra=factors + 2 * self.dtype.itemsize * self.size * autodiff,
            viewed=(f.viewed and not self.share_parameters, g.viewed),
            features=lambda rows: sum(size(rows) for size in by_side),
        )

    def _prepare(
        self,
        parameters: Parameters | None,
        left: Features,
        right: Features,
        kernels: Kernels,
        scratch: dict[str, Scratch],
    ) -> tuple[_Prepared, _Prepared]:
        """Steps, tensors (of ``parameters``, or those of the modules) and sizes of both towers; checks the modules."""
        prepared: list[_Prepared] = []
        for side, module, features in (("left", self.left, left), ("right", self.right, right)):
            present = dict(module.named_parameters())
            self._check_trainable(side, present)
            tensors: Named = {name: p.detach() for name, p in present.items()}
            if parameters is not None:
                tensors |= self.local_tensors(side, parameters)
            values = Values(tensors, kernels, self.dtype, self.device, scratch=scratch.setdefault(side, {}))
            prepared.append(self._prepare_side(side, module, features, values))
        f, g = prepared
        if f.columns != g.columns:
            check.fail("towers", f"{f.columns} columns left and {g.columns} right", "the same number of columns")
        return f, g

    def _check_trainable(self, side: str, present: Mapping[str, nn.Parameter]) -> None:
        """Refuse a module whose trainable parameters have changed since these towers were created."""
        here = {local: id(p) for local, p in present.items() if p.requires_grad}
        made = {local: id(self._trainable[name]) for local, name in self._names[side].items()}
        if here != made:
            first = min(dict(here.items() ^ made.items()))
            given = f"{first} replaced, added, removed, frozen or unfrozen since gramtower.Towers was created"
            check.fail(f"{side} tower", given, "the same trainable parameters, or a new gramtower.Towers")

    def _prepare_side(self, side: str, module: nn.Module, features: Features, values: Values) -> _Prepared:
        stack.refuse_unfit(side, module)
        codes = features.kind == "dense" and not features.arrays[0].is_floating_point()
        ops = self._steps(side, Inputs(features.kind, 0 if features.kind == "ids" else features.width, codes))
        columns, row_bytes = self._probe(side, module, ops, features, values)
        return _Prepared(side, features, ops, values, columns, row_bytes, frozenset(self._names[side]))

    def _steps(self, side: str, inputs: Inputs) -> list[Op]:
        """The steps of one side's module, rebuilt when a submodule, its mode or its hooks have changed."""
        module = self.left if side == "left" else self.right
        parts = tuple(map(_mode, module.modules()))
        state = (inputs, parts, tuple((id(p), p.requires_grad) for p in module.parameters()))
        if side not in self._traced or self._traced[side][0] != state:
            self._traced[side] = (state, stack.steps(module, inputs))
        return self._traced[side][1]

    def embed(self, side: str, features: Features, parameters: Parameters | None = None) -> Tensor:
        """Embeddings of any entities, computed in row blocks.

        Args:
            side: "left" or "right".
            features: features of the entities, with the same columns as in training.
            parameters: θ; by default the current parameters.
        """
        module = self.left if side == "left" else self.right
        tensors: Named = {name: p.detach() for name, p in module.named_parameters()}
        if parameters is not None:
            tensors |= self.local_tensors(side, parameters)
        values = Values(tensors, select(self.device), self.dtype, self.device)
        return self._prepare_side(side, module, features, values).linearize(BlockPlan(4096, False), Work()).outputs

    def _probe(
        self, side: str, module: nn.Module, ops: list[Op], features: Features, values: Values
    ) -> tuple[int, int]:
        """Number of columns and activation bytes per row, from a few rows; refuses modules that cannot be a tower.

        The result is cached for a module and a set of features; the probed rows do not count as work.
        """
        features = features.parent or features
        known = self._probes.setdefault(features, {})
        key = (side, repr([(type(op).__name__, op.label) for op in ops]))
        if key not in known:
            stack.check_magnitude(side, features, self.dtype)
            ops[0].check_features(side, features)
            rows = min(_PROBE, features.rows)  # 0 in a process without rows
            with stack.same_mode(side, module):
                y, size = _try_rows(side, ops, features, values, rows)
            check_shape(side, y, rows, None)
            if y.dtype != self.dtype:
                check.fail(f"{side} tower", f"an output of {y.dtype}", f"{self.dtype}, as its trainable parameters")
            if rows and not stack.is_stack(module) and self._tried.get(side) is not ops:
                given = [features.block(0, count, values.dtype, values.device) for count in (rows, 1)]
                again, single = stack.try_module(side, module, given[0], given[1], values)
                self._tried[side] = ops
                check_shape(side, single, 1, y.shape[1])
                if stack.differ(y, again):
                    if features.total != features.rows:
                        given_class = f"{type(module).__name__}, whose forward differs from its trace by torch.fx"
                        check.fail(f"{side} tower", given_class, "a module that can be traced, over several processes")
                    ops[:] = [stack.opaque(module)]  # differentiated by autodiff from now on
                    return self._probe(side, module, ops, features, values)
            known[key] = int(y.shape[1]), size
        return known[key]


def _mode(part: nn.Module) -> tuple[int, bool, bool]:
    """The identity of a module and the properties that its steps depend on."""
    return id(part), part.training, stack.is_hooked(part)


def _try_rows(side: str, ops: list[Op], features: Features, values: Values, rows: int) -> tuple[Tensor, int]:
    """Run a few rows through the tower; return the result and the bytes kept per row."""
    x: Any = features.block(0, rows, values.dtype, values.device)
    sizes: list[int] = []

    def pack(t: Tensor) -> Tensor:
        if not any(t.data_ptr() == v.data_ptr() for v in values.tensors.values()):
            sizes.append(t.numel() * t.element_size())
        return t

    for op in ops:
        try:
            with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                x = materialise(op.forward(x, values)[0])
        except (RuntimeError, TypeError, IndexError, AttributeError) as error:
            advice = f"; {FIRST_LAYER}" if isinstance(x, SparseBlock) else ""
            raise ValueError(f"{side} tower: {op.label} failed on a block of {rows} rows: {error}{advice}") from error
        sizes.append((x.numel() + len(x) * op.inner_columns) * x.element_size())
    total = sum(sizes) * max(op.kept_copies for op in ops)
    return x, math.ceil(total / max(1, rows))


def clone(towers: Towers) -> Towers:
    """A deep copy (shared modules stay shared)."""
    left, right = copy.deepcopy((towers.left, towers.right))
    return Towers(left, right)


@torch.no_grad()
def _join(
    shards: Shards,
    trainable: Mapping[str, nn.Parameter],
    names: Mapping[str, Mapping[str, str]],
    sides: tuple[tuple[nn.Module, Features], tuple[nn.Module, Features]],
) -> frozenset[str]:
    """Find the names of the sharded tables; broadcast all other tensors from the first process.

    ``trainable`` are tensors by their name in Parameters; ``names`` maps, for each side, names in the module to those.
    """
    used = [set(names[side].values()) for side in ("left", "right")]
    owned: set[str] = set()
    for side, (module, features) in zip(("left", "right"), sides, strict=True):
        if features.kind == "ids":
            tables = stack.steps(module, Inputs("ids"))[0].id_tables(side, features)
            owned |= {names[side][local] for local in tables if local in names[side]}
    if twice := sorted(owned & used[0] & used[1]):
        given = f"one table {twice[0]} for both sides"
        check.fail("towers", given, "a separate table for each side over several processes")
    shared = {name: list(tensor.shape) for name, tensor in trainable.items() if name not in owned}
    reports = shards.group.gather_json({"tables": sorted(owned), "shared": shared})
    for rank, other in enumerate(reports):
        if other != reports[0]:
            key = next(key for key in ("tables", "shared") if other[key] != reports[0][key])
            given = f"{key} {other[key]} instead of {reports[0][key]} in process {rank}"
            check.fail("towers", given, "towers that differ between processes only in table rows")
    for name in shared:
        shards.group.broadcast_(trainable[name].data)
    return frozenset(owned)
