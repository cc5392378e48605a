"""Evaluations, and answers to a file of queries, that several processes share."""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import signal
import time
import urllib.request

import pytest

from funcppo import cli
from funcppo.cli import predict
from funcppo.core import record_log
from funcppo.kg.graph.loaders import load
from funcppo.kg.ranking import evaluator as evaluation
from funcppo.kg.run import subject
from funcppo.kg.run.telemetry import Telemetry
from funcppo.runtime import distributed
from tests.cli.processes import run_processes, waiting_ends_with
from tests.ports import hold_ports, port_of

DATA = "family_tree:30:1"
EVALUATE = ("evaluate", DATA, "--score", "noisy-or-other-facts")
EVALUATE += ("--height", "2")
EVALUATE += ("--smoothing", "None", "--object-identity", "False")


def evaluate(n, folder, name, *args, **kwargs):
    """What the processes print, and the bytes of the details and of their settings."""
    details = folder / name
    ended = run_processes(
        n, folder, *EVALUATE, "--details", details, *args, **kwargs
    )
    settings = folder / f"{name}.settings.json"
    return ended, details.read_bytes() + settings.read_bytes()


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The files of one process."""
    folder = tmp_path_factory.mktemp("alone")
    ended, files = evaluate(1, folder, "details.jsonl")
    assert [x.status for x in ended] == [0]
    return files


def test_files_and_text_are_equal_for_every_number_of_processes(
    tmp_path, alone
):
    for n in (2, 3):
        ended, files = evaluate(n, tmp_path, f"{n}.jsonl", "--json", "-")
        assert [x.status for x in ended] == [0] * n
        assert files == alone
        result = json.loads(ended[0].out)
        assert result["processes"] == n
        assert result["n_queries"] == 2 * len(load(DATA).test)
        # the others print nothing
        assert all((x.out, x.err) == ("", "") for x in ended[1:])


def test_files_are_those_of_a_program_that_no_launcher_started(
    tmp_path, alone, monkeypatch
):
    from tests.cli.runner import funcppo

    details = tmp_path / "details.jsonl"
    assert funcppo(monkeypatch, *EVALUATE, "--details", details) == 0
    settings = tmp_path / "details.jsonl.settings.json"
    assert details.read_bytes() + settings.read_bytes() == alone


def test_each_process_serves_its_own_metrics_and_rank_0_writes_a_file(tmp_path):
    file = tmp_path / "funcppo.prom"

    def keep_metrics(rank):
        finish = Telemetry.finish

        def keep(metrics):
            finish(metrics)
            url = f"http://127.0.0.1:{port + rank}/metrics"
            with urllib.request.urlopen(url) as answer:
                (tmp_path / f"{rank}.metrics").write_bytes(answer.read())

        Telemetry.finish = keep

    with hold_ports(3) as held:
        port = port_of(held[0])
        options = ("--metrics-port", port, "--metrics-file", file)
        args = (*EVALUATE, *options, "--json", "-")
        ended = run_processes(3, tmp_path, *args, prepare=keep_metrics)
    assert [x.status for x in ended] == [0, 0, 0]
    own = [(tmp_path / f"{i}.metrics").read_text() for i in range(3)]
    for text in own:
        assert "funcppo_world_size 3.0" in text
        assert f'dataset="{DATA}"' in text
        assert "funcppo_finished 1.0" in text
    ranked = [metric(text, "funcppo_queries_ranked_total") for text in own]
    # rank 0 counts what it writes, the others what they rank
    assert ranked[0] == json.loads(ended[0].out)["n_queries"]
    assert 0 <= sum(ranked[1:]) <= ranked[0]
    assert metric(file.read_text(), "funcppo_queries_ranked_total") == ranked[0]


def metric(text, name):
    """The value of a series without labels."""
    (line,) = (x for x in text.splitlines() if x.startswith(f"{name} "))
    return float(line.split()[1])


def test_a_taken_metrics_port_of_one_process_is_one_line(tmp_path):
    with hold_ports(2) as held:
        port = port_of(held[0])
        held[1].listen()
        args = (*EVALUATE, "--metrics-port", port)
        ended = run_processes(2, tmp_path, *args)
    assert [x.status for x in ended] == [2, 2]
    assert ended[0].err.endswith(
        f"funcppo: rank 1: --metrics-port: expected a free port of 127.0.0.1, got {port + 1}: Address already in use\n"
    )
    assert ended[1].err == ""


def test_a_metrics_port_too_high_for_the_processes_is_one_line(tmp_path):
    args = (*EVALUATE, "--metrics-port", 65_535)
    ended = run_processes(2, tmp_path, *args)
    assert [x.status for x in ended] == [2, 2]
    assert "rank 1: --metrics-port: expected at most 65534 " in ended[0].err


def end_at_the_third_window(folder, action, *, is_last=False):
    """Do something to rank 1 at its third window; rank 0 ranks one window before, and waits in its second.

    Args:
      is_last: rank 1 does nothing after it, and rank 0 need not wait for it long.
    """
    reached = folder / "reached"

    def prepare(rank):
        rank_window, calls = evaluation.rank_window, []

        def rank_or_end(*args):
            calls.append(args)
            if rank == 1 and len(calls) == 3:
                reached.touch()
                action()
            while rank == 0 and len(calls) == 2 and not reached.exists():
                time.sleep(0.01)
            return rank_window(*args)

        evaluation.rank_window = rank_or_end
        if is_last:
            waiting_ends_with(reached)

    return prepare


def test_an_evaluation_goes_on_from_a_killed_process_to_the_same_files(
    tmp_path, alone
):
    def kill():
        os.kill(os.getpid(), signal.SIGKILL)

    ended, files = evaluate(
        2,
        tmp_path,
        "details.jsonl",
        prepare=end_at_the_third_window(tmp_path, kill, is_last=True),
    )
    # Nobody restarts them here: rank 0 waits for the window in vain.
    assert [x.status for x in ended] == [75, -signal.SIGKILL]
    assert "rank 0: " in ended[0].err
    assert "rank 1: 2 done, at window " in ended[0].err
    assert len(ended[0].err.strip().split("\n")[-1].split("funcppo: ")) == 2
    n_lines = files.count(b'"query_row"')
    assert 0 < n_lines < alone.count(b'"query_row"')

    ended, files = evaluate(3, tmp_path, "details.jsonl", "--resume")
    assert [x.status for x in ended] == [0, 0, 0]
    assert files == alone


def test_an_error_of_one_process_is_one_line_of_rank_0(tmp_path):
    def fail():
        raise ValueError("the disk is gone")

    ended, _ = evaluate(
        2,
        tmp_path,
        "details.jsonl",
        prepare=end_at_the_third_window(tmp_path, fail),
    )
    assert [x.status for x in ended] == [2, 2]
    assert ended[0].err.endswith("funcppo: rank 1: the disk is gone\n")
    assert ended[1].err == ""


def test_processes_that_hold_other_data_end_with_one_line(tmp_path):
    def other_data(rank):
        if rank == 1:
            from funcppo.kg.graph import loaders

            loaders.load = lambda *args, **kwargs: load("family_tree:30:2")

    details = tmp_path / "details.jsonl"
    args = (*EVALUATE, "--details", details)
    ended = run_processes(2, tmp_path, *args, prepare=other_data)
    assert [x.status for x in ended] == [2, 2]
    lines = [x for x in ended[0].err.split("\n") if x.startswith("funcppo: ")]
    assert len(lines) == 1
    assert lines[0].startswith("funcppo: rank 1: expected ")
    assert ended[1].err == ""


@pytest.mark.parametrize(
    ("module", "name", "what"),
    [
        (platform, "python_version", "Python"),
        (cli, "package_version", "funcppo"),
    ],
)
def test_processes_of_other_versions_end_with_one_line(
    tmp_path, monkeypatch, module, name, what
):
    def older(rank):
        if rank == 1:
            monkeypatch.setattr(module, name, lambda *args: "0.1")

    ended = run_processes(2, tmp_path, *EVALUATE, prepare=older)
    (line,) = ended[0].err.strip().splitlines()
    assert line.startswith(f"funcppo: rank 1: expected {what} ")
    assert line.endswith(", as rank 0 has, got 0.1")
    assert [x.status for x in ended] == [2, 2]
    assert (ended[0].out, ended[1].out, ended[1].err) == ("", "", "")


@pytest.mark.parametrize(
    "args",
    [
        EVALUATE,
        ("predict", DATA, "--queries", "queries.txt", *EVALUATE[2:]),
        ("mine", DATA, "--out", "rules.tsv"),
        ("train", DATA, "--out", "run", "--ppo.n-shards", "2"),
    ],
    ids=lambda args: args[0],
)
def test_processes_with_other_gpus_end_with_one_line(tmp_path, args):
    def other_gpu(rank):
        os.chdir(tmp_path)
        distributed.gpu_facts = lambda device: {"GPU": f"model {rank}"}

    entity = load(DATA).entities[0]
    (tmp_path / "queries.txt").write_text(f"mother('{entity}', ?x)\n")
    ended = run_processes(2, tmp_path, *args, prepare=other_gpu)
    assert [x.status for x in ended] == [2, 2], ended
    line = "funcppo: rank 1: expected GPU model 0, as rank 0 has, got model 1"
    lines = ended[0].err.splitlines()
    assert [x for x in lines if x.startswith("funcppo: ")] == [line]
    assert ended[1].err == ""


def test_a_program_that_is_not_shared_refuses_several_processes(tmp_path):
    ended = run_processes(2, tmp_path, "data", DATA)
    assert [x.status for x in ended] == [2, 2]
    assert ended[0].err == (
        "funcppo: data: expected one process, got 2: several processes can share "
        "train, evaluate, predict, mine\n"
    )
    assert ended[1].err == ""


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """Options of a file of queries, which processes share four at a time."""
    monkeypatch.setattr(predict, "SHARED_BATCH_QUERIES", 4)
    dataset = load(DATA)
    queries = [
        f"'{dataset.predicates[r - 1]}'('{dataset.entities[h - 1]}', ?x)"
        for r, h, _ in dataset.test.tolist()
    ]
    file = tmp_path / "queries.txt"
    file.write_text("\n".join(queries) + "\n")
    args = ("predict", DATA, "--queries", file, "--known", "--height", "2")
    args += ("--smoothing", "None", "--object-identity", "False")
    return args, len(queries)


def test_answers_to_a_file_of_queries_are_equal_for_every_number(
    tmp_path, asked
):
    args, n_queries = asked
    outputs = []
    for n in (1, 2):
        csv = tmp_path / f"{n}.csv"
        ended = run_processes(n, tmp_path, *args, "--csv", csv)
        assert [x.status for x in ended] == [0] * n, ended
        assert all((x.out, x.err) == ("", "") for x in ended[1:])
        outputs.append((csv.read_bytes(), ended[0].out))
    assert outputs[0] == outputs[1]
    assert outputs[0][1].count("new answers, score") == n_queries


def kill_main(n_batches, folder):
    """Kill rank 0 in the middle of writing a batch, when some are written."""
    reached = folder / "reached"

    def prepare(rank):
        waiting_ends_with(reached)
        distributed.TELL_SECONDS = 0.2  # rank 0 prints no error of others
        append, n_appended = record_log.append, []

        def append_or_die(log, records):
            if len(n_appended) == n_batches:
                log.file.write(b'{"query": "a line without an e')
                log.file.flush()
                reached.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            append(log, records)
            n_appended.append(len(records))

        record_log.append = append_or_die

    return prepare


@pytest.mark.parametrize(
    ("n_before", "n_after", "n_batches"),
    [(1, 2, 0), (2, 1, 1), (1, 2, 3), (0, 2, 3)],
)
def test_answers_go_on_from_a_killed_process_to_the_same_files(
    tmp_path, asked, monkeypatch, n_batches, n_before, n_after
):
    """0 processes: a program that no launcher started, whose batches are not those of processes."""
    args, n_queries = asked
    monkeypatch.setattr(predict, "FIRST_BATCH_QUERIES", 3)
    monkeypatch.setattr(predict, "MAX_BATCH_QUERIES", 3)
    # a slow batch makes the next one no smaller
    monkeypatch.setattr(predict, "BATCH_SECONDS", math.inf)
    whole, out = tmp_path / "whole.csv", tmp_path / "out.csv"
    ended = run_processes(1, tmp_path, *args, "--csv", whole)
    assert ended[0].status == 0

    args = (*args, "--csv", out)
    # Nobody ends the other process here: it waits for rank 0 in vain.
    env = {"WORLD_SIZE": "0"} if n_before == 0 else {}
    ended = run_processes(
        max(1, n_before),
        tmp_path,
        *args,
        env=env,
        prepare=kill_main(n_batches, tmp_path),
    )
    assert [x.status for x in ended] == [-signal.SIGKILL, 75][: len(ended)]
    part = tmp_path / "out.csv.part"
    batch = 4 if n_before else 3
    assert part.read_bytes().count(b"\n") == batch * n_batches < n_queries
    assert not out.exists()

    ended = run_processes(n_after, tmp_path, *args, "--resume")
    assert [x.status for x in ended] == [0] * n_after, ended
    assert f"{part}: dropped 1 unfinished line at its end" in ended[0].err
    assert out.read_bytes() == whole.read_bytes()
    assert not part.exists()
    beside = [tmp_path / f"{x}.csv.settings.json" for x in ("whole", "out")]
    assert beside[0].read_bytes() == beside[1].read_bytes()

    ended = run_processes(2, tmp_path, *args, "--resume")
    assert [x.status for x in ended] == [0, 0], ended
    assert ended[0].out == f"{out} is complete already\n"
    ended = run_processes(2, tmp_path, *args, "--resume", "--k", 3)
    assert [x.status for x in ended] == [2, 2], ended
    (line,) = [x for x in ended[0].err.splitlines() if "funcppo: " in x]
    assert "expected a file made with k 3, got 10" in line


def test_answers_go_on_when_another_process_was_killed(tmp_path, asked):
    args, n_queries = asked
    whole, out = tmp_path / "whole.csv", tmp_path / "out.csv"
    assert run_processes(1, tmp_path, *args, "--csv", whole)[0].status == 0
    reached = tmp_path / "reached"

    def kill(rank):
        answer, calls = predict.Predict._answer, []

        def answer_or_die(*arguments):
            calls.append(arguments)
            if rank == 1 and len(calls) == 2:
                reached.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            while rank == 0 and len(calls) == 2 and not reached.exists():
                time.sleep(0.01)
            return answer(*arguments)

        predict.Predict._answer = answer_or_die
        waiting_ends_with(reached)

    args = (*args, "--csv", out)
    ended = run_processes(2, tmp_path, *args, prepare=kill)
    assert [x.status for x in ended] == [75, -signal.SIGKILL]
    n_lines = (tmp_path / "out.csv.part").read_bytes().count(b"\n")
    assert 0 < n_lines < n_queries
    ended = run_processes(3, tmp_path, *args, "--resume")
    assert [x.status for x in ended] == [0, 0, 0], ended
    assert out.read_bytes() == whole.read_bytes()


def test_processes_that_hold_other_queries_end_with_one_line(tmp_path, asked):
    def other_queries(rank):
        read = predict.Predict._read_queries
        if rank == 1:
            predict.Predict._read_queries = lambda self, answerer: (
                read(self, answerer)[0][:-1],
                (),
            )

    args, _ = asked
    out = tmp_path / "out.csv"
    ended = run_processes(
        2, tmp_path, *args, "--csv", out, prepare=other_queries
    )
    assert [x.status for x in ended] == [2, 2]
    assert "rank 1: expected queries_digest " in ended[0].err
    assert not (tmp_path / "out.csv.part").exists()


def test_new_facts_are_listed_by_one_process(tmp_path):
    args = ("--relation", "mother", "--new")
    ended = run_processes(2, tmp_path, "predict", DATA, *args)
    assert [x.status for x in ended] == [2, 2]
    assert "--new: expected one process, got 2" in ended[0].err


def test_a_run_that_searches_is_evaluated_with_the_batch_sizes_of_rank_0(
    tmp_path, trained
):
    files, results = [], []
    for n in (1, 2):
        details = tmp_path / f"{n}.jsonl"
        args = ("evaluate", trained, "--details", details, "--json", "-")
        ended = run_processes(n, tmp_path, *args)
        assert [x.status for x in ended] == [0] * n, ended
        files.append(details.read_bytes())
        results.append(json.loads(ended[0].out))
    assert files[0] == files[1]
    assert results[0]["mrr"] == results[1]["mrr"]


# -- settings that are chosen within a time, of which processes have no common clock


def notes_of(folder, n, *args, prepare=lambda rank: None):
    """The details of processes that choose settings, and the notes of rank 0.

    a follows from b, and b from c, which the facts are of: height 2 ranks valid best.
    """
    graph = folder / "graph"
    shutil.rmtree(graph, ignore_errors=True)
    graph.mkdir()
    for split, relations, rows in (
        ("train", "abc", range(6, 9)),
        ("train", "c", range(6)),
        ("valid", "a", range(3)),
        ("test", "a", range(3, 6)),
    ):
        with (graph / f"{split}.txt").open("a") as file:
            file.writelines(
                f"x{i}\t{name}\ty{i}\n" for i in rows for name in relations
            )
    (graph / "rules.txt").write_text("a(X,Y) :- b(X,Y).\nb(X,Y) :- c(X,Y).\n")
    details = folder / f"{n}.jsonl"
    words = ("evaluate", graph, "--json", "-", "--details", details)
    ended = run_processes(n, folder, *words, *args, prepare=prepare)
    assert [x.status for x in ended] == [0] * n, ended
    return details.read_bytes(), json.loads(ended[0].out)["notes"]


def test_rank_0_chooses_the_settings_of_all(tmp_path):
    """The others do not choose, so that it does not matter which of them has time for what."""
    alone, notes = notes_of(tmp_path, 1)
    assert any(note.startswith("height 2 chosen") for note in notes)

    def prepare(rank):
        def refuse(*args):
            raise AssertionError("rank 1 chose too")

        if rank == 1:
            subject.choose_settings = refuse

    assert notes_of(tmp_path, 2, prepare=prepare) == (alone, notes)


def test_the_choice_of_several_processes_ends_in_time(tmp_path):
    _, notes = notes_of(tmp_path, 2, "--choice-seconds", "1e-6")
    assert any(
        note.startswith("height 1 not tried: more time") for note in notes
    )


def test_a_height_that_one_process_has_no_time_for_is_taken_by_none(tmp_path):
    build_task = subject.build_task

    def prepare(rank):
        def build_in_time(dataset, cfg, *args, **kwargs):
            if rank == 1 and cfg.max_height == 2:
                raise ValueError("T_P to height 2 takes more time than is left")
            return build_task(dataset, cfg, *args, **kwargs)

        subject.build_task = build_in_time

    _, notes = notes_of(tmp_path, 2, prepare=prepare)
    (note,) = [note for note in notes if "not taken" in note]
    assert note == (
        "height 2 not taken: T_P to height 2 takes more time than is left"
    )
