"""Time and memory of a run: how they are divided, and which bounds of its work follow from them.

The work of a phase is planned before it starts, from what its parts are known or measured to take; what does not fit is
sampled or left out, and a note counts it. Sizes are settings of the run, which a resumed run keeps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple, TypeVar

from funcppo.config import PPOConfig
from funcppo.core.host import NO_DEADLINE, Clock, Deadline
from funcppo.core.settings import is_cuda
from funcppo.kg.config import (
    EMBEDDING_SECONDS,
    LISTING_SECONDS,
    MAX_FIRINGS,
    MAX_LISTWISE_STEPS,
    MAX_VALID_FIRINGS,
    N_NETWORK_STEPS,
    NETWORK_SECONDS,
    BellmanFordConfig,
    EmbeddingConfig,
    ListwiseConfig,
    Note,
    QuestionConfig,
    RunConfig,
    batch_size,
)
from funcppo.kg.logic.derive import GPU_CHUNK_FACTOR
from funcppo.kg.logic.row_index import unique_values
from funcppo.kg.scores import evidence, learned, path_network
from funcppo.kg.scores.learned import (
    AggregationConfig,
    Capacity,
    PolicyConfig,
    QuestionWorld,
)
from funcppo.kg.search.task import PhaseCallback, ProverTask, ignore_phase
from funcppo.runtime import memory

Group = TypeVar(
    "Group", QuestionConfig, ListwiseConfig, EmbeddingConfig, BellmanFordConfig
)

# of a firing, with what is computed from it, twice
BYTES_PER_FIRING = 200
# What the phases take at most beside the data, where all parts have their largest size: a chunk of firings beside the
# evidence of the questions, or T_P with its derivations.
LARGEST_PARTS_BYTES = 3_000_000_000
# With smaller parts a run would take too long.
MIN_SHARE = 0.05
# weighed firings of PPO in a run whose steps are not set, about a minute or two on one core
MAX_PPO_FIRINGS = 6e8
# firings that PPO weighs, and whose gradients the listwise fit takes, in a second of one core
PPO_FIRINGS_PER_SECOND = 5e6
GRADIENTS_PER_SECOND = 8e5
# weights that an optimizer step moves in the time that the gradient of a firing takes
WEIGHTS_PER_GRADIENT = 40


class Choice(NamedTuple):
    """Stage of a run that valid decided: a row of `choices` in results.json."""

    stage: str
    chosen: str  # the label of what is kept
    is_kept: bool  # something else than the simpler way
    seconds: float
    valid_before: float  # the metric of the simpler way on valid
    valid_after: float  # that of what is kept
    standard_error: float | None  # of the best gain, queries paired
    tried: dict[str, float]  # the metric of each way, the simpler one first


class RunTime:
    """Time of a run with what its phases took, chose and left out.

    Attributes:
      seconds: in all; infinity for no bound.
      on_phase: receives what is being done.
      phases: seconds of each phase that has ended, in order.
      phase_start: when the last phase ended, on the clock.
      peak_bytes: the most memory of the process, or of the GPU, by the end of each phase.
      choices: what valid decided, in order.
      notes: what was chosen by other means or left out.
    """

    # The share of the time that is over when a phase should end, those before it included.
    MINING = 0.4
    CHOICE = 0.54
    VALID = 0.58
    QUESTIONS = 0.67
    FIT = 0.76
    EMBEDDING = 0.82
    PPO = 0.9
    TEST = 0.95  # the rest is for what is printed and written
    SHARES = (MINING, CHOICE, VALID, QUESTIONS, FIT, EMBEDDING, PPO, TEST)

    def __init__(
        self,
        seconds: float | None = None,
        clock: Clock = time.monotonic,
        device: str = "cpu",
        on_phase: PhaseCallback = ignore_phase,
    ) -> None:
        """Start the clock of the run.

        Args:
          seconds: in all; None for no bound.
          device: whose memory is measured.
        """
        self.seconds = math.inf if seconds is None else seconds
        self.on_phase = on_phase
        self.phases: dict[str, float] = {}
        self.peak_bytes: dict[str, int] = {}
        self.choices: list[Choice] = []
        self.notes: list[Note] = []
        self._clock = clock
        self._device = device
        self._start = self.phase_start = clock()

    def until(self, share: float, *, is_set: bool = False) -> Deadline:
        """Return the deadline of a phase; a phase that begins late gets at least its usual part of the time left.

        Args:
          share: of the phase, one of the above.
          is_set: the user has set the work of the phase, which no time ends.
        """
        if is_set:
            return NO_DEADLINE
        before = max(s for s in (0.0, *self.SHARES) if s < share)
        part = (share - before) / (1.0 - before)
        in_time = Deadline(
            at=self._start + share * self.seconds, clock=self._clock
        )
        end = replace(in_time, at=self._start + self.seconds)
        late = end.share(part)
        return max(in_time, late, key=lambda deadline: deadline.at)

    def end_phase(self, name: str, *, is_set: bool = False) -> None:
        """Record the seconds and peak memory of the phase that ends now.

        Args:
          is_set: the user has set the work of the phase, which therefore does not count.
        """
        now = self._clock()
        seconds = now - self.phase_start
        self.phases[name] = self.phases.get(name, 0.0) + seconds
        self.peak_bytes[name] = memory.peak_bytes(self._device)
        self.phase_start = now
        if is_set:
            self._start += seconds

    def note_cut(self, text: str) -> None:
        """Add a note on what was left out for time or memory."""
        self.notes.append(Note("cut", text))

    def note(self, text: str) -> None:
        """Add a note on a detail, for results.json and a verbose screen."""
        self.notes.append(Note("detail", text))


# -- settings by time and memory


def time_factor(seconds: float | None) -> float:
    """Return the run's time in units of the default, at least 1; 1 without a limit."""
    base = 300.0  # the default time of a run, which the bounds are for
    return max(1.0, (seconds or base) / base)


