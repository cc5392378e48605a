"""Options: every one is described in a sentence; metavars, flags and defaults have one style."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest
from tyro.conf import arg

from funcppo import cli
from funcppo.cli.options import DatasetArgument, parse_options
from tests.cli.runner import funcppo

METAVARS = {
    "DATASET",
    "RUN",
    "RUN|DATASET",
    "QUERY",
    "DEVICE",
    "FILE",
    "FILE|-",
    "DIR",
    "N",
    "X",
    "SECONDS",
    "BYTES",
    "PORT",
    "NAME",
}
PREPOSITIONS = {"As", "At", "Beside", "By", "For", "From", "In", "Of", "On"}
METAVARS |= {
    "ENV",
    "N...",
    "RUN...",
    "PROGRAM...",
    "all|N",
    "N|fixpoint",
    "H,R,T",
    "X,X,X",
    "auto|None|X",
    "auto|X",
}


def read_help(text: str) -> dict[str, str]:
    """The help text of each option and argument of a program, by how it is written: `--seed N`.

    The text of an option stands behind it, two spaces away, or on the lines below. A group of options is in a box, or
    below a title where the output cannot show one. On a wide terminal the groups stand side by side.
    """
    options: dict[str, str] = {}
    name = ""
    in_arguments = False
    for line in text.splitlines():
        if line.startswith("╭") or re.match(r" [a-z]", line):
            name, in_arguments = "", "positional arguments" in line
        if not line.startswith(("│ ", "  ")):
            continue
        content = line[2:].rstrip(" │")
        if set(content) <= set("-─"):  # a rule
            continue
        if content.startswith("-") or (in_arguments and content[:1].isupper()):
            name, _, rest = content.partition("  ")
            options[name] = rest.strip()
        elif name and content:
            options[name] = f"{options[name]} {content.strip()}".strip()
    return options


@pytest.fixture
def help_of(monkeypatch, capsys):
    """A function from the name of a program to its options and their help."""
    monkeypatch.setenv("COLUMNS", "100")

    def help_of_program(name: str) -> dict[str, str]:
        assert funcppo(monkeypatch, name, "--help") == 0
        options = read_help(capsys.readouterr().out)
        del options["-h, --help"]
        return options

    return help_of_program


@pytest.mark.parametrize("name", cli.PROGRAMS)
def test_every_option_is_described_in_a_full_sentence(name, help_of):
    options = help_of(name)
    assert len(options) >= 3
    for option, text in options.items():
        sentence = re.sub(r" ?\((default: .*|required.*)\)$", "", text)
        assert sentence[:1].isupper(), (option, text)
        assert sentence.endswith("."), (option, text)
        words = sentence.split()
        assert len(words) >= 4, (option, text)
        assert words[0] not in PREPOSITIONS, (option, text)  # a fragment


@pytest.mark.parametrize("name", cli.PROGRAMS)
def test_every_option_has_a_uniform_metavar_and_a_default(name, help_of):
    for option, text in help_of(name).items():
        metavar = option.split(" ")[-1]
        is_flag = metavar.startswith("--")
        is_choice = re.fullmatch(r"\{[^{}|]+\}", metavar)
        assert is_flag or is_choice or metavar in METAVARS, option
        assert re.search(
            r"Default: |\(default: (?!None|True|False|'').+\)$|\(required( unless --resume)?\)$",
            text,
        ) or metavar.startswith("{None,"), (option, text)


@pytest.mark.parametrize("name", cli.PROGRAMS)
def test_only_a_flag_that_is_on_has_a_twin_that_turns_it_off(name, help_of):
    for option, text in help_of(name).items():
        assert (
            "--no-" not in option
            or "Default: on." in text
            or "(default: on)" in text
        ), option


@pytest.mark.parametrize("name", cli.PROGRAMS)
def test_a_paragraph_of_a_description_is_one_line(name, monkeypatch, capsys):
    """tyro breaks a paragraph before a line of the docstring that starts with anything but a letter."""
    assert funcppo(monkeypatch, name, "--help") == 0
    description = capsys.readouterr().out.partition("Exit status: ")[0]
    paragraphs = description.split("\n\n")[1:]
    assert paragraphs[0] == cli.PROGRAMS[name]
    assert not any("\n" in paragraph for paragraph in paragraphs)


def test_the_number_of_updates_is_no_option_of_train(help_of):
    options = help_of("train")
    assert any(option.startswith("--ppo.n-epochs ") for option in options)
    assert not any(option.startswith("--ppo.n-updates") for option in options)


def test_the_options_of_train(help_of):
    options = help_of("train")
    assert options["--strategy {auto,one-graph,forward,eager}"].endswith(
        "(default: auto)"
    )
    assert options["--steps N"].startswith("Total number of environment steps")
    assert options["--ppo.advantage-ddof {None,0,1}"].endswith(
        "None: no normalisation. (default: None)"
    )
    assert {
        "DATASET",
        "--out RUN",
        "--resume",
        "--ppo.gamma X",
        "--prover.max-height N",
    } <= options.keys()
    assert "--ppo.half-value-loss, --ppo.no-half-value-loss" in options


@dataclass(frozen=True, kw_only=True)
class Example:
    """A program."""

    data: DatasetArgument
    """A text that goes on
    (on the next line) and
    --on the third."""
    count: int = 3
    """Number of things to count."""
    limit: float | None = None
    """Limit of the things. Default: no limit."""
    share: float | None = None
    """Share of the things."""
    folder: Annotated[Path | None, arg(metavar="DIR")] = None
    """Folder of the things."""
    file: Path = Path("a")
    """File of the things."""
    kind: Literal["a", "b"] = "a"
    """Kind of the things."""
    off: bool = False
    """Whether things are off."""
    on: bool = True
    """Whether things are on."""
    json: str | None = None
    """Where the things go."""

    def run(self) -> int:
        """Return the number of things."""
        return self.count


def test_the_style_of_options(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as stop:
        parse_options(Example, ["--help"], prog="example")
    assert not stop.value.code
    output = capsys.readouterr().out
    assert (
        "A text that goes on (on the next line) and --on the third. (required)"
        in output
    )  # on one line
    assert read_help(output) == {
        "-h, --help": "show this help message and exit",
        "DATASET": "A text that goes on (on the next line) and --on the third. (required)",
        "--count N": "Number of things to count. (default: 3)",
        "--limit X": "Limit of the things. Default: no limit.",
        "--share X": "Share of the things. (default: None)",
        "--folder DIR": "Folder of the things. (default: None)",
        "--file FILE": "File of the things. (default: a)",
        "--kind {a,b}": "Kind of the things. (default: a)",
        "--off": "Whether things are off. (default: off)",
        "--on, --no-on": "Whether things are on. (default: on)",
        "--json NAME": "Where the things go. (default: None)",
    }


def test_options_are_parsed():
    assert parse_options(Example, ["s"]) == Example(data="s")
    arguments = [
        "s",
        "--count",
        "4",
        "--limit",
        "0.5",
        "--folder",
        "f",
        "--kind",
        "b",
        "--off",
        "--no-on",
    ]
    expected = Example(
        data="s",
        count=4,
        limit=0.5,
        folder=Path("f"),
        kind="b",
        off=True,
        on=False,
    )
    assert parse_options(Example, arguments) == expected
    assert parse_options(Example, ["s", "--limit", "None"]).limit is None


def test_a_flag_that_is_off_has_no_twin(capsys):
    with pytest.raises(SystemExit) as stop:
        parse_options(Example, ["s", "--no-off"])
    assert stop.value.code == 2
    assert "--no-off" in capsys.readouterr().err
