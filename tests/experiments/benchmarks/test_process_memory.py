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


def test_both_processes_of_a_program_are_counted(tmp_path):
    out = tmp_path / "out.json"
    words = ["provable", "countries_s1", "--height", "1", "--json", str(out)]
    held = process_memory.run_shared(words)
    assert out.stat().st_size > 0
    # PyTorch alone takes more than a hundred in each
    assert 200 < held["private_mb"] <= held["pss_mb"]
    with pytest.raises(RuntimeError, match="no_such_program"):
        process_memory.run_shared(["no_such_program"])


def test_outputs_are_compared_without_their_times():
    first = b'{\n "n": 1,\n "total_seconds": 2.5\n}'
    assert process_memory.without_times(first) == b'{\n "n": 1,\n}'
