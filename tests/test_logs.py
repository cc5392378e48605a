"""The metrics log: what its rows hold, how it is continued, and that every logger holds the same rows."""

import csv
import json
import sys
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from funcppo import logs
from funcppo.core.settings import FieldError
from funcppo.logs import open_loggers
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
            n_nonfinite_observations=scalar(0.0),
            n_nonfinite_rewards=scalar(0.0),
            n_empty_masks=scalar(0.0),
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


class Extra(NamedTuple):
    entropy: torch.Tensor


def test_a_measure_of_a_loss_does_not_hide_another_metric():
    given = metrics()
    loss = given.loss._replace(extra=Extra(torch.tensor(2.0)))
    with pytest.raises(ValueError, match=r"^loss: extra: .*, got entropy$"):
        logs.to_scalars(given._replace(loss=loss))


def test_a_row_holds_every_metric_under_its_name():
    assert logs.to_scalars(metrics()) == {
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


def test_a_number_that_is_not_finite_is_null_since_json_has_none(tmp_path):
    path = tmp_path / "metrics.jsonl"
    logs.truncate(path, 0)
    row = {"update": 1, "loss": float("nan"), "explained_variance": -torch.inf}
    logs.append(path, row)
    row = {"update": 1, "loss": None, "explained_variance": None}
    assert logs.read(path) == [row]


@pytest.mark.parametrize("last_update", [0, 1, 2, 3, 9])
def test_truncation_drops_the_rows_after_the_checkpoint(last_update, tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [{"update": i, "episode_return": 0.5} for i in (1, 2, 3)]
    texts = map(json.dumps, [{"format": 2}, *lines])
    path.write_text("".join(f"{text}\n" for text in texts))
    logs.truncate(path, last_update)
    later = {"update": last_update + 1, "episode_return": 0.75}
    logs.append(path, later)
    assert logs.read(path) == [*lines[:last_update], later]
    assert path.read_text().count("format") == 1


def test_an_unfinished_line_is_left_out_be_it_the_last_or_the_first(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"format": 2}\n{"update": 1}\n{"update": 2, "los')
    assert logs.read(path) == [{"update": 1}]
    assert logs.truncate(path, 1) == [f"{path}:3: unfinished line dropped"]
    logs.append(path, {"update": 2})
    assert logs.read(path) == [{"update": 1}, {"update": 2}]
    assert logs.truncate(path, 2) == []
    path.write_text('{"form')
    assert logs.truncate(path, 0) == [f"{path}:1: unfinished line dropped"]
    assert path.read_text() == '{"format": 2}\n'


def test_updates_without_a_line_are_counted(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"format": 2}\n{"update": 0}\n{"update": 1}\n')
    note = f"{path}: 2 of the updates 1 to 3 have no line"
    assert logs.truncate(path, 3) == [note]


@pytest.mark.parametrize(
    "line", ["{", "3", '{"loss": 1}', '{"format": 2}', '{"update": "1"}']
)
def test_a_bad_line_is_named(line, tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"format": 2}}\n{{"update": 1}}\n{line}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:3: expected "):
        logs.read(path)


NAN = float("nan")
# the validation of the initial parameters, an update, an update with a validation
ROWS = [
    {"update": 0, "valid_metric": 0.25},
    {"update": 1, "loss": 1.5, "fallback_reason": 'no "GPU", none'},
    {"update": 2, "loss": NAN, "valid_metric": 0.5, "codes": ["a", "b"]},
]


def write(folder, rows, names, earlier=()):
    with open_loggers(names, folder, earlier, {"steps": 3}) as opened:
        for log in opened:
            for row in rows:
                log(row)


def read_csv(folder) -> list[dict]:
    """The cells that are not empty."""
    with open(folder / logs.CSV_FILE, newline="", encoding="utf-8") as file:
        return [
            {name: cell for name, cell in row.items() if cell}
            for row in csv.DictReader(file)
        ]


CELLS = [
    {"update": "0", "valid_metric": "0.25"},
    {"update": "1", "loss": "1.5", "fallback_reason": 'no "GPU", none'},
    {"update": "2", "valid_metric": "0.5", "codes": "['a', 'b']"},
]


def test_a_resumed_csv_file_is_that_of_the_log(tmp_path):
    """What came after the checkpoint is dropped, and a half-written line too."""
    write(tmp_path, [*ROWS[:2], {"update": 2, "loss": 9.0}], ["csv"])
    with open(tmp_path / logs.CSV_FILE, "a") as file:
        file.write("3,")
    write(tmp_path, ROWS[2:], ["csv"], earlier=ROWS[:2])
    assert read_csv(tmp_path) == CELLS


def scalars(folder) -> dict[str, list[tuple[int, float]]]:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    events = accumulator.EventAccumulator(str(folder / logs.TENSORBOARD_FOLDER))
    events.Reload()
    return {
        name: [(event.step, event.value) for event in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }


def test_tensorboard_has_the_finite_numbers_once_after_a_resume(tmp_path):
    pytest.importorskip("tensorboard")
    write(tmp_path, [*ROWS[:2], {"update": 2, "loss": 9.0}], ["tensorboard"])
    write(tmp_path, ROWS[2:], ["tensorboard"], earlier=ROWS[:2])
    expected = {"valid_metric": [(0, 0.25), (2, 0.5)], "loss": [(1, 1.5)]}
    assert scalars(tmp_path) == expected


def test_a_run_of_wandb_goes_on_under_its_id(tmp_path, monkeypatch):
    ids, lines = [], []

    def init(**options):
        ids.append(options["id"])
        log = lambda values, step: lines.append((step, values))
        return SimpleNamespace(log=log, finish=lambda: None)

    wandb = SimpleNamespace(init=init, Error=RuntimeError)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(wandb, "login", lambda **_: True, raising=False)
    write(tmp_path, ROWS[:2], ["wandb"])
    write(tmp_path, ROWS[2:], ["wandb"], earlier=ROWS[:2])
    assert ids[0] == ids[1]
    values = [("valid_metric", 0.25), ("loss", 1.5), ("valid_metric", 0.5)]
    assert lines == [(i, {name: x}) for i, (name, x) in enumerate(values)]


def test_a_run_of_mlflow_goes_on_under_its_id(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    write(tmp_path, ROWS[1:2], ["mlflow"], earlier=ROWS[:1])
    write(tmp_path, ROWS[2:], ["mlflow"], earlier=ROWS[:2])
    (run,) = mlflow.search_runs(output_format="list")
    assert run.info.run_name == tmp_path.name and run.data.params["steps"]
    client = mlflow.MlflowClient()
    found = {
        name: [
            (one.step, one.value)
            for one in client.get_metric_history(run.info.run_id, name)
        ]
        for name in run.data.metrics
    }
    assert found == {"valid_metric": [(0, 0.25), (2, 0.5)], "loss": [(1, 1.5)]}
    line = r"log: expected a place for MLflow"
    with pytest.raises(FieldError, match=line):
        write(tmp_path, [{"update": 1, "hits@1": 0.5}], ["mlflow"])
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nowhere://x")
    with pytest.raises(FieldError, match=line):
        write(tmp_path, [], ["mlflow"])


def test_an_unknown_logger_is_refused_and_a_missing_package_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"--log wandb .*'funcppo\[wandb\]'"):
        logs.check_loggers(["csv", "wandb"])
    with pytest.raises(
        FieldError, match=r"log: expected one of csv, tensorboard,"
    ):
        logs.check_loggers(["neptune"])  # type: ignore[list-item]


@pytest.mark.parametrize("key", [True, False])
@pytest.mark.parametrize("mode", ["online", "offline"])
def test_an_account_is_missed_before_the_work_begins(monkeypatch, mode, key):
    """Offline none is needed."""
    wandb = SimpleNamespace(
        setup=lambda: SimpleNamespace(settings=SimpleNamespace(mode=mode)),
        login=lambda prompt, verify: key,
    )
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    if key or mode == "offline":
        logs.check_loggers(["wandb"])
        return
    with pytest.raises(FieldError, match=r"log: .*WANDB_MODE=offline, got"):
        logs.check_loggers(["wandb"])
