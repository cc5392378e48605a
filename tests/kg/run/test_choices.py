"""What valid decides: the rule, the loop, the settings of rules, and whole starts of runs with their tables."""

import json
import math
from dataclasses import replace

import pytest
import torch

from experiments.paths import RESULTS
from funcppo.kg.config import (
    BellmanFordConfig,
    EmbeddingConfig,
    ListwiseConfig,
    ProverTaskConfig,
    QuestionConfig,
    RunConfig,
)
from funcppo.kg.graph.loaders import from_triples, load
from funcppo.kg.logic import fixpoint
from funcppo.kg.logic.joins import RowBudgetExceeded
from funcppo.kg.ranking import ranking
from funcppo.kg.ranking.ranking import RankingProtocol, ranked_sides
from funcppo.kg.run import choices, fit, held_out
from funcppo.kg.run.budget import RunTime
from funcppo.kg.run.choices import (
    Candidate,
    Stage,
    choose,
    choose_in_time,
    choose_settings,
    describe_choice,
    is_better,
)
from funcppo.kg.run.run import (
    resume_run,
    validation_queries,
    with_valid_evidence,
)
from funcppo.kg.scores.score import parse
from funcppo.kg.search.task import COUNTRIES_REGIONS, build_task
from tests.cli.runner import write_graph
from tests.kg.run import runs

OPEN = ProverTaskConfig(smoothing="auto", object_identity="auto")


def test_no_step_is_timed_of_a_network_that_does_not_fit(monkeypatch):
    """Its first step would take the time of the others."""
    monkeypatch.setattr(fit, "network_training", None)
    bellman_ford = replace(runs.QUESTIONS.bellman_ford, batch_size=4096)
    config = replace(runs.QUESTIONS, bellman_ford=bellman_ford)
    run_time = RunTime(1.0, clock=lambda: 0.0)
    choices.start_run(config, runs.seating(n_tables=40), run_time)
    row = next(x for x in run_time.choices if x.stage == "path network")
    assert row.reason.startswith("it takes at least")


def test_searches_side_by_side_fit_into_memory():
    """A user's do or are refused; others keep fewer successors, and say so."""
    prover = replace(runs.CONFIG.prover, max_height=2)
    many = replace(runs.CONFIG.ppo, n_envs=10**8)
    config = replace(runs.CONFIG, prover=prover, ppo=many)
    with pytest.raises(ValueError, match=r"^100000000 searches of 3 succ.* GB"):
        runs.new_run(config)

    dataset, run_time = load("countries_s1"), RunTime()
    for n_envs, expected in ((10, None), (30_000, 2), (10**8, 1)):
        ppo = replace(runs.CONFIG.ppo, n_envs=n_envs)
        bounded = choices.with_few_successors(
            replace(config, ppo=ppo), dataset, run_time
        )
        assert bounded.prover.max_successors == expected
    assert len(run_time.notes) == 2
    assert "keep 2 of up to 3" in run_time.notes[0]


# -- the rule and the loop


def test_better_is_two_standard_errors_of_the_paired_difference():
    kept = torch.tensor([0.5, 0.5, 1.0, 0.25]).double()
    for gains, is_taken in (
        ([0.1, 0.1, 0.1, 0.1], True),
        ([0.3, 0.2, 0.1, 0.2], True),
        ([0.3, 0.1, 0.0, 0.1], False),  # 1.99 standard errors
        ([0.5, -0.4, 0.0, 0.0], False),
        ([0.0, 0.0, 0.0, 0.0], False),
        ([-0.1, -0.1, -0.1, -0.1], False),
    ):
        better = kept + torch.tensor(gains).double()
        assert is_better(better, kept) == is_taken
        assert not is_better(better, None) and not is_better(None, kept)
        assert not is_better(better, kept[:2])  # ranks of other queries


def way(label, mrr):
    """A way that ranks four queries alike."""
    ranks = None if mrr is None else torch.full((4,), mrr).double()
    return Candidate(label, label, ranks)


def stage(name, *metrics, gain=0.1, least=0.0, most=1.0, **settings):
    """A stage of candidates with these metrics, which records when it has begun."""

    def candidates(best, deadline):
        stage_seen.append((name, best.label, deadline.seconds_left))
        yield from (way(f"{name}{i}", m) for i, m in enumerate(metrics))

    bounds = lambda _: (least, most)
    return Stage(name, candidates, gain, seconds=bounds, **settings)


