"""Which rules derive which answers of a question, and from how many groundings of their bodies.

A question asks for one argument of a binary predicate: `h(x, ?)` or `h(?, y)`. A rule fires for a candidate if one
application of it to the facts derives the atom with the candidate in the place that is asked for; a grounding is an
assignment of the rule's variables that makes its body true.

Path rules are walked together (`logic.chains`). The others are conjunctive queries, and those that differ in their
constants and the predicate of their head alone are solved as one: these become variables, and a relation holds their
values in each rule. If the body is a single atom, its predicate becomes a variable too, of a relation of all facts, so
that thousands of rules about hundreds of predicates have a handful of shapes. `plan_firings` and `iter_firings` are the
entry points.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from funcppo.core import garbage_collection
from funcppo.kg.logic import chains, joins, row_index
from funcppo.kg.logic.chains import ChainPlan
from funcppo.kg.logic.joins import ConjunctiveQuery, Inequality, RowBudget
from funcppo.kg.logic.kb import KBSizes, KnowledgeBase
from funcppo.kg.logic.question_types import (
    Firings,
    LeftOut,
    Questions,
)
from funcppo.kg.logic.relations import (
    Literal,
    Relation,
    Table,
    find_rows,
    make_literal,
)
from funcppo.kg.logic.rules import (
    Atom,
    Rule,
    relations_by_predicate,
    rules_from_kb,
)
from funcppo.kg.logic.sorting import sort_keys, unique_values
from funcppo.kg.logic.triple_index import HEAD, TAIL
from funcppo.kg.logic.typed_torch import int_list


@dataclass(frozen=True, slots=True)
class _QuestionGroup:
    """The questions about one side."""

    side: int
    row: Tensor  # of each question, in the order of the relation
    relation: Relation  # (predicate, entity, left out) of each question


@dataclass(frozen=True, slots=True)
class RuleGroup:
    """Rules of one shape: they differ in what a template has variables for."""

    template: Rule
    variables: tuple[int, ...]  # those of the template that rules differ in
    values: Relation  # what they stand for in each rule, in the same order
    rule: Tensor  # id of each rule, in the order of the relation
    predicates: frozenset[int]  # of the heads of all rules


@dataclass(frozen=True, slots=True)
class FiringPlan:
    """What questions are answered from."""

    sizes: KBSizes
    chains: ChainPlan
    facts: Relation  # (predicate, arguments) of bodies of a single atom
    relations: dict[int, Relation]  # of the facts that longer bodies name
    groups: tuple[RuleGroup, ...]  # the rules that are no path rules
    memory_share: float = 1.0  # of the largest chunks of questions
    with_walks: bool = False  # firings have the probabilities of random walks

    @property
    def n_ids(self) -> int:
        """The largest constant or predicate; terms of templates above are variables."""
        return _n_ids(self.sizes)


@garbage_collection.paused()
def plan_firings(
    kb: KnowledgeBase,
    sizes: KBSizes,
    memory_share: float = 1.0,
    *,
    with_walks: bool = False,
) -> FiringPlan:
    """Index the facts and group the rules: once for any number of questions.

    Args:
      memory_share: of the largest chunks of questions whose firings may be held at once.
      with_walks: the firings have the probabilities of random walks.
    """
    path_rules: list[tuple[Rule, tuple[int, ...]]] = []
    others: list[Rule] = []
    for rule in rules_from_kb(kb):
        steps = chains.chain_steps(rule, sizes.n_constants)
        if steps is not None:
            path_rules.append((rule, steps))
        elif chains.binary_atom(rule.head):  # others answer no question
            others.append(rule)

    in_single: set[int] = set()
    in_longer: set[int] = set()
    for rule in others:
        named = in_single if len(rule.body) == 1 else in_longer
        named.update(atom[0] for atom in rule.body)
    return FiringPlan(
        sizes,
        chains.plan_chains(kb, sizes, path_rules),
        _facts_of(kb, in_single),
        relations_by_predicate(kb.facts, in_longer),
        tuple(_group_rules(others, sizes, kb.facts.device)),
        memory_share,
        with_walks,
    )


def _n_ids(sizes: KBSizes) -> int:
    """The largest constant or predicate."""
    return max(sizes.n_constants, sizes.n_predicates)


def _shift(sizes: KBSizes) -> int:
    """What is added to a variable, so that it is larger than all predicates too."""
    return _n_ids(sizes) - sizes.n_constants


def _facts_of(kb: KnowledgeBase, predicates: set[int]) -> Relation:
    """The facts of some predicates, which are in lexicographic order: their predicate and their arguments."""
    wanted = kb.facts.new_tensor(sorted(predicates))
    facts = kb.facts[torch.isin(kb.facts[:, 0], wanted)].long()
    columns = tuple(column.contiguous() for column in facts.unbind(1))
    return Relation(columns, len(facts))


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
        with_walks=plan.with_walks,
    )
    asked = set(int_list(unique_values(questions.predicate)))
    question_groups = _group_questions(questions, plan.sizes)
    for rules in plan.groups:
        if asked.isdisjoint(rules.predicates):
            continue
        body = body_literals(plan, rules.template)
        if body is None:
            continue
        query = ConjunctiveQuery(
            body,
            output_variables=(),
            inequalities=tuple(
                identity_constraints(rules) if object_identity else ()
            ),
            n_constants=plan.n_ids,
            budget=budget,
            is_counted=True,
        )
        for group in question_groups:
            for part in _fire(rules, query, group, left_out):
                none = part.rule.new_zeros(len(part.rule))
                yield part._replace(walk=none) if plan.with_walks else part


def body_literals(
    plan: FiringPlan, template: Rule
) -> tuple[Literal, ...] | None:
    """The literals of a template's body; None if no fact has one of its predicates."""
    literals: list[Literal] = []
    for predicate, *arguments in template.body:
        if predicate > plan.n_ids:
            relation = plan.facts
            terms = (predicate, *arguments)
        elif predicate in plan.relations:
            relation = plan.relations[predicate]
            terms = tuple(arguments)
        else:
            return None
        literals.append(make_literal(relation, terms, plan.n_ids))
    return tuple(literals)