def plan_settings(
    run_config: RunConfig, n_triples: int, limit: int | None
) -> tuple[RunConfig, list[Note]]:
    """Fill the bounds that the user left open, from the run's time and spare memory, and shrink what would not fit.

    Args:
      n_triples: of the data set.
      limit: of the process, or of the GPU, in bytes; None for no limit.

    Raises:
      ValueError: the memory does not suffice.
    """
    device = run_config.device
    if limit is None:
        return _with_time_bounds(run_config, math.inf), []
    spare = limit - sum(_needed_bytes(n_triples, device))
    run_config = _with_time_bounds(run_config, spare)
    share = memory_share(limit, n_triples, device)
    notes: list[Note] = []
    if not memory.enforces_limits(device):
        note = "--memory: kept by the sizes of parts alone; only Linux ends a process that is about to exceed it"
        notes.append(Note("detail", note))
    if share == 1.0:
        return run_config, notes

    prover, questions = run_config.prover, run_config.questions
    listwise = run_config.listwise

    def part(size: int) -> int:
        return max(1, int(share * size))

    prover = replace(
        prover,
        memory_share=share * prover.memory_share,
        max_atoms=part(prover.max_atoms),
    )
    max_firings = part(questions.max_firings or MAX_FIRINGS)
    questions = replace(questions, max_firings=max_firings)
    listwise = replace(
        listwise, max_batch_firings=part(listwise.max_batch_firings)
    )
    note = (
        f"memory: {limit / 1e9:.2f} GB hold parts of {share:.0%} of their largest size: T_P of {prover.max_atoms:,} "
        f"atoms, training questions of {max_firings:,} firings, batches of {listwise.max_batch_firings:,} firings"
    )
    notes.append(Note("cut", note))
    return replace(
        run_config, prover=prover, questions=questions, listwise=listwise
    ), notes


