"""`train`: the files of a run, resuming, bad input, and what is printed of compilers and graphs."""

import csv
import errno
import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import get_args
from unittest.mock import Mock

import numpy as np
import pytest

from funcppo import checkpoint, logs
from funcppo.cli.options import parse_options
from funcppo.cli.train import Train
from funcppo.core.settings import CONFIG_FILE, METRICS_FILE
from funcppo.kg.config import CHECKPOINT_FILE, RESULTS_FILE, read_config
from funcppo.kg.run import train as training
from funcppo.kg.run.run import open_run
from funcppo.runtime.capture import ReplayMode
from tests.cli.runner import (
    SMALL,
    TRAINED,
    contains,
    funcppo,
    read_records,
    settings,
)
from tests.kg.run.runs import assert_equal_runs


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_run_leaves_its_config_metrics_checkpoint_and_results(trained):
    rows = logs.read(trained / METRICS_FILE)
    assert [row["update"] for row in rows] == [0, 1, 2, 3, 4]
    assert read_config(trained).steps == 128
    results = json.loads((trained / RESULTS_FILE).read_text())
    assert 0 < results["seconds"] < results["total_seconds"]
    strategy = results["strategy"]
    (failure,) = strategy["failures"]
    assert (strategy["strategy"], failure["name"]) == ("eager", "compiling")
    assert failure["message"] == "eager was asked for"
    assert failure["code"] == "not_requested"
    assert logs.read_header(trained / METRICS_FILE) == {
        "strategy": strategy,
        "graphs": results["graphs"],
        "versions": results["versions"],
    }
    assert {
        "exists@1", "max-confidence", "noisy-or", "best-proof, untrained", "best-proof, trained"
    } < set(results["test"])  # fmt: skip
    assert all(
        0.0 < row["mrr"] <= 1.0 and "auc_pr" in row
        for row in results["test"].values()
    )


def test_every_field_of_the_files_is_documented(trained):
    text = (Path(__file__).parents[2] / "docs" / "files.md").read_text()
    documented = set(re.findall(r"`([^`]+)`", text))
    rows = logs.read(trained / METRICS_FILE)
    header = logs.read_header(trained / METRICS_FILE)
    results = json.loads((trained / RESULTS_FILE).read_text())
    written = {*header, *results, *(name for row in rows for name in row)}
    of_graphs = {"capture_ms", *get_args(ReplayMode)}
    assert "loss" in written and written | of_graphs <= documented


def test_settings_of_files_and_metrics_where_asked(trained, programs, tmp_path):
    """The data set too; an option of the command line wins. The run equals that of the same options."""
    settings = json.loads((trained / CONFIG_FILE).read_text())
    settings["steps"] = 9999
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    words = ("--config", tmp_path / "settings.json", "--steps", 128)
    words += ("--out", tmp_path / "run", "--log", "csv")
    assert programs("train", *words) == 0
    assert_equal_runs(tmp_path / "run", trained)
    with open(tmp_path / "run" / "metrics.csv") as file:
        updates = [row["update"] for row in csv.DictReader(file)]
    rows = logs.read(trained / METRICS_FILE)
    assert updates == [str(row["update"]) for row in rows]


def test_where_no_run_is_to_resume_one_begins(trained, programs, tmp_path):
    """Equal to one without --resume, without graphs and with a file of metrics; each says what it did."""
    out, exported = tmp_path / "run", tmp_path / "funcppo.prom"
    options = [x for x in TRAINED if x != "-v"]
    words = ("countries_s1", "--out", out, "--resume", *options)
    words += ("--cuda-graphs", "off", "--metrics-file", exported)
    printed = programs.printed("train", *words, "--log-compiles")
    assert "held no run to resume: a new one" in printed
    counted = " ".join(printed.split()).split("compiles and graphs: ")[1]
    counts = "compiles 0, cache_hits 0, recompiles 0, cudagraph_recordings 0"
    assert contains(counted, counts)
    reason = "turned off by --cuda-graphs off"
    assert f"fallback_reason {reason}" in counted
    assert logs.read(out / METRICS_FILE)[-1]["fallback_reason"] == reason
    assert logs.read_header(out / METRICS_FILE)["graphs"] == "off"
    assert_equal_runs(out, trained)
    lines = exported.read_text().splitlines()
    assert {"funcppo_updates_total 4.0", "funcppo_finished 1.0"} <= set(lines)
    info = next(x for x in lines if x.startswith("funcppo_run_info{"))
    for label in ('program="train"', 'strategy="eager"', 'device="cpu"'):
        assert label in info
    assert [x.name for x in tmp_path.glob("funcppo*")] == [exported.name]


