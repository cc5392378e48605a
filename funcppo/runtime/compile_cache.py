"""Persistent cache of compiled functions: a later process neither compiles nor traces what it finds on disk.

Inductor caches the code it generates, but a process must first trace a function, which takes seconds, to look it up.
`CachedFunction` looks it up without tracing. Its key is all that compilation depends on: the function's name, settings
and argument shapes, the code and the values that it reaches (`function_digest.py`), the sources of this package, the
versions of PyTorch and Python, and the processor. What has run once is kept as `standalone_code`, too, for which a
later process imports neither Dynamo nor Inductor.

Functions are cached that their modules have by their names, your own among them, if all that they read has a digest;
`uncached_reasons` says why others are not. Files lie in Inductor's cache directory.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import io
import os
import pickle
import platform
import shutil
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import IO, Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._config_module import _UNSET_SENTINEL

from funcppo.config import as_compiled
from funcppo.core import tree
from funcppo.core.files import write_atomically
from funcppo.runtime import agreement, standalone_code
from funcppo.runtime.cache_folder import (
    PACKAGE_DIR,
    SOURCE_DIGEST,
    code_dir,
    find_folder,
)
from funcppo.runtime.function_digest import NoDigestError, call_digest
from funcppo.runtime.reasons import UncachedCode, error_line
from funcppo.runtime.standalone_code import StandaloneCode

MIN_RECOMPILE_LIMIT = 64  # times that one process may compile a function
MAX_TRACE_RESTARTS = 4  # times that tracing a function may begin again
MAX_MEMOIZED_CONFIGS = 256  # serialized configs in memory
# PyTorch sets them as it runs
IGNORED_ENV_VARS = {
    "TORCH_WARM_POOL",
    "TRITON_LIBDEVICE_PATH",
    "TRITON_PTXAS_PATH",
}
# torchrun names each start by them
LAUNCHER_PREFIX = "TORCHELASTIC_"
# options of `torch.compile` and of Inductor's config, by name
InductorOptions = dict[str, Any]

Result = TypeVar("Result")
Option = TypeVar("Option")

# In the key of a call, a tensor is (alias number, shape, strides, dtype, device). Equal numbers: one tensor in several
# places. A plain tuple, because a key is built at every call.
_TensorKey = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype, str]


class TensorSpecPickler(pickle.Pickler):
    """Pickler that writes shape, strides, dtype and device of a tensor in place of its values.

    One tensor in several places stays one tensor in several places.
    """

    def __init__(
        self,
        file: IO[bytes],
        allow_tensors: bool = True,
    ) -> None:
        """Write to `file`.

        Args:
          file: an open binary file.
          allow_tensors: whether tensors may be pickled.

        Raises:
          PicklingError: by `dump`, when something is not allowed.
        """
        super().__init__(file)
        # no memo: equal settings become equal bytes, whatever strings they share
        self.fast = True
        self._allow_tensors = allow_tensors
        self._alias_numbers: dict[int, int] = {}

    def persistent_id(self, obj: object) -> _TensorKey | None:
        """The specification that stands for a tensor; None for anything else."""
        if not isinstance(obj, Tensor):
            return None
        if not self._allow_tensors:
            raise pickle.PicklingError(
                "expected no tensor among the settings, got one"
            )
        number = self._alias_numbers.setdefault(
            id(obj), len(self._alias_numbers)
        )
        return (
            number,
            tuple(obj.shape),
            obj.stride(),
            obj.dtype,
            str(obj.device),
        )

    def reducer_override(self, obj: object) -> Any:
        """Default pickling, to the same bytes whether a partial application's attributes have been read or not."""
        if isinstance(obj, functools.partial):
            vars(obj)  # it has no dict, which is pickled as None, before this
        return NotImplemented


