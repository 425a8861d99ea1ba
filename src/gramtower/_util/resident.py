"""The resident set of this process: how much there is now, and its largest size since a moment.

Linux keeps the largest size (VmHWM) and sets it back on request. Elsewhere, and where the request is refused, there is
no answer rather than a guess.
"""

from __future__ import annotations

import gc
import re
from contextlib import suppress
from pathlib import Path

from gramtower._util.host import return_memory

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class ResidentPeak:
    """Measures from its construction on.

    Attributes:
        start: bytes at that moment, after what nobody uses any more was given back; None where it cannot be told.
    """

    def __init__(self) -> None:
        gc.collect()
        return_memory()
        self.start: int | None = None
        with suppress(OSError):
            _RESET.write_text("5")  # the largest size becomes the present one
            self.start = _bytes("VmRSS")

    def bytes(self) -> int | None:
        """The largest size so far; None where it cannot be told."""
        return None if self.start is None else _bytes("VmHWM")


def _bytes(name: str) -> int | None:
    found = re.search(rf"{name}:\s+([0-9]+) kB", _STATUS.read_text())
    return None if found is None else 1024 * int(found[1])
