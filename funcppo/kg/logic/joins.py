"""Conjunctive queries over relations: joins by sorted keys, in chunks of bounded size.

A `Relation` holds the argument tuples of one predicate. A `Literal` reads it at some terms, as `p(X, c, X)` does; its
`indexed_view` selects and sorts the matching rows over the variables in the order that a join needs.

Literals are joined one at a time, the one with the fewest resulting rows first. A variable that nothing needs any more
is projected away at once and the remaining rows are made distinct, so a chain of binary literals never holds more than
pairs. A step with more than `MAX_CHUNK_ROWS` resulting rows is computed in chunks. A `RowBudget` bounds the work.

A counted query also counts, for each answer, the assignments of all its variables that satisfy the literals: the rows
of a table carry how many assignments of projected variables they stand for, which joins multiply and projections add.
Where rows of relations have values, it finds the largest product of values instead.

Runs on the device of the relations, in a loop on the host: the sizes depend on the data. `iter_answers` is the entry
point.
"""

from __future__ import annotations

import sys
from collections.abc import (
    Collection,
    Iterable,
    Iterator,
    Sequence,
)
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from itertools import combinations

import torch
from torch import Tensor

from funcppo.core.host import NO_DEADLINE, Deadline
from funcppo.core.types import F64, I32, I64
from funcppo.kg.graph.dataset import OPERATORS
from funcppo.kg.logic import row_index
from funcppo.kg.logic.kb import KnowledgeBase
from funcppo.kg.logic.row_index import (
    Lookup,
    RowPairs,
    count_to,
    int_list,
    rule_tuples,
    runs,
    true_rows,
)

# a view with at least one row for so many ids is indexed by id, without a search
_MAX_IDS_PER_ROW = 16

Columns = tuple[Tensor, ...]
# pattern of terms, order of columns, indexed columns, bits of a term, whether rows are counted
ViewKey = tuple[tuple[int, ...], tuple[int, ...], int, int, bool]


@dataclass(frozen=True, slots=True)
class Table:
    """Distinct rows over variables, stored by column; without columns it has 0 or 1 rows.

    Attributes:
      counts: how many assignments of the variables that were projected away each row stands for; None where they are
        not counted.
    """

    variables: tuple[int, ...]
    columns: Columns
    size: int
    counts: Tensor | None = None


UNIT_TABLE = Table((), (), 1)


@dataclass(frozen=True, slots=True)
class IndexedView:
    """Rows of a relation in lexicographic order, with an index over their first columns."""

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
    """Argument tuples of one predicate: distinct rows of int64 columns in lexicographic order, with cached views."""

    columns: Columns  # at least one
    # of the rows, not negative: a counted query finds their largest product; None: it counts
    values: F64[Tensor, "n"] | None = None
    view_cache: dict[ViewKey, IndexedView] = field(
        default_factory=dict[ViewKey, IndexedView]
    )

    @property
    def size(self) -> int:
        """Return the number of rows."""
        return len(self.columns[0])


@dataclass(frozen=True, slots=True, eq=False)
class Literal:
    """Relation applied to terms, one per argument, as `p(X, c, X)` does."""

    relation: Relation
    terms: tuple[int, ...]
    variables: frozenset[int]


def make_literal(
    relation: Relation, terms: tuple[int, ...], n_constants: int
) -> Literal:
    """Return the literal of a relation at some terms; those above `n_constants` are variables."""
    return Literal(
        relation, terms, frozenset(t for t in terms if t > n_constants)
    )


def find_rows(
    columns: Columns,
    relation: Relation,
    n_constants: int,
) -> Lookup:
    """Return the position of each row in a relation, and whether the relation holds the row."""
    # View the relation over distinct variables, indexed by these columns.
    first = n_constants + 1
    terms = tuple(range(first, first + len(relation.columns)))
    view = indexed_view(
        make_literal(relation, terms, n_constants),
        terms,
        len(terms),
        n_constants,
    )

    bits = [n_constants.bit_length()] * len(columns)
    key, has_key = row_index.encode_with_prefixes(
        view.key_prefixes, columns, bits
    )
    position, found = row_index.binary_search(view.keys, key)
    return Lookup(position, has_key & found)


def select_rows(table: Table, mask: Tensor) -> Table:
    """Return the rows of a table where the mask is true."""
    row = true_rows(mask)
    columns = tuple(column.index_select(0, row) for column in table.columns)
    counts = None
    if table.counts is not None:
        counts = table.counts.index_select(0, row)
    return Table(table.variables, columns, row.numel(), counts)


