"""Tables and sentences with numbers, made from the committed records and put between the markers of a document.

    python experiments/tables.py                 rewrite the blocks of every document
    python experiments/tables.py --check         exit 1, naming the stale blocks, where a rewrite would change one
    python experiments/tables.py --print NAME    print one block

A block stands between the lines `<!-- results:NAME -->` and `<!-- /results:NAME -->`; what is between them is replaced.
The tables between `<!-- matrix:NAME -->` and `<!-- /matrix -->` are those of matrix/tables.py. BLOCKS has the names.
Each ends in a line that names its records, hardware, versions and commits.
"""

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # project root

from experiments import paths

Row = dict[str, Any]
Record = dict[str, Any]

BLOCK = re.compile(
    r"(<!-- results:([\w-]+) -->\n)(.*?)(<!-- /results:\2 -->)", re.DOTALL
)
MARKER = re.compile(r"<!-- /?results:([\w-]+) -->")

SETS = {
    "fb15k-237": "FB15k-237",
    "wn18rr": "WN18RR",
    "codex_s": "CoDEx-S",
    "kinships": "Kinships",
    "umls": "UMLS",
    "family": "Family",
    "nations": "Nations",
    "nsg_ablation_d3": "Countries, a recursive rule",
}
INDUCTIVE_SETS = {"wn18rr_v1": "WN18RR v1", "fb237_v1": "FB15k-237 v1"}
GIVEN_SETS = {
    "countries_S1": "Countries S1",
    "countries_S2": "Countries S2",
    "countries_S3": "Countries S3",
    "family": "Family",
    "family, height 1": "Family",
    "family, RNNLogic rules": "Family, RNNLogic's rules",
    "umls": "UMLS",
    "family_kns": "Family, another split",
    "wn18rr": "WN18RR",
    "wn18rr, RNNLogic rules": "WN18RR, RNNLogic's rules",
    "fb15k-237, RNNLogic rules": "FB15k-237, RNNLogic's rules",
}


def load_record(name: str) -> Record:
    """Return a committed record by its name without `.json`."""
    return json.loads((paths.RESULTS / f"{name}.json").read_text())


def cells_of(name: str) -> dict[str, Row]:
    """Return the rows of a record by the name of their cell."""
    return {row["cell"]: row for row in load_record(name)["rows"]}


def runs_of(name: str, sets: Iterable[str]) -> Iterator[list[Row]]:
    """Yield the runs of a record on each of some data sets."""
    runs = load_record(name)["runs"]
    for of in sets:
        yield [run for run in runs if run["set"] == of]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    escaped = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in escaped)


def machine_text(machine: Row) -> str:
    """Return the hardware and the version of PyTorch of a record."""
    hardware = machine.get("device") or machine["cpu"]
    return f"{hardware}; torch {machine['torch'].split('+')[0]}"


def origin(*names: str) -> str:
    """Return the line that names records, hardware, versions and commits."""
    parts = []
    for name in names:
        record = load_record(name)
        rows = record["rows"] if isinstance(record.get("rows"), list) else []
        commits = [record["machine"]["commit"]]
        commits += [row["commit"] for row in rows if "commit" in row]
        short = ", ".join(dict.fromkeys(commit[:7] for commit in commits))
        parts.append(f"`{name}` ({machine_text(record['machine'])}; {short})")
    return f"\nRecords in `experiments/results/`: {', '.join(parts)}.\n"


def origin_of_runs(name: str, key: str = "runs") -> str:
    """Return the line that names a record whose runs were made on several machines."""
    runs = load_record(name)[key]
    machines = dict.fromkeys(machine_text(run["machine"]) for run in runs)
    commits = dict.fromkeys(
        run.get("commit") or run["machine"]["commit"] for run in runs
    )
    where = f"{'; '.join(machines)}; {', '.join(commits)}"
    return f"\nRecord: `experiments/results/{name}.json` ({where}).\n"


def digits(value: float, n: int = 3) -> str:
    """Return a number with `n` significant digits, never in scientific notation, with all digits before its point."""
    magnitude = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    if magnitude >= n:
        return f"{value:,.0f}"
    text = f"{value:.{n}g}"
    return (
        f"{float(text):.10f}".rstrip("0").rstrip(".") if "e" in text else text
    )


