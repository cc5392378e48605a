"""Bytes in use are read from the system's files, and follow what is allocated."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import pytest
import torch

from funcppo.runtime import memory

STATUS = "Name:\tpython\nVmPeak:\t 9 kB\nVmHWM:\t    3072 kB\nVmRSSX:\t 7 kB\nVmRSS:\t    2048 kB\n"
SIZE = 64 << 20
on_linux = pytest.mark.skipif(
    not memory._PROCESS_STATUS.exists(),
    reason="no /proc: only the peak is known",
)


def test_a_status_file_is_read_in_bytes(monkeypatch, tmp_path):
    """2048 KiB are 2 MiB."""
    (tmp_path / "status").write_text(STATUS)
    monkeypatch.setattr(memory, "_PROCESS_STATUS", tmp_path / "status")
    assert memory.used_bytes("cpu") == 2 << 20
    assert memory.peak_bytes("cpu") == 3 << 20


def test_a_field_that_is_missing_is_named(monkeypatch, tmp_path):
    (tmp_path / "status").write_text("Name:\tpython\n")
    monkeypatch.setattr(memory, "_PROCESS_STATUS", tmp_path / "status")
    with pytest.raises(
        ValueError,
        match=r"status: expected a line that begins with VmRSS:, got none$",
    ):
        memory.used_bytes("cpu")


def test_without_status_files_the_peak_since_the_start_counts(
    monkeypatch, tmp_path
):
    """Also where the present value is asked for: an upper bound of it."""
    monkeypatch.setattr(memory, "_PROCESS_STATUS", tmp_path / "absent")
    monkeypatch.setattr(memory, "_RESET_PEAK", tmp_path / "absent")
    memory.reset_peak("cpu")
    assert not (tmp_path / "absent").exists()
    # an interpreter with PyTorch
    assert memory.used_bytes("cpu") == memory.peak_bytes("cpu") >= 16 << 20


@on_linux
def test_an_allocated_tensor_counts_until_it_is_freed():
    """Within an eighth of its size: other threads may allocate meanwhile."""
    before = memory.used_bytes("cpu")
    x = torch.ones(SIZE, dtype=torch.uint8)
    during = memory.used_bytes("cpu")
    del x
    after = memory.used_bytes("cpu")
    assert during - before == pytest.approx(SIZE, abs=SIZE // 8)
    assert after - before == pytest.approx(0, abs=SIZE // 8)


@on_linux
@pytest.mark.skipif(
    not os.access(memory._RESET_PEAK, os.W_OK),
    reason="the peak cannot be reset here",
)
@pytest.mark.parametrize("hole", [False, True])
def test_the_peak_counts_from_its_reset(hole):
    """In a process of its own: threads of other tests allocate too.

    With a hole, the tensor is served from freed memory that the C library still holds.
    """
    program = f"""
import torch
from funcppo.runtime import memory

blocks = [torch.ones(64 << 10, dtype=torch.uint8) for _ in range(2048)]
if {hole}:
    del blocks[:-1]
x = torch.ones({SIZE}, dtype=torch.uint8)
del x
memory.reset_peak("cpu")
low = memory.peak_bytes("cpu")
print(low - memory.used_bytes("cpu"))
x = torch.ones({SIZE}, dtype=torch.uint8)
del x
print(memory.peak_bytes("cpu") - low)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
    )
    above, rise = map(int, done.stdout.split())
    assert [above, rise] == pytest.approx([0, SIZE], abs=SIZE // 8)


@on_linux
def test_the_machine_has_the_memory_that_the_system_says():
    assert memory.total_bytes("cpu") == os.sysconf(
        "SC_PHYS_PAGES"
    ) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="no GPU: its memory cannot be measured",
)
def test_gpu_memory_is_that_of_allocated_tensors():
    torch.zeros(1, device="cuda")  # what the first tensor leaves behind
    gc.collect()
    before = memory.used_bytes("cuda")
    memory.reset_peak("cuda")
    x = torch.ones(SIZE, dtype=torch.uint8, device="cuda")
    assert memory.used_bytes("cuda") - before == SIZE
    del x
    assert memory.used_bytes("cuda") == before
    assert memory.peak_bytes("cuda") - before >= SIZE
    assert memory.total_bytes("cuda") > SIZE


@on_linux
def test_free_memory_is_within_the_total():
    assert 0 < memory.free_bytes("cpu") < memory.total_bytes("cpu")


def test_free_memory_keeps_to_the_limit_of_the_container(tmp_path, monkeypatch):
    limit, use = tmp_path / "limit", tmp_path / "use"
    monkeypatch.setattr(memory, "_GROUP_FILES", ((str(limit), str(use)),))
    monkeypatch.setattr(memory, "_read_kib_field", lambda *_: 1000)
    assert memory.free_bytes("cpu") == 1000
    use.write_text("300\n")
    for text, free in (("max\n", 1000), ("900\n", 600), ("200\n", 0)):
        limit.write_text(text)
        assert memory.free_bytes("cpu") == free