def distinct(table: Table, bits: int) -> Table:
    """Return the table with each row once, in lexicographic order; counts of equal rows are added.

    Args:
      bits: how many bits hold any value.
    """
    variables, columns, counts = table.variables, table.columns, table.counts

    if not columns:
        size = min(table.size, 1)
        if counts is not None and size:
            group = torch.zeros_like(counts, dtype=torch.int64)
            counts = _sum_groups(counts, group, 1)
        return Table((), (), size, counts)
    if counts is None:
        columns = row_index.unique_columns(columns, [bits] * len(columns))
        return Table(variables, columns, columns[0].numel())
    columns, (counts,) = sum_equal_rows(columns, bits, counts)
    return Table(variables, columns, columns[0].numel(), counts)


def sum_equal_rows(
    columns: Columns, bits: int, *values: I64[Tensor, "n"]
) -> tuple[Columns, list[I64[Tensor, "g"]]]:
    """Return the distinct rows of a table, in lexicographic order, and the sum of each value over equal rows.

    Of values that are no integers it is the largest.

    Args:
      columns: at least one.
      bits: how many bits hold any value of a column.
    """
    _, key = row_index.encode_rows(columns, [bits] * len(columns))
    key, order = row_index.sort_keys(key)
    is_first = row_index.first_of_run(key)
    first = order[is_first]
    group = is_first.cumsum(0) - 1
    totals = [
        _sum_groups(value.index_select(0, order), group, first.numel())
        for value in values
    ]
    return tuple(column.index_select(0, first) for column in columns), totals


def _sum_groups(value: Tensor, group: Tensor, n_groups: int) -> Tensor:
    """Return the sum of the values of each group; of values that are no integers the largest."""
    zeros = value.new_zeros(n_groups)
    if value.is_floating_point():
        return zeros.scatter_reduce(0, group, value, "amax")
    return zeros.index_add(0, group, value)


