"""Mine rules from the facts of a graph: candidates, their counts, and which of them to keep.

Rules are ranked by smoothed confidence (see `mined_rules`); where counts are estimated, by two standard errors less
than that. Every fact votes for the best rule that derives it from other facts, each rule counted as if the fact were
unknown. A rule without a vote is redundant: wherever it is right, another rule is, with no less confidence. This asks
more than that a longer rule beat the shorter ones that it contains.

The work is planned in rows before it is done, so that the rules depend on the facts, the settings and the seed. What
fits the budget is searched whole, and the counts are exact. What does not is searched through a sample of the
entities, for the rules that look best there; these are counted again, exactly where the work allows it, else from a
second sample, and vote with the counts that they have then. A choice by estimates favours those that are too high, so
the rules with a vote are counted once more, exactly or from a third sample, and are written with these counts.

`mine_rules` is the entry point.

The best rules of each fact: every fact votes for the rules with the highest scores that derive it from other facts.

A rule without a vote is redundant: wherever it is right, another rule is, with no less confidence. Of two equal rules
the one that was found first gets the vote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from funcppo.core import random
from funcppo.core.types import F32, F64, I32, I64
from funcppo.kg.logic import row_index
from funcppo.kg.mining import (
    closing,
    constant_rules,
    long_paths,
    mined_rules,
    path_rules,
    paths,
)
from funcppo.kg.mining.closing import ClosedRules
from funcppo.kg.mining.config import MAX_EXTENDED_LENGTH, MiningConfig
from funcppo.kg.mining.long_paths import CountedRules, LongPathSearch
from funcppo.kg.mining.mined_rules import (
    Budget,
    FoundRules,
    MinedRules,
    ProgressCallback,
    Thresholds,
    concatenate_rules,
    held_out_smoothed_confidence,
    ignore_progress,
    no_rules,
    select_rules,
)
from funcppo.kg.mining.path_rules import Bodies, BodySample, CountedPart
from funcppo.kg.mining.paths import EdgeIndex

MIN_COMPACTED_RULES = 1 << 16  # rules without a vote are kept up to this many


class Votes(NamedTuple):
    """The votes of each fact so far, the best first; rules without a vote may still be among `rules`."""

    rules: MinedRules
    cost: F64[Tensor, "R"]  # rows that counting each rule again takes
    rule: I64[Tensor, "N V"]  # row of `rules`; -1 for none
    score: F64[Tensor, "N V"]  # 0 for none


def no_votes(n_facts: int, votes_per_fact: int, device: torch.device) -> Votes:
    """No fact has voted."""
    score = torch.zeros(
        (n_facts, votes_per_fact), dtype=torch.float64, device=device
    )
    rule = torch.full_like(score, -1, dtype=torch.int64)
    rules = no_rules(device)
    return Votes(rules, rules.support, rule, score)


def score_to_beat(votes: Votes) -> F64[Tensor, "N"]:
    """What a rule's score must exceed to get a vote of each fact."""
    return votes.score[:, -1]


def add_votes(votes: Votes, found: FoundRules) -> Votes:
    """The votes after some more rules, and the facts that these derive from others."""
    score = held_out_smoothed_confidence(found.rules)
    is_better = score[found.rule] > score_to_beat(votes)[found.fact]
    row = is_better.nonzero().squeeze(1)
    if not len(row):
        return votes
    changed, fact = row_index.unique_inverse(found.fact[row])
    n_before, n_votes = len(votes.cost), votes.rule.shape[1]

    # The former votes of these facts, then the new ones.
    numbers = torch.arange(len(changed), device=fact.device)
    fact = torch.cat([numbers.repeat_interleave(n_votes), fact])
    rule = torch.cat(
        [votes.rule[changed].flatten(), found.rule[row] + n_before]
    )
    scores = torch.cat([votes.score[changed].flatten(), score[found.rule[row]]])

    # By fact, then by descending score; stable, so that of equal rules the earlier one is first.
    order = torch.sort(scores, descending=True, stable=True).indices
    order = order[row_index.sort_keys(fact[order]).order]
    first = torch.searchsorted(fact[order], numbers)
    best = order[first[:, None] + torch.arange(n_votes, device=fact.device)]
    best_rule = rule[best]

    # Number the new rules that won consecutively.
    is_new = best_rule >= n_before
    elected = row_index.unique_values(best_rule[is_new]) - n_before
    number = n_before + torch.searchsorted(elected, best_rule - n_before)
    rules = [votes.rules, select_rules(found.rules, elected)]
    best_rule = torch.where(is_new, number, best_rule)
    grown = Votes(
        concatenate_rules(rules),
        torch.cat([votes.cost, found.cost[elected]]),
        votes.rule.index_copy(0, changed, best_rule),
        votes.score.index_copy(0, changed, scores[best]),
    )
    limit = max(MIN_COMPACTED_RULES, grown.rule.numel())
    return compact(grown) if len(grown.cost) > limit else grown


