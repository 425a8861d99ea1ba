"""Paths that are URLs: the same files as on a disk, through the interface of S3, and clear errors if that breaks."""

from __future__ import annotations

import base64
import functools
import gc
import gzip
import hmac
import http.server
import importlib
import json
import os
import pickle
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from contextlib import closing, contextmanager, suppress
from email.utils import formatdate
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import engines
import numpy as np
import pytest

pytest.importorskip("obstore", reason="object storage needs obstore")
pytest.importorskip("polars", reason="tables are read with polars")
pytest.importorskip("cyclopts", reason="the command line needs cyclopts")

import obstore
import polars as pl

import gramtower as gt
from gramtower._util import remote
from gramtower._util.checks import local_path
from gramtower._util.files import as_path, replacing
from gramtower.cli.program import run
from gramtower.data import list_files
from gramtower.data.tables import FeatureTable
from gramtower.distributed.partition import read_part, write_partition

SMALL = {"dim": 4, "hidden": (), "device": "cpu", "seed": 0, "l2": 0.1, "omega": 0.1, "embedding_l2": 0.1}


def frame(rows=600, seed=0):
    rng = np.random.default_rng(seed)
    users, items = rng.integers(0, 40, rows), rng.integers(0, 30, rows)
    return pl.DataFrame({"user": [f"u{u}" for u in users], "item": [f"i{i}" for i in items]}).unique(
        maintain_order=True
    )


def upload(url, content):
    with replacing(as_path(url)) as partial:
        partial.write_bytes(content)


def same(one, other):
    assert (one.matrix != other.matrix).nnz == 0
    assert one.left_ids.tolist() == other.left_ids.tolist()
    assert one.right_ids.tolist() == other.right_ids.tolist()


@functools.cache
def model(seed=0):
    return gt.TwoTower(**SMALL, max_iterations=3).fit(frame(seed=seed), left="user", right="item")


def test_a_url_is_a_path_also_after_pathlib_dropped_a_slash():
    path = as_path(Path("s3://lake/runs/model.gramtower"))
    assert str(path) == "s3://lake/runs/model.gramtower"
    assert str(path.with_name("x.csv.gz").parent / "y") == "s3://lake/runs/y"
    assert as_path("S3://lake/x.csv.gz").suffixes == [".csv", ".gz"]
    assert pickle.loads(pickle.dumps(path)) == path
    assert type(as_path("runs/s3:/x")) is type(Path())


@pytest.mark.parametrize("url", ["s3a://lake/x", "file:///etc", "gcs:/lake/x"])
def test_another_scheme_is_refused_and_not_taken_for_a_folder(url):
    with pytest.raises(ValueError, match="s3, gs, az, hf, http"):
        as_path(url)


def test_what_has_no_use_for_a_url_refuses_it():
    with pytest.raises(ValueError, match=r"storage.*local"):
        local_path("storage", "s3://lake/x")


@pytest.mark.parametrize("ending", ["csv", "tsv", "csv.gz", "parquet"])
def test_pairs_are_those_of_the_local_file(s3, tmp_path, ending):
    local = tmp_path / f"pairs.{ending}"
    table = frame()
    if ending == "parquet":
        table.write_parquet(local)
    else:
        text = table.write_csv(separator="\t" if ending == "tsv" else ",").encode()
        local.write_bytes(gzip.compress(text) if ending == "csv.gz" else text)
    upload(f"s3://lake/pairs.{ending}", local.read_bytes())
    read = gt.Interactions.from_parquet if ending == "parquet" else gt.Interactions.from_csv
    more = {"separator": "\t"} if ending == "tsv" else {}
    same(read(f"s3://lake/pairs.{ending}", "user", "item", **more), read(local, "user", "item", **more))


def test_a_folder_of_parts_is_read_and_what_writers_leave_there_is_not(s3, tmp_path):
    for number in range(3):
        local = tmp_path / f"parts/day={number}/part.parquet"
        local.parent.mkdir(parents=True)
        frame(seed=number).write_parquet(local)
        upload(f"s3://lake/parts/day={number}/part.parquet", local.read_bytes())
    for name in ("_SUCCESS", "_temporary/0/part.parquet", ".hidden", "day=0/.part.parquet.crc"):
        upload(f"s3://lake/parts/{name}", b"")
    found = gt.Interactions.from_parquet("s3://lake/parts", "user", "item", time="day")
    local = gt.Interactions.from_parquet(tmp_path / "parts", "user", "item", time="day")
    same(found, local)
    assert found.times.tolist() == local.times.tolist()


