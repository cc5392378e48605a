"""A run before its first update."""

from dataclasses import replace

import pytest

from funcppo.kg.graph import loaders
from funcppo.kg.run import run_start
from tests.kg.run.runs import CONFIG, trained


def test_negatives_are_derived_where_t_p_is_held_in_part(tmp_path):
    dataset = "family_tree:60:3"
    n_facts = len(loaders.load(dataset).facts)
    prover = replace(CONFIG.prover, max_atoms=n_facts + 1)
    config = replace(CONFIG, dataset=dataset, prover=prover)
    run = run_start.prepare_run(config, tmp_path, resume=False)
    assert run.run_config.prover.hard_negative_fraction == 1.0
    assert any(note.startswith("all negatives are") for note in run.notes)
    trained(run, tmp_path)

    # What is set stays, and none are needed without negatives.
    for change in (
        {"hard_negative_fraction": 0.5},
        {"negatives_per_positive": 0},
        {"max_atoms": 1000 * n_facts},
    ):
        config = replace(
            CONFIG, dataset=dataset, prover=replace(prover, **change)
        )
        if "hard_negative_fraction" in change:
            with pytest.raises(ValueError, match="hard-negative-fraction 1"):
                run_start.prepare_run(config, tmp_path, resume=False)
            continue
        run = run_start.prepare_run(config, tmp_path, resume=False)
        assert run.run_config.prover == config.prover
