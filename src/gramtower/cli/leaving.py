"""How the program ends, alone or among processes that torchrun started; loads nothing of torch."""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """End the program.

    One of several processes skips the interpreter's shutdown: gloo's threads, still freeing tensors, sometimes abort it
    (pytorch issue 190489), and torchrun would count a run as failed whose model is written.
    """
    if started_among_several():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise SystemExit(code)


def started_among_several() -> bool:
    """Whether torchrun started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ
