"""Writing files so that a reader sees the old contents or the new ones, never a part: `write_atomically`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Protocol


class WriteFn(Protocol):
    """Writes the contents of a file that is open for writing in binary mode."""

    def __call__(self, file: IO[bytes], /) -> object: ...


def write_atomically(path: Path, write: WriteFn) -> None:
    """Write a file beside `path`, then rename it to `path`. A device or a pipe is written to directly.

    Args:
      write: called once with the open file.

    Raises:
      OSError: names the file that could not be written.
    """
    try:
        if path.exists() and not path.is_file():
            with open(path, "wb") as file:
                write(file)
        else:
            _write_and_rename(path.resolve(), write)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def _write_and_rename(path: Path, write: WriteFn) -> None:
    # The process id keeps apart two processes that write the same file.
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with open(temporary, "wb") as file:
            write(file)
            # Contents must be on disk before the name points to them.
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
