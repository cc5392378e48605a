"""Distributions over actions, read from a network's output.

    CATEGORICAL           one of S actions
    MULTI_CATEGORICAL     several actions at once, independent of each other
    DIAGONAL_GAUSSIAN     a vector of real numbers
    SQUASHED_GAUSSIAN     a vector of numbers between -1 and 1

The logit of an illegal action is -inf, or the smallest finite number: either way it has probability 0, is never
sampled, and adds nothing to entropy or gradients. Each row has at least one legal action.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Generic, Protocol

import torch
from numpy.polynomial.hermite_e import hermegauss
from torch import Tensor
from typing_extensions import TypeVar

from funcppo.core import random
from funcppo.core.types import F32, I64

Output = TypeVar("Output", infer_variance=True)

N_QUADRATURE_NODES = 8  # of the entropy of a squashed Gaussian


def _quadrature(n: int) -> tuple[tuple[float, float], ...]:
    """Nodes and weights of the mean over a standard normal number."""
    nodes, weights = hermegauss(n)
    return tuple(zip(nodes.tolist(), (weights / weights.sum()).tolist()))


QUADRATURE = _quadrature(N_QUADRATURE_NODES)


class SampleFn(Protocol[Output]):
    """Samples an action [B, ...] from a network's output."""

    def __call__(self, key: I64[Tensor, "2"], output: Output, /) -> Tensor: ...


class LogProbFn(Protocol[Output]):
    """Returns the log-probability, or log-density, of each row's action."""

    def __call__(
        self, output: Output, action: Tensor, /
    ) -> F32[Tensor, "B"]: ...


class EntropyFn(Protocol[Output]):
    """Returns the entropy of each row's distribution, in nats."""

    def __call__(self, output: Output, /) -> F32[Tensor, "B"]: ...


class ModeFn(Protocol[Output]):
    """Returns the most probable action [B, ...]."""

    def __call__(self, output: Output, /) -> Tensor: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Distribution(Generic[Output]):
    """How a network's output is read as a distribution over actions.

    Functions that another process can import by name let the parts of a training step compile side by side
    (`runtime/parallel_compile.py`).
    """

    sample: SampleFn[Output]
    log_prob: LogProbFn[Output]
    entropy: EntropyFn[Output]
    mode: ModeFn[Output]


class HasLogits(Protocol):
    """An output that stands for a categorical distribution."""

    @property
    def logits(self) -> F32[Tensor, "B S"]: ...


class HasPrior(HasLogits, Protocol):
    """An output that stands for a categorical distribution, and for the prior that its entropy is relative to."""

    @property
    def prior_logits(self) -> F32[Tensor, "B S"]: ...


class HasMeanAndStd(Protocol):
    """An output that stands for a normal distribution with independent components."""

    @property
    def mean(self) -> F32[Tensor, "B U"]: ...

    @property
    def log_std(self) -> F32[Tensor, "B U"]: ...


def _categorical_sample(
    key: I64[Tensor, "2"], output: HasLogits
) -> I64[Tensor, "B"]:
    return random.categorical(key, torch.log_softmax(output.logits, -1))


def _categorical_log_prob(
    output: HasLogits, action: I64[Tensor, "B"]
) -> F32[Tensor, "B"]:
    return (
        torch.log_softmax(output.logits, -1)
        .gather(-1, action.unsqueeze(-1))
        .squeeze(-1)
    )


def _categorical_entropy(output: HasLogits) -> F32[Tensor, "B"]:
    log_p = torch.log_softmax(output.logits, -1)
    p = log_p.exp()
    # 0 log 0 = 0. The logarithm is replaced before the product: 0 times -inf is NaN, in the gradient even where a mask
    # leaves it out of the sum.
    return -(p * torch.where(p > 0, log_p, 0.0)).sum(-1)


def _categorical_mode(output: HasLogits) -> I64[Tensor, "B"]:
    return output.logits.argmax(-1)


CATEGORICAL: Distribution[HasLogits] = Distribution(
    sample=_categorical_sample,
    log_prob=_categorical_log_prob,
    entropy=_categorical_entropy,
    mode=_categorical_mode,
)


class HasSeveralLogits(Protocol):
    """An output that stands for D independent categorical distributions; shorter ones are filled up by -inf."""

    @property
    def logits(self) -> F32[Tensor, "B D S"]: ...


def _multi_categorical_log_prob(
    output: HasSeveralLogits, action: I64[Tensor, "B D"]
) -> F32[Tensor, "B"]:
    return _categorical_log_prob(output, action).sum(-1)


def _multi_categorical_entropy(output: HasSeveralLogits) -> F32[Tensor, "B"]:
    return _categorical_entropy(output).sum(-1)


