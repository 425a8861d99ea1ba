"""A second stream of a GPU, on which the right side's work goes on while the left side's is done.

Kernels over few right rows leave most of a GPU idle: beside others they take no time. That is for small problems, which
run from graphs (engine/objective/cuda_graphs.py): a G·d at ml1m's and ml10m's shapes takes a fifth and a tenth less.
Large ones keep a GPU busy by themselves, and the two sides would push each other out of its cache. Results are the same
bits.

Memory stays safe because work on the side stream begins when everything before ``fork`` is done and ends before what
comes after ``join``, and because nobody lets go in between of what the other side still reads. Without a GPU there is
no second place and nothing changes. Checked on a GPU by tests/test_cuda_graphs.py; timed by benchmarks/bench_gpu.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """A stream beside the present one; the present one itself if none is given."""

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        self.stream = stream

    def fork(self) -> None:
        """What is done within from now on waits for all that came before."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())

    @contextmanager
    def within(self) -> Iterator[None]:
        """What is done here goes on beside what is done elsewhere between ``fork`` and ``join``."""
        if self.stream is None:
            yield
            return
        with torch.cuda.stream(self.stream):
            yield

    def join(self) -> None:
        """What comes after waits for all that was done within."""
        if self.stream is not None and self.stream != torch.cuda.current_stream():
            torch.cuda.current_stream().wait_stream(self.stream)
