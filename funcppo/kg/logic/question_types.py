"""Questions about one argument of a binary predicate, and the rules that fire for their candidates."""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor

from funcppo.core.types import I64
from funcppo.kg.logic.triple_index import HEAD

# What is unknown while a question is answered whose answer is a known fact: that fact, or all facts that link its
# two entities.
LeftOut = Literal["fact", "pair"]
# Probabilities of walks are whole numbers of this: their sums are exact, and the same in any order.
WALK_UNIT = 2.0**-60


class Questions(NamedTuple):
    """Questions about one argument of a binary predicate, each once."""

    predicate: I64[Tensor, "Q"]
    side: I64[Tensor, "Q"]  # the argument that is asked for, HEAD or TAIL
    entity: I64[Tensor, "Q"]  # the other argument
    # the answer whose fact is left out of the facts; 0 to leave none out
    left_out: I64[Tensor, "Q"]


class Firings(NamedTuple):
    """Triples of a question, a candidate and a rule that derives it, each once."""

    question: I64[Tensor, "n"]  # row of the question
    candidate: I64[Tensor, "n"]  # the entity in the place that is asked for
    rule: I64[Tensor, "n"]  # id of the rule
    n_groundings: I64[Tensor, "n"]  # of the rule's body, at least 1
    # The probability of a random walk from the question's entity to the candidate, a number of WALK_UNIT; 0 where the
    # body is no path. Without entries where it is not asked for.
    walk: I64[Tensor, "n"]


def make_label(
    predicate: I64[Tensor, "n"], side: I64[Tensor, "n"] | int
) -> I64[Tensor, "n"]:
    """2 * predicate, plus 1 for the second argument."""
    return 2 * predicate + (side - HEAD)


def select_questions(
    questions: Questions, row: I64[Tensor, "n"] | slice
) -> Questions:
    """Some of the questions."""
    return Questions(*(column[row] for column in questions))


def select_firings(firings: Firings, row: Tensor) -> Firings:
    """Some of the firings.

    Args:
      row: their positions, or a mask.
    """
    walk = firings.walk
    return Firings(
        question=firings.question[row],
        candidate=firings.candidate[row],
        rule=firings.rule[row],
        n_groundings=firings.n_groundings[row],
        walk=walk[row] if len(walk) else walk,
    )
