"""Memory of processes that work together, as Linux counts it."""

import subprocess
import sys
from pathlib import Path

import pytest

from experiments.benchmarks import process_memory

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").exists(),
    reason="no /proc/PID/smaps_rollup on this system",
)
N_BYTES = 64_000_000
TAKE_MEMORY = """
import mmap, sys
print("started", flush=True)
input()
block = mmap.mmap(-1, int(sys.argv[1]), flags=mmap.MAP_PRIVATE)
for start in range(0, len(block), mmap.PAGESIZE):
    block[start] = 1
print("taken", flush=True)
input()
"""


def test_memory_of_its_own_counts_whole_and_is_private():
    # in a process that does nothing else: a test's own objects come and go
    words = [sys.executable, "-c", TAKE_MEMORY, str(N_BYTES)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(words, text=True, **pipes) as process:
        process.stdout.readline()
        before = process_memory.memory_mb(process.pid)
        print("take", file=process.stdin, flush=True)
        process.stdout.readline()
        after = process_memory.memory_mb(process.pid)
        print("end", file=process.stdin, flush=True)
    assert process.returncode == 0
    for name in before:
        assert after[name] - before[name] == pytest.approx(64, abs=8)


def test_a_process_that_has_ended_holds_nothing():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    held = process_memory.memory_mb(process.pid)
    assert held == {"pss_mb": 0.0, "private_mb": 0.0}


TAKE_MEMORY_UNTIL = """
import mmap, os, sys, time
block = mmap.mmap(-1, int(sys.argv[1]), flags=mmap.MAP_PRIVATE)
for start in range(0, len(block), mmap.PAGESIZE):
    block[start] = 1
end = time.monotonic() + 120
while not os.path.exists(sys.argv[2]) and time.monotonic() < end:
    time.sleep(0.01)
"""


def test_both_processes_of_a_program_are_counted(tmp_path, monkeypatch):
    """It goes on until both have been seen to hold what they take, however late a sample comes."""
    seen, largest = tmp_path / "seen", {}
    memory_mb = process_memory.memory_mb

    def see(process):
        held = memory_mb(process)
        largest[process] = max(held["private_mb"], largest.get(process, 0.0))
        if sum(mb >= 64 for mb in largest.values()) == 2:
            seen.touch()
        return held

    (tmp_path / "funcppo.py").write_text(TAKE_MEMORY_UNTIL)
    with monkeypatch.context() as patch:
        patch.setattr(process_memory, "ROOT", tmp_path)
        patch.setattr(process_memory, "memory_mb", see)
        held = process_memory.run_shared([str(N_BYTES), str(seen)])
    # beside that an interpreter each
    assert 128 < held["private_mb"] < 192
    assert held["private_mb"] <= held["pss_mb"] < 192


def test_a_program_that_fails_is_an_error_with_its_line():
    with pytest.raises(RuntimeError, match="no_such_program"):
        process_memory.run_shared(["no_such_program"])


def test_outputs_are_compared_without_their_times():
    first = b'{\n "n": 1,\n "total_seconds": 2.5\n}'
    assert process_memory.without_times(first) == b'{\n "n": 1,\n}'
