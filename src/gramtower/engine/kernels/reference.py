"""The kernels in plain torch: their definition, and the fallback on devices without other kernels.

Works through the pairs in blocks so that gathered rows stay within a fixed buffer. O(|O| k) time. The other
implementations are compared with this one, and this one with dense products, in tests/test_kernels.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gramtower.data.pairs import Pairs
from gramtower.engine.kernels.elementwise import Activation, LossTerms, Observed, Scored
from gramtower.engine.kernels.layout import Order

Tangents = tuple[Tensor, Tensor]  # (W, H)
Scaled = tuple[Tensor, float]  # a tensor and a factor
_BUFFER = 1 << 22  # gathered numbers held at a time
_ROWS = 8192  # rows summed in their own dtype


def _blocks(pairs: Pairs, k: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Blocks of entries with their rows i and columns j."""
    step = max(1, _BUFFER // max(1, k))
    for start in range(0, len(pairs), step):
        part = slice(start, min(len(pairs), start + step))
        yield part, pairs.rows[part].long(), pairs.columns[part].long()


@dataclass(frozen=True)
class RowSystems:
    """One small linear system for each row of an embedding table, while the other side's embeddings are fixed.

    With B the other side's embeddings in a basis where the all-pairs curvature is diagonal, e,

        A_i s_i = −g_i
        A_i = diag(a_i e + d_i) + Σ_j c_ij b_j b_jᵀ
        g_i = diag(a_i e + d_i) y_i − a_i t_i + Σ_j x_ij b_j

    with y_i the row itself and t_i the pull of imputed labels, solved by a few steps of conjugate gradient with A_i's
    diagonal as the preconditioner. Nothing is averaged over rows: these are the systems of alternating least squares.
    Cost: a row's pairs are gathered once, and then read twice in each step, from the cache if they fit: O(|O| k steps).
    """

    y: Tensor  # rows × k, the rows themselves; the steps are written over them
    pull: Tensor  # t, rows × k, or one for all of them
    weight: Tensor  # a, for each row
    spectrum: Tensor  # e, k numbers
    shift: Tensor  # d, for each row; positive
    steps: int  # of conjugate gradient, at most
    tolerance: float  # relative residual at which a row's ends

    def solve(
        self,
        x: Tensor,
        c: Tensor,
        dots: Callable[[Tensor], Tensor],
        add_sum: Callable[[Tensor, Tensor, Tensor], None],
        B: Tensor,
    ) -> Tensor:
        """Solve all rows at once, with the numbers x and c of each pair and the other side's embeddings B.

        ``dots(D)`` are d_i · b_j of each pair, and ``add_sum(z, E, out)`` adds Σ_j z_ij e_j to out_i. Where a row's
        pairs are spread over processes, ``add_sum`` adds those of all.
        """
        base = torch.outer(self.weight, self.spectrum) + self.shift[:, None]
        g, diagonal = base * self.y - self.weight[:, None] * self.pull, base.clone()
        add_sum(x, B, g)
        add_sum(c, B * B, diagonal)
        torch.maximum(diagonal, self.shift[:, None], out=diagonal)  # but for rounding it is more
        s, r = self.y.zero_(), -g
        z = r / diagonal
        p, rz = z.clone(), (r * z).sum(1)
        enough = self.tolerance**2 * rz
        for _ in range(self.steps):
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


class Kernels:
    """The operations in plain torch; a backend is a subclass that replaces those it has faster."""

    SLOPES_FROM_OUTPUTS = False  # whether φ′ is computed from activations' outputs if it can be, and not stored
    GATHERS_BFLOAT16 = False  # whether gathered rows may be bfloat16 while the others are float32
    SOLVES_ROWS = False  # whether systems of rows are worth their time

    def dots(self, pairs: Pairs, A: Tensor, B: Tensor) -> Tensor:
        """x_e = a_i · b_j for each pair e = (i, j), in row order."""
        x = torch.empty(len(pairs), dtype=A.dtype, device=A.device)
        for part, i, j in _blocks(pairs, A.shape[1]):
            x[part] = (A[i] * B[j]).sum(1)
        return x

    def left_sum(self, pairs: Pairs, x: Tensor, B: Tensor, out: Tensor) -> None:
        """out_i += Σ_j x_ij b_j."""
        for part, i, j in _blocks(pairs, B.shape[1]):
            out.index_add_(0, i, x[part, None] * B[j])

    def right_sum(self, pairs: Pairs, x: Tensor, A: Tensor, out: Tensor) -> None:
        """out_j += Σ_i x_ij a_i."""
        for part, i, j in _blocks(pairs, A.shape[1]):
            out.index_add_(0, j, x[part, None] * A[i])

    def curvature_left(
        self, pairs: Pairs, c: Tensor, P: Tensor, W: Tensor, Q: Tensor, H: Tensor, out: Tensor
    ) -> Tensor:
        """z_e = c_e (w_i·q_j + p_i·h_j), returned; out_i += Σ_j z_ij q_j."""
        z = c * (self.dots(pairs, W, Q) + self.dots(pairs, P, H))
        self.left_sum(pairs, z, Q, out)
        return z

    def solve_left(self, pairs: Pairs, x: Tensor, c: Tensor, B: Tensor, rows: RowSystems) -> Tensor:
        """For each left row i, A_i s_i ≈ −g_i by conjugate gradient; returns Σ ‖g_i‖², and writes s over y."""
        return rows.solve(x, c, lambda D: self.dots(pairs, D, B), partial(self.left_sum, pairs), B)

    def solve_right(self, pairs: Pairs, x: Tensor, c: Tensor, A: Tensor, rows: RowSystems) -> Tensor:
        """The same for each right row j, with A gathered."""
        return rows.solve(x, c, lambda D: self.dots(pairs, A, D), partial(self.right_sum, pairs), A)

    def losses(self, pairs: Pairs, P: Tensor, Q: Tensor, terms: LossTerms) -> Observed:
        """ℓ⁺ on O with its derivatives, from the scores. One pass over O."""
        return Scored(terms, self.dots(pairs, P, Q))

    def loss_left(
        self, pairs: Pairs, P: Tensor, Q: Tensor, terms: LossTerms, out: Tensor, tangents: Tangents | None = None
    ) -> Tensor | None:
        """In one pass, without scores: x_e = ∂ℓ⁺/∂ŷ, returned, and out += X Q; None if it takes several, as here.

        With ``tangents`` = (W, H), x_e = ∂²ℓ⁺/∂ŷ² (w_i·q_j + p_i·h_j).
        """
        return None

    def inner(self, a: Tensor, b: Tensor) -> Tensor:
        """Σ a_e b_e, products and sum in float64; a scalar on the device."""
        total = torch.zeros((), dtype=torch.float64, device=a.device)
        for start in range(0, len(a), _BUFFER):
            part = slice(start, start + _BUFFER)
            total += (a[part].double() * b[part]).sum()
        return total

    def column_sums(self, x: Tensor, weight: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Σ_i weight_i x_i, in ``dtype`` or that of x; blocks of rows in x's own dtype."""
        total = torch.zeros(x.shape[1], dtype=dtype or x.dtype, device=x.device)
        for start in range(0, x.shape[0], _ROWS):
            rows = slice(start, start + _ROWS)
            total += (x[rows] if weight is None else x[rows] * weight[rows, None]).sum(0)
        return total

    def column_lines(self, x: Tensor) -> Tensor:
        """Fewer rows with the same column sums: here one."""
        return x.sum(0, keepdim=True)

    def activate(self, x: Tensor, bias: Tensor, activation: Activation) -> Tensor:
        """φ(x + bias), a bias for each column."""
        return activation.function(x + bias)

    def slope_product(
        self, g: Tensor, bias: Tensor | None, y: Tensor, activation: Activation, out: Tensor,
        initial: Scaled | None = None, sums: bool = False,
    ) -> Tensor | None:  # fmt: skip
        """``initial`` + (g + bias) ∘ φ′ written to ``out``, φ′ from the activation's output y.

        All matrices are rows × columns; that of ``initial`` may be ``out``, and so may g. Returns rows with the column
        sums of the second term with ``sums``.
        """
        product = (g if bias is None else g + bias) * activation.slope(y)
        if initial is None:
            out.copy_(product)
        else:
            torch.add(product, initial[0], alpha=initial[1], out=out)
        return self.column_lines(product) if sums else None

    def export_order(self, pairs: Pairs) -> tuple[Order | None, dict[str, Tensor]]:
        """The traversal order of pairs, none here: short tensors, and by name those O(|O|) of the order by columns."""
        return None, {}

    def import_order(self, pairs: Pairs, order: Order | None, by_columns: dict[str, Tensor] | None) -> None:
        """Restore an exported order for a copy of the same pairs; None if no sum over columns will follow."""


KERNELS = Kernels()
