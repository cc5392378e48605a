"""Cells are processes: all prepare before one measures, and one that fails is a row with its error."""

from __future__ import annotations

import json

import pytest

from experiments.benchmarks import side_by_side
from experiments.paths import ROOT

SCRIPT = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from experiments.benchmarks import side_by_side
name, folder = sys.argv[2], Path(sys.argv[3])

def prepare():
    if name == "broken":
        raise ValueError("no such\\nwork")
    if name == "dead":
        sys.exit(7)
    (folder / name).touch()
    return {{"cold_s": side_by_side.seconds_since_start()}}

def measure():
    return {{"prepared": sorted(file.name for file in folder.iterdir())}}

side_by_side.run_cell(prepare, measure)
"""


@pytest.fixture
def rows(tmp_path, capsys):
    """The rows of a benchmark of four cells, two processes at a time."""
    script, folder, out = (
        tmp_path / "script.py",
        tmp_path / "prepared",
        tmp_path / "record.json",
    )
    script.write_text(SCRIPT)
    folder.mkdir()
    cells = {
        f"cell {name}": [name, str(folder)]
        for name in ("one", "two", "broken", "dead")
    }
    side_by_side.run_cells(str(script), cells, 2, "cpu", out)
    record = json.loads(out.read_text())
    assert [
        json.loads(line) for line in capsys.readouterr().out.splitlines()
    ] == record["rows"]
    assert record["machine"]["torch"] and record["machine"]["commit"]
    return {row["cell"]: row for row in record["rows"]}


def test_cells_prepare_together_and_fail_alone(rows):
    assert list(rows) == ["cell one", "cell two", "cell broken", "cell dead"]
    assert (
        rows["cell one"]["prepared"]
        == rows["cell two"]["prepared"]
        == ["one", "two"]
    )
    assert rows["cell one"]["cold_s"] > 0
    assert rows["cell broken"]["error"] == "ValueError: no such"
    assert rows["cell dead"]["error"] == "the process ended with status 7"
