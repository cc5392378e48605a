"""The folder of compiled code is named without PyTorch, and tells whether anything was compiled."""

import subprocess
import sys

import torch

from funcppo.runtime import cache_folder, compile_cache


def test_code_of_these_sources_is_found_whatever_the_version(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert not cache_folder.may_hold_code()
    (tmp_path / "funcppo" / f"{torch.__version__}-0123456789abcdef").mkdir(
        parents=True
    )
    assert not cache_folder.may_hold_code()
    (tmp_path / compile_cache.CODE_DIR).mkdir()
    assert cache_folder.may_hold_code()


def test_a_user_without_a_name_has_no_folder(monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)

    def fail():
        raise KeyError("no such user")

    monkeypatch.setattr(cache_folder.getpass, "getuser", fail)
    assert cache_folder.find_folder() is None
    assert not cache_folder.may_hold_code()


def test_the_folder_of_a_user_is_that_of_inductor(monkeypatch):
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    assert str(cache_folder.find_folder()) == default_cache_dir()


def test_processes_are_started_without_pytorch():
    """What a program does before it imports PyTorch."""
    code = (
        "import sys; from funcppo.runtime import parallel_compile; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