stage_seen: list = []


def test_a_stage_replaces_what_is_kept_candidate_by_candidate_with_a_row():
    run_time = RunTime()
    best = choose(stage("a", 0.4, 0.6, 0.6, 0.7), way("start", 0.5), run_time)
    assert best.label == "a3"
    (row,) = run_time.choices
    assert (row.stage, row.chosen, row.is_kept) == ("a", "a3", True)
    assert (row.valid_before, row.valid_after) == pytest.approx((0.5, 0.7))
    assert list(row.tried) == ["start", "a0", "a1", "a2", "a3"]
    line = "a: a3 chosen: valid 0.7000; a1 0.6000 and 3 more"
    assert describe_choice(row) == line
    assert choose(stage("b", 0.7), best, run_time) is best
    assert not run_time.choices[-1].is_kept
    # Without valid, and where the user has set it, the first candidate is taken.
    assert choose(stage("c", None), way("s", None), run_time).label == "c0"
    set_ = stage("d", 0.1, 0.05, is_set=True)
    assert choose(set_, best, run_time).label == "d0"
    assert list(run_time.phases) == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("gains", "kept"),
    [
        # what is usual stays without a difference beyond chance, better or worse
        ([-0.3, -0.1, -0.0, -0.1], "usual"),
        ([-0.1, -0.1, -0.1, -0.1], "start"),
        ([0.1, 0.1, 0.1, 0.1], "usual"),
    ],
)
def test_the_first_candidate_of_a_stage_is_the_simpler_way(gains, kept):
    before = torch.full((4,), 0.5).double()
    after = before + torch.tensor(gains).double()
    ways = [Candidate("usual", 0, after), Candidate("more", 0, after + 1e-3)]
    usual = Stage("fit", lambda *_: ways[:1], is_usual=True)
    start = Candidate("start", 0, before)
    assert choose(usual, start, RunTime()).label == kept
    # The others must be better.
    usual = usual._replace(candidates=lambda *_: ways[::-1])
    best = choose(usual, start, RunTime())
    assert best.label == ("start" if kept == "start" else "more")


def test_stages_run_by_gain_a_second_each_in_its_part_of_the_time():
    now = [0.0]
    run_time = RunTime(100.0, clock=lambda: now[0])
    run_time.reserved = {"test": 20.0}
    stage_seen.clear()
    stages = [
        stage("slow", 0.6, gain=0.3, most=160.0, family="slow"),
        stage("fast", 0.55, gain=0.1, most=1.0, family="fast"),
        stage("huge", 0.9, gain=0.9, least=81.0, most=1e3, family="huge"),
        stage("late", 0.9, obstacle=lambda best: "never"),
    ]
    best = choose_in_time(stages, way("start", 0.5), run_time)
    assert best.label == "slow0"
    assert [(name, before) for name, before, _ in stage_seen] == [
        ("fast", "start"),
        ("slow", "fast0"),
    ]
    # The fast one has all that it can use, and the last all that is left.
    assert [left for *_, left in stage_seen] == pytest.approx([1.0, 80.0])
    reasons = {row.stage: row.reason for row in run_time.choices if row.reason}
    assert reasons == {
        "huge": "it takes at least 81 s, and 80 s are left",
        "late": "never",
    }
    assert all(not row.is_kept for row in run_time.choices if row.reason)


def test_what_planning_takes_is_left_to_no_other_plan():
    clock, planned = [0.0], []

    def plan(name):
        def take(_):
            planned.append(name)
            clock[0] += 60.0
            return 1.0, 2.0

        return take

    stages = [
        stage(name, 0.6, family=name)._replace(seconds=plan(name))
        for name in ("one", "two", "three")
    ]
    run_time = RunTime(100.0, clock=lambda: clock[0])
    choose_in_time(stages, way("start", 0.5), run_time)
    assert planned == ["one", "two"]
    assert {row.reason for row in run_time.choices} == {"no time is left"}


