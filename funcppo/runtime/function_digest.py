"""Digest of a function's code and of every value that it can read: two processes that agree on it compile the same.

Read are module globals, closures, default arguments, class attributes, attributes of modules and of settings, and so on
through every function and class that these reach. What has no value that a later process could compare (a tensor, an
open file, a generator) has no digest, and neither has a function that looks names up at run time.

Functions and classes of PyTorch are leaves: its version is part of a cache key. So are those of the standard library
that compute from their arguments alone; what reads a clock, a file or the environment has no digest.
"""

from __future__ import annotations

import dis
import enum
import functools
import hashlib
import re
import sys
import types
from collections import deque
from collections.abc import Iterable
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

# packages whose functions are known by their names
VERSIONED_PACKAGES = sys.stdlib_module_names | {
    "torch",
    "builtins",
    "optree",
    "numpy",
}
# of the standard library, what computes from its arguments alone, or only describes values
PURE_MODULES = {
    "abc",
    "builtins",
    "cmath",
    "collections",
    "contextlib",
    "copy",
    "copyreg",
    "dataclasses",
    "enum",
    "functools",
    "inspect",
    "itertools",
    "math",
    "numbers",
    "operator",
    "re",
    "string",
    "types",
    "typing",
    "warnings",
}
# functions that read values by names that the code does not show
LOOKUPS = {"eval", "exec", "globals", "locals", "vars", "__import__"}
# objects whose names say what they are
NAMED_TYPES = (np.ufunc, types.GenericAlias, types.UnionType)
DATACLASS_MARKERS = ("_MISSING_TYPE", "_HAS_DEFAULT_FACTORY_CLASS")
IMPORT_NAME = dis.opmap["IMPORT_NAME"]
# attributes of classes that Python, `typing`, `abc`, `dataclasses` and `copyreg` set for themselves
IGNORED_CLASS_ATTRIBUTES = {
    "__annotate__",
    "__annotate_func__",
    "__annotations__",
    "__annotations_cache__",
    "__abstractmethods__",
    "__dataclass_fields__",
    "__dataclass_params__",
    "__dict__",
    "__doc__",
    "__firstlineno__",
    "__module__",
    "__non_callable_proto_members__",
    "__orig_bases__",
    "__parameters__",
    "__protocol_attrs__",
    "__slotnames__",
    "__static_attributes__",
    "__type_params__",
    "__weakref__",
    "_abc_impl",
}
# descriptors of slots and of the fields of NamedTuples: the class's names tell them
FIELD_DESCRIPTORS = (
    types.MemberDescriptorType,
    types.GetSetDescriptorType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
)
ATOMS = (
    type(None),
    type(Ellipsis),
    type(NotImplemented),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    range,
    slice,
    re.Pattern,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    np.dtype,
)


class NoDigestError(ValueError):
    """Something that a function reads cannot be compared across processes."""


def call_digest(fn: object, args: object = ()) -> str:
    """Digest of a function and of all values that a call of it can read.

    Args:
      fn: a function, or a partial application of one.
      args: the arguments of the call. Shape, strides, dtype and device stand for a tensor among them.

    Raises:
      NoDigestError: something has no digest; the text names it, and where it is read.
    """
    walk = _Walk()
    try:
        walk.write(fn, "")
        walk.write(args, "arguments", allow_tensors=True)
        walk.finish()
    except RecursionError:
        raise NoDigestError("values are nested too deeply") from None
    return walk.hash.hexdigest()


