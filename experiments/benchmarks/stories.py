"""How often the relation of two people in a story follows by proofs: CLUTRR, by the length of the story.

    python experiments/benchmarks/stories.py

Rules of two atoms are mined from the training stories, of lengths 2 and 3, with the options of `docs/stories.md`.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments.benchmarks.side_by_side import write_record
from experiments.paths import DATA, RESULTS, make_parser
from experiments.provenance import describe_machine

LENGTHS = range(2, 11)


def main() -> None:
    """Mine the rules, rank the relations of each test file, and write the record."""
    parser = make_parser(__doc__)
    parser.add_argument("--data", type=Path, default=DATA / "clutrr")
    parser.add_argument("--out", type=Path, default=RESULTS / "stories.json")
    args = parser.parse_args()
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        rules, found = f"{folder}/rules.tsv", Path(folder) / "found.json"
        mine = ["mine", args.data, "--max-length", 2, "--out", rules]
        run_program(mine)
        for length in LENGTHS:
            start = time.perf_counter()
            words = ["evaluate", args.data, "--rules", rules]
            words += ["--split", f"test_{length}", "--holes", "relation"]
            words += ["--score", f"linked-proof-product@{length}"]
            run_program([*words, "--json", found])
            result = json.loads(found.read_text())
            names = ("n_queries", "accuracy", "mrr", "ceiling")
            row = {"length": length} | {name: result[name] for name in names}
            row["seconds"] = round(time.perf_counter() - start, 1)
            runs.append(row | {"machine": describe_machine()})
            print(json.dumps(row), flush=True)
    write_record(args.out, {"runs": runs})


def run_program(words: list[object]) -> None:
    """Run funcppo in a process of its own; its errors are shown."""
    command = [sys.executable, "-m", "funcppo", *map(str, words)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
