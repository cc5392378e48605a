"""The prover as an environment and a policy: the laws of proof search, and what an untrained policy ranks by."""

import dataclasses
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from funcppo import data, random, train_step, tree
from funcppo.config import PPOConfig
from funcppo.envs.base import sample_reset, step_with_autoreset
from funcppo.evaluation import explain, ranking
from funcppo.evaluation import scorers as scorers_
from funcppo.evaluation.ranking import RankingProtocol
from funcppo.evaluation.slot_scheduler import evaluate_step, init_scheduler, score_candidates
from funcppo.logic import baselines, fixpoint
from funcppo.logic.resolve import Goals
from funcppo.prover import env as prover_env
from funcppo.prover import network as net
from funcppo.prover import task as prover_task
from funcppo.prover.config import ProverTaskConfig
from funcppo.prover.env import ENDED, EXHAUSTED, FAILED, PROVED, RUNNING
from funcppo.types import check_shapes_and_dtypes

PPO = PPOConfig(n_envs=8, n_steps=6, n_epochs=1, n_minibatches=2)
SETTINGS = ProverTaskConfig(max_height=2, max_depth=5, embed_dim=4, hidden_dim=8, hard_negative_fraction=0.3)


@cache
def ready(name: str = "countries_s2", **fields):
    return prover_task.build_task(data.load(name), dataclasses.replace(SETTINGS, **fields))


@cache
def learning(**fields):
    made = ready(**fields)
    cfg = prover_task.build_config(made, PPO)
    return cfg, prover_task.training_world(made), train_step.init(cfg, prover_task.training_world(made), random.key(1))


def test_a_problem_lies_on_the_device_asked_for_as_a_whole():
    made = prover_task.build_task(data.load("countries_s2"), SETTINGS, "meta")
    model = made.least_model.atoms, made.least_model.height, made.least_model.atom_index
    tensors = tree.leaves((made.kb, made.derivability_index, made.filter_index, made.entity_pool, model))
    assert {tensor.device.type for tensor in tensors} == {"meta"}


def searches(seed: int, steps: int):
    """A batch of searches after some random legal actions, END among them."""
    cfg, world, _ = learning()
    key, reset_key = random.split(random.key(seed)).unbind()
    state = prover_env.reset(cfg.env.cfg, world, random.split(reset_key, 8))
    for t in range(steps):
        action_key, step_key = random.split(random.fold_in(key, t)).unbind()
        mask = prover_env.observe(cfg.env.cfg, world, state).action_mask
        action = random.categorical(action_key, torch.where(mask, 0.0, -1e9))
        state, _ = prover_env.step_functional(cfg.env.cfg, world, state, action, random.split(step_key, 8))
    return cfg.env.cfg, world, state


@given(st.integers(0, 10_000))
@settings(max_examples=20, deadline=None)
def test_finished_rows_stay_as_they_are_and_are_paid_nothing(seed):
    cfg, world, state = searches(seed, 3)
    after, timestep = prover_env.step_functional(
        cfg, world, state, torch.zeros(8, dtype=torch.int64), random.split(random.key(0), 8)
    )
    done = state.status != RUNNING
    for old, new in zip(tree.leaves(state), tree.leaves(after)):
        assert torch.equal(old[done], new[done])
    assert (timestep.reward[done] == 0).all()
    assert timestep.terminated[done].all()


@given(st.integers(0, 10_000))
@settings(max_examples=20, deadline=None)
def test_a_status_says_how_the_path_ended(seed):
    cfg, _, state = searches(seed, 6)
    empty = state.goals.atoms[:, 0, 0] == 0
    assert torch.equal(empty, state.status == PROVED)
    assert not state.successors.mask[state.status == FAILED].any()
    assert (state.depth[state.status == EXHAUSTED] == cfg.max_depth).all()
    assert (state.status != RUNNING).all() or (state.depth < cfg.max_depth)[state.status == RUNNING].all()
    assert not state.overflow.any()


