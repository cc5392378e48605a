"""What two processes of a host hold where each reads and indexes a data set, and where both map one index.

    python experiments/benchmarks/process_memory.py --out experiments/results/process_memory.json

Each program runs in two processes of torchrun, on the text files and on the folder that `data --index` makes of them.
Samples of /proc/PID/smaps_rollup give, of both together, the most proportional set size (PSS: a page that n processes
share counts 1/n in each), and what no other process shares of it (private). `imports` is a process that has imported
what `evaluate` imports, and read nothing. CPU seconds are of one process, the median of three: to read the text and
index its facts, and to open the folder and take the index from it. Both forms must write the same bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments.benchmarks.side_by_side import Row, write_record
from experiments.checks.kill_campaign import find_rank
from experiments.paths import DATA, ROOT
from experiments.provenance import describe_machine

N_PROCESSES = 2
REPEATS = 3
SAMPLE_SECONDS = 0.05
DATA_SETS = ("wn18rr", "fb15k-237")
RULES = "rules.txt"
SCORED = ("--score", "noisy-or", "--smoothing", "5", "--height", "1")
SCORED += ("--object-identity", "False")
N_QUERIES = 256
# the words after the data set; the path of the output follows
PROGRAMS = {
    "evaluate": (*SCORED, "--queries", str(N_QUERIES), "--details"),
    "predict": (*SCORED, "--queries", "{queries}", "--csv"),
    "mine": ("--max-length", "2", "--max-rows", "20000000", "--out"),
}
IMPORTS = """
import json
from experiments.benchmarks import process_memory
from funcppo.cli import evaluate, evaluation_setup, shared_evaluation
from funcppo.kg.ranking import evaluator, scorers
from funcppo.kg.run import subject
print(json.dumps(process_memory.memory_mb("self")))
"""
START = """
import json, sys, time
from funcppo import data
from funcppo.kg.logic import kb
start = time.process_time()
dataset = data.load(sys.argv[1], sys.argv[2])
tables = dataset.fact_tables or kb.index_facts(
    dataset.facts,
    n_constants=dataset.n_constants,
    n_predicates=dataset.n_predicates,
)
print(json.dumps(time.process_time() - start))
"""


def main() -> None:
    """Write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", nargs="*", default=DATA_SETS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.out is None:
        parser.error("--out: expected a file, got none")

    rows: list[Row] = [{"work": "imports", **run_python(IMPORTS)}]
    for name in args.data:
        with tempfile.TemporaryDirectory() as folder:
            for row in measure(DATA / name, Path(folder)):
                rows.append({"data": name, **row})
                print(rows[-1], flush=True)
    record = {"machine": describe_machine(), "processes": N_PROCESSES}
    write_record(args.out, {**record, "rows": rows})


def measure(data: Path, folder: Path) -> list[Row]:
    """The rows of a data set.

    Args:
      folder: for files of its own.
    """
    rules, index = data / RULES, folder / "index"
    words = ["data", str(data), "--rules", str(rules), "--index", str(index)]
    subprocess.run(
        [sys.executable, "-m", "funcppo", *words],
        check=True,
        stdout=subprocess.DEVNULL,
        cwd=ROOT,
    )
    queries = folder / "queries.txt"
    write_queries(data, queries)

    n_bytes = sum(file.stat().st_size for file in index.iterdir())
    rows: list[Row] = [{"work": "index", "mb": n_bytes / 1e6}]
    forms = {"text": data, "mapped": index}
    rows += [
        {
            "work": "start",
            "form": form,
            "cpu_seconds": start_seconds(path, rules),
        }
        for form, path in forms.items()
    ]
    for program, words in PROGRAMS.items():
        outputs: list[bytes] = []
        for form, path in forms.items():
            out = folder / f"{program}.{form}"
            options = [word.format(queries=queries) for word in words]
            given = [] if program == "mine" else ["--rules", str(rules)]
            command = [program, str(path), *given, *options]
            row = run_shared([*command, str(out)])
            rows.append({"work": program, "form": form, **row})
            outputs.append(out.read_bytes())
        is_equal = without_times(outputs[0]) == without_times(outputs[1])
        if not is_equal:
            raise RuntimeError(f"{data}, {program}: outputs differ")
    return rows


def write_queries(data: Path, path: Path) -> None:
    """Write queries about the tails of the first test triples."""
    from funcppo.kg.graph.loaders import load

    dataset = load(str(data))
    with path.open("w") as file:
        for relation, head, _ in dataset.test[:N_QUERIES].tolist():
            names = dataset.predicates[relation - 1], dataset.entities[head - 1]
            file.write("'{}'('{}', ?x)\n".format(*names))


def without_times(output: bytes) -> bytes:
    """An output without the lines that say when, or of which folder."""
    lines = output.split(b"\n")
    return b"\n".join(x for x in lines if b'seconds"' not in x)


def start_seconds(data: Path, rules: Path) -> float:
    """CPU seconds until a process has a data set and the index of its facts."""
    found = [run_python(START, str(data), str(rules)) for _ in range(REPEATS)]
    return round(statistics.median(found), 3)


def run_python(code: str, *args: str):
    """The JSON that a process prints last."""
    done = subprocess.run(
        [sys.executable, "-c", code, *args],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    return json.loads(done.stdout.splitlines()[-1])


def run_shared(words: list[str]) -> Row:
    """Run a program in several processes; the most that they held together."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(N_PROCESSES), "-m", "funcppo", *words]
    largest = {"pss_mb": 0.0, "private_mb": 0.0}
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        ) as process,
    ):
        ranks: dict[int, int] = {}
        while process.poll() is None:
            time.sleep(SAMPLE_SECONDS)
            for rank in range(N_PROCESSES):
                found = ranks.get(rank) or find_rank(process.pid, rank)
                if found:
                    ranks[rank] = found
            held = [memory_mb(found) for found in ranks.values()]
            total = {name: sum(one[name] for one in held) for name in largest}
            if total["pss_mb"] > largest["pss_mb"]:
                largest = total
        errors.seek(0)
        lines = [x for x in errors if x.startswith("funcppo: ")]
    if process.returncode:
        raise RuntimeError(f"{words}: {lines}")
    return {name: round(mb, 1) for name, mb in largest.items()}


def memory_mb(process: int | str) -> Row:
    """PSS and private memory of a process; 0 of one that has ended."""
    try:
        text = Path(f"/proc/{process}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        text = ""
    kib = {
        line.split(":")[0]: int(line.split()[1])
        for line in text.splitlines()[1:]
    }
    private = kib.get("Private_Clean", 0) + kib.get("Private_Dirty", 0)
    return {
        "pss_mb": kib.get("Pss", 0) * 1024 / 1e6,
        "private_mb": private * 1024 / 1e6,
    }


if __name__ == "__main__":
    main()
