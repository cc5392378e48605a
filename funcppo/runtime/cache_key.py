"""Keys of compiled code: what calls must have in common to share it, in one process and in others.

`call_key` is of calls in one process. Another process finds code by that, `environment_key` and `sources_digest`, and
uses it if `changed_global` finds none.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import io
import json
import pickle
import platform
import re
import sys
import sysconfig
import time
import types
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from funcppo.core import tree

PACKAGE_FOLDER = Path(__file__).parents[1]
STARTED_AT = (
    time.time()
)  # seconds; a source that changed later is not what runs

# A tensor is (alias number, shape, strides, dtype, device). Equal numbers: one tensor in several places. A plain
# tuple, because a key is built at every call.
_TensorKey = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype, str]


class UncachedError(ValueError):
    """A function cannot be found again by a later process; the message says why."""


class CallKey(NamedTuple):
    """What calls must have in common to share code."""

    structure: object  # of the arguments
    # tensors by their specification, settings serialized
    leaves: tuple[_TensorKey | bytes, ...]
    settings: tuple[object, ...]  # global settings of PyTorch

    def to_bytes(self) -> bytes | None:
        """The key in another process; None if a class of the arguments has no name there."""
        structure = serialize(self.structure)
        rest = repr((self.leaves, self.settings)).encode()
        return None if structure is None else structure + rest


def call_key(args: tuple[object, ...]) -> CallKey | None:
    """The key of a call; None if code without guards could not run it.

    That is so inside a transform, for tensor subclasses, for tensors that require gradients, and for settings that
    cannot be serialized.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:  # pyright: ignore[reportAttributeAccessIssue]
        return None

    alias_numbers: dict[int, int] = {}
    leaves: list[_TensorKey | bytes] = []
    for leaf in tree.leaves(args):
        if not isinstance(leaf, Tensor):
            serialized = _serialize_settings(leaf)
            if serialized is None:
                return None
            leaves.append(serialized)
        elif type(leaf) is Tensor and not leaf.requires_grad:
            number = alias_numbers.setdefault(id(leaf), len(alias_numbers))
            layout = (tuple(leaf.shape), leaf.stride())
            leaves.append((number, *layout, leaf.dtype, str(leaf.device)))
        else:
            return None
    structure = tree.structure(args)
    return CallKey(structure, tuple(leaves), _global_settings())


def describe_change(
    before: CallKey, now: CallKey, args: tuple[object, ...]
) -> str:
    """What distinguishes the key of a call with some arguments from an earlier one."""
    if before.structure != now.structure:
        return "other arguments"
    for name, old, new in zip(tree.paths(args), before.leaves, now.leaves):
        if old == new:
            continue
        if isinstance(old, bytes) or isinstance(new, bytes):
            return f"{name} differs"
        fields = ("alias number", "shape", "stride", "dtype", "device")
        changes = [
            f"{field} {x} before, now {y}"
            for field, x, y in zip(fields, old, new)
            if x != y
        ]
        return f"{name} differs: {', '.join(changes)}"
    return "PyTorch's settings differ"


def serialize(x: object) -> bytes | None:
    """Pickle of functions, by their names, and of settings; None for what has no name, and for tensors."""
    file = io.BytesIO()
    try:
        _KeyPickler(file).dump(x)
    except Exception:  # whatever the methods of a user's class raise
        return None
    return file.getvalue()


class _KeyPickler(pickle.Pickler):
    """Pickler of keys, which nothing reads back."""

    # no memo: equal settings become equal bytes, whatever strings they share
    fast = True

    def reducer_override(self, obj: object) -> Any:
        """Default pickling, to the same bytes whether a partial application's attributes have been read or not."""
        if isinstance(obj, Tensor):
            raise pickle.PicklingError("expected no tensor, got one")
        if isinstance(obj, functools.partial):
            vars(obj)  # it has no dict, which is pickled as None, before this
        return NotImplemented


# By id. The settings stay alive with their serializations, so that no other object gets the id of one of them.
_serialized: dict[int, tuple[object, bytes | None]] = {}


