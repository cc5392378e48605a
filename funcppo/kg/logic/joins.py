"""Conjunctive queries over relations: joins by sorted keys, in chunks of bounded size.

Literals are joined one at a time, the one with the fewest resulting rows first. A variable that nothing needs any more
is projected away at once and the remaining rows are made distinct, so a chain of binary literals never holds more than
pairs. A step with more than `MAX_CHUNK_ROWS` resulting rows is computed in chunks. A `RowBudget` bounds the work.

A counted query also counts, for each answer, the assignments of all its variables that satisfy the literals: the rows
of a table carry how many assignments of projected variables they stand for, which joins multiply and projections add.

Runs on the device of the relations, in a loop on the host: the sizes depend on the data. `iter_answers` is the entry
point.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from funcppo.core.deadline import NO_DEADLINE, Deadline
from funcppo.core.types import I64
from funcppo.kg.logic import row_index
from funcppo.kg.logic.relations import (
    UNIT_TABLE,
    IndexedView,
    Literal,
    Table,
    distinct,
    indexed_view,
    select_rows,
)

# rows of an intermediate result held at once, 8 bytes a row and column
MAX_CHUNK_ROWS = 1 << 20

# rows that a join costs beside those that it makes: what starting its kernels takes, in the time of a row
JOIN_OVERHEAD_ROWS = 5_000

# two tuples of terms that must differ in some position
Inequality = tuple[tuple[int, ...], tuple[int, ...]]


class RowBudgetExceeded(Exception):
    """Joins have made more rows than their budget allows, or taken more time."""


class TimeBudgetExceeded(RowBudgetExceeded):
    """Joins have taken more time than their budget allows."""


@dataclass(slots=True)
class RowBudget:
    """A bound on the rows that joins make, which does not depend on the speed of the machine, and one on their time.

    Attributes:
      max_rows: the rows allowed, those of intermediate results included.
      n_rows: the rows made so far.
      overhead: rows that a join counts beside those that it makes; 0 where rows stand for memory and not for time.
      n_joins: the joins made so far.
      deadline: when joins end, whatever they have made.
    """

    max_rows: int
    n_rows: int = 0
    overhead: int = JOIN_OVERHEAD_ROWS
    n_joins: int = 0
    deadline: Deadline = NO_DEADLINE

    def spend_join(self, n_rows: int) -> None:
        """Count a join and the rows that it makes.

        Raises:
          RowBudgetExceeded: all rows are more than allowed, or the time is over.
        """
        self.n_joins += 1
        self.spend(n_rows + self.overhead)

    def spend(self, n_rows: int) -> None:
        """Count rows.

        Raises:
          RowBudgetExceeded: they are more than allowed, or the time is over.
        """
        self.n_rows += n_rows
        if self.n_rows > self.max_rows:
            raise RowBudgetExceeded(
                f"more than {self.max_rows:,} rows of joins"
            )
        if self.deadline.is_over:
            raise TimeBudgetExceeded("more time than was left")


@dataclass(frozen=True, slots=True)
class JoinStep:
    """The literal to join next: for each row of a table, the rows of the literal's view that agree with it."""

    literal: Literal
    # the variables that it adds, the last columns of the view
    new_variables: tuple[int, ...]
    view: IndexedView
    # the first agreeing row of the view, for each row of the table
    start: Tensor
    count: Tensor  # the number of agreeing rows


@dataclass(frozen=True, slots=True)
class ConjunctiveQuery:
    """The output variables of the rows that satisfy all literals and all inequalities."""

    literals: tuple[Literal, ...]
    output_variables: tuple[int, ...]
    inequalities: tuple[Inequality, ...]
    n_constants: int  # terms above are variables
    budget: RowBudget | None = None  # None: no bound
    # count the assignments that give each answer
    is_counted: bool = False
    # the literal to start from; None for that of the smallest relation
    first: Literal | None = None

    @property
    def constant_bits(self) -> int:
        """How many bits hold a constant."""
        return self.n_constants.bit_length()

    def variables_in(self, *terms: Sequence[int]) -> set[int]:
        """The variables among the terms."""
        return {
            term for part in terms for term in part if term > self.n_constants
        }

    def needed_variables(
        self, literals: Iterable[Literal], inequalities: Iterable[Inequality]
    ) -> set[int]:
        """The variables that the output, these literals or these inequalities need."""
        needed = set(self.output_variables)
        for literal in literals:
            needed |= literal.variables
        for inequality in inequalities:
            needed |= self.variables_in(*inequality)
        return needed


