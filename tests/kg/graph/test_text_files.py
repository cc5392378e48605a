"""Content of text files: what is unpacked, cut off and refused."""

import gzip

import pytest

from funcppo.kg.graph.text import decode, read_content, read_text


@pytest.mark.parametrize("name", ["f.txt", "f.txt.gz"])
def test_the_mark_and_returns_are_no_part_of_the_text(tmp_path, name):
    content = "\ufeffZoë\r\nb\rc\n".encode()
    pack = gzip.compress if name.endswith(".gz") else bytes
    (tmp_path / name).write_bytes(pack(content))
    assert read_content(tmp_path / name) == "Zoë\nb\rc\n".encode()
    assert read_text(tmp_path / name) == "Zoë\nb\rc\n"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"a\n\xff", "f:2: expected UTF-8, got byte 0xff"),
        (b"a\n\n\0", "f:3: expected text, got a NUL byte"),
    ],
)
def test_what_is_no_text_is_named_by_its_line(content, problem):
    with pytest.raises(ValueError) as caught:
        decode(content, "f")
    assert str(caught.value) == problem


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "f.gz").write_bytes(gzip.compress(b"text")[:-3])
    with pytest.raises(ValueError, match=r"f\.gz: expected a whole gzip file"):
        read_content(tmp_path / "f.gz")
    with pytest.raises(ValueError, match="can be read: No such file"):
        read_content(tmp_path / "none")
