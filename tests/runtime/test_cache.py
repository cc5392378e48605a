"""Compiled code is found on disk by a later process, and only if it is the code of such a call."""

import getpass
import importlib
import json
import os
import tempfile
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import FunctionType

import pytest
import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir

from funcppo import optim
from funcppo.core import tree
from funcppo.optim import clip_by_global_norm
from funcppo.runtime import cache, capture
from funcppo.runtime.cache import CompiledFunction
from funcppo.runtime.capture import ReasonCode
from funcppo.runtime.monitor import Monitor
from tests.forked import printed

LIMIT = torch.tensor(1.0)
# Most functions here are matrix products, which Inductor leaves to PyTorch: the C++ compiler takes seconds. Where size
# does not matter, vectors have 4 elements: it is called once for equal sources.


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """No saved functions, but what Inductor has compiled before."""
    compiled = tmp_path / "compiled"
    compiled.mkdir()
    monkeypatch.setattr(cache, "functions_folder", lambda: compiled)
    monkeypatch.setattr(cache, "uncached_reasons", {})
    # Sources may change while tests run.
    monkeypatch.setattr(cache, "STARTED_AT", float("inf"))
    return compiled


def n_saved(folder):
    return len([*folder.glob("*.pt")])


def is_found(fn, *args, options=None):
    """Whether a later process would find the code of a call, which equals the eager one."""
    n_before = len(cache.compile_events)
    got = CompiledFunction(fn, options)(*args)
    torch.testing.assert_close(got, fn(*args))
    (event,) = cache.compile_events[n_before:]
    return event.cache_hit


def foreign(x):
    """Of another module than this project's."""
    return x @ x


def squares(x, y):
    """Products of each matrix of a tree with its transpose, and a number."""
    return tree.map(lambda leaf: leaf @ leaf.t(), x), y


def scaled(cfg, x):
    """Whose numbers depend on what kind of number a setting is."""
    return x * cfg.eps if cfg.eps else x / cfg.eps


PROGRAM = """
import os, sys
folder, *gravities = sys.argv[1:]
sys.path.insert(0, folder)
os.environ["XDG_CACHE_HOME"] = folder
os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
sys.dont_write_bytecode = True
import torch, physics
from funcppo.runtime.cache import CompiledFunction, compile_events
torch.set_num_threads(1)
for physics.GRAVITY in map(float, gravities):
    fallen = CompiledFunction(physics.fall)(torch.ones(4, 4))
    print(fallen[0, 0].item(), compile_events[-1].cache_hit)
"""
PHYSICS = """
import torch
GRAVITY = 9.0
def fall(x):
    return torch.addmm(x, x, x, beta=GRAVITY)
"""


def test_a_later_process_finds_the_code_unless_a_global_changed(tmp_path):
    """A value that a program gives a global of a user's module."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    (tmp_path / "physics.py").write_text(PHYSICS)

    run = partial(printed, program, str(tmp_path))
    assert run("9") == ["13.0 False"]
    assert run("9", "2") == ["13.0 True", "6.0 False"]


@pytest.mark.parametrize("changed", ["physics", "air"])
def test_other_sources_of_a_module_are_new_code(changed, tmp_path, monkeypatch):
    """The function's own module, or one that it calls."""
    physics, air = f"physics_of_{changed}", f"air_of_{changed}"
    texts = {
        air: "def slow(x):\n    return x @ x\n",
        physics: f"from {air} import slow\ndef fall(x):\n    return slow(x @ x)\n",
    }
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
        os.utime(tmp_path / f"{name}.py", (0, 0))
    fall = importlib.import_module(physics).fall
    x = torch.rand(4, 4)
    assert not is_found(fall, x)
    assert is_found(fall, x)
    (name,) = (name for name in texts if name.startswith(changed))
    source = tmp_path / f"{name}.py"
    source.write_text(texts[name].replace("x @", "x.t() @"))
    os.utime(source, (0, 0))
    assert not is_found(fall, x)


def test_each_kind_of_arguments_has_its_own_code(folder):
    """Shapes, strides, dtypes, one tensor in two places, and global settings of PyTorch."""
    fn = CompiledFunction(squares)
    x = torch.rand(4, 4)
    kinds = x, x[:2], x.t(), x.double(), (x, x), (x, x + 1)
    calls = [(kind, LIMIT) for kind in kinds]
    with Monitor() as monitor:
        for n, args in enumerate(calls, 1):
            torch.testing.assert_close(fn(*args), squares(*args))
            torch.testing.assert_close(fn(*args), squares(*args))
            assert n_saved(folder) == n
        with torch.no_grad():
            fn(*calls[-1])
        assert n_saved(folder) == len(calls) + 1
        assert is_found(squares, *calls[2])
        report = monitor.report()
    counts = [report[name] for name in ("compiles", "cache_hits", "recompiles")]
    assert counts == [7, 1, 6]
    assert "(4, 4)" in monitor.recompile_reasons[0]
    assert monitor.recompile_reasons[-1] == "squares: PyTorch's settings differ"


