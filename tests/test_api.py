"""The names of the package: light to import, each what its module defines."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import funcppo as fp
from funcppo.interfaces import Distribution
from tests.forked import printed_by

ROOT = Path(__file__).parents[1]


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_importing_the_package_imports_no_torch_and_of_ours_the_version_only():
    code = "import sys, funcppo; dir(funcppo); funcppo.__version__; "
    code += "print([m for m in sys.modules if m.startswith(('torch', 'optree', 'numpy', 'funcppo.'))])"
    assert run_python(code) == "['funcppo.core']"


def test_settings_and_environments_are_found_without_torch():
    code = "import sys, funcppo as fp; fp.PPOConfig(n_envs=8); fp.envs; fp.nets; print('torch' in sys.modules)"
    assert run_python(code) == "False"


@pytest.mark.parametrize(
    "first",
    [
        "import funcppo.train_step",
        "from funcppo import train_step",
        "funcppo.ppo",
    ],
)
def test_the_training_step_stays_a_module_and_ppo_a_function(first):
    code = f"import funcppo; {first}; print(type(funcppo.train_step).__name__, type(funcppo.ppo).__name__)"
    assert printed_by(code) == ["module function"]


@pytest.mark.parametrize("name", sorted(set(fp.__all__) - {"__version__"}))
def test_a_name_is_what_its_module_defines_and_documents(name):
    value = getattr(fp, name)
    if isinstance(value, ModuleType):
        assert value.__name__.rpartition(".")[2] == name
    elif not isinstance(value, Distribution):
        assert (
            value.__module__.startswith("funcppo.") and value.__name__ == name
        )
    assert (value.__doc__ and f"fp.{name}" in fp.__doc__) or name in ("Config",)


def test_type_checkers_are_told_of_the_same_names():
    module = ast.parse((ROOT / "funcppo" / "__init__.py").read_text())
    typed = next(node for node in module.body if isinstance(node, ast.If))
    names = {alias.name for node in typed.body for alias in node.names}
    assert names | {"__version__"} == set(fp.__all__) == set(dir(fp))


@pytest.mark.parametrize("module", [fp, fp.envs, fp.nets])
def test_an_unknown_name_is_an_attribute_error(module):
    with pytest.raises(
        AttributeError,
        match=f"module '{module.__name__}' has no attribute 'nothing'",
    ):
        _ = module.nothing


def test_environments_and_networks_are_functions_whatever_was_imported_before():
    code = "import funcppo.envs.classic, funcppo.nets.networks, funcppo as fp; "
    code += "print([type(x).__name__ for x in (fp.envs.cartpole, fp.envs.pendulum, fp.nets.mlp)])"
    assert printed_by(code) == ["['function', 'function', 'function']"]


def test_the_version_and_the_marker_of_types_are_packaged():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["package-data"]["funcppo"] == [
        "py.typed"
    ]
    assert (ROOT / "funcppo" / "py.typed").exists() and fp.__version__[
        0
    ].isdigit()
