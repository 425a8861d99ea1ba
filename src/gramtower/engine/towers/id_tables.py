"""Tables with one row for each entity, spread over processes: which tensors they are, and their first values.

Over several processes a tower sees local entities numbered from 0, and a table over ids holds their rows alone. All
other tensors are replicated. Checked by tests/test_distributed.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gramtower import _checks as check
from gramtower.data.features import Features
from gramtower.distributed.shards import Shards
from gramtower.engine.towers.stack import steps
from gramtower.runtime.threads import parallel_for

_BLOCK = 1 << 15  # rows drawn at a time; a multiple of 16, see draw_rows_
_LARGE = 1 << 27  # numbers of a table that take a thread the better part of a second to draw


@torch.no_grad()
def draw_rows_(table: Tensor, features: Features, std: float, generator: torch.Generator) -> None:
    """Fill a first layer with normal numbers; over processes with the rows that one process would have drawn.

    Torch draws normal numbers sixteen at a time, so that blocks of a multiple of sixteen give the same stream as one
    draw of all rows; what is left over at the end is drawn together with the last block. The rows of a large table are
    drawn in parallel, each block from a generator of its own, whose seed the given one draws: the same rows whatever
    the number of threads, or of processes.
    """
    if features.kind == "ids" and features.total * table.shape[1] >= _LARGE:
        _draw_blocks_(table, features, std, generator)
        return
    if features.kind != "ids" or features.total == features.rows:
        nn.init.normal_(table, std=std, generator=generator)
        return
    start, first, stop = 0, features.first, features.first + features.rows
    while start < features.total:
        end = features.total if features.total - start < 2 * _BLOCK else start + _BLOCK
        block = table.new_empty(end - start, table.shape[1]).normal_(std=std, generator=generator)
        a, b = max(start, first), min(end, stop)
        if a < b:
            table[a - first : b - first] = block[a - start : b - start]
        start = end


def _draw_blocks_(table: Tensor, features: Features, std: float, generator: torch.Generator) -> None:
    first, stop = features.first, features.first + features.rows
    seeds = torch.randint(2**62, (-(-features.total // _BLOCK),), generator=generator).tolist()

    def draw(number: int, end: int) -> None:
        for block in range(number, end):
            start = block * _BLOCK
            own = torch.Generator().manual_seed(seeds[block])
            a, b = max(start, first), min(start + _BLOCK, features.total, stop)
            if b - a == min(_BLOCK, features.total - start):
                table[a - first : b - first].normal_(std=std, generator=own)
            else:  # a part of the block is another process's
                rows = table.new_empty(min(_BLOCK, features.total - start), table.shape[1])
                table[a - first : b - first] = rows.normal_(std=std, generator=own)[a - start : b - start]

    parallel_for(torch.no_grad()(draw), list(range(first // _BLOCK, -(-stop // _BLOCK) + 1)) if features.rows else [0])


@torch.no_grad()
def join(
    shards: Shards,
    trainable: Mapping[str, nn.Parameter],
    names: Mapping[str, Mapping[str, str]],
    sides: tuple[tuple[nn.Module, Features], tuple[nn.Module, Features]],
) -> frozenset[str]:
    """The names of the sharded tables; all other tensors are broadcast from the first process.

    Args:
        shards: the row ranges.
        trainable: trainable tensors by their name in Parameters.
        names: for each side, name in the module → name in Parameters.
        sides: module and features of the left and the right side.
    """
    used = [set(names[side].values()) for side in ("left", "right")]
    owned: set[str] = set()
    for side, (module, features) in zip(("left", "right"), sides, strict=True):
        if features.kind == "ids":
            tables = steps(module, "ids")[0].id_tables(side, features)
            owned |= {names[side][local] for local in tables if local in names[side]}
    if twice := sorted(owned & used[0] & used[1]):
        check.fail(
            "towers", f"one table {twice[0]} for both sides", "a table of its own for each side of many processes"
        )
    shared = {name: list(tensor.shape) for name, tensor in trainable.items() if name not in owned}
    reports = shards.group.gather_json({"tables": sorted(owned), "shared": shared})
    for rank, other in enumerate(reports):
        if other != reports[0]:
            differing = _first_difference(reports[0], other)
            check.fail(
                "towers", f"{differing} in process {rank}", "towers that differ between processes in table rows alone"
            )
    for name in shared:
        shards.group.copy_from_first_(trainable[name].data)
    return frozenset(owned)


def _first_difference(one: dict[str, object], other: dict[str, object]) -> str:
    for key in ("tables", "shared"):
        if one[key] != other[key]:
            return f"{key} {other[key]} instead of {one[key]}"
    return "nothing"
