"""What compilers and graphs do while a program runs, counted and put in plain words.

    with Monitor() as monitor:
        captured = capture(...)           # compiles and records are counted as they happen
        monitor.settle()                  # from here on, compiling or recording again is worth a warning
        with monitor.timed("replay"):
            captured.step()

A steady run compiles and records nothing, skips nothing, and its state stays where it is.
"""

from __future__ import annotations

import logging
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from typing import Any

import torch
from torch._dynamo.callback import CallbackArgs, CallbackTrigger, callback_handler
from torch._dynamo.utils import get_compilation_metrics

from funcppo import tree
from funcppo.runtime import compile_cache

TIMING_WINDOW_SIZE = 512  # times of each kind that are remembered
CUDAGRAPH_SKIP_LOGGER = (
    "torch._inductor.cudagraph_utils.__cudagraphs"  # the logger that gives the reason of every skipped graph
)


class Monitor(logging.Handler):
    """Counts and times from its entry to its exit."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.compiles = 0  # graphs compiled, the first time or again
        self.found = 0  # functions whose code lay on disk
        self.recompiles: list[str] = []  # why a function was compiled again
        self.recordings = 0  # CUDA graphs recorded: by `capture`, and by CUDAGraph Trees
        self.skips: list[str] = []  # why CUDAGraph Trees ran a graph without recording it
        self.fallback = ""  # why the step in use is not captured
        self._times: dict[str, deque[Any]] = {}
        self._homes: dict[str, int] = {}
        self._settled = (0, 0, 0)
        self._last: Any = None  # what PyTorch's record of compilations ended with when it was last read
        self._n_made = 0
        self._warned = False

    def __enter__(self) -> Monitor:
        callback_handler.register_start_callback(self._started)
        logging.getLogger(CUDAGRAPH_SKIP_LOGGER).addHandler(self)
        self._last, self._n_made = next(reversed(get_compilation_metrics()), None), len(compile_cache.compile_events)
        return self

    def __exit__(self, *_: Any) -> None:
        callback_handler.remove_start_callback(self._started)
        logging.getLogger(CUDAGRAPH_SKIP_LOGGER).removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Take a skip's reason from PyTorch's log."""
        self.skips.append(record.getMessage().strip().splitlines()[0])

    def _started(self, args: CallbackArgs) -> None:
        if args.callback_trigger == CallbackTrigger.CUDAGRAPH_RECORDING:
            self.recordings += 1
        elif args.callback_trigger == CallbackTrigger.DYNAMO:
            self.compiles += 1

    @property
    def cudagraph_rerecordings(self) -> int:
        """How often CUDAGraph Trees recorded a graph anew because an input had moved."""
        trees = sys.modules.get("torch._inductor.cudagraph_trees")
        if trees is None or not torch.cuda.is_available():
            return 0
        manager = trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False)
        return 0 if manager is None else sum(sum(n.values()) for n in manager.num_rerecord.values())

    def poll(self) -> None:
        """Count what was compiled since the last call, and collect the reasons of what was compiled again."""
        for made in compile_cache.compile_events[self._n_made :]:
            self.found += made.cache_hit
            self.compiles += not made.cache_hit
            self.recompiles += (
                [f"{made.name}: {made.recompile_reason}"] if made.recompile_reason and not made.cache_hit else []
            )
        self._n_made = len(compile_cache.compile_events)
        metrics = get_compilation_metrics()  # the last 64
        new = list(takewhile(lambda metric: metric is not self._last, reversed(metrics)))
        for metric in reversed(new):
            if metric.recompile_reason:
                lines = metric.recompile_reason.strip().splitlines()
                self.recompiles.append(f"{metric.co_name}: {lines[-1].strip()}")
        self._last = next(iter(new), self._last)

    def record_capture(self, captured: Any) -> None:
        """Take note of what `capture` returned."""
        self.fallback = captured.fallback_reason
        self.recordings += captured.n_graphs
        if captured.n_graphs:
            self._times.setdefault("capture", deque(maxlen=TIMING_WINDOW_SIZE)).append(captured.capture_ms)

    def watch_addresses(self, state: Any) -> None:
        """Remember where the leaves of a tree lie."""
        self._homes = dict(zip(tree.paths(state), (x.data_ptr() for x in tree.leaves(state))))

    def moved_leaves(self, state: Any) -> list[str]:
        """The leaves that lie elsewhere than when they were last watched."""
        now = zip(tree.paths(state), (x.data_ptr() for x in tree.leaves(state)))
        return [name for name, home in now if self._homes.get(name, home) != home]

    @contextmanager
    def timer(self, name: str) -> Iterator[None]:
        """Time what happens inside, on the GPU where there is one, without waiting for it; a range for profilers."""
        times = self._times.setdefault(name, deque(maxlen=TIMING_WINDOW_SIZE))
        if not torch.cuda.is_available():
            start = time.perf_counter()
            yield
            times.append(1e3 * (time.perf_counter() - start))
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.nvtx.range(f"funcppo {name}"):
            begin.record()
            yield
            end.record()
        times.append((begin, end))

    def median_ms(self, name: str) -> float | None:
        """The median of the times of that name that are known by now, milliseconds."""
        done = [_elapsed(x) for x in self._times.get(name, ())]
        known = [x for x in done if x is not None]
        return statistics.median(known) if known else None

    def end_warmup(self) -> None:
        """What is compiled or recorded from now on was not meant to be."""
        self.poll()
        self._settled = self._state()

    def _state(self) -> tuple[int, int, int]:
        return self.compiles, self.recordings, self.cudagraph_rerecordings

    def warning(self) -> str | None:
        """One line, once, when something was compiled or recorded again after `settle`."""
        self.poll()
        new = [now - before for now, before in zip(self._state(), self._settled)]
        if self._warned or not any(new):
            return None
        self._warned = True
        why = f": {self.recompiles[-1]}" if self.recompiles else ""
        return (
            f"the training step was compiled again {new[0]} times and recorded again {new[1] + new[2]} times "
            f"after its first iteration, which costs seconds each time{why}"
        )

    def report(self) -> dict[str, Any]:
        """All counts, medians and reasons, for `metrics.jsonl` and `--watch`."""
        self.poll()
        counts = {
            "compiles": self.compiles,
            "found": self.found,
            "recompiles": len(self.recompiles),
            "recordings": self.recordings,
        }
        counts |= {"rerecordings": self.cudagraph_rerecordings, "skips": len(self.skips)}
        times = {f"{name}_ms": self.median_ms(name) for name in self._times}
        reasons = {"recompile_reasons": self.recompiles[-3:], "skip_reasons": self.skips[-3:]}
        return counts | times | {k: v for k, v in reasons.items() if v} | {"fallback_reason": self.fallback}


def _elapsed(entry: Any) -> float | None:
    if isinstance(entry, float):
        return entry
    begin, end = entry
    return begin.elapsed_time(end) if end.query() else None
