"""What a run computes from its settings."""

from dataclasses import replace

from funcppo.experiment.run import learner_config
from tests.experiment.runs import CONFIG


def test_the_number_of_updates_is_rounded_up_to_whole_rollouts(run):
    assert [
        learner_config(replace(CONFIG, steps=steps), run.task).ppo.n_updates
        for steps in (1, 16, 17)
    ] == [1, 1, 2]
