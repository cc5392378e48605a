"""Locks that keep two processes from writing the same run or file.

The system releases a lock when its process ends, however it ends, so that a killed process blocks nobody.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from funcppo.core.files import remove_stale_parts

LOCK_FILE = "run.lock"  # in the folder of a run


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Keep other processes from writing to a folder, which is made if it is missing, and removed again if left empty.

    Raises:
      ValueError: another process writes to it; the message names it and the process.
      OSError: the folder cannot be written.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _hold(folder / LOCK_FILE, folder):
            yield
    finally:
        for path in made:
            with suppress(OSError):
                path.rmdir()


@contextmanager
def lock_output(path: str | Path | None) -> Iterator[None]:
    """Keep other processes from writing a file, by FILE.lock beside it; remove what killed ones left half-written.

    A device, a pipe, standard output (-) and no file at all (None) are not locked.

    Raises:
      ValueError: another process writes it; the message names it and the process.
      OSError: its folder cannot be written.
    """
    file = None if path is None or str(path) == "-" else Path(path).resolve()
    if file is None or (file.exists() and not file.is_file()):
        yield
        return
    with _hold(file.with_name(f"{file.name}.lock"), file):
        names = (file.name, f"{file.name}.part", f"{file.name}.settings.json")
        remove_stale_parts(file.parent, names)
        yield


@contextmanager
def _hold(lock_path: Path, locked: Path) -> Iterator[None]:
    """Hold a lock file, which holds the id of this process and is removed at the end.

    Raises:
      ValueError: another process holds it.
    """
    lock = FileLock(lock_path, on_acquired=_write_process_id)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise ValueError(
            f"{locked}: expected no other process that writes it, got process {_read_process_id(lock_path)}"
        ) from None
    try:
        yield
    finally:
        # While it is held: one who waits for a removed file tries again.
        with suppress(OSError):
            lock_path.unlink(missing_ok=True)
        lock.release()


def _write_process_id(descriptor: int) -> None:
    """Write the id of this process to a lock file that it has just got; on a full disk the lock holds without it."""
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.write(descriptor, str(os.getpid()).encode())


def _read_process_id(lock_path: Path) -> str:
    """The process that holds a lock file; "unknown" where it has gone meanwhile or the system shows it to no other."""
    try:
        return lock_path.read_text() or "unknown"
    except OSError:
        return "unknown"
