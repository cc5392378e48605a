"""The version that the package states."""

import re

import funcppo
from funcppo.version import VERSION


def test_the_package_states_its_version():
    assert funcppo.__version__ == VERSION
    assert re.fullmatch(r"\d+\.\d+\.\d+", VERSION)
