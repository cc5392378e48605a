"""Settings of the miner: what is out of range is named."""

import pytest

from funcppo.mining.config import ROWS_PER_SECOND, MiningConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_length": 0}, "max_length: expected 1 to 5, got 0"),
        ({"max_length": 6}, "max_length: expected 1 to 5, got 6"),
        ({"min_support": 0}, "min_support: expected 1 or more, got 0"),
        ({"votes_per_fact": 0}, "votes_per_fact: expected 1 or more, got 0"),
        ({"max_rows": 0}, "max_rows: expected 1 or more, got 0"),
        ({"min_confidence": 1.5}, "min_confidence: expected 0 to 1, got 1.5"),
        ({"seconds": 0.0}, "seconds: expected more than 0, got 0.0"),
    ],
)
def test_a_field_out_of_range_is_named(settings, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        MiningConfig(**settings)


def test_seconds_set_the_rows_unless_rows_are_given():
    assert MiningConfig(seconds=2.0).row_limit == 2 * ROWS_PER_SECOND
    assert MiningConfig(seconds=2.0, max_rows=5).row_limit == 5
    assert MiningConfig(seconds=1e-9).row_limit == 1
