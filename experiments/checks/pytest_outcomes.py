"""What pytest says of the tests of this project, one by one."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from experiments.paths import DATA, ROOT

TESTS = ROOT / "tests"
# exit statuses of pytest where some tests failed, where a file could not be read, and where there was no test to run
SOME_FAILED = 1
UNREADABLE = 2
NONE_RUN = 5


class Outcome(NamedTuple):
    """How a test ended."""

    name: str
    outcome: str  # "passed", "skipped" or "failed"
    reason: str  # why it was skipped or failed, one line


def run_tests(
    python: str,
    paths: Sequence[Path],
    n_workers: int,
    env: Mapping[str, str] | None = None,
) -> Iterator[Outcome]:
    """Run the tests of some files or folders.

    Args:
      python: interpreter, with what the extra `test` brings.
      env: more of the environment.

    Raises:
      RuntimeError: pytest could not run them.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        done = subprocess.run(
            [
                *(python, "-m", "pytest", "-n", str(n_workers)),
                *("--dist", "loadfile", "-p", "no:cacheprovider"),
                *("-m", "long or not long"),
                *("--basetemp", str(Path(folder) / "tests")),
                *(f"--junitxml={report}", *map(str, paths)),
            ],
            cwd=ROOT,
            env=dict(os.environ) | {"PYTHONPATH": _path()} | dict(env or {}),
        )
        if done.returncode not in (0, SOME_FAILED, UNREADABLE, NONE_RUN):
            raise RuntimeError(f"{paths[0]}: pytest ended with {done}")
        cases = list(ElementTree.parse(report).iter("testcase"))
        if not cases:
            raise RuntimeError(f"{paths[0]}: pytest ended without a test")
        yield from map(_outcome, cases)


def _path() -> str:
    """PYTHONPATH with this project first."""
    return os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])


def _outcome(case: ElementTree.Element) -> Outcome:
    name = f"{case.get('classname')}.{case.get('name')}"
    for child in case:
        if child.tag in ("failure", "error", "skipped"):
            outcome = "skipped" if child.tag == "skipped" else "failed"
            reason = (child.get("message") or "").partition("\n")[0]
            # A record does not say where the data are.
            reason = reason.replace(f"{DATA}{os.sep}", "")
            return Outcome(name, outcome, reason)
    return Outcome(name, "passed", "")
