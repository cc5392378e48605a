"""clans: made-up tribes, some of which pass the clan from father to child and some from mother to child.

`father(X, Y)` reads "X is the father of Y", and `clan(X, Y)` reads "X belongs to the clan Y". Every clan is part of one
tribe. People marry within their tribe and outside their clan. In a patrilineal tribe children belong to their father's
clan, in a matrilineal tribe to their mother's. A few are adopted into the clan of the other parent.

Two rules derive a clan, one from the father and one from the mother. No fact says which rule holds in which tribe. Both
are right about equally often, so their confidences do not say it either. A policy can learn it from the train split,
clan by clan. That makes the data set a small test of learning. `make_clans` builds it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from funcppo.kg.graph.dataset import Dataset, from_splits, with_rules
from funcppo.kg.graph.readers import read_clauses
from funcppo.kg.graph.triple_table import Triple

# the clans of each tribe
PATRILINEAL_TRIBES = (("bear", "crane", "wolf"), ("deer", "eagle", "fox"))
MATRILINEAL_TRIBES = (("hawk", "otter", "raven"), ("beaver", "heron", "salmon"))
RULES = """\
clan(X,Y) :- father(Z,X), clan(Z,Y)
clan(X,Y) :- mother(Z,X), clan(Z,Y)
"""
# rule applications, one above the other, that derive every held-out fact
PROOF_HEIGHT = 2
MIN_PEOPLE = 40

# share of children who belong to the clan of the parent that descent does not follow
_ADOPTED_FRACTION = 0.02
# share of people whose clan is drawn for valid and test together
_HELD_OUT_FRACTION = 0.4
_MAX_CHILDREN = 5  # of a couple; the least is one


class _Person(NamedTuple):
    """One person; parents are indices into the list of all people, -1 for founders."""

    female: bool
    clan: str
    father: int
    mother: int


def make_clans(n_people: int, seed: int) -> Dataset:
    """Generate the clans data set: people p1, p2, ... of four tribes, and their twelve clans.

    Train holds the parents of everybody and the clans of some. Valid and test hold clans that the two rules derive from
    train, with proofs of a height of at most `PROOF_HEIGHT`. With less than about 200 people, one of them may be empty.

    Args:
      n_people: number of people, at least `MIN_PEOPLE`.
      seed: seed of numpy's default generator.

    Returns:
      The data set with its two rules; the same for the same arguments.

    Raises:
      ValueError: `n_people` is too small, or `seed` is negative.
    """
    if n_people < MIN_PEOPLE or seed < 0:
        problem = f"expected at least {MIN_PEOPLE} people and a seed from 0, got {n_people} and {seed}"
        raise ValueError(f"clans: {problem}")

    rng = np.random.default_rng(seed)
    people = _sample_people(rng, n_people)
    clan_splits = _sample_clan_splits(rng, people)
    names = [f"p{i}" for i in range(1, n_people + 1)]

    # Everybody's parents are known. They stand first, since ids follow the order of first occurrence.
    splits: dict[str, list[Triple]] = {
        "train": _parent_triples(names, people),
        "valid": [],
        "test": [],
    }
    for name, person, split in zip(names, people, clan_splits):
        splits[split].append((name, "clan", person.clan))

    dataset = from_splits(f"clans:{n_people}:{seed}", splits)
    rules = read_clauses(RULES, "clans", "weighted").clauses
    return with_rules(dataset, rules, "clans")


def _parent_triples(names: list[str], people: list[_Person]) -> list[Triple]:
    """Father and mother of each person who is no founder."""
    triples: list[Triple] = []
    for name, person in zip(names, people):
        if person.father >= 0:
            father = names[person.father]
            mother = names[person.mother]
            triples.append((father, "father", name))
            triples.append((mother, "mother", name))
    return triples


def _sample_people(rng: np.random.Generator, n_people: int) -> list[_Person]:
    """Draw the people of all tribes, tribe after tribe; the tribes are equally large, up to rounding."""
    tribes = (*PATRILINEAL_TRIBES, *MATRILINEAL_TRIBES)
    people: list[_Person] = []
    for number, clan_names in enumerate(tribes, 1):
        target_size = n_people * number // len(tribes)
        _append_tribe(rng, people, clan_names, target_size)
    return people


def _append_tribe(
    rng: np.random.Generator,
    people: list[_Person],
    clan_names: tuple[str, ...],
    target_size: int,
) -> None:
    """Append one tribe to `people`, generation after generation, until there are `target_size` people in all."""
    n_founders = max(4, (target_size - len(people)) // 5)
    patrilineal = clan_names in PATRILINEAL_TRIBES
    last_generation: list[int] = []

    while len(people) < target_size:
        start = len(people)
        for man, woman in _sample_couples(rng, people, last_generation):
            n_children = rng.integers(1, _MAX_CHILDREN + 1)
            for _ in range(n_children):
                child = _sample_child(rng, people, man, woman, patrilineal)
                people.append(child)

        # The first generation, and a new one should a tribe die out.
        if len(people) == start:
            for _ in range(n_founders):
                female = rng.random() < 0.5
                clan = str(rng.choice(clan_names))
                founder = _Person(female, clan, father=-1, mother=-1)
                people.append(founder)

        del people[target_size:]
        last_generation = list(range(start, len(people)))


def _sample_child(
    rng: np.random.Generator,
    people: list[_Person],
    man: int,
    woman: int,
    patrilineal: bool,
) -> _Person:
    """Draw a child of a couple; it has the clan that descent gives it unless it is adopted."""
    adopted = rng.random() < _ADOPTED_FRACTION
    female = rng.random() < 0.5
    has_fathers_clan = patrilineal != adopted
    parent = man if has_fathers_clan else woman
    return _Person(female, people[parent].clan, father=man, mother=woman)


def _sample_couples(
    rng: np.random.Generator, people: list[_Person], generation: list[int]
) -> list[tuple[int, int]]:
    """Pair men and women of one generation at random, as (man, woman); two of one clan do not marry."""
    men: list[int] = []
    women: list[int] = []
    for i in rng.permutation(len(generation)):
        person = generation[i]
        if people[person].female:
            women.append(person)
        else:
            men.append(person)

    couples: list[tuple[int, int]] = []
    for man, woman in zip(men, women):
        if people[man].clan != people[woman].clan:
            couples.append((man, woman))
    return couples


def _sample_clan_splits(
    rng: np.random.Generator, people: list[_Person]
) -> list[str]:
    """Draw the split of each person's clan; what the rules do not derive from train goes back to train.

    Going back only adds to train, so what was derived stays derived.
    """
    held_out = rng.random(len(people)) < _HELD_OUT_FRACTION

    # One pass over the people is one application of the rules to all clans derived so far.
    derived = ~held_out
    for _ in range(PROOF_HEIGHT):
        previous = derived.copy()
        for i, person in enumerate(people):
            for parent in (person.father, person.mother):
                has_parent = parent >= 0
                if has_parent and people[parent].clan == person.clan:
                    derived[i] |= previous[parent]

    held_out_splits = rng.choice(["valid", "test"], len(people))
    splits = np.where(held_out & derived, held_out_splits, "train")
    return [str(split) for split in splits]
