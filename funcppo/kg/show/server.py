"""Serve the explorer: limits of requests, the worker that answers them, and the socket (extra `serve`).

Every request passes the guard: its method, its Host header, sizes, and headers of safety. One thread does the work of
requests, one after the other, with a bound on the queue and on the time of each: the caches of a run are not made for
several threads, and an operation of PyTorch uses all cores that it may use.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import ipaddress
import queue
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any, ClassVar, TypeAlias, TypeVar
from urllib.parse import parse_qsl, urlencode

import h11
import uvicorn
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from funcppo.core.files import shorten
from funcppo.core.host import Clock

# of the headers of a request, and of its path and query string
MAX_HEADER_BYTES = 16_384
MAX_QUERY_BYTES = 8192
# one more ends the oldest that waits for a request, or else the oldest
MAX_CONNECTIONS = 100
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}


class RequestError(Exception):
    """Raised for a request that has no answer.

    Attributes:
      status: 400 bad request, 404 nothing of that name, 503 too much work now, and others of HTTP.
    """

    def __init__(self, status: int, message: str) -> None:
        """Set the status and the message, which is put on one line."""
        super().__init__(" ".join(message.split()))
        self.status = status


# -- the guard


class Guard:
    """Middleware that refuses requests that no page of the explorer sends."""

    def __init__(
        self,
        app: ASGIApp,
        hosts: Sequence[str],
        problem: Callable[[int, str, bool], Response],
        path_prefix: str,
    ) -> None:
        """Set the application to guard.

        Args:
          hosts: the name or address that is listened on, then names of a proxy.
          problem: makes the response of a refusal: of status, line, and whether the API was asked.
          path_prefix: dropped from paths that begin with it.
        """
        self._app = app
        self._hosts = hosts
        self._problem = problem
        self._prefix = path_prefix

    async def __call__(
        self, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            return
        app, path = self._app, scope["path"]
        if self._prefix and f"{path}/".startswith(f"{self._prefix}/"):
            scope = {**scope, "path": path[len(self._prefix) :] or "/"}
        is_head = scope["method"] == "HEAD"
        send_guarded = partial(_send_guarded, send, scope["path"], is_head)
        try:
            check_request(scope, self._hosts)
            query = read_query_string(scope["query_string"])
            scope = {**scope, "query_string": query, "method": "GET"}
        except RequestError as error:
            app = self._problem(error.status, str(error), is_api(scope))
            if error.status == 405:
                app.headers["Allow"] = "GET, HEAD"
        await app(scope, receive, send_guarded)


async def _send_guarded(
    send: Send, path: str, is_head: bool, message: Message
) -> None:
    """Send a part of the response of a path, with security headers; no body for a HEAD request."""
    if message["type"] == "http.response.start":
        headers = MutableHeaders(scope=message)
        headers.update(HEADERS)
        is_static = path.startswith("/static/")
        headers["Cache-Control"] = "no-cache" if is_static else "no-store"
    elif is_head:
        message = {**message, "body": b""}
    # A client that sent what is no body gets no answer.
    with suppress(h11.LocalProtocolError):
        await send(message)


def check_request(scope: Scope, hosts: Sequence[str]) -> None:
    """Check a request's method, headers and sizes before its query string is read.

    Args:
      hosts: the one that is listened on, then names of a proxy.

    Raises:
      RequestError: it is refused.
    """
    headers = Headers(scope=scope)
    names = headers.getlist("host")
    is_named = len(names) == 1 and any(
        is_allowed_host(names[0], host) for host in hosts
    )
    n_bytes = sum(map(len, chain.from_iterable(scope["headers"])))
    n_asked = len(scope["raw_path"]) + len(scope["query_string"])
    has_body = "transfer-encoding" in headers
    has_body = has_body or headers.get("content-length", "0") != "0"
    # Another site may link to a page, but not make a browser ask for data.
    is_foreign = headers.get("sec-fetch-site") == "cross-site"
    is_link = headers.get("sec-fetch-mode") == "navigate"
    for is_refused, status, line in (
        (
            not is_named,
            400,
            f"Host header: expected the address of this server ({', '.join(hosts)} or localhost), or a name that "
            "--set allowed_hosts gives",
        ),
        (
            scope["method"] not in ("GET", "HEAD"),
            405,
            "expected the method GET or HEAD",
        ),
        (
            n_bytes > MAX_HEADER_BYTES,
            431,
            f"headers: expected at most {MAX_HEADER_BYTES} bytes, got {n_bytes}",
        ),
        (
            n_asked > MAX_QUERY_BYTES,
            414,
            f"query string: expected at most {MAX_QUERY_BYTES} bytes (names may be given by their ids)",
        ),
        (has_body, 413, "expected a request without a body"),
        (
            is_foreign and not is_link,
            403,
            "expected a request of this site, got one of another",
        ),
    ):
        if is_refused:
            raise RequestError(status, line)


def read_query_string(text: bytes) -> bytes:
    """Return the query string without empty fields, which forms send.

    Raises:
      RequestError: it is not UTF-8, has too many fields, or one of them twice.
    """
    try:
        pairs = parse_qsl(
            text.decode("ascii"), errors="strict", max_num_fields=20
        )
    except UnicodeError:
        raise RequestError(
            400, "query string: expected percent-encoded UTF-8"
        ) from None
    except ValueError:
        raise RequestError(
            400, "query string: expected at most 20 fields"
        ) from None
    for name, n in Counter(name for name, _ in pairs).items():
        if n > 1:
            raise RequestError(
                400, f"{shorten(name)}: expected once, got it {n} times"
            )
    return urlencode(pairs).encode()


def is_api(scope: Scope) -> bool:
    """Return whether a request asks for JSON."""
    path: str = scope["path"]
    return path.startswith("/api/") or path == "/openapi.json"


def is_loopback(host: str) -> bool:
    """Return whether a name or an address belongs to this machine alone."""
    if host.lower() == "localhost":
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def is_allowed_host(header: str, host: str) -> bool:
    """Return whether a Host header names this server.

    A site of others whose name was made to lead here (DNS rebinding) still has its own name in the header.

    Args:
      header: name or address, perhaps with a port, which a tunnel may have changed.
      host: that is listened on. Where it is not of this machine alone, every address is allowed.
    """
    match = re.fullmatch(
        r"(\[[0-9a-fA-F:.]+\]|[^:\[\]/@]+)(:[0-9]{1,5})?", header
    )
    if match is None:
        return False
    name = match[1].strip("[]").lower()
    if is_loopback(name) or name == host.lower():
        return True
    with suppress(ValueError):
        ipaddress.ip_address(name)
        return not is_loopback(host)
    return False


# -- the worker


T = TypeVar("T")
# the future result of work, the work, and when it was submitted
Job: TypeAlias = tuple[Future[Any], Callable[[], Any], float]


class _Interrupted(BaseException):
    """Raised in the worker's thread to end its work; no handler of `Exception` catches it."""