@pytest.mark.parametrize(
    ("rows", "seconds", "order"),
    [
        # With time for all what is set comes first, though a part as large as its gain is less than it needs.
        ([("fit", 0.6, 0.15, "fits"), ("set", 0.6, 0.01, "priors")], None, ["set", "fit"]),
        # A family that has gained nothing is expected to gain less.
        ([("a", 0.4, 0.3, "priors"), ("b", 0.4, 0.2, "priors"), ("c", 0.4, 0.15, "fits")], 100.0, ["a", "c", "b"]),
    ],
)  # fmt: skip
def test_the_order_of_stages(rows, seconds, order):
    stage_seen.clear()
    stages = [stage(name, m, gain=g, family=f) for name, m, g, f in rows]
    if seconds is None:
        bounds = lambda _: (90.0, 100.0)
        stages[1] = stages[1]._replace(is_set=True, seconds=bounds)
    choose_in_time(stages, way("start", 0.5), RunTime(seconds))
    assert [name for name, *_ in stage_seen] == order


class Learner:
    """A stage that takes the time that it is given, and gains by the share of its plan that this is."""

    def __init__(self, clock, name, gain, most, least_mrr=0.0):
        self.clock, self.name, self.most = clock, name, most
        self.gained, self.seconds = gain, None
        bounds = lambda _: (0.1 * most, most)
        obstacle = lambda best: "too early" * (best.mrr <= least_mrr)
        self.stage = Stage(name, self.candidates, gain, name, bounds, obstacle)

    def candidates(self, best, deadline):
        self.seconds = min(deadline.seconds_left, self.most)
        self.clock[0] += self.seconds
        share = 1 - math.exp(-3 * self.seconds / self.most)
        yield way(self.name, best.mrr + self.gained * share)


@pytest.mark.parametrize(
    ("seconds", "n_begun"), [(10.0, 1), (60.0, 3), (200.0, 4), (1000.0, 5)]
)
def test_a_run_spends_its_time_where_it_gains_and_no_more(seconds, n_begun):
    begun = ["network", "embeddings", "fit", "prior", "larger"][:n_begun]
    clock = [0.0]
    run_time = RunTime(seconds, clock=lambda: clock[0])
    run_time.reserved = {"test": 0.2 * seconds}
    learners = [
        Learner(clock, "fit", 0.06, 80.0),
        Learner(clock, "embeddings", 0.04, 60.0),
        Learner(clock, "network", 0.05, 45.0),
        Learner(clock, "prior", 0.005, 40.0),
        Learner(clock, "larger", 0.01, 400.0, least_mrr=0.4),
    ]
    best = choose_in_time(
        [one.stage for one in learners], way("start", 0.3), run_time
    )
    time_of = {one.name: one.seconds for one in learners if one.seconds}
    assert set(time_of) == set(begun)
    assert sum(time_of.values()) <= 0.8 * seconds + 1e-6
    if "fit" in begun and len(begun) < 5:
        assert time_of["fit"] <= 0.5 * sum(time_of.values())
    # Time that is left is used as long as something can use it.
    if seconds < 1000.0:
        assert sum(time_of.values()) > 0.75 * seconds
    assert best.mrr > 0.32


def test_the_gains_are_those_of_the_record():
    shares = {name: [] for name in choices.GAINS}
    for run in json.loads((RESULTS / "levels.json").read_text())["runs"]:
        for row in run["results"]["choices"]:
            before, after = row["valid_before"], row["valid_after"]
            if row["stage"] in shares and before is not None:
                gain = (after - before) / (1 - before)
                shares[row["stage"]].append(gain)
            # So it may count as the simpler way: a quarter of the fit ranks no valid split worse than rules do.
            if row["stage"] == "listwise fit" and "fit" not in row["tried"]:
                assert row["tried"]["25% of it"] >= before
    for name, gain in choices.GAINS.items():
        mean = sum(shares[name]) / len(shares[name])
        assert gain == pytest.approx(mean, rel=0.3, abs=0.004), name


def test_a_run_learns_from_proofs_where_untrained_they_rank_better_than_rules():
    """Rules of clans derive all answers at height 2 alone, and rank them no better there."""
    name = "clans:1500:0"
    run = choices.start_run(RunConfig(dataset=name), load(name))
    assert (run.run_config.learner, run.task.max_height) == ("proofs", 2)


