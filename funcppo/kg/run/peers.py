"""The processes that share the training of one run: each makes the updates of some shards, rank 0 does all else.

Rank 0 reads the data, chooses the settings, fits the weights that PPO starts from, validates, writes and prints. It
tells the others after each update whether the state is gathered for a checkpoint, and whether another update follows.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import count
from typing import Protocol

import torch

from funcppo import train_step
from funcppo.config import Config
from funcppo.kg.run.run import Run
from funcppo.runtime import collectives, distributed
from funcppo.runtime.agreement import Agree
from funcppo.runtime.capture import CapturedStep
from funcppo.runtime.collectives import Group
from funcppo.runtime.compile import StrategyRecord, choices
from funcppo.runtime.distributed import Processes
from funcppo.train_step import Metrics, TrainState


class PrepareStep(Protocol):
    """Compiles and captures a training step; what it tries is agreed on."""

    def __call__(
        self, *, agree: Agree
    ) -> tuple[CapturedStep[TrainState, Metrics], StrategyRecord]:
        """The step, and how it is computed."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Peers:
    """This process among those that share a run."""

    group: Group
    _decisions: count[int] = field(default_factory=count)

    def share(self, cfg: Config) -> Config:
        """The learning problem whose shards are gathered from all processes."""
        return replace(cfg, gather_shards=self.group.all_gather)

    def take(self, state: TrainState) -> TrainState:
        """The part of a whole state that this process works on."""
        group = self.group
        return train_step.take_shards(state, group.rank, group.world_size)

    def gather(self, state: TrainState) -> TrainState:
        """The whole state, from the part that this process works on. All processes call it."""
        update = int(state.update)
        with self.group.processes.collective(f"gathering update {update}"):
            return train_step.gather_shards(state, self.group.all_gather)

    def step(self, captured: CapturedStep[TrainState, Metrics]) -> Metrics:
        """Make an update with the others, and wait for the device.

        A process that hangs ends the others: see `Processes.deadline`.
        """
        update = int(captured.state.update) + 1
        with self.group.processes.collective(f"in update {update}"):
            metrics = captured.step()
            int(captured.state.update)  # waits for the device
        return metrics

    def check_agent(self, cfg: Config) -> None:
        """Check that all processes have measured the same capacity for the learning problem.

        Raises:
          ValueError: one has measured another; the message names it.
        """
        agent = cfg.update_agent
        # Not its functions: where they lie in memory differs by process.
        self.group.check_equal({"agent": agent and repr(agent.cfg)})

    def prepare(
        self, prepare: PrepareStep
    ) -> tuple[CapturedStep[TrainState, Metrics], StrategyRecord]:
        """Compile and capture a step with the others, which agree on each attempt, within the deadline.

        Raises:
          ValueError: a process has chosen another way to compute it.
        """
        group = self.group
        with group.processes.deadline("preparing the training step"):
            captured, record = prepare(agree=group.first_failure)
            group.check_equal(choices(record))
        return captured, record

    def decide(self, decision: bool = False) -> bool:
        """What rank 0 has decided; the others give nothing.

        Raises:
          PeerError: another process has ended with an error.
          StalledError: no process made progress for too long.
        """
        number = next(self._decisions)
        return self.group.processes.share(f"decision/{number}", decision)


@dataclass(frozen=True, kw_only=True, slots=True)
class NoPeers:
    """A process that trains alone, in the place of `Peers`."""

    def decide(self, decision: bool) -> bool:
        """The decision itself."""
        return decision

    def gather(self, state: TrainState) -> None:
        """Nothing: the state is whole."""

    def step(self, captured: CapturedStep[TrainState, Metrics]) -> Metrics:
        """Make an update."""
        return captured.step()


def connect(processes: Processes, run: Run) -> Peers:
    """Connect the processes, which have opened the same run.

    Raises:
      ValueError: data, settings, threads or kinds of GPU differ; the message names the rank.
    """
    facts = {
        "data": run.task.dataset.fingerprint,
        "settings": repr(run.run_config),
        "threads": torch.get_num_threads(),
        **distributed.gpu_facts(run.run_config.device),
    }
    return Peers(group=collectives.connect(processes, facts))
