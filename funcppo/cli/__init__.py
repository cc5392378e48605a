"""The programs of the command line, such as train, evaluate and predict.

`main` is the entry point. Bad input is one line on standard error and exit status 2, never a traceback. This module
imports neither PyTorch nor the programs: `funcppo --help` answers at once.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import importlib
import io
import os
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from funcppo.cli.common import (
    EXIT_BAD_INPUT,
    EXIT_CLOSED_PIPE,
    EXIT_INTERRUPTED,
    EXIT_TERMINATED,
    STANDARD_OUTPUT,
    Terminated,
    check_output_path,
    exit_with_error,
    option_name,
    package_version,
    raise_terminated,
)
from funcppo.core.settings import FieldError
from funcppo.runtime import distributed

if TYPE_CHECKING:
    from funcppo.cli.options import Program

# Each program is a class in the module of its name; its summary is the first line of the docstring of that class.
PROGRAMS = {
    "train": "Train a prover on a knowledge graph with PPO and write the run to a folder.",
    "rl": "Train a policy on an environment with PPO and published settings, for several seeds at once.",
    "evaluate": "Evaluate a trained run or an untrained score by filtered link-prediction ranking on a split.",
    "predict": "Rank the answers of an open query r(h, X) or r(X, t), or list all new facts of a relation, best first.",
    "prove": "Prove a query from facts and rules: print its proof, its answers, or why there is none.",
    "data": "Describe a data set: splits and leaks, relations, degrees, what the rules derive; count and index it.",
    "mine": "Mine rules from the training triples of a data set and write them with their counts.",
    "report": "Write a page on trained runs, or one of its pictures: curves, ranks, reliability, rules, proofs.",
    "serve": "Explore a trained run or a data set in a browser: ranked answers, proofs, rules, neighbours, a JSON API.",
    "check": "Check supports, verdicts, ranks, proofs and evidence on a sample of the data by an independent recount.",
    "doctor": "Report versions and devices, and which training strategy works on this machine and why.",
}

# Programs whose work several processes share; the others run in one.
SHARED_PROGRAMS = ("train", "evaluate")


def main() -> NoReturn:
    """Run the program that the command line names; exit with its status."""
    atexit.register(_skip_collection)
    if sys.platform == "win32":
        _write_utf8()
    try:
        try:
            with raise_terminated():
                sys.exit(_run(sys.argv[1:]))
        except Terminated:
            exit_with_error("terminated", status=EXIT_TERMINATED)
        except KeyboardInterrupt:
            exit_with_error("interrupted", status=EXIT_INTERRUPTED)
        finally:
            # Errors of standard output must show here: at the end of the interpreter they are a traceback.
            sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
        sys.exit(EXIT_CLOSED_PIPE)
    except OSError as error:
        line = f"funcppo: {STANDARD_OUTPUT}: {error.strerror}"
        print(line, file=sys.stderr)
        _discard_output()
        sys.exit(EXIT_BAD_INPUT)


def _write_utf8() -> None:
    """Write UTF-8 to files and pipes, as elsewhere: the encoding of Windows lacks most letters of names."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8")


def _skip_collection() -> None:
    """Leave all objects to the end of the process: collecting those of PyTorch would delay it by seconds.

    Not those of DuckDB, which prints what is left.
    """
    if "duckdb" in sys.modules:
        return
    gc.disable()
    gc.freeze()


def _discard_output() -> None:
    """Send what is left in the buffers of standard output and standard error nowhere."""
    null_device = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(null_device, stream.fileno())


