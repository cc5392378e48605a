"""What `funcppo train` reaches: of a data set alone within a time, and with rules that are given.

    python experiments/benchmarks/training_results.py levels --threads 2 --jobs 4
    python experiments/benchmarks/training_results.py levels --device cuda --only wn18rr
    python experiments/benchmarks/training_results.py given --jobs 2
    python experiments/benchmarks/training_results.py inductive --threads 2

levels: no options but the seed, the device and the seconds, 300 on a CPU and 600 on a GPU. Rules that lie beside the
facts are left out, so that they are mined, but for data that are nothing without theirs. A run that has the time for a
sample of test alone ranks all of it afterwards.
given: policies that learn from proofs with rules that come with a data set, by options that valid chose (`tried` of the
record has the others), each once more at learning rate 0, and the scores without a policy.
inductive: as levels, and the run then ranks the test triples of another graph with other entities (`NAME_ind`), known
by its own train triples: among all its entities, and among 50 sampled negatives.

A row holds the results of a run, what was chosen, and its seconds and peak memory. The records levels, given_rules and
inductive are written after every run, and what they hold is not run again.
"""

import argparse
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
    """Options of `funcppo train`."""

    training: str = ""
    rules: str = ""  # a file of the data


HARD = "--set prover.hard_negative_fraction"
SECONDS = {"cpu": 300, "cuda": 600}
LEVELS = {
    "fb15k-237": Options(),
    "wn18rr": Options(),
    "codex_s": Options(),
    "kinships": Options(),
    "umls": Options(),
    "family": Options(),
    "nations": Options(),
    "nsg_ablation_d3": Options(rules="nsg_ablation_d3/rules_given.txt"),
}
SPLITS = ("train.", "valid.", "test.")

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
        f"{PROOFS} --set prover.max_height=1 --steps 120000"
    ),
    "countries_S2": Options(
        f"{HEIGHT_2} {HARD}=0.5 --set ppo.entropy_coef=0.05"
    ),
    "countries_S3": Options(
        f"{HEIGHT_2} {HARD}=0.5 --set ppo.entropy_coef=0.05"
    ),
    "family": Options(
        f"{HEIGHT_2} --set score=best-proof --set n_validations=4 "
        f"--set n_validation_queries=300 {HARD}=0.5 --set ppo.entropy_coef=0.3"
    ),
    "family, height 1": Options(
        f"{HEIGHT_1} {HARD}=1 --set ppo.entropy_coef=1"
    ),
    "family, RNNLogic rules": Options(
        f"{HEIGHT_1} --set n_validations=8 --steps 400000 {HARD}=1 "
        "--set ppo.entropy_coef=1 --set ppo.n_envs=512 --set ppo.n_minibatches=16 "
        "--set n_validation_queries=300 --set ppo.learning_rate=3e-3",
        rules="family/rules_rnnlogic.tsv",
    ),
    "umls": Options(f"{HEIGHT_1} {HARD}=0.5 --set ppo.entropy_coef=1"),
    "family_kns": Options(f"{HEIGHT_1} {HARD}=0.5"),
    "wn18rr": Options(f"{HEIGHT_1} {HARD}=0.5"),
    "wn18rr, RNNLogic rules": Options(
        MANY_RULES, rules="wn18rr/rules_rnnlogic.tsv"
    ),
    "fb15k-237, RNNLogic rules": Options(
        MANY_RULES, rules="fb15k-237/rules_rnnlogic_top.tsv.gz"
    ),
}
INDUCTIVE = {"wn18rr_v1": Options(), "fb237_v1": Options()}
N_NEGATIVES = 50  # of GraIL's protocol
TABLES = {
    "levels": ("levels", LEVELS),
    "given": ("given_rules", GIVEN),
    "inductive": ("inductive", INDUCTIVE),
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
    parser.add_argument("--device", choices=SECONDS, default="cpu")
    parser.add_argument("--seconds", type=int, help="of each run")
    parser.add_argument("--only", metavar="NAME")
    args = parser.parse_args()

    name, sets = TABLES[args.table]
    out = args.out or RESULTS / f"{name}.json"
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    record: Row = {"runs": []}
    if out.exists():
        record = json.loads(out.read_text())

    names = [args.only] if args.only else [*sets]
    words = ["--device", args.device]
    if args.table != "given":
        words += ["--seconds", str(args.seconds or SECONDS[args.device])]
    with (
        tempfile.TemporaryDirectory() as folder,
        ThreadPoolExecutor(args.jobs) as pool,
    ):
        runs = []
        for name in names:
            target, own = prepare(name, sets[name], args.data, Path(folder))
            graph = None
            if args.table == "inductive":
                graph = (args.data / f"{name}_ind").resolve()
            for run in missing_runs(args, name, record):
                options = [*words, *own]
                runs.append(
                    pool.submit(train, name, target, *run, options, graph)
                )
        for future in as_completed(runs):
            row = future.result()
            row["machine"] = describe_machine(args.device)
            row["threads"] = args.threads
            record["runs"].append(row)
            write_record(out, record)

        for name in names if args.table == "given" else []:
            target, own = prepare(name, sets[name], args.data, Path(folder))
            height = next(
                row["results"]["height"]
                for row in record["runs"]
                if row["set"] == name
            )
            scores = untrained_scores(target, own, height)
            record.setdefault("untrained", {})[name] = scores
            write_record(out, record)


def missing_runs(
    args: argparse.Namespace, name: str, record: Row
) -> list[tuple[int, bool]]:
    """Return the runs of a set that a record does not hold: their seeds, and whether the learning rate is 0."""
    present = {
        (row["seed"], row["learning_rate_0"])
        for row in record["runs"]
        if row["set"] == name
        and (args.table == "given" or row["device"] == args.device)
    }
    runs = [(seed, False) for seed in range(args.seeds)]
    if args.table == "given":
        runs.append((0, True))
    return [run for run in runs if run not in present]


def prepare(
    name: str, options: Options, data: Path, folder: Path
) -> tuple[str, list[str]]:
    """Return the data set of a row, for `levels` links to its facts in a new folder, and the options of the row."""
    words = options.training.split()
    if options.rules:
        words += ["--rules", str(data / options.rules)]
    source = (data / name.partition(",")[0]).resolve()
    if options.training:
        return str(source), words
    facts = folder / source.name
    facts.mkdir(exist_ok=True)
    for path in source.glob("*.txt*"):
        if path.name.startswith(SPLITS):
            (facts / path.name).symlink_to(path)
    return str(facts), words


def train(
    name: str,
    target: str,
    seed: int,
    is_frozen: bool,
    options: list[str],
    graph: Path | None = None,
) -> Row:
    """Return the row of one training, with what the run ranks of another graph, if any."""
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
        other = rank_graph(out, graph, options[:2], seed) if graph else {}
        if results["test_is_sample"] and name in LEVELS:
            words = ["evaluate", str(out), *options[:2]]
            other["all_test"] = evaluate(words, out / "scores.json")
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
        "device": options[options.index("--device") + 1],
        "results": results,
        **other,
        "commit": current_commit(),
    }
    if "--rules" in options:
        rules = Path(options[options.index("--rules") + 1]).read_bytes()
        row["rules_sha256"] = hashlib.sha256(rules).hexdigest()
    return row


