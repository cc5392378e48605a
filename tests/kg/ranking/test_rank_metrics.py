"""Ranks and metrics; the oracles are definitions over Python lists, and PyKEEN's own numbers."""

import itertools
import json
import math
import pathlib
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from funcppo.kg.ranking import rank_metrics
from funcppo.kg.ranking.rank_metrics import (
    CERTAIN_SCORE,
    INVALID_SCORE,
    TIE_POLICIES,
    ZERO_SCORE,
    RankCounts,
)
from funcppo.kg.scores import score as rules

GOLDEN = pathlib.Path(__file__).with_name("pykeen_ranks.json")
H = rank_metrics.harmonic_numbers(1000)


def counts(*rows):
    b, e, n = (torch.tensor(c) for c in zip(*rows))
    return RankCounts(n_better=b, n_equal=e, n_candidates=n)


def rank_counts_dense(answer, other, is_candidate):
    """The definition: counts of a dense table of the scores [Q, E] of an answer's competitors."""
    better = is_candidate & (other > answer[:, None])
    equal = is_candidate & (other == answer[:, None])
    n_candidates = is_candidate.sum(1) + 1
    return RankCounts(better.sum(1), equal.sum(1), n_candidates=n_candidates)


# -- a worked example


def test_two_better_and_three_equal_is_worked_by_hand():
    c = counts((2, 3, 10))
    assert rank_metrics.ranks(c).tolist() == [[3, 6, 4.5, 4.5]]
    third = 1 / 4 * (1 / 3 + 1 / 4 + 1 / 5 + 1 / 6)
    torch.testing.assert_close(
        rank_metrics.reciprocal_ranks(c, H),
        torch.tensor([[1 / 3, 1 / 6, 1 / 4.5, third]]).double(),
        rtol=1e-6,
        atol=0,
    )
    hits = [rank_metrics.hits_at_k(c, k).tolist() for k in (1, 3, 10)]
    assert hits == [[[0, 0, 0, 0]], [[1, 0, 0, 0.25]], [[1, 1, 1, 1]]]


def test_scores_are_rounded_to_the_grid_once():
    expected = {
        0.0: 0, -0.00004: 0, -0.00006: -1, -1.0: -10000, -1.00004: -10000,
        1e6: 10**10, -math.inf: ZERO_SCORE, math.inf: CERTAIN_SCORE,
        math.nan: INVALID_SCORE,
    }  # fmt: skip
    line = rank_metrics.quantise(torch.tensor([*expected]))
    assert line.tolist() == [*expected.values()]
    assert INVALID_SCORE < ZERO_SCORE < line[:6].min()
    assert line[:6].max() < CERTAIN_SCORE


def test_probabilities_near_0_and_near_1_are_told_apart():
    """Of log p alone, the grid makes all of the last three one."""
    log_p = torch.tensor([1e-30, 1.001e-30, 0.5], dtype=torch.float64).log()
    near_1 = -torch.tensor([1e-5, 1e-6, 1e-12], dtype=torch.float64)
    log_p = torch.cat([log_p, near_1])
    line = rank_metrics.quantise(rules.to_log_odds(log_p))
    assert (line.diff() > 0).all()
    assert line[2] == 0
    again = [rank_metrics.log_score(int(x)) for x in line]
    assert again == pytest.approx(log_p.tolist(), abs=1e-4)
    ends = rules.to_log_odds(torch.tensor([-torch.inf, 0.0, 1e-7]))
    lines = rank_metrics.quantise(ends).tolist()
    assert lines == [ZERO_SCORE, CERTAIN_SCORE, CERTAIN_SCORE]
    assert str(rank_metrics.log_score(CERTAIN_SCORE)) == "0.0"


# -- equality with the definitions


