"""One thread that does the work of requests, one after the other, with a bound on the queue and on the time of each.

The caches of a run are not made for several threads, and an operation of PyTorch uses all cores that it may use.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from funcppo.core.deadline import Clock
from funcppo.kg.show.serve.errors import RequestError

T = TypeVar("T")


class _Interrupted(BaseException):
    """Raised in the thread; no handler of `Exception` in the work catches it."""


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """Work that waits for the thread."""

    work: Callable[[], Any]
    submitted: float
    future: Future[Any] = field(default_factory=Future)


class Worker:
    """The thread and its queue.

    Attributes:
      seconds: that a request may wait, and that its work may take.
      clock: measures how long a request waits.
    """

    def __init__(
        self,
        seconds: float,
        max_waiting: int,
        clock: Clock = time.monotonic,
    ) -> None:
        """Start the thread.

        Args:
          max_waiting: requests that wait while one is worked on; more are refused.
        """
        self.seconds = seconds
        self.clock = clock
        self._queue: queue.Queue[_Job] = queue.Queue(max_waiting)
        # guards which job a deadline belongs to
        self._lock = threading.Lock()
        self._running: _Job | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """The future result of work.

        Raises:
          RequestError: too many requests wait.
        """
        job = _Job(work, self.clock())
        try:
            self._queue.put_nowait(job)
        except queue.Full:
            raise RequestError(
                503,
                f"busy: {self._queue.maxsize} requests wait already; try again in some seconds",
            ) from None
        return job.future

    def stop(self) -> None:
        """End the running work and refuse what waits."""
        error = RequestError(503, "stopped: the server ends")
        with suppress(queue.Empty):
            while True:
                job = self._queue.get_nowait()
                if job.future.set_running_or_notify_cancel():
                    job.future.set_exception(error)
        running = self._running
        if running is not None:
            self._interrupt(running, error)

    def _run(self) -> None:
        """Do one job after another."""
        while True:
            job = self._queue.get()
            # The client may have gone.
            if not job.future.set_running_or_notify_cancel():
                continue
            if self.clock() - job.submitted > self.seconds:
                error = RequestError(
                    503,
                    f"busy: waited for {self.seconds:g} s behind other requests; try again",
                )
                job.future.set_exception(error)
            else:
                self._do(job)

    def _do(self, job: _Job) -> None:
        """Do a job within its time."""
        late = RequestError(
            503,
            f"stopped: the answer takes longer than {self.seconds:g} s (`--seconds` of `funcppo serve`)",
        )
        timer = threading.Timer(self.seconds, self._interrupt, [job, late])
        timer.daemon = True
        # The future of interrupted work has its error already.
        with suppress(_Interrupted, InvalidStateError):
            with self._lock:
                self._running = job
            timer.start()
            try:
                result = job.work()
            except Exception as error:
                self._finish(job)
                job.future.set_exception(error)
            else:
                self._finish(job)
                job.future.set_result(result)
        timer.cancel()

    def _finish(self, job: _Job) -> None:
        """No deadline interrupts the thread after this, not even one that has passed and is not yet noticed."""
        with self._lock:
            # Taking an error back where none stands slows CPython 3.11 down for good, and hangs it when traced.
            if self._running is not job:
                _raise_in_thread(self._thread, None)
            self._running = None

    def _interrupt(self, job: _Job, error: RequestError) -> None:
        """Answer a job that is still running with an error at once, and end its work.

        It ends between two instructions of Python; an operation of PyTorch goes on to its end, and other work waits.
        """
        with self._lock:
            if self._running is job:
                self._running = None
                job.future.set_exception(error)
                _raise_in_thread(self._thread, _Interrupted)


def _raise_in_thread(
    thread: threading.Thread, error: type[BaseException] | None
) -> None:
    """Have CPython raise an error in a thread; None takes back one that has not been raised yet."""
    identifier = ctypes.c_ulong(thread.ident or 0)
    raised = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(identifier, raised)
