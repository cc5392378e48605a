"""A file is replaced as a whole or not at all."""

from __future__ import annotations

import os

import pytest

from funcppo.atomic_io import remove_stale_parts, write_atomically


def test_a_file_is_written_and_replaced(tmp_path):
    path = tmp_path / "file"
    for contents in (b"first", b"second, longer"):
        write_atomically(
            path, lambda file, contents=contents: file.write(contents)
        )
        assert path.read_bytes() == contents
    assert os.listdir(tmp_path) == ["file"]


def test_a_failure_leaves_the_old_contents_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fail(file):
        file.write(b"half")
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        write_atomically(path, fail)
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["file"]


def test_the_old_contents_stand_while_the_new_ones_are_written(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    seen = []
    write_atomically(
        path, lambda file: (file.write(b"new"), seen.append(path.read_bytes()))
    )
    assert seen == [b"old"] and path.read_bytes() == b"new"


def test_a_link_is_followed(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"old")
    link.symlink_to(target)
    write_atomically(link, lambda file: file.write(b"new"))
    assert link.is_symlink() and target.read_bytes() == b"new"


def test_a_pipe_is_written_to_as_it_is(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_atomically(pipe, lambda file: file.write(b"through"))
    assert os.read(reader, 100) == b"through" and not pipe.is_file()
    os.close(reader)


def test_parts_of_files_that_killed_processes_were_writing_are_removed(
    tmp_path,
):
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
    removed = remove_stale_parts(tmp_path, ["run.npz", "b"])
    assert sorted(removed) == sorted(stale)
    assert sorted(os.listdir(tmp_path)) == sorted(kept)
    assert remove_stale_parts(tmp_path / "absent", ["run.npz"]) == []


def test_an_error_of_the_system_names_the_file(tmp_path):
    path = tmp_path / "absent" / "file"
    with pytest.raises(OSError) as error:
        write_atomically(path, lambda file: file.write(b""))
    assert str(path) in str(error.value.filename)
