"""The least model of a program: what the immediate-consequence operator T_P derives, and in how many steps.

    T_P(I) = facts + { head s : head :- body is a rule, every atom of body s is in I }

The height of an atom is the smallest h with the atom in T_P^h(facts); a fact has height 0. Evaluation is semi-naive:
step h joins only those bodies that hold an atom of height h - 1.

`least_model` computes the model; `atom_height`, `verdict` and `matching_atoms` read it. `derived_in_next_step` takes
one step more for given atoms alone.

Source: van Emden and Kowalski 1976, "The semantics of predicate logic as a programming language"; Bancilhon and
Ramakrishnan 1986, "An amateur's introduction to recursive query processing strategies" (semi-naive evaluation).
"""

from __future__ import annotations

import enum
import time
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from funcppo.core.types import I32, I64, Bool
from funcppo.kg.logic import joins, row_index
from funcppo.kg.logic.joins import (
    Atom,
    Columns,
    ConjunctiveQuery,
    Relation,
    RowBudget,
    RowBudgetExceeded,
    Rule,
    TimeBudgetExceeded,
    body_query,
    find_rows,
    head_columns,
    make_literal,
    object_identity_constraints,
    relations_by_predicate,
    rules_from_kb,
)
from funcppo.kg.logic.kb import (
    AtomIndex,
    KBSizes,
    KnowledgeBase,
    find_atoms,
    index_sorted_atoms,
    sort_and_index_atoms,
)
from funcppo.kg.logic.row_index import int_list, unique_rows


@enum.unique
class StopCode(enum.StrEnum):
    """Why a model is not complete; codes are never renamed."""

    MAX_ATOMS = "max_atoms"  # the next step exceeds the atoms to hold
    MAX_ROWS = "max_rows"  # the joins of the next step make too many rows
    TIME_LIMIT = "time_limit"
    QUERIES_ONLY = "queries_only"  # it holds only what some queries ask for


# by predicate; a predicate without atoms has no relation
Relations = dict[int, Relation]


@dataclass(frozen=True, kw_only=True, slots=True)
class LeastModel:
    """The atoms that T_P derives; a value of the host, never an argument of a compiled function."""

    atoms: I32[Tensor, "n W"]  # distinct, in lexicographic order
    # the first step that derives the atom, 0 for a fact
    height: I32[Tensor, "n"]
    atom_index: AtomIndex  # index of `atoms` for `kb.find_atoms`
    # number of atoms after step 0 (the facts), 1, 2, ..., all of them complete
    n_atoms_after_step: tuple[int, ...]
    # whether the evaluation reached the fixpoint or the height that was asked for
    complete: bool
    reached_fixpoint: bool  # whether one more step would derive nothing
    # one line that says why the model is not complete; empty if it is
    stop_reason: str
    stop_code: StopCode | None  # the same as a code; None if it is complete
    seconds: float  # wall-clock time of the evaluation
    # those evaluated; nothing is known of atoms of others
    predicates: frozenset[int]
    # whether different variables of a rule bind different constants, none of which the rule names
    object_identity: bool
    sizes: KBSizes  # of the knowledge base that the model was derived from


class FactTable(NamedTuple):
    """The facts of a knowledge base as a table that `matching_atoms` reads, without an index of its own."""

    atoms: I32[Tensor, "n W"]  # distinct, in lexicographic order
    height: I32[Tensor, "n"]  # 0, in one place of memory
    object_identity: bool  # as of a `LeastModel`
    sizes: KBSizes


class StepCallback(Protocol):
    """Function that is called before each step of T_P, and after each rule of it."""

    def __call__(
        self, step: int, n_atoms: int, n_done: int, n_rules: int, /
    ) -> None:
        """Receive the last completed step (0: the facts), the number of atoms after it, and how many rules of the next
        step are applied, of how many."""


class Verdict(enum.IntEnum):
    """What a model says of a query."""

    REFUTED = 0  # absent from a complete model
    PROVED = 1  # in the model
    # absent, but the model is not complete or the query's predicate was not evaluated
    UNKNOWN = 2


class MatchingAtoms(NamedTuple):
    """The atoms of a model that match an open atom."""

    atoms: I32[Tensor, "n W"]  # in lexicographic order
    height: I32[Tensor, "n"]


# -- evaluation


