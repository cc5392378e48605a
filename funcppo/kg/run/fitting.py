"""A training run from its settings to its last update, without a terminal: what `funcppo.fit` calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from funcppo.core.settings import CONFIG_FILE, write_config
from funcppo.kg.run import run_build, run_start, training
from funcppo.kg.run.config import RunConfig
from funcppo.kg.run.run import Run, save_checkpoint
from funcppo.kg.search.task import PhaseCallback, ignore_phase
from funcppo.loggers import LoggerName, check_loggers, open_loggers
from funcppo.runtime import distributed
from funcppo.runtime.monitor import Monitor


class UpdateCallback(Protocol):
    """Receives the metrics of each update."""

    def __call__(self, update: int, metrics: dict[str, float], /) -> None:
        """Receive the number of an update and its metrics."""
        ...


def ignore_update(update: int, metrics: dict[str, float], /) -> None:
    """Record nothing of an update."""


def check_new_folder(folder: Path) -> None:
    """Check that a folder holds no run.

    Raises:
      ValueError: it does.
    """
    if (folder / CONFIG_FILE).exists():
        raise ValueError(
            f"{folder}: holds a run already: expected another folder"
        )


def fit(
    run_config: RunConfig,
    folder: Path,
    on_phase: PhaseCallback = ignore_phase,
    on_update: UpdateCallback = ignore_update,
    log: Sequence[LoggerName] = (),
    memory_limit: int | None = None,
) -> Run:
    """Train a new run to its last update.

    An interrupt ends it with a checkpoint, which `funcppo train --resume` continues from.

    Args:
      run_config: the settings; those of the prover that are open are chosen on the valid split.
      folder: receives config.json, metrics.jsonl and checkpoint.npz; created if it is missing.
      on_phase: receives what is being done before the first update.
      on_update: receives the metrics of each update.
      log: where the lines of metrics.jsonl go too: csv, tensorboard, wandb.
      memory_limit: of the parts in which the run computes, in bytes; None for no limit.

    Returns:
      The run with the parameters that rank valid best.

    Raises:
      ValueError: bad data or settings, the folder holds a run, a package of `log` is missing, or torchrun started
        several processes.
    """
    n_processes = distributed.launched_size()
    if n_processes > 1:
        raise ValueError(
            f"fit: expected one process, got {n_processes} of torchrun, which would write into one folder"
        )
    check_new_folder(folder)
    check_loggers(log)
    run = run_start.prepare_run(
        run_config,
        folder,
        resume=False,
        on_phase=on_phase,
        memory_limit=memory_limit,
    )
    folder.mkdir(parents=True, exist_ok=True)
    # A folder with a config is a run, so the config comes last.
    save_checkpoint(run, folder)
    write_config(run.run_config, folder)

    run = run_build.with_training_data(run, on_phase)
    settings = dataclasses.asdict(run.run_config)
    with (
        Monitor() as monitor,
        open_loggers(log, folder, (), settings) as loggers,
    ):
        captured, _ = training.prepare_train_step(run)
        monitor.record_capture(captured)
        updates = training.train(
            run, folder, captured, lambda: False, monitor, loggers=loggers
        )
        for run, metrics in updates:
            on_update(int(run.state.train_state.update), metrics)
    return run
