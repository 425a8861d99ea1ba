"""The paper's network (Section "Model and Hyper-parameters"), initialised from a seed, or uninitialised.

Torch's global generator is not used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor, nn

from gramtower._util import checks as check
from gramtower._util.checks import Hidden, check_hidden
from gramtower._util.host import free_memory, parallel_for, readable
from gramtower.data.pairs import Features
from gramtower.engine.kernels.elementwise import make_activation
from gramtower.engine.towers.layers import InputLinear
from gramtower.engine.towers.towers import Towers

_LONGEST = 10.0  # largest initial score of normalised rows
_EPS = 1e-5  # added to the mean square of a row before it is divided by its root
_COPIES = 2  # copies of θ on the host: as drawn, and cast or on its way to the device
_BLOCK = 1 << 15  # rows drawn at a time; a multiple of 16, see draw_rows_
_MANY = 1 << 23  # size of a table above which threads draw its blocks: one thread needs a tenth of a second
_SHARE = 1 << 21  # numbers in such a block


class TwoSided(Protocol):
    """The part of a problem that towers are made for."""

    @property
    def left(self) -> Features: ...

    @property
    def right(self) -> Features: ...


def mlp_towers(
    problem: TwoSided,
    hidden: Hidden = (256, 256),
    dim: int = 128,
    activation: str = "elu",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    normalize: bool = False,
) -> Towers:
    """Create two fully connected networks for a problem, as in the paper.

    There is no activation after the last layer.

    First-layer weights are drawn so that pre-activations have standard deviation 0.1 for any features, weights of the
    layers above by He's rule; biases start at zero. Scaling a one-hot first layer by its fan-in instead would start at
    a saddle point, P ≈ Q ≈ 0.

    Args:
        problem: the problem, which has the features of both sides.
        hidden: widths of the hidden layers; ``()`` gives linear towers without bias. A pair of such sequences is for
            the left and the right tower.
        dim: k, the number of columns of the embeddings.
        activation: one of elu, relu, gelu, tanh, silu, sigmoid, softplus, leaky_relu, selu, mish; or leaky_relu(0.25),
            with that slope below zero.
        seed: seed of the random numbers.
        dtype: torch.float32 or torch.float64.
        normalize: whether to normalise the rows of both towers to the same length by nn.RMSNorm, whose learned scales
            are the same for all rows: scores are cosines of rows, times a factor of at most 10 at the start.

    Example:
        >>> problem = gt.Problem(sp.eye(4, 3, format="csr"))
        >>> gt.mlp_towers(problem, hidden=(8,), dim=2).left(torch.arange(4)).shape
        torch.Size([4, 2])
    """
    if dtype not in (torch.float32, torch.float64):
        check.fail("dtype", dtype, "torch.float32 or torch.float64")
    towers = undrawn_towers(problem, hidden, dim, activation, check.flag("normalize", normalize), copies=_COPIES)
    generator = torch.Generator().manual_seed(check.seed(seed))
    for tower, features in ((towers.left, problem.left), (towers.right, problem.right)):
        _draw_(tower, features, generator)
    return towers.to(dtype)


def undrawn_towers(
    problem: TwoSided, hidden: Hidden, dim: int, activation: str, normalize: bool = False, copies: int = 1
) -> Towers:
    """The same networks, uninitialised, for parameters to be loaded; refused if ``copies`` do not fit the memory."""
    if not all(isinstance(getattr(problem, side, None), Features) for side in ("left", "right")):
        check.fail("problem", type(problem).__name__, "a gramtower.Problem")
    make_activation("activation", activation)
    dim = check.count("dim", dim)
    left, right = ([*widths, dim] for widths in check_hidden(hidden))
    _check_size(((problem.left.width, left), (problem.right.width, right)), copies)

    def tower(features: Features, widths: list[int]) -> nn.Module:
        layers: list[nn.Module] = [InputLinear(features.width, widths[0], bias=len(widths) > 1, draw=False)]
        for fan_in, fan_out in pairwise(widths):
            layers += [make_activation("activation", activation), nn.Linear(fan_in, fan_out)]
        if normalize:
            layers.append(nn.RMSNorm(dim, eps=_EPS))
        return nn.Sequential(*layers)

    with torch.random.fork_rng(devices=[]):  # nn.Linear draws numbers that are not used
        return Towers(tower(problem.left, left), tower(problem.right, right))


def mlp_shapes(
    side: str, width: int, hidden: Sequence[int], dim: int, normalize: bool = False
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the parameters of one side's tower over ``width`` feature columns."""
    widths = [*hidden, dim]
    shapes: dict[str, tuple[int, ...]] = {f"{side}.0.weight": (width, widths[0])}
    if hidden:
        shapes[f"{side}.0.bias"] = (widths[0],)
    for layer, (fan_in, fan_out) in enumerate(pairwise(widths), 1):
        shapes |= {f"{side}.{2 * layer}.weight": (fan_out, fan_in), f"{side}.{2 * layer}.bias": (fan_out,)}
    if normalize:
        shapes[f"{side}.{2 * len(hidden) + 1}.weight"] = (dim,)
    return shapes


def _check_size(sides: tuple[tuple[int, list[int]], tuple[int, list[int]]], copies: int) -> None:
    """Refuse layers that do not fit the free memory, given the number of inputs and the widths of each side."""

    def size(dim: int) -> int:
        layers = [[inputs, *widths[:-1], dim] for inputs, widths in sides]
        return 4 * copies * sum((a + 1) * b for widths in layers for a, b in pairwise(widths))

    free, (left, right) = free_memory(torch.device("cpu")), (tuple(widths[:-1]) for _, widths in sides)
    dim = sides[0][1][-1]
    if size(dim) > free:
        name = "hidden" if size(1) > free else "dim"
        given = dim if name == "dim" else left if left == right else (left, right)
        inputs = sum(inputs for inputs, _ in sides)
        expected = f"towers that fit the free memory, {readable(free)}; with {inputs:,} inputs these take "
        check.fail(name, given, expected + readable(size(dim)))


def _draw_(tower: nn.Module, features: Features, generator: torch.Generator) -> None:
    for layer in tower.modules():
        if isinstance(layer, InputLinear):
            draw_rows_(layer.weight, features, 0.1 / math.sqrt(max(features.mean_square_norm(), 1e-12)), generator)
        elif isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=math.sqrt(2.0 / layer.in_features), generator=generator)
        elif isinstance(layer, nn.RMSNorm):
            nn.init.constant_(layer.weight, math.sqrt(_LONGEST / layer.normalized_shape[0]))
        if isinstance(layer, (InputLinear, nn.Linear)) and layer.bias is not None:
            nn.init.zeros_(layer.bias)


@torch.no_grad()
def draw_rows_(table: Tensor, features: Features, std: float, generator: torch.Generator) -> None:
    """Fill a first layer with normal numbers; a process gets the rows that a single process would have drawn.

    A small table is drawn from the generator itself. Torch draws normal numbers sixteen at a time, so that blocks of a
    multiple of sixteen rows give the same stream as one draw of all rows; the remainder is drawn together with the last
    block. In a larger table, every block of rows has its own generator, seeded by the given one: threads draw blocks
    in parallel, and a process draws only the blocks of its rows.
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
    """Fill a large table block by block, each from its own generator, whose seed the given generator draws."""
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
            else:  # another process has some of the block's rows
                drawn = table.new_empty(rows, table.shape[1]).normal_(std=std, generator=own)
                table[a - first : b - first] = drawn[a - start : b - start]

    if first < stop:
        parallel_for(draw, list(range(first // height, -(-stop // height) + 1)))
