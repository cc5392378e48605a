"""The recount: examples worked by hand, the oracles over Python sets, and what it refuses."""

import dataclasses
import itertools
import math
from decimal import Decimal, localcontext
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcppo.kg.logic.proof import Node, Proof
from funcppo.kg.ranking import recount
from funcppo.kg.ranking.recount import (
    Atoms,
    Logic,
    RankCounts,
    RecountLimitError,
)
from tests import oracles

NEVER = math.inf
A, B, C, X, Y, Z = 1, 2, 3, 4, 5, 6  # three constants, three variables
EDGE, PATH = 1, 2
STEP = ((PATH, X, Y), (EDGE, X, Z), (EDGE, Z, Y))
FACTS = Atoms([(EDGE, A, B), (EDGE, B, A), (EDGE, B, C), (PATH, A, C)], 3)


def logic_of(*rules, identity=False):
    return Logic(rules=rules, n_constants=3, object_identity=identity)


# -- worked examples


def test_heads_are_counted_once_and_compared_with_the_facts():
    logic = logic_of(STEP)
    args = (logic, STEP, FACTS, NEVER)
    assert recount.derive(*args, leave_one_out=False) == {
        (PATH, A, A),
        (PATH, A, C),
        (PATH, B, B),
    }
    assert recount.count_rule(*args, leave_one_out=False) == (1, 3)
    distinct = logic_of(STEP, identity=True)
    assert recount.count_rule(
        distinct, STEP, FACTS, NEVER, leave_one_out=False
    ) == (1, 1)


def test_object_identity_keeps_variables_apart_from_constants_of_the_rule():
    rule = ((PATH, X, C), (EDGE, B, X))
    for identity, heads in (
        (False, {(PATH, A, C), (PATH, C, C)}),
        (True, {(PATH, A, C)}),
    ):
        logic = logic_of(rule, identity=identity)
        assert (
            recount.derive(logic, rule, FACTS, NEVER, leave_one_out=False)
            == heads
        )


def test_a_fact_does_not_count_where_it_derives_itself():
    rule = ((EDGE, X, Y), (EDGE, X, Y), (PATH, X, Z))
    counts = [
        recount.count_rule(
            logic_of(rule), rule, FACTS, NEVER, leave_one_out=leave
        )
        for leave in (False, True)
    ]
    assert counts == [(1, 1), (0, 0)]


def walks_of(logic, query, side, left_out=frozenset(), facts=FACTS):
    return recount.walk_probabilities(
        logic, logic.rules[0], facts, query, side, left_out, NEVER
    )


def test_a_random_walk_divides_by_the_facts_that_are_not_left_out():
    """path(X, Y) <- edge(X, Z), edge(Z, Y): from a to b, and from there to a or to c."""
    half = Fraction(1, 2)
    query = (PATH, A, C)
    assert walks_of(logic_of(STEP), query, 2) == {A: half, C: half}
    assert walks_of(logic_of(STEP), query, 1) == {A: Fraction(1)}
    # Under object identity the walk ends where it comes back.
    strict = dataclasses.replace(logic_of(STEP), object_identity=True)
    assert walks_of(strict, query, 2) == {C: half}
    assert walks_of(logic_of(STEP), query, 2, {(EDGE, B, A)}) == {
        C: Fraction(1)
    }
    assert walks_of(logic_of(STEP), query, 2, {(EDGE, A, B)}) == {}


@pytest.mark.parametrize(
    "rule",
    [
        ((PATH, X, Y), (EDGE, X, Z), (EDGE, Y, Z), (EDGE, X, Y)),  # two ways
        ((PATH, X, Y), (EDGE, X, Y), (EDGE, Y, Z)),  # goes on
        ((PATH, X, Y), (EDGE, X, A), (EDGE, A, Y)),
        ((PATH, X, C), (EDGE, X, C)),
        ((PATH, X, X), (EDGE, X, X)),
        ((PATH, X, Y), (EDGE, X, Y), (EDGE, Z)),
    ],
)
def test_a_body_that_is_no_path_has_no_walk(rule):
    assert walks_of(logic_of(rule), (PATH, A, C), 2) is None


