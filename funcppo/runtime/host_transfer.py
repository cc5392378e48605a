"""Copies between host and GPU that overlap with computation, through pinned memory and ordered by events.

    StagingBuffers   device buffers that a captured step reads, filled from the host while the previous step runs
    prefetch         chunks of a long table on the device, the next one copied while one is used
    AsyncReadback    values of the previous call on the host, so that neither side waits for the other
    to_host, to_device    a tree there and back, for a step in between that runs on the host

`copy_seconds` has the times of recent copies by `prefetch`.

Pinned memory comes from PyTorch's cache of it, which reuses memory only after the copy out of it. Nothing allocates,
pins or waits while a CUDA graph is captured or replayed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

import torch
from torch import Tensor

from funcppo.core import tree

Data = TypeVar("Data")

# Device times of copies by `prefetch`, each known once its buffer is used again or the table ends; whoever reads them
# takes them out.
copy_seconds: deque[float] = deque(maxlen=4096)


class StagingBuffers(Generic[Data]):
    """Device buffers for data from the host; a captured function closes over `data`.

    Around each step call `put`, `wait_copied`, the step, and `mark_consumed`. A copy waits until the previous step has
    read the buffers, and a step waits until the copy has filled them; the host waits for neither.
    """

    def __init__(self, like: Data, device: torch.device | str) -> None:
        """Allocate buffers with the structure, shapes and dtypes of `like`, a tree on the host."""

        self.data: Data = tree.map(
            lambda x: torch.empty_like(x, device=device), like
        )
        self._uses_cuda = torch.device(device).type == "cuda"
        if self._uses_cuda:
            self._copy_stream = torch.cuda.Stream()
            self._copied = torch.cuda.Event()
            self._consumed = torch.cuda.Event()

    def put(self, values: Data) -> None:
        """Start to copy values to the buffers; returns once they are in pinned memory.

        Args:
          values: a tree on the host, of the structure, shapes and dtypes of the buffers.

        Raises:
          ValueError: a leaf has another shape or dtype; the message names it.
          RuntimeError: a CUDA graph is being captured, which would copy these values at every replay.
        """
        leaves = tree.leaves(values)
        buffers = tree.leaves(self.data)
        for name, value, x in zip(tree.paths(self.data), leaves, buffers):
            if value.shape != x.shape or value.dtype != x.dtype:
                raise ValueError(
                    f"{name}: expected {x.dtype} {list(x.shape)}, got {value.dtype} {list(value.shape)}"
                )
        if not self._uses_cuda:
            for x, value in zip(buffers, leaves):
                x.copy_(value)
            return
        _check_not_capturing("StagingBuffers.put")

        pinned = [value.pin_memory() for value in leaves]
        with torch.cuda.stream(self._copy_stream):
            self._copy_stream.wait_event(self._consumed)
            for x, value in zip(buffers, pinned):
                x.copy_(value, non_blocking=True)
            self._copied.record()

    def wait_copied(self) -> None:
        """Make the current stream wait for the copy; call it before a step."""
        if self._uses_cuda:
            torch.cuda.current_stream().wait_event(self._copied)

    def mark_consumed(self) -> None:
        """Let the next copy begin after the work queued so far; call it after a step."""
        if self._uses_cuda:
            self._consumed.record()


def _check_not_capturing(name: str) -> None:
    """Raise an error while the current stream is captured: the host takes part in a copy once, not at each replay."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{name}: expected a call between the steps, got one while a CUDA graph is captured"
        )


def to_host(values: Data) -> Data:
    """Copy a tree to the host, waiting once for all its leaves; leaves on the host are returned as they are."""
    copies = tree.map(lambda x: x.to("cpu", non_blocking=True), values)
    devices = {x.device for x in tree.leaves(values) if x.is_cuda}
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    return copies


def to_device(values: Data, device: torch.device | str) -> Data:
    """Copy a tree from the host through pinned memory; the host waits for nothing."""
    if torch.device(device).type != "cuda":
        return values
    return tree.map(
        lambda x: x.pin_memory().to(device, non_blocking=True), values
    )


def prefetch(
    rows: Tensor, chunk_size: int, device: torch.device | str
) -> Iterator[Tensor]:
    """Yield chunks of a table on the device, each copied while the one before is used.

    A chunk lives as long as the consumer holds it. Rows that are on the device already are not copied.

    Args:
      rows: the table [n, ...], on the host or on the device.
      chunk_size: rows of a chunk; the last one may have fewer.
      device: where the chunks are needed.

    Raises:
      RuntimeError: a CUDA graph is being captured.
    """
    device = torch.device(device)
    chunks = rows.split(chunk_size)
    if device.type != "cuda" or rows.is_cuda:
        for chunk in chunks:
            yield chunk.to(device)
        return

    # the chunk, the beginning and the end of its copy, of those that were started
    started: deque[tuple[Tensor, torch.cuda.Event, torch.cuda.Event]] = deque()
    with torch.cuda.device(device):
        copy_stream = torch.cuda.Stream()
        for i in range(len(chunks)):
            # the first, and the one after it
            for following in chunks[i + 1 - (not i) : i + 2]:
                started.append(_start_copy(following, copy_stream))
            chunk, begun, copied = started.popleft()
            torch.cuda.current_stream().wait_event(copied)
            # allocated on the copy stream, used on this one
            chunk.record_stream(torch.cuda.current_stream())
            yield chunk
            # nothing waits for the time of a copy that is in progress
            if copied.query():
                copy_seconds.append(begun.elapsed_time(copied) / 1e3)


def _start_copy(
    chunk: Tensor, copy_stream: torch.cuda.Stream
) -> tuple[Tensor, torch.cuda.Event, torch.cuda.Event]:
    """The chunk on the device, valid once the second of two events has happened."""
    _check_not_capturing("prefetch")
    begun = torch.cuda.Event(enable_timing=True)
    copied = torch.cuda.Event(enable_timing=True)
    pinned = chunk.pin_memory()
    with torch.cuda.stream(copy_stream):
        begun.record()
        on_device = pinned.to("cuda", non_blocking=True)
        copied.record()
    return on_device, begun, copied


class AsyncReadback:
    """Copies of device values to the host that arrive one call later, so that neither side waits for the other."""

    def __init__(self) -> None:
        """No value is on its way yet."""
        self._previous: tuple[Tensor, torch.cuda.Event] | None = None

    def __call__(self, x: Tensor) -> Tensor | None:
        """Return the value of the previous call, None on the first; a tensor on the host is returned at once.

        Raises:
          RuntimeError: a CUDA graph is being captured.
        """
        if not x.is_cuda:
            return x
        _check_not_capturing("AsyncReadback")

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
