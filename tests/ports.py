"""Ports for servers that tests start."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def hold_ports(n: int) -> Iterator[list[socket.socket]]:
    """Sockets bound to ports in a row, which the system gives to no other program meanwhile.

    They do not listen, so a server of the test, which sets `SO_REUSEADDR`, can bind the same port.
    """
    while True:
        with ExitStack() as stack:
            held = [stack.enter_context(socket.socket()) for _ in range(n)]
            if _bind_in_a_row(held):
                yield held
                return


def port_of(bound: socket.socket) -> int:
    """The port of a socket."""
    return bound.getsockname()[1]


def _bind_in_a_row(sockets: list[socket.socket]) -> bool:
    """Bind sockets to a free port and those after it; whether all of them are free."""
    first = 0
    try:
        for i, one in enumerate(sockets):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(("127.0.0.1", first and first + i))
            first = first or port_of(one)
    except (OSError, OverflowError):
        return False
    return True
