"""The miner: counts worked by hand, equal to brute force over Python sets; which rules are kept; what a budget does."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from funcppo.data import load
from funcppo.logic import kb
from funcppo.logic.consequences import with_confidence
from funcppo.mining import constant_rules, miner, path_rules, paths
from funcppo.mining.config import MiningConfig
from tests import oracles
from tests.oracles import Program

DATA = Path(os.environ.get("FUNCPPO_DATA", Path(__file__).parents[2] / "../shared/data"))
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"no data sets in {DATA}")
X, Y, Z = 7, 8, 9  # variables beside six constants
ALL = dict(min_support=1, min_confidence=0.0)
graphs = st.builds(
    lambda random, n: sorted({(random.randint(1, 2), random.randint(1, 6), random.randint(1, 6)) for _ in range(n)}),
    st.randoms(use_true_random=False),
    st.integers(1, 16),
)


def never():
    return False


def steps_of(facts):
    return paths.build_edge_index(torch.tensor(facts), 2, 6)


def mined(facts, **settings):
    return miner.mine_rules(torch.tensor(facts), 2, 6, MiningConfig(**(ALL | settings)))


def clauses_of(rules):
    """Head and body of each rule, unpadded."""
    return [tuple(tuple(atom) for atom in rule if atom[0]) for rule in miner.rule_atoms(rules, 6).tolist()]


def brute_force(facts, clauses):
    """(support, circular, body pairs, PCA pairs) of each clause, over Python sets."""
    program = Program(6, (2, 2), tuple(facts), tuple(clauses))
    every, left_out = (oracles.consequences(program, leave_one_out=flag) for flag in (False, True))
    counts = []
    for i, clause in enumerate(clauses):
        heads = [atom for j, atom in every if j == i]
        known = [atom for atom in heads if atom in facts]
        sources = {(p, a) for p, a, _ in facts}
        pca = sum((p, a) in sources for p, a, _ in heads)
        assert all(atom[0] == clause[0][0] for atom in heads)
        counts.append((len(known), sum((i, atom) not in left_out for atom in known), len(heads), pca))
    return counts


def path_clauses(max_length):
    """Every closed path rule over two predicates, as mine.atoms writes it."""
    found = []
    for length in range(1, max_length + 1):
        inner = [X, *range(Z, Z + length - 1), Y]
        for head, *labels in itertools.product((1, 2), *[range(4)] * length):
            ends = [(a, b) if label % 2 == 0 else (b, a) for label, a, b in zip(labels, inner, inner[1:])]
            found.append(((head, X, Y), *((label // 2 + 1, *pair) for label, pair in zip(labels, ends))))
    return found


def constant_clauses():
    """Every rule with constants over two predicates and six constants."""
    atom = lambda label, x, y: (label // 2 + 1, x, y) if label % 2 == 0 else (label // 2 + 1, y, x)
    heads = [atom(label, X, c) for label in range(4) for c in range(1, 7)]
    bodies = [atom(label, X, d) for label in range(4) for d in (*range(1, 7), Y)]
    return [(head, body) for head in heads for body in bodies if head != body]


def counts_of(rules):
    columns = (rules.support, rules.circular_support, rules.body_pairs, rules.pca_pairs)
    return [tuple(int(v) for v in row) for row in zip(*(column.tolist() for column in columns))]


def test_counts_worked_by_hand():
    """likes(1,2), likes(2,1), likes(2,3), knows(1,2): the inverse derives likes(1,2) and (2,1) but also (3,2).

    knows(X,Y) :- likes(X,Y) is right once: were that fact unknown, nothing would speak for the rule.
    """
    found = mined([(1, 1, 2), (1, 2, 1), (1, 2, 3), (2, 1, 2)], max_length=1)
    assert clauses_of(found.rules) == [((1, X, Y), (1, Y, X))]
    assert counts_of(found.rules) == [(2, 0, 3, 2)]
    assert miner.confidence(found.rules).tolist() == pytest.approx([2 / 3])
    assert miner.smoothed_confidence(found.rules).tolist() == pytest.approx([2 / 8])
    assert miner.held_out_smoothed_confidence(found.rules).tolist() == pytest.approx([1 / 7])
    assert found.rules.head_facts.tolist() == [3] and found.n_candidates == 5 and found.notes == ()


def test_a_path_that_walks_along_the_fact_itself_is_circular():
    """likes(X,Y) :- likes(X,Z), likes(W,Z), likes(W,Y) derives likes(1,2) from itself alone, Z = Y and W = X."""
    steps = steps_of([(1, 1, 2)])
    found = paths.find_closed_paths(steps, torch.tensor([0]), 3)
    assert found.body_labels.tolist() == [[0, 1, 0]] and found.is_circular.tolist() == [True]
    assert len(mined([(1, 1, 2)]).rules.support) == 0


@given(graphs)
@settings(max_examples=40, deadline=None)
def test_path_counts_are_those_of_brute_force(facts):
    clauses = path_clauses(2)
    clauses += path_clauses(3)[len(clauses) :: 7]
    expected = {c: n for c, n in zip(clauses, brute_force(facts, clauses)) if n[0] - n[1] > 0}
    steps, seen = steps_of(facts), {}
    draw = torch.linspace(0, 0.9, 20)
    for length in (1, 2, 3):
        predicate = torch.tensor(facts)[:, 0]
        found, share, told = path_rules.find_path_rules(steps, predicate, length, 1, 10**9, draw[: len(facts)], never)
        assert told == [] and (share == 1).all()
        bodies, which = torch.unique(found.body_labels, dim=0, return_inverse=True)
        pairs = path_rules.count_body_pairs(steps, bodies, 10**9, draw[:7], never)
        assert not pairs.std_error.any()
        exact = torch.ones(len(which), dtype=torch.bool)
        pca = path_rules.count_pca_pairs(steps, 2 * found.head_predicate - 2, found.body_labels, exact, 10**9, draw[:7])
        assert not pca.std_error.any()
        counted = (found.support, found.circular_support, pairs.total[which], pca.total)
        rows = zip(found.head_predicate.tolist(), found.body_labels.tolist(), *counted)
        for head, body, *counts in rows:
            inner = [X, *range(Z, Z + length - 1), Y]
            ends = [(a, b) if label % 2 == 0 else (b, a) for label, a, b in zip(body, inner, inner[1:])]
            clause = ((head, X, Y), *((label // 2 + 1, *pair) for label, pair in zip(body, ends)))
            seen[clause] = tuple(int(n) for n in counts)
    assert {c: seen.get(c) for c in expected} == expected
    assert all(c in expected for c in seen if c in set(clauses))


@given(graphs)
@settings(max_examples=40, deadline=None)
def test_counts_of_rules_with_constants_are_those_of_brute_force(facts):
    clauses = constant_clauses()
    expected = {c: n for c, n in zip(clauses, brute_force(facts, clauses)) if n[0] - n[1] > 0}
    steps, seen = steps_of(facts), {}
    for found in constant_rules.find_constant_rules(steps, 1):
        pca = constant_rules.count_pca_pairs(steps, found.head_label, found.body_label, found.body_constant)
        atom = lambda label, x, y: (label // 2 + 1, x, y) if label % 2 == 0 else (label // 2 + 1, y, x)
        for i in range(len(found.support)):
            body = atom(int(found.body_label[i]), X, int(found.body_constant[i]) or Y)
            clause = (atom(int(found.head_label[i]), X, int(found.head_constant[i])), body)
            assert clause not in seen
            seen[clause] = (
                int(found.support[i]),
                int(found.circular_support[i]),
                int(found.body_pairs[i]),
                int(pca[i]),
            )
    assert seen == expected


@given(graphs, st.booleans())
@settings(max_examples=40, deadline=None)
def test_what_is_mined_is_counted_as_by_brute_force(facts, constants):
    rules = mined(facts, constants=constants).rules
    assert counts_of(rules) == brute_force(facts, clauses_of(rules))
    assert not rules.std_error.any()
    assert (torch.diff(miner.smoothed_confidence(rules)) <= 0).all()


@given(graphs, st.integers(1, 3))
@settings(max_examples=25, deadline=None)
def test_every_fact_keeps_the_best_rules_that_derive_it_and_no_rule_is_kept_for_nothing(facts, votes):
    clauses = path_clauses(2) + constant_clauses()
    score = {
        clause: (support - circular - 1) / (pairs - circular - 1 + miner.SMOOTHING_COUNT)
        for clause, (support, circular, pairs, _) in zip(clauses, brute_force(facts, clauses))
    }
    derives = lambda rules: oracles.consequences(Program(6, (2, 2), tuple(facts), tuple(rules)), leave_one_out=True)
    scores = {fact: [] for fact in facts}
    for i, atom in derives(clauses):
        if atom in scores and score[clauses[i]] > 0:
            scores[atom].append(score[clauses[i]])
    best = {fact: sorted(values, reverse=True)[:votes] for fact, values in scores.items()}
    kept = clauses_of(mined(facts, max_length=2, constants=True, votes_per_fact=votes).rules)
    deriving = {fact: [] for fact in facts}
    for i, atom in derives(kept):
        if atom in best:
            deriving[atom].append((score[kept[i]], i))
    for fact, values in best.items():
        assert sorted((value for value, _ in deriving[fact]), reverse=True)[: len(values)] == pytest.approx(values)
    won = {i for fact in facts for value, i in deriving[fact] if best[fact] and value >= best[fact][-1]}
    assert won == set(range(len(kept)))


def test_exact_counts_are_whole_numbers():
    """Also where n (x / n) is not x in float64, as for n = 49."""
    data = load("family_tree:300:5")
    found = miner.mine_rules(
        torch.from_numpy(data.facts), data.n_predicates, data.n_constants, MiningConfig(max_length=2)
    ).rules
    assert not found.std_error.any() and len(found.std_error) > 20
    for counts in (found.support, found.circular_support, found.body_pairs, found.pca_pairs):
        assert torch.equal(counts, counts.round())


@pytest.mark.parametrize("seed", range(4))
def test_a_sample_that_shows_no_difference_between_sources_is_not_taken_for_exact(seed):
    """knows leaves 600 entities, of which 256 are sampled; only the last one's friend likes anything, 40 things."""
    knows = [(1, i, 1000 + i) for i in range(1, 601)]
    likes, head = [(2, 1600, 2000 + j) for j in range(40)], [(3, 600, 2000 + j) for j in range(6)]
    found = miner.mine_rules(torch.tensor(knows + likes + head), 3, 2100, MiningConfig(max_length=2, seed=seed)).rules
    counts = dict(zip(map(tuple, found.labels.tolist()), found.body_pairs.tolist()))
    assert counts[4, 0, 2, -1] == 40 and not found.std_error.any()


