"""T_P by DuckDB derives what T_P in memory derives, in the same steps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from funcppo.kg.logic import duckdb_fixpoint, fixpoint, kb
from tests.kg.logic.test_fixpoint import EDGE, GRAPH, LOOP, MANY, PATH
from tests.oracles import programs

pytest.importorskip("duckdb", reason="DuckDB is not installed")


def compare(program, max_height, object_identity):
    """Count the steps of a program in both ways, with the heights of all atoms and of some that are underivable."""
    built = kb.build(**program.arrays())
    options = {"max_height": max_height, "object_identity": object_identity}
    model = fixpoint.least_model(*built, max_atoms=MANY, **options)
    others = model.atoms.long().clone()
    others[:, 1:] = others[:, 1:].roll(1, 0)
    atoms = torch.cat([model.atoms.long(), others])
    counts = duckdb_fixpoint.count_steps(*built, atoms, **options)
    assert counts.n_atoms_after_step == model.n_atoms_after_step
    assert counts.reached_fixpoint == model.reached_fixpoint
    assert torch.equal(counts.height, fixpoint.atom_height(model, atoms))
    return counts


def test_a_closure_worked_by_hand():
    built = kb.build(**GRAPH.arrays())
    width = built[1].atom_width
    atoms = torch.zeros((3, width), dtype=torch.int64)
    atoms[0, :3] = torch.tensor([EDGE, 1, 2])
    atoms[1, :3] = torch.tensor([PATH, 1, 4])  # 1 -> 2 -> 3 -> 4
    atoms[2, :2] = torch.tensor([LOOP, 4])
    counts = duckdb_fixpoint.count_steps(*built, atoms, max_height=None)
    assert counts.height.tolist() == [0, 3, -1]
    assert counts.reached_fixpoint


@pytest.mark.parametrize("max_height", [0, 1, 2, None])
def test_a_closure_equals_that_in_memory(max_height):
    compare(GRAPH, max_height, object_identity=False)


@settings(max_examples=25)
@given(programs, st.sampled_from([1, 2, None]), st.booleans())
def test_a_program_equals_that_in_memory(program, max_height, object_identity):
    compare(program, max_height, object_identity)
