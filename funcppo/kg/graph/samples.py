"""Generated data sets.

clans: made-up tribes, some of which pass the clan from father to child and some from mother to child.

`father(X, Y)` reads "X is the father of Y", and `clan(X, Y)` reads "X belongs to the clan Y". Every clan is part of one
tribe. People marry within their tribe and outside their clan. In a patrilineal tribe children belong to their father's
clan, in a matrilineal tribe to their mother's. A few are adopted into the clan of the other parent.

Two rules derive a clan, one from the father and one from the mother. No fact says which rule holds in which tribe. Both
are right about equally often, so their confidences do not say it either. A policy can learn it from the train split,
clan by clan. That makes the data set a small test of learning. `make_clans` builds it.

family_tree: made-up families of any size, with the twelve relations of the Family set and rules that are exact.

`r(X, Y)` reads "X is the r of Y". Couples are exclusive and have all their children together, so siblings share both
parents; an aunt or uncle is a sibling of a parent. Then every rule of FAMILY_RULES is sound, and every held-out fact
follows
from train by at most two steps. `make_family_tree` builds the data set.

All facts stand in one table, in blocks of one relation or of a pair such as son and daughter. Each fact has one or two
derivations: pairs of facts that derive it by a rule. So what can be held out is looked up, not searched for.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from funcppo.kg.graph.dataset import Dataset, from_splits, with_rules
from funcppo.kg.graph.rules import read_clauses
from funcppo.kg.graph.triples import Triple

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


RELATIONS = (
    "husband",
    "wife",
    "father",
    "mother",
    "son",
    "daughter",
    "brother",
    "sister",
    "uncle",
    "aunt",
    "nephew",
    "niece",
)
MIN_FAMILY_PEOPLE = 10

# Predicate ids. Where a relation depends on the gender, the female one is the next: _SON + 1 is daughter.
_HUSBAND, _WIFE, _FATHER, _MOTHER, _SON, _BROTHER, _UNCLE, _NEPHEW = (
    1,
    2,
    3,
    4,
    5,
    7,
    9,
    11,
)

# share of facts drawn for valid and test together; those that nothing derives go back
_HELD_OUT_FAMILY_FRACTION = 0.2
# rule applications, one above the other, that derive a held-out fact
_MAX_DERIVATION_STEPS = 2
_TRAIN, _VALID, _TEST = 0, 1, 2

FAMILY_RULES = """\
husband(X,Y) :- wife(Y,X)
wife(X,Y) :- husband(Y,X)
father(X,Y) :- husband(X,Z), mother(Z,Y)
mother(X,Y) :- wife(X,Z), father(Z,Y)
father(X,Y) :- husband(X,Z), son(Y,Z)
father(X,Y) :- husband(X,Z), daughter(Y,Z)
mother(X,Y) :- wife(X,Z), son(Y,Z)
mother(X,Y) :- wife(X,Z), daughter(Y,Z)
son(X,Y) :- son(X,Z), wife(Z,Y)
son(X,Y) :- son(X,Z), husband(Z,Y)
daughter(X,Y) :- daughter(X,Z), wife(Z,Y)
daughter(X,Y) :- daughter(X,Z), husband(Z,Y)
brother(X,Y) :- brother(Y,X), son(X,Z)
brother(X,Y) :- sister(Y,X), son(X,Z)
sister(X,Y) :- brother(Y,X), daughter(X,Z)
sister(X,Y) :- sister(Y,X), daughter(X,Z)
brother(X,Y) :- son(X,Z), daughter(Y,Z)
sister(X,Y) :- daughter(X,Z), son(Y,Z)
uncle(X,Y) :- brother(X,Z), father(Z,Y)
uncle(X,Y) :- brother(X,Z), mother(Z,Y)
aunt(X,Y) :- sister(X,Z), father(Z,Y)
aunt(X,Y) :- sister(X,Z), mother(Z,Y)
nephew(X,Y) :- son(X,Z), brother(Z,Y)
nephew(X,Y) :- son(X,Z), sister(Z,Y)
niece(X,Y) :- daughter(X,Z), brother(Z,Y)
niece(X,Y) :- daughter(X,Z), sister(Z,Y)
nephew(X,Y) :- uncle(Y,X), son(X,Z)
nephew(X,Y) :- aunt(Y,X), son(X,Z)
niece(X,Y) :- uncle(Y,X), daughter(X,Z)
niece(X,Y) :- aunt(Y,X), daughter(X,Z)
"""


class _People(NamedTuple):
    """Who descends from whom; a person is an index from 0, and so is a couple."""

    female: np.ndarray  # bool [n]
    # int [n], the couple each person is a child of, ascending; -1 for founders
    parents: np.ndarray
    husband: np.ndarray  # int [k], person, of each couple
    wife: np.ndarray  # int [k], person, of each couple


class _Couples(NamedTuple):
    """New couples."""

    men: np.ndarray  # int [k], persons
    women: np.ndarray  # int [k]


class _Ranges(NamedTuple):
    """Items that belong to rows, those of a row in succession."""

    start: np.ndarray  # int [rows], index of each row's first item
    row: np.ndarray  # int [items], row of each item
    offset: np.ndarray  # int [items], index of the item within its row


class _SiblingPairs(NamedTuple):
    """Ordered pairs of siblings, those of the first child first; a child is an index into the people with parents."""

    start: np.ndarray  # int [c], index of the first pair of each child
    n_siblings: np.ndarray  # int [c], of each child
    one: np.ndarray  # int [s], a child
    other: np.ndarray  # int [s], its sibling
    mirror: np.ndarray  # int [s], index of the pair (other, one)


class _Facts(NamedTuple):
    """Facts and how they follow from others; a fact's id is its row."""

    atoms: np.ndarray  # int [F, 3]: relation, X, Y; people count from 1
    # int [F, 2, 2]: two pairs of fact ids, either of which derives the fact by a rule
    derivations: np.ndarray


