"""The metrics that programs export: their names, kinds, units and labels. This module imports no PyTorch.

Names end in their unit; ratios are at most 1. A counter counts from the start of the process.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from funcppo.runtime.reasons import (
    FailureCode,
    FallbackCode,
    RecompileCode,
    SkipCode,
)

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_LONG_SECONDS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300)
_COPY_SECONDS = (
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
# name of the loss in a line of metrics.jsonl, by label
LOSSES = {"total": "loss", "policy": "policy_loss", "value": "value_loss"}


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricSpec:
    """One metric."""

    name: str
    kind: Literal["counter", "gauge", "histogram", "info"]
    text: str
    label: str = ""
    values: tuple[str, ...] = ()  # all values of the label, known beforehand
    buckets: tuple[float, ...] = ()  # upper bounds in seconds


def _counter(
    name: str, text: str, label: str = "", codes: type[StrEnum] | None = None
) -> MetricSpec:
    values = tuple(codes) if codes else ()
    return MetricSpec(
        name=f"funcppo_{name}_total",
        kind="counter",
        text=text,
        label=label,
        values=values,
    )


def _gauge(
    name: str, text: str, label: str = "", values: tuple[str, ...] = ()
) -> MetricSpec:
    return MetricSpec(
        name=f"funcppo_{name}",
        kind="gauge",
        text=text,
        label=label,
        values=values,
    )


def _histogram(name: str, text: str, buckets: tuple[float, ...]) -> MetricSpec:
    return MetricSpec(
        name=f"funcppo_{name}_seconds",
        kind="histogram",
        text=text,
        buckets=buckets,
    )


def _info(name: str, text: str) -> MetricSpec:
    return MetricSpec(name=f"funcppo_{name}_info", kind="info", text=text)


METRICS = (
    _info("build", "Versions of funcppo and PyTorch."),
    _info(
        "run", "Program, data set, device, strategy; in training, replay mode."
    ),
    _gauge("world_size", "Processes that share the work of the program."),
    _gauge("finished", "1 once the program has done its work, before that 0."),
    _counter("updates", "Updates of PPO made by this process."),
    _counter("env_steps", "Environment steps of these updates."),
    _counter("episodes", "Episodes that ended."),
    _counter("truncated_episodes", "Episodes that ended by a time limit."),
    _counter("minibatches", "Minibatches applied."),
    _counter(
        "minibatches_skipped",
        "Minibatches left out: loss or gradient not finite.",
    ),
    _counter(
        "updates_with_rows_left_out",
        "Updates of which rows were left out: a value not finite.",
    ),
    _gauge(
        "nonfinite_rows_ratio", "Share of rows left out: a value not finite."
    ),
    _histogram("update", "Time of an update, on the host.", _SECONDS),
    _histogram("validation", "Time of a validation.", _LONG_SECONDS),
    _histogram("checkpoint", "Time to write a checkpoint.", _SECONDS),
    _gauge(
        "progress_timestamp_seconds",
        "Unix time of the latest update or ranked query, or of the start.",
    ),
    _gauge(
        "checkpoint_timestamp_seconds",
        "Unix time of the latest checkpoint, or of the start.",
    ),
    _gauge("checkpoint_bytes", "Size of the latest checkpoint."),
    _gauge("loss", "Loss of the latest update.", "part", tuple(LOSSES)),
    _gauge(
        "entropy_nats",
        "Entropy of the policy; of a prover, relative to its prior.",
    ),
    _gauge("approx_kl_nats", "Estimated KL to the policy before the update."),
    _gauge("clip_fraction_ratio", "Share of clipped probability ratios."),
    _gauge("grad_norm", "L2 norm of the gradient before clipping."),
    _gauge("learning_rate", "Learning rate of the latest update."),
    _gauge(
        "explained_variance_ratio",
        "Share of the variance of returns that the value explains.",
    ),
    _gauge("episode_return", "Mean return of the episodes of an update."),
    _gauge("valid_score_ratio", "Metric of the latest validation."),
    _gauge(
        "best_valid_score_ratio",
        "Metric on valid of the parameters that are kept.",
    ),
    _gauge("best_update", "Update whose parameters are kept; 0: the first."),
    _gauge(
        "graph_enabled", "1 if the training step or search replays CUDA graphs."
    ),
    _gauge("graph_capture_seconds", "Time to record the CUDA graphs."),
    _gauge(
        "graph_replay_seconds",
        "Median device time of recent training steps; host time on a CPU.",
    ),
    _counter("graph_recordings", "CUDA graphs recorded."),
    _counter(
        "graph_rerecordings",
        "CUDA graphs that CUDAGraph Trees recorded again, an input having moved.",
    ),
    _counter(
        "graph_fallbacks",
        "Steps that are not replayed as a CUDA graph.",
        "reason",
        FallbackCode,
    ),
    _counter(
        "graph_skips",
        "Graphs that CUDAGraph Trees ran without recording.",
        "reason",
        SkipCode,
    ),
    _counter("leaves_moved", "Leaves of the state that changed address."),
    _counter(
        "strategy_failures",
        "Strategies, parts of the training step and compiled searches that are not in use.",
        "reason",
        FailureCode,
    ),
    _counter("compiles", "Graphs compiled, for the first time or again."),
    _histogram(
        "compile", "Time to compile a function for the disk.", _LONG_SECONDS
    ),
    _counter("compile_cache_hits", "Functions whose code came from disk."),
    _counter(
        "recompiles", "Functions compiled again.", "reason", RecompileCode
    ),
    _gauge(
        "device_memory_bytes",
        "Memory of the GPU: of tensors, of the allocator, its peak, and all.",
        "kind",
        ("allocated", "reserved", "peak", "total"),
    ),
    _counter(
        "queries_ranked",
        "Queries and sides ranked; of rank 0, by all processes.",
    ),
    _counter("candidates_scored", "Candidates scored for them."),
    _counter(
        "search_pruned", "Candidates whose search dropped partial proofs."
    ),
    _counter("search_overflow", "Candidates with successors that did not fit."),
    _counter("search_halvings", "Times that slots were halved to fit memory."),
    _counter("answers_lost", "Provable answers that the search did not find."),
    _histogram(
        "stage_copy",
        "Device time to copy a chunk of candidates to the GPU.",
        _COPY_SECONDS,
    ),
)
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
