"""Tables and sentences with numbers, made from the committed records and put between the markers of a document.

    python experiments/tables.py                 rewrite the blocks of every document
    python experiments/tables.py --check         exit 1, naming the stale blocks, where a rewrite would change one
    python experiments/tables.py --print NAME    print one block

Documents are README.md, INVESTIGATION.md, README.md of experiments/ and of experiments/reproducers/,
experiments/results/full_step_matrix.md and docs/**/*.md. A block stands between the lines
`<!-- results:NAME -->` and `<!-- /results:NAME -->`, alone on their lines; what is between them is replaced. The tables
between `<!-- matrix:NAME -->` and `<!-- /matrix -->` are those of matrix/tables.py. Blocks (of performance each ends in
a line that names its records, hardware, versions and commits):

    readme-ppo                  what the PPO example of the README prints
    readme-train                what `make train` prints: the table and the proof
    readme-results              the same in few columns
    defaults                    a row a data set: what `funcppo train` gives at its defaults, with seconds and memory
    tuned                       the same with more rules or more time
    fifty-graphs                a row a range of sizes: generated graphs at the defaults, within a time limit
    results-provided-rules      every score with the rules that come with a data set, over seeds
    mining-bounds               what mining takes on generated graphs of all sizes
    performance-cartpole        an iteration of CartPole on an H200 as one CUDA graph; JAX and PureJaxRL beside
    learning-curves             returns of training by published settings, beside published returns
    performance-prover          an iteration of learning to prove, and its rollout
    performance-time-of-update  an update of CartPole and of games, JAX beside
    performance-startup         seconds to the end of the first iteration
    performance-scoring         candidates scored, the former design beside; full rankings
    compiler-faults             a row a version of PyTorch: write-backs lost, the storage of what is transformed read
    performance-processes       an update of PPO in one and several processes, and what its collectives cost
    large-graph                 a generated graph written, indexed, opened, looked up and ranked
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # project root

from experiments import paths
from funcppo.envs.registry import ENVIRONMENTS
from funcppo.kg.mining.config import MiningConfig
from funcppo.rl.settings import published_settings

Row = dict[str, Any]
Record = dict[str, Any]

BLOCK = re.compile(
    r"(<!-- results:([\w-]+) -->\n)(.*?)(<!-- /results:\2 -->)", re.DOTALL
)
MARKER = re.compile(r"<!-- /?results:([\w-]+) -->")

# The rows of the results, in this order: the name in the record, and what stands in the table.
PROVIDED_RULES = {
    "countries_S1": "Countries S1",
    "countries_S2": "Countries S2",
    "countries_S3": "Countries S3",
    "family": "Family",
    "family, height 1": "Family",
    "family, RNNLogic rules": "Family, RNNLogic's rules",
    "umls": "UMLS",
    "family_kns": "Family, another split",
    "family_kns, 100 negatives": "the same, 100 negatives a query",
    "wn18rr": "WN18RR",
    "wn18rr, RNNLogic rules": "WN18RR, RNNLogic's rules",
    "fb15k-237, RNNLogic rules": "FB15k-237, RNNLogic's rules",
}
MINED_RULES = {
    "countries_S1, mined rules": "Countries S1",
    "countries_S2, mined rules": "Countries S2",
    "countries_S3, mined rules": "Countries S3",
    "umls, mined rules": "UMLS",
    "family, mined rules": "Family",
    "wn18rr, mined rules": "WN18RR",
    "fb15k-237, mined rules": "FB15k-237",
}
MINING_SETS = {
    "countries_S1": "Countries S1",
    "countries_S2": "Countries S2",
    "countries_S3": "Countries S3",
    "kinships": "Kinships",
    "nations": "Nations",
    "umls": "UMLS",
    "family": "Family",
    "wn18rr": "WN18RR",
    "fb15k-237": "FB15k-237",
}
# Small graphs of these are connected parts; of others random samples.
CONNECTED_SETS = ("wn18rr", "fb15k-237")


class Published(NamedTuple):
    """A published result on the test split, filtered MRR."""

    value: float
    system: str
    url: str


# As the systems' own pages report them. RED-GNN and NBFNet are graph networks, SAFRAN applies mined rules, RulE
# embeds them. Papers split the small sets in different ways.
NBFNET_URL = "https://github.com/DeepGraphLearning/NBFNet"
CONVE_URL = "https://github.com/TimDettmers/ConvE"
RED_GNN_URL = "https://github.com/LARS-research/RED-GNN"
SAFRAN_URL = (
    "https://github.com/OpenBioLink/SAFRAN/blob/master/docs/source/results.rst"
)
RULE_URL = "https://github.com/XiaojuanTang/RulE"
PUBLISHED = {
    "Kinships": [
        Published(0.83, "ConvE", CONVE_URL),
        Published(0.736, "RulE", RULE_URL),
    ],
    "Nations": [Published(0.82, "ConvE", CONVE_URL)],
    "Family": [Published(0.992, "RED-GNN", RED_GNN_URL)],
    "UMLS": [Published(0.964, "RED-GNN", RED_GNN_URL)],
    "WN18RR": [
        Published(0.551, "NBFNet", NBFNET_URL),
        Published(0.502, "SAFRAN", SAFRAN_URL),
    ],
    "FB15k-237": [
        Published(0.415, "NBFNet", NBFNET_URL),
        Published(0.389, "SAFRAN", SAFRAN_URL),
    ],
}
# Milliseconds an iteration of PureJaxRL's own ppo.py (commit 31756b1) with the same sizes on one H200, JAX's default
# precision (TF32); measured by hand.
PUREJAXRL_MS = {
    "4x128": 6.02,
    "2048x128": 11.1,
    "64 learners": 6.8,
    "1024 learners": 16.7,
}

CARTPOLE_LABELS = {
    "4x128": "4 environments x 128 steps",
    "2048x128": "2048 x 128",
    "64 learners": "64 learners of 4 x 128, vmap",
    "1024 learners": "1024 learners of 4 x 128, vmap",
}


# These records name the commit and the hardware of each of their rows.
RESULTS_ORIGIN = (
    "\nRecords: `experiments/results/main_results.json` (policies), "
    "`experiments/results/untrained_scores.json` (scores without a policy).\n"
)


def load_record(name: str) -> Record:
    """A committed record by its name without `.json`."""
    return json.loads((paths.RESULTS / f"{name}.json").read_text())


def cells_of(name: str) -> dict[str, Row]:
    """The rows of a record by the name of their cell."""
    return {row["cell"]: row for row in load_record(name)["rows"]}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def origin(*names: str) -> str:
    """The line that names records, hardware, versions and commits."""
    parts = []
    for name in names:
        record = load_record(name)
        machine = record["machine"]
        hardware = machine.get("device") or machine["cpu"]
        rows = record["rows"] if isinstance(record.get("rows"), list) else []
        commits = [
            machine["commit"],
            *(row["commit"] for row in rows if "commit" in row),
        ]
        commits = list(dict.fromkeys(commit[:7] for commit in commits))
        torch_version = machine["torch"].split("+")[0]
        parts.append(
            f"`{name}` ({hardware}; torch {torch_version}; {', '.join(commits)})"
        )
    return f"\nRecords in `experiments/results/`: {', '.join(parts)}.\n"


def digits(value: float, n: int = 3) -> str:
    """A number with `n` significant digits, never in scientific notation, and with all digits before its point."""
    magnitude = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    if magnitude >= n:
        return f"{value:,.0f}"
    text = f"{value:.{n}g}"
    return (
        f"{float(text):.10f}".rstrip("0").rstrip(".") if "e" in text else text
    )


def at_most(value: float) -> str:
    """The number with one significant digit that is not below a value."""
    if value == 0.0:
        return "0"
    exponent = math.floor(math.log10(value))
    leading = math.ceil(
        round(value / 10.0**exponent, 9)
    )  # 3.0000000001 of rounding is a 3
    return f"{leading * 10.0**exponent:.0e}"


# Results


def main_metric(name: str) -> tuple[str, str]:
    """The field and the label of the metric of a data set."""
    return (
        ("auc_pr", "AUC-PR") if name.startswith("countries") else ("mrr", "MRR")
    )


def metric_text(value: float) -> str:
    """Four digits, as rankings are compared."""
    return f"{value:.4f}"


def mean_and_spread(values: Sequence[float]) -> str:
    """Mean, and the sample standard deviation over seeds where it is not nothing; empty for no values."""
    if not values:
        return ""
    spread = stdev(values) if len(values) > 1 else 0.0
    return metric_text(mean(values)) + (
        f" ± {spread:.4f}" if spread > 5e-5 else ""
    )


def runs_of(
    runs: Sequence[Row], name: str, *, frozen: bool = False
) -> list[Row]:
    """The results of a set: of its seeds, or at learning rate 0."""
    return [
        row["results"]
        for row in runs
        if row["set"] == name and row["learning_rate_0"] == frozen
    ]


def policy_scores(
    results: Sequence[Row], kind: str, metric: str
) -> list[float]:
    """What the policy reaches in each run, `untrained` or `trained`; none where a run did not measure it."""
    values = []
    for result in results:
        scores = result["test"].get(f"{result['score']}, {kind}")
        if scores is not None:
            values.append(scores[metric])
    return values


def results_table(
    runs: Sequence[Row], untrained: Record, names: Iterable[str]
) -> str:
    """A row a set: the scores without a policy, then mean and spread of the policy over seeds.

    Args:
      runs: those of `main_results`.
      untrained: the sets of `untrained_scores`.
    """
    head = [
        "data",
        "metric",
        "height",
        "rules",
        "exists",
        "max-confidence",
        "noisy-or",
        "policy, untrained",
    ]
    head += ["policy, trained", "learning rate 0", "ceiling", "seconds"]
    labels = PROVIDED_RULES | MINED_RULES
    rows = []
    for name in names:
        results = runs_of(runs, name)
        if not results:
            continue
        metric, metric_label = main_metric(name)
        test, height = untrained[name]["test"], results[0]["height"]
        rows.append(
            [
                labels[name],
                metric_label,
                str(height),
                f"{results[0]['rules']:,}",
                *(
                    metric_text(test[score][metric])
                    for score in (
                        f"exists@{height}",
                        "max-confidence",
                        "noisy-or",
                    )
                ),
                mean_and_spread(policy_scores(results, "untrained", metric)),
                mean_and_spread(policy_scores(results, "trained", metric)),
                mean_and_spread(
                    policy_scores(
                        runs_of(runs, name, frozen=True), "trained", metric
                    )
                ),
                metric_text(results[0]["test"]["max-confidence"]["ceiling"]),
                f"{mean(result['seconds'] for result in results):.0f}",
            ]
        )
    return table(head, rows)


def indented(text: str) -> str:
    """Printed text as an indented block."""
    lines = [f"    {line}".rstrip() for line in text.strip("\n").splitlines()]
    return "\n".join(lines) + "\n"


def readme_ppo() -> str:
    """The block of this name."""
    return indented(load_record("readme_outputs")["ppo"])


def readme_train() -> str:
    """The block of this name."""
    return indented(load_record("readme_outputs")["train"])


def question_results() -> str:
    """The block of this name."""
    record = load_record("question_results")
    rows = record["rows"]
    head = ["data", "rules", "method", "valid MRR", "test MRR", "Hits@1"]
    head += ["Hits@10", "ceiling", "seconds"]
    lines: list[list[str]] = []
    for name, method in dict.fromkeys(
        (row["set"], row["method"]) for row in rows
    ):
        runs = [r for r in rows if (r["set"], r["method"]) == (name, method)]
        tests = [run["test"] for run in runs]
        lines.append(
            [
                name,
                f"{runs[0]['n_rules']:,}",
                method,
                mean_and_spread([run["valid_mrr"] for run in runs]),
                mean_and_spread([test["mrr"] for test in tests]),
                metric_text(mean(test["hits@1"] for test in tests)),
                metric_text(mean(test["hits@10"] for test in tests)),
                metric_text(tests[0]["ceiling"]),
                f"{mean(run['seconds'] for run in runs):.0f}",
            ]
        )
    return table(head, lines) + record_line("question_results", rows)


def record_line(
    name: str, rows: Sequence[Row], *, is_shared: bool = False
) -> str:
    """The line that names a record and the machine, version and commits of its rows.

    Args:
      is_shared: other work ran beside.
    """
    machine = rows[0]["machine"]
    commits = dict.fromkeys(row["machine"]["commit"] for row in rows)
    shared = ", shared with other work" if is_shared else ""
    return (
        f"\nRecord: `experiments/results/{name}.json` ({machine['device']}{shared}; "
        f"torch {machine['torch'].split('+')[0]}; {', '.join(commits)}).\n"
    )


def embedding_prior() -> str:
    """The block of this name."""
    rows = load_record("embedding_prior")["rows"]
    head = ["data", "method", "valid MRR", "gain on valid, +- its error"]
    head += ["test MRR", "mean weight", "seconds"]
    lines: list[list[str]] = []
    for name, method in dict.fromkeys(
        (row["set"], row["method"]) for row in rows
    ):
        runs = [r for r in rows if (r["set"], r["method"]) == (name, method)]
        gain = mean(run["valid_gain"] for run in runs)
        error = mean(run["valid_gain_error"] for run in runs)
        lines.append(
            [
                name,
                method,
                mean_and_spread([run["valid_mrr"] for run in runs]),
                f"{gain:+.4f} ± {error:.4f}" if error else "",
                mean_and_spread([run["test_mrr"] for run in runs]),
                f"{mean(run['mean_prior_weight'] for run in runs):.2f}",
                f"{mean(run['seconds'] for run in runs):.0f}",
            ]
        )
    return table(head, lines) + record_line(
        "embedding_prior", rows, is_shared=True
    )


def bellman_ford() -> str:
    """The block of this name."""
    rows = load_record("bellman_ford")["rows"]
    head = ["data", "method", "valid MRR", "gain on valid, +- its error"]
    head += ["weight", "epochs", "seconds"]
    lines: list[list[str]] = []
    in_order = sorted(rows, key=lambda row: row["set"])
    for name, method in dict.fromkeys(
        (row["set"], row["method"]) for row in in_order
    ):
        runs = [r for r in rows if (r["set"], r["method"]) == (name, method)]
        gain = mean(run["valid_gain"] for run in runs)
        error = mean(run["valid_gain_error"] for run in runs)
        weights = [w for run in runs for w in run["weights"] if w is not None]
        training = [run["training"] for run in runs]
        epochs = f"{mean(one['epochs'] for one in training):.1f}"
        seconds = f"{mean(one['seconds'] for one in training):.0f}"
        lines.append(
            [
                name,
                method,
                mean_and_spread([run["valid_mrr"] for run in runs]),
                f"{gain:+.4f} ± {error:.4f}" if error else "",
                f"{mean(weights):.2f}" if weights else "",
                epochs if error else "",
                seconds if error else "",
            ]
        )
    return table(head, lines) + record_line(
        "bellman_ford", rows, is_shared=True
    )


DEFAULTS_LABELS = {
    "clans:1500:0": "clans:1500:0 (`make train`)",
    "countries_S1": "Countries S1",
    "countries_S2": "Countries S2",
    "countries_S3": "Countries S3",
    "kinships": "Kinships",
    "nations": "Nations",
    "umls": "UMLS",
    "family": "Family",
    "wn18rr": "WN18RR",
    "fb15k-237": "FB15k-237",
}


def published_text(data: str) -> str:
    """The published results of a data set, as a cell."""
    cells = [
        f"{x.value:g} [{x.system}]({x.url})" for x in PUBLISHED.get(data, [])
    ]
    return ", ".join(cells) or "-"


def defaults() -> str:
    """The block of this name."""
    record = load_record("default_results")
    head = ["data", "rules", "mining", "training", "memory", "ceiling"]
    head += ["published", "rule confidences", "linear control"]
    head += ["untrained policy", "trained"]
    control = load_record("linear_control")
    rows = []
    for name, label in DEFAULTS_LABELS.items():
        runs = [run for run in record["runs"] if run["set"] == name]
        *cells, untrained, trained = defaults_row(
            label, runs, published_text(label)
        )
        fits = control["sets"].get(name, {"runs": []})["runs"]
        linear = mean_and_spread([fit["test"] for fit in fits]) if fits else ""
        rows.append([*cells, linear, untrained, trained])
    fits = [
        {"commit": row["commit"], "machine": control["machine"]}
        for row in control["sets"].values()
    ]
    return (
        table(head, rows)
        + f"\nRecords in `experiments/results/`: `default_results` ({where_run(record['runs'])}; one thread), "
        f"`linear_control` ({where_run(fits)}).\n"
    )


def readme_results() -> str:
    """The block of this name."""
    record = load_record("default_results")
    head = ["data", "published", "rule confidences", "trained"]
    rows = []
    for name, label in DEFAULTS_LABELS.items():
        runs = [run for run in record["runs"] if run["set"] == name]
        *_, published, _, _, trained = defaults_row(
            label, runs, published_text(label)
        )
        rule_score = runs[0]["results"]["test"][runs[0]["rule_score"]]
        rows.append([label, published, metric_text(rule_score["mrr"]), trained])
    return (
        table(head, rows)
        + f"\nRecord: `experiments/results/default_results.json` ({where_run(record['runs'])}; one thread).\n"
    )


def where_run(runs: list[Row]) -> str:
    """The machines and the commits of some runs."""
    machines = dict.fromkeys(
        f"{run['machine']['device']}; torch {run['machine']['torch'].split('+')[0]}"
        for run in runs
    )
    commits = dict.fromkeys(run["commit"] for run in runs)
    return f"{'; '.join(machines)}; {', '.join(commits)}"


def defaults_row(label: str, runs: list[Row], published: str) -> list[str]:
    """The cells of one data set from the runs of all its seeds."""
    test = runs[0]["results"]["test"]
    trained = [
        scores["mrr"]
        for run in runs
        for score, scores in run["results"]["test"].items()
        if score.endswith(", trained")
    ]
    untrained = [
        scores["mrr"]
        for score, scores in test.items()
        if score.endswith(", untrained")
    ]
    rule_score = runs[0]["rule_score"]
    mining = runs[0]["mining"]
    seconds = [run["training"]["seconds"] for run in runs]
    memory = [run["training"]["peak_mb"] for run in runs]
    memory += [mining["peak_mb"]] if mining else []
    seeds = f", {len(runs)} seed" if len(runs) == 1 else ""
    if runs[0]["results"]["test_is_sample"]:
        n_ranked = {run["results"]["n_test_queries"] for run in runs}
        sizes = " to ".join(
            f"{n:,}" for n in sorted({min(n_ranked), max(n_ranked)})
        )
        seeds += f", a sample of {sizes} test triples"
    return [
        label + seeds,
        "mined" if mining else "provided",
        f"{mining['seconds']:.0f} s" if mining else "",
        f"{max(seconds):.0f} s",
        f"{max(memory) / 1000:.2f} GB",
        f"{test[rule_score]['ceiling']:.4f}",
        published,
        f"{test[rule_score]['mrr']:.4f} ({rule_score})",
        f"{untrained[0]:.4f}",
        mean_and_spread(trained),
    ]


TUNED_LABELS = {
    "kinships+network": "Kinships, Bellman-Ford network",
    "wn18rr": "WN18RR",
    "wn18rr+embeddings": "WN18RR, link embeddings",
    "wn18rr+embeddings+network": "WN18RR, link embeddings and Bellman-Ford network",
    "fb15k-237": "FB15k-237",
    "fb15k-237+embeddings": "FB15k-237, link embeddings",
    "fb15k-237+embeddings+network": "FB15k-237, link embeddings and Bellman-Ford network",
    "fb15k-237+embeddings+network+no-links": "FB15k-237, the same without facts that link a candidate",
    "fb15k-237+no-links": "FB15k-237, 900 seconds, without facts that link a candidate",
    "kinships+no-links": "Kinships, by default, without facts that link a candidate",
    "umls+no-links": "UMLS, by default, without facts that link a candidate",
    "family+no-links": "Family, by default, without facts that link a candidate",
    "wn18rr+no-links": "WN18RR, by default, without facts that link a candidate",
}


def tuned() -> str:
    """The block of this name."""
    record = load_record("tuned_results")
    head = ["data", "rules", "training", "memory", "ceiling"]
    head += ["rule confidences", "untrained", "trained", "Hits@10"]
    rows = []
    for name, label in TUNED_LABELS.items():
        runs = [run for run in record["runs"] if run["set"] == name]
        if runs:
            rows.append(tuned_row(label, runs))
    return (
        table(head, rows)
        + "\nRecord, with the options of each row: `experiments/results/tuned_results.json` "
        f"({where_run(record['runs'])}).\n"
    )


def tuned_row(label: str, runs: list[Row]) -> list[str]:
    """The cells of one data set from the runs of all its seeds."""
    test = runs[0]["results"]["test"]
    rule_score = test[runs[0]["rule_score"]]
    trained = [run["results"]["test"]["evidence, trained"] for run in runs]
    seconds = max(run["training"]["seconds"] for run in runs)
    memory = max(run["training"]["peak_mb"] for run in runs)
    return [
        label,
        f"{runs[0]['results']['rules']:,}",
        f"{seconds:.0f} s",
        f"{memory / 1000:.2f} GB",
        f"{rule_score['ceiling']:.4f}",
        metric_text(rule_score["mrr"]),
        metric_text(test["evidence, untrained"]["mrr"]),
        mean_and_spread([scores["mrr"] for scores in trained]),
        mean_and_spread([scores["hits@10"] for scores in trained]),
    ]


# what `train` says of a graph whose facts support no rule
NO_RULES = "no rules given, and the data hold none"


GRAPH_SIZES = (1_000, 10_000, 100_000, 1_000_000)


def fifty_graphs_table(record: Record) -> str:
    """A row a range of sizes; then the runs that reached the time limit, that failed, and that mined nothing."""
    head = ["triples", "graphs", "most seconds", "most GB"]
    head += ["best untrained", "trained"]
    runs = record["runs"]
    rows = []
    for low, high in zip((0, *GRAPH_SIZES), GRAPH_SIZES):
        of_size = [run for run in runs if low <= run["n_triples"] < high]
        if of_size:
            rows.append([f"below {high:,}", *fifty_graphs_cells(of_size)])

    over = sum(run["answer_seconds"] is not None for run in runs)
    ended = [run for run in runs if run["answer_seconds"] is None]
    errors = [run["error"] for run in ended if run["status"]]
    n_empty = sum(NO_RULES in error for error in errors)
    counts = (
        f"{len(runs)} runs; {over} over the time limit; "
        f"{len(errors) - n_empty} failed; {n_empty} without a rule."
    )
    return table(head, rows) + f"\n{counts}\n"


def fifty_graphs_cells(runs: Sequence[Row]) -> list[str]:
    """How many graphs, the largest costs, and means over the graphs with results."""
    untrained, trained = [], []
    for run in runs:
        scores = run.get("mrr") or {}
        fitted = (", trained", ", listwise fit")
        if scores:
            untrained.append(
                max(
                    x for name, x in scores.items() if not name.endswith(fitted)
                )
            )
            trained += [
                x for name, x in scores.items() if name.endswith(", trained")
            ]
    return [
        str(len(runs)),
        f"{max(run['seconds'] for run in runs):.0f}",
        f"{max(run['peak_mb'] for run in runs) / 1000:.2f}",
        metric_text(mean(untrained)) if untrained else "",
        metric_text(mean(trained)) if trained else "",
    ]


def fifty_graphs() -> str:
    """The block of this name."""
    record = load_record("fifty_graphs")
    runs = [
        {**run, "commit": run["machine"]["commit"]} for run in record["runs"]
    ]
    limits = dict.fromkeys(f"{run['limit_seconds']:g} s" for run in runs)
    return (
        fifty_graphs_table(record)
        + f"\nTime limit: {', '.join(limits)}. Record: `experiments/results/fifty_graphs.json` "
        f"({where_run(runs)}; one thread).\n"
    )


def small_graphs_table(rows: Sequence[Row]) -> str:
    """A row a set and size, means over its graphs; then what training gains over all graphs."""
    head = ["data", "triples", "graphs", "rules", "seconds", "ceiling"]
    head += ["rule confidences", "untrained policy", "trained", "answers"]
    head += ["trained - untrained, by graph", "larger test", "the same on it"]
    lines: list[list[str]] = []
    for name, n in dict.fromkeys((row["set"], row["triples"]) for row in rows):
        graphs = [r for r in rows if (r["set"], r["triples"]) == (name, n)]
        larger = [row["large_test"] for row in graphs]
        ways = ("rule_score", "untrained", "trained", "answers")
        lines.append(
            [
                MINING_SETS[name],
                f"{n:,}",
                str(len(graphs)),
                f"{mean(row['n_rules'] for row in graphs):,.0f}",
                f"{mean(row['seconds'] for row in graphs):.0f}",
                metric_text(mean(row["ceiling"] for row in graphs)),
                *(
                    metric_text(mean(row["mrr"][way] for row in graphs))
                    for way in ways
                ),
                gains_with_errors(graphs),
                f"{mean(test['n_test_queries'] for test in larger):,.0f}",
                gains_with_errors(larger),
            ]
        )
    larger_test = small_graphs_larger_test(rows)
    return table(head, lines) + "\n" + small_graphs_gains(rows) + larger_test


def gains_with_errors(tests: Iterable[Row]) -> str:
    """What training gains on each test, with the standard error."""
    gains = [test["gain"]["trained"] for test in tests]
    return ", ".join(
        f"{gain['mean']:+.4f} ± {gain['error']:.4f}" for gain in gains
    )


def small_graphs_gains(rows: Sequence[Row]) -> str:
    """A line a comparison: on how many graphs training gains, and the mean gain."""
    parts = [row for row in rows if row["set"] in CONNECTED_SETS]
    samples = [row for row in rows if row["set"] not in CONNECTED_SETS]
    policy, rules = "the untrained policy", "rule confidences"
    comparisons = [
        (f"Trained against {policy}", rows, "trained", "untrained"),
        ("the same, random samples", samples, "trained", "untrained"),
        ("the same, connected parts", parts, "trained", "untrained"),
        (f"Trained against {rules}", rows, "trained", "rule_score"),
        (f"Answers against {rules}", rows, "answers", "rule_score"),
    ]
    return "".join(
        f"- {label}: {gains_text(gains_of(graphs, way, other))}\n"
        for label, graphs, way, other in comparisons
    )


def small_graphs_larger_test(rows: Sequence[Row]) -> str:
    """A line a test and comparison: on how many graphs training gains or loses beyond two standard errors."""
    own = [row["gain"] for row in rows]
    larger = [row["large_test"]["gain"] for row in rows]
    policy, rules = "the untrained policy", "rule confidences"
    comparisons = [
        (f"Trained against {policy}, the graph's own test", own, "trained"),
        (f"Trained against {policy}, the larger test", larger, "trained"),
        (f"Answers against {rules}, the larger test", larger, "answers"),
    ]
    return "".join(
        f"- {label}: beyond two standard errors {errors_text([gain[way] for gain in gains])}\n"
        for label, gains, way in comparisons
    )


def errors_text(gains: Sequence[Row]) -> str:
    """How many gains are above and below 0 by more than two standard errors, and the mean of all with its own."""
    n_above = sum(gain["mean"] > 2 * gain["error"] for gain in gains)
    n_below = sum(gain["mean"] < -2 * gain["error"] for gain in gains)
    means = [gain["mean"] for gain in gains]
    error = stdev(means) / len(means) ** 0.5
    return (
        f"above on {n_above} of {len(gains)} graphs, below on {n_below}; "
        f"mean {mean(means):+.4f} ± {error:.4f}."
    )


def gains_of(rows: Iterable[Row], way: str, other: str) -> list[float]:
    """What the MRR of each graph is higher by one way than by another."""
    return [row["mrr"][way] - row["mrr"][other] for row in rows]


def gains_text(gains: Sequence[float]) -> str:
    """How many gains are above, at and below 0, to four digits, and their mean with its standard error."""
    n_above = sum(gain >= 5e-5 for gain in gains)
    n_below = sum(gain <= -5e-5 for gain in gains)
    n_equal = len(gains) - n_above - n_below
    error = stdev(gains) / len(gains) ** 0.5
    return (
        f"above on {n_above} of {len(gains)} graphs, equal on {n_equal}, below on {n_below}; "
        f"mean {mean(gains):+.4f} ± {error:.4f} (standard error)."
    )


def small_graphs() -> str:
    """The block of this name."""
    rows = load_record("small_graphs-cpu")["rows"]
    in_order = sorted(
        rows,
        key=lambda r: (
            list(MINING_SETS).index(r["set"]),
            r["triples"],
            r["seed"],
        ),
    )
    return small_graphs_table(in_order) + record_line(
        "small_graphs-cpu", rows, is_shared=True
    )


def results_block(names: Iterable[str]) -> str:
    """The table of some sets, and its records."""
    runs = load_record("main_results")["runs"]
    untrained = load_record("untrained_scores")["sets"]
    return results_table(runs, untrained, names) + RESULTS_ORIGIN


def results_provided_rules() -> str:
    """The block of this name."""
    return results_block(PROVIDED_RULES)


def mining_table(record: Record) -> str:
    """A row a set: how many rules, seconds, and the untrained scores on test by plain counts and by chosen settings.

    The seconds of former rows are of the clock, on one thread.
    """
    head = [
        "data",
        "metric",
        "options of `mine`",
        "rules",
        "seconds",
        "max-confidence, plain counts",
        "noisy-or, plain counts",
    ]
    chosen_scores = ("max-confidence", "noisy-or", "noisy-or@3")
    chosen_scores += ("noisy-or-top-5",)
    head += [*chosen_scores, "ceiling", "commit"]
    rows = []
    for name in sorted(record["sets"], key=list(MINING_SETS).index):
        result = record["sets"][name]
        metric, metric_label = main_metric(name)
        plain = result["rankings"].get("plain", {}).get("test", {})
        chosen = result["rankings"].get("chosen", {}).get("test", {})
        columns = [(plain, "max-confidence"), (plain, "noisy-or")]
        columns += [(chosen, score) for score in chosen_scores]
        cells = [
            f"{scores[score][metric]:.3f}" if score in scores else "-"
            for scores, score in columns
        ]
        ceiling = f"{chosen['max-confidence']['ceiling']:.3f}" if chosen else ""
        label = MINING_SETS[name]
        seconds = result.get("mining_cpu_seconds")
        if seconds is None:
            seconds = result["mining_seconds"]
        rows.append(
            [
                label,
                metric_label,
                mining_options(result["settings"]),
                f"{result['rules']:,}",
                f"{seconds:g}",
                *cells,
                ceiling,
                result["commit"],
            ]
        )
    return table(head, rows)


def mining_options(settings: Row) -> str:
    """The options of `funcppo mine` that differ from those of `MiningConfig`, as a cell."""
    options = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f" {value:g}")
        for name, value in settings.items()
        if value != getattr(MiningConfig(), name, value)
    ]
    return f"`{' '.join(options)}`" if options else "usual"


def mining() -> str:
    """The block of this name."""
    record = load_record("mining_results")
    clocked = [
        MINING_SETS[name]
        for name, result in record["sets"].items()
        if "mining_seconds" in result
    ]
    seconds = "Seconds of CPU time"
    if clocked:
        seconds += f"; of {' and '.join(clocked)} of the clock, on one thread"
    return (
        mining_table(record)
        + f"\n{seconds}. Record: `experiments/results/mining_results.json`.\n"
    )


def published_miners() -> str:
    """The block of this name."""
    metrics = ("mrr", "hits@1", "hits@10")
    rows = [
        [
            row["data"],
            f"[{row['system']}]({row['url']})",
            *(
                "-" if row[name] is None else f"{row[name]:.3f}"
                for name in metrics
            ),
            row["mining"],
        ]
        for row in load_record("published_miners")["rows"]
    ]
    head = ["data", "system", "MRR", "Hits@1", "Hits@10", "mining"]
    return (
        table(head, rows)
        + "\nRecord: `experiments/results/published_miners.json`.\n"
    )


def mining_bounds_table(record: Record) -> str:
    """A row a size of graph: how many, the most that mining took, and how many took more than they may."""
    head = ["facts", "graphs", "sampled", "most seconds", "most memory (MiB)"]
    head += ["over a limit", "failed"]
    rows = []
    least = 0
    for most in (1_000, 10_000, 100_000, 1_000_000):
        graphs = [g for g in record["graphs"] if least <= g["facts"] < most]
        mined = [graph for graph in graphs if graph["exit_status"] == 0]
        is_within = [
            graph["within_seconds"]
            and graph["within_memory"]
            and graph["within_rows"]
            for graph in mined
        ]
        seconds = max((graph["mining_seconds"] for graph in mined), default=0)
        peak = max((graph["peak_bytes"] for graph in mined), default=0)
        rows.append(
            [
                f"below {most:,}",
                f"{len(graphs)}",
                f"{sum(bool(graph['notes']) for graph in mined)}",
                f"{seconds:.1f}",
                f"{peak / 2**20:,.0f}",
                f"{is_within.count(False)}",
                f"{len(graphs) - len(mined)}",
            ]
        )
        least = most
    return table(head, rows)


def mining_bounds() -> str:
    """The block of this name."""
    record = load_record("mining_bounds")
    limits = (
        f"\nLimits: {record['seconds']:g} s and {record['memory_bytes'] / 1e9:g} GB. "
        "Record: `experiments/results/mining_bounds.json`.\n"
    )
    return mining_bounds_table(record) + limits


# Performance


def performance_cartpole() -> str:
    """The block of this name."""
    cells = cells_of("cartpole-h100")
    names = {"highest": "float32", "high": "TF32", "bfloat16": "bfloat16"}
    head = ["ms an iteration", *names.values(), "kernels, float32"]
    head += [f"JAX, {name}" for name in names.values()]
    head += ["PureJaxRL, on an H200"]
    rows = []
    for work, label in CARTPOLE_LABELS.items():
        ours, jax = (
            [cells[f"{work} {mode} cuda {name}"] for name in names]
            for mode in ("captured", "jax")
        )
        rows.append(
            [
                label,
                *(digits(row["iteration_ms"]) for row in ours),
                f"{ours[0]['kernels']:,}",
                *(digits(row["iteration_ms"]) for row in jax),
                digits(PUREJAXRL_MS[work]),
            ]
        )
    return table(head, rows) + origin("cartpole-h100")


def learning_curves() -> str:
    """The block of this name."""
    record = load_record("learning_curves")
    head = ["environment", "steps", "seconds", "greedy", "sampled", "others"]
    rows = []
    for row in record["rows"]:
        others = [
            f"{one['mean']:,.1f} ({one['source'].partition(',')[0]})"
            for one in row["published"]
        ]
        if jax := _last_returns_of_jax(row["env"]):
            others.append(f"{mean(jax):,.1f} (JAX, {len(jax)} seeds)")
        rows.append(
            [
                row["env"],
                _steps_text(row),
                f"{row['seconds'][-1]:,.0f}",
                _return_text(row["greedy"]),
                _return_text(row["sampled"]),
                ", ".join(others) or "-",
            ]
        )
    machines = dict.fromkeys(
        f"{row['machine']['device']}; torch {row['machine']['torch'].split('+')[0]}; {row['machine']['commit']}"
        for row in record["rows"]
    )
    recorded = {row["env"] for row in record["rows"]}
    is_variant = re.compile(r"MinAtar/.*-v0").fullmatch  # with all six actions
    missing = [
        name
        for name in ENVIRONMENTS
        if name not in recorded and not is_variant(name)
    ]
    note = f"\nNot recorded: {', '.join(missing)}.\n" if missing else ""
    return (
        table(head, rows)
        + note
        + f"\nRecord: `experiments/results/learning_curves.json` ({'; '.join(machines)}).\n"
    )


def _last_returns_of_jax(env: str) -> list[float]:
    """The mean returns of the last ten updates of each seed of the JAX program, where it was run."""
    cells = {
        cell: row
        for name in TIME_TO_SCORE_RECORDS
        for cell, row in cells_of(name).items()
    }
    row = cells.get(f"jax {env}", {"curves": []})
    return [curve[-1][2] for curve in row["curves"]]


def _steps_text(row: Row) -> str:
    """The steps of a learning curve; of how many, where the run was stopped before its end."""
    steps = row["steps"][-1]
    if row["is_complete"]:
        return f"{steps:,}"
    return f"{steps:,} of {published_settings(row['env']).steps:,}"


def _return_text(policy: Row) -> str:
    """The last interquartile mean of a policy's returns, with its interval."""
    low, high = policy["low"][-1], policy["high"][-1]
    return f"{policy['iqm'][-1]:,.1f} ({low:,.1f} to {high:,.1f})"


