"""Compiled, the random bits are those of the operator, and Inductor writes their rounds out."""

from __future__ import annotations

import pytest
import torch
from torch._inductor import config
from torch._inductor.utils import run_and_get_code

from funcppo.core import random
from funcppo.runtime.compile import compile_function
from funcppo.runtime.inductor.threefry_lowering import MIN_WORDS_TO_REALIZE


def bits(key: torch.Tensor, counter: torch.Tensor):
    words = random.threefry2x32(
        key[0], key[1], torch.zeros_like(counter), counter
    )
    return words, words[0] + words[1]


def test_the_published_words_of_zero():
    """Random123's known-answer test of Threefry-2x32-20: key 0, counter 0."""
    (high, low), _ = compile_function(bits)(
        torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    )
    assert (int(high), int(low)) == (0x6B200159, 0x99BA4EFE)


@pytest.mark.parametrize(
    "n", [1, MIN_WORDS_TO_REALIZE - 1, MIN_WORDS_TO_REALIZE]
)
def test_the_words_are_those_of_the_operator_which_is_not_called(n):
    """One word, the most that are computed where they are used, and the fewest that are a kernel of their own."""
    args = random.key(7), torch.arange(n)
    with config.patch(force_disable_caches=True):
        (words, total), codes = run_and_get_code(compile_function(bits), *args)
    expected_words, expected_total = bits(*args)
    assert all(
        torch.equal(a, b)
        for a, b in zip((*words, total), (*expected_words, expected_total))
    )
    lines = [
        line
        for code in codes
        for line in code.splitlines()
        if not line.lstrip().startswith("#")
    ]
    assert lines and not any("threefry2x32.default" in line for line in lines)
