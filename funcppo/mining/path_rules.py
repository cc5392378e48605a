"""Closed path rules h(X, Y) :- b1(X, Z1), ..., bn(.., Y): candidates from the paths that close facts, and their counts.

Work is planned in rows, so that what is exact and what is sampled depends on the data and the seed alone. Facts and
sources are drawn by a number of their own, uniform in [0, 1): a share of them is those whose number is below it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from funcppo.logic import row_index
from funcppo.logic.joins import ragged_arange
from funcppo.mining import paths
from funcppo.mining.paths import EdgeIndex
from funcppo.types import F32, F64, I64

SOURCE_SAMPLE_SIZE = 256  # sources that a body's pairs are estimated from


class PathRules(NamedTuple):
    """Path rules of one length, and the facts that they derive from others."""

    head_predicate: I64[Tensor, "R"]  # predicate
    body_labels: I64[Tensor, "R J"]  # labels
    support: F64[Tensor, "R"]
    circular_support: F64[Tensor, "R"]  # of the support
    fact: I64[Tensor, "n"]  # pairs of a fact and a rule
    rule: I64[Tensor, "n"]


class CountEstimate(NamedTuple):
    """How many pairs each body joins."""

    total: F64[Tensor, "K"]
    std_error: F64[Tensor, "K"]  # standard error; 0 where the count is exact


DeadlineCheck = Callable[[], bool]


def find_path_rules(
    edges: EdgeIndex,
    predicate: I64[Tensor, "N"],
    length: int,
    min_support: int,
    max_rows: int,
    priority: F32[Tensor, "N"],
    deadline_passed: DeadlineCheck,
) -> tuple[PathRules, F64[Tensor, "R"], list[str]]:
    """The rules of a length that derive `min_support` facts from others, the share of facts each was looked for in,
    and what was not looked at, a line each.

    A predicate whose facts take more than its part of the work is looked at through a share of them, and a body must
    close two of these at least; counts are scaled by the share.

    Args:
      work: rows to look at, for all predicates together.
      draw: a number in [0, 1) for each fact.
    """
    cost = paths.closed_path_cost(edges, length)
    order = torch.sort(predicate, stable=True).indices
    groups = torch.tensor_split(order, torch.diff(predicate[order]).nonzero().squeeze(1).cpu() + 1)
    groups = [group for group in groups if len(group)]
    costs = torch.stack([cost[group].sum() for group in groups])
    cap, parts, shares, n_rules, n_sampled = _cap(costs, max_rows), [], [costs[:0].double()], 0, 0
    for group, total in zip(groups, costs.tolist()):
        if deadline_passed():
            break
        share = min(1.0, cap / max(total, 1))
        chosen = group[priority[group] < share]
        found, seen = _closing(edges, chosen[torch.sort(priority[chosen]).indices], length, deadline_passed)
        share *= seen
        part = path_rules_of_head(edges, found, min_support, share)
        parts.append(
            part._replace(head_predicate=predicate[group[0]].expand(len(part.support)), rule=part.rule + n_rules)
        )
        shares.append(torch.full_like(part.support, share))
        n_rules, n_sampled = n_rules + len(part.support), n_sampled + (share < 1.0)
    told = [f"stopped before all {len(groups)} heads were looked at"] if len(parts) < len(groups) else []
    told += [f"{n_sampled} of {len(groups)} heads were looked at through a sample of their facts"] if n_sampled else []
    none = order[:0]
    empty = PathRules(none, none.view(0, 1).expand(0, length), none.double(), none.double(), none, none)
    found = PathRules(*(torch.cat(same) for same in zip(empty, *parts)))
    return found, torch.cat(shares), told


def _cap(costs: Tensor, work: int) -> float:
    """What each may cost at most, so that all together cost `work`: those that need less leave more to the others."""
    ascending = torch.sort(costs.double()).values
    left = work - torch.cat([ascending.new_zeros(1), torch.cumsum(ascending, 0)[:-1]])
    caps = left / torch.arange(len(costs), 0, -1, device=costs.device)
    over = (ascending > caps).nonzero()
    return float(caps[over[0, 0]]) if len(over) else float(ascending[-1])


def _closing(steps: EdgeIndex, facts: Tensor, length: int, expired: DeadlineCheck) -> tuple[paths.ClosedPaths, float]:
    """The bodies that close the facts, and the share of them, in their order, that there was time for."""
    parts, done = [paths.find_closed_paths(steps, facts[:0], length)], 0
    for block in paths.split_by_cost(steps, facts, length):
        parts.append(paths.find_closed_paths(steps, block, length))
        done += len(block)
        if expired():
            break
    return paths.ClosedPaths(*(torch.cat(same) for same in zip(*parts))), done / max(len(facts), 1)


def path_rules_of_head(
    edges: EdgeIndex, closed_paths: paths.ClosedPaths, min_support: int = 1, sampling_fraction: float = 1.0
) -> PathRules:
    """The candidates for one head, given the bodies that close a share of its facts; `head` is the caller's to fill."""
    bits = [edges.n_labels.bit_length()] * closed_paths.body_labels.shape[1]
    _, code = row_index.encode_rows(closed_paths.body_labels.unbind(1), bits)
    _, rule, closing = torch.unique(code, return_inverse=True, return_counts=True)
    circular = torch.bincount(rule, closed_paths.is_circular.double(), minlength=len(closing))
    kept = closing - circular >= max(min_support * sampling_fraction, min(2, min_support))
    example = torch.zeros_like(closing).scatter(0, rule, torch.arange(len(rule), device=rule.device))[kept]
    new = torch.cumsum(kept, 0) - 1
    mine = (kept[rule] & ~closed_paths.is_circular).nonzero().squeeze(1)
    return PathRules(
        head_predicate=closed_paths.fact[:0],
        body_labels=closed_paths.body_labels[example],
        support=closing[kept].double() / max(sampling_fraction, 1e-9),
        circular_support=circular[kept] / max(sampling_fraction, 1e-9),
        fact=closed_paths.fact[mine],
        rule=new[rule[mine]],
    )


