"""family_tree: the facts are those that the parents define, and the rules derive what is held out."""

import numpy as np
import pytest

from funcppo.kg.graph.loaders import load
from funcppo.kg.graph.rules import format_atom
from funcppo.kg.graph.samples import FAMILY_RULES as RULES
from funcppo.kg.graph.samples import RELATIONS, make_family_tree
from tests.kg.graph.python_datalog import consequences, rows


@pytest.mark.parametrize(
    ("people", "seed"), [(10, 0), (30, 1), (80, 2), (150, 3)]
)
def test_a_family_tree_holds_exactly_the_kinship_its_parents_define(
    people, seed
):
    d = make_family_tree(people, seed)
    split = [rows(d.train), rows(d.valid), rows(d.test)]
    facts = set.union(*split)
    assert (
        sum(map(len, split))
        == len(facts)
        == len(d.train) + len(d.valid) + len(d.test)
    )
    of = {
        name: {(x, y) for r, x, y in facts if r == i}
        for i, name in enumerate(RELATIONS, 1)
    }
    assert of["wife"] == {(w, h) for h, w in of["husband"]}
    parents: dict[int, set[int]] = {}
    for p, c in of["father"] | of["mother"]:
        parents.setdefault(c, set()).add(p)
    male = {
        x
        for name in ("husband", "father", "son", "brother", "uncle", "nephew")
        for x, _ in of[name]
    }
    female = {
        x
        for name in ("wife", "mother", "daughter", "sister", "aunt", "niece")
        for x, _ in of[name]
    }
    assert not male & female
    child = {(c, p) for c in parents for p in parents[c]}
    sibling = {
        (a, b)
        for a in parents
        for b in parents
        if a != b and parents[a] == parents[b]
    }
    uncle = {(a, c) for c, p in child for a, z in sibling if z == p}
    nephew = {(c, a) for a, c in uncle}
    for relation, (him, her) in {
        "child": ("son", "daughter"),
        "sibling": ("brother", "sister"),
        "uncle": ("uncle", "aunt"),
        "nephew": ("nephew", "niece"),
    }.items():
        expected = {
            "child": child,
            "sibling": sibling,
            "uncle": uncle,
            "nephew": nephew,
        }[relation]
        assert of[him] == {(x, y) for x, y in expected if x in male} and of[
            her
        ] == {(x, y) for x, y in expected if x in female}
        assert of[him] | of[her] == expected
    couples = {frozenset(pair) for pair in of["husband"]}
    assert all(frozenset(pair) in couples for pair in parents.values())


@pytest.mark.parametrize(
    ("people", "seed"), [(10, 0), (30, 1), (80, 2), (150, 3)]
)
def test_the_rules_are_sound_and_two_steps_derive_all_that_is_held_out(
    people, seed
):
    d = make_family_tree(people, seed)
    train, held_out = rows(d.train), rows(d.valid) | rows(d.test)
    one = train | consequences(d.rules, train)
    two = one | consequences(d.rules, one)
    assert held_out <= two <= train | held_out
    assert len(d.valid) and len(d.test)
    if people == 150:
        assert held_out - one and len(held_out) > 0.15 * len(train)


def test_the_rules_are_not_redundant():
    """Without any one of the rules, some fact is derived no more in one step."""
    d = make_family_tree(300, 0)
    everything = [
        consequences(d.rules[i : i + 1], rows(d.train))
        for i in range(len(d.rules))
    ]
    for i in range(len(d.rules)):
        assert everything[i] - set().union(
            *(e for j, e in enumerate(everything) if j != i)
        ), RULES.splitlines()[i]


def test_a_family_tree_is_a_function_of_its_arguments():
    same, other = load("family_tree:40:5"), load("family_tree:40:6")
    assert (
        same.fingerprint
        == make_family_tree(40, 5).fingerprint
        != other.fingerprint
    )
    assert (same.name, same.n_constants, same.entities[0]) == (
        "family_tree:40:5",
        40,
        "p1",
    )
    assert format_atom(same, same.train[0]) in {
        format_atom(same, a) for a in same.facts
    }


@pytest.mark.parametrize("people", [10, 11, 13, 17, 1000])
def test_any_number_of_people_makes_a_tree(people):
    for seed in range(5):
        d = make_family_tree(people, seed)
        assert d.n_constants == people and d.train[:, 1:].max() <= people
        assert d.train.dtype == np.int32


def test_too_few_people_are_refused():
    with pytest.raises(
        ValueError,
        match="expected at least 10 people and a seed from 0, got 9 and 0",
    ):
        load("family_tree:9:0")
