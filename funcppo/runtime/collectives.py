"""Collectives among the processes of torchrun that can be traced: in one graph of the compiler, and in one CUDA graph.

    group = connect(processes)
    table = group.all_gather(rows)      # in a compiled function too

A collective waits for all processes: each must call the same ones in the same order.

What several processes try works in all of them, or in none: they agree before any runs what it has compiled.

    with attempt_together(agree, "one-graph") as attempt:
        step = compile_function(fn)       # each compilation ends with `settle`
        step(x)                           # no process is in a collective of `step` that another one cannot compile

Each process makes the same compilations in the same order, so the agreements of an attempt are equally many. The first
failure ends the attempt in all processes, each at the agreement that it has come to.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, distributed

from funcppo.core import tree
from funcppo.runtime.distributed import Facts, Processes
from funcppo.runtime.reasons import error_line

Tree = TypeVar("Tree")

_agreements = count()  # gives each agreement of a program a name of its own


@dataclass(frozen=True, kw_only=True, slots=True)
class AllGather:
    """Gathers the rows of all processes; equal in all of them, so that they compile one graph."""

    world_size: int
    group_name: str

    def __call__(self, rows: Tensor, /) -> Tensor:
        """The rows [world_size * n, ...] of all processes in the order of ranks, from n of this one.

        Raises:
          RuntimeError: called under `torch.vmap`, which would return numbers of no meaning, or under `torch.func.grad`,
            which would return zeros in PyTorch 2.10.
        """
        if torch._C._are_functorch_transforms_active():  # pyright: ignore[reportAttributeAccessIssue]
            raise RuntimeError(
                "all_gather: expected a call outside of torch.vmap and torch.func.grad, which cannot transform it"
            )
        gathered = torch.ops._c10d_functional.all_gather_into_tensor(
            rows.contiguous(), self.world_size, self.group_name
        )
        return torch.ops._c10d_functional.wait_tensor(gathered)


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """This process among those that learn together."""

    processes: Processes
    all_gather: AllGather

    @property
    def rank(self) -> int:
        """Number of this process, from 0."""
        return self.processes.rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.processes.world_size

    @property
    def is_main(self) -> bool:
        """Whether this process writes and prints."""
        return self.processes.is_main

    def broadcast(self, values: Tree) -> Tree:
        """The tensors of rank 0; those of other processes say shapes and dtypes. A collective."""

        def receive(x: Tensor) -> Tensor:
            x = x.clone(memory_format=torch.contiguous_format)
            distributed.broadcast(x, 0)
            return x

        with self.processes.collective(f"broadcast {next(_agreements)}"):
            return tree.map(receive, values)

    def agree(self, decision: bool) -> bool:
        """What rank 0 has decided.

        Raises:
          PeerError: another process has ended with an error.
          StalledError: no process made progress for too long.
        """
        name = f"agreement/{next(_agreements)}"
        return self.processes.share(name, decision)

    def first_failure(self, what: str, failure: str = "") -> str:
        """The first failure among what all processes try, with its rank; empty if all succeeded.

        They may have failed in a collective: none is used.

        Args:
          what: what they try, for reports of progress.
          failure: why this process fails, one line; empty if it succeeds.

        Raises:
          PeerError: another process has ended with an error.
          StalledError: some process did not come to an end.
        """
        number = next(_agreements)
        result = f" failed: {failure}" if failure else ""
        self.processes.report(f"agreement {number}, {what}{result}")
        failures = self.processes.exchange(f"agreement/{number}", failure)
        found = [f"rank {i}: {text}" for i, text in enumerate(failures) if text]
        return found[0] if found else ""

    def check_equal(self, facts: Facts) -> None:
        """Check that all processes hold equal facts; errors as of `Processes.check_equal`."""
        self.processes.check_equal(f"agreement/{next(_agreements)}", facts)


def connect(processes: Processes, facts: Facts) -> Group:
    """Connect the processes for collectives: by NCCL on GPUs, by Gloo on CPUs.

    A process group that the program has made itself is used as it is.

    Args:
      facts: what must be the same for all; JSON values.

    Raises:
      ValueError: they differ; the message names the rank, and both values.
      PeerError: another process has ended with an error.
      StalledError: some process does not come.
    """
    processes.check_equal(f"agreement/{next(_agreements)}", facts)
    if not distributed.is_initialized():
        has_gpu = torch.cuda.is_available()
        with _discard_native_output():
            distributed.init_process_group(
                "cpu:gloo,cuda:nccl" if has_gpu else "gloo",
                store=distributed.PrefixStore("collectives", processes.store),  # pyright: ignore[reportPrivateImportUsage]
                rank=processes.rank,
                world_size=processes.world_size,
                # A process that waits longer than `Processes.deadline` allows has ended before.
                timeout=timedelta(seconds=2 * processes.stall_seconds + 1),
            )
        atexit.register(_disconnect)
    world = distributed.group.WORLD
    assert world is not None
    return Group(
        processes=processes,
        all_gather=AllGather(
            world_size=processes.world_size,
            group_name=world.group_name,
        ),
    )


def choose_gpu() -> None:
    """Make the GPU with the number of this process on its host the current one, if there is one."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if local_rank < torch.cuda.device_count():
        torch.cuda.set_device(local_rank)


