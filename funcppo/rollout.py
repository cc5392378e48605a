"""Rollouts: `n_steps` transitions of every environment under fixed parameters, time-major.

`init_rollout_state` makes the first state, and `rollout_step` one transition. All random inputs of a rollout are
sampled before it (`rollout_keys`, `sample_random_inputs`).

Networks with memory and without are applied alike: one step (`apply_agent`), a sequence (`apply_sequence`). The memory
of a network without one is the empty tuple. A compiler unrolls the loop of `apply_sequence`; its gradient by
`adjoints` needs two loops over the steps, which can be operators of their own (`tree.graph_scan`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from funcppo.config import Config
from funcppo.core import random, tree
from funcppo.core.settings import reads_scalars_apart
from funcppo.core.tree import graph_scan, is_eager, scan
from funcppo.core.types import (
    F32,
    I64,
    Bool,
    Obs,
    Params,
    ResetSample,
    Scan,
    State,
    World,
    check_tensor,
)
from funcppo.envs.checks import check_observation, check_rows
from funcppo.envs.wrappers import (
    check_timestep,
    sample_reset,
    step_with_autoreset,
)
from funcppo.interfaces import (
    Agent,
    AnyAgent,
    Environment,
    EnvironmentSpec,
    Memory,
    Output,
)

Tree = TypeVar("Tree")


class StepMemories(NamedTuple):
    """Memory of a network before each of several steps, not only before the first."""

    memory: Memory  # [T * B, ...]

    def floating_leaves(self) -> list[Tensor]:
        """Return the floating-point tensors of the memories, which have gradients."""
        return [x for x in tree.leaves(self.memory) if x.is_floating_point()]

    def with_floating_leaves(self, new: list[Tensor]) -> StepMemories:
        """Return the memories with their floating-point tensors replaced by `new`."""
        others = iter(new)
        leaves = [
            next(others) if x.is_floating_point() else x
            for x in tree.leaves(self.memory)
        ]
        return StepMemories(tree.unflatten(self.memory, leaves))


def initial_memory(
    agent: AnyAgent, n_rows: int, device: torch.device
) -> Memory:
    """Build the memory of `n_rows` rows at the start of an episode; () for a network without memory."""
    if agent.initial_memory is None:
        return ()
    return agent.initial_memory(agent.cfg, n_rows, device)


def reset_memory(
    agent: AnyAgent, done: Bool[Tensor, "B"], memory: Memory
) -> Memory:
    """Reset the memory of finished rows to the start of an episode; keep the memory of all further rows."""
    if agent.initial_memory is None:
        return ()
    first = initial_memory(agent, done.shape[0], done.device)
    return tree.where(done, first, memory)


class Applied(NamedTuple):
    """Output of a network for one step, and its memory after it."""

    output: Any
    memory: Memory


def apply_agent(
    agent: Agent[World, Params, Obs, Output],
    world: World,
    params: Params,
    obs: Obs,
    memory: Memory,
) -> Applied:
    """Apply the network to the observations of one step; return its output and the memory after the step.

    Args:
      memory: before the observations.
    """
    if agent.apply_recurrent is None:
        return Applied(agent.apply(agent.cfg, world, params, obs), ())
    encoded = encode(agent, world, params, obs)
    return Applied(
        *agent.apply_recurrent(agent.cfg, world, params, encoded, memory)
    )


def choose_action(
    agent: AnyAgent, output: Any, key: I64[Tensor, "2"] | None
) -> Tensor:
    """Sample an action of each row; without a key return the most probable ones."""
    if key is None:
        return agent.distribution.mode(output)
    return agent.distribution.sample(key, output)


def encode(agent: AnyAgent, world: object, params: object, obs: Any) -> Any:
    """Encode observations of any rows by the part of the network without memory; unchanged if it has no such part."""
    if agent.encode is None:
        return obs
    return agent.encode(agent.cfg, world, params, obs)


def apply_sequence(
    agent: AnyAgent,
    world: object,
    params: object,
    obs: Any,
    done: Bool[Tensor, "T B"],
    memory: Memory | StepMemories,
) -> Any:
    """Apply a network with memory to T steps of B rows; return its output flattened to T * B rows.

    Args:
      obs: a tree of tensors [T, B, ...].
      done: an episode ends with the step; the memory is reset after it.
      memory: before the first step; or `StepMemories`, those before each.
    """
    if not isinstance(memory, StepMemories):
        memory = step_memories(agent, world, params, obs, done, memory, scan)
    output, _ = apply_agent(agent, world, params, _rows(obs), memory.memory)
    return output


def step_memories(
    agent: AnyAgent,
    world: object,
    params: object,
    obs: Any,
    done: Bool[Tensor, "T B"],
    memory: Memory,
    scan: Scan | None = None,
) -> StepMemories:
    """Compute the memory of a network before each of T steps; the arguments are those of `apply_sequence`.

    Args:
      scan: the loop over steps. None: the network's own on a GPU, and `tree.graph_scan` where it has none.
    """
    encoded = _encode_steps(agent, world, params, obs, done)
    if scan is None and agent.remember is not None and done.is_cuda:
        before = agent.remember(agent.cfg, params, encoded, done, memory)
        return StepMemories(_rows(before))
    params = tree.map(
        torch.clone, params
    )  # a loop reads no views of one vector

    def step(
        memory: Memory, x: tuple[Any, Bool[Tensor, "B"]]
    ) -> tuple[Memory, Memory]:
        return _advance(agent, world, params, *x, memory), memory

    _, before = (scan or graph_scan)(step, memory, (encoded, done))
    return StepMemories(_rows(before))


def adjoints(
    agent: AnyAgent,
    world: object,
    params: object,
    obs: object,
    done: Bool[Tensor, "T B"],
    memories: StepMemories,
    memory_grads: list[Tensor],
    scan: Scan | None = None,
) -> list[Tensor]:
    """Compute what the loss gradient of each step's next memory is, [T * B, ...], through all steps after it:

        d_t = g_t + (dm_{t+1} / dm_t)^T d_{t+1},    the result d_{t+1} for each t, 0 for the last

    where m_t is the memory before step t, and g_t the gradient of the loss in it, all other memories being fixed. The
    loss gradient of the parameters is that at fixed memories plus the sum over t of (dm_{t+1} / dparams)^T d_{t+1}.

    Args:
      memories: m, of `step_memories`.
      memory_grads: g, of their `floating_leaves`.
      scan: as that of `step_memories`.

    Source: Werbos 1990, "Backpropagation through time: what it does and how to do it".
    """
    encoded = _encode_steps(agent, world, params, obs, done)
    grads, before = _steps((memory_grads, memories), done.shape)
    if scan is None and agent.remember_back is not None and done.is_cuda:
        found = agent.remember_back(
            agent.cfg, params, encoded, done, before.memory, grads
        )
    else:
        xs = (grads, encoded, done, before)
        found = _adjoints(agent, world, params, xs, scan or graph_scan)
    return _rows(found)


def next_memories(
    agent: AnyAgent,
    world: object,
    params: object,
    obs: object,
    done: Bool[Tensor, "T B"],
    memories: StepMemories,
) -> list[Tensor]:
    """Compute the `floating_leaves` of the memory after each step, [T * B, ...], all steps at once."""
    encoded = encode(agent, world, params, _rows(obs))
    after = _advance(
        agent, world, params, encoded, done.flatten(), memories.memory
    )
    return StepMemories(after).floating_leaves()


def _adjoints(
    agent: AnyAgent,
    world: object,
    params: object,
    xs: tuple[list[Tensor], object, Bool[Tensor, "T B"], StepMemories],
    scan: Scan,
) -> list[Tensor]:
    """Compute d_{t+1} of each step, from the last one, after which nothing is remembered, to the first.

    Args:
      xs: g, the encoded observations, `done` and the memories.
    """
    loop_params = tree.map(torch.clone, params)

    def step_back(
        adjoint: list[Tensor],
        x: tuple[list[Tensor], Any, Bool[Tensor, "B"], StepMemories],
    ) -> tuple[list[Tensor], list[Tensor]]:
        grads, encoded, done, before = x

        def advance(leaves: list[Tensor]) -> list[Tensor]:
            memory = before.with_floating_leaves(leaves).memory
            after = _advance(agent, world, loop_params, encoded, done, memory)
            return StepMemories(after).floating_leaves()

        pull_back = torch.func.vjp(advance, before.floating_leaves())[1]
        (through_step,) = pull_back(adjoint)
        return tree.map(torch.add, grads, through_step), adjoint

    last = tree.zeros_like([x[0] for x in xs[0]])
    _, adjoints = scan(step_back, last, tree.map(_reverse, xs))
    return tree.map(_reverse, adjoints)


def _encode_steps(
    agent: AnyAgent,
    world: object,
    params: object,
    obs: Any,
    done: Bool[Tensor, "T B"],
) -> Any:
    """Encode the observations of all T steps at once; return [T, B, ...]."""
    return _steps(encode(agent, world, params, _rows(obs)), done.shape)


def _advance(
    agent: AnyAgent,
    world: object,
    params: object,
    encoded: Any,
    done: Bool[Tensor, "B"],
    memory: Memory,
) -> Memory:
    """Return the memory before the next step: updated by one step, and reset where an episode ended."""
    assert agent.apply_recurrent is not None
    _, after = agent.apply_recurrent(agent.cfg, world, params, encoded, memory)
    return reset_memory(agent, done, after)


def _rows(steps: Tree) -> Tree:
    """Flatten the leaves from [T, B, ...] to [T * B, ...]."""
    return tree.map(lambda x: x.flatten(0, 1), steps)


def _steps(rows: Tree, shape: torch.Size) -> Tree:
    """Shape the leaves [T * B, ...] as [T, B, ...]."""
    return tree.map(lambda x: x.unflatten(0, shape), rows)  # pyright: ignore[reportUnknownLambdaType]


def _reverse(x: Tensor) -> Tensor:
    return x.flip(0)


class EpisodeStats(NamedTuple):
    """Return and length so far of the episode that each row is in."""

    total_reward: F32[Tensor, "... B"]  # undiscounted sum of rewards so far
    length: I64[Tensor, "... B"]  # steps so far


class RolloutState(NamedTuple, Generic[State]):
    """Carry of a rollout's loop: environment state, episode statistics and memory."""

    env_state: State
    episode_stats: EpisodeStats
    # of the network, before the next observation; () if it has none
    memory: Memory = ()


