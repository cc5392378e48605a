"""One step of T_P for given queries: the part of the whole that they ask for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from funcppo import problem
from funcppo.config import ProverSettings
from funcppo.data import load
from funcppo.logic import asked, fixpoint, kb
from funcppo.protocol import Protocol
from tests.oracles import programs


@given(programs, st.randoms(use_true_random=False), st.booleans())
@settings(max_examples=100, deadline=None)
def test_it_holds_the_facts_and_what_agrees_with_a_query_in_an_argument(program, random, identity):
    world, sizes = kb.build(**program.arrays())
    whole = fixpoint.least_model(world, sizes, max_height=1, budget=10**6, object_identity=identity)
    rows = [tuple(row) for row in whole.atoms.tolist()]
    queries = random.sample(rows, min(2, len(rows)))
    table = torch.tensor(queries or [[0] * sizes.width])
    model = asked.one_step(world, sizes, table, 10**6, identity)
    assert model is not None
    wanted = {(place, q[0], q[place]) for q in queries for place in range(1, sizes.width)}
    near = lambda row: any((place, row[0], row[place]) in wanted for place in range(1, sizes.width))
    expected = {row: h for row, h in zip(rows, whole.height.tolist()) if h == 0 or near(row)}
    assert dict(zip(map(tuple, model.atoms.tolist()), model.height.tolist())) == expected
    assert fixpoint.contains(model, model.atoms.long()).tolist() == model.height.tolist()


def test_a_split_is_ranked_as_with_the_whole():
    data = load("family_tree:60:3")
    ready = problem.build(data, ProverSettings(max_height=1))
    model = asked.one_step(ready.kb, ready.sizes, torch.from_numpy(data.test).long(), 10**6)
    assert model is not None and len(ready.kb.facts) < len(model.atoms) < len(ready.model.atoms)
    part = replace(ready, model=model)
    counts = []
    for each in (ready, part):
        scorer = problem.untrained_scorer(each, "noisy-or")
        counts.append(problem.rank(each, data.test, scorer, Protocol()).counts)
    assert all(torch.equal(a, b) for a, b in zip(*counts))


def test_too_many_atoms_are_told():
    data = load("family_tree:60:3")
    ready = problem.build(data, ProverSettings(max_height=1))
    assert asked.one_step(ready.kb, ready.sizes, torch.from_numpy(data.facts).long(), 10) is None


def test_a_budget_passed_at_height_1_leaves_what_is_asked_for():
    data = load("family_tree:60:3")
    n = len(data.facts)
    ready = problem.build(data, ProverSettings(max_height=1, budget=n + 1))
    assert any("only what valid and test ask for" in note for note in ready.notes)
    with pytest.raises(ValueError, match="passes the budget"):
        problem.build(data, ProverSettings(max_height=1, budget=n + 1, hard_fraction=0.5))
