"""The miner: counts by hand and by brute force; votes; which rules are kept; what budgets and interrupts do."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from funcppo.kg.graph.loaders import load
from funcppo.kg.graph.rules import format_rule_table
from funcppo.kg.logic import kb
from funcppo.kg.logic.fixpoint import count_rules
from funcppo.kg.mining import (
    ROWS_PER_SECOND,
    MiningConfig,
    counts,
    default_config,
    miner,
    paths,
)
from funcppo.kg.run import rule_files
from tests import oracles
from tests.kg.mining.brute_force import (
    X,
    Y,
    brute_force,
    clauses_of,
    constant_clauses,
    counts_of,
    graphs,
    mined,
    path_clauses,
    path_counts,
)
from tests.oracles import Program


def mine(data, progress=lambda *_: None, device="cpu", **settings):
    facts = torch.from_numpy(data.facts).to(device)
    shape = data.n_predicates, data.n_constants
    return miner.mine_rules(facts, *shape, MiningConfig(**settings), progress)


def assert_counted(data, rules, names):
    """The joins count the same."""
    atoms = counts.rule_atoms(rules, data.n_constants).numpy()
    n_all = {"n_constants": data.n_constants, "n_predicates": data.n_predicates}
    truth = count_rules(*kb.build(data.facts, atoms, **n_all))
    for name in names:
        assert torch.equal(getattr(rules, name).long(), getattr(truth, name))


def test_counts_worked_by_hand():
    """likes(1,2), likes(2,1), likes(2,3), knows(1,2): the inverse derives likes(1,2) and (2,1) but also (3,2).

    knows(X,Y) :- likes(X,Y) is right once: were that fact unknown, nothing would speak for the rule.
    """
    found = mined([(1, 1, 2), (1, 2, 1), (1, 2, 3), (2, 1, 2)], max_length=1)
    assert clauses_of(found.rules) == [((1, X, Y), (1, Y, X))]
    assert counts_of(found.rules) == [(2, 0, 3, 2)]
    assert found.rules.head_facts.tolist() == [3]
    assert found.notes == () and found.interrupt is None
    assert found.rows == 8  # both directions of each fact


def mined_in_parts(chunk_rows, facts, **settings):
    """What is mined where tables have few rows."""
    with pytest.MonkeyPatch.context() as patch:
        pack, few = paths.pack, lambda limit: min(limit, chunk_rows)
        patch.setattr(paths, "pack", lambda cost, n: pack(cost, few(n)))
        return mined(facts, **settings)


CHUNKS = st.sampled_from([3, 40, 1 << 20])


@given(graphs, st.booleans(), CHUNKS)
def test_what_is_mined_is_counted_as_by_brute_force(facts, constants, rows):
    found = mined_in_parts(rows, facts, constants=constants)
    assert counts_of(found.rules) == brute_force(facts, clauses_of(found.rules))
    assert found.notes == ()
    score = counts.smoothed_confidence(found.rules)
    assert (torch.diff(score) <= 0).all()


@given(graphs, st.integers(1, 3), CHUNKS)
def test_every_fact_keeps_its_best_rules_and_no_others(facts, votes, rows):
    clauses = path_clauses(2) + constant_clauses()
    program = Program(6, (2, 2), tuple(facts), tuple(clauses))
    derived = {}
    for i, atom in oracles.consequences(program, leave_one_out=True):
        if atom in facts:
            derived.setdefault(clauses[i], []).append(atom)
    true = {}
    for clause, counted in zip(clauses, brute_force(facts, clauses)):
        if clause in derived:
            true[clause] = derived[clause], counted[0], counted[2]
    best, won = kept_scores(true, votes)
    settings = {"max_length": 2, "constants": True, "votes_per_fact": votes}
    kept = clauses_of(mined_in_parts(rows, facts, **settings).rules)
    of_kept = {clause: true[clause] for clause in kept}
    assert kept_scores(of_kept, votes)[0] == best
    assert set(kept) <= won


def kept_scores(of_rules, votes):
    """The best scores of each fact among rules, and which rules have one of them."""
    by_fact = {}
    for rule, (derived, support, pairs) in of_rules.items():
        right, wrong = len(derived) - 1, pairs - support
        prior = counts.SMOOTHING_COUNT * (len(rule) - 1)
        score = right / (right + wrong + prior)
        for fact in derived if score > 0 else ():
            by_fact.setdefault(fact, []).append((score, rule))
    best, kept = {}, set()
    for fact, values in by_fact.items():
        best[fact] = sorted(score for score, _ in values)[-votes:]
        kept |= {rule for score, rule in values if score >= best[fact][0]}
    return best, kept


@given(
    max_length=st.sampled_from([4, 5]),
    facts=graphs,
    votes=st.integers(1, 3),
    support=st.sampled_from([1, 1, 3]),
    rows=CHUNKS,
)
def test_long_rules_as_by_brute_force(max_length, facts, votes, support, rows):
    """Ties may go to another rule, so each fact is to have rules of the same scores."""
    true = path_counts(facts, range(1, max_length + 1))
    true = {rule: x for rule, x in true.items() if len(x[0]) >= support}
    best, kept = kept_scores(true, votes)
    limits = {"votes_per_fact": votes, "min_support": support}
    found = mined_in_parts(rows, facts, max_length=max_length, **limits)
    mined_counts = {}
    for labels, row in zip(found.rules.labels.tolist(), counts_of(found.rules)):
        rule = tuple(label for label in labels if label >= 0)
        derived, support, pairs = true[rule]
        assert row[:3] == (support, support - len(derived), pairs)
        mined_counts[rule] = true[rule]
    assert kept_scores(mined_counts, votes)[0] == best
    assert set(mined_counts) <= kept
    assert found.notes == ()


@given(graphs, st.randoms(use_true_random=False))
@settings(max_examples=20)
def test_the_order_of_the_facts_does_not_matter(facts, random):
    first = mined(facts, constants=True).rules
    shuffled = list(facts)
    random.shuffle(shuffled)
    second = mined(shuffled, constants=True).rules
    # PCA pairs are NaN where they are not counted.
    for one, other in zip(first, second):
        assert torch.equal(one.nan_to_num(-1), other.nan_to_num(-1))


@pytest.mark.parametrize(
    "facts",
    [np.zeros((0, 3)), [[1, 1, 2]], [[1, 1, 0], [2, 3, 0]], [[1, 1, 2, 3]]],
)
def test_a_graph_without_a_pattern_has_no_rule(facts):
    table = torch.tensor(np.array(facts, dtype=np.int64))
    cfg = MiningConfig(min_support=1, constants=True)
    found = miner.mine_rules(table, 2, 6, cfg)
    assert not len(found.rules.support)
    assert counts.rule_atoms(found.rules, 6).shape == (0, 6, 3)
    is_binary = len(table) == 0 or table.tolist() == [[1, 1, 2]]
    assert bool(found.notes) != is_binary


def test_the_rules_that_made_a_graph_are_found_again():
    """family_tree is made by exact rules: `husband` and `wife` imply each other; every predicate has an exact rule."""
    data = load("family_tree:300:5")
    facts = np.concatenate([data.facts, data.valid, data.test])
    found = mine(replace(data, facts=facts)).rules
    table = {name: i for i, name in enumerate(data.predicates, 1)}
    kept = {
        tuple(map(tuple, rule[rule[:, 0] > 0].tolist()))
        for rule in counts.rule_atoms(found, data.n_constants)
    }
    x, y = data.n_constants + 1, data.n_constants + 2
    assert ((table["husband"], x, y), (table["wife"], y, x)) in kept
    assert ((table["wife"], x, y), (table["husband"], y, x)) in kept
    exact = counts.leave_one_out_confidence(found) == 1.0
    heads = set((found.labels[exact, 0] // 2 + 1).tolist())
    assert heads == set(range(1, 13))


@pytest.mark.parametrize("max_rows", [20_000, 100_000, 1_000_000])
def test_the_rows_stay_within_the_limit_and_what_is_left_out_is_said(max_rows):
    """A tenth more is allowed."""
    data = load("family_tree:2000:2")
    found = mine(data, max_rows=max_rows)
    assert found.rows <= 1.1 * max_rows + 2 * len(data.facts)
    assert found.max_rows == max_rows
    is_whole = lambda stage: stage.fraction == 1 and stage.is_finished
    left_out = [x for x in found.stages if x.n_left_out or not is_whole(x)]
    assert left_out
    for stage in left_out:
        assert any(note.startswith(stage.name) for note in found.notes)


def test_a_seed_gives_the_same_rules_of_a_sample_with_exact_counts():
    data = load("family_tree:2000:2")
    one = mine(data, max_rows=150_000)
    two = mine(data, max_rows=150_000)
    other = mine(data, max_rows=150_000, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(one.rules, two.rules))
    assert one.rules.support.tolist() != other.rules.support.tolist()
    assert len(one.rules.cost) > 10
    assert any("that a sample showed" in note for note in one.notes)
    assert_counted(data, one.rules, ["support", "body_pairs"])


def test_a_pca_confidence_is_exact_or_not_given():
    data = load("family_tree:400:2")
    settings = {
        "max_length": 1,
        "min_support": 1,
        "min_confidence": 0.0,
        "constants": True,
    }
    few = mine(data, max_rows=20_000, **settings)
    is_path = few.rules.end_constants[:, 0] == 0
    assert few.rules.pca_pairs[~is_path].isnan().any()
    assert not few.rules.pca_pairs[is_path].isnan().any()
    assert any("have no PCA confidence" in note for note in few.notes)
    found = mine(data, max_rows=10**6, **settings)
    assert not found.rules.pca_pairs.isnan().any()
    cfg = MiningConfig(max_rows=20_000, **settings)
    mined = rule_files.mine_dataset(data, cfg)
    text = format_rule_table(mined.dataset, mined.statistics, "tsv")
    *_, header = (x for x in text.splitlines() if "pca_conf" in x)
    column = header.split("\t").index("pca_conf")
    lines = [x.split("\t") for x in text.splitlines() if ":-" in x]
    n_unknown = int(few.rules.pca_pairs.isnan().sum())
    assert sum(line[column] == "nan" for line in lines) == n_unknown


def test_a_time_limit_ends_in_what_was_found_by_then(monkeypatch):
    """A clock that each look at it moves by a second."""
    data = load("family_tree:400:2")
    ticks = iter(range(10**9))
    budget = partial(miner.Budget, clock=lambda: next(ticks))
    monkeypatch.setattr(miner, "Budget", budget)
    found = mine(data, constants=True, seconds=8.0)
    assert any("limit of 8 seconds" in note for note in found.notes)
    assert not all(stage.is_finished for stage in found.stages)
    assert len(found.rules.support)


def test_rules_of_length_1_are_found_on_any_machine():
    data = load("family_tree:400:2")
    found = mine(data, constants=True, seconds=1e-9, max_rows=10**9)
    of_length_1 = mine(data, max_length=1)
    assert found.is_late
    assert not of_length_1.is_late
    for ours, theirs in zip(found.rules, of_length_1.rules):
        assert torch.equal(ours, theirs)
    assert [stage.is_finished for stage in found.stages][:2] == [True, False]


@pytest.mark.parametrize(
    ("n_calls", "max_rows"), [(1, 10**9), (5, 20_000), (9, 10**9), (12, 20_000)]
)
def test_an_interrupt_keeps_what_was_found_as_counted(n_calls, max_rows):
    data = load("family_tree:400:2")
    calls = 0

    def interrupt(*_):
        nonlocal calls
        calls += 1
        if calls == n_calls:
            raise KeyboardInterrupt

    found = mine(data, interrupt, max_rows=max_rows)
    assert calls == n_calls
    assert isinstance(found.interrupt, KeyboardInterrupt)
    assert any("interrupted" in note for note in found.notes)
    if len(found.rules.support):
        assert_counted(data, found.rules, ["support"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_finds_the_same_rules():
    data = load("family_tree:2000:2")
    settings = {"constants": True, "max_rows": 400_000}
    on_cpu, on_gpu = (
        mine(data, device=device, **settings).rules
        for device in ("cpu", "cuda")
    )
    for column, other in zip(on_cpu, on_gpu):
        assert torch.allclose(column.double(), other.cpu().double())


# ---- Settings.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_length": 0}, "max_length: expected 1 to 5, got 0"),
        ({"max_length": 6}, "max_length: expected 1 to 5, got 6"),
        ({"min_support": 0}, "min_support: expected 1 or more, got 0"),
        ({"votes_per_fact": 0}, "votes_per_fact: expected 1 or more, got 0"),
        ({"max_rows": 0}, "max_rows: expected 1 or more, got 0"),
        ({"min_confidence": 1.5}, "min_confidence: expected 0 to 1, got 1.5"),
        ({"seconds": 0.0}, "seconds: expected more than 0, got 0.0"),
    ],
)
def test_a_field_out_of_range_is_named(settings, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        MiningConfig(**settings)


def test_seconds_set_the_rows_unless_rows_are_given():
    assert MiningConfig(seconds=2.0).row_limit == 2 * ROWS_PER_SECOND
    assert MiningConfig(seconds=2.0, max_rows=5).row_limit == 5
    assert MiningConfig(seconds=1e-9).row_limit == 1


SMALL = MiningConfig(votes_per_fact=3, constants=True)
TINY_AND_DENSE = replace(SMALL, max_length=2, min_support=3)


@pytest.mark.parametrize(
    ("n_facts", "n_entities", "cfg"),
    [
        (1592, 14, TINY_AND_DENSE),
        (100, 10, TINY_AND_DENSE),
        (99, 10, SMALL),
        (1110, 271, SMALL),
        (2_001, 20, SMALL),
        (50_000, 10_000, SMALL),
        (86_835, 40_559, MiningConfig(max_length=5, constants=True)),
        (272_115, 14_505, MiningConfig(constants=True)),
    ],
)
def test_a_graph_has_what_size_and_density_ask_for(n_facts, n_entities, cfg):
    assert default_config(n_facts, n_entities) == cfg
