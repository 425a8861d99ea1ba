"""What carried the score of a pair: the score as a sum over what is known of one of its entities.

What a tower f sees of an entity is a row x of features (its history, its table's columns, its own id), and the score
of the pair is s(x) = q·f(x), q being the embedding of the other entity. Its parts are those of integrated gradients
along the line from nothing known (x = 0) to x,

    s(x) = s(0) + Σ_c x_c ∫₀¹ ∂s/∂x_c(t x) dt,

    linear towers             x_c (w_c·q), w_c a row of the table: exact, s(0) = 0
    one hidden layer          the integral in closed form, (σ(b + z) − σ(b)) / z of each hidden unit, z = xW: exact
    other towers              Gauss-Legendre quadrature, finer until it is exact to 10⁻⁶ or the points are spent

at the cost of nnz(x) × width and at most _MOST passes of one row through the layers after the first. What quadrature
misses is ``remainder``. All in float64.

Entities known only by id are explained by those they were observed with (:class:`RowEquations`). A linear tower over
ids gives every entity its own vector. Where training ended, the gradient along the vector p of left entity i is

    r = Σ_(j∈O_i) ∂ℓ⁺_ij q_j + ω a_i (Q_c p − Q̂) + (μ c_i + λ) p,      Q_c = QᵀBQ,  Q̂ = ỹ Σ_j b_j q_j.

With the curvatures ∂²ℓ⁺ of its pairs, H = Σ_(j∈O_i) ∂²ℓ⁺_ij q_j q_jᵀ + ω a_i Q_c + (μ c_i + λ) I is the Hessian along
p, and for any p, whatever the loss,

    p = H⁻¹ ( Σ_(j∈O_i) (∂²ℓ⁺_ij s_ij − ∂ℓ⁺_ij) q_j + ω a_i Q̂ + r ),      s_ij = p·q_j.

The product with q gives the score as one part for each observed j, one for all unobserved pairs, and q·H⁻¹r, which is
zero at the row's optimum. For the squared loss these are the normal equations of least squares, as in implicit's
``explain``; for other losses those of the last Newton step. Cost: O(|O| + n k²) once, then O(|O_i| k² + k³) a pair.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import scipy  # its modules are loaded when they are used
import scipy.sparse as sp
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gramtower._util import checks as check
from gramtower.data.tables import FeaturesLike
from gramtower.engine.kernels.elementwise import ACTIVATIONS, LossTerms, Scored, as_loss
from gramtower.engine.objective.formulas import column_sums, gram
from gramtower.engine.objective.problem import Problem
from gramtower.engine.objective.regularizers import as_regularizer
from gramtower.engine.towers.layers import InputLinear, split_first
from gramtower.model import defaults
from gramtower.model.fit_data import seen_by_towers
from gramtower.model.fit_parts import imputed_label
from gramtower.model.fitted import FittedModel
from gramtower.model.settings import ModelSettings, given
from gramtower.model.side import HistoriesLike, Name, Side, described, history_matrix, new_features

_FEWEST, _MOST, _CLOSE, _SMALL = 16, 512, 1e-6, 1e-9
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Contribution:
    """One part of a score."""

    kind: str  #: "history" (an entity it was observed with), "feature" (a column), or "id" (its own vector)
    name: Name  #: the id of that entity, the name or number of the column, or its own id
    value: float  #: what it adds to the score


@dataclass(frozen=True)
class Explanation:
    """The score of a pair as a sum: score = base + Σ contributions + remainder."""

    score: float  #: p_iᵀq_j in float64
    side: str  #: whose entity it is explained by
    method: str  #: "linear", "integrated gradients" or "normal equations"; see docs/explaining.md
    contributions: list[Contribution]  #: the parts, from the largest to the smallest
    #: the score of an entity of which nothing is known; of the normal equations, what all unobserved pairs add
    base: float
    remainder: float  #: what is left: of a quadrature, or of a training that stopped before the row's optimum

    def to_plain(self, most: int | None = None) -> dict[str, Any]:
        """As JSON has it: the ``most`` largest in size, and the sum of all others."""
        chosen = sorted(self.contributions, key=lambda one: -abs(one.value))[:most]
        shown = sorted(chosen, key=lambda one: -one.value)
        others = sum(one.value for one in self.contributions) - sum(one.value for one in shown)
        named = [vars(one) | {"name": list(one.name) if isinstance(one.name, tuple) else one.name} for one in shown]
        return {
            "score": self.score, "side": self.side, "method": self.method, "contributions": named,
            "others": {"count": len(self.contributions) - len(shown), "value": others if len(chosen) else 0.0},
            "base": self.base, "remainder": self.remainder,
        }  # fmt: skip


class Explainer:
    """Explains pairs of one fitted model; what all explanations need is computed once."""

    def __init__(self, settings: ModelSettings, fitted: FittedModel) -> None:
        fitted.need_whole()
        self._fitted = fitted
        self._equations = cache(lambda side: RowEquations(settings, fitted, side))
        self._tower = cache(lambda side: _Tower(getattr(fitted.known_towers("explain scores"), side)))

    def explain(
        self, own: int | None, other: int, side: str = "left", features: FeaturesLike = None,
        histories: HistoriesLike | None = None,
    ) -> Explanation:  # fmt: skip
        """The score of the row of the entity that it is explained by, None for a new one, with another one's row."""
        this, that = self._sides(side)
        q = that.embeddings[other].double()
        if own is None and features is None and histories is None:
            check.fail(side, "None", f"an id, or what describes a new entity: {side}_features or histories")
        if this.inputs.kind == "id":
            if features is not None or histories is not None or own is None:
                this.inputs.listed(side, features)
                check.fail("histories", "a history", f"an id: this model knows {this.called} entities only by id")
            columns, values, base, score = self._equations(side).parts(own, q)
            return _made(score, side, "normal equations", _named("history", that, columns, values), base)
        return self._by_inputs(this, that, self._inputs(this, own, features, histories), q, own, features)

    def of_keys(
        self, keys: Mapping[str, Name | None], side: str, features: Mapping[str, FeaturesLike],
        histories: HistoriesLike | None,
    ) -> Explanation:  # fmt: skip
        """The score of two ids, by side; None for a new entity of the side that it is explained by."""
        this, that = self._sides(side)
        if features[that.name] is not None:
            check.fail(f"{that.name}_features", "features", f"None: the score is explained by the {this.called} entity")
        if histories is not None and side == "right":
            check.fail("histories", "a history", 'None with side="right"')
        other, own = that.row(keys[that.name]), None if keys[side] is None else this.row(keys[side])
        return self.explain(own, other, side, features[side], histories)

    def _sides(self, side: str) -> tuple[Side, Side]:
        """The side that scores are explained by, and the other one."""
        return self._fitted.side(side), self._fitted.side("right" if side == "left" else "left")

    def _by_inputs(
        self, this: Side, that: Side, x: sp.csr_matrix, q: Tensor, own: int | None, features: FeaturesLike
    ) -> Explanation:
        rows = iter([] if features is None else described(this, features).parts)  # in the order of the parts below
        columns, row = x.indices.astype(np.int64), torch.from_numpy(x.data.astype(np.float64))
        values, base, score, method = self._tower(this.name).parts(columns, row, x.shape[1], q)
        found: list[Contribution] = []
        for part, span in this.inputs.spans:
            inside = (columns >= span.start) & (columns < span.stop)
            places, parts = columns[inside] - span.start, values[inside]
            if part.kind == "history":
                found += _named("history", that, places, parts)
            elif part.kind == "id":
                found += _named("id", this, places, parts)
            else:
                frame = next(rows, None)
                names = None if part.table is None else part.table.names_in(frame)
                labels = places.tolist() if names is None else [names[place] for place in places.tolist()]
                pairs = zip(labels, parts.tolist(), strict=True)
                found += [Contribution("feature", label, value) for label, value in pairs]
        if own is not None and own < this.trained and self._fitted.refine and this.inputs.features_alone:
            moved = float(this.embeddings[own].double() @ q)
            found += _named("id", this, np.array([own]), np.array([moved - score]))
            score = moved
        return _made(score, this.name, method, found, base)

    def _inputs(
        self, this: Side, own: int | None, features: FeaturesLike, histories: HistoriesLike | None
    ) -> sp.csr_matrix:
        """What the tower sees of an entity, one row."""
        inputs, fitted = this.inputs, self._fitted
        if features is None and own is not None and this.name == "left" and fitted.combinations is not None:
            features = fitted.combinations.row(own)
        stored = inputs.stored_rows(own) if features is None and own is not None else None
        if features is None and inputs.given and stored is None:
            kept = " (a model fitted with store_features=True keeps those of known entities)" * (own is not None)
            expected = f"the row of features that describes the {this.called} entity{kept}"
            check.fail(f"{this.name}_features", "None", expected)
        history = None
        if histories is not None:
            history = history_matrix(fitted.right, histories)
        elif inputs.has_history and own is not None:
            if inputs.has_order:
                expected = "the entity's history, the newest last: a model keeps which pairs there are, not their order"
                check.fail("histories", "None", expected)
            history = (fitted.trained if own < this.trained else fitted.further)[own]
        if stored:
            row = inputs.encoded(this.name, stored, 1, history)
        else:
            row = new_features(this, None if features is None else described(this, features), history)
        if row.shape[0] != 1:
            check.fail(f"{this.name}_features, histories", f"{row.shape[0]} rows", "one, of the entity asked about")
        x = sp.csr_matrix(row, dtype=np.float32)
        if own is not None and own < this.trained:
            for part, span in inputs.spans:
                if part.kind == "id":
                    one = (np.full(1, part.factor, np.float32), (np.zeros(1, np.int64), np.array([span.start + own])))
                    x = sp.csr_matrix(x + sp.csr_matrix(one, shape=x.shape))
        return x


