"""What valid decides: the loop, the settings of rules, and whole starts of runs, whose table says what was kept."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from funcppo.core import tree
from funcppo.core.host import Deadline
from funcppo.kg.config import (
    BellmanFordConfig,
    EmbeddingConfig,
    ListwiseConfig,
    ProverTaskConfig,
    QuestionConfig,
)
from funcppo.kg.graph.loaders import from_triples
from funcppo.kg.logic import fixpoint
from funcppo.kg.logic.joins import RowBudgetExceeded
from funcppo.kg.ranking import ranking
from funcppo.kg.ranking.ranking import RankingProtocol, ranked_sides
from funcppo.kg.run import choices, fit, held_out
from funcppo.kg.run.budget import RunTime
from funcppo.kg.run.choices import (
    ABOVE_MIN_GAIN,
    ALWAYS,
    BEST_BEYOND_CHANCE,
    BEYOND_CHANCE,
    LARGEST,
    SIMPLEST_OF_BEST,
    Candidate,
    Stage,
    choose,
    choose_settings,
    describe_choice,
)
from funcppo.kg.run.fit import Quality
from funcppo.kg.run.run import (
    resume_run,
    save_checkpoint,
    validation_queries,
    with_training_data,
)
from funcppo.kg.scores.score import parse
from funcppo.kg.search.task import COUNTRIES_REGIONS, build_task
from tests.kg.run.runs import (
    CONFIG,
    QUESTIONS,
    colours,
    elders,
    new_run,
    on_graph,
    random_graph,
    seating,
    visits,
)

OPEN = ProverTaskConfig(smoothing="auto", object_identity="auto")


# -- the loop


def candidates(*metrics, ranks=None):
    """Ways of these metrics, or of the means of these ranks."""
    if ranks is None:
        qualities = [Quality(metric) for metric in metrics]
    else:
        rows = [torch.tensor(row).double() for row in ranks]
        qualities = [Quality(float(row.mean()), row) for row in rows]
    return [Candidate(str(i), i, q) for i, q in enumerate(qualities)]


@pytest.mark.parametrize(
    ("accept", "metrics", "taken"),
    [
        (LARGEST, (0.5, 0.5, 0.6, 0.6), 2),  # the first of equal ones
        (LARGEST, (0.5, 0.5), 0),
        (ABOVE_MIN_GAIN, (0.5, 0.5004), 0),
        (ABOVE_MIN_GAIN, (0.5, 0.5004, 0.5006), 2),
        (SIMPLEST_OF_BEST, (0.5, 0.5996, 0.5998, 0.6), 1),
        (SIMPLEST_OF_BEST, (0.6, 0.5), 0),
        (ALWAYS, (0.6, 0.5), 1),
        (LARGEST, (0.5,), 0),
    ],
)
def test_what_is_taken_by_metric(accept, metrics, taken):
    assert accept.pick(candidates(*metrics)).value == taken


@pytest.mark.parametrize(
    ("gains", "is_taken"),
    [
        ([0.1, 0.1, 0.1, 0.1], True),
        ([0.3, 0.2, 0.1, 0.2], True),
        ([0.3, 0.1, 0.0, 0.1], False),  # 1.99 standard errors
        ([0.5, -0.4, 0.0, 0.0], False),
        ([0.0, 0.0, 0.0, 0.0], False),
    ],
)
def test_chance_is_two_standard_errors_of_the_paired_difference(
    gains, is_taken
):
    ranks = [0.5, 0.5, 1.0, 0.25]
    better = [rank + gain for rank, gain in zip(ranks, gains)]
    tried = candidates(ranks=[ranks, better])
    for accept in (BEYOND_CHANCE, BEST_BEYOND_CHANCE):
        assert (accept.pick(tried) is tried[1]) == is_taken


def test_without_valid_the_last_way_is_taken():
    tried = [Candidate("a", 1, None), Candidate("b", 2, None)]
    assert LARGEST.pick(tried).value == 2


def test_each_stage_starts_from_the_best_way_and_has_a_row():
    seen = []

    def stage(name, metric, accept=LARGEST):
        def others(best):
            seen.append((name, best.value))
            return [Candidate(name, name, Quality(metric))] if metric else []

        return Stage(name, f"no {name}", others, accept)

    run_time = RunTime()
    start = Candidate("start", "start", Quality(0.5))
    stages = [stage("a", 0.4), stage("b", 0.6), stage("c", None), stage("d", 0.7, ABOVE_MIN_GAIN)]  # fmt: skip
    assert choose(stages, start, run_time).value == "d"
    assert seen == [("a", "start"), ("b", "start"), ("c", "b"), ("d", "b")]
    rows = [row._replace(seconds=0.0) for row in run_time.choices]
    assert [(row.stage, row.chosen, row.is_kept) for row in rows] == [
        ("a", "no a", False),
        ("b", "b", True),
        ("d", "d", True),
    ]
    assert rows[0].tried == {"no a": 0.5, "a": 0.4}
    assert (rows[1].valid_before, rows[1].valid_after) == (0.5, 0.6)
    assert list(run_time.phases) == ["a", "b", "c", "d"]
    assert describe_choice(rows[1]) == "b: b chosen: valid 0.6000; no b 0.5000"

    seen.clear()
    choose(stages, start, RunTime(), stops_at_loss=True)
    assert seen == [("a", "start")]


# -- settings of rules


@pytest.fixture(scope="module")
def chosen():
    run_time = RunTime()
    return choose_settings(random_graph(), OPEN, None, run_time), run_time


def notes_of(graph, cfg, **arguments):
    run_time = RunTime()
    settings = choose_settings(graph, cfg, None, run_time, **arguments)
    return settings, run_time.notes


def test_every_trial_ranks_as_the_task_with_its_settings(chosen):
    """The ordinary path: the whole task, all valid queries."""
    dataset, settings = random_graph(), chosen[0]
    assert {1, 2} <= {trial.height for trial in settings.trials}
    for trial in settings.trials[::5]:
        task = build_task(dataset, trial.apply(OPEN))
        ranked = ranking.rank_split(
            task,
            dataset.valid,
            parse(trial.score),
            RankingProtocol(sides=ranked_sides(task)),
        )
        metrics = ranking.summarise_ranking(ranked, ["r", "s"], with_auc=False)
        assert metrics["mrr"] == pytest.approx(trial.mrr, abs=1e-12), trial


def test_the_best_trial_is_chosen_and_has_a_row(chosen):
    settings, run_time = chosen
    best = max(trial.mrr for trial in settings.trials)
    assert settings.best in settings.by_height
    assert settings.best.mrr >= best - 0.0005
    assert len([t for t in settings.trials if t.height == 1]) == 2 * 3 * 4
    (row,) = run_time.choices
    assert row.stage == "settings of rules"
    assert row.valid_after == settings.best.mrr
    assert len(row.tried) == len(settings.trials)


def test_what_is_set_is_kept():
    cfg = ProverTaskConfig(
        max_height=2, smoothing=1.5, object_identity=False, hidden_dim=8
    )
    fixed = choose_settings(random_graph(), cfg, "noisy-or")
    assert fixed.best.apply(OPEN) == replace(cfg, hidden_dim=OPEN.hidden_dim)
    assert fixed.best.score == "noisy-or" and not fixed.trials
    partly = choose_settings(random_graph(), replace(OPEN, max_height=1))
    assert {trial.height for trial in partly.trials} == {1}
    held = choose_settings(random_graph(), replace(OPEN, object_identity=True))
    assert all(trial.object_identity for trial in held.trials)
    assert {trial.height for trial in held.trials} >= {1, 2}


def test_without_valid_queries_the_defaults_are_said():
    _, notes = notes_of(random_graph(n_valid=0), OPEN)
    assert notes == ["no valid split: height 1, smoothing 5, noisy-or@3"]


def test_a_height_beyond_the_bound_of_rows_is_not_tried(monkeypatch):
    """Neither object identity nor a greater height could take less than height 1."""
    graph = random_graph()
    monkeypatch.setattr(choices, "MAX_TRIAL_ROWS", 1)
    settings, notes = notes_of(graph, OPEN)
    assert not settings.trials
    said, default = notes
    assert said.startswith("height 1 not tried: more than 1 rows")
    assert default.startswith("nothing to choose by: height 1")


def test_a_sample_of_the_rules_tells_what_takes_too_long(monkeypatch):
    """Trials after the first are not begun where a sample makes more than its share of the rows."""
    counts = choose_settings(random_graph(), OPEN).rule_counts
    graph = replace(random_graph(), rule_counts=counts)

    def make_too_many(*args, **kwargs):
        raise RowBudgetExceeded("too many rows")

    monkeypatch.setattr(fixpoint, "check_sampled_rows", make_too_many)
    settings, notes = notes_of(graph, OPEN)
    tried = {(t.height, t.object_identity) for t in settings.trials}
    assert tried == {(1, False)}
    assert notes == [
        "height 1 with object identity not tried: too many rows",
        "height 2 not tried: too many rows; what takes longer is not tried either",
    ]


def test_each_stage_shows_how_much_of_it_is_done():
    """Counts of rules, questions or rules whose candidates are listed, and rankings: they tell the time left."""
    shown: dict[str, list] = {}
    run_time = RunTime(
        on_phase=lambda text, *done: shown.setdefault(text, []).append(done[:2])
    )
    choose_settings(random_graph(), OPEN, None, run_time)
    start = "choosing settings: height 1"
    assert shown[f"{start}: ranking"] == [(i, 12) for i in range(13)]
    identity = f"{start} with object identity"
    assert shown[f"{identity}: counting rules"] == [(i, 4) for i in range(1, 5)]
    done, total = shown[f"{start}: listing candidates"][-1]
    assert done == total > 0
    assert shown["choosing settings: height 2: T_P"] == [(0, None)]


# -- mining settings of tiny dense graphs

# `likes` is the inverse of `knows`; `meets` says nothing.
GOOD = "likes(X, Y) :- knows(Y, X)\n"
BAD = "likes(X, Y) :- meets(X, Y)\n"


def small_graph(rules: str, n_valid: int = 4):
    """A graph of which valid asks for `likes`."""
    pairs = [(a, b) for a in "abcde" for b in "vwxyz"]
    likes = [(b, "likes", a) for a, b in pairs]
    known = [(a, "knows", b) for a, b in pairs]
    known += [("v", "meets", "w"), ("w", "meets", "v")]
    return from_triples(
        [*known, *likes[n_valid:]], likes[:n_valid], rules=rules
    )


def test_the_first_rules_are_kept_unless_others_rank_valid_better():
    late = Deadline(at=0.0, clock=lambda: 1.0)
    for first, second, arguments, expected in (
        (BAD, GOOD, (), "second"),
        (GOOD, BAD, (), "first"),
        (GOOD, GOOD, (), "first"),
        (BAD, GOOD, (late,), "first"),  # without time nothing is ranked
    ):
        run_time = RunTime()
        rules = {"first": first, "second": second}
        datasets = {name: small_graph(rules[name]) for name in rules}
        found = choices.choose_rules(datasets, OPEN, run_time, *arguments)
        assert found == expected
        assert bool(run_time.choices) != bool(arguments)
        assert any("not compared" in x for x in run_time.notes) == bool(
            arguments
        )


# -- new runs that learn from proofs


def test_queries_that_cannot_be_ranked_are_refused_before_training(tmp_path):
    """Under the name of Countries, tails are ranked among the regions; lyon is none."""
    folder = tmp_path / "countries_of_cities"
    folder.mkdir()
    (folder / "train.txt").write_text(
        "".join(f"paris\tin\t{region}\n" for region in COUNTRIES_REGIONS)
    )
    (folder / "rules.txt").write_text("in(X, Y) :- in(Y, X)\n")
    run_config = replace(CONFIG, dataset=str(folder), score="auto")
    good = "lyon\tin\teurope\n"
    for name in ("valid", "test"):
        (folder / "valid.txt").write_text(good)
        (folder / "test.txt").write_text(good)
        (folder / f"{name}.txt").write_text(f"{good}paris\tin\tlyon\n")
        message = f"^countries_of_cities: {name}: expected an answer among the 5 candidates, got query 1"
        with pytest.raises(ValueError, match=message):
            new_run(run_config)


OPEN_RUN = replace(
    CONFIG,
    dataset="countries_s3",
    score="auto",
    prover=replace(
        CONFIG.prover, max_height=None, smoothing="auto", object_identity="auto"
    ),
)


def test_a_new_run_holds_what_was_chosen_and_its_table():
    run = new_run(OPEN_RUN)
    prover = run.run_config.prover
    assert prover.max_height == run.task.max_height == 2
    assert prover.smoothing != "auto"
    assert isinstance(prover.object_identity, bool)
    assert run.run_config.rule_score != "auto"
    rows = {row.stage: row for row in run.choices}
    assert list(rows) == [
        "settings of rules",
        "score of proofs",
        "height of the policy",
    ]
    assert rows["score of proofs"].chosen == run.score
    assert set(rows["score of proofs"].tried) == {"success", "best-proof"}
    heights = [row for row in run.choices if row.stage.startswith("height")]
    assert heights[0].is_kept and list(heights[0].tried) == [
        "height 1",
        "height 2",
    ]


@pytest.mark.parametrize(
    "bound", ["MAX_VALIDATION_SUCCESSORS", "MAX_TRIAL_SUCCESSORS"]
)
def test_a_height_whose_search_is_too_long_is_not_tried(bound, monkeypatch):
    """By the rough count before the search, and by the count of what a search computes."""
    monkeypatch.setattr(choices, bound, 1)
    run = new_run(OPEN_RUN)
    assert run.task.max_height == 1
    start = "policy: height 2 not tried: a search for "
    assert any(note.startswith(start) for note in run.notes)


def test_above_height_1_auto_learns_from_proofs_and_questions_are_refused(
    tmp_path,
):
    prover = replace(QUESTIONS.prover, max_height=2, object_identity=False)
    high = replace(QUESTIONS, prover=prover)
    high = on_graph(high, seating(n_tables=10), tmp_path)
    run = new_run(high)
    assert run.run_config.learner == "proofs" and run.questions is None
    with pytest.raises(ValueError, match="expected height 1, got 2"):
        new_run(replace(high, learner="questions"))


# -- new runs that learn from questions


def row_of(run, stage):
    return next(row for row in run.choices if row.stage == stage)


def valid_mrr(run):
    ranked = held_out.rank_valid(run, run.state.start_params)
    return fit.summarise(run.task, ranked)["mrr"]


def assert_equal_trees(one, other):
    for name, a, b in zip(
        tree.paths(one), tree.leaves(one), tree.leaves(other), strict=True
    ):
        assert torch.equal(a, b), name


def test_a_new_run_starts_from_the_fit_that_ranks_valid_best(asking):
    run, results = asking
    chosen = run.run_config
    assert (chosen.learner, run.score) == ("questions", "evidence")
    assert chosen.prover.max_height == 1
    assert chosen.questions.left_out == "pair"
    assert chosen.questions.max_questions == 2 * len(run.task.dataset.facts)
    assert chosen.questions.degrees in (True, False)
    row = row_of(run, "listwise fit")
    assert row.is_kept and row.valid_after > row.valid_before + 0.1
    assert len(row.tried) == 1 + 2 * 3  # epochs without and with degrees
    assert row.standard_error is not None
    assert row_of(run, "PPO").tried.keys() >= {"update 0", "update 4"}
    assert [row["stage"] for row in results["choices"]][-1] == (
        "what ranks answers"
    )
    assert results["best_valid_metric"] == pytest.approx(
        row_of(run, "PPO").valid_after, abs=1e-6
    )
    assert any("each training question" in note for note in results["notes"])

    # The rule score ranks the same queries as its own scorer does.
    protocol = RankingProtocol(sides=ranked_sides(run.task))
    queries = validation_queries(run)
    answered = run.valid_evidence.task
    ranked = ranking.rank_split(
        answered, queries, parse(chosen.rule_score), protocol
    )
    expected = fit.summarise(run.task, ranked)["mrr"]
    assert run.rule_metric == pytest.approx(expected, abs=1e-12)


def test_all_of_valid_is_ranked_unless_a_number_is_set(tmp_path):
    config = on_graph(QUESTIONS, seating(n_tables=10), tmp_path)
    for n_queries in (None, 5):
        run = new_run(replace(config, n_validation_queries=n_queries))
        n_ranked = len(validation_queries(run))
        assert n_ranked == (n_queries or len(run.task.dataset.valid))


def test_training_starts_with_the_power_of_the_odds_that_ranks_valid_best(
    tmp_path,
):
    still = replace(QUESTIONS, listwise=ListwiseConfig(learning_rate=0.0))
    still = on_graph(still, visits(), tmp_path / "graph")
    run = new_run(still)
    power = run.run_config.questions.odds_power
    row = row_of(run, "power of the odds")
    assert row.chosen == f"{power:g}"
    assert row.tried[row.chosen] == max(row.tried.values())

    set_ = new_run(replace(still, questions=QuestionConfig(odds_power=3.0)))
    assert set_.run_config.questions.odds_power == 3.0
    assert not any(row.stage.startswith("power") for row in set_.choices)
    save_checkpoint(set_, tmp_path)
    for one in (set_, resume_run(set_.run_config, tmp_path)):
        untrained, fitted, _ = held_out.policies(one).values()
        assert torch.equal(tree.ravel(untrained), tree.ravel(fitted))
        assert float(untrained.score.feature_weight[0, 0, 0]) == 3.0
        assert not untrained.score.feature_weight[..., 1:].any()


@pytest.mark.parametrize("is_better", [True, False])
def test_link_embeddings_are_weighed_where_valid_says_so(is_better, tmp_path):
    cfg = EmbeddingConfig(
        rank=8, n_folds=4, n_epochs=40, batch_size=32, learning_rate=0.05
    )
    config = replace(QUESTIONS, embedding=cfg)
    run = new_run(on_graph(config, colours(is_better), tmp_path / "graph"))
    weight = run.state.start_params.score.prior_weight
    assert run.run_config.questions.embedding is is_better
    assert row_of(run, "link embeddings").is_kept == is_better
    # Each fit has a row of its own, and an amount is added only to weights of link embeddings.
    fits = [row for row in run.choices if row.stage == "listwise fit"]
    assert len(fits) >= 2
    if is_better:
        row = row_of(run, "added to link embeddings")
        assert list(row.tried) == ["0", "0.5", "1", "2"]
    assert bool(weight.any()) == is_better
    assert bool(run.state.embedding.entity.numel()) == is_better
    assert_opened_run_scores_the_same(run, tmp_path)


@pytest.mark.parametrize("is_better", [True, False])
def test_a_bellman_ford_network_is_weighed_where_valid_says_so(
    is_better, tmp_path
):
    options = QuestionConfig(bellman_ford="auto", embedding=False)
    cfg = BellmanFordConfig(
        width=8, n_layers=2, n_steps=100, batch_size=8, learning_rate=0.02
    )
    # The two variables of the answer's rule stand for one person.
    prover = replace(QUESTIONS.prover, max_height=1, object_identity=False)
    config = replace(
        QUESTIONS, questions=options, bellman_ford=cfg, prover=prover
    )
    run = new_run(on_graph(config, elders(is_better), tmp_path / "graph"))
    weight = run.state.start_params.score.network_prior_weight
    assert run.run_config.questions.bellman_ford is is_better
    assert row_of(run, "Bellman-Ford network").is_kept == is_better
    row = row_of(run, "weight of the network")
    assert list(row.tried) == ["0.25", "0.5", "1", "2"]
    if is_better:
        assert weight.eq(float(row.chosen)).all()
    assert bool(weight.any()) == is_better
    assert bool(run.state.bellman_ford.asked.numel()) == is_better
    assert_opened_run_scores_the_same(run, tmp_path)


@pytest.mark.parametrize("is_better", [True, False])
def test_entities_without_a_proof_are_ranked_where_valid_says_so(
    is_better, tmp_path
):
    """Who was born somewhere lives in the capital; of most others no rule derives where, and it is the same."""
    facts = [
        (f"p{i}", "bornIn", place)
        for i in range(60)
        for place in ("capital", f"village{i}")
    ]
    facts += [(f"q{i}", "likes", f"p{i}") for i in range(20)]
    lives = [(f"p{i}", "lives", "capital") for i in range(60)]
    others = [(f"q{i}", "lives", "capital") for i in range(20 * is_better)]
    graph = from_triples(
        facts + lives[20:],
        lives[:20] + others,
        rules="lives(X, Y) :- bornIn(X, Y)",
    )
    options = replace(QUESTIONS.questions, embedding=False)
    config = replace(QUESTIONS, questions=options)
    run = new_run(on_graph(config, graph, tmp_path / "graph"))
    row = row_of(run, "answers without a proof")
    assert row.is_kept == is_better
    chosen = run.run_config.questions.no_proof
    assert (chosen is None) == (not is_better)
    assert row.valid_after == valid_mrr(run)
    assert_opened_run_scores_the_same(run, tmp_path)


def assert_opened_run_scores_the_same(run, folder):
    """A run that is stored and opened again scores with the same evidence and priors."""
    save_checkpoint(run, folder)
    again = with_training_data(resume_run(run.run_config, folder))
    assert again.choices == run.choices and again.notes == run.notes
    assert valid_mrr(again) == valid_mrr(run)


def test_what_has_no_time_is_not_tried(tmp_path):
    options = QuestionConfig(bellman_ford="auto")
    config = replace(
        QUESTIONS,
        questions=options,
        embedding=replace(QUESTIONS.embedding, seconds=1e-6),
        bellman_ford=replace(QUESTIONS.bellman_ford, seconds=1e-9),
    )
    run = new_run(on_graph(config, seating(n_tables=10), tmp_path))
    chosen = run.run_config.questions
    assert (chosen.embedding, chosen.bellman_ford) == (False, False)
    for text in ("link embeddings are", "a Bellman-Ford network is"):
        assert any(x.startswith(f"{text} not tried") for x in run.notes)


def test_what_is_set_is_weighed_without_a_valid_split(tmp_path):
    """And without learning: PPO starts from the rule confidences, beside which a network weighs nothing."""
    graph = seating(n_tables=10)
    no_valid = replace(graph, valid=graph.valid[:0])
    config = replace(
        QUESTIONS, questions=QuestionConfig(bellman_ford=True, embedding=True)
    )
    config = on_graph(config, no_valid, tmp_path)
    for rate, weight in ((0.1, 0.5), (0.0, 0.0)):
        listwise = replace(config.listwise, learning_rate=rate)
        run = new_run(replace(config, listwise=listwise))
        score = run.state.start_params.score
        assert score.network_prior_weight.eq(weight).all()
        assert bool(score.prior_weight.any()) == bool(rate)
        assert run.questions.world.evidence.path_score.any()
        assert not run.choices


@pytest.mark.parametrize("learner", ["auto", "questions"])
def test_without_a_question_to_learn_from(learner, tmp_path):
    """The rule derives the fact of valid alone."""
    graph = from_triples(
        [("a", "p", "b"), ("c", "q", "d"), ("e", "q", "f")],
        [("c", "p", "d")],
        rules="p(X, Y) :- q(X, Y)",
    )
    config = replace(QUESTIONS, learner=learner)
    config = on_graph(config, graph, tmp_path)
    if learner == "questions":
        with pytest.raises(ValueError, match="learner: no rule derives"):
            new_run(config)
        return
    run = new_run(config)
    assert run.run_config.learner == "proofs"
    assert any("learner proofs: no question" in note for note in run.notes)


def test_a_run_with_little_memory_says_what_is_smaller():
    run = new_run(CONFIG, memory_limit=2_000_000_000)
    assert run.run_config.prover.memory_share < 1.0
    assert any(note.startswith("memory: 2.00 GB") for note in run.notes)
    assert math.isclose(run.run_config.prover.memory_share, 0.45)
