"""How many threads share work."""

import pytest

from funcppo import cores


@pytest.mark.parametrize(
    ("setting", "expected"),
    [("3", 3), ("0", 1), ("100", 8), ("", 5), ("2,4", 5), (None, 5)],
)
def test_threads_are_those_of_the_setting_or_of_the_cores(
    monkeypatch, setting, expected
):
    monkeypatch.setattr(cores, "AVAILABLE_CORES", 5)
    if setting is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", setting)
    assert cores.count_threads() == expected


def test_there_is_a_core():
    assert cores.AVAILABLE_CORES >= 1
