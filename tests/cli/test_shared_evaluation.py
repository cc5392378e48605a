"""Evaluations, and answers to a file of queries, that several processes share."""

import json
import os
import signal
import time

import pytest

from funcppo.kg.graph.loaders import load
from funcppo.kg.ranking import evaluate as evaluation
from tests.cli.processes import keep_metrics, run_processes, waiting_ends_with
from tests.cli.runner import settings
from tests.ports import hold_ports, port_of

DATA = "family_tree:30:1"
EVALUATE = ("evaluate", DATA, "--score", "noisy-or-other-facts")
EVALUATE += ("--height", "2")
EVALUATE += (*settings("smoothing=None object_identity=False"),)


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


def test_files_and_text_are_equal_for_any_number_of_processes(tmp_path, alone):
    for n in (2, 3):
        ended, files = evaluate(n, tmp_path, f"{n}.jsonl", "--json", "-")
        assert [x.status for x in ended] == [0] * n
        assert files == alone
        result = json.loads(ended[0].out)
        assert result["processes"] == n
        assert result["n_queries"] == 2 * len(load(DATA).test)
        # the others print nothing
        assert all((x.out, x.err) == ("", "") for x in ended[1:])


def test_each_process_serves_its_own_metrics_and_rank_0_writes_a_file(tmp_path):
    file = tmp_path / "funcppo.prom"
    with hold_ports(3) as held:
        port = port_of(held[0])
        options = ("--metrics-port", port, "--metrics-file", file)
        args = (*EVALUATE, *options, "--json", "-")
        ended = run_processes(
            3, tmp_path, *args, prepare=keep_metrics(tmp_path, port)
        )
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


def test_an_evaluation_with_a_killed_process_is_resumed(tmp_path, alone):
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


def test_a_program_that_is_not_shared_refuses_several_processes(tmp_path):
    ended = run_processes(2, tmp_path, "data", DATA)
    assert [x.status for x in ended] == [2, 2]
    assert ended[0].err == (
        "funcppo: data: expected one process, got 2: several processes can share "
        "train, evaluate\n"
    )
    assert ended[1].err == ""


def test_a_run_that_searches_is_evaluated_by_processes(tmp_path, trained):
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
