"""Memory in use on a device: the resident size of this process on a CPU, what PyTorch holds on a GPU.

`used_bytes` reads the present value, `peak_bytes` the maximum since `reset_peak`, `total_bytes` the size of the device,
`free_bytes` what this process may still allocate. On Linux they are read from the system's files, elsewhere by psutil.

Copies between host and GPU that overlap with computation, through pinned memory and ordered by events.

    prefetch         chunks of a long table on the device, the next one copied while one is used
    AsyncReadback    values of the previous call on the host, so that neither side waits for the other
    to_host, to_device    a tree there and back, for a step in between that runs on the host

`copy_seconds` has the times of recent copies by `prefetch`.

Pinned memory comes from PyTorch's cache of it, which reuses memory only after the copy out of it. Nothing allocates,
pins or waits while a CUDA graph is captured or replayed.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from funcppo.core import tree

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


def _is_gpu(device: torch.device | str) -> bool:
    return torch.device(device).type == "cuda"


def used_bytes(device: torch.device | str) -> int:
    """Return the bytes in use now, after cached free memory is returned to the system.

    On a GPU these are whole blocks of PyTorch's allocator, those of CUDA graphs included, without the CUDA context.
    """
    _return_freed_memory(device)
    if _is_gpu(device):
        return torch.cuda.memory_reserved(device)
    if not _PROCESS_STATUS.exists():
        return _import_psutil().Process().memory_info().rss
    return _read_kib_field(_PROCESS_STATUS, "VmRSS")


def reset_peak(device: torch.device | str) -> None:
    """Restart the measurement of `peak_bytes`; no effect if the system cannot reset it."""
    _return_freed_memory(device)
    if _is_gpu(device):
        torch.cuda.reset_peak_memory_stats(device)
    elif _RESET_PEAK.exists():
        # In a container, and after a change of user, it may not be written.
        with suppress(OSError):
            # 5 resets the peak resident size: see proc(5)
            _RESET_PEAK.write_text("5")


def peak_bytes(device: torch.device | str) -> int:
    """Return the maximum of the bytes in use since `reset_peak`, or since the start of the process."""
    if _is_gpu(device):
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_reserved(device)
    if _PROCESS_STATUS.exists():
        return _read_kib_field(_PROCESS_STATUS, "VmHWM")
    if sys.platform == "win32":
        return _import_psutil().Process().memory_info().peak_wset
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def total_bytes(device: torch.device | str) -> int:
    """Return the memory size of a GPU, or of the machine or container."""
    if _is_gpu(device):
        _, total = torch.cuda.mem_get_info(device)
        return total
    limits = [limit for limit, _ in _group_memory()]
    return min([_machine_bytes("MemTotal"), *limits])


def free_bytes(device: torch.device | str) -> int:
    """Return the bytes that this process may still allocate on the GPU, or within machine and container.

    On a GPU the CUDA contexts and the memory of other processes are not free, and
    `torch.cuda.set_per_process_memory_fraction` is kept; on a CPU the limits of the process are.
    """
    if _is_gpu(device):
        _return_freed_memory(device)
        free, total = torch.cuda.mem_get_info(device)
        index = torch.device(device).index
        fraction = torch.cuda.get_per_process_memory_fraction(index)
        allowed = int(fraction * total) - torch.cuda.memory_reserved(device)
        return max(min(free, allowed), 0)
    groups = [free for _, free in _group_memory()]
    return min([_machine_bytes("MemAvailable"), *groups, *_process_limits()])


def enforces_limits(device: torch.device | str) -> bool:
    """Return whether `limit_memory` works on this device: on a GPU, and on a CPU under Linux."""
    return _is_gpu(device) or _PROCESS_STATUS.exists()


@contextmanager
def limit_memory(
    limit: int | None, device: torch.device | str
) -> Iterator[None]:
    """Limit what this process may allocate within the context; exceeding it raises an error of PyTorch or Python.

    Args:
      limit: bytes, those in use included; None for no limit.
      device: whose memory is limited, if it can be (`enforces_limits`).
    """
    if limit is None or not enforces_limits(device):
        yield
        return
    number = torch.device(device).index  # None: the current one
    if _is_gpu(device):
        set_limit = torch.cuda.set_per_process_memory_fraction
        before = torch.cuda.get_per_process_memory_fraction(number)
        lower = min(limit / total_bytes(device), before)
    else:
        import resource

        before, most = resource.getrlimit(resource.RLIMIT_DATA)
        lower = (
            limit if before == resource.RLIM_INFINITY else min(limit, before)
        )

        set_limit = partial(_set_soft_limit, most)

    set_limit(lower, number)
    try:
        yield
    finally:
        set_limit(before, number)


def _set_soft_limit(most: int, limit: float, _: object) -> None:
    """Limit the data of this process to some bytes; `most` stays the limit of that limit."""
    import resource

    resource.setrlimit(resource.RLIMIT_DATA, (int(limit), most))


def is_out_of_memory(error: RuntimeError) -> bool:
    """Check by its text whether an error means lack of memory; PyTorch has no error type for host memory."""
    texts = ("can't allocate memory", "out of memory")
    return any(text in str(error) for text in texts)


def collect_unused() -> None:
    """Collect reference cycles and return their memory to the GPU, after an out-of-memory error."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _return_freed_memory(device: torch.device | str) -> None:
    """Return free memory that PyTorch and glibc hold to the system; otherwise it counts as used."""
    if _is_gpu(device):
        torch.cuda.empty_cache()
    elif _PROCESS_STATUS.exists():
        trim = getattr(ctypes.CDLL(None), "malloc_trim", bool)
        trim(0)


