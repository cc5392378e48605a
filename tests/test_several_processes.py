"""A learner in two processes equals the same learner in one, bit for bit: steps, runs, checkpoints."""

import re
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

import funcppo as fp
from funcppo import logs
from funcppo.core import tree
from funcppo.envs import wrappers
from funcppo.runtime import distributed
from tests.cli.processes import run_processes
from tests.learning import assert_trees_equal

DOCS = Path(__file__).parents[1] / "docs"
ENV = wrappers.normalize_reward(
    wrappers.normalize_observation(fp.envs.cartpole(max_steps=20))
)
SIZES = {"n_envs": 8, "n_steps": 8, "n_epochs": 2, "n_minibatches": 2}
LEARNER = fp.ppo(
    env=ENV, network=fp.nets.mlp(8), n_shards=4, target_kl=0.01, **SIZES
)
N_STEPS = 8 * 8  # of an update


def run(n, folder, program):
    """Run a program in some processes; what they print."""

    def main():
        torch.set_num_threads(1)
        program()

    ended = run_processes(n, folder, main=main)
    assert [x.status for x in ended] == [0] * n, ended
    return [x.out for x in ended]


def write(path, values):
    np.savez(path, *[x.numpy() for x in tree.leaves(values)])


def read(path, like):
    with np.load(path) as arrays:
        leaves = [torch.from_numpy(arrays[name]) for name in arrays]
    return tree.unflatten(like, leaves)


def test_a_step_of_several_processes_equals_that_of_one(tmp_path):
    """The whole state and the metrics, on every rank; each gives another seed, and that of rank 0 counts."""
    state = LEARNER.init(fp.random.key(0))
    for _ in range(2):
        state, metrics = LEARNER.step(state)

    def program():
        learner = fp.distribute(LEARNER)
        rank = distributed.launched_rank()
        own = learner.init(fp.random.key(rank))
        n_own = 4 // distributed.launched_size()
        assert own.key.shape[0] == n_own
        for _ in range(2):
            own, own_metrics = learner.step(own)
        assert own.episode_stats.length.shape[0] == 2 * n_own
        write(tmp_path / f"{rank}.npz", (learner.gather(own), own_metrics))
        again = learner.scatter(learner.gather(own))
        assert_trees_equal(again, own, rtol=0, atol=0)

    for n in (1, 2, 4):
        run(n, tmp_path, program)
        for rank in range(n):
            got = read(tmp_path / f"{rank}.npz", (state, metrics))
            assert_trees_equal(got, (state, metrics), rtol=0, atol=0)


def test_a_run_goes_on_in_another_number_of_processes(tmp_path):
    """Two updates in 2 processes, two in 1, two in 4: the run without a stop. Rank 0 alone calls back and writes."""
    want = fp.train(LEARNER, 6 * N_STEPS, seed=3, evaluate_every=6)
    path, log = tmp_path / "run.npz", tmp_path / "log"

    def program(last_update):
        def stop(progress):
            print(f"update {progress.update}")
            return progress.update == last_update

        result = fp.train(
            fp.distribute(LEARNER),
            6 * N_STEPS,
            seed=3,
            callbacks=[stop, fp.MetricsLog(log)],
            checkpoint=path,
            evaluate_every=6,
        )
        assert result.update == last_update
        if last_update == 6:
            assert result.evaluations == want.evaluations

    for n, last_update in ((2, 2), (1, 4), (4, 6)):
        out = run(n, tmp_path, lambda last=last_update: program(last))
        updates = f"update {last_update - 1}\nupdate {last_update}\n"
        assert out == [updates, *[""] * (n - 1)]
    with pytest.warns(UserWarning, match="nothing was trained"):
        end = fp.train(LEARNER, 6 * N_STEPS, seed=3, checkpoint=path)
    assert_trees_equal(end.state, want.state, rtol=0, atol=0)
    rows = logs.read(log / "metrics.jsonl")
    assert [row["update"] for row in rows] == [1, 2, 3, 4, 5, 6]


def test_a_compiled_step_of_two_processes_is_one_graph(tmp_path):
    """The collective is in the graph of the minibatch step, and both choose that strategy. Equal to eager to 1e-5."""

    def program():
        learner = fp.distribute(LEARNER)
        state = learner.init(fp.random.key(0))
        fast = fp.compile(learner, state, backend="eager")
        assert fast.record.strategy == "one-graph", fast.record
        got, want = fast.step(state), learner.step(state)
        assert_trees_equal(got, want, rtol=1e-5, atol=1e-5)

    run(2, tmp_path, program)


def test_the_example_of_the_guide_runs_in_processes(tmp_path, monkeypatch):
    text = (DOCS / "distributed.md").read_text()
    blocks = re.findall(r"(?:^    .*\n|^\n)+", text, re.MULTILINE)
    (example,) = [
        textwrap.dedent(block) for block in blocks if "fp.distribute(" in block
    ]
    assert len(example.strip().splitlines()) <= 10
    monkeypatch.chdir(tmp_path)
    out = run(2, tmp_path, lambda: exec(example, {}))
    lines = out[0].splitlines()
    assert len(lines) == 10 and lines[-1].startswith("update 10/10")
    assert out[1] == ""
    assert (tmp_path / "cartpole.npz").exists()


def fails_with(tmp_path, program, text, n=2):
    ended = run_processes(n, tmp_path, main=program)
    for x in ended:
        assert x.status == 1
        assert text in x.err.strip().splitlines()[-1]


def test_shards_that_cannot_be_shared_equally_are_refused(tmp_path):
    fails_with(
        tmp_path,
        lambda: fp.distribute(LEARNER),
        "ValueError: n_shards: expected a multiple of the 3 processes, got 4",
        n=3,
    )
    one = fp.ppo(env=ENV, network=fp.nets.mlp(8), **SIZES)
    fails_with(
        tmp_path,
        lambda: fp.distribute(one),
        "n_shards: expected a multiple of the 2 processes, got 1",
    )


def test_one_process_is_left_as_it_is():
    assert fp.distribute(LEARNER) is LEARNER
    state = LEARNER.init(fp.random.key(0))
    assert LEARNER.gather(state) is LEARNER.scatter(state) is state
