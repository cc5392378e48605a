"""Structural types that the runtime's modules share: the members of a training step that they read.

The runtime compiles, checks and replays the functions of a training step, but imports none of them. These protocols
say what it expects of its arguments. `train_step.Parts`, `minibatch.MinibatchParts`, `train_step.collect`,
`config.Config`, `train_step.TrainState` and `train_step.RolloutResult` satisfy them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field
from typing import Any, ClassVar, Literal, Protocol, TypeVar

from torch import Tensor

from funcppo.runtime.reasons import FallbackCode

Result = TypeVar("Result", covariant=True)


class TensorFunction(Protocol[Result]):
    """A pure function of trees of tensors and of frozen settings."""

    def __call__(self, *args: Any, **kwargs: Any) -> Result:
        """Return the function's value; no argument is written to."""
        ...


class MinibatchParts(Protocol):
    """The functions from which a minibatch step can be composed: see `minibatch.MinibatchParts`."""

    @property
    def accumulate_gradients(self) -> TensorFunction[tuple[object, object]]:
        """The gradient of a minibatch, averaged over its microbatches, and the metrics of the loss."""
        ...

    @property
    def apply_gradients(self) -> TensorFunction[tuple[object, object]]:
        """The update state after clipping and one Adam step, and the metrics of the minibatch."""
        ...

    @property
    def loss_gradient(self) -> TensorFunction[tuple[object, object]]:
        """The gradient of the loss over some rows, and the metrics of the loss."""
        ...

    @property
    def minibatch_loss(self) -> TensorFunction[tuple[Tensor, object]]:
        """The loss over some rows, and its metrics."""
        ...


class TrainingParts(Protocol):
    """The functions that a training step calls, as fields of a dataclass: see `train_step.Parts`."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def scan(self) -> TensorFunction[tuple[object, object]]:
        """Thread a carry through a function over a leading axis: the last carry, and the outputs stacked."""
        ...

    @property
    def sample_randomness(self) -> TensorFunction[object]:
        """Random inputs of the rollout, and the rows of every minibatch."""
        ...

    @property
    def rollout_step(self) -> TensorFunction[object]:
        """One transition of every environment."""
        ...

    @property
    def unroll(self) -> Callable[..., object]:
        """All transitions of a rollout."""
        ...

    @property
    def build_batch(self) -> TensorFunction[object]:
        """The trajectory with advantages and value targets, flattened."""
        ...

    @property
    def minibatch_step(self) -> TensorFunction[tuple[object, object]]:
        """The update state after one minibatch, and the metrics of the minibatch."""
        ...

    @property
    def minibatch_parts(self) -> MinibatchParts:
        """What a strategy composes a minibatch step from."""
        ...

    @property
    def kernel_rollout_step(self) -> TensorFunction[object]:
        """As `rollout_step`, with a network of kernels."""
        ...

    @property
    def kernel_actor_step(self) -> TensorFunction[object]:
        """As `rollout_step`, without the values, which nothing in a rollout waits for."""
        ...

    @property
    def kernel_values(self) -> TensorFunction[object]:
        """The values of a whole rollout, by a kernel."""
        ...

    @property
    def kernel_build_batch(self) -> TensorFunction[object]:
        """As `build_batch`, with a network of kernels."""
        ...

    @property
    def kernel_minibatch_step(self) -> TensorFunction[tuple[object, object]]:
        """As `minibatch_step`, with a network of kernels."""
        ...

    @property
    def reason_against_kernels(self) -> Callable[[Any], str]:
        """Why the network of some settings cannot be computed by kernels; empty if it can."""
        ...


class UpdateSettings(Protocol):
    """The setting of PPO's update that decides which strategies make sense."""

    @property
    def n_microbatches(self) -> int:
        """Gradient-accumulation steps per minibatch."""
        ...


class TrainingConfig(Protocol):
    """The configuration of a training step: see `config.Config`."""

    @property
    def ppo(self) -> UpdateSettings:
        """Settings of PPO."""
        ...


class TrainingState(Protocol):
    """A training state: see `train_step.TrainState`."""

    @property
    def params(self) -> object:
        """Parameters of the network, a tree."""
        ...

    @property
    def key(self) -> Tensor:
        """PRNG key of the next update; its device is the device of the training step."""
        ...


class CollectedData(Protocol):
    """The inputs of the minibatch updates: see `train_step.RolloutResult`."""

    @property
    def batch(self) -> object:
        """The rows to learn from."""
        ...

    @property
    def scalars(self) -> object:
        """Scheduled scalars of this update."""
        ...

    @property
    def update_state(self) -> object:
        """The carry of the loop over minibatches."""
        ...

    @property
    def minibatches(self) -> object:
        """The inputs of that loop, one minibatch along the leading axis."""
        ...


ConfigIn = TypeVar("ConfigIn", bound=TrainingConfig, contravariant=True)
WorldIn = TypeVar("WorldIn", contravariant=True)
StateIn = TypeVar("StateIn", bound=TrainingState, contravariant=True)
PartsIn = TypeVar("PartsIn", bound=TrainingParts, contravariant=True)


class Collect(Protocol[ConfigIn, WorldIn, StateIn, PartsIn]):
    """The first half of a training step: see `train_step.collect`."""

    def __call__(
        self, cfg: ConfigIn, world: WorldIn, state: StateIn, parts: PartsIn, /
    ) -> CollectedData:
        """Sample the random inputs, run the rollout, and estimate advantages."""
        ...


# how a step is replayed, if at all; "cuda-graph-trees": its compiled functions are, by PyTorch
ReplayMode = Literal[
    "none", "cuda-graph", "cuda-graph-per-loop-body", "cuda-graph-trees"
]


class CaptureOutcome(Protocol):
    """The outcome of a capture: see `capture.CapturedStep`."""

    @property
    def replay_mode(self) -> ReplayMode:
        """How the step is replayed."""
        ...

    @property
    def fallback_reason(self) -> str:
        """Why the step is no CUDA graph; empty if it is one."""
        ...

    @property
    def fallback_code(self) -> FallbackCode | None:
        """The same as a code; None if the step is one."""
        ...

    @property
    def n_graphs(self) -> int:
        """Number of CUDA graphs recorded."""
        ...

    @property
    def capture_ms(self) -> float:
        """Milliseconds that recording took."""
        ...
