"""Zero rules and most general rules on a small graph: ranks and shares by hand, and as the scorers rank."""

from __future__ import annotations

import itertools
import json
import sys

import numpy as np
import pytest
import torch

from experiments.benchmarks import general_rules
from experiments.benchmarks.general_rules import combine
from funcppo.data import load
from funcppo.evaluation import rank_metrics, ranking, scorers
from funcppo.evaluation.candidates import RankingProtocol
from funcppo.prover.config import ProverTaskConfig
from funcppo.prover.task import build_task


def test_a_zero_rule_counts_as_one_more_rule_of_the_noisy_or():
    log_odds = torch.logit(torch.tensor([0.5, 0.2, 0.0])).double()
    zero = torch.tensor([0.5, 0.0, 0.25]).double()
    noisy_or = torch.sigmoid(combine("noisy-or", "zero", log_odds, zero))
    torch.testing.assert_close(
        noisy_or, torch.tensor([0.75, 0.2, 0.25]).double(), atol=1e-7, rtol=0
    )
    largest = torch.sigmoid(combine("max-confidence", "zero", log_odds, zero))
    torch.testing.assert_close(
        largest, torch.tensor([0.5, 0.2, 0.25]).double(), atol=1e-7, rtol=0
    )
    cubed = torch.sigmoid(combine("noisy-or@3", "zero", log_odds, zero))
    expected = (1 - (1 - 0.125) ** 2) ** (1 / 3)
    assert float(cubed[0]) == pytest.approx(expected, abs=1e-7)

    # As the least confident rule it changes only what no other rule derives.
    last = combine("noisy-or", "last", log_odds, zero)
    assert torch.equal(last[:2], log_odds[:2])
    assert last[2].isfinite() and last[2] < log_odds[:2].min()


@pytest.fixture
def graph(tmp_path):
    """The most frequent type of eight people is in valid once more; a rule derives another one."""
    people = [f"p{i}" for i in range(8)]
    train = [(p, "type", "person") for p in people[:6]]
    train += [(p, "knows", q) for p, q in itertools.pairwise(people)]
    train += [("p0", "type", "king"), ("p0", "rules", "p7")]
    valid = [("p7", "type", "person"), ("p6", "type", "person")]
    folder = tmp_path / "graph"
    folder.mkdir()
    for name, triples in (("train", train), ("valid", valid)):
        lines = ["\t".join(triple) + "\n" for triple in triples]
        (folder / f"{name}.txt").write_text("".join(lines))
    rules = tmp_path / "rules.txt"
    rules.write_text("type(X, king) :- rules(X, Y)\n")
    general = tmp_path / "general.txt"
    general.write_text(rules.read_text() + "type(X, person) :- knows(X, Y)\n")
    return folder, rules, general


def test_ways_are_ranked_and_recorded(graph, tmp_path, monkeypatch):
    folder, rules, general = graph
    out = tmp_path / "record.json"
    monkeypatch.setattr(general_rules, "OBJECT_IDENTITY", {"graph": False})
    words = ["general_rules", "--data", str(folder.parent), "--only", "graph"]
    words += ["--rules", str(rules), "--general", str(general)]
    monkeypatch.setattr(sys, "argv", [*words, "--out", str(out)])
    general_rules.main()

    [row] = json.loads(out.read_text())["rows"]
    assert row["n_valid"] == 2 and row["n_general_rules"] == 1
    # One constant has five facts or more; p7 knows nobody, p6 does.
    assert row["n_zero_rules"] == 1
    assert row["derived"] == {"without": 0.0, "zero": 0.5, "general": 0.5}
    mrr = {(v["score"], v["way"]): v["mrr"] for v in row["valid"]}

    # By no rule all candidates tie: ten entities for a type, for a person those that are not known to be one.
    tied = [np.mean(1 / np.arange(1.0, n + 1)) for n in (10, 3)]
    assert mrr["noisy-or", "without"] == pytest.approx(np.mean(tied))
    # The zero rule puts `person` first about both people, and nothing about who else is one.
    with_zero = (1 + tied[1]) / 2
    assert mrr["noisy-or", "last"] == pytest.approx(with_zero)
    assert mrr["noisy-or", "zero"] == pytest.approx(with_zero)


@pytest.mark.parametrize("side", [0, 1])
def test_without_zero_rules_ranks_are_those_of_the_scorers(graph, side):
    folder, _, general = graph
    dataset = load(str(folder), rules=str(general))
    settings = ProverTaskConfig(
        max_height=1, smoothing=5.0, object_identity=False
    )
    task = build_task(dataset, settings)
    counts = general_rules.count_answers(task)
    known = general_rules.known_answers(task, (dataset.valid, dataset.test))
    ranks, _ = general_rules.rank_queries(
        task, counts, known, dataset.valid, side + 1
    )
    for i, name in enumerate(general_rules.SCORES):
        ranked = ranking.rank_split(
            task,
            dataset.valid,
            scorers.make_untrained_scorer(task, name),
            RankingProtocol(sides=(side + 1,)),
        )
        expected = rank_metrics.expected_reciprocal_ranks(ranked.counts)
        torch.testing.assert_close(ranks[i, 0], expected, check_dtype=False)
