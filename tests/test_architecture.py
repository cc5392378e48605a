"""The import graph and the house rules are a specification."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "funcppo"
ORDER = [
    "types",
    "tree",
    "random",
    "logic",
    "queries",
    "envs",
    "nets",
    "rollout",
    "advantages",
    "losses",
    "optim",
]
ORDER += ["minibatch", "train_step", "ranking", "protocol", "beam", "evaluate"]
MODULES = {
    str(p.relative_to(ROOT).with_suffix("")): p
    for p in sorted(ROOT.rglob("*.py"))
}
BOUNDARY = (
    "data/",
    "runtime/",
    "cli",
    "__main__",
    "checkpoint",
    "config",
    "problem",
    "training",
    "explain",
)
BOUNDARY += (
    "mining",
    "journal",
    "judge",
    "records",
    "fitting",
    "scoring",
    "packing",
)
HOST = (
    "logic/fixpoint",
    "logic/joins",
    "logic/relations",
    "logic/proof",
    "logic/replay",
    "logic/mine",
)  # they work on Python's containers
MATHS = [name for name in MODULES if not name.startswith(BOUNDARY)]
FORBIDDEN = (
    "torch.compile",
    "torch.cuda",
    "torch.Generator",
    "manual_seed",
    "_dynamo",
    "_inductor",
    ".item(",
)


def parsed(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text())


def room(name: str) -> str:
    return name.split("/")[0]


def imported(name: str) -> set[str]:
    """Rooms of ours that a module imports when it runs; an import for annotations alone does not count."""
    found: set[str] = set()
    nodes = [
        n
        for n in parsed(name).body
        if not (
            isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"
        )
    ]
    for node in (inner for n in nodes for inner in ast.walk(n)):
        if isinstance(node, ast.ImportFrom) and node.module == "funcppo":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (
            node.module or ""
        ).startswith("funcppo."):
            found.add(str(node.module).split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {
                alias.name.split(".")[1]
                for alias in node.names
                if alias.name.startswith("funcppo.")
            }
    return found


@pytest.mark.parametrize("name", [n for n in MODULES if room(n) in ORDER])
def test_imports_point_one_way(name):
    """`config` is vocabulary: anything may import it."""
    assert imported(name) <= {*ORDER[: ORDER.index(room(name)) + 1], "config"}


def test_the_vocabulary_imports_nothing_of_ours():
    assert not imported("config") | imported("types") | imported("tree")


@pytest.mark.parametrize(
    "name", [n for n in MODULES if n.startswith("runtime/")]
)
def test_the_machinery_receives_functions_and_imports_no_maths(name):
    assert imported(name) <= {"types", "tree", "random", "runtime"}


@pytest.mark.parametrize("name", MATHS)
def test_the_maths_never_mentions_the_machinery(name):
    source = MODULES[name].read_text()
    assert not [word for word in FORBIDDEN if word in source]
    assert not imported(name) & {"runtime", "data", "cli", "checkpoint"}


@pytest.mark.parametrize("name", MATHS)
def test_the_maths_overwrites_no_tensor(name):
    """No in-place method; no assignment to a subscript, but for the host loops, which fill dicts and lists."""
    for node in ast.walk(parsed(name)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            method = node.func.attr
            assert not (method.endswith("_") and not method.startswith("_")), (
                f"line {node.lineno}: {method}"
            )
        targets = (
            node.targets
            if isinstance(node, ast.Assign)
            else [getattr(node, "target", None)]
        )
        if (
            isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign)
            and name not in HOST
        ):
            assert not any(isinstance(t, ast.Subscript) for t in targets), (
                f"line {node.lineno}: subscript assignment"
            )


def test_one_module_imports_optree():
    assert [
        n for n, p in MODULES.items() if "import optree" in p.read_text()
    ] == ["tree"]


@pytest.mark.parametrize("name", MODULES)
def test_a_module_has_at_most_300_lines_and_a_function_50(name):
    assert len(MODULES[name].read_text().splitlines()) <= 300
    for node in ast.walk(parsed(name)):
        if isinstance(node, ast.FunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 50, node.name


@pytest.mark.parametrize("name", MODULES)
def test_everything_public_says_what_it_is(name):
    module = parsed(name)
    assert ast.get_docstring(module) or not module.body
    for node in module.body:
        if isinstance(
            node, ast.FunctionDef | ast.ClassDef
        ) and not node.name.startswith("_"):
            assert ast.get_docstring(node), node.name
