"""Bodies that derive a fact: path rules found from facts by meeting in the middle, and facts that need themselves.

A body derives the fact h(x, y) from other facts if there is a walk along its labels from x to y that does not take the
fact. Half of the walk is made from x, half from y, and the halves are joined where they meet. The halves are as many as
the walks of half the length: far fewer, where the graph is sparse, than the pairs that bodies join. All that is found
is exact: the support without circular support of every rule of a head's predicate, and the facts that it derives so.
A head whose facts have too many half walks is left out, and counted. `plan_closing` says which are, and
`iter_closed_rules` finds the rules of the others.

`is_circular` tells the facts that a body derives from themselves alone: every path between their arguments walks along
the fact. Let f = h(x, y) be the fact. The paths x -> z -> w -> y of a body l1, l2, l3 are counted elsewhere; those that
walk along f are counted here by the step that takes f:

    step 1 takes f, so z = y                    step 3 takes f, so w = x
    step 2 takes f forwards, so z = x, w = y    step 2 takes f backwards, so z = y, w = x

The path with z = y and w = x can be in three of these cases; it counts once. Where x = y, either direction of f is a
step from x to itself, and the one path that step 2 takes f on is that path again. Shorter bodies are alike. For longer
ones, paths that do not walk along f are looked for, half from x and half from y.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from funcppo.core.types import F32, F64, I64, Bool
from funcppo.kg.logic import row_index
from funcppo.kg.logic.joins import expand_ranges
from funcppo.kg.mining import paths
from funcppo.kg.mining.mined_rules import Budget
from funcppo.kg.mining.paths import CHUNK_ROWS, EdgeIndex

# A fact may have this many half walks.
MAX_FACT_ROWS = 2 * CHUNK_ROWS
# Pairs of a fact and a body that derives it: of one head, at most.
MAX_CLOSED_PAIRS = 1 << 23
MAX_CODE_BITS = 62


class ClosedRules(NamedTuple):
    """Path rules with bodies of one length, and the facts that they derive from other facts."""

    predicate: I64[Tensor, "R"]  # of the head, from 0
    body_code: I64[Tensor, "R"]
    support: F64[Tensor, "R"]  # without circular support
    fact: I64[Tensor, "n"]  # pairs of a fact and a rule that derives it
    rule: I64[Tensor, "n"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ClosingPlan:
    """From which facts to walk, and how far."""

    predicates: tuple[
        int, ...
    ]  # heads to look at, from 0, the least work first
    n_left_out: int  # heads that have facts, but too much work
    fact_rows: F64[Tensor, "N"]  # half walks of each fact
    # the longer half is made from the first argument
    is_forward: Bool[Tensor, "N"]
    n_rows: float  # expected work


class _HalfWalks(NamedTuple):
    """Ends of walks from one argument of facts, each once a fact and body."""

    fact: I64[Tensor, "n"]  # position among the facts
    code: I64[Tensor, "n"]  # of the labels towards the second argument
    end: I64[Tensor, "n"]


def no_closed_rules(device: torch.device) -> ClosedRules:
    """A table without a rule."""
    none = torch.zeros(0, dtype=torch.int64, device=device)
    return ClosedRules(none, none, none.double(), none, none)


def concatenate_closed(parts: Sequence[ClosedRules]) -> ClosedRules:
    """All rules of some tables."""
    rules: list[Tensor] = []
    n_rules = 0
    for part in parts:
        rules.append(part.rule + n_rules)
        n_rules += len(part.support)
    whole = ClosedRules(*(torch.cat(columns) for columns in zip(*parts)))
    return whole._replace(rule=torch.cat(rules))


def select_closed(
    closed: ClosedRules, is_kept: Bool[Tensor, "R"]
) -> ClosedRules:
    """Some of the rules."""
    row = is_kept[closed.rule].nonzero().squeeze(1)
    new_number = torch.cumsum(is_kept, 0) - 1
    return ClosedRules(
        closed.predicate[is_kept],
        closed.body_code[is_kept],
        closed.support[is_kept],
        closed.fact[row],
        new_number[closed.rule[row]],
    )


def closing_rows(
    edges: EdgeIndex, length: int
) -> tuple[F64[Tensor, "N"], Bool[Tensor, "N"]]:
    """The half walks of each fact, and whether the longer half is made from the first argument."""
    n_short = length // 2
    n_walks = torch.ones(
        edges.n_entity_ids, dtype=torch.float64, device=edges.source.device
    )
    total = torch.zeros_like(n_walks)
    short = total
    for step in range(length - n_short):
        n_walks = torch.zeros_like(n_walks).index_add(
            0, edges.source, n_walks[edges.target]
        )
        total = total + n_walks
        if step + 1 == n_short:
            short = total
    x, y = edges.first_argument, edges.second_argument
    forward = total[x] + short[y]
    backward = short[x] + total[y]
    return torch.minimum(forward, backward), forward <= backward


def plan_closing(edges: EdgeIndex, length: int, max_rows: float) -> ClosingPlan:
    """Choose the heads to look at, those of the least work, so that the work is within a limit.

    Args:
      length: number of labels of the bodies.
      max_rows: limit of the work.
    """
    fact_rows, is_forward = closing_rows(edges, length)
    n_predicates = edges.n_predicates
    rows = torch.bincount(edges.predicate, fact_rows, minlength=n_predicates)
    largest = torch.zeros_like(rows).scatter_reduce(
        0, edges.predicate, fact_rows, "amax"
    )
    has_facts = largest > 0
    possible = has_facts & (largest <= MAX_FACT_ROWS)
    if not _codes_fit(edges, length):
        possible = torch.zeros_like(possible)
    order = torch.sort(torch.where(possible, rows, torch.inf), stable=True)
    n_taken = int((torch.cumsum(order.values, 0) <= max_rows).sum())
    taken = order.indices[:n_taken]
    return ClosingPlan(
        predicates=tuple(taken.tolist()),
        n_left_out=int(has_facts.sum()) - n_taken,
        fact_rows=fact_rows,
        is_forward=is_forward,
        n_rows=float(rows[taken].sum()),
    )


def _codes_fit(edges: EdgeIndex, length: int) -> bool:
    """Whether bodies, and half walks of a fact, are numbers of 62 bits."""
    half = edges.n_labels ** (length - length // 2) * edges.n_entity_ids
    n_codes = max(edges.n_labels**length, half * MAX_FACT_ROWS)
    return n_codes.bit_length() <= MAX_CODE_BITS


def iter_closed_rules(
    edges: EdgeIndex,
    plan: ClosingPlan,
    length: int,
    min_support: int,
    budget: Budget,
    share: float,
) -> Iterator[ClosedRules | None]:
    """Yield the rules of each head of a plan; None for a head with too many, or if the budget is spent.

    Args:
      length: number of labels of the bodies.
      min_support: of the rules, circular support left out.
      budget: pays for the work.
      share: share of the budget at which the search stops.
    """
    for predicate in plan.predicates:
        pairs = _closing_pairs(edges, plan, predicate, length, budget, share)
        if pairs is None:
            yield None
            continue
        fact, code = pairs
        body_code, rule = row_index.unique_inverse(code)
        n_facts = torch.bincount(rule)
        closed = ClosedRules(
            torch.full_like(body_code, predicate),
            body_code,
            n_facts.double(),
            fact,
            rule,
        )
        yield select_closed(closed, n_facts >= min_support)


def _closing_pairs(
    edges: EdgeIndex,
    plan: ClosingPlan,
    predicate: int,
    length: int,
    budget: Budget,
    share: float,
) -> tuple[Tensor, Tensor] | None:
    """The distinct pairs of a head's fact and the code of a body that derives it; None if they are too many."""
    n_short = length // 2
    none = edges.predicate[:0]
    facts = [none]
    codes = [none]
    n_pairs = 0
    for n_forward in sorted({n_short, length - n_short}):
        is_forward = n_forward > n_short
        chosen = edges.predicate == predicate
        if length % 2:
            chosen &= plan.is_forward == is_forward
        rows = chosen.nonzero().squeeze(1)
        for first, last in paths.pack(plan.fact_rows[rows], CHUNK_ROWS):
            if budget.is_exhausted(share) or n_pairs > MAX_CLOSED_PAIRS:
                return None
            part = rows[first:last]
            budget.spend(float(plan.fact_rows[part].sum()))
            fact, code = _meet(edges, part, n_forward, length, budget)
            facts.append(part[fact])
            codes.append(code)
            n_pairs += len(fact)

    return torch.cat(facts), torch.cat(codes)


