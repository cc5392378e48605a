"""One SLD step: a goal list to its successors, with nothing dropped in silence.

The leftmost goal is resolved first with every rule whose head unifies with it, then with every fact. Clauses are
matched on atoms alone; only those that unify are packed into the S slots of a row and written out as goal lists.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from funcppo.logic import kb as kbase
from funcppo.logic.kb import KBSizes, KnowledgeBase
from funcppo.logic.unification import Substitution, canonicalize, substitute, unify
from funcppo.types import I32, Bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolveConfig:
    """The static shape of a search."""

    sizes: KBSizes
    max_height: int  # a goal at this height meets facts only
    max_fanout: int  # F, the most facts that one lookup may return
    max_goals: int  # A
    max_successors: int  # S
    build_resolvents: bool  # successors hold their goals; otherwise it is left at which clause makes them


class Goals(NamedTuple):
    """A conjunction still to prove, canonical and packed to the left; an empty one is a proof."""

    atoms: I32[Tensor, "... A W"]
    height: I32[Tensor, "... A"]  # 0 for the root, one more for the body of each rule applied


class Successors(NamedTuple):
    """The goal lists one step away, packed to the left: rules in file order, then facts in id order."""

    goals: Goals  # [B, S, A, ...]; A is 0 without bodies
    rule: I32[Tensor, "B S"]  # id of the rule applied; -1 for a fact
    fact: I32[Tensor, "B S"]  # id of the fact used; -1 for a rule
    mask: Bool[Tensor, "B S"]  # which slots hold a successor
    overflow: Bool[Tensor, "B"]  # a successor did not fit: more than S of them, or more than A goals


def make_resolve_config(kb: KnowledgeBase, sizes: KBSizes, max_height: int) -> ResolveConfig:
    """The smallest shape in which no search from a ground query can overflow.

    A rule replaces the leftmost goal by at most M - 1 others one higher, so at most 1 + max_height (M - 2) are open.
    """
    body = max(sizes.max_rule_atoms - 1, 1)
    fanout = kbase.compute_max_fanout(kb, sizes, max_height)
    both = max_height > 1  # at height 1 the root meets rules only and every other goal facts only
    widest = sizes.max_rules_per_predicate + fanout if both else max(sizes.max_rules_per_predicate, fanout)
    return ResolveConfig(
        sizes=sizes,
        max_height=max_height,
        max_fanout=fanout,
        max_goals=1 + max_height * (body - 1),
        max_successors=max(widest, 1),
        build_resolvents=True,
    )


def rules_only_config(cfg: ResolveConfig) -> ResolveConfig:
    """The shape of a search that ends with the choice of a rule for a ground root."""
    return replace(
        cfg, max_fanout=1, max_goals=1, max_successors=max(cfg.sizes.max_rules_per_predicate, 1), build_resolvents=False
    )


def resolve(cfg: ResolveConfig, kb: KnowledgeBase, goals: Goals, root: I32[Tensor, "B W"]) -> Successors:
    """Every successor of each row's leftmost goal; none where a row has no goal.

    Known ground goals leave a successor at once. `root` never counts as a fact (leave-one-out).

    Source: Kowalski 1974, "Predicate logic as programming language" (SLD resolution).
    """
    kind_rule, clause, matches, overflow = _matching_clauses(cfg, kb, goals, root)
    clause, is_rule, mask, too_many = _pack(cfg.max_successors, clause, kind_rule, matches)
    if not cfg.build_resolvents:
        return _without_bodies(goals, clause, is_rule, mask, overflow | too_many)
    atoms, height = _resolvents(cfg, kb, goals, clause, is_rule)
    keep = (atoms[..., 0] > 0) & ~_known(cfg, kb, atoms, root)
    successors, too_long = _packed_goals(cfg, atoms, height, keep & mask[..., None])
    dropped = mask & too_long
    return Successors(
        goals=successors,
        rule=torch.where(is_rule & mask, clause, -1).to(torch.int32),
        fact=torch.where(~is_rule & mask, clause, -1).to(torch.int32),
        mask=mask & ~too_long,
        overflow=overflow | too_many | dropped.any(-1),
    )


def _without_bodies(goals: Goals, clause: Tensor, is_rule: Tensor, mask: Tensor, overflow: Tensor) -> Successors:
    none = goals.atoms.new_zeros((*clause.shape, 0, goals.atoms.shape[-1]))
    return Successors(
        goals=Goals(none, none[..., 0]),
        rule=torch.where(is_rule & mask, clause, -1).to(torch.int32),
        fact=torch.where(~is_rule & mask, clause, -1).to(torch.int32),
        mask=mask,
        overflow=overflow,
    )


def _matching_clauses(
    cfg: ResolveConfig, kb: KnowledgeBase, goals: Goals, root: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Candidate clauses of the leftmost goal [B, H + F]: whether a rule, the id, whether it unifies; and overflow."""
    goal, sizes = goals.atoms[:, 0], cfg.sizes
    rule, rule_filled = kbase.lookup_rules(kb, sizes, goal[:, 0].long())
    fact, fact_filled, n_facts = kbase.lookup_facts(kb, sizes, goal.long(), cfg.max_fanout)
    rule_filled = rule_filled & (goals.height[:, :1] < cfg.max_height)
    ground = (goal[:, 1:] <= sizes.n_constants).all(-1)
    heads = _apart(cfg, kb.rules[:, 0])[rule] if sizes.n_rules else goal[:, None, :].expand(-1, 0, -1)
    atoms = kb.facts[fact] if sizes.n_facts else torch.zeros_like(goal)[:, None].expand(-1, fact.shape[1], -1)
    unifies, _ = unify(torch.cat([heads, atoms], 1), goal[:, None], sizes.n_constants)
    filled = torch.cat([rule_filled, fact_filled & ~(atoms == root[:, None]).all(-1)], 1) & (goal[:, :1] > 0)
    kind_rule = torch.arange(filled.shape[1], device=goal.device) < rule.shape[1]
    # The only fact that a ground root could match is itself, so it never misses one.
    overflow = (n_facts > cfg.max_fanout) & (goal[:, 0] > 0) & ~(ground & (goal == root).all(-1))
    return kind_rule.expand_as(filled), torch.cat([rule, fact], 1), unifies & filled, overflow


