"""Ranking by a score of evidence: the scorer of `ranking`, one for each side.

The evidence of a candidate belongs to a question, so an atom has two scores: one as an answer about its head, and one
about its tail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from funcppo.evaluation import ranking
from funcppo.evaluation.candidates import RankingProtocol
from funcppo.evaluation.ranking import Ranking
from funcppo.logic.firings import Questions
from funcppo.logic.triple_index import HEAD, TAIL
from funcppo.logic.typed_torch import unique_rows
from funcppo.prover import aggregation, evidence
from funcppo.prover.aggregation import (
    AggregationConfig,
    AggregationWorld,
    Params,
)
from funcppo.prover.evidence import Evidence, EvidenceConfig, FactIndex
from funcppo.prover.task import ProverTask
from funcppo.types import F32, F64, I32, I64

# The score of every candidate of some evidence, as log-odds.
EvidenceScore = Callable[[Evidence], Tensor]


class QuestionEvidence(NamedTuple):
    """Distinct questions about one side, and their evidence."""

    questions: Questions
    evidence: Evidence


def base_score(part: Evidence) -> F64[Tensor, "L"]:
    """The log-odds of noisy-or@3, a score by confidences alone."""
    return torch.log(torch.expm1(part.base_score.double()))


def make_learned_score(
    cfg: AggregationConfig, world: AggregationWorld, params: Params
) -> EvidenceScore:
    """The score of an aggregation."""

    def score(part: Evidence) -> F32[Tensor, "L"]:
        with torch.no_grad():
            return aggregation.score(
                cfg, world, params, aggregation.whole(part)
            )

    return score


def query_evidence(
    task: ProverTask,
    facts: FactIndex,
    split: np.ndarray,
    side: int,
) -> Iterator[QuestionEvidence]:
    """Yield the evidence of all questions that the queries of a split ask about one side, some after others.

    Args:
      split: queries [Q, W].
    """
    queries = torch.from_numpy(np.ascontiguousarray(split)).long()
    queries = queries.to(task.kb.facts.device)
    rows = unique_rows(queries[:, [0, HEAD + TAIL - side]])
    predicate, given = rows.unbind(1)
    questions = Questions(
        predicate=predicate,
        side=torch.full_like(predicate, side),
        entity=given,
        left_out=torch.zeros_like(given),
    )
    start = 0
    for part in evidence.iter_evidence(
        task.kb,
        task.sizes,
        facts,
        questions,
        None,
        EvidenceConfig(object_identity=task.least_model.object_identity),
    ):
        stop = start + len(part.label)
        chunk = evidence.select_questions(questions, slice(start, stop))
        yield QuestionEvidence(chunk, part)
        start = stop


def rank_by_evidence(
    task: ProverTask,
    split: np.ndarray,
    side: int,
    parts: Sequence[QuestionEvidence] | Iterator[QuestionEvidence],
    scores: Sequence[EvidenceScore],
) -> list[Ranking]:
    """Rank the queries of a split on one side by each of some scores.

    Args:
      parts: the evidence of all questions that the queries ask, in ascending order.
    """
    base = task.sizes.n_constants + 1
    keys: list[Tensor] = []
    values: list[list[Tensor]] = [[] for _ in scores]
    for questions, part in parts:
        prefix = questions.predicate * base + questions.entity
        keys.append(prefix[part.question] * base + part.entity)
        for score, columns in zip(scores, values):
            columns.append(score(part).double())
    key = torch.cat(keys)
    protocol = RankingProtocol(sides=(side,))
    rankings: list[Ranking] = []
    for columns in values:
        scorer = _lookup_scorer(side, base, key, torch.cat(columns))
        rankings.append(ranking.rank_split(task, split, scorer, protocol))
    return rankings


def _lookup_scorer(
    side: int,
    base: int,
    key: I64[Tensor, "L"],
    value: F64[Tensor, "L"],
) -> ranking.Scorer:
    """A scorer that looks the scores of atoms up, as answers about one side."""

    def score(atoms: I32[Tensor, "n W"], /) -> F64[Tensor, "n"]:
        atom = atoms.long()
        given = atom[:, HEAD + TAIL - side]
        wanted = (atom[:, 0] * base + given) * base + atom[:, side]
        position = torch.searchsorted(key, wanted)
        assert bool((key[position] == wanted).all()), (
            "every candidate is derived"
        )
        return value[position]

    return score
