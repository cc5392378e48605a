"""Files that a reader sees whole, the old contents or the new ones, and JSON of people and for people.

What a person or a crash may have changed is read with one line of error, with the place. Names are written so that a
terminal shows them as they are and obeys none.

Records as lines of JSON, written as they come and resumed after an interruption.

A file holds one record, a line of JSON, for each result. What the records depend on, their settings, is in
FILE.settings.json beside it. `open_log` starts or resumes a file, `append_records` adds some, `close_log` ends it.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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


def write_file(
    path: Path, content: str | bytes, *, durable: bool = True
) -> None:
    """Write a text, as UTF-8, or bytes to a file by `write_atomically`."""
    data = content.encode() if isinstance(content, str) else content
    write_atomically(path, lambda file: file.write(data), durable=durable)


def read_object(path: Path) -> Json:
    """Read the JSON object of a file; raises as `parse_object` does."""
    return parse_object(path, path.read_bytes())


@contextmanager
def named_errors(path: Path) -> Generator[None, None, None]:
    """Add the file's name to system errors that name none, such as a full disk."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


@contextmanager
def expecting(expectation: str) -> Generator[None, None, None]:
    """Make a system error one of a value, which begins with what was expected.

    Raises:
      ValueError: in place of an OSError; the message is one line.
    """
    try:
        yield
    except OSError as error:
        raise ValueError(f"{expectation}, got: {error.strerror}") from None


