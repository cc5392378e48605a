"""What is measured of a run: its files and notes, damaged and missing ones, and other data."""

import dataclasses
import shutil

import pytest

from funcppo.kg.graph import loaders
from funcppo.kg.run import run_start
from funcppo.kg.show.report import figures, page
from tests.kg.show.report.graphs import write_graph


def test_a_run_is_measured_with_its_log_results_and_notes(runs, reports):
    run = reports["questions"].measured
    assert run.is_finished and run.update == run.n_updates == 4
    assert run.n_test == run.n_ranked == 14
    assert [row["update"] for row in run.log][-1] == 4
    assert run.results["versions"]["torch"]
    assert any("no CUDA graph in training" in note for note in run.notes)
    assert len(set(run.notes)) == len(run.notes)
    assert list(run.ranked)[1:] == [
        "evidence, untrained", "evidence, listwise fit", "evidence, trained",
    ]  # fmt: skip


def test_a_run_that_is_ranked_by_rules_says_so_before_the_numbers(runs):
    folder = runs["questions"]
    run = run_start.open_run(folder)
    metric = run.state.best_valid_metric * 0 + 0.25
    state = run.state._replace(best_valid_metric=metric)
    for rule_metric, is_said in ((0.5, True), (0.2, False), (None, False)):
        judged = dataclasses.replace(run, state=state, rule_metric=rule_metric)
        measured = figures.measure(judged, folder, max_ranked=1)
        html = page.render([measured])
        assert (
            "predict and serve: answers are ranked by the rule score" in html
        ) == is_said
        assert bool(measured.measured.default_score_note) == is_said


def test_missing_files_are_noted_and_missing_lines_counted(runs, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(runs["proofs"], folder)
    (folder / "results.json").unlink()
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:2] + lines[4:]))
    run = run_start.open_run(folder)
    found = figures.measure(run, folder, max_ranked=1).measured
    assert not found.is_finished and found.results == {}
    assert found.is_trained
    assert any(
        note.startswith("results.json is missing") for note in found.notes
    )
    assert "metrics.jsonl: 2 updates have no line" in found.notes

    (folder / "metrics.jsonl").unlink()
    found = figures.measure(run, folder, max_ranked=1).measured
    assert any(
        note.startswith("metrics.jsonl is missing") for note in found.notes
    )


def test_a_damaged_file_is_named(runs, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(runs["proofs"], folder)
    run = run_start.open_run(folder)
    (folder / "results.json").write_text("{")
    with pytest.raises(ValueError, match=r"results\.json"):
        figures.measure(run, folder)


def test_other_data_are_refused_and_the_same_under_another_path_not(
    runs, tmp_path
):
    copies = {}
    for name in ("same", "other"):
        graph = write_graph(tmp_path / name / "graph")
        shutil.copytree(runs["questions"], tmp_path / name / "run")
        config = tmp_path / name / "run" / "config.json"
        old = str(runs["questions"].parent / "graph")
        assert old in config.read_text()
        config.write_text(config.read_text().replace(old, str(graph)))
        copies[name] = tmp_path / name / "run"
    with (tmp_path / "other" / "graph" / "train.txt").open("a") as file:
        file.write("e1\t<b>likes</b>\te1\n")
    figures.check_same_data([runs["questions"], copies["same"]])
    with pytest.raises(ValueError, match="other triples"):
        figures.check_same_data([runs["questions"], copies["other"]])


def test_data_are_the_same_whatever_the_length_of_the_rules(tmp_path):
    short, long = tmp_path / "short.txt", tmp_path / "long.txt"
    short.write_text("locatedIn(X, Y) :- neighborOf(X, Y)\n")
    long.write_text(
        "locatedIn(X, Y) :- neighborOf(X, Z), neighborOf(Z, W), locatedIn(W, Y)\n"
    )
    prints = [
        figures.fingerprint(loaders.load(name, str(rules)))
        for name in ("countries_s1", "countries_s2")
        for rules in (short, long)
    ]
    assert prints[0] == prints[1] != prints[2] == prints[3]
