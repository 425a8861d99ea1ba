"""The search space: the names that are searched, their values, and the settings that the search starts at.

Names are those of :class:`gramtower.TwoTower`'s arguments, with four of their own:

    penalty       μ as if ν were 1. For another ν it is rescaled to the same total Σ_i c_i + Σ_j c_j, because c^ν by
                  itself would move μ by orders of magnitude; the model gets it as `embedding_l2`
    left_power    s of left_weights="degree^s"; 0 is no weights
    right_power   s of right_weights
    features      "ids", "history", "ids+history", or "given": the features passed to tune

Ranges are centred on the defaults for the size of the data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import scipy.sparse as sp

from gramtower._util import checks as check
from gramtower._util.checks import check_hidden, hidden_text, parse_hidden
from gramtower.data.sources import read_toml
from gramtower.engine.kernels.elementwise import LOSSES, make_activation

Value = float | int | str
LOGARITHMIC = ("omega", "l2", "penalty")
RANGES = (*LOGARITHMIC, "frequency_power", "left_power", "right_power")
LISTS = ("imputed", "dim", "hidden", "activation", "normalize", "loss", "features")
NAMES = (*RANGES, *LISTS)
SIZES = ("hidden", "dim")
#: The order of first changes where there are features.
FEATURES_FIRST = (
    "l2", "imputed", "hidden", "right_power", "normalize", "omega", "dim", "penalty", "left_power", "frequency_power",
    "activation", "loss", "features",
)  # fmt: skip


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``, on a logarithmic scale for weights and penalties."""

    low: float
    high: float
    log: bool

    def nearest(self, value: Value) -> Value:
        """Return the value itself, or the nearest end of the range."""
        return min(self.high, max(self.low, float(value)))

    def neighbours(self, value: Value) -> list[Value]:
        """Return one step to either side: an octave, or a quarter of the range if that is less."""
        x = float(value)
        if self.log:
            factor = min(2.0, (self.high / self.low) ** 0.25)
            found = (x * factor, x / factor)
        else:
            step = (self.high - self.low) / 4
            found = (x + step, x - step)
        return [y for y in map(self.nearest, found) if y != x]

    def __str__(self) -> str:
        return f"{self.low:.4g} to {self.high:.4g}{' (log)' if self.log else ''}"


@dataclass(frozen=True)
class Choices:
    """One of a few values; a single value is fixed and not searched."""

    values: tuple[Value, ...]

    def nearest(self, value: Value) -> Value:
        """Return the value itself if it is one of the choices, otherwise the first."""
        return value if value in self.values else self.values[0]

    def neighbours(self, value: Value) -> list[Value]:
        """Return the other values."""
        return [other for other in self.values if other != value]

    def __str__(self) -> str:
        return " | ".join(map(str, self.values))


Space = dict[str, Range | Choices]


