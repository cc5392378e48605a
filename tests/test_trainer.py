"""The loop above the training step, of one seed and of several: evaluation, checkpoints, callbacks."""

import csv
from dataclasses import is_dataclass, replace
from functools import partial
from typing import NamedTuple

import pytest
import torch

import funcppo as fp
from examples import variants
from funcppo import logs, trainer
from funcppo.config import PPOConfig
from funcppo.core import tree
from funcppo.core.settings import field_types
from funcppo.envs import wrappers
from funcppo.runtime.capture import without_cuda_graphs
from funcppo.trainer import TrainingNote, saved_update
from tests.learning import assert_trees_equal, on_gpu, refused

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


def test_a_run_continued_equals_one_without_a_stop(whole_run, tmp_path):
    train = partial(fp.train, LEARNER, TOTAL_STEPS, seed=3)
    path, seen = tmp_path / "run.npz", []
    stop, see = lambda at: at.update == 2, lambda at: seen.append(at.update)
    stopped = train(checkpoint=path, callbacks=[stop])
    assert stopped.is_stopped and stopped.update == 2
    options = {"checkpoint_every": 2, "evaluate_every": 3, "n_episodes": 2}
    rest = train(checkpoint=str(path), callbacks=[see], **options)
    assert seen == [3, 4, 5, 6]
    assert_trees_equal(rest.state, whole_run.state, rtol=0, atol=0)
    with pytest.warns(TrainingNote, match="nothing was trained"):
        again = train(checkpoint=path)
    assert again.update == N_UPDATES and len(again.notes) == 1
    assert_trees_equal(again.state, whole_run.state, rtol=0, atol=0)


@pytest.mark.parametrize("train", [fp.train, fp.train_many])
def test_without_a_schedule_that_ends_a_finished_run_goes_on(train, tmp_path):
    path, schedule = tmp_path / "run.npz", fp.Schedule(warmup_updates=3)
    learner = with_bonus(0.0, env=ENV, learning_rate_schedule=schedule)
    assert train(learner, 64, checkpoint=path).update == 2
    longer = train(learner, TOTAL_STEPS, checkpoint=path)
    whole = train(learner, TOTAL_STEPS)
    assert longer.update == N_UPDATES
    assert_trees_equal(longer.state, whole.state, rtol=0, atol=0)

    problem = "total_steps: expected at least 192, of which this is a checkpoint, got 64$"
    refused(f"{path}: {problem}", train, learner, 64, checkpoint=path)


@pytest.mark.parametrize("train", [fp.train, fp.train_many])
def test_a_run_whose_schedule_has_ended_does_not_go_on(train, tmp_path):
    path = tmp_path / "run.npz"
    train(LEARNER, 64, checkpoint=path)
    problem = "total_steps: expected 64, where its learning_rate_schedule ends, got 96$"
    refused(f"{path}: {problem}", train, LEARNER, 90, checkpoint=path)


@pytest.mark.parametrize("train", [fp.train, fp.train_many])
def test_a_checkpoint_that_cannot_be_written_is_named(train, tmp_path):
    """A folder that is a file; and one that takes no files."""
    (tmp_path / "file").touch()
    updates = []
    for folder in (tmp_path / "file", "/proc"):
        path = f"{folder}/run.npz"
        options = {"checkpoint": path, "callbacks": [updates.append]}
        problem = f"checkpoint: {path}: expected a file that can be"
        refused(problem, train, LEARNER, 32, **options)
    assert not updates


def test_evaluation_changes_nothing_and_repeats_itself(whole_run):
    evaluated = fp.train(
        LEARNER, TOTAL_STEPS, seed=3, evaluate_every=4, n_episodes=5
    )
    assert_trees_equal(evaluated.state, whole_run.state, rtol=0, atol=0)
    assert [e.update for e in evaluated.evaluations] == [4, 6]
    again = fp.evaluate_policy(LEARNER, whole_run.state, n_episodes=5, seed=3)
    assert again == evaluated.evaluations[-1]


@on_gpu
def test_the_world_of_a_learner_goes_where_it_trains():
    learner = variants.make("reference", n_envs=4, n_steps=8)
    result = fp.train(learner, 32, device="cuda")
    assert all(x.is_cuda for x in tree.leaves(result.state.params))


