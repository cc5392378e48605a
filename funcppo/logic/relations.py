"""Relations, and the literals that read them: rows by column, sorted and indexed as a join asks, once."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from funcppo.logic import row_index

_DENSE = 16  # ids per row up to which a view is indexed by id, without a search

Columns = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """Distinct rows, stored by column; `names` are variables. Without columns it has 0 or 1 rows."""

    variables: tuple[int, ...]
    columns: Columns
    size: int


UNIT_TABLE = Table((), (), 1)


@dataclass(frozen=True, slots=True)
class IndexedView:
    """Rows in lexicographic order, and the index over their first columns."""

    columns: Columns
    size: int
    key_prefixes: tuple[Tensor, ...]
    keys: Tensor
    row_offsets: Tensor | None  # where the rows of each value of the first column start, if that is all the index


@dataclass(frozen=True, slots=True)
class Relation:
    """Distinct rows of int64 columns in lexicographic order; a view is computed once and kept."""

    columns: Columns
    size: int
    view_cache: dict[tuple, IndexedView] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Literal:
    """A relation, and the term at each of its arguments."""

    relation: Relation
    terms: tuple[int, ...]
    variables: frozenset[int]


def make_literal(relation: Relation, terms: tuple[int, ...], n_constants: int) -> Literal:
    """The literal of a relation at some terms; those above `n_constants` are variables."""
    return Literal(relation, terms, frozenset(t for t in terms if t > n_constants))


def find_rows(columns: Columns, relation: Relation, n_constants: int) -> tuple[Tensor, Tensor]:
    """Where each row stands in a relation, and whether it does."""
    names, bits = tuple(range(n_constants + 1, n_constants + 1 + len(columns))), n_constants.bit_length()
    seen = indexed_view(make_literal(relation, names, n_constants), names, len(names), n_constants)
    key, found = row_index.encode_with_prefixes(seen.key_prefixes, columns, [bits] * len(columns))
    at, hit = row_index.binary_search(seen.keys, key)
    return at, found & hit


def select_rows(table: Table, mask: Tensor) -> Table:
    """The rows of a table that a mask keeps."""
    row = mask.nonzero().squeeze(1)
    return Table(table.variables, tuple(column.index_select(0, row) for column in table.columns), row.numel())


def distinct(table: Table, bits: int) -> Table:
    """The table with each row once, in lexicographic order."""
    if not table.columns:
        return Table((), (), min(table.size, 1))
    columns = row_index.unique_rows(table.columns, [bits] * len(table.columns))
    return Table(table.variables, columns, columns[0].numel())


def indexed_view(literal: Literal, variables: tuple[int, ...], n_index_columns: int, n_constants: int) -> IndexedView:
    """The literal's rows over `names`, found once a relation, pattern of terms and order of columns."""
    first = {t: literal.terms.index(t) for t in literal.terms}
    pattern = tuple(-first[t] if t in literal.variables else t + 1 for t in literal.terms)
    memo = (pattern, tuple(first[v] for v in variables), n_index_columns)
    if memo not in literal.relation.view_cache:
        literal.relation.view_cache[memo] = _make_view(
            literal, [first[v] for v in variables], n_index_columns, n_constants
        )
    return literal.relation.view_cache[memo]


def _make_view(literal: Literal, places: list[int], indexed: int, n_constants: int) -> IndexedView:
    columns, terms, bits = literal.relation.columns, literal.terms, n_constants.bit_length()
    same = [t if t not in literal.variables else columns[terms.index(t)] for t in terms]
    masks = [columns[j] == value for j, value in enumerate(same) if value is not columns[j]]
    table = Table(tuple(range(len(columns))), columns, columns[0].numel())
    for mask in [torch.stack(masks).all(0)] if masks else []:
        table = select_rows(table, mask)
    if tuple(places) != table.variables:
        table = distinct(Table((), tuple(table.columns[j] for j in places), table.size), bits)
    levels, key = row_index.encode_rows(table.columns[:indexed], [bits] * indexed) if indexed else ((), torch.empty(0))
    starts = None
    if indexed == 1 and n_constants <= _DENSE * table.size:
        starts = torch.searchsorted(key, torch.arange(n_constants + 2, device=key.device))
    return IndexedView(table.columns, table.size, levels, key, starts)
