"""Tasks of a program that runs in rank 0 alone, done by all processes of torchrun.

    with TaskPool(processes, "cpu") as pool:          # rank 0
        for result in pool.map_tasks(context, work, tasks, latest): ...

    TaskPool(processes, "cpu").serve(context)         # every other process, until rank 0 leaves the pool

Rank 0 sends a function and its tasks, each process takes the next task that nobody has taken, and rank 0 receives the
results in the order of the tasks. What every process holds by itself, such as an index of the data, is the context.
Values are pickled: the processes trust each other, as those of torchrun do.
"""

from __future__ import annotations

import io
import pickle
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor

from funcppo.runtime.distributed import Processes

# between two posts of what rank 0 has found so far
POST_SECONDS = 2.0

Result = TypeVar("Result")
ResultOf = TypeVar("ResultOf", covariant=True)


class Latest(Protocol):
    """Returns the newest hint that there is; a result does not depend on it, only how fast it comes."""

    def __call__(self) -> Any: ...


class PoolWork(Protocol[ResultOf]):
    """Does a task: a function of a module, or a `partial` of one."""

    def __call__(
        self, context: Any, latest: Latest, task: Any, /
    ) -> Iterator[ResultOf]:
        """Yield the results of a task."""
        ...


class TaskPool:
    """The processes that do tasks of rank 0; a context of rank 0, at whose end the others stop."""

    def __init__(self, processes: Processes, device: str) -> None:
        """Wait for nothing yet.

        Args:
          device: of the tensors that a process receives.
        """
        self._processes = processes
        self._device = device
        self._n_parts = 0
        self._stop: Callable[[], None] = lambda: None

    def __enter__(self) -> Self:
        """The pool itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Tell the other processes that no task is left."""
        self._stop()
        self._processes.share_bytes(self._next_name(), encode(None))

    def map_tasks(
        self,
        context: Any,
        work: PoolWork[Result],
        tasks: Sequence[Any],
        latest: Latest,
    ) -> Generator[Result, None, None]:
        """Yield the results of all tasks in their order; on rank 0.

        Args:
          context: what the other processes hold too, see `serve`.
          work: does a task; its results must not depend on the process.
          tasks: values that can be pickled.
          latest: posted for the other processes every few seconds; always of the same shapes.

        Raises:
          PeerError: another process has ended with an error.
          StalledError: no process made progress for too long.
        """
        name = self._next_name()
        self._processes.post(f"{name}/latest", encode(latest()))
        self._processes.share_bytes(name, encode((work, tasks)))
        self._stop = partial(self._processes.stop_tasks, name, len(tasks))
        posted = time.monotonic()
        try:
            for block in self._iter_blocks(name, context, work, tasks, latest):
                yield from decode(block, self._device)
                if time.monotonic() - posted > POST_SECONDS:
                    self._processes.post(f"{name}/latest", encode(latest()))
                    posted = time.monotonic()
        finally:
            self._stop()

    def serve(self, context: Any) -> None:
        """Do tasks until rank 0 leaves the pool; on every other process.

        Raises:
          PeerError: another process has ended with an error.
          StalledError: no process made progress for too long.
        """
        while True:
            name = self._next_name()
            part = decode(self._processes.share_bytes(name), self._device)
            if part is None:
                return
            work, tasks = part
            latest = partial(self._read_latest, name)
            for _ in self._iter_blocks(name, context, work, tasks, latest):
                pass  # rank 0 has the results

    def _next_name(self) -> str:
        """The name of what is done next, the same in all processes."""
        self._n_parts += 1
        return f"part {self._n_parts}, task"

    def _iter_blocks(
        self,
        name: str,
        context: Any,
        work: PoolWork[Any],
        tasks: Sequence[Any],
        latest: Latest,
    ) -> Iterator[bytes]:
        """Do the tasks that nobody has taken; on rank 0, yield the results of each."""

        def do_task(task: int) -> bytes:
            return encode(list(work(context, latest, tasks[task])))

        return self._processes.iter_results(name, len(tasks), do_task)

    def _read_latest(self, name: str) -> Any:
        """What rank 0 has posted last."""
        block = self._processes.read_post(f"{name}/latest")
        assert block is not None, "rank 0 posts before it names the tasks"
        return decode(block, self._device)


class _Pickler(pickle.Pickler):
    """Pickles the numbers of a tensor, without those that its storage holds beside them."""

    def reducer_override(self, value: Any) -> Any:
        """How a value is pickled."""
        if isinstance(value, Tensor):
            return _receive, (value.detach().cpu().numpy(),)
        return NotImplemented


def _receive(array: Any) -> Tensor:
    """Stands for a tensor in what is sent; `_Unpickler` puts a method in its place."""
    raise NotImplementedError


class _Unpickler(pickle.Unpickler):
    """Puts tensors on a device."""

    def __init__(self, file: io.BytesIO, device: str) -> None:
        super().__init__(file)
        self._device = device

    def find_class(self, module: str, name: str) -> Any:
        """A function or class by its name."""
        found = super().find_class(module, name)
        if found is _receive:
            return self._to_device
        return found

    def _to_device(self, array: Any) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def encode(value: object) -> bytes:
    """A value as bytes."""
    file = io.BytesIO()
    _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


def decode(block: bytes, device: str) -> Any:
    """The value of `encode`, its tensors on a device."""
    return _Unpickler(io.BytesIO(block), device).load()
