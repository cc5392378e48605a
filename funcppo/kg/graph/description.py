"""What a data set of triples is like: its splits, its relations, and how its entities are linked.

Everything is counted by sorting, so the work grows little faster than the number of triples. Pairs of inverse triples
are searched up to `leakage.MAX_PAIRS`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from funcppo.kg.graph.dataset import Dataset
from funcppo.kg.graph.leakage import (
    MAX_PAIRS,
    index_triples,
    iter_inverse_pairs,
)

# by relation and other relation: the facts of the first that the other has with exchanged arguments
Inverses = dict[int, dict[int, int]]
SPLITS = ("train", "valid", "test")
DEGREE_QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)


class SplitDescription(NamedTuple):
    """One split; all numbers but the first are of held-out triples beside the known facts (train and facts)."""

    n_triples: int
    n_entities: int
    n_relations: int
    n_known: int  # triples that are known facts
    n_linked: int  # triples whose two entities a known fact links, either way round; of train: another fact does
    n_unseen_entities: int  # entities that no known fact has
    n_unseen_relations: int


class RelationDescription(NamedTuple):
    """One relation; shares and means are over the known facts, nan without any."""

    name: str
    n_facts: int
    n_valid: int
    n_test: int
    tails_per_head: float  # mean over the heads that it has
    heads_per_tail: float
    functional_share: float  # of its heads that have one tail
    inverse_functional_share: float  # of its tails that have one head
    symmetric_share: (
        float | None
    )  # of its facts whose inverse it has too, loops left out; None: not searched
    inverse: (
        str | None
    )  # the other relation that has most of its facts with exchanged arguments
    inverse_share: float | None  # of its facts


class Description(NamedTuple):
    """A data set of triples."""

    splits: dict[str, SplitDescription]
    relations: list[RelationDescription]  # the largest first
    degree_quantiles: dict[
        str, float
    ]  # of the number of known facts of an entity
    n_other_atoms: int  # facts that do not have two arguments, left out
    notes: list[str]


def describe(dataset: Dataset) -> Description:
    """Describe the facts of two arguments of a data set and its held-out triples.

    Args:
      dataset: has such facts.

    Raises:
      ValueError: it has none.
    """
    is_binary = np.array([False, *(n == 2 for n in dataset.arities)])
    tables = {
        name: table[is_binary[table[:, 0]]][:, :3]
        for name, table in {
            "facts": dataset.facts,
            **{split: getattr(dataset, split) for split in SPLITS},
        }.items()
    }
    facts = (
        tables["facts"]
        if dataset.atom_width > 2
        else np.zeros((0, 3), np.int32)
    )
    if not len(facts):
        raise ValueError(
            f"{dataset.name}: expected facts of two arguments to describe, got none"
        )

    inverses = _count_inverses(facts, dataset.n_predicates)
    notes = list(dataset.notes)
    if inverses is None:
        notes.append(
            f"symmetric and inverse relations were not searched: over {MAX_PAIRS:,} pairs of inverse triples"
        )

    degree = np.bincount(
        facts[:, 1:].ravel(), minlength=dataset.n_constants + 1
    )[1:]
    return Description(
        splits={
            split: _describe_split(tables[split], facts, split == "train")
            for split in SPLITS
        },
        relations=_describe_relations(dataset, tables, inverses),
        degree_quantiles={
            f"{share:g}": float(np.quantile(degree, share))
            for share in DEGREE_QUANTILES
        },
        n_other_atoms=len(dataset.facts) - len(facts),
        notes=notes,
    )


def _describe_split(
    table: np.ndarray, facts: np.ndarray, is_train: bool
) -> SplitDescription:
    """A split beside the known facts."""
    if not len(table):
        return SplitDescription(*[0] * len(SplitDescription._fields))
    pairs = _pair_codes(np.concatenate([facts, table]))
    fact_pair, pair = pairs[: len(facts)], pairs[len(facts) :]
    distinct, count = np.unique(fact_pair, return_counts=True)
    # Of a fact the pair must be linked by another fact too.
    linked = distinct[count > 1] if is_train else distinct

    n_relations = int(max(facts[:, 0].max(), table[:, 0].max(initial=0)))
    fact_row, row = index_triples([facts, table], n_relations).rows
    is_known = np.isin(row, fact_row)
    return SplitDescription(
        n_triples=len(table),
        n_entities=len(np.unique(table[:, 1:])),
        n_relations=len(np.unique(table[:, 0])),
        n_known=int(is_known.sum()),
        n_linked=int(np.isin(pair, linked).sum()),
        n_unseen_entities=len(np.setdiff1d(table[:, 1:], facts[:, 1:])),
        n_unseen_relations=len(np.setdiff1d(table[:, 0], facts[:, 0])),
    )


def _pair_codes(table: np.ndarray) -> np.ndarray:
    """A number for the two entities of each triple, the same either way round."""
    head, tail = table[:, 1].astype(np.int64), table[:, 2].astype(np.int64)
    n_entities = 1 + int(table[:, 1:].max(initial=0))
    return np.minimum(head, tail) * n_entities + np.maximum(head, tail)


def _describe_relations(
    dataset: Dataset,
    tables: dict[str, np.ndarray],
    inverses: Inverses | None,
) -> list[RelationDescription]:
    """All relations of two arguments, the largest first."""
    size = dataset.n_predicates + 1
    n = {
        name: np.bincount(table[:, 0], minlength=size)
        for name, table in tables.items()
    }
    facts = tables["facts"]
    heads, heads_once = _count_arguments(facts, 1, size)
    tails, tails_once = _count_arguments(facts, 2, size)
    is_loop = facts[:, 1] == facts[:, 2]
    n_loops = np.bincount(facts[is_loop, 0], minlength=size)

    relations: list[RelationDescription] = []
    for i in (np.argsort(-n["facts"][1:], kind="stable") + 1).tolist():
        if dataset.arities[i - 1] != 2:
            continue
        n_facts = int(n["facts"][i])
        symmetric, inverse, share = None, None, None
        if inverses is not None:
            others = dict(inverses.get(i, {}))
            symmetric = _share(others.pop(i, 0), n_facts - int(n_loops[i]))
            if others:
                best = max(others, key=lambda other: others[other])
                inverse = dataset.predicates[best - 1]
                share = _share(others[best], n_facts - int(n_loops[i]))
        relations.append(
            RelationDescription(
                name=dataset.predicates[i - 1],
                n_facts=n_facts,
                n_valid=int(n["valid"][i]),
                n_test=int(n["test"][i]),
                tails_per_head=_share(n_facts, heads[i]),
                heads_per_tail=_share(n_facts, tails[i]),
                functional_share=_share(heads_once[i], heads[i]),
                inverse_functional_share=_share(tails_once[i], tails[i]),
                symmetric_share=symmetric,
                inverse=inverse,
                inverse_share=share,
            )
        )
    return relations


def _count_arguments(
    facts: np.ndarray, place: int, size: int
) -> tuple[list[int], list[int]]:
    """For each relation how many entities it has in a place, and how many of them once."""
    n_entities = 1 + int(facts[:, place].max())
    code = facts[:, 0].astype(np.int64) * n_entities + facts[:, place]
    distinct, count = np.unique(code, return_counts=True)
    relation = distinct // n_entities
    return (
        np.bincount(relation, minlength=size).tolist(),
        np.bincount(relation[count == 1], minlength=size).tolist(),
    )


def _count_inverses(facts: np.ndarray, n_relations: int) -> Inverses | None:
    """How many facts of each relation each relation has with exchanged arguments; None: too many pairs."""
    triples = index_triples([facts], n_relations)
    if int(triples.inverse_count.sum()) > MAX_PAIRS:
        return None
    codes, counts = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for part in iter_inverse_pairs(triples, np.arange(len(triples.relation))):
        a, b = triples.relation[part.triple], triples.relation[part.inverse]
        code, count = np.unique(a * n_relations + b, return_counts=True)
        codes.append(code)
        counts.append(count)
    code, index = np.unique(np.concatenate(codes), return_inverse=True)
    total = np.bincount(index, np.concatenate(counts), len(code))
    found: Inverses = {}
    for pair, n in zip(code.tolist(), total.astype(int).tolist()):
        relation, other = divmod(pair, n_relations)
        found.setdefault(relation + 1, {})[other + 1] = n
    return found


def _share(part: int, whole: int) -> float:
    """A part of a whole; nan of nothing."""
    return part / whole if whole else float("nan")
