"""Random splits: sizes, disjoint parts, and what the split depends on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcppo.kg.graph.triples import NameTable, parse_ratios
from funcppo.kg.graph.triples import split_triples as split_table

TRIPLES = [(f"e{i}", f"r{i % 3}", f"e{i * 7 % 50}") for i in range(50)]


def test_the_shares_of_a_text():
    assert parse_ratios("0.8,0.1,0.1") == (0.8, 0.1, 0.1)
    assert parse_ratios(" .5,0 ,.5") == (0.5, 0.0, 0.5)


def split_triples(triples, ratios, seed):
    """The parts of a list of triples in names."""
    table = NameTable()
    rows = table.number_triples(triples)
    names = table.names()
    parts = split_table(rows, names, ratios, seed)
    named = [
        [tuple(names[i] for i in row) for row in part.tolist()]
        for part in parts[:3]
    ]
    return parts._replace(train=named[0], valid=named[1], test=named[2])


@given(
    st.lists(st.tuples(*[st.sampled_from("abcd")] * 3), min_size=20),
    st.sampled_from(["0.8,0.1,0.1", "0.5,0.5,0", "1,0,0", "0.4,0,0.6"]),
    st.integers(-3, 3),
)
def test_every_distinct_triple_is_in_one_part_and_the_parts_have_their_shares(
    triples, ratios, seed
):
    distinct = list(dict.fromkeys(triples))
    if len(distinct) < 5:
        return
    parts = split_triples(triples, ratios, seed)
    train, valid, test, n_duplicates = parts
    assert sorted(train + valid + test) == sorted(distinct)
    assert n_duplicates == len(triples) - len(distinct)
    _, *shares = parse_ratios(ratios)
    assert [len(valid), len(test)] == [
        round(share * len(distinct)) for share in shares
    ]
    for part in (train, valid, test):
        assert part == [triple for triple in distinct if triple in part]


def test_the_split_depends_on_the_seed_and_not_on_the_order():
    parts = split_triples(TRIPLES, "0.8,0.1,0.1", 0)
    again = split_triples(TRIPLES[::-1], "0.8,0.1,0.1", 0)
    assert [set(part) for part in parts[:3]] == [
        set(part) for part in again[:3]
    ]
    others = {
        tuple(split_triples(TRIPLES, "0.8,0.1,0.1", seed).test)
        for seed in range(20)
    }
    assert len(others) == 20


def test_a_split_is_the_same_on_every_machine():
    """Runs are opened by splitting their data again."""
    test = split_triples(TRIPLES, "0.8,0.1,0.1", 0).test
    assert [triple[0] for triple in test] == [
        "e17",
        "e27",
        "e43",
        "e45",
        "e49",
    ]


def test_a_part_of_the_triples_is_held_out_as_often_as_any_other():
    """Of 400 seeds each of 10 triples is in test about 80 times; 20 is over 3 standard deviations away."""
    n_in_test = dict.fromkeys(TRIPLES[:10], 0)
    for seed in range(400):
        for triple in split_triples(TRIPLES[:10], "0.8,0,0.2", seed).test:
            n_in_test[triple] += 1
    assert sum(n_in_test.values()) == 800
    assert all(60 < count < 100 for count in n_in_test.values()), n_in_test


@pytest.mark.parametrize("ratios", ["0.8,0.1,0.1", "0.1,0.9,0"])
def test_too_few_triples_for_a_part_are_an_error(ratios):
    with pytest.raises(
        ValueError, match=f"split_ratios {ratios}: .* for each part, got 3"
    ):
        split_triples(TRIPLES[:3], ratios, 0)
