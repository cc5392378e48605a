"""Compiled code is found on disk by a later process, and only if it is the code of such a call."""

from __future__ import annotations

import os
import shutil
import types
from functools import partial
from pathlib import Path

import pytest
import torch

from funcppo import optim
from funcppo.envs import classic
from funcppo.optim import clip_by_global_norm
from funcppo.runtime import compile_cache, reasons
from funcppo.runtime.compile_cache import CachedFunction
from funcppo.runtime.monitor import Monitor
from funcppo.runtime.reasons import RecompileCode
from tests.forked import printed_by

LIMIT = torch.tensor(1.0)
# Where a size does not matter, vectors have 4 or 6 elements: Inductor calls the C++ compiler once for equal sources.


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty cache."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path / "funcppo"


def foreign(x):
    """Of another module than this project's."""
    return x + 1


def scaled(cfg, x):
    """Whose numbers depend on what kind of number a setting is."""
    return x * cfg.eps if cfg.eps else x / cfg.eps


def files(folder):
    """The files of code below a folder, but those that need no compiler."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and path.parent.suffix != ".standalone"
    )


@pytest.mark.parametrize("needs_compiler", [False, True])
def test_another_process_finds_what_this_one_compiled_and_traces_nothing(
    folder, needs_compiler
):
    torch.set_float32_matmul_precision(
        "highest"
    )  # as other tests may have done; the key distinguishes it from the default
    x = torch.arange(6.0)
    got, norm = CachedFunction(clip_by_global_norm, None)(x, LIMIT)
    torch.testing.assert_close((got, norm), clip_by_global_norm(x, LIMIT))
    (file,) = files(folder)
    if needs_compiler:
        shutil.rmtree(file.with_suffix(".standalone"))
    before = file.stat().st_mtime_ns
    program = f"""
import os, torch
os.environ["TORCHINDUCTOR_CACHE_DIR"] = {str(folder.parent)!r}
from funcppo import optim
from funcppo.optim import clip_by_global_norm
from funcppo.runtime.compile_cache import CachedFunction, compile_events
torch.set_num_threads(1)
torch.set_float32_matmul_precision("highest")
from torch._dynamo import convert_frame
def refuse(*args, **kwargs): raise AssertionError("traced or loaded")
convert_frame.fullgraph_capture = refuse
if not {needs_compiler}:
    torch.compiler.load_compiled_function = refuse