def _serialize_settings(settings: object) -> bytes | None:
    """Type-exact serialization of a config: it distinguishes 1, 1.0 and True.

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
    """Global PyTorch settings that affect compilation."""
    autocast = [
        (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in ("cpu", "cuda")
    ]
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        *autocast,
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        str(torch.get_default_device()),
        torch.get_float32_matmul_precision(),
        torch.backends.cuda.matmul.fp32_precision,
        torch.get_num_threads(),
    )


def environment_key(args: tuple[object, ...]) -> tuple[object, ...]:
    """Versions, processors, and settings of the compilers, which it imports."""
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config

    def describe(setting: object) -> object:
        is_set = isinstance(setting, set | frozenset)  # in no fixed order
        return sorted(map(repr, setting)) if is_set else repr(setting)

    configs = (torch._dynamo.config, functorch_config, inductor_config)
    devices = {x.device for x in tree.leaves(args) if isinstance(x, Tensor)}
    gpus = [str(x) for x in devices if x.type == "cuda"]
    models = [
        (x, torch.cuda.get_device_name(x), torch.cuda.get_device_capability(x))
        for x in sorted(gpus)
    ]
    return (
        *(torch.__version__, torch.version.git_version, sys.version_info),
        *(platform.machine(), torch.backends.cpu.get_cpu_capability(), models),
        [
            json.dumps(x.save_config_portable(), default=describe)
            for x in configs
        ],
    )


def sources_digest() -> str:
    """A digest of all code that is neither Python's nor PyTorch's.

    Those are the sources of this package, of all other modules that are loaded, and the records of installed packages,
    which have digests of their files.

    Raises:
      UncachedError: a source has changed since this process began, which may run another one.
    """
    known = (str(PACKAGE_FOLDER), *sysconfig.get_paths().values())
    # PyTorch's modules have names of files that are none, and those that it or this package generates come and go.
    left_out = re.compile(r"torch\.|c[a-z2-7]{40,}\.|funcppo_source_")
    files = {str(path): path for path in PACKAGE_FOLDER.rglob("*.py")}
    for name, module in list(sys.modules.items()):
        file = module.__dict__.get("__file__")
        if file and not left_out.match(name) and not file.startswith(known):
            files[name] = Path(file)

    digest = hashlib.sha256(_installed_packages())
    for name, path in sorted(files.items()):
        if not path.exists() or path.stat().st_mtime > STARTED_AT:
            raise UncachedError(f"{path} changed since this process began")
        content = path.read_bytes()
        digest.update(f"{Path(name).name} {len(content)}".encode() + content)
    return digest.hexdigest()


@functools.cache
def _installed_packages() -> bytes:
    """A digest of the records of installed packages, but for those of PyTorch."""
    digest = hashlib.sha256()
    paths = sysconfig.get_paths()
    for folder in sorted({paths["purelib"], paths["platlib"]}):
        for file in sorted(Path(folder).glob("*.dist-info/RECORD")):
            if not file.parent.name.startswith(("torch-", "nvidia_")):
                digest.update(file.read_bytes())
    return digest.digest()


def describe_globals(guards: Iterable[Any]) -> dict[str, str]:
    """What a traced function read of module globals, by PyTorch's expression for each.

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
    """What identifies a constant, a function or a class in another process; empty for what is read through them."""
    if isinstance(value, bool | int | float | complex | str | bytes | None):
        return repr(value)
    if isinstance(value, types.FunctionType):
        code = zlib.crc32(
            value.__code__.co_code
        )  # another one may have its name
        return f"{value.__module__}.{value.__qualname__} {code}"
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    return ""


def changed_global(function: Any, described: Mapping[str, str]) -> str:
    """The expression of a global that is not as `describe_globals` saw it, for a function; empty if all are."""
    values = _Globals(getattr(function, "__globals__", {}))
    for name, before in described.items():
        if describe_value(eval(name, {"G": values})) != before:
            return name
    return ""


class _Globals(dict[str, object]):
    """The globals of a function's module, and modules by PyTorch's names for them."""

    def __missing__(self, name: str) -> object:
        module = name.removeprefix("__import_").replace("_dot_", ".")
        return importlib.import_module(module)
