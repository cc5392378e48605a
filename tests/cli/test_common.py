"""Shared parts of the programs: text for people, outputs, targets, devices, Ctrl-C, locks."""

import io
import json
import mmap
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo.config  # it reads the environment once
from rich.cells import cell_len
from rich.console import Console

from funcppo import cli
from funcppo.cli import common
from funcppo.cli.common import WorkDisplay, make_console, metrics_table
from funcppo.core.settings import write_config
from funcppo.kg.config import RESULTS_FILE, RUN_FILES, RunConfig
from funcppo.kg.graph.loaders import load
from funcppo.kg.ranking import scoring
from funcppo.kg.search.beam import evaluate_step
from funcppo.runtime import memory
from funcppo.runtime.capture import GraphedStep, are_trees_demanded, capture
from tests.cli.runner import TRAINED
from tests.runtime.test_capture import on_gpu

# -- text for people

NAMES = ["[/x]", "[bold]", ":smile:", "[link=a]b[/link]", "\\[x]"]
METRICS = {"mrr": 0.5, "hits@1": 0.25, "ceiling": 1.0, "n_queries": 12}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_neither_markup_nor_an_emoji(name, capsys):
    console = make_console(use_stderr=False)
    console.print(f"rule {name}")
    common.print_notes([name], console)
    console.print(metrics_table(f"title {name}", {f"score {name}": METRICS}))
    output = capsys.readouterr().out
    for text in ("rule", "note:", "title", "score"):
        assert f"{text} {name}" in output


@pytest.mark.parametrize("width", [80, 120])
def test_a_table_of_results_keeps_all_digits(width):
    names = ("mrr", "hits@1", "hits@3", "hits@10", "auc_pr", "ceiling")
    row = {name: 0.98765 for name in names} | {"n_queries": 123_456}
    scores = ("max-confidence-other-facts", "evidence, listwise fit", "x" * 90)
    file = io.StringIO()
    console = Console(file=file, width=width)
    table = metrics_table("test", dict.fromkeys(scores, row), scores[0])
    common.print_table(console, table)
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    whole = [line for line in lines if line.count("0.9877") == len(names)]
    assert len(whole) == len(scores)
    assert all(line.rstrip().endswith("123456") for line in whole)


def test_a_terminal_shows_a_bar_with_its_note():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=120)
    with WorkDisplay("[bold]", console) as display:
        display.update("[/x]", 3, 4, note="7 [b]candidates/s")
    shown = file.getvalue()
    assert "[/x]" in shown and "3 of 4" in shown and "7 [b]cand" in shown
    # It is short where little room is left.
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80)
    with WorkDisplay("work", console) as display:
        display.update("training a long network " * 2, 2, 3, note="1 s left")
    lines = [line for line in file.getvalue().splitlines() if "2 of 3" in line]
    assert lines and all("1 s left" in line for line in lines)


def terminal(width):
    """A terminal of some columns, and what is written to it."""
    console = make_console(use_stderr=False)
    console._force_terminal, console.width = True, width
    console.file = io.StringIO()
    return console, console.file


def test_on_a_terminal_lines_are_broken_at_words_and_trees_stay_trees():
    console, file = terminal(40)
    tree = "r(a, b)  by rule 0\n├─ s(a, c) " + "word " * 12 + "\n└─ t(c, b)"
    console.print(tree)
    console.print("漢" * 30 + " " + "x" * 50)
    lines = [line.rstrip() for line in file.getvalue().splitlines()]
    assert max(cell_len(line) for line in lines) <= 40
    assert lines[1].startswith("├─ s(a, c) word") and lines[1].endswith("word")
    assert lines[2].startswith("│      word") and lines[2].endswith("word")
    assert lines.count("└─ t(c, b)") == 1
    assert "".join(lines).count("x") == 50


def test_what_is_printed_beside_a_bar_stands_above_it():
    bar, shown = terminal(80)
    other, file = terminal(80)
    with WorkDisplay("work", bar):
        other.print("text")
    other.print("later")
    assert "text\n" in shown.getvalue() and file.getvalue() == "later\n"


# -- outputs


def test_json_starts_with_the_version_of_its_format(tmp_path, capsys):
    common.write_json(str(tmp_path / "result.json"), {"name": "Zoë", "n": 1})
    text = (tmp_path / "result.json").read_text()
    assert "Zoë" in text
    assert list(json.loads(text)) == ["format", "name", "n"]
    common.write_json("-", {"n": 1})
    assert json.loads(capsys.readouterr().out) == {"format": 2, "n": 1}
    common.write_json(None, {"n": 1})
    assert capsys.readouterr().out == ""


