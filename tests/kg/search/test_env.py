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
from funcppo.kg.search import env
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


def searches(seed: int, steps: int):
    """A batch of searches after some random legal actions, END among them."""
    cfg, world, _ = small_problem()
    key, reset_key = random.split(random.key(seed)).unbind()
    state = prover_env.reset(cfg.env.cfg, world, random.split(reset_key, 8))
    for t in range(steps):
        action_key, step_key = random.split(random.fold_in(key, t)).unbind()
        mask = prover_env.observe(cfg.env.cfg, world, state).action_mask
        action = random.categorical(action_key, torch.where(mask, 0.0, -1e9))
        state, _ = prover_env.step_functional(
            cfg.env.cfg, world, state, action, random.split(step_key, 8)
        )
    return cfg.env.cfg, world, state


@given(st.integers(0, 10_000))
@settings(max_examples=20)
def test_finished_rows_stay_as_they_are_and_are_paid_nothing(seed):
    cfg, world, state = searches(seed, 3)
    after, timestep = prover_env.step_functional(
        cfg,
        world,
        state,
        torch.zeros(8, dtype=torch.int64),
        random.split(random.key(0), 8),
    )
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
    assert (state.status != RUNNING).all() or (state.depth < cfg.max_depth)[
        state.status == RUNNING
    ].all()
    assert not state.overflow.any()


def test_an_illegal_action_counts_as_end():
    cfg, world, state = searches(5, 0)
    illegal = (~state.successors.mask).int().argmax(1)
    assert not state.successors.mask.gather(1, illegal[:, None]).any()
    after, _ = prover_env.step_functional(
        cfg, world, state, illegal, random.split(random.key(0), 8)
    )
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
    cfg = dataclasses.replace(
        small_problem()[0].env.cfg, reward=reward, negatives_per_positive=4.0
    )
    proved, label = (
        torch.tensor([True, False, True, False]),
        torch.tensor([True, True, False, False]),
    )
    assert prover_env.terminal_reward(cfg, proved, label).tolist() == want


def _step(cfg, world, state):
    action, keys = torch.zeros(8, dtype=torch.int64), random.split(state.key, 8)
    return prover_env.step_functional, (
        cfg.env.cfg,
        world,
        state.env_state,
        action,
        keys,
    )


def _observe(cfg, world, state):
    return prover_env.observe, (cfg.env.cfg, world, state.env_state)


def _evaluation(cfg, world, state):
    how = scoring.search_config(
        small_task(),
        cfg,
        "success",
        slots=3,
        beam=4,
        rows_per_step=8,
        chunk_size=9,
    )
    how = dataclasses.replace(
        how, agent=net.agent(dataclasses.replace(cfg.agent.cfg, capacity=20))
    )
    table = torch.cat(
        [small_task().kb.facts[:9], torch.zeros_like(small_task().kb.facts[:1])]
    )
    return evaluate_step, (
        how,
        world,
        state.params,
        table,
        init_scheduler(how, table),
    )


@pytest.mark.parametrize("case", [_step, _observe, network_call, _evaluation])
def test_it_compiles_fullgraph_equals_eager_and_writes_to_no_argument(case):
    """One graph by aot_eager; floats within 1e-5, the rest equal."""
    fn, args = case(*small_problem())
    versions = [x._version for x in tree.leaves(args[1:])]
    want = fn(*args)
    got = torch.compile(fn, fullgraph=True, dynamic=False, backend="aot_eager")(
        *args
    )
    assert [x._version for x in tree.leaves(args[1:])] == versions
    for a, b in zip(tree.leaves(got), tree.leaves(want)):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def grandparent_world():
    """grandparent(X, Z) :- parent(X, Y), parent(Y, Z), with parent(a, b), parent(b, c) and grandparent(a, c)."""
    triples = [
        ("a", "parent", "b"),
        ("b", "parent", "c"),
        ("a", "grandparent", "c"),
    ]
    graph = loaders.from_triples(
        triples, rules="grandparent(X, Z) :- parent(X, Y), parent(Y, Z)"
    )
    task = prover_task.build_task(
        graph, ProverTaskConfig(max_height=1, fact_selection="policy")
    )
    names = (
        dict(zip(graph.predicates, range(1, 3))),
        dict(zip(graph.entities, range(1, 4))),
    )
    return (
        prover_task.build_config(task, PPO).env.cfg,
        prover_task.training_world(task),
        *names,
    )