class RowPairs(NamedTuple):
    """Pairs of a row and a position that belongs to it."""

    row: Tensor
    position: Tensor


def iter_answers(query: ConjunctiveQuery) -> Iterator[Table]:
    """Yield non-empty tables over the output variables whose union is the answer; a row may come more than once.

    Groups of literals that share no variable are solved apart and multiplied. The counts of a row that comes more than
    once are to be added, as `union` does.

    Raises:
      RowBudgetExceeded: the joins make more rows than the query's budget allows.
    """
    if any(left == right for left, right in query.inequalities):
        return
    groups = _connected_components(query)
    if len(groups) == 1:
        yield from _extend(_unit_table(query), query)
        return

    # A group without output variables is a condition: it needs one answer.
    crossing = _crossing_inequalities(query, groups)
    subqueries = [_subquery(query, group, crossing) for group in groups]
    unit = _unit_table(query)
    if not query.is_counted:
        for subquery in subqueries:
            if (
                not subquery.output_variables
                and next(_extend(unit, subquery), None) is None
            ):
                return
        subqueries = [
            subquery for subquery in subqueries if subquery.output_variables
        ]

    # All groups but the last are held whole; the last is streamed.
    answers = [list(_extend(unit, subquery)) for subquery in subqueries[:-1]]
    if not all(answers):
        return
    tables = [union(chunks, query.constant_bits) for chunks in answers]
    for chunk in _extend(unit, subqueries[-1]) if subqueries else [unit]:
        for product in _multiply(tables, chunk):
            if query.budget is not None:
                query.budget.spend(product.size)
            answer = project(
                _filter(product, crossing, query), query.output_variables, query
            )
            if answer.size:
                yield answer


def _unit_table(query: ConjunctiveQuery) -> Table:
    """The table without columns and with one row."""
    if not query.is_counted:
        return UNIT_TABLE
    column = query.literals[0].relation.columns[0]
    return replace(UNIT_TABLE, counts=column.new_ones(1))


def _crossing_inequalities(
    query: ConjunctiveQuery, groups: list[list[Literal]]
) -> list[Inequality]:
    """The inequalities between variables of different groups, which the product has to satisfy."""
    group_variables = [_variables_of(group) for group in groups]
    crossing: list[Inequality] = []
    for inequality in query.inequalities:
        variables = query.variables_in(*inequality)
        if not any(variables <= inside for inside in group_variables):
            crossing.append(inequality)
    return crossing


def union(tables: list[Table], bits: int) -> Table:
    """The distinct rows of tables over the same variables; a single table is returned as it is."""
    if len(tables) == 1:
        return tables[0]
    columns = tuple(
        torch.cat(parts) for parts in zip(*(table.columns for table in tables))
    )
    counts = [table.counts for table in tables if table.counts is not None]
    return distinct(
        Table(
            tables[0].variables,
            columns,
            sum(table.size for table in tables),
            torch.cat(counts) if counts else None,
        ),
        bits,
    )


def project(
    table: Table, variables: tuple[int, ...], query: ConjunctiveQuery
) -> Table:
    """The table over some of its variables, each row once."""
    if variables == table.variables:
        return table
    columns = tuple(table.columns[table.variables.index(v)] for v in variables)
    projected = Table(variables, columns, table.size, table.counts)
    # a permutation of columns keeps rows distinct
    if len(variables) == len(table.variables):
        return projected
    return distinct(projected, query.constant_bits)


