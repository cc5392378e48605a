"""What one application of each rule derives, and how often each rule is right.

`iter_consequences` and `collect_consequences` list the atoms that rules derive from the facts. `iter_derivations` and
`collect_derivations` tell which rules derive each atom of a list. `count_rules` counts how often each rule is right,
and `with_confidence` gives a knowledge base the confidences that follow.
With `heads(r)` the distinct heads of rule r over the facts,

    body_pairs(r) = |heads(r)|,    support(r) = |heads(r) and facts|,    confidence = support / body_pairs

which is the standard confidence of AMIE and AnyBURL, without the closed-world correction. An atom counts once for each
rule, however many bodies of that rule derive it.

Source: Galárraga et al. 2013, "AMIE: association rule mining under incomplete evidence", section 3.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from funcppo.core.deadline import NO_DEADLINE, Deadline
from funcppo.core.types import I32, I64, Bool
from funcppo.kg.logic import joins, row_index
from funcppo.kg.logic.fixpoint import LeastModel
from funcppo.kg.logic.joins import (
    Columns,
    Inequality,
    Relation,
    RowBudget,
    RowBudgetExceeded,
    Rule,
    Table,
    TimeBudgetExceeded,
    body_query,
    find_rows,
    head_columns,
    make_literal,
    most_general_unifier,
    object_identity_constraints,
    relations_by_predicate,
    rules_from_kb,
    substitute_rule,
    substitute_terms,
)
from funcppo.kg.logic.kb import (
    KBSizes,
    KnowledgeBase,
    build,
    find_atoms,
    sort_and_index_atoms,
)
from funcppo.kg.logic.row_index import int_list, unique_values

# the part of the rules that tells by sampling how many rows all of them make, and the fewest rules that tell
SAMPLED_RULES_SHARE = 0.0625
MIN_SAMPLED_RULES = 64


class Consequences(NamedTuple):
    """Pairs of a derived atom and a rule that derives it, each pair once, in the order of the rules."""

    atoms: I32[Tensor, "n W"]
    rule: I64[Tensor, "n"]  # id of the rule
    # id of the atom among the facts, -1 if it is not a fact
    fact: I64[Tensor, "n"]


class RuleCounts(NamedTuple):
    """What the rules derive from the facts, counted for each rule."""

    support: I64[Tensor, "R"]  # derived heads that are facts
    body_pairs: I64[Tensor, "R"]  # derived heads
    # facts of the support that the rule derives only from bodies that contain the fact itself
    circular_support: I64[Tensor, "R"]


class _AppliedRule(NamedTuple):
    """A rule and the heads that it derives from the facts."""

    rule: Rule
    columns: Columns  # the arguments of the heads, each head once
    fact: I64[Tensor, "n"]  # id of each head among the facts, or -1
    inequalities: Sequence[Inequality]  # of object identity


class Derivations(NamedTuple):
    """Pairs of an atom of a list and a rule that derives it in one application, each pair once."""

    atom_row: I64[Tensor, "n"]  # position of the atom in the list
    rule: I64[Tensor, "n"]  # id of the rule


class CountCallback(Protocol):
    """Receives how many rules are counted or applied, and of how many."""

    def __call__(self, n_done: int, n_rules: int, /) -> None: ...


def iter_consequences(
    kb: KnowledgeBase,
    sizes: KBSizes,
    *,
    rule_ids: Sequence[int] | None = None,
    leave_one_out: bool = False,
    object_identity: bool = False,
    budget: RowBudget | None = None,
    progress: CountCallback | None = None,
) -> Iterator[Consequences]:
    """Yield the consequences of one rule after another, so that only one rule's are in memory.

    Args:
      rule_ids: the rules to apply, in order; None for all, in file order.
      leave_one_out: omit a fact that the rule derives only from bodies that contain the fact itself.
      object_identity: different variables of a rule bind different constants, none of which the rule names.
      budget: bounds the rows that the joins make; None for no bound.
      progress: is called after each rule; None for no reports.

    Raises:
      RowBudgetExceeded: the joins make more rows than the budget allows.
    """
    relations = _relations_of(kb, rule_ids)
    n_rules = sizes.n_rules if rule_ids is None else len(rule_ids)
    applied_rules = _apply_rules(
        kb, sizes, relations, rule_ids, object_identity, budget
    )
    for n_applied, applied in enumerate(applied_rules, 1):
        rule, columns, fact, _ = applied
        if leave_one_out:
            circular = _circular_heads(kb, sizes, relations, applied, budget)
            is_kept = _is_not_among(columns, circular, sizes)
            columns = tuple(column[is_kept] for column in columns)
            fact = fact[is_kept]
        predicate = torch.full_like(columns[0], rule.head[0])
        atom_columns = [
            column.to(torch.int32) for column in (predicate, *columns)
        ]
        yield Consequences(
            atoms=torch.stack(atom_columns, dim=1),
            rule=torch.full_like(columns[0], rule.id),
            fact=fact,
        )
        if progress is not None:
            progress(n_applied, n_rules)


def _relations_of(
    kb: KnowledgeBase, rule_ids: Sequence[int] | None
) -> dict[int, Relation]:
    """The relations of the facts that some rules name; None for all rules."""
    rules = rules_from_kb(kb, rule_ids)
    return relations_by_predicate(
        kb.facts,
        {atom[0] for rule in rules for atom in (rule.head, *rule.body)},
    )


def _apply_rules(
    kb: KnowledgeBase,
    sizes: KBSizes,
    relations: dict[int, Relation],
    rule_ids: Sequence[int] | None,
    object_identity: bool,
    budget: RowBudget | None,
) -> Iterator[_AppliedRule]:
    """Yield some rules with the heads that they derive."""
    for rule in rules_from_kb(kb, rule_ids):
        inequalities = (
            object_identity_constraints(rule, sizes.n_constants)
            if object_identity
            else []
        )
        columns = _derive_heads(
            rule, relations, sizes, inequalities, kb.facts.device, budget
        )
        fact = _find_facts(rule.head[0], columns, relations, kb, sizes)
        yield _AppliedRule(rule, columns, fact, inequalities)


def collect_consequences(
    kb: KnowledgeBase,
    sizes: KBSizes,
    *,
    rule_ids: Sequence[int] | None = None,
    leave_one_out: bool = False,
    object_identity: bool = False,
) -> Consequences:
    """The consequences of all the rules in one table; arguments as for `iter_consequences`."""
    parts = iter_consequences(
        kb,
        sizes,
        rule_ids=rule_ids,
        leave_one_out=leave_one_out,
        object_identity=object_identity,
    )
    no_rule = kb.rule_ids_by_predicate[:0]
    empty = Consequences(kb.facts[:0], no_rule, no_rule)
    return Consequences(*(torch.cat(columns) for columns in zip(empty, *parts)))


def count_rules(
    kb: KnowledgeBase,
    sizes: KBSizes,
    *,
    object_identity: bool = False,
    known: I64[Tensor, "R 3"] | None = None,
    estimates: I64[Tensor, "R 3"] | None = None,
    budget: RowBudget | None = None,
    estimated_rules: set[int] | None = None,
    progress: CountCallback | None = None,
) -> RuleCounts:
    """Count what each rule derives from the facts.

    Args:
      object_identity: different variables of a rule bind different constants, none of which the rule names.
      known: counts without object identity that are not made again, columns as in `RuleCounts`; rows of -1 are.
      estimates: counts without object identity that are taken where the joins make too many rows; rows of -1 are not.
      budget: bounds the rows that the joins make; None for no bound.
      estimated_rules: receives the rules whose estimates are taken.
      progress: is called after each rule that is counted; None for no reports.

    Raises:
      RowBudgetExceeded: the joins make more rows than the budget allows, and there is no estimate of some rule.
    """
    counted = _known_rows(known) if not object_identity else {}
    estimated = _known_rows(estimates) if not object_identity else {}
    rule_ids = [rule for rule in range(sizes.n_rules) if rule not in counted]
    try:
        for rule, row in _iter_counts(
            kb, sizes, rule_ids, object_identity, budget
        ):
            counted |= {rule: row}
            if progress is not None:
                progress(len(counted), sizes.n_rules)
    except RowBudgetExceeded:
        if not estimated.keys() | counted.keys() >= set(rule_ids):
            raise
    if estimated_rules is not None:
        estimated_rules |= set(rule_ids) - counted.keys()
    counted = estimated | counted
    rows = [counted[rule] for rule in range(sizes.n_rules)]
    table = torch.tensor(rows, dtype=torch.int64, device=kb.support.device)
    return RuleCounts(*table.view(-1, 3).unbind(1))


def check_sampled_rows(
    kb: KnowledgeBase,
    sizes: KBSizes,
    max_rows: int,
    *,
    object_identity: bool = False,
    deadline: Deadline = NO_DEADLINE,
) -> None:
    """Check by a random sample of many rules that applying all of them is likely to make no more rows than allowed.

    Of few rules a sample does not tell: nothing is checked.

    Args:
      max_rows: of all rules, with object identity those of their circular heads included.
      object_identity: different variables of a rule bind different constants, none of which the rule names.
      deadline: ends the check.

    Raises:
      RowBudgetExceeded: the sample makes more than its share, or the time is over.
    """
    n_sampled = int(sizes.n_rules * SAMPLED_RULES_SHARE)
    if n_sampled < MIN_SAMPLED_RULES:
        return

    drawn = np.random.default_rng(0).permutation(sizes.n_rules)[:n_sampled]
    share = max_rows * n_sampled // sizes.n_rules
    sampled = iter_consequences(
        kb,
        sizes,
        rule_ids=sorted(drawn.tolist()),
        leave_one_out=object_identity,
        object_identity=object_identity,
        budget=RowBudget(share, deadline=deadline),
    )
    try:
        for _ in sampled:
            pass
    except TimeBudgetExceeded:
        raise
    except RowBudgetExceeded:
        raise RowBudgetExceeded(
            f"more than {max_rows:,} rows of joins, by a random sample of {n_sampled:,} of {sizes.n_rules:,} rules"
        ) from None


def _known_rows(
    counts: I64[Tensor, "R 3"] | None,
) -> dict[int, tuple[int, ...]]:
    """The rows of counts by rule, without those of -1."""
    if counts is None:
        return {}
    columns = [int_list(column) for column in counts.unbind(1)]
    return {rule: row for rule, row in enumerate(zip(*columns)) if row[0] >= 0}


def _iter_counts(
    kb: KnowledgeBase,
    sizes: KBSizes,
    rule_ids: Sequence[int],
    object_identity: bool,
    budget: RowBudget | None,
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield some rules with their counts, columns as in `RuleCounts`."""
    relations = _relations_of(kb, rule_ids)
    for applied in _apply_rules(
        kb, sizes, relations, rule_ids, object_identity, budget
    ):
        circular = _circular_heads(kb, sizes, relations, applied, budget)
        yield (
            applied.rule.id,
            (
                int((applied.fact >= 0).sum()),
                len(applied.fact),
                circular[0].numel(),
            ),
        )


