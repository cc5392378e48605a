"""A network with memory on a GPU: the start of a process and an update of PPO, and the same in plain JAX.

    python experiments/benchmarks/memory.py --out experiments/results/memory-h200.json

Four rooms of which an agent sees the nine cells around it; a dense layer and a GRU of 64 units; 256 environments, 64
steps, 4 epochs of 4 minibatches of whole sequences. Each row is a process of its own: a first start with an empty cache
of compiled code, a second one, and a start in JAX where it is installed, with its cache filled before. Seconds are from
the start of the process to the end of the first update; an update is the mean of 100, the median of three.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments.paths import make_parser

STARTED = time.time()
# A start in JAX is that of a process without PyTorch.
if TYPE_CHECKING or sys.argv[1:] != ["--process", "jax"]:
    import torch

    import funcppo as fp

SIZE, MAX_STEPS, N_ENVS, N_STEPS, N_UNITS = 13, 100, 256, 64, 64
DOORS = ((6, 3), (6, 9), (3, 6), (9, 6))
AROUND = [i * SIZE + j for i in (-1, 0, 1) for j in (-1, 0, 1)]
MOVES = [-SIZE, SIZE, -1, 1]
DEVICE = "cuda"


def walls() -> list[bool]:
    """Whether each cell is a wall."""
    edge = {0, SIZE // 2, SIZE - 1}
    return [
        (i in edge or j in edge) and (i, j) not in DOORS
        for i in range(SIZE)
        for j in range(SIZE)
    ]


def main() -> None:
    """Measure each row, and write them."""
    parser = make_parser(__doc__)
    parser.add_argument("--out", type=Path, help="record to write")
    parser.add_argument("--process", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.process:
        measure(*{"funcppo": by_funcppo, "jax": by_jax}[args.process]())
        return
    from experiments.benchmarks.side_by_side import write_record
    from experiments.provenance import describe_machine

    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        caches = {"XDG_CACHE_HOME": folder, "JAX_COMPILATION_CACHE_DIR": folder}
        names = ["funcppo", "funcppo"] + ["jax", "jax"] * bool(find_spec("jax"))
        for i, name in enumerate(names):
            done = subprocess.run(
                [sys.executable, __file__, "--process", name],
                env=os.environ | caches,
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            start = "second start" if i % 2 else "first start"
            rows.append({"row": f"{name}, {start}"})
            rows[-1] |= json.loads(done.stdout.splitlines()[-1])
            print(json.dumps(rows[-1]), flush=True)
            if args.out:
                machine = describe_machine("cuda")
                write_record(args.out, {"machine": machine, "rows": rows})


def measure(step: Callable[[Any], Any], state: Any, wait: Any) -> None:
    """Print the seconds of a start, and of an update."""
    state = step(state)
    wait(state)
    start, times = time.time() - STARTED, []
    for _ in range(3):
        began = time.time()
        for _ in range(100):
            state = step(state)
        wait(state)
        times.append((time.time() - began) / 100)
    update = statistics.median(times)
    print(json.dumps({"start_seconds": start, "update_seconds": update}))


class State(NamedTuple):
    """Cell, cell of the goal, and steps of each row."""

    cell: Any
    goal: Any
    steps: Any


class World(NamedTuple):
    """Walls, free cells, and what an agent sees and where it goes."""

    wall: Any
    free: Any
    around: Any
    moves: Any


# Of the module, not of `by_funcppo`: compiled code is kept on disk by the names of functions.


def reset(cfg: None, world: World, key: Any) -> State:
    """Place the agent and its goal."""
    places = fp.random.split(key).unbind(-2)
    cell, goal = (
        world.free[fp.random.integer_from_key(k, len(world.free))]
        for k in places
    )
    return State(cell, goal, torch.zeros_like(cell))


def step(
    cfg: None, world: World, state: State, action: Any, key: Any
) -> tuple[State, fp.Timestep]:
    """Go one cell, unless a wall is there."""
    active = (state.cell != state.goal) & (state.steps < MAX_STEPS)
    to = state.cell + world.moves[action]
    to = torch.where(world.wall[to] | ~active, state.cell, to)
    steps = state.steps + active
    done, late = to == state.goal, steps >= MAX_STEPS
    reward = torch.where(active & done, 1 - 0.9 * steps / MAX_STEPS, 0.0)
    return State(to, state.goal, steps), fp.Timestep(reward, done, late & ~done)


def observe(cfg: None, world: World, state: State) -> Any:
    """Whether each cell around is a wall, and whether it is the goal."""
    view = state.cell[:, None] + world.around
    is_goal = view == state.goal[:, None]
    view = view.clamp(0, SIZE * SIZE - 1)
    return torch.cat([world.wall[view], is_goal], -1).float()


def by_funcppo() -> tuple[Any, Any, Any]:
    """Return a step, a state, and a function that waits for one."""
    wall = torch.tensor(walls(), device=DEVICE)
    around, moves = torch.tensor([*AROUND, *MOVES], device=DEVICE).split([9, 4])
    env = fp.Environment(
        cfg=None,
        reset=reset,
        step_functional=step,
        observe=observe,
        spec=fp.EnvironmentSpec(observation_size=18, action_size=4),
    )
    ppo = fp.ppo(
        env=env,
        network=fp.nets.gru(N_UNITS),
        world=World(wall, (~wall).nonzero()[:, 0], around, moves),
        n_envs=N_ENVS,
        n_steps=N_STEPS,
    )
    state = ppo.init(fp.random.key(0, DEVICE))
    run = fp.compile(ppo, state)
    return (
        lambda state: run.step(state)[0],
        state,
        lambda _: torch.cuda.synchronize(),
    )


def by_jax() -> tuple[Any, Any, Any]:
    """As `by_funcppo`, in JAX: a whole iteration in one jitted call, loops as `lax.scan`, the state donated."""
    import jax  # pyright: ignore[reportMissingImports]
    import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
    from jax import lax  # pyright: ignore[reportMissingImports]

    B, T, H = N_ENVS, N_STEPS, N_UNITS
    wall = jnp.array(walls())
    free = jnp.nonzero(~wall)[0]
    around, moves = jnp.array(AROUND), jnp.array(MOVES)
    sigmoid, where = jax.nn.sigmoid, jnp.where

    def reset(key: Any) -> State:
        cell, goal = (
            free[jax.random.randint(k, (B,), 0, len(free))]
            for k in jax.random.split(key)
        )
        return State(cell, goal, jnp.zeros(B, jnp.int32))

    def observe(s: State) -> Any:
        view = s.cell[:, None] + around
        seen = wall[jnp.clip(view, 0, SIZE * SIZE - 1)]
        is_goal = view == s.goal[:, None]
        return jnp.concatenate([seen, is_goal], -1).astype(jnp.float32)

    def move(s: State, action: Any) -> tuple[State, Any, Any, Any]:
        to = s.cell + moves[action]
        to, steps = where(wall[to], s.cell, to), s.steps + 1
        done = to == s.goal
        reward = where(done, 1 - 0.9 * steps / MAX_STEPS, 0.0)
        late = (steps >= MAX_STEPS) & ~done
        return State(to, s.goal, steps), reward, done, late

    def layer(key: Any, n: int, m: int) -> Any:
        return jax.random.normal(key, (n, m)) / n**0.5, jnp.zeros(m)

    def dense(p: Any, x: Any) -> Any:
        return x @ p[0] + p[1]

    def encode(p: Any, obs: Any) -> Any:
        return dense(p["input"], jnp.tanh(dense(p["hidden"], obs)))

    def cell(p: Any, x: Any, h: Any) -> Any:
        xr, xz, xn = jnp.split(x, 3, -1)
        r, z, n = jnp.split(dense(p["recurrent"], h), 3, -1)
        z, n = sigmoid(xz + z), jnp.tanh(xn + sigmoid(xr + r) * n)
        return (1 - z) * n + z * h

    def heads(p: Any, h: Any) -> tuple[Any, Any]:
        return dense(p["policy"], h), dense(p["value"], h)[..., 0]

    def log_prob(logits: Any, action: Any) -> Any:
        all_of = jax.nn.log_softmax(logits)
        return jnp.take_along_axis(all_of, action[..., None], -1)[..., 0]

    def rollout_step(p: Any, carry: Any, key: Any) -> Any:
        s, h, first = carry
        obs, draw, again = observe(s), *jax.random.split(key)
        h = cell(p, encode(p, obs), where(first[:, None], 0, h))
        logits, value = heads(p, h)
        action = jax.random.categorical(draw, logits)
        after, reward, term, late = move(s, action)
        _, last = heads(p, cell(p, encode(p, observe(after)), h))
        done = term | late
        begun = jax.tree.map(
            lambda x, y: where(done, x, y), reset(again), after
        )
        reward += where(late, 0.99 * last, 0)
        log_p = log_prob(logits, action)
        row = obs, action, log_p, value, reward, done, first
        return (begun, h, done), row

    def loss(p: Any, rows: Any, h: Any) -> Any:
        obs, action, old, value, adv, ret, first = rows

        def turn(h: Any, x: Any) -> Any:
            h = cell(p, x[0], where(x[1][:, None], 0, h))
            return h, h

        logits, v = heads(p, lax.scan(turn, h, (encode(p, obs), first))[1])
        ratio = jnp.exp(log_prob(logits, action) - old)
        adv = (adv - adv.mean()) / (adv.std() + 1e-8)
        gain = jnp.minimum(ratio * adv, jnp.clip(ratio, 0.8, 1.2) * adv)
        clipped = value + jnp.clip(v - value, -0.2, 0.2)
        error = jnp.maximum((v - ret) ** 2, (clipped - ret) ** 2)
        log_p = jax.nn.log_softmax(logits)
        entropy = -(jnp.exp(log_p) * log_p).sum(-1).mean()
        return -gain.mean() + 0.25 * error.mean() - 0.01 * entropy

    def update(state: Any) -> Any:
        p, mu, nu, t, s, h0, first, key = state
        key, of_rollout, of_order = jax.random.split(key, 3)
        (s, h, done), rows = lax.scan(
            lambda c, k: rollout_step(p, c, k),
            (s, h0, first),
            jax.random.split(of_rollout, T),
        )
        obs, action, old, value, reward, ends, firsts = rows
        h_last = cell(p, encode(p, observe(s)), where(done[:, None], 0, h))

        def back(carry: Any, x: Any) -> Any:
            adv, following = carry
            value, reward, end = x
            delta = reward + 0.99 * following * ~end - value
            adv = delta + 0.99 * 0.95 * ~end * adv
            return (adv, value), adv

        begin = jnp.zeros(B), heads(p, h_last)[1]
        _, adv = lax.scan(back, begin, (value, reward, ends), reverse=True)
        data = obs, action, old, value, adv, adv + value, firsts

        def learn(carry: Any, chosen: Any) -> Any:
            p, mu, nu, t = carry
            of = jax.tree.map(lambda x: x[:, chosen], data)
            g = jax.grad(loss)(p, of, h0[chosen])
            size = jnp.sqrt(sum((x**2).sum() for x in jax.tree.leaves(g)))
            g = jax.tree.map(lambda x: x * jnp.minimum(1, 0.5 / size), g)
            t += 1
            mu = jax.tree.map(lambda m, x: 0.9 * m + 0.1 * x, mu, g)
            nu = jax.tree.map(lambda n, x: 0.999 * n + 0.001 * x * x, nu, g)
            b1, b2 = 1 - 0.9**t, 1 - 0.999**t
            p = jax.tree.map(
                lambda p, m, n: p - 2.5e-4 * m / b1 / (jnp.sqrt(n / b2) + 1e-5),
                *(p, mu, nu),
            )
            return (p, mu, nu, t), None

        orders = jax.random.split(of_order, 4)
        order = [jax.random.permutation(k, B).reshape(4, -1) for k in orders]
        carry, _ = lax.scan(learn, (p, mu, nu, t), jnp.concatenate(order))
        return *carry, s, h, done, key

    keys = jax.random.split(jax.random.PRNGKey(0), 6)
    sizes = (18, 64), (64, 3 * H), (H, 3 * H), (H, 4), (H, 1)
    names = "hidden", "input", "recurrent", "policy", "value"
    p = {n: layer(k, *s) for n, k, s in zip(names, keys, sizes)}
    zeros = [jax.tree.map(jnp.zeros_like, p) for _ in range(2)]
    memory = jnp.zeros((B, H)), jnp.zeros(B, bool)
    state = p, *zeros, jnp.float32(0), reset(keys[5]), *memory, keys[4]
    state = jax.tree.map(jnp.copy, state)
    return jax.jit(update, donate_argnums=0), state, jax.block_until_ready


if __name__ == "__main__":
    main()
