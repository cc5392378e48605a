"""Question: which versions of PyTorch have the faults that depend on the version most?

    python experiments/checks/compiler_faults.py PYTHON ...

Runs reproducers of `experiments/reproducers/` by each interpreter, each of which has another version of PyTorch, and
records what they print in `experiments/results/compiler_faults.json`. Versions that are not named keep their rows.
"""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments import paths
from experiments.provenance import current_commit, describe_machine

REPRODUCERS = (
    "write_backs_lost",
    "vmap_over_collective",
    "callbacks_cleared",
    "storage_of_tensor_wrapper",
)
RECORD = paths.RESULTS / "compiler_faults.json"


def main() -> None:
    """Record a row for each interpreter."""
    parser = paths.make_parser(__doc__)
    parser.add_argument(
        "python", nargs="+", help="interpreter with a version of PyTorch"
    )
    parser.add_argument("--out", type=Path, default=RECORD)
    args = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    if args.out.exists():
        known = json.loads(args.out.read_text())["rows"]
        rows = {row["torch"]: row for row in known}

    record: dict[str, Any] = {"machine": describe_machine()}
    for python in args.python:
        row = examine(python)
        rows[row["torch"]] = row
        record["rows"] = sorted(rows.values(), key=_version)
        print(row["torch"], *row["said"]["write_backs_lost"], sep="\n  ")
        args.out.write_text(json.dumps(record, indent=1) + "\n")


def examine(python: str) -> dict[str, Any]:
    """The version of an interpreter's PyTorch, and the lines that each reproducer prints there, on a CPU."""
    version = "import torch; print(torch.__version__.split('+')[0])"
    said: dict[str, list[str]] = {}
    for name in REPRODUCERS:
        script = f"experiments/reproducers/{name}.py"
        port = [_free_port()] if name == "vmap_over_collective" else []
        said[name] = _run(python, script, *port)

    found = re.search(
        r"(\d+) of (\d+) raise", said["storage_of_tensor_wrapper"][1]
    )
    assert found is not None
    return {
        "torch": _run(python, "-c", version)[0],
        "commit": current_commit(),
        "n_raising": int(found[1]),
        "n_tried": int(found[2]),
        "said": said,
    }


def _version(row: dict[str, Any]) -> tuple[int, ...]:
    return tuple(int(part) for part in row["torch"].split("."))


def _free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def _run(*command: str) -> list[str]:
    done = subprocess.run(
        command,
        cwd=paths.ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


if __name__ == "__main__":
    main()
