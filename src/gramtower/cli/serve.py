"""``gramtower serve``: models over HTTP (docs/serving.md); ``gramtower index``: an approximate index for them."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from gramtower._util import checks as check
from gramtower._util.checks import missing
from gramtower._util.files import as_path
from gramtower.cli.options import Common, Settings, Switch, Texts
from gramtower.cli.output import print_json, silent
from gramtower.cli.program import was_terminated
from gramtower.cli.reading import id_column, model_file, open_model, read_frame, read_like, settings_of
from gramtower.data.interactions import Interactions
from gramtower.model.two_tower import load
from gramtower.serving.ann_index import build_index, index_path, write_index
from gramtower.serving.messages import LOG_FORMATS, Limits, log
from gramtower.serving.snapshot import Source, TableSource

TOKEN, MOST_WORKERS = "GRAMTOWER_TOKEN", 256


def serve(
    run: Path,
    /,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    index: str = "auto",
    model: Texts = None,
    left_table: Path | None = None,
    right_table: Path | None = None,
    left_id: str | None = None,
    right_id: str | None = None,
    left_title: str | None = None,
    right_title: str | None = None,
    test: Path | None = None,
    token_file: Path | None = None,
    allow_host: Texts = None,
    allow_origin: Texts = None,
    watch: Switch = False,
    mapped: Switch = False,
    workers: int = 1,
    batch_wait: float = 2.0,
    max_k: int = Limits.k,
    max_ids: int = Limits.ids,
    max_body: str = "2MB",
    access_log: Switch = False,
    log_format: str = "text",
    common: Common = Common(),
) -> int:
    """Serve models over HTTP, with a page to look around in; SIGHUP reads their files again.

    The interface is described at /docs. Requests must have a bearer token if one is given by --token-file or by the
    environment variable GRAMTOWER_TOKEN.

    Args:
        run: Folder of a run, or a model file. It is called "default" and answers requests that name no model.
        host: Address to listen on; 0.0.0.0 for all addresses of this machine.
        port: Port to listen on; 0 for a free one.
        index: auto (the index next to the model, if it belongs to it), exact, faiss, faiss-hnsw or hnsw.
        model: A further model, NAME=RUN; may be repeated.
        left_table: Table of left entities, joined by id, with titles and columns.
        right_table: Table of right entities; requests can filter by its columns.
        left_id: Id column of --left-table [default: the name of the column in the run, or id].
        right_id: Id column of --right-table [default: the name of the column in the run, or id].
        left_title: Title column of --left-table [default: title, name or label].
        right_title: Title column of --right-table [default: title, name or label].
        test: Held-out pairs, in a file like that of the run; the page shows metrics on them, also by popularity.
        token_file: File whose first line is the token.
        allow_host: A further host name to answer to on a loopback address; may be repeated.
        allow_origin: Origin of pages that may read answers (CORS); may be repeated.
        watch: Check the files every second, and reload those that changed.
        mapped: Map the model file instead of copying it, so that processes share it; never overwrite it in place.
        workers: Number of processes, which share the cores and the mapped model files; 2 or more imply --mapped.
        batch_wait: Longest time in milliseconds that a request waits to be batched with others.
        max_k: Longest list.
        max_ids: Most entities in one request.
        max_body: Longest body of a request.
        access_log: Log each request on standard error: time, client, method, path, status, duration.
        log_format: Format of all lines on standard error: text, or json for one object per line.
    """
    check.choice("--log-format", log_format, LOG_FORMATS)
    say = silent if common.quiet else partial(log, log_format)
    given = ("left", left_table, left_id, left_title), ("right", right_table, right_id, right_title)
    tables = {side: _table(side, path, id, title, run) for side, path, id, title in given if path is not None}
    held_out = None if test is None else partial(_test_pairs, run, test)
    files = tuple(path for path in (left_table, right_table, test) if path is not None)
    runs = [("default", run)]
    for text in model or []:
        name, _, path = text.partition("=")
        if not name or not path:
            check.fail("--model", repr(text), "NAME=RUN")
        runs.append((name, as_path(path)))
    sources = [Source(name, model_file(one), index, mapped, tables, held_out, files) for name, one in runs]
    k, ids = check.count("--max-k", max_k), check.count("--max-ids", max_ids)
    limits = Limits(k=k, ids=ids, body=check.memory_size("--max-body", max_body))
    wait = check.number("--batch-wait", batch_wait, minimum=0.0) / 1000
    if wait > 1:
        check.fail("--batch-wait", batch_wait, "at most 1000 milliseconds")
    try:
        from gramtower.serving.server import Options
        from gramtower.serving.server import serve as run_server
    except ImportError as error:
        raise missing("serve", "starlette", error) from error
    workers = check.count("--workers", workers, most=MOST_WORKERS)
    if "*" in (allow_origin or ()):
        check.fail("--allow-origin", "'*'", "the origins of your own pages, such as https://example.org")
    options = Options(
        host, port, _token(token_file), allow_host or (), allow_origin or (), 1.0 if watch else None, wait, limits,
        workers, access_log, log_format,
    )  # fmt: skip
    try:
        run_server(sources, options, say, _announce if common.json else silent)
    except KeyboardInterrupt:
        if not was_terminated():
            raise
    return 0  # SIGTERM is the usual way to end a server


def _announce(address: str) -> None:
    print_json({"address": address})
    sys.stdout.flush()


def _token(file: Path | None) -> str | None:
    text = os.environ.get(TOKEN)
    if file is not None:
        try:
            text = (file.read_text(encoding="utf-8").splitlines() or [""])[0]
        except UnicodeError:
            check.fail("--token-file", file, "text in UTF-8")
    if text is None:
        return None
    if not text.strip() or not text.isascii() or not text.isprintable():
        check.fail("token", "an empty token, or one with other characters", "printable ASCII characters")
    return text.strip()


def _test_pairs(run: Path, test: Path) -> Interactions:
    return read_like(_settings(run), test, "--test")


def _settings(run: Path) -> Settings:
    """The settings of a run; of a model file without a folder of a run those that the model says."""
    settings = settings_of(run)
    return open_model(run)[1] if settings.data.path is None else settings


def _table(side: str, path: Path, id: str | None, title: str | None, run: Path) -> TableSource:
    name, pairs_column = f"--{side}-table", getattr(_settings(run).data, side)
    column = id_column(side, read_frame(name, path), id, pairs_column)
    return TableSource(name, partial(read_frame, name, path), column, title)


def index(
    run: Path,
    /,
    *,
    kind: str = "faiss",
    recall: float = 0.95,
    k: Annotated[int, Parameter(name=["--k", "-k"])] = 20,
    seed: int = 0,
    common: Common = Common(),
) -> int:
    """Build an approximate index over the right entities, for models too large for exact lists.

    The number of visited clusters or candidates is doubled until recall@k against exact lists, measured on up to 500
    left entities, reaches --recall; the measured recall is printed and stored. The index works with this model only.

    Args:
        run: Folder of a run, or a model file; the index is written next to it.
        kind: faiss (inverted lists), faiss-hnsw or hnsw (graphs, by faiss and by hnswlib).
        recall: Recall to reach.
        k: Length of the lists that recall is measured on.
        seed: Seed for the clusters, the graph and the sample of left entities.
    """
    path = model_file(run)
    model = load(path)
    common.note(f"building an index of {len(model.right_.embeddings):,} entities")
    P, Q = model.left_.embeddings, model.right_.embeddings
    made, facts = build_index(P, Q, model.right_.ids, kind, k, recall, seed)
    target = index_path(path)
    write_index(target, made, facts)
    found = {"index": str(target), **{n: v for n, v in vars(facts).items() if n not in ("model", "built")}}
    named = {f"recall@{facts.k}" if name == "recall" else name: value for name, value in found.items()}
    return common.answer(found, named)
