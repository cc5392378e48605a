"""The import graph, the one folder that overwrites memory, and limits on functions are a specification.

Every import counts: at the top of a module, within a function, or for type checkers alone.
"""

from __future__ import annotations

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from experiments.checks.readability import Measures, add_file
from funcppo import cli

ROOT = Path(__file__).parents[1] / "funcppo"
TESTS = Path(__file__).parent
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(
        ".__init__"
    ): path
    for path in sorted(ROOT.rglob("*.py"))
}  # "logic.kb" for funcppo/logic/kb.py, "logic" for funcppo/logic/__init__.py, "__init__" for the package itself

VOCABULARY = (
    "types",
    "tree",
    "random",
    "atomic_io",
    "json_io",
    "record_log",
    "ranges",
    "distributions",
    "interfaces",
    "loops",
    "recurrence",
    "config",
    "cores",
    "garbage_collection",
    "deadline",
    "version",
)
CORE = (
    "optim",
    "advantages",
    "rollout",
    "losses",
    "minibatch",
    "kernel_network",
    "shards",
    "train_step",
    "learner",
)
LAYERS = (
    "vocabulary",
    "logic",
    "envs",
    "nets",
    "core",
    "prover",
    "evaluation",
    "experiment",
)

# Beyond the layers: what each unit may import, itself included.
MAY_IMPORT = {unit: set(LAYERS[: i + 1]) for i, unit in enumerate(LAYERS)}
MAY_IMPORT["data"] = {"vocabulary", "data"}
MAY_IMPORT["mining"] = {"vocabulary", "logic", "data", "mining"}
MAY_IMPORT["runtime"] = {"vocabulary", "runtime"}  # it receives functions
for later in ("prover", "evaluation", "experiment"):
    MAY_IMPORT[later] |= {"data", "mining"}
for user in ("evaluation", "experiment"):
    MAY_IMPORT[user] |= {"runtime"}
# it steps on the host, with copies there and back
MAY_IMPORT["envs.gymnasium_bridge"] = MAY_IMPORT["envs"] | {"runtime"}
MAY_IMPORT["envs"] = MAY_IMPORT["envs"] | {"envs.gymnasium_bridge"}
MAY_IMPORT["learner"] = MAY_IMPORT["core"] | {"runtime"}
MAY_IMPORT["trainer"] = {*MAY_IMPORT["experiment"], "learner", "trainer"}
MAY_IMPORT["rl"] = {*MAY_IMPORT["trainer"], "rl"}
MAY_IMPORT["report"] = {*MAY_IMPORT["rl"], "report"}
MAY_IMPORT["serve"] = {*MAY_IMPORT["report"], "serve", "__init__"}
MAY_IMPORT["knowledge"] = {*MAY_IMPORT["experiment"], "report", "knowledge"}
MAY_IMPORT["__init__"] = {*MAY_IMPORT["knowledge"], *MAY_IMPORT["rl"]}
MAY_IMPORT["cli"] = {*MAY_IMPORT["__init__"], "__init__", "serve", "cli"}
MAY_IMPORT["__main__"] = {"cli"}

# Modules that talk to the machine: files, devices, compilers, the terminal. All others are maths.
BOUNDARY = (
    "data",
    "runtime",
    "cli",
    "__main__",
    "__init__",
    "knowledge",
    "report",
    "serve",
    "experiment",
    "atomic_io",
    "json_io",
    "record_log",
    "ranges",
    "config",
    "loops",
    "learner",
    "trainer",
    "rl",
    "prover.task",
    "envs.gymnasium_bridge",
)
BOUNDARY += (
    "evaluation.autotune",
    "evaluation.evaluator",
    "evaluation.explain",
    "evaluation.result_log",
)
BOUNDARY += ("evaluation.scorers",)
# Maths on Python's containers, which it fills.
HOST = (
    "evaluation.evidence_ranking",
    "evaluation.recount",
    "logic.chains",
    "logic.firings",
    "logic.duckdb_fixpoint",
    "logic.fixpoint",
    "logic.joins",
    "logic.relations",
    "logic.proof",
    "logic.proof_builder",
    "logic.rules",
    "mining",
)
FORBIDDEN = (
    "torch.compile",
    "torch.cuda",
    "torch.Generator",
    "manual_seed",
    "_dynamo",
    "_inductor",
    ".item(",
)


