import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from funcppo.advantages import discounted_sum, gae, next_values
from funcppo.core import random

SEEDS = st.integers(0, 2**32)


def gae_by_definition(
    reward, terminated, truncated, value, next_value, gamma, gae_lambda
):
    """A_t = sum_l (gamma lambda)^l delta_{t+l}, stopped at the first end; no recursion."""
    T, B = reward.shape
    out = torch.zeros(T, B, dtype=torch.float64)
    for b in range(B):
        for t in range(T):
            weight = 1.0
            for s in range(t, T):
                alive = 0.0 if terminated[s, b] else 1.0
                later = gamma * alive * next_value[s, b]
                out[t, b] += weight * (reward[s, b] + later - value[s, b])
                if terminated[s, b] or truncated[s, b]:
                    break
                weight *= gamma * gae_lambda
    return out


def episodes(seed, T, B):
    """Random rewards, ends and values, float64."""
    keys = random.split(random.key(seed), 5)
    reward, value, next_value = (
        random.uniform(k, (T, B), -1.0, 1.0).double() for k in keys[:3]
    )
    terminated, truncated = (random.uniform(k, (T, B)) < 0.2 for k in keys[3:])
    return reward, terminated, truncated, value, next_value


def test_two_steps_by_hand():
    """gamma .5, lambda .5: delta = (1 + .5*4 - 2, 3 + .5*6 - 4) = (1, 2); A = (1 + .25*2, 2)."""
    reward, value, next_value = (
        torch.tensor([[1.0], [3.0]]),
        torch.tensor([[2.0], [4.0]]),
        torch.tensor([[4.0], [6.0]]),
    )
    never = torch.zeros(2, 1, dtype=torch.bool)
    advantage, target = gae(
        reward, never, never, value, next_value, gamma=0.5, gae_lambda=0.5
    )
    assert advantage.flatten().tolist() == [1.5, 2.0]
    assert target.flatten().tolist() == [3.5, 6.0]


@given(
    SEEDS,
    st.integers(1, 9),
    st.integers(1, 3),
    st.floats(0, 1),
    st.floats(0, 1),
)
@settings(deadline=None)
def test_gae_equals_its_definition(seed, T, B, gamma, gae_lambda):
    data = episodes(seed, T, B)
    advantage, target = gae(*data, gamma=gamma, gae_lambda=gae_lambda)
    want = gae_by_definition(*data, gamma, gae_lambda)
    torch.testing.assert_close(advantage, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(target, advantage + data[3], rtol=0, atol=0)


@given(SEEDS, st.integers(1, 70))
@settings(deadline=None)
def test_the_doubling_sum_equals_the_recurrence(seed, T):
    keys = random.split(random.key(seed))
    x, decay = (
        random.uniform(keys[0], (T, 2), -1.0, 1.0).double(),
        random.uniform(keys[1], (T, 2)).double(),
    )
    y, want = torch.zeros(2, dtype=torch.float64), []
    for t in range(T - 1, -1, -1):
        y = x[t] + decay[t] * y
        want.append(y)
    both = discounted_sum(x, decay), torch.stack(want[::-1])
    torch.testing.assert_close(*both, rtol=1e-12, atol=1e-12)


def test_the_next_value_is_the_next_rows_but_at_a_cut_the_last_states():
    value, last = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([4.0])
    final, cut = (
        torch.tensor([[0.0], [9.0], [0.0]]),
        torch.tensor([[False], [True], [False]]),
    )
    found = next_values(value, final, last, cut)
    assert found.flatten().tolist() == [2.0, 9.0, 4.0]


@given(
    seed=st.integers(0, 2**31),
    T=st.integers(2, 9),
    end=st.integers(0, 7),
    bad=st.sampled_from([math.nan, math.inf, -math.inf]),
)
def test_nothing_infinite_reaches_an_ended_episode(seed, T, end, bad):
    """Rewards and values after the end change no advantage up to it, bit for bit."""
    end = min(end, T - 2)
    generator = torch.Generator().manual_seed(seed)
    reward, value, next_value = torch.randn(3, T, 1, generator=generator)
    terminated = (torch.arange(T) == end)[:, None]
    never = torch.zeros_like(terminated)
    after = (torch.arange(T) > end)[:, None]

    def estimate(number):
        return gae(
            torch.where(after, number, reward),
            terminated,
            never,
            torch.where(after, number, value),
            torch.where(after | terminated, number, next_value),
            gamma=0.9,
            gae_lambda=0.8,
        )

    for spoilt, clean in zip(estimate(bad), estimate(0.0)):
        assert torch.equal(spoilt[: end + 1], clean[: end + 1])
        assert not spoilt[end + 1 :].isfinite().any()
