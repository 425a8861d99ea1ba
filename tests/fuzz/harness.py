"""What the fuzz tests share: how many inputs they try, how bytes are broken, and how outcomes are judged and counted.

In `make test` every fuzz test (a function of a test_fuzz_*.py) tries a fixed number of seeded inputs. `make fuzz
MINUTES=30` gives each an equal share of the time, from a seed that it prints; FUZZ_SEED repeats it. Counts go to
runs/fuzz/<name>.json.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MINUTES = float(os.environ.get("FUZZ_MINUTES", "0"))  # of one test; 0: the small, fixed number
SEED = int(os.environ.get("FUZZ_SEED", "0"))
SLOWEST = 10.0  # seconds that one input may take
ACCEPTED = (ValueError, OSError)  # what bad input may end in


class Fuzz:
    """A loop over seeded inputs that counts outcomes and fails on the first that is not allowed.

    Args:
        name: of the test; names the file with its counts.
        small: how many inputs `make test` tries.
    """

    def __init__(self, name: str, small: int) -> None:
        self.name, self.small, self.outcomes, self.number = name, small, Counter[str](), 0

    def __iter__(self) -> Iterator[random.Random]:
        """A generator for each input; its seed is the input's number, so that a failure can be repeated alone."""
        end = time.monotonic() + 60 * MINUTES
        number = 0
        try:
            while time.monotonic() < end if MINUTES else number < self.small:
                self.number = number
                yield random.Random(f"{self.name} {SEED} {number}")
                number += 1
        finally:
            if MINUTES:
                path = Path("runs/fuzz") / f"{self.name}.json"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps({"seed": SEED, "inputs": number, "outcomes": dict(self.outcomes)}))

    def attempt(
        self, what: object, call: Callable[[], Any], accepted: tuple[type[BaseException], ...] = ACCEPTED
    ) -> Any:
        """The answer of a call, or None if it refused its input in an accepted way.

        Fails on any other exception, on an error without a message, and on a call slower than SLOWEST.
        """
        start = time.monotonic()
        try:
            answer = call()
            self.outcomes["answered"] += 1
        except accepted as error:
            answer = None
            self.outcomes[type(error).__name__] += 1
            if not str(error).strip():
                raise AssertionError(f"input {self.number} of seed {SEED}: no message; {what!r}") from error
        except BaseException as error:
            error.add_note(f"input {self.number} of seed {SEED} of {self.name}: {str(what)[:2000]!r}")
            raise
        took = time.monotonic() - start
        assert took < SLOWEST, f"input {self.number} of seed {SEED}: {took:.1f} s; {str(what)[:2000]!r}"
        return answer


_TOKENS = [
    b"",
    b"\0",
    b"\n",
    b",",
    b'"',
    b"\xef\xbb\xbf",
    b"\xff\xfe",
    b"nan",
    b"inf",
    b"-1",
    b"1e309",
    b"9" * 30,
    b"{}",
    b"[" * 60,
    b" " * 300,
]


def mutated(data: bytes, rng: random.Random, most: int = 4) -> bytes:
    """Bytes with one to ``most`` seeded changes: bits flipped, pieces cut, doubled, moved or replaced, the end lost."""
    result = bytearray(data)
    for _ in range(rng.randint(1, most)):
        size = len(result)
        at = rng.randrange(size + 1)
        to = min(size, at + rng.choice([1, 1, 2, 8, 64, 1 + size // 4]))
        kind = rng.randrange(7)
        if kind == 0 and size:
            result[rng.randrange(size)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del result[at:to]
        elif kind == 2:
            result[at:at] = result[at:to]
        elif kind == 3:
            result[at:to] = rng.randbytes(to - at)
        elif kind == 4:
            result[at:at] = rng.choice(_TOKENS)
        elif kind == 5:
            del result[at:]
        else:
            piece = result[at:to]
            del result[at:to]
            place = rng.randrange(len(result) + 1)
            result[place:place] = piece
    return bytes(result)
