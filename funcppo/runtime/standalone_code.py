"""Code that Inductor wrote, run without Inductor and Dynamo, whose imports are most of a start with full caches.

`standalone_writer.py` makes a folder of it from a function that is compiled: the wrapper, Python that allocates and
calls kernels; the kernels, as machine code; which leaf of the arguments each input is, and where each output goes.
`load` reads such a folder. Shapes, strides and types are those of the call that it was made for; who calls it compares
them.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import math
import operator
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from ctypes import c_int, c_long, c_void_p
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcppo.core import tree

CONTENTS_FILE = "contents.pickle"
_view: Any = torch._C._dynamo.guards._reinterpret_tensor  # pyright: ignore[reportAttributeAccessIssue]
ALIGNMENT = 16  # bytes, that kernels of a GPU may rely on
# where the code of this kind of kernel reads how to find a tensor's memory
DATA_POINTER_VARIABLE = "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"
# of this package: which module declares an operator that a wrapper may call
OPERATOR_MODULES = {
    "threefry2x32": "funcppo.core.random",
    "dense_forward": "funcppo.nets.dense_operator",
    "dense_backward": "funcppo.nets.dense_operator",
    "dense_values": "funcppo.nets.dense_operator",
    "sum_parts": "funcppo.kg.scores.message_sums",
    "skinny_bmm": "funcppo.runtime.inductor.batched_gemm",
    "stable_argsort": "funcppo.runtime.inductor.stable_argsort",
}


class CppKernel(NamedTuple):
    """A kernel for a CPU: a function of an extension module."""

    file: str
    module: str
    function: str


class TritonKernel(NamedTuple):
    """A kernel for a GPU, and how it is launched."""

    file: str
    function: str
    device: int
    n_warps: int
    shared_bytes: int
    arg_types: str  # a character each, as PyTorch's launcher takes them
    positions: tuple[int, ...]  # among the arguments of `run`, of those passed
    # grid by the numbers among the arguments of `run`
    grids: dict[tuple[object, ...], tuple[int, int, int]]


class View(NamedTuple):
    """A part of a tensor's memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int  # from where the tensor begins, in elements


class Origin(NamedTuple):
    """Where a leaf of a result comes from."""

    is_output: bool  # of the wrapper, or a leaf of the arguments
    number: int
    view: View | None  # None: as it is


class Contents(NamedTuple):
    """What a folder holds, besides the files of the kernels."""

    source: str  # of the wrapper
    operators: tuple[str, ...]  # of this package, that the wrapper calls
    # functions of PyTorch by the names of the wrapper: paths from `torch`
    externals: dict[str, str]
    kernels: dict[str, CppKernel | TritonKernel]
    constants: dict[str, Tensor]
    # of each input of the wrapper, the number of the leaf that it is
    inputs: tuple[int, ...]
    # inputs whose memory must begin at a multiple of `ALIGNMENT`
    aligned_inputs: tuple[int, ...]
    outputs: tuple[Origin, ...]  # each leaf of the result
    result: object  # a tree of its structure


class _LaunchedKernel:
    """A kernel of a GPU, loaded; called as Inductor calls its own."""

    def __init__(self, kernel: TritonKernel, folder: Path) -> None:
        self._kernel = kernel
        self._launcher: Any = torch._C._StaticCudaLauncher  # pyright: ignore[reportAttributeAccessIssue]
        self._function, *_ = self._launcher._load_kernel(
            str(folder / kernel.file),
            kernel.function,
            kernel.shared_bytes,
            kernel.device,
        )

    def run(self, *args: Any, stream: int) -> None:
        """Launch the kernel."""
        kernel = self._kernel
        grid = kernel.grids[numbers_of(args)]
        passed = [args[i] for i in kernel.positions]
        # scratch memory, which is not used
        passed += [None] * (len(kernel.arg_types) - len(passed))
        self._launcher._launch_kernel(
            self._function,
            *grid,
            kernel.n_warps,
            kernel.shared_bytes,
            kernel.arg_types,
            tuple(passed),
            stream,
        )


class StandaloneCode:
    """A compiled function, for arguments of fixed shapes."""

    def __init__(
        self,
        contents: Contents,
        call: Callable[[list[Tensor]], Sequence[Tensor]],
    ) -> None:
        self._contents = contents
        self._call = call

    def __call__(self, *args: object) -> Any:
        """Return the function's value."""
        contents = self._contents
        leaves = tree.leaves(args)
        inputs = [leaves[i] for i in contents.inputs]
        for i in contents.aligned_inputs:
            if inputs[i].data_ptr() % ALIGNMENT:
                inputs[i] = inputs[i].clone()
        outputs = self._call(inputs)
        result: list[Tensor] = []
        for is_output, i, view in contents.outputs:
            x = outputs[i] if is_output else leaves[i]
            result.append(x if view is None else _view(x, *view))
        return tree.unflatten(contents.result, result)


def numbers_of(args: Sequence[object]) -> tuple[object, ...]:
    """The arguments of a kernel that are no tensors: they determine its grid."""
    return tuple(x for x in args if not isinstance(x, Tensor))


def load(folder: Path) -> StandaloneCode | None:
    """The code of a folder; None if there is none.

    Raises:
      Exception: it cannot be read, or does not fit this machine.
    """
    try:
        data = (folder / CONTENTS_FILE).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    contents: Contents = pickle.loads(data)
    for name in contents.operators:
        importlib.import_module(OPERATOR_MODULES[name])

    kernels = {
        name: _load_kernel(kernel, folder)
        for name, kernel in contents.kernels.items()
    }
    externals = {
        name: operator.attrgetter(path)(torch)
        for name, path in contents.externals.items()
    }
    names = {
        **vars(math),
        "torch": torch,
        "math": math,
        "device": torch.device,
        "empty_strided": torch.empty_strided,
        "c_void_p": c_void_p,
        "c_long": c_long,
        "c_int": c_int,
        "extern_kernels": SimpleNamespace(**externals),
        "get_raw_stream": getattr(torch._C, "_cuda_getCurrentRawStream", None),
        **contents.constants,
        **kernels,
    }
    path = str(folder / "wrapper.py")
    exec(compile(contents.source, path, "exec"), names)
    return StandaloneCode(contents, names["call"])


def _load_kernel(kernel: CppKernel | TritonKernel, folder: Path) -> object:
    """What the wrapper calls."""
    if isinstance(kernel, TritonKernel):
        return _LaunchedKernel(kernel, folder)
    if kernel.module not in sys.modules:
        os.environ[DATA_POINTER_VARIABLE] = str(
            torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr  # pyright: ignore[reportAttributeAccessIssue]
        )
        loader = importlib.machinery.ExtensionFileLoader(
            kernel.module, str(folder / kernel.file)
        )
        spec = importlib.util.spec_from_loader(kernel.module, loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        sys.modules[kernel.module] = module
    return getattr(sys.modules[kernel.module], kernel.function)
