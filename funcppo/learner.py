"""A learner in three lines: `ppo` binds an environment, a network and settings; `compile` makes its step fast.

    ppo = fp.ppo(env=fp.envs.cartpole(), network=fp.nets.mlp(64, 64), n_envs=8)
    state = ppo.init(fp.random.key(0))
    state, metrics = ppo.step(state)

The functions behind it are `train_step.init` and `train_step.train_step`.

The training step as it runs: compiled and captured, or neither where a run is too short to repay it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import (
    Any,
    Generic,
    Literal,
    NamedTuple,
    TypeAlias,
    cast,
    overload,
)

import torch
from torch import Tensor

from funcppo import train_step
from funcppo.advantages import Estimate
from funcppo.checkpoint import text_of
from funcppo.config import Config, PPOConfig
from funcppo.core import random, tree
from funcppo.core.host import NO_DEADLINE, Deadline
from funcppo.core.settings import FieldError, check_kind
from funcppo.core.types import I64, Obs, Params, State, World
from funcppo.envs.checks import (
    TOLERANCE,
    FunctionError,
    call_named,
    call_twice,
    call_vectorised,
    with_named_errors,
)
from funcppo.envs.wrappers import stand_in_env
from funcppo.interfaces import (
    Agent,
    AnyAgent,
    AnyEnvironment,
    Environment,
    NetworkFactory,
    NoWorld,
    check_settings,
)
from funcppo.losses import LossFn
from funcppo.nets.networks import build_agent, describe
from funcppo.rollout import apply_agent
from funcppo.runtime import compile as compilation
from funcppo.runtime import distributed
from funcppo.runtime.capture import (
    CapturedStep,
    ReasonCode,
    are_trees_demanded,
    capture,
    cudagraph_trees_only,
    without_cuda_graphs,
)
from funcppo.runtime.compile import (
    DEFAULT_TOLERANCE,
    ROLLOUT_PARTS,
    StrategyRecord,
    choices,
    select_strategy,
    show_progress,
    with_capture,
    with_failure,
)
from funcppo.runtime.distributed import Agree, Processes, alone
from funcppo.train_step import (
    EAGER_PARTS,
    Metrics,
    Rollout,
    StepFunctions,
    TrainState,
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Learner(Generic[Params, State]):
    """Proximal policy optimisation of one network in one environment, as two pure functions: `init` and `step`."""

    cfg: Config
    world: object  # tensors of the environment that no step changes
    # the processes that share its shards: see `distribute`; None: this one has all
    group: Processes | None = None

    def init(self, key: I64[Tensor, "2"]) -> TrainState[Params, State]:
        """Build the state before the first update, on the key's device. Among several processes, rank 0's key is used.

        Raises:
          TypeError: params, or the state of the environment, are no tree of tensors.
          ValueError: as `init_whole`.
        """
        return self.scatter(self.init_whole(key))

    def init_whole(self, key: I64[Tensor, "2"]) -> TrainState[Params, State]:
        """Build the state before the first update, with all shards.

        Raises:
          TypeError: params, or the state of the environment, are no tree of tensors.
          ValueError: one line that names a function of the environment or the network, which reads a world where there
            is none, or takes other arguments.
        """
        return train_step.init(_with_named_errors(self.cfg), self.world, key)

    def scatter(
        self, state: TrainState[Params, State]
    ) -> TrainState[Params, State]:
        """Return this process's share of a whole state; in a single process, the whole state.

        Of several processes each must call it; the state of rank 0 counts.
        """
        if self.group is None:
            return state
        state = self.group.broadcast(state)
        return train_step.take_shards(
            state, self.group.rank, self.group.world_size
        )

    def gather(
        self, state: TrainState[Params, State]
    ) -> TrainState[Params, State]:
        """Return the whole state, to be saved or evaluated, given this process's share of it.

        Of several processes each must call it, and each receives the whole.
        """
        if self.group is None:
            return state
        update = int(state.update)
        with self.group.collective(f"gathering update {update}"):
            return train_step.gather_shards(state, self.group.all_gather)

    def step(
        self, state: TrainState[Params, State]
    ) -> tuple[TrainState[Params, State], Metrics]:
        """Make one update, a rollout of n_steps and n_epochs over it; return the next state and the metrics.
        The given state is left unchanged.

        Returns:
          The state after the update, and its metrics.

        Raises:
          TypeError: the environment or the network returns a tensor of another shape or dtype than `interfaces` says;
            or what is handed in is no state, or its params and moments differ in dtype.
          ValueError: it is a state of another learner, with which this one fails; or one line that names a function of
            the environment, which reads a world where there is none, or takes other arguments.
        """
        if torch.compiler.is_compiling():
            return train_step.train_step(self.cfg, self.world, state)
        with own_state(self, state, "step"):
            return train_step.train_step(self.cfg, self.world, state)


def _with_named_errors(cfg: Config) -> Config:
    """Return the config with functions whose errors name them, not for steps, which are cached by their functions."""
    agent = cfg.agent
    named = {"init": partial(call_named, "init of the network", agent.init)}
    if agent.initial_memory is not None:
        named["initial_memory"] = partial(
            call_named, "initial_memory", agent.initial_memory
        )
    return replace(
        cfg, env=with_named_errors(cfg.env), agent=replace(agent, **named)
    )


class _Learnt(NamedTuple):
    """Tensors that gradients change in an update; all share one dtype."""

    params: object
    mu: object
    nu: object


def _check_state(state: Any) -> None:
    """Check a state that a user hands in and may have modified: its type, and one dtype for parameters and moments.

    Raises:
      TypeError: it is no state, or one of several learners, or its params and moments differ in dtype.
    """
    expected = "state: expected a TrainState, as init returns it"
    check_kind(state, TrainState, expected)
    if state.update.ndim:
        raise TypeError(
            f"state: expected that of one learner, got {len(state.update)} stacked: fp.tree.item(state, 0) is the first"
        )
    moments = state.opt_state
    learnt = _Learnt(state.params, moments.mu, moments.nu)
    tree.check_common_dtype(learnt, "state")


# For code that serves all learners.
AnyLearner: TypeAlias = Learner[Any, Any]
AnyState: TypeAlias = TrainState[Any, Any]


@contextmanager
def own_state(
    learner: AnyLearner, state: AnyState, name: str
) -> Generator[None]:
    """Check the state that a function receives, and explain an error that the state causes in the block.

    Args:
      name: of the function.

    Raises:
      TypeError: it is no state, or its params and moments differ in dtype.
      ValueError: one line that names the first tensor of another shape or dtype than the learner's, or the function of
        the environment that reads a world where there is none, or takes other arguments.
    """
    _check_state(state)
    try:
        yield
    except Exception as error:
        # The step of several processes waits for the others.
        if learner.group is None and learner.cfg.env.host is None:
            problem = _explain_failure(learner, state, name)
            if problem:
                raise ValueError(problem) from error
        raise


def _explain_failure(learner: AnyLearner, state: AnyState, name: str) -> str:
    """Make a first state to name the tensor that differs from its own, or the function that fails; else empty."""
    cfg, world = _with_named_errors(learner.cfg), learner.world
    try:
        own = train_step.init(cfg, world, random.key(0, state.key.device))
        for part in ("env_state", "params"):
            value, like = getattr(state, part), getattr(own, part)
            place = f"{name}: state.{part}"
            tree.check_layout(value, like, place, FunctionError)
    except FunctionError as problem:
        return str(problem)
    except Exception:  # the first error says what it is
        pass
    return ""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CompiledLearner(Generic[Params, State]):
    """Learner whose step is compiled and, on a GPU, replayed as a CUDA graph."""

    # which strategy is in use, how it is replayed, and why no faster one is
    record: StrategyRecord
    # The step and the buffers that it works in: a state and, if there is `roll_out`, a rollout.
    captured: CapturedStep[Any, Metrics]
    # Makes a rollout from a state, where environments step on the host: the step then only learns from it.
    roll_out: Callable[[TrainState[Params, State]], Rollout] | None = None

    def step(
        self, state: TrainState[Params, State]
    ) -> tuple[TrainState[Params, State], Metrics]:
        """Make one update like `Learner.step`; return the next state and the metrics.

        The state that is returned lives in buffers that the next call overwrites. So call `state, metrics =
        fast.step(state)` in a loop, and copy a state that must outlive the next call: `fp.tree.map(torch.clone,
        state)`. A state from elsewhere (of `Learner.init`, a copy, a checkpoint) is copied into the buffers first and
        stays as it is. The metrics are the caller's to hold.

        Raises:
          ValueError: the state has other shapes, dtypes or devices than the one that the learner was compiled for.
        """
        captured, given = self.captured, state
        if self.roll_out is not None:
            given = (state, self.roll_out(state))
        if given is not captured.state:
            captured.load(given)
        metrics = tree.map(torch.clone, captured.step())
        after = captured.state
        return after if self.roll_out is None else after[0], metrics


@overload
def ppo(
    *,
    env: Environment[World, State, Obs, Any],
    network: Agent[World, Params, Obs, Any],
    world: World | None = None,
    **options: Any,
) -> Learner[Params, State]: ...
@overload
def ppo(
    *,
    env: Environment[World, State, Any, Any],
    network: NetworkFactory,
    world: World | None = None,
    **options: Any,
) -> Learner[Any, State]: ...
def ppo(
    *,
    env: object,
    network: object,
    world: object = None,
    loss: LossFn | None = None,
    advantages: Callable[..., Estimate] | None = None,
    **options: Any,
) -> AnyLearner:
    """Build a learner: proximal policy optimisation of a network in an environment.

    Args:
      env: the environment, e.g. `fp.envs.cartpole()` or one of your own (`funcppo.interfaces`).
      network: the network, as an `Agent` or as a function that builds one for the environment's `spec`, such as
        `fp.nets.mlp(64, 64)`.
      world: a tree of tensors that the environment and the network read and no step changes; None if there are none.
      loss: loss of a minibatch with the arguments and results of `losses.loss_fn`, which is used by default.
      advantages: estimator with the arguments and results of `advantages.estimate_gae`, which is used by default.
      options: fields of `PPOConfig`, e.g. `n_envs=8`.

    Returns:
      A learner with the pure functions `init(key) -> state` and `step(state) -> (state, metrics)`.

    Raises:
      TypeError: an argument is of the wrong kind, a tensor is among settings, or an option is unknown.
      ValueError: an option is out of range, or a network cannot be built for the environment.

    Source: Schulman et al. 2017, arXiv:1707.06347.
    """
    if not isinstance(env, Environment):
        raise TypeError(
            f"env: expected an Environment, got {describe(env)}; "
            "fp.envs.make and fp.envs.gymnasium build one by its name"
        )
    env = cast(AnyEnvironment, env)
    if env.host is not None and env.host.n_envs is not None:
        options = {"n_envs": env.host.n_envs} | options
    check_settings(env.cfg, "env.cfg")
    for name, fn in {"loss": loss, "advantages": advantages}.items():
        _check_arguments(name, fn)

    names = [field.name for field in fields(PPOConfig)]
    for name in options:
        if name not in names:
            raise TypeError(
                f"{name}: expected one of the options {', '.join(names)}"
            )
    ppo_config = PPOConfig(**options)
    agent = _build_agent(network, env)
    check_settings(agent.cfg, "agent.cfg")
    world = NoWorld() if world is None else world
    for path, tensor in tree.named_leaves(world, "world"):
        check_kind(tensor, Tensor, f"{path}: expected a tensor")
    cfg = Config(
        ppo=ppo_config,
        env=env,
        agent=agent,
        loss=loss,
        advantages=advantages,
    )
    return Learner(cfg=cfg, world=world)


# Arguments of a loss, and of an estimator of advantages.
_ARGUMENTS = {
    "loss": ("cfg", "world", "params", "batch", "scalars"),
    "advantages": ("cfg", "world", "params", "steps", "scalars"),
}


def _check_arguments(name: str, fn: object) -> None:
    """Check that a loss or an estimator is a function of the arguments that it is called with.

    Raises:
      TypeError: it is not.
    """
    if fn is None:
        return
    names = _ARGUMENTS[name]
    expected = f"{name}: expected a function of {', '.join(names)}"
    if not callable(fn):
        raise TypeError(f"{expected}, got {describe(fn)}")
    try:
        inspect.signature(fn).bind(*names)
    except TypeError as error:
        raise TypeError(f"{expected}, got {describe(fn)}: {error}") from None
    except ValueError:  # of compiled code without a signature
        return


def _build_agent(network: object, env: AnyEnvironment) -> AnyAgent:
    if isinstance(network, Agent):
        return cast(AnyAgent, network)
    if isinstance(network, torch.nn.Module):
        raise TypeError(
            f"network: expected an Agent or a function of an EnvironmentSpec, got the module {type(network).__name__}; "
            "an Agent applies it by torch.func.functional_call (docs/write_a_network.md)"
        )
    if env.spec is None:
        raise ValueError(
            "env.spec: expected an EnvironmentSpec to build the network for, got None; or hand in an Agent"
        )
    return build_agent("network", network, env.spec)


def distribute(learner: Learner[Params, State]) -> Learner[Params, State]:
    """Share the shards of a learner equally among the processes that torchrun started; return this process's learner.

        torchrun --nproc-per-node 2 learn.py

    Every process runs the same program. Parameters, moments and metrics are equal in all of them, and equal to those of
    one process. Call it before the first tensor on a GPU: each process then uses the GPU of its number as "cuda".

    Args:
      learner: of `ppo`, with `n_shards` a multiple of the number of processes.

    Returns:
      The learner, whose states hold the shards of this process: see its `scatter` and `gather`. The learner as it is
      where there is one process.

    Raises:
      ValueError: the shards cannot be shared equally; or versions, settings or kinds of device differ between the
        processes.
      StalledError: some process does not come.
    """
    world_size = distributed.launched_size()
    if world_size <= 1:
        return learner
    n_shards = learner.cfg.ppo.n_shards
    if n_shards == 1 or n_shards % world_size:
        raise ValueError(
            f"n_shards: expected a multiple of the {world_size} processes, got {n_shards}"
        )

    if distributed.current_processes() is None:
        distributed.choose_gpu()
    processes = distributed.join({}, hide_gpus=False)
    assert processes is not None
    facts = {
        "settings": settings_text(learner.cfg),
        "threads": torch.get_num_threads(),
        **distributed.gpu_facts("cuda" if torch.cuda.is_available() else "cpu"),
    }
    group = distributed.connect(processes, facts)
    cfg = replace(learner.cfg, gather_shards=group.all_gather)
    return replace(learner, cfg=cfg, group=group)


def settings_text(cfg: Config) -> dict[str, str]:
    """Return {setting: its text}, equal in every process, to compare a checkpoint with its learner."""
    owners = {"": cfg.ppo, "env.": cfg.env, "agent.": cfg.agent}
    read = {
        f"{owner}{field.name}": getattr(settings, field.name)
        for owner, settings in owners.items()
        for field in fields(settings)
    }
    host = read.pop("env.host")
    read |= {"loss": cfg.loss, "advantages": cfg.advantages}
    if host is not None:
        read["env.host.check"] = host.check
    return {name: text_of(value) for name, value in read.items()}


def compile(
    learner: Learner[Params, State],
    state: TrainState[Params, State],
    *,
    strategy: str = "auto",
    backend: str = "inductor",
    tolerance: float = DEFAULT_TOLERANCE,
    graphs: Literal["auto", "off", "trees"] = "auto",
) -> CompiledLearner[Params, State]:
    """Compile a learner's step by the fastest strategy that works here, and capture it as a CUDA graph on a GPU.

    A strategy is used only if its results equal those of the eager step. Compiling takes a minute or two the first
    time; results are cached on disk. The logger `funcppo.compile`, or a terminal, shows each part and its seconds.

    Args:
      state: a state of the learner, to try strategies on; it is copied, and left as it is.
      strategy: "auto", or one of `runtime.compile.STRATEGIES`: see `runtime.compile.select_strategy`.
      backend: a backend of `torch.compile`.
      tolerance: largest relative difference from the eager step; `runtime.compile.BF16_TOLERANCE` for matrix
        products in bfloat16.
      graphs: how a GPU replays the step. auto: as one CUDA graph where it can be recorded; off: as none; trees: by
        those that PyTorch records of compiled functions (`mode="reduce-overhead"`), to compare with.

    Returns:
      A learner with a `step` of the same contract, and the `record` of what was tried.

    Raises:
      ValueError: there is no such strategy; or a function of the environment or the network overwrites an argument, or
        differs when it is called again with the same key, which is tried on one step before anything is compiled.
      TypeError: what is handed in is no state, or its params and moments differ in dtype.
      Exception: whatever a strategy that is chosen by name raises.
    """
    _check_state(state)
    check_functions(learner, state)
    allowed = {
        "auto": nullcontext(),
        "off": without_cuda_graphs("turned off by graphs='off'"),
        "trees": cudagraph_trees_only(),
    }
    if graphs not in allowed:
        raise FieldError("graphs", ", ".join(allowed), graphs)
    group = learner.group
    with allowed[graphs], show_progress():
        if group is None:
            return _compile(learner, state, strategy, backend, tolerance)
        with group.deadline("compiling the training step"):
            compiled = _compile(learner, state, strategy, backend, tolerance)
            group.check_equal(choices(compiled.record))
        return compiled


def check_functions(learner: AnyLearner, state: AnyState) -> None:
    """Check on one step that network and environment are pure; an environment on the host is skipped.

    Raises:
      ValueError: one line that names the function, and the tensor, which it overwrites or which differs when it is
        called again.
    """
    cfg, world = _with_named_errors(learner.cfg), learner.world
    key = state.key.view(-1, 2)[0]  # of the first shard
    call = partial(call_twice, tolerance=TOLERANCE, bound_world=world)
    with torch.no_grad():
        sample = cfg.agent.distribution.sample
        _try_functions(cfg, world, state, key, call, sample)


def check_vectorised(learner: AnyLearner, states: AnyState) -> None:
    """Check on one step of several learners that `torch.vmap` maps network and environment.

    Args:
      states: of the learners, stacked.

    Raises:
      ValueError: one line that names the function, which cannot be mapped.
    """

    def call(name: str, fn: Callable[..., Any], **arguments: Any) -> Any:
        return call_vectorised(name, fn, *arguments.values())

    n_learners = len(states.update)
    key = states.key.view(n_learners, -1, 2)[:, 0]  # of the first shard
    sample = torch.vmap(learner.cfg.agent.distribution.sample)
    with torch.no_grad():
        _try_functions(learner.cfg, learner.world, states, key, call, sample)


def _try_functions(
    cfg: Config,
    world: object,
    state: AnyState,
    key: I64[Tensor, "... 2"],
    call: Callable[..., Any],
    sample: Callable[..., Tensor],
) -> None:
    """Call each pure function of environment and network once through `call`."""
    env, env_state = cfg.env, state.env_state
    settings = (env.cfg, world)
    n_rows = tree.leaves(env_state)[0].shape[key.ndim - 1]
    step_keys = random.split(key, n_rows)
    if env.host is None:
        call("reset", partial(env.reset, *settings), key=step_keys)
    obs = call("observe", partial(env.observe, *settings), state=env_state)
    output, _ = call(
        "apply of the network",
        partial(apply_agent, cfg.agent, world),
        params=state.params,
        observation=obs,
        memory=state.memory,
    )

    if env.host is None:
        call(
            "step_functional",
            partial(env.step_functional, *settings),
            state=env_state,
            action=sample(key, output),
            key=step_keys,
        )


def _compile(
    learner: Learner[Params, State],
    state: TrainState[Params, State],
    strategy: str,
    backend: str,
    tolerance: float,
) -> CompiledLearner[Params, State]:
    """Compile and capture the learner's step; several processes try the same strategies together."""
    world = learner.world
    agree = learner.group.first_failure if learner.group else alone

    # Trials and compiled functions know an environment on the host by its stand-in alone, which is pure.
    is_on_host = learner.cfg.env.host is not None
    cfg = replace(learner.cfg, env=stand_in_env(learner.cfg.env))
    compiled_parts = set(ROLLOUT_PARTS)
    if is_on_host:
        compiled_parts.remove("rollout_step")
    parts, record = select_strategy(
        train_step.collect,
        EAGER_PARTS,
        cfg,
        world,
        state,
        strategy,
        backend,
        tolerance,
        tuple(compiled_parts),
        agree,
    )

    step: Any = partial(train_step.train_step, cfg, world, parts=parts)
    first: Any = state
    roll_out = None
    if is_on_host:
        step = partial(_learn, cfg, world, parts)
        first = (state, train_step.roll_out(cfg, world, state))
        roll_out = partial(_roll_out, learner, cfg, parts)
        reason = "the environment steps on the host, which can be neither compiled nor captured"
        code = ReasonCode.HOST_ENVIRONMENT
        record = with_failure(record, "rollout_step", reason, code)
    captured = capture(step, first, agree=agree)
    return CompiledLearner(
        record=with_capture(record, captured),
        captured=captured,
        roll_out=roll_out,
    )


