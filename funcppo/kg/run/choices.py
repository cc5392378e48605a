"""Choices that valid makes in a run: stages, each of which may replace what is best so far, by one rule, in one loop.

A candidate replaces what is kept only if it ranks valid better by more than two standard errors of the paired
difference (`is_better`). `choose` runs one stage and writes its row; `choose_in_time` runs stages by the gain that they
promise a second, each within its part of the time that the ranking of test leaves. `start_run` has all of a run: the
settings of its rules (`choose_settings`), the ranking of test by them, and what is learnt from questions (`_Learner`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from funcppo.core import tree
from funcppo.core.host import NO_DEADLINE, Deadline, map_in_threads
from funcppo.core.settings import is_cuda
from funcppo.core.types import F64
from funcppo.kg.config import (
    BellmanFordConfig,
    EmbeddingConfig,
    ListwiseConfig,
    Note,
    ProverTaskConfig,
    RunConfig,
)
from funcppo.kg.graph.dataset import Dataset
from funcppo.kg.graph.rules import check_horn
from funcppo.kg.logic import derive, fixpoint, resolve
from funcppo.kg.logic import kb as kbase
from funcppo.kg.logic.derive import RulePlan, plan_rules
from funcppo.kg.logic.fixpoint import (
    Derivations,
    RuleCounts,
    count_rules,
    with_confidence,
)
from funcppo.kg.logic.joins import RowBudget, RowBudgetExceeded
from funcppo.kg.logic.kb import KnowledgeBase
from funcppo.kg.logic.prove import Clauses
from funcppo.kg.ranking import ranking
from funcppo.kg.ranking.ranking import (
    ListedQueries,
    RankingProtocol,
    asked_sides,
    check_queries,
)
from funcppo.kg.run import budget, fit, held_out
from funcppo.kg.run.budget import Choice, RunTime
from funcppo.kg.run.fit import (
    FitState,
    QuestionSetup,
    SplitEvidence,
    Training,
)
from funcppo.kg.run.run import (
    DEFAULT_STEPS,
    MAX_VALIDATION_SUCCESSORS,
    MIN_VALIDATION_QUERIES,
    NO_PROOF_ROW,
    PROOF_SCORES,
    Run,
    build_run,
    bytes_per_successor,
    count_search_successors,
    fitted_state,
    validation_queries,
    with_valid_evidence,
)
from funcppo.kg.scores import evidence, learned
from funcppo.kg.scores.learned import Params
from funcppo.kg.scores.score import OTHER_FACTS, Candidates, names_to_try, parse
from funcppo.kg.search.beam import ScoreName
from funcppo.kg.search.guide import sample_goals
from funcppo.kg.search.task import (
    MAX_DERIVATIONS_PER_ATOM,
    as_counts,
    entity_pool,
    held_out_triples,
    with_rule_counts,
)

T = TypeVar("T")

# rows of joins that the combinations of one height and object identity may make
MAX_TRIAL_ROWS = 100_000_000
DEFAULT_SCORE = "noisy-or@3"  # unless others rank valid better
HEIGHTS = range(
    1, 9
)  # to try, until neither the ranks nor what is derived grows
N_ERRORS = 2.0  # of the gain by which a candidate replaces what is kept
# Shares of the time that is left when each begins, at most: mining, the settings of rules, what they derive, the
# evidence of valid, and the ranking of test by rules.
MINING_SHARE, SETTINGS_SHARE, DERIVING_SHARE = 0.4, 0.25, 0.2
VALID_SHARE, TEST_SHARE = 0.12, 0.12
# of the time that is left, for listing the first questions
LISTING_SHARE = 0.15
# All 173,670 questions of WN18RR rank valid no better (`experiments/results/levels.json`).
MAX_QUESTIONS = 32_000
# goals that a guide learns from and is validated on, and the share of the time for sampling them
N_GUIDE_GOALS, N_GUIDE_VALID, GUIDE_SHARE = 1_000, 100, 0.1
GUIDE_HEIGHT = 4  # of proofs, unless it is set
# of the searches of a learner that nobody has set
MAX_SEARCH_BYTES = 1e8
# the step of the results table that adds a path network
NETWORK_ROW = "+ path network"
# with a smaller share of its steps a training gains little
MIN_TRAINING_SHARE = 0.2
# Linked candidates are compared where as many ranks tell: of fewer the answers may happen to be unlinked.
MIN_LINKED_RANKS = 100


# -- the loop


class Candidate(NamedTuple, Generic[T]):
    """Way that a stage may take, with how it ranks valid."""

    label: str
    value: T
    # of each query and side of valid; None without valid
    ranks: F64[Tensor, "Q"] | None

    @property
    def mrr(self) -> float:
        """Return the mean reciprocal rank on valid; NaN without valid."""
        return math.nan if self.ranks is None else float(self.ranks.mean())


class Stage(NamedTuple, Generic[T]):
    """Stage of a run: candidates for what is best so far, and what they promise.

    Functions get the best way so far.
    """

    name: str
    # yields them, the simplest first, until the deadline
    candidates: Callable[[Candidate[T], Deadline], Iterable[Candidate[T]]]
    # the share of 1 - MRR that it gained elsewhere, see `GAINS`
    gain: float = 0.0
    # stages of one family gain alike
    family: str = ""
    # the least seconds that gain anything, and those with which it gains nearly all
    seconds: Callable[[Candidate[T]], tuple[float, float]] = lambda _: (
        0.0,
        0.0,
    )
    # why it cannot be begun yet; empty if it can
    obstacle: Callable[[Candidate[T]], str] = lambda _: ""
    # the user has set it: its first candidate is taken whatever valid says, and no time ends it
    is_set: bool = False
    # its first candidate counts as the simpler way, which what is best so far must rank valid better than
    is_usual: bool = False


def paired_gain(
    one: F64[Tensor, "Q"], other: F64[Tensor, "Q"]
) -> tuple[float, float]:
    """Return the mean gain of some reciprocal ranks over others and its standard error, queries paired."""
    gain = (one - other).double()
    return float(gain.mean()), float(gain.std() / len(gain) ** 0.5)


def is_better(
    one: F64[Tensor, "Q"] | None, kept: F64[Tensor, "Q"] | None
) -> bool:
    """Return whether some ranks of valid are better than those that are kept, beyond chance; not without valid.

    The gain is more than two standard errors of the paired difference. Ranks of other queries are not compared.
    """
    if one is None or kept is None or not len(kept) or len(one) != len(kept):
        return False
    gain, error = paired_gain(one, kept)
    return gain > N_ERRORS * error


def choose(
    stage: Stage[T],
    best: Candidate[T],
    run_time: RunTime,
    deadline: Deadline = NO_DEADLINE,
    planned_seconds: float | None = None,
) -> Candidate[T]:
    """Run a stage from the best way so far; return the best way then.

    Args:
      run_time: gets the time of the stage and a row for what valid decided.
      deadline: when its candidates end.
      planned_seconds: for its row.
    """
    tried = [best]
    kept = best
    for one in stage.candidates(best, deadline):
        tried.append(one)
        is_simpler = stage.is_set or best.ranks is None
        if stage.is_usual and not is_better(best.ranks, one.ranks):
            is_simpler = True
        if (is_simpler and kept is best) or is_better(one.ranks, kept.ranks):
            kept = one

    seconds = run_time.end_phase(stage.name)
    if len(tried) == 1:
        return best
    shown = kept
    if kept is best:
        shown = max(tried[1:], key=lambda one: one.mrr)
    error = None
    if best.ranks is not None and shown.ranks is not None:
        error = paired_gain(shown.ranks, best.ranks)[1]
    run_time.choices.append(
        Choice(
            stage=stage.name,
            chosen=kept.label,
            is_kept=kept is not best,
            seconds=seconds,
            planned_seconds=planned_seconds,
            valid_before=None if best.ranks is None else best.mrr,
            valid_after=None if kept.ranks is None else kept.mrr,
            standard_error=error,
            work=run_time.work,
            tried={
                one.label: one.mrr for one in tried if one.ranks is not None
            },
        )
    )
    run_time.work = ""
    return kept


class _Planned(NamedTuple, Generic[T]):
    """Stage that can be begun, with what it promises."""

    stage: Stage[T]
    gain: float  # in MRR
    least: float  # seconds that gain anything
    whole: float  # seconds that gain nearly all of it

    @property
    def rate(self) -> tuple[bool, float]:
        """Return the gain a second, by which stages are ordered; those that are set come first."""
        return self.stage.is_set, self.gain / self.whole


def choose_in_time(
    stages: Sequence[Stage[T]], best: Candidate[T], run_time: RunTime
) -> Candidate[T]:
    """Run stages in the order of the gain that they promise a second; return the best way then.

    Each has a part of the time left as large as what it promises is among those that wait. What a stage promises is its
    usual share of 1 - MRR, averaged with what stages of its family gained in this run. One whose least work does not
    fit is not begun, and its row says so.
    """
    waiting = list(stages)
    seen: dict[str, list[float]] = {}

    while open_ := [stage for stage in waiting if not stage.obstacle(best)]:
        planned = [_plan(one, best, seen, run_time) for one in open_]
        run_time.end_phase("first steps")
        left = run_time.part().seconds_left
        for one in list(planned):
            if not one.stage.is_set and (one.least > left or not left):
                planned.remove(one)
                waiting.remove(one.stage)
                run_time.choices.append(_not_begun(one, left))
        if not planned:
            continue
        one, seconds = _next_stage(planned, left)
        waiting.remove(one.stage)
        deadline = NO_DEADLINE
        if not one.stage.is_set:
            deadline = run_time.part().at_most(seconds)
        before = best
        best = choose(one.stage, before, run_time, deadline, one.whole)
        seen.setdefault(one.stage.family, []).append(_gained(before, best))
    run_time.choices += [
        Choice(stage.name, reason=stage.obstacle(best)) for stage in waiting
    ]
    return best


def _plan(
    stage: Stage[T],
    best: Candidate[T],
    seen: Mapping[str, list[float]],
    run_time: RunTime,
) -> _Planned[T]:
    """Return what a stage promises for which time, by its first steps if there is time for these."""
    least = whole = 0.0
    if stage.is_set or not run_time.part().is_over:
        least, whole = stage.seconds(best)
    gain = _promised(stage, best, seen)
    return _Planned(stage, gain, least, max(whole, 0.1))


def _not_begun(one: _Planned[Any], left: float) -> Choice:
    """Return the row of a stage that does not fit in the seconds that are left."""
    if not left:
        return Choice(one.stage.name, reason="no time is left")
    reason = f"it takes at least {one.least:.3g} s, and {left:.3g} s are left"
    return Choice(one.stage.name, planned_seconds=one.whole, reason=reason)


def _next_stage(
    planned: Sequence[_Planned[T]], left: float
) -> tuple[_Planned[T], float]:
    """Return the stage that gains most a second, of those whose part of the time suffices, with its part."""
    rest = sorted(planned, key=lambda one: one.rate, reverse=True)
    while True:
        # What one cannot use is divided among the others.
        parts: dict[str, float] = {}
        time_left, gains = left, sum(one.gain for one in rest)
        for one in sorted(rest, key=lambda one: one.gain / one.whole)[::-1]:
            share = one.gain / max(gains, 1e-9)
            parts[one.stage.name] = min(one.whole, share * time_left)
            time_left -= parts[one.stage.name]
            gains -= one.gain
        short = [one for one in rest if parts[one.stage.name] < one.least]
        if not short or len(rest) == 1:
            first = rest[0]
            others = sum(one.whole for one in planned if one is not first)
            part = max(parts[first.stage.name], left - others)
            return first, max(first.least, part)
        rest.remove(short[-1])


def _promised(
    stage: Stage[T], best: Candidate[T], seen: Mapping[str, list[float]]
) -> float:
    """Return the gain in MRR that a stage promises, by what stages of its family gained in this run."""
    shares = [stage.gain, *seen.get(stage.family, ())]
    left = 1.0 if best.ranks is None else 1.0 - best.mrr
    return sum(shares) / len(shares) * left


def _gained(before: Candidate[T], after: Candidate[T]) -> float:
    """Return the share of 1 - MRR on valid that a stage has gained."""
    if after is before or after.ranks is None:
        return 0.0
    return (after.mrr - before.mrr) / max(1.0 - before.mrr, 1e-9)


def describe_choice(choice: Choice) -> str:
    """Format a row of the table of choices as one line."""
    if choice.reason:
        return f"{choice.stage}: not begun: {choice.reason}"
    line = f"{choice.stage}: {choice.chosen} chosen"
    if choice.valid_after is not None:
        line += f": valid {choice.valid_after:.4f}"
    others = sorted(
        (-metric, label)
        for label, metric in choice.tried.items()
        if label != choice.chosen
    )
    for metric, label in others[:1]:
        line += f"; {label} {-metric:.4f}"
    if len(others) > 1:
        line += f" and {len(others) - 1} more"
    return line + f"; {choice.work}" * bool(choice.work)


# -- settings by rule confidences


class Trial(NamedTuple):
    """Combination of settings with its MRR on the sampled valid queries."""

    height: int
    object_identity: bool
    smoothing: float | None
    score: str
    # on the sampled valid queries and sides, ties in random order; None: not tried
    ranks: F64[Tensor, "Q"] | None = None
    is_derived: float = 0.0  # share of the answers that the rules derive
    atoms_per_query: float = 0.0  # distinct candidates that were scored

    @property
    def label(self) -> str:
        """Return the settings in words."""
        smoothing = "no" if self.smoothing is None else f"{self.smoothing:g}"
        identity = ", object identity" * self.object_identity
        return f"height {self.height}, smoothing {smoothing}, {self.score}{identity}"

    def apply(self, cfg: ProverTaskConfig) -> ProverTaskConfig:
        """Return the settings of `cfg` with the trial's height, smoothing and object identity."""
        return replace(
            cfg,
            max_height=self.height,
            smoothing=self.smoothing,
            object_identity=self.object_identity,
        )


