"""Reinforcement learning by PPO as pure functions in PyTorch, and an exact Datalog prover that PPO learns to steer.

    import funcppo as fp

Knowledge graphs:
    fp.load(source)                           a graph: a name, a folder, a file, or triples in memory
    fp.mine(graph)                            the graph with mined rules
    fp.fit(graph, out=None, **options)        a trained run; mines rules if there are none
    fp.open(folder_or_graph)                  a trained run, or a graph scored without training
    fp.Graph, fp.Knowledge                    what these return: .predict, .prove, .explain, .evaluate
    fp.Predictions, fp.ProofResult, fp.Evaluation                  what those return

Learn:
    fp.ppo(env=..., network=..., **options)   a learner: init(key) -> state, step(state) -> (state, metrics)
    fp.compile(learner, state)                the learner with a compiled step; its `record` says how and why
    fp.distribute(learner)                    the learner shared by the processes of torchrun
    fp.train(learner, total_steps)            the whole run: callbacks, logs, evaluation, checkpoints
    fp.train_many(learner, total_steps)       the same for several seeds at once
    fp.act(learner, state, obs)               actions for observations, greedy or sampled
    fp.export(learner, state, path)           the policy as a file that runs without funcppo: torch.export or ONNX
    fp.imitate(learner, obs, action)          parameters to start from, by behaviour cloning
    fp.evaluate_policy(learner, state)        returns of whole episodes, greedy and sampled, with intervals
    fp.MetricsLog(folder, "csv")              a callback that logs metrics, to TensorBoard or W&B too
    fp.Learner, fp.CompiledLearner            what these two return
    fp.TrainState, fp.Metrics                 what a step threads and returns
    fp.PPOConfig, fp.Schedule, fp.AdamConfig  the options and their defaults

Environments and networks:
    fp.envs      make("CartPole-v1"), cartpole, pendulum, acrobot, mountain_car, mountain_car_continuous,
                 recall, asterix, breakout, freeway, space_invaders;
                 gymnasium("LunarLander-v3") for any other, on the host
    fp.envs.wrappers    time limit, normalisation, frame stack, sticky actions, statistics
    fp.check(env)       raises an error that names what is wrong with an environment
    fp.nets      mlp, cnn, nature_cnn, gru, lstm, gsde
    fp.Environment, fp.EnvironmentSpec, fp.Timestep, fp.NoWorld    for an environment of your own
    fp.MaskedObservation                                           where some actions are illegal
    fp.Agent, fp.PolicyValue, fp.GaussianPolicyValue               for a network of your own
    fp.CATEGORICAL, fp.MULTI_CATEGORICAL                           distributions over actions, one or several at once,
    fp.DIAGONAL_GAUSSIAN, fp.SQUASHED_GAUSSIAN                     and over vectors, squashed to between -1 and 1

Modules:
    fp.random      explicit keys and what is sampled from them
    fp.tree        functions on trees of tensors
    fp.train_step  the training step and its parts, for full control
    fp.losses, fp.advantages    the parts of a loss, and of an estimator, of your own

Nothing is imported before it is used: `import funcppo` takes no time and does not import PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from funcppo.core import VERSION

if TYPE_CHECKING:  # the same names, for editors and type checkers
    from funcppo import advantages, envs, losses, nets, train_step
    from funcppo.config import AdamConfig, Config, PPOConfig, Schedule
    from funcppo.core import random, tree
    from funcppo.envs.checks import check
    from funcppo.interfaces import (
        CATEGORICAL,
        DIAGONAL_GAUSSIAN,
        MULTI_CATEGORICAL,
        SQUASHED_GAUSSIAN,
        Agent,
        Environment,
        EnvironmentSpec,
        MaskedObservation,
        NoWorld,
        Timestep,
    )
    from funcppo.kg.api import (
        Evaluation,
        Graph,
        Knowledge,
        Predictions,
        ProofResult,
        fit,
        load,
        mine,
        open,
    )
    from funcppo.learner import (
        CompiledLearner,
        Learner,
        compile,
        distribute,
        ppo,
    )
    from funcppo.nets.networks import GaussianPolicyValue, PolicyValue
    from funcppo.policy import act, export, imitate
    from funcppo.train_step import Metrics, TrainState
    from funcppo.trainer import MetricsLog, evaluate_policy, train, train_many

__version__ = VERSION

__all__ = [
    "CATEGORICAL",
    "DIAGONAL_GAUSSIAN",
    "MULTI_CATEGORICAL",
    "SQUASHED_GAUSSIAN",
    "AdamConfig",
    "Agent",
    "CompiledLearner",
    "Config",
    "Environment",
    "EnvironmentSpec",
    "Evaluation",
    "GaussianPolicyValue",
    "Graph",
    "Knowledge",
    "Learner",
    "MaskedObservation",
    "Metrics",
    "MetricsLog",
    "NoWorld",
    "PPOConfig",
    "PolicyValue",
    "Predictions",
    "ProofResult",
    "Schedule",
    "Timestep",
    "TrainState",
    "__version__",
    "act",
    "advantages",
    "check",
    "compile",
    "distribute",
    "envs",
    "evaluate_policy",
    "export",
    "fit",
    "imitate",
    "load",
    "losses",
    "mine",
    "nets",
    "open",
    "ppo",
    "random",
    "train",
    "train_many",
    "train_step",
    "tree",
]

_MODULES = {
    "advantages": "funcppo.advantages",
    "envs": "funcppo.envs",
    "losses": "funcppo.losses",
    "nets": "funcppo.nets",
    "random": "funcppo.core.random",
    "train_step": "funcppo.train_step",
    "tree": "funcppo.core.tree",
}

# Where each name is defined.
_SOURCES = {
    "AdamConfig": "funcppo.config",
    "Agent": "funcppo.interfaces",
    "CATEGORICAL": "funcppo.interfaces",
    "CompiledLearner": "funcppo.learner",
    "Config": "funcppo.config",
    "DIAGONAL_GAUSSIAN": "funcppo.interfaces",
    "Environment": "funcppo.interfaces",
    "EnvironmentSpec": "funcppo.interfaces",
    "GaussianPolicyValue": "funcppo.nets.networks",
    "Learner": "funcppo.learner",
    "MULTI_CATEGORICAL": "funcppo.interfaces",
    "MaskedObservation": "funcppo.interfaces",
    "Metrics": "funcppo.train_step",
    "MetricsLog": "funcppo.trainer",
    "NoWorld": "funcppo.interfaces",
    "PPOConfig": "funcppo.config",
    "PolicyValue": "funcppo.nets.networks",
    "SQUASHED_GAUSSIAN": "funcppo.interfaces",
    "Schedule": "funcppo.config",
    "Timestep": "funcppo.interfaces",
    "TrainState": "funcppo.train_step",
    "Evaluation": "funcppo.kg.api",
    "Graph": "funcppo.kg.api",
    "Knowledge": "funcppo.kg.api",
    "Predictions": "funcppo.kg.api",
    "ProofResult": "funcppo.kg.api",
    "act": "funcppo.policy",
    "check": "funcppo.envs.checks",
    "compile": "funcppo.learner",
    "distribute": "funcppo.learner",
    "evaluate_policy": "funcppo.trainer",
    "export": "funcppo.policy",
    "fit": "funcppo.kg.api",
    "imitate": "funcppo.policy",
    "load": "funcppo.kg.api",
    "mine": "funcppo.kg.api",
    "open": "funcppo.kg.api",
    "ppo": "funcppo.learner",
    "train": "funcppo.trainer",
    "train_many": "funcppo.trainer",
}


def __getattr__(name: str) -> object:
    """Import a public name of the package when it is first used (PEP 562), and return its value."""
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name in _SOURCES:
        value = getattr(importlib.import_module(_SOURCES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'funcppo' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