def _group_questions(
    questions: Questions, sizes: KBSizes
) -> list[_QuestionGroup]:
    """The questions by side."""
    columns = (questions.predicate, questions.entity, questions.left_out)
    bits = [_n_ids(sizes).bit_length()] * len(columns)
    groups: list[_QuestionGroup] = []
    for side in (HEAD, TAIL):
        row = (questions.side == side).nonzero().squeeze(1)
        if not len(row):
            continue
        of_side = tuple(column[row] for column in columns)
        _, keys = row_index.encode_rows(of_side, bits)
        order = sort_keys(keys).order
        relation = Relation(tuple(c[order] for c in of_side), len(row))
        groups.append(_QuestionGroup(side, row[order], relation))
    return groups


def _group_rules(
    rules: Sequence[Rule], sizes: KBSizes, device: torch.device
) -> Iterator[RuleGroup]:
    """Yield the rules, those of one shape together; a repeated rule in a group of its own."""
    largest = max(
        [sizes.n_constants]
        + [t for r in rules for atom in (r.head, *r.body) for t in atom[1:]]
    )
    first_lifted = 1 + largest + _shift(sizes)
    groups: dict[tuple[Rule, int], dict[tuple[int, ...], int]] = {}
    for rule in rules:
        template, values = _lift(rule, sizes, first_lifted)
        repetition = 0
        while values in groups.get((template, repetition), {}):
            repetition += 1
        group = groups.setdefault((template, repetition), {})
        group[values] = rule.id

    for (template, _), members in groups.items():
        rows = sorted(members)
        columns = torch.tensor(rows, dtype=torch.int64, device=device)
        n_lifted = len(rows[0])
        yield RuleGroup(
            template=template,
            variables=tuple(range(first_lifted, first_lifted + n_lifted)),
            values=Relation(
                tuple(c.contiguous() for c in columns.unbind(1)), len(rows)
            ),
            rule=torch.tensor([members[row] for row in rows], device=device),
            predicates=frozenset(head for head, *_ in rows),
        )


def _lift(
    rule: Rule, sizes: KBSizes, first_lifted: int
) -> tuple[Rule, tuple[int, ...]]:
    """The template of a rule, and what its new variables stand for, the predicate of the head first.

    Args:
      first_lifted: the first of the new variables, which are the largest terms.
    """
    values: list[int] = []

    def lift(value: int) -> int:
        values.append(value)
        return first_lifted + len(values) - 1

    def lift_atom(atom: Atom, lifts_predicate: bool) -> Atom:
        terms = [lift(atom[0]) if lifts_predicate else atom[0]]
        for term in atom[1:]:
            if term > sizes.n_constants:
                terms.append(term + _shift(sizes))
            else:
                terms.append(lift(term) if term else 0)
        return tuple(terms)

    head = lift_atom(rule.head, True)
    is_single = len(rule.body) == 1
    body = tuple(lift_atom(atom, is_single) for atom in rule.body)
    return Rule(0, head, body), tuple(values)


def identity_constraints(rules: RuleGroup) -> list[Inequality]:
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
    rules: RuleGroup,
    query: ConjunctiveQuery,
    group: _QuestionGroup,
    left_out: LeftOut,
) -> Iterator[Firings]:
    """Yield the firings of some rules for the questions of a group."""
    n_ids = query.n_constants
    head = rules.template.head
    given = head[HEAD + TAIL - group.side]
    asked = head[group.side]

    # The answer that is left out is one more variable, which only the questions bind.
    unknown = 1 + rules.variables[-1]
    question = make_literal(group.relation, (head[0], given, unknown), n_ids)
    values = make_literal(rules.values, rules.variables, n_ids)
    output = {given, unknown, asked, *rules.variables}
    query = replace(
        query,
        literals=(question, values, *query.literals),
        # Rules of all predicates, joined first, would meet all questions.
        first=question if len(query.literals) == 1 else None,
        inequalities=(
            *query.inequalities,
            *unknown_facts(rules.template, group.side, unknown, left_out),
        ),
        output_variables=tuple(sorted(output)),
    )
    tables = list(joins.iter_answers(query))
    if tables:
        answers = joins.union(tables, query.constant_bits)
        yield _to_firings(rules, group, answers, (given, unknown, asked), n_ids)


def unknown_facts(
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
        else:
            inequalities.append(
                ((template.head[0], *fact), (atom[0], *arguments))
            )
    return inequalities


def _to_firings(
    rules: RuleGroup,
    group: _QuestionGroup,
    answers: Table,
    terms: tuple[int, int, int],
    n_ids: int,
) -> Firings:
    """The answers of some rules as firings.

    Args:
      terms: the variable of the given argument, of the answer that is left out, and of the argument that is asked for.
    """
    counts = answers.counts
    assert counts is not None  # the query is counted
    columns = dict(zip(answers.variables, answers.columns))
    given, unknown, candidate = (columns[term] for term in terms)
    values = tuple(columns[v] for v in rules.variables)
    rule, _ = find_rows(values, rules.values, n_ids)
    predicate = values[0]
    question, _ = find_rows((predicate, given, unknown), group.relation, n_ids)
    return Firings(
        question=group.row[question],
        candidate=candidate,
        rule=rules.rule[rule],
        n_groundings=counts,
        walk=counts[:0],
    )
