"""One SLD resolution step: from a goal list to its successors, with fixed shapes and flagged overflow.

The leftmost goal is resolved first with every rule whose head unifies with it, then with every fact. Clauses are
matched on atoms alone; only those that unify are compacted into the S slots of a row and written out as goal lists.

Atoms are unified and renamed in batches over any leading axes. A term is an id: 0 padding, 1..C a constant, above C a
variable. Without compound terms no occurs check is needed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from funcppo.core.settings import NonNegativeInt, Size, check_fields
from funcppo.core.types import I32, I64, Bool
from funcppo.kg.logic import kb as kbase
from funcppo.kg.logic.kb import KBSizes, KnowledgeBase
from funcppo.kg.logic.row_index import broadcast, count_to


class Substitution(NamedTuple):
    """Bindings of variables to terms, J = W - 1 of them, applied one after another (triangular substitution)."""

    variable: I32[Tensor, "... J"]  # 0 binds nothing
    term: I32[Tensor, "... J"]  # what replaces the variable


def unify(
    a: I32[Tensor, "... W"], b: I32[Tensor, "... W"], n_constants: int
) -> tuple[Bool[Tensor, "..."], Substitution]:
    """Compute the most general unifier of two atoms.

    Arguments are solved left to right, each equation rewritten by the bindings before it. Where both sides are
    variables, the variable of `a` is replaced by that of `b`.

    Returns:
      Whether there is a unifier, and the most general one, meaningless where there is none.

    Source: Martelli & Montanari 1982, "An efficient unification algorithm", rules (c) and (d), for flat terms.
    """
    left, right = broadcast(a[..., 1:], b[..., 1:])
    unifies = a[..., 0] == b[..., 0]
    variables: list[Tensor] = []
    terms: list[Tensor] = []
    for j in range(left.shape[-1]):
        x = left[..., j]
        y = right[..., j]
        x_is_variable = x > n_constants
        y_is_variable = y > n_constants
        unifies = unifies & ((x == y) | x_is_variable | y_is_variable)

        # Bind a variable to the other side; variable 0 where there is nothing to bind.
        binds = (x != y) & (x_is_variable | y_is_variable)
        variable = torch.where(binds, torch.where(x_is_variable, x, y), 0)
        term = torch.where(binds, torch.where(x_is_variable, y, x), 0)

        # Apply the binding to all arguments, so that later equations see it.
        left = torch.where(left == variable[..., None], term[..., None], left)
        right = torch.where(
            right == variable[..., None], term[..., None], right
        )
        variables.append(variable)
        terms.append(term)
    return unifies, Substitution(
        torch.stack(variables, -1), torch.stack(terms, -1)
    )


def substitute(
    terms: I32[Tensor, "... L"], substitution: Substitution
) -> I32[Tensor, "... L"]:
    """Replace every bound variable by its term.

    Pass arguments only: the id of a predicate may equal that of a variable.
    """
    for j in range(substitution.variable.shape[-1]):
        is_bound = terms == substitution.variable[..., j, None]
        terms = torch.where(is_bound, substitution.term[..., j, None], terms)
    return terms


def canonicalize(
    terms: I32[Tensor, "... L"], n_constants: int
) -> I32[Tensor, "... L"]:
    """Renumber the variables of each row C + 1, C + 2, ... by first occurrence.

    Two rows are equal up to renaming exactly when their canonical forms are equal.
    """
    length = terms.shape[-1]
    slots = count_to(length, terms)

    # The slot in which each term occurs first.
    is_same = terms[..., :, None] == terms[..., None, :]
    first = torch.where(is_same, slots, length).amin(-1)

    # The rank of a variable is the number of distinct variables up to its first occurrence.
    is_variable = terms > n_constants
    rank = ((first == slots) & is_variable).cumsum(-1)
    number = (n_constants + rank.gather(-1, first)).to(terms.dtype)
    return torch.where(is_variable, number, terms)


# -- resolve


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolveConfig:
    """Static shapes and limits of a resolution step."""

    sizes: KBSizes
    max_height: Size  # a goal at this height is resolved with facts only
    max_fanout: NonNegativeInt  # F, the most facts that one lookup may return
    max_goals: NonNegativeInt  # A, goals of a conjunction
    max_successors: NonNegativeInt  # S, successors of a goal list
    # False: successors name their clause and hold no goals
    build_resolvents: bool
    # True: the goal of which most is known is resolved, not the leftmost; and
    # successors with a ground goal that nothing can prove are dropped
    selects_goal: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is out of range."""
        check_fields(self)