def metric_text(value: float) -> str:
    """Return four digits, as rankings are compared."""
    return f"{value:.4f}"


def mean_and_spread(values: Sequence[float]) -> str:
    """Return the mean, and the sample standard deviation over seeds where it is not nothing; empty for no values."""
    if not values:
        return ""
    spread = stdev(values) if len(values) > 1 else 0.0
    deviation = f" ± {spread:.4f}" if spread > 5e-5 else ""
    return metric_text(mean(values)) + deviation


# Results


def printed(name: str) -> str:
    """Return what an example of the README prints, as an indented block."""
    text = load_record("readme_outputs")[name]
    lines = [f"    {line}".rstrip() for line in text.strip("\n").splitlines()]
    return "\n".join(lines) + "\n"


def published_text(name: str, metric: str = "mrr") -> str:
    """Return the published results of a data set, as a cell."""
    results = load_record("published")[metric].get(name, [])
    cells = [f"{x['value']:g} [{x['system']}]({x['url']})" for x in results]
    return ", ".join(cells) or "-"


def policy_values(runs: list[Row], ending: str, metric: str) -> list[float]:
    """Return a metric of the scores of the policy before or after training: of the last row, if that is of a stage."""
    values = []
    for run in runs:
        rows = run["results"]["test"]
        last = [*rows][-1] if ending == "trained" else ""
        values += [
            scores[metric]
            for name, scores in rows.items()
            if name.endswith(f", {ending}") or name == last
        ]
    return values


def trained_text(runs: list[Row], metric: str = "mrr") -> str:
    """Return the mean and the spread over seeds of what training reaches."""
    return mean_and_spread(policy_values(runs, "trained", metric))


def untrained_text(runs: list[Row], metric: str = "mrr") -> str:
    """Return what the policy reaches before training, which depends on no seed; empty where it was not measured."""
    values = policy_values(runs[:1], "untrained", metric)
    return metric_text(values[0]) if values else ""


def rule_scores(runs: list[Row]) -> Row:
    """Return the metrics of the rule score that was chosen."""
    return runs[0]["results"]["test"][runs[0]["rule_score"]]


def reached(runs: list[Row], device: str) -> str:
    """Return the mean and the spread over seeds of the score that answers, of the runs on a device; - if none is."""
    values = [answers(run)["mrr"] for run in runs if run["device"] == device]
    return mean_and_spread(values) or "-"


def answers(run: Row) -> Row:
    """Return the metrics of the score that answers: of all test triples, or of a sample if no more are ranked."""
    results = run["results"]
    return run.get("all_test") or results["test"][results["answering_row"]]


def sample_text(run: Row) -> str:
    """Return how many test triples a sample has; empty if all are ranked."""
    results = run["results"]
    is_sample = results["test_is_sample"] and "all_test" not in run
    n = results["n_test_queries"]
    return f", a sample of {n:,} test triples" if is_sample else ""


def levels() -> str:
    """Return a row a data set: what `funcppo train` reaches on a CPU and on a GPU, beside what is published."""
    rows = []
    for (name, label), runs in zip(SETS.items(), runs_of("levels", SETS)):
        last = max(runs, key=lambda run: run["device"])  # of a GPU, if any is
        rows.append(
            [
                label + sample_text(last),
                published_text(name),
                metric_text(rule_scores(runs)["mrr"]),
                reached(runs, "cpu"),
                reached(runs, "cuda"),
                metric_text(answers(last)["hits@10"]),
                metric_text(answers(last)["proved"]),
                str(len(runs)),
            ]
        )
    head = ["data", "published", "rule confidences", "CPU", "GPU"]
    head += ["Hits@10", "proved", "runs"]
    return table(head, rows) + origin_of_runs("levels")


def inductive() -> str:
    """Return a row a training graph and device: how its runs rank the test triples of a graph of other entities."""
    rows = []
    all_runs = zip(INDUCTIVE_SETS.items(), runs_of("inductive", INDUCTIVE_SETS))
    for (name, label), runs in all_runs:
        for device in sorted({run["device"] for run in runs}):
            of = [run["ranked"] for run in runs if run["device"] == device]
            among_all = [ranked["all"] for ranked in of]
            sampled = [ranked["50"]["hits@10"] for ranked in of]
            rows.append(
                [
                    label,
                    device,
                    published_text(name),
                    mean_and_spread([x["mrr"] for x in among_all]),
                    mean_and_spread([x["hits@10"] for x in among_all]),
                    published_text(name, "hits@10_of_50"),
                    mean_and_spread(sampled),
                    str(len(of)),
                ]
            )
    head = ["trained on", "device", "MRR, published", "MRR", "Hits@10"]
    head += ["Hits@10 among 50, published", "Hits@10 among 50", "runs"]
    return table(head, rows) + origin_of_runs("inductive")


