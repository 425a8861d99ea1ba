"""A local Spark session and a local Ray cluster for tests: two tasks, and nothing written to the home folder."""

from __future__ import annotations

import gc
import os
import secrets
import sys
import warnings
from contextlib import contextmanager

import pytest

#: Warnings of the engines themselves, which say nothing about this library.
QUIET = [
    "ignore::FutureWarning",
    "ignore::DeprecationWarning",
    "ignore:.*deprecated.*:UserWarning",
    "ignore::ResourceWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
]


TOKEN = secrets.token_hex(32)  # of the Ray clusters of this process; otherwise Ray keeps one in the home folder


@contextmanager
def environment():
    """The variables that both engines read when they start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        patch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("RAY_AUTH_TOKEN", TOKEN)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        yield
    with warnings.catch_warnings():  # engines leave processes and sockets to the collector, which warns in later tests
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@contextmanager
def spark_session():
    sql = pytest.importorskip("pyspark.sql", reason="needs pyspark, which is not installed")
    with environment():
        made = sql.SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
        for name in (name for name in os.environ if name.startswith("AWS_")):  # a JVM may have started without them
            made = made.config(f"spark.executorEnv.{name}", os.environ[name])
        session = made.config("spark.ui.showConsoleProgress", "false").getOrCreate()
        yield session
        session.stop()


@contextmanager
def ray_cluster():
    ray = pytest.importorskip("ray", reason="needs ray, which is not installed")
    pytest.importorskip("ray.train.torch", reason="needs ray[train], which is not installed")
    with environment():
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100_000_000)
        yield ray
        ray.shutdown()