@on_gpu
def test_an_evaluation_on_a_gpu_is_a_graph_and_equals_one_without():
    state = LEARNER.init(fp.random.key(3, "cuda"))
    evaluator = trainer.Evaluator(learner=LEARNER, n_episodes=5)
    first, again = (evaluator.evaluate(state, 1) for _ in range(2))
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
    # a reward of 1 a step, until each episode ends
    for policy in (evaluation.greedy, evaluation.sampled):
        assert policy.mean_length == policy.mean


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
    log = fp.MetricsLog(tmp_path, "csv")
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
    log = fp.MetricsLog(tmp_path, "csv")
    rest = fp.train(LEARNER, TOTAL_STEPS, callbacks=[log], **options)
    assert_trees_equal(rest.state, whole_run.state, rtol=0, atol=0)
    rows = logs.read(tmp_path / "metrics.jsonl")
    assert [row["update"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["steps"] for row in rows] == [32 * i for i in range(1, 7)]
    evaluated = [row["update"] for row in rows if "greedy_return" in row]
    assert evaluated == ([3, 6] if moment == "evaluation" else [])
    with open(tmp_path / "metrics.csv") as file:
        cells = list(csv.DictReader(file))
    assert [float(row["loss"]) for row in cells] == [r["loss"] for r in rows]


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
        "16 minibatches were skipped and 0 applied: 16 rewards were not finite",
    )
    with pytest.warns(TrainingNote, match="32 minibatches were skipped"):
        fp.train_many(replace(learner, cfg=cfg), 16, seeds=2)


class Walk(NamedTuple):
    """A row, and how it errs."""

    steps: torch.Tensor
    error: torch.Tensor  # 0 for a right step


def erring(kind: str, value=float("inf")):
    """Six steps, one in twenty of which errs; the right action is the first of two."""

    def reset(cfg, world, key):
        zero = torch.zeros_like(key[:, 0])
        return Walk(zero, zero > 0)

    def step(cfg, world, state, action, key):
        active = state.steps < 6
        error = active & (fp.random.uniform(key, ()) < 1 / 20)
        steps = state.steps + active
        reward = torch.where(active & (action == 0), 1.0, 0.0)
        if kind == "rewards":
            reward = torch.where(error, value, reward)
        error = torch.where(active, error, state.error)
        never = torch.zeros_like(active)
        return Walk(steps, error), fp.Timestep(reward, steps >= 6, never)

    def observe(cfg, world, state):
        x = state.steps[:, None].float()
        if kind == "observations":
            return torch.where(state.error[:, None], value, x)
        if kind == "masks":
            mask = torch.ones_like(x, dtype=torch.bool).expand(-1, 2)
            return fp.MaskedObservation(x, mask & ~state.error[:, None])
        return x

    spec = fp.EnvironmentSpec(observation_size=1, action_size=2)
    return fp.Environment(
        cfg=None, reset=reset, step_functional=step, observe=observe, spec=spec
    )


@pytest.mark.parametrize(
    ("value", "network"),
    [(float("inf"), fp.nets.mlp(8)), (float("nan"), fp.nets.gru(8))],
)
@pytest.mark.parametrize("kind", ["observations", "rewards", "masks"])
def test_a_bad_row_costs_no_minibatch_and_is_named(kind, value, network):
    """Bounded activations hide an infinite observation from the loss, and not from its gradient."""
    is_mask = kind == "masks"
    cause = "no legal action" if is_mask else f"{kind} were not finite"
    learner = fp.ppo(env=erring(kind, value), network=network, n_envs=16)
    with pytest.warns(TrainingNote, match=cause):
        result = fp.train(learner, 2 * 16 * 128)
    (note,) = result.notes
    assert "of the rows were left out" in note
    after = ""
    if kind == "observations" and learner.cfg.agent.initial_memory is not None:
        after = " and after"
    assert (f"the steps before{after} them" in note) != is_mask
    assert all(x.isfinite().all() for x in tree.leaves(result.state.params))


def test_running_moments_leave_a_bad_number_out():
    env = wrappers.normalize_observation(erring("observations"))
    rewards = wrappers.normalize_reward(erring("rewards", float("nan")))
    for wrapped in (env, rewards):
        learner = fp.ppo(env=wrapped, network=fp.nets.mlp(8), n_envs=8)
        with pytest.warns(TrainingNote, match="not finite"):
            result = fp.train(learner, 2 * 8 * 128)
        moments = result.state.env_state.moments
        assert all(x.isfinite().all() for x in moments)
        assert (moments.n > 1500).all() and (moments.variance > 0.1).all()


BOTH, ALONE, MANY = [fp.train, fp.train_many], [fp.train], [fp.train_many]


