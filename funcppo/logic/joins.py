"""Conjunctive queries over relations: joins by sorted keys, in pieces of bounded size.

Literals are joined one at a time, the one with the fewest resulting rows first. A variable that nothing needs any more
is projected away at once and the rows left are made distinct, so a chain of binary literals never holds more than
pairs. A step with more than `PIECE` resulting rows is taken in pieces.

Runs on the device of the relations, in a loop on the host: the sizes depend on the data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from funcppo.logic import row_index
from funcppo.logic.relations import UNIT_TABLE, IndexedView, Literal, Table, distinct, indexed_view, select_rows

MAX_CHUNK_ROWS = 1 << 20  # rows of an intermediate result held at once, 8 bytes a row and column

Inequality = tuple[tuple[int, ...], tuple[int, ...]]  # two tuples of terms that must differ in some place


@dataclass(frozen=True, slots=True)
class JoinStep:
    """A literal to join next: for each row of a table, the rows of the literal's view that agree with it."""

    literal: Literal
    new_variables: tuple[int, ...]  # the variables that it adds, the last columns of the view
    view: IndexedView
    start: Tensor
    count: Tensor


@dataclass(frozen=True, slots=True)
class ConjunctiveQuery:
    """The `wanted` variables of the rows that satisfy all literals and differ somewhere in each `unequal` pair."""

    literals: tuple[Literal, ...]
    output_variables: tuple[int, ...]
    inequalities: tuple[Inequality, ...]
    n_constants: int  # terms above are variables

    @property
    def constant_bits(self) -> int:
        """How many bits hold a constant."""
        return self.n_constants.bit_length()

    def variables_in(self, *terms: Sequence[int]) -> set[int]:
        """The variables among the terms."""
        return {t for part in terms for t in part if t > self.n_constants}

    def needed_variables(self, literals: Sequence[Literal], unequal: Sequence[Inequality]) -> set[int]:
        """The variables wanted in the end, or by these literals and inequalities."""
        return set(self.output_variables).union(
            *(x.variables for x in literals), *(self.variables_in(*u) for u in unequal)
        )


def iter_answers(query: ConjunctiveQuery) -> Iterator[Table]:
    """Non-empty tables over `query.wanted` whose union is the answer; a row may come more than once.

    Groups of literals that share no variable are solved apart and multiplied.
    """
    if any(left == right for left, right in query.inequalities):
        return
    groups = _components(query)
    if len(groups) == 1:
        yield from _extend(UNIT_TABLE, query)
        return
    crossing = [u for u in query.inequalities if not any(query.variables_in(*u) <= _names(group) for group in groups)]
    parts = [_part(query, group, crossing) for group in groups]
    if any(next(_extend(UNIT_TABLE, part), None) is None for part in parts if not part.output_variables):
        return
    parts = [part for part in parts if part.output_variables]
    held = [list(_extend(UNIT_TABLE, part)) for part in parts[:-1]]
    if not all(held):
        return
    tables = [union(pieces, query.constant_bits) for pieces in held]
    for piece in _extend(UNIT_TABLE, parts[-1]) if parts else [UNIT_TABLE]:
        for product in _multiply(tables, piece):
            found = project(_filter(product, crossing, query), query.output_variables, query)
            if found.size:
                yield found


def union(tables: list[Table], bits: int) -> Table:
    """The distinct rows of some tables over the same variables; of one table, as they are."""
    if len(tables) == 1:
        return tables[0]
    columns = tuple(torch.cat(parts) for parts in zip(*(table.columns for table in tables)))
    return distinct(Table(tables[0].variables, columns, sum(table.size for table in tables)), bits)


def project(table: Table, names: tuple[int, ...], query: ConjunctiveQuery) -> Table:
    """The table over some of its variables, each row once."""
    if names == table.variables:
        return table
    columns = tuple(table.columns[table.variables.index(v)] for v in names)
    found = Table(names, columns, table.size)
    return found if len(names) == len(table.variables) else distinct(found, query.constant_bits)


def _components(query: ConjunctiveQuery) -> list[list[Literal]]:
    """The literals grouped by shared variables."""
    parts: list[list[Literal]] = []
    for literal in query.literals:
        linked = [part for part in parts if _names(part) & literal.variables]
        joined = [other for part in linked for other in part]
        parts = [*(part for part in parts if part not in linked), [*joined, literal]]
    return parts


def _names(literals: Sequence[Literal]) -> set[int]:
    return set().union(*(literal.variables for literal in literals))


def _part(query: ConjunctiveQuery, literals: list[Literal], crossing: list[Inequality]) -> ConjunctiveQuery:
    """The query that one group of literals answers by itself."""
    names = _names(literals)
    keep = query.needed_variables((), crossing) & names
    inside = tuple(u for u in query.inequalities if u not in crossing and query.variables_in(*u) <= names)
    return ConjunctiveQuery(tuple(literals), tuple(sorted(keep)), inside, query.n_constants)


