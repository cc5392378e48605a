"""`funcppo doctor`: versions, devices and the training strategy of this machine."""

from __future__ import annotations

import dataclasses
import os
import platform
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from funcppo.cli.common import (
    GraphsChoice,
    JsonObject,
    graphs_allowed,
    package_version,
    resolve_device,
    select_device,
    write_json,
)
from funcppo.cli.console import make_console, show_status
from funcppo.cli.options import AutoDeviceOption, JsonOutput
from funcppo.config import Config, PPOConfig

if TYPE_CHECKING:
    from rich.console import Console

    from funcppo.runtime.compile import StrategyRecord

REPORTED_PACKAGES = ("funcppo", "torch", "optree", "numpy", "tyro", "rich")


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Report versions and devices, and which training strategy works on this machine and why.

    The strategies are tried on a small CartPole agent, which takes one or two minutes, mostly for compilation.

    Exit status: 0 reported, 2 bad input.
    """

    device: AutoDeviceOption = "auto"
    """Device to try the training strategies on: cpu, cuda, cuda:N, or auto for a GPU if there is one."""
    graphs: GraphsChoice = "auto"
    """Replay the training step as CUDA graphs on a GPU, as --graphs of `funcppo train`."""
    quick: bool = False
    """Report versions and devices only; do not try the training strategies. Default: off."""
    json: JsonOutput = None
    """Write the report as JSON to FILE; - writes it to standard output in place of the text. Default: no JSON."""

    def run(self) -> int:
        """Print the report.

        Returns:
          The exit status.
        """
        console = make_console(self.json == "-")
        select_device(self.device)

        report = _describe_machine()
        for name, value in report.items():
            console.print(f"{name:>10}  {value}")

        start = time.perf_counter()
        record = None
        if not self.quick:
            device = resolve_device(self.device)
            with (
                show_status(
                    console, f"trying the training strategies on {device}"
                ),
                graphs_allowed(self.graphs, self.device),
            ):
                record = try_strategies(device)
            report["strategy"] = dataclasses.asdict(record)
            report["graphs"] = self.graphs

        write_json(self.json, report)
        if record is not None:
            _print_record(console, record)
            console.print(f"{'graphs':>10}  {self.graphs}")
            console.print(f"tried in {time.perf_counter() - start:.0f} s")
        return 0


def try_strategies(device: str) -> StrategyRecord:
    """Try the training strategies on a small CartPole agent.

    Returns:
      The record of the strategy that works, how it is replayed, and why better ones failed.
    """
    from funcppo import train_step
    from funcppo.core import random
    from funcppo.envs.base import NoWorld
    from funcppo.envs.classic_control import cartpole
    from funcppo.nets import feedforward
    from funcppo.runtime import compile as compilation
    from funcppo.runtime.capture import capture

    cfg = Config(
        ppo=PPOConfig(n_envs=4, n_steps=8, n_epochs=1, n_minibatches=2),
        env=cartpole.environment(cartpole.CartPoleConfig()),
        agent=feedforward.agent(feedforward.MLPConfig(n_obs=4, n_actions=2)),
    )
    state = train_step.init(cfg, NoWorld(), random.key(0, device))

    parts, record = compilation.select_strategy(
        train_step.collect, train_step.EAGER_PARTS, cfg, NoWorld(), state
    )
    captured = capture(
        lambda state: train_step.train_step(cfg, NoWorld(), state, parts), state
    )
    return compilation.with_capture(record, captured)


def _describe_machine() -> JsonObject:
    """Versions of the system and of packages, number of CPUs, names of GPUs."""
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
    """Print the strategy that works, and a line for each one that failed."""
    console.print(
        f"{'strategy':>10}  {record.strategy} on {record.device}, replay: {record.replay_mode}"
    )
    if record.skip_reason:
        console.print(f"{'':>10}  others not tried: {record.skip_reason}")
    for failure in record.failures:
        console.print(
            f"{'':>10}  {failure.name} failed: {failure.error_type}: {failure.message}"
        )
