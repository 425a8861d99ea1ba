"""A side stream of a GPU, on which the right side's kernels run concurrently with the left side's.

Kernels over few right rows leave most of a GPU idle; run concurrently with others they cost no time. Used for small
problems, which run from CUDA graphs (engine/objective/cuda_graphs.py): a G·d at ml1m's and ml10m's shapes takes a fifth
and a tenth less time. Large problems fill a GPU by themselves, and the two sides would evict each other from its cache.
Results are bit-identical.

Memory is safe because the side stream starts after everything before ``fork`` and is waited for by ``join``, and no
tensor that one stream reads is freed by the other in between. Without a GPU nothing changes.

Checked on a GPU by tests/test_cuda_graphs.py; timed by benchmarks/bench_gpu.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """A CUDA stream besides the current one; with None, the current one itself."""

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        self.stream = stream

    def fork(self) -> None:
        """Make the side stream wait for all work submitted to the current stream so far."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())

    @contextmanager
    def within(self) -> Iterator[None]:
        """Submit the work of this block to the side stream."""
        if self.stream is None:
            yield
            return
        with torch.cuda.stream(self.stream):
            yield

    def join(self) -> None:
        """Make the current stream wait for the side stream."""
        if self.stream is not None and self.stream != torch.cuda.current_stream():
            torch.cuda.current_stream().wait_stream(self.stream)