def least_model(
    kb: KnowledgeBase,
    sizes: KBSizes,
    *,
    max_height: int | None,
    max_atoms: int,
    predicates: Collection[int] | None = None,
    object_identity: bool = False,
    progress: StepCallback | None = None,
    budget: RowBudget | None = None,
) -> LeastModel:
    """Derive what `max_height` steps of T_P derive, or its fixpoint, with the smallest height of every atom.

    Args:
      max_height: steps of T_P; None for the fixpoint.
      max_atoms: the most atoms to hold, facts included. A step that would exceed it is dropped as a whole, so the model
        stays exact up to the step before, and `stop_reason` says so.
      predicates: derive only these and those that their rules depend on; None for all.
      object_identity: different variables of a rule bind different constants, none of which the rule names.
      progress: is called before each step and after each of its rules; None for no reports.
      budget: bounds the rows that the joins make; a step that would exceed it is dropped as a whole too. None for no
        bound.

    Returns:
      The model; if it is not complete, its atoms are exactly those of the steps in `n_atoms_after_step`.
    """
    start = time.perf_counter()
    covered, rules = _relevant_rules(rules_from_kb(kb), predicates, sizes)
    state = _initial_state(kb, covered)
    stop: _Stop | None = None
    reached_fixpoint = False
    while not (stop or reached_fixpoint or state.step == max_height):
        active = (
            rules.with_body_in(state.delta) if state.previous else rules.all
        )
        _report_rules(progress, state, 0, len(active))
        queries = _semi_naive_queries(
            active,
            state,
            sizes,
            object_identity,
            budget,
            progress,
        )
        max_new = max_atoms - state.counts[-1]
        try:
            heads = _iter_new_heads(
                queries, state.known, sizes, kb.facts.device
            )
            new = _collect_heads(heads, sizes, max_new)
        except RowBudgetExceeded as error:
            stop = _stop_before(state, _budget_code(error), f"takes {error}")
            break
        if new is None:
            stop = _stop_before(
                state, StopCode.MAX_ATOMS, f"exceeds max_atoms {max_atoms}"
            )
        elif not new:
            reached_fixpoint = True
        else:
            state = _advance(state, new, sizes)

    atoms, height = _assemble_atoms(state, sizes, kb.facts.device)
    return LeastModel(
        atoms=atoms,
        height=height,
        atom_index=index_sorted_atoms(
            atoms, sizes.n_predicates, sizes.n_constants
        ),
        n_atoms_after_step=state.counts,
        complete=stop is None,
        reached_fixpoint=reached_fixpoint,
        stop_reason=stop.reason if stop else "",
        stop_code=stop.code if stop else None,
        seconds=time.perf_counter() - start,
        predicates=covered,
        object_identity=object_identity,
        sizes=sizes,
    )


def derived_in_next_step(
    kb: KnowledgeBase, model: LeastModel, atoms: I64[Tensor, "n W"]
) -> Bool[Tensor, "n"]:
    """Whether a rule derives each atom from the model: one more step of T_P, taken for these atoms alone.

    Each rule's body is joined with the given atoms, so no table grows beyond what they need.

    Args:
      kb: the knowledge base whose rules apply; the model is one of it.
      atoms: ground, in any order.
    """
    n_constants = model.sizes.n_constants
    targets = relations_by_predicate(unique_rows(atoms))
    rules = [rule for rule in rules_from_kb(kb) if rule.head[0] in targets]
    body_predicates = {atom[0] for rule in rules for atom in rule.body}
    known = relations_by_predicate(model.atoms, body_predicates)

    derived = [atoms[:0].long()]
    for rule in rules:
        if any(atom[0] not in known for atom in rule.body):
            continue
        inequalities = (
            object_identity_constraints(rule, n_constants)
            if model.object_identity
            else []
        )
        query = body_query(
            rule,
            [known[atom[0]] for atom in rule.body],
            n_constants,
            inequalities,
        )
        predicate, *terms = rule.head
        is_target = make_literal(targets[predicate], tuple(terms), n_constants)
        for table in joins.iter_answers(
            replace(query, literals=(is_target, *query.literals))
        ):
            columns = head_columns(rule, table, atoms.device)
            predicate_column = torch.full_like(columns[0], predicate)
            derived.append(torch.stack([predicate_column, *columns], dim=1))

    _, derived_index = sort_and_index_atoms(
        torch.cat(derived),
        model.sizes.n_predicates,
        n_constants,
    )
    return find_atoms(derived_index, model.sizes, atoms) >= 0


# -- reading a model


