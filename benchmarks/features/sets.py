"""The data sets with features: training pairs, features of both sides, and new entities of one side to rank for.

    eurlex, delicious   documents (words) × labels (ids); a fifth of the documents is new
    citeulike           users (ids) × articles (words); a fifth of the articles is new
    facebook            pages (words) × pages (words); a fifth of the pages is new on the left, and nowhere in training
    ml1m                users (ids) × films (genres, title words); a fifth of the films is new
    moby                words × synonyms, both by their letters (bundled); a fifth of the words is new
    wikispeedia         articles × articles that they link to, both by title and categories; a fifth is new on the left
    npm                 40,000 packages × what they depend on, both by the letters of their names; a fifth is new
    search              queries × documents, both by words of an entry of moby: 3 and 15; a fifth of the queries is new
    npm1, npm2          the same with what one or two of them depend on, instead of five
    facebook*0.3        three tenths of the training pairs of a set, drawn by the seed; any share of any set

Nothing of a public test part is read. ``python benchmarks/features/sets.py`` prints their sizes.
"""

from __future__ import annotations

import json
import lzma
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from gramtower.data import readers
from gramtower.data.datasets import thesaurus

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
NAMES = ("eurlex", "delicious", "citeulike", "facebook", "ml1m", "moby", "wikispeedia", "npm")
_PACKAGES, _LEAST_USERS = 40_000, 5  # of npm, and of a package among them


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
    if "*" in name:
        whole, _, kept = name.partition("*")
        return _thinned(load(whole, seed, share, data), float(kept), seed)
    if name in ("eurlex", "delicious"):
        return _documents(data / {"eurlex": "eurlex-4k"}.get(name, name) / "train.txt.xz", seed, share)
    named = {
        "citeulike": _citeulike, "facebook": _facebook, "ml1m": _ml1m, "moby": _moby, "wikispeedia": _wikispeedia,
        "search": _search, "npm": _npm, "npm1": partial(_npm, least=1), "npm2": partial(_npm, least=2),
    }  # fmt: skip
    return named[name](data, seed, share)


def _thinned(one: FeatureSet, share: float, seed: int) -> FeatureSet:
    """A share of the training pairs; everything else as it is."""
    pairs = one.train.tocoo()
    kept = np.random.default_rng(seed + 7).random(pairs.nnz) < share
    entries = (pairs.data[kept], (pairs.row[kept], pairs.col[kept]))
    return replace(one, train=sp.csr_matrix(entries, shape=pairs.shape))


def warm(one: FeatureSet, seed: int) -> FeatureSet:
    """Only the known entities, with a tenth of their pairs to find."""
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
    left, right = _rows([[_letters(str(word)) for word in words] for words in (read.left_ids, read.right_ids)], 2)
    known, new = _cut(pairs.shape[0], seed, share)
    return FeatureSet(pairs[known], left[known], right, "left", left[new], pairs[new])


def _search(data: Path, seed: int, share: float) -> FeatureSet:
    read = thesaurus()
    entries = sp.csr_matrix(read.matrix)
    rng = np.random.default_rng(0)  # the split is drawn by the seed
    chosen = rng.choice(np.flatnonzero(np.diff(entries.indptr) >= 30), 3000, replace=False)
    words = [entries.indices[entries.indptr[row] : entries.indptr[row + 1]] for row in chosen]
    documents = [{str(word) for word in rng.permutation(one)[:15]} for one in words]
    queries = [{str(word) for word in rng.permutation(words[at])[:3]} for at in np.repeat(np.arange(3000), 5)]
    left, right = _rows([queries, documents], 1)
    known, new = _cut(len(queries), seed, share)
    own = np.repeat(np.arange(3000), 5)
    pairs = sp.csr_matrix((np.ones(len(own), np.float32), (np.arange(len(own)), own)), shape=(len(own), 3000))
    return FeatureSet(pairs[known], left[known], right, "left", left[new], pairs[new])


