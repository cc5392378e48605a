"""family_tree: made-up families of any size, with the twelve relations of the Family set and rules that are exact.

`r(X, Y)` reads "X is the r of Y". Couples are exclusive and have all their children together, so siblings share both
parents; an aunt or uncle is a sibling of a parent. Then every rule of RULES is sound, and every held-out fact follows
from train by at most two steps.

All facts stand in one table of blocks, and each fact knows one or two pairs of facts that derive it by a rule: so what
can be held out is looked up, not searched for.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from funcppo.data.dataset import Dataset, with_rules
from funcppo.data.readers import read_clauses

RELATIONS = ("husband", "wife", "father", "mother", "son", "daughter", "brother", "sister")
RELATIONS += ("uncle", "aunt", "nephew", "niece")
_HUSBAND, _WIFE, _FATHER, _MOTHER, _SON, _BROTHER, _UNCLE, _NEPHEW = (1, 2, 3, 4, 5, 7, 9, 11)
_HELD_OUT = 0.2  # the share of facts drawn for valid and test together; those that nothing derives go back
_MOST_CHILDREN = 5

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
    female: np.ndarray  # bool [n]
    couple: np.ndarray  # int [n], the parents' couple, ascending; -1 for founders
    husband: np.ndarray  # int [k], of each couple
    wife: np.ndarray  # int [k]


class _Siblings(NamedTuple):
    start: np.ndarray  # int [c], where the pairs of each child start
    n_siblings: np.ndarray  # int [c], of each child
    one: np.ndarray  # int [s], a child
    other: np.ndarray  # int [s], its sibling
    mirror: np.ndarray  # int [s], where the pair the other way round stands


class _Facts(NamedTuple):
    atoms: np.ndarray  # int [F, 3]: relation, X, Y; people count from 1
    derivations: np.ndarray  # int [F, 2, 2]: two pairs of fact ids, either of which derives the fact by a rule


def make_family_tree(n_people: int, seed: int) -> Dataset:
    """A data set over `people` persons p1, p2, ...; equal for equal arguments.

    Args:
      people: at least 10.
      seed: of numpy's default generator.
    Errors: ValueError when `people` is less than 10 or `seed` is negative.
    """
    if n_people < 10 or seed < 0:
        raise ValueError(f"family_tree: want at least 10 people and a seed from 0, got {n_people} and {seed}")
    rng = np.random.default_rng(seed)
    facts = _facts(_people(rng, n_people))
    order = rng.permutation(len(facts.atoms))
    split = _split(rng, facts)[order]
    atoms = facts.atoms[order].astype(np.int32)
    dataset = Dataset(
        name=f"family_tree:{n_people}:{seed}",
        entities=tuple(f"p{i}" for i in range(1, n_people + 1)),
        predicates=RELATIONS,
        arities=(2,) * len(RELATIONS),
        train=atoms[split == 0],
        valid=atoms[split == 1],
        test=atoms[split == 2],
        facts=atoms[split == 0],
        rules=np.zeros((0, 1, 3), np.int32),
        rule_weights=np.zeros(0),
        n_duplicates=0,
        notes=(),
    )
    return with_rules(dataset, read_clauses(RULES, "family_tree", "weighted"), "family_tree")


def _people(rng: np.random.Generator, n: int) -> _People:
    """Generation after generation until there are `n` people; founders are about a fifth of them."""
    female = rng.random(n) < 0.5
    founders = max(4, n // 5)
    couple, husband, wife = np.full(min(founders, n), -1), np.zeros(0, np.int64), np.zeros(0, np.int64)
    start = 0
    while start < n:
        men, women = _matched(rng, female, couple, start)
        children = np.repeat(np.arange(len(men)) + len(husband), rng.integers(0, _MOST_CHILDREN + 1, len(men)))
        husband, wife = np.concatenate([husband, men]), np.concatenate([wife, women])
        start = len(couple)
        couple = np.concatenate([couple, children if len(children) else np.full(founders, -1)])[:n]
    return _People(female, couple, husband, wife)


def _matched(
    rng: np.random.Generator, female: np.ndarray, couple: np.ndarray, start: int
) -> tuple[np.ndarray, np.ndarray]:
    """Men and women of the last generation, paired at random; siblings do not marry."""
    born = np.arange(start, len(couple))
    men, women = rng.permutation(born[~female[born]]), rng.permutation(born[female[born]])
    pairs = min(len(men), len(women))
    men, women = men[:pairs], women[:pairs]
    strangers = (couple[men] != couple[women]) | (couple[men] < 0)
    return men[strangers], women[strangers]


def _expand(count: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where each row's items start, and the row and the place within the row of every item."""
    start = np.cumsum(count) - count
    owner = np.repeat(np.arange(len(count)), count)
    return start, owner, np.arange(len(owner)) - start[owner]


