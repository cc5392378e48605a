"""Settings chosen on the valid split: every trial's MRR is that of the task built with its settings."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from funcppo.core.deadline import Deadline
from funcppo.kg.graph import loaders
from funcppo.kg.graph.dataset import Dataset
from funcppo.kg.graph.loaders import from_triples
from funcppo.kg.logic import fixpoint
from funcppo.kg.logic.joins import RowBudgetExceeded
from funcppo.kg.mining.config import (
    MAX_TINY_FACTS,
    ROWS_PER_SECOND,
    MiningConfig,
)
from funcppo.kg.ranking import ranking
from funcppo.kg.ranking.ranking import RankingProtocol, ranked_sides
from funcppo.kg.run import choices
from funcppo.kg.run.choices import (
    SCORES,
    SMOOTHINGS,
    choose_settings,
    describe_choice,
)
from funcppo.kg.scores.score import parse
from funcppo.kg.search import task as task_module
from funcppo.kg.search.config import ProverTaskConfig
from funcppo.kg.search.task import build_task

OPEN = ProverTaskConfig(smoothing="auto", object_identity="auto")
RULES = """
r(X, Y) :- s(X, Y)
r(X, Y) :- s(X, Z), r(Z, Y)
r(X, Y) :- r(Y, X)
r(X, Y) :- s(Z, X), s(Z, Y)
"""


def random_graph(seed=0, n_valid=12):
    """Two relations over nine entities, a rule of each kind, and a valid split."""
    rng = np.random.default_rng(seed)
    pairs = [(i, j) for i in range(9) for j in range(9)]
    order = rng.permutation(len(pairs))
    r = [pairs[i] for i in order[:34]]
    s = [pairs[i] for i in rng.permutation(len(pairs))[:20]]

    def triples(rows, relation):
        return [(f"e{i}", relation, f"e{j}") for i, j in rows]

    return loaders.from_triples(
        triples(r[n_valid:], "r") + triples(s, "s"),
        triples(r[:n_valid], "r"),
        rules=RULES,
    )


@pytest.fixture(scope="module")
def choice():
    return choose_settings(random_graph(), OPEN)


def task_mrr(dataset, settings, score):
    """The MRR by the ordinary path: the whole task, all valid queries."""
    task = build_task(dataset, settings)
    ranked = ranking.rank_split(
        task,
        dataset.valid,
        parse(score),
        RankingProtocol(sides=ranked_sides(task)),
    )
    return ranking.summarise_ranking(ranked, ["r", "s"], with_auc=False)["mrr"]


def test_every_trial_ranks_as_the_task_with_its_settings(choice):
    heights = {trial.height for trial in choice.trials}
    assert {1, 2} <= heights
    for trial in choice.trials[::5]:
        settings = replace(
            OPEN,
            max_height=trial.height,
            smoothing=trial.smoothing,
            object_identity=trial.object_identity,
        )
        mrr = task_mrr(random_graph(), settings, trial.score)
        assert mrr == pytest.approx(trial.mrr, abs=1e-12), trial


def test_the_best_trial_is_chosen(choice):
    best = max(trial.mrr for trial in choice.trials)
    settings = choice.settings
    chosen = [
        trial
        for trial in choice.trials
        if trial[:4]
        == (
            settings.max_height,
            settings.object_identity,
            settings.smoothing,
            choice.score,
        )
    ]
    assert len(chosen) == 1
    assert chosen[0].mrr >= best - choices.MIN_GAIN
    at_height_one = [t for t in choice.trials if t.height == 1]
    assert len(at_height_one) == 2 * len(SMOOTHINGS) * len(SCORES)


def test_the_notes_hold_the_numbers_compared(choice):
    notes = describe_choice(choice, 1)
    off, on = (
        max(
            t.mrr
            for t in choice.trials
            if t.height == 1 and t.object_identity is value
        )
        for value in (False, True)
    )
    assert any(f"off {off:.4f}, on {on:.4f}" in note for note in notes)
    assert any(note.startswith("height ") for note in notes)
    assert any("noisy-or@3 " in note for note in notes)
    # A height is called chosen only where it is.
    height = choice.settings.max_height
    for at, verb in ((height, "chosen"), (height + 1, "ranks best")):
        first = describe_choice(choice, at)[0]
        assert first.startswith(f"height {height} {verb}: MRR of rule")


def test_what_is_set_is_kept():
    cfg = ProverTaskConfig(
        max_height=2, smoothing=1.5, object_identity=False, hidden_dim=8
    )
    fixed = choose_settings(random_graph(), cfg, "noisy-or")
    assert fixed.settings == cfg
    assert fixed.score == "noisy-or"
    assert not fixed.trials  # nothing is left to compare

    partly = choose_settings(random_graph(), replace(OPEN, max_height=1))
    assert {trial.height for trial in partly.trials} == {1}


def test_a_score_with_other_facts_has_the_settings_of_the_score_without():
    variant, plain = (
        choose_settings(random_graph(), OPEN, name)
        for name in ("noisy-or-other-facts", "noisy-or")
    )
    assert variant.score == "noisy-or-other-facts"
    assert variant.settings == plain.settings
    assert [t.mrr for t in variant.trials] == [t.mrr for t in plain.trials]


def test_object_identity_that_is_set_holds_at_every_height():
    choice = choose_settings(
        random_graph(), replace(OPEN, object_identity=True)
    )
    assert all(trial.object_identity for trial in choice.trials)
    assert {trial.height for trial in choice.trials} >= {1, 2}


def test_without_valid_queries_the_defaults_are_said():
    dataset = random_graph(n_valid=0)
    choice = choose_settings(dataset, OPEN)
    assert choice.notes == (
        "no valid split: height 1, smoothing 5, object identity off, score noisy-or@3",
    )


def test_a_height_beyond_the_budget_is_not_tried(monkeypatch):
    budgets = []

    class Counting(choices.RowBudget):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            budgets.append(self)

    monkeypatch.setattr(choices, "RowBudget", Counting)
    # Counts that are known leave little to do at height 1, without object identity, which comes first.
    counts = choose_settings(random_graph(), OPEN).rule_counts
    assert counts is not None and (counts >= 0).all()
    graph = replace(random_graph(), rule_counts=counts)
    budgets.clear()
    choose_settings(graph, OPEN)
    first, *others = (budget.n_rows for budget in budgets)
    assert first < max(others)

    monkeypatch.setattr(choices, "MAX_TRIAL_ROWS", first)
    choice = choose_settings(graph, OPEN)
    assert {trial.height for trial in choice.trials} == {1}
    assert any(
        note.startswith("height 2 not tried: ") and f"{first:,}" in note
        for note in choice.notes
    )

    monkeypatch.setattr(choices, "MAX_TRIAL_ROWS", 1)
    choice = choose_settings(random_graph(), OPEN)
    assert not choice.trials
    assert choice.notes[-1].startswith("nothing to choose by: height 1")
    # Neither object identity nor a greater height could take less.
    (said,) = choice.notes[:-1]
    assert said.startswith("height 1 not tried: more than 1 rows")


def test_a_sample_of_the_rules_tells_what_takes_too_long(monkeypatch):
    """Trials after the first are not begun where a sample makes more than its share of the rows."""
    counts = choose_settings(random_graph(), OPEN).rule_counts
    graph = replace(random_graph(), rule_counts=counts)

    def make_too_many(*args, **kwargs):
        raise RowBudgetExceeded("too many rows")

    def count_rules(*args, **kwargs):
        raise AssertionError("it takes too long")

    monkeypatch.setattr(fixpoint, "check_sampled_rows", make_too_many)
    monkeypatch.setattr(choices, "count_rules", count_rules)
    choice = choose_settings(graph, OPEN)
    assert {(t.height, t.object_identity) for t in choice.trials} == {
        (1, False)
    }
    assert choice.notes == (
        "height 1 with object identity not tried: too many rows",
        "height 2 not tried: too many rows; what takes longer is not tried either",
    )


def test_each_stage_shows_how_much_of_it_is_done():
    """Counts of rules, questions or rules whose candidates are listed, and rankings: they tell the time left."""
    calls = []
    graph = random_graph()
    choose_settings(graph, OPEN, on_phase=lambda *call: calls.append(call))
    stages: dict[str, list] = {}
    for text, *done in calls:
        if text.startswith("choosing settings: "):
            stages.setdefault(text, []).append(tuple(done[:2]))

    def of(words, stage):
        (found,) = [
            done
            for text, done in stages.items()
            if text.startswith(f"choosing settings: {words}, within")
            and text.endswith(f": {stage}")
        ]
        return found

    # Questions of both sides, each once, and at height 1 the beginning of the stage.
    asked = {(side, row[3 - side]) for row in graph.valid for side in (1, 2)}
    *_, last = of("height 1", "listing candidates")
    assert last == (len(asked), len(asked))
    assert of("height 1", "ranking") == [(i, 12) for i in range(13)]
    identity = "height 1 with object identity"
    assert of(identity, "counting rules") == [(i, 4) for i in range(1, 5)]
    assert of(identity, "ranking") == [(i, 12) for i in range(13)]
    assert of("height 2", "T_P") == [(0, None)]
    assert of("height 2", "listing candidates") == [(i, 4) for i in range(1, 5)]


def count_estimates(notes) -> int:
    """The number of rules that the notes call estimated."""
    return sum(
        int(note.split()[3])
        for note in notes
        if note.startswith("estimated counts of")
    )


def test_estimates_stand_where_exact_counts_take_too_many_rows(monkeypatch):
    cfg = replace(OPEN, max_height=1, object_identity=False)
    exact = choose_settings(random_graph(), cfg).rule_counts
    assert exact is not None
    unknown = np.full_like(exact, -1)
    graph = replace(
        random_graph(), rule_counts=unknown, rule_estimates=exact + 1
    )
    found = choose_settings(graph, cfg).rule_counts
    assert np.array_equal(found, exact)
    assert not count_estimates(choose_settings(graph, cfg).notes)
    monkeypatch.setattr(task_module, "MAX_COUNT_ROWS", 1)
    choice = choose_settings(graph, cfg)
    assert np.array_equal(choice.rule_counts, exact + 1)
    assert count_estimates(choice.notes) == len(exact)
    task = build_task(graph, replace(cfg, smoothing=None))
    assert task.kb.support.tolist() == (exact + 1)[:, 0].tolist()
    assert count_estimates(task.notes) == len(exact)


@pytest.mark.parametrize("object_identity", [True, False])
def test_without_estimates_all_rows_are_counted(monkeypatch, object_identity):
    """Estimates are of rules without object identity; a file may hold none, or not those of all rules."""
    cfg = replace(
        OPEN, max_height=1, smoothing=None, object_identity=object_identity
    )
    expected = build_task(random_graph(), cfg).kb.support
    monkeypatch.setattr(task_module, "MAX_COUNT_ROWS", 1)
    unknown = np.full((len(random_graph().rules), 3), -1)
    few = unknown.copy()
    few[0] = 1
    # with object identity those of all rules do not stand either
    for estimates in (
        unknown,
        few,
        np.abs(unknown) if object_identity else few,
    ):
        graph = replace(
            random_graph(), rule_counts=unknown, rule_estimates=estimates
        )
        assert torch.equal(build_task(graph, cfg).kb.support, expected)


# -- mining settings of tiny dense graphs


OPEN = ProverTaskConfig(smoothing="auto", object_identity="auto")
# `likes` is the inverse of `knows`; `meets` says nothing.
GOOD = "likes(X, Y) :- knows(Y, X)\n"
BAD = "likes(X, Y) :- meets(X, Y)\n"


def small_graph(rules: str, n_valid: int = 4) -> Dataset:
    """A graph of which valid asks for `likes`."""
    pairs = [(a, b) for a in "abcde" for b in "vwxyz"]
    likes = [(b, "likes", a) for a, b in pairs]
    known = [(a, "knows", b) for a, b in pairs]
    known += [("v", "meets", "w"), ("w", "meets", "v")]
    return from_triples(
        [*known, *likes[n_valid:]], likes[:n_valid], rules=rules
    )


@pytest.mark.parametrize("order", [("first", "second"), ("second", "first")])
def test_the_rules_that_rank_valid_better_are_chosen(order):
    rules = {"first": BAD, "second": GOOD}
    datasets = {name: small_graph(rules[name]) for name in order}
    name, note = choices.choose_rules(datasets, OPEN)
    assert name == "second"
    first, second = (note.index(f"those of {name} ") for name in order)
    assert first < second


def test_the_first_rules_are_kept_unless_others_gain():
    datasets = {name: small_graph(GOOD) for name in ("own", "usual")}
    assert choices.choose_rules(datasets, OPEN)[0] == "own"
    # Without time nothing is ranked.
    late = Deadline(at=0.0, clock=lambda: 1.0)
    datasets = {"own": small_graph(BAD), "usual": small_graph(GOOD)}
    name, note = choices.choose_rules(datasets, OPEN, deadline=late)
    assert name == "own"
    assert "not compared" in note


def test_only_a_tiny_dense_graph_with_a_valid_split_has_two_candidates():
    dense = [(a, "knows", b) for a in "abcd" for b in "abcd"]
    valid = [("a", "likes", "b")]
    tiny = choices.candidate_configs(from_triples(dense, valid), 7.0)
    own, usual = tiny.values()
    assert own == MiningConfig(
        max_length=2, min_support=3, votes_per_fact=3, seconds=7.0
    )
    assert usual == MiningConfig(seconds=3.5, max_rows=20 * ROWS_PER_SECOND)
    unsplit = choices.candidate_configs(from_triples(dense), 7.0)
    assert list(unsplit.values()) == [own]
    sparse = from_triples([(f"x{i}", "r", f"y{i}") for i in range(9)], valid)
    usual_alone = choices.candidate_configs(sparse, 7.0)
    assert list(usual_alone.values()) == [MiningConfig(seconds=7.0)]
    facts = [(f"x{i}", "r", f"y{i}") for i in range(MAX_TINY_FACTS + 1)]
    small = choices.candidate_configs(from_triples(facts, valid), 7.0)
    assert list(small.values()) == [MiningConfig(votes_per_fact=3, seconds=7.0)]
