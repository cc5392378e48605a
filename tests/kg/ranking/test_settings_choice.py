"""Settings chosen on the valid split: every trial's MRR is that of the task built with its settings."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from funcppo.core.deadline import Deadline
from funcppo.kg.graph import loaders
from funcppo.kg.logic import consequences
from funcppo.kg.ranking import ranking, scorers, settings_choice
from funcppo.kg.ranking.ranking import RankingProtocol, ranked_sides
from funcppo.kg.ranking.settings_choice import (
    SCORES,
    SMOOTHINGS,
    choose_settings,
    describe_choice,
)
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
        scorers.make_untrained_scorer(task, score),
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
    assert chosen[0].mrr >= best - settings_choice.MIN_GAIN
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
    assert choice.settings.max_height == settings_choice.DEFAULT_HEIGHT
    assert choice.settings.smoothing == settings_choice.DEFAULT_SMOOTHING
    assert choice.score == settings_choice.DEFAULT_SCORE
    assert choice.notes == (
        "no valid split: height 1, smoothing 5, object identity off, score noisy-or@3",
    )


def test_a_height_beyond_the_budget_is_not_tried(monkeypatch):
    budgets = []

    class Counting(settings_choice.RowBudget):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            budgets.append(self)

    monkeypatch.setattr(settings_choice, "RowBudget", Counting)
    # Counts that are known leave little to do at height 1, without object identity, which comes first.
    counts = choose_settings(random_graph(), OPEN).rule_counts
    assert counts is not None and (counts >= 0).all()
    graph = replace(random_graph(), rule_counts=counts)
    budgets.clear()
    choose_settings(graph, OPEN)
    first, *others = (budget.n_rows for budget in budgets)
    assert first < max(others)

    monkeypatch.setattr(settings_choice, "MAX_TRIAL_ROWS", first)
    choice = choose_settings(graph, OPEN)
    assert {trial.height for trial in choice.trials} == {1}
    assert any(
        note.startswith("height 2 not tried: ") and f"{first:,}" in note
        for note in choice.notes
    )

    monkeypatch.setattr(settings_choice, "MAX_TRIAL_ROWS", 1)
    choice = choose_settings(random_graph(), OPEN)
    assert not choice.trials
    assert choice.notes[-1].startswith("nothing to choose by: height 1")
    # Neither object identity nor a greater height could take less.
    (said,) = choice.notes[:-1]
    assert said.startswith("height 1 not tried: more than 1 rows")


def test_a_sample_of_the_rules_tells_what_takes_too_long(monkeypatch):
    """Trials after the first are not begun where a sample makes more than its share of the rows."""
    monkeypatch.setattr(consequences, "MIN_SAMPLED_RULES", 2)
    monkeypatch.setattr(consequences, "SAMPLED_RULES_SHARE", 0.5)
    counts = choose_settings(random_graph(), OPEN).rule_counts
    graph = replace(random_graph(), rule_counts=counts)
    whole = choose_settings(graph, OPEN)
    assert {trial.height for trial in whole.trials} != {1}

    counted = []

    def count_rules(*args, **kwargs):
        counted.append(kwargs)
        raise AssertionError("it takes too long")

    monkeypatch.setattr(settings_choice, "count_rules", count_rules)
    monkeypatch.setattr(consequences, "iter_consequences", endless)
    choice = choose_settings(graph, OPEN)
    assert not counted
    assert {(t.height, t.object_identity) for t in choice.trials} == {
        (1, False)
    }
    said = f"more than {settings_choice.MAX_TRIAL_ROWS:,} rows of joins, by a random sample of 2 of 4 rules"
    assert choice.notes == (
        f"height 1 with object identity not tried: {said}",
        f"height 2 not tried: {said}; what takes longer is not tried either",
    )


def endless(kb, sizes, *, rule_ids, budget, **settings):
    """Rules whose joins make rows without an end."""
    while True:
        budget.spend(1_000_000)
        yield None


def test_fewer_queries_choose_where_all_take_too_long(monkeypatch):
    """A query takes a second; a first trial has 0.4 of 40 seconds, too few for 20, and then 8."""
    now = [0.0]
    list_candidates = settings_choice._list_candidates

    def take_seconds(sample, height, object_identity, budget, show):
        now[0] += float(len(sample.queries))
        budget.spend(0)
        return list_candidates(sample, height, object_identity, budget, show)

    monkeypatch.setattr(settings_choice, "_list_candidates", take_seconds)
    monkeypatch.setattr(settings_choice, "FEWER_QUERIES", 0.25)
    monkeypatch.setattr(settings_choice, "MIN_QUERIES", 2)
    deadline = Deadline(at=40.0, clock=lambda: now[0])
    cfg = replace(OPEN, max_height=1, object_identity=False)
    graph = random_graph(n_valid=20)
    choice = choose_settings(graph, cfg, deadline=deadline)
    assert choice.n_queries == 5 and len(choice.trials) == 12
    over = Deadline(at=0.0, clock=lambda: now[0])
    choice = choose_settings(graph, cfg, deadline=over)
    assert not choice.trials
    assert choice.notes[0].startswith("height 1 not tried: more time")


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
