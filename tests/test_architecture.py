"""Imports go one way, PPO is had without knowledge graphs, and maths overwrites no tensor.

Every import counts: at the top of a module, within a function, or for type checkers alone. Each module is parsed once.
"""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "funcppo"
TESTS = Path(__file__).parent
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(
        ".__init__"
    ): ast.parse(path.read_text())
    for path in sorted(ROOT.rglob("*.py"))
}  # "core.tree" for funcppo/core/tree.py, "__init__" for the package itself

KG = "graph logic mining config scores search ranking run answers show api"
# From the ground up: a module imports its own floor and those below it.
FLOORS = (
    ("core",),
    ("runtime",),
    ("ppo", "envs", "nets"),
    ("rl",),
    *[(f"kg.{name}",) for name in KG.split()],
    ("__init__",),
    ("cli", "__main__"),
)
FLOOR = {unit: i for i, units in enumerate(FLOORS) for unit in units}
KG_WITHOUT_PPO = ("kg.graph", "kg.logic", "kg.mining")
PPO = ("ppo", "envs", "nets", "rl")

# Where a module receives the machinery and never names it.
MATHS = (
    *("advantages", "interfaces", "losses", "minibatch", "optim", "rollout"),
    *("train_step", "core.random", "core.tree", "core.types", "envs", "nets"),
    *("kg.logic", "kg.scores", "kg.search"),
)
NOT_MATHS = ("envs.gymnasium_bridge", "envs.jax_bridge", "kg.search.task")
MACHINERY = (
    "torch.compile",
    "torch.cuda",
    "torch.Generator",
    "manual_seed",
    "_dynamo",
    "_inductor",
    ".item(",
)
# Maths on Python's containers, which it fills.
HOST = (
    *(f"kg.logic.{x}" for x in ("derive", "fixpoint", "joins", "proof")),
    *("kg.logic.prove", "kg.search.guide"),
)


def is_below(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == p or name.startswith(p + ".") for p in prefixes)


def unit(name: str) -> str:
    """The floor's unit that a module belongs to."""
    parts = name.split(".")
    if parts[0] == "kg":
        return ".".join(parts[:2])
    return parts[0] if parts[0] in FLOOR else "ppo"


def imports(tree: ast.Module) -> set[str]:
    """Modules of the package that a module imports, wherever it does so."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {
                alias.name.partition(".")[2] or "__init__"
                for alias in node.names
                if alias.name.split(".")[0] == "funcppo"
            }
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: relative import"
            package, _, parent = (node.module or "").partition(".")
            if package != "funcppo":
                continue
            for alias in node.names:
                child = f"{parent}.{alias.name}".removeprefix(".")
                found.add(child if child in MODULES else parent or "__init__")
    return found


IMPORTS = {name: imports(tree) for name, tree in MODULES.items()}


def closure(name: str) -> set[str]:
    """Modules that a module imports, and those that they import, and so on."""
    found: set[str] = set()
    new = {name}
    while new:
        found |= new
        new = {x for known in new for x in IMPORTS.get(known, ())} - found
    return found


def test_every_form_of_import_is_seen():
    code = "import funcppo\nimport funcppo.core.tree as t\n"
    code += "from funcppo.core import random\n"
    code += "if TYPE_CHECKING:\n    from funcppo.kg.logic import kb\n"
    code += "def f():\n    from funcppo import ppo\n    import torch.nn\n"
    seen = "__init__ core.tree core.random kg.logic.kb"
    assert imports(ast.parse(code)) == set(seen.split())


def test_imports_point_one_way():
    assert [
        f"{name} imports {other}"
        for name, found in IMPORTS.items()
        for other in sorted(found)
        if FLOOR[unit(other)] > FLOOR[unit(name)]
    ] == []


def test_graphs_logic_and_mining_reach_nothing_of_ppo():
    assert [
        f"{name} reaches {other}"
        for name in MODULES
        if unit(name) in KG_WITHOUT_PPO
        for other in sorted(closure(name))
        if unit(other) in PPO
    ] == []


def test_no_modules_import_each_other():
    graph = {name: found - {name} for name, found in IMPORTS.items()}
    TopologicalSorter(graph).prepare()  # CycleError names the circle


def test_training_loads_no_module_for_knowledge_graphs():
    code = """
