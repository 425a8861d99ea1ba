"""A tower step as docs/architecture.md says to add one: a class with three functions and a line of stack.STEPS."""

from __future__ import annotations

import torch
from torch import nn

import gramtower as gt
from gramtower.engine.towers.steps import Op, materialise, plain


class Squash(nn.Module):
    """x ↦ scale ∘ tanh(x), with a learned scale for each column."""

    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x):
        if x.shape[1] != len(
            self.scale
        ):  # a branch that cannot be traced, so that without a step it is left to autodiff
            raise ValueError("as many columns as there are scales")
        return self.scale * torch.tanh(x)


class SquashStep(Op):
    def __init__(self, scale):
        self.scale = scale

    @property
    def parameters(self):
        return (self.scale,)

    def forward(self, x, values, out=None):
        t = torch.tanh(materialise(x))
        return t * values.tensors[self.scale], t

    def jvp(self, t, dx, values, tangent, out=None):
        dy = (1 - t * t) * values.tensors[self.scale] * materialise(dx)
        return dy + t * tangent[self.scale] if self.scale in tangent else dy

    def vjp(self, t, g, values, out, need_input):
        g = plain(g)
        if self.scale in out:
            out[self.scale] += (g * t).sum(0)
        return g.mul_(1 - t * t).mul_(values.tensors[self.scale])


LINE = {Squash: lambda module, names: SquashStep(names[id(module.scale)])}  # of stack.STEPS


def squashed(entities, dim):
    """A tower with that step in the middle and at the end."""
    return nn.Sequential(gt.InputLinear(entities, 6), Squash(6), nn.Linear(6, dim), Squash(dim))
