"""Defaults that follow from the data: towers, ω, λ, μ, weights by degree, iterations, and the device.

                    ids                  features                      histories
    hidden layers   none                 one on each side with features, see default_hidden
    activation      relu                 relu, gelu if normalised      relu
    k               min(m, n)/5          half of the hidden layer's width
    ω               2 |O| / (mn − |O|)   as for ids                    as for ids
    b               degree^0.1           degree^0.2 to degree^0.4      degree^0.3
    λ               2⁻⁵; with features   0.03 |O| / min(m, n), less    as for features
                    as well 0.3          with many features
    μ               0.01                 8·10⁻⁵ |O| / √(mn) ≤ 0.01     as for ids
    iterations      20, of sweeps 12      12                            12
    refined         no                   if both sides have features   no

An entity with an id counts as "ids" even if it has features as well: its id can learn whatever its pairs show. The
total weight of unobserved pairs is twice that of observed ones. λ and μ are where the selection starts
(model/penalty_path.py), which finds the right ones on held-out data; towers over features on both sides are also
compared with linear and with normalised ones there.

The μ above is that of a penalty proportional to the frequency of an entity, ν = 1. For other powers ν it is
multiplied by f̄^(1−ν), f̄ = 3 |O| / √(mn), the frequency of a typical entity with its share of unobserved pairs. The
power of degrees in b is 6 √(mn) / |O|, between 0.2 and 0.4: the fewer pairs an entity has, the more frequent ones are
held back; it is 0.4 where only right entities have features, because new ones have no pairs at all. With ids k is the
nearest power of two, at least 64, at most 256 on a CPU and 2048 on a GPU; it is halved while training would take more
than half of the memory: ten vectors of (m + n) k numbers.

docs/evidence/defaults.md has the measurements.
"""

from __future__ import annotations

import math

import torch

from gramtower._util import checks as check
from gramtower._util.host import total_memory
from gramtower.distributed.group import Group

IMPUTED, ACTIVATION = -0.5, "relu"
_NORMALISED_ACTIVATION = "gelu"
IDS, FEATURES, HISTORIES = "ids", "features", "histories"  # what towers see
_SHARE = 2.0  # total weight of unobserved pairs, relative to that of observed ones
_ENTITY_POWER = 0.5  # of degrees in a, and its inverse in weights of observed pairs: left entities with features only
_POWERS, _POWER_BY_PAIRS, _FEATURE_POWERS = {IDS: 0.1, HISTORIES: 0.3}, 6.0, (0.2, 0.4)  # of degrees in b
_ITERATIONS, _ITERATIONS_OF_IDS = 12, 20
_L2, _L2_NEXT_TO_FEATURES, _L2_PER_PAIR = 2.0**-5, 0.3, 0.03
_LONG_ROWS, _LEAST_OF_LONG_ROWS = 64, 1 / 3  # entries of a row of features above which λ falls, and how far
_PENALTY, _PENALTY_PER_PAIR = 0.01, 8e-5  # of embeddings over ids, and of those made of features
_WIDTHS, _ROWS_PER_UNIT = {"cpu": (1024, 24), "cuda": (2048, 30)}, 4  # most units; bits of a first layer's size
Layers = tuple[tuple[int, ...], tuple[int, ...]]  # widths of hidden layers, left and right
_LEAST = 64  # of the size of embeddings and the units of a layer
_PER_DIMENSION, _MOST_DIM = 5, {"cpu": 256, "cuda": 2048}  # entities of the smaller side; size
_VECTORS, _ALL_RIGHT = 10, 5  # vectors of the size of P and Q in training (on a CPU 8.5 were measured), and only of Q


def default_dim(shape: tuple[int, int], hidden: Layers, device: torch.device, room: int, processes: int = 1) -> int:
    """k from the size of the data and what the device can bear.

    Never more than there are entities on a side, or than the last hidden layer is wide: outputs have no more rank.
    """
    last = [widths[-1] for widths in hidden if widths]
    nearest = min(last) // 2 if last else 1 << round(math.log2(max(1.0, min(shape) / _PER_DIMENSION)))
    dim = min(max(_LEAST, nearest), _MOST_DIM.get(device.type, 256) * (2 if last else 1))
    numbers = _VECTORS * sum(shape) / processes + (_ALL_RIGHT * shape[1] if processes > 1 else 0)
    while dim > 1 and 4 * numbers * dim > room:
        dim //= 2
    return max(1, min(*shape, *last, dim))


