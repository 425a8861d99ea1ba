"""``gramtower serve``: models over HTTP. See docs/serving.md."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

from gramtower._util import checks as check
from gramtower._util.checks import missing
from gramtower.cli.options import Common, Settings, Switch, Texts, read_config
from gramtower.cli.output import print_json
from gramtower.cli.program import was_terminated
from gramtower.cli.query import options_of_test
from gramtower.cli.reading import id_column, read_frame, read_pairs
from gramtower.cli.run_folder import CONFIG, model_file
from gramtower.data.interactions import Interactions
from gramtower.serving import logs
from gramtower.serving.refusals import Limits
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
    common: Common | None = None,
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
        common: Output.
    """
    common = common or Common()
    check.choice("--log-format", log_format, logs.FORMATS)
    say = (lambda line: None) if common.quiet else partial(logs.write, log_format)
    given = ("left", left_table, left_id, left_title), ("right", right_table, right_id, right_title)
    tables = {side: _table(side, path, id, title, run) for side, path, id, title in given if path is not None}
    held_out = None if test is None else partial(_test_pairs, run, test)
    files = tuple(path for path in (left_table, right_table, test) if path is not None)
    sources = [Source("default", model_file(run), index, mapped, tables, held_out, files)]
    for text in model or []:
        name, equals, path = text.partition("=")
        if not name or not equals or not path:
            check.fail("--model", repr(text), "NAME=RUN")
        sources.append(Source(name, model_file(Path(path)), index, mapped, tables, held_out, files))
    most = check.count("--max-k", max_k), check.count("--max-ids", max_ids)
    limits = Limits(k=most[0], ids=most[1], body=check.memory_size("--max-body", max_body))
    wait = check.number("--batch-wait", batch_wait, minimum=0.0) / 1000
    if wait > 1:
        check.fail("--batch-wait", batch_wait, "at most 1000 milliseconds")
    try:
        from gramtower.serving.server import Options
        from gramtower.serving.server import serve as run_server
    except ImportError as error:
        raise missing("serve", "fastapi", error) from error
    workers = check.count("--workers", workers, most=MOST_WORKERS)
    options = Options(
        host, port, _token(token_file), allow_host or (), allow_origin or (), 1.0 if watch else None, wait, limits,
        workers, access_log, log_format,
    )  # fmt: skip
    try:
        run_server(sources, options, say, _announce if common.json else lambda address: None)
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


def _settings(run: Path) -> Settings:
    config = (run if run.is_dir() else run.parent) / CONFIG
    return read_config(config) if config.exists() else Settings()


def _test_pairs(run: Path, test: Path) -> Interactions:
    return read_pairs(test, options_of_test(_settings(run), test, None), name="--test")


def _table(side: str, path: Path, id: str | None, title: str | None, run: Path) -> TableSource:
    pairs_column = getattr(_settings(run).data, side)
    name = f"--{side}-table"
    frame = read_frame(name, path)
    return TableSource(name, partial(read_frame, name, path), id_column(side, frame, id, pairs_column), title)
