"""What the games of MinAtar share."""

from __future__ import annotations

import pytest
import torch

from funcppo.envs import make, minatar
from funcppo.envs.wrappers import StickyActionsConfig

NAMES = ("Asterix", "Breakout", "Freeway", "Seaquest", "SpaceInvaders")


def test_a_map_is_true_in_one_cell_and_in_none_off_the_grid():
    y, x = torch.tensor([2, 9, -1]), torch.tensor([3, 10, 0])
    cells = minatar.at(y, x)
    assert cells.nonzero().tolist() == [[0, 2, 3]]


def test_an_action_that_the_set_is_without_is_never_done():
    cfg = minatar.GameConfig(actions="nlr")
    action = torch.tensor([0, 1, 2])
    assert minatar.is_action(cfg, action, "r").tolist() == [False, False, True]
    assert not minatar.is_action(cfg, action, "f").any()


@pytest.mark.parametrize("name", NAMES)
def test_both_action_sets_and_the_sticky_actions_are_the_references(name):
    minatar = pytest.importorskip(
        "minatar", reason="the package minatar is not installed"
    )
    module = {"SpaceInvaders": "space_invaders"}.get(name, name.lower())
    theirs = minatar.Environment(module)
    minimal, full = make(f"MinAtar/{name}-v1"), make(f"MinAtar/{name}-v0")
    letters = [theirs.env.action_map[i] for i in theirs.minimal_action_set()]
    assert minimal.cfg.env.cfg.actions == "".join(letters)
    assert full.cfg.env.cfg.actions == "".join(theirs.env.action_map)
    assert list(minimal.spec.shape) == theirs.state_shape()
    want = StickyActionsConfig(probability=theirs.sticky_action_prob)
    assert minimal.cfg.settings == want
