"""A run that learns from questions: what it chooses on valid, its bit-exact resume, and where it cannot learn so."""

from __future__ import annotations

from dataclasses import replace
from statistics import stdev

import pytest
import torch

from funcppo.config import PPOConfig
from funcppo.core import tree
from funcppo.core.settings import write_config
from funcppo.kg.graph import loaders
from funcppo.kg.ranking import rank_metrics, ranking
from funcppo.kg.run import (
    evidence_fit,
    priors,
    run_build,
    run_start,
    training,
    validation,
)
from funcppo.kg.run import run as run_module
from funcppo.kg.run.config import RunConfig
from funcppo.kg.run.run import save_checkpoint
from funcppo.kg.scores.question_config import (
    BellmanFordConfig,
    EmbeddingConfig,
    ListwiseConfig,
    QuestionConfig,
)
from funcppo.kg.scores.score import parse
from funcppo.kg.search.config import ProverTaskConfig
from funcppo.kg.search.task import build_task, ignore_phase
from funcppo.runtime.monitor import Monitor
from tests.kg.run.test_evidence_fit import seating

CONFIG = RunConfig(
    dataset="seating",
    steps=4 * 64,
    n_validations=2,
    n_validation_queries=40,
    prover=ProverTaskConfig(smoothing=5.0, object_identity=True),
    listwise=ListwiseConfig(n_epochs=3, batch_size=32, learning_rate=0.1),
    ppo=PPOConfig(
        n_envs=32, n_steps=2, n_epochs=1, n_minibatches=2, learning_rate=0.01
    ),
)


def colours(n=40):
    """Who likes whom: those of larger numbers that differ by a multiple of four, so that no pair is linked twice."""
    return [
        (f"x{i}", "likes", f"x{j}")
        for i in range(n)
        for j in range(i + 1, n)
        if (i - j) % 4 == 0
    ]


def noise(n=40):
    """As many facts, at random."""
    drawn = torch.randint(
        n, (360, 2), generator=torch.Generator().manual_seed(0)
    )
    pairs = sorted({(i, j) for i, j in drawn.tolist() if i < j})
    return [(f"x{i}", "likes", f"x{j}") for i, j in pairs]


def visits(n=32, n_crowd=12):
    """Everybody knows an answer through a friend of their own, and a crowd through one that all have in common.

    All that the first rule derives have one grounding; a random walk comes to the answer half of the times. The other
    rule has less support, so that the first one keeps the least without a fact.
    """
    once = [("a", "once", "b"), ("a", "meets", "b")]
    likes, knows, meets = [], [], []
    for i in range(n):
        likes += [(f"x{i}", "likes", f"z{i}"), (f"x{i}", "likes", "hub")]
        knows.append((f"z{i}", "knows", f"y{i}"))
        meets.append((f"x{i}", "meets", f"y{i}"))
    knows += [("hub", "knows", f"w{i}") for i in range(n_crowd)]
    return loaders.from_triples(
        likes + knows + once + [fact for i, fact in enumerate(meets) if i % 3],
        meets[::3],
        rules="meets(X, Y) :- likes(X, Z), knows(Z, Y)\nmeets(X, Y) :- once(X, Y)",
    )


EMBEDDING = EmbeddingConfig(rank=4, n_folds=2, n_epochs=8, batch_size=32)
BELLMAN_FORD = BellmanFordConfig(width=4, n_layers=2, n_steps=5)


@pytest.fixture(autouse=True)
def graph(monkeypatch):
    graph = seating(n_tables=10)
    monkeypatch.setattr(loaders, "load", lambda *args, **kwargs: graph)
    return graph


def run_to(run, folder, last_update):
    """The run after an update, with its files in the folder."""
    run = run_build.with_training_data(run)
    save_checkpoint(run, folder)
    step, _ = training.prepare_train_step(run)

    def is_last():
        return int(step.state.update) >= last_update

    with Monitor() as monitor:
        *_, (last, _) = training.train(run, folder, step, is_last, monitor)
    return last


def test_all_of_valid_is_ranked_unless_a_number_is_set(tmp_path):
    for n_queries in (None, 5):
        config = replace(CONFIG, n_validation_queries=n_queries)
        run = run_start.prepare_run(
            config, tmp_path / str(n_queries), resume=False
        )
        n_ranked = len(validation.validation_queries(run))
        assert n_ranked == (n_queries or len(run.task.dataset.valid))


