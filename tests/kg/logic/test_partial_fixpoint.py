"""One step of T_P for given queries: the part of the whole that they ask for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from funcppo.kg.graph.loaders import load
from funcppo.kg.logic import (
    consequences,
    derivability,
    fixpoint,
    kb,
    partial_fixpoint,
)
from funcppo.kg.logic.consequences import count_rules, with_confidence
from funcppo.kg.logic.triple_index import HEAD, TAIL
from funcppo.kg.ranking import ranking
from funcppo.kg.ranking.ranking import RankingProtocol
from funcppo.kg.scores.score import parse
from funcppo.kg.search import task as prover_task
from funcppo.kg.search.config import ProverTaskConfig
from tests.oracles import programs


@given(programs, st.randoms(use_true_random=False), st.booleans())
@settings(max_examples=100)
def test_it_holds_the_facts_and_what_agrees_with_a_query_in_an_argument(
    program, random, identity
):
    world, sizes = kb.build(**program.arrays())
    whole = fixpoint.least_model(
        world, sizes, max_height=1, max_atoms=10**6, object_identity=identity
    )
    rows = [tuple(row) for row in whole.atoms.tolist()]
    queries = random.sample(rows, min(2, len(rows)))
    table = torch.tensor(queries or [[0] * sizes.atom_width])
    part = partial_fixpoint.restricted_step(
        world, sizes, table, world.facts[:0], 10**6, identity
    )
    assert part is not None
    model = part[0]
    wanted = {
        (place, q[0], q[place])
        for q in queries
        for place in range(1, sizes.atom_width)
    }
    near = lambda row: any(
        (place, row[0], row[place]) in wanted
        for place in range(1, sizes.atom_width)
    )
    expected = {
        row: h
        for row, h in zip(rows, whole.height.tolist())
        if h == 0 or near(row)
    }
    assert (
        dict(zip(map(tuple, model.atoms.tolist()), model.height.tolist()))
        == expected
    )
    assert (
        fixpoint.atom_height(model, model.atoms.long()).tolist()
        == model.height.tolist()
    )


def test_a_split_is_ranked_as_with_the_whole():
    data = load("family_tree:60:3")
    ready = prover_task.build_task(data, ProverTaskConfig(max_height=1))
    found = partial_fixpoint.restricted_step(
        ready.kb,
        ready.sizes,
        torch.from_numpy(data.test),
        ready.kb.facts[:0],
        10**6,
    )
    assert found is not None and len(ready.kb.facts) < len(
        found[0].atoms
    ) < len(ready.least_model.atoms)
    counts = []
    for each in (
        ready,
        replace(ready, least_model=found[0], derivability_index=found[1]),
    ):
        scorer = parse("noisy-or")
        counts.append(
            ranking.rank_split(
                each, data.test, scorer, RankingProtocol()
            ).counts
        )
    assert all(torch.equal(a, b) for a, b in zip(*counts))


@given(programs, st.randoms(use_true_random=False), st.booleans())
@settings(max_examples=100)
def test_the_answers_of_queries_have_the_rules_that_derive_them(
    program, random, identity
):
    """For atoms that are no facts, those that both hold and a query asks for: the same rules."""
    world, sizes = kb.build(**program.arrays())
    whole = fixpoint.least_model(
        world, sizes, max_height=1, max_atoms=10**6, object_identity=identity
    )
    is_binary = (whole.atoms > 0).sum(1) == 3
    rows = [tuple(row) for row in whole.atoms[is_binary].tolist()]
    if not rows:
        return
    queries = torch.tensor(random.sample(rows, min(2, len(rows))))
    expected = partial_fixpoint.restricted_step(
        world, sizes, queries, world.facts[:0], 10**6, identity
    )
    found = partial_fixpoint.answered_step(
        world, sizes, queries, (HEAD, TAIL), 10**6, identity
    )
    assert expected is not None and found is not None

    def derivations(model, index):
        row = index.derivation_keys // sizes.n_rules
        rule = (index.derivation_keys % sizes.n_rules).tolist()
        pairs = zip(map(tuple, model.atoms[row].tolist()), rule)
        # A restricted step holds what agrees in the padding of wider atoms too.
        derived = {
            atom
            for atom in map(tuple, model.atoms[model.height == 1].tolist())
            if any(
                atom[0] == query[0] and atom[place] == query[place]
                for query in queries.tolist()
                for place in (HEAD, TAIL)
            )
        }
        pairs = [pair for pair in pairs if pair[0] in derived]
        assert len(pairs) == len(set(pairs))
        return derived, set(pairs)

    assert derivations(*found) == derivations(*expected)
    found = partial_fixpoint.answered_step(
        world, sizes, queries, (HEAD, TAIL), -1, identity
    )
    assert found is None or not len(found[1].derivation_keys)


@given(programs, st.integers(0, 20))
@settings(max_examples=100)
def test_every_atom_is_held_with_all_rules_that_derive_it(program, n):
    """And so is the sample: some of the derived atoms that are no facts, all of them where there is room."""
    world, sizes = kb.build(**program.arrays())
    world = with_confidence(world, count_rules(world, sizes))
    world = world._replace(support=world.body_pairs)  # no confidence is 0
    whole = fixpoint.least_model(world, sizes, max_height=1, max_atoms=10**6)
    sample = partial_fixpoint.priority_sample(world, sizes, n)
    assert len(sample) == min(n, int((whole.height == 1).sum()))
    assert (fixpoint.atom_height(whole, sample.long()) == 1).all()
    part = partial_fixpoint.restricted_step(
        world, sizes, world.facts[:1], sample, 10**6
    )
    assert part is not None
    model, known = part
    assert (fixpoint.atom_height(model, sample.long()) == 1).all()
    want = consequences.collect_derivations(world, sizes, whole, 1, model.atoms)
    got = list(
        derivability.iter_indexed_derivations(known, sizes, model.atoms, 10**6)
    )
    pairs = lambda parts: sorted(
        pair for part in parts for pair in zip(*map(torch.Tensor.tolist, part))
    )
    assert pairs(got) == pairs([want])


def test_the_sample_is_in_proportion_to_confidence():
    """Two rules of confidence 1 / 5 and 1 / 20 derive 4096 other atoms each: of 1000 drawn, 800 and 200 are theirs.

    Give or take 100: seven standard deviations of a sum of that many draws.
    """
    people = torch.arange(1, 65)
    pair = lambda name: torch.cartesian_prod(
        torch.tensor([name]), people, people
    )
    facts = torch.cat([pair(1), pair(2)])
    rules = np.array([[[3, 65, 66], [1, 65, 66]], [[4, 65, 66], [2, 65, 66]]])
    world, sizes = kb.build(
        facts.numpy(), rules, n_constants=64, n_predicates=4
    )
    n_pairs = torch.tensor([4096.0, 4096.0])
    world = world._replace(
        support=n_pairs / torch.tensor([5.0, 20.0]), body_pairs=n_pairs
    )
    drawn = partial_fixpoint.priority_sample(world, sizes, 1000)
    assert abs(int((drawn[:, 0] == 3).sum()) - 800) < 100 and len(drawn) == 1000
    by_head = torch.bincount(drawn[:, 1], minlength=65)[1:]
    assert by_head.min() > 2 and by_head.max() < 40


def test_too_many_derivations_give_none():
    data = load("family_tree:60:3")
    ready = prover_task.build_task(data, ProverTaskConfig(max_height=1))
    assert (
        partial_fixpoint.restricted_step(
            ready.kb,
            ready.sizes,
            torch.from_numpy(data.facts),
            ready.kb.facts[:0],
            10,
        )
        is None
    )


def test_a_budget_passed_at_height_1_leaves_what_is_asked_for_and_a_sample_to_learn_from():
    data = load("family_tree:60:3")
    n = len(data.facts)
    ready = prover_task.build_task(
        data,
        ProverTaskConfig(
            max_height=1, max_atoms=n + 1, hard_negative_fraction=1.0
        ),
    )
    assert any(
        "only as far as valid and test ask" in note for note in ready.notes
    )
    assert ready.fact_selection == "oracle" and len(
        prover_task.training_world(ready).hard_negatives
    )
    uniform = prover_task.build_task(
        data,
        ProverTaskConfig(
            max_height=1, max_atoms=n + 1, hard_negative_fraction=0.5
        ),
    )
    with pytest.raises(ValueError, match="hard-negative-fraction 1"):
        prover_task.training_world(uniform)