def test_thresholds_leave_out_what_is_below_them():
    facts = [tuple(row) for row in load("family_tree:30:1").facts.tolist()]
    graph = torch.tensor(facts), 12, 400
    found = miner.mine_rules(*graph, MiningConfig(max_length=2, min_support=4, min_confidence=0.3)).rules
    assert len(found.support) and (found.support - found.circular_support >= 4).all()
    assert (miner.leave_one_out_confidence(found) >= 0.3).all()


@pytest.mark.parametrize("facts", [np.zeros((0, 3)), [[1, 1, 2]], [[1, 1, 0], [2, 3, 0]], [[1, 1, 2, 3]]])
def test_a_graph_without_a_pattern_has_no_rule(facts):
    table = torch.tensor(np.array(facts, dtype=np.int64))
    found = miner.mine_rules(table, 2, 6, MiningConfig(min_support=1, constants=True))
    assert len(found.rules.support) == 0 and miner.rule_atoms(found.rules, 6).shape == (0, 4, 3)
    assert bool(found.notes) == bool((len(table) and (table[:, 2] == 0).any()) or table.shape[1] > 3)


def test_a_random_graph_has_no_confident_rule():
    random = Random(0)
    facts = sorted({tuple(random.randint(1, n) for n in (4, 300, 300)) for _ in range(3000)})
    found = miner.mine_rules(torch.tensor(facts), 4, 300, MiningConfig(constants=True, min_confidence=0.2))
    assert found.n_candidates == 0


