"""`funcppo doctor`: what this machine has, and how a training step runs on it."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from funcppo.cli import console as terminal
from funcppo.cli import write_json
from funcppo.config import Config, PPOConfig

if TYPE_CHECKING:
    from funcppo.runtime.compile import StrategyRecord

REPORTED_PACKAGES = ("funcppo", "torch", "optree", "numpy", "tyro", "rich")


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Versions, devices, and the training strategy that this machine gets and why.

    The ladder of strategies is tried on a small CartPole learner: a minute or two, most of it compiling.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to try; auto takes a GPU if there is one."""
    quick: bool = False
    """Only versions and devices; try nothing."""
    json: str | None = None
    """Write what was found as JSON to this file, or - for standard output."""

    def run(self) -> int:
        """Look, try and tell; the exit status."""
        import torch

        console = terminal.make_console(self.json == "-")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda: PyTorch sees no CUDA device here")
        found = _machine()
        for name, value in found.items():
            console.print(f"{name:>10}  {value}")
        if not self.quick:
            device = self.device if self.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
            with console.status(f"trying the training strategies on {device}"):
                start = time.perf_counter()
                record = try_strategies(device)
            found["strategy"] = dataclasses.asdict(record)
            console.print(f"{'strategy':>10}  {record.strategy} on {record.device}, replayed by: {record.replay_mode}")
            for failure in record.failures:
                console.print(f"{'':>10}  not {failure.name}: {failure.error_type}: {failure.message}", markup=False)
            console.print(f"tried in {time.perf_counter() - start:.0f} s")
        write_json(self.json, found)
        return 0


def try_strategies(device: str) -> StrategyRecord:
    """The record of the ladder for a small CartPole learner."""
    from funcppo import random, train_step
    from funcppo.envs.base import NoWorld
    from funcppo.envs.classic_control import cartpole
    from funcppo.nets import feedforward as mlp
    from funcppo.runtime import compile as ladder
    from funcppo.runtime.capture import capture, with_capture

    cfg = Config(
        ppo=PPOConfig(n_envs=4, n_steps=8, n_epochs=1, n_minibatches=2),
        env=cartpole.environment(cartpole.CartPoleConfig()),
        agent=mlp.agent(mlp.MLPConfig(n_obs=4, n_actions=2)),
    )
    state = train_step.init(cfg, NoWorld(), random.key(0, device))
    parts, record = ladder.select_strategy(train_step.collect, train_step.EAGER_PARTS, cfg, NoWorld(), state)
    return with_capture(record, capture(lambda state: train_step.train_step(cfg, NoWorld(), state, parts), state))


def _machine() -> dict[str, Any]:
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    found = {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    found |= {name: _version(name) for name in REPORTED_PACKAGES}
    return found | {"cpus": os.cpu_count(), "gpus": ", ".join(gpus) or "none", "cuda": torch.version.cuda or "none"}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
