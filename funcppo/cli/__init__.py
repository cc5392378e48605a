"""The programs of the command line, such as train, evaluate and predict.

`main` is the entry point. Bad input is one line on standard error and exit status 2, never a traceback. This module
imports neither PyTorch nor the programs: `funcppo --help` answers at once.
"""

from __future__ import annotations

import _thread
import atexit
import errno
import gc
import importlib
import importlib.metadata
import io
import os
import re
import shutil
import signal
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

import funcppo
from funcppo.core.files import shorten
from funcppo.core.settings import FieldError, did_you_mean
from funcppo.runtime import distributed

# Each program is a class in the module of its name; its summary is the first line of the docstring of that class.
PROGRAMS = {
    "train": "Learn to rank the missing links of a knowledge graph, and write the run to a folder.",
    "rl": "Train a policy on an environment with PPO and published settings, for several seeds at once.",
    "evaluate": "Evaluate a trained run or an untrained score by filtered link-prediction ranking on a split.",
    "predict": "Rank the answers of an open query r(h, X) or r(X, t), or list all new facts of a relation, best first.",
    "score": "Score given triples: the probability that each is true, its rank on both sides, and why.",
    "prove": "Prove a query from facts and rules: print its proof, its answers, or why there is none.",
    "data": "Describe a data set: splits and leaks, relations, degrees, what the rules derive; count and index it.",
    "mine": "Mine rules from the training triples of a data set and write them with their counts.",
    "report": "Write a page on a trained run, or one of its pictures: results, curves, reliability, rules, proofs.",
    "serve": "Explore a trained run or a data set in a browser: ranked answers, proofs, rules, neighbours, a JSON API.",
    "check": "Check supports, verdicts, ranks, proofs and evidence on a sample of the data by an independent recount.",
    "doctor": "Report versions and devices, and which training strategy works on this machine and why.",
}

OVERVIEW = """\
usage: funcppo PROGRAM [options]

Prove links in knowledge graphs, and train policies that do so or that act in an environment.

programs:
PROGRAMS

options:
  --help      show this text and exit
  --version   show the version and exit
  --completion
              print what bash and zsh complete by: eval "$(funcppo --completion)"

`funcppo PROGRAM --help` describes the options of a program.
"""

# Programs whose work several processes share; the others run in one.
SHARED_PROGRAMS = ("train", "evaluate")

# Exit statuses beside 0; those of signals are 128 and their number, as shells report them.
EXIT_BAD_INPUT, EXIT_UNFINISHED = 2, 3
EXIT_INTERRUPTED, EXIT_TERMINATED = 130, 143
STANDARD_OUTPUT = "standard output"  # its name in errors
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Terminated(KeyboardInterrupt):
    """Exception for SIGTERM, which ends a program like Ctrl-C, with another exit status."""


def main() -> NoReturn:
    """Run the program that the command line names; exit with its status."""
    if os.name == "posix" and sys.getfilesystemencoding() != "utf-8":
        # Names are UTF-8 in all files: so are those of the command line.
        arguments = [sys.executable, "-X", "utf8", *sys.orig_argv[1:]]
        os.execv(sys.executable, arguments)
    atexit.register(_skip_collection)
    _open_missing_streams()
    if sys.platform == "win32":
        # The encoding of its files and pipes lacks most letters of names.
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(encoding="utf-8")
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
    except OSError as error:
        status = 141  # 128 + SIGPIPE
        if not isinstance(error, BrokenPipeError):
            status = EXIT_BAD_INPUT
            line = f"funcppo: {STANDARD_OUTPUT}: {error.strerror}"
            print(line, file=sys.stderr)
        # What is left in the buffers goes nowhere.
        null_device = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(null_device, stream.fileno())
        sys.exit(status)


