"""Memory in use on a device: the resident size of this process on a CPU, allocated tensors on a GPU.

`used_bytes` reads the present value, `peak_bytes` the maximum since `reset_peak`, `total_bytes` the size of the device,
`free_bytes` what this process may still allocate.
"""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path

import torch

# Linux only; elsewhere the peak resident size since the start of the process stands for all of them.
_PROCESS_STATUS = Path("/proc/self/status")
_RESET_PEAK = Path("/proc/self/clear_refs")
_MACHINE_MEMORY = Path("/proc/meminfo")
# limit and use of the control group of a container, by the version of control groups; absent where there is none
_GROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)
_BYTES_PER_KIB = 1024


def used_bytes(device: torch.device | str) -> int:
    """Bytes in use now, without memory that is free but not returned to the system."""
    if torch.device(device).type == "cuda":
        return torch.cuda.memory_allocated(device)

    _return_freed_memory()
    return _process_bytes("VmRSS")


def reset_peak(device: torch.device | str) -> None:
    """Start a new measurement of `peak_bytes`; without effect where the system cannot reset it."""
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif _RESET_PEAK.exists():
        _return_freed_memory()
        # 5 resets the peak resident size: see proc(5)
        _RESET_PEAK.write_text("5")


def peak_bytes(device: torch.device | str) -> int:
    """Maximum of the bytes in use since `reset_peak`, or since the start of the process."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device)
    return _process_bytes("VmHWM")


def total_bytes(device: torch.device | str) -> int:
    """Size of the memory of a device, or of the machine."""
    if torch.device(device).type == "cuda":
        _, total = torch.cuda.mem_get_info(device)
        return total
    return _read_kib_field(_MACHINE_MEMORY, "MemTotal")


def free_bytes(device: torch.device | str) -> int:
    """Bytes that are free on a device, or on the machine and within the limit of the container."""
    if torch.device(device).type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free

    free = _read_kib_field(_MACHINE_MEMORY, "MemAvailable")
    for limit_file, use_file in _GROUP_FILES:
        if Path(limit_file).exists() and Path(use_file).exists():
            limit = Path(limit_file).read_text().strip()
            if limit != "max":
                used = int(Path(use_file).read_text())
                free = min(free, int(limit) - used)
    return max(free, 0)


def _return_freed_memory() -> None:
    """Give the system the memory that is free: glibc holds on to it otherwise, and it counts as resident."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def _process_bytes(field: str) -> int:
    """Value of a field of this process's status; the peak resident size where there is no such file."""
    if not _PROCESS_STATUS.exists():
        return (
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _BYTES_PER_KIB
        )
    return _read_kib_field(_PROCESS_STATUS, field)


def _read_kib_field(path: Path, field: str) -> int:
    """Value in bytes of a line such as `VmRSS:   1234 kB`."""
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            number, _ = value.split()
            return _BYTES_PER_KIB * int(number)
    raise ValueError(
        f"{path}: expected a line that begins with {field}:, got none"
    )
