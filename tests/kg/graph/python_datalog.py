"""Datalog over Python sets of id triples, for tests of data sets too large for `tests.oracles`."""

from collections.abc import Iterable

import numpy as np

from funcppo.kg.graph.dataset import Dataset
from funcppo.kg.graph.rules import format_rule, read_clauses
from funcppo.kg.graph.text import Clause

Fact = tuple[int, ...]


def consequences(rules: Iterable[np.ndarray], facts: set[Fact]) -> set[Fact]:
    """The heads of all rule instances whose body is among the facts: one step of T_P; all atoms are binary."""
    # by predicate, and by predicate and one argument
    index: dict[tuple, list[tuple[int, ...]]] = {}
    for p, x, y in facts:
        for lookup in ((p, None, None), (p, x, None), (p, None, y)):
            index.setdefault(lookup, []).append((x, y))
    heads = set()
    for rule in rules:
        head, *body = [tuple(map(int, atom)) for atom in rule if atom[0]]
        bindings: list[dict[int, int]] = [{}]
        for p, x, y in body:
            extended = []
            for b in bindings:
                pairs = index.get(
                    (p, b.get(x), None if x in b else b.get(y)), []
                )
                extended += [
                    {**b, x: u, y: v}
                    for u, v in pairs
                    if b.get(x, u) == u and b.get(y, v) == v
                ]
            bindings = extended
        heads |= {(head[0], b[head[1]], b[head[2]]) for b in bindings}
    return heads


def rows(table: np.ndarray) -> set[Fact]:
    """The rows of a table of ids as tuples."""
    return {tuple(map(int, row)) for row in table}


def triples(dataset: Dataset, table: np.ndarray) -> set[tuple[str, str, str]]:
    """The rows of a table of binary atoms as (head, relation, tail) names."""
    names = dataset.entities
    return {
        (names[h - 1], dataset.predicates[r - 1], names[t - 1])
        for r, h, t in table.tolist()
    }


def rule_clauses(dataset: Dataset) -> list[Clause]:
    """The rules of a data set in names."""
    lines = [format_rule(dataset, rule) for rule in dataset.rules]
    return read_clauses("\n".join(lines), "rules", "weighted")[0]
