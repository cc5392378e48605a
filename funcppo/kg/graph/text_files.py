"""Content of text files: UTF-8, perhaps packed by gzip, with lines that end in \\n."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_content(path: Path) -> bytes:
    """The bytes of a file, unpacked, without a byte order mark, lines ended by \\n.

    Raises:
      ValueError: the file cannot be read or unpacked.
    """
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise ValueError(f"{path}: expected a whole gzip file") from None
    except OSError as error:
        raise ValueError(
            f"{path}: expected a file that can be read: {error.strerror}"
        ) from None
    content = content.removeprefix(_BYTE_ORDER_MARK)
    has_returns = b"\r" in content
    return content.replace(b"\r\n", b"\n") if has_returns else content


def decode(content: bytes, path: str) -> str:
    """The content of a file as text.

    Raises:
      ValueError: it is no UTF-8 or has a NUL byte; names file and line.
    """
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        byte = content[error.start]
        raise ValueError(
            f"{path}:{line}: expected UTF-8, got byte 0x{byte:02x}"
        ) from None
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise ValueError(f"{path}:{line}: expected text, got a NUL byte")
    return text


def read_text(path: Path) -> str:
    """The file as text; raises as `read_content` and `decode` do."""
    return decode(read_content(path), str(path))


def read_first_line(path: Path) -> bytes:
    """The first line of a file, unpacked, without its end; raises as `read_content` does."""
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as file:
            line = file.readline()
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise ValueError(f"{path}: expected a whole gzip file") from None
    except OSError as error:
        raise ValueError(
            f"{path}: expected a file that can be read: {error.strerror}"
        ) from None
    return line.removeprefix(_BYTE_ORDER_MARK).rstrip(b"\r\n")
