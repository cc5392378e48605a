"""What speaks for and against each candidate of a question: exact counts over the facts.

For a candidate speak the rules that derive it (`logic.derive`): each with the number of its groundings, its fan-out,
which is the number of candidates that it derives for the question, its groundings for all of these, and the
probability of a random walk along its body. For or against it speak the facts that link
it to the question's entity, how many known answers of the relation asked for it is, and its degrees by relation.

A question whose answer is a known fact leaves that fact out of everything, for all of its candidates alike: out of
groundings, degrees, links, and the supports of the rules that derive the answer. Where all facts of its pair
are left out (`left_out="pair"`), the degrees of the answer in other labels still count them.

A *label* is a predicate and a place of its arguments, see `make_label`. That of a question is its predicate and the
place that is asked for; that of a link is its predicate and the place of the candidate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from funcppo.core import random
from funcppo.core.settings import NonNegativeInt, Seed, Size, check_fields
from funcppo.core.types import F32, I64, Bool
from funcppo.kg.logic import kb as kbase
from funcppo.kg.logic import row_index
from funcppo.kg.logic.derive import (
    WALK_UNIT,
    Groundings,
    GroundingWork,
    LeftOut,
    Questions,
    RulePlan,
    candidate_atoms,
    make_label,
    map_groundings,
    own_questions,
    plan_rules,
)
from funcppo.kg.logic.kb import HEAD, TAIL, KBSizes, KnowledgeBase
from funcppo.kg.logic.row_index import (
    expand_ranges,
    find_spans,
    row_numbers,
    select_rows,
    sort_rows,
    true_rows,
    unique_inverse,
    unique_values,
    value_counts,
)
from funcppo.kg.scores import link_embedding, path_network
from funcppo.kg.scores.path_network import PathNetwork

# what the terms of that score are multiples of; a sum of half a million terms is below 2 ** 63 of it
BASE_SCORE_UNIT = 2.0**-40


class Degrees(NamedTuple):
    """Number of facts of each entity in each label, without entries of 0."""

    key: I64[Tensor, "D"]  # entity * B + label, ascending
    n_facts: I64[Tensor, "D"]


class FactIndex(NamedTuple):
    """Index of the facts and rules from which evidence is collected."""

    # degree of each entity in each label: entity * B + label, ascending
    degree_key: I64[Tensor, "D"]
    degree: I64[Tensor, "D"]
    # every fact in both orders: first entity * (C + 1) + second, ascending
    link_key: I64[Tensor, "2N"]
    link_label: I64[Tensor, "2N"]  # predicate, and the place of the second
    plan: RulePlan  # of the rules
    # trained on the facts; without models where candidates have no score by them
    embedding: link_embedding.Params
    # networks that read the facts; None where there are none
    network: PathNetwork | None = None


class Evidence(NamedTuple):
    """Candidates of questions, grouped by question, with their rule firings and links, grouped by candidate."""

    label: I64[Tensor, "Q"]
    given: I64[Tensor, "Q"]  # the question's entity
    left_out: I64[Tensor, "Q"]  # its answer that is left out, or 0
    candidate_offsets: I64[Tensor, "Q1"]
    # row of the answer that is left out; -1 if it is no candidate
    answer: I64[Tensor, "Q"]

    question: I64[Tensor, "L"]
    entity: I64[Tensor, "L"]
    # facts of the question's relation that the candidate answers
    own_degree: I64[Tensor, "L"]
    # log of the chance that the candidate was listed; 0 where it is certain
    log_listed: F32[Tensor, "L"]
    # -log(1 - noisy-or of the cubed confidences)
    base_score: F32[Tensor, "L"]
    # by link embeddings that have not seen what is left out; 0 without them
    embedding_score: F32[Tensor, "L"]
    # by a path network, to which what is left out is unknown; 0 without one
    path_score: F32[Tensor, "L"]
    firing_offsets: I64[Tensor, "L1"]
    link_offsets: I64[Tensor, "L1"]

    rule: I64[Tensor, "N"]
    # the rule derives the answer that is left out, so its support is one less
    is_left_out: Bool[Tensor, "N"]
    n_groundings: I64[Tensor, "N"]
    # candidates that the rule derives for the question
    fan_out: I64[Tensor, "N"]
    n_all_groundings: I64[Tensor, "N"]  # for all these candidates
    # probability that a random walk along the rule's body ends in the candidate; 0 where the body is no path
    walk: F32[Tensor, "N"]

    # facts that link candidate and question, those of its own label excepted
    link_label: I64[Tensor, "K"]


# the columns of evidence by what they have an entry for
QUESTION_FIELDS = ("label", "given", "left_out", "answer")
CANDIDATE_FIELDS = (
    "question",
    "entity",
    "own_degree",
    "log_listed",
    "base_score",
    "embedding_score",
    "path_score",
)
FIRING_FIELDS = (
    "rule",
    "is_left_out",
    "n_groundings",
    "fan_out",
    "n_all_groundings",
    "walk",
)


# columns of positions, by a column with an entry for each of what they count
_POSITIONS = {
    "question": "label",
    "answer": "entity",
    "candidate_offsets": "entity",
    "firing_offsets": "rule",
    "link_offsets": "link_label",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class EvidenceConfig:
    """Settings of which candidates and facts are listed as evidence."""

    left_out: LeftOut = "fact"
    """What is unknown while a question is answered: its own fact, or all facts between its two entities."""
    object_identity: bool = False
    """Different variables of a rule bind different constants, none of which the rule names."""
    with_facts: bool = True
    """Known answers are candidates too; if not, only the one that is left out."""
    n_best: Size | None = None
    """Candidates to list for each question, the best by `base_score`; None for all."""
    n_sampled: NonNegativeInt = 0
    """Candidates to list beside them, sampled from the others."""
    seed: Seed = 0
    """Of the candidates that are drawn."""

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is out of range."""
        check_fields(self)


