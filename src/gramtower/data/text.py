"""Encoders of text: a pretrained model or a function that turns each text into a vector of numbers.

    model2vec               a table with a vector for each piece of a word; a text is the mean of its pieces
    sentence-transformers   a network, on a GPU if there is one
    a function              from a list of n texts to an array of shape (n, d)

Each distinct text is encoded once. More than one batch of texts of a model is kept on disk, so that no later process
encodes them again: FOLDER/DIGEST/….safetensors has the digests of texts (``keys``, 16 bytes each) and their ``vectors``
in float32, where DIGEST is that of the model's weights and of its vector of one fixed sentence. Every chunk of batches
is written when it is done, under a temporary name first. Damaged files are encoded and written again.

Cost: one pass of the model over the distinct texts that are not on disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from gramtower._util import checks as check
from gramtower._util.files import replacing
from gramtower.data import frames

if TYPE_CHECKING:
    from polars import Series

Function: TypeAlias = Callable[[list[str]], ArrayLike]
Vectors: TypeAlias = NDArray[np.float32]

_PROBE = "A quick look at 12 words: café, музыка, 東京; the end of this sentence."
_CLOSE = 0.05  # relative distance of two vectors of the probe that one model gives on different machines
_CHUNK = 64  # batches that are encoded before they are written to disk
_LOADING = threading.Lock()


class Encoder:
    """Turns texts into vectors by a pretrained model or by a function.

    Args:
        model: the folder of a model2vec or sentence-transformers model, its name on the Hugging Face Hub, or a function
            from a list of texts to an array with a row for each. A model is loaded at its first use. No code that comes
            with a model is run.
        name: name of a function, which a saved model asks for [default: the name in its definition].
        batch_size: number of texts that are encoded together.
        device: device of a sentence-transformers model [default: a GPU if there is one].
        cache: folder in which vectors are kept; False for none [default: ``$XDG_CACHE_HOME/gramtower/text`` or
            ``~/.cache/gramtower/text`` for a model, none for a function]. Vectors of a function are found by its name:
            give it another one when you change it.

    An encoder is used in ``FeatureTable(…, encoders={"title": encoder})``. ``encode(texts)`` gives the vectors.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Function,
        *,
        name: str | None = None,
        batch_size: int = 256,
        device: str | None = None,
        cache: str | os.PathLike[str] | bool | None = None,
    ) -> None:
        self.batch_size, self.device = check.count("batch_size", batch_size), device
        self.is_function = callable(model)
        if self.is_function:
            self.name = name or str(getattr(model, "__name__", type(model).__name__))
            self._function: Function | None = cast("Function", model)
        else:
            if name is not None:
                check.fail("name", repr(name), "None for a model, whose name is that of its folder or on the hub")
            self.name, self._function = _model_name(model), None
        kept = not self.is_function if cache is None or cache is True else cache is not False
        self.cache = None if not kept else _cache_folder() if cache in (None, True) else check.path("cache", cache)
        self._digest = ""
        self._probe: Vectors | None = None

    def __repr__(self) -> str:
        return f"Encoder({self.name!r})"

    @property
    def digest(self) -> str:
        """Digest of the weights of a model; "" for a function."""
        self._loaded()
        return self._digest

    @property
    def probe(self) -> Vectors:
        """The vector of one fixed sentence, by which encoders are compared."""
        if self._probe is None:
            self._probe = self._checked(self._loaded()([_PROBE]), 1, f"encoder {self.name!r}")[0]
        return self._probe

    @property
    def width(self) -> int:
        """Length of the vectors."""
        return len(self.probe)

    def encode(self, texts: Sequence[str], name: str = "texts") -> Vectors:
        """Encode texts, a row for each; ``name`` is the name of the texts in errors."""
        given = check.listed(name, texts, "texts")
        if any(not isinstance(text, str) for text in given):
            check.fail(name, "other values than text", "a list of texts")
        place: dict[str, int] = {}
        rows = [place.setdefault(text, len(place)) for text in given]
        distinct = list(place)
        found = np.empty((len(distinct), self.width), np.float32)
        stored = self._stored() if self.cache is not None and len(distinct) > self.batch_size else None
        keys = [] if stored is None else [_key(text) for text in distinct]
        missing = list(range(len(distinct))) if stored is None else _take(stored, keys, found)
        step = self.batch_size * _CHUNK
        for start in range(0, len(missing), step):
            chunk = missing[start : start + step]
            found[chunk] = self._encoded([distinct[row] for row in chunk], name)
            if stored is not None:
                _write(stored, [keys[row] for row in chunk], found[chunk])
        return found[rows]

    def vectors(self, column: Series) -> Series:
        """The vectors of a column of texts, as a column; null where a cell is empty."""
        pl = frames.polars()
        texts = frames.texts(column)
        present = (texts.is_not_null() & (texts.str.strip_chars() != "")).fill_null(False).to_numpy()
        if not present.any():
            return cast("Series", pl.Series(column.name, [None] * len(column), dtype=pl.String))
        found = self.encode(texts.filter(pl.Series(present)).to_list(), f"column {column.name!r}")
        made = pl.Series(column.name, found, dtype=pl.Array(pl.Float32, found.shape[1]))
        places = np.where(present, np.cumsum(present) - 1, 0)
        return cast("Series", made.gather(pl.Series(places).set(pl.Series(~present), None)))

    def difference(self, digest: str, probe: Sequence[float]) -> str | None:
        """Say how this encoder differs from the described one; None if it does not."""
        if self.width != len(probe):
            return f"{self.name!r} with vectors of length {self.width}"
        if self.is_function == bool(digest):
            return f"{self.name!r}, a {'function' if self.is_function else 'model'}"
        if self.digest != digest or not alike(self.probe, probe):
            return f"{self.name!r}, which gives other vectors"
        return None

    def _encoded(self, texts: list[str], name: str) -> Vectors:
        function = self._loaded()
        if not self.is_function:  # which makes batches itself, of texts of about one length
            return self._checked(function(texts), len(texts), name)
        batches = [texts[start : start + self.batch_size] for start in range(0, len(texts), self.batch_size)]
        return np.concatenate([self._checked(function(batch), len(batch), name) for batch in batches])

    def _checked(self, given: ArrayLike, rows: int, name: str) -> Vectors:
        array = check.as_float_array(name, given)
        width = None if self._probe is None else len(self._probe)
        if array.ndim != 2 or len(array) != rows or not array.shape[1] or array.shape[1] != (width or array.shape[1]):
            expected = f"shape ({rows}, {width or 'd'}): a vector for each text"
            check.fail(name, f"shape {array.shape} from encoder {self.name!r}", expected)
        with np.errstate(over="ignore"):
            made = array.astype(np.float32)
        check.finite(f"{name} from encoder {self.name!r}", made)
        return made

    def _loaded(self) -> Function:
        with _LOADING:
            if self._function is None:
                self._function, self._digest = _load(self.name, self.device, self.batch_size)
        return self._function

    def _stored(self) -> Path:
        assert self.cache is not None
        content = f"{self.name if self.is_function else ''}|{self.digest}|".encode() + self.probe.tobytes()
        return self.cache / hashlib.sha256(content).hexdigest()[:32]