MULTI_CATEGORICAL: Distribution[HasSeveralLogits] = Distribution(
    sample=_categorical_sample,
    log_prob=_multi_categorical_log_prob,
    entropy=_multi_categorical_entropy,
    mode=_categorical_mode,
)


def negative_kl_to_prior(out: HasPrior) -> F32[Tensor, "B"]:
    """-KL(policy, prior) in nats, the entropy relative to the prior.

    As a bonus it draws the policy to the prior and not to uniform choices: with weight tau the best policy is
    proportional to prior * exp(Q / tau), where Q is the return of each action.

    Source: Todorov 2009, "Efficient computation of optimal actions", PNAS 106(28).
    """
    log_p = torch.log_softmax(out.logits, -1)
    log_prior = torch.log_softmax(out.prior_logits, -1)
    p = log_p.exp()
    # An action of probability 0 adds nothing; its logarithm would make the product not a number.
    summands = torch.where(p > 0, p * (log_p - log_prior), 0.0)
    return -summands.sum(-1)


KL_REGULARISED_CATEGORICAL: Distribution[HasPrior] = Distribution(
    sample=_categorical_sample,
    log_prob=_categorical_log_prob,
    entropy=negative_kl_to_prior,
    mode=_categorical_mode,
)


def _gaussian_sample(
    key: I64[Tensor, "2"], output: HasMeanAndStd
) -> F32[Tensor, "B U"]:
    return output.mean + output.log_std.exp() * random.normal(
        key, tuple(output.mean.shape)
    )


def _gaussian_log_prob(
    output: HasMeanAndStd, action: F32[Tensor, "B U"]
) -> F32[Tensor, "B"]:
    z = (action - output.mean) * torch.exp(-output.log_std)
    return -(0.5 * z * z + output.log_std + 0.5 * math.log(2 * math.pi)).sum(-1)


def _gaussian_entropy(output: HasMeanAndStd) -> F32[Tensor, "B"]:
    return (output.log_std + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)


def _gaussian_mode(output: HasMeanAndStd) -> F32[Tensor, "B U"]:
    return output.mean


DIAGONAL_GAUSSIAN: Distribution[HasMeanAndStd] = Distribution(
    sample=_gaussian_sample,
    log_prob=_gaussian_log_prob,
    entropy=_gaussian_entropy,
    mode=_gaussian_mode,
)


# Source: Haarnoja et al. 2018, arXiv:1801.01290, appendix C.


def _squashed_sample(
    key: I64[Tensor, "2"], output: HasMeanAndStd
) -> F32[Tensor, "B U"]:
    return _squash(_gaussian_sample(key, output))


def _squashed_mode(output: HasMeanAndStd) -> F32[Tensor, "B U"]:
    """The squashed mean, which is the median: the density itself may have two peaks, at the ends."""
    return _squash(output.mean)


def _squash(u: F32[Tensor, "B U"]) -> F32[Tensor, "B U"]:
    """tanh(u); at most the largest number below 1, whose inverse is finite."""
    largest = 1.0 - torch.finfo(u.dtype).eps / 2
    return torch.tanh(u).clamp(-largest, largest)


def _squashed_log_prob(
    output: HasMeanAndStd, action: F32[Tensor, "B U"]
) -> F32[Tensor, "B"]:
    """log N(u) - sum log(1 - tanh(u)^2), u = artanh(action).

    It is exact for the action that was executed: 1 - action has no rounding error where it is small.
    """
    u = 0.5 * (torch.log1p(action) - torch.log1p(-action))
    return _gaussian_log_prob(output, u) - _log_tanh_slope(u).sum(-1)


def _squashed_entropy(output: HasMeanAndStd) -> F32[Tensor, "B"]:
    """H(N) + sum E[log(1 - tanh(u)^2)], the mean by Gauss-Hermite quadrature.

    There is no closed form. The error is below 0.001 nats a component for deviations up to 1, and 0.1 up to e.
    """
    std = output.log_std.exp()
    mean_slope = torch.zeros_like(output.mean)
    for node, weight in QUADRATURE:
        slope = _log_tanh_slope(output.mean + node * std)
        mean_slope = mean_slope + weight * slope
    return _gaussian_entropy(output) + mean_slope.sum(-1)


def _log_tanh_slope(u: F32[Tensor, "B U"]) -> F32[Tensor, "B U"]:
    """log(1 - tanh(u)^2) = 2 (log 2 - |u| - log(1 + exp(-2 |u|)))."""
    size = u.abs()
    return 2.0 * (math.log(2.0) - size - torch.log1p(torch.exp(-2.0 * size)))


SQUASHED_GAUSSIAN: Distribution[HasMeanAndStd] = Distribution(
    sample=_squashed_sample,
    log_prob=_squashed_log_prob,
    entropy=_squashed_entropy,
    mode=_squashed_mode,
)
