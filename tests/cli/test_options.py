"""Options: those of a first run come first, all others are set by --set; each is described; an error is one line."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest

from funcppo import cli
from funcppo.cli.options import (
    HIDDEN,
    Opt,
    describe,
    field_docs,
    parse_options,
    settings_of,
)
from funcppo.config import PPOConfig
from funcppo.core.settings import PositiveInt
from tests.cli.runner import contains, settings, write_graph

MAX_OPTIONS = 180  # that all programs show
MAX_TRAIN_OPTIONS = 30


def option_names(text):
    return set(re.findall(r"(?<![\w-])--[a-z0-9][a-z0-9.-]*[a-z0-9]", text))


@pytest.mark.parametrize("name", cli.PROGRAMS)
def test_every_setting_is_described_and_has_one_name(name):
    settings = settings_of(cli.program_class(name))
    assert len({setting.name for setting in settings}) == len(settings)
    shown = [setting.option for setting in settings if setting.opt]
    assert len(set(shown)) == len(shown)
    for setting in settings:
        text = field_docs(setting.owner).get(setting.field, "")
        assert text[:1].isupper(), setting
        assert text.endswith((".", ")")) and len(text.split()) >= 4, setting


def test_help_shows_a_bounded_number_of_options(programs, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text_of = lambda name: programs.printed(name, "--help")
    shown = {name: option_names(text_of(name)) for name in cli.PROGRAMS}
    assert len(shown["train"]) <= MAX_TRAIN_OPTIONS
    assert sum(map(len, shown.values())) <= MAX_OPTIONS
    assert len(cli.PROGRAMS) <= 12


def test_the_first_screen_of_train_fits_a_first_run(programs, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = programs.printed("train", "--help")
    assert max(map(len, text.splitlines())) <= 85  # an example is one line
    first = text[text.index("options of a first run:") :]
    first = first[: first.index("more options:")]
    assert len(option_names(first) - {"--steps", "--seconds"}) <= 10
    assert text.count("    funcppo train ") == 2
    assert "ppo.gamma" in programs.printed("train", "--help-all")
    assert "  ppo.gae_lambda X" not in text


def test_one_option_has_one_kind_of_value_in_all_programs():
    kinds = {}
    for name in cli.PROGRAMS:
        for setting in settings_of(cli.program_class(name)):
            if setting.opt and setting.field not in ("out", "height"):
                kinds.setdefault(setting.option, set()).add(setting.metavar)
    assert {len(found) for found in kinds.values()} == {1}


_PPO = PPOConfig(gamma=0.5)


@dataclass(frozen=True, kw_only=True)
class Example:
    """A program.

    Exit status: 0 always.
    """

    dataset: str
    """A text that goes on
    (on the next line)."""
    count: PositiveInt = 3
    """Number of things to count."""
    limit: float | None = None
    """Limit of the things. Default: no limit."""
    folder: Annotated[Path | None, Opt("DIR")] = None
    """Folder of the things."""
    kind: Literal["a", "b"] | int = "a"
    """Kind of the things."""
    off: bool = False
    """Whether things are off."""
    on: bool = True
    """Whether things are on."""
    names: tuple[str, ...] = ()
    """Names of the things."""
    sizes: Annotated[tuple[int, ...], HIDDEN] = (1,)
    """Sizes of the things."""
    ppo: Annotated[PPOConfig, Opt(shown=("gamma",))] = _PPO
    """Settings of the things."""
    json: str | None = None
    """Where the things go."""

    def run(self) -> int:
        """Return the number of things."""
        return self.count


def test_options_are_parsed():
    assert parse_options(Example, ["s"]) == Example(dataset="s")
    words = "--count 4 s --limit 0.5 --folder f --kind 7 --off --no-on"
    words += " --names a b --gamma 1 --set sizes=2,3 --set ppo.n-envs=7"
    words += " --set ppo.adam.b1=0.5 --set ppo.half_value_loss=off"
    found = parse_options(Example, words.split())
    adam = type(PPOConfig().adam)(b1=0.5)
    ppo = PPOConfig(gamma=1.0, n_envs=7, adam=adam, half_value_loss=False)
    flags = {"kind": 7, "off": True, "on": False, "folder": Path("f")}
    several = {"names": ("a", "b"), "sizes": (2, 3), "ppo": ppo}
    expected = Example(dataset="s", count=4, limit=0.5, **flags, **several)
    assert found == expected
    for none in ("None", "null"):
        assert parse_options(Example, ["s", "--limit", none]).limit is None
    assert parse_options(Example, ["s", "--limit=-2"]).limit == -2.0


def test_the_text_of_help(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = describe(Example, "example", None, has_all=False)
    assert text.startswith("usage: example DATASET [options]\n\nA program.\n")
    for line in (
        "  DATASET                 A text that goes on (on the next line). (required)",
        "  --count N               Number of things to count. (default: 3)",
        "  --limit X               Limit of the things. Default: no limit.",
        "  --kind a|b|N            Kind of the things. (default: a)",
        "  --off                   Whether things are off. (default: off)",
        "  --on, --no-on           Whether things are on. (default: on)",
    ):
        assert line in text.splitlines()
    assert "(default: 0.5)" in text and "  sizes" not in text
    everything = describe(Example, "example", None, has_all=True)
    assert "  sizes N...              Sizes of the things." in everything


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("", "DATASET: expected a value, got none"),
        ("s t", "expected an option, got 't'"),
        ("s --count", "--count: expected a value, got none"),
        ("s --count x", "--count: expected an integer, got 'x'"),
        ("s --count 0", "--count: expected 1 or more, got 0"),
        ("s --count 1_000", "--count: expected an integer, got '1_000'"),
        ("s --count \uff15", "--count: expected an integer, got '\uff15'"),
        ("s --set sizes=1_0", "--set sizes: ... an integer, or several, got"),
        ("s --limit x", "--limit: expected a number, got 'x'"),
        ("s --kind c", "--kind: expected one of a, b or an integer, got"),
        ("s --coun 3", "--coun: expected an option, ...did you mean --count?"),
        ("s --no-off", "--no-off: expected an option, ...mean --off?)"),
        ("s --gamma 2", "--gamma: expected 0 to 1, got 2.0"),
        ("s --ppo.gamma 0.9", "(did you mean --gamma?)"),
        ("s --ppo.n-envs=3", "(did you mean --set ppo.n_envs=VALUE?)"),
        ("s --sizes 3", "--sizes: ...(did you mean --set sizes=VALUE?)"),
        ("s --set x=3", "--set 'x=3': expected the name of a setting"),
        ("s --set ppo.gama=1", "(did you mean ppo.gamma?)"),
        ("s --set gama=1", "(did you mean ppo.gamma?)"),
        ("s --set ppo.n_envs", "--set ppo.n_envs: expected ppo.n_envs=VALUE"),
        ("s --set ppo.n_envs=0", "--set ppo.n_envs: expected 1 or more, got 0"),
        ("s --set sizes=x", "--set sizes: ... an integer, or several, got"),
        ("s --set ppo.n_minibatches=3", "n_minibatches"),
    ],
)
def test_a_bad_command_line_is_one_line(words, problem, capsys):
    with pytest.raises((ValueError, SystemExit)) as raised:
        parse_options(Example, words.split())
    text = str(raised.value)
    if isinstance(raised.value, SystemExit):
        assert raised.value.code == 2
        text = capsys.readouterr().err.strip()
    assert "\n" not in text
    pattern = ".*".join(map(re.escape, problem.split("...")))
    assert re.search(pattern, text), text


def test_settings_come_from_a_file_and_the_command_line_wins(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        "dataset: s\ncount: 5  # YAML 1.2\noff: true\nlimit: 1e-3\nsizes: [2, 3]\n"
        "ppo:\n  gamma: 0.25\n  adam: {b1: 0.5}\n"
    )
    words = ["--config", str(path), "--count", "6", "--set", "ppo.gamma=1"]
    found = parse_options(Example, words)
    adam = type(PPOConfig().adam)(b1=0.5)
    ppo = PPOConfig(gamma=1.0, adam=adam)
    expected = Example(
        dataset="s", count=6, off=True, limit=1e-3, sizes=(2, 3), ppo=ppo
    )
    assert found == expected
    path.write_text("limit: null\njson: null")
    assert parse_options(Example, ["s", *words[:2]]) == Example(dataset="s")
    path.write_text("")
    assert parse_options(Example, ["s", *words[:2]]) == Example(dataset="s")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("coun: 3", "coun: expected the name of a setting, ...mean count?"),
        ("count: 0", "--count: expected 1 or more, got 0"),
        ("ppo: {gamma: 2}", "--gamma: expected 0 to 1, got 2"),
        ("count: null", "--count: expected an integer, got None"),
        ("count: many", "--count: expected an integer, got 'many'"),
        (
            "ppo: {lerning_rate: 1}",
            "ppo.lerning_rate: ...ean ppo.learning_rate?",
        ),
        ("format: 9", "expected format version 2, got 9"),
        ("ppo: 3", "ppo: expected the name of a setting"),
        ("[1]", "expected settings such as"),
    ],
)
def test_a_bad_file_of_settings_is_one_line(text, problem, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        parse_options(Example, ["s", "--config", str(path)])
    assert contains(str(error.value), f"{path}: {problem}")


def test_what_yaml_holds_twice_is_named_with_its_line_alone(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("limit: 1\ncount: 1\ncount: 2\n")
    with pytest.raises(ValueError) as error:
        parse_options(Example, ["s", "--config", str(path)])
    line = f"{path}:3: expected YAML of settings, got found duplicate key"
    assert str(error.value).startswith(line)
    assert "suppress" not in str(error.value)


def test_a_config_json_of_a_run_is_such_a_file(programs, tmp_path):
    options = settings("ppo.n_envs=4 ppo.n_steps=8 hidden=8 episodes=1")
    run = ("rl", "CartPole-v1", "--steps", 64, *options)
    assert programs(*run, "--out", tmp_path / "a") == 0
    file = tmp_path / "a" / "config.json"
    again = ("rl", "--config", file, "--seed", 1, "--out", tmp_path / "b")
    assert programs(*again) == 0
    written = (tmp_path / "b" / "config.json").read_text()
    assert written == file.read_text().replace('"seed": 0', '"seed": 1')


@pytest.mark.parametrize(
    "words",
    ["data", "check", "prove 'p(a, b)'", "mine --min-support 1 --out -"],
)
def test_few_notes_are_shown_and_all_with_v(words, programs, capsys, tmp_path):
    write_graph(
        tmp_path,
        train="a\te\tb\na\te\tb\nb\te\tc\nc\te\td\nd\tf\ta\nf\tf\tf\n",
        valid="a\tp\tb\na\tp\tb\na\te\tb\n",
        test="b\tp\tc\nb\tp\tc\nb\te\tc\n",
        rules="p(X, Y) :- e(X, Y).\np(X, Y) :- z(X, Y).\n",
    )
    program, *others = shlex.split(words)
    printed = {}
    for flags in ([], ["-v"], ["--verbose"], ["-q"]):
        assert programs(program, tmp_path, *others, *flags) == 0
        printed["".join(flags)] = "".join(capsys.readouterr())
    counts = {key: text.count("note: ") for key, text in printed.items()}
    assert counts["-q"] == 0 and printed["-q"].strip()
    assert counts[""] <= 3 and counts["-v"] == counts["--verbose"]
    is_cut = " more: -v)" in printed[""]
    assert is_cut == (counts["-v"] > counts[""])
    assert is_cut or program == "mine"
