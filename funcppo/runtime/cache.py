"""Compiled code that later processes find on disk, by PyTorch's caches and its saved functions.

    use_folder(Path("cache"))             # before the first compilation; else the user's cache folder is used
    fast = CompiledFunction(fn, options)  # the first call with each kind of arguments compiles, or loads

PyTorch keeps what Inductor generates and what Triton assembles, but must trace a function again to find it. So this
module lets PyTorch save each compiled function as a whole, in a file that is found without tracing. Its name is a
digest of all that the code may depend on: the function, its settings, the shapes of its arguments, PyTorch's settings,
versions and processors, the records of installed packages, and the sources of this package and of every other module
that is loaded. Beside it lies what the function read of module globals, which must have the same values later.

Only the user may write the folder, because loading code runs it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
import tarfile
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from funcppo.core.files import write_atomically
from funcppo.core.settings import as_compiled
from funcppo.runtime import collectives
from funcppo.runtime.cache_key import (
    PACKAGE_FOLDER,
    CallKey,
    UncachedError,
    call_key,
    changed_global,
    describe_change,
    describe_globals,
    describe_value,
    environment_key,
    serialize,
    sources_digest,
)
from funcppo.runtime.reasons import error_line

FOLDER_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
MIN_RECOMPILE_LIMIT = 64  # times that one process may compile a function

Result = TypeVar("Result")


class CompileEvent(NamedTuple):
    """One request for compiled code."""

    name: str  # of the function
    seconds: float  # time to compile, or to load
    cache_hit: bool  # the code was on disk, so nothing was compiled
    # what differs from the calls before; empty for the first
    recompile_reason: str


# all requests of this process, in order
compile_events: list[CompileEvent] = []
# why functions are not saved, by name; PyTorch's own caches serve them
uncached_reasons: dict[str, str] = {}


def use_folder(folder: Path | None = None) -> Path | None:
    """Keep compiled code in a folder from now on.

    Args:
      folder: `compiled` in it is used. None: the folder that TORCHINDUCTOR_CACHE_DIR names, or else one in the user's
        cache folder.

    Returns:
      The folder of compiled code; None if it cannot be made, as a warning says.

    Raises:
      ValueError: others own the folder, or may write it.
    """
    if folder is None:
        given = os.environ.get(FOLDER_VARIABLE)
        # PyTorch sets its default, a folder that anybody could have made, where it compiles before.
        default = f"{tempfile.gettempdir()}/torchinductor_"
        if given is not None and not given.startswith(default):
            return Path(given)
        caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(caches) / PACKAGE_FOLDER.name
    path = folder.absolute() / "compiled"
    if not _make_private(path):
        return None
    os.environ[FOLDER_VARIABLE] = str(path)
    return path


def functions_folder() -> Path | None:
    """The folder of saved functions and of generated sources; None if there can be none.

    Raises:
      ValueError: others own it, or may write it.
    """
    folder = use_folder()
    if folder is None:
        return None
    path = folder / PACKAGE_FOLDER.name
    return path if _make_private(path) else None


def _make_private(path: Path) -> bool:
    """Make a folder that only this user may read and write; return whether there is one.

    Raises:
      ValueError: others own it, or may write it.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        message = f"{path}: compiled code is not kept: {error.strerror}"
        warnings.warn(message, stacklevel=2)
        return False
    found = path.stat()
    mode = found.st_mode & 0o777
    is_posix = sys.platform != "win32"
    if is_posix and (found.st_uid != os.getuid() or mode & 0o022):
        raise ValueError(
            f"{path}: expected a folder that you own and nobody else may write, got owner {found.st_uid} and mode "
            f"{mode:o}: remove it, or choose another folder for compiled code"
        )
    return True


def save_cache(file: Path) -> None:
    """Write the folder of compiled code into one file, for an equal machine.

    `torch.compiler.save_cache_artifacts` would hold only what this process has compiled, and no saved functions.

    Raises:
      ValueError: there is no folder of compiled code.
    """
    with tarfile.open(file, "w:gz") as archive:
        archive.add(_existing_folder(), arcname=".")


def load_cache(file: Path) -> None:
    """Add to the folder of compiled code what `save_cache` wrote.

    Raises:
      ValueError: the file is no such archive, or there is no folder of compiled code.
    """
    try:
        with tarfile.open(file) as archive:
            archive.extractall(_existing_folder(), filter="data")
    except tarfile.TarError as error:
        expected = "expected an archive of compiled code"
        raise ValueError(f"{file}: {expected}: {error}") from None


def _existing_folder() -> Path:
    folder = use_folder()
    if folder is None or not folder.exists():
        raise ValueError("expected a folder of compiled code, got none")
    return folder


