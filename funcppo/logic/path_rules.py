"""Closed path rules h(X, Y) :- b1(X, Z1), ..., bn(.., Y): candidates from the paths that close facts, and their counts.

Work is planned in rows, so that what is exact and what is sampled depends on the data and the seed alone. Facts and
sources are drawn by a number of their own, uniform in [0, 1): a share of them is those whose number is below it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from funcppo.logic import keys, paths
from funcppo.logic.joins import positions
from funcppo.logic.paths import Steps
from funcppo.types import F32, F64, I64

SAMPLE = 256  # sources that a body's pairs are estimated from


class Candidates(NamedTuple):
    """Path rules of one length, and the facts that they derive from others."""

    head: I64[Tensor, "R"]  # predicate
    body: I64[Tensor, "R J"]  # labels
    support: F64[Tensor, "R"]
    circular: F64[Tensor, "R"]  # of the support
    fact: I64[Tensor, "n"]  # pairs of a fact and a rule
    rule: I64[Tensor, "n"]


class Pairs(NamedTuple):
    """How many pairs each body joins."""

    total: F64[Tensor, "K"]
    error: F64[Tensor, "K"]  # standard error; 0 where the count is exact


Expired = Callable[[], bool]


def candidates(
    steps: Steps,
    predicate: I64[Tensor, "N"],
    length: int,
    min_support: int,
    work: int,
    draw: F32[Tensor, "N"],
    expired: Expired,
) -> tuple[Candidates, F64[Tensor, "R"], list[str]]:
    """The rules of a length that derive `min_support` facts from others, the share of facts each was looked for in,
    and what was not looked at, a line each.

    A predicate whose facts take more than its part of the work is looked at through a share of them, and a body must
    close two of these at least; counts are scaled by the share.

    Args:
      work: rows to look at, for all predicates together.
      draw: a number in [0, 1) for each fact.
    """
    cost = paths.closing_cost(steps, length)
    order = torch.sort(predicate, stable=True).indices
    groups = torch.tensor_split(order, torch.diff(predicate[order]).nonzero().squeeze(1).cpu() + 1)
    groups = [group for group in groups if len(group)]
    costs = torch.stack([cost[group].sum() for group in groups])
    cap, parts, shares, n_rules, n_sampled = _cap(costs, work), [], [costs[:0].double()], 0, 0
    for group, total in zip(groups, costs.tolist()):
        if expired():
            break
        share = min(1.0, cap / max(total, 1))
        chosen = group[draw[group] < share]
        found, seen = _closing(steps, chosen[torch.sort(draw[chosen]).indices], length, expired)
        share *= seen
        part = of_head(steps, found, min_support, share)
        parts.append(part._replace(head=predicate[group[0]].expand(len(part.support)), rule=part.rule + n_rules))
        shares.append(torch.full_like(part.support, share))
        n_rules, n_sampled = n_rules + len(part.support), n_sampled + (share < 1.0)
    told = [f"stopped before all {len(groups)} heads were looked at"] if len(parts) < len(groups) else []
    told += [f"{n_sampled} of {len(groups)} heads were looked at through a sample of their facts"] if n_sampled else []
    none = order[:0]
    empty = Candidates(none, none.view(0, 1).expand(0, length), none.double(), none.double(), none, none)
    found = Candidates(*(torch.cat(same) for same in zip(empty, *parts)))
    return found, torch.cat(shares), told


def _cap(costs: Tensor, work: int) -> float:
    """What each may cost at most, so that all together cost `work`: those that need less leave more to the others."""
    ascending = torch.sort(costs.double()).values
    left = work - torch.cat([ascending.new_zeros(1), torch.cumsum(ascending, 0)[:-1]])
    caps = left / torch.arange(len(costs), 0, -1, device=costs.device)
    over = (ascending > caps).nonzero()
    return float(caps[over[0, 0]]) if len(over) else float(ascending[-1])


def _closing(steps: Steps, facts: Tensor, length: int, expired: Expired) -> tuple[paths.Closed, float]:
    """The bodies that close the facts, and the share of them, in their order, that there was time for."""
    parts, done = [paths.closed(steps, facts[:0], length)], 0
    for block in paths.blocks(steps, facts, length):
        parts.append(paths.closed(steps, block, length))
        done += len(block)
        if expired():
            break
    return paths.Closed(*(torch.cat(same) for same in zip(*parts))), done / max(len(facts), 1)


def of_head(steps: Steps, found: paths.Closed, min_support: int = 1, share: float = 1.0) -> Candidates:
    """The candidates for one head, given the bodies that close a share of its facts; `head` is the caller's to fill."""
    bits = [steps.n_labels.bit_length()] * found.body.shape[1]
    _, code = keys.pack(found.body.unbind(1), bits)
    _, rule, closing = torch.unique(code, return_inverse=True, return_counts=True)
    circular = torch.bincount(rule, found.circular.double(), minlength=len(closing))
    kept = closing - circular >= max(min_support * share, min(2, min_support))
    example = torch.zeros_like(closing).scatter(0, rule, torch.arange(len(rule), device=rule.device))[kept]
    new = torch.cumsum(kept, 0) - 1
    mine = (kept[rule] & ~found.circular).nonzero().squeeze(1)
    return Candidates(
        head=found.fact[:0],
        body=found.body[example],
        support=closing[kept].double() / max(share, 1e-9),
        circular=circular[kept] / max(share, 1e-9),
        fact=found.fact[mine],
        rule=new[rule[mine]],
    )