def _wikispeedia(data: Path, seed: int, share: float) -> FeatureSet:
    folder = data / "wikispeedia"
    with lzma.open(folder / "links.tsv.xz", "rt") as lines:
        links = [line.rstrip("\n").split("\t") for line in lines if "\t" in line and not line.startswith("#")]
    articles = sorted({name for link in links for name in link})
    place = {name: i for i, name in enumerate(articles)}
    about = [{f"word {word}" for word in unquote(name).lower().replace("_", " ").split()} for name in articles]
    for line in (folder / "categories.tsv").read_text().splitlines():
        name, _, path = line.partition("\t")
        levels = path.split(".")
        if name in place and path:
            about[place[name]] |= {".".join(levels[:depth]) for depth in range(2, len(levels) + 1)}
    (words,) = _rows([about], 2)
    rows, columns = ([place[link[side]] for link in links] for side in (0, 1))
    pairs = sp.csr_matrix((np.ones(len(links), np.float32), (rows, columns)), shape=(len(articles), len(articles)))
    pairs.data[:] = 1
    known, new = _cut(len(articles), seed, share)
    return FeatureSet(
        sp.csr_matrix(pairs[known][:, known]), words[known], words[known], "left", words[new], pairs[new][:, known]
    )


def _npm(data: Path, seed: int, share: float, least: int = _LEAST_USERS) -> FeatureSet:
    with lzma.open(data / "npm-deps-2016" / "pairs.tsv.xz", "rt") as lines:
        read = [line.rstrip("\n").split("\t") for line in lines]
    packages = sorted({package for package, _ in read})
    chosen = np.random.default_rng(0).permutation(len(packages))[:_PACKAGES]
    place = {packages[i]: row for row, i in enumerate(sorted(chosen))}
    kept = [(place[package], needed) for package, needed in read if package in place]
    users = Counter(needed for _, needed in kept)
    needed = {name: i for i, name in enumerate(sorted(x for x, count in users.items() if count >= least))}
    rows, columns = np.array([(row, needed[name]) for row, name in kept if name in needed]).T
    pairs = sp.csr_matrix((np.ones(len(rows), np.float32), (rows, columns)), shape=(len(place), len(needed)))
    pairs.data[:] = 1
    left, right = _rows([[_letters(name) for name in names] for names in (place, needed)], 5)
    known, new = _cut(len(place), seed, share)
    return FeatureSet(pairs[known], left[known], right, "left", left[new], pairs[new])


def _rows(sides: list[list[set[str]]], least: int) -> list[sp.csr_matrix]:
    """What is said of the entities of each side as ones, over what is said at least so often."""
    counts = Counter(word for side in sides for words in side for word in words)
    names = {word: i for i, word in enumerate(sorted(word for word, count in counts.items() if count >= least))}
    found = []
    for side in sides:
        lists = [sorted(names[word] for word in words if word in names) for words in side]
        flat = np.array([x for line in lists for x in line])
        found.append(_csr(np.ones(len(flat)), flat, [len(line) for line in lists], width=len(names)))
    return found


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


def dense(pairs: sp.csr_matrix) -> Tensor:
    """Ones where there are pairs."""
    return torch.from_numpy((pairs > 0).toarray()).float()


def metrics(P: Tensor, Q: Tensor, truth: Tensor, seen: Tensor | None = None) -> dict[str, float]:
    """P@1/3/5, paper and usual MAP@5, Recall@20 over the left entities that have something to find."""
    some = truth.sum(1) > 0
    P, truth = P[some], truth[some]
    out = torch.zeros_like(truth) if seen is None else seen[some] * -1e9
    total = truth.sum(1)
    blocks = zip(P.split(2048), truth.split(2048), out.split(2048), strict=True)
    hits = torch.cat([t.gather(1, (p @ Q.T + o).topk(20).indices) for p, t, o in blocks])
    precision = hits.cumsum(1)[:, :5] / torch.arange(1, 6, device=hits.device)
    average = (precision * hits[:, :5]).sum(1)
    made = {
        "p@1": hits[:, 0].mean(), "p@3": hits[:, :3].mean(), "p@5": hits[:, :5].mean(), "paper_map@5": precision.mean(),
        "map@5": (average / total.clamp(max=5)).mean(), "recall@20": (hits.sum(1) / total).mean(),
    }  # fmt: skip
    return {name: round(float(value), 5) for name, value in made.items()}
