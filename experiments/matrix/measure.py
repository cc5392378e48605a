"""One cell, measured in a process of its own, and the causes of its exceptions."""

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from experiments.matrix import problem
from experiments.matrix.problem import Problem
from experiments.matrix.registry import Cell, Compiler, Training
from experiments.paths import ROOT
from funcppo.core import tree
from funcppo.losses import Batch

CAUSES = {
    "autograd engine not traced": (
        "Tensor.backward()",
        "torch.autograd.grad",
        "marked as skipped",
        "trace_autograd_ops",
    ),
    "functional_call reaches forward only": (
        "unexpected keyword argument 'actions'",
        "Unexpected keyword arguments: ['actions']",
        "failed to bind arguments",
    ),
    "in-place write over what backward needs": (
        "modified by an inplace operation",
    ),
    "eager transform over a compiled function": (
        "requires the function to be inlined by dynamo",
        "Unsupported functorch tracing attempt",
        "from eager mode is not supported",
    ),
    "no such option": ("unexpected keyword argument 'trace_",),
}


def describe_error(error: BaseException, dtype: str) -> dict[str, str]:
    """Class, first line and cause of an exception; of the one inside, where a compiler only passes it on."""
    text = str(error)
    while (inner := getattr(error, "inner_exception", None)) is not None:
        error = inner
    return {
        "type": type(error).__name__,
        "message": first_line(str(error)).replace(f"{ROOT}/", ""),
        "cause": cause(text),
        "dtype": dtype,
    }


def first_line(text: str) -> str:
    """The first line that says something, at most 200 characters of it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:200] if lines else ""


def cause(text: str) -> str:
    """Which of the causes a message speaks of; empty where it is none of them."""
    return next(
        (
            name
            for name, signs in CAUSES.items()
            if any(sign in text for sign in signs)
        ),
        "",
    )


TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 1e-4,
}  # of the parameters, after steps of 1e-2
WARM_UP = 3  # steps before a manual capture
BLOCK_SECONDS = 0.1  # that a timed block takes, about


class Ready(NamedTuple):
    """A training that works, and how to run it."""

    step: Callable[[Batch], Any]
    training: Training
    seen: list[Batch]  # batches learnt from so far


class Recordings:
    """CUDA graph recordings and reasons for skipping them, since the last `restart`."""

    def __init__(self) -> None:
        self.count, self.skips = 0, set()
        try:
            from torch._inductor.cudagraph_utils import cudagraphs_log
        except ImportError:  # older versions have no such log
            return
        handler = logging.Handler(level=logging.WARNING)
        handler.emit = lambda entry: self.skips.add(
            first_line(entry.getMessage())
        )
        cudagraphs_log.addHandler(handler)

    def restart(self) -> None:
        """Count from zero; to be called after `torch._dynamo.reset`, which clears all callbacks."""
        self.count = 0
        try:
            from torch._dynamo.callback import CallbackTrigger, callback_handler
        except ImportError:  # older versions have no such callback
            return
        recorded = CallbackTrigger.CUDAGRAPH_RECORDING

        def started(args: Any) -> None:
            self.count += args.callback_trigger == recorded

        callback_handler.register_start_callback(started)


def examine(cell: Cell, device: str) -> tuple[dict[str, Any], Ready | None]:
    """What a cell does in float64, then in float32; and the float32 learner, to be timed."""
    result: dict[str, Any] = {"parity": {}}
    recordings, ready = Recordings(), None
    for dtype in (torch.float64, torch.float32):
        torch._dynamo.reset()
        torch.set_default_dtype(
            dtype
        )  # torch.optim keeps its step count in the default dtype
        torch._dynamo.utils.counters.clear()
        recordings.restart()
        try:
            ready = _try(cell, device, dtype, result)
        except Exception as error:
            failure = describe_error(error, str(dtype).removeprefix("torch."))
            return {**result, "status": "fails", "error": failure}, None
    by_hand = cell.mode == "manual graph"
    result |= {
        "recordings": recordings.count + by_hand,
        "skips": sorted(recordings.skips),
    }
    status = judge(cell, result)
    return {**result, "status": status}, ready if status not in (
        "wrong",
        "not compiled",
    ) else None


def _try(
    cell: Cell, device: str, dtype: torch.dtype, result: dict[str, Any]
) -> Ready:
    """Build, take three steps, and write down graphs and parity."""
    given = problem.make(dtype, device, residual=cell.way.residual)
    start = time.perf_counter()
    training = cell.way.build(given, Compiler(cell.backend, cell.mode))
    ready = (
        captured(training, given)
        if cell.mode == "manual graph"
        else Ready(training.step, training, [])
    )
    ready.step(given.batches[0])
    _synchronize(device)
    result["compile_s"] = round(time.perf_counter() - start, 2)
    first = _graphs(training)
    for batch in given.batches[1:]:
        ready.step(batch)
    graphs = _graphs(training)
    counters = torch._dynamo.utils.counters
    result |= {
        "graphs": graphs,
        "recompiles": graphs - first,
        "breaks": sum(counters["graph_break"].values()),
    }
    result["parity"][str(dtype).removeprefix("torch.")] = _error(
        cell, device, training, [*ready.seen, *given.batches]
    )
    return ready


def _graphs(training: Training) -> int:
    return (
        training.graphs
        or torch._dynamo.utils.counters["stats"]["unique_graphs"]
    )


def judge(cell: Cell, result: dict[str, Any]) -> str:
    """The status of a cell that raised nothing."""
    if not parity_ok(result):
        return "wrong"
    if not cell.way.compiled:
        return "eager"
    if result["graphs"] == 0:
        return "not compiled"
    whole = (
        result["graphs"] == 1
        and not result["recompiles"]
        and not result["breaks"]
    )
    return "one graph" if whole else "several graphs"


def parity_ok(result: dict[str, Any]) -> bool:
    """Whether the parameters equal the oracle's in every dtype that was run (NaN equals nothing)."""
    return all(
        error <= TOLERANCE[getattr(torch, name)]
        for name, error in result["parity"].items()
    )


