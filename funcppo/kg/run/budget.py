"""The time and the memory of a run: how they are divided, and which bounds of its work follow from them.

The work of a phase is planned before it starts, from what its parts are known or measured to take; what does not fit is
sampled or left out, and a note counts it. Sizes are settings of the run, which a resumed run keeps.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from funcppo.config import PPOConfig
from funcppo.core.deadline import Clock, Deadline
from funcppo.core.settings import is_cuda
from funcppo.kg.logic.derive import GPU_CHUNK_FACTOR
from funcppo.kg.run.config import Note, RunConfig
from funcppo.kg.scores import aggregation
from funcppo.kg.scores.aggregation import AggregationConfig, Capacity
from funcppo.kg.scores.question_config import (
    EMBEDDING_SECONDS,
    LISTING_SECONDS,
    MAX_FIRINGS,
    MAX_LISTWISE_STEPS,
    MAX_VALID_FIRINGS,
    N_NETWORK_STEPS,
    NETWORK_SECONDS,
    ListwiseConfig,
    batch_size,
)
from funcppo.kg.scores.questions import PolicyConfig, QuestionWorld
from funcppo.runtime import memory

# of a firing, with what is computed from it, twice
BYTES_PER_FIRING = 200
# PyTorch and the program
BASE_BYTES = 600_000_000
# of the triples with their indexes, while they are built
BYTES_PER_TRIPLE = 900
# What the phases take at most beside these, where all parts have their largest size: a chunk of firings beside the
# evidence of the questions, or T_P with its derivations.
LARGEST_PARTS_BYTES = 3_000_000_000
# With smaller parts a run would take too long.
MIN_SHARE = 0.05
# firings and links whose gradients the listwise fits take together if no bound is set, some two minutes on one core
MAX_FIT_FIRINGS = 1e8
# weighed firings of PPO in a run whose steps are not set, about a minute or two on one core
MAX_PPO_FIRINGS = 6e8
# how much more of both, and of the evidence of a validation, a GPU does in the same time
GPU_FACTOR = 16
# firings that PPO weighs, and whose gradients the listwise fit takes, in a second of one core
PPO_FIRINGS_PER_SECOND = 5e6
GRADIENTS_PER_SECOND = 8e5
# what the gradient of a firing costs, in forward passes
GRADIENT_COST = 3
# weights that an optimizer step moves in the time that the gradient of a firing takes
WEIGHTS_PER_GRADIENT = 40


class RunTime:
    """The time of a run, and what its phases took.

    Attributes:
      seconds: in all; infinity for no bound.
      phases: seconds of each phase that has ended, in order.
      peak_bytes: the most memory of the process, or of the GPU, by the end of each phase.
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
        seconds: float | None,
        clock: Clock = time.monotonic,
        device: str = "cpu",
    ) -> None:
        """Begin the time.

        Args:
          seconds: in all; None for no bound.
          device: whose memory is measured.
        """
        self.seconds = math.inf if seconds is None else seconds
        self.phases: dict[str, float] = {}
        self.peak_bytes: dict[str, int] = {}
        self._clock = clock
        self._device = device
        self._start = self._last = clock()

    def until(self, share: float) -> Deadline:
        """The moment when a phase should end; one that begins late has the same part of what is left, at least.

        Args:
          share: of the phase, one of the above.
        """
        before = max(s for s in (0.0, *self.SHARES) if s < share)
        part = (share - before) / (1.0 - before)
        in_time = Deadline(
            at=self._start + share * self.seconds, clock=self._clock
        )
        end = replace(in_time, at=self._start + self.seconds)
        late = end.share(part)
        return max(in_time, late, key=lambda deadline: deadline.at)

    def end_phase(self, name: str, *, is_set: bool = False) -> None:
        """Record the seconds since the last phase ended.

        Args:
          is_set: the user has set the work of the phase, which therefore does not count.
        """
        now = self._clock()
        seconds = now - self._last
        self.phases[name] = self.phases.get(name, 0.0) + seconds
        self.peak_bytes[name] = memory.peak_bytes(self._device)
        self._last = now
        if is_set:
            self._start += seconds