class Goals(NamedTuple):
    """A conjunction still to prove, canonical and left-aligned; an empty one is a proof."""

    atoms: I32[Tensor, "... A W"]
    # 0 for the root; the body of a rule is one higher than the goal that it replaces
    height: I32[Tensor, "... A"]


class Successors(NamedTuple):
    """Goal lists that one resolution step leads to, left-aligned: rules in file order, then facts in id order."""

    goals: Goals  # [B, S, A, ...]; A is 0 unless resolvents are built
    rule: I32[Tensor, "B S"]  # id of the rule applied; -1 for a fact
    fact: I32[Tensor, "B S"]  # id of the fact used; -1 for a rule
    mask: Bool[Tensor, "B S"]  # which slots hold a successor
    # a successor did not fit: more than S of them, or more than A goals
    overflow: Bool[Tensor, "B"]


class _Clauses(NamedTuple):
    """Clauses to resolve the leftmost goal of each row with."""

    clause: I64[Tensor, "B S"]  # id of a rule or a fact
    is_rule: Bool[Tensor, "B S"]
    mask: Bool[Tensor, "B S"]  # which slots hold a clause that unifies
    overflow: Bool[Tensor, "B"]


def make_resolve_config(
    kb: KnowledgeBase, sizes: KBSizes, max_height: int
) -> ResolveConfig:
    """Return the smallest shapes and limits with which no search from a ground query can overflow.

    A rule replaces the leftmost goal by at most M - 1 others one higher, so at most 1 + max_height (M - 2) are open.
    """
    n_body = max(sizes.max_rule_atoms - 1, 1)
    fanout = kbase.compute_max_fanout(kb, sizes, max_height)
    n_rules = sizes.max_rules_per_predicate

    # At height 1 the root is resolved with rules only, and every other goal with facts only.
    max_successors = (
        n_rules + fanout if max_height > 1 else max(n_rules, fanout)
    )
    return ResolveConfig(
        sizes=sizes,
        max_height=max_height,
        max_fanout=fanout,
        max_goals=1 + max_height * (n_body - 1),
        max_successors=max(max_successors, 1),
        build_resolvents=True,
    )


def rules_only_config(cfg: ResolveConfig) -> ResolveConfig:
    """Return the shapes and limits of a search that ends with the choice of a rule for a ground root."""
    n_rules = max(cfg.sizes.max_rules_per_predicate, 1)
    return replace(
        cfg,
        max_fanout=1,
        max_goals=1,
        max_successors=n_rules,
        build_resolvents=False,
    )


def resolve(
    cfg: ResolveConfig,
    kb: KnowledgeBase,
    goals: Goals,
    root: I32[Tensor, "B W"],
) -> Successors:
    """Compute every successor of each row's leftmost goal; a row without goals has no successor.

    Known ground goals leave a successor at once.

    Args:
      goals: one conjunction a row, [B, A, ...].
      root: the query of each row, which never counts as a fact (leave-one-out).

    Returns:
      Successors; `overflow` marks the rows of which some did not fit.

    Source: Kowalski 1974, "Predicate logic as programming language" (SLD resolution).
    """
    if cfg.selects_goal:
        goals = _select_goal(cfg, kb, goals)
    matching = _match_clauses(cfg, kb, goals, root)
    clauses = _compact_clauses(cfg.max_successors, matching)
    mask, overflow = clauses.mask, clauses.overflow
    if cfg.build_resolvents:
        atoms, height = _build_resolvents(cfg, kb, goals, clauses)
        is_root = (atoms == root[:, None, None]).all(-1)
        is_fact = kbase.contains(kb, cfg.sizes, atoms.long()) & ~is_root
        is_open = (atoms[..., 0] > 0) & ~is_fact & mask[..., None]
        successors = _compact_goals(cfg, atoms, height, is_open)
        is_too_long = is_open.sum(-1) > cfg.max_goals
        overflow = overflow | (mask & is_too_long).any(-1)
        mask = mask & ~is_too_long
        if cfg.selects_goal:
            is_ground = (atoms[..., 1:] <= cfg.sizes.n_constants).all(-1)
            fails = is_open & is_ground & _is_closed(cfg, kb, atoms, height)
            mask = mask & ~fails.any(-1)
    else:
        no_atoms = goals.atoms.new_zeros(
            (*clauses.clause.shape, 0, goals.atoms.shape[-1])
        )
        successors = Goals(no_atoms, no_atoms[..., 0])

    # Each successor names its clause.
    rule = torch.where(clauses.is_rule & clauses.mask, clauses.clause, -1)
    fact = torch.where(~clauses.is_rule & clauses.mask, clauses.clause, -1)
    return Successors(
        goals=successors,
        rule=rule.to(torch.int32),
        fact=fact.to(torch.int32),
        mask=mask,
        overflow=overflow,
    )