@given(oracles.programs, st.booleans())
def test_walks_end_where_groundings_do(program, identity):
    """And their probabilities are at most 1 in all."""
    logic = Logic(
        rules=program.rules,
        n_constants=program.n_constants,
        object_identity=identity,
    )
    facts = Atoms(program.facts, program.n_constants)
    for rule in program.rules:
        if len(rule[0]) != 3:
            continue
        for side, entity in itertools.product((1, 2), range(1, 4)):
            query = (rule[0][0], entity, entity)
            arguments = logic, rule, facts, query, side, set(), NEVER
            walks = recount.walk_probabilities(*arguments)
            if walks is not None:
                assert set(walks) == set(recount.count_groundings(*arguments))
                assert sum(walks.values()) <= 1
                assert min(walks.values(), default=1) > 0


def test_candidates_are_derived_on_both_sides():
    logic = logic_of(STEP, ((PATH, X, A), (EDGE, X, Z)))
    query = (PATH, A, C)
    tails = recount.find_derivers(logic, FACTS, query, 2, NEVER)
    heads = recount.find_derivers(logic, FACTS, query, 1, NEVER)
    assert (tails, heads) == ({A: [0, 1], C: [0]}, {A: [0]})
    candidates = recount.list_candidates(query, 2, [A, B, C], FACTS.all)
    assert candidates == [(PATH, A, A), (PATH, A, B), (PATH, A, C)]
    known = FACTS.all | {(PATH, A, A)}
    assert recount.list_candidates(query, 2, [A, B, C], known) == [
        (PATH, A, B),
        (PATH, A, C),
    ]


def test_ranks_follow_from_scores_on_the_grid():
    scores = [0.0, 3e-5, 2.0, -1.0, -math.inf]
    log_odds = {(PATH, i): score for i, score in enumerate(scores)}
    counts = recount.count_ranks((PATH, 0), log_odds)
    assert counts == RankCounts(1, 1, 5)
    assert recount.expected_reciprocal_rank(counts) == (1 / 2 + 1 / 3) / 2
    assert recount.count_ranks((PATH, 4), log_odds) == RankCounts(4, 0, 5)
    exact = recount.bound_ranks((PATH, 0), log_odds, 1e-9)
    assert exact == (range(1, 2), range(2, 3))
    rough = recount.bound_ranks((PATH, 0), log_odds, 4e-5)
    assert rough == (range(1, 3), range(2, 3))


# -- scores


def exact_score(power, confidences):
    """The log-odds of noisy-or@P with 2,000 digits."""
    with localcontext() as context:
        context.prec = 2000
        wrong = Decimal(1)
        for confidence in confidences:
            wrong *= 1 - Decimal(confidence) ** power
        score = (1 - wrong) ** (Decimal(1) / power)
        return float((score / (1 - score)).ln())


@pytest.mark.parametrize("power", [1, 2, 3])
@pytest.mark.parametrize(
    "confidences",
    [[1e-6], [0.3, 0.6], [0.99] * 4, [0.9] * 40, [0.9] * 300, [1 - 1e-9, 0.1]],
    ids=str,
)
def test_scores_keep_their_digits_at_both_ends(power, confidences):
    name = f"noisy-or@{power}" if power > 1 else "noisy-or"
    # the relative error of 1 - c^P is up to 3e-16 / 3e-9
    assert recount.rule_score(name, confidences) == pytest.approx(
        exact_score(power, confidences), rel=1e-7
    )


def test_scores_without_a_rule_and_of_a_certain_one():
    for name in ("max-confidence", "noisy-or", "noisy-or@3"):
        assert recount.rule_score(name, []) == -math.inf
        assert recount.rule_score(name, [0.0]) == -math.inf
        assert recount.rule_score(name, [0.5, 1.0]) == math.inf
        assert recount.rule_score(name, [0.75]) == pytest.approx(math.log(3))
    assert recount.rule_score("max-confidence", [0.2, 0.5]) == 0.0
    for ending in ("", "@3"):
        assert recount.rule_score(
            f"noisy-or-top-2{ending}", [0.1, 0.5, 0.2, 0.7]
        ) == recount.rule_score(f"noisy-or{ending}", [0.7, 0.5])


