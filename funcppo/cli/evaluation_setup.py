"""Prepare an evaluation: the scorer, the evaluator, the memory limit and the settings that identify the result log.

`prepare_evaluation` does so from the options of `funcppo evaluate`; `search_notes` describes the work afterwards.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NamedTuple,
    TypeAlias,
    cast,
)

from funcppo.cli import common
from funcppo.cli.common import JsonObject, select_device
from funcppo.core.files import shorten
from funcppo.core.settings import is_cuda
from funcppo.runtime import distributed
from funcppo.runtime.distributed import Processes
from funcppo.runtime.reasons import ReasonCode, failure_code

# PyTorch takes seconds to import, and --help does not wait for it.
if TYPE_CHECKING:
    import numpy as np

    from funcppo.kg.ranking.evaluator import Evaluator, ProofFinder
    from funcppo.kg.ranking.result_log import Record
    from funcppo.kg.run.run import Run
    from funcppo.kg.run.subject import Subject
    from funcppo.kg.scores.score import Score
    from funcppo.kg.search.beam_search import (
        ScoreName,
        SearchConfig,
        SearchResult,
    )
    from funcppo.kg.search.slot_scheduler import SearchStep
    from funcppo.kg.search.task import PhaseCallback

# queries of the split on which the batch size is tuned
TUNING_SAMPLE_SIZE = 2048
# fields of SearchConfig that are tuned
TUNED_SIZES = ("slots", "rows_per_step", "chunk_size")
# Candidates from which the search is compiled on a GPU: it takes half a minute, and saves 3 microseconds on each
# (`experiments/results/scoring-h200.json`). On a CPU it was not measured.
COMPILE_MIN_CANDIDATES = 10_000_000
CompileChoice: TypeAlias = Literal["auto", "on", "off"]


class Uncompiled(NamedTuple):
    """Why a search is not compiled."""

    reason: str
    code: ReasonCode


NO_SEARCH = Uncompiled("the score needs no search", ReasonCode.NO_SEARCH)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationSetup:
    """An evaluator that is ready to rank, and what to report with its results."""

    evaluator: Evaluator
    """Ranks queries and proves their answers."""
    score: str
    """Name of the score."""
    log_settings: JsonObject
    """What the ranks depend on, written beside the result log; --resume compares it."""
    search_stats: SearchStats
    """Counts that the scorer adds up while it runs."""
    notes: list[str]
    """Lines on the batch size that was chosen."""
    memory_limit: int
    """Bytes."""
    policy_run: Run | None
    """The run whose policy gives the scores; None for a score without a policy."""
    device: str
    """Device to score on."""
    peer_peak_bytes: list[int] = field(default_factory=list)
    """Memory peaks that other processes of the evaluation reported."""
    uncompiled: Uncompiled | None
    """Why the search is not compiled; None if it is."""
    search_step: SearchStep | None
    """The step of its search; None without a policy."""


@dataclass(slots=True)
class SearchStats:
    """Counts of the work of a scorer, added up call by call."""

    active_row_steps: int = 0
    """Row-steps of the search that held a partial proof."""
    row_steps: int = 0
    """All row-steps of the search, idle ones included."""
    n_pruned: int = 0
    """Candidates whose beam dropped partial proofs."""
    n_overflowed: int = 0
    """Candidates with a state that had more successors than fit."""
    n_halvings: int = 0
    """How often the slots were halved because memory did not suffice."""

    def add_halving(self, cfg: SearchConfig, /) -> None:
        """Add one halving of the slots."""
        self.n_halvings += 1

    def add(
        self, result: SearchResult | None, active_row_steps: int, row_steps: int
    ) -> None:
        """Add one call of the scorer, whose result is None if it needed no search."""
        self.active_row_steps += active_row_steps
        self.row_steps += row_steps
        if result is not None:
            self.n_pruned += int(result.pruned_log_mass.isfinite().sum())
            self.n_overflowed += int(result.overflow_log_mass.isfinite().sum())

    def counts(self) -> dict[str, int]:
        """All counts by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def add_counts(self, counts: Mapping[str, int]) -> None:
        """Add counts by name, such as those of another process."""
        for name, count in counts.items():
            setattr(self, name, getattr(self, name) + count)

    def as_metrics(self) -> JsonObject:
        """Return the counts for the JSON of --json; empty if nothing was computed."""
        if not self.row_steps:
            return {}
        return {
            "row_steps": self.row_steps,
            "active_fraction": self.active_row_steps / self.row_steps,
            "n_pruned": self.n_pruned,
            "n_overflowed": self.n_overflowed,
            "n_halvings": self.n_halvings,
        }


class _PolicyScore(NamedTuple):
    """A score by a policy."""

    score: Score
    step: SearchStep
    uncompiled: Uncompiled | None  # None: the search is compiled
    notes: list[str]  # on its batch size, and on compiling


