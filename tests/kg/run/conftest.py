"""A small run before its first update."""

import pytest

from funcppo.kg.run import run_start
from tests.kg.run.runs import CONFIG


@pytest.fixture
def run(tmp_path):
    return run_start.prepare_run(CONFIG, tmp_path, resume=False)
