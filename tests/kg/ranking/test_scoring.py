"""Every source of evidence gives a rule score the same ranks, and scores of questions rank each side."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from funcppo.core import random, tree
from funcppo.kg.config import ProverTaskConfig
from funcppo.kg.logic import derive
from funcppo.kg.logic.derive import plan_rules
from funcppo.kg.logic.kb import HEAD, TAIL
from funcppo.kg.ranking import ranking, scoring
from funcppo.kg.ranking.ranking import RankingProtocol
from funcppo.kg.scores import evidence, learned
from funcppo.kg.scores.learned import LearnedScore, Weights
from funcppo.kg.scores.score import parse
from funcppo.kg.search.task import build_task
from tests.kg.ranking.scores import score_by_name
from tests.kg.run.runs import random_graph


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "identity"])
def task(request):
    settings = ProverTaskConfig(
        max_height=1, smoothing=5.0, object_identity=request.param
    )
    return build_task(random_graph(), settings)


BOTH = RankingProtocol(sides=(HEAD, TAIL))


def parts_of(task, facts, split):
    atoms = torch.from_numpy(split)
    return {
        side: list(scoring.query_evidence(task, facts, atoms, side))
        for side in (HEAD, TAIL)
    }


def assert_same_counts(one, other):
    assert (one.counts.n_better > 0).any()
    for got, want in zip(one.counts, other.counts, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    "name",
    [
        "exists@1",
        "max-confidence",
        "noisy-or",
        "noisy-or@2",
        "noisy-or-top-2",
        "noisy-or@3-other-facts",
        "max-confidence-other-facts",
    ],
)
def test_a_rule_score_is_the_same_from_index_joins_questions_and_evidence(
    task, name, monkeypatch
):
    monkeypatch.setattr(derive, "PILOT_QUESTIONS", 2)
    facts = evidence.index_facts(task.kb, task.sizes)
    split, score, shown = task.dataset.valid, parse(name), []
    assert task.derivability_index is not None
    by_index, by_joins = (
        ranking.rank_split(t, split, score, BOTH)
        for t in (task, replace(task, derivability_index=None))
    )
    assert_same_counts(by_joins, by_index) if name != "exists@1" else None
    by_evidence, *_ = ranking.rank_by_questions(
        task, split, facts, [score], BOTH, lambda *args: shown.append(args)
    )
    for got, want in zip(by_evidence.counts, by_index.counts, strict=True):
        assert torch.equal(got, want)
    assert set(by_evidence.scored_side.tolist()) == {HEAD, TAIL}
    assert shown[0][0] == 0 and shown[-1][0] == shown[-1][1] > 0

    # Evidence that was collected before, of all queries at once.
    collected = ranking.rank_listed(
        ranking.list_split(task, split, BOTH, by_side=True),
        partial(
            scoring.score_collected, task, parts_of(task, facts, split), score
        ),
    )
    assert torch.equal(collected.log_odds, by_evidence.log_odds)

    by_question = build_task(
        task.dataset, task.cfg, with_derivations=False, by_query_if_large=True
    )
    plan = replace(
        by_question,
        answers_plan=by_question.answers_plan
        or plan_rules(by_question.kb, by_question.sizes),
    )
    assert scoring.derives_by_question(plan)
    assert_same_counts(
        ranking.rank_split(plan, split, score, BOTH), by_index
    ) if name != "exists@1" else None


def learned_score(task, facts, **changes):
    world = learned.make_world(task.kb, task.sizes, facts)
    cfg = learned.AggregationConfig(
        sizes=task.sizes, n_shapes=learned.n_shapes(world)
    )
    params = learned.init(cfg, random.key(0))
    weights = Weights(
        facts, cfg, world, params._replace(**changes), "fact", 5.0
    )
    return LearnedScore("evidence", weights)


def test_a_learnt_score_ranks_the_candidates_of_each_side(task):
    facts = evidence.index_facts(task.kb, task.sizes)
    before = learned_score(task, facts)
    weight = before.weights.params.own_degree_weight.clone()
    # For a tail, tails of three and more known facts come last.
    weight[1::2, 3:] = -100.0
    learned = learned_score(task, facts, own_degree_weight=weight)
    split = task.dataset.valid
    found = evidence.concatenate(
        [part.evidence for part in parts_of(task, facts, split)[TAIL]]
    )
    is_last = found.own_degree >= 3
    scores = learned.log_odds(scoring.QuestionCandidates(task, found))
    assert scores[is_last].max() < -50 < scores[~is_last].min()

    before, after, *others = ranking.rank_by_questions(
        task, split, facts, [before, learned, parse("noisy-or")], BOTH
    )
    changed = before.counts.n_better != after.counts.n_better
    assert changed[before.side == TAIL].any()
    assert torch.equal(before.answer_provable, after.answer_provable)
    is_low = after.log_odds < -50
    assert is_low.any() and (after.scored_side[is_low] == TAIL).all()
    alone = ranking.rank_split(task, split, learned, BOTH)
    assert torch.equal(alone.log_odds, after.log_odds)
    assert len(others) == 1


def test_kinds_of_evidence_add_up_as_scores(task):
    """In the order in which the learnt score adds them, to the last bit."""
    facts = evidence.index_facts(task.kb, task.sizes)
    generator = torch.Generator().manual_seed(0)
    whole = learned_score(task, facts)
    weights = whole.weights._replace(
        params=tree.map(
            lambda x: x + torch.randn(x.shape, generator=generator),
            whole.weights.params,
        )
    )
    whole = LearnedScore("evidence", weights)
    first, *others = (
        LearnedScore(kind, weights, [kind])
        for kind in learned.weighed_kinds(weights.cfg)
    )
    for other in others:
        first = first + other
    split = task.dataset.valid
    got, want = ranking.rank_by_questions(
        task, split, facts, [first, whole], BOTH
    )
    assert len(others) == 2 and torch.equal(got.log_odds, want.log_odds)


def test_an_atom_that_no_rule_derives_scores_nothing(task):
    facts = evidence.index_facts(task.kb, task.sizes)
    n = task.sizes.n_constants
    atoms = torch.cartesian_prod(
        torch.arange(1, 3), torch.arange(1, n + 1), torch.arange(1, n + 1)
    ).int()
    # A fact in the body of its own derivation is evidence, but proves nothing.
    is_fact = (atoms[:, None] == task.kb.facts).all(2).any(1)
    atoms = atoms[~is_fact]
    derivations = score_by_name(task, "noisy-or@3", atoms)
    is_derived = derivations > -torch.inf
    assert is_derived.any() and not is_derived.all()
    for side in (HEAD, TAIL):
        score = learned_score(task, facts)
        found = scoring.score_atoms(task, score, atoms, side)
        assert torch.equal(found > -torch.inf, is_derived)


def test_the_number_of_queries_within_a_bound(task):
    facts = evidence.index_facts(task.kb, task.sizes)
    split = task.dataset.valid

    def count(max_firings, max_rows=1e12):
        return scoring.count_queries_within(
            task, facts, split, (HEAD, TAIL), max_firings, max_rows
        ).n_queries

    n_firings = sum(
        len(part.evidence.rule)
        for side in parts_of(task, facts, split).values()
        for part in side
    )
    assert count(n_firings) == len(split)
    assert 1 <= count(n_firings // 2) <= len(split) // 2
    assert count(1) == 1
    assert count(1e12, 1) == 1