# -- settings of rules


def choose_all(graph):
    """What is chosen of rules where nothing is set, with its rows and notes."""
    run_time = RunTime()
    return choose_settings(graph, OPEN, None, run_time), run_time


def test_what_is_kept_ranks_as_the_task_with_its_settings():
    """The ordinary path: the whole task, all valid queries."""
    dataset = runs.random_graph()
    settings, run_time = choose_all(dataset)
    heights = [trial.height for trial in settings.by_height]
    assert heights == sorted(set(heights)) and heights[0] == 1
    assert settings.best is settings.by_height[-1]
    for trial in settings.by_height:
        task = build_task(dataset, trial.apply(OPEN))
        protocol = RankingProtocol(sides=ranked_sides(task))
        ranked = ranking.rank_split(
            task, dataset.valid, parse(trial.score), protocol
        )
        torch.testing.assert_close(fit.reciprocal_ranks(ranked), trial.ranks)
    row = run_time.choices[0]
    assert row.stage == "settings of rules at height 1"
    assert len(row.tried) == 2 * 3 * 4


def test_what_is_set_is_kept():
    cfg = ProverTaskConfig(
        max_height=2, smoothing=1.5, object_identity=False, hidden_dim=8
    )
    fixed = choose_settings(runs.random_graph(), cfg, "noisy-or")
    assert fixed.best.apply(OPEN) == replace(cfg, hidden_dim=OPEN.hidden_dim)
    assert fixed.best.score == "noisy-or" and fixed.best.ranks is None
    partly = choose_settings(runs.random_graph(), replace(OPEN, max_height=1))
    assert [trial.height for trial in partly.by_height] == [1]
    held = choose_settings(
        runs.random_graph(), replace(OPEN, object_identity=True)
    )
    assert all(trial.object_identity for trial in held.by_height)


def test_a_height_is_left_only_where_nothing_grows():
    """Heights 1 and 2 derive nothing of valid, and every rank is a tie there; 4 derives no more than 3."""
    settings, run_time = choose_all(runs.chain())
    assert settings.best.height == 3
    tried = [row.stage for row in run_time.choices]
    assert "settings of rules at height 4" in tried
    assert "settings of rules at height 5" not in tried


def test_without_valid_queries_or_room_for_their_rows_the_defaults_are_said(
    monkeypatch,
):
    """Neither object identity nor a greater height could take less than height 1."""
    _, run_time = choose_all(runs.random_graph(n_valid=0))
    default = "height 1, smoothing 5, noisy-or@3"
    assert run_time.notes == [f"no valid split: {default}"]
    monkeypatch.setattr(choices, "MAX_TRIAL_ROWS", 1)
    settings, run_time = choose_all(runs.random_graph())
    assert settings.best.ranks is None
    said, noted = run_time.notes
    assert said.startswith("height 1 not tried: more than 1 rows")
    assert noted.startswith("nothing to choose by: height 1")


def test_a_sample_of_the_rules_tells_what_takes_too_long(monkeypatch):
    """Trials after the first are not begun where a sample makes more than its share of the rows."""
    counts = choose_settings(runs.random_graph(), OPEN).rule_counts
    graph = replace(runs.random_graph(), rule_counts=counts)

    def make_too_many(*args, **kwargs):
        raise RowBudgetExceeded("too many rows")

    monkeypatch.setattr(fixpoint, "check_sampled_rows", make_too_many)
    settings, run_time = choose_all(graph)
    assert settings.best.height == 1 and not settings.best.object_identity
    (row,) = run_time.choices
    assert len(row.tried) == 3 * 4
    assert run_time.notes == [
        "height 1 with object identity not tried: too many rows",
        "height 2 not tried: too many rows; what takes longer is not tried either",
    ]


def test_each_stage_shows_how_much_of_it_is_done():
    """Counts of rules, questions or rules whose candidates are listed, and rankings: they tell the time left."""
    shown: dict[str, list] = {}
    run_time = RunTime(
        on_phase=lambda text, *done: shown.setdefault(text, []).append(done[:2])
    )
    choose_settings(runs.random_graph(), OPEN, None, run_time)
    start = "choosing settings: height 1"
    assert shown[f"{start}: ranking"] == [(i, 12) for i in range(13)]
    identity = f"{start} with object identity"
    assert shown[f"{identity}: counting rules"] == [(i, 4) for i in range(1, 5)]
    done, total = shown[f"{start}: listing candidates"][-1]
    assert done == total > 0
    assert shown["choosing settings: height 2: T_P"] == [(0, None)]