@contextmanager
def _discard_native_output() -> Iterator[None]:
    """Discard what C++ code prints: Gloo of PyTorch 2.10 reports each connection amid the results of a program."""
    if sys.__stdout__ is None:  # closed: file descriptor 1 may be a socket
        yield
        return
    stdout = os.dup(1)
    null_device = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null_device, 1)
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
        os.close(null_device)


def _disconnect() -> None:
    if distributed.is_initialized():
        distributed.destroy_process_group()


class Agree(Protocol):
    """Tells the other processes whether this one succeeded in what all of them try."""

    def __call__(self, what: str, failure: str = "", /) -> str:
        """The first failure among all processes, with its rank; empty if all succeeded.

        Args:
          what: what is tried, in reports of progress.
          failure: why it fails in this process, one line; empty if it succeeds.
        """
        ...


class PeerFailedError(RuntimeError):
    """What all processes try works here, but not in another one; the message names it, and why."""


@dataclass(kw_only=True, slots=True)
class Attempt:
    """Something that all processes try."""

    agree: Agree
    what: str
    failure: str = ""
    """The first failure among all processes; empty as long as there is none."""

    def settle(self, failure: str = "") -> None:
        """Tell the others whether this process succeeded so far; nothing if the attempt is over.

        Raises:
          PeerFailedError: this process succeeded, another did not.
        """
        if self.failure:
            return
        self.failure = self.agree(self.what, failure)
        if self.failure and not failure:
            raise PeerFailedError(self.failure)


_attempts: list[Attempt] = []


def alone(_: str, failure: str = "", /) -> str:
    """The agreement of one process."""
    return failure


@contextmanager
def attempt_together(agree: Agree, what: str) -> Iterator[Attempt]:
    """An attempt of all processes, which ends with their agreement on it.

    Raises:
      PeerFailedError: this process succeeded, another did not.
      Exception: what this process raised itself.
    """
    attempt = Attempt(agree=agree, what=what)
    _attempts.append(attempt)
    try:
        yield attempt
    except Exception as error:
        if attempt.failure:  # told already, perhaps through the compiler
            raise PeerFailedError(attempt.failure) from None
        attempt.settle(describe(error))
        raise
    finally:
        _attempts.pop()
    attempt.settle()


def settle() -> None:
    """Agree that all have compiled what comes next, if they `attempt_together`.

    Raises:
      PeerFailedError: another process has not.
    """
    if _attempts:
        _attempts[-1].settle()


def backend_options(
    backend: str, options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Arguments of `torch.compile`: a backend and its options; it ends with `settle` in an `attempt_together`."""
    if not _attempts or _attempts[-1].agree is alone:
        return {
            "backend": backend,
            "options": None if options is None else dict(options),
        }
    compile_graph: Any = (
        torch._TorchCompileInductorWrapper("default", options, dynamic=False)
        if backend == "inductor"
        else torch._dynamo.lookup_backend(backend)
    )

    def compile_and_settle(graph: Any, inputs: Any) -> Any:
        code = compile_graph(graph, inputs)
        settle()
        return code

    return {"backend": compile_and_settle}


def describe(error: BaseException) -> str:
    """An error as one line."""
    return f"{type(error).__name__}: {error_line(error)}".removesuffix(": ")