def readme_results() -> str:
    """Return updates of PPO, rankings and answers, each beside what others take, publish or find."""
    rows = [
        [f"PPO, {name}: ms an update, one GPU", ours, f"{jax} the same in JAX"]
        for name, ours, jax, _ in update_times()[:1]
    ]
    eager = load_record("eager_update")["rows"]
    ratios = [row["ratio"] for row in eager if row["library"] == "funcppo"]
    label = (
        "PPO, CartPole-v1, nothing compiled: time of an update, one CPU core"
    )
    ours = f"{min(ratios):.2f} to {max(ratios):.2f}"
    rows.append([label, ours, "1 Stable-Baselines3"])
    all_runs = zip(SETS.items(), runs_of("levels", SETS))
    for (name, label), runs in [*all_runs][:3]:
        last = max(runs, key=lambda run: run["device"])
        mrr, label = (
            reached(runs, last["device"]),
            label + sample_text(last),
        )
        rows.append([f"{label}: MRR", mrr, published_text(name)])
    exact = load_record("exactness")
    n_programs, n_answers = exact["programs"], exact["answers"]
    n_different = exact["programs_with_differences"]
    others = f"the same in SWI-Prolog and clingo; {n_different} programs differ"
    label = f"Answers to queries of {n_programs:,} random Datalog programs"
    rows.append([label, f"{n_answers:,}", others])
    head = ["", "funcppo", "others"]
    records = (TIMED_RECORDS[0], "eager_update", "exactness")
    return table(head, rows) + origin(*records) + origin_of_runs("levels")


def given_rules() -> str:
    """Return every score with the rules that come with a data set, over seeds."""
    record = load_record("given_rules")
    rows = []
    for (name, label), of_set in zip(
        GIVEN_SETS.items(), runs_of("given_rules", GIVEN_SETS)
    ):
        is_countries = name.startswith("countries")
        metric = "auc_pr" if is_countries else "mrr"
        frozen = [run for run in of_set if run["learning_rate_0"]]
        runs = [run for run in of_set if not run["learning_rate_0"]]
        results = runs[0]["results"]
        untrained = record["untrained"][name]["test"].values()
        rows.append(
            [
                label,
                "AUC-PR" if is_countries else "MRR",
                str(results["height"]),
                f"{results['rules']:,}",
                *(metric_text(scores[metric]) for scores in untrained),
                untrained_text(runs, metric),
                trained_text(runs, metric),
                trained_text(frozen, metric),
                metric_text(results["test"]["max-confidence"]["ceiling"]),
                f"{mean(run['results']['seconds'] for run in runs):.0f}",
            ]
        )
    head = ["data", "metric", "height", "rules", "exists", "max-confidence"]
    head += ["noisy-or", "policy, untrained", "policy, trained"]
    head += ["learning rate 0", "ceiling", "seconds"]
    return table(head, rows) + origin_of_runs("given_rules")


def fifty_graphs() -> str:
    """Return a row a range of sizes of generated graphs, and how many runs failed or mined nothing."""
    runs = load_record("fifty_graphs")["runs"]
    rows = []
    low = 0
    for high in (1_000, 10_000, 100_000, 1_000_000):
        of_size = [run for run in runs if low <= run["n_triples"] < high]
        rows.append([f"below {high:,}", *fifty_graphs_cells(of_size)])
        low = high

    over = sum(run["answer_seconds"] is not None for run in runs)
    ended = [run for run in runs if run["answer_seconds"] is None]
    errors = [run["error"] for run in ended if run["status"]]
    empty = "no rules given, and the data hold none"  # what `train` says
    n_empty = sum(empty in error for error in errors)
    counts = (
        f"\n{len(runs)} runs; {over} over the time limit of {runs[0]['limit_seconds']:g} s; "
        f"{len(errors) - n_empty} failed; {n_empty} without a rule.\n"
    )
    head = ["triples", "graphs", "most seconds", "most GB"]
    head += ["best untrained", "trained"]
    return table(head, rows) + counts + origin_of_runs("fifty_graphs")


