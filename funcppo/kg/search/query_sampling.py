"""Training queries of the prover: which atoms it is asked to prove, and whether each of them is true.

A positive is a train fact. A negative is a corruption of a train fact that is not itself a fact, or an entry of a table
of hard negatives. `sample_training_queries` draws a batch of both.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from funcppo.core import random
from funcppo.core.random import integer_from_key, unit_from_key
from funcppo.core.types import I64, Bool
from funcppo.kg.logic import kb as kbase
from funcppo.kg.logic.kb import KBSizes, KnowledgeBase

# corruptions sampled for a negative before it counts as failed
CORRUPTION_ATTEMPTS = 8

# Positions of the random words of one query. Every use has a word of its own, so that no two uses are correlated.
_POSITIVE_WORD, _FACT_WORD, _HARD_WORD, _HARD_ROW_WORD = range(4)
_CORRUPTION_WORDS = 4  # the first of the words that the corruption attempts use
_WORDS_PER_ATTEMPT = 3  # fact, argument position, constant


class TrainingQueries(NamedTuple):
    """A batch of atoms to prove, with their labels."""

    query: I64[Tensor, "B W"]  # the atoms
    label: Bool[Tensor, "B"]  # true for a train fact
    # meant as a negative, but every corruption tried was a train fact
    corruption_failed: Bool[Tensor, "B"]


class _Corruptions(NamedTuple):
    """One corrupted train fact per row."""

    atom: I64[Tensor, "B W"]
    # all attempts were train facts, so `atom` is one too
    is_fact: Bool[Tensor, "B"]


def sample_training_queries(
    key: I64[Tensor, "B 2"],
    kb: KnowledgeBase,
    sizes: KBSizes,
    train: I64[Tensor, "N W"],
    hard_negatives: I64[Tensor, "H W"],
    positive_fraction: float,
    hard_negative_fraction: float,
) -> TrainingQueries:
    """Sample one training query for each key: a train fact, a corruption of one, or a hard negative.

    A corruption replaces one argument of a train fact by a constant; fact, argument and constant are uniform. The first
    of `CORRUPTION_ATTEMPTS` corruptions that is not a fact is taken, so the result is uniform over such corruptions. A
    row whose attempts are all facts becomes a positive, its first attempt, and is flagged.

    Args:
      key: one PRNG key per row; a row depends on no other key.
      kb: the knowledge base whose facts a negative must differ from; no other split is consulted.
      train: the facts to sample positives from and to corrupt; not empty.
      hard_negatives: provable atoms that are not facts; may be empty if `hard_negative_fraction` is 0.
      positive_fraction: probability that a row is a positive.
      hard_negative_fraction: probability that a negative comes from `hard_negatives`.

    Returns:
      query: the atoms, padded to the width of the facts.
      label: whether each is a train fact.
      corruption_failed: rows meant as negatives for which no corruption was found.

    Raises:
      ValueError: a table that rows are sampled from is empty.
    """
    if len(train) == 0 or (
        len(hard_negatives) == 0 and hard_negative_fraction > 0
    ):
        raise ValueError(
            f"expected facts to sample queries from, got {len(train)} train facts and "
            f"{len(hard_negatives)} hard negatives"
        )
    n_words = _CORRUPTION_WORDS + _WORDS_PER_ATTEMPT * CORRUPTION_ATTEMPTS
    word_index = torch.arange(n_words, device=key.device)
    words = random.fold_in(key[:, None], word_index)

    is_positive = unit_from_key(words[:, _POSITIVE_WORD]) < positive_fraction
    fact_row = integer_from_key(words[:, _FACT_WORD], len(train))
    positive = train[fact_row].to(torch.int64)

    # Every row gets a corruption and, if there are any, a hard negative; which of them counts is selected below. The
    # work is the same for all rows, so shapes stay fixed.
    attempt_words = words[:, _CORRUPTION_WORDS:].unflatten(
        1, (CORRUPTION_ATTEMPTS, _WORDS_PER_ATTEMPT)
    )
    corruption = _sample_corruptions(attempt_words, kb, sizes, train)
    negative = corruption.atom
    is_hard = ~is_positive & (
        unit_from_key(words[:, _HARD_WORD]) < hard_negative_fraction
    )
    if len(hard_negatives):
        hard_row = integer_from_key(
            words[:, _HARD_ROW_WORD], len(hard_negatives)
        )
        hard_negative = hard_negatives[hard_row].to(torch.int64)
        negative = torch.where(is_hard[:, None], hard_negative, negative)

    corruption_failed = corruption.is_fact & ~is_positive & ~is_hard
    return TrainingQueries(
        query=torch.where(is_positive[:, None], positive, negative),
        label=is_positive | corruption_failed,
        corruption_failed=corruption_failed,
    )


def _sample_corruptions(
    words: I64[Tensor, "B G 3 2"],
    kb: KnowledgeBase,
    sizes: KBSizes,
    train: I64[Tensor, "N W"],
) -> _Corruptions:
    """The first of G corruptions of each row that is not a fact, or the first of all if every one is.

    Args:
      words: the random words of each attempt: for the fact, for the argument position and for the constant.
    """
    n_columns = train.shape[1]
    fact_words, argument_words, constant_words = words.unbind(-2)
    row = integer_from_key(fact_words, len(train))
    fact = train[row].to(torch.int64)

    # Arguments are columns 1..arity; column 0 is the predicate. An atom without arguments is left as it is.
    arity = (fact[..., 1:] > 0).sum(-1)
    argument = 1 + integer_from_key(argument_words, arity.clamp_min(1))
    constant = 1 + integer_from_key(constant_words, sizes.n_constants)
    column = torch.arange(n_columns, device=fact.device)
    has_argument = (argument <= arity)[..., None]
    is_replaced = (column == argument[..., None]) & has_argument
    corrupted = torch.where(is_replaced, constant[..., None], fact)

    # `argmax` of 0/1 numbers returns the first 1, and 0 if there is none.
    is_fact = kbase.contains(kb, sizes, corrupted)
    first_negative = (~is_fact).to(torch.int64).argmax(1)
    index = first_negative[:, None, None].expand(-1, 1, n_columns)
    atom = corrupted.gather(1, index).squeeze(1)
    return _Corruptions(atom=atom, is_fact=is_fact.all(1))
