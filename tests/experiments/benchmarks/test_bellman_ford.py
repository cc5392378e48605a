"""What a Bellman-Ford network adds to a run is fitted on one half of valid and judged on the other."""

from __future__ import annotations

import json

import pytest
import torch

from experiments.benchmarks import added_term, bellman_ford
from experiments.benchmarks.added_term import Candidates, Ranked
from funcppo.kg.ranking import rank_metrics, ranking
from funcppo.kg.run import run_start
from funcppo.kg.run.config import RunConfig
from funcppo.kg.scores.question_config import EmbeddingConfig, QuestionConfig
from funcppo.kg.search.config import ProverTaskConfig


def candidates(n_rows=200, n_each=5, seed=0):
    """Candidates, each the answer as often as log-probabilities say, and these; the run knows nothing."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn((n_rows, n_each), generator=generator).double()
    log_p = logits.log_softmax(1)
    answer = torch.multinomial(log_p.exp(), 1, generator=generator)
    is_answer = torch.zeros((n_rows, n_each), dtype=torch.bool)
    is_answer = is_answer.scatter(1, answer, True)
    row = torch.arange(n_rows).repeat_interleave(n_each)
    listed = Candidates(
        row=row,
        label=row % 4,
        given=torch.ones_like(row),
        entity=torch.ones_like(row),
        is_answer=is_answer.flatten(),
        run_score=torch.zeros(n_rows * n_each, dtype=torch.float64),
        n_candidates=torch.full((n_rows,), n_each),
    )
    return listed, log_p.flatten()


def test_weights_are_those_of_the_distribution_that_was_drawn_from():
    listed, log_p = candidates(n_rows=3000)
    half = torch.arange(3000) % 2 == 0
    weights = added_term.fit_weights(listed, log_p, half, 4, by_label=False)
    # 1,500 answers tell a weight to about .03.
    assert float(weights.common) == pytest.approx(1.0, abs=0.12)
    assert not weights.by_label.any()


def test_labels_have_weights_of_their_own():
    listed, log_p = candidates(n_rows=3000)
    # Of label 0 the log-probabilities say the opposite.
    log_p = torch.where(listed.label == 0, -log_p, log_p)
    every = torch.ones(3000, dtype=torch.bool)
    weights = added_term.fit_weights(listed, log_p, every, 4, by_label=True)
    weight = weights.common + weights.by_label
    assert float(weight[0]) < -0.5
    assert float(weight[1:].min()) > 0.5


def test_the_other_half_does_not_move_the_weights():
    listed, log_p = candidates()
    half = torch.arange(200) < 100
    _, other = candidates(seed=1)
    swapped = torch.where(half[listed.row], log_p, other)
    one = added_term.fit_weights(listed, log_p, half, 4, by_label=True)
    two = added_term.fit_weights(listed, swapped, half, 4, by_label=True)
    for x, y in zip(one, two):
        assert torch.equal(x, y)


def test_a_half_is_ranked_by_what_ranks_the_other_half_best():
    first = torch.tensor([True, True, False, False])
    good_first = Ranked(torch.tensor([1.0, 1.0, 0.2, 0.2]), 1)
    good_second = Ranked(torch.tensor([0.3, 0.3, 1.0, 1.0]), 2)
    rankings = [good_first, good_second]
    outcome = added_term.judge("both", (first, ~first), [rankings] * 2)
    assert [x.step for x in outcome.chosen] == [1, 2]
    torch.testing.assert_close(
        outcome.ranks, torch.tensor([0.3, 0.3, 0.2, 0.2])
    )


def test_a_record_has_the_rows_of_each_seed(tmp_path, monkeypatch):
    config = RunConfig(
        dataset="family_tree:30:0",
        steps=64,
        prover=ProverTaskConfig(
            max_height=1, smoothing=5.0, object_identity=False
        ),
        questions=QuestionConfig(
            left_out="fact", embedding=False, degrees=False, walks=False
        ),
        rule_score="noisy-or@3",
        embedding=EmbeddingConfig(rank=2, n_epochs=1),
    )
    run = run_start.prepare_run(config, tmp_path, resume=False)
    monkeypatch.setattr(run_start, "open_run", lambda _: run)
    record = tmp_path / "record.json"
    arguments = ["--run", tmp_path, "--out", record, "--seeds", 2]
    arguments += ["--width", 4, "--layers", 2, "--steps", 6, "--snapshots", 2]
    monkeypatch.setattr("sys.argv", ["x", *map(str, arguments)])
    bellman_ford.main()

    rows = json.loads(record.read_text())["rows"]
    assert len(rows) == 10
    n_valid = 2 * len(run.task.dataset.valid)
    assert {row["n_valid"] for row in rows} == {n_valid}
    for seed in (0, 1):
        of_seed = [row for row in rows if row["seed"] == seed]
        first = of_seed[0]
        assert first["method"] == "run"
        for row in of_seed:
            gain = row["valid_mrr"] - first["valid_mrr"]
            assert row["valid_gain"] == pytest.approx(gain)
            assert row["training"]["steps"] == 6
            assert set(row["steps"]) <= {3, 6}

    # The control adds its rows and leaves the others.
    monkeypatch.setattr("sys.argv", ["x", *map(str, arguments), "--control"])
    bellman_ford.main()
    both = json.loads(record.read_text())["rows"]
    assert both[:10] == rows
    control = [row["method"] for row in both[10:]]
    assert len(control) == 8
    assert all("other link embeddings" in method for method in control)

    # What rank_split makes of the run's score.
    ranked = ranking.rank_split(
        run.task,
        run.task.dataset.valid,
        added_term.run_scorer(run),
        ranking.RankingProtocol(),
    )
    values = rank_metrics.expected_reciprocal_ranks(ranked.counts)
    assert rows[0]["valid_mrr"] == pytest.approx(float(values.mean()))
