"""How old is each committed record, and do tests and benchmarks that need a GPU still give what they gave?

    python experiments/checks/gpu.py                           # the age of each record: commit and days
    python experiments/checks/gpu.py --run tests cartpole s3   # run these again, on a GPU
    python experiments/checks/gpu.py --run all

A benchmark writes `experiments/results/NAME-CARD.json` anew. `tests` writes how many tests pass and are skipped, and
the names of those that fail; the exit status is 1 where one does.
"""

import datetime
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments.benchmarks.side_by_side import write_record
from experiments.checks.older_pytorch import TESTS, run_all_tests
from experiments.paths import RESULTS, ROOT, make_parser
from experiments.provenance import describe_machine

# the record without its card, and the program that writes it
BENCHMARKS = {
    "cartpole": "cartpole.py --mode captured jax --precision highest high bfloat16",
    "prover-s3": "prover.py --work s3 --mode captured",
    "prover-family": "prover.py --work family family-large family-130 --mode captured",
    "startup": "startup.py",
    "time_to_score": "time_to_score.py --seeds 5 --only CartPole-v1",
    "time_to_score-breakout": "time_to_score.py --seeds 5 --only MinAtar/Breakout-v1",
}


def main() -> None:
    """Print ages, or run what is named."""
    parser = make_parser(__doc__)
    names = ["all", "tests", *BENCHMARKS]
    parser.add_argument("--run", nargs="+", choices=names, default=[])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder")
    args = parser.parse_args()
    if not args.run:
        for file in sorted(RESULTS.glob("*.json")):
            print("{:>5} days  {:28}  {}".format(*describe_age(file)))
        return

    import torch

    card = re.findall(r"[A-Z]+\d+", torch.cuda.get_device_name())[0].lower()
    chosen = names[1:] if "all" in args.run else args.run
    is_good = True
    for name in chosen:
        out = args.out / f"{name}-{card}.json"
        if name == "tests":
            record = run_all_tests(sys.executable, [[TESTS]], "not long")
            write_record(out, {"machine": describe_machine("cuda")} | record)
            print(json.dumps(record, indent=1))
            is_good = is_good and not record["failed"]
            continue
        script, *options = BENCHMARKS[name].split()
        path = ROOT / "experiments" / "benchmarks" / script
        command = [sys.executable, str(path), *options, "--out", str(out)]
        is_good = subprocess.run(command).returncode == 0 and is_good
    raise SystemExit(not is_good)


def describe_age(file: Path) -> tuple[str, str, str]:
    """Return the days since a record was made, its commits, and its name.

    A record without a date is as old as its commits, or its file where these are unknown.
    """
    record = json.loads(file.read_text())
    commits = sorted(set(find_values(record, "commit")))
    dates = (
        find_values(record, "date")
        or (commits and dates_of("show", "-s", *commits))
        or dates_of("log", "-1", "--", str(file))
        or [str(datetime.date.today())]  # not committed
    )
    made = datetime.date.fromisoformat(min(dates))  # its oldest part
    days = (datetime.date.today() - made).days
    shown = ",".join(x[:7] for x in commits[:3]) or "-"
    return str(days), shown + ",..." * (len(commits) > 3), file.stem


def find_values(part: Any, name: str) -> list[str]:
    """Return the texts that have a name, anywhere in a record."""
    if isinstance(part, list):
        return [x for item in part for x in find_values(item, name)]
    if not isinstance(part, dict):
        return []
    found = [x for key, x in part.items() if key == name and x]
    return found + find_values(list(part.values()), name)


def dates_of(command: str, *arguments: str) -> list[str]:
    """Return the days of the commits that a command of git lists; none if it does not know one."""
    words = ["git", command, "--format=%cs", *arguments]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    return [] if done.returncode else done.stdout.split()


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")  # rows as they come
    main()