def _pack(width: int, clause: Tensor, is_rule: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The marked clauses moved to the left of `width` slots, in order; the last value marks rows with more."""
    slot = _slots(mask, width)
    code = torch.where(is_rule, clause, -1 - clause)  # one integer that holds both the id and its kind
    empty = torch.zeros((mask.shape[0], width + 1), dtype=code.dtype, device=code.device)
    packed = empty.scatter(1, slot, code)[:, :width]
    count = mask.sum(-1)
    filled = torch.arange(width, device=mask.device) < count[:, None]
    return torch.where(packed < 0, -1 - packed, packed), packed >= 0, filled, count > width


def _slots(mask: Tensor, width: int) -> Tensor:
    """Where each marked entry goes when the marked are moved left; `width` (a slot to discard) for the others."""
    slot = mask.long().cumsum(-1) - 1
    return torch.where(mask & (slot < width), slot, width)


def _apart(cfg: ResolveConfig, atoms: Tensor) -> Tensor:
    """Rule atoms with their variables moved past every variable a canonical goal list can hold."""
    offset = cfg.max_goals * (cfg.sizes.atom_width - 1)
    shifted = torch.where(atoms > cfg.sizes.n_constants, atoms + offset, atoms)
    return torch.cat([atoms[..., :1], shifted[..., 1:]], -1)


def _resolvents(
    cfg: ResolveConfig, kb: KnowledgeBase, goals: Goals, clause: Tensor, is_rule: Tensor
) -> tuple[Tensor, Tensor]:
    """Body and remaining goals [B, S, M - 1 + A - 1, ...] under the unifier of the leftmost goal and the clause."""
    B, S = clause.shape
    goal, n_body = goals.atoms[:, None, 0], cfg.sizes.max_rule_atoms - 1
    head = goal.expand(B, S, -1)
    body = torch.zeros((B, S, max(n_body, 0), goal.shape[-1]), dtype=goal.dtype, device=goal.device)
    if cfg.sizes.n_facts:
        head = torch.where(is_rule[..., None], head, kb.facts[torch.where(is_rule, 0, clause)])
    if cfg.sizes.n_rules:
        rule = _apart(cfg, kb.rules[torch.where(is_rule, clause, 0)])
        head = torch.where(is_rule[..., None], rule[:, :, 0], head)
        body = torch.where(is_rule[..., None, None], rule[:, :, 1:], body)
    _, substitution = unify(head, goal, cfg.sizes.n_constants)
    tail = goals.atoms[:, None, 1:].expand(-1, S, -1, -1)
    atoms = torch.cat([body, tail], 2)
    per_atom = Substitution(*(t[:, :, None].expand(-1, -1, atoms.shape[2], -1) for t in substitution))
    atoms = torch.cat([atoms[..., :1], substitute(atoms[..., 1:], per_atom)], -1)
    body_height = (goals.height[:, None, :1] + 1).expand(-1, S, body.shape[2])
    return atoms, torch.cat([body_height, goals.height[:, None, 1:].expand(-1, S, -1)], 2)


def _known(cfg: ResolveConfig, kb: KnowledgeBase, atoms: Tensor, root: Tensor) -> Tensor:
    """Which atoms [B, S, A', W] are facts other than the root."""
    is_root = (atoms == root[:, None, None]).all(-1)
    return kbase.contains(kb, cfg.sizes, atoms.long()) & ~is_root


def _packed_goals(cfg: ResolveConfig, atoms: Tensor, height: Tensor, keep: Tensor) -> tuple[Goals, Tensor]:
    """The kept goals moved left into A slots and renamed canonically; the last value marks lists that are longer."""
    B, S, _, W = atoms.shape
    A = cfg.max_goals
    slot = _slots(keep, A)
    rows = torch.cat([atoms, height[..., None]], -1)
    packed = torch.zeros((B, S, A + 1, W + 1), dtype=rows.dtype, device=rows.device)
    packed = packed.scatter(2, slot[..., None].expand_as(rows), rows)[:, :, :A]
    terms = canonicalize(packed[..., 1:W].reshape(B, S, A * (W - 1)), cfg.sizes.n_constants)
    named = torch.cat([packed[..., :1], terms.view(B, S, A, W - 1)], -1)
    return Goals(named, packed[..., W]), keep.sum(-1) > A
