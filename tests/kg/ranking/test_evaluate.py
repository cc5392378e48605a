"""Evaluation in chunks: the records of queries by hand, and that they do not depend on the chunks."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from funcppo.kg.config import ProverTaskConfig
from funcppo.kg.graph import loaders
from funcppo.kg.graph.dataset import Dataset
from funcppo.kg.logic.proof import Node, Proof
from funcppo.kg.ranking import evaluate, rank_metrics, ranking
from funcppo.kg.ranking.evaluate import Evaluator
from funcppo.kg.ranking.ranking import RankingProtocol
from funcppo.kg.scores.score import parse
from funcppo.kg.search import task as prover_task
from tests.kg.ranking.scores import FunctionScore

TWO_STEPS = ProverTaskConfig(max_height=2)


def make_evaluator(
    dataset: Dataset,
    score: str,
    prover: ProverTaskConfig = TWO_STEPS,
    **protocol,
) -> Evaluator:
    task = prover_task.build_task(dataset, prover)
    return Evaluator(
        task=task,
        protocol=RankingProtocol(**protocol),
        score=parse(score),
        prove=None,
        all_scores=False,
    )


def all_records(evaluator_, split):
    return [
        r
        for chunk in evaluate.evaluate_queries(
            evaluator_, split, np.arange(len(split))
        )
        for r in chunk
    ]


# -- a worked example

HOPS = [
    ("a", "hop", "b"),
    ("b", "hop", "c"),
    ("c", "hop", "d"),
    ("a", "far", "c"),
]


def test_the_records_of_a_query_are_worked_by_hand():
    """far(b, d) follows by the rule, as far(b, c) does; of log-odds -1 and -0.5, it ranks second of four tails.

    Of the heads ?, far(?, d): only c, by hop(c, d), and b are derived.
    """
    dataset = loaders.from_triples(
        HOPS,
        rules="far(X, Y) :- hop(X, Z), hop(Z, Y)\nfar(X, Y) :- hop(X, Y)",
        valid=[("b", "far", "d")],
    )
    task = prover_task.build_task(dataset, ProverTaskConfig(max_height=1))
    b, d = (dataset.entities.index(name) + 1 for name in "bd")

    def score(atoms):
        return torch.where((atoms[:, 1] == b) & (atoms[:, 2] == d), -1.0, -0.5)

    root = Node(
        goal=(2, b, d), rule=0, substitution=(), probability=None, children=()
    )
    proof, calls = Proof(nodes=(root,)), []
    evaluator_ = Evaluator(
        task=task,
        protocol=RankingProtocol(),
        score=FunctionScore(score),
        prove=lambda atoms: calls.append(atoms.tolist()) or [proof],
        all_scores=True,
    )
    head, tail = all_records(evaluator_, dataset.valid)
    assert calls == [[[2, b, d]]]  # one proof for both sides
    common = {
        "query_row": 0,
        "relation": "far",
        "atom": "far(b, d)",
        "n_better": 1,
        "n_equal": 0,
        "n_candidates": 4,
    }
    common |= {
        "answer_provable": True,
        "status": "proved",
        "log_score": round(-math.log(1 + math.e), 4),
        "quantised_score": -10000,
    }
    common |= {
        "rank": {"optimistic": 2, "pessimistic": 2, "realistic": 2},
        "reciprocal_rank": 0.5,
        "n_scored": 2,
    }
    common |= {"near_boundary": False, "other_quantised_scores": [-5000]}
    for record, side in ((head, "head"), (tail, "tail")):
        assert record["side"] == side and common.items() <= record.items()
        assert record["proof"]["nodes"][0]["goal_text"] == "far(b, d)"
        assert record.keys() == common.keys() | {"side", "proof"}


def test_a_status_says_whether_an_answer_was_proved_missed_or_refuted():
    status = evaluate._answer_status
    assert status(True, -0.5, -float("inf")) == "proved"
    assert status(True, None, -float("inf")) == "missed"
    assert status(True, -100.5, -100.0) == "missed"  # greedy, without a proof
    assert (
        status(False, None, -float("inf"))
        == status(False, -100.5, -100.0)
        == "refuted"
    )


# -- the ranking of a whole split


def test_records_hold_the_ranking_of_the_whole_split():
    evaluator_ = make_evaluator(loaders.load("family_tree:60:0"), "exists@1")
    split = evaluator_.task.dataset.valid
    ranked = ranking.rank_split(
        evaluator_.task, split, evaluator_.score, evaluator_.protocol
    )
    reciprocal = rank_metrics.expected_reciprocal_ranks(ranked.counts).tolist()
    order = torch.argsort(ranked.query_row, stable=True).tolist()
    assert ranked.counts.n_equal.any()
    records = all_records(evaluator_, split)
    assert [r["query_row"] for r in records] == ranked.query_row[order].tolist()
    for name in ("n_better", "n_equal", "n_candidates"):
        assert [r[name] for r in records] == getattr(ranked.counts, name)[
            order
        ].tolist()
    assert [r["reciprocal_rank"] for r in records] == [
        reciprocal[i] for i in order
    ]
    assert [r["answer_provable"] for r in records] == ranked.answer_provable[
        order
    ].tolist()


def test_the_records_of_some_queries_are_among_those_of_all():
    """Corruptions are keyed by the row of the split, whatever else is ranked."""
    evaluator_ = make_evaluator(
        loaders.load("family_tree:60:0"), "noisy-or", n_negatives=5
    )
    split = evaluator_.task.dataset.test
    every = [
        r
        for part in evaluate.evaluate_queries(
            evaluator_, split, np.arange(len(split))
        )
        for r in part
    ]
    some = [
        r
        for part in evaluate.evaluate_queries(
            evaluator_, split, np.array([1, 4, 7])
        )
        for r in part
    ]
    assert some == [
        record for record in every if record["query_row"] in (1, 4, 7)
    ]


@pytest.mark.parametrize(
    ("offset", "near"),
    [(0.0, 0), (0.5e-4 - 2e-6, 69), (0.5e-4 + 2e-6, 69), (0.5e-4 + 8e-6, 0)],
)
def test_queries_whose_scores_could_round_otherwise_are_counted(offset, near):
    """Every score is a grid line plus the offset; half a line is where rounding goes the other way."""
    evaluator_ = make_evaluator(
        loaders.load("family_tree:60:0"), "noisy-or", sides=(2,)
    )
    scorer = lambda atoms: torch.full(
        (len(atoms),), -0.25 + offset, dtype=torch.float64
    )
    evaluator_ = dataclasses.replace(evaluator_, score=FunctionScore(scorer))
    split = evaluator_.task.dataset.valid
    found = [
        r
        for part in evaluate.evaluate_queries(
            evaluator_, split, np.arange(len(split))
        )
        for r in part
    ]
    assert (
        evaluate.summarise_records(
            found, evaluator_.task.dataset.predicates, with_auc=False
        )["n_near_boundary"]
        == near
    )


# -- windows, which processes share


def test_windows_hold_every_query_once_and_their_records_are_those_of_chunks():
    dataset = loaders.load("family_tree:30:1")
    evaluator_ = make_evaluator(dataset, "noisy-or")
    rows = np.arange(len(dataset.test))
    windows = evaluate.plan_windows(evaluator_, dataset.test, rows)
    assert np.concatenate(windows).tolist() == rows.tolist()
    records = [
        record
        for window in windows
        for query in evaluate.rank_window(evaluator_, dataset.test, window)
        for record in query
    ]
    assert records == all_records(evaluator_, dataset.test)