PROVER_ROWS = {  # record, cell: label
    (
        "prover-h200-s3",
        "s3 captured cuda packed",
    ): "Countries S3, 64 x 64, 2 epochs x 32 minibatches",
    (
        "prover-h200-s3-loop-body-graphs",
        "s3 eager-loop-body-graphs cuda packed",
    ): "the same, nothing compiled, loop-body graphs",
    (
        "prover-h200-family",
        "family captured cuda packed",
    ): "Family, 41 rules, 128 x 128, 5 epochs x 16 minibatches",
    (
        "prover-h200-family",
        "family-large captured cuda packed",
    ): "the same, 250-d atoms, 512 hidden units",
    (
        "prover-h200-family",
        "family-130 captured cuda packed",
    ): "the same, 8 residual layers, room for 130 successors",
}


def performance_prover() -> str:
    """The block of this name."""
    rows = []
    for (record, cell), label in PROVER_ROWS.items():
        row = cells_of(record)[cell]
        steps = f"{row['rollout_steps_per_s']:,.0f}"
        difference = f"{row['difference_from_eager']:.1e}"
        megabytes = f"{row['peak_bytes'] / 1e6:,.0f}"
        rows.append(
            [
                label,
                digits(row["iteration_ms"]),
                digits(row["rollout_ms"]),
                steps,
                megabytes,
                difference,
            ]
        )
    head = [
        "learning to prove, height 2",
        "ms an iteration",
        "ms a rollout",
        "rollout steps/s",
        "MB",
    ]
    head += ["difference from eager, share of the update"]
    names = dict.fromkeys(record for record, _ in PROVER_ROWS)
    return table(head, rows) + origin(*names)


