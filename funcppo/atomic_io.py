"""TODO."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def write_atomically(path: Path, write: Callable[[Any], Any]) -> None:
    """Have `write` fill a file beside `path`, then put it in its place; a device or a pipe is written to as it is.

    Errors: OSError that names a file.
    """
    try:
        if path.exists() and not path.is_file():
            with open(path, "wb") as file:
                write(file)
        else:
            _put_in_place(path.resolve(), write)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def _put_in_place(path: Path, write: Callable[[Any], Any]) -> None:
    beside = path.with_name(f"{path.name}.{os.getpid()}.part")  # two processes may write the same file
    try:
        with open(beside, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
