"""Choices that valid makes in a new run: one loop over stages, each of which may replace a simpler way by a better one.

`choose` runs the stages and writes a row for each; `start_run` has all of a run in their order: the settings by which
rule confidences rank valid best (`choose_settings`), the height by the untrained policy, and for a run that learns from
questions what its score weighs beside the rules (`_QuestionStages`). Every stage says by which `Accept` it is judged.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from funcppo.core.host import NO_DEADLINE, Deadline, map_in_threads
from funcppo.kg.config import (
    EMBEDDING_SECONDS,
    N_NETWORK_STEPS,
    NETWORK_SECONDS,
    ListwiseConfig,
    Note,
    ProverTaskConfig,
    RunConfig,
    batch_size,
)
from funcppo.kg.graph.dataset import Dataset
from funcppo.kg.logic import (
    derive,
    fixpoint,
    joins,
    resolve,
)
from funcppo.kg.logic import kb as kbase
from funcppo.kg.logic.derive import RulePlan, plan_rules
from funcppo.kg.logic.fixpoint import (
    Derivations,
    RuleCounts,
    count_rules,
    with_confidence,
)
from funcppo.kg.logic.joins import RowBudget, RowBudgetExceeded
from funcppo.kg.logic.kb import HEAD, TAIL, KnowledgeBase
from funcppo.kg.mining import MAX_TINY_FACTS, ROWS_PER_SECOND, MiningConfig
from funcppo.kg.ranking import rank_metrics, ranking
from funcppo.kg.ranking.ranking import (
    ListedQueries,
    RankingProtocol,
    check_queries,
)
from funcppo.kg.run import budget, fit, held_out, rule_files
from funcppo.kg.run.budget import Choice, RunTime
from funcppo.kg.run.fit import Quality, QuestionSetup, ValidEvidence
from funcppo.kg.run.run import (
    DEFAULT_STEPS,
    MAX_VALIDATION_SUCCESSORS,
    MIN_VALIDATION_QUERIES,
    PROOF_SCORES,
    Run,
    at_start,
    build_run,
    count_search_successors,
    has_few_valid,
    ppo_config,
    with_valid_evidence,
)
from funcppo.kg.scores import evidence, learned, path_network
from funcppo.kg.scores.learned import QuestionParams
from funcppo.kg.scores.score import (
    OTHER_FACTS,
    Candidates,
    names_to_try,
    parse,
)
from funcppo.kg.search.beam import SchedulerState, SearchConfig
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
# A greater height is tried only if its searches for all of valid, by every score, compute at most this many successors,
# empty places of the tables included; and if there are more test queries, if these do. A successor takes 15 to 40
# microseconds on one CPU thread, and a run ranks valid some 15 times.
MAX_TRIAL_SUCCESSORS = 400_000


# -- the loop


class Candidate(NamedTuple, Generic[T]):
    """Way that a stage may take, with how well it ranks valid."""

    label: str
    value: T
    quality: Quality | None  # on valid; None without valid


class Accept(NamedTuple):
    """Gain on valid by which the best of the later ways replaces the first way."""

    min_gain: float | None = 0.0  # more than this in the metric; None: any
    n_errors: float = 0.0  # more than so many standard errors, queries paired
    # Of all that are worse than the best by no more than `min_gain`, the first one is taken.
    takes_simplest: bool = False

    def pick(self, tried: Sequence[Candidate[T]]) -> Candidate[T]:
        """Return the way to take by its quality on valid; the last way if a quality is unknown."""
        qualities = [one.quality for one in tried]
        if None in qualities or len(tried) == 1:
            return tried[-1]
        metrics = [quality.metric for quality in qualities if quality]
        best = max(range(1, len(tried)), key=metrics.__getitem__)
        if self.takes_simplest:
            bound = max(metrics) - (self.min_gain or 0.0)
            return next(
                one for one, m in zip(tried, metrics, strict=True) if m >= bound
            )
        if self.min_gain is not None:
            best *= metrics[best] > metrics[0] + self.min_gain
        if self.n_errors and best:
            gain, error = paired_gain(tried[best], tried[0]) or (0.0, 0.0)
            best *= gain > self.n_errors * error
        return tried[best]


LARGEST = Accept()
ABOVE_MIN_GAIN = Accept(min_gain=0.0005)
SIMPLEST_OF_BEST = Accept(min_gain=0.0005, takes_simplest=True)
# The best of some sixteen epochs gains a standard error or more by chance alone.
BEYOND_CHANCE = Accept(min_gain=None, n_errors=2.0)
BEST_BEYOND_CHANCE = Accept(n_errors=2.0)
ALWAYS = Accept(min_gain=-math.inf)


class Stage(NamedTuple, Generic[T]):
    """Stage of a choice: alternatives to a simpler way of a run, and the gain on valid by which one is accepted."""

    name: str
    simpler: str  # the label of the way so far
    candidates: Callable[[Candidate[T]], Iterable[Candidate[T]]]
    accept: Accept
    is_set: bool = False  # its time does not count


def choose(
    stages: Iterable[Stage[T]],
    best: Candidate[T],
    run_time: RunTime,
    *,
    stops_at_loss: bool = False,
) -> Candidate[T]:
    """Run stages one after the other, each from the best way so far; return the best way.

    Args:
      run_time: gets the time of each stage and a row for what valid decided.
      stops_at_loss: a stage is not begun after one whose simpler way was kept.
    """
    for stage in stages:
        began = run_time.phase_start
        tried = [best._replace(label=stage.simpler), *stage.candidates(best)]
        best = stage.accept.pick(tried)
        run_time.end_phase(stage.name, is_set=stage.is_set)
        if len(tried) > 1 and None not in (one.quality for one in tried):
            seconds = run_time.phase_start - began
            run_time.choices.append(_make_row(stage, tried, best, seconds))
        if stops_at_loss and best is tried[0]:
            break
    return best


def _make_row(
    stage: Stage[T],
    tried: Sequence[Candidate[T]],
    chosen: Candidate[T],
    seconds: float,
) -> Choice:
    """Build the row of the table of choices for a stage."""
    metrics = {one.label: one.quality.metric for one in tried if one.quality}
    shown = chosen
    if chosen is tried[0]:
        shown = max(tried[1:], key=lambda one: metrics[one.label])
    paired = paired_gain(shown, tried[0])
    return Choice(
        stage=stage.name,
        chosen=chosen.label,
        is_kept=chosen is not tried[0],
        seconds=seconds,
        valid_before=metrics[tried[0].label],
        valid_after=metrics[chosen.label],
        standard_error=paired and paired[1],
        tried=metrics,
    )


def paired_gain(
    one: Candidate[T], other: Candidate[T]
) -> tuple[float, float] | None:
    """Return the mean gain of `one` over `other` in reciprocal rank and its standard error; None for unknown ranks."""
    ranks = [
        candidate.quality and candidate.quality.reciprocal_rank
        for candidate in (one, other)
    ]
    if ranks[0] is None or ranks[1] is None or len(ranks[0]) != len(ranks[1]):
        return None
    gain = ranks[0] - ranks[1]
    return float(gain.mean()), float(gain.std() / len(gain) ** 0.5)


def describe_choice(choice: Choice) -> str:
    """Format a row of the table of choices as one line."""
    others = {
        label: metric
        for label, metric in choice.tried.items()
        if label != choice.chosen
    }
    line = f"{choice.stage}: {choice.chosen} chosen: valid {choice.valid_after:.4f}"
    if others:
        best = max(others, key=others.__getitem__)
        line += f"; {best} {others[best]:.4f}"
    if len(others) > 1:
        line += f" and {len(others) - 1} more"
    return line


# -- settings by rule confidences


class Trial(NamedTuple):
    """Combination of settings with its MRR on the sampled valid queries."""

    height: int
    object_identity: bool
    smoothing: float | None
    score: str
    mrr: float = math.nan  # on the sampled queries, ties in random order
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

    best: Trial
    # the best of each height that was tried, ascending
    by_height: tuple[Trial, ...]
    trials: tuple[Trial, ...]  # what was compared
    # of the rules without object identity, as `Dataset.rule_counts` holds them; None if none were counted
    rule_counts: np.ndarray | None = None
    # what the rules fire from, on the host; None where height 1 was not tried
    plan: RulePlan | None = None


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
    is_open = any(len(of) > 1 for of in values)
    grid, trials = None, []
    if is_open and len(dataset.valid):
        grid = _Grid(dataset, cfg, run_time, deadline)
        trials = grid.try_heights(*values)
    if not trials:
        heights, identities, smoothings, scores = values
        middle = smoothings[len(smoothings) // 2]
        trials = [Trial(heights[0], identities[0], middle, scores[-1])]
    tried = [
        Candidate(trial.label, trial, Quality(trial.mrr)) for trial in trials
    ]
    stage = Stage(
        "settings of rules",
        tried[0].label,
        lambda _: tried[1:],
        SIMPLEST_OF_BEST,
    )
    best = choose([stage], tried[0], run_time).value
    if is_open and math.isnan(best.mrr):
        reason = "nothing to choose by" if grid else "no valid split"
        run_time.note(f"{reason}: {best.label}")
    of_height = (
        [one for one in tried if one.value.height == height]
        for height in dict.fromkeys(trial.height for trial in trials)
    )
    return Settings(
        best,
        tuple(SIMPLEST_OF_BEST.pick(of).value for of in of_height),
        tuple(trial for trial in trials if not math.isnan(trial.mrr)),
        grid.rule_counts if grid else dataset.rule_counts,
        grid.plan if grid else None,
    )


def _open_values(
    cfg: ProverTaskConfig, score: str | None
) -> tuple[
    Sequence[int], Sequence[bool], Sequence[float | None], Sequence[str]
]:
    """Return the values to try of each setting: the one that is set, else all, the simplest first."""
    identity = cfg.object_identity
    if identity == "auto" and cfg.fact_selection == "policy":
        identity = False  # only the oracle knows which facts keep it
    return (
        (1, 2, 3) if cfg.max_height is None else (cfg.max_height,),
        (False, True) if identity == "auto" else (identity,),
        (None, 5.0, 20.0) if cfg.smoothing == "auto" else (cfg.smoothing,),
        names_to_try() if score is None else (score,),
    )


def check_rankable(dataset: Dataset, split: np.ndarray) -> None:
    """Raise ValueError unless all queries of a split are binary and ground, and the pool holds their answers."""
    pool, is_countries = entity_pool(dataset)
    for side in (TAIL,) if is_countries else (HEAD, TAIL):
        check_queries(torch.from_numpy(split), side, pool, dataset.n_constants)


def _rank_held(
    held: _HeldCandidates, listed: ListedQueries, name: str
) -> tuple[float, int]:
    """Rank the listed queries by a score; return the MRR, ties in random order, and the number of scored atoms."""
    # What the rules say chooses the settings of a score with other facts too.
    score = parse(name.removesuffix(OTHER_FACTS))
    ranked = ranking.rank_listed(listed, lambda *_: score.log_odds(held))
    ranks = rank_metrics.expected_reciprocal_ranks(ranked.counts)
    return float(ranks.mean()), len(ranked.scored_atom)


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
        # by whether it is with object identity; counts that miss are added
        self.counts_of: dict[bool, RuleCounts] = {}
        if cfg.object_identity is not True:
            dataset, notes = with_rule_counts(dataset, run_time.on_phase)
            counts = as_counts(dataset.rule_counts)
            assert counts is not None, "they are counted"
            self.counts_of[False] = RuleCounts(*counts.unbind(1))
            run_time.notes += [Note("cut", note) for note in notes]
        self.rule_counts = dataset.rule_counts
        self.kb, self.sizes = kbase.from_dataset(dataset)
        self.rules = dataset.rules
        self.run_time = run_time
        self.deadline = deadline
        self.max_atoms = cfg.max_atoms
        self.plan = None
        if cfg.max_height in (None, 1):
            self.plan = plan_rules(self.kb, self.sizes, cfg.memory_share)

        rows = np.sort(ranking.random_rows(len(dataset.valid), 1000))
        self.queries = torch.from_numpy(dataset.valid[rows]).long()
        self.pool, is_countries = entity_pool(dataset)
        sides = (TAIL,) if is_countries else (HEAD, TAIL)
        self.protocol = RankingProtocol(sides=sides)
        answering = derive.answering_facts(
            self.kb, self.sizes, self.queries, sides
        )
        held_out = torch.from_numpy(held_out_triples(dataset))
        self.known_triples = torch.cat([answering, held_out])

    def try_heights(
        self,
        heights: Sequence[int],
        identities: Sequence[bool],
        smoothings: Sequence[float | None],
        scores: Sequence[str],
    ) -> list[Trial]:
        """Try ascending heights until a height ranks worse or takes too long, which is noted; return the trials."""
        kinds = list(product(smoothings, scores))
        trials: list[Trial] = []
        best_below = -1.0
        for height in heights:
            is_alone = len(heights) > 1 and height > 1 and len(identities) > 1
            found: list[Trial] = []
            for object_identity in (False,) if is_alone else identities:
                tried = f"height {height}"
                tried += " with object identity" * object_identity
                try:
                    found += self._try(
                        height,
                        object_identity,
                        kinds,
                        tried,
                        is_later=bool(trials or found),
                    )
                except RowBudgetExceeded as error:
                    note = f"{tried} not tried: {error}"
                    if object_identity:
                        self.run_time.note_cut(note)
                        continue
                    # Object identity projects less away, and a greater height joins more facts.
                    self.run_time.note_cut(
                        f"{note}; what takes longer is not tried either"
                    )
                    return [*trials, *found]
            trials += found
            best = max((trial.mrr for trial in found), default=-1.0)
            if best < best_below:
                break
            best_below = best
        return trials

    def _try(
        self,
        height: int,
        object_identity: bool,
        kinds: Sequence[tuple[float | None, str]],
        tried: str,
        *,
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

        def rank(kind: tuple[float | None, str]) -> tuple[float, int]:
            if deadline.is_over:
                raise RowBudgetExceeded("more time than was left")
            kb = with_confidence(self.kb, counts, kind[0])
            held = _HeldCandidates(kb, listed, derivations)
            return _rank_held(held, listed, kind[1])

        show("ranking", 0, len(kinds))
        trials: list[Trial] = []
        for (mrr, n), kind in zip(map_in_threads(rank, kinds), kinds):
            per_query = n / len(self.queries)
            trials.append(Trial(height, object_identity, *kind, mrr, per_query))
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
        sizes, kb = self.sizes, self.kb
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
            kb, _ = kbase.build(
                below.atoms.numpy(),
                self.rules,
                n_constants=sizes.n_constants,
                n_predicates=sizes.n_predicates,
            )
        most = MAX_DERIVATIONS_PER_ATOM * self.max_atoms
        part = derive.answered_step(
            kb,
            sizes,
            self.queries,
            self.protocol.sides,
            most,
            object_identity,
            rows,
            self.plan if height == 1 else None,
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
            index, sizes, atoms.to(torch.int32), joins.MAX_CHUNK_ROWS
        )
        return listed, list(derivations)


# -- mining settings of a tiny graph


def mining_configs(dataset: Dataset, seconds: float) -> dict[str, MiningConfig]:
    """Return the mining settings to try, by name: the data set's defaults, and for a tiny graph the usual settings too.

    Rules with constants do not always rank a tiny graph better; both are cheap there, and both are
    tried.

    Args:
      dataset: without valid triples only its defaults are tried.
      seconds: time limit of mining; the usual settings beside others have half of it.
    """
    defaults = rule_files.mining_config(dataset, seconds=seconds)
    usual = MiningConfig(seconds=seconds)
    is_tiny = len(dataset.facts) <= MAX_TINY_FACTS
    if defaults == usual or not is_tiny or not len(dataset.valid):
        return {"default": defaults}
    # The usual settings sample what takes more rows.
    usual = replace(usual, max_rows=20 * ROWS_PER_SECOND, seconds=seconds / 2)
    return {"with constants": defaults, "without constants": usual}


def choose_rules(
    datasets: Mapping[str, Dataset],
    prover: ProverTaskConfig,
    run_time: RunTime,
    deadline: Deadline = NO_DEADLINE,
) -> str:
    """Return the name of the rules whose best rule score has the highest MRR on valid; the first without a gain.

    Args:
      datasets: the data set with the rules of each mining settings, by their name.
      prover: settings of the prover; a height that is open is 1.
      deadline: when the comparison ends; what is not ranked by then is not chosen.
    """
    names = list(datasets)
    if len(names) == 1:
        return names[0]

    prover = replace(prover, max_height=prover.max_height or 1)
    tried: list[Candidate[str]] = []
    for i, (name, dataset) in enumerate(datasets.items()):
        part = deadline.share(1 / (len(names) - i))
        quiet = RunTime(on_phase=run_time.on_phase)
        settings = choose_settings(dataset, prover, None, quiet, part)
        if not settings.trials:
            run_time.note(
                f"mining defaults of {names[0]} taken, not compared on valid: {name}: {quiet.notes[0]}"
            )
            return names[0]
        quality = Quality(max(trial.mrr for trial in settings.trials))
        tried.append(Candidate(name, name, quality))
    first, *others = tried
    stage = Stage("mined rules", first.label, lambda _: others, ABOVE_MIN_GAIN)
    return choose([stage], first, run_time).value


# -- a new run


class _SearchTooLong(Exception):
    """Raised where a search computes more successors than it may, or has no time left."""


def start_run(
    run_config: RunConfig,
    dataset: Dataset,
    run_time: RunTime | None = None,
    memory_limit: int | None = None,
) -> Run:
    """Start a run with the settings and the score by which the untrained policy ranks valid best; return the run.

    Rule confidences choose smoothing and object identity. Of the heights that they rank, the policy chooses: a greater
    one must rank better, and none is tried after one that does not. At height 1 a run learns from questions, above it
    from proofs, unless the learner is set.

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
        run_config, len(dataset.facts), memory_limit
    )
    run_time.notes += notes
    for name in ("valid", "test"):
        try:
            check_rankable(dataset, getattr(dataset, name))
        except ValueError as error:
            raise ValueError(f"{dataset.name}: {name}: {error}") from None

    prover, score = run_config.prover, run_config.rule_score
    if run_config.learner == "questions" or prover.object_identity is True:
        prover = replace(prover, max_height=prover.max_height or 1)
    settings = choose_settings(
        dataset,
        prover,
        None if score == "auto" else score,
        run_time,
        run_time.until(RunTime.CHOICE),
    )
    if settings.rule_counts is not None:
        dataset = replace(dataset, rule_counts=settings.rule_counts)
    run_config = replace(run_config, rule_score=settings.best.score)
    run = _choose_height(run_config, dataset, settings, run_time)
    if run.questions is not None:
        run = _start_from_questions(run, run_config.learner == "auto", run_time)
    if run.questions is None and not run_time.until(RunTime.FIT).is_over:
        run_time.on_phase("ranking valid by rule confidences")
        run = replace(run, rule_metric=held_out.rule_metric(run))
    steps = run.run_config.steps or DEFAULT_STEPS
    return replace(
        run,
        run_config=replace(run.run_config, steps=steps),
        notes=tuple(dict.fromkeys((*run_time.notes, *run.notes))),
        choices=tuple(run_time.choices),
    )