class NoKeyError(ValueError):
    """What a call depends on cannot be told to a later process; the message says why."""

    def __init__(self, code: UncachedCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class CompileEvent(NamedTuple):
    """One request for compiled code."""

    name: str  # of the function
    seconds: float  # time to compile, or to load
    cache_hit: bool  # the code was on disk, so nothing was compiled
    # what differs from the calls before; empty for the first
    recompile_reason: str


class _CallKey(NamedTuple):
    """What calls must have in common to share code."""

    structure: object  # of the arguments
    # tensors by their specification, settings serialized
    leaves: tuple[_TensorKey | bytes, ...]
    settings: tuple[object, ...]  # global settings of PyTorch


# all requests of this process, in order
compile_events: list[CompileEvent] = []
# why functions are compiled with guards and not kept on disk, by name
uncached_reasons: dict[str, str] = {}
uncached_codes: dict[str, UncachedCode] = {}
# why functions are loaded by PyTorch's compiler, by name: they could not be kept as `standalone_code`
compiler_reasons: dict[str, str] = {}


class CachedFunction(Generic[Result]):
    """A function that is compiled once for each kind of arguments: for all processes if it has a name in its module."""

    def __init__(
        self,
        fn: Callable[..., Result],
        options: InductorOptions | None,
        prepare: Callable[[], InductorOptions] | None = None,
    ) -> None:
        """Compile nothing yet, and import no compiler.

        Args:
          fn: a pure function of trees of tensors and frozen settings.
          options: options of Inductor.
          prepare: makes further options, of what takes seconds to import; a function of this package.
        """
        self._fn = fn
        self._name = _name(fn)
        self._options = options or {}
        self._prepare = prepare
        # None: a closure or another function that has no name
        self._function_id = _serialize(fn)
        self._code_by_key: dict[_CallKey, Callable[..., Result]] = {}

    def __call__(self, *args: object) -> Result:
        """Return the function's value; the first call with each kind of arguments compiles, or loads from disk.

        Raises:
          Exception: whatever the compiler raises.
        """
        if torch.compiler.is_compiling():
            return self._fn(*args)
        if self._function_id is None:
            self._record_uncached(
                UncachedCode.NOT_NAMED,
                "not a function that its module has by its name",
            )
            return self._guarded(*args)
        key = _call_key(args)
        if key is None:
            return self._guarded(*args)
        code = self._code_by_key.get(key)
        return self._first_call(key, args) if code is None else code(*args)

    @functools.cached_property
    def _guarded(self) -> Callable[..., Result]:
        """The function, compiled with guards."""
        raise_recompile_limit()
        return torch.compile(
            self._fn,
            fullgraph=True,
            dynamic=False,
            **agreement.backend_options("inductor", self._all_options()),
        )

    def _all_options(self) -> InductorOptions | None:
        prepared = self._prepare() if self._prepare is not None else {}
        return {**self._options, **prepared} or None

    def _first_call(self, key: _CallKey, args: tuple[object, ...]) -> Result:
        """The function's value, by code that is kept for calls of this kind."""
        path = self._cache_path(args)
        code = self._load_or_compile(key, args, path)
        self._code_by_key[key] = code
        if isinstance(code, StandaloneCode):
            agreement.settle()
            return code(*args)
        if (
            path is None or code is self._guarded
        ):  # which settles by its backend
            return code(*args)
        agreement.settle()
        result = code(*args)
        self._write_standalone(code, args, path)
        return result

    def _write_standalone(
        self, code: Callable[..., Result], args: tuple[object, ...], path: Path
    ) -> None:
        """Keep code that has run once in a form that needs no compiler, where it can be."""
        if not path.exists():
            return
        if reason := _reason_to_run_once():
            compiler_reasons[self._name] = reason
            return
        from funcppo.runtime import standalone_writer

        try:
            standalone_writer.write(code, args, _standalone_folder(path))
        except Exception as error:
            # It is loaded by PyTorch's compiler, then.
            compiler_reasons[self._name] = error_line(error)

    def compile_ahead(self, *args: object) -> None:
        """Compile for such arguments and keep the code on disk, without running it.

        Raises:
          Exception: whatever the compiler raises.
        """
        key, path = _call_key(args), self._cache_path(args)
        if key is not None and path is not None:
            self._load_or_compile(key, args, path)

    def is_cached(self, *args: object) -> bool:
        """Return whether such a call finds its code on disk."""
        path = self._cache_path(args)
        return path is not None and os.path.exists(path)

    def _load_or_compile(
        self, key: _CallKey, args: tuple[object, ...], path: Path | None
    ) -> Callable[..., Result]:
        limit = _recompile_limit()
        if len(self._code_by_key) >= limit:
            reason = self._recompile_reason(key, args)
            raise RuntimeError(
                f"{self._fn}: compiled {limit} times, the last because {reason}"
            )

        reason = self._recompile_reason(key, args)
        start = time.perf_counter()
        if (
            reason
            and _is_dynamo_imported()
            and torch._dynamo.eval_frame._stance.stance == "fail_on_recompile"
        ):
            raise RuntimeError(
                f"{self._fn}: to be compiled again, because {reason}"
            )
        if path is None:
            return self._guarded

        loaded = _load_standalone(path) or _load_code(path)
        code = (
            loaded if loaded is not None else self._compile_ahead_of_time(args)
        )
        if loaded is None and code is self._guarded:
            return code  # which PyTorch counts and reports itself

        seconds = time.perf_counter() - start
        compile_events.append(
            CompileEvent(
                self._name,
                seconds,
                cache_hit=loaded is not None,
                recompile_reason=reason,
            )
        )
        if loaded is None and _source_times() == _SOURCE_TIMES:
            _save_code(path, code)
        elif loaded is None:
            self._record_uncached(
                UncachedCode.SOURCES_CHANGED,
                "the sources changed since they were read",
            )
        return code

    def _compile_ahead_of_time(
        self, args: tuple[object, ...]
    ) -> Callable[..., Result]:
        """Code that can be saved; where there is none, code with guards."""
        # Without guards: the keys tell calls apart, and most of what a guard refers to cannot be saved.
        raise_recompile_limit()
        options: InductorOptions = {
            **(self._all_options() or {}),
            "guard_filter_fn": lambda guards: [False] * len(guards),
        }
        with torch._dynamo.config.patch(
            enable_aot_compile=True, specialize_float=True
        ):
            unguarded = torch.compile(
                self._fn, fullgraph=True, dynamic=False, options=options
            )
            try:
                return _trace_and_compile(unguarded, args)
            except Exception as error:
                # If the function itself cannot be compiled, calling it says so.
                self._record_uncached(
                    UncachedCode.NOT_AHEAD_OF_TIME,
                    f"it is not compiled ahead of its call: {error_line(error)}",
                )
                return self._guarded

    def _cache_path(self, args: tuple[object, ...]) -> Path | None:
        """The file of the code for such arguments; None if it is not to be cached."""
        if self._function_id is None:
            return None
        options = [
            (name, _option_key(value)) for name, value in self._options.items()
        ]
        options.sort()
        try:
            return cache_path(
                self._fn, args, (options, _serialize(self._prepare))
            )
        except NoKeyError as error:
            self._record_uncached(error.code, str(error))
            return None

    def _record_uncached(self, code: UncachedCode, reason: str) -> None:
        if self._name not in uncached_reasons:
            uncached_reasons[self._name] = reason
            uncached_codes[self._name] = code

    def _recompile_reason(self, key: _CallKey, args: tuple[object, ...]) -> str:
        """What distinguishes a call from the last one that was compiled; empty for the first."""
        if not self._code_by_key:
            return ""
        last = next(reversed(self._code_by_key))
        if last.structure != key.structure:
            return "other arguments"
        for name, before, now in zip(tree.paths(args), last.leaves, key.leaves):
            if before != now:
                return f"{name} differs{_describe_change(before, now)}"
        return "PyTorch's settings differ"


def _name(fn: Any) -> str:
    """The name of a function, or of that of which it is a partial application."""
    while isinstance(fn, functools.partial) and not hasattr(fn, "__name__"):
        fn = fn.func
    return getattr(fn, "__name__", repr(fn))


def cache_path(
    fn: Callable[..., object], args: tuple[object, ...], settings: object
) -> Path:
    """A file for what depends on a call alone; imports no compiler.

    Args:
      fn: a function that its module has by its name, or a partial application of one.
      args: of the call; a tensor's values are not part of the key.
      settings: what else it depends on, with a `repr` that tells it.

    Raises:
      NoKeyError: why there is no key.
    """
    if torch.compiler.config.force_disable_caches:
        raise NoKeyError(
            UncachedCode.CACHES_DISABLED, "PyTorch's caches are turned off"
        )
    folder = find_folder()
    if folder is None:
        raise NoKeyError(UncachedCode.NO_DIGEST, "this user has no name")
    args = as_compiled([fn], args)
    serialized_args = _serialize(args, allow_tensors=True)
    if serialized_args is None:
        raise NoKeyError(
            UncachedCode.SETTINGS_NOT_PICKLED, "its settings cannot be pickled"
        )
    try:
        values = call_digest(fn, args)
    except NoDigestError as error:
        raise NoKeyError(UncachedCode.NO_DIGEST, str(error)) from None
    key = (
        _serialize(fn),
        serialized_args,
        values,
        settings,
        _global_torch_settings(),
        _environment_key(args),
    )
    digest = hashlib.sha256(repr(key).encode()).hexdigest()
    return folder / CODE_DIR / digest[:32]


def _describe_change(
    before: _TensorKey | bytes, now: _TensorKey | bytes
) -> str:
    """What of two tensors differs, as in their `_TensorKey`; empty for settings, which are serialized."""
    if isinstance(before, bytes) or isinstance(now, bytes):
        return ""
    names = ("alias number", "shape", "stride", "dtype", "device")
    properties = zip(names, before, now)
    changes = [
        f"{name} {old} before, now {new}"
        for name, old, new in properties
        if old != new
    ]
    return f": {', '.join(changes)}"


def _trace_and_compile(
    unguarded: Any, args: tuple[object, ...]
) -> Callable[..., Any]:
    """The code of a call, ahead of time.

    Tracing begins again whenever a float64 number turns out to be no constant.
    """
    from torch._dynamo.exc import RestartAnalysis

    for _ in range(MAX_TRACE_RESTARTS):
        with suppress(RestartAnalysis):
            return unguarded.aot_compile((args, {}))
    return unguarded.aot_compile((args, {}))


def _option_key(option: Option) -> Option | object:
    """What identifies an option's value; a pass over the graph identifies itself."""
    uuid = getattr(option, "uuid", None)
    return uuid() if uuid is not None else option


def _call_key(args: tuple[object, ...]) -> _CallKey | None:
    """The key of a call in this process; None if code without guards could not run it.

    That is so inside a transform, for tensor subclasses, for tensors that require gradients, and for settings that
    cannot be serialized.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:  # pyright: ignore[reportAttributeAccessIssue]
        return None

    alias_numbers: dict[int, int] = {}
    leaves: list[_TensorKey | bytes] = []
    for leaf in tree.leaves(args):
        if not isinstance(leaf, Tensor):
            serialized = _serialize_option(leaf)
            if serialized is None:
                return None
            leaves.append(serialized)
        elif type(leaf) is Tensor and not leaf.requires_grad:
            number = alias_numbers.setdefault(id(leaf), len(alias_numbers))
            leaves.append(
                (
                    number,
                    tuple(leaf.shape),
                    leaf.stride(),
                    leaf.dtype,
                    str(leaf.device),
                )
            )
        else:
            return None
    return _CallKey(
        tree.structure(args), tuple(leaves), _global_torch_settings()
    )


def _serialize_option(option: object) -> bytes | None:
    """Type-exact serialization of a config: it distinguishes 1, 1.0 and True.

    None if the config cannot be serialized. Frozen dataclasses are serialized once.
    """
    params = getattr(type(option), "__dataclass_params__", None)
    if params is None or not params.frozen:
        return _serialize(option)
    if id(option) not in _serialized_options:
        if len(_serialized_options) >= MAX_MEMOIZED_CONFIGS:
            _serialized_options.clear()
        _serialized_options[id(option)] = option, _serialize(option)
    _, serialized = _serialized_options[id(option)]
    return serialized


# By id. The configs stay alive with their serializations, so that no other object gets the id of one of them.
_serialized_options: dict[int, tuple[object, bytes | None]] = {}


def _serialize(x: object, allow_tensors: bool = False) -> bytes | None:
    """Pickle of functions, by their names, and of settings; None for what has no name, and for what is no value."""
    file = io.BytesIO()
    try:
        TensorSpecPickler(file, allow_tensors).dump(x)
    except Exception:  # whatever the methods of a user's class raise
        return None
    return file.getvalue()


def _global_torch_settings() -> tuple[object, ...]:
    """Global PyTorch settings that affect compilation."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        *(
            (
                torch.is_autocast_enabled(device),
                torch.get_autocast_dtype(device),
            )
            for device in ("cpu", "cuda")
        ),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        str(torch.get_default_device()),
        torch.get_float32_matmul_precision(),
        torch.backends.cuda.matmul.fp32_precision,
        torch.get_num_threads(),
    )