class RandomInputs(NamedTuple, Generic[ResetSample]):
    """Random inputs of one step (of T steps when batched), sampled before the rollout to save kernels."""

    action_key: I64[Tensor, "... 2"]
    step_key: I64[Tensor, "... B 2"]
    # what each row resets from, if it does: of `envs.wrappers.sample_reset`
    reset_sample: ResetSample


class Transition(NamedTuple, Generic[Obs]):
    """One step of every row; stacked over time, the trajectory [T, B]."""

    obs: Obs  # what the action was chosen on
    action: Tensor
    log_prob: F32[Tensor, "... B"]  # of the action, under the behaviour policy
    value: F32[Tensor, "... B"]  # V(obs)
    reward: F32[Tensor, "... B"]
    terminated: Bool[Tensor, "... B"]
    truncated: Bool[Tensor, "... B"]
    # Of the state reached, before any reset; () if truncation is not bootstrapped.
    final_obs: Obs | tuple[()]
    episode_stats: EpisodeStats  # this transition included
    # With `final_obs`, of a network with memory: what it remembers of the episode up to `obs`.
    final_memory: Memory = ()


def first_env_state(
    env: Environment[Any, Any, Any, Any],
    world: object,
    key: I64[Tensor, "B 2"],
) -> Any:
    """Reset environments; return their first state, laid out as later ones (`tree.contiguous_copy`).

    Raises:
      TypeError: the state is no tree of tensors.
    """
    env_state = env.reset(env.cfg, world, key)
    tree.check_tree(env_state, "reset: state")
    return tree.contiguous_copy(env_state)


