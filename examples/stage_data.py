"""Data from the host for a captured step, copied while the step before runs: `python examples/stage_data.py`."""

from __future__ import annotations

from typing import Generic, TypeVar

import torch

from funcppo.core import tree
from funcppo.runtime.capture import capture
from funcppo.runtime.memory import check_not_capturing

Data = TypeVar("Data")


class StagingBuffers(Generic[Data]):
    """Device buffers for data from the host; captured functions close over `data`.

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
        """Start copying values to the buffers; return when they are in pinned memory.

        Args:
          values: a tree on the host, of the structure, shapes and dtypes of the buffers.

        Raises:
          ValueError: a leaf has another shape or dtype; the message names it.
          RuntimeError: a CUDA graph is being captured, which would copy these values at every replay.
        """
        tree.check_layout(values, self.data, "values", ValueError)
        pairs = [*zip(tree.leaves(self.data), tree.leaves(values))]
        if not self._uses_cuda:
            for x, value in pairs:
                x.copy_(value)
            return
        check_not_capturing("StagingBuffers.put")

        pairs = [(x, value.pin_memory()) for x, value in pairs]
        with torch.cuda.stream(self._copy_stream):
            self._copy_stream.wait_event(self._consumed)
            for x, value in pairs:
                x.copy_(value, non_blocking=True)
            self._copied.record()

    def wait_copied(self) -> None:
        """Make the current stream wait for the copy; call it before a step."""
        if self._uses_cuda:
            torch.cuda.current_stream().wait_event(self._copied)

    def mark_consumed(self) -> None:
        """Allow the next copy to start after all work queued so far; call it after a step."""
        if self._uses_cuda:
            self._consumed.record()


def main(device: torch.device | str, n_batches: int = 20) -> float:
    """Return the sum of the numbers of all batches, which a captured step adds up."""
    staging = StagingBuffers(torch.zeros(1000), device)
    staging.put(torch.zeros(1000))
    staging.wait_copied()
    add = lambda total: (total + staging.data.sum(), total)
    captured = capture(add, torch.zeros((), device=device))
    for i in range(n_batches):
        staging.put(torch.full((1000,), float(i)))
        staging.wait_copied()
        captured.step()
        staging.mark_consumed()
    return float(captured.state)


if __name__ == "__main__":
    print(main("cuda" if torch.cuda.is_available() else "cpu"))
