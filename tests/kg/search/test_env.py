"""Proof search as an environment: the laws of its states, rewards and resets."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from funcppo.core import random, tree
from funcppo.kg.config import ProverTaskConfig
from funcppo.kg.graph import loaders
from funcppo.kg.logic import kb
from funcppo.kg.ranking import scoring
from funcppo.kg.search import env as prover_env
from funcppo.kg.search import network as net
from funcppo.kg.search import task as prover_task
from funcppo.kg.search.beam import evaluate_step, init_scheduler
from funcppo.kg.search.env import ENDED, EXHAUSTED, FAILED, PROVED, RUNNING
from tests.kg.search.small_tasks import (
    PPO,
    network_call,
    small_problem,
    small_task,
)
from tests.oracles import within_six_sigma


def step_by(cfg, world, state, action, seed=0):
    """A step of every row, by one action or one for each."""
    n = len(state.status)
    action = torch.as_tensor(action).expand(n)
    keys = random.split(random.key(seed), n)
    return prover_env.step_functional(cfg, world, state, action, keys)


def searches(seed: int, steps: int):
    """A batch of searches after some random legal actions, END among them."""
    cfg, world, _ = small_problem()
    key, reset_key = random.split(random.key(seed)).unbind()
    state = prover_env.reset(cfg.env.cfg, world, random.split(reset_key, 8))
    for t in range(steps):
        action_key, step_key = random.split(random.fold_in(key, t)).unbind()
        mask = prover_env.observe(cfg.env.cfg, world, state).action_mask
        action = random.categorical(action_key, torch.where(mask, 0.0, -1e9))
        chosen = action, random.split(step_key, 8)
        state, _ = prover_env.step_functional(
            cfg.env.cfg, world, state, *chosen
        )
    return cfg.env.cfg, world, state


@given(st.integers(0, 10_000))
@settings(max_examples=20)
def test_finished_rows_stay_as_they_are_and_are_paid_nothing(seed):
    cfg, world, state = searches(seed, 3)
    after, timestep = step_by(cfg, world, state, 0)
    done = state.status != RUNNING
    for old, new in zip(tree.leaves(state), tree.leaves(after)):
        assert torch.equal(old[done], new[done])
    assert (timestep.reward[done] == 0).all()
    assert timestep.terminated[done].all()


@given(st.integers(0, 10_000))
@settings(max_examples=20)
def test_a_status_says_how_the_path_ended(seed):
    cfg, _, state = searches(seed, 6)
    empty = state.goals.atoms[:, 0, 0] == 0
    assert torch.equal(empty, state.status == PROVED)
    assert not state.successors.mask[state.status == FAILED].any()
    assert (state.depth[state.status == EXHAUSTED] == cfg.max_depth).all()
    assert (state.depth[state.status == RUNNING] < cfg.max_depth).all()
    assert not state.overflow.any()


def test_an_illegal_action_counts_as_end():
    cfg, world, state = searches(5, 0)
    illegal = (~state.successors.mask).int().argmax(1)
    assert not state.successors.mask.gather(1, illegal[:, None]).any()
    after, _ = step_by(cfg, world, state, illegal)
    assert (after.status == ENDED).all()


@pytest.mark.parametrize(
    ("reward", "want"),
    [
        ("proof", [1.0, 0.0, 0.0, 0.0]),
        ("signed", [1.0, 0.0, -1.0, 0.0]),
        ("balanced", [1.0, -1.0, -1.0, 0.25]),
    ],
)
def test_rewards_follow_the_named_scheme(reward, want):
    """A positive proved and missed, a negative proved and rejected, at four negatives a positive."""
    cfg, options = small_problem()[0].env.cfg, {"negatives_per_positive": 4.0}
    cfg = dataclasses.replace(cfg, reward=reward, **options)
    proved = torch.tensor([True, False, True, False])
    label = torch.tensor([True, True, False, False])
    assert prover_env.terminal_reward(cfg, proved, label).tolist() == want


def _step(cfg, world, state):
    chosen = torch.zeros(8, dtype=torch.int64), random.split(state.key, 8)
    arguments = cfg.env.cfg, world, state.env_state, *chosen
    return prover_env.step_functional, arguments


def _observe(cfg, world, state):
    return prover_env.observe, (cfg.env.cfg, world, state.env_state)


def _evaluation(cfg, world, state):
    task = small_task()
    sizes = {"slots": 3, "beam": 4, "rows_per_step": 8, "chunk_size": 9}
    how = scoring.search_config(task, cfg, "success", **sizes)
    agent = net.agent(dataclasses.replace(cfg.agent.cfg, capacity=20))
    how = dataclasses.replace(how, agent=agent)
    facts = task.kb.facts
    table = torch.cat([facts[:9], torch.zeros_like(facts[:1])])
    scheduler = init_scheduler(how, table)
    return evaluate_step, (how, world, state.params, table, scheduler)


@pytest.mark.parametrize("case", [_step, _observe, network_call, _evaluation])
def test_it_compiles_fullgraph_equals_eager_and_writes_to_no_argument(case):
    """One graph by aot_eager; floats within 1e-5, the rest equal."""
    fn, args = case(*small_problem())
    versions = [x._version for x in tree.leaves(args[1:])]
    options = {"fullgraph": True, "dynamic": False, "backend": "aot_eager"}
    want, got = fn(*args), torch.compile(fn, **options)(*args)
    assert [x._version for x in tree.leaves(args[1:])] == versions
    for a, b in zip(tree.leaves(got), tree.leaves(want)):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def grandparent_world():
    """grandparent(X, Z) :- parent(X, Y), parent(Y, Z), with parent(a, b), parent(b, c) and grandparent(a, c)."""
    lines = ["a parent b", "b parent c", "a grandparent c"]
    rules = "grandparent(X, Z) :- parent(X, Y), parent(Y, Z)"
    graph = loaders.from_triples([x.split() for x in lines], rules=rules)
    settings = ProverTaskConfig(max_height=1, fact_selection="policy")
    task = prover_task.build_task(graph, settings)
    numbers = lambda names: dict(zip(names, range(1, 4)))
    cfg = prover_task.build_config(task, PPO).env.cfg
    world = prover_task.training_world(task)
    return cfg, world, numbers(graph.predicates), numbers(graph.entities)


def test_a_proof_worked_by_hand():
    """Row 0 applies the rule, then the fact parent(a, b); parent(b, c) is then known and vanishes. Row 1 gives up."""
    cfg, world, predicate, entity = grandparent_world()
    atom = [predicate["grandparent"], entity["a"], entity["c"]]
    query = torch.tensor([atom, atom], dtype=torch.int32)
    label = torch.tensor([True, True])
    state = prover_env.initial_state(cfg, world, query, label)
    obs = prover_env.observe(cfg, world, state)
    assert state.successors.rule[:, 0].tolist() == [0, 0]
    assert state.successors.mask.sum(1).tolist() == [1, 1]
    assert obs.query_is_fact.tolist() == [True, True]
    assert obs.remaining_depth.tolist() == [1.0, 1.0]

    actions = [0, cfg.resolve.max_successors]
    state, timestep = step_by(cfg, world, state, actions)
    assert state.status.tolist() == [RUNNING, ENDED]
    assert state.depth.tolist() == [1, 0]
    assert timestep.reward.tolist() == [0.0, -1.0]
    assert timestep.terminated.tolist() == [False, True]
    first, second = state.goals.atoms[0, :2].tolist()
    assert first[:2] == [predicate["parent"], entity["a"]] and first[2] > 3
    assert second == [predicate["parent"], first[2], entity["c"]]
    assert state.goals.height[0, :2].tolist() == [1, 1]

    state, timestep = step_by(cfg, world, state, 0)
    assert state.status.tolist() == [PROVED, ENDED]
    assert state.depth.tolist() == [2, 0]
    assert timestep.reward.tolist() == [1.0, 0.0]
    assert timestep.terminated.tolist() == [True, True]


def test_a_search_that_reaches_the_depth_limit_is_exhausted():
    cfg, world, predicate, entity = grandparent_world()
    cfg = dataclasses.replace(cfg, max_depth=1)
    atom = [predicate["grandparent"], entity["a"], entity["c"]]
    query = torch.tensor([atom], dtype=torch.int32)
    state = prover_env.initial_state(cfg, world, query, torch.tensor([False]))
    state, timestep = step_by(cfg, world, state, 0)
    assert state.status.tolist() == [EXHAUSTED]
    assert prover_env.STATUS_NAMES[EXHAUSTED] == "exhausted"
    assert timestep.reward.tolist() == [1.0] and not timestep.truncated.any()
    assert prover_env.observe(cfg, world, state).remaining_depth == 0.0


# -- training queries


FACTS = np.array([[1, 1, 2], [1, 2, 3], [1, 3, 1], [2, 1, 1], [3, 2, 0]])
NO_RULES = np.zeros((0, 2, 3), int)
KB, SIZES = kb.build(FACTS, NO_RULES, n_constants=3, n_predicates=3)
HARD = torch.tensor([[1, 3, 3], [2, 2, 2]], dtype=torch.int32)


def sample(
    seed, n, positive, hard, base=KB, sizes=SIZES, facts=None, among=HARD
):
    keys = random.split(random.key(seed), n)
    facts = base.facts if facts is None else facts
    tables = base, sizes, facts, among
    return prover_env.sample_training_queries(keys, *tables, positive, hard)


@given(st.integers(0, 2**32), st.floats(0, 1), st.floats(0, 1))
def test_a_label_says_whether_the_query_is_a_train_fact(seed, positive, hard):
    query, label, failed = sample(seed, 50, positive, hard)
    facts = {tuple(f) for f in FACTS.tolist()}
    assert label.tolist() == [tuple(q) in facts for q in query.tolist()]
    assert not (failed & ~label).any()


def test_negatives_are_uniform_over_corruptions_that_are_no_facts():
    """Every (fact, argument, constant) that gives no fact is equally likely, whatever the arity."""
    facts, weight = {tuple(f) for f in FACTS.tolist()}, {}
    for f in facts:
        arity = sum(a > 0 for a in f[1:])
        for j, c in itertools.product(range(1, arity + 1), range(1, 4)):
            atom = (*f[:j], c, *f[j + 1 :])
            if atom not in facts:
                weight[atom] = weight.get(atom, 0) + 1 / arity
    query, _, failed = sample(1, 20000, 0.0, 0.0)
    atoms = [tuple(q) for q in query[~failed].tolist()]
    assert set(atoms) == set(weight)
    total = sum(weight.values())
    shares = [w / total for w in weight.values()]
    assert within_six_sigma([atoms.count(a) for a in weight], shares)
    # 5 facts, 3 constants: the chance that one try is a fact
    p = 1 - total / 15
    n_failed = int(failed.sum())
    assert within_six_sigma([n_failed, len(atoms)], [p**8, 1 - p**8])


def test_fractions_are_the_configured_ones():
    query, label, failed = sample(2, 20000, 0.25, 0.4)
    in_hard = (query[:, None] == HARD).all(-1).any(-1)
    n_positive = int((label & ~failed).sum())
    counts = [n_positive, len(label) - n_positive]
    assert within_six_sigma(counts, [0.25, 0.75])
    only_hard, _, failed = sample(2, 200, 0.0, 1.0)
    assert (only_hard[:, None] == HARD).all(-1).any(-1).all()
    assert not failed.any()
    # corruptions may be hard negatives too
    assert in_hard.double().mean() >= 0.75 * 0.4 - 0.02


@pytest.mark.parametrize("fact", [[1, 1, 1], [1, 0, 0]])
def test_a_row_without_a_negative_is_a_flagged_positive(fact):
    """One constant, or no argument: every corruption is the fact itself."""
    only = kb.build(np.array([fact]), NO_RULES, n_constants=1, n_predicates=1)
    query, label, failed = sample(0, 4, 0.0, 0.0, *only, among=HARD[:0])
    assert failed.all() and label.all() and query.tolist() == [fact] * 4


def test_a_table_to_sample_from_must_not_be_empty():
    problem = "expected facts to sample queries from, got 5 train facts and 0 hard neg"
    with pytest.raises(ValueError, match=problem):
        sample(0, 4, 0.5, 0.1, among=HARD[:0])
    with pytest.raises(ValueError, match="got 0 train facts"):
        sample(0, 4, 0.5, 0.1, facts=KB.facts[:0])
