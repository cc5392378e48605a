"""Claim: this checkout computes bit for bit what another commit computed.

    python experiments/checks/check_unchanged.py --baseline COMMIT
    python experiments/checks/check_unchanged.py --baseline COMMIT --only train --out unchanged.json
    python experiments/checks/check_unchanged.py --baseline COMMIT --data DIR      also the standard data sets below DIR

Both commits do the same runs on this machine, in folders of their own: mining, learning from queries and from proofs,
ranking by every score that needs no training, predictions with proofs, PPO on CartPole, Pendulum and Breakout, and
cells of the compile matrix. What is compared are results: mined rules, the rank and score of each query, the answers
and their proofs, tensors by their bytes. Logs and notes are not. Exits 1 when a value differs.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments.benchmarks.side_by_side import write_record
from experiments.paths import ROOT, make_parser
from experiments.provenance import describe_machine

# Fields of a line of --details, and of an answer of `predict`, that are results.
RESULT_FIELDS = (
    "side",
    "atom",
    "n_better",
    "n_equal",
    "n_candidates",
    "n_scored",
    "log_score",
    "quantised_score",
    "score",
    "rank",
    "goal_text",
    "rule_text",
)
# Settings of a run whose result does not depend on the time that it takes.
QUERIES = """
seconds: null
steps: 4096
seed: 3
learner: questions
questions: {embedding: true, bellman_ford: false, odds_power: 1.0, left_out: fact}
embedding: {rank: 8, n_epochs: 2}
listwise: {n_epochs: 3}
prover: {smoothing: 5.0, object_identity: false, max_height: 1}
n_validations: 2
"""
PROOFS = """
seconds: null
steps: 16384
learner: proofs
strategy: eager
prover: {smoothing: 5.0, object_identity: false, max_height: 2}
rule_score: noisy-or
score: success
n_validations: 2
"""
SCORES = (
    "max-confidence",
    "noisy-or",
    "noisy-or@3",
    "noisy-or-top-3",
    "exists@1",
    "noisy-or-other-facts",
)
# A program for any commit: modules have moved.
CONTROL = """
import hashlib
import funcppo as fp
learner = fp.ppo(env=fp.envs.make("{env}"), network=fp.nets.{network}, n_steps=32, n_envs=8)
state = learner.init(fp.random.key(0))
for _ in range(3):
    state, metrics = learner.step(state)
    # Without the counts of rows that are left out by cause, which a baseline may lack.
    names = [*fp.tree.paths(state), *fp.tree.paths(metrics)]
    leaves = [*fp.tree.leaves(state), *fp.tree.leaves(metrics)]
    causes = ("nonfinite_observations", "nonfinite_rewards", "empty_masks")
    for leaf in [x for name, x in zip(names, leaves) if not name.endswith(causes)]:
        print(leaf.dtype, tuple(leaf.shape), hashlib.sha256(leaf.contiguous().numpy().tobytes()).hexdigest())