def test_a_new_run_starts_from_the_fit_that_ranks_valid_best(tmp_path):
    run = run_start.prepare_run(CONFIG, tmp_path, resume=False)
    chosen = run.run_config
    assert (chosen.learner, run.score) == ("questions", "evidence")
    assert chosen.prover.max_height == 1
    assert chosen.questions.left_out == "pair"
    assert chosen.questions.max_questions == 2 * len(run.task.dataset.facts)
    assert chosen.questions.degrees in (True, False)
    notes = "\n".join(run.notes)
    assert "listwise fit: epoch" in notes and "degrees o" in notes
    assert "no pair of the valid split is linked" in notes

    protocol = ranking.RankingProtocol(sides=ranking.ranked_sides(run.task))
    mrr = {
        name: validation.evaluate_policy(
            run, params, run.task.dataset.valid, protocol
        )["mrr"]
        for name, params in validation.policies(run).items()
    }
    assert mrr["evidence, untrained"] + 0.1 < mrr["evidence, listwise fit"]
    assert mrr["evidence, trained"] == mrr["evidence, listwise fit"]
    # a validation ranks by evidence that is collected once
    _, metric = validation.validate(run)
    queries = validation.validation_queries(run)
    again = validation.evaluate_policy(
        run, run.state.start_params, queries, protocol
    )["mrr"]
    assert metric == pytest.approx(again, abs=1e-6)
    # the rule score ranks the same queries as its own scorer does
    answered = run.valid_evidence.task
    score = parse(chosen.rule_score)
    ranked = ranking.rank_split(answered, queries, score, protocol)
    expected = validation.summarise(run, ranked)["mrr"]
    assert run.rule_metric == pytest.approx(expected, abs=1e-12)


def test_the_power_of_the_odds_that_ranks_valid_best_is_where_training_starts(
    tmp_path, monkeypatch
):
    mrr = {1.0: 0.2, 2.0: 0.5, 3.0: 0.5}

    def quality(run, params, on_progress):
        power = float(params.score.feature_weight[0, 0, 0])
        return {"mrr": mrr[power]}

    still = replace(CONFIG, listwise=ListwiseConfig(learning_rate=0.0))
    with monkeypatch.context() as patch:
        patch.setattr(validation, "validation_quality", quality)
        run = run_start.prepare_run(still, tmp_path, resume=False)
        assert run.run_config.questions.odds_power == 2.0
        note = "power 2 of the odds chosen: MRR untrained on valid: 1 0.2000, 2 0.5000, 3 0.5000"
        assert any(note in line for line in run.notes)

        options = QuestionConfig(odds_power=3.0)
        other = replace(still, questions=options)
        other = run_start.prepare_run(other, tmp_path / "set", resume=False)
        assert other.run_config.questions.odds_power == 3.0
        assert not any("of the odds chosen" in line for line in other.notes)

    save_checkpoint(run, tmp_path)
    resumed = run_start.prepare_run(run.run_config, tmp_path, resume=True)
    for one in (run, resumed):
        untrained, fitted, _ = validation.policies(one).values()
        assert torch.equal(tree.ravel(untrained), tree.ravel(fitted))
        assert float(untrained.score.feature_weight[0, 0, 0]) == 2.0
        assert not untrained.score.feature_weight[..., 1:].any()


@pytest.mark.parametrize(
    ("embedding", "walks", "network"),
    [(False, False, False), (True, True, False), (False, False, True)],
)
def test_a_resumed_run_lists_the_same_questions_and_ends_in_the_same_bits(
    tmp_path, embedding, walks, network, monkeypatch
):
    monkeypatch.setattr(evidence_fit, "MAX_NETWORK_QUESTIONS", 7)
    whole, part = tmp_path / "whole", tmp_path / "part"
    for folder in (whole, part):
        folder.mkdir()
    options = replace(
        CONFIG.questions,
        embedding=embedding,
        walks=walks,
        bellman_ford=network,
    )
    config = replace(
        CONFIG,
        questions=options,
        embedding=EMBEDDING,
        bellman_ford=BELLMAN_FORD,
    )
    run = run_start.prepare_run(config, whole, resume=False)
    assert run.rule_metric is not None
    prior = run.questions.world.evidence.embedding_score
    assert bool(prior.any()) == embedding
    by_network = run.questions.world.evidence.path_score
    assert bool(by_network.any()) == network
    weight = run.state.start_params.score.network_prior_weight
    assert bool(weight.any()) == network
    if network:
        check_sample(run)
    save_checkpoint(run, part)
    expected = run_to(run, whole, 4)

    run_to(run_start.prepare_run(config, part, resume=False), part, 2)
    resumed = run_start.prepare_run(run.run_config, part, resume=True)
    assert resumed.questions.world is None
    assert int(resumed.state.train_state.update) == 2
    # The prior is the fit that PPO started from, whatever is best by now.
    other = tree.map(lambda x: x + 1.0, resumed.state.best_params)
    changed = replace(resumed, state=resumed.state._replace(best_params=other))
    listed = run_build.with_training_data(changed).questions.world
    assert torch.equal(listed.prior_score, run.questions.world.prior_score)
    assert torch.equal(listed.evidence.embedding_score, prior)
    assert torch.equal(listed.evidence.path_score, by_network)
    assert torch.equal(listed.evidence.walk, run.questions.world.evidence.walk)
    assert bool(listed.evidence.walk.any()) == walks
    got = run_to(resumed, part, 4)
    assert got.rule_metric == expected.rule_metric == run.rule_metric
    for name, one, other in zip(
        tree.paths(expected.state),
        tree.leaves(expected.state),
        tree.leaves(got.state),
        strict=True,
    ):
        assert torch.equal(one, other), name
    assert not torch.equal(
        tree.ravel(got.state.start_params),
        tree.ravel(got.state.train_state.params),
    )