def stories() -> str:
    """Return the accuracy by the length of stories."""
    runs = load_record("stories")["runs"]
    head = ["facts", *(str(run["length"]) for run in runs)]
    row = ["accuracy", *(metric_text(run["accuracy"]) for run in runs)]
    return table(head, [row]) + origin_of_runs("stories")


def fifty_graphs_cells(runs: Sequence[Row]) -> list[str]:
    """Return how many graphs, the largest costs, and means over the graphs with results."""
    untrained, trained = [], []
    for run in runs:
        scores = run.get("mrr") or {}
        fitted = (", trained", ", listwise fit", "fit")
        if scores:
            by_rules = [
                scores[x]
                for x in scores
                if not x.endswith(fitted) and not x.startswith("+")
            ]
            untrained.append(max(by_rules))
            trained.append([*scores.values()][-1])
    return [
        str(len(runs)),
        f"{max(run['seconds'] for run in runs):.0f}",
        f"{max(run['peak_mb'] for run in runs) / 1000:.2f}",
        metric_text(mean(untrained)),
        metric_text(mean(trained)),
    ]


def learning_curves() -> str:
    """Return the returns of training by published settings, beside published returns."""
    returns_of_jax = {
        cell: [curve[-1][2] for curve in row["curves"]]
        for name in TIMED_RECORDS
        for cell, row in cells_of(name).items()
    }
    rows = []
    for row in load_record("learning_curves")["rows"]:
        others = [
            f"{one['mean']:,.1f} ({one['source'].partition(',')[0]})"
            for one in row["published"]
        ]
        if jax := returns_of_jax.get(f"jax {row['env']}"):
            others.append(f"{mean(jax):,.1f} (JAX, {len(jax)} seeds)")
        policies = [
            f"{p['iqm'][-1]:,.1f} ({p['low'][-1]:,.1f} to {p['high'][-1]:,.1f})"
            for p in (row["greedy"], row["sampled"])
        ]
        stopped = "" if row["is_complete"] else ", stopped"
        steps = f"{row['steps'][-1]:,}{stopped}"
        seconds = f"{row['seconds'][-1]:,.0f}"
        others_text = ", ".join(others) or "-"
        rows.append([row["env"], steps, seconds, *policies, others_text])
    head = ["environment", "steps", "seconds", "greedy", "sampled", "others"]
    return table(head, rows) + origin_of_runs("learning_curves", "rows")


# Performance

TIMED_RECORDS = ("time_to_score-h100", "time_to_score-breakout")


def performance_cartpole() -> str:
    """Return an iteration of CartPole as one CUDA graph; JAX and PureJaxRL beside."""
    cells = cells_of("cartpole-h100")
    purejaxrl_ms = load_record("published")["purejaxrl_ms"]
    labels = {
        "4x128": "4 environments x 128 steps",
        "2048x128": "2048 x 128",
        "64 learners": "64 learners of 4 x 128, vmap",
        "1024 learners": "1024 learners of 4 x 128, vmap",
    }
    names = {"highest": "float32", "high": "TF32", "bfloat16": "bfloat16"}
    rows = []
    for work, label in labels.items():
        ours, jax = (
            [cells[f"{work} {mode} cuda {name}"] for name in names]
            for mode in ("captured", "jax")
        )
        ms = [digits(row["iteration_ms"]) for row in (*ours, *jax)]
        kernels, other = f"{ours[0]['kernels']:,}", digits(purejaxrl_ms[work])
        rows.append([label, *ms[:3], kernels, *ms[3:], other])
    head = ["ms an iteration", *names.values(), "kernels, float32"]
    head += [f"JAX, {name}" for name in names.values()]
    head += ["PureJaxRL, on an H200"]
    return table(head, rows) + origin("cartpole-h100")


