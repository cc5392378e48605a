"""The processes that torchrun started for one program: who is first, what all agree on, results in order, distributed.

`join` connects a process with the others. Work is a list of tasks, the same for every number of processes: each process
takes the next one that nobody has taken, and rank 0 receives the results in the order of the tasks. What the processes
tell each other goes through the key-value store of torchrun, on the CPU and on GPUs alike.

`connect` connects them for collectives, which can be traced: in one graph of the compiler, and in one CUDA graph. A
collective waits for all processes: each must call the same ones in the same order.

    group = connect(processes, facts)
    table = group.all_gather(rows)      # in a compiled function too

What several processes try works in all of them, or in none: they agree before any runs what it has compiled.

    with attempt_together(agree, "one-graph"):
        step = compile_function(fn)       # each compilation ends with `settle`
        step(x)                           # no process is in a collective of `step` that another one cannot compile

Each process makes the same compilations in the same order, so the agreements of an attempt are equally many. The first
failure ends the attempt in all processes, each at the agreement that it has come to.

This module imports PyTorch when a process joins: before, it chooses the GPU that PyTorch sees.
"""

from __future__ import annotations

import atexit
import json
import os
import platform
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from funcppo.core.settings import is_cuda

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

# JSON values
Facts: TypeAlias = Mapping[str, Any]
# What a process tries and why it failed, one line or empty; the first failure among all processes, with its rank, or
# empty. See `Processes.first_failure`.
Agree: TypeAlias = Callable[..., str]
TreeT = TypeVar("TreeT")

# What a launcher such as torchrun sets for each process.
LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Sets the seconds without progress of any process after which one that waits gives up.
STALL_VARIABLE = "FUNCPPO_STALL_SECONDS"
EXIT_STALLED = 75  # EX_TEMPFAIL of sysexits.h: another process did not answer
EXIT_PEER_FAILED = 2  # another process ended with an error
# between two looks at the others, within a deadline
WATCH_SECONDS = 1.0
# for rank 0 to print the error of another process
TELL_SECONDS = 10.0
# The store takes values of less than 8 MiB.
MAX_VALUE_BYTES = 4 << 20

_FAILURE, _ACKNOWLEDGED = "failure", "acknowledged"