TIME_TO_SCORE_RECORDS = (
    "time_to_score-h100",
    "time_to_score-breakout",
    "time_to_score-games",
)


def performance_time_of_update() -> str:
    """The block of this name."""
    rows: list[list[str]] = []
    for name in TIME_TO_SCORE_RECORDS:
        for env, *both in _pairs_of_libraries(name):
            ms = [_milliseconds_per_update(row) for row in both]
            ratio = digits(ms[1] / ms[0], 2)
            rows.append([env, *(digits(x) for x in ms), ratio])
    head = ["ms an update", "funcppo", "JAX", "times as fast"]
    return table(head, rows) + origin(*TIME_TO_SCORE_RECORDS)


def _milliseconds_per_update(row: Row) -> float:
    """The median over the seeds, each of its whole run."""
    ppo = row["ppo"]
    n_steps = ppo["n_envs"] * ppo["n_steps"]
    return statistics.median(
        1000 * seconds / (steps / n_steps)
        for *_, (steps, seconds, _) in row["curves"]
    )


def _pairs_of_libraries(name: str) -> list[tuple[str, Row, Row]]:
    """Each environment of a record: its row, and that of JAX."""
    cells = cells_of(name)
    pairs: list[tuple[str, Row, Row]] = []
    for cell, row in cells.items():
        library, _, env = cell.partition(" ")
        if library == "funcppo":
            pairs.append((env, row, cells[f"jax {env}"]))
    return pairs