def with_confidence(
    kb: KnowledgeBase,
    counts: RuleCounts,
    smoothing: float | None = None,
) -> KnowledgeBase:
    """The knowledge base with the `support` and the `body_pairs` that confidences are computed from.

    Args:
      counts: of its rules.
      smoothing: None for plain counts. Otherwise a fact that a rule derives only from bodies that contain the fact
        itself does not count, and this number is added to the body pairs, so that few examples give less confidence
        (the miner ranks rules in this way).
    """
    support, body_pairs, circular = counts
    if smoothing is not None:
        support, body_pairs = support - circular, body_pairs - circular
    return kb._replace(
        support=support.to(kb.support.dtype),
        body_pairs=body_pairs.to(kb.support.dtype) + (smoothing or 0.0),
    )


def iter_derivations(
    kb: KnowledgeBase,
    sizes: KBSizes,
    model: LeastModel,
    max_height: int,
    atoms: I32[Tensor, "L W"],
    leave_one_out: bool = True,
    budget: RowBudget | None = None,
    progress: CountCallback | None = None,
) -> Iterator[Derivations]:
    """Yield, for one rule after another, the atoms of a list that it derives in step `max_height` of T_P.

    The atoms of a body are those that T_P derives in `max_height - 1` steps.

    Args:
      model: holds at least `max_height - 1` steps of T_P; its object identity applies to the rules.
      atoms: the list; distinct, in lexicographic order.
      leave_one_out: omit an atom that the rule derives only from bodies that contain the atom itself.
      budget: bounds the rows that the joins make; None for no bound.
      progress: is called after each rule; None for no reports.

    Raises:
      RowBudgetExceeded: the joins make more rows than the budget allows.
    """
    # Above height 1, bodies may hold derived atoms: apply the rules to a knowledge base in which those are facts.
    body_kb = kb
    if max_height > 1:
        body_kb = _with_facts(kb, sizes, model.atoms[model.height < max_height])

    _, atom_index = sort_and_index_atoms(
        atoms.long(), sizes.n_predicates, sizes.n_constants
    )
    predicates = set(int_list(unique_values(atoms[:, 0])))
    head_predicates = int_list(kb.rules[:, 0, 0])
    rule_ids = [
        i
        for i, predicate in enumerate(head_predicates)
        if predicate in predicates
    ]
    parts = iter_consequences(
        body_kb,
        sizes,
        rule_ids=rule_ids,
        leave_one_out=leave_one_out,
        object_identity=model.object_identity,
        budget=budget,
        progress=progress,
    )
    for part in parts:
        row = find_atoms(atom_index, sizes, part.atoms.long())
        is_listed = row >= 0
        yield Derivations(
            atom_row=row[is_listed],
            rule=part.rule[is_listed],
        )


