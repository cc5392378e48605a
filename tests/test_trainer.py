"""The loop above the training step: evaluation, checkpoints, callbacks."""

from __future__ import annotations

import csv
from dataclasses import replace

import pytest
import torch

import funcppo as fp
from funcppo import logs, trainer
from funcppo.core import tree
from funcppo.envs import wrappers
from funcppo.runtime.capture import without_cuda_graphs
from funcppo.trainer import (
    TrainingNote,
    saved_update,
)
from tests.learning import assert_trees_equal, one_thread

pytestmark = pytest.mark.usefixtures(one_thread.__name__)

ENV = wrappers.normalize_reward(
    wrappers.normalize_observation(fp.envs.cartpole(max_steps=20))
)
SIZES = {"n_envs": 4, "n_steps": 8, "n_epochs": 1, "n_minibatches": 2}
LEARNER = fp.ppo(env=ENV, network=fp.nets.mlp(8), **SIZES)
N_UPDATES = 6
TOTAL_STEPS = N_UPDATES * 32


@pytest.fixture(scope="module")
def whole_run():
    """A run without a stop."""
    return fp.train(LEARNER, TOTAL_STEPS, seed=3)


def test_metrics_are_logged_and_a_continued_run_continues_them(tmp_path):
    """The line of an update after the checkpoint is made again."""
    options = {
        "checkpoint": tmp_path / "run.npz",
        "evaluate_every": 2,
        "n_episodes": 1,
    }

    def fail(progress):
        if progress.update == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        log = fp.MetricsLog(tmp_path / "log", "csv")
        fp.train(
            LEARNER,
            128,
            callbacks=[log, fail],
            checkpoint_every=2,
            **options,
        )
    log = fp.MetricsLog(tmp_path / "log", "csv")
    fp.train(LEARNER, 128, callbacks=[log], **options)
    rows = logs.read(tmp_path / "log" / "metrics.jsonl")
    assert [row["update"] for row in rows] == [1, 2, 3, 4]
    assert [row["steps"] for row in rows] == [32, 64, 96, 128]
    assert ["greedy_return" in row for row in rows] == [False, True] * 2
    with open(tmp_path / "log" / "metrics.csv") as file:
        cells = list(csv.DictReader(file))
    assert [float(row["loss"]) for row in cells] == [r["loss"] for r in rows]


def test_a_run_continued_from_its_checkpoint_equals_one_without_a_stop(
    whole_run, tmp_path
):
    path = tmp_path / "run.npz"
    stopped = fp.train(
        LEARNER,
        TOTAL_STEPS,
        seed=3,
        checkpoint=path,
        callbacks=[lambda progress: progress.update == 2],
    )
    assert stopped.is_stopped and stopped.update == 2
    seen = []
    rest = fp.train(
        LEARNER,
        TOTAL_STEPS,
        seed=99,  # the state is that of the checkpoint
        checkpoint=str(path),
        checkpoint_every=2,
        evaluate_every=3,
        n_episodes=2,
        callbacks=[lambda progress: seen.append(progress.update)],
    )
    assert seen == [3, 4, 5, 6]
    assert_trees_equal(rest.state, whole_run.state, rtol=0, atol=0)
    again = fp.train(LEARNER, TOTAL_STEPS, checkpoint=path)
    assert again.update == N_UPDATES
    assert_trees_equal(again.state, whole_run.state, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"learning_rate": 1e-3}, "learning_rate: expected 0.001, got 0.00025"),
        (
            {"env": fp.envs.cartpole()},
            "env.cfg: expected EpisodeConfig.*, got Wrap",
        ),
        (
            {"network": fp.nets.mlp(9)},
            r"agent.cfg: expected hidden=\(9,\), .* got hidden=\(8,\), ",
        ),
        (
            {"network": fp.nets.gru(9)},
            "agent.cfg: expected RecurrentConfig.*, got MLPConfig",
        ),
    ],
)
def test_a_checkpoint_of_other_settings_is_refused(options, problem, tmp_path):
    path = tmp_path / "run.npz"
    fp.train(LEARNER, 32, checkpoint=path, checkpoint_every=1)
    before = path.read_bytes()
    given = {"env": ENV, "network": fp.nets.mlp(8)} | SIZES | options
    with pytest.raises(ValueError, match=f"other settings: {problem}") as error:
        fp.train(fp.ppo(**given), 32, checkpoint=path)
    assert "\n" not in str(error.value) and path.read_bytes() == before


CONSTANT = fp.ppo(
    env=ENV,
    network=fp.nets.mlp(8),
    learning_rate_schedule=fp.Schedule(warmup_updates=3),
    **SIZES,
)