STARTUP_AIMS = 15, 4  # seconds with empty caches and with full ones
STARTUP_RECORDS = {"startup-h100": "H100", "startup-cpu": "2 CPU cores"}
STARTUP_LABELS = {
    "S3": "Countries S3",
    "CartPole": "CartPole, 4 x 128",
    "CartPole in JAX": "CartPole in JAX",
}
STARTUP_STATES = ("nothing compiled", "empty caches", "full caches")


def performance_startup() -> str:
    """The block of this name."""
    rows: list[list[str]] = []
    sentences: list[str] = []
    for name, machine in STARTUP_RECORDS.items():
        seconds = {
            row["row"]: digits(row["median"])
            for row in load_record(name)["rows"]
        }
        for work, label in STARTUP_LABELS.items():
            of_work = [
                seconds.get(f"{work}, {state}", "") for state in STARTUP_STATES
            ]
            if any(of_work):
                rows.append([f"{label}, {machine}", *of_work])
        sentences.append(
            f"{seconds['import torch']} s on {machine}, with its compiler {seconds['with its compiler']}, with what "
            f"code of Inductor imports {seconds['with what compiled code imports']}"
        )
    text = table(["seconds", *STARTUP_STATES], rows)
    text += (
        f"\nThe import of PyTorch takes {'; '.join(sentences)}. JAX's clock begins with its own import. Aimed at were "
        f"{STARTUP_AIMS[0]} s with empty caches and {STARTUP_AIMS[1]} s with full ones.\n"
    )
    return text + origin(*STARTUP_RECORDS)


