"""Candidates of ranking queries; the oracles are Python sets."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from funcppo.core import random
from funcppo.kg.logic import triple_index
from funcppo.kg.logic.triple_index import HEAD, TAIL, FilterIndex
from funcppo.kg.ranking import candidates, rank_metrics
from funcppo.kg.ranking.rank_metrics import ZERO_SCORE
from tests.learning import DATA


def table(atoms):
    return torch.tensor(sorted(atoms), dtype=torch.int32).reshape(-1, 3)


def replaced(query, side, entity):
    return (
        (query[0], entity, query[2])
        if side == HEAD
        else (query[0], query[1], entity)
    )


@st.composite
def worlds(draw):
    """Constants, a pool of them, known triples, derivable triples, and queries whose answers are in the pool."""
    C = draw(st.integers(1, 6))
    atom = st.tuples(st.integers(1, 2), st.integers(1, C), st.integers(1, C))
    known, model = (
        draw(st.sets(atom, max_size=20)),
        draw(st.sets(atom, max_size=20)),
    )
    pool = sorted(draw(st.sets(st.integers(1, C), min_size=1)))
    side = draw(st.sampled_from([HEAD, TAIL]))
    asked = draw(st.lists(atom, min_size=1, max_size=5))
    return (
        C,
        pool,
        known,
        model,
        side,
        [replaced(a, side, pool[a[side] % len(pool)]) for a in asked],
    )


def candidates_of(query, side, pool, known):
    """By definition: the answer, and every entity of the pool whose atom is not known."""
    return [
        e
        for e in pool
        if e == query[side] or replaced(query, side, e) not in known
    ]


def indices(C, pool, known, model):
    pool = torch.tensor(pool)
    return (
        pool,
        triple_index.build_triple_index(table(known), C, pool),
        triple_index.build_triple_index(table(model), C, pool),
    )


# -- a worked example


def test_a_tail_query_is_filtered_by_hand():
    """r(1, ?) with answer 3: r(1, 2) is known, so 1, 3, 4 remain, of which r(1, 3) and r(1, 4) are derivable."""
    known = triple_index.build_triple_index(
        table([(1, 1, 2), (1, 1, 3), (1, 2, 1)]), 4
    )
    model = triple_index.build_triple_index(
        table([(1, 1, 2), (1, 1, 3), (1, 1, 4), (1, 2, 2)]), 4
    )
    query = torch.tensor([[1, 1, 3]])
    assert candidates.count_candidates(known, query, TAIL, 4).tolist() == [3]
    got = candidates.list_provable_candidates(known, model, query, TAIL)
    assert [t.tolist() for t in got] == [[0, 0], [3, 4], [True, False], [True]]
    sample = candidates.sample_corruptions(
        random.key(0),
        known,
        torch.arange(1, 5),
        query,
        TAIL,
        3,
        torch.tensor([7]),
    )
    assert sorted(sample.entity[0].tolist()) == [
        0,
        1,
        4,
    ] and sample.mask.tolist() == [[True, True, False]]


# -- equality with Python sets


@given(worlds())
@settings(max_examples=150)
def test_candidates_are_those_of_the_definition(world):
    C, pool, known, model, side, asked = world
    _, known_index, model_index = indices(C, pool, known, model)
    rows = torch.tensor(asked, dtype=torch.int32)
    counts = candidates.count_candidates(
        known_index, rows, side, len(pool)
    ).tolist()
    got = candidates.list_provable_candidates(
        known_index, model_index, rows, side
    )
    want = [candidates_of(q, side, pool, known) for q in asked]
    provable = [
        (i, e)
        for i, q in enumerate(asked)
        for e in want[i]
        if replaced(q, side, e) in model
    ]
    assert counts == [len(c) for c in want]
    assert list(zip(got.query_row.tolist(), got.entity.tolist())) == provable
    assert got.is_answer.tolist() == [e == asked[i][side] for i, e in provable]
    assert got.answer_provable.tolist() == [q in model for q in asked]


@given(worlds(), st.data())
@settings(max_examples=100)
def test_ranking_the_provable_candidates_equals_ranking_them_all(world, data):
    """Unprovable atoms score 0: the prefilter changes no count, so no rank under any tie policy."""
    C, pool, known, model, side, asked = world
    _, known_index, model_index = indices(C, pool, known, model)
    score = {atom: data.draw(st.integers(-2, 0)) for atom in sorted(model)}
    rows = torch.tensor(asked)
    listed = candidates.list_provable_candidates(
        known_index, model_index, rows, side
    )
    scores = [
        score[replaced(asked[q], side, e)]
        for q, e in zip(listed.query_row.tolist(), listed.entity.tolist())
    ]
    n = candidates.count_candidates(known_index, rows, side, len(pool))
    got = rank_metrics.rank_counts_listed(
        listed.query_row,
        torch.tensor(scores, dtype=torch.int64),
        listed.is_answer,
        n,
    )
    for i, query in enumerate(asked):
        answer = score.get(query, ZERO_SCORE)
        others = [
            e
            for e in candidates_of(query, side, pool, known)
            if e != query[side]
        ]
        others = [
            score.get(replaced(query, side, e), ZERO_SCORE) for e in others
        ]
        want = (
            sum(s > answer for s in others),
            sum(s == answer for s in others),
            len(others) + 1,
        )
        assert (got.n_better[i], got.n_equal[i], got.n_candidates[i]) == want


@given(worlds(), st.integers(1, 7), st.integers(0, 2**32))
@settings(max_examples=150)
def test_a_sample_is_distinct_filtered_and_as_large_as_it_can_be(
    world, n, seed
):
    C, pool, known, model, side, asked = world
    pool_, known_index, _ = indices(C, pool, known, model)
    ids = torch.arange(len(asked)) + 5
    got = candidates.sample_corruptions(
        random.key(seed), known_index, pool_, torch.tensor(asked), side, n, ids
    )
    for i, query in enumerate(asked):
        allowed = set(candidates_of(query, side, pool, known)) - {query[side]}
        drawn = got.entity[i][got.mask[i]].tolist()
        assert len(drawn) == len(set(drawn)) == min(n, len(allowed))
        assert set(drawn) <= allowed
        assert not got.entity[i][~got.mask[i]].any()


@given(worlds(), st.data(), st.integers(0, 2**32))
@settings(max_examples=50)
def test_a_sample_depends_on_the_query_id_and_not_on_the_batch(
    world, data, seed
):
    C, pool, known, model, side, asked = world
    pool_, known_index, _ = indices(C, pool, known, model)
    ids, rows = torch.arange(len(asked)) + 3, torch.tensor(asked)
    order = torch.tensor(data.draw(st.permutations(range(len(asked)))))[
        : data.draw(st.integers(1, len(asked)))
    ]
    draw = lambda which: candidates.sample_corruptions(
        random.key(seed), known_index, pool_, rows[which], side, 3, ids[which]
    )
    torch.testing.assert_close(
        draw(order).entity,
        draw(torch.arange(len(asked))).entity[order],
        rtol=0,
        atol=0,
    )


@given(
    worlds(),
    st.integers(1, 7) | st.none(),
    st.booleans(),
    st.integers(0, 2**32),
)
@settings(max_examples=150)
def test_a_table_lists_the_candidates_that_need_a_score(
    world, n_negatives, score_unprovable, seed
):
    """The provable ones, or all of them; `derivable` plays T_P."""
    C, pool, known, derivable, side, asked = world
    pool_, known_index, derivable_index = indices(C, pool, known, derivable)
    protocol = candidates.RankingProtocol(
        n_negatives=n_negatives, score_unprovable=score_unprovable, seed=seed
    )
    rows, ids = torch.tensor(asked), torch.arange(len(asked)) + 5
    got = candidates.list_candidates(
        protocol,
        FilterIndex(known_index, derivable_index),
        rows,
        ids,
        pool_,
        side,
    )
    sampled = [candidates_of(query, side, pool, known) for query in asked]
    if n_negatives is not None:
        key = random.key(seed)
        sample = candidates.sample_corruptions(
            key, known_index, pool_, rows, side, n_negatives, ids
        )
        sampled = [
            [q[side], *e[m].tolist()]
            for q, e, m in zip(asked, sample.entity, sample.mask)
        ]
    assert got.n_candidates.tolist() == [len(entities) for entities in sampled]
    assert got.answer_provable.tolist() == [
        query in derivable for query in asked
    ]
    listed = [
        (i, atom, entity == query[side])
        for i, query in enumerate(asked)
        for entity in sampled[i]
        if (atom := replaced(query, side, entity)) in derivable
        or score_unprovable
    ]
    rows_got = zip(
        got.query_row.tolist(),
        map(tuple, got.atom.tolist()),
        got.is_answer.tolist(),
    )
    assert sorted(rows_got) == sorted(listed)


def within_six_sigma(counts, probabilities):
    """Each count of a multinomial within 6 standard deviations: a false alarm in 10**8 fixed seeds."""
    n, p = sum(counts), np.array(probabilities)
    return bool(
        (abs(np.array(counts) - n * p) <= 6 * np.sqrt(n * p * (1 - p))).all()
    )


def test_every_subset_of_the_corruptions_is_equally_likely():
    """8 entities, the answer and one known answer out: 6 remain, so 15 subsets of 4, in 15,000 draws."""
    known = triple_index.build_triple_index(table([(1, 2, 2), (1, 2, 5)]), 8)
    rows, ids = torch.tensor([[1, 2, 5]]).expand(15000, 3), torch.arange(15000)
    got = candidates.sample_corruptions(
        random.key(1), known, torch.arange(1, 9), rows, TAIL, 4, ids
    )
    subsets = list(itertools.combinations([1, 3, 4, 6, 7, 8], 4))
    drawn = [tuple(p) for p in got.entity.sort(1).values.tolist()]
    assert set(drawn) == set(subsets)
    assert within_six_sigma([drawn.count(p) for p in subsets], [1 / 15] * 15)


def test_head_and_tail_are_drawn_apart():
    known = triple_index.build_triple_index(table([]), 200)
    draw = lambda side: candidates.sample_corruptions(
        random.key(1),
        known,
        torch.arange(1, 201),
        torch.tensor([[1, 9, 9]]),
        side,
        50,
        torch.tensor([0]),
    )
    assert draw(HEAD).entity.tolist() != draw(TAIL).entity.tolist()


# -- errors


def test_what_cannot_be_ranked_is_refused_in_one_line():
    pool = torch.tensor([1, 2, 3])
    for query, text in (
        ([1, 1, 0, 0], "expected two arguments, .* got query 0 "),
        ([1, 1, 2, 3], "expected two arguments, .* got query 0 "),
        ([1, 9, 2, 0], "constants from 1 to 4, got query 0 "),
        (
            [1, 1, 4, 0],
            "expected an answer among the 3 candidates, got query 0 ",
        ),
    ):
        with pytest.raises(ValueError, match=text):
            candidates.check_queries(torch.tensor([query]), TAIL, pool, 4)
    with pytest.raises(ValueError, match="ascending"):
        candidates.check_queries(
            torch.tensor([[1, 1, 2]]), TAIL, pool.flip(0), 4
        )
    candidates.check_queries(torch.tensor([[1, 4, 3, 0]]), TAIL, pool, 4)
    with pytest.raises(ValueError, match="two arguments"):
        candidates.check_queries(torch.tensor([[1, 1]]), HEAD, pool, 4)


def test_keys_of_many_constants_do_not_overflow_32_bits():
    atoms = torch.tensor(
        [[7, 3_000_000, 4_999_999], [7, 3_000_000, 5]], dtype=torch.int32
    )
    index = triple_index.build_triple_index(atoms, 5_000_000)
    for side in (HEAD, TAIL):
        got = candidates.list_provable_candidates(index, index, atoms, side)
        assert (
            got.answer_provable.all()
            and got.entity[got.is_answer].tolist() == atoms[:, side].tolist()
        )


# -- a real set


@pytest.mark.skipif(
    not (DATA / "umls").is_dir(), reason="FUNCPPO_DATA has no umls"
)
def test_umls_candidate_counts_are_those_of_python_sets():
    splits = [
        [
            line.split("\t")
            for line in (DATA / "umls" / f"{s}.txt").read_text().splitlines()
        ]
        for s in ("train", "valid", "test")
    ]
    names = sorted({x for s in splits for h, _, t in s for x in (h, t)})
    relations = sorted({r for s in splits for _, r, _ in s})
    ids = [
        [
            (relations.index(r) + 1, names.index(h) + 1, names.index(t) + 1)
            for h, r, t in s
        ]
        for s in splits
    ]
    known = set(ids[0]) | set(ids[1]) | set(ids[2])
    index, test = (
        triple_index.build_triple_index(table(known), len(names)),
        torch.tensor(ids[2]),
    )
    pool = range(1, len(names) + 1)
    for side in (HEAD, TAIL):
        candidates.check_queries(test, side, torch.tensor(pool), len(names))
        got = candidates.count_candidates(
            index, test, side, len(names)
        ).tolist()
        assert got == [len(candidates_of(q, side, pool, known)) for q in ids[2]]
