"""The rows of a quality table, each trained by its section [NAME.ROW] of settings.toml to embeddings (P, Q).

popularity   how often an item was observed, the same list for everyone
als          implicit's alternating least squares (pip install implicit==0.7.3); on a CPU
softmax      towers trained by in-batch sampled softmax with logQ correction and Adam
hidden       two towers learned from all pairs, with hidden layers
ours         the same without hidden layers

The softmax follows Yi et al., "Sampling-bias-corrected neural modeling for large corpus item recommendations" (RecSys
2019): a batch of observed pairs, the other pairs' items as negatives, log Q(j) of the item's share of the pairs taken
off each logit, and items that are the same as the positive one not counted as negatives.
"""

from __future__ import annotations

import itertools
import math
import time
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor, nn

import gramtower as gt
from gramtower.model.fit_data import prepare_data
from gramtower.model.fit_parts import iterations, make_problem, make_towers
from gramtower.model.settings import ModelSettings

Embeddings = tuple[Tensor, Tensor]
HERE = Path(__file__).resolve().parent
ROWS = ("popularity", "als", "softmax", "hidden", "ours")
METRICS = ("recall@20", "ndcg@20", "paper_map@5")
Look = Callable[[int, float, Tensor, Tensor], None]


def stored(name: str, row: str) -> dict[str, Any]:
    """The stored settings of a row for a set."""
    if row == "popularity":
        return {}
    found = tomllib.loads((HERE / "settings.toml").read_text())[name][row]
    return {key.replace("-", "_"): value for key, value in found.items()}


def train(
    row: str, pairs: sp.csr_matrix, settings: dict[str, Any], device: str = "auto", look: Look | None = None
) -> tuple[Tensor, Tensor, float]:
    """Embeddings of a row trained by settings, and the seconds it took; ImportError where a package is missing."""
    start = time.perf_counter()
    if row == "popularity":
        found = popularity(pairs)
    elif row == "als":
        found = als(pairs, **settings)
    elif row == "softmax":
        found = softmax(pairs, **settings, device=device, look=look)
    else:
        found = ours(pairs, settings, device, look)
    return *found, time.perf_counter() - start


def ours(pairs: sp.csr_matrix, settings: dict[str, Any], device: str, look: Look | None) -> tuple[Tensor, Tensor]:
    """Two towers learned from all pairs, embeddings left where they were computed."""
    known = {k: v for k, v in settings.items() if k not in ("history", "option")}
    model = ModelSettings(**{**known, "device": device}, optimizer_options=settings.get("option"))
    data = prepare_data(model, pairs, "history" if settings.get("history") else None)
    problem = make_problem(model, data)
    towers = make_towers(model, data, problem)
    callbacks = [] if look is None else [lambda record, point: look(record.iteration, record.seconds, point.P, point.Q)]
    gt.minimize(
        problem, towers, model.optimizer, iterations(model, data, problem, towers), model.time_limit, model.seed,
        callbacks, **model.solver_options(),
    )  # fmt: skip
    point = problem.at(towers)
    return point.P, point.Q


def popularity(train: sp.csr_matrix) -> Embeddings:
    """Counts of observed pairs of each item."""
    counts = np.bincount(train.indices, minlength=train.shape[1]).astype(np.float32)
    return torch.ones(train.shape[0], 1), torch.from_numpy(counts)[:, None]


def als(
    train: sp.csr_matrix,
    factors: int = 128,
    regularization: float = 0.01,
    alpha: float = 1.0,
    iterations: int = 15,
    seed: int = 0,
) -> Embeddings:
    """implicit's ALS; raises ImportError where it is not installed."""
    from implicit.cpu.als import AlternatingLeastSquares

    model = AlternatingLeastSquares(
        factors=factors, regularization=regularization, alpha=alpha, iterations=iterations, random_state=seed,
        num_threads=torch.get_num_threads(),
    )  # fmt: skip
    model.fit(train, show_progress=False)
    return torch.from_numpy(np.array(model.user_factors)), torch.from_numpy(np.array(model.item_factors))