@pytest.mark.parametrize("is_better", [True, False])
def test_walks_are_weighed_where_valid_says_so(
    is_better, tmp_path, monkeypatch
):
    graph = visits() if is_better else seating(n_tables=10)
    monkeypatch.setattr(loaders, "load", lambda *args, **kwargs: graph)
    config = replace(
        CONFIG, questions=replace(CONFIG.questions, embedding=False)
    )
    phases = []
    run = run_start.prepare_run(
        config,
        tmp_path,
        resume=False,
        on_phase=lambda *phase: phases.append(phase),
    )
    names = {phase[0] for phase in phases}
    assert any(name.endswith("walks") for name in names)
    notes = "\n".join(run.notes)
    assert run.run_config.questions.walks is is_better
    assert run.run_config.listwise.n_epochs == CONFIG.listwise.n_epochs
    assert ("walks on: valid" in notes) == is_better
    assert ("walks off: valid" in notes) != is_better
    setup = run.questions
    assert setup.policy.aggregation.uses_walks is is_better
    assert setup.facts.plan.with_walks is is_better
    listed = setup.world.evidence
    assert len(listed.walk) == is_better * len(listed.rule)

    # Without the choice all is the same: bits of the weights, the evidence and what PPO starts from.
    set_ = replace(config, questions=run.run_config.questions)
    other = run_start.prepare_run(set_, tmp_path / "set", resume=False)
    for one, two in (
        (run.state, other.state),
        (listed, other.questions.world.evidence),
    ):
        for name, a, b in zip(
            tree.paths(one), tree.leaves(one), tree.leaves(two), strict=True
        ):
            assert torch.equal(a, b), name

    # Opened again, the run scores with walks too.
    save_checkpoint(run, tmp_path)
    again = run_start.prepare_run(run.run_config, tmp_path, resume=True)
    protocol = ranking.RankingProtocol(sides=ranking.ranked_sides(run.task))
    mrr = [
        validation.evaluate_policy(
            one, one.state.start_params, graph.valid, protocol
        )["mrr"]
        for one in (run, again)
    ]
    assert mrr[0] == mrr[1]


def test_walks_are_not_tried_without_a_path_rule_or_a_valid_split(
    tmp_path, monkeypatch
):
    graph = visits()
    no_path = loaders.from_triples(
        _triples(graph, graph.train),
        _triples(graph, graph.valid),
        rules="meets(X, Y) :- likes(X, Z), knows(Z, Y), likes(X, hub)\nmeets(X, b) :- once(X, b)",
    )
    no_valid = replace(graph, valid=graph.valid[:0])
    for i, other in enumerate((no_path, no_valid)):
        monkeypatch.setattr(
            loaders, "load", lambda *args, other=other, **kwargs: other
        )
        phases = []
        run = run_start.prepare_run(
            CONFIG,
            tmp_path / str(i),
            resume=False,
            on_phase=lambda *phase, phases=phases: phases.append(phase),
        )
        assert run.run_config.questions.walks is False
        assert not any("walks" in text for text, *_ in phases)
        assert not any("walks" in note for note in run.notes)
        assert not len(run.questions.world.evidence.walk)


def _triples(graph, split):
    return [
        (
            graph.entities[head - 1],
            graph.predicates[predicate - 1],
            graph.entities[tail - 1],
        )
        for predicate, head, tail in split.tolist()
    ]


