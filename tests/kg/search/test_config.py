"""Which settings of the prover are accepted, and that every one is documented."""

import pytest

from funcppo.kg.config import ProverTaskConfig


def test_bounds_are_accepted_and_what_is_beyond_is_named():
    ProverTaskConfig(
        max_height=1, smoothing=0.0, hard_negative_fraction=1.0, max_atoms=1
    )
    with pytest.raises(
        ValueError, match=r"^max_height: expected 1 or more, got 0$"
    ):
        ProverTaskConfig(max_height=0)
    with pytest.raises(
        ValueError, match=r"^hard_negative_fraction: expected 0 to 1, got 1.1$"
    ):
        ProverTaskConfig(hard_negative_fraction=1.1)