def count_body_pairs(
    edges: EdgeIndex,
    bodies: I64[Tensor, "K J"],
    max_rows: int,
    priority: F32[Tensor, "C1"],
    deadline_passed: DeadlineCheck,
) -> CountEstimate:
    """The pairs of each body: exact where the work allows it, the cheaper bodies first, else from a sample of sources.

    Args:
      bodies: distinct, in lexicographic order.
      work: pairs to make at most, about, for the sample and again for the exact counts.
      draw: a number in [0, 1) for each entity.
    """
    sources = _sources(edges, priority)
    share = _sample_share(edges, bodies[:, 0], priority)
    found = _count(edges, bodies, sources, share, priority, max_rows, deadline_passed)
    cheap = cheapest_within_limit(found.total, max_rows) & (found.std_error > 0)
    if cheap.any():
        exact = _count(
            edges, bodies[cheap], sources, torch.ones_like(share[cheap]), priority, 2 * max_rows, deadline_passed
        )
        better = exact.std_error < found.std_error[cheap]
        chosen = cheap.nonzero().squeeze(1)[better]
        found = CountEstimate(*(old.scatter(0, chosen, new[better]) for old, new in zip(found, exact)))
    return found


def count_pca_pairs(
    edges: EdgeIndex,
    head_label: I64[Tensor, "R"],
    body_labels: I64[Tensor, "R J"],
    count_exactly: Tensor,
    max_rows: int,
    priority: F32[Tensor, "C1"],
) -> CountEstimate:
    """The pairs of each rule whose source has some fact of the head, exact or from a sample of sources.

    No time limit ends this: a count of a few sources is worth nothing, and that of all pairs took longer.

    Args:
      head: labels.
      exact: which rules to count from all sources, as far as twice the work allows.
    """
    bodies, which = torch.unique(body_labels, dim=0, return_inverse=True)
    every = torch.zeros(len(bodies), dtype=torch.bool, device=priority.device).index_fill(0, which[count_exactly], True)
    share = torch.where(every, 1.0, _sample_share(edges, bodies[:, 0], priority))
    by_body = torch.sort(which, stable=True)
    start = torch.searchsorted(by_body.values, torch.arange(len(bodies) + 1, device=priority.device))
    total = square = torch.zeros(len(head_label), dtype=torch.float64, device=priority.device)
    seen, rows = 1.0, 0
    for table, through in paths.iter_body_pairs(edges, bodies, _sources(edges, priority), share, priority):
        pair, count = torch.unique_consecutive(table.body * edges.n_entity_ids + table.source, return_counts=True)
        here, source = pair // edges.n_entity_ids, pair % edges.n_entity_ids
        for row, at in ragged_arange(start[here], start[here + 1] - start[here]) if len(here) else ():
            rule = by_body.indices[at]
            _, has = paths.outgoing_edges(edges, source[row], head_label[rule])
            here_of_head = count[row] * (has > 0).double()
            total = total + torch.bincount(rule, here_of_head, minlength=len(head_label))
            square = square + torch.bincount(rule, here_of_head * here_of_head, minlength=len(head_label))
        rows += len(table.body)
        if through < 1.0 and rows > 2 * max_rows:
            seen = through
            break
    share = torch.clamp(share, max=seen)[which]
    return estimate_total(edges, body_labels[:, 0], share, priority, total, square)


