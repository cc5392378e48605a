"""Mine rules from the facts of a graph: candidates, their counts, and which of them to keep.

Rules are ranked by smoothed confidence (see `counts`). Every fact votes for the best rule that derives it from other
facts, each rule counted as if the fact were unknown. This asks more than that a longer rule beat the shorter ones that
it contains.

The work is planned in rows before it is done, so that the rules depend on the facts, the settings and the seed. What
fits the budget is searched whole, and the counts are exact. What does not is searched through a sample of the
entities, for the rules that look best there; these are counted again from all sources, the cheapest first, and vote
with the counts that they have then. Those that the budget does not suffice for are left out and counted. So all counts
are exact.

`mine_rules` is the entry point.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from funcppo.core import random
from funcppo.core.types import F32, I32
from funcppo.kg.logic import row_index
from funcppo.kg.logic.kb import binary_atoms
from funcppo.kg.logic.row_index import (
    concatenate,
    count_to,
    row_numbers,
    select_rows,
)
from funcppo.kg.mining import (
    MAX_EXTENDED_LENGTH,
    MiningConfig,
    counts,
    paths,
    rules,
)
from funcppo.kg.mining.counts import (
    Budget,
    FoundRules,
    MinedRules,
    ProgressCallback,
    Votes,
    above_thresholds,
    add_votes,
    compact,
    concatenate_found,
    ignore_progress,
    no_rules,
    no_votes,
    score_to_beat,
)
from funcppo.kg.mining.paths import EdgeIndex
from funcppo.kg.mining.rules import (
    RANGE_ENDS,
    Bodies,
    BodySample,
    LongPathSearch,
)

# Shares of the budget: for the search, and of what is left for it, for one stage; for the search and counts.
SEARCH_SHARE, STAGE_SHARE, COUNT_SHARE = 0.7, 0.75, 0.95


@dataclass(kw_only=True, slots=True)
class StageReport:
    """Report on one stage of the search: its sample, its work, and what was left out."""

    name: str
    fraction: float = 1.0
    """Share of the entities that were sources."""
    n_left_out: int = 0
    """Bodies that were not extended."""
    n_heads_left_out: int = 0
    """Relations for whose facts no body was looked for."""
    rows_planned: float = 0.0
    """Rows that the stage was expected to compute; 0 if it was not begun."""
    rows_done: float = 0.0
    """Rows that it computed."""
    is_finished: bool = False
    """False if the budget or an interrupt ended the stage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MiningResult:
    """Mined rules, and how complete the search was."""

    rules: MinedRules  # in descending order of smoothed confidence
    # rules that reach the thresholds with their circular support, redundant ones included
    n_candidates: int
    stages: tuple[StageReport, ...]
    notes: tuple[str, ...]  # what was sampled or left out, one line each
    seconds: float  # wall time
    rows: int  # rows computed
    max_rows: int  # rows that might be computed
    is_late: bool  # whether time, and not work, ended some part
    interrupt: KeyboardInterrupt | None  # what ended the search early


def needed_bytes(n_facts: int, n_predicates: int, max_length: int) -> int:
    """Return an upper bound of the memory that mining takes beside the facts: their index, a chunk's rows, the bodies.

    Args:
      max_length: of the bodies, in atoms.
    """
    n_bodies = min((2 * n_predicates) ** (MAX_EXTENDED_LENGTH - 1), n_facts**2)
    is_long = max_length > MAX_EXTENDED_LENGTH
    # Bytes of a fact in the index, a body, a row, and a pair of a fact and a long body, as measured.
    return (
        n_facts * 900
        + n_bodies * 200
        + paths.CHUNK_ROWS * 350
        + is_long * paths.MAX_CLOSED_PAIRS * 80
    )


