"""Random splits of triples into train, valid and test."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

from funcppo.data.triple_files import Triple
from funcppo.ranges import FieldError

_TOLERANCE = 1e-6  # of the sum of the ratios


class Split(NamedTuple):
    """The parts of a list of triples, each in the order of the list."""

    train: list[Triple]
    valid: list[Triple]
    test: list[Triple]
    n_duplicates: int  # triples that were dropped because they repeat another


def parse_ratios(text: str) -> tuple[float, float, float]:
    """The shares of train, valid and test that a text such as 0.8,0.1,0.1 states.

    Raises:
      FieldError: not three shares from 0 to 1 that sum to 1, or no share for train.
    """
    try:
        train, valid, test = map(float, text.split(","))
    except ValueError:
        train, valid, test = 0.0, 0.0, 0.0
    has_sum = math.isclose(train + valid + test, 1, abs_tol=_TOLERANCE)
    if not has_sum or not (train > 0 and valid >= 0 and test >= 0):
        expected = (
            "shares of train, valid and test that sum to 1, as 0.8,0.1,0.1"
        )
        raise FieldError("split_ratios", expected, text)
    return train, valid, test


def split_triples(triples: Sequence[Triple], ratios: str, seed: int) -> Split:
    """Split triples at random, each distinct one into one part.

    A triple's place in the random order is a hash of the seed and its names. So the split depends neither on the order
    of the triples nor on a version of a random generator.

    Args:
      triples: the triples, in any order.
      ratios: as `parse_ratios` reads them.
      seed: seed of the random order.

    Raises:
      ValueError: a part whose share is not 0 would be empty.
    """
    shares = parse_ratios(ratios)
    distinct = list(dict.fromkeys(triples))
    n_valid, n_test = (round(share * len(distinct)) for share in shares[1:])
    sizes = (len(distinct) - n_valid - n_test, n_valid, n_test)
    for share, size in zip(shares, sizes):
        if share > 0 and size < 1:
            raise ValueError(
                f"split_ratios {ratios}: expected triples enough for each part, got {len(distinct)}"
            )

    key = str(seed).encode()

    def random_key(triple: Triple) -> bytes:
        names = "\t".join(triple).encode()
        return hashlib.blake2b(names, digest_size=16, key=key).digest()

    in_random_order = sorted(distinct, key=random_key)
    test = set(in_random_order[:n_test])
    valid = set(in_random_order[n_test : n_test + n_valid])
    held_out = test | valid
    return Split(
        train=[triple for triple in distinct if triple not in held_out],
        valid=[triple for triple in distinct if triple in valid],
        test=[triple for triple in distinct if triple in test],
        n_duplicates=len(triples) - len(distinct),
    )
