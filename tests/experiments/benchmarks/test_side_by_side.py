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


GROWING = f"""
import json, os, sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from experiments.benchmarks import side_by_side
name, out = sys.argv[2], Path(sys.argv[3])

def recorded():
    return json.loads(out.read_text())["rows"][-1] if out.exists() else {{}}

def measure():
    yield {{"seeds": [1]}}
    # The parent writes while this process goes on.
    while recorded().get("seeds") != [1]:
        pass
    yield {{"seeds": [1, 2], "was_complete": recorded()["is_complete"]}}
    if name == "broken":
        raise ValueError("no third")
    if name == "dead":
        os._exit(7)
    yield {{"seeds": [1, 2, 3]}}

side_by_side.run_growing_cell(lambda: {{"cold_s": 1.0}}, measure)
"""


@pytest.mark.parametrize(
    ("name", "rest"),
    [
        ("whole", {"seeds": [1, 2, 3]}),
        (
            "broken",
            {
                "seeds": [1, 2],
                "is_complete": False,
                "error": "ValueError: no third",
            },
        ),
        (
            "dead",
            {
                "seeds": [1, 2],
                "is_complete": False,
                "error": "the process ended with status 7",
            },
        ),
    ],
)
def test_a_growing_cell_is_recorded_as_far_as_it_has_come(tmp_path, name, rest):
    script, out = tmp_path / "script.py", tmp_path / "record.json"
    script.write_text(GROWING)
    side_by_side.run_cells(str(script), {name: [name, str(out)]}, 1, "cpu", out)
    (row,) = json.loads(out.read_text())["rows"]
    always = {"cell": name, "cold_s": 1.0, "was_complete": False}
    assert row == always | rest


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
