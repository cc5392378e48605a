"""The names of the package: light to import, each what its module defines."""

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


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (
            "dir(funcppo); funcppo.__version__; "
            "print([m for m in sys.modules if m.startswith(('torch', 'optree', 'numpy', 'funcppo.'))])",
            "['funcppo.core']",
        ),
        (
            "import funcppo as fp; fp.PPOConfig(n_envs=8); fp.envs; fp.nets; print('torch' in sys.modules)",
            "False",
        ),
    ],
)
def test_what_needs_no_torch_imports_none(code, expected):
    """A config of settings is made and checked without it, too."""
    code = f"import sys, funcppo; {code}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == expected


@pytest.mark.parametrize(
    "first",
    [
        "import funcppo.train_step",
        "from funcppo import train_step",
        "import funcppo.envs.classic, funcppo.nets.networks",
        "funcppo.ppo",
    ],
)
def test_modules_and_functions_stay_so_whatever_was_imported_before(first):
    code = f"import funcppo as fp, funcppo; {first}; "
    code += "found = fp.train_step, fp.ppo, fp.envs.cartpole, fp.envs.pendulum, fp.nets.mlp; "
    code += "print(*[type(x).__name__ for x in found])"
    assert printed_by(code) == ["module" + 4 * " function"]


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
    problem = f"module '{module.__name__}' has no attribute 'nothing'"
    with pytest.raises(AttributeError, match=problem):
        _ = module.nothing


def test_the_version_and_the_marker_of_types_are_packaged():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["package-data"]["funcppo"] == [
        "py.typed"
    ]
    assert (ROOT / "funcppo" / "py.typed").exists() and fp.__version__[
        0
    ].isdigit()
