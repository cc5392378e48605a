"""Copies between host and GPU that overlap with computation, through pinned memory and ordered by events.

    StagingBuffers   device buffers that a captured step reads, filled from the host while the previous step runs
    prefetch         chunks of a long table on the device, the next one copied while one is used
    AsyncReadback    values of the previous call on the host, so that neither side waits for the other
    to_host, to_device    a tree there and back, for a step in between that runs on the host

`copy_seconds` has the times of recent copies by `prefetch`.

Pinned memory is allocated once, or comes from PyTorch's cache of it. Nothing allocates, pins or waits while a CUDA
graph is captured or replayed.
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

        def allocate(x: Tensor) -> Tensor:
            return torch.empty_like(x, device=device)

        def allocate_pinned(x: Tensor) -> Tensor:
            return torch.empty_like(x).pin_memory()

        self.data: Data = tree.map(allocate, like)
        self._uses_cuda = torch.device(device).type == "cuda"
        if self._uses_cuda:
            self._pinned = tree.map(allocate_pinned, like)
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
        self._check_fits(values)
        if not self._uses_cuda:
            _copy_leaves(self.data, values)
            return
        _check_not_capturing("StagingBuffers.put")

        # The host waits for the last copy out of pinned memory, never for a step.
        self._copied.synchronize()
        _copy_leaves(self._pinned, values)

        with torch.cuda.stream(self._copy_stream):
            self._copy_stream.wait_event(self._consumed)
            _copy_leaves(self.data, self._pinned)
            self._copied.record()

    def wait_copied(self) -> None:
        """Make the current stream wait for the copy; call it before a step."""
        if self._uses_cuda:
            torch.cuda.current_stream().wait_event(self._copied)

    def mark_consumed(self) -> None:
        """Let the next copy begin after the work queued so far; call it after a step."""
        if self._uses_cuda:
            self._consumed.record()

    def _check_fits(self, values: Data) -> None:
        names = tree.paths(self.data)
        leaves = zip(tree.leaves(values), tree.leaves(self.data))
        for name, (value, buffer) in zip(names, leaves):
            fits = value.shape == buffer.shape and value.dtype == buffer.dtype
            if not fits:
                raise ValueError(
                    f"{name}: expected {_describe(buffer)}, got {_describe(value)}"
                )


def _check_not_capturing(name: str) -> None:
    """Raise an error while the current stream is captured: the host takes part in a copy once, not at each replay."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{name}: expected a call between the steps, got one while a CUDA graph is captured"
        )


def _describe(x: Tensor) -> str:
    return f"{x.dtype} {list(x.shape)}"


def _copy_leaves(target: object, source: object) -> None:
    for target_leaf, source_leaf in zip(
        tree.leaves(target), tree.leaves(source)
    ):
        target_leaf.copy_(source_leaf, non_blocking=True)


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
    # PyTorch's allocator reuses pinned memory only after the copy out of it.
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

    with torch.cuda.device(device):
        # Two pinned buffers: one is filled while the other is copied to the device.
        copy_stream = torch.cuda.Stream()
        chunk_shape = (chunk_size, *rows.shape[1:])
        slots = [_CopySlot(chunk_shape, rows.dtype) for _ in range(2)]
        next_chunk = slots[0].start(chunks[0], copy_stream)

        for i in range(len(chunks)):
            chunk = next_chunk
            torch.cuda.current_stream().wait_event(slots[i % 2].copied)
            # allocated on the copy stream, used on this one
            chunk.record_stream(torch.cuda.current_stream())

            following = i + 1
            if following < len(chunks):
                next_chunk = slots[following % 2].start(
                    chunks[following], copy_stream
                )
            yield chunk

        for slot in slots:
            slot.record_time()


class _CopySlot:
    """A pinned buffer, and the events of its latest copy to the device."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._buffer = torch.empty(shape, dtype=dtype).pin_memory()
        self._is_timed = False  # a copy has begun whose time is not taken yet
        self._begun = torch.cuda.Event(enable_timing=True)
        self.copied = torch.cuda.Event(enable_timing=True)

    def start(self, chunk: Tensor, copy_stream: torch.cuda.Stream) -> Tensor:
        """The chunk on the device, valid once the event `copied` has happened."""
        _check_not_capturing("prefetch")
        # the buffer's last copy has left it; returns at once if there was none
        self.copied.synchronize()
        self.record_time()
        self._buffer[: len(chunk)].copy_(chunk)
        with torch.cuda.stream(copy_stream):
            self._begun.record()
            on_device = self._buffer[: len(chunk)].to("cuda", non_blocking=True)
            self.copied.record()
        self._is_timed = True
        return on_device

    def record_time(self) -> None:
        """Add the time of the latest copy to `copy_seconds`, unless it is in progress: nothing waits for it."""
        if self._is_timed and self.copied.query():
            copy_seconds.append(self._begun.elapsed_time(self.copied) / 1e3)
            self._is_timed = False


class AsyncReadback:
    """Copies of device values to the host that arrive one call later, so that neither side waits for the other.

    All calls take tensors of one shape. On a GPU a returned tensor is valid until the next call but one.
    """

    def __init__(self) -> None:
        """No value is on its way yet."""
        # At most two pinned buffers and the event of the copy into each; the most recent one is last.
        self._copies: list[tuple[Tensor, torch.cuda.Event]] = []

    def __call__(self, x: Tensor) -> Tensor | None:
        """Return the value of the previous call, None on the first; a tensor on the host is returned at once.

        Raises:
          RuntimeError: a CUDA graph is being captured.
        """
        if not x.is_cuda:
            return x
        _check_not_capturing("AsyncReadback")

        is_first = not self._copies
        if len(self._copies) < 2:
            pinned = torch.empty_like(x, device="cpu").pin_memory()
            self._copies.append((pinned, torch.cuda.Event()))
        else:
            self._copies.reverse()
        buffer, copied = self._copies[-1]
        buffer.copy_(x, non_blocking=True)
        copied.record()
        if is_first:
            return None

        previous_buffer, previous_copied = self._copies[0]
        previous_copied.synchronize()
        return previous_buffer