def test_a_run_that_cannot_be_written_leaves_the_one_it_would_replace(
    trained, tmp_path, programs, monkeypatch, capsys
):
    out = tmp_path / "run"
    shutil.copytree(trained, out)

    before = contents(out)
    words = ["train", "countries_s2", "--out", out, "--overwrite", *TRAINED]
    words += ["--set", "prover.max_height=1"]
    error = OSError(errno.ENOSPC, "No space left on device", "x")
    for name in ("save_checkpoint", "write_config"):
        with monkeypatch.context() as patch:
            patch.setattr(training, name, Mock(side_effect=error))
            assert programs(*words) == 2
        assert "No space left on device" in capsys.readouterr().err
        assert contents(out) == before

    assert programs(*words) == 0
    assert read_config(out).dataset == "countries_s2"
    assert contents(out).keys() == before.keys()
    rows = logs.read(out / METRICS_FILE)
    assert [row["update"] for row in rows] == [0, 1, 2, 3, 4]


def resume(folder, *options):
    """The words that resume a run on Countries S1."""
    words = ("train", "countries_s1", "--out", folder, "--resume", "-v")
    return (*words, *options)


def test_a_full_disk_loses_nothing(trained, programs, capsys, tmp_path):
    """A limit on the size of files stands for the disk: it fits the log, not the checkpoint."""
    resource = pytest.importorskip("resource")
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    before = contents(run)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        assert programs(*resume(run, "--steps", "256")) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    checkpoint_file = (run / CHECKPOINT_FILE).resolve()
    line = f"funcppo: {checkpoint_file}: File too large\n"
    assert capsys.readouterr().err == line
    assert contents(run) == before
    assert programs(*resume(run, "--steps", "256")) == 0


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        (["--set", "ppo.learning_rate=0.5"], "ppo.learning_rate: expected 0.001, got 0.5"),
        (["--set", "ppo.half_value_loss=off"], "ppo.half_value_loss: expected True, got False"),
        (["--set", "rule_score=auto"], "rule_score: expected noisy-or@3, got auto"),
        (["--device", "cuda", "--seed", "1"], "seed: expected 0, got 1; device: expected cpu, got cuda"),
        (["--set", "data.split_ratios=0.8,0.1,0.1"], "data.split_ratios: expected None, got 0.8,0.1,0.1"),
    ],
)  # fmt: skip
def test_a_run_is_resumed_with_its_own(options, changes, trained, programs):
    before = contents(trained)
    line = f"{trained}: a run is resumed with its own settings: {changes}"
    assert programs.refused(*resume(trained, *options)) == line
    assert contents(trained) == before


def test_a_guide_has_its_own_entropy_unless_one_is_given(tmp_path):
    (tmp_path / "guide.json").write_text('{"learner": "guide"}')
    for how in ("--learner guide", f"--config {tmp_path / 'guide.json'}"):
        for more, expected in (("", 0.02), ("--set ppo.entropy_coef=0.3", 0.3)):
            words = f"a --out {tmp_path / 'run'} {how} {more}".split()
            settings = parse_options(Train, words).settings
            assert settings.learner == "guide"
            assert settings.ppo.entropy_coef == expected


def test_more_steps_extend_a_finished_run(programs, capsys, tmp_path):
    """With a constant learning rate, to the state of a run that had as many steps from the start."""
    constant = ("--set", "ppo.learning_rate_schedule.kind=constant", *TRAINED)
    long, short = tmp_path / "long", tmp_path / "short"
    steps = ("--steps", "256")
    for folder, options in ((long, (*constant, *steps)), (short, constant)):
        arguments = ("countries_s1", "--out", folder, *options)
        assert programs("train", *arguments) == 0
    assert programs(*resume(short, *steps)) == 0

    arrays, whole = (
        checkpoint.read(folder / CHECKPOINT_FILE)[0] for folder in (short, long)
    )
    assert int(arrays["train_state.update"]) == 8
    for name in whole:
        if name.startswith("train_state."):
            assert np.array_equal(arrays[name], whole[name]), name
    rows = logs.read(short / METRICS_FILE)
    assert [row["update"] for row in rows] == list(range(9))
    assert read_config(short).steps == 256

    # Said at once, kept by later resumes, and part of the results.
    note = "extended after update 4 from 128 to 256 steps: "
    assert f"note: {note}" in capsys.readouterr().out
    assert f"note: {note}" in programs.printed(*resume(short))
    results = json.loads((short / RESULTS_FILE).read_text())
    assert sum(text.startswith(note) for text in results["notes"]) == 1
    assert results["steps"] == 256