@given(st.integers(0, 10_000), st.integers(0, 5))
@settings(max_examples=20, deadline=None)
def test_a_step_and_a_restart_at_once_equal_one_after_the_other(seed, steps):
    cfg, world, state = searches(seed, steps)
    step_keys, reset_keys = random.split(random.split(random.key(seed)), 8)
    env = prover_env.environment(cfg)
    args = (
        world,
        state,
        torch.arange(8) % (cfg.resolve.max_successors + 1),
        step_keys,
        sample_reset(env, world, reset_keys),
    )
    once, apart = (
        step_with_autoreset(env, *args),
        step_with_autoreset(dataclasses.replace(env, step_with_autoreset=None), *args),
    )
    assert env.step_with_autoreset is not None and tree.paths(once) == tree.paths(apart)
    for a, b in zip(tree.leaves(once), tree.leaves(apart)):
        assert a.dtype == b.dtype and torch.equal(a, b)


def test_an_illegal_action_counts_as_end():
    cfg, world, state = searches(5, 0)
    illegal = (~state.successors.mask).int().argmax(1)
    assert not state.successors.mask.gather(1, illegal[:, None]).any()
    after, _ = prover_env.step_functional(cfg, world, state, illegal, random.split(random.key(0), 8))
    assert (after.status == ENDED).all()


@given(st.integers(0, 10_000))
@settings(max_examples=20, deadline=None)
def test_heights_fall_along_a_path_so_no_state_recurs(seed):
    """Sorted from the highest, the numbers of goals still allowed above each goal fall lexicographically."""
    cfg, _, before = searches(seed, 0)

    def measure(goals, b):
        filled = goals.atoms[b, :, 0] > 0
        return sorted((cfg.resolve.max_height - goals.height[b][filled]).tolist(), reverse=True)

    for b in range(8):
        for s in before.successors.mask[b].nonzero().flatten().tolist():
            child = tree.map(lambda x, s=s: x[:, s], before.successors.goals)
            assert measure(child, b) < measure(before.goals, b)


@pytest.mark.parametrize(
    ("reward", "want"),
    [("proof", [1.0, 0.0, 0.0, 0.0]), ("signed", [1.0, 0.0, -1.0, 0.0]), ("balanced", [1.0, -1.0, -1.0, 0.25])],
)
def test_rewards_are_those_of_their_names(reward, want):
    """A positive proved and missed, a negative proved and rejected, at four negatives a positive."""
    cfg = dataclasses.replace(learning()[0].env.cfg, reward=reward, negatives_per_positive=4.0)
    proved, label = torch.tensor([True, False, True, False]), torch.tensor([True, True, False, False])
    assert prover_env.terminal_reward(cfg, proved, label).tolist() == want


def test_states_observations_and_params_have_the_shapes_they_say():
    cfg, world, state = learning()
    sizes = check_shapes_and_dtypes(state.env_state)
    assert sizes["B"] == 8
    check_shapes_and_dtypes(prover_env.observe(cfg.env.cfg, world, state.env_state))
    check_shapes_and_dtypes(state.params)
    check_shapes_and_dtypes(world.kb)


def test_the_first_state_lies_in_memory_as_later_ones_do():
    """Else a compiled rollout step is compiled twice: for the first state, and for all others."""
    leaves = tree.leaves(learning()[2].env_state)
    assert all(x.is_contiguous() for x in leaves)
    assert len({x.untyped_storage().data_ptr() for x in leaves}) == len(leaves)


def _step(cfg, world, state):
    action, keys = torch.zeros(8, dtype=torch.int64), random.split(state.key, 8)
    return prover_env.step_functional, (cfg.env.cfg, world, state.env_state, action, keys)


def _observe(cfg, world, state):
    return prover_env.observe, (cfg.env.cfg, world, state.env_state)


def _apply(cfg, world, state):
    return cfg.agent.apply, (
        cfg.agent.cfg,
        world,
        state.params,
        prover_env.observe(cfg.env.cfg, world, state.env_state),
    )


def _evaluation(cfg, world, state):
    how = scorers_.search_config(ready(), cfg, "success", slots=3, beam=4, rows_per_step=8, chunk_size=9)
    how = dataclasses.replace(how, agent=net.agent(dataclasses.replace(cfg.agent.cfg, capacity=20)))
    table = torch.cat([ready().kb.facts[:9], torch.zeros_like(ready().kb.facts[:1])])
    return evaluate_step, (how, world, state.params, table, init_scheduler(how, table))


