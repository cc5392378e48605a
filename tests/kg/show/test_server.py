"""What is refused before anything is read, work that is done in order within its time, and the socket."""

import re
import socket
import threading
import urllib.request
from functools import partial

import pytest
from starlette.responses import Response
from starlette.testclient import TestClient

from funcppo.kg.show import server
from funcppo.kg.show.explorer import Site
from funcppo.kg.show.server import (
    RequestError,
    Worker,
    is_allowed_host,
    is_loopback,
)

# -- the guard


@pytest.mark.parametrize(
    ("header", "host", "is_allowed"),
    [
        ("127.0.0.1:8080", "127.0.0.1", True),
        ("127.0.0.1", "127.0.0.1", True),
        ("localhost:9", "127.0.0.1", True),
        ("LOCALHOST", "127.0.0.1", True),
        ("[::1]:80", "127.0.0.1", True),
        ("evil.example", "127.0.0.1", False),
        ("127.0.0.1.evil.example", "127.0.0.1", False),
        ("localhost.evil.example:8080", "127.0.0.1", False),
        ("10.0.0.1", "127.0.0.1", False),
        ("10.0.0.1:8080", "0.0.0.0", True),
        ("[fe80::1]", "::", True),
        ("evil.example", "0.0.0.0", False),
        ("box.lan:8080", "box.lan", True),
        ("", "127.0.0.1", False),
        ("a@127.0.0.1", "127.0.0.1", False),
        ("127.0.0.1:x", "127.0.0.1", False),
        ("127.0.0.1:80:80", "127.0.0.1", False),
        ("::1", "127.0.0.1", False),
    ],
)  # fmt: skip
def test_hosts(header, host, is_allowed):
    assert is_allowed_host(header, host) is is_allowed


def test_loopback():
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "::1", "127.9.9.9")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "box")))


@pytest.mark.parametrize("path", ["/", "/api/graph", "/nope", "/static/x"])
def test_every_response_has_the_headers_of_safety(client, path):
    bad_host = client.get(path, headers={"host": "evil.example"})
    assert bad_host.status_code == 400
    assert "Host header: expected" in bad_host.text
    for headers in (client.get(path).headers, bad_host.headers):
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy and "http" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["x-frame-options"] == "DENY"
        assert "set-cookie" not in headers
        assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_other_methods_are_refused(client, method):
    for path in ("/", "/api/graph", "/static/explorer.js"):
        response = client.request(method, path)
        assert response.status_code == 405
        assert response.headers["allow"] == "GET, HEAD"


def test_head_has_the_headers_of_get_and_no_body(client):
    for path in ("/", "/api/graph", "/health", "/nothing"):
        answer, head = client.get(path), client.head(path)
        assert head.status_code == answer.status_code
        length = "content-length"
        assert head.headers[length] == answer.headers[length]
        assert answer.content and not head.content
    assert client.get("/health").json() == {"status": "ok"}


def test_behind_a_proxy_every_link_has_the_prefix(explorers):
    site = Site(explorers["questions"], seconds=60)
    app = site.make_app("127.0.0.1", ["kg.example.com"], "/graphs")
    base = "http://kg.example.com"
    client = TestClient(app, base_url=base, follow_redirects=False)
    for path in ("/", "/graphs", "/graphs/", "/entity?entity_id=1", "/api"):
        text = client.get(path).text
        links = re.findall(r'(?:href|src|action)="(/[^"]*)"', text)
        assert len(links) > 5, path
        for link in links:
            assert link.startswith("/graphs/"), link
    location = "/graphs/answers?relation_id=1&head_id=1"
    for prefix in ("", "/graphs"):
        found = client.get(f"{prefix}/ask?relation_id=1&head_id=1")
        assert found.headers["location"] == location
    assert client.get(location).status_code == 200
    assert client.get("/graphsx/").status_code == 404
    other = {"host": "other.example.com"}
    assert client.get("/graphs/", headers=other).status_code == 400


def test_a_request_that_is_too_large_is_refused(client):
    response = client.get("/api/search?q=" + "x" * 9000)
    assert response.status_code == 414
    assert "at most 8192 bytes" in response.json()["error"]
    assert client.get("/" + "x" * 9000).status_code == 414
    response = client.get("/api/graph", headers={"x": "x" * 17_000})
    assert response.status_code == 431
    assert "at most 16384 bytes" in response.json()["error"]
    response = client.request("GET", "/api/graph", content="x")
    assert response.status_code == 413


@pytest.mark.parametrize(
    ("query", "line"),
    [
        ("entity=%ff", "expected percent-encoded UTF-8"),
        ("entity=\u00e9".encode(), "expected percent-encoded UTF-8"),
        ("&".join(f"x{i}=1" for i in range(21)), "at most 20 fields"),
        ("entity=a&entity=b", "'entity': expected once, got it 2 times"),
    ],
)
def test_a_query_string_that_cannot_be_read_is_one_line(query, line):
    text = query if isinstance(query, bytes) else query.encode()
    with pytest.raises(RequestError, match=line) as error:
        server.read_query_string(text)
    assert error.value.status == 400
    assert server.read_query_string(b"q=a+b&kind=&x=%3C") == b"q=a+b&x=%3C"


