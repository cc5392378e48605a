"""Learned scores beside untrained ones, over seeds.

    python experiments/benchmarks/main_results.py

Each run is one of `funcppo train`. Where a set has several options to try, each is trained at seed 0, and the one that
ranks the valid split best is trained at the other seeds too and once at learning rate 0. The record is written after
every run, and what it holds is not run again. Mined rules are those of `mining_results.py`, applied as there. The
tables take the scores without a policy from the record of `untrained_scores.py`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments import tables
from experiments.benchmarks.mining_results import SETS as MINED_SETS
from experiments.benchmarks.side_by_side import write_record
from experiments.paths import DATA, RESULTS
from experiments.provenance import current_commit, describe_machine
from funcppo.kg.graph.loaders import load
from funcppo.kg.mining.budget import ignore_progress
from funcppo.kg.run import rule_files

Options = list[str]


class TrainingSet(NamedTuple):
    """A data set with its rules, and how it is trained."""

    settings: Options  # beyond the defaults
    tried: Sequence[Options] = (
        [],
    )  # more of them, of which the valid split chooses one


class Trial(NamedTuple):
    """One run of the program."""

    name: str  # of the set
    options: Options  # beyond its settings
    seed: int
    is_frozen: bool  # trained at learning rate 0


def command_line(**values: str) -> Options:
    """Command-line options: `prover__max_height="1"` becomes `--prover.max-height 1`."""
    words = []
    for name, value in values.items():
        words += [f"--{name.replace('__', '.').replace('_', '-')}", value]
    return words


def products(*axes: list[Options]) -> list[Options]:
    """Every choice of one from each axis."""
    return [
        list(itertools.chain(*choice)) for choice in itertools.product(*axes)
    ]


def with_mined_rules(name: str, **values: str) -> Options:
    """Options of a set with mined rules, which are applied as they are ranked untrained."""
    task = MINED_SETS[name].task
    values |= {"rules": "{mined}", "prover__smoothing": str(task.smoothing)}
    if task.max_height:
        values["prover__max_height"] = str(task.max_height)
    values["prover__object_identity"] = str(task.object_identity)
    return command_line(**values)


HARD_SHARES = [
    command_line(prover__hard_negative_fraction=share)
    for share in ("0", "0.5", "1")
]
ENTROPY = [
    command_line(ppo__entropy_coef=coefficient)
    for coefficient in ("0.3", "0.05", "1")
]
RATES = [command_line(ppo__learning_rate=rate) for rate in ("1e-3", "3e-3")]
SMALL_RATE = command_line(ppo__learning_rate="3e-4")
SMALL_STEPS = [
    *products(RATES, [ENTROPY[2]]),
    *products([SMALL_RATE, RATES[0]], [ENTROPY[0]]),
]

# Unless a set says otherwise.
PLAIN_COUNTS = command_line(
    learner="proofs",
    prover__smoothing="None",
    prover__object_identity="False",
    steps="120000",
)
HEIGHT_1 = {"prover__max_height": "1", "score": "success", "n_validations": "4"}
HALF_HARD = HEIGHT_1 | {"prover__hard_negative_fraction": "0.5"}
SMALL_NETWORK = {"prover__embed_dim": "16", "prover__hidden_dim": "32"}
LONGER = {
    "n_validations": "8",
    "steps": "400000",
    "prover__hard_negative_fraction": "1",
    "ppo__entropy_coef": "1",
    "ppo__n_envs": "512",
    "ppo__n_minibatches": "16",
}
MANY_RULES = {
    **HEIGHT_1,
    **SMALL_NETWORK,
    "n_validation_queries": "500",
    "n_validations": "12",
    "steps": "5000000",
    "device": "{device}",
    "prover__hard_negative_fraction": "1",
    "ppo__learning_rate": "3e-3",
    "ppo__n_envs": "4096",
    "ppo__n_minibatches": "16",
}
MANY_MINED_RULES = MANY_RULES | {
    "n_validations": "6",
    "steps": "650000",
    "ppo__n_envs": "1024",
}
# Room for all successors of a goal with a known argument: 51 facts, 4 rules.
FEW_SUCCESSORS = {
    "steps": "60000",
    "n_validations": "4",
    "prover__max_successors": "64",
}

SETS = {
    "countries_S1": TrainingSet(command_line(prover__max_height="1")),
    "countries_S2": TrainingSet(
        command_line(prover__max_height="2"), products(HARD_SHARES, ENTROPY)
    ),
    "countries_S3": TrainingSet(
        [],
        products(
            [command_line(prover__max_height=h) for h in "23"],
            HARD_SHARES[:2],
            ENTROPY[:2],
        ),
    ),
    "family": TrainingSet(
        command_line(
            prover__max_height="2",
            score="best-proof",
            n_validations="4",
            n_validation_queries="300",
        ),
        products(HARD_SHARES, ENTROPY),
    ),
    "family, height 1": TrainingSet(
        command_line(**HEIGHT_1), products(HARD_SHARES, ENTROPY[::2])
    ),
    "umls": TrainingSet(
        command_line(**HEIGHT_1), products(HARD_SHARES, ENTROPY[::2])
    ),
    "family_kns": TrainingSet(command_line(**HALF_HARD)),
    "family_kns, 100 negatives": TrainingSet(command_line(**HALF_HARD)),
    "wn18rr": TrainingSet(command_line(**HALF_HARD)),
    "countries_S1, mined rules": TrainingSet(
        with_mined_rules("countries_S1", steps="60000", n_validations="4")
    ),
    "countries_S2, mined rules": TrainingSet(
        with_mined_rules("countries_S2", **FEW_SUCCESSORS), HARD_SHARES[1:]
    ),
    "countries_S3, mined rules": TrainingSet(
        with_mined_rules("countries_S3", **FEW_SUCCESSORS), HARD_SHARES[1:]
    ),
    "umls, mined rules": TrainingSet(with_mined_rules("umls", **LONGER), RATES),
    "family, mined rules": TrainingSet(
        with_mined_rules("family", **LONGER), RATES
    ),
    "wn18rr, mined rules": TrainingSet(
        with_mined_rules("wn18rr", **MANY_MINED_RULES), SMALL_STEPS
    ),
    "fb15k-237, mined rules": TrainingSet(
        with_mined_rules("fb15k-237", **MANY_MINED_RULES), SMALL_STEPS
    ),
    "family, RNNLogic rules": TrainingSet(
        command_line(
            **HEIGHT_1 | LONGER,
            n_validation_queries="300",
            rules="{data}/family/rules_rnnlogic.tsv",
            device="{device}",
        ),
        products(RATES, [command_line(**SMALL_NETWORK), []]),
    ),
    "wn18rr, RNNLogic rules": TrainingSet(
        command_line(**MANY_RULES, rules="{data}/wn18rr/rules_rnnlogic.tsv"),
        ENTROPY[:2],
    ),
    "fb15k-237, RNNLogic rules": TrainingSet(
        command_line(
            **MANY_RULES, rules="{data}/fb15k-237/rules_rnnlogic_top.tsv.gz"
        ),
        ENTROPY[:2],
    ),
}
# Sets that are not evaluated by a full ranking of all test queries; their untrained policy is that of learning rate 0.
EVALUATION_OPTIONS = {
    "family_kns, 100 negatives": ["--negatives", "100", "--queries", "1000"]
}
MINING_LOCK = (
    Lock()
)  # one run mines at a time: the next ones then find the rules in the cache


@dataclass(frozen=True, kw_only=True, slots=True)
class Trainer:
    """Where data, rules and GPUs are."""

    data: Path
    mined: Path  # folder that caches mined rules
    device: str  # of the sets with thousands of rules
    gpus: SimpleQueue[str]  # those that no run uses

    def run(self, trial: Trial) -> dict[str, Any]:
        """The row of one run on a free GPU: its results without the tables by relation."""
        dataset = trial.name.split(",")[0]

        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "run"
            program = [
                sys.executable,
                "-m",
                "funcppo",
                "train",
                str(self.data / dataset),
                "--out",
                str(out),
            ]
            self.call_on_free_gpu([*program, *self.options(trial, dataset)])
            results = json.loads((out / "results.json").read_text())
            if trial.name in EVALUATION_OPTIONS:
                results["test"] = evaluate_scores(
                    out, results, EVALUATION_OPTIONS[trial.name]
                )

        for scores in results["test"].values():
            scores.pop("by_group", None)
        results["dataset"] = trial.name
        return {
            "set": trial.name,
            "seed": trial.seed,
            "learning_rate_0": trial.is_frozen,
            "options": trial.options,
            "commit": current_commit(),
            "machine": describe_machine(),
            "results": results,
        }

    def options(self, trial: Trial, dataset: str) -> Options:
        """The options of a run, with the places of data and rules filled in."""
        settings = SETS[trial.name].settings
        mined = (
            mine_rules(self.data, dataset, self.mined)
            if "{mined}" in settings
            else None
        )
        options = [
            word.format(data=self.data, device=self.device, mined=mined)
            for word in [*PLAIN_COUNTS, *settings]
        ]
        options += [*trial.options, "--seed", str(trial.seed)]
        if trial.is_frozen:
            options += [
                "--ppo.learning-rate",
                "0",
                "--n-validations",
                "1",
            ]  # every validation sees the same
        return options

    def call_on_free_gpu(self, command: list[str]) -> None:
        """Run a program that sees one GPU, which no other run uses meanwhile."""
        gpu = self.gpus.get()
        try:
            subprocess.run(
                command,
                check=True,
                stdout=sys.stderr,
                env=os.environ | {"CUDA_VISIBLE_DEVICES": gpu},
            )
        finally:
            self.gpus.put(gpu)


def main() -> None:
    """Run what the record does not hold yet, then print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--data",
        type=Path,
        default=DATA,
        help="folder of the standard data sets",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=RESULTS / "main_results.json",
        help="record to complete",
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument(
        "--device",
        default="cpu",
        help="where the sets with thousands of rules are trained",
    )
    parser.add_argument(
        "--mined",
        type=Path,
        default=Path("runs/mined"),
        help="folder that caches mined rules",
    )
    parser.add_argument("--only", choices=SETS, action="append")
    args = parser.parse_args()
    record: dict[str, Any] = {"tried": [], "runs": []}
    if args.out.exists():
        record |= json.loads(args.out.read_text())
    names = args.only or list(SETS)
    trainer = Trainer(
        data=args.data,
        mined=args.mined,
        device=args.device,
        gpus=queue_gpus(args.jobs),
    )

    train_missing(record, names, trainer, args)
    untrained = tables.load_record("untrained_scores")["sets"]
    for table in (tables.PROVIDED_RULES, tables.MINED_RULES):
        chosen = [name for name in table if name in names]
        print(tables.results_table(record["runs"], untrained, chosen))


