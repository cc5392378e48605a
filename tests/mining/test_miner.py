"""The miner: counts worked by hand, equal to brute force over Python sets; which rules are kept; what a budget does."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from funcppo.data import load
from funcppo.logic import kb
from funcppo.logic.consequences import with_confidence
from funcppo.mining import miner
from funcppo.mining.config import MiningConfig
from tests import oracles
from tests.learning import DATA
from tests.mining.brute_force import (
    X,
    Y,
    brute_force,
    clauses_of,
    constant_clauses,
    counts_of,
    graphs,
    mined,
    path_clauses,
)
from tests.oracles import Program

needs_data = pytest.mark.skipif(
    not DATA.is_dir(), reason=f"no data sets in {DATA}"
)


def test_counts_worked_by_hand():
    """likes(1,2), likes(2,1), likes(2,3), knows(1,2): the inverse derives likes(1,2) and (2,1) but also (3,2).

    knows(X,Y) :- likes(X,Y) is right once: were that fact unknown, nothing would speak for the rule.
    """
    found = mined([(1, 1, 2), (1, 2, 1), (1, 2, 3), (2, 1, 2)], max_length=1)
    assert clauses_of(found.rules) == [((1, X, Y), (1, Y, X))]
    assert counts_of(found.rules) == [(2, 0, 3, 2)]
    assert miner.confidence(found.rules).tolist() == pytest.approx([2 / 3])
    assert miner.smoothed_confidence(found.rules).tolist() == pytest.approx(
        [2 / 8]
    )
    assert miner.held_out_smoothed_confidence(
        found.rules
    ).tolist() == pytest.approx([1 / 7])
    assert (
        found.rules.head_facts.tolist() == [3]
        and found.n_candidates == 5
        and found.notes == ()
    )


@given(graphs, st.booleans())
@settings(max_examples=40)
def test_what_is_mined_is_counted_as_by_brute_force(facts, constants):
    rules = mined(facts, constants=constants).rules
    assert counts_of(rules) == brute_force(facts, clauses_of(rules))
    assert not rules.std_error.any()
    assert (torch.diff(miner.smoothed_confidence(rules)) <= 0).all()


@given(graphs, st.integers(1, 3))
@settings(max_examples=25)
def test_every_fact_keeps_the_best_rules_that_derive_it_and_no_rule_is_kept_for_nothing(
    facts, votes
):
    clauses = path_clauses(2) + constant_clauses()
    score = {
        clause: (support - circular - 1)
        / (pairs - circular - 1 + miner.SMOOTHING_COUNT)
        for clause, (support, circular, pairs, _) in zip(
            clauses, brute_force(facts, clauses)
        )
    }
    derives = lambda rules: oracles.consequences(
        Program(6, (2, 2), tuple(facts), tuple(rules)), leave_one_out=True
    )
    scores = {fact: [] for fact in facts}
    for i, atom in derives(clauses):
        if atom in scores and score[clauses[i]] > 0:
            scores[atom].append(score[clauses[i]])
    best = {
        fact: sorted(values, reverse=True)[:votes]
        for fact, values in scores.items()
    }
    kept = clauses_of(
        mined(facts, max_length=2, constants=True, votes_per_fact=votes).rules
    )
    deriving = {fact: [] for fact in facts}
    for i, atom in derives(kept):
        if atom in best:
            deriving[atom].append((score[kept[i]], i))
    for fact, values in best.items():
        assert sorted((value for value, _ in deriving[fact]), reverse=True)[
            : len(values)
        ] == pytest.approx(values)
    won = {
        i
        for fact in facts
        for value, i in deriving[fact]
        if best[fact] and value >= best[fact][-1]
    }
    assert won == set(range(len(kept)))


def test_exact_counts_are_whole_numbers():
    """Also where n (x / n) is not x in float64, as for n = 49."""
    data = load("family_tree:300:5")
    found = miner.mine_rules(
        torch.from_numpy(data.facts),
        data.n_predicates,
        data.n_constants,
        MiningConfig(max_length=2),
    ).rules
    assert not found.std_error.any() and len(found.std_error) > 20
    for counts in (
        found.support,
        found.circular_support,
        found.body_pairs,
        found.pca_pairs,
    ):
        assert torch.equal(counts, counts.round())


@pytest.mark.parametrize("seed", range(4))
def test_a_sample_that_shows_no_difference_between_sources_is_not_taken_for_exact(
    seed,
):
    """knows leaves 600 entities, of which 256 are sampled; only the last one's friend likes anything, 40 things."""
    knows = [(1, i, 1000 + i) for i in range(1, 601)]
    likes, head = (
        [(2, 1600, 2000 + j) for j in range(40)],
        [(3, 600, 2000 + j) for j in range(6)],
    )
    found = miner.mine_rules(
        torch.tensor(knows + likes + head),
        3,
        2100,
        MiningConfig(max_length=2, seed=seed),
    ).rules
    counts = dict(
        zip(map(tuple, found.labels.tolist()), found.body_pairs.tolist())
    )
    assert counts[4, 0, 2, -1] == 40 and not found.std_error.any()