def with_bonus(bonus: float, **changes):
    """The environment with a reward that no setting states."""

    def step(cfg, world, state, action, key):
        state, timestep = ENV.step_functional(cfg, world, state, action, key)
        return state, timestep._replace(reward=timestep.reward + bonus)

    env = replace(ENV, step_functional=step)
    return fp.ppo(**{"env": env, "network": fp.nets.mlp(8)} | SIZES | changes)


def begin(train, path, learner=LEARNER, **options):
    stop = lambda progress: progress.update == 1
    if train is fp.train_many:
        options = {"seeds": [options.pop("seed", 0)]} | options
    return train(learner, 64, checkpoint=path, callbacks=[stop], **options)


@pytest.mark.parametrize(
    ("trains", "change", "problem"),
    [
        (BOTH, {"seed": 1}, "seed: exp"),
        (BOTH, {"learner": with_bonus(0.5)}, "env.step_functional: exp"),
        (BOTH, {"learner": replace(with_bonus(1.0), world=(torch.ones(2),))}, "world: exp"),
        (BOTH, {"learner": with_bonus(1.0, learning_rate=1e-3)}, "learning_rate: expected 0.001, got 0.00025"),
        (BOTH, {"learner": with_bonus(1.0, network=fp.nets.mlp(9))}, r"agent.cfg: expected hidden=\(9,\), .* got hid"),
        (BOTH, {"learner": with_bonus(1.0, network=fp.nets.gru(9))}, "agent.cfg: expected RecurrentConfig.*, got MLP"),
        (BOTH, {"learner": with_bonus(1.0, env=fp.envs.cartpole())}, "env.cfg: expected EpisodeConfig.*, got Wrap"),
        (ALONE, {"params": LEARNER.init(fp.random.key(5)).params}, "params: exp"),
        (MANY, {"scalars": {"gamma": [0.5]}}, "scalars: exp"),
    ],
)  # fmt: skip
def test_a_checkpoint_is_of_all_its_settings(trains, change, problem, tmp_path):
    for train in trains:
        path = tmp_path / f"{train.__name__}.npz"
        begin(train, path, with_bonus(1.0))
        before = path.read_bytes()
        options = {"learner": with_bonus(1.0)} | change
        refused(f".*npz: made .*: {problem}", begin, train, path, **options)
        assert path.read_bytes() == before
        with pytest.warns(TrainingNote, match="nothing was trained"):
            begin(train, path, with_bonus(1.0))
            begin(train, path, with_bonus(1.0))


@pytest.mark.parametrize("train", BOTH)
@pytest.mark.parametrize(
    "name",
    ["metrics.jsonl", "metrics.csv", "tensorboard/events.out.tfevents.1"],
)
def test_the_log_of_another_stays_as_it_is(name, train, tmp_path):
    pytest.importorskip("tensorboard")
    other = tmp_path / name
    other.parent.mkdir(exist_ok=True)
    other.write_text('{"loss": 1}\n')
    log = fp.MetricsLog(tmp_path, "csv", "tensorboard")
    problem = f".*{name}: expected no log of another"
    refused(problem, train, LEARNER, 32, log=log)
    assert other.read_text() == '{"loss": 1}\n'
    assert [x for x in tmp_path.rglob("*") if x.is_file()] == [other]


def test_a_second_run_does_not_replace_the_log_of_the_first(tmp_path):
    pytest.importorskip("tensorboard")
    neighbour = tmp_path / "tensorboard" / "of_another_tool" / "notes.txt"
    neighbour.parent.mkdir(parents=True)
    neighbour.write_text("x")
    log = fp.MetricsLog(tmp_path, "csv", "tensorboard")
    fp.train(LEARNER, 64, log=log)
    held = {x: x.read_bytes() for x in tmp_path.rglob("*") if x.is_file()}
    assert len(held) == 4 and neighbour in held
    for checkpoint in (None, tmp_path / "run.npz"):
        options = {"seed": 1, "checkpoint": checkpoint, "log": log}
        problem = ".*expected no log of another run"
        refused(problem, fp.train, LEARNER, 32, **options)
    assert held == {x: x.read_bytes() for x in held}


def test_a_run_ended_before_its_first_checkpoint_begins_anew(tmp_path):
    def fail(progress):
        raise OSError("no power")

    options = {"checkpoint": tmp_path / "run.npz", "log": tmp_path / "log"}
    with pytest.raises(OSError, match="no power"):
        fp.train(LEARNER, 64, callbacks=[fail], **options)
    fp.train(LEARNER, 64, **options)
    rows = logs.read(tmp_path / "log" / "metrics.jsonl")
    assert [row["update"] for row in rows] == [1, 2]