class _Tower:
    """A module as a first layer and the rest, in float64; modules of another form have no first layer."""

    def __init__(self, module: nn.Module) -> None:
        self._first, self._rest = split_first(module)

    @cached_property
    def _tail(self) -> nn.Module:
        return copy.deepcopy(self._rest).cpu().double().requires_grad_(False).eval()

    @torch.no_grad()
    def parts(self, columns: NDArray[np.int64], x: Tensor, width: int, q: Tensor) -> tuple[Array, float, float, str]:
        """What each column of a sparse row adds, s(0), s(x), and by which method."""
        places = torch.from_numpy(columns)
        if self._first is None:
            z, shift = torch.zeros(width, dtype=torch.float64), torch.zeros(width, dtype=torch.float64)
            z[places] = x
            back: Callable[[Tensor], Tensor] = lambda slope: slope[places]  # noqa: E731
        else:
            weight = self._first.weight.detach()
            table = (weight[places] if isinstance(self._first, InputLinear) else weight[:, places].t()).cpu().double()
            bias = self._first.bias
            z = x @ table
            shift = torch.zeros_like(z) if bias is None else bias.detach().cpu().double()
            back = lambda slope: table @ slope  # noqa: E731
        slope, base, score, method = self._slopes(z, shift, q)
        return (x * back(slope)).numpy(), base, score, method

    def _slopes(self, z: Tensor, shift: Tensor, q: Tensor) -> tuple[Tensor, float, float, str]:
        """∫₀¹ ∇s(shift + t z) dt, with s at both ends."""
        tail = self._tail
        if isinstance(tail, nn.Sequential) and not len(tail):
            return q, float(shift @ q), float((shift + z) @ q), "linear"
        base, score = (float(one) for one in self._scores(torch.stack([shift, shift + z]), q))
        if isinstance(tail, nn.Sequential) and len(tail) == 2 and type(tail[0]) in _ELEMENTWISE:
            last = tail[1]
            if isinstance(last, nn.Linear):
                return _secants(tail[0], shift, z) * (q @ last.weight), base, score, "integrated gradients"
        points = _FEWEST
        while True:
            slope = self._quadrature(z, shift, q, points)
            missed = abs(score - base - float(z @ slope))
            if missed <= _CLOSE * max(1.0, abs(score)) or points >= _MOST:
                return slope, base, score, "integrated gradients"
            points *= 2

    def _quadrature(self, z: Tensor, shift: Tensor, q: Tensor, points: int) -> Tensor:
        nodes, weights = np.polynomial.legendre.leggauss(points)
        at = torch.from_numpy((nodes + 1) / 2)[:, None] * z + shift
        with torch.enable_grad():
            at.requires_grad_()
            (slopes,) = torch.autograd.grad(self._scores(at, q).sum(), at)
        return torch.from_numpy(weights / 2) @ slopes

    def _scores(self, at: Tensor, q: Tensor) -> Tensor:
        try:
            return self._tail(at) @ q  # type: ignore[no-any-return]
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            found = f"a module that cannot take dense rows ({' '.join(str(error).split())[:120]})"
            check.fail("towers", found, "one that begins with a linear layer")


