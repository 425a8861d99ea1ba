"""Objects of S3, Google Cloud Storage, Azure, the Hugging Face hub and web servers as paths.

A :class:`RemotePath` is a ``Path`` whose text is a URL, so that functions which take paths take URLs as well. Its
content is read from a copy in the folder for temporary files, which is fetched when the path is opened or given to a
function that opens files, and is removed together with the path. A copy is of one version: large objects are fetched in
ranges, all with the ETag of the first answer, and an object that is replaced meanwhile is an error. Content is written
to a temporary file and uploaded by one PUT or multipart upload when it is complete, which replaces an object in one
step: readers see the old object or the new one. Requests that fail are repeated; a broken download continues where it
broke. Cost: one request to look at an object, and its bytes for each path object that is opened.

obstore moves the bytes. boto3 only finds the credentials, the region and the address for ``s3://``, as for all programs
that use AWS: environment, profile, role of the machine.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import secrets
import stat
import tempfile
import weakref
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import lru_cache
from importlib import import_module
from pathlib import Path, PosixPath
from types import ModuleType
from typing import IO, Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, unquote
from urllib.request import Request, urlopen

READ_ONLY = ("hf", "http", "https")
RANGE = PART = 1 << 24  # bytes of a request for a download and for an upload
THREADS = 8  # requests at a time
_PAUSE = {"init_backoff": timedelta(seconds=0.5), "max_backoff": timedelta(seconds=15), "base": 2}
RETRY: dict[str, Any] = {"max_retries": 8, "retry_timeout": timedelta(minutes=3), "backoff": _PAUSE}
_PARTS = 9000  # of a multipart upload; S3 allows 10,000
_CLIENT = {"connect_timeout": "10s", "timeout": "30m", "read_timeout": "60s"}
_ENVIRONMENT = ("AWS_", "GOOGLE_", "AZURE_", "HF_")
_held: dict[str, str] = {}  # URLs that this process holds, and the marks in their locks
Meta = dict[str, Any]  # size, last_modified and e_tag of an object


class RemotePath(PosixPath):
    """The URL of an object or of a folder of objects."""

    _meta: Meta | None = None  # of the version to read; None for the current one
    _copied: Path | None = None

    def __str__(self) -> str:
        scheme, slash, rest = super().__str__().partition(":/")
        return f"{scheme}://{rest}" if slash else scheme

    def __fspath__(self) -> str:
        return str(self.copied())

    @property
    def scheme(self) -> str:
        """The part of the URL before the colon."""
        return self.parts[0][:-1]

    @property
    def place(self) -> tuple[object, str]:
        """The store of the object, and its key there."""
        scheme, parts = self.scheme, self.parts[1:]
        first = 1 if scheme != "hf" else 3 if parts[:1] in (("datasets",), ("spaces",)) else 2  # name a store
        if len(parts) < first or (scheme.startswith("http") and "?" in str(self)):
            expected = "SCHEME://BUCKET/KEY, hf://datasets/OWNER/NAME/FILE, or a web address without ?"
            raise ValueError(f"path: got {self}, expected {expected}")
        settings = tuple(sorted(item for item in os.environ.items() if item[0].startswith(_ENVIRONMENT)))
        with _naming(self):
            store = _store(scheme, "/".join(parts[:first]), settings)
        key = "/".join(parts[first:])
        return store, unquote(key) if scheme in ("http", "https") else key

    def pinned(self) -> RemotePath:
        """The same path with the metadata of its present version, which is then the only one that is read."""
        return self._with(self._find())

    def _with(self, meta: Meta | None) -> RemotePath:
        made = RemotePath(str(self))
        made._meta = meta
        return made

    def copied(self) -> Path:
        """Fetch the object, unless this instance has a copy already; the copy goes with the instance."""
        if self._copied is None:
            meta = self._find()
            if meta.get("folder"):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(self))
            file, name = tempfile.mkstemp(prefix="gramtower-")
            drop = weakref.finalize(self, Path(name).unlink, missing_ok=True)
            try:
                self._fetch(file, meta)
                os.fchmod(file, stat.S_IRUSR)  # a change of the copy would be lost
            except BaseException:
                drop()
                raise
            finally:
                os.close(file)
            self._copied = Path(name)
        return self._copied

    def _fetch(self, file: int, meta: Meta) -> None:
        (store, key), size, tag = self.place, meta["size"], meta["e_tag"]
        obstore = _obstore()

        def fetch(start: int) -> None:
            options: dict[str, Any] = {} if tag is None else {"if_match": tag}
            if not whole:
                options["range"] = (start, min(start + RANGE, size))
            with _naming(self):
                answer = obstore.get(store, key, options=options)
                if any(answer.meta[name] != meta[name] for name in ("size", "last_modified", "e_tag")):
                    raise _replaced(self)
                for piece in answer.stream(min_chunk_size=1 << 20):
                    view = memoryview(piece)
                    while len(view):
                        done = os.pwrite(file, view, start)
                        start, view = start + done, view[done:]

        whole = tag is None or size <= RANGE or self.scheme in READ_ONLY
        if whole:
            for left in range(RETRY["max_retries"] if tag is None else 0, -1, -1):  # cannot continue without an ETag
                try:
                    fetch(0)
                    break
                except ConnectionError:
                    if not left:
                        raise
        else:
            pool = ThreadPoolExecutor(THREADS)
            try:
                list(pool.map(fetch, range(0, size, RANGE)))
            finally:
                pool.shutdown(cancel_futures=True)
        if os.fstat(file).st_size != size:
            raise OSError(f"{self} ended after {os.fstat(file).st_size:,} of {size:,} bytes; try again")

    @contextmanager
    def fetched(self, footer: bool = False) -> Iterator[Path | io.RawIOBase]:
        """Yield a copy that goes at the end of the block; with ``footer`` a reader that fetches only what is read."""
        if not footer or self.scheme in READ_ONLY:
            once = self._with(self._meta)
            yield once.copied()
            return
        with _Ranges(self, self._find()) as file:
            yield file

    def open(self, mode: str = "r", *more: Any, **options: Any) -> IO[Any]:  # type: ignore[override]
        if set(mode) & set("wax+"):
            raise OSError(f"{self} cannot be opened with mode {mode!r}: objects are written as a whole")
        return open(self.copied(), mode, *more, **options)

    def _find(self) -> Meta:
        """The metadata of the object, or ``{"folder": True}`` if there are objects below this path."""
        if self._meta is not None:
            return self._meta
        store, key = self.place
        with _naming(self):
            with suppress(FileNotFoundError):
                if key:
                    return dict(_obstore().head(store, key))
            if next(self.below(), None) is None:
                raise FileNotFoundError
        return {"folder": True}

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        meta = self._find()
        if meta.get("folder"):
            return os.stat_result((stat.S_IFDIR | 0o755, *(0,) * 9))
        seconds = meta["last_modified"].timestamp()
        mark = zlib.crc32(str(meta["e_tag"]).encode())
        fields = (stat.S_IFREG | 0o644, mark, 0, 1, 0, 0, meta["size"], *(int(seconds),) * 3)
        return os.stat_result(fields, {"st_mtime": seconds, "st_mtime_ns": int(seconds * 1e9)})

    def _kind(self) -> str:
        try:
            return "folder" if self._find().get("folder") else "file"
        except FileNotFoundError:
            return ""

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        return bool(self._kind())

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self._kind() == "folder"

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return self._kind() == "file"

    def below(self) -> Iterator[RemotePath]:
        """Yield the objects of a folder, at any depth, with their metadata; nothing for a web address."""
        store, key = self.place
        if self.scheme == "hf":
            with _naming(self):
                yield from (self._child(name, None) for name in _hub_files(self.parts[1:], key))
        elif self.scheme not in READ_ONLY:
            start = len(key) + 1 if key else 0
            with _naming(self):
                for batch in _obstore().list(store, key or None):
                    yield from (self._child(meta["path"][start:], dict(meta)) for meta in batch if meta["path"] != key)

    def iterdir(self) -> Iterator[RemotePath]:  # type: ignore[override]
        store, key = self.place
        if self.scheme in READ_ONLY:
            yield from self.glob("*")  # without folders
            return
        with _naming(self):
            found = _obstore().list_with_delimiter(store, key or None)
        for meta in (*found["objects"], *({"path": name, "folder": True} for name in found["common_prefixes"])):
            if meta["path"] != key:
                yield self._child(meta["path"].rpartition("/")[2], dict(meta))

    def glob(self, pattern: str) -> Iterator[RemotePath]:  # type: ignore[override]
        depth = len(self.parts) + pattern.count("/") + 1
        return (path for path in self.below() if len(path.parts) == depth and path.match(pattern))

    def _child(self, name: str, meta: Meta | None) -> RemotePath:
        if meta and (tag := meta.get("e_tag")) and not tag.endswith('"'):  # lists of Azure leave out the quotes
            meta["e_tag"] = f'"{tag}"'
        return (self / name)._with(meta)

    def unlink(self, missing_ok: bool = False) -> None:
        store, key = self.place
        with suppress(FileNotFoundError) if missing_ok else nullcontext(), _naming(self):
            _obstore().delete(store, key)

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        """Do nothing: a folder is there as soon as it has objects."""

    def absolute(self) -> RemotePath:
        return self

    def resolve(self, strict: bool = False) -> RemotePath:
        return self


class _Ranges(io.RawIOBase):
    """A file whose reads are requests; all are of the version with the given metadata."""

    def __init__(self, path: RemotePath, meta: Meta) -> None:
        self._path, self._meta, self._place = path, meta, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._place = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._meta["size"]}[whence]
        return self._place

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        stop = min(self._place + len(buffer), self._meta["size"])
        count = int(max(0, stop - self._place))
        if count:
            (store, key), tag = self._path.place, self._meta["e_tag"]
            with _naming(self._path):
                answer = _obstore().get(store, key, options={"range": (self._place, stop), "if_match": tag})
                buffer[:count] = memoryview(answer.bytes())
        self._place += count
        return count


@contextmanager
def uploading(path: RemotePath) -> Iterator[Path]:
    """Yield a temporary path, whose file replaces an object in one step when the block succeeds."""
    check_writable(path)
    store, key = path.place
    with tempfile.TemporaryDirectory(prefix="gramtower-") as folder:
        partial = Path(folder) / "content"
        partial.touch()
        yield partial
        for held, mark in _held.items():
            if f"{path}/".startswith(f"{held}/"):
                lock = RemotePath(f"{held}.lock")
                found = lock.read_text() if lock.exists() else "which has ended"
                if found != mark:
                    why = f"was taken over by another run ({found.rpartition(': ')[2]})"
                    raise OSError(f"{held} {why}; this run writes nothing more there")
        size = max(PART, -(-partial.stat().st_size // _PARTS))
        with _naming(path):
            _obstore().put(store, key, partial, chunk_size=size, max_concurrency=THREADS)


def check_writable(path: RemotePath, name: str = "path") -> None:
    """Refuse a URL that can only be read, or that has no key; the error names the argument ``name``."""
    if path.scheme in READ_ONLY:
        raise ValueError(f"{name}: got {path}, which can only be read, expected a local path, s3://, gs:// or az://")
    if not path.place[1]:
        raise ValueError(f"{name}: got {path}, expected a name after the bucket")


@contextmanager
def holding(path: RemotePath) -> Iterator[None]:
    """Mark a path as written by this process, which also shows that it can be written.

    Stores have no locks that end with a process. Instead the last process that marked a path holds it: another one
    that held it before is refused at its next write.
    """
    lock, mark = f"{path}.lock", f"{secrets.token_hex(8)}: process {os.getpid()} on {os.uname().nodename}"
    with uploading(RemotePath(lock)) as partial:
        partial.write_text(mark)
    _held[str(path)] = mark
    try:
        yield
    finally:
        _held.pop(str(path), None)
        with suppress(OSError):  # the run has ended, well or not
            if RemotePath(lock).read_text() == mark:
                RemotePath(lock).unlink()


@contextmanager
def _naming(path: RemotePath) -> Iterator[None]:
    """Turn errors of the store into an ``OSError`` that names the URL."""
    errors = _obstore().exceptions
    denied = errors.PermissionDeniedError, errors.UnauthenticatedError
    try:
        yield
    except errors.PreconditionError as error:
        raise _replaced(path) from error
    except (errors.BaseError, FileNotFoundError, URLError) as error:
        why = _reason(error)
        if isinstance(error, HTTPError):
            error.close()  # it holds the connection
        if isinstance(error, FileNotFoundError) or why.startswith("404"):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from error
        if isinstance(error, denied) or why.startswith(("401", "403")):
            rights = "check the credentials and their rights to read, list and write"
            raise PermissionError(f"{path}: access denied ({why}); {rights}") from error
        raise ConnectionError(f"{path}: the store did not answer as expected ({why})") from error


def _replaced(path: RemotePath) -> ConnectionError:
    return ConnectionError(f"{path} was replaced while it was read; read it again")


def _reason(error: BaseException) -> str:
    """The status and the code of a refusal, or the first line of another error."""
    text = str(error)
    status = re.search(r"(?:status code:|HTTP Error) (\d+[A-Za-z ]*)", text)
    code = re.search(r"<Code>(.*?)</Code>", text)
    shown = text.partition("\n")[0] if status is None else status[1] + (f", {code[1]}" if code else "")
    return shown if len(shown) <= 300 else shown[:300] + " …"


def _need(module: str) -> ModuleType:
    try:
        return import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        why = f'needs {package}, which is not installed: pip install "gramtower[cloud]"'
        raise ImportError(f"reading and writing URLs {why}", name=package) from error


def _obstore() -> ModuleType:
    return _need("obstore")


@lru_cache(maxsize=64)
def _store(scheme: str, root: str, settings: tuple[tuple[str, str], ...]) -> object:
    """The store of a URL, with the credentials that the environment has at that time."""
    stores, given = _need("obstore.store"), dict(settings)
    more: dict[str, Any] = {"client_options": {**_CLIENT, "allow_http": True}, "retry_config": RETRY}
    if scheme in ("gs", "az"):
        return (stores.GCSStore if scheme == "gs" else stores.AzureStore)(root, **more)
    if scheme == "s3":
        return stores.S3Store(root, **_aws(more, given))
    address = _hub(root.split("/"), "") if scheme == "hf" else f"{scheme}://{root}"
    if scheme == "hf" and (token := given.get("HF_TOKEN")):
        more["client_options"]["default_headers"] = {"authorization": f"Bearer {token}"}
    more["client_options"]["allow_http"] = not address.startswith("https:")  # not even after a redirection
    return stores.HTTPStore(address, **more)


def _aws(more: dict[str, Any], given: dict[str, str]) -> dict[str, Any]:
    boto3, errors = _need("boto3"), _need("botocore.exceptions")
    try:
        session = boto3.Session()
        region = given.get("AWS_REGION") or session.region_name or "us-east-1"
        address = session.client("s3", region_name=region).meta.endpoint_url
        credentials = session.get_credentials()
    except errors.BotoCoreError as error:
        raise ValueError(f"path: s3:// cannot be used with these AWS settings: {error}") from error
    if credentials is None:
        more["skip_signature"] = True  # as public buckets allow
    else:
        more["credential_provider"] = _need("obstore.auth.boto3").Boto3CredentialProvider(session)
    if not address.endswith((".amazonaws.com", ".amazonaws.com.cn")):
        more["endpoint"] = address
    return more | {"region": region}


def _hub(parts: Sequence[str], listing: str) -> str:
    """The address of files of a repository of the Hugging Face hub, or of the list of them."""
    kind = [parts[0]] if parts[0] in ("datasets", "spaces") else []
    owner, (name, _, revision) = parts[len(kind)], parts[len(kind) + 1].partition("@")
    place = "/".join([*(kind or ["models"] * bool(listing)), owner, name])
    middle = ("/api/", "/tree/") if listing else ("/", "/resolve/")
    return f"{os.environ.get('HF_ENDPOINT', 'https://huggingface.co')}{middle[0]}{place}{middle[1]}{revision or 'main'}"


def _hub_files(parts: Sequence[str], key: str) -> Iterator[str]:
    """The names of the files below a folder of the hub, which lists up to 1,000 in one answer."""
    headers = {"Authorization": f"Bearer {os.environ['HF_TOKEN']}"} if "HF_TOKEN" in os.environ else {}
    address: str | None = f"{_hub(parts, 'list')}/{quote(key)}?recursive=true"
    while address is not None:
        with urlopen(Request(address, headers=headers), timeout=60) as answer:
            found, link = json.load(answer), re.search(r"<(.*?)>; *rel=\"next\"", answer.headers.get("Link", ""))
        yield from (one["path"][len(key) + 1 if key else 0 :] for one in found if one["type"] == "file")
        address = None if link is None else link[1]