def train_missing(
    record: dict[str, Any],
    names: list[str],
    trainer: Trainer,
    args: argparse.Namespace,
) -> None:
    """Run what a record does not hold, and write it after every run."""
    with ThreadPoolExecutor(args.jobs) as pool:
        # The options of the runs follow from the trials.
        for future in as_completed(
            [
                pool.submit(trainer.run, trial)
                for trial in missing_trials(record, names)
            ]
        ):
            add_trial(record, future.result())
            write_record(args.out, record)

        # A run that fails raises once the others are in the record.
        runs = [
            pool.submit(trainer.run, trial)
            for trial in missing_runs(record, names, args.seeds)
        ]
        for future in as_completed(runs):
            if not future.exception():
                record["runs"].append(future.result())
                write_record(args.out, record)
        for future in runs:
            future.result()


def queue_gpus(n_jobs: int) -> SimpleQueue[str]:
    """The name of a GPU for each run at a time, of those that the user leaves visible."""
    all_gpus = ",".join(
        str(i) for i in range(max(1, torch.cuda.device_count()))
    )
    visible = (os.environ.get("CUDA_VISIBLE_DEVICES") or all_gpus).split(",")
    gpus = SimpleQueue[str]()
    for i in range(n_jobs):
        gpus.put(visible[i % len(visible)])
    return gpus


