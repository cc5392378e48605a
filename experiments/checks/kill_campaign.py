"""Claim: work that is killed at any point goes on to the files of undisturbed work, bit for bit.

    python experiments/checks/kill_campaign.py [--kills 200] [--terms 40] [--seed 0] [--out FILE]
    python experiments/checks/kill_campaign.py --processes 1 2 4 --kills 50 --stops 4
    python experiments/checks/kill_campaign.py --processes 2 --device cuda --kills 1 --stops 1

`fp.train` of a learner, `train` of questions and of proofs, `evaluate --details`, `predict --queries`, `score` and
`mine` are each run once undisturbed. Then each is started, killed (SIGKILL) after a random time, resumed
and killed again until it ends by itself, and its files are compared: tensors and texts by their bytes, lines of metrics
and results without times and without the notes on what was resumed. `score` and `mine` start again, since they
have nothing to resume. SIGTERM is sent likewise, and the time until the process has ended is recorded.

With several --processes torchrun starts the work, each time in another number of them. One of them, drawn at random, is
killed or stopped (SIGSTOP), so that the others wait for it until their deadline; torchrun starts all again, or ends and
is started again. Of runs the tensors of the last checkpoint are compared then. With `--device cuda` the learner alone
is disturbed, whose updates are compiled and replayed as CUDA graphs.

Writes a row for each work that ended, with its signals, to experiments/results/kill_campaign.json. Exits 1 when a file
differs, resumed work fails, or a half-written file stays.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments.benchmarks.side_by_side import write_record
from experiments.paths import RESULTS, ROOT, make_parser
from experiments.provenance import describe_machine
from funcppo import checkpoint
from funcppo.runtime.distributed import STALL_VARIABLE

# Fields of metrics.jsonl and results.json that tell times and memory, or what was resumed.
LEFT_OUT = {
    *("seconds", "total_seconds", "replay_ms", "notes"),
    *("choices", "phase_seconds", "phase_peak_bytes"),
}
MAX_TERM_SECONDS = 2.0  # within which SIGTERM ends a program
# of the undisturbed time: what starts again must be left alone now and then
MAX_DELAY = 1.3
TIMEOUT_SECONDS = 600  # a program that takes longer hangs
STALL_SECONDS = 20.0  # that processes wait for one that is stopped
N_UPDATES, N_STEPS = 40, 8 * 16  # of the learner: updates, steps of an update

Row = dict[str, Any]
Files = dict[str, bytes]  # contents to compare, by name


@dataclass(frozen=True, kw_only=True)
class Work:
    """A kind of work and its outputs."""

    name: str
    words: tuple[str, ...]  # of its command line; {out}, {data} are paths
    # how to go on, where a killed process may have left something
    resume: tuple[str, ...] = ("--resume",)
    read: Callable[[Path], Files]  # what is compared, of {out}


@dataclass(kw_only=True)
class Chain:
    """A work from its start to its end, with the signals in between."""

    signal_name: str
    processes: list[int] = field(default_factory=list)
    seconds_before: list[float] = field(default_factory=list)
    seconds_to_end: list[float] = field(default_factory=list)
    error: str = ""


def main() -> int:
    """Return the exit status: 0, or 1 when something differs."""
    args = parse_arguments()
    if args.learn is not None:
        learn(args.learn, args.device)
        return 0

    record: Row = {
        "seed": args.seed,
        "machine": describe_machine(args.device),
        "max_term_seconds": MAX_TERM_SECONDS,
        "rows": [],
    }
    is_shared = max(args.processes) > 1
    other = {"SIGSTOP": args.stops} if is_shared else {"SIGTERM": args.terms}
    counts = {"SIGKILL": args.kills} | other
    works = make_works(args.device, is_shared)
    generator = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder / "data", generator)
        for work in works:
            for signal_name, n in counts.items():
                chains = disturb(
                    work,
                    signal_name,
                    -(-n // len(works)),
                    folder,
                    generator,
                    tuple(args.processes),
                )
                for row in chains:
                    record["rows"].append(row)
                    write_record(args.out, record | summarise(record["rows"]))
                    print(row, flush=True)
    return int(any(row["difference"] for row in record["rows"]))


def parse_arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--terms", type=int, default=40)
    parser.add_argument("--stops", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--processes", type=int, nargs="+", default=[1], metavar="N"
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "kill_campaign.json"
    )
    parser.add_argument("--learn", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def summarise(rows: list[Row]) -> Row:
    """Return counts over all rows."""
    waits = [
        seconds
        for row in rows
        if row["signal"] == "SIGTERM"
        for seconds in row["seconds_to_end"]
    ]
    return {
        "n_kills": sum(
            row["n_signals"] for row in rows if row["signal"] == "SIGKILL"
        ),
        "n_terms": len(waits),
        "n_slow_terms": sum(wait > MAX_TERM_SECONDS for wait in waits),
        "longest_term_seconds": max(waits, default=0.0),
        "n_other_number": sum(len({*row["processes"]}) > 1 for row in rows),
        "n_different": sum(bool(row["difference"]) for row in rows),
    }


def write_data(folder: Path, generator: random.Random) -> None:
    """Write a random graph in which rules derive many facts that it does not hold, and queries about its test split."""
    folder.mkdir()
    entities = [f"e{i}" for i in range(250)]
    triples = sorted(
        {
            (
                generator.choice(entities),
                generator.choice(("p", "q", "r")),
                generator.choice(entities),
            )
            for _ in range(1200)
        }
    )
    generator.shuffle(triples)
    lines = ["\t".join(triple) + "\n" for triple in triples]
    (folder / "train.txt").write_text("".join(lines[:-200]))
    (folder / "valid.txt").write_text("".join(lines[-200:-180]))
    (folder / "test.txt").write_text("".join(lines[-180:]))
    (folder / "rules.txt").write_text(
        "0.5\tr(X,Y) :- p(X,Z), q(Z,Y)\n0.4\tp(X,Y) :- q(Y,Z), r(Z,X)\n"
        "0.3\tq(X,Y) :- r(X,Z), r(Z,Y)\n"
    )
    queries = [f"{r}({h}, ?x)\n" for h, r, _ in triples[-180:]]
    (folder / "queries.txt").write_text("".join(queries))


def disturb(
    work: Work,
    signal_name: str,
    n_signals: int,
    folder: Path,
    generator: random.Random,
    processes: tuple[int, ...] = (1,),
) -> Iterator[Row]:
    """Yield the row of a work each time that it ends, until it has had so many signals."""
    expected_folder = folder / f"{work.name}-{signal_name}"
    expected_folder.mkdir()
    seconds = run_undisturbed(work, expected_folder)
    expected = work.read(expected_folder / "out")

    n_sent = 0
    while n_sent < n_signals:
        with tempfile.TemporaryDirectory(dir=folder) as name:
            place = Path(name)
            chain = Chain(signal_name=signal_name)
            has_ended = False
            while not (has_ended or chain.error):
                chain.processes.append(generator.choice(processes))
                # longer each time, so that work on a slower machine ends too
                delay = MAX_DELAY * seconds * (1 + len(chain.processes) / 10)
                after = generator.uniform(0, delay)
                has_ended = signal_after(work, place, after, chain, generator)
            found = work.read(place / "out") if not chain.error else {}
        n_sent += len(chain.seconds_before)
        yield {
            "work": work.name,
            "signal": signal_name,
            "n_signals": len(chain.seconds_before),
            "processes": chain.processes,
            "seconds_before": chain.seconds_before,
            "seconds_to_end": chain.seconds_to_end,
            "undisturbed_seconds": round(seconds, 3),
            "difference": chain.error or compare(expected, found),
        }
        if chain.error:
            return


def run_undisturbed(work: Work, place: Path) -> float:
    """Run a work to its end in one process; return the seconds that it took."""
    start = time.perf_counter()
    with start_work(work, place, 1) as process:
        _, errors = process.communicate(timeout=TIMEOUT_SECONDS)
    if process.returncode:
        raise RuntimeError(f"{work.name}: {errors}")
    return time.perf_counter() - start


def start_work(
    work: Work, place: Path, n_processes: int, n_restarts: int = 0
) -> subprocess.Popen[str]:
    """Start a work, or let it go on with what is in a folder."""
    paths = {"out": str(place / "out"), "data": str(place.parent / "data")}
    words = [word.format(**paths) for word in work.words]
    is_run = (place / "out" / "config.json").exists()
    if is_run or not work.name.startswith("train"):
        words += work.resume
    command = [sys.executable]
    if n_processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(n_processes)]
        command += ["--max-restarts", str(n_restarts)]
        command += ["--monitor-interval", "0.1"]
    return subprocess.Popen(
        [*command, *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={
            **os.environ,
            "XDG_CACHE_HOME": str(place / "cache"),
            "OMP_NUM_THREADS": "1",
            STALL_VARIABLE: str(STALL_SECONDS),
        },
    )


def signal_after(
    work: Work,
    place: Path,
    after: float,
    chain: Chain,
    generator: random.Random,
) -> bool:
    """Start a work and send it a signal after some seconds; return whether it has ended its work."""
    number = signal.Signals[chain.signal_name]
    n_processes = chain.processes[-1]
    # With several processes torchrun starts all again, or ends.
    n_restarts = generator.choice((0, 2)) if n_processes > 1 else 0
    is_sent = False
    with start_work(work, place, n_processes, n_restarts) as process:
        try:
            _, errors = process.communicate(timeout=after)
        except subprocess.TimeoutExpired:
            target = process.pid
            if n_processes > 1:
                rank = generator.randrange(n_processes)
                target = find_rank(process.pid, rank)
            if target is not None:
                os.kill(target, number)
                is_sent = True
            start = time.perf_counter()
            _, errors = process.communicate(timeout=TIMEOUT_SECONDS)
            if is_sent:
                waited = time.perf_counter() - start
                chain.seconds_before.append(round(after, 3))
                chain.seconds_to_end.append(round(waited, 3))

    # A program that is told to end while Python itself starts has no handler yet, and one may end just before.
    status = process.returncode
    expected = {0, -number, 128 + number}
    if is_sent and n_processes > 1:
        expected.add(1)  # of torchrun
    if status not in expected:
        chain.error = f"exit status {status}: {errors.strip()[-2000:]}"
    return status == 0


def find_rank(launcher: int, rank: int) -> int | None:
    """Return the id of the process of a rank that a launcher has started; None where there is none."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            variables = (entry / "environ").read_bytes().split(b"\0")
        except (OSError, IndexError):  # it has ended
            continue
        if int(fields[1]) == launcher and f"RANK={rank}".encode() in variables:
            return int(entry.name)
    return None


