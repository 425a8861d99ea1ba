"""The data sets with features: training pairs, features of both sides, and new entities of one side to rank for.

    eurlex, delicious   documents (words) × labels (ids); a fifth of the documents is new
    citeulike           users (ids) × articles (words); a fifth of the articles is new
    facebook            pages (words) × pages (words); a fifth of the pages is new on the left, and nowhere in training
    ml1m                users (ids) × films (genres, title words); a fifth of the films is new
    moby                words × synonyms, both by their letters (bundled); a fifth of the words is new

Nothing of a public test part is read. ``python benchmarks/features/sets.py`` prints their sizes.
"""

from __future__ import annotations

import json
import lzma
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import scipy.sparse as sp

from gramtower.data import readers
from gramtower.data.bundle import thesaurus

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
NAMES = ("eurlex", "delicious", "citeulike", "facebook", "ml1m", "moby")


@dataclass(frozen=True)
class FeatureSet:
    """Training pairs and what is asked about new entities.

    Attributes:
        train: known left × known right entities.
        left: features of the known left entities; None for ids.
        right: the same on the right.
        side: the side of the new entities.
        new: their features; None where pairs of known entities are asked about.
        truth: new left × known right entities, or known left × new right ones.
    """

    train: sp.csr_matrix
    left: sp.csr_matrix | None
    right: sp.csr_matrix | None
    side: str
    new: sp.csr_matrix | None
    truth: sp.csr_matrix


def load(name: str, seed: int = 0, share: float = 0.2, data: Path = DATA) -> FeatureSet:
    """A set with a share of the entities of one side held out by a seed."""
    if name in ("eurlex", "delicious"):
        return _documents(data / {"eurlex": "eurlex-4k"}.get(name, name) / "train.txt.xz", seed, share)
    return {"citeulike": _citeulike, "facebook": _facebook, "ml1m": _ml1m, "moby": _moby}[name](data, seed, share)


def warm(one: FeatureSet, seed: int) -> FeatureSet:
    """The known entities alone, with a tenth of their pairs to find."""
    pairs = one.train.tocoo()
    held = np.random.default_rng(seed).random(pairs.nnz) < 0.1

    def part(chosen: np.ndarray) -> sp.csr_matrix:
        entries = (pairs.data[chosen], (pairs.row[chosen], pairs.col[chosen]))
        return sp.csr_matrix(entries, shape=pairs.shape)

    return FeatureSet(part(~held), one.left, one.right, one.side, None, part(held))