# -- settings by time and memory


def time_factor(seconds: float | None) -> float:
    """The time of a run in units of the default, at least 1.

    Args:
      seconds: of the run; None for no limit, which counts as the default.
    """
    base = 300.0  # the default time of a run, which the bounds are for
    return max(1.0, (seconds or base) / base)


def with_time_bounds(run_config: RunConfig, spare_bytes: float) -> RunConfig:
    """The settings with the bounds that are not set.

    Args:
      spare_bytes: memory that more firings than the usual ones may take.
    """
    factor = time_factor(run_config.seconds)
    # In whole units: what is free differs a little from run to run.
    spare = spare_bytes / (MAX_FIRINGS * BYTES_PER_FIRING)
    if math.isfinite(spare):
        spare = math.floor(max(spare, 0.0))
    of_firings = min(factor, 1 + spare)
    max_firings = int(MAX_FIRINGS * of_firings)
    work = work_factor(run_config.device)
    max_valid_firings = int(MAX_VALID_FIRINGS * max(work, of_firings))
    questions, listwise = run_config.questions, run_config.listwise
    embedding, network = run_config.embedding, run_config.bellman_ford
    is_network_tried = questions.bellman_ford
    if is_network_tried is None:
        is_network_tried = "auto" if factor > 1 else False
    return dataclasses.replace(
        run_config,
        questions=dataclasses.replace(
            questions,
            seconds=questions.seconds or factor * LISTING_SECONDS,
            max_firings=questions.max_firings or max_firings,
            max_valid_firings=questions.max_valid_firings or max_valid_firings,
            bellman_ford=is_network_tried,
        ),
        listwise=dataclasses.replace(
            listwise,
            max_steps=listwise.max_steps or int(factor * MAX_LISTWISE_STEPS),
        ),
        embedding=dataclasses.replace(
            embedding, seconds=embedding.seconds or factor * EMBEDDING_SECONDS
        ),
        bellman_ford=dataclasses.replace(
            network,
            n_steps=network.n_steps or int(factor * N_NETWORK_STEPS),
            seconds=network.seconds or factor * NETWORK_SECONDS,
        ),
    )


def memory_share(limit: int, n_triples: int, device: str) -> float:
    """The share of the largest parts that fits into the memory.

    Args:
      limit: of the process, or of the GPU, in bytes.
      n_triples: of the data set.

    Raises:
      ValueError: the memory does not suffice.
    """
    held, largest = _needed_bytes(n_triples, device)
    share = (limit - held) / largest
    if share < MIN_SHARE:
        needed = held + int(MIN_SHARE * largest) + 1
        raise ValueError(
            f"--memory {limit}: expected at least {needed} bytes"
            + (f", to train on {n_triples:,} triples" if n_triples else "")
        )
    # In steps: what is free differs a little from run to run.
    return min(math.floor(share / MIN_SHARE + 1e-9) * MIN_SHARE, 1.0)


def _needed_bytes(n_triples: int, device: str) -> tuple[int, int]:
    """What a run holds all the time, and what its largest parts take."""
    held = BASE_BYTES + n_triples * BYTES_PER_TRIPLE
    return held, LARGEST_PARTS_BYTES * (
        GPU_CHUNK_FACTOR if is_cuda(device) else 1
    )


@contextmanager
def within_memory(limit: int | None, device: str) -> Iterator[None]:
    """Let this process allocate no more than a run may take meanwhile; None for no limit.

    Raises:
      ValueError: no run fits into it.
    """
    if limit is not None:
        memory_share(limit, 0, device)
    with memory.limit_memory(limit, device):
        yield


