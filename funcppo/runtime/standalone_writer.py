"""Writes `standalone_code` of a function that Inductor compiled: what one call of it allocates, launches and returns.

What is written is read again, run on the same arguments, and kept only if all results are equal to the bit.
"""

from __future__ import annotations

import ast
import pickle
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import BuiltinFunctionType, ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from funcppo.core import tree
from funcppo.runtime import standalone_code
from funcppo.runtime.standalone_code import (
    OPERATOR_MODULES,
    Contents,
    CppKernel,
    Origin,
    TritonKernel,
    View,
)

# statements of a wrapper that load or time it
LOADING = re.compile(r"\b(async_compile|_SymmetricMemory|AsyncCompile)\b")
EXTERNAL = re.compile(r"\bextern_kernels\.(\w+)")
OPERATOR = re.compile(r"\btorch\.ops\.funcppo\.(\w+)")


class NotStandaloneError(RuntimeError):
    """Code of Inductor that cannot be run without it; the message says what it needs."""


class _GraphCall(NamedTuple):
    """One call of what Inductor compiled."""

    graph: Any  # `CompiledFxGraph`
    inputs: list[Tensor]
    outputs: Sequence[Tensor]


class _Launches:
    """The launches of one kernel of a GPU."""

    def __init__(self) -> None:
        self.grids: dict[tuple[object, ...], tuple[int, int, int]] = {}
        self.launcher: Any = None


def write(
    code: Callable[..., Any], args: tuple[object, ...], folder: Path
) -> None:
    """Write the code of a call, from one more call.

    Args:
      code: a compiled function that was called with such arguments before.
      folder: to be made; nothing is left there in case of an error.

    Raises:
      NotStandaloneError: it needs Inductor.
      Exception: whatever else is not as expected.
    """
    calls: list[_GraphCall] = []
    with _watch_graphs(calls), _watch_kernels() as launches:
        result = code(*args)
    if len(calls) != 1:
        raise NotStandaloneError(f"expected one graph, got {len(calls)}")

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        new = Path(temporary, folder.name)
        new.mkdir()
        contents = _contents(calls[0], args, result, launches, new)
        data = pickle.dumps(contents)
        (new / standalone_code.CONTENTS_FILE).write_bytes(data)
        loaded = standalone_code.load(new)
        assert loaded is not None
        _check_equal(loaded(*args), result)
        with suppress(OSError):  # another process was first
            new.rename(folder)


@contextmanager
def _watch_graphs(calls: list[_GraphCall]) -> Iterator[None]:
    """Note the calls of what Inductor compiled."""
    from torch._inductor.output_code import CompiledFxGraph

    run = CompiledFxGraph.__call__

    def noted(self: Any, inputs: Any) -> Any:
        before = list(inputs)  # the wrapper clears the list
        outputs = run(self, inputs)
        calls.append(_GraphCall(self, before, outputs))
        return outputs

    with patch.object(CompiledFxGraph, "__call__", noted):
        yield


