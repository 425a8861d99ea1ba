"""``gramtower convert``: the pairs of any source as a plain table, so that they are read once."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import IO, Annotated, Any

import numpy as np
from cyclopts import Parameter
from numpy.typing import NDArray

from gramtower._util import checks as check
from gramtower._util.files import replacing
from gramtower.cli.config import merge_flags
from gramtower.cli.options import Common, DataOptions
from gramtower.cli.output import print_facts, print_json
from gramtower.cli.reading import read_pairs
from gramtower.data import frames
from gramtower.data.interactions import Interactions

_ENDINGS = (".csv", ".tsv", ".parquet")
_ROWS = 1 << 19


def convert(
    path: Annotated[Path, Parameter(name="DATA")],
    /,
    *,
    out: Path,
    config: Path | None = None,
    data: DataOptions | None = None,
    common: Common | None = None,
) -> int:
    """Write the pairs of any DATA as a table with a header, which fit reads again faster.

    A folder with the dumps page, pagelinks, redirect and (since 2023) linktarget (.sql.gz) of a MediaWiki becomes the
    links between its articles, with redirects followed; columns are from and to.

    Args:
        path: Pairs, as for fit.
        out: The table: .csv, .tsv (both also .gz) or .parquet.
        config: TOML file whose table [data] says how DATA is read.
        data: Data.
        common: Output.
    """
    common = common or Common()
    if frames.suffix_of(out) not in _ENDINGS or out.suffix.lower() not in (*_ENDINGS, ".gz"):
        check.fail("out", out, ".csv, .tsv (both also .gz) or .parquet")
    pairs = read_pairs(path, merge_flags(config, data).data)
    write_pairs(pairs, out)
    facts = {**pairs.report, "columns": columns(pairs), "out": str(out)}
    if common.json:
        print_json(facts)
    else:
        print_facts(facts)
    return 0


def columns(pairs: Interactions) -> list[str]:
    """The columns of the table: ids, and value, weight and time where there are any.

    Where ids have such a name, that column is called pair_value, pair_weight or pair_time.
    """
    return _names(pairs, has_values(pairs))


def _names(pairs: Interactions, values: bool) -> list[str]:
    names = [pairs.left_name, pairs.right_name] if pairs.left_name != pairs.right_name else ["left", "right"]
    for name in _numbers(pairs, values):
        while name in names:
            name = f"pair_{name}"
        names.append(name)
    return names


def has_values(pairs: Interactions) -> bool:
    """Whether the values say anything: some are not 1."""
    return bool((pairs.matrix.data != 1).any())


def write_pairs(pairs: Interactions, out: Path, values: bool | None = None) -> None:
    """Save pairs as a table, in one step; text files a block of rows at a time.

    Args:
        pairs: what to save.
        out: the table, by whose ending it is written.
        values: whether to write values, for parts that must have the same columns; None if they say anything.
    """
    values = has_values(pairs) if values is None else values
    with replacing(out) as partial:
        if frames.suffix_of(out) == ".parquet":
            _table(pairs, 0, len(pairs), values).write_parquet(partial)
            return
        with gzip.open(partial, "wb") if out.suffix.lower() == ".gz" else partial.open("wb") as file:
            _write_text(pairs, file, frames.separator_of(out), values)


def _write_text(pairs: Interactions, file: IO[bytes] | gzip.GzipFile, separator: str, values: bool) -> None:
    for start in range(0, max(1, len(pairs)), _ROWS):
        table = _table(pairs, start, min(start + _ROWS, len(pairs)), values)
        file.write(table.write_csv(separator=separator, include_header=start == 0).encode())


def _table(pairs: Interactions, start: int, stop: int, values: bool) -> Any:
    pl = frames.polars()
    offsets, names = pairs.matrix.indptr, _names(pairs, values)
    rows = np.searchsorted(offsets, np.arange(start, stop), side="right") - 1
    ids = [pairs.left_ids[rows], pairs.right_ids[pairs.matrix.indices[start:stop]]]
    cells = [pl.Series(one.tolist(), dtype=pl.String) if one.dtype == object else pl.Series(one) for one in ids]
    cells += [pl.Series(numbers[start:stop]) for numbers in _numbers(pairs, values).values()]
    return pl.DataFrame([column.alias(name) for name, column in zip(names, cells, strict=True)])


def _numbers(pairs: Interactions, values: bool) -> dict[str, NDArray[Any]]:
    """The numbers of the pairs by name: values if asked for, weights and times if there are any."""
    every = {"value": pairs.matrix.data, "weight": pairs.weights, "time": pairs.times}
    if not values:
        del every["value"]
    return {name: numbers for name, numbers in every.items() if numbers is not None}
