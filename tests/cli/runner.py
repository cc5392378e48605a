"""The programs run in this process."""

import csv
import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from funcppo import cli
from funcppo.cli.data import Data
from funcppo.cli.doctor import Doctor
from funcppo.cli.mine import Mine
from funcppo.cli.options import parse_options
from funcppo.cli.prove import Prove


def settings(text: str) -> list[str]:
    """The options that make some settings."""
    return [word for x in text.split() for word in ("--set", x)]


TINY = "questions.embedding=False questions.bellman_ford=False "
TINY += "ppo.n_envs=8 ppo.n_steps=4 ppo.n_minibatches=2 prover.embed_dim=4 prover.hidden_dim=8 n_validation_queries=6"
# Options that make a training run small, the same where there is a GPU.
SIZES = ["-v", "--device", "cpu", *settings(f"{TINY} n_validations=2")]
SMALL = [*SIZES, "--set", "score=best-proof", "--learner", "proofs"]

# Options of the run in the fixture `trained`: four updates.
TRAINED = ["--steps", "128", "--strategy", "eager", *SMALL]


# Rules that score alike in all programs, whatever valid says.
BY_RULES = ["--height", "1", "--score", "noisy-or"]
BY_RULES += settings("smoothing=5 object_identity=False")


def funcppo(monkeypatch: pytest.MonkeyPatch, *args: object) -> int:
    """The exit status of a command line."""
    monkeypatch.setattr(sys, "argv", ["funcppo", *map(str, args)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert isinstance(stop.value.code, int)
    return stop.value.code


class Programs:
    """The programs in this process, and what each prints."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *args: object) -> int:
        """The exit status."""
        return funcppo(self._monkeypatch, *args)

    def printed(self, *args: object) -> str:
        """The standard output of work that ends well."""
        self._capsys.readouterr()
        status = self(*args)
        seen = self._capsys.readouterr()
        assert status == 0, seen.err
        return seen.out

    def json(self, *args: object) -> dict[str, Any]:
        """What `--json -` prints of work that ends well: nothing else may be on standard output."""
        return json.loads(self.printed(*args, "--json", "-"))

    def rows(self, *args: object) -> list[dict[str, str]]:
        """The rows of a table of comma-separated values that is printed."""
        return list(csv.DictReader(io.StringIO(self.printed(*args))))

    def refused(self, *args: object, notes: bool = False) -> str:
        """The one line of exit status 2, without `funcppo: `; notes may stand before it where they are allowed."""
        self._capsys.readouterr()
        assert self(*args) == 2
        lines = self._capsys.readouterr().err.splitlines()
        if notes:
            lines = [x for x in lines if not x.startswith("note: ")]
        (line,) = lines
        assert line.startswith("funcppo: ")
        return line.removeprefix("funcppo: ")


def read_records(path: Path) -> list[dict[str, Any]]:
    """The lines of a file as JSON."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_graph(folder: Path, **texts: str) -> Path:
    """A folder with a file of each name: splits, `facts` and `rules`."""
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    return folder


def prove(*args: str) -> int:
    return parse_options(Prove, args).run()


def data(*args: str) -> int:
    return parse_options(Data, args).run()


def mine(*args: str) -> int:
    return parse_options(Mine, args).run()


def doctor(*args: str) -> int:
    return parse_options(Doctor, args).run()


def json_of(
    capsys: pytest.CaptureFixture[str], program: Callable[..., int], *args: str
) -> tuple[int, dict[str, Any]]:
    """The exit status and what `--json -` prints: nothing else may be on standard output."""
    capsys.readouterr()
    status = program(*args, "--json", "-")
    return status, json.loads(capsys.readouterr().out)


def contains(text: str, pattern: str) -> bool:
    """Whether the pattern occurs in the text; `...` in the pattern stands for anything."""
    return (
        re.search(
            ".*".join(re.escape(part) for part in pattern.split("...")), text
        )
        is not None
    )