def mine_rules(
    facts: I32[Tensor, "N W"],
    n_predicates: int,
    n_constants: int,
    cfg: MiningConfig,
    progress: ProgressCallback = ignore_progress,
) -> MiningResult:
    """Mine the rules of a graph that are not redundant.

    Facts that do not have two arguments are left out and counted in a note. The result depends on facts, settings and
    seed alone, unless the time limit or a KeyboardInterrupt ends the search; then a note says so. Before the search
    begins, a KeyboardInterrupt is raised as it is.

    Args:
      facts: [predicate, argument...], padded with 0, distinct.
      progress: called with what is done, and how much of it.

    Returns:
      MiningResult, its rules by descending smoothed confidence.
    """
    binary = binary_atoms(facts)[:, :3].long()
    notes: list[str] = []
    if len(binary) < len(facts):
        notes.append(
            f"{len(facts) - len(binary)} facts do not have two arguments and were left out"
        )
    budget = Budget(
        max_rows=cfg.row_limit, seconds=cfg.seconds, progress=progress
    )
    ids = count_to(n_constants + 1, binary)
    # The first of three keys, so that a seed gives the sample that it always gave.
    key, *_ = random.split(random.key(cfg.seed, binary.device), 3)
    # A sampled rule is counted if it is among three times the `votes_per_fact` best sampled rules of some fact.
    n_votes, n_facts = cfg.votes_per_fact, len(binary)
    miner = _Miner(
        edges=paths.build_edge_index(binary, n_predicates, n_constants),
        priority=random.uniform(random.fold_in(key, ids), ()),
        cfg=cfg,
        budget=budget,
        votes=no_votes(n_facts, n_votes, facts.device),
        sampled_votes=no_votes(n_facts, 3 * n_votes, facts.device),
        bodies=rules.no_bodies(facts.device),
    )
    interrupt = None
    try:
        if n_facts:
            miner.mine()
    except KeyboardInterrupt as error:
        interrupt = error
    notes += miner.notes()
    if interrupt is not None:
        notes.append("interrupted: the rules found by then are kept")
    elif budget.was_late:
        notes.append(
            f"stopped by the limit of {budget.seconds:g} seconds: another machine may find other rules"
        )
    return MiningResult(
        rules=_sort_rules(compact(miner.votes).rules),
        n_candidates=miner.n_candidates,
        stages=tuple(miner.stages),
        notes=tuple(notes),
        seconds=budget.elapsed,
        rows=int(budget.rows),
        max_rows=budget.max_rows,
        is_late=budget.was_late,
        interrupt=interrupt,
    )