def _error(
    cell: Cell, device: str, training: Training, batches: Iterable[Batch]
) -> float:
    """The largest difference from the float64 oracle; both began alike, so it is that of the change."""
    if cell.way.oracle is not None:
        given = problem.make(torch.get_default_dtype(), device)
        want = cell.way.oracle(given, list(batches))
        return _difference(training.params(), want)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    given = problem.make(torch.float64, device, residual=cell.way.residual)
    want = problem.oracle(
        given,
        [
            part
            for batch in batches
            for part in _parts(batch, training.minibatches)
        ],
    )
    torch.set_default_dtype(default)
    if training.learners > 1:
        want = [torch.stack([p] * training.learners) for p in want]
    return _difference(training.params(), want)


def _difference(got: list[Tensor], want: list[Tensor]) -> float:
    return max(
        float((a.double() - b.double()).abs().max())
        for a, b in zip(got, want, strict=True)
    )


def _parts(batch: Batch, n: int) -> list[Batch]:
    """The minibatches of one step, in float64."""
    widen = lambda x: x.double() if x.is_floating_point() else x
    chunks = [
        [widen(part) for part in leaf.chunk(n)] for leaf in tree.leaves(batch)
    ]
    return [tree.unflatten(batch, list(leaves)) for leaves in zip(*chunks)]


def captured(training: Training, given: Problem) -> Ready:
    """The step recorded by hand as one CUDA graph over a fixed batch."""
    fixed = tree.map(torch.clone, given.batches[0])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            training.step(fixed)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        training.step(fixed)

    def step(batch: Batch) -> None:
        torch._foreach_copy_(tree.leaves(fixed), tree.leaves(batch))
        graph.replay()

    return Ready(step, training, [given.batches[0]] * WARM_UP)


class Clock:
    """Times blocks of steps of a training that works."""

    def __init__(self, ready: Ready, cell: Cell, device: str) -> None:
        self.ready, self.device = ready, device
        self.batches = problem.make(
            torch.float32, device, residual=cell.way.residual
        ).batches
        self.steps = 10  # of a block; the first one finds how many
        once = self.microseconds() * ready.training.minibatches / 1e6
        self.steps = max(3, min(500, int(BLOCK_SECONDS / once)))
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def microseconds(self) -> float:
        """A step of one minibatch, as the mean of a block."""
        seconds = _seconds(self._run, self.steps, self.device) / self.steps
        return 1e6 * seconds / self.ready.training.minibatches

    def block(self) -> dict[str, float]:
        """A block's time, and the most memory that tensors held on a GPU so far."""
        result = {"us": self.microseconds()}
        if self.device == "cuda":
            result["peak_bytes"] = torch.cuda.max_memory_allocated()
        return result

    def _run(self, n: int) -> None:
        for i in range(n):
            self.ready.step(self.batches[i % len(self.batches)])


def _seconds(run: Callable[[int], Any], steps: int, device: str) -> float:
    _synchronize(device)
    start = time.perf_counter()
    run(steps)
    _synchronize(device)
    return time.perf_counter() - start


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
