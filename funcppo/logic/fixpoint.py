"""T_P, the immediate-consequence operator: what can be derived, and in how many steps.

    T_P(I) = facts + { head s : head :- body is a rule, every atom of body s is in I }

The height of an atom is the smallest h with the atom in T_P^h(facts); a fact has height 0. Evaluation is semi-naive:
step h joins only those bodies that hold an atom of height h - 1.

Source: van Emden and Kowalski 1976, "The semantics of predicate logic as a programming language"; Bancilhon and
Ramakrishnan 1986, "An amateur's introduction to recursive query processing strategies" (semi-naive evaluation).
"""

from __future__ import annotations

import enum
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from funcppo.logic import joins, row_index
from funcppo.logic import kb as kb_
from funcppo.logic.joins import ConjunctiveQuery
from funcppo.logic.kb import KBSizes, KnowledgeBase
from funcppo.logic.relations import Columns, Relation, find_rows
from funcppo.logic.rules import (
    Atom,
    Rule,
    body_query,
    head_columns,
    object_identity_constraints,
    relations_by_predicate,
    rules_from_kb,
)
from funcppo.types import I32, I64


@dataclass(frozen=True, kw_only=True, slots=True)
class LeastModel:
    """The atoms that T_P derives, a value of the host: it is never seen by a compiled function."""

    atoms: I32[Tensor, "n W"]  # distinct, in lexicographic order
    height: I32[Tensor, "n"]  # the smallest step that derives the atom, 0 for a fact
    atom_index: tuple[Tensor, ...]  # what `kb.locate` reads
    n_atoms_after_step: tuple[
        int, ...
    ]  # atoms after step 0 (the facts), 1, 2, ...; every one of these steps is complete
    complete: bool  # the fixpoint or the height asked for was reached
    reached_fixpoint: bool  # one more step would derive nothing
    stop_reason: str  # why it is not complete, in one line; empty when it is
    seconds: float  # wall-clock time of the evaluation
    predicates: frozenset[int]  # those evaluated; of another, nothing is known
    object_identity: bool
    sizes: KBSizes  # of the knowledge base that it was derived from


StepCallback = Callable[[int, int, float], None]  # told step, atoms and seconds after each step


def least_model(
    kb: KnowledgeBase,
    sizes: KBSizes,
    *,
    max_height: int | None,
    max_atoms: int,
    predicates: Collection[int] | None = None,
    object_identity: bool = False,
    progress: StepCallback | None = None,
) -> LeastModel:
    """What `max_height` steps of T_P derive, or its fixpoint, with the smallest height of every atom.

    Args:
      max_height: steps of T_P; None for the fixpoint.
      budget: the most atoms to hold. A step that would pass it is dropped as a whole, so the model stays exact up to
        the step before, and `stopped` says so.
      predicates: derive only these and what their rules depend on; None for all.
      object_identity: different variables of a rule bind different constants.
    """
    start = time.perf_counter()
    covered, rules = _relevant(rules_from_kb(kb), predicates, sizes)
    known = relations_by_predicate(kb.facts, covered)
    old, delta, runs, counts, stopped, fixpoint = {}, known, [known], [_n_atoms(known)], "", False
    while not (stopped or fixpoint or len(counts) - 1 == max_height):
        if progress is not None:
            progress(len(counts) - 1, counts[-1], time.perf_counter() - start)
        active = rules.with_body_in(delta) if old else rules.all
        bodies = (pair for rule in active for pair in _bodies(rule, old, delta, known, sizes, object_identity))
        new = _step(bodies, known, sizes, max_atoms - counts[-1], kb.facts.device)
        stopped, fixpoint = ("" if new is not None else _over(counts, max_atoms)), new == {}
        if new:
            old, delta, known = known, new, known | {p: _merged(known.get(p), r, sizes) for p, r in new.items()}
            runs.append(new)
            counts.append(counts[-1] + _n_atoms(new))
    atoms, height = _assemble(known, runs, sizes, kb.facts.device)
    return LeastModel(
        atoms=atoms,
        height=height,
        atom_index=kb_.index_sorted_atoms(atoms, sizes.n_predicates, sizes.n_constants),
        n_atoms_after_step=tuple(counts),
        complete=not stopped,
        reached_fixpoint=fixpoint,
        stop_reason=stopped,
        seconds=time.perf_counter() - start,
        predicates=covered,
        object_identity=object_identity,
        sizes=sizes,
    )


