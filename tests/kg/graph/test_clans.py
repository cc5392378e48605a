"""clans: a generated data set whose held-out facts need a rule that depends on the tribe."""

import numpy as np
import pytest

from funcppo.kg.graph.loaders import load
from funcppo.kg.graph.samples import (
    MATRILINEAL_TRIBES,
    MIN_PEOPLE,
    PATRILINEAL_TRIBES,
    PROOF_HEIGHT,
    _Person,
    _sample_couples,
    make_clans,
)
from tests.kg.graph.python_datalog import consequences, rows, triples

SIZES = [(40, 0), (83, 1), (300, 2), (1500, 0)]
TRIBE_OF_CLAN = {
    clan: tribe
    for tribe in (*PATRILINEAL_TRIBES, *MATRILINEAL_TRIBES)
    for clan in tribe
}


def parents_and_clans(dataset):
    """Father, mother and clan of each person, over all splits."""
    father, mother, clan = {}, {}, {}
    for table in (dataset.train, dataset.valid, dataset.test):
        for head, relation, tail in triples(dataset, table):
            if relation == "clan":
                assert head not in clan
                clan[head] = tail
            else:
                parent = {"father": father, "mother": mother}[relation]
                assert tail not in parent
                parent[tail] = head
    return father, mother, clan


def test_the_data_set_of_the_first_measured_result_is_unchanged():
    """The fingerprint and sizes that stand beside the result of training on clans:1500:0."""
    d = make_clans(1500, 0)
    assert d.fingerprint == "04eab0fade0aa148"
    assert (d.n_constants, d.predicates, len(d.rules)) == (
        1512,
        ("father", "mother", "clan"),
        2,
    )
    assert (len(d.train), len(d.valid), len(d.test)) == (3372, 155, 179)
    assert (d.n_duplicates, d.notes) == (0, ())


def test_a_man_and_a_woman_of_one_clan_do_not_marry():
    people = [
        _Person(female, clan, -1, -1)
        for female, clan in ((False, "bear"), (True, "bear"), (True, "wolf"))
    ]
    rng = np.random.default_rng(0)
    assert {tuple(_sample_couples(rng, people, [0, 1])) for _ in range(20)} == {
        ()
    }
    assert {tuple(_sample_couples(rng, people, [0, 2])) for _ in range(20)} == {
        ((0, 2),)
    }
    assert _sample_couples(rng, people, [1, 2]) == []


def test_the_same_arguments_give_the_same_data_set_and_another_seed_another():
    same, other = make_clans(120, 5), make_clans(120, 6)
    assert triples(same, same.train) == triples(
        load("clans:120:5"), load("clans:120:5").train
    )
    assert (
        same.fingerprint == load("clans:120:5").fingerprint != other.fingerprint
    )
    assert (same.name, other.name) == ("clans:120:5", "clans:120:6")


@pytest.mark.parametrize(("n_people", "seed"), SIZES)
def test_the_splits_are_disjoint_and_only_clans_are_held_out(n_people, seed):
    d = make_clans(n_people, seed)
    train, valid, test = (
        triples(d, table) for table in (d.train, d.valid, d.test)
    )
    if n_people >= 300:
        assert valid and test
    assert not train & valid and not train & test and not valid & test
    assert {relation for _, relation, _ in valid | test} == {"clan"}
    assert rows(d.facts) == rows(d.train)


@pytest.mark.parametrize(("n_people", "seed"), SIZES)
def test_the_rules_derive_all_that_is_held_out_within_the_stated_height(
    n_people, seed
):
    d = make_clans(n_people, seed)
    train, held_out = rows(d.train), rows(d.valid) | rows(d.test)
    derived = set(train)
    for height in range(1, PROOF_HEIGHT + 1):
        if height == PROOF_HEIGHT and n_people == 1500:
            assert not held_out <= derived  # a smaller height is not enough
        derived |= consequences(d.rules, derived)
    assert held_out <= derived


@pytest.mark.parametrize(("n_people", "seed"), SIZES)
def test_children_have_the_clan_of_descent_unless_adopted_by_the_other_parent(
    n_people, seed
):
    father, mother, clan = parents_and_clans(make_clans(n_people, seed))
    n_adopted = 0
    for child in father:
        patrilineal = TRIBE_OF_CLAN[clan[child]] in PATRILINEAL_TRIBES
        follows, other = (father, mother) if patrilineal else (mother, father)
        if clan[child] != clan[follows[child]]:
            assert clan[child] == clan[other[child]]
            n_adopted += 1
    # Adoptions are 2 % of the children: 5 standard deviations above that.
    assert n_adopted <= 0.02 * len(father) + 5 * (0.02 * len(father)) ** 0.5
    if n_people == 1500:
        assert n_adopted > 0


@pytest.mark.parametrize(("n_people", "seed"), SIZES)
def test_people_marry_within_their_tribe_and_outside_their_clan(n_people, seed):
    father, mother, clan = parents_and_clans(make_clans(n_people, seed))
    assert father.keys() == mother.keys() and clan.keys() == {
        f"p{i}" for i in range(1, n_people + 1)
    }
    assert not set(father.values()) & set(mother.values())
    for child in father:
        assert clan[father[child]] != clan[mother[child]]
        assert (
            TRIBE_OF_CLAN[clan[father[child]]]
            == TRIBE_OF_CLAN[clan[mother[child]]]
        )


def test_both_rules_are_right_about_equally_often():
    father, mother, clan = parents_and_clans(make_clans(1500, 0))
    for parent in (father, mother):
        confidence = sum(
            clan[parent[child]] == clan[child] for child in parent
        ) / len(parent)
        assert 0.45 < confidence < 0.55


@pytest.mark.parametrize("n_people", [MIN_PEOPLE, MIN_PEOPLE + 1, 47, 1001])
def test_any_number_of_people_from_the_least_makes_a_data_set(n_people):
    for seed in range(5):
        d = make_clans(n_people, seed)
        assert (
            len({name for name in d.entities if name not in TRIBE_OF_CLAN})
            == n_people
        )
        assert len(d.train) and d.train.dtype == np.int32


def test_too_few_people_or_a_negative_seed_are_refused():
    with pytest.raises(
        ValueError,
        match=r"^clans: expected at least 40 people and a seed from 0, got 39 and 0$",
    ):
        load("clans:39:0")
    with pytest.raises(ValueError, match=r"got 40 and -1$"):
        make_clans(40, -1)