def plan_settings(
    run_config: RunConfig, n_triples: int, limit: int | None
) -> tuple[RunConfig, tuple[Note, ...]]:
    """The settings with the bounds that are not set, and with smaller parts where these would not fit.

    Args:
      n_triples: of the data set.
      limit: of the process, or of the GPU, in bytes; None for no limit.

    Raises:
      ValueError: the memory does not suffice.
    """
    if limit is None:
        run_config = with_time_bounds(run_config, math.inf)
        return run_config, ()
    needed = _needed_bytes(n_triples, run_config.device)
    run_config = with_time_bounds(run_config, limit - sum(needed))
    share = memory_share(limit, n_triples, run_config.device)
    notes: tuple[Note, ...] = ()
    if not memory.enforces_limits(run_config.device):
        note = "--memory: kept by the sizes of parts alone; only Linux ends a process that is about to exceed it"
        notes = (Note("detail", note),)
    if share == 1.0:
        return run_config, notes

    prover, questions = run_config.prover, run_config.questions
    listwise = run_config.listwise
    prover = dataclasses.replace(
        prover,
        memory_share=share * prover.memory_share,
        max_atoms=max(1, int(share * prover.max_atoms)),
    )
    assert questions.max_firings is not None, "bounds are set above"
    questions = dataclasses.replace(
        questions, max_firings=max(1, int(share * questions.max_firings))
    )
    listwise = dataclasses.replace(
        listwise,
        max_batch_firings=max(1, int(share * listwise.max_batch_firings)),
    )
    run_config = dataclasses.replace(
        run_config, prover=prover, questions=questions, listwise=listwise
    )
    note = (
        f"memory: {limit / 1e9:.2f} GB hold parts of {share:.0%} of their largest size: T_P of {prover.max_atoms:,} "
        f"atoms, training questions of {questions.max_firings:,} firings, batches of "
        f"{listwise.max_batch_firings:,} firings"
    )
    return run_config, (*notes, Note("cut", note))


def batch_firings(n_questions: int, size: Capacity) -> int:
    """The firings of a padded batch of questions; links and candidates counted by their memory."""
    # Two links take the memory of a firing.
    of_question = size.n_candidates + size.n_firings + size.n_links // 2
    return n_questions * of_question


