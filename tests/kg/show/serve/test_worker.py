"""Work is done in order; what takes too long is ended, what is too much is refused, and the thread goes on."""

import subprocess
import sys
import threading
import time

import pytest

from funcppo.kg.show.serve.errors import RequestError
from funcppo.kg.show.serve.server import Worker


def no_time_passes():
    """A clock by which no request waits, however slow the machine is."""
    return 0.0


def spin(event=None):
    """Work without an end."""
    if event is not None:
        event.set()
    while True:
        time.sleep(0.001)


def test_work_is_done_in_one_thread_in_order():
    worker = Worker(60, 8)
    done = []
    futures = [
        worker.submit(lambda i=i: done.append((i, threading.get_ident())))
        for i in range(5)
    ]
    for future in futures:
        future.result(60)
    assert [i for i, _ in done] == list(range(5))
    assert len({thread for _, thread in done}) == 1


def test_an_error_of_the_work_is_that_of_its_future():
    worker = Worker(60, 8)
    with pytest.raises(ZeroDivisionError):
        worker.submit(lambda: 1 // 0).result(60)
    assert worker.submit(lambda: 2).result(60) == 2


def test_work_that_takes_too_long_is_ended_in_one_line():
    worker = Worker(0.05, 8, no_time_passes)
    with pytest.raises(RequestError, match=r"longer than 0\.05 s") as error:
        worker.submit(spin).result(60)
    assert error.value.status == 503
    worker.seconds = 60
    assert worker.submit(lambda: 2).result(60) == 2


TRACED_AFTER_WORK = """
import sys
from funcppo.kg.show.serve.server import Worker
assert Worker(60, 8).submit(lambda: 2).result(60) == 2
sys.settrace(lambda *event: None)
(lambda: None)()
print("done")
"""


def test_work_leaves_the_interpreter_nothing_to_do():
    """CPython 3.11 calls no function under a debugger while an error for a thread is said to stand and none does."""
    done = subprocess.run(
        [sys.executable, "-c", TRACED_AFTER_WORK],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "done\n", done.stderr


@pytest.mark.parametrize("is_stopped", [False, True])
def test_an_operation_that_goes_on_keeps_no_client_waiting(is_stopped):
    worker = Worker(60 if is_stopped else 0.05, 8, no_time_passes)
    started, may_end = threading.Event(), threading.Event()

    def operation():
        started.set()
        # one call into C, which no error of another thread ends
        return may_end.wait(60)

    running = worker.submit(operation)
    assert started.wait(60)
    if is_stopped:
        worker.stop()
    with pytest.raises(RequestError, match=r"server ends|longer than"):
        running.result(60)
    assert not may_end.is_set()
    worker.stop()
    worker.seconds = 60
    may_end.set()
    assert worker.submit(lambda: 2).result(60) == 2


def test_a_full_queue_refuses_more():
    worker = Worker(60, 1)
    started, may_end = threading.Event(), threading.Event()

    def wait():
        started.set()
        may_end.wait(60)

    running = worker.submit(wait)
    assert started.wait(60)
    waiting = worker.submit(lambda: 3)
    with pytest.raises(RequestError, match="1 requests wait") as error:
        worker.submit(lambda: 4)
    assert error.value.status == 503
    may_end.set()
    running.result(60)
    assert waiting.result(60) == 3


def test_work_of_a_client_that_has_gone_is_not_done():
    worker = Worker(60, 8)
    may_end = threading.Event()
    done = []
    worker.submit(lambda: may_end.wait(60))
    gone = worker.submit(lambda: done.append(1))
    assert gone.cancel()
    may_end.set()
    worker.submit(lambda: None).result(60)
    assert done == []


def test_work_that_waited_too_long_is_refused():
    now = [0.0]
    worker = Worker(600, 8, lambda: now[0])
    started, may_end = threading.Event(), threading.Event()

    def wait():
        started.set()
        may_end.wait(60)

    worker.submit(wait)
    late = worker.submit(lambda: 1)
    assert started.wait(60)
    now[0] = 300.0
    in_time = worker.submit(lambda: 2)
    now[0] = 601.0
    may_end.set()
    with pytest.raises(RequestError, match="waited for 600 s"):
        late.result(60)
    assert in_time.result(60) == 2


def test_stopping_ends_the_work_and_refuses_what_waits():
    worker = Worker(60, 8)
    started = threading.Event()
    running = worker.submit(lambda: spin(started))
    waiting = worker.submit(lambda: 1)
    assert started.wait(60)
    worker.stop()
    for future in (running, waiting):
        with pytest.raises(RequestError, match="the server ends"):
            future.result(60)