@pytest.mark.parametrize("is_better", [True, False])
def test_link_embeddings_are_weighed_where_valid_says_so(
    is_better, tmp_path, monkeypatch
):
    """The rule derives everybody; who likes whom is a matter of colours, which no fact tells."""
    likes = colours()
    triples = likes if is_better else noise()
    graph = loaders.from_triples(
        [fact for i, fact in enumerate(triples) if i % 8],
        [fact for i, fact in enumerate(triples) if not i % 8],
        rules="likes(X, Y) :- likes(X, Z), likes(W, Y)",
    )
    monkeypatch.setattr(loaders, "load", lambda *args, **kwargs: graph)
    cfg = EmbeddingConfig(
        rank=8, n_folds=4, n_epochs=40, batch_size=32, learning_rate=0.05
    )
    phases = []
    run = run_start.prepare_run(
        replace(CONFIG, embedding=cfg),
        tmp_path,
        resume=False,
        on_phase=lambda *phase: phases.append(phase),
    )
    # each fit counts its epochs under a name of its own
    fits = [phase for phase in phases if phase[0].startswith("listwise fit")]
    assert any(name.endswith("link embeddings") for name, *_ in fits)
    assert len(fits) == len(set(fits))

    notes = "\n".join(run.notes)
    weight = run.state.start_params.score.prior_weight
    assert run.run_config.questions.embedding is is_better
    assert ("link embeddings on: valid" in notes) == is_better
    assert ("link embeddings off: valid" in notes) != is_better
    # What was chosen before stays said.
    prefix = "without link embeddings: " * is_better
    for choice in ("listwise fit: epoch", "degrees o"):
        assert sum(n.startswith(prefix + choice) for n in run.notes) == 1
    assert bool(weight.any()) == is_better
    assert bool(run.state.embedding.entity.numel()) == is_better

    assert_opened_run_scores_the_same(run, tmp_path)


def assert_opened_run_scores_the_same(run, folder):
    """A run that is stored and opened again scores with the same priors."""
    save_checkpoint(run, folder)
    again = run_start.prepare_run(run.run_config, folder, resume=True)
    protocol = ranking.RankingProtocol(sides=ranking.ranked_sides(run.task))
    valid = run.task.dataset.valid
    mrr = [
        validation.evaluate_policy(
            one, one.state.start_params, valid, protocol
        )["mrr"]
        for one in (run, again)
    ]
    assert mrr[0] == mrr[1]


def test_link_embeddings_get_more_weight_where_valid_says_so(tmp_path):
    """As much for all labels, what ranks valid best; the first of equal ones."""
    options = QuestionConfig(embedding=True, walks=False)
    config = replace(CONFIG, questions=options, embedding=EMBEDDING)
    run = run_start.prepare_run(config, tmp_path, resume=False)
    score = run.state.start_params.score
    few = torch.zeros_like(score.prior_weight).index_fill(
        0, torch.tensor(2), 0.125
    )
    params = run.state.start_params._replace(
        score=score._replace(prior_weight=few)
    )
    ranks = torch.tensor([0.25, 0.5, 0.25, 0.5]).double()
    quality = run_module.ValidQuality(float(ranks.mean()), ranks)
    fitted = evidence_fit.ListwiseFit(
        run.questions, params, quality, 3, ["a note"]
    )

    def raised(gains, **options):
        """The weights that are added, and the last note; gains of each weight for each query."""

        def metric(setup, params):
            assert setup is run.questions
            (weight,) = set((params.score.prior_weight - few).tolist())
            after = ranks + torch.tensor(gains.get(weight, [0.0] * 4))
            return run_module.ValidQuality(float(after.mean()), after)

        found = evidence_fit.raise_prior(fitted, metric, **options)
        (weight,) = set((found.params.score.prior_weight - few).tolist())
        assert found.notes[0] == "a note"
        return weight, found.notes[1]

    even = [0.125] * 4
    assert raised({0.5: even, 1.0: even, 2.0: [0.0625] * 4})[0] == 0.5
    weight, note = raised({1.0: even})
    assert weight == 1.0
    assert "1 is added to their weights: valid: 0 0.3750, 0.5 0.3750" in note
    assert raised({2.0: [0.0, -0.25, 0.0, 0.125]})[0] == 0.0
    # Where valid is small, a gain of one query is not enough.
    one = [0.0, 0.25, 0.0, 0.0]
    assert raised({2.0: one})[0] == 2.0
    assert raised({2.0: one}, beyond_chance=True)[0] == 0.0
    assert raised({2.0: even}, beyond_chance=True)[0] == 2.0

    # Without a valid split nothing says more, and untrained weights stay.
    assert evidence_fit.raise_prior(fitted, None) is fitted
    untrained = fitted._replace(
        params=params._replace(score=score._replace(prior_weight=0 * few))
    )
    assert evidence_fit.raise_prior(untrained, None) is untrained


