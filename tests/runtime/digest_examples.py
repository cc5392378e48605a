"""Functions that read a value from everywhere that Python lets them, and patches of each value.

python -m tests.runtime.digest_examples      digests of all examples, plain and patched, as JSON
"""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple
from unittest.mock import patch

import torch

from funcppo.envs import classic
from funcppo.runtime.function_digest import call_digest

SCALE = 2.0
TABLE = {"rows": (1.0, [2.0, 3.0])}
ALIAS = torch.sin
THIS = sys.modules[__name__]


def read_global(x):
    return x * SCALE


def read_container(x):
    return x * TABLE["rows"][1][0]


def read_default(x, by=2.0):
    return x * by


def read_keyword_default(x, *, by=2.0):
    return x * by


def read_through_call(x):
    return read_global(x) + 1


def read_in_nested_function(x):
    def inner(y):
        return y * SCALE

    return inner(x)


def read_in_comprehension(x):
    return sum([x * SCALE for _ in range(2)])


def read_module_attribute(x):
    return x * classic.GRAVITY


def read_module_by_getattr(x):
    return x * getattr(cartpole, "GRAVITY")  # noqa: B009


def read_library_number(x):
    return x * math.pi


def read_torch_function(x):
    return torch.sin(x)


def read_alias(x):
    return ALIAS(x)


class Base:
    """A class whose attribute a subclass reads."""

    rate: ClassVar[float] = 2.0

    def value(self, x):
        """The value, scaled."""
        return x * self.rate


class Derived(Base):
    """Inherits all that it reads."""


SETTINGS = Derived()


@dataclass(frozen=True)
class Frozen:
    """Settings with a method."""

    rate: float = 2.0
    offset: ClassVar[float] = 0.0

    def apply(self, x):
        """The value, scaled and moved."""
        return x * self.rate + self.offset


class Pair(NamedTuple):
    """A tree with a property."""

    x: torch.Tensor

    @property
    def scaled(self):
        """The tensor, scaled."""
        return self.x * SCALE


def read_class_attribute(x):
    return x * Derived.rate


def read_method_of_global(x):
    return SETTINGS.value(x)


def read_argument(cfg, x):
    return cfg.apply(x)


def read_property(pair):
    return pair.scaled


def make_closure(by):
    def read_closure(x):
        return x * by

    return read_closure


def make_wrapper(fn):
    @functools.wraps(fn)
    def wrapper(x):
        return fn(x)

    return wrapper


closure = make_closure(2.0)
CELL = closure.__closure__[0]  # pyright: ignore[reportOptionalSubscript]
wrapped_torch = make_wrapper(torch.sin)
wrapped = make_wrapper(read_global)
through_partial = functools.partial(read_default, by=2.0)
memoized = functools.lru_cache(read_global)
method = SETTINGS.value


class Example(NamedTuple):
    """A function, the arguments of a call, and a patch of a value that the call reads."""

    fn: Callable[..., Any]
    patch: Callable[[], AbstractContextManager[Any]]
    args: tuple[Any, ...] = (torch.ones(2),)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Another value of one attribute, within the block."""
    is_inherited = isinstance(owner, type) and name not in vars(owner)
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def patched(owner: object, name: str, value: Any) -> Callable[[], Any]:
    """A patch of one attribute."""
    return lambda: replaced(owner, name, value)


SCALE_3 = patched(THIS, "SCALE", 3.0)
EXAMPLES = {
    "global": Example(read_global, SCALE_3),
    "type of a global": Example(read_global, patched(THIS, "SCALE", 2)),
    "sign of a global": Example(read_global, patched(THIS, "SCALE", -2.0)),
    "container": Example(
        read_container,
        lambda: patch.dict(TABLE, {"rows": (1.0, [2.5, 3.0])}),
    ),
    "default": Example(
        read_default, patched(read_default, "__defaults__", (3.0,))
    ),
    "keyword default": Example(
        read_keyword_default,
        patched(read_keyword_default, "__kwdefaults__", {"by": 3.0}),
    ),
    "call": Example(read_through_call, SCALE_3),
    "replaced call": Example(
        read_through_call, patched(THIS, "read_global", read_container)
    ),
    "nested function": Example(read_in_nested_function, SCALE_3),
    "comprehension": Example(read_in_comprehension, SCALE_3),
    "code": Example(
        read_global, patched(read_global, "__code__", read_alias.__code__)
    ),
    "module": Example(read_module_attribute, patched(classic, "GRAVITY", 8.0)),
    "getattr": Example(
        read_module_by_getattr, patched(classic, "GRAVITY", 8.0)
    ),
    "library": Example(read_library_number, patched(math, "pi", 3.0)),
    "torch": Example(read_torch_function, patched(torch, "sin", torch.cos)),
    "wrapped torch": Example(
        read_torch_function, patched(torch, "sin", wrapped_torch)
    ),
    "alias": Example(read_alias, patched(THIS, "ALIAS", torch.cos)),
    "class attribute": Example(
        read_class_attribute, patched(Base, "rate", 3.0)
    ),
    "subclass attribute": Example(
        read_class_attribute, patched(Derived, "rate", 3.0)
    ),
    "method": Example(
        read_method_of_global, patched(Base, "value", lambda self, x: x)
    ),
    "instance attribute": Example(
        read_method_of_global,
        lambda: patch.dict(SETTINGS.__dict__, rate=3.0),
    ),
    "bound method": Example(method, patched(Base, "rate", 3.0)),
    "class of an argument": Example(
        read_argument, patched(Frozen, "offset", 1.0), (Frozen(), torch.ones(2))
    ),
    "method of an argument": Example(
        read_argument,
        patched(Frozen, "apply", lambda self, x: x),
        (Frozen(), torch.ones(2)),
    ),
    "property of a tree": Example(
        read_property, SCALE_3, (Pair(torch.ones(2)),)
    ),
    "closure": Example(closure, patched(CELL, "cell_contents", 3.0)),
    "wrapper": Example(wrapped, SCALE_3),
    "memoized": Example(memoized, SCALE_3),
    "partial": Example(
        through_partial,
        patched(read_default, "__code__", (lambda x, by: x + by).__code__),
    ),
    "environment": Example(
        classic.cartpole_step, patched(classic, "GRAVITY", 8.0)
    ),
}


def digests() -> dict[str, list[str]]:
    """The digest of each example as it is, while it is patched, and as it is again."""
    found: dict[str, list[str]] = {}
    for name, example in EXAMPLES.items():
        plain = call_digest(example.fn, example.args)
        with example.patch():
            changed = call_digest(example.fn, example.args)
        found[name] = [plain, changed, call_digest(example.fn, example.args)]
    return found


if __name__ == "__main__":
    from tests.runtime import digest_examples

    print(json.dumps(digest_examples.digests()))
