"""The training step has the members that the runtime reads."""

from __future__ import annotations

import dataclasses
from typing import get_type_hints

import pytest

from funcppo.config import Config, PPOConfig
from funcppo.minibatch import MinibatchParts
from funcppo.runtime import protocols
from funcppo.runtime.capture import CapturedStep
from funcppo.runtime.compile import ROLLOUT_PARTS
from funcppo.train_step import EAGER_PARTS, Parts, RolloutResult, TrainState


def members(protocol: type) -> set[str]:
    return {
        name
        for name, value in vars(protocol).items()
        if isinstance(value, property)
    }


def fields(record: type) -> set[str]:
    if dataclasses.is_dataclass(record):
        return {field.name for field in dataclasses.fields(record)}
    return set(get_type_hints(record))


@pytest.mark.parametrize(
    ("protocol", "record", "n_members"),
    [
        (protocols.TrainingParts, Parts, 13),
        (protocols.MinibatchParts, MinibatchParts, 4),
        (protocols.TrainingConfig, Config, 1),
        (protocols.UpdateSettings, PPOConfig, 1),
        (protocols.TrainingState, TrainState, 2),
        (protocols.CollectedData, RolloutResult, 4),
        (protocols.CaptureOutcome, CapturedStep, 5),
    ],
)
def test_each_record_has_the_members_of_its_protocol(
    protocol, record, n_members
):
    assert len(members(protocol)) == n_members
    assert members(protocol) <= fields(record)


def test_the_parts_are_functions_that_a_runtime_may_replace():
    assert set(ROLLOUT_PARTS) <= members(protocols.TrainingParts)
    functions = members(protocols.TrainingParts) - {"minibatch_parts"}
    assert all(callable(getattr(EAGER_PARTS, name)) for name in functions)
    assert all(
        callable(getattr(EAGER_PARTS.minibatch_parts, name))
        for name in members(protocols.MinibatchParts)
    )
    assert dataclasses.replace(EAGER_PARTS, scan=print).scan is print