def count_pairs(
    steps: Steps, bodies: I64[Tensor, "K J"], work: int, draw: F32[Tensor, "C1"], expired: Expired
) -> Pairs:
    """The pairs of each body: exact where the work allows it, the cheaper bodies first, else from a sample of sources.

    Args:
      bodies: distinct, in lexicographic order.
      work: pairs to make at most, about, for the sample and again for the exact counts.
      draw: a number in [0, 1) for each entity.
    """
    sources = _sources(steps, draw)
    share = _sample_share(steps, bodies[:, 0], draw)
    found = _count(steps, bodies, sources, share, draw, work, expired)
    cheap = affordable(found.total, work) & (found.error > 0)
    if cheap.any():
        exact = _count(steps, bodies[cheap], sources, torch.ones_like(share[cheap]), draw, 2 * work, expired)
        better = exact.error < found.error[cheap]
        chosen = cheap.nonzero().squeeze(1)[better]
        found = Pairs(*(old.scatter(0, chosen, new[better]) for old, new in zip(found, exact)))
    return found


def count_pca_pairs(
    steps: Steps,
    head: I64[Tensor, "R"],
    body: I64[Tensor, "R J"],
    exact: Tensor,
    work: int,
    draw: F32[Tensor, "C1"],
) -> Pairs:
    """The pairs of each rule whose source has some fact of the head, exact or from a sample of sources.

    No time limit ends this: a count of a few sources is worth nothing, and that of all pairs took longer.

    Args:
      head: labels.
      exact: which rules to count from all sources, as far as twice the work allows.
    """
    bodies, which = torch.unique(body, dim=0, return_inverse=True)
    every = torch.zeros(len(bodies), dtype=torch.bool, device=draw.device).index_fill(0, which[exact], True)
    share = torch.where(every, 1.0, _sample_share(steps, bodies[:, 0], draw))
    by_body = torch.sort(which, stable=True)
    start = torch.searchsorted(by_body.values, torch.arange(len(bodies) + 1, device=draw.device))
    total = square = torch.zeros(len(head), dtype=torch.float64, device=draw.device)
    seen, rows = 1.0, 0
    for table, through in paths.ends(steps, bodies, _sources(steps, draw), share, draw):
        pair, count = torch.unique_consecutive(table.body * steps.base + table.source, return_counts=True)
        here, source = pair // steps.base, pair % steps.base
        for row, at in positions(start[here], start[here + 1] - start[here]) if len(here) else ():
            rule = by_body.indices[at]
            _, has = paths.outgoing(steps, source[row], head[rule])
            here_of_head = count[row] * (has > 0).double()
            total = total + torch.bincount(rule, here_of_head, minlength=len(head))
            square = square + torch.bincount(rule, here_of_head * here_of_head, minlength=len(head))
        rows += len(table.body)
        if through < 1.0 and rows > 2 * work:
            seen = through
            break
    share = torch.clamp(share, max=seen)[which]
    return estimate(steps, body[:, 0], share, draw, total, square)


