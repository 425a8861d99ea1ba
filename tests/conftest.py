from __future__ import annotations

import logging
import os
from datetime import timedelta
from pathlib import Path
from urllib.request import Request, urlopen

if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores; read when torch is imported
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import engines
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
                for width in (390, 1366):
                    tab.set_viewport_size({"width": width, "height": 900})
                    if tab.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth"):
                        wide.append((page.name, width))
            browser.close()
        return wide

    return found


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def s3_server():
    """The address of a server with the interface of S3 in this process."""
    moto = pytest.importorskip("moto.server", reason="the tests of object storage need moto")
    pytest.importorskip("obstore", reason="object storage needs obstore")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture
def quick(monkeypatch):
    """Few and quick retries of requests to a store."""
    from gramtower._util import remote

    pause = {"init_backoff": timedelta(milliseconds=1), "max_backoff": timedelta(milliseconds=2), "base": 2}
    monkeypatch.setattr(remote, "RETRY", {"max_retries": 2, "retry_timeout": timedelta(seconds=5), "backoff": pause})


@pytest.fixture
def s3(s3_server, quick, monkeypatch):
    """The address of that server, with an empty bucket s3://lake and credentials."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    urlopen(Request(f"{s3_server}/moto-api/reset", method="POST")).close()
    urlopen(Request(f"{s3_server}/lake", method="PUT")).close()
    return s3_server


@pytest.fixture(scope="module")
def session():
    with engines.spark_session() as made:
        yield made


@pytest.fixture(scope="module")
def cluster():
    with engines.ray_cluster() as made:
        yield made