def alike(probe: ArrayLike, other: ArrayLike) -> bool:
    """Whether two vectors of the fixed sentence come from one encoder, perhaps on different machines."""
    a, b = np.asarray(probe, np.float64), np.asarray(other, np.float64)
    return a.shape == b.shape and float(np.linalg.norm(a - b)) <= _CLOSE * float(np.linalg.norm(a))


def _model_name(model: object) -> str:
    path = check.path("model", model)
    if path.is_dir():
        return str(path.resolve())
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", str(model)):
        check.fail("model", repr(str(model)), "the folder of a model, which this is not, or a name such as OWNER/MODEL")
    return str(model)


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "gramtower", "text")


def _load(name: str, device: str | None, batch_size: int) -> tuple[Function, str]:
    """The function and the digest of a pretrained model."""
    _model_name(name)  # a folder that was there may be gone
    folder = Path(name)
    if folder.is_dir() and not any((folder / one).is_file() for one in ("config.json", "modules.json")):
        check.fail("encoder", f"{name}, without config.json and modules.json", "the folder of a saved model")
    try:
        config = _config(name)
        if config is not None and config.get("model_type", "model2vec") == "model2vec":  # networks name another type
            return _model2vec(name, batch_size)
        return _sentence_transformer(name, device, batch_size)
    except ImportError:
        raise
    except Exception as error:  # the packages raise many kinds
        raise ValueError(f"encoder: {name} cannot be loaded ({' '.join(str(error).split())[:300]})") from error


