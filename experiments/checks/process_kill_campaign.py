"""Claim: work of several processes that are killed at any point ends with the files of undisturbed work, bit for bit.

    python experiments/checks/process_kill_campaign.py [--kills 50] [--stops 4] [--seed 0] [--out FILE]
    python experiments/checks/process_kill_campaign.py --device cuda --kills 1 --stops 1 --out FILE

torchrun starts each kind of work in 2 or 4 processes, by turns: `fp.train` of a learner, `train` of questions and of
proofs, `evaluate --details`, `predict --queries`, and `mine`. A random process is killed (SIGKILL) at a random point,
or stopped (SIGSTOP), so that the others wait for it until their deadline. Then torchrun starts all again; or it ends,
another number of processes goes on, is disturbed likewise, and a third number brings the work to its end. Mining, which
cannot go on, begins anew. What is compared with the work of one undisturbed process: all tensors of the last
checkpoint, and other files whole.

With `--device cuda` the learner alone is disturbed, whose updates are compiled and replayed as CUDA graphs, in two
processes and restarted by torchrun; it is compared with two undisturbed processes.

Writes a row for each work that ended to experiments/results/process_kill_campaign.json. Exits 1 when something differs
or a work fails.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments.benchmarks.side_by_side import write_record
from experiments.checks.kill_campaign import TIMEOUT_SECONDS
from experiments.paths import RESULTS, ROOT
from experiments.provenance import describe_machine
from funcppo import checkpoint
from funcppo.kg.graph import loaders
from funcppo.runtime.distributed import STALL_VARIABLE
from funcppo.trainer import PREVIOUS_NAME

STALL_SECONDS = 20.0
UNDISTURBED_STALL_SECONDS = 600.0  # it compiles, on a GPU
STALL_TEXT = "expected progress within"
POLL_SECONDS = 0.02
MAX_WAIT = 0.5  # seconds from the chosen point to the signal
N_PROCESSES = (1, 2, 4)
FUNCPPO = ("-m", "funcppo")
N_UPDATES, N_STEPS = 40, 8 * 16  # of the learner: updates, steps of an update
N_GPU_UPDATES = 300
TRAIN = ("--resume", "--ppo.n-shards", "4", "--steps", "1024", "--ppo.n-envs")
TRAIN += ("8", "--ppo.n-steps", "8", "--checkpoint-every", "0.01")
TRAIN += ("--n-validations", "2", "--n-validation-queries", "6", "--out")
# ranking is a third of its time
EVALUATE = ("evaluate", "family_tree:4000:1", "--resume", "--height", "2")
EVALUATE += ("--score", "noisy-or", "--smoothing", "5", "--details")
N_LINES = 8456  # that an evaluation writes
PREDICT = ("predict", "family_tree:4000:1", "--resume", "--height", "2")
PREDICT += ("--score", "noisy-or", "--smoothing", "5", "--known")
MINE = ("mine", "family_tree:1000:1", "--max-rows", "6000000", "--out")

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Work:
    """A kind of work, its progress, and how its output is compared."""

    name: str
    # what torchrun starts; the path of the output follows
    words: tuple[str, ...]
    # how far an output is, of how much in all; 0 of 0 where it does not show
    progress: Callable[[Path], int] = lambda out: 0
    total: int = 0
    compare: Callable[[Path, Path], str]  # of two outputs, empty if equal
    # the only number of processes; None: any of them, in turns
    processes: int | None = None


@dataclass(kw_only=True)
class Chain:
    """A work from its start to its end, with the signals in between."""

    processes: list[int] = field(default_factory=list)
    # what processes said that waited too long for another one
    stalls: list[str] = field(default_factory=list)
    signals: list[Row] = field(default_factory=list)
    error: str = ""


def main() -> int:
    """The exit status: 0, or 1 when something differs."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--stops", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "process_kill_campaign.json"
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--learn", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--learn-on-gpu", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.learn is not None:
        learn(args.learn)
        return 0
    if args.learn_on_gpu is not None:
        learn(args.learn_on_gpu, "cuda")
        return 0

    generator = random.Random(args.seed)
    names = ["SIGKILL"] * args.kills + ["SIGSTOP"] * args.stops
    generator.shuffle(names)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        on_gpu = args.device == "cuda"
        works = [gpu_work()] if on_gpu else make_works(Path(name))
        for row in disturb_all(works, names, Path(name), generator):
            rows.append(row)
            record = {
                "seed": args.seed,
                "machine": describe_machine(args.device),
                "stall_seconds": STALL_SECONDS,
                **summarise(rows),
                "rows": rows,
            }
            write_record(args.out, record)
            print(row, flush=True)
    return int(any(row["difference"] for row in rows))


