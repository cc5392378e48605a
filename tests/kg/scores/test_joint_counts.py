"""What pairs of rules derive together: by hand, equal to sets of atoms, and of a sample of the atoms."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from hypothesis import assume, given, settings

from funcppo.kg.logic import joins, kb
from funcppo.kg.logic.consequences import count_rules, with_confidence
from funcppo.kg.scores import joint_counts
from tests import oracles
from tests.oracles import Program, programs

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


def build(program, **settings):
    world, sizes = kb.build(**program.arrays())
    world = with_confidence(world, count_rules(world, sizes, **settings))
    return world, sizes


def count_sets(program, found):
    """The counts of each rule, and those of each pair of rules, from the sets of atoms that they derive."""
    n_rules = len(program.rules)
    derived = [{a for i, a in found if i == rule} for rule in range(n_rules)]
    pairs = {
        (i, j): (len(both), len(both & set(program.facts)))
        for i, j in combinations(range(n_rules), 2)
        if (both := derived[i] & derived[j])
    }
    return [len(atoms) for atoms in derived], pairs


def as_dictionary(joint):
    n_rules = len(joint.n_derived)
    return {
        (pair // n_rules, pair % n_rules): (both, facts)
        for pair, both, facts in zip(
            *(c.tolist() for c in (joint.pair, joint.n_both, joint.n_facts)),
            strict=True,
        )
    }


def test_by_hand():
    """The first rule derives (1,1), (2,1), (1,2) and (3,2), the second (1,1), (1,2), (2,1), (2,2) and (1,3)."""
    joint = joint_counts.count_joint(*build(FRIENDS))
    assert joint.n_derived.tolist() == [4, 5]
    assert as_dictionary(joint) == {(0, 1): (3, 3)}
    joint = joint_counts.count_joint(*build(FRIENDS), leave_one_out=True)
    assert joint.n_derived.tolist() == [3, 3]
    assert as_dictionary(joint) == {}


@given(programs)
@settings(max_examples=100)
def test_counts_are_those_of_sets_of_atoms(program):
    for leave_one_out in (False, True):
        for identity in (False, True):
            joint = joint_counts.count_joint(
                *build(program, object_identity=identity),
                object_identity=identity,
                leave_one_out=leave_one_out,
            )
            found = oracles.consequences(program, leave_one_out, identity)
            n_derived, pairs = count_sets(program, found)
            assert joint.n_derived.tolist() == n_derived
            assert as_dictionary(joint) == pairs


@given(programs)
@settings(max_examples=50)
def test_counts_do_not_depend_on_the_size_of_chunks(program):
    want = joint_counts.count_joint(*build(program))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joins, "MAX_CHUNK_ROWS", 2)
        got = joint_counts.count_joint(*build(program))
    for got_column, want_column in zip(got[:-1], want[:-1], strict=True):
        assert torch.equal(got_column, want_column)
    assert got.n_strata == want.n_strata == 1


@given(programs)
@settings(max_examples=100)
def test_pairs_are_found_in_either_order(program):
    joint = joint_counts.count_joint(*build(program))
    n_rules = len(program.rules)
    assume(n_rules > 1)
    _, pairs = count_sets(program, oracles.consequences(program, False))
    one, other = torch.combinations(torch.arange(n_rules)).unbind(1)
    for first, second in ((one, other), (other, one)):
        shared = joint_counts.find_shared(joint, first, second)
        want = [
            pairs.get(pair, (0, 0))
            for pair in zip(one.tolist(), other.tolist())
        ]
        assert list(zip(*(c.tolist() for c in shared))) == want


def test_a_sample_holds_the_same_atoms_for_all_rules():
    """A path of 400 edges, two rules that derive the same atoms, one that derives others; half of the atoms count."""
    edges = tuple((1, i, i + 1) for i in range(1, 400))
    x, y, z = 401, 402, 403
    step = ((2, x, y), (1, x, y))
    rules = (step, step, ((2, x, y), (1, x, z), (1, z, y)))
    program = Program(400, (2, 2), edges, rules)
    world, sizes = build(program)
    exact = joint_counts.count_joint(world, sizes)
    assert exact.n_derived.tolist() == [399, 399, 398]
    assert as_dictionary(exact) == {(0, 1): (399, 0)}
    assert joint_counts.count_strata(world, 600) == 2
    sampled = joint_counts.count_joint(world, sizes, max_derivations=600)
    n_derived = sampled.n_derived.tolist()
    assert as_dictionary(sampled) == {(0, 1): (n_derived[0], 0)}
    assert n_derived[0] == n_derived[1] != 399
    # twice a binomial number of 399: its standard deviation is 20
    assert n_derived == pytest.approx([399, 399, 398], abs=100)


def test_a_relation_with_many_pairs_is_sampled_and_others_are_not(monkeypatch):
    """Four equal rules of one relation make 6 pairs of each of 399 atoms; two rules of another make one."""
    edges = tuple((1, i, i + 1) for i in range(1, 400))
    x, y = 401, 402
    rules = (*[((2, x, y), (1, x, y))] * 4, *[((3, x, y), (1, x, y))] * 2)
    world, sizes = build(Program(400, (2, 2, 2), edges, rules))
    assert joint_counts.count_joint(world, sizes).n_strata == 1

    monkeypatch.setattr(joint_counts, "MAX_COUNTED_PAIRS", 1000)
    n_done = []
    joint = joint_counts.count_joint(
        world, sizes, progress=lambda n, _: n_done.append(n)
    )
    assert joint.n_strata == 4 and n_done == [1, 2, 3, 4, 5, 6]
    counts = as_dictionary(joint)
    assert counts[4, 5] == (399, 0) and len(counts) == 7
    n_sampled = counts[0, 1][0]
    assert n_sampled % 4 == 0 and 6 * n_sampled // 4 <= 1000
    # four times a binomial number of 399 with a share of a quarter: its standard deviation is 35
    assert n_sampled == pytest.approx(399, abs=175)
    assert {counts[i, j] for i in range(4) for j in range(i + 1, 4)} == {
        (n_sampled, 0)
    }