def test_an_output_without_permission_is_refused(tmp_path, monkeypatch):
    common.check_outputs([("--out", tmp_path / "new")], [])
    # to root all folders are open
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ValueError, match="no permission to write it"):
        common.check_outputs([("--out", tmp_path / "new")], [])


def test_an_output_is_no_other_output_but_a_device_may_be(tmp_path):
    (tmp_path / "x").mkdir()
    new, other = tmp_path / "new", str(tmp_path / "x" / ".." / "new")
    line = f"^--json {other}: expected another file than that of --out$"
    with pytest.raises(ValueError, match=line):
        common.check_outputs([("--out", new), ("--json", other)], [])
    folder = common.OutputFolder("--out", tmp_path / "run", ["config.json"])
    config = tmp_path / "x" / ".." / "run" / "config.json"
    with pytest.raises(ValueError, match="another file than those of --out"):
        common.check_outputs([("--json", config)], [], folder)

    outputs = [("--out", new), ("--json", None), ("--details", "/dev/null")]
    common.check_outputs(outputs, [tmp_path / "absent"])
    twice = [(name, "/dev/null") for name in ("--json", "--details")]
    common.check_outputs([*twice, ("--csv", "-")], [])


def test_a_lock_is_no_file_of_another_program(tmp_path):
    (tmp_path / "poetry.lock").write_text("# generated\n")
    with (
        pytest.raises(
            ValueError, match="expected no such file, or the lock of"
        ),
        common.lock_output(tmp_path / "poetry"),
    ):
        pass
    assert (tmp_path / "poetry.lock").read_text() == "# generated\n"


# -- targets


@pytest.fixture
def rule_file(tmp_path):
    path = tmp_path / "other.txt"
    path.write_text("0.5\tlocatedIn(X, Y) :- neighborOf(X, Y)\n")
    return str(path)


def test_a_run_brings_its_data_set_and_its_rules(trained, rule_file):
    dataset = common.open_dataset(str(trained), None)
    assert dataset.fingerprint == load("countries_s1").fingerprint
    line = "is a trained run, expected the rules it was trained with"
    with pytest.raises(ValueError, match=line):
        common.open_dataset(str(trained), rule_file)


def test_the_files_of_a_target_are_those_it_is_read_from(tmp_path, rule_file):
    data, run = tmp_path / "data", tmp_path / "run"
    data.mkdir()
    run.mkdir()
    names = ["train.txt", "valid.tsv", "test.csv.gz", "facts.txt", "rules.pl"]
    for name in (*names, "notes.txt", "trainer.txt"):
        (data / name).write_text("")
    expected = {data / name for name in names}
    assert set(common.data_files(str(data))) == expected
    expected.add(Path(rule_file))
    assert set(common.data_files(str(data), rule_file)) == expected
    program = data / "notes.txt"
    assert common.data_files(str(program)) == [program]
    assert common.data_files("countries_s1") == []
    write_config(RunConfig(dataset=str(data), rules=rule_file), run)
    expected |= {run / name for name in RUN_FILES}
    assert set(common.data_files(str(run))) == expected


# -- the machine


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("1000", 1000),
        ("2GB", 2 * 10**9),
        ("2 gb", 2 * 10**9),
        ("1.5KiB", 1536),
        ("512MiB", 2**29),
        (" 3kb ", 3000),
        *[(text, None) for text in ("", "GB", "-1", "1 tonne", "1e3", "1.GB")],
        *[(text, None) for text in ("9" * 400, "²", "0.3", "1_0")],
    ],
)
def test_memory_is_a_number_with_a_unit(text, n_bytes):
    if n_bytes is not None:
        assert common.parse_memory(text) == n_bytes
        return
    line = r"expected bytes below 10.18, or a number with kb, mb, gb, kib, mib, gib, got "
    with pytest.raises(ValueError, match=line):
        common.parse_memory(text)