def collect_derivations(
    kb: KnowledgeBase,
    sizes: KBSizes,
    model: LeastModel,
    max_height: int,
    atoms: I32[Tensor, "L W"],
) -> Derivations:
    """The derivations by all rules in one table, with leave-one-out; arguments as for `iter_derivations`."""
    parts = iter_derivations(kb, sizes, model, max_height, atoms)
    none = torch.zeros(0, dtype=torch.int64, device=atoms.device)
    empty = Derivations(none, none)
    return Derivations(*(torch.cat(columns) for columns in zip(empty, *parts)))


def _with_facts(
    kb: KnowledgeBase, sizes: KBSizes, facts: I32[Tensor, "N W"]
) -> KnowledgeBase:
    """A knowledge base of other facts and the same rules."""
    other, _ = build(
        facts.cpu().numpy(),
        kb.rules.cpu().numpy(),
        n_constants=sizes.n_constants,
        n_predicates=sizes.n_predicates,
        device=facts.device,
    )
    return other


def _find_facts(
    predicate: int,
    columns: Columns,
    relations: dict[int, Relation],
    kb: KnowledgeBase,
    sizes: KBSizes,
) -> I64[Tensor, "n"]:
    """The fact id of each atom of a predicate, given by its argument columns; -1 if it is not a fact."""
    if predicate not in relations:
        return torch.full_like(columns[0], -1)
    row, is_fact = find_rows(columns, relations[predicate], sizes.n_constants)
    return torch.where(is_fact, kb.fact_offsets[predicate] + row, -1)