def atom_height(
    model: LeastModel, atoms: I64[Tensor, "... W"]
) -> I64[Tensor, "..."]:
    """The height of each atom, -1 for one that is not in the model."""
    row = find_atoms(model.atom_index, model.sizes, atoms)
    if not len(model.height):
        return row
    height = model.height[row.clamp_min(0)]
    return torch.where(row >= 0, height.to(torch.int64), -1)


def verdict(
    model: LeastModel, atoms: I64[Tensor, "... W"]
) -> I64[Tensor, "..."]:
    """The `Verdict` on each ground atom, within the height that the model was asked for."""
    predicates = torch.tensor(sorted(model.predicates), device=atoms.device)
    is_covered = torch.isin(atoms[..., 0], predicates)
    if_absent = torch.where(
        is_covered & model.complete,
        int(Verdict.REFUTED),
        int(Verdict.UNKNOWN),
    )
    is_present = atom_height(model, atoms) >= 0
    return torch.where(is_present, int(Verdict.PROVED), if_absent)


def fact_table(
    kb: KnowledgeBase, sizes: KBSizes, object_identity: bool
) -> FactTable:
    """The facts of a knowledge base, whose memory it shares."""
    height = torch.zeros(1, dtype=torch.int32, device=kb.facts.device)
    return FactTable(
        atoms=kb.facts,
        height=height.expand(len(kb.facts)),
        object_identity=object_identity,
        sizes=sizes,
    )


def matching_atoms(model: LeastModel | FactTable, atom: Atom) -> MatchingAtoms:
    """Find the atoms of a model that match an open atom.

    Args:
      atom: predicate and terms; a term above `n_constants` is a variable, and one that occurs twice requires equal
        arguments.

    Returns:
      atoms: in lexicographic order.
      height: the height of each.
    """
    n_constants = model.sizes.n_constants

    # Atoms are sorted: those that agree with the leading constants lie together.
    n_leading = len(atom)
    for position, term in enumerate(atom):
        # position 0 is the predicate, whose id may be that of a variable
        if position and term > n_constants:
            n_leading = position
            break
    start, stop = _find_prefix(model.atoms, atom[:n_leading])
    atoms = model.atoms[start:stop]
    height = model.height[start:stop]

    # Of those, select the ones that agree with the other constants and the repeated variables.
    for position in range(n_leading, len(atom)):
        term = atom[position]
        first = atom.index(term, 1)
        if term <= n_constants:
            required = term
        elif first < position:
            required = atoms[:, first]
        else:
            continue
        row = (atoms[:, position] == required).nonzero().squeeze(1)
        atoms = atoms[row]
        height = height[row]
    return MatchingAtoms(atoms, height)


def _find_prefix(atoms: I32[Tensor, "n W"], prefix: Atom) -> tuple[int, int]:
    """Where the rows that begin with a prefix start and stop, in a table in lexicographic order."""

    def row_prefix(row: int) -> Atom:
        leading = atoms[row, : len(prefix)]
        return tuple(int_list(leading))

    rows = range(len(atoms))
    start = bisect_left(rows, prefix, key=row_prefix)
    stop = bisect_right(rows, prefix, key=row_prefix)
    return start, stop


# -- rules


class _RuleSet:
    """Rules in file order, and those that have each predicate in their body."""

    def __init__(self, rules: list[Rule]) -> None:
        self.all = rules
        self.by_body_predicate: dict[int, list[Rule]] = {}
        for rule in rules:
            for predicate in {atom[0] for atom in rule.body}:
                self.by_body_predicate.setdefault(predicate, []).append(rule)

    def with_body_in(self, predicates: Collection[int]) -> list[Rule]:
        """The rules with one of these predicates in their body, in file order."""
        selected: dict[int, Rule] = {}
        for predicate in predicates:
            for rule in self.by_body_predicate.get(predicate, []):
                selected[rule.id] = rule
        return [selected[i] for i in sorted(selected)]


def _relevant_rules(
    rules: list[Rule], predicates: Collection[int] | None, sizes: KBSizes
) -> tuple[frozenset[int], _RuleSet]:
    """The given predicates with those that their rules depend on, and the rules that derive them."""
    if predicates is None:
        all_predicates = range(1, sizes.n_predicates + 1)
        return frozenset(all_predicates), _RuleSet(rules)

    dependencies: dict[int, set[int]] = {}
    for rule in rules:
        body_predicates = {atom[0] for atom in rule.body}
        dependencies.setdefault(rule.head[0], set()).update(body_predicates)

    covered = set(predicates)
    pending = list(predicates)
    while pending:
        added = dependencies.get(pending.pop(), set()) - covered
        covered |= added
        pending += added
    relevant = [rule for rule in rules if rule.head[0] in covered]
    return frozenset(covered), _RuleSet(relevant)


