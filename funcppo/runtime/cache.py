"""Compiled code that later processes find on disk: PyTorch's caches, and compiled functions that PyTorch saves whole.

    use_folder(Path("cache"))             # before the first compilation; else the user's cache folder is used
    fast = CompiledFunction(fn, options)  # the first call with each kind of arguments compiles, or loads

PyTorch's caches must trace a function again to find its code. So each compiled function is saved, too, in a file that
is found without tracing. The name of the file is a digest of the function, its settings, the shapes of its arguments,
PyTorch's settings, versions and processors, and the sources of this package and of the program. A file beside it lists
the sources of all other modules that were loaded, and the module globals that the function read. The code is used only
where all of them are the same.

Only the user may write the folder, because loading code runs it.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import importlib
import importlib.util
import io
import json
import os
import pickle
import platform
import re
import sys
import sysconfig
import tempfile
import time
import types
import warnings
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from funcppo.core import tree
from funcppo.core.files import write_file
from funcppo.core.settings import as_compiled
from funcppo.runtime import distributed
from funcppo.runtime.distributed import error_line

FOLDER_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
PACKAGE_FOLDER = Path(__file__).parents[1]
# seconds; a source that changed later is not what runs
STARTED_AT = time.time()
# where PyTorch's own folder of compiled code begins, and those that are made here
TEMPORARY_FOLDER = f"{tempfile.gettempdir()}/torchinductor_"

Result = TypeVar("Result")


class UncachedError(ValueError):
    """Error for a function whose code a later process could not find or trust; the message is the reason."""


class CompileEvent(NamedTuple):
    """One request for compiled code, with its seconds and whether the cache had it."""

    name: str  # of the function
    seconds: float  # time to compile, or to load
    cache_hit: bool  # the code was on disk, so nothing was compiled
    # what differs from the calls before; empty for the first
    recompile_reason: str


# all requests of this process, in order
compile_events: list[CompileEvent] = []
# why functions are not saved, by name; PyTorch's own caches serve them
uncached_reasons: dict[str, str] = {}


# ---- The folder.


def use_folder(folder: Path | None = None) -> Path | None:
    """Keep compiled code in a folder from now on; return it, or None if it cannot be made.

    PyTorch's caches lie in it too. Where it cannot be made they lie in a new temporary folder: PyTorch's default,
    `torchinductor_USER` among temporary files, may be made by anybody.

    Args:
      folder: `compiled` in it is used. None: the folder that TORCHINDUCTOR_CACHE_DIR names, or else one in the user's
        cache folder.

    Returns:
      The folder of compiled code; None if it cannot be made, as a warning says.

    Raises:
      ValueError: others own the folder, or may write it or replace it.
    """
    given = os.environ.get(FOLDER_VARIABLE, TEMPORARY_FOLDER)
    # PyTorch sets its default where it compiles before.
    if folder is None and not given.startswith(TEMPORARY_FOLDER):
        path = Path(given).resolve()
    else:
        caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = folder or Path(caches) / PACKAGE_FOLDER.name
        path = (folder / "compiled").resolve()
    if _keeps_code(path):
        os.environ[FOLDER_VARIABLE] = str(path)
        return path
    os.environ[FOLDER_VARIABLE] = _temporary_folder()
    return None


@functools.cache
def _temporary_folder() -> str:
    """Create a folder of this process, which `use_folder` does not take for the user's choice."""
    folder = tempfile.TemporaryDirectory(prefix="torchinductor_")
    atexit.register(folder.cleanup)
    return folder.name


def functions_folder() -> Path | None:
    """Return the folder of saved functions; None if it cannot be made.

    Raises:
      ValueError: others own it, or may write it or replace it.
    """
    folder = use_folder()
    path = folder and folder / PACKAGE_FOLDER.name
    return path if path and _keeps_code(path) else None


