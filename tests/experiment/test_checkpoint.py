"""Files put in place whole: what a reader finds is all of one writer's, whoever else writes."""

import subprocess
import sys

import pytest

from funcppo.atomic_io import write_atomically

OTHER = """
import sys
from pathlib import Path
from funcppo.atomic_io import write_atomically
write_atomically(Path(sys.argv[1]), lambda file: file.write(b"other"))
"""


def test_two_processes_may_write_one_file_at_once(tmp_path):
    path, seen = tmp_path / "rules.tsv", []

    def write(file):
        file.write(b"ow")
        subprocess.run([sys.executable, "-c", OTHER, str(path)], check=True)
        seen.append(path.read_bytes())
        file.write(b"n")

    write_atomically(path, write)
    assert seen == [b"other"] and path.read_bytes() == b"own"
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_what_was_there_and_nothing_beside_it(tmp_path):
    path = tmp_path / "rules.tsv"
    path.write_bytes(b"before")

    def write(file):
        file.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, write)
    assert path.read_bytes() == b"before" and list(tmp_path.iterdir()) == [path]
