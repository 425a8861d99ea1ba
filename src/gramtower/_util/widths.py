"""Widths of hidden layers, as arguments and as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gramtower._util import checks as check

Hidden = Sequence[int] | tuple[Sequence[int], Sequence[int]]  # of both towers, or of the left and the right one


def check_hidden(hidden: object) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Widths of the hidden layers of both towers: given for both at once, or as a pair of two such sequences.

    Raises:
        ValueError: if they are not positive integers.
    """
    if not isinstance(hidden, Iterable) or isinstance(hidden, str) or getattr(hidden, "ndim", 1) != 1:
        check.fail("hidden", repr(hidden), "a sequence of layer widths, such as (256, 256) or (), or a pair of them")
    given = tuple(hidden)
    sides = given if len(given) == 2 and all(isinstance(one, (list, tuple)) for one in given) else (given, given)
    left, right = (tuple(check.count("hidden", width) for width in side) for side in sides)
    return left, right


def hidden_text(hidden: Hidden) -> str:
    """Widths as text: ``"256,256"``, ``"none"``, or ``"1024/none"`` for a left and another right tower."""
    left, right = (",".join(map(str, widths)) or "none" for widths in check_hidden(hidden))
    return left if left == right else f"{left}/{right}"


def config_hidden(hidden: Hidden) -> list[int] | str:
    """Widths as a config file has them: a list, or text where the towers differ."""
    left, right = check_hidden(hidden)
    return list(left) if left == right else hidden_text(hidden)


def parse_hidden(text: str, name: str = "hidden") -> Hidden:
    """The widths that such a text says."""
    sides = []
    for side in text.split("/"):
        words = [] if side.strip() == "none" else [word.strip() for word in side.split(",") if word.strip()]
        if not all(word.isascii() and word.isdecimal() and len(word) < 10 for word in words):
            check.fail(name, repr(text), "widths such as 256,256, or none, or those of the left/right tower")
        sides.append(tuple(check.count(name, int(word)) for word in words))
    if len(sides) > 2:
        check.fail(name, repr(text), "widths of one or two towers")
    return sides[0] if len(sides) == 1 else (sides[0], sides[1])
