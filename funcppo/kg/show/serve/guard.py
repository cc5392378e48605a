"""What every request and every response goes through: the method, the Host header, sizes, and headers of safety."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from contextlib import suppress

from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_QUERY_BYTES = 8192
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

# makes the response of an error: status, line, whether the API was asked
ProblemResponse = Callable[[int, str, bool], Response]


class Guard:
    """Middleware that refuses what no page of the explorer sends."""

    def __init__(
        self, app: ASGIApp, host: str, problem: ProblemResponse
    ) -> None:
        """Guard an application.

        Args:
          host: the name or address that is listened on.
          problem: makes the response of a refusal.
        """
        self._app = app
        self._host = host
        self._problem = problem

    async def __call__(
        self, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        refusal = self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, send_guarded)
            return
        status, line = refusal
        response = self._problem(status, line, is_api(scope))
        if status == 405:
            response.headers["Allow"] = "GET"
        await response(scope, receive, send_guarded)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Status and line of a refusal; None for a request that is answered."""
        headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name, []).append(value)
        hosts = headers.get(b"host", [])
        if len(hosts) != 1 or not is_allowed_host(
            hosts[0].decode("latin-1"), self._host
        ):
            return (
                400,
                f"Host header: expected the address of this server ({self._host} or localhost)",
            )
        if scope["method"] != "GET":
            return 405, "expected the method GET"
        if len(scope["query_string"]) > MAX_QUERY_BYTES:
            return (
                414,
                f"query string: expected at most {MAX_QUERY_BYTES} bytes (names may be given by their ids)",
            )
        # Another site may link to a page, but not make a browser ask for data.
        is_foreign = headers.get(b"sec-fetch-site") == [b"cross-site"]
        is_link = headers.get(b"sec-fetch-mode") == [b"navigate"]
        if is_foreign and not is_link:
            return 403, "expected a request of this site, got one of another"
        return None


def is_api(scope: Scope) -> bool:
    """Whether a request asks for JSON."""
    path: str = scope["path"]
    return path.startswith("/api/") or path == "/openapi.json"


def is_loopback(host: str) -> bool:
    """Whether a name or an address is that of this machine alone."""
    if host.lower() == "localhost":
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def is_allowed_host(header: str, host: str) -> bool:
    """Whether a Host header names this server.

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
