"""Candidates from the host to a GPU while it computes: two pinned buffers, a stream of their own, an event a copy."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def staged(candidates: Tensor, size: int, device: torch.device | str) -> Iterator[Tensor]:
    """Parts of at most `size` rows on the device, the next one on its way while one is used.

    A part lives as long as the consumer keeps it. What is there already is not copied.
    """
    device, parts = torch.device(device), candidates.split(size)
    if device.type != "cuda" or candidates.is_cuda:
        yield from (part.to(device) for part in parts)
        return
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        buffers = [torch.empty((size, *candidates.shape[1:]), dtype=candidates.dtype).pin_memory() for _ in range(2)]
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
