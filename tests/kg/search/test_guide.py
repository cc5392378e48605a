"""Search for proofs in an order that a policy may have learnt."""

import dataclasses
from functools import cache
from random import Random

import numpy as np
import pytest
import torch

from experiments.benchmarks.guided_proofs import confidence_order, program_order
from funcppo import train_step
from funcppo.core import random
from funcppo.core.host import NO_DEADLINE
from funcppo.kg import answers
from funcppo.kg.config import RunConfig
from funcppo.kg.graph import loaders
from funcppo.kg.logic import kb as kbase
from funcppo.kg.logic.fixpoint import Verdict
from funcppo.kg.logic.prove import Clauses, Limits, prove_ground
from funcppo.kg.run import run as runs
from funcppo.kg.run import train
from funcppo.kg.run.subject import run_subject
from funcppo.kg.search import env as prover_env
from funcppo.kg.search import guide
from funcppo.kg.search import task as prover_task
from tests import oracles
from tests.kg.search.small_tasks import PPO, SETTINGS, perturbed

C = oracles.N_CONSTANTS
X, Y, Z = C + 1, C + 2, C + 3


@cache
def problems():
    """Programs that derive atoms at height 2 or more; atoms that follow, and as many at random."""
    random_, found = Random(0), []
    while len(found) < 12:
        program = oracles.random_program(random_)
        heights = oracles.least_model(program)
        if max(heights.values(), default=0) > 1:
            clauses = Clauses(*kbase.build(**program.arrays()))
            width = clauses.sizes.atom_width
            drawn = [
                (a[0], *random_.choices(range(1, C + 1), k=len(a) - 1))
                for a in heights
            ]
            atoms = {a + (0,) * (width - len(a)) for a in [*heights, *drawn]}
            found.append((clauses, atoms))
    return found


def nonsense(expansions):
    """Costs of no meaning, some of which fall along a path."""
    return [
        [
            expansion.cost + np.sin(7.0 * expansion.step + 3.0 * i)
            for i in range(len(expansion.successors))
        ]
        for expansion in expansions
    ]


@pytest.mark.parametrize(
    "order",
    [
        program_order,
        confidence_order([0.0, 0.2, 0.4, 0.9, 1.0, 0.5, 0.0]),
        nonsense,
    ],
)
@pytest.mark.parametrize(("height", "indexed"), [(1, 0), (3, 10)])
def test_any_order_proves_the_same(order, height, indexed, monkeypatch):
    monkeypatch.setattr(guide, "MAX_INDEXED", indexed)
    n_derived = 0
    for clauses, atoms in problems():
        program = guide.SearchProgram(clauses, height)
        searches = [guide.ProofSearch(program, atom) for atom in atoms]
        guide.search(searches, order, max_steps=5000, width=2)
        limits = Limits(max_height=height)
        for atom, one in zip(atoms, searches):
            exact = prove_ground(clauses, atom, limits).verdict
            assert one.is_over
            assert (one.leaves is not None) == (exact is Verdict.PROVED)
            if one.leaves is not None:
                found = guide.prove_from(clauses, one.leaves, atom, limits)
                assert found.verdict is Verdict.PROVED
                row = torch.tensor(atom)
                is_fact = bool(kbase.contains(clauses.kb, clauses.sizes, row))
                assert found.is_fact == is_fact
                n_derived += not is_fact
            else:
                found = guide.prove_from(clauses, [atom], atom, limits)
                assert found.verdict is Verdict.REFUTED
    assert n_derived > 40


def test_steps_of_a_chain_by_hand():
    # edge(1, 2), ..., edge(5, 6); path(X, Y) :- edge(X, Z), path(Z, Y).
    facts = np.array([(1, i, i + 1) for i in range(1, 6)], np.int32)
    rules = np.array(
        [[(2, X, Y), (1, X, Y), (0, 0, 0)], [(2, X, Y), (1, X, Z), (2, Z, Y)]],
        np.int32,
    )
    kb = kbase.build(facts, rules, n_constants=C, n_predicates=2)
    # Two steps from path(1, 6) to path(2, 6), and so on; path(5, 6) is proved by the step that resolves it.
    program = guide.SearchProgram(Clauses(*kb), 5)
    one = guide.ProofSearch(program, (2, 1, 6))
    guide.search([one], program_order, max_steps=100)
    assert one.n_steps == 9
    assert sorted(one.leaves) == [tuple(fact) for fact in facts.tolist()]
    low = guide.ProofSearch(guide.SearchProgram(Clauses(*kb), 4), (2, 1, 6))
    guide.search([low], program_order, max_steps=100)
    assert low.leaves is None
    # A search for other goals than the query: path(3, 6) at height 1, and what no facts prove.
    for start, is_proved in ((3, True), (6, False)):
        part = guide.ProofSearch(program, (2, 1, 6), (((2, start, 6), 1),))
        guide.search([part], program_order, max_steps=100)
        assert (part.leaves is not None) == is_proved


