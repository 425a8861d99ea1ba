"""How the program ends: by itself, by a signal, or among processes that torchrun started; loads nothing of torch.

SIGTERM, which Kubernetes, Slurm and spot machines send, is an interrupt like Ctrl-C with an exit code of its own.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any, NoReturn

_received: list[int] = []


def interrupt_on_sigterm() -> None:
    """Raise KeyboardInterrupt in the main thread when SIGTERM comes, unless the caller had it ignored.

    Further ones are ignored, so that none of them cuts short what the first began; Ctrl-C still ends the process.
    """
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(number: int, frame: Any) -> NoReturn:
    _received.append(number)
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def was_terminated() -> bool:
    """Whether SIGTERM has come."""
    return bool(_received)


def interruption() -> tuple[str, int]:
    """The word for the signal that interrupted the program, and its exit code: 128 and the signal's number."""
    return ("stopped by SIGTERM", 143) if _received else ("interrupted", 130)


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
