"""A run that several processes train: checkpoint and metrics to the bit, errors, a process that hangs."""

import json
import os
import signal
import time

import numpy as np

from funcppo.kg.run.train import Peers
from funcppo.runtime.distributed import Processes
from tests.cli.processes import keep_metrics, run_processes, waiting_ends_with
from tests.cli.runner import SMALL
from tests.ports import hold_ports, port_of

# What is imported here need not be by each process.
TRAIN = ("train", "family_tree:20:1", "--steps", "96")
TRAIN += (*SMALL, "--strategy", "eager", "--set", "ppo.n_shards=4")
# Lets a process go on when another has ended; after minutes, against a hang, although it has not.
WAKE_AFTER = "for i in $(seq 1200); do kill -0 {} || break; sleep 0.1; done; kill -CONT {}"


def train(n, folder, *args, **kwargs):
    out = folder / "run"
    ended = run_processes(n, folder, *TRAIN, "--out", out, *args, **kwargs)
    return ended, out


def contents(run):
    """What a run has learned, and the metrics of its updates, times aside."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    metrics = [
        {k: v for k, v in row.items() if "seconds" not in k and "_ms" not in k}
        for row in rows
        if "update" in row
    ]
    with np.load(run / "checkpoint.npz") as arrays:
        names = [name for name in arrays if not name.startswith("__")]
        return metrics, {name: arrays[name].tobytes() for name in names}


def test_each_process_exports_the_updates_it_makes(tmp_path):
    started = time.time()
    with hold_ports(2) as held:
        port = port_of(held[0])
        args = ("--metrics-port", port)
        ended, run = train(
            2, tmp_path, *args, prepare=keep_metrics(tmp_path, port)
        )
    assert [x.status for x in ended] == [0, 0], ended
    n_updates = contents(run)[0][-1]["update"]
    for rank in range(2):
        text = (tmp_path / f"{rank}.metrics").read_text()
        values = dict(line.rsplit(" ", 1) for line in text.splitlines())
        assert float(values["funcppo_updates_total"]) == n_updates
        assert float(values["funcppo_env_steps_total"]) == 96
        assert float(values["funcppo_update_seconds_count"]) == n_updates
        # rank 0 writes it; no rank warns that it is old
        written = float(values["funcppo_checkpoint_timestamp_seconds"])
        assert written > started
        assert float(values["funcppo_finished"]) == 1
        assert 'program="train"' in text


def test_a_run_is_equal_for_every_number_of_processes(tmp_path):
    """Stopped in one process, and gone on with in two: as in one, bit for bit. Rank 0 alone prints."""
    (alone,), run = train(1, tmp_path)
    assert alone.status == 0, alone
    expected = contents(run)

    def stop_at_the_second_update(rank):
        step, steps = Peers.step, []

        def step_and_stop(*args):
            steps.append(args)
            if len(steps) == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            return step(*args)

        Peers.step = step_and_stop

    other = tmp_path / "other"
    other.mkdir()
    ended, run = train(1, other, prepare=stop_at_the_second_update)
    assert ended[0].status == 143, ended
    assert "interrupted after update 2" in ended[0].out
    ended, run = train(2, other, "--resume")
    assert [x.status for x in ended] == [0, 0], ended
    assert (ended[1].out, ended[1].err) == ("", "")
    assert contents(run) == expected


def test_one_process_learns_from_questions_and_the_others_end(tmp_path):
    args = ("--learner", "questions", "--set", "prover.max_height=1")
    ended, run = train(2, tmp_path, *args)
    assert [x.status for x in ended] == [0, 0], ended
    assert (ended[1].out, ended[1].err) == ("", "")
    assert json.loads((run / "results.json").read_text())["test"]


def test_shards_that_cannot_be_shared_equally_are_refused(tmp_path):
    ended, run = train(3, tmp_path)
    assert [x.status for x in ended] == [2, 2, 2]
    assert ended[0].err == (
        "funcppo: --set ppo.n_shards: expected a multiple of the 3 processes, got 4\n"
    )
    assert not run.exists()


def test_a_process_that_hangs_ends_the_others(tmp_path):
    """It is stopped in an update: the deadline of the others tells how far each is, and exits for the restart."""

    waits, main_id = tmp_path / "waits", tmp_path / "main_id"

    def stop_rank_1(rank):
        step, steps = Peers.step, []
        report = Processes.report

        def step_or_stop(*args):
            steps.append(args)
            if rank == 1 and len(steps) == 2:
                wake = WAKE_AFTER.format(main_id.read_text(), os.getpid())
                os.spawnlp(os.P_NOWAIT, "sh", "sh", "-c", wake)
                os.kill(os.getpid(), signal.SIGSTOP)
                os._exit(0)
            return step(*args)

        def report_and_hurry(processes, text):
            report(processes, text)
            if text == "in update 2":
                waits.touch()

        Peers.step = step_or_stop
        if rank == 0:
            main_id.write_text(str(os.getpid()))
            Processes.report = report_and_hurry
            waiting_ends_with(waits)

    ended, _ = train(2, tmp_path, prepare=stop_rank_1)
    assert [x.status for x in ended] == [75, 0], ended
    assert ended[0].err.splitlines()[-1] == (
        "funcppo: rank 0: expected progress within 0.5 s, got none: rank 0: in update 2; rank 1: gathering update 1"
    )