def error_line(error: BaseException) -> str:
    """Format an error on one line; an error without text is named by the line that raised it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    is_dynamos = lines[:1] == ["from user code:"]  # added to an empty text
    if lines and not is_dynamos:
        # a compiler names its backend in a line before the error
        return " ".join(lines[: 2 if lines[0].endswith(":") else 1])
    places = [
        f"{Path(frame.filename).name}, line {frame.lineno}: {frame.line}"
        for frame in traceback.extract_tb(error.__traceback__)[-1:]
    ]
    if is_dynamos:
        places.append(re.sub(r'"[^"]*/', '"', " ".join(lines[:3])))
    return ", ".join(places)


class PeerError(ValueError):
    """Error for another process that has ended with an error; the message names it."""


class StalledError(RuntimeError):
    """Error after too long without progress in any process; the message says how far each process is."""


@dataclass(kw_only=True, slots=True)
class Processes:
    """Handle on all processes of the program, from the view of this one."""

    store: Store
    """What all processes read and write."""
    rank: int
    """Number of this process, from 0."""
    world_size: int
    """Number of processes."""
    stall_seconds: float = 600.0
    """Time without progress of any process after which one that waits gives up."""
    all_gather: AllGather = field(
        default_factory=lambda: AllGather(world_size=1, group_name="")
    )
    """Gathers rows of all processes, once they are connected."""
    _n_deadlines: int = 0
    _agreements: Iterator[int] = field(default_factory=count)

    @property
    def is_main(self) -> bool:
        """Return whether this process writes files and prints."""
        return self.rank == 0

    def report(self, text: str) -> None:
        """Publish how far this process is, for the messages about stalls."""
        self.store.set(f"progress/{self.rank}", text)

    def share(self, name: str, value: Any = None) -> Any:
        """Return the JSON value that rank 0 gives.

        Args:
          name: not used before.
          value: of rank 0; ignored elsewhere.

        Raises:
          PeerError: another process has ended with an error.
          StalledError: no process made progress for too long.
        """
        if self.is_main:
            self.share_bytes(name, json.dumps(value).encode())
            return value
        return json.loads(self.share_bytes(name))

    def share_bytes(self, name: str, value: bytes = b"") -> bytes:
        """Return the bytes that rank 0 gives; arguments and errors as in `share`."""
        if self.is_main:
            self._put(name, value)
            return value
        self._wait(name)
        return self._get(name)

    def agree(self, decision: bool) -> bool:
        """Return rank 0's decision; errors as in `share`."""
        return self.share(f"agreement/{next(self._agreements)}", decision)

    def first_failure(self, what: str, failure: str = "") -> str:
        """Return the first failure of what all processes try, with its rank; empty if all succeeded.

        They may have failed in a collective: none is used. Errors as of `share`.

        Args:
          what: what they try, for reports of progress.
          failure: why this process fails, one line; empty if it succeeds.
        """
        number = next(self._agreements)
        result = f" failed: {failure}" if failure else ""
        self.report(f"agreement {number}, {what}{result}")
        failures = self.exchange(f"agreement/{number}", failure)
        return next(
            (f"rank {i}: {text}" for i, text in enumerate(failures) if text), ""
        )

    def check_equal(self, facts: Facts) -> None:
        """Check that all processes hold equal facts (JSON values); also a barrier.

        Raises:
          ValueError: a process holds others than rank 0, on every process; the message names both.
          PeerError: another process has ended with an error.
          StalledError: no process made progress for too long.
        """
        name = f"agreement/{next(self._agreements)}"
        all_facts: list[Facts] = self.exchange(name, facts)
        for rank, others in enumerate(all_facts):
            for key, expected in all_facts[0].items():
                if others.get(key) != expected:
                    raise ValueError(
                        f"rank {rank}: expected {key} {expected}, as rank 0 has, got {others.get(key)}"
                    )

    def broadcast(self, values: TreeT) -> TreeT:
        """Return rank 0's tensors in every process; other processes pass tensors of equal shapes. A collective."""
        import torch
        from torch import distributed

        from funcppo.core import tree

        def receive(x: Tensor) -> Tensor:
            x = x.clone(memory_format=torch.contiguous_format)
            distributed.broadcast(x, 0)
            return x

        with self.collective(f"broadcast {next(self._agreements)}"):
            return tree.map(receive, values)

    def exchange(self, name: str, value: Any) -> list[Any]:
        """Return the values of all processes in the order of ranks; also a barrier.

        Args:
          name: not used before.
          value: a JSON value.

        Raises:
          PeerError: another process has ended with an error.
          StalledError: no process made progress for too long.
        """
        self._put(f"{name}/{self.rank}", json.dumps(value).encode())
        values: list[Any] = []
        for rank in range(self.world_size):
            self._wait(f"{name}/{rank}")
            values.append(json.loads(self._get(f"{name}/{rank}")))
        return values

    def iter_results(
        self, name: str, n_tasks: int, work: Callable[[int], bytes]
    ) -> Iterator[bytes]:
        """Work on tasks that no process has taken; on rank 0, yield the results of all tasks in order.

        Args:
          name: of a task, in reports of progress; not used before.
          work: does a task; its result must not depend on the process.

        Raises:
          PeerError: another process has ended with an error.
          StalledError: no process made progress for too long.
        """
        try:
            yield from self._iter_in_order(name, n_tasks, work)
        finally:
            # also where rank 0 wants no more results
            if self.is_main:
                self.store.set(f"{name}/end", "")
        if not self.is_main:
            # Rank 0 may hang: whoever ends before it could not tell.
            self._wait(f"{name}/end")
            self.store.set(f"{name}/end/{self.rank}", "")
            return
        # The store may be a part of this process, which must not end first.
        for rank in range(1, self.world_size):
            self._wait(f"{name}/end/{rank}")

    def _iter_in_order(
        self, name: str, n_tasks: int, work: Callable[[int], bytes]
    ) -> Iterator[bytes]:
        """Work on tasks that no process has taken; on rank 0, yield the results of all tasks in order."""
        tasks = self._iter_own(name, n_tasks, work)
        if not self.is_main:
            for task, result in tasks:
                self._put(f"{name}/{task}", result)
            return

        own: dict[int, bytes] = {}
        for wanted in range(n_tasks):
            key = f"{name}/{wanted}"
            while wanted not in own and not self.store.check([key]):
                done = next(tasks, None)
                if done is None:
                    self._wait(key)
                else:
                    own |= [done]
            yield own.pop(wanted) if wanted in own else self._take(key)

    def _iter_own(
        self, name: str, n_tasks: int, work: Callable[[int], bytes]
    ) -> Iterator[tuple[int, bytes]]:
        """Work on tasks that no process has taken; yield each task's number and its result."""
        for n_done in count():
            task = self.store.add(f"{name}/next", 1) - 1
            if task >= n_tasks:
                self.report(f"{n_done} done, no {name} left")
                return
            self.report(f"{n_done} done, at {name} {task + 1} of {n_tasks}")
            result = work(task)
            self._raise_failure()
            yield task, result

    @contextmanager
    def deadline(self, text: str) -> Iterator[None]:
        """End this process if a block that depends on the other processes makes no progress in time.

        A collective waits for a process that hangs, on a GPU in a kernel that nothing interrupts. So after
        `stall_seconds` without progress of any process this one prints how far each is, and exits at once with
        `EXIT_STALLED`, for torchrun to start all again.

        Args:
          text: what it does, for the message; another one each time, which counts as progress.
        """
        self.report(text)
        self._n_deadlines += 1
        ended = threading.Event()
        watch = threading.Thread(
            target=self._watch, args=(self._failure_key, ended), daemon=True
        )
        watch.start()
        try:
            yield
        finally:
            ended.set()

    @contextmanager
    def collective(self, text: str) -> Iterator[None]:
        """Watch a block like `deadline`; as no process can end it alone, an error in one process ends all.

        Rank 0 prints the error of another process and exits with `EXIT_PEER_FAILED`, and so do those that wait for it.
        All processes come to the same deadlines in the same order.

        Raises:
          PeerError: another process has failed before, in what this one raised an error for.
        """
        with self.deadline(text):
            key = self._failure_key
            try:
                yield
            except Exception as error:
                if self.store.check([key]):
                    raise PeerError(self.store.get(key).decode()) from error
                line, *_ = str(error).strip().splitlines() or [""]
                name = f"{text}: {type(error).__name__}"
                self.store.set(key, f"rank {self.rank}: {name}: {line}")
                raise

    @property
    def _failure_key(self) -> str:
        """Return the store's key for the error of a process that failed within the latest deadline."""
        return f"deadline/{self._n_deadlines}/failure"

    def _watch(self, key: str, ended: threading.Event) -> None:
        """Exit if no process makes progress for too long or one has failed, until `ended` is set.

        Args:
          key: holds the error of a process that failed.
        """
        stalls = self._iter_stalls()
        while not ended.wait(min(WATCH_SECONDS, self.stall_seconds)):
            if self.store.check([key]):
                if self.is_main:
                    _print_error(self.store.get(key).decode())
                    self.store.set(_ACKNOWLEDGED, "")
                self._wait_for_acknowledgement()
                os._exit(EXIT_PEER_FAILED)
            stall = next(stalls)
            if stall:
                _print_error(f"rank {self.rank}: {stall}")
                os._exit(EXIT_STALLED)

    def fail(self, message: str) -> bool:
        """Tell the other processes that this one ends with an error; return whether rank 0 has printed an error.
        Rank 0 prints its own before the call.

        Args:
          message: one line.

        Returns:
          Whether rank 0 has printed an error; the others wait for it.
        """
        try:
            if not self.store.check([_FAILURE]):
                failure = {"rank": self.rank, "message": message}
                self.store.set(_FAILURE, json.dumps(failure))
            if self.is_main:
                self.store.set(_ACKNOWLEDGED, "")
            return self._wait_for_acknowledgement()
        except RuntimeError:  # the store has gone
            return self.is_main

    def _wait_for_acknowledgement(self) -> bool:
        """Wait until rank 0 has printed an error; return False if it does not in time."""
        stop = time.monotonic() + TELL_SECONDS
        while not self.store.check([_ACKNOWLEDGED]):
            if time.monotonic() > stop:
                return False
            time.sleep(0.02)
        return True

    def _take(self, key: str) -> bytes:
        """Return the result of a finished task, and delete it from the store."""
        result = self._get(key)
        for i in range(int(self.store.get(key))):
            self.store.delete_key(f"{key}/part/{i}")
        return result

    def _put(self, key: str, value: bytes) -> None:
        """Write a value of any size to the store in parts, its key last."""
        n_parts = -(-len(value) // MAX_VALUE_BYTES)
        for i in range(n_parts):
            part = value[i * MAX_VALUE_BYTES :][:MAX_VALUE_BYTES]
            self.store.set(f"{key}/part/{i}", part)  # pyright: ignore[reportArgumentType]
        self.store.set(key, str(n_parts))

    def _get(self, key: str) -> bytes:
        """Read a value that `_put` wrote."""
        n_parts = int(self.store.get(key))
        return b"".join(
            self.store.get(f"{key}/part/{i}") for i in range(n_parts)
        )

    def _wait(self, key: str) -> None:
        """Wait until a key is in the store."""
        started = time.monotonic()
        stalls = self._iter_stalls()
        while not self.store.check([key]):
            self._raise_failure()
            stall = next(stalls)
            if stall:
                raise StalledError(stall)
            # What comes soon is waited for shortly.
            waited = time.monotonic() - started
            time.sleep(min(0.02, waited / 4 + 1e-4))

    def _iter_stalls(self) -> Iterator[str]:
        """Yield at each look how far all processes are if none has moved for too long, else an empty text."""
        seen = ""
        moved_at = time.monotonic()
        while True:
            progress = "; ".join(self._progress())
            if progress != seen:
                seen, moved_at = progress, time.monotonic()
            is_stalled = time.monotonic() - moved_at > self.stall_seconds
            text = f"expected progress within {self.stall_seconds:g} s, got none: {progress}"
            yield text if is_stalled else ""

    def _progress(self) -> Iterator[str]:
        """Yield how far each process is, one line per rank."""
        for rank in range(self.world_size):
            key = f"progress/{rank}"
            is_there = self.store.check([key])
            text = self.store.get(key).decode() if is_there else "not joined"
            yield f"rank {rank}: {text}"

    def _raise_failure(self) -> None:
        """Raise `PeerError` if another process has ended with an error."""
        if self.store.check([_FAILURE]):
            failure = json.loads(self.store.get(_FAILURE))
            raise PeerError(f"rank {failure['rank']}: {failure['message']}")


def _print_error(line: str) -> None:
    """Print a line on the original standard error; processes other than rank 0 have replaced sys.stderr."""
    print(f"funcppo: {line}", file=sys.__stderr__, flush=True)


def launched_size() -> int:
    """Return the number of processes that a launcher started for this program; 0 without a launcher."""
    return _launched("WORLD_SIZE")


def launched_rank() -> int:
    """Return the rank of this process among those that a launcher started; 0 without a launcher."""
    return _launched("RANK")


def local_rank() -> int:
    """Return the rank of this process among those on its host."""
    return _number("LOCAL_RANK" if "LOCAL_RANK" in os.environ else "RANK")


def local_size() -> int:
    """Return the number of processes on this host, at least 1."""
    return max(1, _launched("LOCAL_WORLD_SIZE"))


def _launched(variable: str) -> int:
    """Return the number in a variable that a launcher sets for its processes; 0 without a launcher."""
    is_launched = all(name in os.environ for name in LAUNCH_VARIABLES)
    return _number(variable) if is_launched else 0


def _number(variable: str) -> int:
    """Return the number in an environment variable; 0 if it holds no number."""
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else 0


_joined: list[Processes] = []


def current_processes() -> Processes | None:
    """Return the group of processes that this one has joined; None if it works alone."""
    return _joined[0] if _joined else None


def join(facts: Facts, *, hide_gpus: bool = True) -> Processes | None:
    """Connect with the other processes of the program, once; return None if this process works alone.

    Args:
      facts: what must be the same for all, beside the versions of Python and PyTorch; JSON values.
      hide_gpus: let PyTorch see one GPU only, that with the number of the process on its host. It works before PyTorch
        has looked for GPUs.

    Returns:
      The processes; None where no launcher started this one.

    Raises:
      ValueError: versions or facts differ, or the time in the environment is no number.
      StalledError: some process does not come.
    """
    if not launched_size() or _joined:
        return current_processes()
    stall_seconds = _stall_seconds()
    if hide_gpus:
        _choose_gpu()

    import torch
    from torch import distributed

    timeout = timedelta(seconds=stall_seconds)
    meetings = distributed.rendezvous("env://", timeout=timeout)  # pyright: ignore[reportPrivateImportUsage]
    store, rank, world_size = next(meetings)
    # Some versions keep the keys of an attempt that torchrun has ended.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    processes = Processes(
        store=distributed.PrefixStore(f"funcppo/{attempt}", store),  # pyright: ignore[reportPrivateImportUsage]
        rank=rank,
        world_size=world_size,
        stall_seconds=stall_seconds,
    )
    _joined.append(processes)
    processes.report("joined")
    versions = {
        "Python": platform.python_version(),
        "PyTorch": torch.__version__,
    }
    processes.check_equal({**versions, **facts})
    return processes