def default_space(start: Mapping[str, Value], *, labels: bool, given_features: bool, unseen: bool = False) -> Space:
    """Return the whole space, around the settings that the search starts at."""
    dim, l2 = int(start["dim"]), float(start["l2"])
    activation, normalize = str(start["activation"]), str(start["normalize"])
    others, lengths = (("relu", "leaky_relu(0.35)", "gelu"), ("yes", "no")) if given_features else ((), ())
    seen = ("given",) if unseen else ("given", "ids") if given_features else ("ids", "history", "ids+history")
    space: Space = {
        "omega": Range(float(start["omega"]) / 16, float(start["omega"]) * 8, True),
        "l2": Range(l2 / 32, l2 * 32, True) if given_features else Range(2.0**-10, 1.0, True),
        "penalty": Range(float(start["penalty"]) / 8, float(start["penalty"]) * 8, True),
        "frequency_power": Range(0.25, 1.5, False),
        "left_power": Range(0.0, 1.0, False),
        "right_power": Range(-0.5, 0.75, False),
        "imputed": Choices(tuple(dict.fromkeys((start["imputed"], 0.0, -1.0, "fitted")))),
        "dim": Choices(tuple(sorted({max(1, dim // 2), dim, dim * 2}))),
        "hidden": Choices(tuple(dict.fromkeys((str(start["hidden"]), *_widths(str(start["hidden"])))))),
        "activation": Choices(tuple(dict.fromkeys((activation, *others)))),
        "normalize": Choices(tuple(dict.fromkeys((normalize, *lengths)))),
        "loss": Choices(tuple(dict.fromkeys((str(start["loss"]), *(() if labels else ("logistic", "squared")))))),
        "features": Choices(seen),
    }
    return space


def _widths(start: str) -> list[str]:
    """Return hidden layers to try next to the model's own, the most expensive last."""
    sides = check_hidden(parse_hidden(start))
    if sides == ((), ()):
        return ["none", "256", "256,256"]

    def each(change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> str:
        return hidden_text((change(sides[0]) if sides[0] else (), change(sides[1]) if sides[1] else ()))

    halves = each(lambda widths: tuple(max(1, width // 2) for width in widths))
    doubles = each(lambda widths: tuple(2 * width for width in widths))
    return [each(lambda widths: (*widths, widths[-1])), halves, "none", doubles]


def read_space(path: Path) -> dict[str, object]:
    """Return the table ``[space]`` of a TOML file, for :func:`as_space`."""
    content = read_toml("space", path)
    if set(content) - {"space"} or not isinstance(content.get("space", {}), dict):
        check.fail("space", f"{', '.join(content)} at the top of {path}", "one table, [space]")
    return dict(content.get("space", {}))


def as_space(given: Mapping[str, object], whole: Space) -> Space:
    """Return a space from names and what to search for each; other names are not searched.

    ``true`` takes the range of the whole space, ``[low, high]`` another range, a list (for names with a few values)
    those values, and a single value fixes it.
    """
    space: Space = {}
    for name, value in given.items():
        plain = name.replace("-", "_")
        if plain not in NAMES:
            near = check.near(plain, NAMES, 1, 0.0)[0]
            check.fail("space", f"the unknown name {name!r}", f"{near!r}, or another of {', '.join(NAMES)}")
        if value is True:
            space[plain] = whole[plain]
            if isinstance(part := whole[plain], Range) and not part.low < part.high:
                check.fail(f"space: {name}", f"true, around the model's own {part.low:g}", "[low, high]")
        elif plain in RANGES:
            space[plain] = _range(plain, value)
        else:
            values = list(value) if isinstance(value, (list, tuple)) else [value]
            if plain == "hidden" and all(isinstance(item, int) for item in values):
                values = [value]  # one value, such as [256, 256], rather than several
            checked = tuple(dict.fromkeys(_check_value(plain, item, whole) for item in values))
            if not checked:
                check.fail(f"space: {plain}", "an empty list", "at least one value")
            space[plain] = Choices(checked)
    if not searched(space):
        known = ", ".join(f"{name} = {space[name]}" for name in space) or "nothing"
        check.fail("space", f"an empty space ({known})", f"something to search, of {', '.join(NAMES)}")
    return space


def searched(space: Space) -> list[str]:
    """Return the names with more than one value."""
    return [name for name, part in space.items() if isinstance(part, Range) or len(part.values) > 1]


def first_settings(space: Space, start: Mapping[str, Value]) -> list[dict[str, Value]]:
    """Return the first settings to try: the start, then the start with one choice changed at a time.

    The defaults are good on most data, and a space of ten names is too wide to find the neighbourhood of a good point
    by chance: these trials show which way to go. With features, where time may end them early, the choices that moved
    the metric most in one-at-a-time trials come first, and larger towers last.
    """
    centre = {name: space[name].nearest(start[name]) for name in searched(space)}
    names = list(centre)
    if start["features"] == "given":
        names.sort(key=FEATURES_FIRST.index)
    changes = [{**centre, name: value} for name in names for value in space[name].neighbours(centre[name])]
    if start["features"] == "given":
        changes.sort(key=lambda change: larger(change, centre))
    return [centre, *changes]


def larger(settings: Mapping[str, Value], start: Mapping[str, Value]) -> bool:
    """Return whether towers have more hidden units, or more outputs, than at the start."""
    return any(size > before for size, before in zip(_size(settings), _size(start), strict=True))


def _size(settings: Mapping[str, Value]) -> tuple[int, int]:
    """Return the units of all hidden layers and the dimension, 0 if they are not searched."""
    sides = check_hidden(parse_hidden(str(settings["hidden"]))) if "hidden" in settings else ((), ())
    return sum((*sides[0], *sides[1])), int(settings.get("dim", 0))


def linear(hidden: object) -> bool:
    """Return whether hidden layers, as text, are none on both sides."""
    return hidden is not None and check_hidden(parse_hidden(str(hidden))) == ((), ())


def effective(settings: Mapping[str, Value], start: Mapping[str, Value]) -> dict[str, Value]:
    """Return settings without those that change nothing: the activation of towers without hidden layers."""
    known = start if settings.get("features", start["features"]) == start["features"] else {}
    unused = ("activation",) if linear(settings.get("hidden", known.get("hidden"))) else ()
    return {name: value for name, value in settings.items() if name not in unused}


def describe(space: Space) -> dict[str, object]:
    """Return the space as plain values, such as :func:`as_space` takes."""
    return {
        name: [part.low, part.high] if isinstance(part, Range) else list(part.values) for name, part in space.items()
    }


def rescaled_penalty(penalty: float, power: float, matrix: sp.csr_matrix, omega: float) -> float:
    """Return μ for a power ν with the total penalty weight of ``penalty`` at ν = 1: penalty · Σ c / Σ c^ν."""
    m, n = matrix.shape
    counts = np.diff(matrix.indptr) + omega * n, np.bincount(matrix.indices, minlength=n) + omega * m
    return penalty * float(sum(c.sum() for c in counts) / sum((c**power).sum() for c in counts))


def _range(name: str, value: object) -> Range | Choices:
    log = name in LOGARITHMIC
    if not isinstance(value, (list, tuple)):
        return Choices((check.number(f"space: {name}", value, minimum=0.0 if log else -np.inf),))
    if len(value) != 2:
        check.fail(f"space: {name}", f"{list(value)}", "[low, high]")
    low, high = (check.number(f"space: {name}", end) for end in value)
    if not low < high or (log and low <= 0):
        check.fail(f"space: {name}", f"{list(value)}", f"[low, high] with low below high{' and above 0' * log}")
    return Range(low, high, log)


def _check_value(name: str, value: object, whole: Space) -> Value:
    label = f"space: {name}"
    if name == "dim":
        return check.count(label, value)
    if name == "imputed":
        return str(value) if value in ("fitted", "given") else check.number(label, value)
    if name == "activation":
        make_activation(label, value)
        return str(value)
    if name == "normalize":
        return check.choice(label, value, ("yes", "no"))
    if name == "loss":
        return check.choice(label, value, tuple(LOSSES))
    if name == "features":
        part = whole["features"]
        assert isinstance(part, Choices)
        return check.choice(label, value, tuple(str(option) for option in part.values))
    if isinstance(value, str):
        return hidden_text(parse_hidden(value, label))
    if not isinstance(value, (list, tuple)):
        check.fail(label, repr(value), 'widths such as "256,256" or [256, 256], or "none"')
    return hidden_text(tuple(check.count(label, width) for width in value))
