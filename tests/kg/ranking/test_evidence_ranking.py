"""Ranked by the confidences in its evidence, a split has the ranks that the derivations give it."""

from __future__ import annotations

import pytest
import torch

from funcppo.core import random
from funcppo.kg.logic import derive, fixpoint
from funcppo.kg.logic.triple_index import HEAD, TAIL
from funcppo.kg.ranking import evidence_ranking, ranking, scorers
from funcppo.kg.ranking.candidates import RankingProtocol
from funcppo.kg.scores import aggregation, evidence
from funcppo.kg.search.config import ProverTaskConfig
from funcppo.kg.search.task import build_task
from tests.kg.run.test_choices import random_graph


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
        side: list(evidence_ranking.query_evidence(task, facts, atoms, side))
        for side in (HEAD, TAIL)
    }


def test_the_base_score_ranks_as_noisy_or_3(task, monkeypatch):
    monkeypatch.setattr(derive, "PILOT_QUESTIONS", 2)
    facts = evidence.index_facts(task.kb, task.sizes)
    split = task.dataset.valid
    shown = []
    scorer = evidence_ranking.make_scorer(
        task,
        facts,
        evidence_ranking.base_score,
        lambda *args: shown.append(args),
    )
    by_evidence = ranking.rank_split(task, split, scorer, BOTH)
    by_derivations = ranking.rank_split(
        task, split, scorers.make_untrained_scorer(task, "noisy-or@3"), BOTH
    )
    assert (by_evidence.counts.n_better > 0).any()
    for got, want in zip(
        by_evidence.counts, by_derivations.counts, strict=True
    ):
        assert torch.equal(got, want)
    assert shown[0][0] == 0 and shown[-1][0] == shown[-1][1] > 0
    assert set(by_evidence.scored_side.tolist()) == {HEAD, TAIL}

    parts = parts_of(task, facts, split)
    of_parts = evidence_ranking.make_scorer_of(
        task, parts, evidence_ranking.base_score
    )
    again = ranking.rank_split(task, split, of_parts, BOTH)
    assert torch.equal(again.log_odds, by_evidence.log_odds)


@pytest.mark.parametrize(
    "name",
    [
        "max-confidence",
        "noisy-or",
        "noisy-or@2",
        "noisy-or@3-other-facts",
        "max-confidence-other-facts",
    ],
)
def test_a_rule_score_is_that_of_the_derivations(task, name):
    facts = evidence.index_facts(task.kb, task.sizes)
    split = task.dataset.valid
    is_fact = fixpoint.atom_height(
        task.least_model, torch.from_numpy(split).long()
    )
    assert not (is_fact == 0).any()
    by_evidence, by_derivations = (
        ranking.rank_split(task, split, scorer, BOTH)
        for scorer in (
            evidence_ranking.make_scorer(
                task, facts, evidence_ranking.make_rule_score(task, name)
            ),
            scorers.make_untrained_scorer(task, name),
        )
    )
    for got, want in zip(
        by_evidence.counts, by_derivations.counts, strict=True
    ):
        assert torch.equal(got, want)
    assert (by_evidence.counts.n_better > 0).any()


def test_a_learnt_score_ranks_the_candidates_of_each_side(task):
    facts = evidence.index_facts(task.kb, task.sizes)
    world = aggregation.make_world(task.kb, task.sizes, facts)
    cfg = aggregation.AggregationConfig(
        sizes=task.sizes, n_shapes=aggregation.n_shapes(world)
    )
    params = aggregation.init(cfg, random.key(0))
    weight = params.own_degree_weight.clone()
    # For a tail, tails of three and more known facts come last.
    weight[1::2, 3:] = -100.0
    learned = evidence_ranking.make_learned_score(
        cfg, world, params._replace(own_degree_weight=weight)
    )
    split = task.dataset.valid
    parts = parts_of(task, facts, split)
    found = evidence.concatenate([part.evidence for part in parts[TAIL]])
    is_last = found.own_degree >= 3
    scores = learned(found)
    assert scores[is_last].max() < -50 < scores[~is_last].min()

    before, after = (
        ranking.rank_split(
            task,
            split,
            evidence_ranking.make_scorer_of(task, parts, score),
            BOTH,
        )
        for score in (evidence_ranking.base_score, learned)
    )
    changed = before.counts.n_better != after.counts.n_better
    assert changed[before.side == TAIL].any()
    assert torch.equal(before.answer_provable, after.answer_provable)
    is_low = after.log_odds < -50
    assert is_low.any() and (after.scored_side[is_low] == TAIL).all()


def test_an_atom_that_no_rule_derives_scores_nothing(task):
    facts = evidence.index_facts(task.kb, task.sizes)
    scorer = evidence_ranking.make_scorer(
        task, facts, evidence_ranking.base_score
    )
    n = task.sizes.n_constants
    atoms = torch.cartesian_prod(
        torch.arange(1, 3), torch.arange(1, n + 1), torch.arange(1, n + 1)
    ).int()
    # A fact in the body of its own derivation is evidence, but proves nothing.
    is_fact = (atoms[:, None] == task.kb.facts).all(2).any(1)
    atoms = atoms[~is_fact]
    derivations = scorers.make_untrained_scorer(task, "noisy-or@3")(atoms)
    is_derived = derivations > -torch.inf
    assert is_derived.any() and not is_derived.all()
    for side in (HEAD, TAIL):
        assert torch.equal(scorer.of(side)(atoms) > -torch.inf, is_derived)


def test_the_number_of_queries_within_a_bound(task):
    facts = evidence.index_facts(task.kb, task.sizes)
    split = task.dataset.valid

    def count(max_firings, max_rows=1e12):
        return evidence_ranking.count_queries_within(
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


def test_scorers_of_the_same_atoms_collect_their_evidence_once(
    task, monkeypatch
):
    facts = evidence.index_facts(task.kb, task.sizes)
    split = task.dataset.valid
    scores = [evidence_ranking.base_score, lambda part: -part.base_score]
    asked = []
    collect = evidence_ranking.query_evidence

    def count(task, facts, atoms, side):
        asked.append(side)
        return collect(task, facts, atoms, side)

    monkeypatch.setattr(evidence_ranking, "query_evidence", count)
    shared = evidence_ranking.make_scorers(task, facts, scores)
    got = [ranking.rank_split(task, split, s, BOTH).log_odds for s in shared]
    assert sorted(asked) == [HEAD, TAIL]
    for score, log_odds in zip(scores, got, strict=True):
        scorer = evidence_ranking.make_scorer(task, facts, score)
        alone = ranking.rank_split(task, split, scorer, BOTH)
        assert torch.equal(log_odds, alone.log_odds)
    # Other atoms are collected anew.
    no_atoms = torch.zeros((0, 3), dtype=torch.int32)
    assert shared[1].head(no_atoms).shape == (0,)
    fewer = ranking.rank_split(task, split[:1], shared[1], BOTH)
    alone = ranking.rank_split(task, split[:1], scorer, BOTH)
    assert torch.equal(fewer.log_odds, alone.log_odds)