def _choose_height(
    run_config: RunConfig,
    dataset: Dataset,
    settings: Settings,
    run_time: RunTime,
) -> Run:
    """Build the run with the height at which the untrained policy ranks valid best."""

    def config_of(trial: Trial) -> RunConfig:
        learner = run_config.learner
        if learner == "auto":
            learner = "questions" if trial.height == 1 else "proofs"
        prover = trial.apply(run_config.prover)
        return replace(run_config, prover=prover, learner=learner)

    def try_height(
        trial: Trial, below: Candidate[Run]
    ) -> Iterator[Candidate[Run]]:
        try:
            _check_search(below.value, trial)
            run = build_run(config_of(trial), dataset, run_time.on_phase)
            scored = _bounded_score(run, run_time)
        except _SearchTooLong as error:
            run_time.note_cut(
                f"policy: height {trial.height} not tried: {error}"
            )
            return
        # Its ranks are not in the order of those of the height below.
        quality = scored.quality and Quality(scored.quality.metric)
        yield Candidate(f"height {trial.height}", scored.value, quality)

    first, *greater = settings.by_height
    run = build_run(
        config_of(first),
        dataset,
        run_time.on_phase,
        run_time.until(RunTime.VALID),
        settings.plan,
    )
    run_time.end_phase("what the rules derive")
    best = _score_untrained(run, run_time)
    run_time.end_phase("evidence of valid")
    stages = [
        Stage(
            "height of the policy",
            f"height {below.height}",
            partial(try_height, trial),
            ABOVE_MIN_GAIN,
        )
        for below, trial in zip(settings.by_height, greater)
    ]
    return choose(stages, best, run_time, stops_at_loss=True).value


