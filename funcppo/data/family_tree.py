"""family_tree: made-up families of any size, with the twelve relations of the Family set and rules that are exact.

`r(X, Y)` reads "X is the r of Y". Couples are exclusive and have all their children together, so siblings share both
parents; an aunt or uncle is a sibling of a parent. Then every rule of RULES is sound, and every held-out fact follows
from train by at most two steps. `make_family_tree` builds the data set.

All facts stand in one table, in blocks of one relation or of a pair such as son and daughter. Each fact has one or two
derivations: pairs of facts that derive it by a rule. So what can be held out is looked up, not searched for.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from funcppo.data.dataset import Dataset, with_rules
from funcppo.data.readers import read_clauses

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
MIN_PEOPLE = 10

# Predicate ids. Where a relation depends on the gender, the female one is the next: _SON + 1 is daughter.
_HUSBAND, _WIFE, _FATHER, _MOTHER, _SON, _BROTHER, _UNCLE, _NEPHEW = (1, 2, 3, 4, 5, 7, 9, 11)

_HELD_OUT_FRACTION = 0.2  # share of facts drawn for valid and test together; those that nothing derives go back
_MAX_CHILDREN = 5  # of a couple
_MAX_DERIVATION_STEPS = 2  # rule applications, one above the other, that derive a held-out fact
_TRAIN, _VALID, _TEST = 0, 1, 2

RULES = """\
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
    parents: np.ndarray  # int [n], the couple each person is a child of, ascending; -1 for founders
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
    derivations: np.ndarray  # int [F, 2, 2]: two pairs of fact ids, either of which derives the fact by a rule


class _ParentFacts(NamedTuple):
    """One parent of each child, and the facts that relate the two."""

    parent: np.ndarray  # int [c], person
    parent_id: np.ndarray  # int [c], id of the fact that the parent is the father, or mother, of the child
    child_id: np.ndarray  # int [c], id of the fact that the child is the son, or daughter, of the parent


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
    if n_people < MIN_PEOPLE or seed < 0:
        problem = f"expected at least {MIN_PEOPLE} people and a seed from 0, got {n_people} and {seed}"
        raise ValueError(f"family_tree: {problem}")

    rng = np.random.default_rng(seed)
    facts = _make_facts(_sample_people(rng, n_people))
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
    return with_rules(dataset, read_clauses(RULES, "family_tree", "weighted"), "family_tree")


