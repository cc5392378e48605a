"""`funcppo doctor`: versions, devices and the training strategy of this machine."""

from __future__ import annotations

import dataclasses
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeAlias

from funcppo.cli import package_version
from funcppo.cli.common import (
    JsonObject,
    WorkDisplay,
    check_outputs,
    graphs_allowed,
    make_console,
    resolve_device,
    select_device,
    set_caches,
    set_threads,
    write_json,
)
from funcppo.cli.options import CacheFolder, CudaGraphs, JsonOutput, Opt
from funcppo.core.settings import DeviceChoice

if TYPE_CHECKING:
    from rich.console import Console

    from funcppo.runtime.capture import CapturedStep
    from funcppo.runtime.compile import StrategyRecord

    PreparedStep: TypeAlias = tuple[CapturedStep[Any, Any], StrategyRecord]

# settings of PPO of an agent whose step is tried
SMALL = {"n_envs": 4, "n_steps": 8, "n_epochs": 1, "n_minibatches": 2}
REPORTED_PACKAGES = ("funcppo", "torch", "optree", "numpy", "rich")


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Report versions and devices, and which training strategy works on this machine and why.

    The strategies are tried on a small CartPole agent, which takes one or two minutes, mostly for compilation. With
    --fill-cache RUN or ENV the step of that run or environment is prepared in its place, as `funcppo train` and
    `funcppo rl` prepare it, so that these find its compiled code on disk.

    Exit status: 0 reported, 2 bad input.
    """

    EXAMPLES: ClassVar[tuple[str, ...]] = (
        "funcppo doctor",
        "funcppo doctor --fill-cache CartPole-v1",
    )

    device: DeviceChoice = "auto"
    """Device to try the training strategies on: cpu, cuda, cuda:N, or auto for a GPU if there is one. A run is prepared
    on its own device."""
    cuda_graphs: CudaGraphs = "auto"
    """Replay the training step as CUDA graphs on a GPU, as --cuda-graphs of `funcppo train`."""
    quick: bool = False
    """Report versions and devices only; do not try the training strategies. Default: off."""
    fill_cache: Annotated[str | None, Opt("RUN|ENV")] = None
    """Compile the training step of a run of `funcppo train` or `funcppo rl`, or of an environment at its published
    settings, for later processes. Default: a small CartPole agent."""
    cache_dir: CacheFolder = None
    """Folder for compiled code. Default: $XDG_CACHE_HOME/funcppo."""
    profile: bool = False
    """Make five updates under PyTorch's profiler, and print the operators and kernels with the most time of their own
    and what was compiled. Default: off."""
    json: JsonOutput = None
    """Write the report as JSON to FILE; - writes it to standard output in place of the text. Default: no JSON."""

    def run(self) -> int:
        """Print the report; return the exit status.

        Returns:
          The exit status.
        """
        check_outputs([("--json", self.json)], ())
        set_caches(self.cache_dir)
        console = make_console(self.json == "-")
        select_device(self.device)

        report = _describe_machine()
        for name, value in report.items():
            console.print(f"{name:>10}  {value}")

        if not self.quick:
            with graphs_allowed(self.cuda_graphs, self.device):
                report |= self._try_step(console)
        write_json(self.json, report)
        return 0

    def _try_step(self, console: Console) -> JsonObject:
        """Prepare the training step and print how it runs; return its part of the report."""
        from funcppo.runtime.cache import use_folder
        from funcppo.runtime.monitor import Monitor

        folder = use_folder()
        start = time.perf_counter()
        with Monitor() as monitor:
            with WorkDisplay(
                "preparing the step of " + (self.fill_cache or "a small agent"),
                console,
            ):
                captured, record = self._prepare_step()
            monitor.record_capture(captured)
            seconds = time.perf_counter() - start
            table = _profile(captured) if self.profile else ""
            counts = monitor.report()

        _print_record(console, record)
        console.print(f"{'graphs':>10}  {self.cuda_graphs}")
        console.print(f"ready in {seconds:.0f} s: {folder}")
        if self.profile:
            console.print(table)
            console.print(
                f"{counts['compiles']} compilations, {counts['recompiles']} of them again; "
                f"{counts['cudagraph_recordings']} CUDA graphs recorded"
            )
        return {
            "strategy": dataclasses.asdict(record),
            "graphs": self.cuda_graphs,
            "cache_dir": str(folder),
            "seconds": seconds,
            "profile": table,
            **counts,
        }

    def _prepare_step(self) -> PreparedStep:
        """Prepare the training step that the options name; return it and its strategy record.

        Raises:
          ValueError: they name neither a run nor an environment.
        """
        device = resolve_device(self.device)
        if self.fill_cache is None:
            return _prepare_environment("CartPole-v1", device, SMALL)
        from funcppo.cli.options import is_run_folder
        from funcppo.rl import PUBLISHED, is_rl_run

        folder = Path(self.fill_cache)
        is_run = is_run_folder(self.fill_cache)
        if is_run and not is_rl_run(folder):
            return _prepare_run(folder)
        if not is_run and self.fill_cache not in PUBLISHED:
            raise ValueError(
                f"--fill-cache {self.fill_cache}: expected the folder of a run or an environment of `funcppo rl`"
            )
        return _prepare_environment(self.fill_cache, device)


def _prepare_run(folder: Path) -> PreparedStep:
    """Prepare the training step of a run of `funcppo train`, from its checkpoint."""
    from funcppo.kg.config import read_config
    from funcppo.kg.run import train
    from funcppo.kg.run.run import open_run

    config = read_config(folder)
    set_threads(config.threads)
    select_device(config.device)
    run = open_run(folder, config.device)
    if run.learner is None:
        raise ValueError(
            f"{folder}: expected a run with a training step, got one that learnt from questions"
        )
    return train.prepare_train_step(run)


def _prepare_environment(
    name: str, device: str, changes: Mapping[str, int] | None = None
) -> PreparedStep:
    """Prepare the step of `funcppo rl` at update 0, for a run or for an environment's published settings.

    Args:
      changes: of settings of PPO.
    """
    from funcppo import rl, trainer
    from funcppo.cli.rl import published_config
    from funcppo.learner import prepare_step
    from funcppo.rl import read_config
    from funcppo.train_step import EAGER_PARTS, vmap_parts

    folder = Path(name)
    config = dataclasses.replace(published_config(name), device=device)
    if folder.is_dir():
        config = read_config(folder)
    ppo = dataclasses.replace(config.ppo, **(changes or {}))
    config = dataclasses.replace(config, ppo=ppo)
    set_threads(config.threads)
    select_device(config.device)
    learner = rl.make_learner(config.env, config)
    learner = trainer.with_length(learner, config.steps)
    seeds = rl.seeds_of(config)
    state = trainer.init_many(learner, seeds, config.device)
    parts = vmap_parts(EAGER_PARTS)
    return prepare_step(
        learner.cfg, learner.world, state, parts, config.strategy
    )


def _profile(captured: CapturedStep[Any, Any]) -> str:
    """Profile a few updates; return a table of the operators and kernels with the most time of their own."""
    import torch

    captured.step()
    with torch.profiler.profile(acc_events=True) as profile:
        for _ in range(5):
            captured.step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    averages = profile.key_averages()
    is_on_gpu = any(event.self_device_time_total for event in averages)
    by = "self_device_time_total" if is_on_gpu else "self_cpu_time_total"
    return averages.table(sort_by=by, row_limit=15)


def _describe_machine() -> JsonObject:
    """Return the versions of system and packages, the number of CPUs and the names of GPUs."""
    import torch

    gpus = [
        torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())
    ]
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        **{name: package_version(name) for name in REPORTED_PACKAGES},
        "cpus": os.cpu_count(),
        "gpus": ", ".join(gpus) or "none",
        "cuda": torch.version.cuda or "none",
    }


def _print_record(console: Console, record: StrategyRecord) -> None:
    """Print the strategy that works, and one line for each that failed."""
    console.print(
        f"{'strategy':>10}  {record.strategy} on {record.device}, replay: {record.replay_mode}"
    )
    for failure in record.failures:
        console.print(f"{'':>10}  {failure}")
