"""The socket: free ports, taken ones, hosts of others; the address of a browser; missing packages."""

import socket

import pytest

from funcppo.serve import server


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
