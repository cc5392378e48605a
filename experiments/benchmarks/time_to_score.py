"""Wall time of training: funcppo beside a plain JAX program of the same algorithm and settings, in one run.

    python experiments/benchmarks/time_to_score.py --seeds 5 --only CartPole-v1 \\
        --out experiments/results/time_to_score-h100.json
    python experiments/benchmarks/time_to_score.py --seeds 5 --only MinAtar/Breakout-v1 \\
        --out experiments/results/time_to_score-breakout.json

Both learn with PureJaxRL's published settings (`rl.published_settings`), one seed after another. After every ten
updates the host reads the mean return of the episodes that ended in them, and the time. funcppo calls `step` of
`fp.compile` for each update; JAX (jax_peer.py) makes the ten updates in one jitted call, as PureJaxRL scans over them.
Compiling is not in these times; `cold_s` has it, from the start of the process to the end of the first ten updates,
while the other processes compile too. A hundred updates are made before the clock starts.

A row holds the curve of each seed. The record is written anew after each seed, so that a run that is stopped leaves the
seeds before, with `is_complete` false.
"""

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

import funcppo as fp
from experiments.benchmarks import side_by_side
from experiments.benchmarks.side_by_side import Row
from experiments.paths import make_parser
from funcppo.rl import make_learner, published_settings
from funcppo.trainer import batch_size, with_length

ENVIRONMENTS = ("CartPole-v1", "MinAtar/Breakout-v1")
UPDATES_A_READ = 10

# Updates ten times: the number of episodes that ended, and the sum of their returns.
Advance = Callable[[], tuple[float, float]]


def main() -> None:
    """Run the cells and write them."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--only", nargs="+", default=ENVIRONMENTS, choices=ENVIRONMENTS
    )
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--steps", type=int, help="default: as published")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--out", type=Path, help="record to write")
    parser.add_argument("--cell", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell:
        library, env, device, seeds, steps = args.cell
        case = Case(library, env, device, int(seeds), int(steps))
        return side_by_side.run_growing_cell(case.prepare, case.measure)

    cells: dict[str, list[str]] = {}
    for env in args.only:
        steps = args.steps or published_settings(env).steps
        for library in ("funcppo", "jax"):
            arguments = [library, env, args.device, str(args.seeds), str(steps)]
            cells[f"{library} {env}"] = arguments
    side_by_side.run_cells(__file__, cells, len(cells), args.device, args.out)


class Case:
    """One library on one environment."""

    def __init__(
        self, library: str, env: str, device: str, seeds: int, steps: int
    ) -> None:
        self.library, self.env = library, env
        self.device, self.seeds = device, seeds
        torch.set_num_threads(1)
        self.settings = published_settings(env)
        learner = with_length(make_learner(env, self.settings), steps)
        self.learner = learner
        self.ppo = learner.cfg.ppo
        self.versions: Row = {}

    def prepare(self) -> Row:
        """Compile, and make the first updates."""
        is_ours = self.library == "funcppo"
        self.start = self.prepare_funcppo() if is_ours else self.prepare_jax()
        self.start(0)()
        return {
            "cold_s": side_by_side.seconds_since_start(),
            "settings": self.settings.source,
            "ppo": dataclasses.asdict(self.ppo),
        } | self.versions

    def measure(self) -> Iterator[Row]:
        """Yield the curves so far after each seed."""
        self.train(0, n_reads=10)
        n_reads = self.ppo.n_updates // UPDATES_A_READ
        curves: list[list[tuple[int, float, float | None]]] = []
        for seed in range(self.seeds):
            curves.append(self.train(seed, n_reads))
            yield {"curves": curves}

    def train(
        self, seed: int, n_reads: int
    ) -> list[tuple[int, float, float | None]]:
        """Steps, seconds and mean return, after every ten updates; None where no episode ended."""
        advance = self.start(seed)
        curve: list[tuple[int, float, float | None]] = []
        begin = time.perf_counter()
        for n in range(n_reads):
            n_episodes, total = advance()
            seconds = time.perf_counter() - begin
            steps = (n + 1) * UPDATES_A_READ * batch_size(self.ppo)
            curve.append(
                (steps, seconds, total / n_episodes if n_episodes else None)
            )
        return curve

    def prepare_funcppo(self) -> Callable[[int], Advance]:
        """From a seed to its updates, compiled."""

        def first_state(seed: int) -> Any:
            return self.learner.init(fp.random.key(seed, self.device))

        fast = fp.compile(self.learner, first_state(0))
        record = dataclasses.asdict(fast.record)
        self.versions = {"record": record, "torch": torch.__version__}

        def start(seed: int) -> Advance:
            state = first_state(seed)

            def advance() -> tuple[float, float]:
                nonlocal state
                ended: list[torch.Tensor] = []
                for _ in range(UPDATES_A_READ):
                    state, metrics = fast.step(state)
                    rollout = metrics.rollout
                    ended += [rollout.n_episodes, rollout.episode_return_sum]
                n_episodes, total = (
                    torch.stack(ended).view(-1, 2).sum(0).tolist()
                )
                return n_episodes, total

            return advance

        return start

    def prepare_jax(self) -> Callable[[int], Advance]:
        """From a seed to its updates, jitted."""
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        import jax  # pyright: ignore[reportMissingImports]

        from experiments.benchmarks import jax_peer

        jax.config.update("jax_default_device", jax.devices(self.device)[0])
        jax.config.update("jax_default_matmul_precision", "highest")
        self.versions = {"jax": jax.__version__}
        is_cartpole = self.env == "CartPole-v1"
        task = jax_peer.CARTPOLE if is_cartpole else jax_peer.BREAKOUT

        def updates(state: Any) -> tuple[Any, Any]:
            step = lambda state, _: jax_peer.iteration(self.ppo, state, task)
            state, ended = jax.lax.scan(step, state, length=UPDATES_A_READ)
            return state, tuple(x.sum() for x in ended)

        jitted = jax.jit(updates, donate_argnums=0)

        def start(seed: int) -> Advance:
            state, _ = jax_peer.make_learner(self.ppo, 0, task, seed)

            def advance() -> tuple[float, float]:
                nonlocal state
                state, (n_episodes, total) = jitted(state)
                return float(n_episodes), float(total)

            return advance

        return start


if __name__ == "__main__":
    main()