def _connected_components(query: ConjunctiveQuery) -> list[list[Literal]]:
    """The literals grouped by shared variables."""
    groups: list[list[Literal]] = []
    for literal in query.literals:
        linked = [
            group
            for group in groups
            if _variables_of(group) & literal.variables
        ]
        merged = [other for group in linked for other in group]
        groups = [
            *(group for group in groups if group not in linked),
            [*merged, literal],
        ]
    return groups


def _variables_of(literals: Sequence[Literal]) -> set[int]:
    """The variables of some literals."""
    return {variable for literal in literals for variable in literal.variables}


def _subquery(
    query: ConjunctiveQuery, literals: list[Literal], crossing: list[Inequality]
) -> ConjunctiveQuery:
    """The query that one group of literals answers by itself."""
    variables = _variables_of(literals)
    output = query.needed_variables((), crossing) & variables
    inside: list[Inequality] = []
    for inequality in query.inequalities:
        if (
            inequality not in crossing
            and query.variables_in(*inequality) <= variables
        ):
            inside.append(inequality)
    return replace(
        query,
        literals=tuple(literals),
        output_variables=tuple(sorted(output)),
        inequalities=tuple(inside),
    )


def _multiply(tables: list[Table], chunk: Table) -> Iterator[Table]:
    """The cross product of a chunk with all tables, in chunks."""
    if not tables:
        yield chunk
        return
    other = tables[0]
    first = chunk.columns[0] if chunk.columns else chunk.counts
    assert first is not None  # a table without columns is counted

    start = torch.zeros_like(first)
    for row, position in ragged_arange(
        start, torch.full_like(start, other.size)
    ):
        left = tuple(column[row] for column in chunk.columns)
        right = tuple(column[position] for column in other.columns)
        product = Table(
            chunk.variables + other.variables,
            left + right,
            row.numel(),
            _multiply_counts(chunk.counts, row, other.counts, position),
        )
        yield from _multiply(tables[1:], product)


def _multiply_counts(
    left: Tensor | None, row: Tensor, right: Tensor | None, position: Tensor
) -> Tensor | None:
    """The counts of pairs of rows of two tables; None where they are not counted."""
    if left is None or right is None:
        return None
    return left.index_select(0, row) * right.index_select(0, position)


def _extend(table: Table, query: ConjunctiveQuery) -> Iterator[Table]:
    """Join a table with every literal of the query; yields non-empty tables over the output variables."""
    if not table.size:
        return
    if not query.literals:
        yield project(table, query.output_variables, query)
        return
    step = _choose_step(table, query)
    remaining = tuple(
        other for other in query.literals if other is not step.literal
    )

    # Check an inequality as soon as all its variables are bound.
    bound = step.literal.variables.union(table.variables)
    now = [u for u in query.inequalities if query.variables_in(*u) <= bound]
    later = tuple(u for u in query.inequalities if u not in now)

    # Keep only the variables that something still needs.
    needed = query.needed_variables(remaining, later)
    kept_variables = tuple(
        v for v in table.variables + step.new_variables if v in needed
    )
    rest = replace(query, literals=remaining, inequalities=later)

    # Merge chunks until they are large enough to be worth a recursion of their own.
    chunks: list[Table] = []
    for joined in _join(table, step):
        if query.budget is not None:
            query.budget.spend_join(joined.size)
        chunks.append(
            project(_filter(joined, now, query), kept_variables, query)
        )
        if sum(chunk.size for chunk in chunks) > MAX_CHUNK_ROWS:
            yield from _extend(union(chunks, query.constant_bits), rest)
            chunks = []
    if chunks:
        yield from _extend(union(chunks, query.constant_bits), rest)


def _choose_step(table: Table, query: ConjunctiveQuery) -> JoinStep:
    """The literal to join now: of those that share a variable, the one with the fewest resulting rows."""
    if not table.variables:
        first = query.first
        if first is None or first not in query.literals:
            first = min(
                query.literals, key=lambda literal: literal.relation.size
            )
        return _make_step(table, first, query)
    steps = [
        _make_step(table, literal, query)
        for literal in query.literals
        if literal.variables & set(table.variables)
    ]
    if len(steps) == 1:  # spares a device synchronisation
        return steps[0]
    return min(steps, key=lambda step: int(step.count.sum()))


