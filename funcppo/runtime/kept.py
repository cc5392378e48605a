"""Compiled functions kept on disk whole: what a later process finds there it need not even trace.

Inductor keeps the code that it made, but a process must trace a function, for seconds, to ask for it. Here a function
is found by what it was compiled for: its name, settings, the shapes of its arguments, this project's sources, PyTorch,
the processor. Only functions and settings of this project are kept: what others compute may depend on what a name does
not show. Files lie in Inductor's cache directory.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import platform
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcppo import tree

PACKAGE = Path(__file__).parents[1]
RESTARTS = 4  # of tracing
OURS = {PACKAGE.name, "torch", "builtins", "collections", "functools"}  # modules whose functions and classes are known


class Pickler(pickle.Pickler):
    """Tensors go as what a compiler reads of them; two places that hold one tensor hold one there too."""

    def __init__(self, file: Any, only: set[str] | None = None) -> None:
        """Args: `only`, packages; functions and classes of others are refused with PicklingError."""
        super().__init__(file)
        self._only = only
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return None
        number = self._numbers.setdefault(id(obj), len(self._numbers))
        return number, tuple(obj.shape), obj.stride(), obj.dtype, str(obj.device)

    def reducer_override(self, obj: Any) -> Any:
        """As ever, but for the refusal."""
        module = getattr(obj, "__module__", None) if callable(obj) else None
        if self._only is not None and isinstance(module, str) and module.partition(".")[0] not in self._only:
            raise pickle.PicklingError(f"{module} is not known here")
        return NotImplemented


class Made(NamedTuple):
    """What a call asked a compiler for."""

    name: str  # of the function
    seconds: float
    found: bool  # on disk: nothing was compiled
    why: str  # what differs from the calls before; empty for the first


made: list[Made] = []  # by this process, in order


class Kept:
    """A function compiled for each kind of arguments; where it is ours, once for all processes."""

    def __init__(self, fn: Callable[..., Any], options: dict[str, Any] | None) -> None:
        """Args: `options` of Inductor."""
        self._fn, self._options = fn, options or {}
        self._plain = torch.compile(fn, fullgraph=True, dynamic=False, options=options)
        self._made: dict[Any, Callable[..., Any]] = {}

    def __call__(self, *args: Any) -> Any:
        """As the function itself. Errors: those of the compiler."""
        if torch.compiler.is_compiling():
            return self._fn(*args)
        kind = _kind(args)
        try:
            known = kind in self._made
        except TypeError:  # settings that cannot be told apart
            return self._plain(*args)
        if not known:
            self._made[kind] = self._asked(kind, args)
        return self._made[kind](*args)

    def at_hand(self, *args: Any) -> bool:
        """Whether such a call finds its code on disk."""
        path = self._place(args)
        return path is not None and path.exists()

    def _asked(self, kind: Any, args: tuple[Any, ...]) -> Callable[..., Any]:
        path = self._place(args) if _ordinary(args) else None
        if path is None:
            return self._plain
        start = time.perf_counter()
        found = _read(path) if path.exists() else None
        code = found or self._compiled(path, args)
        why = _difference(next(reversed(self._made)), kind, args) if self._made else ""
        name, seconds = getattr(self._fn, "__name__", repr(self._fn)), time.perf_counter() - start
        made.append(Made(name, seconds, found=found is not None, why=why))
        return code

    def _compiled(self, path: Path, args: tuple[Any, ...]) -> Callable[..., Any]:
        # No guards: `_kind` and `_place` tell calls apart, and most of what a guard looks at cannot be kept.
        options: Any = {**self._options, "guard_filter_fn": lambda guards: [False] * len(guards)}
        with torch._dynamo.config.patch(enable_aot_compile=True, specialize_float=True):
            ahead_of_time: Any = torch.compile(self._fn, fullgraph=True, dynamic=False, options=options)
            code = _traced(ahead_of_time, args)
        _write(path, code)
        return code

    def _place(self, args: tuple[Any, ...]) -> Path | None:
        """The file of the code for such arguments; None where it is not to be kept."""
        file = io.BytesIO()
        try:
            Pickler(file, OURS).dump((self._fn, args))
        except (pickle.PicklingError, AttributeError, TypeError):
            return None
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        devices = {x.device for x in tree.leaves(args) if isinstance(x, Tensor)}
        told = sorted((name, _said(value)) for name, value in self._options.items())
        asked = repr((told, _state(), [_processor(device) for device in sorted(devices, key=str)]))
        name = hashlib.sha256(file.getvalue() + asked.encode() + _sources().encode()).hexdigest()
        return Path(cache_dir()) / PACKAGE.name / name[:32]


def _traced(ahead_of_time: Any, args: tuple[Any, ...]) -> Any:
    """The code of a call; tracing begins anew where a number of float64 turns out to be no constant."""
    from torch._dynamo.exc import RestartAnalysis

    for _ in range(RESTARTS):
        with suppress(RestartAnalysis):
            return ahead_of_time.aot_compile((args, {}))
    return ahead_of_time.aot_compile((args, {}))


def _said(option: Any) -> Any:
    return option.uuid() if hasattr(option, "uuid") else option  # a pass over the graph names itself


def _ordinary(args: tuple[Any, ...]) -> bool:
    """Whether code without guards may see this: no transform, no tensor of another class or that wants a gradient."""
    tensors = [x for x in tree.leaves(args) if isinstance(x, Tensor)]
    return not _transforming() and all(type(x) is Tensor and not x.requires_grad for x in tensors)


def _transforming() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore[reportAttributeAccessIssue]


def _kind(args: tuple[Any, ...]) -> Any:
    """What calls must have in common to share code."""
    numbers = dict[int, int]()

    def of(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        number = numbers.setdefault(id(x), len(numbers))
        return number, x.shape, x.stride(), x.dtype, x.device, type(x), x.requires_grad

    return tree.structure(args), tuple(map(of, tree.leaves(args))), _state(), _transforming()


def _difference(before: Any, now: Any, args: tuple[Any, ...]) -> str:
    if before[0] != now[0]:
        return "other arguments"
    for name, was, is_ in zip(tree.paths(args), before[1], now[1]):
        if was != is_:
            return f"{name} differs" + (f": {was[1:4]} before, now {is_[1:4]}" if isinstance(is_, tuple) else "")
    return "PyTorch's settings differ"


def _state() -> tuple[Any, ...]:
    """What PyTorch was told beside a call, and compilers read."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.backends.cuda.matmul.fp32_precision,
        torch.get_num_threads(),
    )


@cache
def _sources() -> str:
    """Of this project, PyTorch, Python and what the environment tells compilers."""
    digest = hashlib.sha256(f"{torch.__version__} {torch.version.git_version}".encode())
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(path.read_bytes())
    told = sorted(
        item for item in os.environ.items() if item[0].startswith(("TORCH", "TRITON")) and "_DIR" not in item[0]
    )
    digest.update(repr((told, sys.version_info, platform.machine())).encode())
    return digest.hexdigest()


@cache
def _processor(device: torch.device) -> Any:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    return device.type, torch.backends.cpu.get_cpu_capability()


def _read(path: Path) -> Callable[..., Any] | None:
    """What `_write` wrote; None where it cannot be read, so that it is made anew."""
    try:
        with path.open("rb") as file:
            found = torch.compiler.load_compiled_function(file)
        return found
    except Exception as error:
        warnings.warn(f"{path}: compiled again, for it cannot be read: {error}", stacklevel=2)
        return None


def _write(path: Path, code: Any) -> None:
    part = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        code.save_compiled_function(str(part))
        part.replace(path)
    except Exception as error:
        warnings.warn(f"{path}: not kept for the next process: {error}", stacklevel=2)
        with suppress(OSError):
            part.unlink(missing_ok=True)