def compare(expected: Files, found: Files) -> str:
    """Return the names of files that differ; empty where all are equal."""
    names = sorted(set(expected) | set(found))
    return ", ".join(n for n in names if expected.get(n) != found.get(n))


def read_tensors(path: Path) -> Files:
    """Return the tensors of a checkpoint by name, each with its type and shape."""
    files: Files = {}
    for name, array in checkpoint.read(path)[0].items():
        head = f"{array.dtype} {array.shape}".encode()
        files[f"{path.name} {name}"] = head + array.tobytes()
    return files


def read_run_tensors(out: Path) -> Files:
    """Return the tensors of the last checkpoint of a run."""
    return read_tensors(out / "checkpoint.npz")


def read_run(out: Path) -> Files:
    """Return the files of a run: tensors by name, lines and results without what tells times."""
    files: Files = {path.name: b"" for path in out.iterdir()}
    # A run that was killed between two checkpoints ends with another previous one.
    files |= read_run_tensors(out)
    files["config.json"] = (out / "config.json").read_bytes()
    metrics = out / "metrics.jsonl"  # of updates, if there are any
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    for number, line in enumerate(lines):
        files[f"metrics.jsonl {number}"] = without_times(line)
    results = (out / "results.json").read_text()
    files["results.json"] = without_times(results)
    return files


