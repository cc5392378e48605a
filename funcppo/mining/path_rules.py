"""Closed path rules h(X, Y) :- b1(X, Z1), ..., bn(.., Y): candidates from the paths that close facts, and their counts.

Work is planned in rows, so that what is exact and what is sampled depends on the data and the seed alone. Every fact
and every entity has a random priority, uniform in [0, 1): a sample of a fraction f is those with a priority below f.

`find_path_rules` finds candidates, `count_body_pairs` and `count_pca_pairs` count what they derive.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from funcppo.logic import row_index
from funcppo.logic.joins import ragged_arange
from funcppo.mining import paths
from funcppo.mining.paths import BodyPairs, ClosedPaths, EdgeIndex
from funcppo.types import F32, F64, I64

SOURCE_SAMPLE_SIZE = 256  # sources from which the pairs of a body are estimated


class PathRules(NamedTuple):
    """Path rules of one length, and the facts that they derive from others."""

    head_predicate: I64[Tensor, "R"]
    body_labels: I64[Tensor, "R J"]
    support: F64[Tensor, "R"]
    # facts among the support that every path derives from the fact itself
    circular_support: F64[Tensor, "R"]
    # pairs of a fact and a rule that derives it from others
    fact: I64[Tensor, "n"]
    rule: I64[Tensor, "n"]


class PathRuleSearch(NamedTuple):
    """The result of a search for path rules."""

    rules: PathRules
    # fraction of the head's facts that each rule was looked for in
    sampling_fraction: F64[Tensor, "R"]
    notes: list[str]  # what was sampled or not looked at, one line each


class CountEstimate(NamedTuple):
    """How many pairs each body joins."""

    total: F64[Tensor, "K"]
    std_error: F64[Tensor, "K"]  # standard error; 0 where the count is exact


class DeadlineCheck(Protocol):
    """Whether the time limit has passed."""

    def __call__(self) -> bool: ...


def find_path_rules(
    edges: EdgeIndex,
    predicate: I64[Tensor, "N"],
    length: int,
    min_support: int,
    max_rows: int,
    priority: F32[Tensor, "N"],
    deadline_passed: DeadlineCheck,
) -> PathRuleSearch:
    """Find the rules of a length that derive `min_support` facts from others.

    A predicate whose facts cost more than its part of the work is searched through a sample of them. A body must then
    close at least two of the sample, and counts are scaled by its fraction.

    Args:
      predicate: the predicate of each fact.
      length: number of body atoms.
      max_rows: rows to look at, for all predicates together.
      priority: a random number in [0, 1) for each fact.
      deadline_passed: asked between predicates and blocks.

    Returns:
      rules: the rules of all heads.
      sampling_fraction: the fraction of facts in which each rule was looked for.
      notes: what was sampled or not looked at.
    """
    groups = _group_by_predicate(predicate)
    cost = paths.closed_path_cost(edges, length)
    costs = torch.stack([cost[group].sum() for group in groups])
    max_cost = _max_cost_per_group(costs, max_rows)

    none = predicate[:0]
    parts = [
        PathRules(
            none,
            none.view(0, 1).expand(0, length),
            none.double(),
            none.double(),
            none,
            none,
        )
    ]
    fractions = [none.double()]
    n_rules = n_searched = n_sampled = 0
    for group, group_cost in zip(groups, costs.tolist()):
        if deadline_passed():
            break
        # Search a sample by ascending priority: if time ends the search, what is done is a smaller sample.
        fraction = min(1.0, max_cost / max(group_cost, 1))
        sample = _sample_by_priority(group, priority, fraction)
        closed, share_done = _close_facts(
            edges, sample, length, deadline_passed
        )
        fraction *= share_done
        rules = path_rules_of_head(edges, closed, min_support, fraction)

        # Number the rules of all heads consecutively.
        head = predicate[group[0]].expand(len(rules.support))
        parts.append(
            rules._replace(head_predicate=head, rule=rules.rule + n_rules)
        )
        fractions.append(torch.full_like(rules.support, fraction))
        n_rules += len(rules.support)
        n_searched += 1
        n_sampled += fraction < 1.0

    every = PathRules(*(torch.cat(columns) for columns in zip(*parts)))
    notes = _search_notes(len(groups), n_searched, n_sampled)
    return PathRuleSearch(every, torch.cat(fractions), notes)


def _sample_by_priority(
    rows: Tensor, priority: Tensor, fraction: float
) -> Tensor:
    """The rows whose priority is below the fraction, by ascending priority."""
    sample = rows[priority[rows] < fraction]
    return sample[torch.sort(priority[sample]).indices]


def _search_notes(n_heads: int, n_searched: int, n_sampled: int) -> list[str]:
    """What a search left out, one line each."""
    notes: list[str] = []
    if n_searched < n_heads:
        notes.append(f"stopped before all {n_heads} heads were searched")
    if n_sampled:
        notes.append(
            f"{n_sampled} of {n_heads} heads were searched through a sample of their facts"
        )
    return notes


def _group_by_predicate(predicate: Tensor) -> list[Tensor]:
    """The rows of the facts of each predicate that has any."""
    order = torch.sort(predicate, stable=True).indices
    cuts = torch.diff(predicate[order]).nonzero().squeeze(1).cpu() + 1
    return [group for group in torch.tensor_split(order, cuts) if len(group)]


def _max_cost_per_group(costs: Tensor, max_rows: int) -> float:
    """The most that each group may cost so that all together cost `max_rows`; cheap groups leave more to the others."""
    ascending = torch.sort(costs.double()).values
    spent = torch.cat([ascending.new_zeros(1), torch.cumsum(ascending, 0)[:-1]])
    n_left = torch.arange(len(costs), 0, -1, device=costs.device)
    limits = (max_rows - spent) / n_left
    exceeding = (ascending > limits).nonzero()
    return (
        float(limits[exceeding[0, 0]])
        if len(exceeding)
        else float(ascending[-1])
    )


def _close_facts(
    edges: EdgeIndex, facts: Tensor, length: int, deadline_passed: DeadlineCheck
) -> tuple[ClosedPaths, float]:
    """The bodies that close the facts, and the share of the facts, in order, that there was time for."""
    chunks = [paths.find_closed_paths(edges, facts[:0], length)]
    n_done = 0
    for block in paths.split_by_cost(edges, facts, length):
        chunks.append(paths.find_closed_paths(edges, block, length))
        n_done += len(block)
        if deadline_passed():
            break
    closed = ClosedPaths(*(torch.cat(columns) for columns in zip(*chunks)))
    return closed, n_done / max(len(facts), 1)


def path_rules_of_head(
    edges: EdgeIndex,
    closed_paths: ClosedPaths,
    min_support: int = 1,
    sampling_fraction: float = 1.0,
) -> PathRules:
    """The candidates for one head, given the bodies that close a sample of its facts.

    Returns:
      PathRules whose `head_predicate` is empty: the caller fills it.
    """
    # Number the bodies; count the facts that each closes, and those that it closes only by themselves.
    label_columns = closed_paths.body_labels.unbind(1)
    bits = [edges.n_labels.bit_length()] * len(label_columns)
    code = row_index.encode_rows(label_columns, bits).key
    _, rule, n_closed = torch.unique(
        code, return_inverse=True, return_counts=True
    )
    n_circular = torch.bincount(
        rule, closed_paths.is_circular.double(), minlength=len(n_closed)
    )
    threshold = max(min_support * sampling_fraction, min(2, min_support))
    is_kept = n_closed - n_circular >= threshold

    # Any row of a body tells its labels.
    row = torch.arange(len(rule), device=rule.device)
    example = torch.zeros_like(n_closed).scatter(0, rule, row)[is_kept]
    new_number = torch.cumsum(is_kept, 0) - 1
    derives = (is_kept[rule] & ~closed_paths.is_circular).nonzero().squeeze(1)
    scale = max(sampling_fraction, 1e-9)
    return PathRules(
        head_predicate=closed_paths.fact[:0],
        body_labels=closed_paths.body_labels[example],
        support=n_closed[is_kept].double() / scale,
        circular_support=n_circular[is_kept] / scale,
        fact=closed_paths.fact[derives],
        rule=new_number[rule[derives]],
    )


def count_body_pairs(
    edges: EdgeIndex,
    bodies: I64[Tensor, "K J"],
    max_rows: int,
    priority: F32[Tensor, "C1"],
    deadline_passed: DeadlineCheck,
) -> CountEstimate:
    """Count the pairs of each body: exactly where the work allows it, cheap bodies first, else from a sample.

    Args:
      bodies: distinct, in lexicographic order.
      max_rows: approximate number of pairs to make at most, for the sample and again for the exact counts.
      priority: a random number in [0, 1) for each entity.
      deadline_passed: asked between blocks of sources.

    Returns:
      total: the number of pairs of each body.
      std_error: its standard error, 0 where it is exact.
    """
    sources = _sources_by_priority(edges, priority)
    fraction = _sample_fraction(edges, bodies[:, 0], priority)
    estimate = _count_pairs(
        edges, bodies, sources, fraction, priority, max_rows, deadline_passed
    )

    # Count again from all sources what together costs no more than the limit.
    is_cheap = _cheapest_within_limit(estimate.total, max_rows) & (
        estimate.std_error > 0
    )
    if not is_cheap.any():
        return estimate
    all_sources = torch.ones_like(fraction[is_cheap])
    exact = _count_pairs(
        edges,
        bodies[is_cheap],
        sources,
        all_sources,
        priority,
        2 * max_rows,
        deadline_passed,
    )
    is_better = exact.std_error < estimate.std_error[is_cheap]
    improved = is_cheap.nonzero().squeeze(1)[is_better]
    return CountEstimate(
        total=estimate.total.scatter(0, improved, exact.total[is_better]),
        std_error=estimate.std_error.scatter(
            0, improved, exact.std_error[is_better]
        ),
    )


def count_pca_pairs(
    edges: EdgeIndex,
    head_label: I64[Tensor, "R"],
    body_labels: I64[Tensor, "R J"],
    count_exactly: Tensor,
    max_rows: int,
    priority: F32[Tensor, "C1"],
) -> CountEstimate:
    """Count the pairs of each rule whose source has some fact of the head, exactly or from a sample of sources.

    No time limit ends this: a count over a few sources would be worth nothing, and that of all pairs took longer.

    Args:
      count_exactly: which rules to count from all sources, as far as twice `max_rows` allows.
      max_rows: approximate number of pairs to make at most.
      priority: a random number in [0, 1) for each entity.

    Returns:
      total: the number of pairs of each rule.
      std_error: its standard error, 0 where it is exact.
    """
    # Rules with one body share its walk, which is exact if one of them asks for it.
    n_rules = len(head_label)
    bodies, body_of_rule = torch.unique(body_labels, dim=0, return_inverse=True)
    body_number = torch.arange(len(bodies) + 1, device=priority.device)
    is_exact = torch.isin(body_number[:-1], body_of_rule[count_exactly])
    fraction = torch.where(
        is_exact, 1.0, _sample_fraction(edges, bodies[:, 0], priority)
    )
    rules_by_body = torch.sort(body_of_rule, stable=True)
    offsets = torch.searchsorted(rules_by_body.values, body_number)

    total = torch.zeros(n_rules, dtype=torch.float64, device=priority.device)
    squares = total
    limit, n_rows = 1.0, 0
    sources = _sources_by_priority(edges, priority)
    for pairs, next_priority in paths.iter_body_pairs(
        edges, bodies, sources, fraction, priority
    ):
        # A pair counts for each rule of its body whose head label leaves the pair's source.
        body, source, count = _pairs_per_source(edges, pairs)
        for row, position in (
            ragged_arange(offsets[body], offsets[body + 1] - offsets[body])
            if len(body)
            else ()
        ):
            rule = rules_by_body.indices[position]
            n_head_edges = paths.outgoing_edges(
                edges, source[row], head_label[rule]
            ).length
            n_pairs = count[row] * (n_head_edges > 0).double()
            total = total + torch.bincount(rule, n_pairs, minlength=n_rules)
            squares = squares + torch.bincount(
                rule, n_pairs * n_pairs, minlength=n_rules
            )
        n_rows += len(pairs.body)
        if next_priority < 1.0 and n_rows > 2 * max_rows:
            limit = next_priority
            break
    fraction = torch.clamp(fraction, max=limit)[body_of_rule]
    return _estimate_total(
        edges, body_labels[:, 0], fraction, priority, total, squares
    )


def _cheapest_within_limit(cost: F64[Tensor, "K"], max_rows: int) -> Tensor:
    """Mask of the cheapest items that together cost no more than the limit."""
    cost, order = torch.sort(cost, stable=True)
    fits = torch.cumsum(cost, 0) <= max_rows
    return torch.zeros_like(order, dtype=torch.bool).scatter(0, order, fits)


def _sources_by_priority(edges: EdgeIndex, priority: Tensor) -> Tensor:
    """The entities that have edges, by ascending priority: any first part of them is a sample of the whole."""
    sources = torch.diff(edges.offsets).nonzero().squeeze(1)
    return sources[torch.sort(priority[sources], stable=True).indices]


class _LabelPriorities(NamedTuple):
    """The priorities of each label's sources."""

    value: Tensor  # label + priority, ascending
    offsets: Tensor  # those of label l: offsets[l] to offsets[l + 1]


