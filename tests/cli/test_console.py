"""The console: names are printed as they are, tables hold what there is, a closed pipe is an error to the caller."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from funcppo.cli import console as console_
from funcppo.cli.console import (
    FILE_OUTPUT_WIDTH,
    make_console,
    metrics_table,
    print_notes,
    print_table,
    show_status,
)
from funcppo.core.deadline import Deadline
from tests.cli.runner import funcppo

NAMES = ["[/x]", "[bold]", ":smile:", "[link=a]b[/link]", "\\[x]"]
METRICS = {"mrr": 0.5, "hits@1": 0.25, "ceiling": 1.0, "n_queries": 12}


def output_of(capsys) -> str:
    return capsys.readouterr().out


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_neither_markup_nor_an_emoji(name, capsys):
    console = make_console(use_stderr=False)
    console.print(f"rule {name}")
    print_notes(console, [name])
    console.print(metrics_table(f"title {name}", {f"score {name}": METRICS}))
    output = output_of(capsys)
    for expected in (
        f"rule {name}",
        f"note: {name}",
        f"title {name}",
        f"score {name}",
    ):
        assert expected in output


def test_text_goes_to_standard_error_where_standard_output_is_for_a_machine(
    capsys,
):
    make_console(use_stderr=True).print("text")
    assert capsys.readouterr() == ("", "text\n")
    make_console(use_stderr=False).print("text")
    assert capsys.readouterr() == ("text\n", "")


def test_output_to_a_file_is_not_folded_to_a_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    assert make_console(use_stderr=False).width == FILE_OUTPUT_WIDTH


def test_a_table_has_the_columns_that_some_score_has(capsys):
    table = metrics_table(
        "test", {"a": METRICS, "b": METRICS | {"auc_pr": 0.125}}
    )
    make_console(use_stderr=False).print(table)
    rows = [
        line.split() for line in output_of(capsys).splitlines() if line.strip()
    ]
    assert rows[0] == ["test"]
    assert rows[1] == ["score", "mrr", "hits@1", "auc_pr", "ceiling", "queries"]
    assert rows[3:] == [
        ["a", "0.5000", "0.2500", "1.0000", "12"],
        ["b", "0.5000", "0.2500", "0.1250", "1.0000", "12"],
    ]


def test_the_default_score_is_marked_in_a_table(capsys):
    rows = {"a": METRICS, "b": METRICS}
    make_console(use_stderr=False).print(metrics_table("test", rows, "b"))
    text = output_of(capsys)
    marked = [line for line in text.splitlines() if "*" in line]
    assert marked[0].split()[:2] == ["b", "*"]
    assert marked[1].strip() == "* `funcppo predict` ranks by it"
    make_console(use_stderr=False).print(metrics_table("test", rows))
    assert "*" not in output_of(capsys)


def test_a_closed_pipe_is_an_error_to_the_caller():
    """rich's own answer is to exit with status 1, which `funcppo prove` uses for a refutation."""

    class ClosedPipe(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError

    console = make_console(use_stderr=False)
    console.file = ClosedPipe()
    with pytest.raises(BrokenPipeError):
        console.print("text")


@pytest.fixture
def clock(monkeypatch):
    """The time that the console reads, which the test sets."""

    class Clock:
        now = 0.0

        def monotonic(self) -> float:
            return self.now

    clock = Clock()
    monkeypatch.setattr(console_, "time", clock)
    return clock


def test_a_line_on_work_holds_what_is_done_the_time_and_the_time_left(
    capsys, clock
):
    """Of 12 updates 2 were done before; 2 took 10 s, 3 more took 12 s, so the last 5 take 20 s."""
    display = show_status(make_console(use_stderr=False), "reading")
    assert display.line(3.2) == "reading: 3 s"
    display.update("training", 2, 12)
    assert display.line(1.0) == "training: 2 of 12, 1 s"
    clock.now = 10.0
    display.update("training", 4, 12)
    assert display.line(10.0) == "training: 4 of 12, 10 s"
    clock.now = 22.0
    display.update("training", 7, 12, note="return 0.5")
    expected = "training: 7 of 12, 22 s, about 20 s left, return 0.5"
    assert display.line(22.0) == expected
    display.update("ranking")
    assert display.line(23.0) == "ranking: 1 s"
    assert capsys.readouterr() == ("", "")


def test_the_time_left_follows_the_last_half_of_the_time(clock):
    """A chunk of 16 questions takes 3 s, one of 512 6 s: 10,000 take 2 minutes, and not half an hour."""
    display = show_status(make_console(use_stderr=False), "ranking")
    display.update("ranking", 0, 10_000)
    for now, done in ((3.0, 16), (9.0, 528)):
        clock.now = now
        display.update("ranking", done, 10_000)
    left = (10_000 - 528) / (512 / 6)
    assert display.line(10.0).endswith(f"10 s, about {left - 1:.0f} s left")
    # A second round of the same work is measured anew.
    clock.now = 50.0
    display.update("ranking", 0, 100)
    assert display.line(51.0) == "ranking: 0 of 100, 51 s"


def test_no_more_time_is_left_than_until_the_deadline(clock):
    """Ten more updates would take 50 s; the run ends in 30."""
    deadline = Deadline(at=40.0, clock=clock.monotonic)
    display = show_status(make_console(use_stderr=False), "training", deadline)
    for now, done in ((0.0, 0), (5.0, 1), (10.0, 2)):
        clock.now = now
        display.update("training", done, 12)
    assert display.line(10.0) == "training: 2 of 12, 10 s, about 30 s left"


def test_no_more_time_is_left_than_a_part_of_the_work_has(clock):
    """The end of a part does not bound the next one."""
    deadline = Deadline(at=25.0, clock=clock.monotonic)
    display = show_status(make_console(use_stderr=False), "listing")
    for now, done in ((0.0, 0), (5.0, 1), (10.0, 2)):
        clock.now = now
        display.update("listing", done, 12, deadline)
    assert display.line(10.0) == "listing: 2 of 12, 10 s, about 15 s left"
    for now, done in ((10.0, 0), (15.0, 1), (20.0, 2)):
        clock.now = now
        display.update("fitting", done, 12)
    assert display.line(20.0) == "fitting: 2 of 12, 10 s, about 50 s left"


def test_lines_go_to_standard_error_where_there_is_no_terminal(
    monkeypatch, capsys
):
    monkeypatch.setattr(console_, "LINE_SECONDS", 0.01)
    text = ""
    with show_status(make_console(use_stderr=False), "[/x] 1") as display:
        while "[/x] 1: 0 s\n" not in text:
            text += capsys.readouterr().err
        display.update("[/x] 2", 3, 4)
        while "[/x] 2: 3 of 4, 0 s\n" not in text:
            text += capsys.readouterr().err
    assert capsys.readouterr().out == ""


def test_a_terminal_shows_a_bar_with_its_note():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=120)
    with show_status(console, "[bold]") as display:
        display.update("[/x]", 3, 4, note="7 [b]candidates/s")
    shown = file.getvalue()
    assert "[/x]" in shown and "3 of 4" in shown and "7 [b]cand" in shown


