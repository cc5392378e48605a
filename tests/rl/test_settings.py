"""Published settings fit the environments that they are for."""

from __future__ import annotations

import pytest

import funcppo as fp
from funcppo.envs.registry import ENVIRONMENTS
from funcppo.rl import run
from funcppo.rl.settings import PUBLISHED, published_settings


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_learner_is_made_of_each(name):
    """Its first state is what checks network and environment against each other."""
    learner = run.make_learner(name, published_settings(name))
    state = learner.init(fp.random.key(0))
    assert int(state.update) == 0
    assert learner.cfg.ppo == published_settings(name).ppo


def test_they_are_for_environments_that_there_are():
    assert set(PUBLISHED) <= set(ENVIRONMENTS)


def test_others_have_the_defaults_and_say_so():
    settings = published_settings("MyEnv-v0")
    assert settings.ppo == fp.PPOConfig()
    assert "none are published" in settings.source
