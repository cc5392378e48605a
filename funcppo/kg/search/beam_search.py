"""One step of the beam search for proofs: partial proofs extended by one choice of the policy.

A slot holds the beam of one candidate. `extend_beams` extends up to R partial proofs by one resolution step, those of
one slot always together, and keeps of each slot's children the K most probable that are still open. No row depends on
another slot's. `slot_scheduler` feeds candidates into the slots.

Log-probabilities are natural logarithms, -inf where an entry is empty or a probability is 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from funcppo.core import tree
from funcppo.core.settings import Size, check_fields
from funcppo.core.types import F32, F64, I32, I64, Bool
from funcppo.kg.logic.resolve import Goals, ResolveConfig, resolve
from funcppo.kg.scores import rules
from funcppo.kg.search.env import Observation, World, make_observation
from funcppo.kg.search.network import Params, exceeds_capacity
from funcppo.nets.networks import Agent

ScoreName = Literal["success", "best-proof", "greedy"]
# nats, added to a greedy path that does not end in a proof
UNPROVED_PENALTY = -100.0
_SLOT_SELECTION_ROUNDS = 3  # passes over the slots to fill the rows of a step


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchConfig:
    """Static settings of a beam search; a new value is a new graph."""

    resolve: ResolveConfig
    agent: Agent
    score: ScoreName
    max_depth: Size  # resolution steps
    slots: Size  # B, candidates searched at the same time
    beam: Size  # K, partial proofs kept for each candidate; 1 for greedy
    rows_per_step: Size  # R, partial proofs extended in one step; at least K
    chunk_size: Size  # candidates that are loaded at once

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is out of range."""
        check_fields(self)


class SearchResult(NamedTuple):
    """Results of candidates, one a row."""

    log_score: F32[Tensor, "B"]  # logarithm of the score
    # log-probability of all choices that lead to no proof, of partial proofs at the depth limit, and of those that the
    # beam dropped: the logarithm of 1 - `success`; not counted for the other scores
    failed_log_mass: F32[Tensor, "B"]
    # log-probability of all partial proofs that the beam dropped
    pruned_log_mass: F32[Tensor, "B"]
    # log-probability of all partial proofs some of whose successors did not fit
    overflow_log_mass: F32[Tensor, "B"]
    # log-probability of the most probable proof
    best_log_prob: F32[Tensor, "B"]
    trace: I32[Tensor, "B T"]  # choice ids of that proof; 0-padded
    # number of its choices; 0 where there is no proof
    proof_length: I32[Tensor, "B"]
    n_steps: I32[Tensor, "B"]  # steps that the candidate's beam took


class SearchState(NamedTuple):
    """The candidates in the slots and their beams."""

    goals: Goals  # goals that are left of each partial proof, [B, K, A, ...]
    # of each partial proof; -inf where the beam entry is empty
    log_prob: F32[Tensor, "B K"]
    # ids of the choices so far: a rule's id, or -1 - a fact's id
    trace: I32[Tensor, "B K T"]
    query: I32[Tensor, "B W"]  # the candidate
    # its row in the chunk; the chunk's size where the slot is idle
    candidate_row: I64[Tensor, "B"]
    depth: I32[Tensor, "B"]  # steps so far
    result: SearchResult  # result of the candidate so far, [B]


class BeamStep(NamedTuple):
    """The outcome of one step."""

    search: SearchState
    n_rows: I64[Tensor, ""]  # number of partial proofs extended


class _RowSelection(NamedTuple):
    """The beam entries that a step extends, gathered into R rows."""

    slot_selected: Bool[Tensor, "B"]
    # slot * K + beam entry; B * K where the row is empty
    source: I64[Tensor, "R"]
    mask: Bool[Tensor, "R"]  # the row holds a partial proof


class _Children(NamedTuple):
    """The successors of the rows of a step, in the order of slots."""

    goals: Goals  # [R, S, ...]
    # of the whole path; -inf where there is no successor
    log_prob: F32[Tensor, "R S"]
    # of the path and any choice that leads to no proof, END included
    failed_log_prob: F32[Tensor, "R"]
    proved: Bool[Tensor, "R S"]  # no goals are left
    choice_id: I32[Tensor, "R S"]  # the choice made, as in a trace
    # some successors did not fit the successor table
    overflow: Bool[Tensor, "R"]
    # some successors did not fit the network's capacity: the row is invalid
    exceeds_capacity: Bool[Tensor, "R"]
    # of the path and the policy's best action, END included
    best_action_log_prob: F32[Tensor, "R"]
    source: I64[Tensor, "R"]  # as in `_RowSelection`


