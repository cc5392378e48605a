from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

import funcppo as fp
from funcppo import rollout
from funcppo.core import random, tree
from funcppo.core.tree import scan
from funcppo.envs.classic_control import cartpole, pendulum
from funcppo.nets import feedforward
from funcppo.rollout import rollout_keys, rollout_step, sample_random_inputs
from funcppo.train_step import init
from tests.learning import WORLD, cartpole_config, one_thread, pendulum_config

pytestmark = pytest.mark.usefixtures(one_thread.__name__)

CONFIGS = {
    "cartpole": cartpole_config(max_steps=9),
    "pendulum": pendulum_config(max_steps=9),
}


def trajectory(cfg, n_envs=6, n_steps=30, seed=0):
    key, params_key, reset_key = random.split(random.key(seed), 3)
    params = cfg.agent.init(cfg.agent.cfg, params_key)
    first = rollout.init_rollout_state(cfg, WORLD, reset_key, n_envs)
    keys = rollout_keys(key, n_steps, n_envs)
    random_inputs = sample_random_inputs(cfg.env, WORLD, keys)
    return (
        params,
        first,
        keys,
        *scan(partial(rollout_step, cfg, WORLD, params), first, random_inputs),
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_a_trajectory_equals_a_loop_over_single_rows(name):
    """The same keys, one environment at a time, restarted by an if."""
    cfg = CONFIGS[name]
    env, agent = cfg.env, cfg.agent
    params, actor, (_, step_keys, reset_keys), _, traj = trajectory(cfg)
    final_value = rollout.estimate_final_value(cfg, WORLD, params, traj)
    for b in range(6):
        state = tree.map(lambda x, b=b: x[b : b + 1], actor.env_state)
        total = 0.0
        for t in range(30):
            step_key, reset_key = step_keys[t, b], reset_keys[t, b]
            obs = env.observe(env.cfg, WORLD, state)
            torch.testing.assert_close(
                traj.obs[t, b], obs[0], rtol=1e-6, atol=1e-6
            )
            out = agent.apply(agent.cfg, WORLD, params, obs)
            action = traj.action[t, b : b + 1]
            torch.testing.assert_close(
                traj.log_prob[t, b], agent.distribution.log_prob(out, action)[0]
            )
            torch.testing.assert_close(traj.value[t, b], out.value[0])
            state, step = env.step_functional(
                env.cfg, WORLD, state, action, step_key[None]
            )
            total += float(step.reward)
            torch.testing.assert_close(
                traj.reward[t, b], step.reward[0], rtol=1e-6, atol=1e-5
            )
            assert float(
                traj.episode_stats.total_reward[t, b]
            ) == pytest.approx(total, rel=1e-5, abs=1e-5)
            last = env.observe(env.cfg, WORLD, state)
            want = (
                agent.apply(agent.cfg, WORLD, params, last).value[0]
                if step.truncated
                else torch.tensor(0.0)
            )
            torch.testing.assert_close(
                final_value[t, b], want, rtol=1e-5, atol=1e-5
            )
            if step.terminated or step.truncated:
                state, total = env.reset(env.cfg, WORLD, reset_key[None]), 0.0


def test_actions_are_drawn_from_the_policy_with_the_action_key():
    cfg = CONFIGS["cartpole"]
    params, _, (action_keys, *_), _, traj = trajectory(cfg)
    for t in (0, 7):
        out = cfg.agent.apply(cfg.agent.cfg, WORLD, params, traj.obs[t])
        assert torch.equal(
            traj.action[t], cfg.agent.distribution.sample(action_keys[t], out)
        )


def test_no_key_of_a_rollout_is_used_twice():
    keys = rollout_keys(random.key(0), 7, 5)
    every = torch.cat([leaf.reshape(-1, 2) for leaf in keys])
    assert len(every) == 7 + 7 * 5 * 2 == len(every.unique(dim=0))


@pytest.mark.parametrize("name", CONFIGS)
def test_episode_lengths_count_up_to_every_end_and_start_again(name):
    _, _, _, last, traj = trajectory(CONFIGS[name])
    length = torch.zeros(6, dtype=torch.int64)
    for t in range(30):
        length = length + 1
        assert torch.equal(traj.episode_stats.length[t], length)
        length = torch.where(traj.terminated[t] | traj.truncated[t], 0, length)
    assert torch.equal(last.episode_stats.length, length)
    assert traj.truncated.any()


def test_the_network_is_called_once_a_step_and_last_observations_kept_only_where_they_count():
    for truncates, bootstrap, kept in (
        (True, True, True),
        (True, False, False),
        (False, True, False),
    ):
        cfg, seen = cartpole_config(bootstrap_truncated=bootstrap), []
        apply = cfg.agent.apply
        counted = lambda *args, seen=seen, apply=apply: (
            seen.append(1) or apply(*args)
        )
        agent, env = (
            replace(cfg.agent, apply=counted),
            replace(cfg.env, truncates=truncates),
        )
        traj = trajectory(replace(cfg, agent=agent, env=env), n_steps=3)[-1]
        assert len(seen) == 3
        assert isinstance(traj.final_obs, torch.Tensor) == kept


def changed(field, change):
    """CartPole with a field of its timestep, its next state or its network's output changed."""
    cfg = cartpole_config()
    env, agent = cfg.env, cfg.agent

    def with_change(record):
        if field not in record._fields:
            return record
        return record._replace(**{field: change(getattr(record, field))})

    def step(*args):
        state, timestep = env.step_functional(*args)
        return with_change(state), with_change(timestep)

    def apply(*args):
        return with_change(agent.apply(*args))

    return replace(
        cfg,
        env=replace(env, step_functional=step),
        agent=replace(agent, apply=apply),
    )


@pytest.mark.parametrize(
    ("field", "change", "text"),
    [
        (
            "reward",
            torch.Tensor.double,
            r"step_functional: Timestep.reward: expected torch.float32 \[6\], got torch.float64 \[6\]",
        ),
        (
            "reward",
            lambda x: x[:, None],
            r"step_functional: Timestep.reward: expected torch.float32 \[6\], got torch.float32 \[6, 1\]",
        ),
        (
            "terminated",
            torch.Tensor.float,
            r"step_functional: Timestep.terminated: expected torch.bool \[6\], got torch.float32 \[6\]",
        ),
        (
            "truncated",
            lambda x: x[:1],
            r"step_functional: Timestep.truncated: expected torch.bool \[6\], got torch.bool \[1\]",
        ),
        (
            "value",
            lambda x: x[:, None],
            r"value of the network: expected torch.float32 \[6\], got torch.float32 \[6, 1\]",
        ),
        (
            "steps",
            torch.Tensor.float,
            r"step_functional: state.steps: expected torch.int64 \[6\], got torch.float32 \[6\]",
        ),
    ],
)
def test_a_tensor_that_promotion_or_broadcasting_would_hide_is_refused_in_one_line(
    field, change, text
):
    with pytest.raises(TypeError, match=f"^{text}$"):
        trajectory(changed(field, change), n_steps=1)


OTHER_DTYPES = [
    ("value", torch.float64),
    ("value", torch.bfloat16),
    ("logits", torch.float64),
    ("logits", torch.bfloat16),
]


def of_dtype(field, dtype):
    """CartPole, and an agent of whose output a field is of another dtype."""
    cfg = changed(field, lambda x: x.to(dtype))
    return {"env": cfg.env, "network": cfg.agent}


@pytest.mark.parametrize(("field", "dtype"), OTHER_DTYPES)
def test_an_output_of_another_dtype_is_refused_before_the_first_step(
    field, dtype
):
    parts = of_dtype(field, dtype)
    line = rf"{field} of the network: expected torch.float32 \[4.*, got {dtype}"
    with pytest.raises(TypeError, match=f"^{line}") as error:
        fp.ppo(**parts).init(random.key(0))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("field", "dtype"), OTHER_DTYPES)