def softmax(
    train: sp.csr_matrix,
    dim: int = 128,
    hidden: Sequence[int] = (),
    learning_rate: float = 1e-3,
    temperature: float = 0.1,
    weight_decay: float = 0.0,
    batch: int = 4096,
    epochs: int = 20,
    seed: int = 0,
    device: str = "auto",
    seconds: float = math.inf,
    look: Callable[[int, float, Tensor, Tensor], None] | None = None,
) -> Embeddings:
    """Two towers trained by in-batch softmax; embeddings have length one and scores are divided by the temperature.

    Args:
        train: the observed pairs.
        dim: size of the embeddings.
        hidden: widths of hidden layers, as in the model it is compared with.
        learning_rate: Adam's; falls to zero along a cosine.
        temperature: of the softmax.
        weight_decay: decoupled, on all parameters.
        batch: pairs in a batch.
        epochs: passes over the pairs.
        seed: of weights and batches.
        device: "auto" or "cpu".
        seconds: no new epoch after this much training.
        look: called after each epoch with its number, the seconds of training so far, P and Q.
    """
    torch.manual_seed(seed)
    place = torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")
    left, right = (_tower(rows, hidden, dim).to(place) for rows in train.shape)
    coo = train.tocoo()
    users, items = (torch.from_numpy(x.astype(np.int64)).to(place) for x in (coo.row, coo.col))
    log_q = torch.from_numpy(np.log(np.maximum(np.bincount(coo.col, minlength=train.shape[1]), 1) / train.nnz))
    log_q = log_q.to(place, torch.float32)
    batch = min(batch, len(users))
    own = torch.arange(batch, device=place)

    def loss(part: Tensor) -> Tensor:
        i, j = users[part], items[part]
        p, q = nn.functional.normalize(left(i), dim=1), nn.functional.normalize(right(j), dim=1)
        same = (j[:, None] == j[None, :]) & (own[:, None] != own[None, :])
        logits = (p @ q.t() / temperature - log_q[j]).masked_fill(same, -torch.inf)
        return nn.functional.cross_entropy(logits, own)

    step = _Steps([*left.parameters(), *right.parameters()], loss, batch, weight_decay, place)
    each = len(users) // batch  # what is left over joins other batches in other epochs
    generator = torch.Generator().manual_seed(seed)
    spent = 0.0
    for epoch in range(epochs):
        start = time.perf_counter()
        order = torch.randperm(len(users), generator=generator).to(place)
        for number in range(each):
            done = (epoch * each + number) / (epochs * each)
            step(order[number * batch : (number + 1) * batch], learning_rate * 0.5 * (1 + math.cos(math.pi * done)))
        if place.type == "cuda":
            torch.cuda.synchronize()
        spent += time.perf_counter() - start
        if look is not None:
            look(epoch + 1, spent, *_embed(left, right, train.shape, place))
        if spent >= seconds:
            break
    return _embed(left, right, train.shape, place)


class _Steps:
    """Steps of AdamW on a loss of batches of one size; on a GPU all of a step is one CUDA graph."""

    def __init__(
        self,
        parameters: list[nn.Parameter],
        loss: Callable[[Tensor], Tensor],
        batch: int,
        weight_decay: float,
        place: torch.device,
    ) -> None:
        self.loss, self.graph = loss, None
        self.part = torch.arange(batch, device=place)
        self.rate = torch.zeros((), device=place)
        on_gpu = place.type == "cuda"
        options = {"fused": True, "capturable": True} if on_gpu else {}
        self.optimizer = torch.optim.AdamW(
            parameters, lr=self.rate if on_gpu else 0.0, weight_decay=weight_decay, betas=(0.9, 0.99), **options
        )
        if on_gpu:
            self._record()

    def __call__(self, part: Tensor, rate: float) -> None:
        self.part.copy_(part)
        if self.graph is not None:
            self.rate.fill_(rate)
            self.graph.replay()
            return
        self.optimizer.param_groups[0]["lr"] = rate
        self._step()

    def _step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.loss(self.part).backward()
        self.optimizer.step()

    def _record(self) -> None:
        """The rate is zero meanwhile: weights stay as they are, and the moments are put back to nothing."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._step()
        for state in self.optimizer.state.values():
            for tensor in state.values():
                tensor.zero_()


class _Table(nn.Module):
    """Rows by number; unlike nn.Embedding, its derivative can be recorded."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(rows, width))

    def forward(self, ids: Tensor) -> Tensor:
        return self.weight.index_select(0, ids)


def _tower(rows: int, hidden: Sequence[int], dim: int) -> nn.Sequential:
    widths = [*hidden, dim]
    layers: list[nn.Module] = [_Table(rows, widths[0])]
    for before, after in itertools.pairwise(widths):
        layers += [nn.ELU(), nn.Linear(before, after)]
    return nn.Sequential(*layers)


@torch.no_grad()
def _embed(left: nn.Module, right: nn.Module, shape: tuple[int, int], device: torch.device) -> Embeddings:
    return tuple(
        torch.cat(
            [nn.functional.normalize(tower(ids), dim=1) for ids in torch.arange(rows, device=device).split(1 << 16)]
        )
        for tower, rows in ((left, shape[0]), (right, shape[1]))
    )
