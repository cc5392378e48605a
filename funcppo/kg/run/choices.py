"""Choose the height, object identity, smoothing and score of a data set by how well they rank its valid split.

Every combination ranks the same sample of valid queries by rule confidences alone; `choose_settings` takes the one with
the best MRR. What is set stays as it is. The work is bounded by a number of rows of joins, so that the choice does not
depend on the speed of the machine, and by a deadline. Where the first combination takes more, fewer queries are ranked;
later ones are not begun where a random sample of the rules says that they take more.

At height h the rules apply once to the atoms that T_P derives in h - 1 steps, and only the consequences that a sampled
query may have as candidates are held (`derivability`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from funcppo.core.deadline import NO_DEADLINE, Deadline
from funcppo.core.host import map_in_threads
from funcppo.core.types import I32, I64
from funcppo.kg.graph.dataset import Dataset
from funcppo.kg.logic import (
    derive,
    fixpoint,
    joins,
    triple_index,
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
from funcppo.kg.logic.kb import KBSizes, KnowledgeBase
from funcppo.kg.logic.triple_index import HEAD, TAIL
from funcppo.kg.mining.config import (
    MAX_TINY_FACTS,
    ROWS_PER_SECOND,
    MiningConfig,
)
from funcppo.kg.ranking import rank_metrics, ranking
from funcppo.kg.ranking.ranking import (
    ListedQueries,
    RankingProtocol,
    check_queries,
)
from funcppo.kg.run import rule_files
from funcppo.kg.run.config import Note
from funcppo.kg.scores.score import OTHER_FACTS, Candidates, parse
from funcppo.kg.search.config import ProverTaskConfig
from funcppo.kg.search.task import (
    MAX_DERIVATIONS_PER_ATOM,
    PhaseCallback,
    as_counts,
    entity_pool,
    held_out_triples,
    ignore_phase,
    with_rule_counts,
)

HEIGHTS = (1, 2, 3)
SMOOTHINGS = (None, 5.0, 20.0)
SCORES = ("max-confidence", "noisy-or", "noisy-or@2", "noisy-or@3")
# queries of the valid split that are ranked
MAX_QUERIES = 1000
# rows of joins that the combinations of one height and object identity may make
MAX_TRIAL_ROWS = 100_000_000
# A simpler combination is preferred to one whose MRR is better by no more than this.
MIN_GAIN = 0.0005


_Key = TypeVar("_Key")
# Receives the part of a trial that is worked on, how much of it is done, and of how much.
StageCallback = Callable[[str, int, int | None], None]


def best_above(values: Mapping[_Key, float], margin: float = 0.0) -> _Key:
    """Return the key of the largest value, or the first one unless that value is larger by more than a margin."""
    first = next(iter(values))
    best = max(values, key=lambda key: values[key])
    return best if values[best] > values[first] + margin else first


class Trial(NamedTuple):
    """One combination and how well it ranks."""

    height: int
    object_identity: bool
    smoothing: float | None
    score: str
    mrr: float  # on the sampled queries, filtered, ties in random order
    n_atoms: int  # distinct candidates that were scored


class HeightCandidate(NamedTuple):
    """The best settings of a height."""

    settings: ProverTaskConfig
    score: str  # of rule confidences
    atoms_per_query: float  # distinct candidates that are derived, a query


class SettingsChoice(NamedTuple):
    """The settings of a data set, and how they were chosen."""

    # with a height, a smoothing and an object identity
    settings: ProverTaskConfig
    # of rule confidences
    score: str
    # for each height that was tried, ascending
    by_height: tuple[HeightCandidate, ...]
    trials: tuple[Trial, ...]  # what was compared
    n_queries: int  # of valid that were ranked
    # a line on each height that was not tried, or on why none was
    notes: tuple[str, ...]
    # of the rules without object identity, as `Dataset.rule_counts` holds them; None if none were counted
    rule_counts: np.ndarray | None = None
    # what the rules fire from, on the host; None where height 1 was not tried
    plan: RulePlan | None = None


@dataclass(frozen=True, slots=True)
class _Sample:
    """A data set as tensors, and the queries that are ranked."""

    kb: KnowledgeBase
    sizes: KBSizes
    rules: np.ndarray
    queries: I64[Tensor, "Q W"]
    known_triples: I32[Tensor, "N W"]  # the answers of the queries among them
    pool: I64[Tensor, "E"]
    protocol: RankingProtocol
    max_atoms: int
    plan: RulePlan | None  # None where height 1 is not tried
    deadline: Deadline


class _Candidates(NamedTuple):
    """What the rules derive at a height that the queries may have as candidates."""

    listed: ListedQueries
    derivations: list[Derivations]  # of the distinct candidates


class _HeldCandidates(Candidates):
    """The candidates of a trial, which share their derivations."""

    def __init__(self, kb: KnowledgeBase, held: _Candidates) -> None:
        self.kb = kb
        self._held = held

    def __len__(self) -> int:
        """The number of distinct candidates."""
        return len(self._held.listed.distinct[0][0])

    def derivations(self) -> list[Derivations]:
        """The rules that derive each candidate."""
        return self._held.derivations

    def derived_within(self, height: int) -> Tensor:
        """True: the rules derive each of them within the height of the trial."""
        return torch.ones(len(self), dtype=torch.bool)


class _Options(NamedTuple):
    """The values that are tried."""

    heights: tuple[int, ...]
    object_identity: tuple[bool, ...]
    smoothings: tuple[float | None, ...]
    scores: tuple[str, ...]


def choose_settings(
    dataset: Dataset,
    cfg: ProverTaskConfig,
    score: str | None = None,
    on_phase: PhaseCallback = ignore_phase,
    deadline: Deadline = NO_DEADLINE,
) -> SettingsChoice:
    """Choose what `cfg` leaves open by the MRR of untrained scores on the valid split.

    Args:
      dataset: triples and rules.
      cfg: settings. `max_height` None, `smoothing` "auto" and `object_identity` "auto" are chosen; unless it is set,
        object identity is tried at height 1 alone, where a policy can keep it.
      score: an untrained score that is set; None chooses one too.
      on_phase: receives what is being tried, and within which bound.
      deadline: when the choice ends; what is not tried by then is not chosen.

    Returns:
      The settings, with a height, a smoothing and an object identity.

    Raises:
      ValueError: a valid query, which the message names, cannot be ranked.
    """
    check_rankable(dataset, dataset.valid)
    options = _options(cfg, score)
    if not len(dataset.valid) or all(len(values) == 1 for values in options):
        return _without_choice(dataset, cfg, options)

    counts_of: dict[bool, RuleCounts] = {}
    count_notes: list[str] = []
    if False in options.object_identity:
        dataset, count_notes = with_rule_counts(dataset, on_phase)
        counts = as_counts(dataset.rule_counts)
        assert counts is not None, "they are counted"
        counts_of = {False: RuleCounts(*counts.unbind(1))}
    sample = _draw_sample(dataset, cfg, deadline)
    sample, trials, not_tried = _try_heights(
        sample, options, counts_of, on_phase
    )
    not_tried += count_notes
    if not trials:
        choice = _without_choice(dataset, cfg, options)
        notes = (*not_tried, *choice.notes)
        return choice._replace(
            notes=notes, rule_counts=dataset.rule_counts, plan=sample.plan
        )

    best = _simplest_of_the_best(trials)
    by_height = [
        _simplest_of_the_best([t for t in trials if t.height == height])
        for height in dict.fromkeys(trial.height for trial in trials)
    ]
    return SettingsChoice(
        settings=_with_trial(cfg, best),
        score=best.score,
        by_height=tuple(
            HeightCandidate(
                _with_trial(cfg, trial),
                trial.score,
                trial.n_atoms / len(sample.queries),
            )
            for trial in by_height
        ),
        trials=tuple(trials),
        n_queries=len(sample.queries),
        notes=tuple(not_tried),
        rule_counts=dataset.rule_counts,
        plan=sample.plan,
    )


def check_rankable(dataset: Dataset, split: np.ndarray) -> None:
    """Check that all queries of a split can be ranked.

    Raises:
      ValueError: a query, which the message names, is not binary or not ground, or the pool does not hold its answer.
    """
    pool, is_countries = entity_pool(dataset)
    queries = torch.from_numpy(split)
    for side in _sides(is_countries):
        check_queries(queries, side, pool, dataset.n_constants)


def describe_choice(choice: SettingsChoice, height: int) -> list[str]:
    """Return a line for each setting that had more than one value, with the MRR of each.

    Args:
      height: the height at which the other settings are compared, that of the choice or one that another score prefers.
    """
    at_height = [trial for trial in choice.trials if trial.height == height]
    verb = "chosen" if height == choice.settings.max_height else "ranks best"
    lines = {"height": _compare("height", choice, choice.trials, verb)}
    for name in ("object_identity", "smoothing", "score"):
        lines[name] = _compare(name, choice, at_height)
    notes = [
        Note("answers" if name == "score" else "detail", line)
        for name, line in lines.items()
        if line
    ]
    return [*notes, *(Note("cut", line) for line in choice.notes)]


def _compare(
    name: str,
    choice: SettingsChoice,
    trials: Sequence[Trial],
    verb: str = "chosen",
) -> str:
    """The best MRR with each value of a setting; empty if there is one value.

    Args:
      verb: what is said of the best value, which another score may not choose.
    """
    best: dict[object, float] = {}
    for trial in trials:
        value = getattr(trial, name)
        best |= {value: max(trial.mrr, best.get(value, -1.0))}
    if len(best) < 2:
        return ""
    chosen = getattr(_simplest_of_the_best(trials), name)
    listing = ", ".join(
        f"{_value_text(value)} {mrr:.4f}" for value, mrr in best.items()
    )
    label = "rule score" if name == "score" else name.replace("_", " ")
    at = "" if name == "height" else f" at height {trials[0].height}"
    return (
        f"{label} {_value_text(chosen)} {verb}: MRR of rule confidences{at} on "
        f"{choice.n_queries} valid triples: {listing}"
    )


def _options(cfg: ProverTaskConfig, score: str | None) -> _Options:
    """What is tried: the one value that is set, or else all, the simplest first."""
    identity = cfg.object_identity
    if identity == "auto" and cfg.fact_selection == "policy":
        identity = False  # only the oracle knows which facts keep it
    return _Options(
        heights=HEIGHTS if cfg.max_height is None else (cfg.max_height,),
        object_identity=(False, True) if identity == "auto" else (identity,),
        smoothings=SMOOTHINGS if cfg.smoothing == "auto" else (cfg.smoothing,),
        scores=SCORES if score is None else (score,),
    )


def _without_choice(
    dataset: Dataset, cfg: ProverTaskConfig, options: _Options
) -> SettingsChoice:
    """The settings where nothing can be compared: as set, and else the defaults."""
    default = Trial(
        height=1,
        object_identity=False,
        smoothing=5.0,
        score="noisy-or@3",
        mrr=float("nan"),
        n_atoms=0,
    )
    trial = default._replace(
        **{
            name: values[0]
            for name, values in zip(Trial._fields, options)
            if len(values) == 1
        }
    )

    notes: tuple[str, ...] = ()
    if any(len(values) > 1 for values in options):
        reason = (
            "nothing to choose by" if len(dataset.valid) else "no valid split"
        )
        notes = (
            f"{reason}: height {trial.height}, smoothing {_value_text(trial.smoothing)}, "
            f"object identity {_value_text(trial.object_identity)}, score {trial.score}",
        )

    settings = _with_trial(cfg, trial)
    by_height = (HeightCandidate(settings, trial.score, 0.0),)
    return SettingsChoice(settings, trial.score, by_height, (), 0, notes)


def _with_trial(cfg: ProverTaskConfig, trial: Trial) -> ProverTaskConfig:
    """The settings with the values of a trial."""
    return replace(
        cfg,
        max_height=trial.height,
        smoothing=trial.smoothing,
        object_identity=trial.object_identity,
    )


def _sides(is_countries: bool) -> tuple[int, ...]:
    """The sides that queries are ranked on."""
    return (TAIL,) if is_countries else (HEAD, TAIL)


# -- trials


def _draw_sample(
    dataset: Dataset, cfg: ProverTaskConfig, deadline: Deadline
) -> _Sample:
    """The knowledge base, and a uniform sample of the valid queries, always the same one."""
    rows = np.sort(ranking.random_rows(len(dataset.valid), MAX_QUERIES))

    kb, sizes = kbase.from_dataset(dataset)

    pool, is_countries = entity_pool(dataset)
    sides = _sides(is_countries)
    queries = torch.from_numpy(dataset.valid[rows]).long()
    answering = derive.answering_facts(kb, sizes, queries, sides)
    held_out = torch.from_numpy(held_out_triples(dataset))
    plan = None
    if cfg.max_height in (None, 1):
        plan = plan_rules(kb, sizes, cfg.memory_share)

    return _Sample(
        kb=kb,
        sizes=sizes,
        rules=dataset.rules,
        queries=queries,
        known_triples=torch.cat([answering, held_out]),
        pool=pool,
        protocol=RankingProtocol(sides=sides),
        max_atoms=cfg.max_atoms,
        plan=plan,
        deadline=deadline,
    )


def _try_heights(
    sample: _Sample,
    options: _Options,
    counts_of: dict[bool, RuleCounts],
    on_phase: PhaseCallback,
) -> tuple[_Sample, list[Trial], list[str]]:
    """The trials of all heights until a height ranks worse or takes too long; a note for what is not tried.

    Args:
      counts_of: receives the counts of the rules with object identity.

    Returns:
      The sample with the queries that were ranked, perhaps fewer; the trials; the notes.
    """
    trials: list[Trial] = []
    not_tried: list[str] = []
    for height in options.heights:
        is_alone = len(options.heights) > 1 and height > 1
        identities = (
            (False,)
            if is_alone and len(options.object_identity) > 1
            else options.object_identity
        )
        for object_identity in identities:
            identity = " with object identity" if object_identity else ""
            tried = f"height {height}{identity}"
            text = _describe_trials(tried, sample.deadline)
            show = partial(_show_stage, on_phase, text, sample.deadline)
            show("T_P" if height > 1 else "listing candidates", 0, None)
            try_one = _try_if_likely if trials else _try_with_fewer
            try:
                sample, found = try_one(
                    sample,
                    options,
                    height,
                    object_identity,
                    counts_of,
                    show,
                )
                trials += found
            except RowBudgetExceeded as error:
                note = f"{tried} not tried: {error}"
                if object_identity:
                    not_tried.append(note)
                    continue
                # Object identity projects less away, and a greater height joins more facts.
                note += "; what takes longer is not tried either"
                return sample, trials, [*not_tried, note]
        if _best_mrr(trials, height) < _best_mrr(trials, height - 1):
            break
    return sample, trials, not_tried


def _show_stage(
    on_phase: PhaseCallback,
    text: str,
    deadline: Deadline,
    stage: str,
    done: int,
    total: int | None,
) -> None:
    """Show a stage of the trials that a text names."""
    on_phase(f"{text}: {stage}", done, total, deadline)


def _describe_trials(tried: str, deadline: Deadline) -> str:
    """What is tried, and within which bounds."""
    limits = f"within {MAX_TRIAL_ROWS:,} rows of joins"
    if not math.isinf(deadline.at):
        limits += f" and {deadline.seconds_left:.0f} s"
    return f"choosing settings: {tried}, {limits}"


def _try_with_fewer(
    sample: _Sample,
    options: _Options,
    height: int,
    object_identity: bool,
    counts_of: dict[bool, RuleCounts],
    show: StageCallback,
) -> tuple[_Sample, list[Trial]]:
    """The first trials, of fewer queries where those of all take too long.

    Args and errors are those of `_try_scores`.
    """
    while True:
        # The first height may take 0.4 of the time with some number of queries.
        first = replace(sample, deadline=sample.deadline.share(0.4))
        try:
            _, trials = _try_scores(
                first, options, height, object_identity, counts_of, show
            )
        except RowBudgetExceeded:
            n_queries = len(sample.queries) // 8
            is_counted = object_identity in counts_of
            if n_queries < 15 or not is_counted:
                raise
            rows = torch.linspace(0, len(sample.queries) - 1, n_queries).long()
            sample = replace(sample, queries=sample.queries[rows])
        else:
            return sample, trials


def _try_if_likely(
    sample: _Sample,
    options: _Options,
    height: int,
    object_identity: bool,
    counts_of: dict[bool, RuleCounts],
    show: StageCallback,
) -> tuple[_Sample, list[Trial]]:
    """Later trials, which apply all rules to count them or for T_P, unless a sample of the rules makes too many rows.

    Args and errors are those of `_try_scores`.
    """
    fixpoint.check_sampled_rows(
        sample.kb,
        sample.sizes,
        MAX_TRIAL_ROWS,
        object_identity=object_identity,
        deadline=sample.deadline,
    )
    return _try_scores(
        sample, options, height, object_identity, counts_of, show
    )


def _try_scores(
    sample: _Sample,
    options: _Options,
    height: int,
    object_identity: bool,
    counts_of: dict[bool, RuleCounts],
    show: StageCallback,
) -> tuple[_Sample, list[Trial]]:
    """The sample, and the trials of all smoothings and scores at a height.

    Args:
      counts_of: the counts without and with object identity; those with it are added where they are missing.
      show: receives how much is done of counting rules, listing candidates and ranking.

    Raises:
      RowBudgetExceeded: the joins make more rows than `MAX_TRIAL_ROWS` or take too long, or there are too many
        derivations to hold.
    """
    budget = RowBudget(MAX_TRIAL_ROWS, deadline=sample.deadline)
    if object_identity not in counts_of:
        counts = count_rules(
            sample.kb,
            sample.sizes,
            object_identity=object_identity,
            budget=budget,
            progress=partial(show, "counting rules"),
        )
        counts_of |= {object_identity: counts}
    counts = counts_of[object_identity]
    if height > 1:
        # The first step makes a row at least for each head of each rule.
        RowBudget(MAX_TRIAL_ROWS).spend(int(counts.body_pairs.sum()))
    candidates = _list_candidates(
        sample,
        height,
        object_identity,
        budget,
        show,
    )
    kinds = list(product(options.smoothings, options.scores))

    def rank(kind: tuple[float | None, str]) -> Trial:
        smoothing, score = kind
        if sample.deadline.is_over:
            raise RowBudgetExceeded("more time than was left")
        kb = with_confidence(sample.kb, counts, smoothing)
        mrr, n_atoms = _rank(candidates, kb, score)
        return Trial(height, object_identity, smoothing, score, mrr, n_atoms)

    show("ranking", 0, len(kinds))
    trials: list[Trial] = []
    for trial in map_in_threads(rank, kinds):
        trials.append(trial)
        show("ranking", len(trials), len(kinds))
    return sample, trials


def _list_candidates(
    sample: _Sample,
    height: int,
    object_identity: bool,
    budget: RowBudget,
    show: StageCallback,
) -> _Candidates:
    """What one application of the rules to T_P of the height below derives for the queries."""
    sizes = sample.sizes
    progress = partial(show, "listing candidates")
    facts_kb = sample.kb
    if height > 1:

        def show_step(
            step: int, n_atoms: int, n_done: int, n_rules: int
        ) -> None:
            show(f"T_P step {step + 1}", n_done, n_rules)

        below = fixpoint.least_model(
            sample.kb,
            sizes,
            max_height=height - 1,
            max_atoms=sample.max_atoms,
            object_identity=object_identity,
            budget=budget,
            progress=show_step,
        )
        if not below.complete:
            raise RowBudgetExceeded(f"T_P {below.stop_reason}")
        facts_kb, _ = kbase.build(
            below.atoms.numpy(),
            sample.rules,
            n_constants=sizes.n_constants,
            n_predicates=sizes.n_predicates,
        )
    max_derivations = MAX_DERIVATIONS_PER_ATOM * sample.max_atoms
    part = derive.answered_step(
        facts_kb,
        sizes,
        sample.queries,
        sample.protocol.sides,
        max_derivations,
        object_identity,
        budget,
        sample.plan if height == 1 else None,
        progress,
    )
    if part is None:
        raise RowBudgetExceeded(f"more than {max_derivations:,} derivations")
    model, index = part
    filter_index = triple_index.build_filter_index(
        sizes, model, sample.known_triples, sample.pool
    )
    listed = ranking.list_queries(
        sample.protocol,
        sizes,
        filter_index,
        sample.queries,
        torch.arange(len(sample.queries)),
        sample.pool,
        by_side=False,
    )
    ((atoms, _),) = listed.distinct
    derivations = derive.iter_indexed_derivations(
        index, sizes, atoms.to(torch.int32), joins.MAX_CHUNK_ROWS
    )
    return _Candidates(listed, list(derivations))


def _rank(
    candidates: _Candidates, kb: KnowledgeBase, score: str
) -> tuple[float, int]:
    """The MRR of a score, ties in random order, and the number of atoms that were scored.

    A score with other facts is ranked as the one without: what the rules say chooses the settings of all.
    """
    found = _HeldCandidates(kb, candidates)
    value = parse(score.removesuffix(OTHER_FACTS))
    ranked = ranking.rank_listed(
        candidates.listed, lambda *_: value.log_odds(found)
    )
    expected = rank_metrics.expected_reciprocal_ranks(ranked.counts)
    return float(expected.mean()), len(ranked.scored_atom)


# -- the choice


def _best_mrr(trials: list[Trial], height: int) -> float:
    """The best MRR at a height; -1 if nothing was tried there."""
    return max(
        (trial.mrr for trial in trials if trial.height == height), default=-1.0
    )


def _simplest_of_the_best(trials: Sequence[Trial]) -> Trial:
    """The first trial that is not worse than the best by more than `MIN_GAIN`."""
    best = max(trial.mrr for trial in trials)
    return next(trial for trial in trials if trial.mrr >= best - MIN_GAIN)


def _value_text(value: object) -> str:
    """The value of a setting in words."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


