"""Settings of the miner: what is out of range is named."""

import pytest

from funcppo.mining.config import MiningConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_length": 0}, "max_length=0: expected 1, 2 or 3"),
        ({"max_length": 4}, "max_length=4: expected 1, 2 or 3"),
        ({"min_support": 0}, "min_support=0: expected 1 or more"),
        ({"votes_per_fact": 0}, "votes_per_fact=0: expected 1 or more"),
        ({"max_rows": 0}, "max_rows=0: expected 1 or more"),
        (
            {"min_confidence": 1.5},
            "min_confidence=1.5: expected a number from 0 to 1",
        ),
        (
            {"min_confidence": float("nan")},
            "min_confidence=nan: expected a number from 0 to 1",
        ),
        ({"time_limit": 0.0}, "time_limit=0.0: expected more than 0"),
        ({"time_limit": float("nan")}, "time_limit=nan: expected more than 0"),
    ],
)
def test_a_field_out_of_range_is_named(settings, message):
    with pytest.raises(ValueError, match=message):
        MiningConfig(**settings)