def test_linked_candidates_get_less_weight_where_valid_says_so(tmp_path):
    """As much less for all labels; what valid says is of those weights, and a note tells it."""
    run = run_start.prepare_run(CONFIG, tmp_path, resume=False)
    params = run.state.start_params
    fitted_weight = params.score.linked_weight
    ranks = torch.tensor([0.25, 0.5] * 50).double()
    quality = run_module.ValidQuality(float(ranks.mean()), ranks)
    fitted = evidence_fit.ListwiseFit(run.questions, params, quality, 3, [])

    def added_to(params):
        added = params.score.linked_weight - fitted_weight
        (weight,) = set(added.round(decimals=4).tolist())
        return weight

    def lowered(gains, **options):
        def metric(setup, params):
            assert setup is run.questions
            after = ranks + gains.get(added_to(params), 0.0)
            return run_module.ValidQuality(float(after.mean()), after)

        found = evidence_fit.lower_linked(fitted, metric, **options)
        assert found.params.score.link_weight is params.score.link_weight
        return added_to(found.params), found

    weight, found = lowered({-2.0: 0.125, -4.0: 0.0625})
    assert weight == -2.0
    assert found.quality.metric == quality.metric + 0.125
    assert found.notes == [
        "linked candidates: -2 is added to their weights: valid: 0 0.3750, -1 0.3750, -2 0.5000, -4 0.4375"
    ]
    assert lowered({-1.0: -0.125})[0] == 0.0
    assert lowered({-1.0: 0.0004})[0] == 0.0
    assert lowered({-1.0: 0.0006})[0] == -1.0

    # Where valid is small, a gain of a query or two is not enough.
    two = torch.zeros(100).index_fill(0, torch.tensor([3, 5]), 0.25)
    assert lowered({-1.0: two})[0] == -1.0
    weight, found = lowered({-1.0: two}, beyond_chance=True)
    assert weight == 0.0 and found.quality is quality
    assert found.notes[0].endswith(", no gain above 2 standard errors")
    assert lowered({-1.0: 0.0006}, beyond_chance=True)[0] == -1.0

    # Without a valid split nothing says less.
    assert evidence_fit.lower_linked(fitted, None) is fitted
    policy = fitted.setup.policy
    weighed = replace(policy.aggregation, uses_links=False)
    setup = replace(fitted.setup, policy=replace(policy, aggregation=weighed))
    unweighed = fitted._replace(setup=setup)
    assert evidence_fit.lower_linked(unweighed, lambda *_: quality) is unweighed


@pytest.mark.parametrize(
    ("change", "is_kept"),
    [
        ([0.25, -0.25, -0.25, 0.0], True),  # worse by chance
        ([-0.25, -0.25, -0.25, -0.25], False),
        ([0.25, 0.25, 0.0, 0.0], True),
    ],
)
def test_few_valid_triples_keep_the_last_update_unless_it_loses_beyond_chance(
    change, is_kept, tmp_path, monkeypatch
):
    """Of many the better metric decides."""
    run = run_start.prepare_run(CONFIG, tmp_path, resume=False)
    run, _ = validation.validate(run)
    start = run.state.start_params
    ranks = torch.full((4,), 0.5).double()

    def evidence_quality(_, setup, params):
        assert setup is run.questions
        is_start = torch.equal(params.value_weight, start.value_weight)
        after = ranks + (0.0 if is_start else torch.tensor(change))
        return run_module.ValidQuality(float(after.mean()), after)

    metric = 0.5 + sum(change) / 4
    monkeypatch.setattr(validation, "evidence_quality", evidence_quality)
    monkeypatch.setattr(
        validation, "validation_quality", lambda *_: {"mrr": metric}
    )
    monkeypatch.setattr(validation, "_rule_margin", lambda _: 0.125)
    trained = run.state.train_state._replace(
        params=tree.map(lambda x: x + 1.0, start), update=torch.tensor(9)
    )
    state = run.state._replace(
        train_state=trained, best_valid_metric=torch.tensor(0.5)
    )
    run = replace(run, state=state, rule_margin=0.0)
    after, _ = validation.validate(run)
    assert int(after.state.best_update) == (9 if is_kept else 0)
    kept_metric = metric if is_kept else 0.5
    assert float(after.state.best_valid_metric) == kept_metric
    assert after.rule_margin == (0.125 if is_kept else 0.0)

    monkeypatch.setattr(run_module, "MIN_VALID_TRIPLES", 1)
    after, _ = validation.validate(run)
    assert int(after.state.best_update) == (9 if metric > 0.5 else 0)
    assert after.rule_margin == 0.0


