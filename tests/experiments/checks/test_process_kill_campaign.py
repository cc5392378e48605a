"""The campaign tells equal outputs from others, and brings a work to its end through its signals."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import NamedTuple

import pytest
import torch

from experiments.checks import process_kill_campaign as campaign
from experiments.checks.process_kill_campaign import Chain, Work
from funcppo import checkpoint
from tests.experiments.checks.test_kill_campaign import FORGETFUL, HONEST


@pytest.mark.parametrize(
    ("source", "is_equal"), [(HONEST, True), (FORGETFUL, False)]
)
def test_a_work_that_does_not_go_on_is_found(
    source, is_equal, monkeypatch, tmp_path
):
    hold, launched = tmp_path / "hold", []

    def launch(work, n, out, restarts):
        launched.append(n)
        # the second and the third get a signal, and do not end before it
        if len(launched) in (2, 3):
            hold.touch()
        else:
            hold.unlink(missing_ok=True)
        command = [sys.executable, "-c", source, str(out), str(hold)]
        return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    monkeypatch.setattr(campaign, "launch", launch)
    monkeypatch.setattr(campaign, "find_rank", lambda launcher, rank: launcher)
    monkeypatch.setattr(campaign, "MAX_WAIT", 0.02)
    work = Work(
        name="w",
        words=(),
        progress=lambda out: len(out.read_text()) if out.exists() else 0,
        total=20,
        compare=campaign.compare_files,
    )
    paths = [tmp_path / name / "out" for name in ("alone", "disturbed")]
    for path in paths:
        path.parent.mkdir()
    assert campaign.finish(launch(work, 1, paths[0], 0)) == ("", [])

    left, chain = ["SIGKILL", "SIGKILL"], Chain()
    campaign.disturb(
        work, paths[1], chain, left, seconds=1.0, generator=Ending(0)
    )
    row = {"work": "w", "processes": chain.processes, "signals": chain.signals}
    assert not chain.error
    assert not left
    assert (campaign.compare_files(*paths) == "") == is_equal
    counts = campaign.summarise([row | {"difference": ""}])
    assert counts["n_kills"] == counts["n_kills_of"]["w"] == 2
    assert counts["n_other_number"] == 1


class State(NamedTuple):
    """Two tensors."""

    x: torch.Tensor
    y: torch.Tensor


class Less(NamedTuple):
    """One of them."""

    x: torch.Tensor


class Ending(random.Random):
    """Never lets torchrun start all again."""

    def random(self):
        return 0.9


def test_a_file_that_is_missing_or_left_over_is_a_difference(tmp_path):
    paths = [tmp_path / name / "out" for name in ("a", "b")]
    for path in paths:
        path.parent.mkdir()
        path.write_text("1")
    assert campaign.compare_files(*paths) == ""
    (paths[1].parent / "part").write_text("")
    assert campaign.compare_files(*paths) == "part"


def test_a_tensor_of_a_checkpoint_that_differs_is_named(tmp_path):
    paths = [tmp_path / name for name in ("a.npz", "b.npz")]
    for path, value in zip(paths, (1.0, 2.0)):
        tensors = State(torch.ones(2), torch.tensor(value))
        checkpoint.save(path, tensors, {})
    assert campaign.compare_checkpoints(paths[0], paths[0]) == ""
    assert campaign.compare_checkpoints(*paths) == "y"
    less = tmp_path / "c.npz"
    checkpoint.save(less, Less(torch.ones(2)), {})
    assert campaign.compare_checkpoints(paths[0], less) == "y"
    assert campaign.compare_checkpoints(less, paths[0]) == "y"
    missing = tmp_path / "none.npz"
    assert campaign.compare_checkpoints(paths[0], missing) == "no checkpoint"