def _siblings(couple: np.ndarray) -> _Siblings:
    """The ordered pairs of children of one couple; `couple` is ascending."""
    first, last = np.searchsorted(couple, couple), np.searchsorted(couple, couple, side="right")
    count = last - first - 1
    start, one, place = _expand(count)
    other = first[one] + place
    other = other + (other >= one)
    return _Siblings(start, count, one, other, start[other] + one - first[one] - (one > other))


def _facts(people: _People) -> _Facts:
    """Every fact of the twelve relations, in blocks: couples, parents, children, siblings, then uncles and nephews."""
    k, child = len(people.husband), np.flatnonzero(people.couple >= 0)
    couple, gender = people.couple[child], people.female[child]
    father, mother = people.husband[couple], people.wife[couple]
    kin = _siblings(couple)
    at = np.cumsum([0, k, k, *[len(child)] * 4])  # where each block starts
    husband_id, wife_id = at[0] + np.arange(k), at[1] + np.arange(k)
    father_id, mother_id, of_father_id, of_mother_id = (at[i] + np.arange(len(child)) for i in (2, 3, 4, 5))
    his, hers, mirrored = husband_id[couple], wife_id[couple], at[6] + kin.mirror
    siblings = child[kin.one], child[kin.other]
    blocks = [
        _block(_HUSBAND, people.husband, people.wife, (wife_id, wife_id)),
        _block(_WIFE, people.wife, people.husband, (husband_id, husband_id)),
        _block(_FATHER, father, child, (his, mother_id), (his, of_mother_id)),
        _block(_MOTHER, mother, child, (hers, father_id), (hers, of_father_id)),
        _block(_SON + gender, child, father, (of_mother_id, hers)),
        _block(_SON + gender, child, mother, (of_father_id, his)),
        _block(_BROTHER + gender[kin.one], *siblings, *((mirrored, i[kin.one]) for i in (of_father_id, of_mother_id))),
    ]
    for parent, parent_id, child_id in ((father, father_id, of_father_id), (mother, mother_id, of_mother_id)):
        end = sum(len(atoms) for atoms, _ in blocks)
        blocks += _uncles(people, child, kin, int(at[6]), end, parent, parent_id, child_id)
    return _Facts(*(np.concatenate(parts) for parts in zip(*blocks)))


def _uncles(
    people: _People,
    child: np.ndarray,
    kin: _Siblings,
    siblings_at: int,
    uncles_at: int,
    parent: np.ndarray,
    parent_id: np.ndarray,
    child_id: np.ndarray,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The blocks of uncles and aunts, and of nephews and nieces, by one side of the family.

    Args:
      child: people who have parents; `parent`, `parent_id` and `child_id` go along with it.
      siblings_at, uncles_at: where the block of siblings starts, and where this one does.
      parent: the father, or the mother, of each child.
      parent_id, child_id: the facts that relate the two.
    """
    has_parents = people.couple[parent] >= 0
    row = np.where(has_parents, np.searchsorted(child, parent), 0)
    _, nephew, place = _expand(np.where(has_parents, kin.n_siblings[row], 0))
    pair = kin.start[row[nephew]] + place  # (parent, uncle)
    uncle, uncle_id = child[kin.other[pair]], uncles_at + np.arange(len(pair))
    up, down = siblings_at + pair, siblings_at + kin.mirror[pair]
    nephews = _NEPHEW + people.female[child[nephew]]
    return [
        _block(_UNCLE + people.female[uncle], uncle, child[nephew], (down, parent_id[nephew])),
        _block(nephews, child[nephew], uncle, (child_id[nephew], up), (uncle_id, child_id[nephew])),
    ]


def _block(
    relation: np.ndarray | int, x: np.ndarray, y: np.ndarray, *derivations: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """The rows of one block: atoms [m, 3], derivations [m, 2, 2]; a single derivation is repeated."""
    both = [np.stack(pair, -1) for pair in (derivations[0], derivations[-1])]
    return np.stack(np.broadcast_arrays(relation, x + 1, y + 1), -1), np.stack(both, 1)


def _split(rng: np.random.Generator, facts: _Facts) -> np.ndarray:
    """0 train, 1 valid, 2 test of each fact; what train does not derive within two steps goes back to train.

    Going back only adds to train, so what was derived stays derived.
    """
    held_out = rng.random(len(facts.atoms)) < _HELD_OUT
    known = ~held_out
    for _ in range(2):
        known = known | known[facts.derivations].all(-1).any(-1)
    return np.where(held_out & known, rng.integers(1, 3, len(held_out)), 0)
