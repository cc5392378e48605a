"""One application of each rule: equal to counting over Python sets, and to the counts in the rule files."""

from __future__ import annotations

import gzip
import itertools
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from funcppo.core.deadline import Deadline
from funcppo.kg.graph.loaders import load
from funcppo.kg.logic import consequences, joins, kb
from funcppo.kg.logic.consequences import (
    check_sampled_rows,
    collect_consequences,
    count_rules,
    iter_consequences,
    with_confidence,
)
from funcppo.kg.logic.joins import (
    RowBudget,
    RowBudgetExceeded,
    TimeBudgetExceeded,
)
from tests import oracles
from tests.learning import DATA
from tests.oracles import Program, programs

needs_data = pytest.mark.skipif(
    not DATA.is_dir(), reason=f"no data sets in {DATA}"
)
LIKES = 1
X, Y, Z = 4, 5, 6
# likes(X, Y) :- likes(Y, X).   likes(X, Y) :- likes(X, Z), likes(Z, Y).
FRIENDS = Program(
    3,
    (2,),
    ((LIKES, 1, 1), (LIKES, 1, 2), (LIKES, 2, 1), (LIKES, 2, 3)),
    (
        ((LIKES, X, Y), (LIKES, Y, X)),
        ((LIKES, X, Y), (LIKES, X, Z), (LIKES, Z, Y)),
    ),
)


def build(program):
    return kb.build(**program.arrays())


def pairs_of(found):
    return list(
        zip(
            found.rule.tolist(),
            [tuple(t for t in row if t) for row in found.atoms.tolist()],
        )
    )


def test_consequences_worked_by_hand():
    found = collect_consequences(*build(FRIENDS))
    assert {a[1:] for i, a in pairs_of(found) if i == 0} == {
        (1, 1),
        (2, 1),
        (1, 2),
        (3, 2),
    }
    assert {a[1:] for i, a in pairs_of(found) if i == 1} == {
        (1, 1),
        (1, 2),
        (2, 1),
        (2, 2),
        (1, 3),
    }
    facts = build(FRIENDS)[0].facts
    known = found.fact >= 0
    assert torch.equal(facts[found.fact[known]], found.atoms[known])
    assert {a[1:] for (_, a), is_known in zip(pairs_of(found), known.tolist()) if not is_known} == {
        (3, 2), (2, 2), (1, 3)
    }  # fmt: skip


def test_a_fact_left_out_does_not_derive_itself():
    """likes(1,1) follows by the first rule from itself alone; by the second from likes(1,2), likes(2,1).

    likes(1,2) follows by the second rule only through likes(1,1), likes(1,2), which holds it.
    """
    found = collect_consequences(*build(FRIENDS), leave_one_out=True)
    assert {a[1:] for i, a in pairs_of(found) if i == 0} == {
        (2, 1),
        (1, 2),
        (3, 2),
    }
    assert {a[1:] for i, a in pairs_of(found) if i == 1} == {
        (1, 1),
        (2, 2),
        (1, 3),
    }


def test_confidence_worked_by_hand():
    world, sizes = build(FRIENDS)
    world = with_confidence(world, count_rules(world, sizes))
    assert world.support.tolist() == [3.0, 3.0]
    assert world.body_pairs.tolist() == [4.0, 5.0]
    assert kb.rule_confidence(world).tolist() == pytest.approx([3 / 4, 3 / 5])
    assert kb.rule_confidence(
        world, leave_one_out=True
    ).tolist() == pytest.approx([2 / 3, 2 / 4])


def test_smoothed_confidence_worked_by_hand():
    """Without likes(1,1), which derives itself, the first rule is right for 2 of 3 pairs; the second for 1 of 3."""
    world, sizes = build(FRIENDS)
    counts = count_rules(world, sizes)
    assert [column.tolist() for column in counts] == [[3, 3], [4, 5], [1, 2]]
    world = with_confidence(world, counts, smoothing=5.0)
    assert kb.rule_confidence(world).tolist() == pytest.approx([2 / 8, 1 / 8])
    assert kb.rule_confidence(
        world, torch.tensor([True])
    ).tolist() == pytest.approx([1 / 7, 0])


@given(programs)
@settings(max_examples=150)
def test_consequences_are_the_heads_of_one_application(program):
    for leave_one_out in (False, True):
        for identity in (False, True):
            world, sizes = build(program)
            found = collect_consequences(
                world,
                sizes,
                leave_one_out=leave_one_out,
                object_identity=identity,
            )
            pairs, known = pairs_of(found), found.fact >= 0
            assert len(pairs) == len(set(pairs))
            assert set(pairs) == oracles.consequences(
                program, leave_one_out, identity
            )
            assert [a in program.facts for _, a in pairs] == known.tolist()
            assert torch.equal(
                world.facts[found.fact[known]], found.atoms[known]
            )


@given(programs)
@settings(max_examples=100)
def test_confidence_counts_each_derived_atom_once_a_rule(program):
    for smoothing, identity in itertools.product(
        (None, 0.0, 2.5), (False, True)
    ):
        pairs = oracles.consequences(program, smoothing is not None, identity)
        world, sizes = build(program)
        counts = count_rules(world, sizes, object_identity=identity)
        world = with_confidence(world, counts, smoothing)
        for i in range(len(program.rules)):
            heads = [a for j, a in pairs if j == i]
            assert world.body_pairs[i] == len(heads) + (smoothing or 0)
            assert world.support[i] == sum(a in program.facts for a in heads)


