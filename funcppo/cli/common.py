"""Parts that several programs share: errors, JSON output, Ctrl-C, and checks of options before any work."""

from __future__ import annotations

import _thread
import importlib.metadata
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import funcppo
from funcppo.core import files
from funcppo.core.files import remove_stale_parts
from funcppo.core.settings import MAX_PORT, is_cuda
from funcppo.runtime import distributed

# PyTorch takes seconds to import, and --help does not wait for it.
if TYPE_CHECKING:
    from funcppo.kg.run.telemetry import Exporter

# version of the keys in results.json and in the output of every --json; 1 had no version
JSON_FORMAT = 2
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
EXIT_TERMINATED = 143  # 128 + SIGTERM
EXIT_CLOSED_PIPE = 141  # 128 + SIGPIPE
STANDARD_OUTPUT = "standard output"  # its name in errors

LOCK_FILE = "run.lock"  # in the folder of a run
# after a signal, work in progress may end by itself for so long
GRACE_SECONDS = 0.5

JsonObject: TypeAlias = dict[str, Any]


def exit_with_error(message: str, status: int = EXIT_BAD_INPUT) -> NoReturn:
    """Print one line on standard error and exit; of several processes, rank 0 prints it for all."""
    if distributed.launched_rank() == 0:
        print(f"funcppo: {message}", file=sys.stderr)

    processes = distributed.current_processes()
    is_signal = status in (EXIT_INTERRUPTED, EXIT_TERMINATED)
    if processes is not None and not is_signal:
        is_reported = processes.fail(message)
        if not is_reported:
            # What other processes print is discarded, but for this.
            line = f"funcppo: rank {processes.rank}: {message}"
            print(line, file=sys.__stderr__)
    sys.exit(status)


def option_name(field: str) -> str:
    """Return the option of a field of a program: --metrics-port for metrics_port."""
    return "--" + field.replace("_", "-")