def _keeps_code(path: Path) -> bool:
    """Create a folder of compiled code that only this user may write; return whether it exists.

    Raises:
      ValueError: see `make_private`.
    """
    try:
        make_private(path)
    except OSError as error:
        message = f"{path}: compiled code is not kept: {error.strerror}"
        warnings.warn(message, stacklevel=2)
        return False
    return True


def make_private(path: Path) -> None:
    """Create a folder that only this user may write, unless it exists.

    Raises:
      OSError: it cannot be made, or not be read.
      ValueError: others own it or a file in it, or may write it, or may replace a folder on the way to it.
    """
    missing = [x for x in (path, *path.parents) if not x.exists()]
    for folder in reversed(missing):
        folder.mkdir(mode=0o700, exist_ok=True)
    entries = [Path(entry.path) for entry in os.scandir(path)]
    if sys.platform != "win32":
        _check_owners(path, entries)


def _check_owners(path: Path, entries: list[Path]) -> None:
    """Check that only this user may write a folder and its entries, or replace a folder on the way to it.

    Raises:
      ValueError: others own one, or may write it.
    """
    user = os.getuid()
    may_come = 0o022  # who of the group and of all others can reach a place
    for place in (*reversed(path.parents), path, *entries):
        found = place.lstat()
        mode = found.st_mode & 0o7777
        is_parent = place in path.parents
        writers = mode & (0o022 if place == path else may_come)
        if is_parent and mode & 0o1000:
            writers = 0  # they replace nothing in a folder with the sticky bit
        owners = (user, 0) if is_parent else (user,)
        if found.st_uid not in owners or (writers and not place.is_symlink()):
            raise ValueError(
                f"{path}: expected a folder that you own and nobody else may write or replace, got {place} with owner "
                f"{found.st_uid} and mode {mode:o}: choose another cache folder, or mend or remove this one"
            )
        # a folder that they may not enter; all may be what the group is not
        if not mode & 0o011:
            may_come = 0o002 if is_parent else 0


def share_triton_cache(device: torch.device) -> None:
    """Set Triton's cache folder and assembler to Inductor's, before the first kernel is compiled.

    Otherwise Triton would look in another folder, and for kernels of another assembler, once Inductor has told it.
    """
    folder = os.environ.get(FOLDER_VARIABLE)
    if device.type != "cuda" or folder is None:
        return
    os.environ.setdefault(
        "TRITON_CACHE_DIR", f"{folder}/triton/{device.index or 0}"
    )
    assembler = Path(torch.__file__).parent / "bin" / "ptxas"
    if assembler.exists():
        os.environ.setdefault("TRITON_PTXAS_PATH", str(assembler))


# ---- Compiled functions.