def prepare_evaluation(
    options: Any,
    on_phase: PhaseCallback,
    *,
    with_proofs: bool = False,
) -> EvaluationSetup:
    """Load the run or data set, build its scorer for this machine, and build the evaluator.

    Args:
      options: the command line of `funcppo evaluate`.
      on_phase: receives what is being done.
      with_proofs: the evaluator proves answers.

    Returns:
      The evaluator, the settings that tell this evaluation from others, and what to report of it.

    Raises:
      ValueError: an option is bad or does not fit the target, or the memory limit is too small.
    """
    from funcppo.kg.ranking.evaluator import Evaluator
    from funcppo.kg.ranking.ranking import (
        RankingProtocol,
        estimate_candidates,
        ranked_sides,
    )
    from funcppo.kg.search.task import with_ranking_on

    select_device(options.device)
    n_negatives = _parse_negatives(options.negatives)
    memory_limit = common.memory_limit(options.memory, options.device)
    subject = options.open_subject(on_phase)
    task, score, policy_run, notes, *_ = subject

    search_stats = SearchStats()
    split = getattr(task.dataset, options.split)
    protocol = RankingProtocol(
        sides=ranked_sides(task),
        n_negatives=n_negatives,
        score_unprovable=score.scores_unprovable,
        seed=options.seed,
    )
    uncompiled: Uncompiled | None = NO_SEARCH
    step: SearchStep | None = None
    if policy_run is None or policy_run.questions is not None:
        _check_memory(memory_limit, options.device)
    else:
        on_phase("choosing the batch size")
        task = with_ranking_on(task, "cpu")
        n_candidates = estimate_candidates(
            task, split[: options.max_queries], protocol
        )
        score, step, uncompiled, more = _make_policy_score(
            policy_run,
            score.name,
            split,
            memory_limit,
            search_stats,
            options.compile,
            why_not_compile(options, n_candidates),
        )
        notes = [*notes, *more]

    subject = subject._replace(task=task, score=score, notes=notes)
    evaluator = Evaluator(
        task=task,
        protocol=protocol,
        score=score,
        prove=_make_prover(subject) if with_proofs else None,
        all_scores=options.all_scores,
    )
    return EvaluationSetup(
        evaluator=evaluator,
        score=score.name,
        log_settings=_log_settings(options, subject, n_negatives),
        search_stats=search_stats,
        notes=notes,
        memory_limit=memory_limit,
        policy_run=policy_run,
        device=options.device,
        uncompiled=uncompiled,
        search_step=step,
    )


def why_not_compile(options: Any, n_candidates: int) -> Uncompiled | None:
    """Why the options do not compile a search; None if they do.

    Args:
      n_candidates: that are ranked.
    """
    if options.compile == "on":
        return None
    if options.compile == "off":
        return Uncompiled("--compile off", ReasonCode.NOT_REQUESTED)
    if not is_cuda(options.device):
        return Uncompiled(
            "--compile auto compiles on a GPU only", ReasonCode.NO_GPU
        )
    if n_candidates < COMPILE_MIN_CANDIDATES:
        return Uncompiled(
            f"--compile auto: expected at least {COMPILE_MIN_CANDIDATES:,} candidates, which repay it, "
            f"got {n_candidates:,}",
            ReasonCode.SHORT_RUN,
        )
    return None


def search_notes(result: JsonObject) -> list[str]:
    """Return lines on the work of an evaluation and on what it may have missed.

    Args:
      result: the JSON of --json.
    """
    lines = []
    if result["peak_bytes"] > result["memory_limit_bytes"]:
        lines.append(
            f"the peak of {result['peak_bytes'] / 1e6:,.0f} MB exceeds the limit of --memory"
        )
    if "row_steps" not in result:
        return lines

    lines.append(
        f"slot utilisation: {result['active_fraction']:.1%} of {result['row_steps']:,} row-steps"
    )
    if result["n_pruned"]:
        lines.append(
            f"the beam pruned partial proofs of {result['n_pruned']:,} candidates"
        )
    if result["n_overflowed"]:
        lines.append(
            f"successors of {result['n_overflowed']:,} candidates did not fit"
        )
    if result["n_halvings"]:
        lines.append(
            f"memory did not suffice: the slots were halved {result['n_halvings']} times"
        )
    if result["n_missed"]:
        lines.append(
            f"{result['n_missed']:,} provable answers were not found by the search"
        )
    return lines


def _parse_negatives(text: str) -> int | None:
    """The number of corruptions of each query and side; None for all entities."""
    if text == "all":
        return None
    is_number = re.fullmatch("[0-9]{1,9}", text) is not None
    if not is_number or int(text) < 1:
        raise ValueError(
            f"--negatives: expected all, or a number from 1 to 999999999, got {shorten(text)}"
        )
    return int(text)


