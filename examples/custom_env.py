"""An environment and a network of your own: a corridor, and a table of logits.

    python examples/custom_env.py

`funcppo/interfaces.py` says what the functions take and return. Use
`torch.where`, never assign in place; leave a finished row as it is, with reward
0; use the key of each row. Settings come first: here the number of cells.
"""

from typing import NamedTuple

import torch

import funcppo as fp


class State(NamedTuple):
    cell: torch.Tensor  # [B]


def reset(n_cells, world, key):
    return State((fp.random.uniform(key, ()) * (n_cells // 2)).long())


def step(n_cells, world, state, action, key):
    active = state.cell < n_cells - 1  # the last cell is the goal
    cell = torch.where(active, state.cell + 2 * action - 1, state.cell)
    at_goal = cell == n_cells - 1
    never = torch.zeros_like(at_goal)
    return State(cell), fp.Timestep((active & at_goal).float(), at_goal, never)


def observe(n_cells, world, state):
    return state.cell


def init(n_cells, key):  # logits of left and right, and value, for each cell
    return torch.zeros(n_cells, 3, device=key.device)


def apply(n_cells, world, params, cell):
    left, right, value = params[cell].unbind(-1)
    left = torch.where(cell == 0, -torch.inf, left)  # there is no such way
    return fp.PolicyValue(torch.stack([left, right], -1), value)


steps = {"reset": reset, "step_functional": step, "observe": observe}
env = fp.Environment(cfg=9, **steps, truncates=False)
table = fp.Agent(cfg=9, init=init, apply=apply)
learner = fp.ppo(env=env, network=table, n_envs=32, learning_rate=0.05)

if __name__ == "__main__":
    state = learner.init(fp.random.key(0))
    for update in range(20):
        state, metrics = learner.step(state)
        stats = metrics.rollout
        length = stats.episode_length_sum / stats.n_episodes.clamp(min=1)
        print(f"update {update:2}  steps to the goal {length:5.1f}")