@contextmanager
def named_output(name: str) -> Iterator[None]:
    """Name a stream in the errors of writing to it, such as that the disk is full; a closed pipe is no such error."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        error.filename = error.filename or name
        raise


def write_output(text: str) -> None:
    """Write a text to standard output, at once.

    Raises:
      OSError: names standard output.
    """
    with named_output(STANDARD_OUTPUT):
        sys.stdout.write(text)
        sys.stdout.flush()


def write_json(destination: str | None, value: JsonObject) -> None:
    """Write an object, with the version of its format, where `--json` says.

    Args:
      destination: path of a file; - for standard output; None for nowhere.
      value: the object without its version.
    """
    if destination is None:
        return
    document = {"format": JSON_FORMAT, **value}
    text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    text = files.escape_unprintable(text)
    if destination == "-":
        write_output(text)
        return

    from funcppo.core.files import write_atomically

    write_atomically(Path(destination), lambda file: file.write(text.encode()))


def check_output_path(
    option: str,
    path: Path,
    expected: str = "expected a file in a folder that exists",
) -> None:
    """Check that a file can be written, before a program works for an hour.

    Args:
      option: the option that names the file, for the error.
      expected: what the option takes, for the error.

    Raises:
      ValueError: the path is a folder, its folder is missing, or permission is missing.
    """
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"{option} {path}: {expected}")

    # A device or a pipe is written to directly. Any other file is replaced, which takes permission for its folder.
    is_device = path.exists() and not path.is_file()
    written = path if is_device else path.resolve().parent
    if not os.access(written, os.W_OK):
        raise ValueError(f"{option} {path}: no permission to write it")


def check_overwrites(
    outputs: Sequence[tuple[str, str | Path | None]], inputs: Iterable[Path]
) -> None:
    """Check that no output would overwrite a file that the program reads or another output, before any work.

    Args:
      outputs: option and path of each; - is standard output, None is no output.
      inputs: files that the program reads.

    Raises:
      ValueError: two are one file, under whatever names; the message names the option.
    """
    written = [(option, Path(path)) for option, path in outputs if path]
    for i, (option, path) in enumerate(written):
        for earlier_option, earlier_path in written[:i]:
            if _is_same_file(path, earlier_path):
                raise ValueError(
                    f"{option} {path}: expected another file than that of {earlier_option}"
                )
        for input_path in inputs:
            if _is_same_file(path, input_path):
                raise ValueError(
                    f"{option} {path}: expected another file than {input_path}, which would be overwritten"
                )


def _is_same_file(path: Path, other: Path) -> bool:
    """Whether two paths lead to one file, which may not exist yet; a device may be written to twice."""
    if path.exists() and not path.is_file():
        return False
    if path.exists() and other.exists():
        return path.samefile(other)
    return path.resolve() == other.resolve()


def select_device(device: str) -> None:
    """Check that PyTorch has the device; a GPU with a number becomes the current one, for what names none.

    Raises:
      ValueError: PyTorch does not find the GPU.
    """
    if not is_cuda(device):
        return

    import torch

    if not torch.cuda.is_available():
        raise ValueError(
            f"--device {device}: expected a CUDA device, PyTorch found none"
        )
    number = device.partition(":")[2]
    if not number:
        return
    n_devices = torch.cuda.device_count()
    if int(number) >= n_devices:
        raise ValueError(
            f"--device {device}: expected cuda:0 to cuda:{n_devices - 1}, PyTorch found no other"
        )
    torch.cuda.set_device(int(number))


def resolve_device(device: str) -> str:
    """Return the device itself, or for auto a GPU if there is one."""
    if device != "auto":
        return device

    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


@contextmanager
def graphs_allowed(graphs: str, device: str) -> Iterator[None]:
    """Record the CUDA graphs meanwhile that --cuda-graphs says.

    Raises:
      ValueError: --cuda-graphs demands graphs, and there is no GPU, or one cannot be recorded.
    """
    if graphs == "auto":
        yield
        return

    device = resolve_device(device)
    if graphs in ("trees", "manual") and not is_cuda(device):
        raise ValueError(
            f"--cuda-graphs {graphs}: expected --device cuda, got {device}, which has no CUDA graphs: "
            "--cuda-graphs auto runs the same step without them"
        )
    from funcppo.runtime import capture

    if graphs == "off":
        with capture.without_cuda_graphs("turned off by --cuda-graphs off"):
            yield
        return
    if graphs == "trees":
        with capture.cudagraph_trees_only():
            yield
        return
    try:
        with capture.with_cuda_graphs_only():
            yield
    except capture.CaptureError as error:
        raise ValueError(
            f"--cuda-graphs manual: expected a CUDA graph, got none: {error}"
        ) from error


# What a report of a bug is made with: PyTorch reads the first when it compiles, CUDA the others when it starts.
DEBUG_VARIABLES = {
    "TORCH_COMPILE_DISABLE": "1",
    "CUDA_LAUNCH_BLOCKING": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # products in a fixed order
}


@contextmanager
def debug_mode(is_on: bool, files: Sequence[Path]) -> Iterator[None]:
    """With --debug compile and record nothing meanwhile, wait for each kernel, and use deterministic algorithms.

    Args:
      is_on: whether --debug was given.
      files: to attach to a report, in the line that is printed on standard error.
    """
    if not is_on:
        yield
        return

    attached = ", ".join([*map(str, files), "`funcppo doctor --json -`"])
    print(
        f"debug: nothing is compiled or recorded, kernels are waited for, algorithms are deterministic; "
        f"attach to a report: {attached}, and this output",
        file=sys.stderr,
    )
    before = {name: os.environ.get(name) for name in DEBUG_VARIABLES}
    os.environ |= DEBUG_VARIABLES
    import torch

    from funcppo.runtime.capture import without_cuda_graphs

    was_deterministic = torch.are_deterministic_algorithms_enabled()
    # What has no deterministic form is named by a warning.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with without_cuda_graphs("turned off by --debug"):
            yield
    except Exception:
        traceback.print_exc()
        raise
    finally:
        torch.use_deterministic_algorithms(was_deterministic)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _own_port(port: int) -> int:
    """The port of this process, among those of its host: the n-th has --metrics-port + n.

    Raises:
      ValueError: there is none.
    """
    n = distributed.local_rank()
    if port + n > MAX_PORT:
        raise ValueError(
            f"--metrics-port: expected at most {MAX_PORT - n} for process {n} of the host, which serves at port "
            f"{port} + {n}, got {port}"
        )
    return port + n


@contextmanager
def metrics_exported(
    port: int | None, file: str | None, program: str
) -> Iterator[Exporter | None]:
    """Export metrics of a program meanwhile, as --metrics-port and --metrics-file ask for; None if they do not.

    Of several processes each has a port of its own on its host, from --metrics-port on; rank 0 alone writes the file.

    Raises:
      ValueError: the port is taken, the file cannot be written, or prometheus-client is missing.
    """
    processes = distributed.current_processes()
    if processes is not None and not processes.is_main:
        file = None
    if port is None and file is None:
        yield None
        return

    path = Path(file) if file else None
    if path is not None:
        check_output_path("--metrics-file", path)

    from funcppo.kg.run import telemetry

    if processes is not None and port is not None:
        port = _own_port(port)
    versions = {name: package_version(name) for name in ("funcppo", "torch")}
    with telemetry.export(
        port,
        path,
        program,
        versions,
        lambda line: print(f"note: {line}", file=sys.stderr),
    ) as exporter:
        n_processes = processes.world_size if processes else 1
        exporter.telemetry.record_processes(n_processes)
        if processes is not None and port is not None:
            # before any work: a port may be taken
            processes.exchange("metrics", port)
        yield exporter


def set_caches(cache_dir: Path | None) -> None:
    """Keep compiled code in a folder instead of the user's cache folder.

    Raises:
      ValueError: others own it, or may write it.
    """
    if cache_dir is not None:
        from funcppo.runtime.cache import use_folder

        use_folder(cache_dir)


def set_threads(n_threads: int) -> None:
    """Set how many CPU threads an operation of PyTorch uses."""
    import torch

    torch.set_num_threads(n_threads)


def package_version(package: str) -> str:
    """Return the version of an installed package, or "not installed".

    The version of funcppo is that of the code that runs, installed or not.
    """
    if package == "funcppo":
        return funcppo.__version__
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a program as Ctrl-C does, but for its exit status."""


