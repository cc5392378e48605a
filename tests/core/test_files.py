"""Files are replaced as a whole or not at all; damaged JSON is one line of error with its place."""

import json
import os

import pytest

from funcppo.core import files


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file"
    for contents in (b"first, longer", b"old"):
        files.write_atomically(
            path, lambda file, contents=contents: file.write(contents)
        )

    def fail(file):
        file.write(b"half")
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        files.write_atomically(path, fail)
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["file"]


def test_parts_of_files_of_killed_processes_are_removed(tmp_path):
    """Only of the files named, and not of processes that run; a part with our own id is of an earlier process."""
    gone, own, alive = 999999999, os.getpid(), os.getppid()
    stale = [f"run.npz.{gone}.part", f"run.npz.{own}.part", f"b.{gone}.part"]
    kept = [
        f"run.npz.{alive}.part",
        f"other.{gone}.part",
        "run.npz.part",
        "run.npz.x.part",
        f"run.npz.{gone}.part.txt",
        "run.npz",
    ]
    for name in (*stale, *kept):
        (tmp_path / name).write_text("")
    removed = files.remove_stale_parts(tmp_path, ["run.npz", "b"])
    assert sorted(removed) == sorted(stale)
    assert sorted(os.listdir(tmp_path)) == sorted(kept)
    assert files.remove_stale_parts(tmp_path / "absent", ["run.npz"]) == []


def test_an_error_of_the_system_names_the_file(tmp_path):
    path = tmp_path / "absent" / "file"
    with pytest.raises(OSError) as error:
        files.write_atomically(path, lambda file: file.write(b""))
    assert str(path) in str(error.value.filename)


def test_the_file_that_is_replaced_is_kept_on_request(tmp_path):
    path = tmp_path / "file"
    for number in (b"1", b"2", b"3"):
        files.write_atomically(
            path, lambda file, number=number: file.write(number), "earlier"
        )
    assert path.read_bytes() == b"3"
    assert (tmp_path / "earlier").read_bytes() == b"2"
    assert sorted(os.listdir(tmp_path)) == ["earlier", "file"]


def test_an_object_is_read_with_or_without_a_byte_order_mark():
    text = '{"name": "Zoë"}'.encode()
    assert files.parse_object("f", text) == {"name": "Zoë"}
    assert files.parse_object("f", b'\xef\xbb\xbf{"n": 1}\r\n') == {"n": 1}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"", "expected a JSON object, got Expecting value: line 1 column 1"),
        (b'{"n": ', "expected a JSON object, got Expecting value"),
        (b"[]", r"expected a JSON object, got \[\]$"),
        (b"5", "expected a JSON object, got 5$"),
        (b"[" * 10**5, "expected a JSON object, got brackets nested too"),
        (b"9" * 5000, "expected a JSON object, got .* has 5000 digits$"),
        (b'{"n": 1, "n": 1}', "expected a JSON object, got 'n' twice$"),
        (b'{"n": "\xff"}', "expected UTF-8, got byte 0xff at 7$"),
    ],
)
def test_what_is_no_object_is_refused_with_its_place(text, problem):
    with pytest.raises(ValueError, match=f"^f.jsonl:3: {problem}") as error:
        files.parse_object("f.jsonl:3", text)
    assert "\n" not in str(error.value) and len(str(error.value)) < 200


def test_names_are_written_as_they_are_but_for_what_cannot_be_seen():
    names = {"seen": "Zoë, 北京 e\u0301 \U0001f600", "lines": ["a\nb", 1]}
    hidden = "\x1b[31m \x7f \x9b \u202e \u200b \u2028 \U000e0041 \ud800"
    held = {"hidden": hidden, **names}
    written = json.dumps(held, ensure_ascii=False, indent=2)

    text = files.escape_unprintable(written)

    assert json.loads(text) == {"hidden": hidden, **names}
    assert all(char.isprintable() or char == "\n" for char in text)
    assert "Zoë, 北京 e\u0301 \U0001f600" in text
    assert r"\u009b \u202e" in text


def test_a_long_text_is_cut_to_one_short_line():
    assert files.shorten("a\nb") == r"'a\nb'"
    assert files.shorten("x" * 60) == repr("x" * 60)
    assert files.shorten("x" * 61) == repr("x" * 57 + "...")
    assert files.shorten("abcdef", width=5) == "'ab...'"


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
        ({"newer": 1}, "made with newer 1, got None"),
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


def test_settings_that_are_missing_are_named(tmp_path):
    path = tmp_path / "records.jsonl"
    work(path)
    files.settings_path(path).unlink()
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
        path = tmp_path / "no" / "file"
        files.check_writable(path, resume=False, overwrite=False)