SCORING_LABELS = {
    "replaced": "every candidate in chunks of 512 (the former design, compiled)",
    "refilled": "refilled slots, compiled, replayed as a CUDA graph",
    "refilled, not compiled": "refilled slots, not compiled, as `evaluate` does up to ten million candidates",
    "prefiltered": "only candidates that T_P derives",
}
SCORING_RECORDS = ("scoring-h200", "scoring-h100", "scoring-cpu")
RANKING_LABELS = {  # record, row: data set and rules
    ("scoring-h200", "wn18rr, rules.txt"): "WN18RR, its 34 rules, H200",
    (
        "scoring-h100",
        "wn18rr, rules_rnnlogic.tsv",
    ): "WN18RR, RNNLogic's 6,092 rules, H100",
    (
        "scoring-cpu",
        "fb15k-237, rules_rnnlogic_top.tsv.gz",
    ): "FB15k-237, RNNLogic's 15,000 rules, one CPU core",
}


def performance_scoring() -> str:
    """The block of this name."""
    by_name = {
        (name, row["row"]): row
        for name in SCORING_RECORDS
        for row in load_record(name)["rows"]
    }
    designs = []
    for name, label in SCORING_LABELS.items():
        row = by_name["scoring-h200", name]
        ms, speedup, warmup = (
            digits(row[key])
            for key in ("ms_per_candidate", "times_replaced", "warmup_seconds")
        )
        designs.append([label, f"{row['slots']:,}", ms, speedup, warmup])
    head = [
        "scored",
        "slots",
        "ms a candidate",
        "times as fast",
        "seconds to warm up",
    ]
    difference = max(
        by_name["scoring-h200", name]["largest_difference"]
        for name in SCORING_LABELS
    )
    note = f"\nLog scores differ by at most {at_most(difference)}.\n\n"

    rankings = []
    for place, label in RANKING_LABELS.items():
        row = by_name[place]
        seconds = (
            digits(row[key], 2) for key in ("prepared_seconds", "seconds")
        )
        rankings.append(
            [
                label,
                f"{row['queries']:,}",
                *seconds,
                f"{row['peak_bytes'] / 1e9:.2f}",
            ]
        )
    ranking_head = [
        "full filtered ranking, both sides",
        "test triples",
        "seconds to prepare",
        "seconds to rank",
        "GB",
    ]
    return (
        table(head, designs)
        + note
        + table(ranking_head, rankings)
        + origin(*SCORING_RECORDS)
    )


