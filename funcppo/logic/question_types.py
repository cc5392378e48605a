"""Questions about one argument of a binary predicate, and the rules that fire for their candidates."""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor

from funcppo.types import I64

# What is unknown while a question is answered whose answer is a known fact: that fact, or all facts that link its
# two entities.
LeftOut = Literal["fact", "pair"]


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


def select_questions(
    questions: Questions, row: I64[Tensor, "n"] | slice
) -> Questions:
    """Some of the questions."""
    return Questions(*(column[row] for column in questions))
