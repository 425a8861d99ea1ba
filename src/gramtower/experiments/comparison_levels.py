"""The numbers of a comparison: L*, relative differences, when each method reached a level, who was how much sooner.

relative difference   (L − L*) / L*, L* the lowest value that any method reached (Section "A Comparison on the
Convergence Speed")
reached               the first record at or below a level; times are not interpolated between records
speed-up of A over B  B's seconds to a level over A's. If B never got there it is at least B's whole time over A's;
if A never got there it is at most B's time over A's whole time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gramtower.experiments.comparison_store import Comparison, MethodRun
from gramtower.training.result import Record

#: Relative differences that tables are made for.
LEVELS = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01)
_WON = 0.01  # who is first within this of L* has won

SpeedUp = dict[str, Any]  # {"times": float, "bound": "" or ">" or "<"}


def lowest_value(methods: list[MethodRun]) -> float | None:
    """L*: the lowest value that any method reached, None without records."""
    return min((record.value for method in methods for record in method.history), default=None)


def relative_difference(value: float, lowest: float) -> float:
    """(L − L*) / |L*|."""
    return (value - lowest) / abs(lowest) if lowest else value - lowest


def reached(history: list[Record], lowest: float, level: float) -> Record | None:
    """The first record whose relative difference is at most a level."""
    return next((record for record in history if relative_difference(record.value, lowest) <= level), None)


def speed_up(a: list[Record], b: list[Record], lowest: float, level: float) -> SpeedUp | None:
    """How many times sooner A reached a level than B; None if neither did, or one has no records."""
    if not a or not b:
        return None
    at_a, at_b = reached(a, lowest, level), reached(b, lowest, level)
    if at_a is None and at_b is None:
        return None
    bound = "" if at_a is not None and at_b is not None else ">" if at_b is None else "<"
    return {"times": (at_b or b[-1]).seconds / (at_a or a[-1]).seconds, "bound": bound}


def summarise(comparison: Comparison) -> dict[str, Any]:
    """All numbers of a comparison, as in summary.json."""
    methods = comparison.methods
    lowest = lowest_value(methods)
    found: dict[str, Any] = {
        "lowest": lowest,
        "metric": comparison.metric,
        "levels": list(LEVELS),
        "methods": {method.name: _method(method, lowest) for method in methods},
        "speed_up": {},
        "first": {},
    }
    if lowest is not None:
        ran = [method for method in methods if method.history]
        for level in LEVELS:
            table = {
                a.name: {b.name: speed_up(a.history, b.history, lowest, level) for b in ran if b is not a} for a in ran
            }
            found["speed_up"][f"{level:g}"] = table
            found["first"][f"{level:g}"] = _first(ran, lowest, level, _time_limit(comparison))
    return found | {"verdict": verdict(found)}


def verdict(summary: dict[str, Any]) -> str:
    """One sentence: who won for this data, which is to be within 1% of L* first, and by how much."""
    first = summary["first"].get(f"{_WON:g}")
    ran = [name for name, found in summary["methods"].items() if "lowest" in found]
    if first is None:
        return "For this data nobody won: no method ran."
    name, seconds = first["method"], f"{first['seconds']:.3g} s"
    if len(ran) == 1:
        return f"For this data {name} ran alone, and was within {_WON:.0%} of its lowest objective after {seconds}."
    if first["next"] is not None:
        lead = f"{first['times']:.3g} times sooner than the next, {first['next']}"
    elif first["times"] is not None and first["times"] > 1:
        lead = f"at least {first['times']:.3g} times sooner than any other, as no other came so near in its time"
    else:
        lead = "and no other came so near in its time"
    return f"For this data {name} won: within {_WON:.0%} of the lowest objective of all after {seconds}, {lead}."


def _method(method: MethodRun, lowest: float | None) -> dict[str, Any]:
    history = method.history
    found: dict[str, Any] = {"status": method.outcome["status"], "message": method.outcome.get("message", "")}
    if not history or lowest is None:
        return found
    best, last = min(history, key=lambda record: record.value), history[-1]
    metrics = [record.metric for record in history if record.metric is not None]
    return found | {
        "iterations": last.iteration,
        "seconds": last.seconds,
        "data_passes": last.data_passes,
        "lowest": best.value,
        "relative_difference": relative_difference(best.value, lowest),
        "best_metric": max(metrics, default=None),
        "last_metric": metrics[-1] if metrics else None,
        "seconds_to": _to(history, lowest, lambda record: record.seconds),
        "passes_to": _to(history, lowest, lambda record: record.data_passes),
    }


def _to(history: list[Record], lowest: float, what: Callable[[Record], float]) -> dict[str, float | None]:
    records = {f"{level:g}": reached(history, lowest, level) for level in LEVELS}
    return {level: None if record is None else what(record) for level, record in records.items()}


def _time_limit(comparison: Comparison) -> float:
    """The seconds that every method had, 0 if nothing is known of a limit in time alone."""
    limits = comparison.about.get("settings", {}).get("limits", {})
    return float(limits.get("time_limit") or 0.0) if limits.get("max_iterations") is None else 0.0


def _first(ran: list[MethodRun], lowest: float, level: float, limit: float) -> dict[str, Any] | None:
    """Who reached a level first, and how many times sooner than the next (at least so many if no other did).

    A method that stopped before the level gives no bound on how long it would take.
    """
    times = [(record.seconds, m) for m in ran if (record := reached(m.history, lowest, level)) is not None]
    if not times:
        return None
    seconds, winner = min(times, key=lambda pair: pair[0])
    others = [(time, m) for time, m in times if m is not winner]
    found: dict[str, Any] = {"method": winner.name, "seconds": seconds}
    if others:
        time, second = min(others, key=lambda pair: pair[0])
        return found | {"next": second.name, "times": time / seconds, "bound": ""}
    going = [m for m in ran if m is not winner and m.outcome["status"] not in ("diverged", "failed")]
    ends = [m.history[-1].seconds for m in going if m.history[-1].seconds >= limit]
    return found | {"next": None, "times": min(ends) / seconds if ends else None, "bound": ">"}
