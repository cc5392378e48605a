"""A walk ends where walks along single facts end, and the score weighs what a method says."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from experiments.benchmarks import walk_feature
from funcppo import data, random
from funcppo.data import writers
from funcppo.logic import chains
from funcppo.logic.rules import Rule
from funcppo.logic.triple_index import HEAD, TAIL
from funcppo.prover import aggregation, evidence
from funcppo.prover.aggregation import AggregationConfig
from funcppo.prover.evidence import EvidenceConfig
from tests.logic.test_firings import all_questions, ask, unknown_facts
from tests.oracles import Program, programs
from tests.prover.test_evidence import build

LIKES, MEETS = 1, 2
X, Y, Z = 6, 7, 8
# meets(X, Y) <- likes(X, Z), likes(Z, Y).
CLUB = Program(
    5,
    (2, 2),
    ((LIKES, 1, 2), (LIKES, 1, 3), (LIKES, 2, 4), (LIKES, 3, 4), (LIKES, 3, 5)),
    (((MEETS, X, Y), (LIKES, X, Z), (LIKES, Z, Y)),),
)


def walks_of(program, rows, left_out, identity=False):
    """{(question, candidate, rule): probability of a walk}."""
    built, sizes, facts = build(program)
    cfg = EvidenceConfig(left_out=left_out, object_identity=identity)
    listed = evidence.collect_evidence(
        built, sizes, facts, ask(rows), None, cfg
    )
    walk = walk_feature.walk_probability(built, sizes, listed, left_out)
    row = torch.repeat_interleave(listed.firing_offsets.diff())
    columns = (listed.question[row], listed.entity[row], listed.rule)
    keys = zip(*(column.tolist() for column in columns))
    return dict(zip(keys, walk.tolist(), strict=True))


def walk_by_hand(facts, steps, start):
    """{entity: probability}, one fact after the other."""
    here = {start: 1.0}
    for step in steps:
        predicate, is_backward = divmod(step, 2)
        there: dict[int, float] = {}
        for entity, chance in here.items():
            ends = [
                fact[HEAD if is_backward else TAIL]
                for fact in facts
                if len(fact) == 3
                and fact[0] == predicate
                and fact[TAIL if is_backward else HEAD] == entity
            ]
            for end in ends:
                there[end] = there.get(end, 0.0) + chance / len(ends)
        here = there
    return here


def test_a_walk_prefers_the_end_of_narrow_ways():
    rows = [(MEETS, TAIL, 1, 0), (MEETS, HEAD, 4, 0)]
    assert walks_of(CLUB, rows, "fact") == {
        # From 1 to 2 or 3; from 2 to 4, from 3 to 4 or 5: the share of 4 is two thirds.
        (0, 4, 0): 0.75,
        (0, 5, 0): 0.25,
        (1, 1, 0): 1.0,
    }


@given(programs, st.sampled_from(["fact", "pair"]), st.booleans())
@settings(max_examples=100)
def test_walks_are_those_along_single_facts(program, left_out, identity):
    rows = all_questions(program)
    assume(rows and program.rules)
    found = walks_of(program, rows, left_out, identity)
    for (question, candidate, i), walk in found.items():
        head, *body = program.rules[i]
        rule = Rule(i, head, tuple(body))
        steps = chains.chain_steps(rule, program.n_constants)
        if steps is None:
            assert walk == 0.0
            continue
        _, side, entity, _ = rows[question]
        if side == HEAD:
            steps = tuple(step ^ 1 for step in reversed(steps))
        is_unknown = unknown_facts(rows[question], left_out)
        facts = [fact for fact in program.facts if not is_unknown(fact)]
        expected = walk_by_hand(facts, steps, entity)[candidate]
        # sums of a few products of doubles, in another order
        assert walk == pytest.approx(expected, rel=1e-9)


def scores(program, rows, method, seventh=0.0):
    """The scores of all candidates by weights that differ, and the last feature's, where there are seven."""
    built, sizes, facts = build(program)
    listed = evidence.collect_evidence(
        built, sizes, facts, ask(rows), None, EvidenceConfig()
    )
    world = aggregation.make_world(built, sizes, facts)
    cfg = AggregationConfig(sizes=sizes, n_shapes=aggregation.n_shapes(world))
    listed = walk_feature.add_walks(built, sizes, listed, "fact", method)
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
    by_share = scores(CLUB, rows, "share")
    by_walk = scores(CLUB, rows, "walk")
    neither = scores(CLUB, rows, "share and walk", seventh=0.0)
    both = scores(CLUB, rows, "share and walk", seventh=1.5)

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