def missing_trials(record: dict[str, Any], names: list[str]) -> list[Trial]:
    """The options to try that a record does not hold."""
    present = {(row["set"], *row["options"]) for row in record["tried"]}
    trials = []
    for name in names:
        if len(SETS[name].tried) > 1:
            missing = [
                options
                for options in SETS[name].tried
                if (name, *options) not in present
            ]
            trials += [Trial(name, options, 0, False) for options in missing]
    return trials


def missing_runs(
    record: dict[str, Any], names: list[str], n_seeds: int
) -> list[Trial]:
    """The runs that a record does not hold: seed 0, learning rate 0, the other seeds."""
    present = {
        (row["set"], row["seed"], row["learning_rate_0"])
        for row in record["runs"]
    }
    variants = [
        (0, False),
        (0, True),
        *((seed, False) for seed in range(1, n_seeds)),
    ]
    trials = []
    for seed, is_frozen in variants:
        for name in names:
            if (name, seed, is_frozen) not in present:
                trials.append(
                    Trial(
                        name,
                        best_options(record["tried"], name),
                        seed,
                        is_frozen,
                    )
                )
    return trials


def add_trial(record: dict[str, Any], row: dict[str, Any]) -> None:
    """Note the result of a trial; the best of a set so far is its run at seed 0."""
    name, options = row["set"], row["options"]
    record["tried"].append(
        {
            "set": name,
            "options": options,
            "best_valid": row["results"]["best_valid_metric"],
        }
    )
    if best_options(record["tried"], name) == options:
        replaced = (name, 0, False)
        others = [
            run
            for run in record["runs"]
            if (run["set"], run["seed"], run["learning_rate_0"]) != replaced
        ]
        record["runs"] = [*others, row]


