"""Counts of mined rules under object identity: worked by hand, as by brute force, and within a budget."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from funcppo.kg.graph.loaders import from_triples
from funcppo.kg.graph.rule_tables import RuleStatistics
from funcppo.kg.graph.writers import to_clauses
from funcppo.kg.logic.joins import RowBudget
from funcppo.kg.mining.config import MiningConfig
from funcppo.kg.run import identity_counts, rule_cache
from funcppo.kg.run.identity_counts import count_mined_rules
from funcppo.kg.search.config import ProverTaskConfig
from funcppo.kg.search.task import build_task

ENOUGH = 10**9


def mine(triples, **settings):
    dataset = from_triples(triples)
    cfg = MiningConfig(
        min_support=1, min_confidence=0.0, votes_per_fact=200, **settings
    )
    return rule_cache.mine_dataset(dataset, cfg)


def count(mined, max_rows=ENOUGH):
    budget = RowBudget(max_rows)
    return count_mined_rules(mined.dataset, mined.statistics, budget)


def is_variable(term):
    return not isinstance(term, str)


def brute_force(triples, clause):
    """(predictions, right ones) over all bindings of variables to different entities that the rule does not name."""
    facts = set(triples)
    atoms = [clause.head, *clause.body]
    terms = [term for atom in atoms for term in atom.args]
    variables = sorted({t for t in terms if is_variable(t)}, key=repr)
    named = {t for t in terms if not is_variable(t)}
    entities = {end for a, _, b in triples for end in (a, b)} - named
    heads = set()
    for values in itertools.permutations(sorted(entities), len(variables)):
        binding = dict(zip(variables, values))
        head, *body = (
            (x, atom.predicate, y)
            for atom in atoms
            for x, y in [[binding.get(t, t) for t in atom.args]]
        )
        if facts.issuperset(body):
            heads.add(head)
    return len(heads), len(heads & facts)


def test_a_walk_that_comes_back_does_not_count():
    """p(a, b) follows by p(a, b), q(b, b) too, where Z = Y; p(a, c) by Z = b alone."""
    triples = [
        ("a", "p", "b"),
        ("a", "p", "c"),
        ("b", "q", "b"),
        ("b", "q", "c"),
    ]
    rules = "p(X, Y) :- p(X, Z), q(Z, Y)"
    dataset = from_triples(triples, rules=rules)
    plain = RuleStatistics(*(np.array([n]) for n in (0.5, 2, 2, 1, 2, 2, 0, 0)))
    counted = count_mined_rules(dataset, plain, RowBudget(ENOUGH)).statistics
    assert (counted.body_pairs[0], counted.support[0]) == (1, 1)
    (clause,) = to_clauses(dataset)[1]
    assert brute_force(triples, clause) == (1, 1)


@pytest.mark.parametrize("max_length", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("seed", [0, 1])
def test_counts_are_those_of_brute_force_and_of_the_prover(max_length, seed):
    generator = random.Random(seed)
    names = "abcdefg"
    triples = {
        (generator.choice(names), "pq"[i % 2], generator.choice(names))
        for i in range(14)
    }
    if max_length > 2:  # of dense graphs long rules are no good
        triples = {(names[i], "p", names[(i + 1) % 7]) for i in range(7)}
        triples |= {
            (names[i], "q", names[(i + max_length) % 7]) for i in range(3)
        }
        triples.add((*generator.sample(["a", "e"], 1), "p", "c"))
    triples = sorted(triples)
    constants = max_length == 2
    mined = mine(triples, max_length=max_length, constants=constants)
    counted = count(mined)
    clauses = to_clauses(counted.dataset)[1]
    statistics = counted.statistics
    got = list(zip(statistics.body_pairs.tolist(), statistics.support.tolist()))
    lengths = [len(clause.body) for clause in clauses]
    longest_first = sorted(range(len(clauses)), key=lambda i: -lengths[i])
    sample = longest_first[:60] + longest_first[-20:]
    assert max_length == lengths[sample[0]]
    for i in sample:
        assert got[i] == brute_force(triples, clauses[i])
    left_out = [
        clause
        for clause, kept in zip(to_clauses(mined.dataset)[1], counted.is_kept)
        if not kept
    ]
    assert all(brute_force(triples, rule)[1] == 0 for rule in left_out[:80])
    assert bool(left_out) == bool(counted.notes)

    # What reads the rules counts so too.
    cfg = ProverTaskConfig(max_height=1, smoothing=None, object_identity=True)
    kb = build_task(counted.dataset, cfg).kb
    assert list(zip(kb.body_pairs.tolist(), kb.support.tolist())) == got


def test_what_the_budget_or_memory_do_not_suffice_for_is_said(monkeypatch):
    triples = [(f"e{i}", "p", f"e{i + 1}") for i in range(9)]
    triples += [(b, "q", a) for a, _, b in triples]
    mined = mine(triples, max_length=2)
    none = count(mined, max_rows=1)
    n_rules = len(mined.dataset.rules)
    assert none.notes == (
        f"{n_rules} rules have counts without object identity: the limits of time, rows or memory kept them from being "
        "counted with it",
    )
    assert none.statistics.support.tolist() == mined.statistics.support.tolist()
    monkeypatch.setattr(identity_counts, "MAX_PREDICTIONS", 1)
    assert count(mined).notes == none.notes


def test_an_interrupt_keeps_what_was_counted():
    triples = [(f"e{i}", "p", f"e{i + 1}") for i in range(9)]
    triples += [(b, "q", a) for a, _, b in triples]
    mined = mine(triples, max_length=1)

    def interrupt(done, total):
        raise KeyboardInterrupt

    budget = RowBudget(ENOUGH)
    counted = count_mined_rules(
        mined.dataset, mined.statistics, budget, interrupt
    )
    assert isinstance(counted.interrupt, KeyboardInterrupt)
    assert len(counted.dataset.rules) == len(mined.dataset.rules) == 2
    assert "1 rules" in counted.notes[0] and "an interrupt" in counted.notes[0]
