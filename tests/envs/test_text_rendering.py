"""Text pictures show what is in the state."""

from __future__ import annotations

import math

import pytest
import torch

import funcppo as fp
from funcppo.envs.registry import ENVIRONMENTS
from funcppo.envs.text_rendering import HEIGHT, WIDTH
from tests.learning import one_thread

pytestmark = pytest.mark.usefixtures(one_thread.__name__)


def reset(env, n=2):
    return env.reset(env.cfg, None, fp.random.split(fp.random.key(0), n))


def place(text, glyph):
    """Column and height of the only such glyph."""
    lines = text.split("\n")
    found = [
        (line.index(glyph), len(lines) - 1 - i)
        for i, line in enumerate(lines)
        if glyph in line
    ]
    assert len(found) == 1 and text.count(glyph) == 1
    return found[0]


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_every_environment_of_the_package_has_a_picture(name):
    env = fp.envs.make(name)
    wrapped = fp.envs.wrappers.time_limit(env, 9)
    text = fp.envs.render(wrapped, reset(wrapped))
    lines = text.split("\n")
    height, width = (10, 19) if "MinAtar" in name else (HEIGHT, WIDTH)
    assert len(lines) == height and max(map(len, lines)) <= width
    assert len(set(text) - {" ", ".", "\n"}) >= 1


def test_the_pole_stands_on_the_cart_and_leans_where_it_falls():
    env = fp.envs.cartpole()
    middle = WIDTH // 2
    for angle, side in [(0.0, 0), (0.5, 1), (-0.5, -1)]:
        motion = torch.tensor([[0.0, 0.0, angle, 0.0]])
        text = fp.envs.render(env, reset(env, 1)._replace(motion=motion))
        top = next(line for line in text.split("\n") if "|" in line)
        assert (top.index("|") > middle) - (top.index("|") < middle) == side
    assert (
        text.split("\n")[-1].count("-") + text.split("\n")[-2].count("-")
        == WIDTH
    )


@pytest.mark.parametrize(
    ("angle", "where"),
    [(0.0, (0, 1)), (math.pi, (0, -1)), (math.pi / 2, (-1, 0))],
)
def test_a_pendulum_points_up_at_angle_0_and_turns_left(angle, where):
    env = fp.envs.pendulum()
    state = reset(env, 1)._replace(motion=torch.tensor([[angle, 0.0]]))
    x, y = place(fp.envs.render(env, state), "O")
    dx, dy = x - WIDTH // 2, y - HEIGHT // 2
    assert ((dx > 2) - (dx < -2), (dy > 2) - (dy < -2)) == where


def test_the_arm_ends_at_its_target():
    env = fp.envs.reacher()
    state = reset(env, 1)._replace(
        angle=torch.zeros(1, 2), target=torch.tensor([[1.0, 0.0]])
    )
    assert "O" not in fp.envs.render(env, state)  # the target covers it
    away = state._replace(target=torch.tensor([[-1.0, 0.0]]))
    text = fp.envs.render(env, away)
    assert place(text, "X")[0] < WIDTH // 4 < WIDTH // 2 < place(text, "O")[0]


def test_a_game_shows_the_cells_of_its_observation():
    env = fp.envs.breakout()
    state = reset(env)
    image = env.observe(env.cfg, None, state)
    for row in range(2):
        lines = fp.envs.render(env, state, row).split("\n")
        cells = [line.split(" ") for line in lines]
        bricks = [[cell == "#" for cell in line] for line in cells]
        assert bricks == image[row, ..., 3].bool().tolist()
        assert [c == "=" for c in cells[9]] == image[
            row, 9, :, 0
        ].bool().tolist()


def test_an_environment_of_another_kind_is_refused():
    """The message has no address of a function in it."""
    env = fp.envs.recall()
    problem = r"^env: expected an environment of the .*got one of funcppo\.envs\.recall_task$"
    with pytest.raises(ValueError, match=problem):
        fp.envs.render(env, reset(env))


WRAPPED = fp.envs.wrappers.time_limit(fp.envs.cartpole(), 9)
LEARNER = fp.ppo(env=WRAPPED, network=fp.nets.mlp(4), n_envs=2)


@pytest.mark.parametrize(
    ("state", "got"),
    [
        (
            LEARNER.init(fp.random.key(0)),
            "train_step.TrainState; hand in its env_state",
        ),
        (
            reset(fp.envs.wrappers.time_limit(fp.envs.pendulum(), 9)),
            "pendulum.EnvState",
        ),
        (3, "builtins.int"),
    ],
    ids=["learner", "other", "number"],
)
def test_a_state_of_something_else_is_refused_in_one_line(state, got):
    line = f"state: expected cartpole.EnvState, got {got}"
    with pytest.raises(TypeError, match=f"^{line}$"):
        fp.envs.render(WRAPPED, state)


@pytest.mark.parametrize("row", [2, -3, 1.5, True])
def test_a_row_that_is_not_there_is_refused_in_one_line(row):
    with pytest.raises(ValueError, match=f"^row: expected 0 to 1, got {row}$"):
        fp.envs.render(WRAPPED, reset(WRAPPED), row)


def test_what_is_no_environment_has_no_picture():
    line = "env: expected an Environment, got str"
    with pytest.raises(TypeError, match=f"^{line}"):
        fp.envs.render("CartPole-v1", reset(WRAPPED))
