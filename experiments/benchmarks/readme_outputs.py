"""What the README's programs print: its PPO example, and `make train`.

    python experiments/benchmarks/readme_outputs.py

The code of the example is taken from README.md, the command of `make train` from the Makefile. `experiments/tables.py`
puts what they print into the README.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments.benchmarks.side_by_side import write_record
from experiments.paths import RESULTS, ROOT
from experiments.provenance import describe_machine


def main() -> None:
    """Run both and write the record."""
    readme = (ROOT / "README.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    with tempfile.TemporaryDirectory() as folder:
        words = train_command(makefile, Path(folder) / "run")
        training = run([sys.executable, "-m", "funcppo", *words])
    record = {
        "ppo": run([sys.executable, "-c", example_code(readme)]),
        "train": result_part(training),
        "machine": describe_machine(),
    }
    write_record(RESULTS / "readme_outputs.json", record)


def example_code(readme: str) -> str:
    """The first indented block after the heading of the PPO example."""
    section = readme.split("## PPO in 20 lines\n", 1)[1]
    match = re.search(r"^ {4}\S.*\n(?:(?: {4}.*)?\n)*", section, re.MULTILINE)
    assert match, "README.md: expected code below its PPO heading"
    return re.sub(r"^ {4}", "", match[0], flags=re.MULTILINE).rstrip() + "\n"


def train_command(makefile: str, out: Path) -> list[str]:
    """The arguments of `funcppo` in the recipe of `make train`, with another folder for the run."""
    match = re.search(r"/funcppo (train .*)$", makefile, re.MULTILINE)
    assert match, "Makefile: expected a recipe that calls funcppo train"
    words = shlex.split(match[1])
    words[words.index("--out") + 1] = str(out)
    return words


def result_part(text: str) -> str:
    """The table of test metrics and the proof: from the table's title to the empty line after the proof."""
    return text[text.index("test (") : text.index("\ndone in ")]


def run(command: list[str]) -> str:
    """What a program prints, on one thread of the CPU.

    Raises:
      CalledProcessError: it fails.
    """
    return subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout


if __name__ == "__main__":
    main()
