"""Episodes and single steps of the package `minatar`, and ours beside them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from funcppo.core import random, tree

LETTERS = "nlurdf"


class Recorded(np.random.RandomState):
    """A generator whose uniform numbers are kept, and whose integers are made of them."""

    def __init__(self, seed):
        super().__init__(seed)
        self.units = []

    def rand(self, *shape):
        value = super().rand(*shape)
        self.units.append(value)
        return value

    def randint(self, low, high=None, size=None):
        low, high = (0, low) if high is None else (low, high)
        unit = self.rand(*(() if size is None else (size,)))
        return (low + np.floor(unit * (high - low))).astype(int)


def reference_game(name, seed, **options):
    module = pytest.importorskip(
        f"minatar.environments.{name}",
        reason="the package minatar is not installed: pip install minatar",
    )
    env = module.Env(**options)
    env.random = Recorded(seed)
    env.reset()
    return env


def assert_plays_alike(
    name, ours, state, step, *, seed, n_steps, action, draws=None
):
    """Play an episode in both from equal states with equal draws.

    Args:
      state: our state that equals that of the reference after its reset.
      step: (state, action, draws of the reference) -> (state, timestep).
      action: (reference, t) -> number of the action, of all six.
    """
    env, rewards = reference_game(name, seed), 0.0
    state = state(env)
    for t in range(n_steps):
        seen = ours.observe(ours.cfg, None, state)[0].numpy()
        assert np.array_equal(seen, env.state()), f"step {t}"
        number = action(env, t)
        env.random.units.clear()
        reward, terminal = env.act(number)
        state, timestep = step(
            state, torch.tensor([number]), list(env.random.units)
        )
        assert float(timestep.reward[0]) == reward, f"step {t}"
        assert bool(timestep.terminated[0]) == terminal, f"step {t}"
        rewards += reward
        if terminal:
            break
    return t, rewards


def keys(n=1, seed=0):
    return random.split(random.key(seed), n)


def assert_steps_alike(
    name,
    ours,
    step,
    *,
    place,
    state_of,
    ramping=True,
    seen=lambda state: state,
    n_states=2000,
):
    """Take one step in both from each of many random states, of which some are terminal.

    Args:
      step: (states, actions, draws of the reference in each) -> (states, timestep).
      place: (reference, generator) sets the reference to a random state.
      state_of: our state that equals that of a reference.
      seen: what of our states must be equal, a tree.

    Returns:
      The sum of rewards, and how many episodes ended.
    """
    draws = np.random.default_rng(0)
    before, images_before, actions, units = [], [], [], []
    after, images_after, rewards, terminals, n_ends = [], [], [], [], 0
    for seed in range(n_states):
        env = reference_game(name, seed, ramping=ramping)
        place(env, draws)
        env.terminal = bool(draws.random() < 0.05)
        n_ends -= env.terminal
        before.append(state_of(env))
        images_before.append(env.state())
        actions.append(int(draws.integers(len(LETTERS))))

        env.random.units.clear()
        reward, terminal = env.act(actions[-1])
        units.append(list(env.random.units))
        after.append(state_of(env))
        images_after.append(env.state())
        rewards.append(float(reward))
        terminals.append(terminal)
        n_ends += terminal

    before, want = (
        tree.map(lambda *x: torch.cat(x), *s) for s in (before, after)
    )
    got, timestep = step(before, torch.tensor(actions), units)
    ours_and_theirs = {
        "observation before": (_observe(ours, before), np.stack(images_before)),
        "observation": (_observe(ours, got), np.stack(images_after)),
        "reward": (timestep.reward.numpy(), np.array(rewards, np.float32)),
        "terminated": (timestep.terminated.numpy(), np.array(terminals)),
    }
    for path, a, b in zip(
        tree.paths(seen(got)), tree.leaves(seen(got)), tree.leaves(seen(want))
    ):
        ours_and_theirs[path] = a.numpy(), b.numpy()
    for what, (a, b) in ours_and_theirs.items():
        differs = (a != b).reshape(n_states, -1).any(1)
        if differs.any():
            row = int(differs.argmax())
            state = tree.map(lambda x, row=row: x[row], before)
            raise AssertionError(
                f"{what} of {differs.sum()} states differs, of the first after action "
                f"{LETTERS[actions[row]]!r} in {state}"
            )
    return sum(rewards), n_ends


def _observe(env, state):
    return env.observe(env.cfg, None, state).numpy()