def _machine_bytes(field: str) -> int:
    """Return a field of the machine's memory in bytes: MemTotal or MemAvailable."""
    if _MACHINE_MEMORY.exists():
        return _read_kib_field(_MACHINE_MEMORY, field)
    memory = _import_psutil().virtual_memory()
    return memory.total if field == "MemTotal" else memory.available


def _group_memory() -> Iterator[tuple[int, int]]:
    """Yield (limit, free bytes) of the memory of each control group of this process."""
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
            _, _, after = (
                (folder / "memory.stat")
                .read_text()
                .partition(f"\n{cached_field} ")
            )
            cached = int(after.split()[0]) if after else 0
            used = int((folder / use_file).read_text()) - cached
            yield int(text), max(int(text) - used, 0)


def _process_limits() -> Iterator[int]:
    """Yield the bytes left under the process limits on data and address space (`ulimit -d`, `ulimit -v`)."""
    if not _PROCESS_STATUS.exists():
        return
    import resource

    kinds = {resource.RLIMIT_DATA: "VmData", resource.RLIMIT_AS: "VmSize"}
    for kind, field in kinds.items():
        limit, _ = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY:
            yield max(limit - _read_kib_field(_PROCESS_STATUS, field), 0)


def _import_psutil() -> Any:
    """Import psutil; raise ValueError with an install hint if it is missing.

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
    """Read a value such as `VmRSS: 1234 kB` from a file, in bytes."""
    _, found, after = path.read_text().partition(f"{field}:")
    if not found:
        raise ValueError(
            f"{path}: expected a line that begins with {field}:, got none"
        )
    return 1024 * int(after.split()[0])


Data = TypeVar("Data")

# Device times of copies by `prefetch`, each known once its buffer is used again or the table ends; whoever reads them
# takes them out.
copy_seconds: deque[float] = deque(maxlen=4096)


def check_not_capturing(name: str) -> None:
    """Raise RuntimeError while a CUDA graph is captured: its replays would not repeat the host's part of a copy."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{name}: expected a call between the steps, got one while a CUDA graph is captured"
        )


def to_host(values: Data) -> Data:
    """Copy a tree to the host, waiting once for all its leaves; leaves on the host are returned as they are."""
    copies = tree.map(lambda x: x.to("cpu", non_blocking=True), values)
    for device in {x.device for x in tree.leaves(values) if x.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return copies


def to_device(values: Data, device: torch.device | str) -> Data:
    """Copy a tree from the host through pinned memory, without waiting."""
    if not _is_gpu(device):
        return values
    return tree.map(
        lambda x: x.pin_memory().to(device, non_blocking=True), values
    )


def prefetch(
    rows: Tensor, chunk_size: int, device: torch.device | str
) -> Iterator[Tensor]:
    """Yield chunks of a table on the device, each copied while the previous chunk is used.

    A chunk lives as long as the consumer holds it. Rows that are on the device already are not copied.

    Args:
      rows: the table [n, ...], on the host or on the device.
      chunk_size: rows of a chunk; the last one may have fewer.
      device: where the chunks are needed.

    Raises:
      RuntimeError: a CUDA graph is being captured.
    """
    chunks = rows.split(chunk_size)
    if not _is_gpu(device) or rows.is_cuda:
        yield from (chunk.to(device) for chunk in chunks)
        return

    with torch.cuda.device(device):
        copies = map(partial(_start_copy, torch.cuda.Stream()), chunks)
        following = next(copies)
        while following is not None:
            chunk, begun, copied = following
            following = next(copies, None)  # copied while this one is used
            torch.cuda.current_stream().wait_event(copied)
            # allocated on the copy stream, used on this one
            chunk.record_stream(torch.cuda.current_stream())
            yield chunk
            # nothing waits for the time of a copy that is in progress
            if copied.query():
                copy_seconds.append(begun.elapsed_time(copied) / 1e3)


def _start_copy(
    copy_stream: torch.cuda.Stream, chunk: Tensor
) -> tuple[Tensor, torch.cuda.Event, torch.cuda.Event]:
    """Start copying a chunk to the device; return it with two events: it is valid after the second."""
    check_not_capturing("prefetch")
    begun, copied = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    pinned = chunk.pin_memory()
    with torch.cuda.stream(copy_stream):
        begun.record()
        on_device = pinned.to("cuda", non_blocking=True)
        copied.record()
    return on_device, begun, copied


class AsyncReadback:
    """Copies of device values to the host, returned one call later so that neither side waits for the other."""

    def __init__(self) -> None:
        """Start with no value on its way."""
        self._previous: tuple[Tensor, torch.cuda.Event] | None = None

    def __call__(self, x: Tensor) -> Tensor | None:
        """Return the value of the previous call, None on the first call; a host tensor is returned at once.

        Raises:
          RuntimeError: a CUDA graph is being captured.
        """
        if not x.is_cuda:
            return x
        check_not_capturing("AsyncReadback")

        value = torch.empty_like(x, device="cpu", pin_memory=True)
        value.copy_(x, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        previous, self._previous = self._previous, (value, copied)
        if previous is None:
            return None
        previous_value, previous_copied = previous
        previous_copied.synchronize()
        return previous_value
