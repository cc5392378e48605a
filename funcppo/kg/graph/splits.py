"""Random splits of triples into train, valid and test."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from funcppo.core.settings import FieldError
from funcppo.kg.graph.triple_table import drop_duplicates

_TOLERANCE = 1e-6  # of the sum of the ratios


class Split(NamedTuple):
    """The parts of a table of triples, each in the order of the table."""

    train: np.ndarray  # int32 [n, 3]
    valid: np.ndarray
    test: np.ndarray
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


def split_triples(
    triples: np.ndarray, names: Sequence[str], ratios: str, seed: int
) -> Split:
    """Split triples at random, each distinct one into one part.

    A triple's place in the random order is a hash of the seed and its names. So the split depends neither on the order
    of the triples nor on a version of a random generator.

    Args:
      triples: int32 [n, 3], head, relation and tail as numbers of names, in any order.
      names: the names.
      ratios: as `parse_ratios` reads them.
      seed: seed of the random order.

    Raises:
      ValueError: a part whose share is not 0 would be empty.
    """
    shares = parse_ratios(ratios)
    distinct = drop_duplicates(triples)
    n_valid, n_test = (round(share * len(distinct)) for share in shares[1:])
    sizes = (len(distinct) - n_valid - n_test, n_valid, n_test)
    for share, size in zip(shares, sizes):
        if share > 0 and size < 1:
            raise ValueError(
                f"split_ratios {ratios}: expected triples enough for each part, got {len(distinct)}"
            )

    hashes = _hash_triples(distinct, names, seed)
    in_random_order = np.lexsort((hashes[:, 1], hashes[:, 0]))
    n_held_out = n_test + n_valid
    return Split(
        train=distinct[np.sort(in_random_order[n_held_out:])],
        valid=distinct[np.sort(in_random_order[n_test:n_held_out])],
        test=distinct[np.sort(in_random_order[:n_test])],
        n_duplicates=len(triples) - len(distinct),
    )


def _hash_triples(
    triples: np.ndarray, names: Sequence[str], seed: int
) -> np.ndarray:
    """A hash of the seed and the names of each triple, uint64 [n, 2], the first half more significant."""
    key = str(seed).encode()
    hashes = bytearray()
    rows: list[list[int]] = triples.tolist()
    for head, relation, tail in rows:
        text = "\t".join((names[head], names[relation], names[tail])).encode()
        hashes += hashlib.blake2b(text, digest_size=16, key=key).digest()
    return np.frombuffer(hashes, ">u8").reshape(-1, 2)
