"""What is refused before anything is read: hosts, methods, sizes and requests of other sites; headers of safety."""

import pytest

from funcppo.kg.show.serve.server import is_allowed_host, is_loopback


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
    headers = client.get(path).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy and "http" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["x-frame-options"] == "DENY"
    assert "set-cookie" not in headers
    assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8080", ""])
def test_another_host_is_refused(client, host):
    for path in ("/", "/api/graph"):
        response = client.get(path, headers={"host": host})
        assert response.status_code == 400
        assert "Host header: expected" in response.text
        assert "content-security-policy" in response.headers


@pytest.mark.parametrize(
    "method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE"]
)
def test_other_methods_are_refused(client, method):
    for path in ("/", "/api/graph", "/static/explorer.js"):
        response = client.request(method, path)
        assert response.status_code == 405
        assert response.headers["allow"] == "GET"


def test_a_long_query_string_is_refused(client):
    response = client.get("/api/search?q=" + "x" * 9000)
    assert response.status_code == 414
    assert "at most 8192 bytes" in response.json()["error"]


def test_other_sites_may_link_and_not_ask(client):
    site = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}
    assert client.get("/api/graph", headers=site).status_code == 403
    site["sec-fetch-mode"] = "navigate"
    assert client.get("/", headers=site).status_code == 200
