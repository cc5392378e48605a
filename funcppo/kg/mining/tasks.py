"""Tasks of mining, which one process or several may do: results come in the order of the tasks.

A task yields results that depend on the context, the function and the task alone. What was found meanwhile (`Latest`)
may spare it work, and whoever receives the results drops what that would have spared. So it changes no_hint who does a
task, and when.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Any, Protocol, TypeVar

Result = TypeVar("Result")
ResultOf = TypeVar("ResultOf", covariant=True)


class Latest(Protocol):
    """What has been found by now, as far as this process knows."""

    def __call__(self) -> Any: ...


class Work(Protocol[ResultOf]):
    """Does a task: a function of a module, or a `partial` of one, so that it can be sent to other processes."""

    def __call__(
        self, context: Any, latest: Latest, task: Any, /
    ) -> Iterator[ResultOf]:
        """Yield the results of a task."""
        ...


class MapTasks(Protocol):
    """Does tasks, in this process or in several."""

    def __call__(
        self,
        context: Any,
        work: Work[Result],
        tasks: Sequence[Any],
        latest: Latest,
        /,
    ) -> Generator[Result, None, None]:
        """Yield the results of all tasks in their order."""
        ...


def map_alone(
    context: Any, work: Work[Result], tasks: Sequence[Any], latest: Latest
) -> Generator[Result, None, None]:
    """Do the tasks one by one in this process."""
    for task in tasks:
        yield from work(context, latest, task)


def no_hint() -> None:
    """No hint: results do not depend on what has been found."""
