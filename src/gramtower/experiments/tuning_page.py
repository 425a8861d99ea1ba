"""The page of a tuning: trials, curves, what each choice explains and where it was tried, and the settings found.

Made from report.json alone.
"""

from __future__ import annotations

from html import escape
from typing import Any

from gramtower._util.files import plain
from gramtower.experiments.figures import as_svg
from gramtower.experiments.page import document, facts, number, picture, table
from gramtower.experiments.tuning.report import Search, shown
from gramtower.experiments.tuning.space import Value


def tuning_page(search: Search, title: str) -> tuple[str, dict[str, Any], list[str]]:
    """The page of a search.

    Returns:
        HTML, the numbers in it, and what could not be made and why.
    """
    best, metric, data = search.best, search.metric, search.data
    problems: list[str] = []
    at_defaults = search.trials[0]
    left, right, pairs = (data.get(name, 0) for name in ("left", "right", "pairs"))
    density = pairs / max(1, left * right)
    sizes = (
        f"{left:,} left × {right:,} right entities, {pairs:,} pairs to learn from: {density:.3%} of all. "
        f"{data.get('ranked_users', 0):,} users were ranked in each trial."
    )
    result = (
        f"{metric} on the validation part: {best.value:.4f} by trial {best.number}, iteration {best.iteration}; "
        f"{at_defaults.value:.4f} with the model's own settings (trial 0). {len(search.trials):,} trials in "
        f"{search.seconds:.0f} s"
    )
    result += f"; {search.verdict}." if search.verdict else "."
    body = [f"<p><strong>{escape(result)}</strong></p>", f"<p>{escape(sizes)}</p>"]
    heads, measured = search.metrics_table()
    body += [table(heads, measured)] if measured else []
    body.append(f"<p>{escape(search.caution)}</p>")
    if search.interrupted:
        body.append('<p class="warn">The search was interrupted; the same command goes on.</p>')
    body.append("<h2>Trials</h2>")
    try:
        body.append(picture(as_svg(search.plot()), f"{metric} of each trial, their curves, and importance of choices"))
    except ImportError as error:
        problems.append(f"no figures: {error}")
        body.append(f"<p>{escape(str(error))}</p>")
    body += ["<h2>What was found</h2>", _choices(search), "<h2>All trials</h2>", _trials(search)]
    body += ["<h2>Trained again</h2>", _confirmations(search)] if search.confirmations else []
    body += ["<h2>Settings</h2>"]
    for name, part in search.tables().items():
        known = {key: value for key, value in plain(part).items() if value is not None}
        body += [facts(f"[{name}]", known)] if known else []
    content = {
        "kind": "tuning", "title": title, "metric": metric, "value": best.value, "trial": best.number,
        "trials": len(search.trials), "confirmations": len(search.confirmations), "at_defaults": at_defaults.value,
        "seconds": search.seconds,
        "importance": search.importance, "arguments": search.arguments, "data": {**data, "density": density},
        "interrupted": search.interrupted, "verdict": search.verdict,
        "metrics": {"own settings": at_defaults.metrics, "found": best.metrics},
    }  # fmt: skip
    return document(f"Tuning: {title}", body), plain(content), problems


def _choices(search: Search) -> str:
    best, start = search.best.settings, search.trials[0].settings
    names = sorted(best, key=lambda name: -search.importance.get(name, 0.0))
    rows = [
        [
            name,
            search.space.get(name, "–"),
            _text(start.get(name)),
            _text(best[name]),
            number(search.importance.get(name)),
        ]
        for name in names
    ]
    return table(["choice", "searched", "at the start", "found", "importance"], rows)


def _trials(search: Search) -> str:
    names = list(search.best.settings)
    ordered = sorted(search.trials, key=lambda t: (t.pruned, -t.value))
    rows = [
        [str(t.number), f"{t.value:.4f}", *(_text(t.settings.get(name)) for name in names),
         str(len(t.curve) - 1), f"{t.seconds:.1f}", t.note]
        for t in ordered
    ]  # fmt: skip
    marked = [[t.number == search.winner] * (len(names) + 4) for t in ordered]
    return table(["trial", search.metric, *names, "iterations", "seconds", "note"], rows, marked)


def _confirmations(search: Search) -> str:
    rows = [
        [str(t.number), f"{t.value:.4f}", t.repeated, str(len(t.curve) - 1), f"{t.seconds:.1f}"]
        for t in search.confirmations
    ]
    return table(["trial", search.metric, "how", "iterations", "seconds"], rows)


def _text(value: Value | None) -> str:
    return "–" if value is None else shown(value)
