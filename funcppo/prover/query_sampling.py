"""Which atoms are asked: filtered candidates of a ranking, and the queries that a policy is trained on.

A ranking query is a true triple and a side: `HEAD` replaces its first argument, `TAIL` its second. Its candidates are
the answer and every entity of the pool whose atom is not known to be true; the known atoms are those of *all* splits.

Axes here: Q queries, E entities of the pool, L candidates of all queries together, G draws a query.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from funcppo import random
from funcppo.logic import kb as kb_
from funcppo.logic.kb import KBSizes, KnowledgeBase
from funcppo.random import integer_from_key, unit_from_key
from funcppo.types import I64, Bool

CORRUPTION_ATTEMPTS = 8  # corruptions drawn for a negative before it counts as failed


class TrainingQueries(NamedTuple):
    """A batch of atoms to prove, with the answer key."""

    query: I64[Tensor, "B W"]
    label: Bool[Tensor, "B"]  # whether it is a train fact
    corruption_failed: Bool[
        Tensor, "B"
    ]  # was to be a negative, but every corruption drawn was a train fact; count these


def sample_training_queries(
    key: I64[Tensor, "B 2"],
    kb: KnowledgeBase,
    sizes: KBSizes,
    train: I64[Tensor, "N W"],
    hard_negatives: I64[Tensor, "H W"],
    positive_fraction: float,
    hard_negative_fraction: float,
) -> TrainingQueries:
    """A query for each key: train facts, corruptions of them that are not, and atoms from a table of hard negatives.

    A corruption replaces one argument, drawn uniformly, of a train fact, drawn uniformly, by a uniform constant; the
    first of `TRIES` that is not a fact is taken, so it is uniform over such corruptions. A row without one becomes the
    positive that its first try is, and is flagged.

    Args:
      kb: its facts are what a negative must not be among; no other split is looked at.
      train: the facts to draw from, not empty.
      hard: provable atoms that are not facts; may be empty when `hard_fraction` is 0.
      positive_fraction: probability that a row is a positive.
      hard_fraction: probability that a negative comes from `hard`.
    Errors: ValueError when a table that is drawn from is empty.
    """
    if len(train) == 0 or (len(hard_negatives) == 0 and hard_negative_fraction > 0):
        raise ValueError(
            f"want facts to draw queries from, got {len(train)} train facts and {len(hard_negatives)} hard negatives"
        )
    words = random.fold_in(key[:, None], torch.arange(4 + 3 * CORRUPTION_ATTEMPTS, device=key.device))
    positive = unit_from_key(words[:, 0]) < positive_fraction
    negative, failed = _corruption(words[:, 4:].unflatten(1, (CORRUPTION_ATTEMPTS, 3)), kb, sizes, train)
    is_hard = ~positive & (unit_from_key(words[:, 2]) < hard_negative_fraction)
    if len(hard_negatives):
        drawn = hard_negatives[integer_from_key(words[:, 3], len(hard_negatives))].to(torch.int64)
        negative = torch.where(is_hard[:, None], drawn, negative)
    failed = failed & ~positive & ~is_hard
    fact = train[integer_from_key(words[:, 1], len(train))].to(torch.int64)
    query = torch.where(positive[:, None], fact, negative)
    return TrainingQueries(query=query, label=positive | failed, corruption_failed=failed)


def _corruption(words: Tensor, kb: KnowledgeBase, sizes: KBSizes, train: Tensor) -> tuple[Tensor, Tensor]:
    """Of TRIES corruptions a row, the first that is no fact, or the first of all; and whether all are facts."""
    fact = train[integer_from_key(words[..., 0, :], len(train))].to(torch.int64)
    arity = (fact[..., 1:] > 0).sum(-1, keepdim=True)
    argument = 1 + integer_from_key(words[..., 1, :], arity[..., 0].clamp_min(1))[..., None]
    constant = 1 + integer_from_key(words[..., 2, :], sizes.n_constants)[..., None]
    column = torch.arange(fact.shape[-1], device=fact.device)
    corrupted = torch.where((column == argument) & (argument <= arity), constant, fact)
    is_fact = kb_.contains(kb, sizes, corrupted)
    chosen = (~is_fact).to(torch.int64).argmax(1)
    negative = corrupted.gather(1, chosen[:, None, None].expand(-1, 1, corrupted.shape[-1]))
    return negative[:, 0], is_fact.all(1)
