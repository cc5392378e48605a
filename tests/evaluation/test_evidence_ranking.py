"""Ranked by the confidences in its evidence, a split has the ranks that the derivations give it."""

from __future__ import annotations

import pytest
import torch

from funcppo import random
from funcppo.evaluation import evidence_ranking, ranking, scorers
from funcppo.evaluation.candidates import RankingProtocol
from funcppo.logic.triple_index import HEAD, TAIL
from funcppo.prover import aggregation, evidence
from funcppo.prover.config import ProverTaskConfig
from funcppo.prover.task import build_task
from tests.evaluation.test_settings_choice import random_graph


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "identity"])
def task(request):
    settings = ProverTaskConfig(
        max_height=1, smoothing=5.0, object_identity=request.param
    )
    return build_task(random_graph(), settings)


@pytest.mark.parametrize("side", [HEAD, TAIL])
def test_the_base_score_ranks_as_noisy_or_3(task, side, monkeypatch):
    monkeypatch.setattr(evidence, "PILOT_QUESTIONS", 2)
    facts = evidence.index_facts(task.kb, task.sizes)
    split = task.dataset.valid
    parts = evidence_ranking.query_evidence(task, facts, split, side)
    (by_evidence,) = evidence_ranking.rank_by_evidence(
        task, split, side, parts, [evidence_ranking.base_score]
    )
    by_derivations = ranking.rank_split(
        task,
        split,
        scorers.make_untrained_scorer(task, "noisy-or@3"),
        RankingProtocol(sides=(side,)),
    )
    assert (by_evidence.counts.n_better > 0).any()
    for got, want in zip(
        by_evidence.counts, by_derivations.counts, strict=True
    ):
        assert torch.equal(got, want)


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
    ranks = {}
    for side in (HEAD, TAIL):
        parts = list(evidence_ranking.query_evidence(task, facts, split, side))
        found = evidence.concatenate([part.evidence for part in parts])
        is_last = found.own_degree >= 3
        if side == TAIL:
            scores = learned(found)
            assert scores[is_last].max() < -50 < scores[~is_last].min()
        ranks[side] = evidence_ranking.rank_by_evidence(
            task, split, side, parts, [evidence_ranking.base_score, learned]
        )
    before, after = ranks[TAIL]
    assert not torch.equal(before.counts.n_better, after.counts.n_better)
    assert torch.equal(before.answer_provable, after.answer_provable)
