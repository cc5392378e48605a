"""Facts by their names against a slow oracle; splits of facts that several hold."""

import itertools

import numpy as np
import pytest

from funcppo.kg.graph import loaders
from funcppo.kg.show.serve.known_facts import KnownFacts


@pytest.fixture(scope="module")
def dataset():
    rows = np.random.default_rng(0).integers(5, size=(60, 3))
    triples = [(f"e{h}", f"r{r % 3}", f"e{t}") for h, r, t in rows]
    return loaders.from_triples(triples[:40], triples[30:50], triples[45:])


def test_facts_are_found_by_any_of_their_names(dataset):
    index = KnownFacts(dataset)
    known = np.concatenate([dataset.facts, dataset.valid, dataset.test])
    atoms = np.unique(known, axis=0)
    assert np.array_equal(index.atoms, atoms)
    entities = [None, *range(1, dataset.n_constants + 1)]
    for relation, head, tail in itertools.product(
        [None, 1, 2, 3], entities, entities
    ):
        given = {1: head, 2: tail}
        arguments = {p: e for p, e in given.items() if e is not None}
        expected = [
            i
            for i, atom in enumerate(atoms)
            if relation in (None, atom[0])
            and all(atom[p] == e for p, e in arguments.items())
        ]
        found = index.find(relation, arguments)
        assert sorted(found.tolist()) == expected


def test_a_fact_names_every_split_that_holds_it(dataset):
    index = KnownFacts(dataset)
    for row, atom in enumerate(index.atoms):
        expected = [
            split
            for split in ("train", "valid", "test")
            if (getattr(dataset, split) == atom).all(1).any()
        ]
        assert index.splits_of(row) == expected


def test_groups_of_an_entity_hold_each_of_its_facts_by_place(dataset):
    index = KnownFacts(dataset)
    for entity in range(1, dataset.n_constants + 1):
        groups = index.groups_of(entity)
        pairs = [(group.place, row) for group in groups for row in group.rows]
        expected = np.argwhere(index.atoms[:, 1:] == entity)
        assert sorted(pairs) == sorted((p + 1, i) for i, p in expected)
        for group in groups:
            assert set(index.atoms[group.rows, 0]) == {group.relation}


def test_an_empty_graph_has_no_facts(tmp_path):
    program = tmp_path / "p.pl"
    program.write_text("p(a).\np(X) :- q(X).\n")
    index = KnownFacts(loaders.load(str(program)))
    assert len(index.groups_of(1)) == 1
    assert len(index.find(2, {})) == 0
    assert len(index.find(1, {2: 1})) == 0