class _Candidates(NamedTuple):
    """Candidates sorted by question and entity."""

    question: I64[Tensor, "L"]
    entity: I64[Tensor, "L"]
    is_answer: Bool[Tensor, "L"]  # that is left out


def n_labels(sizes: KBSizes) -> int:
    """Return the number of labels B, including those of the unused predicate 0."""
    return 2 * sizes.n_predicates + 2


def binary_facts(kb: KnowledgeBase) -> I64[Tensor, "N W"]:
    """Return the facts with two arguments."""
    return kbase.binary_atoms(kb.facts.long())


def count_degrees(kb: KnowledgeBase, sizes: KBSizes) -> Degrees:
    """Count the facts of two arguments of each entity by label; see `make_label`."""
    facts = binary_facts(kb)
    predicate = facts[:, 0]
    key = torch.cat(
        [
            facts[:, side] * n_labels(sizes) + make_label(predicate, side)
            for side in (HEAD, TAIL)
        ]
    )
    return Degrees(unique_values(key), value_counts(key))


def find_degrees(
    degrees: Degrees,
    sizes: KBSizes,
    entity: I64[Tensor, "n"],
    label: I64[Tensor, "n"],
) -> I64[Tensor, "n"]:
    """Return the number of facts that each entity has in the label beside it."""
    key = entity * n_labels(sizes) + label
    if not len(degrees.key):
        return torch.zeros_like(key)
    position, found = row_index.binary_search(degrees.key, key)
    return torch.where(found, degrees.n_facts[position], 0)


def index_facts(
    kb: KnowledgeBase,
    sizes: KBSizes,
    memory_share: float = 1.0,
    plan: RulePlan | None = None,
) -> FactIndex:
    """Index the degrees of all entities, the links between them, and the rules.

    Args:
      memory_share: of the largest chunks of questions whose evidence may be held at once.
      plan: `plan_rules` of these facts and rules, with whatever settings; None to make it.
    """
    if plan is None:
        plan = plan_rules(kb, sizes)
    plan = replace(plan, memory_share=memory_share, with_walks=True)
    facts = binary_facts(kb)
    predicate, head, tail = facts[:, 0], facts[:, HEAD], facts[:, TAIL]
    as_head, as_tail = make_label(predicate, HEAD), make_label(predicate, TAIL)

    # An entity is seen from the other one, so the label of a link is that of its second entity.
    first, second = torch.cat([head, tail]), torch.cat([tail, head])
    label = torch.cat([as_tail, as_head])
    key, order = row_index.sort_keys(first * (sizes.n_constants + 1) + second)
    degrees = count_degrees(kb, sizes)
    return FactIndex(
        degree_key=degrees.key,
        degree=degrees.n_facts,
        link_key=key,
        link_label=label[order],
        plan=plan,
        embedding=link_embedding.without_models(facts.device),
    )