@given(programs)
@settings(max_examples=60)
def test_rules_come_one_by_one_in_the_order_asked_for(program):
    world, sizes = build(program)
    ids = list(reversed(range(len(program.rules))))
    parts = list(iter_consequences(world, sizes, rule_ids=ids))
    assert [
        set(part.rule.tolist()) <= {i}
        for i, part in zip(ids, parts, strict=True)
    ] == [True] * len(ids)
    whole = collect_consequences(world, sizes, rule_ids=ids)
    assert torch.equal(
        whole.atoms,
        torch.cat([world.facts[:0], *(part.atoms for part in parts)]),
    )


@given(programs)
@settings(max_examples=100)
def test_a_fact_kept_by_leave_one_out_is_derived_without_it(program):
    """The pair of a fact and a rule survives exactly when the rule still derives the fact from all the others."""
    world, sizes = build(program)
    kept = set(pairs_of(collect_consequences(world, sizes, leave_one_out=True)))
    for fact in program.facts:
        others = build(
            replace(program, facts=tuple(f for f in program.facts if f != fact))
        )
        assert {
            p for p in pairs_of(collect_consequences(*others)) if p[1] == fact
        } == {p for p in kept if p[1] == fact}


@needs_data
@pytest.mark.parametrize(
    ("name", "rules", "every"),
    [
        ("wn18rr", "rules_kns_amie_full.tsv", 1),
        ("wn18rr", "rules_rnnlogic.tsv", 60),
        ("family", "rules_rnnlogic.tsv", 4),
        ("fb15k-237", "rules_kns.tsv", 4),
        ("fb15k-237", "rules_rnnlogic_top.tsv.gz", 60),
    ],
)
def test_support_and_body_pairs_are_those_of_the_rule_file(
    name, rules, every, tmp_path
):
    """The columns train_support and train_body_pairs, counted elsewhere: exactly."""
    path = DATA / name / rules
    text = (
        gzip.decompress(path.read_bytes())
        if path.suffix == ".gz"
        else path.read_bytes()
    ).decode()
    comments, lines = [], []
    for line in text.splitlines(keepends=True):
        (comments if line.startswith("#") else lines).append(line)
    lines = lines[::every]
    some = tmp_path / path.name.removesuffix(".gz")
    some.write_text("".join([*comments, *lines]))
    data = load(DATA / name, some)
    assert len(data.rules) == len(lines)

    columns = np.array([line.split("\t")[1:3] for line in lines], dtype=float)
    world, sizes = _world(data)
    world = with_confidence(world, count_rules(world, sizes))
    assert np.array_equal(world.support, columns[:, 0])
    assert np.array_equal(world.body_pairs, columns[:, 1])


@needs_data
def test_the_known_number_of_fb15k_237_test_triples_is_derivable_in_one_step(
    monkeypatch,
):
    # Joins in few chunks, which are merged less often; `test_fixpoint.py` has many.
    monkeypatch.setattr(joins, "MAX_CHUNK_ROWS", 1 << 23)
    data = load(DATA / "fb15k-237", DATA / "fb15k-237" / "rules.txt")
    world, sizes = _world(data)
    _, asked = kb.sort_and_index_atoms(
        torch.from_numpy(data.test).to(torch.int64),
        sizes.n_predicates,
        sizes.n_constants,
    )
    derived = torch.zeros(len(asked[-1]), dtype=torch.bool)
    for part in iter_consequences(world, sizes):
        row = kb.find_atoms(asked, sizes, part.atoms)
        derived = derived.scatter(0, row[row >= 0], True)
    assert int(derived.sum()) == 9299


def _world(data):
    return kb.build(
        data.facts,
        data.rules,
        n_constants=data.n_constants,
        n_predicates=data.n_predicates,
    )


def test_a_sample_of_the_rules_tells_whether_all_make_too_many_rows(
    monkeypatch,
):
    """Sixteen rules alike, of which four are applied: each makes the same rows."""
    alike = ((LIKES, X, Y), (LIKES, X, Z), (LIKES, Z, Y))
    program = replace(FRIENDS, rules=(alike,) * 16)
    base, sizes = build(program)
    whole = RowBudget(sys.maxsize)
    for _ in iter_consequences(base, sizes, budget=whole):
        pass

    check = partial(check_sampled_rows, base, sizes)
    check(1)  # so few rules tell nothing
    monkeypatch.setattr(consequences, "MIN_SAMPLED_RULES", 4)
    monkeypatch.setattr(consequences, "SAMPLED_RULES_SHARE", 0.25)
    check(whole.n_rows)
    fewer = whole.n_rows - 4
    said = f"more than {fewer:,} rows of joins, by a random sample of 4 of 16 rules"
    with pytest.raises(RowBudgetExceeded, match=said):
        check(fewer)
    with pytest.raises(TimeBudgetExceeded):
        check(whole.n_rows, deadline=Deadline(at=0.0))