# -- new runs that learn from proofs


def seated():
    """Guests of ten tables, with what is asked of valid as test."""
    graph = runs.seating(n_tables=10)
    return replace(graph, test=graph.valid)


def test_queries_that_cannot_be_ranked_are_refused_before_training(tmp_path):
    """Under the name of Countries, tails are ranked among the regions; lyon is none."""
    folder, good = tmp_path / "countries_of_cities", "lyon\tin\teurope\n"
    texts = {"valid": good, "test": good, "rules": "in(X, Y) :- in(Y, X)\n"}
    texts["train"] = "".join(f"paris\tin\t{x}\n" for x in COUNTRIES_REGIONS)
    run_config = replace(runs.CONFIG, dataset=str(folder), score="auto")
    for name in ("valid", "test"):
        write_graph(folder, **texts | {name: f"{good}paris\tin\tlyon\n"})
        message = f"^countries_of_cities: {name}: expected an answer among the 5 candidates, got query 1"
        with pytest.raises(ValueError, match=message):
            runs.new_run(run_config)


def test_a_new_run_holds_what_was_chosen_and_its_table(tmp_path):
    prover = replace(OPEN, embed_dim=4, hidden_dim=4)
    config = replace(runs.CONFIG, score="auto", prover=prover)
    run = runs.new_run(runs.on_graph(config, runs.chain(), tmp_path))
    prover = run.run_config.prover
    assert prover.max_height == run.task.max_height == 3
    assert prover.smoothing != "auto"
    assert isinstance(prover.object_identity, bool)
    assert run.run_config.rule_score != "auto"
    rows = {row.stage: row for row in run.choices}
    assert rows["height 3"].is_kept and not rows["height 2"].is_kept
    assert rows["score of proofs"].chosen == run.score
    assert set(rows["score of proofs"].tried) == {"success", "best-proof"}
    assert run.ranked_test is not None


def test_above_height_1_auto_learns_from_proofs_alone(tmp_path):
    prover = replace(runs.QUESTIONS.prover, max_height=2, object_identity=False)
    high = runs.on_graph(
        replace(runs.QUESTIONS, prover=prover), seated(), tmp_path
    )
    run = runs.new_run(high)
    assert run.run_config.learner == "proofs" and run.questions is None
    with pytest.raises(ValueError, match="expected height 1, got 2"):
        runs.new_run(replace(high, learner="questions"))


# -- new runs that learn from questions


def row_of(run, stage):
    return next(row for row in run.choices if row.stage == stage)


def valid_mrr(run):
    ranked = held_out.rank_valid(run, run.state.best_params)
    return float(fit.reciprocal_ranks(ranked).mean())


def test_a_new_run_has_the_weights_that_rank_valid_best(asking):
    run, results = asking
    chosen = run.run_config
    assert (chosen.learner, run.score) == ("questions", "evidence")
    assert chosen.prover.max_height == 1
    assert chosen.questions.left_out == "pair"
    row = row_of(run, "listwise fit")
    assert row.is_kept and row.valid_after > row.valid_before + 0.1
    assert row.standard_error is not None and row.planned_seconds is not None
    *_, last = (row.valid_after for row in run.choices if row.is_kept)
    assert valid_mrr(run) == pytest.approx(last, abs=1e-9)
    assert results["best_valid_metric"] == pytest.approx(last, abs=1e-6)
    assert run.step_names[0] == "fit"
    assert len(run.state.steps) == len(run.step_names)
    assert run.default_score == "evidence" and run.is_finished
    assert results["answering_row"] == run.step_names[-1]
    assert any("each training question" in note for note in results["notes"])
    names = {row["stage"] for row in results["choices"]}
    assert {*choices.GAINS} < names
    for row in results["choices"]:
        assert (row["valid_before"] is None) == bool(row["reason"])

    # The rule score ranks the same queries as its own scorer does.
    protocol = RankingProtocol(sides=ranked_sides(run.task))
    queries = validation_queries(run)
    ranked = ranking.rank_split(
        run.valid_evidence.task, queries, parse(chosen.rule_score), protocol
    )
    expected = float(fit.reciprocal_ranks(ranked).mean())
    assert run.rule_metric == pytest.approx(expected, abs=1e-12)


