"""Evidence equals counts over Python sets, and what a question leaves out is left out for all of its candidates."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from funcppo.core import random
from funcppo.kg.config import EmbeddingConfig
from funcppo.kg.logic import derive, kb
from funcppo.kg.logic.derive import WALK_UNIT
from funcppo.kg.logic.fixpoint import count_rules, with_confidence
from funcppo.kg.logic.kb import HEAD, TAIL
from funcppo.kg.scores import evidence, link_embedding
from funcppo.kg.scores.evidence import EvidenceConfig
from tests.kg.logic import test_derive
from tests.oracles import Program, programs

PARENT, KNOWS = 1, 2
X, Y, Z = 8, 9, 10
# knows(X, Y) <- knows(Y, X).  knows(X, Y) <- parent(X, Y).  knows(X, Y) <- knows(X, Z), knows(Z, Y).
VILLAGE = Program(
    7,
    (2, 2),
    (
        *((PARENT, 1, i) for i in (2, 3)),
        *((KNOWS, i, j) for i, j in ((1, 2), (2, 1), (2, 4), (3, 4), (4, 1))),
    ),
    (
        ((KNOWS, X, Y), (KNOWS, Y, X)),
        ((KNOWS, X, Y), (PARENT, X, Y)),
        ((KNOWS, X, Y), (KNOWS, X, Z), (KNOWS, Z, Y)),
    ),
)


def build(program, **options):
    built, sizes = kb.build(**program.arrays())
    built = with_confidence(built, count_rules(built, sizes), smoothing=5.0)
    return built, sizes, evidence.index_facts(built, sizes, **options)


def collect(program, questions, cfg=EvidenceConfig()):  # noqa: B008
    return collect_from(build(program), questions, cfg)


def collect_from(base, questions, cfg=EvidenceConfig()):  # noqa: B008
    assume(len(questions.predicate))
    parts = evidence.iter_evidence(*base, questions, cfg)
    return evidence.concatenate(list(parts))


def firings_of(found):
    """{(question, candidate, rule): (groundings, fan-out, all groundings)}."""
    n_firings = torch.diff(found.firing_offsets)
    row = torch.repeat_interleave(n_firings)
    columns = lambda *several: zip(*(x.tolist() for x in several))
    keys = columns(found.question[row], found.entity[row], found.rule)
    counts = found.n_groundings, found.fan_out, found.n_all_groundings
    return dict(zip(keys, columns(*counts), strict=True))


@given(programs)
def test_counts_are_those_of_sets(program):
    rows = test_derive.all_questions(program)
    groundings = test_derive.brute_force(program, rows)
    fan_out: Counter = Counter((q, r) for q, _, r in groundings)
    total: Counter = Counter()
    for (q, _, r), count in groundings.items():
        total[q, r] += count
    found = firings_of(collect(program, test_derive.ask_all(rows)))
    assert found.keys() == groundings.keys()
    for (q, c, r), counts in found.items():
        assert counts == (groundings[q, c, r], fan_out[q, r], total[q, r])


@given(programs)
def test_links_and_degrees_leave_the_fact_of_the_question_out(program):
    rows = test_derive.all_questions(program)
    found = collect(program, test_derive.ask_all(rows))
    labels = found.link_label.split(torch.diff(found.link_offsets).tolist())
    for i, candidate in enumerate(found.entity.tolist()):
        predicate, side, entity, left_out = rows[int(found.question[i])]
        place = {HEAD: 0, TAIL: 1}[side]
        links = [
            2 * p + seen_at
            for p, *pair in program.facts
            if len(pair) == 2
            for seen_at in (0, 1)
            if pair[seen_at] == candidate and pair[1 - seen_at] == entity
        ]
        # The fact of a candidate that is the question's entity has both places.
        own = {2 * predicate + place}
        if candidate == entity:
            own |= {2 * predicate, 2 * predicate + 1}
        known = [label for label in links if label not in own]
        assert sorted(labels[i].tolist()) == sorted(known)
        with_place = [
            (fact[0], *fact[1 + place : 2 + place]) for fact in program.facts
        ]
        degree = with_place.count((predicate, candidate))
        assert int(found.own_degree[i]) == degree - (candidate == left_out)


def test_the_answer_that_is_left_out_lowers_the_support_of_its_rules():
    # Who knows person 1? Left out: 4 does. Rule 0 derives 2, rule 2 derives 1 from knows(1, 2), knows(2, 1).
    found = collect(VILLAGE, test_derive.ask_all([(KNOWS, HEAD, 1, 4)]))
    assert found.entity.tolist() == [1, 2]
    assert not found.is_left_out.any() and found.answer.tolist() == [-1]

    # Left out: 2 knows 1, which rule 0 derives from knows(1, 2), and rule 2 from knows(2, 4), knows(4, 1).
    found = collect(VILLAGE, test_derive.ask_all([(KNOWS, HEAD, 1, 2)]))
    assert found.entity.tolist() == [2, 3]
    assert found.answer.tolist() == [0]
    assert found.rule.tolist() == [0, 2, 2]
    assert found.is_left_out.all()  # for every candidate alike
    built, _, _ = build(VILLAGE)
    plain, without = (
        evidence.rule_confidence(built, found.rule, torch.tensor([flag] * 3))
        for flag in (False, True)
    )
    pairs = built.body_pairs[found.rule]
    torch.testing.assert_close(plain - without, 1 / pairs)


def test_a_pair_that_is_left_out_has_no_links():
    questions = test_derive.ask_all([(KNOWS, TAIL, 1, 2)])
    fact = collect(VILLAGE, questions)
    assert fact.entity.tolist() == [2, 3, 4]
    # parent(1, 2) and knows(2, 1), parent(1, 3), knows(4, 1)
    assert torch.diff(fact.link_offsets).tolist() == [2, 1, 1]
    labels = sorted([2 * PARENT + 1, 2 * KNOWS] * 2)
    assert sorted(fact.link_label.tolist()) == labels
    pair = collect(VILLAGE, questions, EvidenceConfig(left_out="pair"))
    assert pair.entity.tolist() == [3, 4]


def test_the_best_candidates_are_listed_and_a_sample_of_the_others():
    questions = test_derive.ask_all([(KNOWS, TAIL, 2, 0), (KNOWS, TAIL, 3, 0)])
    every = collect(VILLAGE, questions)
    unknown = collect(VILLAGE, questions, EvidenceConfig(with_facts=False))
    pairs = torch.stack([questions.entity[every.question], every.entity], 1)
    n_known = sum((KNOWS, *pair) in VILLAGE.facts for pair in pairs.tolist())
    assert len(unknown.entity) == len(every.entity) - n_known > 0

    best = collect(VILLAGE, questions, EvidenceConfig(n_best=1))
    for question in (0, 1):
        mine = every.base_score[every.question == question]
        assert float(best.base_score[best.question == question]) == mine.max()
    sampled = collect(VILLAGE, questions, EvidenceConfig(n_best=1, n_sampled=1))
    n_listed = torch.bincount(sampled.question)
    n_all = torch.bincount(every.question)
    assert n_listed.tolist() == n_all.clamp_max(2).tolist()
    chance = sampled.log_listed.exp()
    for question in (0, 1):
        mine = chance[sampled.question == question]
        expected = (1 / (n_all[question] - 1)).clamp_max(1.0)
        assert float(mine.min()) == pytest.approx(float(expected))


@given(programs, st.booleans(), st.sampled_from([None, 1]))
def test_walks_are_those_of_firings(program, identity, n_best):
    rows = test_derive.all_questions(program)
    cfg = EvidenceConfig(object_identity=identity, n_best=n_best)
    found = collect(program, test_derive.ask_all(rows), cfg)
    units = test_derive.walks(program, rows, object_identity=identity)
    expected = {key: n * WALK_UNIT for key, n in units.items()}
    keys = firings_of(found)
    for key, walk in zip(keys, found.walk.tolist(), strict=True):
        assert walk == pytest.approx(expected.pop(key), rel=1e-6)  # float32
    assert n_best or not expected


@pytest.mark.parametrize(
    "cfg", [EvidenceConfig(), EvidenceConfig(n_best=1, n_sampled=1, seed=3)]
)
def test_parts_are_the_whole(cfg):
    """Candidates that are sampled are the same, too."""
    rows = test_derive.all_questions(VILLAGE)
    built, sizes, facts = build(VILLAGE)
    whole = collect(VILLAGE, test_derive.ask_all(rows), cfg)
    assert len(whole.walk) == len(whole.rule)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(derive, "PILOT_QUESTIONS", 2)
        patch.setattr(derive, "MAX_CHUNK_GROUNDINGS", 5)
        asked = test_derive.ask_all(rows)
        parts = [*evidence.iter_evidence(built, sizes, facts, asked, cfg)]
    assert len(parts) > 2
    joined = evidence.concatenate(parts)
    for name, column in whole._asdict().items():
        assert torch.equal(getattr(joined, name), column), name


def test_the_base_score_is_noisy_or_of_the_cubed_confidences():
    built, _, _ = build(VILLAGE)
    found = collect(VILLAGE, test_derive.ask_all([(KNOWS, TAIL, 1, 0)]))
    confidence = (built.support / built.body_pairs).tolist()
    bounds = found.firing_offsets.tolist()
    for row, score in enumerate(found.base_score.tolist()):
        rules = found.rule[bounds[row] : bounds[row + 1]].tolist()
        wrong = math.prod(1 - confidence[rule] ** 3 for rule in rules)
        assert score == pytest.approx(-math.log(wrong), rel=1e-5) and score > 0


def test_priors_come_from_models_that_have_not_seen_the_fact():
    built, sizes, facts = build(VILLAGE)
    cfg, n_labels = EmbeddingConfig(rank=2, n_folds=3), evidence.n_labels(sizes)
    shape = sizes.n_constants, n_labels
    embedding = link_embedding.init(cfg, *shape, random.key(0))
    asked = evidence.training_questions(evidence.binary_facts(built))
    plain, found = (
        collect_from((built, sizes, indexed), asked)
        for indexed in (facts, facts._replace(embedding=embedding))
    )
    model = link_embedding.model_of(embedding, asked, "fact")
    assert len(model.unique()) > 1
    row = found.question
    expected = link_embedding.prior(
        embedding, model[row], found.label[row], asked.entity[row], found.entity
    )
    assert len(row) and torch.equal(found.embedding_score, expected)

    # Scores that are added afterwards are the same.
    assert not plain.embedding_score.any()
    added = evidence.with_embedding_scores(plain, embedding, "fact")
    assert torch.equal(added.embedding_score, found.embedding_score)


def test_both_questions_of_a_fact_leave_it_out():
    facts = torch.tensor([[KNOWS, 1, 2]])
    found = evidence.training_questions(facts)
    rows = list(zip(*(column.tolist() for column in found)))
    assert rows == [(KNOWS, HEAD, 2, 1), (KNOWS, TAIL, 1, 2)]