def _check_memory(memory_limit: int, device: str) -> None:
    """Check that the process is not beyond its limit before the evaluation."""
    from funcppo.runtime import memory

    used_bytes = memory.used_bytes(device)
    if used_bytes > memory_limit:
        raise ValueError(
            f"--memory {memory_limit}: expected at least {used_bytes} bytes, which the data and T_P take by themselves"
        )


def _make_policy_score(
    run: Run,
    score: str,
    split: np.ndarray,
    memory_limit: int,
    search_stats: SearchStats,
    choice: CompileChoice,
    uncompiled: Uncompiled | None,
) -> _PolicyScore:
    """Build the score of a run's policy with the batch size that is fastest here within the memory limit.

    Args:
      choice: "on": where it cannot be compiled, that is an error.
      uncompiled: why its search is not to be compiled; None to try.
    """
    from funcppo.kg.ranking import policy_score

    cfg, notes = _choose_batch_size(
        run, cast("ScoreName", score), split, memory_limit
    )
    step = run.search_step
    if not policy_score.needs_search(run.task, cfg):
        uncompiled = NO_SEARCH
    if uncompiled is None:
        step, uncompiled, note = _compile_step(run, cfg, split, choice)
        notes = [*notes, note]
    value = policy_score.PolicyScore(
        cfg,
        run.task,
        run.state.best_params,
        step,
        on_scored=search_stats.add,
        on_halved=search_stats.add_halving,
    )
    return _PolicyScore(value, step, uncompiled, notes)


def _compile_step(
    run: Run, cfg: SearchConfig, split: np.ndarray, choice: CompileChoice
) -> tuple[SearchStep, Uncompiled | None, str]:
    """The step of the search compiled, or as it was if it is not worth an error; why it is not, and a note on it.

    Raises:
      ValueError: compiling was asked for, and it fails.
    """
    import torch

    from funcppo.kg.ranking import policy_score
    from funcppo.runtime.compile import reason_against_compiling

    device = run.run_config.device
    step = policy_score.make_search_step(device, compiled=True)
    sample = torch.from_numpy(split[:TUNING_SAMPLE_SIZE])
    start = time.perf_counter()
    turned_off_by = reason_against_compiling()
    try:
        if turned_off_by:
            raise RuntimeError(f"{turned_off_by} turns the compiler off")
        params = run.state.best_params
        policy_score.compile_search_step(cfg, run.task, params, sample, step)
    except Exception as error:
        line = next(iter(str(error).splitlines()), type(error).__name__)
        if choice == "on":
            raise ValueError(
                f"--compile on: expected a search that can be compiled, got: {line}"
            ) from error
        code = ReasonCode.DISABLED if turned_off_by else failure_code(error)
        note = f"the search is not compiled: {line}"
        return run.search_step, Uncompiled(line, code), note
    seconds = time.perf_counter() - start
    return step, None, f"the search is compiled, ready in {seconds:.0f} s"


def _choose_batch_size(
    run: Run, score: ScoreName, split: np.ndarray, memory_limit: int
) -> tuple[SearchConfig, list[str]]:
    """The settings that score fastest, which rank 0 measures for all processes, and a note on them."""
    from funcppo.kg.run import validation

    processes = distributed.current_processes()
    if processes is not None and not processes.is_main:
        cfg = validation.run_search_config(run, score)
        return replace(cfg, **processes.share("batch sizes")), []

    cfg, notes = _tune_batch_size(run, score, split, memory_limit)
    if processes is not None:
        sizes = {name: getattr(cfg, name) for name in TUNED_SIZES}
        processes.share("batch sizes", sizes)
    return cfg, notes


def _tune_batch_size(
    run: Run, score: ScoreName, split: np.ndarray, memory_limit: int
) -> tuple[SearchConfig, list[str]]:
    """The settings that score fastest on this machine within the memory limit, and a note on them."""
    import torch

    from funcppo.kg.ranking import autotune, policy_score
    from funcppo.kg.run import validation
    from funcppo.kg.search.slot_scheduler import evaluate_step
    from funcppo.kg.search.task import inference_world
    from funcppo.runtime.capture import are_trees_demanded

    task = run.task
    params = run.state.best_params
    cfg = validation.run_search_config(run, score)
    if not len(split):
        return cfg, []

    sample = torch.unique(
        torch.from_numpy(split[:TUNING_SAMPLE_SIZE]), dim=0
    ).to(task.kb.facts.device)
    if policy_score.needs_search(task, cfg):
        make_step = partial(
            policy_score.make_search_step, run.run_config.device
        )
        if are_trees_demanded():
            # Each size would be compiled.
            make_step = lambda: evaluate_step
        cfg, trials = autotune.tune_slots(
            cfg, inference_world(task), params, sample, memory_limit, make_step
        )
        batch = f"{cfg.slots} slots, {cfg.rows_per_step} rows a step"
    else:
        world = policy_score.with_derivations(task, sample)
        cfg, trials = autotune.tune_chunk_size(
            cfg, world, params, sample, memory_limit
        )
        batch = f"chunks of {cfg.chunk_size} candidates"

    best = autotune.select_trial(trials)
    speed = f"the smallest of {len(trials)} sizes that is nearly the fastest: {best.rows_per_second:,.0f} rows/s"
    memory = f"{best.peak_bytes / 1e6:,.0f} of {memory_limit / 1e6:,.0f} MB"
    return cfg, [f"{batch}, {speed}, {memory}"]


