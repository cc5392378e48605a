"""What is written of compiled code gives what it gives, or nothing is written and the reason is told."""

from __future__ import annotations

import ast
from functools import cache
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from funcppo.core import tree
from funcppo.runtime import compile_cache, standalone_code, standalone_writer
from funcppo.runtime.compile import compile_function
from funcppo.runtime.standalone_writer import NotStandaloneError, write


class Result(NamedTuple):
    """A tree of results."""

    product: Tensor
    order: tuple[Tensor, Tensor]
    row: Tensor
    same: Tensor


def mixed(a: Tensor, b: Tensor, c: Tensor) -> Result:
    """A kernel, functions of PyTorch, a view of an argument, a view of a result and an argument as it is."""
    product = torch.addmm(a, b, c).relu()
    return Result(product.t(), tuple(torch.sort(a, dim=0)), a[1], c)


def args() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.rand(5, 5, generator=generator) for _ in range(3))


@cache
def compiled():
    """The code, called once."""
    fn = torch.compile(mixed, fullgraph=True, dynamic=False)
    fn(*args())
    return fn


def same(x: object, y: object) -> bool:
    pairs = zip(tree.leaves(x), tree.leaves(y), strict=True)
    return tree.structure(x) == tree.structure(y) and all(
        torch.equal(a, b) and a.stride() == b.stride() for a, b in pairs
    )


def test_results_are_those_of_the_code_for_other_numbers_too(tmp_path):
    write(compiled(), args(), tmp_path / "code")
    code = standalone_code.load(tmp_path / "code")
    for values in (args(), tuple(x - 0.5 for x in args())):
        result = code(*values)
        assert isinstance(result, Result) and result.same is values[2]
        assert result.row.data_ptr() == values[0][1].data_ptr()
        assert same(result, compiled()(*values))


def test_two_processes_may_write_the_same(tmp_path):
    for _ in range(2):
        write(compiled(), args(), tmp_path / "code")
    assert [path.name for path in tmp_path.iterdir()] == ["code"]
    assert same(
        standalone_code.load(tmp_path / "code")(*args()), compiled()(*args())
    )


def refused(tmp_path, code) -> str:
    """Why nothing is written of code."""
    with pytest.raises(NotStandaloneError) as error:
        write(code, args(), tmp_path / "code")
    assert list(tmp_path.iterdir()) == []
    return str(error.value)


def test_what_is_not_all_that_the_code_does_is_refused(tmp_path):
    fn = compiled()
    assert refused(tmp_path, lambda *xs: mixed(*xs)) == (
        "expected one graph, got 0"
    )
    assert "got 2" in refused(tmp_path, lambda *xs: (fn(*xs), fn(*xs)))
    assert "a result that is made elsewhere" in refused(
        tmp_path, lambda *xs: fn(*xs).product + 1
    )
    assert "an input that is made elsewhere" in refused(
        tmp_path, lambda *xs: fn(*(x + 1 for x in xs)).product
    )
    assert "no tensor" in refused(tmp_path, lambda *xs: (*fn(*xs), 3))


def test_other_results_are_refused(tmp_path, monkeypatch):
    other = mixed(*(x + 1 for x in args()))
    monkeypatch.setattr(standalone_code, "load", lambda _: lambda *_: other)
    assert refused(tmp_path, compiled()) == "results that differ"


