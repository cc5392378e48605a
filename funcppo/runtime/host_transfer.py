"""Host data on its way to a GPU while it computes, and back: through pinned memory, ordered by events.

`Staging` fills the buffers that a captured step reads. Pinned memory is set aside once, so that nothing allocates, pins
or waits while a graph is recorded or replayed: a copy waits until the last step has read the buffers, and a step waits
until the copy has filled them. `staged` brings a long table part by part, the next one on its way while one is used.
`lagging` has the host look at what the device did a while ago, so that neither waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from funcppo import tree

D = TypeVar("D")


class StagingBuffers(Generic[D]):
    """Buffers on the device and the way to them; `data` is what a captured function closes over."""

    def __init__(self, like: D, device: torch.device | str) -> None:
        """Buffers with the structure, shapes and dtypes of `like`, a tree on the host."""
        self.data: D = tree.map(lambda x: torch.empty_like(x, device=device), like)
        self._cuda = torch.device(device).type == "cuda"
        if self._cuda:
            self._pinned = tree.map(lambda x: torch.empty_like(x).pin_memory(), like)
            self._stream = torch.cuda.Stream()
            self._copied, self._read = torch.cuda.Event(), torch.cuda.Event()

    def put(self, values: D) -> None:
        """Send values to the buffers; returns once they are pinned, before they have arrived.

        Errors: ValueError naming the leaf that has another shape or dtype.
        """
        for name, x, to in zip(tree.paths(self.data), tree.leaves(values), tree.leaves(self.data)):
            if (x.shape, x.dtype) != (to.shape, to.dtype):
                raise ValueError(f"{name}: want {to.dtype} {list(to.shape)}, got {x.dtype} {list(x.shape)}")
        if not self._cuda:
            _copy(self.data, values)
            return
        self._copied.synchronize()  # the host waits for the last copy out of pinned memory, never for a step
        _copy(self._pinned, values)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._read)
            _copy(self.data, self._pinned)
            self._copied.record()

    def wait_copied(self) -> None:
        """Call before a step: it runs after the copy."""
        if self._cuda:
            torch.cuda.current_stream().wait_event(self._copied)

    def mark_consumed(self) -> None:
        """Call after a step: the next copy runs after it."""
        if self._cuda:
            self._read.record()


def _copy(into: Any, values: Any) -> None:
    for a, b in zip(tree.leaves(into), tree.leaves(values)):
        a.copy_(b, non_blocking=True)


def prefetch(rows: Tensor, chunk_size: int, device: torch.device | str) -> Iterator[Tensor]:
    """Parts of at most `size` rows on the device, the next one on its way while one is used.

    A part lives as long as the consumer keeps it. What is there already is not copied.
    """
    device, parts = torch.device(device), rows.split(chunk_size)
    if device.type != "cuda" or rows.is_cuda:
        yield from (part.to(device) for part in parts)
        return
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        buffers = [torch.empty((chunk_size, *rows.shape[1:]), dtype=rows.dtype).pin_memory() for _ in range(2)]
        copied = [torch.cuda.Event(), torch.cuda.Event()]
        ahead = _send(parts[0], buffers[0], copied[0], stream)
        for i in range(len(parts)):
            part, event = ahead, copied[i % 2]
            torch.cuda.current_stream().wait_event(event)
            part.record_stream(torch.cuda.current_stream())
            if i + 1 < len(parts):
                ahead = _send(parts[i + 1], buffers[(i + 1) % 2], copied[(i + 1) % 2], stream)
            yield part


def _send(part: Tensor, buffer: Tensor, copied: torch.cuda.Event, stream: torch.cuda.Stream) -> Tensor:
    """The part on the device, as of the event."""
    copied.synchronize()  # the buffer's last copy has left it; at once where there was none
    buffer[: len(part)].copy_(part)
    with torch.cuda.stream(stream):
        there = buffer[: len(part)].to("cuda", non_blocking=True)
        copied.record()
    return there


def make_async_readback() -> Callable[[Tensor], Tensor | None]:
    """`look(x)`: on a GPU what the last look asked for, None the first time, so that neither side waits; else x itself.

    All looks are at tensors of one shape. What a look returns is valid until the next but one.
    """
    sent: list[tuple[Tensor, torch.cuda.Event]] = []  # at most two, the last one sent last

    def look(x: Tensor) -> Tensor | None:
        if not x.is_cuda:
            return x
        if len(sent) < 2:
            sent.append((torch.empty_like(x, device="cpu").pin_memory(), torch.cuda.Event()))
        else:
            sent.reverse()
        buffer, copied = sent[-1]
        buffer.copy_(x, non_blocking=True)
        copied.record()
        if len(sent) < 2:
            return None
        buffer, copied = sent[0]
        copied.synchronize()
        return buffer

    return look
