"""Optimizers of torch in the loop: the same steps as a loop over all pairs, checkpoints, and refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gramtower as gt
from gramtower.data.datasets import planted_pairs
from gramtower.optim import TorchOptimizer

KINDS = [
    (torch.optim.AdamW, dict(lr=0.02, weight_decay=0.1)), (torch.optim.Adam, dict(lr=0.02, amsgrad=True)),
    (torch.optim.SGD, dict(lr=1e-4, momentum=0.9)), (torch.optim.NAdam, dict(lr=0.02)),
    (torch.optim.Adagrad, dict(lr=0.05)), (torch.optim.Adafactor, dict(lr=0.02)),
]  # fmt: skip


def planted():
    problem = gt.Problem(planted_pairs(30, 20, 150, groups=4, seed=1), loss="squared", omega=2**-3, l2=0.5)
    return problem, gt.mlp_towers(problem, hidden=(6,), dim=4, dtype=torch.float64)


def by_hand(problem, towers, kind, options, steps):
    """Steps on the plain double sum over all pairs, differentiated by torch."""
    seen = torch.from_numpy(planted_pairs(30, 20, 150, groups=4, seed=1).toarray() > 0)
    weights = [*towers.left.parameters(), *towers.right.parameters()]
    optimizer = kind(weights, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        scores = towers.left(torch.arange(30)) @ towers.right(torch.arange(20)).T
        loss = 0.5 * torch.where(seen, (1 - scores) ** 2, 2**-3 * (-1 - scores) ** 2).sum()
        loss = loss + 0.25 * sum((weight**2).sum() for weight in weights)
        loss.backward()
        optimizer.step()
    return [weight.detach().numpy() for weight in weights]


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=lambda value: getattr(value, "__name__", ""))
def test_steps_are_those_of_a_loop_over_all_pairs(kind, options):
    problem, towers = planted()
    _, twin = planted()
    gt.minimize(problem, towers, TorchOptimizer(kind, steps=2, **options), max_iterations=4)
    found = [weight.detach().numpy() for side in (towers.left, towers.right) for weight in side.parameters()]
    for one, other in zip(found, by_hand(problem, twin, kind, options, 8), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_run_continues_exactly_from_its_checkpoint(kind, options, tmp_path):
    ends = []
    for limits in ([7], [4, 7]):
        for limit in limits:
            problem, towers = planted()
            path = tmp_path / f"{len(limits)}.checkpoint"
            solver = TorchOptimizer(kind, **options)
            result = gt.minimize(problem, towers, solver, max_iterations=limit, checkpoint=path, checkpoint_every=3)
        ends.append(result)
    assert torch.equal(ends[0].parameters.vector, ends[1].parameters.vector)
    assert [record.value for record in ends[0].history] == [record.value for record in ends[1].history]
    assert ends[0].value < ends[0].history[0].value
    problem, towers = planted()
    with pytest.raises(ValueError, match="options"):
        gt.minimize(problem, towers, TorchOptimizer(kind, **options | dict(lr=0.5)), checkpoint=path)


def test_an_estimator_learns_with_it_and_is_saved(tmp_path):
    pairs = gt.Interactions.from_matrix(planted_pairs(60, 40, 700, groups=4, seed=1))
    solver = TorchOptimizer(torch.optim.AdamW, lr=0.02, weight_decay=0.0, betas=(0.8, 0.99))
    model = gt.TwoTower(dim=8, hidden=(), optimizer=solver, max_iterations=60, device="cpu", select=False).fit(pairs)
    again = gt.TwoTower(**model.get_params()).fit(pairs)
    assert np.array_equal(model.embed(), again.embed())
    assert model.history_[-1].value < 0.8 * model.history_[0].value
    model.save(tmp_path / "model.gramtower")
    loaded = gt.load(tmp_path / "model.gramtower")
    assert np.array_equal(loaded.recommend([3], k=5)[0], model.recommend([3], k=5)[0])
    assert (loaded.optimizer, loaded.optimizer_options["kind"]) == ("torch", "AdamW")
    again = gt.TwoTower(**loaded.get_params()).fit(pairs)
    assert np.array_equal(model.embed(), again.embed())
    model.set_params(optimizer=TorchOptimizer(type("Own", (torch.optim.AdamW,), {}), lr=0.1))
    with pytest.raises(ValueError, match=r"optimizer.*TorchOptimizer"):
        model.save(tmp_path / "own")


class Counting(torch.optim.Optimizer):
    """An optimizer with a number in its state."""

    def __init__(self, weights):
        super().__init__(weights, {})

    def step(self):
        for weight in self.param_groups[0]["params"]:
            self.state[weight]["count"] = 1


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("adam", {}, "kind.*'adam'"),
        (torch.nn.Linear, {}, "kind.*Linear"),
        (torch.optim.LBFGS, {}, r"kind.*LBFGS.*lbfgs"),
        (torch.optim.AdamW, dict(rate=1), r"options.*rate.*AdamW"),
        (torch.optim.AdamW, dict(lr=-1.0), r"options.*lr"),
        (torch.optim.SparseAdam, dict(lr=0.1), r"options.*dense"),
        (torch.optim.AdamW, dict(steps=0), "steps"),
        (Counting, {}, r"kind.*Counting.*'count'"),
    ],
)
def test_bad_arguments_are_named(kind, options, message):
    with pytest.raises(ValueError, match=message):
        TorchOptimizer(kind, **options)


def test_it_has_a_name_for_the_shell():
    problem, towers = planted()
    _, twin = planted()
    one = gt.minimize(problem, towers, "torch", kind="AdamW", lr=0.02, max_iterations=2)
    other = gt.minimize(problem, twin, TorchOptimizer(torch.optim.AdamW, lr=0.02), max_iterations=2)
    assert torch.equal(one.parameters.vector, other.parameters.vector)
    with pytest.raises(ValueError, match=r"options.*kind"):
        gt.minimize(problem, towers, "torch", lr=0.1)


def test_a_run_that_diverges_stops():
    problem, towers = planted()
    result = gt.minimize(problem, towers, TorchOptimizer(torch.optim.SGD, lr=1e6), max_iterations=30)
    assert result.reason is gt.Reason.NON_FINITE
    assert np.isfinite(result.value)
