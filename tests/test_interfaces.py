"""Environments and networks are checked where they meet a learner; distributions over actions equal PyTorch's."""

import math
from functools import partial

import pytest
import torch

from funcppo.core import random
from funcppo.interfaces import (
    CATEGORICAL,
    DIAGONAL_GAUSSIAN,
    MULTI_CATEGORICAL,
    SQUASHED_GAUSSIAN,
    Agent,
    EnvironmentSpec,
)
from funcppo.nets.networks import GaussianPolicyValue, PolicyValue


def nothing(*args):
    raise AssertionError("never called")


@pytest.mark.parametrize(
    ("sizes", "got"),
    [
        ({"observation_size": 2.0}, "observation_size: expected an integer"),
        ({"observation_size": -2}, "observation_size: expected 0 or more"),
        ({"action_size": 0}, "action_size: expected 1 or more, got 0"),
        ({"observation_shape": (3, 0)}, "observation_shape: expected 1 or"),
        ({"action_sizes": (2, True)}, "action_sizes: expected an integer"),
        ({"action_sizes": (3, 2)}, "action_sizes: .* action_size = 2"),
        ({"continuous_actions": 1}, "continuous_actions: expected true or"),
    ],
)
def test_spaces_that_cannot_be_meant_are_refused_by_name(sizes, got):
    with pytest.raises(ValueError, match=got):
        EnvironmentSpec(**{"observation_size": 1, "action_size": 2} | sizes)


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "4"])
def test_an_agent_holds_its_key_for_whole_steps(steps):
    with pytest.raises(ValueError, match="action_key_steps: expected "):
        Agent(cfg=None, init=nothing, apply=nothing, action_key_steps=steps)


MASKED = (-torch.inf, torch.finfo(torch.float32).min)


def gaussian(key, rows, size):
    """Random means and log deviations, float64."""
    mean, log_std = random.normal(key, (2, rows, size)).double()
    return GaussianPolicyValue(mean, log_std, torch.zeros(rows))


LOGITS = 3 * random.normal(random.key(7), (5, 4)).double()
PLAIN, WIDE = gaussian(random.key(8), 5, 3), gaussian(random.key(1), 200, 3)
NORMAL, WIDE_NORMAL = (
    torch.distributions.Normal(x.mean, x.log_std.exp()) for x in (PLAIN, WIDE)
)
SQUASHED = torch.distributions.TransformedDistribution(
    WIDE_NORMAL, torch.distributions.TanhTransform()
)
# where float64 resolves the inverse of tanh well, |u| below 5
SQUASHED_ACTION = torch.tanh(
    5 * random.uniform(random.key(2), (200, 3), -1, 1)
).double()


@pytest.mark.parametrize(
    ("ours", "out", "want", "action", "mode"),
    [
        (
            CATEGORICAL,
            PolicyValue(LOGITS, torch.zeros(5)),
            torch.distributions.Categorical(logits=LOGITS),
            torch.tensor([0, 1, 2, 3, 0]),
            LOGITS.argmax(-1),
        ),
        (
            DIAGONAL_GAUSSIAN,
            PLAIN,
            torch.distributions.Independent(NORMAL, 1),
            random.normal(random.key(9), (5, 3)).double(),
            PLAIN.mean,
        ),
        (
            SQUASHED_GAUSSIAN,
            WIDE,
            torch.distributions.Independent(SQUASHED, 1),
            SQUASHED_ACTION,
            WIDE.mean.tanh(),
        ),
    ],
    ids=["categorical", "normal", "squashed"],
)
def test_a_distribution_equals_that_of_torch(ours, out, want, action, mode):
    """But for the entropy of the squashed one, which has no closed form."""
    close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)
    close(ours.log_prob(out, action), want.log_prob(action))
    if ours is not SQUASHED_GAUSSIAN:
        close(ours.entropy(out), want.entropy())
    assert torch.equal(ours.mode(out), mode)


