"""Counts of compilations and CUDA-graph recordings while a program runs, with reasons, and times of its phases.

    with Monitor() as monitor:
        captured = capture(...)           # compilations and recordings are counted as they happen
        monitor.record_capture(captured)
        monitor.end_warmup()              # compilations and recordings from here on are worth a warning
        with monitor.timer("replay"):
            captured.step()
        print(monitor.report())

In a steady state a program compiles and records nothing, skips no graph, and its state stays at its addresses.
"""

from __future__ import annotations

import logging
import statistics
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch._dynamo.callback import (
    CallbackArgs,
    CallbackTrigger,
    callback_handler,
)
from torch._dynamo.utils import CompilationMetrics, get_compilation_metrics

from funcppo.core import tree
from funcppo.runtime import cache, reasons
from funcppo.runtime.capture import CapturedStep
from funcppo.runtime.reasons import ReasonCode

# most recent times of each name that count in its median
TIMING_WINDOW_SIZE = 512
# logs why a graph was not recorded
CUDAGRAPH_SKIP_LOGGER = "torch._inductor.cudagraph_utils.__cudagraphs"
N_REPORTED_REASONS = 3  # most recent reasons in a report


# functions called at the start of each compilation and recording
_listeners: list[Callable[[CallbackArgs], None]] = []


def _notify_listeners(args: CallbackArgs) -> None:
    for listener in _listeners:
        listener(args)


class _LastingCallbacks(list[Callable[[CallbackArgs], None]]):
    """Callbacks of PyTorch's compiler, of which `torch._dynamo.reset` clears all but ours."""

    def clear(self) -> None:
        """Keep `_notify_listeners` only."""
        self[:] = [_notify_listeners]


def _install_listeners() -> None:
    """Have PyTorch call the listeners, also after a reset."""
    callbacks = callback_handler.start_callbacks
    if not isinstance(callbacks, _LastingCallbacks):
        callback_handler.start_callbacks = _LastingCallbacks(
            [*callbacks, _notify_listeners]
        )


class _GpuInterval(NamedTuple):
    """Two events on a GPU, whose distance is known once both have happened."""

    begin: torch.cuda.Event
    end: torch.cuda.Event


class _Counts(NamedTuple):
    """What should stay the same after the warm-up."""

    compiles: int
    recordings: int
    rerecordings: int