def _over(counts: list[int], budget: int) -> str:
    return f"stopped at {counts[-1]} atoms: step {len(counts)} passes the budget of {budget}, unknown beyond"


class Verdict(enum.IntEnum):
    """What is known of a query."""

    REFUTED = 0  # absent from a complete model
    PROVED = 1
    UNKNOWN = 2  # a budget was hit, or its predicate was not evaluated


def atom_height(model: LeastModel, atoms: I64[Tensor, "... W"]) -> I64[Tensor, "..."]:
    """The height of each atom, -1 where the model has it not."""
    row = kb_.find_atoms(model.atom_index, model.sizes, atoms)
    if not len(model.height):
        return row
    return torch.where(row >= 0, model.height[row.clamp_min(0)].to(torch.int64), -1)


def verdict(model: LeastModel, atoms: I64[Tensor, "... W"]) -> I64[Tensor, "..."]:
    """The `Verdict` on each ground atom, within the height that the model was asked for."""
    covered = torch.isin(atoms[..., 0], torch.tensor(sorted(model.predicates), device=atoms.device))
    absent = torch.where(covered & model.complete, int(Verdict.REFUTED), int(Verdict.UNKNOWN))
    return torch.where(atom_height(model, atoms) >= 0, int(Verdict.PROVED), absent)


def matching_atoms(model: LeastModel, atom: Atom) -> tuple[I32[Tensor, "n W"], I32[Tensor, "n"]]:
    """The atoms of the model that an open atom matches, in order, and their heights.

    Args:
      atom: predicate and terms; a variable that occurs twice asks for equal arguments.
    """
    n = model.sizes.n_constants
    fixed = next((j for j, t in enumerate(atom) if j and t > n), len(atom))  # how many leading terms are constants
    row = lambda i: model.atoms[i, :fixed].tolist()
    low, high = (side(range(len(model.atoms)), list(atom[:fixed]), key=row) for side in (bisect_left, bisect_right))
    found, height = model.atoms[low:high], model.height[low:high]
    for j in range(fixed, len(atom)):
        first = atom.index(atom[j], 1)
        if atom[j] <= n or first < j:
            kept = (found[:, j] == (atom[j] if atom[j] <= n else found[:, first])).nonzero().squeeze(1)
            found, height = found[kept], height[kept]
    return found, height


class _Rules:
    """Rules in file order, and those that have each predicate in their body."""

    def __init__(self, rules: list[Rule]) -> None:
        self.all = rules
        self.readers: dict[int, list[Rule]] = {}
        for rule in rules:
            for predicate in {atom[0] for atom in rule.body}:
                self.readers.setdefault(predicate, []).append(rule)

    def with_body_in(self, delta: dict[int, Relation]) -> list[Rule]:
        """The rules that have a predicate of the last step in their body."""
        found = {rule.id: rule for predicate in delta for rule in self.readers.get(predicate, [])}
        return [found[i] for i in sorted(found)]


def _relevant(rules: list[Rule], predicates: Collection[int] | None, sizes: KBSizes) -> tuple[frozenset[int], _Rules]:
    """The predicates asked for and those that their rules depend on, and the rules that derive them."""
    if predicates is None:
        return frozenset(range(1, sizes.n_predicates + 1)), _Rules(rules)
    needs: dict[int, set[int]] = {}
    for rule in rules:
        needs.setdefault(rule.head[0], set()).update(atom[0] for atom in rule.body)
    covered, todo = set(predicates), list(predicates)
    while todo:
        wider = needs.get(todo.pop(), set()) - covered
        covered |= wider
        todo += wider
    return frozenset(covered), _Rules([rule for rule in rules if rule.head[0] in covered])


def _n_atoms(relations: dict[int, Relation]) -> int:
    return sum(relation.size for relation in relations.values())