"""
MAX_ERROR_CHARACTERS = 2000  # of what a failing process printed

Values = list[str]
Run = Callable[[Path, Path], Values]  # (checkout, empty folder) -> results


def main() -> int:
    """The exit status: 0, or 1 when a value differs."""
    parser = make_parser(__doc__)
    parser.add_argument("--baseline", required=True, metavar="COMMIT")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="runs with this in the name"
    )
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="standard data sets"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the comparison as JSON"
    )
    args = parser.parse_args()

    runs = RUNS | (
        runs_on_standard_data(args.data.resolve()) if args.data else {}
    )
    with baseline_checkout(args.baseline) as baseline:
        rows = [
            compare_run(name, run, baseline)
            for name, run in runs.items()
            if args.only in name
        ]
    if args.out:
        record = {"baseline": full_hash(args.baseline), "rows": rows}
        write_record(args.out, {"machine": describe_machine()} | record)
    return int(any(row["difference"] for row in rows))


@contextmanager
def baseline_checkout(commit: str) -> Iterator[Path]:
    """A working tree of a commit, removed afterwards."""
    with tempfile.TemporaryDirectory() as scratch:
        checkout = Path(scratch) / "baseline"
        add = ["git", "worktree", "add", "-q", "--detach"]
        subprocess.run([*add, str(checkout), commit], cwd=ROOT, check=True)
        try:
            yield checkout
        finally:
            remove = ["git", "worktree", "remove", "--force"]
            subprocess.run([*remove, str(checkout)], cwd=ROOT, check=True)


def compare_run(name: str, run: Run, baseline: Path) -> dict[str, Any]:
    """The row of one run, done by the baseline and by this checkout."""
    results = []
    for checkout in (baseline, ROOT):
        with tempfile.TemporaryDirectory() as folder:
            results.append(run(checkout, Path(folder)))
    before, after = results
    difference = compare(before, after)
    print(f"{name}: {len(after)} values, {difference or 'equal'}", flush=True)
    return {
        "run": name,
        "values": len(after),
        "sha256": hashlib.sha256("\n".join(after).encode()).hexdigest(),
        "difference": difference,
    }


def compare(before: Values, after: Values) -> str:
    """Empty where both are equal, else the first difference."""
    if len(before) != len(after):
        return f"{len(before)} values before, {len(after)} now"
    pairs = enumerate(zip(before, after, strict=True))
    differing = [i for i, (a, b) in pairs if a != b]
    if not differing:
        return ""
    i = differing[0]
    return (
        f"{len(differing)} of {len(before)} values differ, "
        f"first {i}: {before[i]} before, {after[i]} now"
    )


def full_hash(commit: str) -> str:
    """The hash of a commit."""
    command = ["git", "rev-parse", commit]
    return subprocess.check_output(command, cwd=ROOT, text=True).strip()


# What the runs compute


def call(checkout: Path, *args: str, statuses: tuple[int, ...] = (0,)) -> str:
    """What a Python process prints that imports the package of a checkout.

    Args:
      statuses: exit statuses that are no failure.
    """
    # One thread, so that sums have one order; a fixed width of tables.
    env = os.environ | {
        "PYTHONPATH": str(checkout),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
    }
    done = subprocess.run(
        [sys.executable, *args],
        cwd=checkout,
        env=env,
        capture_output=True,
        text=True,
    )
    if done.returncode not in statuses:
        printed = done.stdout[-MAX_ERROR_CHARACTERS:]
        printed += done.stderr[-MAX_ERROR_CHARACTERS:]
        command = " ".join(args)
        raise SystemExit(
            f"{checkout}: {command}: exit {done.returncode}\n{printed}"
        )
    return done.stdout


def results(value: Any) -> Iterator[str]:
    """The fields of JSON that are results, in order, by name."""
    if isinstance(value, list):
        for item in value:
            yield from results(item)
    elif isinstance(value, dict):
        for name, item in value.items():
            if name in RESULT_FIELDS and item is not None:
                yield f"{name} {json.dumps(item, sort_keys=True)}"
            elif isinstance(item, dict | list):
                yield from results(item)


def json_lines(path: Path) -> Values:
    """The results in a JSON Lines file, line by line."""
    lines = path.read_text().splitlines()
    return [value for line in lines for value in results(json.loads(line))]


def mine(checkout: Path, dataset: str, out: Path, *arguments: str) -> None:
    """Write the rules that are mined from a data set."""
    command = ["-m", "funcppo", "mine", dataset, "--out", str(out)]
    call(checkout, *command, *arguments)


def mining(dataset: str, *arguments: str) -> Run:
    """The rule file of a data set."""

    def run(checkout: Path, folder: Path) -> Values:
        out = folder / "rules.tsv"
        mine(checkout, dataset, out, *arguments)
        return out.read_text().splitlines()

    return run


def training(dataset: str, settings: str, query: str, mines: bool) -> Run:
    """Training, then the rank of each query of test, and the answers of an open query with their proofs."""

    def run(checkout: Path, folder: Path) -> Values:
        out, details = folder / "run", folder / "details.jsonl"
        config = folder / "settings.yaml"
        config.write_text(settings)
        rules = []
        if mines:
            mine(checkout, dataset, folder / "rules.tsv")
            rules = ["--rules", str(folder / "rules.tsv")]
        train = ["train", dataset, "--out", str(out), "--config", str(config)]
        call(checkout, "-m", "funcppo", *train, *rules)
        evaluate = ["evaluate", str(out), "--details", str(details)]
        call(checkout, "-m", "funcppo", *evaluate)
        predict = ["predict", str(out), query, "--explain", "--json", "-"]
        answers = call(checkout, "-m", "funcppo", *predict)
        return [*json_lines(details), *results(json.loads(answers))]

    return run


def ranking(dataset: str, score: str, height: int, mines: bool) -> Run:
    """The rank of each query of test by a score that needs no training."""

    def run(checkout: Path, folder: Path) -> Values:
        details = folder / "details.jsonl"
        rules = []
        if mines:
            mine(checkout, dataset, folder / "rules.tsv")
            rules = ["--rules", str(folder / "rules.tsv")]
        settings = f"height={height}", "smoothing=5.0", "object_identity=False"
        evaluate = ["evaluate", dataset, "--score", score, *rules]
        evaluate += [word for one in settings for word in ("--set", one)]
        details_option = ["--details", str(details)]
        call(checkout, "-m", "funcppo", *evaluate, *details_option)
        return json_lines(details)

    return run


def proving(dataset: str, query: str) -> Run:
    """The verdict on a query and its proof."""

    def run(checkout: Path, folder: Path) -> Values:
        prove = ["prove", dataset, query, "--json", "-"]
        return [*results(json.loads(call(checkout, "-m", "funcppo", *prove)))]

    return run


def program(source: str) -> Run:
    """What a program prints."""

    def run(checkout: Path, folder: Path) -> Values:
        return call(checkout, "-c", source).splitlines()

    return run


def matrix_cells(*names: str) -> Run:
    """Status, graphs and parity of some cells of the compile matrix."""

    def run(checkout: Path, folder: Path) -> Values:
        script = "experiments/full_step_matrix.py"
        options = ["--fresh", "--time", "none", "--out", str(folder)]
        # Status 1: a cell does not end as the committed record says.
        call(checkout, script, *options, "--only", *names, statuses=(0, 1))
        record = json.loads(next(folder.glob("*.json")).read_text())
        values = []
        for cell, row in sorted(record["cells"].items()):
            for field in ("status", "graphs", "breaks", "parity"):
                values.append(f"{cell}: {row.get(field)}")
        return values

    return run


COUNTRY = "locatedIn(andorra, X)"
RUNS: dict[str, Run] = {
    "mine countries_s2": mining("countries_s2"),
    "mine family_tree:130:2": mining("family_tree:130:2", "--constants"),
    "train countries_s3": training("countries_s3", PROOFS, COUNTRY, False),
    "train family_tree:60:1": training(
        "family_tree:60:1", PROOFS, "aunt(X, p1)", False
    ),
    "rank countries_s3 noisy-or at height 2": ranking(
        "countries_s3", "noisy-or", 2, False
    ),
    "rank countries_s3 exists@2": ranking("countries_s3", "exists@2", 2, False),
    "prove countries_s3": proving("countries_s3", COUNTRY),
    "matrix cells": matrix_cells("0/*aot_eager*", "6/*aot_eager*"),
    "ppo cartpole": program(
        CONTROL.format(env="CartPole-v1", network="mlp(16)")
    ),
    "ppo pendulum": program(
        CONTROL.format(env="Pendulum-v1", network="mlp(16)")
    ),
    "ppo breakout": program(
        CONTROL.format(env="MinAtar/Breakout-v1", network="cnn()")
    ),
}


def runs_on_standard_data(data: Path) -> dict[str, Run]:
    """Runs on the standard data sets."""
    nations, umls, family = (
        str(data / name) for name in ("nations", "umls", "family")
    )
    runs = {
        "mine nations": mining(nations),
        "mine umls": mining(umls),
        "mine family": mining(family, "--max-length", "2"),
        "train nations": training(nations, QUERIES, "ngo(poland, X)", True),
        "train umls": training(umls, QUERIES, "isa(X, entity)", True),
    }
    return runs | {
        f"rank nations {score}": ranking(nations, score, 1, True)
        for score in SCORES
    }


if __name__ == "__main__":
    raise SystemExit(main())
