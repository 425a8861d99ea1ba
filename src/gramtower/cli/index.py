"""``gramtower index``: build an approximate index of a model, and measure its recall."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from gramtower.cli.options import Common
from gramtower.cli.output import note, print_answer
from gramtower.cli.run_folder import model_file
from gramtower.model.two_tower import load
from gramtower.serving.ann_index import build_index, index_path, write_index


def index(
    run: Path,
    /,
    *,
    kind: str = "faiss",
    recall: float = 0.95,
    k: Annotated[int, Parameter(name=["--k", "-k"])] = 20,
    seed: int = 0,
    common: Common | None = None,
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
        common: Output.
    """
    common = common or Common()
    path = model_file(run)
    model = load(path)
    if not common.quiet:
        note(f"building an index of {len(model.right_.embeddings):,} entities")
    P, Q = model.left_.embeddings, model.right_.embeddings
    made, facts = build_index(P, Q, model.right_.ids, kind, k, recall, seed)
    target = index_path(path)
    write_index(target, made, facts)
    found = {
        "index": str(target),
        **{name: value for name, value in vars(facts).items() if name not in ("model", "built")},
    }
    named = {f"recall@{facts.k}" if name == "recall" else name: value for name, value in found.items()}
    return print_answer(common.json, found, named)
