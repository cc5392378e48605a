"""What `funcppo mine` and `funcppo train` give: at their defaults, with more rules or time, and with given rules.

    python experiments/benchmarks/training_results.py defaults --data DIR
    python experiments/benchmarks/training_results.py tuned --only wn18rr+embeddings --device cuda --jobs 3
    python experiments/benchmarks/training_results.py given --jobs 2

defaults: no option but the seed; rules are mined once for each data set, unless they are part of it.
tuned: options that rank valid better; a name before a `+` is that of the data set.
given: policies that learn from proofs with rules that come with a data set, by options that valid chose (`tried` of the
record has the others), each once more at learning rate 0, and the scores without a policy.

A row holds the results of a run, what was chosen, and the seconds and the peak memory of both programs. The records
default_results, tuned_results and given_rules are written after every run, and what they hold is not run again.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments.benchmarks.side_by_side import write_record
from experiments.paths import DATA, RESULTS, make_parser
from experiments.provenance import current_commit, describe_machine

Row = dict[str, Any]


class Options(NamedTuple):
    """Options of the two programs."""

    training: str = ""
    # None: the rules are part of the data set, or a file of it
    mining: str | None = ""
    rules: str = ""  # that file


HARD = "--set prover.hard_negative_fraction"
DEFAULTS = {
    "clans:1500:0": Options(f"{HARD}=0.5", None),  # as `make train`
    "countries_S1": Options(mining=None),
    "countries_S2": Options(mining=None),
    "countries_S3": Options(mining=None),
    "kinships": Options(),
    "nations": Options(),
    "umls": Options(),
    "family": Options(),
    "wn18rr": Options(),
    "fb15k-237": Options(),
}

NETWORK = "--set questions.bellman_ford=True --set bellman_ford.batch_size=64"
EMBEDDING = (
    "--set questions.embedding=True --set embedding.rank=256 "
    "--set embedding.batch_size=2048"
)
WN18RR_RULES = (
    "--constants --max-length 5 --set votes_per_fact=5 --min-support 2 "
    "--min-confidence 0.001 --seconds 900"
)
WN18RR = (
    "--set questions.max_firings=260000000 --set questions.degrees=True "
    "--set listwise.n_epochs=5 "
    "--set listwise.penalty.rule_weight=1e-5 --set listwise.penalty.degree_weight=1e-3 "
    "--set n_validation_queries=3034 --set prover.max_height=1 "
    "--set prover.smoothing=5 --set prover.object_identity=False --seconds 3600"
)
WN18RR_EMBEDDING = f"{WN18RR} {EMBEDDING} --set embedding.penalty=0.1"
FB_RULES = "--constants --seconds 300"
FB_EMBEDDING = (
    "--set questions.max_firings=500000000 --seconds 3600 "
    "--set questions.degrees=False --set listwise.n_epochs=3 "
    "--set listwise.penalty.rule_weight=1e-5 "
    f"--set listwise.penalty.link_weight=1e-5 {EMBEDDING} "
    "--set embedding.n_epochs=40 --set embedding.penalty=0.05 "
    "--set n_validation_queries=17535 --set prover.max_height=1 "
    "--set prover.smoothing=None --set prover.object_identity=False "
    "--set rule_score=noisy-or@2"
)
FB_NETWORK = (
    f"{FB_EMBEDDING} --set embedding.n_epochs=20 --set listwise.n_epochs=2 {NETWORK} "
    "--set bellman_ford.n_steps=4500"
)
NO_LINKS = "--set questions.links=off"
TUNED = {
    "kinships+network": Options(
        "--seconds 3600",
        "--set votes_per_fact=1",
    ),
    "wn18rr": Options(WN18RR, WN18RR_RULES),
    "wn18rr+embeddings": Options(WN18RR_EMBEDDING, WN18RR_RULES),
    "wn18rr+embeddings+network": Options(
        f"{WN18RR_EMBEDDING} {NETWORK} --set bellman_ford.n_layers=5 --set bellman_ford.n_steps=1200",
        WN18RR_RULES,
    ),
    "fb15k-237": Options(
        "--set questions.max_firings=80000000 --seconds 3600",
        FB_RULES,
    ),
    "fb15k-237+embeddings": Options(FB_EMBEDDING, FB_RULES),
    "fb15k-237+embeddings+network": Options(FB_NETWORK, FB_RULES),
    "fb15k-237+embeddings+network+no-links": Options(
        f"{FB_NETWORK} {NO_LINKS}", FB_RULES
    ),
    "fb15k-237+no-links": Options(f"--seconds 900 {NO_LINKS}"),
    "kinships+no-links": Options(NO_LINKS),
    "umls+no-links": Options(NO_LINKS),
    "family+no-links": Options(NO_LINKS),
    "wn18rr+no-links": Options(NO_LINKS),
}

PROOFS = "--learner proofs --set prover.smoothing=None --set prover.object_identity=False"
HEIGHT_1 = (
    f"{PROOFS} --set prover.max_height=1 --set score=success --set n_validations=4 "
    "--steps 120000"
)
HEIGHT_2 = f"{PROOFS} --set prover.max_height=2 --steps 120000"
MANY_RULES = (
    f"{HEIGHT_1} --set n_validation_queries=500 --set n_validations=12 --steps 5000000 "
    f"{HARD}=1 --set ppo.learning_rate=3e-3 --set ppo.entropy_coef=0.3 "
    "--set ppo.n_envs=4096 --set ppo.n_minibatches=16 --set prover.embed_dim=16 "
    "--set prover.hidden_dim=32"
)
GIVEN = {
    "countries_S1": Options(
        f"{PROOFS} --set prover.max_height=1 --steps 120000", None
    ),
    "countries_S2": Options(
        f"{HEIGHT_2} {HARD}=0.5 --set ppo.entropy_coef=0.05", None
    ),
    "countries_S3": Options(
        f"{HEIGHT_2} {HARD}=0.5 --set ppo.entropy_coef=0.05", None
    ),
    "family": Options(
        f"{HEIGHT_2} --set score=best-proof --set n_validations=4 "
        f"--set n_validation_queries=300 {HARD}=0.5 --set ppo.entropy_coef=0.3",
        None,
    ),
    "family, height 1": Options(
        f"{HEIGHT_1} {HARD}=1 --set ppo.entropy_coef=1", None
    ),
    "family, RNNLogic rules": Options(
        f"{HEIGHT_1} --set n_validations=8 --steps 400000 {HARD}=1 "
        "--set ppo.entropy_coef=1 --set ppo.n_envs=512 --set ppo.n_minibatches=16 "
        "--set n_validation_queries=300 --set ppo.learning_rate=3e-3",
        None,
        "family/rules_rnnlogic.tsv",
    ),
    "umls": Options(f"{HEIGHT_1} {HARD}=0.5 --set ppo.entropy_coef=1", None),
    "family_kns": Options(f"{HEIGHT_1} {HARD}=0.5", None),
    "wn18rr": Options(f"{HEIGHT_1} {HARD}=0.5", None),
    "wn18rr, RNNLogic rules": Options(
        MANY_RULES, None, "wn18rr/rules_rnnlogic.tsv"
    ),
    "fb15k-237, RNNLogic rules": Options(
        MANY_RULES, None, "fb15k-237/rules_rnnlogic_top.tsv.gz"
    ),
}
TABLES = {
    "defaults": ("default_results", DEFAULTS),
    "tuned": ("tuned_results", TUNED),
    "given": ("given_rules", GIVEN),
}
UNTRAINED_SCORES = ("exists", "max-confidence", "noisy-or")


class Cost(NamedTuple):
    """What a program took."""

    seconds: float
    peak_mb: float


def main() -> None:
    """Run what the record does not hold yet."""
    parser = make_parser(__doc__)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--data", type=Path, default=DATA, metavar="DIR")
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, metavar="N")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", metavar="NAME")
    args = parser.parse_args()

    name, sets = TABLES[args.table]
    out = args.out or RESULTS / f"{name}.json"
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    record: Row = {"runs": []}
    if out.exists():
        record = json.loads(out.read_text())

    for name in [args.only] if args.only else sets:
        missing = missing_runs(args.table, name, args.seeds, record)
        if not missing:
            continue
        options = sets[name]
        target, words, mining = prepare(name, options, args.data)
        words += ["--device", args.device, *options.training.split()]
        with ThreadPoolExecutor(args.jobs) as pool:
            runs = [
                pool.submit(train, name, target, *run, words, mining)
                for run in missing
            ]
            for future in as_completed(runs):
                row = future.result()
                row["machine"] = describe_machine(args.device)
                record["runs"].append(row)
                write_record(out, record)
        if args.table == "given":
            scores = untrained_scores(target, words, row["results"]["height"])
            record.setdefault("untrained", {})[name] = scores
            write_record(out, record)


def missing_runs(
    table: str, name: str, n_seeds: int, record: Row
) -> list[tuple[int, bool]]:
    """Return the runs of a set that a record does not hold: their seeds, and whether the learning rate is 0."""
    present = {
        (row["set"], row["seed"], row.get("learning_rate_0", False))
        for row in record["runs"]
    }
    runs = [(seed, False) for seed in range(n_seeds)]
    if table == "given":
        runs.append((0, True))
    return [run for run in runs if (name, *run) not in present]


def prepare(
    name: str, options: Options, data: Path
) -> tuple[str, list[str], Cost | None]:
    """Return the data set of a row, the options of its rules, and what mining these took."""
    dataset = name.partition(",")[0].partition("+")[0]
    target = name if ":" in name else str((data / dataset).resolve())
    if options.rules:
        return target, ["--rules", str(data / options.rules)], None
    if options.mining is None:
        return target, [], None
    rules = str(Path(tempfile.mkdtemp()) / "rules.tsv")
    words = ["mine", target, "--out", rules, *options.mining.split()]
    return target, ["--rules", rules], call(words)


def train(
    name: str,
    target: str,
    seed: int,
    is_frozen: bool,
    options: list[str],
    mining: Cost | None,
) -> Row:
    """Return the row of one training."""
    if is_frozen:
        # every validation sees the same
        options = [
            *options,
            "--set",
            "ppo.learning_rate=0",
            "--set",
            "n_validations=1",
        ]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        words = ["train", target, "--out", str(out), "--seed", str(seed)]
        cost = call([*words, *options])
        results = json.loads((out / "results.json").read_text())
        config = json.loads((out / "config.json").read_text())
    results.pop("calibration", None)
    for scores in results["test"].values():
        scores.pop("by_group", None)
    results["dataset"] = name
    row = {
        "set": name,
        "seed": seed,
        "learning_rate_0": is_frozen,
        "options": options,
        "rule_score": config["rule_score"],
        "smoothing": config["prover"]["smoothing"],
        "object_identity": config["prover"]["object_identity"],
        "training": cost._asdict(),
        "mining": mining and mining._asdict(),
        "results": results,
        "commit": current_commit(),
    }
    if "--rules" in options:
        rules = Path(options[options.index("--rules") + 1]).read_bytes()
        row["rules_sha256"] = hashlib.sha256(rules).hexdigest()
    return row


def untrained_scores(target: str, words: list[str], height: int) -> Row:
    """Return what `funcppo evaluate` says of the scores without a policy, by plain counts of rules."""
    options = ["--height", str(height), "--set", "smoothing=None"]
    options += ["--set", "object_identity=False"]
    if "--rules" in words:
        options += ["--rules", words[words.index("--rules") + 1]]
    test = {}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "scores.json"
        for name in UNTRAINED_SCORES:
            score = f"{name}@{height}" if name == "exists" else name
            call(
                [
                    *("evaluate", target, "--score", score),
                    *("--json", str(out), *options),
                ]
            )
            test[score] = json.loads(out.read_text())
            test[score].pop("by_group", None)
    return {"test": test, "height": height, "commit": current_commit()}


def call(words: list[str]) -> Cost:
    """Run a program; return what it took.

    Raises:
      RuntimeError: it fails.
    """
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "funcppo", *words],
        stdout=sys.stderr,
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if status:
        raise RuntimeError(f"{' '.join(words)}: exit {process.returncode}")
    seconds = time.perf_counter() - start
    return Cost(round(seconds, 1), round(usage.ru_maxrss / 1000, 1))


if __name__ == "__main__":
    main()