# -- the oracles


def plain(program, identity):
    return (
        Logic(
            rules=program.rules,
            n_constants=program.n_constants,
            object_identity=identity,
        ),
        Atoms(program.facts, program.n_constants),
    )


@given(oracles.programs, st.booleans(), st.booleans())
def test_rules_derive_what_the_oracle_derives(program, leave_one_out, identity):
    logic, facts = plain(program, identity)
    expected = oracles.consequences(program, leave_one_out, identity)
    for i, rule in enumerate(program.rules):
        heads = recount.derive(
            logic, rule, facts, NEVER, leave_one_out=leave_one_out
        )
        assert heads == {head for rule_id, head in expected if rule_id == i}


@given(oracles.programs, st.integers(0, 3), st.booleans())
def test_steps_derive_what_the_oracle_derives(program, n_steps, identity):
    logic, facts = plain(program, identity)
    atoms = recount.apply_steps(logic, facts, n_steps, 10**6, NEVER)
    assert atoms.all == set(oracles.least_model(program, n_steps, identity))


# -- limits


def test_the_recount_stops_at_its_limits():
    logic = logic_of(STEP)
    with pytest.raises(RecountLimitError):
        recount.count_rule(
            logic, STEP, FACTS, deadline=-1.0, leave_one_out=False
        )
    with pytest.raises(RecountLimitError):
        recount.apply_steps(logic, FACTS, 1, max_atoms=5, deadline=NEVER)
    assert len(recount.apply_steps(logic, FACTS, 1, 6, NEVER).all) == 6


# -- proofs

LOGIC = logic_of(STEP, ((PATH, X, Y), (PATH, X, Z), (EDGE, Z, Y)))


def node(goal, rule=None, substitution=(), children=()):
    return Node(
        goal=goal,
        rule=rule,
        substitution=substitution,
        probability=None,
        children=children,
    )


PROOF = Proof(
    nodes=(
        node((PATH, B, A), 1, ((X, B), (Y, A), (Z, B)), (1, 2)),
        node((PATH, B, B), 0, ((X, B), (Y, B), (Z, A)), (2, 3)),
        node((EDGE, B, A)),
        node((EDGE, A, B)),
    )
)


def errors(proof, height=2, logic=LOGIC):
    return recount.proof_errors(logic, proof, FACTS.all, height)


def tampered(position, **fields):
    nodes = list(PROOF.nodes)
    nodes[position] = dataclasses.replace(nodes[position], **fields)
    return Proof(nodes=tuple(nodes))


def test_a_proof_holds():
    assert errors(PROOF) == []


@pytest.mark.parametrize(
    "proof, expected",
    [
        (tampered(3, goal=(EDGE, C, B)), "not a fact"),
        (tampered(2, goal=(EDGE, B, C)), "no instance"),
        (tampered(1, rule=1), "no instance"),
        (tampered(1, rule=7), "not there"),
        (tampered(0, children=(1, 9)), "not there"),
        (tampered(0, children=(1,)), "no instance"),
        (tampered(1, substitution=((X, B), (Y, B), (Z, C))), "no instance"),
        (tampered(1, substitution=((X, B), (Y, B))), "no instance"),
        (tampered(1, rule=None, children=()), "not a fact"),
    ],
)
def test_a_tampered_proof_does_not_hold(proof, expected):
    assert expected in " ".join(errors(proof))


def test_a_proof_that_supports_itself_does_not_hold():
    circular = node((PATH, A, C), 0, ((X, A), (Y, C), (Z, B)), (0, 0))
    assert "the root supports itself" in errors(Proof(nodes=(circular,)))


def test_the_root_is_no_leaf_of_its_own_proof():
    assert errors(Proof(nodes=(node((PATH, A, C)),))) != []


def test_height_and_object_identity_are_kept():
    assert "height 2" in errors(PROOF, height=1)[0]
    distinct = dataclasses.replace(LOGIC, object_identity=True)
    assert "no instance" in errors(PROOF, logic=distinct)[0]