def _priorities_by_label(
    edges: EdgeIndex, priority: Tensor
) -> _LabelPriorities:
    # Each key is source * n_labels + label.
    pairs = edges.label_spans.entries.view(-1, 2)[:, 0]
    pairs = pairs[pairs >= 0]
    label = (pairs % edges.n_labels).double()
    value = torch.sort(
        label + priority[pairs // edges.n_labels].double()
    ).values
    labels = torch.arange(edges.n_labels + 1, device=priority.device).double()
    return _LabelPriorities(value, torch.searchsorted(value, labels))


def _sample_fraction(
    edges: EdgeIndex, label: Tensor, priority: Tensor
) -> Tensor:
    """The fraction that samples the first SOURCE_SAMPLE_SIZE sources of each label, 1 where it has no more."""
    value, offsets = _priorities_by_label(edges, priority)
    after_sample = offsets[label] + SOURCE_SAMPLE_SIZE
    takes_all = after_sample >= offsets[label + 1]
    fraction = value[torch.where(takes_all, 0, after_sample)] - label
    return torch.where(takes_all, 1.0, fraction).to(priority.dtype)


class _SourceCounts(NamedTuple):
    """How many pairs each body joins from each source."""

    body: Tensor
    source: Tensor
    n_pairs: Tensor


def _pairs_per_source(edges: EdgeIndex, pairs: BodyPairs) -> _SourceCounts:
    code, count = torch.unique_consecutive(
        pairs.body * edges.n_entity_ids + pairs.source, return_counts=True
    )
    return _SourceCounts(
        code // edges.n_entity_ids, code % edges.n_entity_ids, count
    )


def _count_pairs(
    edges: EdgeIndex,
    bodies: Tensor,
    sources: Tensor,
    fraction: Tensor,
    priority: Tensor,
    max_rows: int,
    deadline_passed: DeadlineCheck,
) -> CountEstimate:
    """The pairs of each body, from a fraction of the sources or as many as work and time allow."""
    n_bodies = len(bodies)
    total = torch.zeros(n_bodies, dtype=torch.float64, device=priority.device)
    squares = total
    limit, n_rows = 1.0, 0
    for pairs, next_priority in paths.iter_body_pairs(
        edges, bodies, sources, fraction, priority
    ):
        body, _, count = _pairs_per_source(edges, pairs)
        n_pairs = count.double()
        total = total + torch.bincount(body, n_pairs, minlength=n_bodies)
        squares = squares + torch.bincount(
            body, n_pairs * n_pairs, minlength=n_bodies
        )
        # Stop between blocks of sources: what is done is a sample of them.
        n_rows += len(pairs.body)
        if next_priority < 1.0 and (n_rows > max_rows or deadline_passed()):
            limit = next_priority
            break
    fraction = torch.clamp(fraction, max=limit)
    return _estimate_total(
        edges, bodies[:, 0], fraction, priority, total, squares
    )


def _estimate_total(
    edges: EdgeIndex,
    label: Tensor,
    sampling_fraction: Tensor,
    priority: Tensor,
    sample_sum: Tensor,
    sample_sum_of_squares: Tensor,
) -> CountEstimate:
    """Estimate a sum over all sources of a label from that over a sample, with its standard error.

        total = N / n * sum,    standard error = N sqrt((1 - n / N) s^2 / n)    for n of N, drawn without replacement

    Where the sampled sources do not differ, nothing is known of how the others may: the error is infinite.

    Source: Cochran 1977, "Sampling techniques", theorems 2.1 and 2.2.
    """
    # The number of sources of each label, and of those in the sample.
    value, offsets = _priorities_by_label(edges, priority)
    n_sources = (offsets[label + 1] - offsets[label]).double()
    n_sampled = (
        torch.searchsorted(value, label.double() + sampling_fraction.double())
        - offsets[label]
    )
    n_sampled = torch.where(
        sampling_fraction >= 1.0, n_sources, n_sampled.double()
    )

    # Both parts of the variance are whole numbers, so equal counts give exactly 0.
    numerator = (
        n_sampled * sample_sum_of_squares - sample_sum * sample_sum
    ).clamp_min(0)
    variance = numerator / (n_sampled * (n_sampled - 1)).clamp_min(1)
    unseen_share = 1 - n_sampled / n_sources.clamp_min(1)
    error = n_sources * torch.sqrt(
        unseen_share * variance / n_sampled.clamp_min(1)
    )
    is_unknown = (n_sampled < n_sources) & (variance == 0)

    # Multiply before dividing: exact where all sources are sampled.
    total = sample_sum * n_sources / n_sampled.clamp_min(1)
    return CountEstimate(
        total=total, std_error=torch.where(is_unknown, torch.inf, error)
    )