@pytest.mark.parametrize(
    ("trains", "error", "options", "line"),
    [
        (BOTH, TypeError, {"log": 3}, "log: expected a folder, an fp.Metr"),
        (BOTH, TypeError, {"log": [["a"]]}, r"log: expected .*, got \['a'\]"),
        (BOTH, TypeError, {"logs": "a"}, "logs: expected an option of .* log"),
        (BOTH, ValueError, {"device": "gpu"}, "device: expected"),
        (BOTH, ValueError, {"device": "meta"}, "device: expected"),
        (BOTH, ValueError, {"device": "cuda:99"}, "device: expected"),
        (BOTH, ValueError, {"device": 1.5}, "device: expected"),
        (BOTH, ValueError, {"total_steps": 0}, "total_steps: expected 1 or"),
        (ALONE, ValueError, {"evaluate_every": 0}, "evaluate_every: expected"),
        (ALONE, ValueError, {"n_episodes": 1.5}, "n_episodes: expected an int"),
        (ALONE, ValueError, {"checkpoint_every": -1}, "checkpoint_every: exp"),
        (ALONE, TypeError, {"learner": "CartPole"}, "learner: .*, got str"),
        (ALONE, TypeError, {"callbacks": print}, "callbacks: expected a list"),
        (ALONE, TypeError, {"callbacks": [3]}, r"callbacks: .*, got \[3\]"),
        (MANY, ValueError, {"seeds": 0}, "seeds: expected 1 or more, got 0"),
        (MANY, ValueError, {"strategy": "fast"}, "strategy: expected auto, one-g"),
        (MANY, ValueError, {"strategy": "forward"}, "strategy: expected .* several seeds"),
        (MANY, TypeError, {"scalars": [1, 2]}, "scalars: expected numbers by"),
        *((MANY, ValueError, {"scalars": {name: values}}, line) for name, values, line in [
            ("rate", [1, 2], "scalars: expected one of"),
            ("gamma", [1], "scalars: gamma: expected 2"),
            ("gamma", 0.9, "scalars: gamma: expected 2"),
            ("gamma", [0.9, 1.5], "gamma: expected 0 to"),
            ("adam.b1", [0.5, 1.5], "b1: expected 0 to below 1"),
            ("target_kl", [None, 0.1], "scalars: target_kl: expected 2"),
            ("learning_rate", [1e-3, float("nan")], "learning_rate: expected 0 or more, got nan"),
        ]),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_said_in_one_line(trains, error, options, line):
    for train in trains:
        seeds = {"seeds": 2} if train is fp.train_many else {}
        given = {"learner": LEARNER, "total_steps": 32} | seeds | options
        refused(line, train, error=error, **given)


SEEDS = (5, 2)
N_OF_MANY = 3 * 32
OF_MANY = {"seeds": SEEDS, "evaluate_every": 2, "n_episodes": 4}


@pytest.fixture(scope="module")
def whole_runs():
    """A run without a stop."""
    return fp.train_many(LEARNER, N_OF_MANY, **OF_MANY)


@pytest.mark.parametrize("i", range(len(SEEDS)))
def test_each_seed_is_its_single_run(i, whole_runs):
    """States and evaluations; float32, sums in another order."""
    options = OF_MANY | {"seed": SEEDS[i]}
    del options["seeds"]
    alone = fp.train(LEARNER, N_OF_MANY, **options)
    state = tree.item(whole_runs.state, i)
    assert_trees_equal(state, alone.state, rtol=1e-4, atol=1e-5)
    for got, expected in zip(whole_runs.evaluations, alone.evaluations):
        assert got[i].update == expected.update
        assert got[i].greedy.mean == pytest.approx(expected.greedy.mean)
        assert got[i].sampled.mean == pytest.approx(expected.sampled.mean)


def test_a_run_of_seeds_continued_equals_one_whole(whole_runs, tmp_path):
    arguments = {"checkpoint": tmp_path / "run.npz", **OF_MANY}
    stop = lambda progress: progress.update == 1
    stopped = fp.train_many(LEARNER, N_OF_MANY, callbacks=[stop], **arguments)
    assert stopped.is_stopped and stopped.update == 1
    rest = fp.train_many(LEARNER, N_OF_MANY, **arguments)
    assert_trees_equal(rest.state, whole_runs.state, rtol=0, atol=0)
    assert rest.evaluations == whole_runs.evaluations


def test_a_checkpoint_is_written_at_its_time(whole_runs, monkeypatch, tmp_path):
    """The one before stays beside it, and serves where the latest is damaged."""
    monkeypatch.setattr(trainer, "CHECKPOINT_SECONDS", 0.0)
    path = tmp_path / "run.npz"

    def fail(progress):
        if progress.update == 2:
            raise KeyError(progress.update)

    arguments = {"checkpoint": path, **OF_MANY}
    with pytest.raises(KeyError):
        fp.train_many(LEARNER, N_OF_MANY, callbacks=[fail], **arguments)
    assert saved_update(path) == 2
    path.write_bytes(b"torn")
    assert saved_update(path) == 1
    with pytest.warns(UserWarning, match=r"previous-run\.npz is used"):
        rest = fp.train_many(LEARNER, N_OF_MANY, **arguments)
    assert len(rest.notes) == 1
    assert_trees_equal(rest.state, whole_runs.state, rtol=0, atol=0)


def test_metrics_are_logged_by_seed_and_elsewhere_as_means(tmp_path):
    log = fp.MetricsLog(tmp_path, "csv")
    fp.train_many(LEARNER, 64, callbacks=[log], **OF_MANY)
    rows = logs.read(tmp_path / "metrics.jsonl")
    places = [(row["update"], row["seed"]) for row in rows]
    assert places == [(1, 5), (1, 2), (2, 5), (2, 2)]
    assert "greedy_return" in rows[2] and "greedy_return" not in rows[0]
    lines = (tmp_path / "metrics.csv").read_text().splitlines()
    assert len(lines) == 3
    place = lines[0].split(",").index("loss")
    mean = (rows[0]["loss"] + rows[1]["loss"]) / 2
    assert float(lines[1].split(",")[place]) == pytest.approx(mean)


def settings_of(config, prefix=""):
    """{path of each setting: whether it is a number that is no integer}."""
    found = {}
    for name, kind in field_types(config).items():
        if is_dataclass(kind):
            found |= settings_of(kind, f"{name}.")
        else:
            found[prefix + name] = "[float, " in str(kind)
    return found


@pytest.mark.parametrize(("path", "varies"), settings_of(PPOConfig).items())
def test_each_seed_learns_with_its_own_numbers(path, varies):
    """As in a run of its own, but for rounding; all other settings are refused."""
    settings = {"learning_rate": 0.03, "target_kl": 0.1, "value_clip_eps": 0.2}
    settings |= {"kl_stop": "minibatch", "n_epochs": 2, "clip_eps": 0.01}
    linear = dict.fromkeys(
        ["clip_eps_schedule", "entropy_coef_schedule"],
        fp.Schedule(kind="linear"),
    )
    settings = SIZES | settings | linear
    learner = fp.ppo(env=ENV, network=fp.nets.mlp(8), **settings)
    numbers = [0.001, 0.1]
    train = partial(fp.train_many, learner, 96, seeds=(0, 0))
    if not varies:
        line = f"scalars: expected one of learning_rate, .*, got {path}, which all seeds share$"
        refused(line, train, scalars={path: numbers})
        return
    params = train(scalars={path: torch.tensor(numbers)}).state.params
    for i, number in enumerate(numbers):
        cfg = replace(learner.cfg, ppo=learner.cfg.ppo.with_value(path, number))
        alone = fp.train(replace(learner, cfg=cfg), 96).state.params
        assert_trees_equal(tree.item(params, i), alone, rtol=1e-3, atol=1e-5)
    change = tree.map(lambda x: x[0] - x[1], params)
    assert tree.global_norm(change) > 0


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
        ({"observe": lambda cfg, world, state: torch.tensor(state.motion.tolist())}, fp.nets.mlp(4), "observe"),
        ({}, LSTM_CELL, "apply of the network"),
    ],
)  # fmt: skip
def test_what_vmap_cannot_map_is_named_at_once(changes, network, name):
    env = replace(CARTPOLE, step_with_autoreset=None, **changes)
    sizes = {"n_envs": 2, "n_steps": 8, "n_minibatches": 2}
    learner = fp.ppo(env=env, network=network, **sizes)
    line = f"{name}: expected a function that torch.vmap can map, got Runt"
    refused(line, fp.train_many, learner, 32, seeds=2)
    fp.train(learner, 32)