def _config(name: str) -> dict[str, Any] | None:
    """The file config.json of a model, which a static one of sentence-transformers does not have."""
    path = Path(name) / "config.json"
    if not Path(name).is_dir():
        hub = check.need("huggingface_hub", "a model by its name", "model2vec")
        try:
            path = Path(hub.hf_hub_download(name, "config.json"))
        except hub.errors.EntryNotFoundError as error:
            offline = isinstance(error, hub.errors.LocalEntryNotFoundError)
            if offline and not isinstance(hub.try_to_load_from_cache(name, "modules.json"), str):
                raise  # at once: the packages would try for minutes
            return None
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def _model2vec(name: str, batch_size: int) -> tuple[Function, str]:
    model = check.need("model2vec", f"the encoder {name}").StaticModel.from_pretrained(name)
    parts = [part for part in (model.embedding, model.weights, model.token_mapping) if part is not None]
    digest = _digest(parts, model.tokenizer.to_str())

    def encode(texts: list[str]) -> ArrayLike:
        return model.encode(texts, batch_size=batch_size, use_multiprocessing=False)  # type: ignore[no-any-return]

    return encode, digest


def _sentence_transformer(name: str, device: str | None, batch_size: int) -> tuple[Function, str]:
    package = check.need("sentence_transformers", f"the encoder {name}", "sentence-transformers")
    if int(package.__version__.partition(".")[0]) < 6:  # these run code that they find in a folder
        line = "pip install -U sentence-transformers"
        raise ImportError(f"the encoder {name} needs sentence-transformers 6, not {package.__version__}: {line}")
    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = package.SentenceTransformer(name, device=chosen, trust_remote_code=False)
    digest = _digest(part.detach().float().cpu().numpy() for _, part in sorted(model.state_dict().items()))

    def encode(texts: list[str]) -> ArrayLike:
        return model.encode(texts, batch_size=batch_size, show_progress_bar=False)  # type: ignore[no-any-return]

    return encode, digest


def _digest(parts: Iterable[NDArray[Any]], text: str = "") -> str:
    made = hashlib.sha256(text.encode())
    for part in parts:
        made.update(str(part.shape).encode() + np.ascontiguousarray(part).tobytes())
    return made.hexdigest()


def _key(text: str) -> bytes:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()


def _take(folder: Path, keys: list[bytes], found: Vectors) -> list[int]:
    """Fill the rows whose vectors are in a folder, and return the others."""
    safetensors = check.need("safetensors.numpy", "the cache of an encoder")
    wanted = {key: row for row, key in enumerate(keys)}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            read = safetensors.load_file(path)
            known, vectors = read["keys"], read["vectors"]
        except Exception:  # damaged, or removed by another process
            continue
        if known.shape != (len(vectors), 16) or vectors.shape[1:] != found.shape[1:] or not np.isfinite(vectors).all():
            continue
        rows = [(place, wanted.pop(key.tobytes(), None)) for place, key in enumerate(known)]
        there = [(place, row) for place, row in rows if row is not None]
        if there:
            places, own = np.array(there).T
            found[own] = vectors[places]
    return sorted(wanted.values())


def _write(folder: Path, keys: list[bytes], vectors: Vectors) -> None:
    safetensors = check.need("safetensors.numpy", "the cache of an encoder")
    all_keys = b"".join(keys)
    content = {"keys": np.frombuffer(all_keys, np.uint8).reshape(-1, 16), "vectors": np.ascontiguousarray(vectors)}
    path = folder / f"{_key(all_keys.hex()).hex()}.safetensors"
    with suppress(OSError), replacing(path) as partial:  # where nothing can be written, every process encodes
        safetensors.save_file(content, partial)
