"""Environments of the package as text: `render`.

print(fp.envs.render(env, state))
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# `Tensor.tolist` has no type of its own.

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor

from funcppo.core import random, tree
from funcppo.envs import two_link_arm
from funcppo.envs.classic_control import (
    acrobot,
    cartpole,
    mountain_car,
    pendulum,
)
from funcppo.envs.minatar import (
    asterix,
    breakout,
    freeway,
    seaquest,
    space_invaders,
)
from funcppo.envs.wrappers import Wrapped
from funcppo.interfaces import AnyEnvironment, Environment, NoWorld

WIDTH, HEIGHT = 49, 17  # characters
POINTS_A_LINE = 2 * WIDTH
EMPTY = "."  # a cell of a game
# One glyph for each channel of an observation; a later one covers those before.
GLYPHS: dict[Any, str] = {
    asterix.observe: "@x-$",
    breakout.observe: "=o'#",
    freeway.observe: "@c12345",
    seaquest.observe: "@=*-+fs~dD",
    space_invaders.observe: "AW<>|!",
}

Point = tuple[float, float]


class Scene(NamedTuple):
    """Lines in a window of the world."""

    low: Point  # its lower left corner
    high: Point
    lines: list[tuple[str, Sequence[Point]]]  # a glyph, and the corners


def render(env: AnyEnvironment, state: Any, row: int = 0) -> str:
    """A row of a state as text: a picture of the body, or the cells of a game.

    Wrappers are seen through.

    Args:
      env: an environment of the package.
      state: a state of it, of `env.reset` or the `env_state` of a learner's state.
      row: which row of the state; negative ones count from the last.

    Raises:
      TypeError: `env` is no environment, or `state` is no state of it.
      ValueError: the environment is none of the package, or the state has no such row.
    """
    if not isinstance(env, Environment):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"env: expected an Environment, got {type(env).__name__}"
        )
    while isinstance(env.cfg, Wrapped):
        env, state = env.cfg.env, getattr(state, "inner", state)
    if env.observe not in GLYPHS and env.observe not in SCENES:
        raise ValueError(
            f"env: expected an environment of the package that has a picture, got one of {env.observe.__module__}"
        )
    _check_state(env, state, row)

    if env.observe in GLYPHS:
        image: Tensor = env.observe(env.cfg, None, state)[row]
        return _draw_cells(image.tolist(), GLYPHS[env.observe])
    return _draw_scene(SCENES[env.observe](state, row))


def _check_state(env: AnyEnvironment, state: Any, row: object) -> None:
    """Check that a state is one of an environment, and has a row.

    Raises:
      TypeError: it is something else.
      ValueError: it has no such row.
    """
    key = random.split(random.key(0), 1)
    expected = type(env.reset(env.cfg, NoWorld(), key))
    if type(state) is not expected:
        hint = "; hand in its env_state" if hasattr(state, "env_state") else ""
        raise TypeError(
            f"state: expected {_name(expected)}, got {_name(type(state))}{hint}"
        )
    n_rows = len(tree.leaves(state)[0])
    if isinstance(row, bool | float) or row not in range(-n_rows, n_rows):
        raise ValueError(f"row: expected 0 to {n_rows - 1}, got {row}")


def _name(kind: type) -> str:
    """A class by its module, without the package."""
    return f"{kind.__module__.rpartition('.')[2]}.{kind.__qualname__}"


def _draw_cells(image: list[list[list[float]]], glyphs: str) -> str:
    lines: list[str] = []
    for cells in image:
        found = [
            [glyph for glyph, value in zip(glyphs, channels) if value]
            for channels in cells
        ]
        lines.append(" ".join([EMPTY, *shown][-1] for shown in found))
    return "\n".join(lines)


def _draw_scene(scene: Scene) -> str:
    """Lines by their points; what is outside the window is left out."""
    canvas = {
        _cell(scene, point): glyph
        for glyph, corners in scene.lines
        for point in _points(corners)
    }
    return "\n".join(
        "".join(canvas.get((x, y), " ") for x in range(WIDTH)).rstrip()
        for y in reversed(range(HEIGHT))
    )


def _points(corners: Sequence[Point]) -> Iterator[Point]:
    yield corners[0]
    for (x0, y0), (x1, y1) in pairwise(corners):
        for i in range(1, POINTS_A_LINE + 1):
            t = i / POINTS_A_LINE
            yield x0 + t * (x1 - x0), y0 + t * (y1 - y0)


def _cell(scene: Scene, point: Point) -> tuple[int, int]:
    size = (WIDTH, HEIGHT)
    shares = [
        (value - low) / (high - low)
        for value, low, high in zip(point, scene.low, scene.high)
    ]
    x, y = (round(share * (n - 1)) for share, n in zip(shares, size))
    return x, y


# Bodies


def _cartpole(state: cartpole.EnvState, row: int) -> Scene:
    x, _, angle, _ = state.motion[row].tolist()
    length = 2 * cartpole.POLE_HALF_LENGTH
    tip = (x + length * math.sin(angle), length * math.cos(angle))
    limit = cartpole.X_LIMIT
    return Scene(
        (-limit, -0.2),
        (limit, 1.1),
        [
            ("-", [(-limit, -0.1), (limit, -0.1)]),
            ("#", [(x - 0.25, 0.0), (x + 0.25, 0.0)]),
            ("|", [(x, 0.1), tip]),
        ],
    )


def _mountain_car(state: mountain_car.EnvState, row: int) -> Scene:
    low, high = mountain_car.MIN_POSITION, mountain_car.MAX_POSITION
    x = float(state.motion[row, 0])
    positions = [low + i / WIDTH * (high - low) for i in range(WIDTH + 1)]
    goal = mountain_car.GOAL_POSITION
    return Scene(
        (low, -1.1),
        (high, 1.4),
        [
            (".", [(p, math.sin(3 * p)) for p in positions]),
            ("P", [(goal, math.sin(3 * goal) + 0.15)]),
            ("o", [(x, math.sin(3 * x) + 0.15)]),
        ],
    )


def _pendulum(state: pendulum.EnvState, row: int) -> Scene:
    angle = float(state.motion[row, 0])
    tip = (-math.sin(angle), math.cos(angle))
    return _links([(0.0, 0.0), tip], reach=1.0)


def _acrobot(state: acrobot.EnvState, row: int) -> Scene:
    first, second, _, _ = state.motion[row].tolist()
    return _arm([first - math.pi / 2, second], acrobot.LINK_LENGTH)


def _reacher(state: two_link_arm.EnvState, row: int) -> Scene:
    arm = _arm(state.angle[row].tolist(), two_link_arm.LENGTH)
    x, y = state.target[row].tolist()
    return arm._replace(lines=[*arm.lines, ("X", [(x, y)])])


def _arm(angles: list[float], length: float) -> Scene:
    """Two links by the angle of the first from the x axis, and of the second from the first."""
    first, both = angles[0], sum(angles)
    elbow = (length * math.cos(first), length * math.sin(first))
    tip = (
        elbow[0] + length * math.cos(both),
        elbow[1] + length * math.sin(both),
    )
    return _links([(0.0, 0.0), elbow, tip], reach=2 * length)


def _links(joints: list[Point], reach: float) -> Scene:
    edge = 1.1 * reach
    return Scene(
        (-edge, -edge),
        (edge, edge),
        [("*", joints), ("o", joints[:1]), ("O", joints[-1:])],
    )


SCENES: dict[Any, Callable[[Any, int], Scene]] = {
    cartpole.observe: _cartpole,
    mountain_car.observe: _mountain_car,
    pendulum.observe: _pendulum,
    acrobot.observe: _acrobot,
    two_link_arm.observe: _reacher,
}
