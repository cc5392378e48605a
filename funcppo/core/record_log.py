"""Records as lines of JSON, written as they come and resumed after an interruption.

A file holds one record, a line of JSON, for each result. What the records depend on, their settings, is in
FILE.settings.json beside it. `open_log` starts or resumes a file, `append` adds records, `close` ends it.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeAlias

from funcppo.core import files
from funcppo.core.files import Json, write_atomically

Record = Json  # a line
Settings = Json  # what tells some work from other work; JSON values

FORMAT = "format"  # the setting that is the version of the records; 1 where there is none
SYNC_SECONDS = 1.0  # between two waits for the disk


# The record of a line and its place, FILE:LINE; raises ValueError if it is none.
ParseFn: TypeAlias = Callable[[str, bytes], Record]
# Which records of an interrupted file stay.
SelectFn: TypeAlias = Callable[[list[Record]], list[Record]]


@dataclass(kw_only=True, slots=True)
class RecordLog:
    """A file of records that is open for more."""

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
        """What was dropped, in a line."""
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
    parse: ParseFn = files.parse_object,
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
    try:
        records: list[Record] = []
        n_dropped = 0
        if resume and path.is_file() and path.stat().st_size:
            check_settings(settings_file, settings, path)
            lines, rest = _read_lines(path, parse)
            records = select(lines)
            n_dropped = len(lines) - len(records) + bool(rest)

        # A device or a pipe is written to as it is.
        if path.is_file() or not path.exists():
            write_atomically(path, lambda file: file.write(_to_lines(records)))
            write_settings(settings_file, settings)
        return RecordLog(
            path=path,
            file=open(path, "ab"),
            records=records,
            n_dropped=n_dropped,
        )
    except OSError as error:
        raise ValueError(
            f"{path}: expected a file that can be written, got: {error.strerror}"
        ) from None


def check_writable(path: Path, *, resume: bool, overwrite: bool) -> None:
    """Check that a file of records may be written at a path, before hours of work, and leave none there.

    Raises:
      ValueError: it may not. The message is one line.
    """
    if path.is_file() and path.stat().st_size and not (resume or overwrite):
        raise ValueError(
            f"{path}: expected --resume, --overwrite or a new file, got a file that exists"
        )
    folder = path.resolve().parent
    try:
        with (
            open(path, "ab")
            if path.exists()
            else tempfile.TemporaryFile(dir=folder)
        ):
            pass
    except OSError as error:
        raise ValueError(
            f"{path}: expected a file that can be written, got: {error.strerror}"
        ) from None


def append(log: RecordLog, records: Sequence[Record]) -> None:
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


def close(log: RecordLog) -> None:
    """Close the file when its records are on the disk."""
    _sync(log)
    log.file.close()


def read(path: Path, parse: ParseFn = files.parse_object) -> list[Record]:
    """Read the records of a file; an unfinished last line is left out.

    Raises:
      ValueError: a line, which the message names, is no record.
    """
    records, _ = _read_lines(path, parse)
    return records


def settings_path(path: Path) -> Path:
    """Return the file beside a file that holds what its records depend on."""
    return path.with_name(path.name + ".settings.json")


def part_path(path: Path) -> Path:
    """Return the file beside a file that holds its records until all of them are there."""
    return path.with_name(path.name + ".part")


def write_settings(path: Path, settings: Settings) -> None:
    """Write the settings of a file of records to a path of their own."""
    text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    text = files.escape_unprintable(text)
    write_atomically(path, lambda file: file.write(text.encode()))


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
    settings = files.parse_object(path, path.read_bytes())
    found = settings.pop(FORMAT, 1)
    if found != version:
        raise ValueError(
            f"{path}: expected format {version}, got {found}: --overwrite starts again"
        )
    return settings


def check_settings(path: Path, settings: Settings, records_path: Path) -> None:
    """Check that a file of records was made with some settings.

    Args:
      path: of its settings.

    Raises:
      ValueError: it was made with others, or they are missing. The message is one line.
    """
    version = settings.get(FORMAT, 1)
    stored = read_settings(path, records_path, version)
    for name in (*settings, *stored):
        expected, actual = settings.get(name), stored.get(name)
        if name != FORMAT and expected != actual:
            raise ValueError(
                f"{records_path}: expected a file made with {name} {expected}, got {actual}: "
                "--resume continues the same work only"
            )


def _sync(log: RecordLog) -> None:
    """Wait until the file is on the disk; a device or a pipe has nothing to wait for."""
    if log.path.is_file():
        os.fsync(log.file.fileno())
    log.sync_time = time.monotonic()


def _read_lines(path: Path, parse: ParseFn) -> tuple[list[Record], bytes]:
    """The records of a file, and what stands after its last line break."""
    *lines, rest = path.read_bytes().split(b"\n")
    records = [
        parse(f"{path}:{number}", line) for number, line in enumerate(lines, 1)
    ]
    return records, rest


def _to_lines(records: Iterable[Record]) -> bytes:
    """Records as lines of JSON."""
    text = "".join(
        json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
        for record in records
    )
    return files.escape_unprintable(text).encode()
