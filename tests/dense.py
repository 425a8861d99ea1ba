"""The dense twin: the objective as the plain double sum over all m·n pairs in float64.

Gradient by autograd, Gauss-Newton matrix written out from explicit Jacobians (eq:general_G). O(mn) and worse: the
truth that every fast quantity is compared with, independent of the code under test.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn


def _logistic(y, s):
    return torch.log1p(torch.exp(-(y * s).abs())) + (-y * s).clamp_min(0)


VALUES = {
    "logistic": _logistic,
    "squared": lambda y, s: (y - s) ** 2 / 2,
    "squared_hinge": lambda y, s: torch.where(y * s < 1, (1 - y * s) ** 2 / 2, torch.zeros_like(s)),
    "cosh": lambda y, s: torch.cosh(s - y) - 1,
}


@dataclass
class Dense:
    """The problem with everything spelled out. ``labels`` holds NaN where a pair was not observed."""

    labels: np.ndarray
    X: Tensor  # left inputs as the module takes them: ids or dense rows
    Y: Tensor
    loss: str = "logistic"
    omega: float = 1.0
    l2: float = 0.0
    imputed: object = -1.0
    a: np.ndarray | None = None
    b: np.ndarray | None = None
    embedding_l2: float = 0.0
    frequency_power: float = 1.0
    w: np.ndarray | None = None  # weights of observed pairs' losses, m × n
    psi: object = None  # Ψ of a list of tensors, in float64 and differentiable; None for half their squared norm

    def regularizer(self, theta: list[Tensor]) -> Tensor:
        return sum(0.5 * (t**2).sum() for t in theta) if self.psi is None else self.psi(theta)

    def centred(self, Q: Tensor) -> Tensor:
        """Q less its weighted mean where labels are fitted: the score of the mean is the mean of the scores."""
        if self.imputed != "fitted":
            return Q
        b = torch.ones(len(Q), dtype=torch.float64) if self.b is None else torch.tensor(self.b, dtype=torch.float64)
        return Q - (b @ Q) / b.sum()

    def value(self, P: Tensor, Q: Tensor, theta: list[Tensor]) -> Tensor:
        m, n = self.labels.shape
        R = torch.tensor(self.labels, dtype=torch.float64)
        seen = ~torch.isnan(R)
        Q = self.centred(Q)
        S = P @ Q.T
        a = torch.ones(m, dtype=torch.float64) if self.a is None else torch.tensor(self.a, dtype=torch.float64)
        b = torch.ones(n, dtype=torch.float64) if self.b is None else torch.tensor(self.b, dtype=torch.float64)
        if isinstance(self.imputed, tuple):
            imputed = torch.tensor(self.imputed[0] @ self.imputed[1].T, dtype=torch.float64)
        else:
            imputed = torch.full((m, n), 0.0 if self.imputed == "fitted" else self.imputed, dtype=torch.float64)
        w = torch.ones_like(R) if self.w is None else torch.tensor(self.w, dtype=torch.float64)
        total = (w[seen] * VALUES[self.loss](R[seen], S[seen])).sum()
        rest = ~seen
        total = total + 0.5 * self.omega * ((a[:, None] * b[None, :]) * (imputed - S) ** 2)[rest].sum()
        total = total + self.l2 * self.regularizer(theta)
        if self.embedding_l2:
            cu = (seen.sum(1).double() + self.omega * b.sum()) ** self.frequency_power
            cv = (seen.sum(0).double() + self.omega * a.sum()) ** self.frequency_power
            total = total + 0.5 * self.embedding_l2 * ((cu * (P**2).sum(1)).sum() + (cv * (Q**2).sum(1)).sum())
        return total

    def curvature(self, S: Tensor) -> Tensor:
        """∂²ℓ_ij/∂ŷ² for all m·n pairs, by autograd twice."""
        R = torch.tensor(self.labels, dtype=torch.float64)
        seen = ~torch.isnan(R)
        m, n = R.shape
        a = torch.ones(m, dtype=torch.float64) if self.a is None else torch.tensor(self.a, dtype=torch.float64)
        b = torch.ones(n, dtype=torch.float64) if self.b is None else torch.tensor(self.b, dtype=torch.float64)
        C = self.omega * a[:, None] * b[None, :]
        s = S.detach()[seen].requires_grad_()
        if s.numel():
            (first,) = torch.autograd.grad(VALUES[self.loss](R[seen], s).sum(), s, create_graph=True)
            if first.requires_grad:
                (second,) = torch.autograd.grad(first.sum(), s)
            else:
                second = torch.zeros_like(s)
            w = torch.ones_like(R) if self.w is None else torch.tensor(self.w, dtype=torch.float64)
            C = C.clone()
            C[seen] = w[seen] * second
        return C


def leaves(left: nn.Module, right: nn.Module) -> list[nn.Parameter]:
    """Trainable parameters of both modules, shared ones once, in the order of gt.Parameters."""
    seen: dict[int, nn.Parameter] = {}
    for module in (left, right):
        for parameter in module.parameters():
            if parameter.requires_grad:
                seen.setdefault(id(parameter), parameter)
    return list(seen.values())


def _hessian(function, theta: list[Tensor]) -> Tensor:
    """The Hessian of a function of a list of tensors, over all their numbers in a row."""
    sizes, shapes = [t.numel() for t in theta], [t.shape for t in theta]

    def flat(vector: Tensor) -> Tensor:
        return function([part.view(shape) for part, shape in zip(vector.split(sizes), shapes, strict=True)])

    return torch.autograd.functional.hessian(flat, torch.cat([t.detach().reshape(-1) for t in theta]))


def evaluate(dense: Dense, left: nn.Module, right: nn.Module, with_matrix: bool = True):
    """Value, gradient and Gauss-Newton matrix of float64 modules."""
    theta = leaves(left, right)
    P, Q = left(dense.X), right(dense.Y)
    value = dense.value(P, Q, theta)
    grads = torch.autograd.grad(value, theta, retain_graph=True, allow_unused=True)
    gradient = torch.cat(
        [(torch.zeros_like(t) if g is None else g).reshape(-1) for g, t in zip(grads, theta, strict=True)]
    )
    if not with_matrix:
        return value.item(), gradient, None
    Q = dense.centred(Q)
    S = P @ Q.T
    C = dense.curvature(S)
    G = dense.l2 * _hessian(dense.regularizer, theta)

    def jacobian(row: Tensor) -> Tensor:
        out = torch.autograd.grad(row, theta, retain_graph=True, allow_unused=True)
        return torch.cat(
            [(torch.zeros_like(t) if g is None else g).reshape(-1) for g, t in zip(out, theta, strict=True)]
        )

    m, n = S.shape
    for i in range(m):
        for j in range(n):
            J = jacobian(S[i, j])
            G += C[i, j] * torch.outer(J, J)
    if dense.embedding_l2:
        R = torch.tensor(dense.labels)
        seen = ~torch.isnan(R)
        asum = m if dense.a is None else float(dense.a.sum())
        bsum = n if dense.b is None else float(dense.b.sum())
        for E, counts, other in ((P, seen.sum(1), bsum), (Q, seen.sum(0), asum)):
            weight = dense.embedding_l2 * (counts.double() + dense.omega * other) ** dense.frequency_power
            for i in range(E.shape[0]):
                for c in range(E.shape[1]):
                    J = jacobian(E[i, c])
                    G += weight[i] * torch.outer(J, J)
    return value.item(), gradient, G


def subset_gradient(dense: Dense, left: nn.Module, right: nn.Module, first: list[int], second: list[int]) -> Tensor:
    """eq:grad_sogram_naive by loops: pairs numbered ``first`` move, with Gramians of those numbered ``second``."""
    theta, P, Q = leaves(left, right), left(dense.X), right(dense.Y)
    R = torch.tensor(dense.labels)
    m, n = R.shape
    O = (~torch.isnan(R)).nonzero().tolist()
    rows, columns = (~torch.isnan(R)).double().sum(1), (~torch.isnan(R)).double().sum(0)
    a, b = (np.ones(size) if w is None else w for size, w in ((m, dense.a), (n, dense.b)))
    Y = dense.imputed[0] @ dense.imputed[1].T if isinstance(dense.imputed, tuple) else np.full((m, n), dense.imputed)
    total = torch.zeros((), dtype=torch.float64)
    for i, j in (O[e] for e in first):
        s = P[i] @ Q[j]
        each = VALUES[dense.loss](R[i, j], s) - 0.5 * dense.omega * a[i] * b[j] * (Y[i, j] - s) ** 2
        for x, y in (O[e] for e in second):
            scale = dense.omega * len(O) / len(second) / 2
            each = each + scale * a[i] / rows[i] * b[y] / columns[y] * (Y[i, y] - P[i] @ Q[y].detach()) ** 2
            each = each + scale * a[x] / rows[x] * b[j] / columns[j] * (Y[x, j] - P[x].detach() @ Q[j]) ** 2
        for E, e, count, other in ((P, i, rows[i], b.sum()), (Q, j, columns[j], a.sum())):
            penalty = dense.embedding_l2 * (count + dense.omega * other) ** dense.frequency_power
            each = each + 0.5 * penalty / count * E[e] @ E[e]
        total = total + len(O) / len(first) * each
    total = total + dense.l2 * dense.regularizer(theta)
    grads = torch.autograd.grad(total, theta, allow_unused=True)
    return torch.cat([(torch.zeros_like(t) if g is None else g).reshape(-1) for g, t in zip(grads, theta, strict=True)])