def _meet(
    edges: EdgeIndex,
    fact_row: Tensor,
    n_forward: int,
    length: int,
    budget: Budget,
) -> tuple[Tensor, Tensor]:
    """The distinct pairs of the position of a fact and the code of a body that derives it."""
    n_backward = length - n_forward
    forward = _half_walks(edges, fact_row, n_forward, is_forward=True)
    backward = _half_walks(edges, fact_row, n_backward, is_forward=False)
    key, order = row_index.sort_keys(
        backward.fact * edges.n_entity_ids + backward.end
    )
    forward_key = forward.fact * edges.n_entity_ids + forward.end
    first = torch.searchsorted(key, forward_key)
    count = torch.searchsorted(key, forward_key, right=True) - first

    facts = [fact_row[:0]]
    codes = [fact_row[:0]]
    for begin, end in paths.pack(count.double(), CHUNK_ROWS):
        row, position = expand_ranges(first[begin:end], count[begin:end])
        prefix = forward.code[begin:end][row]
        suffix = backward.code[order[position]]
        fact, code = _distinct_pairs(
            forward.fact[begin:end][row],
            prefix * edges.n_labels**n_backward + suffix,
            len(fact_row),
        )
        facts.append(fact)
        codes.append(code)
        budget.spend(len(row))
    return _distinct_pairs(torch.cat(facts), torch.cat(codes), len(fact_row))