@pytest.mark.parametrize("use", ["step", "compile", "train_many"])
def test_without_a_spec_such_an_output_is_refused_before_anything_is_compiled(
    field, dtype, use, monkeypatch
):
    def compile_nothing(*args, **options):
        raise AssertionError("compiled")

    monkeypatch.setattr(torch, "compile", compile_nothing)
    parts = of_dtype(field, dtype)
    parts["env"] = replace(parts["env"], spec=None)
    learner = fp.ppo(**parts, n_envs=2, n_steps=4)
    state = learner.init(random.key(0))
    uses = {
        "step": lambda: learner.step(state),
        "compile": lambda: fp.compile(learner, state),
        "train_many": lambda: fp.train_many(learner, 8, seeds=2),
    }
    with pytest.raises(TypeError, match=f"^{field} of the network: expected"):
        uses[use]()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_an_output_may_be_of_the_dtype_of_the_params(dtype):
    env = fp.envs.cartpole()
    agent = fp.nets.mlp(4)(env.spec)

    def init_params(cfg, key):
        return tree.map(lambda x: x.to(dtype), agent.init(cfg, key))

    def apply(cfg, world, params, obs):
        return agent.apply(cfg, world, params, obs.to(dtype))

    of_params = replace(agent, init=init_params, apply=apply)
    learner = fp.ppo(env=env, network=of_params, n_envs=2, n_steps=4)
    state, _ = learner.step(learner.init(random.key(0)))
    assert int(state.update) == 1