_ELEMENTWISE = tuple(type(make()) for make in ACTIVATIONS.values())


def _secants(activation: nn.Module, shift: Tensor, z: Tensor) -> Tensor:
    """(σ(b + z) − σ(b)) / z of each unit, the slope half way where z vanishes."""
    small = z.abs() < _SMALL
    with torch.enable_grad():
        middle = (shift + z / 2).requires_grad_()
        (slope,) = torch.autograd.grad(activation(middle).sum(), middle)
    rise = activation(shift + z) - activation(shift)
    return torch.where(small, slope, rise / torch.where(small, torch.ones_like(z), z))


def _named(kind: str, side: Side, rows: NDArray[np.int64], values: Array) -> list[Contribution]:
    names = (rows if side.ids is None else side.ids[rows]).tolist()
    return [Contribution(kind, name, value) for name, value in zip(names, values.tolist(), strict=True)]


def _made(score: float, side: str, method: str, found: list[Contribution], base: float) -> Explanation:
    ordered = sorted(found, key=lambda one: -one.value)
    remainder = score - base - sum(one.value for one in ordered)
    return Explanation(score, side, method, ordered, base, remainder)


_BLOCK = 8192


class RowEquations:
    """The normal equations of the vectors of one side's entities; see the head of this module."""

    def __init__(self, settings: ModelSettings, fitted: FittedModel, side: str) -> None:
        place = 0 if side == "left" else 1
        if settings.towers is not None or fitted.hidden[place] or fitted.normalize:
            given = f"{fitted.side(side).called} entities known only by id, through hidden or normalising layers"
            check.fail("model", given, f"features or a history on the {side}, or ids with hidden=(), not normalised")
        if not fitted.plain_pairs:
            given = "one that was fitted with labels or weights, which it does not keep"
            check.fail("model", given, f"pairs without values, or features or a history on the {side}")
        m, n = fitted.left.trained, fitted.right.trained
        pairs = fitted.trained if fitted.shape == (m, n) else fitted.trained[:m, :n]
        problem = _objective(settings, fitted, pairs)
        self._loss, self._omega, self._imputed = problem.loss, problem.omega, problem.imputed.constant
        self._left, self._pairs = side == "left", sp.csr_matrix(pairs if side == "left" else pairs.T)
        this, that = fitted.sides if self._left else fitted.sides[::-1]
        self._own, self._others = this.embeddings, that.embeddings[: that.trained]
        self._pair_weights: NDArray[np.floating] | None = None  # of the observed pairs of each left entity
        if problem.pair_weights is not None:
            self._pair_weights = np.zeros(m)
            self._pair_weights[np.repeat(np.arange(m), np.diff(pairs.indptr))] = problem.pair_weights
        weights = problem.weight_arrays
        self._weight, self._other_weight = weights[place], weights[1 - place]
        self._l2, self._penalty = problem.l2 * _table_weight(problem, side), problem.penalty_arrays[place]
        self._gramian, self._sum = _sums(self._others, self._other_weight)
        self._factors: tuple[Tensor, Tensor] | None = None  # of low-rank imputed labels, this side's first
        if problem.imputed.factors is not None:
            left, right = (factor.double() for factor in problem.imputed.factors)
            self._factors = (left, right) if self._left else (right, left)
            self._sum = _sums(self._others, self._other_weight, self._factors[1])[1]
        self._mean: Tensor | None = None  # of the right embeddings, which fitted labels subtract
        if problem.imputed.fitted:
            b = weights[1]
            total = float(n) if b is None else float(b.sum())
            self._mean = (self._sum if self._left else _sums(this.embeddings[:n], b)[1]) / total
            if self._left:
                self._others = (self._others.double() - self._mean).to(self._others.dtype)
                self._gramian -= total * torch.outer(self._mean, self._mean)

    def parts(self, row: int, q: Tensor) -> tuple[NDArray[np.int64], Array, float, float]:
        """The entities observed with one, what each adds to its score with q, what all pairs add, and the score."""
        columns = self._pairs.indices[self._pairs.indptr[row] : self._pairs.indptr[row + 1]].astype(np.int64)
        p, Q = self._own[row].double(), self._others[torch.from_numpy(columns)].double()
        score, base = float(p @ q), 0.0
        if self._mean is not None:  # scores are margins above the mean score, which is the base
            base = float((p if self._left else q) @ self._mean)
            p, q = (p, q - self._mean) if self._left else (p - self._mean, q)
        imputed: Tensor | float = self._imputed
        omega, total = self._omega, self._sum * self._imputed  # Σ_j b_j ỹ_j q_j
        if self._factors is not None:
            imputed, total = self._factors[1][columns] @ self._factors[0][row], self._sum @ self._factors[0][row]
        own = 1.0 if self._weight is None else float(self._weight[row])
        pair_weight = torch.full((len(columns),), own, dtype=torch.float64)
        if self._other_weight is not None:
            pair_weight *= torch.from_numpy(self._other_weight[columns])
        ones = torch.ones(len(columns), dtype=torch.float64)
        constants = torch.tensor([omega, self._imputed], dtype=torch.float64)
        loss_weight: Tensor | None = None
        if self._pair_weights is not None:
            of_left = np.repeat(self._pair_weights[row], len(columns)) if self._left else self._pair_weights[columns]
            loss_weight = torch.from_numpy(of_left)
        terms = LossTerms(self._loss, ones, omega, imputed, pair_weight, loss_weight, constants)
        scores = Q @ p
        pairs = Scored(terms, scores)
        ridge = self._l2 + (0.0 if self._penalty is None else float(self._penalty[row]))
        H = Q.t() @ (pairs.curvatures[:, None] * Q) + omega * own * self._gramian
        H += ridge * torch.eye(len(H), dtype=torch.float64)
        v = torch.from_numpy(scipy.linalg.pinvh(H.numpy()) @ q.numpy())
        values = (pairs.curvatures * scores - pairs.slopes) * (Q @ v)
        return columns, values.numpy(), base + omega * own * float(total @ v), score