class CompiledFunction(Generic[Result]):
    """A function that is compiled once for each kind of arguments: for all processes if it has a name in its module."""

    def __init__(
        self,
        fn: Callable[..., Result],
        options: dict[str, Any] | None = None,
        prepare: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        """Compile nothing yet, and import no compiler.

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
        """Return the function's value; the first call with each kind of arguments compiles, or loads from disk.

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
                collectives.settle()
        return code(*args)

    @functools.cached_property
    def _guarded(self) -> Callable[..., Result]:
        """The function, compiled by PyTorch with guards."""
        use_folder()
        _raise_recompile_limit()
        if self._function_id is None:
            self._note_uncached("its module does not have it by its name")
        options = collectives.backend_options("inductor", self._all_options)
        return torch.compile(self._fn, fullgraph=True, dynamic=False, **options)

    @functools.cached_property
    def _all_options(self) -> dict[str, Any]:
        prepared = self._prepare() if self._prepare is not None else {}
        return {**self._options, **prepared}

    def _load_or_compile(
        self, key: CallKey, args: tuple[object, ...]
    ) -> Callable[..., Result]:
        """Code for calls of this kind."""
        start = time.perf_counter()
        reason = ""
        if self._code_by_key:
            last = next(reversed(self._code_by_key))
            reason = describe_change(last, key, args)
        n_compiled = len(self._code_by_key)
        if n_compiled >= _raise_recompile_limit():
            raise RuntimeError(
                f"{self._fn}: compiled {n_compiled} times, the last because {reason}"
            )
        stance = torch._dynamo.eval_frame._stance.stance
        if reason and stance == "fail_on_recompile":
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
        """The file of the code for such arguments.

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
        options = {
            name: value.uuid() if hasattr(value, "uuid") else value
            for name, value in self._all_options.items()
        }
        depends_on = (
            *(self._function_id, describe_value(self._function)),
            *(call, sorted(options.items()), environment_key(args)),
            sources_digest(),
        )
        digest = hashlib.sha256(repr(depends_on).encode()).hexdigest()
        return folder / f"{digest[:32]}.pt"

    def _compile_and_save(
        self, args: tuple[object, ...], path: Path
    ) -> Callable[..., Result]:
        """Code without guards, because the keys tell calls apart, and most of what a guard refers to cannot be saved.

        Raises:
          UncachedError: there can be none; if the function itself cannot be compiled, calling it says so.
        """
        from torch._dynamo.exc import RestartAnalysis

        globals_read: dict[str, str] = {}
        tensors_read: list[UncachedError] = []

        def drop_guards(entries: Sequence[Any]) -> list[bool]:
            try:
                globals_read.update(describe_globals(entries))
            except UncachedError as error:
                tensors_read.append(error)
            return [False] * len(entries)

        options = {**self._all_options, "guard_filter_fn": drop_guards}
        with torch._dynamo.config.patch(
            enable_aot_compile=True, specialize_float=True
        ):
            unguarded: Any = torch.compile(
                self._fn, fullgraph=True, dynamic=False, options=options
            )
            try:
                # Tracing begins again whenever a number of float64 turns out to be no constant.
                for _ in range(4):
                    with suppress(RestartAnalysis):
                        code = unguarded.aot_compile((args, {}))
                        break
                else:
                    code = unguarded.aot_compile((args, {}))
            except Exception as error:
                reason = "it is not compiled ahead of its call"
                raise UncachedError(f"{reason}: {error_line(error)}") from error
        if tensors_read:
            raise tensors_read[0]
        _save_code(path, code, globals_read)
        return code

    def _note_uncached(self, reason: str) -> None:
        uncached_reasons.setdefault(self._name, reason)


def _raise_recompile_limit() -> int:
    """Let PyTorch compile a function as many times as this module does; return how many that are."""
    config = torch._dynamo.config
    config.recompile_limit = max(MIN_RECOMPILE_LIMIT, config.recompile_limit)
    return config.recompile_limit


def _load_code(path: Path, function: Any) -> Callable[..., Any] | None:
    """The code that `_save_code` wrote; None if there is none, or if a global that it read has another value."""
    from torch._inductor import config

    try:
        globals_read = json.loads(path.with_suffix(".json").read_text())
        if changed_global(function, globals_read):
            return None
        # no processes for kernels that are on disk: the end of this one would wait for them
        with path.open("rb") as file, config.patch(compile_threads=1):
            code: Any = torch.compiler.load_compiled_function(file)
    except FileNotFoundError:
        return None
    except Exception as error:
        message = f"compiled again, because it cannot be read: {error}"
        warnings.warn(f"{path}: {message}", stacklevel=2)
        return None
    return code


def _save_code(path: Path, code: Any, globals_read: dict[str, str]) -> None:
    """Write code and what it read; each file is put in place whole, so that no process reads a part of it."""
    text = json.dumps(globals_read).encode()
    try:
        code.save_compiled_function(str(path))
        write_atomically(
            path.with_suffix(".json"), lambda f: f.write(text), durable=False
        )
    except Exception as error:
        message = f"not kept for later processes: {error}"
        warnings.warn(f"{path}: {message}", stacklevel=2)
