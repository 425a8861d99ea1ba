"""Tables with one row for each entity, spread over processes: which tensors they are, and their first values.

Over several processes a tower sees local entities numbered from 0, and a table over ids holds their rows alone. All
other tensors are replicated.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gramtower._util import checks as check
from gramtower._util.torch_runtime import parallel_for
from gramtower.data.features import Features
from gramtower.distributed.shards import Shards
from gramtower.engine.towers.stack import steps

_BLOCK = 1 << 15  # rows drawn at a time; a multiple of 16, see draw_rows_
_MANY = 1 << 23  # numbers of a table beyond which threads draw its blocks: a thread takes a tenth of a second
_SHARE = 1 << 21  # numbers of such a block


@torch.no_grad()
def draw_rows_(table: Tensor, features: Features, std: float, generator: torch.Generator) -> None:
    """Fill a first layer with normal numbers; over processes with the rows that one process would have drawn.

    A table of few numbers is drawn from the generator itself. Torch draws normal numbers sixteen at a time, so that
    blocks of a multiple of sixteen give the same stream as one draw of all rows; what is left over at the end is drawn
    together with the last block. Of a larger one, every block of rows has a generator of its own, which the given one
    seeds: threads draw blocks side by side, and a process only those it holds rows of.
    """
    whole = features.kind != "ids"
    first, total = (0, len(table)) if whole else (features.first, features.total)
    stop = first + len(table)
    if total * table.shape[1] > _MANY:
        _draw_blocks_(table, first, total, std, generator)
        return
    if total == len(table):
        nn.init.normal_(table, std=std, generator=generator)
        return
    start = 0
    while start < total:
        end = total if total - start < 2 * _BLOCK else start + _BLOCK
        block = table.new_empty(end - start, table.shape[1]).normal_(std=std, generator=generator)
        a, b = max(start, first), min(end, stop)
        if a < b:
            table[a - first : b - first] = block[a - start : b - start]
        start = end


def _draw_blocks_(table: Tensor, first: int, total: int, std: float, generator: torch.Generator) -> None:
    """Rows of a large table, block by block, each from a generator of its own whose seed the given one draws."""
    stop, height = first + len(table), max(16, _SHARE // table.shape[1] // 16 * 16)
    seeds = torch.randint(2**62, (-(-total // height),), generator=generator).tolist()

    @torch.no_grad()
    def draw(number: int, end: int) -> None:
        for block in range(number, end):
            start, rows = block * height, min(height, total - block * height)
            own = torch.Generator().manual_seed(seeds[block])
            a, b = max(start, first), min(start + rows, stop)
            if b - a == rows:
                table[a - first : b - first].normal_(std=std, generator=own)
            else:  # a part of the block is another process's
                drawn = table.new_empty(rows, table.shape[1]).normal_(std=std, generator=own)
                table[a - first : b - first] = drawn[a - start : b - start]

    if first < stop:
        parallel_for(draw, list(range(first // height, -(-stop // height) + 1)))


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