@pytest.mark.parametrize("case", [_step, _observe, _apply, _evaluation])
def test_it_compiles_whole_equals_eager_and_writes_to_no_argument(case):
    """One graph by aot_eager; floats within 1e-5, the rest equal."""
    fn, args = case(*learning())
    versions = [x._version for x in tree.leaves(args[1:])]
    want = fn(*args)
    got = torch.compile(fn, fullgraph=True, dynamic=False, backend="aot_eager")(*args)
    assert [x._version for x in tree.leaves(args[1:])] == versions
    for a, b in zip(tree.leaves(got), tree.leaves(want)):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_residual_layers_are_what_was_there_and_something_more():
    """Zero weights add nothing; other weights do, to the state alone: the prior stays."""
    cfg, world, state = learning(n_residual_blocks=2)
    _, args = _apply(cfg, world, state)
    net, world, params, obs = args
    assert len(params.residual_blocks) == 2 and not torch.equal(
        params.residual_blocks[0].weight, params.residual_blocks[1].weight
    )
    params = params._replace(value_head=params.value_head._replace(weight=torch.ones_like(params.value_head.weight)))
    without = cfg.agent.apply(net, world, params._replace(residual_blocks=()), obs)
    nothing = cfg.agent.apply(net, world, params._replace(residual_blocks=tree.zeros_like(params.residual_blocks)), obs)
    found = cfg.agent.apply(net, world, params, obs)
    assert torch.equal(nothing.value, without.value) and torch.equal(found.prior_logits, without.prior_logits)
    assert (found.value - without.value).abs().min() > 1e-6


