"""Data sets that come with the package: splits keep their promises, and rules derive what is held out."""

import numpy as np
import pytest

from funcppo.kg.graph.loaders import load
from funcppo.kg.graph.samples import (
    FAMILY_RULES,
    RELATIONS,
    TRIBES,
    make_clans,
    make_family_tree,
)
from tests.kg.graph.python_datalog import consequences, rows, triples

REGIONS = {"africa", "americas", "asia", "europe", "oceania"}
CLANS = [(40, 0), (83, 1), (300, 2), (1500, 0)]
FAMILIES = [(10, 0), (30, 1), (80, 2), (150, 3)]
TRIBE_OF_CLAN = {clan: i for i, tribe in enumerate(TRIBES) for clan in tribe}


def test_generated_data_sets_are_those_of_the_measured_results():
    """Fingerprints and sizes that stand beside results, and a function of the arguments alone."""
    d = make_clans(1500, 0)
    assert d.fingerprint == "04eab0fade0aa148"
    assert (len(d.train), len(d.valid), len(d.test)) == (3372, 155, 179)
    assert (d.n_constants, d.n_duplicates, d.notes) == (1512, 0, ())
    assert d.predicates == ("father", "mother", "clan") and len(d.rules) == 2
    for make, name in ((make_clans, "clans"), (make_family_tree, "family_tree")):  # fmt: skip
        same, other = make(120, 5), make(120, 6)
        loaded = load(f"{name}:120:5")
        assert same.fingerprint == loaded.fingerprint != other.fingerprint
        assert same.name == loaded.name == f"{name}:120:5"


def test_any_number_of_people_from_the_least_makes_a_data_set():
    for seed in range(5):
        for n_people in (40, 41, 47, 1001):
            d = make_clans(n_people, seed)
            people = {name for name in d.entities if name not in TRIBE_OF_CLAN}
            assert len(people) == n_people and d.train.dtype == np.int32
        for n_people in (10, 11, 13, 17, 1000):
            d = make_family_tree(n_people, seed)
            assert d.n_constants == n_people and d.train.dtype == np.int32


def test_too_few_people_or_a_negative_seed_are_refused():
    problem = r"^clans: expected at least 40 people and a seed from 0, got "
    with pytest.raises(ValueError, match=problem + "39 and 0$"):
        load("clans:39:0")
    with pytest.raises(ValueError, match=problem + "40 and -1$"):
        make_clans(40, -1)
    with pytest.raises(ValueError, match="expected at least 10 people"):
        load("family_tree:9:0")


# -- clans


def parents_and_clans(dataset):
    """Father, mother and clan of each person, over all splits."""
    found = {"father": {}, "mother": {}, "clan": {}}
    for table in (dataset.train, dataset.valid, dataset.test):
        for head, relation, tail in triples(dataset, table):
            if relation != "clan":
                head, tail = tail, head
            assert head not in found[relation]
            found[relation][head] = tail
    return found.values()


@pytest.mark.parametrize(("n_people", "seed"), CLANS)
def test_only_clans_that_two_steps_derive_are_held_out(n_people, seed):
    d = make_clans(n_people, seed)
    train, valid, test = map(rows, (d.train, d.valid, d.test))
    if n_people >= 300:
        assert valid and test
    assert not train & valid and not train & test and not valid & test
    clan = d.predicates.index("clan") + 1
    assert {relation for relation, _, _ in valid | test} == {clan}
    assert rows(d.facts) == train
    one = train | consequences(d.rules, train)
    two = one | consequences(d.rules, one)
    assert valid | test <= two
    if n_people == 1500:
        assert not valid | test <= one  # a smaller height is not enough


@pytest.mark.parametrize(("n_people", "seed"), CLANS)
def test_people_marry_in_their_tribe_and_children_have_the_clan_of_descent(
    n_people, seed
):
    father, mother, clan = parents_and_clans(make_clans(n_people, seed))
    assert clan.keys() == {f"p{i}" for i in range(1, n_people + 1)}
    assert father.keys() == mother.keys()
    assert not set(father.values()) & set(mother.values())
    n_adopted = 0
    for child in father:
        clans = clan[father[child]], clan[mother[child]]
        assert clans[0] != clans[1]
        assert TRIBE_OF_CLAN[clans[0]] == TRIBE_OF_CLAN[clans[1]]
        is_patrilineal = TRIBE_OF_CLAN[clans[0]] < 2
        follows, other = clans if is_patrilineal else clans[::-1]
        assert clan[child] in (follows, other)
        n_adopted += clan[child] == other
    # Adoptions are 2 % of the children: 5 standard deviations above that.
    assert n_adopted <= 0.02 * len(father) + 5 * (0.02 * len(father)) ** 0.5
    if n_people == 1500:
        assert n_adopted > 0


