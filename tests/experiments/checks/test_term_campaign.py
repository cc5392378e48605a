"""How long a program takes to answer a SIGTERM is measured from the signal to its end."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from experiments.checks import term_campaign

# Says by a file beside its output that it would answer a signal from now on.
ANSWERS = (
    "import signal, sys, time; print('working: 1 of 2', file=sys.stderr, flush=True); "
    "signal.signal(signal.SIGUSR1, signal.SIG_IGN); signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)); "
    "open(sys.argv[4] + '.ready', 'w').close(); time.sleep(600)"
)


@pytest.fixture
def places(tmp_path):
    return {"data": "d", "out": str(tmp_path / "out"), "cache": "c"}


def test_a_row_holds_the_answer_and_what_was_done(places, monkeypatch):
    ready = Path(places["out"] + ".ready")

    class Started(subprocess.Popen):
        """A process for which the time until the signal is that until it is ready."""

        def wait(self, timeout=None):
            while timeout == 1.0 and not ready.exists():
                assert self.poll() is None
                time.sleep(0.001)
            return super().wait(timeout and 0.001)

    monkeypatch.setattr(term_campaign, "START", ANSWERS)
    monkeypatch.setattr(subprocess, "Popen", Started)
    row = term_campaign.terminate("mine", places, after=1.0)
    assert row["program"] == "mine"
    assert 0 <= row["seconds_to_end"] < term_campaign.HANG_SECONDS
    assert row["status"] == 143
    assert row["last_line"] == "working: 1 of 2"


def test_a_program_that_ends_by_itself_gets_no_signal(places, monkeypatch):
    monkeypatch.setattr(term_campaign, "START", "print(1)")
    row = term_campaign.terminate("mine", places, after=None)
    assert row["status"] == 0 and "seconds_to_end" not in row


def test_the_summary_counts_answers_that_were_slow_in_their_own_time():
    rows = [
        {"status": 143, "seconds_to_end": 9.0, "processor_seconds": 0.5},
        {"status": 143, "seconds_to_end": 3.0, "processor_seconds": 2.5},
        {"status": 1, "seconds_to_end": 0.1, "processor_seconds": 0.1},
        {"status": 0},
    ]
    summary = term_campaign.summarise(rows)
    assert summary["n_terms"] == 3
    assert (summary["n_slow"], summary["n_failed"]) == (1, 1)
    assert summary["longest_seconds"] == 9.0


@pytest.mark.parametrize("option", ["--graphs", "--programs"])
def test_a_name_that_is_none_is_one_line(option, capsys):
    with pytest.raises(SystemExit, match="2"):
        term_campaign.main([option, "umls"])
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"argument {option}: invalid choice: 'umls'" in error
