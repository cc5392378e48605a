"""Metrics of a running program in Prometheus' format, over HTTP or in a file.

Names end in their unit; ratios are at most 1. A counter counts from the start of the process. Numbers are those that
the program has read on the host anyway: nothing here waits for a device. prometheus-client is needed
(`pip install "funcppo[metrics]"`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from funcppo.core.files import write_file
from funcppo.core.host import import_extra
from funcppo.runtime import capture, memory
from funcppo.runtime.capture import CapturedStep
from funcppo.runtime.compile import StrategyRecord

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

    from prometheus_client import CollectorRegistry

    from funcppo.runtime.monitor import Monitor

HOST = "127.0.0.1"
# upper bounds of the buckets of histograms
SHORT_SECONDS = (
    0.001,
    0.002,
    0.005,
    0.01,
    0.02,
    0.05,
    0.1,
    0.2,
    0.5,
    1,
    2,
    5,
    10,
)
LONG_SECONDS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300)
COPY_SECONDS = (
    1e-5,
    2e-5,
    5e-5,
    1e-4,
    2e-4,
    5e-4,
    1e-3,
    2e-3,
    5e-3,
    0.01,
    0.1,
)
# The texts of the metrics of each kind, by name without the prefix funcppo_ and the suffix of the kind: _info, _total,
# none, or _seconds.
INFOS = {
    "build": "Versions of funcppo and PyTorch.",
    "run": "Program, data set, device, strategy; in training, replay mode.",
}
COUNTERS = {
    "updates": "Updates of PPO made by this process.",
    "env_steps": "Environment steps of these updates.",
    "episodes": "Episodes that ended.",
    "truncated_episodes": "Episodes that ended by a time limit.",
    "minibatches": "Minibatches applied.",
    "minibatches_skipped": "Minibatches left out: loss or gradient not finite.",
    "updates_with_rows_left_out": "Updates of which rows were left out: a value not finite.",
    "graph_recordings": "CUDA graphs recorded.",
    "graph_rerecordings": "CUDA graphs that CUDAGraph Trees recorded again, an input having moved.",
    "graph_fallbacks": "Steps that are not replayed as a CUDA graph.",
    "graph_skips": "Graphs that CUDAGraph Trees ran without recording.",
    "leaves_moved": "Leaves of the state that changed address.",
    "strategy_failures": "Strategies, parts of the training step and compiled searches that are not in use.",
    "compiles": "Graphs compiled, for the first time or again.",
    "compile_cache_hits": "Functions whose code came from disk.",
    "recompiles": "Functions compiled again.",
    "queries_ranked": "Queries and sides ranked; of rank 0, by all processes.",
    "candidates_scored": "Candidates scored for them.",
    "search_pruned": "Candidates whose search dropped partial proofs.",
    "search_overflow": "Candidates with successors that did not fit.",
    "search_halvings": "Times that slots were halved to fit memory.",
    "answers_lost": "Provable answers that the search did not find.",
}
GAUGES = {
    "world_size": "Processes that share the work of the program.",
    "finished": "1 once the program has done its work, before that 0.",
    "nonfinite_rows_ratio": "Share of rows left out: a value not finite.",
    "progress_timestamp_seconds": "Unix time of the latest update or ranked query, or of the start.",
    "checkpoint_timestamp_seconds": "Unix time of the latest checkpoint, or of the start.",
    "checkpoint_bytes": "Size of the latest checkpoint.",
    "loss": "Loss of the latest update.",
    "entropy_nats": "Entropy of the policy; of a prover, relative to its prior.",
    "approx_kl_nats": "Estimated KL to the policy before the update.",
    "clip_fraction_ratio": "Share of clipped probability ratios.",
    "grad_norm": "L2 norm of the gradient before clipping.",
    "learning_rate": "Learning rate of the latest update.",
    "explained_variance_ratio": "Share of the variance of returns that the value explains.",
    "episode_return": "Mean return of the episodes of an update.",
    "valid_score_ratio": "Metric of the latest validation.",
    "best_valid_score_ratio": "Metric on valid of the parameters that are kept.",
    "best_update": "Update whose parameters are kept; 0: the first.",
    "graph_enabled": "1 if the training step or search replays CUDA graphs.",
    "graph_capture_seconds": "Time to record the CUDA graphs.",
    "graph_replay_seconds": "Median device time of recent training steps; host time on a CPU.",
    "device_memory_bytes": "Memory of the GPU: of tensors, of the allocator, its peak, and all.",
}
HISTOGRAMS = {
    "update": ("Time of an update, on the host.", SHORT_SECONDS),
    "validation": ("Time of a validation.", LONG_SECONDS),
    "checkpoint": ("Time to write a checkpoint.", SHORT_SECONDS),
    "compile": ("Time to compile a function for the disk.", LONG_SECONDS),
    "stage_copy": (
        "Device time to copy a chunk of candidates to the GPU.",
        COPY_SECONDS,
    ),
}
# name of the loss in a line of metrics.jsonl, by label
LOSSES = {"total": "loss", "policy": "policy_loss", "value": "value_loss"}
# the label of a metric, and all its values
LABELS: dict[str, tuple[str, Sequence[str]]] = {
    "loss": ("part", tuple(LOSSES)),
    "graph_fallbacks": ("reason", capture.FALLBACKS),
    "graph_skips": ("reason", capture.SKIPS),
    "strategy_failures": ("reason", capture.FAILURES),
    "recompiles": ("reason", capture.RECOMPILES),
    "device_memory_bytes": (
        "kind",
        ("allocated", "reserved", "peak", "total"),
    ),
}
# fields of a line of metrics.jsonl, by metric without its prefix
GAUGES_OF_ROW = {
    "entropy_nats": "entropy",
    "approx_kl_nats": "approx_kl",
    "clip_fraction_ratio": "clip_fraction",
    "grad_norm": "grad_norm",
    "nonfinite_rows_ratio": "nonfinite_fraction",
    "learning_rate": "learning_rate",
    "explained_variance_ratio": "explained_variance",
    "episode_return": "episode_return",
    "valid_score_ratio": "valid_metric",
    "best_valid_score_ratio": "best_valid_metric",
    "best_update": "best_update",
}
# the same, added up; the names without their suffix
COUNTERS_OF_ROW = {
    "episodes": "n_episodes",
    "truncated_episodes": "n_truncated_episodes",
    "minibatches": "n_applied_minibatches",
    "minibatches_skipped": "n_nonfinite_minibatches",
}


class Telemetry:
    """Metrics of one process in a registry of their own; every series exists from the start, with value 0."""

    def __init__(self) -> None:
        """Register all metrics, with value 0.

        Raises:
          MissingPackageError: prometheus-client is.
        """
        client = import_extra(
            "prometheus_client", "metrics", "--metrics-port, --metrics-file"
        )
        client.disable_created_metrics()  # a second series for each counter
        self.registry: CollectorRegistry = client.CollectorRegistry()
        client.ProcessCollector(registry=self.registry)
        self._metrics = _make_metrics(self.registry)
        self._totals: dict[tuple[str, ...], float] = {}
        self._n_compilations = 0  # whose time is recorded
        for name in ("progress", "checkpoint"):
            self.set(f"{name}_timestamp_seconds", time.time())

    def set(self, name: str, value: float, label: str = "") -> None:
        """Set the gauge of a name in `GAUGES`."""
        self._series(name, label).set(value)

    def add(self, name: str, value: float, label: str = "") -> None:
        """Add to the counter of a name in `COUNTERS`."""
        self._series(name, label).inc(value)

    def raise_to(
        self, name: str, total: float, label: str = "", source: str = ""
    ) -> None:
        """Raise a counter by the growth of a source's total since the last call."""
        before = self._totals.get((name, label, source), 0)
        self._totals[name, label, source] = total
        self.add(name, max(0.0, total - before), label)

    def observe(self, name: str, seconds: float) -> None:
        """Add a time to the histogram of a name in `HISTOGRAMS`."""
        self._metrics[name].observe(seconds)

    def _series(self, name: str, label: str) -> Any:
        """Return the series of a metric for a label; the metric itself for the empty label."""
        metric = self._metrics[name]
        return metric.labels(label) if label else metric

    def describe(self, kind: Literal["build", "run"], **labels: str) -> None:
        """Set the labels of the info metric `build` or `run`."""
        self._metrics[kind].info(labels)

    def finish(self) -> None:
        """Record that the program has done its work."""
        self.set("finished", 1.0)

    def record_strategy(
        self, record: StrategyRecord, captured: CapturedStep[Any, Any]
    ) -> None:
        """Count the fallbacks of the training step, and record how it is replayed."""
        for failure in record.failures:
            # Graphs are counted below; without kernels of its own a strategy is in use all the same.
            if failure.name not in ("cuda-graph", "rollout", "network"):
                self.add("strategy_failures", 1, failure.code)
        if captured.fallback_code:
            self.add("graph_fallbacks", 1, captured.fallback_code)
        self.set("graph_enabled", captured.replay_mode != "none")
        self.set("graph_capture_seconds", captured.capture_ms / 1e3)

    def record_search_graphs(
        self, captures: Sequence[CapturedStep[Any, Any]]
    ) -> None:
        """Record the CUDA graphs of a search so far, and the captures that fell back."""
        graphs = [c for c in captures if c.replay_mode != "none"]
        seconds = sum(c.capture_ms for c in graphs) / 1e3
        self.set("graph_enabled", bool(graphs))
        self.set("graph_capture_seconds", seconds)
        n_graphs = sum(c.n_graphs for c in graphs)
        self.raise_to("graph_recordings", n_graphs, source="search")
        codes = Counter(c.fallback_code for c in captures if c.fallback_code)
        for code, count in codes.items():
            self.raise_to("graph_fallbacks", count, code)

    def record_update(
        self, row: Mapping[str, object], n_env_steps: int
    ) -> None:
        """Record the metrics and the environment steps of one update.

        Args:
          row: its line of metrics.jsonl.
          n_env_steps: environment steps of the update.
        """
        self.record_shared_update(_number(row["seconds"]), n_env_steps)
        for name, key in COUNTERS_OF_ROW.items():
            self.add(name, _number(row[key]))
        if row.get("nonfinite_fraction"):
            self.add("updates_with_rows_left_out", 1)
        for part, key in LOSSES.items():
            self.set("loss", _number(row.get(key)), part)
        for name, key in GAUGES_OF_ROW.items():
            if row.get(key) is not None:
                self.set(name, _number(row[key]))

    def record_shared_update(self, seconds: float, n_env_steps: int) -> None:
        """Record one update made by several processes, whose metrics rank 0 reads.

        Args:
          n_env_steps: environment steps of all processes in the update.
        """
        self.add("updates", 1)
        self.add("env_steps", n_env_steps)
        self.observe("update", seconds)
        self.set("progress_timestamp_seconds", time.time())

    def record_validation(
        self, row: Mapping[str, object], seconds: float
    ) -> None:
        """Record one validation: its time, and the metrics that it adds to a line of metrics.jsonl."""
        self.observe("validation", seconds)
        for name in (
            "valid_score_ratio",
            "best_valid_score_ratio",
            "best_update",
        ):
            self.set(name, _number(row.get(GAUGES_OF_ROW[name])))

    def record_checkpoint(
        self, seconds: float = 0.0, path: Path | None = None
    ) -> None:
        """Record that a checkpoint was written, by this process or, if `path` is None, by rank 0."""
        self.set("checkpoint_timestamp_seconds", time.time())
        if path is not None:
            self.observe("checkpoint", seconds)
            self.set("checkpoint_bytes", path.stat().st_size)

    def record_machine(self, monitor: Monitor | None) -> None:
        """Record the GPU memory in use, copies to the GPU, and a monitor's counts since it was opened."""
        if torch.cuda.is_initialized():
            device = torch.cuda.current_device()
            total = torch.cuda.get_device_properties(device).total_memory
            for kind, n_bytes in (
                ("allocated", torch.cuda.memory_allocated()),
                ("reserved", torch.cuda.memory_reserved()),
                ("peak", torch.cuda.max_memory_allocated()),
                ("total", total),
            ):
                self.set("device_memory_bytes", n_bytes, kind)
        while memory.copy_seconds:
            self.observe("stage_copy", memory.copy_seconds.popleft())
        if monitor is None:
            return
        monitor.poll()
        for name, total in (
            ("compiles", monitor.compiles),
            ("compile_cache_hits", monitor.cache_hits),
            ("graph_recordings", monitor.cudagraph_recordings),
            ("graph_rerecordings", monitor.cudagraph_rerecordings),
        ):
            self.raise_to(name, total)
        for seconds in monitor.compile_seconds[self._n_compilations :]:
            self.observe("compile", seconds)
        self._n_compilations = len(monitor.compile_seconds)
        for name, codes in (
            ("recompiles", monitor.recompile_codes()),
            ("graph_skips", monitor.cudagraph_skip_codes()),
        ):
            for code, count in codes.items():
                self.raise_to(name, count, code)
        replay_ms = monitor.median_ms("replay")
        if replay_ms is not None:
            self.set("graph_replay_seconds", replay_ms / 1e3)

    def record_ranked(
        self, n_queries: int, n_candidates: int, n_missed: int = 0
    ) -> None:
        """Record numbers of ranked queries and sides, of scored candidates, and of provable answers not found."""
        self.set("progress_timestamp_seconds", time.time())
        self.add("queries_ranked", n_queries)
        self.add("candidates_scored", n_candidates)
        self.add("answers_lost", n_missed)

    def record_search(self, counts: Mapping[str, int]) -> None:
        """Record the counts of a search so far: `n_pruned`, `n_overflowed` and `n_halvings`."""
        self.raise_to("search_pruned", counts["n_pruned"])
        self.raise_to("search_overflow", counts["n_overflowed"])
        self.raise_to("search_halvings", counts["n_halvings"])


