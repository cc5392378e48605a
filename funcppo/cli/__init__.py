"""The programs: train, evaluate, prove, provable, mine, doctor. Bad input is one line and exit 2, not a traceback."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import re
import sys
from pathlib import Path
from typing import Any, NoReturn


def main() -> NoReturn:
    """Run the program that the command line names; exit with its status."""
    try:
        sys.exit(_run())
    except KeyboardInterrupt:
        exit_with_error("interrupted", status=130)


def _run() -> int:
    try:
        import rich  # noqa: F401
        import tyro
    except ImportError as error:
        exit_with_error(f"the command line needs the extra `cli` (pip install 'funcppo[cli]'): {error}")
    from funcppo.cli.doctor import Doctor
    from funcppo.cli.evaluate import Evaluate
    from funcppo.cli.mine import Mine
    from funcppo.cli.provable import Provable
    from funcppo.cli.prove import Prove
    from funcppo.cli.train import Train

    commands = {"train": Train, "evaluate": Evaluate, "prove": Prove, "provable": Provable, "mine": Mine}
    commands |= {"doctor": Doctor}
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parsed = tyro.extras.subcommand_cli_from_dict(
                commands, prog="funcppo", description="Prove links in knowledge graphs, and learn to."
            )
    except SystemExit as stop:
        if not stop.code:  # --help
            raise
        exit_with_error(_unboxed(said.getvalue()))
    sys.stderr.write(said.getvalue())  # warnings
    try:
        if parsed.json not in (None, "-"):
            check_output_path("--json", Path(parsed.json), "want a file in a folder that exists, or -")
        return parsed.run()
    except (ValueError, OSError) as error:
        exit_with_error(" ".join(_said(error).split()))


def _unboxed(text: str) -> str:
    """The first part of a box that tyro draws around what is wrong with the command line, as one line.

    Where the terminal cannot show a box, tyro draws rules alone, and the first stands below a title.
    """
    rows = [row.strip("│ ") for row in text.splitlines() if not row.startswith(("╭", "╰"))]
    titled = "│" not in text
    parts = [
        list(part) for is_rule, part in itertools.groupby(rows, lambda row: set(row) in ({"─"}, {"-"})) if not is_rule
    ]
    first = " ".join(" ".join(parts[titled]).split())
    return re.sub(r"^Error parsing (__tyro-dummy-inner__\.\w+: )?", "", first) + " (see --help)"


def _said(error: Exception) -> str:
    """What an error says, without the number of one of the system's."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def exit_with_error(message: str, status: int = 2) -> NoReturn:
    """Print one line on standard error and exit."""
    print(f"funcppo: {message}", file=sys.stderr)
    sys.exit(status)


def write_json(destination: str | None, value: Any) -> None:
    """Write `value` where `--json` says: a file, `-` for standard output, or nowhere."""
    if destination is None:
        return
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    if destination == "-":
        sys.stdout.write(text)
        return
    from funcppo.atomic_io import write_atomically

    write_atomically(Path(destination), lambda file: file.write(text.encode()))


def check_output_path(option: str, path: Path, expected: str = "want a file in a folder that exists") -> None:
    """Errors: ValueError when an option names no file that can be written: said before a program works for an hour."""
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"{option} {path}: {expected}")
    in_place = path.exists() and not path.is_file()  # a device or a pipe
    if not os.access(path if in_place else path.resolve().parent, os.W_OK):
        raise ValueError(f"{option} {path}: no permission to write it")
