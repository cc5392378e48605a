"""Whole runs on tiny graphs: what valid chooses, what is kept, how test is ranked, and which notes say so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from funcppo.config import PPOConfig
from funcppo.kg.ranking.ranking import RankingProtocol, ranked_sides
from funcppo.kg.run import training, validation
from funcppo.kg.run.config import RunConfig
from funcppo.kg.scores.question_config import (
    BellmanFordConfig,
    EmbeddingConfig,
    ListwiseConfig,
    QuestionConfig,
)

CONFIG = RunConfig(
    dataset="",
    seconds=None,
    steps=256,
    strategy="eager",
    n_validations=2,
    listwise=ListwiseConfig(n_epochs=3),
    embedding=EmbeddingConfig(rank=8, n_epochs=2),
    bellman_ford=BellmanFordConfig(n_steps=4),
    ppo=PPOConfig(
        n_envs=32, n_steps=4, n_epochs=1, n_minibatches=2, learning_rate=1e-3
    ),
)
QUESTIONS = {"learner": "questions"}
PRIORS = QuestionConfig(embedding=True, bellman_ford=True)

# by data set: the settings, what is chosen in its order below, and the MRR of the rule score and of the policy on test
EXPECTED = {
    "countries_s1": (QUESTIONS, (1, False, False, False, False, 0), (1.0, 1.0)),
    "family_tree:30:1": (
        {**QUESTIONS, "questions": PRIORS},
        (1, False, False, True, True, 2),
        (0.8284, 0.8284),
    ),
    "countries_s3": ({}, (2, "auto", "auto", "auto", False, 0), (1.0, 1.0)),
}


@pytest.mark.parametrize("dataset", EXPECTED)
def test_a_run_chooses_and_ranks_as_it_did(dataset, tmp_path):
    """0.01: of the order of sums in other versions of PyTorch."""
    options, chosen, mrr = EXPECTED[dataset]
    config = replace(CONFIG, dataset=dataset, **options)
    run = training.fit(config, tmp_path / "run")
    config, questions = run.run_config, run.run_config.questions
    assert chosen == (
        config.prover.max_height,
        questions.degrees,
        questions.walks,
        questions.embedding,
        questions.bellman_ford,
        int(run.state.best_update),
    )
    assert config.learner == ("questions" if options else "proofs")
    assert config.rule_score == "max-confidence"
    assert run.default_score_reason == "policy-ranks-valid-no-worse"

    protocol = RankingProtocol(sides=ranked_sides(run.task))
    metrics = validation.evaluate_scores(
        run, run.task.dataset.test, protocol, [config.rule_score]
    )
    first, *_, last = metrics.values()
    assert (first["mrr"], last["mrr"]) == pytest.approx(mrr, abs=0.01)
    kinds = {note.kind for note in run.notes}
    assert "detail" in kinds and kinds <= {"data", "cut", "answers", "detail"}
