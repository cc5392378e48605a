"""How much memory this process takes on a device, measured: resident size on a CPU, allocated tensors on a GPU."""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path

import torch

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def used_bytes(device: torch.device | str) -> int:
    """What is held now; memory that is free but not given back to the system does not count."""
    if torch.device(device).type == "cuda":
        return torch.cuda.memory_allocated(device)
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc keeps what was freed
        libc.malloc_trim(0)
    return _status("VmRSS")


def reset_peak(device: torch.device | str) -> None:
    """Have `peak_bytes` count from now on, where the system can; elsewhere it counts from the start."""
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif _RESET.exists():
        _RESET.write_text("5")


def peak_bytes(device: torch.device | str) -> int:
    """The most that was held at once since `reset_peak`."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device)
    return _status("VmHWM")


def total_bytes(device: torch.device | str) -> int:
    """The memory of a device, or of the machine."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    return 1024 * int(line.split()[1])


def _status(name: str) -> int:
    if not _STATUS.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(name + ":"))
    return 1024 * int(line.split()[1])
