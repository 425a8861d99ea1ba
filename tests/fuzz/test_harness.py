"""The fuzz tests' own rules: what they let pass and what they do not."""

from __future__ import annotations

import random

import pytest
from harness import MINUTES, Fuzz, mutated


def test_a_raw_error_of_a_layer_below_is_not_let_pass():
    with pytest.raises(KeyError):
        Fuzz("harness", 1).attempt("nothing", lambda: {}["missing"])


@pytest.mark.skipif(MINUTES > 0, reason="FUZZ_MINUTES: the number of inputs follows the time")
def test_inputs_repeat_from_their_seed():
    draws = [[mutated(b"left,right\nann,1\n", rng) for rng in Fuzz("harness", 50)] for _ in range(2)]
    assert draws[0] == draws[1]
    assert len(set(draws[0])) > 40


def test_nothing_can_be_mutated_too():
    assert isinstance(mutated(b"", random.Random(0)), bytes)