def test_successors_that_have_room_are_scored_as_without_packing_and_others_are_told():
    """1e-6 of float32 sums; room for the first half of them, and then for all."""
    cfg, world, state = learning()
    _, (plain, _, params, obs) = _apply(cfg, world, state)
    want, valid = cfg.agent.apply(plain, world, params, obs), int(obs.action_mask[:, :-1].sum())
    for capacity in (valid // 2, valid):
        packing = dataclasses.replace(plain, capacity=capacity)
        got, fits = cfg.agent.apply(packing, world, params, obs), ~net.exceeds_capacity(packing, obs.action_mask)
        room = obs.action_mask[:, :-1].sum(1).cumsum(0) <= capacity
        assert torch.equal(fits, room) and room.any()
        for a, b in zip(got, want):
            torch.testing.assert_close(a[room], b[room], rtol=0, atol=1e-6)


def test_training_keeps_the_structure_and_learning_rate_0_changes_no_params():
    made = ready()
    cfg = prover_task.build_config(made, dataclasses.replace(PPO, learning_rate=0.0))
    state = train_step.init(cfg, prover_task.training_world(made), random.key(2))
    after, _ = train_step.train_step(cfg, prover_task.training_world(made), state)
    assert [(x.shape, x.dtype) for x in tree.leaves(after)] == [(x.shape, x.dtype) for x in tree.leaves(state)]
    for a, b in zip(tree.leaves(after.params), tree.leaves(state.params)):
        assert torch.equal(a, b)
    cfg, world, state = learning()
    learnt, _ = train_step.train_step(cfg, world, state)
    assert any(not torch.equal(a, b) for a, b in zip(tree.leaves(learnt.params), tree.leaves(state.params)))


@pytest.mark.parametrize("name", ["family_tree:120:3", "countries_s1"])
def test_an_untrained_policy_ranks_by_best_proof_as_max_confidence_does(name):
    """Height 1. Candidates of one query are ordered alike: no pair is strictly one way here and the other there."""
    made = ready(name, max_height=1, hard_negative_fraction=0.0)
    cfg = prover_task.build_config(made, PPO)
    params = train_step.init(cfg, prover_task.training_world(made), random.key(0)).params
    how = scorers_.search_config(made, cfg, "best-proof", slots=8, beam=64, rows_per_step=64, chunk_size=64)
    scorers = (
        scorers_.make_policy_scorer(how, made, params, None),
        scorers_.make_untrained_scorer(made, "max-confidence"),
    )
    mine, theirs = (ranking.rank_split(made, made.dataset.test[:80], scorer, RankingProtocol()) for scorer in scorers)
    assert torch.equal(mine.counts.n_better, theirs.counts.n_better)
    assert torch.equal(mine.counts.n_equal, theirs.counts.n_equal)
    assert int(mine.counts.n_better.sum()) + int(mine.counts.n_equal.sum()) > 0


def test_the_rules_that_apply_give_the_best_proof_that_search_finds():
    made = ready("family_tree:120:3", max_height=1, hard_negative_fraction=0.0, fact_selection="policy")
    cfg = prover_task.build_config(made, PPO)
    params = train_step.init(cfg, prover_task.training_world(made), random.key(0)).params
    params = tree.map(lambda x: x + 0.3 * torch.sin(torch.arange(x.numel()).view(x.shape) * 1.7), params)
    how = scorers_.search_config(made, cfg, "best-proof", slots=8, beam=64, rows_per_step=64, chunk_size=64)
    atoms = torch.unique(torch.from_numpy(made.dataset.test[:60]), dim=0)
    quick = scorers_.make_policy_scorer(how, made, params, None)(atoms)
    searched = score_candidates(how, prover_task.inference_world(made), params, atoms)[0]
    torch.testing.assert_close(quick, searched.log_score, rtol=0, atol=1e-5)
    assert torch.isfinite(quick).any()


def test_where_facts_are_found_success_is_the_sum_over_the_rules_that_derive():
    """And greedy is the most probable choice alone, at a price unless it derives the atom."""
    made = ready("family_tree:120:3", max_height=1, hard_negative_fraction=0.0)
    cfg = prover_task.build_config(made, PPO)
    params = train_step.init(cfg, prover_task.training_world(made), random.key(0)).params
    params = tree.map(lambda x: x + 0.3 * torch.sin(torch.arange(x.numel()).view(x.shape) * 1.7), params)
    atoms = torch.unique(torch.from_numpy(made.dataset.test[:40]), dim=0).to(torch.int32)
    world = prover_task.training_world(made)
    state = prover_env.initial_state(cfg.env.cfg, world, atoms, torch.ones(len(atoms), dtype=torch.bool))
    policy = torch.softmax(
        cfg.agent.apply(cfg.agent.cfg, world, params, prover_env.observe(cfg.env.cfg, world, state))[0], 1
    )
    success, greedy = torch.zeros(len(atoms)), policy.amax(1).log()
    for s in range(policy.shape[1]):
        keys = torch.zeros((len(atoms), 2), dtype=torch.int64)
        after, _ = prover_env.step_functional(cfg.env.cfg, world, state, torch.full((len(atoms),), s), keys)
        assert (after.status != RUNNING).all()
        success += torch.where(after.status == PROVED, policy[:, s], 0.0)
        greedy += torch.where((policy.argmax(1) == s) & (after.status != PROVED), -100.0, 0.0)
    for score, want in (("success", success.log()), ("greedy", greedy)):
        how = scorers_.search_config(made, cfg, score, slots=8, beam=64, rows_per_step=64, chunk_size=16)
        got = scorers_.make_policy_scorer(how, made, params, None)(atoms)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    assert torch.isfinite(success.log()).any() and (greedy < -50).any()


@pytest.mark.parametrize("hidden_dim", [64, 8])
def test_rules_embedded_once_are_as_a_successor_each_with_the_body_as_it_is_written(hidden_dim):
    """Outputs and gradients, of untidy params and of states with hopeless rules, missing ones and others.

    As products with a table of all rules where that is less than vectors of each state's, and as vectors.
    """
    cfg, world, state = learning(name="family_tree:40:3", max_height=1, hidden_dim=hidden_dim)
    as_table = cfg.env.cfg.resolve.max_successors * hidden_dim >= 2 * (1 + cfg.agent.cfg.sizes.n_rules)
    assert as_table == (hidden_dim == 64)
    params = tree.map(lambda x: x + 0.3 * torch.sin(torch.arange(x.numel()).view(x.shape) * 1.7), state.params)
    shared = prover_env.observe(cfg.env.cfg, world, state.env_state)
    rule = shared.rule.long()[..., None, None]
    body = torch.where(rule >= 0, world.kb.rules[:, 1:][shared.rule.long()], 0)
    each = shared._replace(successors=Goals(body, torch.ones_like(body[..., 0])))
    legal = shared.action_mask[:, :-1]
    assert not shared.successors.atoms.numel() and (shared.dead_end & legal).any() and (~shared.dead_end & legal).any()
    assert not legal.all()

    def found(obs):
        leaves = [x.clone().requires_grad_() for x in tree.leaves(params)]
        out = cfg.agent.apply(cfg.agent.cfg, world, tree.unflatten(params, leaves), obs)
        (torch.log_softmax(out.logits, -1)[:, 0] + out.value**2).mean().backward()
        return [
            out.logits.detach(),
            out.value.detach(),
            *(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves),
        ]

    for got, want in zip(found(shared), found(each)):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_the_mean_of_successors_is_that_of_the_legal_ones_and_zero_without_any():
    vector = torch.arange(12.0).view(2, 3, 2)
    legal = torch.tensor([[True, False, True], [False, False, False]])
    table = net._SuccessorVectors(vector.view(6, 2), torch.arange(6).view(2, 3))
    for successor in (net._SuccessorVectors(vector, None), table):
        assert net._masked_mean(successor, legal).tolist() == [[2.0, 3.0], [0.0, 0.0]]


def test_the_entropy_bonus_is_the_divergence_from_the_prior():
    """By hand for two actions and a masked one; 0 for an untrained policy."""
    lowest = torch.finfo(torch.float32).min
    out = net.ProverOutput(
        logits=torch.tensor([[0.0, torch.tensor(3.0).log(), lowest]]),
        prior_logits=torch.tensor([[0.0, 0.0, lowest]]),
        value=torch.zeros(1),
    )
    want = -(0.25 * torch.tensor(0.5).log() + 0.75 * torch.tensor(1.5).log())
    torch.testing.assert_close(net.negative_kl_to_prior(out), want[None])
    cfg, world, state = learning()
    untrained = cfg.agent.apply(
        cfg.agent.cfg, world, state.params, prover_env.observe(cfg.env.cfg, world, state.env_state)
    )
    assert not net.negative_kl_to_prior(untrained).any() and untrained.prior_logits.any()


def test_object_identity_is_learnt_where_facts_are_found_and_refused_elsewhere():
    """A choice proves its goal exactly where the rule derives it with different constants for different variables."""
    triples = [(f"p{i // 2}", "child", f"p{i}") for i in range(2, 20)] + [("p2", "sibling", "p3")]
    family = data.from_triples(triples, rules="sibling(X, Y) :- child(Z, X), child(Z, Y)")
    settings_ = dataclasses.replace(SETTINGS, max_height=1, hard_negative_fraction=0.0)
    plain = prover_task.build_task(family, settings_)
    made = prover_task.build_task(family, dataclasses.replace(settings_, object_identity=True))
    lost = plain.least_model.atoms[fixpoint.atom_height(made.least_model, plain.least_model.atoms.long()) < 0]
    assert len(lost) == 18 and made.fact_selection == "oracle"
    cfg, world = prover_task.build_config(made, PPO), prover_task.training_world(made)
    params = train_step.init(cfg, world, random.key(0)).params
    how = scorers_.search_config(made, cfg, "success", slots=8, beam=64, rows_per_step=64, chunk_size=64)
    assert scorers_.make_policy_scorer(how, made, params, None)(lost).isneginf().all()
    atom = made.least_model.atoms[made.least_model.height > 0][0]
    assert explain.most_probable_proof(made, cfg, params, atom.long()) is not None
    with pytest.raises(ValueError, match="object_identity wants fact_selection=oracle"):
        prover_task.build_config(ready(object_identity=True), PPO)


def test_facts_are_found_at_height_1_alone():
    with pytest.raises(ValueError, match="fact_selection=oracle wants height 1"):
        ready(fact_selection="oracle")
    assert ready().fact_selection == "policy" and ready("countries_s1", max_height=1).fact_selection == "oracle"


def test_listing_provable_candidates_ranks_as_scoring_every_one():
    made = ready("family_tree:60:1", max_height=1, hard_negative_fraction=0.0)
    scorer = scorers_.make_untrained_scorer(made, "noisy-or")

    def everywhere(atoms):
        found = baselines.iter_derivations(made.kb, made.sizes, made.least_model, 1, atoms)
        return baselines.noisy_or(made.kb, found, len(atoms))

    some, every = (
        ranking.rank_split(made, made.dataset.test[:20], s, RankingProtocol(score_unprovable=whole))
        for s, whole in ((scorer, False), (everywhere, True))
    )
    assert len(every.scored_atom) > len(some.scored_atom)
    for a, b in zip(some.counts, every.counts):
        assert torch.equal(a, b)
    assert ranking.auc_pr(some) == pytest.approx(ranking.auc_pr(every), abs=1e-12)
