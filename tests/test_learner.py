"""`fp.ppo` is the full form with less to write; what cannot work is refused in one line."""

import re
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import funcppo as fp
from funcppo import train_step
from funcppo.core import tree
from funcppo.envs import classic
from tests import learning

KEY = fp.random.key(0)


def small(env=None, network=None, **options):
    return fp.ppo(
        env=env or fp.envs.cartpole(),
        network=network or fp.nets.mlp(64, 64),
        **learning.SMALL,
        **options,
    )


@pytest.mark.parametrize(
    ("env", "cfg"),
    [
        (fp.envs.cartpole(), learning.cartpole_config(**learning.SMALL)),
        (fp.envs.pendulum(), learning.pendulum_config(**learning.SMALL)),
    ],
    ids=["cartpole", "pendulum"],
)
def test_a_learner_is_the_full_form(env, cfg):
    learner, state = small(env), train_step.init(cfg, learning.WORLD, KEY)
    assert learner.cfg.ppo == cfg.ppo and learner.cfg.agent == cfg.agent
    learning.assert_trees_equal(learner.init(KEY), state, rtol=0, atol=0)
    want = train_step.train_step(cfg, learning.WORLD, state)
    learning.assert_trees_equal(learner.step(state), want, rtol=0, atol=0)


class Corner(NamedTuple):
    x: object
    y: object


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"env": fp.envs.cartpole}, TypeError, "env: expected an Environment, got the function cartpole"),
        ({"env": "CartPole-v1"}, TypeError, "fp.envs.make and fp.envs.gymnasium build one by its name"),
        ({"network": 64}, TypeError, "network: expected a function of an EnvironmentSpec, got int"),
        ({"network": torch.nn.Linear(4, 3)}, TypeError, "got the module Linear; an Agent"),
        ({"network": lambda spec: None}, TypeError, "which returns NoneType"),
        ({"env": replace(fp.envs.cartpole(), spec=None)}, ValueError, "env.spec: expected an EnvironmentSpec"),
        ({"n_env": 3}, TypeError, "n_env: expected one of the options n_envs, "),
        ({"loss": 3}, TypeError, "loss: expected a function of cfg, world, params, batch, scalars, got int"),
        ({"loss": lambda params, batch: 0}, TypeError, "scalars, got the function <lambda>: too many positional"),
        ({"advantages": "gae"}, TypeError, "advantages: expected a function of cfg, world, params, steps"),
        ({"world": Corner(torch.ones(2), np.ones(2))}, TypeError, "world.y: expected a tensor, got ndarray"),
        ({"gae_lambda": 1.0, "n_microbatches": 0}, ValueError, "n_microbatches: expected 1 or more, got 0"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_in_one_line(arguments, error, text):
    given = {"env": fp.envs.cartpole(), "network": fp.nets.mlp(8)} | arguments
    with pytest.raises(error) as raised:
        fp.ppo(**given)
    assert text in str(raised.value) and "\n" not in str(raised.value)


CARTPOLE = fp.envs.cartpole()


def reading_the_world(name):
    """CartPole one function of which reads a world."""
    fn = getattr(CARTPOLE, name)

    def read(cfg, world, *arguments):
        assert world.gain is not None
        return fn(cfg, world, *arguments)

    return replace(CARTPOLE, **{name: read})


USES = {
    "train": lambda ppo: fp.train(ppo, 32),
    "train_many": lambda ppo: fp.train_many(ppo, 32, seeds=2),
    "compile": lambda ppo: fp.compile(ppo, ppo.init(KEY), backend="none"),
    "check": lambda ppo: fp.check(ppo.cfg.env),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("name", ["reset", "step_functional", "observe"])
def test_a_function_without_the_world_or_of_other_arguments_is_named(name, use):
    expected = f"^{name}: expected a result, got "
    problem = "AttributeError: 'NoWorld' object has no attribute 'gain'; no world was handed in$"
    with pytest.raises(ValueError, match=expected + problem) as error:
        use(small(reading_the_world(name)))
    assert isinstance(error.value.__cause__, AttributeError)

    problem = "TypeError: .* takes 0 positional arguments but [35] were given$"
    broken = small(replace(CARTPOLE, **{name: lambda: 0}))
    learning.refused(f"{name}: expected a result, got {problem}", use, broken)


@dataclass(frozen=True)
class MapConfig:
    size: int = 3
    walls: object = (1, 2)


def gae_with(change):
    """GAE with a change to its result."""
    return lambda *args: change(fp.advantages.estimate_gae(*args))


def loss_with(change):
    """The usual loss with a change to its result."""
    return lambda *args: change(*fp.losses.loss_fn(*args))


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        ({"loss": loss_with(lambda x, metrics: x)}, r"loss: expected \(loss, fp.losses.LossMetrics\), got Tensor"),
        ({"loss": loss_with(lambda x, metrics: (x[None], metrics))}, r"loss: .*\.loss: expected .* \[\], got .* \[1\]"),
        ({"loss": loss_with(lambda x, metrics: (x, metrics._replace(extra=Corner(x, 1.0))))},
         r"loss: LossMetrics\.extra\.y: expected torch\.float32 \[\], got float"),
        ({"advantages": gae_with(lambda x: x[:2])}, "advantages: expected an fp.advantages.Estimate, got tuple"),
        ({"advantages": gae_with(lambda x: x._replace(advantage=x.advantage.T))},
         r"advantages\.advantage: expected torch.float32 \[8, 4\], got torch.float32 \[4, 8\]"),
        ({"advantages": gae_with(lambda x: x._replace(value_target=x.value_target.double()))}, r"advantages\.val"),
        ({"advantages": gae_with(lambda x: x._replace(extras=(x.advantage.flatten(),)))},
         r"advantages\.extras\.0: expected torch.float32 \[8, 4\], got torch.float32 \[32\]"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("train", [fp.train, partial(fp.train_many, seeds=2)])
def test_what_a_users_loss_or_estimator_returns_is_checked(
    option, problem, train
):
    learning.refused(
        problem, train, small(CARTPOLE, **option), 32, error=TypeError
    )


@pytest.mark.parametrize(
    ("cfg", "field"),
    [
        (torch.zeros(2), ""),
        (MapConfig(walls=torch.zeros(2)), ".walls"),
        (MapConfig(walls=(1, [torch.zeros(2)])), ".walls[1][0]"),
        (MapConfig(walls=MapConfig(size=torch.tensor(3))), ".walls.size"),
        (MapConfig(walls={"a": torch.zeros(2)}), ".walls['a']"),
        (MapConfig(walls=Corner(0, torch.zeros(2))), ".walls.y"),
    ],
)
def test_a_tensor_among_settings_is_named(cfg, field):
    env = replace(fp.envs.cartpole(), cfg=cfg)
    agent = replace(learning.cartpole_config().agent, cfg=cfg)
    wrapped = fp.envs.wrappers.time_limit(env, 5)
    tries = [
        ("env.cfg", lambda: small(env)),
        ("env.cfg", lambda: fp.check(env)),
        ("env.cfg.env.cfg", lambda: small(wrapped)),
        ("agent.cfg", lambda: small(None, agent)),
        ("agent.cfg", lambda: small(None, lambda spec: agent)),
    ]
    for name, attempt in tries:
        line = (
            f"{name}{field}: expected a Python scalar or a frozen dataclass of such, got a tensor: "
            "tensors that a function reads are its world"
        )
        learning.refused(f"{re.escape(line)}$", attempt, error=TypeError)


@dataclass
class Motion:
    """A state as a dataclass: no tree, unless it is registered."""

    motion: Tensor
    steps: Tensor


@tree.register_dataclass
@dataclass
class Registered(Motion):
    """The same, registered with optree and PyTorch."""


def as_state(make):
    """CartPole whose state is of another kind."""
    env = fp.envs.cartpole(max_steps=5)

    def named(state):
        first = env.reset(env.cfg, learning.WORLD, fp.random.split(KEY, 1))
        return first._replace(motion=state.motion, steps=state.steps)

    def step(cfg, world, state, *given):
        after, timestep = env.step_functional(cfg, world, named(state), *given)
        return make(*after), timestep

    return replace(
        env,
        reset=lambda cfg, world, key: make(*env.reset(cfg, world, key)),
        step_functional=step,
        observe=lambda cfg, world, state: env.observe(cfg, world, named(state)),
    )


@pytest.mark.parametrize(
    ("make", "got"),
    [
        (Motion, "got Motion; register it by fp.tree.register_dataclass"),
        (lambda motion, steps: {"motion": motion, "steps": steps}, "got dict"),
        (lambda motion, steps: (motion, {"steps": steps}), "got dict at"),
        (lambda motion, steps: (motion, None), "got NoneType at"),
        (lambda motion, steps: (motion, steps.tolist()), "got int at"),
    ],
    ids=["dataclass", "dict", "nested dict", "None", "numbers"],
)
def test_a_state_that_is_no_tree_of_tensors_is_refused_in_one_line(make, got):
    expected = "a tensor, or a NamedTuple, tuple or list of such"
    line = f"reset: state: expected {expected}.*{re.escape(got)}"
    learning.refused(line, small(as_state(make)).init, KEY, error=TypeError)


def test_a_registered_dataclass_is_a_state_that_works():
    (state, _), (want, _) = (
        ppo.step(ppo.init(KEY))
        for ppo in map(
            small, (as_state(Registered), fp.envs.cartpole(max_steps=5))
        )
    )
    assert isinstance(state.env_state, Registered)
    learning.assert_trees_equal(state.params, want.params, rtol=0, atol=0)


@pytest.fixture(scope="module")
def fast():
    learner = small()
    return learner, fp.compile(learner, learner.init(KEY), backend="aot_eager")


def test_a_compiled_learner_takes_the_same_steps_and_says_how(fast):
    learner, compiled = fast
    state = want = learner.init(fp.random.key(1))
    for _ in range(3):
        state, metrics = compiled.step(state)
        want, expected = learner.step(want)
        got = state, metrics
        learning.assert_trees_equal(got, (want, expected), rtol=1e-4, atol=1e-5)
    record = compiled.record
    assert (record.strategy, record.failures) == ("one-graph", ())
    assert (record.replay_mode, record.backend) == ("none", "aot_eager")


def test_only_the_returned_state_is_written_to(fast):
    """The contract on buffers that `CompiledLearner.step` states."""
    learner, compiled = fast
    given = learner.init(fp.random.key(2))
    copy = tree.map(torch.clone, given)
    first, metrics = compiled.step(given)
    held, metrics_copy = tree.map(torch.clone, (first, metrics))
    second, _ = compiled.step(first)
    learning.assert_trees_equal(given, copy, rtol=0, atol=0)
    learning.assert_trees_equal(metrics, metrics_copy, rtol=0, atol=0)
    assert second is first and int(first.update) == 2 and int(held.update) == 1
    again, _ = compiled.step(held)
    assert int(held.update) == 1 and int(again.update) == 2


def with_double_params(state):
    return state._replace(params=tree.map(torch.Tensor.double, state.params))


def with_double_nu(state):
    first, *others = tree.leaves(state.opt_state.nu)
    nu = tree.unflatten(state.opt_state.nu, [first.double(), *others])
    return state._replace(opt_state=state.opt_state._replace(nu=nu))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda state: None, "expected a TrainState, as init returns it, got "),
        (lambda state: state.params, "expected a TrainState, as init"),
        (partial(tree.map, lambda x: torch.stack([x] * 3)),
         r"expected that of one learner, got 3 stacked: fp\.tree\.item\("),
        (with_double_params, "expected torch.float64 in .*float32 at mu.hidden"),
        (with_double_nu, "expected torch.float32 in .*float64 at nu.hidden"),
    ],
)  # fmt: skip
def test_what_is_no_state_or_mixes_dtypes_is_refused_by_name(change, text):
    learner = small(fp.envs.cartpole())
    state = change(learner.init(KEY))
    for step in (learner.step, lambda state: fp.compile(learner, state)):
        learning.refused(f"state: {text}", step, state, error=TypeError)