@pytest.fixture
def folder(tmp_path):
    """A chain of names that look like markup."""
    lines = [
        f"{a}\tp[/x]\t{b}\n{b}\t:smile:\t{a}\n"
        for a, b in zip(NAMES, [*NAMES[1:], NAMES[0]])
    ]
    data = tmp_path / "[bold]"
    data.mkdir()
    texts = {
        "train": lines,
        "valid": lines[:1],
        "test": lines[:1],
        "rules": ["'p[/x]'(X,Y) :- ':smile:'(Y,X)\n"],
    }
    for name, rows in texts.items():
        (data / f"{name}.txt").write_text("".join(rows))
    return data


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            [
                "mine",
                "{data}",
                "--out",
                "{data}/[rules].tsv",
                "--min-support",
                "1",
            ],
            "'p[/x]'(X, Y) :- :smile:(Y, X)",
        ),
        (["data", "{data}", "--provable", "test"], "[bold]: "),
        (["prove", "{data}", "'p[/x]'('[/x]', '[bold]')"], "stated as a fact"),
        (
            ["prove", "{data}", "'p[/x]'('[/x]', '[/x]')"],
            "refuted: 'p[/x]'('[/x]', '[/x]')",
        ),
        (
            ["prove", "{data}", "'p[/x]'(X, ':smile:')"],
            "'p[/x]'('[bold]', :smile:)",
        ),
        (["evaluate", "{data}", "--score", "exists@1"], "[bold], test"),
    ],
)
def test_a_program_prints_names_that_look_like_markup(
    arguments, expected, folder, monkeypatch, capsys
):
    status = funcppo(
        monkeypatch, *(argument.format(data=folder) for argument in arguments)
    )
    assert status in (0, 1)
    assert expected in output_of(capsys)


def test_a_report_may_have_numbers_that_are_not_whole(clock):
    display = show_status(make_console(False), "reading")
    display.report("counting", 19.6, 80.0)
    assert display.line(1) == "counting: 20 of 80, 1 s"
    display.report("next", 0.0, 0.0)
    assert display.line(2) == "next: 2 s"


def test_a_phase_goes_on_with_its_time_after_another(clock):
    """Training, a validation, training again: 3 updates of the last 10 s; a second validation starts anew."""
    display = show_status(make_console(use_stderr=True), "starting")
    seen = []
    for at, text, done in [
        (10, "training", 0),
        (20, "training", 5),
        (24, "training", 7),
        (25, "validating", 0),
        (29, "validating", 9),
        (30, "training", 8),
        (31, "validating", 0),
    ]:
        clock.now = at
        display.update(text, done, 10)
        seen.append(display.line(at))
    assert "training: 8 of 10, 20 s, about 7 s left" in seen
    assert seen[-1] == "validating: 0 of 10, 0 s"


@pytest.mark.parametrize("width", [80, 120])
def test_a_table_of_results_keeps_all_digits(width):
    names = ("mrr", "hits@1", "hits@3", "hits@10", "auc_pr", "ceiling")
    row = {name: 0.98765 for name in names} | {"n_queries": 123_456}
    scores = ("max-confidence-other-facts", "evidence, listwise fit", "x" * 90)
    file = io.StringIO()
    console = Console(file=file, width=width)
    table = metrics_table("test", dict.fromkeys(scores, row), scores[0])
    print_table(console, table)
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    whole = [line for line in lines if line.count("0.9877") == len(names)]
    assert len(whole) == len(scores)
    assert all(line.rstrip().endswith("123456") for line in whole)
    assert "evidence, listwise fit " in file.getvalue()