def training_questions(
    facts: I64[Tensor, "n W"],
) -> Questions:
    """Return both questions of each fact, heads first; each question leaves its own fact out."""
    both = [own_questions(facts, side) for side in (HEAD, TAIL)]
    return row_index.concatenate(both)


def iter_evidence(
    kb: KnowledgeBase,
    sizes: KBSizes,
    facts: FactIndex,
    questions: Questions,
    cfg: EvidenceConfig,
    work: GroundingWork | None = None,
) -> Iterator[Evidence]:
    """Yield the evidence of the questions' candidates, all or a selection, in chunks that the bounds of memory allow.

    Args:
      kb: its supports and body pairs are those that confidences are computed from.
      facts: its facts.
      questions: distinct.
      work: counts the work, and says what to do with a question that is too large.
    """
    work = GroundingWork() if work is None else work
    for part in map_groundings(
        partial(_weigh_firings, kb, sizes, facts, cfg),
        facts.plan,
        questions,
        left_out=cfg.left_out,
        object_identity=cfg.object_identity,
        work=work,
        # A pass through a network holds a state of every entity for each question.
        n_threads=1 if facts.network is not None else None,
    ):
        work.n_links += len(part.link_label)
        yield part


def answers_alone(
    kb: KnowledgeBase,
    sizes: KBSizes,
    facts: FactIndex,
    questions: Questions,
    cfg: EvidenceConfig,
) -> Evidence:
    """Collect the evidence beside rules of the answers that questions leave out; its one firing of each has no meaning.

    Arguments are those of `iter_evidence`.
    """
    row = row_numbers(questions.entity)
    zero = torch.zeros_like(row)
    firings = Groundings(row, questions.left_out, zero, zero + 1, zero)
    return _weigh_firings(kb, sizes, facts, cfg, questions, firings)


def _weigh_firings(
    kb: KnowledgeBase,
    sizes: KBSizes,
    facts: FactIndex,
    cfg: EvidenceConfig,
    questions: Questions,
    firings: Groundings,
) -> Evidence:
    """Build the evidence of the candidates that rules derive, or of a selection of them."""
    base = sizes.n_constants + 1
    is_first = row_index.first_of_run(
        firings.question * base + firings.candidate
    )
    row = is_first.cumsum(0) - 1  # the candidate of each firing
    question = firings.question[is_first]
    entity = firings.candidate[is_first]
    candidates = _Candidates(
        question, entity, entity == questions.left_out[question]
    )
    is_left_out, fan_out, n_all_groundings = _count_by_rule(
        firings, candidates.is_answer[row], sizes.n_rules
    )
    base_score = _base_score(kb, firings.rule, is_left_out, row, len(entity))
    is_candidate = torch.ones_like(candidates.is_answer)
    if not cfg.with_facts:
        atoms = candidate_atoms(questions, question, entity, sizes).long()
        is_fact = kbase.contains(kb, sizes, atoms)
        is_candidate = candidates.is_answer | ~is_fact
    is_listed, log_listed = _list_candidates(
        questions, candidates, is_candidate, base_score, cfg
    )

    n_firings = torch.bincount(row, minlength=len(entity))[is_listed]
    kept = is_listed[row]
    candidates = select_rows(candidates, is_listed)
    n_links, link_label = _links_of(
        facts, questions, candidates, cfg.left_out, base
    )
    answer = torch.full_like(questions.entity, -1).scatter(
        0,
        candidates.question[candidates.is_answer],
        true_rows(candidates.is_answer),
    )
    per_question = torch.bincount(
        candidates.question, minlength=len(questions.entity)
    )
    listed = Evidence(
        label=questions.label,
        given=questions.entity,
        left_out=questions.left_out,
        candidate_offsets=row_index.offsets(per_question),
        answer=answer,
        question=candidates.question,
        entity=candidates.entity,
        own_degree=_own_degree(facts, sizes, questions, candidates),
        log_listed=log_listed[is_listed],
        base_score=base_score[is_listed],
        embedding_score=torch.zeros_like(base_score[is_listed]),
        path_score=torch.zeros_like(base_score[is_listed]),
        firing_offsets=row_index.offsets(n_firings),
        link_offsets=row_index.offsets(n_links),
        rule=firings.rule[kept],
        is_left_out=is_left_out[kept],
        n_groundings=firings.n_groundings[kept],
        fan_out=fan_out[kept],
        n_all_groundings=n_all_groundings[kept],
        walk=(firings.walk[kept].double() * WALK_UNIT).float(),
        link_label=link_label,
    )
    listed = with_embedding_scores(listed, facts.embedding, cfg.left_out)
    return with_path_scores(listed, facts.network, cfg.left_out)