def rank_graph(run: Path, graph: Path, device: list[str], seed: int) -> Row:
    """Return what a run ranks of the test triples of another graph, by the candidates of each query."""
    ranked = {}
    for negatives in ("all", str(N_NEGATIVES)):
        words = ["evaluate", str(run), "--graph", str(graph), *device]
        words += ["--negatives", negatives, "--seed", str(seed)]
        ranked[negatives] = evaluate(words, run / "scores.json")
    return {"graph": graph.name, "ranked": ranked}


def evaluate(words: list[str], out: Path) -> Row:
    """Return what `funcppo evaluate` says, which is written to a file."""
    call([*words, "--json", str(out)])
    scores = json.loads(out.read_text())
    scores.pop("by_group", None)
    return scores


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
            words = ["evaluate", target, "--score", score, *options]
            test[score] = evaluate(words, out)
    return {"test": test, "height": height, "commit": current_commit()}


def call(words: list[str]) -> Cost:
    """Run a program; return what it took.

    Raises:
      RuntimeError: it fails.
    """
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "funcppo", *words], stdout=sys.stderr
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if status:
        raise RuntimeError(f"{' '.join(words)}: exit {process.returncode}")
    seconds = time.perf_counter() - start
    return Cost(round(seconds, 1), round(usage.ru_maxrss / 1000, 1))


if __name__ == "__main__":
    main()
