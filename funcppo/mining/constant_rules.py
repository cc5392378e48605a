"""Rules with constants: h(X, c) :- b(X, Z) and h(X, c) :- b(X, d), and the same with either atom the other way round.

A step from X is a *feature* of X: its label and target for the second shape, its label alone for the first. Which
features go together is the product of the sparse boolean matrix of entities and features with its transpose, taken here
by a join over the entities, block by block of heads.

Source: Meilicke et al. 2019, "Anytime bottom-up rule learning", section 3 (acyclic rules AC1 and AC2).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from funcppo.logic.joins import ragged_arange
from funcppo.mining import paths
from funcppo.mining.paths import BLOCK_ROWS, EdgeIndex
from funcppo.types import F64, I64


class ConstantRules(NamedTuple):
    """Rules, and the facts that they derive from others."""

    head_label: I64[Tensor, "R"]  # label of the head's step from X
    head_constant: I64[Tensor, "R"]  # its target
    body_label: I64[Tensor, "R"]  # of the body's step from X
    body_constant: I64[Tensor, "R"]  # its target; 0 for any
    support: F64[Tensor, "R"]
    circular_support: F64[Tensor, "R"]
    body_pairs: F64[Tensor, "R"]
    fact: I64[Tensor, "n"]  # pairs of a fact and a rule
    rule: I64[Tensor, "n"]


class _Features(NamedTuple):
    """Features of entities, grouped by entity."""

    start: Tensor  # those of entity e: start[e] to start[e + 1]
    code: Tensor  # label * base + target
    name: Tensor  # which distinct feature each is
    entities: Tensor  # how many have each distinct feature


def find_constant_rules(edges: EdgeIndex, min_support: int) -> Iterator[ConstantRules]:
    """The rules that derive `min_support` facts from others, block by block; each rule in one block."""
    source = torch.repeat_interleave(torch.diff(edges.offsets))
    whole = _features(source, edges.label * edges.n_entity_ids + edges.target, edges, min_support)
    first = torch.diff(source * edges.n_labels + edges.label, prepend=source.new_tensor([-1])) != 0
    labels = _features(source[first], edges.label[first] * edges.n_entity_ids, edges, min_support)
    frequent = _counts(edges.label * edges.n_entity_ids + edges.target)[1] >= min_support
    row = frequent.nonzero().squeeze(1)
    row = row[torch.sort((edges.label * edges.n_entity_ids + edges.target)[row], stable=True).indices]
    for bodies in (labels, whole):
        cost = bodies.start[source[row] + 1] - bodies.start[source[row]]
        for block in _blocks(row, (edges.label * edges.n_entity_ids + edges.target)[row], cost):
            yield _of_block(edges, source, bodies, block, min_support)


def count_pca_pairs(
    edges: EdgeIndex, head_label: I64[Tensor, "R"], body_label: I64[Tensor, "R"], body_constant: I64[Tensor, "R"]
) -> F64[Tensor, "R"]:
    """The pairs of each rule whose first argument has some fact of the head's predicate.

    Args:
      head, label, target: as in `ConstantRules`.
    """
    source = torch.repeat_interleave(torch.diff(edges.offsets))
    first = torch.diff(source * edges.n_labels + edges.label, prepend=source.new_tensor([-1])) != 0
    code = torch.cat([edges.label * edges.n_entity_ids + edges.target, edges.label[first] * edges.n_entity_ids])
    code, order = torch.sort(code, stable=True)
    entity = torch.cat([source, source[first]])[order]
    low = torch.searchsorted(code, body_label * edges.n_entity_ids + body_constant)
    count = torch.searchsorted(code, body_label * edges.n_entity_ids + body_constant, right=True) - low
    total = torch.zeros(len(head_label), dtype=torch.float64, device=code.device)
    for rule, at in ragged_arange(low, count) if len(head_label) else ():
        _, has = paths.outgoing_edges(edges, entity[at], head_label[rule])
        total = total + torch.bincount(rule, (has > 0).double(), minlength=len(head_label))
    return torch.where(head_label % 2 == 0, total, count.double())  # h(c, X): c has a fact wherever one is derived


def _features(source: Tensor, code: Tensor, steps: EdgeIndex, min_support: int) -> _Features:
    """Those that enough entities have, in the order of entities."""
    kept = _counts(code)[1] >= min_support
    source, code = source[kept], code[kept]
    name, _ = _counts(code)
    edges = torch.arange(steps.n_entity_ids + 1, device=code.device)
    return _Features(torch.searchsorted(source, edges), code, name, torch.bincount(name))


def _counts(code: Tensor) -> tuple[Tensor, Tensor]:
    """Which distinct value each is, and how often it occurs."""
    _, name, count = torch.unique(code, return_inverse=True, return_counts=True)
    return name, count[name]


def _blocks(rows: Tensor, group: Tensor, cost: Tensor) -> Iterator[Tensor]:
    """The rows cut between groups where their cost adds up to about BLOCK."""
    if not len(rows):
        return
    _, size = torch.unique_consecutive(group, return_counts=True)
    last = torch.cumsum(size, 0)
    filled = torch.cumsum(cost, 0)[last - 1] // BLOCK_ROWS
    cut = last[:-1][torch.diff(filled) > 0]
    yield from torch.tensor_split(rows, cut.cpu())


def _of_block(
    steps: EdgeIndex, source: Tensor, bodies: _Features, head_steps: Tensor, min_support: int
) -> ConstantRules:
    """The rules whose heads are the features of these steps: all steps of each of them."""
    low = bodies.start[source[head_steps]]
    pairs = list(ragged_arange(low, bodies.start[source[head_steps] + 1] - low))
    row, at = (torch.cat(same) for same in zip(*pairs)) if pairs else (head_steps[:0], head_steps[:0])
    step = head_steps[row]
    code = steps.label[step] * steps.n_entity_ids + steps.target[step]
    kept = (code != bodies.code[at]).nonzero().squeeze(1)
    step, at, code = step[kept], at[kept], code[kept]
    head, _ = _counts(code)
    _, rule, support = torch.unique(
        head * len(bodies.entities) + bodies.name[at], return_inverse=True, return_counts=True
    )
    circular = _is_circular(steps, step, source[step], bodies.code[at])
    looped = torch.bincount(rule, circular.double(), minlength=len(support))
    enough = support - looped >= min_support
    example = torch.zeros_like(support).scatter(0, rule, torch.arange(len(rule), device=rule.device))[enough]
    mine = (enough[rule] & ~circular).nonzero().squeeze(1)
    return ConstantRules(
        head_label=steps.label[step[example]],
        head_constant=steps.target[step[example]],
        body_label=bodies.code[at[example]] // steps.n_entity_ids,
        body_constant=bodies.code[at[example]] % steps.n_entity_ids,
        support=support[enough].double(),
        circular_support=looped[enough],
        body_pairs=bodies.entities[bodies.name[at[example]]].double(),
        fact=steps.fact[step[mine]],
        rule=(torch.cumsum(enough, 0) - 1)[rule[mine]],
    )


def _is_circular(steps: EdgeIndex, step: Tensor, source: Tensor, code: Tensor) -> Tensor:
    """Whether the body holds through the head's own fact alone.

    A body h(X, Z) holds through h(X, c) alone where X has no other step of the label. Walked the other way, the fact
    h(c, c) is a step of its own; a body of that label and target, or with no other step of that label, is it again.
    """
    label, target = code // steps.n_entity_ids, code % steps.n_entity_ids
    loop = steps.target[step] == source
    back = loop & (label == steps.label[step] ^ 1)
    same = (label == steps.label[step]) | back
    _, count = paths.outgoing_edges(steps, source, label)
    return same & torch.where(target == 0, count == 1, back & (target == source))
