"""The embedded sets: the splits keep their promises, and the rules derive what is held out."""

import numpy as np
import pytest

from funcppo.data import format_atom, load, make_family_tree
from funcppo.data.family_tree import RELATIONS, RULES
from funcppo.data.loaders import EMBEDDED_DIR

REGIONS = {"africa", "americas", "asia", "europe", "oceania"}


def consequences(rules, known):
    """One step of T_P over Python sets: the heads of all rule instances whose body is known."""
    index: dict[tuple, list[tuple[int, ...]]] = {}  # by predicate, and by predicate and one argument
    for p, x, y in known:
        for key in ((p, None, None), (p, x, None), (p, None, y)):
            index.setdefault(key, []).append((x, y))
    found = set()
    for rule in rules:
        head, *body = [tuple(map(int, atom)) for atom in rule if atom[0]]
        bindings: list[dict[int, int]] = [{}]
        for p, x, y in body:
            extended = []
            for b in bindings:
                pairs = index.get((p, b.get(x), None if x in b else b.get(y)), [])
                extended += [{**b, x: u, y: v} for u, v in pairs if b.get(x, u) == u and b.get(y, v) == v]
            bindings = extended
        found |= {(head[0], b[head[1]], b[head[2]]) for b in bindings}
    return found


def rows(table):
    return {tuple(map(int, row)) for row in table}


def triples(dataset, table):
    names = dataset.entities
    return {(names[h - 1], dataset.predicates[r - 1], names[t - 1]) for r, h, t in table.tolist()}


@pytest.fixture(scope="module")
def countries():
    return [load(f"countries_s{i}") for i in (1, 2, 3)]


def test_countries_have_five_regions_and_twenty_four_queries_a_split(countries):
    for i, d in enumerate(countries, 1):
        assert (d.predicates, len(d.valid), len(d.test), len(d.rules)) == (("locatedIn", "neighborOf"), 24, 24, i)
        located = [t for t in triples(d, d.train) if t[1] == "locatedIn"]
        regions = {t for _, _, t in located} - {h for h, _, _ in located}
        assert regions == REGIONS
        queries = triples(d, d.valid) | triples(d, d.test)
        assert len({h for h, _, _ in queries}) == 48 and {t for _, _, t in queries} <= regions
        assert len(d.entities) == 245 + 24 + 5 and d.notes == ()


def test_each_country_to_be_found_has_a_train_neighbour_in_its_region(countries):
    d = countries[0]
    queries, train = triples(d, d.valid) | triples(d, d.test), triples(d, d.train)
    held_out = {h for h, _, _ in queries}
    for country, _, region in queries:
        neighbours = {t for h, r, t in train if (h, r) == (country, "neighborOf")} - held_out
        assert any((n, "locatedIn", region) in train for n in neighbours)
    assert all((t, r, h) in train for h, r, t in train if r == "neighborOf")


def test_each_task_leaves_out_what_bouchard_says(countries):
    s1, s2, s3 = (triples(d, d.train) for d in countries)
    queries = triples(countries[0], countries[0].valid) | triples(countries[0], countries[0].test)
    for d in countries[1:]:
        assert triples(d, d.valid) | triples(d, d.test) == queries
    held_out = {h for h, _, _ in queries}
    neighbours = {t for h, r, t in s1 if r == "neighborOf" and h in held_out}
    region = lambda triple: triple[1] == "locatedIn" and triple[2] in REGIONS
    assert not s1 & queries and not s3 - s2 and not s2 - s1
    assert s1 - s2 == {t for t in s1 if t[0] in held_out and t[1] == "locatedIn"}
    assert s2 - s3 == {t for t in s2 if t[0] in neighbours and region(t)}
    assert {h for h, r, t in s3 if h in neighbours - held_out and r == "locatedIn"} == neighbours - held_out


def test_one_step_of_the_rules_derives_every_query(countries):
    for d in countries:
        assert rows(d.valid) | rows(d.test) <= consequences(d.rules, rows(d.facts))


def test_the_source_and_licence_are_stated():
    text = (EMBEDDED_DIR / "SOURCE.md").read_text()
    assert all(word in text for word in ("mledoze/countries", "5.1.0", "ODbL"))


@pytest.mark.parametrize(("people", "seed"), [(10, 0), (30, 1), (80, 2), (150, 3)])
def test_a_family_tree_holds_exactly_the_kinship_its_parents_define(people, seed):
    d = make_family_tree(people, seed)
    split = [rows(d.train), rows(d.valid), rows(d.test)]
    facts = set.union(*split)
    assert sum(map(len, split)) == len(facts) == len(d.train) + len(d.valid) + len(d.test)
    of = {name: {(x, y) for r, x, y in facts if r == i} for i, name in enumerate(RELATIONS, 1)}
    assert of["wife"] == {(w, h) for h, w in of["husband"]}
    parents: dict[int, set[int]] = {}
    for p, c in of["father"] | of["mother"]:
        parents.setdefault(c, set()).add(p)
    male = {x for name in ("husband", "father", "son", "brother", "uncle", "nephew") for x, _ in of[name]}
    female = {x for name in ("wife", "mother", "daughter", "sister", "aunt", "niece") for x, _ in of[name]}
    assert not male & female
    child = {(c, p) for c in parents for p in parents[c]}
    sibling = {(a, b) for a in parents for b in parents if a != b and parents[a] == parents[b]}
    uncle = {(a, c) for c, p in child for a, z in sibling if z == p}
    nephew = {(c, a) for a, c in uncle}
    for relation, (him, her) in {
        "child": ("son", "daughter"),
        "sibling": ("brother", "sister"),
        "uncle": ("uncle", "aunt"),
        "nephew": ("nephew", "niece"),
    }.items():
        expected = {"child": child, "sibling": sibling, "uncle": uncle, "nephew": nephew}[relation]
        assert of[him] == {(x, y) for x, y in expected if x in male} and of[her] == {
            (x, y) for x, y in expected if x in female
        }
        assert of[him] | of[her] == expected
    couples = {frozenset(pair) for pair in of["husband"]}
    assert all(frozenset(pair) in couples for pair in parents.values())


@pytest.mark.parametrize(("people", "seed"), [(10, 0), (30, 1), (80, 2), (150, 3)])
def test_the_rules_are_sound_and_two_steps_derive_all_that_is_held_out(people, seed):
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
    everything = [consequences(d.rules[i : i + 1], rows(d.train)) for i in range(len(d.rules))]
    for i in range(len(d.rules)):
        assert everything[i] - set().union(*(e for j, e in enumerate(everything) if j != i)), RULES.splitlines()[i]


def test_a_family_tree_is_a_function_of_its_arguments():
    same, other = load("family_tree:40:5"), load("family_tree:40:6")
    assert same.fingerprint == make_family_tree(40, 5).fingerprint != other.fingerprint
    assert (same.name, same.n_constants, same.entities[0]) == ("family_tree:40:5", 40, "p1")
    assert format_atom(same, same.train[0]) in {format_atom(same, a) for a in same.facts}


@pytest.mark.parametrize("people", [10, 11, 13, 17, 1000])
def test_any_number_of_people_makes_a_tree(people):
    for seed in range(5):
        d = make_family_tree(people, seed)
        assert d.n_constants == people and d.train[:, 1:].max() <= people
        assert d.train.dtype == np.int32


def test_too_few_people_are_refused():
    with pytest.raises(ValueError, match="expected at least 10 people and a seed from 0, got 9 and 0"):
        load("family_tree:9:0")