def _bodies(
    rule: Rule,
    old: dict[int, Relation],
    delta: dict[int, Relation],
    known: dict[int, Relation],
    sizes: KBSizes,
    object_identity: bool,
) -> Iterator[tuple[Rule, ConjunctiveQuery]]:
    """The ways in which a rule's body can hold an atom of the last step: the first such atom at each place in turn."""
    unequal = object_identity_constraints(rule, sizes.n_constants) if object_identity else []
    names = [atom[0] for atom in rule.body]
    if not names and not old:
        yield rule, body_query(rule, [], sizes.n_constants, unequal)
    for i in range(len(names)):
        sources = [old] * i + [delta] + [known] * (len(names) - i - 1)
        if all(p in source for p, source in zip(names, sources)):
            yield rule, body_query(rule, [source[p] for p, source in zip(names, sources)], sizes.n_constants, unequal)


def _step(
    bodies: Iterator[tuple[Rule, ConjunctiveQuery]],
    known: dict[int, Relation],
    sizes: KBSizes,
    room: int,
    device: torch.device,
) -> dict[int, Relation] | None:
    """The heads that are not known yet, by predicate; None when there are more than `room` of them."""
    new: dict[int, Columns] = {}
    held: dict[int, list[Columns]] = {}
    for rule, query in bodies:
        name = rule.head[0]
        for table in joins.iter_answers(query):
            held.setdefault(name, []).append(_unknown(head_columns(rule, table, device), known.get(name), sizes))
            if _n_rows(held[name]) > max(joins.MAX_CHUNK_ROWS, _n_rows([new[name]] if name in new else [])):
                new[name] = _distinct([*held.pop(name), *([new[name]] if name in new else [])], sizes)
                if sum(columns[0].numel() for columns in new.values()) > room:
                    return None
            if not query.output_variables:
                break
    for name, parts in held.items():
        new[name] = _distinct([*parts, *([new[name]] if name in new else [])], sizes)
    found = {name: Relation(columns, columns[0].numel()) for name, columns in sorted(new.items()) if columns[0].numel()}
    return found if _n_atoms(found) <= room else None


def _n_rows(parts: list[Columns]) -> int:
    return sum(columns[0].numel() for columns in parts)


def _distinct(parts: list[Columns], sizes: KBSizes) -> Columns:
    columns = tuple(torch.cat(same) for same in zip(*parts))
    return row_index.unique_rows(columns, [sizes.n_constants.bit_length()] * len(columns))


def _merged(known: Relation | None, new: Relation, sizes: KBSizes) -> Relation:
    """The union of two disjoint relations."""
    if known is None:
        return new
    columns = _distinct([known.columns, new.columns], sizes)
    return Relation(columns, known.size + new.size)


def _unknown(columns: Columns, known: Relation | None, sizes: KBSizes) -> Columns:
    """The rows that a relation does not hold."""
    if known is None:
        return columns
    fresh = ~find_rows(columns, known, sizes.n_constants)[1]
    return tuple(column[fresh] for column in columns)


def _assemble(
    known: dict[int, Relation], runs: list[dict[int, Relation]], sizes: KBSizes, device: torch.device
) -> tuple[Tensor, Tensor]:
    """All atoms in lexicographic order, and their heights."""
    tables, heights = [torch.empty((0, sizes.atom_width), dtype=torch.int32, device=device)], []
    added: dict[int, list[tuple[int, Relation]]] = {}
    for step, run in enumerate(runs[1:], 1):
        for name, relation in run.items():
            added.setdefault(name, []).append((step, relation))
    for name, relation in sorted(known.items()):
        columns = (torch.full_like(relation.columns[0], name), *relation.columns)
        tables.append(torch.stack([column.to(torch.int32) for column in columns], dim=1))
        height = torch.zeros(relation.size, dtype=torch.int32, device=device)
        for step, new in added.get(name, []):
            height = height.scatter(0, find_rows(new.columns, relation, sizes.n_constants)[0], step)
        heights.append(height)
    return torch.cat(tables), torch.cat([torch.empty(0, dtype=torch.int32, device=device), *heights])
