"""Counters and histograms in Prometheus' text format (version 0.0.4), kept by the event loop and the worker.

Labels come from the server's own routes, never from a request, so that their number is bounded. Checked by
tests/test_serving_metrics.py.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Sequence

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
Labels = tuple[tuple[str, str], ...]


class Histogram:
    """Counts of values up to each bound, their sum and number."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.counts, self.sum = tuple(bounds), [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class Metrics:
    """All that is counted.

    Args:
        labels: of every line, such as the worker's number.
    """

    def __init__(self, labels: Labels = ()) -> None:
        self._lock, self._labels = threading.Lock(), labels
        self._requests: dict[tuple[str, int], int] = {}
        self._seconds: dict[str, Histogram] = {}
        self._batches = Histogram(SIZES)
        self._swaps = {"loaded": 0, "refused": 0}

    def request(self, path: str, status: int, seconds: float) -> None:
        """A request that was answered."""
        with self._lock:
            self._requests[path, status] = self._requests.get((path, status), 0) + 1
            self._seconds.setdefault(path, Histogram(SECONDS)).add(seconds)

    def batch(self, tasks: int) -> None:
        """A batch that the worker answered."""
        with self._lock:
            self._batches.add(tasks)

    def swap(self, outcome: str) -> None:
        """A model that was loaded anew, or refused."""
        with self._lock:
            self._swaps[outcome] += 1

    def text(self, gauges: Iterable[tuple[str, str, list[tuple[Labels, float]]]] = ()) -> str:
        """Everything, and gauges (name, help, labels and values) as they are now."""
        own = self._labels
        with self._lock:
            lines = _head("gramtower_requests_total", "Requests answered.", "counter")
            for (path, status), count in sorted(self._requests.items()):
                labels = (*own, ("path", path), ("status", str(status)))
                lines.append(_line("gramtower_requests_total", labels, count))
            lines += _head("gramtower_request_seconds", "Time from a request to the end of its answer.", "histogram")
            for path, histogram in sorted(self._seconds.items()):
                lines += _histogram("gramtower_request_seconds", (*own, ("path", path)), histogram)
            lines += _head("gramtower_batch_requests", "Requests that one batch of the worker answered.", "histogram")
            lines += _histogram("gramtower_batch_requests", own, self._batches)
            lines += _head("gramtower_model_swaps_total", "Models loaded anew while serving, or refused.", "counter")
            for outcome, count in self._swaps.items():
                lines.append(_line("gramtower_model_swaps_total", (*own, ("outcome", outcome)), count))
        for name, text, values in gauges:
            lines += _head(name, text, "gauge")
            lines += [_line(name, (*own, *labels), value) for labels, value in values]
        return "\n".join(lines) + "\n"


def _head(name: str, text: str, kind: str) -> list[str]:
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]


def _line(name: str, labels: Labels, value: float) -> str:
    inner = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels)
    shown = str(value) if isinstance(value, int) else f"{value:.9g}"
    return f"{name}{{{inner}}} {shown}" if inner else f"{name} {shown}"


def _histogram(name: str, labels: Labels, histogram: Histogram) -> list[str]:
    lines, total = [], 0
    for bound, count in zip((*histogram.bounds, None), histogram.counts, strict=True):
        total += count
        at = "+Inf" if bound is None else f"{bound:g}"
        lines.append(_line(f"{name}_bucket", (*labels, ("le", at)), total))
    return [*lines, _line(f"{name}_sum", labels, histogram.sum), _line(f"{name}_count", labels, total)]


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