def test_all_of_valid_is_ranked_unless_a_number_is_set(tmp_path):
    config = runs.on_graph(runs.QUESTIONS, seated(), tmp_path)
    for n_queries in (None, 5):
        run = runs.new_run(replace(config, n_validation_queries=n_queries))
        n_ranked = len(validation_queries(run))
        assert n_ranked == (n_queries or len(run.task.dataset.valid))


def new_and_opened(config, graph, folder):
    """A new run, which scores with the same evidence and priors where it is stored and opened again."""
    run = runs.new_run(runs.on_graph(config, graph, folder / "graph"))
    runs.store(run, folder)
    again = with_valid_evidence(resume_run(run.run_config, folder))
    assert again.choices == run.choices and again.notes == run.notes
    assert again.step_names == run.step_names
    assert valid_mrr(again) == valid_mrr(run)
    return run


def test_without_a_fit_rules_or_the_sum_of_their_odds_answer(tmp_path):
    still = replace(
        runs.QUESTIONS,
        listwise=ListwiseConfig(learning_rate=0.0),
        questions=QuestionConfig(odds_power=3.0, embedding=False, bellman_ford=False),
    )  # fmt: skip
    run = new_and_opened(still, seated(), tmp_path)
    assert run.run_config.questions.odds_power == 3.0
    assert run.step_names == ()
    assert list(held_out.policies(run)) == ["evidence, untrained"]
    assert run.default_score == run.run_config.rule_score
    assert run.default_score_reason == "learnt-gains-by-chance"
    assert float(run.state.best_params.feature_weight[0, 0, 0]) == 3.0


@pytest.mark.parametrize("is_better", [True, False])
@pytest.mark.parametrize("prior", ["embedding", "bellman_ford"])
def test_a_prior_is_weighed_where_valid_says_so(prior, is_better, tmp_path):
    is_network = prior == "bellman_ford"
    other = "embedding" if is_network else "bellman_ford"
    # With one layer a network sees no path of two facts.
    n_layers, n_steps = (2, 100) if is_better else (1, 1)
    sizes = {"width": 8, "n_layers": n_layers, "n_steps": n_steps}
    # The two variables of the answer's rule of elders stand for one person.
    prover = replace(runs.QUESTIONS.prover, max_height=1, object_identity=False)
    config = replace(
        runs.QUESTIONS,
        questions=QuestionConfig(**{other: False}),
        embedding=EmbeddingConfig(
            rank=8, n_folds=4, n_epochs=40, batch_size=32, learning_rate=0.05
        ),
        bellman_ford=BellmanFordConfig(
            batch_size=8, learning_rate=0.02, **sizes
        ),
        prover=prover if is_network else runs.QUESTIONS.prover,
    )
    graph = runs.elders() if is_network else runs.colours(is_better)
    run = new_and_opened(config, graph, tmp_path)
    assert getattr(run.run_config.questions, prior) is is_better
    row = row_of(run, "path network" if is_network else "link embeddings")
    assert row.is_kept == is_better
    step = "+ path network" if is_network else "+ embeddings"
    assert (step in run.step_names) == is_better
    tried = [x[4:] for x in list(row.tried)[1:]]
    if not is_network:
        assert tried == [f"{x} added" for x in ("1", "0.5", "2", "0")]
    params, state = run.state.best_params, run.state
    weight, learnt = params.prior_weight, state.embedding.entity
    if is_network:
        weight = params.network_prior_weight
        learnt = state.bellman_ford.asked
    if is_network and is_better:
        assert weight.eq(float(row.chosen.split()[-1])).all()
    assert bool(weight.any()) == bool(learnt.numel()) == is_better