@contextmanager
def raise_terminated() -> Iterator[None]:
    """Raise `Terminated` at a SIGTERM, so that half-written files are removed; by default the process dies at once."""

    def handle_signal(signal_number: int, frame: FrameType | None) -> None:
        raise Terminated

    previous_handler = signal.signal(signal.SIGTERM, handle_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous_handler)


@dataclass(slots=True)
class Interrupt:
    """Whether the program was asked to stop, by Ctrl-C or SIGTERM."""

    signal_number: int = 0
    """The first signal; 0 before any."""

    @property
    def requested(self) -> bool:
        """Whether a signal came; cheap enough for the innermost loop."""
        return self.signal_number != 0

    @property
    def exit_status(self) -> int:
        """The exit status of a program that the signal stopped."""
        return 128 + self.signal_number


@contextmanager
def defer_interrupt() -> Iterator[Interrupt]:
    """Record a first Ctrl-C or SIGTERM in the object that is yielded, so that work can end cleanly.

    Where it has not ended after `GRACE_SECONDS`, the signal is repeated. A second one raises at once, and a third one
    kills the process.

    Raises:
      KeyboardInterrupt: at the second signal; `Terminated` if that is a SIGTERM.
    """
    interrupt = Interrupt()
    repeats: list[threading.Timer] = []

    def handle_signal(signal_number: int, frame: FrameType | None) -> None:
        if not interrupt.requested:
            interrupt.signal_number = signal_number
            repeat = threading.Timer(
                GRACE_SECONDS, _thread.interrupt_main, [signal_number]
            )
            repeat.daemon = True
            repeat.start()
            repeats.append(repeat)
            return
        for number in handlers:
            signal.signal(number, signal.SIG_DFL)
        is_sigterm = signal_number == signal.SIGTERM
        raise Terminated if is_sigterm else KeyboardInterrupt

    handlers = {
        number: signal.signal(number, handle_signal)
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield interrupt
    finally:
        for repeat in repeats:
            repeat.cancel()
        for number, handler in handlers.items():
            signal.signal(number, handler)


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
    # The system releases a lock when its process ends, however it ends, so that a killed process blocks nobody.
    from filelock import FileLock, Timeout

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