def _open_missing_streams() -> None:
    """Open the null device in place of standard streams that are closed, whose numbers no other file may take."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            null_device = os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, open(null_device, mode))  # noqa: SIM115


def interrupt_main(signal_number: int) -> None:
    """Send a signal to the main thread, which ends what it waits for."""
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident or 0, signal_number)
    else:
        _thread.interrupt_main(signal.Signals(signal_number))


@contextmanager
def raise_terminated() -> Iterator[None]:
    """Raise `Terminated` at SIGTERM within the context, so that half-written files are removed, and not in an import.

    PyTorch aborts the process where an exception ends its import, that of Ctrl-C too.
    """

    def handle_signal(signal_number: int, frame: FrameType | None) -> None:
        specification = getattr(sys.modules.get("torch"), "__spec__", None)
        if getattr(specification, "_initializing", False):
            threading.Timer(0.05, interrupt_main, [signal_number]).start()
            return
        raise (
            Terminated if signal_number == signal.SIGTERM else KeyboardInterrupt
        )

    heard = (
        number
        for number in STOP_SIGNALS
        if signal.getsignal(number) is not signal.SIG_IGN
    )
    with handled(heard, handle_signal):
        yield


@contextmanager
def handled(
    numbers: Iterable[int], handler: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    """Handle signals by a function within the context."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def exit_with_error(message: str, status: int = EXIT_BAD_INPUT) -> NoReturn:
    """Print one line on standard error and exit; among several processes, rank 0 prints it for all."""
    if distributed.launched_rank() == 0:
        line = f"funcppo: {message}"
        if sys.stderr.isatty():
            line = break_line(line, shutil.get_terminal_size().columns)
        print(line, file=sys.stderr)

    processes = distributed.current_processes()
    is_signal = status in (EXIT_INTERRUPTED, EXIT_TERMINATED)
    if processes is not None and not is_signal:
        is_reported = processes.fail(message)
        if not is_reported:
            # What other processes print is discarded, but for this.
            line = f"funcppo: rank {processes.rank}: {message}"
            print(line, file=sys.__stderr__)
    sys.exit(status)


@contextmanager
def named_output(name: str) -> Iterator[None]:
    """Add a stream's name to system errors of writing to it, such as a full disk; a closed pipe is left alone."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        error.filename = error.filename or name
        raise


def write_output(text: str) -> None:
    """Write a text to standard output and flush it.

    Raises:
      OSError: names standard output.
    """
    with named_output(STANDARD_OUTPUT):
        sys.stdout.write(text)
        sys.stdout.flush()


def break_line(
    line: str, width: int, start: str = "", below: str = "    "
) -> str:
    """Return a line with its start, broken at words where it is wider; what goes on stands below another start."""
    if len(start + line) <= width:
        return start + line
    parts = textwrap.wrap(
        line,
        width,
        break_on_hyphens=False,
        initial_indent=start,
        subsequent_indent=below,
        replace_whitespace=False,
        drop_whitespace=False,
    )
    return "\n".join(part.rstrip() for part in parts)


def package_version(package: str) -> str:
    """Return the version of an installed package, or "not installed"; for funcppo, of the running code."""
    if package == "funcppo":
        return funcppo.__version__
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _skip_collection() -> None:
    """Turn garbage collection off at the end of the process: for PyTorch's objects it would take seconds.

    Not those of DuckDB, which prints what is left.
    """
    if "duckdb" in sys.modules:
        return
    gc.disable()
    gc.freeze()


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
        return program.run()
    except (ValueError, OSError, MemoryError, OverflowError, RuntimeError) as e:
        # A standard output that is closed or full is left to `main`.
        if isinstance(e, BrokenPipeError) and e.filename is None:
            raise
        if isinstance(e, OSError) and e.filename == STANDARD_OUTPUT:
            raise
        _exit_for(e)


def _exit_for(error: Exception) -> NoReturn:
    """Exit with one line and a status for an error of the user's input or machine; raise any other error."""
    line = _error_line(error)
    if isinstance(error, distributed.StalledError):
        exit_with_error(line, status=distributed.EXIT_STALLED)
    if isinstance(error, FieldError):
        exit_with_error(f"--{error.field.replace('_', '-')}: {error.problem}")
    # Of a loop of links pathlib raises an error of no type of its own.
    if isinstance(error, ValueError | OSError) or "Symlink loop" in line:
        exit_with_error(line)

    # Gloo raises errors of no type of its own.
    is_of_gloo = type(error).__name__.startswith("Dist") or "gloo" in line
    if distributed.current_processes() and is_of_gloo:
        line = f"another process has ended: {line}"
        exit_with_error(line, status=distributed.EXIT_STALLED)
    # PyTorch has no type of its own for these errors, but for those of a GPU.
    pattern = "can't allocate memory|out of memory|overflow"
    if isinstance(error, RuntimeError) and not re.search(pattern, line):
        raise error
    exit_with_error(f"out of memory: expected smaller sizes, got: {line}")


