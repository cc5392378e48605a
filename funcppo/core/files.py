"""Files that a reader sees whole, the old contents or the new ones, and JSON of people and for people.

What a person or a crash may have changed is read with one line of error, with the place. Names are written so that a
terminal shows them as they are and obeys none.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeAlias, cast

# FILE.PID.part, while the process writes the file.
_PART_NAME = re.compile(r"(.+)\.([0-9]{1,9})\.part")


def write_atomically(
    path: Path,
    write: Callable[[IO[bytes]], object],
    previous: str | None = None,
    *,
    durable: bool = True,
) -> None:
    """Write a file beside `path`, then rename it to `path`. A device or a pipe is written to directly.

    Args:
      write: called once with the open file.
      previous: what the file that is replaced is renamed to, in the same folder, once the new one is on the disk; None
        removes it.
      durable: wait until the file is on the disk, so that it outlives a power failure.

    Raises:
      OSError: names the file that could not be written.
    """
    with named_errors(path):
        if path.exists() and not path.is_file():
            with open(path, "wb") as file:
                write(file)
        else:
            _write_and_rename(path.resolve(), write, previous, durable)


@contextmanager
def named_errors(path: Path) -> Generator[None, None, None]:
    """Name a file in the errors of the system that name none, such as that the disk is full."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def remove_stale_parts(folder: Path, names: Collection[str]) -> list[str]:
    """Remove what processes that were killed have left of files that they were writing.

    Args:
      names: the files, or folders, that may be removed parts of; others stay.

    Returns:
      The names of what was removed.
    """
    removed: list[str] = []
    for path in sorted(folder.glob("*.part")):
        match = _PART_NAME.fullmatch(path.name)
        if match and match[1] in names and not _is_running(int(match[2])):
            _remove(path)
            removed.append(path.name)
    return removed


def _remove(path: Path) -> None:
    """Remove a file, or a folder with all that it holds, if it is there."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _is_running(process_id: int) -> bool:
    """Whether another process has the id; unknown without POSIX, and so true."""
    if process_id == os.getpid():
        return False
    if os.name != "posix":
        return True
    try:
        # Signal 0 is not sent, only checked.
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk, so that a rename outlives a power failure."""
    # Windows opens no folders.
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # A file system that cannot do it says so by these.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _write_and_rename(
    path: Path,
    write: Callable[[IO[bytes]], object],
    previous: str | None,
    durable: bool,
) -> None:
    # The process id keeps apart two processes that write the same file.
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with open(temporary, "wb") as file:
            write(file)
            # Contents must be on disk before the name points to them.
            if durable:
                file.flush()
                os.fsync(file.fileno())
        if previous is not None and path.exists():
            os.replace(path, path.with_name(previous))
        os.replace(temporary, path)
        if durable:
            sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


Json: TypeAlias = dict[str, Any]  # an object of a JSON file

FORMAT = 2  # version of the files that a run writes
FORMAT_KEY = "format"
MAX_SHOWN_BYTES = 60  # of a text that is no object
# all but letters and digits of any script, line breaks and the rest of ASCII
_MAYBE_UNPRINTABLE = re.compile(r"[^\w\x20-\x7e\n]")


def parse_object(place: object, text: bytes) -> Json:
    """The object that a text in UTF-8 holds.

    Args:
      place: a file, or FILE:LINE, for the error.

    Raises:
      ValueError: the text is not valid JSON, or not an object.
    """
    try:
        value = json.loads(text)
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ValueError(
            f"{place}: expected UTF-8, got byte 0x{byte:02x} at {error.start}"
        ) from None
    # Nested brackets by the thousand are an error of recursion.
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{place}: expected a JSON object, got {error}"
        ) from None
    if not isinstance(value, dict):
        shown = text[:MAX_SHOWN_BYTES].decode(errors="replace").strip()
        raise ValueError(f"{place}: expected a JSON object, got {shown}")
    return cast(Json, value)


def escape_unprintable(text: str) -> str:
    """The same JSON without control characters and marks of direction, which become escapes (`\\u202e`).

    Args:
      text: JSON; letters of all scripts may stand in it as they are.
    """
    return _MAYBE_UNPRINTABLE.sub(_escape_unprintable, text)


def _escape_unprintable(match: re.Match[str]) -> str:
    """One character, as an escape if it cannot be seen."""
    char = match[0]
    return char if char.isprintable() else json.dumps(char)[1:-1]


def shorten(text: str, width: int = 60) -> str:
    """The text on one line as Python would quote it, cut to `width` characters; for error messages."""
    if len(text) > width:
        text = text[: width - 3] + "..."
    return repr(text)


def check_format(path: object, version: object) -> None:
    """Raise ValueError unless a file of a run has the format version that this package writes.

    Args:
      path: the file, named in the error.
      version: the value under "format" in the file; None if there is none.
    """
    if type(version) is int and version == FORMAT:
        return
    is_newer = type(version) is int and version > FORMAT
    hint = ": written by a newer version of funcppo" if is_newer else ""
    raise ValueError(
        f"{path}: expected format version {FORMAT}, got {version!r}{hint}"
    )
