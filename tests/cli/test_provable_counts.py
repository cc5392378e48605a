"""What is known of the data sets, counted by `provable`: shares at each height, and what is derived though false."""

from __future__ import annotations

import numpy as np
import pytest

from funcppo.kg.graph.loaders import load
from funcppo.kg.logic import fixpoint, kb
from tests.cli.runner import json_of, provable
from tests.learning import DATA

pytestmark = pytest.mark.skipif(
    not DATA.is_dir(), reason=f"no data sets in {DATA}"
)
REGIONS = ("africa", "americas", "asia", "europe", "oceania")


@pytest.mark.parametrize(
    ("name", "height", "shares"),
    [
        ("family_kns", "fixpoint", [0.764, 0.780, 0.781]),
        ("umls", "fixpoint", [0.242, 0.269, 0.274]),
        ("wn18rr", "2", [0.366, 0.383]),
    ],
)
def test_the_ceilings_are_those_known(name, height, shares, capsys):
    status, result = json_of(
        capsys, provable, str(DATA / name), "--height", height
    )
    assert status == 0 and result["complete"]
    found = [
        round(count / result["n_queries"], 3)
        for count in result["n_derivable_by_height"].values()
    ]
    assert found[: len(shares)] == shares
    assert all(share == found[-1] for share in found[len(shares) :])
    assert result["fixpoint"] == (height == "fixpoint")


def test_the_step_beyond_max_atoms_counts_the_split_as_if_it_were_held(capsys):
    folder = DATA / "family"
    options = (
        "--rules",
        str(folder / "rules_rnnlogic.tsv"),
        "--height",
        "1",
        "--max-atoms",
        "100000",
    )
    status, result = json_of(capsys, provable, str(folder), *options)
    assert (
        status,
        result["complete"],
        result["n_derivable_by_height"],
        len(result["n_atoms_after_step"]),
    ) == (
        0,
        False,
        {"1": 2803},
        1,
    )


def test_countries_s2_derives_hundreds_of_falsehoods():
    data = load(DATA / "countries_S2")
    world, sizes = kb.build(
        data.facts,
        data.rules,
        n_constants=data.n_constants,
        n_predicates=data.n_predicates,
    )
    model = fixpoint.least_model(
        world, sizes, max_height=None, max_atoms=10_000
    )
    true = set(
        map(tuple, np.concatenate([data.facts, data.valid, data.test]).tolist())
    )
    located = data.predicates.index("locatedIn") + 1
    regions = {data.entities.index(name) + 1 for name in REGIONS}
    false = [
        height
        for atom, height in zip(
            map(tuple, model.atoms.tolist()), model.height.tolist()
        )
        if atom[0] == located and atom[2] in regions and atom not in true
    ]
    assert (sum(height <= 1 for height in false), len(false)) == (10, 408)