def indexed_view(
    literal: Literal,
    variables: tuple[int, ...],
    n_index_columns: int,
    n_constants: int,
    is_counted: bool = False,
) -> IndexedView:
    """Return the literal's matching rows as an `IndexedView` over some of its variables.

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
    counts = literal.relation.values if is_counted else None
    if is_counted and counts is None:
        counts = torch.ones_like(columns[0])
    variables = tuple(range(len(columns)))
    table = Table(variables, columns, literal.relation.size, counts)
    if masks:
        table = select_rows(table, torch.stack(masks).all(0))

    # Rows are in order already, unless columns are dropped or exchanged.
    if positions != table.variables:
        selected = tuple(table.columns[j] for j in positions)
        table = distinct(Table((), selected, table.size, table.counts), bits)

    prefixes, key = (), torch.empty(0)
    if n_index_columns:
        prefixes, key = row_index.encode_rows(
            table.columns[:n_index_columns], [bits] * n_index_columns
        )
    row_offsets = None
    if n_index_columns == 1 and n_constants <= _MAX_IDS_PER_ROW * table.size:
        row_offsets = torch.searchsorted(key, count_to(n_constants + 2, key))
    return IndexedView(
        table.columns, table.size, prefixes, key, row_offsets, table.counts
    )


# -- joins

# rows of an intermediate result held at once, 8 bytes a row and column
MAX_CHUNK_ROWS = 1 << 20

# rows that a join costs beside those that it makes: what starting its kernels takes, in the time of a row
JOIN_OVERHEAD_ROWS = 5_000

# two tuples of terms that must differ in some position
Inequality = tuple[tuple[int, ...], tuple[int, ...]]


class RowBudgetExceeded(Exception):
    """Error raised when joins make more rows than their budget allows, or take more time."""


class TimeBudgetExceeded(RowBudgetExceeded):
    """Error raised when joins take more time than their budget allows."""


@dataclass(slots=True, eq=False)
class RowBudget:
    """Bound on the rows that joins make (independent of the machine's speed), and on their time.

    Attributes:
      max_rows: the rows allowed, those of intermediate results included.
      n_rows: the rows made so far.
      overhead: rows that a join counts beside those that it makes; 0 where rows stand for memory and not for time.
      n_joins: the joins made so far.
      deadline: when joins end, whatever they have made.
      max_held: the distinct rows of one answer, which are held at once.
    """

    max_rows: int = sys.maxsize
    n_rows: int = 0
    max_held: int = sys.maxsize
    overhead: int = JOIN_OVERHEAD_ROWS
    n_joins: int = 0
    deadline: Deadline = NO_DEADLINE

    def spend_join(self, n_rows: int) -> None:
        """Add one join and the rows that it makes to the budget's use.

        Raises:
          RowBudgetExceeded: all rows are more than allowed, or the time is over.
        """
        self.n_joins += 1
        self.spend(n_rows + self.overhead)

    def check_ahead(self, n_rows: int) -> None:
        """Check that so many rows more, which a join is about to make, are allowed; they are not added.

        Raises:
          RowBudgetExceeded: they are not.
        """
        if self.n_rows + n_rows > self.max_rows:
            raise RowBudgetExceeded(
                f"more than {self.max_rows:,} rows of joins"
            )

    def spend(self, n_rows: int) -> None:
        """Add rows to the budget's use.

        Raises:
          RowBudgetExceeded: they are more than allowed, or the time is over.
        """
        self.n_rows += n_rows
        self.check_ahead(0)
        if self.deadline.is_over:
            raise TimeBudgetExceeded("more time than was left")


UNBOUNDED = RowBudget()


@dataclass(frozen=True, slots=True)
class JoinStep:
    """Literal to join next, with the rows of its view that agree with each row of a table."""

    literal: Literal
    # the variables that it adds, the last columns of the view
    new_variables: tuple[int, ...]
    view: IndexedView
    # the first agreeing row of the view, for each row of the table
    start: Tensor
    count: Tensor  # the number of agreeing rows


@dataclass(frozen=True, slots=True)
class ConjunctiveQuery:
    """Query whose answers are the output variables of all rows that satisfy its literals and inequalities."""

    literals: tuple[Literal, ...]
    output_variables: tuple[int, ...]
    inequalities: tuple[Inequality, ...]
    n_constants: int  # terms above are variables
    budget: RowBudget = UNBOUNDED
    # count the assignments that give each answer
    is_counted: bool = False
    # the literal to start from; None for that of the smallest relation
    first: Literal | None = None

    @property
    def constant_bits(self) -> int:
        """Return how many bits hold a constant."""
        return self.n_constants.bit_length()

    def variables_in(self, *terms: Sequence[int]) -> set[int]:
        """Return the variables among the terms."""
        return {
            term for part in terms for term in part if term > self.n_constants
        }

    def needed_variables(self, literals: Iterable[Literal]) -> set[int]:
        """Return the variables that the output, the given literals or the inequalities need."""
        needed = set(self.output_variables)
        for literal in literals:
            needed |= literal.variables
        for inequality in self.inequalities:
            needed |= self.variables_in(*inequality)
        return needed

    def later_than(self, known: AbstractSet[int]) -> ConjunctiveQuery:
        """Return the query with the inequalities alone that have a variable which is not known."""
        return replace(
            self,
            inequalities=tuple(
                u
                for u in self.inequalities
                if not self.variables_in(*u) <= known
            ),
        )


def iter_answers(query: ConjunctiveQuery) -> Iterator[Table]:
    """Yield non-empty tables over the output variables whose union is the answer; a row may be repeated.

    The counts of a row that comes more than once are to be added, as `union` does.

    Raises:
      RowBudgetExceeded: the joins make more rows than the query's budget allows.
    """
    if any(left == right for left, right in query.inequalities):
        return
    unit = UNIT_TABLE
    if query.is_counted and query.literals:
        column = query.literals[0].relation.columns[0]
        unit = replace(unit, counts=column.new_ones(1))
    unit = _filter(unit, query, set())
    yield from _extend(unit, query.later_than(set()))


def collect_answers(query: ConjunctiveQuery) -> Table | None:
    """Return the whole answer of a query, each row once; None if the answer is empty.

    Raises:
      RowBudgetExceeded: the joins make, or the answer has, more rows than the query's budget allows.
    """
    tables: list[Table] = []
    n_pending, n_distinct = 0, 0

    for table in iter_answers(query):
        # Without variables, one answer is all.
        if not query.output_variables and not query.is_counted:
            return table

        # Merge when the pending rows outgrow the distinct ones: memory stays bounded, sorting stays rare.
        tables.append(table)
        n_pending += table.size
        if n_pending > max(MAX_CHUNK_ROWS, n_distinct):
            tables = [union(tables, query.constant_bits)]
            n_pending, n_distinct = 0, tables[0].size
            if n_distinct > query.budget.max_held:
                raise RowBudgetExceeded(
                    f"more than {query.budget.max_held:,} distinct rows"
                )
    return union(tables, query.constant_bits) if tables else None


def union(tables: list[Table], bits: int) -> Table:
    """Return the distinct rows of tables over the same variables; a single table is returned unchanged."""
    if len(tables) == 1:
        return tables[0]
    columns = row_index.concatenate(table.columns for table in tables)
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
    """Return the table restricted to some of its variables, each row once."""
    if variables == table.variables:
        return table
    columns = tuple(table.columns[table.variables.index(v)] for v in variables)
    projected = Table(variables, columns, table.size, table.counts)
    # a permutation of columns keeps rows distinct
    if len(variables) == len(table.variables):
        return projected
    return distinct(projected, query.constant_bits)


def _extend(table: Table, query: ConjunctiveQuery) -> Iterator[Table]:
    """Join a table with every literal of the query; yield non-empty tables over the output variables."""
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
    rest = replace(query.later_than(bound), literals=remaining)

    # Keep only the variables that something still needs.
    needed = rest.needed_variables(remaining)
    kept_variables = tuple(
        v for v in table.variables + step.new_variables if v in needed
    )

    # A join that is wanted whole and cannot fit is not begun.
    if query.output_variables:
        query.budget.check_ahead(int(step.count.sum()))

    # Merge chunks until they are large enough to be worth a recursion of their own.
    chunks: list[Table] = []
    for joined in _join(table, step):
        query.budget.spend_join(joined.size)
        chunks.append(
            project(_filter(joined, query, bound), kept_variables, query)
        )
        if sum(chunk.size for chunk in chunks) > MAX_CHUNK_ROWS:
            yield from _extend(union(chunks, query.constant_bits), rest)
            chunks = []
    if chunks:
        yield from _extend(union(chunks, query.constant_bits), rest)


def _choose_step(table: Table, query: ConjunctiveQuery) -> JoinStep:
    """Choose the literal to join next: the one with the fewest resulting rows among those that share a variable."""
    if query.first in query.literals:
        return _make_step(table, query.first, query)
    linked = [
        literal
        for literal in query.literals
        if literal.variables & set(table.variables)
    ]
    if not linked:
        smallest = min(query.literals, key=lambda one: one.relation.size)
        return _make_step(table, smallest, query)
    steps = [_make_step(table, literal, query) for literal in linked]
    if len(steps) == 1:  # spares a device synchronisation
        return steps[0]
    return min(steps, key=lambda step: int(step.count.sum()))


def _make_step(
    table: Table, literal: Literal, query: ConjunctiveQuery
) -> JoinStep:
    """Find the rows of a literal's view that agree with each row of a table."""
    others = [other for other in query.literals if other is not literal]
    useful = literal.variables & query.needed_variables(others)
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
        start = (
            torch.zeros_like(table.columns[0]) if table.columns else view.keys
        )
        return JoinStep(
            literal, new, view, start, torch.full_like(start, view.size)
        )

    columns = [table.columns[table.variables.index(v)] for v in shared]
    if view.row_offsets is not None:
        start = view.row_offsets.index_select(0, columns[0])
        stop = view.row_offsets.index_select(0, columns[0] + 1)
        return JoinStep(literal, new, view, start, stop - start)

    key, found = row_index.encode_with_prefixes(
        view.key_prefixes, columns, [query.constant_bits] * len(shared)
    )
    start, count = row_index.find_spans(view.keys, key)
    return JoinStep(literal, new, view, start, torch.where(found, count, 0))


def _join(table: Table, step: JoinStep) -> Iterator[Table]:
    """Yield the join of a table with the view of a step, in chunks."""
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
        counts = None
        if table.counts is not None and view.counts is not None:
            of_view = view.counts.index_select(0, position)
            counts = table.counts.index_select(0, row) * of_view
        yield Table(
            table.variables + step.new_variables,
            left + right,
            row.numel(),
            counts,
        )


def ragged_arange(start: Tensor, count: Tensor) -> Iterator[RowPairs]:
    """Yield all pairs (row, start[row] + i) with i < count[row], at most MAX_CHUNK_ROWS at a time."""
    end = torch.cumsum(count, 0)
    begin = end - count
    total = int(count.sum())
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
        yield row, number + shift.index_select(0, row)


def _filter(
    table: Table, query: ConjunctiveQuery, bound: AbstractSet[int]
) -> Table:
    """Return the rows of a table that satisfy every inequality whose variables are all bound."""
    for left, right in query.inequalities:
        if not query.variables_in(left, right) <= bound:
            continue
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


# -- rules

Atom = tuple[int, ...]  # predicate, argument, ...


@dataclass(frozen=True, slots=True)
class Rule:
    """Rule with its id; atoms are padded to the width of the knowledge base."""

    id: int
    head: Atom
    body: tuple[Atom, ...]
    # negated atoms, with the predicate -p, and comparisons, with one of `OPERATORS`; they stand behind the body
    conditions: tuple[Atom, ...] = ()


def rules_from_kb(
    kb: KnowledgeBase,
    rule_ids: Sequence[int] | None = None,
    *,
    with_conditions: bool = False,
) -> list[Rule]:
    """Return rules of a knowledge base by id, in the given order; by default all, in file order.

    Args:
      with_conditions: whether the caller reads conditions; rules that have some are an error else.

    Raises:
      ValueError: a rule has conditions.
    """
    table = kb.rules
    if rule_ids is None:
        rule_ids = range(len(table))
    else:
        table = table[torch.tensor(rule_ids, dtype=torch.int64)]
    rules: list[Rule] = []
    for i, atoms in zip(rule_ids, rule_tuples(table)):
        head, *body = (atom for atom in atoms if atom[0] > 0)
        conditions = tuple(atom for atom in atoms if atom[0] < 0)
        if conditions and not with_conditions:
            raise ValueError(
                f"rule {i}: expected no negation and no comparison, which only `funcppo prove` and `check "
                "PROOF.json` evaluate"
            )
        rules.append(Rule(i, head, tuple(body), conditions))
    return rules


def relations_by_predicate(
    atoms: I32[Tensor, "N W"],
    predicates: Collection[int] | None = None,
    values: F64[Tensor, "N"] | None = None,
) -> dict[int, Relation]:
    """Group atoms by predicate; return {predicate: relation of its argument rows}.

    Args:
      atoms: distinct, in lexicographic order.
      predicates: those wanted; None for all.
      values: of the atoms; None for none.
    """
    if predicates is not None and not predicates:
        return {}
    present, counts = runs(atoms[:, 0])
    sizes = int_list(counts)
    parts = torch.split(atoms, sizes)
    values_of: Sequence[Tensor | None] = [None] * len(parts)
    if values is not None:
        values_of = torch.split(values, sizes)
    return {
        predicate: Relation(
            tuple(column.long().contiguous() for column in part[:, 1:].T),
            of_part,
        )
        for predicate, part, of_part in zip(int_list(present), parts, values_of)
        if predicates is None or predicate in predicates
    }


def object_identity_constraints(
    rule: Rule, n_constants: int, object_identity: bool
) -> list[Inequality]:
    """Return inequalities that make a rule's variables differ from each other and from its constants.

    Args:
      object_identity: False for no inequalities.

    Source: Meilicke et al. 2019, "Anytime bottom-up rule learning", section 3: AnyBURL counts bodies in this way.
    """
    if not object_identity:
        return []
    # Variables have larger ids than constants, so the second of a pair of ascending terms is a variable if one is.
    atoms = rule.head, *rule.body, *rule.conditions
    terms = {t for a in atoms if a[0] not in OPERATORS for t in a[1:] if t > 0}
    return [
        ((first,), (second,))
        for first, second in combinations(sorted(terms), 2)
        if second > n_constants
    ]


def atom_variables(atom: Atom, n_constants: int) -> tuple[int, ...]:
    """Return the distinct variables of an atom in order of occurrence."""
    return tuple(dict.fromkeys(t for t in atom[1:] if t > n_constants))


def most_general_unifier(
    left: Atom, right: Atom, n_constants: int
) -> dict[int, int] | None:
    """Return the most general unifier of two atoms as {variable: term}; None if they do not unify."""
    if left[0] != right[0]:
        return None
    substitution: dict[int, int] = {}
    for a, b in zip(left[1:], right[1:]):
        a = substitution.get(a, a)
        b = substitution.get(b, b)
        if a == b:
            continue

        # Variables have the larger ids: replace the larger of the two, in earlier bindings too.
        variable = max(a, b)
        term = min(a, b)
        if variable <= n_constants:
            return None
        substitution = {
            v: term if t == variable else t for v, t in substitution.items()
        }
        substitution[variable] = term
    return substitution


def substitute_rule(rule: Rule, substitution: dict[int, int]) -> Rule:
    """Return the rule with its variables replaced."""
    head, *atoms = (
        substitute_atom(atom, substitution)
        for atom in (rule.head, *rule.body, *rule.conditions)
    )
    n_body = len(rule.body)
    return Rule(rule.id, head, tuple(atoms[:n_body]), tuple(atoms[n_body:]))


def substitute_atom(atom: Atom, substitution: dict[int, int]) -> Atom:
    """Return the atom with its variables replaced."""
    return (atom[0], *substitute_terms(atom[1:], substitution))


def substitute_terms(
    terms: Sequence[int], substitution: dict[int, int]
) -> tuple[int, ...]:
    """Return the terms with their variables replaced."""
    return tuple(substitution.get(t, t) for t in terms)
