"""Code of Inductor runs without it: in a process that imports no compiler, and to the bit as with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from funcppo.optim import clip_by_global_norm
from funcppo.runtime import standalone_code
from funcppo.runtime.compile import compile_function
from funcppo.runtime.standalone_code import (
    ALIGNMENT,
    Contents,
    Origin,
    TritonKernel,
    _LaunchedKernel,
)

PROGRAM = """
import os, sys
os.environ["TORCHINDUCTOR_CACHE_DIR"] = sys.argv[1]
import torch
torch.set_num_threads(1)
torch.set_float32_matmul_precision("highest")
from funcppo.optim import clip_by_global_norm
from funcppo.runtime.compile import compile_function
from funcppo.runtime.compile_cache import compile_events
grads, norm = compile_function(clip_by_global_norm)(torch.arange(6.0), torch.tensor(1.0))
print([event.cache_hit for event in compile_events], grads.tolist(), norm.item())
print([name for name in ("torch._dynamo", "torch._inductor", "sympy") if name in sys.modules])
"""


def test_a_later_process_imports_no_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    # as other tests may have done; a key distinguishes it from the default
    torch.set_float32_matmul_precision("highest")
    x, limit = torch.arange(6.0), torch.tensor(1.0)
    grads, norm = compile_function(clip_by_global_norm)(x, limit)
    first, second = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        check=True,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    ).stdout.splitlines()
    assert first == f"[True] {grads.tolist()} {norm.item()}"
    assert second == "[]"


SCRIPT = """
import os, sys
from typing import NamedTuple
import torch
from funcppo.runtime.compile import compile_function
from funcppo.runtime.compile_cache import compile_events

class State(NamedTuple):
    x: torch.Tensor

def step(state, gravity):
    return State(state.x * SCALE + gravity.pull)

class Gravity(NamedTuple):
    pull: torch.Tensor

SCALE = float(sys.argv[1])
torch.set_num_threads(1)
result = compile_function(step)(State(torch.ones(3)), Gravity(torch.ones(3)))
assert type(result) is State
print(result.x.tolist(), [event.cache_hit for event in compile_events], "torch._dynamo" in sys.modules)
"""


def test_a_function_of_a_script_is_found_again_unless_what_it_reads_changed(
    tmp_path,
):
    script = tmp_path / "own.py"
    script.write_text(SCRIPT)
    env = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    said = [
        subprocess.run(
            [sys.executable, str(script), scale],
            check=True,
            capture_output=True,
            text=True,
            env=env,
        ).stdout.strip()
        for scale in ("2", "2", "3")
    ]
    assert said == [
        "[3.0, 3.0, 3.0] [False] True",
        "[3.0, 3.0, 3.0] [True] False",
        "[4.0, 4.0, 4.0] [False] True",
    ]


def test_nothing_is_loaded_where_nothing_was_written(tmp_path):
    assert standalone_code.load(tmp_path / "none") is None


@pytest.mark.parametrize("scratch", [0, 2])
def test_a_kernel_of_a_gpu_is_launched_as_it_was_noted(
    tmp_path, monkeypatch, scratch
):
    """What of its arguments is passed on, and the grid for the numbers among them."""
    launched = []
    monkeypatch.setattr(
        torch._C,
        "_StaticCudaLauncher",
        SimpleNamespace(
            _load_kernel=lambda *args: launched.append(args) or (11, 1, 0),
            _launch_kernel=lambda *args: launched.append(args),
        ),
        raising=False,
    )
    kernel = _LaunchedKernel(
        TritonKernel(
            file="kernel_0",
            function="triton_poi",
            device=1,
            n_warps=4,
            shared_bytes=8,
            arg_types="OOi" + "O" * scratch,
            positions=(0, 1, 3),
            grids={(64, 5): (2, 1, 1), (64, 6): (3, 1, 1)},
        ),
        tmp_path,
    )
    x, y = torch.zeros(2), torch.ones(2)
    kernel.run(x, y, 64, 6, stream=7)
    assert launched[0] == (str(tmp_path / "kernel_0"), "triton_poi", 8, 1)
    *rest, passed, stream = launched[1]
    assert rest == [11, 3, 1, 1, 4, 8, "OOi" + "O" * scratch]
    assert passed[0] is x and passed[1] is y
    assert passed[2:] == (6, *[None] * scratch) and stream == 7
    with pytest.raises(KeyError):  # another size is another grid
        kernel.run(x, y, 65, 6, stream=7)


def test_an_input_that_kernels_read_in_blocks_is_copied_where_it_is_not_aligned():
    """The other inputs are passed on as they are."""
    seen = []

    def call(inputs):
        seen.extend(inputs)
        return [inputs[0] + inputs[1]]

    code = standalone_code.StandaloneCode(
        Contents(
            source="",
            operators=(),
            externals={},
            kernels={},
            constants={},
            inputs=(0, 1),
            aligned_inputs=(0,),
            outputs=(Origin(True, 0, None),),
            result=[0],
        ),
        call,
    )
    storage = torch.arange(12.0)
    assert storage.data_ptr() % ALIGNMENT == 0
    x, y = storage[1:5], storage[2:6]
    (total,) = code(x, y)
    assert torch.equal(total, x + y)
    assert seen[0].data_ptr() % ALIGNMENT == 0 and torch.equal(seen[0], x)
    assert seen[1] is y
    (total,) = code(storage[4:8], y)
    assert seen[2].data_ptr() == storage[4:8].data_ptr()
