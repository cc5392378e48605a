"""Ranking by a score of evidence: scorers of `ranking`, one for each side.

The evidence of a candidate belongs to a question, so an atom has two scores: one as an answer about its head, and one
about its tail. `make_scorer` collects the evidence of what it scores; `make_scorer_of` reads evidence that
`query_evidence` has collected, for many scores of the same queries.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from funcppo.core.types import F32, F64, I32, I64
from funcppo.kg.logic import triple_index
from funcppo.kg.logic.consequences import Derivations
from funcppo.kg.logic.derive import (
    FiringWork,
    LeftOut,
    Questions,
    candidate_atoms,
    open_questions,
    select_questions,
)
from funcppo.kg.logic.kb import KBSizes
from funcppo.kg.logic.row_index import sort_keys
from funcppo.kg.logic.triple_index import HEAD, TAIL
from funcppo.kg.ranking import scorers
from funcppo.kg.ranking.ranking import Scorer, ScorerBySide
from funcppo.kg.scores import aggregation, evidence
from funcppo.kg.scores.aggregation import (
    AggregationConfig,
    AggregationWorld,
    Params,
)
from funcppo.kg.scores.evidence import Evidence, EvidenceConfig, FactIndex
from funcppo.kg.search.slot_scheduler import ProgressCallback, ignore_progress
from funcppo.kg.search.task import ProverTask, with_other_facts

# Each call of a scorer solves every rule's body, so it ranks at least as many queries.
MIN_CHUNK_QUERIES = 256
# queries whose firings tell how many queries keep within a bound
PILOT_QUERIES = 64

# The score of every candidate of some evidence, as log-odds.
EvidenceScore = Callable[[Evidence], Tensor]


class QuestionEvidence(NamedTuple):
    """Distinct questions about one side, ascending by predicate and entity, and their evidence."""

    questions: Questions
    evidence: Evidence


class QueryEstimate(NamedTuple):
    """How many queries keep within bounds."""

    n_queries: int
    # to collect their evidence, as the first of them did; many together take less
    seconds: float


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


def make_rule_score(task: ProverTask, name: str) -> EvidenceScore:
    """A score by the confidences of the rules alone, which `scorers.make_untrained_scorer` gives atoms by their rules.

    An atom that is a fact may be derived from itself here, and is not there.

    Args:
      task: with the counts of `scorers.with_score_counts`, or they are made here.
      name: `exists@1`, or a name that `scorers.rule_score` takes, each with the endings of
        `scorers.make_untrained_scorer` too.

    Raises:
      ValueError: another name.
    """
    base, has_other_facts = scorers.split_other_facts(name)
    if has_other_facts:
        task = with_other_facts(task)
        table = scorers.other_facts_table(task)
        score_of_rules = make_rule_score(task, base)

        def score_with_other_facts(part: Evidence) -> F64[Tensor, "L"]:
            label = part.label[part.question]
            added = table[label, (part.own_degree > 0).long()]
            return score_of_rules(part).double() + added

        return score_with_other_facts

    if name == "exists@1":
        return lambda part: torch.ones_like(part.base_score)
    rule_score = scorers.rule_score(name)

    def score(part: Evidence) -> F64[Tensor, "L"]:
        n_firings = part.firing_offsets.diff()
        derivations = Derivations(torch.repeat_interleave(n_firings), part.rule)
        return rule_score(task.kb, [derivations], len(part.entity))

    return score


def query_evidence(
    task: ProverTask,
    facts: FactIndex,
    atoms: Tensor,
    side: int,
    work: FiringWork | None = None,
) -> Iterator[QuestionEvidence]:
    """Yield the evidence of all questions that some atoms ask about one side, some after others.

    Args:
      facts: of the task's knowledge base.
      atoms: ground and of two arguments [n, W].
      work: counts the work; None not to count it.
    """
    queries = atoms.long().to(task.kb.facts.device)
    questions = open_questions(queries, side)
    start = 0
    for part in evidence.iter_evidence(
        task.kb,
        task.sizes,
        facts,
        questions,
        None,
        EvidenceConfig(object_identity=task.least_model.object_identity),
        work,
    ):
        stop = start + len(part.label)
        chunk = select_questions(questions, slice(start, stop))
        yield QuestionEvidence(chunk, part)
        start = stop


def evidence_atoms(
    part: QuestionEvidence, sizes: KBSizes
) -> I32[Tensor, "n W"]:
    """The atoms of the candidates that have evidence."""
    questions, listed = part
    return candidate_atoms(questions, listed.question, listed.entity, sizes)


def make_scorer(
    task: ProverTask,
    facts: FactIndex,
    score: EvidenceScore,
    on_progress: ProgressCallback = ignore_progress,
) -> ScorerBySide:
    """A scorer that collects the evidence of the questions that its atoms answer.

    Args:
      on_progress: called with the number of atoms that have a score, and of all.
    """

    def of_side(side: int) -> _SideScorer:
        def collect(atoms: Tensor) -> Iterator[QuestionEvidence]:
            return query_evidence(task, facts, atoms, side)

        base = task.sizes.n_constants + 1
        return _SideScorer(side, base, score, collect, on_progress)

    return ScorerBySide(head=of_side(HEAD), tail=of_side(TAIL))


def make_scorers(
    task: ProverTask,
    facts: FactIndex,
    scores: Sequence[EvidenceScore],
    on_progress: ProgressCallback = ignore_progress,
) -> list[ScorerBySide]:
    """Scorers of the same atoms, whose evidence is collected once: when the first of them scores."""
    shared = _SharedScores(scores)

    def of(i: int) -> ScorerBySide:
        scorer = make_scorer(task, facts, shared.all, on_progress)
        return ScorerBySide(
            head=partial(shared.score, scorer.head, HEAD, i),
            tail=partial(shared.score, scorer.tail, TAIL, i),
        )

    return [of(i) for i in range(len(scores))]


class _SharedScores:
    """The last atoms of each side with all of their scores."""

    def __init__(self, scores: Sequence[EvidenceScore]) -> None:
        self._scores = scores
        self._last: dict[int, tuple[Tensor, Tensor]] = {}

    def all(self, part: Evidence) -> F64[Tensor, "L S"]:
        """All scores of some evidence."""
        return torch.stack([score(part).double() for score in self._scores], 1)

    def score(
        self, scorer: Scorer, side: int, i: int, atoms: I32[Tensor, "n W"], /
    ) -> F64[Tensor, "n"]:
        """One of the scores of some atoms, whose evidence is collected unless they are the last ones of the side."""
        if not len(atoms):
            return torch.zeros(0, dtype=torch.float64, device=atoms.device)
        last, values = self._last.get(side, (None, None))
        if last is None or values is None or not torch.equal(last, atoms):
            values = scorer(atoms)
            self._last |= {side: (atoms, values)}
        return values[:, i].contiguous()


def make_scorer_of(
    task: ProverTask,
    parts: Mapping[int, Sequence[QuestionEvidence]],
    score: EvidenceScore,
) -> ScorerBySide:
    """A scorer of the atoms that answer the questions of collected evidence.

    Args:
      parts: by side, as `query_evidence` yields them.
    """

    def of_side(side: int) -> _SideScorer:
        base = task.sizes.n_constants + 1

        def collected(_: Tensor) -> Sequence[QuestionEvidence]:
            return parts.get(side, ())

        return _SideScorer(side, base, score, collected, ignore_progress)

    return ScorerBySide(head=of_side(HEAD), tail=of_side(TAIL))


def make_fact_scorer(
    task: ProverTask, facts: FactIndex, score: EvidenceScore, left_out: LeftOut
) -> ScorerBySide:
    """A scorer of facts, each as the answer to a question from which it is left out.

    Args:
      left_out: what such a question leaves out, as in training.
    """
    kb, sizes = task.kb, task.sizes
    known = triple_index.build_triple_index(
        evidence.binary_facts(kb), sizes.n_constants
    )
    cfg = EvidenceConfig(
        left_out=left_out, object_identity=task.least_model.object_identity
    )

    def score_side(side: int, atoms: I32[Tensor, "n W"], /) -> F64[Tensor, "n"]:
        triple = atoms.long().to(kb.facts.device)
        questions = Questions(
            predicate=triple[:, 0],
            side=torch.full_like(triple[:, 0], side),
            entity=triple[:, HEAD + TAIL - side],
            left_out=triple[:, side],
        )
        scores = [torch.zeros(0, dtype=torch.float64, device=triple.device)]
        for part in evidence.iter_evidence(
            kb, sizes, facts, questions, known, cfg
        ):
            # Row -1, of an answer that no rule derives, is the added one.
            values = torch.nn.functional.pad(
                score(part).double(), (0, 1), value=-torch.inf
            )
            scores.append(values[part.answer])
        return torch.cat(scores).to(atoms.device)

    return ScorerBySide(
        head=partial(score_side, HEAD), tail=partial(score_side, TAIL)
    )


class _SideScorer(NamedTuple):
    """Scores atoms as answers about one side; -inf where no rule derives one."""

    side: int
    base: int  # above every constant
    score: EvidenceScore
    collect: Callable[[Tensor], Iterable[QuestionEvidence]]
    on_progress: ProgressCallback

    def __call__(self, atoms: I32[Tensor, "n W"], /) -> F64[Tensor, "n"]:
        """The scores, on the device of the atoms."""
        atom = atoms.long()
        given, answer = atom[:, HEAD + TAIL - self.side], atom[:, self.side]
        question = atom[:, 0] * self.base + given
        wanted, order = sort_keys(question * self.base + answer)
        question = question[order]

        scores: Tensor | None = None
        self.on_progress(0, len(atom))
        for questions, part in self.collect(atoms):
            prefix = questions.predicate * self.base + questions.entity
            key = prefix[part.question] * self.base + part.entity
            # The atoms that answer these questions are next to each other.
            ends = torch.stack([prefix[0], prefix[-1] + 1]).to(question.device)
            start, stop = torch.searchsorted(question, ends).tolist()
            values = self.score(part).double()
            found = _look_up(key, values, wanted[start:stop].to(key.device))
            if scores is None:
                shape = (len(atom), *values.shape[1:])
                scores = torch.full(
                    shape, -torch.inf, dtype=values.dtype, device=atom.device
                )
            scores[order[start:stop]] = found.to(atom.device)
            self.on_progress(stop, len(atom))
        if scores is None:  # there are no atoms
            return torch.zeros(0, dtype=torch.float64, device=atom.device)
        return scores


def _look_up(
    key: I64[Tensor, "L"], value: F64[Tensor, "L ..."], wanted: I64[Tensor, "n"]
) -> F64[Tensor, "n ..."]:
    """The values of the keys that are wanted, or rows of values; -inf where there is none.

    Args:
      key: ascending.
    """
    if not len(key):
        return value.new_full((len(wanted), *value.shape[1:]), -torch.inf)
    position = torch.searchsorted(key, wanted).clamp_max(len(key) - 1)
    found = value[position]
    is_there = (key[position] == wanted).view(-1, *[1] * (value.dim() - 1))
    return torch.where(is_there, found, -torch.inf)


def count_queries_within(
    task: ProverTask,
    facts: FactIndex,
    queries: np.ndarray,
    sides: Sequence[int],
    max_firings: float,
    max_rows: float,
) -> QueryEstimate:
    """Estimate how many of some queries keep two bounds together, from the first of them; at least one.

    Args:
      max_firings: the most firings.
      max_rows: the most rows that the joins make for them.
    """
    start = time.monotonic()
    pilot = torch.from_numpy(np.ascontiguousarray(queries[:PILOT_QUERIES]))
    work = FiringWork()
    n_firings = sum(
        len(part.evidence.rule)
        for side in sides
        for part in query_evidence(task, facts, pilot, side, work)
    )
    share = max(n_firings / max_firings, work.n_rows / max_rows)
    n_pilot = max(len(pilot), 1)
    per_query = max(share / n_pilot, 1e-12)
    n_queries = min(len(queries), max(1, int(1 / per_query)))
    seconds = (time.monotonic() - start) * n_queries / n_pilot
    return QueryEstimate(n_queries, seconds)