def test_thresholds_leave_out_what_is_below_them():
    facts = [tuple(row) for row in load("family_tree:30:1").facts.tolist()]
    graph = torch.tensor(facts), 12, 400
    found = miner.mine_rules(
        *graph, MiningConfig(max_length=2, min_support=4, min_confidence=0.3)
    ).rules
    assert (
        len(found.support)
        and (found.support - found.circular_support >= 4).all()
    )
    assert (miner.leave_one_out_confidence(found) >= 0.3).all()


@pytest.mark.parametrize(
    "facts",
    [np.zeros((0, 3)), [[1, 1, 2]], [[1, 1, 0], [2, 3, 0]], [[1, 1, 2, 3]]],
)
def test_a_graph_without_a_pattern_has_no_rule(facts):
    table = torch.tensor(np.array(facts, dtype=np.int64))
    found = miner.mine_rules(
        table, 2, 6, MiningConfig(min_support=1, constants=True)
    )
    assert len(found.rules.support) == 0 and miner.rule_atoms(
        found.rules, 6
    ).shape == (0, 4, 3)
    assert bool(found.notes) == bool(
        (len(table) and (table[:, 2] == 0).any()) or table.shape[1] > 3
    )


def test_a_random_graph_has_no_confident_rule():
    random = Random(0)
    facts = sorted(
        {
            tuple(random.randint(1, n) for n in (4, 300, 300))
            for _ in range(3000)
        }
    )
    found = miner.mine_rules(
        torch.tensor(facts),
        4,
        300,
        MiningConfig(constants=True, min_confidence=0.2),
    )
    assert found.n_candidates == 0


def test_the_rules_that_made_a_graph_are_found_again():
    """family_tree is made by exact rules: `husband` and `wife` imply each other; every predicate has an exact rule."""
    data = load("family_tree:300:5")
    facts = torch.from_numpy(
        np.concatenate([data.facts, data.valid, data.test])
    )
    found = miner.mine_rules(
        facts, data.n_predicates, data.n_constants, MiningConfig()
    ).rules
    table = {name: i for i, name in enumerate(data.predicates, 1)}
    kept = {
        tuple(map(tuple, rule[rule[:, 0] > 0].tolist()))
        for rule in miner.rule_atoms(found, data.n_constants)
    }
    x, y = data.n_constants + 1, data.n_constants + 2
    assert ((table["husband"], x, y), (table["wife"], y, x)) in kept
    assert ((table["wife"], x, y), (table["husband"], y, x)) in kept
    exact = miner.leave_one_out_confidence(found) == 1.0
    assert {int(p) for p in found.labels[exact, 0] // 2 + 1} == set(
        range(1, 13)
    )


