"""The counts that are known of the models of the data sets."""

from __future__ import annotations

import pytest
import torch

from funcppo.kg.graph.loaders import load
from funcppo.kg.logic import fixpoint, kb
from tests.learning import DATA

pytestmark = pytest.mark.skipif(
    not DATA.is_dir(), reason=f"no data sets in {DATA}"
)
S2 = (1062, 1261, 1516, 1785, 2049)


@pytest.mark.parametrize(
    ("name", "rules", "counts", "steps", "last", "tests"),
    [
        ("countries_S1", "rules.txt", (1110, 1158), 1, 1158, [24]),
        ("countries_S2", "rules.txt", S2, 18, 3517, [23, 24]),
        ("countries_S3", "rules.txt", (978, *S2[1:]), 18, 3517, [23, 24]),
        (
            "countries_S3",
            "rules_ntp_variant.txt",
            (978, 1474, 2006, 2535, 2947),
            10,
            3517,
            [18, 24],
        ),
    ],
)
def test_the_countries_have_their_known_models(
    name, rules, counts, steps, last, tests
):
    data = load(DATA / name, DATA / name / rules)
    model, height = _model_of_data(data, None)
    assert model.n_atoms_after_step[: len(counts)] == counts
    assert (
        len(model.n_atoms_after_step) - 1,
        model.n_atoms_after_step[-1],
    ) == (steps, last)
    assert [
        int(((height >= 0) & (height <= h)).sum())
        for h in range(1, len(tests) + 1)
    ] == tests


@pytest.mark.parametrize(
    ("name", "rules", "derived"),
    [
        ("wn18rr", "rules.txt", 1146),
        ("family", "rules.txt", 2210),
        ("family", "rules_rnnlogic.tsv", 2803),
        ("umls", "rules.txt", 160),
    ],
)
def test_the_known_number_of_test_triples_is_derivable_in_one_step(
    name, rules, derived
):
    model, height = _model_of_data(load(DATA / name, DATA / name / rules), 1)
    assert model.complete and int((height >= 0).sum()) == derived


def test_an_explosion_stops_at_max_atoms():
    data = load(DATA / "wn18rr", DATA / "wn18rr" / "rules.txt")
    world, sizes = _world(data)
    model = fixpoint.least_model(
        world, sizes, max_height=3, max_atoms=1_000_000
    )
    assert model.n_atoms_after_step == (86835, 203870, 454462)
    assert (
        model.stop_reason
        == "stopped at 454462 atoms: step 3 exceeds max_atoms 1000000, unknown beyond"
    )


def _world(data):
    return kb.build(
        data.facts,
        data.rules,
        n_constants=data.n_constants,
        n_predicates=data.n_predicates,
    )


def _model_of_data(data, max_height):
    model = fixpoint.least_model(
        *_world(data), max_height=max_height, max_atoms=100_000_000
    )
    return model, fixpoint.atom_height(model, torch.from_numpy(data.test))