def summarise(rows: list[Row]) -> Row:
    """Counts over all rows."""
    signals = [sent for row in rows for sent in row["signals"]]
    kills = [
        row["work"]
        for row in rows
        for sent in row["signals"]
        if sent["signal"] == "SIGKILL"
    ]
    return {
        "n_kills": len(kills),
        "n_kills_of": {name: kills.count(name) for name in sorted({*kills})},
        "n_stops": len(signals) - len(kills),
        "n_amid": sum(sent["progress"] > 0 for sent in signals),
        "n_other_number": sum(len({*row["processes"]}) > 1 for row in rows),
        "n_different": sum(bool(row["difference"]) for row in rows),
    }


def make_works(folder: Path) -> list[Work]:
    """All kinds of work.

    Args:
      folder: for their input.
    """
    queries = folder / "queries.txt"
    n_queries = write_queries(queries)
    works = [
        Work(
            name="learner",
            words=(__file__, "--learn"),
            progress=partial(count_updates, name="update"),
            total=N_UPDATES,
            compare=compare_checkpoints,
        ),
        Work(
            name="evaluation",
            words=(*FUNCPPO, *EVALUATE),
            progress=count_lines,
            total=N_LINES,
            compare=compare_files,
        ),
        Work(
            name="prediction",
            words=(*FUNCPPO, *PREDICT, "--queries", str(queries), "--csv"),
            progress=count_part_lines,
            total=n_queries,
            compare=compare_files,
        ),
        Work(name="mining", words=(*FUNCPPO, *MINE), compare=compare_files),
    ]
    for learner, *more in (
        ("questions",),
        ("proofs", "--score", "best-proof"),
    ):
        words = ("train", "family_tree:20:1", "--learner", learner, *more)
        works.append(
            Work(
                name=f"train {learner}",
                words=(*FUNCPPO, *words, *TRAIN),
                progress=count_run_updates,
                total=16,
                compare=compare_runs,
            )
        )
    return works


def write_queries(path: Path) -> int:
    """Write the queries of `PREDICT`, about the tails of its test split; their number."""
    dataset = loaders.load(PREDICT[1])
    lines = [
        f"{dataset.predicates[r - 1]}({dataset.entities[h - 1]}, ?x)\n"
        for r, h, _ in dataset.test.tolist()
    ]
    path.write_text("".join(lines))
    return len(lines)


def gpu_work() -> Work:
    """The learner on two GPUs."""
    return Work(
        name="learner",
        words=(__file__, "--learn-on-gpu"),
        progress=partial(count_updates, name="update"),
        total=N_GPU_UPDATES,
        compare=compare_checkpoints,
        processes=2,
    )


def learn(path: Path, device: str = "cpu") -> None:
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
        (N_GPU_UPDATES if on_gpu else N_UPDATES) * N_STEPS,
        device=device,
        compile_step=on_gpu,
        callbacks=[check_replay] if on_gpu else [],
        checkpoint=path,
        checkpoint_every=1,
    )


def disturb_all(
    works: list[Work],
    names: list[str],
    folder: Path,
    generator: random.Random,
) -> Iterator[Row]:
    """Yield a row for each work of which processes got signals, until all of them are sent."""
    seconds: dict[str, float] = {}
    for work in works:
        start = time.perf_counter()
        (folder / work.name).mkdir()
        out = folder / work.name / "out"
        process = launch(
            work, work.processes or 1, out, 0, UNDISTURBED_STALL_SECONDS
        )
        error, _ = finish(process)
        if error:
            raise RuntimeError(f"undisturbed {work.name}: {error}")
        seconds[work.name] = time.perf_counter() - start

    left = list(names)
    number = 0
    while left:
        work = works[number % len(works)]
        number += 1
        out = folder / f"{work.name} {number}" / "out"
        out.parent.mkdir()
        chain = Chain()
        disturb(work, out, chain, left, seconds[work.name], generator)
        if not chain.signals:  # it had ended before
            continue
        expected = folder / work.name / "out"
        yield {
            "work": work.name,
            "processes": chain.processes,
            "signals": chain.signals,
            "stalls": chain.stalls,
            "difference": chain.error or work.compare(expected, out),
        }


