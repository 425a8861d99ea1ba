"""The models being served, by name, their replacement while the server runs, and its metrics for Prometheus.

A new file is loaded while the old model still answers. It replaces the old one, in one assignment, only if it is
complete and of this version, and if its index belongs to it. Requests in progress finish with the model they started
with. A file that is refused is not read again until it changes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gramtower._util import checks as check
from gramtower.serving.messages import Refused
from gramtower.serving.snapshot import Snapshot, Source, Stamp

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
Say = Callable[[str], None]
Loaded = Callable[[str, Stamp], None]


class Metrics(Collector):
    """Counters and histograms of one process, with a label ``worker`` if there are several.

    Other labels come from the server's own routes, never from a request, so that their number is bounded.
    """

    def __init__(self, worker: str | None = None) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # times at which each counter began, which would double the lines
        self._labels = {} if worker is None else {"worker": worker}
        self._registry = registry = CollectorRegistry()
        self._gauges: Iterable[Metric] = ()
        ProcessCollector(registry=registry)
        self._requests = Counter("gramtower_requests", "Requests answered.", ["path", "status"], registry=registry)
        text = "Time from a request to the end of its answer."
        self._times = Histogram("gramtower_request_seconds", text, ["path"], buckets=_SECONDS, registry=registry)
        text = "Requests answered in one batch."
        self._batches = Histogram("gramtower_batch_requests", text, buckets=_SIZES, registry=registry)
        text = "Models reloaded while serving, or refused."
        self._swaps = Counter("gramtower_model_swaps", text, ["outcome"], registry=registry)
        for outcome in ("loaded", "refused"):
            self._swaps.labels(outcome)

    def request(self, path: str, status: int, seconds: float) -> None:
        self._requests.labels(path, str(status)).inc()
        self._times.labels(path).observe(seconds)

    def batch(self, tasks: int) -> None:
        self._batches.observe(tasks)

    def swap(self, outcome: str) -> None:
        self._swaps.labels(outcome).inc()

    def text(self, gauges: Iterable[Metric] = ()) -> str:
        """All metrics, and the current values of gauges, in the text format of Prometheus."""
        self._gauges = gauges
        return generate_latest(self).decode()

    def collect(self) -> Iterator[Metric]:
        for family in (*self._registry.collect(), *self._gauges):
            family.samples = [one._replace(labels=self._labels | one.labels) for one in family.samples]
            yield family


class Models:
    """Models being served; the first one answers requests that name none.

    With ``watched``, a model that starts from its ``kept`` file is replaced by the next ``reload`` of changed files
    if its own file had already changed before.
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
            check.fail("models", ", ".join(names) or "none", "at least one model, each with another name")
        self._metrics, self._say, self._report, self._lock = metrics, say, loaded, threading.Lock()
        self._snapshots, self._tried = dict[str, Snapshot](), dict[str, Stamp]()
        for source in sources:
            now, snapshot = replace(source, kept=None).stamp(), self._first(source)
            self._tried[source.name] = snapshot.stamp if watched or source.kept is None else now
        self.refused: dict[str, str] = {}

    def get(self, name: str | None = None) -> Snapshot:
        """The current model with a name; the first one for None."""
        if name is None:
            return next(iter(self._snapshots.values()))
        if name not in self._snapshots:
            near = check.near(name[:100], list(self._snapshots)) or list(self._snapshots)[:5]
            raise Refused(
                404, f"model: got {check.shown(name)}, expected one of {', '.join(map(repr, near))}", near=near
            )
        return self._snapshots[name]

    def all(self) -> list[Snapshot]:
        return list(self._snapshots.values())

    def reload(self, changed_only: bool = False) -> list[str]:
        """Load the files again and return the names of the models that were replaced; safe in any thread."""
        replaced = []
        with self._lock:
            for name, old in list(self._snapshots.items()):
                source = replace(old.source, kept=None)
                stamp = source.stamp()
                if changed_only and stamp == self._tried[name]:
                    continue
                self._tried[name] = stamp
                try:
                    self._loaded(source)
                except Exception as error:  # also if there is not enough memory for two models
                    kind = "" if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: "
                    self.refused[name] = kind + " ".join(str(error).split())
                    self._metrics.swap("refused")
                    self._say(f"model {name!r}: the new file is refused, the old one serves on: {self.refused[name]}")
                    continue
                self.refused.pop(name, None)
                self._metrics.swap("loaded")
                replaced.append(name)
        return replaced

    def gauges(self) -> list[Metric]:
        """Ages and sizes of the models, for Prometheus."""
        ages = GaugeMetricFamily(
            "gramtower_model_age_seconds", "Time since the model file was written.", labels=["model"]
        )
        built = GaugeMetricFamily("gramtower_index_age_seconds", "Time since the index was built.", labels=["model"])
        text = "Recall against exact lists, measured when the index was built."
        recalls = GaugeMetricFamily("gramtower_index_recall", text, labels=["model"])
        entities = GaugeMetricFamily("gramtower_entities", "Entities of the model.", labels=["model", "side"])
        now = time.time()
        for snapshot in self.all():
            ages.add_metric([snapshot.name], now - snapshot.written)
            for side in ("left", "right"):
                entities.add_metric([snapshot.name, side], len(snapshot.side(side)))
            if snapshot.index_facts is not None:
                built.add_metric([snapshot.name], now - snapshot.index_facts.built)
                recalls.add_metric([snapshot.name], snapshot.index_facts.recall)
        return [ages, built, recalls, entities]

    def _first(self, source: Source) -> Snapshot:
        """Load the model that other workers serve, if its file was kept and can be read, else the one at its path."""
        if source.kept is not None:
            try:
                return self._loaded(source)
            except (ValueError, OSError) as error:
                self._say(f"model {source.name!r}: the kept file cannot be read: {error}")
        return self._loaded(replace(source, kept=None))

    def _loaded(self, source: Source) -> Snapshot:
        start = time.perf_counter()
        snapshot = self._snapshots[source.name] = Snapshot(source)  # served before it is reported
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
