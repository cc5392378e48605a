"""What a record says of its origin: hardware, versions, commit."""

import datetime
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from experiments.paths import ROOT


def describe_machine(device: str = "cpu") -> dict[str, Any]:
    """The hardware that a program runs on, its load, versions, commit and date.

    Args:
      device: what is measured, `cpu` or `cuda`.
    """
    import torch

    cpu, cores = cpu_model(), os.cpu_count()
    machine = {
        "device": torch.cuda.get_device_name()
        if device == "cuda"
        else f"{cpu}, {cores} cores",
        "cpu": cpu,
        "cores": cores,
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[
            0
        ],  # of all work on the machine, over the last minute
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": current_commit(),
        "date": str(datetime.date.today()),
    }
    variable = "CUDA_LAUNCH_BLOCKING"
    if device == "cuda" and os.environ.get(variable, "0") not in ("", "0"):
        # Times of such a run are to find a kernel by, not to compare.
        machine["launch_blocking"] = True
    return machine


def cpu_model() -> str:
    """The name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = (
        line.split(":", 1)[1].strip()
        for line in lines
        if line.startswith("model name")
    )
    return next(names, platform.machine())


def current_commit() -> str:
    """The short hash of the commit that runs; FUNCPPO_COMMIT names it where there is no repository."""
    if name := os.environ.get("FUNCPPO_COMMIT"):
        return name
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True
        ).stdout.strip()
    except OSError:  # no git
        return ""