def test_rules_answer_on_few_valid_triples_if_they_gain_beyond_chance(
    tmp_path, monkeypatch
):
    """The margin is two standard errors of the paired difference, and a checkpoint holds it."""
    folder = tmp_path / "run"
    run = run_start.prepare_run(CONFIG, folder, resume=False)
    assert any("valid triples tell small" in note for note in run.notes)
    # Weights that rank some queries better than others.
    torch.manual_seed(0)
    params = tree.map(lambda x: x + torch.randn_like(x), run.state.start_params)
    trained = run.state.train_state._replace(params=params)
    state = run.state._replace(start_params=params, train_state=trained)
    run, _ = validation.validate(replace(run, state=state))
    assert run.valid_evidence is not None and run.questions is not None
    rule, policy = (
        rank_metrics.expected_reciprocal_ranks(ranked.counts)
        for ranked in (
            run.valid_evidence.rank_by_rules(run.run_config.rule_score),
            run.valid_evidence.rank(run.questions, run.state.best_params),
        )
    )
    gain = (rule - policy).tolist()
    expected = 2 * stdev(gain) / len(gain) ** 0.5
    assert run.rule_margin == pytest.approx(expected)
    assert run.rule_margin > 0

    folder.mkdir()
    save_checkpoint(run, folder)
    write_config(run.run_config, folder)
    assert run_start.open_run(folder).rule_margin == run.rule_margin
    save_checkpoint(replace(run, rule_margin=-1.0), folder)
    with pytest.raises(ValueError, match="rule_margin: expected a number"):
        run_start.open_run(folder)

    # Of many the better metric decides, and there is no margin.
    monkeypatch.setattr(run_module, "MIN_VALID_TRIPLES", 1)
    run = run_start.prepare_run(CONFIG, tmp_path / "many", resume=False)
    assert not any("valid triples tell small" in note for note in run.notes)
    run, _ = validation.validate(run)
    assert run.rule_margin == 0.0


def test_few_valid_queries_do_not_lower_linked_candidates(tmp_path):
    """Those of which none is linked may be so by chance."""
    run = run_start.prepare_run(CONFIG, tmp_path, resume=False)
    params = run.state.start_params

    def lowered(n_queries):
        ranks = torch.full((n_queries,), 0.25).double()
        quality = run_module.ValidQuality(0.25, ranks)
        better = run_module.ValidQuality(0.5, 2 * ranks)
        fitted = evidence_fit.ListwiseFit(run.questions, params, quality, 3, [])
        return evidence_fit.lower_linked(fitted, lambda *_: better)

    few, enough = lowered(99), lowered(100)
    assert few.params is params
    assert few.quality.metric == 0.25
    assert few.notes == [
        "linked candidates: 0 is added to their weights: 99 valid queries are too few to tell, fewer than 100"
    ]
    assert enough.quality.metric == 0.5


def test_link_embeddings_without_time_are_not_tried(tmp_path):
    cfg = replace(EMBEDDING, seconds=1e-6)
    run = run_start.prepare_run(
        replace(CONFIG, embedding=cfg), tmp_path, resume=False
    )
    assert run.run_config.questions.embedding is False
    assert any("link embeddings are not tried" in note for note in run.notes)


def elders(is_better, n=40):
    """Chains of three persons. The rule derives all who have a parent as everybody's grandchildren.

    Which one is the answer only a path of two facts tells; otherwise it is one at random.
    """
    parents = [
        (f"x{i}{a}", "parent", f"x{i}{b}")
        for i in range(n)
        for a, b in ("ab", "bc")
    ]
    drawn = torch.randint(n, (n,), generator=torch.Generator().manual_seed(0))
    end = range(n) if is_better else drawn.tolist()
    facts = [(f"x{i}a", "grandparent", f"x{end[i]}c") for i in range(n)]
    return loaders.from_triples(
        parents + [fact for i, fact in enumerate(facts) if i % 4],
        [fact for i, fact in enumerate(facts) if not i % 4],
        rules="grandparent(X, Y) :- parent(X, Z), parent(W, Y)",
    )


def check_sample(run):
    """Seven questions are asked of many; they alone have priors by the network."""
    world = run.questions.world
    asked, n_listed = set(world.question.tolist()), len(world.evidence.label)
    assert len(asked) == 7
    may_be_asked = (world.evidence.answer >= 0).nonzero().squeeze(1)
    assert asked != set(may_be_asked[:7].tolist())
    has_prior = world.evidence.path_score != 0
    assert set(world.evidence.question[has_prior].tolist()) == asked
    (note,) = (x for x in run.notes if x.startswith("PPO asks"))
    assert note.startswith("PPO asks 7 of ")
    assert n_listed > 20


