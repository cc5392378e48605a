"""Generated data sets.

clans: made-up tribes, some of which pass the clan from father to child and some from mother to child.

`father(X, Y)` reads "X is the father of Y", and `clan(X, Y)` reads "X belongs to the clan Y". Every clan is part of one
tribe. People marry within their tribe and outside their clan. In a patrilineal tribe children belong to their father's
clan, in a matrilineal tribe to their mother's. A few are adopted into the clan of the other parent.

Two rules derive a clan, one from the father and one from the mother. No fact says which rule holds in which tribe. Both
are right about equally often, so their confidences do not say it either. A policy can learn it from the train split,
clan by clan. That makes the data set a small test of learning.

family_tree: made-up families of any size, with the twelve relations of the Family set and rules that are exact.

`r(X, Y)` reads "X is the r of Y". Couples are exclusive and have all their children together, so siblings share both
parents; an aunt or uncle is a sibling of a parent. Then every rule is sound.

In both, train derives every held-out fact in at most two steps. Each fact has one or two derivations: facts that derive
it by a rule. So what can be held out is looked up, not searched for.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from funcppo.kg.graph.dataset import Dataset, from_splits, with_rules
from funcppo.kg.graph.rules import read_clauses
from funcppo.kg.graph.triples import Triple, row_codes

# the clans of each tribe: children belong to the clan of the father in the first two, of the mother in the others
TRIBES = (
    ("bear", "crane", "wolf"),
    ("deer", "eagle", "fox"),
    ("hawk", "otter", "raven"),
    ("beaver", "heron", "salmon"),
)
RULES = """\
clan(X,Y) :- father(Z,X), clan(Z,Y)
clan(X,Y) :- mother(Z,X), clan(Z,Y)
"""
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


def _make_generator(
    name: str, n_people: int, seed: int, least: int
) -> np.random.Generator:
    """Return the random generator of a data set.

    Raises:
      ValueError: there are too few people, or the seed is negative.
    """
    if n_people < least or seed < 0:
        problem = f"expected at least {least} people and a seed from 0, got {n_people} and {seed}"
        raise ValueError(f"{name}: {problem}")
    return np.random.default_rng(seed)


def _sample_splits(
    rng: np.random.Generator, derivations: np.ndarray, held_out_share: float
) -> np.ndarray:
    """Sample the split of each fact: 0 train, 1 valid, 2 test.

    A fact that train does not derive in two steps goes back to train.

    Going back only adds to train, so what was derived stays derived.

    Args:
      derivations: int [F, 2, n], two sets of facts, either of which derives the fact by a rule.
      held_out_share: share of facts drawn for valid and test together.
    """
    n_facts = len(derivations)
    held_out = rng.random(n_facts) < held_out_share
    derived = ~held_out
    for _ in range(2):
        derived = derived | derived[derivations].all(-1).any(-1)
    return np.where(held_out & derived, rng.integers(1, 3, n_facts), 0)


# -- clans

# female, clan, father and mother as indices of people, -1 for founders
_Person = tuple[bool, str, int, int]


def make_clans(n_people: int, seed: int) -> Dataset:
    """Generate the clans data set: people p1, p2, ... of four tribes, and their twelve clans.

    Train holds the parents of everybody and the clans of some. Valid and test hold clans that the two rules derive from
    train, with proofs of a height of at most 2. With less than about 200 people, one of them may be empty.

    Args:
      n_people: number of people, at least 40.
      seed: seed of numpy's default generator.

    Returns:
      The data set with its two rules; the same for the same arguments.

    Raises:
      ValueError: `n_people` is too small, or `seed` is negative.
    """
    rng = _make_generator("clans", n_people, seed, 40)
    people: list[_Person] = []
    for number in range(len(TRIBES)):
        target_size = n_people * (number + 1) // len(TRIBES)
        _append_tribe(rng, people, number, target_size)

    # A parent of the same clan derives the clan; a person itself derives nothing new.
    derivations = [
        [
            [j if j >= 0 and people[j][1] == clan else i]
            for j in (father, mother)
        ]
        for i, (_, clan, father, mother) in enumerate(people)
    ]
    split_of = _sample_splits(rng, np.array(derivations), 0.4).tolist()

    # Everybody's parents are known. They stand first, since ids follow the order of first occurrence.
    splits: list[list[Triple]] = [[], [], []]
    for i, (_, _, father, mother) in enumerate(people, 1):
        if father >= 0:
            splits[0].append((f"p{father + 1}", "father", f"p{i}"))
            splits[0].append((f"p{mother + 1}", "mother", f"p{i}"))
    for i, (_, clan, _, _) in enumerate(people, 1):
        splits[split_of[i - 1]].append((f"p{i}", "clan", clan))
    train, valid, test = splits
    dataset = from_splits(
        f"clans:{n_people}:{seed}",
        {"train": train, "valid": valid, "test": test},
    )
    rules, _ = read_clauses(RULES, "clans", "weighted")
    return with_rules(dataset, rules, "clans")


def _append_tribe(
    rng: np.random.Generator,
    people: list[_Person],
    number: int,
    target_size: int,
) -> None:
    """Append a tribe to `people`, generation after generation, until there are `target_size` people in all."""
    n_founders = max(4, (target_size - len(people)) // 5)
    last_generation: list[int] = []
    while len(people) < target_size:
        start = len(people)
        for man, woman in _sample_couples(rng, people, last_generation):
            for _ in range(rng.integers(1, 6)):
                is_adopted = rng.random() < 0.02
                is_female = bool(rng.random() < 0.5)
                has_fathers_clan = (number < 2) != is_adopted
                clan = people[man if has_fathers_clan else woman][1]
                people.append((is_female, clan, man, woman))

        # The first generation, and a new one should a tribe die out.
        if len(people) == start:
            for _ in range(n_founders):
                is_female = bool(rng.random() < 0.5)
                clan = str(rng.choice(TRIBES[number]))
                people.append((is_female, clan, -1, -1))

        del people[target_size:]
        last_generation = list(range(start, len(people)))


def _sample_couples(
    rng: np.random.Generator, people: list[_Person], generation: list[int]
) -> list[tuple[int, int]]:
    """Pair men and women of one generation at random, as (man, woman); two of one clan do not marry."""
    order = [generation[i] for i in rng.permutation(len(generation))]
    men = [i for i in order if not people[i][0]]
    women = [i for i in order if people[i][0]]
    return [(m, w) for m, w in zip(men, women) if people[m][1] != people[w][1]]


# -- family_tree


def make_family_tree(n_people: int, seed: int) -> Dataset:
    """Generate the family_tree data set over people p1, p2, ...

    Args:
      n_people: number of people, at least 10.
      seed: seed of numpy's default generator.

    Returns:
      The data set with its rules; the same for the same arguments.

    Raises:
      ValueError: `n_people` is too small, or `seed` is negative.
    """
    rng = _make_generator("family_tree", n_people, seed, 10)
    atoms, reasons = _family_facts(*_sample_family(rng, n_people))
    codes = row_codes(np.concatenate([atoms, reasons.reshape(-1, 3)]))
    own, wanted = np.split(codes, [len(atoms)])
    by_code = np.argsort(own)
    place = by_code[np.searchsorted(own, wanted, sorter=by_code)]
    derivations = place.reshape(-1, 2, 2)
    order = rng.permutation(len(atoms))
    split = _sample_splits(rng, derivations, 0.2)[order]
    atoms = atoms[order].astype(np.int32)

    train = atoms[split == 0]
    dataset = Dataset(
        name=f"family_tree:{n_people}:{seed}",
        entities=tuple(f"p{i}" for i in range(1, n_people + 1)),
        predicates=RELATIONS,
        arities=(2,) * len(RELATIONS),
        train=train,
        valid=atoms[split == 1],
        test=atoms[split == 2],
        facts=train,
    )
    rules, _ = read_clauses(FAMILY_RULES, "family_tree", "weighted")
    return with_rules(dataset, rules, "family_tree")


def _sample_family(
    rng: np.random.Generator, n_people: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sample generation after generation until there are `n_people`; founders are about a fifth of them.

    Returns:
      female: bool [n].
      parents: int [n], the couple that each person is a child of, ascending; -1 for founders.
      couples: int [2, k], husband and wife of each couple.
    """
    female = rng.random(n_people) < 0.5
    n_founders = max(4, n_people // 5)
    parents = np.full(min(n_founders, n_people), -1)
    couples = np.zeros((2, 0), np.int64)
    start = 0  # of the last generation
    while start < n_people:
        generation = np.arange(start, len(parents))
        is_female = female[generation]
        men = rng.permutation(generation[~is_female])
        women = rng.permutation(generation[is_female])
        n_pairs = min(len(men), len(women))
        pairs = np.stack([men[:n_pairs], women[:n_pairs]])

        # Siblings do not marry. Founders have no parents in common.
        father, mother = parents[pairs]
        pairs = pairs[:, (father != mother) | (father < 0)]
        n_children = rng.integers(0, 6, pairs.shape[1])
        couple = couples.shape[1] + np.arange(pairs.shape[1])
        children = np.repeat(couple, n_children)
        couples = np.concatenate([couples, pairs], axis=1)

        # New founders should a generation have no children.
        if not len(children):
            children = np.full(n_founders, -1)
        start = len(parents)
        parents = np.concatenate([parents, children])[:n_people]
    return female, parents, couples


def _family_facts(
    female: np.ndarray, parents: np.ndarray, couples: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the facts of the twelve relations, int [n, 3], and what derives each, int [n, 2, 2, 3]: two or two others.

    The arguments are those that `_sample_family` returns. A fact with one derivation has it twice.
    """
    child = np.flatnonzero(parents >= 0)
    couple = parents[child]
    # of a couple, and of each child, with the husband or father first
    spouse = [_facts(1 + i, couples[i], couples[1 - i]) for i in (0, 1)]
    parent = [_facts(3 + i, couples[i][couple], child) for i in (0, 1)]
    child_of = [
        _facts(5 + female[child], child, couples[i][couple]) for i in (0, 1)
    ]

    # a fact, the two facts of its first derivation, and those of its second
    blocks = [(spouse[i], *[spouse[1 - i]] * 4) for i in (0, 1)]
    for i in (0, 1):
        married = spouse[i][couple]
        by_child = (married, child_of[1 - i])
        blocks.append((parent[i], married, parent[1 - i], *by_child))
    for i in (0, 1):
        by_other = (child_of[1 - i], spouse[1 - i][couple])
        blocks.append((child_of[i], *by_other, *by_other))

    blocks += _kin_facts(female, couples, child, couple, parent, child_of)
    facts, *reasons = map(np.concatenate, zip(*blocks))
    return facts, np.stack(reasons, 1).reshape(-1, 2, 2, 3)


def _kin_facts(
    female: np.ndarray,
    couples: np.ndarray,
    child: np.ndarray,
    couple: np.ndarray,
    parent: Sequence[np.ndarray],
    child_of: Sequence[np.ndarray],
) -> list[tuple[np.ndarray, ...]]:
    """Return the blocks of siblings, and of uncles and aunts with their nephews and nieces; see `_family_facts`.

    Args:
      child, couple: each child, and its parents; children of one couple are next to each other.
      parent, child_of: of each child, with the father first.
    """
    one, other = _pairs_of_equals(couple, couple)
    one, other = (x[one != other] for x in (one, other))
    person, sibling = child[one], child[other]
    of_person = _facts(7 + female[person], person, sibling)
    mirror = _facts(7 + female[sibling], sibling, person)
    by_parents = (mirror, child_of[0][one], mirror, child_of[1][one])
    blocks: list[tuple[np.ndarray, ...]] = [(of_person, *by_parents)]
    for i in (0, 1):
        of, pair = _pairs_of_equals(couples[i][couple], person)
        uncle, nephew = sibling[pair], child[of]
        of_uncle = _facts(9 + female[uncle], uncle, nephew)
        by_parent = (mirror[pair], parent[i][of])
        blocks.append((of_uncle, *by_parent, *by_parent))
        of_nephew = _facts(11 + female[nephew], nephew, uncle)
        by_child = (child_of[i][of], of_person[pair])
        blocks.append((of_nephew, *by_child, of_uncle, child_of[i][of]))
    return blocks


def _facts(
    relation: np.ndarray | int, x: np.ndarray, y: np.ndarray
) -> np.ndarray:
    """Return facts over people that are counted from 0, int [n, 3]."""
    return np.stack(np.broadcast_arrays(relation, x + 1, y + 1), -1)


def _pairs_of_equals(
    left: np.ndarray, right: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the pairs of an index of `left` and one of `right`, which is ascending, with equal values."""
    start = np.searchsorted(right, left)
    n = np.searchsorted(right, left, side="right") - start
    row = np.repeat(np.arange(len(left)), n)
    offset = np.arange(len(row)) - np.repeat(np.cumsum(n) - n, n)
    return row, start[row] + offset