def _cut(rows: int, seed: int, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Known and new rows, each in order."""
    order = np.random.default_rng(seed).permutation(rows)
    new = np.zeros(rows, dtype=bool)
    new[order[: int(share * rows)]] = True
    return np.flatnonzero(~new), np.flatnonzero(new)


def _documents(path: Path, seed: int, share: float) -> FeatureSet:
    read = readers.extreme_classification(path)
    pairs, features = read.pairs.matrix.tocsr(), sp.csr_matrix(read.features)
    known, new = _cut(pairs.shape[0], seed, share)
    return FeatureSet(pairs[known], features[known], None, "left", features[new], pairs[new])


def _of_right(pairs: sp.csr_matrix, words: sp.csr_matrix, seed: int, share: float) -> FeatureSet:
    known, new = _cut(pairs.shape[1], seed, share)
    columns = sp.csc_matrix(pairs)
    train = sp.csr_matrix(columns[:, known])
    users = np.flatnonzero(np.diff(train.indptr))
    return FeatureSet(
        train[users], None, words[known], "right", words[new], sp.csr_matrix(sp.csr_matrix(columns[:, new])[users])
    )


def _numbered(path: Path) -> list[list[str]]:
    with lzma.open(path, "rt") as lines:
        return [line.split()[1:] for line in lines]


def _citeulike(data: Path, seed: int, share: float) -> FeatureSet:
    folder = data / "citeulike-t"
    words = [[entry.split(":") for entry in line] for line in _numbered(folder / "words.dat.xz")]
    counts = [len(line) for line in words]
    flat = np.array([[int(a), int(b)] for line in words for a, b in line])
    features = _csr(flat[:, 1], flat[:, 0], counts)
    users = _numbered(folder / "users.dat.xz")
    lists = np.array([int(x) for line in users for x in line])
    pairs = _csr(np.ones(len(lists)), lists, [len(line) for line in users], width=features.shape[0])
    return _of_right(pairs, features, seed, share)


def _csr(values: np.ndarray, columns: np.ndarray, counts: list[int], width: int | None = None) -> sp.csr_matrix:
    offsets = np.concatenate([[0], np.cumsum(counts)])
    shape = (len(counts), int(columns.max()) + 1 if width is None else width)
    matrix = sp.csr_matrix((values.astype(np.float32), columns, offsets), shape=shape)
    matrix.sum_duplicates()
    return matrix


def _facebook(data: Path, seed: int, share: float) -> FeatureSet:
    folder = data / "facebook-pages"
    with lzma.open(folder / "features.json.xz", "rt") as text:
        read = json.load(text)
    lists = [sorted(set(read[str(page)])) for page in range(len(read))]
    flat = np.array([x for line in lists for x in line])
    features = _csr(np.ones(len(flat)), flat, [len(line) for line in lists])
    with lzma.open(folder / "edges.csv.xz", "rt") as lines:
        next(lines)
        edges = np.array([[int(x) for x in line.split(",")] for line in lines])
    edges = edges[edges[:, 0] != edges[:, 1]]
    both = np.concatenate([edges, edges[:, ::-1]])
    n = len(lists)
    pairs = sp.csr_matrix((np.ones(len(both), np.float32), (both[:, 0], both[:, 1])), shape=(n, n))
    pairs.data[:] = 1
    known, new = _cut(n, seed, share)
    train = sp.csr_matrix(pairs[known][:, known])
    return FeatureSet(train, features[known], features[known], "left", features[new], pairs[new][:, known])


def _ml1m(data: Path, seed: int, share: float) -> FeatureSet:
    folder = data / "ml-1m"
    with lzma.open(folder / "ratings_no_timestamp.dat.xz", "rt") as lines:
        ratings = np.array([[int(x) for x in line.split("::")[:3]] for line in lines])
    liked = ratings[ratings[:, 2] >= 4]
    films, columns = np.unique(liked[:, 1], return_inverse=True)
    users, rows = np.unique(liked[:, 0], return_inverse=True)
    pairs = sp.csr_matrix((np.ones(len(liked), np.float32), (rows, columns)), shape=(len(users), len(films)))
    about = {}
    for line in (folder / "movies.dat").read_text(encoding="latin-1").splitlines():
        number, title, genres = line.split("::")
        name, year = title[:-7], title[-5:-1]
        words = {f"word {word}" for word in name.lower().replace(",", " ").replace(":", " ").split()}
        about[int(number)] = {*(f"genre {x}" for x in genres.split("|")), f"decade {year[:3]}", f"year {year}", *words}
    names = {x: i for i, x in enumerate(sorted(set().union(*about.values())))}
    lists = [sorted(names[x] for x in about[film]) for film in films]
    flat = np.array([x for line in lists for x in line])
    features = _csr(np.ones(len(flat)), flat, [len(line) for line in lists], width=len(names))
    return _of_right(pairs, features, seed, share)


def _moby(data: Path, seed: int, share: float) -> FeatureSet:
    read = thesaurus()
    pairs = sp.csr_matrix(read.matrix)
    grams = [[_letters(str(word)) for word in words] for words in (read.left_ids, read.right_ids)]
    counts = Counter(gram for side in grams for word in side for gram in word)
    names = {gram: i for i, gram in enumerate(sorted(gram for gram, count in counts.items() if count > 1))}

    def rows(words: list[set[str]]) -> sp.csr_matrix:
        lists = [sorted(names[gram] for gram in word if gram in names) for word in words]
        flat = np.array([x for line in lists for x in line])
        return _csr(np.ones(len(flat)), flat, [len(line) for line in lists], width=len(names))

    known, new = _cut(pairs.shape[0], seed, share)
    left = rows(grams[0])
    return FeatureSet(pairs[known], left[known], rows(grams[1]), "left", left[new], pairs[new])


def _letters(word: str) -> set[str]:
    """Three to five letters in a row, the ends of a word marked."""
    marked = f" {word} "
    return {marked[i : i + size] for size in (3, 4, 5) for i in range(max(1, len(marked) - size + 1))}


if __name__ == "__main__":
    for name in NAMES:
        one = load(name)
        print(
            f"{name:10} train {one.train.shape} with {one.train.nnz:,} pairs, new {one.side} {one.new.shape}, "
            f"{one.truth.nnz:,} pairs to find, {one.new.nnz / one.new.shape[0]:.0f} features an entity"
        )
