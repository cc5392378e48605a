"""The hash of the known facts depends on names and facts alone."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from funcppo.kg.graph.dataset import facts_digest, order_facts
from funcppo.kg.graph.loaders import from_triples
from tests.kg.graph.clause_strategies import NAMES

TRIPLES = st.lists(st.tuples(NAMES, NAMES, NAMES), min_size=1, max_size=6)


@given(TRIPLES, TRIPLES, st.integers(0, 9))
def test_sets_of_facts_have_one_digest_whatever_their_order(one, two, seed):
    first = from_triples(one)
    shuffled = random.Random(seed).sample(one, len(one))
    again = from_triples(shuffled + one[:1], test=two)
    assert facts_digest(first) == facts_digest(again)
    assert (facts_digest(first) == facts_digest(from_triples(two))) == (
        set(one) == set(two)
    )


def test_numbers_follow_the_order_of_names():
    dataset = from_triples([("c", "q", "a"), ("b", "p", "c")])
    facts, predicates, entities = order_facts(dataset)
    assert facts.tolist() == [[1, 2, 3], [2, 3, 1]]
    assert [dataset.entities[i - 1] for i in entities[1:]] == ["a", "b", "c"]
    assert [dataset.predicates[i - 1] for i in predicates[1:]] == ["p", "q"]