def gpu_facts(device: str) -> dict[str, str]:
    """Return the GPU model of this process, which all processes must share: other models round differently."""
    if not is_cuda(device):
        return {"GPU": "none"}

    import torch

    return {"GPU": torch.cuda.get_device_name(device)}


def _stall_seconds() -> float:
    """Read how many seconds a waiting process allows without progress."""
    text = os.environ.get(STALL_VARIABLE, "600")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise ValueError(
            f"{STALL_VARIABLE}: expected seconds above 0, got {text!r}"
        )
    return seconds


def _choose_gpu() -> None:
    """Let PyTorch see only the GPU with this process's number on its host, of those that it may see."""
    number = local_rank()
    name = str(number)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        name = "".join(visible.split(",")[number : number + 1])
    os.environ["CUDA_VISIBLE_DEVICES"] = name


# ---- Collectives.


@dataclass(frozen=True, kw_only=True, slots=True)
class AllGather:
    """Collective that gathers rows; equal in all processes, so that they compile the same graph."""

    world_size: int
    group_name: str

    def __call__(self, rows: Tensor, /) -> Tensor:
        """Gather n rows of each process into rows [world_size * n, ...] in the order of ranks.

        Raises:
          RuntimeError: called under `torch.vmap`, which would return numbers of no meaning, or under `torch.func.grad`,
            which would return zeros in PyTorch 2.10.
        """
        import torch

        if torch._C._are_functorch_transforms_active():  # pyright: ignore[reportAttributeAccessIssue]
            raise RuntimeError(
                "all_gather: expected a call outside of torch.vmap and torch.func.grad, which cannot transform it"
            )
        gathered = torch.ops._c10d_functional.all_gather_into_tensor(
            rows.contiguous(), self.world_size, self.group_name
        )
        return torch.ops._c10d_functional.wait_tensor(gathered)