def _is_closed(
    cfg: ResolveConfig, kb: KnowledgeBase, atoms: Tensor, height: Tensor
) -> Bool[Tensor, "..."]:
    """Check, per goal, whether facts alone may answer it."""
    has_rules = torch.diff(kb.rule_offsets) > 0
    predicate = atoms[..., 0].long().clamp(0, cfg.sizes.n_predicates)
    return (height >= cfg.max_height) | ~has_rules[predicate]


def _select_goal(cfg: ResolveConfig, kb: KnowledgeBase, goals: Goals) -> Goals:
    """Move the goal of which most is known to the left: facts before goals, and what matches the fewest facts first.

    A goal of which nothing is known comes last.
    """
    atoms = goals.atoms
    n_places = (atoms[..., 1:] > 0).sum(-1)
    is_known = (atoms[..., 1:] > 0) & (atoms[..., 1:] <= cfg.sizes.n_constants)
    n_known = is_known.sum(-1)
    kind = torch.where(n_known == 0, 4, torch.where(n_known < n_places, 1, 0))
    is_goal = ~_is_closed(cfg, kb, atoms, goals.height)
    kind = kind + torch.where(n_known > 0, 2 * is_goal, is_goal)

    _, _, n_facts = kbase.lookup_facts(kb, cfg.sizes, atoms.long(), 0)
    n_facts = torch.where(kind.remainder(2) == 1, n_facts, 0)
    rank = kind * (cfg.sizes.n_facts + 1) + torch.where(kind < 4, n_facts, 0)
    rank = torch.where(atoms[..., 0] > 0, rank, torch.iinfo(rank.dtype).max)

    # The selected goal, then the others in their order.
    slot = count_to(rank.shape[1], rank)
    key = torch.where(slot == rank.argmin(1)[:, None], -1, slot)
    place = key.argsort(1)
    return Goals(
        atoms.gather(1, place[..., None].expand_as(atoms)),
        goals.height.gather(1, place),
    )


def _match_clauses(
    cfg: ResolveConfig, kb: KnowledgeBase, goals: Goals, root: Tensor
) -> _Clauses:
    """List the H + F candidate clauses for each leftmost goal; `mask` marks those that unify with it."""
    sizes = cfg.sizes
    goal = goals.atoms[:, 0]

    # Candidates by predicate, and for facts by the most selective argument.
    rule_id, has_rule = kbase.lookup_rules(kb, sizes, goal[:, 0].long())
    fact_id, has_fact, n_facts = kbase.lookup_facts(
        kb, sizes, goal.long(), cfg.max_fanout
    )
    rule_filled = has_rule & (goals.height[:, :1] < cfg.max_height)

    # Unify the goal with every candidate's head or atom.
    heads = goal[:, None, :].expand(-1, 0, -1)
    if sizes.n_rules:
        heads = _standardize_apart(cfg, kb.rules[:, 0])[rule_id]
    atoms = torch.zeros_like(goal)[:, None].expand(-1, fact_id.shape[1], -1)
    if sizes.n_facts:
        atoms = kb.facts[fact_id]
    unifies, _ = unify(
        torch.cat([heads, atoms], 1), goal[:, None], sizes.n_constants
    )

    # The root is no fact of its own proof; rows without a goal match nothing.
    is_root = (atoms == root[:, None]).all(-1)
    filled = torch.cat([rule_filled, has_fact & ~is_root], 1) & (
        goal[:, :1] > 0
    )
    is_rule = count_to(filled.shape[1], goal) < rule_id.shape[1]

    # The only fact that a ground root could match is itself, so it never misses one.
    is_ground = (goal[:, 1:] <= sizes.n_constants).all(-1)
    is_ground_root = is_ground & (goal == root).all(-1)
    overflow = (n_facts > cfg.max_fanout) & (goal[:, 0] > 0) & ~is_ground_root
    return _Clauses(
        clause=torch.cat([rule_id, fact_id], 1),
        is_rule=is_rule.expand_as(filled),
        mask=unifies & filled,
        overflow=overflow,
    )


