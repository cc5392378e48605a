"""Every experiment says what it takes, and those that are cheap do what they claim on small work."""

import datetime
import importlib
import json
import re

import pytest

from experiments import paths, provenance
from experiments.benchmarks import training_results
from experiments.checks import gpu
from funcppo import cli

EXPERIMENTS = paths.ROOT / "experiments"
PROGRAMS = sorted(
    path.relative_to(paths.ROOT).with_suffix("").as_posix().replace("/", ".")
    for folder in ("benchmarks", "checks")
    for path in (EXPERIMENTS / folder).glob("*.py")
    if re.search(r"make_parser\(|ArgumentParser\(", path.read_text())
)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_says_what_it_takes(name, monkeypatch, capsys):
    program = importlib.import_module(name)
    monkeypatch.setattr("sys.argv", [name, "--help"])
    with pytest.raises(SystemExit) as end:
        program.main()
    assert end.value.code == 0
    assert "usage:" in capsys.readouterr().out


# benchmarks


@pytest.mark.parametrize("table", training_results.TABLES)
def test_the_programs_take_the_options_of_the_results(table):
    _, sets = training_results.TABLES[table]
    for options in sets.values():
        words = ["data", "--out", "run", *options.training.split()]
        assert cli.parse_program("train", words)


# checks


def test_a_record_is_as_old_as_its_date_or_its_commits(tmp_path):
    """Its oldest part counts; a record that says neither is new."""
    file = tmp_path / "made.json"
    today = datetime.date.today()
    dates = [str(today - datetime.timedelta(days=n)) for n in (3, 9)]
    rows = [{"machine": {"date": x, "commit": "0" * 40}} for x in dates]
    for record, days in ((rows, "9"), (rows[:1], "3"), ({"rows": []}, "0")):
        file.write_text(json.dumps(record))
        assert gpu.describe_age(file)[::2] == (days, "made")
    assert json.loads(json.dumps(provenance.describe_machine()))["date"] == str(
        today
    )