def with_embedding_scores(
    evidence: Evidence, embedding: link_embedding.Params, left_out: LeftOut
) -> Evidence:
    """Return the evidence with each candidate's score by link embeddings; as it is without a model."""
    if not link_embedding.n_models(embedding):
        return evidence
    questions = questions_of(evidence)
    model = link_embedding.model_of(embedding, questions, left_out)
    row = evidence.question
    values = link_embedding.prior(
        embedding,
        model[row],
        evidence.label[row],
        evidence.given[row],
        evidence.entity,
    )
    return evidence._replace(embedding_score=values)


def with_path_scores(
    evidence: Evidence,
    network: PathNetwork | None,
    left_out: LeftOut,
) -> Evidence:
    """Return the evidence with each candidate's score by a path network; as it is without a network."""
    if network is None:
        return evidence
    values = path_network.candidate_scores(
        network,
        questions_of(evidence),
        left_out,
        evidence.candidate_offsets,
        evidence.entity,
    )
    return evidence._replace(path_score=values.float())


def questions_of(evidence: Evidence) -> Questions:
    """Return the questions that the evidence belongs to."""
    return Questions(
        predicate=evidence.label // 2,
        side=evidence.label % 2 + HEAD,
        entity=evidence.given,
        left_out=evidence.left_out,
    )


def concatenate(parts: Sequence[Evidence]) -> Evidence:
    """Concatenate the evidence of all parts, question after question."""
    return Evidence(*(_concatenate(name, parts) for name in Evidence._fields))


def _concatenate(name: str, parts: Sequence[Evidence]) -> Tensor:
    """Concatenate a column of evidence; positions count the entries of the parts before."""
    found: list[Tensor] = []
    n_before = 0
    for part in parts:
        column: Tensor = getattr(part, name)
        if name in _POSITIONS:
            # an answer that is no candidate stays -1
            column = column + n_before * (column >= 0)
            n_before += len(getattr(part, _POSITIONS[name]))
        is_repeated = name.endswith("_offsets") and bool(found)
        found.append(column[1:] if is_repeated else column)
    return torch.cat(found)


def rule_confidence(
    kb: KnowledgeBase,
    rule: I64[Tensor, "n"],
    is_left_out: Bool[Tensor, "n"],
) -> F32[Tensor, "n"]:
    """Compute the confidence of each firing's rule, without the left-out fact where the rule derives it."""
    support = (kb.support[rule] - is_left_out.float()).clamp_min(0.0)
    return support / kb.body_pairs[rule].clamp_min(1.0)


def _count_by_rule(
    firings: Groundings, is_answer: Bool[Tensor, "n"], n_rules: int
) -> tuple[Bool[Tensor, "n"], I64[Tensor, "n"], I64[Tensor, "n"]]:
    """Count, for each firing, the candidates and groundings that its rule derives for its question.

    Returns:
      Whether it derives the answer that is left out, its candidates, and its groundings for all of these.
    """
    _, pair = unique_inverse(firings.question * (n_rules + 1) + firings.rule)
    fan_out = torch.bincount(pair)
    zero = torch.zeros_like(fan_out)
    n_groundings = zero.index_add(0, pair, firings.n_groundings)
    n_answers = zero.index_add(0, pair, is_answer.long())
    return n_answers[pair] > 0, fan_out[pair], n_groundings[pair]