def _compact_clauses(width: int, clauses: _Clauses) -> _Clauses:
    """Move the masked clauses of each row to the left of `width` slots, in order; flag overflow."""
    slot = _compaction_slots(clauses.mask, width)
    # One integer holds the id and the kind of a clause.
    code = torch.where(clauses.is_rule, clauses.clause, -1 - clauses.clause)
    empty = code.new_zeros((code.shape[0], width + 1))
    packed = empty.scatter(1, slot, code)[:, :width]

    count = clauses.mask.sum(-1)
    filled = count_to(width, code) < count[:, None]
    return _Clauses(
        clause=torch.where(packed < 0, -1 - packed, packed),
        is_rule=packed >= 0,
        mask=filled,
        overflow=clauses.overflow | (count > width),
    )


def _compaction_slots(mask: Tensor, width: int) -> Tensor:
    """Return the slot that each masked entry moves to; `width`, a slot to discard, for all others."""
    slot = mask.long().cumsum(-1) - 1
    return torch.where(mask & (slot < width), slot, width)


def _standardize_apart(cfg: ResolveConfig, atoms: Tensor) -> Tensor:
    """Return rule atoms with their variables moved past every variable that a canonical goal list can hold."""
    offset = cfg.max_goals * (cfg.sizes.atom_width - 1)
    shifted = torch.where(atoms > cfg.sizes.n_constants, atoms + offset, atoms)
    return torch.cat([atoms[..., :1], shifted[..., 1:]], -1)


def _build_resolvents(
    cfg: ResolveConfig, kb: KnowledgeBase, goals: Goals, clauses: _Clauses
) -> tuple[I32[Tensor, "B S G W"], I32[Tensor, "B S G"]]:
    """Build the goal list that each clause leaves, [B, S, (M - 1) + (A - 1)]: its body, then the remaining goals.

    Returns atoms, under the unifier of goal and head, and heights.
    """
    sizes = cfg.sizes
    clause, is_rule = clauses.clause, clauses.is_rule
    B, S = clause.shape
    goal = goals.atoms[:, None, 0]

    # Head and body of each clause; a fact is a head without a body.
    head = goal.expand(B, S, -1)
    n_body = max(sizes.max_rule_atoms - 1, 0)
    body = goal.new_zeros((B, S, n_body, goal.shape[-1]))
    if sizes.n_facts:
        head = torch.where(
            is_rule[..., None], head, kb.facts[torch.where(is_rule, 0, clause)]
        )
    if sizes.n_rules:
        rule = _standardize_apart(
            cfg, kb.rules[torch.where(is_rule, clause, 0)]
        )
        head = torch.where(is_rule[..., None], rule[:, :, 0], head)
        body = torch.where(is_rule[..., None, None], rule[:, :, 1:], body)

    # Substitute in the arguments of body and remaining goals.
    _, substitution = unify(head, goal, sizes.n_constants)
    tail = goals.atoms[:, None, 1:].expand(-1, S, -1, -1)
    atoms = torch.cat([body, tail], 2)
    per_atom = Substitution(
        *(
            t[:, :, None].expand(-1, -1, atoms.shape[2], -1)
            for t in substitution
        )
    )
    atoms = torch.cat(
        [atoms[..., :1], substitute(atoms[..., 1:], per_atom)], -1
    )

    body_height = (goals.height[:, None, :1] + 1).expand(-1, S, body.shape[2])
    tail_height = goals.height[:, None, 1:].expand(-1, S, -1)
    return atoms, torch.cat([body_height, tail_height], 2)


def _compact_goals(
    cfg: ResolveConfig, atoms: Tensor, height: Tensor, is_open: Tensor
) -> Goals:
    """Move the open goals left into A slots and rename their variables canonically."""
    B, S, _, W = atoms.shape
    A = cfg.max_goals
    slot = _compaction_slots(is_open, A)
    with_height = torch.cat([atoms, height[..., None]], -1)
    empty = with_height.new_zeros((B, S, A + 1, W + 1))
    packed = empty.scatter(
        2, slot[..., None].expand_as(with_height), with_height
    )[:, :, :A]

    terms = canonicalize(
        packed[..., 1:W].reshape(B, S, A * (W - 1)), cfg.sizes.n_constants
    )
    atoms = torch.cat([packed[..., :1], terms.view(B, S, A, W - 1)], -1)
    return Goals(atoms, packed[..., W])
