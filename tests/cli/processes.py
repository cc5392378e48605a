"""Programs run by several processes, forked from this one, which has imported PyTorch already."""

import os
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from funcppo import cli
from funcppo.kg.run.telemetry import Telemetry
from funcppo.runtime import distributed
from tests.forked import Ended

PORT_DIGITS = 5  # as many for every port, so that each process reads its own


def run_processes(
    n: int,
    folder: Path,
    *args: object,
    env: Mapping[str, str] | None = None,
    prepare: Callable[[int], object] = lambda rank: None,
    main: Callable[[], object] = cli.main,
) -> list[Ended]:
    """Run a command line in some processes that know of each other as those of torchrun do.

    Args:
      folder: for what they print.
      env: more variables.
      prepare: called in each process with its rank before the program starts.
      main: the program.
    """
    if torch.cuda.is_available():
        pytest.skip("a forked process cannot use a GPU")
    launch = {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(n),
        "LOCAL_WORLD_SIZE": str(n),
        "MASTER_ADDR": "127.0.0.1",
        **(env or {}),
    }
    # the store has threads, so the processes are forked before it is made
    port_read, port_written = os.pipe()
    files = [
        [folder / f"{rank}.{x}" for x in ("out", "err")] for rank in range(n)
    ]
    children: list[int] = []
    for rank in range(n):
        pid = os.fork()
        if pid == 0:
            ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            os.close(port_written)
            port = os.read(port_read, PORT_DIGITS).decode()
            os.environ.update(launch | ranks | {"MASTER_PORT": port})
            sys.argv = ["funcppo", *map(str, args)]
            # however slow rank 0 is, it prints the errors of others
            distributed.TELL_SECONDS = 600.0
            _run_child(files[rank], [partial(prepare, rank), main])
        children.append(pid)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(port_written, f"{store.port:0{PORT_DIGITS}}".encode() * n)
    os.close(port_written)
    os.close(port_read)
    codes = [os.waitstatus_to_exitcode(os.waitpid(x, 0)[1]) for x in children]
    texts = [[file.read_text() for file in pair] for pair in files]
    return [Ended(code, *pair) for code, pair in zip(codes, texts)]


def keep_metrics(folder: Path, port: int) -> Callable[[int], None]:
    """A preparation of processes that writes into a folder what each serves on its port when it has finished."""

    def prepare(rank: int) -> None:
        finish = Telemetry.finish

        def keep(metrics: Telemetry) -> None:
            finish(metrics)
            url = f"http://127.0.0.1:{port + rank}/metrics"
            with urllib.request.urlopen(url) as answer:
                (folder / f"{rank}.metrics").write_bytes(answer.read())

        Telemetry.finish = keep

    return prepare


def waiting_ends_with(file: Path, seconds: float = 0.5) -> None:
    """Let this process wait for the others as long as they take, until a file is there, and from then on for a time.

    A test makes the file where one of them ends or hangs. Before, a slow machine must not look like that.
    """
    look = distributed.Processes._progress

    def look_and_hurry(processes: distributed.Processes) -> Iterator[str]:
        if file.exists():
            processes.stall_seconds = seconds
        return look(processes)

    distributed.Processes._progress = look_and_hurry


def _run_child(files: list[Path], calls: list[Callable[[], object]]) -> None:
    """Make some calls in this process and end it."""
    status = 1
    try:
        for number, file in enumerate(files, 1):
            os.dup2(
                os.open(file, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), number
            )
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = sys.__stderr__ = open(  # noqa: SIM115
            2, "w", buffering=1, closefd=False
        )
        for call in calls:
            call()
        sys.stdout.flush()
        status = 0
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        os._exit(status)
