"""Settings of the whole suite: no deadlines, one thread a process, its own compile cache, a count of skipped tests."""

import gc
import itertools
import os
import signal
from collections import Counter

# In each new cache folder Inductor compiles a probe for each set of vector instructions that the processor names: 20 s,
# and nothing here tests the compiler. It is read as PyTorch is imported, by the processes of tests too.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# Programs that tests start beside each other would wait for each other's threads: ten times as long as with one each.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell's job in the background ignores Ctrl-C, and so would the programs that tests start and end by it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import hypothesis
import pytest
import torch

from funcppo.cli import common
from funcppo.runtime import memory

# Properties are tried with 25 examples, by `make test-long` with 300; a slow one sets a lower number for both.
# A deadline, or a check of how long the cases take to draw, would make a test fail on a slow or busy machine.
for profile, n_examples in (("suite", 25), ("long", 300)):
    hypothesis.settings.register_profile(
        profile,
        max_examples=n_examples,
        deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
hypothesis.settings.load_profile("suite")

# Files that take longest: they run first, so that no worker is left alone with one of them in the end.
LONGEST = (
    "tests/test_transitions.py",
    "tests/runtime/test_compile.py",
    "tests/kg/logic/test_fixpoint.py",
    "tests/test_several_processes.py",
    "tests/test_examples.py",
)

# Three processes have room for parts of the largest size in three quarters of it.
FREE_BYTES = 16_000_000_000


def pytest_configure():
    """Use one thread: the tensors of tests are small, and tests run side by side.

    Garbage is collected less often: a pass over all objects of PyTorch takes long, and finds little.
    """
    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        # The first gradient starts a thread for each GPU, and a fork of a process with such threads computes none. A
        # build for GPUs that finds none takes eight for there as soon as it compiles.
        torch.ones(1, requires_grad=True).sum().backward()
    # Programs set it too, and what is compiled under another setting is compiled again.
    torch.set_float32_matmul_precision("highest")
    gc.set_threshold(100_000, 20, 20)


def pytest_collection_modifyitems(items):
    """Order the files; pytest-xdist keeps that order with `--no-loadscope-reorder`."""
    place = {file: i for i, file in enumerate(LONGEST)}
    items.sort(
        key=lambda item: place.get(item.nodeid.partition("::")[0], len(LONGEST))
    )


@pytest.fixture(scope="session", autouse=True)
def separate_caches(tmp_path_factory):
    """Tests patch what they compile: no program may find such code, and no test that of a program.

    The workers of pytest-xdist share it: no graph is compiled by both.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    own_folder = tmp_path_factory.getbasetemp() / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
        # of mined rules; here those of fixtures that several tests share
        fixtures = own_folder / "fixtures"
        fixtures.mkdir(parents=True)  # PyTorch warns where there is none
        patch.setenv("XDG_CACHE_HOME", str(fixtures))
        yield


test_numbers = itertools.count()


@pytest.fixture(autouse=True)
def no_user_cache(tmp_path_factory, monkeypatch):
    """Mined rules are kept in a folder of each test: none finds those of another, or of a run of the tests before."""
    folder = tmp_path_factory.getbasetemp() / "cache" / str(next(test_numbers))
    folder.mkdir(parents=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))


@pytest.fixture(autouse=True)
def work_ends_in_time(monkeypatch):
    """However slow the machine is, work ends by itself after a first signal, which is not repeated."""
    monkeypatch.setattr(common, "GRACE_SECONDS", 600.0)


@pytest.fixture(scope="session", autouse=True)
def measure_free_memory():
    """Programs find as much free memory as if nothing else ran: what is free decides how large their parts are.

    Returns:
      The function that measures it.
    """
    measure = memory.free_bytes

    def free_bytes(device):
        return FREE_BYTES if str(device) == "cpu" else measure(device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "free_bytes", free_bytes)
        yield measure


def pytest_terminal_summary(terminalreporter):
    """Print how many tests were skipped for each reason."""
    reports = terminalreporter.stats.get("skipped", [])
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ") for report in reports
    )
    if reasons:
        terminalreporter.section("skipped tests")
    for reason, count in reasons.most_common():
        terminalreporter.line(f"{count:4}  {reason}")
