"""Settings that cannot work are refused when they are made, with the name of the field."""

from dataclasses import fields, replace

import pytest

import funcppo as fp
from funcppo import train_step
from funcppo.config import SCALAR_FIELDS, AdamConfig, PPOConfig, Schedule
from funcppo.core import random
from funcppo.interfaces import NoWorld
from funcppo.losses import SCALARS
from tests.learning import assert_trees_equal, cartpole_config, pendulum_config
from tests.nets import test_fused_mlp  # noqa: F401  its operators on a CPU


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (
            lambda: PPOConfig(n_minibatches=3),
            r"n_minibatches: expected a divisor of n_envs \* n_steps = 512, got 3",
        ),
        (lambda: PPOConfig(n_microbatches=3), "n_microbatches: expected a divisor of the rows of a minibatch, 128"),
        (lambda: PPOConfig(n_shards=3), "n_shards: expected a divisor of n_envs = 4, got 3"),
        (
            lambda: PPOConfig(n_envs=8, n_steps=6, n_minibatches=12, n_shards=8),
            "n_shards: expected a divisor of the rows of a microbatch, 4, got 8",
        ),
        (
            lambda: PPOConfig(n_envs=2, n_steps=3, n_minibatches=6),
            "n_minibatches: expected at least 2 rows a minibatch .*, got 6",
        ),
        (lambda: PPOConfig(value_loss="bogus"), "value_loss: expected one of"),
        (lambda: PPOConfig(kl_stop="never"), "kl_stop: expected one of"),
        (lambda: PPOConfig(advantage_ddof=2), "advantage_ddof: expected one"),
        (lambda: PPOConfig(learning_rate=-1.0), "learning_rate: expected 0"),
        (lambda: PPOConfig(gamma=1.5), "gamma: expected 0 to 1, got 1.5"),
        (lambda: PPOConfig(clip_eps=-0.1), "clip_eps: expected 0 or more"),
        (lambda: PPOConfig(max_grad_norm=0.0), "max_grad_norm: expected more"),
        (lambda: PPOConfig(target_kl=-1.0), "target_kl: expected more than 0"),
        (lambda: AdamConfig(b1=1.0), "b1: expected 0 to below 1, got 1.0"),
        (lambda: AdamConfig(eps=-1e-5), "eps: expected 0 or more"),
        (lambda: Schedule(kind="bogus"), "kind: expected one of"),
        (lambda: Schedule(end_factor=-1), "end_factor: expected 0 or more"),
    ],
)  # fmt: skip
def test_a_setting_that_cannot_be_meant_is_refused_by_name(make, problem):
    with pytest.raises(ValueError, match=f"^{problem}"):
        make()


class Blind(PPOConfig):
    """Settings whose `SCALAR_FIELDS` cannot be read."""

    def __getattribute__(self, name):
        if name in SCALAR_FIELDS:
            raise AssertionError(f"{name} is read")
        return super().__getattribute__(name)


def blinded(cfg):
    ppo = object.__new__(Blind)
    for field in fields(cfg.ppo):
        object.__setattr__(ppo, field.name, getattr(cfg.ppo, field.name))
    return replace(cfg, ppo=ppo)


def blind(part):
    """A part that gets settings whose scalars cannot be read."""
    return lambda cfg, *args: part(blinded(cfg), *args)


def memory_config(**ppo):
    network = fp.nets.gru(4, hidden=())
    return fp.ppo(env=fp.envs.cartpole(), network=network, **ppo).cfg


def normalised_config(**ppo):
    env = fp.envs.wrappers.normalize_reward(fp.envs.cartpole())
    return fp.ppo(env=env, network=fp.nets.mlp(4, 4), **ppo).cfg


SMALL = {"n_envs": 4, "n_steps": 4, "n_epochs": 2, "n_minibatches": 2}


@pytest.mark.parametrize("by_kernels", [False, True])
@pytest.mark.parametrize(
    "cfg",
    [
        cartpole_config(max_steps=3, **SMALL),
        cartpole_config(max_steps=3, **SMALL, n_microbatches=2),
        cartpole_config(max_steps=3, **SMALL, n_shards=2),
        cartpole_config(**SMALL, target_kl=1e-9, value_loss="plain"),
        cartpole_config(**SMALL, kl_stop="minibatch", target_kl=1e-3),
        cartpole_config(**SMALL, value_clip_eps=0.1, value_loss="clipped_only"),
        cartpole_config(
            max_steps=3,
            **SMALL,
            bootstrap_truncated=False,
            advantage_ddof=None,
            adam=AdamConfig(weight_decay=0.1),
        ),
        pendulum_config(max_steps=3, **SMALL),
        memory_config(**SMALL),
        memory_config(**SMALL, n_microbatches=2),
        normalised_config(**SMALL),
    ],
)
def test_no_part_of_a_step_reads_what_scalars_hold(cfg, by_kernels):
    """Compiled code of the parts serves all values, so that none may show in it."""
    parts = train_step.EAGER_PARTS
    if by_kernels and parts.kernels.reason_against(cfg):
        pytest.skip("no kernels for this network")
    source = parts.kernels if by_kernels else parts
    plain = {
        name: getattr(source, name)
        for name in ("rollout_step", "build_batch", "minibatch_step")
    }
    plain["sample_randomness"] = parts.sample_randomness
    state = train_step.init(cfg, NoWorld(), random.key(0))
    steps = [
        train_step.train_step(cfg, NoWorld(), state, replace(parts, **fns))
        for fns in (plain, {name: blind(fn) for name, fn in plain.items()})
    ]
    assert_trees_equal(*steps, rtol=0, atol=0)
    with pytest.raises(AssertionError, match="learning_rate_schedule is read"):
        train_step.train_step(blinded(cfg), NoWorld(), state)


def test_every_scalar_is_among_the_fields_that_no_part_reads():
    assert {*SCALARS} < {*SCALAR_FIELDS}
