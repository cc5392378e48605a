"""A grid with walls and a time limit: `python examples/grid_world.py`.

Moves into a wall are illegal: the observation has an action mask. The goal
terminates an episode, the time limit truncates it. The map is the world.
"""

from typing import NamedTuple

import torch

import funcppo as fp

ROWS = (".....", "..#..", "..#..", "..#..", ".....")
WIDTH, GOAL, MAX_STEPS = 5, 24, 40


class State(NamedTuple):
    cell: torch.Tensor  # [B]
    steps: torch.Tensor  # [B]


class World(NamedTuple):
    action_mask: torch.Tensor  # [cells, 4], true where a move is legal
    offset: torch.Tensor  # [4], to the next cell: up, down, left, right
    start: torch.Tensor  # the cells where episodes start


def build_world():
    free = torch.tensor([[x == "." for x in row] for row in ROWS])
    wide = torch.nn.functional.pad(free, (1, 1, 1, 1))
    up, down = wide[:-2, 1:-1], wide[2:, 1:-1]
    left, right = wide[1:-1, :-2], wide[1:-1, 2:]
    return World(
        action_mask=torch.stack([up, down, left, right], -1).flatten(0, 1),
        offset=torch.tensor([-WIDTH, WIDTH, -1, 1]),
        start=free.flatten()[:GOAL].nonzero()[:, 0],
    )


def reset(cfg, world, key):
    i = fp.random.integer_from_key(key, len(world.start))
    return State(cell=world.start[i], steps=torch.zeros_like(i))


def step(cfg, world, state, action, key):
    active = (state.cell != GOAL) & (state.steps < MAX_STEPS)
    cell = torch.where(active, state.cell + world.offset[action], state.cell)
    steps = state.steps + active
    at_goal = cell == GOAL
    reward = torch.where(active, torch.where(at_goal, 1.0, -0.02), 0.0)
    is_late = (steps >= MAX_STEPS) & ~at_goal
    return State(cell, steps), fp.Timestep(reward, at_goal, is_late)


def observe(cfg, world, state):
    one_hot = torch.nn.functional.one_hot(state.cell, WIDTH**2)
    return fp.MaskedObservation(one_hot.float(), world.action_mask[state.cell])


grid = build_world()
env = fp.Environment(
    cfg=None,
    reset=reset,
    step_functional=step,
    observe=observe,
    spec=fp.EnvironmentSpec(observation_size=WIDTH**2, action_size=4),
)
learner = fp.ppo(
    env=env,
    network=fp.nets.mlp(32),
    world=grid,
    n_envs=16,
    n_steps=32,
    n_updates=30,
    learning_rate=5e-3,
)


def greedy_lengths(params):
    """Steps to the goal by the most probable moves, from each start."""
    agent = learner.cfg.agent
    state = State(grid.start, torch.zeros_like(grid.start))
    for _ in range(MAX_STEPS):  # rows that have finished stay as they are
        obs = observe(None, grid, state)
        output = agent.apply(agent.cfg, grid, params, obs)
        action = agent.distribution.mode(output)
        state, _ = step(None, grid, state, action, key=None)  # no randomness
    return state.steps


if __name__ == "__main__":
    state = learner.init(fp.random.key(0))
    for update in range(1, 31):
        state, metrics = learner.step(state)
        if update % 5 == 1:
            stats = metrics.rollout
            length = stats.episode_length_sum / stats.n_episodes.clamp(min=1)
            print(f"update {update:2}  steps to the goal {length:5.1f}")
    print(f"greedy  {greedy_lengths(state.params).float().mean():.2f}")