def rules_with_votes(votes: Votes) -> FoundRules:
    """The rules that have a vote, in the order in which they were found."""
    compacted = compact(votes)
    none = votes.rule[:0, 0]
    return FoundRules(compacted.rules, compacted.cost, none, none)


def compact(votes: Votes) -> Votes:
    """The votes without the rules that have none."""
    rule = row_index.unique_values(votes.rule.flatten())
    rule = rule[rule >= 0]
    number = torch.searchsorted(rule, votes.rule)
    return Votes(
        select_rules(votes.rules, rule),
        votes.cost[rule],
        torch.where(votes.rule >= 0, number, -1),
        votes.score,
    )


def replace_rules(
    votes: Votes, rows: I64[Tensor, "r"], rules: MinedRules
) -> Votes:
    """The votes with other counts of some rules."""
    columns = zip(votes.rules, rules)
    return votes._replace(
        rules=MinedRules(
            *(column.index_copy(0, rows, new) for column, new in columns)
        )
    )


# -- miner

# of one core, where the graph is sparse and where it is dense
EXPECTED_ROWS_PER_SECOND = (2_000_000, 14_000_000)
SEARCH_SHARE = 0.7  # of the budget, for the search; the rest is for counting
STAGE_SHARE = 0.75  # of what is left for the search, for one stage of it
COUNT_SHARE = 0.85  # of the budget, for the search and for exact counts
RECOUNT_SHARE = 0.95  # of the budget, for all but estimates and PCA confidences
# A sampled rule is counted if it is among this many times `votes_per_fact` best sampled rules of some fact.
SAMPLED_VOTES = 3
# Share of the work for estimates, where the rest is spent.
ESTIMATE_SHARE = 0.05
BYTES_PER_FACT = 900  # of the index, while it is built
BYTES_PER_BODY = 200  # of the bodies that may be extended
# Of a chunk of work, a body that is twice as large included.
BYTES_PER_ROW = 350
BYTES_PER_CLOSED_PAIR = 80  # of a fact and a long body, while they are sorted
Part = TypeVar("Part", contravariant=True)


class AddFn(Protocol[Part]):
    """Adds what a part of a stage found to what has been found."""

    def __call__(self, state: _State, part: Part, /) -> _State: ...


class StepFn(Protocol):
    """A part of mining: yields what has been found, after each part of its work."""

    def __call__(
        self, context: MiningContext, state: _State, /
    ) -> Iterator[_State]: ...


