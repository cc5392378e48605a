"""The score weighs what a method says, and the record has the gains."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from experiments.benchmarks import walk_feature
from funcppo import data, random
from funcppo.data import writers
from funcppo.logic.triple_index import TAIL
from funcppo.prover import aggregation, evidence
from funcppo.prover.aggregation import AggregationConfig
from funcppo.prover.evidence import EvidenceConfig
from tests.logic.test_firings import ask
from tests.prover.test_aggregation import CLUB, MEETS
from tests.prover.test_evidence import build


def scores(program, rows, method, seventh=0.0):
    """The scores of all candidates by weights that differ, and the last feature's, where there are seven."""
    built, sizes, facts = build(program, with_walks=True)
    listed = evidence.collect_evidence(
        built, sizes, facts, ask(rows), None, EvidenceConfig()
    )
    world = aggregation.make_world(built, sizes, facts)
    cfg = AggregationConfig(
        sizes=sizes,
        n_shapes=aggregation.n_shapes(world),
        uses_walks=method == "walk",
    )
    with walk_feature.weighing(method):
        params = aggregation.init(cfg, random.key(0))
        weight = torch.linspace(0.5, 1.0, 6).expand_as(
            params.feature_weight[..., :6]
        )
        if params.feature_weight.shape[-1] == 7:
            last = torch.full_like(weight[..., :1], seventh)
            weight = torch.cat([weight, last], -1)
        params = params._replace(feature_weight=weight)
        return aggregation.score(cfg, world, params, aggregation.whole(listed))


def test_each_method_weighs_its_features():
    rows = [(MEETS, TAIL, 1, 0)]
    club = replace(CLUB, rules=CLUB.rules[:1])  # the one that is a path
    by_share = scores(club, rows, "share")
    by_walk = scores(club, rows, "walk")
    neither = scores(club, rows, "share and walk", seventh=0.0)
    both = scores(club, rows, "share and walk", seventh=1.5)

    # shares 2/3 and 1/3, walks 3/4 and 1/4; the fifth weight is .9
    walk, share = torch.tensor([0.75, 0.25]), torch.tensor([2 / 3, 1 / 3])
    scale = aggregation.LOG_SCALE
    # what a score adds to the sum of its firings before the logarithm
    atol = 1e-4
    torch.testing.assert_close(
        by_walk - by_share,
        0.9 * (walk / share).log() / scale,
        rtol=0.0,
        atol=atol,
    )
    torch.testing.assert_close(neither, by_share)
    torch.testing.assert_close(
        both - by_share, 1.5 * walk.log() / scale, rtol=0.0, atol=atol
    )


def test_a_record_has_a_row_a_method(tmp_path, monkeypatch):
    family = data.load("family_tree:30:0")
    folder = tmp_path / "family"
    folder.mkdir()
    for split in ("train", "valid", "test"):
        lines = [
            f"{family.entities[head - 1]}\t{family.predicates[p - 1]}\t{family.entities[tail - 1]}"
            for p, head, tail in getattr(family, split).tolist()
        ]
        (folder / f"{split}.txt").write_text("\n".join(lines) + "\n")
    rules = tmp_path / "rules.txt"
    lines = [writers.format_rule(family, rule) for rule in family.rules]
    rules.write_text("".join(f"0\t{line}\n" for line in lines))
    record = tmp_path / "record.json"
    monkeypatch.setattr(walk_feature, "SETS", ("family",))
    arguments = ["--data", tmp_path, "--only", "family", "--rules", rules]
    arguments += ["--out", record, "--seeds", 2]
    monkeypatch.setattr("sys.argv", ["x", *map(str, arguments)])
    walk_feature.main()

    rows = json.loads(record.read_text())["rows"]
    assert [row["method"] for row in rows] == list(walk_feature.METHODS)
    for row in rows:
        assert len(row["valid_mrr"]) == len(row["chosen"]) == 2
        gain = sum(row["valid_mrr"]) / 2 - sum(rows[0]["valid_mrr"]) / 2
        assert row["valid_gain"] == pytest.approx(gain)
        assert row["n_valid"] == 2 * len(family.valid)
