"""``gramtower export``: a model in the formats of other programs."""

from __future__ import annotations

from pathlib import Path

from gramtower.cli.folder import open_model
from gramtower.cli.options import Common
from gramtower.cli.output import print_json, print_table


def export(run: Path, /, *, to: str, out: Path, common: Common | None = None) -> int:
    """Write a model for other programs: towers as networks, or embeddings with their ids.

    Args:
        run: Folder of a run, or a model file.
        to: onnx or torchscript (towers), numpy, parquet or faiss (embeddings).
        out: Folder to write into.
        common: Output.
    """
    common = common or Common()
    model, _ = open_model(run)
    files = model.export(out, to)
    if common.json:
        print_json({"to": to, "files": [str(path) for path in files]})
    elif not common.quiet:
        print_table(("file", "bytes"), [(str(path), path.stat().st_size) for path in files])
    return 0