def _make_step(
    table: Table, literal: Literal, query: ConjunctiveQuery
) -> JoinStep:
    """Find the rows of a literal's view that agree with each row of a table."""
    others = [other for other in query.literals if other is not literal]
    useful = literal.variables & query.needed_variables(
        others, query.inequalities
    )
    shared = tuple(v for v in table.variables if v in literal.variables)
    new = tuple(
        v
        for v in dict.fromkeys(literal.terms)
        if v in useful and v not in shared
    )
    view = indexed_view(
        literal, shared + new, len(shared), query.n_constants, query.is_counted
    )
    if not shared:
        return JoinStep(literal, new, view, view.keys, view.keys)

    columns = [table.columns[table.variables.index(v)] for v in shared]
    if view.row_offsets is not None:
        start = view.row_offsets.index_select(0, columns[0])
        stop = view.row_offsets.index_select(0, columns[0] + 1)
        return JoinStep(literal, new, view, start, stop - start)

    key, found = row_index.encode_with_prefixes(
        view.key_prefixes, columns, [query.constant_bits] * len(shared)
    )
    start = torch.searchsorted(view.keys, key)
    count = torch.searchsorted(view.keys, key, right=True) - start
    return JoinStep(literal, new, view, start, torch.where(found, count, 0))


def _join(table: Table, step: JoinStep) -> Iterator[Table]:
    """The join of a table with the view of a step, in chunks."""
    view = step.view
    if not table.variables:
        counts = view.counts
        if table.counts is not None and counts is not None:
            counts = counts * table.counts
        yield Table(step.new_variables, view.columns, view.size, counts)
        return

    if not step.new_variables and table.counts is None:
        yield select_rows(table, step.count > 0)
        return

    new_columns = view.columns[len(view.columns) - len(step.new_variables) :]
    for row, position in ragged_arange(step.start, step.count):
        left = tuple(column.index_select(0, row) for column in table.columns)
        right = tuple(
            column.index_select(0, position) for column in new_columns
        )
        yield Table(
            table.variables + step.new_variables,
            left + right,
            row.numel(),
            _multiply_counts(table.counts, row, view.counts, position),
        )


def expand_ranges(start: I64[Tensor, "n"], count: I64[Tensor, "n"]) -> RowPairs:
    """All pairs (row, start[row] + i) with i < count[row]."""
    row = torch.repeat_interleave(count)
    shift = start - torch.cumsum(count, 0) + count
    number = torch.arange(len(row), device=start.device)
    return RowPairs(row, number + shift.index_select(0, row))


def ragged_arange(start: Tensor, count: Tensor) -> Iterator[RowPairs]:
    """Yield all pairs (row, start[row] + i) with i < count[row], at most MAX_CHUNK_ROWS at a time."""
    end = torch.cumsum(count, 0)
    begin = end - count
    total = int(end[-1])
    shift = start - end + count  # from the number of a pair to its position
    for first in range(0, total, MAX_CHUNK_ROWS):
        last = min(first + MAX_CHUNK_ROWS, total)
        in_chunk = (
            count
            if total <= MAX_CHUNK_ROWS
            else end.clamp(first, last) - begin.clamp(first, last)
        )
        row = torch.repeat_interleave(in_chunk, output_size=last - first)
        number = torch.arange(first, last, device=start.device)
        yield RowPairs(row, number + shift.index_select(0, row))


def _filter(
    table: Table, inequalities: Sequence[Inequality], query: ConjunctiveQuery
) -> Table:
    """The rows that differ in some position of each pair; rows stay distinct."""
    for left, right in inequalities:
        column = dict(zip(table.variables, table.columns))
        differs = [
            column.get(a, a) != column.get(b, b)
            for a, b in zip(left, right)
            if a != b
        ]
        # Two different constants satisfy the inequality.
        if any(is_different is True for is_different in differs):
            continue
        table = select_rows(
            table,
            torch.stack([torch.as_tensor(mask) for mask in differs]).any(0),
        )
    return table
