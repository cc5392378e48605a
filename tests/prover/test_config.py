"""Which settings of the prover are accepted, and that every one is documented."""

import ast
import dataclasses
import inspect

import pytest

from funcppo.prover import config
from funcppo.prover.config import ProverTaskConfig


@pytest.mark.parametrize(
    "name",
    [
        "max_height",
        "max_depth",
        "max_successors",
        "embed_dim",
        "hidden_dim",
        "max_atoms",
    ],
)
def test_sizes_are_at_least_1(name):
    assert getattr(ProverTaskConfig(**{name: 1}), name) == 1
    with pytest.raises(ValueError, match=f"^{name}=0: expected 1 or more$"):
        ProverTaskConfig(**{name: 0})


@pytest.mark.parametrize(
    "name", ["n_residual_blocks", "negatives_per_positive", "smoothing"]
)
def test_counts_and_weights_are_not_negative(name):
    assert getattr(ProverTaskConfig(**{name: 0}), name) == 0
    with pytest.raises(ValueError, match=f"^{name}=-1: expected 0 or more$"):
        ProverTaskConfig(**{name: -1})


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_the_hard_negative_fraction_is_between_0_and_1(value):
    ProverTaskConfig(hard_negative_fraction=0.0)
    ProverTaskConfig(hard_negative_fraction=1.0)
    with pytest.raises(
        ValueError,
        match=f"hard_negative_fraction={value}: expected a fraction from 0 to 1",
    ):
        ProverTaskConfig(hard_negative_fraction=value)


def test_every_field_has_a_docstring_below_it():
    """The help of the command line is made of them."""
    body = ast.parse(inspect.getsource(config)).body
    (class_def,) = (
        node
        for node in body
        if isinstance(node, ast.ClassDef) and node.name == "ProverTaskConfig"
    )
    documented = set()
    for field, below in zip(class_def.body, class_def.body[1:]):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
            documented.add(field.target.id)
    assert documented == {
        field.name for field in dataclasses.fields(ProverTaskConfig)
    }