@pytest.mark.parametrize("is_better", [True, False])
def test_a_bellman_ford_network_is_weighed_where_valid_says_so(
    is_better, tmp_path, monkeypatch
):
    graph = elders(is_better)
    monkeypatch.setattr(loaders, "load", lambda *args, **kwargs: graph)
    options = QuestionConfig(bellman_ford="auto", embedding=False, walks=False)
    cfg = BellmanFordConfig(
        width=8, n_layers=2, n_steps=100, batch_size=8, learning_rate=0.02
    )
    # The two variables of the answer's rule stand for one person.
    prover = replace(CONFIG.prover, max_height=1, object_identity=False)
    config = replace(CONFIG, questions=options, bellman_ford=cfg, prover=prover)
    phases = []
    run = run_start.prepare_run(
        config,
        tmp_path,
        resume=False,
        on_phase=lambda *phase: phases.append(phase),
    )
    priors = [text for text, *_ in phases if text.startswith("priors by")]
    assert bool(priors) == is_better

    notes = "\n".join(run.notes)
    weight = run.state.start_params.score.network_prior_weight
    assert run.run_config.questions.bellman_ford is is_better
    assert ("Bellman-Ford network on: valid" in notes) == is_better
    assert ("Bellman-Ford network off: valid" in notes) != is_better
    assert bool(weight.any()) == is_better
    assert bool(run.state.bellman_ford.asked.numel()) == is_better

    assert_opened_run_scores_the_same(run, tmp_path)


def test_a_network_has_the_weight_that_ranks_valid_best(tmp_path):
    options = QuestionConfig(embedding=False, walks=False)
    config = replace(CONFIG, questions=options)
    run = run_start.prepare_run(config, tmp_path, resume=False)
    params = run.state.start_params
    assert not len(params.score.network_prior_weight)
    weights, _ = priors.train_bellman_ford(
        run.task, BELLMAN_FORD, "fact", 0, "cpu"
    )
    network = priors.make_network(run.task, weights)
    mrr = {0.25: 0.4, 0.5: 0.5, 1.0: 0.5, 2.0: 0.1}

    def metric(setup, params):
        assert setup.policy.aggregation.uses_bellman_ford
        assert setup.facts.network is network
        (weight,) = set(params.score.network_prior_weight.tolist())
        return run_module.ValidQuality(mrr[weight], torch.zeros(1))

    plain = evidence_fit.ListwiseFit(run.questions, params, None, 3, ["a note"])
    fitted = evidence_fit.weigh_network(plain, network, metric)
    # the first one of equal ones
    expected = torch.full_like(params.score.linked_weight, 0.5)
    assert torch.equal(fitted.params.score.network_prior_weight, expected)
    assert fitted.quality.metric == 0.5
    (note,) = fitted.notes
    assert "weight 0.5 chosen: valid: 0.25 0.4000, 0.5 0.5000, 1" in note
    for name, one, other in zip(
        params.score._fields, params.score, fitted.params.score
    ):
        assert name == "network_prior_weight" or torch.equal(one, other)

    without_valid = evidence_fit.weigh_network(plain, network, None)
    weight = without_valid.params.score.network_prior_weight
    assert weight.eq(evidence_fit.DEFAULT_NETWORK_WEIGHT).all()
    assert without_valid.quality is None


def test_above_height_1_auto_learns_from_proofs_and_questions_are_refused(
    tmp_path,
):
    high = replace(CONFIG, prover=replace(CONFIG.prover, max_height=2,
                                          object_identity=False))  # fmt: skip
    run = run_start.prepare_run(high, tmp_path, resume=False)
    assert run.run_config.learner == "proofs" and run.questions is None
    with pytest.raises(ValueError, match="expected height 1, got 2"):
        run_start.prepare_run(
            replace(high, learner="questions"), tmp_path, resume=False
        )


@pytest.mark.parametrize("learner", ["auto", "questions"])
def test_without_a_question_to_learn_from(learner, tmp_path, monkeypatch):
    """The rule derives the fact of valid alone."""
    graph = loaders.from_triples(
        [("a", "p", "b"), ("c", "q", "d"), ("e", "q", "f")],
        [("c", "p", "d")],
        rules="p(X, Y) :- q(X, Y)",
    )
    monkeypatch.setattr(loaders, "load", lambda *args, **kwargs: graph)
    config = replace(CONFIG, learner=learner)
    if learner == "questions":
        with pytest.raises(ValueError, match="learner: no rule derives"):
            run_start.prepare_run(config, tmp_path, resume=False)
        return
    run = run_start.prepare_run(config, tmp_path, resume=False)
    assert run.run_config.learner == "proofs"
    assert any("learner proofs: no question" in note for note in run.notes)