def test_an_operator_that_no_module_is_known_to_declare_is_refused(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(
        standalone_writer,
        "_wrapper_source",
        lambda _: "torch.ops.funcppo.unheard_of.default",
    )
    assert refused(tmp_path, compiled()) == "operators ['unheard_of']"


def test_what_cannot_be_written_is_loaded_by_the_compiler_and_says_why(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile_cache, "compiler_reasons", {})
    monkeypatch.setattr(standalone_writer, "write", lambda *_: 1 / 0)
    from funcppo.optim import clip_by_global_norm

    x, limit = torch.rand(4), torch.tensor(1.0)
    for _ in range(2):
        _, norm = compile_function(clip_by_global_norm)(x, limit)
        torch.testing.assert_close(norm, x.norm())
    assert compile_cache.compiler_reasons == {
        "clip_by_global_norm": "division by zero"
    }


def test_code_that_processes_run_together_is_not_run_once_more(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile_cache, "compiler_reasons", {})
    reason = "several processes run it together"
    monkeypatch.setattr(compile_cache, "_reason_to_run_once", lambda: reason)
    from funcppo.optim import clip_by_global_norm

    compile_function(clip_by_global_norm)(torch.rand(4), torch.tensor(1.0))
    assert list(tmp_path.rglob("*.standalone")) == []
    assert compile_cache.compiler_reasons == {"clip_by_global_norm": reason}


def test_a_wrapper_keeps_what_its_function_needs():
    source = """
import torch
from torch._inductor.async_compile import AsyncCompile
aten = torch.ops.aten
async_compile = AsyncCompile()
kernel_0 = async_compile.triton("kernel_0", '''...''')
async_compile.wait(globals())
del async_compile
def partition_0(args): return args
def call(args): return partition_0(args)
def benchmark_compiled_module(args): pass
"""
    kept = ast.parse(standalone_writer._wrapper_source(source)).body
    assert [type(statement).__name__ for statement in kept] == [
        "Assign",
        "FunctionDef",
        "FunctionDef",
    ]


def test_of_a_gpu_kernel_the_arguments_that_are_no_constants_are_passed(
    tmp_path, monkeypatch
):
    """`x`, `y`, `n` and `BLOCK`, of which Triton has made the last and the third constants."""
    static = SimpleNamespace(
        name="triton_poi",
        arg_names=["x", "y", "n", "BLOCK"],
        full_constexprs=[2, 3],
        has_global_scratch=True,
        has_profile_scratch=False,
        num_warps=4,
        shared=0,
        arg_tys="OO",
    )
    monkeypatch.setattr(
        standalone_writer, "_static_kernel", lambda *_: (static, b"code")
    )
    kernel = SimpleNamespace(
        fn=SimpleNamespace(__name__="triton_poi"), triton_meta={"device": 0}
    )

    def launcher(x, y, n, stream):
        """As Inductor makes it."""

    noted = standalone_writer._Launches()
    noted.grids, noted.launcher = {(64,): (1, 1, 1)}, launcher
    file = tmp_path / "kernel_0"
    got = standalone_writer._copy_triton_kernel(
        kernel, {id(kernel): noted}, file
    )
    assert file.read_bytes() == b"code"
    assert got.positions == (0, 1) and got.arg_types == "OOO"
    assert got.grids == {(64,): (1, 1, 1)} and got.file == "kernel_0"
    with pytest.raises(NotStandaloneError, match="another wrapper launched"):
        standalone_writer._copy_triton_kernel(kernel, {}, file)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("n_terms", [1, 30])
def test_kernels_of_a_gpu_are_launched_without_a_compiler(tmp_path, n_terms):
    """Those of long names, too, for which PyTorch takes the launcher of Triton."""

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        for i in range(n_terms):
            operators = (torch.sin, torch.cos, torch.erf, torch.sigmoid)
            x = operators[i % 4](x) * y.clamp(0.1, 1.0 + i)
        return torch.sort(x, dim=1).values @ y.t(), x.sum(1)

    code = torch.compile(fn, fullgraph=True, dynamic=False)
    values = (
        torch.rand(64, 80, device="cuda"),
        torch.rand(64, 80, device="cuda"),
    )
    code(*values)
    write(code, values, tmp_path / "code")
    loaded = standalone_code.load(tmp_path / "code")
    for shift in (0.0, 1.0):
        shifted = tuple(x + shift for x in values)
        assert same(loaded(*shifted), code(*shifted))
