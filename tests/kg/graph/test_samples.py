"""Data sets that come with the package: splits keep their promises, and rules derive what is held out."""

import numpy as np
import pytest

from funcppo.kg.graph.loaders import load
from funcppo.kg.graph.samples import TRIBES, make_clans, make_family_tree
from funcppo.kg.logic import fixpoint, kb

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
        assert len(d.valid) == len(d.test) == 24 and d.notes == ()
        limits = {"max_height": 1, "max_atoms": 10_000}
        model = fixpoint.least_model(*kb.from_dataset(d), **limits)
        held_out = [*d.valid.tolist(), *d.test.tolist()]
        assert all(atom in model.atoms.tolist() for atom in held_out)