PROCESS_RECORDS = (
    "scaling-h100",
    "scaling-h100-family-large",
    "scaling-h200",
)


def performance_processes() -> str:
    """The block of this name."""
    measured: dict[tuple[str, str, str, int], Row] = {}
    for name in PROCESS_RECORDS:
        record = load_record(name)
        gpu = record["machine"]["device"].split()[1]
        for row in record["rows"]:
            key = (row["work"], row["scaling"], gpu, row["processes"])
            measured |= {key: row}
    rows = []
    for work, scaling, gpu in sorted({key[:3] for key in measured}):
        cells = []
        for n in (1, 2, 4):
            row = measured.get((work, scaling, gpu, n))
            text = ""
            if row is not None:
                text = f"{row['update_ms']:.1f} ({row['efficiency']:.2f})"
            cells.append(text)
        rows.append([work, scaling, gpu, *cells])
    head = ["work", "scaling", "GPU"]
    head += ["ms an update (efficiency), 1 GPU", "2 GPUs", "4 GPUs"]
    return table(head, rows) + origin(*PROCESS_RECORDS)


def process_equality() -> str:
    """The block of this name."""
    name = "process_equality-h100"
    rows = [
        [
            row["work"],
            ", ".join(dict.fromkeys((row["mode"], row["strategy"]))),
            *(
                f"{row[name]:.0e}" if row[name] else "0"
                for name in (
                    "difference_after_1",
                    "difference_after_all",
                    "limit",
                )
            ),
            "yes" if row["is_equal"] else "no",
        ]
        for row in load_record(name)["rows"]
        if row["processes"] > 1
    ]
    head = ["work, 2 GPUs", "step", "after 1 update", "after 5"]
    head += ["limit after 1", "within it"]
    return table(head, rows) + origin(name)


