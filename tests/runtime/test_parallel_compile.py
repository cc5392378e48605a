"""What other processes compile is found on disk; what cannot be sent to them is left to this one."""

import pytest
import torch

from funcppo import train_step
from funcppo.core import random
from funcppo.interfaces import NoWorld
from funcppo.runtime import compile_cache, parallel_compile
from funcppo.runtime.compile import compile_function, select_strategy
from funcppo.runtime.compile_job import serialize_job
from tests.learning import cartpole_config


def doubled(x, y):
    """Something to compile."""
    return (2.0 * x + y).sum(0)


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    """No code on disk, and two processes at most."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(parallel_compile, "MAX_WORKERS", 2)


@pytest.fixture
def no_process(monkeypatch):
    monkeypatch.setattr(
        parallel_compile,
        "_start_worker",
        lambda: pytest.fail("a process was started"),
    )


def test_what_a_process_that_was_started_ahead_compiles_is_found_on_disk(
    monkeypatch,
):
    """The other process has no job, and is stopped."""
    args = torch.rand(5, 3), torch.rand(3)
    parallel_compile.start_workers(3)
    ahead = [*parallel_compile._idle_workers]
    monkeypatch.setattr(parallel_compile, "_start_worker", pytest.fail)
    with parallel_compile.in_background() as background:
        parallel_compile.start_workers(2)  # they are there already
        assert background.submit("doubled", serialize_job(doubled, args))
        background.wait("doubled")
    assert len(ahead) == 2 and parallel_compile._idle_workers == []
    assert [worker.returncode for worker in ahead] == [-9, 0]

    monkeypatch.setattr(compile_cache, "compile_events", [])
    torch.testing.assert_close(compile_function(doubled)(*args), doubled(*args))
    assert [event.cache_hit for event in compile_cache.compile_events] == [True]


def test_a_process_that_is_not_waited_for_is_stopped(monkeypatch):
    monkeypatch.setattr(
        parallel_compile, "WORKER_MODULE", "tests.runtime.sleeping_worker"
    )
    with parallel_compile.in_background() as background:
        assert background.submit("sleep", b"")
        (worker,) = background._workers.values()
        assert worker.poll() is None
    assert worker.returncode == -9


def test_a_process_that_takes_too_long_is_stopped(monkeypatch):
    monkeypatch.setattr(
        parallel_compile, "WORKER_MODULE", "tests.runtime.sleeping_worker"
    )
    monkeypatch.setattr(parallel_compile, "WORKER_TIMEOUT_SECONDS", 0.01)
    with parallel_compile.in_background() as background:
        background.submit("sleep", b"")
        background.wait("sleep")
        background.wait("of no such job")
        assert background._workers["sleep"].returncode == -9


def test_what_cannot_be_sent_is_left_to_this_process(no_process):
    with parallel_compile.in_background() as background:
        assert not background.submit("nothing", None)
        background.wait("nothing")


def test_few_cores_start_no_process(monkeypatch, no_process):
    monkeypatch.setattr(parallel_compile, "MAX_WORKERS", 0)
    parallel_compile.start_workers()
    job = serialize_job(doubled, (torch.rand(2), torch.rand(2)))
    with parallel_compile.in_background() as background:
        assert not background.submit("doubled", job)


def test_a_cache_that_holds_code_starts_no_process_ahead(tmp_path, no_process):
    (tmp_path / compile_cache.CODE_DIR).mkdir(parents=True)
    parallel_compile.start_workers()
    assert parallel_compile._idle_workers == []


def test_what_was_started_ahead_is_stopped_where_nothing_is_compiled(
    monkeypatch,
):
    monkeypatch.setattr(
        parallel_compile, "WORKER_MODULE", "tests.runtime.sleeping_worker"
    )
    parallel_compile.start_workers(1)
    (worker,) = parallel_compile._idle_workers
    cfg = cartpole_config(n_envs=2, n_steps=2, n_minibatches=1)
    state = train_step.init(cfg, NoWorld(), random.key(0))
    _, record = select_strategy(
        train_step.collect,
        train_step.EAGER_PARTS,
        cfg,
        NoWorld(),
        state,
        "eager",
    )
    assert record.strategy == "eager" and worker.returncode == -9