def connect(processes: Processes, facts: Facts) -> Processes:
    """Connect the processes for collectives, by NCCL on GPUs and by Gloo on CPUs.

    A process group that the program has made itself is used as it is.

    Args:
      facts: what must be the same for all; JSON values.

    Raises:
      ValueError: they differ; the message names the rank, and both values.
      PeerError: another process has ended with an error.
      StalledError: some process does not come.
    """
    import torch
    from torch import distributed

    processes.check_equal(facts)
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
    processes.all_gather = AllGather(
        world_size=processes.world_size, group_name=world.group_name
    )
    return processes


def choose_gpu() -> None:
    """Make the GPU with this process's number on its host the current one, if it exists."""
    import torch

    number = int(os.environ.get("LOCAL_RANK", "0"))
    if number < torch.cuda.device_count():
        torch.cuda.set_device(number)


@contextmanager
def _discard_native_output() -> Iterator[None]:
    """Discard output of C++ code in the context: Gloo of PyTorch 2.10 reports each connection on standard output."""
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
    from torch import distributed

    if distributed.is_initialized():
        distributed.destroy_process_group()


# ---- Attempts that all processes make together.


class PeerFailedError(RuntimeError):
    """Error for an attempt that works here but not in another process; the message names it and the reason."""


@dataclass
class _Attempt:
    """Attempt of all processes, with the first failure among them; empty while there is none."""

    agree: Agree
    what: str
    failure: str = ""

    def settle(self, failure: str = "") -> None:
        """Exchange with the other processes whether each succeeded so far; no effect after the attempt is over.

        Raises:
          PeerFailedError: this process succeeded, another did not.
        """
        if self.failure:
            return
        self.failure = self.agree(self.what, failure)
        if self.failure and not failure:
            raise PeerFailedError(self.failure)