@pytest.mark.parametrize("option", ["strategy", "graphs"])
def test_what_is_no_way_to_compile_is_refused(fast, option):
    args = fp.compile, fast[0], fast[0].init(KEY)
    learning.refused(f"{option}: expected auto", *args, **{option: "quickest"})


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda state: state.motion.add_(1.0),
         "state.motion: expected an argument that stays as it is, got one that is overwritten"),
        (lambda state: state._replace(motion=torch.rand_like(state.motion)),
         "a second time with the same key: state.motion: expected"),
    ],
)  # fmt: skip
def test_an_environment_that_is_not_pure_is_refused(change, problem):
    def step(cfg, world, state, action, key):
        reached, timestep = classic.cartpole_step(
            cfg, world, state, action, key
        )
        changed = change(state)
        is_state = isinstance(changed, type(state))
        return changed if is_state else reached, timestep

    env = replace(
        fp.envs.cartpole(), step_functional=step, step_with_autoreset=None
    )
    ppo = fp.ppo(env=env, network=fp.nets.mlp(4), n_envs=2, n_steps=4)
    state = ppo.init(fp.random.key(0))
    line, backend = f"step_functional.*{problem}", "no backend is reached"
    learning.refused(line, fp.compile, ppo, state, backend=backend)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_the_step_is_one_graph_and_its_metrics_are_the_callers():
    learner = small()
    state = want = learner.init(fp.random.key(1, "cuda"))
    compiled = fp.compile(learner, state, strategy="eager")
    assert compiled.record.replay_mode == "cuda-graph"
    held = []
    for _ in range(3):
        state, metrics = compiled.step(state)
        want, expected = learner.step(want)
        held.append((metrics, expected))
    learning.assert_trees_equal(state, want, rtol=1e-4, atol=1e-5)
    for metrics, expected in held:
        learning.assert_trees_equal(metrics, expected, rtol=1e-3, atol=1e-4)