class CompiledFunction(Generic[Result]):
    """Function compiled once for each kind of arguments; saved for all processes if its module has its name."""

    def __init__(
        self,
        fn: Callable[..., Result],
        options: dict[str, Any] | None = None,
        prepare: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        """Prepare the function; compile nothing and import no compiler yet.

        Args:
          fn: a pure function of trees of tensors and frozen settings.
          options: options of Inductor.
          prepare: makes further options, of what takes seconds to import; a function of this package.
        """
        self._fn = fn
        self._function: Any = fn
        while isinstance(self._function, functools.partial):
            self._function = self._function.func
        self._name = getattr(self._function, "__name__", repr(fn))
        self._options = options or {}
        self._prepare = prepare
        # None: a closure or another function that has no name
        self._function_id = serialize(fn)
        self._code_by_key: dict[CallKey, Callable[..., Result]] = {}

    def __call__(self, *args: object) -> Result:
        """Call the function; the first call with each kind of arguments compiles it or loads it from disk.

        Raises:
          Exception: whatever the compiler raises.
        """
        if torch.compiler.is_compiling():
            return self._fn(*args)
        key = call_key(args) if self._function_id is not None else None
        if key is None:
            return self._guarded(*args)
        code = self._code_by_key.get(key)
        if code is None:
            code = self._code_by_key[key] = self._load_or_compile(key, args)
            if code is not self._guarded:  # which settles by its backend
                distributed.settle()
        return code(*args)

    @functools.cached_property
    def _guarded(self) -> Callable[..., Result]:
        """Return the function compiled by PyTorch with guards, which is not saved."""
        use_folder()
        raise_recompile_limit()
        if self._function_id is None:
            self._note_uncached("its module does not have it by its name")
        options = self._options | self._prepare()
        arguments = distributed.backend_options("inductor", options)
        return torch.compile(
            self._fn, fullgraph=True, dynamic=False, **arguments
        )

    def _load_or_compile(
        self, key: CallKey, args: tuple[object, ...]
    ) -> Callable[..., Result]:
        """Load or compile the code for calls with this key."""
        start = time.perf_counter()
        reason = ""
        raise_recompile_limit()
        if self._code_by_key:
            last = next(reversed(self._code_by_key))
            reason = describe_change(last, key, args)
            if torch._dynamo.eval_frame._stance.stance == "fail_on_recompile":
                raise RuntimeError(
                    f"{self._fn}: to be compiled again, because {reason}"
                )

        try:
            path = self._code_path(args)
            loaded = _load_code(path, self._function)
            code: Any = loaded or self._compile_and_save(args, path)
        except UncachedError as error:
            self._note_uncached(str(error))
            return self._guarded  # whose compilations PyTorch counts
        seconds = time.perf_counter() - start
        event = CompileEvent(self._name, seconds, loaded is not None, reason)
        compile_events.append(event)
        code.disable_guard_check()  # it has no guards
        return code

    def _code_path(self, args: tuple[object, ...]) -> Path:
        """Return the file of the saved code for such arguments.

        Raises:
          UncachedError: why there is none.
        """
        if torch.compiler.config.force_disable_caches:
            raise UncachedError("PyTorch's caches are turned off")
        folder = functions_folder()
        if folder is None:
            raise UncachedError("there is no folder for it")
        key = call_key(as_compiled(self._fn, args))
        call = key.to_bytes() if key is not None else None
        if call is None or self._function_id is None:
            raise UncachedError("its arguments cannot be named")
        is_of_main = b"__main__" in call + self._function_id
        if is_of_main and not hasattr(sys.modules["__main__"], "__file__"):
            raise UncachedError("it is from a console, without a source file")
        depends_on = (
            *(self._function_id, describe_value(self._function), call),
            *(sorted(self._options.items()), serialize(self._prepare)),
            *(_environment(args), _package_digest()),
            *map(_source_digest, ("__main__", self._function.__module__)),
        )
        digest = hashlib.sha256(repr(depends_on).encode()).hexdigest()
        return folder / f"{digest[:32]}.pt"

    def _compile_and_save(
        self, args: tuple[object, ...], path: Path
    ) -> Callable[..., Result]:
        """Compile without guards and save the code; keys tell calls apart, and most guards cannot be saved.

        Raises:
          UncachedError: there can be none; if the function itself cannot be compiled, calling it says so.
        """
        from torch._dynamo.exc import RestartAnalysis

        globals_read: dict[str, str] = {}

        def drop_guards(entries: Sequence[Any]) -> list[bool]:
            globals_read.update(_describe_globals(entries))
            return [False] * len(entries)

        prepared = self._prepare()
        options = self._options | prepared | {"guard_filter_fn": drop_guards}
        with torch._dynamo.config.patch(
            enable_aot_compile=True, specialize_float=True
        ):
            unguarded: Any = torch.compile(
                self._fn, fullgraph=True, dynamic=False, options=options
            )
            code: Any = None
            try:
                # Tracing begins again whenever a number of float64 turns out to be no constant.
                while code is None:
                    with suppress(RestartAnalysis):
                        code = unguarded.aot_compile((args, {}))
            except Exception as error:
                reason = "it is not compiled ahead of its call"
                raise UncachedError(f"{reason}: {error_line(error)}") from error
        self._note_uncached(_save_code(path, code, globals_read))
        return code

    def _note_uncached(self, reason: str) -> None:
        if reason:
            uncached_reasons.setdefault(self._name, reason)


def raise_recompile_limit() -> None:
    """Raise PyTorch's limit of compilations of one function to at least 64."""
    config = torch._dynamo.config
    config.recompile_limit = max(64, config.recompile_limit)


def _load_code(path: Path, function: Any) -> Callable[..., Any] | None:
    """Load code that `_save_code` wrote; None if there is none, or if anything it depends on has changed."""
    values = _Globals(getattr(function, "__globals__", {}))
    try:
        saved = json.loads(path.with_suffix(".json").read_text())
        now = {name: _source_digest(name) for name in saved["sources"]} | {
            name: describe_value(eval(name, {"G": values}))
            for name in saved["globals"]
        }
        if now != saved["sources"] | saved["globals"]:
            return None
        from torch._inductor import config

        # No processes for kernels that are on disk: the end of this one would wait for them. What the C++ compiler
        # can do is known.
        settings: dict[str, Any] = {"compile_threads": 1}
        if saved["vec_isa_ok"]:
            settings["cpp.vec_isa_ok"] = True
        with path.open("rb") as file, config.patch(settings):
            return torch.compiler.load_compiled_function(file)
    except (FileNotFoundError, UncachedError):
        return None
    except Exception as error:
        message = f"compiled again, because it cannot be read: {error}"
        warnings.warn(f"{path}: {message}", stacklevel=2)
        return None


def _save_code(path: Path, code: Any, globals_read: dict[str, str]) -> str:
    """Save code and what it depends on, each file atomically; return a reason if it cannot be kept, else empty.

    Returns:
      Why the sources of the code cannot be trusted, so that it is not written; empty if they can.
    """
    try:
        sources = {name: _source_digest(name) for name in _loaded_sources()}
        text = json.dumps(
            {
                "globals": globals_read,
                "sources": sources,
                "vec_isa_ok": _compiles_all_vectors(),
            }
        )
        code.save_compiled_function(str(path))
        write_file(path.with_suffix(".json"), text, durable=False)
    except UncachedError as error:
        return str(error)
    except Exception as error:
        message = f"not kept for later processes: {error}"
        warnings.warn(f"{path}: {message}", stacklevel=2)
    return ""


# ---- Keys: what calls must have in common to share code.

# A tensor is (alias number, shape, strides, dtype, device). Equal numbers: one tensor in several places. A plain
# tuple, because a key is built at every call.
_TensorKey = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype, str]