def best_options(tried: list[dict[str, Any]], name: str) -> Options:
    """The options of a set that ranked valid best; of equals those that come first in `SETS`."""
    best_valid = {
        tuple(row["options"]): row["best_valid"]
        for row in tried
        if row["set"] == name
    }
    return max(
        SETS[name].tried,
        key=lambda options: best_valid.get(tuple(options), -1.0),
    )


def mine_rules(data: Path, dataset: str, cache: Path) -> str:
    """The file of the rules of a data set, mined unless the cache holds them."""
    with MINING_LOCK:
        facts = load(data / dataset, facts_only=True)
        return str(
            rule_files.get_or_mine_rules(
                facts,
                MINED_SETS[dataset].mining,
                "cpu",
                ignore_progress,
                lambda _: None,
                cache,
            ).path
        )


def evaluate_scores(
    run: Path, results: dict[str, Any], options: Options
) -> dict[str, Any]:
    """What `funcppo evaluate` says of the untrained scores and of the trained one."""
    trained = results["score"]
    scores = {}
    for score in (
        f"exists@{results['height']}",
        "max-confidence",
        "noisy-or",
        trained,
    ):
        target = run / "evaluated.json"
        command = [
            sys.executable,
            "-m",
            "funcppo",
            "evaluate",
            str(run),
            "--score",
            score,
            "--json",
            str(target),
        ]
        subprocess.run([*command, *options], check=True, stdout=sys.stderr)
        name = f"{trained}, trained" if score == trained else score
        scores[name] = json.loads(target.read_text())
    return scores


if __name__ == "__main__":
    main()
