"""The socket: free ports, taken ones, hosts of others; the address of a browser; missing packages; idle connections."""

import socket
import threading
import urllib.request

import pytest

from funcppo.kg.show.serve import server


def test_a_free_port_is_chosen_and_listened_on():
    with server.open_socket("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert server.url(listener, "127.0.0.1") == f"http://127.0.0.1:{port}/"
        assert server.url(listener, "::1") == f"http://[::1]:{port}/"
        socket.create_connection(("127.0.0.1", port), 60).close()


def test_a_port_in_use_is_one_line():
    with server.open_socket("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ValueError, match="expected a free port"):
            server.open_socket("127.0.0.1", port)


@pytest.mark.parametrize(
    "host", ["192.0.2.1", "no host", "x" * 300, "\u202e", ""]
)
def test_a_host_that_is_none_of_this_machine_is_one_line(host):
    with pytest.raises(ValueError, match=r"^--host .*expected"):
        server.open_socket(host, 0).close()


def test_a_missing_package_is_one_line(monkeypatch):
    monkeypatch.setattr(
        server.importlib.util,
        "find_spec",
        lambda name: None if name == "uvicorn" else name,
    )
    with pytest.raises(ValueError, match=r"uvicorn \(pip install 'funcppo\["):
        server.check_packages()


async def slow_app(scope, receive, send):
    """A page; that of /slow never comes."""
    if scope["path"] == "/slow":
        while (await receive())["type"] != "http.disconnect":
            pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"page"})


def test_connections_that_do_nothing_lock_nobody_out(monkeypatch):
    """Idle ones end first, those with half a request too; then those whose answer does not come."""
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 4)
    with server.open_socket("127.0.0.1", 0) as listener:
        address = listener.getsockname()
        running = server.make_server(slow_app, [])
        thread = threading.Thread(
            target=running.run, kwargs={"sockets": [listener]}
        )
        thread.start()
        opened = []
        try:
            request = b"GET /slow HTTP/1.1\r\nHost: localhost\r\n\r\n"
            for content in (
                request,
                b"",
                request[:9],
                b"",
                b"",
                *[request] * 5,
            ):
                opened.append(socket.create_connection(address, 60))
                opened[-1].sendall(content)
                url = f"http://{address[0]}:{address[1]}/"
                with urllib.request.urlopen(url, timeout=60) as page:
                    assert page.read() == b"page"
        finally:
            for connection in opened:
                connection.close()
            running.should_exit = True
            thread.join(60)
    assert not thread.is_alive()
