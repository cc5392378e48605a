"""What is known of the data sets, counted by `provable`: shares at each height, and what is derived though false."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from funcppo.data import load
from funcppo.logic import fixpoint, kb
from tests.cli.runner import json_of, provable

DATA = Path(os.environ.get("FUNCPPO_DATA", Path(__file__).parents[2] / "../shared/data"))
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason=f"no data sets in {DATA}")
REGIONS = ("africa", "americas", "asia", "europe", "oceania")


@pytest.mark.parametrize(
    ("name", "height", "shares"),
    [
        ("family_kns", "1", [0.764]),
        ("family_kns", "2", [0.764, 0.780]),
        ("family_kns", "fixpoint", [0.764, 0.780, 0.781]),
        ("umls", "1", [0.242]),
        ("umls", "fixpoint", [0.242, 0.269, 0.274]),
        ("wn18rr", "2", [0.366, 0.383]),
    ],
)
def test_the_ceilings_are_those_known(name, height, shares, capsys):
    status, result = json_of(capsys, provable, str(DATA / name), "--height", height)
    assert status == 0 and result["complete"]
    found = [round(count / result["n_queries"], 3) for count in result["derivable"].values()]
    assert found[: len(shares)] == shares
    assert all(share == found[-1] for share in found[len(shares) :])
    assert result["fixpoint"] == (height == "fixpoint")


@pytest.mark.parametrize(
    ("name", "rules", "height", "derivable", "atoms"),
    [
        ("wn18rr", "rules.txt", "1", 1146, 203870),
        ("family", "rules.txt", "1", 2210, 34572),
        ("family", "rules_rnnlogic.tsv", "1", 2803, 489451),
        ("umls", "rules.txt", "1", 160, 5888),
    ],
)
def test_the_command_counts_what_the_rules_derive(name, rules, height, derivable, atoms, capsys):
    folder = DATA / name
    _, result = json_of(capsys, provable, str(folder), "--rules", str(folder / rules), "--height", height)
    assert (result["derivable"], result["atoms"][1]) == ({"1": derivable}, atoms)


def test_countries_s2_derives_hundreds_of_falsehoods():
    data = load(DATA / "countries_S2")
    world, sizes = kb.build(data.facts, data.rules, n_constants=data.n_constants, n_predicates=data.n_predicates)
    model = fixpoint.least_model(world, sizes, max_height=None, budget=10_000)
    true = set(map(tuple, np.concatenate([data.facts, data.valid, data.test]).tolist()))
    located = data.predicates.index("locatedIn") + 1
    regions = {data.entities.index(name) + 1 for name in REGIONS}
    false = [
        height
        for atom, height in zip(map(tuple, model.atoms.tolist()), model.height.tolist())
        if atom[0] == located and atom[2] in regions and atom not in true
    ]
    assert (sum(height <= 1 for height in false), len(false)) == (10, 408)