class Monitor(logging.Handler):
    """Counters and timers that run while the context is open."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.compiles = 0  # graphs compiled, for the first time or again
        self.cache_hits = 0  # functions whose compiled code was on disk
        self.compile_seconds: list[float] = []  # of those compiled for the disk
        # why functions were compiled again
        self.recompile_reasons: list[str] = []
        # CUDA graphs recorded, by `capture` and by CUDAGraph Trees
        self.cudagraph_recordings = 0
        # why CUDAGraph Trees ran graphs without recording them
        self.cudagraph_skip_reasons: list[str] = []
        self.fallback_reason = ""  # why the step in use is no CUDA graph
        self.fallback_code: ReasonCode | None = None  # the same as a code
        self._times: dict[str, deque[float | _GpuInterval]] = {}
        self._addresses: dict[str, int] = {}
        self._warmup_counts = _Counts(0, 0, 0)
        # the newest entry of PyTorch's log at the last poll
        self._last_metrics: CompilationMetrics | None = None
        self._n_events = 0  # events of `cache` counted so far
        self._has_warned = False

    def __enter__(self) -> Monitor:
        _install_listeners()
        _listeners.append(self._count_start)
        logging.getLogger(CUDAGRAPH_SKIP_LOGGER).addHandler(self)
        self._last_metrics = next(reversed(get_compilation_metrics()), None)
        self._n_events = len(cache.compile_events)
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _listeners.remove(self._count_start)
        logging.getLogger(CUDAGRAPH_SKIP_LOGGER).removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Store the reason for a skipped graph, which PyTorch logs."""
        first_line = record.getMessage().strip().splitlines()[0]
        self.cudagraph_skip_reasons.append(first_line)

    def _count_start(self, args: CallbackArgs) -> None:
        if args.callback_trigger == CallbackTrigger.CUDAGRAPH_RECORDING:
            self.cudagraph_recordings += 1
        elif args.callback_trigger == CallbackTrigger.DYNAMO:
            self.compiles += 1

    @property
    def cudagraph_rerecordings(self) -> int:
        """Number of graphs that CUDAGraph Trees recorded again because an input had moved."""
        # imported only by those who use it
        cudagraph_trees = sys.modules.get("torch._inductor.cudagraph_trees")
        if cudagraph_trees is None or not torch.cuda.is_available():
            return 0
        device = torch.cuda.current_device()
        manager = cudagraph_trees.get_manager(
            device, create_if_none_exists=False
        )
        if manager is None:
            return 0
        counts_by_node = manager.num_rerecord.values()
        return sum(sum(counts.values()) for counts in counts_by_node)

    def poll(self) -> None:
        """Count the compilations since the last call, and collect the reasons for recompilations."""
        self._poll_compile_cache()
        self._poll_pytorch()

    def _poll_compile_cache(self) -> None:
        events = cache.compile_events
        for event in events[self._n_events :]:
            if event.cache_hit:
                self.cache_hits += 1
                continue
            self.compiles += 1
            self.compile_seconds.append(event.seconds)
            if event.recompile_reason:
                self.recompile_reasons.append(
                    f"{event.name}: {event.recompile_reason}"
                )
        self._n_events = len(events)

    def _poll_pytorch(self) -> None:
        # PyTorch keeps the last 64 entries. Those after the newest one of the last poll are new.
        new: list[CompilationMetrics] = []
        for metrics in reversed(get_compilation_metrics()):
            if metrics is self._last_metrics:
                break
            new.append(metrics)

        for metrics in reversed(new):
            if metrics.recompile_reason:
                guard = _failed_guard(metrics.recompile_reason)
                self.recompile_reasons.append(f"{metrics.co_name}: {guard}")
        if new:
            self._last_metrics = new[0]

    def record_capture(self, captured: CapturedStep[Any, Any]) -> None:
        """Count the graphs of a captured step, and store why it is none."""
        self.fallback_reason = captured.fallback_reason
        self.fallback_code = captured.fallback_code
        self.cudagraph_recordings += captured.n_graphs
        if captured.n_graphs:
            self._times_of("capture").append(captured.capture_ms)

    def watch_addresses(self, state: object) -> None:
        """Remember the memory addresses of a tree's leaves."""
        self._addresses = _leaf_addresses(state)

    def moved_leaves(self, state: object) -> list[str]:
        """Names of the leaves that are at other addresses than when they were last watched."""
        moved: list[str] = []
        for name, address in _leaf_addresses(state).items():
            if self._addresses.get(name, address) != address:
                moved.append(name)
        return moved

    @contextmanager
    def timer(self, name: str) -> Iterator[None]:
        """Measure the time of a block, on the GPU if there is one and without waiting for it; a range for profilers.

        Args:
          name: under which `median_ms` and `report` give the time.
        """
        times = self._times_of(name)
        if not torch.cuda.is_available():
            start = time.perf_counter()
            yield
            times.append(1e3 * (time.perf_counter() - start))
            return

        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        with torch.cuda.nvtx.range(f"funcppo {name}"):
            begin.record()
            yield
            end.record()
        times.append(_GpuInterval(begin, end))

    def median_ms(self, name: str) -> float | None:
        """Median of the times under a name, in milliseconds; None if there is none, or the GPU has not finished one."""
        times: list[float] = []
        for entry in self._times.get(name, ()):
            elapsed = _elapsed_ms(entry)
            if elapsed is not None:
                times.append(elapsed)
        return statistics.median(times) if times else None

    def _times_of(self, name: str) -> deque[float | _GpuInterval]:
        return self._times.setdefault(name, deque(maxlen=TIMING_WINDOW_SIZE))

    def end_warmup(self) -> None:
        """Begin the steady state, in which a compilation or a recording leads to a warning."""
        self.poll()
        self._warmup_counts = self._counts()

    def _counts(self) -> _Counts:
        return _Counts(
            self.compiles,
            self.cudagraph_recordings,
            self.cudagraph_rerecordings,
        )

    def warning(self) -> str | None:
        """One line, once, if something was compiled or recorded after the warm-up; None otherwise."""
        self.poll()
        counts = self._counts()
        if self._has_warned or counts == self._warmup_counts:
            return None
        self._has_warned = True

        n_compiles = counts.compiles - self._warmup_counts.compiles
        n_recordings = counts.recordings - self._warmup_counts.recordings
        n_rerecordings = counts.rerecordings - self._warmup_counts.rerecordings
        reason = (
            f": {self.recompile_reasons[-1]}" if self.recompile_reasons else ""
        )
        return (
            f"the training step was compiled again {n_compiles} times and recorded again "
            f"{n_recordings + n_rerecordings} times after its first iteration, which costs seconds each time{reason}"
        )

    def recompile_codes(self) -> dict[str, int]:
        """How often functions were compiled again, by code."""
        return Counter(map(reasons.recompile_code, self.recompile_reasons))

    def cudagraph_skip_codes(self) -> dict[str, int]:
        """How often CUDAGraph Trees recorded nothing, by code."""
        return Counter(map(reasons.skip_code, self.cudagraph_skip_reasons))

    def report(self) -> dict[str, object]:
        """All counts, median times and recent reasons, as `metrics.jsonl` and `--log-compiles` show them."""
        self.poll()
        report: dict[str, object] = {
            "compiles": self.compiles,
            "cache_hits": self.cache_hits,
            "recompiles": len(self.recompile_reasons),
            "cudagraph_recordings": self.cudagraph_recordings,
            "cudagraph_rerecordings": self.cudagraph_rerecordings,
            "cudagraph_skips": len(self.cudagraph_skip_reasons),
        }
        # Reasons, and times, are only of what has happened.
        for name in self._times:
            report[f"{name}_ms"] = self.median_ms(name)
        if self.recompile_reasons:
            report["recompile_reasons"] = self.recompile_reasons[
                -N_REPORTED_REASONS:
            ]
            report["recompile_codes"] = self.recompile_codes()
        if self.cudagraph_skip_reasons:
            report["cudagraph_skip_reasons"] = self.cudagraph_skip_reasons[
                -N_REPORTED_REASONS:
            ]
            report["cudagraph_skip_codes"] = self.cudagraph_skip_codes()
        if cache.uncached_reasons:
            report["uncached_reasons"] = dict(cache.uncached_reasons)
        report["fallback_reason"] = self.fallback_reason
        report["fallback_code"] = self.fallback_code
        return report


def _failed_guard(reason: str) -> str:
    """The last guard that failed, without the place of the code that it is for."""
    guards = reason.partition("\nUser stack trace:")[0]
    return guards.strip().splitlines()[-1].partition("  #")[0].strip()


def _leaf_addresses(state: object) -> dict[str, int]:
    addresses = [leaf.data_ptr() for leaf in tree.leaves(state)]
    return dict(zip(tree.paths(state), addresses))


def _elapsed_ms(entry: float | _GpuInterval) -> float | None:
    """Milliseconds of an entry; None while the GPU has not reached its end."""
    if not isinstance(entry, _GpuInterval):
        return entry
    return entry.begin.elapsed_time(entry.end) if entry.end.query() else None
