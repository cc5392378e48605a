"""Claim: a commit takes no more CPU time than an earlier one, beyond the spread of its repeats.

    python experiments/checks/check_speed.py --baseline COMMIT --commit COMMIT
    python experiments/checks/check_speed.py --baseline COMMIT --commit COMMIT --data DIR     also ranks DIR/family

Both commits do the same work in turn, in processes of their own with one thread: eager PPO updates of CartPole (4
environments x 128 steps), and a full ranking of a test split by noisy-or. Compared is the CPU time of the process,
which other work on the machine changes less than the time on the clock. Exits 1 where the fastest repeat of the later
commit is slower than the slowest one of the baseline.
"""

from __future__ import annotations

import argparse
import resource
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments.benchmarks.side_by_side import write_record
from experiments.checks.check_unchanged import (
    baseline_checkout,
    call,
    full_hash,
)
from experiments.provenance import describe_machine

N_UPDATES = 30
# A program for any commit: modules of the environments and networks have moved. It prints milliseconds.
CARTPOLE = f"""
import time
from funcppo import random, train_step
from funcppo.config import Config, PPOConfig
from funcppo.envs.base import NoWorld
try:
    from funcppo.envs import classic
    from funcppo.nets import feedforward as mlp
except ImportError:
    from funcppo.envs import cartpole
    from funcppo.nets import mlp
cfg = Config(
    ppo=PPOConfig(n_envs=4, n_steps=128),
    env=classic.cartpole(),
    agent=mlp.agent(mlp.MLPConfig(n_obs=4, n_actions=2)),
)
state = train_step.init(cfg, NoWorld(), random.key(0))
times = []
for _ in range({N_UPDATES} + 1):
    start = time.process_time()
    state, _ = train_step.train_step(cfg, NoWorld(), state)
    times.append(time.process_time() - start)
print(1e3 * sorted(times[1:])[{N_UPDATES} // 2])
"""


def main() -> int:
    """The exit status: 0, or 1 where the later commit is slower."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--baseline", required=True, metavar="COMMIT")
    parser.add_argument("--commit", default="HEAD", metavar="COMMIT")
    parser.add_argument("--repeats", type=int, default=3, metavar="N")
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="standard data sets"
    )
    parser.add_argument("--out", type=Path, metavar="FILE")
    args = parser.parse_args()

    works = {"cartpole": cartpole_milliseconds}
    if args.data:
        family = str((args.data / "family").resolve())
        works["ranking"] = lambda code: ranking_milliseconds(code, family)
    baseline, later = full_hash(args.baseline), full_hash(args.commit)
    rows: list[dict[str, Any]] = []
    with (
        baseline_checkout(baseline) as before,
        baseline_checkout(later) as after,
    ):
        for repeat in range(1, args.repeats + 1):
            for name, work in works.items():
                for commit, checkout in ((baseline, before), (later, after)):
                    row = {"commit": commit, "benchmark": name}
                    row |= {"repeat": repeat, "cpu_ms": work(checkout)}
                    rows.append(row)
                    print(row, flush=True)

    if args.out:
        what = "the same work by two commits in turn, in CPU time"
        record = {"what": what, "baseline": baseline, "rows": rows}
        write_record(args.out, record | {"machine": describe_machine()})
    return int(any(is_slower(rows, name, baseline) for name in works))


def cartpole_milliseconds(checkout: Path) -> float:
    """The median CPU time of an update."""
    return float(call(checkout, "-c", CARTPOLE))


def ranking_milliseconds(checkout: Path, data: str) -> float:
    """The CPU time of a process that ranks a test split, its start included."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    evaluate = ["evaluate", data, "--split", "test", "--score", "noisy-or"]
    call(checkout, "-m", "funcppo", *evaluate, "--height", "1")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime - before.ru_utime
    return 1e3 * (seconds + after.ru_stime - before.ru_stime)


def is_slower(
    rows: list[dict[str, Any]], benchmark: str, baseline: str
) -> bool:
    """Whether the fastest repeat of the later commit takes longer than the slowest one of the baseline."""
    before: list[float] = []
    after: list[float] = []
    for row in rows:
        if row["benchmark"] == benchmark:
            times = before if row["commit"] == baseline else after
            times.append(row["cpu_ms"])
    return min(after) > max(before)


if __name__ == "__main__":
    raise SystemExit(main())