def _roll_out(
    learner: AnyLearner,
    cfg: Config,
    parts: StepFunctions,
    state: AnyState,
) -> Rollout:
    """Roll out host environments, with the random numbers that the compiled functions sample.

    Args:
      cfg: with the stand-in of the environment.
    """

    def sample_randomness(
        _: Config, world: object, key: I64[Tensor, "2"]
    ) -> train_step.UpdateRandomness:
        return parts.sample_randomness(cfg, world, key)

    host_parts = replace(EAGER_PARTS, sample_randomness=sample_randomness)
    return train_step.roll_out(learner.cfg, learner.world, state, host_parts)


def _learn(
    cfg: Config,
    world: object,
    parts: StepFunctions,
    state_and_rollout: tuple[AnyState, Rollout],
) -> tuple[tuple[AnyState, Rollout], Metrics]:
    """Learn from a rollout; return (next state, the same rollout) and the metrics."""
    state, rollout = state_and_rollout
    next_state, metrics = train_step.train_step(
        cfg, world, state, parts, rollout
    )
    return (next_state, rollout), metrics


# Rollout steps and minibatch updates from which compiling repays. It takes a minute or two, and saves 1.5 ms on each of
# them on a GPU, 8 ms on a CPU.
COMPILE_MIN_CALLS = 40_000
COMPILE_MIN_SECONDS = 36.0  # left for the updates
CHECKPOINT_SECONDS = 60.0  # between two checkpoints, validations aside


