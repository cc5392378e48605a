"""`funcppo serve`: a local explorer of a run or a data set for a browser."""

from __future__ import annotations

import socket
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from funcppo.cli.common import (
    print_notes,
    select_device,
    write_json,
)
from funcppo.cli.options import HIDDEN, ScoreOptions
from funcppo.core.files import read_object
from funcppo.core.host import import_extra
from funcppo.core.settings import Port, PositiveFloat
from funcppo.kg.config import RESULTS_FILE

# PyTorch takes seconds to import, and --help does not wait for it.
if TYPE_CHECKING:
    from funcppo.kg.answers import Answerer


@dataclass(frozen=True, kw_only=True)
class Serve(ScoreOptions):
    """Explore a trained run or a data set in a browser: ranked answers, proofs, rules, neighbours, a JSON API.

    Answers, scores and proofs are those of `funcppo predict`. A data set without training is ranked by rule
    confidences, and every page says so.

    By default only programs of this machine can connect. Another host lets everybody in who reaches it: there is no
    password. Requests other than GET and HEAD, requests under another name in the Host header, and work of more than
    request_seconds are refused with one line.

    Ctrl-C ends it. Needs the extra `serve`.

    Exit status: 2 bad input, 130 ended by Ctrl-C, 143 by SIGTERM.
    """

    EXAMPLES: ClassVar[tuple[str, ...]] = (
        "funcppo serve runs/s1",
        "funcppo serve graph/ --rules rules.tsv --port 0",
    )

    port: Port = 8080
    """Port to listen on; 0 chooses a free one."""
    host: str = "127.0.0.1"
    """Name or address to listen on, such as 0.0.0.0 for all of this machine."""
    request_seconds: Annotated[PositiveFloat, HIDDEN] = 20.0
    """Time limit of the work of a request, and of its wait for others, in seconds."""

    allowed_hosts: Annotated[tuple[str, ...], HIDDEN] = ()
    """Names that requests may give in their Host header too, such as kg.example.com behind a proxy."""
    path_prefix: Annotated[str, HIDDEN] = ""
    """Path below which a proxy shows the explorer, such as /graphs; with or without it requests are answered."""

    def run(self) -> int:
        """Serve until a signal; return the exit status.

        Returns:
          The exit status; a signal raises instead.
        """
        for package in ("fastapi", "uvicorn", "jinja2"):
            import_extra(package, "serve", "the explorer")
        from funcppo.kg.show import server

        self.prepare()
        listener = server.open_socket(self.host, self.port)
        with listener:
            self._warn()
            answerer, notes = self.open_answerer()
            print_notes(notes, most=5)
            self._serve(listener, answerer)
        return 0

    def _serve(self, listener: socket.socket, answerer: Answerer) -> None:
        """Answer requests until a signal; print the address once serving begins."""
        from funcppo.kg.show import server
        from funcppo.kg.show.explorer import Explorer, Site

        path = Path(self.target) / RESULTS_FILE
        is_finished = self.is_run and path.is_file()
        results = read_object(path) if is_finished else None
        explorer = Explorer(answerer, results)
        site = Site(explorer, self.request_seconds)
        workers = (site.worker, site.lookups)
        for worker in workers:
            # Each thread has a current GPU of its own.
            worker.submit(partial(select_device, self.device))

        address = server.url(listener, self.host)
        write_json(self.json, {"url": address})
        if self.json != "-":
            print(f"{address}  (Ctrl-C ends it)")
        sys.stdout.flush()
        prefix = self.path_prefix.strip("/")
        app = site.make_app(
            self.host, self.allowed_hosts, prefix and f"/{prefix}"
        )
        server.Server(app, workers).run(sockets=[listener])

    def _warn(self) -> None:
        """Print a warning if other machines can reach the host."""
        from funcppo.kg.show.server import is_loopback

        if not is_loopback(self.host):
            print(
                f"warning: --host {self.host}: everybody who reaches this machine can read the data and use its time; "
                "there is no password",
                file=sys.stderr,
            )
