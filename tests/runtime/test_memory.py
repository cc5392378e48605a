"""Bytes in use are read from the system's files, and follow what is allocated."""

import gc
import os
import re
import resource
import subprocess
import sys
from functools import partial

import pytest
import torch

from examples import stage_data
from funcppo.core import tree
from funcppo.runtime import memory
from funcppo.runtime.capture import capture
from funcppo.runtime.memory import AsyncReadback, prefetch, to_device, to_host
from tests.forked import printed_by
from tests.learning import devices, on_gpu

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


@on_gpu
@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_an_allocation_on_a_gpu_beyond_the_limit_is_an_error(device):
    limit = memory.used_bytes(device) + (1 << 26)
    allocate = partial(torch.zeros, 1 << 27, dtype=torch.uint8, device=device)
    too_much = pytest.raises(torch.OutOfMemoryError)
    with memory.limit_memory(limit, device), too_much:
        allocate()
    allocate()


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
    words = [sys.executable, "-c", program]
    above, rise = map(int, subprocess.check_output(words, text=True).split())
    assert [above, rise] == pytest.approx([0, SIZE], abs=SIZE // 8)


def test_a_peak_that_cannot_be_reset_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "_RESET_PEAK", tmp_path)  # no file
    memory.reset_peak("cpu")
    assert memory.peak_bytes("cpu") > 0


@on_gpu
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
    [("4:cpu,memory:/a/b", memory._GROUP_FILES_V1), ("0::/a/b", memory._GROUP_FILES_V2)],
    ids=["version 1", "version 2"],
)  # fmt: skip
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


@devices
def test_each_step_reads_the_values_put_before_it(device):
    """A running sum of twenty batches, no host wait between them."""
    assert stage_data.main(device) == 1000 * sum(range(20))


@devices
def test_a_leaf_that_does_not_fit_raises_and_is_named(device):
    staging = stage_data.StagingBuffers(
        (torch.zeros(3), torch.zeros(2)), device
    )
    problem = "values.1: expected torch.float32 [2], got torch.float32 [3]"
    with pytest.raises(ValueError, match=re.escape(problem)):
        staging.put((torch.zeros(3), torch.zeros(3)))


@devices
@pytest.mark.parametrize(("n", "size"), [(0, 4), (3, 4), (4, 4), (1001, 7)])
def test_prefetched_chunks_are_the_rows_in_order(n, size, device):
    rows = torch.arange(3 * n, dtype=torch.int32).view(n, 3)
    parts = [part.clone() for part in prefetch(rows, size, device)]
    assert {part.device.type for part in parts} <= {device}
    assert all(len(part) <= size for part in parts)
    assert torch.equal(torch.cat(parts).cpu(), rows)


@devices
def test_a_readback_returns_this_value_or_the_one_before(device):
    readback, seen = AsyncReadback(), []
    for i in range(5):
        numbers = readback(torch.tensor([i, 10 * i], device=device))
        seen.append(numbers if numbers is None else numbers.tolist())
    now = [[i, 10 * i] for i in range(5)]
    assert seen == (now if device == "cpu" else [None, *now[:-1]])


@devices
def test_a_tree_goes_to_the_device_and_back(device):
    there = (torch.arange(6).view(2, 3), (torch.tensor([True, False]),))
    moved = to_device(there, device)
    back = to_host(moved)
    for a, b, c in zip(*map(tree.leaves, (there, moved, back))):
        assert b.device.type == device and c.device.type == "cpu"
        assert torch.equal(a, c) and a.dtype == c.dtype


@on_gpu
def test_a_step_that_stages_data_itself_is_no_graph_and_says_why():
    staging = stage_data.StagingBuffers(torch.zeros(3), "cuda")

    def step(x):
        staging.put(torch.ones(3))
        return x + 1, ()

    captured = capture(step, torch.zeros(3, device="cuda"))
    assert captured.replay_mode == "none"
    assert "StagingBuffers.put: expected a call" in captured.fallback_reason