def prepare_step(
    cfg: Config,
    world: object,
    state: TrainState[Any, Any],
    parts: StepFunctions,
    strategy: str,
    tolerance: float = DEFAULT_TOLERANCE,
    agree: Agree = alone,
    deadline: Deadline = NO_DEADLINE,
    decide: Callable[[bool], bool] = bool,
) -> tuple[CapturedStep[TrainState[Any, Any], Metrics], StrategyRecord]:
    """Compile or capture a training step; strategy auto compiles only if the run is long enough to repay it.

    Args:
      state: the first state; it is copied.
      parts: `EAGER_PARTS`, or `vmap_parts` of them for stacked states.
      strategy: as of `runtime.compile.select_strategy`.
      tolerance, agree: likewise.
      deadline: of the updates.
      decide: whether auto compiles, given whether it repays by the length of the run.

    Returns:
      The step, and the record of the strategy that it uses and why.

    Raises:
      Exception: whatever a strategy raises that was set by name and fails.
    """
    step = partial(train_step.train_step, cfg, world)
    calls = n_calls(cfg.ppo)
    repays = calls >= COMPILE_MIN_CALLS
    repays &= deadline.seconds_left >= COMPILE_MIN_SECONDS
    # Where graphs of compiled functions are asked for, nothing is decided.
    decides = strategy == "auto" and not are_trees_demanded()
    is_short = decides and not decide(repays)

    # Where the compiler is turned off, that is the reason.
    device_type = state.key.device.type
    is_reason = is_short and not compilation.reason_against_compiling(
        device_type
    )
    parts, record = select_strategy(
        train_step.collect,
        parts,
        cfg,
        world,
        state,
        "eager" if is_reason else strategy,
        tolerance=tolerance,
        agree=agree,
    )

    captured = capture(partial(step, parts=parts), state, agree=agree)
    if is_reason:
        reason = (
            f"that would take longer than it saves: {calls:,} rollout steps and minibatches, repaid from "
            f"{COMPILE_MIN_CALLS:,} on in {COMPILE_MIN_SECONDS:g} s (--strategy one-graph compiles)"
        )
        failure = compilation.Failure(
            name="compiling", message=reason, code=ReasonCode.SHORT_RUN
        )
        record = replace(record, failures=(failure,))
    record = with_capture(record, captured)
    return captured, record


def n_calls(ppo: PPOConfig) -> int:
    """Count the rollout steps and microbatches of a whole run."""
    microbatches_per_update = (
        ppo.n_epochs * ppo.n_minibatches * ppo.n_microbatches
    )
    return ppo.n_updates * (ppo.n_steps + microbatches_per_update)


def describe_strategy(record: StrategyRecord) -> str:
    """Format on one line which strategy is used, and why others are not."""
    line = f"strategy {record.strategy} on {record.device}, replayed by: {record.replay_mode}"
    if record.rollout == "kernel":
        line += "; the rollout is one kernel"
    if record.network == "kernels":
        line += "; kernels compute the network of the update"
    if record.failures:
        line += f" ({'; '.join(map(str, record.failures))})"
    return line