def _check_search(below: Run, trial: Trial) -> None:
    """Check by a rough count that the smallest validation by search at a height is within its bound.

    Args:
      below: the run at the height below.

    Raises:
      _SearchTooLong: it is not.
    """
    task, height = below.task, trial.height
    n_queries = min(MIN_VALIDATION_QUERIES, len(task.dataset.valid))
    shape = resolve.make_resolve_config(task.kb, task.sizes, height)
    n_successors = count_search_successors(shape.max_successors, height)
    n_atoms = trial.atoms_per_query * n_queries
    if n_atoms * n_successors > MAX_VALIDATION_SUCCESSORS:
        raise _SearchTooLong(
            f"a search for {n_queries} valid queries would compute over {MAX_VALIDATION_SUCCESSORS:,} successors, by a "
            "rough count"
        )


def _bounded_score(run: Run, run_time: RunTime) -> Candidate[Run]:
    """Choose the score of the untrained run, if ranking valid by search stays within its bound.

    Raises:
      _SearchTooLong: it is not.
    """
    n_valid, n_test = run.n_validation_queries, len(run.task.dataset.test)
    limit = MAX_TRIAL_SUCCESSORS * n_valid // max(n_valid, n_test)
    deadline = run_time.until(RunTime.VALID)
    n_successors = 0

    def bounded_step(cfg: SearchConfig, *inputs: Any) -> SchedulerState:
        nonlocal n_successors
        n_successors += cfg.rows_per_step * cfg.resolve.max_successors
        if n_successors > limit:
            raise _SearchTooLong(
                f"a search for {n_valid} valid queries computes over {limit:,} successors"
            )
        if deadline.is_over:
            raise _SearchTooLong("there was no time left")
        return run.search_step(cfg, *inputs)

    scored = _score_untrained(replace(run, search_step=bounded_step), run_time)
    scored_run = replace(scored.value, search_step=run.search_step)
    return scored._replace(value=scored_run)