def init_rollout_state(
    cfg: Config, world: object, key: I64[Tensor, "2"], n_envs: int
) -> RolloutState[Any]:
    """Build the first rollout state of `n_envs` rows: reset environments, empty episodes and the initial memory.

    Raises:
      TypeError: the environment's state, or the network's memory, is no tree of tensors.
      ValueError: a tensor of one has another number of rows.
    """
    env_state = first_env_state(cfg.env, world, random.split(key, n_envs))
    memory = initial_memory(cfg.agent, n_envs, key.device)
    tree.check_tree(memory, "initial_memory: memory")
    tree.check_rows(env_state, n_envs, "reset: state")
    tree.check_rows(memory, n_envs, "initial_memory: memory")
    reward = torch.zeros(n_envs, device=key.device)
    length = torch.zeros_like(reward, dtype=torch.int64)
    return RolloutState(env_state, EpisodeStats(reward, length), memory)


@torch.no_grad()
def check_step(
    cfg: Config,
    world: object,
    params: object,
    rollout_state: RolloutState[Any],
    key: I64[Tensor, "2"],
) -> None:
    """Check on one step of environment and network that they return what `interfaces` says, and what `env.spec` says.

    Rollouts check nothing: what they would find in later steps is the same. An environment on the host is not stepped.

    Raises:
      TypeError: names the tensor of another shape or dtype, the part of an observation that is no tensor or no mask of
        the actions, or what the network returns in place of an output.
      ValueError: names the observation or the action, what was expected and what came.
    """
    env, agent, spec = cfg.env, cfg.agent, cfg.env.spec
    env_state, episode_stats, memory = rollout_state
    obs = env.observe(env.cfg, world, env_state)
    tree.check_tree(obs, "observe: observation")
    if spec is not None:
        check_observation(obs, spec)
    output, after = _try_network(cfg, world, params, obs, memory)
    if spec is not None:
        _check_output(agent, spec, output)
    rows, dtype = episode_stats.length.shape, episode_stats.total_reward.dtype
    value_dtype = getattr(output.value, "dtype", dtype)
    check_tensor(output.value, rows, value_dtype, "value of the network")
    _check_output_dtypes(output, params, dtype)
    if agent.initial_memory is not None:
        tree.check_layout(after, memory, "network: memory")
    if env.host is not None:
        return

    action = choose_action(agent, output, key)
    keys = random.split(key, len(episode_stats.length))
    result = env.step_functional(env.cfg, world, env_state, action, keys)
    check_timestep(env_state, result, rows)
    name = "step_functional: Timestep.reward"
    check_tensor(result[1].reward, rows, dtype, name)


