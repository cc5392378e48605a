"""What the other facts of a candidate add to its score, by a score that reads them, and the counts behind it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from funcppo.core.files import Json
from funcppo.core.types import I64
from funcppo.kg.graph.dataset import Dataset
from funcppo.kg.logic.derive import make_label
from funcppo.kg.logic.triple_index import SIDE_NAMES
from funcppo.kg.scores import other_facts
from funcppo.kg.search.task import ProverTask


class OtherFacts(NamedTuple):
    """How many other facts of the asked relation a candidate has on the asked side, and what that adds to its score."""

    relation: int
    side: int
    n_facts: int
    # of the facts of the relation, and of what its rules derive beside them, those that have other facts there
    share_of_facts: float
    share_of_derived: float
    log_odds: float  # that are added


def explain_answers(
    task: ProverTask, atoms: I64[Tensor, "n W"], side: int
) -> list[OtherFacts]:
    """The other facts of each of some atoms as an answer about a side.

    Args:
      task: with the counts of other facts.
      atoms: ground and of two arguments.
    """
    counts = task.other_facts
    assert counts is not None, "the score reads them"
    atoms = atoms.long().to(task.kb.facts.device)
    label = make_label(atoms[:, 0], side)
    n_facts = other_facts.count_other_facts_of(
        task.kb, task.sizes, counts.degrees, atoms, side
    )
    shares = other_facts.other_fact_shares(task.kb, counts)
    table = other_facts.log_likelihood_ratios(shares)
    columns = (
        atoms[:, 0],
        torch.full_like(label, side),
        n_facts,
        shares.of_facts[label],
        shares.of_derived[label],
        table[label, (n_facts > 0).long()],
    )
    return [
        OtherFacts(*row)
        for row in zip(*(column.tolist() for column in columns))
    ]


def to_line(dataset: Dataset, found: OtherFacts) -> str:
    """The other facts of an answer as a line of text."""
    relation = dataset.predicates[found.relation - 1]
    number = f"{found.n_facts:,}" if found.n_facts else "no"
    facts = "other fact" if found.n_facts == 1 else "other facts"
    return (
        f"{found.log_odds:+.4f} log-odds by other facts: it is the {SIDE_NAMES[found.side]} of {number} {facts} of "
        f"{relation}; {found.share_of_facts:.4f} of its facts have another one there, {found.share_of_derived:.4f} of "
        "what its rules derive beside them"
    )


def to_json(dataset: Dataset, found: OtherFacts) -> Json:
    """The other facts of an answer as JSON values."""
    return found._asdict() | {
        "relation": dataset.predicates[found.relation - 1],
        "side": SIDE_NAMES[found.side],
    }