# -- one semi-naive step


@dataclass(frozen=True, slots=True)
class _State:
    """A semi-naive evaluation after some steps."""

    known: Relations  # all atoms
    previous: Relations  # the atoms before the last step
    delta: Relations  # the atoms that the last step added
    deltas: tuple[Relations, ...]  # what each step added; the facts first
    counts: tuple[int, ...]  # number of atoms after each step

    @property
    def step(self) -> int:
        """The number of completed steps."""
        return len(self.counts) - 1


def _initial_state(kb: KnowledgeBase, predicates: Collection[int]) -> _State:
    """Step 0: the facts of some predicates."""
    facts = relations_by_predicate(kb.facts, predicates)
    return _State(facts, {}, facts, (facts,), (_n_atoms(facts),))


def _advance(state: _State, new: Relations, sizes: KBSizes) -> _State:
    """The state after a step that added new atoms."""
    known = dict(state.known)
    for predicate, relation in new.items():
        known[predicate] = _union(known.get(predicate), relation, sizes)
    return _State(
        known=known,
        previous=state.known,
        delta=new,
        deltas=(*state.deltas, new),
        counts=(*state.counts, state.counts[-1] + _n_atoms(new)),
    )


class _Stop(NamedTuple):
    """Why an evaluation stops before its end."""

    code: StopCode
    reason: str


def _stop_before(state: _State, code: StopCode, obstacle: str) -> _Stop:
    """Why the evaluation stops before the next step, which an obstacle prevents."""
    n_atoms = state.counts[-1]
    next_step = state.step + 1
    return _Stop(
        code,
        f"stopped at {n_atoms} atoms: step {next_step} {obstacle}, unknown beyond",
    )


def _budget_code(error: RowBudgetExceeded) -> StopCode:
    """Which bound of the budget was exceeded."""
    is_late = isinstance(error, TimeBudgetExceeded)
    return StopCode.TIME_LIMIT if is_late else StopCode.MAX_ROWS


def _report_rules(
    progress: StepCallback | None, state: _State, n_done: int, n_rules: int
) -> None:
    """Report how many rules of the step after a state are applied."""
    if progress is not None:
        progress(state.step, state.counts[-1], n_done, n_rules)


def _semi_naive_queries(
    active: Sequence[Rule],
    state: _State,
    sizes: KBSizes,
    object_identity: bool,
    budget: RowBudget | None,
    progress: StepCallback | None,
) -> Iterator[tuple[Rule, ConjunctiveQuery]]:
    """Yield queries whose answers are the bodies that hold an atom of the last step, with their rules.

    A body is found once: by the query for its first atom of the last step. Atoms left of it are older, atoms right
    of it are of any step.

    Args:
      active: the rules with an atom of the last step in their body; all in the first step.
      progress: is called after each rule; None for no reports.
    """
    for n_done, rule in enumerate(active, 1):
        inequalities = (
            object_identity_constraints(rule, sizes.n_constants)
            if object_identity
            else []
        )
        predicates = [atom[0] for atom in rule.body]
        # a rule without a body fires in the first step
        if not predicates and not state.previous:
            query = body_query(
                rule, [], sizes.n_constants, inequalities, budget=budget
            )
            yield rule, query

        for i in range(len(predicates)):
            n_right = len(predicates) - i - 1
            sources = [
                *[state.previous] * i,
                state.delta,
                *[state.known] * n_right,
            ]
            present: list[Relation] = []
            for predicate, source in zip(predicates, sources):
                if predicate in source:
                    present.append(source[predicate])
            if len(present) == len(predicates):
                query = body_query(
                    rule,
                    present,
                    sizes.n_constants,
                    inequalities,
                    budget=budget,
                )
                yield rule, query
        _report_rules(progress, state, n_done, len(active))


def _iter_new_heads(
    queries: Iterable[tuple[Rule, ConjunctiveQuery]],
    known: Relations,
    sizes: KBSizes,
    device: torch.device,
) -> Iterator[tuple[int, Columns]]:
    """Yield the heads of the answers that are not known yet, with repetitions, with their predicates."""
    for rule, query in queries:
        predicate = rule.head[0]
        for table in joins.iter_answers(query):
            heads = head_columns(rule, table, device)
            yield predicate, _exclude_known(heads, known.get(predicate), sizes)
            # the head has no variables: one answer gives it
            if not query.output_variables:
                break