class _BeamPlaces(NamedTuple):
    """Where the children of a step go."""

    # slot * K + rank in the slot; B * K where the child is not kept
    target: I64[Tensor, "RS"]
    dropped: Bool[Tensor, "R S"]  # not kept


class _EntryChildren(NamedTuple):
    """The new contents of the beam entries."""

    child: I64[Tensor, "BK"]  # row * S + successor; 0 where the entry is empty
    mask: Bool[Tensor, "BK"]  # the entry holds a child


class _BestProof(NamedTuple):
    """The most probable proof among this step's children of each slot."""

    log_prob: F32[Tensor, "B"]
    trace: I32[Tensor, "B T"]


def slots_for_rows(rows: int, beam: int) -> int:
    """The number of slots that fill so many rows: a beam holds about two partial proofs on average, one if greedy."""
    return rows if beam == 1 else max(1, rows // 2)


def extend_beams(
    cfg: SearchConfig, world: World, params: Params, search: SearchState
) -> BeamStep:
    """Extend the partial proofs of as many slots as the rows of a step hold.

    A slot some of whose successors exceed the network's capacity waits for the next step.
    """
    selected, source, mask = _select_rows(cfg, search)
    children = _expand(cfg, world, params, search, source, mask)

    # Slots that wait; empty and valid rows are scattered to a spare slot, which is cut off.
    slot = source // cfg.beam
    waiting_slot = torch.where(children.exceeds_capacity, slot, cfg.slots)
    none_wait = torch.zeros(
        cfg.slots + 1, dtype=torch.bool, device=source.device
    )
    waits = none_wait.index_fill(0, waiting_slot, True)[: cfg.slots]

    advanced = _advance_slots(cfg, search, children)
    is_extended = mask & ~waits[slot.clamp_max(cfg.slots - 1)]
    return BeamStep(
        search=tree.where(selected & ~waits, advanced, search),
        n_rows=is_extended.sum(),
    )


def policy_log_probs(
    cfg: SearchConfig, world: World, params: Params, observation: Observation
) -> F32[Tensor, "R S1"]:
    """Log-probabilities of the policy over the successors of each partial proof, and END.

        log p_i = (x_i - x_m) - log(1 + sum_{j != m} exp(x_j - x_m)),    m the most probable one

    Without the term of m itself in the sum, the digits of a log p near 0 are exact, where the common form rounds to
    multiples of 1e-7.
    """
    output = cfg.agent.apply(cfg.agent.cfg, world, params, observation)
    largest, most_probable = output.logits.max(-1, keepdim=True)
    below_largest = output.logits - largest
    others = below_largest.exp().scatter(-1, most_probable, 0.0)
    return below_largest - torch.log1p(others.sum(-1, keepdim=True))


def log_odds(cfg: SearchConfig, result: SearchResult) -> F64[Tensor, "B"]:
    """The log-odds of the scores of candidates.

    Those of `success` are the ratio of two masses, which both are sums of what the search met, so that neither end
    of the scale loses digits. The others are products of probabilities, which lose none near 1.
    """
    if cfg.score == "success":
        return result.log_score.double() - result.failed_log_mass.double()
    return rules.log_odds(result.log_score)


def _select_rows(cfg: SearchConfig, search: SearchState) -> _RowSelection:
    """Select the slots to extend and gather their beam entries into rows."""
    device = search.log_prob.device
    n_rows, n_entries = cfg.rows_per_step, cfg.slots * cfg.beam
    is_open = torch.isfinite(search.log_prob)
    selected = _select_slots(cfg, is_open.sum(1))

    # Stream compaction: the selected entries go to rows 0, 1, ...; all others to a spare row, which is cut off.
    entry = torch.arange(n_entries, device=device)
    entry_selected = (is_open & selected[:, None]).flatten()
    position = entry_selected.long().cumsum(0) - 1
    row = torch.where(entry_selected, position, n_rows)
    empty = torch.full(
        (n_rows + 1,), n_entries, dtype=torch.int64, device=device
    )
    source = empty.scatter(0, row, entry)[:n_rows]

    mask = torch.arange(n_rows, device=device) < entry_selected.sum()
    return _RowSelection(
        slot_selected=selected,
        source=torch.where(mask, source, n_entries),
        mask=mask,
    )


def _select_slots(
    cfg: SearchConfig, n_open: I64[Tensor, "B"]
) -> Bool[Tensor, "B"]:
    """Select slots whose open beam entries fit into the rows of a step together.

    First the slots that come first, as many as fit; then, in further rounds, those that fit into the rows left over.
    """
    selected = torch.zeros_like(n_open, dtype=torch.bool)
    n_free = torch.full(
        (), cfg.rows_per_step, dtype=torch.int64, device=n_open.device
    )
    for _ in range(_SLOT_SELECTION_ROUNDS):
        is_excluded = selected | (n_open > n_free)
        demand = torch.where(is_excluded, 0, n_open)
        fits = (demand > 0) & (demand.cumsum(0) <= n_free)
        selected = selected | fits
        n_free = n_free - torch.where(fits, n_open, 0).sum()
    return selected


def _expand(
    cfg: SearchConfig,
    world: World,
    params: Params,
    search: SearchState,
    source: I64[Tensor, "R"],
    mask: Bool[Tensor, "R"],
) -> _Children:
    """The successors of the selected rows, with their log-probabilities under the policy."""
    entry = torch.where(mask, source, 0)
    slot = entry // cfg.beam
    query = search.query[slot]
    goals = tree.map(lambda x: x.flatten(0, 1)[entry], search.goals)
    goals = Goals(
        atoms=torch.where(mask[:, None, None], goals.atoms, 0),
        height=goals.height,
    )

    successors = resolve(cfg.resolve, world.kb, goals, query)
    remaining_depth = 1.0 - search.depth[slot] / cfg.max_depth
    observation = make_observation(
        cfg.resolve,
        world,
        goals,
        successors,
        query,
        remaining_depth,
    )
    log_policy = policy_log_probs(cfg, world, params, observation)

    path_log_prob = search.log_prob.flatten()[entry]
    path_log_prob = torch.where(mask, path_log_prob, -torch.inf)
    choice_log_prob = _choice_log_probs(cfg, log_policy, observation)
    is_followed = torch.nn.functional.pad(
        torch.isfinite(choice_log_prob), (0, 1)
    )
    failed_log_policy = torch.where(is_followed, -torch.inf, log_policy)
    is_over_capacity = exceeds_capacity(cfg.agent.cfg, observation.action_mask)
    is_rule = successors.rule >= 0
    return _Children(
        goals=successors.goals,
        log_prob=path_log_prob[:, None] + choice_log_prob,
        failed_log_prob=path_log_prob + failed_log_policy.logsumexp(1),
        proved=successors.goals.atoms[:, :, 0, 0] == 0,
        choice_id=torch.where(is_rule, successors.rule, -1 - successors.fact),
        overflow=successors.overflow & mask,
        exceeds_capacity=is_over_capacity & mask,
        best_action_log_prob=path_log_prob + log_policy.amax(1),
        source=source,
    )


def _choice_log_probs(
    cfg: SearchConfig, log_policy: F32[Tensor, "R S1"], observation: Observation
) -> F32[Tensor, "R S"]:
    """The logarithm of what the score counts for each choice; -inf where it has no successor or is not followed."""
    log_prob, mask = log_policy[:, :-1], observation.action_mask[:, :-1]
    if cfg.score == "best-proof":
        is_rule = observation.rule >= 0
        log_prob = torch.where(is_rule, log_prob, 0.0)

    if cfg.score == "greedy":
        action = torch.arange(mask.shape[1], device=mask.device)
        best_action = log_policy.argmax(-1, keepdim=True)
        mask = mask & (action == best_action)
    else:
        # A dead end leads to no proof, so it adds nothing to either score.
        mask = mask & ~observation.dead_end
    return torch.where(mask, log_prob, -torch.inf)


def _advance_slots(
    cfg: SearchConfig, search: SearchState, children: _Children
) -> SearchState:
    """The search after one step of every slot that has children: its K most probable open children form the beam."""
    open_log_prob = torch.where(children.proved, -torch.inf, children.log_prob)
    target, dropped = _place_children(cfg, children.source, open_log_prob)
    result = _update_result(cfg, search, children, open_log_prob, dropped)
    child, has_child = _child_of_entry(cfg, target)

    # Entries without a child, at the depth limit, or no better than a proof are empty.
    log_prob = open_log_prob.flatten()[child]
    log_prob = torch.where(has_child, log_prob, -torch.inf)
    log_prob = log_prob.view(cfg.slots, cfg.beam)
    may_continue = search.depth + 1 < cfg.max_depth
    log_prob = torch.where(may_continue[:, None], log_prob, -torch.inf)
    if cfg.score == "best-proof":
        # A path only loses probability: one that is no better than the best proof so far is closed.
        may_win = log_prob > result.log_score[:, None]
        log_prob = torch.where(may_win, log_prob, -torch.inf)

    parent = children.source[child // cfg.resolve.max_successors]
    parent = torch.where(has_child, parent, 0)
    parent_trace = search.trace.flatten(0, 1)[parent].view_as(search.trace)
    choice_id = children.choice_id.flatten()[child]

    def take_children(new: Tensor, old: Tensor) -> Tensor:
        return new.flatten(0, 1)[child].view_as(old)

    return SearchState(
        goals=tree.map(take_children, children.goals, search.goals),
        log_prob=log_prob,
        trace=_append_choice(
            parent_trace, search.depth, choice_id.view_as(log_prob)
        ),
        query=search.query,
        candidate_row=search.candidate_row,
        depth=search.depth + 1,
        result=result,
    )


def _place_children(
    cfg: SearchConfig,
    source: I64[Tensor, "R"],
    open_log_prob: F32[Tensor, "R S"],
) -> _BeamPlaces:
    """Rank the open children of each slot by probability and give the first K their beam entries."""
    n_entries = cfg.slots * cfg.beam
    row_slot = source // cfg.beam
    slot = row_slot[:, None].expand_as(open_log_prob).flatten()
    log_prob = open_log_prob.flatten()

    # Closed children sort behind all slots.
    is_open = torch.isfinite(log_prob)
    slot = torch.where(is_open, slot, cfg.slots)

    # Two stable sorts: by slot, and by descending probability within a slot.
    best_first = torch.sort(log_prob, descending=True, stable=True).indices
    slot, by_slot = torch.sort(slot[best_first], stable=True)
    order = best_first[by_slot]

    position = torch.arange(len(order), device=order.device)
    first_of_slot = torch.searchsorted(slot, slot)
    rank = position - first_of_slot
    is_kept = (rank < cfg.beam) & (slot < cfg.slots)
    place = torch.where(is_kept, slot * cfg.beam + rank, n_entries)

    target = torch.zeros_like(order).scatter(0, order, place)
    is_dropped = target == n_entries
    return _BeamPlaces(target=target, dropped=is_dropped.view_as(open_log_prob))


def _child_of_entry(
    cfg: SearchConfig, target: I64[Tensor, "RS"]
) -> _EntryChildren:
    """The child that goes to each beam entry: the placement inverted."""
    n_entries = cfg.slots * cfg.beam
    child_index = torch.arange(len(target), device=target.device)
    empty = torch.full(
        (n_entries + 1,), -1, dtype=torch.int64, device=target.device
    )
    child = empty.scatter(0, target, child_index)[:n_entries]
    has_child = child >= 0
    return _EntryChildren(
        child=torch.where(has_child, child, 0), mask=has_child
    )


def _update_result(
    cfg: SearchConfig,
    search: SearchState,
    children: _Children,
    open_log_prob: F32[Tensor, "R S"],
    dropped: Bool[Tensor, "R S"],
) -> SearchResult:
    """The results after this step: its proofs, and the mass that failed, that the beam dropped or that did not fit."""
    result = _record_proofs(cfg, search, children)

    is_filled = children.source < cfg.slots * cfg.beam
    entry = torch.where(is_filled, children.source, 0)
    path_log_prob = search.log_prob.flatten()[entry]
    overflow_log_prob = torch.where(
        children.overflow, path_log_prob, -torch.inf
    )

    dropped_log_prob = torch.where(dropped, open_log_prob, -torch.inf)
    pruned = _mass_by_entry(cfg, children, dropped_log_prob)
    overflow = _mass_by_entry(cfg, children, overflow_log_prob[:, None])
    result = result._replace(
        pruned_log_mass=_add_log_mass(cfg, result.pruned_log_mass, pruned),
        overflow_log_mass=_add_log_mass(
            cfg, result.overflow_log_mass, overflow
        ),
        n_steps=result.n_steps + 1,
    )
    if cfg.score != "success":
        return result

    # At the depth limit no child goes on.
    is_last_step = search.depth[entry // cfg.beam] + 1 >= cfg.max_depth
    is_lost = dropped | is_last_step[:, None]
    lost_log_prob = torch.where(is_lost, open_log_prob, -torch.inf)
    failed_log_prob = torch.cat(
        [lost_log_prob, children.failed_log_prob[:, None]], dim=1
    )
    failed = _mass_by_entry(cfg, children, failed_log_prob)
    return result._replace(
        failed_log_mass=_add_log_mass(cfg, result.failed_log_mass, failed)
    )


def _record_proofs(
    cfg: SearchConfig, search: SearchState, children: _Children
) -> SearchResult:
    """The results with this step's proofs."""
    result = search.result
    proved_log_prob = torch.where(
        children.proved, children.log_prob, -torch.inf
    )
    best = _best_proof(cfg, search, children, proved_log_prob)
    is_better = best.log_prob > result.best_log_prob
    proof_length = torch.where(is_better, search.depth + 1, result.proof_length)

    if cfg.score == "greedy":
        # The path so far, END included, with a penalty unless it is a proof.
        path = _scatter_to_entries(
            cfg,
            children,
            children.best_action_log_prob,
            -torch.inf,
        )
        path = path[:, 0]
        log_score = torch.where(proof_length > 0, path, path + UNPROVED_PENALTY)
    else:
        proved = _mass_by_entry(cfg, children, proved_log_prob)
        log_score = _add_log_mass(cfg, result.log_score, proved)

    return result._replace(
        log_score=log_score,
        best_log_prob=torch.where(
            is_better, best.log_prob, result.best_log_prob
        ),
        trace=torch.where(is_better[:, None], best.trace, result.trace),
        proof_length=proof_length,
    )


def _best_proof(
    cfg: SearchConfig,
    search: SearchState,
    children: _Children,
    proved_log_prob: F32[Tensor, "R S"],
) -> _BestProof:
    """The most probable proof of each slot among this step's children; -inf where there is none."""
    # First the best successor of each row, then the best row of each slot.
    row_log_prob, row_action = proved_log_prob.max(1)
    entry_log_prob = _scatter_to_entries(
        cfg, children, row_log_prob, -torch.inf
    )
    log_prob, entry = entry_log_prob.max(1)

    row_choice = _take(children.choice_id, row_action[:, None])
    entry_choice = _scatter_to_entries(cfg, children, row_choice[:, 0], 0)
    choice_id = entry_choice.gather(1, entry[:, None])

    parent_trace = _take(search.trace, entry[:, None])
    trace = _append_choice(parent_trace, search.depth, choice_id)
    return _BestProof(log_prob=log_prob, trace=trace[:, 0])


def _mass_by_entry(
    cfg: SearchConfig, children: _Children, log_prob: F32[Tensor, "R n"]
) -> F32[Tensor, "B K"]:
    """The mass of each row's values at the beam entry that the row comes from; -inf elsewhere."""
    mass = (
        log_prob.amax(1) if cfg.score == "best-proof" else log_prob.logsumexp(1)
    )
    return _scatter_to_entries(cfg, children, mass, -torch.inf)


def _scatter_to_entries(
    cfg: SearchConfig, children: _Children, value: Tensor, empty: float
) -> Tensor:
    """A value of each row, [R], at the beam entry that the row comes from, [B, K]; `empty` elsewhere."""
    n_entries = cfg.slots * cfg.beam
    entries = torch.full(
        (n_entries + 1,),
        empty,
        dtype=value.dtype,
        device=value.device,
    )
    entries = entries.scatter(0, children.source, value)
    return entries[:n_entries].view(cfg.slots, cfg.beam)


def _add_log_mass(
    cfg: SearchConfig,
    log_mass: F32[Tensor, "B"],
    entry_mass: F32[Tensor, "B K"],
) -> F32[Tensor, "B"]:
    """Add the mass of beam entries: probabilities of distinct proofs add up; for a best proof the largest counts."""
    if cfg.score == "best-proof":
        return torch.maximum(log_mass, entry_mass.amax(1))
    slot_mass = torch.logsumexp(entry_mass, 1)
    return torch.logaddexp(log_mass, slot_mass)


def _append_choice(
    trace: I32[Tensor, "B n T"],
    depth: I32[Tensor, "B"],
    choice_id: I32[Tensor, "B n"],
) -> I32[Tensor, "B n T"]:
    """The traces with a choice at position `depth`."""
    position = torch.arange(trace.shape[-1], device=trace.device)
    is_next = position == depth[:, None, None]
    return torch.where(is_next, choice_id[..., None], trace)


def _take(x: Tensor, index: I64[Tensor, "B n"]) -> Tensor:
    """x[b, index[b, i]] for x [B, m, ...]."""
    trailing_shape = x.shape[2:]
    index = index.view(*index.shape, *[1] * len(trailing_shape))
    return x.gather(1, index.expand(-1, -1, *trailing_shape))
