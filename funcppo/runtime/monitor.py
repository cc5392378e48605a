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
import operator
import statistics
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import takewhile
from types import TracebackType
from typing import Any

import torch
from torch._dynamo.callback import (
    CallbackArgs,
    CallbackTrigger,
    callback_handler,
)
from torch._dynamo.utils import CompilationMetrics, get_compilation_metrics

from funcppo.core import tree
from funcppo.runtime import cache
from funcppo.runtime.capture import (
    CapturedStep,
    ReasonCode,
    recompile_code,
    skip_code,
)

# logs why a graph was not recorded
CUDAGRAPH_SKIP_LOGGER = "torch._inductor.cudagraph_utils.__cudagraphs"

# milliseconds; or two events on a GPU, whose distance is known once both have happened
_Time = float | tuple[torch.cuda.Event, torch.cuda.Event]


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
        self._times: dict[str, deque[_Time]] = {}
        self._addresses: dict[str, int] = {}
        self._warmup_counts = (0, 0)
        # the newest entry of PyTorch's log at the last poll
        self._last_metrics: CompilationMetrics | None = None
        self._n_events = 0  # events of `cache` counted so far
        self._has_warned = False

    def __enter__(self) -> Monitor:
        callback_handler.register_start_callback(self._count_start)
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
        with suppress(ValueError):  # `torch._dynamo.reset` clears all callbacks
            callback_handler.start_callbacks.remove(self._count_start)
        logging.getLogger(CUDAGRAPH_SKIP_LOGGER).removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Store the reason that PyTorch logs for a skipped CUDA graph; a logging handler."""
        first_line = record.getMessage().strip().splitlines()[0]
        self.cudagraph_skip_reasons.append(first_line)

    def _count_start(self, args: CallbackArgs) -> None:
        if args.callback_trigger == CallbackTrigger.CUDAGRAPH_RECORDING:
            self.cudagraph_recordings += 1
        elif args.callback_trigger == CallbackTrigger.DYNAMO:
            self.compiles += 1

    @property
    def cudagraph_rerecordings(self) -> int:
        """Count the graphs that CUDAGraph Trees recorded again because an input had moved."""
        # imported only by those who use it
        cudagraph_trees = sys.modules.get("torch._inductor.cudagraph_trees")
        if cudagraph_trees is None or not torch.cuda.is_available():
            return 0
        device = torch.cuda.current_device()
        manager = cudagraph_trees.get_manager(
            device, create_if_none_exists=False
        )
        counts_by_node = manager.num_rerecord.values() if manager else ()
        return sum(sum(counts.values()) for counts in counts_by_node)

    def poll(self) -> None:
        """Update the counts of compilations and cache hits, and collect the reasons for recompilations."""
        events = cache.compile_events
        for event in events[self._n_events :]:
            if event.cache_hit:
                self.cache_hits += 1
                continue
            self.compiles += 1
            self.compile_seconds.append(event.seconds)
            if event.recompile_reason:
                reason = f"{event.name}: {event.recompile_reason}"
                self.recompile_reasons.append(reason)
        self._n_events = len(events)

        # PyTorch keeps the last 64 entries. Those after the newest one of the last poll are new.
        all_metrics = get_compilation_metrics()
        is_old = partial(operator.is_not, self._last_metrics)
        new = list(takewhile(is_old, reversed(all_metrics)))
        for metrics in reversed(new):
            self._last_metrics = metrics
            if metrics.recompile_reason:
                # the last guard that failed, without the place of the code that it is for
                guards = metrics.recompile_reason.partition("\nUser stack")[0]
                guard = guards.strip().splitlines()[-1].partition("  #")[0]
                self.recompile_reasons.append(
                    f"{metrics.co_name}: {guard.strip()}"
                )

    def record_capture(self, captured: CapturedStep[Any, Any]) -> None:
        """Count the graphs of a captured step, and store the reason if it is not replayed as a graph."""
        self.fallback_reason = captured.fallback_reason
        self.fallback_code = captured.fallback_code
        self.cudagraph_recordings += captured.n_graphs
        if captured.n_graphs:
            self._times_of("capture").append(captured.capture_ms)

    def watch_addresses(self, state: object) -> None:
        """Remember the memory addresses of a tree's leaves."""
        self._addresses = _leaf_addresses(state)

    def moved_leaves(self, state: object) -> list[str]:
        """List the names of leaves whose addresses have changed since they were last watched."""
        before = self._addresses
        now = _leaf_addresses(state).items()
        return [name for name, at in now if before.get(name, at) != at]

    @contextmanager
    def timer(self, name: str) -> Iterator[None]:
        """Measure the time of a block, on the GPU if available without waiting for it; also a range for profilers.

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
        times.append((begin, end))

    def median_ms(self, name: str) -> float | None:
        """Compute the median time under a name, in milliseconds; None if no time is known yet."""
        times = [
            entry[0].elapsed_time(entry[1])
            if isinstance(entry, tuple)
            else entry
            for entry in self._times.get(name, ())
            if not isinstance(entry, tuple) or entry[1].query()
        ]
        return statistics.median(times) if times else None

    def _times_of(self, name: str) -> deque[_Time]:
        return self._times.setdefault(name, deque(maxlen=512))

    def end_warmup(self) -> None:
        """Begin the steady state, in which any compilation or recording leads to a warning."""
        self.poll()
        self._warmup_counts = self._counts()

    def _counts(self) -> tuple[int, int]:
        """Return the numbers of compilations and of recordings so far; both should stay constant after the warm-up."""
        recordings = self.cudagraph_recordings + self.cudagraph_rerecordings
        return self.compiles, recordings

    def warning(self) -> str | None:
        """Return one line, once, if anything was compiled or recorded after the warm-up; otherwise None."""
        self.poll()
        counts = self._counts()
        if self._has_warned or counts == self._warmup_counts:
            return None
        self._has_warned = True
        n_compiles, n_recordings = map(
            operator.sub, counts, self._warmup_counts
        )
        line = (
            f"the training step was compiled again {n_compiles} times and recorded again {n_recordings} times after "
            "its first iteration, which costs seconds each time"
        )
        return ": ".join([line, *self.recompile_reasons[-1:]])

    def recompile_codes(self) -> dict[str, int]:
        """Count recompilations by reason code."""
        return Counter(map(recompile_code, self.recompile_reasons))

    def cudagraph_skip_codes(self) -> dict[str, int]:
        """Count by reason code how often CUDAGraph Trees recorded nothing."""
        return Counter(map(skip_code, self.cudagraph_skip_reasons))

    def report(self) -> dict[str, object]:
        """Return all counts, median times and recent reasons by name, for `metrics.jsonl` and `--log-compiles`."""
        self.poll()
        report: dict[str, object] = {
            "compiles": self.compiles,
            "cache_hits": self.cache_hits,
            "recompiles": len(self.recompile_reasons),
            "cudagraph_recordings": self.cudagraph_recordings,
            "cudagraph_rerecordings": self.cudagraph_rerecordings,
            "cudagraph_skips": len(self.cudagraph_skip_reasons),
        }
        report |= {f"{name}_ms": self.median_ms(name) for name in self._times}
        # The last three reasons, of what has happened.
        if self.recompile_reasons:
            report["recompile_reasons"] = self.recompile_reasons[-3:]
            report["recompile_codes"] = self.recompile_codes()
        if self.cudagraph_skip_reasons:
            report["cudagraph_skip_reasons"] = self.cudagraph_skip_reasons[-3:]
            report["cudagraph_skip_codes"] = self.cudagraph_skip_codes()
        if cache.uncached_reasons:
            report["uncached_reasons"] = dict(cache.uncached_reasons)
        report["fallback_reason"] = self.fallback_reason
        report["fallback_code"] = self.fallback_code
        return report


def _leaf_addresses(state: object) -> dict[str, int]:
    addresses = [leaf.data_ptr() for leaf in tree.leaves(state)]
    return dict(zip(tree.paths(state), addresses))