class Settings(NamedTuple):
    """Settings of a data set that rank its valid split best by rule confidences."""

    # those that were kept at each height, ascending; the last one ranks best
    by_height: tuple[Trial, ...]
    # the first of a greater height at which rules derive more answers, though they rank no better; None without one
    deeper: Trial | None = None
    # of the rules without object identity, as `Dataset.rule_counts` holds them; None if none were counted
    rule_counts: np.ndarray | None = None
    # counts under object identity; None if it was not tried
    identity_counts: RuleCounts | None = None
    # what the rules fire from, on the host; None where height 1 was not tried
    plan: RulePlan | None = None

    @property
    def best(self) -> Trial:
        """Return the settings that rank best."""
        return self.by_height[-1]

    def build_highest(
        self,
        build: Callable[[Trial], T],
        on_cut: Callable[[str], object],
    ) -> T:
        """Return what is built with the best settings, or with those of a lower height where T_P takes too much.

        Args:
          build: raises ValueError where it takes too much.
          on_cut: receives a line for each height that is not taken.
        """
        for trial in reversed(self.by_height):
            try:
                return build(trial)
            except ValueError as error:
                if trial is self.by_height[0]:
                    raise
                on_cut(f"height {trial.height} not taken: {error}")
        raise AssertionError("a choice has settings for a height")


class _HeldCandidates(Candidates):
    """Candidates of a trial with their derivations, which trials of one height share."""

    def __init__(
        self,
        kb: KnowledgeBase,
        listed: ListedQueries,
        derivations: list[Derivations],
    ) -> None:
        self.kb = kb
        self._listed = listed
        self._derivations = derivations

    def __len__(self) -> int:
        """Return the number of distinct candidates."""
        return len(self._listed.distinct[0][0])

    def derivations(self) -> list[Derivations]:
        """Return the rules that derive each candidate."""
        return self._derivations

    def derived_within(self, height: int) -> Tensor:
        """Return True for every candidate: the rules derive all of them within the height of the trial."""
        return torch.ones(len(self), dtype=torch.bool)


