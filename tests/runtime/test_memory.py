"""Bytes in use are read from the system's files, and follow what is allocated."""

from __future__ import annotations

import gc
import os
import resource
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from funcppo.runtime import memory
from tests.forked import printed_by

STATUS = "Name:\tpython\nVmPeak:\t 9 kB\nVmHWM:\t    3072 kB\nVmRSSX:\t 7 kB\nVmRSS:\t    2048 kB\n"
SIZE = 64 << 20
on_linux = pytest.mark.skipif(
    not memory._PROCESS_STATUS.exists(),
    reason="no /proc: only the peak is known",
)


@pytest.fixture(autouse=True)
def measured(measure_free_memory, monkeypatch):
    """Free memory is measured here, unlike in other tests."""
    monkeypatch.setattr(memory, "free_bytes", measure_free_memory)


@on_linux
def test_an_allocation_beyond_the_limit_is_an_error():
    limit = memory.used_bytes("cpu") + (1 << 30)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with memory.limit_memory(limit, "cpu"):
        assert memory.free_bytes("cpu") < limit
        with pytest.raises(RuntimeError) as error:
            torch.zeros(1 << 30)
        assert memory.is_out_of_memory(error.value)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    with memory.limit_memory(None, "cpu"):
        assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_a_status_file_is_read_in_bytes(monkeypatch, tmp_path):
    """2048 KiB are 2 MiB."""
    (tmp_path / "status").write_text(STATUS)
    monkeypatch.setattr(memory, "_PROCESS_STATUS", tmp_path / "status")
    assert memory.used_bytes("cpu") == 2 << 20
    assert memory.peak_bytes("cpu") == 3 << 20


@pytest.fixture
def no_proc(monkeypatch, tmp_path):
    """A system without /proc."""
    for name in ("_PROCESS_STATUS", "_RESET_PEAK", "_MACHINE_MEMORY"):
        monkeypatch.setattr(memory, name, tmp_path / "absent")
    monkeypatch.setattr(memory, "_PROCESS_GROUPS", tmp_path / "absent")


def test_without_proc_psutil_tells(no_proc, monkeypatch):
    """The calls and fields are those of psutil 7.2."""
    held = SimpleNamespace(rss=20, peak_wset=30)
    machine = SimpleNamespace(total=100, available=40)
    psutil: Any = ModuleType("psutil")
    psutil.Process = lambda: SimpleNamespace(memory_info=lambda: held)
    psutil.virtual_memory = lambda: machine
    monkeypatch.setitem(sys.modules, "psutil", psutil)
    memory.reset_peak("cpu")
    assert memory.used_bytes("cpu") == 20
    assert memory.total_bytes("cpu") == 100
    assert memory.free_bytes("cpu") == 40
    monkeypatch.setattr(sys, "platform", "win32")
    assert memory.peak_bytes("cpu") == 30


@on_linux
def test_an_allocated_tensor_counts_until_it_is_freed():
    """In a process of its own: objects and threads of other tests come and go."""
    used = printed_by(f"""
import torch
from funcppo.runtime import memory

torch.ones(1, dtype=torch.uint8)  # loads what the first one needs
print(memory.used_bytes("cpu"))
x = torch.ones({SIZE}, dtype=torch.uint8)
print(memory.used_bytes("cpu"))
del x
print(memory.used_bytes("cpu"))
""")
    before, during, after = map(int, used)
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


def control_group(folder, files, limit, used, cached):
    """A control group with a limit."""
    folder.mkdir(parents=True, exist_ok=True)
    _, limit_file, use_file, cached_field = files
    (folder / limit_file).write_text(f"{limit}\n")
    (folder / use_file).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{cached_field} {cached}\n")


@pytest.mark.parametrize(
    "line, files",
    [
        ("4:cpu,memory:/a/b", memory._GROUP_FILES_V1),
        ("0::/a/b", memory._GROUP_FILES_V2),
    ],
    ids=["version 1", "version 2"],
)
@pytest.mark.parametrize(
    "limits, total, free",
    [
        # of the root, of a and of a/b; each uses 300, 100 of it for files
        (["max", None, None], 1000, 900),
        ([800, None, None], 800, 600),
        (["max", 700, "max"], 700, 500),
        ([None, 900, 400], 400, 200),
        ([100, None, 900], 100, 0),
        ([None, None, None], 1000, 900),
    ],
)
def test_memory_keeps_to_the_limits_of_all_control_groups_above(
    tmp_path, monkeypatch, line, files, limits, total, free
):
    """A container sees its own group at the root, whatever its path on the host."""
    root = tmp_path / "cgroup"
    monkeypatch.setattr(memory, "_GROUPS", root)
    monkeypatch.setattr(memory, "_PROCESS_GROUPS", tmp_path / "groups")
    (tmp_path / "groups").write_text(f"1:cpu:/x\n{line}\n")
    fields = {"MemTotal": 1000, "MemAvailable": 900}
    monkeypatch.setattr(memory, "_read_kib_field", lambda _, x: fields[x])
    monkeypatch.setattr(memory, "_MACHINE_MEMORY", tmp_path)
    for folder, limit in zip(("", "a", "a/b"), limits):
        if limit is not None:
            group = root / files[0] / folder
            control_group(group, files, limit, 300, 100)
    assert memory.total_bytes("cpu") == total
    assert memory.free_bytes("cpu") == free
