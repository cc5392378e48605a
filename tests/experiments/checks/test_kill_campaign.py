"""The campaign tells equal files from others, and goes on until its signals are sent."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from experiments.checks import kill_campaign
from experiments.checks.kill_campaign import Program

# Appends a letter a time, as one that resumes does; the file is what it would be undisturbed. As long as there is
# another file it does not come to its end, so that a signal always meets it.
HONEST = """
import os, sys, time
path, hold = sys.argv[1:]
while True:
    with open(path, "a+") as file:
        file.seek(0)
        size = len(file.read())
        if size < 20 or not os.path.exists(hold):
            if size >= 40:
                break
            file.write("x")
    time.sleep(0.001)
"""
# Begins a line at every start, so that a killed one shows.
FORGETFUL = 'open(__import__("sys").argv[1], "a").write("start ")\n' + HONEST


@pytest.mark.parametrize(
    ("source", "is_equal"), [(HONEST, True), (FORGETFUL, False)]
)
def test_a_program_that_does_not_resume_is_found(
    source, is_equal, monkeypatch, tmp_path
):
    hold = tmp_path / "hold"
    run_undisturbed = kill_campaign.run_undisturbed

    class Started(subprocess.Popen):
        """A process whose work takes a second by its own clock: a signal before comes when it has done a part of it."""

        def communicate(self, input=None, timeout=None):
            if timeout >= 1.0:
                hold.unlink(missing_ok=True)
                limit = kill_campaign.TIMEOUT_SECONDS
                return super().communicate(input, limit)
            n_bytes = size_of(self.out)
            while size_of(self.out) <= min(n_bytes, 19):
                time.sleep(0.001)
            raise subprocess.TimeoutExpired(self.args, timeout)

    def start(program, work):
        hold.touch()
        Started.out = work / "out"
        return Started(
            [sys.executable, "-c", source, str(work / "out"), str(hold)],
            stderr=subprocess.PIPE,
            text=True,
        )

    def run_for_a_second(program, work):
        run_undisturbed(program, work)
        return 1.0

    monkeypatch.setattr(kill_campaign, "start_program", start)
    monkeypatch.setattr(kill_campaign, "run_undisturbed", run_for_a_second)
    program = Program(
        name="p", words=(), resume=(), read=kill_campaign.read_outputs
    )
    rows = list(
        kill_campaign.disturb(program, "SIGKILL", 3, tmp_path, random.Random(0))
    )
    disturbed = [row for row in rows if row["n_signals"]]
    assert kill_campaign.summarise(rows)["n_kills"] >= 3
    assert all(not row["difference"] for row in rows) == is_equal
    assert disturbed


def size_of(path):
    """The bytes of a file, 0 where there is none."""
    return path.stat().st_size if path.exists() else 0


def test_times_and_notes_are_not_compared():
    line = '{"loss": 1.0, "seconds": %s, "notes": ["%s"]}'
    one, other = (
        kill_campaign.without_times(line % pair)
        for pair in ((1, "a"), (2, "b"))
    )
    assert one == other == b'{"loss": 1.0}'


def test_a_run_of_the_campaign_is_the_same_twice(tmp_path):
    """Whatever a file of a run says of its time is left out."""
    (train,) = (p for p in kill_campaign.PROGRAMS if p.name == "train")
    short = replace(train, words=(*train.words, "--steps", "32"))
    files = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        kill_campaign.run_undisturbed(short, tmp_path / name)
        files.append(kill_campaign.read_run(tmp_path / name / "out"))
    assert kill_campaign.compare(*files) == ""


def test_a_file_that_is_missing_or_left_over_is_a_difference():
    assert kill_campaign.compare({"a": b"1"}, {"a": b"1"}) == ""
    assert kill_campaign.compare({"a": b"1"}, {"a": b"2"}) == "a"
    assert kill_campaign.compare({"a": b"1"}, {"b": b"1"}) == "a, b"
