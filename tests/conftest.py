from __future__ import annotations

import os

if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores; read when torch is imported
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported: GPU kernels run on the CPU

settings.register_profile(
    "gramtower",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("gramtower")


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
