"""Counters and histograms in Prometheus' text format (version 0.0.4), kept by the event loop and the worker.

Labels come from the server's own routes, never from a request, so that their number is bounded. Checked by
tests/test_serving_metrics.py.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from gramtower._util import checks as check
from gramtower.serving.refusals import Refused, shown
from gramtower.serving.snapshot import Snapshot, Source

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


Say = Callable[[str], None]
Loaded = Callable[[str, Sequence[Any]], None]


class Models:
    """Served models.

    Args:
        sources: the first is the one that requests without a name mean.
        metrics: where swaps are counted.
        say: takes lines for the operator.
        loaded: called with the name and the stamp of each model that was loaded.
        watched: whether files that changed before now are to be taken up by the next ``reload`` of changed ones, where
            a model starts from its ``kept`` file.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        metrics: Metrics,
        say: Say = lambda line: None,
        loaded: Loaded = lambda name, stamp: None,
        watched: bool = False,
    ) -> None:
        names = [source.name for source in sources]
        if not names or len(set(names)) < len(names):
            check.fail("models", ", ".join(names) or "none", "at least one, each with a name of its own")
        self._metrics, self._say, self._report, self._lock = metrics, say, loaded, threading.Lock()
        self._snapshots, self._tried = dict[str, Snapshot](), dict[str, Any]()
        for source in sources:
            now, snapshot = replace(source, kept=None).stamp(), self._first(source)
            self._snapshots[source.name] = snapshot
            self._tried[source.name] = snapshot.stamp if watched or source.kept is None else now
        self.refused: dict[str, str] = {}

    def get(self, name: str | None = None) -> Snapshot:
        """A model as it is now; the first without a name.

        Raises:
            Refused: 404, with near names.
        """
        if name is None:
            return next(iter(self._snapshots.values()))
        if name not in self._snapshots:
            near = check.near(name[:100], list(self._snapshots)) or list(self._snapshots)[:5]
            raise Refused(404, f"model: got {shown(name)}, expected one of {', '.join(map(repr, near))}", near=near)
        return self._snapshots[name]

    def all(self) -> list[Snapshot]:
        """All models as they are now."""
        return list(self._snapshots.values())

    def reload(self, changed_only: bool = False) -> list[str]:
        """Read the files again; returns the names of those that were replaced. May be called from any thread."""
        replaced = []
        with self._lock:
            for name, old in list(self._snapshots.items()):
                source = replace(old.source, kept=None)
                stamp = source.stamp()
                if changed_only and stamp == self._tried[name]:
                    continue
                self._tried[name] = stamp
                try:
                    self._snapshots[name] = self._loaded(source)
                except Exception as error:  # whatever is wrong with it, and also if there is no memory for two
                    kind = "" if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: "
                    self.refused[name] = kind + " ".join(str(error).split())
                    self._metrics.swap("refused")
                    self._say(f"model {name!r}: the new file is refused, the old one serves on: {self.refused[name]}")
                    continue
                self.refused.pop(name, None)
                self._metrics.swap("loaded")
                replaced.append(name)
        return replaced

    def gauges(self) -> list[tuple[str, str, list[tuple[Labels, float]]]]:
        """Ages and sizes, for Prometheus."""
        now, ages, indexes, recalls, entities = time.time(), [], [], [], []
        for snapshot in self.all():
            label: Labels = (("model", snapshot.name),)
            ages.append((label, now - snapshot.written))
            for side in ("left", "right"):
                entities.append(((*label, ("side", side)), float(len(snapshot.side(side)))))
            if snapshot.index_facts is not None:
                indexes.append((label, now - snapshot.index_facts.built))
                recalls.append((label, snapshot.index_facts.recall))
        return [
            ("gramtower_model_age_seconds", "Time since the model file was written.", ages),
            ("gramtower_index_age_seconds", "Time since the index was built.", indexes),
            ("gramtower_index_recall", "Recall against exact lists, measured when the index was built.", recalls),
            ("gramtower_entities", "Entities of the model.", entities),
        ]

    def _first(self, source: Source) -> Snapshot:
        """The model that other workers serve, if its file was kept and can be read, otherwise that of the path."""
        if source.kept is not None:
            try:
                return self._loaded(source)
            except (ValueError, OSError) as error:
                self._say(f"model {source.name!r}: the file that was kept cannot be read: {error}")
        return self._loaded(replace(source, kept=None))

    def _loaded(self, source: Source) -> Snapshot:
        start = time.perf_counter()
        snapshot = Snapshot(source)
        lists = "exact lists" if snapshot.index_facts is None else f"index {snapshot.index_facts.kind}"
        self._say(
            f"model {source.name!r}: {len(snapshot.left):,} × {len(snapshot.right):,} entities, {lists}, "
            f"loaded in {time.perf_counter() - start:.1f} s"
        )
        for note in snapshot.notes:
            self._say(f"model {source.name!r}: {note}")
        if source.kept is None:
            self._report(source.name, snapshot.stamp)
        return snapshot