def disturb(
    work: Work,
    out: Path,
    chain: Chain,
    names: list[str],
    seconds: float,
    generator: random.Random,
) -> None:
    """Bring a work to its end, with a signal or two on the way.

    Args:
      out: its output.
      chain: receives what was done.
      names: signals to send, of which those are taken that were sent.
      seconds: time of the work without a signal.
    """
    # torchrun starts all again, or ends and two other numbers go on.
    restarts = generator.random() < 0.5
    numbers = generator.sample(N_PROCESSES[1:], 2)
    if work.processes is not None:
        restarts, numbers = True, [work.processes]
    for n in numbers[:1] if restarts else numbers:
        chain.processes.append(n)
        process = launch(work, n, out, restarts=2 * restarts)
        point = generator.randrange(work.total) if work.total else 0
        while process.poll() is None and work.progress(out) < point:
            time.sleep(POLL_SECONDS)
        share = generator.uniform(0.3, 1.0)
        time.sleep(share * (MAX_WAIT if work.total else seconds))
        rank, progress = generator.randrange(n), work.progress(out)
        target = find_rank(process.pid, rank)
        if target is not None and names:
            name = names.pop()
            os.kill(target, signal.Signals[name])
            sent = {"signal": name, "rank": rank, "progress": progress}
            chain.signals.append(sent)
        chain.error, stalls = finish(process)
        chain.stalls += stalls
        if not chain.error:
            return
    if not restarts:
        n = generator.choice(N_PROCESSES)
        chain.processes.append(n)
        chain.error, _ = finish(launch(work, n, out, restarts=0))


def launch(
    work: Work,
    n: int,
    out: Path,
    restarts: int,
    stall_seconds: float = STALL_SECONDS,
) -> subprocess.Popen[str]:
    """A work in some processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(n), "--max-restarts", str(restarts)]
    command += ["--monitor-interval", "0.1", *work.words, str(out)]
    return subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={
            **os.environ,
            STALL_VARIABLE: str(stall_seconds),
            "OMP_NUM_THREADS": "1",
        },
    )


def finish(process: subprocess.Popen[str]) -> tuple[str, list[str]]:
    """Wait for the end of a work; the error, empty if there is none, and what processes said that waited too long."""
    with process:
        _, errors = process.communicate(timeout=TIMEOUT_SECONDS)
    status = process.returncode
    stalls = [x for x in errors.splitlines() if STALL_TEXT in x]
    error = f"exit status {status}: {errors[-2000:]}" if status else ""
    return error, stalls


def find_rank(launcher: int, rank: int) -> int | None:
    """The id of the process of a rank that a launcher has started; None where there is none."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            parent = int(
                (entry / "stat").read_text().rsplit(")", 1)[1].split()[1]
            )
            variables = (entry / "environ").read_bytes().split(b"\0")
        except (OSError, IndexError):  # it has ended
            continue
        if parent == launcher and f"RANK={rank}".encode() in variables:
            return int(entry.name)
    return None


def count_lines(path: Path) -> int:
    """Lines of a file; 0 where it does not exist."""
    try:
        return path.read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def count_part_lines(path: Path) -> int:
    """Lines of what stands beside a file until it is written; 0 where there is none."""
    return count_lines(path.with_name(path.name + ".part"))


def count_updates(path: Path, name: str) -> int:
    """Updates of a checkpoint, in the tensor of a name; 0 where there is none."""
    previous = path.with_name(PREVIOUS_NAME.format(name=path.name))
    while path.exists() or previous.exists():
        try:
            return int(checkpoint.read(path).arrays[name])
        except checkpoint.DamagedCheckpointError:  # it is being replaced
            time.sleep(POLL_SECONDS)
    return 0


def count_run_updates(out: Path) -> int:
    """Updates of the checkpoint of a run; 0 where there is none."""
    return count_updates(out / "checkpoint.npz", "train_state.update")


def compare_runs(expected: Path, found: Path) -> str:
    """What differs between the checkpoints of two runs, or empty."""
    name = "checkpoint.npz"
    return compare_checkpoints(expected / name, found / name)


def compare_checkpoints(expected: Path, found: Path) -> str:
    """The first tensor that differs between two checkpoints, or empty."""
    if not found.exists():
        return "no checkpoint"
    pair = [checkpoint.read(path).arrays for path in (expected, found)]
    for name in sorted({*pair[0], *pair[1]}):
        if not all(name in arrays for arrays in pair):
            return name
        if not np.array_equal(pair[0][name], pair[1][name], equal_nan=True):
            return name
    return ""


def compare_files(expected: Path, found: Path) -> str:
    """The first file that differs between two outputs and all beside them, or empty."""
    folders = (expected.parent, found.parent)
    names = {path.name for folder in folders for path in folder.iterdir()}
    for name in sorted(names):
        pair = [out.with_name(name) for out in (expected, found)]
        if not all(path.exists() for path in pair):
            return name
        if pair[0].read_bytes() != pair[1].read_bytes():
            return name
    return ""


if __name__ == "__main__":
    sys.exit(main())
