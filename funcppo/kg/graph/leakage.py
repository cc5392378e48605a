"""Leakage between splits: held-out triples that are known, that repeat each other, or whose inverse is known.

A relation is a near-inverse of another if most triples of each, over all splits, are triples of the other with
exchanged arguments; a symmetric relation is its own near-inverse.

Source: Toutanova and Chen 2015, "Observed versus latent features for knowledge base and text inference"; the share is
that of Akrami et al. 2020, "Realistic re-evaluation of knowledge graph completion methods" (arXiv:2003.08001).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from funcppo.core.files import shorten

# share of the triples of each relation that the other one has with exchanged arguments
NEAR_INVERSE_SHARE = 0.8
# pairs of a triple and one of its inverses beyond which no near-inverses are searched, and how many are held at a time
MAX_PAIRS = 30_000_000
PAIRS_PER_CHUNK = 2_000_000
# known facts beyond which no leaks are searched: the search sorts them twice
MAX_TRIPLES = 50_000_000
MAX_LISTED = 3  # pairs of relations that a note names


class IndexedTriples(NamedTuple):
    """The distinct triples of all splits, sorted by their pair of entities."""

    relation: np.ndarray  # int64 [n], from 0
    is_loop: np.ndarray  # bool [n], head and tail are one entity
    # int64 [n], the first triple of the inverse pair of entities, and how many have that pair; 0 for loops
    inverse_start: np.ndarray
    inverse_count: np.ndarray
    rows: list[np.ndarray]  # of each table: its rows as indices of these
    n_relations: int


class InversePairs(NamedTuple):
    """Triples and their inverses, as indices."""

    triple: np.ndarray
    inverse: np.ndarray


def leakage_notes(
    known: np.ndarray,
    held_out: Mapping[str, np.ndarray],
    relations: Sequence[str],
) -> list[str]:
    """One line on each way in which a split leaks into the known facts, or repeats triples.

    Args:
      known: int [n, 3], the known facts, as (relation, head, tail) from 1.
      held_out: the held-out splits by name, of the same form.
      relations: names of the relations, relation r at r - 1.
    """
    splits = {name: table for name, table in held_out.items() if len(table)}
    if not splits:
        return []
    if len(known) > MAX_TRIPLES:
        return [
            f"leaks between the splits were not searched: {len(known):,} known facts, over {MAX_TRIPLES:,}"
        ]
    triples = index_triples([known, *splits.values()], len(relations))
    is_known = np.zeros(len(triples.relation), bool)
    is_known[triples.rows[0]] = True

    notes: list[str] = []
    earlier: dict[str, np.ndarray] = {}
    for name, rows in zip(splits, triples.rows[1:]):
        notes += _count_notes(name, rows, is_known, earlier)
        earlier[name] = rows
    return notes + _inverse_notes(triples, is_known, list(splits), relations)


def _count_notes(
    name: str,
    rows: np.ndarray,
    is_known: np.ndarray,
    earlier: Mapping[str, np.ndarray],
) -> list[str]:
    """The notes on triples of a split that are known, in an earlier split, or repeated."""
    n = len(rows)
    counts = {
        "are known facts (train or facts)": int(is_known[rows].sum()),
        "repeat another and are ranked again": n - len(np.unique(rows)),
    }
    for other, other_rows in earlier.items():
        counts[f"are in {other} too"] = int(np.isin(rows, other_rows).sum())
    return [
        f"{name}: {count} of {n} triples {what}"
        for what, count in counts.items()
        if count
    ]


def index_triples(
    tables: Sequence[np.ndarray], n_relations: int
) -> IndexedTriples:
    """Number the distinct triples of some tables, and find the triples of each inverse pair of entities."""
    rows = np.concatenate(tables).astype(np.int64)
    relation, head, tail = rows[:, 0] - 1, rows[:, 1], rows[:, 2]
    n_entities = 1 + int(rows[:, 1:].max())

    # Pairs are numbered first: a code of all three ids could overflow.
    pair_code, pair = np.unique(head * n_entities + tail, return_inverse=True)
    code, triple = np.unique(pair * n_relations + relation, return_inverse=True)
    pair_of_triple = code // n_relations
    pair_start = np.searchsorted(pair_of_triple, np.arange(len(pair_code) + 1))

    pair_head, pair_tail = np.divmod(pair_code, n_entities)
    inverse_code = pair_tail * n_entities + pair_head
    inverse = np.searchsorted(pair_code, inverse_code)
    inverse = np.minimum(inverse, len(pair_code) - 1)
    is_loop = pair_head == pair_tail
    has_inverse = (pair_code[inverse] == inverse_code) & ~is_loop
    count = pair_start[inverse + 1] - pair_start[inverse]
    count[~has_inverse] = 0

    ends = np.cumsum([len(table) for table in tables])[:-1]
    return IndexedTriples(
        relation=code % n_relations,
        is_loop=is_loop[pair_of_triple],
        inverse_start=pair_start[inverse][pair_of_triple],
        inverse_count=count[pair_of_triple],
        rows=np.split(triple, ends),
        n_relations=n_relations,
    )


def iter_inverse_pairs(
    triples: IndexedTriples, subset: np.ndarray
) -> Iterator[InversePairs]:
    """Pairs of each triple of a subset and each triple of its inverse pair of entities, chunk by chunk."""
    counts = triples.inverse_count[subset]
    subset = subset[counts > 0]
    counts = counts[counts > 0]
    chunk = np.cumsum(counts) // PAIRS_PER_CHUNK
    starts = np.flatnonzero(np.diff(chunk, prepend=-1))
    for part, n in zip(
        np.split(subset, starts[1:]), np.split(counts, starts[1:])
    ):
        triple = np.repeat(part, n)
        first = np.repeat(np.cumsum(n) - n, n)
        offset = np.arange(len(triple)) - first
        yield InversePairs(triple, triples.inverse_start[triple] + offset)


def _near_inverses(triples: IndexedTriples) -> np.ndarray:
    """The pairs of relations that are near-inverses, sorted, each as relation * n_relations + inverse."""
    n_relations = triples.n_relations
    size = np.bincount(
        triples.relation[~triples.is_loop], minlength=n_relations
    )
    pairs: list[np.ndarray] = []
    counts: list[np.ndarray] = []
    for part in iter_inverse_pairs(triples, np.arange(len(triples.relation))):
        a, b = triples.relation[part.triple], triples.relation[part.inverse]
        # Others are too different in size to be near-inverses.
        larger = np.maximum(size[a], size[b])
        is_close = np.minimum(size[a], size[b]) >= NEAR_INVERSE_SHARE * larger
        pair, count = np.unique(
            (a * n_relations + b)[is_close], return_counts=True
        )
        pairs.append(pair)
        counts.append(count)
    pair, index = np.unique(np.concatenate(pairs), return_inverse=True)
    n_common = np.bincount(index, np.concatenate(counts), len(pair))
    larger = np.maximum(size[pair // n_relations], size[pair % n_relations])
    return pair[n_common >= NEAR_INVERSE_SHARE * larger]


def _inverse_notes(
    triples: IndexedTriples,
    is_known: np.ndarray,
    names: Sequence[str],
    relations: Sequence[str],
) -> list[str]:
    """The notes on triples of each held-out split that are the inverse of a known fact."""
    n_pairs = int(triples.inverse_count.sum())
    if n_pairs > MAX_PAIRS:
        return [
            f"inverse triples between the splits were not searched: {n_pairs:,} pairs of triples, over {MAX_PAIRS:,}"
        ]
    near_inverses = _near_inverses(triples)

    notes: list[str] = []
    for name, rows in zip(names, triples.rows[1:]):
        leaked: list[np.ndarray] = []
        found: list[np.ndarray] = []
        for part in iter_inverse_pairs(triples, np.unique(rows)):
            a, b = triples.relation[part.triple], triples.relation[part.inverse]
            # A pair of relations counts the same either way round.
            pair = np.minimum(a, b) * triples.n_relations + np.maximum(a, b)
            is_leak = is_known[part.inverse] & np.isin(pair, near_inverses)
            leaked.append(part.triple[is_leak])
            found.append(pair[is_leak])
        if not any(map(len, leaked)):
            continue
        n_leaked = int(np.isin(rows, np.concatenate(leaked)).sum())
        pair, count = np.unique(np.concatenate(found), return_counts=True)
        listed = pair[np.argsort(-count, kind="stable")]
        text = _format_pairs(listed, [shorten(name) for name in relations])
        notes.append(
            f"{name}: {n_leaked} of {len(rows)} triples are inverses of known facts: {text}"
        )
    return notes


def _format_pairs(pairs: np.ndarray, relations: list[str]) -> str:
    """Pairs of relations in names; a relation alone is symmetric."""
    texts: list[str] = []
    for pair in pairs[:MAX_LISTED].tolist():
        a, b = divmod(pair, len(relations))
        is_symmetric = a == b
        texts.append(
            f"{relations[a]} is symmetric"
            if is_symmetric
            else f"{relations[a]} and {relations[b]}"
        )
    if len(pairs) > MAX_LISTED:
        texts.append(f"{len(pairs) - MAX_LISTED} more")
    return ", ".join(texts)
