"""Which rules derive which answers of a question, and from how many groundings of their bodies.

A question asks for one argument of a binary predicate: `h(x, ?)` or `h(?, y)`. A rule fires for a candidate if one
application of it to the facts derives the atom with the candidate in the place that is asked for; a grounding is an
assignment of the rule's variables that makes its body true.

Path rules are walked together (`logic.chains`). The others are conjunctive queries, and those that differ in their
constants alone are solved as one: the constants become variables, and a relation holds the constants of each rule.
`plan_firings` and `iter_firings` are the entry points.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from funcppo.logic import chains, joins
from funcppo.logic.chains import ChainPlan
from funcppo.logic.joins import ConjunctiveQuery, Inequality, RowBudget
from funcppo.logic.kb import KBSizes, KnowledgeBase
from funcppo.logic.question_types import Firings, LeftOut, Questions
from funcppo.logic.relations import (
    Relation,
    Table,
    find_rows,
    make_literal,
)
from funcppo.logic.rules import (
    Atom,
    Rule,
    body_query,
    relations_by_predicate,
    rules_from_kb,
)
from funcppo.logic.sorting import sort_keys, unique_values
from funcppo.logic.triple_index import HEAD, TAIL
from funcppo.logic.typed_torch import int_list


@dataclass(frozen=True, slots=True)
class _QuestionGroup:
    """The questions about one side of one predicate."""

    side: int
    row: Tensor  # of each question, in the order of the relation
    relation: Relation  # (entity, left out) of each question


@dataclass(frozen=True, slots=True)
class _RuleGroup:
    """Rules that differ in their constants alone."""

    template: Rule  # with variables in place of the constants
    variables: tuple[int, ...]  # those that stand for constants
    constants: Relation  # the constants of each rule, in the same order
    rule: Tensor  # id of each rule, in the order of the relation


@dataclass(frozen=True, slots=True)
class FiringPlan:
    """What questions are answered from."""

    sizes: KBSizes
    chains: ChainPlan
    relations: dict[int, Relation]  # of the facts that `groups` name
    groups: tuple[_RuleGroup, ...]  # the rules that are no path rules
    memory_share: float = 1.0  # of the largest chunks of questions


def plan_firings(
    kb: KnowledgeBase, sizes: KBSizes, memory_share: float = 1.0
) -> FiringPlan:
    """Index the facts and group the rules: once for any number of questions.

    Args:
      memory_share: of the largest chunks of questions whose firings may be held at once.
    """
    path_rules: list[tuple[Rule, tuple[int, ...]]] = []
    others: list[Rule] = []
    for rule in rules_from_kb(kb):
        steps = chains.chain_steps(rule, sizes.n_constants)
        if steps is None:
            others.append(rule)
        else:
            path_rules.append((rule, steps))
    return FiringPlan(
        sizes,
        chains.plan_chains(kb, sizes, path_rules),
        relations_by_predicate(
            kb.facts, {atom[0] for rule in others for atom in rule.body}
        ),
        tuple(_group_rules(others, sizes, kb.facts.device)),
        memory_share,
    )


def iter_firings(
    plan: FiringPlan,
    questions: Questions,
    *,
    left_out: LeftOut = "fact",
    object_identity: bool = False,
    budget: RowBudget | None = None,
) -> Iterator[Firings]:
    """Yield the firings of some rules after others, on one side after the other, each once.

    A grounding that uses a fact that its question leaves out does not count; this holds for all candidates alike.

    Args:
      questions: distinct.
      left_out: what a question with an answer to leave out leaves out; "pair" is every fact between the two entities.
      object_identity: different variables of a rule bind different constants, none of which the rule names.
      budget: bounds the rows that the joins make; None for no bound.

    Raises:
      RowBudgetExceeded: the joins make more rows than the budget allows.
    """
    yield from chains.iter_chain_firings(
        plan.chains,
        plan.sizes,
        questions,
        left_out=left_out,
        object_identity=object_identity,
        budget=budget,
    )
    question_groups = _group_questions(questions, plan.sizes)
    for rules in plan.groups:
        template = rules.template
        if any(atom[0] not in plan.relations for atom in template.body):
            continue
        query = body_query(
            template,
            [plan.relations[atom[0]] for atom in template.body],
            plan.sizes.n_constants,
            _identity_constraints(rules) if object_identity else (),
            budget=budget,
        )
        query = replace(query, is_counted=True)
        for group in question_groups.get(template.head[0], ()):
            yield from _fire(rules, query, group, left_out)


def _group_questions(
    questions: Questions, sizes: KBSizes
) -> dict[int, list[_QuestionGroup]]:
    """The questions by predicate and side."""
    base = sizes.n_constants + 1
    groups: dict[int, list[_QuestionGroup]] = {}
    for predicate in int_list(unique_values(questions.predicate)):
        groups[predicate] = []
        for side in (HEAD, TAIL):
            is_member = questions.predicate == predicate
            row = (is_member & (questions.side == side)).nonzero().squeeze(1)
            if not len(row):
                continue
            keys = questions.entity[row] * base + questions.left_out[row]
            keys, order = sort_keys(keys)
            relation = Relation((keys // base, keys % base), len(row))
            groups[predicate].append(_QuestionGroup(side, row[order], relation))
    return groups


def _group_rules(
    rules: Sequence[Rule], sizes: KBSizes, device: torch.device
) -> Iterator[_RuleGroup]:
    """Yield the rules, those together that differ in their constants alone; a repeated rule in a group of its own."""
    first_variable = 1 + max(
        [sizes.n_constants]
        + [t for r in rules for atom in (r.head, *r.body) for t in atom[1:]]
    )
    groups: dict[tuple[Rule, int], dict[tuple[int, ...], int]] = {}
    for rule in rules:
        template, constants = _lift_constants(
            rule, sizes.n_constants, first_variable
        )
        repetition = 0
        while constants in groups.get((template, repetition), {}):
            repetition += 1
        group = groups.setdefault((template, repetition), {})
        group[constants] = rule.id

    for (template, _), members in groups.items():
        rows = sorted(members)
        columns = torch.tensor(rows, dtype=torch.int64, device=device)
        n_lifted = len(rows[0])
        yield _RuleGroup(
            template=template,
            variables=tuple(range(first_variable, first_variable + n_lifted)),
            constants=Relation(
                tuple(c.contiguous() for c in columns.unbind(1)), len(rows)
            ),
            rule=torch.tensor([members[row] for row in rows], device=device),
        )


def _lift_constants(
    rule: Rule, n_constants: int, first_variable: int
) -> tuple[Rule, tuple[int, ...]]:
    """The rule with a new variable for each occurrence of a constant, and these constants."""
    constants: list[int] = []

    def lift(atom: Atom) -> Atom:
        terms = [atom[0]]
        for term in atom[1:]:
            if 0 < term <= n_constants:
                constants.append(term)
                term = first_variable + len(constants) - 1
            terms.append(term)
        return tuple(terms)

    head, *body = (lift(atom) for atom in (rule.head, *rule.body))
    return Rule(0, head, tuple(body)), tuple(constants)


def _identity_constraints(rules: _RuleGroup) -> list[Inequality]:
    """Inequalities that keep the variables of rules apart from each other and from the constants."""
    template = rules.template
    terms = sorted(
        {t for a in (template.head, *template.body) for t in a[1:] if t}
    )
    # Variables that stand for constants have the largest ids.
    return [
        ((first,), (second,))
        for i, second in enumerate(terms)
        for first in terms[:i]
        if first not in rules.variables
    ]


def _fire(
    rules: _RuleGroup,
    query: ConjunctiveQuery,
    group: _QuestionGroup,
    left_out: LeftOut,
) -> Iterator[Firings]:
    """Yield the firings of some rules for the questions of a group."""
    n_constants = query.n_constants
    head = rules.template.head
    given = head[HEAD + TAIL - group.side]
    asked = head[group.side]

    # The answer that is left out is one more variable, which only the questions bind.
    variables = {v for literal in query.literals for v in literal.variables}
    unknown = 1 + max(variables.union(head, rules.variables))
    literals = [make_literal(group.relation, (given, unknown), n_constants)]
    if rules.variables:
        literals.append(
            make_literal(rules.constants, rules.variables, n_constants)
        )
    output = {given, unknown, asked, *rules.variables}
    query = replace(
        query,
        literals=(*literals, *query.literals),
        inequalities=(
            *query.inequalities,
            *_unknown_facts(rules.template, group.side, unknown, left_out),
        ),
        output_variables=tuple(sorted(output)),
    )
    tables = list(joins.iter_answers(query))
    if tables:
        answers = joins.union(tables, query.constant_bits)
        terms = given, unknown, asked
        yield _to_firings(rules, group, answers, terms, n_constants)


def _unknown_facts(
    template: Rule, side: int, unknown: int, left_out: LeftOut
) -> list[Inequality]:
    """Inequalities that keep the atoms of a body apart from the facts that are left out."""
    given = template.head[HEAD + TAIL - side]
    fact = (given, unknown) if side == TAIL else (unknown, given)
    inequalities: list[Inequality] = []
    for atom in template.body:
        arguments = tuple(term for term in atom[1:] if term)
        if len(arguments) != len(fact):
            continue
        if left_out == "pair":
            inequalities += [(fact, arguments), (fact[::-1], arguments)]
        elif atom[0] == template.head[0]:
            inequalities.append((fact, arguments))
    return inequalities


def _to_firings(
    rules: _RuleGroup,
    group: _QuestionGroup,
    answers: Table,
    terms: tuple[int, int, int],
    n_constants: int,
) -> Firings:
    """The answers of some rules as firings.

    Args:
      terms: the variable of the given argument, of the answer that is left out, and of the argument that is asked for.
    """
    counts = answers.counts
    assert counts is not None  # the query is counted
    columns = dict(zip(answers.variables, answers.columns))
    given, unknown, candidate = (columns[term] for term in terms)
    question, _ = find_rows((given, unknown), group.relation, n_constants)
    rule = torch.zeros_like(question)
    if rules.variables:
        constants = tuple(columns[v] for v in rules.variables)
        rule, _ = find_rows(constants, rules.constants, n_constants)
    return Firings(
        question=group.row[question],
        candidate=candidate,
        rule=rules.rule[rule],
        n_groundings=counts,
    )
