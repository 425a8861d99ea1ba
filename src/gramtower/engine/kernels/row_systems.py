"""One small linear system for each row of an embedding table, while the other side's embeddings are fixed.

With B the other side's embeddings in a basis where the all-pairs curvature is diagonal, e,

    A_i s_i = −g_i
    A_i = diag(a_i e + d_i) + Σ_j c_ij b_j b_jᵀ
    g_i = diag(a_i e + d_i) y_i − a_i t_i + Σ_j x_ij b_j

with y_i the row itself and t_i the pull of imputed labels, solved by a few steps of conjugate gradient with A_i's
diagonal as the preconditioner. Nothing is averaged over rows: these are the systems of alternating least squares. Cost:
a row's pairs are gathered once, and then read twice in each step, from the cache if they fit: O(|O| k steps).
:func:`solve_batched` is the definition, in plain torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowSystems:
    """The systems of one side's rows."""

    y: Tensor  # rows × k, the rows themselves; the steps are written over them
    pull: Tensor  # t, rows × k, or one for all of them
    weight: Tensor  # a, for each row
    spectrum: Tensor  # e, k numbers
    shift: Tensor  # d, for each row; positive
    steps: int  # of conjugate gradient, at most
    tolerance: float  # relative residual at which a row's ends


def solve_batched(
    rows: RowSystems,
    x: Tensor,
    c: Tensor,
    dots: Callable[[Tensor], Tensor],
    add_sum: Callable[[Tensor, Tensor, Tensor], None],
    B: Tensor,
) -> Tensor:
    """Solve all rows at once, with the numbers x and c of each pair and the other side's embeddings B.

    ``dots(D)`` are d_i · b_j of each pair, and ``add_sum(z, E, out)`` adds Σ_j z_ij e_j to out_i.
    """
    base = torch.outer(rows.weight, rows.spectrum) + rows.shift[:, None]
    g, diagonal = base * rows.y - rows.weight[:, None] * rows.pull, base.clone()
    add_sum(x, B, g)
    add_sum(c, B * B, diagonal)
    torch.maximum(diagonal, rows.shift[:, None], out=diagonal)  # but for rounding it is more
    s, r = rows.y.zero_(), -g
    z = r / diagonal
    p, rz = z.clone(), (r * z).sum(1)
    enough = rows.tolerance**2 * rz
    for _ in range(rows.steps):
        product = base * p
        add_sum(c * dots(p), B, product)
        bend = (p * product).sum(1)
        goes_on = (rz > enough) & (bend > 0)
        size = torch.where(goes_on, rz / bend, 0.0)
        s += size[:, None] * p
        r -= size[:, None] * product
        z = r / diagonal
        after = (r * z).sum(1)
        turn = torch.where(goes_on, after / rz, 0.0)
        p, rz = z + turn[:, None] * p, torch.where(goes_on, after, 0.0)
    return g.double().square().sum()
