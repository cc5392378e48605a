"""Memory in use on a device: the resident size of this process on a CPU, what PyTorch holds on a GPU.

`used_bytes` reads the present value, `peak_bytes` the maximum since `reset_peak`, `total_bytes` the size of the device,
`free_bytes` what this process may still allocate. On Linux they are read from the system's files, elsewhere by psutil.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

# Linux only
_PROCESS_STATUS = Path("/proc/self/status")
_RESET_PEAK = Path("/proc/self/clear_refs")
_MACHINE_MEMORY = Path("/proc/meminfo")
_PROCESS_GROUPS = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")


# Where a version of control groups keeps the limit of a container: the folder of the hierarchy in `_GROUPS`; a file of
# bytes, or of "max"; a file of the bytes in use, those of cached files included; and the field of memory.stat with the
# bytes of cached files that make way for other memory.
_GROUP_FILES_V1 = (
    "memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "total_inactive_file",
)
_GROUP_FILES_V2 = ("", "memory.max", "memory.current", "inactive_file")


def used_bytes(device: torch.device | str) -> int:
    """Bytes in use now, without memory that is free but not returned to the system.

    On a GPU these are whole blocks of PyTorch's allocator, those of CUDA graphs included, without the CUDA context.
    """
    _return_freed_memory(device)
    if torch.device(device).type == "cuda":
        return torch.cuda.memory_reserved(device)
    if not _PROCESS_STATUS.exists():
        return _import_psutil().Process().memory_info().rss
    return _read_kib_field(_PROCESS_STATUS, "VmRSS")


def reset_peak(device: torch.device | str) -> None:
    """Start a new measurement of `peak_bytes`; without effect where the system cannot reset it."""
    if torch.device(device).type == "cuda":
        _return_freed_memory(device)
        torch.cuda.reset_peak_memory_stats(device)
    elif _RESET_PEAK.exists():
        _return_freed_memory(device)
        # 5 resets the peak resident size: see proc(5)
        _RESET_PEAK.write_text("5")


def peak_bytes(device: torch.device | str) -> int:
    """Maximum of the bytes in use since `reset_peak`, or since the start of the process."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_reserved(device)
    if not _PROCESS_STATUS.exists():
        return _peak_without_proc()
    return _read_kib_field(_PROCESS_STATUS, "VmHWM")


def total_bytes(device: torch.device | str) -> int:
    """Size of the memory of a device, or of the machine or the container."""
    if torch.device(device).type == "cuda":
        _, total = torch.cuda.mem_get_info(device)
        return total
    limits = [limit for limit, _ in _group_memory()]
    return min([_machine_bytes("MemTotal"), *limits])


def free_bytes(device: torch.device | str) -> int:
    """Bytes that this process may still allocate: free on the device, or on the machine and within the container.

    On a GPU the CUDA contexts and the memory of other processes are not free, and
    `torch.cuda.set_per_process_memory_fraction` is kept; on a CPU the limits of the process are.
    """
    device = torch.device(device)
    if device.type == "cuda":
        _return_freed_memory(device)
        free, total = torch.cuda.mem_get_info(device)
        fraction = torch.cuda.get_per_process_memory_fraction(device.index)
        allowed = int(fraction * total) - torch.cuda.memory_reserved(device)
        return max(min(free, allowed), 0)
    groups = [free for _, free in _group_memory()]
    return min([_machine_bytes("MemAvailable"), *groups, *_process_limits()])


def enforces_limits(device: torch.device | str) -> bool:
    """Whether `limit_memory` bounds what this process allocates: on a GPU, and on a CPU where the system is Linux."""
    return torch.device(device).type == "cuda" or _PROCESS_STATUS.exists()


@contextmanager
def limit_memory(
    limit: int | None, device: torch.device | str
) -> Iterator[None]:
    """Let this process allocate no more than a limit meanwhile; what would exceed it is an error of PyTorch or Python.

    Args:
      limit: bytes, those in use included; None for no limit.
      device: whose memory is limited, if it can be (`enforces_limits`).
    """
    if limit is None or not enforces_limits(device):
        yield
        return
    if torch.device(device).type == "cuda":
        before = torch.cuda.get_per_process_memory_fraction(device)
        fraction = min(limit / total_bytes(device), before)
        torch.cuda.set_per_process_memory_fraction(fraction, device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(before, device)
        return
    import resource

    before, most = resource.getrlimit(resource.RLIMIT_DATA)
    bounds = [x for x in (limit, before) if x != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(bounds), most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, most))


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an error says that memory does not suffice; PyTorch has no type of its own for that of the machine."""
    pattern = "can't allocate memory|out of memory"
    return re.search(pattern, str(error)) is not None


def collect_unused() -> None:
    """Free what only cycles of objects hold, and return it to the GPU; after an error for lack of memory."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _return_freed_memory(device: torch.device | str) -> None:
    """Give the system the memory that is free: PyTorch and glibc hold on to it otherwise, and it counts as used."""
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()
    elif _PROCESS_STATUS.exists():
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):
            libc.malloc_trim(0)


def _machine_bytes(field: str) -> int:
    """A field of the machine's memory: MemTotal or MemAvailable."""
    if _MACHINE_MEMORY.exists():
        return _read_kib_field(_MACHINE_MEMORY, field)
    memory = _import_psutil().virtual_memory()
    return memory.total if field == "MemTotal" else memory.available


def _group_memory() -> Iterator[tuple[int, int]]:
    """Bytes of the limit of each control group that this process is in, and of what it leaves."""
    if not _PROCESS_GROUPS.exists():
        return
    for line in _PROCESS_GROUPS.read_text().splitlines():
        # 4:cpu,memory:/path for version 1, 0::/path for version 2
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        files = _GROUP_FILES_V1 if controllers else _GROUP_FILES_V2
        hierarchy, limit_file, use_file, cached_field = files

        # Within a container the path may be that of the host, and the root is the container's group.
        group = _GROUPS / hierarchy / path.lstrip("/")
        for folder in (group, *group.parents):
            if not (folder / limit_file).exists():
                continue
            text = (folder / limit_file).read_text().strip()
            if text == "max":
                continue
            lines = (folder / "memory.stat").read_text().splitlines()
            fields = dict(line.split() for line in lines)
            used = int((folder / use_file).read_text())
            used -= int(fields.get(cached_field, 0))
            yield int(text), max(int(text) - used, 0)


def _process_limits() -> Iterator[int]:
    """What limits of the process leave of its data and of its address space (`ulimit -d`, `ulimit -v`)."""
    if not _PROCESS_STATUS.exists():
        return
    import resource

    for kind, field in (
        (resource.RLIMIT_DATA, "VmData"),
        (resource.RLIMIT_AS, "VmSize"),
    ):
        limit, _ = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY:
            used = _read_kib_field(_PROCESS_STATUS, field)
            yield max(limit - used, 0)


def _peak_without_proc() -> int:
    """Peak resident size since the start of the process where there is no /proc."""
    if sys.platform == "win32":
        return _import_psutil().Process().memory_info().peak_wset
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _import_psutil() -> Any:
    """The package psutil.

    Raises:
      ValueError: it is missing.
    """
    try:
        return importlib.import_module("psutil")
    except ModuleNotFoundError:
        raise ValueError(
            "memory is measured by psutil where there is no /proc: expected it (pip install 'funcppo[cli]'), got none"
        ) from None


def _read_kib_field(path: Path, field: str) -> int:
    """Value in bytes of a line such as `VmRSS:   1234 kB`."""
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            number, _ = value.split()
            return 1024 * int(number)
    raise ValueError(
        f"{path}: expected a line that begins with {field}:, got none"
    )
