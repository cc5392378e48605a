"""Files of records: the same after a cut at any byte, and none of other work is resumed."""

import json

import pytest

from funcppo.core import files

SETTINGS = {"format": 2, "score": "noisy-or", "queries": None}
RECORDS = [{"n": n, "name": "Zoë\u202e 🙂"} for n in range(4)]


def work(path, *, resume=False, settings=SETTINGS, **options):
    """Write the records that are not there; what the file held when opened, and the notes."""
    beside = files.settings_path(path)
    log = files.open_log(path, beside, settings, resume=resume, **options)
    for record in RECORDS[len(log.records) :]:
        files.append_records(log, [record])
    files.close_log(log)
    return log.records, log.notes


def test_a_file_cut_at_any_byte_is_resumed_to_the_same_file(tmp_path):
    path = tmp_path / "records.jsonl"
    assert work(path) == ([], [])
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    assert len(lines) == len(RECORDS) and b"\\u202e" in whole
    for n_bytes in range(len(whole) + 1):
        path.write_bytes(whole[:n_bytes])
        n_kept = whole[:n_bytes].count(b"\n")
        is_torn = n_bytes > sum(map(len, lines[:n_kept]))
        note = f"{path}: dropped 1 unfinished line at its end"
        expected = (RECORDS[:n_kept], [note] if is_torn else [])
        assert work(path, resume=True) == expected
        assert path.read_bytes() == whole
    assert files.read_records(path) == RECORDS


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"score": "evidence"}, "made with score evidence, got noisy-or"),
        ({"queries": 3}, "made with queries 3, got None"),
        ({"format": 3}, "expected format 3, got 2: --overwrite starts again"),
    ],
)
def test_a_file_of_other_settings_is_not_resumed(tmp_path, changed, problem):
    path = tmp_path / "records.jsonl"
    work(path)
    contents = {x: x.read_bytes() for x in tmp_path.iterdir()}
    with pytest.raises(ValueError, match=problem):
        work(path, resume=True, settings=SETTINGS | changed)
    assert {x: x.read_bytes() for x in tmp_path.iterdir()} == contents
    assert work(path, settings=SETTINGS | changed) == ([], [])
    beside = files.settings_path(path)
    assert json.loads(beside.read_bytes()) == SETTINGS | changed


def test_settings_that_are_missing_or_more_are_named(tmp_path):
    path = tmp_path / "records.jsonl"
    work(path)
    beside = files.settings_path(path)
    beside.write_text(json.dumps(SETTINGS | {"older": 1}))
    with pytest.raises(ValueError, match="made with older None, got 1"):
        work(path, resume=True)
    beside.unlink()
    with pytest.raises(ValueError, match=r"records\.jsonl was made with, got"):
        work(path, resume=True)


def test_a_line_that_is_no_record_is_named(tmp_path):
    path = tmp_path / "records.jsonl"
    work(path)
    path.write_text('{"n": 0}\n[]\n')
    with pytest.raises(ValueError, match=r"records\.jsonl:2: expected a JSON"):
        work(path, resume=True)
    assert path.read_text() == '{"n": 0}\n[]\n'


def test_a_file_that_exists_is_replaced_on_request_only(tmp_path):
    path = tmp_path / "records.jsonl"
    path.touch()
    files.check_writable(path, resume=False, overwrite=False)
    path.write_text("{}\n")
    with pytest.raises(ValueError, match="got a file that exists"):
        files.check_writable(path, resume=False, overwrite=False)
    for resume in (False, True):
        files.check_writable(path, resume=resume, overwrite=not resume)
    with pytest.raises(ValueError, match="expected a file that can be written"):
        files.check_writable(
            tmp_path / "no" / "file", resume=False, overwrite=False
        )