def test_what_is_left_out_follows_the_links_of_valid(graph):
    settings = ProverTaskConfig(
        max_height=1, smoothing=5.0, object_identity=True
    )
    task = build_task(graph, settings)
    assert evidence_fit.share_of_linked(task, graph.valid) == 0
    pair = evidence_fit.resolve_left_out(task, QuestionConfig())
    assert pair.left_out == "pair"
    linked = replace(graph, valid=graph.train[:1])
    task = build_task(linked, settings)
    assert evidence_fit.share_of_linked(task, linked.valid) == 1
    fact = evidence_fit.resolve_left_out(task, QuestionConfig())
    assert fact.left_out == "fact"
    set_ = QuestionConfig(left_out="pair")
    assert evidence_fit.resolve_left_out(task, set_) is set_


def test_a_fit_that_is_no_better_than_its_error_leaves_the_weights_untrained():
    better = run_module.is_better
    values = torch.tensor([0.5, 0.5, 1.0, 0.25])

    def quality(gain):
        return run_module.ValidQuality(0.0, values + torch.tensor(gain))

    none = quality([0.0] * 4)
    assert better(quality([0.1, 0.1, 0.1, 0.1]), none)
    assert better(quality([0.3, 0.2, 0.1, 0.2]), none)
    # 1.99 standard errors
    assert not better(quality([0.3, 0.1, 0.0, 0.1]), none)
    assert not better(quality([0.5, -0.4, 0.0, 0.0]), none)
    assert not better(none, none)


@pytest.mark.parametrize("has_facts", [False, True])
def test_rule_scores_are_those_of_the_derivations(
    has_facts, tmp_path, monkeypatch
):
    """Whether they come from the evidence of the split, or from joins where a query is a fact."""
    run = run_start.prepare_run(CONFIG, tmp_path, resume=False)
    assert run.task.derivability_index is None
    split = run.task.dataset.valid
    protocol = ranking.RankingProtocol(sides=ranking.ranked_sides(run.task))
    names = ["exists@1", "max-confidence", "noisy-or"]
    expected = {}
    for name in names:
        ranked = ranking.rank_split(run.task, split, parse(name), protocol)
        expected[name] = ranking.summarise_ranking(
            ranked, list(run.task.dataset.predicates), with_auc=False
        )
    if has_facts:
        fact = run.task.dataset.train[:1]
        assert validation._has_facts(run, fact)
        monkeypatch.setattr(validation, "_has_facts", lambda *_: True)
    else:
        assert not validation._has_facts(run, split)
    found = validation.evaluate_scores(run, split, protocol, names)
    for name in names:
        # an atom has a score for each side where scores come from evidence
        n_scored = found[name].pop("n_scored")
        assert n_scored >= expected[name].pop("n_scored")
        assert found.pop(name) == expected[name]
    assert set(found) == set(validation.policies(run))


def test_where_queries_derive_their_answers_metrics_are_the_same(
    tmp_path, monkeypatch
):
    """Validation, a whole split in one piece, and in chunks."""
    held = run_start.prepare_run(CONFIG, tmp_path, resume=False)
    settings = replace(
        held.run_config.prover, max_atoms=len(held.task.kb.facts) + 1
    )
    config = replace(held.run_config, prover=settings)
    bare = run_build.build_run(config, held.task.dataset, ignore_phase)
    assert held.task.answers_plan is None
    assert bare.task.answers_plan is not None
    assert any("derives its own answers" in note for note in bare.notes)

    params = held.state.best_params
    bare = validation.with_valid_evidence(bare)
    setup = held.questions
    assert setup is not None
    found, expected = (
        validation.evidence_quality(run, setup, params) for run in (bare, held)
    )
    assert found.metric == expected.metric

    bare = replace(bare, questions=setup, state=held.state)
    split = held.task.dataset.valid
    protocol = ranking.RankingProtocol(sides=ranking.ranked_sides(held.task))
    names = ["exists@1", "noisy-or"]
    expected = validation.evaluate_scores(held, split, protocol, names)
    monkeypatch.setattr(validation, "FIRST_CHUNK_QUERIES", 3)
    monkeypatch.setattr(validation, "MAX_CHUNK_ANSWERS", 20)
    found = validation.evaluate_scores(bare, split, protocol, names)
    for name, metrics in expected.items():
        # an answer of two chunks is scored in both
        assert found[name].pop("n_scored") >= metrics.pop("n_scored")
        assert found[name] == metrics
    one = validation.evaluate_policy(bare, params, split, protocol)
    assert one["mrr"] == expected["evidence, trained"]["mrr"]
