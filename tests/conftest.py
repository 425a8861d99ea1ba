from __future__ import annotations

import os
from pathlib import Path

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


@pytest.fixture
def too_wide():
    """A function that names the HTML files that scroll sideways, with the widths of the screens on which they do."""
    if not Path("/usr/bin/chromium").exists():
        pytest.skip("needs /usr/bin/chromium, which is not there")
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright, which is not installed")

    def found(*pages):
        wide = []
        with api.sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path="/usr/bin/chromium", args=["--headless", "--no-sandbox"]
            )
            for page in pages:
                tab = browser.new_context(offline=True).new_page()
                tab.goto(f"file://{page}")
                for width in (390, 1024, 1366, 1920):
                    tab.set_viewport_size({"width": width, "height": 900})
                    if tab.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth"):
                        wide.append((page.name, width))
            browser.close()
        return wide

    return found


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