def _join(arguments: Sequence[str]) -> None:
    """Connect with the processes of torchrun, if it started this one.

    Raises:
      ValueError: there are others, and the program runs in one process.
    """
    # Each process finds this by itself, so that rank 0 tells no error of another one.
    size, name = distributed.launched_size(), arguments[0]
    if size > 1 and name not in SHARED_PROGRAMS:
        raise ValueError(
            f"{name}: expected one process, got {size}: several processes can share {', '.join(SHARED_PROGRAMS)}"
        )
    version = package_version("funcppo")
    facts = {"funcppo": version, "command line": list(arguments)}
    distributed.join(facts)


def _silence() -> None:
    """Discard what this process prints, except errors with tracebacks, if it is not rank 0."""
    stream = sys.__stderr__
    sys.excepthook = lambda *error: traceback.print_exception(
        *error, file=stream
    )
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def _print_overview(arguments: Sequence[str]) -> None:
    """Print the text of --help or --version, or the error of a command line without a program."""
    if any(argument in ("-h", "--help") for argument in arguments):
        width = shutil.get_terminal_size().columns
        programs = [
            break_line(summary, width, f"    {name:<10}", " " * 14)
            for name, summary in PROGRAMS.items()
        ]
        write_output(OVERVIEW.replace("PROGRAMS", "\n".join(programs)))
    elif list(arguments) == ["--version"]:
        write_output(f"funcppo {package_version('funcppo')}\n")
    elif list(arguments) == ["--completion"]:
        options = importlib.import_module("funcppo.cli.options")
        programs = {name: program_class(name) for name in PROGRAMS}
        write_output(options.completion_script(programs) + "\n")
    else:
        # no program, or an unknown one
        word = arguments[0] if arguments else ""
        hint = did_you_mean(word, {name: name for name in PROGRAMS})
        got = f"an unknown one{hint}" if word else "none"
        exit_with_error(
            f"{shorten(word or 'PROGRAM')}: expected a program, got {got} (see --help)"
        )


def program_class(name: str) -> Any:
    """Return the class of a program by its name."""
    module = importlib.import_module(f"funcppo.cli.{name}")
    return getattr(module, name.capitalize())


def parse_program(name: str, arguments: Sequence[str]) -> Any:
    """Build a program by its name with the options of the command line; None after --help."""
    try:
        options = importlib.import_module("funcppo.cli.options")
        program = program_class(name)
    except ModuleNotFoundError as error:
        if error.name not in ("rich", "filelock"):
            raise
        exit_with_error(
            f"the command line needs the extra `cli` (pip install 'funcppo[cli]'): {error}"
        )
    return options.parse_options(program, arguments, prog=f"funcppo {name}")


def _error_line(error: Exception) -> str:
    """Format an error's message on one line, without a system error's number."""
    text = str(error)
    if isinstance(error, OSError) and error.filename and error.strerror:
        name = str(error.filename)
        is_too_long = error.errno == errno.ENAMETOOLONG
        text = f"{shorten(name) if is_too_long else name}: {error.strerror}"
    # Spaces within a line may be those of a name.
    text = " ".join(line.strip() for line in text.split("\n")).strip()
    # A path may have thousands of characters.
    return text if len(text) <= 900 else f"{text[:500]} ... {text[-350:]}"