# -- mining settings of a tiny dense graph


def candidate_configs(
    dataset: Dataset, seconds: float
) -> dict[str, MiningConfig]:
    """The settings to mine by, by name: the defaults of the data set, and the usual ones beside those of a tiny graph.

    The defaults of tiny dense graphs are not always better than the usual ones; both are cheap there, and both are
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
    return {
        "tiny dense graphs": defaults,
        # The usual settings sample what takes more rows.
        "other graphs": replace(
            usual, max_rows=20 * ROWS_PER_SECOND, seconds=seconds / 2
        ),
    }


def choose_rules(
    datasets: Mapping[str, Dataset],
    prover: ProverTaskConfig,
    on_phase: PhaseCallback = ignore_phase,
    deadline: Deadline = NO_DEADLINE,
) -> tuple[str, str]:
    """Choose the rules whose best rule score has the highest MRR on valid; the first ones unless others gain.

    Args:
      datasets: the data set with the rules of each settings, by their name.
      prover: settings of the prover; a height that is open is 1.
      on_phase: receives what is being tried.
      deadline: when the comparison ends; what is not ranked by then is not chosen.

    Returns:
      The name, and a note with the numbers compared; empty if there was nothing to compare.
    """
    first = next(iter(datasets))
    if len(datasets) == 1:
        return first, ""

    mrr: dict[str, float] = {}
    for i, (name, dataset) in enumerate(datasets.items()):
        choice = choose_settings(
            dataset,
            replace(prover, max_height=prover.max_height or 1),
            on_phase=on_phase,
            deadline=deadline.share(1 / (len(datasets) - i)),
        )
        if not choice.trials:
            reason = f"{name}: {choice.notes[0]}"
            note = f"mining defaults of {first} taken, not compared on valid: {reason}"
            return first, note
        mrr[name] = max(trial.mrr for trial in choice.trials)

    best = best_above(mrr, MIN_GAIN)
    listing = ", ".join(
        f"those of {name} {value:.4f} ({len(datasets[name].rules):,} rules)"
        for name, value in mrr.items()
    )
    note = f"mining defaults of {best} chosen: MRR of the best rule score on valid: {listing}"
    return best, note