class _Walk:
    """A walk over all that a function reads, breadth first."""

    def __init__(self) -> None:
        self.hash = hashlib.sha256()
        # functions, classes and modules met, by id; they stay alive with their numbers
        self._numbers: dict[tuple[int, tuple[str, ...]], int] = {}
        self._met: list[object] = []
        self._to_visit: deque[tuple[Any, str, tuple[str, ...]]] = deque()
        self._open: set[int] = set()  # containers being written

    def finish(self) -> None:
        """Write the contents of all functions, classes and modules met."""
        while self._to_visit:
            x, where, names = self._to_visit.popleft()
            self._token("visit")
            if isinstance(x, types.FunctionType):
                self._write_function(x, where)
            elif isinstance(x, type):
                self._write_class(x, where)
            else:
                self._write_module(x, where, names)

    def write(self, x: Any, where: str, allow_tensors: bool = False) -> None:
        """Write a value, or the number of a function or class that is written later.

        Args:
          where: the path by which the value is reached, for errors.
          allow_tensors: write the specification of a tensor instead of raising an error.
        """
        kind = type(x)
        if kind in ATOMS:
            # repr tells 1, 1.0 and True apart, and -0.0 from 0.0
            self._token(kind.__name__, repr(x))
        elif isinstance(x, (types.FunctionType, type)):
            self._refer(x, where)
        elif isinstance(x, types.ModuleType):
            self._token("module", x.__name__)
        elif isinstance(x, Tensor):
            self._write_tensor(x, where, allow_tensors)
        else:
            if id(x) in self._open:
                _refuse(x, where, "it contains itself")
            self._open.add(id(x))
            self._write_composite(x, where, allow_tensors)
            self._open.discard(id(x))

    def _token(self, *words: str) -> None:
        # lengths, so that no two lists of words give the same bytes
        for word in words:
            self.hash.update(f"{len(word)}:{word}".encode())

    def _refer(
        self, x: object, where: str, names: tuple[str, ...] = ()
    ) -> None:
        """Write the number of a function, class or module, which is visited once."""
        key = id(x), names
        if key not in self._numbers:
            self._numbers[key] = len(self._numbers)
            self._met.append(x)
            self._to_visit.append((x, where, names))
        self._token("ref", str(self._numbers[key]))

    def _write_all(
        self, xs: Iterable[object], where: str, allow_tensors: bool = False
    ) -> None:
        items = list(xs)
        self._token("items", str(len(items)))
        for i, item in enumerate(items):
            self.write(item, f"{where}[{i}]", allow_tensors)

    def _write_mapping(
        self, mapping: Any, where: str, allow_tensors: bool = False
    ) -> None:
        self._token("mapping", str(len(mapping)))
        for key, value in mapping.items():
            self.write(key, where)
            self.write(value, _join(where, key), allow_tensors)

    def _write_tensor(self, x: Tensor, where: str, allowed: bool) -> None:
        if not allowed:
            _refuse(x, where, "its values may change")
        specification = tuple(x.shape), x.stride(), x.dtype, str(x.device)
        self._token(type(x).__name__, repr(specification))

    def _write_composite(self, x: Any, where: str, allow_tensors: bool) -> None:
        kind = type(x)
        self._refer(kind, where)
        if isinstance(x, (tuple, list, dict, set, frozenset)):
            # attributes of a subclass
            self._write_mapping(getattr(x, "__dict__", {}), where)
        if isinstance(x, (tuple, list)):
            self._write_all(x, where, allow_tensors)
        elif isinstance(x, (dict, types.MappingProxyType)):
            self._write_mapping(x, where, allow_tensors)
        elif isinstance(x, (set, frozenset)):
            self._write_set(x, where)
        elif (parts := _parts(x)) is not None:
            self._write_all(parts, where)
        elif isinstance(x, types.CodeType):
            self._token(_code_digest(x))
        elif _is_known_by_name(x):
            module = getattr(x, "__module__", None) or "builtins"
            _check_pure(x, module, where)
            self._token(_name(x))
        elif not _is_versioned(kind.__module__):
            self._write_instance(x, where, allow_tensors)
        else:
            _refuse(x, where, "its value cannot be compared")

    def _write_set(self, x: Iterable[object], where: str) -> None:
        items = list(x)
        if not all(type(item) in ATOMS for item in items):
            _refuse(x, where, "it holds more than numbers and strings")
        # not in the order of the hash, which differs between processes
        for item in sorted(f"{type(y).__name__} {y!r}" for y in items):
            self._token(item)

    def _write_instance(
        self, x: object, where: str, allow_tensors: bool
    ) -> None:
        """Fields of an object of a class that is written as well."""
        fields = dict(getattr(x, "__dict__", {}))
        for base in type(x).__mro__:
            slots = base.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if name != "__weakref__" and hasattr(x, name):
                    fields[name] = getattr(x, name)
        if isinstance(x, ATOMS):  # a subclass of a number or a string
            self._token(repr(x))
        elif not _shows_all_fields(type(x)):
            _refuse(x, where, "it may have values that Python does not show")
        self._write_mapping(dict(sorted(fields.items())), where, allow_tensors)

    def _write_function(self, fn: types.FunctionType, where: str) -> None:
        here = where or fn.__qualname__
        self._token("function", fn.__qualname__, _code_digest(fn.__code__))
        for cell in fn.__closure__ or ():
            try:
                self.write(cell.cell_contents, here)
            except ValueError as error:
                if isinstance(error, NoDigestError):
                    raise
                self._token("empty cell")
        # The name of the globals, because a wrapper copies the `__module__` of what it wraps.
        module = str(fn.__globals__.get("__name__"))
        if _is_versioned(module):
            _check_pure(fn, module, where)
            self._token(module)
            return

        self.write(fn.__defaults__, here)
        self.write(fn.__kwdefaults__, here)
        self._write_mapping(vars(fn), here)
        names, imports = _names(fn.__code__)
        if imports:
            raise NoDigestError(f"{fn.__qualname__} imports a module")
        self._write_globals(fn, names)

    def _write_globals(
        self, fn: types.FunctionType, names: tuple[str, ...]
    ) -> None:
        """Values of the global names that the code of a function mentions."""
        for name in names:
            if name in fn.__globals__:
                value = fn.__globals__[name]
            elif name in vars(sys.modules["builtins"]):
                value = vars(sys.modules["builtins"])[name]
                if name in LOOKUPS:
                    raise NoDigestError(f"{fn.__qualname__} calls {name}")
            else:
                continue  # the name of an attribute
            self._token(name)
            where = f"{fn.__globals__.get('__name__')}.{name}"
            if isinstance(value, types.ModuleType):
                self._refer(value, where, names)
            else:
                self.write(value, where)

    def _write_class(self, cls: type, where: str) -> None:
        self._token("class", cls.__module__, cls.__qualname__)
        if _is_versioned(cls.__module__):
            _check_pure(cls, cls.__module__, where)
            return
        here = f"{cls.__module__}.{cls.__qualname__}"
        self._write_all(cls.__bases__, here)
        self.write(type(cls), here)
        for name, value in sorted(vars(cls).items()):
            if name in IGNORED_CLASS_ATTRIBUTES:
                continue
            self._token(name)
            if not _is_field_descriptor(value):
                self.write(value, f"{here}.{name}")

    def _write_module(
        self, module: types.ModuleType, where: str, names: tuple[str, ...]
    ) -> None:
        """Attributes that the code that reads a module mentions."""
        self._token("module", module.__name__)
        for name in names:
            if not _has_attribute(module, name):
                continue
            value = vars(module)[name]
            self._token(name)
            if isinstance(value, types.ModuleType):
                self._refer(value, f"{where}.{name}", names)
            elif module.__name__.partition(".")[0] == "torch":
                self._write_torch_attribute(value, f"{where}.{name}")
            else:
                self.write(value, f"{where}.{name}")

    def _write_torch_attribute(self, value: object, where: str) -> None:
        """An attribute of PyTorch, whose state is part of a cache key by itself."""
        is_plain = isinstance(value, (types.FunctionType, type, *ATOMS))
        is_torch = _is_versioned(type(value).__module__)
        if is_torch and not is_plain and not _is_known_by_name(value):
            self._token("torch attribute", type(value).__qualname__)
        else:
            self.write(value, where)