def room_for_training(device: torch.device, group: Group, budget: int | str | None) -> int:
    """Bytes that training may take in each process: half of what the poorest has, or the memory budget.

    Processes on a host's CPU share its memory. All processes must call it, and get the same number.
    """
    own = total_memory(device) // 2
    if device.type != "cuda":
        own //= group.local_size
    if budget is not None:
        own = min(own, check.memory_size("memory_budget", budget))
    return int(min(group.gather_json(own)))


def default_hidden(shape: tuple[int, int], features: tuple[int, int], device: torch.device) -> Layers:
    """One hidden layer on each side whose entities have features; ids are served as well by only a table.

    Its width is the power of two nearest a quarter of the side's entities, from 64 to 1024 on a CPU and 2048 on a GPU,
    and less where a first layer of so many features would have more than 2²⁴ numbers on a CPU, 2³⁰ on a GPU.
    """
    most, numbers = _WIDTHS.get(device.type, _WIDTHS["cpu"])

    def width(rows: int, inputs: int) -> int:
        wanted = min(most, max(_LEAST, 1 << round(math.log2(max(1.0, rows / _ROWS_PER_UNIT)))))
        return max(_LEAST, min(wanted, 1 << (numbers - math.ceil(math.log2(inputs)))))

    left, right = ((width(*side),) if side[1] else () for side in zip(shape, features, strict=True))
    return left, right


def default_omega(shape: tuple[int, int], observed: int) -> float:
    """ω that gives unobserved pairs a fixed total weight relative to observed ones, and less where they are few."""
    unobserved = shape[0] * shape[1] - observed
    return _SHARE * max(1, observed) / max(1, observed, unobserved)


def default_l2(shape: tuple[int, int], observed: int, seen: str, entries: float = 0.0) -> float:
    """λ: with features by the pairs of an entity of the smaller side; down to a third with more than 64 features."""
    if seen == IDS:
        return _L2_NEXT_TO_FEATURES if entries else _L2
    long = min(1.0, max(_LEAST_OF_LONG_ROWS, math.sqrt(_LONG_ROWS / max(1.0, entries))))
    return _L2_PER_PAIR * long * max(1, observed) / min(shape)


def default_embedding_l2(shape: tuple[int, int], observed: int, seen: str, power: float) -> float:
    """μ for a power ν of the frequency: a constant, for features at most that."""
    pairs = _pairs_of_entity(shape, observed)
    penalty = min(_PENALTY, _PENALTY_PER_PAIR * pairs) if seen == FEATURES else _PENALTY
    return penalty * math.pow(max(1.0, (1 + _SHARE) * pairs), 1 - power)


def default_right_weights(shape: tuple[int, int], observed: int, seen: str, described: tuple[bool, bool]) -> str:
    """b by name: with features, the fewer pairs an entity has, the higher a power of degrees."""
    least, most = _FEATURE_POWERS
    power = _POWERS.get(seen)
    if power is None:
        by_pairs = _POWER_BY_PAIRS / max(1.0, _pairs_of_entity(shape, observed))
        power = min(most, max(least, by_pairs)) if described[0] else most
    return f"degree^{power:.3g}"


def default_left_weights(features_alone: bool) -> str | None:
    """a by name: see :func:`default_pair_weights`."""
    return f"degree^{_ENTITY_POWER:g}" if features_alone else None


def default_pair_weights(features_alone: bool) -> str | None:
    """Weights of observed pairs by name, where only features describe left entities: those asked about are new.

    Each of these counts alike, while in training entities with many pairs would decide. With this power of degrees for
    observed pairs and its inverse for unobserved ones, an entity counts as the root of its number of pairs.
    """
    return f"degree^{-_ENTITY_POWER:g}" if features_alone else None


def _pairs_of_entity(shape: tuple[int, int], observed: int) -> float:
    """|O| / √(mn)."""
    return observed / math.sqrt(max(1, shape[0] * shape[1]))


def default_iterations(seen: str) -> int:
    """Iterations of an optimizer that has no default of its own for the problem (Solver.default_iterations)."""
    return _ITERATIONS_OF_IDS if seen == IDS else _ITERATIONS


def default_activation(normalize: bool) -> str:
    """Gelu where embeddings are normalised, which keeps a part of negative inputs; relu otherwise."""
    return _NORMALISED_ACTIVATION if normalize else ACTIVATION


def pick_device(device: str) -> torch.device:
    """The device for "auto", "cpu" or "cuda"."""
    check.choice("device", device, ("auto", "cpu", "cuda"))
    if device == "cuda" and not torch.cuda.is_available():
        check.fail(
            "device", "'cuda'", "a machine with a GPU that torch can use; here there is none: take 'cpu' or 'auto'"
        )
    return torch.device("cuda" if device == "cuda" or (device == "auto" and torch.cuda.is_available()) else "cpu")