def update_times() -> list[list[str]]:
    """Return an environment, ms an update, those of JAX, and the ratio: medians over seeds of whole runs."""

    def update_ms(row: Row) -> float:
        """Return the median over seeds."""
        n_steps = row["ppo"]["n_envs"] * row["ppo"]["n_steps"]
        ends = [curve[-1] for curve in row["curves"]]
        return statistics.median(
            1000 * seconds / (steps / n_steps) for steps, seconds, _ in ends
        )

    rows = []
    for name in TIMED_RECORDS:
        cells = cells_of(name)
        for cell, row in cells.items():
            library, _, env = cell.partition(" ")
            if library == "funcppo":
                ms = [update_ms(row), update_ms(cells[f"jax {env}"])]
                ratio = digits(ms[1] / ms[0], 2)
                rows.append([env, *map(digits, ms), ratio])
    return rows


def performance_time_of_update() -> str:
    """Return the time of an update of CartPole and of Breakout, JAX beside."""
    head = ["ms an update", "funcppo", "JAX", "times as fast"]
    return table(head, update_times()) + origin(*TIMED_RECORDS)


def performance_prover() -> str:
    """Return an iteration of learning to prove, and its rollout."""
    s3, family = "prover-h200-s3", "prover-h200-family"
    cells = (  # record, cell, label
        (s3, "s3 captured", "Countries S3, 64 x 64, 2 epochs x 32 minibatches"),
        (
            family,
            "family captured",
            "Family, 41 rules, 128 x 128, 5 epochs x 16 minibatches",
        ),
        (
            family,
            "family-large captured",
            "the same, 250-d atoms, 512 hidden units",
        ),
        (
            family,
            "family-130 captured",
            "the same, 8 residual layers, room for 130 successors",
        ),
    )
    rows = []
    for record, cell, label in cells:
        row = cells_of(record)[f"{cell} cuda packed"]
        rows.append(
            [
                label,
                digits(row["iteration_ms"]),
                digits(row["rollout_ms"]),
                f"{row['rollout_steps_per_s']:,.0f}",
                f"{row['peak_bytes'] / 1e6:,.0f}",
                f"{row['difference_from_eager']:.1e}",
            ]
        )
    head = ["learning to prove, height 2", "ms an iteration", "ms a rollout"]
    head += ["rollout steps/s", "MB"]
    head += ["difference from eager, share of the update"]
    return table(head, rows) + origin(s3, family)


def performance_startup() -> str:
    """Return the seconds to the end of the first iteration."""
    records = {"startup-h100": "H100", "startup-cpu": "2 CPU cores"}
    labels = {
        "S3": "Countries S3",
        "CartPole": "CartPole, 4 x 128",
        "CartPole in JAX": "CartPole in JAX",
    }
    states = ("nothing compiled", "empty caches", "full caches")
    rows, sentences = [], []
    for name, machine in records.items():
        seconds = {
            row["row"]: digits(row["median"])
            for row in load_record(name)["rows"]
        }
        for work, label in labels.items():
            cells = [seconds.get(f"{work}, {state}", "") for state in states]
            if any(cells):
                rows.append([f"{label}, {machine}", *cells])
        if "import torch" in seconds:
            sentences.append(
                f"{seconds['import torch']} s on {machine}, with its compiler {seconds['with its compiler']}, with "
                f"what code of Inductor imports {seconds['with what compiled code imports']}"
            )
    text = table(["seconds", *states], rows)
    text += f"\nThe import of PyTorch takes {'; '.join(sentences)}.\n"
    return text + origin(*records)


def performance_memory() -> str:
    """Return an update of PPO of a network with memory, and the seconds to the first."""
    names = {"funcppo": "funcppo", "jax": "the same in JAX"}
    rows = [
        [
            names[row["row"].split(",")[0]],
            digits(1e3 * row["update_seconds"]),
            digits(row["start_seconds"]),
        ]
        for row in load_record("memory-h200")["rows"]
        if row["row"].endswith("first start")
    ]
    head = ["four rooms, GRU of 64 units, 256 x 64", "ms an update"]
    head += ["s to the first, empty caches"]
    return table(head, rows) + origin("memory-h200")


def performance_processes() -> str:
    """Return an update of PPO in one and several processes."""
    records = ("scaling-h100", "scaling-h100-family-large", "scaling-h200")
    measured: dict[tuple[str, str, str], dict[int, str]] = {}
    for name in records:
        record = load_record(name)
        gpu = record["machine"]["device"].split()[1]
        for row in record["rows"]:
            cells = measured.setdefault((row["work"], row["scaling"], gpu), {})
            text = f"{row['update_ms']:.1f} ({row['efficiency']:.2f})"
            cells[row["processes"]] = text
    rows = [
        [*key, *(cells.get(n, "") for n in (1, 2, 4))]
        for key, cells in sorted(measured.items())
    ]
    head = ["work", "scaling", "GPU"]
    head += ["ms an update (efficiency), 1 GPU", "2 GPUs", "4 GPUs"]
    return table(head, rows) + origin(*records)


