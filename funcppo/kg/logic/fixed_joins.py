"""Firings of the rules that are no path rules, in tables of fixed size.

As in `firings`, the rules of one shape are a conjunctive query together. Here the order of its literals is static: the
question first, then always the literal with the fewest rows for what is bound, on average over its relation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from funcppo.core.types import I64, Bool
from funcppo.kg.logic import fixed_rows, row_index, sorting
from funcppo.kg.logic.firings import (
    FiringPlan,
    RuleGroup,
    body_literals,
    identity_constraints,
    unknown_facts,
)
from funcppo.kg.logic.fixed_rows import Stages
from funcppo.kg.logic.joins import ConjunctiveQuery, Inequality
from funcppo.kg.logic.question_types import Firings, LeftOut, Questions
from funcppo.kg.logic.relations import (
    IndexedView,
    Literal,
    Relation,
    indexed_view,
    make_literal,
)
from funcppo.kg.logic.triple_index import HEAD, TAIL

Columns = dict[int, I64[Tensor, "n"]]  # by variable


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinStep:
    """A literal to join.

    Attributes:
      shared: the variables that are bound already.
      bits: hold any value of them.
      new: those that it binds; without any, rows without a match are dropped and no others made.
      inequalities: whose variables are bound from now on.
      kept: the variables that are needed later.
    """

    shared: tuple[int, ...]
    bits: int
    new: tuple[int, ...]
    inequalities: tuple[Inequality, ...]
    kept: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleJoin:
    """How the rules of one shape fire for the questions about one side: the variables, and the literals in order."""

    side: int
    predicate: int
    given: int
    unknown: int
    asked: int
    rule: int
    steps: tuple[JoinStep, ...]


class JoinView(NamedTuple):
    """The rows of a literal, by those of its variables that are bound already; at least one."""

    key_prefixes: tuple[I64[Tensor, "p"], ...]
    keys: I64[Tensor, "n"]
    new_columns: tuple[I64[Tensor, "n"], ...]
    counts: I64[Tensor, "n"]


def iter_rule_joins(
    plan: FiringPlan, left_out: LeftOut, object_identity: bool
) -> Iterator[tuple[RuleJoin, tuple[JoinView, ...]]]:
    """Yield the joins of all rules that may fire; see `firings.iter_firings`."""
    for rules in plan.groups:
        body = body_literals(plan, rules.template)
        if body is None:
            continue
        for side in (HEAD, TAIL):
            unknown = 1 + rules.variables[-1]
            inequalities = unknown_facts(
                rules.template, side, unknown, left_out
            )
            if object_identity:
                inequalities += identity_constraints(rules)
            literals = (_values_literal(plan, rules, unknown + 1), *body)
            join, views = _plan_join(plan, rules, side, literals, inequalities)
            if all(view.size for view in views):
                yield join, tuple(map(_join_view, join.steps, views))


def _values_literal(
    plan: FiringPlan, rules: RuleGroup, rule_variable: int
) -> Literal:
    """What the variables of a template stand for in each rule, and the rule."""
    columns = (*rules.values.columns, rules.rule)
    return make_literal(
        Relation(columns, rules.values.size),
        (*rules.variables, rule_variable),
        plan.n_ids,
    )


def _plan_join(
    plan: FiringPlan,
    rules: RuleGroup,
    side: int,
    literals: Sequence[Literal],
    inequalities: Sequence[Inequality],
) -> tuple[RuleJoin, list[IndexedView]]:
    """The order of the literals, and the view of each."""
    head = rules.template.head
    given, asked = head[HEAD + TAIL - side], head[side]
    unknown = 1 + rules.variables[-1]
    bound = {head[0], given, unknown}
    query = ConjunctiveQuery(
        tuple(literals), (asked, unknown + 1), tuple(inequalities), plan.n_ids
    )

    steps: list[JoinStep] = []
    views: list[IndexedView] = []
    remaining = list(literals)
    later = list(inequalities)
    while remaining:
        options = [
            _plan_step(query, remaining, i, later, bound)
            for i in range(len(remaining))
        ]
        n_rows = [_mean_rows(step, view) for step, view in options]
        i = n_rows.index(min(n_rows))
        step, view = options[i]
        bound |= remaining.pop(i).variables
        later = [u for u in later if u not in step.inequalities]
        steps.append(step)
        views.append(view)

    join = RuleJoin(
        side=side,
        predicate=head[0],
        given=given,
        unknown=unknown,
        asked=asked,
        rule=unknown + 1,
        steps=tuple(steps),
    )
    return join, views


def _plan_step(
    query: ConjunctiveQuery,
    remaining: Sequence[Literal],
    i: int,
    inequalities: Sequence[Inequality],
    bound: set[int],
) -> tuple[JoinStep, IndexedView]:
    """The step that joins a literal now, and the view that it reads.

    Args:
      remaining: literals that are not joined yet.
      i: which of them to join.
      inequalities: not checked yet.
    """
    literal = remaining[i]
    others = [*remaining[:i], *remaining[i + 1 :]]
    now_bound = bound | literal.variables
    now: list[Inequality] = []
    later: list[Inequality] = []
    for inequality in inequalities:
        is_bound = query.variables_in(*inequality) <= now_bound
        (now if is_bound else later).append(inequality)

    useful = query.needed_variables(others, inequalities)
    terms = [t for t in dict.fromkeys(literal.terms) if t in literal.variables]
    shared = tuple(t for t in terms if t in bound)
    new = tuple(t for t in terms if t not in bound and t in useful)
    # Relations of facts keep their views, which `firings` reads with these bits too; ids of rules may need more.
    largest = max(query.n_constants, _largest_rule(literal, query))
    view = indexed_view(
        literal, shared + new, len(shared), largest, is_counted=True
    )
    step = JoinStep(
        shared=shared,
        bits=largest.bit_length(),
        new=new,
        inequalities=tuple(now),
        kept=tuple(sorted(query.needed_variables(others, later) & now_bound)),
    )
    return step, view


def _largest_rule(literal: Literal, query: ConjunctiveQuery) -> int:
    """The largest id of a rule in a relation, the last variable of the output; 0 in a relation of facts."""
    if query.output_variables[-1] not in literal.variables:
        return 0
    return int(literal.relation.columns[-1].amax())


def _mean_rows(step: JoinStep, view: IndexedView) -> float:
    """Rows of a view that agree with what is bound, on average over what it holds."""
    if not step.shared or not view.size:
        return view.size
    n_keys = int(sorting.first_of_run(view.keys).sum())
    return view.size / n_keys


def _join_view(step: JoinStep, view: IndexedView) -> JoinView:
    """The tensors of a view that a step reads."""
    assert view.counts is not None  # joins are counted
    new_columns = view.columns[len(step.shared) :]
    return JoinView(view.key_prefixes, view.keys, new_columns, view.counts)


def join_rules(
    join: RuleJoin,
    views: Sequence[JoinView],
    questions: Questions,
    stages: Stages,
    capacities: tuple[int, ...] | int,
) -> tuple[Stages, Firings]:
    """The firings of some rules, without walks; a question and a candidate may have a rule more than once.

    Args:
      questions: after the last of them one that empty places belong to.
    """
    n_questions = len(stages.overflow) - 1
    row = torch.arange(n_questions + 1, device=questions.entity.device)
    question = torch.where(questions.side == join.side, row, n_questions)
    n_groundings = torch.ones_like(row)
    columns = {
        join.predicate: questions.predicate,
        join.given: questions.entity,
        join.unknown: questions.left_out,
    }
    for step, view in zip(join.steps, views, strict=True):
        start, count = _agreeing_rows(step, view, columns, question)
        if step.new:
            stages, pairs = fixed_rows.expand(
                stages, capacities, question, start, count
            )
            question = pairs.question
            added = (column[pairs.position] for column in view.new_columns)
            columns = {v: c[pairs.row] for v, c in columns.items()}
            columns |= dict(zip(step.new, added, strict=True))
            n_rows = view.counts[pairs.position]
            n_groundings = n_groundings[pairs.row] * n_rows
        else:
            found = count > 0
            question = torch.where(found, question, n_questions)
            n_rows = view.counts[torch.where(found, start, 0)]
            n_groundings = n_groundings * n_rows
        for inequality in step.inequalities:
            is_kept = _is_satisfied(inequality, columns, question)
            question = torch.where(is_kept, question, n_questions)
        columns = {v: columns[v] for v in step.kept}
    return stages, Firings(
        question,
        columns[join.asked],
        columns[join.rule],
        n_groundings,
        n_groundings[:0],
    )


def _agreeing_rows(
    step: JoinStep,
    view: JoinView,
    columns: Columns,
    question: I64[Tensor, "n"],
) -> row_index.Span:
    """The rows of a view that agree with each row of a table."""
    if not step.shared:
        start = torch.zeros_like(question)
        return row_index.Span(start, start + len(view.counts))
    key, found = row_index.encode_with_prefixes(
        view.key_prefixes,
        [columns[v] for v in step.shared],
        [step.bits] * len(step.shared),
    )
    start = torch.searchsorted(view.keys, key)
    end = torch.searchsorted(view.keys, key, right=True)
    return row_index.Span(start, torch.where(found, end - start, 0))


def _is_satisfied(
    inequality: Inequality, columns: Columns, question: I64[Tensor, "n"]
) -> Bool[Tensor, "n"]:
    """Whether two tuples of terms differ in each row of a table."""
    differs = torch.zeros_like(question, dtype=torch.bool)
    for left, right in zip(*inequality, strict=True):
        if left != right:
            one = columns.get(left, left)
            differs = differs | (one != columns.get(right, right))
    return differs