def choose_settings(
    dataset: Dataset,
    cfg: ProverTaskConfig,
    score: str | None = None,
    run_time: RunTime | None = None,
    deadline: Deadline = NO_DEADLINE,
) -> Settings:
    """Choose the settings that `cfg` leaves open by the MRR of untrained scores on the valid split.

    Every combination ranks the same sample of valid queries by rule confidences alone. The work is bounded by a number
    of rows of joins, so that the choice does not depend on the speed of the machine, and by a deadline. Where the first
    combination takes more, fewer queries are ranked; later ones are not begun where a random sample of the rules says
    that they take more. At height h the rules apply once to the atoms that T_P derives in h - 1 steps.

    Args:
      dataset: triples and rules.
      cfg: settings. `max_height` None, `smoothing` "auto" and `object_identity` "auto" are chosen; unless it is set,
        object identity is tried at height 1 alone, where a policy can keep it.
      score: an untrained score that is set; None chooses one too.
      run_time: gets notes on what was not tried, and the choice.
      deadline: when the choice ends; what is not tried by then is not chosen.

    Raises:
      ValueError: a valid query, which the message names, cannot be ranked.
    """
    run_time = run_time or RunTime()
    check_rankable(dataset, dataset.valid)
    values = _open_values(cfg, score)
    heights, identities, smoothings, scores = values
    first = Trial(heights[0], identities[0], smoothings[0], scores[0])
    kept: list[Candidate[Trial]] = []
    found = Settings((first,), rule_counts=dataset.rule_counts)

    # Nothing is chosen where all is set, or there is nothing to choose by.
    if any(len(of) > 1 for of in values):
        reason = "no valid split"
        if len(dataset.valid):
            reason = "nothing to choose by"
            grid = _Grid(dataset, cfg, run_time, deadline)
            kept = grid.choose(*values)
            found = Settings(
                tuple(one.value for one in kept) or (first,),
                grid.deeper,
                grid.rule_counts,
                grid.counts_of.get(True),
                grid.plan,
            )
        if not kept:
            run_time.note(f"{reason}: {first.label}")
    return found


def _open_values(
    cfg: ProverTaskConfig, score: str | None
) -> tuple[
    Sequence[int], Sequence[bool], Sequence[float | None], Sequence[str]
]:
    """Return the values to try of each setting: the one that is set, else all, that of a run without valid first."""
    identity = cfg.object_identity
    if identity == "auto" and cfg.fact_selection == "policy":
        identity = False  # only the oracle knows which facts keep it
    return (
        HEIGHTS if cfg.max_height is None else (cfg.max_height,),
        (False, True) if identity == "auto" else (identity,),
        (5.0, 20.0, None) if cfg.smoothing == "auto" else (cfg.smoothing,),
        sorted(names_to_try(), key=lambda name: name != DEFAULT_SCORE)
        if score is None
        else (score,),
    )


def check_rankable(dataset: Dataset, split: np.ndarray) -> None:
    """Raise ValueError unless all queries of a split are binary and ground, and the pool holds their answers."""
    pool, is_countries = entity_pool(dataset)
    check_queries(dataset, split, pool.numpy(), asked_sides(is_countries))


class _Grid:
    """Trials of settings, all on the same sample of valid queries."""

    def __init__(
        self,
        dataset: Dataset,
        cfg: ProverTaskConfig,
        run_time: RunTime,
        deadline: Deadline,
    ) -> None:
        """Set the data and the deadline of all trials; count the rules without object identity."""
        check_horn(dataset)
        # by whether it is with object identity; counts that miss are added
        self.counts_of: dict[bool, RuleCounts] = {}
        if cfg.object_identity is not True:
            dataset, notes = with_rule_counts(
                dataset, run_time.on_phase, run_time.part(SETTINGS_SHARE)
            )
            counts = as_counts(dataset.rule_counts)
            assert counts is not None, "they are counted"
            self.counts_of[False] = RuleCounts(*counts.unbind(1))
            run_time.notes += [Note("cut", note) for note in notes]
        self.rule_counts = dataset.rule_counts
        self.kb, self.sizes = kbase.from_dataset(dataset)
        self.run_time = run_time
        self.deadline = deadline
        self.deeper: Trial | None = None
        self.max_atoms = cfg.max_atoms
        self.plan = None
        if cfg.max_height in (None, 1):
            self.plan = plan_rules(self.kb, self.sizes, cfg.memory_share)

        rows = np.sort(ranking.random_rows(len(dataset.valid), 1000))
        self.queries = torch.from_numpy(dataset.valid[rows]).long()
        self.pool, is_countries = entity_pool(dataset)
        sides = asked_sides(is_countries)
        self.protocol = RankingProtocol(sides=sides)
        answering = derive.answering_facts(
            self.kb, self.sizes, self.queries, sides
        )
        held_out = torch.from_numpy(held_out_triples(dataset))
        self.known_triples = torch.cat([answering, held_out])

    def choose(
        self,
        heights: Sequence[int],
        identities: Sequence[bool],
        smoothings: Sequence[float | None],
        scores: Sequence[str],
    ) -> list[Candidate[Trial]]:
        """Return the settings that are kept at each height that is better than those below; none if none is tried.

        Ascending heights are tried until some answers are derived and neither the best ranks nor the share of these
        answers grows, or one takes too long, which is noted.
        """
        kinds = list(product(smoothings, scores))
        kept: list[Candidate[Trial]] = []
        below = (-1.0, -1.0)
        for height in heights:
            is_alone = len(heights) > 1 and height > 1 and len(identities) > 1
            trials, reason = self._try_height(
                height, (False,) if is_alone else identities, kinds, bool(kept)
            )
            tried = [Candidate(one.label, one, one.ranks) for one in trials]
            if tried:
                kept = self._keep(kept, tried, height)
                best, share = (
                    max(one.mrr for one in tried),
                    trials[0].is_derived,
                )
                if share and best <= below[0] and share <= below[1]:
                    break
                below = max(best, below[0]), max(share, below[1])
            if reason:
                self.run_time.note_cut(reason)
                break
        return kept

    def _keep(
        self,
        kept: list[Candidate[Trial]],
        tried: list[Candidate[Trial]],
        height: int,
    ) -> list[Candidate[Trial]]:
        """Return the settings kept below with those of a height, if they are better."""
        first, *others = tried
        name = f"settings of rules at height {height}"
        stage = Stage(name, lambda *_: others)
        best = choose(stage, first, self.run_time)
        if kept:
            stage = Stage(f"height {height}", lambda *_: [best])
            if choose(stage, kept[-1], self.run_time) is kept[-1]:
                if best.value.is_derived > kept[-1].value.is_derived:
                    self.deeper = self.deeper or best.value
                return kept
        self.deeper = None
        return [*kept, best]

    def _try_height(
        self,
        height: int,
        identities: Sequence[bool],
        kinds: Sequence[tuple[float | None, str]],
        is_later: bool,
    ) -> tuple[list[Trial], str]:
        """Return the trials of a height, and why what takes longer is not tried either; empty if all was tried."""
        found: list[Trial] = []
        for identity in identities:
            name = f"height {height}" + " with object identity" * identity
            is_later = is_later or bool(found)
            try:
                found += self._try(height, identity, kinds, name, is_later)
            except RowBudgetExceeded as error:
                note = f"{name} not tried: {error}"
                # Object identity projects less away, and a greater height joins more facts.
                if not identity:
                    text = "what takes longer is not tried either"
                    return found, f"{note}; {text}"
                self.run_time.note_cut(note)
        return found, ""

    def _try(
        self,
        height: int,
        object_identity: bool,
        kinds: Sequence[tuple[float | None, str]],
        tried: str,
        is_later: bool,
    ) -> list[Trial]:
        """Return the trials of a height; the first trials rank fewer queries if all queries take too long.

        Later ones, which apply all rules to count them or for T_P, are not begun where a sample of the rules makes too
        many rows.

        Raises:
          RowBudgetExceeded: the joins make more rows than `MAX_TRIAL_ROWS` or take too long, or there are too many
            derivations to hold.
        """
        if is_later:
            fixpoint.check_sampled_rows(
                self.kb,
                self.sizes,
                MAX_TRIAL_ROWS,
                object_identity=object_identity,
                deadline=self.deadline,
            )
            return self._rank(
                height, object_identity, kinds, tried, self.deadline
            )
        while True:
            # The first height may take 0.4 of the time with some number of queries.
            part = self.deadline.share(0.4)
            try:
                return self._rank(height, object_identity, kinds, tried, part)
            except RowBudgetExceeded:
                n_queries = len(self.queries) // 8
                if n_queries < 15 or object_identity not in self.counts_of:
                    raise
                rows = torch.linspace(0, len(self.queries) - 1, n_queries)
                self.queries = self.queries[rows.long()]

    def _rank(
        self,
        height: int,
        object_identity: bool,
        kinds: Sequence[tuple[float | None, str]],
        tried: str,
        deadline: Deadline,
    ) -> list[Trial]:
        """Rank by all smoothings and scores at a height; return the trials. See `_try` for the errors."""

        def show(stage: str, done: int = 0, total: int | None = None) -> None:
            text = f"choosing settings: {tried}: {stage}"
            self.run_time.on_phase(text, done, total, deadline)

        show("T_P" if height > 1 else "listing candidates")
        rows = RowBudget(MAX_TRIAL_ROWS, deadline=deadline)
        if object_identity not in self.counts_of:
            self.counts_of[object_identity] = count_rules(
                self.kb,
                self.sizes,
                object_identity=object_identity,
                budget=rows,
                progress=partial(show, "counting rules"),
            )
        counts = self.counts_of[object_identity]
        if height > 1:
            # The first step makes a row at least for each head of each rule.
            RowBudget(MAX_TRIAL_ROWS).spend(int(counts.body_pairs.sum()))
        listed, derivations = self._list_candidates(
            height, object_identity, rows, show
        )

        def rank(
            kind: tuple[float | None, str],
        ) -> tuple[F64[Tensor, "Q"], float, float]:
            if deadline.is_over:
                raise RowBudgetExceeded("more time than was left")
            held = _HeldCandidates(
                with_confidence(self.kb, counts, kind[0]), listed, derivations
            )
            # What the rules say chooses the settings of a score with other facts too.
            score = parse(kind[1].removesuffix(OTHER_FACTS))
            ranked = ranking.rank_listed(
                listed, lambda *_: score.log_odds(held)
            )
            is_derived = ranked.answer_provable.double().mean()
            return (
                fit.reciprocal_ranks(ranked),
                float(is_derived),
                len(ranked.scored_atom) / len(self.queries),
            )

        show("ranking", 0, len(kinds))
        trials: list[Trial] = []
        for ranks, kind in zip(map_in_threads(rank, kinds), kinds):
            trials.append(Trial(height, object_identity, *kind, *ranks))
            show("ranking", len(trials), len(kinds))
        return trials

    def _list_candidates(
        self,
        height: int,
        object_identity: bool,
        rows: RowBudget,
        show: Callable[[str, int, int | None], None],
    ) -> tuple[ListedQueries, list[Derivations]]:
        """List the query candidates that one application of the rules to T_P of the next lower height derives."""
        sizes, kb, plan = self.sizes, self.kb, self.plan
        if height > 1:
            below = fixpoint.least_model(
                kb,
                sizes,
                max_height=height - 1,
                max_atoms=self.max_atoms,
                object_identity=object_identity,
                budget=rows,
                progress=lambda step, _, done, total: show(
                    f"T_P step {step + 1}", done, total
                ),
            )
            if not below.complete:
                raise RowBudgetExceeded(f"T_P {below.stop_reason}")
            kb, sizes = fixpoint.with_facts(kb, sizes, below.atoms)
            plan = None
        most = MAX_DERIVATIONS_PER_ATOM * self.max_atoms
        part = derive.answered_step(
            plan or plan_rules(kb, sizes),
            kb,
            self.queries,
            self.protocol.sides,
            most,
            object_identity,
            rows,
            partial(show, "listing candidates"),
        )
        if part is None:
            raise RowBudgetExceeded(f"more than {most:,} derivations")
        model, index = part
        listed = ranking.list_queries(
            self.protocol,
            sizes,
            fixpoint.build_filter_index(
                sizes, model, self.known_triples, self.pool
            ),
            self.queries,
            torch.arange(len(self.queries)),
            self.pool,
            by_side=False,
        )
        ((atoms, _),) = listed.distinct
        derivations = derive.iter_indexed_derivations(
            index, sizes, atoms.to(torch.int32)
        )
        return listed, list(derivations)