def _score_untrained(run: Run, run_time: RunTime) -> Candidate[Run]:
    """Return the run with the score that is set, or with the score that ranks valid best before training."""
    if run.questions is not None:
        return _choose_odds_power(run, run_time)
    set_score = run.run_config.score
    names = PROOF_SCORES if set_score == "auto" else (set_score,)
    runs = [replace(run, score=name) for name in names]
    if not run.n_validation_queries:
        if set_score == "auto":
            run_time.note(
                "score of proofs: best-proof: there are no valid triples to choose by"
            )
            runs = [run]
        return Candidate(runs[0].score, runs[0], None)

    first, *others = (
        _rank_untrained(one.score, one, one.state.start_params, run_time)
        for one in runs
    )
    stage = Stage("score of proofs", first.label, lambda _: others, LARGEST)
    return choose([stage], first, run_time)


def _rank_untrained(
    label: str, run: Run, params: QuestionParams, run_time: RunTime
) -> Candidate[Run]:
    """Rank valid by a run before its first update; return it with its MRR."""
    show = partial(
        run_time.on_phase, f"ranking valid by {run.score}, untrained"
    )
    ranked = held_out.rank_valid(run, params, show)
    mrr = fit.summarise(run.task, ranked)["mrr"]
    ranks = rank_metrics.expected_reciprocal_ranks(ranked.counts)
    return Candidate(label, run, Quality(mrr, ranks))


