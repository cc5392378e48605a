"""Two processes do not write one run or one file, and a killed process blocks nobody."""

from __future__ import annotations

import os

import pytest

from funcppo.cli.common import lock_folder, lock_output
from tests.cli.runner import SMALL, funcppo


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_is_held_by_one_at_a_time(tmp_path):
    folder = tmp_path / "run"
    with lock_folder(folder):
        assert (folder / "run.lock").read_text() == str(os.getpid())
        with pytest.raises(ValueError) as error, lock_folder(folder):
            pytest.fail("two hold it")
        line = f"{folder}: expected no other process that writes it, got process {os.getpid()}"
        assert str(error.value) == line
        # The refused one has not broken the lock.
        with pytest.raises(ValueError, match=line), lock_folder(folder):
            pytest.fail("two hold it")
        (folder / "config.json").write_text("")
    assert files(folder) == ["config.json"]
    with lock_folder(folder):
        pass


def test_a_folder_that_stays_empty_is_removed_with_those_made_for_it(tmp_path):
    (tmp_path / "old").mkdir()
    with lock_folder(tmp_path / "old" / "a" / "b"):
        pass
    assert files(tmp_path / "old") == []
    with lock_folder(tmp_path / "old"):
        pass
    assert files(tmp_path) == ["old"]


def test_a_file_is_locked_under_all_its_names(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("file")
    with (
        lock_output(tmp_path / "file"),
        pytest.raises(ValueError, match="expected no other process"),
        lock_output(tmp_path / "link"),
    ):
        pytest.fail("two hold it")
    assert files(tmp_path) == ["file", "link"]


def test_what_killed_processes_left_half_written_is_removed(tmp_path):
    """No process has the greatest id that there could be."""
    for name in ("file", "file.part", "file.settings.json", "other"):
        (tmp_path / f"{name}.999999999.part").write_text("")
    (tmp_path / "file.part").write_text("")
    with lock_output(tmp_path / "file"):
        pass
    assert files(tmp_path) == ["file.part", "other.999999999.part"]


@pytest.mark.parametrize(
    "words",
    [
        ("train", "countries_s1", "--out", "{out}", *SMALL),
        ("train", "countries_s1", "--out", "{out}", "--overwrite", *SMALL),
    ],
)
def test_a_second_training_in_a_folder_is_refused(
    words, monkeypatch, capsys, tmp_path
):
    words = [word.format(out=tmp_path) for word in words]
    with lock_folder(tmp_path):
        assert funcppo(monkeypatch, *words) == 2
    line = f"funcppo: {tmp_path}: expected no other process that writes it, got process {os.getpid()}\n"
    assert capsys.readouterr().err == line
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    "words",
    [
        ("mine", "family_tree:40:0", "--out", "{out}"),
        ("evaluate", "countries_s1", "--details", "{out}", "--overwrite"),
        ("predict", "countries_s1", "--relation", "locatedIn", "--new", "--out", "{out}", "--overwrite"),
    ],
)  # fmt: skip
def test_a_second_writer_of_a_file_is_refused(
    words, monkeypatch, capsys, tmp_path
):
    out = tmp_path / "file"
    out.write_text("theirs")
    words = [word.format(out=out) for word in words]
    with lock_output(out):
        assert funcppo(monkeypatch, *words) == 2
    line = f"funcppo: {out}: expected no other process that writes it, got process {os.getpid()}\n"
    assert capsys.readouterr().err == line
    assert out.read_text() == "theirs" and files(tmp_path) == ["file"]
