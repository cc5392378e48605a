"""The programs run in this process."""

from __future__ import annotations

import json
from typing import Any

import tyro

from funcppo.cli.provable import Provable
from funcppo.cli.prove import Prove


def prove(*args: str) -> int:
    return tyro.cli(Prove, args=list(args)).run()


def provable(*args: str) -> int:
    return tyro.cli(Provable, args=list(args)).run()


def json_of(capsys: Any, program: Any, *args: str) -> tuple[int, dict[str, Any]]:
    """The exit status and what `--json -` prints: nothing else may be on standard output."""
    capsys.readouterr()
    status = program(*args, "--json", "-")
    return status, json.loads(capsys.readouterr().out)
