"""The games in JAX play as those in PyTorch do."""

from __future__ import annotations

import numpy as np
import pytest
import torch

jax = pytest.importorskip("jax")

from experiments.benchmarks import jax_games  # noqa: E402
from funcppo.core import random, tree  # noqa: E402
from funcppo.envs.minatar import asterix, freeway, space_invaders  # noqa: E402
from funcppo.envs.minatar.game import GameConfig  # noqa: E402
from funcppo.interfaces import NoWorld  # noqa: E402

N_ROWS = 64
N_STEPS = 400


def play_asterix(state, action, key):
    """The step of either library, at equal random numbers."""
    unit = random.uniform(key, (3,))
    cfg = GameConfig(actions=asterix.MINIMAL_ACTIONS)
    ours = asterix.transition(cfg, state, action, unit)
    return ours, jax_games.transition_asterix, unit


def play_freeway(state, action, key):
    """As `play_asterix`."""
    speed = freeway.sample_speeds(key)
    cfg = GameConfig(actions=freeway.MINIMAL_ACTIONS)
    ours = freeway.transition(cfg, state, action, speed)
    return ours, jax_games.transition_freeway, speed


def play_space_invaders(state, action, key):
    """As `play_asterix`; nothing is random."""
    cfg = GameConfig(actions=space_invaders.MINIMAL_ACTIONS)
    ours = space_invaders.step_functional(cfg, NoWorld(), state, action, key)
    return ours, jax_games.play_space_invaders, key


GAMES = {
    "asterix": (
        asterix,
        play_asterix,
        jax_games.Asterix,
        jax_games.observe_asterix,
        # mostly nothing, so that the player lives
        [0.6, 0.1, 0.1, 0.1, 0.1],
    ),
    "freeway": (
        freeway,
        play_freeway,
        jax_games.Freeway,
        jax_games.observe_freeway,
        [0.05, 0.9, 0.05],
    ),
    "space invaders": (
        space_invaders,
        play_space_invaders,
        jax_games.SpaceInvaders,
        jax_games.observe_space_invaders,
        [0.1, 0.3, 0.3, 0.3],
    ),
}


@pytest.mark.parametrize("name", GAMES)
def test_a_step_is_ours_and_so_is_an_observation(name):
    """Along random play, finished rows started anew; time is short in some rows of Freeway."""
    module, play, state_type, observe, weights = GAMES[name]
    torch.manual_seed(0)
    cfg = GameConfig(actions=module.MINIMAL_ACTIONS)
    state = module.reset(cfg, NoWorld(), random.split(random.key(0), N_ROWS))
    if name == "freeway":
        soon = torch.arange(N_ROWS) * 5
        state = state._replace(time_left=soon)
    total, n_ended = 0.0, 0
    for t in range(N_STEPS):
        weight = torch.tensor(weights).expand(N_ROWS, -1)
        action = torch.multinomial(weight, 1)[:, 0]
        key = random.split(random.key(t + 1), N_ROWS)

        # without the flag of its end
        leaves = [x.numpy() for x in tree.leaves(state)][:-1]
        theirs = state_type(*leaves, action=np.full(N_ROWS, -1))
        (state, timestep), step, drawn = play(state, action, key)
        after, reward, terminated = jax.jit(step)(
            theirs, action.numpy(), drawn.numpy()
        )
        for ours, other in zip(tree.leaves(state)[:-1], after):
            np.testing.assert_array_equal(ours.numpy(), other)
        np.testing.assert_array_equal(after.action, action.numpy())
        np.testing.assert_array_equal(timestep.reward.numpy(), reward)
        np.testing.assert_array_equal(state.terminal.numpy(), terminated)
        image = module.observe(cfg, NoWorld(), state).flatten(1)
        np.testing.assert_array_equal(image.numpy(), observe(after))

        total += float(timestep.reward.sum())
        n_ended += int(state.terminal.sum())
        fresh = module.reset(cfg, NoWorld(), key)
        state = tree.where(state.terminal, fresh, state)
    print(name, total, n_ended)
    assert total > 50 and n_ended > 50