import sys
import funcppo as fp
fp.train, fp.train_many, fp.compile, fp.evaluate_policy, fp.MetricsLog, fp.check
learner = fp.ppo(env=fp.envs.make("CartPole-v1"), network=fp.nets.mlp())
assert not [name for name in sys.modules if name.startswith("funcppo.kg")]
"""
    subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=ROOT.parent, timeout=300
    )


def test_one_module_imports_optree():
    imported = [
        (name, alias.name)
        for name, tree in MODULES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    ]
    found = [name for name, x in imported if x.split(".")[0] == "optree"]
    assert found == ["core.tree"] * 2


def is_maths(name: str) -> bool:
    return is_below(name, MATHS) and not is_below(name, NOT_MATHS)


def test_maths_never_names_the_machinery():
    for name in filter(is_maths, MODULES):
        path = ROOT.joinpath(*name.split("."))
        if path.is_dir():
            path /= "__init__"
        source = path.with_suffix(".py").read_text()
        assert not [word for word in MACHINERY if word in source], name


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


def overwrites(node: ast.AST, may_fill: bool) -> bool:
    """Whether a node calls an in-place method, or assigns to a subscript that is no text."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        method = node.func.attr
        return method.endswith("_") and not method.startswith("_")
    places = [x.slice for x in targets(node) if isinstance(x, ast.Subscript)]
    is_text = [isinstance(getattr(x, "value", None), str) for x in places]
    return not may_fill and not all(is_text)


def test_maths_overwrites_no_tensor():
    for name in filter(is_maths, MODULES):
        may_fill = is_below(name, HOST)
        for node in ast.walk(MODULES[name]):
            assert not overwrites(node, may_fill), f"{name}:{node.lineno}"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("x[0] = 1", True),
        ("x[a, b] += 1", True),
        ("y, x[0] = 1, 2", True),
        ("x = y[0]", False),
        ("x['a'] = 1", False),
        ("x.a = 1", False),
    ],
)
def test_writes_to_tensors_are_seen(code: str, expected: bool):
    assert overwrites(ast.parse(code).body[0], may_fill=False) is expected


FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


def public_definitions(
    tree: ast.Module,
) -> list[tuple[str, FUNCTIONS | ast.ClassDef]]:
    """Public functions and classes of a module, and the methods of classes that are no protocols."""
    found: list[tuple[str, FUNCTIONS | ast.ClassDef]] = []
    for node in tree.body:
        if not isinstance(node, FUNCTIONS | ast.ClassDef):
            continue
        decorators = [ast.unparse(d) for d in node.decorator_list]
        if node.name.startswith("_") or "overload" in decorators:
            continue
        found.append((node.name, node))
        is_protocol = isinstance(node, ast.ClassDef) and any(
            "Protocol" in ast.unparse(base) for base in node.bases
        )
        if isinstance(node, ast.ClassDef) and not is_protocol:
            found += [
                (f"{node.name}.{member.name}", member)
                for member in node.body
                if isinstance(member, FUNCTIONS)
                and not member.name.startswith("_")
            ]
    return found


def test_everything_public_has_a_docstring():
    missing = []
    for name, tree in MODULES.items():
        if tree.body and not ast.get_docstring(tree):
            missing.append(name)
        missing += [
            f"{name}.{qualified}"
            for qualified, node in public_definitions(tree)
            if not ast.get_docstring(node)
        ]
    assert missing == []


def test_a_folder_of_tests_is_a_package():
    """Two test files of one name in two folders would shadow each other."""
    folders = {path.parent for path in TESTS.rglob("test_*.py")}
    assert [f for f in folders if not (f / "__init__.py").exists()] == []
