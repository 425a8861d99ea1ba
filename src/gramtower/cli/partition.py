"""``gramtower partition``: pairs cut into parts, of which each process of a fit reads its shard."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from gramtower._util import checks as check
from gramtower.cli.config import merge_flags
from gramtower.cli.folder import for_writing
from gramtower.cli.options import Common, DataOptions
from gramtower.cli.output import print_facts, print_json
from gramtower.cli.reading import held_out_of, read_pairs
from gramtower.data.partition import write_partition

MOST_PARTS = 65_536  # each is a file


def partition(
    path: Path,
    /,
    *,
    out: Annotated[Path | None, Parameter(required=True)] = None,
    parts: int = 64,
    seed: int = 0,
    config: Path | None = None,
    data: DataOptions | None = None,
    common: Common | None = None,
) -> int:
    """Cut pairs into parts of about equal work, by left entity, for a fit by several processes.

    ``torchrun --nproc-per-node 4 -m gramtower fit FOLDER --out RUN`` then reads each part in one process alone.
    Held-out pairs are chosen here: the same as fit would choose with the same --validation and --seed.

    Args:
        path: Pairs, as for fit.
        out: Folder for the parts: new, empty, or that of an earlier partition, which is replaced.
        parts: How many; at least as many as there will ever be processes.
        seed: For --validation.
        config: TOML file whose table [data] says how the pairs are read.
        data: Data.
        common: Output.
    """
    common = common or Common()
    out = for_writing(out)
    check.count("parts", parts, most=MOST_PARTS)
    options = merge_flags(config, data).data
    pairs, held_out = held_out_of(read_pairs(path, options, not common.quiet), options, seed)
    manifest = write_partition(pairs, out, parts, held_out)
    sizes = [part["pairs"] for part in manifest.parts]
    facts = {
        "folder": str(out),
        "left": manifest.shape[0],
        "right": manifest.shape[1],
        "pairs": manifest.pairs,
        "validation_pairs": manifest.held_out,
        "parts": len(sizes),
        "fewest_pairs": min(sizes),
        "most_pairs": max(sizes),
    }
    if common.json:
        print_json(facts)
    else:
        print_facts(facts)
    return 0