@given(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(1, 6))
def test_expected_is_the_mean_over_every_order_of_the_ties(levels, k):
    """Candidate 0 is the answer; every permutation is sorted stably, so ties keep the permutation's order."""
    place = lambda order: sorted(order, key=lambda i: -levels[i]).index(0) + 1
    ranks = [*map(place, itertools.permutations(range(len(levels))))]
    score = torch.tensor(levels)
    others = score[None, 1:]
    c = rank_counts_dense(score[:1], others, torch.ones_like(others) > 0)
    of_rank, of_reciprocal, of_hit = (
        rank_metrics.ranks(c)[0],
        rank_metrics.reciprocal_ranks(c, H)[0],
        rank_metrics.hits_at_k(c, k)[0],
    )
    got = torch.stack([of_rank, of_reciprocal, of_hit])
    low, high, n = min(ranks), max(ranks), len(ranks)
    mean, mid = float(Fraction(sum(ranks), n)), (low + high) / 2
    reciprocal = float(sum(Fraction(1, r) for r in ranks) / n)
    want = [
        [low, high, mid, mean],
        [1 / low, 1 / high, 1 / mid, reciprocal],
        [low <= k, high <= k, mid <= k, sum(r <= k for r in ranks) / n],
    ]
    want = torch.tensor(want, dtype=torch.float64)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


@given(st.data(), st.integers(1, 5), st.integers(1, 7))
def test_listed_candidates_give_the_ranks_of_all_in_any_order(data, Q, E):
    """What is not listed scores 0: a full table and its listed part agree, whatever the order of the list."""
    levels = st.sampled_from([ZERO_SCORE, -3, -2, 0, INVALID_SCORE])
    table = [[data.draw(levels) for _ in range(E)] for _ in range(Q)]
    listed = [
        [s != ZERO_SCORE or data.draw(st.booleans()) for s in row]
        for row in table
    ]
    rows = [
        (q, s, e == 0)
        for q in range(Q)
        for e, s in enumerate(table[q])
        if listed[q][e]
    ]
    rows = data.draw(st.permutations(rows))
    score = torch.tensor(table)
    others = score[:, 1:]
    want = rank_counts_dense(score[:, 0], others, torch.ones_like(others) > 0)
    query, line, is_answer = (
        torch.tensor([r[i] for r in rows], dtype=d)
        for i, d in enumerate([torch.int64] * 2 + [torch.bool])
    )
    listed_of = query, line, is_answer, torch.full((Q,), E)
    got, answer_score = rank_metrics.rank_counts_listed(*listed_of)
    assert [t.tolist() for t in got] == [t.tolist() for t in want]
    assert torch.equal(answer_score, score[:, 0])


@given(
    st.lists(
        st.tuples(st.integers(-4, 0), st.booleans()), min_size=1, max_size=40
    )
)
def test_average_precision_equals_its_definition(rows):
    """The mean, over true candidates, of the precision among all candidates that score at least as much."""
    score = [ZERO_SCORE if s == -4 else s for s, _ in rows]
    label = [y for _, y in rows]
    columns = torch.tensor(score), torch.tensor(label)
    got = rank_metrics.average_precision(*columns)
    if not any(label):
        assert got.isnan()
        return
    precision = lambda t: Fraction(
        sum(y for s, y in zip(score, label) if s >= t),
        sum(s >= t for s in score),
    )
    want = sum(precision(s) for s, y in zip(score, label) if y) / sum(label)
    assert math.isclose(float(got), float(want), rel_tol=1e-12)


# better, equal, side, relation, whether it is provable
ROWS = st.tuples(
    *[st.integers(0, 5)] * 2,
    *(st.integers(1, 2), st.integers(1, 3), st.booleans()),
)


@given(st.lists(ROWS, min_size=1))
def test_grouped_metrics_equal_means_over_python_lists(rows):
    c = counts(*[(b, e, b + e + 1) for b, e, *_ in rows])
    side, relation, provable = (
        torch.tensor([r[i] for r in rows]) for i in (2, 3, 4)
    )
    names = ["r1", "r2", "r3"]
    got = rank_metrics.group_metrics(c, side, relation, provable, names)
    assert json.loads(json.dumps(got, allow_nan=False)) == got
    rr, at3 = rank_metrics.reciprocal_ranks(c, H), rank_metrics.hits_at_k(c, 3)
    for p, s in itertools.product(range(4), range(3)):
        group = [
            i
            for i, r in enumerate(rows)
            if r[3] in (p, p or r[3]) and r[2] in (s, s or r[2])
        ]
        sides = got["relations"].get(f"r{p}", {}) if p else got["all"]
        side_name = rank_metrics.SIDE_GROUPS[s]
        assert (side_name in sides) == bool(group)
        if not group:  # empty groups are left out
            continue
        found = sides[side_name]
        assert found["n_queries"] == len(group)
        assert found["n_tied"] == sum(rows[i][1] > 0 for i in group)
        for value, want in (
            (list(found["mrr"].values()), rr[group].mean(0)),
            (list(found["hits@3"].values()), at3[group].mean(0)),
            (found["mean_candidates"], c.n_candidates[group].double().mean()),
            (found["ceiling"], provable[group].double().mean()),
        ):
            assert value == pytest.approx(want.tolist(), rel=1e-12, abs=1e-15)