def _is_versioned(module: str | None) -> bool:
    return str(module).partition(".")[0] in VERSIONED_PACKAGES


def _has_attribute(module: types.ModuleType, name: str) -> bool:
    """Return whether a module has an attribute; one that it makes when it is first read is made now.

    Else the digest would depend on what the process has read before.
    """
    is_lazy = "__getattr__" in vars(module) and name not in vars(module)
    if is_lazy and not _is_versioned(module.__name__):
        getattr(module, name, None)
    return name in vars(module)


def _check_pure(x: object, module: str, where: str) -> None:
    """Refuse what the standard library computes from more than arguments: a clock, a file, the environment."""
    package = module.partition(".")[0]
    is_pure = package.lstrip("_") in PURE_MODULES
    if package in sys.stdlib_module_names and not is_pure:
        _refuse(x, where, f"{module} may give other values another time")


def _parts(x: Any) -> tuple[object, ...] | None:
    """What makes up an object that stands for others; None for other objects."""
    if isinstance(x, enum.Enum):
        return x.name, x.value
    if isinstance(x, functools.partial):
        return x.func, x.args, x.keywords
    if isinstance(x, types.MethodType):
        return x.__func__, x.__self__
    if isinstance(x, (staticmethod, classmethod)):
        return (x.__func__,)
    if isinstance(x, property):
        return x.fget, x.fset, x.fdel
    if isinstance(x, functools._lru_cache_wrapper):
        return (x.__wrapped__,)
    return None


