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
from typing import TypeVar

Code = TypeVar("Code")


@unique
class FallbackCode(StrEnum):
    """Why a step is not replayed as a CUDA graph."""

    NO_GPU = "no_gpu"
    DISABLED = "disabled"
    SEVERAL_DEVICES = "several_devices"
    CPU_TENSOR = "cpu_tensor"
    HOST_SYNC = "host_sync"
    GENERATOR = "generator"
    OUT_OF_MEMORY = "out_of_memory"
    OTHER = "other"


@unique
class FailureCode(StrEnum):
    """Why a strategy, a part of the training step, or a compiled search is not in use."""

    DISABLED = "disabled"
    NOT_REQUESTED = "not_requested"
    WRONG_RESULT = "wrong_result"
    UNSUPPORTED = "unsupported"
    COMPILER_ERROR = "compiler_error"
    NOT_CAPTURED = "not_captured"
    OUT_OF_MEMORY = "out_of_memory"
    SHORT_RUN = "short_run"
    HOST_ENVIRONMENT = "host_environment"
    NO_GPU = "no_gpu"
    NO_SEARCH = "no_search"
    OTHER = "other"


@unique
class SkipCode(StrEnum):
    """Why CUDAGraph Trees ran a graph without recording it."""

    MUTATED_INPUTS = "mutated_inputs"
    CPU_OPERATOR = "cpu_operator"
    SEVERAL_DEVICES = "several_devices"
    DYNAMIC_SHAPES = "dynamic_shapes"
    INCOMPATIBLE_OPERATOR = "incompatible_operator"
    OTHER = "other"


@unique
class RecompileCode(StrEnum):
    """Why a function was compiled again."""

    SHAPE = "shape"
    DTYPE = "dtype"
    DEVICE = "device"
    GRAD_MODE = "grad_mode"
    VALUE = "value"
    OTHER = "other"


# The first code with a word that the text holds, in lower case.
_SKIP_WORDS: Mapping[SkipCode, Sequence[str]] = {
    SkipCode.MUTATED_INPUTS: ("mutated inputs",),
    SkipCode.CPU_OPERATOR: ("cpu device", "cpu scalar", "cpu tensor"),
    SkipCode.SEVERAL_DEVICES: ("multiple device",),
    SkipCode.DYNAMIC_SHAPES: (
        "dynamic shape",
        "symbolic shape",
        "unbacked",
        "symint",
    ),
    SkipCode.INCOMPATIBLE_OPERATOR: ("incompatible op", "deterministic"),
}
# Guards of Dynamo, and what `cache_key` says; arguments may have any of the bare words as names.
_RECOMPILE_WORDS: Mapping[RecompileCode, Sequence[str]] = {
    RecompileCode.SHAPE: (
        *("size mismatch", "rank mismatch", "stride mismatch"),
        *(".size()", ".stride()", "differs: shape ", "differs: stride "),
    ),
    RecompileCode.DTYPE: ("dtype mismatch", "differs: dtype "),
    RecompileCode.DEVICE: (
        "device index mismatch",
        "dispatch key set mismatch",
        "differs: device ",
    ),
    RecompileCode.GRAD_MODE: ("requires_grad mismatch", "changed: grad_mode"),
    RecompileCode.VALUE: ("==", " is ", "len(", "type(", "differs"),
}
_UNSUPPORTED = (
    *("Unsupported", "UserError", "GuardOnDataDependentSymNode"),
    "UnsupportedError",  # of `row_tensor`
)
_COMPILER_MODULES = ("torch._dynamo", "torch._inductor", "triton")


def skip_code(text: str) -> SkipCode:
    """The code of a reason that CUDAGraph Trees log."""
    return _first_match(_SKIP_WORDS, text) or SkipCode.OTHER


def recompile_code(text: str) -> RecompileCode:
    """The code of the guard that failed."""
    return _first_match(_RECOMPILE_WORDS, text) or RecompileCode.OTHER


def failure_code(error: BaseException) -> FailureCode:
    """The code of an exception that a strategy or a part raised."""
    classes = type(error).__mro__
    names = {cls.__name__ for cls in classes}
    modules = tuple(cls.__module__ for cls in classes)
    if "EquivalenceError" in names:
        return FailureCode.WRONG_RESULT
    if "OutOfMemoryError" in names:
        return FailureCode.OUT_OF_MEMORY
    if "CaptureError" in names:
        return FailureCode.NOT_CAPTURED
    if names & set(_UNSUPPORTED):
        return FailureCode.UNSUPPORTED
    if any(module.startswith(_COMPILER_MODULES) for module in modules):
        return FailureCode.COMPILER_ERROR
    return FailureCode.OTHER


def _first_match(words: Mapping[Code, Sequence[str]], text: str) -> Code | None:
    """The first code with a word in the text."""
    lower = text.lower()
    for code, parts in words.items():
        if any(part in lower for part in parts):
            return code
    return None


def error_line(error: BaseException) -> str:
    """What an error says, on one line; of one without a text, such as a failed assertion, where it was raised."""
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