def cheapest_within_limit(cost: F64[Tensor, "K"], max_rows: int) -> Tensor:
    """The cheapest that together cost no more than `work`."""
    cost, order = torch.sort(cost, stable=True)
    return torch.zeros_like(order, dtype=torch.bool).scatter(0, order, torch.cumsum(cost, 0) <= max_rows)


def _sources(steps: EdgeIndex, draw: Tensor) -> Tensor:
    """The entities that have steps, in the order of their draw: what is done first is a sample of the whole."""
    some = torch.diff(steps.offsets).nonzero().squeeze(1)
    return some[torch.sort(draw[some], stable=True).indices]


def _draws_of_labels(steps: EdgeIndex, draw: Tensor) -> tuple[Tensor, Tensor]:
    """The draws of each label's sources, ascending, as label + draw; where each label starts."""
    pairs = steps.label_spans.entries.view(-1, 2)[:, 0]
    pairs = pairs[pairs >= 0]
    spread = torch.sort((pairs % steps.n_labels).double() + draw[pairs // steps.n_labels].double()).values
    return spread, torch.searchsorted(spread, torch.arange(steps.n_labels + 1, device=draw.device).double())


def _sample_share(steps: EdgeIndex, label: Tensor, draw: Tensor) -> Tensor:
    """The share that draws the first SAMPLE sources of each label, 1 where it has no more."""
    spread, start = _draws_of_labels(steps, draw)
    after = start[label] + SOURCE_SAMPLE_SIZE
    few = after >= start[label + 1]
    return torch.where(few, 1.0, spread[torch.where(few, 0, after)] - label).to(draw.dtype)


def _count(
    steps: EdgeIndex, bodies: Tensor, sources: Tensor, share: Tensor, draw: Tensor, work: int, expired: DeadlineCheck
) -> CountEstimate:
    """The pairs of each body, as many sources looked at as `share` says or work and time allow."""
    n = len(bodies)
    total = square = torch.zeros(n, dtype=torch.float64, device=draw.device)
    seen, rows = 1.0, 0
    for table, through in paths.iter_body_pairs(steps, bodies, sources, share, draw):
        pair, count = torch.unique_consecutive(table.body * steps.n_entity_ids + table.source, return_counts=True)
        body, count = pair // steps.n_entity_ids, count.double()
        total = total + torch.bincount(body, count, minlength=n)
        square = square + torch.bincount(body, count * count, minlength=n)
        rows += len(table.body)
        if through < 1.0 and (rows > work or expired()):
            seen = through
            break
    return estimate_total(steps, bodies[:, 0], torch.clamp(share, max=seen), draw, total, square)


def estimate_total(
    edges: EdgeIndex,
    label: Tensor,
    sampling_fraction: Tensor,
    priority: Tensor,
    sample_sum: Tensor,
    sample_sum_of_squares: Tensor,
) -> CountEstimate:
    """A sum over all sources of a label from that over the ones drawn, and its standard error.

    With n of N sources drawn without replacement: N / n times their sum, standard error N sqrt((1 - n / N) s^2 / n).
    Nothing is known where those drawn do not differ, so that the others may: an infinite error.

    Source: Cochran 1977, "Sampling techniques", theorems 2.1 and 2.2.
    """
    spread, start = _draws_of_labels(edges, priority)
    every = (start[label + 1] - start[label]).double()
    drawn = torch.searchsorted(spread, label.double() + sampling_fraction.double()) - start[label]
    drawn = torch.where(sampling_fraction >= 1.0, every, drawn.double())
    variance = (drawn * sample_sum_of_squares - sample_sum * sample_sum).clamp_min(0) / (drawn * (drawn - 1)).clamp_min(
        1
    )  # of whole numbers
    error = every * torch.sqrt((1 - drawn / every.clamp_min(1)) * variance / drawn.clamp_min(1))
    unknown = (drawn < every) & (variance == 0)
    sample_sum = sample_sum * every / drawn.clamp_min(1)  # in this order exact where all are drawn
    return CountEstimate(total=sample_sum, std_error=torch.where(unknown, torch.inf, error))