def _make_prover(subject: Subject) -> ProofFinder:
    """A function from answers to their proofs: the policy's, or without a policy smallest ones."""
    from funcppo.kg.answers import most_probable_proofs
    from funcppo.kg.ranking import explain

    program = explain.build_program(subject.task)
    run = subject.policy_run
    if run is None:
        return partial(explain.smallest_proofs, subject.task, program=program)
    return partial(most_probable_proofs, run, program=program)


def _log_settings(
    options: Any, subject: Subject, n_negatives: int | None
) -> JsonObject:
    """What the rank of a query depends on, beside the split."""
    run = subject.policy_run
    return {
        "dataset": subject.task.dataset.name,
        "fingerprint": subject.task.dataset.fingerprint,
        "height": subject.task.max_height,
        "smoothing": subject.task.cfg.smoothing,
        "object_identity": subject.task.cfg.object_identity,
        "score": subject.score.name,
        "params_digest": None if run is None else digest(run.state.best_params),
        "negatives": n_negatives,
        "seed": options.seed,
        "all_scores": options.all_scores,
    }


def digest(params: object) -> str:
    """A hash of parameters, 16 hexadecimal digits."""
    from funcppo.core import tree

    digest = hashlib.sha256()
    for leaf in tree.leaves(params):
        digest.update(leaf.numpy(force=True).tobytes())
    return digest.hexdigest()[:16]


# -- an evaluation that several processes share


def check_same_setup(
    processes: Processes, setup: EvaluationSetup, device: str
) -> None:
    """Check that all processes rank the same data with the same scores on the same kind of GPU.

    Raises:
      ValueError: one does not; the message names it.
    """
    gpu = distributed.gpu_facts(device)
    processes.check_equal("setup", setup.log_settings | gpu)


def iter_shared_queries(
    processes: Processes,
    setup: EvaluationSetup,
    split: np.ndarray,
    rows: np.ndarray,
    is_done: Collection[int],
    on_ranked: Callable[[list[Record]], object] = lambda records: None,
) -> Iterator[list[Record]]:
    """Rank the windows that this process takes; on rank 0, yield the records of all queries in the order of `rows`.

    What the other processes counted and noted is added to the setup.

    Args:
      split: atoms [n, W].
      rows: of all queries of the evaluation.
      is_done: rows of the queries that have records already, which are not yielded again.
      on_ranked: receives the records of each query that this process has ranked.
    """
    import numpy as np

    from funcppo.kg.ranking import evaluator as evaluation
    from funcppo.kg.ranking.policy_score import graph_fallback_notes
    from funcppo.runtime import memory

    # A window is ranked whole, so that its records do not depend on what is done.
    done = np.array(sorted(is_done), dtype=rows.dtype)
    windows = [
        window
        for window in evaluation.plan_windows(setup.evaluator, split, rows)
        if not np.isin(window, done).all()
    ]

    def rank(task: int) -> bytes:
        before = setup.search_stats.counts()
        records = evaluation.rank_window(setup.evaluator, split, windows[task])
        for query in records:
            on_ranked(query)
        after = setup.search_stats.counts()
        stats = {name: after[name] - before[name] for name in after}
        result = {
            "rank": processes.rank,
            "records": records,
            "stats": stats,
            "notes": graph_fallback_notes(setup.search_step),
            "peak_bytes": memory.peak_bytes(setup.device),
        }
        return json.dumps(result, ensure_ascii=False).encode()

    for block in processes.iter_results("window", len(windows), rank):
        result = json.loads(block)
        if result["rank"] != processes.rank:
            _add_result(setup, result)
        for records in result["records"]:
            if records[0]["query_row"] not in is_done:
                yield records


def _add_result(setup: EvaluationSetup, result: JsonObject) -> None:
    """Add what another process counted and noted."""
    setup.search_stats.add_counts(result["stats"])
    for note in result["notes"]:
        line = f"rank {result['rank']}: {note}"
        if line not in setup.notes:
            setup.notes.append(line)
    setup.peer_peak_bytes.append(result["peak_bytes"])