def _run(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit status."""
    try:
        if distributed.launched_rank() > 0:
            _silence()
        if not arguments or arguments[0] not in PROGRAMS:
            _print_overview(arguments)
            return 0
        _join(arguments)
        program = parse_program(arguments[0], arguments[1:])
        if program is None:
            return 0
        is_main = distributed.launched_rank() == 0
        if is_main and program.json is not None and program.json != "-":
            check_output_path(
                "--json",
                Path(program.json),
                "expected a file in a folder that exists, or -",
            )
        return program.run()
    except distributed.StalledError as error:
        exit_with_error(str(error), status=distributed.EXIT_STALLED)
    except FieldError as error:
        exit_with_error(f"{option_name(error.field)}: {error.problem}")
    except (ValueError, OSError) as error:
        # A standard output that is closed or full is left to `main`.
        if isinstance(error, OSError) and _is_of_output(error):
            raise
        exit_with_error(_error_line(error))
    except (MemoryError, OverflowError, RuntimeError) as error:
        if distributed.current_processes() and _is_of_collective(error):
            exit_with_error(
                f"another process has ended: {_error_line(error)}",
                status=distributed.EXIT_STALLED,
            )
        if not _is_too_large(error):
            raise
        exit_with_error(
            f"out of memory: expected smaller sizes, got: {_error_line(error)}"
        )


def _join(arguments: Sequence[str]) -> None:
    """Connect with the other processes of torchrun, if it started this one.

    Raises:
      ValueError: there are others, and the program runs in one process.
    """
    # Each process finds this by itself, so that rank 0 tells no error of another one.
    size, name = distributed.launched_size(), arguments[0]
    if size > 1 and name not in SHARED_PROGRAMS:
        raise ValueError(
            f"{name}: expected one process, got {size}: several processes can share {', '.join(SHARED_PROGRAMS)}"
        )
    distributed.join(
        {
            "funcppo": package_version("funcppo"),
            "command line": list(arguments),
        }
    )


def _silence() -> None:
    """Discard what a process other than rank 0 prints, but for errors of its own and tracebacks."""
    stream = sys.__stderr__
    sys.excepthook = lambda *error: traceback.print_exception(
        *error, file=stream
    )
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115


class _OverviewParser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Print the error and exit with status 2."""
        exit_with_error(f"{message} (see --help)")


def _print_overview(arguments: Sequence[str]) -> None:
    """Print what --help or --version says, or the error of a command line without a program."""
    parser = _OverviewParser(
        prog="funcppo",
        description="Prove links in knowledge graphs, and train policies that do so or that act in an environment.",
        epilog="`funcppo PROGRAM --help` describes the options of a program.",
    )
    parser.add_argument(
        "--version", action="store_true", help="show the version and exit"
    )
    programs = parser.add_subparsers(
        title="programs", metavar="PROGRAM", required=True
    )
    for name, summary in PROGRAMS.items():
        programs.add_parser(name, help=summary)

    # Printed here, because argparse ignores errors of standard output.
    if any(argument in ("-h", "--help") for argument in arguments):
        print(parser.format_help(), end="")
    elif list(arguments) == ["--version"]:
        print(f"funcppo {package_version('funcppo')}")
    else:
        parser.parse_args(arguments)


def parse_program(name: str, arguments: Sequence[str]) -> Program | None:
    """The program of that name with the options of its command line; None after --help."""
    try:
        from funcppo.cli.options import parse_options

        program_class = getattr(
            importlib.import_module(f"funcppo.cli.{name}"), name.capitalize()
        )
    except ModuleNotFoundError as error:
        if error.name not in ("rich", "filelock"):
            raise
        exit_with_error(
            f"the command line needs the extra `cli` (pip install 'funcppo[cli]'): {error}"
        )

    try:
        return parse_options(program_class, arguments, prog=f"funcppo {name}")
    except SystemExit as stop:
        if not stop.code:
            return None
        raise


def _error_line(error: Exception) -> str:
    """The message of an error on one line, without the number of a system error."""
    text = str(error)
    if (
        isinstance(error, OSError)
        and error.filename is not None
        and error.strerror
    ):
        text = f"{error.filename}: {error.strerror}"
    # Spaces within a line may be those of a name.
    return " ".join(line.strip() for line in text.split("\n")).strip()


def _is_of_output(error: OSError) -> bool:
    """Whether writing to standard output failed."""
    if isinstance(error, BrokenPipeError):
        return error.filename is None
    return error.filename == STANDARD_OUTPUT


def _is_of_collective(error: Exception) -> bool:
    """Whether an error says that a collective of several processes failed."""
    # Gloo raises errors of no type of its own.
    name = type(error).__name__
    return name.startswith("Dist") or "gloo" in str(error)


def _is_too_large(error: Exception) -> bool:
    """Whether an error says that something does not fit into memory or into 64 bits."""
    if not isinstance(error, RuntimeError):
        return True
    # PyTorch has no type of its own for these errors, but for those of a GPU.
    pattern = "can't allocate memory|out of memory|overflow"
    return re.search(pattern, str(error)) is not None