@dataclass(kw_only=True, slots=True)
class _Miner:
    """State of a search, which an interrupt leaves consistent: each field is replaced at once."""

    edges: EdgeIndex
    priority: F32[Tensor, "C1"]  # a random number in [0, 1) for each entity
    cfg: MiningConfig
    budget: Budget
    votes: Votes  # for rules with exact counts
    sampled_votes: Votes  # for rules with counts of the search's sample
    bodies: Bodies  # of the length searched last
    n_candidates: int = 0
    n_uncounted_samples: int = 0  # of the sampled rules with a vote
    n_uncounted: int = 0  # rules whose bodies were too long to be extended
    stages: list[StageReport] = field(default_factory=list[StageReport])

    def mine(self) -> None:
        """Search for rules of all lengths, count those that a sample showed, then PCA pairs of rules with constants."""
        for length in range(1, self.cfg.max_length + 1):
            share = SEARCH_SHARE
            if length < self.cfg.max_length:
                share = self._stage_share()
            # What is computed late is left out, so none of it is begun.
            if length > 1 and self.budget.is_late(share):
                self.stages.append(StageReport(name=_stage_name(length)))
            elif length > MAX_EXTENDED_LENGTH:
                self._search_long_paths(length, share)
            else:
                self._search_paths(length, share)
            if length == 1 and self.cfg.constants:
                self._search_constants()
        self._count_sampled()
        self._count_pca_pairs()

    def _stage_share(self) -> float:
        """Return the share of the budget at which the next stage must end, if other stages follow it."""
        spent = self.budget.spent_share
        return spent + STAGE_SHARE * max(0.0, SEARCH_SHARE - spent)

    def _run_stage(
        self, report: StageReport, share: float, steps: Iterator[None]
    ) -> None:
        """Run a stage until a share of the budget is spent.

        Args:
          steps: yields before it adds each part to what has been found.
        """
        start = self.budget.rows
        self.budget.start_stage(report.name, report.rows_planned)
        self.stages.append(report)
        # Rules of length 1, which take few rows, are found on any machine.
        in_time = math.inf if len(self.stages) == 1 else share
        for _ in steps:
            late = self.budget.is_late(in_time)
            if late or not self.budget.rows_left(share):
                return
            report.rows_done = self.budget.rows - start
        # The last part may be incomplete if the time is over.
        report.rows_done = self.budget.rows - start
        report.is_finished = not self.budget.is_late(in_time)

    def _thresholds(self, fraction: float = 1.0) -> tuple[float, float]:
        """Return the least support and confidence of a rule in a sample of a fraction of the entities."""
        least = self.cfg.min_support
        return max(least * fraction, min(2, least)), self.cfg.min_confidence

    # -- the search

    def _search_paths(self, length: int, share: float) -> None:
        """Search for path rules of one length."""
        edges, budget = self.edges, self.budget
        report = StageReport(
            name=_stage_name(length),
            rows_planned=len(edges.label) * (1 + rules.facts_per_pair(edges)),
        )
        if length == 1:
            samples = rules.iter_first_bodies(edges, budget)
        else:
            plan = rules.plan_extensions(
                edges, self.bodies, length - 1, budget.rows_left(share)
            )
            samples = rules.iter_extensions(
                edges, plan, length - 1, self.priority, budget
            )
            report.fraction = plan.fraction
            report.n_left_out = plan.n_left_out
            report.rows_planned = plan.n_rows

        bodies = [rules.no_bodies(edges.label.device)]
        steps = self._add_paths(samples, length, bodies)
        self._run_stage(report, share, steps)
        self.bodies = concatenate(bodies)

    def _add_paths(
        self, samples: Iterator[BodySample], length: int, bodies: list[Bodies]
    ) -> Iterator[None]:
        """Add the rules of samples to the votes, part by part; yield before each addition.

        Args:
          bodies: receives those that may be extended.
        """
        edges = self.edges
        for sample in samples:
            is_sampled = sample.fraction < 1.0
            thresholds = self._thresholds(sample.fraction)
            candidates = rules.find_candidates(edges, sample.pairs, *thresholds)
            table, _ = candidates
            found_bodies = rules.no_bodies(edges.label.device)
            if length < min(self.cfg.max_length, MAX_EXTENDED_LENGTH):
                found_bodies = rules.summarise_bodies(edges, sample)
            yield
            self.n_candidates += len(table.body)
            bodies.append(found_bodies)

            for batch in rules.pack_candidates(table, length):
                to_beat = score_to_beat(self.votes)
                if is_sampled:
                    of_samples = score_to_beat(self.sampled_votes)
                    to_beat = torch.maximum(to_beat, of_samples)
                found = rules.find_rules(
                    edges,
                    sample,
                    length,
                    candidates,
                    batch,
                    thresholds,
                    to_beat,
                )
                yield
                if is_sampled:
                    self.sampled_votes = add_votes(self.sampled_votes, found)
                else:
                    self.votes = add_votes(self.votes, found)

    def _search_constants(self) -> None:
        """Search for rules with constants; all their counts but the PCA pairs are exact."""
        name, share = "rules with constants", self._stage_share()
        if self.budget.is_late(share):
            self.stages.append(StageReport(name=name))
            return
        search = rules.plan_search(self.edges, self.cfg.min_support)
        report = StageReport(name=name, rows_planned=search.n_rows)

        def add_rules() -> Iterator[None]:
            for found in rules.find_constant_rules(
                self.edges, search, self.budget
            ):
                yield
                above = above_thresholds(found, *self._thresholds())
                self.n_candidates += len(above.rules.cost)
                self.votes = add_votes(self.votes, above)

        self._run_stage(report, share, add_rules())

    def _search_long_paths(self, length: int, share: float) -> None:
        """Search for path rules of one length that is too long for extending bodies."""
        search = LongPathSearch(
            edges=self.edges,
            length=length,
            priority=self.priority,
            thresholds=self._thresholds(),
            budget=self.budget,
            share=share,
        )
        closed = self._find_closed(search)

        # None are counted only where the budget is spent, and no batch begins.
        closed = search.count_range(closed, 0.0, RANGE_ENDS[0]) or closed
        closed = search.select_promising(closed, score_to_beat(self.votes))
        report = StageReport(
            name=_stage_name(length),
            rows_planned=float(rules.expected_rows(closed).sum()),
        )
        self.n_uncounted += len(closed.rules.cost)

        def add_rules() -> Iterator[None]:
            for batch in search.iter_batches(closed):
                yield
                found = search.find_rules(batch, score_to_beat(self.votes))
                if found is not None:
                    self.votes = add_votes(self.votes, found)
                    self.n_uncounted -= len(batch.rules.cost)

        self._run_stage(report, share, add_rules())

    def _find_closed(self, search: LongPathSearch) -> FoundRules:
        """Find the long rules that may be among the best of some fact, before their body pairs are counted."""
        edges, budget = self.edges, self.budget
        share = (budget.spent_share + search.share) / 2
        plan = paths.plan_closing(edges, search.length, budget.rows_left(share))
        report = StageReport(
            name=f"bodies of length {search.length}",
            n_heads_left_out=plan.n_left_out,
            rows_planned=plan.n_rows,
        )
        none = edges.fact[:0]
        parts = [FoundRules(no_rules(none.device), none, none)]

        def add_rules() -> Iterator[None]:
            for closed in paths.iter_closed_rules(
                edges, plan, search.length, self.cfg.min_support, budget, share
            ):
                yield
                if closed is not None:
                    self.n_candidates += len(closed.rules.cost)
                    closed = search.select_promising(
                        closed, score_to_beat(self.votes)
                    )
                    n_pairs = sum(len(part.fact) for part in parts)
                    if n_pairs + len(closed.fact) <= paths.MAX_CLOSED_PAIRS:
                        parts.append(closed)
                        continue
                report.n_heads_left_out += 1

        self._run_stage(report, share, add_rules())
        return concatenate_found(parts)

    # -- counts

    def _count_sampled(self) -> None:
        """Count the rules that the search saw in a sample, and let them vote with these counts.

        As many as the budget allows are counted, the cheapest ones.
        """
        seen = compact(self.sampled_votes).rules
        self.n_uncounted_samples = len(seen.cost)
        is_late = self.budget.is_late(COUNT_SHARE)
        rows_left = 0.0 if is_late else self.budget.rows_left(COUNT_SHARE)
        rows = _affordable(seen, rows_left)
        chosen = select_rows(seen, rows)
        if len(rows):
            self.budget.start_stage("exact counts", float(chosen.cost.sum()))
        for found in rules.count_path_rules(
            self.edges, chosen, self.priority, self.budget, COUNT_SHARE
        ):
            counted = above_thresholds(found, *self._thresholds())
            self.votes = add_votes(self.votes, counted)
            self.n_uncounted_samples -= len(found.rules.cost)

    def _count_pca_pairs(self) -> None:
        """Count the PCA pairs of the rules with constants, the best ones first, as far as the budget goes."""
        self.votes = compact(self.votes)
        if self.budget.is_late():
            return
        kept = self.votes.rules
        score = counts.smoothed_confidence(kept)
        order = row_index.best_first(score)
        rows = order[kept.pca_pairs[order].isnan()]
        chosen = select_rows(kept, rows)
        self.budget.start_stage("PCA confidences", float(chosen.cost.sum()))
        for part, pca_pairs in rules.count_pca_pairs(
            self.edges, chosen, self.budget
        ):
            kept = self.votes.rules
            column = kept.pca_pairs.index_copy(0, rows[part], pca_pairs)
            self.votes = self.votes._replace(
                rules=kept._replace(pca_pairs=column)
            )

    # -- what was left out

    def notes(self) -> list[str]:
        """Return notes on what was sampled, estimated or left out, one line each."""
        n_unknown = int(compact(self.votes).rules.pca_pairs.isnan().sum())
        found = [
            (
                self.n_uncounted,
                f"{{:,}} rules of more than {MAX_EXTENDED_LENGTH} atoms were left out, the least promising: the budget "
                "did not suffice to count their pairs",
            )
        ]
        for stage in self.stages:
            planned = max(stage.rows_planned, 1.0)
            percent = min(int(100 * stage.rows_done / planned), 99)
            found += [
                (
                    stage.fraction < 1.0,
                    f"{stage.name}: searched from {stage.fraction:.2%} of the entities; the best rules were counted "
                    "again",
                ),
                (
                    stage.n_left_out,
                    f"{stage.name}: {{:,}} shorter bodies, the least promising, were not extended",
                ),
                (
                    stage.n_heads_left_out,
                    f"{stage.name}: not searched for {{:,}} relations, whose facts have too many walks",
                ),
                (
                    not stage.is_finished,
                    f"{stage.name}: stopped after {percent} % of the work planned",
                ),
            ]
        found += [
            (
                n_unknown,
                "{:,} rules have no PCA confidence: the budget did not suffice to count its pairs",
            ),
            (
                self.n_uncounted_samples,
                "{:,} rules that a sample showed were left out: the budget did not suffice to count them",
            ),
        ]
        return [text.format(n) for n, text in found if n]


def _stage_name(length: int) -> str:
    return f"rules of length {length}"


def _affordable(found: MinedRules, max_rows: float) -> Tensor:
    """Return the rows of the cheapest rules that can be counted within a limit, the best rules first."""
    cost, by_cost = torch.sort(found.cost, stable=True)
    chosen = by_cost[torch.cumsum(cost, 0) <= max_rows]
    score = counts.held_out_smoothed_confidence(found)[chosen]
    return chosen[row_index.best_first(score)]


def _sort_rules(found: MinedRules) -> MinedRules:
    """Sort the rules by descending smoothed confidence; ties by length, labels and constants."""
    order = row_index.sort_rows(
        row_numbers(found.support),
        found.body_length,
        *found.labels.unbind(1),
        *found.end_constants.unbind(1),
    )
    score = counts.smoothed_confidence(found)[order]
    return select_rows(found, order[row_index.best_first(score)])
