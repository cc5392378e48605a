"""The version is that of the latest git tag, and a fallback without one."""

from __future__ import annotations

import runpy
import subprocess
from pathlib import Path

import pytest

import funcppo
from funcppo.version import VERSION

SETUP = Path(__file__).parents[1] / "setup.py"


def test_the_package_states_its_version():
    assert funcppo.__version__ == VERSION and VERSION[0].isdigit()


def test_the_version_is_that_of_the_tag(tmp_path, monkeypatch):
    """Without git, without a tag, at a tag, after a tag, and in a source archive."""
    found = []
    monkeypatch.setattr(
        "setuptools.setup", lambda version: found.append(version)
    )
    copy = tmp_path / "setup.py"
    copy.write_bytes(SETUP.read_bytes())

    def git(*words):
        options = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        subprocess.run(["git", *options, *words], cwd=tmp_path, check=True)

    def build():
        runpy.run_path(str(copy))
        return found[-1]

    if subprocess.run(["git", "--version"], capture_output=True).returncode:
        pytest.skip("no git on this system")
    assert build() == "0.3.0.dev0"
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "first")
    assert build() == "0.3.0.dev0"
    git("tag", "v1.2.3")
    assert build() == "1.2.3"
    git("commit", "-q", "--allow-empty", "-m", "second")
    assert build().startswith("1.2.3.post1+g")
    (tmp_path / "PKG-INFO").write_text("Name: funcppo\nVersion: 4.5.6\n")
    assert build() == "4.5.6"