def is_one_of(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(
        name == prefix or name.startswith(prefix + ".") for prefix in prefixes
    )


MATHS = [name for name in MODULES if not is_one_of(name, BOUNDARY)]
WITH_CODE = [name for name, path in MODULES.items() if path.read_text()]


def parsed(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text())


def unit(name: str) -> str:
    """The layer or folder that a module belongs to."""
    if name in MAY_IMPORT:
        return name
    first = name.split(".")[0]
    if first in VOCABULARY:
        return "vocabulary"
    return "core" if first in CORE and first != "learner" else first


def imports(tree: ast.Module) -> set[str]:
    """Modules of the package that a module imports, wherever it does so."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            dotted = [alias.name for alias in node.names]
            found |= {
                name.partition(".")[2] or "__init__"
                for name in dotted
                if name.split(".")[0] == "funcppo"
            }
        elif (
            isinstance(node, ast.ImportFrom)
            and (node.module or "").split(".")[0] == "funcppo"
        ):
            parent = str(node.module).partition(".")[2]
            for alias in node.names:
                child = f"{parent}.{alias.name}".removeprefix(".")
                found.add(child if child in MODULES else parent or "__init__")
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: relative import"
    return found


def test_the_import_test_sees_every_form_of_import():
    code = (
        "import funcppo\nimport funcppo.tree as t\nfrom funcppo import random\n"
    )
    code += "from funcppo.logic.kb import contains\n"
    code += "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from funcppo.logic import kb\n"
    code += "def f():\n    from funcppo import ppo\n    from funcppo.data import load\n    import torch.nn\n"
    assert imports(ast.parse(code)) == {
        "__init__",
        "tree",
        "random",
        "logic.kb",
        "data",
    }
    assert [unit(x) for x in ("types", "logic.kb", "minibatch", "learner", "cli")] == [
        "vocabulary", "logic", "core", "learner", "cli",
    ]  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_one_way(name):
    assert {
        module
        for module in imports(parsed(name))
        if unit(module) not in MAY_IMPORT[unit(name)]
    } == set()


@pytest.mark.parametrize(
    "order", [VOCABULARY, CORE], ids=["vocabulary", "core"]
)
def test_modules_of_the_vocabulary_and_of_the_core_have_an_order(order):
    for i, name in enumerate(order):
        assert imports(parsed(name)) & set(order) <= set(order[:i]), name


def test_no_modules_import_each_other():
    try:
        TopologicalSorter(
            {name: imports(parsed(name)) - {name} for name in MODULES}
        ).prepare()
    except CycleError as error:
        pytest.fail(f"cycle: {' <- '.join(error.args[1])}")


@pytest.mark.parametrize("name", MATHS)
def test_the_maths_never_mentions_the_machinery(name):
    source = MODULES[name].read_text()
    assert not [word for word in FORBIDDEN if word in source]


@pytest.mark.parametrize("name", MATHS)
def test_the_maths_overwrites_no_tensor(name):
    """No in-place method; no assignment to a subscript, except by a text (of a dict) and in host loops."""
    for node in ast.walk(parsed(name)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            method = node.func.attr
            is_in_place = method.endswith("_") and not method.startswith("_")
            assert not is_in_place, f"line {node.lineno}: {method}"
        if not is_one_of(name, HOST):
            assert not any(map(may_write_to_a_tensor, targets(node))), (
                f"line {node.lineno}: subscript assignment"
            )


def targets(node: ast.AST) -> list[ast.expr]:
    """What a statement assigns to, the elements of tuples one by one."""
    if isinstance(node, ast.Assign):
        found = node.targets
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        found = [node.target]
    else:
        return []
    return [
        element
        for target in found
        for element in getattr(target, "elts", [target])
    ]


def may_write_to_a_tensor(target: ast.expr) -> bool:
    is_text = (
        isinstance(target, ast.Subscript)
        and isinstance(target.slice, ast.Constant)
        and isinstance(target.slice.value, str)
    )
    return isinstance(target, ast.Subscript) and not is_text


def test_writes_to_tensors_are_seen():
    writes = ["x[0] = 1", "x[a, b] += 1", "y, x[0] = 1, 2", "x[:] = 0"]
    for code in writes:
        assert any(
            map(may_write_to_a_tensor, targets(ast.parse(code).body[0]))
        ), code
    for code in ("x = y[0]", "x['a'] = 1", "x.a = 1"):
        assert not any(
            map(may_write_to_a_tensor, targets(ast.parse(code).body[0]))
        ), code


def test_one_module_imports_optree():
    assert [
        name
        for name, path in MODULES.items()
        if "import optree" in path.read_text()
    ] == ["tree"]


@pytest.mark.parametrize("name", WITH_CODE)
def test_functions_are_short_flat_and_take_few_parameters(name):
    """At most 25 statements, 10 parameters and 4 levels of nesting."""
    measures = Measures()
    add_file(measures, MODULES[name], name)
    assert (measures.long, measures.many_parameters, measures.nested) == (
        [],
        [],
        [],
    )


@pytest.mark.parametrize("name", WITH_CODE)
def test_everything_public_has_a_docstring(name):
    module = parsed(name)
    assert ast.get_docstring(module), "the module"
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    for node in module.body:
        if (
            not isinstance(node, functions | ast.ClassDef)
            or node.name.startswith("_")
            or is_overload(node)
        ):
            continue
        assert ast.get_docstring(node), node.name
        methods = (
            [member for member in node.body if isinstance(member, functions)]
            if isinstance(node, ast.ClassDef)
            else []
        )
        for method in methods:
            assert (
                method.name.startswith("_")
                or is_protocol(node)
                or ast.get_docstring(method)
            ), f"{node.name}.{method.name}"


def is_overload(
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef,
) -> bool:
    return any(
        isinstance(d, ast.Name) and d.id == "overload"
        for d in node.decorator_list
    )


def is_protocol(node: ast.ClassDef) -> bool:
    """Whether a class only says what others implement; its own docstring covers its members."""
    return any("Protocol" in ast.unparse(base) for base in node.bases)


@pytest.mark.parametrize(
    "name",
    [n for n, p in MODULES.items() if p.stem not in ("__init__", "__main__")],
)
def test_a_module_has_a_test_file_of_its_name(name):
    *folders, module = name.split(".")
    path = TESTS.joinpath(*folders) / f"test_{module}.py"
    assert path.exists() and "def test_" in path.read_text(), path.relative_to(
        TESTS.parent
    )


def listed_modules(page: str) -> set[str]:
    """The modules that the layout of a page names, with their folders: "logic.kb", "tree"."""
    listed: set[str] = set()
    folders = [""]
    for line in page.splitlines():
        indent = len(line) - len(line.lstrip())
        words = re.split(r" {2,}", line.strip())[0].split()
        if indent == 6:
            folders = [word[:-1] + "." for word in words if word[-1] == "/"]
            listed |= {word for word in words if word[-1] != "/"}
        elif indent == 8:
            listed |= {folder + word for folder in folders for word in words}
    return listed


def test_the_page_on_the_architecture_names_every_module():
    page = (ROOT.parent / "docs" / "architecture.md").read_text()
    listed = listed_modules(page)
    # named as a whole
    folders = ("envs.classic_control", "envs.minatar", "runtime.inductor")
    programs = {f"cli.{name}" for name in cli.PROGRAMS}
    modules = {
        name
        for name, path in MODULES.items()
        if path.stem not in ("__init__", "__main__")
        and not is_one_of(name, folders)
    }
    assert modules - programs - listed == set()


def test_the_page_on_the_architecture_names_no_module_that_is_gone():
    page = (ROOT.parent / "docs" / "architecture.md").read_text()
    layout = page.partition("## The training state")[0]
    listed = {name for name in listed_modules(layout) if name[-1] != "/"}
    words = {name.removesuffix(".py").split(".")[-1] for name in listed}
    assert words <= {part for name in MODULES for part in name.split(".")}


@pytest.mark.parametrize(
    "folder", sorted({path.parent for path in TESTS.rglob("test_*.py")})
)
def test_a_folder_of_tests_is_a_package(folder):
    """Two test files of one name in two folders would shadow each other."""
    assert (folder / "__init__.py").exists()
