"""What an untrained policy ranks by, and that ways of scoring that skip the search agree with it."""

import pytest
import torch

from funcppo import train_step
from funcppo.core import random
from funcppo.kg.logic import fixpoint
from funcppo.kg.ranking import ranking, scoring
from funcppo.kg.ranking.ranking import RankingProtocol
from funcppo.kg.ranking.scoring import PolicyScore, search_config
from funcppo.kg.scores import rules
from funcppo.kg.scores.score import parse
from funcppo.kg.search import env as prover_env
from funcppo.kg.search import task as prover_task
from funcppo.kg.search.beam import log_odds, score_candidates
from funcppo.kg.search.env import PROVED, RUNNING
from tests.kg.ranking.scores import FunctionScore
from tests.kg.search.small_tasks import PPO, perturbed, small_task


@pytest.mark.parametrize("name", ["family_tree:120:3", "countries_s1"])
def test_an_untrained_policy_ranks_by_best_proof_as_max_confidence_does(name):
    """Height 1. Candidates of one query are ordered alike: no pair is strictly one way here and the other there."""
    task = small_task(name, max_height=1, hard_negative_fraction=0.0)
    cfg = prover_task.build_config(task, PPO)
    params = train_step.init(
        cfg, prover_task.training_world(task), random.key(0)
    ).params
    how = search_config(
        task,
        cfg,
        "best-proof",
        slots=8,
        beam=64,
        rows_per_step=64,
        chunk_size=64,
    )
    scores = PolicyScore(how, task, params, None), parse("max-confidence")
    mine, theirs = (
        ranking.rank_split(
            task,
            task.dataset.test[:80],
            score,
            RankingProtocol(),
        )
        for score in scores
    )
    assert torch.equal(mine.counts.n_better, theirs.counts.n_better)
    assert torch.equal(mine.counts.n_equal, theirs.counts.n_equal)
    assert int(mine.counts.n_better.sum()) + int(mine.counts.n_equal.sum()) > 0


def test_the_rules_that_apply_give_the_best_proof_that_search_finds():
    task = small_task(
        "family_tree:120:3",
        max_height=1,
        hard_negative_fraction=0.0,
        fact_selection="policy",
    )
    cfg = prover_task.build_config(task, PPO)
    params = train_step.init(
        cfg, prover_task.training_world(task), random.key(0)
    ).params
    params = perturbed(params)
    how = search_config(
        task,
        cfg,
        "best-proof",
        slots=8,
        beam=64,
        rows_per_step=64,
        chunk_size=64,
    )
    atoms = torch.unique(torch.from_numpy(task.dataset.test[:60]), dim=0)
    score = PolicyScore(how, task, params, None)
    quick = scoring.score_atoms(task, score, atoms, 0)
    searched = score_candidates(
        how, prover_task.inference_world(task), params, atoms
    )[0]
    torch.testing.assert_close(
        quick, log_odds(how, searched), rtol=0, atol=1e-5
    )
    assert torch.isfinite(quick).any()


def test_with_the_oracle_success_is_the_sum_over_the_rules_that_derive():
    """And greedy is the most probable choice alone, at a price unless it derives the atom."""
    task = small_task(
        "family_tree:120:3", max_height=1, hard_negative_fraction=0.0
    )
    cfg = prover_task.build_config(task, PPO)
    params = train_step.init(
        cfg, prover_task.training_world(task), random.key(0)
    ).params
    params = perturbed(params)
    atoms = torch.unique(torch.from_numpy(task.dataset.test[:40]), dim=0).to(
        torch.int32
    )
    world = prover_task.training_world(task)
    state = prover_env.initial_state(
        cfg.env.cfg, world, atoms, torch.ones(len(atoms), dtype=torch.bool)
    )
    policy = torch.softmax(
        cfg.agent.apply(
            cfg.agent.cfg,
            world,
            params,
            prover_env.observe(cfg.env.cfg, world, state),
        )[0],
        1,
    )
    success, greedy = torch.zeros(len(atoms)), policy.amax(1).log()
    for s in range(policy.shape[1]):
        keys = torch.zeros((len(atoms), 2), dtype=torch.int64)
        after, _ = prover_env.step_functional(
            cfg.env.cfg, world, state, torch.full((len(atoms),), s), keys
        )
        assert (after.status != RUNNING).all()
        success += torch.where(after.status == PROVED, policy[:, s], 0.0)
        greedy += torch.where(
            (policy.argmax(1) == s) & (after.status != PROVED), -100.0, 0.0
        )
    for score, want in (
        ("success", success.double().logit()),
        ("greedy", rules.log_odds(greedy)),
    ):
        how = search_config(
            task, cfg, score, slots=8, beam=64, rows_per_step=64, chunk_size=16
        )
        got = scoring.score_atoms(
            task, PolicyScore(how, task, params, None), atoms, 0
        )
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    assert torch.isfinite(success.log()).any() and (greedy < -50).any()


def test_listing_provable_candidates_ranks_as_scoring_every_one():
    task = small_task(
        "family_tree:60:1", max_height=1, hard_negative_fraction=0.0
    )

    def everywhere(atoms):
        found = fixpoint.iter_derivations(
            task.kb, task.sizes, task.least_model, 1, atoms
        )
        return rules.noisy_or(task.kb, found, len(atoms))

    some, every = (
        ranking.rank_split(
            task,
            task.dataset.test[:20],
            s,
            RankingProtocol(score_unprovable=whole),
        )
        for s, whole in (
            (parse("noisy-or"), False),
            (FunctionScore(everywhere), True),
        )
    )
    assert len(every.scored_atom) > len(some.scored_atom)
    for a, b in zip(some.counts, every.counts):
        assert torch.equal(a, b)
    assert ranking.auc_pr(some) == pytest.approx(
        ranking.auc_pr(every), abs=1e-12
    )