def _multiply(tables: list[Table], piece: Table) -> Iterator[Table]:
    """The cross product, in pieces."""
    if not tables:
        yield piece
        return
    other = tables[0]
    low = torch.zeros_like(piece.columns[0])
    for row, at in ragged_arange(low, torch.full_like(low, other.size)):
        columns = tuple(c[row] for c in piece.columns) + tuple(c[at] for c in other.columns)
        yield from _multiply(tables[1:], Table(piece.variables + other.variables, columns, row.numel()))


def _extend(table: Table, query: ConjunctiveQuery) -> Iterator[Table]:
    """The non-empty tables over `query.wanted` that join `table` with every literal of the query."""
    if not table.size:
        return
    if not query.literals:
        yield project(table, query.output_variables, query)
        return
    match = _next(table, query)
    rest = tuple(other for other in query.literals if other is not match.literal)
    bound = match.literal.variables.union(table.variables)
    now = [u for u in query.inequalities if query.variables_in(*u) <= bound]
    later = tuple(u for u in query.inequalities if u not in now)
    needed = query.needed_variables(rest, later)
    keep = tuple(v for v in table.variables + match.new_variables if v in needed)
    tail = replace(query, literals=rest, inequalities=later)
    held: list[Table] = []
    for piece in _join(table, match):
        held.append(project(_filter(piece, now, query), keep, query))
        if sum(t.size for t in held) > MAX_CHUNK_ROWS:
            yield from _extend(union(held, query.constant_bits), tail)
            held = []
    if held:
        yield from _extend(union(held, query.constant_bits), tail)


def _next(table: Table, query: ConjunctiveQuery) -> JoinStep:
    """The literal to join now: of those that share a variable, the one with the fewest resulting rows."""
    if not table.variables:
        return _match(table, min(query.literals, key=lambda literal: literal.relation.size), query)
    matches = [_match(table, literal, query) for literal in query.literals if literal.variables & set(table.variables)]
    return matches[0] if len(matches) == 1 else min(matches, key=lambda match: int(match.count.sum()))


def _match(table: Table, literal: Literal, query: ConjunctiveQuery) -> JoinStep:
    needed = query.needed_variables([other for other in query.literals if other is not literal], query.inequalities)
    shared = tuple(v for v in table.variables if v in literal.variables)
    new = tuple(v for v in dict.fromkeys(literal.terms) if v in literal.variables & needed and v not in shared)
    seen = indexed_view(literal, shared + new, len(shared), query.n_constants)
    if not shared:
        return JoinStep(literal, new, seen, seen.keys, seen.keys)
    columns = [table.columns[table.variables.index(v)] for v in shared]
    if seen.row_offsets is not None:
        low = seen.row_offsets.index_select(0, columns[0])
        return JoinStep(literal, new, seen, low, seen.row_offsets.index_select(0, columns[0] + 1) - low)
    key, found = row_index.encode_with_prefixes(seen.key_prefixes, columns, [query.constant_bits] * len(shared))
    low = torch.searchsorted(seen.keys, key)
    return JoinStep(
        literal, new, seen, low, torch.where(found, torch.searchsorted(seen.keys, key, right=True) - low, 0)
    )


def _join(table: Table, match: JoinStep) -> Iterator[Table]:
    """The join of a table with the view of a match, in pieces."""
    if not table.variables:
        yield Table(match.new_variables, match.view.columns, match.view.size)
    elif not match.new_variables:
        yield select_rows(table, match.count > 0)
    else:
        added = match.view.columns[-len(match.new_variables) :]
        for row, at in ragged_arange(match.start, match.count):
            columns = (*(c.index_select(0, row) for c in table.columns), *(c.index_select(0, at) for c in added))
            yield Table(table.variables + match.new_variables, columns, row.numel())


def ragged_arange(low: Tensor, count: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs (row, low[row] + i) for every row and every i < count[row], at most PIECE at a time."""
    end = torch.cumsum(count, 0)
    total, shift = int(end[-1]), low - end + count
    for start in range(0, total, MAX_CHUNK_ROWS):
        stop = min(start + MAX_CHUNK_ROWS, total)
        taken = count if total <= MAX_CHUNK_ROWS else end.clamp(start, stop) - (end - count).clamp(start, stop)
        row = torch.repeat_interleave(taken, output_size=stop - start)
        yield row, torch.arange(start, stop, device=low.device) + shift.index_select(0, row)


def _filter(table: Table, unequal: Sequence[Inequality], query: ConjunctiveQuery) -> Table:
    """The rows that differ in some place of each pair; rows stay distinct."""
    for left, right in unequal:
        column = dict(zip(table.variables, table.columns))
        places = [column.get(a, a) != column.get(b, b) for a, b in zip(left, right) if a != b]
        if not any(place is True for place in places):
            table = select_rows(table, torch.stack([torch.as_tensor(place) for place in places]).any(0))
    return table
