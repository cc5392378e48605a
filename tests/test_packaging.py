"""What is declared is imported, and the other way round; CI runs what a person runs; the version is that of the tag."""

import ast
import re
import runpy
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
# distributions whose module has another name
MODULES = {
    "typing-extensions": "typing_extensions",
    "prometheus-client": "prometheus_client",
    "pytest-xdist": "xdist",
    "mlflow-skinny": "mlflow",
}
# what the store of the small MLflow imports
STORE = {"sqlalchemy", "alembic"}
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


class Names(NamedTuple):
    """What the code of a folder may take from a distribution."""

    imports: set[str]  # modules
    texts: set[str]  # every text; importlib takes some of them


@cache
def names(folder: str) -> Names:
    """Modules that the code of a folder imports, and the texts that may name one."""
    found = Names(set(), set())
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found.imports.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.imports.add(node.module or "")
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.texts.add(node.value)
    return found


def first_parts(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


OPTIONAL = {
    name
    for extra in EXTRAS
    if extra not in FOR_DEVELOPERS
    for name in EXTRAS[extra]
}


def test_what_is_imported_is_declared():
    declared = modules([*PROJECT["dependencies"], *OPTIONAL])
    imported = names("funcppo").imports
    foreign = first_parts(imported) - set(sys.stdlib_module_names)
    # ruamel is a namespace, whose module has a dot
    assert foreign - {"funcppo"} - GUESTS <= first_parts(declared)
    assert any(name.startswith("ruamel.yaml") for name in imported)


@pytest.mark.parametrize(
    "extra",
    [extra for extra in EXTRAS if extra not in (*FOR_DEVELOPERS, "all")],
)
def test_what_an_extra_declares_is_imported(extra):
    imported = names("funcppo").imports
    used = first_parts(imported) | imported | names("funcppo").texts
    assert modules(EXTRAS[extra]) - STORE <= used


def test_what_the_tests_declare_is_imported():
    used = first_parts(names("tests").imports | names("tests").texts)
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


def test_the_workflow_checks_by_the_script_of_ci_alone():
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    check = re.search(r"\n  check:.*?\n\n", text, re.S)[0]
    assert re.findall(r"run: (.*)", check) == [".ci/run"]


def test_the_version_is_that_of_the_tag(tmp_path, monkeypatch):
    """Without git, without a tag, at a tag, after a tag, and in a source archive; links lead to the repository."""
    found = []
    monkeypatch.setattr("setuptools.setup", lambda **words: found.append(words))
    monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)
    copy = tmp_path / "setup.py"
    copy.write_bytes((ROOT / "setup.py").read_bytes())
    text = "![a](docs/a.svg) [b](docs/b.md#c) [d](https://d.example)"
    (tmp_path / "README.md").write_text(text)

    def git(*words):
        options = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        subprocess.run(["git", *options, *words], cwd=tmp_path, check=True)

    def build():
        runpy.run_path(str(copy))
        return found[-1]["version"]

    if subprocess.run(["git", "--version"], capture_output=True).returncode:
        pytest.skip("no git on this system")
    assert build() == "0.3.0.dev0"
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "first")
    assert build() == "0.3.0.dev0"
    git("tag", "v1.2.3")
    assert build() == "1.2.3"
    git("commit", "-q", "--allow-empty", "-m", "second")
    assert build().startswith("1.2.3.post1+g")
    assert (
        found[-1]["long_description"] == text and not found[-1]["project_urls"]
    )
    git("remote", "add", "origin", "https://forge.example/x/y.git")
    build()
    head = (tmp_path / ".git" / "refs" / "heads").iterdir()
    commit = next(head).read_text().strip()
    url = "https://forge.example/x/y"
    assert found[-1]["project_urls"]["Repository"] == url
    assert found[-1]["long_description"] == (
        f"![a]({url}/raw/{commit}/docs/a.svg) [b]({url}/blob/{commit}/docs/b.md#c) [d](https://d.example)"
    )
    (tmp_path / "PKG-INFO").write_text("Name: funcppo\nVersion: 4.5.6\n")
    assert build() == "4.5.6"