@pytest.mark.parametrize("train", [fp.train, fp.train_many])
def test_without_a_schedule_that_ends_a_finished_run_goes_on(train, tmp_path):
    path = tmp_path / "run.npz"
    assert train(CONSTANT, 64, checkpoint=path).update == 2
    longer = train(CONSTANT, TOTAL_STEPS, checkpoint=path)
    whole = train(CONSTANT, TOTAL_STEPS)
    assert longer.update == N_UPDATES
    assert_trees_equal(longer.state, whole.state, rtol=0, atol=0)

    problem = "total_steps: expected at least 192, of which this is a checkpoint, got 64$"
    with pytest.raises(ValueError, match=f"^{path}: {problem}"):
        train(CONSTANT, 64, checkpoint=path)


@pytest.mark.parametrize("train", [fp.train, fp.train_many])
def test_a_run_whose_schedule_has_ended_does_not_go_on(train, tmp_path):
    path = tmp_path / "run.npz"
    train(LEARNER, 64, checkpoint=path)
    problem = "total_steps: expected 64, where its learning_rate_schedule ends, got 96$"
    with pytest.raises(ValueError, match=f"^{path}: {problem}"):
        train(LEARNER, 90, checkpoint=path)


@pytest.mark.parametrize("train", [fp.train, fp.train_many])
def test_a_checkpoint_that_cannot_be_written_is_named_before_any_update(
    train, tmp_path
):
    """A folder that is a file; and one that takes no files."""
    (tmp_path / "file").touch()
    updates = []
    for folder in (tmp_path / "file", "/proc"):
        problem = f"^checkpoint: {folder}/run.npz: expected a file that can be"
        with pytest.raises(ValueError, match=problem) as error:
            train(
                LEARNER,
                32,
                checkpoint=f"{folder}/run.npz",
                callbacks=[updates.append],
            )
        assert "\n" not in str(error.value)
    assert not updates