@contextmanager
def _watch_kernels() -> Iterator[dict[int, _Launches]]:
    """Note the launches of kernels of a GPU, by the id of Inductor's object for each."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    run = CachingAutotuner.run
    launches: dict[int, _Launches] = {}

    def noted(self: Any, *args: Any, stream: int, **kwargs: Any) -> Any:
        (launcher,) = self.launchers  # an earlier call has chosen one
        names = launcher.__globals__
        runner = names["runner"]
        of_kernel = launches.setdefault(id(self), _Launches())
        of_kernel.launcher = launcher

        def launch(*grid_and_rest: Any) -> Any:
            key = standalone_code.numbers_of(args)
            of_kernel.grids[key] = grid_and_rest[:3]
            return runner(*grid_and_rest)

        with patch.dict(names, {"runner": launch}):
            return run(self, *args, stream=stream, **kwargs)

    with patch.object(CachingAutotuner, "run", noted):
        yield launches


def _contents(
    call: _GraphCall,
    args: tuple[object, ...],
    result: object,
    launches: dict[int, _Launches],
    folder: Path,
) -> Contents:
    """What is written of a call; files of kernels are copied into the folder."""
    graph = call.graph
    source = _wrapper_source(graph.source_code)
    operators = tuple(sorted(set(OPERATOR.findall(source))))
    unknown = set(operators) - set(OPERATOR_MODULES)
    if unknown:
        raise NotStandaloneError(f"operators {sorted(unknown)}")

    module = _module(graph)
    leaves = tree.leaves(args)
    result_leaves = tree.leaves(result)
    if not all(isinstance(x, Tensor) for x in result_leaves):
        raise NotStandaloneError("a result that is no tensor")
    numbers = list(range(len(result_leaves)))
    return Contents(
        source=source,
        operators=operators,
        externals={
            name: _external_path(name) for name in set(EXTERNAL.findall(source))
        },
        kernels=_copy_kernels(module, source, launches, folder),
        constants=dict(graph.constants or {}),
        inputs=tuple(_input_place(x, leaves) for x in call.inputs),
        aligned_inputs=tuple(graph.inputs_to_check),
        outputs=tuple(_origin(x, call.outputs, leaves) for x in result_leaves),
        result=tree.unflatten(result, numbers),  # pyright: ignore[reportArgumentType]
    )


def _wrapper_source(source: str) -> str:
    """The statements of a wrapper that make its function `call`."""
    kept: list[ast.stmt] = []
    for statement in ast.parse(source).body:
        is_kept = isinstance(statement, (ast.Assign, ast.ClassDef))
        is_call = isinstance(statement, ast.FunctionDef) and (
            statement.name == "call" or statement.name.startswith("partition_")
        )
        if (is_kept or is_call) and not LOADING.search(ast.unparse(statement)):
            kept.append(statement)
    return ast.unparse(ast.Module(kept, []))


def _module(graph: Any) -> ModuleType:
    """The module that Inductor loaded of a wrapper."""
    from torch._inductor.codecache import PyCodeCache, get_path

    path = get_path(graph.cache_key, "py")[2]
    for module in reversed(PyCodeCache.modules):
        if module.__file__ == path:
            return module
    raise NotStandaloneError("a wrapper that is no module")


def _input_place(x: object, leaves: Sequence[object]) -> int:
    """Which leaf of the arguments an input of the wrapper is."""
    i = _find(x, leaves)
    if i is None:
        raise NotStandaloneError("an input that is made elsewhere")
    return i


def _find(x: object, xs: Sequence[object]) -> int | None:
    """The first place where an object is; None if it is at none."""
    return next((i for i, y in enumerate(xs) if y is x), None)


def _origin(
    x: Tensor, outputs: Sequence[object], leaves: Sequence[object]
) -> Origin:
    """Where a leaf of the result comes from: an output of the wrapper, a leaf of the arguments, or a view of one."""
    bases = [*outputs, *leaves]
    i = _find(x, bases)
    if i is not None:
        return _from(i, outputs, None)
    for i, base in enumerate(bases):
        if (
            isinstance(base, Tensor)
            and base.dtype == x.dtype
            and base.untyped_storage().data_ptr()
            == x.untyped_storage().data_ptr()
        ):
            offset = int(x.storage_offset() - base.storage_offset())
            view = View(tuple(x.shape), x.stride(), offset)
            return _from(i, outputs, view)
    raise NotStandaloneError("a result that is made elsewhere")


def _from(i: int, outputs: Sequence[object], view: View | None) -> Origin:
    """The origin of one of the outputs, or of the leaves that follow them."""
    n = len(outputs)
    return Origin(True, i, view) if i < n else Origin(False, i - n, view)


def _external_path(name: str) -> str:
    """Where PyTorch has a function that Inductor calls."""
    from torch._inductor.select_algorithm import extern_kernels

    function = getattr(extern_kernels, name)
    if function is getattr(torch, name, None):
        return name
    if isinstance(function, torch._ops.OpOverload):
        return f"ops.{function!s}"
    raise NotStandaloneError(f"the function {name} of Inductor")


def _copy_kernels(
    module: ModuleType,
    source: str,
    launches: dict[int, _Launches],
    folder: Path,
) -> dict[str, CppKernel | TritonKernel]:
    """The kernels that a wrapper calls, and their files in the folder."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    kernels: dict[str, CppKernel | TritonKernel] = {}
    used = set(re.findall(r"\w+", source))
    for name in sorted(used & set(vars(module))):
        value = vars(module)[name]
        # names of kernels are too long for files
        file = folder / f"kernel_{len(kernels)}"
        if isinstance(value, CachingAutotuner):
            kernels[name] = _copy_triton_kernel(value, launches, file)
        elif isinstance(value, BuiltinFunctionType):
            owner: Any = value.__self__
            path = getattr(owner, "__file__", None)
            # Inductor names the module of a kernel after the kernel.
            if path and owner.__name__.endswith(f".{value.__name__}"):
                shutil.copyfile(path, file)
                kernels[name] = CppKernel(
                    file.name, owner.__name__, value.__name__
                )
    return kernels


