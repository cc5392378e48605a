"""The entry point: overview, version, exit statuses, one line for bad input, closed pipes; nothing loads PyTorch."""

import io
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from funcppo import __version__, cli
from funcppo.core.settings import write_config
from funcppo.kg.config import RunConfig
from tests.cli.runner import write_graph

PYTHON = [sys.executable, "-m", "funcppo"]


@pytest.fixture(autouse=True)
def buffered_output(monkeypatch):
    """A buffer holds what a program prints until it ends, and so hides a closed pipe until then."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)


def test_the_overview_names_each_with_its_summary(programs, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    lines = [line.strip() for line in programs.printed("--help").splitlines()]
    for name, summary in cli.PROGRAMS.items():
        assert cli.program_class(name).__doc__.splitlines()[0] == summary
        (line,) = [line for line in lines if line.endswith(f" {summary}")]
        assert line.startswith(f"{name} ")
    assert programs.printed("--version") == f"funcppo {__version__}\n"
    assert "(did you mean train?)" in programs.refused("trian")


def test_bash_completes_programs_and_their_options(programs):
    script = programs.printed("--completion")
    for words, found in (("pr", "predict prove"), ("train --se", "--seed")):
        place = len(words.split())
        asked = f"COMP_WORDS=(funcppo {words}); COMP_CWORD={place}; _funcppo"
        lines = f'{script}\n{asked}\necho "${{COMPREPLY[@]}}"'
        done = subprocess.run(["bash", "-c", lines], capture_output=True)
        assert found in done.stdout.decode(), done


def test_the_examples_of_each_program_can_be_typed(capsys):
    """But for the files and runs that they name."""
    for name in cli.PROGRAMS:
        assert len(cli.program_class(name).EXAMPLES) == 2, name
        for example in cli.program_class(name).EXAMPLES:
            _, program, *words = shlex.split(example)
            assert program == name
            with suppress(FileNotFoundError):
                cli.parse_program(name, words)


HELP_WORDS = [["--help"], *([name, "--help"] for name in cli.PROGRAMS)]
# Prints each help in turn with its exit status, its errors, and whether PyTorch was imported for it or before.
HELP_PROGRAM = """
import contextlib, io, json, sys
from funcppo.cli import main
for words in json.loads(sys.argv[1]):
    sys.argv = ["funcppo", *words]
    out, err = io.StringIO(), io.StringIO()
    status = None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as stop:
            status = stop.code
    told = status, out.getvalue(), err.getvalue(), "torch" in sys.modules
    print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def helps():
    """What one process prints as the help of each program."""
    command = [sys.executable, "-c", HELP_PROGRAM, json.dumps(HELP_WORDS)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    return dict(zip(map(" ".join, HELP_WORDS), map(json.loads, lines)))


def test_the_help_comes_without_torch(helps):
    for status, out, err, has_torch in helps.values():
        assert (status, err, has_torch) == (0, "", False)
        assert out.startswith("usage: funcppo ")


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["prove", "countries_s1", "locatedIn(france, europe)"], 0),
        (["prove", "countries_s1", "locatedIn(france, asia)"], 1),
        (["prove", "countries_s1", "locatedIn(france, atlantis)"], 2),
        (["prove", "countries_s1"], 2),
        (["data", "countries_s1", "--json", "-"], 0),
        (["data", "nowhere"], 2),
        (["magic"], 2),
        ([], 2),
        (["--magic"], 2),
    ],
)
def test_the_exit_status_and_no_traceback(arguments, status, programs, capsys):
    assert programs(*arguments) == status
    seen = capsys.readouterr()
    assert "Traceback" not in seen.err + seen.out
    assert (seen.out == "") == (status == 2)
    assert status != 2 or (
        seen.err.startswith("funcppo: ") and seen.err.count("\n") == 1
    )


@pytest.fixture
def data_folder(tmp_path):
    """A folder of a data set with rules."""
    return write_graph(
        tmp_path / "data",
        train="a\te\tb\nb\te\tc\n",
        valid="a\tp\tb\n",
        test="b\tp\tc\n",
        rules="p(X,Y) :- e(X,Y)\n",
    )