class Worker:
    """Thread that does the work of requests one after the other, from a bounded queue.

    Attributes:
      seconds: that a request may wait, and that its work may take.
      clock: measures how long a request waits.
    """

    def __init__(
        self,
        seconds: float,
        max_waiting: int = 16,
        clock: Clock = time.monotonic,
    ) -> None:
        """Start the worker's thread.

        Args:
          max_waiting: requests that wait while one is worked on; more are refused.
        """
        self.seconds = seconds
        self.clock = clock
        self._queue: queue.Queue[Job] = queue.Queue(max_waiting)
        # guards which work a deadline belongs to
        self._lock = threading.Lock()
        self._running: Future[Any] | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Queue work; return the future of its result.

        Raises:
          RequestError: too many requests wait.
        """
        future: Future[T] = Future()
        try:
            self._queue.put_nowait((future, work, self.clock()))
        except queue.Full:
            raise RequestError(
                503,
                f"busy: {self._queue.maxsize} requests wait already; try again in some seconds",
            ) from None
        return future

    def stop(self) -> None:
        """End the running work and refuse the work that waits."""
        error = RequestError(503, "stopped: the server ends")
        with suppress(queue.Empty):
            while True:
                future, *_ = self._queue.get_nowait()
                if future.set_running_or_notify_cancel():
                    future.set_exception(error)
        running = self._running
        if running is not None:
            self._interrupt(running, error)

    def _run(self) -> None:
        """Do the queued work, one piece after another, forever."""
        while True:
            future, work, submitted = self._queue.get()
            # The client may have gone.
            if not future.set_running_or_notify_cancel():
                continue
            if self.clock() - submitted > self.seconds:
                error = RequestError(
                    503,
                    f"busy: waited for {self.seconds:g} s behind other requests; try again",
                )
                future.set_exception(error)
            else:
                self._do(future, work)

    def _do(self, future: Future[T], work: Callable[[], T]) -> None:
        """Do work within its time, and set its future."""
        late = RequestError(
            503,
            f"stopped: the answer takes longer than {self.seconds:g} s (`request_seconds` of `funcppo serve`)",
        )
        timer = threading.Timer(self.seconds, self._interrupt, [future, late])
        timer.daemon = True
        # The future of interrupted work has its error already.
        with suppress(_Interrupted, InvalidStateError):
            with self._lock:
                self._running = future
            timer.start()
            try:
                result = work()
            except Exception as error:
                self._finish(future)
                future.set_exception(error)
            else:
                self._finish(future)
                future.set_result(result)
        timer.cancel()

    def _finish(self, future: Future[Any]) -> None:
        """Keep deadlines from interrupting the thread from now on, even one that has passed unnoticed."""
        with self._lock:
            # Taking an error back where none stands slows CPython 3.11 down for good, and hangs it when traced.
            if self._running is not future:
                _raise_in_thread(self._thread, None)
            self._running = None

    def _interrupt(self, future: Future[Any], error: RequestError) -> None:
        """Answer work that is still running with an error at once, and end the work.

        It ends between two instructions of Python; an operation of PyTorch goes on to its end, and other work waits.
        """
        with self._lock:
            if self._running is future:
                self._running = None
                future.set_exception(error)
                _raise_in_thread(self._thread, _Interrupted)


def _raise_in_thread(
    thread: threading.Thread, error: type[BaseException] | None
) -> None:
    """Have CPython raise an error in a thread; None cancels an error that was not raised yet."""
    identifier = ctypes.c_ulong(thread.ident or 0)
    raised = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(identifier, raised)


# -- the socket and the server


def open_socket(host: str, port: int) -> socket.socket:
    """Open a listening socket; until it is served, clients wait.

    Args:
      host: a name or an address of this machine.
      port: 0 for one that is free.

    Raises:
      ValueError: the host is none of this machine's, or the port is taken.
    """
    try:
        family, *_, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(
            address[:2], family=family, backlog=MAX_CONNECTIONS
        )
    except (OSError, UnicodeError) as error:
        expected = "expected a name or an address of this machine, and a port that may be used"
        problem = getattr(error, "strerror", "") or "another text"
        line = f"--host {host} --port {port}: {expected}, got: {problem}"
        if getattr(error, "errno", 0) == errno.EADDRINUSE:
            line = f"--port {port}: expected a free port, another program listens on it (0 chooses one)"
        raise ValueError(line) from None


def url(listener: socket.socket, host: str) -> str:
    """Return the address of the explorer for a browser.

    Args:
      host: as it was asked for.
    """
    port = listener.getsockname()[1]
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}/"


class Connection(H11Protocol):
    """Connection that is closed in favour of newer ones, so that idle connections lock nobody out."""

    opened: ClassVar[dict[Connection, None]] = {}  # the oldest first

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Add the connection; beyond `MAX_CONNECTIONS` end the oldest that waits for a request, or else the oldest."""
        super().connection_made(transport)
        if len(self.opened) >= MAX_CONNECTIONS:
            waiting = filter(Connection.is_waiting, self.opened)
            ended = next(waiting, next(iter(self.opened)))
            del self.opened[ended]
            ended.transport.abort()
        self.opened[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection that was lost."""
        self.opened.pop(self, None)
        super().connection_lost(exc)

    def is_waiting(self) -> bool:
        """Return whether the connection waits for a request."""
        return self.cycle is None or self.cycle.response_complete  # pyright: ignore[reportUnnecessaryComparison]


class Server(uvicorn.Server):
    """Server whose `run` answers until Ctrl-C or SIGTERM, whose signal it raises again at the end."""

    def __init__(self, app: ASGIApp, workers: Sequence[Worker]) -> None:
        """Configure a server of an application.

        Args:
          workers: whose work ends first.
        """
        self.workers = workers
        config = uvicorn.Config(
            app,
            log_level="error",
            access_log=False,
            lifespan="off",
            loop="asyncio",
            http=Connection,
            ws="none",
            server_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            timeout_graceful_shutdown=1,
        )
        super().__init__(config)

    async def shutdown(
        self, sockets: list[socket.socket] | None = None
    ) -> None:
        """Stop the workers and shut down without waiting for their work."""
        for worker in self.workers:
            worker.stop()
        await super().shutdown(sockets)
