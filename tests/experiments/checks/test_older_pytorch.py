"""The outcomes of tests under another interpreter are counted, and those that fail are named."""

from __future__ import annotations

import sys

import pytest

from experiments.checks import older_pytorch

OUTCOMES = """
import pytest

def test_good():
    pass

def test_bad():
    assert False

@pytest.mark.skip
def test_left_out():
    pass

@pytest.fixture
def broken():
    raise ValueError

def test_of_broken(broken):
    pass
"""


def test_tests_of_folders_and_files_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(older_pytorch, "TESTS", tmp_path)
    folder = tmp_path / "part"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "test_inside.py").write_text(OUTCOMES)
    (tmp_path / "test_above.py").write_text(OUTCOMES)
    counts = older_pytorch.run_all_tests(sys.executable)
    assert (counts["passed"], counts["skipped"]) == (2, 2)
    names = [name.rsplit(".", 2)[-2:] for name in counts["failed"]]
    assert sorted(names) == [
        [file, name]
        for file in ("test_above", "test_inside")
        for name in ("test_bad", "test_of_broken")
    ]


def test_a_file_that_cannot_be_read_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(older_pytorch, "TESTS", tmp_path)
    (tmp_path / "test_none.py").write_text("import no_such_module")
    counts = older_pytorch.run_all_tests(sys.executable)
    assert (counts["passed"], len(counts["failed"])) == (0, 1)


def test_tests_that_are_not_run_are_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(older_pytorch, "TESTS", tmp_path)
    (tmp_path / "test_none.py").touch()
    with pytest.raises(
        RuntimeError, match=r"test_none.py: pytest ended without"
    ):
        older_pytorch.run_all_tests(sys.executable)


def test_an_interpreter_without_pytest_runs_none(tmp_path):
    assert older_pytorch.has_pytest(sys.executable)
    bare = tmp_path / "python"
    bare.write_text("#!/bin/sh\nexit 1\n")
    bare.chmod(0o755)
    assert not older_pytorch.has_pytest(str(bare))