def test_other_options_functions_and_settings_are_other_code(
    folder, monkeypatch
):
    """Settings that are equal but not alike have their own code."""
    x = torch.rand(4, 4)
    assert not is_found(foreign, x)
    assert is_found(foreign, x)
    assert not is_found(foreign, x, options={"epilogue_fusion": False})
    other = FunctionType((lambda x: x @ x.t()).__code__, globals(), "foreign")
    other.__module__, other.__qualname__ = __name__, "foreign"
    monkeypatch.setitem(globals(), "foreign", other)
    assert not is_found(other, x)
    assert n_saved(folder) == 3
    x = torch.arange(4)
    for n, by in enumerate((2, 2.0, 0.0, -0.0), 4):
        cfg = optim.AdamConfig(eps=by)
        got, want = CompiledFunction(scaled)(cfg, x), scaled(cfg, x)
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, equal_nan=True)
        assert n_saved(folder) == n


GAIN: object = 3.0


def amplified(x):
    """A product that a number or a matrix of this module is in."""
    is_number = isinstance(GAIN, float)
    return torch.addmm(x, x, x, beta=GAIN) if is_number else x @ GAIN


def test_a_patched_module_has_code_of_its_own(folder, monkeypatch):
    x = torch.rand(4, 4)
    assert not is_found(amplified, x)
    monkeypatch.setitem(globals(), "GAIN", 8.0)
    assert not is_found(amplified, x)
    assert is_found(amplified, x)
    monkeypatch.setitem(globals(), "GAIN", torch.rand(4, 4))
    got = CompiledFunction(amplified)(x)
    torch.testing.assert_close(got, amplified(x))
    assert "it reads the tensor" in cache.uncached_reasons["amplified"]


class Scale:
    """Settings without a hash."""

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __init__(self, by):
        self.by = by


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (lambda x: x - 1, (torch.rand(3),)),
        (partial(clip_by_global_norm, max_norm=LIMIT), (torch.rand(4),)),
        (lambda scale, x: x * scale.by, (Scale(3.0), torch.ones(3))),
    ],
)
def test_what_has_no_name_has_guards_and_is_not_saved(fn, args, folder):
    # A class of PyTorch 2.11's own globals, whose instances have code.
    assert cache.describe_value(FunctionType) == "builtins.function "
    torch.testing.assert_close(CompiledFunction(fn)(*args), fn(*args))
    assert n_saved(folder) == 0
    (reason,) = cache.uncached_reasons.values()
    assert reason == "its module does not have it by its name"


def test_gradients_and_transforms_pass_through_as_with_guards(folder):
    fn = CompiledFunction(clip_by_global_norm)
    x = torch.rand(4)
    fn(x, LIMIT)
    leaf = x.clone().requires_grad_()
    (got,) = torch.autograd.grad(fn(leaf, LIMIT)[1], leaf)
    torch.testing.assert_close(got, x / x.norm())
    # what `torch.compile` says to it
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.vmap(lambda row: fn(row, LIMIT)[1])(torch.stack([x, 2 * x]))
    assert n_saved(folder) == 1
    # Inside another graph it is the function itself.
    double = lambda x: fn(x, LIMIT)[0] * 2
    outer = torch.compile(double, backend="eager", fullgraph=True)
    torch.testing.assert_close(outer(x), clip_by_global_norm(x, LIMIT)[0] * 2)


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        (torch.ones(3), ReasonCode.SHAPE),
        (torch.ones(4, dtype=torch.float64), ReasonCode.DTYPE),
        (torch.ones(4, device="meta"), ReasonCode.DEVICE),
    ],
)
def test_compiling_again_fails_where_it_is_not_allowed(changed, code):
    """The error says what differs, and so does its code."""
    fn = CompiledFunction(clip_by_global_norm)
    with torch.compiler.set_stance("fail_on_recompile"):
        fn(torch.ones(4), LIMIT)
        with pytest.raises(RuntimeError, match="because 0 differs") as caught:
            fn(changed, LIMIT)
    assert capture.recompile_code(str(caught.value)) is code


def test_where_nothing_can_be_kept_the_code_runs(folder, monkeypatch):
    def run():
        fn, x = CompiledFunction(squares), torch.rand(4, 4)
        torch.testing.assert_close(fn(x, LIMIT), squares(x, LIMIT))
        return cache.uncached_reasons.pop("squares", "")

    with torch.compiler.config.patch(force_disable_caches=True):
        assert run() == "PyTorch's caches are turned off"
    assert n_saved(folder) == 0
    with monkeypatch.context() as patch:
        # as if an editor had written sources after this process has read them
        patch.setattr(cache, "STARTED_AT", 0.0)
        assert run().endswith(".py changed since this process began")
    folder.rmdir()
    folder.write_text("in the way")
    with pytest.warns(UserWarning, match="not kept for later processes"):
        assert run() == ""


