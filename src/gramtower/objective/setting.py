"""The constants of the objective as tensors on a device: for all pairs, or for those of a block of left rows.

O(|O|) once, as far as weights and imputed labels of the observed pairs go. Checked through tests/test_engine.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from gramtower import _checks as check
from gramtower.data.pairs import Pairs
from gramtower.distributed.shards import Shards
from gramtower.kernels import select
from gramtower.kernels.losses import Loss, LossTerms
from gramtower.objective.imputation import Imputed

if TYPE_CHECKING:
    from gramtower.objective.problem import Problem


@dataclass(frozen=True)
class Setting:
    """The constants of the objective in one dtype on one device (see problem.py for the formula)."""

    pairs: Pairs
    labels: Tensor
    loss: Loss
    omega: float
    l2: float
    weights: tuple[Tensor | None, Tensor | None]  # a, b
    pair_weight: Tensor | None  # a_i b_j on O, None for ones
    loss_weight: Tensor | None  # weight of each observed pair's loss, None for ones
    imputed: Imputed
    pair_imputed: Tensor | float  # ỹ on O
    imputed_square: float  # ⟨P̃_c, Q̃_c⟩
    penalties: tuple[Tensor | None, Tensor | None]  # μ c_i, μ c_j
    constants: Tensor  # ω, and ỹ where it is one number
    precision: str  # of matrix products on a GPU
    pair_precision: str  # of what Gauss-Newton products gather on a GPU
    shards: Shards  # which process holds which rows; all tensors above are of this process's own rows

    @property
    def loss_terms(self) -> LossTerms:
        """What ℓ⁺ needs besides the scores."""
        return LossTerms(
            self.loss,
            self.labels,
            self.omega,
            self.pair_imputed,
            self.pair_weight,
            self.loss_weight,
            self.constants,
        )


def make_setting(
    problem: Problem,
    dtype: torch.dtype,
    device: torch.device,
    rows: tuple[int, int] | None = None,
    shared: Setting | None = None,
    with_pairs: bool = True,
) -> Setting:
    """The constants of ``problem``; with ``rows`` those of its left entities in that range and of their pairs alone.

    What belongs to right entities is taken from ``shared`` where given. Without pairs, their place is taken by an empty
    pattern: for what is about entities and all pairs together.
    """
    _check_range(problem, dtype)
    m, n = problem.pairs.shape
    start, stop = (0, m) if rows is None else rows
    pairs, where = problem.pairs, slice(None)
    if not with_pairs:
        pairs = Pairs((m, n), torch.zeros(m + 1, dtype=torch.int64), torch.zeros(0, dtype=torch.int32))
        where = slice(0, 0)
    elif rows is not None:
        pairs, where = problem.pairs.row_range(start, stop)
    pairs, kernels = pairs.to(device), select(device, problem.kernels)
    own = slice(start, stop)
    a = _tensor(_some(problem.weight_arrays[0], own), dtype, device)
    b = _tensor(problem.weight_arrays[1], dtype, device) if shared is None else shared.weights[1]
    imputed = problem.imputed.left_rows(own).to(dtype, device, None if shared is None else shared.imputed)
    pair_weight = None
    if a is not None or b is not None:
        pair_weight = torch.ones(len(pairs), dtype=dtype, device=device)
        if a is not None:
            pair_weight *= a[pairs.rows]
        if b is not None:
            pair_weight *= problem.shards.gather(b).wait()[pairs.columns]
    left_penalty = _tensor(_some(problem.penalty_arrays[0], own), dtype, device)
    right_penalty = _tensor(problem.penalty_arrays[1], dtype, device) if shared is None else shared.penalties[1]
    square = imputed.square_sum(a, b, problem.shards) if rows is None else 0.0
    return Setting(
        pairs=pairs,
        labels=_labels(problem.labels[where], dtype, device),
        loss=problem.loss,
        omega=problem.omega,
        l2=problem.l2,
        weights=(a, b),
        pair_weight=pair_weight,
        loss_weight=_tensor(_some(problem.pair_weights, where), dtype, device),
        imputed=imputed if with_pairs else imputed.left_rows(slice(0, 0)),
        pair_imputed=imputed.at_pairs(pairs, kernels, problem.shards),
        imputed_square=square,
        penalties=(left_penalty, right_penalty),
        constants=torch.tensor([problem.omega, imputed.constant], dtype=dtype, device=device),
        precision=problem.precision,
        pair_precision=problem.pair_precision,
        shards=problem.shards,
    )


def _check_range(problem: Problem, dtype: torch.dtype) -> None:
    """Refuse constants that the towers' dtype cannot hold, by name."""
    (a, b), (left, right) = problem.weight_arrays, problem.penalty_arrays
    for name, value in (
        ("omega", problem.omega), ("l2", problem.l2), ("embedding_l2", problem.embedding_l2),
        ("imputed", problem.imputed.constant), ("imputed", problem.imputed.factors), ("pairs", problem.labels),
        ("left_weights", a), ("right_weights", b), ("pair_weights", problem.pair_weights),
        ("embedding_l2 and frequency_power", left), ("embedding_l2 and frequency_power", right),
    ):  # fmt: skip
        for part in value if isinstance(value, tuple) else (value,):
            if part is not None:
                check.fits(name, part, dtype)


def _some(array: NDArray[Any] | None, where: slice) -> NDArray[Any] | None:
    return None if array is None else array[where]


def _tensor(array: NDArray[Any] | None, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    return None if array is None else torch.tensor(array, dtype=dtype, device=device)


def _labels(array: NDArray[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """R on O; one number standing for all where they are equal, as for plain implicit feedback."""
    if len(array) and (array == array[0]).all():
        return torch.tensor([array[0]], dtype=dtype, device=device).expand(len(array))
    return torch.tensor(array, dtype=dtype, device=device)
