"""The metrics log: what its rows hold, and that it is read, truncated and continued in every format."""

import json
import os
from pathlib import Path

import pytest
import torch

from funcppo import metrics_log
from funcppo.losses import LossMetrics
from funcppo.train_step import Metrics, RolloutMetrics


def metrics(n_episodes=4.0, dropped_fraction=()):
    """Metrics of one update with a different number in every field."""
    scalar = torch.tensor
    return Metrics(
        rollout=RolloutMetrics(
            n_episodes=scalar(n_episodes),
            episode_return_sum=scalar(2.0 if n_episodes else 0.0),
            episode_length_sum=scalar(10.0 if n_episodes else 0.0),
            n_truncated_episodes=scalar(1.0),
            explained_variance=scalar(0.25),
        ),
        loss=LossMetrics(
            loss=scalar(-1.0),
            policy_loss=scalar(-2.0),
            value_loss=scalar(3.0),
            entropy=scalar(0.5),
            approx_kl=scalar(0.125),
            clip_fraction=scalar(0.75),
            dropped_fraction=dropped_fraction,
            nonfinite_fraction=scalar(0.125),
        ),
        grad_norm=scalar(6.0),
        n_applied_minibatches=scalar(7.0),
        n_nonfinite_minibatches=scalar(8.0),
        learning_rate=scalar(0.0625),
    )


def test_a_row_holds_every_metric_under_its_name():
    assert metrics_log.to_scalars(metrics()) == {
        "n_episodes": 4.0,
        "episode_return": 0.5,
        "episode_length": 2.5,
        "n_truncated_episodes": 1.0,
        "explained_variance": 0.25,
        "loss": -1.0,
        "policy_loss": -2.0,
        "value_loss": 3.0,
        "entropy": 0.5,
        "approx_kl": 0.125,
        "clip_fraction": 0.75,
        "nonfinite_fraction": 0.125,
        "grad_norm": 6.0,
        "learning_rate": 0.0625,
        "n_applied_minibatches": 7.0,
        "n_nonfinite_minibatches": 8.0,
    }


def test_the_dropped_fraction_is_there_where_it_is_measured():
    assert (
        metrics_log.to_scalars(metrics(dropped_fraction=torch.tensor(0.5)))[
            "dropped_fraction"
        ]
        == 0.5
    )


def test_means_over_no_episode_are_zero():
    scalars = metrics_log.to_scalars(metrics(n_episodes=0.0))
    assert (
        scalars["n_episodes"]
        == scalars["episode_return"]
        == scalars["episode_length"]
        == 0.0
    )


def test_a_number_that_is_not_finite_is_null_since_json_has_none(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics_log.truncate(path, 0)
    row = {"update": 1, "loss": float("nan"), "explained_variance": -torch.inf}
    metrics_log.append(path, row)
    assert metrics_log.read(path) == [
        {"update": 1, "loss": None, "explained_variance": None}
    ]


def test_a_log_starts_with_its_format_and_returns_its_rows(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics_log.truncate(path, 0)
    for update in (1, 2):
        metrics_log.append(path, {"update": update, "loss": 0.5 / update})
    assert json.loads(path.read_text().splitlines()[0]) == {"format": 2}
    assert metrics_log.read(path) == [
        {"update": 1, "loss": 0.5},
        {"update": 2, "loss": 0.25},
    ]


@pytest.mark.parametrize("last_update", [0, 1, 2, 3, 9])
def test_truncation_drops_the_rows_after_the_checkpoint(last_update, tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [{"update": i, "episode_return": 0.5} for i in (1, 2, 3)]
    path.write_text(
        "".join(json.dumps(line) + "\n" for line in [{"format": 2}, *lines])
    )
    metrics_log.truncate(path, last_update)
    metrics_log.append(
        path, {"update": last_update + 1, "episode_return": 0.75}
    )
    rows = [
        {"update": update, "episode_return": 0.5}
        for update in (1, 2, 3)
        if update <= last_update
    ]
    assert metrics_log.read(path) == [
        *rows,
        {"update": last_update + 1, "episode_return": 0.75},
    ]
    assert path.read_text().count("format") == 1


def test_an_unfinished_last_line_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"format": 2}\n{"update": 1}\n{"update": 2, "los')
    assert metrics_log.read(path) == [{"update": 1}]
    notes = metrics_log.truncate(path, 1)
    assert notes == [f"{path}:3: unfinished line dropped"]
    metrics_log.append(path, {"update": 2})
    assert metrics_log.read(path) == [{"update": 1}, {"update": 2}]
    assert metrics_log.truncate(path, 2) == []


def test_an_unfinished_first_line_is_dropped_too(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"form')
    assert metrics_log.truncate(path, 0) == [
        f"{path}:1: unfinished line dropped"
    ]
    assert path.read_text() == '{"format": 2}\n'


def test_updates_without_a_line_are_counted(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"format": 2}\n{"update": 0}\n{"update": 1}\n')
    note = f"{path}: 2 of the updates 1 to 3 have no line"
    assert metrics_log.truncate(path, 3) == [note]


@pytest.mark.skipif(
    not os.path.exists("/dev/full"), reason="no /dev/full on this system"
)
def test_a_full_disk_names_the_file():
    with pytest.raises(OSError) as error:
        metrics_log.append(Path("/dev/full"), {"update": 1})
    assert error.value.filename == "/dev/full"


@pytest.mark.parametrize(
    "line", ["{", "3", '{"loss": 1}', '{"format": 2}', '{"update": "1"}']
)
def test_a_bad_line_is_named(line, tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"format": 2}}\n{{"update": 1}}\n{line}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:3: expected "):
        metrics_log.read(path)


def test_the_first_line_keeps_what_it_says_of_the_run(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert metrics_log.read_header(path) == {}
    metrics_log.truncate(path, 0, {"strategy": "eager"})
    metrics_log.append(path, {"update": 1, "loss": 1.0})
    metrics_log.truncate(path, 1)
    assert metrics_log.read_header(path) == {"strategy": "eager"}
    assert metrics_log.read(path) == [{"update": 1, "loss": 1.0}]
    metrics_log.truncate(path, 1, {"strategy": "forward"})
    assert metrics_log.read_header(path) == {"strategy": "forward"}
    assert len(metrics_log.read(path)) == 1


def test_a_log_without_a_whole_first_line_says_nothing(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for text in ("", '{"format": 2', '{"update": 1}\n'):
        path.write_text(text)
        assert metrics_log.read_header(path) == {}