# Each program with an option that names an output, and without it.
WRITERS = {
    "mine --out": "mine {data}",
    "mine --json": "mine {data} --out {new}/r.tsv",
    "evaluate --json": "evaluate {data}",
    "evaluate --details": "evaluate {data} --overwrite",
    "evaluate --metrics-file": "evaluate {data}",
    "predict --json": "predict {data} p(a,X)",
    "predict --csv": "predict {data} p(a,X)",
    "predict --out": "predict {data} --relation p --new",
    "check --json": "check {data}",
    "prove --json": "prove {data} p(a,b)",
    "data --json": "data {data}",
    "data --index": "data {data}",
    "train --out": "train {data} --overwrite",
    "train --json": "train {data} --out {new}/run",
    "train --metrics-file": "train {data} --out {new}/run",
    "report --out": "report {run}",
    "report --json": "report {run} --out {new}/page.html",
    "serve --json": "serve {data} --port 0",
    "rl --out": "rl CartPole-v1 --overwrite",
    "rl --json": "rl CartPole-v1",
}
FOLDER_OPTIONS = ("data --index", "train --out", "rl --out")
# Of outputs that are files and of folders: what is there, and the end of the error. An {option} may say more.
BAD_FILES = {
    "data/test.txt": "than data/test.txt, which would be overwritten",
    "new/../data/test.txt": "than data/test.txt, which would be overwritten",
    "symbolic": "than data/test.txt, which would be overwritten",
    "hard": "than data/test.txt, which would be overwritten",
    "foreign": "expected a new file, or one that {option} wrote, got another file",
    "data/facts.csv": "expected another name than that of a split",
    "new": "expected a file in a folder that exists",
    "absent/x": "expected a file in a folder that exists",
}
BAD_FOLDERS = {
    "data": "than that of data/train.txt, which is read",
    ".": "than that of data/train.txt, which is read",
    "data/test.txt": "expected a folder, got a file",
    "other": "or one that {option} wrote, got one with notes.txt",
    "hub": "or one that {option} wrote, got one with config.json",
}
CASES = [
    (name, output, end)
    for name in WRITERS
    for output, end in (
        BAD_FOLDERS if name in FOLDER_OPTIONS else BAD_FILES
    ).items()
    # It reads no files, a records file is replaced where --overwrite is given, and no index has a config.
    if not (name == "rl --out" and output in ("data", "."))
    and not (name == "rl --json" and ("over" in end or "split" in end))
    and not (name == "evaluate --details" and output == "foreign")
]


@pytest.fixture
def outputs(data_folder, tmp_path, monkeypatch):
    """The working folder: a data set, a run of it, and files and folders of other programs."""
    monkeypatch.chdir(tmp_path)
    for name in ("new", "other", "hub", "run"):
        (tmp_path / name).mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    (tmp_path / "hub" / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "foreign").write_text("a\tr\tb\n")
    (tmp_path / "symbolic").symlink_to(data_folder / "test.txt")
    (tmp_path / "hard").hardlink_to(data_folder / "test.txt")
    write_config(RunConfig(dataset="data"), tmp_path / "run")
    return tmp_path


def _contents(folder):
    files = sorted(x for x in folder.rglob("*") if x.name != "run.lock")
    return [(x, x.is_file() and x.read_bytes()) for x in files]


@pytest.mark.parametrize(("name", "output", "end"), CASES)
def test_no_output_replaces_what_is_none(name, output, end, outputs, programs):
    before = _contents(outputs)
    _, option = name.split()
    words = WRITERS[name].format(data="data", new="new", run="run").split()
    error = programs.refused(*words, option, output)
    assert error.startswith(f"{option} {Path(output)}: ")
    assert end.format(option=option) in error
    assert _contents(outputs) == before


class BrokenOutput(io.StringIO):
    """A standard output that fails at a result, and takes what is printed before."""

    def write(self, text: str) -> int:
        if any(part in text for part in ("r.tsv", "mrr", "p(a, b)", "split")):
            raise ValueError("no output")
        return super().write(text)


@pytest.mark.parametrize("name", ["mine --json", "prove --json", "data --json"])
def test_the_json_is_written_before_anything_is_printed(
    name, data_folder, programs, monkeypatch, tmp_path
):
    output = tmp_path / "result.json"
    words = WRITERS[name].format(data=data_folder, new=tmp_path)
    arguments = [*words.split(), "--json"]
    monkeypatch.setattr(sys, "stdout", BrokenOutput())
    assert programs(*arguments, output) == 2
    assert json.loads(output.read_text())["format"] == 2