@pytest.mark.parametrize("masked", MASKED)
def test_a_masked_action_has_probability_zero_and_no_entropy(masked):
    """Entropy and gradients are those of the legal actions alone."""
    legal = torch.tensor([[1.0, 2.0, 1.0]], requires_grad=True)
    logits = torch.cat([legal, torch.tensor([[masked]])], 1)
    with_masked = PolicyValue(logits=logits, value=torch.zeros(1))
    alone = PolicyValue(logits=legal, value=torch.zeros(1))
    action = torch.tensor([1])
    masked_log_prob = CATEGORICAL.log_prob(with_masked, torch.tensor([3]))
    assert float(masked_log_prob.detach().exp()) == 0

    def outcome(out):
        entropy, log_prob = (
            CATEGORICAL.entropy(out),
            CATEGORICAL.log_prob(out, action),
        )
        (grad,) = torch.autograd.grad(entropy + log_prob, legal)
        return entropy, log_prob, grad

    for got, want in zip(outcome(with_masked), outcome(alone)):
        torch.testing.assert_close(got, want)
    assert CATEGORICAL.mode(with_masked).tolist() == [1]


def test_several_actions_equal_independent_torch_categoricals():
    """Of 3 and of 2 actions; the last place of the second is filled up, and one of the first is illegal."""
    first, second = random.normal(random.key(0), (2, 5, 3)).double()
    first[0, 1] = second[:, 2] = -torch.inf
    out = PolicyValue(torch.stack([first, second], 1), torch.zeros(5))
    want = [
        torch.distributions.Categorical(logits=logits)
        for logits in (first, second[:, :2])
    ]
    action = torch.tensor([[0, 1], [1, 0], [2, 1], [0, 0], [2, 0]])
    torch.testing.assert_close(
        MULTI_CATEGORICAL.log_prob(out, action),
        want[0].log_prob(action[:, 0]) + want[1].log_prob(action[:, 1]),
    )
    # torch's entropy of an illegal action is 0 log 0 = NaN in float64 logits
    entropies = [d.probs.mul(d.probs.clamp_min(1e-300).log()) for d in want]
    torch.testing.assert_close(
        MULTI_CATEGORICAL.entropy(out),
        -sum(entropy.sum(-1) for entropy in entropies),
    )
    assert torch.equal(
        MULTI_CATEGORICAL.mode(out),
        torch.stack([d.probs.argmax(-1) for d in want], -1),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mean", [-1e4, -20.0, 0.0, 20.0, 1e4])
def test_a_saturated_squashed_action_has_a_finite_gradient(mean, dtype):
    start = torch.full((4, 1), mean, dtype=dtype)
    log_std = torch.tensor([-20.0, -3.0, 0.0, 2.0], dtype=dtype)[:, None]
    out = GaussianPolicyValue(start, log_std, torch.zeros(4))
    action = SQUASHED_GAUSSIAN.sample(random.key(5), out)
    assert (action.abs() < 1).all()

    def score(mean, log_std):
        out = GaussianPolicyValue(mean, log_std, torch.zeros(4))
        log_prob = SQUASHED_GAUSSIAN.log_prob(out, action)[2:]
        return log_prob.sum() + SQUASHED_GAUSSIAN.entropy(out).sum()

    grads, value = torch.func.grad_and_value(score, argnums=(0, 1))(
        start, log_std
    )
    assert value.isfinite() and all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize(
    ("log_std", "error"), [(-20.0, 1e-9), (-2.0, 1e-9), (0.0, 1e-3), (1.0, 0.1)]
)
def test_the_squashed_entropy_is_within_its_stated_error(log_std, error):
    """Beside the integral of -log density over u, by 20,000 points of the normal; nats a component."""
    mean = torch.linspace(-6, 6, 25, dtype=torch.float64)[:, None]
    out = GaussianPolicyValue(
        mean, torch.full_like(mean, log_std), torch.zeros(25)
    )
    x = torch.linspace(-10, 10, 20_001, dtype=torch.float64)
    weight = torch.exp(-0.5 * x**2)
    u = mean + torch.tensor(log_std).double().exp() * x
    slope = 2 * (math.log(2) - u - torch.nn.functional.softplus(-2 * u))
    gain = (slope * weight).sum(-1) / weight.sum()
    want = DIAGONAL_GAUSSIAN.entropy(out) + gain
    torch.testing.assert_close(
        SQUASHED_GAUSSIAN.entropy(out), want, rtol=0, atol=error
    )