def test_the_rules_that_made_a_graph_are_found_again():
    """family_tree is made by exact rules: `husband` and `wife` imply each other; every predicate has an exact rule."""
    data = load("family_tree:300:5")
    facts = torch.from_numpy(np.concatenate([data.facts, data.valid, data.test]))
    found = miner.mine_rules(facts, data.n_predicates, data.n_constants, MiningConfig()).rules
    table = {name: i for i, name in enumerate(data.predicates, 1)}
    kept = {tuple(map(tuple, rule[rule[:, 0] > 0].tolist())) for rule in miner.rule_atoms(found, data.n_constants)}
    x, y = data.n_constants + 1, data.n_constants + 2
    assert ((table["husband"], x, y), (table["wife"], y, x)) in kept
    assert ((table["wife"], x, y), (table["husband"], y, x)) in kept
    exact = miner.leave_one_out_confidence(found) == 1.0
    assert {int(p) for p in found.labels[exact, 0] // 2 + 1} == set(range(1, 13))


def test_a_sample_is_within_its_error_and_the_same_seed_gives_the_same_rules():
    """Of about 30 estimates no more than a few are off by over 3 standard errors."""
    data = load("family_tree:2000:2")
    run = lambda **settings: miner.mine_rules(
        torch.from_numpy(data.facts), data.n_predicates, data.n_constants, MiningConfig(max_length=3, **settings)
    )
    one, two, other = run(max_rows=40_000), run(max_rows=40_000), run(max_rows=40_000, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(one.rules, two.rules))
    assert not all(torch.equal(a, b) for a, b in zip(one.rules, other.rules))
    sampled = one.rules.std_error > 0
    assert sampled.sum() > 10 and any("estimated counts" in note for note in one.notes)
    world, sizes = kb.build(
        data.facts,
        miner.rule_atoms(one.rules, data.n_constants).numpy(),
        n_constants=data.n_constants,
        n_predicates=data.n_predicates,
    )
    truth = kb.rule_confidence(with_confidence(world, sizes))
    off = ((miner.confidence(one.rules) - truth).abs() / one.rules.std_error)[sampled]
    assert (off > 3).float().mean() < 0.1
    assert torch.allclose(miner.confidence(one.rules)[~sampled], truth[~sampled].double(), atol=1e-6)


def test_what_the_work_does_not_suffice_for_is_said_even_where_no_rule_is_found():
    data = load("family_tree:60:2")
    run = lambda work: miner.mine_rules(
        torch.from_numpy(data.facts), data.n_predicates, data.n_constants, MiningConfig(max_length=1, max_rows=work)
    )
    assert run(1).notes == ("length 1: 12 of 12 heads were looked at through a sample of their facts",)
    assert not len(run(1).rules.support) and len(run(10**6).rules.support) and run(10**6).notes == ()


def test_a_time_limit_ends_in_what_was_found_by_then():
    data = load("family_tree:2000:2")
    cfg = MiningConfig(constants=True, time_limit=0.05)
    found = miner.mine_rules(torch.from_numpy(data.facts), data.n_predicates, data.n_constants, cfg)
    assert any("stopped after 0.05 seconds" in note for note in found.notes)
    assert found.seconds < 10
    assert found.rules.std_error.isfinite().all()


def test_pca_pairs_that_the_work_does_not_suffice_for_are_estimates_and_say_so():
    random = Random(0)
    facts = sorted({(1, random.randint(1, 400), random.randint(1, 400)) for _ in range(16_000)})
    facts += [(2, x, x + 1) for x in range(1, 200)]
    steps, draw = (
        paths.build_edge_index(torch.tensor(facts), 2, 400),
        torch.tensor([random.random() for _ in range(401)]),
    )
    head, body = torch.tensor([0, 2]), torch.zeros((2, 2), dtype=torch.int64)
    count = lambda work: path_rules.count_pca_pairs(steps, head, body, torch.tensor([True, True]), work, draw)
    true, cut = count(10**9), count(1000)
    assert not true.std_error.any() and (cut.std_error > 0).all() and cut.std_error.isfinite().all()
    assert ((cut.total - true.total).abs() <= 4 * cut.std_error).all()


def test_a_time_limit_leaves_no_count_of_a_kept_rule_uncertain():
    """Body pairs were all counted when the time was up; PCA pairs, counted last, are too."""
    data, cfg = load("family_tree:2000:2"), MiningConfig(max_length=2)
    facts = torch.from_numpy(data.facts)
    whole = miner.mine_rules(facts, data.n_predicates, data.n_constants, cfg).rules
    graph = miner._build_context(facts.long(), data.n_predicates, data.n_constants, cfg, lambda: True)
    again = miner._with_pca_pairs(graph, whole._replace(pca_pairs=torch.zeros_like(whole.support)))
    assert torch.equal(again.pca_pairs, whole.pca_pairs) and not again.pca_std_error.any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_finds_the_same_rules():
    data, cfg = load("family_tree:2000:2"), MiningConfig(constants=True, max_rows=40_000)
    found = [
        miner.mine_rules(torch.from_numpy(data.facts).to(device), data.n_predicates, data.n_constants, cfg).rules
        for device in ("cpu", "cuda")
    ]
    assert all(torch.allclose(a.double(), b.cpu().double()) for a, b in zip(*found))


@needs_data
@pytest.mark.parametrize("name", ["umls", "countries_S2"])
def test_counts_are_those_of_the_knowledge_base(name):
    data = load(DATA / name)
    cfg = MiningConfig(max_length=2, constants=True)
    found = miner.mine_rules(torch.from_numpy(data.facts), data.n_predicates, data.n_constants, cfg).rules
    world, sizes = kb.build(
        data.facts,
        miner.rule_atoms(found, data.n_constants).numpy(),
        n_constants=data.n_constants,
        n_predicates=data.n_predicates,
    )
    world = with_confidence(world, sizes)
    assert torch.equal(world.support, found.support.float()) and torch.equal(world.body_pairs, found.body_pairs.float())