def shared_share(speed_up: float, n_processes: int) -> float:
    """The share of the time that is shared, where `speed_up = 1 / (1 - share + share / n_processes)`."""
    return (1 - 1 / speed_up) / (1 - 1 / n_processes)


def process_memory() -> str:
    """The block of this name."""
    record = load_record("process_memory")
    names = {"wn18rr": "WN18RR", "fb15k-237": "FB15k-237"}
    forms = ("text", "mapped")
    measured: dict[tuple[str, ...], Row] = {}
    for row in record["rows"]:
        key = (row.get("data", ""), row["work"], row.get("form", ""))
        measured[key] = row

    rows: list[list[str]] = []
    for data, work, form in measured:
        if form != "text" or work == "start":
            continue
        pair = [measured[data, work, form] for form in forms]
        cells = [f"{x['pss_mb']:,.0f} ({x['private_mb']:,.0f})" for x in pair]
        spared = 1 - pair[1]["pss_mb"] / pair[0]["pss_mb"]
        rows.append([names[data], work, *cells, f"{spared:.0%}"])
    head = ["data set", "program", "each indexes: MB (private)"]
    head += ["both map one index: MB (private)", "spared"]

    sizes: list[str] = []
    for data, name in names.items():
        size = measured[data, "index", ""]["mb"]
        text, mapped = (
            f"{measured[data, 'start', form]['cpu_seconds']:.2f} s"
            for form in forms
        )
        sizes.append(
            f"the folder of {name} has {size:.0f} MB; reading and indexing the text takes {text} of CPU time in each "
            f"process, opening the folder {mapped}"
        )
    imports = measured["", "imports", ""]["private_mb"]
    note = f"{'; '.join(sizes)}. A process that has read nothing holds {imports:.0f} MB of its own.\n"
    note = note[0].upper() + note[1:]
    return table(head, rows) + "\n" + note + origin("process_memory")


def mining_profile() -> str:
    """The block of this name."""
    record = load_record("mining_profile")
    phases = ["tasks", "alone", "votes", "receive", "index"]
    rows = []
    for run in record["runs"]:
        for row in run["rows"]:
            cpu = row["cpu_seconds"]
            seconds = [f"{cpu.get(phase, 0.0):.1f}" for phase in phases]
            speed_ups = ["", ""]
            if row["rank"] == 0:
                speed_ups = [f"{run[x]:.2f}" for x in ("bound", "expected")]
            place = [run["processes"], row["rank"], row["n_tasks"]]
            rows.append([*place, *seconds, *speed_ups])
    head = ["processes", "rank", "tasks", "shared: tasks"]
    head += ["rank 0 alone: plans, choice"]
    head += ["rank 0 alone: votes", "to send and receive", "index, of each"]
    head += ["speed-up at most", "speed-up expected"]
    cells = [[str(cell) for cell in row] for row in rows]
    parts = []
    for row in load_record("shared_mining-h200")["rows"][1:]:
        n, speed_up = row["processes"], row["work_speed_up"]
        share = shared_share(speed_up, n)
        parts.append(
            f"{n} GPUs mine {speed_up:.2f} times as fast as one, as if "
            f"{share:.0%} of the time were shared"
        )
    sentence = f"\n{', and '.join(parts)}.\n"
    return table(head, cells) + sentence + origin("mining_profile")


def large_graph() -> str:
    """The block of this name."""
    record = load_record("large_graph")
    rows = []
    for row in record["rows"]:
        rows.append(
            [row["phase"], f"{row['seconds']:,.1f}", _large_graph_note(row)]
        )
    options = record["options"]
    head = [f"{options['triples']:,} triples", "seconds", "what it took"]
    return table(head, rows) + origin("large_graph")


def _large_graph_note(row: Row) -> str:
    """What a phase of the record says beside its seconds."""
    match row["phase"]:
        case "write":
            return f"{row['bytes'] / 1e9:,.2f} GB of text"
        case "index":
            parts = ", ".join(
                f"{k} {v:,.0f} s" for k, v in row["phases"].items()
            )
            return (
                f"{parts}; peak {row['peak_bytes'] / 1e9:,.2f} GB; folder of {row['bytes'] / 1e9:,.2f} GB, "
                f"{row['bytes_per_fact']:.1f} bytes a fact"
            )
        case "open":
            return (
                f"the folder {1e3 * row['load_seconds']:.0f} ms, the knowledge base "
                f"{1e3 * row['build_seconds']:.0f} ms; the rest is imports"
            )
        case "look up":
            return (
                f"{row['facts']:,} facts in {row['median_us']:,.0f} µs (median)"
            )
    return (
        f"{row['n_queries']:,} queries by {row['processes']} processes; resident together at most "
        f"{row['peak_pss_bytes'] / 1e9:,.2f} GB, {row['peak_pss_private_bytes'] / 1e9:,.2f} GB of it not mapped"
    )