def test_both_rules_are_right_about_equally_often():
    father, mother, clan = parents_and_clans(make_clans(1500, 0))
    for parent in (father, mother):
        n_right = sum(clan[parent[child]] == clan[child] for child in parent)
        assert 0.45 < n_right / len(parent) < 0.55


# -- family_tree


@pytest.mark.parametrize(("people", "seed"), FAMILIES)
def test_a_family_tree_holds_exactly_the_kinship_its_parents_define(
    people, seed
):
    d = make_family_tree(people, seed)
    split = [rows(d.train), rows(d.valid), rows(d.test)]
    facts = set.union(*split)
    n_rows = len(d.train) + len(d.valid) + len(d.test)
    assert sum(map(len, split)) == len(facts) == n_rows
    of = {
        name: {(x, y) for r, x, y in facts if r == i}
        for i, name in enumerate(RELATIONS, 1)
    }
    assert of["wife"] == {(w, h) for h, w in of["husband"]}
    male = {x for name in RELATIONS if name in (
        "husband", "father", "son", "brother", "uncle", "nephew") for x, _ in of[name]}  # fmt: skip
    parents: dict[int, set[int]] = {}
    for p, c in of["father"] | of["mother"]:
        parents.setdefault(c, set()).add(p)
    child = {(c, p) for c in parents for p in parents[c]}
    sibling = {
        (a, b)
        for a in parents
        for b in parents
        if a != b and parents[a] == parents[b]
    }
    uncle = {(a, c) for c, p in child for a, z in sibling if z == p}
    nephew = {(c, a) for a, c in uncle}
    for expected, him, her in (
        (child, "son", "daughter"),
        (sibling, "brother", "sister"),
        (uncle, "uncle", "aunt"),
        (nephew, "nephew", "niece"),
    ):
        assert of[him] == {(x, y) for x, y in expected if x in male}
        assert of[her] == expected - of[him]
    couples = {frozenset(pair) for pair in of["husband"]}
    assert all(frozenset(pair) in couples for pair in parents.values())


@pytest.mark.parametrize(("people", "seed"), FAMILIES)
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
    facts = rows(d.train)
    derived = [consequences([rule], facts) for rule in d.rules]
    for i, rule in enumerate(FAMILY_RULES.splitlines()):
        others = derived[:i] + derived[i + 1 :]
        assert derived[i] - set().union(*others), rule


# -- countries


@pytest.fixture(scope="module")
def countries():
    return [load(f"countries_s{i}") for i in (1, 2, 3)]


def test_countries_are_those_of_the_measured_results(countries):
    """Fingerprints that stand beside results; the rules derive in one step all that is held out."""
    assert [(d.fingerprint, len(d.train)) for d in countries] == [
        ("5bfd13c262296d5d", 1114),
        ("4ed6995b5c6db3c6", 1066),
        ("79f2017eb7979d3c", 985),
    ]
    for d in countries:
        held_out = rows(d.valid) | rows(d.test)
        assert len(d.valid) == len(d.test) == 24 and d.notes == ()
        assert held_out <= consequences(d.rules, rows(d.facts))


def test_each_task_leaves_out_what_bouchard_says(countries):
    s1, s2, s3 = (triples(d, d.train) for d in countries)
    first, *others = (
        triples(d, d.valid) | triples(d, d.test) for d in countries
    )
    assert others == [first, first]
    held_out = {h for h, _, _ in first}
    neighbours = {t for h, r, t in s1 if r == "neighborOf" and h in held_out}
    region = lambda triple: triple[1] == "locatedIn" and triple[2] in REGIONS
    assert not s1 & first and not s3 - s2 and not s2 - s1
    assert s1 - s2 == {
        t for t in s1 if t[0] in held_out and t[1] == "locatedIn"
    }
    assert s2 - s3 == {t for t in s2 if t[0] in neighbours and region(t)}
