"""A fit and lists on Spark: ``fit`` over ``TorchDistributor``, and ``recommend`` over the rows of a frame.

A fit is one barrier stage with a task for each process. Spark does not repeat a barrier stage whose results go to the
driver, so the driver starts another one when a process is lost, and the processes continue from the last checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from gramtower._util import checks as check
from gramtower._util.checks import need
from gramtower.data.frames import Column
from gramtower.data.tables import FeaturesLike
from gramtower.distributed.rendezvous import joined
from gramtower.launch.arrow import ListOptions, Model, lists_of
from gramtower.launch.job import Job, Launched, make_job
from gramtower.model.defaults import pick_device
from gramtower.model.settings import ModelSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyarrow import RecordBatch
    from pyspark.sql import DataFrame

_TYPES = {"int64": "bigint", "int32": "int", "string": "string", "float": "float"}


def fit(
    path: str | Path,
    settings: ModelSettings,
    *,
    out: str | Path,
    columns: Mapping[str, Column] | None = None,
    num_processes: int = 1,
    use_gpu: bool = False,
    max_failures: int = 3,
    left_features: FeaturesLike = None,
    right_features: FeaturesLike = None,
) -> Launched:
    """Fit a partition with processes that the active Spark session starts, one for each task.

    The same call continues a fit that was stopped, from its last checkpoint.

    Args:
        path: a folder of Parquet files in which no left id is in two parts, or its URL; every executor must be able to
            read it.
        settings: the settings of the fit: a :class:`~gramtower.TwoTower`.
        out: folder of the run, which the driver and every executor can write, or its URL: model, history, checkpoint.
        columns: columns of the files, such as ``{"left": "user", "right": "item"}``, also "value" and "weight"; None if
            the first two are the ids.
        num_processes: number of processes, at most the number of parts and of tasks that Spark can run at once.
        use_gpu: give a GPU to each process, as ``spark.task.resource.gpu.amount`` says.
        max_failures: how often all processes are started again after one is lost.
        left_features: features of the left tower, as for ``TwoTower.fit``; they are sent to every process.
        right_features: features of the right tower.

    Raises:
        ValueError: for bad arguments before anything starts, and for data that a process refuses.
        RuntimeError: if there is no active session, or a process failed in every attempt.
    """
    distributor = need("pyspark.ml.torch.distributor", "a fit on Spark")
    check.count("num_processes", num_processes)
    failures = check.count("max_failures", max_failures, minimum=0)
    job = make_job(path, columns, settings, out, left_features, right_features)
    if not check.flag("use_gpu", use_gpu):
        if job.params["device"] not in ("auto", "cpu"):
            check.fail("use_gpu", use_gpu, f"True with device={job.params['device']!r}")
        job.params["device"] = "cpu"  # a GPU of the machine is not that of a task
    made = distributor.TorchDistributor(num_processes, local_mode=False, use_gpu=use_gpu)
    if made.is_spark_local_master and not made.is_remote:
        tasks = made.spark.sparkContext.defaultParallelism
        if num_processes > tasks:  # for which Spark would wait ten minutes
            check.fail("num_processes", num_processes, f"at most {tasks}, the number of tasks of this local session")
    job.begin()
    for attempt in range(failures + 1):
        try:
            made.run(_work, job)
            break
        except Exception as error:
            if attempt == failures or job.refused:
                raise job.failed("Spark", error) from error
    return job.launched()


def _work(job: Job) -> None:
    if job.refused:
        return
    with joined(pick_device(job.params["device"]).type == "cuda") as group:
        job.work(group)


def recommend(
    model: Model, left_frame: DataFrame, k: int = 10, *, column: str | None = None, **options: Unpack[ListOptions]
) -> DataFrame:
    """Make the lists of ``recommend_all`` for the left entities of a frame, in the tasks of the frame.

    The model's embeddings, the pairs to leave out and the rules are broadcast once; each task ranks its own rows.

    Args:
        model: a model, or the path of a saved one.
        left_frame: a frame with ids of left entities, not of Spark Connect, which has no broadcasts.
        k: length of the lists.
        column: the column of ids; the first one by default.
        options: filters, exclusions and other rules, as for ``recommend_all``.

    Returns:
        A frame with a row for each answer: left id, rank from 1, right id and score; ids have the names of the data.
    """
    need("pyspark", "lists on Spark")
    lists = lists_of(model, k, **options)
    if column is not None and column not in left_frame.columns:
        check.fail("column", repr(column), f"one of {', '.join(left_frame.columns)}")
    shared = left_frame.sparkSession.sparkContext.broadcast(lists)

    def ranked(batches: Iterator[RecordBatch]) -> Iterator[RecordBatch]:
        yield from shared.value.batches(batches)

    schema = ", ".join(f"{field.name} {_TYPES[str(field.type)]}" for field in lists.schema)
    return left_frame.select(column or left_frame.columns[0]).mapInArrow(ranked, schema)
