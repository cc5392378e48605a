"""Question: what of funcppo works with the oldest version of PyTorch that `pyproject.toml` takes, and what before it?

    python experiments/checks/older_pytorch.py PYTHON ...

Each interpreter has another version of PyTorch, with optree and numpy. On a CPU it makes a training step of CartPole by
each strategy, compiled by Inductor, compares it with the eager step, and compiles a loop that stays one
(`tree.graph_scan`). An interpreter that has pytest, and so what the extra `test` brings, runs the tests of each folder
too, in half an hour or more. The record is `experiments/results/older_pytorch.json`.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments.paths import RESULTS, ROOT, make_parser

TESTS = ROOT / "tests"
RECORD = RESULTS / "older_pytorch.json"
STRATEGIES = ("eager", "forward", "one-graph")


def main() -> None:
    """Record a row for each interpreter."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "python", nargs="*", help="interpreter with a version of PyTorch"
    )
    parser.add_argument("--out", type=Path, default=RECORD)
    parser.add_argument(
        "--here", action="store_true", help="print this interpreter's row"
    )
    args = parser.parse_args()
    if args.here:
        print(json.dumps(examine()))
        return

    from experiments.provenance import describe_machine

    record: dict[str, Any] = {"machine": describe_machine(), "rows": []}
    folders = sorted(path.parent for path in TESTS.glob("*/__init__.py"))
    groups = [*([x] for x in folders), sorted(TESTS.glob("test_*.py"))]
    for python in args.python:
        done = subprocess.run(
            [python, __file__, "--here"],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        row = json.loads(done.stdout.splitlines()[-1])
        row["tests"] = (
            run_all_tests(python, groups) if has_pytest(python) else None
        )
        record["rows"].append(row)
        print(json.dumps(record["rows"][-1], indent=1))
        args.out.write_text(json.dumps(record, indent=1) + "\n")


def has_pytest(python: str) -> bool:
    """Whether an interpreter has pytest."""
    found = subprocess.run(
        [python, "-c", "import pytest"], stderr=subprocess.DEVNULL
    )
    return found.returncode == 0


def run_all_tests(
    python: str, groups: list[list[Path]], marks: str = "long or not long"
) -> dict[str, Any]:
    """How many tests pass and are skipped with an interpreter, group by group, and the names of those that fail."""
    names: dict[str, list[str]] = {"passed": [], "skipped": [], "failed": []}
    for paths in groups:
        for name, outcome in run_tests(python, paths, marks):
            names[outcome].append(name)
    return {
        "passed": len(names["passed"]),
        "skipped": len(names["skipped"]),
        "failed": names["failed"],
    }


def run_tests(
    python: str, paths: list[Path], marks: str
) -> Iterator[tuple[str, str]]:
    """Yield the name of each test of some paths, and `passed`, `skipped` or `failed`.

    Raises:
      RuntimeError: pytest could not run them.
    """
    n_workers = str(max(2, (os.cpu_count() or 2) - 2))
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        done = subprocess.run(
            [
                *(
                    python,
                    "-m",
                    "pytest",
                    "-n",
                    n_workers,
                    "--dist",
                    "loadfile",
                ),
                *("-p", "no:cacheprovider", "-p", "no:benchmark", "-m", marks),
                *("--basetemp", str(Path(folder) / "tests")),
                *(f"--junitxml={report}", *map(str, paths)),
            ],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        # 1: some failed, 2: a file could not be read, 5: no test to run
        if done.returncode not in (0, 1, 2, 5):
            raise RuntimeError(f"{paths[0]}: pytest ended with {done}")
        for case in ElementTree.parse(report).iter("testcase"):
            kinds = {child.tag for child in case}
            outcome = "skipped" if "skipped" in kinds else "passed"
            if kinds & {"failure", "error"}:
                outcome = "failed"
            yield f"{case.get('classname')}.{case.get('name')}", outcome


def examine() -> dict[str, Any]:
    """The versions of this interpreter, and what failed: an empty text where nothing did."""
    import optree
    import torch

    checks: dict[str, Callable[[], None]] = {
        **{name: (lambda name=name: make_update(name)) for name in STRATEGIES},
        "loop": compile_loop,
    }
    return {
        "torch": torch.__version__.split("+")[0],
        "optree": optree.__version__,
        "failures": {name: _failure(check) for name, check in checks.items()},
    }


def make_update(strategy: str) -> None:
    """Compile the parts of a training step, which are compared with the eager ones, and make an update.

    Raises:
      Exception: why they cannot be compiled, or what of them differs.
    """
    import funcppo as fp
    from funcppo.runtime.compile import select_strategy
    from funcppo.train_step import EAGER_PARTS, collect, train_step

    learner = fp.ppo(
        env=fp.envs.cartpole(),
        network=fp.nets.mlp(16),
        n_envs=4,
        n_steps=8,
        n_epochs=1,
        n_minibatches=2,
    )
    state = learner.init(fp.random.key(0))
    parts, record = select_strategy(
        collect, EAGER_PARTS, learner.cfg, learner.world, state, strategy
    )
    _, metrics = train_step(learner.cfg, learner.world, state, parts)
    if record.failures:
        raise RuntimeError(record.failures[0].message)
    if int(metrics.n_applied_minibatches) != 2:
        raise RuntimeError("expected 2 minibatches to be applied")


def compile_loop() -> None:
    """Compile a loop over tensors as one operator, and compare it with the loop in Python.

    Raises:
      Exception: why it cannot be compiled, or that it differs.
    """
    import torch

    from funcppo.core.tree import scan
    from funcppo.runtime.compile import compile_function

    xs = torch.arange(6.0).view(3, 2)
    compiled = compile_function(_loop_by_graph)
    torch.testing.assert_close(
        compiled(torch.zeros(2), xs), scan(_turn, torch.zeros(2), xs)
    )


def _turn(carry: Any, x: Any) -> tuple[Any, Any]:
    return carry + x, carry * x


def _loop_by_graph(carry: Any, xs: Any) -> tuple[Any, Any]:
    from funcppo.core.tree import graph_scan

    return graph_scan(_turn, carry, xs)


def _failure(check: Callable[[], None]) -> str:
    """The first line of what a check raises; empty if it raises nothing."""
    try:
        check()
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        return f"{type(error).__name__}: {lines[0] if lines else ''}"
    return ""


if __name__ == "__main__":
    main()