def _distinct_pairs(
    fact: Tensor, code: Tensor, n_facts: int
) -> tuple[Tensor, Tensor]:
    """The distinct pairs of two columns, the first below `n_facts`."""
    codes, number = row_index.unique_inverse(code)
    key = row_index.unique_values(number * n_facts + fact)
    return key % n_facts, codes[key // n_facts]


def _half_walks(
    edges: EdgeIndex, fact_row: Tensor, n_steps: int, *, is_forward: bool
) -> _HalfWalks:
    """The walks from one argument of each fact that do not take the fact."""
    n_labels = edges.n_labels
    degree = torch.diff(edges.offsets)
    argument = edges.first_argument if is_forward else edges.second_argument
    fact = torch.arange(len(fact_row), device=fact_row.device)
    walks = _HalfWalks(fact, torch.zeros_like(fact), argument[fact_row])
    for step in range(n_steps):
        row, edge = expand_ranges(edges.offsets[walks.end], degree[walks.end])
        is_other = edges.fact[edge] != fact_row[walks.fact[row]]
        row = row[is_other]
        edge = edge[is_other]
        label = edges.label[edge]
        code = walks.code[row]
        # A body walks the edges of its second half the other way, and the last step first.
        code = (
            code * n_labels + label
            if is_forward
            else (label ^ 1) * n_labels**step + code
        )
        walks = _distinct_walks(
            edges,
            _HalfWalks(walks.fact[row], code, edges.target[edge]),
            n_labels ** (step + 1),
        )
    return walks


def _distinct_walks(
    edges: EdgeIndex, walks: _HalfWalks, n_codes: int
) -> _HalfWalks:
    """Half walks with codes below `n_codes`, each once."""
    body = walks.fact * n_codes + walks.code
    key = row_index.unique_values(body * edges.n_entity_ids + walks.end)
    body = key // edges.n_entity_ids
    return _HalfWalks(body // n_codes, body % n_codes, key % edges.n_entity_ids)


# -- circularity


def is_circular(
    edges: EdgeIndex,
    fact: I64[Tensor, "n"],
    body_labels: I64[Tensor, "n J"],
    n_paths: F32[Tensor, "n"],
) -> Bool[Tensor, "n"]:
    """Whether each fact is derived by its body from itself alone.

    Args:
      fact: facts whose arguments their bodies join.
      body_labels: labels of the body.
      n_paths: number of paths of the body between the arguments.
    """
    has_own_predicate = (
        body_labels // 2 == edges.predicate[fact][:, None]
    ).any(1)
    row = has_own_predicate.nonzero().squeeze(1)
    count_along = _COUNT_ALONG.get(body_labels.shape[1])
    if count_along is not None:
        n_along = count_along(edges, fact[row], body_labels[row])
        circular = n_along == n_paths[row]
    else:
        circular = ~_has_path_beside(edges, fact[row], body_labels[row])
    none = torch.zeros_like(fact, dtype=torch.bool)
    return none.index_copy(0, row, circular)


def _takes_fact(edges: EdgeIndex, fact: Tensor, label: Tensor) -> Tensor:
    """Whether a step along the label from the fact's first argument to its second is the fact."""
    head = 2 * edges.predicate[fact]
    is_loop = edges.first_argument[fact] == edges.second_argument[fact]
    return (label == head) | (is_loop & (label == head + 1))


def _count_along_1(edges: EdgeIndex, fact: Tensor, labels: Tensor) -> Tensor:
    """Paths of one step along the fact."""
    return _takes_fact(edges, fact, labels[:, 0]).float()


def _count_along_2(edges: EdgeIndex, fact: Tensor, labels: Tensor) -> Tensor:
    """Paths of two steps along the fact."""
    x = edges.first_argument[fact]
    y = edges.second_argument[fact]
    l1, l2 = labels.unbind(1)
    takes_1 = _takes_fact(edges, fact, l1)
    takes_2 = _takes_fact(edges, fact, l2)

    by_step_1 = takes_1 & paths.has_edge(edges, y, l2, y)
    by_step_2 = takes_2 & paths.has_edge(edges, x, l1, x)
    is_both = (x == y) & takes_1 & takes_2
    return by_step_1.float() + by_step_2.float() - is_both.float()


def _count_along_3(edges: EdgeIndex, fact: Tensor, labels: Tensor) -> Tensor:
    """Paths of three steps along the fact."""
    x = edges.first_argument[fact]
    y = edges.second_argument[fact]
    l1, l2, l3 = labels.unbind(1)
    head = 2 * edges.predicate[fact]
    is_loop = x == y
    takes_1 = _takes_fact(edges, fact, l1)
    takes_3 = _takes_fact(edges, fact, l3)
    is_forward = (l2 == head) & ~is_loop
    is_backward = (l2 == head + 1) | (is_loop & (l2 == head))

    by_step_1 = _count_round_trips(edges, y, l2, l3, takes_1)
    by_step_3 = _count_round_trips(edges, x, l1, l2, takes_3)
    by_step_2 = (
        is_forward
        & paths.has_edge(edges, x, l1, x)
        & paths.has_edge(edges, y, l3, y)
    )

    # The path with z = y and w = x counts once if any step takes the fact.
    is_path = (
        paths.has_edge(edges, x, l1, y)
        & paths.has_edge(edges, y, l2, x)
        & paths.has_edge(edges, x, l3, y)
    )
    is_along = takes_1 | takes_3 | is_backward
    n_counted = takes_1.float() + takes_3.float()
    correction = is_path.float() * (is_along.float() - n_counted)
    return by_step_1 + by_step_3 + by_step_2.float() + correction


_COUNT_ALONG = {1: _count_along_1, 2: _count_along_2, 3: _count_along_3}


def _count_round_trips(
    edges: EdgeIndex,
    entity: Tensor,
    there: Tensor,
    back: Tensor,
    is_asked: Tensor,
) -> Tensor:
    """The paths from each entity along the label `there` and then `back` to it; 0 where it is not asked."""
    asked = is_asked.nonzero().squeeze(1)
    n_labels = edges.n_labels
    key = (entity * n_labels + there) * n_labels + back
    distinct, inverse = row_index.unique_inverse(key[asked])
    start = paths.find_keys(edges.starts, distinct // n_labels)
    offsets = edges.starts.offsets
    first = offsets[start.position]
    n_edges = offsets[start.position + 1] - first

    count = torch.zeros_like(distinct, dtype=torch.float32)
    for begin, end in paths.pack(n_edges.double(), paths.CHUNK_ROWS):
        row, edge = expand_ranges(first[begin:end], n_edges[begin:end])
        trip = start.row[begin:end][row]
        home = distinct[trip] // (n_labels * n_labels)
        returns = paths.has_edge(
            edges, edges.target[edge], distinct[trip] % n_labels, home
        )
        count = count + torch.bincount(
            trip, returns.float(), minlength=len(count)
        )
    zeros = torch.zeros_like(entity, dtype=torch.float32)
    return zeros.index_copy(0, asked, count[inverse])


def _has_path_beside(edges: EdgeIndex, fact: Tensor, labels: Tensor) -> Tensor:
    """Whether each body has a path between the arguments of its fact that does not walk along it."""
    length = labels.shape[1]
    middle = length - length // 2
    fact_rows, _ = closing_rows(edges, length)
    found = [torch.zeros_like(fact[:0], dtype=torch.bool)]
    for begin, end in paths.pack(fact_rows[fact], paths.CHUNK_ROWS):
        rows = fact[begin:end]
        x = edges.first_argument[rows]
        y = edges.second_argument[rows]
        to_middle = labels[begin:end, :middle]
        from_middle = labels[begin:end, middle:].flip(1) ^ 1
        forward = _reachable_keys(edges, rows, x, to_middle)
        backward = _reachable_keys(edges, rows, y, from_middle)
        meets = forward[torch.isin(forward, backward)] // edges.n_entity_ids
        none = torch.zeros_like(rows, dtype=torch.bool)
        found.append(none.index_fill(0, meets, True))
    return torch.cat(found)


def _reachable_keys(
    edges: EdgeIndex, fact: Tensor, start: Tensor, labels: Tensor
) -> Tensor:
    """Each row with an entity that its labels lead to, not along its fact: row * n_entity_ids + entity."""
    offsets = edges.starts.offsets
    row = torch.arange(len(fact), device=fact.device)
    entity = start
    key = row * edges.n_entity_ids + entity
    for label in labels.unbind(1):
        found = paths.find_keys(
            edges.starts, entity * edges.n_labels + label[row]
        )
        first = offsets[found.position]
        at, edge = expand_ranges(first, offsets[found.position + 1] - first)
        row = row[found.row[at]]
        is_other = edges.fact[edge] != fact[row]
        target = edges.target[edge[is_other]]
        key = row_index.unique_values(
            row[is_other] * edges.n_entity_ids + target
        )
        row = key // edges.n_entity_ids
        entity = key % edges.n_entity_ids
    return key
