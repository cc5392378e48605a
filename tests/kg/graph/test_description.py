"""Descriptions of data sets: worked by hand, and equal to loops over Python sets."""

import math

import numpy as np
import pytest

from funcppo.kg.graph import loaders
from funcppo.kg.graph.loaders import describe, from_text, from_triples, load

TRAIN = [("a", "r", "b"), ("b", "r", "a"), ("a", "r", "c"), ("d", "r", "d")]
TRAIN += [("a", "s", "e"), ("e", "t", "a"), ("f", "t", "c")]
VALID = [("c", "s", "a"), ("a", "s", "d"), ("x", "new", "d")]


def test_a_small_graph_by_hand():
    found = describe(from_triples(TRAIN, VALID, [("a", "r", "b")]))
    valid, test = found.splits["valid"], found.splits["test"]
    assert valid == (3, 4, 2, 0, 1, 1, 1)
    assert (test.n_known, test.n_linked) == (1, 1)
    assert found.splits["train"].n_linked == 4
    r, t, s, new = found.relations
    assert (r.name, r.n_facts, r.n_test) == ("r", 4, 1)
    assert (r.tails_per_head, r.heads_per_tail) == (4 / 3, 1.0)
    assert (r.functional_share, r.inverse_functional_share) == (2 / 3, 1.0)
    assert (r.symmetric_share, r.inverse) == (2 / 3, None)
    assert (t.inverse, t.inverse_share, t.symmetric_share) == ("s", 0.5, 0.0)
    assert (s.inverse, s.inverse_share) == ("t", 1.0)
    assert new.n_facts == 0 and math.isnan(new.functional_share)
    # x has no fact, a and d have 5 and 2 ends of facts
    assert found.degree_quantiles["0"] == 0
    assert found.degree_quantiles["1"] == 5


@pytest.mark.parametrize("seed", range(3))
def test_random_graphs_against_sets(seed):
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, [8, 3, 8], size=(90, 3)).tolist()
    triples = [(f"e{h}", f"r{r}", f"e{t}") for h, r, t in rows]
    train, test = triples[:60], triples[60:]
    found = describe(from_triples(train, [], test))
    facts = set(train)
    pairs = [frozenset((h, t)) for h, _, t in facts]
    assert found.splits["test"].n_known == sum(t in facts for t in test)
    linked = [frozenset((h, t)) in pairs for h, _, t in test]
    assert found.splits["test"].n_linked == sum(linked)
    twice = [pairs.count(pair) > 1 for pair in pairs]
    assert found.splits["train"].n_linked == sum(twice)
    for relation in found.relations:
        own = {(h, t) for h, r, t in facts if r == relation.name and h != t}
        inverse = sum((t, h) in own for h, t in own)
        assert relation.symmetric_share == inverse / len(own)
        shares = [
            sum((t, other.name, h) in facts for h, t in own) / len(own)
            for other in found.relations
            if other is not relation
        ]
        assert relation.inverse_share == max(shares)


def test_too_many_inverse_pairs_are_told_and_not_searched(monkeypatch):
    monkeypatch.setattr(loaders, "MAX_PAIRS", 1)
    found = describe(from_triples(TRAIN))
    assert found.relations[0].symmetric_share is None
    assert "over 1 pairs" in found.notes[-1]


def test_facts_that_are_no_triples_are_counted():
    found = describe(from_text("p(a). q(a, b). r(a, b, c)."))
    assert [relation.name for relation in found.relations] == ["q"]
    assert found.n_other_atoms == 2
    with pytest.raises(ValueError, match="facts of two arguments"):
        describe(from_text("p(a)."))


def test_the_embedded_countries_are_symmetric_neighbours():
    relations = {r.name: r for r in describe(load("countries_s1")).relations}
    assert relations["neighborOf"].symmetric_share == 1.0
    assert relations["locatedIn"].symmetric_share == 0.0
