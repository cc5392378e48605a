"""Compiled functions kept on disk whole: what a later process finds there it need not even trace.

Inductor keeps the code that it made, but a process must trace a function, for seconds, to ask for it. Here a function
is found by what it was compiled for: its name, settings, the shapes of its arguments, this project's sources, PyTorch,
the processor. Only functions and settings of this project are kept: what others compute may depend on what a name does
not show, and what is patched while a process runs shows nowhere. Files lie in Inductor's cache directory.
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
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcppo import tree

PACKAGE_DIR = Path(__file__).parents[1]
MAX_TRACE_RESTARTS = 4  # of tracing
MAX_MEMOIZED_CONFIGS = 256  # settings
IGNORED_ENV_VARS = {"TORCH_WARM_POOL", "TRITON_LIBDEVICE_PATH", "TRITON_PTXAS_PATH"}  # while a process runs
ALLOWED_PACKAGES = {
    PACKAGE_DIR.name,
    "torch",
    "builtins",
    "collections",
    "functools",
}  # modules whose functions and classes are known


class TensorSpecPickler(pickle.Pickler):
    """Tensors go as what a compiler reads of them; two places that hold one tensor hold one there too."""

    def __init__(self, file: Any, allowed_packages: set[str] | None = None, allow_tensors: bool = True) -> None:
        """Args: with `only`, functions and classes of other packages are refused; without `tensors`, these are.

        Errors: PicklingError, when something is refused.
        """
        super().__init__(file)
        self.fast = True  # no memo: equal settings are equal bytes, whatever strings they share
        self._only, self._tensors = allowed_packages, allow_tensors
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return None
        if not self._tensors:
            raise pickle.PicklingError("a tensor would be one of its values")
        number = self._numbers.setdefault(id(obj), len(self._numbers))
        return number, tuple(obj.shape), obj.stride(), obj.dtype, str(obj.device)

    def reducer_override(self, obj: Any) -> Any:
        """As ever, but for the refusal."""
        module = getattr(obj, "__module__", None) if callable(obj) else None
        if self._only is not None and isinstance(module, str) and module.partition(".")[0] not in self._only:
            raise pickle.PicklingError(f"{module} is not known here")
        return NotImplemented


class CompileEvent(NamedTuple):
    """What a call asked a compiler for."""

    name: str  # of the function
    seconds: float
    cache_hit: bool  # on disk: nothing was compiled
    recompile_reason: str  # what differs from the calls before; empty for the first


compile_events: list[CompileEvent] = []  # by this process, in order


class CachedFunction:
    """A function compiled for each kind of arguments; where it is ours, once for all processes."""

    def __init__(self, fn: Callable[..., Any], options: dict[str, Any] | None) -> None:
        """Args: `options` of Inductor."""
        self._fn, self._options, self._name = fn, options or {}, _bytes(fn)
        self._plain = torch.compile(fn, fullgraph=True, dynamic=False, options=options)
        self._made: dict[Any, Callable[..., Any]] = {}

    def __call__(self, *args: Any) -> Any:
        """As the function itself. Errors: those of the compiler."""
        if torch.compiler.is_compiling():
            return self._fn(*args)
        kind = _kind(args) if self._name is not None else None
        if kind is None:
            return self._plain(*args)
        if kind not in self._made:
            self._made[kind] = self._asked(kind, args)
        return self._made[kind](*args)

    def is_cached(self, *args: Any) -> bool:
        """Whether such a call finds its code on disk."""
        path = self._place(args)
        return path is not None and os.path.exists(path)

    def _asked(self, kind: Any, args: tuple[Any, ...]) -> Callable[..., Any]:
        if len(self._made) >= (limit := torch._dynamo.config.recompile_limit):
            raise RuntimeError(f"{self._fn}: compiled {limit} times, the last because {self._difference(kind, args)}")
        path, why, start = self._place(args), self._difference(kind, args), time.perf_counter()
        if why and torch._dynamo.eval_frame._stance.stance == "fail_on_recompile":
            raise RuntimeError(f"{self._fn}: to be compiled again, because {why}")
        if path is None:
            return self._plain
        found = _read(path)
        code = found or self._compiled(args)
        if code is not self._plain:
            name = getattr(self._fn, "__name__", repr(self._fn))
            compile_events.append(
                CompileEvent(name, time.perf_counter() - start, cache_hit=found is not None, recompile_reason=why)
            )
            if found is None and _unchanged():
                _write(path, code)
        return code

    def _compiled(self, args: tuple[Any, ...]) -> Callable[..., Any]:
        # No guards: `_kind` and `_place` tell calls apart, and most of what a guard looks at cannot be kept.
        options: Any = {**self._options, "guard_filter_fn": lambda guards: [False] * len(guards)}
        with torch._dynamo.config.patch(enable_aot_compile=True, specialize_float=True):
            ahead_of_time: Any = torch.compile(self._fn, fullgraph=True, dynamic=False, options=options)
            try:
                return _trace_and_compile(ahead_of_time, args)
            except Exception as error:  # where the function itself cannot be compiled, calling it says so
                line = (str(error).splitlines() or [""])[0]
                warnings.warn(f"{self._fn}: not compiled ahead of time, so not kept: {line}", stacklevel=2)
                return self._plain

    def _place(self, args: tuple[Any, ...]) -> Path | None:
        """The file of the code for such arguments; None where it is not to be kept."""
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        if self._name is None or (asked := _bytes(args, tensors=True)) is None:
            return None
        told = sorted((name, _said(value)) for name, value in self._options.items())
        text = repr((self._name, asked, told, _state(), _settings(args)))
        return Path(cache_dir()) / PACKAGE_DIR.name / hashlib.sha256(text.encode()).hexdigest()[:32]

    def _difference(self, now: Any, args: tuple[Any, ...]) -> str:
        """What sets a call apart from the one before; empty for the first."""
        if not self._made:
            return ""
        before = next(reversed(self._made))
        if before[0] != now[0]:
            return "other arguments"
        for name, was, is_ in zip(tree.paths(args), before[1], now[1]):
            if was != is_:
                return f"{name} differs" + (f": {was[1:4]} before, now {is_[1:4]}" if isinstance(is_, tuple) else "")
        return "PyTorch's settings differ"


def _trace_and_compile(ahead_of_time: Any, args: tuple[Any, ...]) -> Any:
    """The code of a call; tracing begins anew where a number of float64 turns out to be no constant."""
    from torch._dynamo.exc import RestartAnalysis

    for _ in range(MAX_TRACE_RESTARTS):
        with suppress(RestartAnalysis):
            return ahead_of_time.aot_compile((args, {}))
    return ahead_of_time.aot_compile((args, {}))


def _said(option: Any) -> Any:
    return option.uuid() if hasattr(option, "uuid") else option  # a pass over the graph names itself


def _kind(args: tuple[Any, ...]) -> Any:
    """What calls must have in common to share code; None where code without guards would not see what it must.

    That is inside a transform, with tensors of other classes or that want gradients, and with settings of others.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:  # pyright: ignore[reportAttributeAccessIssue]
        return None
    numbers, leaves = dict[int, int](), list[Any]()
    for x in tree.leaves(args):
        if not isinstance(x, Tensor):
            leaves.append(_told(x))
            if leaves[-1] is None:
                return None
        elif type(x) is Tensor and not x.requires_grad:
            number = numbers.setdefault(id(x), len(numbers))
            leaves.append((number, tuple(x.shape), x.stride(), x.dtype, str(x.device)))
        else:
            return None
    return tree.structure(args), tuple(leaves), _state()


