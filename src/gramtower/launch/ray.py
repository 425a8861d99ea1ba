"""A fit and lists on Ray: ``fit`` over Ray Train's ``TorchTrainer``, and ``recommend`` over a dataset.

Checkpoints of a fit are reported to Ray Train with the objective, at most one in ten seconds, because Ray collects
reports only every two. They lie in the folder of the run, which is Ray's storage too, so that nothing is copied. When a
worker is lost, Ray starts all of them again, and they continue from the last checkpoint, reported or not.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from gramtower._util import checks as check
from gramtower._util.checks import need
from gramtower._util.files import is_remote
from gramtower.data.frames import Column
from gramtower.data.tables import FeaturesLike
from gramtower.distributed.group import current_group
from gramtower.engine.objective.problem import Point
from gramtower.launch.arrow import ListOptions, Lists, Model, lists_of
from gramtower.launch.job import Job, Launched, make_job
from gramtower.model.settings import ModelSettings
from gramtower.training.callbacks import numbers_of
from gramtower.training.result import Record, Result

if TYPE_CHECKING:
    from pyarrow import Table
    from ray import ObjectRef
    from ray.data import Dataset
    from ray.train import ScalingConfig

_PAUSE = 10.0  # least seconds between reports
_STORES = ("s3", "gs")  # schemes of URLs to which Ray can write its own files


def fit(
    path: str | Path,
    settings: ModelSettings,
    *,
    out: str | Path,
    columns: Mapping[str, Column] | None = None,
    scaling_config: ScalingConfig | None = None,
    max_failures: int = 3,
    left_features: FeaturesLike = None,
    right_features: FeaturesLike = None,
) -> Launched:
    """Fit a partition with the workers of a Ray cluster.

    The same call continues a fit that was stopped, from its last checkpoint.

    Args:
        path: a folder of Parquet files in which no left id is in two parts, or its URL; every worker must be able to
            read it.
        settings: the settings of the fit: a :class:`~gramtower.TwoTower`.
        out: folder of the run, which every worker can write, or its URL: model, history, checkpoint, Ray's own files.
        columns: columns of the files, such as ``{"left": "user", "right": "item"}``, also "value" and "weight"; None if
            the first two are the ids.
        scaling_config: number and resources of workers, a ``ray.train.ScalingConfig``; None for one worker.
        max_failures: how often all workers are started again after one is lost.
        left_features: features of the left tower, as for ``TwoTower.fit``; they are sent to every worker.
        right_features: features of the right tower.

    Raises:
        ValueError: for bad arguments before anything starts, and for data that a worker refuses.
        RuntimeError: if a worker failed in every attempt.
    """
    train = need("ray.train", "a fit on Ray")
    torch = need("ray.train.torch", "a fit on Ray")
    if scaling_config is not None and not isinstance(scaling_config, train.ScalingConfig):
        check.fail("scaling_config", type(scaling_config).__name__, "a ray.train.ScalingConfig, or None")
    failures = train.FailureConfig(max_failures=check.count("max_failures", max_failures, minimum=0))
    job = make_job(path, columns, settings, out, left_features, right_features)
    if is_remote(job.out) and job.out.scheme not in _STORES:
        check.fail("out", job.out, f"a folder, or a URL that pyarrow can write for Ray: {', '.join(_STORES)}")
    trainer = torch.TorchTrainer(
        _work, train_loop_config={"job": job}, scaling_config=scaling_config,
        run_config=train.RunConfig(name=job.out.name, storage_path=str(job.out.parent), failure_config=failures),
    )  # fmt: skip
    job.begin()
    try:
        trainer.fit()
    except Exception as error:
        raise job.failed("Ray", error) from error
    return job.launched()


def _work(config: dict[str, Job]) -> None:
    if not config["job"].refused:
        config["job"].work(current_group(), [_Report(config["job"])])


class _Report:
    """A callback that reports the last checkpoint, once all processes have written it, with the latest numbers."""

    def __init__(self, job: Job) -> None:
        self._train, self._checkpoint = need("ray.train", "a fit on Ray"), job.checkpoint
        self._reported, self._due = 0.0, time.monotonic() + _PAUSE

    def __call__(self, record: Record, point: Point) -> None:
        group, written = current_group(), self._reported
        if group.rank == 0 and time.monotonic() >= self._due:  # of a URL, this asks the store
            written = self._checkpoint.stat().st_mtime if self._checkpoint.exists() else 0.0
        if group.from_first(written != self._reported):  # every process has to report, or none
            self._reported, self._due = written, time.monotonic() + _PAUSE
            self._send(record)

    def end(self, result: Result | None) -> None:
        if result is not None:
            self._send(result.history[-1])

    def _send(self, record: Record) -> None:
        folder = self._train.Checkpoint(str(self._checkpoint.parent))
        self._train.report(
            {"iteration": record.iteration, **numbers_of(record)}, checkpoint=folder,
            checkpoint_upload_mode=self._train.CheckpointUploadMode.NO_UPLOAD,
        )  # fmt: skip


def recommend(
    model: Model,
    dataset: Dataset,
    k: int = 10,
    *,
    column: str | None = None,
    concurrency: int | tuple[int, int] | None = None,
    **options: Unpack[ListOptions],
) -> Dataset:
    """Make the lists of ``recommend_all`` for the left entities of a dataset, batch by batch.

    The model's embeddings, the pairs to leave out and the rules are put into Ray's object store once; each actor reads
    them from there when it starts.

    Args:
        model: a model, or the path of a saved one.
        dataset: a ``ray.data.Dataset`` with ids of left entities.
        k: length of the lists.
        column: the column of ids; the first one by default.
        concurrency: number of actors, or the least and the largest number, as for ``map_batches``.
        options: filters, exclusions and other rules, as for ``recommend_all``.

    Returns:
        A dataset with a row for each answer: left id, rank from 1, right id and score; ids have the names of the data.
    """
    ray = need("ray", "lists on Ray")
    lists = lists_of(model, k, **options)
    return dataset.map_batches(
        _Ranker, fn_constructor_args=(ray.put(lists), column), batch_format="pyarrow", concurrency=concurrency
    )


class _Ranker:
    """An actor that has the model and ranks batches."""

    def __init__(self, lists: ObjectRef[Lists], column: str | None) -> None:
        self._lists, self._column = need("ray", "lists on Ray").get(lists), column

    def __call__(self, batch: Table) -> Table:
        made: Table = self._lists.table(batch, self._column)
        return made