def _choose_odds_power(run: Run, run_time: RunTime) -> Candidate[Run]:
    """Choose the power of the odds by which untrained weights rank valid best, for a run that learns from questions."""
    deadline = run_time.until(RunTime.VALID)
    run_time.on_phase("listing evidence of valid queries")
    run = with_valid_evidence(run, deadline.seconds_left)
    if run.valid_evidence is None:
        return Candidate("without valid", run, None)
    run = replace(run, rule_metric=held_out.rule_metric(run))

    def of_power(power: float) -> Candidate[Run]:
        config, setup = run.run_config, run.questions
        assert setup is not None, "the run learns from questions"
        options = replace(config.questions, odds_power=power)
        changed = replace(
            run,
            questions=fit.with_weights_of(setup, odds_power=power),
            run_config=replace(config, questions=options),
        )
        assert changed.questions is not None
        params = fit.untrained_params(changed.questions)
        return _rank_untrained(f"{power:g}", changed, params, run_time)

    power = run.run_config.questions.odds_power
    powers = (1.0, 2.0, 3.0) if power == "auto" else (power,)
    stage = Stage(
        "power of the odds",
        f"{powers[0]:g}",
        lambda _: (of_power(p) for p in powers[1:] if not deadline.is_over),
        LARGEST,
    )
    return choose([stage], of_power(powers[0]), run_time)


# -- a run that learns from questions


class Fitted(NamedTuple):
    """Weights of evidence with the evidence of valid that judges them."""

    setup: QuestionSetup
    params: QuestionParams
    valid: ValidEvidence | None  # None where there is no valid split
    n_epochs: int = 0  # that there was time for


def _start_from_questions(
    run: Run, may_learn_from_proofs: bool, run_time: RunTime
) -> Run:
    """Return the run with its questions listed and the weights that PPO starts from.

    Args:
      may_learn_from_proofs: where there is no question to learn from, the run learns from proofs.

    Raises:
      ValueError: there is no question to learn from.
    """
    setup, config, task = run.questions, run.run_config, run.task
    assert setup is not None, "the run learns from questions"
    options = fit.resolve_left_out(task, config.questions)
    try:
        setup, n_questions, note = fit.list_questions(
            task,
            setup,
            options,
            config.seed,
            run_time.on_phase,
            run_time.until(RunTime.QUESTIONS),
        )
    except ValueError as error:
        if not may_learn_from_proofs:
            message = f"{task.dataset.name}: learner: {error}"
            raise ValueError(message) from None
        text = f"learner proofs: no question to learn from: {error}"
        run_time.notes.append(Note("answers", text))
        config = replace(config, learner="proofs")
        run = build_run(config, task.dataset, run_time.on_phase)
        return _score_untrained(run, run_time).value

    is_set = options.max_questions is not None
    run_time.end_phase("questions", is_set=is_set)
    left_out = "without its own fact"
    if options.left_out == "pair":
        left_out = "without the facts that link its two entities: no pair of the valid split is linked by a known fact"
    run_time.notes.append(note)
    run_time.note(f"each training question is asked {left_out}")

    options = replace(options, max_questions=n_questions)
    run = replace(run, run_config=replace(config, questions=options))
    stages = _QuestionStages(run, run_time)
    fitted = stages.choose(fit.with_weights_of(setup, uses_bellman_ford=False))
    return _plan_ppo(stages, fitted)