class AnnounceCallback(Protocol):
    """Receives a line that says what will be done."""

    def __call__(self, line: str, /) -> object: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class StageReport:
    """What a stage of the search looked at."""

    name: str
    fraction: float = 1.0
    """Share of the entities that were sources."""
    n_left_out: int = 0
    """Bodies that were not extended."""
    n_heads_left_out: int = 0
    """Relations for whose facts no body was looked for."""
    rows_planned: float
    """Rows that the stage was expected to compute."""
    rows_done: float = 0.0
    """Rows that it computed."""
    is_finished: bool = False
    """False if the budget or an interrupt ended the stage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MiningResult:
    """The rules that were mined, and how completely."""

    rules: MinedRules  # in descending order of smoothed confidence
    # rules that reach the thresholds with their circular support, redundant ones included
    n_candidates: int
    stages: tuple[StageReport, ...]
    notes: tuple[str, ...]  # what was sampled or left out, one line each
    seconds: float  # wall time
    rows: int  # rows computed
    max_rows: int  # rows that might be computed
    interrupt: KeyboardInterrupt | None  # what ended the search early


@dataclass(frozen=True, kw_only=True, slots=True)
class MiningContext:
    """What every stage reads."""

    edges: EdgeIndex
    priority: F32[Tensor, "C1"]  # a random number in [0, 1) for each entity
    # others, independent of it: for the counts that vote, and for those that are written
    second_priority: F32[Tensor, "C1"]
    third_priority: F32[Tensor, "C1"]
    cfg: MiningConfig
    budget: Budget


class _PathPart(NamedTuple):
    """What was found among some bodies."""

    n_candidates: int = 0
    bodies: Bodies | None = None  # that may be extended
    is_sampled: bool = False
    found: FoundRules | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _State:
    """What has been found so far."""

    votes: Votes  # for rules with counts to be written
    sampled_votes: Votes  # for rules with counts of the search's sample
    n_candidates: int = 0
    n_counted: int = 0  # of the sampled rules with a vote
    n_estimated_again: int = 0  # of the rules that are kept
    n_uncounted: int = 0  # rules whose bodies were too long to be extended
    bodies: tuple[Bodies, ...]  # of the length searched last
    # rules of each head, while bodies that are not extended are searched; None for too many
    closed: tuple[CountedRules | None, ...] = ()
    stages: tuple[StageReport, ...] = ()


def needed_bytes(n_facts: int, n_predicates: int, max_length: int) -> int:
    """Memory that mining takes at most, beside the facts themselves: their index, the rows of a chunk, the bodies.

    Args:
      max_length: of the bodies, in atoms.
    """
    n_bodies = min((2 * n_predicates) ** (MAX_EXTENDED_LENGTH - 1), n_facts**2)
    n_closed = 0
    if max_length > MAX_EXTENDED_LENGTH:
        n_closed = closing.MAX_CLOSED_PAIRS
    return (
        n_facts * BYTES_PER_FACT
        + n_bodies * BYTES_PER_BODY
        + paths.CHUNK_ROWS * BYTES_PER_ROW
        + n_closed * BYTES_PER_CLOSED_PAIR
    )


def mine_rules(
    facts: I32[Tensor, "N W"],
    n_predicates: int,
    n_constants: int,
    cfg: MiningConfig,
    progress: ProgressCallback = ignore_progress,
    announce: AnnounceCallback = lambda _: None,
) -> MiningResult:
    """Mine the rules of a graph that are not redundant.

    Facts that do not have two arguments are left out and counted in a note. The result depends on facts, settings and
    seed alone, unless the time limit or a KeyboardInterrupt ends the search; then a note says so. Before the search
    begins, a KeyboardInterrupt is raised as it is.

    Args:
      facts: [predicate, argument...], padded with 0, distinct.
      progress: called with what is done, and how much of it.
      announce: called with the amount of work before it begins.

    Returns:
      MiningResult, its rules by descending smoothed confidence.
    """
    binary, notes = _binary_facts(facts)
    context = _make_context(binary, n_predicates, n_constants, cfg, progress)
    n_votes = cfg.votes_per_fact
    state = _State(
        votes=no_votes(len(binary), n_votes, facts.device),
        sampled_votes=no_votes(
            len(binary), SAMPLED_VOTES * n_votes, facts.device
        ),
        bodies=(path_rules.no_bodies(facts.device),),
    )
    interrupt = None
    try:
        if len(binary):
            announce(_describe_work(context))
            for found_so_far in _iter_states(context, state):
                state = found_so_far
    except KeyboardInterrupt as error:
        interrupt = error
    return _make_result(context, state, notes, interrupt)


def _binary_facts(facts: Tensor) -> tuple[Tensor, list[str]]:
    """The facts with two arguments, and a note on the others if there are any."""
    if facts.shape[1] > 2:
        is_binary = (facts[:, 2] > 0) & (facts[:, 3:] == 0).all(1)
        binary = facts[is_binary][:, :3].long()
    else:
        is_binary = torch.zeros_like(facts[:, 0] > 0)
        binary = facts.new_zeros((0, 3)).long()
    if is_binary.all():
        return binary, []
    return binary, [
        f"{int((~is_binary).sum())} facts do not have two arguments and were left out"
    ]


def _make_context(
    binary: I64[Tensor, "N 3"],
    n_predicates: int,
    n_constants: int,
    cfg: MiningConfig,
    progress: ProgressCallback,
) -> MiningContext:
    """Index the facts and draw a random priority for each entity."""
    budget = Budget(
        max_rows=cfg.row_limit, seconds=cfg.seconds, progress=progress
    )
    ids = torch.arange(n_constants + 1, device=binary.device)
    key = random.key(cfg.seed, binary.device)
    first, second, third = (
        random.uniform(random.fold_in(part, ids), ())
        for part in random.split(key, 3)
    )

    return MiningContext(
        edges=paths.build_edge_index(binary, n_predicates, n_constants),
        priority=first,
        second_priority=second,
        third_priority=third,
        cfg=cfg,
        budget=budget,
    )


def _describe_work(context: MiningContext) -> str:
    """How much work there is, and how much of it may be done."""
    edges = context.edges
    degree = torch.diff(edges.offsets).double()
    first = degree[edges.first_argument]
    second = degree[edges.second_argument]
    n_walks = [2.0 * len(first), float((degree**2).sum())]
    n_walks.append(2 * float((first * second).sum()))
    for length in range(MAX_EXTENDED_LENGTH + 1, context.cfg.max_length + 1):
        fact_rows, _ = closing.closing_rows(edges, length)
        n_walks.append(float(fact_rows.sum()))
    n_walks = n_walks[: context.cfg.max_length]

    budget = context.budget
    n_rows = min(sum(n_walks), budget.max_rows)
    if context.cfg.max_length > MAX_EXTENDED_LENGTH:
        # How many pairs long bodies join is known when they are found.
        n_rows = budget.max_rows
    most, least = (
        min(n_rows / rate, budget.seconds) for rate in EXPECTED_ROWS_PER_SECOND
    )
    lengths = ", ".join(
        f"{n:,.0f} {'half walks ' * (length > MAX_EXTENDED_LENGTH)}of length {length}"
        for length, n in enumerate(n_walks, 1)
    )
    return (
        f"{len(first):,} facts have walks: {lengths}; at most {n_rows:,.0f} rows of work, "
        f"{_duration(least, most)}; the limits are {budget.max_rows:,} rows and {budget.seconds:g} s"
    )


def _duration(least: float, most: float) -> str:
    """An estimate of seconds as text."""
    return "under 1 s" if most < 1 else f"about {least:.0f} to {most:.0f} s"


def _iter_states(context: MiningContext, state: _State) -> Iterator[_State]:
    """Yield what has been found so far, after each part of the work."""
    cfg = context.cfg
    searches: list[StepFn] = []
    for length in range(1, cfg.max_length + 1):
        is_long = length > MAX_EXTENDED_LENGTH
        search = _search_long_paths if is_long else _search_paths
        searches.append(partial(search, length=length))
    if cfg.constants:
        searches.insert(1, _search_constants)
    steps = (*searches, _count_sampled, _recount_kept, _count_pca_pairs)
    for step in steps:
        for next_state in step(context, state):
            state = next_state
            yield state


def _search_paths(
    context: MiningContext, state: _State, length: int
) -> Iterator[_State]:
    """Search for path rules of one length."""
    budget = context.budget
    share = SEARCH_SHARE
    if length < context.cfg.max_length:
        share = _stage_share(budget)
    latest = [state]
    if length == 1:
        samples = path_rules.iter_first_bodies(context.edges, budget)
        report = StageReport(
            name="rules of length 1",
            rows_planned=len(context.edges.label)
            * (1 + path_rules.facts_per_pair(context.edges)),
        )
    else:
        plan = path_rules.plan_extensions(
            context.edges,
            path_rules.concatenate_bodies(state.bodies),
            length - 1,
            budget.rows_left(share),
        )
        samples = path_rules.iter_extensions(
            context.edges, plan, length - 1, context.priority, budget
        )
        report = StageReport(
            name=f"rules of length {length}",
            fraction=plan.fraction,
            n_left_out=plan.n_left_out,
            rows_planned=plan.n_rows,
        )

    def add(state: _State, part: _PathPart) -> _State:
        latest[0] = _add_part(state, part)
        return latest[0]

    none = path_rules.no_bodies(context.edges.label.device)
    state = replace(state, bodies=(none,))
    parts = _sample_parts(context, samples, length, lambda: latest[0])
    yield from _run_stage(budget, state, report, share, parts, add)


def _sample_parts(
    context: MiningContext,
    samples: Iterator[BodySample],
    length: int,
    latest: Callable[[], _State],
) -> Iterator[_PathPart]:
    """Yield what is found among the bodies of some samples.

    Args:
      latest: what has been found by now.
    """
    edges, cfg = context.edges, context.cfg
    for sample in samples:
        thresholds = _thresholds(cfg, sample.fraction)
        candidates = path_rules.find_candidates(edges, sample.pairs, thresholds)
        bodies = path_rules.no_bodies(edges.label.device)
        if length < min(cfg.max_length, MAX_EXTENDED_LENGTH):
            bodies = path_rules.summarise_bodies(edges, sample)
        yield _PathPart(len(candidates.table.body), bodies)

        is_sampled = sample.fraction < 1.0
        for batch in path_rules.pack_candidates(candidates.table, length):
            to_beat = _score_to_beat(latest(), is_sampled)
            found = path_rules.find_rules(
                edges, sample, length, candidates, batch, thresholds, to_beat
            )
            yield _PathPart(is_sampled=is_sampled, found=found)


def _score_to_beat(state: _State, is_sampled: bool) -> F64[Tensor, "N"]:
    """What the score of a rule must exceed that was counted from all sources, or from a sample."""
    exact = score_to_beat(state.votes)
    if not is_sampled:
        return exact
    return torch.maximum(exact, score_to_beat(state.sampled_votes))


def _add_part(state: _State, part: _PathPart) -> _State:
    """What has been found, after a part of a search for path rules."""
    if part.bodies is not None:
        state = replace(
            state,
            n_candidates=state.n_candidates + part.n_candidates,
            bodies=(*state.bodies, part.bodies),
        )
    if part.found is None:
        return state
    if part.is_sampled:
        votes = add_votes(state.sampled_votes, part.found)
        return replace(state, sampled_votes=votes)
    return replace(state, votes=add_votes(state.votes, part.found))


def _search_long_paths(
    context: MiningContext, state: _State, length: int
) -> Iterator[_State]:
    """Search for path rules of one length that are too long to be found by extending bodies."""
    budget = context.budget
    share = SEARCH_SHARE
    if length < context.cfg.max_length:
        share = _stage_share(budget)
    search = long_paths.LongPathSearch(
        edges=context.edges,
        length=length,
        priority=context.priority,
        thresholds=_thresholds(context.cfg),
        budget=budget,
        share=share,
    )
    for next_state in _find_closed(context, state, search):
        state = next_state
        yield state
    yield from _count_closed(state, search)


def _count_closed(state: _State, search: LongPathSearch) -> Iterator[_State]:
    """Count the pairs of long rules, as far as the rules may be among the best of some fact."""
    budget = search.budget
    closed = long_paths.concatenate_rules(
        [part for part in state.closed if part is not None]
    )
    # None are counted only where the budget is spent, and no batch begins.
    counted = search.count_first(closed) or closed
    rules = search.select_promising(counted, score_to_beat(state.votes))
    report = StageReport(
        name=f"rules of length {search.length}",
        rows_planned=float(long_paths.expected_rows(rules).sum()),
    )
    state = replace(
        state,
        closed=(),
        n_uncounted=state.n_uncounted + len(rules.counts.support),
    )

    def add(state: _State, batch: CountedRules) -> _State:
        found = search.find_rules(batch, score_to_beat(state.votes))
        if found is None:
            return state
        return replace(
            state,
            n_uncounted=state.n_uncounted - len(batch.counts.support),
            votes=add_votes(state.votes, found),
        )

    batches = search.iter_batches(rules)
    yield from _run_stage(budget, state, report, search.share, batches, add)


def _find_closed(
    context: MiningContext, state: _State, search: LongPathSearch
) -> Iterator[_State]:
    """Find the long rules that may be among the best of some fact, before the pairs of their bodies are counted."""
    budget = context.budget
    min_support = context.cfg.min_support
    share = (budget.spent_share + search.share) / 2
    plan = closing.plan_closing(
        context.edges, search.length, budget.rows_left(share)
    )
    report = StageReport(
        name=f"bodies of length {search.length}",
        n_heads_left_out=plan.n_left_out,
        rows_planned=plan.n_rows,
    )

    def add(state: _State, closed: ClosedRules | None) -> _State:
        if closed is None:
            return replace(state, closed=(*state.closed, None))
        to_beat = score_to_beat(state.votes)
        rules = search.select_promising(
            long_paths.without_counts(closed), to_beat
        )
        n_pairs = sum(len(part.closed.fact) for part in state.closed if part)
        fits = n_pairs + len(rules.closed.fact) <= closing.MAX_CLOSED_PAIRS
        return replace(
            state,
            n_candidates=state.n_candidates + len(closed.support),
            closed=(*state.closed, rules if fits else None),
        )

    parts = closing.iter_closed_rules(
        context.edges, plan, search.length, min_support, budget, share
    )
    none = long_paths.without_counts(
        closing.no_closed_rules(context.edges.label.device)
    )
    state = replace(state, closed=(none,))
    for next_state in _run_stage(budget, state, report, share, parts, add):
        state = next_state
        yield state
    n_too_many = sum(part is None for part in state.closed)
    report = replace(
        state.stages[-1], n_heads_left_out=plan.n_left_out + n_too_many
    )
    yield replace(state, stages=(*state.stages[:-1], report))


def _search_constants(
    context: MiningContext, state: _State
) -> Iterator[_State]:
    """Search for rules with constants; all their counts but the PCA pairs are exact."""
    budget, cfg = context.budget, context.cfg
    search = constant_rules.plan_search(context.edges, cfg.min_support)
    report = StageReport(
        name="rules with constants", rows_planned=search.n_rows
    )

    thresholds = _thresholds(cfg)

    def add(state: _State, found: FoundRules) -> _State:
        above = mined_rules.above_thresholds(found, thresholds)
        return replace(
            state,
            n_candidates=state.n_candidates + len(above.cost),
            votes=add_votes(state.votes, above),
        )

    parts = constant_rules.find_constant_rules(context.edges, search, budget)
    share = _stage_share(budget)
    yield from _run_stage(budget, state, report, share, parts, add)


def _thresholds(cfg: MiningConfig, fraction: float = 1.0) -> Thresholds:
    """What a rule needs in a sample of a fraction of the entities."""
    return Thresholds(
        min_support=max(cfg.min_support * fraction, min(2, cfg.min_support)),
        min_confidence=cfg.min_confidence,
    )


def _stage_share(budget: Budget) -> float:
    """The share of the budget at which the next stage of the search must end, if others come after it."""
    spent = budget.spent_share
    return spent + STAGE_SHARE * max(0.0, SEARCH_SHARE - spent)


def _run_stage(
    budget: Budget,
    state: _State,
    report: StageReport,
    share: float,
    parts: Iterator[Part],
    add: AddFn[Part],
) -> Iterator[_State]:
    """Yield the state after each part of a stage, until a share of the budget is spent."""
    stages = state.stages
    start = budget.rows
    budget.start_stage(report.name, report.rows_planned)
    yield replace(state, stages=(*stages, report))
    for part in parts:
        if budget.is_exhausted(share):
            return
        state = add(state, part)
        report = replace(report, rows_done=budget.rows - start)
        state = replace(state, stages=(*stages, report))
        yield state
    # The last part may be incomplete if the time is over.
    report = replace(
        report,
        rows_done=budget.rows - start,
        is_finished=not budget.is_late(share),
    )
    yield replace(state, stages=(*stages, report))


def _count_sampled(context: MiningContext, state: _State) -> Iterator[_State]:
    """Count the rules that the search saw in a sample, and let them vote with these counts.

    As many as the budget allows are counted exactly, the cheapest ones; the others are estimated from another sample.
    """
    budget = context.budget
    found = rules_with_votes(state.sampled_votes)
    if not len(found.cost):
        return

    exact = _affordable(found, budget.rows_left(COUNT_SHARE))
    exact_rules = mined_rules.take(found, exact)
    budget.start_stage("exact counts", float(exact_rules.cost.sum()))
    is_counted = torch.zeros_like(found.cost, dtype=torch.bool)
    thresholds = _thresholds(context.cfg)
    for part in path_rules.count_exactly(
        context.edges,
        exact_rules,
        context.priority,
        budget,
        COUNT_SHARE,
    ):
        is_counted = is_counted.index_fill(0, exact[part.rows], True)
        counted = FoundRules(
            part.rules, exact_rules.cost[part.rows], part.fact, part.rule
        )
        counted = mined_rules.above_thresholds(counted, thresholds)
        state = replace(
            state,
            n_counted=state.n_counted + len(part.rows),
            votes=add_votes(state.votes, counted),
        )
        yield state
    rest = mined_rules.take(found, (~is_counted).nonzero().squeeze(1))
    yield from _estimate_sampled(context, state, rest)


def _affordable(found: FoundRules, max_rows: float) -> Tensor:
    """Rows of the cheapest rules that can be counted within a limit, the best rules first."""
    cost, by_cost = torch.sort(found.cost, stable=True)
    chosen = by_cost[torch.cumsum(cost, 0) <= max_rows]
    score = mined_rules.held_out_smoothed_confidence(found.rules)[chosen]
    return chosen[torch.sort(score, descending=True, stable=True).indices]


def _estimate_sampled(
    context: MiningContext, state: _State, found: FoundRules
) -> Iterator[_State]:
    """Let rules vote with counts that are estimated from a sample of their own."""
    max_rows = _estimate_rows(context.budget)
    context.budget.start_stage("estimated counts", max_rows)

    for part in path_rules.estimate(
        context.edges,
        found,
        context.second_priority,
        context.budget,
        max_rows,
    ):
        counted = FoundRules(
            part.rules, found.cost[part.rows], part.fact, part.rule
        )

        # what the budget did not reach has no finite error
        known = mined_rules.keep(counted, part.rules.std_error.isfinite())
        state = replace(
            state,
            n_counted=state.n_counted + len(known.cost),
            votes=add_votes(state.votes, known),
        )
        yield state


def _recount_kept(context: MiningContext, state: _State) -> Iterator[_State]:
    """Count the rules that have a vote by estimates again: exactly, or from a sample that did not choose them."""
    budget = context.budget
    votes = compact(state.votes)
    rows = (votes.rules.std_error > 0).nonzero().squeeze(1)
    found = mined_rules.take(rules_with_votes(votes), rows)
    exact = _affordable(found, budget.rows_left(RECOUNT_SHARE))
    rows = rows[exact]
    found = mined_rules.take(found, exact)
    budget.start_stage("counts of the rules kept", float(found.cost.sum()))
    for part in path_rules.count_exactly(
        context.edges,
        found,
        context.priority,
        budget,
        RECOUNT_SHARE,
    ):
        votes = replace_rules(votes, rows[part.rows], part.rules)
        yield replace(state, votes=votes)

    rows = (votes.rules.std_error > 0).nonzero().squeeze(1)
    found = mined_rules.take(rules_with_votes(votes), rows)
    max_rows = _estimate_rows(budget)
    for part in path_rules.estimate(
        context.edges,
        found,
        context.third_priority,
        budget,
        max_rows,
    ):
        known = part.rules.std_error.isfinite()
        votes = replace_rules(
            votes,
            rows[part.rows][known],
            mined_rules.select_rules(part.rules, known),
        )
        n_known = state.n_estimated_again + int(known.sum())
        state = replace(state, votes=votes, n_estimated_again=n_known)
        yield state


def _estimate_rows(budget: Budget) -> float:
    """Rows that estimates may take: half of what is left, or a small share of all where less is left."""
    return max(budget.rows_left() / 2, ESTIMATE_SHARE * budget.max_rows)


def _count_pca_pairs(context: MiningContext, state: _State) -> Iterator[_State]:
    """Count the PCA pairs of the rules with a vote: exactly, and estimates where the budget is spent."""
    rules = compact(state.votes).rules
    is_path = rules.end_constants[:, 0] == 0
    for count_part, is_counted in (
        (_constant_pca_pairs, ~is_path),
        (_path_pca_pairs, is_path),
        (_estimated_pca_pairs, is_path),
    ):
        votes = compact(state.votes)
        is_unknown = votes.rules.pca_std_error.isinf() & is_counted
        score = mined_rules.smoothed_confidence(votes.rules)
        order = torch.sort(score, descending=True, stable=True).indices
        rows = order[is_unknown[order]]
        found = mined_rules.take(rules_with_votes(votes), rows)
        context.budget.start_stage("PCA confidences", float(found.cost.sum()))
        for part in count_part(context, found):
            votes = replace_rules(votes, rows[part.rows], part.rules)
            state = replace(state, votes=votes)
            yield state


def _constant_pca_pairs(
    context: MiningContext, found: FoundRules
) -> Iterator[CountedPart]:
    """The PCA pairs of rules with constants."""
    return constant_rules.count_pca_pairs(
        context.edges, found.rules, context.budget
    )


def _path_pca_pairs(
    context: MiningContext, found: FoundRules
) -> Iterator[CountedPart]:
    """The PCA pairs of path rules, as far as the budget goes."""
    return path_rules.count_exactly(
        context.edges,
        found,
        context.priority,
        context.budget,
        1.0,
    )


def _estimated_pca_pairs(
    context: MiningContext, found: FoundRules
) -> Iterator[CountedPart]:
    """Estimates of the PCA pairs of path rules whose other counts are exact."""
    max_rows = _estimate_rows(context.budget)
    for part in path_rules.estimate(
        context.edges,
        found,
        context.second_priority,
        context.budget,
        max_rows,
    ):
        exact = mined_rules.select_rules(found.rules, part.rows)
        pca_pairs = torch.maximum(part.rules.pca_pairs, exact.support)
        rules = exact._replace(
            pca_pairs=pca_pairs, pca_std_error=part.rules.pca_std_error
        )
        yield part._replace(rules=rules)


def _make_result(
    context: MiningContext,
    state: _State,
    notes: list[str],
    interrupt: KeyboardInterrupt | None,
) -> MiningResult:
    """The rules that have a vote in the end, by descending smoothed confidence, and what was left out."""
    rules = _sort_rules(compact(state.votes).rules)
    n_seen = len(rules_with_votes(state.sampled_votes).cost)
    budget = context.budget

    if state.n_uncounted:
        notes = [
            *notes,
            f"{state.n_uncounted:,} rules of more than {MAX_EXTENDED_LENGTH} atoms were left out, the least promising: "
            "the budget did not suffice to count their pairs",
        ]
    every_note = [
        *notes,
        *_stage_notes(state.stages),
        *_count_notes(rules, state.n_estimated_again, n_seen - state.n_counted),
    ]

    if interrupt is not None:
        every_note.append("interrupted: the rules found by then are kept")
    elif budget.was_late:
        every_note.append(
            f"stopped by the limit of {budget.seconds:g} seconds: another machine may find other rules"
        )

    return MiningResult(
        rules=rules,
        n_candidates=state.n_candidates,
        stages=state.stages,
        notes=tuple(every_note),
        seconds=budget.elapsed,
        rows=int(budget.rows),
        max_rows=budget.max_rows,
        interrupt=interrupt,
    )


def _sort_rules(rules: MinedRules) -> MinedRules:
    """The rules by descending smoothed confidence; of equal ones the shorter first, then by their labels."""
    length = (rules.labels[:, 1:] >= 0).sum(1)
    score = mined_rules.smoothed_confidence(rules)
    keys = [
        *rules.end_constants.flip(1).unbind(1),
        *rules.labels.flip(1).unbind(1),
        length,
    ]
    order = torch.arange(len(score), device=score.device)
    for key in keys:
        order = order[row_index.sort_keys(key[order]).order]
    best_first = torch.sort(score[order], descending=True, stable=True)
    return mined_rules.select_rules(rules, order[best_first.indices])


def _stage_notes(stages: tuple[StageReport, ...]) -> list[str]:
    """What each stage of the search left out, a line each."""
    notes: list[str] = []

    for stage in stages:
        if stage.fraction < 1.0:
            notes.append(
                f"{stage.name}: searched from {stage.fraction:.2%} of the entities; the best rules were counted again"
            )
        if stage.n_left_out:
            notes.append(
                f"{stage.name}: {stage.n_left_out:,} shorter bodies, the least promising, were not extended"
            )
        if stage.n_heads_left_out:
            notes.append(
                f"{stage.name}: not searched for {stage.n_heads_left_out:,} relations, whose facts have too many walks"
            )
        if not stage.is_finished:
            percent = 100 * stage.rows_done / max(stage.rows_planned, 1.0)
            notes.append(
                f"{stage.name}: stopped after {min(int(percent), 99)} % of the work planned"
            )

    return notes


def _count_notes(
    rules: MinedRules, n_estimated_again: int, n_uncounted: int
) -> list[str]:
    """Which counts are estimates, or missing."""
    notes: list[str] = []
    n_estimated = int((rules.std_error > 0).sum())
    if n_estimated:
        notes.append(
            f"{n_estimated} rules have estimated counts, with a standard error"
        )
    if n_estimated > n_estimated_again:
        notes.append(
            f"{n_estimated - n_estimated_again} of these were chosen by the same estimates, which may be too high"
        )

    is_exact = rules.std_error == 0
    n_pca = int((is_exact & (rules.pca_std_error > 0)).sum())
    if n_pca:
        notes.append(
            f"{n_pca} rules have an estimated or unknown PCA confidence, with a standard error"
        )
    if n_uncounted:
        notes.append(
            f"{n_uncounted} rules that a sample showed were left out: the budget did not suffice to count them"
        )

    return notes
