"""The embedded sets: the splits keep their promises, and the rules derive what is held out."""

import pytest

from funcppo.kg.graph.loaders import EMBEDDED_DIR, load
from tests.kg.graph.python_datalog import consequences, rows, triples

REGIONS = {"africa", "americas", "asia", "europe", "oceania"}


@pytest.fixture(scope="module")
def countries():
    return [load(f"countries_s{i}") for i in (1, 2, 3)]


def test_countries_have_five_regions_and_twenty_four_queries_a_split(countries):
    for i, d in enumerate(countries, 1):
        assert (d.predicates, len(d.valid), len(d.test), len(d.rules)) == (
            ("locatedIn", "neighborOf"),
            24,
            24,
            i,
        )
        located = [t for t in triples(d, d.train) if t[1] == "locatedIn"]
        regions = {t for _, _, t in located} - {h for h, _, _ in located}
        assert regions == REGIONS
        queries = triples(d, d.valid) | triples(d, d.test)
        assert (
            len({h for h, _, _ in queries}) == 48
            and {t for _, _, t in queries} <= regions
        )
        assert len(d.entities) == 245 + 24 + 5 and d.notes == ()


def test_each_country_to_be_found_has_a_train_neighbour_in_its_region(
    countries,
):
    d = countries[0]
    queries, train = (
        triples(d, d.valid) | triples(d, d.test),
        triples(d, d.train),
    )
    held_out = {h for h, _, _ in queries}
    for country, _, region in queries:
        neighbours = {
            t for h, r, t in train if (h, r) == (country, "neighborOf")
        } - held_out
        assert any((n, "locatedIn", region) in train for n in neighbours)
    assert all((t, r, h) in train for h, r, t in train if r == "neighborOf")


def test_each_task_leaves_out_what_bouchard_says(countries):
    s1, s2, s3 = (triples(d, d.train) for d in countries)
    queries = triples(countries[0], countries[0].valid) | triples(
        countries[0], countries[0].test
    )
    for d in countries[1:]:
        assert triples(d, d.valid) | triples(d, d.test) == queries
    held_out = {h for h, _, _ in queries}
    neighbours = {t for h, r, t in s1 if r == "neighborOf" and h in held_out}
    region = lambda triple: triple[1] == "locatedIn" and triple[2] in REGIONS
    assert not s1 & queries and not s3 - s2 and not s2 - s1
    assert s1 - s2 == {
        t for t in s1 if t[0] in held_out and t[1] == "locatedIn"
    }
    assert s2 - s3 == {t for t in s2 if t[0] in neighbours and region(t)}
    assert {
        h for h, r, t in s3 if h in neighbours - held_out and r == "locatedIn"
    } == neighbours - held_out


def test_one_step_of_the_rules_derives_every_query(countries):
    for d in countries:
        assert rows(d.valid) | rows(d.test) <= consequences(
            d.rules, rows(d.facts)
        )


def test_the_source_and_licence_are_stated():
    text = (EMBEDDED_DIR / "SOURCE.md").read_text()
    assert all(word in text for word in ("mledoze/countries", "5.1.0", "ODbL"))