def _with_time_bounds(run_config: RunConfig, spare_bytes: float) -> RunConfig:
    """Fill every bound that the user left open, from the run's time and spare memory; return the settings.

    Args:
      spare_bytes: memory that more firings than the usual ones may take.
    """
    factor = time_factor(run_config.seconds)
    # In whole units: what is free differs a little from run to run.
    spare = spare_bytes / (MAX_FIRINGS * BYTES_PER_FIRING)
    if math.isfinite(spare):
        spare = math.floor(max(spare, 0.0))
    of_firings = min(factor, 1 + spare)
    of_valid = max(work_factor(run_config.device), of_firings)
    return replace(
        run_config,
        questions=_fill(
            run_config.questions,
            seconds=factor * LISTING_SECONDS,
            max_firings=int(MAX_FIRINGS * of_firings),
            max_valid_firings=int(MAX_VALID_FIRINGS * of_valid),
            bellman_ford="auto" if factor > 1 else False,
        ),
        listwise=_fill(
            run_config.listwise, max_steps=int(factor * MAX_LISTWISE_STEPS)
        ),
        embedding=_fill(
            run_config.embedding, seconds=factor * EMBEDDING_SECONDS
        ),
        bellman_ford=_fill(
            run_config.bellman_ford,
            n_steps=int(factor * N_NETWORK_STEPS),
            seconds=factor * NETWORK_SECONDS,
        ),
    )


def _fill(cfg: Group, **values: object) -> Group:
    """Return the settings with values in place of fields that are None."""
    open_ = {
        name: value
        for name, value in values.items()
        if getattr(cfg, name) is None
    }
    return replace(cfg, **open_)


def memory_share(limit: int, n_triples: int, device: str) -> float:
    """Return the share of their largest size at which a run's parts fit into a memory limit in bytes, at most 1.

    Raises:
      ValueError: the memory does not suffice.
    """
    held, largest = _needed_bytes(n_triples, device)
    share = (limit - held) / largest
    if share < MIN_SHARE:
        needed = held + int(MIN_SHARE * largest) + 1
        purpose = f", to train on {n_triples:,} triples" if n_triples else ""
        raise ValueError(
            f"--memory {limit}: expected at least {needed} bytes{purpose}"
        )
    # In steps: what is free differs a little from run to run.
    return min(math.floor(share / MIN_SHARE + 1e-9) * MIN_SHARE, 1.0)


def _needed_bytes(n_triples: int, device: str) -> tuple[int, int]:
    """Estimate the bytes that a run holds all the time, and those that its largest parts take."""
    # PyTorch and the program, and the triples with their indexes while they are built
    held = 600_000_000 + 900 * n_triples
    factor = GPU_CHUNK_FACTOR if is_cuda(device) else 1
    return held, LARGEST_PARTS_BYTES * factor


@contextmanager
def within_memory(limit: int | None, device: str) -> Iterator[None]:
    """Limit this process's memory inside the block; None for no limit.

    Raises:
      ValueError: no run fits into it.
    """
    if limit is not None:
        memory_share(limit, 0, device)
    with memory.limit_memory(limit, device):
        yield


def work_factor(device: str) -> int:
    """Return how many times more work than a CPU core a device does in the same time."""
    return 16 if is_cuda(device) else 1


# -- the listwise fit and PPO


def batch_firings(n_questions: int, size: Capacity) -> int:
    """Return the size of a padded batch of questions in firings, with candidates and links counted by their memory."""
    # Two links take the memory of a firing.
    of_question = size.n_candidates + size.n_firings + size.n_links // 2
    return n_questions * of_question