def _make_metrics(registry: CollectorRegistry) -> dict[str, Any]:
    """Make all metrics with all their series; return them by their names in the tables."""
    import prometheus_client as client

    metrics: dict[str, object] = {
        name: client.Info(f"funcppo_{name}", text, registry=registry)
        for name, text in INFOS.items()
    }
    for name, (text, buckets) in HISTOGRAMS.items():
        metrics[name] = client.Histogram(
            f"funcppo_{name}_seconds", text, buckets=buckets, registry=registry
        )
    for make, table, suffix in (
        (client.Counter, COUNTERS, "_total"),
        (client.Gauge, GAUGES, ""),
    ):
        for name, text in table.items():
            label, values = LABELS.get(name, ("", ()))
            labels = (label,) if label else ()
            metric = make(
                f"funcppo_{name}{suffix}", text, labels, registry=registry
            )
            for value in values:
                metric.labels(value)
            metrics[name] = metric
    return metrics


def _number(value: object) -> float:
    """Return a number of a row; NaN for a value that was not measured."""
    return float(value) if isinstance(value, (int, float)) else float("nan")


class Exporter:
    """Writer of a process's metrics to a file, which also keeps the exported registry up to date.

    Attributes:
      monitor: what counts compilations and graphs, if anything does.
    """

    def __init__(
        self,
        telemetry: Telemetry,
        file: Path | None,
        on_unwritten: Callable[[str], None],
    ) -> None:
        """Set the outputs without writing anything; see `export`."""
        self.telemetry = telemetry
        self.monitor: Monitor | None = None
        self._file = file
        self._on_unwritten = on_unwritten
        self._is_written = False  # the file, at the last attempt
        self._was_written = False  # the file, ever
        self._refreshed_at = float("-inf")

    def refresh(self, *, at_once: bool = False) -> None:
        """Update the monitor, memory and copy metrics and write the file, at most once a second unless `at_once`.

        Raises:
          OSError: the file cannot be written for the first time. Later it is tried again, and the program goes on.
        """
        age = time.monotonic() - self._refreshed_at
        if age < 1.0 and not at_once:
            return
        self._refreshed_at = time.monotonic()
        self.telemetry.record_machine(self.monitor)
        if self._file is not None:
            self._write(self._file)

    def _write(self, file: Path) -> None:
        """Write the file; if it could be written before and no longer can, say so once."""
        from prometheus_client import generate_latest

        text = generate_latest(self.telemetry.registry)
        # Readers see a whole file; these numbers need not outlive a power failure.
        try:
            write_file(file, text, durable=False)
            self._is_written = self._was_written = True
        except OSError as error:
            # not the temporary file beside it
            error.filename = str(file)
            if not self._was_written:
                raise
            if self._is_written:
                self._on_unwritten(
                    f"{file}: {error.strerror}: the metrics there grow old until it can be written again"
                )
            self._is_written = False