def _told(x: Any) -> bytes | None:
    """A setting as bytes, which tell 1 from 1.0 and True; None for what is not ours or cannot be told."""
    params = getattr(type(x), "__dataclass_params__", None)
    if params is None or not params.frozen:
        return _bytes(x)
    if id(x) not in _TOLD:
        if len(_TOLD) >= MAX_MEMOIZED_CONFIGS:
            _TOLD.clear()
        _TOLD[id(x)] = x, _bytes(x)
    return _TOLD[id(x)][1]


_TOLD: dict[int, tuple[Any, bytes | None]] = {}  # settings that were told, kept alive so that no other has their id


def _bytes(x: Any, tensors: bool = False) -> bytes | None:
    file = io.BytesIO()
    try:
        TensorSpecPickler(file, ALLOWED_PACKAGES, tensors).dump(x)
    except (pickle.PicklingError, AttributeError, TypeError, ValueError, RecursionError):
        return None
    return file.getvalue()


def _state() -> tuple[Any, ...]:
    """What PyTorch was told beside a call, and compilers read."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        *((torch.is_autocast_enabled(x), torch.get_autocast_dtype(x)) for x in ("cpu", "cuda")),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        str(torch.get_default_device()),
        torch.get_float32_matmul_precision(),
        torch.backends.cuda.matmul.fp32_precision,
        torch.get_num_threads(),
    )


def _settings(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What compiled code depends on beside a call: sources, versions, processors, what compilers were told."""
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor

    about = (k for k in os.environ if k.startswith(("TORCH", "TRITON", "CXX")) and "_DIR" not in k)
    told = sorted((k, os.environ[k]) for k in about if k not in IGNORED_ENV_VARS)
    devices = {x.device for x in tree.leaves(args) if isinstance(x, Tensor) and x.is_cuda}
    gpus = sorted((str(d), torch.cuda.get_device_name(d), torch.cuda.get_device_capability(d)) for d in devices)
    set_here = [_set(functorch), _set(inductor)]
    versions = torch.__version__, torch.version.git_version, sys.version_info, platform.machine()
    return _SOURCE_DIGEST, versions, torch.backends.cpu.get_cpu_capability(), gpus, told, set_here


def _set(config: Any) -> list[tuple[str, str]]:
    """The settings of a module of PyTorch's that are not as it comes."""
    now = ((name, value, config._config[name].default) for name, value in config.save_config_portable().items())
    return sorted((name, repr(value)) for name, value, default in now if value != default)


def _digest() -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(PACKAGE_DIR.rglob("*.py")))).hexdigest()


def _unchanged() -> bool:
    """Whether the sources are those that this process runs."""
    return all(path.stat().st_mtime <= _IMPORT_TIME for path in PACKAGE_DIR.rglob("*.py"))


_IMPORT_TIME, _SOURCE_DIGEST = time.time(), _digest()


def _read(path: Path) -> Callable[..., Any] | None:
    """What `_write` wrote; None where it cannot be read, so that it is made anew."""
    try:
        with path.open("rb") as file:
            return torch.compiler.load_compiled_function(file)
    except FileNotFoundError:
        return None
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