def read_file(path: Path) -> bytes:
    """Read a file, a pipe or a terminal to its end.

    Raises:
      OSError: it cannot be read, or is a device that has no end.
    """
    endless = ("/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
    if str(path.resolve()) in endless:
        raise OSError(errno.EINVAL, "a device without an end", str(path))
    return path.read_bytes()


def remove_stale_parts(folder: Path, names: Collection[str]) -> list[str]:
    """Remove the half-written files of killed processes in a folder; return their names.

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
    """Remove a file, or a folder with its contents, if it exists."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _is_running(process_id: int) -> bool:
    """Return whether another process with this id runs; without POSIX this is unknown and counts as true."""
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
    """Wait until the names in a folder are on the disk, so that a rename survives a power failure."""
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
    """Parse a JSON object from a UTF-8 text.

    Args:
      place: a file, or FILE:LINE, for the error.

    Raises:
      ValueError: the text is not valid JSON, or not an object.
    """
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ValueError(
            f"{place}: expected UTF-8, got byte 0x{byte:02x} at {error.start}"
        ) from None
    except (ValueError, RecursionError) as error:
        problem = str(error).partition("; use")[0]
        if isinstance(error, RecursionError):
            problem = "brackets nested too deeply"
        raise ValueError(
            f"{place}: expected a JSON object, got {problem}"
        ) from None
    if not isinstance(value, dict):
        shown = text[:MAX_SHOWN_BYTES].decode(errors="replace").strip()
        raise ValueError(f"{place}: expected a JSON object, got {shown}")
    return cast(Json, value)


def _unique(pairs: list[tuple[str, Any]]) -> Json:
    """Return the object of some fields; raise ValueError for a field that stands twice."""
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{shorten(twice)} twice")
    return value


def escape_unprintable(text: str) -> str:
    """Replace control characters and direction marks in JSON by their escapes.

    Args:
      text: JSON; letters of all scripts may stand in it as they are.
    """
    return _MAYBE_UNPRINTABLE.sub(_escape_unprintable, text)


def _escape_unprintable(match: re.Match[str]) -> str:
    """Return a matched character, escaped if it is not printable."""
    char = match[0]
    return char if char.isprintable() else json.dumps(char)[1:-1]


def shorten(text: str, width: int = 60) -> str:
    """Quote a text on one line as Python does, cut to `width` characters, for errors."""
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


Record = Json  # a line
Settings = Json  # what tells some work from other work; JSON values

SYNC_SECONDS = 1.0  # between two waits for the disk


# The record of a line and its place, FILE:LINE; raises ValueError if it is none.
ParseFn: TypeAlias = Callable[[str, bytes], Record]
# Which records of an interrupted file stay.
SelectFn: TypeAlias = Callable[[list[Record]], list[Record]]


@dataclass(kw_only=True, slots=True)
class RecordLog:
    """File of records that is open for appending."""

    path: Path
    file: IO[bytes]
    # that it held when opened, and that stay
    records: list[Record]
    # lines that it held when opened and that do not stay, an unfinished last one among them
    n_dropped: int = 0
    # when the disk held all of the file, on the monotonic clock
    sync_time: float = 0.0

    @property
    def notes(self) -> list[str]:
        """Return a note on the unfinished lines that were dropped; empty if there were none."""
        if not self.n_dropped:
            return []
        lines = "line" if self.n_dropped == 1 else "lines"
        return [
            f"{self.path}: dropped {self.n_dropped} unfinished {lines} at its end"
        ]


def open_log(
    path: Path,
    settings_file: Path,
    settings: Settings,
    *,
    resume: bool,
    parse: ParseFn = parse_object,
    select: SelectFn = list,
) -> RecordLog:
    """Open a file for records: resume the file at a path, or replace it.

    Args:
      settings_file: beside it, holds the settings.
      settings: what the records depend on; a file with others is not resumed.
      select: of the records of a file that is resumed.

    Raises:
      ValueError: the file to resume holds something else, or it cannot be written. The message is one line.
    """
    with expecting(f"{path}: expected a file that can be written"):
        records: list[Record] = []
        n_dropped = 0
        if resume and path.is_file() and path.stat().st_size:
            check_settings(settings_file, settings, path)
            lines, rest = read_lines(path, parse)
            records = select(lines)
            n_dropped = len(lines) - len(records) + bool(rest)

        # A device or a pipe is written to as it is.
        if path.is_file() or not path.exists():
            write_file(path, _to_lines(records))
            write_settings(settings_file, settings)
        return RecordLog(
            path=path,
            file=open(path, "ab"),
            records=records,
            n_dropped=n_dropped,
        )


def check_writable(path: Path, *, resume: bool, overwrite: bool) -> None:
    """Check before long work that a file of records can be written at a path; leave no file there.

    Raises:
      ValueError: it may not. The message is one line.
    """
    if path.is_file() and path.stat().st_size and not (resume or overwrite):
        raise ValueError(
            f"{path}: expected --resume, --overwrite or a new file, got a file that exists"
        )
    with expecting(f"{path}: expected a file that can be written"):
        if path.exists():
            path.open("ab").close()
        else:
            tempfile.TemporaryFile(dir=path.resolve().parent).close()


def append_records(log: RecordLog, records: Sequence[Record]) -> None:
    """Write records, which stay if the process is killed; a second later they stay if the power fails.

    Args:
      records: that stay together or not at all.

    Raises:
      ValueError: they cannot be written. Earlier records stay and can be resumed from.
    """
    try:
        log.file.write(_to_lines(records))
        log.file.flush()
        if time.monotonic() - log.sync_time >= SYNC_SECONDS:
            _sync(log)
    except OSError as error:
        raise ValueError(
            f"{log.path}: {error.strerror}: the records written so far stay, and --resume continues after them"
        ) from None


def close_log(log: RecordLog) -> None:
    """Close the file when its records are on the disk."""
    _sync(log)
    log.file.close()


def read_records(path: Path, parse: ParseFn = parse_object) -> list[Record]:
    """Read the records of a file; an unfinished last line is left out.

    Raises:
      ValueError: a line, which the message names, is no record.
    """
    records, _ = read_lines(path, parse)
    return records


def settings_path(path: Path) -> Path:
    """Return the path of the settings file beside a file of records."""
    return path.with_name(path.name + ".settings.json")


def part_path(path: Path) -> Path:
    """Return the path beside a file where its records are collected until all are written."""
    return path.with_name(path.name + ".part")


def write_settings(path: Path, settings: Settings) -> None:
    """Write the settings of a file of records to a separate path."""
    text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    write_file(path, escape_unprintable(text))


def read_settings(path: Path, records_path: Path, version: int) -> Settings:
    """Read the settings of a file of records, without their version.

    Args:
      path: of the settings.
      version: that they must be of.

    Raises:
      ValueError: there are none, or they are of another version. The message is one line.
    """
    if not path.is_file():
        raise ValueError(
            f"{path}: expected the settings that {records_path.name} was made with, got no file"
        )
    settings = read_object(path)
    found = settings.pop(FORMAT_KEY, 1)
    if found != version:
        raise ValueError(
            f"{path}: expected format {version}, got {found}: --overwrite starts again"
        )
    return settings


def check_settings(path: Path, settings: Settings, records_path: Path) -> None:
    """Check that a file of records was made with the given settings; raise ValueError naming a difference.

    Args:
      path: of its settings.

    Raises:
      ValueError: it was made with others, or they are missing. The message is one line.
    """
    version = settings.get(FORMAT_KEY, 1)
    stored = read_settings(path, records_path, version)
    for name in (*settings, *stored):
        expected, actual = settings.get(name), stored.get(name)
        if name != FORMAT_KEY and expected != actual:
            raise ValueError(
                f"{records_path}: expected a file made with {name} {expected}, got {actual}: "
                "--resume continues the same work only"
            )


def _sync(log: RecordLog) -> None:
    """Wait until the file is on the disk; return at once for a device or a pipe."""
    if log.path.is_file():
        os.fsync(log.file.fileno())
    log.sync_time = time.monotonic()


def read_lines(
    path: Path, parse: ParseFn = parse_object
) -> tuple[list[Record], bytes]:
    """Read the records of a file, and the bytes after its last line break."""
    *lines, rest = path.read_bytes().split(b"\n")
    records = [
        parse(f"{path}:{number}", line) for number, line in enumerate(lines, 1)
    ]
    return records, rest


def _to_lines(records: Iterable[Record]) -> bytes:
    """Format records as lines of JSON."""
    text = "".join(
        json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
        for record in records
    )
    return escape_unprintable(text).encode()
