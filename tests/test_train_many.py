"""Several policies trained in one step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import funcppo as fp
from funcppo import logs, trainer
from funcppo.core import tree
from funcppo.trainer import init_many, saved_update
from tests.learning import assert_trees_equal, one_thread

pytestmark = pytest.mark.usefixtures(one_thread.__name__)

LEARNER = fp.ppo(
    env=fp.envs.wrappers.normalize_observation(fp.envs.cartpole(max_steps=20)),
    network=fp.nets.mlp(8),
    n_envs=4,
    n_steps=8,
    n_epochs=1,
    n_minibatches=2,
)
SEEDS = (5, 2)
N_UPDATES = 3
OPTIONS = {"seeds": SEEDS, "evaluate_every": 2, "n_episodes": 4}


@pytest.fixture(scope="module")
def whole_run():
    """A run without a stop."""
    return fp.train_many(LEARNER, N_UPDATES * 32, **OPTIONS)


@pytest.mark.parametrize("i", range(len(SEEDS)))
def test_each_seed_is_its_single_run(i, whole_run):
    """States and evaluations; float32, sums in another order."""
    options = OPTIONS | {"seed": SEEDS[i]}
    del options["seeds"]
    alone = fp.train(LEARNER, N_UPDATES * 32, **options)
    state = tree.item(whole_run.state, i)
    assert_trees_equal(state, alone.state, rtol=1e-4, atol=1e-5)
    for got, expected in zip(whole_run.evaluations, alone.evaluations):
        assert got[i].update == expected.update
        assert got[i].greedy.mean == pytest.approx(expected.greedy.mean)
        assert got[i].sampled.mean == pytest.approx(expected.sampled.mean)


def test_a_run_continued_from_its_checkpoint_equals_one_without_a_stop(
    whole_run, tmp_path
):
    path = tmp_path / "run.npz"
    stop = [lambda progress: progress.update == 1]
    stopped = fp.train_many(
        LEARNER, N_UPDATES * 32, checkpoint=path, callbacks=stop, **OPTIONS
    )
    assert stopped.is_stopped and stopped.update == 1
    rest = fp.train_many(LEARNER, N_UPDATES * 32, checkpoint=path, **OPTIONS)
    assert_trees_equal(rest.state, whole_run.state, rtol=0, atol=0)
    assert rest.evaluations == whole_run.evaluations


def test_a_checkpoint_is_written_whenever_its_time_has_come(
    whole_run, monkeypatch, tmp_path
):
    """The one before stays beside it, and serves where the latest is damaged."""
    monkeypatch.setattr(trainer, "CHECKPOINT_SECONDS", 0.0)
    path = tmp_path / "run.npz"

    def fail(progress):
        if progress.update == 2:
            raise KeyError(progress.update)

    arguments = {"checkpoint": path, **OPTIONS}
    with pytest.raises(KeyError):
        fp.train_many(LEARNER, N_UPDATES * 32, callbacks=[fail], **arguments)
    assert saved_update(path) == 2
    path.write_bytes(b"torn")
    assert saved_update(path) == 1
    with pytest.warns(UserWarning, match=r"previous-run\.npz is used"):
        rest = fp.train_many(LEARNER, N_UPDATES * 32, **arguments)
    assert len(rest.notes) == 1
    assert_trees_equal(rest.state, whole_run.state, rtol=0, atol=0)


def test_metrics_are_logged_by_seed_and_elsewhere_as_means(tmp_path):
    log = fp.MetricsLog(tmp_path, "csv")
    fp.train_many(LEARNER, 64, callbacks=[log], **OPTIONS)
    rows = logs.read(tmp_path / "metrics.jsonl")
    assert [(row["update"], row["seed"]) for row in rows] == [
        (1, 5),
        (1, 2),
        (2, 5),
        (2, 2),
    ]
    assert "greedy_return" in rows[2] and "greedy_return" not in rows[0]
    lines = (tmp_path / "metrics.csv").read_text().splitlines()
    assert len(lines) == 3
    place = lines[0].split(",").index("loss")
    mean = (rows[0]["loss"] + rows[1]["loss"]) / 2
    assert float(lines[1].split(",")[place]) == pytest.approx(mean)


def test_each_seed_learns_with_its_own_scalars():
    rates = [0.0, 1e-2]
    first = init_many(LEARNER, (0, 0))
    result = fp.train_many(
        LEARNER, 32, seeds=(0, 0), scalars={"learning_rate": rates}
    )
    assert torch.equal(result.state.scalars.learning_rate, torch.tensor(rates))
    changes = [
        tree.global_norm(
            [a[i] - b[i] for a, b in zip(
                tree.leaves(result.state.params), tree.leaves(first.params)
            )]
        )
        for i in range(2)
    ]  # fmt: skip
    assert changes[0] == 0 < changes[1]


@pytest.mark.parametrize(
    ("options", "error", "problem"),
    [
        ({"seeds": 0}, ValueError, "seeds: expected an integer of 1 or more"),
        ({"total_steps": 0}, ValueError, "total_steps: expected an integer"),
        ({"scalars": {"rate": [1, 2]}}, ValueError, "scalars: expected one of"),
        ({"scalars": {"gamma": [1]}}, ValueError, "scalars: gamma: expected 2"),
        (
            {"scalars": {"gamma": [0.9, 1.5]}},
            ValueError,
            "gamma: expected 0 to",
        ),
        (
            {"scalars": {"learning_rate": [1e-3, float("nan")]}},
            ValueError,
            "learning_rate: expected 0 or more, got nan",
        ),
        (
            {"strategy": "fast"},
            ValueError,
            "strategy: expected auto, one-graph",
        ),
        (
            {"scalars": {"gamma": 0.9}},
            TypeError,
            "scalars: gamma: expected a s",
        ),
        ({"scalars": [1, 2]}, TypeError, "scalars: expected numbers by their"),
    ],
)
def test_what_is_out_of_range_is_named(options, error, problem):
    options = {"total_steps": 32, "seeds": 2} | options
    with pytest.raises(error, match=f"^{problem}") as raised:
        fp.train_many(LEARNER, **options)
    assert "\n" not in str(raised.value)


def test_scalars_may_be_an_array():
    numbers = np.array([0.5, 0.9])
    states = init_many(LEARNER, (0, 1), scalars={"gamma": numbers})  # pyright: ignore[reportArgumentType]
    assert states.scalars.gamma.tolist() == pytest.approx([0.5, 0.9])


CARTPOLE = fp.envs.cartpole()
CELL = torch.nn.LSTMCell(4, 3)  # has no batching rule


def _apply_cell(cfg, world, params, obs, memory):
    named = dict(zip(["weight_ih", "weight_hh"], params))
    hidden, cell = torch.func.functional_call(CELL, named, (obs, memory))
    return fp.PolicyValue(hidden[:, :2], hidden[:, 2]), (hidden, cell)


LSTM_CELL = fp.Agent(
    cfg=None,
    init=lambda cfg, key: (torch.ones(12, 4), torch.ones(12, 3)),
    initial_memory=lambda cfg, n, device: (torch.zeros(n, 3),) * 2,
    apply_recurrent=_apply_cell,
)


def _branch(cfg, world, state, action, key):
    reached, timestep = CARTPOLE.step_functional(cfg, world, state, action, key)
    if state.motion.sum() > 0:
        reached = reached._replace(motion=-reached.motion)
    return reached, timestep


@pytest.mark.parametrize(
    ("changes", "network", "name"),
    [
        ({"step_functional": _branch}, fp.nets.mlp(4), "step_functional"),
        (
            {
                "observe": lambda cfg, world, state: torch.tensor(
                    state.motion.tolist()
                )
            },
            fp.nets.mlp(4),
            "observe",
        ),
        ({}, LSTM_CELL, "apply of the network"),
    ],
)
def test_what_vmap_cannot_map_is_named_before_anything_is_compiled(
    changes, network, name
):
    env = replace(CARTPOLE, step_with_autoreset=None, **changes)
    learner = fp.ppo(
        env=env, network=network, n_envs=2, n_steps=8, n_minibatches=2
    )
    match = f"^{name}: expected a function that torch.vmap can map, got Runt"
    with pytest.raises(ValueError, match=match) as error:
        fp.train_many(learner, 32, seeds=2)
    assert "\n" not in str(error.value)
    fp.train(learner, 32)