def test_a_gpu_is_checked_and_selected_by_its_number(gpus, monkeypatch):
    """What names no device, such as a stream, is then on that GPU too."""
    selected = []
    gpus(0)
    common.select_device("cpu")
    assert common.resolve_device("auto") == "cpu"
    line = r"^--device cuda: expected a CUDA device, PyTorch found none$"
    with pytest.raises(ValueError, match=line):
        common.select_device("cuda")
    gpus(2)
    monkeypatch.setattr(torch.cuda, "set_device", selected.append)
    common.select_device("cuda:1")
    common.select_device("cuda")
    assert selected == [1]
    line = r"^--device cuda:2: expected cuda:0 to cuda:1, PyTorch found no "
    with pytest.raises(ValueError, match=line):
        common.select_device("cuda:2")
    assert common.resolve_device("auto") == "cuda"


def test_graphs_that_are_demanded_are_recorded_or_an_error(gpus):
    for graphs in ("manual", "trees"):
        line = rf"^--cuda-graphs {graphs}: expected --device cuda, got cpu, .*auto runs the same step"
        with (
            pytest.raises(ValueError, match=line),
            common.graphs_allowed(graphs, "cpu"),
        ):
            raise AssertionError
    gpus(1)
    line = r"^--cuda-graphs manual: expected a CUDA graph, got none: no CUDA"
    with (
        pytest.raises(ValueError, match=line),
        common.graphs_allowed("manual", "auto"),
    ):
        capture(lambda state: (state, ()), torch.ones(1))
    for graphs in ("auto", "off"):
        with common.graphs_allowed(graphs, "cpu"):
            capture(lambda state: (state, ()), torch.ones(1))
            assert not are_trees_demanded()
    with common.graphs_allowed("trees", "cuda"):
        assert are_trees_demanded()


# -- Ctrl-C

SIGNALS = (signal.SIGINT, signal.SIGTERM)
ERRORS = [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, cli.Terminated)]


@pytest.mark.parametrize("first", SIGNALS)
@pytest.mark.parametrize(("second", "error"), ERRORS)
def test_a_first_signal_is_deferred_and_a_second_raises(first, second, error):
    before = [signal.getsignal(number) for number in SIGNALS]
    with pytest.raises(error) as raised, common.defer_interrupt() as interrupt:
        assert not interrupt.requested
        os.kill(os.getpid(), first)
        assert interrupt.requested
        assert interrupt.exit_status == 128 + first
        os.kill(os.getpid(), second)
    assert type(raised.value) is error
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_work_that_waits_ends_when_its_time_is_over():
    before = [signal.getsignal(number) for number in SIGNALS]
    late = "--seconds 0.01: expected more time, it was over before there was"
    with pytest.raises(ValueError, match=late), common.bounded(0.01):
        threading.Event().wait(60)
    with pytest.raises(cli.Terminated), common.bounded(1e300):
        os.kill(os.getpid(), signal.SIGTERM)
    with common.bounded(0.5) as is_over, common.defer_interrupt() as found:
        while not is_over():
            time.sleep(0.01)
        assert found.exit_status == 128 + signal.SIGTERM
    assert [signal.getsignal(number) for number in SIGNALS] == before


# -- locks


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_is_held_by_one_at_a_time(tmp_path):
    folder = tmp_path / "a" / "run"
    line = f"{folder}: expected no other process that writes it, got process {os.getpid()}"
    with common.lock_folder(folder):
        assert (folder / "run.lock").read_text() == str(os.getpid())
        # The refused one does not break the lock.
        for _ in range(2):
            with (
                pytest.raises(ValueError, match=f"^{line}$"),
                common.lock_folder(folder),
            ):
                pytest.fail("two hold it")
    # One that stays empty is removed with those made for it.
    assert files(tmp_path) == []
    folder = tmp_path
    with common.lock_folder(folder):
        (folder / "config.json").write_text("")
    assert files(tmp_path) == ["config.json"]


