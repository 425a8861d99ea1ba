"""The public splits that quality is measured on, and the validation part that choices are made on.

    gowalla, yelp2018   the training part of LightGCN's split, `user item item …` lists; its test part is not read
    ml1m                MovieLens-1M ratings of 4 and 5; one in ten at random (seed 0) is the test part, put aside
    moby                the thesaurus that comes with the library; one link in ten at random (seed 0) is put aside

`load(name, folder)` gives the training part, `inner_split` cuts a validation part off it: the same share of each user's
pairs. Needs only numpy and scipy, no table reader.
"""

from __future__ import annotations

import lzma
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import scipy.sparse as sp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import movielens_pairs
from common import write_result as write_result

from gramtower.data.datasets import thesaurus

FILES = {"gowalla": "gowalla.txt.xz", "yelp2018": "yelp2018.txt.xz", "ml1m": "ratings_no_timestamp.dat.xz", "moby": ""}


@dataclass(frozen=True)
class Data:
    """A set of pairs.

    Attributes:
        name: of the set.
        train: m × n, ones at the pairs that may be learned from and chosen on.
        test: m × n, the part put aside, or None where the public test part is a file of its own.
        left: ids of the rows, as in the files.
        right: ids of the columns.
        separator: between the ids of a list.
    """

    name: str
    train: sp.csr_matrix
    test: sp.csr_matrix | None
    left: list[str]
    right: list[str]
    separator: str = " "


def load(name: str, folder: Path) -> Data:
    """A set by name; files are looked for in ``folder``."""
    if name not in FILES:
        raise ValueError(f"data: got {name!r}, expected one of {', '.join(FILES)}")
    if name == "moby":
        words = thesaurus()
        ids = words.left_ids.tolist(), words.right_ids.tolist()
        return Data(name, *one_in_ten(words.matrix, 0), *ids, separator=",")
    path = folder / FILES[name]
    if not path.exists():
        raise FileNotFoundError(f"{name}: {path} does not exist")
    if name == "ml1m":
        return Data(name, *movielens_pairs(path, 0), *_movielens_ids(path))
    train = read_lists(path)
    return Data(name, train, None, *([str(row) for row in range(size)] for size in train.shape))


def _movielens_ids(path: Path) -> tuple[list[str], list[str]]:
    """Users and films with a rating of 4 or 5, in the order of `movielens_pairs`."""
    with lzma.open(path, "rt") if path.suffix == ".xz" else path.open() as lines:
        ratings = np.array([[int(x) for x in line.split("::")[:3]] for line in lines])
    liked = ratings[ratings[:, 2] >= 4]
    return tuple([str(key) for key in np.unique(liked[:, column])] for column in (0, 1))


def read_lists(path: Path, shape: tuple[int, int] | None = None) -> sp.csr_matrix:
    """Lines `user item item …` of numbers as a matrix of ones; ``shape`` when it must be that of another part."""
    with lzma.open(path, "rt") if path.suffix == ".xz" else path.open() as lines:
        rows = [np.array(line.split(), dtype=np.int64) for line in lines if line.strip()]
    users = np.concatenate([np.full(len(row) - 1, row[0]) for row in rows])
    items = np.concatenate([row[1:] for row in rows])
    matrix = sp.csr_matrix((np.ones(len(users), np.float32), (users, items)), shape=shape)
    matrix.sum_duplicates()
    matrix.data[:] = 1.0
    return matrix


def one_in_ten(matrix: sp.csr_matrix, seed: int) -> tuple[sp.csr_matrix, sp.csr_matrix]:
    """One pair in ten at random, put aside."""
    return _parts(matrix, np.random.default_rng(seed).random(matrix.nnz) < 0.1)


def inner_split(train: sp.csr_matrix, share: float = 0.1, seed: int = 0) -> tuple[sp.csr_matrix, sp.csr_matrix]:
    """Training and validation parts: ``share`` of each user's pairs, rounded; one pair at least stays.

    The same draw as `gramtower.data.splits.per_user`.
    """
    counts = np.diff(train.indptr)
    out = np.minimum(np.floor(share * counts + 0.5), counts - 1).clip(0)
    rows = np.repeat(np.arange(len(counts)), counts)
    order = np.lexsort((np.random.default_rng(seed).random(train.nnz), rows))
    rank = np.empty(train.nnz, dtype=np.int64)
    rank[order] = np.arange(train.nnz) - np.repeat(train.indptr[:-1], counts)
    return _parts(train, rank < np.repeat(out, counts))


def omega_of_share(train: sp.csr_matrix, share: float) -> float:
    """ω that gives unobserved pairs this much weight in all, where observed ones have 1."""
    m, n = train.shape
    return share * train.nnz / (m * n - train.nnz)


def _parts(matrix: sp.csr_matrix, held: np.ndarray) -> tuple[sp.csr_matrix, sp.csr_matrix]:
    coo = matrix.tocoo()
    return tuple(
        sp.csr_matrix((coo.data[mask], (coo.row[mask], coo.col[mask])), shape=matrix.shape) for mask in (~held, held)
    )