def _base_score(
    kb: KnowledgeBase,
    rule: Tensor,
    is_left_out: Bool[Tensor, "n"],
    row: Tensor,
    n_candidates: int,
) -> F32[Tensor, "L"]:
    """Compute -log(1 - noisy-or of the cubed confidences) of each candidate."""
    confidence = rule_confidence(kb, rule, is_left_out).double()
    chance = (confidence**3.0).clamp_max(1 - 1e-6)

    # Integers add up to the same number in any order, which a GPU does not keep.
    added = (-torch.log1p(-chance) / BASE_SCORE_UNIT).round().long()
    zero = rule.new_zeros(n_candidates, dtype=torch.int64)
    total = zero.index_add(0, row, added)
    return (total * BASE_SCORE_UNIT).float()


def _own_degree(
    facts: FactIndex,
    sizes: KBSizes,
    questions: Questions,
    candidates: _Candidates,
) -> I64[Tensor, "L"]:
    """Count the facts of its question's relation that each candidate answers, without the fact that is left out."""
    degree = find_degrees(
        Degrees(facts.degree_key, facts.degree),
        sizes,
        candidates.entity,
        questions.label[candidates.question],
    )
    return degree - candidates.is_answer.long()


def _links_of(
    facts: FactIndex,
    questions: Questions,
    candidates: _Candidates,
    left_out: LeftOut,
    base: int,
) -> tuple[I64[Tensor, "L"], I64[Tensor, "K"]]:
    """Return the number of links between each candidate and its question's entity, and the labels of all links."""
    given = questions.entity[candidates.question]
    key = given * base + candidates.entity
    start, count = find_spans(facts.link_key, key)
    if left_out == "pair":
        count = torch.where(candidates.is_answer, 0, count)
    row, position = expand_ranges(start, count)
    link_label = facts.link_label[position]

    # A fact with the label of the question makes the candidate a known answer: the one that is left out.
    # Between an entity and itself it is seen from both ends.
    label = questions.label[candidates.question][row]
    is_loop = (given == candidates.entity)[row]
    is_own = link_label == label
    is_own = is_own | (is_loop & (link_label // 2 == label // 2))
    is_other = ~is_own
    n_links = torch.bincount(row[is_other], minlength=len(key))
    return n_links, link_label[is_other]


def _list_candidates(
    questions: Questions,
    candidates: _Candidates,
    is_candidate: Bool[Tensor, "L"],
    base_score: F32[Tensor, "L"],
    cfg: EvidenceConfig,
) -> tuple[Bool[Tensor, "L"], F32[Tensor, "L"]]:
    """Choose the candidates to list: the best, a sample of the rest, and the answer that is left out.

    Returns:
      Which are listed, and the log of the chance of each to be.
    """
    question, is_answer = candidates.question, candidates.is_answer
    certain = torch.zeros_like(base_score)
    if cfg.n_best is None:
        return is_candidate, certain

    score = torch.where(is_candidate, base_score, -1.0)
    is_best = _place_in_question(question, -score) < cfg.n_best
    is_other = is_candidate & ~is_best
    priority = torch.where(
        is_other, _priority(questions, candidates, cfg.seed), 2.0
    )
    is_drawn = is_other & (
        _place_in_question(question, priority) < cfg.n_sampled
    )
    n_others = torch.zeros_like(questions.entity).index_add(
        0, question, is_other.long()
    )
    chance = (cfg.n_sampled / n_others.clamp_min(1)).clamp_max(1.0)
    is_listed = is_candidate & (is_best | is_drawn | is_answer)
    log_chance = torch.log(chance)[question]
    return is_listed, torch.where(is_drawn & ~is_answer, log_chance, certain)


def _priority(
    questions: Questions, candidates: _Candidates, seed: int
) -> F32[Tensor, "L"]:
    """Draw a random number for each candidate, keyed by its question and entity alone."""
    key = random.key(seed, questions.entity.device)
    for part in (questions.label, questions.entity, questions.left_out):
        key = random.fold_in(key, part)
    own_key = random.fold_in(key[candidates.question], candidates.entity)
    return random.uniform(own_key, ())


def _place_in_question(
    question: I64[Tensor, "L"], value: F32[Tensor, "L"]
) -> I64[Tensor, "L"]:
    """Rank each candidate, from 0, among those of its question by ascending value; ties keep their order.

    Args:
      question: ascending.
    """
    order = sort_rows(torch.argsort(value, stable=True), question)
    index = row_numbers(question)
    start = torch.searchsorted(question, question)
    return (index - start)[order.argsort()]