def _objective(settings: ModelSettings, fitted: FittedModel, pairs: sp.csr_matrix) -> Problem:
    """What the model was fitted to, without the features."""
    seen = seen_by_towers((fitted.left.inputs, fitted.right.inputs))
    size = pairs.shape, pairs.nnz
    l2, mu = fitted.l2, fitted.embedding_l2
    if l2 is None or mu is None:  # loaded from an older file
        l2, mu = given(settings.l2), given(settings.embedding_l2)
        l2 = defaults.default_l2(*size, seen) if l2 is None else l2
        mu = defaults.default_embedding_l2(*size, seen, settings.frequency_power) if mu is None else mu
    if fitted.path is not None:
        settings = settings.with_changes(**fitted.path.chosen)
    by_features = fitted.left.inputs.features_alone
    left, of_pairs, right = settings.left_weights, settings.pair_weights, settings.right_weights
    if isinstance(left, str) and left == "auto":
        left = defaults.default_left_weights(by_features)
    if of_pairs == "auto":
        of_pairs = defaults.default_pair_weights(by_features)
    if isinstance(right, str) and right == "auto":
        described = fitted.left.inputs.described, fitted.right.inputs.described
        right = fitted.auto_weights or defaults.default_right_weights(*size, seen, described)
    return Problem(
        pairs, loss=as_loss(settings.loss), omega=fitted.omega,
        l2=l2, imputed=imputed_label(settings), left_weights=left, right_weights=right, pair_weights=of_pairs,
        embedding_l2=mu, frequency_power=settings.frequency_power, regularizer=as_regularizer(settings.regularizer),
    )  # fmt: skip


def _table_weight(problem: Problem, side: str) -> float:
    """The weight of ½‖·‖² of a side's table in Ψ."""
    found = 1.0 if problem.regularizer is None else problem.regularizer.ridge(f"{side}.0.weight")
    if found is None:
        check.fail("model", "a regulariser that is not a multiple of ½‖·‖² on the embeddings", "None or a BlockRidge")
    return found


def _sums(Q: Tensor, weight: NDArray[np.floating] | None, imputed: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """QᵀBQ and Σ_j b_j q_j, or QᵀBQ̃ with imputed factors, from rows in float64 a block at a time."""
    total = Q.new_zeros(Q.shape[1], Q.shape[1], dtype=torch.float64)
    summed = Q.new_zeros(Q.shape[1], *(() if imputed is None else imputed.shape[1:]), dtype=torch.float64)
    for start in range(0, len(Q), _BLOCK):
        rows = Q[start : start + _BLOCK].double()
        b = None if weight is None else torch.from_numpy(np.asarray(weight[start : start + _BLOCK], np.float64))
        total += gram(rows, rows, b)
        summed += column_sums(rows, b) if imputed is None else gram(rows, imputed[start : start + _BLOCK], b)
    return total, summed