class _FactIds(NamedTuple):
    """Ids of facts on couples, parents and children."""

    husband: np.ndarray  # int [k], of each couple: he is her husband
    wife: np.ndarray  # int [k], of each couple: she is his wife
    father: np.ndarray  # int [c], of each child: its father
    mother: np.ndarray  # int [c], of each child: its mother
    # int [c]: it is the son, or daughter, of its father
    child_of_father: np.ndarray
    # int [c]: it is the son, or daughter, of its mother
    child_of_mother: np.ndarray
    siblings_start: int  # the first fact on siblings


class _ParentFacts(NamedTuple):
    """One parent of each child, and the facts that relate the two."""

    parent: np.ndarray  # int [c], person
    # int [c], id of the fact that the parent is the father, or mother, of the child
    parent_id: np.ndarray
    # int [c], id of the fact that the child is the son, or daughter, of the parent
    child_id: np.ndarray


def make_family_tree(n_people: int, seed: int) -> Dataset:
    """Generate the family_tree data set over people p1, p2, ...

    Args:
      n_people: number of people, at least `MIN_PEOPLE`.
      seed: seed of numpy's default generator.

    Returns:
      The data set with its rules; the same for the same arguments.

    Raises:
      ValueError: `n_people` is too small, or `seed` is negative.
    """
    if n_people < MIN_FAMILY_PEOPLE or seed < 0:
        problem = f"expected at least {MIN_FAMILY_PEOPLE} people and a seed from 0, got {n_people} and {seed}"
        raise ValueError(f"family_tree: {problem}")

    rng = np.random.default_rng(seed)
    facts = _make_facts(_sample_family_people(rng, n_people))
    order = rng.permutation(len(facts.atoms))
    split = _sample_split(rng, facts)[order]
    atoms = facts.atoms[order].astype(np.int32)

    train = atoms[split == _TRAIN]
    dataset = Dataset(
        name=f"family_tree:{n_people}:{seed}",
        entities=tuple(f"p{i}" for i in range(1, n_people + 1)),
        predicates=RELATIONS,
        arities=(2,) * len(RELATIONS),
        train=train,
        valid=atoms[split == _VALID],
        test=atoms[split == _TEST],
        facts=train,
        rules=np.zeros((0, 1, 3), np.int32),
        rule_weights=np.zeros(0),
        n_duplicates=0,
        notes=(),
    )
    return with_rules(
        dataset,
        read_clauses(FAMILY_RULES, "family_tree", "weighted").clauses,
        "family_tree",
    )