def guide_problem(dataset, height=3):
    """Config, world and params of a policy that orders a search."""
    settings = dataclasses.replace(
        SETTINGS, max_height=height, hard_negative_fraction=0.0
    )
    task = prover_task.build_task(dataset, settings, as_guide=True)
    cfg = prover_task.build_config(task, PPO)
    world = prover_task.training_world(task)
    return task, cfg, world, train_step.init(cfg, world, random.key(0)).params


def test_an_episode_has_the_successors_of_the_search():
    task, cfg, world, _ = guide_problem(loaders.load("countries_s3"))
    clauses = Clauses(task.kb, task.sizes)
    program = guide.SearchProgram(clauses, task.max_height)
    state = prover_env.reset(
        cfg.env.cfg, world, random.split(random.key(1), 32)
    )
    n_compared = 0
    for step in range(4):
        queries = state.query.tolist()
        for row in range(32):
            goals = tuple(
                (tuple(atom), height)
                for atom, height in zip(
                    state.goals.atoms[row].tolist(),
                    state.goals.height[row].tolist(),
                )
                if atom[0]
            )
            if not goals or state.status[row] or state.overflow[row]:
                continue
            made = state.successors.goals
            found = set()
            for slot in state.successors.mask[row].nonzero()[:, 0]:
                atoms = made.atoms[row, slot].tolist()
                heights = made.height[row, slot].tolist()
                found.add(
                    tuple((tuple(a), h) for a, h in zip(atoms, heights) if a[0])
                )
            expected = {
                successor[0]
                for successor in program.successors(tuple(queries[row]), goals)
            }
            # The search also drops what no fact matches.
            assert expected <= found
            n_compared += len(expected)
        key = random.split(random.key(9 + step), 32)
        action = state.successors.mask.float().argmax(1)
        state, _ = prover_env.step_functional(
            cfg.env.cfg, world, state, action, key
        )
    assert n_compared > 50


def test_a_policy_knows_constants_that_it_has_not_met():
    """A copy of the graph with other names has the same costs."""
    dataset = loaders.load("countries_s3")
    _, cfg, world, params = guide_problem(dataset)
    order = guide.policy_order(cfg, world, perturbed(params))
    n = dataset.n_constants
    permuted = np.append(0, np.random.default_rng(0).permutation(n) + 1)
    moved = np.append(permuted, np.arange(n + 1, n + 99))

    def rename(table):
        return np.concatenate([table[..., :1], moved[table[..., 1:]]], -1)

    other = dataclasses.replace(
        dataset,
        train=rename(dataset.train).astype(np.int32),
        facts=rename(dataset.facts).astype(np.int32),
        rules=rename(dataset.rules).astype(np.int32),
    )
    _, other_cfg, other_world, _ = guide_problem(other)
    other_order = guide.policy_order(other_cfg, other_world, perturbed(params))
    for goal in dataset.test[:5]:
        costs = []
        for data, by in ((dataset, order), (other, other_order)):
            kb = Clauses(*kbase.from_dataset(data))
            atom = goal if data is dataset else rename(goal[None])[0]
            one = guide.ProofSearch(
                guide.SearchProgram(kb, 3), tuple(atom.tolist())
            )
            expansion = one.expand()
            costs.append(sorted(by([expansion])[0]))
        torch.testing.assert_close(costs[0], costs[1])
        assert len(set(costs[0])) > 1


def test_a_trained_guide_proves_over_other_facts(tmp_path):
    """A run learns an order, is opened over a graph with other ids, and is refused where a run ranks."""
    settings = RunConfig(
        dataset="countries_s3",
        learner="guide",
        steps=64,
        n_validations=1,
        ppo=PPO,
        prover=dataclasses.replace(SETTINGS, hard_negative_fraction=0.0),
        strategy="eager",
    )
    run = train.train_run(settings, tmp_path / "run")
    assert run.is_finished and float(run.state.best_valid_metric) > 0
    dataset = loaders.load("countries_s2")
    opened = runs.open_run(tmp_path / "run", graph=dataset)
    clauses = Clauses(*kbase.from_dataset(dataset))
    params = opened.state.best_params
    for learnt in (params, perturbed(params)):  # a policy, and one of nonsense
        state = opened.state._replace(best_params=learnt)
        by = dataclasses.replace(opened, state=state)
        proved = 0
        for goal in dataset.test[:8].tolist():
            atom, limits = tuple(goal), Limits(max_height=2)
            facts, n_steps = answers.find_guided_facts(
                by, dataset, atom, 2, NO_DEADLINE
            )
            exact = prove_ground(clauses, atom, limits).verdict
            if facts:
                found = guide.prove_from(clauses, facts, atom, limits)
                assert found.verdict is exact is Verdict.PROVED
                proved += 1
            assert n_steps > 0 and (exact is Verdict.PROVED) == bool(facts)
        assert proved
    with pytest.raises(ValueError, match="expected a run that ranks"):
        run_subject(opened)
    # Some facts say nothing of what is absent.
    rules = dataset.rules.copy()
    rules[0, 1, 0] *= -1
    negated = dataclasses.replace(dataset, rules=rules)
    with pytest.raises(ValueError, match="without negation"):
        answers.find_guided_facts(
            opened, negated, tuple(dataset.test[0].tolist()), 2, NO_DEADLINE
        )