def _try_network(
    cfg: Config, world: object, params: object, obs: Any, memory: Memory
) -> Applied:
    """Apply the network to observations; explain why it cannot be, where the environment has a spec."""
    try:
        return apply_agent(cfg.agent, world, params, obs, memory)
    # of shapes, dtypes or a structure that do not fit
    except (AttributeError, RuntimeError, TypeError) as error:
        if cfg.env.spec is None:
            raise
        line = str(error).partition("\n")[0]
        if len(cfg.env.spec.shape) > 1:
            line += "; fp.nets.cnn() reads images, fp.envs.wrappers.flatten_observation(env) observes vectors"
        kinds = [f"{x.dtype} {list(x.shape)}" for x in tree.leaves(obs)]
        raise ValueError(
            "network: expected one that can be applied to the observations of the environment, "
            f"{', '.join(kinds)}, got: {line}"
        ) from error


def _check_output(agent: AnyAgent, spec: EnvironmentSpec, output: Any) -> None:
    """Check that the agent's distribution turns a network's output into actions of the environment."""
    logits = getattr(output, "logits", None)
    if not spec.continuous_actions and isinstance(logits, Tensor):
        sizes = spec.action_sizes
        shape = (len(sizes), max(sizes)) if sizes else (spec.action_size,)
        check_rows(logits, shape, "logits of the network")

    try:
        output.value  # noqa: B018
        action = agent.distribution.mode(output)
        is_continuous = action.is_floating_point()
    except AttributeError as error:
        raise TypeError(
            "output of the network: expected what its distribution reads, such as fp.PolicyValue(logits, value), "
            f"got {type(output).__name__}: {error}"
        ) from error
    if is_continuous != spec.continuous_actions:
        kind = "continuous" if spec.continuous_actions else "discrete"
        raise ValueError(
            f"action of the network: expected {kind} actions by env.spec, got {action.dtype} by its distribution"
        )
    if is_continuous:
        check_rows(action, (spec.action_size,), "action of the network")


def _check_output_dtypes(
    output: Any, params: object, dtype: torch.dtype
) -> None:
    """Check that each floating-point tensor of a network's output has the dtype of the parameters or of rewards."""
    expected = tree.leaves(params)[0].dtype
    for i, x in enumerate(tree.leaves(output)):
        if x.is_floating_point() and x.dtype not in (dtype, expected):
            path = tree.paths(output)[i]
            check_tensor(x, x.shape, expected, f"{path} of the network")


