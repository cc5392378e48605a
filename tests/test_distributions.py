"""Log-probabilities, entropies and samples beside those of torch.distributions."""

from __future__ import annotations

import pytest
import torch

from funcppo import random
from funcppo.distributions import CATEGORICAL, DIAGONAL_GAUSSIAN
from funcppo.nets.base import GaussianPolicyValue, PolicyValue
from tests.learning import double

MASKED = (-torch.inf, torch.finfo(torch.float32).min)


def test_the_categorical_equals_torch_distributions():
    out = double(
        PolicyValue(
            logits=3 * random.normal(random.key(7), (5, 4)),
            value=torch.zeros(5),
        )
    )
    want, action = (
        torch.distributions.Categorical(logits=out.logits),
        torch.tensor([0, 1, 2, 3, 0]),
    )
    torch.testing.assert_close(
        CATEGORICAL.log_prob(out, action), want.log_prob(action)
    )
    torch.testing.assert_close(CATEGORICAL.entropy(out), want.entropy())
    assert torch.equal(CATEGORICAL.mode(out), want.probs.argmax(-1))


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


@pytest.mark.parametrize("masked", MASKED)
def test_a_row_with_one_legal_action_has_entropy_zero(masked):
    out = PolicyValue(
        logits=torch.tensor([[masked, 5.0, masked]]), value=torch.zeros(1)
    )
    assert (
        float(CATEGORICAL.entropy(out)) == 0
        and int(CATEGORICAL.sample(random.key(0), out)) == 1
    )


def test_the_diagonal_normal_equals_torch_distributions():
    mean, log_std, action = (
        random.normal(k, (5, 3)).double()
        for k in random.split(random.key(8), 3)
    )
    out = GaussianPolicyValue(mean=mean, log_std=log_std, value=torch.zeros(5))
    want = torch.distributions.Independent(
        torch.distributions.Normal(mean, log_std.exp()), 1
    )
    torch.testing.assert_close(
        DIAGONAL_GAUSSIAN.log_prob(out, action), want.log_prob(action)
    )
    torch.testing.assert_close(DIAGONAL_GAUSSIAN.entropy(out), want.entropy())
    assert torch.equal(DIAGONAL_GAUSSIAN.mode(out), mean)


def test_samples_have_the_mean_and_deviation_of_the_normal():
    """20,000 draws, within five standard errors."""
    n = 20_000
    out = GaussianPolicyValue(
        mean=torch.full((n, 1), 3.0),
        log_std=torch.full((n, 1), 0.5),
        value=torch.zeros(n),
    )
    draws = DIAGONAL_GAUSSIAN.sample(random.key(9), out)
    std = torch.tensor(0.5).exp().item()
    assert abs(float(draws.mean()) - 3) < 5 * std / n**0.5
    assert float(draws.std()) == pytest.approx(std, rel=5 / (2 * n) ** 0.5)