def _derive_heads(
    rule: Rule,
    relations: dict[int, Relation],
    sizes: KBSizes,
    inequalities: Sequence[Inequality],
    device: torch.device,
    budget: RowBudget | None,
) -> Columns:
    """The argument columns of a rule's heads, each head once."""
    no_head = torch.empty(0, dtype=torch.int64, device=device)
    no_heads = (no_head,) * (len(rule.head) - 1)
    if any(atom[0] not in relations for atom in rule.body):
        return no_heads
    query = body_query(
        rule,
        [relations[atom[0]] for atom in rule.body],
        sizes.n_constants,
        inequalities,
        budget=budget,
    )

    # Merge when the pending rows outgrow the distinct ones: memory stays bounded, sorting stays rare.
    tables: list[Table] = []
    n_pending, n_distinct = 0, 0
    for table in joins.iter_answers(query):
        tables.append(table)
        n_pending += table.size
        if n_pending > max(joins.MAX_CHUNK_ROWS, n_distinct):
            tables = [joins.union(tables, query.constant_bits)]
            n_pending, n_distinct = 0, tables[0].size
    if not tables:
        return no_heads
    answers = joins.union(tables, query.constant_bits)
    return head_columns(rule, answers, device)


def _circular_heads(
    kb: KnowledgeBase,
    sizes: KBSizes,
    relations: dict[int, Relation],
    applied: _AppliedRule,
    budget: RowBudget | None,
) -> Columns:
    """The heads of a rule that are facts and that the rule derives from no body without that fact."""
    device, n_constants = kb.facts.device, sizes.n_constants
    rule = applied.rule
    same_predicate = [atom for atom in rule.body if atom[0] == rule.head[0]]

    # Suspects: heads of bodies that contain the head. They are facts, as all atoms of a body are.
    parts: list[Columns] = []
    for atom in same_predicate:
        unifier = most_general_unifier(rule.head, atom, n_constants)
        if unifier is None:
            continue
        # Under object identity most rules have no such body.
        inequalities = [
            (substitute_terms(left, unifier), substitute_terms(right, unifier))
            for left, right in applied.inequalities
        ]
        instance = substitute_rule(rule, unifier)
        parts.append(
            _derive_heads(
                instance, relations, sizes, inequalities, device, budget
            )
        )
    suspects = _distinct_rows(parts, sizes, device)
    if not suspects[0].numel():
        return suspects

    # Join the suspects with the bodies in which no atom equals the head: what is left has a derivation without itself.
    query = body_query(
        rule,
        [relations[atom[0]] for atom in rule.body],
        n_constants,
        applied.inequalities,
        budget=budget,
    )
    is_suspect = make_literal(_relation(suspects), rule.head[1:], n_constants)
    differs_from_head = [(rule.head[1:], atom[1:]) for atom in same_predicate]
    query = replace(
        query,
        literals=(is_suspect, *query.literals),
        inequalities=(*applied.inequalities, *differs_from_head),
    )
    derivable = _distinct_rows(
        [
            head_columns(rule, table, device)
            for table in joins.iter_answers(query)
        ],
        sizes,
        device,
    )
    is_circular = _is_not_among(suspects, derivable, sizes)
    return tuple(column[is_circular] for column in suspects)


def _relation(columns: Columns) -> Relation:
    """The relation of distinct rows in lexicographic order."""
    return Relation(columns, columns[0].numel())


def _distinct_rows(
    parts: Sequence[Columns], sizes: KBSizes, device: torch.device
) -> Columns:
    """The distinct rows of some tables of arguments, in lexicographic order."""
    arity = sizes.atom_width - 1
    empty = torch.empty(0, dtype=torch.int64, device=device)
    no_rows = (empty,) * arity
    columns = tuple(torch.cat(pieces) for pieces in zip(no_rows, *parts))
    bits = sizes.n_constants.bit_length()
    return row_index.unique_columns(columns, [bits] * arity)


def _is_not_among(
    columns: Columns, excluded: Columns, sizes: KBSizes
) -> Bool[Tensor, "n"]:
    """Whether each row is not among the excluded ones, which are distinct and in lexicographic order."""
    _, is_excluded = find_rows(columns, _relation(excluded), sizes.n_constants)
    return ~is_excluded