def _collect_heads(
    heads: Iterator[tuple[int, Columns]], sizes: KBSizes, max_new: int
) -> Relations | None:
    """The distinct heads; None if there are more than `max_new`."""
    new = _merge_heads(heads, sizes, max_new)
    if _n_rows(new.values()) > max_new:
        return None
    return _nonempty_relations(new)


def _merge_heads(
    heads: Iterator[tuple[int, Columns]], sizes: KBSizes, max_new: int
) -> dict[int, Columns]:
    """The distinct heads by predicate, or some of them that are more than `max_new`."""
    new: dict[int, Columns] = {}  # distinct
    pending: dict[int, list[Columns]] = {}  # not yet made distinct
    for predicate, columns in heads:
        pending.setdefault(predicate, []).append(columns)

        # Merge when the pending rows outgrow the distinct ones: memory stays bounded, sorting stays rare.
        n_distinct = _n_rows([new[predicate]]) if predicate in new else 0
        if _n_rows(pending[predicate]) > max(joins.MAX_CHUNK_ROWS, n_distinct):
            parts = pending.pop(predicate)
            new[predicate] = _merge_pending(new.get(predicate), parts, sizes)
            if _n_rows(new.values()) > max_new:
                return new

    for predicate, parts in pending.items():
        new[predicate] = _merge_pending(new.get(predicate), parts, sizes)
    return new


def _nonempty_relations(tables: dict[int, Columns]) -> Relations:
    """The relations of tables that have rows, by ascending predicate."""
    relations: Relations = {}
    for predicate, columns in sorted(tables.items()):
        n_rows = _n_rows([columns])
        if n_rows:
            relations[predicate] = Relation(columns, n_rows)
    return relations


def _exclude_known(
    columns: Columns, known: Relation | None, sizes: KBSizes
) -> Columns:
    """The rows that a relation does not hold."""
    if known is None:
        return columns
    _, is_known = find_rows(columns, known, sizes.n_constants)
    return tuple(column[~is_known] for column in columns)


def _merge_pending(
    distinct: Columns | None, parts: Sequence[Columns], sizes: KBSizes
) -> Columns:
    """The distinct rows of some tables and of one that is distinct already."""
    return _distinct_rows(
        parts if distinct is None else [*parts, distinct], sizes
    )


def _distinct_rows(parts: Sequence[Columns], sizes: KBSizes) -> Columns:
    """The distinct rows of some tables of arguments, in lexicographic order."""
    columns = tuple(torch.cat(pieces) for pieces in zip(*parts))
    bits = sizes.n_constants.bit_length()
    return row_index.unique_columns(columns, [bits] * len(columns))


def _union(known: Relation | None, new: Relation, sizes: KBSizes) -> Relation:
    """The union of two disjoint relations."""
    if known is None:
        return new
    columns = _distinct_rows([known.columns, new.columns], sizes)
    return Relation(columns, known.size + new.size)


def _n_rows(tables: Collection[Columns]) -> int:
    """The number of rows of some tables."""
    return sum(columns[0].numel() for columns in tables)


def _n_atoms(relations: Relations) -> int:
    """The number of atoms of some relations."""
    return sum(relation.size for relation in relations.values())


# -- the atoms of all steps


class _AtomTable(NamedTuple):
    """Atoms and their heights."""

    atoms: Tensor
    height: Tensor


def _assemble_atoms(
    state: _State, sizes: KBSizes, device: torch.device
) -> _AtomTable:
    """All atoms in lexicographic order, with the step that added each."""
    added: dict[int, list[tuple[int, Relation]]] = {}
    for step, delta in enumerate(state.deltas[1:], 1):
        for predicate, relation in delta.items():
            added.setdefault(predicate, []).append((step, relation))

    tables = [
        torch.empty((0, sizes.atom_width), dtype=torch.int32, device=device)
    ]
    heights = [torch.empty(0, dtype=torch.int32, device=device)]
    for predicate, relation in sorted(state.known.items()):
        predicate_column = torch.full_like(relation.columns[0], predicate)
        columns = (predicate_column, *relation.columns)
        atom_columns = [column.to(torch.int32) for column in columns]
        tables.append(torch.stack(atom_columns, dim=1))

        height = torch.zeros(relation.size, dtype=torch.int32, device=device)
        for step, new in added.get(predicate, []):
            row, _ = find_rows(new.columns, relation, sizes.n_constants)
            height = height.scatter(0, row, step)
        heights.append(height)
    return _AtomTable(torch.cat(tables), torch.cat(heights))