@pytest.mark.parametrize("suffix", ["pt", "json"])
def test_a_broken_file_is_reported_and_written_again(folder, suffix):
    x = torch.rand(4, 4)
    assert not is_found(squares, x, LIMIT)
    (file,) = folder.glob(f"*.{suffix}")
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.warns(UserWarning, match="compiled again"):
        assert not is_found(squares, x, LIMIT)
    assert is_found(squares, x, LIMIT)
    assert json.loads(next(folder.glob("*.json")).read_text())


SECOND_USER = 12345


def plant(cache_folder, what):
    """Make a folder of compiled code one that others could have written; return the place that is named."""
    compiled = cache_folder / "compiled"
    functions = compiled / "funcppo"
    functions.mkdir(parents=True, mode=0o700)
    place, mode, owner = {
        "folder": (compiled, 0o777, -1),
        "group": (compiled, 0o770, -1),
        "parent": (cache_folder, 0o777, -1),
        "functions": (functions, 0o722, -1),
        "owner": (compiled, 0o700, 1),
        "file": (functions / f"{'0' * 32}.pt", 0o600, 1),
        "Inductor": (compiled / "fxgraph", 0o700, 1),
        "Triton": (compiled / "triton", 0o700, 1),
    }[what]
    if not place.exists():
        place.write_bytes(b"planted")
    place.chmod(mode)
    if owner >= 0:
        os.chown(place, owner, owner)
    return place


GIVEN_AWAY = ("owner", "file", "Inductor", "Triton")


@pytest.mark.parametrize("variable", ["XDG_CACHE_HOME", cache.FOLDER_VARIABLE])
@pytest.mark.parametrize(
    "what", ["folder", "group", "parent", "functions", *GIVEN_AWAY]
)
def test_a_folder_of_others_is_refused(what, variable, tmp_path, monkeypatch):
    """Nothing in it is read: a file of another user's ran."""
    if what in GIVEN_AWAY and os.getuid() != 0:
        pytest.skip("only root gives files away")
    monkeypatch.undo()
    caches = tmp_path / "caches"
    place = plant(caches / "funcppo", what)
    monkeypatch.delenv(cache.FOLDER_VARIABLE, raising=False)
    compiled = caches / "funcppo" / "compiled"
    is_given = variable == cache.FOLDER_VARIABLE
    monkeypatch.setenv(variable, str(compiled if is_given else caches))
    with pytest.raises(ValueError, match="nobody else may write") as caught:
        CompiledFunction(clip_by_global_norm)(torch.ones(4), LIMIT)
    assert f"got {place} with owner" in str(caught.value)


def as_second_user(call):
    """What a call returns in a fork of this process that belongs to another user."""
    read, write = os.pipe()
    if not (child := os.fork()):
        os.setgroups([])
        os.setgid(SECOND_USER)
        os.setuid(SECOND_USER)
        os.write(write, call().encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with open(read) as file:
        return file.read()


@pytest.mark.skipif(os.name != "posix", reason="Windows has no such owners")
def test_two_users_of_one_machine_share_no_cache():
    if os.getuid() != 0:
        pytest.skip("only root acts as another user")

    def problem_of(path):
        try:
            cache.make_private(path)
            (path / "code.pt").write_text("planted")
        except (ValueError, OSError) as error:
            return str(error)
        return ""

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o1777)
        theirs, mine = folder / "theirs", folder / "mine"
        assert as_second_user(lambda: problem_of(theirs / "funcppo")) == ""
        assert f"with owner {SECOND_USER}" in problem_of(theirs / "funcppo")
        assert f"with owner {SECOND_USER}" in problem_of(theirs / "new")
        assert problem_of(mine) == ""
        assert "Permission denied" in as_second_user(lambda: problem_of(mine))


@pytest.mark.parametrize("kept", [True, False])
def test_pytorch_compiles_in_no_shared_folder(kept, tmp_path, monkeypatch):
    """Also where its default is set already, and where nothing can be kept."""
    monkeypatch.undo()
    default = f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}"
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv(cache.FOLDER_VARIABLE, default)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if not kept:
        (tmp_path / "funcppo").write_text("in the way")
    with nullcontext() if kept else pytest.warns(UserWarning, match="not kept"):
        folder = cache.use_folder()
    used = Path(cache_dir())
    assert used == folder if kept else folder is None
    assert str(used) != default and used.stat().st_mode & 0o777 == 0o700
    assert used == Path(triton_cache_dir(0)).parents[1]