def drawn_scores(seed, n_queries, n_candidates, n_levels):
    """Scores [Q, E], the answer's in column 0, and which are candidates: by a congruence of no library's generator."""
    state, stream = seed, []
    for _ in range(2 * n_queries * n_candidates):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        stream.append(state >> 33)
    drawn = torch.tensor(stream).view(2, n_queries, n_candidates)
    valid = drawn[1] % 4 > 0
    valid[:, 0] = True
    return drawn[0] % n_levels, valid


def _our_numbers(seed, case):
    table, valid = drawn_scores(seed, *case)
    c = rank_counts_dense(table[:, 0], table[:, 1:], valid[:, 1:])
    side = 1 + torch.arange(len(table)) % 2
    one = torch.ones_like(side)
    s = rank_metrics.group_metrics(c, side, one, one > 0, ["r"])["all"]
    name = {
        "inverse_harmonic_mean_rank": "mrr",
        "hits_at_1": "hits@1",
        "hits_at_3": "hits@3",
        "hits_at_10": "hits@10",
    }
    rank = {
        name: rank_metrics.ranks(c)[(side == i) | (i == 0)].mean(0)
        for i, name in enumerate(rank_metrics.SIDE_GROUPS)
    }
    return lambda side, policy, metric: (
        rank[side][TIE_POLICIES.index(policy)].item()
        if metric not in name
        else s[side][name[metric]][policy]
    )


def _assert_equal_numbers(seed, case, theirs):
    ours = _our_numbers(seed, case)
    for side, metrics in theirs.items():
        for key, want in metrics.items():
            policy, metric = key.split()
            got = ours(side, policy, metric)
            # theirs is float32
            assert math.isclose(got, want, rel_tol=1e-6), (case, side, key)


RECORDED = json.loads(GOLDEN.read_text(encoding="utf-8"))


def test_ranks_and_means_are_those_that_pykeen_recorded():
    for row in RECORDED:
        _assert_equal_numbers(row["seed"], row["case"], row["pykeen"])


@pytest.mark.parametrize("row", RECORDED)
def test_pykeen_gives_the_recorded_numbers(row):
    """Even rows ask for heads, odd ones for tails."""
    evaluation = pytest.importorskip("pykeen.evaluation")
    table, valid = drawn_scores(row["seed"], *row["case"])
    masked = table.double().masked_fill(~valid, torch.nan)
    evaluator = evaluation.RankBasedEvaluator(filtered=True)
    for first, target in ((0, "head"), (1, "tail")):
        rows = masked[first::2]
        evaluator.process_scores_(
            hrt_batch=torch.zeros(len(rows), 3, dtype=torch.long),
            target=target,
            scores=rows,
            true_scores=rows[:, :1],
        )
    found = evaluator.finalize()
    for side, metrics in row["pykeen"].items():
        for key, want in metrics.items():
            name = ".".join((side, *key.split()))
            assert found.get_metric(name) == pytest.approx(want), name


# -- limits


@given(st.floats(-50, 0), st.floats(-1, 1))
def test_only_a_score_near_a_boundary_can_change_its_line(score, direction):
    tolerance, near_boundary = 1e-6, rank_metrics.near_boundary
    s = [score, score + direction * tolerance]
    s = torch.tensor(s, dtype=torch.float64)
    before, after = rank_metrics.quantise(s).tolist()
    # 1e-9 above the tolerance: the comparison itself is rounded
    assert before == after or near_boundary(s[0], tolerance + 1e-9)
    lines = torch.tensor([0.0, -1.0, -torch.inf])
    assert not near_boundary(lines, tolerance).any()
