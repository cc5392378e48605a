"""What a cell is, and the list of all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any, NamedTuple

import torch
from torch import Tensor

from experiments.matrix.problem import Problem
from funcppo.losses import Batch

BACKENDS = ("eager", "aot_eager", "inductor")
MODES = ("default", "reduce-overhead", "manual graph", "graphed callables")


class Training(NamedTuple):
    """A learner built by a cell: it changes its own parameters."""

    step: Callable[[Batch], Any]
    params: Callable[[], list[Tensor]]
    minibatches: int = 1  # updates of a step, each on its share of the rows
    learners: int = (
        1  # that learn at once, on the first axis of every parameter
    )
    graphs: int | None = None  # those that Dynamo's counters do not see


Build = Callable[[Problem, "Compiler"], Training]
Oracle = Callable[[Problem, list[Batch]], list[Tensor]]


@dataclass(frozen=True, kw_only=True)
class Way:
    """One variant of one approach."""

    approach: str  # number or letter
    title: str
    variant: str
    build: Build
    backends: tuple[str, ...] = BACKENDS
    modes: tuple[str, ...] = MODES[:3]  # those run on a GPU
    residual: bool = False
    # it claims to be: a run without a graph is then no success
    compiled: bool = True
    # What `Training.params` must be after the batches, where that is not what eager training of the problem makes of
    # them; in the dtype of the cell.
    oracle: Oracle | None = None


class Cell(NamedTuple):
    """A way, and how it is compiled and replayed."""

    way: Way
    backend: str
    mode: str

    @property
    def id(self) -> str:
        """As in `6/as written/inductor/default`."""
        return (
            f"{self.way.approach}/{self.way.variant}/{self.backend}/{self.mode}"
        )


@dataclass(frozen=True)
class Compiler:
    """torch.compile with the backend and the mode of a cell."""

    backend: str
    mode: str

    def __call__(
        self, fn: Callable[..., Any], fullgraph: bool = True, **options: Any
    ) -> Callable[..., Any]:
        """`fn` compiled; by default a graph break is an error."""
        mode = "reduce-overhead" if self.mode == "reduce-overhead" else None
        return torch.compile(
            fn,
            backend=self.backend,
            mode=mode,
            fullgraph=fullgraph,
            dynamic=False,
            **options,
        )


WAYS: list[Way] = []


def way(
    approach: str, title: str, variant: str, **settings: Any
) -> Callable[[Build], Build]:
    """Put the decorated function into the list, as a `Way` with these settings."""
    names = {"approach": approach, "title": title, "variant": variant}

    def register(build: Build) -> Build:
        WAYS.append(Way(build=build, **names, **settings))
        return build

    return register


def cells(gpu: bool, patterns: tuple[str, ...]) -> list[Cell]:
    """The cells for a machine; modes other than the default are tried on a GPU, for the backend inductor.

    Args:
      patterns: shell patterns of which a cell's id must match one; a pattern without a wildcard is looked for anywhere.
    """
    every = [
        Cell(way, backend, mode)
        for way in WAYS
        for backend in way.backends
        for mode in way.modes
        if gpu or mode == "default"
        if backend in ("none", "inductor") or mode == "default"
    ]
    wild = [p if any(c in p for c in "*?[") else f"*{p}*" for p in patterns]
    return [cell for cell in every if any(fnmatch(cell.id, p) for p in wild)]


def by_id(cell_id: str) -> Cell:
    """The cell of this name; KeyError when there is none."""
    approach, variant, backend, mode = cell_id.split("/")
    for way in WAYS:
        if (way.approach, way.variant) == (approach, variant):
            return Cell(way, backend, mode)
    raise KeyError(cell_id)