def split_minibatches(
    ppo: PPOConfig, size: Capacity, max_firings: int
) -> PPOConfig:
    """Return PPO's settings with gradients accumulated over parts of a minibatch that would not fit.

    Args:
      size: of the questions.
      max_firings: of a batch.
    """
    n_rows = ppo.n_envs * ppo.n_steps // ppo.n_minibatches
    n_parts = ppo.n_microbatches
    while batch_firings(n_rows // n_parts, size) > max_firings:
        if n_rows % (2 * n_parts * ppo.n_shards):
            break
        n_parts *= 2
    return replace(ppo, n_microbatches=n_parts)


def plan_fit(
    cfg: ListwiseConfig,
    policy: PolicyConfig,
    world: QuestionWorld,
    degrees: Sequence[bool],
    seconds: float = math.inf,
    metric_seconds: float = 0.0,
    time_factor: float = 1.0,
) -> tuple[int, tuple[bool, ...], list[Note]]:
    """Choose the epochs of a listwise fit, at least one, and whether to try degrees, within the bounds.

    Args:
      degrees: whether to weigh degrees, each value to try if there is time.
      seconds: of the fits with all their validations.
      metric_seconds: of one validation.
      time_factor: how many times the usual gradients to take where their number is not set.

    Returns:
      The epochs; whether to weigh degrees, each value to try; and notes on what is left out.
    """
    n_steps = len(world.question)
    n_steps = max(1, n_steps // batch_size(cfg, n_steps))
    max_steps = cfg.max_steps or MAX_LISTWISE_STEPS
    # The learning rate does not fall in the first epoch, as it must in a fit of one.
    min_epochs = min(2, cfg.n_epochs) if cfg.learning_rate else 1
    work = work_factor(world.question.device.type)
    # Some two minutes of one core, firings and links of all fits together, if no bound is set.
    budget = cfg.max_gradients or time_factor * work * 1e8
    notes: list[Note] = []

    n_wanted = min(cfg.n_epochs, max(min_epochs, max_steps // n_steps))
    n_moved = n_wanted * n_steps * _n_weights(policy.aggregation, True)
    if len(degrees) > 1 and n_moved > budget / 2 * WEIGHTS_PER_GRADIENT:
        note = "degrees are not weighed: a fit of their weights would take too long (questions.degrees=on weighs them)"
        notes.append(Note("cut", note))
        degrees = (False,)

    cost = sum(
        _epoch_cost(policy, world, n_steps, uses_degrees)
        for uses_degrees in degrees
    )
    epoch_seconds = cost / (work * GRADIENTS_PER_SECOND)
    epoch_seconds += len(degrees) * metric_seconds
    n_epochs, reason = cfg.n_epochs, ""
    for most, bound in (
        (
            max_steps // n_steps,
            f"{max_steps:,} gradient steps (listwise.max_steps)",
        ),
        (
            budget / max(cost, 1),
            f"the time of {budget:.0e} gradients of firings (listwise.max_gradients)",
        ),
        (
            seconds / max(epoch_seconds, 1e-9),
            f"{seconds:.0f} seconds, all that is left for it (--seconds)",
        ),
    ):
        if most < n_epochs:
            n_epochs, reason = max(min_epochs, int(most)), bound
    if reason:
        note = f"listwise fit: {n_epochs} of {cfg.n_epochs} epochs, because more would take over {reason}"
        notes.append(Note("cut", note))
    return n_epochs, tuple(degrees), notes


def _epoch_cost(
    policy: PolicyConfig, world: QuestionWorld, n_steps: int, uses_degrees: bool
) -> float:
    """Estimate the cost of an epoch of a fit, in gradients of firings."""
    _, n_firings, n_links = learned.question_sizes(
        world.evidence, world.question
    )
    n_weights = _n_weights(policy.aggregation, uses_degrees)
    n_moved = n_steps * n_weights / WEIGHTS_PER_GRADIENT
    return n_moved + int(n_firings.sum() + n_links.sum())


def n_updates_within(
    ppo: PPOConfig,
    policy: PolicyConfig,
    device: str,
    seconds: float = math.inf,
) -> int:
    """Return how many updates of PPO, at least one, cost at most `MAX_PPO_FIRINGS` on a CPU and fit the seconds."""
    gradient_cost = 3  # of a firing, in forward passes
    n_passes = 1 + gradient_cost * ppo.n_epochs
    n_questions = ppo.n_envs * ppo.n_steps * n_passes
    size = policy.capacity

    # Batches are padded. Links are cheaper than firings, and cost time where they are the most.
    cost = n_questions * max(size.n_firings, size.n_links)
    n_steps = ppo.n_epochs * ppo.n_minibatches * ppo.n_microbatches
    weights = policy.aggregation
    n_moved = n_steps * _n_weights(weights, weights.uses_degrees)
    cost += (1 + gradient_cost) * n_moved // WEIGHTS_PER_GRADIENT
    most = min(MAX_PPO_FIRINGS, PPO_FIRINGS_PER_SECOND * seconds)
    return max(1, int(work_factor(device) * most / cost))


def _n_weights(cfg: AggregationConfig, uses_degrees: bool) -> int:
    """Return the number of weights that grow with the square of the number of relations."""
    n_labels = learned.n_labels(cfg.sizes)
    per_label = n_labels * (1 + learned.N_BUCKETS * uses_degrees)
    return n_labels * per_label


# -- priors


def plan_embedding(
    task: ProverTask, cfg: EmbeddingConfig, device: str, seconds: float
) -> int:
    """Return how many passes over the facts link embeddings have time for; 0 if too few to gain."""
    n_links = 2 * len(evidence.binary_facts(task.kb))
    n_rows = min(cfg.batch_size, max(n_links, 1))
    n_steps = max(1, n_links // n_rows)
    n_entities, n_labels = task.sizes.n_constants, evidence.n_labels(task.sizes)
    width = 2 * cfg.rank * (cfg.n_folds + 1)

    # For each number of a vector: products of the logits and of their gradient, and what a step looks up and moves.
    operations = 3 * n_rows * n_entities
    operations += 100 * n_rows + 20 * (n_entities + n_labels)
    # Operations in a second, beside 3 ms of a step that does next to nothing. On an H100 WN18RR and FB15k-237 with
    # vectors of rank 256 took 1.5e13 and 1.4e13 (phases of `experiments/results/tuned_results.json`).
    speed = 1e13 if is_cuda(device) else 3e9
    per_epoch = n_steps * (3e-3 + operations * width / speed)
    n_epochs = max(1, int(min(cfg.n_epochs, seconds / per_epoch)))
    # With fewer than eight there is little to gain.
    return n_epochs if n_epochs >= min(8, cfg.n_epochs) else 0


def plan_bellman_ford(
    task: ProverTask,
    cfg: BellmanFordConfig,
    n_questions: int,
    device: str,
    seconds: float,
) -> tuple[int, float]:
    """Return how many steps a Bellman-Ford network has time for, 0 if too few to gain, and the seconds that they take.

    Args:
      n_questions: whose candidates are given priors before anything is gained.
    """
    facts = evidence.binary_facts(task.kb)
    n_labels = evidence.n_labels(task.sizes)
    sizes = path_network.network_config(cfg, task.sizes.n_constants, n_labels)
    # Operations in a second, measured on one CPU core and on an H200, whose kernel keeps nothing of a source.
    n_sources, speed = 0, 4e11
    if not is_cuda(device):
        predicate, head, tail = facts.unbind(1)
        keys = (
            predicate * (sizes.n_entities + 1) + end for end in (head, tail)
        )
        n_sources, speed = sum(len(unique_values(key)) for key in keys), 2.5e9
    # of a source, of an edge, of an entity, and of a label for each number of the state
    of_layer = 3 * n_sources + 2 * len(facts) + 24 * sizes.n_entities
    of_layer += 0.1 * sizes.width * sizes.n_labels
    per_question = sizes.n_layers * sizes.width * of_layer / speed

    # A gradient takes three passes beside layers that do next to nothing, and a prior two, in float64.
    n_together = min(cfg.batch_size, max(1, 2 * len(facts)))
    per_step = 3 * (cfg.n_layers * 1e-3 + n_together * per_question)
    of_priors = 2 * n_questions * per_question
    wanted = cfg.n_steps or N_NETWORK_STEPS
    most = min(wanted, (seconds - of_priors) / per_step)
    n_steps = max(1, int(most))
    # With fewer than 200 there is little to gain.
    is_enough = most >= min(200, wanted)
    return n_steps * is_enough, n_steps * per_step + of_priors