got, norm = CachedFunction(clip_by_global_norm, None)(torch.arange(6.0), torch.tensor(1.0))
assert [event.cache_hit for event in compile_events] == [True]
print(norm.item(), got.sum().item())
"""
    assert printed_by(program) == [f"{norm.item()} {got.sum().item()}"]
    assert files(folder) == [file] and file.stat().st_mtime_ns == before


def test_each_kind_of_arguments_has_its_own_code(folder):
    """Shapes, strides, dtypes, one tensor in two places, and global settings of PyTorch."""
    fn = CachedFunction(clip_by_global_norm, None)
    x = torch.rand(4, 4)
    calls = [
        (x, LIMIT),
        (x[:2], LIMIT),
        (x.t(), LIMIT),
        (x.double(), LIMIT),
        ((x, x), LIMIT),
        ((x, x + 1), LIMIT),
    ]
    with Monitor() as monitor:
        for n, args in enumerate(calls, 1):
            torch.testing.assert_close(fn(*args), clip_by_global_norm(*args))
            torch.testing.assert_close(fn(*args), clip_by_global_norm(*args))
            assert len(files(folder)) == n
        with torch.no_grad():
            fn(*calls[-1])
        assert len(files(folder)) == len(calls) + 1
        report = monitor.report()
    assert (report["compiles"], report["cache_hits"], report["recompiles"]) == (
        7,
        0,
        6,
    )
    assert any(
        "(4, 4)" in why.replace("torch.Size([4, 4])", "(4, 4)")
        for why in monitor.recompile_reasons
    )
    assert (
        monitor.recompile_reasons[-1]
        == "clip_by_global_norm: PyTorch's settings differ"
    )


def test_what_others_wrote_is_known_by_its_code(folder):
    """A name does not show what a function of another project computes."""
    x = torch.rand(3)
    for n, body in enumerate((foreign, lambda x: x - 1), 1):
        other = types.FunctionType(body.__code__, globals(), "foreign")
        other.__module__, other.__qualname__ = __name__, "foreign"
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(globals(), "foreign", other)
            for fn in (other, other):
                torch.testing.assert_close(CachedFunction(fn, None)(x), body(x))
        assert len(files(folder)) == n


def test_where_caches_are_turned_off_nothing_is_kept_or_found(
    folder, monkeypatch
):
    monkeypatch.setattr(compile_cache, "uncached_codes", {})
    monkeypatch.setattr(compile_cache, "uncached_reasons", {})
    x = torch.rand(4)
    with torch.compiler.config.patch(force_disable_caches=True):
        fn = CachedFunction(clip_by_global_norm, None)
        torch.testing.assert_close(fn(x, LIMIT), clip_by_global_norm(x, LIMIT))
        assert not fn.is_cached(x, LIMIT)
    assert not folder.exists() or files(folder) == []
    assert compile_cache.uncached_codes == {
        "clip_by_global_norm": "caches_disabled"
    }


def test_what_has_no_name_is_compiled_with_guards_and_not_cached(
    folder, monkeypatch
):
    monkeypatch.setattr(compile_cache, "uncached_codes", {})
    monkeypatch.setattr(compile_cache, "uncached_reasons", {})
    nameless, x = lambda x: x - 1, torch.rand(3)
    torch.testing.assert_close(CachedFunction(nameless, None)(x), x - 1)
    assert files(folder) == []
    assert compile_cache.uncached_codes == {"<lambda>": "not_named"}


def test_gradients_and_transforms_pass_through_as_with_guards(folder):
    fn = CachedFunction(clip_by_global_norm, None)
    x = torch.rand(4)
    fn(x, LIMIT)
    files_before = files(folder)
    leaf = x.clone().requires_grad_()
    (got,) = torch.autograd.grad(fn(leaf, LIMIT)[1], leaf)
    torch.testing.assert_close(got, x / x.norm())
    # what `torch.compile` says to it
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.vmap(lambda row: fn(row, LIMIT)[1])(torch.stack([x, 2 * x]))
    assert files(folder) == files_before


def test_numbers_of_float64_are_inputs_like_others():
    fn, x = (
        CachedFunction(clip_by_global_norm, None),
        torch.arange(4.0, dtype=torch.float64),
    )
    for limit in (1.0, 2.0, 0.5):
        args = x, torch.tensor(limit, dtype=torch.float64)
        torch.testing.assert_close(fn(*args), clip_by_global_norm(*args))


def test_settings_without_a_hash_are_compiled_with_guards_and_not_cached(
    folder,
):
    class Scale:
        __hash__ = None  # pyright: ignore[reportAssignmentType]

        def __init__(self, by):
            self.by = by

    fn = CachedFunction(lambda scale, x: x * scale.by, None)
    assert (
        fn(Scale(2.0), torch.ones(3)).tolist() == [2.0] * 3
        and fn(Scale(3.0), torch.ones(3)).tolist() == [3.0] * 3
    )
    assert files(folder) == []


def test_settings_that_are_equal_but_not_alike_have_their_own_code(
    folder, monkeypatch
):
    monkeypatch.setattr(scaled, "__module__", optim.__name__)
    monkeypatch.setattr(optim, "scaled", scaled, raising=False)
    x, fn = torch.arange(4), CachedFunction(scaled, None)
    for n, by in enumerate((2, 2.0, 0.0, -0.0), 1):
        got, want = (
            fn(optim.AdamConfig(eps=by), x),
            scaled(optim.AdamConfig(eps=by), x),
        )
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, equal_nan=True)
        assert len(files(folder)) == n


def test_a_tensor_that_a_function_holds_is_not_taken_for_another(folder):
    """Its values are part of the code, and not of its name."""
    for limit in (1.0, 2.0):
        fn = CachedFunction(
            partial(clip_by_global_norm, max_norm=torch.tensor(limit)), None
        )
        torch.testing.assert_close(
            fn(torch.arange(4.0)),
            clip_by_global_norm(torch.arange(4.0), torch.tensor(limit)),
        )
    assert files(folder) == []


def test_nothing_is_cached_if_the_sources_changed_since_they_were_imported(
    folder, monkeypatch
):
    """The times of files alone count: a clock that lags behind them changes nothing."""
    monkeypatch.setattr(compile_cache, "uncached_reasons", {})
    late = dict.fromkeys(compile_cache._source_times(), 2**62)
    monkeypatch.setattr(compile_cache, "_source_times", lambda: late)
    for times, n_files in ((compile_cache._SOURCE_TIMES, 0), (late, 1)):
        monkeypatch.setattr(compile_cache, "_SOURCE_TIMES", times)
        torch.testing.assert_close(
            CachedFunction(clip_by_global_norm, None)(torch.ones(4), LIMIT)[1],
            torch.tensor(2.0),
        )
        assert len(files(folder)) == n_files
    assert compile_cache.uncached_reasons == {
        "clip_by_global_norm": "the sources changed since they were read"
    }
    assert compile_cache.uncached_codes["clip_by_global_norm"] == (
        "sources_changed"
    )


def test_what_cannot_be_compiled_ahead_of_time_is_compiled_with_guards(
    folder, monkeypatch
):
    monkeypatch.setattr(compile_cache, "uncached_codes", {})
    monkeypatch.setattr(compile_cache, "uncached_reasons", {})
    monkeypatch.setattr(compile_cache, "_trace_and_compile", lambda *_: 1 / 0)
    torch.testing.assert_close(
        CachedFunction(clip_by_global_norm, None)(torch.ones(4), LIMIT)[1],
        torch.tensor(2.0),
    )
    assert compile_cache.uncached_codes == {
        "clip_by_global_norm": "not_ahead_of_time"
    }
    assert (
        "division by zero"
        in (compile_cache.uncached_reasons["clip_by_global_norm"])
    )
    assert files(folder) == []


def test_compiling_again_fails_where_it_is_not_allowed(folder):
    fn = CachedFunction(clip_by_global_norm, None)
    with torch.compiler.set_stance("fail_on_recompile"):
        fn(torch.ones(4), LIMIT)
        with pytest.raises(
            RuntimeError, match="to be compiled again, because 0 differs"
        ):
            fn(torch.ones(3), LIMIT)


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        (torch.ones(3), RecompileCode.SHAPE),
        (torch.ones(4, dtype=torch.float64), RecompileCode.DTYPE),
        (torch.ones(4, device="meta"), RecompileCode.DEVICE),
    ],
)
def test_what_changed_of_a_tensor_has_a_code(changed, code, folder):
    fn = CachedFunction(clip_by_global_norm, None)
    with torch.compiler.set_stance("fail_on_recompile"):
        fn(torch.ones(4), LIMIT)
        with pytest.raises(RuntimeError) as caught:
            fn(changed, LIMIT)
    assert reasons.recompile_code(str(caught.value)) is code


def test_a_function_is_compiled_so_often_and_no_more(folder, monkeypatch):
    monkeypatch.setattr(compile_cache, "MIN_RECOMPILE_LIMIT", 2)
    fn = CachedFunction(clip_by_global_norm, None)
    with torch._dynamo.config.patch(recompile_limit=2):
        for n in (4, 6):
            fn(torch.ones(n), LIMIT)
        with pytest.raises(
            RuntimeError,
            match=r"compiled 2 times, the last because 0 differs: .*\(6,\).*\(3,\)",
        ):
            fn(torch.ones(3), LIMIT)


def test_other_sources_and_other_options_are_other_code(folder, monkeypatch):
    x = torch.rand(4)
    assert not CachedFunction(clip_by_global_norm, None).is_cached(x, LIMIT)
    CachedFunction(clip_by_global_norm, None)(x, LIMIT)
    assert CachedFunction(clip_by_global_norm, None).is_cached(x, LIMIT)
    other = CachedFunction(clip_by_global_norm, {"epilogue_fusion": False})
    assert not other.is_cached(x, LIMIT)
    other(x, LIMIT)
    assert other.is_cached(x, LIMIT)
    assert not CachedFunction(
        clip_by_global_norm, {"epilogue_fusion": True}
    ).is_cached(x, LIMIT)
    monkeypatch.setattr(compile_cache, "SOURCE_DIGEST", "others")
    assert not CachedFunction(clip_by_global_norm, None).is_cached(x, LIMIT)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("TRITON_PTXAS_PATH", True),
        ("TORCHELASTIC_RUN_ID", True),
        ("TORCHINDUCTOR_MAX_AUTOTUNE", False),
    ],
)
def test_what_pytorch_sets_while_it_runs_makes_no_other_code(
    monkeypatch, name, found
):
    fn, x = CachedFunction(clip_by_global_norm, None), torch.arange(6.0)
    fn(x, LIMIT)
    assert fn.is_cached(x, LIMIT)
    monkeypatch.setenv(name, "1")
    assert fn.is_cached(x, LIMIT) == found


def test_equal_settings_have_one_file_whatever_strings_they_share():
    fn, one = CachedFunction(clip_by_global_norm, None), "epoch"
    assert (
        fn._cache_path((one, one))
        == fn._cache_path((one, "".join(["ep", "och"])))
        != fn._cache_path((one, "epochs"))
    )


def test_a_partial_application_has_one_file_before_and_after_it_is_compiled():
    fn, x = partial(clip_by_global_norm, max_norm=1.0), torch.rand(4)
    before = CachedFunction(fn, None)._cache_path((x,))
    vars(fn)  # as `torch.compile` does
    assert CachedFunction(fn, None)._cache_path((x,)) == before is not None


@pytest.mark.parametrize(
    ("name", "said"),
    [("", "compiled again"), (".standalone/contents.pickle", "not used")],
)
def test_a_broken_file_is_reported_and_written_again(folder, name, said):
    x = torch.rand(4)
    CachedFunction(clip_by_global_norm, None)(x, LIMIT)
    (code,) = files(folder)
    file = Path(f"{code}{name}")
    if not name:
        shutil.rmtree(f"{code}.standalone")
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.warns(UserWarning, match=said):
        torch.testing.assert_close(
            CachedFunction(clip_by_global_norm, None)(x, LIMIT),
            clip_by_global_norm(x, LIMIT),
        )
    assert files(folder) == [code] and file.stat().st_size > len(whole) // 2


def test_if_nothing_can_be_written_the_code_runs_and_a_warning_says_so(
    tmp_path,
):
    (tmp_path / "funcppo").write_text("in the way")
    x = torch.rand(4)
    with pytest.warns(UserWarning, match="not cached"):
        torch.testing.assert_close(
            CachedFunction(clip_by_global_norm, None)(x, LIMIT),
            clip_by_global_norm(x, LIMIT),
        )


def test_inside_another_graph_it_is_the_function_itself():
    inner = CachedFunction(clip_by_global_norm, None)
    x = torch.rand(4)
    outer = torch.compile(
        lambda x: inner(x, LIMIT)[0] * 2, backend="eager", fullgraph=True
    )
    torch.testing.assert_close(outer(x), clip_by_global_norm(x, LIMIT)[0] * 2)


def test_code_of_a_patched_module_is_not_that_of_the_plain_one(
    folder, monkeypatch
):
    """Both ways, and the numbers are those of the values at the first call."""
    args = torch.linspace(-1.0, 1.0, 8).reshape(2, 4), torch.ones(2)
    for n, gravity in enumerate((8.0, 9.8), 1):
        monkeypatch.setattr(cartpole, "GRAVITY", gravity)
        fn = CachedFunction(classic._euler_step, None)
        assert not fn.is_cached(*args)
        torch.testing.assert_close(fn(*args), classic._euler_step(*args))
        assert fn.is_cached(*args) and len(files(folder)) == n


def test_code_that_reads_a_tensor_is_not_kept_and_the_reason_is_recorded(
    folder, monkeypatch
):
    monkeypatch.setattr(compile_cache, "uncached_reasons", {})
    monkeypatch.setattr(cartpole, "GRAVITY", torch.tensor(8.0))
    args = torch.linspace(-1.0, 1.0, 8).reshape(2, 4), torch.ones(2)
    fn = CachedFunction(classic._euler_step, None)
    with Monitor() as monitor:
        torch.testing.assert_close(fn(*args), classic._euler_step(*args))
        report = monitor.report()
    reasons = report["uncached_reasons"]
    assert report["uncached_codes"]["_euler_step"] == "no_digest"
    assert files(folder) == [] and reasons == {
        "_euler_step": "funcppo.envs.classic.GRAVITY is a "
        "Tensor: its values may change"
    }


def test_triton_is_told_what_inductor_will_tell_it(tmp_path, monkeypatch):
    """The folder and the assembler of PyTorch, if it has one; nothing for a CPU; a user's settings stay."""
    names = ("TRITON_CACHE_DIR", "TRITON_PTXAS_PATH")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch" / "init"))

    def told(device):
        compile_cache.prepare_triton(torch.device(device))
        return [os.environ.get(name) for name in names]

    for name in names:
        monkeypatch.setenv(name, "restored by pytest")
        monkeypatch.delenv(name)
    assert told("cpu") == [None, None]
    assert told("cuda:1") == [f"{tmp_path}/triton/1", None]
    assembler = tmp_path / "torch" / "bin" / "ptxas"
    assembler.parent.mkdir(parents=True)
    assembler.touch()
    assert told("cuda") == [f"{tmp_path}/triton/1", str(assembler)]
