"""Conjunctive queries over relations: joins by sorted keys, in pieces of bounded size.

Literals are joined one at a time, the one with the fewest resulting rows first. A variable that nothing needs any more
is projected away at once and the rows left are made distinct, so a chain of binary literals never holds more than
pairs. A step with more than `PIECE` resulting rows is taken in pieces.

Runs on the device of the relations, in a loop on the host: the sizes depend on the data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from funcppo.logic import keys

PIECE = 1 << 22  # rows of an intermediate result held at once, 8 bytes a row and column

Columns = tuple[Tensor, ...]
Unequal = tuple[tuple[int, ...], tuple[int, ...]]  # two tuples of terms that must differ in some place


@dataclass(frozen=True, slots=True)
class Table:
    """Distinct rows, stored by column; `names` are variables. Without columns it has 0 or 1 rows."""

    names: tuple[int, ...]
    columns: Columns
    size: int


UNIT = Table((), (), 1)


@dataclass(frozen=True, slots=True)
class View:
    """Rows in lexicographic order, and the index over their first columns."""

    columns: Columns
    size: int
    levels: tuple[Tensor, ...]
    keys: Tensor


@dataclass(frozen=True, slots=True)
class Relation:
    """Distinct rows of int64 columns in lexicographic order; a view is computed once and kept."""

    columns: Columns
    size: int
    views: dict[tuple, View] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Literal:
    """A relation, and the term at each of its arguments."""

    relation: Relation
    terms: tuple[int, ...]
    variables: frozenset[int]


@dataclass(frozen=True, slots=True)
class Query:
    """The `wanted` variables of the rows that satisfy all literals and differ somewhere in each `unequal` pair."""

    literals: tuple[Literal, ...]
    wanted: tuple[int, ...]
    unequal: tuple[Unequal, ...]
    n_constants: int  # terms above are variables

    @property
    def bits(self) -> int:
        """How many bits hold a constant."""
        return self.n_constants.bit_length()

    def variables(self, *terms: Sequence[int]) -> set[int]:
        """The variables among the terms."""
        return {t for part in terms for t in part if t > self.n_constants}

    def needed(self, literals: Sequence[Literal], unequal: Sequence[Unequal]) -> set[int]:
        """The variables wanted in the end, or by these literals and inequalities."""
        return set(self.wanted).union(*(x.variables for x in literals), *(self.variables(*u) for u in unequal))


def solve(query: Query) -> Iterator[Table]:
    """Non-empty tables over `query.wanted` whose union is the answer; a row may come more than once.

    Groups of literals that share no variable are solved apart and multiplied.
    """
    if any(left == right for left, right in query.unequal):
        return
    groups = _components(query)
    if len(groups) == 1:
        yield from _extend(UNIT, query)
        return
    crossing = [u for u in query.unequal if not any(query.variables(*u) <= _names(group) for group in groups)]
    parts = [_part(query, group, crossing) for group in groups]
    if any(next(_extend(UNIT, part), None) is None for part in parts if not part.wanted):
        return
    parts = [part for part in parts if part.wanted]
    held = [list(_extend(UNIT, part)) for part in parts[:-1]]
    if not all(held):
        return
    tables = [union(pieces, part) for pieces, part in zip(held, parts)]
    for piece in _extend(UNIT, parts[-1]) if parts else [UNIT]:
        for product in _multiply(tables, piece):
            found = project(_filter(product, crossing, query), query.wanted, query)
            if found.size:
                yield found


def member(columns: Columns, relation: Relation, n_constants: int) -> Tensor:
    """Which rows a relation holds."""
    query = Query((), (), (), n_constants)
    names = tuple(range(n_constants + 1, n_constants + 1 + len(columns)))
    seen = _view(Literal(relation, names, frozenset(names)), names, len(names), query)
    key, found = keys.walk(seen.levels, columns, [query.bits] * len(columns))
    return found & keys.find(seen.keys, key)[1]


def union(tables: list[Table], query: Query) -> Table:
    """The distinct rows of some tables over `query.wanted`."""
    if len(tables) == 1:
        return tables[0]
    columns = tuple(torch.cat(parts) for parts in zip(*(table.columns for table in tables)))
    return _distinct(Table(tables[0].names, columns, sum(table.size for table in tables)), query.bits)


def project(table: Table, names: tuple[int, ...], query: Query) -> Table:
    """The table over some of its variables, each row once."""
    if names == table.names:
        return table
    columns = tuple(table.columns[table.names.index(v)] for v in names)
    found = Table(names, columns, table.size)
    return found if len(names) == len(table.names) else _distinct(found, query.bits)


def _distinct(table: Table, bits: int) -> Table:
    if not table.columns:
        return Table((), (), min(table.size, 1))
    columns = keys.distinct(table.columns, [bits] * len(table.columns))
    return Table(table.names, columns, columns[0].numel())


def _components(query: Query) -> list[list[Literal]]:
    """The literals grouped by shared variables."""
    parts: list[list[Literal]] = []
    for literal in query.literals:
        linked = [part for part in parts if _names(part) & literal.variables]
        joined = [other for part in linked for other in part]
        parts = [*(part for part in parts if part not in linked), [*joined, literal]]
    return parts


def _names(literals: Sequence[Literal]) -> set[int]:
    return set().union(*(literal.variables for literal in literals))


def _part(query: Query, literals: list[Literal], crossing: list[Unequal]) -> Query:
    """The query that one group of literals answers by itself."""
    names = _names(literals)
    keep = query.needed((), crossing) & names
    inside = tuple(u for u in query.unequal if u not in crossing and query.variables(*u) <= names)
    return Query(tuple(literals), tuple(sorted(keep)), inside, query.n_constants)


def _multiply(tables: list[Table], piece: Table) -> Iterator[Table]:
    """The cross product, in pieces."""
    if not tables:
        yield piece
        return
    other = tables[0]
    low = torch.zeros_like(piece.columns[0])
    for row, at in _positions(low, torch.full_like(low, other.size)):
        columns = tuple(c[row] for c in piece.columns) + tuple(c[at] for c in other.columns)
        yield from _multiply(tables[1:], Table(piece.names + other.names, columns, row.numel()))


def _extend(table: Table, query: Query) -> Iterator[Table]:
    """The non-empty tables over `query.wanted` that join `table` with every literal of the query."""
    if not table.size:
        return
    if not query.literals:
        yield project(table, query.wanted, query)
        return
    literal = _next(table, query)
    rest = tuple(other for other in query.literals if other is not literal)
    bound = literal.variables.union(table.names)
    now = [u for u in query.unequal if query.variables(*u) <= bound]
    later = tuple(u for u in query.unequal if u not in now)
    needed = query.needed(rest, later)
    new = _new(table, literal, needed | query.needed((), now))
    keep = tuple(v for v in table.names + new if v in needed)
    tail = replace(query, literals=rest, unequal=later)
    held: list[Table] = []
    for piece in _join(table, literal, new, query):
        held.append(project(_filter(piece, now, query), keep, query))
        if sum(t.size for t in held) > PIECE:
            yield from _extend(union(held, replace(query, wanted=keep)), tail)
            held = []
    if held:
        yield from _extend(union(held, replace(query, wanted=keep)), tail)


def _new(table: Table, literal: Literal, needed: set[int]) -> tuple[int, ...]:
    """The needed variables that the literal adds to the table."""
    return tuple(v for v in dict.fromkeys(literal.terms) if v in literal.variables and v in needed - set(table.names))


def _next(table: Table, query: Query) -> Literal:
    """The literal to join now: of those that share a variable, the one with the fewest resulting rows."""
    if not table.names:
        return min(query.literals, key=lambda literal: literal.relation.size)
    linked = [literal for literal in query.literals if literal.variables & set(table.names)]
    if len(linked) == 1:
        return linked[0]
    sizes = []
    for literal in linked:
        others = [other for other in query.literals if other is not literal]
        new = _new(table, literal, query.needed(others, query.unequal))
        low, high, _ = _ranges(table, literal, new, query)
        sizes.append(int((high - low).sum()))
    return linked[sizes.index(min(sizes))]


def _join(table: Table, literal: Literal, new: tuple[int, ...], query: Query) -> Iterator[Table]:
    """The join of a table with the projection of a literal on its shared and its new variables, in pieces."""
    if not table.names:
        seen = _view(literal, new, 0, query)
        yield Table(new, seen.columns, seen.size)
        return
    low, high, seen = _ranges(table, literal, new, query)
    if not new:
        kept = high > low
        columns = tuple(column[kept] for column in table.columns)
        yield Table(table.names, columns, columns[0].numel())
        return
    for row, at in _positions(low, high - low):
        columns = tuple(c[row] for c in table.columns) + tuple(c[at] for c in seen.columns[-len(new) :])
        yield Table(table.names + new, columns, row.numel())


def _ranges(table: Table, literal: Literal, new: tuple[int, ...], query: Query) -> tuple[Tensor, Tensor, View]:
    """For each row of the table, the first row of the literal's view that agrees with it and the one after the last."""
    shared = tuple(v for v in table.names if v in literal.variables)
    seen = _view(literal, shared + new, len(shared), query)
    columns = [table.columns[table.names.index(v)] for v in shared]
    key, found = keys.walk(seen.levels, columns, [query.bits] * len(shared))
    low = torch.searchsorted(seen.keys, key)
    high = torch.searchsorted(seen.keys, key, right=True)
    return low, torch.where(found, high, low), seen