def _environment_key(args: tuple[object, ...]) -> tuple[object, ...]:
    """What compiled code depends on apart from the call: sources, versions, processors, and compiler settings."""
    from torch._functorch import config as functorch_config

    versions = (
        torch.__version__,
        torch.version.git_version,
        sys.version_info,
        platform.machine(),
    )

    devices = {
        leaf.device
        for leaf in tree.leaves(args)
        if isinstance(leaf, Tensor) and leaf.is_cuda
    }
    gpus: list[tuple[str, str, tuple[int, int]]] = []
    for device in devices:
        model = torch.cuda.get_device_name(device)
        gpus.append(
            (str(device), model, torch.cuda.get_device_capability(device))
        )

    env_vars: list[tuple[str, str]] = []
    for name, value in os.environ.items():
        is_compiler_setting = name.startswith(("TORCH", "TRITON", "CXX"))
        if (
            is_compiler_setting
            and "_DIR" not in name
            and name not in IGNORED_ENV_VARS
            and not name.startswith(LAUNCHER_PREFIX)
        ):
            env_vars.append((name, value))

    return (
        SOURCE_DIGEST,
        versions,
        torch.backends.cpu.get_cpu_capability(),
        sorted(gpus),
        sorted(env_vars),
        [_changed_settings(functorch_config), _inductor_settings()],
    )