def test_other_sites_may_link_and_not_ask(client):
    site = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}
    assert client.get("/api/graph", headers=site).status_code == 403
    site["sec-fetch-mode"] = "navigate"
    assert client.get("/", headers=site).status_code == 200


# -- the worker


def block(worker):
    """Work in one call into C, which no error of another thread ends, once it has begun; and what ends it."""
    started, may_end = threading.Event(), threading.Event()

    def wait():
        started.set()
        return may_end.wait(60)

    running = worker.submit(wait)
    assert started.wait(60)
    return running, may_end


def test_work_is_done_in_one_thread_in_order():
    worker = Worker(60, 8)
    done = []
    work = lambda i: done.append((i, threading.get_ident()))
    futures = [worker.submit(partial(work, i)) for i in range(5)]
    for future in futures:
        future.result(60)
    assert [i for i, _ in done] == list(range(5))
    assert len({thread for _, thread in done}) == 1
    with pytest.raises(ZeroDivisionError):
        worker.submit(lambda: 1 // 0).result(60)


@pytest.mark.parametrize("is_stopped", [False, True])
def test_an_operation_that_goes_on_keeps_no_client_waiting(is_stopped):
    # a clock by which no request waits, however slow the machine is
    worker = Worker(60 if is_stopped else 0.05, 8, lambda: 0.0)
    running, may_end = block(worker)
    waiting = worker.submit(lambda: 1)
    if is_stopped:
        worker.stop()
        with pytest.raises(RequestError, match="server ends"):
            waiting.result(60)
    with pytest.raises(RequestError, match=r"server ends|longer than 0\.05 s"):
        running.result(60)
    assert not may_end.is_set()
    worker.seconds = 60
    may_end.set()
    assert worker.submit(lambda: 2).result(60) == 2


def test_work_that_waits_is_bounded_in_number_and_time():
    now = [0.0]
    worker = Worker(600, 3, lambda: now[0])
    running, may_end = block(worker)
    late = worker.submit(lambda: 1)
    now[0] = 300.0
    in_time = worker.submit(lambda: 2)
    gone = worker.submit(lambda: 1 // 0)
    with pytest.raises(RequestError, match="3 requests wait") as error:
        worker.submit(lambda: 4)
    assert error.value.status == 503
    assert gone.cancel()  # its client is not there any more
    now[0] = 601.0
    may_end.set()
    with pytest.raises(RequestError, match="waited for 600 s"):
        late.result(60)
    assert in_time.result(60) == 2 and running.result(60)


# -- the socket and the server


def test_a_free_port_is_listened_on_and_a_taken_one_is_one_line():
    with server.open_socket("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert server.url(listener, "127.0.0.1") == f"http://127.0.0.1:{port}/"
        assert server.url(listener, "::1") == f"http://[::1]:{port}/"
        socket.create_connection(("127.0.0.1", port), 60).close()
        with pytest.raises(ValueError, match="expected a free port"):
            server.open_socket("127.0.0.1", port)


@pytest.mark.parametrize(
    "host", ["192.0.2.1", "no host", "x" * 300, "\u202e", ""]
)
def test_a_host_that_is_none_of_this_machine_is_one_line(host):
    with pytest.raises(ValueError, match=r"^--host .*expected"):
        server.open_socket(host, 0).close()


NO_CHUNK = b"\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"


async def slow_app(scope, receive, send):
    """A page; that of /slow never comes."""
    if scope["path"] == "/slow":
        while (await receive())["type"] != "http.disconnect":
            pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"page"})


def test_connections_that_do_nothing_lock_nobody_out(monkeypatch, capsys):
    """Idle ones end first, those with half a request too; then those whose answer does not come."""
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 4)
    problem = lambda status, line, is_api: Response(line, status)
    app = server.Guard(slow_app, ["127.0.0.1", "localhost"], problem, "")
    with server.open_socket("127.0.0.1", 0) as listener:
        address = listener.getsockname()
        running = server.Server(app, [])
        thread = threading.Thread(target=running.run, args=([listener],))
        thread.start()
        opened = []
        try:
            request = b"GET /slow HTTP/1.1\r\nHost: localhost\r\n\r\n"
            idle = [b"", request[:9], b"", b""]
            chunked = request.replace(b"\r\n\r\n", NO_CHUNK)
            idle.append(chunked.replace(b"GET", b"POST"))
            for content in [request, *idle, *[request] * 5]:
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
    assert not thread.is_alive() and "Traceback" not in capsys.readouterr().err