def _is_known_by_name(x: Any) -> bool:
    """Return whether a name and a version say what an object is."""
    if isinstance(x, (types.BuiltinFunctionType, types.MethodWrapperType)):
        owner = getattr(x, "__self__", None)
        is_static = owner is None or isinstance(owner, (types.ModuleType, type))
        return is_static and _is_versioned(
            getattr(x, "__module__", None) or "builtins"
        )
    return (
        isinstance(x, (*NAMED_TYPES, *FIELD_DESCRIPTORS))
        or type(x).__module__ in ("typing", "torch._ops")
        or type(x).__qualname__ in DATACLASS_MARKERS
    )


def _name(x: Any) -> str:
    """Name of an object that `_is_known_by_name`."""
    name = getattr(x, "__qualname__", None) or getattr(x, "__name__", None)
    if isinstance(name, str):
        return f"{getattr(x, '__module__', None)}.{name}"
    is_marker = type(x).__qualname__ in DATACLASS_MARKERS
    return type(x).__qualname__ if is_marker else str(x)


def _shows_all_fields(cls: type) -> bool:
    """Return whether the fields of an object of a class are those in its `__dict__` and slots."""
    return all(
        base is object
        or base.__module__ in ("abc", "typing")
        or not _is_versioned(base.__module__)
        for base in cls.__mro__
    )


def _is_field_descriptor(x: object) -> bool:
    """Return whether a class attribute only says that there is such a field."""
    is_slot = isinstance(x, FIELD_DESCRIPTORS)
    return is_slot or type(x).__name__ == "_tuplegetter"


def _join(where: str, key: object) -> str:
    return f"{where}.{key}" if isinstance(key, str) else f"{where}[{key!r}]"


def _refuse(x: object, where: str, why: str) -> NoReturn:
    raise NoDigestError(f"{where or 'it'} is a {type(x).__qualname__}: {why}")


@functools.cache
def _code_digest(code: types.CodeType) -> str:
    """Digest of what a code object does, wherever it stands."""
    constants = [_constant(x) for x in code.co_consts]
    parts = (
        code.co_code,
        constants,
        code.co_names,
        code.co_varnames,
        code.co_freevars,
        code.co_cellvars,
        code.co_flags,
        code.co_argcount,
        code.co_posonlyargcount,
        code.co_kwonlyargcount,
        getattr(code, "co_exceptiontable", b""),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _constant(x: object) -> object:
    """A constant with a repr that is the same in every process."""
    if isinstance(x, types.CodeType):
        return _code_digest(x)
    if isinstance(x, tuple):
        return [_constant(y) for y in x]
    if isinstance(x, frozenset):
        return sorted(repr(y) for y in x)
    return x


@functools.cache
def _names(code: types.CodeType) -> tuple[tuple[str, ...], bool]:
    """Names of globals and attributes that code and the functions in it mention, and whether it imports."""
    names = set(code.co_names)
    has_import = IMPORT_NAME in code.co_code[::2]
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner, inner_import = _names(constant)
            names.update(inner)
            has_import |= inner_import
        elif isinstance(constant, str) and constant.isidentifier():
            names.add(constant)  # for getattr
    return tuple(sorted(names)), has_import