_attempts: list[_Attempt] = []


def alone(_: str, failure: str = "", /) -> str:
    """Return this process's own failure: the agreement function of a single process."""
    return failure


@contextmanager
def attempt_together(agree: Agree, what: str) -> Iterator[None]:
    """Run a block as an attempt of all processes, which ends with their agreement on its success.

    Raises:
      PeerFailedError: this process succeeded, another did not.
      Exception: what this process raised itself.
    """
    attempt = _Attempt(agree, what)
    _attempts.append(attempt)
    try:
        yield
    except Exception as error:
        if attempt.failure:  # told already, perhaps through the compiler
            raise PeerFailedError(attempt.failure) from None
        name = type(error).__name__
        attempt.settle(f"{name}: {error_line(error)}".removesuffix(": "))
        raise
    finally:
        _attempts.pop()
    attempt.settle()


def settle() -> None:
    """Agree that all processes have compiled what runs next, within `attempt_together`; otherwise do nothing.

    Raises:
      PeerFailedError: another process has not.
    """
    if _attempts:
        _attempts[-1].settle()


def backend_options(
    backend: str, options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the arguments of `torch.compile` for a backend, which calls `settle` within `attempt_together`."""
    if not _attempts or _attempts[-1].agree is alone:
        return {"backend": backend, "options": options and dict(options)}
    import torch

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