def test_a_proof_worked_by_hand():
    """Row 0 applies the rule, then the fact parent(a, b); parent(b, c) is then known and vanishes. Row 1 gives up."""
    cfg, world, predicate, entity = grandparent_world()
    atom = [predicate["grandparent"], entity["a"], entity["c"]]
    query = torch.tensor([atom, atom], dtype=torch.int32)
    state = prover_env.initial_state(
        cfg, world, query, torch.tensor([True, True])
    )
    obs = prover_env.observe(cfg, world, state)
    assert state.successors.rule[:, 0].tolist() == [0, 0]
    assert state.successors.mask.sum(1).tolist() == [1, 1]
    assert obs.query_is_fact.tolist() == [True, True]
    assert obs.remaining_depth.tolist() == [1.0, 1.0]

    def step(*action):
        return prover_env.step_functional(
            cfg,
            world,
            state,
            torch.tensor(action),
            torch.zeros((2, 2), dtype=torch.int64),
        )

    state, timestep = step(0, cfg.resolve.max_successors)
    assert state.status.tolist() == [RUNNING, ENDED]
    assert state.depth.tolist() == [1, 0]
    assert timestep.reward.tolist() == [0.0, -1.0]
    assert timestep.terminated.tolist() == [False, True]
    first, second = state.goals.atoms[0, :2].tolist()
    assert first[:2] == [predicate["parent"], entity["a"]] and first[2] > 3
    assert second == [predicate["parent"], first[2], entity["c"]]
    assert state.goals.height[0, :2].tolist() == [1, 1]

    state, timestep = step(0, 0)
    assert state.status.tolist() == [PROVED, ENDED]
    assert state.depth.tolist() == [2, 0]
    assert timestep.reward.tolist() == [1.0, 0.0]
    assert timestep.terminated.tolist() == [True, True]


def test_a_search_that_reaches_the_depth_limit_is_exhausted():
    cfg, world, predicate, entity = grandparent_world()
    cfg = dataclasses.replace(cfg, max_depth=1)
    query = torch.tensor(
        [[predicate["grandparent"], entity["a"], entity["c"]]],
        dtype=torch.int32,
    )
    state = prover_env.initial_state(cfg, world, query, torch.tensor([False]))
    keys = torch.zeros((1, 2), dtype=torch.int64)
    state, timestep = prover_env.step_functional(
        cfg, world, state, torch.tensor([0]), keys
    )
    assert state.status.tolist() == [EXHAUSTED]
    assert prover_env.STATUS_NAMES[EXHAUSTED] == "exhausted"
    assert timestep.reward.tolist() == [1.0] and not timestep.truncated.any()
    assert prover_env.observe(cfg, world, state).remaining_depth.tolist() == [
        0.0
    ]


# -- training queries


FACTS = np.array([[1, 1, 2], [1, 2, 3], [1, 3, 1], [2, 1, 1], [3, 2, 0]])
KB, SIZES = kb.build(
    FACTS, np.zeros((0, 2, 3), int), n_constants=3, n_predicates=3
)
HARD = torch.tensor([[1, 3, 3], [2, 2, 2]], dtype=torch.int32)


def sample(seed, n, positive, hard):
    return env.sample_training_queries(
        random.split(random.key(seed), n),
        KB,
        SIZES,
        KB.facts,
        HARD,
        positive,
        hard,
    )


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
    assert within_six_sigma(
        [atoms.count(a) for a in weight], [w / total for w in weight.values()]
    )
    # 5 facts, 3 constants: the chance that one try is a fact
    p = 1 - total / 15
    n_failed = int(failed.sum())
    assert within_six_sigma([n_failed, len(atoms)], [p**8, 1 - p**8])


def test_fractions_are_the_configured_ones():
    query, label, failed = sample(2, 20000, 0.25, 0.4)
    in_hard = (query[:, None] == HARD).all(-1).any(-1)
    is_positive = label & ~failed
    assert within_six_sigma(
        [int(is_positive.sum()), int((~is_positive).sum())], [0.25, 0.75]
    )
    only_hard, _, failed = sample(2, 200, 0.0, 1.0)
    assert (only_hard[:, None] == HARD).all(-1).any(-1).all()
    assert not failed.any()
    # corruptions may be hard negatives too
    assert in_hard.double().mean() >= 0.75 * 0.4 - 0.02


@pytest.mark.parametrize("fact", [[1, 1, 1], [1, 0, 0]])
def test_a_row_without_a_negative_is_a_flagged_positive(fact):
    """One constant, or no argument: every corruption is the fact itself."""
    only, sizes = kb.build(
        np.array([fact]),
        np.zeros((0, 2, 3), int),
        n_constants=1,
        n_predicates=1,
    )
    query, label, failed = env.sample_training_queries(
        random.split(random.key(0), 4),
        only,
        sizes,
        only.facts,
        HARD[:0],
        0.0,
        0.0,
    )
    assert failed.all() and label.all() and query.tolist() == [fact] * 4


def test_a_table_to_sample_from_must_not_be_empty():
    keys = random.split(random.key(0), 4)
    with pytest.raises(
        ValueError,
        match="expected facts to sample queries from, got 5 train facts and 0 hard neg",
    ):
        env.sample_training_queries(
            keys, KB, SIZES, KB.facts, HARD[:0], 0.5, 0.1
        )
    with pytest.raises(ValueError, match="got 0 train facts"):
        env.sample_training_queries(
            keys, KB, SIZES, KB.facts[:0], HARD, 0.5, 0.1
        )
