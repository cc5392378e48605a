"""Settings of the miner: what is out of range is named."""

import pytest

from funcppo.kg.config import ROWS_PER_SECOND, MiningConfig, default_config


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


TINY_AND_DENSE = MiningConfig(max_length=2, min_support=3, votes_per_fact=3)


@pytest.mark.parametrize(
    ("n_facts", "n_entities", "cfg"),
    [
        (1592, 14, TINY_AND_DENSE),
        (100, 10, TINY_AND_DENSE),
        (99, 10, MiningConfig()),
        (1110, 271, MiningConfig()),
        (2_001, 20, MiningConfig(votes_per_fact=3)),
        (50_000, 10_000, MiningConfig(votes_per_fact=3)),
        (86_835, 40_559, MiningConfig(max_length=5)),
        (272_115, 14_505, MiningConfig(constants=True)),
    ],
)
def test_a_graph_has_what_its_size_and_density_ask_for(
    n_facts, n_entities, cfg
):
    assert default_config(n_facts, n_entities) == cfg