def test_a_file_is_locked_under_all_its_names(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("file")
    with (
        common.lock_output(tmp_path / "file"),
        pytest.raises(ValueError, match="expected no other process"),
        common.lock_output(tmp_path / "link"),
    ):
        pytest.fail("two hold it")
    assert files(tmp_path) == ["file", "link"]


@pytest.mark.parametrize(
    "words",
    [
        "train countries_s1 --overwrite --out",
        "mine family_tree:40:0 --out",
        "evaluate countries_s1 --overwrite --details",
        "predict countries_s1 --relation locatedIn --new --overwrite --out",
    ],
)
def test_a_second_writer_is_refused(words, programs, tmp_path):
    out = tmp_path / "out"
    lock = common.lock_output
    if words.startswith("train"):
        lock = common.lock_folder
    else:
        out.write_text("Rule\ttheirs")
    line = f"{out}: expected no other process that writes it, got process {os.getpid()}"
    with lock(out):
        assert programs.refused(*words.split(), out) == line
    assert not out.exists() or out.read_text() == "Rule\ttheirs"


# -- --cuda-graphs

# why nothing is recorded on a CPU: a code and the sentence
REASONS = {
    "auto": ("no_gpu", "no CUDA tensor in the state"),
    "off": ("disabled", "turned off by --cuda-graphs off"),
}
NOTE = "steps of a search were not replayed as a CUDA graph: "


@pytest.fixture
def captured_search(monkeypatch):
    """Searches are captured as on a GPU; on a CPU each falls back and says why."""
    monkeypatch.setattr(
        scoring, "make_search_step", lambda _: GraphedStep(evaluate_step)
    )


def evaluated(programs, runs, *words):
    """The JSON of an evaluation of a run that searches proofs."""
    run = (runs / "proofs", "--score", "success", "--max-queries", "2")
    return programs.json("evaluate", *run, *words)


@pytest.mark.parametrize("graphs", REASONS)
def test_the_switch_reaches_the_search(runs, captured_search, programs, graphs):
    code, sentence = REASONS[graphs]
    words = ("--cuda-graphs", graphs)
    result = evaluated(programs, runs, *words)
    assert result["graphs"] == graphs
    assert result["replay_mode"] == "none"
    assert set(result["fallback_codes"]) == {code}
    assert NOTE + sentence in result["notes"]


@on_gpu
def test_searches_of_a_gpu_are_recorded_where_they_may_be(runs, programs):
    modes = {}
    for graphs in ("auto", "off", "trees", "manual"):
        words = ("--device", "cuda", "--cuda-graphs", graphs)
        result = evaluated(programs, runs, *words)
        modes[graphs] = result["replay_mode"]
    assert modes == {
        "auto": "cuda-graph",
        "off": "none",
        "trees": "cuda-graph-trees",
        "manual": "cuda-graph",
    }


# -- other systems

LINUX_FILES = (
    "_PROCESS_STATUS _RESET_PEAK _MACHINE_MEMORY _PROCESS_GROUPS _GROUPS"
)


@pytest.fixture(params=["macos", "windows"])
def platform(request, monkeypatch, tmp_path):
    """No /proc, no huge pages, no affinity; on Windows no `resource`, timer and fork either."""
    for name in LINUX_FILES.split():
        monkeypatch.setattr(memory, name, tmp_path / "absent")
    held = SimpleNamespace(rss=1 << 20, peak_wset=1 << 21)
    machine = SimpleNamespace(total=16 << 30, available=8 << 30)
    psutil: Any = ModuleType("psutil")
    psutil.Process = lambda: SimpleNamespace(memory_info=lambda: held)
    psutil.virtual_memory = lambda: machine
    monkeypatch.setitem(sys.modules, "psutil", psutil)
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    if request.param == "windows":
        monkeypatch.setitem(sys.modules, "resource", None)
        system = SimpleNamespace(platform="win32")
        monkeypatch.setattr(memory, "sys", system)
        for module, name in ((signal, "setitimer"), (os, "fork")):
            monkeypatch.delattr(module, name, raising=False)
    return request.param


def test_a_run_is_trained_resumed_and_ranked(platform, programs, tmp_path):
    run, details = tmp_path / "run", tmp_path / "details.jsonl"
    words = ("countries_s1", "--out", run, *TRAINED, "--memory", "6GB")
    assert programs("train", *words) == 0
    results = json.loads((run / RESULTS_FILE).read_text())
    assert any("only Linux ends" in note for note in results["notes"])
    assert all(results["phase_peak_bytes"].values())

    words = ("countries_s1", "--out", run, "--resume", "--steps", "160")
    assert programs("train", *words) == 0
    words = ("evaluate", run, "--details", details, "--max-queries", "2")
    assert programs(*words) == 0
    assert details.read_bytes().count(b"\n") >= 2


def test_on_windows_output_is_utf_8(monkeypatch, capsys):
    """Its code page 1252 lacks the box of a table and most names."""
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding="cp1252")
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(cli, "_run", lambda words: print("Łódź ├─") or 0)
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 0
    assert written.getvalue().decode() == f"Łódź ├─{os.linesep}"
