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

from funcppo.logic import paths
from funcppo.logic.joins import positions
from funcppo.logic.paths import BLOCK, Steps
from funcppo.types import F64, I64


class ConstantRules(NamedTuple):
    """Rules, and the facts that they derive from others."""

    head: I64[Tensor, "R"]  # label of the head's step from X
    constant: I64[Tensor, "R"]  # its target
    label: I64[Tensor, "R"]  # of the body's step from X
    target: I64[Tensor, "R"]  # its target; 0 for any
    support: F64[Tensor, "R"]
    circular: F64[Tensor, "R"]
    pairs: F64[Tensor, "R"]
    fact: I64[Tensor, "n"]  # pairs of a fact and a rule
    rule: I64[Tensor, "n"]


class _Features(NamedTuple):
    """Features of entities, grouped by entity."""

    start: Tensor  # those of entity e: start[e] to start[e + 1]
    code: Tensor  # label * base + target
    name: Tensor  # which distinct feature each is
    entities: Tensor  # how many have each distinct feature


def constant_rules(steps: Steps, min_support: int) -> Iterator[ConstantRules]:
    """The rules that derive `min_support` facts from others, block by block; each rule in one block."""
    source = torch.repeat_interleave(torch.diff(steps.start))
    whole = _features(source, steps.label * steps.base + steps.target, steps, min_support)
    first = torch.diff(source * steps.n_labels + steps.label, prepend=source.new_tensor([-1])) != 0
    labels = _features(source[first], steps.label[first] * steps.base, steps, min_support)
    frequent = _counts(steps.label * steps.base + steps.target)[1] >= min_support
    row = frequent.nonzero().squeeze(1)
    row = row[torch.sort((steps.label * steps.base + steps.target)[row], stable=True).indices]
    for bodies in (labels, whole):
        cost = bodies.start[source[row] + 1] - bodies.start[source[row]]
        for block in _blocks(row, (steps.label * steps.base + steps.target)[row], cost):
            yield _of_block(steps, source, bodies, block, min_support)


def count_pca_pairs(
    steps: Steps, head: I64[Tensor, "R"], label: I64[Tensor, "R"], target: I64[Tensor, "R"]
) -> F64[Tensor, "R"]:
    """The pairs of each rule whose first argument has some fact of the head's predicate.

    Args:
      head, label, target: as in `ConstantRules`.
    """
    source = torch.repeat_interleave(torch.diff(steps.start))
    first = torch.diff(source * steps.n_labels + steps.label, prepend=source.new_tensor([-1])) != 0
    code = torch.cat([steps.label * steps.base + steps.target, steps.label[first] * steps.base])
    code, order = torch.sort(code, stable=True)
    entity = torch.cat([source, source[first]])[order]
    low = torch.searchsorted(code, label * steps.base + target)
    count = torch.searchsorted(code, label * steps.base + target, right=True) - low
    total = torch.zeros(len(head), dtype=torch.float64, device=code.device)
    for rule, at in positions(low, count) if len(head) else ():
        _, has = paths.outgoing(steps, entity[at], head[rule])
        total = total + torch.bincount(rule, (has > 0).double(), minlength=len(head))
    return torch.where(head % 2 == 0, total, count.double())  # h(c, X): c has a fact wherever one is derived


def _features(source: Tensor, code: Tensor, steps: Steps, min_support: int) -> _Features:
    """Those that enough entities have, in the order of entities."""
    kept = _counts(code)[1] >= min_support
    source, code = source[kept], code[kept]
    name, _ = _counts(code)
    edges = torch.arange(steps.base + 1, device=code.device)
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
    filled = torch.cumsum(cost, 0)[last - 1] // BLOCK
    cut = last[:-1][torch.diff(filled) > 0]
    yield from torch.tensor_split(rows, cut.cpu())


def _of_block(steps: Steps, source: Tensor, bodies: _Features, head_steps: Tensor, min_support: int) -> ConstantRules:
    """The rules whose heads are the features of these steps: all steps of each of them."""
    low = bodies.start[source[head_steps]]
    pairs = list(positions(low, bodies.start[source[head_steps] + 1] - low))
    row, at = (torch.cat(same) for same in zip(*pairs)) if pairs else (head_steps[:0], head_steps[:0])
    step = head_steps[row]
    code = steps.label[step] * steps.base + steps.target[step]
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
        head=steps.label[step[example]],
        constant=steps.target[step[example]],
        label=bodies.code[at[example]] // steps.base,
        target=bodies.code[at[example]] % steps.base,
        support=support[enough].double(),
        circular=looped[enough],
        pairs=bodies.entities[bodies.name[at[example]]].double(),
        fact=steps.fact[step[mine]],
        rule=(torch.cumsum(enough, 0) - 1)[rule[mine]],
    )


def _is_circular(steps: Steps, step: Tensor, source: Tensor, code: Tensor) -> Tensor:
    """Whether the body holds through the head's own fact alone.

    A body h(X, Z) holds through h(X, c) alone where X has no other step of the label. Walked the other way, the fact
    h(c, c) is a step of its own; a body of that label and target, or with no other step of that label, is it again.
    """
    label, target = code // steps.base, code % steps.base
    loop = steps.target[step] == source
    back = loop & (label == steps.label[step] ^ 1)
    same = (label == steps.label[step]) | back
    _, count = paths.outgoing(steps, source, label)
    return same & torch.where(target == 0, count == 1, back & (target == source))
