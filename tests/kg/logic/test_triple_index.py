"""Triple indices against Python sets."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from funcppo.kg.logic import fixpoint, kb, triple_index
from funcppo.kg.logic.triple_index import HEAD, SIDE_NAMES, TAIL


def table(atoms):
    return torch.tensor(sorted(atoms), dtype=torch.int32).reshape(-1, 3)


@st.composite
def indexed_triples(draw):
    """Constants, a pool of them or None, triples, and queries on a side."""
    n_constants = draw(st.integers(1, 6))
    atom = st.tuples(
        st.integers(1, 2),
        st.integers(1, n_constants),
        st.integers(1, n_constants),
    )
    triples = draw(st.sets(atom, max_size=20))
    pool = draw(st.none() | st.sets(st.integers(1, n_constants), min_size=1))
    queries = draw(st.lists(atom, min_size=1, max_size=5))
    return (
        n_constants,
        pool,
        triples,
        draw(st.sampled_from([HEAD, TAIL])),
        queries,
    )


def build(n_constants, pool, triples):
    return triple_index.build_triple_index(
        table(triples),
        n_constants,
        None if pool is None else torch.tensor(sorted(pool)),
    )


# -- a worked example


def test_the_answers_to_a_query_are_listed_by_hand():
    """r(1, ?): 2 and 3; r(?, 2): 1 and 4; a key counts in base 4 + 1."""
    index = triple_index.build_triple_index(
        table([(1, 1, 2), (1, 1, 3), (1, 4, 2), (2, 1, 4)]), 4
    )
    query = torch.tensor([[1, 1, 2]])
    tails = triple_index.list_answers(index, query, TAIL)
    assert [t.tolist() for t in tails] == [
        [0, 0],
        [25 + 5 + 2, 25 + 5 + 3],
        [2, 3],
    ]
    assert triple_index.list_answers(index, query, HEAD).entity.tolist() == [
        1,
        4,
    ]
    assert [
        t.tolist() for t in triple_index.answer_range(index, query, TAIL)
    ] == [[0], [2]]
    assert triple_index.contains(
        index, torch.tensor([[1, 1, 3], [1, 3, 1]]), TAIL
    ).tolist() == [True, False]
    assert SIDE_NAMES == {HEAD: "head", TAIL: "tail"}


# -- equality with Python sets


@given(indexed_triples())
def test_answers_are_those_of_python_sets(case):
    n_constants, pool, triples, side, queries = case
    index = build(n_constants, pool, triples)
    rows = torch.tensor(queries)
    indexed = {t for t in triples if pool is None or t[side] in pool}
    given_argument = TAIL if side == HEAD else HEAD
    expected = [
        (i, entity)
        for i, query in enumerate(queries)
        for entity in sorted(
            t[side]
            for t in indexed
            if t[0] == query[0] and t[given_argument] == query[given_argument]
        )
    ]
    answers = triple_index.list_answers(index, rows, side)
    assert (
        list(zip(answers.query_row.tolist(), answers.entity.tolist()))
        == expected
    )
    assert triple_index.contains_key(index, answers.triple_key, side).all()
    start, stop = triple_index.answer_range(index, rows, side)
    assert (stop - start).tolist() == [
        sum(row == i for row, _ in expected) for i in range(len(queries))
    ]
    assert triple_index.contains(index, rows, side).tolist() == [
        query in indexed for query in queries
    ]


@given(indexed_triples())
def test_many_keys_are_looked_up_part_by_part(case):
    """At most three in one call, in any shape, with what one call for all of them gives."""
    n_constants, pool, triples, side, _ = case
    index = build(n_constants, pool, triples)
    base = n_constants + 1
    key = torch.arange(4 * base * base).view(4, base, base)
    whole = triple_index.contains_key(index, key, side)
    sizes = []

    def search(keys, wanted, **options):
        sizes.append(wanted.numel())
        return searchsorted(keys, wanted, **options)

    searchsorted = torch.searchsorted
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triple_index, "MAX_SEARCHED_AT_ONCE", 3)
        patch.setattr(torch, "searchsorted", search)
        parts = triple_index.contains_key(index, key, side)
    assert torch.equal(parts, whole) and parts.shape == key.shape
    assert max(sizes) <= 3


@given(indexed_triples())
def test_keys_are_ascending_and_distinct_and_their_order_of_insertion_does_not_matter(
    case,
):
    n_constants, pool, triples, _, _ = case
    index = build(n_constants, pool, triples)
    reversed_twice = torch.cat([table(triples).flip(0), table(triples)])
    again = triple_index.build_triple_index(
        reversed_twice,
        n_constants,
        None if pool is None else torch.tensor(sorted(pool)),
    )
    for keys, same in zip(index, again):
        assert torch.equal(keys, same)
    assert all((keys[1:] > keys[:-1]).all() for keys in index[1:])


# -- limits


def test_other_arities_answer_no_ranking_query():
    mixed = triple_index.build_triple_index(
        torch.tensor([[1, 1, 0, 0], [1, 1, 2, 0], [1, 1, 2, 3], [1, 1, 3, 2]]),
        3,
    )
    assert len(mixed.head_query_keys) == len(mixed.tail_query_keys) == 1
    assert triple_index.contains(
        mixed, torch.tensor([[1, 1, 2, 0], [1, 2, 1, 0]]), triple_index.TAIL
    ).tolist() == [
        True,
        False,
    ]
    assert (
        len(
            triple_index.build_triple_index(
                torch.tensor([[1, 1]]), 3
            ).tail_query_keys
        )
        == 0
    )


def test_keys_of_many_constants_do_not_overflow_32_bits():
    atoms = torch.tensor(
        [[7, 3_000_000, 4_999_999], [7, 3_000_000, 5]], dtype=torch.int32
    )
    index = triple_index.build_triple_index(atoms, 5_000_000)
    for side in (HEAD, TAIL):
        assert triple_index.contains(index, atoms, side).all()
        answers = triple_index.list_answers(index, atoms, side)
        assert set(atoms[:, side].tolist()) == set(answers.entity.tolist())


def test_keys_beyond_63_bits_are_refused():
    with pytest.raises(
        ValueError, match="63 bits, got 9 predicates and 2147483648 constants"
    ):
        triple_index.build_triple_index(torch.tensor([[9, 1, 2]]), 2**31)
    # (1 + 1) * (2**31 - 1)**2 < 2**63
    triple_index.build_triple_index(torch.tensor([[1, 1, 2]]), 2**31 - 2)


def test_a_filter_index_holds_the_true_and_the_derivable_triples_of_the_pool():
    """q(X, Y) :- p(X, Y) derives q(1, 2) and q(3, 2); facts are derivable too. Entity 3 is outside the pool."""
    facts = np.array([[1, 1, 2], [1, 3, 2]])
    rules = np.array([[[2, 4, 5], [1, 4, 5]]])
    base, sizes = kb.build(facts, rules, n_constants=3, n_predicates=2)
    model = fixpoint.least_model(base, sizes, max_height=1, max_atoms=100)
    true_atoms = torch.tensor(
        [[1, 1, 2], [1, 3, 2], [2, 2, 2]], dtype=torch.int32
    )
    index = triple_index.build_filter_index(
        sizes, model, true_atoms, torch.tensor([1, 2])
    )
    queries = torch.tensor(
        [[1, 1, 2], [1, 3, 2], [2, 1, 2], [2, 3, 2], [2, 2, 2]]
    )
    for side, in_pool in (
        (HEAD, [True, False, True, False, True]),
        (TAIL, [True] * 5),
    ):
        true = triple_index.contains(index.true_triples, queries, side).tolist()
        derivable = triple_index.contains(
            index.derivable_triples, queries, side
        ).tolist()
        assert true == [
            a and b for a, b in zip([True, True, False, False, True], in_pool)
        ]
        assert derivable == [
            a and b for a, b in zip([True, True, True, True, False], in_pool)
        ]
