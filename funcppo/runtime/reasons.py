"""Stable codes of reasons: why a step is no CUDA graph, why a strategy is not in use, why something compiled again.

A sentence says what happened to a person; its code says it to a program, as a label of a metric or in the files of a
run. Codes are never renamed; `OTHER` is for what no code describes.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping, Sequence
from enum import StrEnum, unique
from pathlib import Path


@unique
class ReasonCode(StrEnum):
    """Reason why a step is not as fast as it may be."""

    OTHER = "other"
    OUT_OF_MEMORY = "out_of_memory"
    DISABLED = "disabled"
    NO_GPU = "no_gpu"
    SEVERAL_DEVICES = "several_devices"
    CPU_TENSOR = "cpu_tensor"
    HOST_SYNC = "host_sync"
    GENERATOR = "generator"
    NOT_REQUESTED = "not_requested"
    WRONG_RESULT = "wrong_result"
    UNSUPPORTED = "unsupported"
    COMPILER_ERROR = "compiler_error"
    NOT_CAPTURED = "not_captured"
    SHORT_RUN = "short_run"
    HOST_ENVIRONMENT = "host_environment"
    NO_SEARCH = "no_search"
    MUTATED_INPUTS = "mutated_inputs"
    CPU_OPERATOR = "cpu_operator"
    DYNAMIC_SHAPES = "dynamic_shapes"
    INCOMPATIBLE_OPERATOR = "incompatible_operator"
    SHAPE = "shape"
    DTYPE = "dtype"
    DEVICE = "device"
    GRAD_MODE = "grad_mode"
    VALUE = "value"


# why a step is not replayed as a CUDA graph
FALLBACKS = (
    ReasonCode.NO_GPU,
    ReasonCode.DISABLED,
    ReasonCode.SEVERAL_DEVICES,
    ReasonCode.CPU_TENSOR,
    ReasonCode.HOST_SYNC,
    ReasonCode.GENERATOR,
    ReasonCode.OUT_OF_MEMORY,
    ReasonCode.OTHER,
)
# why a strategy, a part of the training step, or a compiled search is not in use
FAILURES = (
    ReasonCode.DISABLED,
    ReasonCode.NOT_REQUESTED,
    ReasonCode.WRONG_RESULT,
    ReasonCode.UNSUPPORTED,
    ReasonCode.COMPILER_ERROR,
    ReasonCode.NOT_CAPTURED,
    ReasonCode.OUT_OF_MEMORY,
    ReasonCode.SHORT_RUN,
    ReasonCode.HOST_ENVIRONMENT,
    ReasonCode.NO_GPU,
    ReasonCode.NO_SEARCH,
    ReasonCode.OTHER,
)

# The first code with a word that the text holds, in lower case.
_SKIP_WORDS: Mapping[ReasonCode, Sequence[str]] = {
    ReasonCode.MUTATED_INPUTS: ("mutated inputs",),
    ReasonCode.CPU_OPERATOR: ("cpu device", "cpu scalar", "cpu tensor"),
    ReasonCode.SEVERAL_DEVICES: ("multiple device",),
    ReasonCode.DYNAMIC_SHAPES: (
        "dynamic shape",
        "symbolic shape",
        "unbacked",
        "symint",
    ),
    ReasonCode.INCOMPATIBLE_OPERATOR: ("incompatible op", "deterministic"),
}
# Guards of Dynamo, and what `cache_key` says; arguments may have any of the bare words as names.
_RECOMPILE_WORDS: Mapping[ReasonCode, Sequence[str]] = {
    ReasonCode.SHAPE: (
        *("size mismatch", "rank mismatch", "stride mismatch"),
        *(".size()", ".stride()", "differs: shape ", "differs: stride "),
    ),
    ReasonCode.DTYPE: ("dtype mismatch", "differs: dtype "),
    ReasonCode.DEVICE: (
        "device index mismatch",
        "dispatch key set mismatch",
        "differs: device ",
    ),
    ReasonCode.GRAD_MODE: ("requires_grad mismatch", "changed: grad_mode"),
    ReasonCode.VALUE: ("==", " is ", "len(", "type(", "differs"),
}
SKIPS = (*_SKIP_WORDS, ReasonCode.OTHER)
RECOMPILES = (*_RECOMPILE_WORDS, ReasonCode.OTHER)
_UNSUPPORTED = (
    *("Unsupported", "UserError", "GuardOnDataDependentSymNode"),
    "UnsupportedError",  # of `env_kernel`
)
_COMPILER_MODULES = ("torch._dynamo", "torch._inductor", "triton")


def skip_code(text: str) -> ReasonCode:
    """Return the code of a reason that CUDAGraph Trees log for skipping a graph."""
    return _first_match(_SKIP_WORDS, text)


def recompile_code(text: str) -> ReasonCode:
    """Return the code of a guard that failed and caused a recompilation."""
    return _first_match(_RECOMPILE_WORDS, text)


def failure_code(error: BaseException) -> ReasonCode:
    """Return the code of an exception from a strategy or a part of the step."""
    classes = type(error).__mro__
    names = {cls.__name__ for cls in classes}
    modules = tuple(cls.__module__ for cls in classes)
    if "EquivalenceError" in names:
        return ReasonCode.WRONG_RESULT
    if "OutOfMemoryError" in names:
        return ReasonCode.OUT_OF_MEMORY
    if "CaptureError" in names:
        return ReasonCode.NOT_CAPTURED
    if names & set(_UNSUPPORTED):
        return ReasonCode.UNSUPPORTED
    if any(module.startswith(_COMPILER_MODULES) for module in modules):
        return ReasonCode.COMPILER_ERROR
    return ReasonCode.OTHER


def _first_match(
    words: Mapping[ReasonCode, Sequence[str]], text: str
) -> ReasonCode:
    """Return the first code that has a word in the text; `OTHER` if no code has."""
    lower = text.lower()
    for code, parts in words.items():
        if any(part in lower for part in parts):
            return code
    return ReasonCode.OTHER


def error_line(error: BaseException) -> str:
    """Format an error on one line; an error without text is named by the line that raised it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    is_dynamos = lines[:1] == ["from user code:"]  # added to an empty text
    if lines and not is_dynamos:
        # a compiler names its backend in a line before the error
        return " ".join(lines[: 2 if lines[0].endswith(":") else 1])
    frames = traceback.extract_tb(error.__traceback__)
    places = [
        f"{Path(frame.filename).name}, line {frame.lineno}: {frame.line}"
        for frame in frames[-1:]
    ]
    if is_dynamos:
        places.append(re.sub(r'"[^"]*/', '"', " ".join(lines[:3])))
    return ", ".join(places)