def _plan_ppo(stages: _QuestionStages, fitted: Fitted) -> Run:
    """Return the run before its first update, with as many PPO updates as the time allows."""
    run, run_time = stages.run, stages.run_time
    config, policy = run.run_config, fitted.setup.policy
    weighed = policy.aggregation
    options = replace(
        config.questions,
        degrees=weighed.uses_degrees,
        embedding=weighed.uses_embedding,
        bellman_ford=weighed.uses_bellman_ford,
        no_proof=weighed.no_proof,
    )
    ppo = budget.split_minibatches(
        config.ppo, policy.capacity, config.listwise.max_batch_firings
    )
    if ppo != config.ppo:
        run_time.note(
            f"PPO: a minibatch is computed in {ppo.n_microbatches} parts: at once it would not fit"
        )
    config = replace(config, questions=options, ppo=ppo)

    if config.steps is None:
        seconds = run_time.until(RunTime.PPO).seconds_left
        seconds -= config.n_validations * stages.metric_seconds
        most = ppo_config(config)
        n_updates = budget.n_updates_within(
            most, policy, config.device, max(seconds, 0.0)
        )
        if n_updates < most.n_updates:
            steps = n_updates * ppo.n_envs * ppo.n_steps
            config = replace(config, steps=steps)
            run_time.note_cut(
                f"PPO makes {n_updates} of {most.n_updates} updates: more would weigh too many firings or take over "
                f"{max(seconds, 0.0):.0f} s (--steps sets them)"
            )
    if has_few_valid(run.task):
        text = (
            f"{len(run.task.dataset.valid):,} valid triples tell small differences by chance alone: the last update of "
            "PPO is kept unless it ranks them worse than its start by more than 2 standard errors, and rules rank "
            "answers only if they rank them better by as much"
        )
        run_time.notes.append(Note("data", text))
    run = replace(run, run_config=config, valid_evidence=fitted.valid)
    return at_start(run, fitted.setup, fitted.params)


