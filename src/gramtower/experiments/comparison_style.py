"""How each method is drawn, the same in every figure and on the page: a colour for each family, dashes for plain ones.

Colours are of the Okabe-Ito palette, which colour-blind readers can tell apart.
"""

from __future__ import annotations

from typing import NamedTuple


class Line(NamedTuple):
    """Colour, dashes (lengths on and off; none for a solid line) and width."""

    colour: str
    dashes: tuple[int, ...] = ()
    width: float = 2.0


_DASHED = (5, 3)
LINES = {
    "newton-kron": Line("#000000", width=2.8),
    "newton": Line("#D55E00"),
    "gd-diag": Line("#0072B2"),
    "gd": Line("#0072B2", _DASHED),
    "sogram-diag": Line("#CC79A7"),
    "sogram": Line("#CC79A7", _DASHED),
    "sampling-diag": Line("#009E73"),
    "sampling": Line("#009E73", _DASHED),
    "lbfgs": Line("#8A6D00", (2, 2)),
}
_OTHER = Line("#777777", (1, 2))


def line_of(name: str) -> Line:
    """The line of a method; grey for one that is not known here."""
    return LINES.get(name, _OTHER)