def test_a_sample_is_within_its_error_and_the_same_seed_gives_the_same_rules():
    """Of about 30 estimates no more than a few are off by over 3 standard errors."""
    data = load("family_tree:2000:2")
    run = lambda **settings: miner.mine_rules(
        torch.from_numpy(data.facts),
        data.n_predicates,
        data.n_constants,
        MiningConfig(max_length=3, **settings),
    )
    one, two, other = (
        run(max_rows=40_000),
        run(max_rows=40_000),
        run(max_rows=40_000, seed=1),
    )
    assert all(torch.equal(a, b) for a, b in zip(one.rules, two.rules))
    assert not all(torch.equal(a, b) for a, b in zip(one.rules, other.rules))
    sampled = one.rules.std_error > 0
    assert sampled.sum() > 10 and any(
        "estimated counts" in note for note in one.notes
    )
    world, sizes = kb.build(
        data.facts,
        miner.rule_atoms(one.rules, data.n_constants).numpy(),
        n_constants=data.n_constants,
        n_predicates=data.n_predicates,
    )
    truth = kb.rule_confidence(with_confidence(world, sizes))
    off = ((miner.confidence(one.rules) - truth).abs() / one.rules.std_error)[
        sampled
    ]
    assert (off > 3).float().mean() < 0.1
    assert torch.allclose(
        miner.confidence(one.rules)[~sampled],
        truth[~sampled].double(),
        atol=1e-6,
    )


def test_what_the_work_does_not_suffice_for_is_said_even_where_no_rule_is_found():
    data = load("family_tree:60:2")
    run = lambda work: miner.mine_rules(
        torch.from_numpy(data.facts),
        data.n_predicates,
        data.n_constants,
        MiningConfig(max_length=1, max_rows=work),
    )
    assert run(1).notes == (
        "length 1: 12 of 12 heads were searched through a sample of their facts",
    )
    assert (
        not len(run(1).rules.support)
        and len(run(10**6).rules.support)
        and run(10**6).notes == ()
    )


def test_a_time_limit_ends_in_what_was_found_by_then():
    data = load("family_tree:2000:2")
    cfg = MiningConfig(constants=True, time_limit=0.05)
    found = miner.mine_rules(
        torch.from_numpy(data.facts), data.n_predicates, data.n_constants, cfg
    )
    assert any("stopped after 0.05 seconds" in note for note in found.notes)
    assert found.seconds < 10
    assert found.rules.std_error.isfinite().all()


def test_a_time_limit_leaves_no_count_of_a_kept_rule_uncertain():
    """Body pairs were all counted when the time was up; PCA pairs, counted last, are too."""
    data, cfg = load("family_tree:2000:2"), MiningConfig(max_length=2)
    facts = torch.from_numpy(data.facts)
    whole = miner.mine_rules(
        facts, data.n_predicates, data.n_constants, cfg
    ).rules
    graph = miner._make_context(
        facts.long(), data.n_predicates, data.n_constants, cfg, lambda: True
    )
    again = miner._with_pca_pairs(
        graph, whole._replace(pca_pairs=torch.zeros_like(whole.support))
    )
    assert (
        torch.equal(again.pca_pairs, whole.pca_pairs)
        and not again.pca_std_error.any()
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_finds_the_same_rules():
    data, cfg = (
        load("family_tree:2000:2"),
        MiningConfig(constants=True, max_rows=40_000),
    )
    found = [
        miner.mine_rules(
            torch.from_numpy(data.facts).to(device),
            data.n_predicates,
            data.n_constants,
            cfg,
        ).rules
        for device in ("cpu", "cuda")
    ]
    assert all(
        torch.allclose(a.double(), b.cpu().double()) for a, b in zip(*found)
    )


@needs_data
@pytest.mark.parametrize("name", ["umls", "countries_S2"])
def test_counts_are_those_of_the_knowledge_base(name):
    data = load(DATA / name)
    cfg = MiningConfig(max_length=2, constants=True)
    found = miner.mine_rules(
        torch.from_numpy(data.facts), data.n_predicates, data.n_constants, cfg
    ).rules
    world, sizes = kb.build(
        data.facts,
        miner.rule_atoms(found, data.n_constants).numpy(),
        n_constants=data.n_constants,
        n_predicates=data.n_predicates,
    )
    world = with_confidence(world, sizes)
    assert torch.equal(world.support, found.support.float()) and torch.equal(
        world.body_pairs, found.body_pairs.float()
    )
