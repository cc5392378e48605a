"""What pyproject.toml declares is imported, and what is imported is declared; CI runs what a person runs."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
# distributions whose module has another name
MODULES = {
    "typing-extensions": "typing_extensions",
    "prometheus-client": "prometheus_client",
    "pytest-xdist": "xdist",
}
# What data that users hand in are made of, and what PyTorch brings where there is a GPU.
GUESTS = {"pandas", "polars", "pykeen", "triton"}
FOR_DEVELOPERS = ("test", "docs")
# programs and plugins of the tests, which nothing imports
TOOLS = {"pytest-xdist", "ruff", "pyright", "httpx", "build"}


def distributions(requirements) -> set[str]:
    """The names of requirements, without those that are other extras of the project."""
    names = {re.match(r"[\w.-]+", text)[0].lower() for text in requirements}
    return names - {"funcppo"}


def modules(requirements) -> set[str]:
    """The modules to import, up to the first dot or whole."""
    return {MODULES.get(name, name) for name in distributions(requirements)}


def imports(folder: str) -> set[str]:
    """Modules that the code of a folder imports, and the texts that may name one."""
    found: set[str] = set()
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add(node.module or "")
    return found


def first_parts(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def texts(folder: str) -> set[str]:
    """Every text in the code of a folder; importlib takes some of them."""
    return {
        node.value
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


IMPORTED = imports("funcppo")
OPTIONAL = {
    name
    for extra in EXTRAS
    if extra not in FOR_DEVELOPERS
    for name in EXTRAS[extra]
}


def test_what_is_imported_is_declared():
    declared = modules([*PROJECT["dependencies"], *OPTIONAL])
    foreign = first_parts(IMPORTED) - set(sys.stdlib_module_names)
    # ruamel is a namespace, whose module has a dot
    assert foreign - {"funcppo"} - GUESTS <= first_parts(declared)
    assert any(name.startswith("ruamel.yaml") for name in IMPORTED)


@pytest.mark.parametrize(
    "extra",
    [extra for extra in EXTRAS if extra not in (*FOR_DEVELOPERS, "all")],
)
def test_what_an_extra_declares_is_imported(extra):
    used = first_parts(IMPORTED) | IMPORTED | texts("funcppo")
    assert modules(EXTRAS[extra]) <= used


def test_what_the_tests_declare_is_imported():
    used = first_parts(imports("tests") | texts("tests"))
    needed = distributions(EXTRAS["test"]) - TOOLS
    assert {MODULES.get(name, name) for name in needed} <= used


def test_what_the_site_declares_is_named_by_its_settings():
    text = (ROOT / "docs" / "conf.py").read_text()
    for name in distributions(EXTRAS["docs"]):
        assert f'"{name.replace("-", "_")}' in text, name


def test_all_holds_every_extra_for_users():
    (everything,) = EXTRAS["all"]
    named = re.search(r"\[(.*)\]", everything)[1].split(",")
    assert set(named) == set(EXTRAS) - {"all", *FOR_DEVELOPERS}


def test_the_core_needs_three_packages_and_typing_extensions():
    assert distributions(PROJECT["dependencies"]) == {
        "torch",
        "optree",
        "numpy",
        "typing-extensions",
    }


def test_every_package_is_pinned_for_ci():
    """But for typing-extensions and filelock, which PyTorch brings."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {line.partition("==")[0] for line in lines if "==" in line}
    declared = [*PROJECT["dependencies"], *OPTIONAL, *EXTRAS["test"]]
    assert distributions(declared) - pins <= {"typing-extensions", "filelock"}


def test_the_workflow_calls_the_script_of_ci_alone():
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert re.findall(r"run: (.*)", text) == [".ci/run"]
