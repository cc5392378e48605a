"""What `funcppo train` gives at its defaults on fifty generated graphs: time, memory, and MRR against untrained scores.

    python experiments/benchmarks/fifty_graphs.py --seed 0
    python experiments/benchmarks/fifty_graphs.py --jobs 14      on a machine with 16 cores
    python experiments/benchmarks/fifty_graphs.py --graphs e60-r5-d0.01 e1000-r25-d0.01

The graphs have 14 to 100,000 entities, 1 to 500 relations and a density of 1e-6 to 0.5: the share of all atoms that are
triples. A third of the relations is random; the others are copies, inverses and compositions of relations before them,
with noise, so that there are rules to find. Every fifth graph has names that are hard to read and to print.

Each run mines its rules and is a process of its own on one thread, with the time of `funcppo train` (`--seconds`) and a
limit of 360 s; `--jobs` of them run side by side, the largest graphs first. One that reaches the limit gets a Ctrl-C,
and the row holds how long it took to answer. The record is written after every run, and what it holds is not run again:
the same command goes on where an earlier one ended.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

import numpy as np

from experiments.benchmarks.side_by_side import write_record
from experiments.paths import RESULTS, make_parser
from experiments.provenance import describe_machine

N_GRAPHS = 50
N_ENTITIES = (14, 60, 250, 1_000, 5_000, 20_000, 100_000)
N_RELATIONS = (1, 5, 25, 100, 500)
DENSITIES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.5)
# of a graph: fewer cannot be split, more take longer to write than to read
MIN_TRIPLES, MAX_TRIPLES = 40, 1_000_000
SPLITS = {"train": 0.8, "valid": 0.1, "test": 0.1}
NOISE = 0.1  # share of the pairs of a derived relation that are random
# above this density pairs are drawn without preference for some entities
MAX_SKEWED_DENSITY = 0.02
ODD_NAMES = (
    "[/x] {0}",
    "Zoë's {0}",
    "{0}",
    "_{0}:-",
    "'{0}'",
    "X{0}",
    "p({0},Y).",
    "%{0} # \\",
    "名{0}",
    ":smile:{0}",
)
LIMIT_SECONDS = 360.0  # that a process may take
ANSWER_SECONDS = 60.0  # between a Ctrl-C and the end of the process by force


class Spec(NamedTuple):
    """What a graph is generated from, beside the seed."""

    n_entities: int
    n_relations: int
    density: float
    has_odd_names: bool

    @property
    def pairs_per_relation(self) -> int:
        """How many triples a relation should have."""
        return round(self.density * self.n_entities**2)

    @property
    def name(self) -> str:
        """The name of the graph in the record."""
        odd = "-odd" if self.has_odd_names else ""
        return f"e{self.n_entities}-r{self.n_relations}-d{self.density:g}{odd}"


class Outcome(NamedTuple):
    """How a process ended."""

    status: int  # its exit status, negative for a signal that killed it
    seconds: float
    peak_mb: float  # of its resident memory
    # from the Ctrl-C at the time limit to the end; None if it ended before
    answer_seconds: float | None
    error: str  # the last line of standard error; empty with status 0


def main() -> None:
    """Run what the record does not hold yet."""
    parser = make_parser(__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "fifty_graphs.json"
    )
    parser.add_argument(
        "--graphs",
        nargs="*",
        metavar="NAME",
        help="names of graphs; all by default",
    )
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()

    record: dict[str, Any] = {"runs": []}
    if args.out.exists():
        record = json.loads(args.out.read_text())
    present = {(row["graph"], row["seed"]) for row in record["runs"]}
    with ThreadPoolExecutor(args.jobs) as pool:
        runs = [
            pool.submit(run_graph, spec, args.seed)
            for spec in reversed(make_specs())
            if args.graphs is None or spec.name in args.graphs
            if (spec.name, args.seed) not in present
        ]
        for future in as_completed(runs):
            record["runs"].append(future.result())
            print(json.dumps(record["runs"][-1]), flush=True)
            write_record(args.out, record)


def make_specs() -> list[Spec]:
    """Return the fifty graphs: evenly spaced among all combinations of sizes, by number of triples."""
    specs = [
        Spec(*sizes, has_odd_names=False)
        for sizes in itertools.product(N_ENTITIES, N_RELATIONS, DENSITIES)
    ]
    possible = [
        spec
        for spec in specs
        if spec.pairs_per_relation >= 1
        and MIN_TRIPLES
        <= spec.pairs_per_relation * spec.n_relations
        <= MAX_TRIPLES
    ]
    possible.sort(key=lambda spec: spec.pairs_per_relation * spec.n_relations)
    chosen = np.linspace(0, len(possible) - 1, N_GRAPHS).round().astype(int)
    return [
        possible[index]._replace(has_odd_names=i % 5 == 4)
        for i, index in enumerate(chosen)
    ]


def run_graph(spec: Spec, seed: int) -> dict[str, Any]:
    """Return the row of one graph: its sizes, what the run took, and how its scores rank test."""
    row: dict[str, Any] = {
        "graph": spec.name,
        "seed": seed,
        **spec._asdict(),
        "limit_seconds": LIMIT_SECONDS,
    }
    with tempfile.TemporaryDirectory() as folder:
        data, out = Path(folder, "graph"), Path(folder, "run")
        row["n_triples"] = write_graph(data, spec, seed)
        words = ["train", str(data), "--out", str(out), "--seed", str(seed)]
        # Rules are mined, not found in a cache.
        words += ["--cache-dir", str(Path(folder, "cache"))]
        outcome = run_program(words)
        results: dict[str, Any] = {}
        if not outcome.status:
            results = json.loads((out / "results.json").read_text())
            results["config"] = json.loads((out / "config.json").read_text())
    return {
        **row,
        **outcome._asdict(),
        **_summarise(results),
        "machine": describe_machine(),
    }


def _summarise(results: dict[str, Any]) -> dict[str, Any]:
    """What a row holds of the results and the settings of a run; empty without results."""
    if not results:
        return {}
    return {
        "n_rules": results["rules"],
        "height": results["height"],
        "score": results["score"],
        "rule_score": results["config"]["rule_score"],
        "mrr": {
            name: metrics["mrr"] for name, metrics in results["test"].items()
        },
        # the highest MRR of any score of the atoms that the rules derive
        "ceiling": max(
            (metrics["ceiling"] for metrics in results["test"].values()),
            default=None,
        ),
        "notes": results["notes"],
        "seconds_limit": results["seconds_limit"],
        "phase_seconds": results["phase_seconds"],
        "n_test_queries": results["n_test_queries"],
        "test_is_sample": results["test_is_sample"],
    }


def run_program(words: Sequence[str]) -> Outcome:
    """Run a program of funcppo; at the time limit it gets a Ctrl-C, and `ANSWER_SECONDS` later it is killed."""
    start = time.perf_counter()
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "funcppo", *words],
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        answer_seconds = None
        ended = _wait(process, start + LIMIT_SECONDS)
        if ended is None:
            stop = time.perf_counter()
            process.send_signal(signal.SIGINT)
            ended = _wait(process, stop + ANSWER_SECONDS)
            if ended is None:
                process.kill()
                ended = os.wait4(process.pid, 0)[1:]
            answer_seconds = round(time.perf_counter() - stop, 2)
        status = process.returncode = os.waitstatus_to_exitcode(ended[0])
        errors.seek(0)
        lines = errors.read().decode(errors="replace").splitlines()
    return Outcome(
        status=status,
        seconds=round(time.perf_counter() - start, 1),
        peak_mb=round(ended[1].ru_maxrss / 1000, 1),
        answer_seconds=answer_seconds,
        error=lines[-1] if status and lines else "",
    )


def _wait(
    process: subprocess.Popen[bytes], until: float
) -> tuple[int, Any] | None:
    """The status and the resources of a process; None if it still runs at a time."""
    while time.perf_counter() < until:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            return status, usage
        time.sleep(0.05)
    return None


# -- graphs


def write_graph(folder: Path, spec: Spec, seed: int) -> int:
    """Write train.txt, valid.txt and test.txt of a graph; return the number of triples."""
    rng = np.random.default_rng([seed, *map(ord, spec.name)])
    relations = make_relations(rng, spec)
    lines: list[str] = []
    for number, pairs in enumerate(relations):
        relation = _name("r", number, spec.has_odd_names)
        for head, tail in pairs.tolist():
            names = (
                _name("e", head, spec.has_odd_names),
                relation,
                _name("e", tail, spec.has_odd_names),
            )
            lines.append("\t".join(names) + "\n")

    folder.mkdir(parents=True)
    order = rng.permutation(len(lines))
    ends = np.cumsum([share * len(lines) for share in SPLITS.values()])
    for name, rows in zip(SPLITS, np.split(order, ends[:-1].astype(int))):
        text = "".join(lines[row] for row in rows)
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    return len(lines)


def make_relations(rng: np.random.Generator, spec: Spec) -> list[np.ndarray]:
    """Return the distinct pairs [n, 2] of each relation; a third is random, the others follow from earlier ones."""
    relations: list[np.ndarray] = []
    size = spec.pairs_per_relation
    for number in range(spec.n_relations):
        random = _random_pairs(rng, spec.n_entities, size)
        if number % 3 == 0:
            relations.append(random)
            continue
        first, second = (
            relations[rng.integers(number)],
            relations[rng.integers(number)],
        )
        kind = rng.integers(3)
        if kind == 0:
            derived = first
        elif kind == 1:
            derived = first[:, ::-1]
        else:
            derived = _compose(rng, first, second)
        n_noise = round(NOISE * size)
        kept = rng.permutation(derived)[: size - n_noise]
        relations.append(
            np.unique(np.concatenate([kept, random[:n_noise]]), axis=0)
        )
    return relations


def _random_pairs(
    rng: np.random.Generator, n_entities: int, n: int
) -> np.ndarray:
    """At most n distinct pairs; in a sparse relation some entities have many, most have few."""
    n_all = n_entities**2
    if n > MAX_SKEWED_DENSITY * n_all:
        number = rng.choice(n_all, n, replace=False)
        return np.stack(np.divmod(number, n_entities), axis=1)
    # The square of a uniform number is small more often than large.
    drawn = (rng.random((n, 2)) ** 2 * n_entities).astype(np.int64)
    return rng.permutation(np.unique(drawn, axis=0))


def _compose(
    rng: np.random.Generator, first: np.ndarray, second: np.ndarray
) -> np.ndarray:
    """Pairs (x, z) with (x, y) in the first relation and (y, z) in the second: one z for each (x, y)."""
    second = second[np.argsort(second[:, 0], kind="stable")]
    start = np.searchsorted(second[:, 0], first[:, 1])
    count = np.searchsorted(second[:, 0], first[:, 1], side="right") - start
    has_next = count > 0
    offset = (rng.random(len(first)) * count).astype(np.int64)
    tail = second[(start + offset)[has_next], 1]
    return np.unique(np.stack([first[has_next, 0], tail], axis=1), axis=0)


def _name(kind: str, number: int, is_odd: bool) -> str:
    """The name of an entity or a relation; different numbers have different names."""
    text = f"{kind}{number}"
    return ODD_NAMES[number % len(ODD_NAMES)].format(text) if is_odd else text


if __name__ == "__main__":
    main()
