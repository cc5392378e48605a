"""Every experiment says what it takes, and those that are cheap do what they claim on small work."""

from __future__ import annotations

import importlib
import json
import re

import pytest

from experiments import paths
from experiments.benchmarks import fifty_graphs, side_by_side, training_results
from experiments.checks import check_unchanged, measures, readability
from experiments.data import build_countries
from funcppo import cli

EXPERIMENTS = paths.ROOT / "experiments"
PROGRAMS = sorted(
    path.relative_to(paths.ROOT).with_suffix("").as_posix().replace("/", ".")
    for folder in ("benchmarks", "checks", "data")
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


def run(program, monkeypatch, *words: object) -> object:
    """Run a program in this process."""
    monkeypatch.setattr("sys.argv", ["program", *map(str, words)])
    return program.main()


# benchmarks

CELL = f"""
import sys
sys.path.insert(0, {str(paths.ROOT)!r})
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


def test_cells_prepare_together_and_fail_alone(tmp_path):
    script, folder = tmp_path / "script.py", tmp_path / "prepared"
    script.write_text(CELL)
    folder.mkdir()
    names = ["one", "two", "broken", "dead"]
    cells = {name: [name, str(folder)] for name in names}
    out = tmp_path / "record.json"
    side_by_side.run_cells(str(script), cells, 2, "cpu", out)
    record = json.loads(out.read_text())
    assert record["machine"]["torch"] and record["machine"]["commit"]
    one, two, broken, dead = record["rows"]
    assert one["prepared"] == two["prepared"] == ["one", "two"]
    assert one["cold_s"] > 0
    assert broken["error"] == "ValueError: no such"
    assert dead["error"] == "the process ended with status 7"


def test_a_training_has_a_row_for_each_seed_and_one_at_learning_rate_0(
    tmp_path, monkeypatch
):
    name = "family_tree:30:0"
    options = "--steps 64 --set ppo.n_envs=8 --strategy eager --learner proofs"
    sets = {name: training_results.Options(options, None)}
    tables = {"given": ("given_rules", sets)}
    monkeypatch.setattr(training_results, "TABLES", tables)
    record = tmp_path / "record.json"
    for _ in range(2):  # what the record holds is not run again
        words = ["given", "--out", record, "--seeds", "1"]
        run(training_results, monkeypatch, *words)
    found = json.loads(record.read_text())
    rows = found["runs"]
    assert [row["learning_rate_0"] for row in rows] == [False, True]
    for row in rows:
        assert (row["set"], row["seed"], row["mining"]) == (name, 0, None)
        assert row["training"]["seconds"] > 0 < row["training"]["peak_mb"]
        assert row["rule_score"] in row["results"]["test"]
    height = rows[0]["results"]["height"]
    scores = [f"exists@{height}", "max-confidence", "noisy-or"]
    assert list(found["untrained"][name]["test"]) == scores


@pytest.mark.parametrize("table", training_results.TABLES)
def test_the_programs_take_the_options_of_the_results(table):
    _, sets = training_results.TABLES[table]
    for options in sets.values():
        words = ["data", "--out", "run", *options.training.split()]
        assert cli.parse_program("train", words)
        if options.mining is not None:
            words = ["data", "--out", "rules", *options.mining.split()]
            assert cli.parse_program("mine", words)


def test_fifty_graphs_are_of_all_sizes_and_read_as_they_were_made(tmp_path):
    specs = fifty_graphs.make_specs()
    assert len({spec.name for spec in specs}) == 50
    entities = [spec.n_entities for spec in specs]
    assert (min(entities), max(entities)) == (14, 100_000)
    spec = fifty_graphs.Spec(60, 5, 0.01, has_odd_names=True)
    n_triples = fifty_graphs.write_graph(tmp_path / "graph", spec, seed=3)
    n_lines = {
        file.stem: len(file.read_text().splitlines())
        for file in (tmp_path / "graph").iterdir()
    }
    assert sum(n_lines.values()) == n_triples
    assert n_lines["train"] == pytest.approx(0.8 * n_triples, abs=1)


# checks


def test_a_difference_between_commits_is_a_row_and_an_exit_status(
    tmp_path, monkeypatch
):
    """The runs are replaced by ones that tell the two checkouts apart."""
    here = check_unchanged.ROOT
    runs = {
        "same": lambda checkout, folder: ["1", "2"],
        "other": lambda checkout, folder: ["1", str(checkout == here)],
    }
    monkeypatch.setattr(check_unchanged, "RUNS", runs)
    out = tmp_path / "unchanged.json"
    words = ["--baseline", "HEAD", "--out", out]
    assert run(check_unchanged, monkeypatch, *words) == 1
    rows = {row["run"]: row for row in json.loads(out.read_text())["rows"]}
    assert (rows["same"]["values"], rows["same"]["difference"]) == (2, "")
    first = "1 of 2 values differ, first 1: False before, True now"
    assert rows["other"]["difference"] == first
    assert run(check_unchanged, monkeypatch, *words, "--only", "same") == 0


def test_what_is_compared_are_results_and_no_logs():
    value = {"score": 0.1 + 0.2, "seconds": 3.0, "proofs": [{"rank": 7}]}
    found = [*check_unchanged.results(value)]
    assert found == ["score 0.30000000000000004", "rank 7"]


# measures of the code

SMALL = '''"""A module."""
SIZES = (1, 2 * 3)
LIMIT: int = -5
NAME = "a"

class A(typing.Protocol[T]):
    def method(self) -> None:
        # A comment.
        pass

@dataclass(frozen=True)
class B: ...

class C(A): ...

def add(a: Any, b: int) -> int:
    """The sum."""
    total = a + b
    return total
'''
# Assign, Name, BinOp, Name, Name; Return, Name; Pass. Operators and contexts are not counted.
SMALL_NODES, SMALL_LINES = 8, 3


def test_the_measures_of_a_small_project(tmp_path):
    for folder in ("funcppo", "tests", "experiments", "docs"):
        (tmp_path / folder).mkdir()
    (tmp_path / "funcppo" / "a.py").write_text(SMALL)
    (tmp_path / "tests" / "test_a.py").write_text("a = 1\nb = 2\n")
    for name in ("README.md", "INVESTIGATION.md", "CHANGELOG.md", "docs/a.md"):
        (tmp_path / name).write_text("two words\n")
    assert measures.measure(tmp_path, has_options=False) == {
        "syntax nodes in function bodies": SMALL_NODES,
        "modules": 1,
        "classes (NamedTuple, dataclass, Protocol, TypedDict)": 2,
        "  Protocol": 1,
        "  dataclass": 1,
        "numeric module constants": 2,
        "lines of tests": 2,
        "lines of experiments": 0,
        "words of documents": 6,
        "words of CHANGELOG.md": 2,
    }
    text = "--out RUN\n --seed N, see --out and --no-a.b-c; -h"
    assert measures.options(text) == {"--out", "--seed", "--no-a.b-c"}

    found = readability.measure(tmp_path / "funcppo")
    assert (found.body_nodes, found.body_lines) == (SMALL_NODES, SMALL_LINES)
    assert (found.functions, found.n_any) == (2, 1)


# data


def test_countries_leave_out_what_their_set_says(tmp_path, monkeypatch):
    """Countries on a ring of each of four regions."""
    rows = []
    for i in range(120):
        region, half = build_countries.REGIONS[i % 4], i % 8 // 4
        row = {"cca3": f"C{i}", "region": region}
        row["name"] = {"common": f"Land {i}", "official": f"State of {i}"}
        row["subregion"] = f"{region} {half}"
        row["borders"] = [f"C{(i + step) % 120}" for step in (4, -4)]
        rows.append(row)
    world = tmp_path / "countries.json"
    world.write_text(json.dumps(rows))
    run(build_countries, monkeypatch, world, "--out", tmp_path / "out")
    countries = build_countries.read_countries(world)
    valid, test = build_countries.split(countries, 0)
    held_out = {*valid, *test}
    for number in (1, 2, 3):
        folder = tmp_path / "out" / f"countries_s{number}"
        lines = (folder / "train.txt").read_text().splitlines()
        train = {tuple(line.split("\t")) for line in lines}
        for name, country in countries.items():
            is_beside = any(other in held_out for other in country.neighbours)
            is_left_out = name in held_out or (number == 3 and is_beside)
            fact = (name, "locatedIn", country.region)
            assert (fact in train) != is_left_out, (number, name)
            fact = (name, "locatedIn", country.subregion)
            assert (fact in train) == (number == 1 or name not in held_out)
        assert len((folder / "rules.txt").read_text().splitlines()) == number
