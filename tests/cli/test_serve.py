"""`serve`: a process that answers and ends with Ctrl-C; warnings, addresses and bad input as one line."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request

import pytest

from funcppo.kg.show import server
from tests.cli.runner import settings

UNTRAINED = ["--score", "max-confidence", "--height", "1"]
UNTRAINED += settings("smoothing=0 object_identity=False")


def test_a_process_answers_and_ends_with_a_signal(tmp_path):
    out = tmp_path / "address.json"
    command = [sys.executable, "-m", "funcppo", "serve", "countries_s1"]
    command += [*UNTRAINED, "--port", "0", "--json", str(out)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            while not out.exists():
                assert process.poll() is None, process.stderr.read()
                time.sleep(0.05)
            url = json.loads(out.read_text())["url"]
            with urllib.request.urlopen(f"{url}api/graph", timeout=60) as page:
                graph = json.load(page)
                assert page.headers["server"] is None
            assert (graph["name"], graph["trained"]) == ("countries_s1", False)
            os.kill(process.pid, signal.SIGINT)
            text, error = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert text == f"{url}  (Ctrl-C ends it)\n"
    assert error.endswith("funcppo: interrupted\n")
    assert "untrained score max-confidence" in error
    assert "Traceback" not in error


class Stopped:
    """A server that ends at once."""

    def run(self, sockets):
        assert sockets[0].getsockname()[1]


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_another_host_is_warned_about(host, programs, monkeypatch, capsys):
    monkeypatch.setattr(server, "Server", lambda *_: Stopped())
    args = ("serve", "countries_s1", *UNTRAINED, "--port", "0", "--host", host)
    assert programs(*args, "--json", "-") == 0
    text, error = capsys.readouterr()
    assert json.loads(text)["url"].startswith(f"http://{host}:")
    is_warned = "there is no password" in error
    assert is_warned == (host == "0.0.0.0")


def test_bad_input_is_one_line(programs, tmp_path):
    def error(*args):
        lines = programs.refused("serve", *args).splitlines()
        return lines[-1]

    no_host = error("countries_s1", "--host", "no host")
    assert "expected a name or an address" in no_host
    assert "--port" in error("countries_s1", "--port", "65536")
    free = ("--port", "0")
    assert "unknown data set" in error("nothing", *free)
    assert "loud" in error("countries_s1", "--score", "loud", *free)
    triples = tmp_path / "t.tsv"
    triples.write_text("a\tp\tb\nb\tp\tc\n")
    assert "expected rules" in error(triples, *free)
    assert "would be overwritten" in error(triples, "--json", triples, *free)
