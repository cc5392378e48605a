"""Relations and the literals that read them: rows stored by column, sorted and indexed once for each way to join.

A `Relation` holds the argument tuples of one predicate. A `Literal` reads it at some terms, as `p(X, c, X)` does; its
`indexed_view` selects and sorts the matching rows over the variables in the order that a join needs.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from funcppo.core.types import I64
from funcppo.kg.logic import row_index, sorting
from funcppo.kg.logic.row_index import Lookup

# a view with at least one row for so many ids is indexed by id, without a search
_MAX_IDS_PER_ROW = 16

Columns = tuple[Tensor, ...]
# pattern of terms, order of columns, indexed columns, bits of a term, whether rows are counted
ViewKey = tuple[tuple[int, ...], tuple[int, ...], int, int, bool]


@dataclass(frozen=True, slots=True)
class Table:
    """Distinct rows over variables, stored by column. Without columns it has 0 or 1 rows.

    Attributes:
      counts: how many assignments of the variables that were projected away each row stands for; None where they are
        not counted.
    """

    variables: tuple[int, ...]
    columns: Columns
    size: int
    counts: Tensor | None = None


UNIT_TABLE = Table((), (), 1)


class RowGroups(NamedTuple):
    """The rows of a table by what is in them; groups are in lexicographic order."""

    first: I64[Tensor, "g"]  # a row of each group
    order: I64[Tensor, "n"]  # all rows, group by group
    group: I64[Tensor, "n"]  # of each of these


@dataclass(frozen=True, slots=True)
class IndexedView:
    """Rows in lexicographic order, and the index over their first columns."""

    columns: Columns
    size: int
    key_prefixes: tuple[Tensor, ...]
    keys: Tensor
    # where the rows of each value of the first column start, if that is the whole index
    row_offsets: Tensor | None
    # how many rows of the relation each row stands for, as in `Table`
    counts: Tensor | None


@dataclass(frozen=True, slots=True)
class Relation:
    """Distinct rows of int64 columns in lexicographic order; each view is computed once."""

    columns: Columns
    size: int
    view_cache: dict[ViewKey, IndexedView] = field(
        default_factory=dict[ViewKey, IndexedView]
    )


@dataclass(frozen=True, slots=True, eq=False)
class Literal:
    """A relation, and the term at each of its arguments."""

    relation: Relation
    terms: tuple[int, ...]
    variables: frozenset[int]


def make_literal(
    relation: Relation, terms: tuple[int, ...], n_constants: int
) -> Literal:
    """The literal of a relation at some terms; those above `n_constants` are variables."""
    return Literal(
        relation, terms, frozenset(t for t in terms if t > n_constants)
    )


def find_rows(columns: Columns, relation: Relation, n_constants: int) -> Lookup:
    """The position of each row in a relation, and whether it is there."""
    # View the relation over distinct variables, indexed by all columns.
    variables = tuple(range(n_constants + 1, n_constants + 1 + len(columns)))
    view = indexed_view(
        make_literal(relation, variables, n_constants),
        variables,
        len(variables),
        n_constants,
    )

    bits = [n_constants.bit_length()] * len(columns)
    key, has_key = row_index.encode_with_prefixes(
        view.key_prefixes, columns, bits
    )
    position, found = row_index.binary_search(view.keys, key)
    return Lookup(position, has_key & found)


def select_rows(table: Table, mask: Tensor) -> Table:
    """The rows of a table where the mask is true."""
    row = mask.nonzero().squeeze(1)
    columns = tuple(column.index_select(0, row) for column in table.columns)
    counts = None
    if table.counts is not None:
        counts = table.counts.index_select(0, row)
    return Table(table.variables, columns, row.numel(), counts)


def distinct(table: Table, bits: int) -> Table:
    """The table with each row once, in lexicographic order; the counts of equal rows are added.

    Args:
      bits: how many bits hold any value.
    """
    if table.counts is not None:
        return _add_counts(table, table.counts, bits)
    if not table.columns:
        return Table((), (), min(table.size, 1))
    columns = row_index.unique_rows(table.columns, [bits] * len(table.columns))
    return Table(table.variables, columns, columns[0].numel())


def _add_counts(table: Table, counts: Tensor, bits: int) -> Table:
    """The distinct rows of a table, in lexicographic order, each with the sum of its counts."""
    if not table.columns:
        size = min(table.size, 1)
        return Table((), (), size, counts.sum(0, keepdim=True)[:size])
    groups = group_rows(table.columns, bits)
    return Table(
        table.variables,
        tuple(column.index_select(0, groups.first) for column in table.columns),
        groups.first.numel(),
        sum_by_group(groups, counts),
    )


def group_rows(columns: Columns, bits: int) -> RowGroups:
    """Group equal rows.

    Args:
      columns: at least one.
      bits: how many bits hold any value.
    """
    _, key = row_index.encode_rows(columns, [bits] * len(columns))
    key, order = sorting.sort_keys(key)
    is_first = sorting.first_of_run(key)
    return RowGroups(order[is_first], order, is_first.cumsum(0) - 1)


def sum_by_group(
    groups: RowGroups, values: I64[Tensor, "n"]
) -> I64[Tensor, "g"]:
    """The sum of a value over the rows of each group."""
    totals = torch.zeros_like(values[: groups.first.numel()])
    return totals.index_add(
        0, groups.group, values.index_select(0, groups.order)
    )


def indexed_view(
    literal: Literal,
    variables: tuple[int, ...],
    n_index_columns: int,
    n_constants: int,
    is_counted: bool = False,
) -> IndexedView:
    """The literal's rows over some of its variables, sorted and indexed.

    Views are cached in the relation by the pattern of terms, the order of columns, the number of indexed columns and
    the bits of a term.

    Args:
      variables: the columns of the view, in order.
      n_index_columns: how many of the first columns the index covers.
      is_counted: count the rows of the relation that each row of the view stands for.
    """
    first = {t: literal.terms.index(t) for t in literal.terms}
    positions = tuple(first[v] for v in variables)

    # A variable stands for the position of its first occurrence, a constant for itself plus 1.
    pattern = tuple(
        -first[t] if t in literal.variables else t + 1 for t in literal.terms
    )
    cache = literal.relation.view_cache
    bits = n_constants.bit_length()
    cache_key = (pattern, positions, n_index_columns, bits, is_counted)
    if cache_key not in cache:
        cache[cache_key] = _make_view(
            literal, positions, n_index_columns, n_constants, is_counted
        )
    return cache[cache_key]


def _make_view(
    literal: Literal,
    positions: tuple[int, ...],
    n_index_columns: int,
    n_constants: int,
    is_counted: bool,
) -> IndexedView:
    """Select the rows that match the literal's terms, order them by the given columns, and index them."""
    columns = literal.relation.columns
    bits = n_constants.bit_length()

    # A constant must equal its column, and a repeated variable the column of its first occurrence.
    masks: list[Tensor] = []
    for j, term in enumerate(literal.terms):
        if term not in literal.variables:
            masks.append(columns[j] == term)
        elif literal.terms.index(term) != j:
            masks.append(columns[j] == columns[literal.terms.index(term)])
    table = Table(tuple(range(len(columns))), columns, columns[0].numel())
    if masks:
        table = select_rows(table, torch.stack(masks).all(0))

    # Rows are in order already, unless columns are dropped or exchanged.
    if is_counted:
        ones = torch.ones_like(columns[0][: table.size])
        table = replace(table, counts=ones)
    if positions != table.variables:
        selected = tuple(table.columns[j] for j in positions)
        table = distinct(Table((), selected, table.size, table.counts), bits)

    prefixes: tuple[Tensor, ...] = ()
    key = torch.empty(0)
    if n_index_columns:
        prefixes, key = row_index.encode_rows(
            table.columns[:n_index_columns], [bits] * n_index_columns
        )
    row_offsets = None
    if n_index_columns == 1 and n_constants <= _MAX_IDS_PER_ROW * table.size:
        row_offsets = torch.searchsorted(
            key, torch.arange(n_constants + 2, device=key.device)
        )
    return IndexedView(
        table.columns, table.size, prefixes, key, row_offsets, table.counts
    )
