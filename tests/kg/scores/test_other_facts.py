"""Other facts of candidates: worked by hand, and equal to counts over sets of atoms."""

import pytest
import torch
from hypothesis import given

from funcppo.kg.config import ProverTaskConfig
from funcppo.kg.graph import loaders
from funcppo.kg.logic import kb
from funcppo.kg.logic.derive import make_label
from funcppo.kg.logic.fixpoint import count_rules, with_confidence
from funcppo.kg.logic.kb import HEAD, TAIL
from funcppo.kg.scores import rules as rule_scores
from funcppo.kg.search.task import build_task, with_other_facts
from tests import oracles
from tests.oracles import programs

# Everybody has one city, and some cities have several people.
LIVES = [
    ("ann", "lives", "rome"),
    ("bob", "lives", "rome"),
    ("cid", "lives", "oslo"),
]
FRIENDS = [
    ("ann", "friend", "bob"),
    ("ann", "friend", "cid"),
    ("dan", "friend", "cid"),
    ("dan", "friend", "ann"),
]
RULES = """
lives(X, Y) :- friend(X, Z), lives(Z, Y)
lives(X, Y) :- friend(Z, X), lives(Z, Y)
"""


def small_task(**settings):
    dataset = loaders.from_triples(LIVES + FRIENDS, rules=RULES)
    return build_task(dataset, ProverTaskConfig(max_height=1, **settings))


def test_an_own_fact_is_no_other_fact():
    task = with_other_facts(small_task())
    assert task.other_facts is not None
    ids = {name: i for i, name in enumerate(task.dataset.entities, 1)}
    lives = task.dataset.predicates.index("lives") + 1
    pairs = [("ann", "rome"), ("cid", "oslo"), ("cid", "rome"), ("dan", "oslo")]
    atoms = torch.tensor([[lives, ids[x], ids[y]] for x, y in pairs])
    for side, expected in ((HEAD, [0, 0, 1, 0]), (TAIL, [1, 0, 2, 1])):
        found = rule_scores.count_other_facts_of(
            task.kb, task.sizes, task.other_facts.degrees, atoms, side
        )
        assert found.tolist() == expected


def count_sets(program, found):
    """The counts by predicate and side, and by rule, from the sets of atoms that the rules derive."""
    facts = set(program.facts)

    def others(atom, side):
        return [
            fact
            for fact in facts - {atom}
            if fact[0] == atom[0] and fact[side] == atom[side]
        ]

    of_facts, of_rules = {}, []
    for predicate, arity in enumerate(program.arity, 1):
        own = [fact for fact in facts if fact[0] == predicate]
        for side in (HEAD, TAIL) if arity == 2 else ():
            n_with = sum(bool(others(fact, side)) for fact in own)
            of_facts |= {(predicate, side): (len(own), n_with)}
    for rule, (head, *_) in enumerate(program.rules):
        new = {atom for i, atom in found if i == rule} - facts
        if len(head) != 3:
            of_rules.append((0, 0, 0))
            continue
        n_with = (sum(bool(others(a, s)) for a in new) for s in (HEAD, TAIL))
        of_rules.append((len(new), *n_with))
    return of_facts, of_rules


@pytest.mark.parametrize("object_identity", [False, True])
@given(program=programs)
def test_counts_are_those_of_sets(program, object_identity):
    world, sizes = kb.build(**program.arrays())
    counts = rule_scores.count_other_facts(
        world, sizes, object_identity=object_identity
    )
    of_facts, of_rules = count_sets(
        program,
        oracles.consequences(program, False, object_identity),
    )
    for (predicate, side), expected in of_facts.items():
        label = int(make_label(torch.tensor(predicate), side))
        assert expected == (
            int(counts.n_facts[label]),
            int(counts.n_facts_with[label]),
        )
    got = torch.cat([counts.n_derived[:, None], counts.n_derived_with], 1)
    assert got.tolist() == [list(row) for row in of_rules]

    # The shares weigh the rules by their confidences, in float64.
    rule_counts = count_rules(world, sizes, object_identity=object_identity)
    world = with_confidence(world, rule_counts, 3.0)
    shares = rule_scores.other_fact_shares(world, counts)
    support = rule_counts.support - rule_counts.circular_support
    pairs = rule_counts.body_pairs - rule_counts.circular_support + 3
    for (predicate, side), (n_facts, n_with) in of_facts.items():
        label = int(make_label(torch.tensor(predicate), side))
        rules = [
            (c, of_rules[i])
            for i, c in enumerate((support.double() / pairs).tolist())
            if program.rules[i][0][0] == predicate
        ]
        assert float(shares.of_facts[label]) == (n_with + 1) / (n_facts + 2)
        n_new = sum(c * row[0] for c, row in rules)
        n_new_with = sum(c * row[side] for c, row in rules)
        assert float(shares.of_derived[label]) == pytest.approx(
            (n_new_with + 1) / (n_new + 2), rel=1e-14
        )