def test_extended_schedules_span_the_new_total(trained, programs, tmp_path):
    """The learning rate falls by 1/4 of the initial one an update; by 1/8 and from 1/2 on, when it is extended."""
    shutil.copytree(trained, tmp_path / "run")
    assert programs(*resume(tmp_path / "run", "--steps", "256")) == 0
    rows = logs.read(tmp_path / "run" / METRICS_FILE)
    rates = [row["learning_rate"] / 0.001 for row in rows[1:]]
    expected = [1, 3 / 4, 2 / 4, 1 / 4, 4 / 8, 3 / 8, 2 / 8, 1 / 8]
    assert rates == pytest.approx(expected)


def test_a_run_that_is_killed_in_a_validation_is_resumed_bit_for_bit(
    trained, programs, monkeypatch, tmp_path
):
    """In the one after update 2."""
    validate = training.validate
    calls = []

    def killed(run, on_progress):
        calls.append(run)
        if len(calls) == 2:
            # The second signal is not deferred.
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return validate(run, on_progress)

    with monkeypatch.context() as patch:
        patch.setattr(training, "validate", killed)
        arguments = ("countries_s1", "--out", tmp_path, *TRAINED)
        assert funcppo(patch, "train", *arguments) == 130
    saved = checkpoint.read(tmp_path / CHECKPOINT_FILE)[0]
    assert int(saved["train_state.update"]) == 2
    assert programs(*resume(tmp_path)) == 0
    assert_equal_runs(tmp_path, trained)


def test_of_a_damaged_checkpoint_the_last_is_taken(trained, programs, tmp_path):
    """A disk has lost the end of it and of the metrics; notes are kept, and the result is that of the whole run."""
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    path = run / CHECKPOINT_FILE
    path.write_bytes(path.read_bytes()[:-100])
    metrics = run / METRICS_FILE
    metrics.write_bytes(metrics.read_bytes()[:-30])
    note = "previous-checkpoint.npz is used in its place"
    result = programs.json("evaluate", run, "--max-queries", "2")
    assert sum(note in line for line in result["notes"]) == 1
    whole = (trained / CHECKPOINT_FILE).stat().st_size
    assert path.stat().st_size == whole - 100

    assert note in " ".join(programs.printed(*resume(run)).split())
    results = json.loads((run / RESULTS_FILE).read_text())
    assert sum(note in line for line in results["notes"]) == 1
    assert f"{metrics}:6: unfinished line dropped" in results["notes"]
    assert_equal_runs(run, trained)


def test_half_written_files_are_removed(trained, programs, capsys, tmp_path):
    """Not those of the test's own parent, which is alive."""
    shutil.copytree(trained, tmp_path / "run")
    stale = tmp_path / "run" / f"{CHECKPOINT_FILE}.999999999.part"
    alive = stale.with_name(f"{CHECKPOINT_FILE}.{os.getppid()}.part")
    for path in (stale, alive):
        path.write_text("")
    (tmp_path / "run" / "start-x.part").mkdir()
    assert programs(*resume(tmp_path / "run")) == 0
    line = f"note: removed {stale.name}, left by a killed process"
    assert line in capsys.readouterr().out
    assert alive.exists() and not stale.exists()
    assert not (tmp_path / "run" / "start-x.part").exists()


HEIGHT_2 = "--set prover.max_height=2 --set prover.object_identity=True"


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ("no_such_set --out {tmp}/x", "no_such_set"),
        ("countries_s1 --out {run}", "holds a run already"),
        ("countries_s1 --out {other}", "a run already, checkpoint.npz"),
        ("countries_s2 {again}", "own settings: dataset: expected countri"),
        ("{new} --set ppo.n_minibatches=7", "expected a divisor of ... got 7"),
        ("- --out {run}", "DATASET -: expected a file or a name, with which"),
        ("countries_s1 --out {run}/config.json", "a folder, got a file"),
        (f"{{new}} {HEIGHT_2}", "expected fact_selection=oracle, at height 1"),
        ("{new} --strategy one-graph", "since TORCH_COMPILE_DISABLE=1 turns"),
        ("--out {tmp}/x", "DATASET: expected a data set, got none"),
        ("--out {tmp}/x --resume", "train` wrote, got none"),
        ("--config s.yaml {again}", "--config s.yaml: No such file"),
        ("--overwrite {again}", "--resume, --overwrite: expected one of"),
        ("countries_s1 {again} --steps 127", "--steps: expected 128 or more,"),
        ("{new} --metrics-file {tmp}/y/z", "...y/z: expected a file in a fol"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    trained, programs, monkeypatch, tmp_path, args, line
):
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    before = (trained / CHECKPOINT_FILE).read_bytes()
    small = [] if "ppo.n_minibatches=7" in args else SMALL
    places = {"tmp": tmp_path, "run": trained, "other": tmp_path / "other"}
    places["other"].mkdir()
    (places["other"] / CHECKPOINT_FILE).write_text("of another program")
    places["new"] = f"countries_s1 --out {tmp_path}/x"
    places["again"] = f"--resume --out {trained}"
    words = args.format(**places).split()
    error = programs.refused("train", *words, *small)
    assert contains(error, line), error
    assert (trained / CHECKPOINT_FILE).read_bytes() == before
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("score", ["success"], "one of success, best-proof"),
        ("rule_metric", 1.5, "0 to 1"),
        ("step_names", ["fit", 3], "a text"),
        ("pending_row", {"seconds": 1}, "the metrics of an update"),
        ("n_ranks", -1, "0 or more"),
    ],
)
def test_files_that_say_something_else_of_their_run_are_one_line(
    field, value, expected, trained, programs, gpus, tmp_path
):
    run, state = tmp_path / "run", open_run(trained).state
    shutil.copytree(trained, run)
    path = run / CHECKPOINT_FILE
    meta = checkpoint.read(path)[1] | {field: value}
    checkpoint.save(path, state, meta)
    line = f"{path}: {field}: expected {expected}, got {value!r}"
    assert programs.refused(*resume(run)) == line

    config = json.loads((run / CONFIG_FILE).read_text()) | {"device": "cuda"}
    (run / CONFIG_FILE).write_text(json.dumps(config))
    gpus(0)
    line = "--device cuda: expected a CUDA device, PyTorch found none"
    assert programs.refused(*resume(run)) == line