def _inductor_settings() -> list[tuple[str, str]]:
    """Inductor's settings that this process has changed: none before the import, which takes seconds."""
    config = sys.modules.get("torch._inductor.config")
    return [] if config is None else _changed_settings(config)


def _changed_settings(config: Any) -> list[tuple[str, str]]:
    """Settings of one of PyTorch's config modules that were changed, but not by environment variables."""
    settings: list[tuple[str, str]] = []
    for name, value in config.save_config_portable().items():
        entry = config._config[name]
        override = entry.user_override
        if isinstance(override, ContextVar):  # since PyTorch 2.13
            override = override.get()
        if override is not _UNSET_SENTINEL and value != entry.default:
            settings.append((name, repr(value)))
    return sorted(settings)


def _source_times() -> dict[Path, int]:
    """When each source on disk was changed, in nanoseconds by the clock of its file system."""
    return {path: path.stat().st_mtime_ns for path in PACKAGE_DIR.rglob("*.py")}


# Those of the sources that this process runs.
_SOURCE_TIMES = _source_times()
# of what these sources and this PyTorch compiled, in Inductor's cache directory
CODE_DIR = code_dir(torch.__version__)


def prepare_triton(device: torch.device) -> None:
    """Let Triton keep and assemble kernels as Inductor will tell it to, before the first one is compiled.

    Inductor tells it when it compiles or loads one: from then on Triton looks for kernels in another folder, and for
    those of another assembler, so that what it has compiled before would be compiled again.
    """
    folder = find_folder()
    if device.type != "cuda" or folder is None:
        return
    name = f"{folder}/triton/{device.index or 0}"
    os.environ.setdefault("TRITON_CACHE_DIR", name)
    assembler = Path(torch.__file__).parent / "bin" / "ptxas"
    if assembler.exists():
        os.environ.setdefault("TRITON_PTXAS_PATH", str(assembler))


