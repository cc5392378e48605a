"""A digest changes with every value that a function can read, and with nothing else, in every process."""

from __future__ import annotations

import functools
import json
import math
import operator
import os
import pickle
import subprocess
import sys
import threading
import time
import types
from functools import cache
from pathlib import Path

import pytest
import torch

from funcppo.runtime.function_digest import NoDigestError, call_digest
from tests.runtime import digest_examples

TENSOR = torch.ones(2)
LOCK = threading.Lock()
MODULE = torch.nn.Linear(1, 1)
CYCLE: list[object] = []
CYCLE.append(CYCLE)


@cache
def digests():
    return digest_examples.digests()


def digests_of_another_process(hash_seed):
    done = subprocess.run(
        [sys.executable, "-m", "tests.runtime.digest_examples"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", digest_examples.EXAMPLES)
def test_a_value_that_is_patched_changes_the_digest_until_it_is_restored(name):
    plain, patched, restored = digests()[name]
    assert plain != patched and plain == restored


def test_processes_agree_on_plain_and_on_patched_functions():
    assert digests_of_another_process("7") == digests()


class Setting:
    """A class that a function reads."""


def read_class(x):
    return x if Setting else -x


def test_a_class_has_the_same_digest_after_an_object_of_it_is_pickled():
    """`copyreg` keeps the names of its slots in the class."""
    before = call_digest(read_class)
    pickle.dumps(Setting(), protocol=2)
    assert "__slotnames__" in vars(Setting)
    assert call_digest(read_class) == before


def read_tensor(x):
    return x + TENSOR


def read_lock(x):
    with LOCK:
        return x


def read_module(x):
    return MODULE(x)


def read_cycle(x):
    return x * len(CYCLE)


def read_by_name(x):
    return x * eval("2.0")


def read_import(x):
    from funcppo.envs import classic

    return x * classic.GRAVITY


def read_clock(x):
    return x * time.time()


def read_environment(x):
    return x * len(os.getenv("HOME", ""))


def read_file(x):
    return x * len(open("/dev/null").read())


def read_folder(x):
    return x * len(list(Path().iterdir()))


def read_mathematics(x):
    return x * math.sqrt(functools.reduce(operator.add, (1.0, 2.0)))


def test_what_computes_from_its_arguments_alone_has_a_digest():
    assert call_digest(read_mathematics) == call_digest(read_mathematics)


def test_an_attribute_that_a_module_makes_when_it_is_read_is_made_before(
    monkeypatch,
):
    """As `funcppo` itself does; else the digest would change when it is first read."""
    lazy = types.ModuleType("lazy_module_of_a_test")
    source = "def __getattr__(name):\n globals()[name] = len(name)\n return len(name)"
    exec(source, vars(lazy))
    monkeypatch.setitem(globals(), "lazy", lazy)
    before = call_digest(read_lazy)
    assert read_lazy(1) == 5 and call_digest(read_lazy) == before
    lazy.width = 6
    assert call_digest(read_lazy) != before


def read_lazy(x):
    return x * lazy.width  # pyright: ignore[reportUndefinedVariable]


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (read_clock, "time.*may give other values another time"),
        (read_environment, "os.*may give other values another time"),
        (read_file, "io.*may give other values another time"),
        (read_folder, "pathlib.*may give other values another time"),
        (read_tensor, "test_function_digest.TENSOR is a Tensor"),
        (read_lock, "test_function_digest.LOCK is a lock"),
        (read_module, "MODULE"),
        (read_cycle, "CYCLE.*contains itself"),
        (read_by_name, "read_by_name calls eval"),
        (read_import, "read_import imports a module"),
        (digest_examples.make_closure(TENSOR), "read_closure is a Tensor"),
    ],
)
def test_what_cannot_be_compared_is_refused_and_named(fn, reason):
    with pytest.raises(NoDigestError, match=reason):
        call_digest(fn, (torch.ones(2),))


def test_a_tensor_among_the_arguments_counts_by_its_specification():
    fn = digest_examples.read_global
    one, other = torch.ones(2), torch.zeros(2)
    assert call_digest(fn, (one,)) == call_digest(fn, (other,))
    assert call_digest(fn, (one,)) != call_digest(fn, (torch.ones(3),))


def test_values_that_are_not_read_do_not_count(monkeypatch):
    before = call_digest(digest_examples.read_alias)
    monkeypatch.setattr(digest_examples, "SCALE", 3.0)
    assert call_digest(digest_examples.read_alias) == before