def _copy_triton_kernel(
    kernel: Any, launches: dict[int, _Launches], file: Path
) -> TritonKernel:
    """A kernel of a GPU and its launches; its machine code is copied into a file."""
    noted = launches.get(id(kernel))
    if noted is None:
        raise NotStandaloneError(
            f"{kernel.fn.__name__}, which another wrapper launched"
        )
    device = kernel.triton_meta.get("device", 0) or 0
    static, machine_code = _static_kernel(noted.launcher, device)
    file.write_bytes(machine_code)
    launcher = noted.launcher.__code__
    arguments = launcher.co_varnames[: launcher.co_argcount]
    passed = [
        argument
        for i, argument in enumerate(static.arg_names)
        if i not in static.full_constexprs
    ]
    scratch = static.has_global_scratch + static.has_profile_scratch
    return TritonKernel(
        file=file.name,
        function=static.name,
        device=device,
        n_warps=static.num_warps,
        shared_bytes=static.shared,
        arg_types=static.arg_tys + "O" * scratch,
        positions=tuple(arguments.index(argument) for argument in passed),
        grids=noted.grids,
    )


def _static_kernel(launcher: Any, device: int) -> tuple[Any, bytes]:
    """What PyTorch's launcher needs to know of a kernel, and its machine code."""
    from torch._inductor.runtime.cache_dir_utils import triton_cache_dir
    from torch._inductor.runtime.runtime_utils import triton_hash_to_path_key
    from torch._inductor.runtime.static_triton_launcher import (
        StaticallyLaunchedCudaKernel,
    )

    names = launcher.__globals__
    static = getattr(names["runner"], "__self__", None)
    if isinstance(static, StaticallyLaunchedCudaKernel):
        folder = triton_hash_to_path_key(static.hash)
        path = Path(triton_cache_dir(device), folder, f"{static.name}.cubin")
        return static, path.read_bytes()
    # PyTorch uses the launcher of Triton, for example for kernels of long names.
    compiled = names["bin"]
    compiled._cubin_path = ""  # asked for, and not read
    return StaticallyLaunchedCudaKernel(compiled), compiled.asm["cubin"]


def _check_equal(actual: object, expected: object) -> None:
    """Check that two results are equal to the bit, with their layout in memory.

    Raises:
      NotStandaloneError: they differ.
    """
    for x, y in zip(tree.leaves(actual), tree.leaves(expected), strict=True):
        is_alike = (
            x.shape == y.shape
            and x.stride() == y.stride()
            and x.dtype == y.dtype
            and x.device == y.device
        )
        if not is_alike or not torch.equal(_bytes(x), _bytes(y)):
            raise NotStandaloneError("results that differ")


def _bytes(x: Tensor) -> Tensor:
    return x.reshape(-1).contiguous().view(torch.uint8)