@contextmanager
def export(
    port: int | None,
    file: Path | None,
    program: str,
    versions: Mapping[str, str],
    on_unwritten: Callable[[str], None] = lambda line: None,
) -> Iterator[Exporter]:
    """Export metrics over HTTP on the loopback address, to a file, or both, until the block ends.

    Args:
      port: of http://127.0.0.1:PORT/metrics; None for no server.
      file: in the format of the node exporter's textfile collector; None for no file.
      program: the name of the program.
      versions: by package, the labels of `funcppo_build_info`.
      on_unwritten: receives a line where the file could be written before, and cannot be any more.

    Raises:
      OSError: the file cannot be written at the start.
      ValueError: the port is taken, or prometheus-client is missing.
    """
    telemetry = Telemetry()
    telemetry.describe("build", **versions)
    telemetry.describe("run", program=program)
    exporter = Exporter(telemetry, file, on_unwritten)
    server = _serve(telemetry, port) if port is not None else None
    try:
        exporter.refresh(at_once=True)
        yield exporter
    finally:
        if server is not None:
            server.shutdown()
            server.server_close()
        exporter.refresh(at_once=True)


def _serve(telemetry: Telemetry, port: int) -> WSGIServer:
    """Serve the metrics over HTTP from a thread of their own; return the server.

    Raises:
      ValueError: the port is taken.
    """
    from prometheus_client import start_http_server

    try:
        server, _ = start_http_server(port, HOST, telemetry.registry)
    except OSError as error:
        raise ValueError(
            f"--metrics-port: expected a free port of {HOST}, got {port}: {error.strerror}"
        ) from None
    return server