class CallKey(NamedTuple):
    """Arguments' structure, tensor layouts and global settings that calls must share to use the same code."""

    structure: object  # of the arguments
    # tensors by their specification, settings serialized
    leaves: tuple[_TensorKey | bytes, ...]
    settings: tuple[object, ...]  # global settings of PyTorch

    def to_bytes(self) -> bytes | None:
        """Return the key as bytes equal in every process; None if a class of the arguments cannot be imported."""
        structure = serialize(self.structure)
        rest = repr((self.leaves, self.settings)).encode()
        return None if structure is None else structure + rest


def call_key(args: tuple[object, ...]) -> CallKey | None:
    """Return the key of a call; None if code without guards could not run it.

    That is so inside a transform, for tensor subclasses, for tensors that require gradients, and for settings that
    cannot be serialized.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:  # pyright: ignore[reportAttributeAccessIssue]
        return None

    alias_numbers: dict[int, int] = {}
    leaves: list[_TensorKey | bytes] = []
    for leaf in tree.leaves(args):
        if type(leaf) is Tensor and not leaf.requires_grad:
            number = alias_numbers.setdefault(id(leaf), len(alias_numbers))
            layout = (tuple(leaf.shape), leaf.stride())
            leaves.append((number, *layout, leaf.dtype, str(leaf.device)))
            continue
        serialized = _serialize_settings(leaf)  # None of another tensor
        if serialized is None:
            return None
        leaves.append(serialized)
    return CallKey(tree.structure(args), tuple(leaves), _global_settings())


def describe_change(
    before: CallKey, now: CallKey, args: tuple[object, ...]
) -> str:
    """Describe how the key of a call differs from an earlier key."""
    if before.structure != now.structure:
        return "other arguments"
    fields = ("alias number", "shape", "stride", "dtype", "device")
    for name, old, new in zip(tree.paths(args), before.leaves, now.leaves):
        if old == new:
            continue
        if isinstance(old, bytes) or isinstance(new, bytes):
            return f"{name} differs"
        changes = [
            f"{field} {x} before, now {y}"
            for field, x, y in zip(fields, old, new)
            if x != y
        ]
        return f"{name} differs: {', '.join(changes)}"
    return "PyTorch's settings differ"


def serialize(x: object) -> bytes | None:
    """Pickle functions by name, and settings; None if a part has no importable name or is a tensor."""
    file = io.BytesIO()
    try:
        _KeyPickler(file).dump(x)
    except Exception:  # whatever the methods of a user's class raise
        return None
    return file.getvalue()


class _KeyPickler(pickle.Pickler):
    """Pickler that writes keys; its output is compared and never loaded."""

    # no memo: equal settings become equal bytes, whatever strings they share
    fast = True

    def reducer_override(self, obj: object) -> Any:
        """Refuse tensors; pickle all else by default, equally whether or not a partial's attributes were read."""
        if isinstance(obj, Tensor):
            raise pickle.PicklingError("expected no tensor, got one")
        if isinstance(obj, functools.partial):
            vars(obj)  # it has no dict, which is pickled as None, before this
        return NotImplemented


