"""The recount: examples worked by hand, the oracles over Python sets, and what it refuses."""

import math
from decimal import Decimal, localcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcppo.kg.ranking import recount
from funcppo.kg.ranking.recount import Atoms, Logic, RecountLimitError
from funcppo.kg.scores.score import parse
from tests import oracles

NEVER = math.inf
A, B, C, X, Y, Z = 1, 2, 3, 4, 5, 6  # three constants, three variables
EDGE, PATH = 1, 2
STEP = ((PATH, X, Y), (EDGE, X, Z), (EDGE, Z, Y))
FACTS = Atoms([(EDGE, A, B), (EDGE, B, A), (EDGE, B, C), (PATH, A, C)], 3)


def logic_of(*rules, identity=False):
    return Logic(rules=rules, n_constants=3, object_identity=identity)


# -- worked examples


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
    assert recount.expected_reciprocal_rank(1, 1) == (1 / 2 + 1 / 3) / 2
    last = recount.bound_ranks((PATH, 4), log_odds, 0.0)
    assert last == (range(4, 5), range(4, 5))
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
    assert parse(name).recount(confidences) == pytest.approx(
        exact_score(power, confidences), rel=1e-7
    )


def test_scores_without_a_rule_and_of_a_certain_one():
    for name in ("max-confidence", "noisy-or", "noisy-or@3"):
        again = parse(name).recount
        assert again([]) == again([0.0]) == -math.inf
        assert again([0.5, 1.0]) == math.inf
        assert again([0.75]) == pytest.approx(math.log(3))
    assert parse("max-confidence").recount([0.2, 0.5]) == 0.0
    for ending in ("", "@3"):
        of_best, of_all = (
            parse(f"noisy-or{part}{ending}") for part in ("-top-2", "")
        )
        found = of_best.recount([0.1, 0.5, 0.2, 0.7])
        assert found == of_all.recount([0.7, 0.5])


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
        recount.derive(logic, STEP, FACTS, deadline=-1.0, leave_one_out=False)
    with pytest.raises(RecountLimitError):
        recount.apply_steps(logic, FACTS, 1, max_atoms=5, deadline=NEVER)
    assert len(recount.apply_steps(logic, FACTS, 1, 6, NEVER).all) == 6
