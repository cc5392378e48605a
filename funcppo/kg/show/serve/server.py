"""The socket and the process of the explorer. Needs the extra `serve`."""

from __future__ import annotations

import errno
import importlib.util
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

    import uvicorn
    from starlette.types import ASGIApp

    from funcppo.kg.show.serve.worker import Worker

PACKAGES = ("starlette", "uvicorn", "jinja2")
# one more ends the oldest that waits for a request, or else the oldest
MAX_CONNECTIONS = 100
MAX_HEADER_BYTES = 16_384
# requests in progress may take so long at the end
SHUTDOWN_SECONDS = 1


def check_packages() -> None:
    """Check that the packages of the extra `serve` are installed.

    Raises:
      ValueError: one is missing.
    """
    for package in PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise ValueError(
                f"funcppo serve needs {package} (pip install 'funcppo[serve]')"
            )


def open_socket(host: str, port: int) -> socket.socket:
    """A socket that listens; until it is served, clients wait.

    Args:
      host: a name or an address of this machine.
      port: 0 for one that is free.

    Raises:
      ValueError: the host is none of this machine's, or the port is taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError):
        raise ValueError(
            f"--host {host}: expected a name or an address of this machine"
        ) from None

    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(MAX_CONNECTIONS)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ValueError(
                f"--port {port}: expected a free port, another program listens on it (0 chooses one)"
            ) from None
        if error.errno == errno.EADDRNOTAVAIL:
            raise ValueError(
                f"--host {host}: expected an address of this machine"
            ) from None
        raise ValueError(
            f"--host {host} --port {port}: {error.strerror}"
        ) from None
    return listener


def url(listener: socket.socket, host: str) -> str:
    """The address of the explorer for a browser.

    Args:
      host: as it was asked for.
    """
    port = listener.getsockname()[1]
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}/"


def make_server(app: ASGIApp, workers: Sequence[Worker]) -> uvicorn.Server:
    """A server whose `run` answers until Ctrl-C or SIGTERM, whose signal it raises again at the end.

    Args:
      app: the application.
      workers: whose work ends first.
    """
    import uvicorn

    class Server(uvicorn.Server):
        """A server that does not wait for work at its end."""

        async def shutdown(
            self, sockets: list[socket.socket] | None = None
        ) -> None:
            for worker in workers:
                worker.stop()
            await super().shutdown(sockets)

    config = uvicorn.Config(
        app,
        log_level="error",
        access_log=False,
        lifespan="off",
        loop="asyncio",
        http=_make_protocol(),
        ws="none",
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )
    return Server(config)


def _make_protocol() -> type[asyncio.Protocol]:
    """What a server makes of each connection."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    connections: dict[Protocol, None] = {}  # the oldest first

    class Protocol(H11Protocol):
        """A connection that gives way to later ones, so that idle ones lock nobody out."""

        def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            super().connection_made(transport)
            if len(connections) >= MAX_CONNECTIONS:
                waiting = filter(Protocol.is_waiting, connections)
                ended = next(waiting, next(iter(connections)))
                del connections[ended]
                ended.transport.abort()
            connections[self] = None

        def connection_lost(self, exc: Exception | None) -> None:
            connections.pop(self, None)
            super().connection_lost(exc)

        def is_waiting(self) -> bool:
            """Whether no request is being answered."""
            return self.cycle is None or self.cycle.response_complete  # pyright: ignore[reportUnnecessaryComparison]

    return Protocol