def _line_of(lines: Sequence[str], word: str) -> str:
    """The first line that holds a word; empty if none does."""
    return next((line for line in lines if word in line), "")


def compiler_faults() -> str:
    """The block of this name."""
    rows = []
    for row in load_record("compiler_faults")["rows"]:
        aot, inductor = row["said"]["write_backs_lost"][1:]
        copied = row["said"]["storage_of_tensor_wrapper"][0]
        is_swapped = "= [1.0, 1.0], [0.0, 0.0]," in inductor
        is_counted = all("count = 1.0" in line for line in (aot, inductor))
        said = [
            _line_of(row["said"].get(name, []), word)
            for name, word in (
                ("vmap_over_collective", "under vmap"),
                ("callbacks_cleared", "after it"),
            )
        ]
        rows.append(
            [
                row["torch"],
                said[0].partition("under vmap ")[2] or "not run",
                said[1].partition("reset, ")[2].partition(" ")[0] or "not run",
                "right" if is_swapped else "lost",
                "right" if is_counted else "lost",
                "yes" if "Cannot access storage" in copied else "no",
                f"{row['n_raising']} of {row['n_tried']}",
            ]
        )
    head = [
        "PyTorch, CPU",
        "sums under vmap (wanted: [3.0, 30.0])",
        "compilations told of after a reset (wanted: 1)",
        "swap, Inductor",
        "write to a 0-d tensor",
        "*Cannot access storage* from a copy under a transform",
        "from compiled functions under one",
    ]
    return table(head, rows) + origin("compiler_faults")


def older_pytorch() -> str:
    """The block of this name; the column of tests is left out where none were run."""
    recorded = load_record("older_pytorch")["rows"]
    has_tests = any(row.get("tests") for row in recorded)
    rows = [
        [
            row["torch"],
            *(
                "no" if failure else "yes"
                for failure in row["failures"].values()
            ),
            next(filter(None, row["failures"].values()), ""),
            *([_test_counts(row["tests"])] if has_tests else []),
        ]
        for row in recorded
    ]
    head = ["PyTorch, CPU", "eager", "`forward`", "`two-graphs`"]
    head += ["`one-graph`", "compiled loop", "why not"]
    head += ["tests"] if has_tests else []
    return table(head, rows) + origin("older_pytorch")


def _test_counts(tests: dict[str, Any] | None) -> str:
    """How many tests pass, fail and are skipped."""
    if tests is None:
        return "not run"
    passed, skipped = tests["passed"], tests["skipped"]
    return f"{passed:,} pass, {len(tests['failed'])} fail, {skipped:,} skipped"


def gpu_tests() -> str:
    """The block of this name."""
    name = "gpu_tests-h200"
    rows = [
        [
            str(row["n_gpus"]),
            f"{row['n_passed']:,}",
            f"{len(row['failed']):,}",
            f"{row['n_skipped']:,}",
            f"{len(row['skipped_before']):,}" if row["n_gpus"] else "",
        ]
        for row in load_record(name)["rows"]
    ]
    head = ["GPUs", "tests that pass", "fail", "are skipped"]
    head += ["pass, and need so many GPUs"]
    return table(head, rows) + origin(name)


BLOCKS: dict[str, Callable[[], str]] = {
    "compiler-faults": compiler_faults,
    "readme-ppo": readme_ppo,
    "readme-train": readme_train,
    "readme-results": readme_results,
    "defaults": defaults,
    "tuned": tuned,
    "fifty-graphs": fifty_graphs,
    "results-provided-rules": results_provided_rules,
    "mining-bounds": mining_bounds,
    "performance-cartpole": performance_cartpole,
    "learning-curves": learning_curves,
    "performance-prover": performance_prover,
    "performance-time-of-update": performance_time_of_update,
    "performance-startup": performance_startup,
    "performance-scoring": performance_scoring,
    "performance-processes": performance_processes,
    "large-graph": large_graph,
}


# Documents


def documents() -> list[Path]:
    """Every document that may hold blocks."""
    files = [
        paths.README,
        paths.INVESTIGATION,
        paths.NOTES,
        paths.MATRIX_TABLES,
        paths.NOTES.parent / "reproducers" / "README.md",
        # Folders with an underscore are made by `make docs`.
        *(
            file
            for file in sorted(paths.DOCS.rglob("*.md"))
            if "/_" not in file.relative_to(paths.DOCS.parent).as_posix()
        ),
    ]
    return [file for file in files if file.exists()]


def rewrite(text: str) -> str:
    """A document with all of its blocks made anew.

    Raises:
      ValueError: a marker names no block, or has no partner.
    """
    for name in MARKER.findall(text):
        if name not in BLOCKS:
            raise ValueError(
                f"results:{name}: expected one of {', '.join(BLOCKS)}"
            )
    closed = [match[2] for match in BLOCK.finditer(text)]
    if len(MARKER.findall(text)) != 2 * len(closed):
        open_names = sorted(set(MARKER.findall(text)) - set(closed)) or sorted(
            set(closed)
        )
        raise ValueError(
            f"results:{', '.join(open_names)}: expected an opening and a closing marker for each block"
        )
    # Blank lines around a block: some Markdown parsers see no table right after a comment.
    text = BLOCK.sub(
        lambda match: f"{match[1]}\n{BLOCKS[match[2]]()}\n{match[4]}", text
    )
    if "<!-- matrix:" in text:
        # Imports PyTorch; the program registers the ways that the tables list.
        from experiments.full_step_matrix import record
        from experiments.full_step_matrix import tables as matrix_tables

        text = matrix_tables.rewritten(
            text, matrix_tables.records(record.RESULTS)
        )
    return text


def stale_blocks(before: str, after: str) -> list[str]:
    """The names of the blocks that a rewrite changes."""
    old = [(match[2], match[3]) for match in BLOCK.finditer(before)]
    new = [(match[2], match[3]) for match in BLOCK.finditer(after)]
    names = [name for (name, text), (_, now) in zip(old, new) if text != now]
    return names or (["matrix"] if before != after else [])


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0, or 1 when --check finds a stale block or a document has a wrong marker."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; exit 1 where a block is stale",
    )
    parser.add_argument(
        "--print",
        metavar="NAME",
        choices=BLOCKS,
        help="print one block, and stop",
    )
    args = parser.parse_args(argv)
    if args.print:
        print(BLOCKS[args.print](), end="")
        return 0

    status = 0
    for file in documents():
        before = file.read_text()
        try:
            after = rewrite(before)
        except ValueError as error:
            print(f"{file}: {error}", file=sys.stderr)
            status = 1
            continue
        if after == before:
            continue
        names = ", ".join(stale_blocks(before, after))
        if args.check:
            print(f"{file}: stale: {names}", file=sys.stderr)
            status = 1
        else:
            file.write_text(after)
            print(f"{file}: rewritten: {names}")
    return status


if __name__ == "__main__":
    sys.exit(main())