def rounded(results):
    """Results with numbers of 12 decimals."""
    text = json.dumps(results)
    return json.loads(text, parse_float=lambda x: round(float(x), 12))


def test_a_run_of_questions_through_all_programs(programs, tmp_path):
    """Trained, resumed, evaluated, proved and checked."""
    out = tmp_path / "run"
    words = ("train", "family_tree:60:0", "--out", out)
    sizes = "listwise.n_epochs=2 questions.max_questions=120"
    sizes += " questions.embedding=True embedding.n_epochs=2"
    sizes += " questions.bellman_ford=False"
    options = settings(f"prover.max_height=1 {sizes}")
    results = programs.json(*words, *options)
    assert (results["learner"], results["score"]) == ("questions", "evidence")
    trained = results["test"][results["answering_row"]]
    assert {"evidence, untrained", "+ embeddings"} < set(results["test"])
    assert any("listwise fit: " in note for note in results["notes"])

    again = programs.json(*words, *options, "--resume")
    # Rounds of another size add the same numbers in another order.
    assert rounded(again["test"]) == rounded(results["test"])

    details = tmp_path / "details.jsonl"
    ranked = programs.json("evaluate", out, "--details", details)
    assert ranked["score"] == "evidence"
    assert ranked["mrr"] == pytest.approx(trained["mrr"], abs=1e-9)
    records = read_records(details)
    proved = [r for r in records if "proof" in r and r["status"] == "proved"]
    assert proved and all(r["proof"] for r in proved)

    text = programs.printed("prove", out, proved[0]["atom"])
    assert "as an answer to" in text and " it, the log of" in text
    evidence = programs.json("prove", out, proved[0]["atom"])["evidence"]
    assert [e["rules"][0]["share"] > 0 for e in evidence] == [True, True]

    words = ("check", out, "--max-queries", "4", "--seconds", "3600")
    checks = programs.json(*words)["checks"]
    assert checks[-1]["kind"] == "evidence" and checks[-1]["n_compared"] == 8

    error = programs.refused("evaluate", out, "--score", "success")
    assert "'success': expected evidence" in error


def test_a_run_prints_few_lines_beside_its_table(programs, capsys, tmp_path):
    """Six at most; every note with -v, the table alone with -q."""
    words = ("countries_s1", "--overwrite", "--out", tmp_path, *TRAINED)
    words = [word for word in words if word != "-v"]
    printed = []
    for option in ((), ("-q",), ("-v",)):
        assert programs("train", *words, *option) == 0
        printed.append(capsys.readouterr().out.rstrip().splitlines())
    few, table, all_ = printed
    start = next(i for i, line in enumerate(few) if "expected ties" in line)
    rows = len([line for line in table if line.strip()])
    assert table[0] == few[start]
    assert len([line for line in few if line.strip()]) - rows <= 6
    assert few[0].startswith("countries_s1: 274 entities, ")
    assert few[-1].startswith("done in ") and str(tmp_path) in few[-1]
    assert not any(line.startswith("note: ") for line in few)
    notes = {line[6:] for line in all_ if line.startswith("note: ")}
    results = json.loads((tmp_path / RESULTS_FILE).read_text())
    assert len(results["notes"]) > 3
    assert len(notes & set(results["notes"])) > 3