def _sample_family_people(rng: np.random.Generator, n_people: int) -> _People:
    """Draw generation after generation until there are `n_people`; founders are about a fifth of them."""
    female = rng.random(n_people) < 0.5
    n_founders = max(4, n_people // 5)
    parents = np.full(min(n_founders, n_people), -1)
    husband = np.zeros(0, np.int64)
    wife = np.zeros(0, np.int64)

    generation_start = 0
    while generation_start < n_people:
        men, women = _sample_family_couples(
            rng, female, parents, generation_start
        )
        n_couples = len(men)
        n_children = rng.integers(0, _MAX_CHILDREN + 1, n_couples)
        couple = len(husband) + np.arange(n_couples)
        parents_of_children = np.repeat(couple, n_children)
        husband = np.concatenate([husband, men])
        wife = np.concatenate([wife, women])

        # New founders should a generation have no children.
        if not len(parents_of_children):
            parents_of_children = np.full(n_founders, -1)
        generation_start = len(parents)
        parents = np.concatenate([parents, parents_of_children])
        parents = parents[:n_people]

    return _People(female, parents, husband, wife)


def _sample_family_couples(
    rng: np.random.Generator,
    female: np.ndarray,
    parents: np.ndarray,
    generation_start: int,
) -> _Couples:
    """Pair men and women of the last generation at random; siblings do not marry.

    Args:
      rng: source of randomness.
      female: bool [n], also of people not yet born.
      parents: int, the parents' couple of everybody born so far.
      generation_start: index of the first person of the last generation.
    """
    generation = np.arange(generation_start, len(parents))
    is_female = female[generation]
    men = rng.permutation(generation[~is_female])
    women = rng.permutation(generation[is_female])
    n_pairs = min(len(men), len(women))
    men = men[:n_pairs]
    women = women[:n_pairs]

    # Founders have no parents in common.
    are_siblings = (parents[men] == parents[women]) & (parents[men] >= 0)
    return _Couples(men[~are_siblings], women[~are_siblings])


def _make_ranges(n_items: np.ndarray) -> _Ranges:
    """Lay out rows of `n_items` items each, one row after the other."""
    start = np.cumsum(n_items) - n_items
    rows = np.arange(len(n_items))
    row = np.repeat(rows, n_items)
    items = np.arange(len(row))
    offset = items - start[row]
    return _Ranges(start, row, offset)


def _sibling_pairs(couple: np.ndarray) -> _SiblingPairs:
    """The ordered pairs of siblings.

    Args:
      couple: int [c], the parents of each child, ascending, so the children of a couple are successive.
    """
    first = np.searchsorted(couple, couple)
    last = np.searchsorted(couple, couple, side="right")
    n_siblings = last - first - 1
    start, one, offset = _make_ranges(n_siblings)

    # The siblings of a child are the children of its couple, itself skipped.
    first_child = first[one]
    other = first_child + offset
    other = other + (other >= one)

    # The offset of `one` among the siblings of `other`, `other` itself skipped.
    mirror_offset = one - first_child - (one > other)
    mirror = start[other] + mirror_offset
    return _SiblingPairs(start, n_siblings, one, other, mirror)


def _make_facts(people: _People) -> _Facts:
    """Every fact of the twelve relations, in blocks: couples, parents, children, siblings, then uncles and nephews."""
    child = np.flatnonzero(people.parents >= 0)  # people with parents
    couple = people.parents[child]
    father = people.husband[couple]
    mother = people.wife[couple]
    pairs = _sibling_pairs(couple)
    ids = _number_facts(n_couples=len(people.husband), n_children=len(child))

    blocks = _family_blocks(people, child, pairs, ids)
    sides = (
        _ParentFacts(father, ids.father, ids.child_of_father),
        _ParentFacts(mother, ids.mother, ids.child_of_mother),
    )
    for side in sides:
        uncles_start = sum(len(block.atoms) for block in blocks)
        blocks += _uncle_blocks(
            people, child, pairs, side, ids.siblings_start, uncles_start
        )

    atoms = np.concatenate([block.atoms for block in blocks])
    derivations = np.concatenate([block.derivations for block in blocks])
    return _Facts(atoms, derivations)


def _number_facts(n_couples: int, n_children: int) -> _FactIds:
    """Ids of the facts on couples, parents and children; they follow the order of `_family_blocks`."""
    block_sizes = [n_couples] * 2 + [n_children] * 4
    starts = np.cumsum([0, *block_sizes])
    couples = np.arange(n_couples)
    children = np.arange(n_children)
    return _FactIds(
        husband=starts[0] + couples,
        wife=starts[1] + couples,
        father=starts[2] + children,
        mother=starts[3] + children,
        child_of_father=starts[4] + children,
        child_of_mother=starts[5] + children,
        siblings_start=int(starts[6]),
    )


def _family_blocks(
    people: _People, child: np.ndarray, pairs: _SiblingPairs, ids: _FactIds
) -> list[_Facts]:
    """The blocks of couples, parents, children and siblings.

    Args:
      people: everybody.
      child: people who have parents.
      pairs: the pairs of siblings among them.
      ids: ids of the facts.
    """
    couple = people.parents[child]
    is_female = people.female[child]
    father = people.husband[couple]
    mother = people.wife[couple]
    # id of the fact that the father is the husband of the mother
    parents_husband = ids.husband[couple]
    parents_wife = ids.wife[couple]
    mirror = ids.siblings_start + pairs.mirror

    # The order is that of `_number_facts`.
    return [
        _make_block(
            _HUSBAND, people.husband, people.wife, (ids.wife, ids.wife)
        ),
        _make_block(
            _WIFE, people.wife, people.husband, (ids.husband, ids.husband)
        ),
        _make_block(
            _FATHER,
            father,
            child,
            (parents_husband, ids.mother),
            (parents_husband, ids.child_of_mother),
        ),
        _make_block(
            _MOTHER,
            mother,
            child,
            (parents_wife, ids.father),
            (parents_wife, ids.child_of_father),
        ),
        _make_block(
            _SON + is_female, child, father, (ids.child_of_mother, parents_wife)
        ),
        _make_block(
            _SON + is_female,
            child,
            mother,
            (ids.child_of_father, parents_husband),
        ),
        _make_block(
            _BROTHER + is_female[pairs.one],
            child[pairs.one],
            child[pairs.other],
            (mirror, ids.child_of_father[pairs.one]),
            (mirror, ids.child_of_mother[pairs.one]),
        ),
    ]


def _uncle_blocks(
    people: _People,
    child: np.ndarray,
    pairs: _SiblingPairs,
    side: _ParentFacts,
    siblings_start: int,
    uncles_start: int,
) -> list[_Facts]:
    """The block of uncles and aunts, and that of nephews and nieces, by one side of the family.

    Args:
      people: everybody.
      child: people who have parents.
      pairs: the pairs of siblings among them.
      side: the father, or the mother, of each child.
      siblings_start: id of the first fact on siblings.
      uncles_start: id of the first fact of these blocks.
    """
    # A row for each child: the siblings of its parent, if these have parents themselves.
    parent_has_parents = people.parents[side.parent] >= 0
    parent_row = np.where(
        parent_has_parents, np.searchsorted(child, side.parent), 0
    )
    n_uncles = np.where(parent_has_parents, pairs.n_siblings[parent_row], 0)
    _, nephew_row, offset = _make_ranges(n_uncles)

    pair = pairs.start[parent_row[nephew_row]] + offset  # (parent, uncle)
    uncle = child[pairs.other[pair]]
    nephew = child[nephew_row]
    uncle_id = uncles_start + np.arange(len(pair))
    # the parent is a sibling of the uncle
    parent_sibling_id = siblings_start + pair
    # the uncle is a sibling of the parent
    uncle_sibling_id = siblings_start + pairs.mirror[pair]
    parent_id = side.parent_id[nephew_row]
    child_id = side.child_id[nephew_row]
    return [
        _make_block(
            _UNCLE + people.female[uncle],
            uncle,
            nephew,
            (uncle_sibling_id, parent_id),
        ),
        _make_block(
            _NEPHEW + people.female[nephew],
            nephew,
            uncle,
            (child_id, parent_sibling_id),
            (uncle_id, child_id),
        ),
    ]


def _make_block(
    relation: np.ndarray | int,
    x: np.ndarray,
    y: np.ndarray,
    *derivations: tuple[np.ndarray, np.ndarray],
) -> _Facts:
    """The facts of one block, with one or two derivations each; a single derivation is repeated."""
    columns = np.broadcast_arrays(relation, x + 1, y + 1)
    atoms = np.stack(columns, -1)
    first = np.stack(derivations[0], -1)
    second = np.stack(derivations[-1], -1)
    both = np.stack([first, second], 1)
    return _Facts(atoms, both)


def _sample_split(rng: np.random.Generator, facts: _Facts) -> np.ndarray:
    """Draw the split of each fact; what train does not derive within two steps goes back to train.

    Going back only adds to train, so what was derived stays derived.
    """
    n_facts = len(facts.atoms)
    held_out = rng.random(n_facts) < _HELD_OUT_FAMILY_FRACTION

    # A fact is derived when both facts of one of its derivations are.
    derived = ~held_out
    for _ in range(_MAX_DERIVATION_STEPS):
        usable = derived[facts.derivations].all(-1)
        derived = derived | usable.any(-1)

    held_out_split = rng.integers(_VALID, _TEST + 1, n_facts)
    return np.where(held_out & derived, held_out_split, _TRAIN)