def without_times(text: str) -> bytes:
    """Return an object of JSON without the fields that are left out."""
    fields = json.loads(text)
    for name in LEFT_OUT & set(fields):
        del fields[name]
    return json.dumps(fields).encode()


def read_outputs(out: Path) -> Files:
    """Return the output, with the files in it, and all files in its folder."""
    return {
        path.relative_to(out.parent).as_posix(): path.read_bytes()
        for path in (*out.parent.iterdir(), *out.rglob("*"))
        if path.is_file()
    }


def make_works(device: str, is_shared: bool) -> list[Work]:
    """Return all kinds of work, those that several processes share or all."""
    learner = Work(
        name="learner",
        words=(__file__, "--learn", "{out}", "--device", device),
        resume=(),
        read=read_tensors,
    )
    if device == "cuda":
        return [learner]
    program = ("-m", "funcppo")
    rules = options("height=2", "score=noisy-or", "smoothing=5")
    queries = ("--queries", "{data}/queries.txt", "--csv", "{out}")
    works = [
        learner,
        Work(
            name="evaluate",
            words=(
                *(*program, "evaluate", "{data}", "--details", "{out}"),
                *rules,
            ),
            read=read_outputs,
        ),
    ]
    mine = ("mine", "{data}", "--out", "{out}", "--max-length", "3")
    if not is_shared:
        works.append(
            Work(
                name="predict",
                words=(*program, "predict", "{data}", *queries, *rules),
                read=read_outputs,
            )
        )
        score = ("score", "{data}", "{data}/test.txt", "--out", "{out}")
        score += options("score=noisy-or", "height=2", "smoothing=5")
        for words in (mine, score):
            works.append(
                Work(
                    name=words[0],
                    words=(*program, *words),
                    resume=(),
                    read=read_outputs,
                )
            )
    train = ("train", "family_tree:20:1", "--out", "{out}", "--steps", "1024")
    train += options("ppo.n_envs=8", "ppo.n_steps=8", "ppo.n_shards=4")
    train += options("n_validations=2", "n_validation_queries=6")
    # a limit of time would sample the test split
    train += options("checkpoint_every=0.001", "seconds=None")
    for name, more in (
        ("questions", ()),
        ("proofs", options("score=best-proof")),
    ):
        works.append(
            Work(
                name=f"train {name}",
                words=(*program, *train, "--learner", name, *more),
                read=read_run_tensors if is_shared else read_run,
            )
        )
    return works


def options(*settings: str) -> tuple[str, ...]:
    """Return the words that give a program some settings."""
    return tuple(word for one in settings for word in ("--set", one))


def learn(path: Path, device: str) -> None:
    """Train a small learner, shared by the processes of torchrun, with a checkpoint after each update."""
    import funcppo as fp
    from funcppo.trainer import Progress

    def check_replay(progress: Progress[Any]) -> None:
        record = progress.record
        if record is None or record.replay_mode != "cuda-graph":
            raise RuntimeError(f"expected a CUDA graph, got {record}")

    learner = fp.ppo(
        env=fp.envs.cartpole(),
        network=fp.nets.mlp(16),
        n_envs=8,
        n_steps=16,
        n_shards=4,
    )
    on_gpu = device == "cuda"
    fp.train(
        fp.distribute(learner),
        (300 if on_gpu else N_UPDATES) * N_STEPS,
        device=device,
        compile_step=on_gpu,
        callbacks=[check_replay] if on_gpu else [],
        checkpoint=path,
        checkpoint_every=1,
    )


if __name__ == "__main__":
    sys.exit(main())
