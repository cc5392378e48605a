"""What the games of MinAtar share."""

from __future__ import annotations

import pytest

from funcppo.envs import make

NAMES = ("Asterix", "Breakout", "Freeway", "Seaquest", "SpaceInvaders")


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
    assert minimal.cfg.settings == theirs.sticky_action_prob
