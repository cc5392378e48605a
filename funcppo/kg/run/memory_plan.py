"""How large the parts are in which a run computes, by the memory that it may take.

They are settings of the run, which a resumed run keeps, and depend on the limit and the size of the data alone: two
runs with the same limit compute the same.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from funcppo.config import PPOConfig
from funcppo.core.settings import is_cuda
from funcppo.kg.logic.firing_chunks import GPU_CHUNK_FACTOR
from funcppo.kg.run import time_bounds
from funcppo.kg.run.config import Note, RunConfig
from funcppo.kg.scores.aggregation import Capacity
from funcppo.runtime import memory

# PyTorch and the program
BASE_BYTES = 600_000_000
# of the triples with their indexes, while they are built
BYTES_PER_TRIPLE = 900
# What the phases take at most beside these, where all parts have their largest size: a chunk of firings beside the
# evidence of the questions, or T_P with its derivations.
LARGEST_PARTS_BYTES = 3_000_000_000
# With smaller parts a run would take too long.
MIN_SHARE = 0.05
# links that take the memory of a firing in a batch
LINKS_PER_FIRING = 2
UNENFORCED_NOTE = "--memory: kept by the sizes of parts alone; only Linux ends a process that is about to exceed it"


class PlannedSettings(NamedTuple):
    """Settings whose parts fit the memory."""

    run_config: RunConfig
    notes: tuple[Note, ...]  # which sizes are smaller than usual, and more


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
) -> PlannedSettings:
    """The settings with the bounds that are not set, and with smaller parts where these would not fit.

    Args:
      n_triples: of the data set.
      limit: of the process, or of the GPU, in bytes; None for no limit.

    Raises:
      ValueError: the memory does not suffice.
    """
    if limit is None:
        run_config = time_bounds.with_time_bounds(run_config, math.inf)
        return PlannedSettings(run_config, ())
    needed = _needed_bytes(n_triples, run_config.device)
    run_config = time_bounds.with_time_bounds(run_config, limit - sum(needed))
    share = memory_share(limit, n_triples, run_config.device)
    notes: tuple[Note, ...] = ()
    if not memory.enforces_limits(run_config.device):
        notes = (Note("detail", UNENFORCED_NOTE),)
    if share == 1.0:
        return PlannedSettings(run_config, notes)

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
    return PlannedSettings(run_config, (*notes, Note("cut", note)))


def batch_firings(n_questions: int, size: Capacity) -> int:
    """The firings of a padded batch of questions; links and candidates counted by their memory."""
    of_question = size.n_candidates + size.n_firings
    return n_questions * (of_question + size.n_links // LINKS_PER_FIRING)


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
