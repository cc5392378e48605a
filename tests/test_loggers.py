"""Each logger holds the rows of metrics.jsonl, before and after a resume."""

from __future__ import annotations

import csv
import struct
import sys
import time
from types import SimpleNamespace

import pytest

from funcppo import loggers
from funcppo.core.settings import FieldError
from funcppo.loggers import open_loggers

NAN = float("nan")
# the validation of the initial parameters, an update, an update with a validation
ROWS = [
    {"update": 0, "valid_metric": 0.25},
    {"update": 1, "loss": 1.5, "fallback_reason": 'no "GPU", none'},
    {"update": 2, "loss": NAN, "valid_metric": 0.5, "codes": ["a", "b"]},
]


def write(folder, rows, names, earlier=()):
    with open_loggers(names, folder, earlier, {"steps": 3}) as opened:
        for logger in opened:
            for row in rows:
                logger.log(row)


def read_csv(folder) -> list[dict]:
    """The cells that are not empty."""
    with open(folder / loggers.CSV_FILE, newline="", encoding="utf-8") as file:
        return [
            {name: cell for name, cell in row.items() if cell}
            for row in csv.DictReader(file)
        ]


CELLS = [
    {"update": "0", "valid_metric": "0.25"},
    {"update": "1", "loss": "1.5", "fallback_reason": 'no "GPU", none'},
    {"update": "2", "valid_metric": "0.5", "codes": "['a', 'b']"},
]


def test_a_csv_file_has_a_column_for_each_name(tmp_path):
    write(tmp_path, ROWS, ["csv"])
    assert read_csv(tmp_path) == CELLS


def test_a_resumed_csv_file_is_that_of_the_log(tmp_path):
    """What came after the checkpoint is dropped, and a half-written line too."""
    write(tmp_path, [*ROWS[:2], {"update": 2, "loss": 9.0}], ["csv"])
    with open(tmp_path / loggers.CSV_FILE, "a") as file:
        file.write("3,")
    write(tmp_path, ROWS[2:], ["csv"], earlier=ROWS[:2])
    assert read_csv(tmp_path) == CELLS


def scalars(folder) -> dict[str, list[tuple[int, float]]]:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    events = accumulator.EventAccumulator(
        str(folder / loggers.TENSORBOARD_FOLDER)
    )
    events.Reload()
    return {
        name: [(event.step, event.value) for event in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }


def test_tensorboard_has_the_finite_numbers_once_after_a_resume(tmp_path):
    pytest.importorskip("tensorboard")
    write(tmp_path, [*ROWS[:2], {"update": 2, "loss": 9.0}], ["tensorboard"])
    write(tmp_path, ROWS[2:], ["tensorboard"], earlier=ROWS[:2])
    assert scalars(tmp_path) == {
        "valid_metric": [(0, 0.25), (2, 0.5)],
        "loss": [(1, 1.5)],
    }


HEADER_BYTES = 7  # of the file, and of a record: checksum, length, kind
BLOCK_BYTES = 32768


def iter_records(data: bytes):
    """The records of a file in LevelDB's log format, which may be cut at the ends of blocks."""
    record, at = b"", HEADER_BYTES
    while at + HEADER_BYTES <= len(data):
        left = BLOCK_BYTES - at % BLOCK_BYTES
        if left < HEADER_BYTES:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        record += data[at + HEADER_BYTES :][:length]
        at += HEADER_BYTES + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def wandb_records(path, make_record):
    """The records of a run, whose end W&B's process may write after `finish` has returned."""
    deadline = time.monotonic() + 600  # against a hang
    while True:
        records = []
        for data in iter_records(path.read_bytes()):
            record = make_record()
            record.ParseFromString(data)
            records.append(record)
        if any(record.HasField("exit") for record in records):
            return records
        assert time.monotonic() < deadline, "the run has no end"
        time.sleep(0.05)


def wandb_history(folder) -> list[tuple[int, dict[str, str]]]:
    """The step and the values of each line of the offline runs in a folder, which have one id."""
    from wandb.proto import wandb_internal_pb2

    lines, ids = [], set()
    for path in sorted((folder / "wandb").glob("offline-run-*/*.wandb")):
        for record in wandb_records(path, wandb_internal_pb2.Record):
            if record.HasField("run"):
                ids.add(record.run.run_id)
            values = {
                item.key or ".".join(item.nested_key): item.value_json
                for item in record.history.item
            }
            if values:
                step = int(values["_step"])
                names = [n for n in values if not n.startswith("_")]
                lines.append((step, {n: values[n] for n in names}))
    assert len(ids) == 1
    return lines


def test_an_offline_run_of_wandb_goes_on_under_its_id(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    write(tmp_path, ROWS[:2], ["wandb"])
    # W&B names the folder of an offline run by the second, and writes over one of the same name.
    second = int(time.time())
    while int(time.time()) == second:
        time.sleep(0.05)
    write(tmp_path, ROWS[2:], ["wandb"], earlier=ROWS[:2])
    assert wandb_history(tmp_path) == [
        (0, {"valid_metric": "0.25"}),
        (1, {"loss": "1.5"}),
        (2, {"valid_metric": "0.5"}),
    ]


def test_several_loggers_and_one_named_twice(tmp_path):
    pytest.importorskip("tensorboard")
    write(tmp_path, ROWS, ["csv", "jsonl", "tensorboard", "csv"])
    assert read_csv(tmp_path) == CELLS
    assert scalars(tmp_path)["loss"] == [(1, 1.5)]


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(FieldError, match=r"log: .*'funcppo\[wandb\]'"):
        loggers.check_loggers(["csv", "wandb"])


@pytest.mark.parametrize("key", [True, False])
@pytest.mark.parametrize("is_old", [True, False])
@pytest.mark.parametrize("mode", ["online", "offline"])
def test_an_account_is_missed_before_the_work_begins(
    monkeypatch, mode, is_old, key
):
    """As W&B tells of it before 0.28 and since; offline none is needed."""
    wandb = SimpleNamespace(
        setup=lambda: SimpleNamespace(settings=SimpleNamespace(mode=mode)),
        api=SimpleNamespace(api_key="key" if key else None),
        login=(lambda: None) if is_old else (lambda prompt, verify: key),
    )
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    if key or mode == "offline":
        loggers.check_loggers(["wandb"])
        return
    with pytest.raises(FieldError, match=r"log: .*WANDB_MODE=offline, got"):
        loggers.check_loggers(["wandb"])


def test_an_unknown_logger_is_refused():
    with pytest.raises(FieldError, match=r"log: expected one of jsonl, csv,"):
        loggers.check_loggers(["mlflow"])  # type: ignore[list-item]