# -- a new run


def start_run(
    run_config: RunConfig,
    dataset: Dataset,
    run_time: RunTime | None = None,
    memory_limit: int | None = None,
) -> Run:
    """Start a run: choose its settings, rank test by rules, and learn from questions; return the run.

    Rule confidences choose height, smoothing and object identity. At height 1 a run learns from questions, above it
    from proofs, by PPO, unless the learner is set.

    Args:
      run_config: the settings; those that are open are chosen.
      dataset: triples and rules, as the settings name them.
      run_time: None begins it, with the seconds of the settings.
      memory_limit: in bytes; None for no limit.

    Raises:
      ValueError: bad data or settings, too little memory, or a query of valid or test that cannot be ranked.
    """
    run_time = run_time or RunTime(run_config.seconds)
    run_config, notes = budget.plan_settings(
        budget.with_device(run_config), len(dataset.facts), memory_limit
    )
    run_time.notes += notes
    for name in ("valid", "test"):
        try:
            check_rankable(dataset, getattr(dataset, name))
        except ValueError as error:
            raise ValueError(f"{dataset.name}: {name}: {error}") from None

    if run_config.learner == "guide":
        return _start_guide(run_config, dataset, run_time)
    run = _build_chosen(run_config, dataset, run_time)
    if run.questions is not None:
        run_time.on_phase("listing evidence of valid queries")
        seconds = run_time.part(VALID_SHARE).seconds_left
        run = with_valid_evidence(run, max(seconds, held_out.FIRST_SECONDS))
        run_time.end_phase("evidence of valid")
    run, by_rules = _rank_valid_by_rules(run, run_time)
    run = _rank_test_by_rules(run, run_time)
    if run.questions is not None:
        run = _Learner(run, run_time).learn(by_rules)
    elif run.n_validation_queries:
        run = _choose_proof_score(run, run_time)
    steps = run.run_config.steps or DEFAULT_STEPS
    return replace(
        run,
        run_config=replace(run.run_config, steps=steps),
        notes=tuple(dict.fromkeys((*run_time.notes, *run.notes))),
        choices=tuple(run_time.choices),
    )


