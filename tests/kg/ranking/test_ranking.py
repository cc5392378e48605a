"""Filtered ranking of a split; the oracle ranks one query at a time with Python sets."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from funcppo.core import tree
from funcppo.kg.config import ProverTaskConfig
from funcppo.kg.graph import loaders
from funcppo.kg.logic import fixpoint
from funcppo.kg.logic import kb as kbase
from funcppo.kg.logic.derive import candidate_atoms
from funcppo.kg.logic.kb import HEAD, TAIL, FilterIndex
from funcppo.kg.ranking import ranking
from funcppo.kg.ranking.rank_metrics import ZERO_SCORE
from funcppo.kg.ranking.ranking import RankingProtocol
from funcppo.kg.search import task as prover_task
from tests.kg.ranking.scores import FunctionScore
from tests.oracles import within_six_sigma


@pytest.fixture(scope="module")
def family():
    settings = ProverTaskConfig(max_height=2)
    return prover_task.build_task(loaders.load("family_tree:30:0"), settings)


def hashed_score(n_levels):
    """A score of each atom from its ids, with ties; none of it depends on the batch."""

    def score(atoms):
        code = atoms[:, 0] * 7919 + atoms[:, 1] * 104729 + atoms[:, 2] * 1299709
        return -(code % n_levels).to(torch.float32)

    return FunctionScore(score)


# -- a worked example


def test_a_query_is_ranked_by_hand():
    """far(b, d): of the tails, far(b, a) is a train fact; b, c and d are left; c and d are derived, c scores more."""
    hops = [("a", "hop", "b"), ("b", "hop", "c"), ("c", "hop", "d")]
    dataset = loaders.from_triples(
        [*hops, ("b", "far", "a")],
        rules="far(X, Y) :- hop(X, Z), hop(Z, Y)\nfar(X, Y) :- hop(X, Y)",
        valid=[("b", "far", "d")],
    )
    task = prover_task.build_task(dataset, ProverTaskConfig(max_height=1))
    c = dataset.entities.index("c") + 1
    seen = []

    def score(atoms):
        seen.append(atoms.tolist())
        return torch.where(atoms[:, 2] == c, -0.25, -1.0)

    how = FunctionScore(score), RankingProtocol(sides=(TAIL,))
    ranked = ranking.rank_split(task, dataset.valid, *how)
    assert seen == [[[2, 2, 3], [2, 2, 4]]]  # one call, each atom once
    assert [counts.tolist() for counts in ranked.counts] == [[1], [0], [3]]
    assert ranked.answer_score.tolist() == [-10000]
    assert ranked.listed_score.tolist() == [-2500, -10000]
    assert ranked.is_answer.tolist() == [False, True]
    assert ranked.answer_provable.tolist() == [True]
    names = list(dataset.predicates)
    metrics = ranking.summarise_ranking(ranked, names, with_auc=True)
    expected = {"mrr": 0.5, "hits@1": 0, "hits@3": 1, "auc_pr": 0.5}
    expected |= {"n_candidates": 3, "n_scored": 2, "n_tied": 0, "ceiling": 1}
    assert expected.items() <= metrics.items()
    assert list(metrics["by_group"]["relations"]) == ["far"]


def test_pooled_average_precision_by_hand():
    """Scores 3 (answer), 2, 1 (answer), and of 2 unlisted candidates at the bottom 1 answer: 1/3 (1 + 2/3 + 3/5)."""
    listed = torch.tensor([2, 3, 1])
    is_answer = torch.tensor([False, True, True])
    n = {"n_candidates": 5, "n_answers": 3}
    got = ranking.pooled_average_precision(listed, is_answer, **n)
    assert got == pytest.approx((1 + 2 / 3 + 3 / 5) / 3, abs=1e-12)


# -- equality with a ranking by Python sets


@given(st.integers(1, 50), st.booleans(), st.sampled_from([1, 9, 1 << 22]))
@settings(max_examples=20)
def test_entities_without_a_proof_are_ranked(family, n_levels, is_above, chunk):
    """As if all candidates were listed: in chunks, with ties, below and among what rules derive."""
    hashed, split = hashed_score(n_levels), family.dataset.test[::4].copy()
    split[::2, TAIL] = np.roll(split[::2, TAIL], 1)  # mostly wrong
    best = RankingProtocol(n_best=5)
    listed = ranking.list_split(family, split, best, by_side=True)
    every = ranking.list_split(
        family, split, RankingProtocol(score_unprovable=True), by_side=True
    )
    every_entity = torch.cat(
        [x.atom[:, side] for x, side in zip(every.tables, every.sides)]
    )
    shift = 3.0 if is_above else -60.0
    hashed.ranks_all = True
    entity = torch.arange(1, family.sizes.n_constants + 1)

    def score_all(asked, row):
        rows = torch.full_like(entity, row)
        atoms = candidate_atoms(asked, rows, entity, family.sizes)
        return hashed.function(atoms).double() + shift

    hashed.log_odds_of_all = lambda asked: torch.stack(
        [score_all(asked, row) for row in range(len(asked.entity))]
    )

    def by_height(atoms, _):
        height = fixpoint.atom_height(family.least_model, atoms.long())
        values = hashed.function(atoms).double()
        return torch.where(height >= 0, values, values + shift)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranking, "MAX_CHUNK_SCORES", chunk)
        found = ranking.rank_listed(listed, by_height, hashed)
    expected = ranking.rank_listed(every, by_height)
    for ours, theirs in zip(found.counts, expected.counts, strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(found.answer_score, expected.answer_score)
    assert torch.equal(found.answer_provable, expected.answer_provable)
    assert not found.answer_provable.all()
    # The best candidates are those of the longer list.
    for row, best in enumerate(found.best.tolist()):
        is_of_row = expected.listed_row == row
        values = expected.listed_score[is_of_row]
        assert [x for _, x in best] == sorted(values.tolist())[:-6:-1]
        pairs = zip(every_entity[is_of_row].tolist(), values.tolist())
        assert {*map(tuple, best)} <= {*pairs}


@given(st.integers(1, 50), st.booleans())
@settings(max_examples=20)
def test_counts_are_those_of_single_queries(family, n_levels, score_unprovable):
    dataset, hashed = family.dataset, hashed_score(n_levels)
    splits = dataset.facts, dataset.train, dataset.valid, dataset.test
    true = {tuple(triple) for triple in np.concatenate(splits).tolist()}
    queries = dataset.test[:5]
    protocol = RankingProtocol(score_unprovable=score_unprovable)
    ranked = ranking.rank_split(family, queries, hashed, protocol)
    for row in range(len(ranked.side)):
        side, query = int(ranked.side[row]), queries[int(ranked.query_row[row])]
        assert int(ranked.query_row[row]) == row % len(queries)
        atoms = np.repeat(query[None], dataset.n_constants, 0)
        atoms[:, side] = np.arange(1, dataset.n_constants + 1)
        is_new = [tuple(atom) not in true for atom in atoms.tolist()]
        atoms = torch.from_numpy(atoms[is_new | (atoms == query).all(1)])
        score = torch.round(hashed.function(atoms).double() * 10_000).long()
        provable = fixpoint.atom_height(family.least_model, atoms.long()) >= 0
        if not score_unprovable:
            score = torch.where(provable, score, ZERO_SCORE)
        is_answer = (atoms == torch.from_numpy(query)).all(1)
        answer, others = score[is_answer], score[~is_answer]
        compared = (others > answer).sum(), (others == answer).sum()
        expected = [*map(int, compared), len(atoms)]
        assert [int(counts[row]) for counts in ranked.counts] == expected
        assert ranked.answer_score[row] == answer
        assert ranked.answer_provable[row] == provable[is_answer]
        listed = ranked.listed_row == row
        needs_score = provable | score_unprovable
        assert listed.sum() == needs_score.sum()
        of_answer = ranked.listed_score[listed & ranked.is_answer]
        assert of_answer.tolist() == answer[needs_score[is_answer]].tolist()


@pytest.mark.parametrize("by_side", [False, True])
def test_candidates_listed_once_rank_as_by_each_score(family, by_side):
    protocol = RankingProtocol()
    split = family.dataset.test
    for n_levels in (1, 3, 1000):
        score = hashed_score(n_levels)
        score.needs = frozenset({"other-facts"} if by_side else {"rules"})
        listed = ranking.list_split(family, split, protocol, by_side=by_side)
        found = ranking.rank_listed(
            listed, lambda atoms, _, score=score: score.function(atoms)
        )
        expected = ranking.rank_split(family, split, score, protocol)
        for name, values in expected._asdict().items():
            ours = tree.leaves(getattr(found, name))
            assert all(map(torch.equal, ours, tree.leaves(values))), name


# -- limits


def test_a_query_that_cannot_be_ranked_is_refused(family):
    """A Countries head is no region, so it is not in the pool."""
    settings = ProverTaskConfig(max_height=1)
    countries = loaders.load("countries_s1")
    countries = prover_task.build_task(countries, settings)
    heads, tails = (RankingProtocol(sides=(x,)) for x in (HEAD, TAIL))
    test = countries.dataset.test
    problem = "among the 5 candidates, got query 0, locatedIn"
    with pytest.raises(ValueError, match=problem):
        ranking.check_split(countries, test, heads)
    ranking.check_split(countries, test, tails)
    assert ranking.ranked_sides(countries) == (TAIL,)
    assert ranking.ranked_sides(family) == (HEAD, TAIL)
    assert ranking.selection_metric(countries) == "auc_pr"
    assert ranking.selection_metric(family) == "mrr"


@given(st.integers(0, 60), st.integers(0, 70), st.integers(0, 70))
def test_random_rows_are_the_first_of_more(n_rows, n, n_more):
    more = ranking.random_rows(n_rows, n + n_more)
    assert len(set(more)) == len(more) == min(n + n_more, n_rows)
    assert set(more) <= set(range(n_rows))
    assert np.array_equal(ranking.random_rows(n_rows, n), more[:n])


@given(st.lists(st.integers(1, 4), min_size=1, max_size=40), st.integers(0, 50))
def test_a_stratified_sample_takes_relations_evenly(relations, n):
    """No relation has two queries more than another that has some left."""
    split = np.array([[r, i + 1, i + 1] for i, r in enumerate(relations)])
    rows = ranking.stratified_sample(split, n)
    assert len(rows) == min(n, len(split)) and (np.diff(rows) > 0).all()
    assert np.array_equal(rows, ranking.stratified_sample(split, n))
    sampled = {r: int((split[rows, 0] == r).sum()) for r in set(relations)}
    unfinished = [k for r, k in sampled.items() if k < relations.count(r)]
    assert not unfinished or max(sampled.values()) <= min(unfinished) + 1


# -- candidates, which the oracle lists by Python sets


def table(atoms):
    return torch.tensor(sorted(atoms), dtype=torch.int32).reshape(-1, 3)


def replaced(query, side, entity):
    return (*query[:side], entity, *query[side + 1 :])


@st.composite
def worlds(draw):
    """Constants, a pool of them, known triples, derivable triples, and queries whose answers are in the pool."""
    C = draw(st.integers(1, 6))
    atom = st.tuples(st.integers(1, 2), st.integers(1, C), st.integers(1, C))
    known, model = (draw(st.sets(atom, max_size=20)) for _ in range(2))
    pool = sorted(draw(st.sets(st.integers(1, C), min_size=1)))
    side = draw(st.sampled_from([HEAD, TAIL]))
    asked = draw(st.lists(atom, min_size=1, max_size=5))
    asked = [replaced(a, side, pool[a[side] % len(pool)]) for a in asked]
    return C, pool, known, model, side, asked


def candidates_of(query, side, pool, known):
    """By definition: the answer, and every entity of the pool whose atom is not known."""
    is_left = lambda e: (
        e == query[side] or replaced(query, side, e) not in known
    )
    return [*filter(is_left, pool)]


def indices(C, pool, known, model):
    pool = torch.tensor(pool)
    tables = (table(known), table(model))
    return pool, *(kbase.build_triple_index(x, C, pool) for x in tables)


def sample(seed, known, pool, queries, side, n, query_id):
    """Sampled candidates beside the answer, as entities in n slots, and which slots hold one."""
    protocol = RankingProtocol(seed=seed, n_negatives=n)
    asked = known, pool, queries, side, query_id
    row, entity = ranking.sample_corruptions(protocol, *asked)
    slots = torch.zeros((len(queries), n), dtype=torch.int64)
    place = torch.arange(len(row)) - torch.searchsorted(row, row)
    slots[row, place] = entity
    return slots, slots > 0


@given(worlds(), st.integers(1, 7), st.integers(0, 2**32))
def test_a_sample_is_distinct_filtered_and_of_its_size(world, n, seed):
    C, pool, known, model, side, asked = world
    pool_, known_index, _ = indices(C, pool, known, model)
    ids = torch.arange(len(asked)) + 5
    rows = torch.tensor(asked)
    entity, mask = sample(seed, known_index, pool_, rows, side, n, ids)
    for i, query in enumerate(asked):
        allowed = set(candidates_of(query, side, pool, known)) - {query[side]}
        drawn = entity[i][mask[i]].tolist()
        assert len(drawn) == len(set(drawn)) == min(n, len(allowed))
        assert set(drawn) <= allowed
        assert not entity[i][~mask[i]].any()


@given(worlds(), st.data(), st.integers(0, 2**32))
def test_a_sample_depends_on_the_query_not_on_the_batch(world, data, seed):
    C, pool, known, model, side, asked = world
    pool_, known_index, _ = indices(C, pool, known, model)
    ids, rows = torch.arange(len(asked)) + 3, torch.tensor(asked)
    order = torch.tensor(data.draw(st.permutations(range(len(asked)))))
    order = order[: data.draw(st.integers(1, len(asked)))]
    draw = lambda which: sample(
        seed, known_index, pool_, rows[which], side, 3, ids[which]
    )
    every, _ = draw(torch.arange(len(asked)))
    assert torch.equal(draw(order)[0], every[order])


@given(
    worlds(),
    st.integers(1, 7) | st.none(),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_a_table_lists_candidates(world, n_negatives, score_unprovable, seed):
    """The provable ones, or all of them; `derivable` plays T_P."""
    C, pool, known, derivable, side, asked = world
    pool_, known_index, derivable_index = indices(C, pool, known, derivable)
    protocol = RankingProtocol(
        n_negatives=n_negatives, score_unprovable=score_unprovable, seed=seed
    )
    rows, ids = torch.tensor(asked), torch.arange(len(asked)) + 5
    index = FilterIndex(known_index, derivable_index)
    got = ranking.list_candidates(protocol, index, rows, ids, pool_, side)
    sampled = [candidates_of(query, side, pool, known) for query in asked]
    if n_negatives is not None:
        drawn = sample(seed, known_index, pool_, rows, side, n_negatives, ids)
        sampled = [[q[side], *e[m].tolist()] for q, e, m in zip(asked, *drawn)]
    assert got.n_candidates.tolist() == [len(entities) for entities in sampled]
    assert got.answer_provable.tolist() == [q in derivable for q in asked]
    listed = [
        (i, atom, entity == query[side])
        for i, query in enumerate(asked)
        for entity in sampled[i]
        if (atom := replaced(query, side, entity)) in derivable
        or score_unprovable
    ]
    atoms = map(tuple, got.atom.tolist())
    rows_got = zip(got.query_row.tolist(), atoms, got.is_answer.tolist())
    assert sorted(rows_got) == sorted(listed)


def test_every_subset_of_the_corruptions_is_equally_likely():
    """8 entities, the answer and one known answer out: 6 remain, so 15 subsets of 4, in 15,000 draws."""
    known = kbase.build_triple_index(table([(1, 2, 2), (1, 2, 5)]), 8)
    rows, ids = torch.tensor([[1, 2, 5]]).expand(15000, 3), torch.arange(15000)
    got, _ = sample(1, known, torch.arange(1, 9), rows, TAIL, 4, ids)
    subsets = list(itertools.combinations([1, 3, 4, 6, 7, 8], 4))
    drawn = [tuple(p) for p in got.sort(1).values.tolist()]
    assert set(drawn) == set(subsets)
    assert within_six_sigma([drawn.count(p) for p in subsets], [1 / 15] * 15)


def test_keys_of_many_constants_do_not_overflow_32_bits():
    atoms = torch.tensor([[7, 3_000_000, 4_999_999], [7, 3_000_000, 5]]).int()
    index = kbase.build_triple_index(atoms, 5_000_000)
    both, pool = FilterIndex(index, index), torch.arange(1, 5_000_001)
    asked = RankingProtocol(), both, atoms, torch.arange(2), pool
    for side in (HEAD, TAIL):
        got = ranking.list_candidates(*asked, side)
        assert got.answer_provable.all()
        assert torch.equal(got.atom[got.is_answer], atoms)