@pytest.mark.parametrize("key", ["my pairs (1).csv", "city=S%C3%A3o/ä#?.csv", "a:b/x+y.csv"])
def test_keys_are_taken_as_they_are(s3, key):
    upload(f"s3://lake/keys/{key}", b"content")
    store = obstore.store.S3Store("lake", endpoint=s3, client_options={"allow_http": True})
    assert [one["path"] for one in obstore.list(store, "keys").collect()] == [f"keys/{key}"]
    assert [(str(path), path.read_bytes()) for path in as_path("s3://lake/keys").glob("*/" * key.count("/") + "*")] == [
        (f"s3://lake/keys/{key}", b"content")
    ]


def test_copies_are_removed(s3, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    upload("s3://lake/pairs.csv", frame().write_csv().encode())
    path = as_path("s3://lake/pairs.csv")
    copy = Path(os.fspath(path))
    assert copy.parent == tmp_path
    assert not copy.stat().st_mode & 0o222  # what is written into a copy would be lost
    with pytest.raises(OSError, match="whole"):
        path.write_text("x")
    del path
    gt.Interactions.from_csv("s3://lake/pairs.csv", "user", "item")
    gc.collect()
    assert list(tmp_path.glob("gramtower-*")) == []


def test_features_are_those_of_the_local_table(s3, tmp_path):
    items = pl.DataFrame({"item": [f"i{i}" for i in range(30)], "price": np.arange(30.0), "kind": ["a", "b", "c"] * 10})
    items.write_parquet(tmp_path / "items.parquet")
    upload("s3://lake/items.parquet", (tmp_path / "items.parquet").read_bytes())
    here, there = (FeatureTable.inferred(f"{place}/items.parquet", "item") for place in (tmp_path, "s3://lake"))
    assert here.kinds == there.kinds
    assert (here.encode_frame(items) != there.encode_frame(items)).nnz == 0


def test_a_partition_is_read_and_replaced(s3):
    for seed in (0, 1):
        pairs = gt.Interactions.from_frame(frame(seed=seed), "user", "item")
        write_partition(pairs, "s3://lake/parts", 4 - seed)
        shard, again = read_part("s3://lake/parts"), gt.Interactions.from_parquet("s3://lake/parts", "user", "item")
        assert (shard.matrix != again.matrix).nnz == 0
        assert shard.right_ids.tolist() == again.right_ids.tolist()
        assert len(shard) == len(pairs)
        there = {path.name for path in as_path("s3://lake/parts").iterdir()}
        assert there == {f"part-{number:05d}.parquet" for number in range(4 - seed)}


def test_a_partition_whose_writer_was_killed_is_refused_until_it_is_written_again(s3):
    pairs = gt.Interactions.from_frame(frame(), "user", "item")
    write_partition(pairs, "s3://lake/parts", 2)
    upload("s3://lake/parts/_writing", b"")
    with pytest.raises(ValueError, match="folder"):
        read_part("s3://lake/parts")
    write_partition(pairs, "s3://lake/parts", 2)
    assert len(read_part("s3://lake/parts")) == len(pairs)


def test_a_model_is_saved_and_loaded(s3):
    model().save("s3://lake/run/model.gramtower")
    found = gt.load("s3://lake/run/model.gramtower")
    assert found.recommend(["u1"], 5)[0].tolist() == model().recommend(["u1"], 5)[0].tolist()
    assert [path.name for path in as_path("s3://lake/run").iterdir()] == ["model.gramtower"]


def test_a_run_continues_from_its_checkpoint(s3):
    def fit(iterations, **more):
        return gt.TwoTower(**SMALL, max_iterations=iterations).fit(frame(), left="user", right="item", **more)

    where = {"checkpoint": "s3://lake/run/checkpoint", "history": "s3://lake/run/history.jsonl"}
    fit(2, **where)
    fit(4, **where)
    continued, whole = fit(6, **where), fit(6)
    assert len(continued.history_) == 7
    assert continued.history_[-1].value == pytest.approx(whole.history_[-1].value, rel=1e-6)
    assert len(as_path("s3://lake/run/history.jsonl").read_text().splitlines()) == 7
    assert sorted(path.name for path in as_path("s3://lake/run").iterdir()) == [
        "checkpoint", "checkpoint.history", "history.jsonl"
    ]  # fmt: skip


def test_of_two_runs_with_one_checkpoint_the_later_one_goes_on(s3):
    path = as_path("s3://lake/run")
    with remote.holding(path):
        upload("s3://lake/run/checkpoint", b"mine")
        upload("s3://lake/run.lock", b"0: process 1 on another machine")  # as another process does
        with pytest.raises(OSError, match=r"s3://lake/run .*process 1 on another machine"):
            upload("s3://lake/run/checkpoint", b"mine again")
    assert as_path("s3://lake/run/checkpoint").read_bytes() == b"mine"
    assert as_path("s3://lake/run.lock").exists()  # which is the other's


@pytest.mark.parametrize("ending", ["parquet", "csv"])
def test_lists_are_written_in_parts_and_joined(s3, tmp_path, monkeypatch, ending):
    monkeypatch.setattr(list_files, "_ANSWERS", 80)
    for place in (tmp_path, "s3://lake"):
        model().recommend_all(f"{place}/lists.{ending}", k=5)
    assert as_path(f"s3://lake/lists.{ending}").read_bytes() == (tmp_path / f"lists.{ending}").read_bytes()
    assert [path.name for path in as_path("s3://lake").iterdir()] == [f"lists.{ending}"]


def test_lists_that_stopped_go_on_after_their_last_part(s3, monkeypatch):
    monkeypatch.setattr(list_files, "_ANSWERS", 80)
    write, written = list_files.ListFile.write, []

    def breaking(self, part, *more):
        if part == 2 and len(written) == 2:
            raise OSError("no space left")
        written.append(part)
        return write(self, part, *more)

    monkeypatch.setattr(list_files.ListFile, "write", breaking)
    with pytest.raises(OSError, match="no space"):
        model().recommend_all("s3://lake/lists.csv", k=5)
    assert not as_path("s3://lake/lists.csv").exists()
    written.append("again")
    model().recommend_all("s3://lake/lists.csv", k=5)
    assert written == [0, 1, "again", 2]
    assert as_path("s3://lake/lists.csv").read_text().count("\n") == 40 * 5 + 1


def test_commands_take_urls(s3, capsys):
    upload("s3://lake/pairs.csv", frame().write_csv().encode())
    small = ["--dim", "4", "--hidden", "none", "--device", "cpu", "--max-iterations", "2", "--select", "off"]
    columns = ["--left", "user", "--right", "item", "--quiet"]
    assert run(["partition", "s3://lake/pairs.csv", "--out", "s3://lake/parts", "--parts", "2", *columns]) == 0
    for source in ("pairs.csv", "parts"):
        assert run(["fit", f"s3://lake/{source}", *columns, *small, "--out", f"s3://lake/{source}-run"]) == 0
    assert (
        run(["recommend", "s3://lake/pairs.csv-run", "--all", "--out", "s3://lake/lists.csv", "-k", "3", "--quiet"])
        == 0
    )
    assert run(["info", "s3://lake/parts-run", "--quiet"]) == 0
    assert as_path("s3://lake/lists.csv").read_text().startswith("user,rank,item,score\n")
    names = sorted(path.name for path in as_path("s3://lake/pairs.csv-run").iterdir() if "checkpoint" not in path.name)
    assert names == ["config.toml", "history.jsonl", "model.gramtower", "summary.json"]
    capsys.readouterr()
    assert run(["recommend", "s3://lake/none", "--left", "u1", "--quiet"]) == 2
    assert "s3://lake/none" in capsys.readouterr().err


def test_a_server_and_its_index_follow_the_object(s3):
    served_models = pytest.importorskip("gramtower.serving.served_models", reason="the server needs its packages")
    pytest.importorskip("faiss", reason="an index needs faiss")
    from gramtower.serving.snapshot import Source

    path = as_path("s3://lake/model.gramtower")
    model().save(path)
    assert run(["index", str(path), "--quiet"]) == 0
    models = served_models.Models([Source("one", path)], served_models.Metrics())
    assert models.get().index_facts.kind == "faiss"
    assert models.reload(changed_only=True) == []
    model(seed=1).save(path)
    assert models.reload(changed_only=True) == ["one"]
    assert (models.get().model.left_.embeddings == model(seed=1).left_.embeddings).all()
    upload(str(path), b"half of a model")
    assert models.reload(changed_only=True) == []
    assert "s3://lake/model.gramtower" in models.refused["one"]


@pytest.mark.filterwarnings(*engines.QUIET)
@pytest.mark.parametrize("engine", ["spark", "ray"])
def test_engines_take_urls(s3, engine):
    settings = gt.TwoTower(dim=3, hidden=(4,), device="cpu", optimizer="gd", max_iterations=12, select=False)
    pairs = gt.Interactions.from_frame(frame(), "user", "item")
    write_partition(pairs, "s3://lake/parts", 2)
    launch = importlib.import_module(f"gramtower.launch.{engine}")
    with engines.spark_session() if engine == "spark" else engines.ray_cluster() as started:
        two = {"num_processes": 2}
        if engine == "ray":
            two = {"scaling_config": started.train.ScalingConfig(num_workers=2)}
        launched = launch.fit("s3://lake/parts", settings, out="s3://lake/runs/one", **two)
    assert str(launched.model) == "s3://lake/runs/one/model.gramtower"
    assert [record.iteration for record in launched.history] == list(range(13))
    values = [record.value for record in settings.fit(read_part("s3://lake/parts")).history_]
    assert [record.value for record in launched.history] == pytest.approx(values, rel=1e-5)
    assert len(gt.load(launched.model).left_.ids) == len(pairs.left_ids)
    assert as_path("s3://lake/runs/one/checkpoint/fit.safetensors").is_file()


class Proxy:
    """A TCP proxy in front of a server; ``cut(limit, times)`` breaks connections after some bytes of one direction."""

    def __init__(self, address):
        self._target = urlsplit(address)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self.connections, self.cut, self.passed = 0, None, lambda count: None
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        self._listening.close()

    def _accept(self):
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                self.connections += 1
                server = socket.create_connection((self._target.hostname, self._target.port))
                for one, other, kind in ((client, server, "up"), (server, client, "down")):
                    threading.Thread(target=self._pass, args=(one, other, kind), daemon=True).start()

    def _pass(self, source, target, kind):
        count = 0
        with suppress(OSError):
            while data := source.recv(1 << 14):
                count += len(data)
                if self.cut is not None and self.cut[0] == kind and count > self.cut[1] and self.cut[2] > 0:
                    self.cut = (*self.cut[:2], self.cut[2] - 1)
                    break
                if kind == "down":
                    self.passed(len(data))
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        source.close()


@pytest.fixture(scope="module")
def server_proxy(s3_server):
    with closing(Proxy(s3_server)) as made:
        yield made


@pytest.fixture
def proxy(s3, server_proxy, monkeypatch):
    server_proxy.cut, server_proxy.passed = None, lambda count: None
    monkeypatch.setenv("AWS_ENDPOINT_URL", server_proxy.address)
    return server_proxy


def test_a_download_that_breaks_once_goes_on(proxy):
    content = os.urandom(500_000)
    upload("s3://lake/x", content)
    proxy.cut = ("down", 200_000, 1)
    assert as_path("s3://lake/x").read_bytes() == content
    assert proxy.cut[2] == 0


def test_a_download_that_always_breaks_names_the_url_and_takes_nothing_for_damaged(proxy):
    fit = functools.partial(gt.TwoTower(**SMALL, max_iterations=1).fit, frame(), left="user", right="item")
    upload("s3://lake/pairs.csv", frame(20_000).write_csv().encode() * 60)
    fit(checkpoint="s3://lake/checkpoint").save("s3://lake/model")
    many = pl.DataFrame({"user": [f"u{u * 7919}" for u in range(5000)], "item": [f"i{u % 30}" for u in range(5000)]})
    write_partition(gt.Interactions.from_frame(many, "user", "item"), "s3://lake/parts", 1)
    proxy.cut = ("down", 2000, 1000)
    for name, read in (
        ("pairs.csv", lambda url: gt.Interactions.from_csv(url, "user", "item")),
        ("checkpoint", lambda url: fit(checkpoint=url)),
        ("model", gt.load),
        ("parts", read_part),
    ):
        with pytest.raises(ConnectionError, match=f"s3://lake/{name}"):
            read(f"s3://lake/{name}")
    proxy.cut = None
    assert len(fit(checkpoint="s3://lake/checkpoint").history_) == 2


@pytest.mark.parametrize("size", [1 << 24, 5 << 20], ids=["one request", "several parts"])
def test_an_upload_that_breaks_leaves_the_old_model(proxy, monkeypatch, size):
    monkeypatch.setattr(remote, "PART", size)
    model().save("s3://lake/model.gramtower")
    proxy.cut = ("up", 3 << 20, 1000)
    with pytest.raises(ConnectionError, match=r"s3://lake/model\.gramtower"):
        upload("s3://lake/model.gramtower", os.urandom(12 << 20))
    proxy.cut = None
    assert (
        gt.load("s3://lake/model.gramtower").recommend(["u1"], 3)[0].tolist()
        == model().recommend(["u1"], 3)[0].tolist()
    )


def test_an_upload_that_breaks_once_is_repeated(proxy):
    proxy.cut = ("up", 100_000, 1)
    upload("s3://lake/x", content := os.urandom(300_000))
    assert as_path("s3://lake/x").read_bytes() == content


def test_an_object_that_is_replaced_while_it_is_read_is_refused(proxy, monkeypatch, s3):
    monkeypatch.setattr(remote, "RANGE", 100_000)
    monkeypatch.setattr(remote, "THREADS", 1)
    content = os.urandom(1_000_000)
    upload("s3://lake/x", content)

    left, direct = [300_000], obstore.store.S3Store("lake", endpoint=s3, client_options={"allow_http": True})

    def replace(count):
        left[0] -= count
        if left[0] < 0:
            proxy.passed = lambda count: None
            obstore.put(direct, "x", content[::-1])

    assert as_path("s3://lake/x").read_bytes() == content  # in ranges
    proxy.passed = replace
    with pytest.raises(OSError, match=r"s3://lake/x .*again"):
        as_path("s3://lake/x").read_bytes()
    assert as_path("s3://lake/x").read_bytes() == content[::-1]


def test_parts_that_are_replaced_between_list_and_reading_are_refused(s3):
    upload("s3://lake/parts/a", b"old")
    listed = next(as_path("s3://lake/parts").iterdir())
    upload("s3://lake/parts/a", b"new")
    with pytest.raises(OSError, match=r"s3://lake/parts/a .*again"):
        listed.read_bytes()


def test_a_missing_key_and_a_missing_bucket_are_named(s3):
    for url in ("s3://lake/none.csv", "s3://other-lake/none.csv"):
        with pytest.raises(FileNotFoundError, match=url):
            gt.Interactions.from_csv(url, "user", "item")
        with pytest.raises(FileNotFoundError, match=url):
            gt.load(url)
        with pytest.raises(FileNotFoundError, match=url):
            read_part(url)
    with pytest.raises(FileNotFoundError, match="s3://other-lake/model"):
        model().save("s3://other-lake/model")


def of_cloud(monkeypatch, prefix, values):
    """Set the variables of a cloud, and no others of it."""
    for name in [name for name in os.environ if name.startswith(prefix)]:
        monkeypatch.delenv(name)
    for name, value in values.items():
        monkeypatch.setenv(prefix + name, value)


@pytest.fixture
def gs(s3, monkeypatch):
    """The bucket of the server, which Google's client can use: the requests of S3 and Google's XML API are alike."""
    key = {"gcs_base_url": s3, "disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
    token = "test/20260101/us-east-1/s3/aws4_request"  # from which the server takes the service
    of_cloud(monkeypatch, "GOOGLE_", {"SERVICE_ACCOUNT_KEY": json.dumps(key), "BEARER_TOKEN": token})
    return "gs://lake"


ACCOUNT = "devstoreaccount1"  # of Azurite, with the key that all installations have
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@pytest.fixture(scope="module")
def azurite():
    """The address of Azurite, Microsoft's server with the interface of Azure's blobs, with a container az://lake."""
    program = shutil.which("azurite-blob")
    if program is None:
        pytest.skip("needs azurite-blob, which is not installed: npm install -g azurite")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    quiet = ["--silent", "--inMemoryPersistence", "--disableTelemetry", "--skipApiVersionCheck"]
    process = subprocess.Popen([program, *quiet, "--blobHost", "127.0.0.1", "--blobPort", str(port)], stdout=-3)
    try:
        for _ in range(600):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.1)
        address = f"http://127.0.0.1:{port}/{ACCOUNT}"
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
        lines = [f"{name}:{value}" for name, value in headers.items()] + [f"/{ACCOUNT}/{ACCOUNT}/lake"]
        text = "PUT" + "\n" * 12 + "\n".join([*lines, "restype:container"])
        mark = base64.b64encode(hmac.digest(base64.b64decode(KEY), text.encode(), "sha256")).decode()
        headers["Authorization"] = f"SharedKey {ACCOUNT}:{mark}"
        urlopen(Request(f"{address}/lake?restype=container", headers=headers, method="PUT")).close()
        yield address
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def az(azurite, quick, monkeypatch):
    values = {"STORAGE_ENDPOINT": azurite, "STORAGE_ACCOUNT_NAME": ACCOUNT, "STORAGE_ACCOUNT_KEY": KEY}
    of_cloud(monkeypatch, "AZURE_", values)
    return "az://lake"


@pytest.fixture(params=["gs", "az"])
def cloud(request):
    return request.getfixturevalue(request.param)


def test_partitions_runs_and_models_are_written_to_each_cloud_and_replaced(cloud):
    pairs = gt.Interactions.from_frame(frame(), "user", "item")
    for parts in (4, 2):
        write_partition(pairs, f"{cloud}/data/parts", parts)
        assert len(list(as_path(f"{cloud}/data/parts").iterdir())) == parts
        assert len(read_part(f"{cloud}/data/parts")) == len(pairs)
    assert [str(path) for path in as_path(f"{cloud}/data").iterdir()] == [f"{cloud}/data/parts"]
    for iterations in (2, 4):
        settings = gt.TwoTower(**SMALL, max_iterations=iterations)
        fitted = settings.fit(pairs, checkpoint=f"{cloud}/run/checkpoint", history=f"{cloud}/run/history.jsonl")
    whole = gt.TwoTower(**SMALL, max_iterations=4).fit(pairs)
    assert fitted.history_[-1].value == pytest.approx(whole.history_[-1].value, rel=1e-6)
    for seed in (0, 1):
        model(seed=seed).save(f"{cloud}/run/model")
        assert (gt.load(f"{cloud}/run/model").left_.embeddings == model(seed=seed).left_.embeddings).all()
    assert sorted(path.name for path in as_path(f"{cloud}/run").iterdir()) == [
        "checkpoint", "checkpoint.history", "history.jsonl", "model"
    ]  # fmt: skip


def test_large_objects_of_each_cloud_are_of_one_version(cloud, monkeypatch):
    monkeypatch.setattr(remote, "PART", 5 << 20)
    monkeypatch.setattr(remote, "RANGE", 1 << 20)
    upload(f"{cloud}/large/x", content := os.urandom(11 << 20))  # in several parts
    listed = next(as_path(f"{cloud}/large").iterdir())
    assert as_path(f"{cloud}/large/x").read_bytes() == content
    upload(f"{cloud}/large/x", content[::-1])
    with pytest.raises(OSError, match=f"{cloud}/large/x was replaced"):
        listed.read_bytes()


def test_errors_of_each_cloud_name_the_url(cloud):
    for url in (f"{cloud}/none", f"{cloud}-of-nobody/none"):
        for read in (gt.load, read_part, lambda url: gt.Interactions.from_csv(url, "user", "item")):
            with pytest.raises(FileNotFoundError, match=url):
                read(url)
    with pytest.raises(FileNotFoundError, match=f"{cloud}-of-nobody/model"):
        model().save(f"{cloud}-of-nobody/model")
    with pytest.raises(ValueError, match="after the bucket"):
        model().save(cloud)


def test_azure_denies_access_with_another_key(az, monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")
    for act in (gt.load, model().save, lambda url: as_path(url).exists()):
        with pytest.raises(PermissionError, match=r"az://lake/model.*403.*credentials"):
            act("az://lake/model")


@contextmanager
def denied(s3):
    """Let the server check access keys, of which it knows none."""
    plain = {"Content-Type": "text/plain"}
    urlopen(Request(f"{s3}/moto-api/reset-auth", b"0", plain, method="POST")).close()
    try:
        yield
    finally:
        urlopen(Request(f"{s3}/moto-api/reset-auth", b"inf", plain, method="POST")).close()


def test_denied_access_is_an_error_of_its_own(s3, capsys):
    with denied(s3):
        for act in (
            lambda: gt.Interactions.from_csv("s3://lake/x.csv", "user", "item"),
            lambda: model().save("s3://lake/model"),
            lambda: as_path("s3://lake/model").exists(),
            lambda: list(as_path("s3://lake").iterdir()),
        ):
            with pytest.raises(PermissionError, match=r"s3://lake.*403.*credentials"):
                act()
        assert run(["fit", "s3://lake/x.csv", "--left", "user", "--right", "item", "--out", "s3://lake/run"]) == 2
    assert "s3://lake/" in capsys.readouterr().err


def test_credentials_and_the_address_come_from_a_profile(s3, tmp_path, monkeypatch):
    lines = ["[profile lake]", "aws_access_key_id = a", "aws_secret_access_key = b", f"endpoint_url = {s3}"]
    (tmp_path / "config").write_text("\n".join(lines))
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "lake")
    upload("s3://lake/x", b"content")
    assert as_path("s3://lake/x").read_bytes() == b"content"
    monkeypatch.setenv("AWS_PROFILE", "unknown")
    with pytest.raises(ValueError, match="unknown"):
        as_path("s3://lake/x").read_bytes()


@pytest.fixture
def web(tmp_path):
    """The address of a web server, and the folder that it shows."""
    handler = functools.partial(QuietHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", tmp_path
        server.shutdown()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def list_directory(self, path):
        self.send_error(404)

    def send_head(self):
        if Path(self.translate_path(self.path)).is_dir():
            return self.list_directory(self.path)
        return super().send_head()


def test_web_addresses_are_read_and_never_written(web):
    address, folder = web
    frame().write_csv(folder / "my pairs.csv")
    model().save(folder / "model.gramtower")
    same(
        gt.Interactions.from_csv(f"{address}/my%20pairs.csv", "user", "item"),
        gt.Interactions.from_csv(folder / "my pairs.csv", "user", "item"),
    )
    assert gt.load(f"{address}/model.gramtower").recommend(["u1"], 3)[0].shape == (1, 3)
    with pytest.raises(FileNotFoundError, match=f"{address}/none.csv"):
        gt.Interactions.from_csv(f"{address}/none.csv", "user", "item")
    with closing(Proxy(address)) as proxy:
        (folder / "large").write_bytes(content := os.urandom(500_000))
        proxy.cut = ("down", 200_000, 1)
        assert as_path(f"{proxy.address}/large").read_bytes() == content
        proxy.cut = ("down", 200_000, 1000)
        with pytest.raises(ConnectionError, match=f"{proxy.address}/large"):
            as_path(f"{proxy.address}/large").read_bytes()
    with pytest.raises(ValueError, match=r"path.*http"):
        model().save(f"{address}/model.gramtower")
    with pytest.raises(ValueError, match="without"):
        gt.load(f"{address}/model.gramtower?signature=1")


def test_files_of_the_hugging_face_hub_are_read(web, monkeypatch):
    address, folder = web
    monkeypatch.setenv("HF_ENDPOINT", address)
    place, listing = (
        folder / "datasets/owner/name/resolve/main/parts",
        folder / "api/datasets/owner/name/tree/main/parts",
    )
    place.mkdir(parents=True)
    listing.parent.mkdir(parents=True)
    found = []
    for number in range(2):
        frame(seed=number).write_parquet(place / f"{number}.parquet")
        found.append({"type": "file", "path": f"parts/{number}.parquet"})
    listing.write_text(json.dumps(found))
    whole = gt.Interactions.from_parquet(place, "user", "item")
    same(gt.Interactions.from_parquet("hf://datasets/owner/name/parts", "user", "item"), whole)
    one = gt.Interactions.from_parquet("hf://datasets/owner/name@main/parts/0.parquet", "user", "item")
    same(one, gt.Interactions.from_parquet(place / "0.parquet", "user", "item"))
    with pytest.raises(ValueError, match=r"path.*hf://"):
        model().save("hf://datasets/owner/name/model")