def _sample_people(rng: np.random.Generator, n_people: int) -> _People:
    """Draw generation after generation until there are `n_people`; founders are about a fifth of them."""
    female = rng.random(n_people) < 0.5
    n_founders = max(4, n_people // 5)
    parents = np.full(min(n_founders, n_people), -1)
    husband = np.zeros(0, np.int64)
    wife = np.zeros(0, np.int64)

    generation_start = 0
    while generation_start < n_people:
        couples = _sample_couples(rng, female, parents, generation_start)
        n_children = rng.integers(0, _MAX_CHILDREN + 1, len(couples.men))
        couple_ids = len(husband) + np.arange(len(couples.men))
        children = np.repeat(couple_ids, n_children)
        husband = np.concatenate([husband, couples.men])
        wife = np.concatenate([wife, couples.women])

        # New founders should a generation have no children.
        if not len(children):
            children = np.full(n_founders, -1)
        generation_start = len(parents)
        parents = np.concatenate([parents, children])[:n_people]

    return _People(female, parents, husband, wife)


def _sample_couples(
    rng: np.random.Generator, female: np.ndarray, parents: np.ndarray, generation_start: int
) -> _Couples:
    """Pair men and women of the last generation at random; siblings do not marry.

    Args:
      rng: source of randomness.
      female: bool [n], also of people not yet born.
      parents: int, the parents' couple of everybody born so far.
      generation_start: index of the first person of the last generation.
    """
    generation = np.arange(generation_start, len(parents))
    men = rng.permutation(generation[~female[generation]])
    women = rng.permutation(generation[female[generation]])
    n_pairs = min(len(men), len(women))
    men = men[:n_pairs]
    women = women[:n_pairs]

    may_marry = (parents[men] != parents[women]) | (parents[men] < 0)
    return _Couples(men[may_marry], women[may_marry])


def _make_ranges(n_items: np.ndarray) -> _Ranges:
    """Lay out rows of `n_items` items each, one row after the other."""
    start = np.cumsum(n_items) - n_items
    row = np.repeat(np.arange(len(n_items)), n_items)
    offset = np.arange(len(row)) - start[row]
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
    other = first[one] + offset
    other = other + (other >= one)

    # The offset of `one` among the siblings of `other`, `other` itself skipped.
    mirror_offset = one - first[one] - (one > other)
    return _SiblingPairs(start, n_siblings, one, other, start[other] + mirror_offset)


def _make_facts(people: _People) -> _Facts:
    """Every fact of the twelve relations, in blocks: couples, parents, children, siblings, then uncles and nephews."""
    n_couples = len(people.husband)
    child = np.flatnonzero(people.parents >= 0)  # people with parents
    couple = people.parents[child]
    is_female = people.female[child]
    father = people.husband[couple]
    mother = people.wife[couple]
    pairs = _sibling_pairs(couple)

    # Ids of facts: of a couple, and of a child and its parents. They follow the order of the blocks below.
    block_sizes = [n_couples, n_couples, *[len(child)] * 4]
    block_starts = np.cumsum([0, *block_sizes])
    husband_id = block_starts[0] + np.arange(n_couples)
    wife_id = block_starts[1] + np.arange(n_couples)
    father_id, mother_id, child_of_father_id, child_of_mother_id = (
        block_starts[i] + np.arange(len(child)) for i in (2, 3, 4, 5)
    )
    siblings_start = int(block_starts[6])
    mirror_id = siblings_start + pairs.mirror
    parents_husband_id = husband_id[couple]
    parents_wife_id = wife_id[couple]

    blocks = [
        _make_block(_HUSBAND, people.husband, people.wife, (wife_id, wife_id)),
        _make_block(_WIFE, people.wife, people.husband, (husband_id, husband_id)),
        _make_block(_FATHER, father, child, (parents_husband_id, mother_id), (parents_husband_id, child_of_mother_id)),
        _make_block(_MOTHER, mother, child, (parents_wife_id, father_id), (parents_wife_id, child_of_father_id)),
        _make_block(_SON + is_female, child, father, (child_of_mother_id, parents_wife_id)),
        _make_block(_SON + is_female, child, mother, (child_of_father_id, parents_husband_id)),
        _make_block(
            _BROTHER + is_female[pairs.one],
            child[pairs.one],
            child[pairs.other],
            (mirror_id, child_of_father_id[pairs.one]),
            (mirror_id, child_of_mother_id[pairs.one]),
        ),
    ]
    sides = (
        _ParentFacts(father, father_id, child_of_father_id),
        _ParentFacts(mother, mother_id, child_of_mother_id),
    )
    for side in sides:
        uncles_start = sum(len(block.atoms) for block in blocks)
        blocks += _uncle_blocks(people, child, pairs, side, siblings_start, uncles_start)
    return _Facts(*(np.concatenate(columns) for columns in zip(*blocks)))


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
    parent_row = np.where(parent_has_parents, np.searchsorted(child, side.parent), 0)
    n_uncles = np.where(parent_has_parents, pairs.n_siblings[parent_row], 0)
    _, nephew_row, offset = _make_ranges(n_uncles)

    pair = pairs.start[parent_row[nephew_row]] + offset  # (parent, uncle)
    uncle = child[pairs.other[pair]]
    nephew = child[nephew_row]
    uncle_id = uncles_start + np.arange(len(pair))
    parent_sibling_id = siblings_start + pair  # the parent is a sibling of the uncle
    uncle_sibling_id = siblings_start + pairs.mirror[pair]  # the uncle is a sibling of the parent
    parent_id = side.parent_id[nephew_row]
    child_id = side.child_id[nephew_row]
    return [
        _make_block(_UNCLE + people.female[uncle], uncle, nephew, (uncle_sibling_id, parent_id)),
        _make_block(
            _NEPHEW + people.female[nephew],
            nephew,
            uncle,
            (child_id, parent_sibling_id),
            (uncle_id, child_id),
        ),
    ]


def _make_block(
    relation: np.ndarray | int, x: np.ndarray, y: np.ndarray, *derivations: tuple[np.ndarray, np.ndarray]
) -> _Facts:
    """The facts of one block, with one or two derivations each; a single derivation is repeated."""
    atoms = np.stack(np.broadcast_arrays(relation, x + 1, y + 1), -1)
    first = np.stack(derivations[0], -1)
    second = np.stack(derivations[-1], -1)
    return _Facts(atoms, np.stack([first, second], 1))


def _sample_split(rng: np.random.Generator, facts: _Facts) -> np.ndarray:
    """Draw the split of each fact; what train does not derive within two steps goes back to train.

    Going back only adds to train, so what was derived stays derived.
    """
    held_out = rng.random(len(facts.atoms)) < _HELD_OUT_FRACTION
    derived = ~held_out
    for _ in range(_MAX_DERIVATION_STEPS):
        derived = derived | derived[facts.derivations].all(-1).any(-1)
    return np.where(held_out & derived, rng.integers(_VALID, _TEST + 1, len(held_out)), _TRAIN)