def affordable(cost: F64[Tensor, "K"], work: int) -> Tensor:
    """The cheapest that together cost no more than `work`."""
    cost, order = torch.sort(cost, stable=True)
    return torch.zeros_like(order, dtype=torch.bool).scatter(0, order, torch.cumsum(cost, 0) <= work)


def _sources(steps: Steps, draw: Tensor) -> Tensor:
    """The entities that have steps, in the order of their draw: what is done first is a sample of the whole."""
    some = torch.diff(steps.start).nonzero().squeeze(1)
    return some[torch.sort(draw[some], stable=True).indices]


def _draws_of_labels(steps: Steps, draw: Tensor) -> tuple[Tensor, Tensor]:
    """The draws of each label's sources, ascending, as label + draw; where each label starts."""
    pairs = steps.of_label.places.view(-1, 2)[:, 0]
    pairs = pairs[pairs >= 0]
    spread = torch.sort((pairs % steps.n_labels).double() + draw[pairs // steps.n_labels].double()).values
    return spread, torch.searchsorted(spread, torch.arange(steps.n_labels + 1, device=draw.device).double())


def _sample_share(steps: Steps, label: Tensor, draw: Tensor) -> Tensor:
    """The share that draws the first SAMPLE sources of each label, 1 where it has no more."""
    spread, start = _draws_of_labels(steps, draw)
    after = start[label] + SAMPLE
    few = after >= start[label + 1]
    return torch.where(few, 1.0, spread[torch.where(few, 0, after)] - label).to(draw.dtype)


def _count(
    steps: Steps, bodies: Tensor, sources: Tensor, share: Tensor, draw: Tensor, work: int, expired: Expired
) -> Pairs:
    """The pairs of each body, as many sources looked at as `share` says or work and time allow."""
    n = len(bodies)
    total = square = torch.zeros(n, dtype=torch.float64, device=draw.device)
    seen, rows = 1.0, 0
    for table, through in paths.ends(steps, bodies, sources, share, draw):
        pair, count = torch.unique_consecutive(table.body * steps.base + table.source, return_counts=True)
        body, count = pair // steps.base, count.double()
        total = total + torch.bincount(body, count, minlength=n)
        square = square + torch.bincount(body, count * count, minlength=n)
        rows += len(table.body)
        if through < 1.0 and (rows > work or expired()):
            seen = through
            break
    return estimate(steps, bodies[:, 0], torch.clamp(share, max=seen), draw, total, square)


def estimate(steps: Steps, label: Tensor, share: Tensor, draw: Tensor, total: Tensor, square: Tensor) -> Pairs:
    """A sum over all sources of a label from that over the ones drawn, and its standard error.

    With n of N sources drawn without replacement: N / n times their sum, standard error N sqrt((1 - n / N) s^2 / n).
    Nothing is known where those drawn do not differ, so that the others may: an infinite error.

    Source: Cochran 1977, "Sampling techniques", theorems 2.1 and 2.2.
    """
    spread, start = _draws_of_labels(steps, draw)
    every = (start[label + 1] - start[label]).double()
    drawn = torch.searchsorted(spread, label.double() + share.double()) - start[label]
    drawn = torch.where(share >= 1.0, every, drawn.double())
    variance = (drawn * square - total * total).clamp_min(0) / (drawn * (drawn - 1)).clamp_min(1)  # of whole numbers
    error = every * torch.sqrt((1 - drawn / every.clamp_min(1)) * variance / drawn.clamp_min(1))
    unknown = (drawn < every) & (variance == 0)
    total = total * every / drawn.clamp_min(1)  # in this order exact where all are drawn
    return Pairs(total=total, error=torch.where(unknown, torch.inf, error))