def split_minibatches(
    ppo: PPOConfig, size: Capacity, max_firings: int
) -> tuple[PPOConfig, list[Note]]:
    """PPO with gradients accumulated over parts of a minibatch where it would not fit; a note if it is split.

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
    if n_parts == ppo.n_microbatches:
        return ppo, []
    note = (
        f"PPO: a minibatch of {n_rows} questions is computed in {n_parts} parts: at once it would hold "
        f"{batch_firings(n_rows, size):,} firings"
    )
    return dataclasses.replace(ppo, n_microbatches=n_parts), [
        Note("detail", note)
    ]


# -- the listwise fit and PPO


def plan_fit(
    cfg: ListwiseConfig,
    policy: PolicyConfig,
    world: QuestionWorld,
    degrees: Sequence[bool],
    seconds: float = math.inf,
    metric_seconds: float = 0.0,
    time_factor: float = 1.0,
    min_epochs: int = 1,
) -> tuple[ListwiseConfig, tuple[bool, ...], list[Note]]:
    """Choose the kinds of evidence and the epochs that the bounds allow, at least one of each.

    Args:
      degrees: whether to weigh degrees, each value to try if there is time.
      seconds: of the fits with all their validations.
      metric_seconds: of one validation.
      time_factor: how many times the usual gradients to take where their number is not set.
      min_epochs: whatever the bounds; 2 where the learning rate does not fall in the first one.

    Returns:
      The settings, whether to weigh degrees, each value to try, and notes on what is left out.
    """
    size = batch_size(cfg, len(world.question))
    steps_per_epoch = max(1, len(world.question) // size)
    max_steps = cfg.max_steps or MAX_LISTWISE_STEPS
    n_epochs = min(cfg.n_epochs, max(min_epochs, max_steps // steps_per_epoch))
    reason = f"{max_steps:,} gradient steps (listwise.max_steps)"
    notes: list[Note] = []

    cost_of_steps = {
        uses_degrees: steps_per_epoch
        * _n_weights(policy.aggregation, uses_degrees)
        / WEIGHTS_PER_GRADIENT
        for uses_degrees in degrees
    }
    budget = cfg.max_gradients or (
        time_factor * work_factor(world.question.device.type) * MAX_FIT_FIRINGS
    )
    most = budget / len(degrees)
    if len(degrees) > 1 and n_epochs * cost_of_steps[True] > most:
        n_weights = _n_weights(policy.aggregation, True)
        notes.append(
            Note(
                "cut",
                f"degrees are not weighed: a fit of their {n_weights:,} weights would take too long "
                "(questions.degrees=on weighs them)",
            )
        )
        degrees = (False,)

    _, n_firings, n_links = aggregation.question_sizes(
        world.evidence, world.question
    )
    cost = sum(cost_of_steps[uses_degrees] for uses_degrees in degrees)
    cost += len(degrees) * int(n_firings.sum() + n_links.sum())
    speed = work_factor(world.question.device.type) * GRADIENTS_PER_SECOND
    epoch_seconds = cost / speed + len(degrees) * metric_seconds
    for share, bound in (
        (
            budget / max(cost, 1),
            f"the time of {budget:.0e} gradients of firings (listwise.max_gradients)",
        ),
        (
            seconds / max(epoch_seconds, 1e-9),
            f"{seconds:.0f} seconds, all that is left for it (--seconds)",
        ),
    ):
        if share < n_epochs:
            n_epochs, reason = max(min_epochs, int(share)), bound
    if n_epochs < cfg.n_epochs:
        notes.append(
            Note(
                "cut",
                f"listwise fit: {n_epochs} of {cfg.n_epochs} epochs, because more would take over {reason}",
            )
        )
    cfg = dataclasses.replace(cfg, n_epochs=n_epochs)
    return cfg, tuple(degrees), notes


def max_valid_firings(run_config: RunConfig) -> int:
    """The most firings of the queries that every validation scores."""
    if run_config.questions.max_valid_firings is not None:
        return run_config.questions.max_valid_firings
    return MAX_VALID_FIRINGS * work_factor(run_config.device)


def work_factor(device: str) -> int:
    """How many times the bounds apply on a device."""
    return GPU_FACTOR if is_cuda(device) else 1


def n_updates_within(
    ppo: PPOConfig,
    policy: PolicyConfig,
    device: str,
    seconds: float = math.inf,
) -> int:
    """How many updates of PPO cost no more than `MAX_PPO_FIRINGS` on a CPU, and take no more seconds; at least one."""
    n_passes = 1 + GRADIENT_COST * ppo.n_epochs
    n_questions = ppo.n_envs * ppo.n_steps * n_passes
    size = policy.capacity

    # Batches are padded. Links are cheaper than firings, and cost time where they are the most.
    cost = n_questions * max(size.n_firings, size.n_links)
    n_steps = ppo.n_epochs * ppo.n_minibatches * ppo.n_microbatches
    weights = policy.aggregation
    n_moved = n_steps * _n_weights(weights, weights.uses_degrees)
    cost += (1 + GRADIENT_COST) * n_moved // WEIGHTS_PER_GRADIENT
    most = min(MAX_PPO_FIRINGS, PPO_FIRINGS_PER_SECOND * seconds)
    return max(1, int(work_factor(device) * most / cost))


def _n_weights(cfg: AggregationConfig, uses_degrees: bool) -> int:
    """The number of weights that grow with the square of the relations."""
    n_labels = aggregation.n_labels(cfg.sizes)
    per_label = n_labels * (1 + aggregation.N_BUCKETS * uses_degrees)
    return n_labels * per_label