def test_evaluation_changes_nothing_and_repeats_itself(whole_run):
    evaluated = fp.train(
        LEARNER, TOTAL_STEPS, seed=3, evaluate_every=4, n_episodes=5
    )
    assert_trees_equal(evaluated.state, whole_run.state, rtol=0, atol=0)
    assert [e.update for e in evaluated.evaluations] == [4, 6]
    again = fp.evaluate_policy(LEARNER, whole_run.state, n_episodes=5, seed=3)
    assert again == evaluated.evaluations[-1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_an_evaluation_on_a_gpu_is_a_graph_and_equals_one_without():
    state = LEARNER.init(fp.random.key(3, "cuda"))
    evaluator = trainer.Evaluator(learner=LEARNER, n_episodes=5)
    first, again = (evaluator.evaluate(state, seed=1) for _ in range(2))
    with without_cuda_graphs("for the test"):
        expected = fp.evaluate_policy(LEARNER, state, n_episodes=5, seed=1)
    modes = {step.replay_mode for step in evaluator._steps.values()}
    assert modes == {"cuda-graph"} and evaluator.notes() == ()
    assert first == again == expected


def test_a_greedy_policy_takes_the_most_probable_action():
    """Pushing right for ever, a pole falls in 8 to 11 steps; a policy that samples keeps it longer."""
    state = LEARNER.init(fp.random.key(0))
    params = tree.map(torch.zeros_like, state.params)
    bias = params.heads.bias + torch.tensor([[[0.0, 0.1]], [[0.0, 0.0]]])
    params = params._replace(heads=params.heads._replace(bias=bias))
    evaluation = fp.evaluate_policy(
        LEARNER, state._replace(params=params), n_episodes=32
    )
    assert 8 <= evaluation.greedy.mean <= 11 < evaluation.sampled.mean


def test_moments_of_training_serve_in_evaluation():
    """With the moments of training a policy sees other observations than with those of one reset."""
    state = LEARNER.init(fp.random.key(0))
    seen = []

    def spy(cfg, world, params, obs):
        seen.append(obs)
        return LEARNER.cfg.agent.apply(cfg, world, params, obs)

    agent = replace(LEARNER.cfg.agent, apply=spy)
    learner = replace(LEARNER, cfg=replace(LEARNER.cfg, agent=agent))
    inner = state.env_state.inner
    shifted = inner.moments._replace(mean=inner.moments.mean + 100.0)
    env_state = state.env_state._replace(inner=inner._replace(moments=shifted))
    state = state._replace(env_state=env_state)
    fp.evaluate_policy(learner, state, n_episodes=6, max_steps=1)
    assert all(bool((obs < -50).all()) for obs in seen)


@pytest.mark.parametrize("moment", ["step", "evaluation", "callback"])
def test_an_interrupt_saves_the_last_state_that_callbacks_have_seen(
    moment, whole_run, monkeypatch, tmp_path
):
    """At update 3 of 6; a run that continues makes that update anew."""
    calls = []

    def interrupt(*args, **options):
        calls.append(1)
        raise KeyboardInterrupt

    def interrupt_late(progress):
        if progress.update == 3:
            interrupt()

    step = fp.Learner.step

    def step_interrupted(learner, state):
        return interrupt() if int(state.update) == 2 else step(learner, state)

    path = tmp_path / "run.npz"
    log = fp.MetricsLog(tmp_path)
    options = {"seed": 3, "checkpoint": path, "n_episodes": 1}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        if moment == "evaluation":
            options["evaluate_every"] = 3
            patch.setattr("funcppo.trainer._estimate_return", interrupt)
        if moment == "step":
            patch.setattr("funcppo.learner.Learner.step", step_interrupted)
        callbacks = [log, interrupt_late] if moment == "callback" else [log]
        fp.train(LEARNER, TOTAL_STEPS, callbacks=callbacks, **options)
    assert len(calls) == 1 and saved_update(path) == 2
    log = fp.MetricsLog(tmp_path)
    rest = fp.train(LEARNER, TOTAL_STEPS, callbacks=[log], **options)
    assert_trees_equal(rest.state, whole_run.state, rtol=0, atol=0)
    rows = logs.read(tmp_path / "metrics.jsonl")
    assert [row["update"] for row in rows] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("damage", ["torn", "missing"])
def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one_and_says_so(
    damage, whole_run, tmp_path
):
    path = tmp_path / "run.npz"
    arguments = {"seed": 3, "checkpoint": path, "checkpoint_every": 1}
    fp.train(
        LEARNER,
        TOTAL_STEPS,
        callbacks=[lambda progress: progress.update == 3],
        **arguments,
    )
    if damage == "torn":
        path.write_bytes(path.read_bytes()[:100])
    else:
        path.unlink()
    with pytest.warns(UserWarning, match="previous-run.npz is used in its"):
        rest = fp.train(LEARNER, TOTAL_STEPS, **arguments)
    assert len(rest.notes) == 1
    assert_trees_equal(rest.state, whole_run.state, rtol=0, atol=0)
    assert fp.train(LEARNER, TOTAL_STEPS, **arguments).notes == ()


def test_what_is_not_learnt_from_is_noted():
    env = fp.envs.recall(n_steps=4)

    def step(cfg, world, state, action, key):
        state, timestep = env.step_functional(cfg, world, state, action, key)
        reward = torch.full_like(timestep.reward, torch.nan)
        return state, timestep._replace(reward=reward)

    learner = fp.ppo(env=env, network=fp.nets.mlp(4), n_envs=2, n_steps=8)
    assert fp.train(learner, 16).notes == ()
    cfg = replace(learner.cfg, env=replace(env, step_functional=step))
    with pytest.warns(TrainingNote, match="minibatches were skipped"):
        result = fp.train(replace(learner, cfg=cfg), 16)
    assert result.notes == (
        "16 minibatches were skipped and 0 applied: a loss or a gradient was not finite",
    )
    with pytest.warns(TrainingNote, match="32 minibatches were skipped"):
        fp.train_many(replace(learner, cfg=cfg), 16, seeds=2)


BOTH, ALONE = [fp.train, fp.train_many], [fp.train]


@pytest.mark.parametrize(
    ("trains", "error", "options", "line"),
    [
        (BOTH, TypeError, {"log": 3}, "log: expected a folder or an fp.Metr"),
        (BOTH, TypeError, {"log": ["a"]}, r"log: expected .*, got \['a'\]"),
        (BOTH, TypeError, {"logs": "a"}, "logs: expected an option of .* log"),
        (BOTH, ValueError, {"device": "gpu"}, "device: expected"),
        (BOTH, ValueError, {"device": "meta"}, "device: expected"),
        (BOTH, ValueError, {"device": "cuda:99"}, "device: expected"),
        (BOTH, ValueError, {"device": 1.5}, "device: expected"),
        (ALONE, ValueError, {"total_steps": 0}, "total_steps: expected an int"),
        (ALONE, ValueError, {"evaluate_every": 0}, "evaluate_every: expected"),
        (ALONE, ValueError, {"n_episodes": 1.5}, "n_episodes: expected an int"),
        (ALONE, ValueError, {"checkpoint_every": -1}, "checkpoint_every: exp"),
        (ALONE, TypeError, {"learner": "CartPole"}, "learner: .*, got str"),
        (ALONE, TypeError, {"callbacks": print}, "callbacks: .*got .* alone"),
        (
            ALONE,
            TypeError,
            {"callbacks": [3]},
            "callbacks: .* functions, got 3",
        ),
    ],
)
def test_what_cannot_be_meant_is_named_in_one_line(
    trains, error, options, line
):
    for train in trains:
        with pytest.raises(error, match=f"^{line}") as raised:
            train(**({"learner": LEARNER, "total_steps": 32} | options))
        assert "\n" not in str(raised.value)