def guided_proofs() -> str:
    """Return the share of goals proved within 100 steps by order, and what PPO gains."""
    names = sorted(x.stem for x in paths.RESULTS.glob("guided_proofs*.json"))
    records = [row for name in names for row in load_record(name)["rows"]]
    orders = [
        order
        for order in ("program", "confidences", "untrained", "listwise", "PPO")
        if any(order in row["curves"] for row in records)
    ]
    rows = []
    for row in records:
        gains = [
            "{:+.2f} ± {:.2f}".format(*row["gains_of_PPO"]["untrained"][b])
            for b in ("20", "100", "1000")
        ]
        curves = (row["curves"].get(order, {}) for order in orders)
        shares = [f"{x['100']:.2f}" if x else "" for x in curves]
        exact = row["exact"]
        exact = exact["seconds"] / max(1, exact.get("goals", row["test_goals"]))
        rows.append([row["problem"], *shares, *gains, f"{exact:.2f}"])
    head = ["proved within 100 steps", *orders, "PPO gains in 20 steps"]
    head += ["in 100", "in 1,000", "exact engine: seconds a goal"]
    return table(head, rows) + origin(*names)


def compiler_faults() -> str:
    """Return a row a version of PyTorch: write-backs lost, the storage of what is transformed read."""

    def said(row: Row, reproducer: str, words: tuple[str, str]) -> str:
        """Return what a reproducer said between two words of the first line that has the first."""
        lines = row["said"].get(reproducer, [])
        line = next((line for line in lines if words[0] in line), "")
        return line.partition(words[0])[2].partition(words[1])[0] or "not run"

    rows = []
    for row in load_record("compiler_faults")["rows"]:
        aot, inductor = row["said"]["write_backs_lost"][1:]
        copied = row["said"]["storage_of_tensor_wrapper"][0]
        is_swapped = "= [1.0, 1.0], [0.0, 0.0]," in inductor
        is_counted = all("count = 1.0" in line for line in (aot, inductor))
        rows.append(
            [
                row["torch"],
                said(row, "vmap_over_collective", ("under vmap ", "\n")),
                said(row, "callbacks_cleared", (" before reset, ", " ")),
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


BLOCKS: dict[str, Callable[[], str]] = {
    "readme-ppo": partial(printed, "ppo"),
    "readme-train": partial(printed, "train"),
} | {
    block.__name__.replace("_", "-"): block
    for block in (
        readme_results,
        levels,
        inductive,
        given_rules,
        fifty_graphs,
        stories,
        learning_curves,
        performance_cartpole,
        performance_time_of_update,
        performance_prover,
        performance_startup,
        performance_memory,
        performance_processes,
        guided_proofs,
        compiler_faults,
    )
}


# Documents


def documents() -> list[Path]:
    """Return every document that may hold blocks."""
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
    """Return a document with all of its blocks made anew.

    Raises:
      ValueError: a marker names no block, or has no partner.
    """
    names = MARKER.findall(text)
    for name in names:
        if name not in BLOCKS:
            raise ValueError(
                f"results:{name}: expected one of {', '.join(BLOCKS)}"
            )
    closed = [match[2] for match in BLOCK.finditer(text)]
    if len(names) != 2 * len(closed):
        unpaired = sorted(set(names) - set(closed)) or sorted(set(closed))
        raise ValueError(
            f"results:{', '.join(unpaired)}: expected an opening and a closing marker for each block"
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
    """Return the names of the blocks that a rewrite changes."""
    old = [(match[2], match[3]) for match in BLOCK.finditer(before)]
    new = [(match[2], match[3]) for match in BLOCK.finditer(after)]
    names = [name for (name, text), (_, now) in zip(old, new) if text != now]
    return names or (["matrix"] if before != after else [])


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0, or 1 when --check finds a stale block or a document has a wrong marker."""
    parser = paths.make_parser(__doc__)
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