def _start_guide(
    run_config: RunConfig, dataset: Dataset, run_time: RunTime
) -> Run:
    """Return a run that learns to order a search, from goals that rules derive; others of them are its valid split."""
    check_horn(dataset)
    prover = run_config.prover
    height = prover.max_height or GUIDE_HEIGHT
    run_time.on_phase("sampling goals")
    goals = sample_goals(
        Clauses(*kbase.from_dataset(dataset)),
        height,
        N_GUIDE_GOALS,
        run_config.seed,
        run_time.part(GUIDE_SHARE),
    )
    if len(goals) < 2:
        raise ValueError(
            f"{dataset.name}: expected atoms that rules derive, to learn from, got {len(goals)}"
        )
    run_time.end_phase("goals")

    prover = replace(
        prover,
        max_height=height,
        smoothing=None if prover.smoothing == "auto" else prover.smoothing,
        object_identity=prover.object_identity is True,
    )
    settings = replace(
        run_config,
        prover=prover,
        rule_score="max-confidence",
        steps=run_config.steps or DEFAULT_STEPS,
    )
    table = np.array(goals, np.int32)
    n_valid = min(N_GUIDE_VALID, len(goals) // 4)
    goals_to_learn = replace(
        dataset,
        train=table[n_valid:],
        valid=table[:n_valid],
        test=dataset.test[:0],
    )
    return build_run(settings, goals_to_learn, run_time.on_phase)


def _choose_rule_settings(
    run_config: RunConfig, dataset: Dataset, run_time: RunTime
) -> Settings:
    """Choose the settings by which rules rank valid best, of those that a run may have."""
    prover, score = run_config.prover, run_config.rule_score
    if run_config.learner == "questions" or prover.object_identity is True:
        prover = replace(prover, max_height=prover.max_height or 1)
    if (prover.max_height or 1) > 1 and prover.object_identity == "auto":
        # A policy cannot keep it.
        prover = replace(prover, object_identity=False)
    settings = choose_settings(
        dataset,
        prover,
        None if score == "auto" else score,
        run_time,
        run_time.part(SETTINGS_SHARE),
    )
    run_time.end_phase("settings of rules")
    return settings


def _build_chosen(
    run_config: RunConfig, dataset: Dataset, run_time: RunTime
) -> Run:
    """Build the run with the settings by which rules rank valid best; at a lower height where T_P takes too much."""
    settings = _choose_rule_settings(run_config, dataset, run_time)
    if settings.rule_counts is not None:
        dataset = replace(dataset, rule_counts=settings.rule_counts)

    def build(trial: Trial) -> Run:
        learner = run_config.learner
        if learner == "auto":
            learner = "questions" if trial.height == 1 else "proofs"
        config = _with_trial(run_config, trial, learner)
        if run_config.learner == "auto" and trial.height > 1:
            config = with_few_successors(config, dataset, run_time)
        return build_run(
            config,
            dataset,
            run_time.on_phase,
            run_time.part(DERIVING_SHARE),
            settings.plan if trial.height == 1 else None,
            settings.identity_counts if trial.object_identity else None,
        )

    run = settings.build_highest(build, run_time.note_cut)
    run_time.end_phase("what the rules derive")
    if run_config.learner == "auto" and settings.deeper is not None:
        return _try_proofs(run, run_config, settings.deeper, run_time)
    return run


def with_few_successors(
    run_config: RunConfig, dataset: Dataset, run_time: RunTime
) -> RunConfig:
    """Bound the successors of a search, where the largest number would take memory and time that no gain pays."""
    prover = run_config.prover
    if prover.max_successors is not None:
        return run_config
    kb, sizes = kbase.from_dataset(dataset)
    shape = resolve.make_resolve_config(kb, sizes, prover.max_height or 1)
    most = MAX_SEARCH_BYTES * budget.work_factor(run_config.device)
    of_each = bytes_per_successor(shape, run_config.ppo.n_envs)
    bound = max(1, int(most / of_each))
    if bound >= shape.max_successors:
        return run_config
    run_time.note_cut(
        f"proofs of height {shape.max_height}: searches keep {bound:,} of up to {shape.max_successors:,} successors"
    )
    return replace(run_config, prover=replace(prover, max_successors=bound))


def _with_trial(
    run_config: RunConfig,
    trial: Trial,
    learner: Literal["auto", "questions", "proofs", "guide"],
) -> RunConfig:
    """Return the settings of a run with those of a trial."""
    return replace(
        run_config,
        prover=trial.apply(run_config.prover),
        learner=learner,
        rule_score=trial.score,
    )


def _try_proofs(
    run: Run, run_config: RunConfig, trial: Trial, run_time: RunTime
) -> Run:
    """Return the run that learns from proofs at a greater height, if untrained it ranks valid better than rules.

    Args:
      run: at the height by which rules rank valid best.
      trial: of a height at which they derive more.
    """
    shape = resolve.make_resolve_config(
        run.task.kb, run.task.sizes, trial.height
    )
    n_successors = count_search_successors(shape.max_successors, trial.height)
    n_queries = min(MIN_VALIDATION_QUERIES, len(run.task.dataset.valid))
    if (
        n_queries * trial.atoms_per_query * n_successors
        > MAX_VALIDATION_SUCCESSORS
    ):
        run_time.note(
            f"proofs at height {trial.height} not tried: their search takes too long"
        )
        return run
    deadline = run_time.part(DERIVING_SHARE)
    name = f"proofs at height {trial.height}"
    config = _with_trial(run_config, trial, "proofs")
    try:
        deeper = build_run(
            config, run.task.dataset, run_time.on_phase, deadline
        )
        tried = [_rank_untrained(deeper, name, deadline, run_time)]
    except ValueError as error:
        run_time.note_cut(f"height {trial.height} not taken: {error}")
        return run
    except held_out.TimeOver:
        run_time.note_cut(f"{name} not tried: there was no time for it")
        return run
    by_rules = ranking.rank_split(
        run.task,
        validation_queries(deeper),
        parse(run.run_config.rule_score),
    )
    start = Candidate(
        f"rules at height {run.task.max_height}",
        run,
        fit.reciprocal_ranks(by_rules),
    )
    return choose(Stage("proofs", lambda *_: tried), start, run_time).value


def _rank_untrained(
    run: Run, label: str, deadline: Deadline, run_time: RunTime
) -> Candidate[Run]:
    """Return a run with the ranks of valid by its policy before training.

    Raises:
      TimeOver: the deadline is over.
    """
    report = held_out.stopping_at(deadline, run_time.on_phase)
    show = partial(report, f"ranking valid by {label}, untrained")
    ranked = held_out.rank_valid(run, run.state.start_params, show)
    return Candidate(label, run, fit.reciprocal_ranks(ranked))


def _rank_valid_by_rules(
    run: Run, run_time: RunTime
) -> tuple[Run, F64[Tensor, "Q"] | None]:
    """Return the run with the metric of its rule score on valid, and the ranks of valid by it."""
    run_time.on_phase("ranking valid by rule confidences")
    ranked = held_out.rank_valid_by_rules(run)
    if ranked is None:
        return run, None
    metric = held_out.metric_of(run, ranked)
    return replace(run, rule_metric=metric), fit.reciprocal_ranks(ranked)


def _rank_test_by_rules(run: Run, run_time: RunTime) -> Run:
    """Return the run with test, or a sample of it, ranked by rules; reserve the time to rank it by what is learnt."""
    found = held_out.TestRanking(held_out.rule_rows(run))
    n_all = len(run.task.dataset.test)
    if n_all:
        limit = run_time.part(TEST_SHARE)
        seconds = run_time.phases.get("evidence of valid", 0.0)
        each = seconds / max(run.n_validation_queries, 1)
        found.rank_by_rules(run, limit, run_time.on_phase, each)
        run_time.end_phase("ranking of test by rules")
        run_time.reserve("test", 1.5 * found.rates["rules"] * n_all)
    return replace(run, ranked_test=found)


def _choose_proof_score(run: Run, run_time: RunTime) -> Run:
    """Return the run with the score that is set, or with the score of proofs by which its policy ranks valid best."""
    set_score = run.run_config.score
    names = PROOF_SCORES[::-1] if set_score == "auto" else (set_score,)
    deadline = run_time.part(VALID_SHARE)

    def rank(name: ScoreName) -> Candidate[Run]:
        scored = replace(run, score=name)
        return _rank_untrained(scored, name, deadline, run_time)

    tried = [Candidate(names[0], replace(run, score=names[0]), None)]
    try:
        tried = [rank(names[0])]
        seconds = run_time.seconds_in_phase
        # Test is ranked before and after training.
        found = run.ranked_test
        n_test = found.n_queries if found else 0
        each = seconds / max(run.n_validation_queries, 1)
        run_time.reserve("test by proofs", 2.5 * each * n_test)
        tried += [rank(name) for name in names[1:]]
    except held_out.TimeOver:
        run_time.note_cut(f"score of proofs: {names[0]}: no time to choose")
    stage = Stage("score of proofs", lambda *_: tried[1:])
    return choose(stage, tried[0], run_time).value


# -- a run that learns from questions


class Fitted(NamedTuple):
    """Weights of evidence, with the evidence, and with what they have become stage by stage."""

    setup: QuestionSetup  # with the questions that they are fitted on
    params: Params
    valid: SplitEvidence | None  # with the priors of the setup
    # the name of each stage that was kept, and the weights then
    steps: tuple[tuple[str, Params], ...] = ()

    @property
    def is_fitted(self) -> bool:
        """Return whether a fit has been kept."""
        return not {"fit", "+ embeddings"}.isdisjoint(dict(self.steps))


# The share of 1 - MRR that a stage is taken to gain until the run has seen its kind, as it did in
# `experiments/results/levels.json`. They order the stages and divide the time, and accept none.
GAINS = {
    "listwise fit": 0.15,
    "path network": 0.15,
    "link embeddings": 0.10,
    "answers without a proof": 0.018,
    "larger path network": 0.017,
    "more questions": 0.006,
    "linked candidates": 0.003,
}


class _Learner:
    """What a run that learns from questions weighs beside the confidences of its rules: stages that valid judges."""

    def __init__(self, run: Run, run_time: RunTime) -> None:
        """Set the run, with its settings and the evidence of valid."""
        self.run, self.run_time = run, run_time
        self.options = fit.resolve_left_out(run.task, run.run_config.questions)
        self.problem = ""  # why there are no questions
        self.n_asked, self.listing_seconds = 0, 0.0
        # of priors, by the name of the stage
        self.trainings: dict[str, Training[Any]] = {}
        self.prior_seconds: dict[str, float] = {}  # of a question
        # the first fit, and what it starts from
        self.begun_fit: tuple[QuestionSetup, Training[FitState]] | None = None
        # by the name of the step, the best weights so far that tell all entities apart, kept or not
        self.knowing: dict[str, Candidate[Fitted]] = {}
        self.derives_all = True  # whether the rules derive all answers of valid
        self.seconds_of_all = (
            0.0  # of ranking all entities for valid, the most so far
        )

    def learn(self, by_rules: F64[Tensor, "Q"] | None) -> Run:
        """Return the run with the weights that rank valid best.

        Args:
          by_rules: the ranks of valid by the rule score; None without valid.
        """
        given, began = self.run.questions, time.monotonic()
        assert given is not None, "the run learns from questions"
        params = fit.untrained_params(given)
        fitted = Fitted(given, params, self.run.valid_evidence)
        untrained = self._candidate("sum of odds", fitted)
        self.metric_seconds = time.monotonic() - began
        start = Candidate("rules", untrained.value, by_rules)
        stage = Stage("sum of odds", lambda *_: [untrained])
        best = choose(stage, start, self.run_time)
        stages = self._stages()
        if stages:
            part = self.run_time.part(LISTING_SHARE)
            setup = self._list(best.value.setup, part, self._n_askable())
            self.run_time.end_phase("training questions")
            best = best._replace(value=best.value._replace(setup=setup))
        # What gains most on few seconds comes last, after all priors.
        self._reserve_without_proof(untrained.value, 2)
        best = choose_in_time(stages, best, self.run_time)
        if self.options.no_proof == "auto" and by_rules is not None:
            for fitted in self._knowing(best).values():
                self._reserve_without_proof(fitted, 0)
            last = Stage(
                "answers without a proof",
                self._rank_without_proof,
                seconds=self._cost_without_proof,
                obstacle=self._obstacle_without_proof,
            )
            best = choose_in_time([last], best, self.run_time)
        return self._finish(best, best.label != "rules")

    def _stages(self) -> list[Stage[Fitted]]:
        """Return the stages that the settings leave open or ask for; without valid those that it need not judge."""
        options, config = self.options, self.run.run_config
        has_valid = self.run.valid_evidence is not None
        stages: list[Stage[Fitted]] = []

        def add(name: str, family: str, *functions: Any, **kinds: bool) -> None:
            stage = Stage(
                name, functions[0], GAINS[name], family, *functions[1:]
            )
            stages.append(stage._replace(**kinds))

        if config.listwise.learning_rate:
            add(
                "listwise fit",
                "fits",
                self._fit,
                self._cost_of_fit,
                lambda _: self.problem,
                is_usual=True,
            )
            if has_valid:
                add(
                    "linked candidates",
                    "offsets",
                    self._move_linked,
                    self._cost_of_metrics,
                    self._obstacle_of_linked,
                )
            if has_valid and options.max_questions is None:
                add(
                    "more questions",
                    "questions",
                    self._ask_more,
                    self._cost_of_more,
                    self._obstacle_of_more,
                )

        priors: tuple[tuple[Any, str, Any, Any], ...] = (
            (options.embedding, "link embeddings", self._embed, config.embedding),
            (options.bellman_ford, "path network", self._add_network, config.bellman_ford),
        )  # fmt: skip
        for option, name, train, cfg in priors:
            if option is not True and not (option == "auto" and has_valid):
                continue
            add(
                name,
                name,
                partial(train, name, cfg),
                partial(self._cost_of_prior, name, cfg),
                self._obstacle_of_priors,
                is_set=option is True,
            )
            if option == "auto" and isinstance(cfg, BellmanFordConfig):
                larger = f"larger {name}"
                cfg = replace(
                    cfg, n_layers=cfg.n_layers + 1, n_steps=16 * cfg.n_steps
                )
                add(
                    larger,
                    name,
                    partial(train, larger, cfg),
                    partial(self._cost_of_prior, larger, cfg),
                    self._obstacle_of_larger,
                )
        return stages

    # -- why a stage cannot begin

    def _needs_fit(self, best: Candidate[Fitted]) -> str:
        """Return why a stage that needs the fit to be kept cannot begin; empty if it can."""
        if self.problem:
            return self.problem
        return "" if best.value.is_fitted else "the fit is not kept"

    def _obstacle_of_priors(self, best: Candidate[Fitted]) -> str:
        """Return why no prior is trained, which costs most; empty if one is."""
        options = self.options.embedding, self.options.bellman_ford
        is_perfect = best.ranks is not None and best.mrr == 1.0
        return "nothing ranks valid better" * (
            is_perfect and True not in options
        )

    def _obstacle_of_larger(self, best: Candidate[Fitted]) -> str:
        """Return why no larger network is trained; empty if one is."""
        is_kept = best.value.setup.weighed.uses_bellman_ford
        # One that ranks derived entities no better may rank the others.
        is_left = NETWORK_ROW in self.knowing and not self.derives_all
        if is_kept or (is_left and self.options.no_proof == "auto"):
            return ""
        return "path network: not kept"

    def _obstacle_of_linked(self, best: Candidate[Fitted]) -> str:
        """Return why the weights of linked candidates are not moved; empty if they are."""
        if not self.options.links:
            return "links are not weighed"
        if best.ranks is None or len(best.ranks) < MIN_LINKED_RANKS:
            return (
                f"fewer than {MIN_LINKED_RANKS} ranks of valid tell too little"
            )
        return self._needs_fit(best)

    def _obstacle_of_more(self, best: Candidate[Fitted]) -> str:
        """Return why no more questions are asked; empty if they are."""
        is_all = self.n_asked >= self._n_askable()
        return "all are asked" * is_all or self._needs_fit(best)

    def _obstacle_without_proof(self, best: Candidate[Fitted]) -> str:
        """Return why entities that no rule derives are not ranked among the others; empty if they are."""
        if self.run.task.is_countries:
            return "the rules derive what is ranked"
        is_known = self._knowing(best)
        return "" if is_known else "the weights do not tell them apart"

    # -- what a stage costs: the least seconds, and those of all of it

    @property
    def _n_test(self) -> int:
        """Return how many questions the ranking of test asks."""
        ranked = self.run.ranked_test
        return 2 * ranked.n_queries if ranked else 0

    def _make_fit(
        self, setup: QuestionSetup, start: Fitted
    ) -> Training[FitState]:
        """Return a fit of what a setup weighs, from given weights; that of a path network is left out."""
        setup = fit.with_weights_of(setup, uses_bellman_ford=False)
        params = fit.widened(setup, start.params)
        seed = self.run.run_config.seed
        return fit.fit_training(setup, self._fit_config(start), seed, params)

    def _cost_of_fit(self, best: Candidate[Fitted]) -> tuple[float, float]:
        """Return the seconds of a fit, by the first steps of one."""
        if self.problem:
            return 0.0, 0.0
        start = best.value
        if self.begun_fit is None:
            training = self._make_fit(start.setup, start)
            self.begun_fit = start.setup, training
        world = start.setup.world
        assert world is not None, "the questions are listed"
        cfg = self._fit_config(start)
        n_steps = fit.count_fit_steps(cfg, len(world.question))
        seconds = n_steps * self.begun_fit[1].step_seconds
        least = MIN_TRAINING_SHARE * start.is_fitted * seconds
        return least, seconds + self.metric_seconds

    def _fit_config(self, start: Fitted) -> ListwiseConfig:
        """Return the settings of a fit; one that starts from fitted weights makes half of the passes."""
        cfg = self.run.run_config.listwise
        if not start.is_fitted:
            return cfg
        return replace(cfg, n_epochs=max(1, cfg.n_epochs // 2))

    def _cost_of_metrics(self, _: object) -> tuple[float, float]:
        """Return the seconds of ranking valid with a few amounts."""
        return 3 * self.metric_seconds, 3 * self.metric_seconds

    def _cost_without_proof(
        self, best: Candidate[Fitted]
    ) -> tuple[float, float]:
        """Return the seconds of ranking all entities for valid, once and with a few log-odds."""
        ways = self._knowing(best)
        if not ways:
            return 0.0, 0.0
        each = [
            self._reserve_without_proof(one, 0) + self.metric_seconds
            for one in ways.values()
        ]
        return each[0], sum(each) + 3 * max(each)

    def _reserve_without_proof(self, fitted: Fitted, n_ways: int) -> float:
        """Reserve the seconds of ranking all entities for test; return those of valid.

        Args:
          n_ways: of ranking valid that have time too.
        """
        valid = fitted.valid
        if valid is None or self.options.no_proof != "auto":
            return 0.0
        each = fit.seconds_of_all_entities(
            self.run.task, fitted.setup, fitted.params, valid
        )
        of_valid = each * valid.n_questions
        seconds = each * self._n_test + n_ways * of_valid
        self.run_time.reserve("answers without a proof", seconds, 0.5)
        return of_valid

    def _cost_of_more(self, best: Candidate[Fitted]) -> tuple[float, float]:
        """Return the seconds of listing and fitting half as many questions more, and all."""
        _, of_fit = self._cost_of_fit(best)
        n_all, listing = self._n_askable(), self.listing_seconds
        # What is listed stays; the fit is one of all.
        seconds = [
            listing * (n / self.n_asked - 1.0) + of_fit * n / self.n_asked
            for n in (min(1.5 * self.n_asked, n_all), n_all)
        ]
        return seconds[0], seconds[1]

    def _n_askable(self) -> int:
        """Return how many questions there are; where valid decides, more than `MAX_QUESTIONS` tell nothing new."""
        n_all = 2 * len(fit.training_facts(self.run.task))
        if self.run.valid_evidence is None:
            return n_all
        return min(n_all, MAX_QUESTIONS)

    def _cost_of_prior(
        self,
        name: str,
        cfg: EmbeddingConfig | BellmanFordConfig,
        best: Candidate[Fitted],
    ) -> tuple[float, float]:
        """Return the seconds of training a prior, by its first steps, and of what follows on it."""
        left = self.run_time.part().seconds_left
        if not is_cuda(self.run.run_config.device):
            n_least, of_step = MIN_TRAINING_SHARE * 1e3, 0.0
            if isinstance(cfg, BellmanFordConfig):
                of_step = budget.seconds_without_messages(self.run.task, cfg)
            is_slow = n_least * of_step > left
            if not is_slow:
                of_step = budget.slow_step_seconds(self.run.task, cfg)
                is_slow = of_step > 0.03 * left
            if is_slow:
                return n_least * of_step, 1e3 * of_step
        training = self._prior_training(name, cfg)
        after = self._seconds_after(name, cfg, best)
        seconds = training.seconds
        return MIN_TRAINING_SHARE * seconds + after, seconds + after

    def _prior_training(
        self, name: str, cfg: EmbeddingConfig | BellmanFordConfig
    ) -> Training[Any]:
        """Return the training of a prior, one for each stage."""
        if name not in self.trainings:
            make: Any = fit.network_training
            if isinstance(cfg, EmbeddingConfig):
                make = fit.embedding_training
            left_out = fit.left_out_of(self.options)
            seed = self.run.run_config.seed
            self.trainings[name] = make(self.run.task, cfg, left_out, seed)
        return self.trainings[name]

    def _seconds_after(
        self,
        name: str,
        cfg: EmbeddingConfig | BellmanFordConfig,
        best: Candidate[Fitted],
    ) -> float:
        """Return the seconds of the fit after link embeddings, or of the priors of valid and test by a network."""
        if isinstance(cfg, EmbeddingConfig):
            return self._cost_of_fit(best)[1] + 4 * self.metric_seconds
        if name not in self.prior_seconds:
            params = self._prior_training(name, cfg).state.params
            network = fit.make_network(self.run.task, params)
            self.prior_seconds[name] = fit.seconds_of_prior(network)
        valid = best.value.valid
        n_ranked = self._n_test + (valid.n_questions if valid else 0)
        if self.options.no_proof == "auto" and not self.derives_all:
            n_ranked *= 2  # all entities too
        return n_ranked * self.prior_seconds[name] + 4 * self.metric_seconds

    # -- questions and fits

    def _list(
        self, setup: QuestionSetup, deadline: Deadline, n_questions: int
    ) -> QuestionSetup:
        """Return the setup with the evidence of training questions, as many as there is time for.

        Args:
          n_questions: at most.
        """
        task, config, valid = (
            self.run.task,
            self.run.run_config,
            self.run.valid_evidence,
        )
        most = n_questions
        if math.isfinite(deadline.at) and valid is not None:
            # A chunk of them is not interrupted.
            each = self.run_time.phases["evidence of valid"]
            each /= max(valid.n_questions, 1)
            if self.n_asked:
                each = self.listing_seconds / self.n_asked
            more = max(64, int(deadline.seconds_left / max(each, 1e-6)))
            most = min(n_questions, self.n_asked + more)
        began = time.monotonic()
        try:
            setup, self.n_asked, note = fit.list_questions(
                task,
                setup,
                self.options,
                config.seed,
                self.run_time.on_phase,
                deadline,
                most,
            )
        except ValueError as error:
            self.problem = f"no question to learn from: {error}"
            self.run_time.notes.append(Note("answers", self.problem))
            return setup
        self.listing_seconds += time.monotonic() - began
        left_out = "without its own fact"
        if self.options.left_out == "pair":
            left_out = "without the facts that link its two entities: no known fact links a pair of the valid split"
        self.run_time.notes.append(note)
        self.run_time.note(f"each training question is asked {left_out}")
        return setup

    def _refit(
        self,
        best: Candidate[Fitted],
        deadline: Deadline,
        setup: QuestionSetup | None = None,
    ) -> Fitted:
        """Fit the weights of what a setup weighs, from the best ones; the weight of a path network stays."""
        start = best.value
        setup = setup or start.setup
        begun, training = self.begun_fit or (None, None)
        if training is None or begun is not setup or training.is_run:
            training = self._make_fit(setup, start)
        params = training.run(self.run_time.on_phase, deadline).params
        self._say_work(training)
        if setup.weighed.uses_bellman_ford:
            weight = start.params.network_prior_weight
            params = params._replace(network_prior_weight=weight)
        return start._replace(setup=setup, params=params)

    def _say_work(self, one: Training[Any]) -> None:
        """Say how many steps of a training were made."""
        made = f"{one.name}: {one.n_made:,} of {one.n_steps:,} steps"
        self.run_time.work = made

    def _train_prior(
        self,
        name: str,
        cfg: EmbeddingConfig | BellmanFordConfig,
        best: Candidate[Fitted],
        deadline: Deadline,
    ) -> Training[Any]:
        """Train a prior in the part of the time that what follows on it leaves; return its training."""
        training = self._prior_training(name, cfg)
        after = self._seconds_after(name, cfg, best)
        share = training.seconds / (training.seconds + after + 1e-9)
        training.run(self.run_time.on_phase, deadline.share(share))
        return training

    def _fit(
        self, best: Candidate[Fitted], deadline: Deadline
    ) -> Iterator[Candidate[Fitted]]:
        """Yield the fit of what is weighed so far, less of it first: a fit on few questions goes too far."""
        fitted = self._refit(best, deadline)
        start = fit.widened(fitted.setup, best.value.params)
        for share in (0.25, 0.5, 1.0) if fitted.valid else (1.0,):
            params = tree.map(
                partial(torch.lerp, weight=share), start, fitted.params
            )
            changed = fitted._replace(params=params)
            yield self._candidate(f"{share:.0%} of it", changed, best, "fit")

    def _ask_more(
        self, best: Candidate[Fitted], deadline: Deadline
    ) -> Iterator[Candidate[Fitted]]:
        """Yield the fit on more questions."""
        # The fit of those that are listed comes off the time first.
        of_fit = self._cost_of_fit(best)[1]
        left = max(deadline.seconds_left - of_fit, 0.0)
        share = self.listing_seconds / (self.listing_seconds + of_fit + 1e-9)
        setup = self._list(
            best.value.setup, deadline.at_most(share * left), self._n_askable()
        )
        fitted = self._refit(best, deadline, setup)
        yield self._candidate("on", fitted, best, "+ questions")

    def _move_linked(
        self, best: Candidate[Fitted], deadline: Deadline
    ) -> Iterator[Candidate[Fitted]]:
        """Yield the weights with an amount taken from the weight of being linked at all, of all labels alike.

        Each label has a weight of its own, which its few questions hardly move from 0; all labels together have a valid
        split to tell it by.
        """
        fitted = best.value
        weight = fitted.params.linked_weight
        for amount in (-1.0, -2.0, -4.0):
            params = fitted.params._replace(linked_weight=weight + amount)
            changed = fitted._replace(params=params)
            yield self._candidate(f"{amount:g}", changed, best, "+ linked")

    # -- priors

    def _embed(
        self,
        name: str,
        cfg: EmbeddingConfig,
        best: Candidate[Fitted],
        deadline: Deadline,
    ) -> Iterator[Candidate[Fitted]]:
        """Yield fits with link embeddings, an amount added to their weights.

        A fit gives link embeddings too little: those of a training question have not seen a part of the facts, and
        those of other questions have seen all.
        """
        if self.problem:
            return
        training = self._train_prior(name, cfg, best, deadline)
        embedding = training.state.params
        left_out = fit.left_out_of(self.options)
        setup = fit.with_embedding(best.value.setup, embedding, left_out)
        valid = best.value.valid
        if valid is not None:
            valid = valid.change(
                lambda part: evidence.with_embedding_scores(
                    part, embedding, "fact"
                )
            )

        fitted = self._refit(best, deadline, setup)._replace(valid=valid)
        self._say_work(training)
        weight = fitted.params.prior_weight
        for amount in (1.0, 0.5, 2.0, 0.0) if valid else (0.0,):
            params = fitted.params._replace(prior_weight=weight + amount)
            changed = fitted._replace(params=params)
            yield self._candidate(
                f"on, {amount:g} added", changed, best, "+ embeddings"
            )

    def _add_network(
        self,
        name: str,
        cfg: BellmanFordConfig,
        best: Candidate[Fitted],
        deadline: Deadline,
    ) -> Iterator[Candidate[Fitted]]:
        """Yield the weights with a path network, by one weight for all labels.

        Training questions cannot tell the weight: the network has learnt from their facts, and rules were elected and
        other weights fitted by them. A fit trusts the one or the others more than new questions do.
        """
        training = self._train_prior(name, cfg, best, deadline)
        self._say_work(training)
        if training.no_graph:
            self.run_time.note(f"{name}: no CUDA graph: {training.no_graph}")
        network = fit.make_network(self.run.task, training.state.params)
        setup = fit.with_network(best.value.setup, network)
        valid = best.value.valid
        if valid is not None:
            began = time.monotonic()
            valid = valid.change(
                lambda part: evidence.with_path_scores(part, network, "fact")
            )
            # Those of test take as long a query.
            of_both = (time.monotonic() - began) / max(len(valid.queries), 1)
            self.run_time.reserve("priors", of_both * self._n_test / 2)

        params = fit.widened(setup, best.value.params)
        fitted = best.value._replace(setup=setup, params=params, valid=valid)
        self._reserve_without_proof(fitted, 2)
        for weight in (1.0, 0.5, 2.0, 0.25) if valid else (0.5,):
            of_all = torch.full_like(params.linked_weight, weight)
            params = params._replace(network_prior_weight=of_all)
            yield self._candidate(
                f"on, weight {weight:g}",
                fitted._replace(params=params),
                best,
                NETWORK_ROW,
            )

    # -- the end

    def _knowing(self, best: Candidate[Fitted]) -> dict[str, Fitted]:
        """Return weights that tell entities apart that no rule derives: the best, and those by other priors."""
        ways = {"": best.value} if learned.knows_all(best.value.params) else {}
        known = best.value.setup.weighed
        for name, one in self.knowing.items():
            weighed = one.value.setup.weighed
            if (
                weighed.uses_embedding > known.uses_embedding
                or weighed.uses_bellman_ford > known.uses_bellman_ford
            ):
                ways[f"{name.removeprefix('+ ')}, "] = one.value
        return ways

    def _rank_without_proof(
        self, best: Candidate[Fitted], deadline: Deadline
    ) -> Iterator[Candidate[Fitted]]:
        """Yield the weights with entities that no rule derives below all others, then upwards while valid gains."""
        ways: list[tuple[Candidate[Fitted], str, Fitted]] = []
        for name, fitted in self._knowing(best).items():
            if not ways or self._has_time_for_all():
                one = self._rank_all(name, fitted, -20.0, best)
                ways.append((one, name, fitted))
        ways.sort(key=lambda way: way[0].mrr, reverse=True)
        yield from (one for one, _, _ in ways)
        leading, name, fitted = ways[0]
        for log_odds in (-14.0, -10.0, -7.0, -5.0, -3.5, -2.5):
            if deadline.is_over or not self._has_time_for_all():
                return
            one = self._rank_all(name, fitted, log_odds, best)
            yield one
            if one.mrr < leading.mrr:
                return
            leading = one

    def _has_time_for_all(self) -> bool:
        """Return whether all entities can be ranked for valid once more."""
        return self.run_time.part().seconds_left > self.seconds_of_all

    def _rank_all(
        self,
        name: str,
        fitted: Fitted,
        log_odds: float,
        best: Candidate[Fitted],
    ) -> Candidate[Fitted]:
        """Return weights that rank entities that no rule derives by some log-odds; reserve the seconds of test."""
        setup = fit.with_weights_of(fitted.setup, no_proof=log_odds)
        fitted, label = fitted._replace(setup=setup), f"{name}{log_odds:g}"
        began = time.monotonic()
        found = self._candidate(label, fitted, best, NO_PROOF_ROW)
        took = time.monotonic() - began
        self.seconds_of_all = max(self.seconds_of_all, took)
        # Test takes as long a question; what is planned is too little where the first questions are easy.
        n_valid = fitted.valid.n_questions if fitted.valid else 0
        of_test = self.seconds_of_all * self._n_test / max(n_valid, 1)
        self.run_time.reserve("answers without a proof", of_test, 1.0)
        return found

    def _candidate(
        self,
        label: str,
        fitted: Fitted,
        best: Candidate[Fitted] | None = None,
        row: str = "",
    ) -> Candidate[Fitted]:
        """Return weights with their ranks of valid.

        Args:
          best: the way before; its steps come before this one.
          row: the name of the step.
        """
        setup, params, valid, _ = fitted
        ranks = None
        if valid is not None:
            ranked = valid.rank_by_weights(setup, params)
            ranks = fit.reciprocal_ranks(ranked)
            self.derives_all = bool(ranked.answer_provable.all())
        if best is not None:
            # A larger prior takes the place of the other.
            before = [step for step in best.value.steps if step[0] != row]
            fitted = fitted._replace(steps=(*before, (row, params)))
        found = Candidate(label, fitted, ranks)
        if learned.knows_all(params) and setup.weighed.no_proof is None:
            known = self.knowing.get(row)
            if known is None or found.mrr > known.mrr:
                self.knowing[row] = found
        return found

    def _finish(self, best: Candidate[Fitted], is_better: bool) -> Run:
        """Return the run with the best weights."""
        setup, _, valid, steps = best.value
        setup = replace(setup, world=None)
        weighed, config = setup.weighed, self.run.run_config
        options = replace(
            self.options,
            embedding=weighed.uses_embedding,
            bellman_ford=weighed.uses_bellman_ford,
            no_proof=weighed.no_proof,
        )
        config = replace(config, questions=options)
        if setup.facts.network is not None:
            n_layers = len(setup.facts.network.params.weight)
            cfg = replace(config.bellman_ford, n_layers=n_layers)
            config = replace(config, bellman_ford=cfg)

        params = [one for _, one in steps]
        state = fitted_state(self.run.task, setup, config, params)
        metric = -1.0
        if valid is not None:
            ranked = valid.rank_by_weights(setup, state.best_params)
            metric = held_out.metric_of(self.run, ranked)
        state = state._replace(
            best_valid_metric=torch.full_like(state.best_valid_metric, metric)
        )
        return replace(
            self.run,
            run_config=config,
            questions=setup,
            valid_evidence=valid,
            state=state,
            step_names=tuple(name for name, _ in steps),
            is_learnt_better=is_better,
        )