# By id. The settings stay alive with their serializations, so that no other object gets the id of one of them.
_serialized: dict[int, tuple[object, bytes | None]] = {}


def _serialize_settings(settings: object) -> bytes | None:
    """Serialise a config exactly by type: 1, 1.0 and True differ. None if it cannot be pickled.

    None if the config cannot be serialized. Frozen dataclasses are serialized once.
    """
    params = getattr(type(settings), "__dataclass_params__", None)
    if params is None or not params.frozen:
        return serialize(settings)
    if id(settings) not in _serialized:
        if len(_serialized) >= 256:  # a bound for long processes
            _serialized.clear()
        _serialized[id(settings)] = settings, serialize(settings)
    return _serialized[id(settings)][1]


def _global_settings() -> tuple[object, ...]:
    """Return the global PyTorch settings that affect compilation."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        *map(torch.is_autocast_enabled, ("cpu", "cuda")),
        *map(torch.get_autocast_dtype, ("cpu", "cuda")),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        str(torch.get_default_device()),
        torch.get_float32_matmul_precision(),
        torch.backends.cuda.matmul.fp32_precision,
        torch.get_num_threads(),
    )


# ---- What code depends on beside its call.


def _environment(args: tuple[object, ...]) -> tuple[object, ...]:
    """Return versions, processors and compiler settings that compiled code depends on; imports the compilers."""
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config

    def describe(setting: object) -> object:
        is_set = isinstance(setting, set | frozenset)  # in no fixed order
        return sorted(map(repr, setting)) if is_set else repr(setting)

    configs = (torch._dynamo.config, functorch_config, inductor_config)
    devices = {str(getattr(x, "device", "")) for x in tree.leaves(args)}
    gpus = sorted(name for name in devices if name.startswith("cuda"))
    return (
        *(torch.__version__, torch.version.git_version, sys.version_info),
        *(platform.machine(), torch.backends.cpu.get_cpu_capability()),
        *map(torch.cuda.get_device_name, gpus),
        *map(torch.cuda.get_device_capability, gpus),
        *(
            json.dumps(x.save_config_portable(), default=describe)
            for x in configs
        ),
    )


@functools.cache
def _package_digest() -> str:
    """Hash this package's sources and the records of installed packages, except PyTorch's."""
    digest = hashlib.sha256()
    for file in sorted(PACKAGE_FOLDER.rglob("*.py")):
        digest.update(_read_source(file))
    paths = sysconfig.get_paths()
    for folder in sorted({paths["purelib"], paths["platlib"]}):
        for file in sorted(Path(folder).glob("*.dist-info/RECORD")):
            if not file.parent.name.startswith(("torch-", "nvidia_")):
                digest.update(file.read_bytes())
    return digest.hexdigest()


def _read_source(file: Path) -> bytes:
    """Read a source file; raise UncachedError if it changed since this process began.

    Raises:
      UncachedError: it has changed since this process began, which may run another one.
    """
    if file.stat().st_mtime > STARTED_AT:
        raise UncachedError(f"{file} changed since this process began")
    return file.read_bytes()


def _compiles_all_vectors() -> bool:
    """Return whether PyTorch has found that the C++ compiler knows all vector instructions of this x86 processor.

    It tries them in each process that loads code for a CPU, which takes a second or two.
    """
    from torch._inductor import cpu_vec_isa

    if not cpu_vec_isa.valid_vec_isa_list.cache_info().currsize:
        return False
    flags = set(cpu_vec_isa.x86_isa_checker())
    all_sets = [set(str(x).split()) for x in cpu_vec_isa.supported_vec_isa_list]
    n_found = len(cpu_vec_isa.valid_vec_isa_list())
    return n_found == sum(x <= flags for x in all_sets)


def _loaded_sources() -> list[str]:
    """List the loaded modules with a source that `_package_digest` omits and no compiler generated."""
    left_out = (
        *(str(PACKAGE_FOLDER), *sysconfig.get_paths().values()),
        f"{os.environ.get(FOLDER_VARIABLE)}/",
        TEMPORARY_FOLDER,
    )
    found: list[str] = []
    for name, module in [*sys.modules.items()]:
        file = getattr(module, "__dict__", {}).get("__file__") or ""
        is_made = name.startswith(("torch.", "triton."))
        if file.endswith(".py") and not (is_made or file.startswith(left_out)):
            found.append(name)
    return found


def _source_digest(name: str) -> str:
    """Hash the source of a module, loaded or not; empty if it has none."""
    file = getattr(sys.modules.get(name), "__file__", None)
    if name not in sys.modules:
        file = getattr(importlib.util.find_spec(name), "origin", None)
    if file is None or not Path(file).is_file():
        return ""
    return hashlib.sha256(_read_source(Path(file))).hexdigest()


def _describe_globals(guards: Iterable[Any]) -> dict[str, str]:
    """Return {PyTorch's expression: description} of the module globals that a traced function read.

    Args:
      guards: PyTorch's entries for them, as a `guard_filter_fn` receives them.

    Raises:
      UncachedError: it read a tensor, whose values may change.
    """
    described: dict[str, str] = {}
    for guard in guards:
        # Names of objects that PyTorch makes hold numbers of this process.
        is_made = re.search(r"G\['_+(\d|unnamed|builtins)", guard.name)
        if not guard.is_global or not guard.has_value or is_made:
            continue
        if isinstance(guard.value, Tensor | np.ndarray):
            raise UncachedError(f"it reads the tensor {guard.name}")
        described[guard.name] = describe_value(guard.value)
    return {name: text for name, text in described.items() if text}


def describe_value(value: Any) -> str:
    """Describe a constant, function or class identically in every process; empty for any other value."""
    if isinstance(value, bool | int | float | complex | str | bytes | None):
        return repr(value)
    if not isinstance(value, type | types.FunctionType):
        return ""
    # another function may have the name; the class of functions has a descriptor of code
    code = getattr(value, "__code__", None)
    is_code = isinstance(code, types.CodeType)
    digest = zlib.crc32(code.co_code) if is_code else ""
    return f"{value.__module__}.{value.__qualname__} {digest}"


class _Globals(dict[str, object]):
    """Mapping of a function's module globals, and of modules by PyTorch's names for them."""

    def __missing__(self, name: str) -> object:
        module = name.removeprefix("__import_").replace("_dot_", ".")
        return importlib.import_module(module)
