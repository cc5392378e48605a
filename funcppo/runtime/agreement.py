"""What several processes try works in all of them, or in none: they agree before any runs what it has compiled.

    with attempt_together(agree, "one-graph") as attempt:
        step = compile_function(fn)       # each compilation ends with `settle`
        step(x)                           # no process is in a collective of `step` that another one cannot compile

Each process makes the same compilations in the same order, so the agreements of an attempt are equally many. The first
failure ends the attempt in all processes, each at the agreement that it has come to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from funcppo.runtime.reasons import error_line


class Agree(Protocol):
    """Tells the other processes whether this one succeeded in what all of them try."""

    def __call__(self, what: str, failure: str = "", /) -> str:
        """The first failure among all processes, with its rank; empty if all succeeded.

        Args:
          what: what is tried, in reports of progress.
          failure: why it fails in this process, one line; empty if it succeeds.
        """
        ...


class PeerFailedError(RuntimeError):
    """What all processes try works here, but not in another one; the message names it, and why."""


@dataclass(kw_only=True, slots=True)
class Attempt:
    """Something that all processes try."""

    agree: Agree
    what: str
    failure: str = ""
    """The first failure among all processes; empty as long as there is none."""

    def settle(self, failure: str = "") -> None:
        """Tell the others whether this process succeeded so far; nothing if the attempt is over.

        Raises:
          PeerFailedError: this process succeeded, another did not.
        """
        if self.failure:
            return
        self.failure = self.agree(self.what, failure)
        if self.failure and not failure:
            raise PeerFailedError(self.failure)


_attempts: list[Attempt] = []


def alone(_: str, failure: str = "", /) -> str:
    """The agreement of one process."""
    return failure


@contextmanager
def attempt_together(agree: Agree, what: str) -> Iterator[Attempt]:
    """An attempt of all processes, which ends with their agreement on it.

    Raises:
      PeerFailedError: this process succeeded, another did not.
      Exception: what this process raised itself.
    """
    attempt = Attempt(agree=agree, what=what)
    _attempts.append(attempt)
    try:
        yield attempt
    except Exception as error:
        if attempt.failure:  # told already, perhaps through the compiler
            raise PeerFailedError(attempt.failure) from None
        attempt.settle(describe(error))
        raise
    finally:
        _attempts.pop()
    attempt.settle()


def settle() -> None:
    """Agree that all have compiled what comes next, if they `attempt_together`.

    Raises:
      PeerFailedError: another process has not.
    """
    if _attempts:
        _attempts[-1].settle()


def backend_options(
    backend: str, options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Arguments of `torch.compile`: a backend and its options; it ends with `settle` in an `attempt_together`."""
    if not _attempts or _attempts[-1].agree is alone:
        return {
            "backend": backend,
            "options": None if options is None else dict(options),
        }
    compile_graph: Any = (
        torch._TorchCompileInductorWrapper("default", options, dynamic=False)
        if backend == "inductor"
        else torch._dynamo.lookup_backend(backend)
    )

    def compile_and_settle(graph: Any, inputs: Any) -> Any:
        code = compile_graph(graph, inputs)
        settle()
        return code

    return {"backend": compile_and_settle}


def describe(error: BaseException) -> str:
    """An error as one line."""
    return f"{type(error).__name__}: {error_line(error)}".removesuffix(": ")