def load_source(source: str) -> types.ModuleType:
    """The module of generated source; a file in Inductor's cache directory, because Triton reads files."""
    digest = hashlib.sha256(source.encode()).hexdigest()[:32]
    name = f"{PACKAGE_DIR.name}_source_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    folder = find_folder() or Path(tempfile.gettempdir())
    path = folder / PACKAGE_DIR.name / "sources" / f"{digest}.py"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        data = source.encode()
        write_atomically(path, lambda file: file.write(data), durable=False)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _standalone_folder(path: Path) -> Path:
    return path.with_suffix(".standalone")


def _load_standalone(path: Path) -> StandaloneCode | None:
    """Code that needs no compiler; None if there is none, or if it cannot be read."""
    folder = _standalone_folder(path)
    try:
        return standalone_code.load(folder)
    except Exception as error:
        warnings.warn(
            f"{folder}: not used, because it cannot be read: {error}",
            stacklevel=2,
        )
        shutil.rmtree(folder, ignore_errors=True)
        return None


def _reason_to_run_once() -> str:
    """Why code must not run once more to be kept; empty if it may."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return "it first ran while a CUDA graph was recorded"
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return "several processes run it together"
    return ""


def _is_dynamo_imported() -> bool:
    return "torch._dynamo" in sys.modules


def raise_recompile_limit() -> None:
    """Let PyTorch compile a function as many times as this module does."""
    config = torch._dynamo.config  # imported by this
    config.recompile_limit = max(MIN_RECOMPILE_LIMIT, config.recompile_limit)


def _recompile_limit() -> int:
    """Times that one process may compile a function."""
    if not _is_dynamo_imported():
        return MIN_RECOMPILE_LIMIT
    return max(MIN_RECOMPILE_LIMIT, torch._dynamo.config.recompile_limit)


def _load_code(path: Path) -> Callable[..., Any] | None:
    """The code that `_save_code` wrote; None if there is none, or if it cannot be read."""
    try:
        with path.open("rb") as file, _in_this_process():
            return torch.compiler.load_compiled_function(file)
    except FileNotFoundError:
        return None
    except Exception as error:
        warnings.warn(
            f"{path}: compiled again, because it cannot be read: {error}",
            stacklevel=2,
        )
        return None


@contextmanager
def _in_this_process() -> Iterator[None]:
    """Let Inductor start no processes for kernels that are on disk: the end of this one would wait for them."""
    from torch._inductor import config

    with config.patch(compile_threads=1):
        yield


def _save_code(path: Path, code: Any) -> None:
    """Write code to a file of its own first, so that no process ever reads a part of it."""
    temporary = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        code.save_compiled_function(str(temporary))
        temporary.replace(path)
    except Exception as error:
        warnings.warn(
            f"{path}: not cached for the next process: {error}", stacklevel=2
        )
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
