"""The console: names are printed as they are, tables hold what there is, a closed pipe is an error to the caller."""

from __future__ import annotations

import io

import pytest
from rich.progress import Progress

from funcppo.cli import console as console_
from funcppo.cli.console import (
    FILE_OUTPUT_WIDTH,
    WorkProgress,
    make_console,
    metrics_table,
    print_notes,
    progress_bar,
)
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
    with progress_bar(console) as bar:
        bar.add_task(f"task {name}", total=1, completed=1, note=f"after {name}")
    with console_.show_status(console, f"status {name}") as status:
        console_.update_status(status, f"new {name}")
    output = output_of(capsys)
    for expected in (
        f"rule {name}",
        f"note: {name}",
        f"title {name}",
        f"score {name}",
        f"task {name}",
        f"after {name}",
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


def test_a_closed_pipe_is_an_error_to_the_caller():
    """rich's own answer is to exit with status 1, which `funcppo prove` uses for a refutation."""

    class ClosedPipe(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError

    console = make_console(use_stderr=False)
    console.file = ClosedPipe()
    with pytest.raises(BrokenPipeError):
        console.print("text")


def test_a_progress_bar_shows_its_note(capsys):
    bar = progress_bar(make_console(use_stderr=False))
    assert isinstance(bar, Progress)
    with bar:
        bar.add_task("ranking", total=4, completed=3, note="7 candidates/s")
    line = output_of(capsys)
    assert "ranking" in line and "3/4" in line and "7 candidates/s" in line


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
        (["provable", "{data}"], "[bold]: "),
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


def test_work_is_a_line_every_ten_seconds_where_there_is_no_terminal(
    capsys, monkeypatch
):
    """20 of 80 rows in 15 seconds: 45 seconds are left. No line for what ends before ten seconds."""
    now = 100.0
    monkeypatch.setattr(console_.time, "monotonic", lambda: now)
    with WorkProgress(make_console(False)) as progress:
        progress("counting", 0, 80)
        now += 5
        progress("counting", 10, 80)
        now += 10
        progress("counting", 20, 80)
        progress("counting", 21, 80)
        now += 10
        progress("next", 0, 0)
    assert capsys.readouterr().out.splitlines() == [
        "counting: 25%, about 45 s left",
        "next ...",
    ]
