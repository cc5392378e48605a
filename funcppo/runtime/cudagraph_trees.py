"""CUDAGraph Trees: the CUDA graphs that PyTorch records of compiled functions by itself (`mode="reduce-overhead"`).

    with cudagraph_trees_only():
        step = compile_function(fn)       # a TreeFunction; `capture` records nothing of its own meanwhile

`capture` replays a whole iteration by one launch, the trees a compiled function by one launch. They are here to compare
the two, and for a step that `capture` cannot record as a whole.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch

from funcppo.core import tree
from funcppo.runtime import agreement

Result = TypeVar("Result")

# what `mode="reduce-overhead"` stands for; a mode excludes other options
CUDAGRAPH_OPTIONS: dict[str, Any] = {"triton.cudagraphs": True}

_demands: list[None] = []  # one for each open `cudagraph_trees_only`


@contextmanager
def cudagraph_trees_only() -> Iterator[None]:
    """Let PyTorch record what is compiled meanwhile, and no capture of ours."""
    _demands.append(None)
    try:
        yield
    finally:
        _demands.pop()


def are_demanded() -> bool:
    """Whether `cudagraph_trees_only` is open."""
    return bool(_demands)


def _initialize_thread() -> None:
    """Let the current thread have trees.

    PyTorch 2.13 does so by itself. In 2.10 the thread that imports them has some, and so have its threads of autograd.
    """
    from torch._inductor import cudagraph_trees

    threads = cudagraph_trees.local
    has_trees = hasattr(threads, "tree_manager_containers")
    if has_trees or torch._C._is_key_in_tls("tree_manager_containers"):  # pyright: ignore[reportAttributeAccessIssue]
        return
    threads.tree_manager_containers = {}
    threads.tree_manager_locks = defaultdict(threading.Lock)


class TreeFunction(Generic[Result]):
    """A compiled function of which PyTorch records a CUDA graph, one for each kind of arguments.

    Every call begins a step of the trees and clones what it returns. So each recording is the root of a tree, whatever
    is called before or after it, and no later replay overwrites a result.

    Attributes:
      is_called: whether it has been called, other than within another compiled function.
    """

    def __init__(
        self, fn: Callable[..., Result], options: dict[str, Any]
    ) -> None:
        """Compile nothing yet.

        Args:
          fn: a pure function of trees of tensors and frozen settings.
          options: further options of Inductor.
        """
        self._fn = fn
        self.is_called = False
        self._compiled = torch.compile(
            fn,
            fullgraph=True,
            dynamic=False,
            **agreement.backend_options(
                "inductor", options | CUDAGRAPH_OPTIONS
            ),
        )

    def __call__(self, *args: object) -> Result:
        """Return the function's value.

        Raises:
          Exception: whatever the compiler raises.
        """
        if torch.compiler.is_compiling():
            return self._fn(*args)
        _initialize_thread()
        torch.compiler.cudagraph_mark_step_begin()
        result = tree.map(torch.clone, self._compiled(*args))
        self.is_called = True
        return result