class _QuestionStages:
    """Stages that decide what a run that learns from questions weighs beside the confidences of its rules.

    Attributes:
      options: which evidence is weighed, where it is set.
      listwise: settings of a fit.
      metric_seconds: what the last validation took.
    """

    def __init__(self, run: Run, run_time: RunTime) -> None:
        """Set the run, with its settings and the evidence of valid."""
        self.run, self.run_time = run, run_time
        self.options = run.run_config.questions
        self.listwise = run.run_config.listwise
        self.metric_seconds = 0.0

    def choose(self, setup: QuestionSetup) -> Fitted:
        """Choose the weights that PPO starts from, for questions that are listed."""
        options, valid = self.options, self.run.valid_evidence
        if options.embedding is True:
            setup, valid = self._embed(setup, valid) or (setup, valid)
        best = self._fit_rules(setup, valid)
        stages = self._added_weights()

        if options.embedding == "auto":
            stages.append(
                Stage("link embeddings", "off", self._embeddings, BEYOND_CHANCE)
            )
        if options.bellman_ford:
            is_set = options.bellman_ford is True
            stages.append(
                Stage(
                    "Bellman-Ford network",
                    "off",
                    self._network,
                    ALWAYS if is_set else BEYOND_CHANCE,
                    is_set,
                )
            )
        if options.no_proof == "auto" and not self.run.task.is_countries:
            name = "answers without a proof"
            stage = Stage(name, "last", self._without_proof, BEYOND_CHANCE)
            stages.append(stage)
        fitted = choose(stages, best, self.run_time).value
        network = fitted.setup.facts.network
        if network is None:
            return fitted
        setup = fit.with_network(
            fitted.setup,
            network,
            fit.left_out_of(options),
            self.run.run_config.seed,
            self.run_time.on_phase,
        )
        is_set = options.bellman_ford is True
        self.run_time.end_phase("Bellman-Ford network", is_set=is_set)
        return fitted._replace(setup=setup)

    def _candidate(
        self,
        label: str,
        setup: QuestionSetup,
        params: QuestionParams,
        valid: ValidEvidence | None,
        n_epochs: int = 0,
    ) -> Candidate[Fitted]:
        """Return weights with how well they rank valid, and time the ranking."""
        began = time.monotonic()
        quality = valid and valid.quality(setup, params)
        self.metric_seconds = time.monotonic() - began
        return Candidate(label, Fitted(setup, params, valid, n_epochs), quality)

    def _fit_rules(
        self, setup: QuestionSetup, valid: ValidEvidence | None
    ) -> Candidate[Fitted]:
        """Fit the weights, with degrees where these are set or where valid says so."""
        degrees = (False, True)
        if self.options.degrees != "auto":
            degrees = (self.options.degrees,)
        return self._fit(setup, valid, degrees)

    def _fit(
        self,
        setup: QuestionSetup,
        valid: ValidEvidence | None,
        degrees: Sequence[bool],
    ) -> Candidate[Fitted]:
        """Return the fit that ranks valid best within the time; the untrained weights if its gain may be chance.

        Args:
          degrees: whether to weigh degrees, each value to try.
        """
        cfg, run_time = self.listwise, self.run_time
        setup = fit.with_weights_of(setup, uses_degrees=degrees[0])
        start = self._candidate(
            "untrained", setup, fit.untrained_params(setup), valid
        )
        is_embedded = setup.policy.aggregation.uses_embedding
        is_set = cfg.max_gradients is not None
        until = RunTime.EMBEDDING if is_embedded else RunTime.FIT
        deadline = run_time.until(until, is_set=is_set)
        n_epochs, degrees, notes = budget.plan_fit(
            cfg,
            setup.policy,
            fit.question_world(setup),
            degrees,
            deadline.seconds_left,
            self.metric_seconds,
            budget.time_factor(self.run.run_config.seconds),
        )
        run_time.notes += notes

        cfg = replace(cfg, n_epochs=n_epochs)
        start = start._replace(value=start.value._replace(n_epochs=n_epochs))
        stage = Stage(
            "listwise fit",
            "untrained",
            partial(self._epochs, degrees, cfg, deadline),
            BEST_BEYOND_CHANCE,
            is_set,
        )
        return choose([stage], start, run_time)

    def _epochs(
        self,
        degrees: Sequence[bool],
        cfg: ListwiseConfig,
        deadline: Deadline,
        start: Candidate[Fitted],
    ) -> Iterator[Candidate[Fitted]]:
        """Yield the weights after each epoch of fits with and without degrees; without valid, of the first fit only."""
        run_time, setup = self.run_time, start.value.setup

        n_fits = len(degrees) if start.quality else 1
        for i, uses_degrees in enumerate(degrees[:n_fits]):
            part = deadline.share(1 / (n_fits - i))
            setup = fit.with_weights_of(setup, uses_degrees=uses_degrees)
            kind = _describe_evidence(setup)
            for epoch, params in enumerate(
                self._iter_epochs(setup, cfg, part), 1
            ):
                yield self._candidate(
                    f"epoch {epoch}{kind}",
                    setup,
                    params,
                    start.value.valid,
                    cfg.n_epochs,
                )
                run_time.on_phase(
                    f"listwise fit{kind}", epoch, cfg.n_epochs, part
                )
        if deadline.is_over:
            run_time.note_cut(
                "listwise fit: it was ended by the time of the run"
            )

    def _iter_epochs(
        self, setup: QuestionSetup, cfg: ListwiseConfig, deadline: Deadline
    ) -> Iterator[QuestionParams]:
        """Yield the weights after each epoch of a fit that starts from untrained weights."""
        if not cfg.learning_rate:
            return
        first = None
        if cfg.n_epochs > 1:
            n_asked = 2 * len(fit.training_facts(self.run.task))
            size = batch_size(cfg, n_asked)
            first = (size, self.options.max_size_quantile)
        yield from fit.iter_epochs(
            setup.policy,
            fit.question_world(setup),
            fit.untrained_params(setup),
            cfg,
            self.run.run_config.seed,
            deadline,
            first,
        )

    def _added_weights(self) -> list[Stage[Fitted]]:
        """Return the stages that add one amount to a weight of all labels; none if PPO starts from rule confidences.

        A fit gives link embeddings too little: those of a training question have not seen a part of the facts, and
        those of other questions have seen all. And each label has a weight of its own for being linked at all, which
        its few questions hardly move from 0; all labels together have a valid split to tell it by.
        """
        if not self.listwise.learning_rate:
            return []
        is_few = has_few_valid(self.run.task)
        accept = BEST_BEYOND_CHANCE if is_few else LARGEST
        accept = accept._replace(min_gain=ABOVE_MIN_GAIN.min_gain)
        return [
            Stage(
                f"added to {what}",
                "0",
                partial(self._add, name, amounts),
                accept,
            )
            for what, name, amounts in (
                ("link embeddings", "prior_weight", (0.5, 1.0, 2.0)),
                ("linked candidates", "linked_weight", (-1.0, -2.0, -4.0)),
            )
        ]

    def _add(
        self,
        name: str,
        amounts: Sequence[float],
        best: Candidate[Fitted],
    ) -> Iterator[Candidate[Fitted]]:
        """Yield the weights with each amount added to the field `name`."""
        fitted, quality = best.value, best.quality
        if quality is None or quality.reciprocal_rank is None:
            return
        score = fitted.params.score
        # The untrained weights have none for link embeddings.
        is_weighed = bool(score.prior_weight.any())
        if name == "linked_weight":
            # Of fewer queries the answers may happen to be unlinked, and others be lost at the last places.
            is_enough = len(quality.reciprocal_rank) >= 100
            is_weighed = is_enough and self.options.links
        for amount in amounts if is_weighed else ():
            changed = score._replace(**{name: getattr(score, name) + amount})
            yield self._candidate(
                f"{amount:g}",
                fitted.setup,
                fitted.params._replace(score=changed),
                fitted.valid,
                fitted.n_epochs,
            )

    def _embeddings(
        self, best: Candidate[Fitted]
    ) -> Iterator[Candidate[Fitted]]:
        """Yield the fit with link embeddings; nothing without a valid split or without time to train them."""
        setup, _, valid, _ = best.value
        embedded = self._embed(setup, valid) if valid else None
        if embedded is None:
            return
        degrees = (setup.policy.aggregation.uses_degrees,)
        fitted = self._fit(*embedded, degrees)
        fitted = choose(self._added_weights(), fitted, self.run_time)
        yield fitted._replace(label="on")

    def _embed(
        self, setup: QuestionSetup, valid: ValidEvidence | None
    ) -> tuple[QuestionSetup, ValidEvidence | None] | None:
        """Add priors by link embeddings to the evidence of questions and valid; None without time to train them."""
        config, run_time = self.run.run_config, self.run_time
        cfg = config.embedding
        is_set = self.options.embedding is True
        deadline = run_time.until(RunTime.EMBEDDING, is_set=is_set)
        if not is_set:
            most = min(deadline.seconds_left, cfg.seconds or EMBEDDING_SECONDS)
            n_epochs = budget.plan_embedding(
                self.run.task, cfg, config.device, most
            )
            if not n_epochs:
                run_time.note_cut(
                    f"link embeddings are not tried: training them would take over {most:.0f} s "
                    "(questions.embedding=on trains them)"
                )
                return None
            if n_epochs < cfg.n_epochs:
                run_time.note_cut(
                    f"link embeddings: {n_epochs} of {cfg.n_epochs} epochs, all that there is time for"
                )
            cfg = replace(cfg, n_epochs=n_epochs)

        left_out = fit.left_out_of(self.options)
        trained = fit.train_embedding(
            self.run.task,
            cfg,
            left_out,
            config.seed,
            run_time.on_phase,
            deadline,
        )
        run_time.end_phase("link embeddings", is_set=is_set)
        valid = valid and valid.change(
            lambda part: evidence.with_embedding_scores(part, trained, "fact")
        )
        return fit.with_embedding(setup, trained, left_out), valid

    def _without_proof(
        self, best: Candidate[Fitted]
    ) -> Iterator[Candidate[Fitted]]:
        """Yield the weights with entities that no rule derives among the others; nothing if untrained."""
        setup, params, valid, _ = best.value
        if valid is None or not learned.knows_all(params.score):
            return
        # From below all that rules derive to among them.
        for log_odds in (-20.0, -14.0, -10.0, -7.0):
            changed = fit.with_weights_of(setup, no_proof=log_odds)
            yield self._candidate(f"{log_odds:g}", changed, params, valid)

    def _network(self, best: Candidate[Fitted]) -> Iterator[Candidate[Fitted]]:
        """Yield the fit with a Bellman-Ford network, whose one weight for all labels ranks valid best.

        Training questions cannot tell the weight: the network has learnt from their facts, and rules were elected and
        other weights fitted by them. A fit trusts the one or the others more than new questions do.
        """
        setup, params, valid, _ = best.value
        starts_at_rules = not self.listwise.learning_rate
        is_set = self.options.bellman_ford is True
        if not is_set and (valid is None or starts_at_rules):
            return
        params_of_network = self._train_network(setup, valid)
        if params_of_network is None:
            return
        network = fit.make_network(self.run.task, params_of_network)
        valid = valid and valid.change(
            lambda part: evidence.with_path_scores(part, network, "fact")
        )
        facts = setup.facts._replace(network=network)
        setup = fit.with_weights_of(
            replace(setup, facts=facts), uses_bellman_ford=True
        )
        # PPO starts from the rule confidences, or from half a weight where there is no valid split.
        weights = (0.25, 0.5, 1.0, 2.0) if valid else (0.5,)
        first, *others = (
            self._candidate(
                f"{weight:g}",
                setup,
                params._replace(
                    score=params.score._replace(
                        network_prior_weight=torch.full_like(
                            params.score.linked_weight, weight
                        )
                    )
                ),
                valid,
            )
            for weight in ((0.0,) if starts_at_rules else weights)
        )
        stage = Stage(
            "weight of the network", first.label, lambda _: others, LARGEST
        )
        chosen = choose([stage], first, self.run_time)
        yield chosen._replace(label="on")

    def _train_network(
        self, setup: QuestionSetup, valid: ValidEvidence | None
    ) -> path_network.Params | None:
        """Train a Bellman-Ford network; None if there is no time for it and for the priors of all questions."""
        config, run_time = self.run.run_config, self.run_time
        cfg, is_set = config.bellman_ford, self.options.bellman_ford is True
        n_questions = len(fit.question_world(setup).question)
        n_asked = min(n_questions, fit.MAX_NETWORK_QUESTIONS)
        n_priors = n_asked + (valid.n_questions if valid else 0)
        deadline = run_time.until(RunTime.EMBEDDING, is_set=is_set)
        seconds = math.inf
        if not is_set:
            most = cfg.seconds or NETWORK_SECONDS
            seconds = min(deadline.seconds_left, most)
        n_steps, planned = budget.plan_bellman_ford(
            self.run.task, cfg, n_priors, config.device, seconds
        )
        if not n_steps:
            run_time.note_cut(
                f"a Bellman-Ford network is not tried: it and the priors of {n_priors:,} questions would take over "
                f"{seconds:.0f} s (questions.bellman_ford=on trains it)"
            )
            return None

        run_time.on_phase(f"Bellman-Ford network, about {planned:.0f} s")
        params, reason = fit.train_bellman_ford(
            self.run.task,
            replace(cfg, n_steps=n_steps),
            fit.left_out_of(self.options),
            config.seed,
            run_time.on_phase,
            deadline,
        )
        run_time.end_phase("Bellman-Ford network", is_set=is_set)
        note = (
            f"Bellman-Ford network: {n_steps:,} of {cfg.n_steps or N_NETWORK_STEPS:,} steps and the priors of "
            f"{n_priors:,} questions, planned to take {planned:.0f} s"
        )
        if reason:
            note += f"; its steps replay no CUDA graph: {reason}"
        run_time.note(note)
        if n_asked < n_questions:
            run_time.note(
                f"PPO asks {n_asked:,} of {n_questions:,} questions beside the network, drawn at random"
            )
        return params


def _describe_evidence(setup: QuestionSetup) -> str:
    """Describe the evidence that a fit weighs beside the rules, for its progress line; empty for the rules alone."""
    weighed = setup.policy.aggregation
    parts = ["degrees"] * weighed.uses_degrees
    parts += ["link embeddings"] * weighed.uses_embedding
    return f" with {' and '.join(parts)}" if parts else ""
