"""`mine` by several processes: files equal to the byte, errors and signals as of `evaluate`."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

from funcppo.kg.mining import counting, path_rules
from tests.cli.processes import run_processes, waiting_ends_with

MINE = ("mine", "family_tree:400:1", "--max-rows", "60000")


def with_small_chunks(rank):
    """Many tasks, of some thousand rows each."""
    path_rules.CHUNK_ROWS = counting.CHUNK_ROWS = 3000
    path_rules.SLICE_ROWS = path_rules.MAX_BODY_ROWS = 6000


def mine(n, folder, prepare=with_small_chunks, **kwargs):
    """What the processes print, and the bytes of the rule file."""
    out = folder / f"{n}.tsv"
    args = (*MINE, "--out", out, "--json", folder / f"{n}.json")
    ended = run_processes(n, folder, *args, prepare=prepare, **kwargs)
    return ended, out.read_bytes() if out.exists() else b""


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_rules_are_equal_for_every_number_of_processes(tmp_path):
    """Searched from a sample and counted again; what is printed is that of one process."""
    ended, alone = mine(1, tmp_path)
    assert [x.status for x in ended] == [0], ended
    assert "the best rules were counted again" in ended[0].out
    for n in (2, 3):
        ended, rules = mine(n, tmp_path)
        assert [x.status for x in ended] == [0] * n, ended
        assert rules == alone
        result = json.loads((tmp_path / f"{n}.json").read_text())
        assert result["processes"] == n
        assert all((x.out, x.err) == ("", "") for x in ended[1:])


def at_the_first_task(folder, rank_to_disturb, action, *, is_last=False):
    """Do something at the first task of length 3 of a rank, for which the other one waits in its first.

    Args:
      is_last: that rank does nothing after it, and the other one need not wait for it long.
    """
    reached = folder / "reached"

    def prepare(rank):
        with_small_chunks(rank)
        iter_extensions = path_rules.iter_extensions
        stop = time.monotonic() + 300  # against a hang

        def extend_or_end(edges, part, length, *args):
            if length == 2 and not reached.exists():
                if rank == rank_to_disturb:
                    reached.touch()
                    action()
                while not reached.exists() and time.monotonic() < stop:
                    time.sleep(0.01)
            return iter_extensions(edges, part, length, *args)

        path_rules.iter_extensions = extend_or_end
        if is_last:
            waiting_ends_with(reached)

    return prepare


def test_an_error_of_one_process_is_one_line_of_rank_0(tmp_path):
    def fail():
        raise ValueError("the disk is gone")

    ended, rules = mine(2, tmp_path, at_the_first_task(tmp_path, 1, fail))
    assert [x.status for x in ended] == [2, 2]
    assert ended[0].err.endswith("funcppo: rank 1: the disk is gone\n")
    assert ended[1].err == "" and rules == b""


def test_a_process_that_is_killed_ends_the_others(tmp_path):
    def kill():
        os.kill(os.getpid(), signal.SIGKILL)

    ended, rules = mine(
        2,
        tmp_path,
        at_the_first_task(tmp_path, 1, kill, is_last=True),
    )
    assert [x.status for x in ended] == [75, -signal.SIGKILL]
    assert "; rank 1: 0 done, at part " in ended[0].err
    assert rules == b""


def test_a_signal_to_rank_0_writes_what_was_found_and_ends_the_others(tmp_path):
    def terminate():
        os.kill(os.getpid(), signal.SIGTERM)

    ended, rules = mine(2, tmp_path, at_the_first_task(tmp_path, 0, terminate))
    assert [x.status for x in ended] == [143, 0]
    assert rules.count(b"\n") > 1
    result = json.loads((tmp_path / "2.json").read_text())
    assert result["interrupted"]