@pytest.mark.parametrize(
    ("number", "error"),
    [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, cli.Terminated)],
)
def test_a_signal_waits_for_the_import_of_pytorch(number, error, monkeypatch):
    """An exception in the midst of it would abort the process."""
    specification = SimpleNamespace(_initializing=True)
    module = SimpleNamespace(__spec__=specification)
    old_sigint = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(error), cli.raise_terminated():
            with monkeypatch.context() as patch:
                patch.setitem(sys.modules, "torch", module)
                os.kill(os.getpid(), number)
                time.sleep(0.2)
            threading.Event().wait(60)
            pytest.fail("the signal is lost")
    finally:
        signal.signal(signal.SIGINT, old_sigint)


@pytest.mark.parametrize(
    ("number", "status", "line"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")],
)
def test_a_signal_ends_a_program_with_one_line_and_its_status(
    number, status, line, programs, monkeypatch, capsys
):
    before = signal.getsignal(signal.SIGTERM)
    # A shell's background jobs ignore Ctrl-C.
    old_sigint = signal.signal(signal.SIGINT, signal.default_int_handler)
    run = Mock(side_effect=lambda: os.kill(os.getpid(), number))
    program = Mock(json=None, run=run)
    monkeypatch.setattr(cli, "parse_program", lambda *_: program)
    try:
        assert programs("mine") == status
    finally:
        signal.signal(signal.SIGINT, old_sigint)
    assert capsys.readouterr().err == f"funcppo: {line}\n"
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_missing_extra_is_one_line(programs, monkeypatch):
    error = ModuleNotFoundError("No module named 'rich'", name="rich")
    monkeypatch.setattr(cli.importlib, "import_module", Mock(side_effect=error))
    extra = "needs the extra `cli` (pip install 'funcppo[cli]')"
    assert extra in programs.refused("doctor")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("unable to allocate 8 TiB"),
        OverflowError("int too big to convert"),
        RuntimeError("[enforce fail]\nDefaultCPUAllocator: can't allocate memory"),
        torch.OutOfMemoryError("CUDA out of memory"),
    ],
)  # fmt: skip
def test_what_does_not_fit_in_memory_is_one_line(error, programs, monkeypatch):
    program = Mock(json=None, run=Mock(side_effect=error))
    monkeypatch.setattr(cli, "parse_program", lambda *_: program)
    line = " ".join(str(error).split())
    expected = f"out of memory: expected smaller sizes, got: {line}"
    assert programs.refused("mine") == expected


# Closed pipes.


def run(words, stdout):
    """The end of the program in a process of its own, and its errors."""
    command = [*PYTHON, *words]
    pipes = {"stdout": stdout, "stderr": subprocess.PIPE}
    return subprocess.run(command, text=True, **pipes)


@pytest.mark.parametrize("words", ["--help", "data countries_s1 --json {}"])
def test_without_standard_streams_a_program_does_its_work(words, tmp_path):
    """As a service may be started; a file of the program took the number of the closed stream."""
    path = tmp_path / "d.json"
    command = shlex.join([*PYTHON, *words.format(path).split()])
    done = subprocess.run(["bash", "-c", f"{command} <&- >&- 2>&-"])
    assert done.returncode == 0
    assert words == "--help" or json.loads(path.read_text())["format"] == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--help"],
        ["prove", "countries_s1", "locatedIn(X, europe)", "--json", "-"],
    ],
    ids=" ".join,
)
def test_a_closed_pipe_ends_a_program_silently(arguments):
    """Standard output has no reader: the first write fails, as behind `| head -1` sooner or later."""
    reader, writer = os.pipe()
    os.close(reader)
    done = run(arguments, stdout=writer)
    os.close(writer)
    lines = done.stderr.splitlines()
    lines = [line for line in lines if not line.startswith("note: ")]
    assert (done.returncode, lines) == (141, [])


@pytest.mark.skipif(
    not os.path.exists("/dev/full"), reason="no /dev/full on this system"
)
@pytest.mark.parametrize(
    "words",
    [["--help"], ["--completion"], ["data", "countries_s1", "--json", "-"]],
    ids=" ".join,
)
def test_a_full_disk_behind_standard_output_is_one_line(words):
    with open("/dev/full", "w") as full:
        done = run(words, stdout=full)
    line = "funcppo: standard output: No space left on device\n"
    assert (done.returncode, done.stderr) == (2, line)
