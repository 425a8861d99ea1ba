"""The models that a server answers from, by name, and their replacement while it serves.

A new file is read beside the old model; only when it is whole, of this version, and its index belongs to it, does it
take the old one's place, in one assignment. Requests that were under way end with the model they began with. A file
that is refused is not tried again until it changes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from gramtower._util import checks as check
from gramtower.serving.errors import Refused, shown
from gramtower.serving.metrics import Labels, Metrics
from gramtower.serving.snapshot import Snapshot, Source

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
