"""Time and memory of a run: its one clock, what it has recorded, and the bounds of its work that follow from memory.

`RunTime` says how much time there is for learning: all but what the ranking of test is reserved. What costs how much is
roughly counted here, for the order of the stages in `kg.run.choices`; a stage itself ends by the clock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch

from funcppo.core.host import Clock, Deadline
from funcppo.core.settings import is_cuda
from funcppo.kg.config import (
    MAX_FIRINGS,
    MAX_VALID_FIRINGS,
    BellmanFordConfig,
    EmbeddingConfig,
    Note,
    RunConfig,
)
from funcppo.kg.logic.derive import GPU_CHUNK_FACTOR
from funcppo.kg.scores import evidence, path_network
from funcppo.kg.scores.learned import Capacity
from funcppo.kg.search.task import PhaseCallback, ProverTask, ignore_phase
from funcppo.runtime import memory

# of a firing, with what is computed from it, twice
BYTES_PER_FIRING = 200
# What the phases take at most beside the data, where all parts have their largest size: a chunk of firings beside the
# evidence of the questions, or T_P with its derivations.
LARGEST_PARTS_BYTES = 3_000_000_000
# With smaller parts a run would take too long.
MIN_SHARE = 0.05


END_SHARE = 0.2  # of the time left, that a part of the ranking of test is left


class Choice(NamedTuple):
    """Stage of a run that valid decided, or that was not begun: a row of `choices` in results.json."""

    stage: str
    chosen: str = ""  # the label of what is kept
    is_kept: bool = False  # something else than the simpler way
    seconds: float = 0.0
    planned_seconds: float | None = (
        None  # before it began; None: it was not planned
    )
    valid_before: float | None = None  # MRR of the simpler way on valid
    valid_after: float | None = None  # that of what is kept
    standard_error: float | None = (
        None  # of the gain over the simpler way, queries paired
    )
    work: str = ""  # how far what it trains came
    # the MRR of each way, the simpler one first
    tried: dict[str, float] = {}  # noqa: RUF012
    reason: str = ""  # why it was not begun; empty if it was


class RunTime:
    """Time of a run with what its phases took, chose and left out.

    Attributes:
      on_phase: receives what is being done.
      phases: seconds of each phase that has ended, in order.
      peak_bytes: the most memory of the process, or of the GPU, by the end of each phase.
      choices: what valid decided, in order.
      notes: what was chosen by other means or left out.
      work: how far what the present stage trains came; empty if nothing was said.
      reserved: seconds at the end that learning leaves to the ranking of test, by what takes them.
    """

    def __init__(
        self,
        seconds: float | None = None,
        clock: Clock = time.monotonic,
        device: str = "cpu",
        on_phase: PhaseCallback = ignore_phase,
        began: float | None = None,
    ) -> None:
        """Start the clock of the run.

        Args:
          seconds: in all; None for no bound.
          device: whose memory is measured.
          began: when the run began, by the clock; None for now.
        """
        self.on_phase = on_phase
        self.phases: dict[str, float] = {}
        self.peak_bytes: dict[str, int] = {}
        self.choices: list[Choice] = []
        self.notes: list[Note] = []
        seconds = math.inf if seconds is None else seconds
        self.reserved: dict[str, float] = {}
        if math.isfinite(seconds):
            self.reserved["printing and writing"] = 0.02 * seconds
        self.work = ""
        self._clock, self._device = clock, device
        self._phase_start = clock()
        self._began = self._phase_start if began is None else began
        if began is not None:
            self.phases["starting"] = self.seconds
        self.end = Deadline(at=self._began + seconds, clock=clock)

    def part(self, share: float = 1.0) -> Deadline:
        """Return the deadline of a share of the time that is left for learning."""
        reserved = sum(self.reserved.values())
        learning = replace(self.end, at=self.end.at - reserved)
        return learning.share(share)

    @property
    def seconds(self) -> float:
        """Return the seconds since the run began."""
        return self._clock() - self._began

    @property
    def seconds_in_phase(self) -> float:
        """Return the seconds since the last phase ended."""
        return self._clock() - self._phase_start

    def reserve(
        self, name: str, seconds: float, share: float = END_SHARE
    ) -> None:
        """Leave seconds to a part of the ranking of test, at most a share of the time left, or as many as before.

        A second is left in any case, unless it is more than half of the time left.
        """
        before = self.reserved.pop(name, 0.0)
        left = self.part().seconds_left
        if math.isfinite(left):
            most = max(share * left, min(1.0, left / 2), before)
            self.reserved[name] = min(seconds, most)

    def end_phase(self, name: str) -> float:
        """Record the seconds and peak memory of the phase that ends now; return the seconds."""
        seconds = self.seconds_in_phase
        self.phases[name] = self.phases.get(name, 0.0) + seconds
        self.peak_bytes[name] = memory.peak_bytes(self._device)
        self._phase_start += seconds
        return seconds

    def note_cut(self, text: str) -> None:
        """Add a note on what was left out for time or memory."""
        self.notes.append(Note("cut", text))

    def note(self, text: str) -> None:
        """Add a note on a detail, for results.json and a verbose screen."""
        self.notes.append(Note("detail", text))


def with_device(run_config: RunConfig) -> RunConfig:
    """Return the settings with a device in place of auto: a GPU where there is one."""
    if run_config.device != "auto":
        return run_config
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return replace(run_config, device=device)


# -- settings by time and memory


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
    max_atoms, max_firings, max_batch_firings = (
        max(1, int(share * (size or MAX_FIRINGS)))
        for size in (
            prover.max_atoms,
            questions.max_firings,
            listwise.max_batch_firings,
        )
    )
    share_left = share * prover.memory_share
    prover = replace(prover, memory_share=share_left, max_atoms=max_atoms)
    questions = replace(questions, max_firings=max_firings)
    listwise = replace(listwise, max_batch_firings=max_batch_firings)
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
    of_device = work_factor(run_config.device)
    # The bounds are for 300 seconds, the default time of a run.
    of_time = max(1.0, (run_config.seconds or 300.0) / 300.0, of_device)
    # In whole units: what is free differs a little from run to run.
    spare = max(spare_bytes, 0.0) / (MAX_FIRINGS * BYTES_PER_FIRING)
    of_firings = min(of_time, 1 + spare // 1)
    of_valid = max(of_device, of_firings)
    questions = run_config.questions
    questions = replace(
        questions,
        max_firings=questions.max_firings or int(MAX_FIRINGS * of_firings),
        max_valid_firings=questions.max_valid_firings
        or int(MAX_VALID_FIRINGS * of_valid),
    )
    return replace(run_config, questions=questions)


def work_factor(device: str) -> int:
    """Return how much more work than a core a device does in the same time."""
    return 16 if is_cuda(device) else 1


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


# -- rough costs


def batch_firings(n_questions: int, size: Capacity) -> int:
    """Return the size of a padded batch of questions in firings, with candidates and links counted by their memory."""
    # Two links take the memory of a firing.
    of_question = size.n_candidates + size.n_firings + size.n_links // 2
    return n_questions * of_question


def slow_step_seconds(
    task: ProverTask, cfg: EmbeddingConfig | BellmanFordConfig
) -> float:
    """Count roughly the seconds of a step of link embeddings or of a path network on a CPU core.

    It tells whether to time a step at all, which nothing can end.
    """
    facts = evidence.binary_facts(task.kb)
    n_entities, n_labels = task.sizes.n_constants, evidence.n_labels(task.sizes)
    n_rows = min(cfg.batch_size, max(2 * len(facts), 1))
    if isinstance(cfg, EmbeddingConfig):
        width = 2 * cfg.rank * (cfg.n_folds + 1)
        operations = 3 * n_rows * n_entities + 100 * n_rows
        return (operations + 20 * (n_entities + n_labels)) * width / 3e9
    sizes = path_network.network_config(cfg, n_entities, n_labels)
    graph = path_network.build_graph(sizes, facts, "fact")
    listed = path_network.count_messages(sizes, graph) * cfg.width
    seconds = seconds_without_messages(task, cfg)
    return seconds + n_rows * 25 * listed / 1e9


def seconds_without_messages(task: ProverTask, cfg: BellmanFordConfig) -> float:
    """Count the seconds of a step of a path network but for its messages, whose count takes time itself."""
    n_facts = len(evidence.binary_facts(task.kb))
    n_rows = min(cfg.batch_size, max(2 * n_facts, 1))
    of_labels = cfg.n_layers * evidence.n_labels(task.sizes) * cfg.width**2
    return n_rows * (100 * task.sizes.n_constants + 2 * of_labels) / 1e9
