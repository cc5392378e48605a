"""A small package whose measures are counted by hand."""

from __future__ import annotations

import ast
import sys

import pytest

from experiments.checks import readability

SMALL = '''"""A module."""

from typing import Any


def add(a: Any, b: int) -> int:
    """The sum."""
    total = a + b
    return total


class _Private:
    def method(self) -> None:
        # A comment.
        pass
'''
# Assign, Name, BinOp, Name, Name; Return, Name; Pass. Operators and contexts are not counted.
SMALL_NODES, SMALL_BODY_LINES = 8, 3
SMALL_CODE_LINES = 7  # import, def, two lines, class, def, pass

LINES = "".join(f"    x{i} = {i}\n" for i in range(20))
PACKED = f"def packed():\n{LINES}"
AIRY = f"def airy():\n{LINES}\n    return x0\n"
COMMENTED = f"def commented():\n{LINES}    # Why.\n    return x0\n"


@pytest.fixture
def measures(tmp_path):
    """The measures of a package of one module."""

    def of(text: str) -> readability.Measures:
        (tmp_path / "module.py").write_text(text)
        return readability.measure(tmp_path)

    return of


def test_nodes_lines_and_any_of_a_small_module(measures):
    found = measures(SMALL)
    assert (found.body_nodes, found.body_lines) == (
        SMALL_NODES,
        SMALL_BODY_LINES,
    )
    assert (found.code_lines, found.n_any, found.functions) == (
        SMALL_CODE_LINES,
        1,
        2,
    )
    assert (
        found.packed == found.long == found.nested == found.undocumented == []
    )


def test_a_long_body_without_a_blank_line_or_a_comment_is_packed(measures):
    found = measures(f"{PACKED}\n\n{AIRY}\n\n{COMMENTED}")
    assert [place.split()[1] for place in found.packed] == ["packed"]
    assert found.long_bodies == 3
    short = PACKED.replace("    x0 = 0\n", "")
    assert measures(short).long_bodies == 0


def test_limits_are_exceeded_by_one(measures):
    def function(n: int) -> str:
        names = ", ".join(f"a{i}" for i in range(n))
        return f"def f({names}):\n" + "".join(
            f"    x{i} = {i}\n\n" for i in range(25 + n - 10)
        )

    at_limit, beyond = measures(function(10)), measures(function(11))
    assert not at_limit.long and not at_limit.many_parameters
    assert [
        line.split()[-1] for line in (*beyond.long, *beyond.many_parameters)
    ] == ["26", "11"]


DEEP = """
def f():
    for x in y:
        while x:
            with x:
                try:
                    pass
                finally:
                    pass
"""
CHAIN = """
def f():
    if a:
        pass
    elif b:
        pass
    elif c:
        pass
    else:
        pass
"""


def test_nesting_counts_blocks_and_no_elif():
    assert readability.nesting(ast.parse(DEEP)) == 4
    assert readability.nesting(ast.parse(CHAIN)) == 1


def test_public_functions_that_do_real_work_are_to_be_documented(measures):
    body = "".join(f"    x{i} = {i}\n" for i in range(6))
    plain = f'def f():\n    """F."""\n{body}'
    returns = (
        f'def g():\n    """G.\n\n    Returns:\n      Nothing.\n    """\n{body}'
    )
    private = plain.replace("def f", "def _f")
    found = measures(f"{plain}\n\n{returns}\n\n{private}")
    assert found.documentable == 2 and [
        place.split()[1] for place in found.undocumented
    ] == ["f"]


def test_tests_are_left_out(tmp_path):
    (tmp_path / "test_module.py").write_text(SMALL)
    assert readability.measure(tmp_path).functions == 0


def test_a_missed_target_fails(tmp_path, monkeypatch, capsys):
    package = tmp_path / "package"
    package.mkdir()
    documented = SMALL.replace(": Any", ": int").replace(
        "from typing import Any\n", ""
    )
    (package / "module.py").write_text(documented)
    monkeypatch.setattr(sys, "argv", ["readability.py", str(package)])
    assert readability.main() == 0
    assert "MISSED" not in capsys.readouterr().out
    (package / "module.py").write_text(f"{documented}\n\n{PACKED}")
    monkeypatch.setattr(sys, "argv", ["readability.py", "--list", str(package)])
    assert readability.main() == 1
    out = capsys.readouterr().out
    assert (
        out.count("MISSED") == 2 and "packed: module.py:17 packed" in out
    )  # undocumented, too