def rollout_keys(
    key: I64[Tensor, "2"],
    n_steps: int,
    n_envs: int,
    action_key_steps: int | None = 1,
) -> tuple[I64[Tensor, "T 2"], I64[Tensor, "T B 2"], I64[Tensor, "T B 2"]]:
    """Split one key into keys of actions [T, 2], of environment steps [T, B, 2] and of resets [T, B, 2] of a rollout.

    Args:
      action_key_steps: steps for which the key of actions stays the same; None: all of them.

    Returns:
      The keys of actions, of steps and of resets.
    """
    action_key, env_key = random.split(random.split(key), n_steps).unbind()
    if action_key_steps != 1:
        n_held = min(action_key_steps or n_steps, n_steps)
        steps = torch.arange(n_steps, device=key.device)
        action_key = action_key[steps // n_held * n_held]
    step_key, reset_key = random.split(random.split(env_key, n_envs)).unbind(-2)
    return action_key, step_key, reset_key


def sample_random_inputs(
    env: Environment[World, State, Obs, ResetSample],
    world: World,
    action_key: I64[Tensor, "T 2"],
    step_key: I64[Tensor, "T B 2"],
    reset_key: I64[Tensor, "T B 2"],
) -> RandomInputs[ResetSample]:
    """Sample the random inputs of all T steps of a rollout from the keys of `rollout_keys`.

    Raises:
      ValueError: a reset returns a tensor that has not one row for each key.
    """
    shape = reset_key.shape[:2]
    reset_sample = sample_reset(env, world, reset_key.flatten(0, 1))
    part = "reset: state" if env.sample_reset is None else "sample_reset"
    tree.check_rows(reset_sample, shape.numel(), part)
    reset_sample = _steps(reset_sample, shape)
    return RandomInputs(action_key, step_key, reset_sample)


@reads_scalars_apart
def rollout_step(
    cfg: Config,
    world: object,
    params: object,
    rollout_state: RolloutState[State],
    random_inputs: RandomInputs[Any],
) -> tuple[RolloutState[State], Transition[Any]]:
    """Observe, act and step, then reset the rows that finished; return the next state and the transition.

    Returns:
      The state to continue from, and the transition.
    """
    env, agent = cfg.env, cfg.agent
    obs = env.observe(env.cfg, world, rollout_state.env_state)
    output, memory = apply_agent(
        agent, world, params, obs, rollout_state.memory
    )
    action = agent.distribution.sample(random_inputs.action_key, output)

    reached_state, timestep, next_state = step_with_autoreset(
        env,
        world,
        rollout_state.env_state,
        action,
        random_inputs.step_key,
        random_inputs.reset_sample,
    )
    total_reward, length = rollout_state.episode_stats
    episode_stats = EpisodeStats(total_reward + timestep.reward, length + 1)
    transition = Transition(
        obs=obs,
        action=action,
        log_prob=agent.distribution.log_prob(output, action),
        value=output.value,
        reward=timestep.reward,
        terminated=timestep.terminated,
        truncated=timestep.truncated,
        final_obs=env.observe(env.cfg, world, reached_state)
        if uses_final_obs(cfg)
        else (),
        episode_stats=episode_stats,
        final_memory=memory if uses_final_obs(cfg) else (),
    )

    # The statistics of a finished row start again, as its environment does.
    done = timestep.terminated | timestep.truncated
    next_stats = EpisodeStats(
        torch.where(done, 0.0, episode_stats.total_reward),
        torch.where(done, 0, episode_stats.length),
    )
    next_memory = reset_memory(agent, done, memory)
    return RolloutState(next_state, next_stats, next_memory), transition


def uses_final_obs(cfg: Config) -> bool:
    """Return whether truncated episodes are bootstrapped with the value of their last observation."""
    return cfg.env.truncates and cfg.ppo.bootstrap_truncated


@reads_scalars_apart
def estimate_final_value(
    cfg: Config, world: object, params: object, trajectory: Transition[Any]
) -> F32[Tensor, "T B"]:
    """Compute V of the last observation of each truncated episode, [T, B], at its last step; 0 elsewhere.

    Computed for the whole trajectory at once, so that rollouts call the network once a step.
    """
    if not uses_final_obs(cfg):
        return torch.zeros_like(trajectory.reward)
    obs, memory = _rows((trajectory.final_obs, trajectory.final_memory))
    output, _ = apply_agent(cfg.agent, world, params, obs, memory)
    return torch.where(
        trajectory.truncated, output.value.view_as(trajectory.reward), 0.0
    )


def estimate_value(
    cfg: Config,
    world: object,
    params: object,
    env_state: object,
    memory: Memory = (),
) -> F32[Tensor, "B"]:
    """Compute V [B] of an environment state, given the network's memory before it."""
    obs = cfg.env.observe(cfg.env.cfg, world, env_state)
    output, _ = apply_agent(cfg.agent, world, params, obs, memory)
    return output.value


def unroll(
    cfg: Config,
    world: object,
    params: object,
    rollout_state: RolloutState[State],
    random_inputs: RandomInputs[Any],
    scan: Scan,
    rollout_step: Callable[..., tuple[RolloutState[State], Transition[Any]]],
) -> tuple[RolloutState[State], Transition[Any]]:
    """Make all T steps of a rollout; return the last state and the trajectory [T, B].

    Args:
      random_inputs: of all steps, [T, ...].
      scan: the loop.
      rollout_step: one step.

    Returns:
      The state after the last step, and the transitions [T, B, ...].
    """
    step = partial(rollout_step, cfg, world, params)
    if not is_eager():
        return scan(step, rollout_state, random_inputs)
    with random.drawing_ahead(random_inputs.action_key, random_inputs.step_key):
        return scan(step, rollout_state, random_inputs)