def homes(is_better):
    """Who was born somewhere lives in the capital; of others no rule derives where, and it is the same if better."""
    facts = [(f"p{i}", "bornIn", "capital") for i in range(60)]
    facts += [(f"p{i}", "bornIn", f"village{i}") for i in range(60)]
    facts += [(f"q{i}", "likes", f"p{i}") for i in range(20)]
    lives = [(f"p{i}", "lives", "capital") for i in range(60)]
    others = [(f"q{i}", "lives", "capital") for i in range(20 * is_better)]
    splits = facts + lives[20:], lives[:20] + others
    return from_triples(*splits, rules="lives(X, Y) :- bornIn(X, Y)")


def test_each_prior_may_rank_what_has_no_proof(tmp_path):
    run = new_and_opened(runs.QUESTIONS, homes(True), tmp_path)
    row = row_of(run, "answers without a proof")
    ways = [name for name in row.tried if name.endswith("-20")]
    assert {"embeddings, -20", "path network, -20"} <= set(ways)
    assert ways[0] == max(ways, key=row.tried.__getitem__)
    assert row.is_kept and row.tried[row.chosen] >= row.tried[ways[0]]


@pytest.mark.parametrize("is_better", [True, False])
def test_what_has_no_proof_is_ranked_where_valid_says_so(is_better, tmp_path):
    options = replace(runs.QUESTIONS.questions, embedding=False)
    config = replace(runs.QUESTIONS, questions=options)
    run = new_and_opened(config, homes(is_better), tmp_path)
    row = row_of(run, "answers without a proof")
    assert row.is_kept == is_better
    chosen = run.run_config.questions.no_proof
    assert (chosen is None) == (not is_better)
    if is_better:
        assert row.valid_after == valid_mrr(run)


def test_answers_without_a_proof_keep_their_time(tmp_path, monkeypatch):
    reserved = []

    def choose_nothing(stages, best, run_time):
        reserved.append(dict(run_time.reserved))
        return best

    monkeypatch.setattr(choices, "choose_in_time", choose_nothing)
    config = runs.on_graph(runs.QUESTIONS, seated(), tmp_path)
    runs.new_run(config, run_time=RunTime(100.0))
    assert reserved[0]["answers without a proof"] > 0


def test_what_has_no_time_is_not_begun(tmp_path):
    config = runs.on_graph(runs.QUESTIONS, seated(), tmp_path)
    run = runs.new_run(config, run_time=RunTime(1e-3))
    chosen = run.run_config.questions
    assert (chosen.embedding, chosen.bellman_ford) == (False, False)
    reasons = {row.stage: row.reason for row in run.choices}
    for name in ("link embeddings", "path network"):
        assert reasons[name] == "no time is left"
    # Rules rank the first queries of test whatever the time.
    assert run.ranked_test.n_queries > 0


def test_what_is_set_is_weighed_without_a_valid_split(tmp_path):
    graph = runs.seating(n_tables=10)
    both = QuestionConfig(bellman_ford=True, embedding=True)
    config = replace(runs.QUESTIONS, questions=both)
    no_valid = replace(graph, valid=graph.valid[:0])
    run = runs.new_run(runs.on_graph(config, no_valid, tmp_path))
    params = run.state.best_params
    assert params.network_prior_weight.eq(0.5).all()
    assert params.prior_weight.any() and params.linked_weight.any()
    assert set(run.step_names) == {"fit", "+ embeddings", "+ path network"}
    assert all(row.valid_after is None for row in run.choices)


@pytest.mark.parametrize("learner", ["auto", "questions"])
def test_without_a_question_to_learn_from_rules_answer(learner, tmp_path):
    """The rule derives the fact of valid alone."""
    graph = from_triples(
        [("a", "p", "b"), ("c", "q", "d"), ("e", "q", "f")],
        [("c", "p", "d")],
        rules="p(X, Y) :- q(X, Y)",
    )
    config = replace(runs.QUESTIONS, learner=learner)
    run = runs.new_run(runs.on_graph(config, graph, tmp_path))
    assert run.step_names == () and run.is_finished
    assert any(note.startswith("no question to learn") for note in run.notes)


def test_a_run_with_little_memory_says_what_is_smaller():
    run = runs.new_run(runs.CONFIG, memory_limit=2_000_000_000)
    assert run.run_config.prover.memory_share < 1.0
    assert any(note.startswith("memory: 2.00 GB") for note in run.notes)
    assert math.isclose(run.run_config.prover.memory_share, 0.45)