def _positions(low: Tensor, count: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs (row, low[row] + i) for every row and every i < count[row], at most PIECE at a time."""
    end = torch.cumsum(count, 0)
    total = int(end[-1])
    for start in range(0, total, PIECE):
        stop = min(start + PIECE, total)
        taken = end.clamp(start, stop) - (end - count).clamp(start, stop)
        row = torch.repeat_interleave(taken, output_size=stop - start)
        at = torch.arange(start, stop, device=low.device)
        yield row, at + (low - end + count)[row]


def _filter(table: Table, unequal: Sequence[Unequal], query: Query) -> Table:
    """The rows that differ in some place of each pair; rows stay distinct."""
    column = dict(zip(table.names, table.columns))
    for left, right in unequal:
        places = [column.get(a, a) != column.get(b, b) for a, b in zip(left, right) if a != b]
        if not any(place is True for place in places):
            kept = torch.stack([torch.as_tensor(place) for place in places]).any(0)
            column = {name: values[kept] for name, values in column.items()}
    size = next(iter(column.values())).numel() if column else table.size
    return Table(table.names, tuple(column.values()), size)


def _view(literal: Literal, names: tuple[int, ...], indexed: int, query: Query) -> View:
    """The literal's rows over `names`, found once a relation, pattern of terms and order of columns."""
    first = {t: literal.terms.index(t) for t in literal.terms}
    pattern = tuple(-first[t] if t in literal.variables else t + 1 for t in literal.terms)
    memo = (pattern, tuple(first[v] for v in names), indexed)
    if memo not in literal.relation.views:
        literal.relation.views[memo] = _make_view(literal, [first[v] for v in names], indexed, query)
    return literal.relation.views[memo]


def _make_view(literal: Literal, places: list[int], indexed: int, query: Query) -> View:
    columns, terms = literal.relation.columns, literal.terms
    same = [t if t not in literal.variables else columns[terms.index(t)] for t in terms]
    masks = [columns[j] == value for j, value in enumerate(same) if value is not columns[j]]
    if masks:
        kept = torch.stack(masks).all(0)
        columns = tuple(column[kept] for column in columns)
    table = Table((), tuple(columns[j] for j in places), columns[0].numel())
    if places != list(range(len(columns))):
        table = _distinct(table, query.bits)
    levels, key = keys.pack(table.columns[:indexed], [query.bits] * indexed) if indexed else ((), torch.empty(0))
    return View(table.columns, table.size, levels, key)