@pytest.mark.parametrize(
    ("env", "network", "problem"),
    [
        (cartpole, {"n_obs": 4, "n_actions": 3}, "logits .*: expected rows of"),
        (cartpole, {"n_obs": 5, "n_actions": 2}, "network: expected one that"),
        (pendulum, {"n_obs": 3, "n_actions": 2}, "action .*: expected rows of"),
    ],
)
def test_a_network_of_other_spaces_is_refused_before_anything_is_compiled(
    env, network, problem
):
    make = feedforward.agent if env is cartpole else feedforward.gaussian_agent
    cfg = replace(
        CONFIGS[env.__name__.rpartition(".")[2]],
        agent=make(feedforward.MLPConfig(**network)),
    )
    with pytest.raises(ValueError, match=f"^{problem}") as error:
        init(cfg, WORLD, random.key(0))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("output", "problem"),
    [
        (lambda logits, value: (logits, value), "output .* got tuple: "),
        (lambda logits, value: logits, "output .* got Tensor: "),
        (
            lambda logits, value: fp.GaussianPolicyValue(logits, logits, value),
            "output .* got GaussianPolicyValue: .* no attribute 'logits'",
        ),
    ],
)
def test_an_output_that_the_distribution_cannot_read_is_named(output, problem):
    def apply(cfg, world, params, obs):
        return output(obs[:, :2] * params, obs[:, 0])

    agent = fp.Agent(cfg=None, init=lambda cfg, key: torch.ones(2), apply=apply)
    cfg = replace(CONFIGS["cartpole"], agent=agent)
    with pytest.raises(TypeError, match=f"^{problem}") as error:
        init(cfg, WORLD, random.key(0))
    assert "\n" not in str(error.value)


def test_actions_of_another_kind_than_the_environment_takes_are_refused():
    def apply(cfg, world, params, obs):
        mean = obs[:, :2] * params
        return fp.GaussianPolicyValue(mean, mean, obs[:, 0])

    agent = fp.Agent(
        cfg=None,
        init=lambda cfg, key: torch.ones(2),
        apply=apply,
        distribution=fp.DIAGONAL_GAUSSIAN,
    )
    cfg = replace(CONFIGS["cartpole"], agent=agent)
    with pytest.raises(ValueError, match=r"^action .*: expected discrete"):
        init(cfg, WORLD, random.key(0))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda state, timestep: None, "expected a state and a Timestep"),
        (lambda state, timestep: (state, timestep, {}), "expected a state and"),
        (
            lambda state, timestep: (tuple(state), timestep),
            "state: expected a EnvState of 2 tensors, got a tuple of 2",
        ),
        (
            lambda state, timestep: (state._replace(steps=1.0), timestep),
            "state.steps: expected torch.int64 .*, got float",
        ),
        (
            lambda state, timestep: (state, timestep._replace(truncated=False)),
            "Timestep.truncated: expected torch.bool .*, got bool",
        ),
    ],
)
def test_what_a_step_returns_in_place_of_tensors_is_named(change, problem):
    env = CONFIGS["cartpole"].env

    def step(*arguments):
        return change(*env.step_functional(*arguments))

    cfg = replace(CONFIGS["cartpole"], env=replace(env, step_functional=step))
    with pytest.raises(TypeError, match=f"^step_functional: {problem}"):
        trajectory(cfg, n_steps=1)


def test_observations_other_than_the_environment_states_are_refused():
    cfg = CONFIGS["cartpole"]
    spec = replace(cfg.env.spec, observation_size=5)
    cfg = replace(cfg, env=replace(cfg.env, spec=spec))
    with pytest.raises(
        ValueError,
        match=r"^observe: observation: expected rows of \[5\] .*, got \[4\]$",
    ):
        init(cfg, WORLD, random.key(0))
