"""Scripts run as processes of their own that need not import PyTorch again.

A fork server imports PyTorch and its compiler, and nothing else, once for all tests of a process; each script is a fork
of it. So a script begins in a state that no test has touched, as with `python SCRIPT`, but seconds earlier.
"""

import multiprocessing
import os
import runpy
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

PRELOADED = ["torch", "torch._dynamo"]


class Ended(NamedTuple):
    """A script or another process that has ended."""

    status: int  # negative: the signal that killed it
    out: str
    err: str


def run_script(path: Path, *args: str) -> Ended:
    """Run a script to its end."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("out", "err")]
        process = context.Process(
            target=_run_here, args=(path, args, os.getcwd(), files)
        )
        process.start()
        process.join()
        status = process.exitcode
        assert status is not None
        return Ended(status, *(file.read_text() for file in files))


def printed(path: Path, *args: str) -> list[str]:
    """The lines that a script prints; it must end well."""
    ended = run_script(path, *args)
    assert ended.status == 0, ended.err
    return ended.out.splitlines()


def printed_by(code: str) -> list[str]:
    """The lines that a program of a few lines prints; it must end well."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.py"
        path.write_text(code)
        return printed(path)


def _run_here(
    path: Path, args: tuple[str, ...], cwd: str, files: list[Path]
) -> None:
    """Run a script in this process, which has no other work."""
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_CREAT | os.O_WRONLY), number)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.chdir(cwd)
    sys.argv = [str(path), *args]
    sys.path.insert(0, str(path.parent))
    runpy.run_path(str(path), run_name="__main__")
